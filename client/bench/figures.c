#include "figures.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_futex.h"
#include "group.h"
#include "run.h"

enum {
    COPY_BYTES = 2 * 128 * 7168 * 2, /* what a rank receives in the dispatch that payload_copy times */
    COPY_ROUNDS = 200,
    MAX_THREADS = 64,
    RPC_CALLS = 1000,
    RPC_WARMUP = 50,
    PINGS = 5000,
    LL_ITERS = 300
};

bool figure_holds(const struct figure *figure)
{
    if (figure->bound == 0)
        return true;
    return figure->at_least ? figure->value >= figure->bound : figure->value < figure->bound;
}

static void add(struct figures *figures, const char *name, double value, const char *unit, double bound,
                bool at_least, const char *meaning)
{
    if (figures->n < MAX_FIGURES)
        figures->figure[figures->n++] = (struct figure){ name, unit, value, bound, at_least, meaning };
}

/* ---- memcpy -------------------------------------------------------------------------------- */

struct copier {
    pthread_t thread;
    pthread_barrier_t *barrier;
    size_t bytes;
    bool ok;
    uint64_t start, end;
};

static void *copy(void *argument)
{
    struct copier *copier = argument;
    char *from = mmap(NULL, copier->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *to = mmap(NULL, copier->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    copier->ok = from != MAP_FAILED && to != MAP_FAILED;
    if (copier->ok) {
        memset(from, 1, copier->bytes);
        memset(to, 2, copier->bytes);
    }
    pthread_barrier_wait(copier->barrier);
    copier->start = ep_clock_ns();
    for (int i = 0; copier->ok && i < COPY_ROUNDS; i++)
        memcpy(to, from, copier->bytes);
    copier->end = ep_clock_ns();
    if (from != MAP_FAILED)
        munmap(from, copier->bytes);
    if (to != MAP_FAILED)
        munmap(to, copier->bytes);
    return NULL;
}

/* Bytes copied per ns by all threads, from the first start to the last end; 0 when it failed. */
static double copy_rate(uint32_t threads)
{
    struct copier copier[MAX_THREADS];
    pthread_barrier_t barrier;
    uint64_t start = UINT64_MAX, end = 0;
    uint32_t started = 0;
    bool ok = true;

    pthread_barrier_init(&barrier, NULL, threads);
    for (; started < threads; started++) {
        copier[started] = (struct copier){ .barrier = &barrier, .bytes = COPY_BYTES };
        if (pthread_create(&copier[started].thread, NULL, copy, &copier[started]) != 0)
            abort(); /* the others would wait at the barrier for ever */
    }
    for (uint32_t i = 0; i < threads; i++) {
        pthread_join(copier[i].thread, NULL);
        ok = ok && copier[i].ok;
        start = copier[i].start < start ? copier[i].start : start;
        end = copier[i].end > end ? copier[i].end : end;
    }
    pthread_barrier_destroy(&barrier);
    return ok && end > start ? (double)COPY_BYTES * threads * COPY_ROUNDS / (double)(end - start)
                             : 0;
}

static uint32_t processors(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;

    return n > MAX_THREADS ? MAX_THREADS : (uint32_t)n;
}

/* ---- futex ---------------------------------------------------------------------------------- */

struct ping {
    uint32_t there, back;
};

static void wait_for(uint32_t *word, uint32_t value)
{
    for (;;) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);

        if (seen == value)
            return;
        ep_futex_wait(word, seen, EP_NS_PER_S);
    }
}

static void post(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    ep_futex_wake_all(word);
}

static void *answer_pings(void *argument)
{
    struct ping *ping = argument;

    for (uint32_t i = 1; i <= PINGS; i++) {
        wait_for(&ping->there, i);
        post(&ping->back, i);
    }
    return NULL;
}

/* Median round trip between two threads that sleep for each other, us. */
static double futex_round_trip(void)
{
    struct ping ping = { 0 };
    double *us = malloc(PINGS * sizeof *us), median = 0;
    pthread_t thread;

    if (us && pthread_create(&thread, NULL, answer_pings, &ping) == 0) {
        for (uint32_t i = 1; i <= PINGS; i++) {
            uint64_t start = ep_clock_ns();

            post(&ping.there, i);
            wait_for(&ping.back, i);
            us[i - 1] = (double)(ep_clock_ns() - start) / 1e3;
        }
        pthread_join(thread, NULL);
        median = percentile(us, PINGS, 0.5);
    }
    free(us);
    return median;
}

