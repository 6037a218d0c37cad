/*
 * Executor server: the kernel that takes an op from a mailbox, and the one that puts it there.  window.h has the
 * hand-over.
 *
 * What is to be done is not known when the kernel is launched, so it can do everything, with a grid for the largest
 * op.  Each block copies the op to its shared memory, judges its copy and makes the arguments from it that the kernels
 * of executor direct have in their parameters; a block that the op has no work for leaves.  (When what is to be done
 * can be guessed, most entries have a kernel that is told instead: ll_expect.cu, ht_entry.cuh.  HT ops that were not
 * have a kernel of theirs behind this one, ht_serve.cu, for which block 0 finds out.)
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
 *
 * ## Memory of the worker's own
 * Spans beyond the window lie in regions, which the server has mapped and lists at the desk.  A block whose op has such
 * a span takes a copy of the list, judges the op by it and takes addresses from it: what the list says later is of no
 * matter for this block.  The server may unmap what it has struck off the list when no block can have found it any
 * more, which entries tell by Dekker:
 *     block: looked = number of its entry; fence; read the list       last block of an entry: log.entry = its number
 *     server: strike off (the copy is over); read looked; wait until log.entry >= that
 * Either the block finds it struck off, or the server finds the block's entry in `looked` and waits for the end of it.
 * Entries do not overlap, so the one in `looked` is the last that can have found it.
 */
#include "launch.cuh"
#include "ll_serve.cuh"
#include "op_rules.h"

