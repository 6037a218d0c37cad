/*
 * nccl.h: NCCL, for the ranks of a group over several nodes: one communicator of all its ranks, and on each rank the
 * memory that others put to and what its kernels put through (device_net.h).
 *
 * The library is opened at run time.  Its calls block for as long as they like, so each rank has a thread for them, and
 * whoever waits does so for a bounded time: after that the threads are on their own, and what they have is lost.
 */
#ifndef EP_NODE_NCCL_H
#define EP_NODE_NCCL_H

#include "device_net.h"
#include "ep_cuda.h"

#define NCCL_ID_BYTES 128u

/* Memory that others put to: VMM, each of its own, as large on all ranks. */
struct nccl_memory {
    void *at;
    uint64_t bytes;
    uint64_t window; /* once formed: ncclWindow_t */
};
enum { NCCL_WINDOW, NCCL_BESIDE, NCCL_MEMORIES };

/* A rank of this node. */
struct nccl_rank {
    uint32_t rank, device; /* device: this process's ordinal */
    struct nccl_memory memory[NCCL_MEMORIES];
    uint64_t wire[EP_NET_WIRE_WORDS]; /* once formed */
};

struct nccl_world;

/* Can it be used?  EP_UNIMPLEMENTED and EP_UNAVAILABLE say what is missing. */
ep_status nccl_check(const struct ep_cuda_api *api, struct ep_error *error);
/* Of a world to be; one node makes it, and all have it. */
ep_status nccl_id(uint8_t id[NCCL_ID_BYTES], struct ep_error *error);
/* Collective: all ranks of all nodes.  `here` is copied.  Blocks for timeout_ms at most. */
ep_status nccl_form(const struct ep_cuda_api *api, const uint8_t id[NCCL_ID_BYTES], uint32_t ranks,
                    const struct nccl_rank *here, uint32_t n, uint32_t timeout_ms, struct nccl_world **out,
                    struct ep_error *error);
const struct nccl_rank *nccl_rank(const struct nccl_world *world, uint32_t rank); /* NULL: none of this node's */
/*
 * No kernel uses it.  Blocks for some seconds at most; waits for no other node.  To leave, NCCL waits for all that the
 * process has under way on the GPU, and a stream that serves a worker waits for its doorbell for as long as that worker
 * likes; worse, other calls of the driver wait meanwhile.  So as long as a rank is served it stays, with its memory and
 * NCCL's threads, and is left when none is.
 */
void nccl_leave(struct nccl_world *world);
/* This process begins to serve a rank on a GPU, and it does so no more: between the two NCCL leaves nothing.  The second
 * may block as nccl_leave() does, and the first while that goes on. */
void nccl_serve_begins(void);
void nccl_serve_ends(void);

#endif
