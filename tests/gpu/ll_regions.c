/*
 * Executor server: memory of the worker's own, which the server has mapped and lists as regions.
 *
 * A worker's inputs and outputs are in its arena here; where they are to be in a region, that is the arena once more.
 * Memory that is unmapped while ops run is memory of its own: whoever follows an address of it then takes the context
 * down, and the test with it.
 */
#include <unistd.h>

#include "ep_clock.h"
#include "ll_tests.h"

enum { ARENA = 5, LOST = 9, OWN_BYTES = 1 << 22, ROUNDS = 40, SHORT_MS = 50, LOOK_US = 100 };

static ep_status list(struct world_rank *rank, uint32_t number, void *start, uint64_t bytes, struct ep_error *error)
{
    const struct ep_region region = { start, bytes };

    return rank->world->api->serve_region(rank->serve, number, &region, error);
}

static ep_status list_arena(struct world_rank *rank, struct ep_error *error)
{
    const struct ep_layout_map *map = &rank->world->map;

    return list(rank, ARENA, rank->window + map->arena, map->limits.arena_bytes, error);
}

/* Strikes it off and waits until it may be unmapped. */
static ep_status forget(struct world_rank *rank, uint32_t number, struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    const uint64_t end = ep_clock_ns() + rank->world->stuck_ns;
    uint64_t entry;
    ep_status status = api->serve_forget(rank->serve, number, &entry, error);

    if (status != EP_OK)
        return status;
    while ((status = api->serve_forgotten(rank->serve, entry, error)) == EP_UNAVAILABLE && ep_clock_ns() < end)
        usleep(LOOK_US);
    return status;
}

/* ---- ops in regions ------------------------------------------------------------------ */

static void move(const struct world_rank *rank, struct ep_span *span)
{
    if (span->bytes)
        span->offset = ep_region_offset(ARENA) + span->offset - rank->world->map.arena;
}

/* All spans of the op. */
static struct ep_op in_region(const struct world_rank *rank, struct ep_op op)
{
    struct ep_span *const spans[] = { &op.x, &op.x_scales, &op.topk_idx, &op.topk_weights, &op.bias, &op.out,
                                      &op.out_scales, &op.counts, &op.offsets, &op.out_topk, &op.out_weights,
                                      &op.sources };

    for (size_t i = 0; i < sizeof spans / sizeof *spans; i++)
        move(rank, spans[i]);
    return op;
}

static ep_status run_in_region(struct world_rank *rank, struct ep_op op, struct ep_error *error)
{
    const bool half = (op.flags & EP_OP_SEND_ONLY) != 0;
    const struct ep_op complete = { .kind = EP_OP_COMPLETE, .mode = EP_MODE_LL, .handle = op.handle,
                                    .generation = op.generation };
    ep_status status;

    op = in_region(rank, op);
    status = ll_ring_and_wait(rank, &op, error);
    return status == EP_OK && half ? ll_ring_and_wait(rank, &complete, error) : status;
}

