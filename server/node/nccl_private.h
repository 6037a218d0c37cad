/* nccl_private.h: NCCL's calls, for whoever has a thread for them: they block for as long as they like. */
#ifndef EP_NODE_NCCL_PRIVATE_H
#define EP_NODE_NCCL_PRIVATE_H

#include "nccl.h"

/* After nccl_check().  The thread is bound to the rank's device (ep_cuda_api.nccl_bind).  Those of one communicator are not
 * to be called at the same time. */
ep_status nccl_comm_init(const uint8_t id[NCCL_ID_BYTES], uint32_t ranks, uint32_t rank, void **comm,
                         struct ep_error *error);
ep_status nccl_comm_abort(void *comm, struct ep_error *error);
/* Collective. */
ep_status nccl_window_open(void *comm, struct nccl_memory *memory, struct ep_error *error);
ep_status nccl_window_close(void *comm, const struct nccl_memory *memory, struct ep_error *error);
/* Collective. */
ep_status nccl_device_open(const struct ep_cuda_api *api, void *comm, uint32_t ranks, uint64_t *wire, struct ep_error *error);
ep_status nccl_device_close(const struct ep_cuda_api *api, void *comm, const uint64_t *wire, struct ep_error *error);

#endif
