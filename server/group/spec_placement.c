/* Which rank holds which expert: from what is asked to a list of homes. */
#include <stdlib.h>

#include "balance.h"
#include "device_state.h"
#include "spec.h"

#define MAX_HOMES 65536u /* they fit into one message */

static ep_status place_explicit(struct ep_settled *settled, struct ep_error *error)
{
    const Ep__V1__GroupSpec *spec = settled->spec;
    size_t n = spec->placement->n_homes;
    struct ep_expert_home *homes;
    ep_status status;

    if (n > MAX_HOMES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement.homes has %zu entries: must be at most %u", n, MAX_HOMES);
    homes = calloc(n ? n : 1, sizeof *homes);
    if (!homes)
        return ep_error_set(error, EP_NO_MEMORY, "placement: out of memory");
    for (size_t i = 0; i < n; i++)
        homes[i] =
            (struct ep_expert_home){ spec->placement->homes[i]->expert, spec->placement->homes[i]->rank };
    status =
        ep_placement_explicit(spec->ranks, spec->experts, homes, (uint32_t)n, &settled->placement, error);
    free(homes);
    return status;
}

static Ep__V1__ExpertHome *home_message(uint32_t expert, uint32_t rank)
{
    Ep__V1__ExpertHome *home = malloc(sizeof *home);

    if (!home)
        abort();
    ep__v1__expert_home__init(home);
    home->expert = expert;
    home->rank = rank;
    return home;
}

/* So that workers need not know the rule. */
static void list_homes(struct ep_settled *settled)
{
    Ep__V1__Placement *list = settled->spec->placement;
    const struct ep_placement *placement = &settled->placement;

    list->homes = calloc(placement->first[placement->experts], sizeof *list->homes);
    if (!list->homes)
        abort();
    for (uint32_t expert = 0; expert < placement->experts; expert++)
        for (uint32_t i = placement->first[expert]; i < placement->first[expert + 1]; i++)
            list->homes[list->n_homes++] = home_message(expert, placement->rank[i]);
}

/* Loads say nothing where homes do not follow from them. */
static ep_status check_no_loads(const Ep__V1__Placement *placement, struct ep_error *error)
{
    if (!placement->n_loads && !placement->redundant)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "placement.%s is given: it needs placement.strategy by_load",
                        placement->n_loads ? "loads" : "redundant");
}

static ep_status place_contiguous(struct ep_settled *settled, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;

    if (spec->placement->n_homes)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.homes has %zu entries: they need placement.strategy explicit",
                            spec->placement->n_homes);
    spec->placement->strategy = EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_CONTIGUOUS;
    return ep_placement_contiguous(spec->ranks, spec->experts, &settled->placement, error);
}

/* Where ranks are is the plan's business (plan.c); here only that the fields go together. */
static ep_status check_nodes(const Ep__V1__Placement *placement, struct ep_error *error)
{
    if (!protobuf_c_enum_descriptor_get_value(&ep__v1__node_strategy__descriptor, (int)placement->nodes))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement.nodes is %d: must be pack, spread or explicit",
                            (int)placement->nodes);
    if (placement->n_ranks && placement->nodes != EP__V1__NODE_STRATEGY__NODE_STRATEGY_EXPLICIT)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.ranks has %zu entries: they need placement.nodes explicit", placement->n_ranks);
    return EP_OK;
}

/* ---- by load --------------------------------------------------------------------- */

/* Homes that all ranks have room for. */
static uint32_t most_homes(const Ep__V1__GroupSpec *spec, const struct ep_spec_bounds *bounds)
{
    const uint64_t most = (uint64_t)ep_device_max_local(spec->ranks) * spec->ranks;

    return bounds->backend == EP__V1__BACKEND__BACKEND_CUDA && most < MAX_HOMES ? (uint32_t)most : MAX_HOMES;
}

