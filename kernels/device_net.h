/*
 * device_net.h: what a rank's kernels know of ranks on other nodes; in GPU memory of the rank's, and as secret from its
 * worker as its state.
 *
 * A rank of another node has no window that stores reach.  What goes to it is written to the outbox, banks of the same
 * layout as the window's (window.h) in which region [d] is for rank d, and put from there into region [own rank] of its
 * window.  Signals say what has come: kernels/cuda/ll_net.cuh has the protocol.
 */
#ifndef EP_DEVICE_NET_H
#define EP_DEVICE_NET_H

#include "device_state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Signals of a rank: each a number of LL, of one bank, told by one rank.  They only grow, as long as the group's epoch
 * lives: whoever joins anew goes on where they are. */
enum ep_net_signal {
    EP_NET_SENT,   /* the dispatch of this number is there */
    EP_NET_CREDIT, /* the number will not be read any more */
    EP_NET_ACK,    /* the same, and all that was put up to this number has come */
    EP_NET_SIGNALS
};

EP_HD static inline uint32_t ep_net_signal_of(uint32_t kind, uint32_t bank, uint32_t source)
{
    return (kind * EP_MAX_LL_BANKS + bank) * EP_DEVICE_MAX_RANKS + source;
}
#define EP_NET_ALL_SIGNALS (EP_NET_SIGNALS * EP_MAX_LL_BANKS * EP_DEVICE_MAX_RANKS)

#define EP_NET_WIRE_WORDS 64u

struct ep_device_net {
    /* server, once */
    uint32_t far;     /* mask: ranks on other nodes */
    uint32_t reserved0;
    uint64_t outbox;  /* from the window's start, in the memory that both are in */
    uint64_t window;  /* that memory, as the network knows it: ncclWindow_t */
    uint64_t reserved1[5];
    uint64_t wire[EP_NET_WIRE_WORDS]; /* what puts and signals go through (gin.cuh): ncclDevComm */

    /* kernel: the last numbers that this rank has put to each other one, and told it, of each bank */
    uint64_t told[EP_NET_SIGNALS][EP_MAX_LL_BANKS][EP_DEVICE_MAX_RANKS];
};
EP_STATIC_ASSERT(offsetof(struct ep_device_net, told) == 64 + EP_NET_WIRE_WORDS * 8, "ep_device_net is shared memory");

/* Outbox of a rank: behind its window, as large on all ranks. */
static inline uint64_t ep_net_outbox_bytes(const struct ep_layout_map *map)
{
    return map->limits.ll_banks * map->bank_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
