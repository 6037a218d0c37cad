/* ht_ask.cuh: what is asked of ranks on other nodes, and what their asks say of records that go through this one. */
#ifndef EP_HT_ASK_CUH
#define EP_HT_ASK_CUH

#include "ht_count.cuh"

namespace ep {
namespace ht {

#if EP_LL_NET

/* ---- to them ------------------------------------------------------------------------------ */

/* Are records put to the gate? */
__device__ inline bool is_open_gate(const ep_ht_args &a, uint32_t gate)
{
    const uint32_t acting = acts_as(a, gate);

    return acting != EP_NET_NOBODY && has_now(net_of(a)->open, acting);
}

/* Can rank r, a member, be sent anything?  On another node through this rank's gate there. */
__device__ inline bool is_reached(const ep_ht_args &a, uint32_t r)
{
    return !is_far(a, r) || acts_as(a, gate_of(a, r)) != EP_NET_NOBODY;
}

/* To the node of rank d, as EP_HT_ASK_RECORDS says it. */
__device__ inline uint32_t records_to(const ep_ht_args &a, uint32_t d)
{
    const uint32_t gate = gate_of(a, d);

    return is_far(a, d) ? place_at(a, acts_as(a, gate)) << EP_NET_GATE_SHIFT | a.totals[gate_column(a, gate)] : 0;
}

/* Warp 0 of block 0: those who get records. */
__device__ inline void find_more(const ep_ht_args &a)
{
    struct ep_device_net *net = net_of(a);

#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < net->map.outs; i += 32) {
        const uint32_t gate = net->gates[i], acting = acts_as(a, gate);

        if (acting != EP_NET_NOBODY && a.totals[gate_column(a, gate)] > 0)
            add(net->more, acting);
    }
    __syncwarp();
}

/* Warp 0 of block 0, when all have been asked: whose gates get records. */
__device__ inline void find_through(const ep_ht_args &a)
{
    collect(a, net_of(a)->through, [&](uint32_t r) { return is_far(a, r) && is_open_gate(a, gate_of(a, r)); });
}

/* One thread: the note for rank r, which its warp has written. */
__device__ inline void put_note(const ep_ht_args &a, const Op &op, uint32_t r)
{
    fence_sys(); /* of what all lanes wrote; partner: whoever reads what is put */
    put_ask(a, r, note_vecs(a, kAsk) * sizeof(Vec), op.tag, has_now(net_of(a)->more, r) ? kAsked : kOver);
}

/* One thread: shall it be waited for until rank r can be asked?  Else it is missed. */
__device__ inline bool goes_on(const ep_ht_args &a, const Op &op, uint32_t r)
{
    const bool gone = !present(a, op.number, r) || closed_by(a, r) >= op.tag;

    if (!gone && now_ns() <= op.deadline)
        return true;
    miss(a, r, gone ? Wait::gone : Wait::late, EP_WAIT_READY);
    return false;
}

/*
 * Warp 0 of block 0: asks those that are asked(r), as soon as each can take it and nothing is on its way from where
 * it lies; all lanes write(r) what is asked, and each lane ask(r)s one, as a post takes long.  Who waits here catches up with
 * all, in turn: of three ranks each could wait for the next one's ACK otherwise.
 */
template <class Asked, class Write, class Ask>
__device__ inline void ask_far(const ep_ht_args &a, const Op &op, Asked asked, Write write, Ask ask)
{
    uint32_t look = threadIdx.x;
    bool waits = true;

#pragma unroll 1
    while (__any_sync(kAll, waits)) {
        waits = false;
#pragma unroll 1
        for (uint32_t base = 0; base < a.ranks; base += 32) {
            const uint32_t r = base + threadIdx.x;
            const bool is_due = r < a.ranks && asked(r) && !has_now(net_of(a)->open, r) && !is_missed(a, r);
            const bool can_take = is_due && may_put(a, r);

            waits |= is_due && !can_take && goes_on(a, op, r);
            for (uint32_t ready = __ballot_sync(kAll, can_take); ready; ready &= ready - 1)
                write(base + __ffs(ready) - 1);
            __syncwarp();
            if (can_take) {
                ask(r);
                add(net_of(a)->open, r);
            }
        }
        const uint32_t other = look++ % a.ranks;

        if (waits && is_far(a, other))
            catch_up(a, other, op.tag);
    }
}

/* ---- of them ------------------------------------------------------------------------------- */

__device__ inline void keep_records(const ep_ht_args &a, uint32_t s, uint32_t value)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t place = value >> EP_NET_GATE_SHIFT;
    const uint32_t gate = place < net->nears ? net->near[place] : EP_NET_NOBODY;

