/* The way from an op to the mode that runs it: is its handle in the state that it needs? */
#include "host_private.h"

#include <string.h>

#include "ep_clock.h"

/* ---- handles ----------------------------------------------------------------------------- */

static ep_status check_generation(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;

    if (handle->retired || handle->state == EP_HANDLE_EMPTY)
        return ep_host_fail(call, EP_STALE_HANDLE, "handle %u has no dispatch: dispatch first", op->handle);
    if (handle->generation != op->generation)
        return ep_host_fail(call, EP_STALE_HANDLE, "handle %u is of generation %u: %u is gone", op->handle,
                            handle->generation, op->generation);
    return EP_OK;
}

/* The old routing is given up: nobody may wait for its bank. */
static void abandon(struct ep_host_call *call, struct ep_host_handle *handle)
{
    if (handle->state != EP_HANDLE_EMPTY && handle->mode == EP_MODE_LL && handle->number)
        ep_host_ll_release(call->team, call->rank, handle->number);
}

static ep_status release(struct ep_host_call *call, struct ep_host_handle *handle)
{
    if (handle->state == EP_HANDLE_EMPTY && !handle->has_choices)
        return EP_OK; /* never used: nothing to give back */
    if (handle->generation != call->op->generation)
        return check_generation(call, handle);
    abandon(call, handle);
    call->result->number = handle->number;
    handle->state = EP_HANDLE_EMPTY;
    handle->has_choices = false;
    handle->retired = true;
    return EP_OK;
}

static ep_status check_cached(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;
    ep_status status = check_generation(call, handle);

    if (status != EP_OK)
        return status;
    if (!handle->has_choices || handle->mode != op->mode)
        return ep_host_fail(call, EP_STALE_HANDLE, "handle %u has no routing of this mode", op->handle);
    if (handle->tokens != op->tokens)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "tokens is %u: the handle's routing has %u",
                            op->tokens, handle->tokens);
    if (handle->top_k != op->top_k)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "top_k is %u: the handle's routing has %u",
                            op->top_k, handle->top_k);
    return EP_OK;
}

static ep_status prepare_dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;

    if (op->flags & EP_OP_CACHED) {
        ep_status status = check_cached(call, handle);

        if (status != EP_OK)
            return status;
        abandon(call, handle);
    } else {
        if (handle->retired && handle->generation == op->generation)
            return ep_host_fail(call, EP_STALE_HANDLE, "handle %u, generation %u, was released",
                                op->handle, op->generation);
        abandon(call, handle);
        handle->generation = op->generation;
        handle->retired = false;
        handle->mode = op->mode;
        handle->tokens = op->tokens;
        handle->top_k = op->top_k;
        ep_host_routing_read(call, handle);
    }
    handle->layout = op->layout;
    handle->rows = 0;
    handle->state = EP_HANDLE_FAILED; /* until it has ended well */
    return EP_OK;
}

static ep_status dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = prepare_dispatch(call, handle);

    if (status != EP_OK)
        return status;
    return call->op->mode == EP_MODE_HT ? ep_host_ht_dispatch(call, handle)
                                        : ep_host_ll_dispatch(call, handle);
}

static ep_status check_combine(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;
    ep_status status = check_generation(call, handle);

    if (status != EP_OK)
        return status;
    if (handle->mode != op->mode || handle->layout != op->layout)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "mode %u, layout %u: the handle's dispatch had %u, %u",
                            op->mode, op->layout, handle->mode, handle->layout);
    if (handle->tokens != op->tokens)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "tokens is %u: the handle's dispatch had %u",
                            op->tokens, handle->tokens);
    if (handle->state == EP_HANDLE_SENT)
        return ep_host_fail(call, EP_FAILED_PRECONDITION, "handle %u: complete its send-only dispatch first",
                            op->handle);
    if (handle->state == EP_HANDLE_FAILED)
        return ep_host_fail(call, EP_STALE_HANDLE, "handle %u: its last op failed, dispatch again",
                            op->handle);
    if (handle->state != EP_HANDLE_ROUTED)
        return ep_host_fail(call, EP_STALE_HANDLE, "handle %u was combined already: dispatch again",
                            op->handle);
    return EP_OK;
}

static ep_status combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = check_combine(call, handle);

    if (status != EP_OK)
        return status;
    return call->op->mode == EP_MODE_HT ? ep_host_ht_combine(call, handle)
                                        : ep_host_ll_combine(call, handle);
}

static ep_status complete(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = check_generation(call, handle);

    if (status != EP_OK)
        return status;
    if (handle->state != EP_HANDLE_SENT && handle->state != EP_HANDLE_COMBINE_SENT)
        return ep_host_fail(call, EP_FAILED_PRECONDITION, "handle %u has no send-only op to complete",
                            call->op->handle);
    return handle->state == EP_HANDLE_SENT ? ep_host_ll_complete_dispatch(call, handle)
                                           : ep_host_ll_complete_combine(call, handle);
}

/* ---- execute -------------------------------------------------------------------------------- */

static ep_status run(struct ep_host_call *call)
{
    const struct ep_op *op = call->op;
    struct ep_host_handle *handle;

    if (op->handle >= EP_MAX_HANDLES)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "handle is %u: must be below %u", op->handle,
                            EP_MAX_HANDLES);
    if (!call->me->window)
        return ep_host_fail(call, EP_FAILED_PRECONDITION, "rank %u has no window yet", call->rank);
    handle = &call->me->handles[op->handle];
    switch (op->kind) {
    case EP_OP_DISPATCH: return dispatch(call, handle);
    case EP_OP_COMBINE: return combine(call, handle);
    case EP_OP_COMPLETE: return complete(call, handle);
    case EP_OP_RELEASE: return release(call, handle);
    default: return ep_host_fail(call, EP_INVALID_ARGUMENT, "kind is %u: must be 1..4", op->kind);
    }
}

void ep_host_execute(struct ep_host_team *team, uint32_t rank, const struct ep_op *op,
                     struct ep_op_result *result)
{
    struct ep_host_call call = { .team = team,
                                 .me = &team->ranks[rank],
                                 .rank = rank,
                                 .op = op,
                                 .result = result };

    memset(result, 0, sizeof *result);
    result->start_ns = ep_clock_ns();
    call.deadline_ns = result->start_ns +
                       __atomic_load_n(&team->timeout_ms, __ATOMIC_RELAXED) * EP_NS_PER_MS;
    if (!ep_host_is_absent(team, rank))
        result->status = (int32_t)run(&call);
    if (ep_host_is_absent(team, rank))
        ep_host_detached(&call);
    result->end_ns = ep_clock_ns();
}
