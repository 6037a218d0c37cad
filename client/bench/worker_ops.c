/* Ops of a prepared case: one each, waiting for them, and what they gave. */
#include "worker_private.h"

/* LL takes 4-byte ids and HT 8-byte ones, so that both are used. */
static uint32_t index_bytes(const struct worker *worker)
{
    return worker->of.mode == EP_MODE_LL ? 4 : 8;
}

/* ---- inputs ------------------------------------------------------------------------ */

static void fill_routes(struct worker *worker)
{
    const struct ep_ref_rank *own = &worker->inputs.rank[worker->rank];
    size_t choices = (size_t)worker->tokens * worker->config->top_k;
    const struct buffers *b = &worker->own;

    for (size_t i = 0; i < choices; i++) {
        if (index_bytes(worker) == 4)
            ((int32_t *)b->topk)[i] = (int32_t)own->topk[i];
        else
            ((int64_t *)b->topk)[i] = own->topk[i];
        b->weights[i] = own->weights[i];
    }
}

static void fill_bias(struct worker *worker)
{
    const struct inputs *in = &worker->inputs;
    size_t row = (size_t)in->hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].combine);

    for (uint32_t t = 0; inputs_biased(in) && t < worker->tokens; t++)
        inputs_bias(in, worker->rank, t, (char *)worker->own.bias + t * row);
}

ep_status worker_begin_pass(struct worker *worker, enum bench_pass pass, struct ep_error *error)
{
    struct inputs *in = &worker->inputs;
    const struct buffers *b = &worker->own;
    size_t row = (size_t)in->hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].input);

    in->pass = pass;
    worker->op_flags = pass == BENCH_BACKWARD ? EP_OP_CACHED : 0;
    for (uint32_t t = 0; t < worker->tokens; t++)
        inputs_row(in, worker->rank, t, (char *)b->x + t * row,
                   b->x_scales ? (char *)b->x_scales + t * in->scale_bytes : NULL);
    fill_routes(worker);
    fill_bias(worker);
    return memory_push_inputs(worker, 0, error);
}

/* ---- ops --------------------------------------------------------------------------- */

ep_status worker_complete(struct worker *worker, struct ep_error *error)
{
    ep_status status =
        worker->op_flags & EP_OP_SEND_ONLY ? ep_complete(worker->handle, worker->stream) : EP_OK;

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_complete");
}

ep_status worker_send_dispatch(struct worker *worker, struct ep_error *error)
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
        .scale_format = worker->of.scales,
    };
    ep_status status = ep_dispatch(worker->handle, &args, worker->stream);

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_dispatch");
}

ep_status worker_dispatch(struct worker *worker, struct ep_error *error)
{
    ep_status status = worker_send_dispatch(worker, error);

    return status == EP_OK ? worker_complete(worker, error) : status;
}

ep_status worker_send_combine(struct worker *worker, const void *rows, struct ep_error *error)
{
    const bool backward = worker->inputs.pass == BENCH_BACKWARD;
    ep_combine_args args = {
        .size = sizeof args,
        .flags = worker->op_flags & EP_OP_SEND_ONLY,
        .dtype = bench_dtypes[worker->of.dtype].combine,
        .rows = rows,
        .rows_bytes = rows == worker->buffers.out ? worker->sizes.out : worker->sizes.rows,
        .bias = inputs_biased(&worker->inputs) ? worker->buffers.bias : NULL,
        .out = worker->buffers.result,
        .row_grads = backward ? worker->buffers.row_grads : NULL,
        .topk_grads = backward ? worker->buffers.topk_grads : NULL,
    };
    ep_status status = ep_combine(worker->handle, &args, worker->stream);

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_combine");
}

ep_status worker_combine(struct worker *worker, const void *rows, struct ep_error *error)
{
    ep_status status = worker_send_combine(worker, rows, error);

    return status == EP_OK ? worker_complete(worker, error) : status;
}

ep_status worker_wait(struct worker *worker, const char *what, struct ep_error *error)
{
    ep_status status = ep_handle_wait(worker->handle, (int32_t)worker->config->timeout_ms * 3);

    return status == EP_OK ? EP_OK : worker_failure(error, status, what);
}

ep_status worker_sync(struct worker *worker, struct ep_error *error)
{
    ep_status status = ep_sync(worker->ep, (int32_t)worker->config->timeout_ms * 3);

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_sync");
}

const void *worker_timed_rows(const struct worker *worker)
{
    if (worker->of.layout == EP_LAYOUT_RANK_MAJOR && bench_dtypes[worker->of.dtype].wire != EP_FP8_E4M3)
        return NULL;
    return worker->buffers.rows ? worker->buffers.rows : worker->buffers.out;
}

ep_status worker_hash_result(struct worker *worker, uint64_t *hash, struct ep_error *error)
{
    if (memory_pull_result(worker, error) != EP_OK)
        return error->status;
    *hash = verify_hash(0, worker->own.result, worker->sizes.result);
    if (worker->inputs.pass == BENCH_BACKWARD)
        *hash = verify_hash(*hash, worker->own.topk_grads, worker->sizes.topk_grads);
    return EP_OK;
}
