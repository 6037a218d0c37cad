#include "inputs.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bench_hash.h"

/* ---- elements ------------------------------------------------------------------- */

enum { NUMBERS = 2048 }; /* 8 bits of n, 3 bits of s */

static double number[NUMBERS];
static uint32_t number_code[EP_FP32 + 1][NUMBERS];
static double e4m3[256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    for (int i = 0; i < NUMBERS; i++) {
        number[i] = ldexp((double)((i & 0xff) - 128), (i >> 8) - 10);
        number_code[EP_BF16][i] = ep_ref_encode(EP_BF16, number[i]);
        number_code[EP_FP16][i] = ep_ref_encode(EP_FP16, number[i]);
        number_code[EP_FP32][i] = ep_ref_encode(EP_FP32, number[i]);
    }
    for (uint32_t code = 0; code < 256; code++)
        e4m3[code] = ep_ref_decode(EP_FP8_E4M3, &code);
}

static enum bench_stream stream_of(const struct inputs *inputs)
{
    return inputs->pass == BENCH_BACKWARD ? STREAM_GRADIENT : STREAM_TOKEN;
}

/* 16 random bits for each of the row's elements, four at a time. */
static uint64_t four(const struct inputs *inputs, uint32_t rank, uint32_t token, uint32_t column)
{
    return bench_hash(inputs->seed, stream_of(inputs), rank, token, column / 4);
}

static uint32_t number_of(uint64_t bits, uint32_t column)
{
    return (uint32_t)(bits >> 16 * (column % 4)) & (NUMBERS - 1);
}

static uint8_t e4m3_of(uint64_t bits, uint32_t column)
{
    uint8_t code = (uint8_t)(bits >> 16 * (column % 4));

    return (code & 0x7f) == 0x7f ? code ^ 1 : code; /* 448 instead of NaN */
}

static bool powers(const struct inputs *inputs)
{
    return inputs->of.scales == EP_SCALE_UE8M0;
}

static float scale_of(const struct inputs *inputs, uint32_t rank, uint32_t token, uint32_t block)
{
    enum bench_stream stream = inputs->pass == BENCH_BACKWARD ? STREAM_GRADIENT_SCALE : STREAM_SCALE;
    uint64_t bits = bench_hash(inputs->seed, stream, rank, token, block);
    double mantissa = powers(inputs) ? 1.0 : 1.0 + (double)(bits & 0xffff) / 65536.0;

    return (float)ldexp(mantissa, -6 - (int)(bits >> 16 & 7));
}

static void fp8_row(const struct inputs *inputs, uint32_t rank, uint32_t token, uint8_t *row, void *scales)
{
    uint64_t bits = 0;

    for (uint32_t h = 0; h < inputs->hidden; h++) {
        if (h % 4 == 0)
            bits = four(inputs, rank, token, h);
        row[h] = e4m3_of(bits, h);
    }
    for (uint32_t b = 0; b < inputs->scales; b++) {
        float scale = scale_of(inputs, rank, token, b);

        if (powers(inputs))
            ((uint8_t *)scales)[b] = (uint8_t)(127 + ilogbf(scale));
        else
            ((float *)scales)[b] = scale;
    }
}

static void number_row(const struct inputs *inputs, enum bench_stream stream, ep_dtype dtype, uint32_t rank,
                       uint32_t token, void *row)
{
    uint64_t bits = 0;

    for (uint32_t h = 0; h < inputs->hidden; h++) {
        if (h % 4 == 0)
            bits = bench_hash(inputs->seed, stream, rank, token, h / 4);

        uint32_t code = number_code[dtype][number_of(bits, h)];

        if (dtype == EP_FP32)
            ((uint32_t *)row)[h] = code;
        else
            ((uint16_t *)row)[h] = (uint16_t)code;
    }
}

void inputs_row(const struct inputs *inputs, uint32_t rank, uint32_t token, void *row, void *scales)
{
    ep_dtype dtype = bench_dtypes[inputs->of.dtype].input;

    if (dtype == EP_FP8_E4M3)
        fp8_row(inputs, rank, token, row, scales);
    else
        number_row(inputs, stream_of(inputs), dtype, rank, token, row);
}

bool inputs_biased(const struct inputs *inputs)
{
    return inputs->config->bias && inputs->pass == BENCH_FORWARD;
}

void inputs_bias(const struct inputs *inputs, uint32_t rank, uint32_t token, void *row)
{
    number_row(inputs, STREAM_ROW_BIAS, bench_dtypes[inputs->of.dtype].combine, rank, token, row);
}

