/*
 * ll_take.cuh: executor server: an op is taken from a mailbox.  Each block copies it to its shared memory, judges its copy and
 * makes the arguments from it that the kernels of executor direct have in their parameters.  ll_serve.cu says whom it trusts.
 *
 * ## Memory of the worker's own
 * Spans beyond the window lie in regions, which the server has mapped and lists at the desk.  A block whose op has such
 * a span takes a copy of the list, judges the op by it and takes addresses from it: what the list says later is of no
 * matter for this block.  The server may unmap what it has struck off the list when no block can have found it any
 * more, which entries tell by Dekker:
 *     block: looked = number of its entry; fence; read the list       last block of an entry: log.entry = its number
 *     server: strike off (the copy is over); read looked; wait until log.entry >= that
 * Either the block finds it struck off, or the server finds the block's entry in `looked` and waits for the end of it.
 * Entries do not overlap, so the one in `looked` is the last that can have found it.
 */
#ifndef EP_LL_TAKE_CUH
#define EP_LL_TAKE_CUH

#include "ll_serve.cuh"
#include "op_rules.h"

namespace ep {
namespace {

/* What a block knows of its entry. */
struct Entry {
    alignas(16) struct ep_op op;
    struct ep_ll_args args;
    struct ep_regions regions; /* if the op has spans there */
    uint64_t ended; /* ops before */
    uint32_t closing, spins, beyond; /* beyond: it has spans there */
    uint32_t kind;  /* as it was in the mailbox: a complete becomes the op that it finishes */
    uint32_t place; /* and where */
    int32_t status; /* of the op before it is executed */
};
__shared__ Entry entry;
EP_LAUNCHED_SHARED(4, shared); /* ep_device_shared_bytes() */

constexpr uint32_t kFirstSpan = offsetof(struct ep_op, x) / sizeof(Vec);
constexpr uint32_t kLastSpan = offsetof(struct ep_op, topk_grads) / sizeof(Vec);
constexpr uint32_t kBaseVecs = offsetof(struct ep_ll_args, blocks) / sizeof(Vec);

/* Is this piece of an op a span beyond the window?  In the second word are the high bits of its offset. */
__device__ inline bool is_beyond(uint32_t piece, Vec v)
{
    return piece >= kFirstSpan && piece <= kLastSpan && v.w[1] >= EP_REGION_BYTES >> 32;
}

/* A piece of the op that is rung for; what is at the first place is asked for together with the bell. */
__device__ inline Vec piece_of(const struct ep_mailbox *mailbox, uint32_t piece)
{
    const Vec first = load_vec((const Vec *)&mailbox->op[0] + piece);
    const uint32_t place = ep_bell_op(load_u32(&mailbox->bell));

    if (piece == 0)
        entry.place = place;
    return place == 0 ? first : load_vec((const Vec *)&mailbox->op[place] + piece);
}

/* All at once, a round trip to memory or two: the op, and what does not depend on it. */
__device__ inline void take(const ep_ll_serve &s)
{
    const uint32_t i = threadIdx.x - 32;

    if (threadIdx.x < kOpVecs)
        ((Vec *)&entry.op)[threadIdx.x] = piece_of(s.mailbox, threadIdx.x);
    else if (threadIdx.x == kOpVecs)
        entry.closing = load_u32(&s.desk->closing);
    else if (threadIdx.x == kOpVecs + 1)
        entry.spins = load_u32(&s.mailbox->spins);
    else if (threadIdx.x == kOpVecs + 2)
        entry.ended = load_u64(&s.desk->log.ended);
    if (threadIdx.x >= 32 && i < kBaseVecs)
        ((Vec *)&entry.args)[i] = load_vec((const Vec *)&s.desk->rank.base + i);
    __syncthreads();
}

/* A complete is the half that was sent; one that was not is of kind 0. */
__device__ inline void take_half(const ep_ll_serve &s)
{
    const uint32_t handle = entry.op.handle;

    __syncthreads();
    if (handle < EP_MAX_HANDLES && threadIdx.x < kOpVecs)
        ((Vec *)&entry.op)[threadIdx.x] = ((const Vec *)&s.desk->half[handle])[threadIdx.x];
    __syncthreads();
}

/* Has the op spans beyond the window? */
__device__ inline bool needs_regions()
{
    return __syncthreads_or(threadIdx.x < kOpVecs
                            && is_beyond(threadIdx.x, ((const Vec *)&entry.op)[threadIdx.x]));
}

/* All threads, for an op that has spans there. */
__device__ __noinline__ void take_regions(struct ep_ll_desk *desk, uint64_t number)
{
    if (threadIdx.x == 0) {
        store_u64(&desk->looked, number);
        fence_total(); /* Dekker; partner: ep_cuda_serve_forget() */
    }
    __syncthreads();
    if (threadIdx.x < EP_MAX_REGIONS) {
        const Vec v = load_vec(&desk->region[threadIdx.x]);
        struct ep_region *region = &entry.regions.region[threadIdx.x];

        region->start = (uint8_t *)((uint64_t)v.w[1] << 32 | v.w[0]);
        region->bytes = (uint64_t)v.w[3] << 32 | v.w[2];
    }
    if (threadIdx.x == 0)
        entry.regions.n = EP_MAX_REGIONS;
    __syncthreads();
}

/* Is it for the kernel behind this one? */
__device__ inline bool is_ht(const struct ep_op &op)
{
    return op.mode == EP_MODE_HT && (op.kind == EP_OP_DISPATCH || op.kind == EP_OP_COMBINE);
}

__device__ inline int32_t judge(const ep_ll_serve &s, const struct ep_op &op, const struct ep_regions *regions,
                                bool completes)
{
    struct check c;

    if (completes && op.kind == 0)
        return EP_FAILED_PRECONDITION;
    c.limits = &s.desk->limits;
    c.arena = s.desk->arena;
    c.op = &op;
    c.regions = regions;
    const ep_status status = check_op(&c);

    if (is_ht(op) && !ep_ht_can_reach(&op))
        return EP_INVALID_ARGUMENT;
    return status;
}

/* All threads: the arguments that the op makes, and whether it is good. */
__device__ inline void make_args(const ep_ll_serve &s, const struct ep_regions *regions, bool completes)
{
    if (threadIdx.x == 0)
        ep_ll_fill(&s.desk->rank, regions, &entry.op, completes, &entry.args);
    else if (threadIdx.x == 32)
        entry.status = judge(s, entry.op, regions, completes);
    __syncthreads();
}

/* Functions of their own, each with as many registers as it wants, as kernels of executor direct are. */
template <Cast C> __device__ __noinline__ void dispatch_op()
{
    dispatch::run<C>(entry.args, shared);
}

template <class T> __device__ __noinline__ void combine_op()
{
    combine::run<T>(entry.args);
}

} // namespace
} // namespace ep

#endif
