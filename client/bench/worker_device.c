/*
 * The timed rounds of one rank on a GPU.  Ops follow each other on one stream, nothing is copied between
 * them and nobody waits; marks in the stream are the clock.
 */
#include <math.h>
#include <stdlib.h>

#include "ep_clock.h"
#include "sweep.h" /* percentile */
#include "worker_private.h"

enum {
    BATCH = 1024, /* pairs between two waits */
    LEAD = 8,     /* pairs after a wait that are not counted: ranks do not begin together */
    CHAIN_DROPPED = 16,
    LAUNCHES_MIN = 20, /* of a graph */
    LAUNCHES_LEAD = 2,
    LAUNCHES_MAX = 2000
};

/* ---- marks ------------------------------------------------------------------------- */

struct marks {
    uint32_t n;
    void **event;
};

static void marks_close(struct worker *worker, struct marks *marks)
{
    for (uint32_t i = 0; i < marks->n; i++)
        worker->cuda->event_destroy(worker->device, marks->event[i]);
    free(marks->event);
    *marks = (struct marks){ 0 };
}

static ep_status marks_open(struct worker *worker, uint32_t n, struct marks *marks, struct ep_error *error)
{
    *marks = (struct marks){ .event = calloc(n, sizeof *marks->event) };
    if (!marks->event)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u marks", n);
    for (; marks->n < n; marks->n++)
        if (worker->cuda->event_create(worker->device, &marks->event[marks->n], error) != EP_OK) {
            marks_close(worker, marks);
            return error->status;
        }
    return EP_OK;
}

static ep_status mark(struct worker *worker, const struct marks *marks, uint32_t i, struct ep_error *error)
{
    return worker->cuda->event_record(worker->device, marks->event[i], worker->stream, error);
}

static ep_status between(struct worker *worker, const struct marks *marks, uint32_t from, uint32_t to,
                         float *us, struct ep_error *error)
{
    return worker->cuda->event_elapsed(worker->device, marks->event[from], marks->event[to], us, error);
}

/* ---- pairs ------------------------------------------------------------------------- */

static ep_status pair(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_combine(worker, worker_timed_rows(worker), error);
    worker_get_on(worker);
    return status;
}

static ep_status pairs(struct worker *worker, uint32_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < n; i++)
        status = pair(worker, error);
    return status;
}

/* Marks 3i, 3i + 1, 3i + 2 stand before, between and after the i-th pair. */
static ep_status marked_pair(struct worker *worker, const struct marks *marks, uint32_t i,
                             struct ep_error *error)
{
    ep_status status = mark(worker, marks, 3 * i, error);

    if (status == EP_OK)
        status = worker_dispatch(worker, error);
    if (status == EP_OK)
        status = mark(worker, marks, 3 * i + 1, error);
    if (status == EP_OK)
        status = worker_combine(worker, worker_timed_rows(worker), error);
    worker_get_on(worker);
    return status == EP_OK ? mark(worker, marks, 3 * i + 2, error) : status;
}

/* ---- each op in a row of them ------------------------------------------------------- */

static ep_status read_marks(struct worker *worker, const struct marks *marks, uint32_t n,
                            struct bench_sample *sample, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        status = between(worker, marks, 3 * i, 3 * i + 1, &sample[i].dispatch, error);
        if (status == EP_OK)
            status = between(worker, marks, 3 * i + 1, 3 * i + 2, &sample[i].combine, error);
        if (status == EP_OK)
            status = between(worker, marks, 3 * i, 3 * i + 2, &sample[i].pair, error);
    }
    return status;
}

static ep_status batch(struct worker *worker, const struct marks *marks, uint32_t n,
                       struct bench_sample *sample, struct ep_error *error)
{
    ep_status status = pairs(worker, LEAD, error);

    for (uint32_t i = 0; status == EP_OK && i < n; i++)
        status = marked_pair(worker, marks, i, error);
    if (status == EP_OK)
        status = worker_sync(worker, error);
    return status == EP_OK ? read_marks(worker, marks, n, sample, error) : status;
}

