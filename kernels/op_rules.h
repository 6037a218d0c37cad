/*
 * The rules that make a descriptor safe to execute: every field on its own, and every span against the arena, or
 * against the region that it begins in.
 * What depends on a handle (rows of a combine, its generation) the executor checks.
 *
 * Included by op_check.c alone, for ep_op_check(), and by the kernel that executes the ops of a worker that is
 * not trusted.  There nobody reads a sentence: BAD() is its status.
 */
#ifndef EP_OP_RULES_H
#define EP_OP_RULES_H

#include "ep_kernels.h"

#ifdef __device__ /* device code, on CPUs too */
#define RULE static __device__ inline
#define BAD(c, ...) EP_INVALID_ARGUMENT
#else
#define RULE static inline
#define BAD(c, ...) ep_error_set((c)->error, EP_INVALID_ARGUMENT, __VA_ARGS__)
#endif

struct check {
    const struct ep_limits *limits;
    uint64_t arena; /* where it begins */
    const struct ep_op *op;
    const struct ep_regions *regions; /* NULL: none */
#ifndef __device__
    struct ep_error *error;
#endif
};

/* ---- spans ------------------------------------------------------------------------- */

/* Where a span that begins there must lie: in the arena or in that region; a region that is not there is empty. */
RULE void bounds_of(const struct check *c, uint64_t offset, uint64_t *begin, uint64_t *end)
{
    *begin = c->arena;
    *end = c->arena + c->limits->arena_bytes;
    if (c->regions && offset >= EP_REGION_BYTES) {
        uint32_t region = (uint32_t)(offset / EP_REGION_BYTES - 1);

        *begin = ep_region_offset(region);
        *end = *begin + (region < c->regions->n ? c->regions->region[region].bytes : 0);
    }
}

/* Inside these bounds, aligned, and with `need` bytes at least. */
RULE ep_status check_span(const struct check *c, const char *field, const struct ep_span *span,
                          uint64_t need)
{
    uint64_t begin, end;

    bounds_of(c, span->offset, &begin, &end);
    if (span->offset % 16 != 0)
        return BAD(c, "%s.offset is %llu: must be a multiple of 16", field,
                   (unsigned long long)span->offset);
    if (span->offset < begin || span->offset > end || span->bytes > end - span->offset)
        return BAD(c, "%s is [%llu, +%llu): must lie in the %s [%llu, %llu)", field,
                   (unsigned long long)span->offset, (unsigned long long)span->bytes,
                   begin == c->arena ? "arena" : "region", (unsigned long long)begin, (unsigned long long)end);
    if (span->bytes < need)
        return BAD(c, "%s has %llu bytes: this op needs %llu", field,
                   (unsigned long long)span->bytes, (unsigned long long)need);
    return EP_OK;
}

RULE ep_status need(const struct check *c, const char *field, const struct ep_span *span,
                    uint64_t bytes)
{
    if (span->bytes == 0 && bytes > 0)
        return BAD(c, "%s is missing: this op needs %llu bytes", field, (unsigned long long)bytes);
    return span->bytes == 0 ? EP_OK : check_span(c, field, span, bytes);
}

RULE ep_status allow(const struct check *c, const char *field, const struct ep_span *span,
                     uint64_t bytes)
{
    return span->bytes == 0 ? EP_OK : check_span(c, field, span, bytes);
}

RULE ep_status refuse(const struct check *c, const char *field, const struct ep_span *span,
                      const char *why)
{
    return span->bytes == 0 ? EP_OK : BAD(c, "%s is given: %s", field, why);
}

/* ---- fields -------------------------------------------------------------------------- */

RULE bool in_set(uint32_t set, uint32_t value)
{
    return value < 32 && (set >> value & 1u) != 0;
}

RULE uint32_t max_tokens(const struct check *c)
{
    return c->op->mode == EP_MODE_LL ? c->limits->ll_max_tokens : c->limits->ht_max_tokens;
}

