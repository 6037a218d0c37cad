/* One agreed configuration: a window per rank, the team they form, their counters. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "ep_thread.h"
#include "group_private.h"

#define CONNECT_MS      8000u
#define CONNECT_GPUS_MS 25000u /* NCCL takes some 5 s for a communicator, and more on a busy machine */
/* Each may wait so long for a silent node, on a thread of the pool: the others are for what is quick (ep_thread.h). */
#define CONNECTS_AT_ONCE (EP_POOL_THREADS - 4)
#define RENEW_MS   3000u /* so long claims wait for the leader to form anew what all have left */

/* ---- windows ----------------------------------------------------------------------- */

static ep_status create_window(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    struct ep_node *node = epoch->group->groups->node;
    char name[128];

    const uint64_t beside = epoch_beside(&epoch->settled, &epoch->plan).window;
    ep_status status;

    snprintf(name, sizeof name, "%s/%llu/%u", epoch->group->name, (unsigned long long)epoch->number,
             rank->number);
    status = ep_node_window_create(node, rank->own->device, name, epoch->settled.map.total_bytes, &rank->own->window,
                                   error);
    if (!status && beside)
        status = ep_node_window_extend(rank->own->window, beside, error);
    return status;
}

static ep_status map_window(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    ep_status status = create_window(epoch, rank, error);

    if (!status)
        status = ep_team_set_window(epoch->team, rank->number, rank->own->window, error);
    return status;
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

    *old = (struct dropped){ .epoch = epoch, .window = rank->own->window };
    old->work.data = old;
    if (map_window(epoch, rank, &error)) {
        EP_ERROR("group", "no fresh window: the next worker gets the old one",
                 EP_S("group", epoch->group->name), EP_U("rank", rank->number), EP_S("error", error.text));
        rank->own->window = old->window;
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

/* ---- known: what a record says ------------------------------------------------------- */

/* It had no worker in the epoch before, whose workers are to come over: they do not wait for it. */
static void begin_absent(struct rank *rank)
{
    rank->began_absent = true;
    rank->epoch->in_state[rank->state]--; /* nobody has left it: it is not empty since then */
    rank->epoch->in_state[EP_RANK_STATE(ABSENT)]++;
    rank->state = EP_RANK_STATE(ABSENT);
    rank_set_reason(rank, "it was absent in the epoch before");
}

/* Behind the last node there are none: that is where a node that is no member looks. */
static void sort_ranks(struct epoch *epoch)
{
    const uint32_t nodes = epoch->plan.n_nodes;
    uint32_t *next = group_allocate(nodes + 2, sizeof *next);

    epoch->by_node = group_allocate(epoch->n_ranks, sizeof *epoch->by_node);
    epoch->first_of = group_allocate(nodes + 2, sizeof *epoch->first_of);
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        epoch->first_of[epoch->plan.node[i] + 1]++;
    for (uint32_t i = 0; i <= nodes; i++)
        epoch->first_of[i + 1] += epoch->first_of[i];
    memcpy(next, epoch->first_of, (nodes + 2) * sizeof *next);
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        epoch->by_node[next[epoch->plan.node[i]]++] = i;
    free(next);
}

static void init_own_ranks(struct epoch *epoch)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    epoch->own_ranks = group_allocate(here.n, sizeof *epoch->own_ranks);
    for (uint32_t i = 0; i < here.n; i++) {
        epoch->own_ranks[i].counters = group_allocate(1, sizeof(struct ep_rank_counters));
        epoch->ranks[here.number[i]].own = &epoch->own_ranks[i];
    }
}

static void init_ranks(struct epoch *epoch, const Ep__V1__GroupStatus *record)
{
    static const struct own_rank elsewhere;
    const uint64_t now = ep_clock_wall_us();

    epoch->n_ranks = epoch->plan.n_ranks;
    epoch->ranks = group_allocate(epoch->n_ranks, sizeof *epoch->ranks);
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        epoch->ranks[i] = (struct rank){
            .epoch = epoch,
            .number = i,
            .node = epoch->plan.node[i],
            .here = epoch->plan.node[i] == epoch->own,
            .state = EP_RANK_STATE(EXPECTED),
            .since_us = now,
            .own = (struct own_rank *)(uintptr_t)&elsewhere, /* which nobody writes */
        };
    epoch->in_state[EP_RANK_STATE(EXPECTED)] = epoch->n_ranks;
    sort_ranks(epoch);
    init_own_ranks(epoch);
    for (size_t i = 0; i < record->n_absent; i++)
        if (record->absent[i] < epoch->n_ranks && !epoch->ranks[record->absent[i]].began_absent)
            begin_absent(&epoch->ranks[record->absent[i]]);
}

/* Everything is filled in already, so that every server makes the same of it. */
static ep_status settle(struct epoch *epoch, const Ep__V1__Settled *settled, struct ep_error *error)
{
    const struct ep_spec_bounds bounds = {
        .node = nodes_self(epoch->group->groups),
        .backend = settled->spec->backend,
        .devices = settled->spec->ranks,
        .granule = ep_node_granule(epoch->group->groups->node),
    };

    return ep_spec_settle(settled->spec, &bounds, &epoch->settled, error);
}

static ep_status read_record(struct epoch *epoch, const Ep__V1__GroupStatus *record, struct ep_error *error)
{
    ep_status status;

    if (!record->settled || !record->settled->spec)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "settled has no spec");
    status = ep_plan_read(record->runs, record->n_runs, &epoch->plan, error);
    if (!status)
        status = settle(epoch, record->settled, error);
    if (!status && epoch->settled.spec->ranks != epoch->plan.n_ranks)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "spec has %u ranks, %u are placed",
                              epoch->settled.spec->ranks, epoch->plan.n_ranks);
    if (!status)
        ep_settled_set_notes(&epoch->settled, record->settled->notes, record->settled->n_notes);
    return status;
}

