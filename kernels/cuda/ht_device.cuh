/*
 * ht_device.cuh: what both HT kernels use: the protocol, tags, notes, waiting, the gate, the end of an op.
 *
 * ## An op
 * The blocks of an op run at once and meet at barriers of their own (barrier()); block 0 speaks for the rank.  What a
 * barrier waits for are blocks of the same kernel, which come to it after bounded waits only.  An op has a tag
 * (window.h): all ranks that make the same calls give it the same one, and a later op has a larger one.
 *
 *   dispatch   ask     each member: rows that go to it and to each of its experts, and where its partials are to lie
 *                      one day
 *              grant   to each member that asked: where its rows go here
 *              push    each row to where its token's first expert of a rank wants it, then its header, whose tag
 *                      says that the row is there; then `done`
 *              lay out what came: rows of further experts are copied here, so that no row crosses NVLink twice
 *   combine    ask     each member of the dispatch: the memory for partials is free here
 *              push    partials to those whose rows came, each with the tag beside it; then `done`
 *              sum     as they land
 *   close      and drain, if somebody was missed
 *
 * ## Who decides where a row goes
 * Ranks do not agree on who takes part, as the host's team does under a mutex: the rank that receives decides alone,
 * and nobody else needs to know.  Rank d takes the asks that came, of whoever it is, adds their counts up in the order
 * of ranks, and tells each of them its own places.  A rank whose ask did not come has none and sends nothing.  Partials
 * need no decision: those from d lie at s behind those of the ranks below d, by s's own counts, which it has sent with
 * the ask.  So two ranks may count different ones in, and yet every row has one place that both of its ends know.
 *
 * ## Why notes are not overwritten too early
 * A note lies at the rank that tells it and is read there by the one that it is for, block 0 of which looks until it is
 * there.  A note of s for d is written again by the next op of s.  In a dispatch s goes on after d's grant (d has read
 * the note before), or after it has given d up; then d finds a later tag and knows that s is past this op (`beyond`),
 * also when it finds it in the middle of the note, as all pieces have one.  A combine's ask is awaited by those only
 * that have rows of s; s goes on when these have pushed, or given up.  A grant of d for s is written again after d has
 * read the next ask of s.
 *
 * ## Why the next op can have all the rest
 * There is one region for all ops.  A rank's own follow each other in its stream, so it has read what it reads before
 * its next op begins; what matters is what others write here, and when.
 *   begun, done, ceased   are compared with the tag, so older ones say nothing.  Their writer sets them for a later op
 *              when it is past this one, of which its `closed` has told.  A later `done` tells of this op's rows too, if
 *              no `ceased` does (has_sent): a combine waits for nothing of a rank that had no tokens, which may still wait.
 *   closed     only grows, and is the last that a rank tells of an op: who finds it, and then looks once more, sees
 *              all that was to come.
 *   headers, rows   are written by whom this op has granted places, and nobody else has them.  The op ends when all
 *              those are done; when one is not, it is closed and drained.  What came of a rank that is missed is zeroed
 *              after that.
 *   partials   are written by d when s asks for them in this op, which s does when its last one is over.  d has s in
 *              `arrived` only if s was done with d, and then s has d in `sent`: so s waits for all that d pushes,
 *              unless it misses d; then it closes and drains.  They lie by the counts of the dispatch (first, back),
 *              whoever takes part by now.
 * So nothing is handed back at the end of an op, and one that is skipped owes nothing: after a dispatch without a
 * combine, or with several, or one of an older handle, the next op asks anew, with a tag of its own.  A pass over a
 * cached handle is a dispatch like any other.  LL ops in between use memory of their own; of `from` HT heeds only
 * whether a rank is absent.
 * A rank that is absent is asked by nobody and awaited by nobody; it finds all absent itself and ceases.  A new worker
 * begins with a number that nobody has begun: what bears older tags says nothing to it, and no row of an older number
 * is begun for it any more, as its ht_from is above them.
 * tests/model/ht.pml goes through this with two and three ranks, and breaks the rules one by one.
 *
 * ## Ranks on other nodes
 * ht_net.cuh.  What reaches this node of one of them is in flags, headers and partials that a rank of this node writes,
 * its gate here: whoever waits for that waits as long as the gate is there (via()).
 *
 * ## Late writers
 * Peers write into `out`, which is the worker's again when the op is over, and to the partials, which the next combine
 * uses; so it matters that nobody writes late.
 *   writer w:  begun = tag, at the owner's; fence (seq_cst); then before each row: is the owner's `closed` below tag?
 *              at the end, when all that was written is there (fence): done = tag, or ceased = tag
 *   owner o:   closed = tag, at all; and when something did not come: fence (seq_cst); is w's begun = tag, and it is
 *              neither done nor has ceased?  Then wait for that.
 * (Dekker: either w sees that it is closed, or o sees that w has begun.)  What w looks at is its own memory.  When all
 * have done what they had to, nobody has to be waited for.  Between begun and done a writer waits for grants at most,
 * in a combine for asks, as o did, so this is short for a writer that runs; one that takes part no more (from[] of its
 * own says so, when the server lets it go) ceases before its next row.  o waits for a writer that is there as long as
 * for anything else, and kDrainNs for one that has left: its process may be gone, and nothing tells when its last store
 * has landed.  What this leaves is a GPU that stood still for so long between a look and the stores of the one row that
 * a warp had in hand.
 *
 * ## Waits
 * For an ask: whoever is waited for needs nothing to send it, it begins the op with it.  For a grant: it follows asks.
 * For rows: they follow grants.  Each wait ends when the peer is absent, has closed this tag (what it sent before is
 * there: fence and look once more), has ceased, or the op's time is over.  A rank that cannot run its op (a stale
 * handle, no member any more, asks that did not come in time) closes it, and its peers go on.
 *
 * ## Who joins
 * ht_begun is raised to n, fence (seq_cst), then ht_from is read, once for all blocks.  The server writes ht_from, then
 * reads ht_begun: either the op counts r in, or r is told a later number.
 *
 * ## What a worker can write
 * Under executor server the worker of a rank is trusted by nobody and can write its own window at any time, and no
 * other.  What is an address in a peer's window comes from that peer's own notes, read once by block 0 and kept in the
 * state.
 *   grants     held against the window (take_grants): rows, headers and scales lie in the granter's arena and headers,
 *              or the grant counts for nothing.  They say again how many rows may come, to each expert too, and no
 *              more are sent (load_choice): who changes what he asked for meanwhile spoils his own rows.
 *   asks       rows, of experts too: at most T_max of a source (keep_asked), and rows that do not come are waited for
 *              until their source is done.  Where partials go at the source: within its partials (take_asks).
 *   headers    local expert below L, place below the rows that came (take_header); of a combine, below those of x.
 *   begun, done, ceased, partials and their tags   compared only.  Who forges them takes rows for there that are not,
 *              or has memory of his own written that he thought was his again.
 *   closed     hides that a peer takes no more.  It waits then, as it has seen `begun`, until this rank is done,
 *              which waits for nobody.
 *   counts, offsets   written; one that is read again (zero_padding) is held against the next expert's first row.
 *   topk, rows, scales, weights, gradients, bias   as in ll_device.cuh.
 * All blocks have the same op, a copy that nobody else can reach (ht_serve.cu, ht_entry.cuh).
 */
