/*
 * HT combine: each rank sums a token's rows over its own experts in fp32, rounds once and pushes the partial to the
 * token's source; the source sums partials in the order of ranks as they land.  ht_device.cuh has the protocol.
 *
 * Some warps of each block push and the others sum; who has pushed all of his sums too.
 */
#ifndef EP_HT_COMBINE_CUH
#define EP_HT_COMBINE_CUH

#include "ht_device.cuh"

namespace ep {
namespace ht {
namespace combine {

using ep::combine::Format;

constexpr uint32_t kPushers = 1056, kPackedPushers = 1584; /* warps; of packed rows several make one partial */
constexpr uint32_t kNowhere = 0xffffffffu;

/* ---- sums ------------------------------------------------------------------------------------ */

/* The terms of a sum, a warp's: lanes of the mask have one each, the lowest lane's comes first. */
struct Terms {
    uint32_t mask;
    const uint8_t *row;
    float weight;
};

/* Vecs at + i * 32 of a lane: the first kTerms of `mask` are fetched, then added in their order.  Returns the rest. */
template <class T, uint32_t kUnder, uint32_t kTerms>
__device__ inline uint32_t add_terms(const Terms &terms, uint32_t mask, uint32_t at, uint32_t pieces,
                                     float (*sum)[Format<T>::n])
{
    Vec v[kTerms][kUnder];
    float weight[kTerms];
    const uint32_t n = __popc(mask);

#pragma unroll
    for (uint32_t k = 0; k < kTerms; k++) {
        const uint32_t from = mask ? __ffs(mask) - 1 : 0;
        const uint8_t *row = (const uint8_t *)__shfl_sync(kAll, (uint64_t)terms.row, from);

        weight[k] = __shfl_sync(kAll, terms.weight, from);
        mask &= mask - 1;
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++)
            if (k < n && at + i * 32 < pieces)
                v[k][i] = load_row(row + (uint64_t)(at + i * 32) * 16);
    }
#pragma unroll
    for (uint32_t k = 0; k < kTerms; k++) {
        if (k >= n)
            break;
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++) {
            float x[Format<T>::n];

            Format<T>::decode(v[k][i], x);
            for (uint32_t e = 0; e < Format<T>::n; e++)
                sum[i][e] = fmaf(weight[k], x[e], sum[i][e]);
        }
    }
    return mask;
}

/* A warp: the sum of the terms, and of the bias in the end, to `to`. */
template <class T>
__device__ inline void sum_rows(const Terms &terms, uint32_t pieces, const uint8_t *bias, uint8_t *to)
{
    constexpr uint32_t kElements = Format<T>::n, kUnder = 2, kTerms = 4;
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll 1
    for (uint32_t base = 0; base < pieces; base += kUnder * 32) {
        const uint32_t at = base + lane;
        float sum[kUnder][kElements] = {};

#pragma unroll 1
        for (uint32_t rest = terms.mask; rest;)
            rest = add_terms<T, kUnder, kTerms>(terms, rest, at, pieces, sum);
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++) {
            const uint64_t byte = (uint64_t)(at + i * 32) * 16;

            if (at + i * 32 >= pieces)
                continue;
            if (bias) {
                float x[kElements];

                Format<T>::decode(load_row(bias + byte), x);
                for (uint32_t e = 0; e < kElements; e++)
                    sum[i][e] += x[e];
            }
            store_row(to + byte, Format<T>::encode(sum[i]));
        }
    }
}

/* One term of weight 1 is a copy, bit for bit. */
template <class T>
__device__ inline void sum_or_copy(const Terms &terms, uint32_t pieces, const uint8_t *bias, uint8_t *to)
{
    const uint32_t first = terms.mask ? __ffs(terms.mask) - 1 : 0;
    const float weight = __shfl_sync(kAll, terms.weight, first);
    const uint8_t *row = (const uint8_t *)__shfl_sync(kAll, (uint64_t)terms.row, first);

    if (__popc(terms.mask) == 1 && weight == 1.0f && !bias)
        walk_row(row, pieces, [&](uint32_t at, const Vec *v) { store_pieces(to, at, pieces, v); });
    else
        sum_rows<T>(terms, pieces, bias, to);
}

/* ---- asks ---------------------------------------------------------------------------------------- */

