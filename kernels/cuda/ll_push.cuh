/* ll_push.cuh: the sending half of a dispatch: rows, their headers and the counts, to each rank once. */
#ifndef EP_LL_PUSH_CUH
#define EP_LL_PUSH_CUH

#include "ll_route.cuh"

namespace ep {

/* ---- rows ----------------------------------------------------------------------------- */

/* A thread's part of a row.  Piece i of a pass is kThreads * (kPieces * pass + i) + threadIdx.x. */
template <Cast C> struct Row {
    Vec v[kVecs]; /* as they are loaded; after quantise() the first kPieces are what travels */
};

template <Cast C> __device__ inline uint32_t piece_of(uint32_t pass, uint32_t i)
{
    return (pass * kPieces<C> + i) * kThreads + threadIdx.x;
}

/* A pass of token t is asked for, and not waited for. */
template <Cast C> __device__ void load_token(const ep_ll_args &a, uint32_t t, uint32_t pass, Row<C> *row)
{
    const uint32_t pieces = a.row_bytes / 16;
    const uint8_t *x = a.x + (uint64_t)t * pieces * kIn<C> * 16;

#pragma unroll
    for (uint32_t i = 0; i < kVecs; i++) {
        const uint32_t p = piece_of<C>(pass, i / kIn<C>);

        if (C != Cast::none)
            row->v[i] = { { 0, 0, 0, 0 } };
        if (p < pieces)
            row->v[i] = load_row(x + ((uint64_t)p * kIn<C> + i % kIn<C>) * 16);
    }
}

/* Scales that a pass has, as they travel. */
__device__ inline uint8_t *scales_of(const Batch &b, uint32_t pass)
{
    return (uint8_t *)(b.scales + pass % 2 * kPassScales);
}

/* With a cast, what was loaded to pieces.  All threads: a block of 128 elements is in 8 of them. */
template <Cast C> __device__ inline void quantise(const ep_ll_args &a, const Batch &b, uint32_t pass, Row<C> *row)
{
    if constexpr (C != Cast::none) {
        uint32_t most = largest<C>(row->v);

        for (uint32_t step = 1; step < 8; step *= 2)
            most = larger<C>(most, __shfl_xor_sync(kAll, most, step));
#pragma unroll
        for (uint32_t i = 0; i < kPieces<C>; i++) {
            const float amax = largest_at<C>(most, i);
            const Scale scale = a.scale_bytes == 1 ? ue8m0_scale(amax) : fp32_scale(amax);

            row->v[i] = encode<C>(row->v + i * kIn<C>, scale);
            if (threadIdx.x % 8 == 0)
                store_scale(a, scales_of(b, pass), (i * kThreads + threadIdx.x) / 8, scale.stored);
        }
    }
}

/* The scales of a pass: together, as each store is a packet on the wire.  Threads from the last one, which have fewer
 * pieces.  What is beyond the row's last scale in 16 bytes is nobody's. */
template <Cast C>
__device__ inline void push_pass_scales(const ep_ll_args &a, const uint8_t *scales, uint32_t pass, uint8_t *to)
{
    constexpr uint32_t most = kPieces<C> * kThreads / 8;
    const uint32_t bytes = min(a.row_scales - pass * most, most) * a.scale_bytes;
    const uint32_t at = (kThreads - 1 - threadIdx.x) * 16;

    static_assert(most <= kPassScales && kPassScales * 4 <= kThreads * 16, "a thread stores 16 bytes of them");
    if (at < bytes)
        store_row(to + pass * most * a.scale_bytes + at, *(const Vec *)(scales + at));
}

template <Cast C>
__device__ void push_pieces(const ep_ll_args &a, const Op &op, const Batch &b, const Row<C> &row, uint32_t pass,
                            uint32_t d)
{
    const uint32_t pieces = a.row_bytes / 16;
    uint8_t *to = row_at(a, op, a.rank, d, b.slot[d]);

#pragma unroll
    for (uint32_t i = 0; i < kPieces<C>; i++) {
        const uint32_t p = piece_of<C>(pass, i);

        if (p < pieces)
            store_row(to + (uint64_t)p * 16, row.v[i]);
    }
    if constexpr (C != Cast::none)
        push_pass_scales<C>(a, scales_of(b, pass), pass, scales_at(a, op, a.rank, d, b.slot[d]));
}

/* ---- sending ---------------------------------------------------------------------------- */

/* Weight of choice threadIdx.x of token t. */
__device__ inline float load_weight(const ep_ll_args &a, uint32_t t)
{
    const float *weights = a.cached ? a.weights : a.topk_weights;

    return weights && threadIdx.x < a.top_k ? weights[t * a.top_k + threadIdx.x] : 1.0f;
}

/* Warp 0: the ranks that token t goes to, of members that were not missed; lane k has choice k. */
__device__ inline void list_ranks(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t t)
{
    const uint32_t lane = threadIdx.x;
    const int32_t r = lane < a.top_k ? b.route[t * a.top_k + lane] : -1;
    const uint32_t rank = r < 0 ? kNobody : rank_of(r), same = __match_any_sync(kAll, rank);
    const bool goes = rank != kNobody && lane == (uint32_t)__ffs(same) - 1 && has(op.members, rank) && !has(op.missed, rank);
    const uint32_t all = __ballot_sync(kAll, goes);

    if (goes)
        b.to[__popc(all & ((1u << lane) - 1))] = rank;
    if (lane == 0)
        *b.n = __popc(all);
}

/* Slots and indexes of token t, and where there is no mask of them the ranks that it goes to; *counted: tokens that this
 * block has counted, lane r of warp 0 has the sum, or b.slot itself. */
__device__ inline void place_token(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t t, uint32_t to,
                                   uint32_t *counted, uint32_t *sum)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp == 0 && kNet) {
        count_all(a, b.route, *counted, t, b.slot);
        *counted = t;
        list_ranks(a, op, b, t);
    } else if (warp == 0) {
        *sum += count_tokens(a, b.route, *counted, t);
        *counted = t;
        b.slot[lane] = *sum;
        if (to >> lane & 1)
            b.to[__popc(to & ((1u << lane) - 1))] = lane;
    }
    for (uint32_t k = kWarps - 1 - warp; k < a.top_k; k += kWarps) { /* warp 0 has done some work already */
        const int32_t r = b.route[t * a.top_k + k];
        const uint32_t index = r < 0 ? 0 : count_same(b.route, t * a.top_k, r & ~EP_DEVICE_ROUTE_AGAIN);

        if (lane == 0)
            b.index[k] = index;
    }
}

