/* The primary context of each device that this process uses. */
#include "cuda_private.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ll.h"

/* Written under the lock with release, once; read without it with acquire: ops look here. */
static _Atomic(struct ep_cuda_context *) contexts[EP_CUDA_MAX_DEVICES];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static ep_status push(const struct ep_cuda_context *context, struct ep_error *error)
{
    CUresult result = cuCtxPushCurrent(context->context);

    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "cuCtxPushCurrent for device %u", context->device);
}

/*
 * Non-blocking: nothing of the caller's on the default stream may hold up an op.  Highest priority: an op is
 * short and others wait for it.
 */
ep_status ep_cuda_stream_make(uint32_t device, CUstream *stream, struct ep_error *error)
{
    int least = 0, greatest = 0;
    CUresult result = cuCtxGetStreamPriorityRange(&least, &greatest);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuCtxGetStreamPriorityRange of device %u", device);
    result = cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, greatest);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuStreamCreateWithPriority on device %u", device);
    return EP_OK;
}

/*
 * The module's own stream; the context is known to work then.  And a worker's kernel, which may be launched first
 * while a stream is captured; where it cannot be had, who launches it says so.
 */
static ep_status open_stream(struct ep_cuda_context *context, struct ep_error *error)
{
    ep_status status = push(context, error);

    if (status != EP_OK)
        return status;
    status = ep_cuda_stream_make(context->device, &context->stream, error);
    if (status == EP_OK)
        (void)ep_ll_gate_prepare();
    ep_cuda_leave();
    return status;
}

static ep_status open_context(uint32_t device, struct ep_cuda_context *context, struct ep_error *error)
{
    CUresult result;
    ep_status status = ep_cuda_device_get(device, &context->handle, error);

    if (status != EP_OK)
        return status;
    context->device = device;
    result = cuDevicePrimaryCtxRetain(&context->context, context->handle);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuDevicePrimaryCtxRetain of device %u", device);
    status = open_stream(context, error);
    if (status != EP_OK)
        cuDevicePrimaryCtxRelease(context->handle);
    return status;
}

/* Under the lock. */
static ep_status make_context(uint32_t device, struct ep_error *error)
{
    struct ep_cuda_context *context;
    ep_status status;

    if (atomic_load_explicit(&contexts[device], memory_order_relaxed))
        return EP_OK; /* another thread was faster */
    context = calloc(1, sizeof *context);
    if (!context)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the context of device %u", device);
    status = open_context(device, context, error);
    if (status == EP_OK)
        atomic_store_explicit(&contexts[device], context, memory_order_release);
    else
        free(context);
    return status;
}

ep_status ep_cuda_enter(uint32_t device, const struct ep_cuda_context **out, struct ep_error *error)
{
    struct ep_cuda_context *context = NULL;
    ep_status status = EP_OK;

    if (device >= EP_CUDA_MAX_DEVICES)
        return ep_error_set(error, EP_NOT_FOUND, "device %u: there are at most %u", device,
                            EP_CUDA_MAX_DEVICES);
    context = atomic_load_explicit(&contexts[device], memory_order_acquire);
    if (!context) {
        pthread_mutex_lock(&opening);
        status = make_context(device, error);
        context = atomic_load_explicit(&contexts[device], memory_order_relaxed);
        pthread_mutex_unlock(&opening);
    }
    if (status == EP_OK)
        status = push(context, error);
    if (status == EP_OK && out)
        *out = context;
    return status;
}

void ep_cuda_leave(void)
{
    CUcontext left;

    cuCtxPopCurrent(&left);
}
