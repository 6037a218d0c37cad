/* Claimed ranks: claim, attach, release. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

void worker_clear(struct worker *worker)
{
    free(worker->name);
    *worker = (struct worker){ 0 };
}

void worker_set(struct worker *worker, const struct ep_worker *from)
{
    char *name = from->name && *from->name ? group_copy(from->name) : NULL;

    worker_clear(worker);
    *worker = (struct worker){ .pid = from->pid, .uid = from->uid, .name = name };
}

const char *worker_name(const struct worker *worker)
{
    return worker->name ? worker->name : "";
}

const struct worker *rank_worker(const struct rank *rank)
{
    static const struct worker nobody;

    return rank->worker ? rank->worker : &nobody;
}

struct worker *rank_set_worker(struct rank *rank, const struct ep_worker *from)
{
    if (!rank->worker && !(rank->worker = calloc(1, sizeof *rank->worker)))
        abort();
    worker_set(rank->worker, from);
    return rank->worker;
}

void rank_forget_worker(struct rank *rank)
{
    if (rank->worker)
        worker_clear(rank->worker);
    free(rank->worker);
    rank->worker = NULL;
}

/* It orders a rank's changes, so it grows, whatever the clock does. */
static uint64_t later_than(uint64_t last)
{
    const uint64_t now = ep_clock_wall_us();

    return now > last ? now : last + 1;
}

void rank_put_state(struct rank *rank, ep_rank_state state)
{
    struct epoch *epoch = rank->epoch;

    epoch->in_state[rank->state]--;
    epoch->in_state[state]++;
    rank->state = state;
    if (rank_is_lost(state) && rank->number < epoch->lost_from)
        epoch->lost_from = rank->number;
    if (epoch->in_state[EP_RANK_STATE(ATTACHED)])
        epoch->empty_since = 0;
    else if (!epoch->empty_since)
        epoch->empty_since = group_now(epoch->group->groups);
}

void rank_set_state(struct rank *rank, enum ep_rank_event event)
{
    ep_rank_state next = ep_rank_state_next(rank->state, event);

    if (next == EP_RANK_STATE(UNSPECIFIED)) {
        EP_ERROR("group", "a rank made a move that it cannot", EP_S("group", rank->epoch->group->name),
                 EP_U("rank", rank->number), EP_S("state", ep_rank_state_name(rank->state)),
                 EP_I("event", event));
        return;
    }
    if (next != rank->state)
        rank->since_us = later_than(rank->since_us);
    rank_put_state(rank, next);
    report_changed(rank->epoch->group);
}

/* ---- what it says of itself ------------------------------------------------------ */

void rank_set_reason(struct rank *rank, const char *reason)
{
    char *copy = *reason ? group_copy(reason) : NULL;

    free(rank->reason);
    rank->reason = copy;
}

const char *rank_reason(const struct rank *rank)
{
    return rank->reason ? rank->reason : "";
}

/* ---- claim -------------------------------------------------------------------- */

static ep_status refuse_held(const struct rank *rank, struct ep_error *error)
{
    const struct worker *worker = &rank->own->claimant;
    uint64_t now = ep_clock_wall_us();

    return ep_error_set(error, EP_ALREADY_EXISTS,
                        "rank %u of group %s is held by pid %d (uid %u, worker \"%.64s\"), %s for %.1f s",
                        rank->number, rank->epoch->group->name, (int)worker->pid, (unsigned)worker->uid,
                        worker_name(worker), rank->own->member->attached ? "attached" : "claimed",
                        now > rank->own->claimed_us ? (double)(now - rank->own->claimed_us) / 1e6 : 0.0);
}

static ep_status refuse_elsewhere(const struct rank *rank, struct ep_error *error)
{
    const struct epoch *epoch = rank->epoch;
    const char *node = epoch->plan.name[rank->node];

    return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u of group %s is on node %s, this is node %s: attach there",
                        rank->number, epoch->group->name, node, nodes_self(epoch->group->groups));
}

/* Its part here is still to be formed; where that failed, an operator has to see to it. */
static ep_status refuse_unserved(const struct rank *rank, struct ep_error *error)
{
    const struct group *group = rank->epoch->group;

    if (group->phase == EP_PHASE(FAILED))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is %s: %s", group->name,
                            ep_phase_name(group->phase), group->reason);
    return ep_error_set(error, EP_UNAVAILABLE, "rank %u of group %s: its epoch is being formed anew: try again",
                        rank->number, group->name);
}

