/*
 * What the kernels that serve a worker have in common: ll_serve.cu, for whatever is in its mailbox, ll_expect.cu and
 * ht_entry.cuh, for the op that is expected there, and ht_serve.cu.
 *
 * tests/model/mailbox.pml goes through the hand-over with two and three blocks, and breaks the rules one by one.
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

/* What an entry finds that expects an op. */
enum Found : uint32_t {
    kThere = 1,  /* it is in the mailbox */
    kSpins = 2,  /* the worker's kernel waits for its end, not a stream */
    kLeaves = 4, /* nothing is to be done */
};
constexpr uint32_t kFoundShift = 3; /* where one tells the others: the entry's number, and what it finds */

/* One thread, of whom all comes that is told of this entry. */
__device__ inline void tell_found(uint64_t *to, uint64_t number, uint32_t found)
{
    store_u64(to, number << kFoundShift | found);
}

/* All threads. */
__device__ inline uint32_t await_found(const uint64_t *told, uint64_t number)
{
    __shared__ uint32_t found;
    uint64_t v = 0;

    if (threadIdx.x == 0) {
        while (v >> kFoundShift != number)
            v = acquire_u64(told);
        found = (uint32_t)v;
    }
    __syncthreads();
    return found;
}

__device__ inline bool same(Vec a, Vec b)
{
    return ((a.w[0] ^ b.w[0]) | (a.w[1] ^ b.w[1]) | (a.w[2] ^ b.w[2]) | (a.w[3] ^ b.w[3])) == 0;
}

/* One warp: all at once, a round trip to memory. */
__device__ inline uint32_t look(const ep_ll_serve &s, const struct ep_forecast_op &at)
{
    constexpr uint32_t kBell = kOpVecs, kSpinning = kOpVecs + 1, kClosing = kOpVecs + 2;
    const uint32_t lane = threadIdx.x % 32;
    const void *from = lane < kOpVecs       ? (const Vec *)&s.mailbox->op[at.place] + lane
                       : lane == kBell      ? (const void *)&s.mailbox->bell
                       : lane == kSpinning  ? (const void *)&s.mailbox->spins
                                            : (const void *)&s.desk->closing;
    const Vec v = load_vec(from);
    const bool differs = lane < kOpVecs && !same(v, ((const Vec *)&at.op)[lane]);
    const uint32_t bell = __shfl_sync(kAll, v.w[0], kBell), spins = __shfl_sync(kAll, v.w[0], kSpinning);

    if (__shfl_sync(kAll, v.w[0], kClosing))
        return kLeaves;
    return (__any_sync(kAll, differs) || ep_bell_op(bell) != at.place ? 0 : kThere) | (spins ? kSpins : 0);
}

/* All threads. */
__device__ inline uint32_t look_once(const ep_ll_serve &s, const struct ep_forecast_op &at)
{
    __shared__ uint32_t found;

    if (threadIdx.x < 32) {
        const uint32_t seen = look(s, at);

        if (threadIdx.x == 0)
            found = seen;
    }
    __syncthreads();
    return found;
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

/* The same, when nothing of the op is to come: the worker's stream may go on. */
__device__ inline void tell_stream(const ep_ll_serve &s, bool waits)
{
    if (threadIdx.x == 0 && waits)
        store_u32(&s.mailbox->bell, EP_BELL_DONE);
}

/* The same: the next entry may begin.  It is not to find this one's bell. */
__device__ inline void say_over(const ep_ll_serve &s)
{
    __syncwarp();
    if (threadIdx.x == 0) {
        fence_gpu(); /* release; partner: ll_poll.cu */
        store_u64(&s.desk->over, s.number);
    }
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
            fence_gpu(); /* release; partners: the last block's fence, and that of the worker's kernel */
        if (tells)
            atomicAdd(&s.mailbox->through, 1);
        before = atomicInc(&s.desk->through, gridDim.x - 1); /* 0 again after the last one */
        if (before == gridDim.x - 1 && tells)
            fence_gpu(); /* acquire what all blocks wrote, each of which has released it to the worker's kernel */
        else if (before == gridDim.x - 1)
            fence_sys(); /* and release it to the worker's stream */
    }
    return __shfl_sync(kAll, before, 0) == gridDim.x - 1;
}

} // namespace ep

#endif
