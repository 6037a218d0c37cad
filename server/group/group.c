/* Opening and closing, the list of groups, and what is put off to the loop's next turn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

void *group_allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);

    if (!memory)
        abort(); /* bookkeeping; windows, which are large, are refused instead */
    return memory;
}

char *group_copy(const char *text)
{
    return strcpy(group_allocate(strlen(text) + 1, 1), text);
}

/* ---- the list ------------------------------------------------------------------ */

struct group *group_find(struct ep_groups *groups, const char *name)
{
    for (size_t i = 0; i < groups->n; i++)
        if (!groups->list[i]->dead && !groups->list[i]->replaced && !strcmp(groups->list[i]->name, name))
            return groups->list[i];
    return NULL;
}

struct group *group_get(struct ep_groups *groups, const char *name, struct ep_error *error)
{
    struct group *group = group_find(groups, name);

    if (groups->closing)
        ep_error_set(error, EP_UNAVAILABLE, "the server is stopping");
    else if (!groups->ready)
        ep_error_set(error, EP_UNAVAILABLE, "the server is starting: its groups are being formed");
    else if (group && group->visible)
        return group;
    else
        ep_error_set(error, EP_NOT_FOUND, "group \"%.80s\" is not there", name);
    return NULL;
}

struct group *group_new(struct ep_groups *groups, const char *name)
{
    struct group *group = group_allocate(1, sizeof *group);
    struct group **list = realloc(groups->list, (groups->n + 1) * sizeof *list);
    size_t at = 0;

    if (!list)
        abort();
    group->name = group_copy(name);
    group->groups = groups;
    share_open(group);
    group->phase = EP_PHASE(PENDING);
    group->created_us = group->updated_us = ep_clock_wall_us();
    groups->list = list;
    while (at < groups->n && strcmp(list[at]->name, name) < 0)
        at++;
    memmove(list + at + 1, list + at, (groups->n - at) * sizeof *list);
    list[at] = group;
    groups->n++;
    return group;
}

static void free_epochs(struct group *group)
{
    struct epoch *epoch = group->epoch, *next;

    if (epoch)
        epoch->next = group->older;
    else
        epoch = group->older;
    group->epoch = group->older = NULL;
    for (; epoch; epoch = next) {
        next = epoch->next;
        status_retire_counters(epoch);
        epoch_free(epoch);
    }
}

/* Its epochs are gone. */
static void free_group(struct group *group)
{
    if (group->asked)
        ep__v1__group_spec__free_unpacked(group->asked, NULL);
    arena_clear(&group->arena);
    report_forget(group);
    history_forget(group);
    share_close(group);
    free(group->retired);
    free(group->turn.fars);
    free(group->turn.lost);
    free(group->name);
    free(group);
}

static void drop_dead(struct ep_groups *groups)
{
    size_t kept = 0;

    for (size_t i = 0; i < groups->n; i++)
        if (groups->list[i]->dead && !groups->list[i]->freeing && !groups->list[i]->report_under_way &&
            !groups->list[i]->turn.waiting && !groups->list[i]->reach.waiting)
            free_group(groups->list[i]);
        else
            groups->list[kept++] = groups->list[i];
    groups->n = kept;
}

void group_each(struct ep_groups *groups, void (*fn)(struct group *group))
{
    const size_t n = groups->n;
    struct group **now = group_allocate(n, sizeof *now);

    if (n > 0)
        memcpy(now, groups->list, n * sizeof *now);
    for (size_t i = 0; i < n; i++)
        if (!now[i]->dead)
            fn(now[i]);
    free(now);
}

uint64_t group_now(const struct ep_groups *groups)
{
    return uv_now(groups->loop);
}

/* ---- phase --------------------------------------------------------------------- */

