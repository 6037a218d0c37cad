/* What groups the kernels can do, and what the server writes into a rank's state before its first op. */
#include "device_state.h"

#include <stdbool.h>
#include <string.h>

#include "ep_kernels.h"

#define TABLE_ALIGN 256u

/* ---- limits ------------------------------------------------------------------------ */

/* Of ep_device_shared_bytes(), what does not depend on the tokens: totals and first rows of the experts. */
static uint64_t expert_words(const struct ep_limits *l)
{
    return 2ull * l->local_experts + 1;
}

uint64_t ep_device_shared_bytes(const struct ep_limits *l)
{
    const uint64_t choices = (uint64_t)l->ll_max_tokens * l->top_k;
    const uint64_t bases = (uint64_t)l->local_experts * l->ranks;

    return ((choices > bases ? choices : bases) + expert_words(l)) * sizeof(uint32_t);
}

/* Of no tokens: L * R + 2 L + 1 words. */
uint32_t ep_device_max_local(uint32_t ranks)
{
    return (uint32_t)((EP_DEVICE_MAX_SHARED_BYTES / sizeof(uint32_t) - 1) / (ranks + 2ull));
}

_Static_assert(EP_DEVICE_MAX_SHARED_BYTES / sizeof(uint32_t) < EP_DEVICE_MAX_LOCAL,
               "who fits into shared memory has less local experts than a route can name");

/* A warp's HT counters, and the routes of 32 tokens. */
static uint64_t counting_bytes(const struct ep_limits *l)
{
    return (ep_ht_columns(l->ranks, l->local_experts) + 32ull * EP_MAX_TOP_K) * sizeof(uint32_t);
}

/* Not even one token would do. */
static bool too_many_experts(const struct ep_limits *l)
{
    struct ep_limits least = *l;

    least.ll_max_tokens = 1;
    return ep_device_shared_bytes(&least) > EP_DEVICE_MAX_SHARED_BYTES
           || (l->modes >> EP_MODE_HT & 1 && counting_bytes(l) > EP_DEVICE_MAX_SHARED_BYTES);
}

static uint32_t most_tokens(const struct ep_limits *l)
{
    return (uint32_t)((EP_DEVICE_MAX_SHARED_BYTES / sizeof(uint32_t) - expert_words(l)) / l->top_k);
}

ep_status ep_device_check(const struct ep_limits *l, struct ep_error *error)
{
    if (l->ranks > EP_DEVICE_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks is %u: the cuda backend has at most %u in a group",
                            l->ranks, EP_DEVICE_MAX_RANKS);
    if (too_many_experts(l))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "experts is %u, up to %u on a rank, with %u ranks: where their rows begin takes more than "
                            "the %u bytes of shared memory that a kernel of the cuda backend has; ask for fewer "
                            "experts",
                            l->experts, l->local_experts, l->ranks, EP_DEVICE_MAX_SHARED_BYTES);
    if (ep_device_shared_bytes(l) > EP_DEVICE_MAX_SHARED_BYTES)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "ll_max_tokens is %u: with top_k %u must be at most %u on the cuda backend, whose kernels "
                            "keep a rank's routing in %u bytes of shared memory",
                            l->ll_max_tokens, l->top_k, most_tokens(l), EP_DEVICE_MAX_SHARED_BYTES);
    return EP_OK;
}

uint32_t ep_device_ht_counting_warps(const struct ep_limits *l)
{
    const uint64_t fit = EP_DEVICE_HT_COUNTING_BYTES / counting_bytes(l);

    return fit < 1 ? 1 : fit < EP_DEVICE_HT_WARPS ? (uint32_t)fit : EP_DEVICE_HT_WARPS;
}

uint64_t ep_device_ht_shared_bytes(const struct ep_limits *l)
{
    return l->modes >> EP_MODE_HT & 1 ? ep_device_ht_counting_warps(l) * counting_bytes(l) : 0;
}

/* ---- state ------------------------------------------------------------------------- */

static uint64_t align_up(uint64_t n)
{
    return (n + TABLE_ALIGN - 1) / TABLE_ALIGN * TABLE_ALIGN;
}

