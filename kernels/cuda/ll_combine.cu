/* Combine and release as kernels of their own, told by value what to do. */
#include "ll_combine.cuh"
#include "launch.cuh"

namespace ep {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) combine_op(const __grid_constant__ ep_ll_args a)
{
    await_stream();
    combine::run<T>(a);
}

__global__ void release_op(const __grid_constant__ ep_ll_args a)
{
    combine::release(a);
}

Kernel kernel_of(const ep_ll_args &a)
{
    switch (a.wire_dtype) {
    case EP_BF16: return combine_op<__nv_bfloat16>;
    case EP_FP16: return combine_op<__half>;
    default:      return combine_op<float>;
    }
}

} // namespace

int combine_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm)
{
    cudaFuncAttributes attributes;
    /* Loads its code: that must not come first while a peer's kernel waits for this rank. */
    const cudaError_t error = cudaFuncGetAttributes(&attributes, release_op);

    if (error != cudaSuccess)
        return error;
    return fit<Kernel>({ combine_op<__nv_bfloat16>, combine_op<__half>, combine_op<float> }, shared_bytes,
                       shares, blocks_per_sm);
}

} // namespace ep

extern "C" int ep_ll_combine(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream)
{
    return ep::launch(ep::kernel_of(*args), args->blocks, ep::kThreads, shared_bytes, true, stream, *args);
}

extern "C" int ep_ll_release(const struct ep_ll_args *args, void *stream)
{
    return ep::launch(ep::release_op, 1, 32, 0, false, stream, *args);
}

extern "C" int ep_ll_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks)
{
    const int error = ep::dispatch_prepare(shared_bytes, shares, dispatch_blocks);

    return error ? error : ep::combine_prepare(shared_bytes, shares, combine_blocks);
}

extern "C" const char *ep_ll_error_text(int error)
{
    return cudaGetErrorString((cudaError_t)error);
}
