/* The GPUs of a node: which there are, what can be done with them, and is MPS as the operator wants it. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "node_private.h"

/* ---- inventory --------------------------------------------------------------- */

static ep_status check_api(const struct ep_cuda_api *api, struct ep_error *error)
{
    if (api->version == EP_CUDA_API_VERSION)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "the cuda backend's interface is %u: this server uses %u",
                        api->version, EP_CUDA_API_VERSION);
}

static void take_gpu(struct ep_node *node, uint32_t ordinal, const struct ep_cuda_device *gpu)
{
    struct device *device = &node->devices[node->n_devices++];

    *device = (struct device){ .ordinal = ordinal, .gpu = *gpu };
    snprintf(device->name, sizeof device->name, "%s", gpu->uuid_text);
}

/* Numbers below n, each once, with commas between them.  *taken: those that are named; of no text, all. */
static ep_status read_gpus(const char *text, uint32_t n, uint64_t *taken, struct ep_error *error)
{
    const char *at = text;

    *taken = text && *text ? 0 : UINT64_MAX;
    while (at && *at) {
        char *end = NULL;
        const unsigned long i = *at >= '0' && *at <= '9' ? strtoul(at, &end, 10) : ULONG_MAX;

        if (i >= n || i >= 64 || *taken >> i & 1 || (*end && *end != ',') || (*end == ',' && !end[1]))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "gpus is \"%.80s\": must be numbers of GPUs that this process "
                                "sees, from 0 to %u, each once, such as \"0,1\"", text, n - 1);
        *taken |= 1ull << i;
        at = *end ? end + 1 : end;
    }
    return EP_OK;
}

/* Takes those whose memory workers can map; of the others the last one's name is kept. */
static ep_status look_at_all(struct ep_node *node, uint32_t n, uint64_t taken, struct ep_error *error)
{
    char unfit[160] = "";
    struct ep_cuda_device gpu;

    for (uint32_t i = 0; i < n; i++) {
        if (i < 64 && !(taken >> i & 1))
            continue;

        ep_status status = node->cuda->device_info(i, &gpu, error);

        if (status)
            return status;
        if (gpu.shareable) {
            take_gpu(node, i, &gpu);
            continue;
        }
        snprintf(unfit, sizeof unfit, "%s (%s)", gpu.uuid_text, gpu.name);
        EP_WARN("node", "a GPU is not used: its memory cannot be shared with workers",
                EP_S("gpu", gpu.uuid_text), EP_S("model", gpu.name));
    }
    if (!node->n_devices)
        return ep_error_set(error, EP_NOT_FOUND,
                            "of %u GPUs none has memory that can be shared with workers as a file "
                            "descriptor, as %s", n, unfit);
    return EP_OK;
}

static void drop_gpus(struct ep_node *node)
{
    free(node->devices);
    free(node->left);
    node->devices = NULL;
    node->left = NULL;
    node->n_devices = 0;
    node->cuda = NULL;
}

static ep_status find_gpus(struct ep_node *node, const char *gpus, struct ep_error *error)
{
    uint64_t taken;
    uint32_t n = 0;
    ep_status status = check_api(node->cuda, error);

    if (status || (status = node->cuda->device_count(&n, error)))
        return status;
    if (n == 0)
        return ep_error_set(error, EP_NOT_FOUND, "this process sees no GPU");
    status = read_gpus(gpus, n, &taken, error);
    if (status)
        return status;
    node->devices = calloc(n, sizeof *node->devices);
    node->left = calloc(n, sizeof *node->left);
    if (!node->devices || !node->left)
        return ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
    return look_at_all(node, n, taken, error);
}

/* ---- memory ------------------------------------------------------------------ */

static void set_budgets(struct ep_node *node, uint64_t asked)
{
    node->budget = 0;
    for (uint32_t i = 0; i < node->n_devices; i++) {
        struct device *device = &node->devices[i];

        device->budget = asked ? asked : device->gpu.memory_free / 2;
        if (asked > device->gpu.memory_free)
            EP_WARN("node", "the memory budget is more than the memory that is free",
                    EP_S("gpu", device->name), EP_U("budget_bytes", device->budget),
                    EP_U("free_bytes", device->gpu.memory_free));
        node->left[i] = device->budget;
        node->budget += device->budget;
    }
}

/* ---- MPS --------------------------------------------------------------------- */

/* The first GPU whose work does (or does not) go through an MPS server; NULL: none. */
static const struct device *gpu_with_mps(const struct ep_node *node, bool mps)
{
    for (uint32_t i = 0; i < node->n_devices; i++)
        if (node->devices[i].gpu.mps == mps)
            return &node->devices[i];
    return NULL;
}

