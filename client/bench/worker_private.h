/* One rank's process. */
#ifndef WORKER_PRIVATE_H
#define WORKER_PRIVATE_H

#include "bench.h"
#include "ep_client.h"
#include "ep_cuda.h"
#include "experts.h"
#include "verify.h"

enum { WORKER_BUFFERS = 16 };

/* Sizes of a case's buffers, bytes; 0: not needed. */
struct buffer_sizes {
    size_t x, x_scales, topk, weights;
    size_t out, out_scales, counts, offsets, out_topk, out_weights, sources;
    size_t rows; /* a combine's input, where it cannot be `out` in place */
    size_t result, bias;
    size_t row_grads, topk_grads;
};

/* local_experts: the most that any rank has, which expert-major buffers are made for.  max_tokens: the
 * group's, of LL.  positions: rows that a packed or flat `out` spans. */
void buffer_sizes(const struct bench_config *config, const struct bench_case *of, uint32_t tokens,
                  uint32_t local_experts, uint32_t max_tokens, uint64_t positions,
                  struct buffer_sizes *sizes);
/* What ep_alloc needs for all of them. */
uint64_t buffer_total(const struct buffer_sizes *sizes);

struct buffers {
    void *x, *x_scales, *topk, *out, *out_scales, *rows, *result, *bias;
    float *weights, *out_weights, *row_grads, *topk_grads;
    int32_t *counts, *offsets, *out_topk;
    ep_source_row *sources;
};

/* Backward: what the forward dispatch brought, as training keeps it; packed. */
struct kept {
    char *rows, *scales;
};

/* On a GPU: where this process keeps rows that arrive in the window. */
struct view {
    char *rows, *scales;
    uint64_t row, scale_row; /* bytes; of every layout and backend */
};

struct worker {
    uint32_t rank;
    int socket;
    struct bench_shared *shared;
    const struct bench_config *config;
    struct bench_rank_result *result;
    struct routing *routing;
    struct bench_config *fitted; /* with --follow: `config`, as the rank's epoch has it */
    struct bench_epoch *epoch;   /* likewise */

    ep_client *client;
    ep_rank *ep;
    ep_rank_info info;
    bool gpu; /* then also: */
    const struct ep_cuda_api *cuda;
    uint32_t device;
    ep_stream stream; /* of all ops and copies; NULL on the host */

    /* the case */
    bool prepared;
    struct bench_case of;
    struct inputs inputs;
    struct buffer_sizes sizes;
    struct buffers buffers; /* the ops' memory */
    struct ep_cuda_memory *memory[WORKER_BUFFERS]; /* with own_memory: where they are */
    struct buffers own;     /* what this process reads and writes of it: on the host the same */
    struct view view;
    struct kept kept;
    ep_handle *handle;
    uint32_t tokens;
    uint32_t op_flags;   /* EP_OP_*, of the next ops */
    uint64_t timed_hash; /* of the result of timed ops, which is always the same */
};

/* ---- worker_base.c ---- */

void worker_get_on(struct worker *worker);
/* The library's last failure as ours. */
ep_status worker_failure(struct ep_error *error, ep_status status, const char *what);

/* ---- worker_memory.c ---- */

ep_status memory_open(struct worker *worker, struct ep_error *error);
void memory_close(struct worker *worker); /* works on what memory_open() left when it failed */

/* Nothing to do where both are the same memory. */
ep_status memory_push(struct worker *worker, void *there, const void *own, size_t bytes,
                      struct ep_error *error);
ep_status memory_pull(struct worker *worker, void *own, const void *there, size_t bytes,
                      struct ep_error *error);
ep_status memory_fill(struct worker *worker, void *there, int value, size_t bytes, struct ep_error *error);
ep_status memory_poison(struct worker *worker, struct ep_error *error); /* all outputs */
/* What each token has, as if token `first` was the first one.  On the host only 0. */
ep_status memory_push_inputs(struct worker *worker, uint32_t first, struct ep_error *error);
ep_status memory_pull_result(struct worker *worker, struct ep_error *error);

/* What describes the rows that a dispatch brought; then these, as far as the plan says that something is there. */
ep_status memory_receive_tables(struct worker *worker, struct ep_error *error);
ep_status memory_receive(struct worker *worker, const struct ep_ref_dispatch *plan, const ep_op_info *info,
                         struct received *received, struct ep_error *error);
