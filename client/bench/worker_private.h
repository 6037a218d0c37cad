/* One rank's process. */
#ifndef WORKER_PRIVATE_H
#define WORKER_PRIVATE_H

#include "bench.h"
#include "ep_client.h"
#include "experts.h"
#include "verify.h"

/* Sizes of a case's buffers in the arena, bytes; 0: not needed. */
struct buffer_sizes {
    size_t x, x_scales, topk, weights;
    size_t out, out_scales, counts, offsets, out_topk, out_weights, sources;
    size_t rows; /* a combine's input, where it cannot be `out` in place */
    size_t result;
};

/* local_experts: the most that any rank has, which expert-major buffers are made for.  max_tokens: the
 * group's, of LL.  positions: rows that a packed or flat `out` spans. */
void buffer_sizes(const struct bench_config *config, const struct bench_case *of, uint32_t tokens,
                  uint32_t local_experts, uint32_t max_tokens, uint64_t positions,
                  struct buffer_sizes *sizes);
/* What ep_alloc needs for all of them. */
uint64_t buffer_total(const struct buffer_sizes *sizes);

struct buffers {
    void *x, *topk, *out, *rows, *result;
    float *x_scales, *weights, *out_scales, *out_weights;
    int32_t *counts, *offsets, *out_topk;
    ep_source_row *sources;
};

struct worker {
    uint32_t rank;
    int socket;
    struct bench_shared *shared;
    const struct bench_config *config;
    struct bench_rank_result *result;
    struct routing *routing;

    ep_client *client;
    ep_rank *ep;
    ep_rank_info info;

    /* the case */
    bool prepared;
    struct bench_case of;
    struct inputs inputs;
    struct buffer_sizes sizes;
    struct buffers buffers;
    ep_handle *handle;
    uint32_t tokens;
    uint32_t op_flags; /* EP_OP_*, of the next ops */
};

ep_status worker_prepare(struct worker *worker, uint32_t case_index, struct ep_error *error);
ep_status worker_verify(struct worker *worker, bool masked, struct ep_error *error);
void worker_end(struct worker *worker);

ep_status worker_time(struct worker *worker, uint32_t flags, struct ep_error *error);

/* One op each, without waiting.  rows NULL: rank-major, in place. */
ep_status worker_dispatch(struct worker *worker, struct ep_error *error);
ep_status worker_combine(struct worker *worker, const void *rows, struct ep_error *error);
/* For the handle's ops, and what became of the last one. */
ep_status worker_wait(struct worker *worker, const char *what, struct ep_error *error);

/* What a timed combine reads. */
const void *worker_timed_rows(const struct worker *worker);

void worker_get_on(struct worker *worker);

/* The library's last failure as ours. */
ep_status worker_failure(struct ep_error *error, ep_status status, const char *what);

#endif
