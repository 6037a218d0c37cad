/* Many operations at once. */
#include <stdlib.h>
#include <string.h>

#include "gin_tests.h"
#include "player_private.h"

enum { CELL = 64, ALL_IN_FLIGHT = 65536, MOST_COMMS = 16 };

/* ---- a grid: every operation of a full queue puts a cell of its own ------------------------------ */

struct grid {
    struct comm *comm;
    struct memory source, target; /* [depth], [ranks][depth] cells */
    struct region source_region, target_region;
    uint64_t key;
};

static void fill_cell(const struct grid *grid, uint32_t from, uint32_t to, uint32_t i, uint64_t cell[CELL / 8])
{
    for (uint32_t w = 0; w < CELL / 8; w++)
        cell[w] = player_mix(grid->key ^ (uint64_t)from << 48 ^ (uint64_t)to << 40 ^ (uint64_t)i << 8 ^ w);
}

/* Cells do not depend on the receiver: one source serves all. */
static ep_status write_cells(struct grid *grid, struct ep_error *error)
{
    const uint32_t me = grid->comm->player->crew->rank;
    uint64_t *cells = malloc((size_t)grid->comm->depth * CELL);
    ep_status status;

    if (!cells)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for cells");
    for (uint32_t i = 0; i < grid->comm->depth; i++)
        fill_cell(grid, me, 0, i, cells + (size_t)i * (CELL / 8));
    status = memory_write(grid->comm->player, &grid->source, 0, cells, (uint64_t)grid->comm->depth * CELL, error);
    free(cells);
    return status;
}

static ep_status open_grid(struct player *player, struct comm *comm, uint64_t key, struct grid *grid,
                           struct ep_error *error)
{
    const uint64_t bytes = (uint64_t)comm->depth * CELL;
    ep_status status;

    *grid = (struct grid){ .comm = comm, .key = key };
    status = memory_open(player, bytes, player->setting->cuda, &grid->source, error);
    if (status == EP_OK)
        status = memory_open(player, comm->ranks * bytes, player->setting->cuda, &grid->target, error);
    if (status == EP_OK)
        status = region_open(comm, &grid->source, 0, &grid->source_region, error);
    if (status == EP_OK)
        status = region_open(comm, &grid->target, 0, &grid->target_region, error);
    return status == EP_OK ? write_cells(grid, error) : status;
}

static ep_status close_grid(struct grid *grid, struct ep_error *error)
{
    ep_status status = region_close(grid->comm, &grid->source_region, error);

    if (status == EP_OK)
        status = region_close(grid->comm, &grid->target_region, error);
    memory_close(grid->comm->player, &grid->source);
    memory_close(grid->comm->player, &grid->target);
    return status;
}

/* As many as the queue holds; the last has a signal. */
static ep_status post_cells(struct grid *grid, uint32_t to, struct ep_error *error)
{
    const uint32_t me = grid->comm->player->crew->rank, depth = grid->comm->depth;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < depth && status == EP_OK; i++) {
        const struct plugin_put put = { .source = grid->source_region.gin_handle,
                                        .from = (uint64_t)i * CELL,
                                        .target = grid->target_region.gin_handle,
                                        .to = ((uint64_t)me * depth + i) * CELL,
                                        .bytes = CELL,
                                        .rank = to,
                                        .signal_op = i + 1 == depth ? NCCL_SIGNAL_INC : 0,
                                        .signal_at = me * sizeof(uint64_t),
                                        .value = 1 };

        status = comm_post(grid->comm, 0, &put, NULL, error);
    }
    return status;
}

static ep_status check_cells(struct grid *grid, uint32_t from, uint64_t *cells, struct ep_error *error)
{
    const uint64_t bytes = (uint64_t)grid->comm->depth * CELL;
    uint64_t cell[CELL / 8];
    ep_status status = comm_wait_signal(grid->comm, from, 1, from, error);

    if (status == EP_OK)
        status = memory_read(grid->comm->player, &grid->target, from * bytes, cells, bytes, error);
    for (uint32_t i = 0; i < grid->comm->depth && status == EP_OK; i++) {
        fill_cell(grid, from, 0, i, cell);
        if (memcmp(cell, cells + (size_t)i * (CELL / 8), CELL) != 0)
            return ep_error_set(error, EP_VERIFY_FAILED, "put %u of %u from rank %u has not come, its signal has",
                                i + 1, grid->comm->depth, from);
    }
    return status;
}

