/* One agreed configuration: a window per rank, the team they form, their counters. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

static ep_status map_window(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    char name[128];
    ep_status status;

    snprintf(name, sizeof name, "%s/%llu/%u", epoch->group->name, (unsigned long long)epoch->number,
             rank->number);
    status = ep_node_window_create(epoch->group->groups->node, rank->device, name,
                                   epoch->settled.map.total_bytes, &rank->window, error);
    if (!status)
        status = ep_team_set_window(epoch->team, rank->number, rank->window, error);
    return status;
}

/* Windows are symmetric, so what fits one rank must fit all. */
static ep_status make_window(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    ep_status status =
        ep_node_reserve(epoch->group->groups->node, rank->device, epoch->settled.rank_bytes, error);

    if (status)
        return status;
    rank->reserved = true;
    return map_window(epoch, rank, error);
}

/* ---- a fresh window for the next worker -------------------------------------------- */

struct dropped {
    uv_work_t work;
    struct epoch *epoch;
    struct ep_node_window *window;
};

/* A thread of the pool: giving pages back takes its time. */
static void drop_window(uv_work_t *work)
{
    struct dropped *old = work->data;

    ep_node_window_destroy(old->window);
}

static void on_window_dropped(uv_work_t *work, int status)
{
    struct dropped *old = work->data;
    struct epoch *epoch = old->epoch;

    (void)status; /* it is never cancelled */
    epoch->dropping--;
    group_later(epoch->group->groups);
    free(old);
}

/* Whoever kept its mapping of the old one writes to nobody. */
static void renew_window(struct rank *rank)
{
    struct epoch *epoch = rank->epoch;
    struct dropped *old = group_allocate(1, sizeof *old);
    struct ep_error error = EP_ERROR_INIT;

    *old = (struct dropped){ .epoch = epoch, .window = rank->window };
    old->work.data = old;
    if (map_window(epoch, rank, &error)) {
        EP_ERROR("group", "no fresh window: the next worker gets the old one",
                 EP_S("group", epoch->group->name), EP_U("rank", rank->number), EP_S("error", error.text));
        rank->window = old->window;
        free(old);
        return;
    }
    epoch->dropping++;
    uv_queue_work(epoch->group->groups->loop, &old->work, drop_window, on_window_dropped);
}

void epoch_clean_window(struct rank *rank)
{
    if (!ep_team_clean(rank->epoch->team, rank->number))
        renew_window(rank);
}

/* ---- form and free ----------------------------------------------------------------- */

static void init_ranks(struct epoch *epoch)
{
    uint32_t devices = ep_node_devices(epoch->group->groups->node);
    uint64_t now = ep_clock_wall_us();

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        epoch->ranks[i] = (struct rank){
            .epoch = epoch,
            .number = i,
            .device = ep_spec_device(i, devices),
            .state = EP_RANK_STATE(EXPECTED),
            .since_us = now,
        };
}

static ep_status make_team(struct epoch *epoch, struct ep_error *error)
{
    const struct ep_settled *settled = &epoch->settled;
    uint32_t *devices = group_allocate(epoch->n_ranks, sizeof *devices);
    const struct ep_team_options options = {
        .node = epoch->group->groups->node,
        .loop = epoch->group->groups->loop,
        .map = &settled->map,
        .placement = &settled->placement,
        .devices = devices,
        .epoch = epoch->number,
        .timeout_ms = settled->spec->timeout_ms,
    };
    ep_status status;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        devices[i] = epoch->ranks[i].device;
    status = ep_team_create(&options, &epoch->team, error);
    free(devices);
    return status;
}

static ep_status form(struct epoch *epoch, struct ep_error *error)
{
    ep_status status = make_team(epoch, error);

    for (uint32_t i = 0; !status && i < epoch->n_ranks; i++)
        status = make_window(epoch, &epoch->ranks[i], error);
    return status;
}

ep_status epoch_form(struct group *group, uint64_t number, struct ep_settled *settled, struct epoch **out,
                     struct ep_error *error)
{
    struct epoch *epoch = group_allocate(1, sizeof *epoch);
    ep_status status;

