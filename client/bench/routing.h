/*
 * routing: which experts a token goes to, with which weights.
 *
 *   uniform      k different experts, all alike
 *   zipf:S       k different experts, the i-th (from 1) with odds 1/i^S
 *   hot:E        expert E and k - 1 others
 *   deepseek-v3  group-limited top-k: sigmoid scores plus a bias per expert; 8 groups of neighbouring
 *                experts, a group counts as the sum of its two best; the best 4 groups stay, of them
 *                the best k experts; weights are the scores without bias, normalised, times 2.5.
 *                E not divisible by 8: as many groups as the largest divisor of E below 8; half of
 *                them stay (rounded up), and more when those have fewer than k experts.
 *   text:FILE    one word of FILE per token, in order, each rank from its own place on; a word's j-th
 *                expert is its j-th hash among the experts that are left (Hash Layers,
 *                arXiv 2106.04426), with weights falling from choice to choice
 *   trace:FILE   as recorded
 *
 * Choices depend on (seed, rank, token) alone, so a shorter batch is the beginning of a longer one.
 *
 * ## Trace files
 * Text.  Lines that are empty or begin with '#' are skipped.  The first line is
 *     ep-trace 1 ranks R experts E top_k K
 * and each other one is a token of a rank:
 *     RANK TOKEN ID:WEIGHT ID:WEIGHT ...          (K of them; ID -1: no expert)
 * Tokens of a rank are numbered from 0 without a gap; ranks may alternate.  Every rank has at least
 * one.  On replay rank r is the trace's rank r mod R, and a trace that is too short begins
 * again.  --record writes this format.
 */
#ifndef ROUTING_H
#define ROUTING_H

#include <stdint.h>
#include <stdio.h>

#include "ep_error.h"
#include "ep_types.h"

enum routing_kind {
    ROUTING_UNIFORM,
    ROUTING_ZIPF,
    ROUTING_HOT,
    ROUTING_DEEPSEEK,
    ROUTING_TEXT,
    ROUTING_TRACE
};

struct routing_spec {
    enum routing_kind kind;
    double exponent; /* zipf */
    uint32_t hot;
    char file[1024]; /* text, trace */
};

struct routing_shape {
    uint32_t ranks, experts, top_k;
    uint64_t seed;
    double drop; /* share of the choices that become -1 */
};

/* "zipf:1.2" and so on. */
ep_status routing_parse(const char *text, struct routing_spec *spec, struct ep_error *error);

struct routing;

/* Reads the file, if any.  The error names file, line and field. */
ep_status routing_open(const struct routing_spec *spec, const struct routing_shape *shape,
                       struct routing **out, struct ep_error *error);
void routing_close(struct routing *routing); /* NULL is allowed */

/* topk[k], weights[k] of one token. */
void routing_token(const struct routing *routing, uint32_t rank, uint32_t token, int64_t *topk,
                   float *weights);

/* Other choices from here on, where they are drawn at all. */
void routing_reseed(struct routing *routing, uint64_t seed, double drop);

/* Writes a trace of tokens 0 .. tokens-1 of every rank. */
ep_status routing_record(const struct routing *routing, uint32_t tokens, const char *path,
                         struct ep_error *error);

#endif
