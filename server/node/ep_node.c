#include "ep_node.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "attach_frame.h"
#include "ep_clock.h"
#include "ep_log.h"
#include "nccl.h"
#include "node_private.h"
#include "window.h"

#define NCCL_START_MS 60000u /* it loads some hundred MB onto each GPU */

/* ---- inventory --------------------------------------------------------------- */

/* The value of "key: N kB" in /proc/meminfo, in bytes; 0 when it is not there. */
static uint64_t meminfo(const char *key)
{
    char line[128];
    uint64_t kib = 0;
    size_t n = strlen(key);
    FILE *file = fopen("/proc/meminfo", "re");

    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, n) && line[n] == ':') {
            kib = strtoull(line + n + 1, NULL, 10);
            break;
        }
    fclose(file);
    return kib * 1024;
}

/* What a container's limit leaves: memory.max is "max" where there is none. */
static uint64_t cgroup_limit(void)
{
    uint64_t limit = UINT64_MAX;
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");

    if (!file)
        return limit;
    if (fscanf(file, "%" SCNu64, &limit) != 1)
        limit = UINT64_MAX;
    fclose(file);
    return limit;
}

static uint64_t memory_at_start(void)
{
    uint64_t available = meminfo("MemAvailable");
    uint64_t limit = cgroup_limit();

    return available < limit ? available : limit;
}

