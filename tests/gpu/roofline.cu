#include "roofline.h"

namespace {

constexpr unsigned kThreads = 1024;

__global__ void __launch_bounds__(kThreads) push(const roofline_row *rows, unsigned n, unsigned pieces)
{
    for (unsigned i = blockIdx.x; i < n; i += gridDim.x) {
        const uint4 *from = static_cast<const uint4 *>(rows[i].from);
        uint4 *to = static_cast<uint4 *>(rows[i].to);

        for (unsigned p = threadIdx.x; p < pieces; p += kThreads)
            to[p] = __ldcg(from + p);
    }
}

} // namespace

const char *roofline_push(uint32_t device, const roofline_row *rows, uint32_t n, uint32_t bytes,
                          uint32_t blocks, void *stream)
{
    cudaError_t error = cudaSetDevice(static_cast<int>(device));

    if (error == cudaSuccess) {
        push<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(rows, n, bytes / 16);
        error = cudaGetLastError();
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