/* Whose partials are asked for; in shared memory. */
struct Asks {
    uint32_t mask;  /* ranks that take theirs */
    uint32_t grads; /* of these, who wants gradients of the weights */
};

__device__ inline uint32_t traits_of(const ep_ht_args &a) { return EP_OP_COMBINE | a.wire_dtype << 8; }

/* Warp 0 of block 0, lane d to rank d. */
__device__ inline void ask_all(const ep_ht_args &a, const Op &op)
{
    const uint32_t lane = threadIdx.x;

    if (op.members >> lane & 1) {
        uint8_t *note = note_at(a, lane, kAsk, a.rank);

        store_vec(note, tagged(traits_of(a), a.topk_grads != nullptr, op.tag));
        store_vec(note + EP_HT_ASK_ROUTING_LOW / 2 * sizeof(Vec),
                  tagged((uint32_t)op.number, (uint32_t)(op.number >> 32), op.tag));
    }
    __syncwarp();
}

/* Warp 0 of each block, lane s from rank s. */
__device__ inline void take_asks(const ep_ht_args &a, const Op &op, Asks *asks)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x;
    bool fits = false;
    Vec traits = { { 0, 0, 0, 0 } }, routing;

    if ((op.members & h.arrived) >> lane & 1 && h.from[lane] > 0
        && take_note(a, op, kAsk, lane, EP_HT_ASK_TRAITS / 2, &traits)
        && take_note(a, op, kAsk, lane, EP_HT_ASK_ROUTING_LOW / 2, &routing)) {
        fits = traits.w[0] == traits_of(a)
               && ((uint64_t)routing.w[1] << 32 | routing.w[0]) == op.number;
        if (!fits) {
            atomicOr(&run_of(a).mismatched, 1u << lane);
            atomicOr(&run_of(a).gone, 1u << lane);
        }
    }
    const uint32_t mask = __ballot_sync(kAll, fits), grads = __ballot_sync(kAll, fits && traits.w[1] != 0);

    if (lane == 0)
        *asks = { mask, grads };
}

/* ---- pushing partials -------------------------------------------------------------------------------- */

/* Gradients of one row's choices; 0 where the choice is not here or none was given. */
__device__ inline void push_grads(const ep_ht_args &a, uint64_t i, uint32_t place, uint32_t s, uint64_t partial)
{
    const uint32_t lane = threadIdx.x % 32;
    float grad = 0;

    if (lane >= a.max_top_k)
        return;

    const uint32_t top_k = a.state->ht_handles[a.handle].top_k;

    if (a.row_grads && a.layout != EP_LAYOUT_PACKED)
        grad = lane < top_k ? a.row_grads[i * top_k + lane] : 0;
    else if (a.row_grads && place != kNowhere)
        grad = a.row_grads[place];
    partial_grads_at(a, s, partial)[lane] = grad;
}

/* Row `slot` of source s. */
template <class T>
__device__ inline void push_partial(const ep_ht_args &a, const Op &op, const Asks &asks, uint32_t s, uint32_t slot)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint64_t i = (uint64_t)h.from_first[s] + slot, partial = (uint64_t)h.back[s] + slot;
    const uint32_t lane = threadIdx.x % 32;
    const bool packed = a.layout == EP_LAYOUT_PACKED;
    uint32_t place = kNowhere;
    float weight = 1.0f;
    Terms terms = { 1, a.x + i * a.row_bytes, 1.0f };

    if (packed) {
        if (lane < a.max_top_k) {
            place = __ldcg(a.places + i * a.max_top_k + lane);
            weight = __ldcg(a.place_weights + i * a.max_top_k + lane);
        }
        const bool here = place < a.in_rows;

        terms = { __ballot_sync(kAll, here), a.x + (uint64_t)(here ? place : 0) * a.row_bytes, weight };
    }
    sum_or_copy<T>(terms, a.row_bytes / 16, nullptr, partial_at(a, s, partial));
    if (asks.grads >> s & 1)
        push_grads(a, i, place, s, partial);
    __syncwarp();
    fence_sys(); /* release; partner: find_partials */
    if (lane == 0)
        store_u64(partial_tag_at(a, s, partial), op.tag);
}

