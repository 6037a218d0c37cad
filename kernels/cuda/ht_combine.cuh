/*
 * HT combine: each rank sums a token's rows over its own experts in fp32, rounds once and pushes the partial to the
 * token's source; the source sums partials in the order of ranks as they land.  ht_device.cuh has the protocol.
 *
 * Some blocks push and the others sum; who has pushed all of his sums too.
 */
#ifndef EP_HT_COMBINE_CUH
#define EP_HT_COMBINE_CUH

#include "ht_node_sum.cuh"

namespace ep {
namespace ht {
namespace combine {

constexpr uint32_t kPushingSms = 16, kPackedPushingSms = 88; /* at most; of packed rows several make one partial */

/* ---- asks ---------------------------------------------------------------------------------------- */

/* Warp 0 of block 0, lane d of rank d. */
__device__ inline void ask_all(const ep_ht_args &a, const Op &op)
{
    if ((op.members & ~far_of(a)) >> threadIdx.x & 1)
        write_ask(a, op, threadIdx.x);
    __syncwarp();
}

/* Warp 0 of block 0, for all blocks, lane s from rank s: who takes his partials, and as a gate those of others. */
__device__ inline void take_asks(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x;
    bool fits = false;
    Vec traits = { { 0, 0, 0, 0 } }, routing;

    const bool local = (op.members & ~far_of(a)) >> lane & 1;

    if (local && ((h.arrived >> lane & 1 && h.from[lane] > 0) || vias_of(a, h) >> lane & 1)
        && take_note(a, op, kAsk, lane, a.rank, EP_HT_ASK_TRAITS / 2, &traits)
        && take_note(a, op, kAsk, lane, a.rank, EP_HT_ASK_ROUTING_LOW / 2, &routing)) {
        fits = traits.w[0] == traits_of(a)
               && ((uint64_t)routing.w[1] << 32 | routing.w[0]) == op.number;
        if (!fits) {
            atomicOr(&run_of(a).mismatched, 1u << lane);
            atomicOr(&run_of(a).gone, 1u << lane);
        }
    }
    const uint32_t mask = __ballot_sync(kAll, fits), grads = __ballot_sync(kAll, fits && traits.w[1] != 0);

    if (lane == 0) {
        run_of(a).asked = mask;
        run_of(a).asked_grads = grads;
    }
    __syncwarp();
    const uint32_t taken = await_places(a, op, h);

    if (lane == 0)
        run_of(a).asked = mask & ~taken;
    __syncwarp();
}

/* ---- pushing partials -------------------------------------------------------------------------------- */

/* Gradients of one row's choices; 0 where the choice is not here or none was given. */
__device__ inline void push_grads(const ep_ht_args &a, uint64_t i, uint32_t place, float *to)
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
    to[lane] = grad;
}

__device__ inline Partial place_of(const ep_ht_args &a, uint32_t s, uint32_t slot)
{
#if EP_LL_NET
    if (far_of(a) >> s & 1)
        return gate_partial(a, s, a.rank, slot);
#endif
    return partial_of(a, s, (uint64_t)a.state->ht_handles[a.handle].back[s] + slot);
}

/* Row `slot` of source s. */
template <class T>
__device__ inline void push_partial(const ep_ht_args &a, const Op &op, Ring *ring, uint32_t s, uint32_t slot)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint64_t i = (uint64_t)h.from_first[s] + slot;
    const Partial to = place_of(a, s, slot);
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
    sum_or_copy<T>(ring, terms, a.row_bytes, nullptr, to.row);
    if ((load_u32(&run_of(a).asked_grads) | far_of(a)) >> s & 1) /* a gate does not know yet */
        push_grads(a, i, place, to.grads);
    __syncwarp();
    fence_sys(); /* release; partner: find_partials */
    if (lane == 0)
        store_u64(to.tag, op.tag);
}

/* Flat rows of this rank's own tokens are partials where they are. */
__device__ inline bool sums_in_place(const ep_ht_args &a, uint32_t r)
{
    return r == a.rank && a.layout != EP_LAYOUT_PACKED && a.state->ht_handles[a.handle].rows <= a.in_rows;
}

/* A warp takes partials that nobody has taken: first ones of all sources first, the next rank first. */
template <class T> __device__ inline void push_partials(const ep_ht_args &a, const Op &op, Ring *ring)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x % 32;
    const bool taken = lane < a.ranks && load_u32(&run_of(a).asked) >> via(a, lane) & 1 && h.arrived >> lane & 1;
    const uint32_t own = taken && !sums_in_place(a, lane) ? h.from[lane] : 0;
    const uint32_t end = __reduce_max_sync(kAll, own) * a.ranks;

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&run_of(a).next_push);

        if (item >= end)
            break;
        const uint32_t s = (item + a.rank + 1) % a.ranks, slot = item / a.ranks;

        if (slot >= __shfl_sync(kAll, own, s))
            continue;
        if (open_of(a, op, 1u << via(a, s)))
            push_partial<T>(a, op, ring, s, slot);
        else if (lane == 0)
            atomicOr(&run_of(a).unsent, 1u << via(a, s));
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

