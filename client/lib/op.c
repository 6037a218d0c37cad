/*
 * Arguments of dispatch and combine to descriptors.  What is wrong is said here, in the words of
 * ep_client.h; the server checks the descriptor again, as it trusts no client.
 */
#include <string.h>

#include "client_private.h"

#define MAX_ALIGNMENT 65536u

/* What the arguments are checked against and where the error goes. */
struct call {
    struct ep_rank *rank;
    const struct ep_limits *limits;
    struct ep_op *op;
    struct ep_error *error;
};

/* ---- memory ------------------------------------------------------------------------ */

static ep_status nowhere(const struct call *c, const char *name)
{
    return ep_error_set(c->error, EP_INVALID_ARGUMENT, "%s does not point into memory of ep_alloc()%s of this rank", name,
                        c->rank->executor->only_window ? "" : " or ep_register()");
}

static ep_status too_short(const struct call *c, const char *name, uint64_t offset, uint64_t reach, uint64_t bytes)
{
    if (offset < EP_REGION_BYTES)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "%s has %llu bytes to the end of its block of ep_alloc(): this op needs %llu", name,
                            (unsigned long long)reach, (unsigned long long)bytes);
    return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                        "%s points into registered memory of %llu bytes and has %llu to its end: this op needs %llu", name,
                        (unsigned long long)(reach + offset % EP_REGION_BYTES), (unsigned long long)reach,
                        (unsigned long long)bytes);
}

/*
 * Turns `memory` into a span of `bytes`, all of which must lie in one block of ep_alloc() or in one
 * registered memory.  Nothing to read or write makes an empty span, whatever the pointer is.
 */
static ep_status span(const struct call *c, const char *name, const void *memory, uint64_t bytes,
                      struct ep_span *out)
{
    const uintptr_t arena = (uintptr_t)c->rank->window + c->rank->shape.map.arena;
    const uintptr_t at = (uintptr_t)memory;
    uint64_t reach, offset = at - (uintptr_t)c->rank->window;

    *out = (struct ep_span){ 0 };
    if (bytes == 0)
        return EP_OK;
    if (!memory)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "%s is NULL: this op needs %llu bytes", name,
                            (unsigned long long)bytes);
    reach = at < arena ? 0 : arena_reach(&c->rank->arena, at - arena);
    if (reach == 0)
        reach = registered_reach(&c->rank->regions, memory, &offset);
    if (reach == 0)
        return nowhere(c, name);
    if (at % SPAN_ALIGN != 0)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "%s is %p: must be a multiple of %u", name,
                            memory, SPAN_ALIGN);
    if (reach < bytes)
        return too_short(c, name, offset, reach, bytes);
    out->offset = offset;
    out->bytes = bytes;
    return EP_OK;
}

static ep_status optional(const struct call *c, const char *name, const void *memory, uint64_t bytes,
                          struct ep_span *out)
{
    return memory ? span(c, name, memory, bytes, out) : EP_OK;
}

static ep_status absent(const struct call *c, const char *name, const void *memory, const char *why)
{
    return memory ? ep_error_set(c->error, EP_INVALID_ARGUMENT, "%s is given: %s", name, why) : EP_OK;
}

/* ---- sizes ------------------------------------------------------------------------- */

static bool in_set(uint32_t set, uint32_t value)
{
    return value < 32 && (set >> value & 1u) != 0;
}

static uint64_t row_bytes(const struct call *c, uint32_t dtype)
{
    return (uint64_t)c->limits->hidden * ep_dtype_bytes((ep_dtype)dtype);
}

static uint64_t scale_bytes(const struct call *c)
{
    return ep_row_scale_bytes(c->limits->hidden, c->op->scale_format);
}

static bool by_expert(uint32_t layout)
{
    return layout == EP_LAYOUT_EXPERT_MAJOR || layout == EP_LAYOUT_PACKED;
}

/* Rows of an output or a combine's input: fixed by the layout, or what fits in `bytes`. */
static uint64_t rows_of(const struct call *c, uint64_t bytes, uint64_t row)
{
    const uint64_t slots = (uint64_t)c->limits->ranks * c->limits->ll_max_tokens;

    switch (c->op->layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return slots * c->limits->local_experts;
    case EP_LAYOUT_RANK_MAJOR:   return slots;
    default:                     return bytes / row;
    }
}

/* ---- dispatch: fields ------------------------------------------------------------------ */

