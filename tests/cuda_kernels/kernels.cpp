/* The kernels of kernels/cuda, compiled for CPUs, and their launchers, which return when they are over. */
#include "device_on_cpu.h"
#include "ht_combine.cuh"
#include "ht_dispatch.cuh"
#include "ll_combine.cuh"
#include "ll_dispatch.cuh"

namespace {

using namespace ep;

template <Cast C> void ll_dispatch(const void *args, uint32_t *shared)
{
    dispatch::run<C>(*static_cast<const ep_ll_args *>(args), shared);
}
template <class T> void ll_combine(const void *args, uint32_t *)
{
    combine::run<T>(*static_cast<const ep_ll_args *>(args));
}
void ll_release(const void *args, uint32_t *)
{
    combine::release(*static_cast<const ep_ll_args *>(args));
}
template <Cast C> void ht_dispatch(const void *args, uint32_t *shared)
{
    ht::dispatch::run<C>(*static_cast<const ep_ht_args *>(args), shared);
}
template <class T> void ht_combine(const void *args, uint32_t *shared)
{
    ht::combine::run<T>(*static_cast<const ep_ht_args *>(args), shared);
}

using Body = void (*)(const void *args, uint32_t *shared);

template <class Args> Body of_cast(const Args &a, Body none, Body bf16, Body fp16, Body fp32)
{
    return a.wire_dtype == a.input_dtype ? none
           : a.input_dtype == EP_BF16    ? bf16
           : a.input_dtype == EP_FP16    ? fp16
                                         : fp32;
}
template <class Args> Body of_dtype(const Args &a, Body bf16, Body fp16, Body fp32)
{
    return a.wire_dtype == EP_BF16 ? bf16 : a.wire_dtype == EP_FP16 ? fp16 : fp32;
}

} // namespace

int ep_ll_dispatch(const struct ep_ll_args *a, uint32_t shared_bytes, void *)
{
    fibers_run(a->blocks, kThreads, shared_bytes,
               of_cast(*a, ll_dispatch<Cast::none>, ll_dispatch<Cast::bf16>, ll_dispatch<Cast::fp16>,
                       ll_dispatch<Cast::fp32>), a);
    return 0;
}

int ep_ll_combine(const struct ep_ll_args *a, uint32_t shared_bytes, void *)
{
    fibers_run(a->blocks, kThreads, shared_bytes,
               of_dtype(*a, ll_combine<__nv_bfloat16>, ll_combine<__half>, ll_combine<float>), a);
    return 0;
}

int ep_ll_release(const struct ep_ll_args *a, void *)
{
    fibers_run(1, 32, 0, ll_release, a);
    return 0;
}

int ep_ht_dispatch(const struct ep_ht_args *a, uint32_t shared_bytes, void *)
{
    fibers_run(a->blocks, kThreads, shared_bytes,
               of_cast(*a, ht_dispatch<Cast::none>, ht_dispatch<Cast::bf16>, ht_dispatch<Cast::fp16>,
                       ht_dispatch<Cast::fp32>), a);
    return 0;
}

int ep_ht_combine(const struct ep_ht_args *a, void *)
{
    fibers_run(a->blocks, kThreads, EP_DEVICE_HT_RING_BYTES,
               of_dtype(*a, ht_combine<__nv_bfloat16>, ht_combine<__half>, ht_combine<float>), a);
    return 0;
}
