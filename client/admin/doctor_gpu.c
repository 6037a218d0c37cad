/*
 * Findings about GPUs and what they need.  What this process can do with them is asked of the cuda backend,
 * as a worker does.  NCCL is looked up with dlopen: ep-admin runs where it is not installed, and says which
 * version it found where it is.
 */
#include "doctor.h"

#include <dlfcn.h>
#include <glob.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MIN_NCCL = 22809 }; /* 2.28.9, as ncclGetVersion() counts */
enum { MIN_MAJOR = 9 };    /* sm_90: what the kernels are built for */

static size_t count_paths(const char *pattern)
{
    glob_t found;
    size_t n = glob(pattern, 0, NULL, &found) == 0 ? found.gl_pathc : 0;

    if (n)
        globfree(&found);
    return n;
}

/* ---- what the machine has ------------------------------------------------------------ */

static void check_nodes(struct ep_report *report, size_t gpus)
{
    if (gpus == 0 && !report->has_gpu)
        ep_report_add(report, EP_FINDING_OK, "gpu", NULL,
                      "none here (no /dev/nvidia*): the host backend is what there is");
    else if (gpus > 0 && access("/dev/nvidiactl", R_OK | W_OK) != 0)
        ep_report_add(report, EP_FINDING_FAIL, "gpu", "give this user or container access to /dev/nvidia*",
                      "%zu, but /dev/nvidiactl cannot be opened by uid %u", gpus, (unsigned)getuid());
}

/* ISO C has no cast from an object pointer to a function's; POSIX says that the bytes are the same. */
static bool find_function(void *library, const char *name, void *function_pointer)
{
    void *symbol = dlsym(library, name);

    memcpy(function_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

static void check_nccl(struct ep_report *report)
{
    int (*get_version)(int *) = NULL;
    void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
    int version = 0;

    if (!library) {
        ep_report_add(report, EP_FINDING_OK, "nccl", NULL,
                      "libnccl.so.2 is not here; groups of one node do not need it");
        return;
    }
    if (!find_function(library, "ncclGetVersion", &get_version) || get_version(&version) != 0)
        ep_report_add(report, EP_FINDING_WARN, "nccl", "install NCCL again",
                      "libnccl.so.2 does not say its version");
    else
        ep_report_add(report, version >= MIN_NCCL ? EP_FINDING_OK : EP_FINDING_WARN, "nccl",
                      "install NCCL 2.28.9 or newer before groups are to span nodes; one node does not need it",
                      "%d.%d.%d%s", version / 10000, version / 100 % 100, version % 100,
                      version >= MIN_NCCL ? "" : " is older than 2.28.9");
}

/* ---- the backend that cannot be had ---------------------------------------------------- */

/* What is missing, in the order in which it is needed. */
static const char *remedy_of(const char *why)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);

    if (!driver)
        return "install the driver's libraries; in a container, use the NVIDIA runtime with the compute capability";
    /* The library stays: its threads do not survive dlclose(). */
    if (strstr(why, "SYSTEM_NOT_READY")) /* 802 */
        return "start nvidia-fabricmanager, of the driver's version, and wait until it is done: GPUs behind "
               "NVSwitches do nothing before";
    if (strstr(why, "MPS_SERVER_NOT_READY")) /* 807 */
        return "an MPS server that has seen a fault takes no program on before those that used the GPU have ended: end "
               "them (`echo ps | nvidia-cuda-mps-control` lists them)";
    if (strstr(why, "cuInit"))
        return "see nvidia-smi and dmesg; driver and library must be of one version";
    if (strstr(why, "sees no GPU"))
        return "look at CUDA_VISIBLE_DEVICES, and at which GPUs the container was given";
    return "libep_cuda.so belongs beside ep-server and ep-admin or in ../lib of them, or name it in "
           "EP_CUDA_MODULE; it is built where nvcc is";
}

static void report_missing(struct ep_report *report, const char *why)
{
    if (report->has_gpu)
        ep_report_add(report, EP_FINDING_FAIL, "cuda", remedy_of(why), "%s", why);
    else
        ep_report_add(report, EP_FINDING_OK, "cuda", NULL, "not needed without GPUs (%.300s)", why);
}

/* ---- what this process can do with them ------------------------------------------------- */

enum { MAX_GPUS = 64 }; /* bits of ep_cuda_device.peers */

struct gpus {
    uint32_t n;
    struct ep_cuda_device gpu[MAX_GPUS];
};

static ep_status look(const struct ep_cuda_api *api, struct gpus *gpus, struct ep_error *error)
{
    uint32_t n = 0;
    ep_status status = api->device_count(&n, error);

    for (uint32_t i = 0; status == EP_OK && i < n && i < MAX_GPUS; i++)
        status = api->device_info(i, &gpus->gpu[gpus->n++], error);
    return status;
}

static void check_visible(struct ep_report *report, const struct gpus *gpus, size_t nodes)
{
    const struct ep_cuda_device *first = &gpus->gpu[0];
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < gpus->n; i++)
        bytes += gpus->gpu[i].memory_free;
    ep_report_add(report, nodes > gpus->n ? EP_FINDING_WARN : EP_FINDING_OK, "gpu",
                  "look at CUDA_VISIBLE_DEVICES, here and of the server, if it is to use all of them",
                  "%u (%s, sm_%u%u), %s free%s", gpus->n, first->name, first->major, first->minor,
                  ep_text_size(bytes).s, nodes > gpus->n ? "; the machine has more" : "");
}

