/*
 * window.h: the layout of a rank's memory, shared by server, clients and device code.
 *
 * A window is one rank's memory for one group and epoch.  It is symmetric: every rank's
 * window has the same layout, so an offset means the same thing in all of them.
 *
 *     control   identity, ring of ops (GPUs: mailbox), their results
 *     LL bank 0 .. B-1, each:
 *         dispatch flags    [R] lines   src s: {number, count}
 *         combine flags     [R] lines   peer d: {number, count}
 *         credits           [R] lines   peer d: the last LL number of each bank that it has released;
 *                                       only in bank 0, so that one look tells all
 *         counts            [R][1+L]    src s: rows it sends, and to each local expert; GPUs only, three
 *                                       in 16 bytes, with the number
 *         places            [R][T_ll]   the rows of `out` that a row went to; GPUs only, own use
 *         dispatch headers  [R][T_ll]   which local experts, with which weights
 *         dispatch scales   [R][T_ll]   fp8 only
 *         dispatch rows     [R][T_ll]
 *         combine rows      [R][T_ll]   partial sums, by the source's token number; GPUs: in packets, with the
 *                                       number of the op
 *     HT region:
 *         notes             [2][R]      struct ep_ht_note: what this rank asks of peer r, and what it grants it; peers
 *                                       read it; GPUs only
 *         data flags        [R] of EP_HT_FLAGS_BYTES  host: src s: {tag, count}, a word each; GPUs: struct ep_ht_flags
 *         closed            [R] lines   peer d: the tag of the last HT op that it takes nothing for any more; GPUs only
 *         combine tags      [T_ht * min(K, R)]  the HT op whose partial is there; GPUs only
 *         headers           [R * T_ht]  of received rows, in flat order
 *         combine rows      [T_ht * min(K, R)]
 *         combine gradients [T_ht * min(K, R)][K] fp32
 *     arena     the client's own allocations: inputs and outputs of ops
 *
 * A "line" is EP_LINE bytes that one rank writes and one rank reads.  Flags are 64-bit words
 * written with release and read with acquire order; the data they announce is written before.
 * Only `control` and `arena` are the client's to write.
 *
 * Everything here is trusted by nobody: the server copies what it reads from memory that a
 * client can write, and checks the copy.
 */
#ifndef EP_WINDOW_H
#define EP_WINDOW_H

#include <stddef.h>
#include <stdint.h>

#include "ep_types.h"

