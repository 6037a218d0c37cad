/*
 * ep_cuda: the cuda backend, seen from host code.
 *
 * All that needs the CUDA driver is in a module of its own, libep_cuda.so, which is loaded at run
 * time: server, library and tools run the same on machines that have no GPU.  It holds GPU memory
 * that processes share (VMM allocations, handed on as file descriptors), the membership and progress
 * of a rank (device_state.h), and the LL kernels; and copies and stores in streams, for who moves data itself (gin/).
 *
 * Addresses of GPU memory are plain pointers, valid in this process on the devices that the memory is
 * mapped for; the host must not follow them.  `device` is this process's CUDA ordinal; across processes
 * devices are named by UUID.  Functions use the device's primary context and leave the caller's current
 * context as it was; any thread may call them.  A stream is a CUstream; NULL is a stream of the module's
 * own per device (created by memory_create, memory_import or rank_open), never CUDA's default one.
 */
#ifndef EP_CUDA_H
#define EP_CUDA_H

#include <stdbool.h>
#include <stdint.h>

#include "device_state.h"
#include "ep_kernels.h"

#define EP_CUDA_API_VERSION 13u
#define EP_CUDA_UUID_BYTES 16u
#define EP_CUDA_SERVE_OPS 128u /* entries that are posted and not over, at most: a stream holds no end of work */

struct ep_cuda_device {
    char name[64];                    /* "NVIDIA H200" */
    char uuid_text[48];               /* "GPU-01234567-..." as nvidia-smi prints it */
    uint8_t uuid[EP_CUDA_UUID_BYTES];
    char pci[16];                     /* "0000:1b:00.0" */
    uint64_t memory_bytes, memory_free;
    uint32_t sms, major, minor;       /* multiprocessors, compute capability */
    uint64_t peers;                   /* bit d: loads and stores reach device d of this process */
    uint64_t linked;                  /* bit d: over NVLink, or it is the same one */
    bool shareable;                   /* VMM memory can be exported as a file descriptor */
    bool mps;                         /* this process's work goes through an MPS server */
    uint32_t driver;                  /* the driver's CUDA version, 13000 is 13.0 */
};

struct ep_cuda_memory; /* one allocation, created or imported, mapped into this process */
struct ep_cuda_rank;   /* what launches a rank's ops */
struct ep_cuda_ringer; /* what rings for a rank's ops */
struct ep_cuda_serve;  /* what runs the ops that a rank's worker rings for */
struct ep_cuda_graph;  /* captured work */
struct ep_cuda_marker; /* what says how far other streams are */

struct ep_cuda_rank_options {
    uint32_t device;
    uint32_t rank;
    const struct ep_layout_map *map;
    const struct ep_placement *placement;
    void *const *windows;            /* [R] base of each rank's window, mapped for `device`; own one too */
    struct ep_device_state *state;   /* the rank's, formatted by ep_cuda_state_format */
    /* Multiprocessors its kernels may fill; 0: all.  With less than all it is taken to share the GPU with other ranks, and
     * has fewer blocks on each (rank.c), so that whatever all of them run at a time has room. */
    uint32_t max_sms;
    uint32_t max_ht_sms;             /* and of these, those that HT ops fill; 0: all */
    /* serve_open only: some ranks are on other nodes.  The state knows its struct ep_device_net, which has those of this
     * node; of windows[] the own one is looked at.  Without it there are at most EP_DEVICE_NODE_RANKS ranks. */
    bool net;
    /* serve_open only, and with MPS: while LL ops of one node's group follow each other, of a worker that spins
     * (ring_open), a warp looks for the doorbell, not the stream, which is faster. */
    bool polls;
    /* rank_open: memory beside the window that its ops may use.  The caller's, who may change it between ops and
     * keeps it as long as the rank is open.  NULL: none.  (Whom one serves: serve_region.) */
    const struct ep_regions *regions;
};

