/*
 * A rank of several nodes that joins or leaves while the others run.
 *
 * To leave, it is enough to be told: peers go on without it at once.  To join, all ranks have to take it in at the same
 * op.  So its node holds all members (no rank begins an op), takes the first numbers that nobody has begun, tells
 * them, and that ends the holds:
 *
 *   HOLD    each member that is there, this one too: leaves the rank if it had not heard of that, holds, and answers
 *           the highest numbers begun
 *   ADMIT   this one first, as what others send from then on must not be missed, and then the others
 *
 * Holds end by themselves, so a joiner that dies stops nobody for long; who is admitted after that is refused, and then
 * all are told that the rank has left, and it tries again, for a bounded time.  A member that is lost meanwhile is
 * left out: its own ranks are gone, too.
 *
 * All of one rank's news carry the time of its last change (report.c): what arrives late is known to be old.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

#define HOLD_MS  1000u /* longer than a call; ops wait, so not much */
#define CALL_MS  800u
#define LEAVE_MS 2000u
#define AGAIN_MS 30u
#define JOIN_MS  4000u /* less than a worker waits for its welcome */

struct join_peer {
    struct join *join;
    uint32_t node; /* of the plan */
    bool asked;    /* in this attempt */
    uint64_t hold;
};

struct join {
    struct join *next;
    struct ep_groups *groups;
    struct rank *rank;   /* NULL: cancelled, and only answers are waited for */
    struct ep_membership *member;
    struct join_peer *peers;
    uint32_t n_peers, waiting;
    uint64_t own_hold;
    uint64_t change; /* of this attempt */
    struct ep_team_numbers from;
    struct ep_error failure;
    uint64_t until; /* loop time, ms */
    uv_timer_t again;
    bool admitting;
    join_done_fn done;
    void *user;
};

static void attempt(struct join *join);

/* ---- the end -------------------------------------------------------------------------------- */

static void on_timer_closed(uv_handle_t *handle)
{
    struct join *join = handle->data;
    struct join **at = &join->groups->joins;

    while (*at != join)
        at = &(*at)->next;
    *at = join->next;
    group_later(join->groups);
    free(join->peers);
    free(join);
}

static void end(struct join *join)
{
    if (join->member)
        join->member->join = NULL;
    join->member = NULL;
    join->rank = NULL;
    if (!join->waiting && !uv_is_closing((uv_handle_t *)&join->again))
        uv_close((uv_handle_t *)&join->again, on_timer_closed);
}

static void finish(struct join *join, const struct ep_error *error)
{
    const join_done_fn done = join->done;
    const struct ep_error why = *error;
    void *user = join->user;

    end(join);
    done(&why, user);
}

static void drop_own_hold(struct join *join)
{
    if (join->own_hold)
        ep_team_unhold(join->rank->epoch->team, join->own_hold);
    join->own_hold = 0;
}

void join_cancel(struct ep_membership *member)
{
    struct join *join = member->join;

    drop_own_hold(join);
    ep_team_leave(join->rank->epoch->team, join->rank->number);
    join->rank->since_us++; /* newer than what was admitted */
    join_tell_left(join->rank);
    end(join);
}

/* ---- leaving ----------------------------------------------------------------------------------- */

static void on_told(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct ep_groups *groups = user;

    (void)error, (void)reply; /* who did not hear it will see it in the report */
    groups->calls--;
    group_later(groups);
}

void join_tell_left(struct rank *rank)
{
    struct epoch *epoch = rank->epoch;
    struct ep_groups *groups = epoch->group->groups;
    Ep__V1__LeaveRequest request = EP__V1__LEAVE_REQUEST__INIT;

    request.group = epoch->group->name;
    request.epoch = epoch->number;
    request.rank = rank->number;
    request.change = rank->since_us;
    request.reason = (char *)(uintptr_t)rank_reason(rank);
    for (uint32_t i = 0; epoch_spans(epoch) && i < epoch->plan.n_nodes; i++) {
        if (i == epoch->own || !nodes_alive(groups, epoch->plan.name[i]))
            continue;
        groups->calls++;
        ep_cluster_call(groups->cluster, epoch->plan.name[i], &ep__v1__node__descriptor, "Leave", &request.base,
                        LEAVE_MS, on_told, groups);
    }
}

/* ---- what both steps have ------------------------------------------------------------------------- */

static void on_again(uv_timer_t *timer)
{
    attempt(timer->data);
}

static void try_again(struct join *join)
{
    drop_own_hold(join);
    join->rank->since_us++; /* news for those who hold, or have taken it in already */
    join_tell_left(join->rank);
    if (uv_now(join->groups->loop) >= join->until || join->rank->epoch->detached)
        finish(join, &join->failure);
    else
        uv_timer_start(&join->again, on_again, AGAIN_MS, 0);
}

static void fail(struct join *join, const char *node, const struct ep_error *error)
{
    if (join->failure.status)
        return;
    ep_error_set(&join->failure, EP_UNAVAILABLE, "rank %u cannot join its peers on node %s: %.200s",
                 join->rank ? join->rank->number : 0, node, error->text);
}

