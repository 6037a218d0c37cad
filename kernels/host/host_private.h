/*
 * host_private.h: what the files of the host team share.
 *
 *   copy.c      rows from place to place
 *   convert.c   formats of elements: sums with one rounding, quantisation to fp8
 *   wait.c      sleeping until a peer has done something, and waking it
 *   result.c    what ops say of how they ended
 *   member.c    who takes part, and from when on
 *   frame.c     what frames from node to node hold, and what of it is not believed
 *   net_receive.c, net_send.c, net.c   their way
 *   remote_send.c   what other nodes are told and sent
 *   routing.c   where tokens go, where received rows lie; output tables
 *   ll.c        LL: banks, flags, credits; ll_remote.c, with ranks of other nodes; ll_receive.c; ll_dispatch.c, which
 *               sends; ll_combine.c
 *   ht.c        HT: asks, grants, flags; ht_rows.c, each to its place; ht_node.c, which sums up what a node's ranks
 *               have; ht_remote.c, with ranks of other nodes; ht_receive.c; ht_dispatch.c, which sends; ht_combine.c
 *   execute.c   ep_host_execute, and what states a handle goes through
 *   remote.c    ranks of other nodes: what they do here
 *   team.c      the team and its memory
 *
 * A file calls those that are named before it, and none behind it.
 *
 * Rows, headers and flags travel through the windows as window.h lays them out.  What decides over
 * another rank's memory does not: credits, asks, grants, `closed` and the announcement of a push
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
#include "frame.h"
#include "net.h"

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
    uint32_t *node_first, *node_count; /* HT: [nodes] of node_token: what was sent to other nodes */
    uint32_t *node_token;           /* of each node ascending */
    uint32_t node_total;
    /* as receiver */
    uint32_t *source_first;         /* [R + 1] of arrived_token */
    uint32_t *arrived_token;
    struct ep_host_arrived *arrived; /* [rows, K] */
    uint64_t rows;                  /* rows of `out` that a combine reads, padding included */
};

/* ---- team ------------------------------------------------------------------- */

/* HT: what rank s asks of rank d, kept at d.  `notes` of d; the tag atomic, and written last. */
struct ep_host_ask {
    uint64_t tag;
    struct ep_host_traits traits;
    uint32_t base;    /* combine: which of s's partials is the first from d */
    uint32_t *counts; /* dispatch: [1 + L] rows that come to d, and to each of its experts */
};

enum ep_host_answer { EP_HOST_UNANSWERED, EP_HOST_GRANTED, EP_HOST_MISFIT };

/* HT dispatch: where rows of rank s go at rank d, kept at d.  As asks are. */
struct ep_host_grant {
    uint64_t tag;
    uint32_t answer; /* enum ep_host_answer */
    bool packed;
    uint32_t flat, rows;   /* headers, and rows of a flat `out`: the next, and how many more */
    uint32_t all;          /* rows at the beginning */
    uint32_t row_bytes, scale_bytes;
    uint64_t out, scales;  /* from the window's start; 0: rows are not wanted, or do not fit */
    uint32_t *next, *end;  /* packed: [L] rows of each expert */
};

/* HT dispatch: the same in short, of a rank of another node.  The tag atomic, and written last. */
struct ep_host_told {
    uint64_t tag;
    uint32_t answer; /* atomic */
};

/* HT combine over several nodes: what a rank gives, while the ranks of its node sum it up.  The tag atomic, written
 * last, and 0 when it is withdrawn. */
struct ep_host_offer {
    uint64_t tag;
    const struct ep_host_handle *handle;
    const struct ep_op *op;
    bool usable; /* as many rows as its dispatch laid out */
};

/* The other way: where sums of other nodes go. */
struct ep_host_open {
    uint64_t tag;
    const struct ep_host_handle *handle;
    uint32_t row_bytes;
    bool wants_grads;
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
    /* progress: own (join: mutex), atomic */
    _Alignas(EP_LINE) uint32_t pushing; /* d + 1 while it writes to d's window, or EP_HOST_ANY */
    _Alignas(EP_LINE) uint64_t ll_sent; /* last LL dispatch whose pushes are over */
    uint64_t ht_closed;                 /* tag of the last HT op that it takes nothing for any more */
    uint64_t released[EP_MAX_LL_BANKS]; /* last LL number of each bank that it needs no more */
    /* own */
    uint64_t ll_number, ht_number;
    uint32_t ht_combines;    /* since the last HT dispatch */
    struct ep_host_handle handles[EP_MAX_HANDLES];
    uint32_t *mark;          /* [R] scratch of routing.c */
    uint32_t *cursor;        /* [max(R, L) + 1] scratch */
    uint32_t *expert_count;  /* [L] */
    uint32_t *total;         /* [1 + L] scratch of ht.c */
    uint32_t *expert_offset; /* [L + 1] */
    uint32_t *source_count;  /* [R] rows that each source sends here */
    uint32_t *source_expert; /* HT: [R, L] of them to each expert, then where they begin */
    struct ep_host_peer_wait *waits; /* [R] atomic: how long it waited for each */
    uint64_t *expert_rows;   /* [E] atomic: rows that it has sent to each */
    uint8_t *staging;        /* [T] rows quantised on the way, then their scales */
    uint8_t *partials;       /* HT, several nodes: [min(K, R)] rows, of one token */
    uint32_t *node_cursor;   /* [nodes] scratch */
    /* HT */
    pthread_mutex_t notes;
    struct ep_host_ask *asks;     /* [R] */
    struct ep_host_grant *grants; /* [R]; of a rank of another node: its stand-in's copies */
    struct ep_host_told *told;    /* [R] */
    struct ep_host_offer offer;
    struct ep_host_open open;
    uint64_t *node_done;          /* [nodes] atomic: tag of the last sum of that node that is there as a whole */
    uint8_t *contributed;         /* [R] which ranks are in it; before node_done */
    uint64_t claimed, reduced;    /* of a rank of another node, atomic: tags of combines whose sum for it has begun,
                                     and is over */
};

