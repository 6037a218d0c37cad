/* Results of the CUDA driver as ep_status and text, and the one after which it has no others. */
#include "cuda_private.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

/* ---- a lost device -------------------------------------------------------------- */

static pthread_mutex_t lost_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*lost_fn)(const struct ep_error *why, void *user);
static void *lost_user;

void ep_cuda_on_lost(void (*fn)(const struct ep_error *why, void *user), void *user)
{
    pthread_mutex_lock(&lost_lock);
    lost_fn = fn;
    lost_user = user;
    pthread_mutex_unlock(&lost_lock);
}

/* Who asked is told once. */
static void tell_lost(const struct ep_error *why)
{
    void (*fn)(const struct ep_error *why, void *user);
    void *user;

    pthread_mutex_lock(&lost_lock);
    fn = lost_fn;
    user = lost_user;
    lost_fn = NULL;
    pthread_mutex_unlock(&lost_lock);
    if (fn)
        fn(why, user);
}

/* ---- results -------------------------------------------------------------------- */

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
    /* "This leaves the process in an inconsistent state and any further CUDA work will return the same error" (cuda.h). */
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
#if CUDA_VERSION >= 13000
    case CUDA_ERROR_CONTAINED:
#endif
        return EP_DEVICE_LOST;
    default: return EP_INTERNAL;
    }
}

ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...)
{
    const char *name = NULL, *text = NULL;
    char what[EP_ERROR_TEXT_MAX / 2];
    struct ep_error why = EP_ERROR_INIT;
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    /* Both leave NULL behind for a number that this driver does not know. */
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    ep_error_set(&why, status_of(result), "%s: %s (%s %d)", what, text ? text : "unknown error", name ? name : "CUDA error",
                 (int)result);
    if (error)
        *error = why;
    if (why.status == EP_DEVICE_LOST)
        tell_lost(&why);
    return why.status;
}