void group_phase(struct group *group, enum ep_phase_event event, const char *reason)
{
    ep_phase next = ep_phase_next(group->phase, event);

    if (next == EP_PHASE(UNSPECIFIED)) {
        EP_ERROR("group", "a group made a move that it cannot", EP_S("group", group->name),
                 EP_S("phase", ep_phase_name(group->phase)), EP_I("event", event));
        return;
    }
    if (next != group->phase)
        EP_INFO("group", "phase", EP_S("group", group->name), EP_S("from", ep_phase_name(group->phase)),
                EP_S("to", ep_phase_name(next)), EP_S("reason", reason ? reason : ""));
    group->phase = next;
    snprintf(group->reason, sizeof group->reason, "%s", reason ? reason : "");
}

void group_formed(struct group *group)
{
    const ep_phase phase = group->phase;

    if (phase == EP_PHASE(PENDING))
        group_phase(group, EP_PHASE_FORM, NULL);
    else if (phase == EP_PHASE(READY) || phase == EP_PHASE(DEGRADED) || phase == EP_PHASE(FAILED))
        group_phase(group, EP_PHASE_CHANGE, "an epoch is put into service");
    group_phase(group, EP_PHASE_FORMED, NULL);
}

/* There is one.  Who looks again does not begin anew: that is done for each report of each node. */
static const struct rank *first_lost(struct epoch *epoch)
{
    while (!rank_is_lost(epoch->ranks[epoch->lost_from].state))
        epoch->lost_from++;
    return &epoch->ranks[epoch->lost_from];
}

static void describe_lost(const struct epoch *epoch, const struct rank *first, uint32_t lost, char *text,
                          size_t size)
{
    int n = rank_worker(first)->pid
                ? snprintf(text, size, "rank %u (pid %d, worker \"%.40s\") is %s: %s", first->number,
                           (int)rank_worker(first)->pid, worker_name(rank_worker(first)),
                           ep_rank_state_name(first->state), rank_reason(first))
                : snprintf(text, size, "rank %u is %s: %s", first->number, ep_rank_state_name(first->state),
                           rank_reason(first));

    if (lost > 1 && n > 0 && (size_t)n < size)
        snprintf(text + n, size - (size_t)n, "; and %u more of %u ranks", lost - 1, epoch->n_ranks);
}

void group_assess(struct group *group)
{
    char text[REASON_MAX];
    uint32_t lost;

    if (!group->epoch || (group->phase != EP_PHASE(READY) && group->phase != EP_PHASE(DEGRADED)))
        return; /* their reason stays */
    lost = epoch_lost_ranks(group->epoch);
    if (!lost && !epoch_served(group->epoch)) {
        group_phase(group, EP_PHASE_RANK_LOST, "this node has no part of the epoch yet: it is formed anew");
        return;
    }
    if (!lost && *group->epoch->torn_there) {
        group_phase(group, EP_PHASE_RANK_LOST, group->epoch->torn_there);
        return;
    }
    if (!lost) {
        group_phase(group, EP_PHASE_ALL_WELL, NULL);
        return;
    }
    describe_lost(group->epoch, first_lost(group->epoch), lost, text, sizeof text);
    group_phase(group, EP_PHASE_RANK_LOST, text);
}

/* ---- the next turn ---------------------------------------------------------------- */

void group_later(struct ep_groups *groups)
{
    uv_async_send(&groups->tick);
}

static void on_soon(uv_timer_t *soon)
{
    group_later(soon->data);
}

void group_after(struct ep_groups *groups, uint64_t ms)
{
    if (!uv_is_active((uv_handle_t *)&groups->soon) || uv_timer_get_due_in(&groups->soon) > ms)
        uv_timer_start(&groups->soon, on_soon, ms, 0);
}

/*
 * When its workers have gone over, what they sent last may still be on its way to those of other nodes.  No op of theirs
 * lasts longer than the group's timeout.
 */