static uint32_t count_cpus(void)
{
    cpu_set_t set;
    long n;

    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (uint32_t)CPU_COUNT(&set);
    n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

static char *host_name(void)
{
    char name[256] = "";

    if (gethostname(name, sizeof name - 1) != 0 || !*name)
        return strdup("localhost");
    return strdup(name);
}

static char *kernel_text(void)
{
    struct utsname u;
    char *text = NULL;

    if (uname(&u) != 0 || asprintf(&text, "%s %s %s", u.sysname, u.release, u.machine) < 0)
        return NULL;
    return text;
}

/* ---- life -------------------------------------------------------------------- */

static ep_status make_devices(struct ep_node *node, uint32_t n, struct ep_error *error)
{
    if (n < 1 || n > EP_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "host_devices is %u: must be 1..%d", n, EP_MAX_RANKS);
    node->devices = calloc(n, sizeof *node->devices);
    if (!node->devices)
        return ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
    node->n_devices = n;
    for (uint32_t i = 0; i < n; i++)
        snprintf(node->devices[i].name, sizeof node->devices[i].name, "host%u", i);
    return EP_OK;
}

static void set_host_budget(struct ep_node *node, uint64_t asked)
{
    uint64_t memory = memory_at_start();

    node->budget = asked ? asked : memory / 2;
    if (asked > memory)
        EP_WARN("node", "the memory budget is more than the memory that is free",
                EP_U("budget_bytes", node->budget), EP_U("free_bytes", memory));
}

static ep_status start_nccl(const struct ep_node *node, struct ep_error *why)
{
    uint32_t *ordinals = calloc(node->n_devices, sizeof *ordinals);
    ep_status status;

    if (!ordinals)
        return ep_error_set(why, EP_NO_MEMORY, "node: out of memory");
    for (uint32_t i = 0; i < node->n_devices; i++)
        ordinals[i] = node->devices[i].ordinal;
    status = nccl_start(node->cuda, ordinals, node->n_devices, NCCL_START_MS, why);
    free(ordinals);
    return status;
}

/* A node without it has groups of its own. */
static ep_status open_nccl(struct ep_node *node, bool start, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;

    node->nccl_version = nccl_describe(node->cuda, &node->nccl);
    if (node->nccl_version && start && start_nccl(node, &why)) {
        EP_WARN("node", "NCCL does not start: no group over several nodes has a rank here", EP_S("error", why.text));
        node->nccl_version = 0;
        free(node->nccl);
        if (asprintf(&node->nccl, "not to be used: it does not start: %s", why.text) < 0)
            node->nccl = NULL;
    }
    return node->nccl ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
}

static ep_status fill(struct ep_node *node, const struct ep_node_options *options, struct ep_error *error)
{
    ep_status status;

    node->name = options->name && *options->name ? strdup(options->name) : host_name();
    node->socket = strdup(options->socket ? options->socket : "");
    node->admin_address = strdup(options->admin_address ? options->admin_address : "");
    node->kernel = kernel_text();
    node->reason = strdup("");
    if (!node->name || !node->socket || !node->admin_address || !node->kernel || !node->reason)
        return ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
    node->cpus = count_cpus();
    node->polls = options->polls;
    node->sms_per_rank = options->sms_per_rank ? options->sms_per_rank : UINT32_MAX;
    node->region_bytes = options->region_bytes;
    node->silence_ms = options->silence_ms ? options->silence_ms : UINT32_MAX;
    node->started_us = ep_clock_wall_us();
    status = ep_node_choose_backend(node, options, error);
    if (status)
        return status;
    if (node->cuda)
        return open_nccl(node, options->several, error);
    node->nccl = strdup("");
    if (!node->nccl)
        return ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
    set_host_budget(node, options->memory_budget);
    return make_devices(node, options->host_devices, error);
}

ep_status ep_node_open(const struct ep_node_options *options, struct ep_node **out, struct ep_error *error)
{
    struct ep_node *node;
    ep_status status;

    node = calloc(1, sizeof *node);
    if (!node)
        return ep_error_set(error, EP_NO_MEMORY, "node: out of memory");
    pthread_mutex_init(&node->windows_mutex, NULL);
    status = fill(node, options, error);
    if (status) {
        ep_node_close(node);
        return status;
    }
    *out = node;
    return EP_OK;
}

void ep_node_close(struct ep_node *node)
{
    if (node->cuda)
        node->cuda->on_lost(NULL, NULL);
    free(node->devices);
    free(node->left);
    free(node->name);
    free(node->socket);
    free(node->admin_address);
    free(node->kernel);
    free(node->nccl);
    free(node->reason);
    pthread_mutex_destroy(&node->windows_mutex);
    free(node);
}

const char *ep_node_name(const struct ep_node *node)
{
    return node->name;
}

uint64_t ep_node_boot(const struct ep_node *node)
{
    return node->started_us;
}

Ep__V1__Backend ep_node_backend(const struct ep_node *node)
{
    return node->cuda ? EP__V1__BACKEND__BACKEND_CUDA : EP__V1__BACKEND__BACKEND_HOST;
}

uint32_t ep_node_devices(const struct ep_node *node)
{
    return node->n_devices;
}

const char *ep_node_device_name(const struct ep_node *node, uint32_t device)
{
    return device < node->n_devices ? node->devices[device].name : "?";
}

const uint8_t *ep_node_device_uuid(const struct ep_node *node, uint32_t device)
{
    return node->cuda && device < node->n_devices ? node->devices[device].gpu.uuid : NULL;
}

uint32_t ep_node_nccl(const struct ep_node *node, const char **text)
{
    *text = node->nccl;
    return node->nccl_version;
}

bool ep_node_device_mps(const struct ep_node *node, uint32_t device)
{
    return node->cuda && device < node->n_devices && node->devices[device].gpu.mps;
}

bool ep_node_device_polls(const struct ep_node *node, uint32_t device)
{
    return node->polls && ep_node_device_mps(node, device);
}

uint32_t ep_node_sms(const struct ep_node *node, uint32_t device)
{
    return node->cuda && device < node->n_devices ? node->devices[device].gpu.sms : 0;
}

uint32_t ep_node_sms_per_rank(const struct ep_node *node)
{
    return node->sms_per_rank;
}

/* ---- cordon ------------------------------------------------------------------ */

void ep_node_cordon(struct ep_node *node, bool cordoned, const char *reason)
{
    char *copy = strdup(cordoned && reason ? reason : "");

    node->cordoned = cordoned;
    if (!copy)
        return; /* cordoned all the same, with the old reason */
    free(node->reason);
    node->reason = copy;
}

bool ep_node_cordoned(const struct ep_node *node, const char **reason)
{
    if (reason)
        *reason = node->stopping ? "the server is stopping" : node->reason;
    return node->cordoned || node->stopping;
}

void ep_node_set_stopping(struct ep_node *node)
{
    node->stopping = true;
}

void ep_node_set_admin_address(struct ep_node *node, const char *address)
{
    char *copy = strdup(address);

    if (!copy)
        return; /* the one that was asked for is shown */
    free(node->admin_address);
    node->admin_address = copy;
}

/* ---- memory ------------------------------------------------------------------ */

static ep_status refuse_memory(struct ep_node *node, uint32_t device, uint64_t bytes, uint64_t left,
                               struct ep_error *error)
{
    const struct device *gpu = node->cuda ? &node->devices[device] : NULL;
    char owners[160];

    ep_node_describe_owners(node, gpu ? (int64_t)device : -1, owners, sizeof owners);
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%s asked, %s left of %s on %s%snode %s%s%s",
                        ep_bytes_text(bytes).text, ep_bytes_text(left).text,
                        ep_bytes_text(gpu ? gpu->budget : node->budget).text, gpu ? gpu->name : "",
                        gpu ? " of " : "", node->name, *owners ? "; in use: " : "", owners);
}