/* For the combine, where ranks are on other nodes; the clerk has the least to do with headers. */
__device__ inline void keep_slots(const ep_ll_args &a, const Batch &b, uint32_t t)
{
    const uint32_t k = threadIdx.x - kMovers;

    if (!is_clerk() || k >= a.top_k)
        return;
    const uint32_t i = t * a.top_k + k;

    if (b.route[i] >= 0)
        keep_slot(a, i, b.slot[rank_of(b.route[i])]);
}

/* The headers of token t for the ranks in `to`, after the rows: a thread per 16 bytes. */
__device__ inline void push_headers(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t t, uint32_t to)
{
    const uint32_t parts = a.max_top_k + 1, all = (kNet ? *b.n : __popc(to)) * parts;

    /* Release; partner: take_header, find_term.  Warp 0's is newcomers()' as well. */
    if (threadIdx.x < 32)
        fence_total();
    else if (threadIdx.x < all)
        fence_sys();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all; i += kThreads) {
        const uint32_t d = b.to[i / parts], part = i % parts, k = part - 1;
        uint8_t *header = header_at(a, op, a.rank, d, b.slot[d]);
        Vec v = { { 0, 0, 0, op.wire } };

        if (part == 0) {
            v.w[0] = t;
#pragma unroll 1
            for (uint32_t j = 0; j < a.top_k; j++) {
                const int32_t r = b.route[t * a.top_k + j];

                v.w[1] += r >= 0 && rank_of(r) == d;
            }
        } else {
            const int32_t r = k < a.top_k ? b.route[t * a.top_k + k] : -1;
            const bool here = r >= 0 && rank_of(r) == d;

            v.w[0] = here ? (uint32_t)r & 0xffff : kAll;
            if (here) {
                v.w[1] = __float_as_uint(b.weight[k]);
                v.w[2] = b.index[k];
            }
        }
        store_vec(header + part * 16u, v);
    }
}