struct ep_cuda_api {
    uint32_t version; /* EP_CUDA_API_VERSION */

    /*
     * fn(why) is called once, by whoever's call of any of these is the first to end with EP_DEVICE_LOST: a kernel has gone
     * wrong, under MPS another process's on the GPU, or the GPU has, and the driver does no more for this process.  From
     * any thread; it must not call the module.  NULL: nobody is told.
     */
    void (*on_lost)(void (*fn)(const struct ep_error *why, void *user), void *user);

    /* ---- devices ---- */
    ep_status (*device_count)(uint32_t *count, struct ep_error *error);
    ep_status (*device_info)(uint32_t device, struct ep_cuda_device *info, struct ep_error *error);
    /* EP_NOT_FOUND when this process does not see that GPU. */
    ep_status (*device_find)(const uint8_t uuid[EP_CUDA_UUID_BYTES], uint32_t *device, struct ep_error *error);
    /* The one that the calling thread has made current.  EP_FAILED_PRECONDITION: it has none. */
    ep_status (*device_current)(uint32_t *device, struct ep_error *error);

    /* ---- memory ---- */
    /* On `device`, zeroed, mapped for it and exportable.  The size is rounded up to the granularity. */
    ep_status (*memory_create)(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error);
    /* A descriptor (close-on-exec) that another process can import; the caller's to close. */
    ep_status (*memory_export)(const struct ep_cuda_memory *memory, int *fd, struct ep_error *error);
    /* Somebody's memory of at least `bytes`, wherever it lies, mapped for `device`.  fd stays the caller's. */
    ep_status (*memory_import)(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error);
    /* The same, and whoever sent it is not trusted: refused unless it is memory that its owner cannot take away. */
    ep_status (*memory_adopt)(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                              struct ep_error *error);
    /* Mapped for another device of this process too. */
    ep_status (*memory_share)(struct ep_cuda_memory *memory, uint32_t device, struct ep_error *error);
    /* Unmaps; gives the memory back when nobody else has it.  No work may use it.  NULL is allowed. */
    void (*memory_destroy)(struct ep_cuda_memory *memory);
    void *(*memory_at)(const struct ep_cuda_memory *memory);
    /*
     * Any address of this process: the memory around it, [*start, +*bytes), which lies on `device` and which the
     * device may read and write.  That is one allocation, whoever made it, or one mapping of VMM memory, after which
     * the next may follow at once.  EP_INVALID_ARGUMENT: there is none.
     */
    ep_status (*memory_range)(uint32_t device, const void *at, void **start, uint64_t *bytes,
                              struct ep_error *error);
    /*
     * A descriptor (close-on-exec; the caller's to close) of the VMM allocation that is mapped around an address on
     * `device`, whoever made it.  The address is *offset into it, and the mapping holds its first *bytes.
     * EP_INVALID_ARGUMENT: it is memory that cannot be handed on so; the text says what would do.
     */
    ep_status (*memory_export_at)(uint32_t device, const void *at, int *fd, uint64_t *offset, uint64_t *bytes,
                                  struct ep_error *error);

    /* Between host and GPU memory, ordered after what `stream` holds; over when they return. */
    ep_status (*write)(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                       struct ep_error *error);
    ep_status (*read)(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                      struct ep_error *error);
    ep_status (*fill)(uint32_t device, void *to, uint8_t value, uint64_t bytes, void *stream,
                      struct ep_error *error);