static void forget(struct epoch *epoch);

ep_status epoch_new(struct group *group, const Ep__V1__GroupStatus *record, struct epoch **out,
                    struct ep_error *error)
{
    struct epoch *epoch = group_allocate(1, sizeof *epoch);
    ep_status status;

    epoch->group = group;
    epoch->number = record->epoch;
    epoch->fence = record->term;
    status = read_record(epoch, record, error);
    if (status) {
        forget(epoch);
        return status;
    }
    epoch->own = ep_plan_find(&epoch->plan, nodes_self(group->groups));
    init_ranks(epoch, record);
    *out = epoch;
    return EP_OK;
}

bool epoch_whole(const struct epoch *epoch)
{
    return epoch_served(epoch) && !(epoch_is_member(epoch) && *epoch->torn);
}

/* ---- prepared: memory, and how the others reach this node --------------------------------- */

static ep_status find_device(const struct ep_node *node, struct rank *rank, struct ep_error *error)
{
    const char *name = rank->epoch->plan.device[rank->number];

    for (uint32_t i = 0; i < ep_node_devices(node); i++)
        if (!strcmp(ep_node_device_name(node, i), name)) {
            rank->own->device = i;
            return EP_OK;
        }
    return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u is on %.80s of node %s, which has no such device",
                        rank->number, name, ep_node_name(node));
}

/* Windows are symmetric, so what fits one rank must fit all. */
static ep_status reserve(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    ep_status status = find_device(epoch->group->groups->node, rank, error);

    if (!status)
        status = share_reserve(epoch->group, rank->own->device, epoch->each_bytes, error);
    rank->own->reserved = !status;
    return status;
}

static struct rank *first_here(const struct epoch *epoch)
{
    return &epoch->ranks[*epoch_ranks_of(epoch, epoch->own).number];
}

static bool is_on_gpus(const struct epoch *epoch)
{
    return epoch->settled.spec->backend == EP__V1__BACKEND__BACKEND_CUDA;
}

uint32_t epoch_connect_ms(const Ep__V1__GroupStatus *record)
{
    return record->settled->spec->backend == EP__V1__BACKEND__BACKEND_CUDA ? CONNECT_GPUS_MS : CONNECT_MS;
}

struct ep_team_beside epoch_beside(const struct ep_settled *settled, const struct ep_plan *plan)
{
    return ep_team_beside(settled->spec->backend, &settled->map, plan->node);
}

