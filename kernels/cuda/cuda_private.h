/*
 * What the files of kernels/cuda share.
 *
 *   error.c    results of the driver as ep_status and text
 *   driver.c   the driver, and how many devices it has for this process
 *   context.c  the context in which a GPU is used, and how streams are made
 *   device.c   GPUs of this process, what they are and can do
 *   memory.c   VMM allocations; copy.c: to and from them
 *   stream.c   streams and events; graph.c: captured work
 *   rank.c     a rank's ops: chooses and launches kernels; rank_base.c: what these are told of the rank
 *   ring.c     executor server: the worker's half of a mailbox
 *   serve.c    the server's; forecast.c: which op is to be expected there
 *   nccl.c     what a server needs of NCCL that only this module can do
 *   module.c   the table that is exported
 */
#ifndef CUDA_PRIVATE_H
#define CUDA_PRIVATE_H

#include <cuda.h>

#include "ep_cuda.h"

#define EP_CUDA_MAX_DEVICES 64u /* bits of ep_cuda_device.peers */

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors ---------------------------------------------------------------------- */

/*
 * The status that a failed driver call stands for.  Text: the sentence given, which names the call and what
 * it was for, and the driver's words:
 *     cuMemCreate of 2097152 bytes on device 1: out of memory (CUDA_ERROR_OUT_OF_MEMORY)
 */
__attribute__((format(printf, 3, 4)))
ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...);
/* The same of what a launch has returned: the runtime's errors have the numbers of the driver's that mean the same. */
static inline ep_status ep_cuda_launched(struct ep_error *error, uint32_t device, int result)
{
    return result == 0 ? EP_OK : ep_cuda_fail(error, (CUresult)result, "launch on device %u", device);
}
void ep_cuda_on_lost(void (*fn)(const struct ep_error *why, void *user), void *user);

/* ---- devices and contexts ---------------------------------------------------------- */

/* EP_NOT_FOUND when the process has no such device. */
ep_status ep_cuda_device_get(uint32_t device, CUdevice *handle, struct ep_error *error);

/* A device that this process uses: retained once, never released, so that every thread may keep it. */
struct ep_cuda_context {
    uint32_t device;
    CUdevice handle;
    CUcontext context; /* the primary one */
    CUstream stream;   /* the module's own: non-blocking, of the highest priority */
};

/*
 * Makes the device's primary context current on this thread; the first call of a process for the device
 * creates context and stream.  To be followed by leave, which brings the former context back.
 * *context stays valid after leave too; NULL is allowed.
 */
ep_status ep_cuda_enter(uint32_t device, const struct ep_cuda_context **context, struct ep_error *error);
void ep_cuda_leave(void);

/* A stream as the module makes all of them, in the current context. */
ep_status ep_cuda_stream_make(uint32_t device, CUstream *stream, struct ep_error *error);

/* What a stream argument of ep_cuda.h means. */
static inline CUstream ep_cuda_stream(const struct ep_cuda_context *context, void *stream)
{
    return stream ? (CUstream)stream : context->stream;
}

/* ---- ranks ------------------------------------------------------------------------- */

/* What peers write of an HT op is where they can. */
ep_status ep_cuda_check_reach(const struct ep_op *op, struct ep_error *error);
/* A rank's part of a GPU. */
struct ep_cuda_share {
    uint32_t sms; /* multiprocessors */
    bool shares;  /* they are not all */
};
ep_status ep_cuda_rank_share(const struct ep_cuda_rank_options *options, struct ep_cuda_share *share,
                             struct ep_error *error);
/* Its kernels have been asked for: `result`, and `blocks` that fit. */
ep_status ep_cuda_rank_runs(const struct ep_cuda_rank_options *options, int result, uint32_t blocks, struct ep_error *error);
/* Blocks for so many multiprocessors, of a kernel of which `fit` are on one at a time, at most. */
uint32_t ep_cuda_share_blocks(const struct ep_cuda_share *share, uint32_t sms, uint32_t fit);
/* Of so many multiprocessors, those for the rank's HT ops. */
uint32_t ep_cuda_rank_ht_sms(const struct ep_cuda_rank_options *options, uint32_t sms);

/* ---- the functions of struct ep_cuda_api ------------------------------------------- */

ep_status ep_cuda_device_count(uint32_t *count, struct ep_error *error);
ep_status ep_cuda_device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error);
ep_status ep_cuda_device_find(const uint8_t uuid[EP_CUDA_UUID_BYTES], uint32_t *device,
                              struct ep_error *error);
ep_status ep_cuda_device_current(uint32_t *device, struct ep_error *error);

ep_status ep_cuda_memory_create(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out,
                                struct ep_error *error);
ep_status ep_cuda_memory_export(const struct ep_cuda_memory *memory, int *fd, struct ep_error *error);
ep_status ep_cuda_memory_import(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                                struct ep_error *error);
ep_status ep_cuda_memory_adopt(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error);
ep_status ep_cuda_memory_share(struct ep_cuda_memory *memory, uint32_t device, struct ep_error *error);
void ep_cuda_memory_destroy(struct ep_cuda_memory *memory);
void *ep_cuda_memory_at(const struct ep_cuda_memory *memory);
ep_status ep_cuda_memory_range(uint32_t device, const void *at, void **start, uint64_t *bytes,
                               struct ep_error *error);
