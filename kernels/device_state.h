/*
 * device_state.h: what a rank on a GPU has beside its window, shared by server, direct clients and
 * device code.
 *
 * One block of GPU memory per rank and epoch, made by the server.  Under executor `server` nobody else
 * sees it; a `direct` worker gets its own rank's, never a peer's.
 *
 *     struct ep_device_state      membership, progress, handles; what became of ops is in the window
 *     placement                   home_first [E + 1], home_rank [homes], home_local [homes]
 *     routing of each handle      [T_ll * K] int32, see EP_DEVICE_ROUTE_AGAIN
 *     weights of each handle      [T_ll * K] fp32
 *     HT: struct ep_device_ht_tables has the rest
 *
 * Who writes: "server" through copies, while kernels may run; "kernel" the rank's own, one op at a time.
 */
#ifndef EP_DEVICE_STATE_H
#define EP_DEVICE_STATE_H

#include "ep_error.h"
#include "window.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_DEVICE_STATE_MAGIC 0x3154535645445045ull /* "EPDEVST1" */
#define EP_DEVICE_STATE_VERSION 7u
#define EP_DEVICE_MAX_RANKS 1024u
#define EP_DEVICE_NODE_RANKS 32u /* of them, on one node: a lane of a warp each, and a bit of a word */

/* A set of ranks: bit r % 32 of word r / 32.  Kernels for groups of one node use the first word alone. */
#define EP_RANK_WORDS (EP_DEVICE_MAX_RANKS / 32)
EP_STATIC_ASSERT(EP_DEVICE_MAX_RANKS == EP_MASK_WORDS * 64, "what a record says of ranks is such a set");

/* First number in which nobody takes part: the rank is absent. */
#define EP_DEVICE_NEVER UINT64_MAX

struct ep_device_handle {
    uint64_t number;      /* of its dispatch; 0: none */
    uint64_t combined;    /* the last number that it combined */
    uint32_t generation, tokens, top_k, layout;
    uint32_t alignment, wire_dtype, routed;
    uint32_t excluded[EP_RANK_WORDS]; /* set: the sources that were lost on the way */
};
EP_STATIC_ASSERT(sizeof(struct ep_device_handle) == 176, "ep_device_handle is shared memory");

/* HT.  What it has of each rank is in tables: struct ep_device_ht_tables. */
struct ep_device_ht_handle {
    uint64_t number;      /* of its dispatch; 0: none, or one that its rank could not take part in */
    uint64_t rows;        /* of `out`, padding included */
    uint32_t generation, tokens, top_k, layout;
    uint32_t alignment;
    uint32_t routed;      /* it may be combined */
    uint32_t arrived[EP_RANK_WORDS]; /* set: whose rows came */
    uint32_t sent[EP_RANK_WORDS];    /* set: whom all rows went to */
};
EP_STATIC_ASSERT(sizeof(struct ep_device_ht_handle) == 296, "ep_device_ht_handle is shared memory");

struct ep_device_counters {
    uint64_t count, errors, timeouts, tokens, wire_bytes, busy_ns, wait_ns, max_wait_ns;
    uint64_t dropped; /* routes: expert number out of range, or its rank absent */
    uint64_t reserved[7];
};
EP_STATIC_ASSERT(sizeof(struct ep_device_counters) == 128, "ep_device_counters is shared memory");

/* What the blocks of one op tell each other; all 0 between ops but for `sequence`. */
struct ep_device_scratch {
    uint32_t pushed, done; /* blocks */
    uint32_t outsiders;    /* how many each block saw outside, in all */
    uint32_t late_phase, overflow;
    uint32_t reserved0;
    uint64_t rows, rows_needed, dropped, wire_bytes, start_ns, wait_ns;
    uint64_t sequence;     /* ops of the rank so far */
    uint32_t reserved1[9];
    struct {
        uint32_t gone, late; /* ranks that were missed */
        uint32_t outside;    /* that did not take part, as one block or more saw it */
    } ranks[EP_RANK_WORDS];  /* sets, word by word */
};
EP_STATIC_ASSERT(offsetof(struct ep_device_scratch, ranks[1]) == 128,
                 "of a group of one node, ep_device_scratch is read by 32 lanes at once");

