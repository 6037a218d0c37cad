/* What a dispatch and a combine must have given, from all ranks' inputs. */
#include "host_fixture.h"

#include <math.h>
#include <string.h>

/* ---- what a dispatch gave --------------------------------------------------------------------- */

static uint32_t float_bits(float v)
{
    uint32_t u;

    memcpy(&u, &v, sizeof u);
    return u;
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

static double get_scale(const struct config *c, const void *scales, uint32_t at)
{
    return c->scales == EP_SCALE_UE8M0 ? ldexp(1, ((const uint8_t *)scales)[at] - 127)
                                       : (double)((const float *)scales)[at];
}

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

/* A token goes once to each other rank; in HT once to each other node. */
static uint32_t crossings(struct fixture *f, const struct config *c, uint32_t r, uint32_t t)
{
    bool node[MAX_NODES] = { false };
    int32_t locals[MAX_K];
    uint32_t n = 0;

    for (uint32_t d = 0; d < f->R; d++) {
        bool elsewhere = c->mode == EP_MODE_HT && f->node[d] != f->node[r];

        if (d == r || !routes_at(f, &c->in, d, r, t, locals) || (elsewhere && node[f->node[d]]))
            continue;
        node[f->node[d]] = node[f->node[d]] || elsewhere;
        n++;
    }
    return n;
}

void check_numbers(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op_result *result)
{
    uint64_t bad = 0, remote = 0, row = row_bytes(c->wire);

    if (c->wire == EP_FP8_E4M3)
        row += scale_bytes(c);
    for (uint32_t t = 0; t < c->in.tokens[r]; t++) {
        for (uint32_t j = 0; j < c->in.k; j++)
            bad += c->in.topk[r][t][j] < -1 || c->in.topk[r][t][j] >= (int64_t)f->E;
        remote += crossings(f, c, r, t);
    }
    CHECK(result->dropped == bad, "dropped %llu", (unsigned long long)result->dropped);
    CHECK(result->wire_bytes == remote * row, "wire bytes");
    CHECK(result->logical_bytes == (uint64_t)c->in.tokens[r] * c->in.k * row_bytes(c->wire), "logical bytes");
    CHECK(result->end_ns >= result->start_ns && result->wait_ns <= result->end_ns - result->start_ns, "times");
}

void check_dispatch(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                           const struct ep_op_result *result)
{
    uint32_t away = 0;

    if (c->layout == EP_LAYOUT_EXPERT_MAJOR || c->layout == EP_LAYOUT_PACKED)
        check_by_expert(f, c, d, op, result);
    else
        check_by_source(f, c, d, op, result);
    for (uint32_t r = 0; r < f->R; r++) {
        away += f->away[r];
        CHECK((result->arrived[r / 64] >> r % 64 & 1) == !f->away[r], "rank %u has%s arrived", r, f->away[r] ? "" : " not");
    }
    CHECK(result->absent == away, "absent %u, not %u", result->absent, away);
}

/* ---- what a combine gave ------------------------------------------------------------------------- */

void check_combine(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op *op)
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
