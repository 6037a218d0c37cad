/* The driver, started once; how many devices it has for this process. */
#include "cuda_private.h"

#include <pthread.h>

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static CUresult driver_result;
static uint32_t driver_devices;

static void start_driver(void)
{
    int n = 0;

    driver_result = cuInit(0);
    if (driver_result == CUDA_SUCCESS)
        driver_result = cuDeviceGetCount(&n);
    driver_devices = (uint32_t)n < EP_CUDA_MAX_DEVICES ? (uint32_t)n : EP_CUDA_MAX_DEVICES;
}

/* A machine without a GPU is no failure, nor is one without a driver (what programs are linked with is a
 * stub, which a machine that builds may have in its library path). */
ep_status ep_cuda_device_count(uint32_t *count, struct ep_error *error)
{
    pthread_once(&driver_once, start_driver);
    if (driver_result == CUDA_ERROR_MPS_SERVER_NOT_READY)
        return ep_cuda_fail(error, driver_result, "cuInit (where a process was killed while kernels of it ran, the MPS "
                            "server takes no new one on before all others that use these GPUs have ended)");
    if (driver_result != CUDA_SUCCESS && driver_result != CUDA_ERROR_NO_DEVICE &&
        driver_result != CUDA_ERROR_STUB_LIBRARY)
        return ep_cuda_fail(error, driver_result, "cuInit");
    *count = driver_devices;
    return EP_OK;
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