static ep_status listen_here(struct epoch *epoch, struct ep_team_card *card, struct ep_error *error)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    struct ep_team_net_rank *list = group_allocate(here.n, sizeof *list);
    const struct ep_team_net_options options = {
        .first = epoch->own == 0,
        .group = epoch->group->name,
        .ranks = epoch->n_ranks,
        .here = list,
        .n = here.n,
    };
    ep_status status;

    for (uint32_t i = 0; i < here.n; i++)
        list[i] = (struct ep_team_net_rank){ here.number[i], epoch->ranks[here.number[i]].own->device };
    status = ep_team_net_listen(epoch->group->groups->node, &options, &epoch->net, card, error);
    free(list);
    return status;
}

static ep_status prepare_span(struct epoch *epoch, struct ep_team_card *card, struct ep_error *error)
{
    const uint64_t bytes = epoch_beside(&epoch->settled, &epoch->plan).node;
    ep_status status = share_reserve(epoch->group, first_here(epoch)->own->device, bytes, error);

    if (status)
        return status;
    epoch->span_bytes = bytes;
    return listen_here(epoch, card, error);
}

ep_status epoch_prepare(struct epoch *epoch, struct ep_team_card *card, struct ep_error *error)
{
    const struct ep_node *node = epoch->group->groups->node;
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    ep_status status = EP_OK;

    if (!epoch_is_member(epoch))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks has none on node %s", ep_node_name(node));
    if (epoch->settled.spec->backend != ep_node_backend(node))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "node %s runs with another backend than the group's",
                            ep_node_name(node));
    epoch->each_bytes = epoch->settled.rank_bytes + epoch_beside(&epoch->settled, &epoch->plan).rank;
    for (uint32_t i = 0; !status && i < here.n; i++)
        status = reserve(epoch, &epoch->ranks[here.number[i]], error);
    if (!status && epoch_spans(epoch))
        status = prepare_span(epoch, card, error);
    if (!status)
        epoch->part = EPOCH_PREPARED;
    return status;
}

uint64_t epoch_reserved(const struct epoch *epoch, uint32_t device)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < here.n; i++) {
        const struct rank *rank = &epoch->ranks[here.number[i]];

        if (rank->own->reserved && rank->own->device == device)
            bytes += epoch->each_bytes;
    }
    return epoch->span_bytes && first_here(epoch)->own->device == device ? bytes + epoch->span_bytes : bytes;
}

/* ---- formed: connected, with windows and a team --------------------------------------------- */

static void on_lost(uint32_t node, const char *why, void *user)
{
    report_torn(user, node, why);
}

static const struct ep_team_span *span_of(struct epoch *epoch)
{
    epoch->span = (struct ep_team_span){
        .nodes = epoch->plan.n_nodes,
        .own = epoch->own,
        .node = epoch->plan.node,
        .net = epoch->net,
        .on_lost = on_lost,
        .user = epoch,
    };
    return epoch_spans(epoch) ? &epoch->span : NULL;
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
        .span = span_of(epoch),
    };
    ep_status status;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        devices[i] = epoch->ranks[i].own->device;
    status = ep_team_create(&options, &epoch->team, error);
    free(devices);
    if (!status)
        epoch->net = NULL; /* the team's now */
    return status;
}

/* On GPUs it is there already. */
static ep_status set_window(struct epoch *epoch, struct rank *rank, struct ep_error *error)
{
    if (!rank->own->window)
        return map_window(epoch, rank, error);
    return ep_team_set_window(epoch->team, rank->number, rank->own->window, error);
}

static ep_status make_team_and_windows(struct epoch *epoch, struct ep_error *error)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    ep_status status = make_team(epoch, error);

    for (uint32_t i = 0; !status && i < here.n; i++)
        status = set_window(epoch, &epoch->ranks[here.number[i]], error);
    for (uint32_t i = 0; !status && i < epoch->n_ranks; i++)
        if (epoch->ranks[i].began_absent)
            ep_team_leave(epoch->team, i);
    epoch->part = status ? EPOCH_PREPARED : EPOCH_FORMED;
    return status;
}

