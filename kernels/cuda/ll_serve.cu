/*
 * Executor server: the kernel that takes an op from a mailbox, and the one that puts it there.  window.h has the
 * hand-over.
 *
 * What is to be done is not known when the kernel is launched, so it can do everything, with a grid for the largest
 * op.  Each block takes the op (ll_take.cuh); one that the op has no work for leaves.  (When what is to be done can be
 * guessed, most entries have a kernel that is told instead: ll_expect.cu, ht_entry.cuh.  HT ops that were not have a
 * kernel of theirs behind this one, ht_serve.cu, for which block 0 finds out.)
 *
 * ## Who trusts whom
 * The worker can write all of its window at any time: the mailbox, the report, and every bank.  What follows
 * holds whatever it writes.
 *   - No address comes from what is read there and not checked.  The op is judged as a copy that nobody else
 *     can reach.  ll_device.cuh says the same of counts, headers, places and credits.  The report is written,
 *     and what is read of it is added to, never followed.
 *   - Handles, routes, numbers, membership, the halves of ops and the counters of blocks are in the state and at
 *     the desk, which the worker does not have.
 *   - When the op changes between two blocks' copies, blocks execute different ops, each of them a good one.
 *     Blocks do not wait for each other, but for one wait that is bounded (receive_again), so all of them come
 *     to their end.  `through` counts all blocks of the grid, whatever they did, so the entry is over when they
 *     are.  What the op's own counters are left at is set right by the last block, before the next op.
 *     What such an op has sent may be any rows of this rank, or none: as far as its peers can tell, it sent
 *     these or is late.
 *   - Who rings twice, or for no reason, has the entries used up by ops of its own, one after the other.
 */
#include "launch.cuh"
#include "ll_take.cuh"

