/*
 * What the kernels that serve a worker have in common: ll_serve.cu, for whatever is in its mailbox, ll_expect.cu and
 * ht_entry.cuh, for the op that is expected there, and ht_serve.cu.
 */
#ifndef EP_LL_SERVE_CUH
#define EP_LL_SERVE_CUH

#include "ll_combine.cuh"
#include "ll_dispatch.cuh"
#include "ll_op.h"

namespace ep {

constexpr uint32_t kOpVecs = sizeof(struct ep_op) / sizeof(Vec);

/* All threads, 8 bytes each at a time. */
template <class What> __device__ inline void copy_words(What *to, const What *from)
{
    for (uint32_t i = threadIdx.x; i < sizeof *to / sizeof(uint64_t); i += kThreads)
        ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
}

/* What is there beside the op. */
struct Seen {
    uint64_t ended; /* ops before */
    uint32_t closing, spins;
};

__device__ inline bool same(Vec a, Vec b)
{
    return ((a.w[0] ^ b.w[0]) | (a.w[1] ^ b.w[1]) | (a.w[2] ^ b.w[2]) | (a.w[3] ^ b.w[3])) == 0;
}

/* All threads: is it the op that is in the mailbox? */
__device__ inline bool is_there(const ep_ll_serve &s, const struct ep_forecast_op &at, Seen *seen)
{
    const struct ep_op *op = &s.mailbox->op[at.place];
    bool differs = false;

    if (threadIdx.x < kOpVecs)
        differs = !same(load_vec((const Vec *)op + threadIdx.x), ((const Vec *)&at.op)[threadIdx.x]);
    else if (threadIdx.x == kOpVecs)
        seen->closing = load_u32(&s.desk->closing);
    else if (threadIdx.x == kOpVecs + 1)
        seen->spins = load_u32(&s.mailbox->spins);
    else if (threadIdx.x == kOpVecs + 2)
        seen->ended = load_u64(&s.desk->log.ended);
    else if (threadIdx.x == kOpVecs + 3)
        differs = ep_bell_op(load_u32(&s.mailbox->bell)) != at.place;
    return !__syncthreads_or(differs);
}

/* One block of the op: what its complete will find. */
__device__ inline void keep_half(const ep_ll_serve &s, const struct ep_op &op)
{
    if (threadIdx.x < kOpVecs)
        ((Vec *)&s.desk->half[op.handle])[threadIdx.x] = ((const Vec *)&op)[threadIdx.x];
}

/* Block 0 of the kernel that executes or refuses the op, for a worker that spins: so many blocks add to `through`.
 * Before it is through itself, whose fence in pass() orders it. */
__device__ inline void answer_bell(const ep_ll_serve &s, bool spins, uint32_t blocks)
{
    if (threadIdx.x == 0 && spins) {
        store_u32(&s.mailbox->bell, 0);
        store_u32(&s.mailbox->blocks, blocks);
    }
}

/* Warp 0 of the last block.  All is as it should be already, unless blocks executed different ops. */
__device__ inline void set_right(struct ep_device_state *state)
{
    empty_scratch(&state->scratch);
    if (threadIdx.x == 0)
        state->left_before = load_u64(&state->left);
}

/* Warp 0 of the last block: what the op was, as it was in the mailbox and where, and that `ended` ops were over before
 * it. */
__device__ inline void log_op(const ep_ll_serve &s, const struct ep_op &op, uint32_t kind, uint32_t place,
                              uint64_t ended)
{
    struct ep_forecast_log *log = &s.desk->log;
    Vec *to = (Vec *)&log->op[ended % EP_FORECAST_OPS];

    if (threadIdx.x < kOpVecs) {
        Vec v = ((const Vec *)&op)[threadIdx.x];

        if (threadIdx.x == 0)
            v.w[0] = kind;
        to[threadIdx.x] = v;
    } else if (threadIdx.x == kOpVecs) {
        to[kOpVecs] = { place, 0, 0, 0 };
    }
    if (threadIdx.x == 0) /* without a fence: what a copy of the log says is not counted on */
        store_vec((Vec *)&log->ended, { (uint32_t)(ended + 1), (uint32_t)((ended + 1) >> 32), (uint32_t)s.number,
                                        (uint32_t)(s.number >> 32) }); /* and `entry` */
}

/* Warp 0, when its block has written all that it writes: is it the last block?  The worker's kernel waits to be told of
 * it, or not; it wrote something, or not. */
__device__ inline bool pass(const ep_ll_serve &s, bool tells, bool wrote)
{
    uint32_t before = 0;

    if (threadIdx.x == 0) {
        if (wrote)
            __threadfence(); /* release; partners: the last block's fence, and that of the worker's kernel */
        if (tells)
            atomicAdd(&s.mailbox->through, 1);
        before = atomicInc(&s.desk->through, gridDim.x - 1); /* 0 again after the last one */
        if (before == gridDim.x - 1 && tells)
            __threadfence(); /* acquire what all blocks wrote, each of which has released it to the worker's kernel */
        else if (before == gridDim.x - 1)
            fence_sys(); /* and release it to the worker's stream */
    }
    return __shfl_sync(kAll, before, 0) == gridDim.x - 1;
}

} // namespace ep

#endif
