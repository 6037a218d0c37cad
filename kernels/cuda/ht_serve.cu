/*
 * Executor server: HT ops that were not expected (ht_entry.cuh).  The kernel that finds out what is in a mailbox
 * (ll_serve.cu) does not execute them.  Its block 0 judges its copy of the op, makes the arguments from it and puts both at
 * the desk, where this kernel, which stands behind it, finds them.
 *
 * All blocks of an HT op wait for each other, so all must have the same op: what is at the desk nobody else can change.
 * When the op was none of HT, nothing of this entry is there, and the blocks leave.
 */
#include "ht_combine.cuh"
#include "ht_dispatch.cuh"
#include "ht_entry.cuh"
#include "launch.cuh"

namespace ep {
namespace ht {
namespace {

__shared__ struct ep_ht_args args;
EP_LAUNCHED_SHARED(128, shared); /* for both kinds of op; aligned as in ht_combine.cu */

/* Functions of their own, as in ll_serve.cu. */
template <Cast C> __device__ __noinline__ void dispatch_op() { dispatch::run<C>(args, shared); }
template <class T> __device__ __noinline__ void combine_op() { combine::run<T>(args, shared); }

__device__ inline void execute(uint32_t kind)
{
    if (kind == EP_OP_DISPATCH) {
        if (args.wire_dtype == args.input_dtype)
            dispatch_op<Cast::none>();
        else if (args.input_dtype == EP_BF16)
            dispatch_op<Cast::bf16>();
        else if (args.input_dtype == EP_FP16)
            dispatch_op<Cast::fp16>();
        else
            dispatch_op<Cast::fp32>();
    } else if (args.wire_dtype == EP_BF16) {
        combine_op<__nv_bfloat16>();
    } else if (args.wire_dtype == EP_FP16) {
        combine_op<__half>();
    } else {
        combine_op<float>();
    }
}

__global__ void __launch_bounds__(kThreads, kBlocks) serve(const __grid_constant__ ep_ll_serve s)
{
    const struct ep_ht_desk *desk = &s.desk->ht;

    if (desk->number != s.number)
        return;
    copy_words(&args, &desk->args);
    __syncthreads();
    execute(desk->op.kind);
    end_entry(s, desk->op, desk->place, desk->spins);
}

} // namespace
} // namespace ht
} // namespace ep

/* All that a rank's ops may have, so that one number of blocks is good for each. */
extern "C" int ep_ht_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    uint32_t dispatch = 0, combine = 0;
    int error = ep::fit_one((const void *)ep::ht::serve, shared_bytes, shares, blocks);

    if (error == cudaSuccess)
        error = ep_ht_prepare(shared_bytes, shares, &dispatch, &combine);
    *blocks = min(*blocks, min(dispatch, combine));
    return error;
}

extern "C" int ep_ht_serve_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, void *stream)
{
    return ep::launch(ep::ht::serve, serve->ht_blocks, ep::kThreads, shared_bytes, false, stream, *serve);
}

extern "C" int ep_ht_expect(const struct ep_ht_expected *expected, uint32_t shared_bytes, void *stream)
{
    return expected->at.op.kind == EP_OP_COMBINE ? ep::ht::launch_combine(*expected, stream)
                                                 : ep::ht::launch_dispatch(*expected, shared_bytes, stream);
}