RULE ep_status check_mode(const struct check *c)
{
    const struct ep_op *op = c->op;
    bool fits;

    if (!in_set(c->limits->modes, op->mode))
        return BAD(c, "mode is %u: must be one of the group's modes (LL 1, HT 2)", op->mode);
    if (op->mode == EP_MODE_LL)
        fits = op->layout == EP_LAYOUT_EXPERT_MAJOR || op->layout == EP_LAYOUT_RANK_MAJOR
            || op->layout == EP_LAYOUT_PACKED;
    else
        fits = op->layout == EP_LAYOUT_PACKED || op->layout == EP_LAYOUT_FLAT;
    if (!fits)
        return BAD(c, "layout is %u: %s", op->layout,
                   op->mode == EP_MODE_LL ? "LL has expert-major 1, rank-major 2 and packed 3"
                                          : "HT has packed 3 and flat 4");
    if ((op->flags & EP_OP_SEND_ONLY) && op->mode != EP_MODE_LL)
        return BAD(c, "flags: send-only is for LL");
    if (op->flags & ~(uint32_t)(EP_OP_SEND_ONLY | EP_OP_CACHED))
        return BAD(c, "flags is 0x%x: unknown bits", op->flags);
    return EP_OK;
}

RULE ep_status check_counts(const struct check *c)
{
    const struct ep_op *op = c->op;

    if (op->tokens > max_tokens(c))
        return BAD(c, "tokens is %u: the group allows at most %u", op->tokens, max_tokens(c));
    if (op->top_k < 1 || op->top_k > c->limits->top_k)
        return BAD(c, "top_k is %u: must be 1 to %u, the group's", op->top_k, c->limits->top_k);
    return EP_OK;
}

RULE ep_status check_handle(const struct check *c)
{
    if (c->op->handle >= EP_MAX_HANDLES)
        return BAD(c, "handle is %u: must be below %u", c->op->handle, EP_MAX_HANDLES);
    return EP_OK;
}

/* ---- dispatch -------------------------------------------------------------------------- */

RULE ep_status check_dispatch_dtypes(const struct check *c)
{
    const struct ep_op *op = c->op;

    if (!in_set(c->limits->dtypes, op->wire_dtype))
        return BAD(c, "wire_dtype is %u: must be one of the group's dtypes", op->wire_dtype);
    if (ep_dtype_bytes((ep_dtype)op->input_dtype) == 0)
        return BAD(c, "input_dtype is %u: must be bf16 1, fp16 2, fp32 3 or fp8_e4m3 4",
                   op->input_dtype);
    if (op->wire_dtype != op->input_dtype && op->wire_dtype != EP_FP8_E4M3)
        return BAD(c, "wire_dtype is %u: must be input_dtype or fp8_e4m3", op->wire_dtype);
    if ((uint64_t)c->limits->hidden * ep_dtype_bytes((ep_dtype)op->input_dtype) % 16 != 0)
        return BAD(c, "input_dtype is %u: its rows are no multiple of 16 bytes", op->input_dtype);
    if (op->scale_format != EP_SCALE_FP32 && op->scale_format != EP_SCALE_UE8M0)
        return BAD(c, "scale_format is %u: must be fp32 0 or ue8m0 1", op->scale_format);
    if (op->scale_format != EP_SCALE_FP32 && op->wire_dtype != EP_FP8_E4M3)
        return BAD(c, "scale_format is %u: only fp8 has scales, wire_dtype is %u", op->scale_format,
                   op->wire_dtype);
    return EP_OK;
}

/* Of one row. */
RULE uint64_t scale_bytes(const struct check *c)
{
    return ep_row_scale_bytes(c->limits->hidden, c->op->scale_format);
}

RULE ep_status check_alignment(const struct check *c)
{
    uint32_t a = c->op->alignment;

    if (c->op->layout == EP_LAYOUT_PACKED && (a == 0 || (a & (a - 1)) != 0 || a > 1u << 16))
        return BAD(c, "alignment is %u: must be a power of two, 1 to 65536", a);
    return EP_OK;
}

