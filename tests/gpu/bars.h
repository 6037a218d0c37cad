/*
 * bars: what a pair of LL ops took elsewhere and is to take here, us.  bf16 both ways, chained in a CUDA
 * graph, H 7168, K 8, E 256, uniform routing, slowest rank; H200s of one host.
 *
 * Peers were measured on the same kind of machine: NCCL EP 2.30.7 and DeepEP V2 (dd758ca).
 */
#ifndef BARS_H
#define BARS_H

#include <stddef.h>
#include <stdint.h>

#include "ep_types.h"

struct bar {
    uint32_t gpus;
    ep_layout layout;
    uint32_t tokens;
    float nccl_ep, deepep; /* 0: not measured */
    float server, direct;  /* must be reached: executor server with MPS, direct */
    float aim;
};

static const struct bar bars[] = {
    { 8, EP_LAYOUT_EXPERT_MAJOR, 128, 117.9f, 95.5f, 93, 82, 68 },
    { 8, EP_LAYOUT_EXPERT_MAJOR, 64, 71.0f, 64.6f, 62, 53, 42 },
    { 8, EP_LAYOUT_EXPERT_MAJOR, 32, 51.0f, 49.7f, 46, 38, 28 },
    { 8, EP_LAYOUT_EXPERT_MAJOR, 8, 36.2f, 40.1f, 35, 28, 19 },
    { 8, EP_LAYOUT_EXPERT_MAJOR, 1, 32.8f, 36.2f, 31, 24, 16 },
    { 8, EP_LAYOUT_RANK_MAJOR, 128, 99.5f, 94.6f, 88, 78, 65 },
    { 8, EP_LAYOUT_RANK_MAJOR, 8, 0, 34.6f, 34, 27, 18 },
    { 8, EP_LAYOUT_RANK_MAJOR, 1, 0, 31.9f, 31, 24, 15 },
    { 4, EP_LAYOUT_EXPERT_MAJOR, 128, 94.0f, 66.2f, 65, 57, 46 },
    { 4, EP_LAYOUT_EXPERT_MAJOR, 64, 62.1f, 47.1f, 46, 40, 32 },
    { 4, EP_LAYOUT_EXPERT_MAJOR, 32, 45.9f, 40.1f, 38, 32, 24 },
    { 4, EP_LAYOUT_EXPERT_MAJOR, 8, 35.9f, 39.0f, 34, 27, 18 },
    { 4, EP_LAYOUT_EXPERT_MAJOR, 1, 31.7f, 32.4f, 30, 23, 15 },
    { 4, EP_LAYOUT_RANK_MAJOR, 128, 72.0f, 59.3f, 58, 51, 42 },
    { 4, EP_LAYOUT_RANK_MAJOR, 8, 0, 28.6f, 28, 23, 17 },
    { 4, EP_LAYOUT_RANK_MAJOR, 1, 0, 27.3f, 27, 21, 14 },
};

static inline const struct bar *bar_find(uint32_t gpus, ep_layout layout, uint32_t tokens)
{
    for (size_t i = 0; i < sizeof bars / sizeof *bars; i++)
        if (bars[i].gpus == gpus && bars[i].layout == layout && bars[i].tokens == tokens)
            return &bars[i];
    return NULL;
}

#endif