    /*
     * Enqueued, over when the stream has come so far: a copy between any two memories, of GPUs and of the host, and
     * a store of 8 aligned bytes, which whoever sees it sees after all that the stream did before.  Host memory that
     * is not pinned is copied before or after they return, as CUDA pleases; a store needs pinned memory.
     */
    ep_status (*copy)(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                      struct ep_error *error);
    ep_status (*store)(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error);
    /*
     * A stream beside others that stores, in the order of the calls, as `store` does, when all is over that `stream`, of
     * the same device, holds by now; what comes on `stream` after that does not wait for it.  One thread at a time.
     */
    ep_status (*marker_open)(uint32_t device, struct ep_cuda_marker **out, struct ep_error *error);
    ep_status (*marker_store)(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream, struct ep_error *error);
    /* What it was asked for is stored all the same.  NULL is allowed. */
    void (*marker_close)(struct ep_cuda_marker *marker);
    /* Whole pages of the host's that all devices of this process may then use, under the same address.
     * EP_UNIMPLEMENTED where a device would need another one. */
    ep_status (*host_pin)(uint32_t device, void *at, uint64_t bytes, struct ep_error *error);
    void (*host_unpin)(uint32_t device, void *at);

    /* ---- ops ---- */
    /* EP_INVALID_ARGUMENT as of ep_device_check(). */
    ep_status (*rank_open)(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                           struct ep_error *error);
    /* Waits for its work on the module's own stream only. */
    void (*rank_close)(struct ep_cuda_rank *rank);
    /*
     * Enqueues an op that passed ep_op_check, or with regions ep_op_check_own; never waits; may be captured, and
     * then keeps the addresses that it has now.  One thread at a time.  What became of it is in the window:
     * struct ep_device_report.
     */
    ep_status (*rank_run)(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream,
                          struct ep_error *error);

    /* ---- executor server: window.h has the hand-over ---- */
    /*
     * The worker's half, for whoever serves the rank that has this window, one at a time.  spins: a kernel rings and
     * looks for the end of the op, which is faster than a stream that does so, but only for a GPU that runs work of
     * both processes at once (MPS): one that switches between them gives it a time slice for each look.
     */
    ep_status (*ring_open)(uint32_t device, void *window, bool spins, struct ep_cuda_ringer **out,
                           struct ep_error *error);
    /*
     * Hands over `op`, which passed ep_op_check.  What comes later on the stream finds it done.  Never waits for ops;
     * may be captured.  One thread at a time; streams stand in the order of the calls and of the launches of graphs.
     */
    ep_status (*ring)(struct ep_cuda_ringer *ringer, const struct ep_op *op, void *stream, struct ep_error *error);
    /* Nothing that it has enqueued or that was captured runs any more.  NULL is allowed. */
    void (*ring_close)(struct ep_cuda_ringer *ringer);
    /*
     * The server's half.  Of `options` all count but `regions`.  It has a stream of its own, which waits for the
     * doorbell most of the time: see serve.c for what a process may ask of the driver meanwhile.  All blocks of an op
     * run at once, so the max_sms of the ranks that are served on a GPU must not exceed its multiprocessors
     * in all.  EP_RESOURCE_EXHAUSTED: the GPU has no hardware queue left for one more stream that waits.
     */
    ep_status (*serve_open)(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                            struct ep_error *error);
    /*
     * Puts `ops` more entries into the stream: each waits for the doorbell, in turn, and runs the op or leaves it to
     * the next one (serve.c says when, and how often in a row).  One thread at a time, as wait.
     * EP_RESOURCE_EXHAUSTED: with those posted before, more than EP_CUDA_SERVE_OPS; EP_CANCELLED after end.
     */
    ep_status (*serve_post)(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error);
    /* Sleeps until all entries are over but those of the last post.  EP_CANCELLED after end. */
    ep_status (*serve_wait)(struct ep_cuda_serve *serve, struct ep_error *error);
    /*
     * Memory beside the window, which is mapped for the device: from here on ops find it as region `number`, of which
     * there is none.  One thread at a time, as the next two; they wait for no op.
     */
    ep_status (*serve_region)(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                              struct ep_error *error);
    /* Ops that begin from here on do not find it.  *entry is what the next one is asked for. */
    ep_status (*serve_forget)(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error);
    /* EP_OK: the memory may be unmapped.  EP_UNAVAILABLE: an op that has found it may still run. */
    ep_status (*serve_forgotten)(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error);
    /*
     * Any thread: no op begins any more, and what was posted passes without one; a wait ends.  A running op
     * is to be ended by the membership.  EP_DEADLINE_EXCEEDED: after so long something still runs, and a
     * wait may not end.  May be called again.
     */
    ep_status (*serve_end)(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error);
    /* After end, whatever that said, and when no wait runs: what still runs keeps its memory, which is never
     * given back. */
    void (*serve_close)(struct ep_cuda_serve *serve);