/* Who follows from an older epoch will claim it. */
static ep_status refuse_kept(const struct rank *rank, const struct rank *before, struct ep_error *error)
{
    return ep_error_set(error, EP_ALREADY_EXISTS,
                        "rank %u of group %s is kept for pid %d (uid %u, worker \"%.64s\"), which goes over to it from "
                        "epoch %" PRIu64, rank->number, rank->epoch->group->name, (int)rank_worker(before)->pid,
                        (unsigned)rank_worker(before)->uid, worker_name(rank_worker(before)), before->epoch->number);
}

/* By anybody; who follows to it comes first. */
static ep_status check_free(const struct rank *rank, struct ep_error *error)
{
    const char *group = rank->epoch->group->name;

    if (!rank->here)
        return refuse_elsewhere(rank, error);
    if (!epoch_served(rank->epoch))
        return refuse_unserved(rank, error);
    if (rank->own->member)
        return refuse_held(rank, error);
    if (rank->own->quarantined)
        return ep_error_set(
            error, EP_UNAVAILABLE,
            "rank %u of group %s is quarantined: pid %d (uid %u, worker \"%.64s\") may still write its "
            "window; it is free when that process has ended",
            rank->number, group, (int)rank_worker(rank)->pid, (unsigned)rank_worker(rank)->uid,
            worker_name(rank_worker(rank)));
    if (ep_team_stuck(rank->epoch->team, (int32_t)rank->number))
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "rank %u of group %s is lost: what the server ran for its last worker has not ended and "
                            "may still use its memory; make the group anew, or restart the server",
                            rank->number, group);
    if (rank->own->executor || epoch_resetting(rank->epoch))
        return ep_error_set(error, EP_UNAVAILABLE, "rank %u of group %s is being released: try again",
                            rank->number, group);
    return EP_OK;
}

ep_status rank_claimable(const struct rank *rank, struct ep_error *error)
{
    const struct rank *before = rank->here ? follow_before(rank) : NULL;

    return before && !rank->own->member ? refuse_kept(rank, before, error) : check_free(rank, error);
}

static ep_status check_rank(const struct rank *rank, Ep__V1__Executor executor, struct ep_error *error)
{
    ep_status status = rank_claimable(rank, error);

    return status ? status : executor_fits(rank, NULL, executor, error);
}

static void refuse_all_elsewhere(const struct epoch *epoch, struct ep_error *error)
{
    char nodes[256];

    ep_plan_text(&epoch->plan, nodes, sizeof nodes);
    ep_error_set(error, EP_FAILED_PRECONDITION, "group %s has no rank on node %s; its ranks are on %s", epoch->group->name,
                 nodes_self(epoch->group->groups), nodes);
}

/* The lowest free one; the best of the reasons when there is none. */
static struct rank *pick_rank(struct epoch *epoch, Ep__V1__Executor executor, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT, soon = EP_ERROR_INIT, full = EP_ERROR_INIT;
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    if (!epoch_is_member(epoch)) {
        refuse_all_elsewhere(epoch, error);
        return NULL;
    }
    for (uint32_t i = 0; i < here.n; i++) {
        struct rank *rank = &epoch->ranks[here.number[i]];

        if (check_rank(rank, executor, &why) == EP_OK)
            return rank;
        if (why.status == EP_FAILED_PRECONDITION && !epoch_served(epoch))
            soon = why;
        if (why.status == EP_UNAVAILABLE && !soon.status)
            soon = why;
        if (why.status == EP_RESOURCE_EXHAUSTED && !full.status)
            full = why;
    }
    if (soon.status == EP_FAILED_PRECONDITION)
        *error = soon;
    else if (soon.status)
        ep_error_set(error, EP_UNAVAILABLE, "no rank is free yet: %.300s", soon.text);
    else if (full.status)
        *error = full;
    else
        ep_error_set(error, EP_ALREADY_EXISTS, "all %u ranks of group %s are held", epoch->n_ranks,
                     epoch->group->name);
    return NULL;
}