static bool is_over(struct epoch *epoch)
{
    const struct group *group = epoch->group;

    if (!epoch_idle(epoch))
        return false;
    if (!epoch->turn_to || !epoch_spans(epoch) || !report_drains(group, epoch->number))
        return true;
    if (!epoch->idle_since)
        epoch->idle_since = group_now(group->groups);
    return group_now(group->groups) - epoch->idle_since > epoch->settled.spec->timeout_ms;
}

static void retire_older(struct group *group)
{
    for (struct epoch **link = &group->older; *link;) {
        struct epoch *epoch = *link;

        if (!is_over(epoch)) {
            link = &epoch->next;
            continue;
        }
        *link = epoch->next;
        EP_INFO("group", "epoch retired", EP_S("group", group->name), EP_U("epoch", epoch->number));
        status_retire_counters(epoch);
        epoch_free(epoch);
        report_changed(group);
        status_changed(group);
        link = &group->older; /* whoever heard it may have changed the list */
    }
}

static void tell_epoch(struct group *group)
{
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next) {
        const struct ranks here = epoch_ranks_of(epoch, epoch->own);

        for (uint32_t i = 0; i < here.n; i++) {
            struct ep_membership *member = epoch->ranks[here.number[i]].own->member;

            if (!member || !member->tell_epoch)
                continue;
            member->tell_epoch = false;
            member->on_event(EP_GROUP_EPOCH, 0, group->epoch_number, "a newer epoch is there", member->user);
        }
    }
}

static bool all_idle(const struct group *group)
{
    if (group->epoch && !epoch_idle(group->epoch))
        return false;
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (!epoch_idle(epoch))
            return false;
    return true;
}

/* In steps: the memory goes back, other members are told that this one has let go, and then the group is gone. */
static void go_on_removing(struct group *group)
{
    if (group->change && group->change->step < AGREE_SETTLE)
        return; /* its answer is on the way */
    free_epochs(group);
    if (group->freeing)
        return;
    if (group->reported) {
        group->report_due = true;
        report_write(group);
    }
    if (group->report_under_way)
        return;
    if (agree_waits_for_others(group))
        return;
    group_phase(group, EP_PHASE_GONE, NULL);
    status_deleted(group);
    agree_look(group);
    group->dead = true;
}

static void look_after(struct group *group)
{
    struct ep_groups *groups = group->groups;

    if (groups->closing)
        return;
    part_sweep(group);
    follow_sweep(group);
    tell_epoch(group);
    retire_older(group);
    agree_look(group);
    turn_look(group);
    if (group->phase == EP_PHASE(DRAINING)) {
        if (all_idle(group))
            go_on_removing(group);
        return;
    }
    if (group->epoch && epoch_reset_due(group->epoch)) {
        epoch_reset(group->epoch);
        group_assess(group);
        status_changed(group);
    }
    report_write(group);
    heal_look(group);
}

/* ---- ready --------------------------------------------------------------------- */

#define LEADER_WITHIN_MS 5000u  /* to be ready without one */
#define STORE_WITHIN_MS  30000u /* to have the records; longer than the cluster waits for its store */

static void be_ready(struct ep_groups *groups, const struct ep_error *error)
{
    void (*on_ready)(const struct ep_error *error, void *user) = groups->on_ready;

    groups->ready = !error->status;
    groups->on_ready = NULL;
    groups->told_ready = true;
    if (on_ready)
        on_ready(error, groups->ready_user);
}

/* Whoever leads has tried to form what is not there; for others that is somebody else's. */
static bool is_tried(const struct ep_groups *groups)
{
    const bool leads = ep_cluster_leads(groups->cluster);

    if (!leads && (!ep_cluster_leader(groups->cluster) || !strcmp(ep_cluster_leader(groups->cluster), nodes_self(groups))))
        return false;
    for (size_t i = 0; i < groups->n; i++)
        if (leads && (groups->list[i]->change || (heal_due(groups->list[i]) && !heal_failed(groups->list[i]))))
            return false;
    return true;
}

