/*
 * The member's side of a change: its part of an epoch that the leader has asked for and that is not decided yet.  At
 * most one of a group.  It is put into service when the records say so (view.c), and goes when the leader aborts it,
 * another leader clears the field, another epoch was agreed on, or nobody has decided about it in time.
 *
 * Whatever is lost on the way, that the records name an epoch whose part is not there is seen, reported, and mended
 * (heal.c): so nothing here has to be certain what became of a request.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define DECIDED_MS 50000u /* longer than a leader takes from Prepare to the answer of its commit */

/* ---- what all requests have -------------------------------------------------------------- */

ep_status part_heed(const struct ep_groups *groups, uint64_t fence, struct ep_error *error)
{
    if (!groups->closing && !groups->loaded)
        return ep_error_set(error, EP_UNAVAILABLE, "the server is starting");
    return term_check(groups, fence, error);
}

/* ---- the part ------------------------------------------------------------------------------ */

void part_drop(struct group *group, const char *why)
{
    struct epoch *part = group->prepared;

    if (!part)
        return;
    EP_INFO("group", "a prepared epoch is dropped", EP_S("group", group->name), EP_U("epoch", part->number),
            EP_S("why", why));
    group->prepared = NULL;
    if (!group->visible && !group->change)
        group->dead = true;
    epoch_free(part);
    group_later(group->groups);
}

/* Two leaders may have prepared the same number, and only one of them has had its way.  One leader commits what it had
 * prepared. */
struct epoch *part_take(struct group *group, const Ep__V1__GroupStatus *agreed)
{
    struct epoch *part = group->prepared;

    if (!part || part->number != agreed->epoch || part->fence != agreed->term || part->part != EPOCH_FORMED)
        return NULL;
    group->prepared = NULL;
    return part;
}

/* What this server has prepared for itself as a leader; whether it still leads is all the same. */
void part_give_up(struct group *group, uint64_t fence, const char *why)
{
    if (group->prepared && group->prepared->fence == fence)
        part_drop(group, why);
}

void part_sweep(struct group *group)
{
    if (group->prepared && group_now(group->groups) > group->prepared->expires)
        part_drop(group, "nobody has decided about it");
}

static struct epoch *find_part(struct ep_groups *groups, const char *name, uint64_t number, struct ep_error *error)
{
    struct group *group = group_find(groups, name);

    if (group && group->prepared && group->prepared->number == number)
        return group->prepared;
    ep_error_set(error, EP_NOT_FOUND, "epoch %llu of group %.64s is not prepared on node %s",
                 (unsigned long long)number, name, nodes_self(groups));
    return NULL;
}

/* ---- Prepare --------------------------------------------------------------------------------- */

static ep_status check_release(const struct ep_groups *groups, const Ep__V1__PrepareRequest *request,
                               struct ep_error *error)
{
    char differs[128];

    if (!nodes_release_differs(request->release, differs, sizeof differs))
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION, "the leader, node %.63s, is of %s as node %.63s",
                        request->leader, differs, nodes_self(groups));
}

/* Of those that are here, in service or with workers that have not left yet; 0: there is none.  The one in service is not
 * the highest where the store was set back. */
static uint64_t highest_here(const struct group *group)
{
    uint64_t highest = group->epoch ? group->epoch->number : 0;

    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        highest = epoch->number > highest ? epoch->number : highest;
    return highest;
}

/* Workers go over to a higher one only, and what nodes tell each other of ranks goes by its number. */
static ep_status check_number(const struct ep_groups *groups, const struct group *group, uint64_t number,
                              struct ep_error *error)
{
    const uint64_t highest = group ? highest_here(group) : 0;

    if (number > highest)
        return EP_OK;
    if (!highest)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "status.epoch is 0: must be at least 1");
    return ep_error_set(error, EP_FAILED_PRECONDITION, "status.epoch is %llu: node %s has epoch %llu of group %s, and the next "
                        "one must be above it", (unsigned long long)number, nodes_self(groups),
                        (unsigned long long)highest, group->name);
}

static ep_status check_prepare(struct ep_groups *groups, const Ep__V1__PrepareRequest *request, struct ep_error *error)
{
    const struct group *group = group_find(groups, request->group);
    ep_status status = part_heed(groups, request->fence, error);

    if (!status)
        status = ep_group_name_check(request->group, error);
    if (!status)
        status = check_release(groups, request, error);
    if (!status && !request->status)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "status is missing");
    if (!status && request->status->term != request->fence)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "status.term is %llu: must be that of the leader, %llu",
                              (unsigned long long)request->status->term, (unsigned long long)request->fence);
    if (!status && group && group->phase == EP_PHASE(DRAINING))
        status = ep_error_set(error, EP_UNAVAILABLE, "group %s is being deleted on node %s: its workers have to let go",
                              group->name, nodes_self(groups));
    if (!status)
        status = check_number(groups, group, request->status->epoch, error);
    if (!status && group && group->prepared && group->prepared->number == request->agreed)
        status = ep_error_set(error, EP_UNAVAILABLE, "node %s has not heard yet that epoch %llu of group %s was agreed on: "
                              "try again", nodes_self(groups), (unsigned long long)request->agreed, group->name);
    return status;
}

/* The leader has planned with what it knew of this node; what is so now this node knows, and what would fit. */
static ep_status check_room(const struct epoch *part, struct ep_error *error)
{
    const struct ep_groups *groups = part->group->groups;
    struct node_table own = nodes_own(groups);
    ep_status status = own.n ? ep_plan_fit_part(&part->settled, own.nodes, &part->plan, error) : EP_OK;

    nodes_clear(&own);
    return status;
}