static uint64_t table(uint64_t *end, uint64_t words)
{
    const uint64_t start = *end;

    *end = align_up(start + words * sizeof(uint32_t));
    return start;
}

/* None without HT. */
static void lay_ht(const struct ep_limits *l, struct ep_device_ht_tables *t, uint64_t *end)
{
    const bool has = l->modes >> EP_MODE_HT & 1;
    const uint64_t columns = has ? ep_ht_columns(l->ranks, l->local_experts) : 0;
    const uint64_t experts = has ? (uint64_t)l->ranks * l->local_experts : 0;
    const uint64_t choices = has ? (uint64_t)l->ht_max_tokens * l->top_k : 0;
    const uint64_t ranks = has ? l->ranks : 0;

    t->before = table(end, columns * EP_HT_LISTS);
    t->totals = table(end, columns);
    t->index = table(end, choices);
    t->counts = table(end, experts);
    t->bases = table(end, experts);
    t->starts = table(end, has ? l->local_experts + 1ull : 0);
    t->granted = table(end, 2 * experts);
    t->first = table(end, ranks);
    t->from = table(end, ranks);
    t->from_first = table(end, ranks);
    t->back = table(end, ranks);
    t->routing = table(end, choices);
    t->weights = table(end, choices);
    t->slots = table(end, choices);
    t->places = table(end, l->ranks * choices);
    t->place_weights = table(end, l->ranks * choices);
    t->handle_stride = *end - t->first;
    *end = t->first + EP_MAX_HANDLES * t->handle_stride;
}

void ep_device_state_tables(const struct ep_layout_map *map, const struct ep_placement *p,
                            struct ep_device_tables *t)
{
    const uint64_t homes = p->first[p->experts];
    const uint64_t choices = (uint64_t)map->limits.ll_max_tokens * map->limits.top_k;

    t->home_first = align_up(sizeof(struct ep_device_state));
    t->home_rank = align_up(t->home_first + (p->experts + 1ull) * sizeof(uint32_t));
    t->home_local = align_up(t->home_rank + homes * sizeof(uint32_t));
    t->routing = align_up(t->home_local + homes * sizeof(uint32_t));
    t->handle_stride = align_up(choices * sizeof(uint32_t));
    t->weights = t->routing + EP_MAX_HANDLES * t->handle_stride;
    t->bytes = t->weights + EP_MAX_HANDLES * t->handle_stride;
    lay_ht(&map->limits, &t->ht, &t->bytes);
}

uint64_t ep_device_state_bytes(const struct ep_layout_map *map, const struct ep_placement *placement)
{
    struct ep_device_tables t;

    ep_device_state_tables(map, placement, &t);
    return t.bytes;
}

uint64_t ep_device_state_image_bytes(const struct ep_layout_map *map, const struct ep_placement *placement)
{
    struct ep_device_tables t;

    ep_device_state_tables(map, placement, &t);
    return t.routing;
}

void ep_device_state_image(const struct ep_layout_map *map, const struct ep_placement *placement,
                           uint32_t rank, uint64_t epoch, uint32_t timeout_ms, void *image)
{
    const uint64_t homes = placement->first[placement->experts];
    struct ep_device_state *state = image;
    struct ep_device_tables t;
    uint8_t *at = image;

    ep_device_state_tables(map, placement, &t);
    *state = (struct ep_device_state){
        .magic = EP_DEVICE_STATE_MAGIC,
        .version = EP_DEVICE_STATE_VERSION,
        .rank = rank,
        .epoch = epoch,
        .timeout_ns = timeout_ms * 1000000ull,
    };
    for (uint32_t r = 0; r < EP_DEVICE_MAX_RANKS; r++) /* beyond the group's, too */
        state->ht_from[r] = state->from[r] = r < map->limits.ranks ? 1 : EP_DEVICE_NEVER;
    memcpy(at + t.home_first, placement->first, (placement->experts + 1ull) * sizeof(uint32_t));
    memcpy(at + t.home_rank, placement->rank, homes * sizeof(uint32_t));
    memcpy(at + t.home_local, placement->local, homes * sizeof(uint32_t));
}