static ep_status check_grid(struct grid *grid, struct ep_error *error)
{
    uint64_t *cells = malloc((size_t)grid->comm->depth * CELL);
    ep_status status = EP_OK;

    if (!cells)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to compare with");
    for (uint32_t r = 0; r < grid->comm->ranks && status == EP_OK; r++)
        status = check_cells(grid, r, cells, error);
    free(cells);
    return status;
}

/* ---- all queues of some communicators full before any request is asked for ----------------------- */

static ep_status fill_queues(struct grid *grid, struct ep_error *error)
{
    ep_status status = EP_OK;

    __atomic_store_n(&grid->comm->hold, 1, __ATOMIC_RELAXED);
    for (uint32_t r = 0; r < grid->comm->ranks && status == EP_OK; r++)
        status = post_cells(grid, r, error);
    return status == EP_OK ? comm_wait_handed(grid->comm, error) : status;
}

static ep_status empty_queues(struct grid *grid, struct ep_error *error)
{
    ep_status status;

    __atomic_store_n(&grid->comm->hold, 0, __ATOMIC_RELAXED);
    status = comm_drain(grid->comm, PLAYER_ALL, error);
    return status == EP_OK ? check_grid(grid, error) : status;
}

static ep_status run_full(struct player *player, uint32_t n, struct ep_error *error)
{
    struct grid grid[MOST_COMMS];
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < n && status == EP_OK; i++) {
        struct comm *comm;

        status = gin_open(player, &comm, error);
        if (status == EP_OK)
            status = open_grid(player, comm, player->setting->seed + i, &grid[i], error);
    }
    for (uint32_t i = 0; i < n && status == EP_OK; i++)
        status = fill_queues(&grid[i], error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    for (uint32_t i = 0; i < n && status == EP_OK; i++)
        status = empty_queues(&grid[i], error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    for (uint32_t i = 0; i < n && status == EP_OK; i++) {
        struct comm *comm = grid[i].comm;

        status = close_grid(&grid[i], error);
        if (status == EP_OK)
            status = comm_close(comm, error);
    }
    return status;
}

ep_status gin_case_full_queues(struct player *player, struct ep_error *error)
{
    return run_full(player, 1, error);
}

ep_status gin_case_many(struct player *player, struct ep_error *error)
{
    const uint32_t depth = NCCL_MAX_REQUESTS * (uint32_t)player->properties.maxRecvs;
    const uint32_t of_one = depth * player->crew->ranks * player->crew->ranks;
    const uint32_t wanted = (ALL_IN_FLIGHT + of_one - 1) / of_one;

    return run_full(player, wanted < MOST_COMMS ? wanted : MOST_COMMS, error);
}

/* ---- requests in any order ----------------------------------------------------------------------- */

ep_status gin_case_shuffled(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 128, .bytes = 16 << 10 };
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &mix, &x, error);
    if (status == EP_OK) {
        __atomic_store_n(&comm->shuffle, 1, __ATOMIC_RELAXED);
        status = exchange_rounds(&x, 8, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    }
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- a source that is written again -------------------------------------------------------------- */

enum { BLOCK = 48 << 10, BLOCKS = 160, BLOCKS_AT_ONCE = 8 };

struct stream {
    struct comm *comm;
    struct memory source, target; /* [BLOCKS_AT_ONCE], [BLOCKS] */
    struct region source_region, target_region;
    uint8_t *block, *seen;
};

static void fill_block(const struct stream *s, uint32_t from, uint32_t i)
{
    const uint64_t key = player_mix(s->comm->player->setting->seed ^ (uint64_t)from << 32 ^ i);

    memset(s->block, (int)(key & 0xff), BLOCK);
    memcpy(s->block, &key, sizeof key);
    memcpy(s->block + BLOCK - sizeof key, &key, sizeof key);
}

static ep_status open_stream(struct stream *s, struct ep_error *error)
{
    struct player *player = s->comm->player;
    const bool cuda = player->setting->cuda;
    ep_status status = memory_open(player, BLOCKS_AT_ONCE * BLOCK, cuda, &s->source, error);

    if (status == EP_OK)
        status = memory_open(player, BLOCKS * BLOCK, cuda, &s->target, error);
    if (status == EP_OK)
        status = region_open(s->comm, &s->source, 0, &s->source_region, error);
    if (status == EP_OK)
        status = region_open(s->comm, &s->target, 0, &s->target_region, error);
    s->block = malloc(BLOCK);
    s->seen = malloc(BLOCK);
    return status == EP_OK && (!s->block || !s->seen) ? ep_error_set(error, EP_NO_MEMORY, "no memory for blocks")
                                                      : status;
}

static ep_status close_stream(struct stream *s, struct ep_error *error)
{
    ep_status status = region_close(s->comm, &s->source_region, error);

    if (status == EP_OK)
        status = region_close(s->comm, &s->target_region, error);
    memory_close(s->comm->player, &s->source);
    memory_close(s->comm->player, &s->target);
    free(s->block);
    free(s->seen);
    return status;
}

static ep_status wait_done(const struct comm *comm, uint32_t to, uint64_t number, struct ep_error *error)
{
    uint32_t turn = 0;

    while (!comm_is_done(comm, 0, to, number))
        if (!crew_go_on(comm->player->crew, &turn))
            return crew_late(comm->player->crew, error, "put %llu to rank %u is not done", (unsigned long long)number,
                             to);
    return EP_OK;
}

/* Each block as soon as the one that was in its place is done. */
static ep_status send_blocks(struct stream *s, uint32_t to, struct ep_error *error)
{
    const uint32_t me = s->comm->player->crew->rank;
    uint64_t number[BLOCKS_AT_ONCE];
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < BLOCKS && status == EP_OK; i++) {
        const uint32_t place = i % BLOCKS_AT_ONCE;
        const struct plugin_put put = { .source = s->source_region.gin_handle,
                                        .from = (uint64_t)place * BLOCK,
                                        .target = s->target_region.gin_handle,
                                        .to = (uint64_t)i * BLOCK,
                                        .bytes = BLOCK,
                                        .rank = to,
                                        .signal_op = i + 1 == BLOCKS ? NCCL_SIGNAL_INC : 0,
                                        .value = 1 };

        if (i >= BLOCKS_AT_ONCE)
            status = wait_done(s->comm, to, number[place], error);
        fill_block(s, me, i);
        if (status == EP_OK)
            status = memory_write(s->comm->player, &s->source, put.from, s->block, BLOCK, error);
        if (status == EP_OK)
            status = comm_post(s->comm, 0, &put, &number[place], error);
    }
    return status;
}