static ep_status latencies(struct worker *worker, struct ep_error *error)
{
    const uint32_t iters = worker->config->iters;
    struct bench_rank_result *result = worker->result;
    struct marks marks;
    ep_status status = marks_open(worker, 3 * (iters < BATCH ? iters : BATCH), &marks, error);

    for (uint32_t at = 0; status == EP_OK && at < iters; at += BATCH)
        status = batch(worker, &marks, iters - at < BATCH ? iters - at : BATCH, &result->sample[at], error);
    marks_close(worker, &marks);
    return status;
}

/* ---- one pair at a time: what the host adds ------------------------------------------ */

static ep_status lone_pair(struct worker *worker, struct bench_sample *sample, struct ep_error *error)
{
    ep_op_info dispatch = { .size = sizeof dispatch }, combine = { .size = sizeof combine };
    const uint64_t start = ep_clock_ns();
    uint64_t end;
    ep_status status = pair(worker, error);

    if (status == EP_OK)
        status = worker->cuda->stream_sync(worker->device, worker->stream, error);
    end = ep_clock_ns();
    if (status == EP_OK)
        status = worker_sync(worker, error);
    if (status != EP_OK)
        return status;
    if (ep_dispatch_info(worker->handle, &dispatch) != EP_OK ||
        ep_combine_info(worker->handle, &combine) != EP_OK)
        return worker_failure(error, EP_INTERNAL, "ep_op_info");
    sample->service =
        (float)((double)(end - start) - (double)(dispatch.service_ns + combine.service_ns)) / 1e3f;
    worker->result->wire_bytes = dispatch.wire_bytes + combine.wire_bytes;
    worker->result->logical_bytes = dispatch.logical_bytes + combine.logical_bytes;
    return EP_OK;
}

static ep_status lone_pairs(struct worker *worker, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < worker->config->iters; i++)
        status = lone_pair(worker, &worker->result->sample[i], error);
    return status;
}

/* ---- pairs back to back --------------------------------------------------------------- */

static ep_status chain(struct worker *worker, struct ep_error *error)
{
    const uint32_t iters = worker->config->iters;
    const uint32_t dropped = iters / 4 < CHAIN_DROPPED ? iters / 4 : CHAIN_DROPPED;
    struct marks marks;
    float us = 0;
    ep_status status = marks_open(worker, 2, &marks, error);

    if (status != EP_OK)
        return status;
    status = pairs(worker, dropped, error);
    if (status == EP_OK)
        status = mark(worker, &marks, 0, error);
    if (status == EP_OK)
        status = pairs(worker, iters - dropped, error);
    if (status == EP_OK)
        status = mark(worker, &marks, 1, error);
    if (status == EP_OK)
        status = worker_sync(worker, error);
    if (status == EP_OK)
        status = between(worker, &marks, 0, 1, &us, error);
    worker->result->chain_us = (double)us / (iters - dropped);
    marks_close(worker, &marks);
    return status;
}

/* Timed ops have the same inputs, so their results are the same. */
static ep_status check_result(struct worker *worker, const char *what, struct ep_error *error)
{
    uint64_t hash;

    if (worker_hash_result(worker, &hash, error) != EP_OK)
        return error->status;
    if (worker->config->verify)
        verify_mismatch(&worker->result->verdict, hash != worker->timed_hash,
                        "the last %s combine differs from the first with the same inputs", what);
    return EP_OK;
}

ep_status device_time(struct worker *worker, struct ep_error *error)
{
    ep_status status = pairs(worker, worker->config->warmup + 1, error);

    if (status == EP_OK)
        status = worker_sync(worker, error);
    if (status == EP_OK)
        status = worker_hash_result(worker, &worker->timed_hash, error);
    if (status == EP_OK)
        status = latencies(worker, error);
    if (status == EP_OK)
        status = chain(worker, error);
    if (status == EP_OK)
        status = lone_pairs(worker, error);
    if (status == EP_OK)
        status = check_result(worker, "timed", error);
    worker->result->samples = status == EP_OK ? worker->config->iters : 0;
    return status;
}

/* ---- a graph -------------------------------------------------------------------------- */

