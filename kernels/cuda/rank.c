/* A rank's ops: descriptors to kernel parameters. */
#include "cuda_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ll_op.h"

struct ep_cuda_rank {
    uint32_t device, shared_bytes;
    struct ep_ll_rank ll;
    const struct ep_regions *regions; /* the caller's */
    /* The send-only op of a handle that its complete finishes. */
    struct ep_op half[EP_MAX_HANDLES];
};

/* ---- open ------------------------------------------------------------------------- */

/* Expert e on the rank that holds it when the first E mod R ranks hold one more than the others. */
static bool is_contiguous(const struct ep_placement *p)
{
    const uint32_t share = p->experts / p->ranks, larger = p->experts % p->ranks;
    uint32_t e = 0;

    if (p->first[p->experts] != p->experts)
        return false;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t l = 0; l < share + (r < larger); l++, e++)
            if (p->rank[e] != r || p->local[e] != l)
                return false;
    return true;
}

void ep_cuda_rank_base(const struct ep_cuda_rank_options *o, struct ep_ll_rank *rank)
{
    const struct ep_layout_map *m = o->map;
    const struct ep_limits *l = &m->limits;
    const uint8_t *state = (const uint8_t *)o->state;
    struct ep_ll_args *a = &rank->base;
    struct ep_device_tables tables;

    ep_device_state_tables(o->map, o->placement, &tables);
    rank->routing = tables.routing;
    rank->weights = tables.weights;
    rank->handle_stride = tables.handle_stride;
    for (uint32_t r = 0; r < l->ranks; r++)
        a->window[r] = o->windows[r];
    a->state = o->state;
    if (!is_contiguous(o->placement)) {
        a->home_first = (const uint32_t *)(const void *)(state + tables.home_first);
        a->home_rank = (const uint32_t *)(const void *)(state + tables.home_rank);
        a->home_local = (const uint32_t *)(const void *)(state + tables.home_local);
    }
    a->rank = o->rank;
    a->ranks = l->ranks;
    a->experts = l->experts;
    a->local_experts = l->local_experts;
    a->hidden = l->hidden;
    a->max_top_k = l->top_k;
    a->max_tokens = l->ll_max_tokens;
    a->banks = l->ll_banks;
    a->share = l->experts / l->ranks;
    a->larger = l->experts % l->ranks;
    a->per_share = ep_ll_inverse(a->share);
    a->per_larger = ep_ll_inverse(a->share + 1);
    a->ll = m->ll;
    a->bank_bytes = m->bank_bytes;
    a->bank = m->bank;
    a->header_bytes = m->header_bytes;
    a->counts_bytes = m->counts_bytes;
    a->places_bytes = m->places_bytes;
    a->scales_bytes = m->scales_bytes;
    a->combine_row_bytes = m->combine_row_bytes;
}

ep_status ep_cuda_rank_sms(const struct ep_cuda_rank_options *o, int result, uint32_t blocks, uint32_t *sms,
                           struct ep_error *error)
{
    struct ep_cuda_device device;
    ep_status status = ep_cuda_device_info(o->device, &device, error);

    if (status != EP_OK)
        return status;
    if (result != 0 || blocks == 0)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the LL kernels do not run on device %u (%s, sm_%u%u): %s",
                            o->device, device.name, device.major, device.minor, ep_ll_error_text(result));
    *sms = o->max_sms && o->max_sms < device.sms ? o->max_sms : device.sms;
    return EP_OK;
}

/* Occupancy asks the runtime, which works in the context that is current. */
static ep_status size_grids(const struct ep_cuda_rank_options *o, struct ep_cuda_rank *rank, struct ep_error *error)
{
    uint32_t dispatch = 0, combine = 0;
    ep_status status = ep_cuda_enter(o->device, NULL, error);
    int result;

    if (status != EP_OK)
        return status;
    result = ep_ll_prepare(rank->shared_bytes, &dispatch, &combine);
    ep_cuda_leave();
    status = ep_cuda_rank_sms(o, result, dispatch < combine ? dispatch : combine, &rank->ll.sms, error);
    rank->ll.dispatch_blocks = rank->ll.sms * dispatch;
    rank->ll.combine_blocks = rank->ll.sms * combine;
    return status;
}

ep_status ep_cuda_rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                            struct ep_error *error)
{
    const struct ep_limits *limits = &options->map->limits;
    struct ep_error unused = EP_ERROR_INIT;
    struct ep_cuda_rank *rank;

    error = error ? error : &unused;
    if (ep_device_check(limits, error) != EP_OK)
        return error->status;
    rank = calloc(1, sizeof *rank);
    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    rank->device = options->device;
    rank->shared_bytes = (uint32_t)ep_device_shared_bytes(limits);
    rank->regions = options->regions;
    ep_cuda_rank_base(options, &rank->ll);
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

static int launch(struct ep_cuda_rank *rank, const struct ep_op *op, bool completes, CUstream stream)
{
    struct ep_ll_args args = rank->ll.base;

    ep_ll_fill(&rank->ll, rank->regions, op, completes, &args);
    switch (op->kind) {
    case EP_OP_DISPATCH: return ep_ll_dispatch(&args, rank->shared_bytes, stream);
    case EP_OP_COMBINE:  return ep_ll_combine(&args, rank->shared_bytes, stream);
    default:             return ep_ll_release(&args, stream);
    }
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
    if (ep_ll_can(op) != EP_OK)
        return ep_error_set(error, EP_UNIMPLEMENTED, "mode is %u: the cuda backend has LL 1 only", op->mode);
    if (op->flags & EP_OP_SEND_ONLY && !completes)
        rank->half[op->handle] = *op;
    if (ep_cuda_enter(rank->device, &context, error) != EP_OK)
        return error->status;
    result = launch(rank, op, completes, ep_cuda_stream(context, stream));
    ep_cuda_leave();
    return result == 0 ? EP_OK
                       : ep_error_set(error, EP_INTERNAL, "launch on device %u: %s", rank->device,
                                      ep_ll_error_text(result));
}
