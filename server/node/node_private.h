/*
 * node_private: what the files of this folder share.
 *
 *   ep_node.c    name, cordon, memory budget, what operators see
 *   gpus.c       the GPUs of a node, and MPS; links.c how they reach each other
 *   window.c     windows, and who has how much memory in them
 *   team.c       teams: what both backends have in common; team_host.c, team_cuda.c the backends
 *   lost.c       nodes that a team over several of them has lost
 *   nccl.c       NCCL, for GPUs of several nodes: nccl_start.c its beginning, nccl_net.c communicators, crew.c threads for its
 *                calls; span_cuda.c what a team of them has beside that of one node
 *   watch_cuda.c what kernels count and report; for a worker that runs its own ops nothing else is done
 *   loads_cuda.c rows of each expert, from the routing that kernels keep
 *   serve_cuda.c runs the ops of a worker that hands them over
 *   regions_cuda.c maps memory of that worker for them
 *   engine.c     executes the ops of one rank on the host backend
 *   text.c       figures in messages
 */
#ifndef EP_NODE_PRIVATE_H
#define EP_NODE_PRIVATE_H

#include <pthread.h>

#include "ep_cuda.h"
#include "ep_node.h"
#include "ep_nvml.h"

/* What is between a GPU and the others of the node; nothing of it changes after the start. */
struct links {
    uint32_t peers;                  /* GPUs that it reaches, and they it */
    bool has_nvlinks, has_ways;      /* false: what follows is not known */
    uint32_t nvlinks;                /* that are up */
    uint32_t over_nvlink, over_pcie; /* peers */
    enum ep_nvml_fabric fabric;
};

struct device {
    char name[sizeof ((struct ep_cuda_device *)NULL)->uuid_text];
    uint64_t used;   /* reserved bytes */
    uint64_t budget; /* of a GPU */
    uint32_t ordinal; /* of a GPU in this process */
    struct ep_cuda_device gpu;
    struct links links;
};

/* Listed, so that a refusal can say who has the memory. */
struct ep_node_window {
    struct ep_node *node;
    struct ep_node_window *next;
    uint32_t device;
    uint64_t bytes;
    char *owner; /* its name up to the first '/': the group's */
    /* host */
    int fd;
    void *base;
    /* cuda */
    struct ep_cuda_memory *memory, *beside; /* beside: NULL, there is none */
    uint64_t beside_bytes;
};

struct ep_node {
    char *name, *socket, *admin_address, *kernel;
    char *nccl; /* what GPUs reach those of other nodes through, in words, */
    uint32_t nccl_version; /* and 0, if they do not */
    bool polls;
    uint32_t cpus, sms_per_rank, silence_ms;
    uint64_t started_us, budget, used, region_bytes;
    const struct ep_cuda_api *cuda; /* NULL: the host backend */
    uint32_t n_devices;
    struct device *devices;
    uint64_t *left; /* [n_devices] of each GPU; NULL: the host backend */
    pthread_mutex_t windows_mutex;
    struct ep_node_window *windows;
    bool cordoned, stopping;
    char *reason;
};

/* "1.5 GiB (1610612736 bytes)" */
struct ep_bytes_text {
    char text[64];
};
struct ep_bytes_text ep_bytes_text(uint64_t bytes);

/* "group moe 4.0 MiB, group decode 1.0 MiB": the largest owners, into text.  device < 0: on all. */
void ep_node_describe_owners(struct ep_node *node, int64_t device, char *text, size_t size);

/* ---- gpus.c ------------------------------------------------------------------- */

/*
 * Settles the backend: node->cuda and its devices, or neither for the host.  AUTO falls back to the host;
 * what --mps asks for is no reason to.
 */
ep_status ep_node_choose_backend(struct ep_node *node, const struct ep_node_options *options,
                                 struct ep_error *error);
/* "NVIDIA H200, 139.8 GiB, ..."; malloc'ed, NULL without memory. */
char *ep_node_gpu_detail(const struct ep_node *node, uint32_t device);

/* ---- links.c ------------------------------------------------------------------ */

/* Do loads and stores of each reach the other? */
bool ep_node_gpus_reach(const struct ep_node *node, uint32_t a, uint32_t b);
/* Over NVLink, or they are the same? */
bool ep_node_gpus_linked(const struct ep_node *node, uint32_t a, uint32_t b);
/* When the node has its GPUs: fills their links. */
void ep_node_look_at_links(struct ep_node *node);

/* "7 of 7 other GPUs over NVLink"; "18"; "completed".  What is not known they call so. */
struct ep_links_text {
    char text[80];
};
struct ep_links_text ep_node_reach_text(const struct ep_node *node, uint32_t device);
struct ep_links_text ep_node_nvlinks_text(const struct links *links);
const char *ep_node_fabric_text(const struct links *links);
void ep_node_fill_links(const struct links *links, Ep__V1__Device *device);

#endif
