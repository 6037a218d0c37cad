/*
 * ep_node: what this node is and has: name, devices, memory budget.  Owned by the loop's thread.
 *
 * A node has one backend.  On the host backend devices are CPU threads that share the node's memory;
 * on the cuda backend they are GPUs with memory of their own.
 */
#ifndef EP_NODE_H
#define EP_NODE_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"
#include "ep/v1/admin.pb-c.h"

struct ep_node;
struct ep_cuda_api;

/* AUTO takes the GPUs where there are any whose memory can be shared with workers. */
enum ep_node_choice { EP_NODE_HOST, EP_NODE_CUDA, EP_NODE_AUTO };
/* What to do about MPS: say what is there; start only with it; start only without. */
enum ep_node_mps { EP_NODE_MPS_AUTO, EP_NODE_MPS_REQUIRE, EP_NODE_MPS_OFF };

struct ep_node_options {
    const char *name;               /* NULL: host name */
    enum ep_node_choice backend;
    enum ep_node_mps mps;
    const struct ep_cuda_api *cuda; /* NULL: ep_cuda_open() */
    const char *gpus;               /* "0,2": these of the GPUs that the process sees; NULL or "": all */
    uint32_t host_devices;          /* ranks of the host backend that this node offers */
    uint64_t memory_budget;         /* bytes for windows, on GPUs of each; 0: half of what is free at start */
    bool polls;                     /* with MPS, doorbells are polled: ep_cuda_rank_options */
    uint32_t sms_per_rank;          /* the most multiprocessors for a rank; 0: no bound */
    uint64_t region_bytes;          /* of its own memory that a worker may have mapped; 0: none */
    bool several;                   /* groups over several nodes may have ranks here: NCCL is started on GPUs */
    uint32_t silence_ms;            /* a node that acknowledges nothing to these for so long is lost; 0: EP_GIN_SILENCE_S */
    const char *socket, *admin_address;
    /* A GPU is lost, and with it the process, as far as it uses GPUs: see on_lost of struct ep_cuda_api.  NULL is allowed. */
    void (*on_lost)(const struct ep_error *why, void *user);
    void *user;
};

/* A backend that cannot be had is refused with the reason, and so are GPUs that are not there. */
ep_status ep_node_open(const struct ep_node_options *options, struct ep_node **out, struct ep_error *error);
void ep_node_close(struct ep_node *node);

const char *ep_node_name(const struct ep_node *node);
const char *ep_node_version(void); /* of this program: "0.1.0" */
/* When it was opened, in microseconds since 1970: tells a server from the one that it was before a restart. */
uint64_t ep_node_boot(const struct ep_node *node);
Ep__V1__Backend ep_node_backend(const struct ep_node *node);
uint32_t ep_node_devices(const struct ep_node *node);
const char *ep_node_device_name(const struct ep_node *node, uint32_t device);
/* Bit d: loads and stores of this GPU and the node's d-th do not reach each other's memory. */
uint64_t ep_node_device_apart(const struct ep_node *node, uint32_t device);
/* EP_CUDA_UUID_BYTES bytes; NULL on the host backend. */
const uint8_t *ep_node_device_uuid(const struct ep_node *node, uint32_t device);
/* As NodeInfo.nccl_version and nccl. */
uint32_t ep_node_nccl(const struct ep_node *node, const char **text);
/* Does this process's work on it go through an MPS server? */
bool ep_node_device_mps(const struct ep_node *node, uint32_t device);
/* And are doorbells polled there? */
bool ep_node_device_polls(const struct ep_node *node, uint32_t device);

/* Multiprocessors of a GPU; 0 on the host backend.  And how many of them one rank may have at most. */
uint32_t ep_node_sms(const struct ep_node *node, uint32_t device);
uint32_t ep_node_sms_per_rank(const struct ep_node *node);

/* Cordon: no new attachments.  The state survives a restart (the caller stores it). */
void ep_node_cordon(struct ep_node *node, bool cordoned, const char *reason);
bool ep_node_cordoned(const struct ep_node *node, const char **reason);
void ep_node_set_stopping(struct ep_node *node);
/* Where operators and other servers reach it, once the port is known. */
void ep_node_set_admin_address(struct ep_node *node, const char *address);

/* ---- memory ------------------------------------------------------------------ */

/* Memory of windows.  Refusal says what was asked, what is left and who has the rest. */
ep_status ep_node_reserve(struct ep_node *node, uint32_t device, uint64_t bytes, struct ep_error *error);
void ep_node_release(struct ep_node *node, uint32_t device, uint64_t bytes);
uint64_t ep_node_memory_left(const struct ep_node *node); /* of all devices */
/* What each device has left, [ep_node_devices]; NULL on the host backend, whose devices share it. */
const uint64_t *ep_node_device_memory_left(const struct ep_node *node);
uint64_t ep_node_device_memory_used(const struct ep_node *node, uint32_t device);
/* Allocations are multiples of this: what is reserved should be. */
uint64_t ep_node_granule(const struct ep_node *node);

/*
 * One rank's window, zeroed: on the host backend a memfd of sealed size, on the cuda backend GPU memory.
 * The name begins with its owner's, up to the first '/'.  Any thread, and on GPUs better not the loop's.
 */
struct ep_node_window;
ep_status ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                struct ep_node_window **out, struct ep_error *error);
/* Any thread, and better not the loop's: giving memory back takes about half a second per GiB. */
/* GPUs: memory beside it, zeroed, that no worker ever maps; once. */
ep_status ep_node_window_extend(struct ep_node_window *window, uint64_t bytes, struct ep_error *error);
void *ep_node_window_beside(const struct ep_node_window *window); /* NULL: there is none */
void ep_node_window_destroy(struct ep_node_window *window);
/* On the host backend mapped here; on the cuda backend an address on its GPU, not for the host to follow. */
void *ep_node_window_base(const struct ep_node_window *window);
/* A descriptor for a worker; closing it is the caller's. */
ep_status ep_node_window_export(const struct ep_node_window *window, int *fd, struct ep_error *error);

/* ---- info -------------------------------------------------------------------- */

/* Fills the fields that the node knows; free with ep_node_info_clear. */
void ep_node_info(const struct ep_node *node, Ep__V1__NodeInfo *info);
void ep_node_info_clear(Ep__V1__NodeInfo *info);

#endif
