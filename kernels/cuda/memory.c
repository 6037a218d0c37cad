/* GPU memory that processes share: VMM allocations, handed on as file descriptors; what others have allocated. */
#include "cuda_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

struct ep_cuda_memory {
    uint32_t device; /* that it was created on or imported for */
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t bytes;
};

/* ---- what an allocation is like ------------------------------------------------------ */

static bool rdma_capable(CUdevice device)
{
    int value = 0;

    return cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                device) == CUDA_SUCCESS &&
           value;
}

/* As NCCL wants memory that it is to register: pinned, exportable, open to RDMA where the GPU can. */
static CUmemAllocationProp properties(const struct ep_cuda_context *context)
{
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context->handle },
    };

    prop.allocFlags.gpuDirectRDMACapable = rdma_capable(context->handle);
    return prop;
}

static ep_status round_up(const struct ep_cuda_context *context, uint64_t bytes,
                          CUmemAllocationGranularity_flags which, size_t *rounded, struct ep_error *error)
{
    const CUmemAllocationProp prop = properties(context);
    size_t unit = 0;
    CUresult result = cuMemGetAllocationGranularity(&unit, &prop, which);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemGetAllocationGranularity of device %u", context->device);
    if (bytes == 0 || bytes > SIZE_MAX - unit)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%llu bytes of GPU memory: must be at least 1",
                            (unsigned long long)bytes);
    *rounded = (bytes + unit - 1) / unit * unit;
    return EP_OK;
}

/* ---- mapping ------------------------------------------------------------------------- */

/* Loads, stores and copies of the device.  What other devices may do stays as it was. */
static ep_status allow(const struct ep_cuda_memory *memory, const struct ep_cuda_context *context,
                       struct ep_error *error)
{
    const CUmemAccessDesc access = {
        .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = context->handle },
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    CUresult result = cuMemSetAccess(memory->at, memory->bytes, &access, 1);

    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "cuMemSetAccess: device %u cannot use memory of device %u",
                        context->device, memory->device);
}

/* Gives the allocation an address, on the device alone. */
static ep_status map(struct ep_cuda_memory *memory, const struct ep_cuda_context *context,
                     struct ep_error *error)
{
    ep_status status;
    CUresult result = cuMemAddressReserve(&memory->at, memory->bytes, 0, 0, 0);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemAddressReserve of %zu bytes", memory->bytes);
    result = cuMemMap(memory->at, memory->bytes, 0, memory->handle, 0);
    if (result != CUDA_SUCCESS) {
        status = ep_cuda_fail(error, result, "cuMemMap of %zu bytes for device %u", memory->bytes,
                              context->device);
        goto free_address;
    }
    status = allow(memory, context, error);
    if (status != EP_OK)
        goto unmap;
    return EP_OK;

unmap:
    cuMemUnmap(memory->at, memory->bytes);
free_address:
    cuMemAddressFree(memory->at, memory->bytes);
    return status;
}

static void unmap(struct ep_cuda_memory *memory)
{
    cuMemUnmap(memory->at, memory->bytes);
    cuMemAddressFree(memory->at, memory->bytes);
}

/* ---- create and import ------------------------------------------------------------------ */

