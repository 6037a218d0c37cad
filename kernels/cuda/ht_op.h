/*
 * ht_op: from a descriptor to what an HT kernel is told.  The same for the host and for device code, as ll_op.h.
 */
#ifndef EP_HT_OP_H
#define EP_HT_OP_H

#include "ht.h"

/* A rank, as whoever runs its ops knows it. */
struct ep_ht_rank {
    struct ep_ht_args base;                   /* all that is the same for every op */
    struct ep_device_ht_tables tables;        /* in the state */
    uint32_t sms;                             /* multiprocessors that its kernels fill */
    uint32_t dispatch_blocks, combine_blocks; /* that run at once, at most */
};

/* What a server keeps of a rank's HT ops where its worker cannot write; in GPU memory. */
struct ep_ht_desk {
    struct ep_ht_rank rank; /* server, once */
    uint64_t number;        /* kernel: the last entry whose op is an HT one and good; of it: */
    struct ep_ht_args args;
    struct ep_op op;
    uint32_t spins, place;
    uint64_t verdict;       /* kernel: of the last entry that expected an HT op, see ht_entry.cuh */
};
EP_STATIC_ASSERT(sizeof(struct ep_ht_args) % 8 == 0 && offsetof(struct ep_ht_desk, args) % 8 == 0
                     && offsetof(struct ep_ht_desk, op) % 8 == 0, "args and op are copied in pieces of 8 bytes");

/* Shared memory of a block that runs either kind of op. */
static inline uint32_t ep_ht_served_bytes(uint32_t dispatch_bytes)
{
    return dispatch_bytes > EP_DEVICE_HT_RING_BYTES ? dispatch_bytes : EP_DEVICE_HT_RING_BYTES;
}

/* Peers write the rows of a dispatch where they are to be: they have this rank's window, and nothing else of it. */
EP_HD static inline bool ep_ht_can_reach(const struct ep_op *op)
{
    return op->kind != EP_OP_DISPATCH
           || ((op->out.bytes == 0 || op->out.offset < EP_REGION_BYTES)
               && (op->out_scales.bytes == 0 || op->out_scales.offset < EP_REGION_BYTES));
}

EP_HD static inline void *ep_ht_at(const struct ep_ht_rank *rank, const struct ep_regions *regions,
                                   struct ep_span span)
{
    if (regions && span.offset >= EP_REGION_BYTES && span.bytes)
        return ep_region_at(regions, span.offset);
    return span.bytes ? rank->base.own + span.offset : NULL;
}

/* *rows becomes less when a table of these does not hold as many. */
EP_HD static inline void ep_ht_bound(struct ep_span span, uint64_t row_bytes, uint64_t *rows)
{
    if (span.bytes && row_bytes && span.bytes / row_bytes < *rows)
        *rows = span.bytes / row_bytes;
}

EP_HD static inline void ep_ht_fill_rows(const struct ep_op *op, struct ep_ht_args *a)
{
    const uint64_t tables = op->top_k * sizeof(float);

    a->in_rows = a->out_rows = 0;
    if (a->row_bytes == 0)
        return;
    if (op->kind == EP_OP_COMBINE) {
        a->in_rows = op->x.bytes / a->row_bytes;
        ep_ht_bound(op->row_grads, op->layout == EP_LAYOUT_PACKED ? sizeof(float) : tables, &a->in_rows);
        return;
    }
    a->out_rows = op->out.bytes / a->row_bytes;
    ep_ht_bound(op->out_scales, (uint64_t)a->row_scales * a->scale_bytes, &a->out_rows);
    ep_ht_bound(op->sources, sizeof(struct ep_source), &a->out_rows);
    ep_ht_bound(op->out_topk, tables, &a->out_rows);
    ep_ht_bound(op->out_weights, tables, &a->out_rows);
}

/* All that depends on the op, into args that begin as rank->base. */
EP_HD static inline void ep_ht_fill(const struct ep_ht_rank *rank, const struct ep_regions *regions,
                                    const struct ep_op *op, struct ep_ht_args *a)
{
    const uint32_t hidden = rank->base.hidden;
    uint8_t *state = (uint8_t *)rank->base.state + rank->tables.handle_stride * op->handle;

    a->blocks = op->kind == EP_OP_COMBINE ? rank->combine_blocks : rank->dispatch_blocks;
    a->sms = rank->sms;
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
    a->scale_format = op->scale_format;
    a->row_bytes = hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    a->row_scales = op->wire_dtype == EP_FP8_E4M3 ? ep_row_scales(hidden) : 0;
    a->scale_bytes = ep_row_scale_bytes(1, op->scale_format);
    a->routing = (int32_t *)(void *)(state + rank->tables.routing);
    a->weights = (float *)(void *)(state + rank->tables.weights);
    a->first = (uint32_t *)(void *)(state + rank->tables.first);
    a->from = (uint32_t *)(void *)(state + rank->tables.from);
    a->from_first = (uint32_t *)(void *)(state + rank->tables.from_first);
    a->back = (uint32_t *)(void *)(state + rank->tables.back);
    a->slots = (uint32_t *)(void *)(state + rank->tables.slots);
    a->places = (uint32_t *)(void *)(state + rank->tables.places);
    a->place_weights = (float *)(void *)(state + rank->tables.place_weights);
    a->x = (const uint8_t *)ep_ht_at(rank, regions, op->x);
    a->x_scales = (const uint8_t *)ep_ht_at(rank, regions, op->x_scales);
    a->topk = ep_ht_at(rank, regions, op->topk_idx);
    a->topk_weights = (const float *)ep_ht_at(rank, regions, op->topk_weights);
    a->bias = (const uint8_t *)ep_ht_at(rank, regions, op->bias);
    a->row_grads = (const float *)ep_ht_at(rank, regions, op->row_grads);
    a->out = (uint8_t *)ep_ht_at(rank, regions, op->out);
    a->out_scales = (uint8_t *)ep_ht_at(rank, regions, op->out_scales);
    a->counts = (int32_t *)ep_ht_at(rank, regions, op->counts);
    a->offsets = (int32_t *)ep_ht_at(rank, regions, op->offsets);
    a->out_topk = (int32_t *)ep_ht_at(rank, regions, op->out_topk);
    a->out_weights = (float *)ep_ht_at(rank, regions, op->out_weights);
    a->sources = (struct ep_source *)ep_ht_at(rank, regions, op->sources);
    a->topk_grads = (float *)ep_ht_at(rank, regions, op->topk_grads);
    ep_ht_fill_rows(op, a);
}

#endif