namespace ep {
namespace {

/* ---- an op is taken ------------------------------------------------------------------------ */

/* What a block knows of its entry. */
struct Entry {
    alignas(16) struct ep_op op;
    struct ep_ll_args args;
    struct ep_regions regions; /* if the op has spans there */
    uint64_t ended; /* ops before */
    uint32_t closing, spins, beyond; /* beyond: it has spans there */
    uint32_t kind;  /* as it was in the mailbox: a complete becomes the op that it finishes */
    uint32_t place; /* and where */
    int32_t status; /* of the op before it is executed */
};
__shared__ Entry entry;
extern __shared__ uint32_t shared[]; /* ep_device_shared_bytes() */

constexpr uint32_t kFirstSpan = offsetof(struct ep_op, x) / sizeof(Vec);
constexpr uint32_t kLastSpan = offsetof(struct ep_op, topk_grads) / sizeof(Vec);
constexpr uint32_t kBaseVecs = offsetof(struct ep_ll_args, blocks) / sizeof(Vec);

/* Is this piece of an op a span beyond the window?  In the second word are the high bits of its offset. */
__device__ inline bool is_beyond(uint32_t piece, Vec v)
{
    return piece >= kFirstSpan && piece <= kLastSpan && v.w[1] >= EP_REGION_BYTES >> 32;
}

/* A piece of the op that is rung for; what is at the first place is asked for together with the bell. */
__device__ inline Vec piece_of(const struct ep_mailbox *mailbox, uint32_t piece)
{
    const Vec first = load_vec((const Vec *)&mailbox->op[0] + piece);
    const uint32_t place = ep_bell_op(load_u32(&mailbox->bell));

    if (piece == 0)
        entry.place = place;
    return place == 0 ? first : load_vec((const Vec *)&mailbox->op[place] + piece);
}

/* All at once, a round trip to memory or two: the op, and what does not depend on it. */
__device__ inline void take(const ep_ll_serve &s)
{
    const uint32_t i = threadIdx.x - 32;

    if (threadIdx.x < kOpVecs)
        ((Vec *)&entry.op)[threadIdx.x] = piece_of(s.mailbox, threadIdx.x);
    else if (threadIdx.x == kOpVecs)
        entry.closing = load_u32(&s.desk->closing);
    else if (threadIdx.x == kOpVecs + 1)
        entry.spins = load_u32(&s.mailbox->spins);
    else if (threadIdx.x == kOpVecs + 2)
        entry.ended = load_u64(&s.desk->log.ended);
    if (threadIdx.x >= 32 && i < kBaseVecs)
        ((Vec *)&entry.args)[i] = load_vec((const Vec *)&s.desk->rank.base + i);
    __syncthreads();
}

/* A complete is the half that was sent; one that was not is of kind 0. */
__device__ inline void take_half(const ep_ll_serve &s)
{
    const uint32_t handle = entry.op.handle;

    __syncthreads();
    if (handle < EP_MAX_HANDLES && threadIdx.x < kOpVecs)
        ((Vec *)&entry.op)[threadIdx.x] = ((const Vec *)&s.desk->half[handle])[threadIdx.x];
    __syncthreads();
}

/* Has the op spans beyond the window? */
__device__ inline bool needs_regions()
{
    return __syncthreads_or(threadIdx.x < kOpVecs
                            && is_beyond(threadIdx.x, ((const Vec *)&entry.op)[threadIdx.x]));
}

/* All threads, for an op that has spans there. */
__device__ __noinline__ void take_regions(struct ep_ll_desk *desk, uint64_t number)
{
    if (threadIdx.x == 0) {
        store_u64(&desk->looked, number);
        fence_total(); /* Dekker; partner: ep_cuda_serve_forget() */
    }
    __syncthreads();
    if (threadIdx.x < EP_MAX_REGIONS) {
        const Vec v = load_vec(&desk->region[threadIdx.x]);
        struct ep_region *region = &entry.regions.region[threadIdx.x];

        region->start = (uint8_t *)((uint64_t)v.w[1] << 32 | v.w[0]);
        region->bytes = (uint64_t)v.w[3] << 32 | v.w[2];
    }
    if (threadIdx.x == 0)
        entry.regions.n = EP_MAX_REGIONS;
    __syncthreads();
}

/* Is it for the kernel behind this one? */
__device__ inline bool is_ht(const struct ep_op &op)
{
    return op.mode == EP_MODE_HT && (op.kind == EP_OP_DISPATCH || op.kind == EP_OP_COMBINE);
}

__device__ inline int32_t judge(const ep_ll_serve &s, const struct ep_op &op, const struct ep_regions *regions,
                                bool completes)
{
    struct check c;

    if (completes && op.kind == 0)
        return EP_FAILED_PRECONDITION;
    c.limits = &s.desk->limits;
    c.arena = s.desk->arena;
    c.op = &op;
    c.regions = regions;
    const ep_status status = check_op(&c);

    if (is_ht(op) && !ep_ht_can_reach(&op))
        return EP_INVALID_ARGUMENT;
    return status;
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

/* ---- and executed ------------------------------------------------------------------------------ */

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

/* Functions of their own, each with as many registers as it wants, as kernels of executor direct are. */
template <Cast C> __device__ __noinline__ void dispatch_op()
{
    dispatch::run<C>(entry.args, shared);
}

template <class T> __device__ __noinline__ void combine_op()
{
    combine::run<T>(entry.args);
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

/* All threads: what the op is, whether it is good, and the arguments that it makes. */
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
    const struct ep_regions *regions = beyond ? &entry.regions : nullptr;

    entry.beyond = beyond;
    if (threadIdx.x == 0)
        ep_ll_fill(&s.desk->rank, regions, &entry.op, completes, &entry.args);
    else if (threadIdx.x == 32)
        entry.status = judge(s, entry.op, regions, completes);
    __syncthreads();
}

/* Warp 0: the block is through.  All blocks or the last one tell the worker (window.h). */
__device__ inline void end_entry(const ep_ll_serve &s, bool works)
{
    if (!pass(s, entry.spins, works))
        return;
    set_right(entry.args.state);
    if (load_u64(&s.desk->ht.number) == s.number)
        return;
    if (threadIdx.x == 0 && !entry.spins)
        store_u32(&s.mailbox->bell, EP_BELL_DONE);
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
        const uint64_t v = load_u64((const uint64_t *)&mailbox->through);
        const uint32_t through = (uint32_t)v, blocks = (uint32_t)(v >> 32);

        if (blocks != 0 && through >= blocks)
            break;
    }
    fence_gpu(); /* acquire; partner: pass().  What comes on the stream begins after it */
    store_u64((uint64_t *)&mailbox->through, 0); /* and blocks */
}

__global__ void gate(const __grid_constant__ struct ep_op op, struct ep_mailbox *mailbox)
{
    await_stream();
    if (threadIdx.x < kOpVecs)
        store_vec((Vec *)&mailbox->op[0] + threadIdx.x, ((const Vec *)&op)[threadIdx.x]);
    __syncwarp();
    if (threadIdx.x == 0) {
        fence_gpu(); /* release; partner: the server's wait for the bell, on this GPU too */
        store_u32(&mailbox->bell, ep_bell_of(0));
        wait_until_done(mailbox);
        let_next_come(); /* no thread before: it could take the place of blocks of the op */
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