/* fp8 that came with scales. */
__device__ inline void push_scales(const ep_ll_args &a, const Op &op, uint32_t t, uint32_t d, uint32_t slot)
{
    uint8_t *to = scales_at(a, op, a.rank, d, slot);
    const uint8_t *from = a.x_scales + (uint64_t)t * a.row_scales * a.scale_bytes;

    for (uint32_t i = threadIdx.x; i < a.row_scales; i += kThreads)
        store_scale(a, to, i, load_scale(a, from, i));
}

/* fn(d) for the ranks in `to`, the next rank first, or for those that are listed. */
template <class Fn> __device__ inline void each_target(const ep_ll_args &a, const Batch &b, uint32_t to, Fn fn)
{
    if constexpr (kNet) {
#pragma unroll 1
        for (uint32_t i = 0; i < *b.n; i++)
            fn(b.to[i]);
    } else {
#pragma unroll 1
        for (uint32_t i = 1; i <= a.ranks; i++) {
            const uint32_t d = a.rank + i < a.ranks ? a.rank + i : a.rank + i - a.ranks;

            if (to >> d & 1)
                fn(d);
        }
    }
}

/*
 * The row of token t to the ranks in `to`, the next rank first so that not all push to the same one.  Slots are being
 * found by some warps while others come here already.  fetched: the first pass is in `row`.
 */
template <Cast C>
__device__ void push_row(const ep_ll_args &a, const Op &op, const Batch &b, Row<C> &row, bool fetched, uint32_t t,
                         uint32_t to)
{
    const uint32_t at_once = kPieces<C> * kThreads, passes = (a.row_bytes / 16 + at_once - 1) / at_once;

#pragma unroll 1
    for (uint32_t pass = 0; pass < passes; pass++) {
        if (pass > 0 || !fetched)
            load_token<C>(a, t, pass, &row);
        quantise<C>(a, b, pass, &row);
        if (pass == 0 || C != Cast::none)
            __syncthreads(); /* slots; scales */
        each_target(a, b, to, [&](uint32_t d) {
            push_pieces<C>(a, op, b, row, pass, d);
            if (C == Cast::none && a.row_scales && pass == 0)
                push_scales(a, op, t, d, b.slot[d]);
        });
    }
}

/* Whom send() sends to, of members: a mask; where there can be many, all of them. */
__device__ inline bool is_sent_to(uint32_t ranks, uint32_t d) { return kNet || ranks >> d & 1; }

/* Does rank d, which takes part from `from` on, owe us no credit for number n?  That it takes part no more does
 * not say so: it may be we who were left out, and d reads what we sent. */
__device__ inline bool has_credit(const ep_ll_args &a, uint64_t n, uint64_t from, uint64_t credit)
{
    return n <= a.banks || (from > n - a.banks && from <= n) || credit >= n - a.banks;
}

/*
 * Warp 0 waits until each of those that owe a credit, and are sent to, takes number n in its bank.  An eighth of the op's
 * time is left then: all whom this rank can send to, its own other blocks too, still get their rows in time, and blame the
 * rank that was late and no other.  A rank on another node that has released number n went on without us: it does not take
 * our rows, and may have no op for long in which it could say that earlier ones have come.
 */
