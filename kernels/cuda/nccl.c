/* What NCCL needs of this module; without its headers, all that says that it cannot be used. */
#include "cuda_private.h"

#include "ht.h"
#include "ll.h"

ep_status ep_cuda_nccl_bind(uint32_t device, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    CUresult result;

    if (ep_cuda_enter(device, &context, error) != EP_OK)
        return error->status;
    ep_cuda_leave();
    result = cuCtxSetCurrent(context->context);
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuCtxSetCurrent for device %u", device);
}

#ifdef EP_HAS_NCCL

uint32_t ep_cuda_nccl_version(void)
{
    return ep_nccl_version();
}

const struct ep_cuda_kernels ep_cuda_net_kernels = {
    .prepare = ep_ll_net_prepare,
    .one = ep_ll_net_one,
    .expect = ep_ll_net_expect,
    .ht_prepare = ep_ht_net_prepare,
    .ht_one = ep_ht_net_one,
    .ht_expect = ep_ht_net_expect,
};

int ep_cuda_nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire)
{
    return ep_nccl_device_open(create, comm, signals, wire);
}

int ep_cuda_nccl_device_close(void *destroy, void *comm, const uint64_t *wire)
{
    return ep_nccl_device_close(destroy, comm, wire);
}

#else

enum { CUDA_NOT_SUPPORTED = 801, NCCL_INVALID_USAGE = 5 }; /* cudaErrorNotSupported, ncclInvalidUsage */

uint32_t ep_cuda_nccl_version(void)
{
    return 0;
}

static int cannot_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    (void)shares;
    (void)shared_bytes;
    *blocks = 0;
    return CUDA_NOT_SUPPORTED;
}

const struct ep_cuda_kernels ep_cuda_net_kernels = { .prepare = cannot_prepare, .ht_prepare = cannot_prepare };

int ep_cuda_nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire)
{
    (void)create, (void)comm, (void)signals, (void)wire;
    return NCCL_INVALID_USAGE;
}

int ep_cuda_nccl_device_close(void *destroy, void *comm, const uint64_t *wire)
{
    (void)destroy, (void)comm, (void)wire;
    return NCCL_INVALID_USAGE;
}

#endif