/* Others put to them, so they are there before it is connected. */
static ep_status make_windows(struct epoch *epoch, struct ep_error *error)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    struct ep_node_window **windows = group_allocate(here.n, sizeof *windows);
    ep_status status = EP_OK;

    for (uint32_t i = 0; !status && i < here.n; i++) {
        struct rank *rank = &epoch->ranks[here.number[i]];

        status = create_window(epoch, rank, error);
        windows[i] = rank->own->window;
    }
    if (!status && epoch->net)
        ep_team_net_expect(epoch->net, windows);
    free(windows);
    return status;
}

struct connecting {
    uv_work_t work;
    struct connecting *next; /* waits for one of CONNECTS_AT_ONCE to be over; those without other nodes do not */
    struct epoch *epoch;
    bool given_up;
    struct ep_team_card *cards;
    struct ep_error error;
    epoch_done_fn done;
    void *user;
};

/* A thread of the pool: a GPU's driver may take seconds to map memory, while it gives back other memory for instance. */
static void map_and_connect(uv_work_t *work)
{
    struct connecting *c = work->data;
    const bool gpus = is_on_gpus(c->epoch);

    if (c->given_up || (gpus && make_windows(c->epoch, &c->error)) || !c->epoch->net)
        return;
    (void)ep_team_net_connect(c->epoch->net, c->cards, c->epoch->plan.n_nodes, c->epoch->own,
                              gpus ? CONNECT_GPUS_MS : CONNECT_MS, &c->error);
}

static void begin_connecting(struct connecting *c);

static void connect_next(struct ep_groups *groups)
{
    struct connecting *c = groups->connects_due;

    if (!c || groups->connects >= CONNECTS_AT_ONCE)
        return;
    groups->connects_due = c->next;
    begin_connecting(c);
}

static void on_connected(uv_work_t *work, int status)
{
    struct connecting c = *(struct connecting *)work->data;
    struct epoch *epoch = c.epoch;
    const bool dropped = epoch->dropped; /* else whoever is told may drop it */

    (void)status; /* it is never cancelled */
    free(c.cards);
    free(work->data);
    epoch->group->groups->calls--;
    epoch->group->groups->connects -= epoch->net != NULL;
    epoch->connecting = NULL;
    epoch->part = EPOCH_PREPARED;
    connect_next(epoch->group->groups);
    if (dropped)
        (void)ep_error_set(&c.error, EP_ABORTED, "the change was given up");
    else if (!c.error.status)
        (void)make_team_and_windows(epoch, &c.error);
    c.done(&c.error, c.user);
    if (dropped)
        epoch_free(epoch);
}

static void begin_connecting(struct connecting *c)
{
    struct ep_groups *groups = c->epoch->group->groups;

    groups->connects += c->epoch->net != NULL;
    c->given_up = c->epoch->dropped;
    if (uv_queue_work(groups->loop, &c->work, map_and_connect, on_connected) == 0)
        return;
    (void)ep_error_set(&c->error, EP_INTERNAL, "no thread to connect with"); /* cannot be */
    on_connected(&c->work, 0);
}

static void start_connecting(struct epoch *epoch, const struct ep_team_card *cards, epoch_done_fn done, void *user)
{
    struct connecting *c = group_allocate(1, sizeof *c), **due;

    *c = (struct connecting){ .epoch = epoch, .error = EP_ERROR_INIT, .done = done, .user = user };
    c->cards = group_allocate(epoch->plan.n_nodes, sizeof *c->cards);
    memcpy(c->cards, cards, epoch->plan.n_nodes * sizeof *c->cards);
    c->work.data = c;
    epoch->connecting = c;
    epoch->part = EPOCH_CONNECTING;
    epoch->group->groups->calls++;
    if (!epoch->net || epoch->group->groups->connects < CONNECTS_AT_ONCE) {
        begin_connecting(c);
        return;
    }
    for (due = &epoch->group->groups->connects_due; *due; due = &(*due)->next)
        ;
    *due = c;
}

void epoch_connect(struct epoch *epoch, const struct ep_team_card *cards, epoch_done_fn done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    if (epoch_spans(epoch) || is_on_gpus(epoch)) {
        start_connecting(epoch, cards, done, user);
        return;
    }
    (void)make_team_and_windows(epoch, &error);
    done(&error, user);
}

