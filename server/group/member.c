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
    char *name = strdup(from->name ? from->name : "");

    worker_clear(worker);
    *worker = (struct worker){ .pid = from->pid, .uid = from->uid, .name = name };
}

static const char *worker_name(const struct worker *worker)
{
    return worker->name ? worker->name : "";
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
        rank->since_us = ep_clock_wall_us();
    rank->state = next;
}

/* ---- claim -------------------------------------------------------------------- */

static ep_status refuse_held(const struct rank *rank, struct ep_error *error)
{
    const struct worker *worker = &rank->claimant;
    uint64_t now = ep_clock_wall_us();

    return ep_error_set(error, EP_ALREADY_EXISTS,
                        "rank %u of group %s is held by pid %d (uid %u, worker \"%.64s\"), %s for %.1f s",
                        rank->number, rank->epoch->group->name, (int)worker->pid, (unsigned)worker->uid,
                        worker_name(worker), rank->member->attached ? "attached" : "claimed",
                        now > rank->claimed_us ? (double)(now - rank->claimed_us) / 1e6 : 0.0);
}

ep_status rank_claimable(const struct rank *rank, struct ep_error *error)
{
    const char *group = rank->epoch->group->name;

    if (rank->member)
        return refuse_held(rank, error);
    if (rank->quarantined)
        return ep_error_set(
            error, EP_UNAVAILABLE,
            "rank %u of group %s is quarantined: pid %d (uid %u, worker \"%.64s\") may still write its "
            "window; it is free when that process has ended",
            rank->number, group, (int)rank->worker.pid, (unsigned)rank->worker.uid,
            worker_name(&rank->worker));
    if (ep_team_stuck(rank->epoch->team, (int32_t)rank->number))
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "rank %u of group %s is lost: what the server ran for its last worker has not ended and "
                            "may still use its memory; make the group anew, or restart the server",
                            rank->number, group);
    if (rank->executor || epoch_resetting(rank->epoch))
        return ep_error_set(error, EP_UNAVAILABLE, "rank %u of group %s is being released: try again",
                            rank->number, group);
    return EP_OK;
}

static ep_status check_rank(const struct rank *rank, Ep__V1__Executor executor, struct ep_error *error)
{
    ep_status status = rank_claimable(rank, error);

    return status ? status : executor_fits(rank, executor, error);
}

/* The lowest free one; the best of the reasons when there is none. */
static struct rank *pick_rank(struct epoch *epoch, Ep__V1__Executor executor, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT, soon = EP_ERROR_INIT, full = EP_ERROR_INIT;

    for (uint32_t i = 0; i < epoch->n_ranks; i++) {
        if (check_rank(&epoch->ranks[i], executor, &why) == EP_OK)
            return &epoch->ranks[i];
        if (why.status == EP_UNAVAILABLE && !soon.status)
            soon = why;
        if (why.status == EP_RESOURCE_EXHAUSTED && !full.status)
            full = why;
    }
    if (soon.status)
        ep_error_set(error, EP_UNAVAILABLE, "no rank is free yet: %.300s", soon.text);
    else if (full.status)
        *error = full;
    else
        ep_error_set(error, EP_ALREADY_EXISTS, "all %u ranks of group %s are held", epoch->n_ranks,
                     epoch->group->name);
    return NULL;
}

static ep_status check_open(const struct group *group, struct ep_error *error)
{
    const char *why = NULL;
    const struct ep_groups *groups = group->groups;

    if (ep_node_cordoned(groups->node, &why))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "node %s is drained: %s",
                            ep_node_name(groups->node), why && *why ? why : "no new workers");
    if (group->phase == EP_PHASE(DRAINING) || group->phase == EP_PHASE(DELETED))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is being deleted: %s", group->name,
                            group->reason);
    if (group->change && !strcmp(group->change, "deletion"))
        return ep_error_set(error, EP_UNAVAILABLE, "group %s is being deleted", group->name);
    if (!group->epoch)
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

ep_status ep_groups_claim(struct ep_groups *groups, const char *name, int32_t number,
                          const struct ep_worker *worker, ep_group_event_fn on_event, void *user,
                          struct ep_membership **out, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;
    struct group *group = group_get(groups, name, &why);
    struct ep_membership *member;
    struct rank *rank = NULL;
    Ep__V1__Executor executor;

    if (group && check_open(group, &why) == EP_OK && executor_settle(group, worker, &executor, &why) == EP_OK)
        rank = find_rank(group, number, executor, &why);
    if (!rank) {
        if (error)
            *error = why;
        return why.status;
    }
    member = group_allocate(1, sizeof *member);
    *member = (struct ep_membership){ .rank = rank, .executor = executor, .on_event = on_event, .user = user };
    executor_take(rank, executor);
    worker_set(&rank->claimant, worker);
    rank->claimed_us = ep_clock_wall_us();
    rank->member = member;
    rank->epoch->members++;
    *out = member;
    return EP_OK;
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
    info->device_uuid = ep_node_device_uuid(rank->epoch->group->groups->node, rank->device);
    info->mps = ep_node_device_mps(rank->epoch->group->groups->node, rank->device);
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
    return ep_node_window_export(epoch->ranks[whose].window, &out->fd, error);
}

/* ---- attach ------------------------------------------------------------------- */

