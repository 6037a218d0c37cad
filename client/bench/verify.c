#include "verify.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

void verify_mismatch(struct bench_verdict *verdict, uint64_t n, const char *format, ...)
{
    va_list args;

    if (n == 0)
        return;
    if (verdict->mismatches == 0) {
        va_start(args, format);
        vsnprintf(verdict->first, sizeof verdict->first, format, args);
        va_end(args);
    }
    verdict->mismatches += n;
}

static void get_on(struct verifier *verifier)
{
    __atomic_fetch_add(verifier->progress, 1, __ATOMIC_RELAXED);
}

static bool bit(const uint64_t *mask, uint32_t rank)
{
    return mask[rank / 64] >> rank % 64 & 1;
}

bool verify_arrived(struct verifier *verifier, const uint64_t *arrived, const ep_source_row *sources, uint64_t rows)
{
    const uint32_t ranks = verifier->inputs->config->ranks;

    for (uint32_t r = 0; r < ranks; r++) {
        verifier->inputs->rank[r].present = bit(arrived, r);
        verifier->inputs->rank[r].announced = false;
    }
    for (uint64_t i = 0; sources && i < rows; i++)
        if (sources[i].rank < ranks && !bit(arrived, sources[i].rank))
            verifier->inputs->rank[sources[i].rank].announced = true;
    if (verifier->inputs->rank[verifier->rank].present)
        return true;
    verify_mismatch(verifier->verdict, 1, "the dispatch says that its own rank %u did not arrive",
                    verifier->rank);
    return false;
}

/* ---- dispatch: what describes the rows -------------------------------------------- */

static void check_int(struct verifier *verifier, const char *name, uint64_t index, int64_t got,
                      int64_t expected)
{
    verify_mismatch(verifier->verdict, got != expected, "%s[%llu] is %lld, must be %lld", name,
                    (unsigned long long)index, (long long)got, (long long)expected);
}

static void check_counts(struct verifier *verifier, const struct received *received,
                         const struct ep_ref_dispatch *plan)
{
    for (uint32_t i = 0; i < plan->n_counts; i++)
        check_int(verifier, "counts", i, received->counts[i], plan->counts[i]);
    for (uint32_t i = 0; plan->offsets && i <= plan->n_counts; i++)
        check_int(verifier, "offsets", i, received->offsets[i], plan->offsets[i]);
}

static void check_topk(struct verifier *verifier, const struct received *received,
                       const struct ep_ref_dispatch *plan, uint64_t row)
{
    for (uint32_t j = 0; j < received->top_k; j++) {
        uint64_t at = plan->rows[row].position * received->top_k + j, of = row * received->top_k + j;

        check_int(verifier, "out_topk", at, received->topk[at], plan->topk[of]);
        if (plan->topk[of] >= 0)
            verify_mismatch(verifier->verdict,
                            memcmp(&received->weights[at], &plan->weights[of], sizeof(float)) != 0,
                            "out_weights[%llu] is %g, must be %g", (unsigned long long)at,
                            (double)received->weights[at], (double)plan->weights[of]);
    }
}

static void check_source(struct verifier *verifier, const struct ep_ref_row *row,
                         const ep_source_row *sources)
{
    const ep_source_row *got = &sources[row->position];
    const uint32_t token = row->missing ? EP_NO_TOKEN : row->token;

    verify_mismatch(verifier->verdict, got->rank != row->source || got->token != token,
                    "sources[%llu] is token %u of rank %u, must be token %u of rank %u",
                    (unsigned long long)row->position, got->token, got->rank, token, row->source);
}

static void check_info(struct verifier *verifier, const struct received *received,
                       const struct ep_ref_dispatch *plan, const ep_op_info *info)
{
    const struct ep_ref_routing *routing = &verifier->inputs->routing;
    int64_t absent = 0;

    for (uint32_t r = 0; r < routing->ranks; r++)
        absent += !routing->rank[r].present;
    if (received->layout == EP_LAYOUT_PACKED || received->layout == EP_LAYOUT_FLAT)
        check_int(verifier, "rows", 0, (int64_t)info->rows, (int64_t)plan->positions);
    check_int(verifier, "absent", 0, (int64_t)info->absent, absent);
    if (!verifier->changing)
        check_int(verifier, "dropped", 0, (int64_t)info->dropped,
                  (int64_t)ep_ref_dropped(routing, verifier->rank));
}

