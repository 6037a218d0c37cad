/* A pass's ops, and what came out of them against the reference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench_hash.h"
#include "pass_private.h"

enum { POISON = 0xa5 };

static const struct ep_limits *limits_of(const struct pass *pass)
{
    return &pass->rank->world->map.limits;
}

static const struct bench_dtype_info *dtype_of(const struct pass *pass)
{
    return &bench_dtypes[pass->shape->dtype];
}

static uint64_t row_bytes(const struct pass *pass, ep_dtype dtype)
{
    return (uint64_t)pass->shape->hidden * ep_ref_bytes(dtype);
}

static bool rank_major(const struct pass *pass)
{
    return pass->shape->layout == EP_LAYOUT_RANK_MAJOR;
}

static uint32_t mode_of(const struct pass *pass)
{
    return pass->shape->ht ? EP_MODE_HT : EP_MODE_LL;
}

static bool has_tables(const struct pass *pass)
{
    return rank_major(pass) || pass->shape->layout == EP_LAYOUT_FLAT;
}

static bool has_scales(const struct pass *pass)
{
    return dtype_of(pass)->wire == EP_FP8_E4M3;
}

void pass_forget_plan(struct pass *pass)
{
    if (pass->planned)
        ep_ref_dispatch_free(&pass->plan);
    pass->planned = false;
}

/* ---- ops ----------------------------------------------------------------------------- */

static ep_status poison(struct pass *pass, const struct ep_span *spans, size_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (size_t i = 0; status == EP_OK && i < n; i++)
        status = world_fill(pass->rank, spans[i].offset, POISON, spans[i].bytes, error);
    return status;
}

static ep_status poison_dispatch(struct pass *pass, struct ep_error *error)
{
    const struct pass_buffers *b = &pass->at;
    const struct ep_span all[] = { b->out,      b->out_scales,  b->counts,  b->offsets,
                                   b->out_topk, b->out_weights, b->sources, b->rows };

    return poison(pass, all, sizeof all / sizeof *all, error);
}

/* Of a buffer that has room for more. */
static struct ep_span part(struct ep_span span, uint64_t bytes)
{
    return (struct ep_span){ .offset = span.offset, .bytes = bytes };
}

struct ep_op pass_dispatch_op(const struct pass *pass, uint32_t flags)
{
    const struct bench_dtype_info *d = dtype_of(pass);
    const struct pass_buffers *b = &pass->at;
    const uint64_t t = pass->tokens, choices = t * pass->shape->top_k;
    const uint32_t index_bytes = pass->shape->index_bytes ? pass->shape->index_bytes : 4;
    struct ep_op op = {
        .kind = EP_OP_DISPATCH,
        .mode = mode_of(pass),
        .layout = pass->shape->layout,
        .flags = flags,
        .input_dtype = d->input,
        .wire_dtype = d->wire,
        .scale_format = pass->shape->scales,
        .tokens = pass->tokens,
        .top_k = pass->shape->top_k,
        .index_bytes = index_bytes,
        .alignment = pass->config.alignment,
        .handle = pass->handle,
        .generation = pass->generation,
        .x = part(b->x, t * row_bytes(pass, d->input)),
        .out = b->out,
        .out_scales = b->out_scales,
        .counts = b->counts,
        .offsets = b->offsets,
        .out_topk = b->out_topk,
        .out_weights = b->out_weights,
        .sources = b->sources,
    };

    if (b->x_scales.bytes)
        op.x_scales = part(b->x_scales, t * pass->inputs.scale_bytes);
    if (!(flags & EP_OP_CACHED)) {
        op.topk_idx = part(b->topk, choices * index_bytes);
        if (!pass->shape->no_weights)
            op.topk_weights = part(b->weights, choices * sizeof(float));
    }
    if (pass->out_rows)
        op.out.bytes = pass->out_rows * row_bytes(pass, d->wire);
    return op;
}