__device__ inline void wait_credit(const ep_ll_args &a, Op *op, uint32_t ranks)
{
    each_rank(a, [&](uint32_t d) {
        if (!has(op->lacking, d) || !is_sent_to(ranks, d))
            return;
        const bool far = is_far(a, d);
        const uint64_t *credit = credit_at(a, a.rank, d, bank_of(a, op->number)), *from = &a.state->from[d];
        const Wait end = wait_for(
            a, *op, d,
            [&] {
                if (far)
                    return has_room(a, op->number, bank_of(a, op->number), d);
                return has_credit(a, op->number, load_u64(from), acquire_u64(credit)); /* partner: give_credit */
            },
            [&] { return looks_back(a, d, far) || (far && has_released(a, *op, d)); }, op->timeout_ns / 8);

        if (end != Wait::there)
            miss(a, op, d, end, EP_WAIT_CREDIT);
    });
    __syncwarp();
}

/* What this rank sends to rank d in all.  The numbers come with it, so nothing has to be fenced. */
__device__ inline void push_counts(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t *count, uint32_t d)
{
    uint8_t *to = counts_at(a, op, a.rank, d);
    __shared__ uint32_t tokens;

#pragma unroll 1
    for (uint32_t l = threadIdx.x; l < a.local_experts; l += kThreads)
        count[l] = 0;
    if (threadIdx.x == 0)
        tokens = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.tokens * a.top_k; i += kThreads)
        if (has_row(b.route[i]) && rank_of(b.route[i]) == d)
            atomicAdd(&count[b.route[i] & 0xffff], 1);
#pragma unroll 1
    for (uint32_t t = threadIdx.x; t < a.tokens; t += kThreads)
        if (goes_to(a, b.route, t, d))
            atomicAdd(&tokens, 1);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.counts_bytes / sizeof(Vec); i += kThreads) {
        Vec v = { { 0, 0, 0, op.wire } };

        for (uint32_t j = 0; j < kCountsInVec; j++) {
            const uint32_t value = i * kCountsInVec + j;

            if (value <= a.local_experts)
                v.w[j] = value == 0 ? tokens : count[value - 1];
        }
        store_vec(to + i * sizeof(Vec), v); /* partner: take_counts */
    }
    if (threadIdx.x == 0 && d != a.rank)
        atomicAdd((unsigned long long *)&a.state->scratch.wire_bytes,
                  (unsigned long long)tokens * (a.row_bytes + a.row_scales * a.scale_bytes));
    __syncthreads();
}

/* The routing to the handle, for its combine and for cached dispatches; and what goes to nobody.  joined, a mask: it has been kept,
 * and what goes to these was taken for what goes to nobody. */
__device__ inline void keep_routing(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t joined)
{
    int32_t dropped = 0;

#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.tokens * a.top_k; i += kThreads) {
        const int32_t r = b.route[i];

        if (joined)
            dropped -= r >= 0 && joined >> rank_of(r) & 1;
        else
            dropped += r == kBadRoute || (r >= 0 && !has(op.members, rank_of(r)));
        if (!a.cached) {
            a.routing[i] = r;
            a.weights[i] = a.topk_weights ? a.topk_weights[i] : 1.0f;
        }
    }
    dropped = __reduce_add_sync(kAll, dropped);
    if (threadIdx.x % 32 == 0 && dropped)
        atomicAdd((unsigned long long *)&a.state->scratch.dropped, (unsigned long long)dropped);
}

/* This block's part of the sending, once it is fetched. */
template <Cast C> struct Part {
    uint32_t t0;      /* its first token; not below a.tokens: none */
    bool counts;      /* it makes counts for some rank */
    float weight;
    Row<C> row;       /* the first pieces of t0's */
};

