/*
 * ll_net.cuh: ranks on other nodes.
 *
 * kNet (ranks.cuh) says whether there can be any; kernels for groups of one node are compiled without, and all of
 * this is nothing there.  The window of a rank d on another node ("far") is, for stores, this rank's outbox
 * (device_net.h), so pushing is the same for all ranks.  The last block that has pushed puts what is for d, one piece of
 * each kind, as a put costs as much as a small kernel; then it raises a signal at d.
 *
 * The partial of row (s, slot) lies in region s by its slot when s is far, and not by its token, as beside each other
 * are the few of s's tokens that came here.  s has kept which slot it gave to which choice (keep_slot).
 *
 * ## Signals
 * A signal is seen after all puts that its raiser put to the same rank before, and after the signals that it raised there;
 * puts themselves may land in any order, and an early one after a late one.  Each signal carries a number of LL and only
 * grows, as whoever raises it remembers in `told` what it has told: it adds the difference.
 *   SENT(b, s)    the dispatch of that number, which has bank b, has come from s: counts, headers, scales and rows.
 *                 Nothing of a far source is looked at before.
 *   CREDIT(b, d)  d will not read that number's rows any more; its rows and partials have come, if there are any.
 *   ACK(b, d)     CREDIT, and d has seen SENT of this rank to be that far: whatever this rank had put to d until then
 *                 in bank b has landed.
 *
 * ## Why memory is not reused too early
 * What ll_device.cuh says of banks holds, with CREDIT or ACK for the credits, and from[d] in place of a credit does not
 * do: a rank that has joined gives credits for numbers that it did not take part in, when it begins the bank's next one.
 * Beyond that the outbox, and the region at d, must not be written while an earlier put is under way from the one to
 * the other.  It would carry the wrong rows, or land on the right ones.
 *   rows        n is pushed to d in bank b when ACK(b, d) is no less than the last number that was put to d there.
 *               Mostly that is the credit for n - B.  When d went on without us, as we were late or had left, it gave a
 *               CREDIT only, and our puts may be under way for as long as they like.  d looks at SENT again whenever it
 *               waits (catch_up) and then gives the ACK.  Two ranks that wait for each other's ACK both look.
 *   partials    of n to s are pushed when n's header of s has come.  s has sent that after it had CREDIT(b, own rank)
 *               for n - B or later, which was raised after the partials of that number, and of all before, were put.
 *
 * ## Who takes part
 * Blocks raise `begun`, then wait as long as the server holds dispatches (`held`), and then read `from`, once.  The
 * server holds, then reads `begun`; it writes `from` before it ends the hold.  So whoever joins at n is seen by all
 * blocks of n, or n has begun and was not chosen.  (Joining is rare here and agreed upon between servers, so that it
 * may cost a wait, and a dispatch is put once.)  A rank that leaves is missed, as on one node: what its blocks did not
 * push has an old number, in the outbox as in the window, whatever else of its dispatch was put.
 *
 * ## Bounds
 * Waits for signals are waits like others.  To put or to raise takes a place in a queue of the peer's, of some 1024,
 * which wait without a bound for one.  A peer that is there frees them; one that does not answer gets nothing that
 * needs an answer first, and that is all but one credit for each op that has waited for it in vain.  One that has left
 * gets nothing.
 */
#ifndef EP_LL_NET_CUH
#define EP_LL_NET_CUH

#include "ranks.cuh"

#if EP_LL_NET

#include "gin.cuh"

