/*
 * The host team: one thread per rank, windows that are plain mappings.
 *
 * Values are chosen so that every format holds them exactly: small integers times weights that are
 * quarters.  Expectations are worked out here from all ranks' inputs, token by token.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ep_clock.h"
#include "ep_kernels.h"

#define MAX_R 8u
#define MAX_T 16u
#define MAX_K 4u
#define HIDDEN 272u /* two whole fp8 blocks and a piece, one whole chunk of a sum and a piece */
#define LL_TOKENS 8u
#define HT_TOKENS 12u

/* Runs in any thread, where cmocka's assertions may not. */
#define CHECK(condition, ...)                                                        \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);          \
            fprintf(stderr, __VA_ARGS__);                                            \
            fprintf(stderr, "\n");                                                   \
            abort();                                                                 \
        }                                                                            \
    } while (0)

/* ---- fixture ------------------------------------------------------------------------- */

struct fixture {
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_host_team *team;
    uint8_t *window[MAX_R];
    uint64_t used[MAX_R]; /* of the arena */
    uint32_t R, E, L, K;
};

static struct fixture *fixture_new(uint32_t ranks, bool replicas, uint32_t timeout_ms)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct ep_limits limits = { .ranks = ranks, .experts = ranks * 2 + 3, .top_k = MAX_K, .hidden = HIDDEN,
                                .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
                                .dtypes = 1u << EP_BF16 | 1u << EP_FP16 | 1u << EP_FP32 | 1u << EP_FP8_E4M3,
                                .ll_max_tokens = LL_TOKENS, .ht_max_tokens = HT_TOKENS, .ll_banks = 2,
                                .arena_bytes = 8u << 20 };
    struct ep_error error = EP_ERROR_INIT;

    f->R = ranks;
    f->E = limits.experts;
    f->K = MAX_K;
    if (replicas) {
        struct ep_expert_home homes[64];
        uint32_t n = 0;

        for (uint32_t e = 0; e < f->E; e++)
            for (uint32_t c = 0; c <= e % 2 && c < ranks; c++)
                homes[n++] = (struct ep_expert_home){ e, (e + c) % ranks };
        CHECK(ep_placement_explicit(ranks, f->E, homes, n, &f->placement, &error) == EP_OK, "%s", error.text);
    } else {
        CHECK(ep_placement_contiguous(ranks, f->E, &f->placement, &error) == EP_OK, "%s", error.text);
    }
    limits.local_experts = f->L = f->placement.max_local;
    CHECK(ep_layout_compute(&limits, &f->map, &error) == EP_OK, "%s", error.text);
    CHECK(ep_host_team_create(&f->map, &f->placement, timeout_ms, &f->team, &error) == EP_OK, "%s", error.text);
    for (uint32_t r = 0; r < ranks; r++) {
        f->window[r] = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(f->window[r] != MAP_FAILED, "mmap");
        ep_host_team_set_window(f->team, r, f->window[r]);
    }
    return f;
}

static void fixture_free(struct fixture *f)
{
    ep_host_team_destroy(f->team);
    for (uint32_t r = 0; r < f->R; r++)
        munmap(f->window[r], f->map.total_bytes);
    ep_placement_free(&f->placement);
    free(f);
}

static struct ep_span take(struct fixture *f, uint32_t r, uint64_t bytes)
{
    struct ep_span span = { f->map.arena + f->used[r], bytes };

    f->used[r] += (bytes + 255) / 256 * 256;
    CHECK(f->used[r] <= f->map.limits.arena_bytes, "arena");
    return span;
}

static void *at(struct fixture *f, uint32_t r, struct ep_span span) { return f->window[r] + span.offset; }

typedef void (*rank_fn)(struct fixture *f, uint32_t rank, void *arg);

struct thread {
    pthread_t id;
    struct fixture *f;
    uint32_t rank;
    rank_fn fn;
    void *arg;
};

static void *thread_main(void *p)
{
    struct thread *t = p;

    t->fn(t->f, t->rank, t->arg);
    return NULL;
}

static void start(struct thread *t, struct fixture *f, uint32_t rank, rank_fn fn, void *arg)
{
    *t = (struct thread){ .f = f, .rank = rank, .fn = fn, .arg = arg };
    CHECK(pthread_create(&t->id, NULL, thread_main, t) == 0, "thread");
}

static void parallel(struct fixture *f, rank_fn fn, void *arg)
{
    struct thread threads[MAX_R];

    for (uint32_t r = 0; r < f->R; r++)
        start(&threads[r], f, r, fn, arg);
    for (uint32_t r = 0; r < f->R; r++)
        pthread_join(threads[r].id, NULL);
}

static ep_status execute(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result)
{
    struct ep_error error = EP_ERROR_INIT;

    CHECK(ep_op_check(&f->map, op, &error) == EP_OK, "%s", error.text);
    ep_host_execute(f->team, r, op, result);
    CHECK((result->status == EP_OK) == (result->text[0] == '\0'), "status %d, text '%s'", result->status,
          result->text);
    return (ep_status)result->status;
}

static void must(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result)
{
    ep_status status = execute(f, r, op, result);

    CHECK(status == EP_OK, "rank %u: %s: %s", r, ep_status_name(status), result->text);
}

/* ---- formats: of numbers that they hold exactly ------------------------------------------ */

static uint32_t float_bits(float v)
{
    uint32_t u;

    memcpy(&u, &v, sizeof u);
    return u;
}

/* Sign, exponent and fraction, by way of frexp: for bf16 (8, 7), fp16 (5, 10), e4m3 (4, 3). */
static uint32_t pack_float(double v, int exponent_bits, int fraction_bits)
{
    int e, bias = (1 << (exponent_bits - 1)) - 1;
    double m = frexp(fabs(v), &e);
    uint32_t sign = v < 0 ? 1u << (exponent_bits + fraction_bits) : 0;

    if (v == 0)
        return 0;
    return sign | (uint32_t)(e - 1 + bias) << fraction_bits | (uint32_t)((2 * m - 1) * (1 << fraction_bits));
}

static double unpack_float(uint32_t u, int exponent_bits, int fraction_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1, e = (int)(u >> fraction_bits & ((1u << exponent_bits) - 1));
    double m = u & ((1u << fraction_bits) - 1);
    double v = e ? ldexp(m + (1 << fraction_bits), e - bias - fraction_bits) : ldexp(m, 1 - bias - fraction_bits);

    return u >> (exponent_bits + fraction_bits) & 1 ? -v : v;
}

static void put(ep_dtype d, void *row, uint32_t h, double v)
{
    switch (d) {
    case EP_BF16: ((uint16_t *)row)[h] = (uint16_t)pack_float(v, 8, 7); break;
    case EP_FP16: ((uint16_t *)row)[h] = (uint16_t)pack_float(v, 5, 10); break;
    case EP_FP32: ((float *)row)[h] = (float)v; break;
    case EP_FP8_E4M3: ((uint8_t *)row)[h] = (uint8_t)pack_float(v, 4, 3); break;
    }
}

