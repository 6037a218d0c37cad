/*
 * ranks.cuh: the ranks of a group, sets of them, and whether anybody is there to whom an op matters.
 *
 * Kernels for groups of one node, kNet is not set, have at most a rank for each lane of a warp: a set is one word, and all
 * that is written here for any number of ranks comes down to that.  With kNet a set has as many words as the group's ranks
 * need, in memory; a rank of this node has a place there, below EP_DEVICE_NODE_RANKS, and what concerns those alone goes by
 * places: a lane each, and masks of one word.  Of one node's group, places are the ranks.
 *
 * Args: of an LL kernel or an HT one.
 */
#ifndef EP_RANKS_CUH
#define EP_RANKS_CUH

#include "device_net.h"
#include "ptx.cuh"

#ifndef EP_LL_NET
#define EP_LL_NET 0
#endif

namespace ep {

constexpr bool kNet = EP_LL_NET != 0;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kNobody = 0xffffffffu; /* no rank */

/* Executor server: the server that runs the op is gone, says the worker (window.h), who waits for it no more.  As long as the
 * kernel runs, MPS may take no new process on. */
template <class Args> __device__ inline bool is_forsaken(const Args &a)
{
    return load_u32(&((const struct ep_control *)a.own)->gpu.mailbox.closed) != 0;
}

/* ---- sets ------------------------------------------------------------------------------- */

constexpr uint32_t kMostRanks = kNet ? EP_DEVICE_MAX_RANKS : EP_DEVICE_NODE_RANKS;
constexpr uint32_t kRankWords = kMostRanks / 32;

__device__ inline uint32_t word_of(uint32_t rank) { return kNet ? rank / 32 : 0; }
__device__ inline uint32_t bit_of(uint32_t rank) { return 1u << (kNet ? rank % 32 : rank); }
template <class Args> __device__ inline uint32_t words_of(const Args &a) { return kNet ? (a.ranks + 31) / 32 : 1; }
/* Of a set with all ranks. */
template <class Args> __device__ inline uint32_t all_of(const Args &a, uint32_t word)
{
    return kAll >> (32 - (kNet ? min(a.ranks - word * 32, 32u) : a.ranks));
}

__device__ inline bool has(const uint32_t *set, uint32_t rank) { return set[word_of(rank)] & bit_of(rank); }
/* Of one that others change. */
__device__ inline bool has_now(const uint32_t *set, uint32_t rank) { return load_u32(&set[word_of(rank)]) & bit_of(rank); }
__device__ inline void add(uint32_t *set, uint32_t rank) { atomicOr(&set[word_of(rank)], bit_of(rank)); }

template <class Args> __device__ inline bool anybody(const Args &a, const uint32_t *set)
{
    uint32_t all = 0;

    for (uint32_t w = 0; w < words_of(a); w++)
        all |= set[w];
    return all != 0;
}

/* A warp, each lane some of the ranks: fn(rank). */
template <class Args, class Fn> __device__ inline void each_rank(const Args &a, Fn fn)
{
    const uint32_t lane = threadIdx.x % 32;

    if constexpr (kNet) {
#pragma unroll 1
        for (uint32_t r = lane; r < a.ranks; r += 32)
            fn(r);
    } else if (lane < a.ranks) {
        fn(lane);
    }
}

/* A warp: words of a set, fn(word, its ranks that are in). */
template <class Args, class In, class Fn> __device__ inline void each_word(const Args &a, In in, Fn fn)
{
    const uint32_t lane = threadIdx.x % 32;

    if constexpr (kNet) {
#pragma unroll 1
        for (uint32_t w = 0; w < words_of(a); w++) {
            const uint32_t r = w * 32 + lane;

            fn(w, __ballot_sync(kAll, r < a.ranks && in(r)));
        }
    } else {
        fn(0u, __ballot_sync(kAll, lane < a.ranks && in(lane)));
    }
}

/* A warp: the set becomes the ranks that are in(rank). */
template <class Args, class In> __device__ inline void collect(const Args &a, uint32_t *set, In in)
{
    each_word(a, in, [&](uint32_t w, uint32_t ranks) {
        if (threadIdx.x % 32 == 0)
            set[w] = ranks;
    });
    __syncwarp();
}

/* A warp: keep(r, what n(r) of the ranks below r adds up to).  Returns the sum of all. */
template <class Args, class N, class Keep> __device__ inline uint32_t add_ranks_up(const Args &a, N n, Keep keep)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t sum = 0;

#pragma unroll 1
    for (uint32_t base = 0; base < a.ranks; base += 32) {
        const uint32_t r = base + lane, own = r < a.ranks ? n(r) : 0;
        uint32_t upto = own;

        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(kAll, upto, step);

            upto += lane >= step ? other : 0;
        }
        if (r < a.ranks)
            keep(r, sum + upto - own);
        sum += __shfl_sync(kAll, upto, 31);
    }
    return sum;
}