ep_status ep_cuda_memory_export_at(uint32_t device, const void *at, int *fd, uint64_t *offset, uint64_t *bytes,
                                   struct ep_error *error);

ep_status ep_cuda_write(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                        struct ep_error *error);
ep_status ep_cuda_read(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                       struct ep_error *error);
ep_status ep_cuda_fill(uint32_t device, void *to, uint8_t value, uint64_t bytes, void *stream,
                       struct ep_error *error);

ep_status ep_cuda_copy(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                       struct ep_error *error);
ep_status ep_cuda_store(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error);
ep_status ep_cuda_marker_open(uint32_t device, struct ep_cuda_marker **out, struct ep_error *error);
ep_status ep_cuda_marker_store(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream,
                               struct ep_error *error);
void ep_cuda_marker_close(struct ep_cuda_marker *marker);
ep_status ep_cuda_host_pin(uint32_t device, void *at, uint64_t bytes, struct ep_error *error);
void ep_cuda_host_unpin(uint32_t device, void *at);

ep_status ep_cuda_rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                            struct ep_error *error);
void ep_cuda_rank_close(struct ep_cuda_rank *rank);
ep_status ep_cuda_rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream,
                           struct ep_error *error);

ep_status ep_cuda_ring_open(uint32_t device, void *window, bool spins, struct ep_cuda_ringer **out,
                            struct ep_error *error);
ep_status ep_cuda_ring(struct ep_cuda_ringer *ringer, const struct ep_op *op, void *stream, struct ep_error *error);
void ep_cuda_ring_close(struct ep_cuda_ringer *ringer);
ep_status ep_cuda_serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                             struct ep_error *error);
ep_status ep_cuda_serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error);
ep_status ep_cuda_serve_wait(struct ep_cuda_serve *serve, struct ep_error *error);
ep_status ep_cuda_serve_region(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                               struct ep_error *error);
ep_status ep_cuda_serve_forget(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error);
ep_status ep_cuda_serve_forgotten(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error);
ep_status ep_cuda_serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error);
void ep_cuda_serve_close(struct ep_cuda_serve *serve);

struct ep_ll_serve;
struct ep_ll_expected;
struct ep_ht_expected;
/* The kernels that serve a rank, as ll.h and ht.h have them: cudaError_t. */
struct ep_cuda_kernels {
    int (*prepare)(uint32_t shared_bytes, bool shares, uint32_t *blocks);
    int (*one)(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, void *stream);
    int (*expect)(const struct ep_ll_expected *expected, uint32_t shared_bytes, void *stream);
    int (*ht_prepare)(uint32_t shared_bytes, bool shares, uint32_t *blocks);
    int (*ht_one)(const struct ep_ll_serve *serve, uint32_t shared_bytes, void *stream);
    int (*ht_expect)(const struct ep_ht_expected *expected, uint32_t shared_bytes, void *stream);
};
/* Of a rank with ranks on other nodes.  Without NCCL's headers there are none but prepare and ht_prepare, which fail. */
extern const struct ep_cuda_kernels ep_cuda_net_kernels;
uint32_t ep_cuda_nccl_version(void);
ep_status ep_cuda_nccl_bind(uint32_t device, struct ep_error *error);
int ep_cuda_nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire);
int ep_cuda_nccl_device_close(void *destroy, void *comm, const uint64_t *wire);

ep_status ep_cuda_stream_create(uint32_t device, void **stream, struct ep_error *error);
void ep_cuda_stream_destroy(uint32_t device, void *stream);
ep_status ep_cuda_stream_query(uint32_t device, void *stream, struct ep_error *error);
ep_status ep_cuda_stream_sync(uint32_t device, void *stream, struct ep_error *error);
/* The same; the device's context is current. */
ep_status ep_cuda_is_captured(uint32_t device, CUstream stream, bool *captured, struct ep_error *error);
ep_status ep_cuda_stream_captured(uint32_t device, void *stream, bool *captured, struct ep_error *error);
void ep_cuda_thread_relax(void);

ep_status ep_cuda_graph_begin(uint32_t device, void *stream, struct ep_error *error);
ep_status ep_cuda_graph_end(uint32_t device, void *stream, struct ep_cuda_graph **out,
                            struct ep_error *error);
ep_status ep_cuda_graph_launch(struct ep_cuda_graph *graph, void *stream, struct ep_error *error);
void ep_cuda_graph_destroy(struct ep_cuda_graph *graph);

ep_status ep_cuda_event_create(uint32_t device, void **event, struct ep_error *error);
void ep_cuda_event_destroy(uint32_t device, void *event);
ep_status ep_cuda_event_record(uint32_t device, void *event, void *stream, struct ep_error *error);
ep_status ep_cuda_event_elapsed(uint32_t device, void *from, void *to, float *us, struct ep_error *error);

#ifdef __cplusplus
}
#endif
#endif