static double get(ep_dtype d, const void *row, uint32_t h)
{
    switch (d) {
    case EP_BF16: return unpack_float(((const uint16_t *)row)[h], 8, 7);
    case EP_FP16: return unpack_float(((const uint16_t *)row)[h], 5, 10);
    case EP_FP32: return (double)((const float *)row)[h];
    case EP_FP8_E4M3: return unpack_float(((const uint8_t *)row)[h], 4, 3);
    }
    return 0;
}

static uint32_t row_bytes(ep_dtype d) { return HIDDEN * ep_dtype_bytes(d); }

/* ---- inputs and what follows from them -------------------------------------------------- */

static double x_value(uint32_t r, uint32_t t, uint32_t h) { return (double)((r * 5 + t * 3 + h) % 13) - 6.0; }

struct inputs {
    uint32_t tokens[MAX_R], k;
    int64_t topk[MAX_R][MAX_T][MAX_K];
    float weight[MAX_R][MAX_T][MAX_K];
    bool weights;
};

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 16;
}

static void random_inputs(struct fixture *f, struct inputs *in, uint32_t max_tokens, uint32_t seed)
{
    memset(in, 0, sizeof *in);
    in->k = 1 + next_random(&seed) % f->K;
    in->weights = next_random(&seed) % 4 != 0;
    for (uint32_t r = 0; r < f->R; r++) {
        in->tokens[r] = next_random(&seed) % 4 == 0 ? 0 : next_random(&seed) % (max_tokens + 1);
        for (uint32_t t = 0; t < in->tokens[r]; t++)
            for (uint32_t j = 0; j < in->k; j++) {
                uint32_t dice = next_random(&seed) % 12;

                in->topk[r][t][j] = dice == 0 ? -1 : dice == 1 ? (int64_t)f->E + 7 : dice == 2 ? -5
                                  : dice == 3 && j > 0 ? in->topk[r][t][j - 1]
                                                       : (int64_t)(next_random(&seed) % f->E);
                in->weight[r][t][j] = in->weights ? 0.25f * (float)(1 + next_random(&seed) % 4) : 1.0f;
            }
    }
}

/* Home of choice j; false when it goes nowhere. */
static bool home(struct fixture *f, const struct inputs *in, uint32_t s, uint32_t t, uint32_t j, uint32_t *rank,
                 uint32_t *local)
{
    int64_t e = in->topk[s][t][j];
    uint32_t first, n;

    if (e < 0 || e >= (int64_t)f->E)
        return false;
    first = f->placement.first[e];
    n = f->placement.first[e + 1] - first;
    *rank = f->placement.rank[first + (s + t) % n];
    *local = f->placement.local[first + (s + t) % n];
    return true;
}

/* locals[j] of token (s, t) at rank d. */
static bool routes_at(struct fixture *f, const struct inputs *in, uint32_t d, uint32_t s, uint32_t t,
                      int32_t *locals)
{
    bool any = false;

    for (uint32_t j = 0; j < in->k; j++) {
        uint32_t rank, local;

        locals[j] = home(f, in, s, t, j, &rank, &local) && rank == d ? (int32_t)local : -1;
        any = any || locals[j] >= 0;
    }
    return any;
}

static bool names(const int32_t *locals, uint32_t k, uint32_t l)
{
    for (uint32_t j = 0; j < k; j++)
        if (locals[j] == (int32_t)l)
            return true;
    return false;
}

/* ---- one configuration --------------------------------------------------------------------- */

struct config {
    ep_mode mode;
    ep_layout layout;
    ep_dtype input, wire, combine;
    ep_scale_format scales;
    uint32_t alignment, index_bytes, seed;
    bool send_only, cached, bias, grads, in_place;
    struct inputs in;
    struct ep_op dispatch[MAX_R], comb[MAX_R];
    struct ep_op_result dispatched[MAX_R];
};

/* The scales that are given: 1, 2 and 3, or 2^0, 2^1 and 2^2. */
static void put_scale(const struct config *c, void *scales, uint32_t at, uint32_t which)
{
    if (c->scales == EP_SCALE_UE8M0)
        ((uint8_t *)scales)[at] = (uint8_t)(127 + which);
    else
        ((float *)scales)[at] = (float)(1 + which);
}

static double get_scale(const struct config *c, const void *scales, uint32_t at)
{
    return c->scales == EP_SCALE_UE8M0 ? ldexp(1, ((const uint8_t *)scales)[at] - 127)
                                       : (double)((const float *)scales)[at];
}

static uint64_t scale_bytes(const struct config *c)
{
    return ep_row_scales(HIDDEN) * (c->scales == EP_SCALE_UE8M0 ? 1 : 4);
}

static void fill_x(struct fixture *f, uint32_t r, const struct config *c, struct ep_op *op)
{
    for (uint32_t t = 0; t < op->tokens; t++) {
        uint8_t *row = (uint8_t *)at(f, r, op->x) + (size_t)t * row_bytes(c->input);

        for (uint32_t h = 0; h < HIDDEN; h++)
            put(c->input, row, h, x_value(r, t, h));
        for (uint32_t b = 0; c->input == EP_FP8_E4M3 && b < ep_row_scales(HIDDEN); b++)
            put_scale(c, at(f, r, op->x_scales), t * ep_row_scales(HIDDEN) + b, (r + t + b) % 3);
    }
}

static void fill_topk(struct fixture *f, uint32_t r, const struct inputs *in, const struct ep_op *op)
{
    for (uint32_t t = 0; t < op->tokens; t++)
        for (uint32_t j = 0; j < in->k; j++) {
            if (op->index_bytes == 8)
                ((int64_t *)at(f, r, op->topk_idx))[t * in->k + j] = in->topk[r][t][j];
            else
                ((int32_t *)at(f, r, op->topk_idx))[t * in->k + j] = (int32_t)in->topk[r][t][j];
            if (in->weights)
                ((float *)at(f, r, op->topk_weights))[t * in->k + j] = in->weight[r][t][j];
        }
}

static uint64_t most_rows(struct fixture *f, const struct config *c)
{
    uint64_t slots = (uint64_t)f->R * (c->mode == EP_MODE_LL ? LL_TOKENS : HT_TOKENS);

    switch (c->layout) {
    case EP_LAYOUT_EXPERT_MAJOR: return slots * f->L;
    case EP_LAYOUT_PACKED: return slots * f->K + (uint64_t)f->L * c->alignment;
    default: return slots;
    }
}

