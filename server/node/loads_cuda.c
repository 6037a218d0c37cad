/*
 * Rows of each expert, by a sample.  Kernels count none: they keep the routing of each handle's last dispatch in the
 * rank's state, for its combine, and whenever the server looks at a rank's counters it reads the newest of these too.
 * That batch stands for all dispatches since the look before.
 *
 * A worker that runs its own ops can write its state: what is read here is checked.
 */
#include <stdlib.h>

#include "team_cuda.h"

/* ---- experts by their homes --------------------------------------------------------------------- */

static uint32_t local_experts(const struct cuda_team *team)
{
    return team->map->limits.local_experts;
}

static ep_status turn_round(struct cuda_team *team, struct ep_error *error)
{
    const struct ep_placement *p = team->placement;

    team->expert_at = calloc((size_t)team->n * local_experts(team), sizeof *team->expert_at);
    if (!team->expert_at)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team's experts");
    for (uint32_t e = 0; e < p->experts; e++)
        for (uint32_t home = p->first[e]; home < p->first[e + 1]; home++)
            team->expert_at[(size_t)p->rank[home] * local_experts(team) + p->local[home]] = e;
    return EP_OK;
}

ep_status cuda_loads_open(struct cuda_team *team, struct ep_error *error)
{
    ep_status status = turn_round(team, error);

    for (uint32_t i = 0; !status && i < team->n; i++) {
        if (!cuda_is_here(team, i))
            continue;
        team->ranks[i].expert_rows = calloc(team->placement->experts, sizeof *team->ranks[i].expert_rows);
        if (!team->ranks[i].expert_rows)
            status = ep_error_set(error, EP_NO_MEMORY, "no memory for the loads of rank %u", i);
    }
    return status;
}

void cuda_loads_close(struct cuda_team *team)
{
    for (uint32_t i = 0; i < team->n; i++)
        free(team->ranks[i].expert_rows);
    free(team->expert_at);
}

uint64_t cuda_expert_rows(const struct ep_team *base, uint32_t rank, uint32_t expert)
{
    const struct cuda_rank *r = &((const struct cuda_team *)base)->ranks[rank];

    return r->expert_rows ? r->expert_rows[expert] : 0;
}

/* ---- a batch ---------------------------------------------------------------------------------------- */

struct batch {
    uint64_t number; /* 0: none */
    uint64_t at;     /* its routing, from the state's beginning */
    uint64_t choices;
};

/* The newer of the batch and the handle's. */
static void take_newer(struct batch *batch, uint64_t number, uint64_t at, uint32_t tokens, uint32_t top_k)
{
    if (number > batch->number)
        *batch = (struct batch){ .number = number, .at = at, .choices = (uint64_t)tokens * top_k };
}

static ep_status newest(const struct cuda_team *team, uint32_t rank, bool ht, struct batch *batch, struct ep_error *error)
{
    const struct ep_device_state *state = cuda_state(team, rank);
    struct ep_device_handle handles[EP_MAX_HANDLES];
    struct ep_device_ht_handle ht_handles[EP_MAX_HANDLES];
    struct ep_device_tables tables;
    ep_status status = ht ? cuda_read(team, rank, ht_handles, state->ht_handles, sizeof ht_handles, error)
                          : cuda_read(team, rank, handles, state->handles, sizeof handles, error);

    *batch = (struct batch){ 0 };
    ep_device_state_tables(team->map, team->placement, &tables);
    for (uint32_t h = 0; !status && h < EP_MAX_HANDLES; h++)
        if (ht)
            take_newer(batch, ht_handles[h].number, tables.ht.routing + h * tables.ht.handle_stride, ht_handles[h].tokens,
                       ht_handles[h].top_k);
        else
            take_newer(batch, handles[h].number, tables.routing + h * tables.handle_stride, handles[h].tokens,
                       handles[h].top_k);
    return status;
}

static uint64_t most_choices(const struct cuda_team *team, bool ht)
{
    const struct ep_limits *l = &team->map->limits;

    return (uint64_t)(ht ? l->ht_max_tokens : l->ll_max_tokens) * l->top_k;
}

static ep_status read_routes(const struct cuda_team *team, uint32_t rank, const struct batch *batch,
                             struct cuda_sample *sample, struct ep_error *error)
{
    const uint8_t *state = (const uint8_t *)cuda_state(team, rank);

    sample->routes = calloc(batch->choices, sizeof *sample->routes);
    if (!sample->routes)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the routing of rank %u", rank);
    sample->choices = batch->choices;
    return cuda_read(team, rank, sample->routes, state + batch->at, batch->choices * sizeof *sample->routes, error);
}

ep_status cuda_loads_read(const struct cuda_team *team, uint32_t rank, bool ht, struct cuda_sample *sample,
                          struct ep_error *error)
{
    struct batch batch;
    ep_status status;

    if (sample->dispatches <= sample->before)
        return EP_OK;
    status = newest(team, rank, ht, &batch, error);
    if (status || !batch.choices || batch.choices > most_choices(team, ht))
        return status;
    return read_routes(team, rank, &batch, sample, error);
}

/* A choice that names its token's expert again has no row. */
static void add_route(struct cuda_team *team, struct cuda_rank *r, int32_t route, uint64_t weight)
{
    const uint32_t rank = (uint32_t)route >> 16, local = (uint32_t)route & 0xffff;

    if (route < 0 || route & EP_DEVICE_ROUTE_AGAIN || rank >= team->n || local >= local_experts(team))
        return;
    r->expert_rows[team->expert_at[(size_t)rank * local_experts(team) + local]] += weight;
}

void cuda_loads_add(struct cuda_team *team, uint32_t rank, bool ht, const struct cuda_sample *sample)
{
    struct cuda_rank *r = &team->ranks[rank];

    r->sampled[ht] = sample->dispatches;
    for (uint64_t i = 0; i < sample->choices; i++)
        add_route(team, r, sample->routes[i], sample->dispatches - sample->before);
}
