// fault: a kernel writes where there is no memory.  The driver is done with this process then, and under MPS with all
// others that use the GPU.  Ends with 0 when it has come to that, with 77 where there is no GPU.
#include <cstdio>

namespace {

__global__ void write_to(int *nothing)
{
    *nothing = 1;
}

} // namespace

int main()
{
    int gpus = 0;

    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        printf("no GPU here\n");
        return 77;
    }
    cudaError_t error = cudaFree(nullptr); // makes the context
    if (error != cudaSuccess) {
        printf("the GPU cannot be used: %s\n", cudaGetErrorString(error));
        return 1;
    }
    write_to<<<1, 1>>>(reinterpret_cast<int *>(16));
    error = cudaDeviceSynchronize();
    printf("%s\n", cudaGetErrorString(error));
    return error == cudaSuccess;
}
