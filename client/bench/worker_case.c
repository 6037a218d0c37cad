/* One case at one rank: memory, inputs, and the verified runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker_private.h"

/* ---- preparing --------------------------------------------------------------------- */

static ep_status make_plan(struct worker *worker, struct ep_ref_dispatch *plan, struct ep_error *error)
{
    uint32_t max_tokens = worker->of.mode == EP_MODE_LL ? worker->info.group.ll_max_tokens : 0;

    if (!ep_ref_dispatch(&worker->inputs.routing, worker->rank, worker->of.layout, worker->config->alignment,
                         max_tokens, plan))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the expected rows");
    return EP_OK;
}

ep_status worker_open_memory(struct worker *worker, struct ep_error *error)
{
    struct ep_ref_dispatch plan;
    ep_status status = make_plan(worker, &plan, error);

    if (status != EP_OK)
        return status;
    buffer_sizes(worker->config, &worker->of, worker->tokens, worker->info.group.max_local_experts,
                 worker->info.group.ll_max_tokens, plan.positions, &worker->sizes);
    ep_ref_dispatch_free(&plan);
    return memory_open(worker, error);
}

static ep_status fill_memory(struct worker *worker, struct ep_error *error)
{
    /* Timed without having been verified. */
    ep_status status = memory_fill(worker, worker->buffers.rows, 0, worker->sizes.rows, error);

    return status == EP_OK ? worker_begin_pass(worker, BENCH_FORWARD, error) : status;
}

ep_status worker_prepare(struct worker *worker, uint32_t case_index, struct ep_error *error)
{
    struct bench_rank_result *result = worker->result;
    ep_status status;

    worker_end(worker);
    worker->of = worker->config->cases[case_index];
    worker->tokens = inputs_tokens(worker->config, &worker->of, worker->rank);
    memset(&result->verdict, 0, sizeof result->verdict);
    result->samples = 0;
    result->chain_us = result->graph_us = 0;
    status = inputs_open(worker->config, &worker->of, worker->routing, &worker->inputs, error);
    if (status != EP_OK)
        return status;
    worker->prepared = true;
    status = worker_open_memory(worker, error);
    if (status == EP_OK)
        status = fill_memory(worker, error);
    if (status == EP_OK && ep_handle_create(worker->ep, &worker->handle) != EP_OK)
        status = worker_failure(error, EP_INTERNAL, "ep_handle_create");
    return status;
}

void worker_end(struct worker *worker)
{
    if (!worker->prepared)
        return;
    ep_handle_destroy(worker->handle);
    ep_sync(worker->ep, -1); /* a released handle may still be on its way */
    memory_close(worker);
    inputs_close(&worker->inputs);
    worker->handle = NULL;
    worker->prepared = false;
}

/* ---- the verified runs ---------------------------------------------------------------- */

/* Where the experts' outputs go (at this process), and what the combine is given. */
static const void *place_rows(const struct worker *worker, const struct received *received, bool in_place,
                              char **rows, uint64_t *stride)
{
    bool rank_major = worker->of.layout == EP_LAYOUT_RANK_MAJOR, fp8 = received->scale_base != NULL;

    *stride = 0;
    if (rank_major && in_place && !fp8) {
        *rows = (char *)(uintptr_t)received->base;
        *stride = received->stride;
        return NULL;
    }
    *rows = worker->own.rows ? worker->own.rows : worker->own.out;
    return worker->buffers.rows ? worker->buffers.rows : worker->buffers.out;
}

static ep_status dispatched(struct worker *worker, ep_op_info *info, struct ep_error *error)
{
    ep_status status = worker_dispatch(worker, error);

    if (status == EP_OK)
        status = worker_wait(worker, "dispatch", error);
    info->size = sizeof *info;
    if (status == EP_OK && (status = ep_dispatch_info(worker->handle, info)) != EP_OK)
        status = worker_failure(error, status, "ep_dispatch_info");
    return status;
}

static ep_status combined(struct worker *worker, const void *rows, ep_op_info *info, struct ep_error *error)
{
    ep_status status = worker_combine(worker, rows, error);

    if (status == EP_OK)
        status = worker_wait(worker, "combine", error);
    info->size = sizeof *info;
    if (status == EP_OK && (status = ep_combine_info(worker->handle, info)) != EP_OK)
        status = worker_failure(error, status, "ep_combine_info");
    return status;
}

/* The backward pass needs what came forward, and makes gradients of the weights of both. */
static ep_status weight_grads(struct worker *worker, const struct ep_ref_dispatch *plan,
                              const struct received *received, struct ep_error *error)
{
    const struct received forward = memory_kept(worker, received);
    ep_status status = experts_weight_grads(&worker->inputs, worker->rank, &forward, received, plan,
                                            worker->own.row_grads, error);

    return status == EP_OK ? memory_push(worker, worker->buffers.row_grads, worker->own.row_grads,
                                         worker->sizes.row_grads, error)
                           : status;
}

static ep_status keep_or_use(struct worker *worker, const struct ep_ref_dispatch *plan,
                             const struct received *received, struct ep_error *error)
{
    if (worker->of.pass == BENCH_FORWARD)
        return EP_OK;
    if (worker->inputs.pass == BENCH_BACKWARD)
        return weight_grads(worker, plan, received, error);
    memory_keep(worker, received);
    return EP_OK;
}

ep_status worker_expect(struct worker *worker, struct verifier *verifier, const ep_op_info *info,
                        struct ep_ref_dispatch *plan, struct ep_error *error)
{
    const uint64_t room = worker->sizes.sources / sizeof(ep_source_row);
    const bool ht = worker->of.mode == EP_MODE_HT;
    ep_status status = memory_receive_tables(worker, error);

