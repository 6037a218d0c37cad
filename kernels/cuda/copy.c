/*
 * Copies between host and GPU memory, stores that say how far a stream is, and host memory that GPUs reach.
 *
 * Each of write, read and fill is stream work and one wait for that stream: nothing here waits for kernels of other
 * streams, so that a server may look at a rank's state while an op of it waits for peers.
 */
#include "cuda_private.h"

#include <stdlib.h>

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

/* ---- enqueued ------------------------------------------------------------------------ */

ep_status ep_cuda_copy(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                       struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "cuMemcpyAsync of %llu bytes, device %u", (unsigned long long)bytes, device);
}

/* The default has a fence before it: what the stream did before is seen by whoever sees the value. */
static ep_status write_value(uint32_t device, void *to, uint64_t value, CUstream stream, struct ep_error *error)
{
    const CUresult result = cuStreamWriteValue64(stream, (CUdeviceptr)to, value, CU_STREAM_WRITE_VALUE_DEFAULT);

    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "cuStreamWriteValue64 to %p, device %u", to, device);
}

ep_status ep_cuda_store(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    status = write_value(device, to, value, ep_cuda_stream(context, stream), error);
    ep_cuda_leave();
    return status;
}

/* ---- stores that hold up nothing ---------------------------------------------------------- */

struct ep_cuda_marker {
    uint32_t device;
    CUstream stream;
    CUevent event; /* recorded again for each store: a stream waits for what it was recorded behind when told to */
};

/* The device's context is current. */
static ep_status fill_marker(struct ep_cuda_marker *marker, struct ep_error *error)
{
    CUresult result = cuEventCreate(&marker->event, CU_EVENT_DISABLE_TIMING);
    ep_status status;

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventCreate on device %u", marker->device);
    status = ep_cuda_stream_make(marker->device, &marker->stream, error);
    if (status != EP_OK)
        cuEventDestroy(marker->event);
    return status;
}

ep_status ep_cuda_marker_open(uint32_t device, struct ep_cuda_marker **out, struct ep_error *error)
{
    struct ep_cuda_marker *marker = calloc(1, sizeof *marker);
    ep_status status;

    if (!marker)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for what marks streams of device %u", device);
    marker->device = device;
    status = ep_cuda_enter(device, NULL, error);
    if (status == EP_OK) {
        status = fill_marker(marker, error);
        ep_cuda_leave();
    }
    if (status == EP_OK)
        *out = marker;
    else
        free(marker);
    return status;
}

/* The device's context is current. */
static ep_status store_behind(const struct ep_cuda_marker *marker, void *to, uint64_t value, CUstream stream,
                              struct ep_error *error)
{
    CUresult result = cuEventRecord(marker->event, stream);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventRecord on device %u", marker->device);
    result = cuStreamWaitEvent(marker->stream, marker->event, CU_EVENT_WAIT_DEFAULT);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuStreamWaitEvent on device %u", marker->device);
    return write_value(marker->device, to, value, marker->stream, error);
}

ep_status ep_cuda_marker_store(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream,
                               struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(marker->device, &context, error);

    if (status != EP_OK)
        return status;
    status = store_behind(marker, to, value, ep_cuda_stream(context, stream), error);
    ep_cuda_leave();
    return status;
}

/* The driver keeps both until what they hold is over. */
void ep_cuda_marker_close(struct ep_cuda_marker *marker)
{
    if (!marker)
        return;
    if (ep_cuda_enter(marker->device, NULL, NULL) == EP_OK) {
        cuStreamDestroy(marker->stream);
        cuEventDestroy(marker->event);
        ep_cuda_leave();
    }
    free(marker);
}

/* ---- pinned host memory ---------------------------------------------------------------- */

/* The device's context is current.  Everywhere but on some integrated GPUs the addresses are the same. */
static ep_status check_address(uint32_t device, void *at, struct ep_error *error)
{
    CUdeviceptr seen = 0;
    CUresult result = cuMemHostGetDevicePointer(&seen, at, 0);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemHostGetDevicePointer of %p, device %u", at, device);
    if (seen != (CUdeviceptr)at)
        return ep_error_set(error, EP_UNIMPLEMENTED, "device %u sees host memory under another address", device);
    return EP_OK;
}

ep_status ep_cuda_host_pin(uint32_t device, void *at, uint64_t bytes, struct ep_error *error)
{
    CUresult result;
    ep_status status = ep_cuda_enter(device, NULL, error);

    if (status != EP_OK)
        return status;
    result = cuMemHostRegister(at, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result != CUDA_SUCCESS)
        status = ep_cuda_fail(error, result, "cuMemHostRegister of %llu bytes", (unsigned long long)bytes);
    else
        status = check_address(device, at, error);
    if (result == CUDA_SUCCESS && status != EP_OK)
        cuMemHostUnregister(at);
    ep_cuda_leave();
    return status;
}

void ep_cuda_host_unpin(uint32_t device, void *at)
{
    if (!at || ep_cuda_enter(device, NULL, NULL) != EP_OK)
        return;
    cuMemHostUnregister(at);
    ep_cuda_leave();
}
