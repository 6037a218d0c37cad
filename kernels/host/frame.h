/*
 * frame.h: what one node's ranks tell another node's, and whether it can be believed.
 *
 * A frame is a head and a payload of sections, each of which begins at a multiple of EP_HOST_SECTION bytes:
 *
 *   STATE         what a rank has released and closed      struct ep_host_state
 *   LL_ROWS       rows for a rank's bank                   headers, scales, rows
 *   LL_PARTIALS   partial sums for a rank's bank           token numbers, rows
 *   HT_ASK        to all ranks of the node                 traits; of a dispatch counts [ranks there][1 + L]
 *   HT_GRANT      the same                                 answers [ranks there]
 *   HT_ROWS       the same, to be spread there             token numbers, choices [K] of each, scales, rows
 *   HT_PARTIALS   sums of a node's ranks for one rank      which of its ranks are in it, token numbers, gradients [K]
 *                                                          of each when they are wanted, rows
 *
 * Rows that do not fit into one frame come in several, in order; the last one says so.  All numbers are judged here
 * from a private copy of the head; what depends on who takes part in what, whoever works the frame off judges.
 * Both ends are of one release and byte order: GIN's hello says so.
 */
#ifndef EP_HOST_FRAME_H
#define EP_HOST_FRAME_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_kernels.h"
#include "net.h"

enum ep_host_frame_kind {
    EP_FRAME_STATE = 1,
    EP_FRAME_LL_ROWS,
    EP_FRAME_LL_PARTIALS,
    EP_FRAME_HT_ASK,
    EP_FRAME_HT_GRANT,
    EP_FRAME_HT_ROWS,
    EP_FRAME_HT_PARTIALS,
};

struct ep_host_frame {
    struct ep_host_frame_size size; /* net.c fills it in */
    uint32_t rank, peer;            /* who tells; whom */
    uint64_t number;                /* of the op; HT: its tag */
    uint32_t first, count, total;   /* rows: of this frame, of all */
    uint32_t last;                  /* 1: no more come, and all that there are have come */
    uint32_t row_bytes, scale_bytes;
    uint32_t reserved[4];
};
_Static_assert(sizeof(struct ep_host_frame) == 64, "ep_host_frame is a protocol");

#define EP_HOST_SECTION 16u

struct ep_host_state {
    uint64_t released[EP_MAX_LL_BANKS];
    uint64_t ll_sent, ht_closed;
};

/* HT: what the ops of two ranks must have in common; and what one of them wants. */
struct ep_host_traits {
    uint64_t routing; /* combine: number of the dispatch */
    uint32_t dtype, scale_format;
    uint32_t wants_grads; /* combine: not in common */
    uint32_t reserved;
};

/* What a team is, as far as frames go. */
struct ep_host_shape {
    const struct ep_layout_map *map;
    const uint32_t *node; /* [R] */
    uint32_t nodes, own;
};

/* One choice at its source. */
struct ep_host_choice {
    int32_t rank; /* -1: goes nowhere */
    int32_t local;
    float weight;
};

uint32_t ep_host_ranks_on(const struct ep_host_shape *shape, uint32_t node);
static inline bool ep_host_is_dispatch(uint64_t tag) { return tag % (1ull << EP_HT_TAG_SHIFT) == 0; }
/* The payload of an ask to `node`. */
uint64_t ep_host_ht_ask_bytes(const struct ep_host_shape *shape, uint32_t node, uint64_t tag);

/* Where the sections of rows begin in the payload, and what they take together. */
struct ep_host_sections { uint64_t tokens, choices, scales, rows, bytes; };
struct ep_host_sections ep_host_ht_rows_sections(const struct ep_layout_map *map, uint32_t count, uint32_t row_bytes,
                                                 uint32_t scale_bytes);
/* ranks: of the node that sends; grad_bytes: of one token, 0: none.  They take the place of scales. */
struct ep_host_sections ep_host_ht_partials_sections(uint32_t ranks, uint32_t count, uint32_t row_bytes,
                                                     uint32_t grad_bytes);
struct ep_host_sections ep_host_ll_rows_sections(const struct ep_layout_map *map, uint32_t count, uint32_t row_bytes,
                                                 uint32_t scale_bytes);
struct ep_host_sections ep_host_ll_partials_sections(uint32_t count, uint32_t row_bytes);

/* Is it what `node` can say?  `bytes` can be read at `frame`; *head is the copy that was judged. */
bool ep_host_frame_judge(const struct ep_host_shape *shape, uint32_t node, const void *frame, uint32_t bytes,
                         struct ep_host_frame *head);

#endif
