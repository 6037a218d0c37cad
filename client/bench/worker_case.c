/* One case at one rank: memory, inputs, and the verified runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker_private.h"

/* ---- preparing --------------------------------------------------------------------- */

static ep_status fill_inputs(struct worker *worker, struct ep_error *error)
{
    const struct inputs *in = &worker->inputs;
    const struct buffers *b = &worker->own;
    const struct ep_ref_rank *own = &in->rank[worker->rank];
    size_t row = (size_t)in->hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].input);
    size_t choices = (size_t)worker->tokens * in->config->top_k;

    for (uint32_t t = 0; t < worker->tokens; t++)
        inputs_row(in, worker->rank, t, (char *)b->x + t * row,
                   b->x_scales ? (char *)b->x_scales + t * in->scale_bytes : NULL);
    for (size_t i = 0; i < choices; i++) {
        if (worker_index_bytes(worker) == 4)
            ((int32_t *)b->topk)[i] = (int32_t)own->topk[i];
        else
            ((int64_t *)b->topk)[i] = own->topk[i];
        b->weights[i] = own->weights[i];
    }
    /* Timed without having been verified. */
    if (memory_fill(worker, worker->buffers.rows, 0, worker->sizes.rows, error) != EP_OK)
        return error->status;
    return memory_push_inputs(worker, 0, error);
}

static ep_status make_plan(struct worker *worker, struct ep_ref_dispatch *plan, struct ep_error *error)
{
    uint32_t max_tokens = worker->of.mode == EP_MODE_LL ? worker->info.group.ll_max_tokens : 0;

    if (!ep_ref_dispatch(&worker->inputs.routing, worker->rank, worker->of.layout, worker->config->alignment,
                         max_tokens, plan))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the expected rows");
    return EP_OK;
}

static ep_status prepare_memory(struct worker *worker, struct ep_error *error)
{
    struct ep_ref_dispatch plan;
    ep_status status = make_plan(worker, &plan, error);

    if (status != EP_OK)
        return status;
    buffer_sizes(worker->config, &worker->of, worker->tokens, worker->info.group.max_local_experts,
                 worker->info.group.ll_max_tokens, plan.positions, &worker->sizes);
    ep_ref_dispatch_free(&plan);
    status = memory_open(worker, error);
    return status == EP_OK ? fill_inputs(worker, error) : status;
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
    status = prepare_memory(worker, error);
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

/*
 * Where the experts' outputs go (at this process), and what the combine is given.  The first run of rank-major works in
 * place, the second one with rows of its own; both must come to the same.
 */
static const void *place_rows(const struct worker *worker, const struct received *received, uint32_t run,
                              char **rows, uint64_t *stride)
{
    bool rank_major = worker->of.layout == EP_LAYOUT_RANK_MAJOR, fp8 = received->scale_base != NULL;

    *stride = 0;
    if (rank_major && run == 0 && !fp8) {
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

/* Between the two ops: check what came, then let the experts work. */
static ep_status between(struct worker *worker, struct verifier *verifier, const struct ep_ref_dispatch *plan,
                         const ep_op_info *info, uint32_t run, const void **rows, uint64_t *hash,
                         struct ep_error *error)
{
    struct received received;
    uint64_t stride;
    char *to;
    ep_status status = memory_receive(worker, plan, info, &received, error);

    if (status != EP_OK)
        return status;
    *rows = place_rows(worker, &received, run, &to, &stride);
    if (received.layout == EP_LAYOUT_RANK_MAJOR && plan->n_rows > 0 && !info->view) {
        verify_mismatch(verifier->verdict, 1, "a rank-major dispatch came without a view");
        return EP_OK;
    }
    *hash = verify_hash_dispatch(&received, plan);
    if (run == 0)
        status = verify_dispatch(verifier, &received, plan, worker->own.sources, info, error);
    if (status == EP_OK)
        status = experts_run(&worker->inputs, worker->rank, &received, plan, to, stride, error);
    return status == EP_OK ? memory_send_rows(worker, plan, info, to, stride, error) : status;
}

static ep_status run_with_plan(struct worker *worker, struct verifier *verifier,
                               const struct ep_ref_dispatch *plan, const ep_op_info *dispatch, uint32_t run,
                               struct ep_error *error)
{
    struct bench_verdict *verdict = &worker->result->verdict;
    ep_op_info combine = { 0 };
    const void *rows = NULL;
    uint64_t hash = 0;
    ep_status status = between(worker, verifier, plan, dispatch, run, &rows, &hash, error);

    if (status == EP_OK)
        status = combined(worker, rows, &combine, error);
    if (status == EP_OK)
        status = memory_pull_result(worker, error);
    if (status != EP_OK)
        return status;
    hash = verify_hash(hash, worker->own.result, worker->sizes.result);
    if (run == 0) /* later runs must give the same bytes */
        status = verify_combine(verifier, worker->own.result, combine.arrived, error);
    else
        verify_mismatch(verdict, hash != verdict->hash, "run %u differs from run 0 with the same inputs",
                        run);
    verdict->hash = hash;
    verdict->runs++;
    worker->result->wire_bytes = dispatch->wire_bytes + combine.wire_bytes;
    worker->result->logical_bytes = dispatch->logical_bytes + combine.logical_bytes;
    return status;
}

static ep_status verified_run(struct worker *worker, uint32_t run, struct ep_error *error)
{
    struct verifier verifier = { &worker->inputs, worker->rank, &worker->result->verdict,
                                 &worker->result->progress };
    struct ep_ref_dispatch plan;
    ep_op_info info = { 0 };
    ep_status status;

    status = memory_poison(worker, error);
    if (status == EP_OK)
        status = dispatched(worker, &info, error);
    if (status != EP_OK)
        return status;
    verify_arrived(&verifier, info.arrived);
    status = make_plan(worker, &plan, error);
    if (status != EP_OK)
        return status;
    status = run_with_plan(worker, &verifier, &plan, &info, run, error);
    ep_ref_dispatch_free(&plan);
    return status;
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
    for (uint32_t run = 0; status == EP_OK && run < runs; run++) {
        worker->op_flags = flags[run];
        status = verified_run(worker, run, error);
    }
    worker->op_flags = 0;
    return status;
}
