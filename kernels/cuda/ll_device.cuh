/*
 * ll_device.cuh: what both LL kernels use: memory order, waiting, numbers, the bank, the end of an op.
 *
 * ## Why memory is never reused too early
 * ep_kernels.h gives the protocol; on a GPU it reads as follows.
 *
 * A row is announced by its own header.  The block that pushed the row runs a barrier, then each thread
 * that writes a part of the header fences (system scope) and stores 16 bytes that hold the number.  Who
 * sees the number sees the row.  Each line of a partial bears the number itself (ll_packet.cuh).
 *
 * Bank b = n mod B.  Region [s] of a bank has one writer, s, and lies in the same bytes in all ops.  Before s
 * writes number n to d, it has seen d's credit for n - B, or d takes part in n and began to after n - B.  d gives
 * the credit for m when no block of d will read number m's rows or headers again:
 *   - the last block of combine m that has pushed its partials gives it (they are all that is read);
 *   - a dispatch that takes the bank of an m that was never combined, or replaces the routing of the
 *     handle that held m, gives it before anything else; the stream has ended every earlier op by then;
 *   - so does a release;
 *   - a dispatch that fails gives it at its end, as no combine will follow.  So nobody waits until our next op for our
 *     partials of m, nor for rows of m that we could not send, as a credit had not come (has_released).
 * Blocks of one op never wait for each other, only for peers, and all of them run at once; what a peer
 * needs from us (rows, headers, counts, credits) is sent before we wait for anything but its credit, or by
 * a warp that waits for nobody, and credits depend on older numbers alone.  So every wait is for something of a
 * smaller (number, phase), and the chain ends at a rank that waits for nobody.
 *
 * The combine region [d] of s's bank is written by d for n after d saw the header of a row of n from s.
 * s sent that after its stream had ended combine n - B, or abandoned it: nobody reads the old partials.
 *
 * A rank that is absent gets nothing and is waited for by nobody: `from` in our state says since when,
 * and every wait looks at it again.  What was under way to it lands in memory that the server keeps; a
 * new worker of the rank starts at a number that no op has reached, and old numbers tell it what to ignore.
 *
 * Who joins: each block raises `begun` to n at its start, without waiting for that, and reads `from`.  When
 * it has sent, it has fenced (seq_cst) and reads `from` again: whoever has come in between gets his part too.  The
 * fence between its last row and that one's header is the one, if it has a row.
 * The server writes `from`, then reads `begun`.  So either all blocks of all ranks see that r takes part in
 * n, or the server sees n begun and has r begin later.
 *
 * ## Who is in a result
 * Each block looks at `from` for itself: to agree first would cost a round trip.  So two blocks of an op can
 * differ about r, when r leaves between their looks or was told a number that did not hold.  Who counts r in
 * finds all that it waits for, or misses r (`gone`).  Who does not says so when it arrives: it adds r to the mask
 * `outside`, and how many ranks it leaves out to `outsiders`.  No block leaves out others than the mask's, so
 * that `outsiders` is `blocks` times the ranks of the mask exactly when all blocks leave out the same ones, as
 * they do while a rank is absent.
 *   - When it is not, or somebody was missed, the last block of a dispatch receives it all again, without all
 *     that were missed or outside.  Who remains has sent everything: each block counted him in and found it.
 *   - The sums of a combine stay as they are.  Whom `arrived` names is in every sum that he has a part in, as
 *     nobody missed him or left him out; whom it does not name may be in some of them, or in parts of them.
 *   - A block that sees this rank itself outside leaves out all: the op ends with EP_DETACHED.
 *
 * ## What a worker can write
 * Under executor server the worker of a rank is trusted by nobody, and can write its own window at any time: the
 * banks, where peers write too, and the arena.  What is read there is read once, into a register or shared
 * memory, and held against a bound before it becomes a part of an address:
 *   counts     rows of a source: at most T_max (take_counts, rows_of).  Rows of an expert: at most the source's
 *              (place_rows), so an expert's total is at most R * T_max, the size of its block; packed, what all
 *              span is held against `out` before a row is placed.
 *   headers    local expert: below L; index: below what base[] gives the source (take_header).  Not more rows than
 *              choices.  Token: below T_max where it is an address, the source's, in a combine (find_terms); in a
 *              dispatch it is but copied to `sources`.
 *   places     below the rows that the combine's `x` has (find_terms); they are the dispatch's notes for the combine.
 *   numbers, credits   compared only.  What passes for a peer's row or partial is one for this rank's results; a
 *              credit that is not the peer's lets this rank write early, into its own region of the peer's bank,
 *              over rows of its own.
 *   rows, scales, weights, x, bias   data.
 *   topk       an expert outside [0, E) is none (route_of).
 * Each block has its own copy, so blocks may come to different views: each is bounded by itself, and no count of
 * one block is an index of another.  All loops end: their bounds are of the group, or were checked with the op,
 * and waits have the op's deadline.  State, placement and routing of handles lie where the worker cannot write.
 */