void inputs_values(const struct inputs *inputs, uint32_t rank, uint32_t token, double *values)
{
    bool fp8 = bench_dtypes[inputs->of.dtype].input == EP_FP8_E4M3;
    uint64_t bits = 0;

    for (uint32_t h = 0; h < inputs->hidden; h++) {
        if (h % 4 == 0)
            bits = four(inputs, rank, token, h);
        values[h] = fp8 ? e4m3[e4m3_of(bits, h)] : number[number_of(bits, h)];
    }
    for (uint32_t b = 0; fp8 && b < inputs->scales; b++) {
        double scale = (double)scale_of(inputs, rank, token, b);

        for (uint32_t h = b * EP_FP8_BLOCK; h < inputs->hidden && h < (b + 1) * EP_FP8_BLOCK; h++)
            values[h] *= scale;
    }
}

double inputs_expert(uint32_t expert)
{
    double mantissa = 1 + (double)(expert * 5 % 16) / 16 + (double)(expert / 128 % 8) / 128;

    return ldexp(expert / 16 % 2 ? -mantissa : mantissa, (int)(expert / 32 % 4) - 1);
}

static uint32_t scales_of(const struct bench_config *config)
{
    return (config->hidden + EP_FP8_BLOCK - 1) / EP_FP8_BLOCK;
}

size_t inputs_scale_bytes(const struct bench_config *config, const struct bench_case *of)
{
    return (size_t)scales_of(config) * ep_ref_scale_bytes(of->scales);
}

/* ---- routes --------------------------------------------------------------------- */

uint32_t inputs_tokens(const struct bench_config *config, const struct bench_case *of, uint32_t rank)
{
    return (int32_t)rank == config->zero_rank ? 0 : of->tokens;
}

/* One choice of 16 is of no expert there is, one names the token's first expert again. */
static void make_odd(const struct bench_config *config, uint64_t seed, uint32_t rank, uint32_t token,
                     int64_t *topk)
{
    for (uint32_t j = 0; j < config->top_k; j++) {
        uint64_t hash = bench_hash(seed, STREAM_SOAK_ODD, rank, token, j);

        if (hash % 16 == 0)
            topk[j] = (int64_t)config->experts + (int64_t)(hash >> 8 & 3);
        else if (hash % 16 == 1)
            topk[j] = topk[0];
    }
}

static bool choose(const struct bench_config *config, const struct routing *routing, uint32_t number_of_rank,
                   uint64_t odd, struct ep_ref_rank *rank)
{
    const uint32_t top_k = config->top_k;
    size_t choices = (size_t)rank->tokens * top_k + 1;
    int64_t *topk = malloc(choices * sizeof *topk);
    float *weights = malloc(choices * sizeof *weights);

    rank->topk = topk;
    rank->weights = weights;
    if (!topk || !weights)
        return false;
    for (uint32_t t = 0; t < rank->tokens; t++) {
        routing_token(routing, number_of_rank, t, topk + (size_t)t * top_k, weights + (size_t)t * top_k);
        if (odd)
            make_odd(config, odd, number_of_rank, t, topk + (size_t)t * top_k);
    }
    return true;
}

ep_status inputs_open_varied(const struct bench_config *config, const struct bench_case *of,
                             const struct routing *routing, const struct inputs_variety *variety,
                             struct inputs *out, struct ep_error *error)
{
    bool ok = true;

    pthread_once(&tables_once, fill_tables);
    *out = (struct inputs){ .config = config,
                            .of = *of,
                            .seed = variety->seed,
                            .hidden = config->hidden,
                            .scales = scales_of(config),
                            .scale_bytes = inputs_scale_bytes(config, of) };
    out->rank = calloc(config->ranks, sizeof *out->rank);
    for (uint32_t r = 0; out->rank && ok && r < config->ranks; r++) {
        out->layout[r] = variety->layout[r];
        out->rank[r].present = true;
        out->rank[r].tokens = variety->tokens[r];
        ok = choose(config, routing, r, variety->odd, &out->rank[r]);
    }
    if (!out->rank || !ok) {
        inputs_close(out);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the routes of %u ranks", config->ranks);
    }
    out->routing = (struct ep_ref_routing){
        .ranks = config->ranks,
        .experts = config->experts,
        .top_k = config->top_k,
        .n_homes = config->n_homes,
        .homes = config->homes,
        .rank = out->rank,
    };
    return EP_OK;
}

ep_status inputs_open(const struct bench_config *config, const struct bench_case *of,
                      const struct routing *routing, struct inputs *out, struct ep_error *error)
{
    uint32_t tokens[BENCH_MAX_RANKS];
    ep_layout layout[BENCH_MAX_RANKS];

    for (uint32_t r = 0; r < config->ranks; r++) {
        tokens[r] = inputs_tokens(config, of, r);
        layout[r] = of->layout;
    }
    return inputs_open_varied(config, of, routing,
                              &(struct inputs_variety){ config->seed, tokens, layout, 0 }, out, error);
}

void inputs_close(struct inputs *inputs)
{
    for (uint32_t r = 0; inputs->rank && r < inputs->config->ranks; r++) {
        free((void *)inputs->rank[r].topk);
        free((void *)inputs->rank[r].weights);
    }
    free(inputs->rank);
    memset(inputs, 0, sizeof *inputs);
}
