/*
 * ll_net.cuh: ranks on other nodes.
 *
 * kNet (ranks.cuh) says whether there can be any; kernels for groups of one node are compiled without, and all of
 * this is nothing there.  For a rank d on another node ("far") a dispatch writes rows, headers, scales and counts into a
 * box (device_net.h), and the last block that has pushed puts it into d's box of this rank, in one piece, as a put costs
 * as much as a small kernel; with it comes a signal.  Rank-major rows are moved from there to where those of near ranks
 * are pushed; others are read where they are.
 *
 * d's combine writes partials in place of the rows, in the same box, which is put back to where it came from.  So a
 * partial lies by its row's slot, and not by its token; s has kept which slot it gave to which choice (keep_slot).
 *
 * ## Signals
 * A signal is seen after all puts that its raiser put to the same rank before; puts themselves may land in any order, and
 * so may signals be seen.  Each carries a number of LL and only grows, as whoever raises it remembers in `told` what it has
 * told: it adds the difference.
 *   SENT(b, s)    the dispatch of that number, which has bank b, has come from s: counts, headers, scales and rows.
 *                 Nothing of a far source is looked at before, unless s has released the number: then it is there too, or
 *                 s went on without us.
 *   CREDIT(b, d)  d will not read that number's rows any more; its rows and partials have come, if there are any.
 *   ACK(b, d)     CREDIT, and d has seen SENT of this rank to be that far: whatever this rank had put to d until then
 *                 in bank b has landed.
 *
 * ## Why memory is not reused too early
 * What ll_device.cuh says of banks holds, with CREDIT or ACK for the credits, and from[d] in place of a credit does not
 * do: a rank that has joined gives credits for numbers that it did not take part in, when it begins the bank's next one.
 * Beyond that neither box of a pair, s's for d and d's of s, must be written while an earlier put is under way from the
 * one to the other.  It would carry the wrong rows, or land on the right ones.
 *   rows        n is pushed to d in bank b when ACK(b, d) is no less than the last number that was put to d there.
 *               Mostly that is the credit for n - B.  When d went on without us, as we were late or had left, it gave a
 *               CREDIT only, and our puts may be under way for as long as they like.  d looks at SENT again whenever it
 *               waits, for whomever (looks_back), and then gives the ACK.  Ranks that wait for each other's ACK all look.
 *               Partials of an earlier number are not under way either: they come before the ACK or CREDIT for it, and
 *               one for n - B or later has come.
 *   partials    of n to s are pushed when n's rows of s have come, all in one put, so that is over.  s has sent them after
 *               it had the ACK or CREDIT for n - B or later, which was raised after the partials of that number, and of all
 *               before, were put.
 *
 * ## Who takes part
 * Blocks raise `begun`, then wait as long as the server holds dispatches (`held`), and then read `from`, once.  The
 * server holds, then reads `begun`; it writes `from` before it ends the hold.  So whoever joins at n is seen by all
 * blocks of n, or n has begun and was not chosen.  (Joining is rare here and agreed upon between servers, so that it
 * may cost a wait, and a dispatch is put once.)  A rank that leaves is missed, as on one node: what its blocks did not
 * push has an old number, in the one box as in the other, whatever else of its dispatch was put.
 *
 * ## Bounds
 * Waits for signals are waits like others.  To put or to raise takes a place in a queue of the peer's, of some 1024,
 * which wait without a bound for one.  A peer that is there frees them; one that does not answer gets nothing that
 * needs an answer first, and that is all but one credit for each op that has waited for it in vain.  One that has left
 * gets nothing.
 *
 * tests/model/ll_net.pml goes through all this with two and three ranks, and breaks the rules one by one.
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

/* ---- boxes ----------------------------------------------------------------------------- */

/* Offset, in the memory beside a window, of the counts in a box of rank r. */
__device__ inline uint64_t box_offset(const ep_ll_args &a, uint64_t boxes, uint32_t bank, uint32_t r)
{
    const struct ep_net_map &m = net_of(a)->map;

    return boxes + ((uint64_t)bank * a.ranks + r) * m.ll_box_bytes + m.ll_middle;
}

