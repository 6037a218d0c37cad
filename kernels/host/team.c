/* The host team: its memory, membership and numbers; what ops say of how they ended. */
#include "host_private.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>


/* ---- tables ------------------------------------------------------------------------ */

/* Hands out pieces of one block; with base NULL it only measures. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *c, uint64_t count, size_t size)
{
    void *piece = c->base ? c->base + c->used : NULL;

    c->used += (count * size + EP_LINE - 1) / EP_LINE * EP_LINE;
    return piece;
}

static uint32_t most_tokens(const struct ep_limits *l)
{
    return l->ll_max_tokens > l->ht_max_tokens ? l->ll_max_tokens : l->ht_max_tokens;
}

static void carve_handle(struct carver *c, const struct ep_layout_map *map, struct ep_host_handle *handle)
{
    const struct ep_limits *l = &map->limits;
    uint64_t tokens = most_tokens(l);

    handle->choices = carve(c, tokens * l->top_k, sizeof *handle->choices);
    handle->dest_first = carve(c, (uint64_t)l->ranks + 1, sizeof *handle->dest_first);
    handle->dest_token = carve(c, tokens * map->ht_fanout, sizeof *handle->dest_token);
    handle->sent = carve(c, l->ranks, sizeof *handle->sent);
    handle->source_first = carve(c, (uint64_t)l->ranks + 1, sizeof *handle->source_first);
    handle->source_base = carve(c, l->ranks, sizeof *handle->source_base);
    handle->arrived_token = carve(c, tokens * l->ranks, sizeof *handle->arrived_token);
    handle->arrived = carve(c, tokens * l->ranks * l->top_k, sizeof *handle->arrived);
}

static void carve_rank(struct carver *c, const struct ep_layout_map *map, struct ep_host_rank *rank)
{
    const struct ep_limits *l = &map->limits;
    uint64_t ranks = l->ranks, local = l->local_experts;
    uint64_t staged = (uint64_t)l->hidden + ep_row_scales(l->hidden) * sizeof(float);

    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++)
        carve_handle(c, map, &rank->handles[h]);
    rank->mark = carve(c, ranks, sizeof *rank->mark);
    rank->cursor = carve(c, (ranks > local ? ranks : local) + 1, sizeof *rank->cursor);
    rank->expert_count = carve(c, local, sizeof *rank->expert_count);
    rank->total = carve(c, local + 1, sizeof *rank->total);
    rank->expert_offset = carve(c, local + 1, sizeof *rank->expert_offset);
    rank->source_count = carve(c, ranks, sizeof *rank->source_count);
    rank->source_expert = carve(c, ranks * local, sizeof *rank->source_expert);
    rank->dest_base = carve(c, ranks * (1 + local), sizeof *rank->dest_base);
    rank->dest_rows = carve(c, ranks, sizeof *rank->dest_rows);
    rank->waits = carve(c, ranks, sizeof *rank->waits);
    rank->peers = carve(c, ranks, sizeof *rank->peers);
    rank->staging = carve(c, most_tokens(l), staged);
    for (int i = 0; i < 2; i++)
        rank->ready[i].counts = carve(c, ranks * (1 + local), sizeof *rank->ready[i].counts);
}

static void carve_team(struct carver *c, struct ep_host_team *team, const struct ep_placement *placement)
{
    uint32_t homes = placement->first[placement->experts];
    struct ep_host_rank none; /* while measuring there is no rank yet */

    team->home_first = carve(c, (uint64_t)placement->experts + 1, sizeof *team->home_first);
    team->home_rank = carve(c, homes, sizeof *team->home_rank);
    team->home_local = carve(c, homes, sizeof *team->home_local);
    team->local_experts = carve(c, placement->ranks, sizeof *team->local_experts);
    team->ranks = carve(c, placement->ranks, sizeof *team->ranks);
    for (uint32_t r = 0; r < placement->ranks; r++)
        carve_rank(c, &team->map, team->ranks ? &team->ranks[r] : &none);
}

static void copy_placement(struct ep_host_team *team, const struct ep_placement *placement)
{
    uint32_t homes = placement->first[placement->experts];

    memcpy(team->home_first, placement->first, (placement->experts + 1) * sizeof *team->home_first);
    memcpy(team->home_rank, placement->rank, homes * sizeof *team->home_rank);
    memcpy(team->home_local, placement->local, homes * sizeof *team->home_local);
    memcpy(team->local_experts, placement->local_experts, placement->ranks * sizeof *team->local_experts);
}

