/* launch.cuh: launching kernels, from host code. */
#ifndef EP_LAUNCH_CUH
#define EP_LAUNCH_CUH

#include <initializer_list>

#include "ll_device.cuh"
#include "ll_op.h"

namespace ep {

using Kernel = void (*)(ep_ll_args);

/* early: see await_stream(). */
template <class... P, class... A>
inline int launch(void (*kernel)(P...), uint32_t blocks, uint32_t threads, uint32_t shared_bytes, bool early,
                  void *stream, const A &...args)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = early;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, args...);
    return cudaGetLastError();
}

/*
 * How many blocks of a kernel a multiprocessor can hold.  Loads its code, too: that must not come first while
 * a peer's kernel waits for this rank.  Groups of one process have one attribute among them, so it is the most.
 *
 * How a multiprocessor splits its memory between L1 and what kernels share can change only while it is empty.  Of ranks
 * that share a GPU one may wait, all over it, for another one whose next kernel needs more: so where `shares` is set all
 * of ours ask for the same.  Not elsewhere, as it takes the hand-over of executor server a microsecond or two.
 */
inline int fit_one(const void *kernel, uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm)
{
    int blocks = 0;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)EP_DEVICE_MAX_SHARED_BYTES);

    if (error == cudaSuccess && shares)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared_bytes);
    if (error != cudaSuccess)
        (void)cudaGetLastError(); /* whoever launches next would take it for his */
    *blocks_per_sm = (uint32_t)blocks;
    return error;
}

template <class K>
inline int fit(std::initializer_list<K> kernels, uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm)
{
    *blocks_per_sm = ~0u;
    for (K kernel : kernels) {
        uint32_t blocks;
        const int error = fit_one((const void *)kernel, shared_bytes, shares, &blocks);

        if (error != cudaSuccess)
            return error;
        *blocks_per_sm = blocks < *blocks_per_sm ? blocks : *blocks_per_sm;
    }
    return cudaSuccess;
}

int dispatch_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm);
int combine_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm);

namespace ht {

int dispatch_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks_per_sm);
int combine_prepare(bool shares, uint32_t *blocks_per_sm);

/* Executes the op if it is in e.serve.mailbox; in any case where that is NULL. */
using Kernel = void (*)(ep_ht_expected);
int launch_dispatch(const ep_ht_expected &e, uint32_t shared_bytes, void *stream);
int launch_combine(const ep_ht_expected &e, void *stream);

} // namespace ht

} // namespace ep

#endif
