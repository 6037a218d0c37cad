/*
 * ht.h: what a high throughput kernel is told, and the launchers.  As in ll.h, what does not change while a rank is
 * attached and the op itself travel by value, and numbers, membership and handles are in the rank's state.
 */
#ifndef EP_HT_H
#define EP_HT_H

#include "device_state.h"
#include "ep_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ep_ll_serve;
struct ep_ht_expected;

struct ep_ht_args {
    /* the rank */
    uint8_t *window[EP_DEVICE_NODE_RANKS]; /* as in struct ep_ll_args */
    uint8_t *own;
    struct ep_device_state *state;
    const uint32_t *home_first, *home_rank, *home_local; /* NULL: contiguous, as in struct ep_ll_args */
    uint32_t rank, ranks, experts, local_experts, hidden, max_top_k, max_tokens;
    uint32_t share, larger;
    uint64_t per_share, per_larger;
    uint64_t notes, note_stride, flags, closed, combine_tags, headers, combine_rows, combine_grads; /* in a window */
    uint32_t header_bytes;
    uint32_t counting_warps;
    uint64_t arena, window_bytes; /* where outputs of peers can be */
    uint64_t partials;            /* that a window holds */
    uint32_t *before, *totals, *index, *counts_in, *bases_in, *starts_in, *granted; /* struct ep_device_ht_tables */

    /* the op; spans as addresses, NULL: not given */
    uint32_t blocks, sms;  /* that work on it; multiprocessors that they fill */
    uint32_t layout, cached, handle, generation;
    uint32_t tokens, top_k, index_bytes, alignment;
    uint32_t input_dtype, wire_dtype, scale_format;
    uint32_t row_bytes, row_scales, scale_bytes; /* as in struct ep_ll_args */
    uint32_t *first, *from, *from_first, *back; /* of the handle, as all of these: struct ep_device_ht_tables */
    int32_t *routing;
    float *weights;
    uint32_t *slots, *places;
    float *place_weights;
    const uint8_t *x;
    uint64_t in_rows;      /* a combine's rows at x and row_grads */
    const uint8_t *x_scales;
    const void *topk;
    const float *topk_weights;
    const uint8_t *bias;
    const float *row_grads;
    uint8_t *out;
    uint64_t out_rows;     /* that all outputs of a dispatch hold */
    uint8_t *out_scales;
    int32_t *counts, *offsets, *out_topk;
    float *out_weights;
    struct ep_source *sources;
    float *topk_grads;
};

/* Blocks of a kernel that one multiprocessor holds at a time; all blocks of a launch must run at once.  shared_bytes:
 * ep_device_ht_shared_bytes(); shares: as in ll.h.  Returns a cudaError_t, as all of these do. */
int ep_ht_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks);

int ep_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream);
int ep_ht_combine(const struct ep_ht_args *args, void *stream);

/* Executor server: blocks of any of the kernels below that one multiprocessor holds.  shared_bytes: ep_ht_served_bytes(). */
int ep_ht_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks);
/* The op that the kernel before, of the same entry, found to be an HT one; with serve->ht_blocks. */
int ep_ht_serve_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, void *stream);
/* The op in the mailbox if it is the expected one; else it goes on waiting. */
int ep_ht_expect(const struct ep_ht_expected *expected, uint32_t shared_bytes, void *stream);
/* The same for ranks of several nodes. */
int ep_ht_net_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks);
int ep_ht_net_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, void *stream);
int ep_ht_net_expect(const struct ep_ht_expected *expected, uint32_t shared_bytes, void *stream);

#ifdef __cplusplus
}
#endif
#endif
