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
    uint8_t *note = far_of(a) >> d & 1 ? far_ask_at(a, d) : note_at(a, kAsk, a.rank, d);

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

/* Mask: who takes what is pushed for ranks on other nodes whose rows came. */
__device__ inline uint32_t vias_of(const ep_ht_args &a, const struct ep_device_ht_handle &h)
{
    uint32_t vias = 0;

#pragma unroll 1
    for (uint32_t rest = h.arrived & far_of(a); rest; rest &= rest - 1) {
        const uint32_t s = __ffs(rest) - 1;

        vias |= (uint32_t)(h.from[s] > 0) << via(a, s);
    }
    return vias;
}

/* Warp 0 of block 0, lane s of rank s on another node, whose rows came: may this rank's partials of them be written?
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
/* The same, all lanes; mask: who takes what is pushed and cannot be. */
__device__ inline uint32_t await_places(const ep_ht_args &a, const Op &op, const struct ep_device_ht_handle &h)
{
    const uint32_t s = threadIdx.x;
    const bool pushes = s < a.ranks && (h.arrived & far_of(a)) >> s & 1 && h.from[s] > 0
                        && load_u32(&run_of(a).asked) >> via(a, s) & 1;

    return __reduce_or_sync(kAll, pushes && !await_place(a, op, s) ? 1u << via(a, s) : 0);
}

/* Warp 0 of block 0: whose tokens' sums are made here, and the asks of those that make ours. */
__device__ inline void ask_gates(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    const struct ep_net_handle &h = net->handles[a.handle];
    const uint32_t r = threadIdx.x;
    const bool far = r < a.ranks && (op.members & far_of(a)) >> r & 1;
    const uint32_t relays = __ballot_sync(kAll, far && h.from[r] > 0);
    const uint32_t gates = __reduce_or_sync(kAll, r < a.ranks && far_of(a) >> r & 1 && h.to[r] > 0 ? 1u << h.acts[r] : 0);

    if (r < a.ranks && far_of(a) >> r & 1) { /* the way of the dispatch */
        store_u32(&net->acts[r], h.acts[r]);
        store_u32(&net->via[r], h.via[r]);
    }
    if (r == 0)
        net->relays = relays;
    __syncwarp();
    ask_far(a, op, gates & op.members, EP_HT_ASK_EXPERTS / 2 * sizeof(Vec), relays,
            [&](uint32_t d) { write_ask(a, op, d); });
}

/* A warp: rank s runs this op, and takes its sums. */
__device__ inline bool await_source(const ep_ht_args &a, const Op &op, uint32_t s)
{
    uint32_t *silent = &net_of(a)->silent;
    bool fits = false;

    if (threadIdx.x % 32 == 0 && !(load_u32(silent) >> s & 1)) {
        const uint64_t *last = &net_of(a)->ht_last[s];
        const Wait end = wait_for(
            a, op, s,
            [&] { return has_come(a, s, op.tag, kAsked) && (load_u64(last) == op.tag || may_put(a, s)); },
            [] { return false; });

        fence_sys(); /* acquire: its ask */
        const Vec traits = load_vec(far_note_at(a, s) + EP_HT_ASK_TRAITS / 2 * sizeof(Vec));
        const Vec routing = load_vec(far_note_at(a, s) + EP_HT_ASK_ROUTING_LOW / 2 * sizeof(Vec));

        fits = end == Wait::there && tag_of(traits) == op.tag && traits.w[0] == traits_of(a) && tag_of(routing) == op.tag
               && ((uint64_t)routing.w[1] << 32 | routing.w[0]) == op.number;
        if (end == Wait::late)
            miss(a, s, end, EP_WAIT_READY);
        if (!fits)
            atomicOr(silent, 1u << s);
    }
    __syncwarp();
    return __shfl_sync(kAll, fits, 0);
}

/* ---- a sum of this node ------------------------------------------------------------------ */

/* Lane d has rank d's partial of a record, lane k choice k. */
struct NodeTerms {
    uint32_t choice; /* rank << 24 | slot, or ~0 */
    Partial partial;
    uint32_t comes;  /* mask */
};