/* A time in which no rank here begins an op.  Mutex. */
struct ep_host_hold {
    struct ep_host_hold *next;
    uint64_t id, until_ns;
};

struct ep_host_team {
    struct ep_layout_map map;
    struct ep_host_shape shape; /* where ranks are */
    struct ep_host_net *net;    /* NULL: all ranks are here */
    uint32_t *node;             /* [R] */
    uint64_t *owed;             /* [nodes][mask] atomic: ranks whose state there was no room to tell */
    void (*on_lost)(uint32_t node, const char *why, void *user);
    void *user;
    /* the placement, flattened */
    uint32_t *home_first; /* [E + 1] */
    uint32_t *home_rank, *home_local;
    uint32_t *local_experts; /* [R] */
    uint32_t timeout_ms;     /* atomic */
    uint64_t spin_ns;
    pthread_mutex_t mutex;
    uint64_t ll_begun, ht_begun; /* mutex: highest number that any rank here has begun */
    struct ep_host_hold *holds;  /* mutex */
    uint64_t hold_ids;           /* mutex: given ever */
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

/* The op's number: registered, with the ranks that take part in it.  Fails when the team is held for longer than the
 * op may last. */
ep_status ep_host_begin(struct ep_host_call *call, uint32_t mode, uint64_t *participants, uint64_t *number);
bool ep_host_is_absent(const struct ep_host_team *team, uint32_t rank);
/* member.c: a rank of a team that is being made. */
void ep_host_begin_membership(struct ep_host_team *team);
void ep_host_end_membership(struct ep_host_team *team);
/* `arrived` of the result, and from it `absent`. */
void ep_host_set_arrived(struct ep_host_call *call, const uint64_t *arrived);

ep_status ep_host_ll_dispatch(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ll_combine(struct ep_host_call *call, struct ep_host_handle *handle);
/* After a send-only dispatch, and combine. */
ep_status ep_host_ll_complete_dispatch(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ll_complete_combine(struct ep_host_call *call, struct ep_host_handle *handle);
/* The rank needs number n of its bank no more; peers that wait for the credit wake. */
void ep_host_ll_release(struct ep_host_team *team, uint32_t rank, uint64_t number);
ep_status ep_host_ht_dispatch(struct ep_host_call *call, struct ep_host_handle *handle);
ep_status ep_host_ht_combine(struct ep_host_call *call, struct ep_host_handle *handle);

/* ---- ranks of other nodes: remote.c -------------------------------------------- */

static inline bool ep_host_is_here(const struct ep_host_team *team, uint32_t rank)
{
    return team->shape.node[rank] == team->shape.own;
}

/* Frames begin to come.  The team owns the net from then on. */
ep_status ep_host_remote_start(struct ep_host_team *team, const struct ep_host_span *span, struct ep_error *error);
/* A frame of that node: judged, and done.  The net's thread.  False: no node says that. */
bool ep_host_remote_frame(struct ep_host_team *team, uint32_t node, const void *frame, uint32_t bytes);
/* Tells all other nodes what the rank has released and closed.  Never waits, and is never forgotten. */
void ep_host_tell_state(struct ep_host_team *team, uint32_t rank);
/* When there is room: what there was none for. */
void ep_host_tell_owed(struct ep_host_team *team);
/* The place of a frame; *frame NULL: the node is gone.  Waits for it on behalf of `peer`, who is named when it does
 * not come in time. */
ep_status ep_host_place(struct ep_host_call *call, uint32_t peer, uint32_t bytes, struct ep_host_frame **frame);
/* All frames leave that were committed. */
void ep_host_flush(struct ep_host_team *team);

/* HT, likewise. */
bool ep_host_ht_take_ask(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);
void ep_host_ht_take_grants(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);
bool ep_host_ht_take_rows(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);
bool ep_host_ht_take_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);

/* What ranks of other nodes send, judged by itself (frame.h): false, it does not fit the state here. */
bool ep_host_ll_take_rows(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);
bool ep_host_ll_take_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload);

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
#define EP_HOST_ANY UINT32_MAX
void ep_host_gate_enter(struct ep_host_rank *me, uint32_t d);
/* To any window: to read what is offered. */
void ep_host_gate_enter_any(struct ep_host_rank *me);
void ep_host_gate_leave(struct ep_host_rank *me);
/* Until nobody but d itself writes to d's window.  Bounded: pushes never wait. */
void ep_host_gate_drain(struct ep_host_team *team, uint32_t d);

/* ---- routing.c -------------------------------------------------------------- */

/* Reads topk and weights of a fresh dispatch into the handle. */
void ep_host_routing_read(struct ep_host_call *call, struct ep_host_handle *handle);
/* The header of a token with these choices [top_k] for rank d; routes that are not there are -1. */
void ep_host_header_fill(const struct ep_host_team *team, const struct ep_host_choice *choice, uint32_t top_k,
                         uint32_t token, uint32_t d, struct ep_row_header *header);
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
/* Zeroes rows [first, last) of out and its scales: from no token of this rank (EP_NO_RANK: padding). */
void ep_host_zero_rows(struct ep_host_call *call, const struct ep_op *op, uint32_t source, uint64_t first,
                       uint64_t last);
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
