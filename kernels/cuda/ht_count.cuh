/*
 * ht_count.cuh: where the tokens of a batch go, and which of its rank's and its expert's rows each is.
 *
 * The batch is cut into lists of tokens, a warp's work each.  First all lists are counted, then each column of the
 * counts is added up over the lists, then each list is gone through again with what the lists before it hold.  A warp
 * counts in shared memory.
 */
#ifndef EP_HT_COUNT_CUH
#define EP_HT_COUNT_CUH

#include "ht_device.cuh"

namespace ep {
namespace ht {

/* A warp's counters, one for each column, and the routes of 32 tokens. */
struct Counting {
    uint32_t *column;
    int32_t *route;
};

__device__ inline uint32_t columns_of(const ep_ht_args &a)
{
    return ep_ht_columns(a.ranks, a.local_experts) - (kNet ? 0 : a.ranks);
}
__device__ inline uint32_t expert_column(const ep_ht_args &a, uint32_t r, uint32_t l)
{
    return a.ranks + r * a.local_experts + l;
}
__device__ inline uint32_t choice_column(const ep_ht_args &a, uint32_t r)
{
    return a.ranks + a.ranks * a.local_experts + r;
}
__device__ inline uint32_t gate_column(const ep_ht_args &a, uint32_t gate) { return choice_column(a, a.ranks + gate); }

/* Tokens of a list.  Of many ranks, where numbers are given token by token, lists are short. */
__device__ inline uint32_t list_length(const ep_ht_args &a)
{
    constexpr uint32_t unit = kNet ? 8 : 32;

    return max(((a.tokens + EP_HT_LISTS - 1) / EP_HT_LISTS + unit - 1) / unit * unit, unit);
}
__device__ inline uint32_t lists_of(const ep_ht_args &a) { return (a.tokens + list_length(a) - 1) / list_length(a); }

__device__ inline Counting counting_of(const ep_ht_args &a, uint32_t *shared)
{
    const uint32_t words = columns_of(a) + 32 * EP_MAX_TOP_K;
    uint32_t *mine = shared + threadIdx.x / 32 * words;

    return { mine, (int32_t *)(mine + columns_of(a)) };
}

/* Blocks from this one on number rows: block 0 has no time for it, unless it is alone. */
__device__ inline uint32_t first_numbering(const ep_ht_args &a) { return a.blocks > 1 ? 1 : 0; }

/* fn(list) by warps of blocks [first, a.blocks), as many of each as have counters. */
template <class Fn> __device__ inline void each_list(const ep_ht_args &a, uint32_t first, Fn fn)
{
    const uint32_t warp = threadIdx.x / 32, counting = a.counting_warps;

    if (warp >= counting || blockIdx.x < first)
        return;
#pragma unroll 1
    for (uint32_t list = warp * (a.blocks - first) + blockIdx.x - first; list < lists_of(a);
         list += (a.blocks - first) * counting)
        fn(list);
}

/* ---- counting ---------------------------------------------------------------------------- */

__device__ inline int64_t choice_at(const ep_ht_args &a, uint32_t i)
{
    return a.index_bytes == 4 ? ((const int32_t *)a.topk)[i] : ((const int64_t *)a.topk)[i];
}

/* Routes of a fresh batch's choices, and that some name the expert of an earlier one of their token. */
__device__ inline void route_token(const ep_ht_args &a, uint32_t t, const int64_t *chosen, int32_t *route)
{
#pragma unroll
    for (uint32_t k = 0; k < EP_MAX_TOP_K; k++) {
        if (k >= a.top_k)
            break;
        route[k] = route_of(a, chosen[k], t * a.top_k + k);
#pragma unroll
        for (uint32_t j = 0; j < k; j++)
            if (route[k] >= 0 && (route[j] & ~EP_DEVICE_ROUTE_AGAIN) == (route[k] & ~EP_DEVICE_ROUTE_AGAIN))
                route[k] |= EP_DEVICE_ROUTE_AGAIN;
    }
}

/* The choices of token t, a lane's, to route[] and the handle; counts those that name nothing.  All is asked for before
 * any of it is used. */
__device__ inline uint32_t read_token(const ep_ht_args &a, uint32_t t, int32_t *route)
{
    int64_t chosen[EP_MAX_TOP_K];
    float weight[EP_MAX_TOP_K];
    uint32_t bad = 0;

#pragma unroll
    for (uint32_t k = 0; k < EP_MAX_TOP_K; k++) {
        route[k] = k < a.top_k && a.cached ? a.routing[t * a.top_k + k] : -1;
        chosen[k] = k < a.top_k && !a.cached ? choice_at(a, t * a.top_k + k) : -1;
        weight[k] = k < a.top_k && !a.cached && a.topk_weights ? a.topk_weights[t * a.top_k + k] : 1.0f;
    }
    if (!a.cached)
        route_token(a, t, chosen, route);
#pragma unroll
    for (uint32_t k = 0; k < EP_MAX_TOP_K; k++) {
        bad += route[k] == kBadRoute;
        if (k >= a.top_k || a.cached)
            continue;
        a.routing[t * a.top_k + k] = route[k];
        a.weights[t * a.top_k + k] = weight[k];
    }
    return bad;
}

/* Is it the first time that the k-th of these is named? */
__device__ inline bool is_first(const uint32_t *named, uint32_t k)
{
    bool first = named[k] != kNobody;

#pragma unroll
    for (uint32_t j = 0; j < k; j++)
        first &= named[j] != named[k];
    return first;
}

__device__ inline void count_token(const ep_ht_args &a, const int32_t *route, uint32_t *column)
{
    uint32_t rank[EP_MAX_TOP_K], gate[EP_MAX_TOP_K];

#pragma unroll
    for (uint32_t k = 0; k < EP_MAX_TOP_K; k++) {
        const uint32_t r = route[k] < 0 ? kNobody : rank_of(route[k]);

        rank[k] = r;
        gate[k] = r != kNobody && is_far(a, r) ? gate_of(a, r) : kNobody;
        if (r == kNobody)
            continue;
        if (is_first(rank, k))
            atomicAdd(&column[r], 1);
        atomicAdd(&column[choice_column(a, r)], 1);
        if (has_row(route[k]))
            atomicAdd(&column[expert_column(a, r, route[k] & 0xffff)], 1);
        if (kNet && is_first(gate, k))
            atomicAdd(&column[gate_column(a, gate[k])], 1);
    }
}

__device__ inline void count_list(const ep_ht_args &a, const Counting &c, uint32_t list)
{
    const uint32_t lane = threadIdx.x % 32, columns = columns_of(a), length = list_length(a);
    const uint32_t end = min((list + 1) * length, a.tokens);
    uint32_t bad = 0;

    for (uint32_t i = lane; i < columns; i += 32)
        c.column[i] = 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t t = list * length + lane; t < end; t += 32) {
        int32_t route[EP_MAX_TOP_K];

        bad += read_token(a, t, route);
        count_token(a, route, c.column);
    }
    __syncwarp();
    for (uint32_t i = lane; i < columns; i += 32) {
        a.before[list * columns + i] = c.column[i];
        if (c.column[i])
            atomicAdd(&a.totals[i], c.column[i]); /* 0 between ops: clear_totals */
    }
    bad = __reduce_add_sync(kAll, bad);
    if (lane == 0 && bad)
        atomicAdd((unsigned long long *)&run_of(a).dropped, (unsigned long long)bad);
    __syncwarp();
}

/* ---- adding up ------------------------------------------------------------------------------ */

/* A warp: what earlier lists hold, instead of what each does. */
__device__ inline void add_up(const ep_ht_args &a, uint32_t column)
{
    const uint32_t lane = threadIdx.x % 32, lists = lists_of(a), columns = columns_of(a);
    uint32_t *counts = a.before + column, sum = 0;

#pragma unroll 1
    for (uint32_t base = 0; base < lists; base += 32) {
        const uint32_t own = base + lane < lists ? __ldcg(counts + (base + lane) * columns) : 0;
        uint32_t upto = own;

        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(kAll, upto, step);

            upto += lane >= step ? other : 0;
        }
        if (base + lane < lists)
            counts[(base + lane) * columns] = sum + upto - own;
        sum += __shfl_sync(kAll, upto, 31);
    }
}