static void look_whether_ready(struct ep_groups *groups)
{
    struct ep_error error = EP_ERROR_INIT;
    const uint64_t waited = group_now(groups) - groups->opened;

    if (groups->told_ready || groups->closing)
        return;
    if (!groups->loaded && waited >= STORE_WITHIN_MS && ep_store_health(groups->store, &error) == EP_OK)
        ep_error_set(&error, EP_UNAVAILABLE, "the store does not say which groups there are");
    if (error.status || (groups->loaded && (is_tried(groups) || waited >= LEADER_WITHIN_MS)))
        be_ready(groups, &error);
}

/* ---- the cluster ----------------------------------------------------------------- */

static void on_cluster(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user)
{
    struct ep_groups *groups = user;

    if (groups->closing)
        return;
    if (event == EP_CLUSTER_NODE_UP || event == EP_CLUSTER_NODE_DOWN)
        report_alive(groups, node->name, node->alive);
    switch (event) {
    case EP_CLUSTER_NODE_UP: heal_at_once(groups); break; /* reports that nobody was there to read are still due */
    case EP_CLUSTER_NODE_DOWN: report_lost(groups, node->name); break;
    case EP_CLUSTER_NODE_CHANGED: return; /* who plans reads it then; there are many of these */
    case EP_CLUSTER_MARK: break; /* somebody may wait for it */
    case EP_CLUSTER_SESSION: report_all(groups); break;
    case EP_CLUSTER_LEADER:
        if (ep_cluster_leads(groups->cluster))
            agree_clear_field(groups);
        heal_at_once(groups);
        break;
    }
    group_later(groups);
}

/* ---- closing ------------------------------------------------------------------- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct ep_groups *groups = handle->data;
    void (*on_closed)(void *user) = groups->on_closed;
    void *user = groups->closed_user;

    if (--groups->open_handles)
        return;
    status_free_stale(groups);
    status_free_watches(groups);
    free(groups->list);
    free(groups);
    if (on_closed)
        on_closed(user);
}

static void close_handles(struct ep_groups *groups)
{
    uv_close((uv_handle_t *)&groups->tick, on_handle_closed);
    uv_close((uv_handle_t *)&groups->turn, on_handle_closed);
    uv_close((uv_handle_t *)&groups->sweep, on_handle_closed);
    uv_close((uv_handle_t *)&groups->soon, on_handle_closed);
}

/* Engines touch windows, and commits touch groups: both must be over.  Called until all is. */
static void finish_closing(struct ep_groups *groups)
{
    uint32_t freeing = 0;

    if (groups->commits || groups->calls || groups->joins || uv_is_closing((uv_handle_t *)&groups->tick))
        return;
    for (size_t i = 0; i < groups->n; i++)
        if (!all_idle(groups->list[i]))
            return;
    for (size_t i = 0; i < groups->n; i++) {
        free_epochs(groups->list[i]);
        freeing += groups->list[i]->freeing;
    }
    if (freeing)
        return;
    for (size_t i = 0; i < groups->n; i++)
        free_group(groups->list[i]);
    groups->n = 0;
    close_handles(groups);
}

static void on_tick(uv_async_t *tick)
{
    struct ep_groups *groups = tick->data;

    /* Listeners may add groups; only drop_dead removes any. */
    if (groups->loaded)
        group_each(groups, look_after);
    drop_dead(groups);
    if (groups->dead_watches)
        status_drop_watches(groups);
    wait_look(groups);
    look_whether_ready(groups);
    if (groups->closing)
        finish_closing(groups);
}

static void on_sweep(uv_timer_t *sweep)
{
    on_tick(&((struct ep_groups *)sweep->data)->tick);
}

static void orphan(struct epoch *epoch)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    epoch_detach(epoch, "the server is stopping");
    for (uint32_t i = 0; i < here.n; i++)
        rank_orphan(&epoch->ranks[here.number[i]], "the server is stopping");
    epoch->members = epoch->quarantined = 0;
}

