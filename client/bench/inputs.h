/*
 * inputs: what every rank sends in a case, by the seed alone.
 *
 * Elements are n * 2^(s - 10) with n in -128..127 and s in 0..7 (fp8-given: any code, with a scale per
 * 128 elements, as the case says), so they are exact in every format, differ from row to row, and blocks of 128 reach
 * e4m3's subnormal range when they are quantised.
 *
 * Expert e multiplies by a constant of its own (inputs_expert): 1024 different ones, 8 significant
 * bits, both signs, 1/2 to 8 in magnitude.
 */
#ifndef INPUTS_H
#define INPUTS_H

#include "bench.h"
#include "ep_reference.h"

struct inputs {
    const struct bench_config *config;
    struct bench_case of;
    uint64_t seed;            /* of elements and scales */
    ep_layout layout[BENCH_MAX_RANKS]; /* of what each rank receives */
    enum bench_pass pass;     /* whose elements: the tokens', or the gradients' of what became of them */
    uint32_t hidden, scales;  /* elements, scales of a row */
    size_t scale_bytes;       /* of a row's scales */
    struct ep_ref_rank *rank; /* [ranks]: choices and weights, as `routing` sees them */
    struct ep_ref_routing routing;
};

/* Of a row's scales in the case. */
size_t inputs_scale_bytes(const struct bench_config *config, const struct bench_case *of);

/* Tokens of this rank in the case: --zero-rank has none. */
uint32_t inputs_tokens(const struct bench_config *config, const struct bench_case *of, uint32_t rank);

/* Chooses the routes of all ranks.  EP_NO_MEMORY is the only failure. */
ep_status inputs_open(const struct bench_config *config, const struct bench_case *of,
                      const struct routing *routing, struct inputs *out, struct ep_error *error);
/* The same for ranks that differ in tokens and layout (both [ranks]). */
struct inputs_variety {
    uint64_t seed; /* of elements */
    const uint32_t *tokens;
    const ep_layout *layout;
    uint64_t odd; /* seed of choices that are wrong or repeated; 0: there are none */
};
ep_status inputs_open_varied(const struct bench_config *config, const struct bench_case *of,
                             const struct routing *routing, const struct inputs_variety *variety,
                             struct inputs *out, struct ep_error *error);
void inputs_close(struct inputs *inputs);

/* Row of a token as it is dispatched; scales (fp8-given only) may be NULL otherwise. */
void inputs_row(const struct inputs *inputs, uint32_t rank, uint32_t token, void *row, void *scales);

/* Is a bias added when the pass is combined?  And that of a token, in the combine's format: elements as of a dispatch. */
bool inputs_biased(const struct inputs *inputs);
void inputs_bias(const struct inputs *inputs, uint32_t rank, uint32_t token, void *row);

/* The same row as inputs_row(), as numbers. */
void inputs_values(const struct inputs *inputs, uint32_t rank, uint32_t token, double *values);

double inputs_expert(uint32_t expert);

#endif