#if EP_LL_NET
/* Lane g: of token t, the sum of gate g's node.  False: there is none. */
__device__ inline bool find_sums(const ep_ht_args &a, const Op &op, uint32_t t, uint32_t ranks, Sources *from)
{
    const uint32_t lane = threadIdx.x % 32, top_k = a.state->ht_handles[a.handle].top_k;
    const uint32_t far = ranks & a.state->ht_handles[a.handle].sent & far_of(a);
    const uint32_t own = from->route >= 0 && far >> rank_of(from->route) & 1
                             ? __ldcg(node_slots(a, a.handle) + t * top_k + lane) : 0;
    const uint8_t *sum;
    uint32_t i = 0, of_gate = 0;

    if (!far)
        return false;
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; k++) {
        const int32_t route = __shfl_sync(kAll, from->route, k);
        const uint32_t slot = __shfl_sync(kAll, own, k);

        if (route < 0 || !(far >> rank_of(route) & 1) || gate_of(a, rank_of(route)) != lane)
            continue;
        of_gate |= 1u << rank_of(route);
        i = slot;
    }
    if (!of_gate || !await_sum(a, op, sums_of(a), i, of_gate, &sum))
        return false;
    from->grads = (const float *)(sum + sizeof(struct ep_net_sum));
    from->row = sum + ep_net_sum_head(a.max_top_k);
    return true;
}
#else
__device__ inline bool find_sums(const ep_ht_args &, const Op &, uint32_t, uint32_t, Sources *) { return false; }
#endif

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

        if (route >= 0 && rank_of(route) == lane && !(far_of(a) >> lane & 1))
            find_row(a, of, &from);
    }
    comes = (ranks & op.members & h.sent & ~far_of(a)) >> lane & 1;
    const bool waits = comes && !sums_in_place(a, lane);

    if (waits && load_u32(&run_of(a).gone) >> lane & 1) /* not to wait for each of its partials */
        comes = load_u64(partial_tag_at(a, a.rank, from.partial)) == op.tag;
    if (waits && comes) {
        const uint64_t *tag = partial_tag_at(a, a.rank, from.partial);
        const struct ep_ht_flags *flags = flags_of(a, a.rank, lane);
        const Wait end = wait_for(
            a, op, lane, [&] { return acquire_u64(tag) == op.tag; }, /* partner: push_partial */
            [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });

        if (end != Wait::there)
            miss(a, lane, end, EP_WAIT_ARRIVAL);
        comes = end == Wait::there;
    }
    comes |= find_sums(a, op, t, ranks, &from);
    from.comes = __ballot_sync(kAll, comes);
    __syncwarp();
    return from;
}

/* Whose lane has what comes of rank r. */
__device__ inline uint32_t summed_by(const ep_ht_args &a, uint32_t r)
{
    return far_of(a) >> r & 1 ? gate_of(a, r) : r;
}

__device__ inline void gather_grads(const ep_ht_args &a, const Sources &from, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32, r = from.route >= 0 ? summed_by(a, rank_of(from.route)) : 0;
    const float *grads = (const float *)__shfl_sync(kAll, (uint64_t)from.grads, r);

    if (lane >= a.top_k)
        return;
    a.topk_grads[t * a.top_k + lane] =
        from.route >= 0 && from.comes >> r & 1 && grads ? __ldcg(grads + lane) : 0.0f;
}

