/*
 * What groups take of each node: memory for windows, multiprocessors, attachments.
 *
 * Each node tells it in its report of the group, which is written anyway when an epoch begins or ends there, or a worker
 * comes or goes.  A node's registration has only what no group tells, mostly nothing: else it would have to be written,
 * and be heard by all, once more for each node each time.  What a change takes before it is over, who leads adds of its
 * own knowledge.
 */
#include <stdlib.h>
#include <string.h>

#include "group_private.h"

/* ---- here ---------------------------------------------------------------------------- */

void share_open(struct group *group)
{
    const uint32_t n = ep_node_devices(group->groups->node);

    group->reserved = group_allocate(n, sizeof *group->reserved);
    group->told = group_allocate(n, sizeof *group->told);
}

void share_close(struct group *group)
{
    free(group->reserved);
    free(group->told);
}

ep_status share_reserve(struct group *group, uint32_t device, uint64_t bytes, struct ep_error *error)
{
    const ep_status status = ep_node_reserve(group->groups->node, device, bytes, error);

    if (!status)
        group->reserved[device] += bytes;
    return status;
}

void share_release(struct group *group, uint32_t device, uint64_t bytes)
{
    ep_node_release(group->groups->node, device, bytes);
    group->reserved[device] -= bytes;
}

/* Of a part that is not decided yet nothing is told: mostly that comes with the epoch. */
static uint64_t to_tell(const struct group *group, uint32_t device)
{
    return group->reserved[device] - (group->prepared ? epoch_reserved(group->prepared, device) : 0);
}

bool share_is_news(const struct group *group)
{
    for (uint32_t d = 0; d < ep_node_devices(group->groups->node); d++)
        if (to_tell(group, d) != group->told[d])
            return true;
    return false;
}

void share_note(struct group *group)
{
    for (uint32_t d = 0; d < ep_node_devices(group->groups->node); d++)
        group->told[d] = to_tell(group, d);
}

void share_report(struct arena *arena, const struct group *group, Ep__V1__GroupStatus *report)
{
    const uint32_t n = ep_node_devices(group->groups->node);

    report->attachments = group_attachments(group);
    report->reserved = arena_alloc(arena, n * sizeof *report->reserved + 1);
    report->sms = arena_alloc(arena, n * sizeof *report->sms + 1);
    for (uint32_t d = 0; d < n; d++) {
        report->reserved[d] = to_tell(group, d);
        report->sms[d] = executor_sms(group, d);
        if (report->reserved[d])
            report->n_reserved = d + 1;
        if (report->sms[d])
            report->n_sms = d + 1;
    }
}

static void take_off(uint64_t *from, uint64_t bytes)
{
    *from -= bytes < *from ? bytes : *from;
}

void ep_groups_untell(const struct ep_groups *groups, Ep__V1__NodeInfo *info)
{
    for (size_t i = 0; i < groups->n; i++)
        for (size_t d = 0; d < info->n_devices; d++) {
            take_off(&info->devices[d]->used_bytes, groups->list[i]->reserved[d]);
            take_off(&info->memory_used_bytes, groups->list[i]->reserved[d]);
        }
}

/* ---- elsewhere ------------------------------------------------------------------------ */

/* What the change takes of the node's device. */
static uint64_t planned(const struct change *change, uint32_t node, const char *device)
{
    const struct ep_plan *plan = &change->plan;
    uint64_t bytes = 0;
    bool first = true; /* its device has what reaches the other nodes */

    for (uint32_t r = 0; r < plan->n_ranks; r++) {
        if (plan->node[r] != node)
            continue;
        if (!strcmp(plan->device[r], device))
            bytes += change->rank_bytes + (first ? change->node_bytes : 0);
        first = false;
    }
    return bytes;
}

static void add_under_way(const struct group *group, const char *name, const Ep__V1__NodeInfo *of, uint64_t *device)
{
    const struct change *change = group->change;
    const struct report *report = report_of(group, name);
    uint32_t node;

    if (!change || !change->plan.n_nodes || (report && report->epoch >= change->status->epoch))
        return;
    node = ep_plan_find(&change->plan, name);
    for (size_t d = 0; node < change->plan.n_nodes && d < of->n_devices; d++)
        device[d] += planned(change, node, of->devices[d]->name);
}

static void add_reported(const struct group *group, const char *name, const Ep__V1__NodeInfo *of, uint64_t *device)
{
    const struct report *report = report_of(group, name);

    for (size_t d = 0; report && d < of->n_devices && d < report->status->n_reserved; d++)
        device[d] += report->status->reserved[d];
}

struct share_told share_told(const struct ep_groups *groups, const struct group *but, const Ep__V1__NodeInfo *of,
                             const char *node)
{
    struct share_told told = { .device = group_allocate(of->n_devices, sizeof *told.device) };

    for (size_t i = 0; i < groups->n; i++) {
        add_reported(groups->list[i], node, of, told.device);
        if (groups->list[i] != but)
            add_under_way(groups->list[i], node, of, told.device);
    }
    for (size_t d = 0; d < of->n_devices; d++)
        told.all += told.device[d];
    return told;
}

/* ---- what operators see ----------------------------------------------------------------- */

static bool has_rank_on(const struct epoch *epoch, uint32_t node, const char *device)
{
    const struct ranks there = epoch_ranks_of(epoch, node);

    for (uint32_t i = 0; i < there.n; i++)
        if (!strcmp(epoch->plan.device[there.number[i]], device))
            return true;
    return false;
}

/* A group counts once on a device, however many of its ranks are there. */
static void count_groups(const struct ep_groups *groups, const char *name, Ep__V1__NodeInfo *info)
{
    for (size_t i = 0; i < groups->n; i++) {
        const struct epoch *epoch = group_is_listed(groups->list[i]) ? groups->list[i]->epoch : NULL;
        const uint32_t node = epoch ? ep_plan_find(&epoch->plan, name) : 0;

        for (size_t d = 0; epoch && node < epoch->plan.n_nodes && d < info->n_devices; d++)
            info->devices[d]->groups += has_rank_on(epoch, node, info->devices[d]->name);
    }
}

void ep_groups_describe_own(const struct ep_groups *groups, Ep__V1__NodeInfo *info)
{
    info->attachments = ep_groups_attachments(groups);
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->sms_held = ep_groups_sms(groups, (uint32_t)d);
    count_groups(groups, nodes_self(groups), info);
}

static void add_workers(const Ep__V1__GroupStatus *report, Ep__V1__NodeInfo *info)
{
    info->attachments += report->attachments;
    for (size_t d = 0; d < info->n_devices && d < report->n_sms; d++)
        info->devices[d]->sms_held += report->sms[d];
}

void ep_groups_describe_other(const struct ep_groups *groups, const char *node, Ep__V1__NodeInfo *info)
{
    struct share_told told = share_told(groups, NULL, info, node);

    info->memory_used_bytes += told.all;
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->used_bytes += told.device[d];
    free(told.device);
    for (size_t i = 0; i < groups->n; i++) {
        const struct report *report = report_of(groups->list[i], node);

        if (report)
            add_workers(report->status, info);
    }
    count_groups(groups, node, info);
}