RULE ep_status check_dispatch_inputs(const struct check *c)
{
    const struct ep_op *op = c->op;
    uint64_t t = op->tokens, hidden = c->limits->hidden, choices = t * op->top_k;
    bool cached = (op->flags & EP_OP_CACHED) != 0, given = op->input_dtype == EP_FP8_E4M3;
    ep_status status;

    if (op->index_bytes != 4 && op->index_bytes != 8)
        return BAD(c, "index_bytes is %u: must be 4 or 8", op->index_bytes);
    if ((status = need(c, "x", &op->x, t * hidden * ep_dtype_bytes((ep_dtype)op->input_dtype))) != EP_OK)
        return status;
    status = given ? need(c, "x_scales", &op->x_scales, t * scale_bytes(c))
                   : refuse(c, "x_scales", &op->x_scales, "only fp8 input has scales");
    if (status != EP_OK)
        return status;
    if (cached) {
        status = refuse(c, "topk_idx", &op->topk_idx, "a cached dispatch has its routing already");
        return status != EP_OK ? status
                               : refuse(c, "topk_weights", &op->topk_weights,
                                        "a cached dispatch has its weights already");
    }
    status = need(c, "topk_idx", &op->topk_idx, choices * op->index_bytes);
    return status != EP_OK ? status : allow(c, "topk_weights", &op->topk_weights, choices * 4);
}

RULE ep_status check_scales_out(const struct check *c, uint64_t rows)
{
    const struct ep_op *op = c->op;

    if (op->wire_dtype != EP_FP8_E4M3)
        return refuse(c, "out_scales", &op->out_scales, "only fp8 arrives with scales");
    if (op->layout == EP_LAYOUT_RANK_MAJOR)
        return refuse(c, "out_scales", &op->out_scales, "rank-major scales are read in place");
    return need(c, "out_scales", &op->out_scales, rows * scale_bytes(c));
}

/* Rows that the outputs beside `out` must have room for. */
RULE uint64_t output_rows(const struct check *c, uint64_t row_bytes)
{
    const struct ep_limits *l = c->limits;
    uint64_t slots = (uint64_t)l->ranks * l->ll_max_tokens;

    switch (c->op->layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return slots * l->local_experts;
    case EP_LAYOUT_RANK_MAJOR:   return slots;
    default:                     return c->op->out.bytes / row_bytes;
    }
}

RULE ep_status check_out(const struct check *c, uint64_t rows, uint64_t row_bytes)
{
    const struct ep_op *op = c->op;

    switch (op->layout) {
    case EP_LAYOUT_EXPERT_MAJOR:
        return need(c, "out", &op->out, rows * row_bytes);
    case EP_LAYOUT_RANK_MAJOR:
        return refuse(c, "out", &op->out, "rank-major rows are read in place");
    default: /* what arrives is known later: too little is an overflow then */
        return allow(c, "out", &op->out, 0);
    }
}

RULE ep_status check_dispatch_outputs(const struct check *c)
{
    const struct ep_op *op = c->op;
    const struct ep_limits *l = c->limits;
    uint64_t row_bytes = (uint64_t)l->hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    uint64_t rows = output_rows(c, row_bytes), routes = rows * op->top_k * 4;
    bool by_expert = op->layout == EP_LAYOUT_EXPERT_MAJOR || op->layout == EP_LAYOUT_PACKED;
    ep_status status;

    if ((status = check_out(c, rows, row_bytes)) != EP_OK
        || (status = check_scales_out(c, rows)) != EP_OK
        || (status = need(c, "counts", &op->counts,
                          4ull * (by_expert ? l->local_experts : l->ranks))) != EP_OK
        || (status = allow(c, "sources", &op->sources, rows * sizeof(struct ep_source))) != EP_OK)
        return status;
    status = op->layout == EP_LAYOUT_PACKED
        ? need(c, "offsets", &op->offsets, 4ull * (l->local_experts + 1ull))
        : refuse(c, "offsets", &op->offsets, "only packed rows have offsets");
    if (status != EP_OK)
        return status;
    if (by_expert) {
        status = refuse(c, "out_topk", &op->out_topk, "rows by expert belong to one expert each");
        return status != EP_OK ? status
                               : refuse(c, "out_weights", &op->out_weights,
                                        "weights of rows by expert are applied by the combine");
    }
    status = allow(c, "out_topk", &op->out_topk, routes);
    return status != EP_OK ? status : allow(c, "out_weights", &op->out_weights, routes);
}

