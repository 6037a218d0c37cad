/* A rank's ops: descriptors to kernel parameters. */
#include "cuda_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ll.h"

struct ep_cuda_rank {
    uint32_t device;
    struct ep_layout_map map;
    struct ep_device_tables tables;
    struct ep_ll_args base; /* all that is the same for every op */
    uint32_t sms, dispatch_blocks, combine_blocks, shared_bytes;
    /* The send-only op of a handle that its complete finishes. */
    struct ep_op half[EP_MAX_HANDLES];
};

/* ---- open ------------------------------------------------------------------------- */

/* Expert e on the rank that holds it when the first E mod R ranks hold one more than the others. */
static bool is_contiguous(const struct ep_placement *p)
{
    const uint32_t share = p->experts / p->ranks, larger = p->experts % p->ranks;
    uint32_t e = 0;

    if (p->first[p->experts] != p->experts)
        return false;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t l = 0; l < share + (r < larger); l++, e++)
            if (p->rank[e] != r || p->local[e] != l)
                return false;
    return true;
}

static void fill_base(const struct ep_cuda_rank_options *o, struct ep_cuda_rank *rank)
{
    const struct ep_layout_map *m = o->map;
    const struct ep_limits *l = &m->limits;
    const uint8_t *state = (const uint8_t *)o->state;
    struct ep_ll_args *a = &rank->base;

    for (uint32_t r = 0; r < l->ranks; r++)
        a->window[r] = o->windows[r];
    a->state = o->state;
    if (!is_contiguous(o->placement)) {
        a->home_first = (const uint32_t *)(const void *)(state + rank->tables.home_first);
        a->home_rank = (const uint32_t *)(const void *)(state + rank->tables.home_rank);
        a->home_local = (const uint32_t *)(const void *)(state + rank->tables.home_local);
    }
    a->rank = o->rank;
    a->ranks = l->ranks;
    a->experts = l->experts;
    a->local_experts = l->local_experts;
    a->hidden = l->hidden;
    a->max_top_k = l->top_k;
    a->max_tokens = l->ll_max_tokens;
    a->banks = l->ll_banks;
    a->share = l->experts / l->ranks;
    a->larger = l->experts % l->ranks;
    a->ll = m->ll;
    a->bank_bytes = m->bank_bytes;
    a->bank = m->bank;
    a->header_bytes = m->header_bytes;
    a->counts_bytes = m->counts_bytes;
    a->places_bytes = m->places_bytes;
    a->scales_bytes = m->scales_bytes;
    a->combine_row_bytes = m->combine_row_bytes;
}

/* Occupancy asks the runtime, which works in the context that is current. */
static ep_status size_grids(const struct ep_cuda_rank_options *o, struct ep_cuda_rank *rank, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    struct ep_cuda_device device;
    uint32_t dispatch, combine;
    int result;

    if (ep_cuda_device_info(o->device, &device, error) != EP_OK
        || ep_cuda_enter(o->device, &context, error) != EP_OK)
        return error->status;
    result = ep_ll_prepare(rank->shared_bytes, &dispatch, &combine);
    ep_cuda_leave();
    if (result != 0 || dispatch == 0 || combine == 0)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the LL kernels do not run on device %u (%s, sm_%u%u): %s",
                            o->device, device.name, device.major, device.minor, ep_ll_error_text(result));
    rank->sms = o->max_sms && o->max_sms < device.sms ? o->max_sms : device.sms;
    rank->dispatch_blocks = rank->sms * dispatch;
    rank->combine_blocks = rank->sms * combine;
    return EP_OK;
}

ep_status ep_cuda_rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                            struct ep_error *error)
{
    const struct ep_limits *limits = &options->map->limits;
    struct ep_error unused = EP_ERROR_INIT;
    struct ep_cuda_rank *rank;

    error = error ? error : &unused;
    if (ep_device_check(limits, error) != EP_OK)
        return error->status;
    rank = calloc(1, sizeof *rank);
    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    rank->device = options->device;
    rank->map = *options->map;
    ep_device_state_tables(options->map, options->placement, &rank->tables);
    rank->shared_bytes = (uint32_t)ep_device_shared_bytes(limits);
    fill_base(options, rank);
    if (size_grids(options, rank, error) != EP_OK) {
        free(rank);
        return error->status;
    }
    *out = rank;
    return EP_OK;
}

void ep_cuda_rank_close(struct ep_cuda_rank *rank)
{
    struct ep_error unused = EP_ERROR_INIT;

    if (!rank)
        return;
    (void)ep_cuda_stream_sync(rank->device, NULL, &unused); /* nobody is there to hear of it */
    free(rank);
}

