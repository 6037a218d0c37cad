/*
 * device_net.h: what a rank's kernels know of ranks on other nodes; in GPU memory of the rank's, and as secret from its
 * worker as its state.
 *
 * A rank of another node has no window that stores reach.  What goes to it is written to memory that a rank has beside
 * its window, and no worker maps, and is put from there.  Signals say what has come.
 *
 *     LL   boxes, in each bank one for each rank, and one of each: rows with all that stands beside them, in one put:
 *          kernels/cuda/ll_net.cuh
 *     HT   boxes of records, one for each node and one of each source, in which their sums come back: kernels/cuda/ht_net.cuh
 *
 * Of what a rank has of the ranks of its own node alone there are EP_DEVICE_NODE_RANKS, by their places on it; sets of ranks
 * are as in device_state.h.
 *
 * Each rank has a gate on each other node, a rank there that takes all that it sends to the node, and by turns: the
 * i-th rank of a node has the i-th rank of another one, from the first again where that has fewer.  While a gate is
 * absent the next rank of its node that is there stands in for it, of the EP_NET_WAYS - 1 behind it, which have boxes for
 * that.  When these are absent too nobody does: what is for the node does not get there.
 */
#ifndef EP_DEVICE_NET_H
#define EP_DEVICE_NET_H

#include "device_state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Signals of a rank.  LL: each a number, of one bank, told by one rank.  They only grow, as long as the group's epoch
 * lives: whoever joins anew goes on where they are. */
enum ep_net_signal {
    EP_NET_SENT,   /* the dispatch of this number is there */
    EP_NET_CREDIT, /* the number will not be read any more */
    EP_NET_ACK,    /* the same, and all that was put up to this number has come */
    EP_NET_SIGNALS
};
/* HT: told by one rank. */
enum ep_net_ht_signal {
    EP_NET_HT_PUT,    /* which step of which op has come: kernels/cuda/ht_net.cuh */
    EP_NET_HT_CLOSED, /* tag: it takes nothing for this op any more */
    EP_NET_HT_ACK,    /* the same, and all that was put to it up to this op has come */
    EP_NET_HT_SIGNALS
};

EP_HD static inline uint32_t ep_net_signal_of(uint32_t ranks, uint32_t kind, uint32_t bank, uint32_t source)
{
    return (kind * EP_MAX_LL_BANKS + bank) * ranks + source;
}
EP_HD static inline uint32_t ep_net_ht_signal_of(uint32_t ranks, uint32_t kind, uint32_t source)
{
    return (EP_NET_SIGNALS * EP_MAX_LL_BANKS + kind) * ranks + source;
}
/* Of a group of so many ranks. */
EP_HD static inline uint32_t ep_net_all_signals(uint32_t ranks)
{
    return (EP_NET_SIGNALS * EP_MAX_LL_BANKS + EP_NET_HT_SIGNALS) * ranks;
}

#define EP_NET_WIRE_WORDS 64u
#define EP_NET_NOBODY 0xffffffffu
#define EP_NET_WAYS 3u              /* ranks that may act as a gate: it, and those behind it on its node */
#define EP_NET_PIECES 64u           /* that a box is put in, at most */
#define EP_NET_PIECE_BYTES 4194304u /* and no less than so many in each */

/* ---- beside a window --------------------------------------------------------------------- */

/* In EP_HT_ASK_RECORDS: how many, and through whom, by his place on his node. */
#define EP_NET_GATE_SHIFT 24u

/* How a group's ranks lie on nodes. */
struct ep_net_shape {
    uint32_t nodes;
    uint32_t most, least; /* ranks of a node */
};

