/*
 * nccl.h: NCCL, for the ranks of a group over several nodes.
 *
 * A communicator is made of all ranks of a group; a net is what one epoch has of it: on each rank the memory that others
 * put to, and what its kernels put through (device_net.h).  The next epoch goes on with the communicator of the one before
 * when the same ranks are on the same GPUs, every node still has it, and nothing has gone wrong with it: only the memory
 * is told anew.  A net holds its communicator, which is left with the last one.
 *
 * The library is opened at run time.  Its calls block for as long as they like, so each rank has a thread for them, and
 * whoever waits does so for a bounded time: after that the threads are on their own, and what they have is lost.
 */
#ifndef EP_NODE_NCCL_H
#define EP_NODE_NCCL_H

#include "device_net.h"
#include "ep_cuda.h"

#define NCCL_ID_BYTES 128u
#define NCCL_TAG_BYTES 16u

/* Memory that others put to: VMM, of its own, as large on all ranks. */
struct nccl_memory {
    void *at;
    uint64_t bytes;
    uint64_t window; /* once formed: ncclWindow_t */
};

/* A rank of this node. */
struct nccl_rank {
    uint32_t rank, device; /* device: this process's ordinal */
    struct nccl_memory memory;
    uint64_t wire[EP_NET_WIRE_WORDS]; /* once formed */
};

/* What a node tells the others. */
struct nccl_card {
    uint8_t id[NCCL_ID_BYTES];       /* the first node: of a communicator to be, */
    uint8_t tag[NCCL_TAG_BYTES];     /* and what all will call it */
    uint8_t goes_on[NCCL_TAG_BYTES]; /* the communicator that this node can go on with; 0: none */
};

struct nccl_net;

/*
 * After nccl_check(), and before this process serves a rank.  NCCL loads its kernels when it is first called and when it
 * first makes a communicator on a GPU.  The driver then waits for all that the process has under way, and keeps other
 * calls waiting: behind a stream that waits for its worker's doorbell, that is as long as the worker likes.  So each of
 * these GPUs gets a communicator of one rank, which is left at once.  Blocks for timeout_ms at most.
 */
ep_status nccl_start(const struct ep_cuda_api *api, const uint32_t *devices, uint32_t n, uint32_t timeout_ms,
                     struct ep_error *error);

/* Can it be used?  EP_UNIMPLEMENTED and EP_UNAVAILABLE say what is missing. */
ep_status nccl_check(const struct ep_cuda_api *api, struct ep_error *error);
/* Its version, and in words that and who brings GIN; or 0, and why it cannot be used.  *text: malloc'ed, NULL: no memory. */
uint32_t nccl_describe(const struct ep_cuda_api *api, char **text);

/* A net for these ranks, of which rank and device count here, of `ranks` in the group; and what the others are to know:
 * *card is filled in but for what nccl_invite() adds to that of the first node. */
ep_status nccl_open(const struct ep_cuda_api *api, const char *group, uint32_t ranks, const struct nccl_rank *here, uint32_t n,
                    struct nccl_net **out, struct nccl_card *card, struct ep_error *error);
ep_status nccl_invite(struct nccl_card *card, struct ep_error *error);
/* Can this net go on with what that node can go on with? */
bool nccl_goes_on(const struct nccl_net *net, const struct nccl_card *card);
/*
 * Collective: all ranks of all nodes.  first: the first node's card; NULL: with the communicator that all can go on with.
 * `here` is as it was, with the memory.  Blocks for timeout_ms at most.  After a failure the net can only be closed;
 * where it took too long, *net is NULL.
 */
ep_status nccl_form(struct nccl_net **net, const struct nccl_card *first, const struct nccl_rank *here, uint32_t timeout_ms,
                    struct ep_error *error);
const struct nccl_rank *nccl_rank(const struct nccl_net *net, uint32_t rank); /* NULL: none of this node's */
/* A node is gone, or a rank was late: no other epoch goes on with this communicator.  Any thread. */
void nccl_distrust(struct nccl_net *net);
/*
 * No kernel uses it.  Blocks for some seconds at most; waits for no other node.  The ranks' memory is given back at once.
 * To leave a communicator, NCCL waits for all that the process has under way on the GPU, and a stream that serves a worker
 * waits for its doorbell for as long as that worker likes; worse, other calls of the driver wait meanwhile.  So as long as
 * a rank is served the communicator stays, with NCCL's own memory and threads, and is left when none is.
 */
void nccl_close(struct nccl_net *net);

/* This process begins to serve a rank on a GPU, and it does so no more: between the two NCCL leaves nothing.  The second
 * may block for some seconds, and the first for as long as it takes to leave one communicator. */
void nccl_serve_begins(void);
void nccl_serve_ends(void);

#endif
