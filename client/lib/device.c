/*
 * A rank on a GPU, whoever runs its ops: its window, the streams that ops are given, waiting, copies.  What
 * differs is in direct.c and mailbox.c.
 *
 * The host never follows a pointer into that memory; it copies.  Copies beside the ops go over streams
 * of their own, so that they pass an op that waits for a peer or for the server.
 */
#include <stdlib.h>
#include <string.h>

#include "client_private.h"

/*
 * Waiting is looking at streams.  The first looks follow each other, for what is over in a moment; then
 * each sleep is a part of what was waited already, so that a core is not burnt and the end is seen soon.
 */
#define LOOK_NS (50 * EP_NS_PER_US)
#define SLEEP_SHARE 8u
#define SLEEP_MAX_NS EP_NS_PER_MS

/* What it takes the ops of a lost rank to end, at most: they wait for nobody any more. */
#define LOST_MS 1000u

/* ---- memory ---------------------------------------------------------------------- */

ep_status device_import(struct ep_rank *rank, int fd, uint64_t bytes, uint64_t expected, const char *what,
                        uint32_t whose, struct ep_cuda_memory **out, struct ep_error *error)
{
    struct device *d = rank->device;

    if (bytes != expected)
        return ep_error_set(error, EP_PROTOCOL,
                            "the %s of rank %u has %llu bytes, this libepclient computes %llu: they must be of "
                            "matching releases",
                            what, whose, (unsigned long long)bytes, (unsigned long long)expected);
    if (d->api->memory_import(d->ordinal, fd, bytes, out, error) != EP_OK)
        return ep_error_prefix(error, "the %s of rank %u", what, whose);
    return EP_OK;
}

ep_status device_import_window(struct ep_rank *rank, uint32_t whose, uint64_t bytes, int fd, struct ep_error *error)
{
    struct device *d = rank->device;

    if (whose >= rank->shape.map.limits.ranks)
        return ep_error_set(error, EP_PROTOCOL, "the server sent the window of rank %u: there are %u ranks",
                            whose, rank->shape.map.limits.ranks);
    if (d->window[whose])
        return ep_error_set(error, EP_PROTOCOL, "the server sent the window of rank %u twice", whose);
    return device_import(rank, fd, bytes, rank->shape.map.total_bytes, "window", whose, &d->window[whose], error);
}

/* ---- identity -------------------------------------------------------------------- */

ep_status device_read(struct device *d, void *to, const void *from, uint64_t bytes, struct ep_error *error)
{
    return d->api->read(d->ordinal, to, from, bytes, d->control, error);
}

ep_status device_check_window(struct ep_rank *rank, uint32_t whose, struct ep_error *error)
{
    struct device *d = rank->device;
    struct ep_window_head head;

    if (device_read(d, &head, d->api->memory_at(d->window[whose]), sizeof head, error) != EP_OK)
        return ep_error_prefix(error, "the window of rank %u", whose);
    return rank_check_window(rank, whose, &head, error);
}

/* What stands in the window's report is of the rank's last worker: its failures are not ours to tell. */
static ep_status open_report(struct ep_rank *rank, struct ep_error *error)
{
    struct device *d = rank->device;
    struct ep_control *control = d->api->memory_at(d->window[rank->rank]);
    const uint64_t none = 0;

    d->report = &control->gpu.report;
    if (d->api->write(d->ordinal, &d->report->failures, &none, sizeof none, d->control, error) != EP_OK)
        return error->status;
    return device_read(d, &d->seen, d->report, sizeof d->seen, error);
}

/* ---- attach and detach ------------------------------------------------------------ */

static ep_status find_device(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    struct device *d = rank->device;

    if (reply->device_uuid.len != EP_CUDA_UUID_BYTES)
        return ep_error_set(error, EP_PROTOCOL, "the server's answer names the GPU with %zu bytes: must be %u",
                            reply->device_uuid.len, EP_CUDA_UUID_BYTES);
    memcpy(d->uuid, reply->device_uuid.data, sizeof d->uuid);
    if (d->api->device_find(reply->device_uuid.data, &d->ordinal, error) != EP_OK)
        return ep_error_prefix(error, "rank %u lives on a GPU that this process cannot use "
                               "(CUDA_VISIBLE_DEVICES?)", rank->rank);
    return EP_OK;
}

