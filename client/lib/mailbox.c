/*
 * Executor server on a GPU: this process has the rank's window and nothing else of the group.  An op is handed
 * to the server in the order of the caller's stream, through the mailbox in the window (window.h).  What is registered
 * is handed on to the server, which maps it, and names it by number in ops.
 *
 * The end.  When the server or the rank is lost, nobody may answer the doorbell any more, and streams wait for
 * `done`, in graphs that were launched before too.  `closed` is set, and when that is over `done`, once each,
 * by copies that pass the ops.  All that is left goes on by itself then.  In the order of the streams, which is
 * one order for all ops of a rank, each op is
 *
 *     gate:  closed?  no: write op, doorbell = 1.  yes: done = 1
 *     wait:  until done = 1, then done = 0
 *
 * where the stream waits.  (A kernel that waits, under MPS, looks at `closed` too, and needs no more to end.)
 *
 *   - A gate that comes after `closed` answers itself, so its op waits for nobody.
 *   - At most one op has a gate that found `closed` unset, and has not passed its wait: the next gate comes after
 *     that wait.  Our done = 1 comes after `closed`, so after that gate, and after every done = 0 of earlier ops.
 *     What can still set done = 0 is the op's own wait, which has passed then.
 *   - If the op's wait had been answered by the server already, its done = 0 may wipe out ours, which nobody
 *     needs; or ours stays, as a late answer of the server's does, and the next op finds `done` set by two.
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

    return d->api->ring(d->ordinal, rank->window, op, d->spins, stream, error);
}

/* Both processes' kernels run on the GPU at once, when both go through its MPS server. */
static ep_status find_mps(struct device *d, const Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    struct ep_cuda_device gpu;

    if (d->api->device_info(d->ordinal, &gpu, error) != EP_OK)
        return error->status;
    d->spins = gpu.mps && reply->mps;
    return EP_OK;
}

ep_status mailbox_attach(struct ep_rank *rank, const struct ep_cuda_api *api, const Ep__V1__ClaimReply *reply,
                         const struct ep_attach_frame *welcome, int fd, struct ep_error *error)
{
    rank->executor = &mailbox_executor;
    if (welcome->count != 0)
        return ep_error_set(error, EP_PROTOCOL,
                            "the server sends %u memories beside the window: under executor server there are none",
                            welcome->count);
    if (device_open(rank, api, reply, welcome, fd, error) != EP_OK
        || device_check_window(rank, rank->rank, error) != EP_OK || find_mps(rank->device, reply, error) != EP_OK)
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
    (void)d->api->write(d->ordinal, &mailbox->done, &one, sizeof one, d->alarm, &ignored);
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
                            struct ep_error *error)
{
    struct ep_attach_frame frame;
    int fd;

    ep_attach_frame_init(&frame, EP_ATTACH_REGISTER);
    frame.region = number;
    frame.value = region->bytes;
    if (export(rank, region, &frame, &fd, error) != EP_OK)
        return error->status;

    ep_status status = request(rank, &frame, fd, error);

    close(fd);
    return status;
}

/* When the server or the rank is lost, so is what it had mapped. */
static ep_status drop_region(struct ep_rank *rank, uint32_t number, struct ep_error *error)
{
    struct ep_attach_frame frame;
    ep_status status;

    ep_attach_frame_init(&frame, EP_ATTACH_UNREGISTER);
    frame.region = number;
    status = request(rank, &frame, -1, error);
    if (status == EP_OK || status == EP_SERVER_LOST || status == EP_DETACHED)
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
    .wait = device_wait,
    .write = device_copy_in,
    .read = device_copy_out,
    .cut = cut,
    .drain = device_drain,
    .detach = device_detach,
};