RULE ep_status check_dispatch(const struct check *c)
{
    ep_status status;

    if ((status = check_mode(c)) != EP_OK || (status = check_counts(c)) != EP_OK
        || (status = check_dispatch_dtypes(c)) != EP_OK || (status = check_alignment(c)) != EP_OK
        || (status = check_dispatch_inputs(c)) != EP_OK)
        return status;
    return check_dispatch_outputs(c);
}

/* ---- combine ----------------------------------------------------------------------------- */

RULE ep_status check_rows_in(const struct check *c, uint64_t row_bytes)
{
    const struct ep_op *op = c->op;
    const struct ep_limits *l = c->limits;
    uint64_t slots = (uint64_t)l->ranks * l->ll_max_tokens;

    switch (op->layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return need(c, "x", &op->x, slots * l->local_experts * row_bytes);
    case EP_LAYOUT_RANK_MAJOR:   return allow(c, "x", &op->x, slots * row_bytes); /* absent: in place */
    default:                     return allow(c, "x", &op->x, 0); /* the handle knows how many */
    }
}

RULE ep_status check_grads(const struct check *c)
{
    const struct ep_op *op = c->op;
    ep_status status;

    if (op->mode != EP_MODE_HT) {
        status = refuse(c, "row_grads", &op->row_grads, "gradients are for HT");
        return status != EP_OK ? status
                               : refuse(c, "topk_grads", &op->topk_grads, "gradients are for HT");
    }
    if (op->topk_grads.bytes != 0)
        status = check_span(c, "topk_grads", &op->topk_grads, (uint64_t)op->tokens * op->top_k * 4);
    else
        status = op->tokens == 0 ? EP_OK /* others' gradients may have come here all the same */
                                 : refuse(c, "row_grads", &op->row_grads, "topk_grads must be given with it");
    return status != EP_OK ? status : allow(c, "row_grads", &op->row_grads, 0);
}

RULE ep_status check_combine(const struct check *c)
{
    const struct ep_op *op = c->op;
    uint64_t row_bytes, result;
    ep_status status;

    if ((status = check_mode(c)) != EP_OK || (status = check_counts(c)) != EP_OK)
        return status;
    if (op->flags & EP_OP_CACHED)
        return BAD(c, "flags: cached is for dispatch");
    if (!in_set(c->limits->dtypes, op->input_dtype) || op->input_dtype == EP_FP8_E4M3)
        return BAD(c, "input_dtype is %u: a combine carries bf16 1, fp16 2 or fp32 3, as the group "
                   "allows", op->input_dtype);
    if (op->wire_dtype != op->input_dtype)
        return BAD(c, "wire_dtype is %u: must be input_dtype in a combine", op->wire_dtype);
    row_bytes = (uint64_t)c->limits->hidden * ep_dtype_bytes((ep_dtype)op->input_dtype);
    result = op->tokens * row_bytes;
    if ((status = check_rows_in(c, row_bytes)) != EP_OK
        || (status = allow(c, "bias", &op->bias, result)) != EP_OK
        || (status = need(c, "out", &op->out, result)) != EP_OK)
        return status;
    return check_grads(c);
}

RULE ep_status check_op(const struct check *c)
{
    ep_status status = check_handle(c);

    if (status != EP_OK)
        return status;
    switch (c->op->kind) {
    case EP_OP_DISPATCH: return check_dispatch(c);
    case EP_OP_COMBINE:  return check_combine(c);
    case EP_OP_COMPLETE:
    case EP_OP_RELEASE:  return EP_OK;
    default:
        return BAD(c, "kind is %u: must be dispatch 1, combine 2, complete 3 or release 4", c->op->kind);
    }
}

#endif
