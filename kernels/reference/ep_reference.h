/*
 * ep_reference: what a dispatch and a combine must yield.  Slow, obvious, in double precision.
 *
 * It shares no code with kernels/ (only the enumerations of ep_types.h): its own formats, its own
 * placement rule, its own order of rows.  Everything follows from the inputs of all ranks.
 *
 * ## Routing rules
 *   - Choice j of token t of rank s names an expert.  -1 is no choice; an id outside [-1, E) is
 *     counted as dropped.
 *   - A choice goes to home (s + t) mod (homes of the expert), in the order in which the homes are
 *     listed.  Without a list expert e has one home: the first E mod R ranks hold one expert more
 *     than the others, and each holds a run of consecutive experts.
 *   - The local number of an expert on a rank is its place among the homes of that rank.
 *   - A token has one row per (token, local expert) in expert-major and packed, however often it names
 *     the expert, and one row per (token, rank) in rank-major and flat.  Each of its choices counts
 *     in the combine, so an expert that is named twice is added twice, each time with that
 *     choice's weight.
 *   - A rank that is not present sends no rows, and nothing that was routed to it comes back.  Places of rows that it
 *     had announced (HT) are there: rows like others, but zero, from no token and for no expert.
 *   - A cached pass has the choices and weights of the dispatch that it repeats, and other rows.
 *
 * ## The error bound of a combine
 * u = 2^-24 is the unit roundoff of fp32, h(x) half the distance between neighbouring numbers of the
 * payload's format at magnitude x (ep_ref_half_ulp; constant in the subnormal range), and
 * g(n) = n u / (1 - n u) the usual bound of n fp32 operations in a row [Higham, section 3.1].
 *
 * Rank d adds its choices j = 1..n of a token in fp32: P = sum w_j y_j, where row j holds a
 * number within r_j of y_j (r_j = 0 unless the token was quantised on the way).  With
 * A = sum |w_j| (|y_j| + r_j) and Q = sum |w_j| r_j, n products and at most n - 1 sums give
 *     |fl(P) - P| <= Q + g(n) A.
 * What travels is rounded once:
 *     e_d = Q + g(n) A + h(|P| + Q + g(n) A).
 * The source adds m partials and perhaps a bias b, in fp32, at most m sums, and rounds once.  With
 * B = sum over d of (|P_d| + e_d), plus |b|, and S the exact result:
 *     E     = sum over d of e_d + g(m) B
 *     bound = E + h(|S| + E).
 * Over several nodes (HT) the parts of the m_N >= 2 ranks of a node N other than the source's are summed up there in
 * fp32 and rounded once more.  With B_N and S_N of these parts, as B and S above,
 *     E_N = sum over d in N of e_d + g(m_N) B_N,     e_N = E_N + h(|S_N| + E_N),
 * and the source sees one part S_N with error e_N in their place.
 * Every term is a rounding that the algorithm makes; nothing is fitted.  It holds for a rank's sum
 * that the caller made itself (rank-major, flat) too, when that was made in fp32 or better and rounded
 * once.  Values must stay inside the range of the format.
 *
 * ## The error of fp8
 * A block of 128 elements with largest magnitude a is stored as codes q of x / s with s = a / 448 in
 * fp32 (relative error u), the quotient in fp32 (at most 4 u, however it is made: division, or
 * multiplication with a rounded reciprocal).  With z = 448 |x| / a the quotient is within 4 u z of z, the
 * code within h8 of that (h8: half an ulp of e4m3, 2^-10 in its subnormal range), so
 *     |q s - x| <= (a / 448) (1 + u) (h8(z (1 + 4 u)) + 4 u z) + u |x|.
 * Blocks with a < 448 * 2^-126 and a > 0 are outside of this: their scale is not a normal number.
 *
 * With a scale in UE8M0 there is one right answer: s is the smallest 2^(b - 127), b = 0..254, with 448 s >= a
 * (1 when a = 0), x / s is exact in fp32 wherever e4m3 does not make 0 of it, and the code is that of the nearest
 * number: |q s - x| <= s h8(x / s).
 */
#ifndef EP_REFERENCE_H
#define EP_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_types.h"

/* ---- numbers -------------------------------------------------------------------- */

uint32_t ep_ref_bytes(ep_dtype dtype); /* of one element; 0 for no dtype */

/* The element's value, exactly.  Infinities and NaN as such. */
double ep_ref_decode(ep_dtype dtype, const void *element);

/* The code of the nearest number of the format, ties to even.  What is too large becomes infinite,
 * in e4m3 (which has no infinity) +-448. */
uint32_t ep_ref_encode(ep_dtype dtype, double value);
void ep_ref_store(ep_dtype dtype, double value, void *element);

/* That number itself. */
double ep_ref_round(ep_dtype dtype, double value);

/* Half the distance of neighbouring numbers at this magnitude; inside the range. */
double ep_ref_half_ulp(ep_dtype dtype, double magnitude);

/* g(n) above. */
double ep_ref_gamma(uint32_t n);

