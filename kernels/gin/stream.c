#include "gin.h"

#include <string.h>

#include "ep_futex.h"

#define WORD_STRIDE 64u /* a cache line each: two threads look */

/* The first is told; after it nothing is promised, and nothing waits. */
static void failed(struct ep_gin_comm *comm, const struct ep_error *error)
{
    if (__atomic_exchange_n(&comm->failed, 1, __ATOMIC_ACQ_REL) == 0)
        ep_gin_warn("rank %u: the GPU does nothing more for this communicator: %s", comm->rank, error->text);
}

ep_status ep_gin_marker_open(struct ep_gin_comm *comm, struct ep_cuda_marker **out, struct ep_error *error)
{
    *out = NULL;
    return comm->cuda ? comm->cuda->marker_open(comm->device, out, error) : EP_OK;
}

void ep_gin_marker_close(struct ep_gin_comm *comm, struct ep_cuda_marker *marker)
{
    if (marker)
        comm->cuda->marker_close(marker);
}

ep_status ep_gin_stream_open(struct ep_gin_comm *comm, struct ep_gin_stream *stream, struct ep_cuda_marker *marker,
                             struct ep_error *error)
{
    ep_status status;

    memset(stream, 0, sizeof *stream);
    stream->comm = comm;
    stream->marker = marker;
    if (!comm->cuda)
        return EP_OK;
    status = comm->cuda->stream_create(comm->device, &stream->stream, error);
    if (status != EP_OK)
        return status;
    stream->word = (uint64_t *)(void *)(comm->words + WORD_STRIDE * comm->words_used++);
    return EP_OK;
}

void ep_gin_stream_settle(struct ep_gin_stream *stream)
{
    struct ep_gin_comm *comm = stream->comm;

    if (comm->stuck || ep_gin_stream_wait(stream, comm->settings.timeout_ns))
        return;
    comm->stuck = true;
    ep_gin_warn("rank %u: a stream still works after %llu ms: its memory is not given back", comm->rank,
                (unsigned long long)(comm->settings.timeout_ns / EP_NS_PER_MS));
}

void ep_gin_stream_close(struct ep_gin_stream *stream)
{
    if (!stream->stream)
        return;
    ep_gin_stream_settle(stream);
    stream->comm->cuda->stream_destroy(stream->comm->device, stream->stream);
    stream->stream = NULL;
}

/* Host memory that no stream can reach has none: it is copied at once. */
void ep_gin_stream_copy(struct ep_gin_stream *stream, void *to, const void *from, uint64_t bytes)
{
    struct ep_gin_comm *comm = stream->comm;
    struct ep_error error = EP_ERROR_INIT;

    if (!stream->stream) {
        memcpy(to, from, bytes);
        return;
    }
    stream->dirty = true;
    if (comm->cuda->copy(comm->device, to, from, bytes, stream->stream, &error) != EP_OK)
        failed(comm, &error);
}

void ep_gin_stream_store(struct ep_gin_stream *stream, void *to, uint64_t value)
{
    struct ep_gin_comm *comm = stream->comm;
    struct ep_error error = EP_ERROR_INIT;

    stream->dirty = true;
    if (comm->cuda->store(comm->device, to, value, stream->stream, &error) != EP_OK)
        failed(comm, &error);
}

uint64_t ep_gin_stream_mark(struct ep_gin_stream *stream)
{
    stream->asked = stream->dirty;
    return stream->written + stream->dirty;
}

static ep_status write_mark(const struct ep_gin_stream *stream, struct ep_error *error)
{
    const struct ep_gin_comm *comm = stream->comm;

    if (stream->marker)
        return comm->cuda->marker_store(stream->marker, stream->word, stream->written, stream->stream, error);
    return comm->cuda->store(comm->device, stream->word, stream->written, stream->stream, error);
}

void ep_gin_stream_flush(struct ep_gin_stream *stream)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!stream->asked)
        return;
    stream->asked = stream->dirty = false;
    stream->written++;
    if (write_mark(stream, &error) != EP_OK)
        failed(stream->comm, &error);
}

bool ep_gin_stream_reached(const struct ep_gin_stream *stream, uint64_t mark)
{
    if (!stream->stream)
        return true;
    /* Acquire: partner is the GPU's store, after the copies before it. */
    return __atomic_load_n(stream->word, __ATOMIC_ACQUIRE) >= mark ||
           __atomic_load_n(&stream->comm->failed, __ATOMIC_RELAXED) != 0;
}

bool ep_gin_stream_idle(const struct ep_gin_stream *stream)
{
    return !stream->dirty && ep_gin_stream_reached(stream, stream->written);
}

bool ep_gin_stream_wait(struct ep_gin_stream *stream, uint64_t timeout_ns)
{
    const uint64_t end = ep_clock_ns() + timeout_ns;

    (void)ep_gin_stream_mark(stream);
    ep_gin_stream_flush(stream);
    while (!ep_gin_stream_reached(stream, stream->written)) {
        if (ep_clock_ns() > end)
            return false;
        ep_cpu_relax();
    }
    return true;
}
