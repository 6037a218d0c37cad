/* Finds NVML.  What is declared here is of nvml.h, whose interface of version 1 stays as it is. */
#include "ep_nvml.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define LIBRARY "libnvidia-ml.so.1"

enum { SUCCESS = 0, NOT_SUPPORTED = 3 }; /* nvmlReturn_t */
enum { P2P_OVER_NVLINK = 2 };            /* nvmlGpuP2PCapsIndex_t */
enum { P2P_OK = 0, P2P_UNKNOWN = 6 };    /* nvmlGpuP2PStatus_t; between them: why not */
enum { MAX_LINKS = 32 };                 /* asked for at most: NVML has 18 up to now */
enum { STATE_NONE, STATE_NOT_STARTED, STATE_IN_PROGRESS, STATE_COMPLETED }; /* nvmlGpuFabricState_t */

struct fabric_info { /* nvmlGpuFabricInfo_t */
    unsigned char cluster[16];
    int status; /* of a completed registration; 0: good */
    unsigned clique;
    unsigned char state;
};
_Static_assert(sizeof(struct fabric_info) == 28 && offsetof(struct fabric_info, state) == 24,
               "as nvml.h has it");

static struct {
    int (*init)(void);
    int (*shut_down)(void);
    const char *(*error_text)(int error);
    int (*count)(unsigned *n);
    int (*by_index)(unsigned index, struct ep_nvml_gpu **gpu);
    int (*by_uuid)(const char *uuid, struct ep_nvml_gpu **gpu);
    int (*by_pci)(const char *pci, struct ep_nvml_gpu **gpu);
    int (*link)(struct ep_nvml_gpu *gpu, unsigned link, int *active);
    int (*p2p)(struct ep_nvml_gpu *from, struct ep_nvml_gpu *to, int index, int *status);
    int (*fabric)(struct ep_nvml_gpu *gpu, struct fabric_info *info);
} nvml; /* written once, by load() */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct ep_error missing = EP_ERROR_INIT;

/* ---- the library ----------------------------------------------------------------------- */

/* Those that are not there stay NULL. */
static void look_up(void *library)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        { "nvmlInit_v2", &nvml.init },
        { "nvmlShutdown", &nvml.shut_down },
        { "nvmlErrorString", &nvml.error_text },
        { "nvmlDeviceGetCount_v2", &nvml.count },
        { "nvmlDeviceGetHandleByIndex_v2", &nvml.by_index },
        { "nvmlDeviceGetHandleByUUID", &nvml.by_uuid },
        { "nvmlDeviceGetHandleByPciBusId_v2", &nvml.by_pci },
        { "nvmlDeviceGetNvLinkState", &nvml.link },
        { "nvmlDeviceGetP2PStatus", &nvml.p2p },
        { "nvmlDeviceGetGpuFabricInfo", &nvml.fabric },
    };

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(library, functions[i].name);

        /* ISO C has no such cast, POSIX promises that it works. */
        memcpy(functions[i].at, &symbol, sizeof symbol);
    }
}

/* The library stays: a driver's threads do not survive dlclose(). */
static void load(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        (void)ep_error_set(&missing, EP_NOT_FOUND, "%s is not here", LIBRARY);
        return;
    }
    look_up(library);
    if (!nvml.init || !nvml.shut_down)
        (void)ep_error_set(&missing, EP_NOT_FOUND, "%s is too old", LIBRARY);
}

static const char *text_of(int result)
{
    return nvml.error_text ? nvml.error_text(result) : "it does not say why";
}

ep_status ep_nvml_open(struct ep_error *error)
{
    int result;

    pthread_once(&once, load);
    if (missing.status)
        return ep_error_set(error, missing.status, "%s", missing.text);
    result = nvml.init();
    if (result != SUCCESS)
        return ep_error_set(error, EP_UNAVAILABLE, "NVML does not start: %s", text_of(result));
    return EP_OK;
}

void ep_nvml_close(void)
{
    nvml.shut_down();
}

/* ---- which ------------------------------------------------------------------------------ */

uint32_t ep_nvml_count(void)
{
    unsigned n = 0;

    return nvml.count && nvml.count(&n) == SUCCESS ? n : 0;
}

struct ep_nvml_gpu *ep_nvml_at(uint32_t index)
{
    struct ep_nvml_gpu *gpu = NULL;

    return nvml.by_index && nvml.by_index(index, &gpu) == SUCCESS ? gpu : NULL;
}

/* A part of a GPU (MIG) has a UUID of its own, and the whole one's place. */
struct ep_nvml_gpu *ep_nvml_find(const char *uuid, const char *pci)
{
    struct ep_nvml_gpu *gpu = NULL;

    if (nvml.by_uuid && nvml.by_uuid(uuid, &gpu) == SUCCESS)
        return gpu;
    return nvml.by_pci && nvml.by_pci(pci, &gpu) == SUCCESS ? gpu : NULL;
}

/* ---- what it is -------------------------------------------------------------------------- */

/* A GPU without NVLink supports none; one with fewer links than MAX_LINKS calls the others wrong. */
bool ep_nvml_links(struct ep_nvml_gpu *gpu, uint32_t *links)
{
    bool known = false;
    uint32_t n = 0;

    for (unsigned i = 0; gpu && nvml.link && i < MAX_LINKS; i++) {
        int active = 0;
        const int result = nvml.link(gpu, i, &active);

        known |= result == SUCCESS || result == NOT_SUPPORTED;
        n += result == SUCCESS && active;
    }
    if (known)
        *links = n;
    return known;
}

enum ep_nvml_way ep_nvml_way(struct ep_nvml_gpu *from, struct ep_nvml_gpu *to)
{
    int status = P2P_UNKNOWN;

    if (!from || !to || !nvml.p2p || nvml.p2p(from, to, P2P_OVER_NVLINK, &status) != SUCCESS)
        return EP_NVML_WAY_UNKNOWN;
    if (status == P2P_OK)
        return EP_NVML_WAY_NVLINK;
    return status < P2P_UNKNOWN ? EP_NVML_WAY_PCIE : EP_NVML_WAY_UNKNOWN;
}

enum ep_nvml_fabric ep_nvml_fabric(struct ep_nvml_gpu *gpu, const char **failure)
{
    struct fabric_info info = { .state = STATE_NONE };
    const int result = gpu && nvml.fabric ? nvml.fabric(gpu, &info) : -1;

    if (result == NOT_SUPPORTED)
        return EP_NVML_FABRIC_NONE;
    if (result != SUCCESS)
        return EP_NVML_FABRIC_UNKNOWN;
    switch (info.state) {
    case STATE_NONE: return EP_NVML_FABRIC_NONE;
    case STATE_NOT_STARTED: return EP_NVML_FABRIC_NOT_STARTED;
    case STATE_IN_PROGRESS: return EP_NVML_FABRIC_IN_PROGRESS;
    case STATE_COMPLETED:
        if (info.status == SUCCESS)
            return EP_NVML_FABRIC_COMPLETED;
        if (failure)
            *failure = text_of(info.status);
        return EP_NVML_FABRIC_FAILED;
    default: return EP_NVML_FABRIC_UNKNOWN;
    }
}