    /* ---- several nodes (device_net.h) ---- */
    /* The NCCL whose Device API the kernels were built with, as its NCCL_VERSION_CODE; 0: with none, and no op of a
     * rank with `net` can be run. */
    uint32_t (*nccl_version)(void);
    /* For the rest of the calling thread the device is the current one, as NCCL wants it. */
    ep_status (*nccl_bind)(uint32_t device, struct ep_error *error);
    /* create, destroy: NCCL's ncclDevCommCreate and ncclDevCommDestroy; wire: EP_NET_WIRE_WORDS, of a struct
     * ep_device_net; signals: ep_net_all_signals().  On a thread that is bound.  NCCL's result, 0: all is well. */
    int (*nccl_device_open)(void *create, void *comm, uint32_t signals, uint64_t *wire);
    int (*nccl_device_close)(void *destroy, void *comm, const uint64_t *wire);

    /* ---- streams and graphs ---- */
    ep_status (*stream_create)(uint32_t device, void **stream, struct ep_error *error);
    void (*stream_destroy)(uint32_t device, void *stream);
    /* EP_UNAVAILABLE while work is under way. */
    ep_status (*stream_query)(uint32_t device, void *stream, struct ep_error *error);
    ep_status (*stream_sync)(uint32_t device, void *stream, struct ep_error *error);
    /* What is put on it now runs when a graph is launched, and as often. */
    ep_status (*stream_captured)(uint32_t device, void *stream, bool *captured, struct ep_error *error);
    /* From here on, what the calling thread asks of the driver spoils no capture of another thread, whatever mode that has. */
    void (*thread_relax)(void);
    ep_status (*graph_begin)(uint32_t device, void *stream, struct ep_error *error);
    ep_status (*graph_end)(uint32_t device, void *stream, struct ep_cuda_graph **out, struct ep_error *error);
    ep_status (*graph_launch)(struct ep_cuda_graph *graph, void *stream, struct ep_error *error);
    void (*graph_destroy)(struct ep_cuda_graph *graph);
    /* Events: us between two marks of a stream. */
    ep_status (*event_create)(uint32_t device, void **event, struct ep_error *error);
    void (*event_destroy)(uint32_t device, void *event);
    ep_status (*event_record)(uint32_t device, void *event, void *stream, struct ep_error *error);
    ep_status (*event_elapsed)(uint32_t device, void *from, void *to, float *us, struct ep_error *error);
};

/*
 * The module's functions, loaded once.  The first call of a process starts the CUDA driver, if nothing else has
 * done so.
 *
 * EP_NOT_FOUND and why when there is no module, no driver or no GPU; else, with GPUs, what the driver said.  Looked for
 * in $EP_CUDA_MODULE, beside the object that asks, in ../lib of it, then as the loader does.
 */
ep_status ep_cuda_open(const struct ep_cuda_api **api, struct ep_error *error);

/*
 * For a process that runs several ranks of one GPU, before its first ep_cuda_open() and while it has one thread:
 * puts CUDA_DEVICE_MAX_CONNECTIONS=32, the most there can be, into the environment unless it is set.  Streams
 * that share one of a GPU's hardware queues wait for each other, and a kernel that waits for a peer could stand
 * before what that peer needs to go on.  Who has one rank per GPU does without: on an H200 a context of
 * 32 queues takes 0.75 s to make and one of 8 0.20 s, and kernels begin later with 32.
 */
void ep_cuda_ask_for_queues(void);

#endif
