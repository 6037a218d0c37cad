/* How fast a plugin is: rank 0 and its peers, printed, never judged. */
#include <stdio.h>

#include "ep_clock.h"
#include "gin_tests.h"

enum { ROUNDS = 200, WINDOW = 64 << 20, MIB = 1 << 20 };

struct bench {
    struct comm *comm;
    struct memory memory;
    struct region region;
    uint64_t expected[CREW_MAX_RANKS]; /* signals that have come */
};

static ep_status post(struct bench *b, uint32_t to, uint64_t at, uint64_t bytes, bool signal, struct ep_error *error)
{
    const uint32_t me = b->comm->player->crew->rank;
    const struct plugin_put put = { .source = bytes ? b->region.gin_handle : NULL,
                                    .from = bytes ? at : 0,
                                    .target = bytes ? b->region.gin_handle : NULL,
                                    .to = bytes ? WINDOW / 2 + at : 0,
                                    .bytes = bytes,
                                    .rank = to,
                                    .signal_op = signal ? NCCL_SIGNAL_INC : 0,
                                    .signal_at = me * sizeof(uint64_t),
                                    .value = 1 };

    return comm_post(b->comm, 0, &put, NULL, error);
}

static ep_status wait_for(struct bench *b, uint32_t from, struct ep_error *error)
{
    return comm_wait_signal(b->comm, from, ++b->expected[from], from, error);
}

static void print_us(const struct bench *b, const char *what, uint64_t ns, double n)
{
    if (b->comm->player->crew->rank == 0)
        printf("%-36s %9.2f us\n", what, (double)ns / n / 1e3);
}

/* There and back between ranks 0 and 1. */
static ep_status ping_pong(struct bench *b, const char *what, uint64_t bytes, struct ep_error *error)
{
    const uint32_t me = b->comm->player->crew->rank;
    const uint64_t start = ep_clock_ns();
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < ROUNDS && me < 2 && status == EP_OK; i++) {
        if (me == 0)
            status = post(b, 1, 0, bytes, true, error);
        if (status == EP_OK)
            status = wait_for(b, 1 - me, error);
        if (status == EP_OK && me == 1)
            status = post(b, 0, 0, bytes, true, error);
    }
    print_us(b, what, ep_clock_ns() - start, 2 * ROUNDS);
    return status == EP_OK ? crew_barrier(b->comm->player->crew, error) : status;
}

/* Rank 0 to rank 1; over when rank 1 has answered the last one's signal. */
static ep_status stream(struct bench *b, uint32_t puts, uint64_t bytes, uint64_t *ns, struct ep_error *error)
{
    const uint32_t me = b->comm->player->crew->rank;
    const uint64_t places = WINDOW / 2 / bytes, start = ep_clock_ns();
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < puts && me == 0 && status == EP_OK; i++)
        status = post(b, 1, i % places * bytes, bytes, i + 1 == puts, error);
    if (status == EP_OK && me < 2)
        status = wait_for(b, 1 - me, error);
    if (status == EP_OK && me == 1)
        status = post(b, 0, 0, 0, true, error);
    *ns = ep_clock_ns() - start;
    return status == EP_OK ? crew_barrier(b->comm->player->crew, error) : status;
}

static ep_status small_puts(struct bench *b, struct ep_error *error)
{
    uint64_t ns;
    ep_status status = stream(b, 1000, 14336, &ns, error);

    print_us(b, "put of 14336 bytes, each", ns, 1000);
    return status;
}

static void print_rate(const struct bench *b, const char *what, double bytes, uint64_t ns)
{
    if (b->comm->player->crew->rank == 0)
        printf("%-36s %9.2f GB/s\n", what, bytes / (double)ns);
}

static ep_status large_puts(struct bench *b, struct ep_error *error)
{
    uint64_t ns;
    ep_status status = stream(b, 64, MIB, &ns, error);

    print_rate(b, "64 puts of 1 MiB", 64.0 * MIB, ns);
    return status;
}

static ep_status all_to_all(struct bench *b, struct ep_error *error)
{
    const uint32_t ranks = b->comm->ranks, me = b->comm->player->crew->rank;
    const uint64_t start = ep_clock_ns();
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < 16 && status == EP_OK; i++)
        for (uint32_t d = 1; d < ranks && status == EP_OK; d++)
            status = post(b, (me + d) % ranks, (uint64_t)i * MIB, MIB, i == 15, error);
    for (uint32_t d = 1; d < ranks && status == EP_OK; d++)
        status = wait_for(b, (me + d) % ranks, error);
    print_rate(b, "all to all, 16 x 1 MiB, per rank", 16.0 * MIB * (ranks - 1), ep_clock_ns() - start);
    return status == EP_OK ? crew_barrier(b->comm->player->crew, error) : status;
}

static ep_status measure(struct bench *b, struct ep_error *error)
{
    ep_status status = ping_pong(b, "warm up", 16, error);

    if (status == EP_OK)
        status = ping_pong(b, "put of 16 bytes and signal, one way", 16, error);
    if (status == EP_OK)
        status = ping_pong(b, "signal alone, one way", 0, error);
    if (status == EP_OK)
        status = small_puts(b, error);
    if (status == EP_OK)
        status = large_puts(b, error);
    if (status == EP_OK)
        status = all_to_all(b, error);
    return status == EP_OK ? comm_drain(b->comm, PLAYER_ALL, error) : status;
}

ep_status gin_bench(struct player *player, struct ep_error *error)
{
    struct bench b = { 0 };
    ep_status status;

    if (player->crew->ranks < 2)
        return ep_error_set(error, EP_UNIMPLEMENTED, "needs 2 ranks");
    status = gin_open(player, &b.comm, error);
    if (status == EP_OK)
        status = memory_open(player, WINDOW, player->setting->cuda, &b.memory, error);
    if (status == EP_OK)
        status = region_open(b.comm, &b.memory, 0, &b.region, error);
    if (status == EP_OK)
        status = measure(&b, error);
    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK)
        status = region_close(b.comm, &b.region, error);
    if (status == EP_OK)
        status = comm_close(b.comm, error);
    memory_close(player, &b.memory);
    return status;
}