/* Keeps what was received until the backward pass, and what that is then. */
void memory_keep(struct worker *worker, const struct received *received);
struct received memory_kept(const struct worker *worker, const struct received *received);
/* The experts' rows to where the combine reads them.  stride: 0, or they go back into the window. */
ep_status memory_send_rows(struct worker *worker, const struct ep_ref_dispatch *plan, const ep_op_info *info,
                           const char *from, uint64_t stride, struct ep_error *error);

/* ---- worker_ops.c ---- */

/* Of the next ops: inputs where they read them, the handle's routing again in the backward pass, gradients. */
ep_status worker_begin_pass(struct worker *worker, enum bench_pass pass, struct ep_error *error);

/* One op each, without waiting.  rows NULL: rank-major, in place. */
ep_status worker_dispatch(struct worker *worker, struct ep_error *error);
ep_status worker_combine(struct worker *worker, const void *rows, struct ep_error *error);
/* Their halves: with EP_OP_SEND_ONLY something is left for worker_complete(), else it does nothing. */
ep_status worker_send_dispatch(struct worker *worker, struct ep_error *error);
ep_status worker_send_combine(struct worker *worker, const void *rows, struct ep_error *error);
ep_status worker_complete(struct worker *worker, struct ep_error *error);
/* For the handle's ops, and what became of the last one. */
ep_status worker_wait(struct worker *worker, const char *what, struct ep_error *error);
/* Waits for all ops. */
ep_status worker_sync(struct worker *worker, struct ep_error *error);
/* What a timed combine reads. */
const void *worker_timed_rows(const struct worker *worker);
/* Hash of what the last combine gave. */
ep_status worker_hash_result(struct worker *worker, uint64_t *hash, struct ep_error *error);

/* ---- worker_case.c ---- */

/* Steps of a case, for those who take them in another order.  Memory has room for what the inputs bring. */
ep_status worker_open_memory(struct worker *worker, struct ep_error *error);
/* Who is in what a dispatch brought, and so what that must be. */
ep_status worker_expect(struct worker *worker, struct verifier *verifier, const ep_op_info *info,
                        struct ep_ref_dispatch *plan, struct ep_error *error);
/* Checks what came (verifier NULL: not), and lets the experts work: in place where that is possible, or not.  rows:
 * for the combine; hash: goes on with what came. */
ep_status worker_receive(struct worker *worker, struct verifier *verifier, const struct ep_ref_dispatch *plan,
                         const ep_op_info *info, bool in_place, const void **rows, uint64_t *hash,
                         struct ep_error *error);

ep_status worker_prepare(struct worker *worker, uint32_t case_index, struct ep_error *error);
ep_status worker_verify(struct worker *worker, bool masked, struct ep_error *error);
void worker_end(struct worker *worker);

/* ---- worker_attach.c ---- */

/* retry: somebody else's rank that is about to be free again is waited for. */
ep_status worker_attach(struct worker *worker, bool retry, struct ep_error *error);
void worker_detach(struct worker *worker);
/* Parts of it.  The rank, as it is now: also for one that has gone over to another epoch. */
ep_status worker_join(struct worker *worker, bool retry, struct ep_error *error);
ep_status worker_describe(struct worker *worker, struct ep_error *error);
ep_status worker_open_routing(struct worker *worker, struct ep_error *error);

/* ---- worker_follow.c ---- */

/* Makes the configuration that of the epoch the rank is in, which the coordinator must have seen. */
ep_status follow_settle(struct worker *worker, struct ep_error *error);
/* That the epoch's ops begin with this step; all ranks say the same. */
ep_status follow_begins(struct worker *worker, uint64_t step, struct ep_error *error);
void follow_paused(struct worker *worker, uint64_t ns);

enum follow_place {
    FOLLOW_HERE,
    FOLLOW_SUPERSEDED, /* there is a newer epoch, and this one's ops have not begun */
    FOLLOW_GONE        /* no op begins any more */
};
/* In an epoch that the others have not gone over to yet: the step with which they do. */
enum follow_place follow_await_begin(struct worker *worker, uint64_t *step);

/* ---- worker_soak.c ---- */

ep_status worker_soak(struct worker *worker, struct ep_error *error);

/* ---- worker_time.c, worker_device.c ---- */

ep_status worker_time(struct worker *worker, uint32_t flags, struct ep_error *error);
/* The same on a GPU, and launches of a graph of config->graph pairs. */
ep_status device_time(struct worker *worker, struct ep_error *error);
ep_status device_time_graph(struct worker *worker, struct ep_error *error);

#endif
