/*
 * A libnvidia-ml.so.1 without GPUs: LD_LIBRARY_PATH=build/unit/nvml.  One GPU per digit of $EP_NVML_FABRIC, which is the
 * state of the fabric manager's registration (NVML_GPU_FABRIC_STATE_*); 9 is one that is completed and has failed.
 * Without that variable NVML does not start.
 *
 *     EP_NVML_GPUS    digits: NVML's GPU i is the "GPU-fixture-<digit>" of CUDA (cuda_fixture.h); 0123... without it
 *     EP_NVML_PARTS   set: no GPU is known by its UUID
 *     EP_NVML_LINKS   NVLinks of each GPU that are up, of LINKS; none supports NVLink without it
 *     EP_NVML_DOMAINS characters: GPUs of the same one reach each other over NVLink; none do without it
 *
 * With EP_NVML_OLD it is a library that has but the functions of a first one (build/unit/nvml_old).
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fabric_info {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *n);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device);
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device);
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active);
int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status);
int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric_info *info);
const char *nvmlErrorString(int error);

enum { COMPLETED = 3, FAILED = 9 };
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, NOT_LOADED = 9, UNKNOWN = 999 };
enum { LINKS = 18, OVER_NVLINK = 2, P2P_NOT_SUPPORTED = 5 };

/* A device is the address of its digit, so that no index is taken for one. */
static const char *states(void)
{
    return getenv("EP_NVML_FABRIC");
}

int nvmlInit_v2(void)
{
    return states() ? SUCCESS : NOT_LOADED;
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *n)
{
    *n = (unsigned)strlen(states());
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= strlen(states()))
        return INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(states() + index);
    return SUCCESS;
}

#ifndef EP_NVML_OLD
static int find(const char *format, const char *name, void **device)
{
    const char *order = getenv("EP_NVML_GPUS");

    for (unsigned i = 0; i < strlen(states()); i++) {
        const unsigned number = order && i < strlen(order) ? (unsigned)(order[i] - '0') : i;
        char text[32];

        snprintf(text, sizeof text, format, number);
        if (strcmp(text, name) == 0)
            return nvmlDeviceGetHandleByIndex_v2(i, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    return getenv("EP_NVML_PARTS") ? NOT_FOUND : find("GPU-fixture-%u", uuid, device);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device)
{
    return find("0000:%02x:00.0", pci, device);
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active)
{
    const char *up = getenv("EP_NVML_LINKS");

    (void)device;
    if (!up)
        return NOT_SUPPORTED;
    if (link >= LINKS)
        return INVALID_ARGUMENT;
    *active = link < strtoul(up, NULL, 10);
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status)
{
    const char *domains = getenv("EP_NVML_DOMAINS");
    const ptrdiff_t i = (const char *)a - states(), j = (const char *)b - states();

    if (index != OVER_NVLINK || i == j)
        return INVALID_ARGUMENT;
    *status = domains && domains[i] == domains[j] ? SUCCESS : P2P_NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric_info *info)
{
    const int state = *(const char *)device - '0';

    *info = (struct fabric_info){ .status = state == FAILED ? UNKNOWN : 0,
                                  .state = (unsigned char)(state == FAILED ? COMPLETED : state) };
    return SUCCESS;
}
#endif

const char *nvmlErrorString(int error)
{
    return error == UNKNOWN ? "Unknown Error" : "Driver Not Loaded";
}