/* Flat rows of this rank's own tokens are partials where they are. */
__device__ inline bool sums_in_place(const ep_ht_args &a, uint32_t r)
{
    return r == a.rank && a.layout != EP_LAYOUT_PACKED && a.state->ht_handles[a.handle].rows <= a.in_rows;
}

/* A warp takes partials that nobody has taken: first ones of all sources first, the next rank first. */
template <class T> __device__ inline void push_partials(const ep_ht_args &a, const Op &op, const Asks &asks)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t own = asks.mask >> lane & 1 && !sums_in_place(a, lane) ? h.from[lane] : 0;
    const uint32_t end = __reduce_max_sync(kAll, own) * a.ranks;

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&run_of(a).next_push);

        if (item >= end)
            break;
        const uint32_t s = (item + a.rank + 1) % a.ranks, slot = item / a.ranks;

        if (slot >= __shfl_sync(kAll, own, s))
            continue;
        if (open_of(a, op, 1u << s))
            push_partial<T>(a, op, asks, s, slot);
        else if (lane == 0)
            atomicOr(&run_of(a).unsent, 1u << s);
    }
}

/* ---- summing them up ------------------------------------------------------------------------------------ */

/* Lane d has rank d's partial of a token, lane k choice k. */
struct Sources {
    int32_t route;
    uint64_t partial;
    const uint8_t *row;
    const float *grads; /* NULL: none were given */
    uint32_t comes;     /* mask */
};

/* Lane d. */
__device__ inline void find_row(const ep_ht_args &a, uint32_t slot, Sources *from)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x % 32;

    if (sums_in_place(a, lane)) {
        const uint64_t i = (uint64_t)h.from_first[lane] + slot;

        from->row = a.x + i * a.row_bytes;
        from->grads = a.row_grads ? a.row_grads + i * h.top_k : nullptr;
    } else {
        from->partial = (uint64_t)h.first[lane] + slot;
        from->row = partial_at(a, a.rank, from->partial);
        from->grads = partial_grads_at(a, a.rank, from->partial);
    }
}

/* The partials of token t that come. */
__device__ inline Sources find_partials(const ep_ht_args &a, const Op &op, uint32_t t)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x % 32, at = t * h.top_k + lane;
    Sources from = { -1, 0, nullptr, nullptr, 0 };
    uint32_t slot = 0, ranks;
    bool comes;

    if (lane < h.top_k) {
        from.route = __ldcg(a.routing + at);
        slot = __ldcg(a.slots + at);
    }
    ranks = __reduce_or_sync(kAll, from.route >= 0 ? 1u << rank_of(from.route) : 0);
#pragma unroll 1
    for (uint32_t k = 0; k < h.top_k; k++) {
        const int32_t route = __shfl_sync(kAll, from.route, k);
        const uint32_t of = __shfl_sync(kAll, slot, k);

        if (route >= 0 && rank_of(route) == lane)
            find_row(a, of, &from);
    }
    comes = (ranks & op.members & h.sent) >> lane & 1;
    const bool waits = comes && !sums_in_place(a, lane);

    if (waits && load_u32(&run_of(a).gone) >> lane & 1) /* not to wait for each of its partials */
        comes = load_u64(partial_tag_at(a, a.rank, from.partial)) == op.tag;
    if (waits && comes) {
        const uint64_t *tag = partial_tag_at(a, a.rank, from.partial);
        const struct ep_ht_flags *flags = flags_at(a, a.rank, lane);
        const Wait end = wait_for(
            a, op, lane, [&] { return acquire_u64(tag) == op.tag; }, /* partner: push_partial */
            [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });

        if (end != Wait::there)
            miss(a, lane, end, EP_WAIT_ARRIVAL);
        comes = end == Wait::there;
    }
    from.comes = __ballot_sync(kAll, comes);
    __syncwarp();
    return from;
}

__device__ inline void gather_grads(const ep_ht_args &a, const Sources &from, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32, r = from.route >= 0 ? rank_of(from.route) : 0;
    const float *grads = (const float *)__shfl_sync(kAll, (uint64_t)from.grads, r);

    if (lane >= a.top_k)
        return;
    a.topk_grads[t * a.top_k + lane] =
        from.route >= 0 && from.comes >> r & 1 && grads ? __ldcg(grads + lane) : 0.0f;
}

