/*
 * node drain --move: the node's ranks go to other nodes, and workers that follow with them, before anybody is asked to
 * leave.  The node takes no new work from the beginning, so that no placement finds it; then each group is placed anew as
 * its placement has it, and its workers are waited for, one group after the other.
 */
#include "move.h"

#include <inttypes.h>
#include <poll.h>
#include <string.h>

#include "ep_clock.h"
#include "group.h"

enum { LOOK_MS = 250 };

struct move {
    struct ep_admin *admin;
    const char *node, *reason; /* reason: NULL, there is none */
    uint64_t deadline_ns;
    ProtobufCMessage **drained; /* the node, when that is done */
};

static int64_t left_ms(const struct move *move)
{
    const uint64_t now = ep_clock_ns();

    return now < move->deadline_ns ? (int64_t)((move->deadline_ns - now) / EP_NS_PER_MS) + 1 : 1;
}

size_t ep_group_ranks_on(const Ep__V1__Group *group, const char *node)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);
    size_t n = 0;

    for (size_t i = 0; i < status->n_ranks; i++)
        n += strcmp(status->ranks[i]->node, node) == 0;
    return n;
}

static ep_status list_groups(const struct move *move, Ep__V1__ListGroupsReply **out, struct ep_error *error)
{
    Ep__V1__ListGroupsRequest request = EP__V1__LIST_GROUPS_REQUEST__INIT;

    return ep_admin_call(move->admin, "ListGroups", &request.base, 0, (ProtobufCMessage **)out, error);
}

/* ---- placing ------------------------------------------------------------------------------------- */

/* Where each of its ranks is, an operator has written down: then only an operator knows where else. */
static ep_status check_kind(const struct move *move, const Ep__V1__Group *group, struct ep_error *error)
{
    const Ep__V1__Placement *placement = ep_group_spec(group)->placement;

    if (!ep_group_ranks_on(group, move->node) || !placement ||
        placement->nodes != EP__V1__NODE_STRATEGY__NODE_STRATEGY_EXPLICIT)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "group %s: its placement names a node for each rank, and %s for %zu of them: give it a new file first "
                        "(ep-admin group update %s --placement=FILE)",
                        group->name, move->node, ep_group_ranks_on(group, move->node), group->name);
}

/* Without a word about nodes or experts: the placement that it has, made anew. */
static ep_status place_anew(const struct move *move, const char *name, bool dry_run, Ep__V1__Group **out,
                            struct ep_error *error)
{
    Ep__V1__UpdateGroupRequest request = EP__V1__UPDATE_GROUP_REQUEST__INIT;
    Ep__V1__Placement same = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;
    char field[] = "placement", *fields[] = { field };

    spec.placement = &same;
    request.name = (char *)(uintptr_t)name;
    request.spec = &spec;
    request.fields = fields;
    request.n_fields = 1;
    request.dry_run = dry_run;
    return ep_admin_call(move->admin, "UpdateGroup", &request.base, left_ms(move), (ProtobufCMessage **)out, error);
}

/* Ranks for which there is no room elsewhere stay: then nothing is changed. */
static ep_status check_room(const struct move *move, const char *name, struct ep_error *error)
{
    Ep__V1__Group *plan;
    ep_status status = place_anew(move, name, true, &plan, error);
    size_t n;

    if (status != EP_OK)
        return status;
    n = ep_group_ranks_on(plan, move->node);
    ep_admin_free(plan);
    if (!n)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION, "the other nodes have no room for %zu of its ranks", n);
}

static ep_status move_ranks(const struct move *move, const Ep__V1__Group *group, struct ep_error *error)
{
    Ep__V1__Group *moved;
    ep_status status = check_room(move, group->name, error);

    if (status == EP_OK)
        status = place_anew(move, group->name, false, &moved, error);
    if (status != EP_OK)
        return status;
    ep_admin_note(move->admin, "group %s: placed anew, epoch %" PRIu64, group->name, ep_group_status(moved)->epoch);
    ep_admin_free(moved);
    return EP_OK;
}

/* ---- waiting -------------------------------------------------------------------------------------- */

/* NULL, and EP_OK: it was deleted. */
static ep_status get_group(const struct move *move, const char *name, Ep__V1__Group **out, struct ep_error *error)
{
    Ep__V1__GetGroupRequest request = EP__V1__GET_GROUP_REQUEST__INIT;
    ep_status status;

    *out = NULL;
    request.name = (char *)(uintptr_t)name;
    status = ep_admin_call_service(move->admin, &ep__v1__admin__descriptor, "GetGroup", &request.base, 0,
                                   (ProtobufCMessage **)out, error);
    return status == EP_NOT_FOUND ? EP_OK : status;
}

/* Nobody is in an older epoch any more, and the newest has nothing on the node. */
static bool has_gone_over(const struct move *move, const Ep__V1__Group *group)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);

    return !ep_group_ranks_on(group, move->node) && !status->n_draining_epochs &&
           status->phase != EP__V1__PHASE__PHASE_RECONFIGURING;
}

/* What it waits for is what an operator has to see to: a worker at a rank's new place. */
static void tell(const struct move *move, const Ep__V1__Group *group, char *said, size_t size)
{
    const char *reason = ep_group_status(group)->reason;

    if (strncmp(reason, said, size - 1) == 0)
        return;
    snprintf(said, size, "%s", reason);
    if (*reason)
        ep_admin_note(move->admin, "group %s: %s", group->name, reason);
}

