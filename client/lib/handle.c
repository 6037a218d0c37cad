#include <stdlib.h>
#include <string.h>

#include "client_private.h"

/* ---- failures -------------------------------------------------------------------- */

/* A GPU tells of one in two places, and they are not looked at at once: it may have been told already. */
void handle_failure(struct ep_rank *rank, ep_handle *handle, uint64_t seq, const struct ep_op_result *result)
{
    struct failure *failure = handle ? &handle->failure : &rank->failure;
    const char *text = result->text[0] ? result->text : ep_status_text((ep_status)result->status);

    if (failure->status != EP_OK || seq < failure->told)
        return; /* the first one counts */
    failure->seq = seq;
    failure->status = (ep_status)result->status;
    copy_text(failure->text, sizeof failure->text, text);
}

static bool is_earlier(const struct failure *a, const struct failure *b)
{
    return a->status != EP_OK && (b->status == EP_OK || a->seq < b->seq);
}

static void set_told(struct failure *failure)
{
    if (failure->status == EP_OK)
        return;
    failure->status = EP_OK;
    failure->told = failure->seq + 1;
}

ep_status tell_failure(struct failure *failure, struct ep_error *error)
{
    ep_status status = failure->status;

    if (status == EP_OK)
        return EP_OK;
    set_told(failure);
    return ep_error_set(error, status, "%s", failure->text);
}

ep_status tell_first_failure(struct ep_rank *rank, struct ep_error *error)
{
    struct failure *first = &rank->failure;
    ep_status status;

    for (uint32_t i = 0; i < EP_MAX_HANDLES; i++)
        if (rank->handles[i] && is_earlier(&rank->handles[i]->failure, first))
            first = &rank->handles[i]->failure;
    status = tell_failure(first, error);
    if (status == EP_OK)
        return EP_OK;
    set_told(&rank->failure);
    for (uint32_t i = 0; i < EP_MAX_HANDLES; i++)
        if (rank->handles[i])
            set_told(&rank->handles[i]->failure);
    return status;
}

/* ---- results --------------------------------------------------------------------- */

/* The sending half has counted what was sent, the other one what came. */
static void add_half(const struct ep_op_result *half, ep_op_info *info)
{
    info->dropped += half->dropped;
    info->wire_bytes += half->wire_bytes;
    info->logical_bytes += half->logical_bytes;
    info->wait_ns += half->wait_ns;
    info->service_ns += half->end_ns - half->start_ns;
}

/* An op in a graph that is launched again has no call of its own: its time is that of the executor. */
static uint64_t total_ns(const struct pending *pending, const struct ep_op_result *result)
{
    return pending->start_ns ? ep_clock_ns() - pending->start_ns : result->end_ns - result->start_ns;
}

static void fill_info(const struct ep_rank *rank, const struct pending *pending,
                      const struct ep_op_result *result, ep_op_info *info)
{
    *info = (ep_op_info){
        .size = sizeof *info,
        .status = (ep_status)result->status,
        .number = result->number,
        .rows = result->rows,
        .rows_needed = result->rows_needed,
        .dropped = result->dropped,
        .absent = result->absent,
        .late_rank = result->late_rank,
        .wire_bytes = result->wire_bytes,
        .logical_bytes = result->logical_bytes,
        .service_ns = result->end_ns - result->start_ns,
        .wait_ns = result->wait_ns,
        .total_ns = total_ns(pending, result),
        .view_stride = result->view_stride,
        .scales_view_stride = result->scales_view_stride,
    };
    if (result->view)
        info->view = rank->window + result->view;
    if (result->scales_view) {
        info->scales_view = rank->window + result->scales_view;
        info->scales_row_stride = rank->shape.map.scales_bytes;
    }
    memcpy(info->arrived, result->arrived, sizeof info->arrived);
}