/* ---- free ---------------------------------------------------------------------------- */

/* A thread of the pool. */
static void give_back(uv_work_t *work)
{
    struct epoch *epoch = work->data;
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    ep_thread_goes_behind();
    if (epoch->lost)
        return;
    if (epoch->team)
        ep_team_destroy(epoch->team);
    if (epoch->net)
        ep_team_net_close(epoch->net);
    for (uint32_t i = 0; i < here.n; i++)
        if (epoch->ranks[here.number[i]].own->window)
            ep_node_window_destroy(epoch->ranks[here.number[i]].own->window);
}

static void forget_own_ranks(struct epoch *epoch)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    if (epoch->span_bytes)
        share_release(epoch->group, first_here(epoch)->own->device, epoch->span_bytes);
    for (uint32_t i = 0; i < here.n; i++) {
        struct own_rank *own = &epoch->own_ranks[i];

        if (own->reserved)
            share_release(epoch->group, own->device, epoch->each_bytes);
        worker_clear(&own->claimant);
        free(own->counters);
    }
    free(epoch->own_ranks);
}

static void forget(struct epoch *epoch)
{
    if (epoch->own_ranks)
        forget_own_ranks(epoch);
    for (uint32_t i = 0; i < epoch->n_ranks; i++) {
        rank_forget_worker(&epoch->ranks[i]);
        free(epoch->ranks[i].reason);
    }
    ep_plan_clear(&epoch->plan);
    ep_settled_clear(&epoch->settled);
    free(epoch->by_node);
    free(epoch->first_of);
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
    if (share_is_news(group))
        report_changed(group);
    group_later(group->groups);
}

void epoch_free(struct epoch *epoch)
{
    if (epoch->part == EPOCH_KNOWN && !epoch->team && !epoch->net) {
        forget(epoch);
        return;
    }
    if (!epoch->dropped)
        epoch->group->freeing++;
    epoch->dropped = true;
    if (epoch->part == EPOCH_CONNECTING)
        return; /* on_connected() comes back here */
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
    return !epoch_spans(epoch) && epoch_resetting(epoch) && !epoch->executors;
}

bool epoch_left_by_all(const struct epoch *epoch)
{
    if (!epoch_spans(epoch) || !epoch->empty_since || epoch->executors || !epoch->in_state[EP_RANK_STATE(ABSENT)] ||
        epoch->in_state[EP_RANK_STATE(ATTACHED)] || epoch->in_state[EP_RANK_STATE(QUARANTINED)] ||
        follow_pending(epoch->group) || !report_settled(epoch->group, epoch->number))
        return false;
    for (uint32_t i = 0; i < epoch->plan.n_nodes; i++)
        if (!nodes_alive(epoch->group->groups, epoch->plan.name[i]))
            return false;
    return true;
}

bool epoch_resetting(const struct epoch *epoch)
{
    if (epoch_spans(epoch))
        return epoch_left_by_all(epoch) && group_now(epoch->group->groups) - epoch->empty_since < RENEW_MS;
    return epoch->team && epoch->used && !epoch->attached && !epoch->quarantined && !ep_team_stuck(epoch->team, -1) &&
           !follow_pending(epoch->group);
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
        rank_set_reason(&epoch->ranks[i], "");
    }
}

void epoch_tell(struct epoch *epoch, const struct rank *but, bool attached_only, enum ep_group_event event,
                uint32_t rank, uint64_t number, const char *text)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    for (uint32_t i = 0; i < here.n; i++) {
        const struct rank *to = &epoch->ranks[here.number[i]];

        if (to->own->member && to != but && (to->own->member->attached || !attached_only))
            to->own->member->on_event(event, rank, number, text, to->own->member->user);
    }
}

void epoch_detach(struct epoch *epoch, const char *reason)
{
    if (epoch->detached)
        return;
    epoch->detached = true;
    if (epoch->team)
        ep_team_leave_all(epoch->team);
    epoch_tell(epoch, NULL, false, EP_GROUP_DETACHED, 0, epoch->number, reason);
}