/* A whole pass, whose results are compared as ever. */
static ep_status pass_in_region(struct pass *pass, uint64_t seed, uint32_t flags, struct ep_error *error)
{
    ep_status status = pass_reseed(pass, seed, true, error);

    pass->dispatch = pass_dispatch_op(pass, flags);
    if (status == EP_OK)
        status = run_in_region(pass->rank, pass->dispatch, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = pass_experts(pass, false, error);
    if (status == EP_OK)
        status = run_in_region(pass->rank, pass_combine_op(pass, flags, false), error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

static ep_status run_passes(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = list_arena(pass->rank, error);

    for (uint32_t i = 0; status == EP_OK && i < 4; i++)
        status = pass_in_region(pass, passes->seed + 77 * (i + 1), i % 2 ? EP_OP_SEND_ONLY : 0, error);
    if (status == EP_OK)
        status = ll_three_passes(passes, rank, error); /* in the arena, as ever */
    return status == EP_OK ? forget(pass->rank, ARENA, error) : status;
}

ep_status ll_case_regions(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return ll_run_case(setting, shape, run_passes, error);
}

/* ---- regions that are none ----------------------------------------------------------- */

static const struct wrong {
    uint64_t offset, bytes; /* of x, beyond the beginning of the first region; 0 bytes: as many as the op wants */
} wrongs[] = {
    { 0, 0 },                                    /* region 0: there is none */
    { (ARENA - 1ull) * EP_REGION_BYTES, 0 },
    { ARENA * EP_REGION_BYTES - 16, 0 },         /* from one into the next */
    { ARENA * EP_REGION_BYTES + 8, 0 },
    { ARENA * EP_REGION_BYTES, 16 },
    { ARENA * EP_REGION_BYTES, UINT64_MAX },
    { ARENA * EP_REGION_BYTES, EP_REGION_BYTES },
    { (ARENA + 1ull) * EP_REGION_BYTES - 16, 0 },
    { (EP_MAX_REGIONS - 1ull) * EP_REGION_BYTES, 0 },
    { EP_MAX_REGIONS * EP_REGION_BYTES, 0 },
    { 65534 * EP_REGION_BYTES, 0 },
    { 65534 * EP_REGION_BYTES + EP_REGION_BYTES - 16, 0 },
};

static ep_status try_x(struct pass *pass, struct ep_span x, uint32_t i, struct ep_error *error)
{
    struct ep_op op = in_region(pass->rank, pass_dispatch_op(pass, 0));
    ep_status status;

    op.x = (struct ep_span){ x.offset, x.bytes ? x.bytes : op.x.bytes };
    status = ll_ring_and_wait(pass->rank, &op, error);
    return status == EP_OK ? ll_check_failure(pass->rank, EP_INVALID_ARGUMENT, "region", i, error) : status;
}

/* The half of an op that was sent has its regions no longer. */
static ep_status try_half(struct pass *pass, struct ep_error *error)
{
    const struct ep_op op = in_region(pass->rank, pass_dispatch_op(pass, EP_OP_SEND_ONLY));
    const struct ep_op complete = { .kind = EP_OP_COMPLETE, .mode = EP_MODE_LL, .handle = op.handle,
                                    .generation = op.generation };
    ep_status status = ll_ring_and_wait(pass->rank, &op, error);

    if (status == EP_OK)
        status = forget(pass->rank, ARENA, error);
    if (status == EP_OK)
        status = ll_ring_and_wait(pass->rank, &complete, error);
    return status == EP_OK ? ll_check_failure(pass->rank, EP_INVALID_ARGUMENT, "half", 0, error) : status;
}

static ep_status run_wrong(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    const uint64_t end = pass->rank->world->map.limits.arena_bytes;
    const uint64_t first = ep_region_offset(0);
    ep_status status = list_arena(pass->rank, error);

    for (uint32_t i = 0; status == EP_OK && i < sizeof wrongs / sizeof *wrongs; i++)
        status = try_x(pass, (struct ep_span){ first + wrongs[i].offset, wrongs[i].bytes }, i, error);
    if (status == EP_OK) /* its last bytes are not enough */
        status = try_x(pass, (struct ep_span){ ep_region_offset(ARENA) + end - 16, 0 }, 100, error);
    if (status == EP_OK)
        status = try_half(pass, error);
    if (status == EP_OK)
        status = try_x(pass, (struct ep_span){ ep_region_offset(ARENA), 0 }, 101, error);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_wrong_regions(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return ll_run_case(setting, shape, run_wrong, error);
}

/* ---- memory that goes while ops run ----------------------------------------------------- */

/* Lists new memory, rings for an op that reads it, lets go of it at once, and unmaps it as soon as it may. */
static ep_status lose_memory(struct pass *pass, uint32_t i, struct ep_error *error)
{
    struct world_rank *rank = pass->rank;
    const struct ep_cuda_api *api = rank->world->api;
    struct ep_op op = pass_dispatch_op(pass, i % 3 ? 0 : EP_OP_SEND_ONLY);
    struct ep_cuda_memory *memory;
    ep_status status = api->memory_create(rank->device, OWN_BYTES, &memory, error), forgotten;

    if (status != EP_OK)
        return status;
    status = list(rank, LOST, api->memory_at(memory), OWN_BYTES, error);
    op.x.offset = ep_region_offset(LOST);
    if (status == EP_OK)
        status = world_ring(rank, &op, error);
    usleep(i % 4 * LOOK_US);
    forgotten = forget(rank, LOST, error);
    if (forgotten == EP_OK)
        api->memory_destroy(memory);
    if (status == EP_OK)
        status = forgotten == EP_OK ? world_wait(rank, error) : forgotten;
    return status;
}

static ep_status run_losses(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < ROUNDS; i++)
        status = lose_memory(passes->pass[rank][0], i + rank, error);
    return status;
}

/* Ops that were refused leave ranks at different numbers: a reset, as after a storm. */
ep_status ll_case_lost_regions(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = world_set_timeout(passes.world, SHORT_MS, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_losses, error);
    if (status == EP_OK)
        status = world_reset(passes.world, setting->timeout_ms, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), ll_three_passes, error);
    ll_close(&passes);
    return status;
}

/* An op that waits for a peer uses it: that is not over before the op is. */
static ep_status run_held(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    struct world_rank *own = pass->rank;
    const struct ep_cuda_api *api = own->world->api;
    const struct ep_op op = in_region(own, pass_dispatch_op(pass, 0));
    uint64_t entry = 0;
    ep_status status;

    if (rank > 0) /* never comes */
        return EP_OK;
    status = list_arena(own, error);
    if (status == EP_OK)
        status = world_ring(own, &op, error);
    if (status == EP_OK)
        status = ll_wait_begun(own, false, 1, error);
    if (status == EP_OK)
        status = api->serve_forget(own->serve, ARENA, &entry, error);
    if (status != EP_OK)
        return status;
    if (api->serve_forgotten(own->serve, entry, error) != EP_UNAVAILABLE)
        return ep_error_set(error, EP_VERIFY_FAILED, "what an op uses that runs may be unmapped");
    status = world_leave(own->world, rank, error);
    if (status == EP_OK)
        status = world_wait(own, error);
    return status == EP_OK ? forget(own, ARENA, error) : status;
}

ep_status ll_case_held_regions(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_held, error);
    ll_close(&passes);
    return status;
}
