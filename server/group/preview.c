/* What a change would do: where ranks and experts would be, what memory that takes.  Answers to dry runs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "balance.h"
#include "group_private.h"

struct preview {
    struct arena *arena;
    const struct group *group;
    const struct epoch *present; /* NULL: the group is new */
    const struct ep_settled *settled;
    const struct ep_plan *plan;
    bool new_epoch;
    const uint64_t *loads; /* of each expert; NULL: not given */
    Ep__V1__Plan *out;
};

static const char *node_of(const struct ep_plan *plan, uint32_t rank)
{
    return plan->name[plan->node[rank]];
}

/* ---- ranks ------------------------------------------------------------------------------- */

static double *load_of_ranks(const struct preview *p, const struct ep_settled *settled)
{
    double *loads = group_allocate(settled->placement.ranks, sizeof *loads);

    if (p->loads && settled->placement.experts == p->settled->placement.experts)
        ep_balance_ranks(&settled->placement, p->loads, loads);
    return loads;
}

static void list_experts(const struct preview *p)
{
    const struct ep_placement *placement = &p->settled->placement;

    for (uint32_t r = 0; r < placement->ranks; r++)
        p->out->ranks[r]->experts =
            arena_alloc(p->arena, placement->local_experts[r] * sizeof *p->out->ranks[r]->experts + 1);
    for (uint32_t e = 0; e < placement->experts; e++)
        for (uint32_t i = placement->first[e]; i < placement->first[e + 1]; i++) {
            Ep__V1__RankPlan *rank = p->out->ranks[placement->rank[i]];

            rank->experts[rank->n_experts++] = e;
        }
}

static Ep__V1__RankPlan *rank_plan(const struct preview *p, uint32_t number)
{
    Ep__V1__RankPlan *rank = arena_alloc(p->arena, sizeof *rank);
    const struct epoch *was = p->present;

    ep__v1__rank_plan__init(rank);
    rank->rank = number;
    rank->node = arena_strdup(p->arena, node_of(p->plan, number));
    rank->device = arena_strdup(p->arena, p->plan->device[number]);
    if (was && number < was->plan.n_ranks) {
        rank->was_node = arena_strdup(p->arena, node_of(&was->plan, number));
        rank->was_device = arena_strdup(p->arena, was->plan.device[number]);
    }
    return rank;
}

/* A rank's load can be more than fits: counts of experts are of any size. */
static uint64_t whole(double load)
{
    return load < 0x1p64 ? (uint64_t)round(load) : UINT64_MAX;
}

static void fill_loads(const struct preview *p)
{
    double *now = load_of_ranks(p, p->settled), *was = p->present ? load_of_ranks(p, &p->present->settled) : NULL;

    for (uint32_t r = 0; r < p->plan->n_ranks; r++) {
        p->out->ranks[r]->load = whole(now[r]);
        if (p->present && r < p->present->plan.n_ranks)
            p->out->ranks[r]->was_load = whole(was[r]);
    }
    free(now);
    free(was);
}

static void fill_ranks(const struct preview *p)
{
    p->out->ranks = arena_alloc(p->arena, p->plan->n_ranks * sizeof *p->out->ranks + 1);
    p->out->n_ranks = p->plan->n_ranks;
    for (uint32_t r = 0; r < p->plan->n_ranks; r++)
        p->out->ranks[r] = rank_plan(p, r);
    list_experts(p);
    fill_loads(p);
}

/* ---- experts ------------------------------------------------------------------------------- */

static bool is_moved_rank(const struct preview *p, uint32_t rank)
{
    const struct ep_plan *was = &p->present->plan;

    return rank >= was->n_ranks || strcmp(node_of(was, rank), node_of(p->plan, rank)) != 0 ||
           strcmp(was->device[rank], p->plan->device[rank]) != 0;
}

static bool has_home(const struct ep_placement *placement, uint32_t expert, uint32_t rank)
{
    for (uint32_t i = placement->first[expert]; i < placement->first[expert + 1]; i++)
        if (placement->rank[i] == rank)
            return true;
    return false;
}

static bool is_moved_expert(const struct preview *p, uint32_t expert)
{
    const struct ep_placement *was = &p->present->settled.placement, *now = &p->settled->placement;

    if (expert >= was->experts ||
        was->first[expert + 1] - was->first[expert] != now->first[expert + 1] - now->first[expert])
        return true;
    for (uint32_t i = now->first[expert]; i < now->first[expert + 1]; i++)
        if (!has_home(was, expert, now->rank[i]) || is_moved_rank(p, now->rank[i]))
            return true;
    return false;
}

static void fill_moved(const struct preview *p)
{
    const uint32_t experts = p->settled->placement.experts;

    if (!p->present || !p->new_epoch)
        return;
    p->out->moved_experts = arena_alloc(p->arena, experts * sizeof *p->out->moved_experts + 1);
    for (uint32_t e = 0; e < experts; e++)
        if (is_moved_expert(p, e))
            p->out->moved_experts[p->out->n_moved_experts++] = e;
}

