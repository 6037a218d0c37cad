/*
 * Executor server on a GPU: this process has the rank's window and nothing else of the group.  An op is handed
 * to the server in the order of the caller's stream, through the mailbox in the window (window.h).  What is registered
 * is handed on to the server, which maps it, and names it by number in ops.
 *
 * The end.  When the server or the rank is lost, nobody may answer the bell any more, and streams wait for that, in
 * graphs that were launched before too.  `closed` is set, once, by a copy that passes the ops, and every wait
 * ends for it as for an answer, those that come later too.  Their ops may still ring; who would hear it has been told
 * to begin no op, or is gone.
 *
 * `closed` is never unset: whoever has the rank next finds the window cleared, after this process has let go of
 * it.
 */
#include <unistd.h>

#include "client_private.h"

static struct ep_mailbox *mailbox_of(const struct ep_rank *rank)
{
    const struct device *d = rank->device;
    struct ep_control *control = d->api->memory_at(d->window[rank->rank]); /* GPU memory */

    return &control->gpu.mailbox;
}

static ep_status launch(struct ep_rank *rank, const struct ep_op *op, ep_stream stream, struct ep_error *error)
{
    const struct device *d = rank->device;

    return d->api->ring(d->ringer, op, stream, error);
}

/* Both processes' kernels run on the GPU at once, when both go through its MPS server. */
static ep_status open_ringer(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    struct device *d = rank->device;
    struct ep_cuda_device gpu;

    if (d->api->device_info(d->ordinal, &gpu, error) != EP_OK)
        return error->status;
    return d->api->ring_open(d->ordinal, d->api->memory_at(d->window[rank->rank]), gpu.mps && reply->mps, &d->ringer,
                             error);
}

ep_status mailbox_attach(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, const struct ep_attach_frame *welcome,
                         int fd, struct ep_error *error)
{
    if (welcome->count != 0)
        return ep_error_set(error, EP_PROTOCOL,
                            "the server sends %u memories beside the window: under executor server there are none",
                            welcome->count);
    if (device_import_window(rank, rank->rank, welcome->value, fd, error) != EP_OK
        || device_check_window(rank, rank->rank, error) != EP_OK || open_ringer(rank, reply, error) != EP_OK)
        return error->status;
    rank->device->launch = launch;
    return device_ready(rank, error);
}

static void cut(struct ep_rank *rank)
{
    struct ep_mailbox *mailbox = mailbox_of(rank);
    const struct device *d = rank->device;
    struct ep_error ignored = EP_ERROR_INIT;
    const uint32_t one = 1;

    (void)d->api->write(d->ordinal, &mailbox->closed, &one, sizeof one, d->alarm, &ignored);
}

/* ---- memory of this process, which the server maps ------------------------------------------------- */

/* In one allocation, as there is one descriptor to a region. */
static ep_status export(const struct ep_rank *rank, const struct ep_region *region, struct ep_attach_frame *frame,
                        int *fd, struct ep_error *error)
{
    const struct device *d = rank->device;
    uint64_t there;

    if (d->api->memory_export_at(d->ordinal, region->start, fd, &frame->offset, &there, error) != EP_OK)
        return ep_error_prefix(error, "memory");
    if (region->bytes <= there - frame->offset)
        return EP_OK;
    close(*fd);
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "memory has %llu bytes in the allocation that it begins in, bytes is %llu: under executor "
                        "server register the parts of each allocation by themselves, or join with EP_EXECUTOR_DIRECT",
                        (unsigned long long)(there - frame->offset), (unsigned long long)region->bytes);
}

static ep_status add_region(struct ep_rank *rank, uint32_t number, const struct ep_region *region,
                            uint64_t deadline_ns, struct ep_error *error)
{
    struct ep_attach_frame frame;
    int fd;

    ep_attach_frame_init(&frame, EP_ATTACH_REGISTER);
    frame.region = number;
    frame.value = region->bytes;
    if (export(rank, region, &frame, &fd, error) != EP_OK)
        return error->status;

    ep_status status = request(rank, &frame, fd, deadline_ns, error);

    close(fd);
    return status;
}

/* When the server or the rank is lost, so is what it had mapped. */
static ep_status drop_region(struct ep_rank *rank, uint32_t number, uint64_t deadline_ns, struct ep_error *error)
{
    struct ep_attach_frame frame;
    ep_status status;

    ep_attach_frame_init(&frame, EP_ATTACH_UNREGISTER);
    frame.region = number;
    status = request(rank, &frame, -1, deadline_ns, error);
    if (status == EP_OK || status == EP_NOT_FOUND || status == EP_SERVER_LOST || status == EP_DETACHED)
        return EP_OK;
    return ep_error_prefix(error, "the server may still have the memory mapped");
}

const struct executor mailbox_executor = {
    .backend = EP_BACKEND_CUDA,
    .kind = EP_EXECUTOR_SERVER,
    .streams = true,
    .add_region = add_region,
    .drop_region = drop_region,
    .submit = device_submit,
    .captured = device_captured,
    .wait = device_wait,
    .write = device_copy_in,
    .read = device_copy_out,
    .cut = cut,
    .drain = device_drain,
    .detach = device_detach,
};