ep_status ep_node_reserve(struct ep_node *node, uint32_t device, uint64_t bytes, struct ep_error *error)
{
    uint64_t left;

    if (device >= node->n_devices)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "device is %u: node %s has %u", device, node->name,
                            node->n_devices);
    left = node->left ? node->left[device] : ep_node_memory_left(node);
    if (bytes > left)
        return refuse_memory(node, device, bytes, left, error);
    node->used += bytes;
    node->devices[device].used += bytes;
    if (node->left)
        node->left[device] -= bytes;
    return EP_OK;
}

void ep_node_release(struct ep_node *node, uint32_t device, uint64_t bytes)
{
    node->used -= bytes;
    node->devices[device].used -= bytes;
    if (node->left)
        node->left[device] += bytes;
}

uint64_t ep_node_memory_left(const struct ep_node *node)
{
    return node->used < node->budget ? node->budget - node->used : 0;
}

const uint64_t *ep_node_device_memory_left(const struct ep_node *node)
{
    return node->left;
}

uint64_t ep_node_device_memory_used(const struct ep_node *node, uint32_t device)
{
    return node->devices[device].used;
}

uint64_t ep_node_granule(const struct ep_node *node)
{
    return node->cuda ? 2ull << 20 : 1; /* of VMM allocations, on every GPU that has them */
}

/* ---- info -------------------------------------------------------------------- */

static char *own(const char *text)
{
    char *copy = strdup(text ? text : "");

    if (!copy)
        abort();
    return copy;
}

static void *zeroed(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);

    if (!memory)
        abort();
    return memory;
}

const char *ep_node_version(void)
{
    return EP_VERSION;
}

static Ep__V1__Version *version_info(const struct ep_node *node)
{
    Ep__V1__Version *version = zeroed(1, sizeof *version);

    ep__v1__version__init(version);
    version->version = own(EP_VERSION);
    version->commit = own(EP_COMMIT);
    version->backends = zeroed(2, sizeof *version->backends);
    version->backends[version->n_backends++] = own("host");
    if (node->cuda)
        version->backends[version->n_backends++] = own("cuda");
    version->window_version = EP_WINDOW_VERSION;
    version->attach_version = EP_ATTACH_VERSION;
    return version;
}

