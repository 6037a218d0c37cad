#include <stdlib.h>

#include "client_private.h"

static uint32_t bit(uint32_t n)
{
    return n < 32 ? 1u << n : 0;
}

static bool has_mode(const struct ep_limits *limits, ep_mode mode)
{
    return limits->modes & bit(mode);
}

/* A spec that lists no homes is contiguous. */
static ep_status placement_from_spec(const Ep__V1__GroupSpec *spec, struct ep_placement *out,
                                     struct ep_error *error)
{
    const Ep__V1__Placement *given = spec->placement;

    if (!given || given->n_homes == 0)
        return ep_placement_contiguous(spec->ranks, spec->experts, out, error);

    struct ep_expert_home *homes = calloc(given->n_homes, sizeof *homes);

    if (!homes)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %zu homes of experts", given->n_homes);
    for (size_t i = 0; i < given->n_homes; i++)
        homes[i] = (struct ep_expert_home){ given->homes[i]->expert, given->homes[i]->rank };

    ep_status status = ep_placement_explicit(spec->ranks, spec->experts, homes, (uint32_t)given->n_homes,
                                             out, error);

    free(homes);
    return status;
}

static void limits_from_spec(const Ep__V1__GroupSpec *spec, uint32_t max_local, struct ep_limits *limits)
{
    *limits = (struct ep_limits){
        .ranks = spec->ranks,
        .experts = spec->experts,
        .local_experts = max_local,
        .top_k = spec->top_k,
        .hidden = spec->hidden,
        .arena_bytes = spec->arena_bytes,
    };
    for (size_t i = 0; i < spec->n_modes; i++)
        limits->modes |= bit((uint32_t)spec->modes[i]);
    for (size_t i = 0; i < spec->n_dtypes; i++)
        limits->dtypes |= bit((uint32_t)spec->dtypes[i]);
    if (has_mode(limits, EP_MODE_LL)) {
        limits->ll_max_tokens = spec->ll_max_tokens;
        limits->ll_banks = spec->ll_banks;
    }
    if (has_mode(limits, EP_MODE_HT))
        limits->ht_max_tokens = spec->ht_max_tokens;
}

ep_status shape_from_spec(const Ep__V1__GroupSpec *spec, uint64_t window_bytes,
                          struct group_shape *shape, struct ep_error *error)
{
    struct ep_limits limits;

    if (placement_from_spec(spec, &shape->placement, error) != EP_OK)
        return ep_error_prefix(error, "the server's placement");
    limits_from_spec(spec, shape->placement.max_local, &limits);
    shape->timeout_ms = spec->timeout_ms;
    if (ep_layout_compute(&limits, &shape->map, error) != EP_OK)
        ep_error_prefix(error, "the server's group");
    else if (shape->map.total_bytes != window_bytes)
        ep_error_set(error, EP_PROTOCOL,
                     "the server's window has %llu bytes, this libepclient computes %llu: they must be of "
                     "matching releases",
                     (unsigned long long)window_bytes, (unsigned long long)shape->map.total_bytes);
    else
        return EP_OK;
    ep_placement_free(&shape->placement);
    return error->status;
}

void shape_info(const struct group_shape *shape, uint64_t epoch, ep_group_info *info)
{
    const struct ep_limits *l = &shape->map.limits;

    *info = (ep_group_info){
        .size = sizeof *info,
        .epoch = epoch,
        .ranks = l->ranks,
        .experts = l->experts,
        .hidden = l->hidden,
        .top_k = l->top_k,
        .ll_max_tokens = l->ll_max_tokens,
        .ht_max_tokens = l->ht_max_tokens,
        .ll_banks = l->ll_banks,
        .dtypes = l->dtypes,
        .max_local_experts = l->local_experts,
        .arena_bytes = l->arena_bytes,
        .window_bytes = shape->map.total_bytes,
        .timeout_ms = shape->timeout_ms,
    };
}
