/*
 * host_private.h: what the files of the host team share.
 *
 *   convert.c   formats of elements: sums with one rounding, quantisation to fp8
 *   copy.c      rows from place to place
 *   wait.c      sleeping until a peer has done something, and waking it
 *   team.c      membership, numbers, results
 *   execute.c   ep_host_execute, and what states a handle goes through
 *   routing.c   where tokens go, where received rows lie; output tables
 *   ll.c ht.c   the two modes
 *
 * Rows, headers and flags travel through the windows as window.h lays them out.  What decides over
 * another rank's memory does not: credits, ready records, `closed` and the announcement of a push
 * live in the team, because all ranks of a host team share it and no client can forge them there.
 *
 * Owner of each field: "own" is written by the thread that executes the rank's ops, "mutex" under
 * team->mutex.  Fields marked atomic are read by others without it.
 */
#ifndef EP_HOST_PRIVATE_H
#define EP_HOST_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_kernels.h"

/* ---- convert.c -------------------------------------------------------------- */

/* Most rows that one sum can have: a token's ranks or experts, and the bias. */
#define EP_HOST_MAX_TERMS (EP_MAX_TOP_K + 1)

/* dst = round(sum of weights[i] * rows[i]): fp32, in ascending i, rounded once (to nearest even).
 * n 0: zeros.  dtype bf16, fp16 or fp32. */
void ep_host_sum(ep_dtype dtype, void *dst, const void *const *rows, const float *weights, uint32_t n,
                 uint32_t hidden);

/* One row to e4m3 with one scale per EP_FP8_BLOCK, as ep_scale_format has them. */
void ep_host_quantise(ep_dtype dtype, const void *row, uint32_t hidden, ep_scale_format format, uint8_t *codes,
                      void *scales);

/* ---- copy.c ----------------------------------------------------------------- */

/* memcpy for the large things: rows of tokens and of partial sums. */
void ep_host_copy_row(void *to, const void *from, size_t bytes);

/* ---- handles ---------------------------------------------------------------- */

/* One choice at its source. */
struct ep_host_choice {
    int32_t rank; /* -1: goes nowhere */
    int32_t local;
    float weight;
};

/* One choice of a received row. */
struct ep_host_arrived {
    int32_t local; /* -1: not here */
    float weight;
    uint32_t row; /* expert-major, packed: row of `out` */
};

enum ep_host_handle_state {
    EP_HANDLE_EMPTY,
    EP_HANDLE_SENT,         /* send-only dispatch, to be completed */
    EP_HANDLE_ROUTED,       /* may be combined */
    EP_HANDLE_COMBINE_SENT, /* send-only combine, to be completed */
    EP_HANDLE_COMBINED,     /* LL: its bank is released */
    EP_HANDLE_FAILED        /* its dispatch or combine did not end well */
};

/* Own. */
struct ep_host_handle {
    enum ep_host_handle_state state;
    uint32_t generation;
    bool retired; /* `generation` was released */
    bool has_choices; /* the source's half is there: a cached dispatch may use it */
    uint32_t mode, layout, tokens, top_k;
    uint64_t number;
    uint64_t participants[EP_MASK_WORDS]; /* of its dispatch; HT: those whose rows came */
    struct ep_op pending; /* SENT, COMBINE_SENT */
    /* as source */
    struct ep_host_choice *choices; /* [T, K] */
    uint32_t *dest_first;           /* [R + 1] of dest_token: tokens that go to rank d */
    uint32_t *dest_token;
    uint32_t *sent;                 /* [R] rows pushed to d */
    uint64_t bad;                   /* routes with an id outside [-1, E) */
    /* as receiver */
    uint32_t *source_first;         /* [R + 1] of arrived_token */
    uint32_t *source_base;          /* [R] HT: where this rank's partials begin at the source */
    uint32_t *arrived_token;
    struct ep_host_arrived *arrived; /* [rows, K] */
    uint64_t rows;                  /* rows of `out` that a combine reads, padding included */
};

/* ---- team ------------------------------------------------------------------- */

/* What a rank tells its peers about its HT op.  Mutex. */
struct ep_host_ready {
    uint64_t number; /* atomic */
    uint64_t routing;    /* combine: HT number of the handle's dispatch */
    struct ep_span rows, scales;
    uint32_t op, layout, dtype, scale_format, alignment;
    bool wants_grads; /* combine: topk_grads */
    uint32_t *counts; /* dispatch: [R, 1 + L] rows to rank d, then to each of its experts */
};

/* Who takes part in an HT op: decided once for all of them.  Mutex. */
struct ep_host_roster {
    uint64_t number; /* atomic */
    uint64_t members[EP_MASK_WORDS];
};

