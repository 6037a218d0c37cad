/* Sizes, memory, order, several communicators and contexts. */
#include <string.h>

#include "gin_tests.h"

enum { ROUNDS = 12, EXCHANGES = 4 };

static const struct mix mixed = { .puts = 64, .bytes = 64 << 10 };

/* An exchange of all ranks on a communicator of its own. */
static ep_status run_rounds(struct player *player, const struct mix *mix, uint32_t rounds, struct ep_error *error)
{
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, mix, &x, error);
    if (status == EP_OK)
        status = exchange_rounds(&x, rounds, EXCHANGE_EVERYBODY, EXCHANGE_EVERYBODY, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

ep_status gin_case_order(struct player *player, struct ep_error *error)
{
    return run_rounds(player, &mixed, 2 * ROUNDS, error);
}

ep_status gin_case_large(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 4, .bytes = 2 << 20, .slot_bytes = 4 << 20 };

    return run_rounds(player, &mix, 3, error);
}

ep_status gin_case_host_source(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 64, .bytes = 64 << 10, .host_source = true };

    return run_rounds(player, &mix, ROUNDS, error);
}

ep_status gin_case_host_target(struct player *player, struct ep_error *error)
{
    const struct mix mix = { .puts = 64, .bytes = 64 << 10, .host_target = true };

    return run_rounds(player, &mix, ROUNDS, error);
}

/* ---- one pair of ranks at a time ----------------------------------------------------------------- */

static ep_status run_pairs(struct player *player, const struct mix *mix, uint32_t rounds, uint32_t distance,
                           struct ep_error *error)
{
    const uint32_t ranks = player->crew->ranks, me = player->crew->rank;
    struct exchange x;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, mix, &x, error);
    for (uint32_t i = 0; i < rounds && status == EP_OK; i++) {
        status = exchange_send(&x, (me + distance) % ranks, error);
        if (status == EP_OK)
            status = exchange_receive(&x, 1u << (me + ranks - distance) % ranks, error);
        if (status == EP_OK)
            status = exchange_settle(&x, 1u << (me + distance) % ranks, error);
    }
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

ep_status gin_case_self(struct player *player, struct ep_error *error)
{
    return run_pairs(player, &mixed, ROUNDS, 0, error);
}

enum { LAST_POWER = 22, MOST_SIZES = 4 + 3 * (LAST_POWER + 1) };

/* 0, 3, and all powers of two with their neighbours. */
static uint32_t all_sizes(uint64_t sizes[MOST_SIZES])
{
    uint32_t n = 0;

    sizes[n++] = 0;
    sizes[n++] = 3;
    for (uint32_t power = 0; power <= LAST_POWER; power++)
        for (uint64_t below = 2; below-- > 0;)
            sizes[n++] = (1ull << power) - below;
    for (uint32_t power = 0; power <= LAST_POWER; power++)
        sizes[n++] = (1ull << power) + 1;
    return n;
}

ep_status gin_case_sizes(struct player *player, struct ep_error *error)
{
    uint64_t sizes[MOST_SIZES];
    struct mix mix = { .sizes = sizes, .slot_bytes = 28 << 20 };

    mix.puts = all_sizes(sizes);
    return run_pairs(player, &mix, 1, 1, error);
}

/* ---- without progress --------------------------------------------------------------------------------- */

