/* The nodes that groups can be planned on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group_private.h"
#include "window.h"

const char *nodes_self(const struct ep_groups *groups)
{
    return ep_node_name(groups->node);
}

bool nodes_alive(const struct ep_groups *groups, const char *name)
{
    const struct ep_cluster_node *node = ep_cluster_find(groups->cluster, name);

    return node && node->alive;
}

static uint64_t left_of(uint64_t total, uint64_t used)
{
    return total > used ? total - used : 0;
}

static uint32_t bits_of(const int *values, size_t n)
{
    uint32_t bits = 0;

    for (size_t i = 0; i < n; i++)
        bits |= values[i] > 0 && values[i] < 32 ? 1u << values[i] : 0;
    return bits;
}

bool nodes_release_differs(const Ep__V1__Version *theirs, char *text, size_t size)
{
    const char *own = ep_node_version();

    if (theirs && !strcmp(theirs->version, own) && theirs->window_version == EP_WINDOW_VERSION)
        return false;
    snprintf(text, size, "release %.40s (windows %u), not %.40s (windows %u)", theirs ? theirs->version : "unknown",
             theirs ? theirs->window_version : 0, own, EP_WINDOW_VERSION);
    return true;
}

/* What it offers beside its devices. */
static void fill_offer(struct ep_plan_node *node, const Ep__V1__NodeInfo *info)
{
    char differs[128], text[160];

    node->has.granule = info->granule;
    node->modes = bits_of((const int *)info->modes, info->n_modes);
    node->dtypes = bits_of((const int *)info->dtypes, info->n_dtypes);
    node->nccl_version = info->nccl_version;
    node->nccl = info->nccl;
    if (!nodes_release_differs(info->version, differs, sizeof differs))
        return;
    snprintf(text, sizeof text, "is of %s as the leader", differs);
    node->release = group_copy(text);
}

static uint64_t apart_of(const Ep__V1__Device *device)
{
    uint64_t bits = 0;

    for (size_t i = 0; i < device->n_apart; i++)
        bits |= device->apart[i] < 64 ? 1ull << device->apart[i] : 0;
    return bits;
}

/* What it has of devices, as it and its reports said last; this node is asked itself. */
static void fill_told(struct ep_plan_node *node, const Ep__V1__NodeInfo *info, const struct share_told *told)
{
    const char **names = group_allocate(info->n_devices, sizeof *names);
    uint64_t *left = group_allocate(info->n_devices, sizeof *left), *used = group_allocate(info->n_devices, sizeof *used);
    uint64_t *apart = group_allocate(info->n_devices, sizeof *apart);

    for (size_t i = 0; i < info->n_devices; i++) {
        apart[i] = apart_of(info->devices[i]);
        names[i] = info->devices[i]->name;
        used[i] = info->devices[i]->used_bytes + told->device[i];
        left[i] = left_of(info->devices[i]->memory_bytes, used[i]);
        node->has.backend = info->devices[i]->backend;
    }
    node->device = names;
    node->apart = apart;
    node->device_used = used;
    node->has.devices = (uint32_t)info->n_devices;
    node->has.memory_left = left_of(info->memory_budget_bytes, info->memory_used_bytes + told->all);
    node->has.device_left = left;
}

static void fill_own(struct ep_plan_node *node, const struct ep_groups *groups)
{
    const uint32_t n = ep_node_devices(groups->node);
    const uint64_t *left = ep_node_device_memory_left(groups->node);
    const char **names = group_allocate(n, sizeof *names);
    uint64_t *copy = group_allocate(n, sizeof *copy), *used = group_allocate(n, sizeof *used);
    uint64_t *apart = group_allocate(n, sizeof *apart);

    for (uint32_t i = 0; i < n; i++) {
        apart[i] = ep_node_device_apart(groups->node, i);
        names[i] = ep_node_device_name(groups->node, i);
        copy[i] = left ? left[i] : 0;
        used[i] = ep_node_device_memory_used(groups->node, i);
    }
    node->device = names;
    node->apart = apart;
    node->device_used = used;
    node->nccl_version = ep_node_nccl(groups->node, &node->nccl);
    node->has.granule = ep_node_granule(groups->node);
    node->has.backend = ep_node_backend(groups->node);
    node->has.devices = n;
    node->has.memory_left = ep_node_memory_left(groups->node);
    node->has.device_left = copy;
}

/* Devices of the host share the node's memory. */
static void share_memory(struct ep_plan_node *node)
{
    if (node->has.backend == EP__V1__BACKEND__BACKEND_CUDA)
        return;
    free((void *)(uintptr_t)node->has.device_left);
    free((void *)(uintptr_t)node->device_used);
    node->has.device_left = NULL;
    node->device_used = NULL;
}

static void fill_other(struct ep_plan_node *node, const struct ep_groups *groups, const struct group *group,
                       const Ep__V1__NodeInfo *info)
{
    struct share_told told = share_told(groups, group, info, node->has.node);

    fill_told(node, info, &told);
    fill_offer(node, info);
    free(told.device);
}

static void add(struct node_table *table, const struct ep_groups *groups, const struct group *group,
                const struct ep_cluster_node *from)
{
    const bool own = !strcmp(from->name, nodes_self(groups));
    const Ep__V1__NodeInfo *info = from->alive && !own ? ep_cluster_info(groups->cluster, from) : NULL;
    struct ep_plan_node *node = &table->nodes[table->n];

    if (!from->alive || (!own && (!info || !info->n_devices)))
        return;
    node->has.node = from->name;
    node->cordoned = own ? ep_node_cordoned(groups->node, NULL) : from->cordoned;
    if (own)
        fill_own(node, groups);
    else
        fill_other(node, groups, group, info);
    share_memory(node);
    table->n++;
}

struct node_table nodes_table(const struct ep_groups *groups, const struct group *group)
{
    const size_t n = ep_cluster_count(groups->cluster);
    struct node_table table = { .nodes = group_allocate(n, sizeof *table.nodes) };

    for (size_t i = 0; i < n; i++)
        add(&table, groups, group, ep_cluster_at(groups->cluster, i));
    return table;
}

struct node_table nodes_own(const struct ep_groups *groups)
{
    const struct ep_cluster_node *own = ep_cluster_find(groups->cluster, nodes_self(groups));
    struct node_table table = { .nodes = group_allocate(1, sizeof *table.nodes) };

    if (own)
        add(&table, groups, NULL, own);
    return table;
}

void nodes_clear(struct node_table *table)
{
    for (size_t i = 0; i < table->n; i++) {
        free((void *)(uintptr_t)table->nodes[i].device);
        free((void *)(uintptr_t)table->nodes[i].has.device_left);
        free((void *)(uintptr_t)table->nodes[i].apart);
        free((void *)(uintptr_t)table->nodes[i].device_used);
        free((void *)(uintptr_t)table->nodes[i].release);
    }
    free(table->nodes);
    *table = (struct node_table){ 0 };
}