struct ep_host_peer_wait {
    uint64_t sum_ns, max_ns;
};

struct ep_host_rank {
    /* wait.c */
    _Alignas(EP_LINE) uint32_t events; /* atomic, futex */
    uint32_t asleep;                   /* atomic */
    /* membership: mutex, atomic */
    _Alignas(EP_LINE) uint32_t absent;
    uint8_t *window;
    uint64_t joined_ll, joined_ht; /* first number it takes part in */
    uint32_t ht_fresh; /* joined, and in no HT dispatch yet: combines go on without it */
    /* progress: own (join: mutex), atomic */
    _Alignas(EP_LINE) uint32_t pushing; /* d + 1 while it writes to d's window */
    _Alignas(EP_LINE) uint64_t ll_sent; /* last LL dispatch whose pushes are over */
    uint64_t ht_closed;                 /* last HT number that it takes nothing for any more */
    uint64_t released[EP_MAX_LL_BANKS]; /* last LL number of each bank that it needs no more */
    /* own */
    uint64_t ll_number, ht_number;
    struct ep_host_handle handles[EP_MAX_HANDLES];
    uint32_t *mark;          /* [R] scratch of routing.c */
    uint32_t *cursor;        /* [max(R, L) + 1] scratch */
    uint32_t *expert_count;  /* [L] */
    uint32_t *total;         /* [1 + L] scratch of ht.c */
    uint32_t *expert_offset; /* [L + 1] */
    uint32_t *source_count;  /* [R] rows that each source sends here */
    uint32_t *source_expert; /* HT: [R, L] of them to each expert, then where they begin */
    uint32_t *dest_base;     /* HT: [R, 1 + L] where rows begin at rank d: flat, by expert */
    uint64_t *dest_rows;     /* HT: [R] rows of rank d's `out` */
    struct ep_host_peer_wait *waits; /* [R] atomic: how long it waited for each */
    struct ep_host_ready *peers; /* HT: [R] copies of this op's records, without counts */
    uint8_t *staging;        /* [T] rows quantised on the way, then their scales */
    struct ep_host_ready ready[2]; /* mutex */
};

struct ep_host_team {
    struct ep_layout_map map;
    /* the placement, flattened */
    uint32_t *home_first; /* [E + 1] */
    uint32_t *home_rank, *home_local;
    uint32_t *local_experts; /* [R] */
    uint32_t timeout_ms;     /* atomic */
    uint64_t spin_ns;
    pthread_mutex_t mutex;
    uint64_t ll_begun, ht_begun; /* mutex: highest number that any rank has begun */
    struct ep_host_roster roster[2];
    struct ep_host_rank *ranks;
    void *memory; /* one mapping for all tables */
    size_t memory_bytes;
};

/* ---- one running op --------------------------------------------------------- */

struct ep_host_call {
    struct ep_host_team *team;
    struct ep_host_rank *me;
    uint32_t rank;
    const struct ep_op *op;
    struct ep_op_result *result;
    uint64_t deadline_ns;
};

/* Fills status and text, returns the status. */
__attribute__((format(printf, 3, 4)))
ep_status ep_host_fail(struct ep_host_call *call, ep_status status, const char *format, ...);
/* EP_TIMEOUT with its attribution. */
ep_status ep_host_late(struct ep_host_call *call, uint32_t late_rank, enum ep_wait_phase phase);
/* EP_DETACHED. */
ep_status ep_host_detached(struct ep_host_call *call);

/* The op's number: registered, with the ranks that take part in it. */
uint64_t ep_host_begin(struct ep_host_call *call, uint32_t mode, uint64_t *participants);
bool ep_host_is_absent(const struct ep_host_team *team, uint32_t rank);
/* `arrived` of the result, and from it `absent`. */
void ep_host_set_arrived(struct ep_host_call *call, const uint64_t *arrived);