static void build_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op)
{
    uint64_t rows = most_rows(f, c), t = c->in.tokens[r], k = c->in.k;
    bool by_expert = c->layout == EP_LAYOUT_EXPERT_MAJOR || c->layout == EP_LAYOUT_PACKED;

    *op = (struct ep_op){ .kind = EP_OP_DISPATCH, .mode = c->mode, .layout = c->layout, .input_dtype = c->input,
                          .wire_dtype = c->wire, .scale_format = c->scales, .tokens = (uint32_t)t, .top_k = (uint32_t)k,
                          .index_bytes = c->index_bytes, .alignment = c->alignment, .handle = handle,
                          .generation = 7, .flags = c->send_only ? EP_OP_SEND_ONLY : 0 };
    op->x = take(f, r, t * row_bytes(c->input));
    if (c->input == EP_FP8_E4M3)
        op->x_scales = take(f, r, t * scale_bytes(c));
    op->topk_idx = take(f, r, t * k * c->index_bytes);
    if (c->in.weights)
        op->topk_weights = take(f, r, t * k * 4);
    if (c->layout != EP_LAYOUT_RANK_MAJOR) {
        op->out = take(f, r, rows * row_bytes(c->wire));
        if (c->wire == EP_FP8_E4M3)
            op->out_scales = take(f, r, rows * scale_bytes(c));
    }
    op->counts = take(f, r, 4ull * (by_expert ? f->L : f->R));
    if (c->layout == EP_LAYOUT_PACKED)
        op->offsets = take(f, r, 4ull * (f->L + 1));
    if (!by_expert) {
        op->out_topk = take(f, r, rows * k * 4);
        op->out_weights = take(f, r, rows * k * 4);
    }
    op->sources = take(f, r, rows * sizeof(struct ep_source));
    if (op->out.bytes)
        memset(at(f, r, op->out), 0x5a, op->out.bytes);
    fill_x(f, r, c, op);
    fill_topk(f, r, &c->in, op);
}

/* ---- what a dispatch gave --------------------------------------------------------------------- */

static double scale_of_input(const struct config *c, uint32_t s, uint32_t t, uint32_t h)
{
    uint32_t which = (s + t + h / EP_FP8_BLOCK) % 3;

    if (c->input != EP_FP8_E4M3)
        return 1.0;
    return c->scales == EP_SCALE_UE8M0 ? ldexp(1, (int)which) : 1 + which;
}

/* Every block has a 6, so that 2^-6, which reaches 7, is its power of two. */
static void check_row(struct fixture *f, const struct config *c, const uint8_t *row, const void *scales,
                      uint32_t s, uint32_t t)
{
    bool quantised = c->wire == EP_FP8_E4M3 && c->input != EP_FP8_E4M3, powers = c->scales == EP_SCALE_UE8M0;

    (void)f;
    for (uint32_t h = 0; h < HIDDEN; h++) {
        double want = x_value(s, t, h) * scale_of_input(c, s, t, h);
        double scale = scales ? get_scale(c, scales, h / EP_FP8_BLOCK) : 1.0;
        double have = get(c->wire, row, h) * scale;
        double slack = !quantised ? 0 : powers ? 7.0 / 28 : 6.0 / 28 + 1e-5;

        CHECK(!quantised || !powers || scale == 0x1p-6, "scale of (%u, %u) at %u: %g", s, t, h, scale);
        CHECK(fabs(have - want) <= slack, "row of (%u, %u) at %u: %g, not %g", s, t, h, have, want);
    }
}

static const void *scale_row(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                             uint64_t row)
{
    return op->out_scales.bytes ? (const uint8_t *)at(f, d, op->out_scales) + row * scale_bytes(c) : NULL;
}

static const uint8_t *out_row(struct fixture *f, uint32_t d, const struct ep_op *op, uint64_t row)
{
    return (const uint8_t *)at(f, d, op->out) + row * row_bytes((ep_dtype)op->wire_dtype);
}

static void check_source(struct fixture *f, uint32_t d, const struct ep_op *op, uint64_t row, uint32_t s, uint32_t t)
{
    const struct ep_source *source = (const struct ep_source *)at(f, d, op->sources) + row;

    CHECK(source->rank == s && source->token == t, "source of row %llu", (unsigned long long)row);
}

static void check_padding(struct fixture *f, uint32_t d, const struct ep_op *op, uint64_t row)
{
    const uint8_t *bytes = out_row(f, d, op, row);

    for (uint32_t i = 0; i < row_bytes((ep_dtype)op->wire_dtype); i++)
        CHECK(bytes[i] == 0, "padding row %llu", (unsigned long long)row);
}

static void check_by_expert(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                            const struct ep_op_result *result)
{
    const int32_t *counts = at(f, d, op->counts), *offsets = op->offsets.bytes ? at(f, d, op->offsets) : NULL;
    uint64_t next = 0, total = 0;
    int32_t locals[MAX_K];

    for (uint32_t l = 0; l < f->L; l++) {
        uint64_t first = offsets ? next : (uint64_t)l * f->R * LL_TOKENS;

        if (offsets)
            CHECK((uint64_t)offsets[l] == first, "offset of %u: %d, not %llu", l, offsets[l], (unsigned long long)first);
        next = first;
        for (uint32_t s = 0; s < f->R; s++)
            for (uint32_t t = 0; t < c->in.tokens[s]; t++)
                if (routes_at(f, &c->in, d, s, t, locals) && names(locals, c->in.k, l)) {
                    check_row(f, c, out_row(f, d, op, next), scale_row(f, c, d, op, next), s, t);
                    check_source(f, d, op, next++, s, t);
                }
        CHECK((uint64_t)counts[l] == next - first, "count of %u: %d", l, counts[l]);
        total += next - first;
        for (; offsets && next % c->alignment; next++, total++)
            check_padding(f, d, op, next);
    }
    if (offsets)
        CHECK((uint64_t)offsets[f->L] == next, "last offset");
    CHECK(result->rows == total, "rows %llu, not %llu", (unsigned long long)result->rows, (unsigned long long)total);
}

static void check_tables(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op, uint64_t row,
                         uint32_t s, uint32_t t, const int32_t *locals)
{
    const int32_t *topk = (const int32_t *)at(f, d, op->out_topk) + row * c->in.k;
    const float *weights = (const float *)at(f, d, op->out_weights) + row * c->in.k;

    for (uint32_t j = 0; j < c->in.k; j++) {
        CHECK(topk[j] == locals[j], "topk of row %llu", (unsigned long long)row);
        CHECK(float_bits(weights[j]) == float_bits(locals[j] < 0 ? 0.0f : c->in.weight[s][t][j]), "weight");
    }
    check_source(f, d, op, row, s, t);
}

static void check_by_source(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                            const struct ep_op_result *result)
{
    const int32_t *counts = at(f, d, op->counts);
    bool slots = c->layout == EP_LAYOUT_RANK_MAJOR;
    uint64_t next = 0, total = 0;
    int32_t locals[MAX_K];

    for (uint32_t s = 0; s < f->R; s++) {
        uint32_t n = 0;

        if (slots)
            next = (uint64_t)s * LL_TOKENS;
        for (uint32_t t = 0; t < c->in.tokens[s]; t++) {
            const uint8_t *row;
            const void *scales;

            if (!routes_at(f, &c->in, d, s, t, locals))
                continue;
            row = slots ? f->window[d] + result->view + s * result->view_stride + (size_t)n * row_bytes(c->wire)
                        : out_row(f, d, op, next);
            scales = slots ? (const void *)(f->window[d] + result->scales_view + s * result->scales_view_stride +
                                            (size_t)n * f->map.scales_bytes)
                           : scale_row(f, c, d, op, next);
            check_row(f, c, row, c->wire == EP_FP8_E4M3 ? scales : NULL, s, t);
            check_tables(f, c, d, op, next++, s, t, locals);
            n++;
        }
        CHECK((uint32_t)counts[s] == n, "count of source %u: %d, not %u", s, counts[s], n);
        total += n;
    }
    CHECK(result->rows == total, "rows");
}

