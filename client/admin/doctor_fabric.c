/*
 * Is the fabric manager done?  GPUs behind NVSwitches cannot be used before (cuInit fails with 802), and NVML
 * tells how far it is without CUDA.  Its library comes with the driver and is looked up with dlopen; what is
 * declared here is of nvml.h, whose interface of version 1 stays as it is.
 */
#include "doctor.h"

#include <dlfcn.h>

enum { STATE_NONE, STATE_NOT_STARTED, STATE_IN_PROGRESS, STATE_COMPLETED, STATES };

struct fabric_info { /* nvmlGpuFabricInfo_t */
    unsigned char cluster[16];
    int status; /* of a completed registration; 0: good */
    unsigned clique;
    unsigned char state;
};
_Static_assert(sizeof(struct fabric_info) == 28, "as nvml.h has it");

struct nvml {
    int (*init)(void);
    int (*shut_down)(void);
    int (*count)(unsigned *n);
    int (*device)(unsigned index, void **device);
    int (*fabric)(void *device, struct fabric_info *info);
    const char *(*error_text)(int error);
};

static bool load(struct nvml *nvml)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);

    return library && ep_doctor_function(library, "nvmlInit_v2", &nvml->init) &&
           ep_doctor_function(library, "nvmlShutdown", &nvml->shut_down) &&
           ep_doctor_function(library, "nvmlDeviceGetCount_v2", &nvml->count) &&
           ep_doctor_function(library, "nvmlDeviceGetHandleByIndex_v2", &nvml->device) &&
           ep_doctor_function(library, "nvmlDeviceGetGpuFabricInfo", &nvml->fabric) &&
           ep_doctor_function(library, "nvmlErrorString", &nvml->error_text);
}

struct tally {
    unsigned n, of_state[STATES];
    unsigned failed; /* of those that are completed */
    int status;      /* of the last of them */
};

/* GPUs that do not answer have no fabric. */
static void look(const struct nvml *nvml, struct tally *tally)
{
    unsigned n = 0;

    if (nvml->count(&n) != 0)
        return;
    for (unsigned i = 0; i < n; i++) {
        struct fabric_info info = { .state = STATE_NONE };
        void *device;

        if (nvml->device(i, &device) != 0 || nvml->fabric(device, &info) != 0 || info.state >= STATES)
            info.state = STATE_NONE;
        tally->n++;
        tally->of_state[info.state]++;
        if (info.state == STATE_COMPLETED && info.status != 0) {
            tally->failed++;
            tally->status = info.status;
        }
    }
}

static void tell(struct ep_report *report, const struct nvml *nvml, const struct tally *t)
{
    if (t->of_state[STATE_NOT_STARTED] > 0)
        ep_report_add(report, EP_FINDING_FAIL, "fabric",
                      "systemctl start nvidia-fabricmanager; it must be of the driver's version",
                      "the fabric manager has not begun with %u of %u GPUs: CUDA fails there (error 802)",
                      t->of_state[STATE_NOT_STARTED], t->n);
    else if (t->of_state[STATE_IN_PROGRESS] > 0)
        ep_report_add(report, EP_FINDING_FAIL, "fabric",
                      "wait for it; if it stays so, journalctl -u nvidia-fabricmanager, and a version like the driver's",
                      "the fabric manager is not done with %u of %u GPUs: CUDA fails there (error 802)",
                      t->of_state[STATE_IN_PROGRESS], t->n);
    else if (t->failed > 0)
        ep_report_add(report, EP_FINDING_FAIL, "fabric",
                      "journalctl -u nvidia-fabricmanager and nvidia-smi -q say more; restart it, or reset the GPUs",
                      "the fabric manager has failed with %u of %u GPUs: %s", t->failed, t->n,
                      nvml->error_text(t->status));
    else if (t->of_state[STATE_COMPLETED] > 0)
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "the fabric manager is done with %u of %u GPUs",
                      t->of_state[STATE_COMPLETED], t->n);
    else
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "no fabric manager is needed for these GPUs");
}

void ep_doctor_fabric(struct ep_report *report)
{
    struct nvml nvml = { .init = NULL };
    struct tally tally = { .n = 0 };
    int result;

    if (!load(&nvml)) {
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL,
                      "not known: libnvidia-ml.so.1 is not here, or too old to tell");
        return;
    }
    result = nvml.init();
    if (result != 0) {
        ep_report_add(report, EP_FINDING_WARN, "fabric", "see nvidia-smi and dmesg; driver and library must be of one "
                      "version", "not known: NVML does not start: %s", nvml.error_text(result));
        return;
    }
    look(&nvml, &tally);
    tell(report, &nvml, &tally);
    nvml.shut_down();
}