/* What waits for news will hear none. */
static void close_change(struct group *group)
{
    const int step = group->change ? (int)group->change->step : AGREE_BEGIN;
    struct ep_error error = EP_ERROR_INIT;

    if (step != AGREE_OFFER && step != AGREE_SEE && step != AGREE_SETTLE)
        return;
    ep_error_set(&error, EP_UNAVAILABLE, "the server is stopping");
    change_finish(group->change, &error);
}

void ep_groups_close(struct ep_groups *groups, void (*on_closed)(void *user), void *user)
{
    groups->closing = true;
    groups->on_closed = on_closed;
    groups->closed_user = user;
    view_close(groups);
    wait_look(groups);
    ep_cluster_unwatch(groups->cluster_watch);
    group_each(groups, close_change);
    for (size_t i = 0; i < groups->n; i++) {
        part_drop(groups->list[i], "the server is stopping");
        follow_close(groups->list[i], "the server is stopping");
        if (groups->list[i]->epoch)
            orphan(groups->list[i]->epoch);
        for (struct epoch *epoch = groups->list[i]->older; epoch; epoch = epoch->next)
            orphan(epoch);
    }
    group_later(groups);
}

/* ---- opening ------------------------------------------------------------------- */

#define SWEEP_MS 100u

static void on_turn(uv_prepare_t *turn)
{
    status_free_stale(turn->data);
}

static ep_status open_handles(struct ep_groups *groups, struct ep_error *error)
{
    int rc = uv_async_init(groups->loop, &groups->tick, on_tick);

    if (rc)
        return ep_error_set(error, EP_INTERNAL, "groups: cannot make a handle: %s", uv_strerror(rc));
    uv_prepare_init(groups->loop, &groups->turn);
    uv_prepare_start(&groups->turn, on_turn);
    uv_unref((uv_handle_t *)&groups->turn);
    uv_timer_init(groups->loop, &groups->sweep);
    uv_timer_start(&groups->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    uv_unref((uv_handle_t *)&groups->sweep);
    uv_timer_init(groups->loop, &groups->soon);
    groups->tick.data = groups->turn.data = groups->sweep.data = groups->soon.data = groups;
    groups->open_handles = 4;
    return EP_OK;
}

ep_status ep_groups_open(uv_loop_t *loop, struct ep_node *node, struct ep_store *store, struct ep_cluster *cluster,
                         void (*on_ready)(const struct ep_error *error, void *user), void *user,
                         struct ep_groups **out, struct ep_error *error)
{
    struct ep_groups *groups = group_allocate(1, sizeof *groups);
    ep_status status;

    groups->loop = loop;
    groups->node = node;
    groups->store = store;
    groups->cluster = cluster;
    groups->on_ready = on_ready;
    groups->ready_user = user;
    status = open_handles(groups, error);
    if (status) {
        free(groups);
        return status;
    }
    groups->opened = group_now(groups);
    groups->cluster_watch = ep_cluster_watch(cluster, on_cluster, groups);
    view_open(groups);
    *out = groups;
    return EP_OK;
}

/* ---- all groups ------------------------------------------------------------------ */

void ep_groups_announce_drain(struct ep_groups *groups, const char *reason)
{
    for (size_t i = 0; i < groups->n; i++) {
        struct group *group = groups->list[i];

        if (group->epoch)
            epoch_tell(group->epoch, NULL, false, EP_GROUP_DRAINING, 0, group->epoch->number, reason);
        for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
            epoch_tell(epoch, NULL, false, EP_GROUP_DRAINING, 0, epoch->number, reason);
    }
}

uint32_t group_attachments(const struct group *group)
{
    uint32_t n = group->epoch ? group->epoch->attached : 0;

    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        n += epoch->attached;
    return n;
}

uint32_t ep_groups_attachments(const struct ep_groups *groups)
{
    uint32_t n = 0;

    for (size_t i = 0; i < groups->n; i++)
        n += group_attachments(groups->list[i]);
    return n;
}