__device__ inline NodeTerms find_node_terms(const ep_ht_args &a, const Op &op, uint32_t s, uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32, *choices = relayed_of(a, a.handle, box_of(a, s));
    NodeTerms terms = { kAll, { nullptr, nullptr, nullptr }, 0 };
    bool comes = false;

    if (lane < a.max_top_k)
        terms.choice = __ldcg(choices + (uint64_t)i * a.max_top_k + lane);
#pragma unroll 1
    for (uint32_t k = 0; k < a.max_top_k; k++) {
        const uint32_t choice = __shfl_sync(kAll, terms.choice, k);

        if (choice == kAll || choice >> 24 != lane || comes)
            continue;
        terms.partial = gate_partial(a, s, lane, choice & 0xffffff);
        comes = op.members >> lane & 1;
    }
    if (comes) {
        const struct ep_ht_flags *flags = flags_of(a, a.rank, lane);
        const Wait end = wait_for(
            a, op, lane, [&] { return acquire_u64(terms.partial.tag) == op.tag; }, /* partner: push_partial */
            [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });

        if (end == Wait::late)
            miss(a, lane, end, EP_WAIT_ARRIVAL);
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
    if (threadIdx.x % 32 == 0)
        store_row(at, tagged(terms.comes, load_u32(&run_of(a).late), op.tag));
    __syncwarp();
    fence_sys(); /* release; partner: put_boxes */
    if (threadIdx.x % 32 == 0)
        count_item(a, box, s, i);
}

/* A warp takes records that nobody has taken: first ones of all sources first. */
template <class T> __device__ inline void sum_records(const ep_ht_args &a, const Op &op, Ring *ring)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t own = load_u32(&net->relays) >> lane & 1 ? net->handles[a.handle].from[lane] : 0;
    const uint32_t end = __reduce_max_sync(kAll, own) * a.ranks;
    const Box box = sums_of(a);

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&net->next_record);

        if (item >= end)
            break;
        if (item / a.ranks < __shfl_sync(kAll, own, item % a.ranks))
            sum_record<T>(a, op, ring, box, item % a.ranks, item / a.ranks);
    }
}

/* Warp 1 of block 0. */
__device__ inline void put_sums(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x % 32;
    const bool relays = load_u32(&net->relays) >> lane & 1;

    put_boxes(a, op.tag, sums_of(a), lane, relays ? net->handles[a.handle].from[lane] : 0, relays ? box_of(a, lane) : 0,
              box_back(a, lane));
}

/* One thread: what went over the network. */
__device__ inline uint64_t sum_bytes(const ep_ht_args &a)
{
    const struct ep_device_net *net = net_of(a);
    uint64_t sums = 0;

    for (uint32_t s = 0; s < a.ranks; s++)
        sums += (net->relays & ~net->silent) >> s & 1 ? net->handles[a.handle].from[s] : 0;
    return sums * a.row_bytes;
}

constexpr uint64_t kAnswerNs = 20000000; /* and an eighth of the timeout: a gate that waits in vain says for whom */

/* ---- a sum that comes ------------------------------------------------------------------------ */

/* A lane: those are not in a sum that comes, or would have; and of them, who was late. */
__device__ inline void miss_all(const ep_ht_args &a, uint32_t ranks, uint32_t late)
{
#pragma unroll 1
    for (; ranks; ranks &= ranks - 1)
        miss(a, __ffs(ranks) - 1, late >> (__ffs(ranks) - 1) & 1 ? Wait::late : Wait::gone, EP_WAIT_READY);
}

/* Lane g: the sum of gate g's node of token t, of whose choices lane k has one; ranks: that are to be in it.  False: it
 * does not come; who is not in it is missed. */
__device__ inline bool await_sum(const ep_ht_args &a, const Op &op, const Box &box, uint32_t i, uint32_t ranks,
                                 const uint8_t **at)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t gate = threadIdx.x % 32, acting = acts_as(a, gate);
    const uint8_t *sum = item_in(a, box, box_for(a, gate), i);
    const auto there = [&] { return has_come(a, acting, op.tag, step_of_item(box, i)); };
    bool comes = i < net->handles[a.handle].to[gate] && op.members >> acting & 1;

    if (comes && load_u32(&net->lost) >> gate & 1) { /* not to wait for each of its sums */
        comes = there();
    } else if (comes) {
        Op longer = op;

        longer.deadline += load_u64(&run_of(a).timeout_ns) / 8 + kAnswerNs;
        const Wait end = wait_for(a, longer, acting, there, [] { return false; });

        if (end != Wait::there) {
            atomicOr(&net->lost, 1u << gate);
            miss(a, acting, end, EP_WAIT_ARRIVAL);
        }
        comes = end == Wait::there;
    }
    fence_sys(); /* acquire: what was put before it */
    const Vec head = comes ? load_vec(sum) : Vec{ { 0, 0, 0, 0 } };

    comes = comes && tag_of(head) == op.tag;
    miss_all(a, ranks & op.members & ~(comes ? head.w[0] : 0), comes ? head.w[1] : 0);
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