void handle_result(struct ep_rank *rank, uint64_t seq, const struct pending *pending,
                   const struct ep_op_result *result)
{
    struct ep_handle *handle = pending->handle;

    if (pending->part == PART_RELEASE)
        return; /* nobody is waiting for it, and it has no outputs */
    if (result->status != EP_OK)
        handle_failure(rank, handle, seq, result);
    if (!handle)
        return;
    if (pending->half && result->status == EP_OK) {
        handle->half = *result;
        return;
    }

    struct outcome *outcome = pending->part == PART_DISPATCH ? &handle->dispatch : &handle->combine;

    fill_info(rank, pending, result, &outcome->info);
    if (handle->half.status == EP_OK && handle->half.end_ns)
        add_half(&handle->half, &outcome->info);
    memset(&handle->half, 0, sizeof handle->half);
    outcome->known = true;
}

static ep_status give_outcome(const struct ep_handle *handle, const struct outcome *outcome,
                              const char *what, ep_op_info *info)
{
    if (!handle || !outcome->known)
        return ep_error_set(last_error(), handle ? EP_FAILED_PRECONDITION : EP_INVALID_ARGUMENT,
                            handle ? "no %s of this handle has finished" : "handle is NULL", what);
    return give_struct("ep_op_info", info, &outcome->info, sizeof outcome->info);
}

ep_status ep_dispatch_info(const ep_handle *handle, ep_op_info *info)
{
    return give_outcome(handle, handle ? &handle->dispatch : NULL, "dispatch", info);
}

ep_status ep_combine_info(const ep_handle *handle, ep_op_info *info)
{
    return give_outcome(handle, handle ? &handle->combine : NULL, "combine", info);
}

/* ---- life ------------------------------------------------------------------------ */

/* What is in the records of its number already is of earlier handles, of this worker or the rank's last one. */
static void skip_records(const struct ep_rank *rank, ep_handle *handle)
{
    for (uint32_t part = 0; part < EP_DEVICE_PARTS; part++)
        handle->device.seen[part] = rank->device->seen.records[handle->id][part].sequence;
}

ep_status ep_handle_create(ep_rank *rank, ep_handle **out)
{
    struct ep_error *error = last_error();
    uint32_t id = 0;

    if (!rank || !out)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is NULL", rank ? "handle" : "rank");
    while (id < EP_MAX_HANDLES && rank->handles[id])
        id++;
    if (id == EP_MAX_HANDLES)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "the rank has %u handles: no more are possible",
                            EP_MAX_HANDLES);

    struct ep_handle *handle = calloc(1, sizeof *handle);

    if (!handle)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a handle");
    handle->rank = rank;
    handle->id = id;
    handle->generation = ++rank->generations;
    if (rank->device)
        skip_records(rank, handle);
    rank->handles[id] = handle;
    *out = handle;
    return EP_OK;
}

/* Gives back what the routing holds at the server: the bank's credit above all. */
static void post_release(struct ep_handle *handle)
{
    struct pending pending = { .part = PART_RELEASE };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_op op = { .kind = EP_OP_RELEASE, .mode = handle->op.mode, .layout = handle->op.layout,
                        .handle = handle->id, .generation = handle->generation };

    /* Fails only with the rank. */
    (void)handle->rank->executor->submit(handle->rank, &op, &pending, NULL, &error);
}

static void forget(struct ep_handle *handle)
{
    struct ep_rank *rank = handle->rank;

    for (uint64_t seq = rank->tail; seq != rank->head; seq++)
        if (rank->pending[seq % EP_RING_SLOTS].handle == handle)
            rank->pending[seq % EP_RING_SLOTS].handle = NULL;
    if (is_earlier(&handle->failure, &rank->failure))
        rank->failure = handle->failure;
    rank->handles[handle->id] = NULL;
    free(handle);
}

void ep_handle_destroy(ep_handle *handle)
{
    if (!handle)
        return;
    if (handle->routed && (!handle->combined || handle->open))
        post_release(handle);
    forget(handle);
}

void handles_free(struct ep_rank *rank)
{
    for (uint32_t i = 0; i < EP_MAX_HANDLES; i++)
        if (rank->handles[i])
            forget(rank->handles[i]);
}
