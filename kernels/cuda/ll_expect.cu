/*
 * Executor server: an op that is expected (forecast.h).  Its kernel has been told by value what to do, as those of
 * executor direct are, and only has to see that it is this op that the worker rings for, unless a warp ahead of it has
 * (ll_poll.cu).  If it is another one of the same form, with other sizes, memory or handle, each block takes it (ll_take.cuh),
 * as entries do that expect nothing.  If it is anything else, the kernel leaves everything as it was, the doorbell too, to the
 * entry behind it.
 *
 * The op was judged by the host, and what a block has compared with it nobody else can change.  A worker that changes
 * its mailbox meanwhile has some blocks execute the op and others not, which is one of the ops that ll_serve.cu allows
 * for.
 * Block 0 decides whether the op is over with it.  All blocks count at the desk, so there is a last one in any case,
 * which sets right what a part of an op has left.
 */
#include "launch.cuh"
#include "ll_take.cuh"

namespace ep {
namespace {

/* All threads. */
__device__ inline uint32_t find(const ep_ll_expected &e)
{
    if (e.serve.poll_ns) /* which has it come as soon as it hears of an op */
        return await_found(&e.serve.desk->found, e.serve.number);
    return look_once(e.serve, e.at);
}

/* Block 0: the op is executed here and nowhere else. */
__device__ inline void begin(const ep_ll_serve &s, const struct ep_op &op, const ep_ll_args &a, uint32_t found)
{
    answer_bell(s, found & kSpins, gridDim.x);
    if (threadIdx.x == 0)
        store_u64(&s.desk->taken, s.number);
    if (a.phases == EP_LL_SEND)
        keep_half(s, op);
}

/* Warp 0, when the block is through; it has executed the op, or not. */
__device__ inline void end(const ep_ll_expected &e, const struct ep_op &op, uint32_t place, bool spins, bool executed)
{
    uint64_t taken = 0, ended = 0;
    uint32_t over;

    if (!pass(e.serve, spins && executed, executed))
        return;
    if (threadIdx.x == 0) {
        taken = load_u64(&e.serve.desk->taken);
        ended = load_u64(&e.serve.desk->log.ended);
    }
    set_right(e.args.state); /* its load is under way with these */
    over = __shfl_sync(kAll, taken == e.serve.number, 0);
    tell_stream(e.serve, over && !spins);
    if (e.serve.poll_ns)
        say_over(e.serve);
    if (over)
        log_op(e.serve, op, op.kind, place, __shfl_sync(kAll, ended, 0));
}

/* The same, where a warp has found out for all blocks: they have executed the same op. */
__device__ inline void end_alike(const ep_ll_expected &e, bool spins)
{
    if (!pass(e.serve, spins, true))
        return;
    tell_stream(e.serve, !spins);
    if (!spins)
        say_over(e.serve);
    else if (threadIdx.x == 0)
        store_u64(&e.serve.desk->over, e.serve.number); /* released in pass() */
    log_op(e.serve, e.at.op, e.at.op.kind, e.at.place, __shfl_sync(kAll, load_u64(&e.serve.desk->log.ended), 0));
}

/* All threads: takes the op that is there instead.  Is it of the same form, and good? */
__device__ inline bool take_other(const ep_ll_expected &e)
{
    take(e.serve);
    if (entry.closing || !ep_forecast_alike(&entry.op, &e.at.op) || needs_regions())
        return false;
    make_args(e.serve, nullptr, false);
    if (threadIdx.x == 0 && entry.args.blocks > gridDim.x)
        entry.args.blocks = gridDim.x;
    __syncthreads();
    return entry.status == EP_OK;
}

/* All threads.  These are functions of their own for the sake of the expected op, which is not to share registers with them. */
__device__ inline void execute_other(const ep_ll_expected &e, uint32_t found, void (*run)())
{
    const bool executes = take_other(e);

    if (executes) {
        if (blockIdx.x == 0)
            begin(e.serve, entry.op, entry.args, found);
        if (blockIdx.x < entry.args.blocks)
            run();
        __syncthreads();
    }
    if (threadIdx.x < 32)
        end(e, entry.op, entry.place, found & kSpins, executes);
}
template <Cast C> __device__ __noinline__ void dispatch_other(const ep_ll_expected &e, uint32_t found)
{
    execute_other(e, found, dispatch_op<C>);
}
template <class T> __device__ __noinline__ void combine_other(const ep_ll_expected &e, uint32_t found)
{
    execute_other(e, found, combine_op<T>);
}

template <class Run, class Other>
__device__ __forceinline__ void expect(const ep_ll_expected &e, Run run, Other other)
{
    const uint32_t found = find(e);

    if (found & kLeaves)
        return;
    if (!(found & kThere)) {
        other(e, found);
        return;
    }
    if (blockIdx.x == 0)
        begin(e.serve, e.at.op, e.args, found);
    run();
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    if (e.serve.poll_ns)
        end_alike(e, found & kSpins);
    else
        end(e, e.at.op, e.at.place, found & kSpins, true);
}

template <Cast C>
__global__ void __launch_bounds__(kThreads, kBlocks) expect_dispatch(const __grid_constant__ ep_ll_expected e)
{
    expect(e, [&] { dispatch::run<C>(e.args, shared); }, dispatch_other<C>);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) expect_combine(const __grid_constant__ ep_ll_expected e)
{
    expect(e, [&] { combine::run<T>(e.args); }, combine_other<T>);
}

using Expect = void (*)(ep_ll_expected);

Expect kernel_of(const ep_ll_args &a, uint32_t kind)
{
    if (kind == EP_OP_COMBINE)
        return a.wire_dtype == EP_BF16   ? expect_combine<__nv_bfloat16>
               : a.wire_dtype == EP_FP16 ? expect_combine<__half>
                                         : expect_combine<float>;
    if (a.wire_dtype == a.input_dtype)
        return expect_dispatch<Cast::none>;
    return a.input_dtype == EP_BF16   ? expect_dispatch<Cast::bf16>
           : a.input_dtype == EP_FP16 ? expect_dispatch<Cast::fp16>
                                      : expect_dispatch<Cast::fp32>;
}

} // namespace
} // namespace ep

extern "C" int ep_ll_expect_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    using namespace ep;

    return fit<Expect>({ expect_dispatch<Cast::none>, expect_dispatch<Cast::bf16>, expect_dispatch<Cast::fp16>,
                         expect_dispatch<Cast::fp32>, expect_combine<__nv_bfloat16>, expect_combine<__half>,
                         expect_combine<float> },
                       shared_bytes, shares, blocks);
}

extern "C" int ep_ll_expect(const struct ep_ll_expected *expected, uint32_t shared_bytes, void *stream)
{
    return ep::launch(ep::kernel_of(expected->args, expected->at.op.kind), expected->args.blocks, ep::kThreads,
                      shared_bytes, expected->serve.poll_ns > 0, stream, *expected);
}