    epoch->group = group;
    epoch->number = number;
    epoch->settled = *settled;
    *settled = (struct ep_settled){ 0 };
    epoch->n_ranks = epoch->settled.spec->ranks;
    epoch->ranks = group_allocate(epoch->n_ranks, sizeof *epoch->ranks);
    init_ranks(epoch);
    status = form(epoch, error);
    if (status) {
        epoch_free(epoch);
        return status;
    }
    *out = epoch;
    return EP_OK;
}

/* A thread of the pool. */
static void give_back(uv_work_t *work)
{
    struct epoch *epoch = work->data;

    if (epoch->lost)
        return;
    if (epoch->team)
        ep_team_destroy(epoch->team);
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        if (epoch->ranks[i].window)
            ep_node_window_destroy(epoch->ranks[i].window);
}

static void forget(struct epoch *epoch)
{
    for (uint32_t i = 0; i < epoch->n_ranks; i++) {
        struct rank *rank = &epoch->ranks[i];

        if (rank->reserved)
            ep_node_release(epoch->group->groups->node, rank->device, epoch->settled.rank_bytes);
        worker_clear(&rank->claimant);
        worker_clear(&rank->worker);
    }
    ep_settled_clear(&epoch->settled);
    free(epoch->ranks);
    free(epoch);
}

/* Something that still runs may write it: the memory stays, and stays reserved. */
static void keep(struct epoch *epoch)
{
    static struct epoch *lost;

    epoch->next = lost;
    lost = epoch;
}

static void given_back(uv_work_t *work, int status)
{
    struct epoch *epoch = work->data;
    struct group *group = epoch->group;

    (void)status; /* it is never cancelled */
    if (epoch->lost)
        keep(epoch);
    else
        forget(epoch);
    group->freeing--;
    group_later(group->groups);
}

void epoch_free(struct epoch *epoch)
{
    epoch->group->freeing++;
    epoch->freeing.data = epoch;
    epoch->lost = epoch->team && ep_team_stuck(epoch->team, -1);
    if (uv_queue_work(epoch->group->groups->loop, &epoch->freeing, give_back, given_back) == 0)
        return;
    give_back(&epoch->freeing); /* cannot be, and slow is better than never */
    given_back(&epoch->freeing, 0);
}

bool epoch_idle(const struct epoch *epoch)
{
    return !epoch->members && !epoch->executors && !epoch->quarantined && !epoch->dropping;
}

bool epoch_reset_due(const struct epoch *epoch)
{
    return epoch_resetting(epoch) && !epoch->executors;
}

bool epoch_resetting(const struct epoch *epoch)
{
    return epoch->used && !epoch->attached && !epoch->quarantined && !ep_team_stuck(epoch->team, -1);
}

void epoch_reset(struct epoch *epoch)
{
    struct ep_error error = EP_ERROR_INIT;

    epoch->used = false;
    epoch->apart = ep_team_reset(epoch->team, &error) != EP_OK;
    if (epoch->apart) {
        /* For the team all stay absent, and who attaches hears why it cannot join. */
        EP_ERROR("group", "an epoch cannot start anew", EP_S("group", epoch->group->name),
                 EP_U("epoch", epoch->number), EP_S("error", error.text));
        return;
    }
    for (uint32_t i = 0; i < epoch->n_ranks; i++) {
        rank_set_state(&epoch->ranks[i], EP_RANK_RESET);
        epoch->ranks[i].reason[0] = '\0';
    }
}

void epoch_tell(struct epoch *epoch, const struct rank *but, bool attached_only, enum ep_group_event event,
                uint32_t rank, uint64_t number, const char *text)
{
    for (uint32_t i = 0; i < epoch->n_ranks; i++) {
        struct ep_membership *member = epoch->ranks[i].member;

        if (member && &epoch->ranks[i] != but && (member->attached || !attached_only))
            member->on_event(event, rank, number, text, member->user);
    }
}

void epoch_detach(struct epoch *epoch, const char *reason)
{
    if (epoch->detached)
        return;
    epoch->detached = true;
    ep_team_leave_all(epoch->team);
    epoch_tell(epoch, NULL, false, EP_GROUP_DETACHED, 0, epoch->number, reason);
}