static ep_status make_part(struct group *group, const Ep__V1__PrepareRequest *request, struct ep_team_card *card,
                           struct ep_error *error)
{
    struct epoch *part;
    ep_status status = epoch_new(group, request->status, &part, error);

    if (status)
        return status;
    status = check_room(part, error);
    if (!status)
        status = epoch_prepare(part, card, error);
    if (status) {
        epoch_free(part);
        return status;
    }
    part->expires = group_now(group->groups) + DECIDED_MS;
    group->prepared = part;
    return EP_OK;
}

static void serve_prepare(struct ep_groups *groups, const ProtobufCMessage *message, ep_cluster_done_fn done,
                          void *user)
{
    const Ep__V1__PrepareRequest *request = (const Ep__V1__PrepareRequest *)message;
    Ep__V1__PrepareReply reply = EP__V1__PREPARE_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_team_card card = { { 0 } };
    struct group *group = NULL;

    if (!check_prepare(groups, request, &error)) {
        group = group_find(groups, request->group);
        if (!group)
            group = group_new(groups, request->group);
        part_drop(group, "it is asked for anew");
        group->dead = false;
        if (make_part(group, request, &card, &error) && !group->visible && !group->change)
            group->dead = true;
        group_later(groups);
    }
    reply.card = (ProtobufCBinaryData){ .data = card.bytes, .len = sizeof card.bytes };
    done(&error, error.status ? NULL : &reply.base, user);
}

void ep_groups_prepare(struct ep_groups *groups, const Ep__V1__PrepareRequest *request,
                       ep_cluster_done_fn done, void *user)
{
    term_serve(groups, request->fence, &request->base, serve_prepare, done, user);
}

/* ---- Connect ----------------------------------------------------------------------------------- */

struct asked {
    ep_cluster_done_fn done;
    void *user;
};

static void on_connected(const struct ep_error *error, void *user)
{
    static const Ep__V1__ConnectReply reply = EP__V1__CONNECT_REPLY__INIT;
    struct asked asked = *(struct asked *)user;

    free(user);
    asked.done(error, error->status ? NULL : &reply.base, asked.user);
}

static ep_status check_cards(const struct epoch *part, const Ep__V1__ConnectRequest *request, struct ep_error *error)
{
    const size_t must = (size_t)part->plan.n_nodes * sizeof(struct ep_team_card);

    if (!epoch_spans(part) || request->cards.len == must)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "cards has %zu bytes: the epoch has %u members, of %zu bytes each",
                        request->cards.len, part->plan.n_nodes, sizeof(struct ep_team_card));
}

static ep_status check_connect(struct ep_groups *groups, const Ep__V1__ConnectRequest *request, struct epoch **part,
                               struct ep_error *error)
{
    ep_status status = part_heed(groups, request->fence, error);

    if (!status && !(*part = find_part(groups, request->group, request->epoch, error)))
        status = error->status;
    if (!status && ((*part)->fence != request->fence || (*part)->part != EPOCH_PREPARED))
        status = ep_error_set(error, EP_FAILED_PRECONDITION, "epoch %llu of group %s was prepared for somebody else, "
                              "or is connected already", (unsigned long long)request->epoch, request->group);
    return status ? status : check_cards(*part, request, error);
}

static void serve_connect(struct ep_groups *groups, const ProtobufCMessage *message, ep_cluster_done_fn done,
                          void *user)
{
    const Ep__V1__ConnectRequest *request = (const Ep__V1__ConnectRequest *)message;
    struct ep_error error = EP_ERROR_INIT;
    struct epoch *part = NULL;
    struct asked *asked;

    if (check_connect(groups, request, &part, &error)) {
        done(&error, NULL, user);
        return;
    }
    asked = group_allocate(1, sizeof *asked);
    *asked = (struct asked){ done, user };
    epoch_connect(part, (const struct ep_team_card *)request->cards.data, on_connected, asked);
}

void ep_groups_connect(struct ep_groups *groups, const Ep__V1__ConnectRequest *request,
                       ep_cluster_done_fn done, void *user)
{
    term_serve(groups, request->fence, &request->base, serve_connect, done, user);
}

/* ---- Abort --------------------------------------------------------------------------------------- */

static void give_up(struct group *group, uint64_t fence)
{
    if (group->prepared && group->prepared->fence < fence)
        part_drop(group, "another leader has nothing to do with it");
    if (group->closed.fence < fence)
        close_lift(group, group->closed.deletion);
}

static void drop_older(struct ep_groups *groups, uint64_t fence)
{
    for (size_t i = 0; i < groups->n; i++)
        give_up(groups->list[i], fence);
}

static void serve_abort(struct ep_groups *groups, const ProtobufCMessage *message, ep_cluster_done_fn done,
                        void *user)
{
    const Ep__V1__AbortRequest *request = (const Ep__V1__AbortRequest *)message;
    static const Ep__V1__AbortReply reply = EP__V1__ABORT_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct group *group;
    struct epoch *part;

    if (!term_check(groups, request->fence, &error)) {
        if (!*request->group)
            drop_older(groups, request->fence);
        else if (request->deletion && (group = group_find(groups, request->group)))
            close_lift(group, request->deletion);
        else if ((part = find_part(groups, request->group, request->epoch, NULL)))
            part_drop(part->group, request->reason);
    }
    done(&error, error.status ? NULL : &reply.base, user);
}

void ep_groups_abort(struct ep_groups *groups, const Ep__V1__AbortRequest *request, ep_cluster_done_fn done,
                     void *user)
{
    term_serve(groups, request->fence, &request->base, serve_abort, done, user);
}
