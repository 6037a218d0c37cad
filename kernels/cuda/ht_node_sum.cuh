/*
 * ht_node_sum.cuh: a combine over nodes: the ranks of a node push their partials of a token from elsewhere to its gate
 * here, which sums them up in the order of ranks, rounds once and puts one row back (ht_net.cuh).
 */
#ifndef EP_HT_NODE_SUM_CUH
#define EP_HT_NODE_SUM_CUH

#include "ht_ask.cuh"
#include "ht_sum.cuh"

namespace ep {
namespace ht {
namespace combine {

/* Where a partial lies. */
struct Partial {
    uint8_t *row;
    uint64_t *tag;
    float *grads;
};

__device__ inline Partial partial_of(const ep_ht_args &a, uint32_t where, uint64_t i)
{
    return { partial_at(a, where, i), partial_tag_at(a, where, i), partial_grads_at(a, where, i) };
}

__device__ inline uint32_t traits_of(const ep_ht_args &a) { return EP_OP_COMBINE | a.wire_dtype << 8; }

__device__ inline void write_ask(const ep_ht_args &a, const Op &op, uint32_t d)
{
    uint8_t *note = note_at(a, kAsk, a.rank, d);

    store_vec(note, tagged(traits_of(a), a.topk_grads != nullptr, op.tag));
    store_vec(note + EP_HT_ASK_ROUTING_LOW / 2 * sizeof(Vec),
              tagged((uint32_t)op.number, (uint32_t)(op.number >> 32), op.tag));
}

#if EP_LL_NET

/* Rank d's partial of what is its row `slot` of rank s, which is on another node: at the gate of s here, absent or not. */
__device__ inline Partial gate_partial(const ep_ht_args &a, uint32_t s, uint32_t d, uint32_t slot)
{
    const struct ep_device_net *net = net_of(a);
    const uint64_t i = ((uint64_t)net->in[s] * net->map.places + net->place[d]) * a.max_tokens + slot;
    uint8_t *beside = (uint8_t *)net->at[net->gate_here[s]];

    return { beside + net->map.partials + i * a.row_bytes, (uint64_t *)(beside + net->map.tags) + i,
             (float *)(beside + net->map.grads) + i * a.max_top_k };
}

/* ---- asks -------------------------------------------------------------------------------- */

/* Are there partials here of rows that came of rank s, on another node? */
__device__ inline bool has_partials(const ep_ht_args &a, const struct ep_device_ht_handle &h, uint32_t s)
{
    return is_far(a, s) && has(h.arrived, s) && a.from[s] > 0;
}

/* A warp; mask of places: who takes what is pushed for such ranks. */
__device__ inline uint32_t vias_of(const ep_ht_args &a, const struct ep_device_ht_handle &h)
{
    uint32_t vias = 0;

    each_rank(a, [&](uint32_t s) { vias |= has_partials(a, h, s) ? 1u << place_at(a, via(a, s)) : 0; });
    return __reduce_or_sync(kAll, vias);
}

/* One thread, of rank s on another node, whose rows came: may this rank's partials of them be written?
 * They lie in one place, whoever sums them up.  If it is another rank than the last time, as a gate came back, that one
 * may still read the last ones: it has asked for them, but not for these.  False: so it is till the op's time is over. */
__device__ inline bool await_place(const ep_ht_args &a, const Op &op, uint32_t s)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t by = load_u32(&net->pushed_by[s]);
    const uint64_t at = load_u64(&net->pushed_at[s]), start = now_ns();

