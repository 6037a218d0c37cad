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

constexpr uint32_t kPushingSms = 32, kPackedPushingSms = 88; /* at most; of packed rows several make one partial */

/* ---- asks ---------------------------------------------------------------------------------------- */

/* Warp 0 of block 0. */
__device__ inline void ask_all(const ep_ht_args &a, const Op &op)
{
    each_near(a, [&](uint32_t d) {
        if (has(op.members, d))
            write_ask(a, op, d);
    });
    __syncwarp();
}

/* One thread: does rank s, which is here and has asked, run this op?  And wants gradients. */
__device__ inline bool take_ask(const ep_ht_args &a, const Op &op, uint32_t s, bool *grads)
{
    Vec traits, routing;

    if (!take_note(a, op, kAsk, s, a.rank, EP_HT_ASK_TRAITS / 2, &traits)
        || !take_note(a, op, kAsk, s, a.rank, EP_HT_ASK_ROUTING_LOW / 2, &routing))
        return false;
    *grads = traits.w[1] != 0;
    if (traits.w[0] == traits_of(a) && ((uint64_t)routing.w[1] << 32 | routing.w[0]) == op.number)
        return true;
    add(run_of(a).mismatched, s);
    add(run_of(a).gone, s);
    return false;
}

/* Warp 0 of block 0, for all blocks: who takes his partials, and as a gate those of others. */
__device__ inline void take_asks(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x, vias = vias_of(a, h);
    bool wants_grads = false;
    const uint32_t mask = nears_that(a, [&](uint32_t s) {
        return has(op.members, s) && ((has(h.arrived, s) && a.from[s] > 0) || vias >> lane & 1)
               && take_ask(a, op, s, &wants_grads);
    });
    const uint32_t grads = mask & __ballot_sync(kAll, wants_grads);

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
    if (is_far(a, s))
        return gate_partial(a, s, a.rank, slot);
#endif
    return partial_of(a, s, (uint64_t)a.back[s] + slot);
}

