/*
 * ep_nvml: what the driver's management library knows of GPUs, and CUDA does not tell: their NVLinks, which of them reach
 * each other over NVLink, and how far the fabric manager is, without which GPUs behind NVSwitches cannot be used.
 *
 * NVML comes with the driver and is looked up at run time, here and nowhere else.  Any of its functions may be missing
 * in an old one; what it does not tell is not known, which is never the same as none.
 *
 * NVML counts all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says: one that CUDA has found is looked for by name.
 */
#ifndef EP_NVML_H
#define EP_NVML_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"

struct ep_nvml_gpu; /* NVML's; good until ep_nvml_close() */

/* A GPU's registration with the fabric manager. */
enum ep_nvml_fabric {
    EP_NVML_FABRIC_UNKNOWN,
    EP_NVML_FABRIC_NONE,        /* it needs none */
    EP_NVML_FABRIC_NOT_STARTED, /* CUDA fails with 802 there, */
    EP_NVML_FABRIC_IN_PROGRESS, /* and there */
    EP_NVML_FABRIC_COMPLETED,
    EP_NVML_FABRIC_FAILED, /* completed, and not well */
    EP_NVML_FABRICS
};

/* What carries loads and stores of one GPU to another, if they reach it. */
enum ep_nvml_way { EP_NVML_WAY_UNKNOWN, EP_NVML_WAY_NVLINK, EP_NVML_WAY_PCIE };

/* Starts NVML.  EP_NOT_FOUND: it is not here, or far too old; EP_UNAVAILABLE: it does not start, and why. */
ep_status ep_nvml_open(struct ep_error *error);
void ep_nvml_close(void); /* as often as it was opened */

/* Between open and close, any thread.  GPUs of the machine; 0 too if NVML does not say. */
uint32_t ep_nvml_count(void);
struct ep_nvml_gpu *ep_nvml_at(uint32_t index); /* NULL: it does not answer */
/* As CUDA has it: "GPU-01234567-...", "0000:1b:00.0".  NULL: NVML knows none of that name. */
struct ep_nvml_gpu *ep_nvml_find(const char *uuid, const char *pci);

/* Of NULL nothing is known.  links: NVLinks that are up; false: not known. */
bool ep_nvml_links(struct ep_nvml_gpu *gpu, uint32_t *links);
enum ep_nvml_way ep_nvml_way(struct ep_nvml_gpu *from, struct ep_nvml_gpu *to);
/* failure (may be NULL): for FAILED, why, in NVML's words. */
enum ep_nvml_fabric ep_nvml_fabric(struct ep_nvml_gpu *gpu, const char **failure);

#endif
