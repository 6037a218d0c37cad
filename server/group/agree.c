/*
 * The leader's side of a change of a group:
 *
 *   PREPARE   every member makes its part of the epoch, beside the one that runs
 *   OFFER     one has less room than it offered when this was planned: the offers that come now, and PREPARE once more
 *   CONNECT   and reaches all others
 *   CLOSE     a deletion, instead of these: no rank is claimed on other nodes from now on, and none is (delete.c)
 *   COMMIT    the records are written, in a commit that only the leader of this term can make: that decides
 *   SEE       this server's own watch has told it, so that what is answered is what is there
 *   SETTLE    the members say that they have put it into service, or have let go of what was deleted; bounded
 *
 * Live changes and forced deletions begin with COMMIT.  What fails before is aborted at all members.  A commit whose
 * answer was an error may still be there: then the view tells, and heal.c mends what the abort took away.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"
#include "window.h"

#define CLOSE_MS   2000u
#define PREPARE_MS 10000u
#define OFFER_MS   1000u /* what members had for the first plan is theirs again, and the store tells what they have */
#define CONNECT_SLACK_MS 2000u /* beyond what a member takes at most */
#define ABORT_MS   2000u
#define SEE_MS     5000u
#define SETTLE_MS  3000u

static struct ep_groups *groups_of(const struct change *change)
{
    return change->group->groups;
}

/* What fails before the commit has to be undone there. */
static bool has_members(const struct change *change)
{
    return change->plan.n_nodes > 0;
}

static bool makes_epoch(const struct change *change)
{
    return has_members(change) && change->kind != CHANGE_DELETION;
}

static bool is_own(const struct agreed *member)
{
    return !strcmp(member->change->plan.name[member->node], nodes_self(groups_of(member->change)));
}

/* How long the last step took goes into the history; the two after the commit are one to whoever reads it. */
static void enter(struct change *change, int step)
{
    const uint64_t now = ep_clock_ns(), took = (now - change->step_ns) / EP_NS_PER_US + 1;

    switch (change->step) {
    case AGREE_BEGIN: break;
    case AGREE_CLOSE:
    case AGREE_PREPARE:
    case AGREE_OFFER: change->entry->prepare_us += took; break;
    case AGREE_CONNECT: change->entry->connect_us = took; break;
    case AGREE_COMMIT: change->entry->commit_us = took; break;
    case AGREE_SEE:
    case AGREE_SETTLE: change->entry->settle_us += took;
    }
    change->step = step;
    change->step_ns = now;
}

/* ---- progress -------------------------------------------------------------------------------- */

#define SHOWN_NAMES 3

static void begin_asking(struct change *change, int step)
{
    enter(change, step);
    change->waiting = change->plan.n_nodes;
    for (uint32_t i = 0; i < change->plan.n_nodes; i++)
        change->members[i].answered = false;
}

static size_t append_names(const struct change *change, char *text, size_t used)
{
    uint32_t shown = 0;

    for (uint32_t i = 0; i < change->plan.n_nodes && shown < SHOWN_NAMES && used < REASON_MAX; i++)
        if (!change->members[i].answered)
            used += (size_t)snprintf(text + used, REASON_MAX - used, "%s%s", shown++ ? ", " : "", change->plan.name[i]);
    return used;
}

static size_t describe(const struct change *change, char text[static REASON_MAX])
{
    return (size_t)snprintf(text, REASON_MAX, "epoch %llu is being formed%s", (unsigned long long)change->status->epoch,
                            change->kind == CHANGE_RENEWAL ? " anew" : "");
}

static void enter_phase(const struct change *change)
{
    char text[REASON_MAX];

    describe(change, text);
    if (change->group->phase != EP_PHASE(FORMING))
        group_phase(change->group, EP_PHASE_CHANGE, text);
}

/* For whoever watches: the step, and whose answer is missing. */
static void show_progress(const struct change *change)
{
    struct group *group = change->group;
    size_t used = describe(change, group->reason);

    if (change->step == AGREE_COMMIT) {
        snprintf(group->reason + used, REASON_MAX - used, ": COMMIT is in the store's hands");
    } else {
        used += (size_t)snprintf(group->reason + used, REASON_MAX - used, ": %s waits for %u of %u nodes: ",
                                 change->step == AGREE_PREPARE ? "PREPARE" : "CONNECT", change->waiting,
                                 change->plan.n_nodes);
        used = append_names(change, group->reason, used);
        if (change->waiting > SHOWN_NAMES && used < REASON_MAX)
            snprintf(group->reason + used, REASON_MAX - used, " and %u more", change->waiting - SHOWN_NAMES);
    }
    status_changed(group);
}