static ep_status late(const Ep__V1__Group *group, struct ep_error *error)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);

    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "its workers have not gone over to epoch %" PRIu64 "%s%s", status->epoch,
                        *status->reason ? ": " : "", status->reason);
}

static ep_status wait_for(const struct move *move, const char *name, struct ep_error *error)
{
    char said[256] = "";
    bool over = false;

    while (!over) {
        Ep__V1__Group *group;
        ep_status status = get_group(move, name, &group, error);

        if (status != EP_OK || !group)
            return status;
        over = has_gone_over(move, group);
        if (!over)
            tell(move, group, said, sizeof said);
        if (!over && ep_clock_ns() > move->deadline_ns)
            status = late(group, error);
        ep_admin_free(group);
        if (status != EP_OK)
            return status;
        if (!over)
            poll(NULL, 0, LOOK_MS);
    }
    return EP_OK;
}

/* ---- all of it ------------------------------------------------------------------------------------- */

static bool is_empty(const struct move *move)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;
    ProtobufCMessage *reply;
    struct ep_error error;
    bool empty;

    request.name = (char *)(uintptr_t)move->node;
    if (ep_admin_call(move->admin, "GetNode", &request.base, 0, &reply, &error) != EP_OK)
        return false;
    empty = ((Ep__V1__NodeInfo *)reply)->attachments == 0;
    ep_admin_free(reply);
    return empty;
}

/* A group that was moved before, as this was begun and not ended, may still have workers there. */
static ep_status move_group(const struct move *move, const Ep__V1__Group *group, struct ep_error *error)
{
    const bool here = ep_group_ranks_on(group, move->node) > 0;
    ep_status status = check_kind(move, group, error);

    if (status != EP_OK || (!here && (has_gone_over(move, group) || is_empty(move))))
        return status;
    if (here)
        status = move_ranks(move, group, error);
    if (status == EP_OK)
        status = wait_for(move, group->name, error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "group %s", group->name);
}

static ep_status move_all(const struct move *move, struct ep_error *error)
{
    Ep__V1__ListGroupsReply *list;
    ep_status status = list_groups(move, &list, error);

    if (status != EP_OK)
        return status;
    for (size_t i = 0; status == EP_OK && i < list->n_groups; i++)
        status = move_group(move, list->groups[i], error);
    ep_admin_free(list);
    return status;
}

static ep_status check_all(const struct move *move, struct ep_error *error)
{
    Ep__V1__ListGroupsReply *list;
    ep_status status = list_groups(move, &list, error);

    if (status != EP_OK)
        return status;
    for (size_t i = 0; status == EP_OK && i < list->n_groups; i++)
        status = check_kind(move, list->groups[i], error);
    ep_admin_free(list);
    return status;
}

ep_status ep_node_drain_call(struct ep_admin *admin, const char *node, const char *reason, bool workers_stay,
                             ProtobufCMessage **drained, struct ep_error *error)
{
    Ep__V1__DrainNodeRequest request = EP__V1__DRAIN_NODE_REQUEST__INIT;

    request.name = (char *)(uintptr_t)node;
    request.workers_stay = workers_stay;
    if (reason)
        request.reason = (char *)(uintptr_t)reason;
    return ep_admin_call(admin, "DrainNode", &request.base, 0, drained, error);
}

static ep_status cordon(const struct move *move, struct ep_error *error)
{
    ProtobufCMessage *reply;
    ep_status status = ep_node_drain_call(move->admin, move->node, move->reason, true, &reply, error);

    if (status == EP_OK)
        ep_admin_free(reply);
    return status;
}

static ep_status ask_to_leave(const struct move *move, struct ep_error *error)
{
    return ep_node_drain_call(move->admin, move->node, move->reason, false, move->drained, error);
}

/* A store that does not answer, or servers of which none leads, may do so soon.  Each step finds what it has done before. */
static ep_status keep_trying(const struct move *move, ep_status (*step)(const struct move *, struct ep_error *),
                             struct ep_error *error)
{
    bool told = false;
    ep_status status;

    while ((status = step(move, error)) == EP_UNAVAILABLE && ep_clock_ns() < move->deadline_ns) {
        if (!told)
            ep_admin_note(move->admin, "%s; it is tried again", error->text);
        told = true;
        poll(NULL, 0, LOOK_MS);
    }
    return status;
}

ep_status ep_node_move(struct ep_admin *admin, const char *node, const char *reason, int64_t wait_ms,
                       ProtobufCMessage **drained, struct ep_error *error)
{
    const struct move move = { admin, node, reason, ep_clock_ns() + (uint64_t)wait_ms * EP_NS_PER_MS, drained };
    ep_status status = check_all(&move, error);

    if (status == EP_OK)
        status = keep_trying(&move, cordon, error);
    if (status != EP_OK)
        return status;
    status = keep_trying(&move, move_all, error);
    if (status == EP_OK)
        status = keep_trying(&move, ask_to_leave, error);
    if (status != EP_OK)
        ep_admin_note(admin, "%s takes no new workers, and those there were not asked to leave: the same again goes on, without "
                             "--move they are asked, 'node uncordon %s' takes it back", node, node);
    return status;
}