/* ---- the service ------------------------------------------------------------------------------ */

static ep_status add_rpc(const struct bench_config *config, struct figures *figures, struct ep_error *error)
{
    struct group_link *link;
    double *us = malloc(RPC_CALLS * sizeof *us);
    ep_status status;

    if (!us)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %d samples", RPC_CALLS);
    status = group_link_open(config->server[0], &link, error);
    if (status == EP_OK) {
        status = group_time_rpc(link, RPC_WARMUP, us, error);
        if (status == EP_OK)
            status = group_time_rpc(link, RPC_CALLS, us, error);
        group_link_close(link);
    }
    if (status == EP_OK)
        add(figures, "rpc_unary_p50", percentile(us, RPC_CALLS, 0.5), "us", 300, false,
            "GetVersion on the unix socket");
    free(us);
    return status;
}

static void small_group(const struct bench_config *config, struct bench_config *small)
{
    *small = *config;
    small->group[0] = small->record[0] = '\0';
    small->ranks = 2;
    small->experts = 64;
    small->hidden = 7168;
    small->top_k = 8;
    small->routing = (struct routing_spec){ .kind = ROUTING_UNIFORM };
    small->zero_rank = small->kill_rank = small->kill_case = -1;
    small->drop = 0;
    small->bias = false;
    small->n_homes = 0;
    small->graph = 0;
    small->iters = LL_ITERS;
    small->warmup = LL_ITERS / 10;
    small->n_cases = 2;
    small->cases[0] = (struct bench_case){ EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, BENCH_BF16, 1, EP_SCALE_FP32,
                                           BENCH_FORWARD, 0 };
    small->cases[1] = (struct bench_case){ EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, BENCH_BF16, 128, EP_SCALE_FP32,
                                           BENCH_FORWARD, 0 };
}

static ep_status add_service(const struct bench_config *config, double memcpy_all, struct figures *figures,
                             struct ep_error *error)
{
    struct sweep *sweep = calloc(1, sizeof *sweep);
    ep_status status;

    if (!sweep)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the reference cases");
    small_group(config, &sweep->config);
    status = run_sweep(sweep, error);
    if (status == EP_OK && sweep->n_results == 2 && sweep_verdict(sweep) == EP_OK) {
        add(figures, "attach", sweep->attach_us / 1e3, "ms", 10, false,
            "a new worker: ep_client_open and ep_join, slowest of 2");
        add(figures, "ll_t1_round_trip_p50", sweep->results[0].pair.p50, "us", 100, false,
            "dispatch and combine of one token, 2 ranks, H 7168, K 8, rank-major bf16");
        if (sweep->config.backend == BENCH_BACKEND_HOST)
            add(figures, "payload_copy", sweep->results[1].copy_gbps, "GB/s", memcpy_all / 2, true,
                "dispatch T 128, H 7168: rows received by both ranks per time not spent waiting");
    } else if (status == EP_OK) {
        status = ep_error_set(error, sweep_verdict(sweep), "the reference cases failed: %s",
                              sweep->results[sweep->n_results - 1].error.text);
    }
    sweep_free(sweep);
    free(sweep);
    return status;
}

ep_status figures_run(const struct bench_config *config, struct figures *figures, struct ep_error *error)
{
    double one = copy_rate(1), all = copy_rate(processors());
    ep_status status;

    figures->n = 0;
    add(figures, "memcpy_one_thread", one, "GB/s", 0, false, "bytes copied, as many at once as a rank receives below");
    add(figures, "memcpy_all_threads", all, "GB/s", 0, false, "the same on every CPU at once");
    add(figures, "futex_round_trip_p50", futex_round_trip(), "us", 0, false,
        "two threads that wake each other");
    status = add_rpc(config, figures, error);
    return status == EP_OK ? add_service(config, all, figures, error) : status;
}