/* Bytes of one scale, and the value of the i-th of a row. */
uint32_t ep_ref_scale_bytes(ep_scale_format format);
double ep_ref_scale(ep_scale_format format, const void *scales, uint32_t i);

/* How far an element x may be from itself after fp8, in a block of largest magnitude amax. */
double ep_ref_fp8_radius(ep_scale_format format, double x, double amax);

/* Is `scale` right?  FP32: amax / 448, give or take one unit in the last place; any finite one for amax 0. */
bool ep_ref_fp8_scale_ok(ep_scale_format format, double amax, double scale);

/* ---- routing -------------------------------------------------------------------- */

struct ep_ref_home {
    uint32_t expert, rank;
};

/* One rank's inputs. */
struct ep_ref_rank {
    bool present;
    uint32_t tokens;
    const int64_t *topk;  /* [tokens, k] */
    const float *weights; /* [tokens, k]; NULL: 1 */
    bool announced;       /* to the rank that receives, and then it was not present */
};

struct ep_ref_routing {
    uint32_t ranks, experts, top_k;
    uint32_t n_homes; /* 0: no list */
    const struct ep_ref_home *homes;
    const struct ep_ref_rank *rank; /* [ranks] */
};

uint32_t ep_ref_local_experts(const struct ep_ref_routing *routing, uint32_t rank);
/* The expert that `rank` knows as `local`; -1 when it has no such. */
int64_t ep_ref_expert_at(const struct ep_ref_routing *routing, uint32_t rank, uint32_t local);

/* Where choice `expert` of this token goes; false for no choice or a bad id. */
bool ep_ref_home(const struct ep_ref_routing *routing, uint32_t source, uint32_t token, int64_t expert,
                 uint32_t *rank, uint32_t *local);

/* Choices of this rank that reach nobody: bad ids, and those whose home is not present. */
uint64_t ep_ref_dropped(const struct ep_ref_routing *routing, uint32_t source);

/* Rows that `source` sends to other ranks: each (token, rank) once; with node[ranks] each (token, node) once where it
 * is another node. */
uint64_t ep_ref_remote_rows(const struct ep_ref_routing *routing, const uint32_t *node, uint32_t source);

/* ---- dispatch ------------------------------------------------------------------- */

struct ep_ref_row {
    uint64_t position; /* row of `out` */
    uint32_t source, token;
    int32_t expert; /* local one, in expert-major and packed; else -1 */
    bool padding;   /* packed: all zero, from nobody */
    bool missing;   /* HT: all zero, announced by `source`; token is the one that it was to be */
};

struct ep_ref_dispatch {
    uint64_t positions; /* rows that `out` spans; packed, flat: N */
    uint64_t n_rows;    /* defined ones, ascending by position, padding included */
    struct ep_ref_row *rows;
    uint32_t n_counts; /* L or R */
    int32_t *counts;
    int32_t *offsets; /* packed [L + 1]; else NULL */
    int32_t *topk;    /* rank-major, flat [n_rows, k]: local expert or -1; else NULL */
    float *weights;   /* like topk; 0 where topk is -1 */
};

/* What rank `rank` receives.  max_tokens: slots per source, for LL's fixed shapes.  False without
 * memory. */
bool ep_ref_dispatch(const struct ep_ref_routing *routing, uint32_t rank, ep_layout layout,
                     uint32_t alignment, uint32_t max_tokens, struct ep_ref_dispatch *out);
void ep_ref_dispatch_free(struct ep_ref_dispatch *dispatch);

/* ---- combine -------------------------------------------------------------------- */

/*
 * What an expert makes of a token: value[H] as the row holds it or should hold it, radius[H] how far
 * the row may be from that.
 */
typedef void (*ep_ref_expert_fn)(void *user, uint32_t source, uint32_t token, uint32_t expert, double *value,
                                 double *radius);

struct ep_ref_combine {
    ep_dtype dtype; /* of rows, bias and result */
    uint32_t hidden;
    const uint32_t *node; /* [ranks] where each is, when nodes sum up what their ranks have; NULL: parts travel alone */
    const bool *arrived; /* [ranks] whose partials are in the result; NULL: of all that are present */
    const void *bias;    /* [T, H] or NULL */
    ep_ref_expert_fn expert;
    void *user;
};

/* value[H] and bound[H] of one token of `source`.  False without memory. */
bool ep_ref_combine_token(const struct ep_ref_routing *routing, const struct ep_ref_combine *combine,
                          uint32_t source, uint32_t token, double *value, double *bound);

/*
 * Gradients of the weights (HT): element [t, j] of topk_grads is row_grads of rank `rank` at
 * `index` ([row] in packed, [row, j] in flat), or 0 when rank is -1.
 */
struct ep_ref_gradient {
    int32_t rank;
    uint64_t index;
};
/* places [tokens of source, k].  False without memory. */
bool ep_ref_gradients(const struct ep_ref_routing *routing, ep_layout layout, uint32_t alignment,
                      uint32_t source, struct ep_ref_gradient *places);

#endif