/* Before any work: it grows with the homes. */
static ep_status check_redundant(const Ep__V1__GroupSpec *spec, const struct ep_spec_bounds *bounds, struct ep_error *error)
{
    const uint64_t everywhere = (uint64_t)spec->experts * (spec->ranks - 1); /* a second one on a rank is of no use */
    const uint32_t homes = most_homes(spec, bounds), room = homes > spec->experts ? homes - spec->experts : 0;
    const uint32_t redundant = spec->placement->redundant;

    if (redundant > everywhere)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.redundant is %u: must be at most %llu, when each of %u experts is on all %u ranks",
                            redundant, (unsigned long long)everywhere, spec->experts, spec->ranks);
    if (redundant > room)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement.redundant is %u: must be at most %u with %u experts, as "
                            "a group of %u ranks has at most %u homes", redundant, room, spec->experts, spec->ranks, homes);
    return EP_OK;
}

static ep_status check_loads(const Ep__V1__GroupSpec *spec, const struct ep_spec_bounds *bounds, struct ep_error *error)
{
    const Ep__V1__Placement *placement = spec->placement;

    if (placement->n_homes)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.homes has %zu entries: they need placement.strategy explicit",
                            placement->n_homes);
    if (placement->n_loads != spec->experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.loads has %zu entries: by_load needs one for each of %u experts",
                            placement->n_loads, spec->experts);
    return check_redundant(spec, bounds, error);
}

static void note_balance(struct ep_settled *settled, const uint64_t *loads)
{
    const Ep__V1__GroupSpec *spec = settled->spec;
    struct ep_placement contiguous;

    if (ep_placement_contiguous(spec->ranks, spec->experts, &contiguous, NULL))
        return;
    ep_settled_note(settled, "placement: by_load asked, %u homes settled: the fullest rank has %.2f of the mean load, "
                    "contiguous it would have %.2f", settled->placement.first[spec->experts],
                    ep_balance_peak(&settled->placement, loads), ep_balance_peak(&contiguous, loads));
    ep_placement_free(&contiguous);
}

/* From here on it is an explicit placement. */
static void forget_loads(Ep__V1__Placement *placement)
{
    free(placement->loads);
    placement->loads = NULL;
    placement->n_loads = 0;
    placement->redundant = 0;
    placement->strategy = EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_EXPLICIT;
}

static ep_status place_by_load(struct ep_settled *settled, const struct ep_spec_bounds *bounds, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;
    struct ep_balance balance = { .ranks = spec->ranks, .experts = spec->experts, .load = spec->placement->loads,
                                  .redundant = spec->placement->redundant,
                                  .node = bounds->placed == spec->ranks ? bounds->rank_node : NULL };
    struct ep_expert_home *homes;
    ep_status status = check_loads(spec, bounds, error);

    if (status)
        return status;
    homes = calloc((size_t)spec->experts + balance.redundant, sizeof *homes);
    if (!homes)
        return ep_error_set(error, EP_NO_MEMORY, "placement: out of memory");
    status = ep_balance_homes(&balance, homes, error);
    if (!status)
        status = ep_placement_explicit(spec->ranks, spec->experts, homes, spec->experts + balance.redundant,
                                       &settled->placement, error);
    free(homes);
    if (status)
        return status;
    note_balance(settled, balance.load);
    forget_loads(spec->placement);
    list_homes(settled);
    return EP_OK;
}

/* ---- any ------------------------------------------------------------------------- */

ep_status ep_spec_place(struct ep_settled *settled, const struct ep_spec_bounds *bounds, struct ep_error *error)
{
    Ep__V1__GroupSpec *spec = settled->spec;
    ep_status status;

    if (!spec->placement) {
        spec->placement = malloc(sizeof *spec->placement);
        if (!spec->placement)
            return ep_error_set(error, EP_NO_MEMORY, "placement: out of memory");
        ep__v1__placement__init(spec->placement);
    }
    if ((status = check_nodes(spec->placement, error)))
        return status;
    if (spec->placement->strategy != EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_BY_LOAD &&
        (status = check_no_loads(spec->placement, error)))
        return status;
    if (!spec->placement->nodes)
        spec->placement->nodes = EP__V1__NODE_STRATEGY__NODE_STRATEGY_PACK;
    switch (spec->placement->strategy) {
    case EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_UNSPECIFIED:
    case EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_CONTIGUOUS: return place_contiguous(settled, error);
    case EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_EXPLICIT: return place_explicit(settled, error);
    case EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_BY_LOAD: return place_by_load(settled, bounds, error);
    default:
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.strategy is %d: must be contiguous, explicit or by_load",
                            (int)spec->placement->strategy);
    }
}
