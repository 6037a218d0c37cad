/*
 * ep_client: the public C API of libepclient.
 *
 * A worker opens a connection to the ep-server of its node, joins a group as one rank, takes
 * memory from its window and then dispatches and combines.  No RPC is made on the data path.
 *
 *     ep_client *client;  ep_rank *rank;  ep_handle *handle;
 *     ep_client_open("unix:/run/ep-server/ep.sock", NULL, &client);
 *     ep_join(client, &(ep_join_options){ .size = sizeof(ep_join_options), .group = "moe" }, &rank);
 *     void *x = ep_alloc(rank, bytes);                     // window memory, visible to the server
 *     ep_write(rank, x, tokens, bytes, NULL);
 *     ep_handle_create(rank, &handle);
 *     ep_dispatch(handle, &dispatch, NULL);                // asynchronous, in order
 *     ep_sync(rank, -1);                                   // or ep_handle_wait()
 *     ... experts ...
 *     ep_combine(handle, &combine, NULL);
 *     ep_sync(rank, -1);
 *
 * ## Errors
 * Every call that can fail returns an ep_status.  ep_error_message() gives the sentence that names
 * the argument, what was wrong and what would be right.  An error leaves every object usable and
 * outputs untouched unless a call says otherwise.  Errors of an op that already runs come back from
 * ep_sync() or ep_handle_wait().  After EP_DEVICE_LOST the driver does nothing more for the process: a
 * kernel of it, or with MPS of any process on the GPU, went wrong, or the GPU failed; start it again.
 *
 * ## Threads
 * An ep_client may be used by any thread.  An ep_rank and its handles belong to one thread at a time;
 * several ranks in one process are fine.  ep_rank_interrupt() alone may come from any thread.
 * fork() without exec is not allowed while a client is open.
 *
 * ## Backends
 * The same program runs on both.  On the host backend the memory of ep_alloc() is shared memory that
 * the program may also use directly.  On the cuda backend it is memory of the rank's GPU: the program's
 * kernels use it, the host never follows such a pointer (nor ep_op_info.view); ep_write() and ep_read()
 * copy.  A program that knows which backend it is on (ep_rank_info) does what is fastest there.
 *
 * ## Streams and order
 * Ops of a rank execute in the order of the calls.  Inputs must stay unchanged, and outputs untouched,
 * until the op is over.
 *
 * Host: `stream` is NULL and calls return once the op is in the ring (they wait for a free slot when
 * 32 ops are under way).
 *
 * cuda: an op runs in the order of the CUstream it is given, NULL is one of the rank's own.  Calls never
 * wait, and what they enqueue uses the GPU's memory alone: the caller's kernels before and after an op on
 * the same stream need no wait between.  A rank's ops must be in order among each other: one stream at a
 * time, or several that the caller's events order.  A stream lives until the ep_sync() after its last op.
 *
 * Ops may be captured into a CUDA graph (cuda, both executors).  Their arguments are those of the capture;
 * memory and handles that a graph uses must outlive it, and the graph's last launch must be over before
 * ep_leave().  Nothing of the rank but ops may be called while one of its streams captures.  Launches are
 * waited for by the caller; ep_sync() after that tells what became of them.
 *
 * ## Executors
 * Under executor server the ops of a worker are executed by ep-server, which checks every one of them.  The
 * worker has its own window and nothing else of its group, and the server has that and what the worker registers:
 * what it does wrongly spoils its own tokens only.
 * On cuda each op is handed over and back in stream order, which costs some 10 us on an H200 with an MPS
 * server, and 17 us without one as long as ops follow each other (in graphs, the first 503 that differ; 25 us more for
 * others).  Where kernels of the worker stand between them, the GPU switches to its process and back, which takes 0.3 ms
 * without MPS.
 *
 * Under executor direct (cuda) the worker's own process launches the kernels on windows of its peers that are
 * mapped into it: no hand-over, and nothing that checks.  A fault in such a worker can spoil the memory of its
 * group, so a server hands windows out to workers of its own user only, unless it was told otherwise.
 *
 * Ranks of one group may differ in it, and a program need not know which it has.
 *
 * ## Every rank, in the same order
 * Dispatch and combine are collective: the k-th LL dispatch of each rank belong together, likewise
 * the k-th HT op.  Ranks may differ in tokens, layout of outputs and in what they read.  What travels
 * (wire_dtype, scale_format) is the same everywhere, and to see to that is the callers': HT ops that do not
 * fit end with EP_FAILED_PRECONDITION, an LL dispatch takes rows for what its own arguments say they are.
 *
 * A rank that joins while others run takes part from the first op of each mode that nobody has begun.  Where they do
 * LL and HT in turn, whose turn it is only the program knows: a newcomer that begins with the other one waits for them
 * and they for it, until time is over.  One that has to replace a worker there must be told, or have all begin anew.
 *
 * ## Steps, and going over to the group's next epoch
 * When an operator changes what a group is made of, its next epoch is formed beside the running one.  A rank that
 * follows (ep_join_options.follow) attaches to it in the background, ops going on, and all ranks go over at one and the
 * same place of their programs:
 *
 *     for (;;) {
 *         if (ep_advance(rank, &next) == EP_OK && next) {  // a boundary between steps
 *             ... finish on `rank` what began there ...
 *             ep_leave(rank);
 *             rank = next;                                 // other sizes perhaps: ep_rank_describe(), ep_alloc()
 *         }
 *         ... dispatch, experts, combine ...
 *     }
 *
 * On cuda this is about what the program has put on streams, whether the GPU has come to it or not.  Ops of the rank and
 * of its successor must be in order among each other as those of one rank must: on the same stream they are.  ep_leave()
 * waits for the rank's ops; a program that does not want to wait calls it a few steps later.  A graph holds the memory of
 * the rank that it was captured with: capture anew on the successor, and see ep_graph_begins().
 *
 * Versioned structs start with their size, as ep_join_options above: set it to sizeof.  A library that
 * is older than the program takes them as long as what it does not know is 0.
 */
