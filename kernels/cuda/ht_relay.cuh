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

    if (threadIdx.x % 32 == 0 && !(missed(a) >> s & 1)) {
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

__device__ inline Choice choice_of(const ep_ht_args &a, const uint8_t *record)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane >= a.max_top_k)
        return { -1, 0, 0, 0 };
    const Vec v = load_row(record + sizeof(struct ep_net_record) + lane * sizeof v);

    return { (int32_t)v.w[0], __uint_as_float(v.w[1]), v.w[2], v.w[3] };
}

/* For the combine. */
__device__ inline void keep_relayed(const ep_ht_args &a, uint32_t s, uint32_t i, const Choice &c)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane < a.max_top_k)
        relayed_of(a, a.handle, box_of(a, s))[(uint64_t)i * a.max_top_k + lane] =
            c.route >= 0 ? rank_of(c.route) << 24 | c.slot : kNoSlot;
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
    const Token token = find_token(a, g, t, a.max_top_k, choice, &refused);
    const uint32_t to = open_of(a, op, token.to & g.mask);
    const uint32_t room = __ballot_sync(kAll, to >> lane & 1 && g.bits[lane] & EP_HT_GRANT_ROOM);
    const uint32_t unsent = refused | (token.to & ~to);
    const uint8_t *row = record + ep_net_record_head(a.max_top_k);

    if (unsent && lane == 0)
        atomicOr(&net_of(a)->unsent[s], unsent);
    push_plain(a, row, row + a.row_bytes, token, room);
    push_headers(a, op, g, token, to);
}

/* Record i of rank s. */
__device__ inline void relay_record(const ep_ht_args &a, const Op &op, const Box &box, uint32_t s, uint32_t i)
{
    const Grants &g = net_table<struct ep_net_grants>(a, net_of(a)->grants)[box_of(a, s)];
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
#pragma unroll 1
    for (uint32_t rest = net->relays; rest; rest &= rest - 1) {
        const uint32_t s = __ffs(rest) - 1, unsent = load_u32(&net->unsent[s]);

        if (lane < a.ranks && (op.members & ~far_of(a)) >> lane & 1) {
            struct ep_ht_flags *flags = flags_of(a, lane, s);

            store_u64(unsent >> lane & 1 ? &flags->ceased : &flags->done, op.tag);
        }
    }
    __syncwarp();
}

/* A warp takes records that nobody has taken: first ones of all sources first, as these come first. */
__device__ inline void relay_records(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x % 32, relays = load_u32(&net->relays);
    const uint32_t own = relays >> lane & 1 ? load_u32(&net->records[lane]) : 0;
    const uint32_t end = __reduce_max_sync(kAll, own) * a.ranks;
    const Box box = records_of(a);

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&net->next_record);

        if (item >= end)
            break;
        if (item / a.ranks < __shfl_sync(kAll, own, item % a.ranks))
            relay_record(a, op, box, item % a.ranks, item / a.ranks);
    }
    relayed(a, op);
}

/* ---- own records ---------------------------------------------------------------------------------- */

/* Warp 1 of block 0: what the others write to this rank's boxes goes out as it gets complete. */
__device__ inline void put_records(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x % 32;
    const bool sends = open_gates(a) >> lane & 1;

    put_boxes(a, op.tag, records_of(a), sends ? acts_as(a, lane) : 0, sends ? a.totals[gate_column(a, lane)] : 0,
              box_for(a, lane), box_at(a, lane));
}

/* One thread, at the end. */
__device__ inline void keep_handle(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    struct ep_net_handle *h = &net->handles[a.handle];
    const uint32_t gates = op.status == EP_OK ? open_gates(a) : 0;

    if (op.status == EP_STALE_HANDLE) /* what it has is of another dispatch, whose combines need it */
        return;

    for (uint32_t r = 0; r < a.ranks; r++) {
        h->to[r] = gates >> r & 1 ? a.totals[gate_column(a, r)] : 0;
        h->from[r] = net->relays >> r & 1 ? net->records[r] : 0;
        h->acts[r] = (uint8_t)net->acts[r];
        h->via[r] = (uint8_t)net->via[r];
    }
}

/* And what went over the network in a dispatch that took place. */
__device__ inline uint64_t wire_bytes(const ep_ht_args &a)
{
    const struct ep_device_net *net = net_of(a);
    uint64_t records = 0;

    for (uint32_t r = 0; r < a.ranks; r++)
        records += net->handles[a.handle].to[r];
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
__device__ inline void put_records(const ep_ht_args &, const Op &) {}
__device__ inline void keep_handle(const ep_ht_args &, const Op &) {}
__device__ inline uint64_t wire_bytes(const ep_ht_args &) { return 0; }

} // namespace relay
} // namespace ht
} // namespace ep

#endif

#endif
