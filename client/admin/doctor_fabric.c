/*
 * Is the fabric manager done?  GPUs behind NVSwitches cannot be used before (cuInit fails with 802), and NVML
 * tells how far it is without CUDA.
 */
#include "doctor.h"
#include "ep_nvml.h"

struct tally {
    unsigned n, of_state[EP_NVML_FABRICS];
    const char *failure; /* of the last that has failed */
};

static void look(struct tally *tally)
{
    tally->n = ep_nvml_count();
    for (unsigned i = 0; i < tally->n; i++)
        tally->of_state[ep_nvml_fabric(ep_nvml_at(i), &tally->failure)]++;
}

static void tell(struct ep_report *report, const struct tally *t)
{
    if (t->of_state[EP_NVML_FABRIC_NOT_STARTED] > 0)
        ep_report_add(report, EP_FINDING_FAIL, "fabric",
                      "systemctl start nvidia-fabricmanager; it must be of the driver's version",
                      "the fabric manager has not begun with %u of %u GPUs: CUDA fails there (error 802)",
                      t->of_state[EP_NVML_FABRIC_NOT_STARTED], t->n);
    else if (t->of_state[EP_NVML_FABRIC_IN_PROGRESS] > 0)
        ep_report_add(report, EP_FINDING_FAIL, "fabric",
                      "wait for it; if it stays so, journalctl -u nvidia-fabricmanager, and a version like "
                      "the driver's",
                      "the fabric manager is not done with %u of %u GPUs: CUDA fails there (error 802)",
                      t->of_state[EP_NVML_FABRIC_IN_PROGRESS], t->n);
    else if (t->of_state[EP_NVML_FABRIC_FAILED] > 0)
        ep_report_add(
            report, EP_FINDING_FAIL, "fabric",
            "journalctl -u nvidia-fabricmanager and nvidia-smi -q say more; restart it, or reset the GPUs",
            "the fabric manager has failed with %u of %u GPUs: %s", t->of_state[EP_NVML_FABRIC_FAILED], t->n,
            t->failure);
    else if (t->of_state[EP_NVML_FABRIC_COMPLETED] > 0)
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "the fabric manager is done with %u of %u GPUs",
                      t->of_state[EP_NVML_FABRIC_COMPLETED], t->n);
    else if (t->of_state[EP_NVML_FABRIC_UNKNOWN] > 0)
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "not known of %u of %u GPUs: NVML does not tell",
                      t->of_state[EP_NVML_FABRIC_UNKNOWN], t->n);
    else
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "no fabric manager is needed for these GPUs");
}

void ep_doctor_fabric(struct ep_report *report)
{
    struct tally tally = { .n = 0 };
    struct ep_error why = EP_ERROR_INIT;

    switch (ep_nvml_open(&why)) {
    case EP_OK:
        look(&tally);
        tell(report, &tally);
        ep_nvml_close();
        break;
    case EP_NOT_FOUND: /* where there is no driver */
        ep_report_add(report, EP_FINDING_OK, "fabric", NULL, "not known: %s", why.text);
        break;
    default:
        ep_report_add(report, EP_FINDING_WARN, "fabric",
                      "see nvidia-smi and dmesg; driver and library must be of one "
                      "version",
                      "not known: %s", why.text);
    }
}
