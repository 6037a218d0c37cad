/* nodes.h: how EP_CUDA_WIRE_NODES=N in the environment puts the ranks of a group on nodes. */
#ifndef CUDA_KERNELS_NODES_H
#define CUDA_KERNELS_NODES_H

#include <stdint.h>
#include <stdlib.h>

/* All the first one's without it; the last node has what is left over. */
static inline uint32_t wire_node_of(uint32_t rank, uint32_t ranks)
{
    const char *text = getenv("EP_CUDA_WIRE_NODES");
    const uint32_t asked = text ? (uint32_t)strtoul(text, NULL, 10) : 1;
    const uint32_t nodes = asked < 1 ? 1 : asked < ranks ? asked : ranks;
    const uint32_t node = rank / (ranks / nodes);

    return node < nodes ? node : nodes - 1;
}

#endif
