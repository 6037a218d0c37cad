/* A pass's inputs and memory; its ops are in pass_ops.c. */
#include <stdlib.h>

#include "bench_hash.h"
#include "nodes.h"
#include "pass_private.h"

enum { STREAM_BAD_ID = 100, STREAM_REPEAT, STREAM_RAGGED }; /* beside those of bench_hash.h */

/* ---- inputs -------------------------------------------------------------------------- */

static uint64_t random_of(const struct pass *pass, int stream, uint32_t rank, uint32_t i)
{
    return bench_hash(pass->config.seed, (enum bench_stream)stream, rank, i, 0);
}

static int64_t bad_id(const struct pass *pass, uint64_t random)
{
    const int64_t ids[] = {
        pass->shape->experts, pass->shape->experts + 7, -2, INT32_MAX, INT32_MIN, 1ll << 32, (1ll << 32) - 1
    };
    const uint32_t n = pass->shape->index_bytes == 8 ? 7 : 5; /* the last two need eight bytes */

    return ids[random % n];
}

/* Choices that ep-bench never makes.  The inputs own this memory and have it const for others. */
static void spoil_choices(struct pass *pass, uint32_t rank)
{
    int64_t *topk = (int64_t *)(uintptr_t)pass->inputs.rank[rank].topk;
    const uint32_t k = pass->shape->top_k;

    for (uint32_t i = 0; i < pass->inputs.rank[rank].tokens * k; i++) {
        uint64_t bad = random_of(pass, STREAM_BAD_ID, rank, i),
                 repeat = random_of(pass, STREAM_REPEAT, rank, i);

        if (pass->shape->repeats && i % k > 0 && repeat % 4 == 0)
            topk[i] = topk[i - i % k + repeat / 4 % (i % k)];
        if (pass->shape->bad_ids && bad % 8 == 0)
            topk[i] = bad_id(pass, bad / 8);
    }
}

static void shape_inputs(struct pass *pass)
{
    for (uint32_t r = 0; r < pass->config.ranks; r++) {
        struct ep_ref_rank *rank = &pass->inputs.rank[r];

        if (pass->shape->ragged && r > 0)
            rank->tokens = (uint32_t)(random_of(pass, STREAM_RAGGED, r, 0) % (pass->shape->tokens + 1));
        spoil_choices(pass, r);
        if (pass->shape->no_weights) {
            free((void *)(uintptr_t)rank->weights);
            rank->weights = NULL;
        }
    }
    pass->tokens = pass->inputs.rank[pass->rank->rank].tokens;
}

static ep_status open_inputs(struct pass *pass, struct ep_error *error)
{
    const struct shape *s = pass->shape;
    struct routing_spec spec;
    const struct routing_shape shape = { .ranks = pass->config.ranks,
                                         .experts = s->experts,
                                         .top_k = s->top_k,
                                         .seed = pass->config.seed,
                                         .drop = s->drop };
    const struct bench_case of = {
        .mode = s->ht ? EP_MODE_HT : EP_MODE_LL, .layout = s->layout, .dtype = s->dtype, .tokens = s->tokens, .scales = s->scales
    };
    struct routing *routing;
    ep_status status = routing_parse(s->routing ? s->routing : "uniform", &spec, error);

    if (status == EP_OK)
        status = routing_open(&spec, &shape, &routing, error);
    if (status != EP_OK)
        return status;
    status = inputs_open(&pass->config, &of, routing, &pass->inputs, error);
    routing_close(routing);
    if (status == EP_OK)
        shape_inputs(pass);
    return status;
}

static void make_bias(const struct pass *pass)
{
    const uint32_t h = pass->shape->hidden;
    const ep_dtype dtype = bench_dtypes[pass->shape->dtype].combine;

    for (uint32_t t = 0; pass->shape->bias && t < pass->tokens; t++)
        for (uint32_t i = 0; i < h; i++)
            ep_ref_store(dtype, ((t * 31 + i * 7) % 64 - 32.0) / 8,
                         pass->bias + ((size_t)t * h + i) * ep_ref_bytes(dtype));
}

static ep_status upload_rows(struct pass *pass, struct ep_error *error)
{
    const struct bench_dtype_info *d = &bench_dtypes[pass->shape->dtype];
    const size_t row = (size_t)pass->shape->hidden * ep_ref_bytes(d->input), scales = pass->inputs.scale_bytes;
    const bool fp8 = d->input == EP_FP8_E4M3;
    char *x = malloc(pass->tokens * row + 1), *s = malloc(pass->tokens * scales + 1);
    ep_status status = x && s ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for tokens");

    for (uint32_t t = 0; status == EP_OK && t < pass->tokens; t++)
        inputs_row(&pass->inputs, pass->rank->rank, t, x + t * row, fp8 ? s + t * scales : NULL);
    if (status == EP_OK)
        status = world_put(pass->rank, pass->at.x.offset, x, pass->tokens * row, error);
    if (status == EP_OK && fp8)
        status = world_put(pass->rank, pass->at.x_scales.offset, s, pass->tokens * scales, error);
    free(x);
    free(s);
    return status;
}