static ep_status check_mode(const struct call *c)
{
    const struct ep_op *op = c->op;
    const bool ll = op->mode == EP_MODE_LL;
    bool fits = op->layout == EP_LAYOUT_PACKED;

    if (op->mode != EP_MODE_LL && op->mode != EP_MODE_HT)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "mode is %u: must be EP_MODE_LL or EP_MODE_HT",
                            op->mode);
    if (!in_set(c->limits->modes, op->mode))
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "mode is %s: this group was made without it",
                            ll ? "EP_MODE_LL" : "EP_MODE_HT");
    if (ll)
        fits = fits || op->layout == EP_LAYOUT_EXPERT_MAJOR || op->layout == EP_LAYOUT_RANK_MAJOR;
    else
        fits = fits || op->layout == EP_LAYOUT_FLAT;
    if (!fits)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "layout is %u: %s", op->layout,
                            ll ? "LL has expert-major, rank-major and packed" : "HT has packed and flat");
    return EP_OK;
}

static ep_status check_flags(const struct call *c, uint32_t known)
{
    if (c->op->flags & ~known)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "flags is 0x%x: has bits that this call does not know",
                            c->op->flags);
    if ((c->op->flags & EP_OP_SEND_ONLY) && c->op->mode != EP_MODE_LL)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "flags has EP_OP_SEND_ONLY: that is for LL");
    return EP_OK;
}

static ep_status check_counts(const struct call *c)
{
    const struct ep_op *op = c->op;
    const uint32_t most = op->mode == EP_MODE_LL ? c->limits->ll_max_tokens : c->limits->ht_max_tokens;

    if (op->tokens > most)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "num_tokens is %u: the group allows at most %u",
                            op->tokens, most);
    if (op->top_k > c->limits->top_k)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "top_k is %u: the group allows at most %u",
                            op->top_k, c->limits->top_k);
    if (op->index_bytes != 4 && op->index_bytes != 8)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "index_bytes is %u: must be 4 or 8",
                            op->index_bytes);
    if (op->alignment > MAX_ALIGNMENT || (op->alignment & (op->alignment - 1)) != 0)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "alignment is %u: must be a power of two up to %u", op->alignment,
                            MAX_ALIGNMENT);
    return EP_OK;
}

static ep_status check_dtypes(const struct call *c)
{
    const struct ep_op *op = c->op;

    if (ep_dtype_bytes((ep_dtype)op->input_dtype) == 0)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT, "input_dtype is %u: must be an ep_dtype",
                            op->input_dtype);
    if (!in_set(c->limits->dtypes, op->wire_dtype))
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "%s is %u: it is not among the group's dtypes",
                            op->wire_dtype == op->input_dtype ? "input_dtype" : "wire_dtype",
                            op->wire_dtype);
    if (op->wire_dtype != op->input_dtype && op->wire_dtype != EP_FP8_E4M3)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "wire_dtype is %u: must be 0, input_dtype or EP_FP8_E4M3", op->wire_dtype);
    if (row_bytes(c, op->input_dtype) % SPAN_ALIGN != 0)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "input_dtype is %u: a row of %llu bytes is no multiple of %u", op->input_dtype,
                            (unsigned long long)row_bytes(c, op->input_dtype), SPAN_ALIGN);
    if (op->scale_format != EP_SCALE_FP32 && op->scale_format != EP_SCALE_UE8M0)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "scale_format is %u: must be EP_SCALE_FP32 or EP_SCALE_UE8M0", op->scale_format);
    if (op->scale_format != EP_SCALE_FP32 && op->wire_dtype != EP_FP8_E4M3)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "scale_format is EP_SCALE_UE8M0: only rows that travel in fp8 have scales");
    return EP_OK;
}

/* What began before the turn may go on: cached passes too. */
static ep_status check_turn(const struct call *c)
{
    return c->op->flags & EP_OP_CACHED ? EP_OK : turn_check(c->rank, c->error);
}

/* A cached dispatch has the routing, and with it the shape, of the handle's last one. */
static ep_status check_cached(const struct call *c, const struct ep_handle *handle)
{
    const struct ep_op *op = c->op, *was = &handle->op;

    if (!(op->flags & EP_OP_CACHED))
        return EP_OK;
    if (!handle->routed)
        return ep_error_set(c->error, EP_FAILED_PRECONDITION,
                            "flags has EP_OP_CACHED: the handle has no routing yet, dispatch without it first");
    if (op->mode != was->mode || op->tokens != was->tokens || op->top_k != was->top_k)
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "%s is %u: the handle's routing was made with %u",
                            op->mode != was->mode ? "mode" : op->tokens != was->tokens ? "num_tokens" : "top_k",
                            op->mode != was->mode       ? op->mode
                            : op->tokens != was->tokens ? op->tokens
                                                        : op->top_k,
                            op->mode != was->mode       ? was->mode
                            : op->tokens != was->tokens ? was->tokens
                                                        : was->top_k);
    return EP_OK;
}

