/*
 * verify: a rank's results against the reference.
 *
 * A verdict counts every element that is not as it must be and keeps the first one's description.
 * Rows that travelled unquantised must be equal byte for byte; quantised rows and combined
 * outputs must lie within the bounds that ep_reference.h derives.
 */
#ifndef VERIFY_H
#define VERIFY_H

#include "ep_client.h"
#include "experts.h"

struct verifier {
    const struct inputs *inputs;
    uint32_t rank;
    struct bench_verdict *verdict;
    uint64_t *progress; /* counted up as rows are checked */
    bool changing;      /* somebody may have gone while the op ran: perhaps its rows came, and ours found nobody */
};

/* Marks in `inputs` who arrived, and (HT) whose places are there without: sources is of the `rows` rows that came, or
 * NULL.  False, and a mismatch, when our own rank did not arrive. */
bool verify_arrived(struct verifier *verifier, const uint64_t *arrived, const ep_source_row *sources, uint64_t rows);

/* sources: of each row by position.  info: of the dispatch. */
ep_status verify_dispatch(struct verifier *verifier, const struct received *received,
                          const struct ep_ref_dispatch *plan, const ep_source_row *sources,
                          const ep_op_info *info, struct ep_error *error);

/* result: [T, H].  arrived: of the combine. */
ep_status verify_combine(struct verifier *verifier, const void *result, const uint64_t *arrived,
                         struct ep_error *error);

/* topk_grads: [T, k].  arrived: of the backward pass's combine, whose inputs the verifier has. */
ep_status verify_weight_grads(struct verifier *verifier, const float *topk_grads, const uint64_t *arrived,
                              struct ep_error *error);

/* Hash of everything that a dispatch defined (rows in order, and what describes them), and a result. */
uint64_t verify_hash_dispatch(const struct received *received, const struct ep_ref_dispatch *plan);
uint64_t verify_hash(uint64_t seed, const void *bytes, size_t n);

__attribute__((format(printf, 3, 4))) void verify_mismatch(struct bench_verdict *verdict, uint64_t n,
                                                           const char *format, ...);

#endif