static ep_status check_open(const struct group *group, const struct ep_worker *worker, struct ep_error *error)
{
    const char *why = NULL;
    const struct ep_groups *groups = group->groups;

    if (!worker->after && ep_node_cordoned(groups->node, &why)) /* who is here already may follow its group */
        return ep_error_set(error, EP_FAILED_PRECONDITION, "node %s is drained: %s",
                            ep_node_name(groups->node), why && *why ? why : "no new workers");
    if (group->phase == EP_PHASE(DRAINING) || group->phase == EP_PHASE(DELETED))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is being deleted: %s", group->name,
                            group->reason);
    if (close_holds(group) || (group->change && group->change->kind == CHANGE_DELETION))
        return ep_error_set(error, EP_UNAVAILABLE, "group %s is being deleted", group->name);
    if (!group->epoch || group->phase == EP_PHASE(FAILED))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is %s: %s", group->name,
                            ep_phase_name(group->phase), group->reason);
    return EP_OK;
}

static struct rank *find_rank(struct group *group, int32_t number, Ep__V1__Executor executor,
                              struct ep_error *error)
{
    struct epoch *epoch = group->epoch;

    if (number < 0)
        return pick_rank(epoch, executor, error);
    if ((uint32_t)number >= epoch->n_ranks) {
        ep_error_set(error, EP_INVALID_ARGUMENT, "rank is %d: group %s has ranks 0 to %u", number,
                     group->name, epoch->n_ranks - 1);
        return NULL;
    }
    return check_rank(&epoch->ranks[number], executor, error) == EP_OK ? &epoch->ranks[number] : NULL;
}

/* What the worker holds in the epoch that it follows from. */
static struct rank *find_held(const struct group *group, int32_t number, const struct ep_worker *worker,
                              struct ep_error *error)
{
    struct epoch *epoch = group->older;

    while (epoch && epoch->number != worker->after)
        epoch = epoch->next;
    if (epoch && number >= 0 && (uint32_t)number < epoch->n_ranks) {
        struct rank *rank = &epoch->ranks[number];

        if (rank->own->member && rank->own->member->attached && rank_worker(rank)->pid == worker->pid &&
            rank_worker(rank)->uid == worker->uid && (worker->pid || worker->holds))
            return rank;
    }
    if (!worker->pid && !worker->holds) {
        ep_error_set(error, EP_PERMISSION_DENIED, "after is %" PRIu64 ": the server cannot see this process (it is in another pid "
                     "namespace), and the ticket of rank %d of group %s in that epoch was not given: after_ticket",
                     worker->after, number, group->name);
        return NULL;
    }
    ep_error_set(error, EP_FAILED_PRECONDITION, "after is %" PRIu64 ": pid %d does not hold rank %d of group %s in that epoch, "
                 "or there is none after it; the newest is %" PRIu64, worker->after, (int)worker->pid, number, group->name,
                 group->epoch_number);
    return NULL;
}

static ep_status refuse_gone(const struct rank *before, struct ep_error *error)
{
    const struct epoch *epoch = before->epoch->group->epoch;
    const uint32_t number = before->number;

    if (number >= epoch->n_ranks)
        return ep_error_set(error, EP_NOT_FOUND, "rank %u of group %s is not there in epoch %" PRIu64 ", which has ranks 0 to "
                            "%u", number, epoch->group->name, epoch->number, epoch->n_ranks - 1);
    return ep_error_set(error, EP_NOT_FOUND, "rank %u of group %s is on node %s in epoch %" PRIu64 ": attach there", number,
                        epoch->group->name, epoch->plan.name[epoch->ranks[number].node], epoch->number);
}

/* The rank of the same number in the newest epoch, if it is here too. */
static struct rank *find_successor(const struct group *group, int32_t number, const struct ep_worker *worker,
                                   Ep__V1__Executor executor, struct ep_error *error)
{
    const struct rank *before = find_held(group, number, worker, error);
    struct epoch *epoch = group->epoch;
    struct rank *rank;

    if (!before)
        return NULL;
    rank = before->number < epoch->n_ranks ? &epoch->ranks[before->number] : NULL;
    if (!rank || !rank->here) {
        refuse_gone(before, error);
        return NULL;
    }
    return check_free(rank, error) || executor_fits(rank, before, executor, error) ? NULL : rank;
}

