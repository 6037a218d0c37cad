/* What libep_cuda.so exports: the table of its functions. */
#include "cuda_private.h"

static const struct ep_cuda_api api = {
    .version = EP_CUDA_API_VERSION,
    .device_count = ep_cuda_device_count,
    .device_info = ep_cuda_device_info,
    .device_find = ep_cuda_device_find,
    .device_current = ep_cuda_device_current,
    .memory_create = ep_cuda_memory_create,
    .memory_export = ep_cuda_memory_export,
    .memory_import = ep_cuda_memory_import,
    .memory_adopt = ep_cuda_memory_adopt,
    .memory_share = ep_cuda_memory_share,
    .memory_destroy = ep_cuda_memory_destroy,
    .memory_at = ep_cuda_memory_at,
    .memory_range = ep_cuda_memory_range,
    .memory_export_at = ep_cuda_memory_export_at,
    .write = ep_cuda_write,
    .read = ep_cuda_read,
    .fill = ep_cuda_fill,
    .copy = ep_cuda_copy,
    .store = ep_cuda_store,
    .marker_open = ep_cuda_marker_open,
    .marker_store = ep_cuda_marker_store,
    .marker_close = ep_cuda_marker_close,
    .host_pin = ep_cuda_host_pin,
    .host_unpin = ep_cuda_host_unpin,
    .rank_open = ep_cuda_rank_open,
    .rank_close = ep_cuda_rank_close,
    .rank_run = ep_cuda_rank_run,
    .ring_open = ep_cuda_ring_open,
    .ring = ep_cuda_ring,
    .ring_close = ep_cuda_ring_close,
    .serve_open = ep_cuda_serve_open,
    .serve_post = ep_cuda_serve_post,
    .serve_wait = ep_cuda_serve_wait,
    .serve_region = ep_cuda_serve_region,
    .serve_forget = ep_cuda_serve_forget,
    .serve_forgotten = ep_cuda_serve_forgotten,
    .serve_end = ep_cuda_serve_end,
    .serve_close = ep_cuda_serve_close,
    .nccl_version = ep_cuda_nccl_version,
    .nccl_bind = ep_cuda_nccl_bind,
    .nccl_device_open = ep_cuda_nccl_device_open,
    .nccl_device_close = ep_cuda_nccl_device_close,
    .stream_create = ep_cuda_stream_create,
    .stream_destroy = ep_cuda_stream_destroy,
    .stream_query = ep_cuda_stream_query,
    .stream_sync = ep_cuda_stream_sync,
    .stream_captured = ep_cuda_stream_captured,
    .thread_relax = ep_cuda_thread_relax,
    .graph_begin = ep_cuda_graph_begin,
    .graph_end = ep_cuda_graph_end,
    .graph_launch = ep_cuda_graph_launch,
    .graph_destroy = ep_cuda_graph_destroy,
    .event_create = ep_cuda_event_create,
    .event_destroy = ep_cuda_event_destroy,
    .event_record = ep_cuda_event_record,
    .event_elapsed = ep_cuda_event_elapsed,
};

/* The one symbol of the module; ep_cuda_open looks it up. */
__attribute__((visibility("default"))) const struct ep_cuda_api *ep_cuda_api(void);

const struct ep_cuda_api *ep_cuda_api(void)
{
    return &api;
}
