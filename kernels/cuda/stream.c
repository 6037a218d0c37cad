/* Streams and events. */
#include "cuda_private.h"

/* ---- streams --------------------------------------------------------------------- */

ep_status ep_cuda_stream_create(uint32_t device, void **stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    CUstream made = NULL;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    status = ep_cuda_stream_make(device, &made, error);
    ep_cuda_leave();
    if (status == EP_OK)
        *stream = made;
    return status;
}

/* Work that is under way goes on; the driver keeps the stream until it is over. */
void ep_cuda_stream_destroy(uint32_t device, void *stream)
{
    const struct ep_cuda_context *context;

    if (!stream || ep_cuda_enter(device, &context, NULL) != EP_OK)
        return;
    cuStreamDestroy(stream);
    ep_cuda_leave();
}

ep_status ep_cuda_stream_query(uint32_t device, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuStreamQuery(ep_cuda_stream(context, stream));
    ep_cuda_leave();
    if (result == CUDA_SUCCESS)
        return EP_OK;
    if (result == CUDA_ERROR_NOT_READY) /* no failure: often asked, so without asking for words */
        return ep_error_set(error, EP_UNAVAILABLE, "work of a stream of device %u is under way", device);
    return ep_cuda_fail(error, result, "cuStreamQuery on device %u", device);
}

ep_status ep_cuda_stream_sync(uint32_t device, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuStreamSynchronize(ep_cuda_stream(context, stream));
    ep_cuda_leave();
    return result == CUDA_SUCCESS ? EP_OK
                                  : ep_cuda_fail(error, result, "cuStreamSynchronize on device %u", device);
}

/* An invalidated capture is one too: what is put on it runs never. */
ep_status ep_cuda_is_captured(uint32_t device, CUstream stream, bool *captured, struct ep_error *error)
{
    CUstreamCaptureStatus captures = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult result = cuStreamIsCapturing(stream, &captures);

    *captured = captures != CU_STREAM_CAPTURE_STATUS_NONE;
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuStreamIsCapturing on device %u", device);
}

ep_status ep_cuda_stream_captured(uint32_t device, void *stream, bool *captured, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    status = ep_cuda_is_captured(device, ep_cuda_stream(context, stream), captured, error);
    ep_cuda_leave();
    return status;
}

void ep_cuda_thread_relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

    cuThreadExchangeStreamCaptureMode(&mode);
}

/* ---- events ---------------------------------------------------------------------- */

ep_status ep_cuda_event_create(uint32_t device, void **event, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    CUevent made = NULL;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuEventCreate(&made, CU_EVENT_DEFAULT);
    ep_cuda_leave();
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventCreate on device %u", device);
    *event = made;
    return EP_OK;
}

void ep_cuda_event_destroy(uint32_t device, void *event)
{
    const struct ep_cuda_context *context;

    if (!event || ep_cuda_enter(device, &context, NULL) != EP_OK)
        return;
    cuEventDestroy(event);
    ep_cuda_leave();
}

ep_status ep_cuda_event_record(uint32_t device, void *event, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuEventRecord(event, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuEventRecord on device %u", device);
}

/* EP_UNAVAILABLE while the later one has not come. */
ep_status ep_cuda_event_elapsed(uint32_t device, void *from, void *to, float *us, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    float ms = 0;
    ep_status status = ep_cuda_enter(device, &context, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuEventElapsedTime(&ms, from, to);
    ep_cuda_leave();
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventElapsedTime on device %u", device);
    *us = ms * 1000;
    return EP_OK;
}