static void check_numbers(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op_result *result)
{
    uint64_t bad = 0, remote = 0, row = row_bytes(c->wire);
    int32_t locals[MAX_K];

    if (c->wire == EP_FP8_E4M3)
        row += scale_bytes(c);
    for (uint32_t t = 0; t < c->in.tokens[r]; t++) {
        for (uint32_t j = 0; j < c->in.k; j++)
            bad += c->in.topk[r][t][j] < -1 || c->in.topk[r][t][j] >= (int64_t)f->E;
        for (uint32_t d = 0; d < f->R; d++)
            remote += d != r && routes_at(f, &c->in, d, r, t, locals);
    }
    CHECK(result->dropped == bad, "dropped %llu", (unsigned long long)result->dropped);
    CHECK(result->wire_bytes == remote * row, "wire bytes");
    CHECK(result->logical_bytes == (uint64_t)c->in.tokens[r] * c->in.k * row_bytes(c->wire), "logical bytes");
    CHECK(result->end_ns >= result->start_ns && result->wait_ns <= result->end_ns - result->start_ns, "times");
}

static void check_dispatch(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                           const struct ep_op_result *result)
{
    if (c->layout == EP_LAYOUT_EXPERT_MAJOR || c->layout == EP_LAYOUT_PACKED)
        check_by_expert(f, c, d, op, result);
    else
        check_by_source(f, c, d, op, result);
    CHECK(result->absent == 0, "absent %u", result->absent);
    CHECK(result->arrived[0] == (1ull << f->R) - 1, "arrived");
}

/* ---- combine: expert e of a token gives (1 + e mod 2) times the token ------------------------------ */

static double expert_factor(int64_t e) { return 1.0 + (double)(e % 2); }

static int64_t expert_at(struct fixture *f, uint32_t d, uint32_t l)
{
    for (uint32_t e = 0; e < f->E; e++)
        for (uint32_t i = f->placement.first[e]; i < f->placement.first[e + 1]; i++)
            if (f->placement.rank[i] == d && f->placement.local[i] == l)
                return e;
    return -1;
}

static void write_row(const struct config *c, uint8_t *row, uint32_t s, uint32_t t, double factor)
{
    for (uint32_t h = 0; h < HIDDEN; h++)
        put(c->combine, row, h, factor * x_value(s, t, h));
}

/* Gradient of choice j, as the rank that holds its expert reports it. */
static float grad_value(uint32_t s, uint32_t t, uint32_t l) { return (float)(100 * s + 10 * t + l); }

static void write_expert_rows(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op)
{
    const struct ep_op *from = &c->dispatch[d];
    const int32_t *counts = at(f, d, from->counts), *offsets = from->offsets.bytes ? at(f, d, from->offsets) : NULL;
    const struct ep_source *sources = at(f, d, from->sources);

    for (uint32_t l = 0; l < f->L; l++)
        for (int32_t i = 0; i < counts[l]; i++) {
            uint64_t row = (offsets ? (uint64_t)offsets[l] : (uint64_t)l * f->R * LL_TOKENS) + (uint64_t)i;

            write_row(c, (uint8_t *)at(f, d, op->x) + row * row_bytes(c->combine), sources[row].rank,
                      sources[row].token, expert_factor(expert_at(f, d, l)));
            if (op->row_grads.bytes)
                ((float *)at(f, d, op->row_grads))[row] = grad_value(sources[row].rank, sources[row].token, l);
        }
}

static void write_source_row(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                             uint64_t at_row, uint8_t *row)
{
    const struct ep_op *from = &c->dispatch[d];
    const int32_t *topk = (const int32_t *)at(f, d, from->out_topk) + at_row * c->in.k;
    const float *weights = (const float *)at(f, d, from->out_weights) + at_row * c->in.k;
    const struct ep_source *source = (const struct ep_source *)at(f, d, from->sources) + at_row;
    double factor = 0;

    for (uint32_t j = 0; j < c->in.k; j++) {
        factor += topk[j] < 0 ? 0 : (double)weights[j] * expert_factor(expert_at(f, d, (uint32_t)topk[j]));
        if (op->row_grads.bytes)
            ((float *)at(f, d, op->row_grads))[at_row * c->in.k + j] =
                topk[j] < 0 ? -1.0f : grad_value(source->rank, source->token, (uint32_t)topk[j]);
    }
    write_row(c, row, source->rank, source->token, factor);
}

static void write_source_rows(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op)
{
    const struct ep_op_result *r = &c->dispatched[d];
    const int32_t *counts = at(f, d, c->dispatch[d].counts);
    uint64_t flat = 0;

    for (uint32_t s = 0; s < f->R; s++)
        for (uint32_t i = 0; i < (uint32_t)counts[s]; i++, flat++) {
            uint64_t slot = c->layout == EP_LAYOUT_RANK_MAJOR ? (uint64_t)s * LL_TOKENS + i : flat;
            uint8_t *row = op->x.bytes ? (uint8_t *)at(f, d, op->x) + slot * row_bytes(c->combine)
                                       : f->window[d] + r->view + s * r->view_stride + (size_t)i * row_bytes(c->combine);

            write_source_row(f, c, d, op, slot, row);
        }
}

static void build_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op)
{
    uint64_t t = c->in.tokens[r], rows = most_rows(f, c);

    *op = (struct ep_op){ .kind = EP_OP_COMBINE, .mode = c->mode, .layout = c->layout, .input_dtype = c->combine,
                          .wire_dtype = c->combine, .tokens = (uint32_t)t, .top_k = c->in.k, .handle = handle,
                          .generation = 7, .flags = c->send_only ? EP_OP_SEND_ONLY : 0 };
    if (!(c->layout == EP_LAYOUT_RANK_MAJOR && c->in_place))
        op->x = take(f, r, rows * row_bytes(c->combine));
    op->out = take(f, r, t * row_bytes(c->combine));
    if (c->bias && t) {
        op->bias = take(f, r, t * row_bytes(c->combine));
        for (uint32_t i = 0; i < t; i++)
            for (uint32_t h = 0; h < HIDDEN; h++)
                put(c->combine, (uint8_t *)at(f, r, op->bias) + (size_t)i * row_bytes(c->combine), h, 1 + h % 3);
    }
    if (c->grads) {
        op->topk_grads = take(f, r, t * c->in.k * 4 + 16);
        op->row_grads = take(f, r, rows * (c->layout == EP_LAYOUT_FLAT ? c->in.k : 1) * 4);
    }
    if (c->layout == EP_LAYOUT_EXPERT_MAJOR || c->layout == EP_LAYOUT_PACKED)
        write_expert_rows(f, c, r, op);
    else
        write_source_rows(f, c, r, op);
}

