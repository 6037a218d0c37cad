/* One case at one rank: memory, inputs, and the verified runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker_private.h"

/* ---- preparing --------------------------------------------------------------------- */

static bool allocate(struct worker *worker, size_t bytes, void **out)
{
    *out = NULL;
    if (bytes > 0)
        *out = ep_alloc(worker->ep, bytes);
    return bytes == 0 || *out;
}

static ep_status allocate_all(struct worker *worker, struct ep_error *error)
{
    const struct buffer_sizes *s = &worker->sizes;
    struct buffers *b = &worker->buffers;
    const struct {
        size_t bytes;
        void *pointer; /* to the pointer */
        const char *name;
    } all[] = {
        { s->x, &b->x, "tokens" },
        { s->x_scales, &b->x_scales, "scales" },
        { s->topk, &b->topk, "topk_idx" },
        { s->weights, &b->weights, "topk_weights" },
        { s->out, &b->out, "out" },
        { s->out_scales, &b->out_scales, "out_scales" },
        { s->counts, &b->counts, "counts" },
        { s->offsets, &b->offsets, "offsets" },
        { s->out_topk, &b->out_topk, "out_topk" },
        { s->out_weights, &b->out_weights, "out_weights" },
        { s->sources, &b->sources, "sources" },
        { s->rows, &b->rows, "rows" },
        { s->result, &b->result, "result" },
    };

    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        void *memory;

        if (!allocate(worker, all[i].bytes, &memory))
            return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%zu bytes for %s: %s", all[i].bytes,
                                all[i].name, ep_error_message());
        memcpy(all[i].pointer, &memory, sizeof memory);
    }
    return EP_OK;
}

/* LL takes 4-byte ids and HT 8-byte ones, so that both are used. */
static uint32_t index_bytes(const struct worker *worker)
{
    return worker->of.mode == EP_MODE_LL ? 4 : 8;
}

static void fill_inputs(struct worker *worker)
{
    const struct inputs *in = &worker->inputs;
    const struct ep_ref_rank *own = &in->rank[worker->rank];
    size_t row = (size_t)in->hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].input);
    size_t choices = (size_t)worker->tokens * in->config->top_k;

    for (uint32_t t = 0; t < worker->tokens; t++)
        inputs_row(in, worker->rank, t, (char *)worker->buffers.x + t * row,
                   worker->buffers.x_scales ? worker->buffers.x_scales + (size_t)t * in->scales : NULL);
    for (size_t i = 0; i < choices; i++) {
        if (index_bytes(worker) == 4)
            ((int32_t *)worker->buffers.topk)[i] = (int32_t)own->topk[i];
        else
            ((int64_t *)worker->buffers.topk)[i] = own->topk[i];
        worker->buffers.weights[i] = own->weights[i];
    }
    if (worker->buffers.rows) /* timed without having been verified */
        memset(worker->buffers.rows, 0, worker->sizes.rows);
}

static ep_status make_plan(struct worker *worker, struct ep_ref_dispatch *plan, struct ep_error *error)
{
    uint32_t max_tokens = worker->of.mode == EP_MODE_LL ? worker->info.group.ll_max_tokens : 0;

    if (!ep_ref_dispatch(&worker->inputs.routing, worker->rank, worker->of.layout, worker->config->alignment,
                         max_tokens, plan))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the expected rows");
    return EP_OK;
}

static ep_status prepare_memory(struct worker *worker, struct ep_error *error)
{
    struct ep_ref_dispatch plan;
    ep_status status = make_plan(worker, &plan, error);

    if (status != EP_OK)
        return status;
    buffer_sizes(worker->config, &worker->of, worker->tokens, worker->info.group.max_local_experts,
                 worker->info.group.ll_max_tokens, plan.positions, &worker->sizes);
    ep_ref_dispatch_free(&plan);
    status = allocate_all(worker, error);
    if (status == EP_OK)
        fill_inputs(worker);
    return status;
}

ep_status worker_prepare(struct worker *worker, uint32_t case_index, struct ep_error *error)
{
    struct bench_rank_result *result = worker->result;
    ep_status status;

    worker_end(worker);
    worker->of = worker->config->cases[case_index];
    worker->tokens = inputs_tokens(worker->config, &worker->of, worker->rank);
    memset(&result->verdict, 0, sizeof result->verdict);
    result->samples = 0;
    result->chain_us = 0;
    status = inputs_open(worker->config, &worker->of, worker->routing, &worker->inputs, error);
    if (status != EP_OK)
        return status;
    worker->prepared = true;
    status = prepare_memory(worker, error);
    if (status == EP_OK && ep_handle_create(worker->ep, &worker->handle) != EP_OK)
        status = worker_failure(error, EP_INTERNAL, "ep_handle_create");
    return status;
}