static const char *name_of(const struct join_peer *peer)
{
    return peer->join->rank ? peer->join->rank->epoch->plan.name[peer->node] : "";
}

/* False: it was cancelled meanwhile, or more answers are to come. */
static bool all_answered(struct join *join)
{
    if (--join->waiting)
        return false;
    if (join->rank)
        return true;
    end(join);
    return false;
}

/* A member that is gone needs not admit anybody. */
static bool counts(const struct join_peer *peer)
{
    return peer->join->rank && nodes_alive(peer->join->groups, name_of(peer));
}

static void call(struct join_peer *peer, const char *method, const ProtobufCMessage *request, ep_cluster_done_fn done)
{
    peer->join->groups->calls++;
    peer->join->waiting++;
    ep_cluster_call(peer->join->groups->cluster, name_of(peer), &ep__v1__node__descriptor, method, request, CALL_MS,
                    done, peer);
}

/* ---- admit -------------------------------------------------------------------------------------------- */

static void all_admit(struct join *join)
{
    static const struct ep_error none = EP_ERROR_INIT;

    if (!join->failure.status) {
        finish(join, &none);
        return;
    }
    ep_team_leave(join->rank->epoch->team, join->rank->number);
    try_again(join);
}

static void on_admitted(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct join_peer *peer = user;
    struct join *join = peer->join;

    (void)reply;
    join->groups->calls--;
    group_later(join->groups);
    if (error->status && counts(peer))
        fail(join, name_of(peer), error);
    if (all_answered(join))
        all_admit(join);
}

static void admit_elsewhere(struct join *join)
{
    struct rank *rank = join->rank;
    Ep__V1__AdmitRequest request = EP__V1__ADMIT_REQUEST__INIT;

    join->change++;
    rank->since_us = join->change;
    request.group = rank->epoch->group->name;
    request.epoch = rank->epoch->number;
    request.rank = rank->number;
    request.change = join->change;
    request.ll = join->from.ll;
    request.ht = join->from.ht;
    request.worker = rank_worker(rank)->name;
    join->waiting = 1; /* this function */
    for (uint32_t i = 0; i < join->n_peers; i++) {
        request.hold = join->peers[i].hold;
        if (join->peers[i].asked && counts(&join->peers[i]))
            call(&join->peers[i], "Admit", &request.base, on_admitted);
    }
    if (all_answered(join))
        all_admit(join);
}

/* First here: what others send from then on must not be missed. */
static void admit(struct join *join)
{
    const uint64_t hold = join->own_hold;

    join->own_hold = 0;
    if (ep_team_admit(join->rank->epoch->team, hold, join->rank->number, &join->from, &join->failure))
        try_again(join);
    else
        admit_elsewhere(join);
}

/* ---- hold ------------------------------------------------------------------------------------------------ */

static void take_numbers(struct join *join, uint64_t ll, uint64_t ht)
{
    if (ll + 1 > join->from.ll)
        join->from.ll = ll + 1;
    if (ht + 1 > join->from.ht)
        join->from.ht = ht + 1;
}

static void all_hold(struct join *join)
{
    if (join->failure.status)
        try_again(join);
    else
        admit(join);
}

static void on_held(const struct ep_error *error, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__HoldReply *reply = (const Ep__V1__HoldReply *)message;
    struct join_peer *peer = user;
    struct join *join = peer->join;

    join->groups->calls--;
    group_later(join->groups);
    peer->asked = !error->status;
    if (error->status && counts(peer))
        fail(join, name_of(peer), error);
    if (!error->status) {
        peer->hold = reply->hold;
        take_numbers(join, reply->ll, reply->ht);
    }
    if (all_answered(join))
        all_hold(join);
}

static void hold_here(struct join *join)
{
    struct ep_team_numbers begun = { 0 };

    if (ep_team_hold(join->rank->epoch->team, HOLD_MS, &join->own_hold, &begun, &join->failure))
        join->own_hold = 0;
    else
        take_numbers(join, begun.ll, begun.ht);
}

static void attempt(struct join *join)
{
    Ep__V1__HoldRequest request = EP__V1__HOLD_REQUEST__INIT;
    struct rank *rank = join->rank;

    join->failure = (struct ep_error)EP_ERROR_INIT;
    join->from = (struct ep_team_numbers){ 0 };
    rank->since_us++;
    join->change = rank->since_us;
    request.group = rank->epoch->group->name;
    request.epoch = rank->epoch->number;
    request.rank = rank->number;
    request.change = join->change;
    join->waiting = 1; /* this function */
    hold_here(join);
    for (uint32_t i = 0; i < join->n_peers; i++) {
        join->peers[i].asked = false;
        if (counts(&join->peers[i]))
            call(&join->peers[i], "Hold", &request.base, on_held);
    }
    if (all_answered(join))
        all_hold(join);
}