ep_status ep_groups_claim(struct ep_groups *groups, const char *name, int32_t number,
                          const struct ep_worker *worker, ep_group_event_fn on_event, void *user,
                          struct ep_membership **out, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;
    struct group *group = group_get(groups, name, &why);
    struct ep_membership *member;
    struct rank *rank = NULL;
    Ep__V1__Executor executor;

    if (group && !token_check(group, worker, &why) && !check_open(group, worker, &why) &&
        !executor_settle(group, worker, &executor, &why))
        rank = worker->after ? find_successor(group, number, worker, executor, &why)
                             : find_rank(group, number, executor, &why);
    if (!rank) {
        if (error)
            *error = why;
        return why.status;
    }
    member = group_allocate(1, sizeof *member);
    *member = (struct ep_membership){ .rank = rank, .executor = executor, .on_event = on_event, .user = user,
                                      .on_turn = worker->on_turn, .after = worker->after };
    executor_take(rank, executor);
    member->ht_sms = executor_ht_sms(rank, executor, worker->ht_sms);
    worker_set(&rank->own->claimant, worker);
    rank->own->claimed_us = ep_clock_wall_us();
    rank->own->member = member;
    rank->epoch->members++;
    *out = member;
    return EP_OK;
}

/* What lies behind the rank when it begins. */
static void tell_beginning(const struct rank *rank, struct ep_membership_info *info)
{
    const struct ep_team_numbers first = ep_team_first(rank->epoch->team, rank->number);

    info->ht = first.ht - 1;
    info->position = first.ll - 1 + info->ht;
}

void ep_membership_info(const struct ep_membership *member, struct ep_membership_info *info)
{
    static const Ep__V1__GroupSpec none = EP__V1__GROUP_SPEC__INIT;
    const struct rank *rank = member->rank;

    *info = (struct ep_membership_info){ .group = "", .spec = &none };
    if (!rank)
        return;
    info->group = rank->epoch->group->name;
    info->rank = rank->number;
    info->epoch = rank->epoch->number;
    info->spec = rank->epoch->settled.spec;
    info->window_bytes = rank->epoch->settled.map.total_bytes;
    info->executor = member->executor;
    info->ht_sms = member->ht_sms;
    info->device_uuid = ep_node_device_uuid(rank->epoch->group->groups->node, rank->own->device);
    info->mps = ep_node_device_mps(rank->epoch->group->groups->node, rank->own->device);
    if (member->attached)
        tell_beginning(rank, info);
    info->memories = 1;
    if (member->executor != EP__V1__EXECUTOR__EXECUTOR_DIRECT)
        return;
    info->state_bytes = ep_team_state_bytes(rank->epoch->team);
    info->sms = executor_direct_sms(rank);
    info->memories += 1 + (rank->epoch->n_ranks - 1);
}

/* Own window, state, then the others' windows by rank. */
ep_status ep_membership_memory(const struct ep_membership *member, uint32_t index,
                               struct ep_membership_memory *out, struct ep_error *error)
{
    const struct rank *rank = member->rank;
    const struct epoch *epoch = rank ? rank->epoch : NULL;
    uint32_t whose;

    if (!rank)
        return ep_error_set(error, EP_DETACHED, "the group is gone");
    *out = (struct ep_membership_memory){ .kind = EP_MEMORY_STATE, .rank = rank->number, .fd = -1 };
    if (index == 1) {
        out->bytes = ep_team_state_bytes(epoch->team);
        return ep_team_state_export(epoch->team, rank->number, &out->fd, error);
    }
    whose = index == 0 ? rank->number : index - 2 + (index - 2 >= rank->number);
    out->kind = index == 0 ? EP_MEMORY_OWN_WINDOW : EP_MEMORY_PEER_WINDOW;
    out->rank = whose;
    out->bytes = epoch->settled.map.total_bytes;
    return ep_node_window_export(epoch->ranks[whose].own->window, &out->fd, error);
}

/* ---- attach ------------------------------------------------------------------- */

static void on_timeout(const struct ep_engine_timeout *timeout, void *user)
{
    status_timeout(user, timeout);
}

/* Somebody may wait for that. */
static void on_refreshed(void *user)
{
    struct ep_groups *groups = ((struct rank *)user)->epoch->group->groups;

    if (groups->waits)
        group_later(groups);
}

/* The worker is told as if its group were gone, and lets go. */
static void on_failed(const struct ep_error *why, void *user)
{
    struct rank *rank = user;
    char text[REASON_MAX];

    if (!rank->own->member)
        return;
    snprintf(text, sizeof text, "the server cannot run its ops any more: %.200s", why->text);
    rank->own->member->on_event(EP_GROUP_DETACHED, rank->number, rank->epoch->number, text, rank->own->member->user);
}

