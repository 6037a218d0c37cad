/* Registration, and puts that are not inside. */
#include <string.h>

#include "gin_tests.h"

/* ---- regions of different sizes ------------------------------------------------------------------ */

enum { REGIONS = 10, MOST_BYTES = 2 << 20 };

struct regions {
    struct comm *comm;
    struct memory memory[REGIONS];
    struct region region[REGIONS];
    uint64_t signals; /* that have come */
};

/* The first half of a region is a source, the second a target. */
static uint64_t size_of(uint32_t i, uint32_t round)
{
    static const uint64_t sizes[REGIONS] = { 16, 4096, 200, MOST_BYTES, 64, 65536, 12288, 2, 100000, 8192 };

    return sizes[(i + 3 * round) % REGIONS];
}

static uint8_t mark_of(uint32_t rank, uint32_t i, uint32_t round)
{
    return (uint8_t)(1 + (rank * 31 + i * 7 + round * 3) % 250);
}

static ep_status open_one(struct regions *all, uint32_t i, uint32_t round, struct ep_error *error)
{
    struct player *player = all->comm->player;
    uint8_t half[MOST_BYTES / 2];
    ep_status status = memory_open(player, size_of(i, round), player->setting->cuda, &all->memory[i], error);

    memset(half, mark_of(player->crew->rank, i, round), size_of(i, round) / 2);
    if (status == EP_OK)
        status = memory_write(player, &all->memory[i], 0, half, size_of(i, round) / 2, error);
    return status == EP_OK ? region_open(all->comm, &all->memory[i], 0, &all->region[i], error) : status;
}

static ep_status close_one(struct regions *all, uint32_t i, struct ep_error *error)
{
    ep_status status = region_close(all->comm, &all->region[i], error);

    memory_close(all->comm->player, &all->memory[i]);
    return status;
}

static uint64_t half_of_smaller(const struct regions *all, uint32_t a, uint32_t b)
{
    return (all->memory[a].bytes < all->memory[b].bytes ? all->memory[a].bytes : all->memory[b].bytes) / 2;
}

static uint32_t source_of(uint32_t target)
{
    return (target * 3 + 1) % REGIONS;
}

/* Into each region from another one, at the next rank. */
static ep_status put_into_each(struct regions *all, struct ep_error *error)
{
    const uint32_t to = (all->comm->player->crew->rank + 1) % all->comm->ranks;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < REGIONS && status == EP_OK; i++) {
        const struct plugin_put put = { .source = all->region[source_of(i)].gin_handle,
                                        .target = all->region[i].gin_handle,
                                        .to = all->memory[i].bytes / 2,
                                        .bytes = half_of_smaller(all, i, source_of(i)),
                                        .rank = to,
                                        .signal_op = NCCL_SIGNAL_INC,
                                        .value = 1 };

        status = comm_post(all->comm, 0, &put, NULL, error);
    }
    return status;
}

/* The mark of the source, as far as the put went, then what was there: the last put's or nothing. */
static ep_status check_each(struct regions *all, const uint32_t rounds[REGIONS], struct ep_error *error)
{
    const uint32_t ranks = all->comm->ranks, from = (all->comm->player->crew->rank + ranks - 1) % ranks;
    uint8_t half[MOST_BYTES / 2];
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < REGIONS && status == EP_OK; i++) {
        const uint64_t bytes = half_of_smaller(all, i, source_of(i));
        const uint8_t mark = mark_of(from, source_of(i), rounds[source_of(i)]);

        status = memory_read(all->comm->player, &all->memory[i], all->memory[i].bytes / 2, half, bytes, error);
        for (uint64_t at = 0; at < bytes && status == EP_OK; at++)
            if (half[at] != mark)
                return ep_error_set(error, EP_VERIFY_FAILED,
                                    "byte %llu of %llu put into region %u, from region %u, is 0x%02x: must be 0x%02x",
                                    (unsigned long long)at, (unsigned long long)bytes, i, source_of(i), half[at], mark);
    }
    return status;
}