ep_status pass_dispatch(struct pass *pass, uint32_t flags, struct ep_error *error)
{
    ep_status status = poison_dispatch(pass, error);

    pass->dispatch = pass_dispatch_op(pass, flags);
    return status == EP_OK ? world_run(pass->rank, &pass->dispatch, error) : status;
}

/* Rank-major rows can be changed where they came, when they stay of one size. */
static bool in_bank(const struct pass *pass, bool in_place)
{
    return rank_major(pass) && in_place && !has_scales(pass);
}

/* What a combine reads: rows of their own where they differ from what came, else those. */
static struct ep_span combine_rows(const struct pass *pass, bool in_place)
{
    if (in_bank(pass, in_place))
        return (struct ep_span){ 0 };
    return pass->at.rows.bytes ? pass->at.rows : pass->at.out;
}

struct ep_op pass_combine_op(const struct pass *pass, uint32_t flags, bool in_place)
{
    const struct bench_dtype_info *d = dtype_of(pass);
    const uint64_t bytes = pass->tokens * row_bytes(pass, d->combine);
    const uint64_t grads = (uint64_t)pass->tokens * pass->shape->top_k * sizeof(float);

    return (struct ep_op){
        .kind = EP_OP_COMBINE,
        .mode = mode_of(pass),
        .layout = pass->shape->layout,
        .flags = flags,
        .input_dtype = d->combine,
        .wire_dtype = d->combine,
        .tokens = pass->tokens,
        .top_k = pass->shape->top_k,
        .index_bytes = pass->dispatch.index_bytes,
        .alignment = pass->config.alignment,
        .handle = pass->handle,
        .generation = pass->generation,
        .x = combine_rows(pass, in_place),
        .row_grads = pass->at.row_grads,
        .topk_grads = part(pass->at.topk_grads, pass->shape->grads ? grads : 0),
        .bias = part(pass->at.bias, pass->shape->bias ? bytes : 0),
        .out = part(pass->at.result, bytes),
    };
}

ep_status pass_combine(struct pass *pass, uint32_t flags, bool in_place, struct ep_error *error)
{
    const struct ep_op op = pass_combine_op(pass, flags, in_place);
    const struct ep_span outputs[] = { pass->at.result, pass->at.topk_grads };
    ep_status status = poison(pass, outputs, 2, error);

    return status == EP_OK ? world_run(pass->rank, &op, error) : status;
}

static ep_status run_bare(struct pass *pass, enum ep_op_kind kind, struct ep_error *error)
{
    const struct ep_op op = { .kind = kind,
                              .mode = mode_of(pass),
                              .layout = pass->shape->layout,
                              .tokens = pass->tokens,
                              .top_k = pass->shape->top_k,
                              .handle = pass->handle,
                              .generation = pass->generation };

    return world_run(pass->rank, &op, error);
}

ep_status pass_complete(struct pass *pass, struct ep_error *error)
{
    return run_bare(pass, EP_OP_COMPLETE, error);
}

ep_status pass_release(struct pass *pass, struct ep_error *error)
{
    return run_bare(pass, EP_OP_RELEASE, error);
}

/* ---- copies to the host -------------------------------------------------------------- */

/* Rows [first, first + n) of a buffer to the same place of its copy. */
struct rows_of {
    uint64_t offset; /* in the window */
    void *copy;
    uint64_t stride; /* from one row to the next, 0: no such buffer */
    uint64_t block;  /* from one block of rows to the next; 0: they follow */
};

/* n rows, from byte `at` on. */
static ep_status move(struct pass *pass, const struct rows_of *buffer, uint64_t at, uint64_t n, bool out,
                      struct ep_error *error)
{
    const uint64_t bytes = n * buffer->stride;

    if (out)
        return world_put(pass->rank, buffer->offset + at, (char *)buffer->copy + at, bytes, error);
    return world_get(pass->rank, buffer->offset + at, (char *)buffer->copy + at, bytes, error);
}

