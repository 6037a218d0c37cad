/*
 * bars: what LL ops took elsewhere and are to take here.  H 7168, K 8, E 256, uniform routing, slowest rank;
 * H200s of one host.
 *
 * Peers were measured on the same kind of machine: NCCL EP 2.30.7 and DeepEP V2 (dd758ca).
 */
#ifndef BARS_H
#define BARS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ep_types.h"

/* Of a pair, us: bf16 both ways, chained in a CUDA graph. */
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

/* Everything else; bench.sh asks for them by name. */
struct bar_figure {
    const char *name;
    float must, aim;
};

static const struct bar_figure bar_figures[] = {
    /* kernels alone at T=128, expert-major, 8 GPUs, us */
    { "kernel_dispatch_us", 38, 32 },
    { "kernel_combine_us", 42, 35 },
    { "kernel_dispatch_fp8_us", 25, 19 },
    /* a rank's window without its arena, T=128, 8 ranks */
    { "window_mib", 64, 56 },
    /* a new worker in a group that runs */
    { "attach_ms", 100, 20 },
    /* its peers' longest op when a worker is killed */
    { "kill_ms", 50, 5 },
};

static inline float bar_best_peer(const struct bar *bar)
{
    return bar->nccl_ep > 0 && bar->nccl_ep < bar->deepep ? bar->nccl_ep : bar->deepep;
}

static inline const struct bar_figure *bar_figure(const char *name)
{
    for (size_t i = 0; i < sizeof bar_figures / sizeof *bar_figures; i++)
        if (strcmp(bar_figures[i].name, name) == 0)
            return &bar_figures[i];
    return NULL;
}

/* Rows of a token that leave its GPU: one for each other GPU that has one of its experts. */
static inline double bar_remote_rows(uint32_t gpus)
{
    const uint32_t experts = 256, top_k = 8;
    double none = 1; /* of a GPU's experts is chosen */

    for (uint32_t i = 0; i < top_k; i++)
        none *= (double)(experts - experts / gpus - i) / (experts - i);
    return (gpus - 1) * (1 - none);
}

static inline const struct bar *bar_find(uint32_t gpus, ep_layout layout, uint32_t tokens)
{
    for (size_t i = 0; i < sizeof bars / sizeof *bars; i++)
        if (bars[i].gpus == gpus && bars[i].layout == layout && bars[i].tokens == tokens)
            return &bars[i];
    return NULL;
}

#endif
