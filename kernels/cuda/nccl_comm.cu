/* NCCL's device communicator, which only C++ can name: made on the host, used by kernels through gin.cuh. */
#include <string.h>

#include "gin.cuh"
#include "ll.h"

/* On the current device.  What fails is told as NCCL's result; 0: all is well. */
extern "C" int ep_nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire)
{
    const auto make = reinterpret_cast<decltype(&ncclDevCommCreate)>(create);
    ncclDevCommRequirements needs = {};
    ncclDevComm made = {};

    needs.ginForceEnable = true;
    needs.ginContextCount = 1;
    needs.ginSignalCount = static_cast<int>(signals);
    const ncclResult_t result = make(static_cast<ncclComm_t>(comm), &needs, &made);

    if (result != ncclSuccess)
        return result;
    memcpy(wire, &made, sizeof made);
    return made.ginContextCount > 0 ? ncclSuccess : ncclInvalidUsage;
}

extern "C" int ep_nccl_device_close(void *destroy, void *comm, const uint64_t *wire)
{
    const auto end = reinterpret_cast<decltype(&ncclDevCommDestroy)>(destroy);
    ncclDevComm made = {};

    memcpy(&made, wire, sizeof made);
    return end(static_cast<ncclComm_t>(comm), &made);
}

extern "C" uint32_t ep_nccl_version(void)
{
    return NCCL_VERSION_CODE;
}
