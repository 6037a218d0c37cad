/* HT combine as kernels of its own, told by value what to do. */
#include "ht_combine.cuh"
#include "ht_entry.cuh"
#include "launch.cuh"

namespace ep {
namespace ht {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) combine_op(const __grid_constant__ ep_ht_expected e)
{
    EP_LAUNCHED_SHARED(128, shared); /* bulk copies to and from odd places are a third slower */

    run_expected(e, [&] { combine::run<T>(e.args, shared); });
}

Kernel kernel_of(const ep_ht_args &a)
{
    switch (a.wire_dtype) {
    case EP_BF16: return combine_op<__nv_bfloat16>;
    case EP_FP16: return combine_op<__half>;
    default:      return combine_op<float>;
    }
}

} // namespace

int combine_prepare(bool shares, uint32_t *blocks_per_sm)
{
    return fit<Kernel>({ combine_op<__nv_bfloat16>, combine_op<__half>, combine_op<float> }, EP_DEVICE_HT_RING_BYTES,
                       shares, blocks_per_sm);
}

int launch_combine(const ep_ht_expected &e, void *stream)
{
    return launch(kernel_of(e.args), e.args.blocks, kThreads, EP_DEVICE_HT_RING_BYTES, false, stream, e);
}

} // namespace ht
} // namespace ep

#if !EP_LL_NET
extern "C" int ep_ht_combine(const struct ep_ht_args *args, void *stream)
{
    return ep::ht::launch_combine({ *args, {}, {} }, stream);
}
#endif

extern "C" int ep_ht_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks)
{
    const int error = ep::ht::dispatch_prepare(shared_bytes, shares, dispatch_blocks);

    return error ? error : ep::ht::combine_prepare(shares, combine_blocks);
}
