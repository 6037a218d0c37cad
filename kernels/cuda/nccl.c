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

int ep_cuda_net_prepare(uint32_t shared_bytes, uint32_t *blocks)
{
    return ep_ll_net_prepare(shared_bytes, blocks);
}

int ep_cuda_net_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, CUstream stream)
{
    return ep_ll_net_one(serve, blocks, shared_bytes, stream);
}

int ep_cuda_net_ht_prepare(uint32_t shared_bytes, uint32_t *blocks)
{
    return ep_ht_net_prepare(shared_bytes, blocks);
}

int ep_cuda_net_ht_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, CUstream stream)
{
    return ep_ht_net_one(serve, shared_bytes, stream);
}

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

int ep_cuda_net_prepare(uint32_t shared_bytes, uint32_t *blocks)
{
    (void)shared_bytes;
    *blocks = 0;
    return CUDA_NOT_SUPPORTED;
}

int ep_cuda_net_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, CUstream stream)
{
    (void)serve, (void)blocks, (void)shared_bytes, (void)stream;
    return CUDA_NOT_SUPPORTED;
}

int ep_cuda_net_ht_prepare(uint32_t shared_bytes, uint32_t *blocks)
{
    return ep_cuda_net_prepare(shared_bytes, blocks);
}

int ep_cuda_net_ht_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, CUstream stream)
{
    return ep_cuda_net_one(serve, 0, shared_bytes, stream);
}

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