/* Offsets in the memory beside a window.  A box has room for the widest rows. */
struct ep_net_map {
    uint64_t ll_out, ll_in; /* [banks][R] boxes of LL: to each rank, and from each */
    /* Of such a box: where the counts stand, and from them to the first row.  Below are heads, the last slot's first: the
     * first n rows and heads lie together, whatever n is. */
    uint64_t ll_box_bytes, ll_middle;
    uint32_t ll_rows, ll_head_bytes;
    uint64_t asks, asks_out;     /* [R] a note of each rank on another node, and for each */
    uint64_t out; /* [ways][outs] boxes: for each other node one of its gate there, and of each stand-in */
    uint64_t in;  /* [ways][gated] boxes: of each rank that has this one as its gate, or as a stand-in */
    uint64_t partials, tags, grads; /* [gated][places][T_ht] of the ranks of this node, for sums of the former,
                                       whoever makes them */
    uint64_t bytes;
    uint64_t box_bytes; /* records of all tokens, or sums of them */
    uint32_t outs, ins, gated, places;
    uint32_t ask_bytes, ways; /* ways: EP_NET_WAYS, or as many as a node has ranks */
};
EP_STATIC_ASSERT(EP_NET_WAYS * sizeof(struct ep_ht_flags) <= EP_HT_FLAGS_BYTES, "each of them tells in flags of its own");

/* A head: what stands beside a row of LL.  Then its header and its scales. */
struct ep_net_head {
    uint32_t number; /* whose partial is in place of the row */
    uint32_t reserved[3];
};
/* A record: one token for a node.  Then the row and its scales. */
struct ep_net_choice {
    int32_t route;  /* -1: not on this node */
    float weight;
    uint32_t slot;  /* of the token among all that its source sends to that rank */
    uint32_t index; /* and of the choice among those of the expert */
};
struct ep_net_record {
    uint32_t token, reserved;
    uint64_t tag;
    struct ep_net_choice choice[]; /* K */
};
/* A sum: one token of a node.  Then the gradients, K of them, and the row. */
struct ep_net_sum {
    uint32_t ranks; /* mask, by places on the node: whose partials are in it */
    uint32_t late;  /* and of the others, who did not come in time */
    uint64_t tag;
    /* Of the combine that it is of, which is to be the one that it comes to: */
    uint32_t traits; /* as EP_HT_ASK_TRAITS has them */
    uint32_t reserved;
    uint64_t number; /* the dispatch's */
};
EP_STATIC_ASSERT(sizeof(struct ep_net_record) == 16 && sizeof(struct ep_net_choice) == 16
                     && sizeof(struct ep_net_sum) == 32 && sizeof(struct ep_net_head) == 16,
                 "records are read 16 bytes at once");

EP_HD static inline uint64_t ep_net_align(uint64_t bytes) { return (bytes + 15) / 16 * 16; }
EP_HD static inline uint64_t ep_net_record_head(uint32_t top_k)
{
    return sizeof(struct ep_net_record) + (uint64_t)top_k * sizeof(struct ep_net_choice);
}
EP_HD static inline uint64_t ep_net_record_bytes(uint32_t top_k, uint32_t row_bytes, uint32_t scales_bytes)
{
    return ep_net_record_head(top_k) + row_bytes + ep_net_align(scales_bytes);
}
EP_HD static inline uint64_t ep_net_sum_head(uint32_t top_k)
{
    return sizeof(struct ep_net_sum) + ep_net_align((uint64_t)top_k * sizeof(float));
}
/* Records of a piece, but for the last one. */
EP_HD static inline uint32_t ep_net_piece(uint32_t max_tokens, uint64_t record_bytes)
{
    const uint32_t least = (uint32_t)((EP_NET_PIECE_BYTES + record_bytes - 1) / record_bytes);
    const uint32_t even = (max_tokens + EP_NET_PIECES - 1) / EP_NET_PIECES;

    return least > even ? least : even;
}

/* ---- what a rank's kernels know ------------------------------------------------------------ */

/* What ranks of this node, by their places, have granted a rank, this one or one that has it as its gate; checked against
 * their windows. */