static ep_status capture(struct worker *worker, struct ep_cuda_graph **graph, struct ep_error *error)
{
    struct ep_error ended = EP_ERROR_INIT;
    ep_status status = worker->cuda->graph_begin(worker->device, worker->stream, error);

    if (status != EP_OK)
        return status;
    status = pairs(worker, worker->config->graph, error);
    if (worker->cuda->graph_end(worker->device, worker->stream, graph, &ended) != EP_OK && status == EP_OK)
        return ep_error_set(error, ended.status, "%s", ended.text);
    if (status != EP_OK && ended.status == EP_OK)
        worker->cuda->graph_destroy(*graph);
    return status;
}

/* Launch i stands between marks i and i + 1. */
static ep_status launch(struct worker *worker, struct ep_cuda_graph *graph, const struct marks *marks,
                        uint32_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < LAUNCHES_LEAD; i++)
        status = worker->cuda->graph_launch(graph, worker->stream, error);
    if (status == EP_OK)
        status = mark(worker, marks, 0, error);
    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        status = worker->cuda->graph_launch(graph, worker->stream, error);
        if (status == EP_OK)
            status = mark(worker, marks, i + 1, error);
        worker_get_on(worker);
    }
    return status == EP_OK ? worker_sync(worker, error) : status;
}

static ep_status median_launch(struct worker *worker, const struct marks *marks, uint32_t n,
                               struct ep_error *error)
{
    double *us = malloc(n * sizeof *us);
    ep_status status = us ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for %u launches", n);

    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        float one;

        status = between(worker, marks, i, i + 1, &one, error);
        us[i] = (double)one;
    }
    if (status == EP_OK)
        worker->result->graph_us = percentile(us, n, 0.5) / worker->config->graph;
    free(us);
    return status;
}

static ep_status time_launches(struct worker *worker, struct ep_cuda_graph *graph, struct ep_error *error)
{
    const uint32_t pairs_each = worker->config->graph;
    uint32_t n = (worker->config->iters + pairs_each - 1) / pairs_each;
    struct marks marks;
    ep_status status;

    n = n < LAUNCHES_MIN ? LAUNCHES_MIN : n > LAUNCHES_MAX ? LAUNCHES_MAX : n;
    status = marks_open(worker, n + 1, &marks, error);
    if (status != EP_OK)
        return status;
    status = launch(worker, graph, &marks, n, error);
    if (status == EP_OK)
        status = median_launch(worker, &marks, n, error);
    marks_close(worker, &marks);
    return status;
}

/* ---- a graph, with other inputs each time --------------------------------------------- */

static ep_status hash_launch(struct worker *worker, struct ep_cuda_graph *graph, uint64_t *hash,
                             struct ep_error *error)
{
    ep_status status = worker->cuda->graph_launch(graph, worker->stream, error);

    if (status == EP_OK)
        status = worker_sync(worker, error);
    return status == EP_OK ? worker_hash_result(worker, hash, error) : status;
}

static ep_status hash_pair(struct worker *worker, uint64_t *hash, struct ep_error *error)
{
    ep_status status = pair(worker, error);

    if (status == EP_OK)
        status = worker_sync(worker, error);
    return status == EP_OK ? worker_hash_result(worker, hash, error) : status;
}

/* Ops that a graph holds must read their inputs anew: the same ones without a graph give the same. */
static ep_status replay(struct worker *worker, struct ep_cuda_graph *graph, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 1; status == EP_OK && i <= worker->config->replays; i++) {
        uint64_t launched = 0, called = 0;

        status = memory_push_inputs(worker, worker->tokens ? i % worker->tokens : 0, error);
        if (status == EP_OK)
            status = hash_launch(worker, graph, &launched, error);
        if (status == EP_OK)
            status = hash_pair(worker, &called, error);
        if (status == EP_OK)
            verify_mismatch(&worker->result->verdict, launched != called,
                            "launch %u of the graph differs from the same ops without one", i);
    }
    return status == EP_OK ? memory_push_inputs(worker, 0, error) : status;
}

ep_status device_time_graph(struct worker *worker, struct ep_error *error)
{
    struct ep_cuda_graph *graph;
    ep_status status = capture(worker, &graph, error);

    if (status != EP_OK)
        return status;
    status = time_launches(worker, graph, error);
    if (status == EP_OK)
        status = check_result(worker, "replayed", error);
    if (status == EP_OK)
        status = replay(worker, graph, error);
    worker->cuda->graph_destroy(graph);
    return status;
}