/* Row `slot` of source s. */
template <class T>
__device__ inline void push_partial(const ep_ht_args &a, const Op &op, Ring *ring, uint32_t s, uint32_t slot)
{
    const uint64_t i = (uint64_t)a.from_first[s] + slot;
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
    if (is_far(a, s) || load_u32(&run_of(a).asked_grads) >> place_at(a, s) & 1) /* a gate does not know yet */
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

/* Partials that are pushed of rank s's tokens; asked: places of those that take any. */
__device__ inline uint32_t partials_for(const ep_ht_args &a, uint32_t asked, uint32_t s)
{
    const bool taken = asked >> place_at(a, via(a, s)) & 1 && has(a.state->ht_handles[a.handle].arrived, s);

    return taken && !sums_in_place(a, s) ? a.from[s] : 0;
}

/* Sources whose partials are pushed in turn: of one node, at most EP_DEVICE_NODE_RANKS. */
struct Batch {
    uint32_t first, n;
};

/* A warp: those that begin with the first-th of all ranks. */
__device__ inline Batch batch_at(const ep_ht_args &a, uint32_t first)
{
#if EP_LL_NET
    const struct ep_device_net *net = net_of(a);
    const uint32_t at = first + threadIdx.x % 32, fars = a.ranks - net->nears;

    if (first < fars)
        return { first, (uint32_t)__popc(__ballot_sync(kAll, at < fars && net->out[net->order[min(at, fars - 1)]]
                                                                            == net->out[net->order[first]])) };
#endif
    return { first, a.ranks - first };
}

/* Its source i, the next rank of this node first. */
__device__ inline uint32_t source_at(const ep_ht_args &a, const Batch &b, uint32_t i)
{
#if EP_LL_NET
    return net_of(a)->order[b.first + (i + net_of(a)->place[a.rank] + 1) % b.n];
#else
    return (i + a.rank + 1) % a.ranks;
#endif
}

/* A warp: lane i has how many of them there are of source i. */
__device__ inline uint32_t partials_of_lane(const ep_ht_args &a, uint32_t asked, const Batch &b)
{
    const uint32_t lane = threadIdx.x % 32;

    return lane < b.n ? partials_for(a, asked, source_at(a, b, lane)) : 0;
}

/*
 * A warp takes partials that nobody has taken: of a node's ranks the first ones of all first, and node by node, as their
 * gates here sum them up (ht_node_sum.cuh).
 */
template <class T> __device__ inline void push_partials(const ep_ht_args &a, const Op &op, Ring *ring)
{
    const uint32_t asked = load_u32(&run_of(a).asked);
    uint32_t item = take_work(&run_of(a).next_push), before = 0;

#pragma unroll 1
    for (uint32_t first = 0; first < a.ranks;) {
        const Batch batch = batch_at(a, first);
        const uint32_t own = partials_of_lane(a, asked, batch), end = __reduce_max_sync(kAll, own) * batch.n;

#pragma unroll 1
        for (; item - before < end; item = take_work(&run_of(a).next_push)) {
            const uint32_t i = (item - before) % batch.n, s = source_at(a, batch, i), slot = (item - before) / batch.n;

            if (slot >= __shfl_sync(kAll, own, i))
                continue;
            if (__all_sync(kAll, is_open(a, op, via(a, s))))
                push_partial<T>(a, op, ring, s, slot);
            else if (threadIdx.x % 32 == 0)
                add(run_of(a).unsent, via(a, s));
        }
        before += end;
        first += batch.n;
    }
}

/* ---- summing them up ------------------------------------------------------------------------------------ */

/* Of a token, lane k has choice k.  What comes of a rank here, or of all of a node from its gate, has the lane of the first
 * choice there. */
struct Sources {
    int32_t route;
    uint32_t by;        /* the rank that brings it; kNobody: it was not sent */
    uint32_t first;     /* the lane that has it */
    uint64_t partial;
    const uint8_t *row;
    const float *grads; /* NULL: none were given */
    uint32_t comes;     /* mask of lanes */
};

/* First choice of a rank that is here. */
__device__ inline void find_row(const ep_ht_args &a, uint32_t slot, Sources *from)
{
    if (sums_in_place(a, from->by)) {
        const uint64_t i = (uint64_t)a.from_first[from->by] + slot;

        from->row = a.x + i * a.row_bytes;
        from->grads = a.row_grads ? a.row_grads + i * a.state->ht_handles[a.handle].top_k : nullptr;
    } else {
        from->partial = (uint64_t)a.first[from->by] + slot;
        from->row = partial_at(a, a.rank, from->partial);
        from->grads = partial_grads_at(a, a.rank, from->partial);
    }
}

/* And does it come? */
__device__ inline bool await_partial(const ep_ht_args &a, const Op &op, const Sources &from)
{
    const uint64_t *tag = partial_tag_at(a, a.rank, from.partial);

    if (sums_in_place(a, from.by))
        return true;
    if (has_now(run_of(a).gone, from.by)) /* not to wait for each of its partials */
        return load_u64(tag) == op.tag;
    const struct ep_ht_flags *flags = flags_of(a, a.rank, from.by);
    const Wait end = wait_for(
        a, op, from.by, [&] { return acquire_u64(tag) == op.tag; }, /* partner: push_partial */
        [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });

    if (end != Wait::there)
        miss(a, from.by, end, EP_WAIT_ARRIVAL);
    return end == Wait::there;
}

#if EP_LL_NET
/* A warp: sums of other nodes, those that come; who is not in them is missed. */
__device__ inline uint32_t find_sums(const ep_ht_args &a, const Op &op, uint32_t t, bool first, Sources *from)
{
    const uint32_t lane = threadIdx.x % 32, rank = from->route >= 0 ? rank_of(from->route) : kNobody;
    const bool far = from->by != kNobody && is_far(a, rank);
    struct ep_net_sum head = {};
    bool comes = false;

    if (far && first) {
        const uint32_t i = __ldcg(node_slots(a, a.handle) + t * a.state->ht_handles[a.handle].top_k + lane);
        const uint8_t *sum;

        comes = await_sum(a, op, sums_of(a), from->by, i, &sum, &head);
        from->grads = (const float *)(sum + sizeof head);
        from->row = sum + ep_net_sum_head(a.max_top_k);
    }
    __syncwarp();
    const uint32_t in = __shfl_sync(kAll, head.ranks, from->first), late = __shfl_sync(kAll, head.late, from->first);

    if (far && has(op.members, rank) && !(in >> place_at(a, rank) & 1))
        miss(a, rank, late >> place_at(a, rank) & 1 ? Wait::late : Wait::gone, EP_WAIT_READY);
    return __ballot_sync(kAll, comes);
}
#else
__device__ inline uint32_t find_sums(const ep_ht_args &, const Op &, uint32_t, bool, Sources *) { return 0; }
#endif

/* The partials of token t that come. */
__device__ inline Sources find_partials(const ep_ht_args &a, const Op &op, uint32_t t)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint32_t lane = threadIdx.x % 32, at = t * h.top_k + lane;
    Sources from = { -1, kNobody, 0, 0, nullptr, nullptr, 0 };
    uint32_t slot = 0;
    bool comes = false;

    if (lane < h.top_k) {
        from.route = __ldcg(a.routing + at);
        slot = __ldcg(a.slots + at);
    }
    const uint32_t rank = from.route >= 0 ? rank_of(from.route) : kNobody;
    const bool sent = rank != kNobody && has(h.sent, rank), far = sent && is_far(a, rank);

    if (sent)
        from.by = far ? gate_of(a, rank) : rank;
    from.first = __ffs(__match_any_sync(kAll, from.by)) - 1;
    const bool first = sent && lane == from.first;

    if (first && !far && has(op.members, rank)) {
        find_row(a, slot, &from);
        comes = await_partial(a, op, from);
    }
    __syncwarp();
    from.comes = __ballot_sync(kAll, comes) | find_sums(a, op, t, first, &from);
    return from;
}