    if (!is_far(a, s)
        || find_acting(a, net->gate_here[s], [&](uint32_t rank) { return rank == gate; }).rank == EP_NET_NOBODY)
        return;
    store_u32(&net->via[s], gate);
    if (gate == a.rank)
        net->records[s] = min(value & ((1u << EP_NET_GATE_SHIFT) - 1), a.max_tokens);
}

/* Warp 0 of block 0: those that go through(r) here are the ranks of net->relays. */
template <class Through> __device__ inline void list_relays(const ep_ht_args &a, Through through)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t lane = threadIdx.x, fars = a.ranks - net->nears;
    uint32_t n = 0;

#pragma unroll 1
    for (uint32_t base = 0; base < fars; base += 32) {
        const uint32_t r = net->order[min(base + lane, fars - 1)];
        const uint32_t ranks = __ballot_sync(kAll, base + lane < fars && through(r));

        if (ranks >> lane & 1)
            net->relays[n + __popc(ranks & ((1u << lane) - 1))] = r;
        n += __popc(ranks);
    }
    if (lane == 0)
        net->relaying = n;
    __syncwarp();
}

/* Whose records go first: those that the next node's ranks get, or those that the node before this one sends. */
enum class Order { to_next, from_last };

/* A warp takes records that nobody has taken, of those of which rank s has n(s), rank by rank.  fn(s, record). */
template <Order kOrder, class N, class Fn> __device__ inline void each_relayed(const ep_ht_args &a, N n, Fn fn)
{
    struct ep_device_net *net = net_of(a);
    uint32_t before = 0; /* records of ranks before */
    uint32_t item = take_work(&net->next_record);

#pragma unroll 1
    for (uint32_t k = 0; k < net->relaying; k++) {
        const uint32_t s = net->relays[kOrder == Order::to_next ? k : net->relaying - 1 - k], own = n(s);

#pragma unroll 1
        for (; item - before < own; item = take_work(&net->next_record))
            fn(s, item - before);
        before += own;
    }
}

/* Warp 0 of block 0: this rank may write to those of its node what comes of ranks whose gate it is. */
__device__ inline void announce_relays(const ep_ht_args &a, const Op &op, const uint32_t *given)
{
    const struct ep_device_net *net = net_of(a);

    list_relays(a, [&](uint32_t r) { return has(given, r) && is_far(a, r) && via(a, r) == a.rank; });
    each_near(a, [&](uint32_t r) {
        for (uint32_t i = 0; has(op.members, r) && i < net->relaying; i++)
            store_u64(&flags_of(a, r, net->relays[i])->begun, op.tag);
    });
    fence_total(); /* partner: close */
    __syncwarp();
}

#else

__device__ inline bool is_reached(const ep_ht_args &, uint32_t) { return true; }
__device__ inline uint32_t records_to(const ep_ht_args &, uint32_t) { return 0; }
__device__ inline void find_more(const ep_ht_args &) {}
__device__ inline void find_through(const ep_ht_args &) {}
template <class Asked, class Write, class Ask>
__device__ inline void ask_far(const ep_ht_args &, const Op &, Asked, Write, Ask) {}
__device__ inline void put_note(const ep_ht_args &, const Op &, uint32_t) {}
__device__ inline void keep_records(const ep_ht_args &, uint32_t, uint32_t) {}
__device__ inline void announce_relays(const ep_ht_args &, const Op &, const uint32_t *) {}

#endif

} // namespace ht
} // namespace ep

#endif