ep_status ep_host_ll_dispatch(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ll_combine(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ll_complete(struct ep_host_call *call, struct ep_host_handle *handle);
/* The rank needs number n of its bank no more; peers that wait for the credit wake. */
void ep_host_ll_release(struct ep_host_team *team, uint32_t rank, uint64_t number);
ep_status ep_host_ht_dispatch(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ht_combine(struct ep_host_call *call, struct ep_host_handle *handle);

/* ---- masks and spans -------------------------------------------------------- */

static inline bool ep_mask_test(const uint64_t *mask, uint32_t r) { return mask[r / 64] >> r % 64 & 1; }
static inline void ep_mask_set(uint64_t *mask, uint32_t r) { mask[r / 64] |= 1ull << r % 64; }
static inline void ep_mask_clear(uint64_t *mask, uint32_t r) { mask[r / 64] &= ~(1ull << r % 64); }

static inline uint8_t *ep_host_at(const struct ep_host_call *call, struct ep_span span)
{
    return span.bytes ? call->me->window + span.offset : NULL;
}

/* The number as flags carry it: never 0, which means "never". */
static inline uint32_t ep_host_wire_number(uint64_t number)
{
    return (uint32_t)((number - 1) % UINT32_MAX) + 1;
}

/* ---- wait.c ----------------------------------------------------------------- */

enum ep_host_wait_end { EP_HOST_REACHED, EP_HOST_LATE, EP_HOST_DETACHED };

/* Until reached(context) holds, the deadline is over or the rank itself has left. */
enum ep_host_wait_end ep_host_wait(struct ep_host_call *call, bool (*reached)(void *context), void *context);
/* The same for something that `peer` has to do: the time counts against it. */
enum ep_host_wait_end ep_host_wait_for(struct ep_host_call *call, uint32_t peer, bool (*reached)(void *context),
                                       void *context);
/* After a change that `rank` may wait for: an atomic store with seq_cst order. */
void ep_host_wake(struct ep_host_team *team, uint32_t rank);
void ep_host_wake_all(struct ep_host_team *team);
uint64_t ep_host_spin_ns(uint32_t ranks);

/*
 * The gate: a rank announces that it writes to d's window, then looks whether it still may; whoever
 * takes the window away (leave, close) says so first and then waits until nobody is announced.
 */
void ep_host_gate_enter(struct ep_host_rank *me, uint32_t d);
void ep_host_gate_leave(struct ep_host_rank *me);
/* Until nobody but d itself writes to d's window.  Bounded: pushes never wait. */
void ep_host_gate_drain(struct ep_host_team *team, uint32_t d);

/* ---- routing.c -------------------------------------------------------------- */

/* Reads topk and weights of a fresh dispatch into the handle. */
void ep_host_routing_read(struct ep_host_call *call, struct ep_host_handle *handle);
/* The header of token t for rank d; routes that are not there are -1. */
void ep_host_header_write(const struct ep_host_team *team, const struct ep_host_handle *handle,
                          uint32_t token, uint32_t d, struct ep_row_header *header);
/* Copies header `at` of row i to the handle, checked: bad fields become "not here". */
void ep_host_header_read(struct ep_host_call *call, struct ep_host_handle *handle,
                         const struct ep_row_header *at, uint32_t i, uint32_t max_tokens);
/* Is choice j the first of row i that names its expert? */
bool ep_host_first_of_expert(const struct ep_host_arrived *arrived, uint32_t j);
/* Routes of this rank's tokens that go to d. */
uint64_t ep_host_routes_to(const struct ep_host_handle *handle, uint32_t d);
/* Offsets of packed blocks from expert_count; returns the rows, padding included. */
uint64_t ep_host_packed_offsets(const uint32_t *count, uint32_t local_experts, uint32_t alignment,
                                uint32_t *offset);
/* The tables next to `out`: row i of the handle belongs to row `at`. */
void ep_host_write_tables(struct ep_host_call *call, const struct ep_op *op,
                          const struct ep_host_handle *handle, uint32_t source, uint32_t i, uint64_t at);
/* sources[] of expert-major and packed. */
void ep_host_write_expert_sources(struct ep_host_call *call, const struct ep_op *op,
                                  const struct ep_host_handle *handle, uint32_t source, uint32_t i);
/* counts and offsets of this rank. */
void ep_host_write_counts(struct ep_host_call *call, const struct ep_op *op, const uint32_t *counts,
                          uint32_t n, const uint32_t *offsets);
/* Zeroes rows [first, last) of out and its scales. */
void ep_host_zero_rows(struct ep_host_call *call, const struct ep_op *op, uint64_t first, uint64_t last);
/* Partial of row i as the handle's layout has it: fills rows and weights, returns how many. */
uint32_t ep_host_partial_terms(const struct ep_host_team *team, const struct ep_host_handle *handle,
                               uint32_t i, const uint8_t *x, uint32_t row_bytes, const void **rows,
                               float *weights);
/* Distinct ranks of a token's choices, ascending. */
uint32_t ep_host_token_ranks(const struct ep_host_handle *handle, uint32_t token, uint32_t *ranks);

/* Rows as they travel. */
struct ep_host_payload {
    const uint8_t *rows, *scales; /* scales: fp8 */
    uint32_t row_bytes, scale_bytes; /* of one row; rows and scales lie tight */
};
/* Inputs of a dispatch, quantised into the rank's staging memory where the op asks for it. */
void ep_host_payload_prepare(struct ep_host_call *call, struct ep_host_payload *payload);

#endif