    while (by != via(a, s) && closed_by(a, by) < at) {
        const uint64_t now = now_ns();

        if (now > op.deadline) {
            miss(a, by, Wait::late, EP_WAIT_READY);
            return false;
        }
        if (now - start > kDrainNs && !present(a, op.number, by))
            break;
    }
    fence_sys(); /* acquire: what it has read */
    store_u32(&net->pushed_by[s], via(a, s));
    store_u64(&net->pushed_at[s], op.tag);
    return true;
}
/* Warp 0 of block 0; mask of places: who takes what is pushed and cannot be. */
__device__ inline uint32_t await_places(const ep_ht_args &a, const Op &op, const struct ep_device_ht_handle &h)
{
    uint32_t taken = 0;

    each_rank(a, [&](uint32_t s) {
        const uint32_t by = has_partials(a, h, s) ? 1u << place_at(a, via(a, s)) : 0;

        if (load_u32(&run_of(a).asked) & by && !await_place(a, op, s))
            taken |= by;
    });
    return __reduce_or_sync(kAll, taken);
}

/* Warp 0 of block 0: whose tokens' sums are made here; and those that make ours are asked, unless their records did so. */
__device__ inline void ask_gates(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    const struct ep_net_way *ways = ways_of(a, a.handle);

    list_relays(a, [&](uint32_t r) { return has(op.members, r) && is_far(a, r) && ways[r].from > 0; });
    each_rank(a, [&](uint32_t r) {
        if (!is_far(a, r))
            return;
        store_u32(&net->acts[r], ways[r].acts); /* the way of the dispatch */
        store_u32(&net->via[r], ways[r].via);
        if (ways[r].to > 0)
            add(net->through, ways[r].acts); /* makes sums */
    });
    __syncwarp();
    ask_far(
        a, op, [&](uint32_t r) { return has_now(net->through, r) && has(op.members, r) && !is_asked(a, r, op.tag); },
        [](uint32_t) {}, [&](uint32_t d) { ask_for_sums(a, d, op.tag); });
}

/* A warp: rank s takes its sums, and nothing is on its way where they are made and where they go. */
__device__ inline bool await_source(const ep_ht_args &a, const Op &op, uint32_t s)
{
    uint32_t *silent = net_of(a)->silent;
    bool takes = false;

    if (threadIdx.x % 32 == 0 && !has_now(silent, s)) {
        const uint64_t *last = &net_of(a)->ht_last[s];
        const Wait end = wait_for(
            a, op, s, [&] { return has_asked(a, s, op.tag) && (load_u64(last) == op.tag || may_put(a, s)); },
            [&] { return has_come(a, s, op.tag, kAsked) && !has_asked(a, s, op.tag); }); /* beyond */

        takes = end == Wait::there;
        if (end == Wait::late)
            miss(a, s, end, EP_WAIT_READY);
        if (!takes)
            add(silent, s);
    }
    __syncwarp();
    return __shfl_sync(kAll, takes, 0);
}

/* ---- a sum of this node ------------------------------------------------------------------ */

/* Lane d has the partial of a record from the rank at place d, lane k choice k. */
struct NodeTerms {
    uint32_t choice; /* place << 24 | slot, or ~0 */
    Partial partial;
    uint32_t comes;  /* mask */
};

__device__ inline NodeTerms find_node_terms(const ep_ht_args &a, const Op &op, uint32_t s, uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32, *choices = relayed_of(a, a.handle, box_of(a, s));
    const uint32_t rank = lane < nears_of(a) ? near_at(a, lane) : a.rank;
    NodeTerms terms = { kAll, { nullptr, nullptr, nullptr }, 0 };
    bool comes = false;

    if (lane < a.max_top_k)
        terms.choice = __ldcg(choices + (uint64_t)i * a.max_top_k + lane);
#pragma unroll 1
    for (uint32_t k = 0; k < a.max_top_k; k++) {
        const uint32_t choice = __shfl_sync(kAll, terms.choice, k);

        if (choice == kAll || choice >> 24 != lane || comes)
            continue;
        terms.partial = gate_partial(a, s, rank, choice & 0xffffff);
        comes = has(op.members, rank);
    }
    if (comes) {
        const struct ep_ht_flags *flags = flags_of(a, a.rank, rank);
        const Wait end = wait_for(
            a, op, rank, [&] { return acquire_u64(terms.partial.tag) == op.tag; }, /* partner: push_partial */
            [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });

        if (end == Wait::late)
            miss(a, rank, end, EP_WAIT_ARRIVAL);
        comes = end == Wait::there;
    }
    terms.comes = __ballot_sync(kAll, comes);
    __syncwarp();
    return terms;
}

/* Gradients of the record's choices, 0 where none came. */
__device__ inline void gather_node_grads(const ep_ht_args &a, const NodeTerms &terms, float *to)
{
    const uint32_t lane = threadIdx.x % 32, r = terms.choice == kAll ? 0 : terms.choice >> 24;
    const float *grads = (const float *)__shfl_sync(kAll, (uint64_t)terms.partial.grads, r);

    if (lane < a.max_top_k)
        to[lane] = terms.choice != kAll && terms.comes >> r & 1 ? __ldcg(grads + lane) : 0.0f;
}

/* Record i of rank s. */
template <class T>
__device__ inline void sum_record(const ep_ht_args &a, const Op &op, Ring *ring, const Box &box, uint32_t s, uint32_t i)
{
    uint8_t *at = item_out(a, box, box_of(a, s), i);

    if (!await_source(a, op, s))
        return;
    const NodeTerms terms = find_node_terms(a, op, s, i);

    sum_or_copy<T>(ring, { terms.comes, terms.partial.row, 1.0f }, a.row_bytes, nullptr, at + ep_net_sum_head(a.max_top_k));
    gather_node_grads(a, terms, (float *)(at + sizeof(struct ep_net_sum)));
    const uint32_t late = nears_that(a, [&](uint32_t r) { return has_now(run_of(a).late, r); });

    if (threadIdx.x % 32 == 0) {
        store_row(at, tagged(terms.comes, late, op.tag));
        store_row(at + sizeof(Vec), tagged(traits_of(a), 0, op.number));
    }
    __syncwarp();
    fence_sys(); /* release; partner: put_pieces */
    if (threadIdx.x % 32 == 0)
        count_item(a, box, s, i);
}

/* A warp takes records that nobody has taken. */
template <class T> __device__ inline void sum_records(const ep_ht_args &a, const Op &op, Ring *ring)
{
    const struct ep_net_way *ways = ways_of(a, a.handle);
    const Box box = sums_of(a);

    each_relayed<Order::to_next>(a, [&](uint32_t s) { return ways[s].from; },
                                 [&](uint32_t s, uint32_t i) { sum_record<T>(a, op, ring, box, s, i); });
}

/* Warp 1 of block 0. */
__device__ inline void put_sums(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);
    const struct ep_net_way *ways = ways_of(a, a.handle);

