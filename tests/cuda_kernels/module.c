/*
 * libep_cuda_kernels.so: kernels/cuda on CPUs.  Its kernels (include/device_on_cpu.h) and its host code, but devices and
 * memory, which are cuda_fixture's, on streams.c.
 */
#include <stdarg.h>
#include <stdio.h>

#include "cuda_fixture.h"
#include "cuda_private.h"
#include "net.h"

enum { SMS = 2 }; /* of an op: few, so that their blocks have something to do */

/* ---- what is cuda_fixture's ---------------------------------------------------------------------- */

ep_status ep_cuda_device_get(uint32_t device, CUdevice *handle, struct ep_error *error)
{
    struct ep_cuda_device info;

    *handle = (CUdevice)device;
    return cuda_fixture_api()->device_info(device, &info, error);
}

/* To users.  What a warp stores comes in pieces of 16 bytes (fibers.h), also to ranks of the same device. */
static ep_status device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error)
{
    const ep_status status = cuda_fixture_api()->device_info(device, info, error);

    info->linked = 0;
    return status;
}

/* Less than users are told of, and one for the kernel that waits for a served op (serve.c). */
ep_status ep_cuda_device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error)
{
    const ep_status status = cuda_fixture_api()->device_info(device, info, error);

    info->sms = SMS + 1;
    return status;
}

ep_status ep_cuda_memory_create(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out, struct ep_error *error)
{
    return cuda_fixture_api()->memory_create(device, bytes, out, error);
}

void ep_cuda_memory_destroy(struct ep_cuda_memory *memory)
{
    cuda_fixture_api()->memory_destroy(memory);
}

void *ep_cuda_memory_at(const struct ep_cuda_memory *memory)
{
    return cuda_fixture_api()->memory_at(memory);
}

ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...)
{
    char what[EP_ERROR_TEXT_MAX / 2];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return ep_error_set(error, EP_INTERNAL, "%s: %d", what, (int)result);
}

/* ---- executor direct ------------------------------------------------------------------------------- */

static ep_status (*open_rank)(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                              struct ep_error *error);

/* Nobody waits beside its ops. */
static ep_status rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out, struct ep_error *error)
{
    struct ep_cuda_rank_options fewer = *options;

    fewer.max_sms = SMS;
    return open_rank(&fewer, out, error);
}

/* ---- the table --------------------------------------------------------------------------------------- */

const struct ep_cuda_api *ep_cuda_api(void);

const struct ep_cuda_api *ep_cuda_api(void)
{
    static struct ep_cuda_api api;

    cuda_fixture.followed = true;
    api = *cuda_fixture_api();
    api.device_info = device_info;
    api.write = ep_cuda_write;
    api.read = ep_cuda_read;
    api.fill = ep_cuda_fill;
    api.copy = ep_cuda_copy;
    api.store = ep_cuda_store;
    api.marker_open = ep_cuda_marker_open;
    api.marker_store = ep_cuda_marker_store;
    api.marker_close = ep_cuda_marker_close;
    api.host_pin = ep_cuda_host_pin;
    api.host_unpin = ep_cuda_host_unpin;
    api.rank_open = ep_cuda_rank_open;
    api.rank_close = ep_cuda_rank_close;
    api.rank_run = ep_cuda_rank_run;
    api.ring_open = ep_cuda_ring_open;
    api.ring = ep_cuda_ring;
    api.ring_close = ep_cuda_ring_close;
    api.serve_open = ep_cuda_serve_open;
    api.serve_post = ep_cuda_serve_post;
    api.serve_wait = ep_cuda_serve_wait;
    api.serve_region = ep_cuda_serve_region;
    api.serve_forget = ep_cuda_serve_forget;
    api.serve_forgotten = ep_cuda_serve_forgotten;
    api.serve_end = ep_cuda_serve_end;
    api.serve_close = ep_cuda_serve_close;
    api.stream_create = ep_cuda_stream_create;
    api.stream_destroy = ep_cuda_stream_destroy;
    api.stream_query = ep_cuda_stream_query;
    api.stream_sync = ep_cuda_stream_sync;
    api.stream_captured = ep_cuda_stream_captured;
    api.thread_relax = ep_cuda_thread_relax;
    api.graph_begin = ep_cuda_graph_begin;
    api.graph_end = ep_cuda_graph_end;
    api.graph_launch = ep_cuda_graph_launch;
    api.graph_destroy = ep_cuda_graph_destroy;
    api.event_create = ep_cuda_event_create;
    api.event_destroy = ep_cuda_event_destroy;
    api.event_record = ep_cuda_event_record;
    api.event_elapsed = ep_cuda_event_elapsed;
    net_offer(&api);
    open_rank = api.rank_open;
    api.rank_open = rank_open;
    return &api;
}