/* The running HT op: what its blocks tell each other.  All 0 between ops. */
struct ep_device_ht_run {
    uint64_t tag, number; /* that it has, and of the dispatch that it belongs to */
    uint64_t deadline;    /* of its waits */
    uint64_t timeout_ns, start_ns, wait_ns, dropped, wire_bytes, rows, rows_needed;
    int32_t status;
    uint32_t barrier;     /* blocks that came to one, ever since the op began */
    uint32_t over;        /* blocks that are through */
    uint32_t pushed;      /* warps that push no more */
    uint32_t next_push, next_row; /* pieces of work that somebody took */
    uint32_t first_late;  /* the first of the late, from 1, and what was waited for: phase << 16 */
    /* masks of ranks of this node, by their places there: */
    uint32_t roomy;       /* they have room for what comes to them */
    uint32_t granted;     /* dispatch: they have granted where rows go */
    uint32_t asked, asked_grads; /* combine: they take their partials, and gradients with them */
    /* sets of ranks: */
    uint32_t members[EP_RANK_WORDS];
    uint32_t late[EP_RANK_WORDS], gone[EP_RANK_WORDS]; /* that were missed */
    uint32_t unsent[EP_RANK_WORDS];     /* that did not get all */
    uint32_t given[EP_RANK_WORDS];      /* whose ops fit, and that were told so */
    uint32_t mismatched[EP_RANK_WORDS]; /* whose ops do not */
    uint32_t reserved;
};
EP_STATIC_ASSERT(sizeof(struct ep_device_ht_run) == 128 + 6 * EP_RANK_WORDS * 4, "ep_device_ht_run is shared memory");

/* What a peer of this node has granted the running dispatch, where nobody else's worker can write; checked against the
 * windows. */
struct ep_device_ht_grant {
    uint64_t out, scales; /* in its window */
    uint32_t row, rows, bits;
    uint32_t reserved;
};
EP_STATIC_ASSERT(sizeof(struct ep_device_ht_grant) == 32, "ep_device_ht_grant is shared memory");

struct ep_device_state {
    /* server, once */
    uint64_t magic;
    uint32_t version, rank;
    uint64_t epoch;
    uint64_t whole_lines; /* 1: a line of 128 bytes that a warp stores comes to any rank of this node as a whole */
    uint64_t reserved0[11];
    uint64_t net; /* address of struct ep_device_net; 0: all ranks are on one node */

    /* server: rank r takes part in number n when n >= from[r] */
    uint64_t from[EP_DEVICE_MAX_RANKS];
    uint64_t timeout_ns;
    uint64_t held; /* several nodes: not 0: no dispatch begins, as somebody joins */
    uint64_t reserved1[6];

    /*
     * kernel.  An op raises `begun` and later reads `from` again, before it counts on nobody having joined;
     * whoever writes `from` then reads `begun` (Dekker).
     */
    uint64_t begun;
    uint64_t number; /* of the last dispatch that is over */
    uint64_t released[EP_MAX_LL_BANKS];
    uint64_t left; /* blocks of dispatches that have written all of their rows, ever */
    uint64_t left_before; /* the same, when the running op began */

    struct ep_device_scratch scratch;

    struct ep_device_counters counters[EP_DEVICE_PARTS];
    struct ep_device_handle handles[EP_MAX_HANDLES];

    /*
     * HT.  server: rank r takes part in dispatch n, and in combines of it, when n >= ht_from[r] and it is not absent,
     * which from[r] says.  kernel: the rest; ht_begun is to ht_from what begun is to from.
     */
    uint64_t ht_from[EP_DEVICE_MAX_RANKS];
    uint64_t ht_begun;
    uint64_t ht_number;   /* of the last dispatch that is over */
    uint64_t ht_combines; /* since */
    uint64_t reserved2[5];
    struct ep_device_ht_run ht_run;
    struct ep_device_ht_grant ht_grants[EP_DEVICE_NODE_RANKS]; /* by places */
    struct ep_device_counters ht_counters[EP_DEVICE_PARTS];
    struct ep_device_ht_handle ht_handles[EP_MAX_HANDLES];
};
EP_STATIC_ASSERT(offsetof(struct ep_device_state, from) == 128, "ep_device_state.from");

/*
 * A choice of a token as kernels keep it: home rank and local expert, -1: none.  A choice that names the
 * expert of an earlier one of the same token has EP_DEVICE_ROUTE_AGAIN set: it has a weight and no row.
 */
#define EP_DEVICE_ROUTE_AGAIN 0x40000000
#define EP_DEVICE_MAX_LOCAL 65536u

