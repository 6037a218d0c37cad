#include "routing_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench_hash.h"

enum { MAX_EXPERTS = 65536, GROUPS = 8 };

/* ---- the flag ------------------------------------------------------------------- */

static const struct {
    const char *name;
    enum routing_kind kind;
    const char *argument; /* what follows the colon; NULL: nothing */
} kinds[] = {
    { "uniform", ROUTING_UNIFORM, NULL }, { "zipf", ROUTING_ZIPF, "an exponent" },
    { "hot", ROUTING_HOT, "an expert" },  { "deepseek-v3", ROUTING_DEEPSEEK, NULL },
    { "text", ROUTING_TEXT, "a file" },   { "trace", ROUTING_TRACE, "a file" },
};

static ep_status parse_argument(const char *argument, struct routing_spec *spec, struct ep_error *error)
{
    char *end = NULL;

    errno = 0;
    if (spec->kind == ROUTING_ZIPF) {
        spec->exponent = strtod(argument, &end);
        if (end == argument || *end || !(spec->exponent >= 0 && spec->exponent <= 10))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "zipf:%s: the exponent must be 0 to 10",
                                argument);
    } else if (spec->kind == ROUTING_HOT) {
        unsigned long value = strtoul(argument, &end, 10);

        if (end == argument || *end || *argument == '-' || errno || value >= MAX_EXPERTS)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "hot:%s: must be the number of an expert",
                                argument);
        spec->hot = (uint32_t)value;
    } else if (strlen(argument) >= sizeof spec->file) {
        return ep_error_set(error, EP_INVALID_ARGUMENT, "the file's path is longer than %zu bytes",
                            sizeof spec->file - 1);
    } else {
        memcpy(spec->file, argument, strlen(argument) + 1);
    }
    return EP_OK;
}

ep_status routing_parse(const char *text, struct routing_spec *spec, struct ep_error *error)
{
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);

    memset(spec, 0, sizeof *spec);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strlen(kinds[i].name) != length || memcmp(kinds[i].name, text, length) != 0)
            continue;
        spec->kind = kinds[i].kind;
        if (kinds[i].argument && (!colon || !colon[1]))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s needs %s: %s:...", kinds[i].name,
                                kinds[i].argument, kinds[i].name);
        if (!kinds[i].argument && colon)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s takes no argument", kinds[i].name);
        return kinds[i].argument ? parse_argument(colon + 1, spec, error) : EP_OK;
    }
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "%s is no routing: use uniform, zipf:S, hot:E, deepseek-v3, text:FILE or trace:FILE",
                        text);
}

/* ---- picking -------------------------------------------------------------------- */

static bool taken(const int64_t *topk, uint32_t n, int64_t expert)
{
    for (uint32_t j = 0; j < n; j++)
        if (topk[j] == expert)
            return true;
    return false;
}

/* Different experts for choices from `done` on, by drawing again what is taken already (k <= E). */
static void pick_rest(const struct routing *routing, uint32_t rank, uint32_t token, uint32_t done,
                      int64_t *topk)
{
    uint64_t seed = routing->shape.seed;
    uint32_t draw = 0;

    for (uint32_t j = done; j < routing->shape.top_k; draw++) {
        uint64_t hash = bench_hash(seed, STREAM_PICK, rank, token, draw);
        int64_t expert = bench_below(hash, routing->shape.experts);

        if (!taken(topk, j, expert))
            topk[j++] = expert;
    }
}

/* Random ones that add up to 1. */
static void weigh(const struct routing *routing, uint32_t rank, uint32_t token, float *weights)
{
    double raw[EP_MAX_TOP_K], sum = 0;

    for (uint32_t j = 0; j < routing->shape.top_k; j++) {
        raw[j] = 0.25 + bench_unit(bench_hash(routing->shape.seed, STREAM_WEIGHT, rank, token, j));
        sum += raw[j];
    }
    for (uint32_t j = 0; j < routing->shape.top_k; j++)
        weights[j] = (float)(raw[j] / sum);
}

