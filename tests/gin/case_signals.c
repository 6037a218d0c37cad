/* Signals, and what stands around them. */
#include <string.h>

#include "gin_tests.h"

ep_status gin_open(struct player *player, struct comm **comm, struct ep_error *error)
{
    return comm_open(player, &(struct comm_options){ 0 }, comm, error);
}

ep_status gin_close(struct comm *comm, struct region *region, struct ep_error *error)
{
    ep_status status = comm_drain(comm, PLAYER_ALL, error);

    if (status == EP_OK)
        status = crew_barrier(comm->player->crew, error);
    if (status == EP_OK)
        status = region_close(comm, region, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- tables -------------------------------------------------------------------------------------- */

ep_status gin_case_tables(struct player *player, struct ep_error *error)
{
    bool failed = false;
    struct comm *comm;
    ep_status status = plugin_check_exports(&player->plugin, error);

    if (status == EP_OK && player->properties.netDeviceType != NCCL_DEVICE_GIN_PROXY)
        return ep_error_set(error, EP_VERIFY_FAILED, "netDeviceType is %d: NCCL's proxy takes %d",
                            (int)player->properties.netDeviceType, NCCL_DEVICE_GIN_PROXY);
    if (status == EP_OK)
        status = gin_open(player, &comm, error);
    if (status == EP_OK)
        status = comm_query(comm, &failed, error);
    if (status == EP_OK && failed)
        return ep_error_set(error, EP_VERIFY_FAILED, "queryLastError tells of an error, and nothing has been done yet");
    if (status == EP_OK)
        status = crew_barrier(player->crew, error); /* a rank that has closed may be an error to the others */
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- signals that add up ------------------------------------------------------------------------- */

enum { SIGNALS = 8, ADDED = 400 };

/* What rank `from` does to the signals of each peer: the same for all of them. */
static struct plugin_put addition(const struct player *player, uint32_t from, uint32_t i)
{
    const uint64_t random = player->setting->seed + ((uint64_t)from << 32) + i;
    struct plugin_put put = { .signal_at = (random * 0x9e3779b97f4a7c15u >> 40) % SIGNALS * sizeof(uint64_t),
                              .value = random * 0xbf58476d1ce4e5b9u,
                              .signal_op = i % 3 ? NCCL_SIGNAL_ADD : NCCL_SIGNAL_INC };

    if (put.signal_op == NCCL_SIGNAL_INC)
        put.value = 1; /* as NCCL's device code has it */
    return put;
}

static void sum_up(const struct player *player, uint64_t sums[SIGNALS])
{
    memset(sums, 0, SIGNALS * sizeof *sums);
    for (uint32_t r = 0; r < player->crew->ranks; r++)
        for (uint32_t i = 0; i < ADDED; i++) {
            const struct plugin_put put = addition(player, r, i);

            sums[put.signal_at / sizeof(uint64_t)] += put.value;
        }
}

/* The last of each rank's is counted beside, in order: then all of its are there. */
static ep_status wait_for_all(struct comm *comm, struct ep_error *error)
{
    return comm_wait_signal(comm, SIGNALS, comm->ranks, CREW_NOBODY, error);
}

static ep_status check_sums(struct comm *comm, struct ep_error *error)
{
    uint64_t sums[SIGNALS], value;
    ep_status status = EP_OK;

    sum_up(comm->player, sums);
    for (uint32_t s = 0; s < PLAYER_SIGNALS && status == EP_OK; s++) {
        const uint64_t sum = s < SIGNALS ? sums[s] : s == SIGNALS ? comm->ranks : 0;

        status = comm_signal(comm, s, &value, error);
        if (status == EP_OK && value != sum)
            return ep_error_set(error, EP_VERIFY_FAILED, "signal %u is 0x%llx: 0x%llx was added in all", s,
                                (unsigned long long)value, (unsigned long long)sum);
    }
    return status;
}

static ep_status add_to(struct comm *comm, uint32_t rank, struct ep_error *error)
{
    struct plugin_put last = {
        .rank = rank, .signal_at = SIGNALS * sizeof(uint64_t), .signal_op = NCCL_SIGNAL_INC, .value = 1
    };
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < ADDED && status == EP_OK; i++) {
        struct plugin_put put = addition(comm->player, comm->player->crew->rank, i);

        put.rank = rank;
        status = comm_post(comm, 0, &put, NULL, error);
    }
    return status == EP_OK ? comm_post(comm, 0, &last, NULL, error) : status;
}

ep_status gin_case_increments(struct player *player, struct ep_error *error)
{
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    for (uint32_t r = 0; status == EP_OK && r < comm->ranks; r++)
        status = add_to(comm, r, error);
    if (status == EP_OK)
        status = wait_for_all(comm, error);
    if (status == EP_OK)
        status = check_sums(comm, error);
    if (status == EP_OK)
        status = comm_drain(comm, PLAYER_ALL, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- one signal ---------------------------------------------------------------------------------- */

/* Around the ring, one after the other: a signal of no bytes and no regions. */
ep_status gin_case_signal_alone(struct player *player, struct ep_error *error)
{
    const uint32_t me = player->crew->rank, rounds = 20;
    struct plugin_put put = { .signal_at = 0, .signal_op = NCCL_SIGNAL_INC, .value = 1 };
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    put.rank = (me + 1) % player->crew->ranks;
    for (uint32_t i = 1; status == EP_OK && i <= rounds; i++) {
        if (me == 0)
            status = comm_post(comm, 0, &put, NULL, error);
        if (status == EP_OK)
            status = comm_wait_signal(comm, 0, i, (me + comm->ranks - 1) % comm->ranks, error);
        if (status == EP_OK && me != 0)
            status = comm_post(comm, 0, &put, NULL, error);
    }
    if (status == EP_OK)
        status = comm_drain(comm, PLAYER_ALL, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    return status == EP_OK ? comm_close(comm, error) : status;
}

/* ---- values in descriptors ----------------------------------------------------------------------- */

enum { VALUES = 300 };

static uint64_t value_of(uint32_t from, uint32_t to, uint32_t i)
{
    return 0x0102030405060708u * (i + 1) ^ (uint64_t)from << 56 ^ (uint64_t)to << 48;
}

static ep_status check_values(struct comm *comm, const struct memory *memory, uint32_t from, struct ep_error *error)
{
    const uint32_t me = comm->player->crew->rank;
    uint64_t values[VALUES];
    ep_status status = memory_read(comm->player, memory, from * sizeof values, values, sizeof values, error);

    for (uint32_t i = 0; i < VALUES && status == EP_OK; i++)
        if (values[i] != value_of(from, me, i))
            return ep_error_set(error, EP_VERIFY_FAILED, "value %u from rank %u is 0x%llx: must be 0x%llx", i, from,
                                (unsigned long long)values[i], (unsigned long long)value_of(from, me, i));
    return status;
}

static ep_status post_values(struct comm *comm, const struct region *region, uint32_t to, struct ep_error *error)
{
    const uint32_t me = comm->player->crew->rank;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < VALUES && status == EP_OK; i++) {
        const struct plugin_put put = { .target = region->gin_handle,
                                        .to = ((uint64_t)me * VALUES + i) * sizeof(uint64_t),
                                        .bytes = sizeof(uint64_t),
                                        .rank = to,
                                        .signal_op = i + 1 == VALUES ? NCCL_SIGNAL_ADD : 0,
                                        .signal_at = me * sizeof(uint64_t),
                                        .value = 7 };

        status = comm_post_value(comm, 0, &put, value_of(me, to, i), error);
    }
    return status;
}

ep_status gin_case_values(struct player *player, struct ep_error *error)
{
    struct memory memory = { 0 };
    struct region region;
    struct comm *comm;
    ep_status status = gin_open(player, &comm, error);

    if (status == EP_OK)
        status = memory_open(player, comm->ranks * VALUES * sizeof(uint64_t), player->setting->cuda, &memory, error);
    if (status == EP_OK)
        status = region_open(comm, &memory, 0, &region, error);
    for (uint32_t r = 0; status == EP_OK && r < comm->ranks; r++)
        status = post_values(comm, &region, r, error);
    for (uint32_t r = 0; status == EP_OK && r < comm->ranks; r++) {
        status = comm_wait_signal(comm, r, 7, r, error);
        if (status == EP_OK)
            status = check_values(comm, &memory, r, error);
    }
    if (status == EP_OK)
        status = gin_close(comm, &region, error);
    memory_close(player, &memory);
    return status;
}