#ifndef EP_CLIENT_H
#define EP_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_status.h"
#include "ep_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EP_API __attribute__((visibility("default")))

typedef struct ep_client ep_client;
typedef struct ep_rank ep_rank;
typedef struct ep_handle ep_handle;
typedef void *ep_stream; /* a CUstream on the cuda backend, NULL on the host backend */

/* The sentence of the last failed call on this thread; never NULL. */
EP_API const char *ep_error_message(void);

/* "0.1.0" */
EP_API const char *ep_version(void);

/* ---- connection --------------------------------------------------------------- */

typedef struct ep_client_options {
    size_t size;
    const char *name;       /* of this worker, for logs and for whoever finds its rank taken: UTF-8, of which the server
                               keeps 63 bytes; NULL: the program's */
    const char *token;      /* when the server asks for one (ep-server --attach-token-file); NULL: the first line of the
                               file that EP_CLIENT_TOKEN_FILE in the environment names, if that is set.  A group may want
                               its own, see ep_join_options */
    int32_t timeout_ms;     /* of each control call; 0: 5000; there is none without a bound, so < 0 is refused */
} ep_client_options;

/*
 * address: "unix:PATH", with a path of 107 bytes at most; NULL: $EP_SERVER, else the socket of the user's own server
 * when it is there ($XDG_RUNTIME_DIR/ep-server/ep.sock), else unix:/run/ep-server/ep.sock.  options may be NULL.
 * EP_UNAVAILABLE when no server answers there; EP_FAILED_PRECONDITION when it is of another release,
 * whose windows this library does not know; EP_INVALID_ARGUMENT when there is no token in the file that is named.
 */
EP_API ep_status ep_client_open(const char *address, const ep_client_options *options, ep_client **client);
/* Its ranks should have left; those that have not are left now.  NULL is allowed. */
EP_API void ep_client_close(ep_client *client);

/* ---- groups ------------------------------------------------------------------- */

/* What a group settled on. */
typedef struct ep_group_info {
    size_t size;
    uint64_t epoch;
    uint32_t ranks, experts, hidden, top_k;
    uint32_t ll_max_tokens, ht_max_tokens; /* 0: the mode is not part of the group */
    uint32_t ll_banks;
    uint32_t dtypes;       /* bits 1u << ep_dtype */
    uint32_t max_local_experts;
    uint64_t arena_bytes, window_bytes;
    uint32_t timeout_ms;
} ep_group_info;