/* What a kernel writes of a record: no rank but the first word's is in the rest. */
constexpr uint32_t kRecordBytes = kNet ? sizeof(struct ep_device_record) : 128;

/* A warp: fn(i) for n words; without a loop where n is a lane's. */
template <uint32_t n, class Fn> __device__ inline void each_of_words(Fn fn)
{
    static_assert(n % 32 == 0, "as many for each lane");
#pragma unroll
    for (uint32_t i = 0; i < n / 32; i++)
        fn(i * 32 + threadIdx.x % 32);
}

/* A warp: a record that nobody has filled in; and to where it is read.  Both: all of it that is ever read. */
__device__ inline void clear_record(struct ep_device_record *r)
{
    each_of_words<sizeof *r / 4>([&](uint32_t i) { ((uint32_t *)r)[i] = 0; });
    __syncwarp();
}
__device__ inline void copy_record(struct ep_device_record *to, const struct ep_device_record &r)
{
    each_of_words<kRecordBytes / 4>([&](uint32_t i) { ((uint32_t *)to)[i] = ((const uint32_t *)&r)[i]; });
}

/* ---- of this node -------------------------------------------------------------------------- */

#if EP_LL_NET

template <class Args> __device__ inline struct ep_device_net *net_of(const Args &a)
{
    return (struct ep_device_net *)a.state->net;
}
template <class Args> __device__ inline bool is_far(const Args &a, uint32_t rank) { return has(net_of(a)->far, rank); }
template <class Args> __device__ inline uint32_t nears_of(const Args &a) { return net_of(a)->nears; }
template <class Args> __device__ inline uint32_t near_at(const Args &a, uint32_t place) { return net_of(a)->near[place]; }
template <class Args> __device__ inline uint32_t place_at(const Args &a, uint32_t rank) { return net_of(a)->place[rank]; }
template <class Args> __device__ inline uint8_t *window_of(const Args &a, uint32_t rank)
{
    return (uint8_t *)net_of(a)->windows[rank];
}

#else

template <class Args> __device__ inline constexpr bool is_far(const Args &, uint32_t) { return false; }
template <class Args> __device__ inline uint32_t nears_of(const Args &a) { return a.ranks; }
template <class Args> __device__ inline uint32_t near_at(const Args &, uint32_t place) { return place; }
template <class Args> __device__ inline uint32_t place_at(const Args &, uint32_t rank) { return rank; }
template <class Args> __device__ inline uint8_t *window_of(const Args &a, uint32_t rank) { return a.window[rank]; }

#endif

/* A warp, a lane for each place here: fn(its rank). */
template <class Args, class Fn> __device__ inline void each_near(const Args &a, Fn fn)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane < nears_of(a))
        fn(near_at(a, lane));
}
/* A warp: mask of the places of those here that are in(rank). */
template <class Args, class In> __device__ inline uint32_t nears_that(const Args &a, In in)
{
    const uint32_t lane = threadIdx.x % 32;

    return __ballot_sync(kAll, lane < nears_of(a) && in(near_at(a, lane)));
}

} // namespace ep

#endif
