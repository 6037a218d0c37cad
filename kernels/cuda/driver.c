/* The driver, started once it can be; how many devices it has for this process. */
#include "cuda_private.h"

#include <pthread.h>

static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
static bool driver_started;
static uint32_t driver_devices;

/* A machine without a GPU is no failure, nor is one without a driver (what programs are linked with is a
 * stub, which a machine that builds may have in its library path).  Under the lock. */
static CUresult start_driver(void)
{
    int n = 0;
    CUresult result = cuInit(0);

    if (result == CUDA_SUCCESS)
        result = cuDeviceGetCount(&n);
    if (result == CUDA_ERROR_NO_DEVICE || result == CUDA_ERROR_STUB_LIBRARY)
        result = CUDA_SUCCESS;
    driver_devices = (uint32_t)n < EP_CUDA_MAX_DEVICES ? (uint32_t)n : EP_CUDA_MAX_DEVICES;
    driver_started = result == CUDA_SUCCESS;
    return result;
}

/* What keeps it from starting may pass: it is tried again. */
ep_status ep_cuda_device_count(uint32_t *count, struct ep_error *error)
{
    CUresult result;

    pthread_mutex_lock(&driver_lock);
    result = driver_started ? CUDA_SUCCESS : start_driver();
    *count = driver_devices;
    pthread_mutex_unlock(&driver_lock);
    if (result == CUDA_ERROR_MPS_SERVER_NOT_READY)
        return ep_cuda_fail(error, result, "cuInit (where a process was killed while kernels of it ran, the MPS "
                            "server takes no new one on before all others that use these GPUs have ended)");
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuInit");
}

ep_status ep_cuda_device_get(uint32_t device, CUdevice *handle, struct ep_error *error)
{
    uint32_t count = 0;
    ep_status status = ep_cuda_device_count(&count, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    if (device >= count)
        return ep_error_set(error, EP_NOT_FOUND, "device %u: this process sees %u, numbered from 0", device,
                            count);
    result = cuDeviceGet(handle, (int)device);
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuDeviceGet of device %u", device);
}
