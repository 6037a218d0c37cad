/*
 * Memory of the process's own that ops use as it is.  The kernels of executor direct run in this process, so an
 * address is all they need: nothing is mapped, and nobody is told.  Under executor server the server maps it for its
 * kernels (mailbox.c).  In an op's spans such memory is a region (window.h), which keeps its number as long as it is
 * registered: a send-only op has its spans until it is complete.
 */
#include "client_private.h"

_Static_assert(EP_MAX_REGISTERED == EP_MAX_REGIONS, "ep_client.h says how many");

uint64_t registered_reach(const struct ep_regions *regions, const void *memory, uint64_t *offset)
{
    for (uint32_t i = 0; i < regions->n; i++) {
        const struct ep_region *region = &regions->region[i];
        const uint64_t into = (uintptr_t)memory - (uintptr_t)region->start; /* below it: a very large number */

        if (into < region->bytes) {
            *offset = ep_region_offset(i) + into;
            return region->bytes - into;
        }
    }
    return 0;
}

/* ---- what may be registered --------------------------------------------------------- */

static bool overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

static ep_status check_call(const struct ep_rank *rank, const void *memory, struct ep_error *error)
{
    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (rank->executor->only_window)
        return ep_error_set(error, EP_UNIMPLEMENTED, "%s", rank->executor->only_window);
    if (!memory)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "memory is NULL");
    return EP_OK;
}

static ep_status check_shape(const void *memory, uint64_t bytes, struct ep_error *error)
{
    if ((uintptr_t)memory % SPAN_ALIGN != 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "memory is %p: must be a multiple of %u", memory, SPAN_ALIGN);
    if (bytes == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "bytes is 0: must be at least 1");
    if (bytes > EP_REGION_BYTES || bytes > UINTPTR_MAX - (uintptr_t)memory)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "bytes is %llu: no memory has so many",
                            (unsigned long long)bytes);
    return EP_OK;
}

static ep_status check_free(const struct ep_rank *rank, const void *memory, uint64_t bytes, struct ep_error *error)
{
    const struct ep_layout_map *map = &rank->shape.map;
    const struct device *d = rank->device;

    for (uint32_t r = 0; r < map->limits.ranks; r++)
        if (d->window[r] && overlap(memory, bytes, d->api->memory_at(d->window[r]), map->total_bytes))
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "memory overlaps the window of rank %u: what comes from ep_alloc() needs no "
                                "registration, and the rest of a window is not for ops", r);
    for (uint32_t i = 0; i < rank->regions.n; i++) {
        const struct ep_region *region = &rank->regions.region[i];

        if (region->bytes && overlap(memory, bytes, region->start, region->bytes))
            return ep_error_set(error, EP_ALREADY_EXISTS, "memory overlaps the %llu bytes registered at %p",
                                (unsigned long long)region->bytes, (void *)region->start);
    }
    return EP_OK;
}

/* All of it lies on the rank's GPU, in whatever pieces. */
static ep_status check_gpu(const struct ep_rank *rank, const uint8_t *memory, uint64_t bytes, struct ep_error *error)
{
    const struct device *d = rank->device;
    uint64_t there = 0;

    while (there < bytes) {
        void *start;
        uint64_t size;

        if (d->api->memory_range(d->ordinal, memory + there, &start, &size, error) != EP_OK)
            return there ? ep_error_prefix(error, "memory has %llu bytes, bytes is %llu", (unsigned long long)there,
                                           (unsigned long long)bytes)
                         : ep_error_prefix(error, "memory");
        there = (uintptr_t)start + size - (uintptr_t)memory;
    }
    return EP_OK;
}

/* ---- the calls ---------------------------------------------------------------------- */

static bool is_taken(const struct ep_rank *rank, uint32_t number)
{
    return rank->regions.region[number].bytes || rank->unsure >> number & 1;
}

static ep_status find_number(const struct ep_rank *rank, uint32_t *number, struct ep_error *error)
{
    uint32_t i = 0;

    while (i < EP_MAX_REGIONS && is_taken(rank, i))
        i++;
    *number = i;
    if (i < EP_MAX_REGIONS)
        return EP_OK;
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                        "the rank has %u registered memories%s: no more are possible, but one may hold many tensors",
                        EP_MAX_REGIONS, rank->unsure ? ", with those that the server has not let go of" : "");
}

/* A server that has not answered may do so later: the number may be a region's of which we do not know. */
static ep_status tell_added(struct ep_rank *rank, uint32_t number, const struct ep_region *region,
                            uint64_t deadline_ns, struct ep_error *error)
{
    ep_status status = EP_OK;

    if (rank->executor->add_region)
        status = rank->executor->add_region(rank, number, region, deadline_ns, error);
    if (status == EP_DEADLINE_EXCEEDED)
        rank->unsure |= 1ull << number;
    return status;
}

static ep_status tell_dropped(struct ep_rank *rank, uint32_t number, uint64_t deadline_ns, struct ep_error *error)
{
    const uint64_t bit = 1ull << number;
    ep_status status = EP_OK;

    if (rank->executor->drop_region)
        status = rank->executor->drop_region(rank, number, deadline_ns, error);
    rank->unsure = status == EP_OK ? rank->unsure & ~bit : rank->unsure | bit;
    return status;
}

/* What it may still have is of no use to anybody, and counts against what it maps for this rank. */
static void tell_again(struct ep_rank *rank, uint64_t deadline_ns)
{
    struct ep_error ignored = EP_ERROR_INIT;

    for (uint32_t i = 0; i < EP_MAX_REGIONS; i++)
        if (rank->unsure >> i & 1)
            (void)tell_dropped(rank, i, deadline_ns, &ignored);
}

ep_status ep_register(ep_rank *rank, void *memory, size_t bytes)
{
    const struct ep_region region = { memory, bytes };
    struct ep_error *error = last_error();
    uint64_t deadline;
    uint32_t number;

    if (check_call(rank, memory, error) != EP_OK || check_shape(memory, bytes, error) != EP_OK
        || check_free(rank, memory, bytes, error) != EP_OK || check_gpu(rank, memory, bytes, error) != EP_OK)
        return error->status;
    deadline = request_deadline(rank);
    tell_again(rank, deadline);
    if (find_number(rank, &number, error) != EP_OK || tell_added(rank, number, &region, deadline, error) != EP_OK)
        return error->status;
    rank->regions.region[number] = region;
    if (number >= rank->regions.n)
        rank->regions.n = number + 1;
    return EP_OK;
}

ep_status ep_unregister(ep_rank *rank, void *memory)
{
    struct ep_error *error = last_error();
    uint32_t i = 0;

    if (check_call(rank, memory, error) != EP_OK)
        return error->status;

    const uint64_t deadline = request_deadline(rank);
    struct ep_regions *regions = &rank->regions;

    while (i < regions->n && regions->region[i].start != memory)
        i++;
    if (i == regions->n)
        return ep_error_set(error, EP_NOT_FOUND, "memory is %p: no registered memory of this rank begins there",
                            memory);
    regions->region[i] = (struct ep_region){ 0 };
    while (regions->n && !regions->region[regions->n - 1].bytes)
        regions->n--;
    tell_again(rank, deadline);
    return tell_dropped(rank, i, deadline, error);
}
