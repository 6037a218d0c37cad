/* The timed loops of one rank on the host backend, and with --kill. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"
#include "window.h" /* EP_RING_SLOTS */
#include "worker_private.h"

enum {
    PAIRS_UNDER_WAY = EP_RING_SLOTS / 2, /* that the ring holds */
    CHAIN_DROPPED = 16,
    VICTIM_WAIT_S = 60
};

static float us(uint64_t from, uint64_t to)
{
    return (float)((double)(to - from) / 1e3);
}

/* ---- latencies: one op at a time ------------------------------------------------------ */

static double copy_gbps(const struct worker *worker, const ep_op_info *info)
{
    uint64_t busy = info->service_ns - info->wait_ns;
    uint64_t row = (uint64_t)worker->config->hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].wire);
    uint64_t rows = 0;

    if (worker->gpu || worker->of.layout != EP_LAYOUT_RANK_MAJOR)
        return 0;
    for (uint32_t r = 0; r < worker->config->ranks; r++)
        rows += (uint64_t)worker->own.counts[r];
    return info->service_ns > info->wait_ns ? (double)(rows * row) / (double)busy : 0;
}

static ep_status fill_sample(struct worker *worker, struct bench_sample *sample, struct ep_error *error)
{
    ep_op_info dispatch = { .size = sizeof dispatch }, combine = { .size = sizeof combine };
    ep_status status = ep_dispatch_info(worker->handle, &dispatch);

    if (status == EP_OK)
        status = ep_combine_info(worker->handle, &combine);
    if (status != EP_OK)
        return worker_failure(error, status, "ep_op_info");
    sample->service = (float)((double)(dispatch.total_ns - dispatch.service_ns) / 1e3 +
                              (double)(combine.total_ns - combine.service_ns) / 1e3);
    sample->copy_gbps = (float)copy_gbps(worker, &dispatch);
    worker->result->wire_bytes = dispatch.wire_bytes + combine.wire_bytes;
    worker->result->logical_bytes = dispatch.logical_bytes + combine.logical_bytes;
    return EP_OK;
}

static ep_status timed_pair(struct worker *worker, struct bench_sample *sample, struct ep_error *error)
{
    uint64_t start = ep_clock_ns(), middle, end;
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_wait(worker, "dispatch", error);
    middle = ep_clock_ns();
    if (status == EP_OK)
        status = worker_combine(worker, worker_timed_rows(worker), error);
    if (status == EP_OK)
        status = worker_wait(worker, "combine", error);
    end = ep_clock_ns();
    sample->dispatch = us(start, middle);
    sample->combine = us(middle, end);
    sample->pair = us(start, end);
    return status == EP_OK ? fill_sample(worker, sample, error) : status;
}

static void count_pair(struct bench_rank_result *result, const struct bench_sample *sample, ep_status status)
{
    double longest = (double)(sample->dispatch > sample->combine ? sample->dispatch : sample->combine);

    result->ops_finished += status == EP_OK ? 2 : 0;
    result->ops_failed += status == EP_OK ? 0 : 1;
    if (longest > result->longest_op_us)
        result->longest_op_us = longest;
}

/* The victim stops in the middle of a pair: its dispatch is out, its combine will never come. */
static ep_status stand_at_the_edge(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status != EP_OK)
        return status;
    __atomic_store_n(&worker->result->at_the_edge, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < VICTIM_WAIT_S; i++)
        sleep(1);
    return ep_error_set(error, EP_INTERNAL, "rank %u was to be killed and was not", worker->rank);
}

static ep_status latencies(struct worker *worker, uint32_t flags, struct ep_error *error)
{
    const struct bench_config *config = worker->config;
    struct bench_rank_result *result = worker->result;
    ep_status status = EP_OK;

    result->ops_finished = result->ops_failed = 0;
    result->longest_op_us = 0;
    for (uint32_t i = 0; status == EP_OK && i < config->warmup + config->iters; i++) {
        struct bench_sample first = { 0 };
        struct bench_sample *sample = i < config->warmup ? &first : &result->sample[i - config->warmup];

        if (flags & BENCH_FLAG_VICTIM && i == (config->warmup + config->iters) / 2)
            return stand_at_the_edge(worker, error);
        status = timed_pair(worker, sample, error);
        count_pair(result, sample, status);
        if (i == 0 && status == EP_OK)
            status = worker_hash_result(worker, &worker->timed_hash, error);
        worker_get_on(worker);
    }
    result->samples = status == EP_OK ? config->iters : 0;
    return status;
}

/* ---- the chain: pairs back to back ------------------------------------------------------ */

static ep_status one_of_the_chain(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_combine(worker, worker_timed_rows(worker), error);
    worker_get_on(worker);
    return status;
}

/*
 * The first pairs are dropped.  A call returns when the ring has room, that is when the pair
 * PAIRS_UNDER_WAY before is over: so the clock starts when that one is the last of the dropped, and no
 * wait is needed for it.  A chain too short for this waits once instead.
 */
static ep_status chain(struct worker *worker, struct ep_error *error)
{
    uint32_t iters = worker->config->iters;
    uint32_t dropped = iters / 4 < CHAIN_DROPPED ? iters / 4 : CHAIN_DROPPED, counted = iters - dropped;
    bool by_ring = counted > PAIRS_UNDER_WAY;
    uint64_t start = ep_clock_ns();
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < iters; i++) {
        if (!by_ring && i == dropped) {
            status = worker_sync(worker, error);
            start = ep_clock_ns();
        }
        if (status == EP_OK)
            status = one_of_the_chain(worker, error);
        if (by_ring && dropped > 0 && i + 1 == dropped + PAIRS_UNDER_WAY)
            start = ep_clock_ns();
    }
    if (status == EP_OK)
        status = worker_sync(worker, error);
    worker->result->chain_us = (double)us(start, ep_clock_ns()) / counted;
    return status;
}

static ep_status timed(struct worker *worker, struct ep_error *error)
{
    uint64_t last = 0;
    ep_status status = latencies(worker, 0, error);

    if (status == EP_OK)
        status = chain(worker, error);
    if (status == EP_OK)
        status = worker_hash_result(worker, &last, error);
    if (status == EP_OK && worker->config->verify)
        verify_mismatch(&worker->result->verdict, worker->timed_hash != last,
                        "the last timed combine differs from the first with the same inputs");
    return status;
}

/* Timed of a backward pass are its own ops: what they need of the forward one is there before. */
static ep_status go_backward(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_wait(worker, "forward dispatch", error);
    return status == EP_OK ? worker_begin_pass(worker, BENCH_BACKWARD, error) : status;
}

static ep_status time_pass(struct worker *worker, uint32_t flags, struct ep_error *error)
{
    if (flags & (BENCH_FLAG_VICTIM | BENCH_FLAG_MASKED))
        return latencies(worker, flags, error);
    return worker->gpu ? device_time(worker, error) : timed(worker, error);
}

ep_status worker_time(struct worker *worker, uint32_t flags, struct ep_error *error)
{
    ep_status status = worker->of.pass == BENCH_BACKWARD ? go_backward(worker, error) : EP_OK;

    if (status == EP_OK)
        status = time_pass(worker, flags, error);
    if (status == EP_OK && worker->of.pass == BENCH_BACKWARD)
        status = worker_begin_pass(worker, BENCH_FORWARD, error);
    return status;
}
