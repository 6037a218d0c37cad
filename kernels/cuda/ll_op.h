/*
 * ll_op: from a descriptor to what a kernel is told.  The same for the host, which launches a rank's own ops,
 * and for the kernel that finds them in a mailbox.
 */
#ifndef EP_LL_OP_H
#define EP_LL_OP_H

#include "forecast.h"
#include "ht_op.h"
#include "ll.h"

/* A rank, as whoever runs its ops knows it. */
struct ep_ll_rank {
    struct ep_ll_args base;                    /* all that is the same for every op */
    uint64_t routing, weights, handle_stride;  /* of handles, in the state */
    uint32_t sms;                              /* multiprocessors that its kernels fill */
    uint32_t dispatch_blocks, combine_blocks;  /* that run at once, at most */
};

/* What a server keeps of a rank where its worker cannot write; in GPU memory. */
struct ep_ll_desk {
    uint32_t closing; /* server: no op begins any more */
    uint32_t through; /* kernel: blocks of the running entry that are through */
    uint64_t found;   /* warp that polls: its entry << kFoundShift | enum Found of ll_serve.cuh */
    uint64_t taken;   /* kernel: the last entry that expected an op and executed one */
    uint64_t looked;  /* kernel: the last one that looked at `region`; it may still run */
    uint64_t over;    /* kernel: the last entry that a warp polled for and that is over, and all before are */
    uint32_t reserved[22];
    struct ep_forecast_log log;          /* kernel: ops that were executed or refused and are over */
    struct ep_ll_rank rank;              /* server, once */
    struct ep_limits limits;             /* server, once; and `arena`: what ops are checked against */
    uint64_t arena;
    struct ep_op half[EP_MAX_HANDLES];  /* kernel: the send-only op of a handle that its complete finishes */
    struct ep_region region[EP_MAX_REGIONS]; /* server: that ops may use */
    struct ep_ht_desk ht;
};
EP_STATIC_ASSERT(sizeof(struct ep_op) % 16 == 0 && offsetof(struct ep_ll_desk, log) % 16 == 0
                     && sizeof(struct ep_forecast_op) % 16 == 0 && offsetof(struct ep_ll_desk, rank) % 16 == 0
                     && offsetof(struct ep_ll_desk, half) % 16 == 0,
                 "ops and arguments are copied in pieces of 16 bytes");
EP_STATIC_ASSERT(sizeof(struct ep_region) == 16 && offsetof(struct ep_ll_desk, region) % 16 == 0,
                 "a region is read at once");

/* What the kernel of an entry is told: where everything is. */
struct ep_ll_serve {
    struct ep_mailbox *mailbox;
    struct ep_ll_desk *desk;
    uint64_t number;    /* of the entry, counted from 1 */
    uint32_t ht_blocks; /* of its kernel for HT ops; 0: the group has none */
    uint32_t poll_ns;   /* a warp looks at the doorbell for so long; 0: the stream does, until it rings */
    uint32_t ahead_polls, reserved; /* a warp does or did so for the entry ahead, which says that it is over */
};

/* And one for an op that is expected: the op, which passed check_op(), and the arguments that it makes. */
struct ep_ll_expected {
    struct ep_ll_args args;
    struct ep_forecast_op at;
    struct ep_ll_serve serve;
};
struct ep_ht_expected {
    struct ep_ht_args args;
    struct ep_forecast_op at;
    struct ep_ll_serve serve;
};

/* What is to be done of an op; `completes`: it was sent before. */
EP_HD static inline uint32_t ep_ll_phases(const struct ep_op *op, bool completes)
{
    return completes ? EP_LL_RECEIVE : op->flags & EP_OP_SEND_ONLY ? EP_LL_SEND : EP_LL_SEND | EP_LL_RECEIVE;
}

/*
 * As many blocks as there is work for: one that has none only costs.  The rows that come are not known
 * here; ranks mostly have batches of like size.
 */
EP_HD static inline uint32_t ep_ll_blocks(const struct ep_ll_rank *rank, const struct ep_op *op)
{
    const uint32_t most = op->kind == EP_OP_COMBINE ? rank->combine_blocks : rank->dispatch_blocks;
    const uint32_t parts = op->kind == EP_OP_COMBINE ? EP_COMBINE_PARTS : 1;
    const uint64_t want = (op->tokens + 1ull) * rank->base.ranks * parts;
    const uint32_t least = rank->sms < most ? rank->sms : most;

    if (op->kind != EP_OP_DISPATCH && op->kind != EP_OP_COMBINE)
        return 1;
    return want < least ? least : want < most ? (uint32_t)want : most;
}

/* A span of the rank's own window or of a region; NULL when it is not given. */
EP_HD static inline void *ep_ll_at(const struct ep_ll_rank *rank, const struct ep_regions *regions,
                                   struct ep_span span)
{
    if (regions && span.offset >= EP_REGION_BYTES && span.bytes)
        return ep_region_at(regions, span.offset);
    return span.bytes ? rank->base.own + span.offset : NULL;
}

/* All that depends on the op, into args that begin as rank->base.  Follows nothing and trusts nothing: the op
 * may turn out to be refused.  regions: NULL, there are none. */
EP_HD static inline void ep_ll_fill(const struct ep_ll_rank *rank, const struct ep_regions *regions,
                                    const struct ep_op *op, bool completes, struct ep_ll_args *a)
{
    const uint32_t hidden = rank->base.hidden;
    uint8_t *state = (uint8_t *)rank->base.state + rank->handle_stride * op->handle;

    a->blocks = ep_ll_blocks(rank, op);
    a->phases = ep_ll_phases(op, completes);
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
    a->routing = (int32_t *)(void *)(state + rank->routing);
    a->weights = (float *)(void *)(state + rank->weights);
    a->x = (const uint8_t *)ep_ll_at(rank, regions, op->x);
    a->x_scales = (const uint8_t *)ep_ll_at(rank, regions, op->x_scales);
    a->topk = ep_ll_at(rank, regions, op->topk_idx);
    a->topk_weights = (const float *)ep_ll_at(rank, regions, op->topk_weights);
    a->bias = (const uint8_t *)ep_ll_at(rank, regions, op->bias);
    a->out = (uint8_t *)ep_ll_at(rank, regions, op->out);
    a->in_rows = a->out_rows = 0; /* divisions of 64 bits take their time */
    if (op->kind == EP_OP_COMBINE && a->row_bytes)
        a->in_rows = op->x.bytes / a->row_bytes;
    if (op->kind == EP_OP_DISPATCH && a->row_bytes)
        a->out_rows = op->out.bytes / a->row_bytes;
    a->out_scales = (uint8_t *)ep_ll_at(rank, regions, op->out_scales);
    a->counts = (int32_t *)ep_ll_at(rank, regions, op->counts);
    a->offsets = (int32_t *)ep_ll_at(rank, regions, op->offsets);
    a->out_topk = (int32_t *)ep_ll_at(rank, regions, op->out_topk);
    a->out_weights = (float *)ep_ll_at(rank, regions, op->out_weights);
    a->sources = (struct ep_source *)ep_ll_at(rank, regions, op->sources);
}

#endif