static ep_status use_regions(struct regions *all, const uint32_t rounds[REGIONS], struct ep_error *error)
{
    ep_status status = put_into_each(all, error);

    all->signals += REGIONS;
    if (status == EP_OK)
        status = comm_wait_signal(all->comm, 0, all->signals, CREW_NOBODY, error);
    if (status == EP_OK)
        status = check_each(all, rounds, error);
    if (status == EP_OK)
        status = comm_drain(all->comm, PLAYER_ALL, error);
    return status == EP_OK ? crew_barrier(all->comm->player->crew, error) : status;
}

/* Closed from the last on and made again from the first on, with other sizes: handles may be the same, order counts. */
static ep_status change_some(struct regions *all, uint32_t round, uint32_t rounds[REGIONS], struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = REGIONS; i > 0 && status == EP_OK; i--)
        if ((i - 1) % 3 == round % 3)
            status = close_one(all, i - 1, error);
    for (uint32_t i = 0; i < REGIONS && status == EP_OK; i++)
        if (i % 3 == round % 3) {
            rounds[i] = round;
            status = open_one(all, i, round, error);
        }
    return status;
}

ep_status gin_case_regions(struct player *player, struct ep_error *error)
{
    uint32_t rounds[REGIONS] = { 0 };
    struct regions all = { 0 };
    ep_status status = gin_open(player, &all.comm, error);

    for (uint32_t i = 0; i < REGIONS && status == EP_OK; i++)
        status = open_one(&all, i, 0, error);
    for (uint32_t round = 1; round <= 6 && status == EP_OK; round++) {
        status = use_regions(&all, rounds, error);
        if (status == EP_OK)
            status = change_some(&all, round, rounds, error);
    }
    for (uint32_t i = 0; i < REGIONS && status == EP_OK; i++)
        status = close_one(&all, i, error);
    return status == EP_OK ? comm_close(all.comm, error) : status;
}

/* ---- regions that come and go -------------------------------------------------------------------- */

static ep_status register_for_a_while(struct comm *comm, uint64_t bytes, struct ep_error *error)
{
    struct memory memory;
    struct region region;
    ep_status status = memory_open(comm->player, bytes, comm->player->setting->cuda, &memory, error);

    if (status == EP_OK)
        status = region_open(comm, &memory, 0, &region, error);
    if (status == EP_OK)
        status = region_close(comm, &region, error);
    memory_close(comm->player, &memory);
    return status;
}

/* NCCL registers windows on the user's thread, while its progress thread is in the plugin. */
ep_status gin_case_regions_change(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 48, .bytes = 32 << 10 };
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &mix, &x, error);
    for (uint32_t i = 0; i < 20 && status == EP_OK; i++) {
        for (uint32_t r = 0; r < comm->ranks && status == EP_OK; r++)
            status = exchange_send(&x, r, error);
        if (status == EP_OK)
            status = register_for_a_while(comm, 4096 * (1 + i % 7), error);
        if (status == EP_OK)
            status = exchange_receive(&x, EXCHANGE_EVERYBODY, error);
        if (status == EP_OK)
            status = exchange_settle(&x, EXCHANGE_EVERYBODY, error);
    }
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- puts that are not inside -------------------------------------------------------------------- */

enum { INSIDE = 8192, ROOM = 65536 };

/* Offsets and sizes that are wrong, of a region of INSIDE bytes: each put must be done and write nothing. */
static const struct {
    uint64_t from, to, bytes, signal_at;
    uint32_t signal_op;
} outside[] = {
    { .to = INSIDE, .bytes = 1 },
    { .to = INSIDE - 1, .bytes = 2 },
    { .from = INSIDE, .bytes = 1 },
    { .from = 1, .bytes = INSIDE },
    { .bytes = INSIDE + 1 },
    { .to = UINT64_MAX - 7, .bytes = 16 },
    { .from = UINT64_MAX - 7, .bytes = 16 },
    { .to = UINT64_MAX / 2, .bytes = 64 },
    { .to = INSIDE, .bytes = 64, .signal_op = NCCL_SIGNAL_INC, .signal_at = 8 },
    { .signal_op = NCCL_SIGNAL_ADD, .signal_at = PLAYER_SIGNALS * sizeof(uint64_t) },
    { .signal_op = NCCL_SIGNAL_ADD, .signal_at = UINT64_MAX - 3 },
};