namespace ep {

constexpr uint64_t kMostHeld = 4000000000ull; /* ns: a server holds for less, and ends it itself */

/* ---- signals ------------------------------------------------------------------------ */

__device__ inline uint64_t told_by(const ep_ll_args &a, uint32_t kind, uint32_t bank, uint32_t rank)
{
    return gin_signal(net_of(a), ep_net_signal_of(a.ranks, kind, bank, rank));
}

/* Its signal at `rank` becomes n, unless it is that far: what is to be added. */
__device__ inline uint64_t next_told(const ep_ll_args &a, uint32_t kind, uint32_t bank, uint32_t rank, uint64_t n)
{
    uint64_t *told = &net_of(a)->told[kind][bank][rank];
    const uint64_t before = atomicMax((unsigned long long *)told, (unsigned long long)n);

    return before < n ? n - before : 0;
}
__device__ inline void tell(const ep_ll_args &a, uint32_t kind, uint32_t bank, uint32_t rank, uint64_t n)
{
    const uint64_t more = next_told(a, kind, bank, rank, n);

    if (more)
        gin_raise(net_of(a), rank, ep_net_signal_of(a.ranks, kind, bank, a.rank), more);
}

__device__ inline uint64_t last_told(const ep_ll_args &a, uint32_t kind, uint32_t bank, uint32_t rank)
{
    return load_u64(&net_of(a)->told[kind][bank][rank]);
}

/* The last number of the bank that the rank has released. */
__device__ inline uint64_t released_by(const ep_ll_args &a, uint32_t bank, uint32_t rank)
{
    return max(told_by(a, EP_NET_CREDIT, bank, rank), told_by(a, EP_NET_ACK, bank, rank));
}

/* May number n be pushed to the rank? */
__device__ inline bool has_room(const ep_ll_args &a, uint64_t n, uint32_t bank, uint32_t rank)
{
    const uint64_t ack = told_by(a, EP_NET_ACK, bank, rank);

    if (n <= a.banks)
        return true;
    return ack >= last_told(a, EP_NET_SENT, bank, rank)
           && max(ack, told_by(a, EP_NET_CREDIT, bank, rank)) >= n - a.banks;
}

/* Number m of the bank is read no more.  Who is absent hears of it when it is back and the bank's next number begins. */
__device__ inline void release_to(const ep_ll_args &a, uint32_t bank, uint32_t rank, uint64_t m)
{
    if (load_u64(&a.state->from[rank]) == EP_DEVICE_NEVER)
        return;
    const uint64_t come = min(told_by(a, EP_NET_SENT, bank, rank), m);

    tell(a, EP_NET_ACK, bank, rank, come);
    if (come < m)
        tell(a, EP_NET_CREDIT, bank, rank, m);
}

/* What was released and had not come may have come by now. */
__device__ inline void catch_up(const ep_ll_args &a, uint32_t rank)
{
#pragma unroll 1
    for (uint32_t bank = 0; bank < a.banks; bank++) {
        const uint64_t credit = last_told(a, EP_NET_CREDIT, bank, rank);

        if (credit > last_told(a, EP_NET_ACK, bank, rank))
            tell(a, EP_NET_ACK, bank, rank, min(told_by(a, EP_NET_SENT, bank, rank), credit));
    }
}

/* ---- puts ----------------------------------------------------------------------------- */

/* The first n items of a region, of those that are for rank d. */
__device__ inline void put_items(const ep_ll_args &a, uint64_t bank, uint64_t region, uint32_t d, uint32_t item_bytes,
                                 uint32_t n)
{
    const uint64_t share = (uint64_t)a.max_tokens * item_bytes, at = bank + region;

    if (n)
        gin_put(net_of(a), d, net_of(a)->window, at + a.rank * share, at - a.ll + d * share, (uint64_t)n * item_bytes);
}

/* Which slot choice i of the batch has at its rank, for the combine. */
__device__ inline uint32_t *kept_slots(const ep_ll_args &a)
{
    const struct ep_net_tables &tables = net_of(a)->tables;

    return (uint32_t *)((uint8_t *)net_of(a) + tables.ll_slots + a.handle * tables.ll_slots_stride);
}
__device__ inline void keep_slot(const ep_ll_args &a, uint32_t i, uint32_t slot) { kept_slots(a)[i] = slot; }
__device__ inline uint32_t kept_slot(const ep_ll_args &a, uint32_t i) { return kept_slots(a)[i]; }

/* All that is for rank d, `share` bytes; and then SENT is n, which it was not. */
__device__ inline void put_and_tell(const ep_ll_args &a, uint64_t bank_at, uint64_t region, uint32_t d, uint64_t share,
                                    uint32_t bank, uint64_t n)
{
    const uint64_t at = bank_at + region;

    gin_put_raise(net_of(a), d, net_of(a)->window, at + a.rank * share, at - a.ll + d * share, share,
                  ep_net_signal_of(a.ranks, EP_NET_SENT, bank, a.rank), next_told(a, EP_NET_SENT, bank, d, n));
}

/* ---- beginning -------------------------------------------------------------------------- */

/* Warp 0: number n is begun, and nobody is about to join it. */
__device__ inline void begin_held(const ep_ll_args &a, uint64_t n)
{
    if (threadIdx.x == 0) {
        const uint64_t until = now_ns() + kMostHeld;

        atomicMax((unsigned long long *)&a.state->begun, (unsigned long long)n);
        fence_total(); /* Dekker; partner: the server, which writes `held` and reads `begun` */
        while (load_u64(&a.state->held) && now_ns() < until)
            ;
        fence_sys(); /* acquire: `from` as it was when the hold ended */
    }
    __syncwarp();
}

} // namespace ep

#else

namespace ep {

__device__ inline uint64_t told_by(const ep_ll_args &, uint32_t, uint32_t, uint32_t) { return 0; }
__device__ inline uint64_t released_by(const ep_ll_args &, uint32_t, uint32_t) { return 0; }
__device__ inline bool has_room(const ep_ll_args &, uint64_t, uint32_t, uint32_t) { return true; }
__device__ inline void release_to(const ep_ll_args &, uint32_t, uint32_t, uint64_t) {}
__device__ inline void catch_up(const ep_ll_args &, uint32_t) {}
__device__ inline void put_items(const ep_ll_args &, uint64_t, uint64_t, uint32_t, uint32_t, uint32_t) {}
__device__ inline void keep_slot(const ep_ll_args &, uint32_t, uint32_t) {}
__device__ inline uint32_t kept_slot(const ep_ll_args &, uint32_t) { return 0; }
__device__ inline void put_and_tell(const ep_ll_args &, uint64_t, uint64_t, uint32_t, uint64_t, uint32_t, uint64_t) {}
__device__ inline void begin_held(const ep_ll_args &, uint64_t) {}
enum { EP_NET_SENT, EP_NET_CREDIT, EP_NET_ACK };

} // namespace ep

#endif

namespace ep {

/* Whoever waits for a rank that is far looks whether this one can tell it more; never gives up. */
__device__ inline bool looks_back(const ep_ll_args &a, uint32_t rank, bool far)
{
    if (far)
        catch_up(a, rank);
    return false;
}

/* Which region of a bank this rank writes, of those that window[d] leads to. */
__device__ inline uint32_t region_at(const ep_ll_args &a, uint32_t d) { return is_far(a, d) ? d : a.rank; }

} // namespace ep

#endif
