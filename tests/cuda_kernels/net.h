/* net.h: groups whose ranks are on several nodes (nodes.h). */
#ifndef CUDA_KERNELS_NET_H
#define CUDA_KERNELS_NET_H

#include "ep_cuda.h"

/* Where EP_CUDA_WIRE_NODES is set the table's ranks have a wire. */
void net_offer(struct ep_cuda_api *api);

#endif