void join_begin(struct ep_membership *member, join_done_fn done, void *user)
{
    struct rank *rank = member->rank;
    const struct ep_plan *plan = &rank->epoch->plan;
    struct ep_groups *groups = rank->epoch->group->groups;
    struct join *join = group_allocate(1, sizeof *join);

    *join = (struct join){ .next = groups->joins, .groups = groups, .rank = rank, .member = member, .done = done,
                           .user = user, .until = uv_now(groups->loop) + JOIN_MS };
    join->peers = group_allocate(plan->n_nodes, sizeof *join->peers);
    for (uint32_t i = 0; i < plan->n_nodes; i++)
        if (i != rank->epoch->own)
            join->peers[join->n_peers++] = (struct join_peer){ .join = join, .node = i };
    uv_timer_init(groups->loop, &join->again);
    join->again.data = join;
    groups->joins = join;
    member->join = join;
    attempt(join);
}

/* ---- what other nodes ask ------------------------------------------------------------------------------- */

static struct epoch *find_epoch(struct ep_groups *groups, const char *name, uint64_t number)
{
    struct group *group = group_find(groups, name);
    struct epoch *epoch = group ? group->epoch : NULL;

    if (epoch && epoch->number == number)
        return epoch;
    for (epoch = group ? group->older : NULL; epoch && epoch->number != number; epoch = epoch->next)
        ;
    return epoch;
}

/* A rank of another node, in an epoch that is served here. */
static struct rank *find_rank(struct ep_groups *groups, const char *name, uint64_t number, uint32_t rank,
                              struct ep_error *error)
{
    struct epoch *epoch = find_epoch(groups, name, number);

    if (!epoch || !epoch->team)
        ep_error_set(error, EP_NOT_FOUND, "epoch %llu of group %.64s is not served on node %s",
                     (unsigned long long)number, name, nodes_self(groups));
    else if (rank >= epoch->n_ranks || epoch->ranks[rank].here)
        ep_error_set(error, EP_INVALID_ARGUMENT, "rank is %u: must be one of another node", rank);
    else if (epoch->ranks[rank].away)
        ep_error_set(error, EP_FAILED_PRECONDITION, "%s; the epoch has to be formed anew",
                     rank_reason(&epoch->ranks[rank]));
    else
        return &epoch->ranks[rank];
    return NULL;
}

static ep_status hold(struct rank *rank, const Ep__V1__HoldRequest *request, Ep__V1__HoldReply *reply,
                      struct ep_error *error)
{
    struct ep_team_numbers begun = { 0 };
    ep_status status;

    if (!report_rank(rank, EP_RANK_STATE(ABSENT), request->change, "it joins again"))
        return ep_error_set(error, EP_ABORTED, "rank %u: there are later news of it", rank->number);
    status = ep_team_hold(rank->epoch->team, HOLD_MS, &rank->hold, &begun, error);
    if (status)
        rank->hold = 0;
    reply->hold = rank->hold;
    reply->ll = begun.ll;
    reply->ht = begun.ht;
    return status;
}

void ep_groups_hold(struct ep_groups *groups, const Ep__V1__HoldRequest *request, ep_cluster_done_fn done, void *user)
{
    Ep__V1__HoldReply reply = EP__V1__HOLD_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct rank *rank = find_rank(groups, request->group, request->epoch, request->rank, &error);

    if (rank)
        (void)hold(rank, request, &reply, &error);
    done(&error, error.status ? NULL : &reply.base, user);
}

static ep_status take_in(struct rank *rank, const Ep__V1__AdmitRequest *request, struct ep_error *error)
{
    const struct ep_team_numbers from = { .ll = request->ll, .ht = request->ht };
    const struct ep_worker worker = { .name = request->worker };
    const uint64_t hold = rank->hold;
    ep_status status;

    if (request->change <= rank->since_us || !hold || hold != request->hold)
        return ep_error_set(error, EP_ABORTED, "rank %u: there are later news of it", rank->number);
    rank->hold = 0;
    status = ep_team_admit(rank->epoch->team, hold, rank->number, &from, error);
    if (status)
        return status;
    rank_set_worker(rank, &worker);
    (void)report_rank(rank, EP_RANK_STATE(ATTACHED), request->change, "");
    group_assess(rank->epoch->group);
    status_changed(rank->epoch->group);
    return EP_OK;
}

void ep_groups_admit(struct ep_groups *groups, const Ep__V1__AdmitRequest *request, ep_cluster_done_fn done, void *user)
{
    static const Ep__V1__AdmitReply reply = EP__V1__ADMIT_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct rank *rank = find_rank(groups, request->group, request->epoch, request->rank, &error);

    if (rank)
        (void)take_in(rank, request, &error);
    done(&error, error.status ? NULL : &reply.base, user);
}

void ep_groups_left(struct ep_groups *groups, const Ep__V1__LeaveRequest *request, ep_cluster_done_fn done, void *user)
{
    static const Ep__V1__LeaveReply reply = EP__V1__LEAVE_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct rank *rank = find_rank(groups, request->group, request->epoch, request->rank, &error);

    if (rank && report_rank(rank, EP_RANK_STATE(ABSENT), request->change, request->reason)) {
        group_assess(rank->epoch->group);
        status_changed(rank->epoch->group);
        group_later(groups);
    }
    done(&error, error.status ? NULL : &reply.base, user);
}