static ep_status start_executor(struct rank *rank, struct ep_error *error)
{
    const struct ep_executor_options options = {
        .rank = rank->number,
        .direct = rank->own->member->executor == EP__V1__EXECUTOR__EXECUTOR_DIRECT,
        .max_sms = rank->own->sms,
        .max_ht_sms = rank->own->member->ht_sms,
        .polls = ep_node_device_polls(rank->epoch->group->groups->node, rank->own->device),
        .counters = rank->own->counters,
        .on_timeout = on_timeout,
        .on_refreshed = on_refreshed,
        .on_failed = on_failed,
        .user = rank,
    };

    return ep_executor_start(rank->epoch->team, &options, &rank->own->executor, error);
}

static void count_in(struct rank *rank)
{
    struct epoch *epoch = rank->epoch;

    rank->own->member->attached = true;
    rank->follows = rank->own->member->on_turn != NULL;
    rank->forsaken = false;
    rank_set_reason(rank, "");
    epoch->used = true;
    epoch->attached++;
    epoch->executors++;
    rank_set_state(rank, EP_RANK_ATTACH);
    if (epoch != epoch->group->epoch) {
        rank->own->member->tell_epoch = true; /* from the loop: its worker has not been welcomed yet */
        group_later(epoch->group->groups);
    }
}

/* The rank is part of the team. */
static ep_status begin_service(struct rank *rank, struct ep_error *error)
{
    struct epoch *epoch = rank->epoch;
    ep_status status = start_executor(rank, error);

    if (status)
        return status;
    count_in(rank);
    epoch_tell(epoch, rank, true, EP_GROUP_RANK_JOINED, rank->number, epoch->number,
               worker_name(rank_worker(rank)));
    group_assess(epoch->group);
    status_changed(epoch->group);
    return EP_OK;
}

static void answer(struct ep_membership *member, const struct ep_error *error)
{
    member->on_attached(error, member->user);
}

/* Other nodes have taken it in, or have not. */
static void on_joined(const struct ep_error *error, void *user)
{
    struct ep_membership *member = user;
    struct ep_error why = *error;

    if (!why.status && begin_service(member->rank, &why)) {
        ep_team_leave(member->rank->epoch->team, member->rank->number);
        join_tell_left(member->rank);
    }
    if (why.status || !follow_delays(member))
        answer(member, &why);
}

/* One that was absent joins at the next op; an expected rank is part of the team already. */
static ep_status attach_here(struct rank *rank, struct ep_error *error)
{
    struct epoch *epoch = rank->epoch;
    const bool joins = rank->state == EP_RANK_STATE(ABSENT) || epoch->apart;
    ep_status status = joins ? ep_team_join(epoch->team, rank->number, error) : EP_OK;

    if (status)
        return status;
    status = begin_service(rank, error);
    if (status && joins)
        ep_team_leave(epoch->team, rank->number);
    return status;
}

static ep_status check_attach(const struct ep_membership *member, struct ep_error *error)
{
    const struct rank *rank = member->rank;

    if (!rank || rank->epoch->detached)
        return ep_error_set(error, EP_DETACHED, "the group is gone");
    if (member->attached || member->join)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u of group %s is attached already",
                            rank->number, rank->epoch->group->name);
    if (follow_closes(rank->epoch))
        return ep_error_set(error, EP_UNAVAILABLE, "the workers of epoch %" PRIu64 " of group %s are going over to a newer "
                            "one: claim the rank there", rank->epoch->number, rank->epoch->group->name);
    return EP_OK;
}

void ep_membership_attach(struct ep_membership *member, const struct ep_worker *worker,
                          ep_membership_attached_fn done)
{
    struct ep_error error = EP_ERROR_INIT;
    struct rank *rank = member->rank;

    member->on_attached = done;
    if (!check_attach(member, &error)) {
        rank_set_worker(rank, worker);
        if (epoch_spans(rank->epoch) && rank->state == EP_RANK_STATE(ABSENT)) {
            join_begin(member, on_joined, member);
            return;
        }
        (void)attach_here(rank, &error);
    }
    if (error.status || !follow_delays(member))
        answer(member, &error);
}

/* ---- memory of its own ---------------------------------------------------------- */

/* NULL: told that nobody runs its ops any more. */
static struct ep_executor *executor_of(const struct ep_membership *member, ep_region_done_fn on_done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    if (member->rank && member->attached && !member->released)
        return member->rank->own->executor;
    (void)ep_error_set(&error, EP_DETACHED, "the rank is not attached any more");
    on_done(&error, user);
    return NULL;
}