    put_boxes(a, op.tag, sums_of(a), net->relaying, [&](uint32_t i) -> Load {
        const uint32_t s = net->relays[i];

        return { s, s, ways[s].from, box_of(a, s), box_back(a, s) };
    }, [] { return false; });
}

/* A lane's part of what went over the network. */
__device__ inline uint64_t sum_bytes(const ep_ht_args &a)
{
    const struct ep_device_net *net = net_of(a);
    const struct ep_net_way *ways = ways_of(a, a.handle);
    uint64_t sums = 0;

    for (uint32_t i = threadIdx.x % 32; i < net->relaying; i += 32)
        sums += has(net->silent, net->relays[i]) ? 0 : ways[net->relays[i]].from;
    return sums * a.row_bytes;
}

constexpr uint64_t kAnswerNs = 20000000; /* and an eighth of the timeout: a gate that waits in vain says for whom */

/* ---- a sum that comes ------------------------------------------------------------------------ */

/* One thread: sum i of a gate's node; *head: who is in it.  False: it does not come, and nobody is. */
__device__ inline bool await_sum(const ep_ht_args &a, const Op &op, const Box &box, uint32_t gate, uint32_t i,
                                 const uint8_t **at, struct ep_net_sum *head)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t acting = acts_as(a, gate);
    const uint8_t *sum = item_in(a, box, box_for(a, gate), i);
    const auto there = [&] { return has_come(a, acting, op.tag, step_of_item(box, i)); };
    bool comes = i < ways_of(a, a.handle)[gate].to && has(op.members, acting);

    if (comes && has_now(net->lost, gate)) { /* not to wait for each of its sums */
        comes = there();
    } else if (comes) {
        const Wait end = wait_for(a, op, acting, there, [] { return false; },
                                  load_u64(&run_of(a).timeout_ns) / 8 + kAnswerNs);

        if (end != Wait::there) {
            add(net->lost, gate);
            /* It had asked for its own before: only what it puts says that it has begun. */
            miss(a, acting, end, has_come(a, acting, op.tag, kFirstPiece) ? EP_WAIT_ARRIVAL : EP_WAIT_READY);
        }
        comes = end == Wait::there;
    }
    fence_sys(); /* acquire: what was put before it */
    const Vec v = comes ? load_vec(sum) : Vec{ { 0, 0, 0, 0 } }, of = comes ? load_vec(sum + sizeof v) : v;

    comes = comes && tag_of(v) == op.tag && of.w[0] == traits_of(a) && tag_of(of) == op.number;
    if (comes)
        *head = { v.w[0], v.w[1], op.tag, of.w[0], of.w[1], op.number };
    *at = sum;
    return comes;
}

#else

__device__ inline uint32_t vias_of(const ep_ht_args &, const struct ep_device_ht_handle &) { return 0; }
__device__ inline uint32_t await_places(const ep_ht_args &, const Op &, const struct ep_device_ht_handle &) { return 0; }
__device__ inline void ask_gates(const ep_ht_args &, const Op &) {}
template <class T> __device__ inline void sum_records(const ep_ht_args &, const Op &, Ring *) {}
__device__ inline void put_sums(const ep_ht_args &, const Op &) {}
__device__ inline uint64_t sum_bytes(const ep_ht_args &) { return 0; }

#endif

} // namespace combine
} // namespace ht
} // namespace ep

#endif
