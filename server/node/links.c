/*
 * How the GPUs of a node reach each other.  That they do is the driver's word, by which groups are placed, and whether over
 * NVLink, which kernels are told.  What operators read of that, through how many links, and what the fabric manager has made
 * of them, is NVML's.  It is looked at once, when the server starts.
 */
#include <stdio.h>
#include <stdlib.h>

#include "ep_log.h"
#include "node_private.h"

/* ---- the driver's word ----------------------------------------------------------- */

/* devices: a bit for each, of `from`'s. */
static bool has(uint64_t devices, const struct device *from, const struct device *to)
{
    return from == to || (to->ordinal < 64 && devices >> to->ordinal & 1);
}

bool ep_node_gpus_reach(const struct ep_node *node, uint32_t a, uint32_t b)
{
    const struct device *x = &node->devices[a], *y = &node->devices[b];

    return has(x->gpu.peers, x, y) && has(y->gpu.peers, y, x);
}

bool ep_node_gpus_linked(const struct ep_node *node, uint32_t a, uint32_t b)
{
    const struct device *x = &node->devices[a], *y = &node->devices[b];

    return has(x->gpu.linked, x, y) && has(y->gpu.linked, y, x);
}

/* ---- looking ----------------------------------------------------------------- */

static void count_peers(struct ep_node *node)
{
    for (uint32_t a = 0; a < node->n_devices; a++)
        for (uint32_t b = 0; b < node->n_devices; b++)
            node->devices[a].links.peers += b != a && ep_node_gpus_reach(node, a, b);
}

/* By how NVML calls them; false where it does not say of one of them. */
static bool count_ways(const struct ep_node *node, struct ep_nvml_gpu *const *gpus, uint32_t device,
                       struct links *links)
{
    uint32_t n[] = { [EP_NVML_WAY_UNKNOWN] = 0, [EP_NVML_WAY_NVLINK] = 0, [EP_NVML_WAY_PCIE] = 0 };

    for (uint32_t i = 0; i < node->n_devices; i++)
        if (i != device && ep_node_gpus_reach(node, device, i))
            n[ep_nvml_way(gpus[device], gpus[i])]++;
    links->over_nvlink = n[EP_NVML_WAY_NVLINK];
    links->over_pcie = n[EP_NVML_WAY_PCIE];
    return gpus[device] && n[EP_NVML_WAY_UNKNOWN] == 0;
}

static void tell_failure(const struct device *device, enum ep_nvml_fabric fabric, const char *why)
{
    if (fabric == EP_NVML_FABRIC_FAILED)
        EP_WARN("node", "the fabric manager has failed with a GPU", EP_S("gpu", device->name),
                EP_S("why", why));
    else if (fabric == EP_NVML_FABRIC_NOT_STARTED || fabric == EP_NVML_FABRIC_IN_PROGRESS)
        EP_WARN("node", "the fabric manager is not done with a GPU", EP_S("gpu", device->name));
}

static void ask_nvml(struct ep_node *node, struct ep_nvml_gpu **gpus)
{
    for (uint32_t i = 0; i < node->n_devices; i++)
        gpus[i] = ep_nvml_find(node->devices[i].gpu.uuid_text, node->devices[i].gpu.pci);
    for (uint32_t i = 0; i < node->n_devices; i++) {
        struct links *links = &node->devices[i].links;
        const char *why = "";

        links->has_nvlinks = ep_nvml_links(gpus[i], &links->nvlinks);
        links->has_ways = count_ways(node, gpus, i, links);
        links->fabric = ep_nvml_fabric(gpus[i], &why);
        tell_failure(&node->devices[i], links->fabric, why);
    }
}

void ep_node_look_at_links(struct ep_node *node)
{
    struct ep_nvml_gpu **gpus = calloc(node->n_devices, sizeof *gpus);
    struct ep_error why = EP_ERROR_INIT;

    count_peers(node);
    if (gpus && ep_nvml_open(&why) == EP_OK) {
        ask_nvml(node, gpus);
        ep_nvml_close();
    } else {
        EP_INFO("node", "NVLinks and the state of the fabric manager are not known",
                EP_S("why", gpus ? why.text : "out of memory"));
    }
    free(gpus);
}

/* ---- telling ----------------------------------------------------------------- */

struct ep_links_text ep_node_nvlinks_text(const struct links *links)
{
    struct ep_links_text text = { "not known" };

    if (links->has_nvlinks)
        snprintf(text.text, sizeof text.text, "%u", links->nvlinks);
    return text;
}

struct ep_links_text ep_node_reach_text(const struct ep_node *node, uint32_t device)
{
    const struct links *links = &node->devices[device].links;
    struct ep_links_text text;
    int n = snprintf(text.text, sizeof text.text, "%u of %u other GPUs", links->peers, node->n_devices - 1);
    char *end = text.text + n;
    const size_t left = sizeof text.text - (size_t)n;

    if (links->peers == 0)
        return text;
    if (!links->has_ways)
        snprintf(end, left, ", over NVLink or PCIe is not known");
    else if (links->over_pcie == 0)
        snprintf(end, left, " over NVLink");
    else if (links->over_nvlink == 0)
        snprintf(end, left, " over PCIe");
    else
        snprintf(end, left, ", %u over NVLink and %u over PCIe", links->over_nvlink, links->over_pcie);
    return text;
}

const char *ep_node_fabric_text(const struct links *links)
{
    switch (links->fabric) {
    case EP_NVML_FABRIC_NONE: return "none";
    case EP_NVML_FABRIC_NOT_STARTED: return "not started";
    case EP_NVML_FABRIC_IN_PROGRESS: return "in progress";
    case EP_NVML_FABRIC_COMPLETED: return "completed";
    case EP_NVML_FABRIC_FAILED: return "failed";
    default: return "not known";
    }
}

void ep_node_fill_links(const struct links *links, Ep__V1__Device *device)
{
    static const Ep__V1__FabricState states[EP_NVML_FABRICS] = {
        [EP_NVML_FABRIC_UNKNOWN] = EP__V1__FABRIC_STATE__FABRIC_STATE_UNSPECIFIED,
        [EP_NVML_FABRIC_NONE] = EP__V1__FABRIC_STATE__FABRIC_STATE_NONE,
        [EP_NVML_FABRIC_NOT_STARTED] = EP__V1__FABRIC_STATE__FABRIC_STATE_NOT_STARTED,
        [EP_NVML_FABRIC_IN_PROGRESS] = EP__V1__FABRIC_STATE__FABRIC_STATE_IN_PROGRESS,
        [EP_NVML_FABRIC_COMPLETED] = EP__V1__FABRIC_STATE__FABRIC_STATE_COMPLETED,
        [EP_NVML_FABRIC_FAILED] = EP__V1__FABRIC_STATE__FABRIC_STATE_FAILED,
    };

    device->fabric = states[links->fabric];
    if (links->has_nvlinks) {
        device->_nvlinks_case = EP__V1__DEVICE___NVLINKS_NVLINKS;
        device->nvlinks = links->nvlinks;
    }
    if (links->has_ways) {
        device->_nvlink_peers_case = EP__V1__DEVICE___NVLINK_PEERS_NVLINK_PEERS;
        device->nvlink_peers = links->over_nvlink;
        device->_pcie_peers_case = EP__V1__DEVICE___PCIE_PEERS_PCIE_PEERS;
        device->pcie_peers = links->over_pcie;
    }
}