/* EP_NOT_FOUND: there is none of that name; EP_FAILED_PRECONDITION: it has no epoch yet. */
EP_API ep_status ep_group_describe(ep_client *client, const char *group, ep_group_info *info);

/* ---- joining ------------------------------------------------------------------ */

#define EP_ANY_RANK (-1)

/* What a group's windows are on. */
typedef enum ep_backend {
    EP_BACKEND_HOST = 1,
    EP_BACKEND_CUDA = 2
} ep_backend;

/* Who runs the ops of a rank. */
typedef enum ep_executor {
    EP_EXECUTOR_AUTO = 0,   /* direct where the group allows it and the backend has it, else server */
    EP_EXECUTOR_SERVER = 1, /* the ep-server of this node */
    EP_EXECUTOR_DIRECT = 2  /* this process; cuda */
} ep_executor;

typedef struct ep_join_options {
    size_t size;
    const char *group;
    int32_t rank;           /* EP_ANY_RANK: a free one */
    ep_executor executor;
    uint32_t ht_sms;        /* cuda: multiprocessors that HT ops fill; 0, or more than the rank may have: all of those.
                               The others are free for what the program computes meanwhile.  For both executors; who
                               follows its group keeps it */
    bool follow;            /* the program calls ep_advance() between its steps, see there */
    const char *token;      /* when the group wants one (ep-admin group create --attach-token-file), 1 to 256 bytes; NULL:
                               the first line of the file that EP_ATTACH_TOKEN_FILE in the environment names, if that is
                               set; "": none.  A group that wants none takes any.  Only read during the call: who
                               follows its group needs it no more */
} ep_join_options;

/*
 * Claims a rank and maps its window.  From here on peers wait for this rank in every op that
 * begins, so be ready to take part.  EP_NOT_FOUND: there is no such group.  EP_ALREADY_EXISTS: somebody holds the
 * rank, and the message says who, or all ranks are held.  EP_FAILED_PRECONDITION: the node is drained or the group is
 * not ready.  EP_UNAUTHENTICATED: the server wants a token of its own (ep_client_options.token).  EP_UNAVAILABLE: its
 * last worker has left and may still write its memory; a rank that is free within half a second is
 * waited for.  EP_PERMISSION_DENIED: the group wants a token, and it was not given or is another one; or executor
 * direct was asked for, and the group does not allow it.  EP_UNIMPLEMENTED: that was asked for, and there is none on the
 * host backend or over several nodes; or this process cannot use GPUs.  EP_RESOURCE_EXHAUSTED: executor server, and the
 * ops of other ranks fill the GPU; the message says whose.
 *
 * Whoever joins a group at work does so between two ops of its peers, which may be in the middle of one of their steps.
 * Its first op must be the one that they do next: how far they are is told by the dispatches that they have begun since
 * the epoch began (ep_rank_info.ll_begun and ht_begun, 0 at first), so a program whose steps are all alike knows where in
 * a step it begins, does what is left of that one, and calls ep_advance() after it for the first time.
 *
 * On cuda, the first join of a process starts the CUDA driver if nothing else has, and makes the GPU's
 * context: most of a second, against milliseconds of a process that has one.  Where it takes longer than the rank is
 * kept for it, 5 s, the rank is claimed again.  A program that holds several ranks of one GPU sets
 * CUDA_DEVICE_MAX_CONNECTIONS=32 in its environment when it begins: with fewer hardware queues, streams of ranks that
 * share a GPU may stand in each other's way.  A program that holds several ranks of a group also loads its own kernels
 * before their ops run (CUDA_MODULE_LOADING=EAGER, or a launch of each): what the driver loads later waits for all that the
 * process has under way, an op that waits for another of its ranks too, and that one's launch waits for the driver.
 */
EP_API ep_status ep_join(ep_client *client, const ep_join_options *options, ep_rank **rank);

/*
 * Gives the rank back: waits for running ops (bounded by the group's timeout), unmaps the window; that of a rank that has
 * gone over (ep_advance) is unmapped a moment later, or by ep_client_close().
 * All pointers into it and all handles die; on cuda, no kernel or graph of the caller may use them any
 * more.  NULL is allowed.
 */
EP_API void ep_leave(ep_rank *rank);