/* One mapping; pages that no op needs are never touched and cost nothing. */
static bool map_tables(struct ep_host_team *team, const struct ep_placement *placement)
{
    struct carver c = { NULL, 0 };

    carve_team(&c, team, placement);
    team->memory_bytes = c.used;
    team->memory = mmap(NULL, c.used, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (team->memory == MAP_FAILED)
        return false;
    c = (struct carver){ team->memory, 0 };
    carve_team(&c, team, placement);
    copy_placement(team, placement);
    return true;
}

static void begin_membership(struct ep_host_team *team)
{
    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        team->ranks[r].joined_ll = team->ranks[r].joined_ht = 1;
}

ep_status ep_host_team_create(const struct ep_layout_map *map, const struct ep_placement *placement,
                              uint32_t timeout_ms, struct ep_host_team **out, struct ep_error *error)
{
    struct ep_host_team *team;

    if (placement->ranks != map->limits.ranks || placement->experts != map->limits.experts ||
        placement->max_local > map->limits.local_experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement does not fit the group's limits");
    team = calloc(1, sizeof *team);
    if (!team)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory for a team of %u ranks", map->limits.ranks);
    team->map = *map;
    team->timeout_ms = timeout_ms;
    team->spin_ns = ep_host_spin_ns(map->limits.ranks);
    if (!map_tables(team, placement)) {
        ep_error_errno(error, EP_NO_MEMORY, "routing tables of %zu bytes", team->memory_bytes);
        free(team);
        return EP_NO_MEMORY;
    }
    pthread_mutex_init(&team->mutex, NULL);
    begin_membership(team);
    *out = team;
    return EP_OK;
}

void ep_host_team_destroy(struct ep_host_team *team)
{
    if (!team)
        return;
    pthread_mutex_destroy(&team->mutex);
    munmap(team->memory, team->memory_bytes);
    free(team);
}

void ep_host_team_set_timeout(struct ep_host_team *team, uint32_t timeout_ms)
{
    __atomic_store_n(&team->timeout_ms, timeout_ms, __ATOMIC_RELAXED);
}

void ep_host_team_set_window(struct ep_host_team *team, uint32_t rank, void *window)
{
    __atomic_store_n(&team->ranks[rank].window, window, __ATOMIC_SEQ_CST);
    ep_host_wake_all(team); /* peers that came first wait for it */
}

/* ---- membership ---------------------------------------------------------------------- */

bool ep_host_is_absent(const struct ep_host_team *team, uint32_t rank)
{
    return __atomic_load_n(&team->ranks[rank].absent, __ATOMIC_SEQ_CST) != 0;
}

void ep_host_team_leave(struct ep_host_team *team, uint32_t rank)
{
    pthread_mutex_lock(&team->mutex);
    __atomic_store_n(&team->ranks[rank].absent, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
    ep_host_gate_drain(team, rank); /* from here on no peer writes to its window */
}

static void forget_handles(struct ep_host_rank *rank)
{
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++) {
        struct ep_host_handle *handle = &rank->handles[h];

        handle->state = EP_HANDLE_EMPTY;
        handle->generation = 0;
        handle->retired = false;
        handle->has_choices = false;
        handle->number = 0;
    }
}

/* The rank begins after everything that has begun; mutex held.  Peers read `joined_*` once they saw
 * it present, so `absent` is cleared last. */
static void admit(struct ep_host_team *team, uint32_t r)
{
    struct ep_host_rank *rank = &team->ranks[r];

    forget_handles(rank);
    rank->ll_number = team->ll_begun;
    rank->ht_number = team->ht_begun;
    for (uint32_t b = 0; b < EP_MAX_LL_BANKS; b++)
        __atomic_store_n(&rank->released[b], team->ll_begun, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->ll_sent, team->ll_begun, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->ht_closed, team->ht_begun, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->joined_ll, team->ll_begun + 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->joined_ht, team->ht_begun + 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->ht_fresh, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->absent, 0, __ATOMIC_SEQ_CST);
}

void ep_host_team_join(struct ep_host_team *team, uint32_t rank)
{
    pthread_mutex_lock(&team->mutex);
    admit(team, rank);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
}

void ep_host_team_reset(struct ep_host_team *team)
{
    pthread_mutex_lock(&team->mutex);
    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        admit(team, r);
    pthread_mutex_unlock(&team->mutex);
}

uint64_t ep_host_begin(struct ep_host_call *call, uint32_t mode, uint64_t *participants)
{
    struct ep_host_team *team = call->team;
    bool ll = mode == EP_MODE_LL;
    uint64_t *begun = ll ? &team->ll_begun : &team->ht_begun;
    uint64_t number;

    memset(participants, 0, EP_MASK_WORDS * sizeof *participants);
    pthread_mutex_lock(&team->mutex);
    number = ll ? ++call->me->ll_number : ++call->me->ht_number;
    if (*begun < number)
        *begun = number;
    for (uint32_t r = 0; r < team->map.limits.ranks; r++) {
        const struct ep_host_rank *rank = &team->ranks[r];

        if (!rank->absent && (ll ? rank->joined_ll : rank->joined_ht) <= number)
            ep_mask_set(participants, r);
    }
    pthread_mutex_unlock(&team->mutex);
    call->result->number = number;
    return number;
}

/* ---- results --------------------------------------------------------------------------- */

ep_status ep_host_fail(struct ep_host_call *call, ep_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(call->result->text, sizeof call->result->text, format, args);
    va_end(args);
    call->result->status = (int32_t)status;
    return status;
}

ep_status ep_host_late(struct ep_host_call *call, uint32_t late_rank, enum ep_wait_phase phase)
{
    struct ep_op_result *result = call->result;

    result->status = (int32_t)EP_TIMEOUT;
    result->late_rank = late_rank;
    result->wait_phase = phase;
    ep_op_late_text(result->text, sizeof result->text, late_rank, call->op->mode, result->number,
                    __atomic_load_n(&call->team->timeout_ms, __ATOMIC_RELAXED), phase);
    return EP_TIMEOUT;
}

ep_status ep_host_detached(struct ep_host_call *call)
{
    return ep_host_fail(call, EP_DETACHED, "rank %u has left the group", call->rank);
}

void ep_host_set_arrived(struct ep_host_call *call, const uint64_t *arrived)
{
    uint32_t n = 0;

    memcpy(call->result->arrived, arrived, sizeof call->result->arrived);
    for (uint32_t w = 0; w < EP_MASK_WORDS; w++)
        n += (uint32_t)__builtin_popcountll(arrived[w]);
    call->result->absent = call->team->map.limits.ranks - n;
}