/* The rows that are defined, of each block that has some. */
static ep_status move_rows(struct pass *pass, const struct rows_of *buffer, bool out, struct ep_error *error)
{
    const struct ep_limits *l = limits_of(pass);
    const uint64_t slots = shape_most_tokens(l, pass->shape);
    ep_status status = EP_OK;

    if (pass->shape->layout == EP_LAYOUT_PACKED || pass->shape->layout == EP_LAYOUT_FLAT)
        return move(pass, buffer, 0, pass->plan.positions, out, error);
    for (uint32_t i = 0; status == EP_OK && i < pass->plan.n_counts; i++) {
        const uint64_t block = (rank_major(pass) ? slots : slots * l->ranks) * buffer->stride;

        status = move(pass, buffer, i * (buffer->block ? buffer->block : block), (uint64_t)pass->plan.counts[i], out, error);
    }
    return status;
}

/* Rank-major: where the dispatch's rows are. */
static uint64_t bank_of(const struct pass *pass)
{
    const struct ep_layout_map *map = &pass->rank->world->map;

    return map->ll + pass->dispatched.number % map->limits.ll_banks * map->bank_bytes;
}

static struct rows_of received_rows(const struct pass *pass)
{
    const struct ep_layout_map *map = &pass->rank->world->map;

    return (struct rows_of){ .offset =
                                 rank_major(pass) ? bank_of(pass) + map->bank.rows : pass->at.out.offset,
                             .copy = pass->out,
                             .stride = row_bytes(pass, dtype_of(pass)->wire),
                             .block = rank_major(pass) ? (uint64_t)map->limits.ll_max_tokens * map->row_bytes : 0 };
}

static struct rows_of received_scales_of(const struct pass *pass)
{
    const struct ep_layout_map *map = &pass->rank->world->map;

    if (!has_scales(pass))
        return (struct rows_of){ 0 };
    if (rank_major(pass))
        return (struct rows_of){ .offset = bank_of(pass) + map->bank.scales,
                                 .copy = pass->out_scales,
                                 .stride = map->scales_bytes };
    return (struct rows_of){ .offset = pass->at.out_scales.offset,
                             .copy = pass->out_scales,
                             .stride = pass->inputs.scale_bytes };
}

static ep_status copy_rows(struct pass *pass, struct ep_error *error)
{
    const uint64_t choices = has_tables(pass) ? pass->shape->top_k : 0;
    const struct rows_of all[] = {
        received_rows(pass),
        received_scales_of(pass),
        { pass->at.out_topk.offset, pass->out_topk, choices * sizeof(int32_t), 0 },
        { pass->at.out_weights.offset, pass->out_weights, choices * sizeof(float), 0 },
        { pass->at.sources.offset, pass->sources, sizeof(struct ep_source), 0 },
    };
    ep_status status = EP_OK;

    for (size_t i = 0; status == EP_OK && i < sizeof all / sizeof *all; i++)
        status = move_rows(pass, &all[i], false, error);
    return status;
}

/* HT: of all rows, before it is known whose they must be.  LL: of none. */
static ep_status copy_sources(struct pass *pass, uint64_t *rows, struct ep_error *error)
{
    const uint64_t room = pass->at.sources.bytes / sizeof(struct ep_source);

    *rows = !pass->shape->ht ? 0 : pass->dispatched.rows < room ? pass->dispatched.rows : room;
    return world_get(pass->rank, pass->at.sources.offset, pass->sources, *rows * sizeof(struct ep_source), error);
}

static ep_status copy_counts(struct pass *pass, struct ep_error *error)
{
    ep_status status =
        world_get(pass->rank, pass->at.counts.offset, pass->counts, pass->at.counts.bytes, error);

    return status == EP_OK
               ? world_get(pass->rank, pass->at.offsets.offset, pass->offsets, pass->at.offsets.bytes, error)
               : status;
}