/* This rank's box of what s sends to d and gets back of it, one of which is this rank: where the counts are. */
__device__ inline uint8_t *box_at(const ep_ll_args &a, uint32_t bank, uint32_t s, uint32_t d)
{
    const struct ep_device_net *net = net_of(a);
    const bool out = s == a.rank;

    return (uint8_t *)net->at[a.rank] + box_offset(a, out ? net->map.ll_out : net->map.ll_in, bank, out ? d : s);
}
__device__ inline uint32_t *number_in(const ep_ll_args &a, uint8_t *box, uint32_t slot)
{
    return &((struct ep_net_head *)(box - (uint64_t)(slot + 1) * net_of(a)->map.ll_head_bytes))->number;
}
__device__ inline uint8_t *header_in(const ep_ll_args &a, uint8_t *box, uint32_t slot)
{
    return (uint8_t *)number_in(a, box, slot) + sizeof(struct ep_net_head);
}
__device__ inline uint8_t *scales_in(const ep_ll_args &a, uint8_t *box, uint32_t slot)
{
    return header_in(a, box, slot) + a.header_bytes;
}
/* Of rows, or of partials instead. */
__device__ inline uint8_t *row_in(const ep_ll_args &a, uint8_t *box, uint32_t slot)
{
    return box + net_of(a)->map.ll_rows + (uint64_t)slot * a.row_bytes;
}

/* One thread: that box, with so many rows or partials; and then this rank's signal at the other one is n. */
__device__ inline void put_box(const ep_ll_args &a, uint32_t bank, uint32_t s, uint32_t d, uint32_t rows,
                               enum ep_net_signal kind, uint64_t n)
{
    struct ep_device_net *net = net_of(a);
    const struct ep_net_map &m = net->map;
    const bool out = s == a.rank;
    const uint32_t peer = out ? d : s;
    const uint64_t from = box_offset(a, out ? m.ll_out : m.ll_in, bank, peer);
    const uint64_t to = box_offset(a, out ? m.ll_in : m.ll_out, bank, a.rank);
    const uint64_t heads = (uint64_t)rows * m.ll_head_bytes;

    gin_put_raise(net, peer, to - heads, from - heads, heads + m.ll_rows + (uint64_t)rows * a.row_bytes,
                  ep_net_signal_of(a.ranks, kind, bank, a.rank), next_told(a, kind, bank, peer, n));
}

/* ---- slots ----------------------------------------------------------------------------- */

/* Which slot choice i of the batch has at its rank, for the combine. */
__device__ inline uint32_t *kept_slots(const ep_ll_args &a)
{
    const struct ep_net_tables &tables = net_of(a)->tables;

    return (uint32_t *)((uint8_t *)net_of(a) + tables.ll_slots + a.handle * tables.ll_slots_stride);
}
__device__ inline void keep_slot(const ep_ll_args &a, uint32_t i, uint32_t slot) { kept_slots(a)[i] = slot; }
__device__ inline uint32_t kept_slot(const ep_ll_args &a, uint32_t i) { return kept_slots(a)[i]; }

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
__device__ inline uint8_t *box_at(const ep_ll_args &, uint32_t, uint32_t, uint32_t) { return nullptr; }
__device__ inline uint32_t *number_in(const ep_ll_args &, uint8_t *, uint32_t) { return nullptr; }
__device__ inline uint8_t *header_in(const ep_ll_args &, uint8_t *, uint32_t) { return nullptr; }
__device__ inline uint8_t *scales_in(const ep_ll_args &, uint8_t *, uint32_t) { return nullptr; }
__device__ inline uint8_t *row_in(const ep_ll_args &, uint8_t *, uint32_t) { return nullptr; }
__device__ inline void put_box(const ep_ll_args &, uint32_t, uint32_t, uint32_t, uint32_t, enum ep_net_signal, uint64_t)
{
}
__device__ inline void keep_slot(const ep_ll_args &, uint32_t, uint32_t) {}
__device__ inline uint32_t kept_slot(const ep_ll_args &, uint32_t) { return 0; }
__device__ inline void begin_held(const ep_ll_args &, uint64_t) {}

} // namespace ep

#endif

namespace ep {

constexpr uint64_t kTurnNs = 1000;

/* Whoever waits for a rank that is far looks whether this one can tell it more, and another one, each in its turn: of three
 * ranks each could wait for the next one's ACK otherwise.  Never gives up. */
__device__ inline bool looks_back(const ep_ll_args &a, uint32_t rank, bool far)
{
    if (far) {
        const uint32_t other = (uint32_t)(now_ns() / kTurnNs % a.ranks);

        catch_up(a, rank);
        if (is_far(a, other))
            catch_up(a, other);
    }
    return false;
}

} // namespace ep

#endif