static void check_combine(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op *op)
{
    for (uint32_t t = 0; t < op->tokens; t++) {
        const uint8_t *row = (const uint8_t *)at(f, r, op->out) + (size_t)t * row_bytes(c->combine);
        double factor = 0;

        for (uint32_t j = 0; j < c->in.k; j++) {
            uint32_t rank, local;
            bool there = home(f, &c->in, r, t, j, &rank, &local);

            factor += there ? (double)c->in.weight[r][t][j] * expert_factor(c->in.topk[r][t][j]) : 0;
            if (op->topk_grads.bytes) {
                float have = ((const float *)at(f, r, op->topk_grads))[t * c->in.k + j];

                CHECK(float_bits(have) == float_bits(there ? grad_value(r, t, local) : 0.0f), "gradient %g", (double)have);
            }
        }
        for (uint32_t h = 0; h < HIDDEN; h++) {
            double want = factor * x_value(r, t, h) + (c->bias ? 1 + h % 3 : 0);

            CHECK(fabs(get(c->combine, row, h) - want) == 0, "token %u of %u at %u: %g, not %g", t, r, h,
                  get(c->combine, row, h), want);
        }
    }
}

/* ---- a pass: dispatch, check, combine, check ---------------------------------------------------------- */

static void complete(struct fixture *f, uint32_t r, uint32_t handle, struct ep_op_result *result)
{
    struct ep_op op = { .kind = EP_OP_COMPLETE, .handle = handle, .generation = 7 };

    must(f, r, &op, result);
}

static void run_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle)
{
    struct ep_op *op = &c->dispatch[r];
    struct ep_op_result *result = &c->dispatched[r];

    must(f, r, op, result);
    check_numbers(f, c, r, result);
    if (c->send_only)
        complete(f, r, handle, result);
    check_dispatch(f, c, r, op, result);
}

static void run_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle)
{
    struct ep_op *op = &c->comb[r];
    struct ep_op_result result;

    build_combine(f, r, c, handle, op);
    must(f, r, op, &result);
    if (c->send_only)
        complete(f, r, handle, &result);
    check_combine(f, c, r, op);
}

static void pass(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;

    f->used[r] = 0;
    build_dispatch(f, r, c, 3, &c->dispatch[r]);
    run_dispatch(f, r, c, 3);
    run_combine(f, r, c, 3);
    if (c->cached) {
        c->dispatch[r].flags |= EP_OP_CACHED;
        c->dispatch[r].topk_idx = c->dispatch[r].topk_weights = (struct ep_span){ 0, 0 };
        run_dispatch(f, r, c, 3);
        run_combine(f, r, c, 3);
    }
}

static void passes(struct fixture *f, ep_mode mode, ep_layout layout, ep_dtype input, ep_dtype wire,
                   ep_scale_format scales, uint32_t n)
{
    struct config *c = calloc(1, sizeof *c);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t v = i + (uint32_t)input * 3 + (uint32_t)layout;

        memset(c, 0, sizeof *c);
        c->mode = mode;
        c->layout = layout;
        c->input = input;
        c->wire = wire;
        c->scales = scales;
        c->combine = input == EP_FP8_E4M3 ? EP_BF16 : input;
        c->alignment = 1u << v % 4;
        c->index_bytes = v % 2 ? 8 : 4;
        c->send_only = mode == EP_MODE_LL && v % 3 == 0;
        c->cached = v % 2 == 0;
        c->bias = v % 3 == 1;
        c->grads = mode == EP_MODE_HT && v % 2 == 1;
        c->in_place = v % 2 == 0;
        random_inputs(f, &c->in, mode == EP_MODE_LL ? LL_TOKENS : HT_TOKENS, v * 977 + 1);
        parallel(f, pass, c);
    }
    free(c);
}

static void all_dtypes(ep_mode mode, ep_layout layout, bool replicas, uint32_t ranks)
{
    static const ep_dtype pairs[][2] = { { EP_BF16, EP_BF16 }, { EP_FP16, EP_FP16 }, { EP_FP32, EP_FP32 },
                                         { EP_FP8_E4M3, EP_FP8_E4M3 }, { EP_BF16, EP_FP8_E4M3 },
                                         { EP_FP16, EP_FP8_E4M3 }, { EP_FP32, EP_FP8_E4M3 } };
    struct fixture *f = fixture_new(ranks, replicas, 20000);

    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (ep_scale_format s = EP_SCALE_FP32; s <= (pairs[i][1] == EP_FP8_E4M3 ? EP_SCALE_UE8M0 : EP_SCALE_FP32); s++)
            passes(f, mode, layout, pairs[i][0], pairs[i][1], s, 6);
    fixture_free(f);
}

static void ll_expert_major(void **s) { (void)s; all_dtypes(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR, false, 3); }
static void ll_rank_major(void **s) { (void)s; all_dtypes(EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, false, 3); }
static void ll_packed(void **s) { (void)s; all_dtypes(EP_MODE_LL, EP_LAYOUT_PACKED, false, 3); }
static void ll_replicas(void **s) { (void)s; all_dtypes(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR, true, 4); }
static void ll_one_rank(void **s) { (void)s; all_dtypes(EP_MODE_LL, EP_LAYOUT_PACKED, false, 1); }
static void ht_flat(void **s) { (void)s; all_dtypes(EP_MODE_HT, EP_LAYOUT_FLAT, false, 3); }
static void ht_packed(void **s) { (void)s; all_dtypes(EP_MODE_HT, EP_LAYOUT_PACKED, false, 3); }
static void ht_replicas(void **s) { (void)s; all_dtypes(EP_MODE_HT, EP_LAYOUT_PACKED, true, 4); }
static void ht_one_rank(void **s) { (void)s; all_dtypes(EP_MODE_HT, EP_LAYOUT_FLAT, false, 1); }

/* ---- waiting for a state without sleeping: spin on what the team shows ------------------------------ */

struct one_op {
    struct ep_op op;
    struct ep_op_result result;
    uint32_t over; /* atomic */
};

static void run_one(struct fixture *f, uint32_t r, void *arg)
{
    struct one_op *one = (struct one_op *)arg;

    execute(f, r, &one->op, &one->result);
    __atomic_store_n(&one->over, 1, __ATOMIC_RELEASE);
}

static void simple_config(struct config *c, struct fixture *f, ep_mode mode, ep_layout layout, uint32_t tokens)
{
    memset(c, 0, sizeof *c);
    c->mode = mode;
    c->layout = layout;
    c->input = c->wire = c->combine = EP_BF16;
    c->alignment = 4;
    c->index_bytes = 4;
    c->in.k = 2;
    for (uint32_t r = 0; r < f->R; r++) {
        c->in.tokens[r] = tokens;
        for (uint32_t t = 0; t < tokens; t++)
            for (uint32_t j = 0; j < 2; j++) {
                c->in.topk[r][t][j] = (t * 3 + j * 5 + r) % f->E;
                c->in.weight[r][t][j] = 1;
            }
    }
}

static void build_all(struct fixture *f, struct config *c, uint32_t handle)
{
    for (uint32_t r = 0; r < f->R; r++) {
        f->used[r] = 0;
        build_dispatch(f, r, c, handle, &c->dispatch[r]);
    }
}

/* ---- late ranks ---------------------------------------------------------------------------------------- */