/* Tokens are counted from the last block, after those that make counts. */
template <Cast C> __device__ void fetch(const ep_ll_args &a, const Batch &b, Part<C> *part)
{
    const uint32_t blocks = a.blocks, from_end = blocks - 1 - blockIdx.x;
    uint32_t tokens = 0; /* whose routes it has to know */

    part->counts = from_end < a.ranks;
    part->t0 = (from_end + blocks - a.ranks % blocks) % blocks;
    if (part->t0 < a.tokens) {
        load_token<C>(a, part->t0, 0, &part->row);
        part->weight = load_weight(a, part->t0);
        tokens = part->t0 + (a.tokens - 1 - part->t0) / blocks * blocks + 1;
    }
    if (part->counts)
        tokens = a.tokens;
    if (tokens)
        read_routes(a, b.route, tokens * a.top_k);
}

/* To the ranks in `ranks` (is_sent_to).  Returns whether warp 0 has fenced after the last row. */
template <Cast C>
__device__ bool send(const ep_ll_args &a, Op *op, const Batch &b, Part<C> &part, uint32_t *count, uint32_t ranks)
{
    const uint32_t blocks = a.blocks, from_end = blocks - 1 - blockIdx.x;
    uint32_t counted = 0, sum = 0;

    if (!part.counts && part.t0 >= a.tokens)
        return false;
    if (kNet ? anybody(a, op->lacking) : op->lacking[0] & ranks) {
        if (threadIdx.x < 32)
            wait_credit(a, op, ranks);
        __syncthreads();
    }
#pragma unroll 1
    for (uint32_t d = from_end; d < a.ranks; d += blocks)
        if (is_sent_to(ranks, d) && has(op->members, d) && !has(op->missed, d))
            push_counts(a, *op, b, count, d);
    if (from_end == 0)
        keep_routing(a, *op, b, kNet || ranks == op->members[0] ? 0 : ranks);
    if (kNet) {
        for (uint32_t r = threadIdx.x; r < a.ranks; r += kThreads)
            b.slot[r] = 0;
        __syncthreads();
    }
#pragma unroll 1
    for (uint32_t t = part.t0; t < a.tokens; t += blocks) {
        const uint32_t to = kNet ? 0 : ranks_of(a, b.route, t) & ranks & ~op->missed[0];

        place_token(a, *op, b, t, to, &counted, &sum);
        if (t != part.t0)
            part.weight = load_weight(a, t);
        if (threadIdx.x < a.top_k)
            b.weight[threadIdx.x] = part.weight;
        push_row<C>(a, *op, b, part.row, t == part.t0, t, to);
        __syncthreads();
        push_headers(a, *op, b, t, to);
        if (kNet)
            keep_slots(a, b, t);
        __syncthreads();
    }
    return part.t0 < a.tokens;
}

/* ---- ranks on other nodes --------------------------------------------------------------- */

/* One thread: all that the blocks have pushed for rank d.  Without its counts there is nothing to be found in it. */
__device__ inline void put_dispatch(const ep_ll_args &a, const Op &op, uint32_t d)
{
    const Vec counts = load_vec(counts_at(a, op, a.rank, d));

    if (counts.w[3] == op.wire)
        put_box(a, bank_of(a, op.number), a.rank, d, min(counts.w[0], a.max_tokens), EP_NET_SENT, op.number);
}

/* Warp 0, when its block has pushed; the last block's puts. */
__device__ inline void put_rows(const ep_ll_args &a, const Op &op)
{
    uint32_t before = 0;

    if (threadIdx.x == 0) {
        fence_sys(); /* of all rows that the barrier before has seen; partner: whoever reads what is put */
        before = count_acq_rel(&a.state->scratch.pushed);
    }
    if (__shfl_sync(kAll, before, 0) != a.blocks - 1)
        return;
    fence_sys();
    each_rank(a, [&](uint32_t d) {
        if (has(op.members, d) && !has(op.missed, d) && is_far(a, d))
            put_dispatch(a, op, d);
    });
    __syncwarp();
}

} // namespace ep

#endif