/*
 * A boundary between two steps of a rank that follows its group.  A collective, like an op: every rank calls it at the
 * same places among its ops; calls without a dispatch in between count as one.  Until a program has called it once, its
 * group does not go over to another epoch, and neither does it while a worker that does not follow is attached.
 *
 * EP_OK and *next NULL: go on, which is what it nearly always says, for the price of a lock that nobody else wants.
 *
 * EP_OK and a *next: here all ranks go over to the group's next epoch.  It is the same rank there, attached and ready
 * for ops, with nothing of this one's memory or handles: sizes, modes, placement and the number of ranks may differ.
 * Dispatches go to it from here on; what began on `rank` is finished on `rank`: its combines, ep_complete(), passes with
 * cached routing.  Then ep_leave(rank).  Nobody waits for that, and no peer is told.  Until it is handed over, the
 * successor is the library's, and goes with ep_leave(rank) or ep_client_close().
 *
 * EP_DETACHED: the others go over, and this rank has no place there on this node, or they go without it, as both have gone
 * on alone for more than a moment (its node had lost the others); the message says why.  What began is finished in the same way, and
 * ep_leave(); in the second case a further ep_join() gives the rank in the group's next epoch.  (When the rank itself was
 * taken away, ep_sync() says EP_DETACHED too.)
 *
 * It waits only where going over has been agreed on but not confirmed: rarely, for milliseconds, and for the group's
 * timeout at most.  EP_TIMEOUT then, and EP_CANCELLED after ep_rank_interrupt(): the boundary has not been passed, and
 * until it is called again no dispatch begins on the rank.  EP_SERVER_LOST and EP_DETACHED as by ep_sync().
 * EP_FAILED_PRECONDITION: the rank does not follow, or has gone over before.
 */
EP_API ep_status ep_advance(ep_rank *rank, ep_rank **next);

/*
 * A graph that holds so many dispatches of the rank is about to be launched.  Where a rank follows its group, how far all
 * have come is told by the dispatches that have begun, and of those in graphs only the program knows when and how often
 * that is.  Cached ones and those that send only count too, combines and completes do not.  Needed of ranks that follow;
 * of others it does nothing.
 *
 * EP_FAILED_PRECONDITION: no dispatch may begin, as the rank has gone over or the last ep_advance() has not passed its
 * boundary; do not launch it.
 */
EP_API ep_status ep_graph_begins(ep_rank *rank, uint32_t dispatches);

/* Where an expert is: as local expert `local` of `rank`. */
typedef struct ep_home {
    uint32_t expert, rank, local;
} ep_home;

typedef struct ep_rank_info {
    size_t size;
    uint32_t rank;
    uint32_t local_experts;      /* L of this rank */
    const uint32_t *local_to_expert; /* [local_experts] expert numbers, valid while joined */
    ep_group_info group;
    ep_backend backend;
    ep_executor executor;        /* server or direct */
    uint8_t device_uuid[16];     /* cuda: the GPU that the rank's memory is on, as CUdevice and NVML name it */
    uint32_t n_homes;
    const ep_home *homes;        /* [n_homes] of all experts, in their order; valid while joined */
    uint64_t ll_begun, ht_begun; /* dispatches of the group in this epoch before the rank's first one, see ep_join() */
    uint32_t ht_sms;             /* cuda: multiprocessors that HT ops fill at most, of ep_join_options.ht_sms */
} ep_rank_info;

EP_API ep_status ep_rank_describe(const ep_rank *rank, ep_rank_info *info);

/* ---- memory ------------------------------------------------------------------- */

/*
 * `bytes` of the rank's arena, 256-byte aligned, uninitialised; NULL when the arena has no such block, and
 * ep_error_message() says how large its largest one is.  Everything an op reads or writes lies
 * in it, or in memory of ep_register().  Freed by ep_free() or when the rank is left.  The table of blocks
 * is in private memory: nothing is written to the window.  0 bytes give a block too.
 */
EP_API void *ep_alloc(ep_rank *rank, size_t bytes);
EP_API void ep_free(ep_rank *rank, void *memory);

/* How many memories a rank can have registered. */
#define EP_MAX_REGISTERED 64

