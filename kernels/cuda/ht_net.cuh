/*
 * ht_net.cuh: HT with ranks on other nodes: what is told them, and the boxes that are put.
 *
 * kNet (ranks.cuh) says whether there can be any.  A token goes once to a node, as a record, to this rank's gate there
 * (device_net.h), which pushes its row on to the ranks of the node as if it were its own (ht_relay.cuh).  In a combine
 * the ranks push partials to the gate, which sums them up and puts one row back (ht_node_sum.cuh), from the box that the
 * records came in to the one that they went from.
 *
 *   dispatch   s asks all ranks of other nodes as it asks those of its own; the note is put.  Each rank grants s places
 *              as to anybody.  The gate reads these grants, which are on its node; s hears nothing of them, and need not:
 *              it puts records, in the order of tokens, a piece at a time, as soon as they are in its box, and while it
 *              waits for asks.  If these do not come in time its op does not take place, and what it has put is pushed
 *              on all the same, as of one that ends
 *   combine    s asks its gates for sums: for those of the first combine with the last piece of its records, so that they
 *              go out as soon as they are made, for others when the combine begins.  A gate asks the ranks of its node as
 *              for tokens of its own, which says that it has memory for partials of s too.  Who takes a sum sees by its
 *              head whether it is of the same combine
 *
 * ## Signals
 * A signal is seen after all puts that its raiser put to the same rank before; puts themselves may land in any order.
 *   PUT(w)     op and step: w has asked, or so many pieces of its box have come; the last step, kOver, is that w puts nothing
 *              more for this op, as a step of a later op says too.  A number of one op is less than any of a later one,
 *              modulo 2^64
 *   CLOSED(o)  tag: o takes nothing for that op any more, and has put all that it puts
 *   ACK(o)     the same, and o has seen w to be over: all that w put to o up to that op has landed
 *
 * ## Why memory is not written too early
 * w puts to o in an op when ACK(o) is that of the last op in which it put anything to o (may_put): nothing is under way
 * from w to o, neither from w's boxes nor to o's, and o has closed that op, so it reads none of it.  An ACK that is not
 * told at the end of an op, as w was not over then, is told as soon as o sees it, when its next op begins or while it
 * waits (catch_up); to all, whoever it is that it waits for to ask: of three ranks each could wait for the next one's
 * ACK otherwise.
 * Sums lie where records did, and are put by whom s has asked, which says that its records have landed: a signal that
 * comes with or behind them does.  s puts records again when it has the gate's ACK for what it asked, which the gate gives
 * when it has put its sums and has seen that s is over.  If the combine does not come, s says so when its next op begins
 * (forgo_sums), and the gate, which makes none or makes them in vain, gives that ACK likewise.
 * Each pair of ranks has boxes of its own, at both ends: who stands in for a gate uses neither the gate's
 * nor those of another one that may, for or from which a put may be under way for as long as it likes.  Nor does he use
 * their flags (flags_of): they may tell an old op's late.  Sums go back when s has asked for them.
 * Whoever reads a box looks at the op's tag in each record too: after kOver it is there, or it does not come.
 * Partials of s's tokens lie at its gate also when another rank stands in.  Who sums them up has asked for them; where it
 * is not the one that did so last, that one has closed the op before (await_place).
 * CLOSED is told before late writers are awaited (drain): these may be gates that wait for s, who waits for CLOSED.
 * tests/model/ht_net.pml goes through this with two to four ranks, and breaks the rules one by one.
 *
 * ## Who is missed
 * A source chooses who acts as its gate when its dispatch begins, and says so in its asks; nobody else has to agree.  A
 * combine goes the way of its dispatch.  Who leaves in between takes along what goes through him: of his sources what is
 * for the node; of a combine, the sums.  The ranks of the node miss such a source, all of whose rows are zero, and the
 * source misses that node's ranks.  The next dispatch goes another way, or where nobody is to stand in asks that node for
 * no places.
 *
 * ## Bounds
 * Waits for signals are waits like others.  To put or raise takes a place in a queue of the peer's (ll_net.cuh): as
 * nothing is put to a peer that has not acknowledged what was put before, there is one for each piece of one op.
 */