#ifndef EP_HT_DEVICE_CUH
#define EP_HT_DEVICE_CUH

#include "ht.h"
#include "ht_net.cuh"
#include "ll_combine.cuh" /* formats of rows */
#include "ll_route.cuh"

namespace ep {
namespace ht {

constexpr uint32_t kBlocks = 2; /* of a multiprocessor: a combine's rings fill it, and with three a dispatch takes longer */
constexpr uint64_t kDrainNs = 20000000; /* for writers that are gone; more than a time slice of a GPU */

/* ---- places ------------------------------------------------------------------------ */

/* What rank `from` tells `to`. */
__device__ inline uint8_t *note_at(const ep_ht_args &a, Note kind, uint32_t from, uint32_t to)
{
    return window_of(a, from) + a.notes + ((uint64_t)kind * a.ranks + to) * a.note_stride;
}
__device__ inline uint32_t note_vecs(const ep_ht_args &a, Note kind)
{
    return kind == kAsk ? (EP_HT_ASK_EXPERTS + a.local_experts + 1) / 2 : EP_HT_GRANT_EXPERTS / 2 + a.local_experts;
}

__device__ inline uint64_t *closed_at(const ep_ht_args &a, uint32_t where, uint32_t whose)
{
    return (uint64_t *)(window_of(a, where) + a.closed + (uint64_t)whose * EP_LINE);
}
__device__ inline uint8_t *header_at(const ep_ht_args &a, uint32_t where, uint64_t row)
{
    return window_of(a, where) + a.headers + row * a.header_bytes;
}
__device__ inline uint64_t *partial_tag_at(const ep_ht_args &a, uint32_t where, uint64_t partial)
{
    return (uint64_t *)(window_of(a, where) + a.combine_tags) + partial;
}
__device__ inline uint8_t *partial_at(const ep_ht_args &a, uint32_t where, uint64_t partial)
{
    return window_of(a, where) + a.combine_rows + partial * a.row_bytes;
}
__device__ inline float *partial_grads_at(const ep_ht_args &a, uint32_t where, uint64_t partial)
{
    return (float *)(window_of(a, where) + a.combine_grads) + partial * a.max_top_k;
}

__device__ inline uint64_t tag_of(const Vec &v) { return (uint64_t)v.w[3] << 32 | v.w[2]; }
__device__ inline Vec tagged(uint32_t first, uint32_t second, uint64_t tag)
{
    return { { first, second, (uint32_t)tag, (uint32_t)(tag >> 32) } };
}

/* ---- an op ------------------------------------------------------------------------- */

/* A block's copy of what block 0 has found; in shared memory. */
struct Op {
    uint64_t tag, number, deadline;
    int32_t status;               /* not EP_OK: nothing is done */
    uint32_t members[kRankWords]; /* set: who takes part, as this rank sees it */
};

__device__ inline struct ep_device_ht_run &run_of(const ep_ht_args &a) { return a.state->ht_run; }

/* Does rank r take part in dispatch n? */
__device__ inline bool present(const ep_ht_args &a, uint64_t n, uint32_t r)
{
    return load_u64(&a.state->from[r]) != EP_DEVICE_NEVER && load_u64(&a.state->ht_from[r]) <= n;
}

/* All threads, of all blocks; what each did before is there for those who have waited.  *met: how often they have. */
__device__ inline void arrive(const ep_ht_args &a, uint32_t *met)
{
    __syncthreads();
    ++*met;
    if (threadIdx.x == 0)
        count_release(&run_of(a).barrier);
}
__device__ inline void wait_for_all(const ep_ht_args &a, uint32_t met)
{
    if (threadIdx.x == 0)
        while (acquire_count(&run_of(a).barrier) < met * a.blocks)
            ;
    __syncthreads();
}
__device__ inline void barrier(const ep_ht_args &a, uint32_t *met)
{
    arrive(a, met);
    wait_for_all(a, *met);
}

/* All threads of a block, after a barrier that block 0 came to with the op begun. */
__device__ inline void take_op(const ep_ht_args &a, Op *op)
{
    const struct ep_device_ht_run &run = run_of(a);

    if (threadIdx.x == 0) {
        op->tag = run.tag;
        op->number = run.number;
        op->deadline = run.deadline;
        op->status = run.status;
    }
    if (threadIdx.x < kRankWords)
        op->members[threadIdx.x] = run.members[threadIdx.x];
    __syncthreads();
}

/* Warp 0 of block 0.  n: the dispatch's number. */
__device__ inline void begin(const ep_ht_args &a, Op *op, uint64_t tag, uint64_t n, int32_t status)
{
    struct ep_device_ht_run &run = run_of(a);
    const uint32_t lane = threadIdx.x;

    collect(a, op->members, [&](uint32_t r) { return present(a, n, r); });
    const bool takes_part = has(op->members, a.rank);

    __syncwarp();
    if (!takes_part && lane < words_of(a))
        op->members[lane] = 0; /* who is out himself sends nothing */
    __syncwarp();
    if (kNet)
        each_rank(a, [&](uint32_t r) {
            if (!is_far(a, r))
                return;
            forgo_sums(a, r, tag);
            catch_up(a, r, tag);
        });
    if (lane < words_of(a))
        run.members[lane] = op->members[lane];
    if (lane == 0) {
        const uint64_t now = now_ns(), timeout = load_u64(&a.state->timeout_ns);

        status = status == EP_OK && !takes_part ? EP_DETACHED : status;
        op->tag = tag;
        op->number = n;
        op->deadline = now + timeout;
        op->status = status;
        run.tag = tag;
        run.number = n;
        run.deadline = now + timeout;
        run.timeout_ns = timeout;
        run.start_ns = now;
        run.status = status;
    }
    __syncwarp();
}

/* ---- waiting ----------------------------------------------------------------------- */

/* The last op that a rank takes nothing for any more. */
__device__ inline uint64_t closed_by(const ep_ht_args &a, uint32_t rank)
{
    return is_far(a, rank) ? far_closed(a, rank) : load_u64(closed_at(a, a.rank, rank));
}

/* Until there() holds, `peer` is absent, has closed the op or given_up(), or the op's time, and so much more, is over, as it
 * is when nobody is there any more to whom its end matters. */
template <class There, class GivenUp>
__device__ inline Wait wait_for(const ep_ht_args &a, const Op &op, uint32_t peer, There there, GivenUp given_up,
                                uint64_t more_ns = 0)
{
    for (uint32_t look = 1;; look++) {
        if (there())
            return Wait::there;
        if (look % kLooks)
            continue;
        if (!present(a, op.number, peer) || closed_by(a, peer) >= op.tag || given_up()) {
            fence_sys(); /* acquire: what it did before is there by now */
            return there() ? Wait::there : Wait::gone;
        }
        if (is_far(a, peer))
            catch_up(a, peer, op.tag);
        if (now_ns() > op.deadline + more_ns || is_forsaken(a))
            return Wait::late;
    }
}

/* The op goes on without `peer`. */
__device__ inline void miss(const ep_ht_args &a, uint32_t peer, Wait why, uint32_t phase)
{
    struct ep_device_ht_run &run = run_of(a);

    if (why == Wait::late) {
        atomicCAS(&run.first_late, 0u, phase << 16 | (peer + 1)); /* those after it may have waited for it, too */
        add(run.late, peer);
    } else {
        add(run.gone, peer);
    }
}

__device__ inline bool is_missed(const ep_ht_args &a, uint32_t peer)
{
    return has_now(run_of(a).late, peer) || has_now(run_of(a).gone, peer);
}

__device__ inline bool anybody_missed(const ep_ht_args &a)
{
    const struct ep_device_ht_run &run = run_of(a);
    uint32_t all = 0;

    for (uint32_t w = 0; w < words_of(a); w++)
        all |= load_u32(&run.late[w]) | load_u32(&run.gone[w]);
    return all != 0;
}

/* Word pair i of what rank `from` tells `to`, which is this one or has this one as its gate; false: it will not come,
 * which has been noted. */
__device__ inline bool take_note(const ep_ht_args &a, const Op &op, Note kind, uint32_t from, uint32_t to, uint32_t i,
                                 Vec *v)
{
    const bool far = is_far(a, from);
    const uint8_t *at = (far ? far_note_at(a, from) : note_at(a, kind, from, to)) + i * sizeof *v;
    const Wait end = wait_for(
        a, op, from,
        [&] {
            if (far && !has_come(a, from, op.tag, kAsked))
                return false;
            *v = load_vec(at);
            return tag_of(*v) == op.tag;
        },
        [&] { return far ? has_come(a, from, op.tag, kAsked) : tag_of(*v) > op.tag; }); /* beyond, or spoilt */

    if (end != Wait::there) {
        miss(a, from, end, EP_WAIT_READY);
        *v = { { 0, 0, 0, 0 } };
    }
    return end == Wait::there;
}

/* ---- the gate ----------------------------------------------------------------------- */

/* Warp 0 of block 0, before the barrier that pushing follows: this rank may write to the members that are here. */
__device__ inline void announce(const ep_ht_args &a, const Op &op)
{
    each_near(a, [&](uint32_t r) {
        if (has(op.members, r))
            store_u64(&flags_of(a, r, a.rank)->begun, op.tag);
    });
    fence_total(); /* partner: close */
    __syncwarp();
}

/* Before it is written to: does rank r, which is here, still take it? */
__device__ inline bool is_open(const ep_ht_args &a, const Op &op, uint32_t r)
{
    return closed_by(a, r) < op.tag /* partner: close */
           && present(a, op.number, r);
}

/* A warp that pushes no more, and whose rows are fenced.  The last one tells who got all. */
__device__ inline void pushed(const ep_ht_args &a, const Op &op)
{
    struct ep_device_ht_run &run = run_of(a);
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0;

    __syncwarp();
    if (lane == 0)
        before = count_acq_rel(&run.pushed);
    if (__shfl_sync(kAll, before, 0) != a.blocks * kWarps - 1)
        return;
    each_near(a, [&](uint32_t r) {
        struct ep_ht_flags *flags = flags_of(a, r, a.rank);

        if (!has(op.members, r))
            return;
        fence_sys(); /* release; partner: arrived, drain */
        store_u64(has_now(run.unsent, r) ? &flags->ceased : &flags->done, op.tag);
    });
    __syncwarp();
}

/* Until nobody writes, when it is closed. */
__device__ inline void drain(const ep_ht_args &a, const Op &op)
{
    const uint64_t start = now_ns(), bound = load_u64(&run_of(a).timeout_ns);

    fence_total(); /* partner: announce */
    each_rank(a, [&](uint32_t r) {
        const struct ep_ht_flags *flags = flags_of(a, a.rank, r);

        while (r != a.rank && load_u64(&flags->begun) == op.tag && acquire_u64(&flags->done) != op.tag
               && acquire_u64(&flags->ceased) != op.tag) {
            const uint64_t waited = now_ns() - start;

            if (waited > bound || (waited > kDrainNs && !present(a, op.number, via(a, r))))
                break;
        }
    });
    __syncwarp();
}

/* Warp 0 of block 0: nobody is to write for this op any more, and if anything that was to come did not, nobody does. */
__device__ inline void close(const ep_ht_args &a, const Op &op)
{
    __syncwarp();
    fence_sys(); /* what this rank has told comes before */
    each_rank(a, [&](uint32_t r) { /* before a late writer is awaited: a gate that waits for one who waits for this */
        if (is_far(a, r))
            close_far(a, r, op.tag);
        else
            store_u64(closed_at(a, r, a.rank), op.tag);
    });
    __syncwarp();
    if (op.status != EP_OK || anybody_missed(a))
        drain(a, op);
}

/* A warp: the next piece of work of those that the counter counts. */
__device__ inline uint32_t take_work(uint32_t *counter)
{
    uint32_t piece = 0;

    if (threadIdx.x % 32 == 0)
        piece = atomicAdd(counter, 1);
    return __shfl_sync(kAll, piece, 0);
}

/* ---- rows ------------------------------------------------------------------------------ */

constexpr uint32_t kRowVecs = 8; /* 16 bytes of a row that a lane has under way */

/* A warp: `pieces` times 16 bytes, in batches that each(first piece of the lane, v) stores. */
template <class Each> __device__ inline void walk_row(const uint8_t *from, uint32_t pieces, Each each)
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll 1
    for (uint32_t base = 0; base < pieces; base += kRowVecs * 32) { /* all lanes, as each() may need them */
        const uint32_t at = base + lane;
        Vec v[kRowVecs];

#pragma unroll
        for (uint32_t i = 0; i < kRowVecs; i++)
            if (at + i * 32 < pieces)
                v[i] = load_row(from + (uint64_t)(at + i * 32) * 16);
        each(at, v);
    }
}

__device__ inline void store_pieces(uint8_t *to, uint32_t at, uint32_t pieces, const Vec *v)
{
#pragma unroll
    for (uint32_t i = 0; i < kRowVecs; i++)
        if (at + i * 32 < pieces)
            store_row(to + (uint64_t)(at + i * 32) * 16, v[i]);
}

/* ---- the end of an op ----------------------------------------------------------------- */

/* One thread: all but who arrived. */
__device__ inline void fill_record(const ep_ht_args &a, const Op &op, int32_t status, bool dispatch,
                                   struct ep_device_record *r)
{
    const struct ep_device_ht_run &run = run_of(a);