namespace ep {
namespace {

/* All threads: what the op is, and whether it is good. */
__device__ inline void find_out(const ep_ll_serve &s)
{
    const bool completes = entry.op.kind == EP_OP_COMPLETE;

    if (threadIdx.x == 0)
        entry.kind = entry.op.kind;
    if (completes)
        take_half(s);
    const bool beyond = needs_regions();

    if (beyond)
        take_regions(s.desk, s.number);
    entry.beyond = beyond;
    make_args(s, beyond ? &entry.regions : nullptr, completes);
}

/* Block 0: the op is good, and ht_serve.cu's. */
__device__ inline void hand_on(const ep_ll_serve &s)
{
    struct ep_ht_desk *desk = &s.desk->ht;

    copy_words(&desk->op, &entry.op);
    copy_words(&desk->args, &desk->rank.base);
    __syncthreads();
    if (threadIdx.x == 0) {
        ep_ht_fill(&desk->rank, entry.beyond ? &entry.regions : nullptr, &entry.op, &desk->args);
        desk->spins = entry.spins;
        desk->place = entry.place;
        store_u64(&desk->number, s.number);
    }
}

/* One thread: the op is not executed, and that is all that becomes of it. */
__device__ inline void turn_away(const ep_ll_args &a, const struct ep_op &op, int32_t status)
{
    struct ep_device_report *report = &((struct ep_control *)a.own)->gpu.report;
    const uint32_t part = op.kind == EP_OP_COMBINE ? EP_DEVICE_COMBINE : EP_DEVICE_DISPATCH;
    struct ep_device_record r = {};

    r.status = status;
    r.generation = op.generation;
    r.sequence = ++a.state->scratch.sequence;
    r.start_ns = r.end_ns = now_ns();
    count(&a.state->counters[part], r, 0);
    if (report->failures++ == 0)
        keep_failure(report, r, part);
    if (op.handle < EP_MAX_HANDLES)
        report->records[op.handle][part] = r;
}

__device__ inline void execute()
{
    const uint32_t kind = entry.op.kind, from = entry.args.input_dtype, wire = entry.args.wire_dtype;

    if (kind == EP_OP_DISPATCH) {
        if (wire == from)
            dispatch_op<Cast::none>();
        else if (from == EP_BF16)
            dispatch_op<Cast::bf16>();
        else if (from == EP_FP16)
            dispatch_op<Cast::fp16>();
        else
            dispatch_op<Cast::fp32>();
    } else if (kind == EP_OP_COMBINE) {
        if (wire == EP_BF16)
            combine_op<__nv_bfloat16>();
        else if (wire == EP_FP16)
            combine_op<__half>();
        else
            combine_op<float>();
    } else if (threadIdx.x < 32) {
        combine::release(entry.args);
    }
}

/* Warp 0: the block is through.  All blocks or the last one tell the worker (window.h). */
__device__ inline void end_entry(const ep_ll_serve &s, bool works)
{
    if (!pass(s, entry.spins, works))
        return;
    set_right(entry.args.state);
    if (load_u64(&s.desk->ht.number) == s.number)
        return;
    tell_stream(s, !entry.spins);
    log_op(s, entry.op, entry.kind, entry.place, entry.ended);
}

__global__ void __launch_bounds__(kThreads, kBlocks) serve(const __grid_constant__ ep_ll_serve s)
{
    take(s);
    if (entry.closing)
        return;
    const bool asks_ht = is_ht(entry.op); /* of which more blocks may be to come */

    if (blockIdx.x == 0 && !asks_ht)
        answer_bell(s, entry.spins, gridDim.x);
    find_out(s);
    const bool good = entry.status == EP_OK, ht = good && asks_ht;
    const bool works = blockIdx.x == 0 || (good && !ht && blockIdx.x < entry.args.blocks);

    if (blockIdx.x == 0 && asks_ht)
        answer_bell(s, entry.spins, gridDim.x + (ht ? s.ht_blocks : 0));
    if (!good) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            turn_away(entry.args, entry.op, entry.status);
    } else if (ht) {
        if (blockIdx.x == 0)
            hand_on(s);
    } else if (works) {
        if (blockIdx.x == 0 && entry.args.phases == EP_LL_SEND)
            keep_half(s, entry.op);
        execute();
    }
    __syncthreads();
    if (threadIdx.x < 32)
        end_entry(s, works);
}

#if !EP_LL_NET
/* ---- the worker's half ---------------------------------------------------------------------------- */

constexpr uint32_t kLooks = 64; /* some 50 us */

/* One thread: until all blocks are through, or nobody is left to run them.  It looks all the time, at `closed` now and
 * then. */
__device__ inline void wait_until_done(struct ep_mailbox *mailbox)
{
    for (uint32_t looks = 1; looks % kLooks != 0 || !load_u32(&mailbox->closed); looks++) {
        /* Partner: pass().  What comes on the stream begins after it. */
        const uint64_t v = acquire_u64((const uint64_t *)&mailbox->through);
        const uint32_t blocks = (uint32_t)(v >> 32), arrived = (uint32_t)v / EP_MAILBOX_ARRIVED;

        if (blocks == 0)
            continue;
        if (arrived >= blocks)
            let_next_come(); /* it takes the place of no block of the op, and of none that a peer waits for */
        if ((uint32_t)v % EP_MAILBOX_ARRIVED >= blocks)
            break;
    }
    store_u64((uint64_t *)&mailbox->through, 0); /* and blocks */
}

/* Before await_stream() the op ahead may run, but its blocks have taken it.  After it all that is before this in the stream has
 * been performed, which needs no fence of ours. */
__global__ void gate(const __grid_constant__ struct ep_op op, struct ep_mailbox *mailbox)
{
    if (threadIdx.x < kOpVecs)
        store_vec((Vec *)&mailbox->op[0] + threadIdx.x, ((const Vec *)&op)[threadIdx.x]);
    __syncwarp();
    if (threadIdx.x == 0) {
        fence_gpu(); /* release; partner: the server's wait for the bell, on this GPU too */
        store_u32(&mailbox->bell, EP_BELL_COMING);
    }
    await_stream();
    if (threadIdx.x == 0) {
        store_u32(&mailbox->bell, ep_bell_of(0));
        wait_until_done(mailbox);
    }
}

#endif

} // namespace
} // namespace ep

extern "C" int ep_ll_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    uint32_t expected = 0;
    int error = ep_ll_gate_prepare();

    if (error == cudaSuccess)
        error = ep_ll_expect_prepare(shared_bytes, shares, &expected);
    if (error == cudaSuccess)
        error = ep::fit_one((const void *)ep::serve, shared_bytes, shares, blocks);
    *blocks = expected < *blocks ? expected : *blocks;
    return error;
}

extern "C" int ep_ll_serve_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, void *stream)
{
    return ep::launch(ep::serve, blocks, ep::kThreads, shared_bytes, false, stream, *serve);
}

#if !EP_LL_NET
extern "C" int ep_ll_gate_prepare(void)
{
    cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, ep::gate);
}

extern "C" int ep_ll_gate(struct ep_mailbox *mailbox, const struct ep_op *op, void *stream)
{
    return ep::launch(ep::gate, 1, 32, 0, true, stream, *op, mailbox);
}
#endif