#ifndef EP_HT_NET_CUH
#define EP_HT_NET_CUH

#include "ht.h"
#include "ll_device.cuh"

namespace ep {
namespace ht {

struct Op;
enum Note { kAsk, kGrant };

enum Step : uint32_t { kAsked = 1, kFirstPiece = 2, kOver = 127 };
constexpr uint32_t kStepShift = 7;
static_assert(kFirstPiece + EP_NET_PIECES < kOver && kOver < 1u << kStepShift, "a piece is a step");

} // namespace ht
} // namespace ep

#if EP_LL_NET

namespace ep {
namespace ht {

/* Who of this node takes what r sends here, in the running op; a rank of this node: itself. */
__device__ inline uint32_t via(const ep_ht_args &a, uint32_t r) { return load_u32(&net_of(a)->via[r]); }
/* Whose gate is whose does not change.  Who acts as one does, from op to op. */
__device__ inline uint32_t gate_of(const ep_ht_args &a, uint32_t r) { return net_of(a)->gate[r]; }
__device__ inline uint32_t acts_as(const ep_ht_args &a, uint32_t gate) { return load_u32(&net_of(a)->acts[gate]); }

/* Who acts as a gate, and how far it is behind it on their node: 0, the gate itself. */
struct Acting {
    uint32_t rank, way;
};

/* The first from the gate on that fits(rank), of those that have boxes for it; or EP_NET_NOBODY.  A node of fewer ranks is
 * gone round: who did not fit does not fit again. */
template <class Fits> __device__ inline Acting find_acting(const ep_ht_args &a, uint32_t gate, Fits fits)
{
    const struct ep_device_net *net = net_of(a);
    uint32_t rank = gate;

#pragma unroll
    for (uint32_t way = 0; way < EP_NET_WAYS; way++, rank = net->next[rank])
        if (fits(rank))
            return { rank, way };
    return { EP_NET_NOBODY, 0 };
}
/* How far is `acting`, which acts as the gate, or EP_NET_NOBODY? */
__device__ inline uint32_t way_of(const ep_ht_args &a, uint32_t gate, uint32_t acting)
{
    return find_acting(a, gate, [&](uint32_t rank) { return rank == acting; }).way;
}

/* Our box for what s sends here; and ours at whoever acts as the gate. */
__device__ inline uint32_t box_of(const ep_ht_args &a, uint32_t s)
{
    const struct ep_device_net *net = net_of(a);

    return net->in[s] + way_of(a, net->gate_here[s], a.rank) * net->map.gated;
}
__device__ inline uint32_t box_at(const ep_ht_args &a, uint32_t gate)
{
    const struct ep_device_net *net = net_of(a);

    return net->there[gate] + way_of(a, gate, acts_as(a, gate)) * net->map.gated;
}
/* Ours for what goes to the gate, or to whoever acts as it, and for the sums that come back; and s's for those that this
 * rank puts to it. */
__device__ inline uint32_t box_for(const ep_ht_args &a, uint32_t gate)
{
    const struct ep_device_net *net = net_of(a);

    return net->out[gate] + way_of(a, gate, acts_as(a, gate)) * net->map.outs;
}
__device__ inline uint32_t box_back(const ep_ht_args &a, uint32_t s)
{
    const struct ep_device_net *net = net_of(a);

    return net->back[s] + way_of(a, net->gate_here[s], a.rank) * net->map.outs;
}
/* Where the rank `from` is told about at rank `where`, by whoever takes here what it sends; a rank of this node: by itself. */
__device__ inline struct ep_ht_flags *flags_of(const ep_ht_args &a, uint32_t where, uint32_t from)
{
    struct ep_ht_flags *flags = (struct ep_ht_flags *)(window_of(a, where) + a.flags + (uint64_t)from * EP_HT_FLAGS_BYTES);

    return flags + (is_far(a, from) ? way_of(a, net_of(a)->gate_here[from], via(a, from)) : 0);
}

template <class What> __device__ inline What *net_table(const ep_ht_args &a, uint64_t table)
{
    return (What *)((uint8_t *)net_of(a) + table);
}
/* Of a handle, [T_ht * K]. */
__device__ inline uint32_t *node_slots(const ep_ht_args &a, uint32_t handle)
{
    return net_table<uint32_t>(a, net_of(a)->tables.slots + handle * net_of(a)->tables.slots_stride);
}
/* Of a handle and a box, [T_ht][K]. */
__device__ inline uint32_t *relayed_of(const ep_ht_args &a, uint32_t handle, uint32_t box)
{
    return net_table<uint32_t>(a, net_of(a)->tables.relayed + handle * net_of(a)->tables.relayed_stride)
           + (uint64_t)box * a.max_tokens * a.max_top_k;
}
/* Of a handle, [R]. */
__device__ inline struct ep_net_way *ways_of(const ep_ht_args &a, uint32_t handle)
{
    return net_table<struct ep_net_way>(a, net_of(a)->tables.ways + handle * net_of(a)->tables.ways_stride);
}
/* Of a rank, [EP_NET_PIECES]. */
__device__ inline uint32_t *filled_of(const ep_ht_args &a, uint32_t rank)
{
    return net_table<uint32_t>(a, net_of(a)->tables.filled) + rank * EP_NET_PIECES;
}

/* ---- signals ------------------------------------------------------------------------ */

__device__ inline uint64_t told_by(const ep_ht_args &a, uint32_t kind, uint32_t rank)
{
    return gin_signal(net_of(a), ep_net_ht_signal_of(a.ranks, kind, rank));
}

/* CLOSED and ACK: its signal at `rank` becomes `tag`, unless it is that far. */
__device__ inline void tell_tag(const ep_ht_args &a, uint32_t kind, uint32_t rank, uint64_t tag)
{
    struct ep_device_net *net = net_of(a);
    const uint64_t before = atomicMax((unsigned long long *)&net->ht_told[kind][rank], (unsigned long long)tag);

    if (before < tag)
        gin_raise(net, rank, ep_net_ht_signal_of(a.ranks, kind, a.rank), tag - before);
}

__device__ inline uint64_t step_of(uint64_t tag, uint32_t step) { return tag << kStepShift | step; }

/* PUT becomes that step: what is to be added.  One thread at a time for a rank. */
__device__ inline uint64_t next_step(const ep_ht_args &a, uint32_t rank, uint64_t tag, uint32_t step)
{
    uint64_t *told = &net_of(a)->ht_told[EP_NET_HT_PUT][rank];
    const uint64_t before = load_u64(told), value = step_of(tag, step);

    store_u64(told, value);
    return value - before;
}
__device__ inline void tell_step(const ep_ht_args &a, uint32_t rank, uint64_t tag, uint32_t step)
{
    const uint64_t more = next_step(a, rank, tag, step);

    if (more)
        gin_raise(net_of(a), rank, ep_net_ht_signal_of(a.ranks, EP_NET_HT_PUT, a.rank), more);
}

/* What others have written, which was fenced, to memory of the rank's beside its window; with it comes that step. */
__device__ inline void put_and_tell(const ep_ht_args &a, uint32_t rank, uint64_t to, uint64_t from, uint64_t bytes,
                                    uint64_t tag, uint32_t step)
{
    struct ep_device_net *net = net_of(a);

    store_u64(&net->ht_last[rank], tag);
    gin_put_raise(net, rank, to, from, bytes, ep_net_ht_signal_of(a.ranks, EP_NET_HT_PUT, a.rank),
                  next_step(a, rank, tag, step));
}

/* Is it a step of that op? */
__device__ inline bool is_of(uint64_t step, uint64_t tag) { return step >> kStepShift == step_of(tag, 0) >> kStepShift; }

/* Has the rank asked for the sums of this combine, and have we asked it? */
__device__ inline bool has_asked(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    return is_of(told_by(a, EP_NET_HT_PUT, rank), tag);
}
__device__ inline bool is_asked(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    return is_of(load_u64(&net_of(a)->ht_told[EP_NET_HT_PUT][rank]), tag);
}

/* One thread: this rank takes the sums that `rank` makes of its tokens for this combine. */
__device__ inline void ask_for_sums(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    store_u64(&net_of(a)->ht_last[rank], tag);
    tell_step(a, rank, tag, kAsked);
}

/* The last op of which it takes nothing any more, as this rank knows it. */
__device__ inline uint64_t far_closed(const ep_ht_args &a, uint32_t rank)
{
    return max(told_by(a, EP_NET_HT_CLOSED, rank), told_by(a, EP_NET_HT_ACK, rank));
}

/* What the rank puts up to that step is there, or does not come: it may be that its signal is late when it has closed
 * the op.  Whoever asks looks at the tag that what has come bears. */
__device__ inline bool has_come(const ep_ht_args &a, uint32_t rank, uint64_t tag, uint32_t step)
{
    return (int64_t)(told_by(a, EP_NET_HT_PUT, rank) - step_of(tag, step)) >= 0 || far_closed(a, rank) >= tag;
}

__device__ inline bool may_put(const ep_ht_args &a, uint32_t rank)
{
    return told_by(a, EP_NET_HT_ACK, rank) >= load_u64(&net_of(a)->ht_last[rank]);
}

/* All that the rank has put for ops up to `tag` has landed and is not read any more: it is told so if it is over. */
__device__ inline void acknowledge(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    const uint64_t put = told_by(a, EP_NET_HT_PUT, rank);
    const uint64_t back = (step_of(tag, kOver) - put) >> kStepShift; /* ops, as tags count them */

    if (put && put % (1u << kStepShift) == kOver && (int64_t)(step_of(tag, kOver) - put) >= 0)
        tell_tag(a, EP_NET_HT_ACK, rank, tag - back);
}

/* One thread, of a rank on another node, when all blocks have read and put what they do. */
__device__ inline void close_far(const ep_ht_args &a, uint32_t r, uint64_t tag)
{
    const struct ep_device_net *net = net_of(a);

    if (load_u64(&net->ht_last[r]) == tag)
        tell_step(a, r, tag, kOver);
    if (load_u64(&a.state->from[r]) == EP_DEVICE_NEVER)
        return;
    acknowledge(a, r, tag);
    if (load_u64(&net->ht_told[EP_NET_HT_ACK][r]) < tag)
        tell_tag(a, EP_NET_HT_CLOSED, r, tag);
}

/* An op begins: the combine that this rank has asked for before did not come, if it is not this one. */
__device__ inline void forgo_sums(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    const uint64_t last = load_u64(&net_of(a)->ht_last[rank]);

    if (last && last < tag)
        tell_step(a, rank, last, kOver);
}

/* Whoever waits for the rank: what was not over when an earlier op ended may be so by now. */
__device__ inline void catch_up(const ep_ht_args &a, uint32_t rank, uint64_t tag)
{
    acknowledge(a, rank, tag - 1);
}

/* ---- beginning -------------------------------------------------------------------------- */

/* One thread: the dispatch is begun; nobody is about to join it. */
__device__ inline void await_hold(const ep_ht_args &a)
{
    const uint64_t until = now_ns() + kMostHeld;

    while (load_u64(&a.state->held) && now_ns() < until)
        ;
    fence_sys(); /* acquire: ht_from as it was when the hold ended */
}

/* Warp 0 of block 0, of a dispatch: who acts as a gate. */
__device__ inline void choose_gates(const ep_ht_args &a, const uint32_t *members)
{
    struct ep_device_net *net = net_of(a);

    each_rank(a, [&](uint32_t r) {
        if (!is_far(a, r))
            return;
        store_u32(&net->acts[r], find_acting(a, r, [&](uint32_t rank) { return has(members, rank); }).rank);
        store_u32(&net->via[r], net->gate_here[r]); /* till it has said */
    });
    __syncwarp();
}

/* ---- notes ----------------------------------------------------------------------------------- */

/* Where the note for a rank on another node is written, and from there to it. */
__device__ inline uint8_t *far_ask_at(const ep_ht_args &a, uint32_t to)
{
    const struct ep_device_net *net = net_of(a);

    return (uint8_t *)net->at[a.rank] + net->map.asks_out + (uint64_t)to * net->map.ask_bytes;
}
__device__ inline void put_ask(const ep_ht_args &a, uint32_t rank, uint32_t bytes, uint64_t tag, uint32_t step)
{
    const struct ep_net_map &m = net_of(a)->map;

    put_and_tell(a, rank, m.asks + (uint64_t)a.rank * m.ask_bytes, m.asks_out + (uint64_t)rank * m.ask_bytes, bytes, tag,
                 step);
}

/* Where the note of a rank on another node comes to. */
__device__ inline uint8_t *far_note_at(const ep_ht_args &a, uint32_t from)
{
    const struct ep_device_net *net = net_of(a);

    return (uint8_t *)net->at[a.rank] + net->map.asks + (uint64_t)from * net->map.ask_bytes;
}

/* ---- boxes -------------------------------------------------------------------------------------- */

/* Records, or sums, of the running op: what goes out goes from boxes of the one kind to those of the other. */
struct Box {
    uint64_t out, in;  /* where the first of all is, beside a window */
    uint64_t box_bytes, item_bytes;
    uint32_t piece;    /* items of it */
    bool asks;         /* its last piece asks for the sums of the first combine */
};

__device__ inline Box records_of(const ep_ht_args &a)
{
    const struct ep_net_map &m = net_of(a)->map;
    const uint64_t bytes = ep_net_record_bytes(a.max_top_k, a.row_bytes, a.row_scales * a.scale_bytes);

    return { m.out, m.in, m.box_bytes, bytes, ep_net_piece(a.max_tokens, bytes), true };
}
__device__ inline Box sums_of(const ep_ht_args &a)
{
    const struct ep_net_map &m = net_of(a)->map;
    const uint64_t bytes = ep_net_sum_head(a.max_top_k) + a.row_bytes;

    return { m.in, m.out, m.box_bytes, bytes, ep_net_piece(a.max_tokens, bytes), false };
}

__device__ inline uint8_t *item_out(const ep_ht_args &a, const Box &box, uint32_t which, uint32_t i)
{
    return (uint8_t *)net_of(a)->at[a.rank] + box.out + which * box.box_bytes + i * box.item_bytes;
}
__device__ inline uint8_t *item_in(const ep_ht_args &a, const Box &box, uint32_t which, uint32_t i)
{
    return (uint8_t *)net_of(a)->at[a.rank] + box.in + which * box.box_bytes + i * box.item_bytes;
}

/* Item i is in its box: one thread, behind a fence. */
__device__ inline void count_item(const ep_ht_args &a, const Box &box, uint32_t rank, uint32_t i)
{
    count_release(filled_of(a, rank) + i / box.piece);
}

/* The step that brings item i, or a later one. */
__device__ inline uint32_t step_of_item(const Box &box, uint32_t i) { return kFirstPiece + i / box.piece; }

/* What goes to a rank, or to whoever acts as it, `peer`, which takes it: n items, which others fill in. */
struct Load {
    uint32_t rank, peer, n;
    uint32_t which, at; /* our box, and there */
};

constexpr uint32_t kPiecesAtOnce = 2; /* of a put: a copy of more than 8 MB is hardly faster, and comes later */

/* How many pieces, from `next` on, are complete. */
__device__ inline uint32_t complete_pieces(const ep_ht_args &a, const Box &box, const Load &load, uint32_t next)
{
    const uint32_t *filled = filled_of(a, load.rank) + next;
    uint32_t n = 0;

    while (n < kPiecesAtOnce && (next + n) * box.piece < load.n
           && acquire_count(filled + n) == min(load.n - (next + n) * box.piece, box.piece))
        n++;
    return n;
}

/* What of it was not put?  Nothing where it is known that the rank does not ask for it. */
__device__ inline bool is_unput(const ep_ht_args &a, const Box &box, const Load &load)
{
    const struct ep_device_net *net = net_of(a);

    return net->put[load.rank] * box.piece < load.n && !has_now(net->silent, load.rank);
}

/* One thread: its next pieces, as far as they are complete. */
__device__ inline void put_pieces(const ep_ht_args &a, uint64_t tag, const Box &box, const Load &load)
{
    struct ep_device_net *net = net_of(a);
    const uint32_t next = net->put[load.rank], end = next + complete_pieces(a, box, load, next);
    const uint32_t first = next * box.piece, items = min(load.n, end * box.piece) - first;
    const bool is_last = end * box.piece >= load.n;
    const uint32_t step = !is_last ? step_of_item(box, first + items - 1) : box.asks ? kAsked : kOver;

    if (end == next)
        return;
    fence_sys(); /* of all that those have written that were counted; partner: whoever reads what is put */
    put_and_tell(a, load.peer, box.in + load.at * box.box_bytes + first * box.item_bytes,
                 box.out + load.which * box.box_bytes + first * box.item_bytes, items * box.item_bytes,
                 is_last && box.asks ? tag + 1 : tag, step);
    net->put[load.rank] = end;
}

/*
 * A warp: all loads, load_of(0) to load_of(loads - 1), each one's pieces as they get complete; until pauses(), which is the
 * same for all lanes.  Called again it goes on.  Nothing of a load is put before all of those that come first, which others
 * fill in in that order: a node takes in no more from several than from one, so each is to be sent to by one at a time.
 */
template <class LoadOf, class Pauses>
__device__ inline void put_boxes(const ep_ht_args &a, uint64_t tag, const Box &box, uint32_t loads, LoadOf load_of,
                                 Pauses pauses)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t base = 0;

#pragma unroll 1
    while (base < loads && !pauses()) {
        const uint32_t i = base + lane;
        const Load load = i < loads ? load_of(i) : Load{ 0, 0, 0, 0, 0 };
        const uint32_t unput = __ballot_sync(kAll, is_unput(a, box, load));

        if (!unput)
            base += 32;
        else if (lane == __ffs(unput) - 1)
            put_pieces(a, tag, box, load);
        __syncwarp();
    }
}

/* One block, when the op is over. */
__device__ inline void clear_net(const ep_ht_args &a)
{
    struct ep_device_net *net = net_of(a);

    for (uint32_t i = threadIdx.x; i < a.ranks * EP_NET_PIECES; i += kThreads)
        filled_of(a, 0)[i] = 0;
    for (uint32_t r = threadIdx.x; r < a.ranks; r += kThreads)
        net->records[r] = net->unsent[r] = net->put[r] = 0;
    if (threadIdx.x < words_of(a))
        net->open[threadIdx.x] = net->more[threadIdx.x] = net->through[threadIdx.x] = net->lost[threadIdx.x] =
            net->silent[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        net->relaying = net->next_record = net->relayed_by = net->next_token = net->numbered = 0;
}

} // namespace ht
} // namespace ep