/* A warp takes tokens that nobody has taken. */
template <class T> __device__ inline void sum_tokens(const ep_ht_args &a, const Op &op, Ring *ring)
{
#pragma unroll 1
    for (;;) {
        const uint32_t t = take_work(&run_of(a).next_row);

        if (t >= a.tokens)
            break;
        const Sources from = find_partials(a, op, t);
        const uint64_t row = (uint64_t)t * a.row_bytes;

        sum_or_copy<T>(ring, { from.comes, from.row, 1.0f }, a.row_bytes, a.bias ? a.bias + row : nullptr,
                       a.out + row);
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
                        && h.tokens == a.tokens && ((!a.topk_grads && !a.row_grads) || h.top_k == a.top_k);

    begin(a, op, tag, h.number, usable ? EP_OK : EP_STALE_HANDLE);
    if (op->status == EP_OK) {
        ask_all(a, *op);
        announce(a, *op, op->members);
        ask_gates(a, *op);
        take_asks(a, *op);
    }
}

/* One thread of block 0: who waits for partials and gets none, because the rows here are too few, because his did not
 * come, or because he runs another op. */
__device__ inline void refuse(const ep_ht_args &a, const Op &op, uint32_t served)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    uint32_t refused = 0;

    for (uint32_t s = 0; s < a.ranks; s++)
        refused |= (h.from[s] > 0 || !(h.arrived >> s & 1)) << s;
    if (refused & ~served & op.members)
        atomicOr(&run_of(a).unsent, refused & ~served & op.members);
}

/* Does this block push from the beginning?  So many multiprocessors keep the wire busy, and the others sum undisturbed:
 * where one pushes, all stores stand behind those for the wire. */
__device__ inline bool pushes_first(const ep_ht_args &a)
{
    return blockIdx.x % a.sms < (a.layout == EP_LAYOUT_PACKED ? kPackedPushingSms : kPushingSms);
}

template <class T> __device__ inline void move(const ep_ht_args &a, const Op &op, uint32_t *shared)
{
    const bool usable = a.state->ht_handles[a.handle].rows <= a.in_rows;
    Ring ring = open_ring(shared);

    if (blockIdx.x == 0 && threadIdx.x == 0)
        refuse(a, op, usable ? run_of(a).asked : 0);
    __syncthreads(); /* before a warp of block 0 is through */
    if (kNet && blockIdx.x == 0 && threadIdx.x / 32 == 1) {
        pushed(a, op);
        put_sums(a, op);
        return;
    }
    if (usable && pushes_first(a))
        push_partials<T>(a, op, &ring);
    pushed(a, op);
    sum_records<T>(a, op, &ring);
    sum_tokens<T>(a, op, &ring);
}

/* Who is in the sums: of those that rows were sent to, who was not missed; the others have no part in them. */
__device__ inline void last_words(const ep_ht_args &a, const Op &op, int32_t *status, uint32_t *arrived)
{
    struct ep_device_ht_run &run = run_of(a);
    struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const bool usable = h.rows <= a.in_rows;

    if (op.status == EP_OK) {
        for (uint32_t s = 0; s < a.ranks; s++)
            if (s != a.rank && (op.members & h.arrived & ~run.unsent & ~far_of(a)) >> s & 1)
                run.wire_bytes += (uint64_t)h.from[s] * a.row_bytes;
        run.wire_bytes += sum_bytes(a);
        *arrived = op.members & h.sent & ~(run.late | run.gone);
        *status = run.late ? EP_TIMEOUT
                  : run.mismatched ? EP_FAILED_PRECONDITION
                  : !present(a, op.number, a.rank) ? EP_DETACHED
                  : usable ? EP_OK : EP_OVERFLOW;
        run.rows_needed = usable ? 0 : h.rows;
    }
    a.state->ht_combines++;
}

template <class T> __device__ __forceinline__ void run(const ep_ht_args &a, uint32_t *shared)
{
    __shared__ Op op;
    uint32_t met = 0;

    if (blockIdx.x == 0 && threadIdx.x < 32)
        start(a, &op);
    barrier(a, &met);
    take_op(a, &op);
    if (op.status == EP_OK)
        move<T>(a, op, shared);
    barrier(a, &met);
    if (blockIdx.x == 0 && threadIdx.x < 32)
        close(a, op);
    if (finish(a, op, false, [&](int32_t *status, uint32_t *arrived) { last_words(a, op, status, arrived); }))
        clear_net(a);
}

} // namespace combine
} // namespace ht
} // namespace ep

#endif
