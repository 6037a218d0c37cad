#include "experts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool by_expert(ep_layout layout)
{
    return layout == EP_LAYOUT_EXPERT_MAJOR || layout == EP_LAYOUT_PACKED;
}

/* ---- rows ----------------------------------------------------------------------- */

const void *received_row(const struct received *received, uint64_t position)
{
    if (received->layout != EP_LAYOUT_RANK_MAJOR)
        return received->base + position * received->row_bytes;
    return received->base + position / received->max_tokens * received->stride +
           position % received->max_tokens * received->row_bytes;
}

const void *received_scales(const struct received *received, uint64_t position)
{
    uint64_t offset = position * received->scale_row;

    if (!received->scale_base)
        return NULL;
    if (received->layout == EP_LAYOUT_RANK_MAJOR)
        offset = position / received->max_tokens * received->scale_stride +
                 position % received->max_tokens * received->scale_row;
    return (const char *)received->scale_base + offset;
}

static float from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void load_row(const struct received *received, uint64_t position, double *values)
{
    const void *row = received_row(received, position);
    const void *scales = received_scales(received, position);
    double scale = 1;
    uint32_t bytes = ep_ref_bytes(received->dtype);

    for (uint32_t h = 0; h < received->hidden; h++) {
        if (received->dtype == EP_BF16)
            values[h] = (double)from_bits((uint32_t)((const uint16_t *)row)[h] << 16);
        else if (received->dtype == EP_FP32)
            values[h] = (double)((const float *)row)[h];
        else
            values[h] = ep_ref_decode(received->dtype, (const char *)row + (size_t)h * bytes);
        if (scales && h % EP_FP8_BLOCK == 0)
            scale = ep_ref_scale(received->scale_format, scales, h / EP_FP8_BLOCK);
        values[h] *= scale;
    }
}

/* To 8 significant bits, nearest, ties to even, straight from the double's bits. */
static uint16_t bf16_bits(double value)
{
    const unsigned dropped = 53 - 8;
    uint64_t bits;
    double rounded;

    memcpy(&bits, &value, sizeof bits);
    bits += (1ull << (dropped - 1)) - 1 + (bits >> dropped & 1);
    bits &= ~((1ull << dropped) - 1);
    memcpy(&rounded, &bits, sizeof rounded);
    return (uint16_t)(to_bits((float)rounded) >> 16);
}

void experts_store(ep_dtype dtype, double value, void *row, uint32_t column)
{
    double magnitude = fabs(value);

    if (dtype == EP_FP32)
        ((float *)row)[column] = (float)value;
    else if (dtype == EP_BF16 && (value == 0 || (magnitude > 1e-30 && magnitude < 1e30)))
        ((uint16_t *)row)[column] = bf16_bits(value);
    else
        ep_ref_store(dtype, value, (char *)row + (size_t)column * ep_ref_bytes(dtype));
}

/* ---- the worker's experts --------------------------------------------------------- */

/* What a row is multiplied with: its expert's constant, or the weighted sum of them. */
static double factor(const struct inputs *inputs, uint32_t rank, const struct received *received,
                     const struct ep_ref_row *row)
{
    double sum = 0;

    if (row->expert >= 0)
        return inputs_expert((uint32_t)ep_ref_expert_at(&inputs->routing, rank, (uint32_t)row->expert));
    for (uint32_t j = 0; j < received->top_k; j++) {
        int32_t local = received->topk[row->position * received->top_k + j];
        int64_t expert = local < 0 ? -1 : ep_ref_expert_at(&inputs->routing, rank, (uint32_t)local);

        if (expert >= 0)
            sum += (double)received->weights[row->position * received->top_k + j] *
                   inputs_expert((uint32_t)expert);
    }
    return sum;
}

static char *output_row(const struct received *received, char *rows, uint64_t rows_stride, uint64_t row_bytes,
                        uint64_t position)
{
    if (rows_stride == 0)
        return rows + position * row_bytes;
    return rows + position / received->max_tokens * rows_stride + position % received->max_tokens * row_bytes;
}

ep_status experts_run(const struct inputs *inputs, uint32_t rank, const struct received *received,
                      const struct ep_ref_dispatch *plan, char *rows, uint64_t rows_stride,
                      struct ep_error *error)
{
    ep_dtype dtype = bench_dtypes[inputs->of.dtype].combine;
    uint64_t row_bytes = (uint64_t)inputs->hidden * ep_ref_bytes(dtype);
    double *values = malloc(inputs->hidden * sizeof *values);

    if (!values)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a row of %u elements", inputs->hidden);
    for (uint64_t i = 0; i < plan->n_rows; i++) {
        const struct ep_ref_row *row = &plan->rows[i];
        char *to = output_row(received, rows, rows_stride, row_bytes, row->position);

        if (row->padding)
            continue;

        double c = factor(inputs, rank, received, row);

        load_row(received, row->position, values);
        for (uint32_t h = 0; h < inputs->hidden; h++)
            experts_store(dtype, c * values[h], to, h);
    }
    free(values);
    return EP_OK;
}

/* ---- the worker's gradients -------------------------------------------------------- */

static double dot(const double *a, const double *b, uint32_t n)
{
    double sum = 0;

    for (uint32_t h = 0; h < n; h++)
        sum += a[h] * b[h];
    return sum;
}