/* Which term it is that comes to a lane, in the order of the ranks that bring them; kNobody: none comes to it. */
__device__ inline uint32_t term_of_lane(const Sources &from, uint32_t top_k)
{
    const bool comes = from.comes >> threadIdx.x % 32 & 1;
    uint32_t at = 0;

    if constexpr (kNet) {
        const uint32_t by = comes ? from.by : kNobody;

#pragma unroll 4
        for (uint32_t k = 0; k < top_k; k++)
            at += __shfl_sync(kAll, by, k) < by;
    } else {
        const uint32_t bit = comes ? 1u << from.by : 0;

        at = __popc(__reduce_or_sync(kAll, bit) & (bit - 1));
    }
    return comes ? at : kNobody;
}

/* A lane for each of them. */
__device__ inline Terms terms_of(const ep_ht_args &a, const Sources &from)
{
    const uint32_t lane = threadIdx.x % 32, top_k = a.state->ht_handles[a.handle].top_k, at = term_of_lane(from, top_k);
    uint32_t source = 0;

#pragma unroll 4
    for (uint32_t k = 0; k < top_k; k++)
        source = __shfl_sync(kAll, at, k) == lane ? k : source;
    return { (1u << __popc(from.comes)) - 1, (const uint8_t *)__shfl_sync(kAll, (uint64_t)from.row, source), 1.0f };
}

__device__ inline void gather_grads(const ep_ht_args &a, const Sources &from, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    const float *grads = (const float *)__shfl_sync(kAll, (uint64_t)from.grads, from.first);

    if (lane >= a.top_k)
        return;
    a.topk_grads[t * a.top_k + lane] =
        from.by != kNobody && from.comes >> from.first & 1 && grads ? __ldcg(grads + lane) : 0.0f;
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

        sum_or_copy<T>(ring, terms_of(a, from), a.row_bytes, a.bias ? a.bias + row : nullptr, a.out + row);
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
        announce(a, *op);
        ask_gates(a, *op);
        take_asks(a, *op);
    }
}

/* Warp 0 of block 0: who of this node waits for partials and gets none, because the rows here are too few, because his did
 * not come, or because he runs another op.  served: places of the others. */
__device__ inline void refuse(const ep_ht_args &a, const Op &op, uint32_t served)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];

    each_near(a, [&](uint32_t s) {
        if (has(op.members, s) && (a.from[s] > 0 || !has(h.arrived, s)) && !(served >> threadIdx.x & 1))
            add(run_of(a).unsent, s);
    });
    __syncwarp();
}

/* Does this block push from the beginning?  So many multiprocessors keep the wire busy, and the others sum undisturbed:
 * where one pushes, all stores stand behind those for the wire.  Where they are few, a third of them sums flat rows. */
__device__ inline bool pushes_first(const ep_ht_args &a)
{
    const uint32_t pushing = a.layout == EP_LAYOUT_PACKED ? kPackedPushingSms : min(kPushingSms, (2 * a.sms + 2) / 3);

    return blockIdx.x % a.sms < pushing;
}

template <class T> __device__ inline void move(const ep_ht_args &a, const Op &op, uint32_t *shared)
{
    const bool usable = a.state->ht_handles[a.handle].rows <= a.in_rows;
    Ring ring = open_ring(shared);

    if (blockIdx.x == 0 && threadIdx.x < 32)
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

__device__ inline int32_t status_of(const ep_ht_args &a, const Op &op, bool usable)
{
    const struct ep_device_ht_run &run = run_of(a);

    if (run.first_late)
        return EP_TIMEOUT;
    if (anybody(a, run.mismatched))
        return EP_FAILED_PRECONDITION;
    if (!present(a, op.number, a.rank))
        return EP_DETACHED;
    return usable ? EP_OK : EP_OVERFLOW;
}

/* Warp 0 of the last block.  Who is in the sums: of those that rows were sent to, who was not missed; the others have no
 * part in them. */
__device__ inline void last_words(const ep_ht_args &a, const Op &op, int32_t *status, uint32_t *arrived)
{
    struct ep_device_ht_run &run = run_of(a);
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const bool usable = h.rows <= a.in_rows;
    uint64_t bytes = 0;

    if (op.status == EP_OK) {
        each_rank(a, [&](uint32_t s) {
            if (s != a.rank && !is_far(a, s) && has(op.members, s) && has(h.arrived, s) && !has(run.unsent, s))
                bytes += (uint64_t)a.from[s] * a.row_bytes;
        });
        bytes += sum_bytes(a);
        if (bytes)
            atomicAdd((unsigned long long *)&run.wire_bytes, (unsigned long long)bytes);
        collect(a, arrived, [&](uint32_t d) { return has(op.members, d) && has(h.sent, d) && !is_missed(a, d); });
        *status = status_of(a, op, usable);
        if (threadIdx.x == 0)
            run.rows_needed = usable ? 0 : h.rows;
    }
    if (threadIdx.x == 0)
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
