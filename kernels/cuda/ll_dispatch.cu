/* Dispatch as kernels of its own, told by value what to do. */
#include "ll_dispatch.cuh"

namespace ep {
namespace {

template <Cast C, dispatch::Rows R>
__global__ void __launch_bounds__(kThreads, kBlocks) dispatch_op(const __grid_constant__ ep_ll_args a)
{
    extern __shared__ uint32_t shared[];

    dispatch::run<C, R>(a, shared);
}

template <dispatch::Rows R> Kernel kernel_for(const ep_ll_args &a)
{
    if (a.wire_dtype == a.input_dtype)
        return dispatch_op<Cast::none, R>;
    switch (a.input_dtype) {
    case EP_BF16: return dispatch_op<Cast::bf16, R>;
    case EP_FP16: return dispatch_op<Cast::fp16, R>;
    default:      return dispatch_op<Cast::fp32, R>;
    }
}

Kernel kernel_of(const ep_ll_args &a)
{
    return a.layout == EP_LAYOUT_RANK_MAJOR ? kernel_for<dispatch::Rows::by_rank>(a)
                                            : kernel_for<dispatch::Rows::by_expert>(a);
}

template <dispatch::Rows R> int prepare(uint32_t shared_bytes, uint32_t *blocks_per_sm)
{
    return fit({ dispatch_op<Cast::none, R>, dispatch_op<Cast::bf16, R>, dispatch_op<Cast::fp16, R>,
                 dispatch_op<Cast::fp32, R> }, shared_bytes, blocks_per_sm);
}

} // namespace

int dispatch_prepare(uint32_t shared_bytes, uint32_t *blocks_per_sm)
{
    uint32_t by_rank = 0;
    const int error = prepare<dispatch::Rows::by_rank>(shared_bytes, &by_rank);

    if (error)
        return error;
    const int result = prepare<dispatch::Rows::by_expert>(shared_bytes, blocks_per_sm);

    *blocks_per_sm = min(*blocks_per_sm, by_rank);
    return result;
}

} // namespace ep

extern "C" int ep_ll_dispatch(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream)
{
    ep::kernel_of(*args)<<<args->blocks, ep::kThreads, shared_bytes, (cudaStream_t)stream>>>(*args);
    return cudaGetLastError();
}
