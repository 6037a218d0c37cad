/* A captured pair of dispatch and combine, replayed with other inputs each time. */
#include <math.h>
#include <stdlib.h>

#include "ll_tests.h"

enum { REPLAYS = 1000, LOOK_EVERY = 16 }; /* at the dispatch's rows; the combine is looked at every time */

/* ---- what a combine of unchanged rows yields ----------------------------------------- */

/* The experts of a captured pair do nothing: the combine reads what the dispatch wrote. */
static void identity(void *user, uint32_t source, uint32_t token, uint32_t expert, double *value,
                     double *radius)
{
    const struct pass *pass = user;

    (void)expert;
    inputs_values(&pass->inputs, source, token, value);
    for (uint32_t h = 0; h < pass->shape->hidden; h++)
        radius[h] = 0;
}

static ep_status check_token(struct pass *pass, uint32_t token, const double *value, const double *bound,
                             struct ep_error *error)
{
    const ep_dtype dtype = bench_dtypes[pass->shape->dtype].combine;
    const size_t bytes = ep_ref_bytes(dtype);
    const char *row = pass->result + (size_t)token * pass->shape->hidden * bytes;

    for (uint32_t h = 0; h < pass->shape->hidden; h++) {
        const double got = ep_ref_decode(dtype, row + h * bytes);

        if (!(fabs(got - value[h]) <= bound[h]))
            return ep_error_set(error, EP_VERIFY_FAILED, "element %u of token %u is %.9g, must be %.9g", h,
                                token, got, value[h]);
    }
    return EP_OK;
}

static ep_status check_result(struct pass *pass, struct ep_error *error)
{
    const struct ep_ref_combine combine = { .dtype = bench_dtypes[pass->shape->dtype].combine,
                                            .node = pass->shape->ht ? pass->config.node_of : NULL,
                                            .hidden = pass->shape->hidden,
                                            .expert = identity,
                                            .user = pass };
    const uint32_t hidden = pass->shape->hidden;
    double *value = malloc(2ull * hidden * sizeof *value);
    ep_status status = world_get(pass->rank, pass->at.result.offset, pass->result,
                                 (uint64_t)pass->tokens * hidden * ep_ref_bytes(combine.dtype), error);

    for (uint32_t t = 0; status == EP_OK && t < pass->tokens; t++) {
        if (!value || !ep_ref_combine_token(&pass->inputs.routing, &combine, pass->rank->rank, t, value,
                                            value + hidden))
            status = ep_error_set(error, EP_NO_MEMORY, "no memory to verify a combine");
        else
            status = check_token(pass, t, value, value + hidden, error);
    }
    free(value);
    return status;
}

/* ---- the graph ----------------------------------------------------------------------- */

static ep_status capture(struct pass *pass, struct ep_cuda_graph **graph, struct ep_error *error)
{
    const struct ep_cuda_api *api = pass->rank->world->api;
    const struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, true);
    struct ep_error unused;
    ep_status status = api->graph_begin(pass->rank->device, pass->rank->stream, error);

    if (status != EP_OK)
        return status;
    status = world_run(pass->rank, &dispatch, error);
    if (status == EP_OK)
        status = world_run(pass->rank, &combine, error);
    if (status == EP_OK)
        return api->graph_end(pass->rank->device, pass->rank->stream, graph, error);
    if (api->graph_end(pass->rank->device, pass->rank->stream, graph, &unused) == EP_OK)
        api->graph_destroy(*graph);
    *graph = NULL;
    return status;
}

static ep_status replay(struct pass *pass, struct ep_cuda_graph *graph, uint32_t i, struct ep_error *error)
{
    const struct pass_buffers *b = &pass->at;
    ep_status status = pass_reseed(pass, pass->config.seed + 1, true, error);

    if (status == EP_OK)
        status = world_fill(pass->rank, b->result.offset, 0xa5, b->result.bytes, error);
    if (status == EP_OK)
        status = pass->rank->world->api->graph_launch(graph, pass->rank->stream, error);
    if (status == EP_OK)
        status = world_wait(pass->rank, error);
    if (status == EP_OK && i % LOOK_EVERY == 0)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = check_result(pass, error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "replay %u", i);
}

static ep_status run_replays(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    struct ep_cuda_graph *graph = NULL;
    ep_status status = capture(pass, &graph, error);

    for (uint32_t i = 0; status == EP_OK && i < REPLAYS; i++)
        status = replay(pass, graph, i, error);
    passes->world->api->graph_destroy(graph);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status; /* eager again */
}

ep_status ll_case_graph(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_replays, error);
    ll_close(&passes);
    return status;
}