static ep_status post_outside(struct comm *comm, const struct region *region, uint32_t to, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (size_t i = 0; i < sizeof outside / sizeof *outside && status == EP_OK; i++) {
        const struct plugin_put put = { .source = region->gin_handle,
                                        .from = outside[i].from,
                                        .target = region->gin_handle,
                                        .to = outside[i].to,
                                        .bytes = outside[i].bytes,
                                        .rank = to,
                                        .signal_op = outside[i].signal_op,
                                        .signal_at = outside[i].signal_at,
                                        .value = 1 };

        status = comm_post(comm, 0, &put, NULL, error);
    }
    return status;
}

/* A right one comes through after them, and is all that was written. */
static ep_status check_inside(struct comm *comm, const struct memory *memory, uint32_t from, struct ep_error *error)
{
    uint8_t bytes[ROOM];
    ep_status status = comm_wait_signal(comm, 0, 1, from, error);

    if (status == EP_OK)
        status = memory_read(comm->player, memory, 0, bytes, ROOM, error);
    for (uint32_t i = 0; i < ROOM && status == EP_OK; i++) {
        const uint8_t right = i < 64 ? (uint8_t)(i + 1) : i < 128 ? (uint8_t)(i - 63) : 0;

        if (bytes[i] != right)
            return ep_error_set(error, EP_VERIFY_FAILED, "byte %u of a region of %d is 0x%02x: must be 0x%02x", i,
                                INSIDE, bytes[i], right);
    }
    return status;
}

static ep_status put_inside(struct comm *comm, const struct region *region, uint32_t to, struct ep_error *error)
{
    const struct plugin_put put = { .source = region->gin_handle,
                                    .target = region->gin_handle,
                                    .to = 64,
                                    .bytes = 64,
                                    .rank = to,
                                    .signal_op = NCCL_SIGNAL_INC,
                                    .value = 1 };

    return comm_post(comm, 0, &put, NULL, error);
}

static ep_status open_inside(struct comm *comm, struct memory *memory, struct memory *shown, struct region *region,
                             struct ep_error *error)
{
    uint8_t source[64];
    ep_status status = memory_open(comm->player, ROOM, comm->player->setting->cuda, memory, error);

    for (uint32_t i = 0; i < sizeof source; i++)
        source[i] = (uint8_t)(i + 1);
    if (status == EP_OK)
        status = memory_write(comm->player, memory, 0, source, sizeof source, error);
    *shown = *memory; /* what lies behind the region is memory as well: it must stay as it is */
    shown->bytes = INSIDE;
    return status == EP_OK ? region_open(comm, shown, 0, region, error) : status;
}

ep_status gin_case_outside(struct player *player, struct ep_error *error)
{
    const uint32_t ranks = player->crew->ranks, me = player->crew->rank;
    struct memory memory = { 0 }, shown;
    struct region region;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = open_inside(comm, &memory, &shown, &region, error);
    if (status == EP_OK)
        status = post_outside(comm, &region, (me + 1) % ranks, error);
    if (status == EP_OK)
        status = comm_drain(comm, PLAYER_ALL, error);
    if (status == EP_OK)
        status = put_inside(comm, &region, (me + 1) % ranks, error);
    if (status == EP_OK)
        status = check_inside(comm, &memory, (me + ranks - 1) % ranks, error);
    if (status == EP_OK)
        status = gin_close(comm, &region, error);
    memory_close(player, &memory);
    return status;
}
