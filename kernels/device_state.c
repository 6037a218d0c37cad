/* What the server writes into a rank's state before its first op. */
#include "device_state.h"

#include <string.h>

#include "ep_kernels.h"

#define TABLE_ALIGN 256u

static uint64_t align_up(uint64_t n)
{
    return (n + TABLE_ALIGN - 1) / TABLE_ALIGN * TABLE_ALIGN;
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
    for (uint32_t r = 0; r < EP_DEVICE_MAX_RANKS; r++)
        state->from[r] = r < map->limits.ranks ? 1 : EP_DEVICE_NEVER;
    memcpy(at + t.home_first, placement->first, (placement->experts + 1ull) * sizeof(uint32_t));
    memcpy(at + t.home_rank, placement->rank, homes * sizeof(uint32_t));
    memcpy(at + t.home_local, placement->local, homes * sizeof(uint32_t));
}
