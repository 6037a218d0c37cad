/* Results of the CUDA driver as ep_status and text. */
#include "cuda_private.h"

#include <stdarg.h>
#include <stdio.h>

static ep_status status_of(CUresult result)
{
    switch (result) {
    case CUDA_SUCCESS: return EP_OK;
    case CUDA_ERROR_OUT_OF_MEMORY: return EP_NO_MEMORY;
    case CUDA_ERROR_NOT_PERMITTED: return EP_PERMISSION_DENIED;
    case CUDA_ERROR_NOT_SUPPORTED: return EP_UNIMPLEMENTED;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_NOT_READY:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED: return EP_UNAVAILABLE;
    default: return EP_INTERNAL;
    }
}

ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...)
{
    const char *name = NULL, *text = NULL;
    char what[EP_ERROR_TEXT_MAX / 2];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    /* Both leave NULL behind for a number that this driver does not know. */
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    return ep_error_set(error, status_of(result), "%s: %s (%s %d)", what, text ? text : "unknown error",
                        name ? name : "CUDA error", (int)result);
}
