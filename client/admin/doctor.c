/* The doctor command: runs the checks and prints what they found. */
#include "doctor.h"

#include <stdlib.h>

int ep_doctor_run(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    struct ep_report report = { .findings = NULL };
    int code;

    ep_doctor_gpu(&report);
    if (report.has_gpu)
        ep_doctor_fabric(&report);
    ep_doctor_host(&report);
    if (!ep_invocation_given(invocation, "host-only"))
        ep_doctor_server(&report, admin);
    code = ep_report_print(admin, &report);
    if (code == 0 && ep_report_count(&report, EP_FINDING_FAIL) > 0)
        code = 6;
    free(report.findings);
    return code;
}
