/*
 * ll.h: what a low latency kernel is told, and the launchers.
 *
 * Everything that does not change while a rank is attached, and the op itself, travels by value in the
 * kernel's parameters: constant memory is the cheapest read there is at the start of a kernel, and a
 * captured graph keeps it.  What changes (numbers, membership, handles) is in the rank's state.
 *
 * The kernel that serves a worker finds the op in its mailbox and makes the same arguments from it (ll_op.h).
 */
#ifndef EP_LL_H
#define EP_LL_H

#include "device_state.h"
#include "ep_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Threads of a block. */
#define EP_LL_THREADS 256u
/* That a combine cuts a partial into, for different blocks to push. */
#define EP_COMBINE_PARTS 2u

enum { EP_LL_SEND = 1, EP_LL_RECEIVE = 2 };

/*
 * Division by what never changes: n / d is n * ep_ll_inverse(d) >> EP_LL_INVERSE_BITS.  Exact while n * d is below
 * 2^40: the inverse is too large by at most 1, so the quotient by at most n / 2^40, which is less than 1 / d.
 */
#define EP_LL_INVERSE_BITS 40
static inline uint64_t ep_ll_inverse(uint32_t d)
{
    return d ? (1ull << EP_LL_INVERSE_BITS) / d + 1 : 0;
}

struct ep_ll_args {
    /* the rank */
    uint8_t *window[EP_DEVICE_NODE_RANKS]; /* of a group of one node, by rank; else nothing: struct ep_device_net */
    uint8_t *own;
    struct ep_device_state *state;
    const uint32_t *home_first, *home_rank, *home_local; /* NULL: contiguous, see below */
    uint32_t rank, ranks, experts, local_experts, hidden, max_top_k, max_tokens, banks;
    uint32_t share, larger; /* contiguous: the first `larger` ranks hold share + 1 experts, others share */
    uint64_t per_share, per_larger; /* inverses of share and share + 1 */
    uint64_t ll, bank_bytes;
    struct ep_bank_layout bank;
    uint32_t header_bytes, counts_bytes, places_bytes, scales_bytes, partial_bytes;
    uint32_t most_row_bytes; /* of the widest dtype: what regions of rows have room for */
    uint32_t reserved[2];
    uint32_t *arrived;       /* executor server: `through` of the mailbox; else NULL */

    /* the op; spans as addresses, NULL: not given */
    uint32_t blocks;       /* that work on it */
    uint32_t layout, phases, cached, handle, generation;
    uint32_t tokens, top_k, index_bytes, alignment;
    uint32_t input_dtype, wire_dtype;
    uint32_t row_bytes;    /* of one row that travels */
    uint32_t row_scales;   /* scales of it, 0: none */
    uint32_t scale_bytes;  /* of one: 4, fp32, or 1, UE8M0 */
    int32_t *routing;      /* [T_ll * K] of the handle */
    float *weights;
    const uint8_t *x;
    uint64_t in_rows;      /* a combine's rows at x */
    const uint8_t *x_scales;
    const void *topk;
    const float *topk_weights;
    const uint8_t *bias;
    uint8_t *out;
    uint64_t out_rows;     /* that `out` holds */
    uint8_t *out_scales;
    int32_t *counts, *offsets, *out_topk;
    float *out_weights;
    struct ep_source *sources;
};
EP_STATIC_ASSERT(offsetof(struct ep_ll_args, blocks) % 16 == 0 && sizeof(struct ep_ll_args) % 16 == 0,
                 "the rank's part and the op's are copied in pieces of 16 bytes");

/* Blocks of a kernel that one multiprocessor holds at a time.  All blocks of a launch must run at once: they
 * wait for peers, whose blocks wait for ours.  shared_bytes: ep_device_shared_bytes(); shares: other ranks use the GPU, too.
 * Returns a cudaError_t, as all of these do. */
int ep_ll_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks);

int ep_ll_dispatch(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream);
int ep_ll_combine(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream);
/* The handle is given up: peers get the credit for its bank. */
int ep_ll_release(const struct ep_ll_args *args, void *stream);

/* ---- executor server ---- */

struct ep_ll_serve;
struct ep_ll_expected;
/* Blocks of any of the kernels below that one multiprocessor holds at a time. */
int ep_ll_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks);
/* For ep_ll_serve_prepare: those of ep_ll_expect. */
int ep_ll_expect_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks);
/* The op in the mailbox if it is the expected one, which is no complete and no release; else it goes on waiting. */
int ep_ll_expect(const struct ep_ll_expected *expected, uint32_t shared_bytes, void *stream);
/* For it: a warp that waits for the doorbell, for serve.poll_ns at most.  The kernel of ep_ll_expect comes next on the
 * stream. */
int ep_ll_poll_prepare(void);
int ep_ll_poll(const struct ep_ll_expected *expected, void *stream);
/* The op in the mailbox, whatever it is.  All of a rank have as many blocks: its dispatch_blocks. */
int ep_ll_serve_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, void *stream);
/* The same for ranks of several nodes, where NCCL's headers were there; else nothing calls them. */
int ep_ll_net_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks);
int ep_ll_net_expect(const struct ep_ll_expected *expected, uint32_t shared_bytes, void *stream);
int ep_ll_net_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, void *stream);
/* Loads the code of the next one. */
int ep_ll_gate_prepare(void);
/* Puts the op into a mailbox, rings, and ends when the op is done. */
int ep_ll_gate(struct ep_mailbox *mailbox, const struct ep_op *op, void *stream);

const char *ep_ll_error_text(int error);

/* ---- NCCL's device communicator (nccl_comm.cu) ---- */

/* create, destroy: NCCL's own ncclDevCommCreate and ncclDevCommDestroy; wire: of struct ep_device_net.  They return a
 * ncclResult_t. */
int ep_nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire);
int ep_nccl_device_close(void *destroy, void *comm, const uint64_t *wire);
uint32_t ep_nccl_version(void); /* that this was built with */

#ifdef __cplusplus
}
#endif
#endif