static void describe_received(struct pass *pass)
{
    const struct ep_layout_map *map = &pass->rank->world->map;
    const struct bench_dtype_info *d = dtype_of(pass);
    const uint64_t row = row_bytes(pass, d->wire);

    pass->received = (struct received){
        .layout = pass->shape->layout,
        .dtype = d->wire,
        .hidden = pass->shape->hidden,
        .scales = pass->inputs.scales,
        .top_k = pass->shape->top_k,
        .max_tokens = shape_most_tokens(&map->limits, pass->shape),
        .row_bytes = row,
        .base = pass->out,
        .stride = (uint64_t)map->limits.ll_max_tokens * map->row_bytes,
        .scale_base = has_scales(pass) ? pass->out_scales : NULL,
        .scale_format = pass->shape->scales,
        .scale_stride = (uint64_t)map->limits.ll_max_tokens * map->scales_bytes,
        .scale_row = rank_major(pass) ? map->scales_bytes : pass->inputs.scale_bytes,
        .counts = pass->counts,
        .offsets = pass->offsets,
        .topk = pass->out_topk,
        .weights = pass->out_weights,
    };
}

/* ---- judging ------------------------------------------------------------------------- */

static struct verifier verifier_of(struct pass *pass)
{
    return (struct verifier){ &pass->inputs, pass->rank->rank, &pass->verdict, &pass->progress, pass->changing };
}

static ep_status verdict_of(const struct pass *pass, const char *what, struct ep_error *error)
{
    if (pass->verdict.mismatches == 0)
        return EP_OK;
    return ep_error_set(error, EP_VERIFY_FAILED, "%s: %llu wrong, first: %s", what,
                        (unsigned long long)pass->verdict.mismatches, pass->verdict.first);
}

static void check_number(struct pass *pass, const char *name, uint64_t got, uint64_t expected)
{
    verify_mismatch(&pass->verdict, got != expected, "%s is %llu, must be %llu", name,
                    (unsigned long long)got, (unsigned long long)expected);
}

/* Did the op end as the test says?  Then what it put down is worth looking at. */
static bool check_record(struct pass *pass, const struct ep_device_record *record, ep_status *status,
                         const char *what, struct ep_error *error)
{
    check_number(pass, "the record's generation", record->generation, pass->generation);
    if (record->status != (int32_t)pass->status) {
        *status = ep_error_set(error, EP_VERIFY_FAILED, "%s ended with %s (late rank %u, phase %u), not %s",
                               what, ep_status_name((ep_status)record->status), record->late_rank,
                               record->wait_phase, ep_status_name(pass->status));
        return false;
    }
    return record->status == EP_OK;
}

static bool everybody(const struct pass *pass)
{
    return pass->expected == world_all(pass->rank->world);
}

static void check_sent(struct pass *pass)
{
    const struct bench_dtype_info *d = dtype_of(pass);
    const uint64_t row = row_bytes(pass, d->wire),
                   scales = has_scales(pass) ? pass->inputs.scale_bytes : 0;

    check_number(pass, "arrived", pass->dispatched.arrived[0], pass->expected);
    if (!everybody(pass) || pass->changing)
        return;
    check_number(pass, "wire_bytes", pass->dispatched.wire_bytes,
                 ep_ref_remote_rows(&pass->inputs.routing, pass->shape->ht ? pass->config.node_of : NULL,
                                    pass->rank->rank) * (row + scales));
    check_number(pass, "logical_bytes", pass->dispatched.logical_bytes,
                 (uint64_t)pass->tokens * pass->shape->top_k * row);
}

static ep_op_info info_of(const struct pass *pass, const struct ep_device_record *record)
{
    ep_op_info info = { .size = sizeof info,
                        .rows = record->rows,
                        .dropped = record->dropped,
                        .absent = (uint32_t)__builtin_popcountll(world_all(pass->rank->world) & ~pass->expected),
                        .wire_bytes = record->wire_bytes };

    memcpy(info.arrived, record->arrived, sizeof info.arrived);
    return info;
}