/* Of a multiprocessor's shared memory, what a block of a kernel may take. */
#define EP_DEVICE_MAX_SHARED_BYTES (96u * 1024u)
/* Of these, what HT's warps take to count, if one is enough for it; and warps of a block. */
#define EP_DEVICE_HT_COUNTING_BYTES (32u * 1024u)
#define EP_DEVICE_HT_WARPS 8u
/* What they have of it to move rows, not at the same time. */
#define EP_DEVICE_HT_RING_BYTES (96u * 1024u)

/* ---- host code (device_state.c) ------------------------------------------------- */

struct ep_layout_map;
struct ep_placement;

/*
 * Can the kernels do a group of these limits, which ep_layout_compute() has found good?  EP_INVALID_ARGUMENT
 * names the one that they cannot, and what would do.  Asked when a group is made, and again by who launches.
 */
ep_status ep_device_check(const struct ep_limits *limits, struct ep_error *error);
/* Experts on a rank, of a group of so many ranks, beyond which it cannot whatever the other limits are. */
uint32_t ep_device_max_local(uint32_t ranks);
/* Shared memory that a block takes for them: a token's choices, or where rows of the experts begin. */
uint64_t ep_device_shared_bytes(const struct ep_limits *limits);

/*
 * HT: a batch is cut into lists of tokens that follow each other, and counted list by list.  A column is what is
 * counted: tokens to rank r [r], rows to its local expert l [R + r * L + l], choices that go there [R + R * L + r], and
 * tokens to the node of gate r on another node [2 R + R * L + r], which kernels of one node do without.
 */
#define EP_HT_LISTS 256u
struct ep_device_ht_tables {
    uint64_t before;   /* [EP_HT_LISTS][columns] in earlier lists */
    uint64_t totals;   /* [columns] */
    uint64_t index;    /* [T_ht * K] of a choice's row among those of its expert */
    uint64_t counts;   /* [R][L] rows that come */
    uint64_t bases;    /* [R][L] and where they begin */
    uint64_t starts;   /* [L + 1] packed: where experts begin */
    uint64_t granted;  /* [ranks of this node][L][2] packed, there: where rows of an expert begin, and how many */
    /* of handle 0; as source: of ranks d, as receiver: of ranks s */
    uint64_t first;            /* [R] where the partials of d begin here */
    uint64_t from, from_first; /* [R] rows of s, and the first of them among all that came */
    uint64_t back;             /* [R] where their partials begin at s */
    uint64_t routing, weights; /* [T_ht * K] */
    uint64_t slots;            /* [T_ht * K] of a choice's token among those that go to its rank */
    uint64_t places;           /* [R * T_ht * K] packed: rows of `out` of a row that came, one for each choice */
    uint64_t place_weights;
    uint64_t handle_stride;    /* from one handle's to the next one's */
};
/* Where the tables behind struct ep_device_state begin, from its start. */
struct ep_device_tables {
    uint64_t home_first, home_rank, home_local;
    uint64_t routing, weights; /* of handle 0 */
    uint64_t handle_stride;    /* from one handle's to the next one's */
    struct ep_device_ht_tables ht;
    uint64_t bytes;            /* of the whole state */
};

/* Columns of HT's lists. */
EP_HD static inline uint32_t ep_ht_columns(uint32_t ranks, uint32_t local_experts)
{
    return (3 + local_experts) * ranks;
}
/* Warps of a block that count at a time, and the shared memory that this takes. */
uint32_t ep_device_ht_counting_warps(const struct ep_limits *limits);
uint64_t ep_device_ht_shared_bytes(const struct ep_limits *limits);

void ep_device_state_tables(const struct ep_layout_map *map, const struct ep_placement *placement,
                            struct ep_device_tables *tables);

/* Bytes of a rank's state, and of its beginning that has to be written before the first op; the rest
 * need not be. */
uint64_t ep_device_state_bytes(const struct ep_layout_map *map, const struct ep_placement *placement);
uint64_t ep_device_state_image_bytes(const struct ep_layout_map *map, const struct ep_placement *placement);
/* That beginning, into zeroed memory: every rank takes part from number 1. */
void ep_device_state_image(const struct ep_layout_map *map, const struct ep_placement *placement,
                           uint32_t rank, uint64_t epoch, uint32_t timeout_ms, void *image);

#ifdef __cplusplus
}
#endif
#endif