    r->status = status;
    r->late_rank = run.first_late ? (run.first_late & 0xffff) - 1 : 0;
    r->wait_phase = run.first_late ? run.first_late >> 16 : EP_WAIT_NONE;
    r->generation = a.generation;
    r->number = op.number;
    r->sequence = ++a.state->scratch.sequence;
    r->rows = run.rows;
    r->rows_needed = run.rows_needed;
    r->dropped = run.dropped;
    r->wire_bytes = run.wire_bytes;
    r->logical_bytes = (uint64_t)a.tokens * a.top_k * a.row_bytes;
    r->start_ns = run.start_ns;
    r->end_ns = now_ns();
    r->wait_ns = run.wait_ns;
    r->layout = a.layout;
    r->wire_dtype = a.wire_dtype;
    r->timeout_ns = run.timeout_ns;
    r->mode = EP_MODE_HT;
    count(&a.state->ht_counters[dispatch ? EP_DEVICE_DISPATCH : EP_DEVICE_COMBINE], *r, a.tokens);
}

/* Warp 0 of the last block: the record, to those who read it. */
__device__ inline void write_record(const ep_ht_args &a, uint32_t part, const struct ep_device_record &record)
{
    struct ep_device_report *report = &((struct ep_control *)a.own)->gpu.report;

    copy_record(&report->records[a.handle][part], record);
    if (threadIdx.x == 0 && record.status != EP_OK && report->failures++ == 0)
        keep_failure(report, record, part);
}

/* All threads of all blocks, after their last barrier; last(&status, arrived), a set that is empty, with warp 0 of the
 * block that comes last, then the record.  True for that block. */
template <class Last> __device__ inline bool finish(const ep_ht_args &a, const Op &op, bool dispatch, Last last)
{
    struct ep_device_ht_run &run = run_of(a);
    __shared__ struct ep_device_record record;
    __shared__ uint32_t before;

    __syncthreads();
    if (threadIdx.x == 0)
        before = count_acq_rel(&run.over);
    __syncthreads(); /* what thread 0 has acquired is there for all */
    if (before != a.blocks - 1)
        return false;
    if (threadIdx.x < 32) {
        int32_t status = op.status;

        clear_record(&record);
        last(&status, (uint32_t *)record.arrived);
        __syncwarp();
        if (threadIdx.x == 0)
            fill_record(a, op, status, dispatch, &record);
        __syncwarp();
        write_record(a, dispatch ? EP_DEVICE_DISPATCH : EP_DEVICE_COMBINE, record);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < sizeof run / 4; i += kThreads)
        ((uint32_t *)&run)[i] = 0;
    return true;
}

} // namespace ht
} // namespace ep

#endif