static ep_status check_blocks(struct stream *s, uint32_t from, struct ep_error *error)
{
    ep_status status = comm_wait_signal(s->comm, 0, 1, from, error);

    for (uint32_t i = 0; i < BLOCKS && status == EP_OK; i++) {
        fill_block(s, from, i);
        status = memory_read(s->comm->player, &s->target, (uint64_t)i * BLOCK, s->seen, BLOCK, error);
        if (status == EP_OK && memcmp(s->block, s->seen, BLOCK) != 0)
            return ep_error_set(error, EP_VERIFY_FAILED,
                                "put %u from rank %u is wrong: its source was written again once it was done", i, from);
    }
    return status;
}

ep_status gin_case_source_again(struct player *player, struct ep_error *error)
{
    const uint32_t ranks = player->crew->ranks, me = player->crew->rank;
    struct stream s = { 0 };
    ep_status status = gin_open(player, &s.comm, error);

    if (status == EP_OK)
        status = open_stream(&s, error);
    if (status == EP_OK)
        status = send_blocks(&s, (me + 1) % ranks, error);
    if (status == EP_OK)
        status = check_blocks(&s, (me + ranks - 1) % ranks, error);
    if (status == EP_OK)
        status = comm_drain(s.comm, PLAYER_ALL, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = close_stream(&s, error);
    return status == EP_OK ? comm_close(s.comm, error) : status;
}

/* ---- unequal load -------------------------------------------------------------------------------- */

/* Rank 0 keeps rank 1 busy with large puts, while all exchange small ones. */
ep_status gin_case_unequal(struct player *player, struct ep_error *error)
{
    const struct mix small = { .puts = 8, .bytes = 512 };
    const struct mix large = { .puts = 16, .bytes = 1 << 20, .slot_bytes = 4 << 20 };
    const uint32_t me = player->crew->rank;
    struct exchange x[2];
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &small, &x[0], error);
    if (status == EP_OK)
        status = exchange_open(comm, 0, 1, &large, &x[1], error);
    for (uint32_t i = 0; i < 6 && status == EP_OK; i++) {
        if (me == 0)
            status = exchange_send(&x[1], 1, error);
        if (status == EP_OK)
            status = exchange_rounds(&x[0], 4, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
        if (status == EP_OK && me == 1)
            status = exchange_receive(&x[1], 1u << 0, error);
        if (status == EP_OK && me == 0)
            status = exchange_settle(&x[1], 1u << 1, error);
    }
    if (status == EP_OK)
        status = comm_drain(comm, PLAYER_ALL, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    for (uint32_t i = 0; i < 2 && status == EP_OK; i++)
        status = exchange_close(&x[i], error);
    return status == EP_OK ? comm_close(comm, error) : status;
}
