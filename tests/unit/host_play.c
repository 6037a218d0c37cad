/* What ranks play: inputs, the ops that are made of them, and what experts make of tokens. */
#include "host_fixture.h"

#include <math.h>
#include <string.h>

/* ---- formats: of numbers that they hold exactly ------------------------------------------ */

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

void put(ep_dtype d, void *row, uint32_t h, double v)
{
    switch (d) {
    case EP_BF16: ((uint16_t *)row)[h] = (uint16_t)pack_float(v, 8, 7); break;
    case EP_FP16: ((uint16_t *)row)[h] = (uint16_t)pack_float(v, 5, 10); break;
    case EP_FP32: ((float *)row)[h] = (float)v; break;
    case EP_FP8_E4M3: ((uint8_t *)row)[h] = (uint8_t)pack_float(v, 4, 3); break;
    }
}

double get(ep_dtype d, const void *row, uint32_t h)
{
    switch (d) {
    case EP_BF16: return unpack_float(((const uint16_t *)row)[h], 8, 7);
    case EP_FP16: return unpack_float(((const uint16_t *)row)[h], 5, 10);
    case EP_FP32: return (double)((const float *)row)[h];
    case EP_FP8_E4M3: return unpack_float(((const uint8_t *)row)[h], 4, 3);
    }
    return 0;
}

uint32_t row_bytes(ep_dtype d) { return HIDDEN * ep_dtype_bytes(d); }

/* ---- inputs and what follows from them -------------------------------------------------- */

double x_value(uint32_t r, uint32_t t, uint32_t h) { return (double)((r * 5 + t * 3 + h) % 13) - 6.0; }

uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 16;
}

void random_inputs(struct fixture *f, struct inputs *in, uint32_t max_tokens, uint32_t seed)
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
bool home(struct fixture *f, const struct inputs *in, uint32_t s, uint32_t t, uint32_t j, uint32_t *rank,
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

/* ---- one configuration --------------------------------------------------------------------- */

/* The scales that are given: 1, 2 and 3, or 2^0, 2^1 and 2^2. */
static void put_scale(const struct config *c, void *scales, uint32_t at, uint32_t which)
{
    if (c->scales == EP_SCALE_UE8M0)
        ((uint8_t *)scales)[at] = (uint8_t)(127 + which);
    else
        ((float *)scales)[at] = (float)(1 + which);
}

uint64_t scale_bytes(const struct config *c)
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

void build_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op)
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

/* ---- combine: expert e of a token gives (1 + e mod 2) times the token ------------------------------ */

double expert_factor(int64_t e) { return 1.0 + (double)(e % 2); }

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
float grad_value(uint32_t s, uint32_t t, uint32_t l) { return (float)(100 * s + 10 * t + l); }

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

void build_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op)
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