/* Seldom enough for a group of hundreds of nodes: each time that half of those who were missing have answered. */
static bool is_worth_showing(uint32_t waiting)
{
    return waiting && !(waiting & (waiting - 1));
}

static void finish(struct change *change, const struct ep_error *error)
{
    enter(change, AGREE_BEGIN);
    change_finish(change, error);
}

/* ---- abort ---------------------------------------------------------------------------------- */

/* Who does not hear it drops its part when its time is over. */
static void on_aborted(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct ep_groups *groups = user;

    (void)error, (void)reply;
    groups->calls--;
    group_later(groups);
}

static void abort_at(struct ep_groups *groups, const char *node, const Ep__V1__AbortRequest *request)
{
    groups->calls++;
    if (!strcmp(node, nodes_self(groups)))
        ep_groups_abort(groups, request, on_aborted, groups);
    else
        ep_cluster_call(groups->cluster, node, &ep__v1__node__descriptor, "Abort", &request->base, ABORT_MS, on_aborted,
                        groups);
}

static void abort_parts(const struct change *change, const char *why)
{
    Ep__V1__AbortRequest request = EP__V1__ABORT_REQUEST__INIT;

    request.group = change->group->name;
    if (makes_epoch(change))
        request.epoch = change->status->epoch;
    else
        request.deletion = change->entry->number;
    request.reason = (char *)(uintptr_t)why;
    request.fence = change->fence;
    for (uint32_t i = 0; i < change->plan.n_nodes; i++)
        if (is_own(&change->members[i]))
            part_give_up(change->group, change->fence, why);
        else
            abort_at(groups_of(change), change->plan.name[i], &request);
}

static void give_up(struct change *change, const struct ep_error *error)
{
    const struct ep_error why = *error;

    if (has_members(change))
        abort_parts(change, why.text);
    finish(change, &why);
}

void agree_clear_field(struct ep_groups *groups)
{
    Ep__V1__AbortRequest request = EP__V1__ABORT_REQUEST__INIT;

    request.reason = (char *)(uintptr_t)"another server leads";
    request.fence = ep_cluster_guard(groups->cluster).expected;
    for (size_t i = 0; i < ep_cluster_count(groups->cluster); i++)
        if (ep_cluster_at(groups->cluster, i)->alive)
            abort_at(groups, ep_cluster_at(groups->cluster, i)->name, &request);
}

/* ---- commit ----------------------------------------------------------------------------------- */

/*
 * Does this server lead in the term in which the change began?  If not, that is why members or the store refused it,
 * whatever they say: who leads now lets them drop their parts.  It may be tried again.
 */
static ep_status check_term(const struct change *change, struct ep_error *error)
{
    const struct ep_cluster *cluster = groups_of(change)->cluster;
    const struct ep_session *session = ep_cluster_session(cluster);

    if (change_check_lead(groups_of(change), error) != EP_OK)
        return error->status;
    if (session && ep_session_alive(session) && ep_cluster_guard(cluster).expected == change->fence)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "the lead was lost before this was decided, and nothing is changed: "
                        "try again");
}

static void on_committed(const struct ep_error *error, uint64_t revision, void *user)
{
    struct change *change = user;
    struct ep_error lost = EP_ERROR_INIT;

    if (error->status) {
        const bool refused = error->status == EP_FAILED_PRECONDITION;

        give_up(change, refused && check_term(change, &lost) != EP_OK ? &lost : error);
        return;
    }
    change->revision = revision;
    enter(change, AGREE_SEE);
    change->until = group_now(groups_of(change)) + SEE_MS;
    agree_look(change->group);
}

static void commit(struct change *change)
{
    struct group *group = change->group;

    enter(change, AGREE_COMMIT);
    if (makes_epoch(change))
        show_progress(change);
    switch (change->kind) {
    case CHANGE_DELETION: records_delete(group, on_committed, change); break;
    case CHANGE_RENEWAL: records_renew(group, change->status, on_committed, change); break;
    default: records_save(group, change->asked, change->status, on_committed, change);
    }
}

/* ---- a member that has less than it offered ------------------------------------------------------ */