void worker_end(struct worker *worker)
{
    struct buffers *b = &worker->buffers;
    void *all[] = { b->x,          b->topk,   b->out,     b->rows,     b->result,  b->x_scales,   b->weights,
                    b->out_scales, b->counts, b->offsets, b->out_topk, b->sources, b->out_weights };

    if (!worker->prepared)
        return;
    ep_handle_destroy(worker->handle);
    ep_sync(worker->ep, -1); /* a released handle may still be on its way */
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i])
            ep_free(worker->ep, all[i]);
    inputs_close(&worker->inputs);
    worker->handle = NULL;
    worker->buffers = (struct buffers){ 0 };
    worker->prepared = false;
}

/* ---- ops --------------------------------------------------------------------------- */

/* The second half of a send-only op. */
static ep_status complete(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker->op_flags & EP_OP_SEND_ONLY ? ep_complete(worker->handle, NULL) : EP_OK;

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_complete");
}

ep_status worker_dispatch(struct worker *worker, struct ep_error *error)
{
    const struct buffers *b = &worker->buffers;
    const struct bench_dtype_info *dtype = &bench_dtypes[worker->of.dtype];
    bool cached = (worker->op_flags & EP_OP_CACHED) != 0;
    ep_dispatch_args args = {
        .size = sizeof args,
        .mode = worker->of.mode,
        .layout = worker->of.layout,
        .flags = worker->op_flags,
        .input_dtype = dtype->input,
        .wire_dtype = dtype->wire == dtype->input ? (ep_dtype)0 : dtype->wire,
        .num_tokens = worker->tokens,
        .top_k = worker->config->top_k,
        .index_bytes = index_bytes(worker),
        .alignment = worker->config->alignment,
        .tokens = b->x,
        .scales = b->x_scales,
        .topk_idx = cached ? NULL : b->topk,
        .topk_weights = cached ? NULL : b->weights,
        .out = b->out,
        .out_bytes = worker->sizes.out,
        .out_scales = b->out_scales,
        .counts = b->counts,
        .offsets = b->offsets,
        .out_topk = b->out_topk,
        .out_weights = b->out_weights,
        .sources = b->sources,
    };
    ep_status status = ep_dispatch(worker->handle, &args, NULL);

    return status == EP_OK ? complete(worker, error) : worker_failure(error, status, "ep_dispatch");
}

ep_status worker_combine(struct worker *worker, const void *rows, struct ep_error *error)
{
    ep_combine_args args = {
        .size = sizeof args,
        .flags = worker->op_flags & EP_OP_SEND_ONLY,
        .dtype = bench_dtypes[worker->of.dtype].combine,
        .rows = rows,
        .rows_bytes = rows == worker->buffers.out ? worker->sizes.out : worker->sizes.rows,
        .out = worker->buffers.result,
    };
    ep_status status = ep_combine(worker->handle, &args, NULL);

    return status == EP_OK ? complete(worker, error) : worker_failure(error, status, "ep_combine");
}

ep_status worker_wait(struct worker *worker, const char *what, struct ep_error *error)
{
    ep_status status = ep_handle_wait(worker->handle, (int32_t)worker->config->timeout_ms * 3);

    return status == EP_OK ? EP_OK : worker_failure(error, status, what);
}

/* ---- the verified runs ---------------------------------------------------------------- */

enum { POISON = 0xa5 };

static void poison(void *memory, size_t bytes)
{
    if (memory)
        memset(memory, POISON, bytes);
}

static void poison_outputs(struct worker *worker)
{
    const struct buffer_sizes *s = &worker->sizes;
    const struct buffers *b = &worker->buffers;

    poison(b->out, s->out);
    poison(b->out_scales, s->out_scales);
    poison(b->counts, s->counts);
    poison(b->offsets, s->offsets);
    poison(b->out_topk, s->out_topk);
    poison(b->out_weights, s->out_weights);
    poison(b->sources, s->sources);
    poison(b->rows, s->rows);
    poison(b->result, s->result);
}

static struct received received_of(const struct worker *worker, const ep_op_info *info)
{
    const struct buffers *b = &worker->buffers;
    ep_dtype wire = bench_dtypes[worker->of.dtype].wire;
    bool rank_major = worker->of.layout == EP_LAYOUT_RANK_MAJOR;

    return (struct received){
        .layout = worker->of.layout,
        .dtype = wire,
        .hidden = worker->inputs.hidden,
        .scales = worker->inputs.scales,
        .top_k = worker->config->top_k,
        .max_tokens = worker->info.group.ll_max_tokens,
        .row_bytes = (uint64_t)worker->inputs.hidden * ep_ref_bytes(wire),
        .base = rank_major ? info->view : b->out,
        .stride = info->view_stride,
        .scale_base = wire != EP_FP8_E4M3 ? NULL
                      : rank_major        ? info->scales_view
                                          : b->out_scales,
        .scale_stride = info->scales_view_stride,
        .scale_row = rank_major ? info->scales_row_stride : worker->inputs.scales * sizeof(float),
        .counts = b->counts,
        .offsets = b->offsets,
        .topk = b->out_topk,
        .weights = b->out_weights,
    };
}

/*
 * Where the experts' outputs go, and what the combine is given.  The first run of rank-major works in
 * place, the second one with rows of its own; both must come to the same.
 */