static ep_status allocate(struct ep_cuda_memory *memory, const struct ep_cuda_context *context,
                          uint64_t bytes, struct ep_error *error)
{
    const CUmemAllocationProp prop = properties(context);
    ep_status status = round_up(context, bytes, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, &memory->bytes, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemCreate(&memory->handle, memory->bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemCreate of %zu bytes on device %u", memory->bytes,
                            context->device);
    return EP_OK;
}

/* The driver does not say how large an import is.  Mapping more than there is fails, in map(). */
static ep_status import(struct ep_cuda_memory *memory, const struct ep_cuda_context *context, int fd,
                        uint64_t bytes, struct ep_error *error)
{
    ep_status status = round_up(context, bytes, CU_MEM_ALLOC_GRANULARITY_MINIMUM, &memory->bytes, error);
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuMemImportFromShareableHandle(&memory->handle, (void *)(intptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemImportFromShareableHandle of descriptor %d", fd);
    return EP_OK;
}

/*
 * Other things than GPU memory can be handed on as well.  A multicast object is the worst: its owner can unbind the
 * memory behind it, and then who has it mapped faults.  What cannot be asked is refused.
 */
static ep_status check_stays(const struct ep_cuda_memory *memory, int fd, struct ep_error *error)
{
    CUmemAllocationProp prop = { 0 };
    CUresult result = cuMemGetAllocationPropertiesFromHandle(&prop, memory->handle);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemGetAllocationPropertiesFromHandle of descriptor %d", fd);
    if (prop.type != CU_MEM_ALLOCATION_TYPE_PINNED || prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "descriptor %d is of memory that is not a GPU's own", fd);
    return EP_OK;
}

static ep_status zero(struct ep_cuda_memory *memory, const struct ep_cuda_context *context,
                      struct ep_error *error)
{
    return ep_cuda_fill(context->device, (void *)memory->at, 0, memory->bytes, NULL, error);
}

/* Where memory comes from. */
enum origin { NEW, SENT, SENT_UNTRUSTED };

/* The device's context is current. */
static ep_status obtain(const struct ep_cuda_context *context, enum origin origin, int fd, uint64_t bytes,
                        struct ep_cuda_memory *memory, struct ep_error *error)
{
    ep_status status =
        origin == NEW ? allocate(memory, context, bytes, error) : import(memory, context, fd, bytes, error);

    if (status != EP_OK)
        return status;
    if (origin == SENT_UNTRUSTED)
        status = check_stays(memory, fd, error);
    if (status == EP_OK)
        status = map(memory, context, error);
    if (status != EP_OK)
        goto release;
    if (origin == NEW)
        status = zero(memory, context, error);
    if (status != EP_OK)
        goto unmap;
    return EP_OK;

unmap:
    unmap(memory);
release:
    cuMemRelease(memory->handle);
    return status;
}

static ep_status make(uint32_t device, enum origin origin, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                      struct ep_error *error)
{
    const struct ep_cuda_context *context;
    struct ep_cuda_memory *memory = calloc(1, sizeof *memory);
    ep_status status;

    if (!memory)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a GPU allocation's record");
    memory->device = device;
    status = ep_cuda_enter(device, &context, error);
    if (status != EP_OK)
        goto free_memory;
    status = obtain(context, origin, fd, bytes, memory, error);
    ep_cuda_leave();
    if (status != EP_OK)
        goto free_memory;
    *out = memory;
    return EP_OK;

free_memory:
    free(memory);
    return status;
}

ep_status ep_cuda_memory_create(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out,
                                struct ep_error *error)
{
    return make(device, NEW, -1, bytes, out, error);
}

static ep_status take(uint32_t device, enum origin origin, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                      struct ep_error *error)
{
    if (fd < 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "descriptor %d of GPU memory: must not be negative",
                            fd);
    return make(device, origin, fd, bytes, out, error);
}

ep_status ep_cuda_memory_import(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                                struct ep_error *error)
{
    return take(device, SENT, fd, bytes, out, error);
}

ep_status ep_cuda_memory_adopt(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error)
{
    return take(device, SENT_UNTRUSTED, fd, bytes, out, error);
}

void ep_cuda_memory_destroy(struct ep_cuda_memory *memory)
{
    const struct ep_cuda_context *context;

    if (!memory)
        return;
    if (ep_cuda_enter(memory->device, &context, NULL) == EP_OK) {
        unmap(memory);
        cuMemRelease(memory->handle);
        ep_cuda_leave();
    }
    free(memory);
}

/* ---- the rest ----------------------------------------------------------------------------- */

/* The driver has no way to make it close-on-exec at once: a fork in another thread in between would hand it
 * on, where it pins the memory until that process ends. */
static ep_status export(CUmemGenericAllocationHandle handle, uint64_t bytes, uint32_t device, int *out,
                        struct ep_error *error)
{
    int fd = -1;
    CUresult result = cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemExportToShareableHandle of %llu bytes of device %u",
                            (unsigned long long)bytes, device);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        ep_status status = ep_error_errno(error, EP_IO, "close-on-exec of a GPU memory's descriptor");

        close(fd);
        return status;
    }
    *out = fd;
    return EP_OK;
}

ep_status ep_cuda_memory_export(const struct ep_cuda_memory *memory, int *fd, struct ep_error *error)
{
    return export(memory->handle, memory->bytes, memory->device, fd, error);
}

ep_status ep_cuda_memory_share(struct ep_cuda_memory *memory, uint32_t device, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    status = allow(memory, context, error);
    ep_cuda_leave();
    return status;
}

void *ep_cuda_memory_at(const struct ep_cuda_memory *memory)
{
    return (void *)memory->at;
}

/* ---- memory of others ---------------------------------------------------------------------- */

/* What the driver knows of an address; all 0 when it is none that it has given. */
struct pointer {
    uint32_t type; /* CUmemorytype */
    int32_t device;
    uint32_t managed;
    uint32_t access; /* of the current context's device */
};

static ep_status ask(const void *at, struct pointer *p, struct ep_error *error)
{
    CUpointer_attribute what[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                   CU_POINTER_ATTRIBUTE_IS_MANAGED };
    void *where[] = { &p->type, &p->device, &p->managed };
    CUresult result = cuPointerGetAttributes(sizeof what / sizeof *what, what, where, (CUdeviceptr)at);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuPointerGetAttributes of %p", at);
    if (p->type != CU_MEMORYTYPE_DEVICE || p->managed)
        return EP_OK;
    result = cuPointerGetAttribute(&p->access, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, (CUdeviceptr)at);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuPointerGetAttribute of %p", at);
    return EP_OK;
}

static ep_status judge(uint32_t device, const void *at, const struct pointer *p, struct ep_error *error)
{
    if (p->managed)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%p is managed memory: must be allocated on the GPU", at);
    if (p->type != CU_MEMORYTYPE_DEVICE)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%p is not GPU memory", at);
    if (p->device != (int32_t)device)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%p is memory of device %d: must be of device %u", at,
                            p->device, device);
    if (p->access != CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%p is not mapped for device %u to read and write", at, device);
    return EP_OK;
}

/* The mapping around an address, or the allocation that is not VMM's.  The device's context is current. */
static ep_status find(uint32_t device, const void *at, CUdeviceptr *base, size_t *size, struct ep_error *error)
{
    struct pointer p = { .device = -1 };
    CUresult result;
    ep_status status = ask(at, &p, error);

    if (status == EP_OK)
        status = judge(device, at, &p, error);
    if (status != EP_OK)
        return status;
    result = cuMemGetAddressRange(base, size, (CUdeviceptr)at);
    return result == CUDA_SUCCESS ? EP_OK : ep_cuda_fail(error, result, "cuMemGetAddressRange of %p", at);
}

ep_status ep_cuda_memory_range(uint32_t device, const void *at, void **start, uint64_t *bytes, struct ep_error *error)
{
    CUdeviceptr base = 0;
    size_t size = 0;
    ep_status status = ep_cuda_enter(device, NULL, error);

    if (status != EP_OK)
        return status;
    status = find(device, at, &base, &size, error);
    ep_cuda_leave();
    if (status != EP_OK)
        return status;
    *start = (void *)base;
    *bytes = size;
    return EP_OK;
}

/* ---- and its descriptors ------------------------------------------------------------------- */

/*
 * Of VMM memory alone.  Each process that imports such a descriptor has a reference to the allocation, which is freed
 * with the last one (cuMemRelease): its owner may unmap it, release it or die, and what others have mapped stays.
 * cudaMalloc()'s memory has legacy IPC handles instead, which keep nothing alive: a kernel of the importer faults
 * when the owner has freed it, and a fault takes the importer's whole context down.
 */

static ep_status not_exportable(const void *at, const char *why, struct ep_error *error)
{
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "%p cannot be mapped by another process: %s; memory of ep_alloc(), of ncclMemAlloc() or of "
                        "cuMemCreate() with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR can", at, why);
}