static ep_status make_streams(struct device *d, struct ep_error *error)
{
    ep_stream *stream[] = { &d->own, &d->control, &d->alarm };

    for (size_t i = 0; i < sizeof stream / sizeof *stream; i++)
        if (d->api->stream_create(d->ordinal, stream[i], error) != EP_OK)
            return ep_error_prefix(error, "a stream of the rank");
    return EP_OK;
}

ep_status device_prepare(struct ep_rank *rank, const struct ep_cuda_api *api, const Ep__V1__ClaimReply *reply,
                         struct ep_error *error)
{
    rank->device = calloc(1, sizeof *rank->device);
    if (!rank->device)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    rank->device->api = api;
    rank->device->round = 1;
    if (find_device(rank, reply, error) != EP_OK)
        return error->status;
    return make_streams(rank->device, error);
}

ep_status device_ready(struct ep_rank *rank, struct ep_error *error)
{
    struct device *d = rank->device;

    if (open_report(rank, error) != EP_OK)
        return error->status;
    rank->window = d->api->memory_at(d->window[rank->rank]);
    return EP_OK;
}

bool device_is_lost(const struct device *device, struct ep_error *error)
{
    return device->api->stream_query(device->ordinal, device->own, error) == EP_DEVICE_LOST;
}

void device_detach(struct ep_rank *rank)
{
    struct device *d = rank->device;

    if (!d)
        return;
    ep_stream stream[] = { d->own, d->control, d->alarm };

    d->api->ring_close(d->ringer);
    if (d->runner)
        d->api->rank_close(d->runner);
    for (size_t i = 0; i < sizeof stream / sizeof *stream; i++)
        if (stream[i])
            d->api->stream_destroy(d->ordinal, stream[i]);
    for (uint32_t r = 0; r < EP_MAX_RANKS; r++)
        d->api->memory_destroy(d->window[r]);
    d->api->memory_destroy(d->state_memory);
    free(d);
    rank->device = NULL;
    rank->window = NULL;
}

/* ---- ops ------------------------------------------------------------------------- */

static ep_status note_stream(struct device *d, ep_stream stream, struct ep_error *error)
{
    for (uint32_t i = 0; i < d->n_used; i++)
        if (d->used[i] == stream)
            return EP_OK;
    if (d->n_used == DEVICE_STREAMS)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "ops are on %u streams since the last ep_sync(): no more are possible",
                            DEVICE_STREAMS);
    d->used[d->n_used++] = stream;
    return EP_OK;
}

ep_status device_captured(struct ep_rank *rank, ep_stream stream, bool *captured, struct ep_error *error)
{
    const struct device *d = rank->device;

    return d->api->stream_captured(d->ordinal, stream ? stream : d->own, captured, error);
}

/* Never waits for ops; may be captured. */
ep_status device_submit(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                        ep_stream given, struct ep_error *error)
{
    struct device *d = rank->device;
    const ep_stream stream = given ? given : d->own;

    /* A handle's end needs no op: the dispatch that takes its bank next gives the credit back, and there is
     * no stream of which we know that it stands in order. */
    if (op->kind == EP_OP_RELEASE)
        return EP_OK;
    if (rank_lost(rank, error) != EP_OK || ep_op_check_own(&rank->shape.map, &rank->regions, op, error) != EP_OK
        || note_stream(d, stream, error) != EP_OK || d->launch(rank, op, stream, error) != EP_OK)
        return error->status;

    struct device_ops *ops = &pending->handle->device;
    struct pending *noted = &ops->pending[pending->part == PART_COMBINE ? EP_DEVICE_COMBINE
                                                                        : EP_DEVICE_DISPATCH];

    *noted = *pending;
    noted->start_ns = ep_clock_ns();
    ops->stream = stream;
    ops->round = d->round;
    return EP_OK;
}

/* ---- waiting --------------------------------------------------------------------- */