struct ep_net_grants {
    uint32_t mask; /* who has */
    uint32_t row[EP_DEVICE_NODE_RANKS], rows[EP_DEVICE_NODE_RANKS], bits[EP_DEVICE_NODE_RANKS];
    uint32_t reserved;
    uint64_t out[EP_DEVICE_NODE_RANKS], scales[EP_DEVICE_NODE_RANKS]; /* addresses */
    uint64_t expert; /* address of [ranks of this node][L][2], as struct ep_device_ht_tables has it */
};

/* What the combines of a handle need of its dispatch: of each rank, in a table [R]. */
struct ep_net_way {
    uint32_t to;   /* records that it was sent as a gate; 0: nothing */
    uint32_t from; /* records that it sent here, from another node */
    uint32_t acts, via; /* as in struct ep_device_net */
};

/* Where tables begin, from the start of struct ep_device_net, which they lie behind. */
struct ep_net_tables {
    uint64_t ll_slots;  /* LL, of handle 0: [T_ll * K] of a choice's token among those that go to its rank */
    uint64_t grants;    /* [ins] struct ep_net_grants, and what they are made of: */
    uint64_t taken;     /* [ins][EP_DEVICE_NODE_RANKS] struct ep_device_ht_grant */
    uint64_t granted;   /* [ins][nears][L][2] as struct ep_device_ht_tables has it */
    uint64_t filled;    /* [R][EP_NET_PIECES] uint32_t, all 0 between ops: records of a piece that are in their box */
    uint64_t slots;     /* of handle 0: [T_ht * K] of a choice's token among those that go to its node */
    uint64_t relayed;   /* of handle 0: [ins][T_ht * K] choices of records that came: place << 24 | slot, or ~0 */
    uint64_t ways;      /* of handle 0: [R] struct ep_net_way */
    uint64_t ll_slots_stride, slots_stride, relayed_stride, ways_stride; /* from one handle's to the next one's */
    uint64_t bytes;     /* of all, and of what they lie behind */
};

struct ep_device_net {
    /* server, once */
    uint32_t ranks;
    uint32_t nears;   /* of this node */
    uint64_t beside;  /* the memory beside a window, as the network knows it: ncclWindow_t */
    uint64_t reserved1[6];
    uint64_t wire[EP_NET_WIRE_WORDS]; /* what puts and signals go through (gin.cuh): ncclDevComm */

    uint32_t far[EP_RANK_WORDS];          /* set: ranks on other nodes */
    uint32_t near[EP_DEVICE_NODE_RANKS];  /* the ranks of this node, by their places */
    /* of a rank: */
    uint32_t place[EP_DEVICE_MAX_RANKS];  /* among those of its node */
    uint64_t windows[EP_DEVICE_MAX_RANKS]; /* where its window is; 0: it is on another node */
    uint64_t at[EP_DEVICE_MAX_RANKS];     /* where its memory beside its window is; 0: it is on another node */

    /* LL; kernel: the last numbers that this rank has put to each other one, and told it, of each bank */
    uint64_t told[EP_NET_SIGNALS][EP_MAX_LL_BANKS][EP_DEVICE_MAX_RANKS];

    /* HT; server, once */
    struct ep_net_map map;
    uint32_t gates[EP_DEVICE_MAX_RANKS];  /* [map.outs] the gates of this rank, of each other node one, the next node's first */
    uint32_t order[EP_DEVICE_MAX_RANKS];  /* all ranks, node by node in the same order, those of this node behind them */
    /* of a rank on another node: */
    uint32_t gate[EP_DEVICE_MAX_RANKS];   /* the gate of this one on its node */
    uint32_t gate_here[EP_DEVICE_MAX_RANKS]; /* its gate on this node */
    uint32_t next[EP_DEVICE_MAX_RANKS];   /* of any rank: the next one of its node, the first to stand in for it */
    uint32_t in[EP_DEVICE_MAX_RANKS];     /* its box at its gate here, of map.in; a stand-in has it behind those of gates, and
                                             of nearer stand-ins: map.gated of each */
    uint32_t out[EP_DEVICE_MAX_RANKS];    /* and the box of its node here, of map.out; map.outs of each */
    uint32_t there[EP_DEVICE_MAX_RANKS];  /* of a gate: the box of this rank at it, as `in` */
    uint32_t back[EP_DEVICE_MAX_RANKS];   /* the box of this rank's node at it, as `out` */
    struct ep_net_tables tables;