void ep_membership_register(struct ep_membership *member, const struct ep_executor_region *region,
                            ep_region_done_fn on_done, void *user)
{
    struct ep_executor *executor = executor_of(member, on_done, user);

    if (executor)
        ep_executor_register(executor, region, on_done, user);
    else if (region->fd >= 0)
        close(region->fd);
}

void ep_membership_unregister(struct ep_membership *member, uint32_t number, ep_region_done_fn on_done, void *user)
{
    struct ep_executor *executor = executor_of(member, on_done, user);

    if (executor)
        ep_executor_unregister(executor, number, on_done, user);
}

/* ---- release ------------------------------------------------------------------ */

/* As soon as neither its worker nor anything of ours touches its window, the next worker may have it. */
static void vacate(struct rank *rank)
{
    if (!rank->own->executor && !rank->own->quarantined && rank->epoch == rank->epoch->group->epoch &&
        !rank->epoch->detached)
        epoch_clean_window(rank);
}

static void on_executor_stopped(void *user)
{
    struct rank *rank = user;
    struct group *group = rank->epoch->group;

    rank->own->executor = NULL;
    rank->epoch->executors--;
    if (rank->epoch != group->epoch)
        report_changed(group); /* the epoch may be over here */
    if (!ep_team_stuck(rank->epoch->team, (int32_t)rank->number)) {
        rank->own->sms = 0;
        vacate(rank);
    }
    group_later(group->groups);
    status_changed(group);
}

/* It is done: what it sent may still be on its way, and all that it owed is sent. */
static bool is_done(const struct rank *rank, const struct ep_membership *member)
{
    return member && member->turned_to && member->turned_to == rank->epoch->turn_to;
}

/* Peers go on at once; the executor ends when its running op has noticed. */
static void leave(struct rank *rank, const char *reason, bool writer_alive, bool done)
{
    struct epoch *epoch = rank->epoch;

    if (!done)
        ep_team_leave(epoch->team, rank->number);
    epoch->attached--;
    rank_set_reason(rank, reason ? reason : "");
    rank_set_state(rank, writer_alive ? EP_RANK_LEFT_ALIVE : EP_RANK_LEFT);
    if (!done)
        join_tell_left(rank);
    ep_executor_stop(rank->own->executor, on_executor_stopped, rank);
}

void ep_membership_release(struct ep_membership *member, const char *reason, bool writer_alive)
{
    struct rank *rank = member->rank;
    bool attached = member->attached, done;
    struct epoch *epoch;

    writer_alive = writer_alive && attached; /* who never attached has no window */
    member->released = true;
    if (member->join)
        join_cancel(member);
    if (rank) {
        epoch = rank->epoch;
        done = !writer_alive && is_done(rank, member);
        rank->own->member = NULL;
        epoch->members--;
        if (writer_alive) {
            rank->own->quarantined = member;
            epoch->quarantined++;
        }
        if (attached)
            leave(rank, reason, writer_alive, done);
        else
            rank->own->sms = 0;
        follow_left(member);
        if (attached && !epoch->detached && !done)
            epoch_tell(epoch, rank, true, EP_GROUP_RANK_LOST, rank->number, epoch->number, rank_reason(rank));
        group_assess(epoch->group);
        group_later(epoch->group->groups);
        status_changed(epoch->group);
    }
    if (!writer_alive)
        free(member);
}

void ep_membership_turned(struct ep_membership *member, uint64_t to)
{
    member->turned_to = to;
}

void ep_membership_writer_gone(struct ep_membership *member)
{
    struct rank *rank = member->rank;

    if (rank) {
        rank->own->quarantined = NULL;
        rank->epoch->quarantined--;
        rank_set_state(rank, EP_RANK_WRITER_GONE);
        vacate(rank);
        group_assess(rank->epoch->group);
        group_later(rank->epoch->group->groups);
        status_changed(rank->epoch->group);
    }
    free(member);
}

void rank_orphan(struct rank *rank, const char *reason)
{
    struct ep_membership *member = rank->own->member ? rank->own->member : rank->own->quarantined;

    if (rank->own->member && rank->own->member->join)
        join_cancel(rank->own->member);
    if (rank->own->member && rank->own->member->attached)
        leave(rank, reason, false, false);
    if (member)
        member->rank = NULL;
    rank->own->member = rank->own->quarantined = NULL;
}