static ep_status check_dispatch(struct pass *pass, struct ep_error *error)
{
    struct verifier verifier = verifier_of(pass);
    const ep_op_info info = info_of(pass, &pass->dispatched);
    uint64_t rows;
    ep_status status = copy_sources(pass, &rows, error);

    if (status != EP_OK)
        return status;
    if (!verify_arrived(&verifier, info.arrived, pass->sources, rows))
        return verdict_of(pass, "dispatch", error);
    if (!ep_ref_dispatch(&pass->inputs.routing, pass->rank->rank, pass->shape->layout, pass->config.alignment,
                         shape_most_tokens(limits_of(pass), pass->shape), &pass->plan))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the expected rows");
    pass->planned = true;
    status = copy_counts(pass, error);
    if (status == EP_OK)
        status = copy_rows(pass, error);
    if (status != EP_OK)
        return status;
    describe_received(pass);
    check_sent(pass);
    if (!pass->hash_only)
        status = verify_dispatch(&verifier, &pass->received, &pass->plan, pass->sources, &info, error);
    pass->hash = verify_hash_dispatch(&pass->received, &pass->plan);
    return status == EP_OK ? verdict_of(pass, "dispatch", error) : status;
}

ep_status pass_received(struct pass *pass, struct ep_error *error)
{
    ep_status status = world_wait(pass->rank, error);

    memset(&pass->verdict, 0, sizeof pass->verdict);
    pass_forget_plan(pass);
    if (status == EP_OK)
        status = world_record(pass->rank, pass->handle, EP_DEVICE_DISPATCH, &pass->dispatched, error);
    if (status != EP_OK || !check_record(pass, &pass->dispatched, &status, "dispatch", error))
        return status;
    return check_dispatch(pass, error);
}

/* ---- gradients of the weights ---------------------------------------------------------- */

/* That of place `index` of rank `rank`: small numbers, which differ. */
static float grad_at(const struct pass *pass, uint32_t rank, uint64_t index)
{
    return (float)(bench_hash(pass->config.seed, STREAM_PICK, rank, (uint32_t)index, 7) % 4096) - 2048;
}

static ep_status give_grads(struct pass *pass, struct ep_error *error)
{
    const uint64_t n = pass->plan.positions * (has_tables(pass) ? pass->shape->top_k : 1);

    if (!pass->shape->grads)
        return EP_OK;
    for (uint64_t i = 0; i < n; i++)
        pass->row_grads[i] = grad_at(pass, pass->rank->rank, i);
    return world_put(pass->rank, pass->at.row_grads.offset, pass->row_grads, n * sizeof(float), error);
}

static ep_status check_grads(struct pass *pass, struct ep_error *error)
{
    const uint64_t n = (uint64_t)pass->tokens * pass->shape->top_k;
    struct ep_ref_gradient *places;
    ep_status status;

    if (!pass->shape->grads)
        return EP_OK;
    status = world_get(pass->rank, pass->at.topk_grads.offset, pass->topk_grads, n * sizeof(float), error);
    if (status != EP_OK)
        return status;
    places = calloc(n + 1, sizeof *places);
    if (!places || !ep_ref_gradients(&pass->inputs.routing, pass->shape->layout, pass->config.alignment,
                                     pass->rank->rank, places))
        status = ep_error_set(error, EP_NO_MEMORY, "no memory to verify gradients");
    for (uint64_t i = 0; status == EP_OK && i < n; i++) {
        const float must = places[i].rank < 0 ? 0 : grad_at(pass, (uint32_t)places[i].rank, places[i].index);

        verify_mismatch(&pass->verdict, pass->topk_grads[i] != must, "gradient %llu is %.9g, must be %.9g",
                        (unsigned long long)i, (double)pass->topk_grads[i], (double)must);
    }
    free(places);
    return status;
}

/* ---- experts ------------------------------------------------------------------------- */

ep_status pass_experts(struct pass *pass, bool in_place, struct ep_error *error)
{
    const bool own = pass->at.rows.bytes != 0 && !in_bank(pass, in_place);
    const struct rows_of to = own ? (struct rows_of){ .offset = pass->at.rows.offset,
                                                      .copy = pass->rows,
                                                      .stride = row_bytes(pass, dtype_of(pass)->combine) }
                                  : received_rows(pass);
    ep_status status =
        experts_run(&pass->inputs, pass->rank->rank, &pass->received, &pass->plan, to.copy, to.block, error);

    if (status == EP_OK)
        status = move_rows(pass, &to, true, error);
    return status == EP_OK ? give_grads(pass, error) : status;
}