static void late(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(3, false, 60);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 2; r++) { /* rank 2 does not come */
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_TIMEOUT);
        assert_int_equal(one[r].result.late_rank, 2);
        assert_int_equal(one[r].result.wait_phase, mode == EP_MODE_LL ? EP_WAIT_ARRIVAL : EP_WAIT_READY);
        assert_non_null(strstr(one[r].result.text, "rank 2 was late"));
        assert_true(one[r].result.wait_ns >= 50 * EP_NS_PER_MS);
    }
    /* a handle whose dispatch failed cannot be combined */
    build_combine(f, 0, c, 0, &one[0].op);
    assert_int_equal(execute(f, 0, &one[0].op, &one[0].result), EP_STALE_HANDLE);

    /* it comes after all, finds what it can, and then all go on together */
    one[2].op = c->dispatch[2];
    run_one(f, 2, &one[2]);
    assert_int_equal(one[2].result.status, EP_OK);
    if (mode == EP_MODE_HT)
        assert_int_equal(one[2].result.arrived[0], 4); /* the others had closed */
    else
        assert_int_equal(one[2].result.arrived[0], 7); /* their rows had come */
    ep_host_team_set_timeout(f->team, 20000);
    c->bias = true;
    for (int i = 0; i < 5; i++)
        parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

static void a_late_rank_is_named_ll(void **s) { (void)s; late(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR); }
static void a_late_rank_is_named_ht(void **s) { (void)s; late(EP_MODE_HT, EP_LAYOUT_FLAT); }

/* ---- leaving ---------------------------------------------------------------------------------------------- */

static bool in_arrived(const struct ep_op_result *result, uint32_t r) { return result->arrived[0] >> r & 1; }

/* Rank 2 never begins and leaves: peers that wait for it end well without it. */
static void leave_before(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 2; r++) {
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    ep_host_team_leave(f->team, 2);
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_OK);
        assert_false(in_arrived(&one[r].result, 2));
        assert_int_equal(one[r].result.absent, 1);
    }
    execute(f, 2, &c->dispatch[2], &one[2].result);
    assert_int_equal(one[2].result.status, EP_DETACHED);
    /* it comes back with a clean window */
    memset(f->window[2], 0, f->map.total_bytes);
    ep_host_team_join(f->team, 2);
    for (int i = 0; i < 4; i++)
        parallel(f, pass, c);
    /* everybody leaves and starts anew */
    for (uint32_t r = 0; r < 3; r++)
        ep_host_team_leave(f->team, r);
    ep_host_team_reset(f->team);
    for (int i = 0; i < 3; i++)
        parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

static void peers_go_on_without_a_rank_ll(void **s) { (void)s; leave_before(EP_MODE_LL, EP_LAYOUT_PACKED); }
static void peers_go_on_without_a_rank_ht(void **s) { (void)s; leave_before(EP_MODE_HT, EP_LAYOUT_PACKED); }

/* A rank that waits for peers leaves: its op ends as detached. */
static void own_op_ends(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(2, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one = { .over = 0 };
    struct thread thread;

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    one.op = c->dispatch[0];
    start(&thread, f, 0, run_one, &one);
    ep_host_team_leave(f->team, 0);
    pthread_join(thread.id, NULL);
    assert_int_equal(one.result.status, EP_DETACHED);
    free(c);
    fixture_free(f);
}

static void own_op_ends_when_its_rank_leaves(void **s)
{
    (void)s;
    for (int i = 0; i < 20; i++) {
        own_op_ends(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
        own_op_ends(EP_MODE_HT, EP_LAYOUT_FLAT);
    }
}

/* The combine of a dispatch whose peer is gone: its experts contribute nothing. */
static void combine_without_a_peer(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    (void)s;
    for (int mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++) {
        simple_config(c, f, (ep_mode)mode, EP_LAYOUT_PACKED, 4);
        build_all(f, c, 0);
        memset(one, 0, sizeof one);
        for (int half = 0; half < 2; half++) {
            for (uint32_t r = 0; r < 3u - (uint32_t)half; r++) {
                one[r].op = c->dispatch[r];
                if (half)
                    build_combine(f, r, c, 0, &one[r].op);
                start(&threads[r], f, r, run_one, &one[r]);
            }
            if (half)
                ep_host_team_leave(f->team, 2);
            for (uint32_t r = 0; r < 3u - (uint32_t)half; r++) {
                pthread_join(threads[r].id, NULL);
                assert_int_equal(one[r].result.status, EP_OK);
                assert_int_equal(in_arrived(&one[r].result, 2), !half);
            }
        }
        for (uint32_t t = 0; t < 4; t++) { /* of rank 0, without the choices of rank 2's experts */
            double factor = 0;

            for (uint32_t j = 0; j < 2; j++) {
                uint32_t rank, local;

                if (home(f, &c->in, 0, t, j, &rank, &local) && rank != 2)
                    factor += expert_factor(c->in.topk[0][t][j]);
            }
            for (uint32_t h = 0; h < HIDDEN; h++)
                CHECK(get(EP_BF16, (uint8_t *)at(f, 0, one[0].op.out) + (size_t)t * row_bytes(EP_BF16), h) ==
                          factor * x_value(0, t, h), "token %u", t);
        }
        memset(f->window[2], 0, f->map.total_bytes);
        ep_host_team_join(f->team, 2);
    }
    free(c);
    fixture_free(f);
}

/* Rank 2 comes and goes at any moment; the others only ever see ok, and nothing hangs. */
struct churn {
    struct config *c;
    uint32_t stop;
};

static void survivor(struct fixture *f, uint32_t r, void *arg)
{
    struct churn *churn = arg;
    struct config c = *churn->c;
    struct ep_op_result result;

    for (int i = 0; i < 60; i++) {
        c.mode = i % 3 ? EP_MODE_LL : EP_MODE_HT;
        f->used[r] = 0;
        build_dispatch(f, r, &c, (uint32_t)i % 4, &c.dispatch[r]);
        must(f, r, &c.dispatch[r], &c.dispatched[r]);
        if (i % 5 == 4)
            continue; /* never combined */
        build_combine(f, r, &c, (uint32_t)i % 4, &c.comb[r]);
        must(f, r, &c.comb[r], &result);
    }
    __atomic_store_n(&churn->stop, 1, __ATOMIC_SEQ_CST);
}

static void victim(struct fixture *f, uint32_t r, void *arg)
{
    struct churn *churn = arg;
    struct config c = *churn->c;
    struct ep_op_result result;
    int i = 0;

    do {
        c.mode = i++ % 3 ? EP_MODE_LL : EP_MODE_HT;
        f->used[r] = 0;
        build_dispatch(f, r, &c, 1, &c.dispatch[r]);
        execute(f, r, &c.dispatch[r], &result);
    } while (result.status != EP_DETACHED);
}

static void a_rank_comes_and_goes(void **s)
{
    struct fixture *f = fixture_new(3, false, 100);
    struct config *c = calloc(1, sizeof *c);
    struct churn churn = { .c = c };
    struct thread two[2], dying;
    uint32_t seed = 5;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 5);
    ep_host_team_set_timeout(f->team, 30000);
    for (uint32_t r = 0; r < 2; r++)
        start(&two[r], f, r, survivor, &churn);
    while (!__atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST)) {
        start(&dying, f, 2, victim, &churn);
        for (uint32_t i = next_random(&seed) % 3000; i > 0; i--)
            __atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST);
        ep_host_team_leave(f->team, 2);
        pthread_join(dying.id, NULL);
        memset(f->window[2], 0, f->map.total_bytes); /* nobody writes to it any more */
        ep_host_team_join(f->team, 2);
    }
    ep_host_team_leave(f->team, 2);
    for (uint32_t r = 0; r < 2; r++)
        pthread_join(two[r].id, NULL);
    free(c);
    fixture_free(f);
}