#else

namespace ep {
namespace ht {

__device__ inline uint32_t via(const ep_ht_args &, uint32_t r) { return r; }
__device__ inline struct ep_ht_flags *flags_of(const ep_ht_args &a, uint32_t where, uint32_t from)
{
    return (struct ep_ht_flags *)(window_of(a, where) + a.flags + (uint64_t)from * EP_HT_FLAGS_BYTES);
}
__device__ inline uint32_t gate_of(const ep_ht_args &, uint32_t r) { return r; }
__device__ inline uint64_t far_closed(const ep_ht_args &, uint32_t) { return 0; }
__device__ inline bool has_come(const ep_ht_args &, uint32_t, uint64_t, uint32_t) { return false; }
__device__ inline void close_far(const ep_ht_args &, uint32_t, uint64_t) {}
__device__ inline void forgo_sums(const ep_ht_args &, uint32_t, uint64_t) {}
__device__ inline void catch_up(const ep_ht_args &, uint32_t, uint64_t) {}
__device__ inline void await_hold(const ep_ht_args &) {}
__device__ inline void choose_gates(const ep_ht_args &, const uint32_t *) {}
__device__ inline uint8_t *far_note_at(const ep_ht_args &, uint32_t) { return nullptr; }
__device__ inline uint8_t *far_ask_at(const ep_ht_args &, uint32_t) { return nullptr; }
__device__ inline void clear_net(const ep_ht_args &) {}

} // namespace ht
} // namespace ep

#endif

#endif
