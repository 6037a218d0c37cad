/*
 * Copies between the worker's own memory and the rank's: blocks of ep_alloc(), memory of ep_register(),
 * and the rows and scales that a rank-major dispatch leaves in a bank.
 */
#include "client_private.h"

/* Bytes from `offset` to the end of the region [begin, begin + bytes); 0: not in it. */
static uint64_t reach_in(uint64_t offset, uint64_t begin, uint64_t bytes)
{
    return offset >= begin && offset - begin < bytes ? begin + bytes - offset : 0;
}

/* The same for what a view may point to: all sources' rows, or scales, of one bank. */
static uint64_t view_reach(const struct ep_layout_map *map, uint64_t offset)
{
    const uint64_t slots = (uint64_t)map->limits.ranks * map->limits.ll_max_tokens;
    uint64_t reach = 0;

    for (uint32_t b = 0; reach == 0 && b < map->limits.ll_banks; b++) {
        const uint64_t bank = map->ll + b * map->bank_bytes;

        reach = reach_in(offset, bank + map->bank.rows, slots * map->row_bytes);
        if (reach == 0)
            reach = reach_in(offset, bank + map->bank.scales, slots * map->scales_bytes);
    }
    return reach;
}

static uint64_t window_reach(const struct ep_rank *rank, uint64_t offset)
{
    const struct ep_layout_map *map = &rank->shape.map;

    return offset >= map->arena ? arena_reach(&rank->arena, offset - map->arena) : view_reach(map, offset);
}

/* name: of the argument that is in the window; own_name: of the other one. */
static ep_status check(const struct ep_rank *rank, const char *name, const void *memory, const char *own_name,
                       const void *own, uint64_t bytes, ep_stream stream, struct ep_error *error)
{
    uint64_t reach, offset;

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (stream && !rank->executor->streams)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "stream is given: the host backend has none");
    if (bytes == 0)
        return EP_OK;
    if (!memory || !own)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is NULL", memory ? own_name : name);
    reach = (uintptr_t)memory < (uintptr_t)rank->window
                ? 0
                : window_reach(rank, (uintptr_t)memory - (uintptr_t)rank->window);
    if (reach == 0)
        reach = registered_reach(&rank->regions, memory, &offset);
    if (reach == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "%s does not point into memory of ep_alloc()%s or a view of this rank", name,
                            rank->executor->only_window ? "" : " or ep_register()");
    if (reach < bytes)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "%s has %llu bytes to the end of its block: bytes is %llu", name,
                            (unsigned long long)reach, (unsigned long long)bytes);
    return EP_OK;
}

ep_status ep_write(ep_rank *rank, void *to, const void *from, size_t bytes, ep_stream stream)
{
    struct ep_error *error = last_error();

    if (check(rank, "to", to, "from", from, bytes, stream, error) != EP_OK)
        return error->status;
    return bytes ? rank->executor->write(rank, to, from, bytes, stream, error) : EP_OK;
}

ep_status ep_read(ep_rank *rank, void *to, const void *from, size_t bytes, ep_stream stream)
{
    struct ep_error *error = last_error();

    if (check(rank, "from", from, "to", to, bytes, stream, error) != EP_OK)
        return error->status;
    return bytes ? rank->executor->read(rank, to, from, bytes, stream, error) : EP_OK;
}