/* Either backend has all of them. */
static void fill_offer(const struct ep_node *node, Ep__V1__NodeInfo *info)
{
    static const Ep__V1__Mode modes[] = { EP__V1__MODE__MODE_LL, EP__V1__MODE__MODE_HT };
    static const Ep__V1__Dtype dtypes[] = { EP__V1__DTYPE__DTYPE_BF16, EP__V1__DTYPE__DTYPE_FP16,
                                            EP__V1__DTYPE__DTYPE_FP32, EP__V1__DTYPE__DTYPE_FP8_E4M3 };

    info->n_modes = sizeof modes / sizeof *modes;
    info->modes = memcpy(zeroed(1, sizeof modes), modes, sizeof modes);
    info->n_dtypes = sizeof dtypes / sizeof *dtypes;
    info->dtypes = memcpy(zeroed(1, sizeof dtypes), dtypes, sizeof dtypes);
    info->granule = ep_node_granule(node);
}

uint64_t ep_node_device_apart(const struct ep_node *node, uint32_t device)
{
    uint64_t apart = 0;

    for (uint32_t i = 0; node->cuda && i < node->n_devices && i < 64; i++)
        if (!ep_node_gpus_reach(node, device, i))
            apart |= 1ull << i;
    return apart;
}

static void fill_apart(const struct ep_node *node, uint32_t number, Ep__V1__Device *device)
{
    const uint64_t apart = ep_node_device_apart(node, number);

    device->apart = zeroed(64, sizeof *device->apart);
    for (uint32_t i = 0; i < 64; i++)
        if (apart >> i & 1)
            device->apart[device->n_apart++] = i;
}

static Ep__V1__Device *device_info(const struct ep_node *node, uint32_t number)
{
    Ep__V1__Device *device = zeroed(1, sizeof *device);
    const struct device *from = &node->devices[number];

    ep__v1__device__init(device);
    device->name = own(from->name);
    device->backend = ep_node_backend(node);
    device->memory_bytes = node->cuda ? from->budget : node->budget; /* host devices share the node's memory */
    device->used_bytes = from->used;
    device->sms = ep_node_sms(node, number);
    if (node->cuda)
        ep_node_fill_links(&from->links, device);
    fill_apart(node, number, device);
    device->detail = node->cuda ? ep_node_gpu_detail(node, number) : own("CPU threads and shared memory");
    if (!device->detail)
        abort();
    return device;
}

void ep_node_info(const struct ep_node *node, Ep__V1__NodeInfo *info)
{
    ep__v1__node_info__init(info);
    info->name = own(node->name);
    info->state = node->stopping   ? EP__V1__NODE_STATE__NODE_STATE_STOPPING
                  : node->cordoned ? EP__V1__NODE_STATE__NODE_STATE_CORDONED
                                   : EP__V1__NODE_STATE__NODE_STATE_READY;
    info->reason = own(node->stopping ? "the server is stopping" : node->reason);
    info->version = version_info(node);
    info->devices = zeroed(node->n_devices, sizeof *info->devices);
    info->n_devices = node->n_devices;
    for (uint32_t i = 0; i < node->n_devices; i++)
        info->devices[i] = device_info(node, i);
    info->memory_budget_bytes = node->budget;
    info->memory_used_bytes = node->used;
    info->started_us = node->started_us;
    info->kernel = own(node->kernel);
    info->nccl = own(node->nccl);
    info->nccl_version = node->nccl_version;
    info->cpus = node->cpus;
    info->pid = getpid();
    info->admin_address = own(node->admin_address);
    info->socket = own(node->socket);
    info->store_error = own("");
    info->unreachable = own("");
    fill_offer(node, info);
}

void ep_node_info_clear(Ep__V1__NodeInfo *info)
{
    protobuf_c_message_free_unpacked(&info->version->base, NULL);
    for (size_t i = 0; i < info->n_devices; i++)
        protobuf_c_message_free_unpacked(&info->devices[i]->base, NULL);
    free(info->devices);
    free(info->name);
    free(info->reason);
    free(info->kernel);
    free(info->nccl);
    free(info->admin_address);
    free(info->socket);
    free(info->store_error);
    free(info->unreachable);
    free(info->modes);
    free(info->dtypes);
    ep__v1__node_info__init(info);
}