#ifndef EP_LL_DEVICE_CUH
#define EP_LL_DEVICE_CUH

#include "ll.h"
#include "ll_quantise.cuh"
#include "ptx.cuh"

#include "ll_net.cuh"

namespace ep {

constexpr uint32_t kThreads = EP_LL_THREADS;
constexpr uint32_t kWarps = kThreads / 32;
/*
 * Threads that move a block's last row of a dispatch to where it stays.  The last warp, the clerk, has no part in that: it arrives
 * meanwhile, and finishes the op when its block is the last one.  A row of 896 pieces (H 7168, bf16) is four for a thread
 * with it as without.
 */
constexpr uint32_t kMovers = kThreads - 32;
__device__ inline bool is_clerk() { return threadIdx.x >= kMovers; }
constexpr uint32_t kBlocks = 3; /* of a multiprocessor, at least */
constexpr uint32_t kLooks = 64; /* at a flag, between two looks at clock and membership */
constexpr int32_t kBadRoute = -2; /* an expert that does not exist; -1: none was asked for */

/* A scale as it is in memory: fp32, or a byte of UE8M0.  Args: of an LL kernel or an HT one. */
template <class Args> __device__ inline uint32_t load_scale(const Args &a, const uint8_t *scales, uint32_t i)
{
    return a.scale_bytes == 1 ? __ldcg(scales + i) : __ldcg((const uint32_t *)scales + i);
}
template <class Args> __device__ inline void store_scale(const Args &a, uint8_t *scales, uint32_t i, uint32_t scale)
{
    if (a.scale_bytes == 1)
        scales[i] = (uint8_t)scale;
    else
        ((uint32_t *)scales)[i] = scale;
}

/* The number as flags carry it: (n - 1) mod (2^32 - 1), plus 1; never 0, which means "never".  Without a division of
 * 64 bits, which is long code, as 2^32 is 1 in that ring. */
__device__ inline uint32_t wire_number(uint64_t n)
{
    const uint64_t digits = ((n - 1) >> 32) + (uint32_t)(n - 1), sum = (digits >> 32) + (uint32_t)digits;

    return sum == 0xffffffffull ? 1 : (uint32_t)sum + 1;
}

/* ---- an op ------------------------------------------------------------------------ */

/* What the blocks of an op have in common; in shared memory. */
struct Op {
    uint64_t number, bank; /* bank: offset from a window's start */
    uint64_t timeout_ns;
    uint64_t deadline; /* of its waits; 0 until one of them looks at the clock, which takes its time */
    uint32_t wire;    /* wire_number(number) */
    uint32_t valid;   /* the handle may be used */
    uint32_t whole;   /* combine: whole_lines of the state */
    /* sets of ranks: */
    uint32_t members[kRankWords]; /* that take part */
    uint32_t missed[kRankWords];  /* of them, those that this block waits for no more */
    uint32_t lacking[kRankWords]; /* of them, those whose credit had not come at the beginning */
};

/* In shared memory, a word for each rank: the same ones for whatever kind of op a block runs. */
__device__ inline uint32_t *rows_of_ranks()
{
    __shared__ uint32_t rows[kMostRanks];

    return rows;
}
__device__ inline uint32_t *slots_of_ranks()
{
    __shared__ uint32_t slots[kMostRanks];

    return slots;
}

/* n mod banks: 2^32 is 1 modulo 3, and 0 modulo 2 and 4. */
__device__ inline uint32_t bank_of(const ep_ll_args &a, uint64_t n)
{
    static_assert(EP_MAX_LL_BANKS == 4, "more banks want another rule");
    return ((uint32_t)n % a.banks + (a.banks == 3 ? (uint32_t)(n >> 32) % 3 : 0)) % a.banks;
}
__device__ inline uint64_t bank_at(const ep_ll_args &a, uint64_t n) { return a.ll + bank_of(a, n) * a.bank_bytes; }

/* Place of an item of region [r] of a bank, in `where`'s window. */
__device__ inline uint8_t *item_at(const ep_ll_args &a, uint32_t where, uint64_t bank, uint64_t region, uint32_t r,
                                   uint32_t i, uint32_t bytes)
{
    return window_of(a, where) + bank + region + ((uint64_t)r * a.max_tokens + i) * bytes;
}
/* Of region [s] of the rows: it begins at the same place whatever an op's dtype is, as who is late may still write there
 * for an older op of the bank. */
__device__ inline uint8_t *bank_row_at(const ep_ll_args &a, uint32_t where, uint64_t bank, uint32_t s, uint32_t slot)
{
    return window_of(a, where) + bank + a.bank.rows + (uint64_t)s * a.max_tokens * a.most_row_bytes
           + (uint64_t)slot * a.row_bytes;
}
__device__ inline uint8_t *line_at(const ep_ll_args &a, uint32_t where, uint64_t bank, uint64_t region, uint32_t r)
{
    return window_of(a, where) + bank + region + (uint64_t)r * EP_LINE;
}

/*
 * What rank s sends to rank d, one of which is this rank, and what it gets back: in d's window, and the partials in s's; or
 * where nodes lie between in this rank's box of both.
 */
__device__ inline bool are_far(const ep_ll_args &a, uint32_t s, uint32_t d) { return is_far(a, s) || is_far(a, d); }
__device__ inline uint8_t *box_of(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d)
{
    return box_at(a, bank_of(a, op.number), s, d);
}
__device__ inline uint8_t *counts_at(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d)
{
    if (are_far(a, s, d))
        return box_of(a, op, s, d);
    return window_of(a, d) + op.bank + a.bank.counts + (uint64_t)s * a.counts_bytes;
}
__device__ inline uint8_t *header_at(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d, uint32_t slot)
{
    if (are_far(a, s, d))
        return header_in(a, box_of(a, op, s, d), slot);
    return item_at(a, d, op.bank, a.bank.headers, s, slot, a.header_bytes);
}
__device__ inline uint8_t *scales_at(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d, uint32_t slot)
{
    if (are_far(a, s, d))
        return scales_in(a, box_of(a, op, s, d), slot);
    return item_at(a, d, op.bank, a.bank.scales, s, slot, a.scales_bytes);
}
__device__ inline uint8_t *row_at(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d, uint32_t slot)
{
    if (are_far(a, s, d))
        return row_in(a, box_of(a, op, s, d), slot);
    return bank_row_at(a, d, op.bank, s, slot);
}
/* at: the token, or where nodes lie between the row's slot; a row then, else packets. */
__device__ inline uint8_t *partial_at(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t d, uint32_t at)
{
    if (are_far(a, s, d))
        return row_in(a, box_of(a, op, s, d), at);
    return item_at(a, s, op.bank, a.bank.combine_rows, d, at, a.partial_bytes);
}

/* Where d's credits are kept in `where`'s window, one for each bank. */
__device__ inline uint64_t *credit_at(const ep_ll_args &a, uint32_t where, uint32_t d, uint32_t bank)
{
    return (uint64_t *)line_at(a, where, a.ll, a.bank.credits, d) + bank;
}

/* The one block that tells what the op has done: it has little else to do when there are few tokens. */
__device__ inline bool tells(const ep_ll_args &a) { return blockIdx.x == a.blocks / 2; }

/* Warp 0: number n begins, with the members that are in(rank). */
template <class In>
__device__ inline void op_begin(const ep_ll_args &a, Op *op, uint64_t n, uint64_t timeout_ns, In in)
{
    each_word(a, in, [&](uint32_t w, uint32_t ranks) {
        if (threadIdx.x == 0) {
            op->members[w] = kNet || ranks >> a.rank & 1 ? ranks : 0; /* who is out himself sends nothing */
            op->missed[w] = op->lacking[w] = 0;
        }
    });
    if (threadIdx.x == 0) {
        for (uint32_t w = 0; kNet && !has(op->members, a.rank) && w < words_of(a); w++)
            op->members[w] = 0;
        op->number = n;
        op->wire = wire_number(n);
        op->bank = bank_at(a, n);
        op->timeout_ns = timeout_ns;
        op->deadline = 0;
        if (tells(a))
            a.state->scratch.start_ns = now_ns();
    }
    __syncwarp();
}

/* Warp 0, each lane its rank's. */
__device__ inline uint64_t from_of_lane(const ep_ll_args &a)
{
    return threadIdx.x < a.ranks ? load_u64(&a.state->from[threadIdx.x]) : EP_DEVICE_NEVER;
}

/* ---- waiting ---------------------------------------------------------------------- */

enum class Wait { there, gone, late };

/* All waits of a block's op have one bound, from the first that takes long. */
__device__ inline bool is_late(Op &op, uint64_t sooner_ns = 0)
{
    const uint64_t now = now_ns();
    const unsigned long long mine = now + op.timeout_ns;
    const uint64_t deadline = atomicCAS((unsigned long long *)&op.deadline, 0ull, mine);

    return deadline && now + sooner_ns > deadline;
}

/* Until there() holds, `peer` has given_up() or takes part no more, or the op's time, but so much, is over, as it is when
 * nobody is there any more to whom its end matters. */
template <class There, class GivenUp>
__device__ inline Wait wait_for(const ep_ll_args &a, Op &op, uint32_t peer, There there, GivenUp given_up,
                                uint64_t sooner_ns = 0)
{
    for (uint32_t look = 1;; look++) {
        if (there())
            return Wait::there;
        if (look % kLooks)
            continue;
        if (load_u64(&a.state->from[peer]) > op.number || given_up()) {
            fence_sys(); /* acquire: what it did before is there by now */
            return there() ? Wait::there : Wait::gone;
        }
        if (is_late(op, sooner_ns) || is_forsaken(a))
            return Wait::late;
    }
}

/* This block goes on without `peer`; arrive() fences what is told here. */
__device__ inline void miss(const ep_ll_args &a, Op *op, uint32_t peer, Wait why, uint32_t phase)
{
    auto &seen = a.state->scratch.ranks[word_of(peer)];

    add(op->missed, peer);
    if (why == Wait::late) {
        atomicOr(&seen.late, bit_of(peer));
        a.state->scratch.late_phase = phase;
    } else {
        atomicOr(&seen.gone, bit_of(peer));
    }
}

/* ---- credits ------------------------------------------------------------------------ */

/* Has `rank` released the op's number?  Then it has sent all of it that it will: rows, and partials if there are any. */
__device__ inline bool has_released(const ep_ll_args &a, const Op &op, uint32_t rank)
{
    const uint32_t bank = bank_of(a, op.number);

    return (is_far(a, rank) ? released_by(a, bank, rank) : load_u64(credit_at(a, a.rank, rank, bank))) >= op.number;
}

/* A warp of one block: nobody here reads number m any more.  Everything before is ordered before it.  To ranks on other
 * nodes it may have to be said again. */
__device__ inline void give_credit(const ep_ll_args &a, uint64_t m)
{
    const uint32_t bank = bank_of(a, m);
    uint64_t *released = &a.state->released[bank];

    __syncwarp();
    if (m == 0 || (!kNet && *(volatile uint64_t *)released >= m))
        return;
    const bool given = kNet && *(volatile uint64_t *)released >= m;

    fence_sys(); /* release; partner: the wait for credit */
    each_rank(a, [&](uint32_t r) {
        if (is_far(a, r))
            release_to(a, bank, r, m);
        else if (!given)
            store_u64(credit_at(a, r, a.rank, bank), m);
    });
    __syncwarp();
    if (given)
        return;
    if (threadIdx.x % 32 == 0)
        *(volatile uint64_t *)released = m;
    __syncwarp();
}

/* ---- where rows of the experts lie ----------------------------------------------------- */

/* Source s's counts: value 0 is its rows, value 1 + l those of local expert l; three in each 16 bytes. */
constexpr uint32_t kCountsInVec = 3;

/* Rows of source s that have come or will come; false when it has not told yet. */
__device__ inline bool rows_of(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t *rows)
{
    const Vec v = load_vec(counts_at(a, op, s, a.rank));

    *rows = min(v.w[0], a.max_tokens);
    return v.w[3] == op.wire;
}

/* For place_rows: a thread for each expert, or where there can be many sources a warp. */
__device__ inline void add_counts_up(const ep_ll_args &a, const uint32_t *rows, uint32_t *base, uint32_t *total)
{
    if constexpr (kNet) {
#pragma unroll 1
        for (uint32_t l = threadIdx.x / 32; l < a.local_experts; l += kWarps) {
            uint32_t *of = base + l * a.ranks;
            const uint32_t sum = add_ranks_up(a, [&](uint32_t s) { return min(of[s], rows[s]); },
                                              [&](uint32_t s, uint32_t before) { of[s] = before; });

            if (threadIdx.x % 32 == 0)
                total[l] = sum;
        }
    } else {
#pragma unroll 1
        for (uint32_t l = threadIdx.x; l < a.local_experts; l += kThreads) {
            uint32_t sum = 0;

#pragma unroll 1
            for (uint32_t s = 0; s < a.ranks; s++) {
                const uint32_t count = min(base[l * a.ranks + s], rows[s]);

                base[l * a.ranks + s] = sum;
                sum += count;
            }
            total[l] = sum;
        }
    }
}

/* The most rows that a source has.  All lanes of a warp. */
__device__ inline uint32_t most_rows(const ep_ll_args &a, const uint32_t *rows)
{
    uint32_t most = 0;

    if constexpr (kNet) {
        each_rank(a, [&](uint32_t s) { most = max(most, rows[s]); });
        return __reduce_max_sync(kAll, most);
    } else {
#pragma unroll 1
        for (uint32_t s = 0; s < a.ranks; s++)
            most = max(most, rows[s]);
        return most;
    }
}

/*
 * base[l * R + s] holds what source s sends to local expert l; becomes where these rows begin, total[l] of them
 * in all.  Expert-major: blocks of R * T_max rows; packed: one after the other.  All threads; returns the rows
 * that `out` spans.  What peers wrote is clamped, so that nothing here points beyond its block.
 */
__device__ inline uint64_t place_rows(const ep_ll_args &a, const uint32_t *rows, uint32_t *base, uint32_t *total,
                                      uint32_t *first)
{
    __shared__ uint64_t spanned;

    add_counts_up(a, rows, base, total);
    __syncthreads();
    if (a.layout == EP_LAYOUT_EXPERT_MAJOR)
        return (uint64_t)a.ranks * a.max_tokens * a.local_experts;
    if (threadIdx.x == 0) {
        uint64_t end = 0;

#pragma unroll 1
        for (uint32_t l = 0; l < a.local_experts; l++) {
            first[l] = (uint32_t)end;
            end += ((uint64_t)total[l] + a.alignment - 1) / a.alignment * a.alignment;
        }
        first[a.local_experts] = (uint32_t)end;
        spanned = end;
    }
    __syncthreads();
    return spanned;
}

/* First row of expert l. */
__device__ inline uint64_t block_of(const ep_ll_args &a, const uint32_t *first, uint32_t l)
{
    return a.layout == EP_LAYOUT_EXPERT_MAJOR ? (uint64_t)l * a.ranks * a.max_tokens : first[l];
}

/* Rows that source s has of expert l. */
__device__ inline uint32_t rows_between(const ep_ll_args &a, const uint32_t *base, const uint32_t *total,
                                        uint32_t l, uint32_t s)
{
    return (s + 1 < a.ranks ? base[l * a.ranks + s + 1] : total[l]) - base[l * a.ranks + s];
}

__device__ inline bool by_expert(const ep_ll_args &a)
{
    return a.layout == EP_LAYOUT_EXPERT_MAJOR || a.layout == EP_LAYOUT_PACKED;
}

/* ---- the end of an op -------------------------------------------------------------------- */

/* A block's arrival at the end of its op: asked, what it asks the counter of the blocks is under way or there. */
struct Arrival {
    bool asked;
    uint32_t before; /* lane 0: blocks that were there already */
};

/*
 * The clerk of a block that waits for nothing more, after a barrier or when all warps have said so.  The block may still have
 * rows to write: only what it has told in the scratch is there for the last one to arrive, if `told`, or if it is about ranks.
 */
__device__ inline void arrive(const ep_ll_args &a, const Op &op, bool told, Arrival *arrival)
{
    let_next_come();
    __syncwarp();
    arrival->asked = true;
    if (threadIdx.x == kMovers) {
        uint32_t outsiders = 0;

        for (uint32_t w = 0; w < words_of(a); w++) {
            const uint32_t outside = all_of(a, w) & ~op.members[w]; /* mostly nobody */

            if (outside)
                atomicOr(&a.state->scratch.ranks[w].outside, outside);
            outsiders += __popc(outside);
        }
        if (outsiders)
            atomicAdd(&a.state->scratch.outsiders, outsiders);
        if (told || outsiders || anybody(a, op.missed) || (a.arrived && blockIdx.x == 0))
            fence_gpu(); /* release; partner: count_acquire of the last block; of block 0's answer to the bell: the worker */
        if (a.arrived)
            atomicAdd(a.arrived, EP_MAILBOX_ARRIVED);
        arrival->before = count_acquire(&a.state->scratch.done);
    }
}

/* The clerk: was it the last block?  Then it sees what the others have told. */
__device__ inline bool was_last(const ep_ll_args &a, const Arrival &arrival)
{
    const bool last = __shfl_sync(kAll, arrival.before, 0) == a.blocks - 1;

    __syncwarp(); /* what one lane has acquired, all of them see */
    return last;
}

/* A warp: fn(i) for the words of the scratch; of a group of one node a lane has one. */
template <class Fn> __device__ inline void each_scratch_word(Fn fn)
{
    if constexpr (kNet)
        for (uint32_t i = threadIdx.x % 32; i < sizeof(struct ep_device_scratch) / 4; i += 32)
            fn(i);
    else
        fn(threadIdx.x % 32);
}

/* The clerk of the last block: what the blocks have left, to *s in shared memory. */
__device__ inline void read_scratch(const ep_ll_args &a, struct ep_device_scratch *s)
{
    each_scratch_word([&](uint32_t i) { ((uint32_t *)s)[i] = load_u32((const uint32_t *)&a.state->scratch + i); });
    __syncwarp();
}

/* May the blocks have counted different ranks in? */
__device__ inline bool differed(const ep_ll_args &a, const struct ep_device_scratch &s)
{
    uint32_t missed = 0, outside = 0;

    for (uint32_t w = 0; w < words_of(a); w++) {
        missed |= s.ranks[w].gone | s.ranks[w].late;
        outside += __popc(s.ranks[w].outside);
    }
    return (missed | (s.outsiders ^ a.blocks * outside)) != 0;
}

/* A word of the set of those that every block has counted in, as this one has. */
__device__ inline uint32_t counted_in(const Op &op, const struct ep_device_scratch &s, uint32_t word)
{
    return op.members[word] & ~s.ranks[word].outside;
}
__device__ inline bool anybody_counted_in(const ep_ll_args &a, const Op &op, const struct ep_device_scratch &s)
{
    uint32_t all = 0;

    for (uint32_t w = 0; w < words_of(a); w++)
        all |= counted_in(op, s, w);
    return all != 0;
}

/* A warp: the scratch is empty, but for the number of ops. */
__device__ inline void empty_scratch(struct ep_device_scratch *s)
{
    constexpr uint32_t sequence = offsetof(struct ep_device_scratch, sequence) / 4;

    each_scratch_word([&](uint32_t i) {
        if (i != sequence && i != sequence + 1)
            ((uint32_t *)s)[i] = 0;
    });
}

/* The clerk of the last block has read *s: the scratch is empty again, and *s counts this op. */
__device__ inline void clear_scratch(const ep_ll_args &a, struct ep_device_scratch *s)
{
    empty_scratch(&a.state->scratch);
    if (threadIdx.x % 32 == 0)
        a.state->scratch.sequence = ++s->sequence;
    __syncwarp();
}

/* One thread: nobody waits for these. */
__device__ inline void count(struct ep_device_counters *c, const struct ep_device_record &r, uint32_t tokens)
{
    const auto add = [](uint64_t *to, uint64_t n) { atomicAdd((unsigned long long *)to, (unsigned long long)n); };

    add(&c->count, 1);
    if (r.status != EP_OK)
        add(&c->errors, 1);
    if (r.status == EP_TIMEOUT)
        add(&c->timeouts, 1);
    add(&c->tokens, tokens);
    add(&c->wire_bytes, r.wire_bytes);
    add(&c->busy_ns, r.end_ns - r.start_ns);
    add(&c->wait_ns, r.wait_ns);
    if (r.dropped)
        add(&c->dropped, r.dropped);
    atomicMax((unsigned long long *)&c->max_wait_ns, (unsigned long long)r.wait_ns);
}

/* One thread: the first failure. */
__device__ __noinline__ inline void keep_failure(struct ep_device_report *report, const struct ep_device_record &r,
                                                 uint32_t part)
{
    report->failure = r;
    report->failure_op = part;
}

/* What the sending half of an op has told, to the record of its receiving half. */
__device__ inline void add_half(const struct ep_device_record &half, struct ep_device_record *r)
{
    if (half.number != r->number || half.generation != r->generation)
        return;
    r->dropped += half.dropped;
    r->wire_bytes += half.wire_bytes;
    r->logical_bytes += half.logical_bytes;
    r->wait_ns += half.wait_ns;
    r->start_ns -= half.end_ns - half.start_ns;
}

/* The first rank that came late; kNobody: none did. */
__device__ inline uint32_t first_late(const ep_ll_args &a, const struct ep_device_scratch &s)
{
    for (uint32_t w = 0; w < words_of(a); w++)
        if (s.ranks[w].late)
            return w * 32 + __ffs(s.ranks[w].late) - 1;
    return kNobody;
}

/* The clerk of the last block: the record, the counters, the first failure. */
__device__ inline void op_record(const ep_ll_args &a, const Op &op, const struct ep_device_scratch &s,
                                 uint32_t part, int32_t status)
{
    __shared__ struct ep_device_record r;
    struct ep_device_report *report = &((struct ep_control *)a.own)->gpu.report;
    const uint32_t lane = threadIdx.x % 32, late = first_late(a, s);

    clear_record(&r);
    if (lane == 0) {
        r.status = status == EP_OK && late != kNobody ? EP_TIMEOUT : status;
        r.late_rank = late != kNobody ? late : 0;
        r.wait_phase = late != kNobody ? s.late_phase : EP_WAIT_NONE;
        r.generation = a.generation;
        r.number = op.number;
        r.sequence = s.sequence;
        r.rows = s.rows;
        r.rows_needed = s.rows_needed;
        r.dropped = s.dropped;
        r.wire_bytes = s.wire_bytes;
        r.logical_bytes = a.phases & EP_LL_SEND ? (uint64_t)a.tokens * a.top_k * a.row_bytes : 0;
        r.start_ns = s.start_ns;
        r.end_ns = now_ns();
        r.wait_ns = s.wait_ns;
        for (uint32_t w = 0; w < words_of(a); w++)
            ((uint32_t *)r.arrived)[w] = counted_in(op, s, w) & ~(s.ranks[w].late | s.ranks[w].gone);
        r.layout = a.layout;
        r.wire_dtype = a.wire_dtype;
        r.timeout_ns = op.timeout_ns;
        count(&a.state->counters[part], r, a.phases & EP_LL_SEND ? a.tokens : 0);
        if (r.status != EP_OK && report->failures++ == 0)
            keep_failure(report, r, part);
        if (!(a.phases & EP_LL_SEND))
            add_half(report->records[a.handle][part], &r);
    }
    __syncwarp();
    copy_record(&report->records[a.handle][part], r);
}

} // namespace ep

#endif