static ep_status check_mps(const struct ep_node *node, enum ep_node_mps wanted, struct ep_error *error)
{
    const struct device *with = gpu_with_mps(node, true), *without = gpu_with_mps(node, false);

    if (wanted == EP_NODE_MPS_REQUIRE && !node->cuda)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "mps is require: this node's backend is host, which has no use for MPS");
    if (wanted == EP_NODE_MPS_REQUIRE && without)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "mps is require: there is no MPS server for %s; start one (nvidia-cuda-mps-control -d) "
                            "with the CUDA_MPS_PIPE_DIRECTORY of this server and its workers",
                            without->name);
    if (wanted == EP_NODE_MPS_OFF && with)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "mps is off: the work of this server on %s goes through an MPS server; stop that one, "
                            "or start this one with another CUDA_MPS_PIPE_DIRECTORY", with->name);
    return EP_OK;
}

/* What it means for the workers, whose processes share the GPUs with this one. */
static void tell_mps(const struct ep_node *node)
{
    if (gpu_with_mps(node, false))
        EP_INFO("node", "there is no MPS server: with executor server each op switches the GPU from the worker to "
                        "this process and back; with executor direct none does");
    else
        EP_INFO("node", "GPUs are used through an MPS server: kernels of workers and of this process run at once");
    if (node->polls && gpu_with_mps(node, false))
        EP_WARN("node", "doorbell is poll, which is for GPUs with an MPS server: for others it is wait");
}

/* ---- the backend --------------------------------------------------------------- */

static void tell_gpus(const struct ep_node *node)
{
    for (uint32_t i = 0; i < node->n_devices; i++) {
        const struct device *device = &node->devices[i];
        const struct ep_links_text reach = ep_node_reach_text(node, i);
        const struct ep_links_text nvlinks = ep_node_nvlinks_text(&device->links);

        EP_INFO("node", "GPU", EP_S("gpu", device->name), EP_S("model", device->gpu.name),
                EP_S("pci", device->gpu.pci), EP_U("memory_bytes", device->gpu.memory_bytes),
                EP_U("free_bytes", device->gpu.memory_free), EP_U("budget_bytes", device->budget),
                EP_B("mps", device->gpu.mps), EP_S("reaches", reach.text), EP_S("nvlinks", nvlinks.text),
                EP_S("fabric", ep_node_fabric_text(&device->links)));
    }
}

static ep_status open_cuda(struct ep_node *node, const struct ep_node_options *options, struct ep_error *error)
{
    ep_status status = EP_OK;

    node->cuda = options->cuda;
    if (!node->cuda) {
        ep_cuda_ask_for_queues();
        status = ep_cuda_open(&node->cuda, error);
    }
    if (!status)
        status = find_gpus(node, options->gpus, error);
    if (status)
        drop_gpus(node);
    else
        node->cuda->on_lost(options->on_lost, options->user);
    return status;
}

/* There might have been some. */
static void tell_unused(const struct ep_node_options *options)
{
    if (options->gpus && *options->gpus)
        EP_WARN("node", "gpus is set, and ranks run on the host's CPUs: it is of no use there");
    if (options->polls)
        EP_WARN("node", "doorbell is poll, and ranks run on the host's CPUs: it is of no use there");
    if (options->sms_per_rank)
        EP_WARN("node", "sms-per-rank is set, and ranks run on the host's CPUs: it is of no use there");
}

ep_status ep_node_choose_backend(struct ep_node *node, const struct ep_node_options *options,
                                 struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;

    if (options->backend == EP_NODE_HOST)
        return check_mps(node, options->mps, error);
    if (open_cuda(node, options, &why) == EP_OK) {
        set_budgets(node, options->memory_budget);
        ep_node_look_at_links(node);
        tell_gpus(node);
        tell_mps(node);
        return check_mps(node, options->mps, error);
    }
    if (why.status == EP_INVALID_ARGUMENT)
        return ep_error_set(error, why.status, "%s", why.text);
    if (options->backend == EP_NODE_CUDA)
        return ep_error_set(error, why.status == EP_NOT_FOUND ? EP_UNAVAILABLE : why.status, "backend is cuda: %.360s",
                            why.text);
    /* Not on CPUs, because GPUs cannot be used for a moment: groups would not find theirs again. */
    if (why.status != EP_NOT_FOUND)
        return ep_error_set(error, why.status, "backend is auto, and there are GPUs: %.280s (with gpus one can be left out, "
                            "with backend=host all of them)", why.text);
    EP_INFO("node", "ranks run on the host's CPUs", EP_S("why", why.text));
    tell_unused(options);
    return check_mps(node, options->mps, error);
}

/* ---- what is told of them -------------------------------------------------------- */

static const char *mps_text(const struct ep_node *node, uint32_t device)
{
    if (!ep_node_device_mps(node, device))
        return "no MPS";
    return ep_node_device_polls(node, device) ? "MPS, doorbells are polled" : "MPS";
}

char *ep_node_gpu_detail(const struct ep_node *node, uint32_t device)
{
    const struct ep_cuda_device *gpu = &node->devices[device].gpu;
    char *text = NULL;

    if (asprintf(&text, "%s, %.1f GiB, %u SMs, sm_%u%u, %s, reaches %s, %s", gpu->name,
                 (double)gpu->memory_bytes / (1ull << 30), gpu->sms, gpu->major, gpu->minor, gpu->pci,
                 ep_node_reach_text(node, device).text, mps_text(node, device)) < 0)
        return NULL;
    return text;
}
