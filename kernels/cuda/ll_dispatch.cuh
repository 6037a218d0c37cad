/*
 * LL dispatch: one-sided push of each token, once per destination rank, then rows to their experts as they
 * land.  ll_device.cuh has the protocol.
 *
 * Who does what: each token belongs to a block, counted from the end.  The block finds where the token goes
 * and in which slot (the tokens before it that go there too), pushes the row and then its header.  The counts
 * per expert for rank d are made by one of the very last blocks.  As receivers, blocks take the rows (slot,
 * source) in turn from the beginning, the first slots of all sources first, as those land first.  So with
 * small batches no block has two things to do.
 */
#ifndef EP_LL_DISPATCH_CUH
#define EP_LL_DISPATCH_CUH

#include "ll_push.cuh"
#include "ll_receive.cuh"

namespace ep {
namespace dispatch {

/* ---- the op ------------------------------------------------------------------------------ */

/* What warp 0 of each block has to know at the beginning: asked for at once, one round trip to memory, while
 * routes and rows are fetched.  Lane r has what is of rank r, where each has one. */
struct Asked {
    uint64_t number, held, timeout_ns, from, credit[EP_MAX_LL_BANKS];
    uint32_t generation;
};

__device__ __forceinline__ Asked ask(const ep_ll_args &a)
{
    const uint32_t lane = threadIdx.x;
    const struct ep_device_handle *h = &a.state->handles[a.handle];
    Asked q;

    q.number = load_u64(&a.state->number);
    q.held = load_u64(&h->number);
    q.generation = load_u32(&h->generation);
    q.timeout_ns = load_u64(&a.state->timeout_ns);
    if constexpr (kNet) {
        if (a.phases & EP_LL_SEND)
            begin_held(a, q.number + 1);
        return q;
    }
    q.from = from_of_lane(a);
#pragma unroll
    for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
        q.credit[i] = lane < a.ranks && i < a.banks ? load_u64(credit_at(a, a.rank, lane, i)) : 0;
    /* Partner: give_credit.  No store of ours is issued before the load that it depends on has returned. */
    return q;
}

/* Has rank r, of this lane, not yet given the credit that number n needs? */
__device__ __forceinline__ bool lacks(const ep_ll_args &a, const Asked &q, uint64_t n, uint32_t bank, uint32_t r)
{
    uint64_t credit = 0;

    if constexpr (kNet) {
        if (is_far(a, r))
            return !has_room(a, n, bank, r);
        return !has_credit(a, n, load_u64(&a.state->from[r]), load_u64(credit_at(a, a.rank, r, bank)));
    } else {
#pragma unroll
        for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
            credit = i == bank ? q.credit[i] : credit;
        return !has_credit(a, n, q.from, credit);
    }
}

__device__ __forceinline__ void begin(const ep_ll_args &a, Op *op, const Asked &q)
{
    const bool sends = a.phases & EP_LL_SEND;
    const uint64_t n = sends ? q.number + 1 : q.held;
    const uint32_t bank = bank_of(a, n);

    if (sends && threadIdx.x == 0)
        atomicMax((unsigned long long *)&a.state->begun, (unsigned long long)n);
    op_begin(a, op, n, q.timeout_ns, [&](uint32_t r) { return (kNet ? load_u64(&a.state->from[r]) : q.from) <= n; });
    each_word(a, [&](uint32_t r) { return lacks(a, q, n, bank, r); }, [&](uint32_t w, uint32_t lacking) {
        if (threadIdx.x == 0)
            op->lacking[w] = lacking & op->members[w];
    });
    if (threadIdx.x == 0)
        op->valid = sends || (q.held && q.generation == a.generation && q.number - q.held < a.banks);
    __syncwarp();
}

/* The bank's last owner, and what the handle held: given up if they were not combined.  Warp 0 of one block,
 * of one that has little else to do. */
__device__ inline void give_up_old(const ep_ll_args &a, uint64_t n)
{
    const uint64_t held = a.state->handles[a.handle].number;

    if (held && held + a.banks > n)
        give_credit(a, held);
    if (n > a.banks)
        give_credit(a, n - a.banks);
}

/* Its dispatch failed, so it will not be combined.  Rare, and out of line: all else has more registers so. */
__device__ __noinline__ inline void give_up_failed(const ep_ll_args &a, uint64_t n)
{
    give_credit(a, n);
}

/* The clerk of the last block, which has read the scratch; no block reads rows or headers of the number any more if
 * somebody was late.  The handle belongs to this number from here on, unless it could not be used: a send-only op's has
 * lost its bank meanwhile. */
__device__ inline void finish(const ep_ll_args &a, const Op &op, struct ep_device_scratch &s)
{
    struct ep_device_handle *h = &a.state->handles[a.handle];

    clear_scratch(a, &s);
    const int32_t status = !op.valid                         ? EP_STALE_HANDLE
                           : !anybody_counted_in(a, op, s) ? EP_DETACHED
                           : s.overflow                    ? EP_OVERFLOW
                                                           : EP_OK;
    const bool receives = a.phases & EP_LL_RECEIVE;
    const bool routed = receives && status == EP_OK && first_late(a, s) == kNobody;

    if (threadIdx.x == kMovers) {
        a.state->left_before += a.blocks;
        if (op.valid) {
            a.state->number = a.phases & EP_LL_SEND ? op.number : a.state->number;
            h->number = op.number;
            h->combined = 0;
            h->generation = a.generation;
            h->tokens = a.tokens;
            h->top_k = a.top_k;
            h->layout = a.layout;
            h->alignment = a.alignment;
            h->wire_dtype = a.wire_dtype;
            h->routed = routed;
            for (uint32_t w = 0; w < words_of(a); w++)
                h->excluded[w] = s.ranks[w].gone | s.ranks[w].outside;
        }
    }
    if (op.valid && receives && !routed)
        give_up_failed(a, op.number);
    op_record(a, op, s, EP_DEVICE_DISPATCH, status);
}

/*
 * The beginning, the sending, and what is to be known before rows can be laid out: how many come.  Once more for those
 * who have joined meanwhile.
 */
template <Cast C>
__device__ __forceinline__ void exchange(const ep_ll_args &a, Op *op, const Batch &batch, uint32_t *rows,
                                         uint32_t *base, uint32_t *total, Header *header, uint32_t *there)
{
    const bool sends = a.phases & EP_LL_SEND, receives = a.phases & EP_LL_RECEIVE;
    __shared__ uint32_t counted, joined;
    uint32_t ranks = 0; /* to send to (is_sent_to); 0: the op has not begun */
    uint64_t start = 0;
    Part<C> part;
    Asked asked;

    if (threadIdx.x < 32)
        asked = ask(a);
#pragma unroll 1
    do {
        if (sends) /* not once for all: counts have been where the routes were */
            fetch<C>(a, batch, &part);
        if (!ranks) {
            if (threadIdx.x < 32) {
                begin(a, op, asked);
                if (sends && tells(a))
                    give_up_old(a, op->number);
            }
            __syncthreads();
            if (!op->valid)
                return;
            ranks = kNet ? kAll : op->members[0];
            start = tells(a) ? now_ns() : 0;
        }
        const bool fenced = sends && send<C>(a, op, batch, part, total, ranks);

        if (threadIdx.x == 0)
            counted = 0;
        __syncthreads();
        if (threadIdx.x >= 32) {
            if (receives)
                take_counts(a, op, rows, base);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                atomicAdd(&counted, 1);
        } else {
            if (kNet && sends)
                put_rows(a, *op);
            const uint64_t from = sends && !kNet ? ask_again(a, fenced) : 0;

            /* The first row's header mostly comes with the counts. */
            if (receives && by_expert(a) && blockIdx.x / a.ranks < a.max_tokens && !is_far(a, blockIdx.x % a.ranks))
                while (!__all_sync(kAll, look_at_header(a, *op, blockIdx.x % a.ranks, blockIdx.x / a.ranks, header)
                                             | (*(volatile uint32_t *)&counted == kWarps - 1)))
                    ;
            const uint32_t some = newcomers(a, *op, from), all = __all_sync(kAll, header->there);

            if (threadIdx.x == 0) {
                joined = some;
                *there = all;
            }
        }
        __syncthreads();
        ranks = joined;
        if (ranks || anybody(a, op->missed)) {
            __syncthreads();
            if (threadIdx.x == 0)
                op->members[0] |= ranks;
#pragma unroll 1
            for (uint32_t r = threadIdx.x; r < a.ranks; r += kThreads)
                if (has(op->missed, r))
                    rows[r] = 0;
            __syncthreads();
        }
    } while (ranks);
    if (tells(a) && threadIdx.x == 0)
        a.state->scratch.wait_ns = now_ns() - start;
}

/* shared: ep_device_shared_bytes() */
template <Cast C> __device__ __forceinline__ void run(const ep_ll_args &a, uint32_t *shared)
{
    __shared__ uint32_t to[EP_DEVICE_NODE_RANKS], targets, index[EP_MAX_TOP_K], again, there;
    __shared__ float weight[EP_MAX_TOP_K];
    alignas(16) __shared__ uint32_t scales[2 * kPassScales];
    __shared__ Op op;
    __shared__ struct ep_device_scratch scratch;
    const uint32_t wide = max(a.max_tokens * a.max_top_k, a.local_experts * a.ranks);
    uint32_t *slot = slots_of_ranks(), *rows = rows_of_ranks();
    uint32_t *base = shared, *total = shared + wide, *first = total + a.local_experts;
    const Batch batch = { (int32_t *)shared, slot, index, weight, to, &targets, scales };
    const bool told = tells(a) || a.blocks - 1 - blockIdx.x < a.ranks;
    Share share = { blockIdx.x, a.blocks };
    Header header = {};
    Arrival arrival = {};
    bool repeats = false;

    if (threadIdx.x == 0)
        again = 0; /* seen after the next barrier */
    exchange<C>(a, &op, batch, rows, base, total, &header, &there);
    const bool receives = a.phases & EP_LL_RECEIVE && op.valid;
    /* The clerk of a block that waits for nothing more; all but the row in hand is written. */
    const auto arrives = [&] {
        if (!arrival.asked)
            arrive(a, op, told, &arrival);
    };
    /* The clerk, while that row is being written. */
    const auto last = [&] {
        if (!was_last(a, arrival))
            return;
        read_scratch(a, &scratch);
        if (!repeats && receives && differed(a, scratch)) {
            if (threadIdx.x == kMovers)
                again = 1;
        } else {
            finish(a, op, scratch);
        }
    };

#pragma unroll 1
    for (;;) {
        if (receives && by_expert(a)) {
            receive_by_expert(a, &op, share, header, there && !repeats, rows, base, total, first, arrives);
        } else {
            if (receives) {
                __syncthreads(); /* all have seen whom exchange() has missed: more may be from here on */
                receive_in_place(a, &op, share, rows);
            }
            __syncthreads();
            if (is_clerk())
                arrives();
        }
        if (repeats)
            __syncthreads(); /* all warps have placed their part of the last row: a credit may follow */
        if (is_clerk())
            last();
        __syncthreads();
        if (!again || repeats)
            break;
        prepare_again(a, &op, rows, base);
        share = { 0, 1 };
        header.there = false;
        repeats = true;
    }
    if (threadIdx.x == 0)
        leave(a);
}

} // namespace dispatch
} // namespace ep

#endif
