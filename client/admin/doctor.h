/*
 * ep_report: what doctor found.  Each check adds one finding or more; the files by what they look at.
 */
#ifndef EP_DOCTOR_H
#define EP_DOCTOR_H

#include <stddef.h>

#include "admin.h"
#include "ep_cuda.h"

enum ep_finding_level { EP_FINDING_OK, EP_FINDING_WARN, EP_FINDING_FAIL };

struct ep_finding {
    enum ep_finding_level level;
    const char *check; /* static: "kernel", "socket", ... */
    char text[400];
    const char *remedy; /* static; NULL: nothing to do */
};

struct ep_report {
    struct ep_finding *findings;
    size_t n;
    uint64_t memory_available; /* for windows, of this machine and its cgroup; 0: not known */
    bool has_gpu, has_rdma;
};

__attribute__((format(printf, 5, 6))) void ep_report_add(struct ep_report *report,
                                                         enum ep_finding_level level, const char *check,
                                                         const char *remedy, const char *format, ...);
size_t ep_report_count(const struct ep_report *report, enum ep_finding_level level);
/* The exit code: what could not be printed is an error. */
int ep_report_print(const struct ep_admin *admin, const struct ep_report *report);

void ep_doctor_gpu(struct ep_report *report); /* first: what is needed depends on it */
/* Of it: the GPUs that the cuda backend sees, on a machine that has `nodes` of them; the fabric manager. */
void ep_doctor_cuda(struct ep_report *report, const struct ep_cuda_api *api, size_t nodes);
void ep_doctor_fabric(struct ep_report *report);

void ep_doctor_host(struct ep_report *report);
void ep_doctor_server(struct ep_report *report, struct ep_admin *admin);

#endif