    /* kernel */
    uint64_t ht_told[EP_NET_HT_SIGNALS][EP_DEVICE_MAX_RANKS];
    uint64_t ht_last[EP_DEVICE_MAX_RANKS];   /* tag of the last op for which this rank put it anything, or asked it */
    uint64_t pushed_at[EP_DEVICE_MAX_RANKS]; /* tag of the last op with partials of this one for sums of its */
    uint32_t pushed_by[EP_DEVICE_MAX_RANKS]; /* and who took them */
    /* the running op's */
    uint32_t acts[EP_DEVICE_MAX_RANKS];      /* a gate: who takes what goes there; EP_NET_NOBODY */
    uint32_t via[EP_DEVICE_MAX_RANKS];       /* of any rank: who of this node takes what it sends here; here: itself */
    uint32_t relays[EP_DEVICE_MAX_RANKS];    /* [relaying] ranks whose records go through here, or whose sums are made here,
                                                in `order` */
    /* and all 0 between ops */
    uint32_t relaying;
    uint32_t next_record, relayed_by; /* pieces of work that somebody took; warps that take no more */
    uint32_t next_token;              /* the same of tokens that become records, gate by gate */
    uint32_t numbered;                /* blocks that have numbered their part of the batch */
    uint32_t records[EP_DEVICE_MAX_RANKS];   /* that a rank on another node sends here */
    uint32_t unsent[EP_DEVICE_MAX_RANKS];    /* of such a rank, mask by places: who did not get all of it */
    uint32_t put[EP_DEVICE_MAX_RANKS];       /* pieces of its box that were put */
    /* sets: */
    uint32_t open[EP_RANK_WORDS];    /* ranks on other nodes that this op may put to */
    uint32_t more[EP_RANK_WORDS];    /* that a dispatch puts more to than an ask */
    uint32_t through[EP_RANK_WORDS]; /* dispatch: ranks on other nodes whose gate gets records; combine: who makes sums for
                                        this rank */
    uint32_t lost[EP_RANK_WORDS];    /* gates whose sums do not come */
    uint32_t silent[EP_RANK_WORDS];  /* ranks that do not ask for sums that are made here */
};
EP_STATIC_ASSERT(offsetof(struct ep_device_net, far) == 64 + EP_NET_WIRE_WORDS * 8, "ep_device_net is shared memory");

/* ---- host code (device_net.c) ---------------------------------------------------------------- */

/* node[ranks] of a group. */
struct ep_net_shape ep_net_shape_of(const uint32_t *node, uint32_t ranks);
/* What lies beside a window, LL's boxes first, and its bytes. */
void ep_net_lay_out(const struct ep_layout_map *map, const struct ep_net_shape *shape, struct ep_net_map *out);
uint64_t ep_net_beside_bytes(const struct ep_layout_map *map, const struct ep_net_shape *shape);
/* What a rank's net takes where it takes most: struct ep_device_net and its tables. */
uint64_t ep_net_bytes(const struct ep_layout_map *map, const struct ep_net_shape *shape);
/* Of a rank, all that the group's nodes say: what the server writes but addresses.  `tables.bytes` is what the rank's net
 * takes, of which *out is the beginning, and the rest is zero.  EP_INVALID_ARGUMENT: there are more ranks than a net has room for. */
ep_status ep_net_describe(const struct ep_layout_map *map, const uint32_t *node, uint32_t rank, struct ep_device_net *out,
                          struct ep_error *error);

#ifdef __cplusplus
}
#endif
#endif
