/* Dispatch as kernels of its own, told by value what to do. */
#include "ll_dispatch.cuh"
#include "launch.cuh"

namespace ep {
namespace {

template <Cast C>
__global__ void __launch_bounds__(kThreads, kBlocks) dispatch_op(const __grid_constant__ ep_ll_args a)
{
    EP_LAUNCHED_SHARED(4, shared);

    await_stream();
    dispatch::run<C>(a, shared);
}

Kernel kernel_of(const ep_ll_args &a)
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
                         dispatch_op<Cast::fp32> },
                       shared_bytes, shares, blocks_per_sm);
}

} // namespace ep

extern "C" int ep_ll_dispatch(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream)
{
    return ep::launch(ep::kernel_of(*args), args->blocks, ep::kThreads, shared_bytes, true, stream, *args);
}