static ep_status check_exportable(const void *at, CUmemGenericAllocationHandle handle, struct ep_error *error)
{
    CUmemAllocationProp prop = { 0 };
    CUresult result = cuMemGetAllocationPropertiesFromHandle(&prop, handle);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemGetAllocationPropertiesFromHandle of %p", at);
    if (!(prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return not_exportable(at, "it is VMM memory that was made without a POSIX file descriptor, as that of torch's "
                              "expandable segments is", error);
    return EP_OK;
}

/* The device's context is current. */
static ep_status export_at(uint32_t device, const void *at, uint64_t bytes, int *fd, struct ep_error *error)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)at);
    ep_status status;

    if (result == CUDA_ERROR_INVALID_VALUE)
        return not_exportable(at, "it is no VMM memory, as that of cudaMalloc() is not", error);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuMemRetainAllocationHandle of %p", at);
    status = check_exportable(at, handle, error);
    if (status == EP_OK)
        status = export(handle, bytes, device, fd, error);
    cuMemRelease(handle);
    return status;
}

/* cuMemMap() maps from the beginning of an allocation, so the mapping begins where that does. */
ep_status ep_cuda_memory_export_at(uint32_t device, const void *at, int *fd, uint64_t *offset, uint64_t *bytes,
                                   struct ep_error *error)
{
    CUdeviceptr base = 0;
    size_t size = 0;
    ep_status status = ep_cuda_enter(device, NULL, error);

    if (status != EP_OK)
        return status;
    status = find(device, at, &base, &size, error);
    if (status == EP_OK)
        status = export_at(device, at, size, fd, error);
    ep_cuda_leave();
    if (status != EP_OK)
        return status;
    *offset = (CUdeviceptr)at - base;
    *bytes = size;
    return EP_OK;
}