static void check_fit(struct ep_report *report, const struct gpus *gpus)
{
    for (uint32_t i = 0; i < gpus->n; i++) {
        const struct ep_cuda_device *gpu = &gpus->gpu[i];

        if (!gpu->shareable)
            ep_report_add(report, EP_FINDING_WARN, "gpu", "use a GPU and driver with virtual memory management",
                          "%s (%s): its memory cannot be shared with workers, the server does not use it",
                          gpu->uuid_text, gpu->name);
        else if (gpu->major < MIN_MAJOR)
            ep_report_add(report, EP_FINDING_WARN, "gpu", "use Hopper or newer",
                          "%s (%s) is sm_%u%u: the kernels are built for sm_90 and newer", gpu->uuid_text, gpu->name,
                          gpu->major, gpu->minor);
    }
}

/* ---- MPS ---------------------------------------------------------------------------------- */

static bool has_control_pipe(char *path, size_t size)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct stat info;

    snprintf(path, size, "%s/control", directory && *directory ? directory : "/tmp/nvidia-mps");
    return stat(path, &info) == 0;
}

/* A process is an MPS server's client on all of its GPUs or on none. */
static void check_mps(struct ep_report *report, const struct gpus *gpus)
{
    char path[512];

    if (gpus->gpu[0].mps)
        ep_report_add(report, EP_FINDING_OK, "mps", NULL,
                      "on: processes that share a GPU run at once, so the server runs the ops of a worker (executor "
                      "server) without the GPU switching between the two, faster with ep-server --doorbell=poll. Workers "
                      "that run their own ops (direct) do not need it");
    else if (has_control_pipe(path, sizeof path))
        ep_report_add(report, EP_FINDING_WARN, "mps",
                      "nvidia-cuda-mps-control -d as the user of server and workers, or remove what a dead one left",
                      "off, though there is a control pipe at %.200s: nobody serves this process there", path);
    else
        ep_report_add(report, EP_FINDING_OK, "mps", NULL,
                      "off. Workers that run their own ops (direct) do not need it; ops that the server runs (executor "
                      "server) between kernels of a worker switch the GPU to its process and back. To spare that, "
                      "start nvidia-cuda-mps-control -d as the user of server and workers before them, and give all "
                      "the same CUDA_MPS_PIPE_DIRECTORY");
}

/* ---- P2P ---------------------------------------------------------------------------------- */

static bool reach(const struct gpus *gpus, uint32_t a, uint32_t b)
{
    return gpus->gpu[a].peers >> b & 1 && gpus->gpu[b].peers >> a & 1;
}

/* The pairs that do not reach each other, as many as fit; returns how many there are. */
static uint32_t list_apart(const struct gpus *gpus, char *text, size_t size)
{
    uint32_t n = 0;

    text[0] = '\0';
    for (uint32_t a = 0; a < gpus->n; a++)
        for (uint32_t b = a + 1; b < gpus->n; b++) {
            const size_t used = strlen(text);

            if (reach(gpus, a, b))
                continue;
            if (used + 16 < size)
                snprintf(text + used, size - used, "%s%u-%u", n ? ", " : "", a, b);
            n++;
        }
    return n;
}

static void check_p2p(struct ep_report *report, const struct gpus *gpus)
{
    const uint32_t pairs = gpus->n * (gpus->n - 1) / 2;
    char text[200];
    const uint32_t apart = list_apart(gpus, text, sizeof text);

    if (pairs == 0)
        ep_report_add(report, EP_FINDING_OK, "p2p", NULL, "one GPU, which has all ranks of a group");
    else if (apart == 0)
        ep_report_add(report, EP_FINDING_OK, "p2p", NULL, "each of %u GPUs reaches the memory of all others", gpus->n);
    else
        ep_report_add(report, EP_FINDING_WARN, "p2p",
                      "nvidia-smi topo -p2p rw says why; a group needs GPUs that reach each other: give the server "
                      "those with CUDA_VISIBLE_DEVICES",
                      "%u of %u pairs of GPUs do not reach each other's memory: %s; a group on both is refused", apart,
                      pairs, text);
}

/* ---- all of it ---------------------------------------------------------------------------- */

void ep_doctor_cuda(struct ep_report *report, const struct ep_cuda_api *api, size_t nodes)
{
    struct gpus gpus = { .n = 0 };
    struct ep_error error = EP_ERROR_INIT;

    report->has_gpu = true;
    if (look(api, &gpus, &error) != EP_OK) {
        report_missing(report, error.text);
        return;
    }
    check_visible(report, &gpus, nodes);
    check_fit(report, &gpus);
    ep_report_add(report, EP_FINDING_OK, "cuda", NULL, "libep_cuda.so is loaded, the driver is for CUDA %u.%u",
                  gpus.gpu[0].driver / 1000, gpus.gpu[0].driver % 1000 / 10);
    check_p2p(report, &gpus);
    check_mps(report, &gpus);
}

void ep_doctor_gpu(struct ep_report *report)
{
    const size_t nodes = count_paths("/dev/nvidia[0-9]*");
    const struct ep_cuda_api *api = NULL;
    struct ep_error why = EP_ERROR_INIT;
    const bool usable = ep_cuda_open(&api, &why) == EP_OK;

    report->has_gpu = nodes > 0 || usable;
    report->has_rdma = count_paths("/dev/infiniband/uverbs*") > 0;
    check_nodes(report, nodes);
    if (usable)
        ep_doctor_cuda(report, api, nodes);
    else
        report_missing(report, why.text);
    check_nccl(report);
}