/* ---- run -------------------------------------------------------------------------- */

/* A span of the rank's own window; NULL when it is not given. */
static void *at(const struct ep_cuda_rank *rank, struct ep_span span)
{
    return span.bytes ? rank->base.window[rank->base.rank] + span.offset : NULL;
}

static void fill_op(const struct ep_cuda_rank *rank, const struct ep_op *op, struct ep_ll_args *a)
{
    const uint32_t hidden = rank->map.limits.hidden;
    const uint64_t stride = rank->tables.handle_stride * op->handle;
    uint8_t *state = (uint8_t *)a->state;

    a->layout = op->layout;
    a->cached = (op->flags & EP_OP_CACHED) != 0;
    a->handle = op->handle;
    a->generation = op->generation;
    a->tokens = op->tokens;
    a->top_k = op->top_k;
    a->index_bytes = op->index_bytes;
    a->alignment = op->alignment;
    a->input_dtype = op->input_dtype;
    a->wire_dtype = op->wire_dtype;
    a->row_bytes = hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    a->row_scales = op->wire_dtype == EP_FP8_E4M3 ? ep_row_scales(hidden) : 0;
    a->scale_bytes = ep_row_scale_bytes(1, op->scale_format);
    a->routing = (int32_t *)(void *)(state + rank->tables.routing + stride);
    a->weights = (float *)(void *)(state + rank->tables.weights + stride);
    a->x = at(rank, op->x);
    a->x_scales = at(rank, op->x_scales);
    a->topk = at(rank, op->topk_idx);
    a->topk_weights = at(rank, op->topk_weights);
    a->bias = at(rank, op->bias);
    a->out = at(rank, op->out);
    a->in_rows = a->row_bytes ? op->x.bytes / a->row_bytes : 0;
    a->out_rows = a->row_bytes ? op->out.bytes / a->row_bytes : 0;
    a->out_scales = at(rank, op->out_scales);
    a->counts = at(rank, op->counts);
    a->offsets = at(rank, op->offsets);
    a->out_topk = at(rank, op->out_topk);
    a->out_weights = at(rank, op->out_weights);
    a->sources = at(rank, op->sources);
}

/*
 * As many blocks as there is work for: one that has none only costs.  The rows that come are not known
 * here; ranks mostly have batches of like size.
 */
static uint32_t blocks_for(const struct ep_cuda_rank *rank, uint32_t most, uint32_t tokens, uint32_t parts)
{
    const uint64_t want = (uint64_t)(tokens + 1) * rank->base.ranks * parts;
    const uint32_t least = rank->sms < most ? rank->sms : most;

    return want < least ? least : want < most ? (uint32_t)want : most;
}

static int launch(struct ep_cuda_rank *rank, const struct ep_op *op, uint32_t phases, CUstream stream)
{
    struct ep_ll_args args = rank->base;

    fill_op(rank, op, &args);
    args.phases = phases;
    switch (op->kind) {
    case EP_OP_DISPATCH:
        return ep_ll_dispatch(&args, blocks_for(rank, rank->dispatch_blocks, op->tokens, 1), rank->shared_bytes,
                              stream);
    case EP_OP_COMBINE:
        return ep_ll_combine(&args, blocks_for(rank, rank->combine_blocks, op->tokens, EP_COMBINE_PARTS),
                             rank->shared_bytes, stream);
    default:
        return ep_ll_release(&args, stream);
    }
}

ep_status ep_cuda_rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error)
{
    struct ep_error unused = EP_ERROR_INIT;
    const struct ep_cuda_context *context;
    const bool half = (op->flags & EP_OP_SEND_ONLY) != 0;
    uint32_t phases = half ? EP_LL_SEND : EP_LL_SEND | EP_LL_RECEIVE;
    int result;

    error = error ? error : &unused;
    if (op->handle >= EP_MAX_HANDLES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is %u: must be below %u", op->handle,
                            EP_MAX_HANDLES);
    if (half)
        rank->half[op->handle] = *op;
    if (op->kind == EP_OP_COMPLETE) {
        op = &rank->half[op->handle];
        phases = EP_LL_RECEIVE;
        if (op->kind == 0)
            return ep_error_set(error, EP_FAILED_PRECONDITION, "handle %u has no send-only op to complete",
                                op->handle);
    }
    if (ep_cuda_enter(rank->device, &context, error) != EP_OK)
        return error->status;
    result = launch(rank, op, phases, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    return result == 0 ? EP_OK
                       : ep_error_set(error, EP_INTERNAL, "launch on device %u: %s", rank->device,
                                      ep_ll_error_text(result));
}