/* ---- dispatch: memory ------------------------------------------------------------------ */

static ep_status dispatch_inputs(const struct call *c, const ep_dispatch_args *args)
{
    struct ep_op *op = c->op;
    const uint64_t choices = (uint64_t)op->tokens * op->top_k;
    const bool cached = op->flags & EP_OP_CACHED;
    ep_status status = span(c, "tokens", args->tokens, op->tokens * row_bytes(c, op->input_dtype), &op->x);

    if (status == EP_OK)
        status = op->input_dtype == EP_FP8_E4M3
                     ? span(c, "scales", args->scales, op->tokens * scale_bytes(c), &op->x_scales)
                     : absent(c, "scales", args->scales, "only fp8 input has scales");
    if (status == EP_OK)
        status = cached ? absent(c, "topk_idx", args->topk_idx, "EP_OP_CACHED uses the handle's routing")
                        : span(c, "topk_idx", args->topk_idx, choices * op->index_bytes, &op->topk_idx);
    if (status == EP_OK)
        status = cached ? absent(c, "topk_weights", args->topk_weights,
                                 "EP_OP_CACHED uses the handle's weights")
                        : optional(c, "topk_weights", args->topk_weights, choices * sizeof(float),
                                   &op->topk_weights);
    return status;
}

static ep_status dispatch_rows(const struct call *c, const ep_dispatch_args *args, uint64_t rows)
{
    struct ep_op *op = c->op;
    const uint64_t row = row_bytes(c, op->wire_dtype);
    ep_status status;

    if (op->layout == EP_LAYOUT_RANK_MAJOR)
        status = absent(c, "out", args->out, "rank-major is zero copy, see ep_op_info.view");
    else if (op->layout == EP_LAYOUT_EXPERT_MAJOR)
        status = span(c, "out", args->out, rows * row, &op->out);
    else
        status = span(c, "out", args->out, args->out_bytes, &op->out);
    if (status != EP_OK)
        return status;
    if (op->wire_dtype != EP_FP8_E4M3)
        return absent(c, "out_scales", args->out_scales, "only fp8 arrives with scales");
    if (op->layout == EP_LAYOUT_RANK_MAJOR)
        return absent(c, "out_scales", args->out_scales, "rank-major is zero copy, see ep_op_info.scales_view");
    return span(c, "out_scales", args->out_scales, rows * scale_bytes(c), &op->out_scales);
}

static ep_status dispatch_counts(const struct call *c, const ep_dispatch_args *args)
{
    struct ep_op *op = c->op;
    const uint64_t n = by_expert(op->layout) ? c->limits->local_experts : c->limits->ranks;
    ep_status status = span(c, "counts", args->counts, n * sizeof(int32_t), &op->counts);

    if (status != EP_OK)
        return status;
    if (op->layout != EP_LAYOUT_PACKED)
        return absent(c, "offsets", args->offsets, "only packed rows have offsets");
    return span(c, "offsets", args->offsets, (c->limits->local_experts + 1ull) * sizeof(int32_t),
                &op->offsets);
}

static ep_status dispatch_routing(const struct call *c, const ep_dispatch_args *args, uint64_t rows)
{
    struct ep_op *op = c->op;
    const uint64_t routes = rows * op->top_k * 4;
    ep_status status;

    status = optional(c, "sources", args->sources, rows * sizeof(ep_source_row), &op->sources);
    if (status != EP_OK)
        return status;
    if (by_expert(op->layout)) {
        status = absent(c, "out_topk", args->out_topk, "rows by expert belong to one expert each");
        return status != EP_OK ? status
                               : absent(c, "out_weights", args->out_weights,
                                        "weights of rows by expert are applied by the combine");
    }
    status = optional(c, "out_topk", args->out_topk, routes, &op->out_topk);
    return status != EP_OK ? status
                           : optional(c, "out_weights", args->out_weights, routes, &op->out_weights);
}

/* ---- dispatch -------------------------------------------------------------------------- */

