/* What the server writes into a rank's state before its first op. */
#include "device_state.h"

#include <string.h>

#include "ep_kernels.h"

#define TABLE_ALIGN 256u

static uint64_t align_up(uint64_t n)
{
    return (n + TABLE_ALIGN - 1) / TABLE_ALIGN * TABLE_ALIGN;
}

struct tables {
    uint64_t home_first, home_rank, home_local, routing, weights, stride, end;
};

static struct tables lay_tables(const struct ep_placement *p, uint64_t choices)
{
    const uint64_t homes = p->first[p->experts];
    struct tables t;

    t.home_first = align_up(sizeof(struct ep_device_state));
    t.home_rank = align_up(t.home_first + (p->experts + 1ull) * sizeof(uint32_t));
    t.home_local = align_up(t.home_rank + homes * sizeof(uint32_t));
    t.routing = align_up(t.home_local + homes * sizeof(uint32_t));
    t.stride = align_up(choices * sizeof(uint32_t));
    t.weights = t.routing + EP_MAX_HANDLES * t.stride;
    t.end = t.weights + EP_MAX_HANDLES * t.stride;
    return t;
}

static uint64_t choices_of(const struct ep_layout_map *map)
{
    return (uint64_t)map->limits.ll_max_tokens * map->limits.top_k;
}

uint64_t ep_device_state_bytes(const struct ep_layout_map *map, const struct ep_placement *placement)
{
    return lay_tables(placement, choices_of(map)).end;
}

uint64_t ep_device_state_image_bytes(const struct ep_placement *placement)
{
    return lay_tables(placement, 0).routing;
}

void ep_device_state_image(const struct ep_layout_map *map, const struct ep_placement *placement,
                           uint32_t rank, uint64_t epoch, uint32_t timeout_ms, void *image)
{
    const struct tables t = lay_tables(placement, choices_of(map));
    const uint64_t homes = placement->first[placement->experts];
    struct ep_device_state *state = image;
    uint8_t *at = image;

    *state = (struct ep_device_state){
        .magic = EP_DEVICE_STATE_MAGIC,
        .version = EP_DEVICE_STATE_VERSION,
        .rank = rank,
        .epoch = epoch,
        .home_first = t.home_first,
        .home_rank = t.home_rank,
        .home_local = t.home_local,
        .routing = t.routing,
        .weights = t.weights,
        .handle_stride = t.stride,
        .timeout_ns = timeout_ms * 1000000ull,
    };
    for (uint32_t r = 0; r < EP_DEVICE_MAX_RANKS; r++)
        state->from[r] = r < map->limits.ranks ? 1 : EP_DEVICE_NEVER;
    memcpy(at + t.home_first, placement->first, (placement->experts + 1ull) * sizeof(uint32_t));
    memcpy(at + t.home_rank, placement->rank, homes * sizeof(uint32_t));
    memcpy(at + t.home_local, placement->local, homes * sizeof(uint32_t));
}
