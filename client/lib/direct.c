/*
 * Executor direct on a GPU: the rank's state and its peers' windows are mapped into this process, which puts
 * the kernels on the caller's streams itself.
 */
#include <string.h>
#include <unistd.h>

#include "client_private.h"

/* ---- memory ---------------------------------------------------------------------- */

static ep_status import_state(struct ep_rank *rank, uint64_t bytes, int fd, struct ep_error *error)
{
    struct device *d = rank->device;
    const uint64_t expected = ep_device_state_bytes(&rank->shape.map, &rank->shape.placement);

    if (d->state_memory)
        return ep_error_set(error, EP_PROTOCOL, "the server sent the rank's state twice");
    if (device_import(rank, fd, bytes, expected, "state", rank->rank, &d->state_memory, error) != EP_OK)
        return error->status;
    d->state = d->api->memory_at(d->state_memory);
    return EP_OK;
}

static ep_status take_frame(struct ep_rank *rank, const struct ep_attach_frame *frame, int fd,
                            struct ep_error *error)
{
    if (frame->type == EP_ATTACH_REFUSED)
        return ep_error_set(error, (ep_status)frame->status, "%s", frame->text);
    if (fd == EP_ATTACH_FD_LOST)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "its descriptor has come, and this process may open no more: raise its "
                            "limit of open files (ulimit -n)");
    if (frame->type != EP_ATTACH_MEMORY || fd < 0)
        return ep_error_set(error, EP_PROTOCOL, "the server sent frame type %u%s where memory must come",
                            frame->type, frame->type == EP_ATTACH_MEMORY ? " without a descriptor" : "");
    return frame->count == EP_ATTACH_MEMORY_STATE ? import_state(rank, frame->value, fd, error)
                                                  : device_import_window(rank, frame->rank, frame->value, fd, error);
}

static ep_status receive_memory(struct ep_rank *rank, uint32_t number, uint32_t count, struct ep_error *error)
{
    struct ep_attach_frame frame;
    int fd;

    if (ep_attach_receive(rank->socket, &frame, &fd, error) != EP_OK) {
        if (error->status == EP_UNAVAILABLE)
            ep_error_set(error, EP_DEADLINE_EXCEEDED, "nothing came");
        return ep_error_prefix(error, "MEMORY frame %u of %u", number + 1, count);
    }

    ep_status status = take_frame(rank, &frame, fd, error);

    if (fd >= 0)
        close(fd);
    return status;
}

/* All of it is there when each frame brought something new: the state and R - 1 windows. */
static ep_status receive_all(struct ep_rank *rank, uint32_t count, struct ep_error *error)
{
    const uint32_t needed = rank->shape.map.limits.ranks;
    const struct device *d = rank->device;

    if (count != needed)
        return ep_error_set(error, EP_PROTOCOL,
                            "the server sends %u memories beside the window: must be %u, a state and %u windows",
                            count, needed, needed - 1);
    for (uint32_t i = 0; i < count; i++)
        if (receive_memory(rank, i, count, error) != EP_OK)
            return error->status;
    return d->state ? EP_OK : ep_error_set(error, EP_PROTOCOL, "the server did not send the rank's state");
}

/* ---- identity -------------------------------------------------------------------- */

static ep_status check_state(struct ep_rank *rank, struct ep_error *error)
{
    struct device *d = rank->device;
    struct {
        uint64_t magic;
        uint32_t version, rank;
        uint64_t epoch;
    } head;
    _Static_assert(sizeof head == offsetof(struct ep_device_state, whole_lines), "the beginning of ep_device_state");

    if (device_read(d, &head, d->state, sizeof head, error) != EP_OK)
        return ep_error_prefix(error, "the state of rank %u", rank->rank);
    if (head.magic != EP_DEVICE_STATE_MAGIC || head.version != EP_DEVICE_STATE_VERSION)
        return ep_error_set(error, EP_PROTOCOL,
                            "the rank's state has version %u: this libepclient knows %u, they must be of "
                            "matching releases",
                            head.magic == EP_DEVICE_STATE_MAGIC ? head.version : 0, EP_DEVICE_STATE_VERSION);
    if (head.rank != rank->rank || head.epoch != rank->epoch)
        return ep_error_set(error, EP_PROTOCOL,
                            "the rank's state is that of rank %u in epoch %llu: must be %u in %llu", head.rank,
                            (unsigned long long)head.epoch, rank->rank, (unsigned long long)rank->epoch);
    return EP_OK;
}