/* EP_UNAVAILABLE while one of them has work. */
static ep_status query(struct device *d, const ep_stream *stream, uint32_t n, struct ep_error *error)
{
    for (uint32_t i = 0; i < n; i++)
        if (d->api->stream_query(d->ordinal, stream[i], error) != EP_OK)
            return error->status;
    return EP_OK;
}

static void rest(struct ep_rank *rank, uint64_t since, uint64_t deadline_ns, bool interruptible)
{
    const uint64_t waited = ep_clock_ns() - since;
    const uint64_t share = waited / SLEEP_SHARE < SLEEP_MAX_NS ? waited / SLEEP_SHARE : SLEEP_MAX_NS;

    if (waited < LOOK_NS)
        return;
    if (interruptible)
        wait_asleep(rank, &rank->device->pulse, share, deadline_ns, true);
    else
        nanosleep(&(struct timespec){ .tv_nsec = (long)share }, NULL);
}

/* interruptible: by ep_rank_interrupt() and by the loss of the rank. */
static ep_status wait_streams(struct ep_rank *rank, const ep_stream *stream, uint32_t n, uint64_t deadline_ns,
                              bool interruptible, struct ep_error *error)
{
    const uint64_t since = ep_clock_ns();
    ep_status status;

    while ((status = query(rank->device, stream, n, error)) == EP_UNAVAILABLE) {
        if ((interruptible && rank_lost(rank, error) != EP_OK)
            || wait_over(rank, deadline_ns, interruptible, error) != EP_OK)
            return error->status;
        rest(rank, since, deadline_ns, interruptible);
    }
    return status;
}

/* They may be destroyed from here on. */
static void forget_streams(struct device *d)
{
    d->n_used = 0;
    d->round++;
}

/* The ops of a rank that is lost end by themselves, and then its streams are done with as after any other wait. */
static void wait_lost(struct ep_rank *rank, uint64_t deadline_ns)
{
    const uint64_t bound = ep_clock_ns() + LOST_MS * EP_NS_PER_MS;
    struct ep_error ignored = EP_ERROR_INIT;

    if (rank_lost(rank, &ignored) != EP_OK && device_drain(rank, bound < deadline_ns ? bound : deadline_ns))
        forget_streams(rank->device);
}

static ep_status wait_all(struct ep_rank *rank, uint64_t deadline_ns, bool interruptible,
                          struct ep_error *error)
{
    struct device *d = rank->device;

    if (wait_streams(rank, d->used, d->n_used, deadline_ns, interruptible, error) != EP_OK) {
        wait_lost(rank, deadline_ns);
        return error->status;
    }
    forget_streams(d);
    return device_collect(rank, NULL, error);
}

ep_status device_wait(struct ep_rank *rank, ep_handle *handle, uint64_t deadline_ns, bool interruptible,
                      struct ep_error *error)
{
    if (!handle)
        return wait_all(rank, deadline_ns, interruptible, error);
    if (handle->device.round == rank->device->round
        && wait_streams(rank, &handle->device.stream, 1, deadline_ns, interruptible, error) != EP_OK)
        return error->status;
    return device_collect(rank, handle, error);
}

/* A stream that says anything but "under way" runs nothing any more. */
bool device_drain(struct ep_rank *rank, uint64_t deadline_ns)
{
    struct ep_error ignored = EP_ERROR_INIT;
    struct device *d = rank->device;

    return wait_streams(rank, d->used, d->n_used, deadline_ns, false, &ignored)
           != EP_DEADLINE_EXCEEDED;
}

/* ---- copies ---------------------------------------------------------------------- */

ep_status device_copy_in(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                         struct ep_error *error)
{
    struct device *d = rank->device;

    if (rank_lost(rank, error) != EP_OK)
        return error->status;
    return d->api->write(d->ordinal, to, from, bytes, stream ? stream : d->own, error);
}

ep_status device_copy_out(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                          struct ep_error *error)
{
    struct device *d = rank->device;

    if (rank_lost(rank, error) != EP_OK)
        return error->status;
    return d->api->read(d->ordinal, to, from, bytes, stream ? stream : d->own, error);
}