/* One for each choice that brought the row here. */
static void store_weight_grads(const struct inputs *inputs, uint32_t rank, const struct received *received,
                               const struct ep_ref_row *row, double product, float *row_grads)
{
    if (row->expert >= 0) {
        int64_t expert = ep_ref_expert_at(&inputs->routing, rank, (uint32_t)row->expert);

        row_grads[row->position] = (float)(inputs_expert((uint32_t)expert) * product);
        return;
    }
    for (uint32_t j = 0; j < received->top_k; j++) {
        uint64_t at = row->position * received->top_k + j;
        int32_t local = received->topk[at];
        int64_t expert = local < 0 ? -1 : ep_ref_expert_at(&inputs->routing, rank, (uint32_t)local);

        if (expert >= 0)
            row_grads[at] = (float)(inputs_expert((uint32_t)expert) * product);
    }
}

ep_status experts_weight_grads(const struct inputs *inputs, uint32_t rank, const struct received *forward,
                               const struct received *gradients, const struct ep_ref_dispatch *plan,
                               float *row_grads, struct ep_error *error)
{
    uint32_t hidden = inputs->hidden;
    double *x = malloc(2 * (size_t)hidden * sizeof *x);

    if (!x)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for two rows of %u elements", hidden);
    for (uint64_t i = 0; i < plan->n_rows; i++) {
        const struct ep_ref_row *row = &plan->rows[i];

        if (row->padding)
            continue;
        load_row(forward, row->position, x);
        load_row(gradients, row->position, x + hidden);
        store_weight_grads(inputs, rank, gradients, row, dot(x, x + hidden, hidden), row_grads);
    }
    free(x);
    return EP_OK;
}

/* ---- the reference's experts ------------------------------------------------------- */

bool experts_model_init(struct experts_model *model, const struct inputs *inputs)
{
    *model = (struct experts_model){ .inputs = inputs };
    model->values = malloc(inputs->hidden * sizeof *model->values);
    model->radius = calloc(inputs->hidden, sizeof *model->radius);
    if (model->values && model->radius)
        return true;
    experts_model_fini(model);
    return false;
}

void experts_model_fini(struct experts_model *model)
{
    free(model->values);
    free(model->radius);
    model->values = model->radius = NULL;
}

static void radius_of_block(struct experts_model *model, uint32_t first, uint32_t last)
{
    double amax = 0;

    for (uint32_t h = first; h < last; h++)
        amax = fmax(amax, fabs(model->values[h]));
    for (uint32_t h = first; h < last; h++)
        model->radius[h] = ep_ref_fp8_radius(model->inputs->of.scales, model->values[h], amax);
}

/* A token is asked for once per expert, one after the other. */
static void load_token(struct experts_model *model, uint32_t source, uint32_t token)
{
    uint32_t hidden = model->inputs->hidden;

    if (model->ready && model->source == source && model->token == token)
        return;
    inputs_values(model->inputs, source, token, model->values);
    for (uint32_t first = 0; bench_quantised(model->inputs->of.dtype) && first < hidden; first += EP_FP8_BLOCK)
        radius_of_block(model, first, first + EP_FP8_BLOCK < hidden ? first + EP_FP8_BLOCK : hidden);
    model->ready = true;
    model->source = source;
    model->token = token;
}

/* That is for the rank to say which has the expert. */
static bool one_expert_a_row(const struct inputs *inputs, uint32_t source, uint32_t token, uint32_t expert)
{
    uint32_t home, local;

    return ep_ref_home(&inputs->routing, source, token, expert, &home, &local) && by_expert(inputs->layout[home]);
}

/*
 * Rows of one expert hold c x, rounded.  Of an exact x the rounded number is known; of a quantised one
 * it is c x give or take |c| r and one rounding.  Otherwise the sum is rounded, which the
 * reference accounts for.
 */
void experts_model_expert(void *user, uint32_t source, uint32_t token, uint32_t expert, double *value,
                          double *radius)
{
    struct experts_model *model = user;
    ep_dtype dtype = bench_dtypes[model->inputs->of.dtype].combine;
    bool rounded = one_expert_a_row(model->inputs, source, token, expert);
    double c = inputs_expert(expert);

    load_token(model, source, token);
    for (uint32_t h = 0; h < model->inputs->hidden; h++) {
        double r = fabs(c) * model->radius[h];

        value[h] = c * model->values[h];
        radius[h] = r;
        if (rounded && bench_quantised(model->inputs->of.dtype))
            radius[h] += ep_ref_half_ulp(dtype, fabs(value[h]) + r);
        else if (rounded)
            value[h] = ep_ref_round(dtype, value[h]);
    }
}

/*
 * x and g are each known within their radius, so c <x, g> is within Q = |c| sum (|x| rg + |g| rx + rx rg).  The sum is
 * made in double precision (unit roundoff v = 2^-53), with A = |c| sum (|x| + rx) (|g| + rg) and H + 1 roundings in a
 * row at most, and rounded to fp32 once:
 *     bound = E + h(|c <x, g>| + E),  E = Q + (H + 1) v / (1 - (H + 1) v) A.
 */
void experts_model_weight_grad(struct experts_model *forward, struct experts_model *gradients, uint32_t source,
                               uint32_t token, uint32_t expert, double *value, double *bound)
{
    const double c = inputs_expert(expert), v = 0x1p-53;
    const uint32_t hidden = forward->inputs->hidden;
    double q = 0, a = 0, e;

    load_token(forward, source, token);
    load_token(gradients, source, token);
    for (uint32_t h = 0; h < hidden; h++) {
        double x = fabs(forward->values[h]), rx = forward->radius[h];
        double g = fabs(gradients->values[h]), rg = gradients->radius[h];

        q += x * rg + g * rx + rx * rg;
        a += (x + rx) * (g + rg);
    }
    *value = c * dot(forward->values, gradients->values, hidden);
    e = fabs(c) * (q + (hidden + 1) * v / (1 - (hidden + 1) * v) * a);
    *bound = e + ep_ref_half_ulp(EP_FP32, fabs(*value) + e);
}
