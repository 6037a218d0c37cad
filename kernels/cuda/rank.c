/* A rank's ops: descriptors to kernel parameters. */
#include "cuda_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank_base.h"

struct ep_cuda_rank {
    uint32_t device, modes;
    uint32_t shared_bytes, ht_shared_bytes;
    struct ep_ll_rank ll;
    struct ep_ht_rank ht;
    const struct ep_regions *regions; /* the caller's */
    /* The send-only op of a handle that its complete finishes. */
    struct ep_op half[EP_MAX_HANDLES];
};

/* ---- open ------------------------------------------------------------------------- */

ep_status ep_cuda_rank_share(const struct ep_cuda_rank_options *o, struct ep_cuda_share *share, struct ep_error *error)
{
    struct ep_cuda_device device;
    ep_status status = ep_cuda_device_info(o->device, &device, error);

    if (status != EP_OK)
        return status;
    share->sms = o->max_sms && o->max_sms < device.sms ? o->max_sms : device.sms;
    share->shares = share->sms < device.sms;
    return EP_OK;
}

ep_status ep_cuda_rank_runs(const struct ep_cuda_rank_options *o, int result, uint32_t blocks, struct ep_error *error)
{
    struct ep_cuda_device device;

    if (result == 0 && blocks > 0)
        return EP_OK;
    if (ep_cuda_device_info(o->device, &device, error) != EP_OK)
        return error->status;
    return ep_error_set(error, EP_UNIMPLEMENTED, "the kernels do not run on device %u (%s, sm_%u%u): %s", o->device,
                        device.name, device.major, device.minor, ep_ll_error_text(result));
}

/*
 * A rank's kernel waits for peers with all of its blocks.  Of ranks that share a GPU another one's comes meanwhile, for
 * which somebody may wait elsewhere: it must find room, whatever the one that is there is, and wherever its blocks are.
 * So no rank has more blocks than its multiprocessors hold of any of our kernels: two on each.
 */
enum { SHARED_BLOCKS = 2 };

uint32_t ep_cuda_share_blocks(const struct ep_cuda_share *share, uint32_t sms, uint32_t fit)
{
    return sms * (share->shares && fit > SHARED_BLOCKS ? SHARED_BLOCKS : fit);
}

uint32_t ep_cuda_rank_ht_sms(const struct ep_cuda_rank_options *o, uint32_t sms)
{
    return o->max_ht_sms && o->max_ht_sms < sms ? o->max_ht_sms : sms;
}

/*
 * Occupancy asks the runtime, which works in the context that is current.  Kernels for HT are loaded in any case: when the
 * group gets HT, ops of other ranks of this process may be under way, which the loading would wait for (serve.c).
 */
static ep_status size_grids(const struct ep_cuda_rank_options *o, struct ep_cuda_rank *rank, struct ep_error *error)
{
    const bool has_ht = rank->modes >> EP_MODE_HT & 1;
    uint32_t ll[2] = { 1, 1 }, ht[2] = { 1, 1 }; /* dispatch, combine */
    struct ep_cuda_share share = { 0 };
    ep_status status = ep_cuda_rank_share(o, &share, error);
    int result, ht_result;

    if (status == EP_OK)
        status = ep_cuda_enter(o->device, NULL, error);
    if (status != EP_OK)
        return status;
    result = ep_ll_prepare(rank->shared_bytes, share.shares, &ll[0], &ll[1]);
    ht_result = ep_ht_prepare(rank->ht_shared_bytes, share.shares, &ht[0], &ht[1]);
    ep_cuda_leave();
    if (!has_ht)
        ht[0] = ht[1] = 1;
    else if (result == 0)
        result = ht_result;
    status = ep_cuda_rank_runs(o, result, ll[0] && ll[1] && ht[0] && ht[1], error);
    rank->ll.sms = share.sms;
    rank->ll.dispatch_blocks = ep_cuda_share_blocks(&share, rank->ll.sms, ll[0]);
    rank->ll.combine_blocks = ep_cuda_share_blocks(&share, rank->ll.sms, ll[1]);
    rank->ht.sms = ep_cuda_rank_ht_sms(o, rank->ll.sms);
    rank->ht.dispatch_blocks = ep_cuda_share_blocks(&share, rank->ht.sms, ht[0]);
    rank->ht.combine_blocks = ep_cuda_share_blocks(&share, rank->ht.sms, ht[1]);
    return status;
}

