/* HT dispatch as kernels of its own, told by value what to do. */
#include "ht_dispatch.cuh"
#include "ht_entry.cuh"
#include "launch.cuh"

namespace ep {
namespace ht {

int prepare(std::initializer_list<const void *> kernels, uint32_t shared_bytes, uint32_t *blocks_per_sm)
{
    *blocks_per_sm = ~0u;
    for (const void *kernel : kernels) {
        uint32_t blocks;
        const int error = fit_one(kernel, shared_bytes, &blocks);

        if (error != cudaSuccess)
            return error;
        *blocks_per_sm = blocks < *blocks_per_sm ? blocks : *blocks_per_sm;
    }
    return cudaSuccess;
}

namespace {

template <Cast C>
__global__ void __launch_bounds__(kThreads, kBlocks) dispatch_op(const __grid_constant__ ep_ht_expected e)
{
    extern __shared__ uint32_t shared[];

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

int dispatch_prepare(uint32_t shared_bytes, uint32_t *blocks_per_sm)
{
    return prepare({ (const void *)dispatch_op<Cast::none>, (const void *)dispatch_op<Cast::bf16>,
                     (const void *)dispatch_op<Cast::fp16>, (const void *)dispatch_op<Cast::fp32> },
                   shared_bytes, blocks_per_sm);
}

int launch_dispatch(const ep_ht_expected &e, uint32_t shared_bytes, void *stream)
{
    return launch(kernel_of(e.args), e.args.blocks, kThreads, shared_bytes, false, stream, e);
}

} // namespace ht
} // namespace ep

extern "C" int ep_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream)
{
    return ep::ht::launch_dispatch({ *args, {}, {} }, shared_bytes, stream);
}
