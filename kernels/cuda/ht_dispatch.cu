/* HT dispatch as kernels of its own, told by value what to do. */
#include "ht_dispatch.cuh"
#include "ht_entry.cuh"
#include "launch.cuh"

namespace ep {
namespace ht {

namespace {

template <Cast C>
__global__ void __launch_bounds__(kThreads, kBlocks) dispatch_op(const __grid_constant__ ep_ht_expected e)
{
    EP_LAUNCHED_SHARED(4, shared);

    run_expected(e, [&] { dispatch::run<C>(e.args, shared); });
}

Kernel kernel_of(const ep_ht_args &a)
{
    if (a.wire_dtype == a.input_dtype)
        return dispatch_op<Cast::none>;
    switch (a.input_dtype) {
    case EP_BF16: return dispatch_op<Cast::bf16>;
    case EP_FP16: return dispatch_op<Cast::fp16>;
    default:      return dispatch_op<Cast::fp32>;
    }
}

} // namespace

int dispatch_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm)
{
    return fit<Kernel>({ dispatch_op<Cast::none>, dispatch_op<Cast::bf16>, dispatch_op<Cast::fp16>,
                         dispatch_op<Cast::fp32> }, shared_bytes, shares, blocks_per_sm);
}

int launch_dispatch(const ep_ht_expected &e, uint32_t shared_bytes, void *stream)
{
    return launch(kernel_of(e.args), e.args.blocks, kThreads, shared_bytes, false, stream, e);
}

} // namespace ht
} // namespace ep

#if !EP_LL_NET
extern "C" int ep_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream)
{
    return ep::ht::launch_dispatch({ *args, {}, {} }, shared_bytes, stream);
}
#endif