static void pick_uniform(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                         float *weights)
{
    pick_rest(routing, rank, token, 0, topk);
    weigh(routing, rank, token, weights);
}

static void pick_hot(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                     float *weights)
{
    topk[0] = routing->spec.hot;
    pick_rest(routing, rank, token, 1, topk);
    weigh(routing, rank, token, weights);
}

/* The k largest of score[n] that `usable` allows, best first.  Plain selection: k is small. */
static void best_of(const double *score, const bool *usable, uint32_t n, uint32_t k, int64_t *topk)
{
    for (uint32_t j = 0; j < k; j++) {
        int64_t best = -1;

        for (uint32_t e = 0; e < n; e++)
            if ((!usable || usable[e]) && !taken(topk, j, e) && (best < 0 || score[e] > score[best]))
                best = e;
        topk[j] = best;
    }
}

/* Drawing without putting back: the k largest of log odds + Gumbel noise. */
static void pick_zipf(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                      float *weights)
{
    uint32_t experts = routing->shape.experts;
    double *key = malloc(experts * sizeof *key);

    if (!key) {
        pick_uniform(routing, rank, token, topk, weights);
        return;
    }
    for (uint32_t e = 0; e < experts; e++) {
        double u = bench_unit(bench_hash(routing->shape.seed, STREAM_PICK, rank, token, e));

        key[e] = routing->log_odds[e] - log(-log(u));
    }
    best_of(key, NULL, experts, routing->shape.top_k, topk);
    weigh(routing, rank, token, weights);
    free(key);
}

/* About normal, mean 0, variance 1: four 16-bit uniforms. */
static double normal(uint64_t hash)
{
    double sum = 0;

    for (int i = 0; i < 4; i++)
        sum += (double)(hash >> 16 * i & 0xffff) / 65536.0;
    return (sum - 2) * 1.7320508075688772;
}

static double group_score(const double *biased, uint32_t first, uint32_t n)
{
    double best = -INFINITY, second = -INFINITY;

    for (uint32_t e = first; e < first + n; e++) {
        if (biased[e] > best) {
            second = best;
            best = biased[e];
        } else if (biased[e] > second) {
            second = biased[e];
        }
    }
    return n > 1 ? best + second : best;
}

static void keep_groups(const struct routing *routing, const double *biased, bool *usable)
{
    uint32_t size = routing->shape.experts / routing->groups;
    double score[GROUPS] = { 0 };
    int64_t kept[GROUPS];

    for (uint32_t g = 0; g < routing->groups; g++)
        score[g] = group_score(biased, g * size, size);
    best_of(score, NULL, routing->groups, routing->kept, kept);
    for (uint32_t e = 0; e < routing->shape.experts; e++)
        usable[e] = taken(kept, routing->kept, e / size);
}

static void pick_deepseek(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                          float *weights)
{
    uint32_t experts = routing->shape.experts, k = routing->shape.top_k;
    double *score = malloc(2 * (size_t)experts * sizeof *score), sum = 0;
    bool *usable = malloc(experts * sizeof *usable);

    if (score && usable) {
        double *biased = score + experts;

        for (uint32_t e = 0; e < experts; e++) {
            double logit = normal(bench_hash(routing->shape.seed, STREAM_SCORE, rank, token, e));

            score[e] = 1 / (1 + exp(-logit));
            biased[e] = score[e] + 0.1 * normal(bench_hash(routing->shape.seed, STREAM_BIAS, 0, 0, e));
        }
        keep_groups(routing, biased, usable);
        best_of(biased, usable, experts, k, topk);
        for (uint32_t j = 0; j < k; j++)
            sum += score[topk[j]];
        for (uint32_t j = 0; j < k; j++)
            weights[j] = (float)(2.5 * score[topk[j]] / sum);
    } else {
        pick_uniform(routing, rank, token, topk, weights);
    }
    free(score);
    free(usable);
}

/* ---- opening -------------------------------------------------------------------- */