/* Another member's word about its memory, for the first time; a renewal is tried again anyway. */
static bool is_out_of_date(const struct change *change)
{
    return change->step == AGREE_PREPARE && change->failure.status == EP_RESOURCE_EXHAUSTED && change->asked &&
           !change->again && strcmp(change->plan.name[change->refuser], nodes_self(groups_of(change))) != 0 &&
           ep_cluster_leads(groups_of(change)->cluster);
}

static void wait_for_offers(struct change *change)
{
    abort_parts(change, change->failure.text);
    enter(change, AGREE_OFFER);
    change->again = true;
    change->until = group_now(groups_of(change)) + OFFER_MS;
}

static void look_at_offers(struct change *change)
{
    const struct ep_error why = change->failure;

    if (group_now(groups_of(change)) < change->until)
        return;
    if (change_plan_again(change))
        agree_begin(change);
    else
        finish(change, &why);
}

/* ---- prepare and connect ------------------------------------------------------------------------ */

static void ask_all_to_connect(struct change *change);

/* The step is over when all have answered, well or not: nobody is left in the middle of something. */
static void answered(struct agreed *member)
{
    struct change *change = member->change;
    struct ep_error lost = EP_ERROR_INIT;

    member->answered = true;
    if (--change->waiting) {
        if (makes_epoch(change) && is_worth_showing(change->waiting))
            show_progress(change);
        return;
    }
    if (check_term(change, &lost) != EP_OK)
        change->failure = lost;
    if (is_out_of_date(change))
        wait_for_offers(change);
    else if (change->failure.status)
        give_up(change, &change->failure);
    else if (change->step == AGREE_PREPARE)
        ask_all_to_connect(change);
    else
        commit(change);
}

static void note_failure(struct agreed *member, const struct ep_error *error)
{
    struct change *change = member->change;

    if (!error->status || change->failure.status)
        return;
    change->failure = *error;
    change->refuser = member->node;
    if (change->plan.n_nodes > 1 || !is_own(member))
        ep_error_prefix(&change->failure, "%s", change->plan.name[member->node]);
}

static void end_call(const struct agreed *member)
{
    if (is_own(member))
        return;
    groups_of(member->change)->calls--;
    group_later(groups_of(member->change));
}

static void on_prepared(const struct ep_error *error, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__PrepareReply *reply = (const Ep__V1__PrepareReply *)message;
    struct agreed *member = user;

    end_call(member);
    note_failure(member, error);
    if (!error->status && reply->card.len == sizeof member->card.bytes)
        memcpy(member->card.bytes, reply->card.data, sizeof member->card.bytes);
    answered(member);
}

static void on_closed(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct agreed *member = user;
    struct ep_error why = EP_ERROR_INIT;

    end_call(member);
    close_judge(member->change->group, error, (const Ep__V1__CloseReply *)reply, &why);
    note_failure(member, &why);
    answered(member);
}

static void on_connected(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct agreed *member = user;

    (void)reply;
    end_call(member);
    note_failure(member, error);
    answered(member);
}

static void call(struct agreed *member, const char *method, const ProtobufCMessage *request, uint32_t timeout_ms,
                 ep_cluster_done_fn done)
{
    struct ep_groups *groups = groups_of(member->change);

    groups->calls++;
    ep_cluster_call(groups->cluster, member->change->plan.name[member->node], &ep__v1__node__descriptor, method,
                    request, timeout_ms, done, member);
}

static void ask_all_to_close(struct change *change)
{
    Ep__V1__CloseRequest request = EP__V1__CLOSE_REQUEST__INIT;

    begin_asking(change, AGREE_CLOSE);
    request.group = change->group->name;
    request.fence = change->fence;
    request.deletion = change->entry->number;
    for (uint32_t i = 0; i < change->plan.n_nodes; i++)
        call(&change->members[i], "Close", &request.base, CLOSE_MS, on_closed);
}