/* ---- dispatch: rows ---------------------------------------------------------------- */

static void check_same(struct verifier *verifier, const struct ep_ref_row *row, const char *what,
                       const void *got, const void *expected, size_t n)
{
    const unsigned char *a = got, *b = expected;
    uint64_t different = 0, first = 0;

    if (memcmp(a, b, n) == 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i] && different++ == 0)
            first = i;
    verify_mismatch(verifier->verdict, different,
                    "%s of row %llu (token %u of rank %u) differs at byte %llu: 0x%02x, must be 0x%02x", what,
                    (unsigned long long)row->position, row->token, row->source, (unsigned long long)first,
                    a[first], b[first]);
}

static void check_zero(struct verifier *verifier, const struct received *received, const struct ep_ref_row *row)
{
    const char *got = received_row(received, row->position);
    uint64_t different = 0;

    for (uint64_t i = 0; i < received->row_bytes; i++)
        different += got[i] != 0;
    verify_mismatch(verifier->verdict, different, "row %llu, %s, is not zero", (unsigned long long)row->position,
                    row->padding ? "padding" : "which was announced and not sent");
}

/* In UE8M0 there is one right code. */
static bool quantised_well(ep_scale_format format, double got, double value, double amax, double scale)
{
    if (format == EP_SCALE_UE8M0)
        return got == ep_ref_round(EP_FP8_E4M3, value / scale) * scale;
    return fabs(got - value) <= ep_ref_fp8_radius(format, value, amax);
}

static void check_quantised_block(struct verifier *verifier, const struct ep_ref_row *row,
                                  const uint8_t *codes, double scale, const double *values, uint32_t first,
                                  uint32_t n)
{
    ep_scale_format format = verifier->inputs->of.scales;
    double amax = 0;

    for (uint32_t i = 0; i < n; i++)
        amax = fmax(amax, fabs(values[i]));
    verify_mismatch(verifier->verdict, !ep_ref_fp8_scale_ok(format, amax, scale),
                    "scale of row %llu, elements from %u, is %.9g, must be %.9g%s",
                    (unsigned long long)row->position, first, scale, amax / 448,
                    format == EP_SCALE_UE8M0 ? " or the power of two above" : "");
    for (uint32_t i = 0; i < n; i++) {
        double got = ep_ref_decode(EP_FP8_E4M3, &codes[i]) * scale;

        verify_mismatch(verifier->verdict, !quantised_well(format, got, values[i], amax, scale),
                        "element %u of row %llu (token %u of rank %u) is %.9g, must be %.9g within fp8",
                        first + i, (unsigned long long)row->position, row->token, row->source, got,
                        values[i]);
    }
}

static void check_quantised(struct verifier *verifier, const struct received *received,
                            const struct ep_ref_row *row, double *values)
{
    const uint8_t *codes = received_row(received, row->position);
    const void *scales = received_scales(received, row->position);

    inputs_values(verifier->inputs, row->source, row->token, values);
    for (uint32_t b = 0; b < received->scales; b++) {
        uint32_t first = b * EP_FP8_BLOCK, left = received->hidden - first;

        check_quantised_block(verifier, row, codes + first, ep_ref_scale(received->scale_format, scales, b),
                              values + first, first, left < EP_FP8_BLOCK ? left : EP_FP8_BLOCK);
    }
}

struct scratch {
    void *row, *scales;
    double *values;
};

static void check_row(struct verifier *verifier, const struct received *received,
                      const struct ep_ref_row *row, const struct scratch *scratch)
{
    if (row->padding || row->missing) {
        check_zero(verifier, received, row);
        return;
    }
    if (bench_quantised(verifier->inputs->of.dtype)) {
        check_quantised(verifier, received, row, scratch->values);
        return;
    }
    inputs_row(verifier->inputs, row->source, row->token, scratch->row, scratch->scales);
    check_same(verifier, row, "content", received_row(received, row->position), scratch->row,
               received->row_bytes);
    if (received->scale_base)
        check_same(verifier, row, "scale", received_scales(received, row->position), scratch->scales,
                   verifier->inputs->scale_bytes);
}