/* ---- combine ------------------------------------------------------------------------- */

static void check_biased_token(struct pass *pass, uint32_t token, const double *value, const double *bound)
{
    const ep_dtype dtype = dtype_of(pass)->combine;
    const char *row = pass->result + token * row_bytes(pass, dtype);

    for (uint32_t h = 0; h < pass->shape->hidden; h++) {
        const double got = ep_ref_decode(dtype, row + (size_t)h * ep_ref_bytes(dtype));

        verify_mismatch(&pass->verdict, !(fabs(got - value[h]) <= bound[h]),
                        "combine with bias: element %u of token %u is %.9g, must be %.9g give or take %.3g",
                        h, token, got, value[h], bound[h]);
    }
}

/* As verify_combine, with the bias of the pass. */
static ep_status check_biased(struct pass *pass, struct ep_error *error)
{
    struct experts_model model;
    const struct ep_ref_combine combine = { .dtype = dtype_of(pass)->combine,
                                            .node = pass->shape->ht ? pass->config.node_of : NULL,
                                            .hidden = pass->shape->hidden,
                                            .bias = pass->bias,
                                            .expert = experts_model_expert,
                                            .user = &model };
    double *value = malloc(2ull * pass->shape->hidden * sizeof *value);
    bool ok = experts_model_init(&model, &pass->inputs) && value;

    for (uint32_t t = 0; ok && t < pass->tokens; t++) {
        ok = ep_ref_combine_token(&pass->inputs.routing, &combine, pass->rank->rank, t, value,
                                  value + pass->shape->hidden);
        if (ok)
            check_biased_token(pass, t, value, value + pass->shape->hidden);
    }
    experts_model_fini(&model);
    free(value);
    return ok ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory to verify a combine");
}

static ep_status check_combine(struct pass *pass, struct ep_error *error)
{
    const uint64_t bytes = pass->tokens * row_bytes(pass, dtype_of(pass)->combine);
    const ep_op_info info = info_of(pass, &pass->combined);
    struct verifier verifier = verifier_of(pass);
    ep_status status = world_get(pass->rank, pass->at.result.offset, pass->result, bytes, error);

    if (status != EP_OK)
        return status;
    check_number(pass, "arrived of the combine", pass->combined.arrived[0], pass->expected);
    if (!pass->hash_only)
        status = pass->shape->bias ? check_biased(pass, error)
                                   : verify_combine(&verifier, pass->result, info.arrived, error);
    if (status == EP_OK)
        status = check_grads(pass, error);
    pass->hash = verify_hash(pass->hash, pass->result, bytes);
    return status == EP_OK ? verdict_of(pass, "combine", error) : status;
}

ep_status pass_result(struct pass *pass, struct ep_error *error)
{
    ep_status status = world_wait(pass->rank, error);

    if (status == EP_OK)
        status = world_record(pass->rank, pass->handle, EP_DEVICE_COMBINE, &pass->combined, error);
    if (status != EP_OK || !check_record(pass, &pass->combined, &status, "combine", error))
        return status;
    return check_combine(pass, error);
}

/* ---- all of it ----------------------------------------------------------------------- */

ep_status pass_run(struct pass *pass, uint32_t flags, bool in_place, struct ep_error *error)
{
    ep_status status = pass_dispatch(pass, flags, error);

    if (status == EP_OK && flags & EP_OP_SEND_ONLY)
        status = pass_complete(pass, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = pass_experts(pass, in_place, error);
    if (status == EP_OK)
        status = pass_combine(pass, flags & EP_OP_SEND_ONLY, in_place, error);
    if (status == EP_OK && flags & EP_OP_SEND_ONLY)
        status = pass_complete(pass, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}
