/* What the ops of a test need: a group, and room in its arena. */
#include <stdlib.h>

#include "nodes.h"
#include "pass_private.h"

enum { ALIGN = 256 };

/* ---- the group ----------------------------------------------------------------------- */

static uint32_t max_tokens(const struct shape *s)
{
    return s->max_tokens ? s->max_tokens : s->tokens ? s->tokens : 1;
}

static uint32_t dtype_bits(const struct shape *s)
{
    const struct bench_dtype_info *d = &bench_dtypes[s->dtype];

    return 1u << d->input | 1u << d->wire | 1u << d->combine;
}

/* The first home of expert e is where a contiguous placement has it, the others follow that rank. */
uint32_t shape_homes(const struct shape *s, uint32_t ranks, struct ep_ref_home *homes)
{
    uint32_t n = 0;

    for (uint32_t e = 0; e < s->experts; e++) {
        uint32_t first = (uint32_t)((uint64_t)e * ranks / s->experts);
        uint32_t copies = e % 5 == 0 ? 3 : e % 3 == 0 ? 2 : 1;

        for (uint32_t i = 0; i < copies && i < ranks; i++)
            homes[n++] = (struct ep_ref_home){ .expert = e, .rank = (first + i) % ranks };
    }
    return n;
}

static ep_status place_experts(const struct shape *s, uint32_t ranks, struct ep_placement *placement,
                               struct ep_error *error)
{
    struct ep_expert_home *homes;
    struct ep_ref_home *list;
    uint32_t n;
    ep_status status;

    if (!s->redundant)
        return ep_placement_contiguous(ranks, s->experts, placement, error);
    list = calloc(3ull * s->experts, sizeof *list);
    homes = calloc(3ull * s->experts, sizeof *homes);
    if (list && homes) {
        n = shape_homes(s, ranks, list);
        for (uint32_t i = 0; i < n; i++)
            homes[i] = (struct ep_expert_home){ .expert = list[i].expert, .rank = list[i].rank };
        status = ep_placement_explicit(ranks, s->experts, homes, n, placement, error);
    } else {
        status = ep_error_set(error, EP_NO_MEMORY, "no memory for a placement");
    }
    free(list);
    free(homes);
    return status;
}

/* ---- the arena ----------------------------------------------------------------------- */

uint32_t shape_most_tokens(const struct ep_limits *l, const struct shape *s)
{
    return s->ht ? l->ht_max_tokens : l->ll_max_tokens;
}

static uint64_t most_rows(const struct ep_limits *l, const struct shape *s)
{
    const uint64_t slots = (uint64_t)l->ranks * shape_most_tokens(l, s);
    const uint32_t alignment = s->alignment ? s->alignment : 1;

    switch (s->layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return slots * l->local_experts;
    case EP_LAYOUT_RANK_MAJOR:
    case EP_LAYOUT_FLAT: return slots;
    default:
        return slots * (l->top_k < l->local_experts ? l->top_k : l->local_experts) +
               (uint64_t)l->local_experts * (alignment - 1);
    }
}

static uint64_t take(uint64_t *end, uint64_t bytes, struct ep_span *span)
{
    *span = (struct ep_span){ .offset = *end, .bytes = bytes };
    *end += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return *end;
}

uint64_t shape_buffers(const struct ep_limits *l, const struct shape *s, uint64_t start,
                       struct pass_buffers *b)
{
    const struct bench_dtype_info *d = &bench_dtypes[s->dtype];
    const uint64_t t = shape_most_tokens(l, s), h = l->hidden, k = s->top_k, rows = most_rows(l, s);
    const uint64_t scales = ep_row_scale_bytes(l->hidden, s->scales);
    const bool rank_major = s->layout == EP_LAYOUT_RANK_MAJOR, fp8 = d->wire == EP_FP8_E4M3;
    const bool tables = rank_major || s->layout == EP_LAYOUT_FLAT;
    const uint32_t most = l->local_experts > l->ranks ? l->local_experts : l->ranks;
    uint64_t end = start;

    *b = (struct pass_buffers){ 0 };
    take(&end, t * h * ep_ref_bytes(d->input), &b->x);
    take(&end, d->input == EP_FP8_E4M3 ? t * scales : 0, &b->x_scales);
    take(&end, t * k * sizeof(int64_t), &b->topk);
    take(&end, t * k * sizeof(float), &b->weights);
    take(&end, s->bias ? t * h * ep_ref_bytes(d->combine) : 0, &b->bias);
    take(&end, rank_major ? 0 : rows * h * ep_ref_bytes(d->wire), &b->out);
    take(&end, fp8 && !rank_major ? rows * scales : 0, &b->out_scales);
    take(&end, most * sizeof(int32_t), &b->counts);
    take(&end, s->layout == EP_LAYOUT_PACKED ? (l->local_experts + 1ull) * sizeof(int32_t) : 0, &b->offsets);
    take(&end, tables ? rows * k * sizeof(int32_t) : 0, &b->out_topk);
    take(&end, tables ? rows * k * sizeof(float) : 0, &b->out_weights);
    take(&end, s->grads ? rows * (tables ? k : 1) * sizeof(float) : 0, &b->row_grads);
    take(&end, s->grads ? t * k * sizeof(float) : 0, &b->topk_grads);
    take(&end, rows * sizeof(struct ep_source), &b->sources);
    take(&end, fp8 || rank_major ? rows * h * ep_ref_bytes(d->combine) : 0, &b->rows);
    return take(&end, t * h * ep_ref_bytes(d->combine), &b->result);
}

uint32_t shape_nodes(uint32_t ranks)
{
    return wire_node_of(ranks - 1, ranks) + 1;
}

ep_status shape_options(const struct shape *shape, uint32_t ranks, uint32_t gpus, uint32_t passes,
                        uint32_t timeout_ms, struct world_options *options, struct ep_error *error)
{
    struct pass_buffers buffers;
    ep_status status;

    *options = (struct world_options){
        .gpus = gpus,
        .timeout_ms = timeout_ms,
        .max_sms = shape->sms,
        .limits = { .ranks = ranks,
                    .experts = shape->experts,
                    .top_k = shape->max_top_k ? shape->max_top_k : shape->top_k,
                    .hidden = shape->hidden,
                    .dtypes = dtype_bits(shape) },
    };
    if (!shape->ht || shape->both) {
        options->limits.modes |= 1u << EP_MODE_LL;
        options->limits.ll_max_tokens = max_tokens(shape);
        options->limits.ll_banks = shape->banks ? shape->banks : 2;
    }
    if (shape->ht || shape->both) {
        options->limits.modes |= 1u << EP_MODE_HT;
        options->limits.ht_max_tokens = max_tokens(shape);
    }
    status = place_experts(shape, ranks, &options->placement, error);
    if (status != EP_OK)
        return status;
    options->limits.local_experts = options->placement.max_local;
    options->limits.arena_bytes = passes * shape_buffers(&options->limits, shape, 0, &buffers);
    return EP_OK;
}