/* ---- devices -------------------------------------------------------------------------------- */

static bool is_shared(const struct ep_settled *settled)
{
    return settled->spec->backend != EP__V1__BACKEND__BACKEND_CUDA;
}

static Ep__V1__DevicePlan *device_plan(const struct preview *p, const char *node, const char *device)
{
    Ep__V1__DevicePlan *new;

    for (size_t i = 0; i < p->out->n_devices; i++)
        if (!strcmp(p->out->devices[i]->node, node) && !strcmp(p->out->devices[i]->device, device))
            return p->out->devices[i];
    new = arena_alloc(p->arena, sizeof *new);
    ep__v1__device_plan__init(new);
    new->node = arena_strdup(p->arena, node);
    new->device = arena_strdup(p->arena, device);
    p->out->devices[p->out->n_devices++] = new;
    return new;
}

/* The ranks of an epoch, and the way between its nodes: `after` counts what comes, `before` what goes. */
static void add_epoch(const struct preview *p, const struct ep_settled *settled, const struct ep_plan *plan, bool comes)
{
    const struct ep_team_beside beside = epoch_beside(settled, plan);
    bool *seen = group_allocate(plan->n_nodes, sizeof *seen);

    for (uint32_t r = 0; r < plan->n_ranks; r++) {
        Ep__V1__DevicePlan *device = device_plan(p, node_of(plan, r), is_shared(settled) ? "" : plan->device[r]);
        const uint64_t bytes = settled->rank_bytes + beside.rank + (seen[plan->node[r]] ? 0 : beside.node);

        seen[plan->node[r]] = true;
        *(comes ? &device->after : &device->before) += bytes;
    }
    free(seen);
}

static void set_used(Ep__V1__DevicePlan *device, uint64_t total, uint64_t used)
{
    const uint64_t goes = device->before, comes = device->after;

    device->total = total;
    device->before = used;
    device->beside = used + comes;
    device->after = device->beside > goes ? device->beside - goes : 0;
}

/* told: what groups have beside that; NULL: nothing. */
static void look_up(Ep__V1__DevicePlan *device, const Ep__V1__NodeInfo *info, const struct share_told *told)
{
    if (!*device->device) {
        set_used(device, info->memory_budget_bytes, info->memory_used_bytes + (told ? told->all : 0));
        return;
    }
    for (size_t i = 0; i < info->n_devices; i++)
        if (!strcmp(info->devices[i]->name, device->device))
            set_used(device, info->devices[i]->memory_bytes, info->devices[i]->used_bytes + (told ? told->device[i] : 0));
}

static void look_up_other(const struct preview *p, Ep__V1__DevicePlan *device, const Ep__V1__NodeInfo *info)
{
    struct share_told told = share_told(p->group->groups, p->group, info, device->node);

    look_up(device, info, &told);
    free(told.device);
}

/* As nodes have said last; this one is asked itself. */
static void fill_used(const struct preview *p)
{
    const struct ep_groups *groups = p->group->groups;
    Ep__V1__NodeInfo own;

    ep_node_info(groups->node, &own);
    for (size_t i = 0; i < p->out->n_devices; i++) {
        Ep__V1__DevicePlan *device = p->out->devices[i];
        const struct ep_cluster_node *node = ep_cluster_find(groups->cluster, device->node);
        const Ep__V1__NodeInfo *info = node ? ep_cluster_info(groups->cluster, node) : NULL;

        if (!strcmp(device->node, nodes_self(groups)))
            look_up(device, &own, NULL);
        else if (info)
            look_up_other(p, device, info);
    }
    ep_node_info_clear(&own);
}

static void fill_devices(const struct preview *p)
{
    const size_t most = p->plan->n_ranks + (p->present ? p->present->plan.n_ranks : 0);

    p->out->devices = arena_alloc(p->arena, most * sizeof *p->out->devices + 1);
    add_epoch(p, p->settled, p->plan, true);
    if (p->present)
        add_epoch(p, &p->present->settled, &p->present->plan, false);
    for (size_t i = 0; !p->new_epoch && i < p->out->n_devices; i++)
        p->out->devices[i]->before = p->out->devices[i]->after = 0;
    fill_used(p);
}

/* ---- all of it ------------------------------------------------------------------------------- */

Ep__V1__Plan *preview_plan(struct arena *arena, const struct group *group, const Ep__V1__GroupSpec *asked,
                           const struct ep_settled *settled, const struct ep_plan *plan, bool new_epoch)
{
    struct preview p = { .arena = arena, .group = group, .present = group->epoch, .settled = settled, .plan = plan,
                         .new_epoch = new_epoch };

    if (asked->placement && asked->placement->n_loads == settled->placement.experts)
        p.loads = asked->placement->loads;
    p.out = arena_alloc(arena, sizeof *p.out);
    ep__v1__plan__init(p.out);
    p.out->new_epoch = new_epoch;
    fill_ranks(&p);
    fill_moved(&p);
    fill_devices(&p);
    return p.out;
}
