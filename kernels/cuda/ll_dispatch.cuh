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

/* Warp 0 of each block, while the others read routes.  All that it has to know is asked for at once: one round
 * trip to memory. */
__device__ inline void begin(const ep_ll_args &a, Op *op)
{
    const uint32_t lane = threadIdx.x;
    const bool sends = a.phases & EP_LL_SEND;
    const struct ep_device_handle *h = &a.state->handles[a.handle];
    const uint64_t number = load_u64(&a.state->number), held = load_u64(&h->number);
    const uint32_t generation = load_u32(&h->generation);
    const uint64_t timeout_ns = load_u64(&a.state->timeout_ns), from = from_of_lane(a);
    uint64_t credits[EP_MAX_LL_BANKS], credit = 0;

    for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
        credits[i] = lane < a.ranks && i < a.banks ? load_u64(credit_at(a, a.rank, lane, i)) : 0;

    const uint64_t n = sends ? number + 1 : held;

    if (sends && lane == 0)
        atomicMax((unsigned long long *)&a.state->begun, (unsigned long long)n);
    op_begin(a, op, n, __ballot_sync(kAll, from <= n), timeout_ns);
    for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
        credit = i == bank_of(a, n) ? credits[i] : credit;
    /* Partner: give_credit.  No store of ours is issued before the load that it depends on has returned. */
    const uint32_t lacking = __ballot_sync(kAll, from <= n && !has_credit(a, n, from, credit));

    if (lane == 0) {
        op->lacking = lacking & op->members;
        op->valid = sends || (held && generation == a.generation && number - held < a.banks);
    }
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

/* Warp 0 of the last block.  The handle belongs to this number from here on. */
__device__ inline void finish(const ep_ll_args &a, const Op &op)
{
    __shared__ struct ep_device_scratch s;
    struct ep_device_handle *h = &a.state->handles[a.handle];

    take_scratch(a, &s);
    if (threadIdx.x == 0)
        a.state->left_before += a.blocks;
    const int32_t status = !counted_in(op, s) ? EP_DETACHED : s.overflow ? EP_OVERFLOW : EP_OK;

    if (threadIdx.x == 0) {
        const bool routed = a.phases & EP_LL_RECEIVE && status == EP_OK && !s.late;

        a.state->number = a.phases & EP_LL_SEND ? op.number : a.state->number;
        *h = { op.number, 0, a.generation, a.tokens, a.top_k, a.layout, a.alignment, a.wire_dtype, routed,
               s.gone | s.outside };
    }
    op_record(a, op, s, EP_DEVICE_DISPATCH, status);
}

/* Warp 0 of the last block: a send-only op's handle has lost its bank meanwhile. */
__device__ inline void refuse(const ep_ll_args &a, const Op &op)
{
    __shared__ struct ep_device_scratch s;

    take_scratch(a, &s);
    if (threadIdx.x == 0)
        a.state->left_before += a.blocks;
    op_record(a, op, s, EP_DEVICE_DISPATCH, EP_STALE_HANDLE);
}

/* shared: ep_device_shared_bytes() */
template <Cast C> __device__ __forceinline__ void run(const ep_ll_args &a, uint32_t *shared)
{
    __shared__ uint32_t slot[EP_DEVICE_MAX_RANKS], to[EP_DEVICE_MAX_RANKS], index[EP_MAX_TOP_K];
    __shared__ uint32_t rows[EP_DEVICE_MAX_RANKS], joined;
    __shared__ float weight[EP_MAX_TOP_K];
    __shared__ Op op;
    const uint32_t wide = max(a.max_tokens * a.max_top_k, a.local_experts * a.ranks);
    uint32_t *base = shared, *total = shared + wide, *first = total + a.local_experts;
    const Batch batch = { (int32_t *)shared, slot, index, weight, to };
    const bool sends = a.phases & EP_LL_SEND;
    Part<C> part;
    const auto open = [&] {
        begin(a, &op);
        if (sends && tells(a))
            give_up_old(a, op.number);
    };

    if (sends)
        fetch<C>(a, batch, &part, open);
    else if (threadIdx.x < 32)
        open();
    __syncthreads();
    if (!op.valid) {
        if (threadIdx.x < 32 && arrive(a, op, false))
            refuse(a, op);
        if (threadIdx.x == 0)
            leave(a);
        return;
    }
    const uint64_t start = tells(a) ? now_ns() : 0;
    const bool receives = a.phases & EP_LL_RECEIVE, told = tells(a) || a.blocks - 1 - blockIdx.x < a.ranks;
    uint32_t ranks = op.members;
    Header header = {};
    __shared__ uint32_t counted, again;

    do {
        if (sends && ranks != op.members)
            fetch<C>(a, batch, &part, [] {}); /* counts have been where the routes were */
        if (sends)
            send<C>(a, &op, batch, part, total, ranks);
        if (threadIdx.x == 0)
            counted = again = 0;
        __syncthreads();
        if (threadIdx.x >= 32) {
            if (receives)
                take_counts(a, &op, rows, base);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                atomicAdd(&counted, 1);
        } else {
            const uint32_t some = newcomers(a, op);

            if (threadIdx.x == 0)
                joined = some;
            /* The first row's header mostly comes with the counts. */
            if (receives && by_expert(a) && blockIdx.x / a.ranks < a.max_tokens)
                while (!__all_sync(kAll, look_at_header(a, op, blockIdx.x % a.ranks, blockIdx.x / a.ranks, &header))
                       && *(volatile uint32_t *)&counted < kWarps - 1)
                    ;
        }
        __syncthreads();
        ranks = joined;
        if (ranks | op.missed) {
            __syncthreads();
            if (threadIdx.x == 0)
                op.members |= ranks;
            if (threadIdx.x < a.ranks && op.missed >> threadIdx.x & 1)
                rows[threadIdx.x] = 0;
            __syncthreads();
        }
    } while (ranks);
    if (tells(a) && threadIdx.x == 0)
        a.state->scratch.wait_ns = now_ns() - start;

    const auto last = [&] {
        if (!arrive(a, op, told))
            return;
        if (receives && differed(a)) {
            if (threadIdx.x == 0)
                again = 1;
        } else {
            finish(a, op);
        }
    };

    if (receives && by_expert(a)) {
        receive_by_expert(a, &op, { blockIdx.x, a.blocks }, header, rows, base, total, first, last);
    } else {
        if (receives)
            receive_in_place(a, &op, rows);
        __syncthreads();
        if (threadIdx.x < 32)
            last();
    }
    __syncthreads();
    if (again) {
        receive_again(a, &op, rows, base, total, first);
        if (threadIdx.x < 32)
            finish(a, op);
    }
    if (threadIdx.x == 0)
        leave(a);
}

} // namespace dispatch
} // namespace ep

#endif
