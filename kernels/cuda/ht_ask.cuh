/* ht_ask.cuh: what is asked of ranks on other nodes, and what their asks say of records that go through this one. */
#ifndef EP_HT_ASK_CUH
#define EP_HT_ASK_CUH

#include "ht_count.cuh"

namespace ep {
namespace ht {

#if EP_LL_NET

/* ---- to them ------------------------------------------------------------------------------ */

/* Mask: gates that records are put to; of the members, who is on their nodes. */
__device__ inline uint32_t open_gates(const ep_ht_args &a)
{
    const uint32_t open = load_u32(&net_of(a)->open);
    uint32_t gates = 0;

#pragma unroll 1
    for (uint32_t rest = gates_of(a, far_of(a)); rest; rest &= rest - 1) {
        const uint32_t gate = __ffs(rest) - 1, acting = acts_as(a, gate);

        gates |= (uint32_t)(acting != EP_NET_NOBODY && open >> acting & 1) << gate;
    }
    return gates;
}
__device__ inline uint32_t far_through(const ep_ht_args &a, uint32_t members, uint32_t gates)
{
    uint32_t through = 0;

#pragma unroll 1
    for (uint32_t rest = members & far_of(a); rest; rest &= rest - 1) {
        const uint32_t r = __ffs(rest) - 1;

        through |= (gates >> gate_of(a, r) & 1) << r;
    }
    return through;
}

/* Mask: what is sent to a rank of another node goes through this rank's gate there. */
__device__ inline uint32_t reached_of(const ep_ht_args &a, uint32_t members)
{
    uint32_t gates = 0;

#pragma unroll 1
    for (uint32_t rest = gates_of(a, far_of(a)); rest; rest &= rest - 1)
        gates |= (uint32_t)(acts_as(a, __ffs(rest) - 1) != EP_NET_NOBODY) << (__ffs(rest) - 1);
    return (members & ~far_of(a)) | far_through(a, members, gates);
}

/* To the node of rank d, as EP_HT_ASK_RECORDS says it. */
__device__ inline uint32_t records_to(const ep_ht_args &a, uint32_t d)
{
    const uint32_t gate = gate_of(a, d);

    return far_of(a) >> d & 1 ? acts_as(a, gate) << EP_NET_GATE_SHIFT | a.totals[gate_column(a, gate)] : 0;
}

/* Mask: who gets any. */
__device__ inline uint32_t has_records(const ep_ht_args &a, uint32_t reached)
{
    uint32_t gates = 0;

#pragma unroll 1
    for (uint32_t rest = gates_of(a, reached); rest; rest &= rest - 1) {
        const uint32_t gate = __ffs(rest) - 1;

        gates |= (uint32_t)(a.totals[gate_column(a, gate)] > 0) << acts_as(a, gate);
    }
    return gates;
}

/* Warp 0 of block 0, lane r of rank r: the notes for these ranks, as soon as each can take it, and nothing is on its way
 * from where it lies; write(r) writes so many bytes; more: to whom something else is put in this op.  Who waits here
 * catches up with all, in turn: of three ranks each could wait for the next one's ACK otherwise. */
template <class Write>
__device__ inline void ask_far(const ep_ht_args &a, const Op &op, uint32_t ranks, uint32_t bytes, uint32_t more,
                               Write write)
{
    const uint32_t r = threadIdx.x;
    struct ep_device_net *net = net_of(a);
    uint32_t look = r;
    const auto put = [&] {
        if (!may_put(a, r)) {
            const uint32_t other = look++ % a.ranks;

            if (far_of(a) >> other & 1)
                catch_up(a, other, op.tag);
            return false;
        }
        store_u64(&net->ht_last[r], op.tag);
        write(r);
        fence_sys(); /* partner: whoever reads what is put */
        put_ask(a, r, bytes);
        tell_step(a, r, op.tag, more >> r & 1 ? kAsked : kOver);
        return true;
    };

    if (ranks >> r & 1) {
        const Wait end = wait_for(a, op, r, put, [] { return false; });

        if (end == Wait::there)
            atomicOr(&net->open, 1u << r);
        else
            miss(a, r, end, EP_WAIT_READY);
    }
    __syncwarp();
}

/* ---- of them ------------------------------------------------------------------------------- */

__device__ inline void keep_records(const ep_ht_args &a, uint32_t s, uint32_t value)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t gate = value >> EP_NET_GATE_SHIFT, home = net->gate_here[s];

    if (!(far_of(a) >> s & 1) || (gate != home && gate != net->next[home]))
        return;
    store_u32(&net->via[s], gate);
    if (gate == a.rank)
        net->records[s] = min(value & ((1u << EP_NET_GATE_SHIFT) - 1), a.max_tokens);
}

/* Warp 0 of block 0: this rank may write to those of its node what comes of ranks whose gate it is. */
__device__ inline void announce_relays(const ep_ht_args &a, const Op &op, uint32_t given)
{
    const uint32_t lane = threadIdx.x;
    const bool relays = (given & far_of(a)) >> lane & 1 && via(a, lane) == a.rank;
    const uint32_t mask = __ballot_sync(kAll, relays);

#pragma unroll 1
    for (uint32_t rest = mask; rest; rest &= rest - 1)
        if ((op.members & ~far_of(a)) >> lane & 1)
            store_u64(&flags_of(a, lane, __ffs(rest) - 1)->begun, op.tag);
    if (lane == 0)
        net_of(a)->relays = mask;
    fence_total(); /* partner: close */
    __syncwarp();
}

#else

__device__ inline uint32_t reached_of(const ep_ht_args &, uint32_t members) { return members; }
__device__ inline uint32_t open_gates(const ep_ht_args &) { return 0; }
__device__ inline uint32_t far_through(const ep_ht_args &, uint32_t, uint32_t) { return 0; }
__device__ inline uint32_t records_to(const ep_ht_args &, uint32_t) { return 0; }
__device__ inline uint32_t has_records(const ep_ht_args &, uint32_t) { return 0; }
template <class Write>
__device__ inline void ask_far(const ep_ht_args &, const Op &, uint32_t, uint32_t, uint32_t, Write) {}
__device__ inline void keep_records(const ep_ht_args &, uint32_t, uint32_t) {}
__device__ inline void announce_relays(const ep_ht_args &, const Op &, uint32_t) {}

#endif

} // namespace ht
} // namespace ep

#endif