static ep_status open_zipf(struct routing *routing, struct ep_error *error)
{
    routing->log_odds = malloc(routing->shape.experts * sizeof *routing->log_odds);
    if (!routing->log_odds)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u experts", routing->shape.experts);
    for (uint32_t e = 0; e < routing->shape.experts; e++)
        routing->log_odds[e] = -routing->spec.exponent * log(e + 1.0);
    routing->pick = pick_zipf;
    return EP_OK;
}

static void open_deepseek(struct routing *routing)
{
    uint32_t experts = routing->shape.experts;

    routing->groups = GROUPS;
    while (experts % routing->groups != 0)
        routing->groups--;
    routing->kept = (routing->groups + 1) / 2;
    while (routing->kept * (experts / routing->groups) < routing->shape.top_k)
        routing->kept++;
    routing->pick = pick_deepseek;
}

static ep_status open_trace(struct routing *routing, struct ep_error *error)
{
    const struct routing_shape *shape = &routing->shape;
    ep_status status = routing_trace_load(routing->spec.file, &routing->trace, error);

    if (status != EP_OK)
        return status;
    if (routing->trace.experts != shape->experts || routing->trace.top_k != shape->top_k)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "%s has experts %u and top_k %u, asked for are %u and %u", routing->spec.file,
                            routing->trace.experts, routing->trace.top_k, shape->experts, shape->top_k);
    routing->pick = routing_trace_pick;
    return EP_OK;
}

static ep_status open_kind(struct routing *routing, struct ep_error *error)
{
    switch (routing->spec.kind) {
    case ROUTING_UNIFORM: routing->pick = pick_uniform; return EP_OK;
    case ROUTING_ZIPF: return open_zipf(routing, error);
    case ROUTING_HOT:
        routing->pick = pick_hot;
        if (routing->spec.hot >= routing->shape.experts)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "hot:%u: there are %u experts", routing->spec.hot,
                                routing->shape.experts);
        return EP_OK;
    case ROUTING_DEEPSEEK: open_deepseek(routing); return EP_OK;
    case ROUTING_TEXT:
        routing->pick = routing_text_pick;
        return routing_text_load(routing->spec.file, &routing->text, error);
    case ROUTING_TRACE: return open_trace(routing, error);
    }
    return ep_error_set(error, EP_INTERNAL, "unknown kind of routing %d", (int)routing->spec.kind);
}

static ep_status check_shape(const struct routing_shape *shape, struct ep_error *error)
{
    if (shape->experts == 0 || shape->experts > MAX_EXPERTS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "experts is %u: must be 1 to %d", shape->experts,
                            MAX_EXPERTS);
    if (shape->top_k == 0 || shape->top_k > EP_MAX_TOP_K || shape->top_k > shape->experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "top_k is %u: must be 1 to %d and at most the %u experts", shape->top_k,
                            EP_MAX_TOP_K, shape->experts);
    return EP_OK;
}

ep_status routing_open(const struct routing_spec *spec, const struct routing_shape *shape,
                       struct routing **out, struct ep_error *error)
{
    ep_status status = check_shape(shape, error);

    if (status != EP_OK)
        return status;

    struct routing *routing = calloc(1, sizeof *routing);

    if (!routing)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the routing");
    routing->spec = *spec;
    routing->shape = *shape;
    status = open_kind(routing, error);
    if (status != EP_OK) {
        routing_close(routing);
        return status;
    }
    *out = routing;
    return EP_OK;
}

void routing_close(struct routing *routing)
{
    if (!routing)
        return;
    free(routing->log_odds);
    routing_text_free(&routing->text);
    routing_trace_free(&routing->trace);
    free(routing);
}

void routing_token(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                   float *weights)
{
    routing->pick(routing, rank, token, topk, weights);
    for (uint32_t j = 0; routing->shape.drop > 0 && j < routing->shape.top_k; j++)
        if (bench_unit(bench_hash(routing->shape.seed, STREAM_DROP, rank, token, j)) < routing->shape.drop)
            topk[j] = -1;
}

void routing_reseed(struct routing *routing, uint64_t seed, double drop)
{
    routing->shape.seed = seed;
    routing->shape.drop = drop;
}