static void dispatch_op(const struct ep_handle *handle, const ep_dispatch_args *args, struct ep_op *op)
{
    *op = (struct ep_op){
        .kind = EP_OP_DISPATCH,
        .mode = (uint32_t)args->mode,
        .layout = (uint32_t)args->layout,
        .flags = args->flags,
        .input_dtype = (uint32_t)args->input_dtype,
        .wire_dtype = (uint32_t)(args->wire_dtype ? args->wire_dtype : args->input_dtype),
        .scale_format = (uint32_t)args->scale_format,
        .tokens = args->num_tokens,
        .top_k = args->top_k ? args->top_k : handle->rank->shape.map.limits.top_k,
        .index_bytes = args->index_bytes ? args->index_bytes : 4,
        .alignment = args->alignment ? args->alignment : 1,
        .handle = handle->id,
        .generation = handle->generation,
    };
    if ((args->flags & EP_OP_CACHED) && !args->top_k && handle->routed)
        op->top_k = handle->op.top_k;
}

static ep_status fill_dispatch(const struct call *c, const struct ep_handle *handle,
                               const ep_dispatch_args *args)
{
    ep_status status;

    dispatch_op(handle, args, c->op);
    if ((status = check_turn(c)) != EP_OK || (status = check_mode(c)) != EP_OK
        || (status = check_flags(c, EP_OP_SEND_ONLY | EP_OP_CACHED)) != EP_OK
        || (status = check_counts(c)) != EP_OK || (status = check_dtypes(c)) != EP_OK
        || (status = check_cached(c, handle)) != EP_OK
        || (status = dispatch_inputs(c, args)) != EP_OK)
        return status;

    const uint64_t rows = rows_of(c, args->out_bytes, row_bytes(c, c->op->wire_dtype));

    if ((status = dispatch_rows(c, args, rows)) != EP_OK || (status = dispatch_counts(c, args)) != EP_OK)
        return status;
    return dispatch_routing(c, args, rows);
}

/* What is captured begins with each launch of its graph: the program says when (ep_graph_begins). */
static ep_status count_begun(struct ep_rank *rank, const struct ep_op *op, ep_stream stream, uint32_t *begun,
                             struct ep_error *error)
{
    bool captured = false;

    if (op->kind == EP_OP_DISPATCH && rank->successor && rank->executor->captured
        && rank->executor->captured(rank, stream, &captured, error) != EP_OK)
        return error->status;
    *begun = op->kind == EP_OP_DISPATCH && !captured;
    return EP_OK;
}

static ep_status submit(struct ep_handle *handle, const struct ep_op *op, enum op_part part, bool half,
                        ep_stream stream, struct ep_error *error)
{
    struct pending pending = { .handle = handle, .part = part, .half = half };
    struct ep_rank *rank = handle->rank;
    uint32_t begun = 0;

    if (count_begun(rank, op, stream, &begun, error) != EP_OK
        || rank->executor->submit(rank, op, &pending, stream, error) != EP_OK)
        return error->status;
    turn_count(rank, begun);
    return EP_OK;
}

static ep_status check_call(const struct ep_handle *handle, ep_stream stream, struct ep_error *error)
{
    if (!handle)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is NULL");
    if (stream && !handle->rank->executor->streams)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "stream is given: the host backend has none");
    return EP_OK;
}

ep_status ep_dispatch(ep_handle *handle, const ep_dispatch_args *given, ep_stream stream)
{
    struct ep_error *error = last_error();
    ep_dispatch_args args;
    struct ep_op op;

    if (check_call(handle, stream, error) != EP_OK
        || take_struct("ep_dispatch_args", given, &args, sizeof args) != EP_OK)
        return error->status;

    struct call call = { handle->rank, &handle->rank->shape.map.limits, &op, error };
    const bool half = args.flags & EP_OP_SEND_ONLY;

    if (fill_dispatch(&call, handle, &args) != EP_OK
        || submit(handle, &op, PART_DISPATCH, half, stream, error) != EP_OK)
        return error->status;
    handle->op = op;
    handle->routed = true;
    handle->combined = false;
    handle->open = half;
    handle->open_part = PART_DISPATCH;
    return EP_OK;
}

/* ---- combine --------------------------------------------------------------------------- */

static void combine_op(const struct ep_handle *handle, const ep_combine_args *args, struct ep_op *op)
{
    *op = (struct ep_op){
        .kind = EP_OP_COMBINE,
        .mode = handle->op.mode,
        .layout = handle->op.layout,
        .flags = args->flags,
        .input_dtype = (uint32_t)args->dtype,
        .wire_dtype = (uint32_t)args->dtype,
        .tokens = handle->op.tokens,
        .top_k = handle->op.top_k,
        .index_bytes = handle->op.index_bytes,
        .alignment = handle->op.alignment,
        .handle = handle->id,
        .generation = handle->generation,
    };
}

