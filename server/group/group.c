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

/* ---- the list ------------------------------------------------------------------ */

struct group *group_find(struct ep_groups *groups, const char *name)
{
    for (size_t i = 0; i < groups->n; i++)
        if (!groups->list[i]->dead && !strcmp(groups->list[i]->name, name))
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

    if (!list || !(group->name = strdup(name)))
        abort();
    group->groups = groups;
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
    free(group->retired);
    free(group->name);
    free(group);
}

static void drop_dead(struct ep_groups *groups)
{
    size_t kept = 0;

    for (size_t i = 0; i < groups->n; i++)
        if (groups->list[i]->dead && !groups->list[i]->freeing)
            free_group(groups->list[i]);
        else
            groups->list[kept++] = groups->list[i];
    groups->n = kept;
}

struct ep_spec_bounds group_bounds(const struct ep_groups *groups)
{
    return (struct ep_spec_bounds){
        .node = ep_node_name(groups->node),
        .backend = ep_node_backend(groups->node),
        .devices = ep_node_devices(groups->node),
        .memory_left = ep_node_memory_left(groups->node),
        .device_left = ep_node_device_memory_left(groups->node),
        .granule = ep_node_granule(groups->node),
    };
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

static bool is_lost(const struct rank *rank)
{
    return rank->state == EP_RANK_STATE(ABSENT) || rank->state == EP_RANK_STATE(QUARANTINED);
}

static void describe_lost(const struct epoch *epoch, const struct rank *first, uint32_t lost, char *text,
                          size_t size)
{
    int n = snprintf(text, size, "rank %u (pid %d, worker \"%.40s\") is %s: %s", first->number,
                     (int)first->worker.pid, first->worker.name ? first->worker.name : "",
                     ep_rank_state_name(first->state), first->reason);

    if (lost > 1 && n > 0 && (size_t)n < size)
        snprintf(text + n, size - (size_t)n, "; and %u more of %u ranks", lost - 1, epoch->n_ranks);
}

void group_assess(struct group *group)
{
    struct rank *first = NULL;
    char text[REASON_MAX];
    uint32_t lost = 0;

    if (!group->epoch || group->phase == EP_PHASE(DRAINING) || group->phase == EP_PHASE(RECONFIGURING))
        return; /* their reason stays */
    for (uint32_t i = 0; i < group->epoch->n_ranks; i++)
        if (is_lost(&group->epoch->ranks[i]) && lost++ == 0)
            first = &group->epoch->ranks[i];
    if (!first) {
        group_phase(group, EP_PHASE_ALL_WELL, NULL);
        return;
    }
    describe_lost(group->epoch, first, lost, text, sizeof text);
    group_phase(group, EP_PHASE_RANK_LOST, text);
}

/* ---- the next turn ---------------------------------------------------------------- */

void group_later(struct ep_groups *groups)
{
    uv_async_send(&groups->tick);
}

static void retire_older(struct group *group)
{
    for (struct epoch **link = &group->older; *link;) {
        struct epoch *epoch = *link;

        if (!epoch_idle(epoch)) {
            link = &epoch->next;
            continue;
        }
        *link = epoch->next;
        EP_INFO("group", "epoch retired", EP_S("group", group->name), EP_U("epoch", epoch->number));
        status_retire_counters(epoch);
        epoch_free(epoch);
        status_changed(group);
        link = &group->older; /* whoever heard it may have changed the list */
    }
}

static void tell_epoch(struct group *group)
{
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        for (uint32_t i = 0; i < epoch->n_ranks; i++) {
            struct ep_membership *member = epoch->ranks[i].member;

            if (!member || !member->tell_epoch)
                continue;
            member->tell_epoch = false;
            member->on_event(EP_GROUP_EPOCH, 0, group->epoch_number, "a newer epoch is there", member->user);
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

/* In two steps: the memory goes back, and when it has, the group is gone. */
static void go_on_removing(struct group *group)
{
    free_epochs(group);
    if (group->freeing)
        return;
    group_phase(group, EP_PHASE_GONE, NULL);
    group->dead = true;
    status_deleted(group);
    change_gone(group);
}

static void look_after(struct group *group)
{
    tell_epoch(group);
    retire_older(group);
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
}

/* Engines touch windows, and commits touch groups: both must be over.  Called until all is. */
static void finish_closing(struct ep_groups *groups)
{
    uint32_t freeing = 0;

    if (groups->commits || uv_is_closing((uv_handle_t *)&groups->tick))
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
    size_t n = groups->n;
    struct group **now = group_allocate(n, sizeof *now);

    /* Listeners may add groups; only drop_dead removes any. */
    if (n > 0)
        memcpy(now, groups->list, n * sizeof *now);
    for (size_t i = 0; i < n; i++)
        if (!now[i]->dead && !groups->closing)
            look_after(now[i]);
    free(now);
    drop_dead(groups);
    if (groups->dead_watches)
        status_drop_watches(groups);
    if (groups->closing)
        finish_closing(groups);
}

static void orphan(struct epoch *epoch)
{
    epoch_detach(epoch, "the server is stopping");
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        rank_orphan(&epoch->ranks[i], "the server is stopping");
    epoch->members = epoch->quarantined = 0;
}

void ep_groups_close(struct ep_groups *groups, void (*on_closed)(void *user), void *user)
{
    groups->closing = true;
    groups->on_closed = on_closed;
    groups->closed_user = user;
    for (size_t i = 0; i < groups->n; i++) {
        if (groups->list[i]->epoch)
            orphan(groups->list[i]->epoch);
        for (struct epoch *epoch = groups->list[i]->older; epoch; epoch = epoch->next)
            orphan(epoch);
    }
    group_later(groups);
}

/* ---- opening ------------------------------------------------------------------- */

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
    groups->tick.data = groups->turn.data = groups;
    groups->open_handles = 2;
    return EP_OK;
}

ep_status ep_groups_open(uv_loop_t *loop, struct ep_node *node, struct ep_store *store,
                         void (*on_ready)(const struct ep_error *error, void *user), void *user,
                         struct ep_groups **out, struct ep_error *error)
{
    struct ep_groups *groups = group_allocate(1, sizeof *groups);
    ep_status status;

    groups->loop = loop;
    groups->node = node;
    groups->store = store;
    groups->on_ready = on_ready;
    groups->ready_user = user;
    status = open_handles(groups, error);
    if (status) {
        free(groups);
        return status;
    }
    records_load(groups);
    *out = groups;
    return EP_OK;
}

/* ---- all groups ------------------------------------------------------------------ */

void ep_groups_announce_drain(struct ep_groups *groups, const char *reason)
{
    for (size_t i = 0; i < groups->n; i++) {
        struct group *group = groups->list[i];

        if (group->epoch)
            epoch_tell(group->epoch, NULL, true, EP_GROUP_DRAINING, 0, group->epoch->number, reason);
        for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
            epoch_tell(epoch, NULL, true, EP_GROUP_DRAINING, 0, epoch->number, reason);
    }
}

uint32_t ep_groups_attachments(const struct ep_groups *groups)
{
    uint32_t n = 0;

    for (size_t i = 0; i < groups->n; i++) {
        if (groups->list[i]->epoch)
            n += groups->list[i]->epoch->attached;
        for (const struct epoch *epoch = groups->list[i]->older; epoch; epoch = epoch->next)
            n += epoch->attached;
    }
    return n;
}
