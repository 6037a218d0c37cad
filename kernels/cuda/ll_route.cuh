/* ll_route.cuh: where the tokens of a batch go, as each block of a dispatch works it out for itself. */
#ifndef EP_LL_ROUTE_CUH
#define EP_LL_ROUTE_CUH

#include "ll_device.cuh"

namespace ep {

constexpr uint32_t kPassScales = kVecs / 2 * kThreads / 8; /* of a pass of a row, at most */

/* One block's view of the batch. */
struct Batch {
    int32_t *route; /* [T * k] in shared memory, as device_state.h has them */
    /* of the present token */
    uint32_t *slot;  /* [R] */
    uint32_t *index; /* [k] */
    float *weight;   /* [k] */
    uint32_t *to;    /* the ranks it goes to */
    uint32_t *n;     /* how many; where ranks have a mask, that says so */
    uint32_t *scales; /* [2][kPassScales] with a cast: of the present pass of its row, and of the one before */
};

/* ---- routing ----------------------------------------------------------------------- */

__device__ inline uint32_t divide(uint32_t n, uint64_t inverse)
{
    return (uint32_t)(n * inverse >> EP_LL_INVERSE_BITS);
}

/* Of choice i of the batch.  Args: of an LL kernel or an HT one. */
template <class Args> __device__ inline int32_t route_of(const Args &a, int64_t expert, uint32_t i)
{
    uint32_t rank, local;

    if (expert == -1)
        return -1;
    if (expert < 0 || expert >= a.experts)
        return kBadRoute;
    const uint32_t e = (uint32_t)expert, end = a.larger * (a.share + 1);

    if (a.home_first) {
        const uint32_t first = a.home_first[e], homes = a.home_first[e + 1] - first;
        const uint32_t home = first + (a.rank + i / a.top_k) % homes;

        rank = a.home_rank[home];
        local = a.home_local[home];
    } else if (e < end) {
        rank = divide(e, a.per_larger);
        local = e - rank * (a.share + 1);
    } else {
        rank = divide(e - end, a.per_share);
        local = e - end - rank * a.share;
        rank += a.larger;
    }
    return (int32_t)(rank << 16 | local);
}

__device__ inline int64_t choice(const ep_ll_args &a, uint32_t i)
{
    if (a.cached)
        return a.routing[i];
    return a.index_bytes == 4 ? ((const int32_t *)a.topk)[i] : ((const int64_t *)a.topk)[i];
}

constexpr uint32_t kChoices = 4; /* that a thread has under way: 128 tokens of 8 at once */

/* Choices i, i + kThreads ... of one thread; all of them are asked for before one is used. */
__device__ inline void read_some(const ep_ll_args &a, int32_t *route, uint32_t i, uint32_t n)
{
    int64_t asked[kChoices];

#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++)
        if (i + j * kThreads < n)
            asked[j] = choice(a, i + j * kThreads);
#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++) {
        const uint32_t at = i + j * kThreads;

        if (at < n)
            route[at] = a.cached ? (int32_t)asked[j] : route_of(a, asked[j], at);
    }
}

/* Does choice i name the expert of an earlier one of its token?  The bit that says so is not looked at. */
__device__ inline bool is_again(const ep_ll_args &a, const int32_t *route, uint32_t i)
{
    bool again = false;

#pragma unroll 1
    for (uint32_t j = i / a.top_k * a.top_k; j < i; j++)
        again |= (route[j] & ~EP_DEVICE_ROUTE_AGAIN) == route[i];
    return again;
}

/* The first n choices of the batch. */
__device__ inline void read_routes(const ep_ll_args &a, int32_t *route, uint32_t n)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += kChoices * kThreads)
        read_some(a, route, i, n);
    __syncthreads();
    if (a.cached)
        return;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += kThreads)
        if (route[i] >= 0 && is_again(a, route, i))
            route[i] |= EP_DEVICE_ROUTE_AGAIN;
    __syncthreads();
}

__device__ inline bool has_row(int32_t route) { return route >= 0 && !(route & EP_DEVICE_ROUTE_AGAIN); }
__device__ inline uint32_t rank_of(int32_t route) { return (uint32_t)(route & ~EP_DEVICE_ROUTE_AGAIN) >> 16; }

/* Does token t go to rank d? */
__device__ inline bool goes_to(const ep_ll_args &a, const int32_t *route, uint32_t t, uint32_t d)
{
    bool goes = false;

    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t r = route[t * a.top_k + k];

        goes |= r >= 0 && rank_of(r) == d;
    }
    return goes;
}

/* Mask of the ranks that token t goes to, where a mask has them all. */
__device__ inline uint32_t ranks_of(const ep_ll_args &a, const int32_t *route, uint32_t t)
{
    uint32_t mask = 0;

    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t r = route[t * a.top_k + k];

        if (r >= 0)
            mask |= 1u << rank_of(r);
    }
    return mask;
}

/* Warp 0: lane r adds up how many of the tokens [from, to) go to rank r. */
__device__ inline uint32_t count_tokens(const ep_ll_args &a, const int32_t *route, uint32_t from, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t count = 0;

#pragma unroll 1
    for (uint32_t at = from; at < to; at += 32) {
        const uint32_t mask = at + lane < to ? ranks_of(a, route, at + lane) : 0;

#pragma unroll 1
        for (uint32_t r = 0; r < a.ranks; r++) {
            const uint32_t goes = __popc(__ballot_sync(kAll, mask >> r & 1));

            count += lane == r ? goes : 0;
        }
    }
    return count;
}

/* Warp 0: adds the tokens [from, to) to counts[r] of each rank r that they go to; of any number of ranks. */
__device__ inline void count_all(const ep_ll_args &a, const int32_t *route, uint32_t from, uint32_t to, uint32_t *counts)
{
#pragma unroll 1
    for (uint32_t t = from + threadIdx.x; t < to; t += 32)
#pragma unroll 1
        for (uint32_t k = 0; k < a.top_k; k++) {
            const int32_t r = route[t * a.top_k + k];
            bool first = r >= 0;

            for (uint32_t j = 0; first && j < k; j++)
                first = route[t * a.top_k + j] < 0 || rank_of(route[t * a.top_k + j]) != rank_of(r);
            if (first)
                atomicAdd(&counts[rank_of(r)], 1);
        }
    __syncwarp();
}

/* A warp: how many of the first n choices name the same expert, with a row. */
__device__ inline uint32_t count_same(const int32_t *route, uint32_t n, int32_t same)
{
    const uint32_t lane = threadIdx.x % 32, whole = n / 4 * 4;
    uint32_t count = 0;

#pragma unroll 2
    for (uint32_t i = lane * 4; i < whole; i += 128) {
        const int4 r = *(const int4 *)(route + i);

        count += (r.x == same) + (r.y == same) + (r.z == same) + (r.w == same);
    }
    if (lane < n - whole)
        count += route[whole + lane] == same;
    return __reduce_add_sync(kAll, count);
}

} // namespace ep

#endif