static ep_status combine_rows(const struct call *c, const ep_combine_args *args)
{
    struct ep_op *op = c->op;
    const uint64_t row = row_bytes(c, op->input_dtype);
    uint64_t bytes = rows_of(c, args->rows_bytes, row) * row;

    if (op->layout == EP_LAYOUT_RANK_MAJOR)
        return optional(c, "rows", args->rows, bytes, &op->x); /* absent: in place */
    if (op->layout != EP_LAYOUT_EXPERT_MAJOR)
        bytes = args->rows_bytes;
    return span(c, "rows", args->rows, bytes, &op->x);
}

static ep_status combine_grads(const struct call *c, const ep_combine_args *args)
{
    struct ep_op *op = c->op;
    const uint64_t rows = rows_of(c, args->rows_bytes, row_bytes(c, op->input_dtype));
    const uint64_t per_row = op->layout == EP_LAYOUT_FLAT ? op->top_k : 1;
    ep_status status;

    if (op->mode != EP_MODE_HT) {
        status = absent(c, "row_grads", args->row_grads, "gradients are for HT");
        return status != EP_OK ? status : absent(c, "topk_grads", args->topk_grads, "gradients are for HT");
    }
    if (!args->topk_grads && (op->tokens > 0 || !args->row_grads))
        return absent(c, "row_grads", args->row_grads, "topk_grads must be given with it");
    status = span(c, "row_grads", args->row_grads, rows * per_row * sizeof(float), &op->row_grads);
    return status != EP_OK || !args->topk_grads
               ? status
               : span(c, "topk_grads", args->topk_grads,
                                  (uint64_t)op->tokens * op->top_k * sizeof(float), &op->topk_grads);
}

static ep_status check_combine(const struct call *c, const struct ep_handle *handle)
{
    const struct ep_op *op = c->op;

    if (!handle->routed)
        return ep_error_set(c->error, EP_FAILED_PRECONDITION, "the handle has no dispatch to combine");
    if (handle->open)
        return ep_error_set(c->error, EP_FAILED_PRECONDITION,
                            "the handle's %s was send-only: call ep_complete() first",
                            handle->open_part == PART_DISPATCH ? "dispatch" : "combine");
    if (op->input_dtype == EP_FP8_E4M3 || !in_set(c->limits->dtypes, op->input_dtype))
        return ep_error_set(c->error, EP_INVALID_ARGUMENT,
                            "dtype is %u: must be EP_BF16, EP_FP16 or EP_FP32, and among the group's dtypes",
                            op->input_dtype);
    return check_flags(c, EP_OP_SEND_ONLY);
}

static ep_status fill_combine(const struct call *c, const struct ep_handle *handle,
                              const ep_combine_args *args)
{
    struct ep_op *op = c->op;
    ep_status status;

    combine_op(handle, args, op);
    if ((status = check_combine(c, handle)) != EP_OK)
        return status;

    const uint64_t result = op->tokens * row_bytes(c, op->input_dtype);

    if ((status = combine_rows(c, args)) != EP_OK
        || (status = optional(c, "bias", args->bias, result, &op->bias)) != EP_OK
        || (status = span(c, "out", args->out, result, &op->out)) != EP_OK)
        return status;
    return combine_grads(c, args);
}

ep_status ep_combine(ep_handle *handle, const ep_combine_args *given, ep_stream stream)
{
    struct ep_error *error = last_error();
    ep_combine_args args;
    struct ep_op op;

    if (check_call(handle, stream, error) != EP_OK
        || take_struct("ep_combine_args", given, &args, sizeof args) != EP_OK)
        return error->status;

    struct call call = { handle->rank, &handle->rank->shape.map.limits, &op, error };
    const bool half = args.flags & EP_OP_SEND_ONLY;

    if (fill_combine(&call, handle, &args) != EP_OK
        || submit(handle, &op, PART_COMBINE, half, stream, error) != EP_OK)
        return error->status;
    handle->combined = true;
    handle->open = half;
    handle->open_part = PART_COMBINE;
    return EP_OK;
}

/* ---- complete -------------------------------------------------------------------------- */

ep_status ep_complete(ep_handle *handle, ep_stream stream)
{
    struct ep_error *error = last_error();

    if (check_call(handle, stream, error) != EP_OK)
        return error->status;
    if (!handle->open)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "no send-only dispatch or combine of this handle waits to be completed");

    struct ep_op op = { .kind = EP_OP_COMPLETE, .mode = handle->op.mode, .layout = handle->op.layout,
                        .tokens = handle->op.tokens, .top_k = handle->op.top_k,
                        .handle = handle->id, .generation = handle->generation };

    if (submit(handle, &op, handle->open_part, false, stream, error) != EP_OK)
        return error->status;
    handle->open = false;
    return EP_OK;
}