/*
 * Memory of the program's own, [memory, memory + bytes): from here on ops, ep_write() and ep_read() use it
 * like a block of ep_alloc(), and nothing is copied.  For both executors on cuda; no peer ever writes it.
 * EP_UNIMPLEMENTED on the host backend, whose ops have the window only.
 *
 * It lies on the rank's GPU (ep_rank_info.device_uuid), which may read and write it.  `memory` is a multiple of
 * 16, bytes at least 1.  What a tensor library has of the GPU is best registered in its large blocks, once: one
 * memory may hold any number of inputs and outputs, and each of those lies in one memory, whole.
 *   - Executor direct: the kernels run in this process, so it may be any memory of the GPU, cudaMalloc()'s,
 *     cudaMallocAsync()'s or mappings of VMM memory one after the other without a gap.  Nothing of it goes to
 *     the server.
 *   - Executor server: the server maps it, so it is VMM memory that can be handed on, of one allocation: made by
 *     ncclMemAlloc(), or by cuMemCreate() with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.  The call waits for the
 *     server, no longer than the client's timeout_ms and the group's.  What the server maps for a rank is bounded
 *     (ep-server --max-region-bytes), from the beginning of each allocation.
 * EP_INVALID_ARGUMENT: it is not like that, or part of a window; the text says what would do.  EP_ALREADY_EXISTS: it
 * overlaps memory that is registered; EP_RESOURCE_EXHAUSTED: the rank has EP_MAX_REGISTERED of them, or the server's
 * bound is reached; EP_DEADLINE_EXCEEDED: the server has not answered.  Several ranks of a process may register the
 * same memory.
 *
 * It stays the program's to free, after ep_unregister() or ep_leave(), which forgets all.  ep_unregister()
 * takes the address that a registered one begins at (else EP_NOT_FOUND); ops that may still use it must be over,
 * as for ep_free(), a send-only one with its ep_complete().  Whatever ep_unregister() returns then, it is not
 * registered any more.
 *   - Executor direct: a graph keeps the addresses that it was captured with.  It may be launched as long as the
 *     memory is there.
 *   - Executor server: a graph keeps the memory's place among those registered.  Launched after ep_unregister(), its
 *     ops fail with EP_INVALID_ARGUMENT, or use what was registered in that place since.  An op that runs meanwhile
 *     comes to its end, and ep_unregister() waits for it; until then, or when that takes longer than the timeouts
 *     above (EP_DEADLINE_EXCEEDED), the server holds the memory, also after the program has freed it; the next of these
 *     calls asks it for that again.
 */
EP_API ep_status ep_register(ep_rank *rank, void *memory, size_t bytes);
EP_API ep_status ep_unregister(ep_rank *rank, void *memory);

/*
 * Copies between the program's own memory and the rank's: ep_write() to the rank's, ep_read() from it.
 * Rank's memory is one block of ep_alloc() or one memory of ep_register(), from anywhere in it, or the
 * rows or scales that a view of ep_op_info shows.  They come after the ops before them (cuda: after what the
 * stream holds) and are over when they return.  Failures of those ops are told by the next ep_sync().
 */
EP_API ep_status ep_write(ep_rank *rank, void *to, const void *from, size_t bytes, ep_stream stream);
EP_API ep_status ep_read(ep_rank *rank, void *to, const void *from, size_t bytes, ep_stream stream);

/* ---- handles ------------------------------------------------------------------ */

/*
 * A handle holds the routing of one dispatch, for its combine and for later passes.  A new
 * dispatch on it replaces the routing.  An LL handle's routing (and its rank-major rows) lives until
 * the group's ll_banks-th LL dispatch after it, made on any handle of the rank; after that a combine
 * returns EP_STALE_HANDLE.  At most 64 per rank, then EP_RESOURCE_EXHAUSTED.
 */
EP_API ep_status ep_handle_create(ep_rank *rank, ep_handle **handle);
EP_API void ep_handle_destroy(ep_handle *handle); /* NULL is allowed */

/* ---- dispatch ----------------------------------------------------------------- */

/* Where a received row comes from: EP_NO_TOKEN of a rank that fell out before it sent the row. */
typedef struct ep_source_row {
    uint32_t rank, token;
} ep_source_row;