static const void *place_rows(const struct worker *worker, const struct received *received, uint32_t run,
                              char **rows, uint64_t *stride)
{
    bool rank_major = worker->of.layout == EP_LAYOUT_RANK_MAJOR, fp8 = received->scale_base != NULL;

    *stride = 0;
    if (rank_major && run == 0 && !fp8) {
        *rows = (char *)(uintptr_t)received->base;
        *stride = received->stride;
        return NULL;
    }
    *rows = worker->buffers.rows ? worker->buffers.rows : worker->buffers.out;
    return *rows;
}

static ep_status dispatched(struct worker *worker, ep_op_info *info, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_wait(worker, "dispatch", error);
    info->size = sizeof *info;
    if (status == EP_OK && (status = ep_dispatch_info(worker->handle, info)) != EP_OK)
        status = worker_failure(error, status, "ep_dispatch_info");
    return status;
}

static ep_status combined(struct worker *worker, const void *rows, ep_op_info *info, struct ep_error *error)
{
    ep_status status = worker_combine(worker, rows, error);

    if (status == EP_OK)
        status = worker_wait(worker, "combine", error);
    info->size = sizeof *info;
    if (status == EP_OK && (status = ep_combine_info(worker->handle, info)) != EP_OK)
        status = worker_failure(error, status, "ep_combine_info");
    return status;
}

/* Between the two ops: check what came, then let the experts work. */
static ep_status between(struct worker *worker, struct verifier *verifier, const struct received *received,
                         const struct ep_ref_dispatch *plan, const ep_op_info *info, uint32_t run,
                         const void **rows, uint64_t *hash, struct ep_error *error)
{
    uint64_t stride;
    char *to;
    ep_status status = EP_OK;

    *rows = place_rows(worker, received, run, &to, &stride);
    if (received->layout == EP_LAYOUT_RANK_MAJOR && plan->n_rows > 0 && !received->base) {
        verify_mismatch(verifier->verdict, 1, "a rank-major dispatch came without a view");
        return EP_OK;
    }
    *hash = verify_hash_dispatch(received, plan);
    if (run == 0)
        status = verify_dispatch(verifier, received, plan, worker->buffers.sources, info, error);
    return status == EP_OK ? experts_run(&worker->inputs, worker->rank, received, plan, to, stride, error)
                           : status;
}

static ep_status run_with_plan(struct worker *worker, struct verifier *verifier,
                               const struct ep_ref_dispatch *plan, const ep_op_info *dispatch, uint32_t run,
                               struct ep_error *error)
{
    struct bench_verdict *verdict = &worker->result->verdict;
    struct received received = received_of(worker, dispatch);
    ep_op_info combine = { 0 };
    const void *rows = NULL;
    uint64_t hash = 0;
    ep_status status = between(worker, verifier, &received, plan, dispatch, run, &rows, &hash, error);

    if (status == EP_OK)
        status = combined(worker, rows, &combine, error);
    if (status != EP_OK)
        return status;
    hash = verify_hash(hash, worker->buffers.result, worker->sizes.result);
    if (run == 0) /* later runs must give the same bytes */
        status = verify_combine(verifier, worker->buffers.result, combine.arrived, error);
    else
        verify_mismatch(verdict, hash != verdict->hash, "run %u differs from run 0 with the same inputs",
                        run);
    verdict->hash = hash;
    verdict->runs++;
    worker->result->wire_bytes = dispatch->wire_bytes + combine.wire_bytes;
    worker->result->logical_bytes = dispatch->logical_bytes + combine.logical_bytes;
    return status;
}

static ep_status verified_run(struct worker *worker, uint32_t run, struct ep_error *error)
{
    struct verifier verifier = { &worker->inputs, worker->rank, &worker->result->verdict,
                                 &worker->result->progress };
    struct ep_ref_dispatch plan;
    ep_op_info info = { 0 };
    ep_status status;

    poison_outputs(worker);
    status = dispatched(worker, &info, error);
    if (status != EP_OK)
        return status;
    verify_arrived(&verifier, info.arrived);
    status = make_plan(worker, &plan, error);
    if (status != EP_OK)
        return status;
    status = run_with_plan(worker, &verifier, &plan, &info, run, error);
    ep_ref_dispatch_free(&plan);
    return status;
}

/*
 * When everybody is there: one run against the reference, and one more that must give the same bits, and
 * one with the handle's routing again and (LL) in two halves, which must too.  With ranks gone, one.
 */
ep_status worker_verify(struct worker *worker, bool masked, struct ep_error *error)
{
    uint32_t halves = worker->of.mode == EP_MODE_LL ? EP_OP_SEND_ONLY : 0;
    const uint32_t flags[] = { 0, 0, EP_OP_CACHED | halves };
    uint32_t runs = masked ? 1 : sizeof flags / sizeof *flags;
    ep_status status = EP_OK;

    memset(&worker->result->verdict, 0, sizeof worker->result->verdict);
    for (uint32_t run = 0; status == EP_OK && run < runs; run++) {
        worker->op_flags = flags[run];
        status = verified_run(worker, run, error);
    }
    worker->op_flags = 0;
    return status;
}