static bool scratch_init(struct scratch *scratch, const struct inputs *inputs)
{
    scratch->row = malloc((size_t)inputs->hidden * 4);
    scratch->scales = malloc(inputs->scale_bytes);
    scratch->values = malloc(inputs->hidden * sizeof *scratch->values);
    return scratch->row && scratch->scales && scratch->values;
}

static void scratch_fini(struct scratch *scratch)
{
    free(scratch->row);
    free(scratch->scales);
    free(scratch->values);
}

ep_status verify_dispatch(struct verifier *verifier, const struct received *received,
                          const struct ep_ref_dispatch *plan, const ep_source_row *sources,
                          const ep_op_info *info, struct ep_error *error)
{
    struct scratch scratch;
    bool ok = scratch_init(&scratch, verifier->inputs);

    check_info(verifier, received, plan, info);
    check_counts(verifier, received, plan);
    for (uint64_t i = 0; ok && i < plan->n_rows; i++) {
        check_row(verifier, received, &plan->rows[i], &scratch);
        if (!plan->rows[i].padding)
            check_source(verifier, &plan->rows[i], sources);
        if (plan->topk)
            check_topk(verifier, received, plan, i);
        get_on(verifier);
    }
    scratch_fini(&scratch);
    return ok ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory to verify a dispatch");
}

/* ---- combine ------------------------------------------------------------------------ */

static void check_element(struct verifier *verifier, uint32_t token, uint32_t column, double got,
                          double value, double bound)
{
    struct bench_verdict *verdict = verifier->verdict;
    double off = fabs(got - value);

    verify_mismatch(verdict, !(off <= bound),
                    "combine: element %u of token %u is %.9g, must be %.9g give or take %.3g", column, token,
                    got, value, bound);
    if (off > verdict->max_error)
        verdict->max_error = off;
    if (bound > 0 && off / bound > verdict->max_bound_ratio)
        verdict->max_bound_ratio = off / bound;
}

static void check_token(struct verifier *verifier, ep_dtype dtype, const void *result, uint32_t token,
                        const double *value, const double *bound)
{
    uint32_t bytes = ep_ref_bytes(dtype), hidden = verifier->inputs->hidden;
    const char *row = (const char *)result + (uint64_t)token * hidden * bytes;

    for (uint32_t h = 0; h < hidden; h++)
        check_element(verifier, token, h, ep_ref_decode(dtype, row + (size_t)h * bytes), value[h], bound[h]);
}

/* [T, H] of the verifier's rank; no memory for it: NULL. */
static void *make_bias(const struct verifier *verifier)
{
    const struct inputs *inputs = verifier->inputs;
    const uint32_t tokens = inputs->rank[verifier->rank].tokens;
    const size_t row = (size_t)inputs->hidden * ep_ref_bytes(bench_dtypes[inputs->of.dtype].combine);
    char *bias = malloc(tokens * row + 1);

    for (uint32_t t = 0; bias && t < tokens; t++)
        inputs_bias(inputs, verifier->rank, t, bias + t * row);
    return bias;
}

ep_status verify_combine(struct verifier *verifier, const void *result, const uint64_t *arrived,
                         struct ep_error *error)
{
    const struct inputs *inputs = verifier->inputs;
    bool from[BENCH_MAX_RANKS];
    struct experts_model model;
    void *bias = inputs_biased(inputs) ? make_bias(verifier) : NULL;
    struct ep_ref_combine combine = { .dtype = bench_dtypes[inputs->of.dtype].combine,
                                      .hidden = inputs->hidden,
                                      .node = inputs->of.mode == EP_MODE_HT ? inputs->config->node_of : NULL,
                                      .arrived = from,
                                      .bias = bias,
                                      .expert = experts_model_expert,
                                      .user = &model };
    double *value = malloc(inputs->hidden * 2 * sizeof *value);
    bool ok = experts_model_init(&model, inputs) && value && (bias || !inputs_biased(inputs));

