/* cuda_launch.h: CUDA's runtime, as far as kernels/cuda/launch.cuh and its callers use it, on CPUs. */
#ifndef CUDA_LAUNCH_H
#define CUDA_LAUNCH_H

#include <tuple>
#include <type_traits>

#include "cuda_words.h"
#include "streams.h"

enum cudaError_t { cudaSuccess };
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 1 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 1, cudaFuncAttributePreferredSharedMemoryCarveout };
enum { cudaSharedmemCarveoutMaxShared = 100 };

/* What a multiprocessor has room for. */
enum { BLOCKS_OF_SM = 2, SHARED_BYTES_OF_SM = 160 * 1024 };

using cudaStream_t = CUstream;

struct dim3 {
    uint32_t x;
    dim3(uint32_t n = 1) : x(n) {}
};
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    uint32_t dynamicSmemBytes;
    cudaStream_t stream;
    const cudaLaunchAttribute *attrs; /* of which there is one */
    uint32_t numAttrs;
};
struct cudaFuncAttributes {
};

/* A kernel and what it is told, as bytes that streams keep. */
template <class... P> struct KernelCall {
    void (*kernel)(P...);
    std::tuple<P...> args;
};
template <class... P> void run_call(const void *call)
{
    std::apply(((const KernelCall<P...> *)call)->kernel, ((const KernelCall<P...> *)call)->args);
}

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), const A &...args)
{
    static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied as bytes");
    const KernelCall<P...> call = { kernel, std::tuple<P...>(args...) };
    struct fibers_grid grid = {};

    grid.blocks = config->gridDim.x;
    grid.threads = config->blockDim.x;
    grid.shared_bytes = config->dynamicSmemBytes;
    grid.body = run_call<P...>;
    grid.args = &call;
    stream_launch(config->stream, &grid, sizeof call, config->attrs->val.programmaticStreamSerializationAllowed);
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaFuncSetAttribute(const void *, int, int) { return cudaSuccess; }
template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel *) { return cudaSuccess; }
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, uint32_t, uint32_t shared)
{
    *blocks = min<int>(BLOCKS_OF_SM, SHARED_BYTES_OF_SM / (int)max(shared, 1u));
    return cudaSuccess;
}

#endif