/* By blocks [first, a.blocks). */
__device__ inline void add_all_up(const ep_ht_args &a, uint32_t first)
{
    const uint32_t blocks = a.blocks - first;

    if (blockIdx.x < first)
        return;
    for (uint32_t column = threadIdx.x / 32 * blocks + blockIdx.x - first; column < columns_of(a);
         column += blocks * kWarps)
        add_up(a, column);
}

/* One block, when the op is over. */
__device__ inline void clear_totals(const ep_ht_args &a)
{
    for (uint32_t column = threadIdx.x; column < columns_of(a); column += kThreads)
        a.totals[column] = 0;
}

/* ---- slots and indexes -------------------------------------------------------------------------- */

/* 32 tokens from t0 on, their routes in c.route: slots, which go by tokens; of few ranks. */
__device__ inline void give_slots(const ep_ht_args &a, const Counting &c, uint32_t t0, uint32_t n)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t mask = 0;

    for (uint32_t k = 0; lane < n && k < a.top_k; k++) {
        const int32_t r = c.route[lane * a.top_k + k];

        mask |= r >= 0 ? 1u << rank_of(r) : 0;
    }
#pragma unroll 1
    for (uint32_t r = 0; r < a.ranks; r++) {
        const uint32_t going = __ballot_sync(kAll, mask >> r & 1);
        const uint32_t slot = c.column[r] + __popc(going & ((1u << lane) - 1));

        if (mask >> r & 1)
            for (uint32_t k = 0; k < a.top_k; k++) {
                const int32_t route = c.route[lane * a.top_k + k];

                if (route >= 0 && rank_of(route) == r)
                    a.slots[(t0 + lane) * a.top_k + k] = slot;
            }
        __syncwarp();
        if (lane == 0)
            c.column[r] += __popc(going);
    }
    __syncwarp();
}

