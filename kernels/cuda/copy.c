/*
 * Copies between host and GPU memory.
 *
 * Each is stream work and one wait for that stream: nothing here waits for kernels of other streams, so
 * that a server may look at a rank's state while an op of it waits for peers.
 */
#include "cuda_private.h"

/* Copies from pageable memory may be under way when the driver returns. */
static ep_status finish(const struct ep_cuda_context *context, void *stream, const char *call, uint64_t bytes,
                        CUresult result, struct ep_error *error)
{
    if (result == CUDA_SUCCESS)
        result = cuStreamSynchronize(ep_cuda_stream(context, stream));
    ep_cuda_leave();
    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "%s of %llu bytes, device %u", call, (unsigned long long)bytes,
                        context->device);
}

ep_status ep_cuda_write(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                        struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemcpyHtoDAsync((CUdeviceptr)to, from, bytes, ep_cuda_stream(context, stream));
    return finish(context, stream, "cuMemcpyHtoDAsync", bytes, result, error);
}

ep_status ep_cuda_read(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                       struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemcpyDtoHAsync(to, (CUdeviceptr)from, bytes, ep_cuda_stream(context, stream));
    return finish(context, stream, "cuMemcpyDtoHAsync", bytes, result, error);
}

ep_status ep_cuda_fill(uint32_t device, void *to, uint8_t value, uint64_t bytes, void *stream,
                       struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemsetD8Async((CUdeviceptr)to, value, bytes, ep_cuda_stream(context, stream));
    return finish(context, stream, "cuMemsetD8Async", bytes, result, error);
}