static ep_status upload_routes(struct pass *pass, struct ep_error *error)
{
    const struct ep_ref_rank *own = &pass->inputs.rank[pass->rank->rank];
    const size_t n = (size_t)pass->tokens * pass->shape->top_k;
    int32_t *narrow = malloc(n * sizeof *narrow + 1);
    ep_status status = EP_OK;

    if (!narrow)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for routes");
    for (size_t i = 0; i < n; i++)
        narrow[i] = (int32_t)own->topk[i];
    if (pass->shape->index_bytes == 8)
        status = world_put(pass->rank, pass->at.topk.offset, own->topk, n * sizeof *own->topk, error);
    else
        status = world_put(pass->rank, pass->at.topk.offset, narrow, n * sizeof *narrow, error);
    if (status == EP_OK && own->weights)
        status =
            world_put(pass->rank, pass->at.weights.offset, own->weights, n * sizeof *own->weights, error);
    free(narrow);
    return status;
}

static ep_status upload(struct pass *pass, bool routes, struct ep_error *error)
{
    ep_status status = upload_rows(pass, error);

    if (status == EP_OK && routes)
        status = upload_routes(pass, error);
    if (status == EP_OK && pass->shape->bias)
        status = world_put(pass->rank, pass->at.bias.offset, pass->bias,
                           (uint64_t)pass->tokens * pass->shape->hidden *
                               ep_ref_bytes(bench_dtypes[pass->shape->dtype].combine),
                           error);
    return status;
}

ep_status pass_reseed(struct pass *pass, uint64_t seed, bool routes, struct ep_error *error)
{
    ep_status status = EP_OK;

    pass->config.seed = seed; /* rows follow it at once */
    if (routes) {
        inputs_close(&pass->inputs);
        status = open_inputs(pass, error);
    }
    return status == EP_OK ? upload(pass, routes, error) : status;
}

/* ---- open and close ------------------------------------------------------------------ */

/* Copies of the GPU's buffers, of the same shape; only what is used of them takes memory. */
static bool allocate(struct pass *pass)
{
    const struct ep_layout_map *map = &pass->rank->world->map;
    const struct pass_buffers *b = &pass->at;
    const uint64_t slots = (uint64_t)map->limits.ranks * map->limits.ll_max_tokens;
    const bool rank_major = pass->shape->layout == EP_LAYOUT_RANK_MAJOR;

    pass->out = malloc((rank_major ? slots * map->row_bytes : b->out.bytes) + 1);
    pass->out_scales = malloc((rank_major ? slots * map->scales_bytes : b->out_scales.bytes) + 1);
    pass->counts = malloc(b->counts.bytes + 1);
    pass->offsets = malloc(b->offsets.bytes + 1);
    pass->out_topk = malloc(b->out_topk.bytes + 1);
    pass->out_weights = malloc(b->out_weights.bytes + 1);
    pass->sources = malloc(b->sources.bytes + 1);
    pass->rows = malloc(b->rows.bytes + 1);
    pass->result = malloc(b->result.bytes + 1);
    pass->row_grads = malloc(b->row_grads.bytes + 1);
    pass->topk_grads = malloc(b->topk_grads.bytes + 1);
    pass->bias = malloc(b->bias.bytes + 1);
    return pass->out && pass->out_scales && pass->counts && pass->offsets && pass->out_topk &&
           pass->out_weights && pass->sources && pass->rows && pass->result && pass->row_grads && pass->topk_grads && pass->bias;
}

static void configure(struct pass *pass, uint64_t seed)
{
    const struct shape *s = pass->shape;
    const uint32_t ranks = pass->rank->world->ranks;

    pass->config.ranks = ranks;
    pass->config.experts = s->experts;
    pass->config.hidden = s->hidden;
    pass->config.top_k = s->top_k;
    pass->config.alignment = s->alignment ? s->alignment : 1;
    pass->config.seed = seed;
    for (uint32_t r = 0; r < ranks; r++)
        pass->config.node_of[r] = wire_node_of(r, ranks);
    pass->config.zero_rank = s->empty_rank ? (int32_t)ranks - 1 : -1;
    if (s->redundant)
        pass->config.n_homes = shape_homes(s, ranks, pass->config.homes);
}

ep_status pass_open(struct world_rank *rank, const struct shape *shape, uint32_t place, uint32_t handle,
                    uint64_t seed, struct pass **out, struct ep_error *error)
{
    const struct ep_layout_map *map = &rank->world->map;
    struct pass *pass = calloc(1, sizeof *pass);
    uint64_t start = map->arena;
    ep_status status = EP_OK;

    if (!pass)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a pass");
    pass->rank = rank;
    pass->shape = shape;
    pass->handle = handle;
    pass->generation = 1;
    pass->expected = world_all(rank->world);
    configure(pass, seed);
    for (uint32_t i = 0; i <= place; i++)
        start = shape_buffers(&map->limits, shape, start, &pass->at);
    if (!allocate(pass))
        status = ep_error_set(error, EP_NO_MEMORY, "no memory for copies of a pass's buffers");
    if (status == EP_OK)
        status = open_inputs(pass, error);
    if (status == EP_OK) {
        make_bias(pass);
        status = upload(pass, true, error);
    }
    if (status == EP_OK)
        *out = pass;
    else
        pass_close(pass);
    return status;
}

void pass_close(struct pass *pass)
{
    if (!pass)
        return;
    pass_forget_plan(pass);
    inputs_close(&pass->inputs);
    free(pass->out);
    free(pass->out_scales);
    free(pass->counts);
    free(pass->offsets);
    free(pass->out_topk);
    free(pass->out_weights);
    free(pass->sources);
    free(pass->rows);
    free(pass->result);
    free(pass->row_grads);
    free(pass->topk_grads);
    free(pass->bias);
    free(pass);
}