/* A warp: the next number of each column that lanes name, the same to all that name it; kNobody: none. */
__device__ inline uint32_t next_of(const Counting &c, uint32_t column)
{
    const uint32_t lane = threadIdx.x % 32, same = __match_any_sync(kAll, column);
    const uint32_t next = column == kNobody ? 0 : c.column[column];

    __syncwarp();
    if (column != kNobody && lane == (uint32_t)__ffs(same) - 1)
        c.column[column] = next + 1;
    __syncwarp();
    return next;
}

#if EP_LL_NET
/* The same of any number of ranks, token by token; and of those on other nodes, which of all that go to their nodes the
 * tokens are, into a table like slots'. */
__device__ inline void give_far_slots(const ep_ht_args &a, const Counting &c, uint32_t t0, uint32_t n)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t *slots = node_slots(a, a.handle);

#pragma unroll 1
    for (uint32_t i = 0; i < n; i++) {
        const int32_t route = lane < a.top_k ? c.route[i * a.top_k + lane] : -1;
        const uint32_t rank = route < 0 ? kNobody : rank_of(route), at = (t0 + i) * a.top_k + lane;
        const bool far = rank != kNobody && is_far(a, rank);
        const uint32_t slot = next_of(c, rank), node_slot = next_of(c, far ? gate_column(a, gate_of(a, rank)) : kNobody);

        if (rank != kNobody)
            a.slots[at] = slot;
        if (far)
            slots[at] = node_slot;
    }
}
#else
__device__ inline void give_far_slots(const ep_ht_args &, const Counting &, uint32_t, uint32_t) {}
#endif

/* Indexes among the rows of an expert go by tokens too; experts of one token differ. */
__device__ inline void give_indexes(const ep_ht_args &a, const Counting &c, uint32_t t0, uint32_t n)
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll 1
    for (uint32_t i = 0; i < n; i++) {
        const int32_t r = lane < a.top_k ? c.route[i * a.top_k + lane] : -1;

        if (has_row(r))
            a.index[(t0 + i) * a.top_k + lane] = c.column[expert_column(a, rank_of(r), r & 0xffff)]++;
        __syncwarp();
    }
}

__device__ inline void place_list(const ep_ht_args &a, const Counting &c, uint32_t list)
{
    const uint32_t lane = threadIdx.x % 32, length = list_length(a), end = min((list + 1) * length, a.tokens);
    const uint32_t columns = columns_of(a);

#pragma unroll 8
    for (uint32_t i = lane; i < columns; i += 32)
        c.column[i] = __ldcg(a.before + list * columns + i);
#pragma unroll 1
    for (uint32_t t0 = list * length; t0 < end; t0 += 32) {
        const uint32_t n = min(end - t0, 32u);

        __syncwarp();
        for (uint32_t i = lane; i < n * a.top_k; i += 32)
            c.route[i] = __ldcg(a.routing + t0 * a.top_k + i);
        __syncwarp();
        if (kNet)
            give_far_slots(a, c, t0, n);
        else
            give_slots(a, c, t0, n);
        give_indexes(a, c, t0, n);
    }
    __syncwarp();
}

} // namespace ht
} // namespace ep

#endif
