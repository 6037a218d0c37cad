/*
 * HT dispatch.  ht_device.cuh has the protocol.
 *
 * All blocks count the batch and find each row's number, and then send what goes to other nodes; block 0 asks and grants
 * meanwhile.  Then some warps of each block take rows as they land, and the others push; who has pushed all of his takes
 * rows too.
 */
#ifndef EP_HT_DISPATCH_CUH
#define EP_HT_DISPATCH_CUH

#include "ht_relay.cuh"
#include "ht_receive.cuh"
#include "ht_send.cuh"

namespace ep {
namespace ht {
namespace dispatch {

/* Warps, when others copy rows meanwhile: more would end each row later, which counts on one node. */
constexpr uint32_t kPushers = kNet ? 1056 : 264;

/* Warp 0 of block 0. */
__device__ inline void start(const ep_ht_args &a, Op *op)
{
    const struct ep_device_ht_handle &h = a.state->ht_handles[a.handle];
    const uint64_t n = a.state->ht_number + 1;
    const bool usable = !a.cached || (h.number && h.generation == a.generation && h.tokens == a.tokens
                                      && h.top_k == a.top_k);

    if (threadIdx.x == 0) {
        atomicMax((unsigned long long *)&a.state->ht_begun, (unsigned long long)n);
        fence_total(); /* partner: the server's write of ht_from, or of `held` */
        await_hold(a);
    }
    __syncwarp();
    begin(a, op, ep_ht_tag(n, 0), n, usable ? EP_OK : EP_STALE_HANDLE);
    choose_gates(a, op->members);
}

/* Does this warp push from the beginning, when rows that come are to be copied?  One to all but one of a block do. */
__device__ inline bool pushes_first(const ep_ht_args &a)
{
    const uint32_t pushers = min(max((kPushers + a.blocks - 1) / a.blocks, 1u), kWarps - 1);

    return a.layout != EP_LAYOUT_PACKED || threadIdx.x / 32 >= kWarps - pushers;
}

/* From what is granted to what has come. */
template <Cast C> __device__ inline void move(const ep_ht_args &a, const Op &op, const Grants &g)
{
    const uint32_t warp = threadIdx.x / 32;
    const uint64_t rows = run_of(a).rows;

    if (blockIdx.x == 0 && warp == 0) {
        pushed(a, op);
        relay::relayed(a, op);
        await_rows(a, op);
        return;
    }
    if (kNet && send::puts_records(a)) {
        pushed(a, op);
        relay::relayed(a, op);
        send::put_rest(a, op);
    } else if (pushes_first(a)) {
        push_tokens<C>(a, op, g);
        relay::relay_records(a, op);
    } else {
        pushed(a, op);
        relay::relayed(a, op);
    }
    if (a.layout == EP_LAYOUT_PACKED && rows <= a.out_rows)
        zero_padding(a, warp * a.blocks + blockIdx.x - 1, a.blocks * kWarps - 1);
    receive_rows(a, op, rows);
}

/* Warp 0 of the last block. */
__device__ inline void keep_handle(const ep_ht_args &a, const Op &op, int32_t status, const uint32_t *arrived)
{
    struct ep_device_ht_handle *h = &a.state->ht_handles[a.handle];
    const uint32_t *unsent = run_of(a).unsent;

    if (status == EP_STALE_HANDLE)
        return;
    collect(a, h->sent, [&](uint32_t d) { return op.status == EP_OK && has(op.members, d) && !has(unsent, d); });
    if (threadIdx.x < words_of(a))
        h->arrived[threadIdx.x] = arrived[threadIdx.x];
    if (threadIdx.x == 0) {
        h->number = op.number;
        h->generation = a.generation;
        h->tokens = a.tokens;
        h->top_k = a.top_k;
        h->layout = a.layout;
        h->alignment = a.alignment;
        h->routed = status == EP_OK || status == EP_OVERFLOW; /* peers' combines need this rank even after that */
    }
    __syncwarp();
}

/* Warp 0 of the last block: what went where. */
__device__ inline void sum_up(const ep_ht_args &a, const Op &op)
{
    struct ep_device_ht_run &run = run_of(a);
    uint64_t dropped = 0, bytes = 0;

    each_rank(a, [&](uint32_t d) {
        if (op.status != EP_OK || !has(op.members, d) || has(run.unsent, d))
            dropped += a.totals[choice_column(a, d)];
        else if (d != a.rank && !is_far(a, d) && run.roomy >> place_at(a, d) & 1)
            bytes += (uint64_t)a.totals[d] * (a.row_bytes + a.row_scales * a.scale_bytes);
    });
    if (op.status == EP_OK)
        bytes += relay::wire_bytes(a);
    if (dropped)
        atomicAdd((unsigned long long *)&run.dropped, (unsigned long long)dropped);
    if (bytes)
        atomicAdd((unsigned long long *)&run.wire_bytes, (unsigned long long)bytes);
    __syncwarp();
}

__device__ inline int32_t status_of(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_ht_run &run = run_of(a);

    if (op.status != EP_OK)
        return op.status;
    if (run.first_late)
        return EP_TIMEOUT;
    if (anybody(a, run.mismatched))
        return EP_FAILED_PRECONDITION;
    if (!present(a, op.number, a.rank))
        return EP_DETACHED;
    return run.rows_needed ? EP_OVERFLOW : EP_OK;
}

/* shared: ep_device_ht_shared_bytes() */
template <Cast C> __device__ __forceinline__ void run(const ep_ht_args &a, uint32_t *shared)
{
    __shared__ Op op;
    __shared__ struct ep_net_grants grants;
    __shared__ Exchange x;
    const Counting counting = counting_of(a, shared);
    const uint32_t first = first_numbering(a);
    uint32_t met = 0, roomy = 0;

    if (blockIdx.x == 0 && threadIdx.x < 32)
        start(a, &op);
    each_list(a, 0, [&](uint32_t list) { count_list(a, counting, list); });
    barrier(a, &met);
    take_op(a, &op);
    if (blockIdx.x == 0 && op.status == EP_OK)
        ask(a, op, &x);
    add_all_up(a, first);
    arrive(a, &met);
    if (blockIdx.x >= first) {
        wait_for_all(a, met);
        each_list(a, first, [&](uint32_t list) { place_list(a, counting, list); });
        if (op.status == EP_OK)
            send::send_records<C>(a, op, met);
        __syncthreads();
    }
    if (blockIdx.x == 0) {
        if (op.status == EP_OK)
            grant(a, &op, shared, &x);
        wait_for_all(a, met);
    }
    barrier(a, &met);
    take_op(a, &op);
    if (op.status == EP_OK) {
        find_own_grants(a, &grants);
        if (threadIdx.x < 32)
            roomy = __ballot_sync(kAll, grants.mask >> threadIdx.x & 1 && grants.bits[threadIdx.x] & EP_HT_GRANT_ROOM);
        move<C>(a, op, grants);
    }
    barrier(a, &met);
    if (blockIdx.x == 0 && threadIdx.x < 32)
        close(a, op);
    if (op.status == EP_OK && anybody_missed(a)) {
        barrier(a, &met);
        for (uint32_t s = 0; s < a.ranks; s++)
            if (is_missed(a, s))
                zero_source(a, s, run_of(a).rows, threadIdx.x / 32 * a.blocks + blockIdx.x, a.blocks * kWarps);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        run_of(a).roomy = roomy;
    const bool last = finish(a, op, true, [&](int32_t *status, uint32_t *arrived) {
        collect(a, arrived, [&](uint32_t s) { return op.status == EP_OK && has(run_of(a).given, s) && !is_missed(a, s); });
        *status = status_of(a, op);
        relay::keep_handle(a, op);
        keep_handle(a, op, *status, arrived);
        sum_up(a, op);
        if (threadIdx.x == 0) {
            a.state->ht_number = op.number;
            a.state->ht_combines = 0;
        }
    });

    if (last) {
        clear_totals(a);
        clear_net(a);
    }
}

} // namespace dispatch
} // namespace ht
} // namespace ep

#endif