/* A warp takes tokens that nobody has taken. */
template <class T> __device__ inline void sum_tokens(const ep_ht_args &a, const Op &op)
{
#pragma unroll 1
    for (;;) {
        const uint32_t t = take_work(&run_of(a).next_row);

        if (t >= a.tokens)
            break;
        const Sources from = find_partials(a, op, t);
        const uint64_t row = (uint64_t)t * a.row_bytes;

        sum_or_copy<T>({ from.comes, from.row, 1.0f }, a.row_bytes / 16,
                       a.bias ? a.bias + row : nullptr, a.out + row);
        if (a.topk_grads)
            gather_grads(a, from, t);
    }
}

/* ---- the op --------------------------------------------------------------------------------------------------- */

/* Warp 0 of block 0. */
__device__ inline void start(const ep_ht_args &a, Op *op)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint64_t tag = ep_ht_tag(a.state->ht_number, (uint32_t)a.state->ht_combines + 1);
    const bool usable = h.number && h.generation == a.generation && h.routed && h.layout == a.layout
                        && h.tokens == a.tokens && (!a.topk_grads || h.top_k == a.top_k);

    begin(a, op, tag, h.number, usable ? EP_OK : EP_STALE_HANDLE);
    if (op->status == EP_OK) {
        ask_all(a, *op);
        announce(a, *op, op->members);
    }
}

/* One thread: who waits for partials and gets none, because the rows here are too few, because his did not come, or
 * because he runs another op. */
__device__ inline void refuse(const ep_ht_args &a, const Op &op, uint32_t served)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    uint32_t refused = 0;

    for (uint32_t s = 0; s < a.ranks; s++)
        refused |= (h.from[s] > 0 || !(h.arrived >> s & 1)) << s;
    if (refused & ~served & op.members)
        atomicOr(&run_of(a).unsent, refused & ~served & op.members);
}

template <class T> __device__ inline void move(const ep_ht_args &a, const Op &op, Asks *asks)
{
    const uint32_t warp = threadIdx.x / 32;
    const bool usable = a.state->ht_handles[a.handle].rows <= a.in_rows;

    if (warp == 0)
        take_asks(a, op, asks);
    __syncthreads();
    if (threadIdx.x == 0)
        refuse(a, op, usable ? asks->mask : 0);
    if (usable && warp >= kWarps - pushers_of(a, a.layout == EP_LAYOUT_PACKED ? kPackedPushers : kPushers))
        push_partials<T>(a, op, *asks);
    pushed(a, op);
    sum_tokens<T>(a, op);
}

/* Who is in the sums: of those that rows were sent to, who was not missed; the others have no part in them. */
__device__ inline void last_words(const ep_ht_args &a, const Op &op, int32_t *status, uint32_t *arrived)
{
    struct ep_device_ht_run &run = run_of(a);
    struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const bool usable = h.rows <= a.in_rows;

    if (op.status == EP_OK) {
        for (uint32_t s = 0; s < a.ranks; s++)
            if (s != a.rank && (op.members & h.arrived & ~run.unsent) >> s & 1)
                run.wire_bytes += (uint64_t)h.from[s] * a.row_bytes;
        *arrived = op.members & h.sent & ~(run.late | run.gone);
        *status = run.late ? EP_TIMEOUT
                  : run.mismatched ? EP_FAILED_PRECONDITION
                  : !present(a, op.number, a.rank) ? EP_DETACHED
                  : usable ? EP_OK : EP_OVERFLOW;
        run.rows_needed = usable ? 0 : h.rows;
    }
    a.state->ht_combines++;
}

template <class T> __device__ __forceinline__ void run(const ep_ht_args &a)
{
    __shared__ Op op;
    __shared__ Asks asks;
    uint32_t met = 0;

    if (blockIdx.x == 0 && threadIdx.x < 32)
        start(a, &op);
    barrier(a, &met);
    take_op(a, &op);
    if (op.status == EP_OK)
        move<T>(a, op, &asks);
    barrier(a, &met);
    if (blockIdx.x == 0 && threadIdx.x < 32)
        close(a, op);
    finish(a, op, false, [&](int32_t *status, uint32_t *arrived) { last_words(a, op, status, arrived); });
}

} // namespace combine
} // namespace ht
} // namespace ep

#endif
