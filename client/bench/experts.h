/*
 * experts: what stands between a dispatch and its combine.
 *
 * Expert e makes c_e * x of a token x.  Rows of one expert (expert-major, packed) are rounded once to
 * the payload's format.  In rank-major and flat the caller adds its experts' outputs, weighted, and
 * rounds that sum once.
 */
#ifndef EXPERTS_H
#define EXPERTS_H

#include "inputs.h"

/* What a rank received, wherever it lies. */
struct received {
    ep_layout layout;
    ep_dtype dtype;
    uint32_t hidden, scales, top_k, max_tokens;
    uint64_t row_bytes;
    const char *base; /* rank-major: rank r at base + r * stride */
    uint64_t stride;
    const void *scale_base;           /* fp8 */
    ep_scale_format scale_format;
    uint64_t scale_stride, scale_row; /* bytes */
    const int32_t *counts, *offsets, *topk;
    const float *weights;
};

const void *received_row(const struct received *received, uint64_t position);
const void *received_scales(const struct received *received, uint64_t position); /* NULL without fp8 */

/* One element, rounded once; any dtype but fp8. */
void experts_store(ep_dtype dtype, double value, void *row, uint32_t column);

/*
 * Computes every row of the plan into the same position of rows[positions, H] (which may be where the
 * received rows are, if the formats are of one size).  rank: ours.
 */
ep_status experts_run(const struct inputs *inputs, uint32_t rank, const struct received *received,
                      const struct ep_ref_dispatch *plan, char *rows, uint64_t rows_stride,
                      struct ep_error *error);

/*
 * The gradients of the weights that the plan's rows had: of expert e, c_e <x, g>, with the row x that came forward
 * and the gradient g that came to its place.  row_grads: [positions] in packed, [positions, k] in flat.
 */
ep_status experts_weight_grads(const struct inputs *inputs, uint32_t rank, const struct received *forward,
                               const struct received *gradients, const struct ep_ref_dispatch *plan,
                               float *row_grads, struct ep_error *error);

/* The reference's view of the same (ep_ref_expert_fn): user is a struct experts_model. */
struct experts_model {
    const struct inputs *inputs;
    bool ready;
    uint32_t source, token;  /* whose values those are */
    double *values, *radius; /* [H] each */
};

/* Gradient of one choice's weight, and how far what experts_weight_grads() made of it may be from that.  Both
 * models belong to the same token, one in each pass. */
void experts_model_weight_grad(struct experts_model *forward, struct experts_model *gradients, uint32_t source,
                               uint32_t token, uint32_t expert, double *value, double *bound);

bool experts_model_init(struct experts_model *model, const struct inputs *inputs);
void experts_model_fini(struct experts_model *model);
void experts_model_expert(void *user, uint32_t source, uint32_t token, uint32_t expert, double *value,
                          double *radius);

#endif