/* ---- any legal order: skipped combines, interleaved handles, releases -------------------------------------- */

static void wander(struct fixture *f, uint32_t r, void *arg)
{
    struct config *base = arg, c[2];
    uint32_t seed = base->seed, live[2] = { 0, 0 }; /* the same choices on every rank */
    struct ep_op_result result;
    uint64_t last = 0;

    for (int i = 0; i < 40; i++) {
        uint32_t h = next_random(&seed) % 2, what = next_random(&seed) % 8;

        if (live[h] && what < 5) {
            if (base->mode == EP_MODE_LL && last - c[h].dispatched[r].number >= f->map.limits.ll_banks) {
                build_combine(f, r, &c[h], h, &c[h].comb[r]);
                CHECK(execute(f, r, &c[h].comb[r], &result) == EP_STALE_HANDLE, "bank was taken");
            } else {
                run_combine(f, r, &c[h], h);
            }
            live[h] = 0;
        } else if (live[h] && what == 5) {
            must(f, r, &(struct ep_op){ .kind = EP_OP_RELEASE, .handle = h, .generation = 7 }, &result);
            live[h] = 0;
        } else {
            c[h] = *base;
            random_inputs(f, &c[h].in, c[h].mode == EP_MODE_LL ? LL_TOKENS : HT_TOKENS, next_random(&seed));
            f->used[r] = h * (f->map.limits.arena_bytes / 2);
            /* a released generation is gone for good: show it, then take a new one */
            build_dispatch(f, r, &c[h], h, &c[h].dispatch[r]);
            if (execute(f, r, &c[h].dispatch[r], &c[h].dispatched[r]) == EP_STALE_HANDLE) {
                c[h].dispatch[r].generation = 8 + (uint32_t)i;
                must(f, r, &c[h].dispatch[r], &c[h].dispatched[r]);
                check_dispatch(f, &c[h], r, &c[h].dispatch[r], &c[h].dispatched[r]);
                last = c[h].dispatched[r].number;
                live[h] = 0; /* combined under its own generation only */
                continue;
            }
            last = c[h].dispatched[r].number;
            CHECK(c[h].dispatched[r].status == EP_OK, "%s", c[h].dispatched[r].text);
            check_dispatch(f, &c[h], r, &c[h].dispatch[r], &c[h].dispatched[r]);
            live[h] = 1;
        }
    }
}

static void any_order_of_handles(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (uint32_t seed = 0; seed < 24; seed++) {
        memset(c, 0, sizeof *c);
        c->mode = seed % 2 ? EP_MODE_LL : EP_MODE_HT;
        c->layout = EP_LAYOUT_PACKED;
        c->input = c->wire = c->combine = EP_BF16;
        c->alignment = 2;
        c->index_bytes = 4;
        c->seed = seed * 31 + 7;
        parallel(f, wander, c);
    }
    free(c);
    fixture_free(f);
}

static void a_taken_bank_makes_the_handle_stale(void **s)
{
    struct fixture *f = fixture_new(1, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct ep_op_result result;
    struct ep_op op;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 3);
    build_all(f, c, 0);
    must(f, 0, &c->dispatch[0], &c->dispatched[0]);
    build_combine(f, 0, c, 0, &op);
    for (uint32_t h = 1; h <= 2; h++) {
        c->dispatch[0].handle = h;
        must(f, 0, &c->dispatch[0], &result);
    }
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    assert_non_null(strstr(result.text, "handle 0"));
    op.handle = 1;
    op.generation = 6;
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    op.generation = 7;
    op.tokens = 2;
    assert_int_equal(execute(f, 0, &op, &result), EP_INVALID_ARGUMENT);
    op.tokens = 3;
    must(f, 0, &op, &result);
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    assert_non_null(strstr(result.text, "combined already"));
    free(c);
    fixture_free(f);
}

/* ---- too small outputs ---------------------------------------------------------------------------------------- */

static void small_out(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;
    struct ep_op *op = &c->dispatch[r];
    struct ep_op_result result;

    f->used[r] = 0;
    build_dispatch(f, r, c, 0, op);
    if (r == 1)
        op->out.bytes = row_bytes(c->wire) * 2;
    if (r == 1) {
        CHECK(execute(f, r, op, &c->dispatched[r]) == EP_OVERFLOW, "%s", c->dispatched[r].text);
        CHECK(c->dispatched[r].rows_needed > 2, "rows needed");
    } else {
        must(f, r, op, &c->dispatched[r]);
        check_dispatch(f, c, r, op, &c->dispatched[r]);
    }
    /* its combine takes part, and gives nothing */
    c->comb[r] = (struct ep_op){ .kind = EP_OP_COMBINE, .mode = c->mode, .layout = c->layout, .tokens = op->tokens,
                                 .top_k = op->top_k, .input_dtype = EP_BF16, .wire_dtype = EP_BF16,
                                 .generation = 7, .x = op->out, .out = take(f, r, (uint64_t)op->tokens * row_bytes(EP_BF16)) };
    execute(f, r, &c->comb[r], &result);
    CHECK(result.status == (r == 1 ? EP_OVERFLOW : EP_OK), "rank %u: %s", r, result.text);
    CHECK(in_arrived(&result, 0) && !in_arrived(&result, 1), "arrived");
}

static void an_overflow_stays_with_its_rank(void **s)
{
    static const struct { ep_mode mode; ep_layout layout; } cases[] = {
        { EP_MODE_LL, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_FLAT }
    };
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (size_t i = 0; i < 3; i++) {
        simple_config(c, f, cases[i].mode, cases[i].layout, 8);
        parallel(f, small_out, c);
        parallel(f, pass, c);
    }
    free(c);
    fixture_free(f);
}

/* ---- memory that a client writes to at the wrong time ------------------------------------------------------------ */

