/* GPUs of this process: how many there are and what they can do. */
#include "cuda_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- finding one ------------------------------------------------------------------- */

static ep_status read_uuid(uint32_t device, CUdevice handle, uint8_t bytes[EP_CUDA_UUID_BYTES],
                           struct ep_error *error)
{
    CUuuid uuid;
    CUresult result = cuDeviceGetUuid(&uuid, handle);

    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuDeviceGetUuid of device %u", device);
    memcpy(bytes, uuid.bytes, EP_CUDA_UUID_BYTES);
    return EP_OK;
}

/* As nvidia-smi prints it. */
static void print_uuid(const uint8_t *uuid, char *text, size_t size)
{
    const uint8_t *u = uuid;

    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

ep_status ep_cuda_device_find(const uint8_t uuid[EP_CUDA_UUID_BYTES], uint32_t *device,
                              struct ep_error *error)
{
    uint8_t found[EP_CUDA_UUID_BYTES];
    uint32_t count = 0;
    CUdevice handle;
    char text[48];
    ep_status status = ep_cuda_device_count(&count, error);

    for (uint32_t d = 0; status == EP_OK && d < count; d++) {
        status = ep_cuda_device_get(d, &handle, error);
        if (status == EP_OK)
            status = read_uuid(d, handle, found, error);
        if (status == EP_OK && memcmp(found, uuid, sizeof found) == 0) {
            *device = d;
            return EP_OK;
        }
    }
    if (status != EP_OK)
        return status;
    print_uuid(uuid, text, sizeof text);
    return ep_error_set(error, EP_NOT_FOUND, "%s is not among the %u GPUs that this process sees", text,
                        count);
}

/* ---- what it is --------------------------------------------------------------------- */

/* A failed query is kept and ends the list: the first one is reported. */
struct query {
    CUdevice handle;
    CUresult result;
    const char *call;
};

static bool asked(struct query *query, const char *call, CUresult result)
{
    if (query->result != CUDA_SUCCESS)
        return false;
    query->call = call;
    query->result = result;
    return result == CUDA_SUCCESS;
}

static uint32_t attribute(struct query *query, CUdevice_attribute which)
{
    int value = 0;

    if (query->result == CUDA_SUCCESS)
        asked(query, "cuDeviceGetAttribute", cuDeviceGetAttribute(&value, which, query->handle));
    return (uint32_t)value;
}

static uint64_t peers_of(struct query *query, uint32_t device)
{
    uint64_t peers = 1ull << device; /* the driver says no of a device and itself */
    uint32_t count = 0;
    CUdevice peer;
    int reaches;

    (void)ep_cuda_device_count(&count, NULL); /* it has been asked before, and there are some */
    for (uint32_t d = 0; d < count; d++) {
        if (d != device && asked(query, "cuDeviceGet", cuDeviceGet(&peer, (int)d)) &&
            asked(query, "cuDeviceCanAccessPeer", cuDeviceCanAccessPeer(&reaches, query->handle, peer)) &&
            reaches)
            peers |= 1ull << d;
    }
    return peers;
}

/* Of these, those whose memory's atomics are done where it is: over NVLink they are, over PCIe not. */
static uint64_t linked_of(struct query *query, uint64_t peers, uint32_t device)
{
    uint64_t linked = 1ull << device;
    CUdevice peer;
    int native;

    for (uint32_t d = 0; d < 64; d++) {
        if (d != device && peers >> d & 1 && asked(query, "cuDeviceGet", cuDeviceGet(&peer, (int)d)) &&
            asked(query, "cuDeviceGetP2PAttribute",
                  cuDeviceGetP2PAttribute(&native, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, query->handle, peer)) &&
            native)
            linked |= 1ull << d;
    }
    return linked;
}

static void ask_identity(struct query *query, struct ep_cuda_device *info)
{
    int driver = 0;

    asked(query, "cuDeviceGetName", cuDeviceGetName(info->name, (int)sizeof info->name, query->handle));
    asked(query, "cuDeviceGetPCIBusId", cuDeviceGetPCIBusId(info->pci, (int)sizeof info->pci, query->handle));
    asked(query, "cuDriverGetVersion", cuDriverGetVersion(&driver));
    info->driver = (uint32_t)driver;
}

/*
 * MPS: whether work of this process goes through a server was settled by cuInit (which looks for a control
 * daemon's pipe in $CUDA_MPS_PIPE_DIRECTORY or /tmp/nvidia-mps), so the driver is asked: a pipe that is there
 * may have nobody behind it, or may have come later.
 */
static void ask_abilities(struct query *query, struct ep_cuda_device *info)
{
    info->sms = attribute(query, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    info->major = attribute(query, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info->minor = attribute(query, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    info->shareable = attribute(query, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                      attribute(query, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    info->mps = attribute(query, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0;
}

/* The device's context is current: the driver tells what is free only then. */
static void ask_memory(struct query *query, struct ep_cuda_device *info)
{
    size_t available = 0, total = 0;

    asked(query, "cuMemGetInfo", cuMemGetInfo(&available, &total));
    info->memory_bytes = total;
    info->memory_free = available;
}

ep_status ep_cuda_device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error)
{
    struct ep_cuda_device found = { .name = "" };
    const struct ep_cuda_context *context;
    struct query query;
    ep_status status = ep_cuda_enter(device, &context, error);

    if (status != EP_OK)
        return status;
    query = (struct query){ .handle = context->handle, .result = CUDA_SUCCESS };
    ask_identity(&query, &found);
    ask_abilities(&query, &found);
    ask_memory(&query, &found);
    found.peers = peers_of(&query, device);
    found.linked = linked_of(&query, found.peers, device);
    ep_cuda_leave();
    if (query.result != CUDA_SUCCESS)
        return ep_cuda_fail(error, query.result, "%s of device %u", query.call, device);
    status = read_uuid(device, context->handle, found.uuid, error);
    if (status != EP_OK)
        return status;
    print_uuid(found.uuid, found.uuid_text, sizeof found.uuid_text);
    *info = found;
    return EP_OK;
}

/* ---- the caller's -------------------------------------------------------------------- */

ep_status ep_cuda_device_current(uint32_t *device, struct ep_error *error)
{
    uint32_t count = 0;
    CUdevice handle = 0;
    ep_status status = ep_cuda_device_count(&count, error); /* starts the driver */
    CUresult result;

    if (status != EP_OK)
        return status;
    result = cuCtxGetDevice(&handle);
    if (result == CUDA_ERROR_INVALID_CONTEXT)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "no device is current on this thread: call cudaSetDevice()");
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuCtxGetDevice");
    *device = (uint32_t)handle;
    return EP_OK;
}