/*
 * Shapes as in ep_types.h; T tokens of this rank, k choices each; L is the group's max_local_experts,
 * on every rank.  Pointers lie in memory of ep_alloc() or ep_register() of the same rank and are multiples of 16;
 * what an HT dispatch on cuda delivers (out, out_scales) lies in that of ep_alloc(), because peers write it.
 * An expert number outside [-1, experts) is counted as dropped, never followed.
 */
typedef struct ep_dispatch_args {
    size_t size;
    ep_mode mode;
    ep_layout layout;
    uint32_t flags;           /* EP_OP_SEND_ONLY (LL), EP_OP_CACHED */
    ep_dtype input_dtype;     /* of tokens */
    ep_dtype wire_dtype;      /* 0: as input_dtype.  EP_FP8_E4M3: quantised on the way */
    uint32_t num_tokens;      /* T; 0 is legal */
    uint32_t top_k;           /* k; 0: the group's, with EP_OP_CACHED the handle's */
    uint32_t index_bytes;     /* of topk_idx: 4 (0: 4) or 8 */
    uint32_t alignment;       /* packed: rows, a power of two; 0: 1 */
    const void *tokens;       /* [T, H] */
    const void *scales;       /* [T, ceil(H/128)] as scale_format says, fp8 input only */
    const void *topk_idx;     /* [T, k]; not with EP_OP_CACHED */
    const float *topk_weights;/* [T, k]; NULL: 1; not with EP_OP_CACHED */
    /* outputs */
    void *out;                /* rows; NULL for rank-major, which is zero copy: see ep_op_info.view */
    size_t out_bytes;         /* packed, flat: how many bytes `out` has; others need the full shape */
    void *out_scales;         /* fp8 arrives: [rows of out, ceil(H/128)] as scale_format says */
    int32_t *counts;          /* expert-major, packed [L]; rank-major, flat [R] */
    int32_t *offsets;         /* packed [L + 1] */
    int32_t *out_topk;        /* optional: rank-major [R, T_max, k], flat [rows, k]: local expert or -1 */
    float *out_weights;       /* optional, like out_topk */
    ep_source_row *sources;   /* optional: where each row of out comes from */
    ep_scale_format scale_format; /* fp8 travels: floats (0) or UE8M0, a byte each; given, made and received */
} ep_dispatch_args;

EP_API ep_status ep_dispatch(ep_handle *handle, const ep_dispatch_args *args, ep_stream stream);

/* ---- combine ------------------------------------------------------------------ */

/*
 * Rows come as the handle's dispatch laid them out.  Expert-major and packed rows are one expert's
 * output each: they are multiplied by the token's weight and summed over this rank's experts in fp32
 * before they travel.  Rank-major and flat rows are the rank's sum for the token already,
 * weights included.  What travels is rounded once to `dtype`, and so is the result.
 */
typedef struct ep_combine_args {
    size_t size;
    uint32_t flags;           /* EP_OP_SEND_ONLY (LL) */
    ep_dtype dtype;           /* of rows, bias and out: bf16, fp16 or fp32 */
    const void *rows;         /* rank-major: [R, T_max, H] packed, or NULL: in place in the window's view */
    size_t rows_bytes;        /* packed, flat: bytes at `rows` */
    const void *bias;         /* optional [T, H] */
    void *out;                /* [T, H] in the order of the dispatch's tokens */
    /* HT backward: gradients of the weights */
    const float *row_grads;   /* optional: flat [N, k], packed [rows] */
    float *topk_grads;        /* with row_grads: [T, k]; without tokens NULL will do */
} ep_combine_args;

EP_API ep_status ep_combine(ep_handle *handle, const ep_combine_args *args, ep_stream stream);

/* The receiving half of the handle's last send-only dispatch or combine. */
EP_API ep_status ep_complete(ep_handle *handle, ep_stream stream);

/* ---- waiting and results -------------------------------------------------------- */

/*
 * Waits until every op of the rank is over (cuda: the streams that ops were given since the last
 * ep_sync()).  Returns the first failure since the last call that ep_handle_wait() has not told, and its
 * message (what failed after it counts as told too, and ep_op_info has it); EP_DEADLINE_EXCEEDED when timeout_ms
 * (< 0: none beyond the group's own bounds) is over first; EP_SERVER_LOST when the server is gone; EP_DETACHED when it
 * has taken the rank away; EP_CANCELLED after ep_rank_interrupt(), with the ops going on.  A failure is told once, by
 * whichever of ep_sync() and ep_handle_wait() comes first, and that of a handle that is gone by ep_sync(); the loss of
 * the server or the rank by every call.
 *
 * When the server or the rank is lost, ops on cuda end at once, without their peers (direct) or without having
 * been executed (server), in graphs that are launched later too: no stream waits for ever, and what is in their
 * outputs is of no use.  ep_sync() returns when they have ended, or after a second.
 */
