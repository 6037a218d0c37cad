/*
 * pass: a dispatch at one rank, the experts' work and the combine, from seeded inputs to results that have
 * been compared with kernels/reference.
 *
 * What is sent, what experts do and how results are judged is ep-bench's (client/bench: inputs, experts,
 * verify); here that meets GPU memory.  Every rank knows every rank's inputs, from the seed alone.
 */
#ifndef PASS_H
#define PASS_H

#include "verify.h"
#include "world.h"

/* What the ops of a test are like. */
struct shape {
    bool ht;                        /* mode HT; the group has LL too if `both` */
    bool both;
    bool grads;                     /* HT: combines carry gradients of the weights */
    ep_layout layout;
    enum bench_dtype dtype;
    ep_scale_format scales; /* fp8 */
    uint32_t experts, hidden, tokens, top_k;
    uint32_t max_tokens, max_top_k; /* the group's; 0: as the ops' */
    uint32_t banks;                 /* 0: 2 */
    uint32_t alignment;             /* packed; 0: 1 */
    uint32_t index_bytes;           /* 0: 4 */
    const char *routing;            /* as ep-bench's --routing; NULL: uniform */
    double drop;                    /* share of choices that are -1 */
    bool bad_ids;                   /* some choices name no expert that exists */
    bool repeats;                   /* some tokens name an expert twice */
    bool ragged;                    /* ranks have different numbers of tokens, rank 0 has all */
    bool no_weights;
    bool redundant;                 /* every third expert has two homes, every fifth three */
    bool bias;
    bool empty_rank;                /* the last rank has no tokens */
    uint32_t sms;                   /* multiprocessors of a rank, at most; 0: all, or its share of a GPU */
};

/* What a group for such ops is like; `passes` of them have room in an arena. */
ep_status shape_options(const struct shape *shape, uint32_t ranks, uint32_t gpus, uint32_t passes,
                        uint32_t timeout_ms, struct world_options *options, struct ep_error *error);

/* How many nodes the ranks of such a group are on. */
uint32_t shape_nodes(uint32_t ranks);

struct pass_buffers { /* in the arena */
    struct ep_span x, x_scales, topk, weights, bias;
    struct ep_span out, out_scales, counts, offsets, out_topk, out_weights, sources, rows, result;
    struct ep_span row_grads, topk_grads;
};

struct pass {
    struct world_rank *rank;
    const struct shape *shape;
    struct bench_config config;
    struct inputs inputs;
    uint32_t tokens; /* of this rank */
    struct pass_buffers at;
    struct ep_op dispatch; /* of the last one */
    uint32_t handle, generation;
    uint64_t expected;     /* mask of the ranks that take part; all */
    ep_status status;      /* that the ops must end with; EP_OK */
    uint64_t out_rows;     /* packed: rows that `out` is said to hold; 0: enough */
    bool changing;         /* somebody may have gone while the op ran: perhaps his rows came, and ours found nobody */
    bool hash_only;        /* results are hashed, and not compared with the reference */

    /* of the last run */
    struct ep_device_record dispatched, combined;
    struct ep_ref_dispatch plan;
    bool planned;
    struct received received; /* copies on the host */
    char *out, *out_scales, *rows, *result, *bias;
    float *out_weights;
    int32_t *counts, *offsets, *out_topk;
    ep_source_row *sources;
    float *row_grads, *topk_grads;
    uint64_t hash; /* of all that came out */
    struct bench_verdict verdict;
    uint64_t progress;
};

/* place: which of the arena's passes it is.  Inputs are in GPU memory when it returns. */
ep_status pass_open(struct world_rank *rank, const struct shape *shape, uint32_t place, uint32_t handle,
                    uint64_t seed, struct pass **out, struct ep_error *error);
void pass_close(struct pass *pass); /* NULL is allowed */

/* Other rows (and, unless the next dispatch is cached, routes) than before. */
ep_status pass_reseed(struct pass *pass, uint64_t seed, bool routes, struct ep_error *error);

/* Poison the outputs, enqueue; flags: EP_OP_*.  Send-only ops are to be completed. */
ep_status pass_dispatch(struct pass *pass, uint32_t flags, struct ep_error *error);
ep_status pass_combine(struct pass *pass, uint32_t flags, bool in_place, struct ep_error *error);
/* The other half of the op that was sent. */
ep_status pass_complete(struct pass *pass, struct ep_error *error);
ep_status pass_release(struct pass *pass, struct ep_error *error);

/* The same ops for a test that runs them itself. */
struct ep_op pass_dispatch_op(const struct pass *pass, uint32_t flags);
struct ep_op pass_combine_op(const struct pass *pass, uint32_t flags, bool in_place);

/* Wait, compare.  EP_VERIFY_FAILED says what was wrong first. */
ep_status pass_received(struct pass *pass, struct ep_error *error);
ep_status pass_result(struct pass *pass, struct ep_error *error);

/* The experts' outputs to where a combine finds them.  After pass_received. */
ep_status pass_experts(struct pass *pass, bool in_place, struct ep_error *error);

/* All of it. */
ep_status pass_run(struct pass *pass, uint32_t flags, bool in_place, struct ep_error *error);

#endif