ep_status ep_cuda_rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                            struct ep_error *error)
{
    const struct ep_limits *limits = &options->map->limits;
    struct ep_error unused = EP_ERROR_INIT;
    struct ep_cuda_rank *rank;

    error = error ? error : &unused;
    if (ep_cuda_rank_check(options, error) != EP_OK)
        return error->status;
    rank = calloc(1, sizeof *rank);
    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    rank->device = options->device;
    rank->modes = limits->modes;
    rank->shared_bytes = (uint32_t)ep_device_shared_bytes(limits);
    rank->ht_shared_bytes = (uint32_t)ep_device_ht_shared_bytes(limits);
    rank->regions = options->regions;
    ep_cuda_rank_base(options, &rank->ll);
    ep_cuda_rank_ht_base(options, &rank->ll.base, &rank->ht);
    if (size_grids(options, rank, error) != EP_OK) {
        free(rank);
        return error->status;
    }
    *out = rank;
    return EP_OK;
}

void ep_cuda_rank_close(struct ep_cuda_rank *rank)
{
    struct ep_error unused = EP_ERROR_INIT;

    if (!rank)
        return;
    (void)ep_cuda_stream_sync(rank->device, NULL, &unused); /* nobody is there to hear of it */
    free(rank);
}

/* ---- run -------------------------------------------------------------------------- */

static int launch_ll(struct ep_cuda_rank *rank, const struct ep_op *op, bool completes, CUstream stream)
{
    struct ep_ll_args args = rank->ll.base;

    ep_ll_fill(&rank->ll, rank->regions, op, completes, &args);
    switch (op->kind) {
    case EP_OP_DISPATCH: return ep_ll_dispatch(&args, rank->shared_bytes, stream);
    case EP_OP_COMBINE:  return ep_ll_combine(&args, rank->shared_bytes, stream);
    default:             return ep_ll_release(&args, stream);
    }
}

static int launch_ht(struct ep_cuda_rank *rank, const struct ep_op *op, CUstream stream)
{
    struct ep_ht_args args = rank->ht.base;

    ep_ht_fill(&rank->ht, rank->regions, op, &args);
    switch (op->kind) {
    case EP_OP_DISPATCH: return ep_ht_dispatch(&args, rank->ht_shared_bytes, stream);
    case EP_OP_COMBINE:  return ep_ht_combine(&args, stream);
    default:             return 0; /* released: nothing of a handle is a peer's */
    }
}

ep_status ep_cuda_check_reach(const struct ep_op *op, struct ep_error *error)
{
    if (op->mode != EP_MODE_HT || ep_ht_can_reach(op))
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "out: an HT dispatch on GPUs has it, and out_scales, in the window (ep_alloc()), where "
                        "peers write it; all else may be in registered memory");
}

/* What ep_op_check() cannot know. */
static ep_status check(const struct ep_cuda_rank *rank, const struct ep_op *op, struct ep_error *error)
{
    if (op->mode != EP_MODE_HT)
        return EP_OK;
    if (!(rank->modes >> EP_MODE_HT & 1))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "mode is %u: the group has LL 1 only", op->mode);
    return ep_cuda_check_reach(op, error);
}

ep_status ep_cuda_rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error)
{
    struct ep_error unused = EP_ERROR_INIT;
    const struct ep_cuda_context *context;
    const bool completes = op->kind == EP_OP_COMPLETE;
    int result;

    error = error ? error : &unused;
    if (op->handle >= EP_MAX_HANDLES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is %u: must be below %u", op->handle,
                            EP_MAX_HANDLES);
    if (completes) {
        op = &rank->half[op->handle];
        if (op->kind == 0)
            return ep_error_set(error, EP_FAILED_PRECONDITION, "handle %u has no send-only op to complete",
                                (uint32_t)(op - rank->half));
    }
    if (check(rank, op, error) != EP_OK)
        return error->status;
    if (op->flags & EP_OP_SEND_ONLY && !completes)
        rank->half[op->handle] = *op;
    if (ep_cuda_enter(rank->device, &context, error) != EP_OK)
        return error->status;
    result = op->mode == EP_MODE_HT ? launch_ht(rank, op, ep_cuda_stream(context, stream))
                                    : launch_ll(rank, op, completes, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    return ep_cuda_launched(error, rank->device, result);
}