    if (status != EP_OK)
        return status;
    verify_arrived(verifier, info->arrived, ht ? worker->own.sources : NULL, info->rows < room ? info->rows : room);
    return make_plan(worker, plan, error);
}

ep_status worker_receive(struct worker *worker, struct verifier *verifier, const struct ep_ref_dispatch *plan,
                         const ep_op_info *info, bool in_place, const void **rows, uint64_t *hash,
                         struct ep_error *error)
{
    struct received received;
    uint64_t stride, content;
    char *to;
    ep_status status = memory_receive(worker, plan, info, &received, error);

    if (status != EP_OK)
        return status;
    *rows = place_rows(worker, &received, in_place, &to, &stride);
    if (received.layout == EP_LAYOUT_RANK_MAJOR && plan->n_rows > 0 && !info->view) {
        verify_mismatch(&worker->result->verdict, 1, "a rank-major dispatch came without a view");
        return EP_OK;
    }
    content = verify_hash_dispatch(&received, plan);
    *hash = verify_hash(*hash, &content, sizeof content);
    if (verifier)
        status = verify_dispatch(verifier, &received, plan, worker->own.sources, info, error);
    if (status == EP_OK)
        status = keep_or_use(worker, plan, &received, error);
    if (status == EP_OK)
        status = experts_run(&worker->inputs, worker->rank, &received, plan, to, stride, error);
    return status == EP_OK ? memory_send_rows(worker, plan, info, to, stride, error) : status;
}

/* What the combine gave. */
static ep_status check_result(struct worker *worker, struct verifier *verifier, const uint64_t *arrived,
                              struct ep_error *error)
{
    ep_status status = verify_combine(verifier, worker->own.result, arrived, error);

    if (status == EP_OK && worker->inputs.pass == BENCH_BACKWARD)
        status = verify_weight_grads(verifier, worker->own.topk_grads, arrived, error);
    return status;
}

static ep_status run_with_plan(struct worker *worker, struct verifier *verifier,
                               const struct ep_ref_dispatch *plan, const ep_op_info *dispatch, uint32_t run,
                               uint64_t *hash, struct ep_error *error)
{
    ep_op_info combine = { 0 };
    const void *rows = NULL;
    uint64_t result = 0;
    /* The first run is checked and, in rank-major, works in place; later ones must give the same bytes. */
    ep_status status =
        worker_receive(worker, run == 0 ? verifier : NULL, plan, dispatch, run == 0, &rows, hash, error);

    if (status == EP_OK)
        status = combined(worker, rows, &combine, error);
    if (status == EP_OK)
        status = worker_hash_result(worker, &result, error);
    if (status == EP_OK && run == 0)
        status = check_result(worker, verifier, combine.arrived, error);
    *hash = verify_hash(*hash, &result, sizeof result);
    worker->result->wire_bytes = dispatch->wire_bytes + combine.wire_bytes;
    worker->result->logical_bytes = dispatch->logical_bytes + combine.logical_bytes;
    return status;
}

static ep_status run_pass(struct worker *worker, uint32_t run, uint64_t *hash, struct ep_error *error)
{
    struct verifier verifier = { &worker->inputs, worker->rank, &worker->result->verdict,
                                 &worker->result->progress, false };
    struct ep_ref_dispatch plan;
    ep_op_info info = { 0 };
    ep_status status;

    status = memory_poison(worker, error);
    if (status == EP_OK)
        status = dispatched(worker, &info, error);
    if (status != EP_OK)
        return status;
    status = worker_expect(worker, &verifier, &info, &plan, error);
    if (status != EP_OK)
        return status;
    status = run_with_plan(worker, &verifier, &plan, &info, run, hash, error);
    ep_ref_dispatch_free(&plan);
    return status;
}

static ep_status backward_pass(struct worker *worker, uint32_t run, uint64_t *hash, struct ep_error *error)
{
    struct ep_error forward = EP_ERROR_INIT;
    ep_status status = worker_begin_pass(worker, BENCH_BACKWARD, error);

    if (status == EP_OK)
        status = run_pass(worker, run, hash, error);
    if (worker_begin_pass(worker, BENCH_FORWARD, &forward) != EP_OK && status == EP_OK)
        return ep_error_set(error, forward.status, "%s", forward.text);
    return status;
}

static ep_status verified_run(struct worker *worker, uint32_t run, uint32_t flags, struct ep_error *error)
{
    struct bench_verdict *verdict = &worker->result->verdict;
    uint64_t hash = 0;
    ep_status status;

    worker->op_flags = flags;
    status = run_pass(worker, run, &hash, error);
    worker->op_flags = 0;
    if (status == EP_OK && worker->of.pass == BENCH_BACKWARD)
        status = backward_pass(worker, run, &hash, error);
    if (status != EP_OK)
        return status;
    if (run > 0)
        verify_mismatch(verdict, hash != verdict->hash, "run %u differs from run 0 with the same inputs", run);
    verdict->hash = hash;
    verdict->runs++;
    return EP_OK;
}

/*
 * When everybody is there: one run against the reference, and one more that must give the same bits, and
 * one with the handle's routing again and (LL) in two halves, which must too.  With ranks gone, one.
 */
ep_status worker_verify(struct worker *worker, bool masked, struct ep_error *error)
{
    uint32_t halves = worker->of.mode == EP_MODE_LL ? EP_OP_SEND_ONLY : 0;
    const uint32_t flags[] = { 0, 0, EP_OP_CACHED | halves };
    uint32_t runs = masked ? 1 : sizeof flags / sizeof *flags;
    ep_status status = EP_OK;

    memset(&worker->result->verdict, 0, sizeof worker->result->verdict);
    for (uint32_t run = 0; status == EP_OK && run < runs; run++)
        status = verified_run(worker, run, flags[run], error);
    return status;
}
