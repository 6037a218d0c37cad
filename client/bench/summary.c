#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sweep.h"
#include "verify.h"

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double percentile(double *values, uint32_t n, double p)
{
    if (n == 0)
        return 0;
    qsort(values, n, sizeof *values, ascending);
    return values[(uint32_t)ceil(p * n) > 0 ? (uint32_t)ceil(p * n) - 1 : 0];
}

/* ---- samples ---------------------------------------------------------------------------- */

static double field(const struct bench_sample *sample, size_t offset)
{
    float value;

    memcpy(&value, (const char *)sample + offset, sizeof value);
    return (double)value;
}

/* values[i] = what iteration i took at its slowest rank. */
static void slowest(const struct crew *crew, uint32_t n, size_t offset, double *values)
{
    for (uint32_t i = 0; i < n; i++) {
        values[i] = 0;
        for (uint32_t r = 0; r < crew->ranks; r++)
            values[i] = fmax(values[i], field(&crew_result(crew, r)->sample[i], offset));
    }
}

static struct bench_quantiles quantiles(const struct crew *crew, uint32_t n, size_t offset, double *values)
{
    slowest(crew, n, offset, values);
    return (struct bench_quantiles){ percentile(values, n, 0.5), percentile(values, n, 0.9),
                                     percentile(values, n, 0.99) };
}

/* All ranks together, each at its median. */
static double total_copy(const struct crew *crew, uint32_t n, double *values)
{
    double total = 0;

    for (uint32_t r = 0; r < crew->ranks; r++) {
        for (uint32_t i = 0; i < n; i++)
            values[i] = (double)crew_result(crew, r)->sample[i].copy_gbps;
        total += percentile(values, n, 0.5);
    }
    return total;
}

static void summarise_samples(const struct crew *crew, struct case_result *result)
{
    uint32_t n = crew_result(crew, 0)->samples;
    double *values = malloc((n + 1) * sizeof *values);

    if (!values)
        return;
    result->dispatch = quantiles(crew, n, offsetof(struct bench_sample, dispatch), values);
    result->combine = quantiles(crew, n, offsetof(struct bench_sample, combine), values);
    result->pair = quantiles(crew, n, offsetof(struct bench_sample, pair), values);
    result->service_us = quantiles(crew, n, offsetof(struct bench_sample, service), values).p50;
    result->copy_gbps = total_copy(crew, n, values);
    result->measured = n > 0;
    free(values);
}

void summarise(const struct crew *crew, struct case_result *result)
{
    summarise_samples(crew, result);
    for (uint32_t r = 0; r < crew->ranks; r++) {
        const struct bench_rank_result *rank = crew_result(crew, r);

        result->pair_us = fmax(result->pair_us, rank->chain_us);
        result->graph_us = fmax(result->graph_us, rank->graph_us);
        result->wire_bytes += (double)rank->wire_bytes / crew->ranks;
        result->logical_bytes += (double)rank->logical_bytes / crew->ranks;
        result->buffer_bytes = rank->window_bytes - rank->arena_bytes;
    }
    if (result->pair_us > 0) {
        result->wire_gbps = result->wire_bytes / result->pair_us / 1e3;
        result->logical_gbps = result->logical_bytes / result->pair_us / 1e3;
    }
}

/* ---- verdicts ----------------------------------------------------------------------------- */

void summarise_verdicts(const struct crew *crew, uint64_t mask, struct case_result *result)
{
    uint32_t runs = UINT32_MAX;

    result->mismatches = result->hash = 0;
    for (uint32_t r = 0; r < crew->ranks; r++) {
        const struct bench_verdict *verdict = &crew_result(crew, r)->verdict;

        if (!(mask >> r & 1))
            continue;
        if (verdict->mismatches && !result->mismatches)
            snprintf(result->first, sizeof result->first, "rank %u: %.*s", r, BENCH_TEXT - 1, verdict->first);
        runs = verdict->runs < runs ? verdict->runs : runs;
        result->mismatches += verdict->mismatches;
        result->hash = verify_hash(result->hash, &verdict->hash, sizeof verdict->hash);
        result->max_error = fmax(result->max_error, verdict->max_error);
        result->max_bound_ratio = fmax(result->max_bound_ratio, verdict->max_bound_ratio);
    }
    result->verified = result->mismatches == 0 && runs > 0 && runs != UINT32_MAX;
}

/* ---- a soak -------------------------------------------------------------------------------- */

uint64_t soak_ops(const struct bench_soak *totals)
{
    uint64_t n = 0;

    for (ep_mode mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++)
        for (ep_layout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++)
            n += totals->dispatches[mode][layout] + totals->combines[mode][layout];
    return n;
}

double soak_ops_per_second(const struct soak_result *soak)
{
    return soak->seconds > 0 ? (double)soak_ops(&soak->totals) / soak->seconds : 0;
}