#ifdef __cplusplus
extern "C" {
#define EP_STATIC_ASSERT static_assert
#else
#define EP_STATIC_ASSERT _Static_assert
#endif

#ifdef __CUDACC__ /* functions for device code too */
#define EP_HD __host__ __device__
#else
#define EP_HD
#endif

#define EP_WINDOW_MAGIC 0x31574e4957534550ull /* "EPSWINW1" */
#define EP_WINDOW_VERSION 12u /* of windows, and of what ranks of different nodes put and tell each other */
#define EP_LINE 64u
#define EP_REGION_ALIGN 4096u
#define EP_RING_SLOTS 32u
#define EP_MAX_HANDLES 64u
#define EP_MAX_LL_BANKS 4u
#define EP_RESULT_TEXT 160u

/* ---- sizes ------------------------------------------------------------------ */

/* What a group settled on; everything else follows from it. */
struct ep_limits {
    uint32_t ranks;          /* R, 1..EP_MAX_RANKS */
    uint32_t experts;        /* E, logical experts */
    uint32_t local_experts;  /* L: the most experts that any rank holds, replicas counted */
    uint32_t top_k;          /* K, 1..EP_MAX_TOP_K */
    uint32_t hidden;         /* H, elements */
    uint32_t modes;          /* bits 1u << ep_mode */
    uint32_t dtypes;         /* bits 1u << ep_dtype */
    uint32_t ll_max_tokens;  /* T_ll, 0 without LL */
    uint32_t ht_max_tokens;  /* T_ht, 0 without HT */
    uint32_t ll_banks;       /* B, 2..EP_MAX_LL_BANKS, 0 without LL */
    uint64_t arena_bytes;
};

struct ep_bank_layout { /* offsets from the bank's start */
    uint64_t dispatch_flags, combine_flags, credits;
    uint64_t counts, places;
    uint64_t headers, scales, rows, combine_rows;
};

struct ep_layout_map { /* offsets from the window's start, bytes */
    struct ep_limits limits;
    uint64_t total_bytes;
    uint64_t ll, bank_bytes;
    struct ep_bank_layout bank;
    uint64_t ht, ht_bytes;
    uint64_t ht_notes, ht_note_stride; /* what one rank tells in one go; [2][R] of them */
    uint64_t ht_flags, ht_closed, ht_combine_tags; /* from ht to ht_headers: all that says what is there */
    uint64_t ht_headers, ht_combine_rows, ht_combine_grads;
    uint64_t arena;
    /* strides, bytes */
    uint32_t header_bytes;      /* struct ep_row_header with K entries, multiple of 16 */
    uint32_t counts_bytes;      /* one source's counts: (1 + L) / 3 times 16, rounded up */
    uint32_t places_bytes;      /* one row's places: K entries of 4 bytes, multiple of 16 */
    uint32_t scales_bytes;      /* one row's scales in either format, multiple of 16; 0 without fp8 */
    uint32_t row_bytes;         /* widest dispatch row of the group's dtypes */
    uint32_t combine_row_bytes; /* widest combine row */
    uint32_t partial_bytes;     /* the same in packets */
    uint32_t ht_fanout;         /* min(K, R): rows that one token can have in a combine */
};

/* One element of `dtype`, and one row of H of them; a row is a multiple of 16 bytes. */
EP_HD static inline uint32_t ep_dtype_bytes(ep_dtype dtype) /* 0: there is no such type */
{
    return dtype == EP_BF16 || dtype == EP_FP16 ? 2 : dtype == EP_FP32 ? 4 : dtype == EP_FP8_E4M3 ? 1 : 0;
}
EP_HD static inline uint32_t ep_row_scales(uint32_t hidden)
{
    return (hidden + EP_FP8_BLOCK - 1) / EP_FP8_BLOCK;
}
/* A row's scales, bytes.  Rows of them lie tight in the arena, ep_layout_map.scales_bytes apart in a bank. */
EP_HD static inline uint32_t ep_row_scale_bytes(uint32_t hidden, uint32_t scale_format)
{
    return ep_row_scales(hidden) * (scale_format == EP_SCALE_UE8M0 ? 1u : 4u);
}

/*
 * A packet: what a warp stores of a partial at once, 16 bytes a lane.  31 pieces of the row, of 16 bytes, and at the end of
 * each of its four lines of 128 bytes the number of the op.
 */
#define EP_PACKET_BYTES 512u
#define EP_PACKET_PIECES 31u
EP_HD static inline uint32_t ep_packets(uint32_t row_bytes)
{
    return (row_bytes / 16 + EP_PACKET_PIECES - 1) / EP_PACKET_PIECES;
}

/* ---- what ranks write to each other ------------------------------------------- */

/* A flag: number in the high half, count in the low one.  0 is "never". */
static inline uint64_t ep_flag_make(uint64_t number, uint32_t count)
{
    return number << 32 | count;
}
static inline uint32_t ep_flag_number(uint64_t flag) { return (uint32_t)(flag >> 32); }
static inline uint32_t ep_flag_count(uint64_t flag) { return (uint32_t)flag; }

/*
 * One token as it arrives at a rank: which of its top-k live here.  GPUs announce rows one by one: each
 * 16 bytes of a header carry the number and are written at once, after the row.
 */
struct ep_route {
    int32_t expert; /* local expert 0..L-1, -1: this choice is not on this rank */
    float weight;
    uint32_t index;  /* GPUs: of this row among its source's rows of the expert */
    uint32_t number; /* GPUs: ep_flag_number of the dispatch */
};
struct ep_row_header {
    uint32_t token; /* number at the source */
    uint32_t routes; /* how many of route[] have expert >= 0 */
    uint32_t reserved;
    uint32_t number; /* GPUs: as in the routes */
    struct ep_route route[]; /* K, at the place they have in the source's topk */
};
EP_STATIC_ASSERT(sizeof(struct ep_row_header) == 16 && sizeof(struct ep_route) == 16, "ep_row_header");

/*
 * HT.  A rank numbers its dispatches as all ranks do; an op's tag is that number with the combines that
 * followed it: all ranks that make the same calls count alike, and a later op has the larger tag.
 */
#define EP_HT_TAG_SHIFT 24u
EP_HD static inline uint64_t ep_ht_tag(uint64_t dispatch, uint32_t combines)
{
    return dispatch << EP_HT_TAG_SHIFT | combines;
}

/*
 * GPUs: what a rank tells a peer before data may come: words, two with the op's tag in each 16 bytes, which are written
 * at once.  A dispatch asks, and is granted by each rank where its rows go; a combine asks only.  It lies in the window
 * of the rank that tells it, so that nobody's worker can change what others tell.
 */
struct ep_ht_note {
    uint32_t word[2];
    uint64_t tag;
};
EP_STATIC_ASSERT(sizeof(struct ep_ht_note) == 16, "ep_ht_note is part of the protocol");
enum {
    /* what is asked for */
    EP_HT_ASK_TRAITS, /* of the op: ranks whose ops differ in them do not fit */
    EP_HT_ASK_ROWS,   /* dispatch: that come; combine: 1, gradients are wanted */
    EP_HT_ASK_BACK,   /* dispatch: which of the asking rank's partials the first of them is */
    EP_HT_ASK_RECORDS, /* dispatch, on another node: tokens that go to this node, each once */
    EP_HT_ASK_ROUTING_LOW = 4, /* combine: number of the dispatch */
    EP_HT_ASK_ROUTING_HIGH,
    EP_HT_ASK_EXPERTS = 6, /* and then of each local expert: rows that come to it */
    /* what is granted */
    EP_HT_GRANT_ROW = 0, /* of headers; of `out` too when it is flat */
    EP_HT_GRANT_BITS,
    EP_HT_GRANT_OUT_LOW, /* from the window's start */
    EP_HT_GRANT_OUT_HIGH,
    EP_HT_GRANT_SCALES_LOW,
    EP_HT_GRANT_SCALES_HIGH,
    EP_HT_GRANT_ROWS,        /* that may come: as many as were asked for */
    EP_HT_GRANT_EXPERTS = 8  /* and then of each local expert: its first row in a packed `out`, rows that may come */
};
enum { EP_HT_GRANT_ROOM = 1, EP_HT_GRANT_PACKED = 2 };

/* What rank s has told about writing to this window: tags of ops. */
struct ep_ht_flags {
    uint64_t begun;  /* may be writing since */
    uint64_t done;   /* has written all */
    uint64_t ceased; /* writes no more, and not all was written */
    uint64_t reserved;
};
/* Of each rank s: its own, or of one on another node what each rank tells that may act as its gate (device_net.h). */
#define EP_HT_FLAGS_BYTES (2 * EP_LINE)

/* ---- the ring ------------------------------------------------------------------ */

enum ep_op_kind {
    EP_OP_DISPATCH = 1,
    EP_OP_COMBINE = 2,
    EP_OP_COMPLETE = 3, /* second half of a send-only dispatch or combine */
    EP_OP_RELEASE = 4   /* the handle is gone; its bank's credit goes back */
};

/* Part of the window: offset from its start.  bytes 0: not given. */
struct ep_span {
    uint64_t offset, bytes;
};

/*
 * Beyond all windows offsets name memory of the worker's own on its GPU, in regions: the i-th begins at
 * ep_region_offset(i).  Where that is, the struct ep_regions of whoever runs the op knows: the worker itself
 * (executor direct), or the server, which has mapped what it was told of (executor server).
 */
#define EP_MAX_REGIONS 64u
#define EP_REGION_BYTES (1ull << 48) /* of a region, at most; no window has so many */
EP_HD static inline uint64_t ep_region_offset(uint32_t region)
{
    return (region + 1ull) * EP_REGION_BYTES;
}

/*
 * One op, written by the client.  Spans lie in the arena or in regions, 16-byte aligned; only a
 * rank-major combine may also read rows in place from the handle's own bank.
 */
struct ep_op {
    uint32_t kind;        /* enum ep_op_kind */
    uint32_t mode;        /* ep_mode, of the handle for all but a fresh dispatch */
    uint32_t layout;      /* ep_layout */
    uint32_t flags;       /* EP_OP_* */
    uint32_t input_dtype; /* of x */
    uint32_t wire_dtype;  /* dispatch: what travels and arrives: input_dtype or fp8.  combine: = input */
    uint32_t tokens;      /* T, may be 0 */
    uint32_t top_k;       /* k of this op, 1..K */
    uint32_t index_bytes; /* of topk_idx: 4 or 8 */
    uint32_t alignment;   /* packed: rows, power of two, >= 1 */
    uint32_t handle;      /* 0..EP_MAX_HANDLES-1 */
    uint32_t generation;  /* of the handle: a stale one is refused */
    /* inputs */
    struct ep_span x;            /* dispatch [T, H]; combine: rows as the dispatch laid them out */
    struct ep_span x_scales;     /* dispatch of fp8 input: [T, ceil(H/128)] in scale_format */
    struct ep_span topk_idx;     /* [T, k], -1: no expert */
    struct ep_span topk_weights; /* [T, k] fp32; absent: 1 */
    struct ep_span bias;         /* combine: [T, H], added in the last step */
    struct ep_span row_grads;    /* HT combine: fp32 gradients of the weights, flat [N, k], packed [rows] */
    /* outputs */
    struct ep_span out;          /* dispatch rows; combine [T, H] */
    struct ep_span out_scales;   /* fp8: like out, ceil(H/128) a row in scale_format */
    struct ep_span counts;       /* int32: expert-major, packed [L]; rank-major, flat [R] */
    struct ep_span offsets;      /* int32 [L + 1]: packed */
    struct ep_span out_topk;     /* int32: rank-major [R, T_ll, k], flat [rows, k]; local expert or -1 */
    struct ep_span out_weights;  /* fp32, like out_topk */
    struct ep_span sources;      /* struct ep_source per row of out (rank-major: [R, T_ll]) */
    struct ep_span topk_grads;   /* HT combine: [T, k] fp32 */
    uint32_t scale_format;       /* dispatch of fp8: ep_scale_format, of what is given, travels and arrives */
    uint32_t reserved0;
    uint64_t reserved1;
};
EP_STATIC_ASSERT(sizeof(struct ep_op) == 48 + 14 * 16 + 16, "ep_op is part of the protocol");

/* Where a received row comes from; EP_NO_RANK, EP_NO_TOKEN. */
struct ep_source {
    uint32_t rank, token;
};

enum ep_wait_phase { EP_WAIT_NONE, EP_WAIT_ARRIVAL, EP_WAIT_CREDIT, EP_WAIT_READY };

/* What became of it, written by the executor. */
struct ep_op_result {
    int32_t status;       /* ep_status */
    uint32_t late_rank;   /* EP_TIMEOUT: whom it waited for */
    uint32_t wait_phase;  /* EP_TIMEOUT: enum ep_wait_phase */
    uint32_t absent;      /* ranks that were left out */
    uint64_t number;      /* LL or HT number of the op in the group */
    uint64_t rows;        /* dispatch: rows received (packed: padding included) */
    uint64_t rows_needed; /* EP_OVERFLOW: what `out` should have held */
    uint64_t dropped;     /* routes dropped: id outside [-1, E) or home absent */
    uint64_t wire_bytes;  /* sent to other ranks */
    uint64_t logical_bytes; /* T * k rows, as the field's READMEs count */
    uint64_t start_ns, end_ns; /* executor's clock (CLOCK_MONOTONIC on the host) */
    uint64_t wait_ns;     /* of it, waiting for peers */
    uint64_t view, view_stride;               /* rank-major: rows of rank r at view + r * stride */
    uint64_t scales_view, scales_view_stride; /* and its scales, rows ep_layout_map.scales_bytes apart */
    uint64_t arrived[EP_MASK_WORDS]; /* bit r: rank r's part is in the result */
    char text[EP_RESULT_TEXT];    /* NUL-terminated: which field, what was wrong */
};

/*
 * Hand-shake words hold 0 or 1 so that a CUDA graph can replay the client's half.
 *   client: fill op, doorbell = 1 (release); add 1 to wake; futex-wake `wake` if `asleep`
 *   server: sees doorbell 1 (acquire), copies op, doorbell = 0, executes, fills result,
 *           done = 1 (release); futex-wake `done` if `waiters`
 *   client: sees done 1 (acquire), copies result, done = 0; the slot is free
 * Slots are used in order.  EP_DONE_POISON is written by libepclient alone, when its server is gone.
 */
#define EP_DONE_POISON 2u
struct ep_ring_slot {
    uint32_t doorbell;
    uint32_t reserved0[15];
    uint32_t done;
    uint32_t waiters; /* clients asleep on `done` */
    uint32_t reserved1[14];
    struct ep_op op;
    uint8_t reserved2[512 - sizeof(struct ep_op)];
    struct ep_op_result result;
    uint8_t reserved3[512 - sizeof(struct ep_op_result)];
};
EP_STATIC_ASSERT(sizeof(struct ep_ring_slot) == 1152, "ep_ring_slot");

/* ---- instead of the ring, on GPUs ---------------------------------------------- */

enum { EP_DEVICE_DISPATCH, EP_DEVICE_COMBINE, EP_DEVICE_PARTS };

/* What became of an op. */
struct ep_device_record {
    int32_t status;         /* ep_status */
    uint32_t late_rank;     /* EP_TIMEOUT: whom it waited for */
    uint32_t wait_phase;    /* EP_TIMEOUT: enum ep_wait_phase */
    uint32_t generation;    /* of the handle */
    uint64_t number;        /* LL or HT number */
    uint64_t sequence;      /* counts all ops of the rank; 0: no op yet */
    uint64_t rows, rows_needed, dropped, wire_bytes, logical_bytes;
    uint64_t start_ns, end_ns, wait_ns; /* the GPU's global timer */
    uint32_t layout, wire_dtype; /* dispatch */
    uint64_t timeout_ns;    /* the bound of its waits */
    uint32_t mode;          /* EP_MODE_HT; LL: 0 */
    uint32_t reserved0;
    uint64_t arrived[EP_MASK_WORDS]; /* bit r: rank r's part is in the result; of one node: [0] */
    uint64_t reserved1;
};
EP_STATIC_ASSERT(offsetof(struct ep_device_record, arrived) == 120 && sizeof(struct ep_device_record) == 256,
                 "ep_device_record is shared memory; a group of one node has all in 128 bytes");

/* Written by the rank's kernels, whoever launches them; read by its worker and the server. */
struct ep_device_report {
    uint64_t failures;   /* since the worker has set it to 0; the first of them, which stays until there is a next: */
    uint64_t failure_op; /* EP_DEVICE_DISPATCH or EP_DEVICE_COMBINE */
    uint64_t reserved[6];
    struct ep_device_record failure;
    struct ep_device_record records[EP_MAX_HANDLES][EP_DEVICE_PARTS];
};
EP_STATIC_ASSERT(offsetof(struct ep_device_report, records) == 320, "ep_device_report is shared memory");

/*
 * Executor server: how an op is handed over, in the order of streams.
 *   client's stream: writes the op to one of `op`, unless it is there, then bell = ep_bell_of(its index)
 *   server's stream: waits for that; a kernel copies the op, checks the copy and executes it
 *   spins = 0: at its end the kernel sets bell = EP_BELL_DONE; the client's stream waits for that or for `closed`,
 *              which is one look at both.  No kernel of the client's runs: where contexts take turns on a GPU (no MPS),
 *              its stream can do so while the server's context stays where it is
 *   spins = 1: the client's kernel writes to op[0] and rings.  A block of the server's kernel sets bell = 0 and says in
 *              `blocks` how many of them add 1 each to `through` at their ends; the client's kernel waits for all, or
 *              for `closed`, and sets both to 0.  Nobody has to find out who was last: it is faster.
 *              Blocks of an LL op add EP_MAILBOX_ARRIVED to `through` besides, once they have the op and wait for nobody
 *              any more.  When all have, the client's next kernel may come: it writes its op, says so by bell =
 *              EP_BELL_COMING, and rings when what is before it in its stream is over
 * A CUDA graph can replay the client's half: whatever the words were before, the next op finds what it needs.  When its
 * server is gone, libepclient sets `closed`, and all that waits or comes later goes on, also what still runs of that server's
 * (with MPS a process's kernels outlive it).
 *
 * Who may write to which of `op`, and when, is the client's to see to (kernels/cuda/ring.c): one is free when the op
 * that was there is over, in the order of the client's streams.
 */
#define EP_MAILBOX_OPS 512u /* a power of two; graphs of many batch sizes have as many different ops */
#define EP_BELL_DONE 1u
#define EP_BELL_RUNG 0x7ffffffeu /* any of these bits */
#define EP_BELL_COMING 0x80000000u
#define EP_BELL_CLOSING EP_BELL_RUNG /* by the server, to whom it does not serve any more */
#define EP_MAILBOX_ARRIVED 0x10000u
struct ep_mailbox {
    uint32_t bell, closed; /* read at once */
    uint32_t reserved0[30];
    uint32_t through, blocks; /* read at once, all the time: not beside the bell, which the server's stream looks at */
    uint32_t reserved1[14];
    uint32_t spins; /* client, before its first op */
    uint32_t reserved2[15];
    struct ep_op op[EP_MAILBOX_OPS];
};
EP_STATIC_ASSERT(sizeof(struct ep_mailbox) == 256 + EP_MAILBOX_OPS * sizeof(struct ep_op), "ep_mailbox");

EP_HD static inline uint32_t ep_bell_of(uint32_t op) { return (op + 1) << 1; }
/* Which op it rings for, whatever its value; of a client that spins 0 at any time. */
EP_HD static inline uint32_t ep_bell_op(uint32_t bell)
{
    return bell & EP_BELL_RUNG ? ((bell >> 1) - 1) % EP_MAILBOX_OPS : 0;
}

struct ep_device_control {
    struct ep_mailbox mailbox;
    struct ep_device_report report;
};

/* ---- the window's beginning ------------------------------------------------------ */

/* Whose window it is. */
struct ep_window_head {
    uint64_t magic;
    uint32_t version;
    uint32_t rank;
    uint64_t epoch;
    struct ep_limits limits;
};

struct ep_control {
    struct ep_window_head head;
    uint8_t reserved0[192 - sizeof(struct ep_window_head)];
    uint32_t wake; /* counts doorbells and server-side events: the word the executor sleeps on */
    uint32_t reserved1[15];
    uint32_t asleep; /* 1: the executor is about to sleep, or does */
    uint32_t reserved2[15];
    union {
        struct ep_ring_slot slot[EP_RING_SLOTS]; /* host */
        struct ep_device_control gpu;
    };
};
EP_STATIC_ASSERT(offsetof(struct ep_control, wake) == 192, "ep_control.wake");
EP_STATIC_ASSERT(offsetof(struct ep_control, slot) == 320, "ep_control.slot");
EP_STATIC_ASSERT(offsetof(struct ep_control, gpu) % EP_LINE == 0
                     && offsetof(struct ep_device_control, report.failure) % 8 == 0, "ep_control.gpu");
EP_STATIC_ASSERT(sizeof(struct ep_control) == 320 + sizeof(struct ep_device_control), "ep_control");

#ifdef __cplusplus
}
#endif
#endif
