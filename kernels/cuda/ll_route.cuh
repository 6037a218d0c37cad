/* ll_route.cuh: where the tokens of a batch go, as each block of a dispatch works it out for itself. */
#ifndef EP_LL_ROUTE_CUH
#define EP_LL_ROUTE_CUH

#include "ll_device.cuh"

namespace ep {

/* One block's view of the batch. */
struct Batch {
    int32_t *route; /* [T * k] in shared memory, as device_state.h has them */
    /* of the present token */
    uint32_t *slot;  /* [R] */
    uint32_t *index; /* [k] */
    float *weight;   /* [k] */
    uint32_t *to;    /* the ranks it goes to */
};

/* ---- routing ----------------------------------------------------------------------- */

__device__ inline int32_t route_of(const ep_ll_args &a, int64_t expert, uint32_t token)
{
    uint32_t rank, local;

    if (expert == -1)
        return -1;
    if (expert < 0 || expert >= a.experts)
        return kBadRoute;
    const uint32_t e = (uint32_t)expert;

    if (a.home_first) {
        const uint32_t first = a.home_first[e], homes = a.home_first[e + 1] - first;
        const uint32_t home = first + (a.rank + token) % homes;

        rank = a.home_rank[home];
        local = a.home_local[home];
    } else {
        const uint32_t end = a.larger * (a.share + 1);

        rank = e < end ? e / (a.share + 1) : a.larger + (e - end) / a.share;
        local = e < end ? e % (a.share + 1) : (e - end) % a.share;
    }
    return (int32_t)(rank << 16 | local);
}

__device__ inline int64_t choice(const ep_ll_args &a, uint32_t i)
{
    return a.index_bytes == 4 ? ((const int32_t *)a.topk)[i] : ((const int64_t *)a.topk)[i];
}

constexpr uint32_t kRouters = kThreads - 32; /* all but the first warp */
constexpr uint32_t kChoices = 5;             /* that a thread has under way: 128 tokens of 8 at once */

/* Choices i, i + kRouters ... of one thread; all of them are asked for before one is used. */
__device__ inline void read_some(const ep_ll_args &a, int32_t *route, uint32_t i, uint32_t n)
{
    int64_t asked[kChoices];

#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++) {
        const uint32_t at = i + j * kRouters;

        if (at < n)
            asked[j] = a.cached ? a.routing[at] : choice(a, at);
    }
#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++) {
        const uint32_t at = i + j * kRouters;

        if (at < n)
            route[at] = a.cached ? (int32_t)asked[j] : route_of(a, asked[j], at / a.top_k);
    }
}

/* The first n choices of the batch; meanwhile() is what the first warp does. */
template <class Meanwhile>
__device__ void read_routes(const ep_ll_args &a, int32_t *route, uint32_t n, Meanwhile meanwhile)
{
    if (threadIdx.x < 32)
        meanwhile();
    else
        for (uint32_t i = threadIdx.x - 32; i < n; i += kChoices * kRouters)
            read_some(a, route, i, n);
    __syncthreads();
    if (a.cached)
        return;
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
        const uint32_t first = i / a.top_k * a.top_k;
        const int32_t mine = route[i];
        bool again = false;

        for (uint32_t j = first; j < i; j++)
            again |= (route[j] & ~EP_DEVICE_ROUTE_AGAIN) == mine;
        if (again && mine >= 0)
            route[i] = mine | EP_DEVICE_ROUTE_AGAIN; /* nobody looks at this bit here */
    }
    __syncthreads();
}

__device__ inline bool has_row(int32_t route) { return route >= 0 && !(route & EP_DEVICE_ROUTE_AGAIN); }
                               __device__ inline uint32_t rank_of(int32_t route) { return (uint32_t)(route & ~EP_DEVICE_ROUTE_AGAIN) >> 16; }
                               
                               /* Ranks that token t goes to. */
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

    for (uint32_t at = from; at < to; at += 32) {
        const uint32_t mask = at + lane < to ? ranks_of(a, route, at + lane) : 0;

        for (uint32_t r = 0; r < a.ranks; r++) {
            const uint32_t goes = __popc(__ballot_sync(kAll, mask >> r & 1));

            count += lane == r ? goes : 0;
        }
    }
    return count;
}

/* A warp: how many of the first n choices name the same expert, with a row. */
__device__ inline uint32_t count_same(const int32_t *route, uint32_t n, int32_t same)
{
    const uint32_t lane = threadIdx.x % 32, whole = n / 4 * 4;
    uint32_t count = 0;

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