static void headers_are_not_trusted(void **s)
{
    struct fixture *f = fixture_new(1, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct ep_op_result result;
    struct ep_op op;
    uint32_t seed = 3;

    (void)s;
    for (int i = 0; i < 200; i++) {
        uint64_t bank;

        simple_config(c, f, EP_MODE_LL, (ep_layout)(1 + i % 3), 8);
        c->send_only = true;
        build_all(f, c, 0);
        must(f, 0, &c->dispatch[0], &result);
        bank = f->map.ll + result.number % f->map.limits.ll_banks * f->map.bank_bytes;
        for (uint64_t at_byte = 0; at_byte < 8ull * f->map.header_bytes; at_byte += 4) {
            uint32_t bad = next_random(&seed) % 3 ? next_random(&seed) << 16 | next_random(&seed) : next_random(&seed) % 8;

            memcpy(f->window[0] + bank + f->map.bank.headers + at_byte, &bad, 4);
        }
        op = (struct ep_op){ .kind = EP_OP_COMPLETE, .generation = 7 };
        execute(f, 0, &op, &result);
        if (result.status != EP_OK)
            continue;
        op = (struct ep_op){ .kind = EP_OP_COMBINE, .mode = EP_MODE_LL, .layout = c->layout, .input_dtype = EP_BF16,
                             .wire_dtype = EP_BF16, .tokens = 8, .top_k = 2, .generation = 7,
                             .x = c->dispatch[0].out, .out = take(f, 0, 8ull * row_bytes(EP_BF16)) };
        must(f, 0, &op, &result);
    }
    free(c);
    fixture_free(f);
}

struct scribble {
    int32_t *words;
    uint32_t n, stop;
};

static void scribbler(struct fixture *f, uint32_t r, void *arg)
{
    struct scribble *sc = arg;
    uint32_t seed = r;

    (void)f;
    while (!__atomic_load_n(&sc->stop, __ATOMIC_RELAXED))
        __atomic_store_n(&sc->words[next_random(&seed) % sc->n], (int32_t)(next_random(&seed) << 16 | next_random(&seed)),
                         __ATOMIC_RELAXED);
}

static void anything_ends(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;
    struct ep_op_result result;

    for (int i = 0; i < 100; i++) {
        struct ep_op *op = &c->dispatch[r];

        op->mode = i % 2 ? EP_MODE_LL : EP_MODE_HT;
        execute(f, r, op, &result);
        CHECK(result.status == EP_OK || result.status == EP_OVERFLOW, "%s", result.text);
    }
}

static void topk_may_change_under_way(void **s)
{
    struct fixture *f = fixture_new(2, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct scribble sc = { .stop = 0 };
    struct thread threads[2], bad;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 8);
    build_all(f, c, 0);
    sc.words = at(f, 0, c->dispatch[0].topk_idx);
    sc.n = 16;
    start(&bad, f, 0, scribbler, &sc);
    for (uint32_t r = 0; r < 2; r++)
        start(&threads[r], f, r, anything_ends, c);
    for (uint32_t r = 0; r < 2; r++)
        pthread_join(threads[r].id, NULL);
    __atomic_store_n(&sc.stop, 1, __ATOMIC_RELAXED);
    pthread_join(bad.id, NULL);
    free(c);
    fixture_free(f);
}

/* ---- the same bits again ------------------------------------------------------------------------------------------- */

struct repeat {
    struct config *c;
    uint8_t *out[MAX_R];
};

/* Values that round at every step. */
static void rounding_rows(struct fixture *f, uint32_t r, void *arg)
{
    struct repeat *rep = arg;
    struct config c = *rep->c;
    struct ep_op_result result;
    uint32_t seed = r + 1, n;

    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    must(f, r, &c.dispatch[r], &c.dispatched[r]);
    build_combine(f, r, &c, 0, &c.comb[r]);
    n = (uint32_t)(c.comb[r].x.bytes / 2);
    for (uint32_t i = 0; i < n; i++)
        ((uint16_t *)at(f, r, c.comb[r].x))[i] = (uint16_t)(0x3f00 + next_random(&seed) % 0x180);
    must(f, r, &c.comb[r], &result);
    n = (uint32_t)c.comb[r].out.bytes;
    if (!rep->out[r]) {
        rep->out[r] = malloc(n + 1);
        memcpy(rep->out[r], at(f, r, c.comb[r].out), n);
    }
    CHECK(memcmp(rep->out[r], at(f, r, c.comb[r].out), n) == 0, "other bits on rank %u", r);
}

static void repeated_runs_give_the_same_bits(void **s)
{
    struct fixture *f = fixture_new(4, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (int mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++) {
        struct repeat rep = { .c = c };

        simple_config(c, f, (ep_mode)mode, EP_LAYOUT_PACKED, 8);
        c->in.k = MAX_K;
        for (uint32_t r = 0; r < f->R; r++)
            for (uint32_t t = 0; t < 8; t++)
                for (uint32_t j = 0; j < MAX_K; j++) {
                    c->in.topk[r][t][j] = (t * 3 + j * 5 + r) % f->E;
                    c->in.weight[r][t][j] = 0.1f * (float)(1 + j);
                }
        c->in.weights = true;
        for (int i = 0; i < 20; i++)
            parallel(f, rounding_rows, &rep);
        for (uint32_t r = 0; r < f->R; r++)
            free(rep.out[r]);
    }
    free(c);
    fixture_free(f);
}

/* ---- ranks that do not make the same calls ---------------------------------------------------------------------------- */

static void other_dtype(struct fixture *f, uint32_t r, void *arg)
{
    struct config c = *(struct config *)arg;
    struct ep_op_result result;

    c.input = c.wire = r == 1 ? EP_FP32 : EP_BF16;
    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    execute(f, r, &c.dispatch[r], &result);
    CHECK(result.status == EP_FAILED_PRECONDITION, "%s", result.text);
}

static void other_scales(struct fixture *f, uint32_t r, void *arg)
{
    struct config c = *(struct config *)arg;
    struct ep_op_result result;

    c.wire = EP_FP8_E4M3;
    c.scales = r == 1 ? EP_SCALE_UE8M0 : EP_SCALE_FP32;
    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    execute(f, r, &c.dispatch[r], &result);
    CHECK(result.status == EP_FAILED_PRECONDITION, "%s", result.text);
    CHECK(strstr(result.text, "scale format") != NULL, "%s", result.text);
}

static void ht_ops_that_do_not_fit_are_reported(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    simple_config(c, f, EP_MODE_HT, EP_LAYOUT_FLAT, 4);
    parallel(f, other_dtype, c);
    parallel(f, other_scales, c);
    parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ll_expert_major), cmocka_unit_test(ll_rank_major), cmocka_unit_test(ll_packed),
        cmocka_unit_test(ll_replicas), cmocka_unit_test(ll_one_rank), cmocka_unit_test(ht_flat),
        cmocka_unit_test(ht_packed), cmocka_unit_test(ht_replicas), cmocka_unit_test(ht_one_rank),
        cmocka_unit_test(a_late_rank_is_named_ll),
        cmocka_unit_test(a_late_rank_is_named_ht),
        cmocka_unit_test(peers_go_on_without_a_rank_ll),
        cmocka_unit_test(peers_go_on_without_a_rank_ht),
        cmocka_unit_test(own_op_ends_when_its_rank_leaves),
        cmocka_unit_test(combine_without_a_peer),
        cmocka_unit_test(a_rank_comes_and_goes),
        cmocka_unit_test(any_order_of_handles),
        cmocka_unit_test(a_taken_bank_makes_the_handle_stale),
        cmocka_unit_test(an_overflow_stays_with_its_rank),
        cmocka_unit_test(headers_are_not_trusted),
        cmocka_unit_test(topk_may_change_under_way),
        cmocka_unit_test(repeated_runs_give_the_same_bits),
        cmocka_unit_test(ht_ops_that_do_not_fit_are_reported),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