EP_API ep_status ep_sync(ep_rank *rank, int32_t timeout_ms);

/* The same for the handle's ops only (cuda: what the stream of its last op holds). */
EP_API ep_status ep_handle_wait(ep_handle *handle, int32_t timeout_ms);

/* Makes the wait that the rank's thread is in, or the next one, return EP_CANCELLED: ep_sync(),
 * ep_handle_wait(), ep_event_next(), ep_advance(), or on the host backend a call that waits for a free slot or a copy.
 * Any thread, async-signal-safe. */
EP_API void ep_rank_interrupt(ep_rank *rank);

/* What became of the handle's last finished dispatch or combine, as far as a wait has seen it.  For a
 * send-only op that is both halves together, total_ns is ep_complete()'s. */
typedef struct ep_op_info {
    size_t size;
    ep_status status;
    uint64_t number;          /* LL or HT number of the op in the group */
    uint64_t rows;            /* dispatch: rows received (packed: padding included) */
    uint64_t rows_needed;     /* EP_OVERFLOW: rows that `out` should have held */
    uint64_t dropped;         /* routes dropped: bad id or absent home */
    uint32_t absent;          /* ranks left out */
    uint32_t late_rank;       /* EP_TIMEOUT: whom it waited for */
    uint64_t wire_bytes;      /* sent to other ranks, each (token, rank) once */
    uint64_t logical_bytes;   /* T * k rows */
    uint64_t service_ns;      /* executor's time from start to end; on cuda that of the GPU */
    uint64_t wait_ns;         /* of it, waiting for peers */
    uint64_t total_ns;        /* from the call to the result, as this process saw it; of a graph that was
                               * launched again: service_ns */
    const void *view;         /* rank-major dispatch: row i of rank r at view + r*view_stride + i*row bytes */
    uint64_t view_stride;     /* bytes */
    const void *scales_view;  /* fp8: scales of that row at + r*scales_view_stride + i*scales_row_stride bytes */
    uint64_t scales_view_stride, scales_row_stride;
    uint64_t arrived[EP_MASK_WORDS]; /* bit r: rank r's part is in the result, all of it */
} ep_op_info;

EP_API ep_status ep_dispatch_info(const ep_handle *handle, ep_op_info *info);
EP_API ep_status ep_combine_info(const ep_handle *handle, ep_op_info *info);

/* ---- events ------------------------------------------------------------------- */

typedef enum ep_event_type {
    EP_EVENT_NONE = 0,
    EP_EVENT_RANK_LOST = 1,   /* rank: peers go on without it */
    EP_EVENT_RANK_JOINED = 2, /* rank */
    EP_EVENT_EPOCH = 3,       /* a newer epoch is there: leave and join again to move.  A rank that follows attaches to
                               * it in the background, ep_advance() hands it over */
    EP_EVENT_DRAINING = 4,    /* leave when it suits */
    EP_EVENT_DETACHED = 5,    /* the group is gone: leave */
    EP_EVENT_EVENTS_LOST = 6, /* value: that many were dropped because nobody read them */
    EP_EVENT_SERVER_LOST = 7
} ep_event_type;

typedef struct ep_event {
    size_t size;
    ep_event_type type;
    uint32_t rank;
    uint64_t epoch, value;
    char text[256];
} ep_event;

/* Readable while an event waits; for poll(2).  Owned by the rank. */
EP_API int ep_event_fd(const ep_rank *rank);
/* The next event; EP_DEADLINE_EXCEEDED when none comes within timeout_ms (0: do not wait; < 0: wait for
 * ever).  When all have been read and none can come: EP_SERVER_LOST or EP_DETACHED. */
EP_API ep_status ep_event_next(ep_rank *rank, int32_t timeout_ms, ep_event *event);

#ifdef __cplusplus
}
#endif
#endif