    for (uint32_t r = 0; r < inputs->config->ranks; r++)
        from[r] = bit(arrived, r);
    for (uint32_t t = 0; ok && t < inputs->rank[verifier->rank].tokens; t++) {
        ok = ep_ref_combine_token(&inputs->routing, &combine, verifier->rank, t, value,
                                  value + inputs->hidden);
        if (ok)
            check_token(verifier, combine.dtype, result, t, value, value + inputs->hidden);
        get_on(verifier);
    }
    experts_model_fini(&model);
    free(value);
    free(bias);
    return ok ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory to verify a combine");
}

/* ---- gradients of the weights --------------------------------------------------------- */

static void check_weight_grad(struct verifier *verifier, uint32_t token, uint32_t choice, float got,
                              double value, double bound)
{
    struct bench_verdict *verdict = verifier->verdict;
    double off = fabs((double)got - value);

    verify_mismatch(verdict, !(off <= bound),
                    "topk_grads: choice %u of token %u is %.9g, must be %.9g give or take %.3g", choice, token,
                    (double)got, value, bound);
    if (bound > 0 && off / bound > verdict->max_bound_ratio)
        verdict->max_bound_ratio = off / bound;
}

/* A choice that reached nobody has none. */
static void check_weight_grads(struct verifier *verifier, struct experts_model *forward,
                               struct experts_model *gradients, uint32_t token, const float *grads,
                               const uint64_t *arrived)
{
    const struct ep_ref_routing *routing = &verifier->inputs->routing;
    const int64_t *topk = routing->rank[verifier->rank].topk + (uint64_t)token * routing->top_k;

    for (uint32_t j = 0; j < routing->top_k; j++) {
        double value = 0, bound = 0;
        uint32_t home, local;

        if (ep_ref_home(routing, verifier->rank, token, topk[j], &home, &local) && bit(arrived, home))
            experts_model_weight_grad(forward, gradients, verifier->rank, token, (uint32_t)topk[j], &value, &bound);
        check_weight_grad(verifier, token, j, grads[j], value, bound);
    }
}

ep_status verify_weight_grads(struct verifier *verifier, const float *topk_grads, const uint64_t *arrived,
                              struct ep_error *error)
{
    const struct inputs *inputs = verifier->inputs;
    struct inputs tokens = *inputs; /* the same routes */
    struct experts_model forward, gradients;
    bool ok = experts_model_init(&forward, &tokens);

    tokens.pass = BENCH_FORWARD;
    ok = experts_model_init(&gradients, inputs) && ok;
    for (uint32_t t = 0; ok && t < inputs->rank[verifier->rank].tokens; t++) {
        check_weight_grads(verifier, &forward, &gradients, t, topk_grads + (uint64_t)t * inputs->routing.top_k,
                           arrived);
        get_on(verifier);
    }
    experts_model_fini(&forward);
    experts_model_fini(&gradients);
    return ok ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory to verify gradients of weights");
}

/* ---- hashes -------------------------------------------------------------------------- */

uint64_t verify_hash(uint64_t seed, const void *bytes, size_t n)
{
    return XXH3_64bits_withSeed(bytes, n, seed);
}

uint64_t verify_hash_dispatch(const struct received *received, const struct ep_ref_dispatch *plan)
{
    uint64_t hash = verify_hash(0, received->counts, plan->n_counts * sizeof(int32_t));

    if (plan->offsets)
        hash = verify_hash(hash, received->offsets, (plan->n_counts + 1) * sizeof(int32_t));
    for (uint64_t i = 0; i < plan->n_rows; i++) {
        uint64_t position = plan->rows[i].position;

        hash = verify_hash(hash, received_row(received, position), received->row_bytes);
        if (received->scale_base && !plan->rows[i].padding)
            hash = verify_hash(hash, received_scales(received, position),
                               received->scales * ep_ref_scale_bytes(received->scale_format));
        if (plan->topk)
            hash = verify_hash(hash, received->topk + position * received->top_k,
                               received->top_k * sizeof(int32_t));
    }
    return hash;
}
