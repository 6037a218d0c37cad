/*
 * ht_relay.cuh: a gate's work in a dispatch: records of ranks on other nodes become rows of the ranks of this one, each
 * where it was granted a place (ht_net.cuh).
 */
#ifndef EP_HT_RELAY_CUH
#define EP_HT_RELAY_CUH

#include "ht_push.cuh"

#if EP_LL_NET

namespace ep {
namespace ht {
namespace relay {

constexpr uint32_t kNoSlot = 0xffffffffu; /* of a choice that is not on this node */

/* ---- a record --------------------------------------------------------------------------- */

/* A warp: record i of rank s, when it has come.  NULL: it does not. */
__device__ inline const uint8_t *await_record(const ep_ht_args &a, const Op &op, const Box &box, uint32_t s, uint32_t i)
{
    const uint8_t *at = item_in(a, box, box_of(a, s), i);
    bool there = false;

    if (threadIdx.x % 32 == 0 && !is_missed(a, s)) {
        const Wait end = wait_for(a, op, s, [&] { return has_come(a, s, op.tag, step_of_item(box, i)); },
                                  [] { return false; });

        if (end != Wait::there)
            miss(a, s, end, EP_WAIT_ARRIVAL);
        fence_sys(); /* acquire: what was put before it */
        there = end == Wait::there && tag_of(load_vec(at)) == op.tag;
    }
    __syncwarp(); /* what lane 0 has acquired is there for all */
    return __shfl_sync(kAll, there, 0) ? at : nullptr;
}

/* Does it lead to an expert of this node?  What the network brings is not believed. */
__device__ inline bool leads_here(const ep_ht_args &a, const Choice &c)
{
    return c.route >= 0 && rank_of(c.route) < a.ranks && !is_far(a, rank_of(c.route))
           && (c.route & 0xffff) < a.local_experts && c.slot < a.max_tokens;
}

__device__ inline Choice choice_of(const ep_ht_args &a, const uint8_t *record)
{
    const uint32_t lane = threadIdx.x % 32;
    const Choice none = { -1, 0, 0, 0 };

    if (lane >= a.max_top_k)
        return none;
    const Vec v = load_row(record + sizeof(struct ep_net_record) + lane * sizeof v);
    const Choice c = { (int32_t)v.w[0], __uint_as_float(v.w[1]), v.w[2], v.w[3] };

    return leads_here(a, c) ? c : none;
}

/* For the combine. */
__device__ inline void keep_relayed(const ep_ht_args &a, uint32_t s, uint32_t i, const Choice &c)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane < a.max_top_k)
        relayed_of(a, a.handle, box_of(a, s))[(uint64_t)i * a.max_top_k + lane] =
            c.route >= 0 ? place_at(a, rank_of(c.route)) << 24 | c.slot : kNoSlot;
}

__device__ inline void forget_relayed(const ep_ht_args &a, uint32_t s, uint32_t i)
{
    keep_relayed(a, s, i, { -1, 0, 0, 0 });
}

/* ---- its row ------------------------------------------------------------------------------ */

__device__ inline void push_record(const ep_ht_args &a, const Op &op, const Grants &g, uint32_t s, const uint8_t *record,
                                   const Choice &choice)
{
    uint32_t refused;
    const uint32_t lane = threadIdx.x % 32, t = load_row(record).w[0];
    const Token token = find_token(a, g, t, choice, &refused);
    const uint32_t to = open_of(a, op, token);
    const uint8_t *row = record + ep_net_record_head(a.max_top_k);

    if ((refused | (token.firsts & ~to)) >> lane & 1)
        atomicOr(&net_of(a)->unsent[s], 1u << place_at(a, token.rank));
    push_plain(a, row, row + a.row_bytes, token, roomy_of(a, g, token, to));
    push_headers(a, op, g, token, to);
}

/* Record i of rank s. */
__device__ inline void relay_record(const ep_ht_args &a, const Op &op, const Box &box, uint32_t s, uint32_t i)
{
    const Grants &g = net_table<struct ep_net_grants>(a, net_of(a)->tables.grants)[box_of(a, s)];
    const uint8_t *record = await_record(a, op, box, s, i);

    if (!record) {
        forget_relayed(a, s, i);
        if (threadIdx.x % 32 == 0)
            atomicOr(&net_of(a)->unsent[s], kAll);
        return;
    }
    const Choice choice = choice_of(a, record);

    keep_relayed(a, s, i, choice);
    push_record(a, op, g, s, record, choice);
}

/* ---- all records ------------------------------------------------------------------------------ */

/* A warp that relays no more, and whose rows are fenced.  The last one tells who got all of whom. */
__device__ inline void relayed(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0;

    __syncwarp();
    if (lane == 0)
        before = count_acq_rel(&net->relayed_by);
    if (__shfl_sync(kAll, before, 0) != a.blocks * kWarps - 1)
        return;
    fence_sys(); /* release; partner: arrived, drain */
    each_near(a, [&](uint32_t r) {
        for (uint32_t i = 0; has(op.members, r) && i < net->relaying; i++) {
            struct ep_ht_flags *flags = flags_of(a, r, net->relays[i]);

            store_u64(load_u32(&net->unsent[net->relays[i]]) >> lane & 1 ? &flags->ceased : &flags->done, op.tag);
        }
    });
    __syncwarp();
}

/* A warp takes records that nobody has taken. */
__device__ inline void relay_records(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);
    const Box box = records_of(a);

    each_relayed<Order::from_last>(a, [&](uint32_t s) { return net->records[s]; },
                                   [&](uint32_t s, uint32_t i) { relay_record(a, op, box, s, i); });
    relayed(a, op);
}

/* ---- the end --------------------------------------------------------------------------------------- */

/* A warp, at the end. */
__device__ inline void keep_handle(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);
    struct ep_net_way *ways = ways_of(a, a.handle);

    if (op.status == EP_STALE_HANDLE) /* what it has is of another dispatch, whose combines need it */
        return;
    each_rank(a, [&](uint32_t r) {
        const bool gets = op.status == EP_OK && is_far(a, r) && gate_of(a, r) == r && is_open_gate(a, r);

        ways[r] = { gets ? a.totals[gate_column(a, r)] : 0, 0, net->acts[r], net->via[r] };
    });
    __syncwarp();
    for (uint32_t i = threadIdx.x % 32; i < net->relaying; i += 32)
        ways[net->relays[i]].from = net->records[net->relays[i]];
    __syncwarp();
}

/* A lane's part of what went over the network in a dispatch that took place. */
__device__ inline uint64_t wire_bytes(const ep_ht_args &a)
{
    const struct ep_net_way *ways = ways_of(a, a.handle);
    uint64_t records = 0;

    each_rank(a, [&](uint32_t r) { records += ways[r].to; });
    return records * (a.row_bytes + a.row_scales * a.scale_bytes);
}

} // namespace relay
} // namespace ht
} // namespace ep

#else

namespace ep {
namespace ht {
namespace relay {

__device__ inline void relayed(const ep_ht_args &, const Op &) {}
__device__ inline void relay_records(const ep_ht_args &, const Op &) {}
__device__ inline void keep_handle(const ep_ht_args &, const Op &) {}
__device__ inline uint64_t wire_bytes(const ep_ht_args &) { return 0; }

} // namespace relay
} // namespace ht
} // namespace ep

#endif

#endif