static void on_timeout(const struct ep_engine_timeout *timeout, void *user)
{
    status_timeout(user, timeout);
}

/* The worker is told as if its group were gone, and lets go. */
static void on_failed(const struct ep_error *why, void *user)
{
    struct rank *rank = user;
    char text[REASON_MAX];

    if (!rank->member)
        return;
    snprintf(text, sizeof text, "the server cannot run its ops any more: %.200s", why->text);
    rank->member->on_event(EP_GROUP_DETACHED, rank->number, rank->epoch->number, text, rank->member->user);
}

static ep_status start_executor(struct rank *rank, struct ep_error *error)
{
    struct epoch *epoch = rank->epoch;
    const struct ep_executor_options options = {
        .rank = rank->number,
        .direct = rank->member->executor == EP__V1__EXECUTOR__EXECUTOR_DIRECT,
        .max_sms = rank->sms,
        .counters = &rank->counters,
        .on_timeout = on_timeout,
        .on_failed = on_failed,
        .user = rank,
    };
    /* An expected rank is part of the team already; one that was absent joins at the next op. */
    bool joins = rank->state == EP_RANK_STATE(ABSENT) || epoch->apart;
    ep_status status = joins ? ep_team_join(epoch->team, rank->number, error) : EP_OK;

    if (status)
        return status;
    status = ep_executor_start(epoch->team, &options, &rank->executor, error);
    if (status && joins)
        ep_team_leave(epoch->team, rank->number);
    return status;
}

ep_status ep_membership_attach(struct ep_membership *member, const struct ep_worker *worker,
                               struct ep_error *error)
{
    struct rank *rank = member->rank;
    struct epoch *epoch = rank ? rank->epoch : NULL;
    ep_status status;

    if (!rank || epoch->detached)
        return ep_error_set(error, EP_DETACHED, "the group is gone");
    if (member->attached)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u of group %s is attached already",
                            rank->number, epoch->group->name);
    status = start_executor(rank, error);
    if (status)
        return status;
    member->attached = true;
    worker_set(&rank->worker, worker);
    rank->reason[0] = '\0';
    rank_set_state(rank, EP_RANK_ATTACH);
    epoch->used = true;
    epoch->attached++;
    epoch->executors++;
    if (epoch != epoch->group->epoch) {
        member->tell_epoch = true; /* from the loop: its worker has not been welcomed yet */
        group_later(epoch->group->groups);
    }
    epoch_tell(epoch, rank, true, EP_GROUP_RANK_JOINED, rank->number, epoch->number,
               worker_name(&rank->worker));
    group_assess(epoch->group);
    status_changed(epoch->group);
    return EP_OK;
}

/* ---- memory of its own ---------------------------------------------------------- */

/* NULL: told that nobody runs its ops any more. */
static struct ep_executor *executor_of(const struct ep_membership *member, ep_region_done_fn on_done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    if (member->rank && member->attached && !member->released)
        return member->rank->executor;
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
    if (!rank->executor && !rank->quarantined && rank->epoch == rank->epoch->group->epoch &&
        !rank->epoch->detached)
        epoch_clean_window(rank);
}

static void on_executor_stopped(void *user)
{
    struct rank *rank = user;
    struct group *group = rank->epoch->group;

    rank->executor = NULL;
    rank->epoch->executors--;
    if (!ep_team_stuck(rank->epoch->team, (int32_t)rank->number)) {
        rank->sms = 0;
        vacate(rank);
    }
    group_later(group->groups);
    status_changed(group);
}

/* Peers go on at once; the executor ends when its running op has noticed. */
static void leave(struct rank *rank, const char *reason, bool writer_alive)
{
    struct epoch *epoch = rank->epoch;

    ep_team_leave(epoch->team, rank->number);
    epoch->attached--;
    snprintf(rank->reason, sizeof rank->reason, "%s", reason ? reason : "");
    rank_set_state(rank, writer_alive ? EP_RANK_LEFT_ALIVE : EP_RANK_LEFT);
    ep_executor_stop(rank->executor, on_executor_stopped, rank);
}

void ep_membership_release(struct ep_membership *member, const char *reason, bool writer_alive)
{
    struct rank *rank = member->rank;
    bool attached = member->attached;
    struct epoch *epoch;

    writer_alive = writer_alive && attached; /* who never attached has no window */
    member->released = true;
    if (rank) {
        epoch = rank->epoch;
        rank->member = NULL;
        epoch->members--;
        if (writer_alive) {
            rank->quarantined = member;
            epoch->quarantined++;
        }
        if (attached)
            leave(rank, reason, writer_alive);
        else
            rank->sms = 0;
        if (attached && !epoch->detached)
            epoch_tell(epoch, rank, true, EP_GROUP_RANK_LOST, rank->number, epoch->number, rank->reason);
        group_assess(epoch->group);
        group_later(epoch->group->groups);
        status_changed(epoch->group);
    }
    if (!writer_alive)
        free(member);
}

void ep_membership_writer_gone(struct ep_membership *member)
{
    struct rank *rank = member->rank;

    if (rank) {
        rank->quarantined = NULL;
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
    struct ep_membership *member = rank->member ? rank->member : rank->quarantined;

    if (rank->member && rank->member->attached)
        leave(rank, reason, false);
    if (member)
        member->rank = NULL;
    rank->member = rank->quarantined = NULL;
}