/* NCCL 2.30 waits for some puts to its own rank in a loop around test, and does nothing else meanwhile. */
ep_status gin_case_no_progress(struct player *player, struct ep_error *error)
{
    struct exchange x;
    struct comm *comm;
    ep_status status;

    if (!player->plugin.has_contexts)
        return ep_error_set(error, EP_UNIMPLEMENTED, "NCCL always asks %s for progress", player->plugin.table);
    status = gin_open(player, &comm, error);
    if (status == EP_OK)
        status = exchange_open(comm, 0, 0, &mixed, &x, error);
    if (status == EP_OK) {
        __atomic_store_n(&comm->quiet, 1, __ATOMIC_RELAXED);
        status = exchange_rounds(&x, 2, 1u << player->crew->rank, 1u << player->crew->rank, error);
    }
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = exchange_close(&x, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- far away ----------------------------------------------------------------------------------------- */

#define FAR (4ull << 30) /* from there on an offset has more than 32 bits */
enum { FAR_PUT = 4096, FAR_FROM = 300, FAR_TO = 5000, FAR_BYTES = 16384 };

/* What came is where it should be, and not where the lower 32 bits say. */
static ep_status check_far(struct comm *comm, const struct memory *memory, uint8_t from, struct ep_error *error)
{
    uint8_t near[FAR_PUT], far[FAR_PUT];
    ep_status status = memory_read(comm->player, memory, FAR + FAR_TO, far, FAR_PUT, error);

    if (status == EP_OK)
        status = memory_read(comm->player, memory, FAR_TO, near, FAR_PUT, error);
    for (uint32_t i = 0; i < FAR_PUT && status == EP_OK; i++)
        if (far[i] != from + 1 || near[i] != 0)
            return ep_error_set(error, EP_VERIFY_FAILED,
                                "byte %u of a put to 4 GiB and %d is 0x%02x: must be 0x%02x; 4 GiB before it is 0x%02x",
                                i, FAR_TO, far[i], from + 1, near[i]);
    return status;
}

static ep_status put_far(struct comm *comm, struct memory *memory, const struct region *region, struct ep_error *error)
{
    const uint32_t ranks = comm->ranks, me = comm->player->crew->rank;
    const struct plugin_put put = { .source = region->gin_handle,
                                    .from = FAR + FAR_FROM,
                                    .target = region->gin_handle,
                                    .to = FAR + FAR_TO,
                                    .bytes = FAR_PUT,
                                    .rank = (me + 1) % ranks,
                                    .signal_op = NCCL_SIGNAL_INC,
                                    .value = 1 };
    uint8_t bytes[FAR_PUT];
    ep_status status;

    memset(bytes, (int)me + 1, sizeof bytes);
    status = memory_write(comm->player, memory, put.from, bytes, FAR_PUT, error);
    if (status == EP_OK)
        status = comm_post(comm, 0, &put, NULL, error);
    if (status == EP_OK)
        status = comm_wait_signal(comm, 0, 1, (me + ranks - 1) % ranks, error);
    return status == EP_OK ? check_far(comm, memory, (uint8_t)((me + ranks - 1) % ranks), error) : status;
}

ep_status gin_case_far(struct player *player, struct ep_error *error)
{
    struct memory memory = { 0 };
    struct region region;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = memory_open(player, FAR + FAR_BYTES, player->setting->cuda, &memory, error);
    if (status == EP_OK)
        status = region_open(comm, &memory, 0, &region, error);
    if (status == EP_OK)
        status = put_far(comm, &memory, &region, error);
    if (status == EP_OK)
        status = gin_close(comm, &region, error);
    memory_close(player, &memory);
    return status;
}

/* ---- several at once ----------------------------------------------------------------------------- */

/* Rounds of all exchanges, interleaved: all send before any receives. */
static ep_status round_of_all(struct exchange *x, uint32_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < x->comm->ranks && status == EP_OK; r++)
        for (uint32_t i = 0; i < n && status == EP_OK; i++)
            status = exchange_send(&x[i], r, error);
    for (uint32_t i = n; i > 0 && status == EP_OK; i--)
        status = exchange_receive(&x[i - 1], EXCHANGE_EVERYBODY, error);
    for (uint32_t i = 0; i < n && status == EP_OK; i++)
        status = exchange_settle(&x[i], EXCHANGE_EVERYBODY, error);
    return status;
}

static ep_status rounds_of_all(struct exchange *x, uint32_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < ROUNDS / 2 && status == EP_OK; i++)
        status = round_of_all(x, n, error);
    if (status == EP_OK)
        status = crew_barrier(x->comm->player->crew, error);
    for (uint32_t i = 0; i < n && status == EP_OK; i++)
        status = exchange_close(&x[i], error);
    return status;
}

ep_status gin_case_communicators(struct player *player, struct ep_error *error)
{
    struct exchange x[EXCHANGES];
    struct comm *comms[EXCHANGES];
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < EXCHANGES && status == EP_OK; i++) {
        status = gin_open(player, &comms[i], error);
        if (status == EP_OK) /* numbered alike: what one gets from another shows */
            status = exchange_open(comms[i], 0, 0, &mixed, &x[i], error);
        if (status == EP_OK)
            x[i].key += i;
    }
    if (status == EP_OK)
        status = rounds_of_all(x, EXCHANGES, error);
    for (uint32_t i = 0; i < EXCHANGES && status == EP_OK; i++)
        status = comm_close(comms[i], error);
    return status;
}

ep_status gin_case_contexts(struct player *player, struct ep_error *error)
{
    const struct comm_options options = { .contexts = PLAYER_MAX_CONTEXTS };
    struct exchange x[PLAYER_MAX_CONTEXTS];
    struct comm *comm;
    ep_status status;

    if (!player->plugin.has_contexts)
        return ep_error_set(error, EP_UNIMPLEMENTED, "a communicator of %s is one context", player->plugin.table);
    status = comm_open(player, &options, &comm, error);
    for (uint32_t i = 0; i < PLAYER_MAX_CONTEXTS && status == EP_OK; i++)
        status = exchange_open(comm, i, i, &mixed, &x[i], error);
    if (status == EP_OK)
        status = rounds_of_all(x, PLAYER_MAX_CONTEXTS, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}
