/*
 * Findings about GPUs and what they need.  CUDA and NCCL are looked up with dlopen: ep-admin runs where
 * they are not installed, and says which version it found where they are.
 */
#include "doctor.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MIN_NCCL = 22809 }; /* 2.28.9, as ncclGetVersion() counts */

static size_t count_paths(const char *pattern)
{
    glob_t found;
    size_t n = glob(pattern, 0, NULL, &found) == 0 ? found.gl_pathc : 0;

    if (n)
        globfree(&found);
    return n;
}

/* ISO C has no cast from an object pointer to a function's; POSIX says that the bytes are the same. */
static bool find_function(void *library, const char *name, void *function_pointer)
{
    void *symbol = dlsym(library, name);

    memcpy(function_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

static void check_cuda(struct ep_report *report)
{
    int (*init)(unsigned) = NULL, (*version)(int *) = NULL, (*count)(int *) = NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int number = 0, devices = 0, result;

    if (!library) {
        ep_report_add(report, report->has_gpu ? EP_FINDING_FAIL : EP_FINDING_OK, "cuda",
                      "install the driver's libraries; in a container, use the NVIDIA runtime with the "
                      "compute capability",
                      "libcuda.so.1 is not here%s",
                      report->has_gpu ? ", though there are GPUs" : "; not needed without GPUs");
        return;
    }
    if (!find_function(library, "cuInit", &init) || !find_function(library, "cuDriverGetVersion", &version) ||
        !find_function(library, "cuDeviceGetCount", &count)) {
        ep_report_add(report, EP_FINDING_FAIL, "cuda", "install the driver again",
                      "libcuda.so.1 is not CUDA's");
        return;
    }
    result = init(0);
    if (version(&number) != 0)
        number = 0;
    if (result != 0 || count(&devices) != 0)
        ep_report_add(report, report->has_gpu ? EP_FINDING_FAIL : EP_FINDING_WARN, "cuda",
                      "see nvidia-smi and dmesg; driver and library must be of one version",
                      "cuInit() failed with %d, the driver is for CUDA %d.%d", result, number / 1000,
                      number % 1000 / 10);
    else
        ep_report_add(report, EP_FINDING_OK, "cuda", NULL, "driver for CUDA %d.%d, %d devices", number / 1000,
                      number % 1000 / 10, devices);
    /* The library stays: its threads do not survive dlclose(). */
}

static void check_gpus(struct ep_report *report)
{
    size_t gpus = count_paths("/dev/nvidia[0-9]*");

    report->has_gpu = gpus > 0;
    report->has_rdma = count_paths("/dev/infiniband/uverbs*") > 0;
    if (gpus == 0)
        ep_report_add(report, EP_FINDING_OK, "gpu", NULL,
                      "none here (no /dev/nvidia*): the host backend is what there is");
    else if (access("/dev/nvidiactl", R_OK | W_OK) != 0)
        ep_report_add(report, EP_FINDING_FAIL, "gpu", "give this user or container access to /dev/nvidia*",
                      "%zu, but /dev/nvidiactl cannot be opened by uid %u", gpus, (unsigned)getuid());
    else
        ep_report_add(report, EP_FINDING_OK, "gpu", NULL, "%zu", gpus);
}

static void check_nccl(struct ep_report *report)
{
    int (*get_version)(int *) = NULL;
    void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
    int version = 0;

    if (!library) {
        ep_report_add(report, report->has_gpu ? EP_FINDING_FAIL : EP_FINDING_OK, "nccl",
                      "install NCCL 2.28.9 or newer, or put its directory into LD_LIBRARY_PATH",
                      "libnccl.so.2 is not here%s", report->has_gpu ? "" : "; not needed without GPUs");
        return;
    }
    if (!find_function(library, "ncclGetVersion", &get_version) || get_version(&version) != 0)
        ep_report_add(report, EP_FINDING_FAIL, "nccl", "install NCCL again",
                      "libnccl.so.2 does not say its version");
    else
        ep_report_add(report,
                      version >= MIN_NCCL ? EP_FINDING_OK
                      : report->has_gpu   ? EP_FINDING_FAIL
                                          : EP_FINDING_WARN,
                      "nccl", "install NCCL 2.28.9 or newer", "%d.%d.%d%s", version / 10000,
                      version / 100 % 100, version % 100,
                      version >= MIN_NCCL ? "" : ", the server needs 2.28.9");
}

static void check_mps(struct ep_report *report)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct stat info;
    char path[512];

    if (!report->has_gpu)
        return;
    snprintf(path, sizeof path, "%s/control", directory && *directory ? directory : "/tmp/nvidia-mps");
    if (stat(path, &info) == 0)
        ep_report_add(report, EP_FINDING_OK, "mps", NULL, "its control pipe is %s", path);
    else
        ep_report_add(
            report, EP_FINDING_WARN, "mps",
            "nvidia-cuda-mps-control -d as the server's user, with one CUDA_MPS_PIPE_DIRECTORY for all",
            "no control pipe at %s: a hand-over between worker and server takes twice as long", path);
}

void ep_doctor_gpu(struct ep_report *report)
{
    check_gpus(report);
    check_cuda(report);
    check_nccl(report);
    check_mps(report);
}