/* This server last: its own answer comes at once, and with it, if it is the only one, the next step. */
static void ask_all_to_prepare(struct change *change)
{
    const uint32_t n = change->plan.n_nodes;
    Ep__V1__PrepareRequest request = EP__V1__PREPARE_REQUEST__INIT;
    Ep__V1__Version release = EP__V1__VERSION__INIT;
    struct agreed *own = NULL;

    begin_asking(change, AGREE_PREPARE);
    show_progress(change);
    request.group = change->group->name;
    request.status = change->status;
    request.leader = (char *)(uintptr_t)nodes_self(groups_of(change));
    request.fence = change->fence;
    request.agreed = change->group->epoch_number;
    release.version = (char *)(uintptr_t)ep_node_version();
    release.window_version = EP_WINDOW_VERSION;
    request.release = &release;
    for (uint32_t i = 0; i < n; i++)
        if (is_own(&change->members[i]))
            own = &change->members[i];
        else
            call(&change->members[i], "Prepare", &request.base, PREPARE_MS, on_prepared);
    if (own)
        ep_groups_prepare(groups_of(change), &request, on_prepared, own);
}

static void ask_to_connect(struct change *change, const Ep__V1__ConnectRequest *request)
{
    const uint32_t n = change->plan.n_nodes;
    const uint32_t within_ms = epoch_connect_ms(change->status) + CONNECT_SLACK_MS;
    struct agreed *own = NULL;

    for (uint32_t i = 0; i < n; i++)
        if (is_own(&change->members[i]))
            own = &change->members[i];
        else
            call(&change->members[i], "Connect", &request->base, within_ms, on_connected);
    if (own)
        ep_groups_connect(groups_of(change), request, on_connected, own);
}

static void ask_all_to_connect(struct change *change)
{
    const uint32_t n = change->plan.n_nodes;
    Ep__V1__ConnectRequest request = EP__V1__CONNECT_REQUEST__INIT;
    struct ep_team_card *cards = group_allocate(n, sizeof *cards);

    begin_asking(change, AGREE_CONNECT);
    show_progress(change);
    for (uint32_t i = 0; i < n; i++)
        cards[i] = change->members[i].card;
    request.group = change->group->name;
    request.epoch = change->status->epoch;
    request.fence = change->fence;
    request.cards = (ProtobufCBinaryData){ .data = cards->bytes, .len = n * sizeof *cards };
    ask_to_connect(change, &request);
    free(cards);
}

static void begin_epoch(struct change *change)
{
    change->status->term = change->fence;
    if (change->status->epoch > change->group->tried)
        change->group->tried = change->status->epoch;
    enter_phase(change);
    ask_all_to_prepare(change);
}

void agree_begin(struct change *change)
{
    const uint32_t n = change->plan.n_nodes;

    change->fence = ep_cluster_guard(groups_of(change)->cluster).expected;
    if (!has_members(change)) {
        commit(change);
        return;
    }
    free(change->members); /* of a first plan */
    change->members = group_allocate(n, sizeof *change->members);
    for (uint32_t i = 0; i < n; i++)
        change->members[i] = (struct agreed){ .change = change, .node = i };
    if (makes_epoch(change))
        begin_epoch(change);
    else
        ask_all_to_close(change);
}

/* ---- after the commit ------------------------------------------------------------------------------ */

static bool is_seen(const struct change *change)
{
    return change->kind == CHANGE_DELETION ? change->group->gone : change->group->status_revision >= change->revision;
}

/* A deletion is over with the group, or at once where workers have to be told, which may take their time. */
static bool is_settled(const struct change *change)
{
    if (change->kind == CHANGE_DELETION)
        return change->workers || change->group->phase == EP_PHASE(DELETED);
    return report_settled(change->group, change->status->epoch);
}

static void see(struct change *change)
{
    struct ep_error late = EP_ERROR_INIT;

    if (is_seen(change)) {
        enter(change, AGREE_SETTLE);
        change->until = group_now(groups_of(change)) + SETTLE_MS;
        return;
    }
    if (group_now(groups_of(change)) < change->until)
        return;
    ep_error_set(&late, EP_UNAVAILABLE, "group %s: the change is stored, and the store does not tell this server so: "
                 "look again later", change->group->name);
    finish(change, &late);
}

void agree_look(struct group *group)
{
    static const struct ep_error none = EP_ERROR_INIT;
    struct change *change = group->change;

    if (change && change->step == AGREE_OFFER)
        look_at_offers(change);
    else if (change && change->step == AGREE_SEE)
        see(change);
    change = group->change;
    if (!change || change->step != AGREE_SETTLE)
        return;
    if (is_settled(change) || (change->kind != CHANGE_DELETION && group_now(group->groups) >= change->until))
        finish(change, &none);
}

bool agree_waits_for_others(const struct group *group)
{
    return group->change && group_now(group->groups) < group->change->until && !report_settled(group, 0);
}