static ep_status check_identity(struct ep_rank *rank, struct ep_error *error)
{
    for (uint32_t r = 0; r < rank->shape.map.limits.ranks; r++)
        if (device_check_window(rank, r, error) != EP_OK)
            return error->status;
    return check_state(rank, error);
}

/* ---- ops ------------------------------------------------------------------------- */

static ep_status open_runner(struct ep_rank *rank, uint32_t sms, uint32_t ht_sms, struct ep_error *error)
{
    struct device *d = rank->device;
    void *windows[EP_DEVICE_NODE_RANKS] = { NULL };

    for (uint32_t r = 0; r < rank->shape.map.limits.ranks; r++)
        windows[r] = d->api->memory_at(d->window[r]);

    const struct ep_cuda_rank_options options = { .device = d->ordinal,
                                                  .rank = rank->rank,
                                                  .map = &rank->shape.map,
                                                  .placement = &rank->shape.placement,
                                                  .windows = windows,
                                                  .state = d->state,
                                                  .max_sms = sms,
                                                  .max_ht_sms = ht_sms,
                                                  .regions = &rank->regions };

    if (d->api->rank_open(&options, &d->runner, error) != EP_OK)
        return ep_error_prefix(error, "the kernels of rank %u", rank->rank);
    return EP_OK;
}

static ep_status launch(struct ep_rank *rank, const struct ep_op *op, ep_stream stream, struct ep_error *error)
{
    return rank->device->api->rank_run(rank->device->runner, op, stream, error);
}

ep_status direct_attach(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, const struct ep_attach_frame *welcome,
                        int fd, struct ep_error *error)
{
    const uint32_t ranks = rank->shape.map.limits.ranks;

    if (ranks > EP_DEVICE_NODE_RANKS)
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "the group has %u ranks: executor direct is for those of one node, %u at most", ranks,
                            EP_DEVICE_NODE_RANKS);
    if (device_import_window(rank, rank->rank, welcome->value, fd, error) != EP_OK
        || receive_all(rank, welcome->count, error) != EP_OK || check_identity(rank, error) != EP_OK
        || open_runner(rank, reply->sms, rank->ht_sms, error) != EP_OK)
        return error->status;
    rank->device->launch = launch;
    return device_ready(rank, error);
}

/* ---- the end --------------------------------------------------------------------- */

/* Nobody takes part any more, so whatever waits for a peer goes on at once. */
static void cut(struct ep_rank *rank)
{
    struct device *d = rank->device;
    struct ep_error ignored = EP_ERROR_INIT;
    uint64_t never[EP_DEVICE_NODE_RANKS];
    const uint32_t me = rank->rank, after = EP_DEVICE_NODE_RANKS - me - 1;

    memset(never, 0xff, sizeof never);
    _Static_assert(EP_DEVICE_NEVER == UINT64_MAX, "all bits");
    if (me > 0)
        (void)d->api->write(d->ordinal, &d->state->from[0], never, me * sizeof *never, d->alarm, &ignored);
    if (after > 0)
        (void)d->api->write(d->ordinal, &d->state->from[me + 1], never, after * sizeof *never, d->alarm,
                            &ignored);
}

const struct executor direct_executor = {
    .backend = EP_BACKEND_CUDA,
    .kind = EP_EXECUTOR_DIRECT,
    .streams = true,
    .submit = device_submit,
    .captured = device_captured,
    .wait = device_wait,
    .write = device_copy_in,
    .read = device_copy_out,
    .cut = cut,
    .drain = device_drain,
    .detach = device_detach,
};
