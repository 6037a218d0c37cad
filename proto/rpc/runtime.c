/* The runtime: gRPC's life, the completion-queue thread, and the way from it to the loop. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <grpc/support/log.h>

#include "ep_clock.h"
#include "ep_descriptors.h"
#include "ep_thread.h"
#include "rpc_private.h"

/* ---- thread sanitizer ---------------------------------------------------------------- */

#if defined __has_feature
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#ifdef __SANITIZE_THREAD__
/*
 * gRPC, abseil and libuv are not instrumented and lock with futexes of their own: tsan sees what
 * they touch but not in which order.  Their accesses are left out, ours are checked.
 */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "ignore_noninstrumented_modules=1";
}
#endif

/* ---- gRPC's own log ------------------------------------------------------------------ */

/* gRPC's errors are mostly about one peer's connection: nothing of ours is broken, so WARN. */
static void on_grpc_log(gpr_log_func_args *args)
{
    const char *file = strrchr(args->file, '/');
    enum ep_log_level level = args->severity == GPR_LOG_SEVERITY_ERROR ? EP_LOG_WARN : EP_LOG_DEBUG;

    EP_LOG(level, "grpc", args->message, EP_S("file", file ? file + 1 : args->file),
           EP_I("line", args->line));
}

static void route_log(void)
{
    gpr_set_log_function(on_grpc_log);
}

/* ---- from the completion-queue thread to the loop ------------------------------------ */

void rpc_tag_arm(struct rpc_tag *tag)
{
    atomic_store_explicit(&tag->armed, true, memory_order_release); /* pairs with take() */
}

static struct rpc_tag *take(void *raw)
{
    struct rpc_tag *tag = raw;

    (void)atomic_load_explicit(&tag->armed, memory_order_acquire); /* pairs with rpc_tag_arm() */
    return tag;
}

void rpc_tag_post(struct ep_rpc *rpc, struct rpc_tag *tag, bool ok)
{
    tag->ok = ok;
    tag->next = atomic_load_explicit(&rpc->inbox, memory_order_relaxed);
    /* Release: pairs with the exchange in rpc_run_inbox(). */
    while (!atomic_compare_exchange_weak_explicit(&rpc->inbox, &tag->next, tag,
                                                  memory_order_release, memory_order_relaxed))
        ;
    uv_async_send(&rpc->async);
}

static void fetch_inbox(struct ep_rpc *rpc)
{
    struct rpc_tag *tag = atomic_exchange_explicit(&rpc->inbox, NULL, memory_order_acquire);
    struct rpc_tag *first = NULL, **end = &rpc->ready;

    while (tag) { /* newest first becomes oldest first */
        struct rpc_tag *next = tag->next;

        tag->next = first;
        first = tag;
        tag = next;
    }
    while (*end)
        end = &(*end)->next;
    *end = first;
}

/* May be entered again from a callback (a server destroyed in one): the list is the runtime's. */
void rpc_run_inbox(struct ep_rpc *rpc)
{
    uintptr_t outer = atomic_exchange(&rpc->dispatcher, (uintptr_t)pthread_self());

    fetch_inbox(rpc);
    while (rpc->ready) {
        struct rpc_tag *tag = rpc->ready;

        rpc->ready = tag->next;
        tag->fn(tag, tag->ok); /* may free the tag */
    }
    atomic_store(&rpc->dispatcher, outer);
}

bool rpc_on_dispatcher(const struct ep_rpc *rpc)
{
    return atomic_load(&rpc->dispatcher) == (uintptr_t)pthread_self();
}

static void on_async(uv_async_t *async)
{
    rpc_run_inbox(async->data);
}

void rpc_hold_loop(struct ep_rpc *rpc)
{
    if (rpc->users++ == 0)
        uv_ref((uv_handle_t *)&rpc->async);
}

void rpc_let_loop(struct ep_rpc *rpc)
{
    if (--rpc->users == 0)
        uv_unref((uv_handle_t *)&rpc->async);
}

static void cq_main(void *arg)
{
    struct ep_rpc *rpc = arg;

    for (;;) {
        grpc_event event = grpc_completion_queue_next(rpc->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC),
                                                      NULL);

        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return;
        if (event.type == GRPC_OP_COMPLETE)
            rpc_tag_post(rpc, take(event.tag), event.success != 0);
    }
}

/* ---- gRPC's life --------------------------------------------------------------------- */

/* Time that gRPC may take to end when threads of its own hold the last references. */
#define LINGER_NS (2 * EP_NS_PER_S)
#define LINGER_LOOK_US 200

static pthread_mutex_t runtimes_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned runtimes;   /* open in this process; mutex */
static bool grpc_is_shared; /* somebody had gRPC running before the first of them; mutex */

/* What gRPC makes when it begins and with the first channel or server: some, and as many as there are cores, within bounds. */
#define GRPC_THREADS_FEW  8
#define GRPC_THREADS_MOST (GRPC_THREADS_FEW + 32)
/* Two pollers of two each, and the others are for the first connection and for what comes between the pollers. */
#define GRPC_DESCRIPTORS 12

static int grpc_threads(void)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN), most = GRPC_THREADS_MOST - GRPC_THREADS_FEW;

    return GRPC_THREADS_FEW + (int)(cores < 2 ? 2 : cores > most ? most : cores);
}

/* gRPC goes on without a thread that it cannot make: then no deadline passes, and its shutdown waits for that thread for
 * ever.  It says nothing of it, so it is tried before. */
static ep_status try_threads(struct ep_error *error)
{
    const int wanted = grpc_threads();
    int n, failure = ep_threads_try(wanted, &n);

    if (failure == 0)
        return EP_OK;
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "cannot open the RPC runtime: %d of the %d threads that it needs can be "
                        "started: %s: see the limits of threads (ulimit -u, the cgroup's pids.max) and of address space "
                        "(ulimit -v)", n, wanted, uv_strerror(-failure));
}

/* Without one for a poller of its own gRPC ends the process, which may be a worker's. */
static ep_status try_descriptors(struct ep_error *error)
{
    const int n = ep_descriptors_try(GRPC_DESCRIPTORS);

    if (n == GRPC_DESCRIPTORS)
        return EP_OK;
    return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "cannot open the RPC runtime: %d of the %d descriptors that it needs "
                          "are to be had (ulimit -n)", n, GRPC_DESCRIPTORS);
}

static ep_status try_limits(struct ep_error *error)
{
    const ep_status status = try_descriptors(error);

    return status == EP_OK ? try_threads(error) : status;
}

static ep_status start_grpc(struct ep_error *error)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&runtimes_mutex);
    if (runtimes == 0) {
        grpc_is_shared = grpc_is_initialized();
        status = grpc_is_shared ? EP_OK : try_limits(error);
    }
    if (status == EP_OK) {
        runtimes++;
        grpc_init();
    }
    pthread_mutex_unlock(&runtimes_mutex);
    return status;
}

static bool leave_grpc(void)
{
    bool last;

    pthread_mutex_lock(&runtimes_mutex);
    last = --runtimes == 0 && !grpc_is_shared;
    pthread_mutex_unlock(&runtimes_mutex);
    return last;
}

static bool runtime_is_open(void)
{
    bool open;

    pthread_mutex_lock(&runtimes_mutex);
    open = runtimes > 0;
    pthread_mutex_unlock(&runtimes_mutex);
    return open;
}

/*
 * Each of gRPC's channels, those of a server's connections among them, holds gRPC up until one of
 * its threads has destroyed it.  When that comes after our own shutdown, the latter returns at once
 * and a detached thread does the work.  A process that exits meanwhile runs OpenSSL's exit
 * handlers under threads that still use it, and what those had is never freed.  A connection that is being made, and
 * whose server does not speak, goes when the attempt is over, and not sooner (ep_rpc_connect_within()).
 *
 * gRPC offers nothing to wait on.  Whoever else uses it in this process may keep it for good: the
 * wait is bounded, and left out when they were there first.
 */
static void stop_grpc(void)
{
    bool last = leave_grpc();
    uint64_t end = ep_clock_ns() + LINGER_NS;

    grpc_shutdown_blocking();
    while (last && grpc_is_initialized() && !runtime_is_open() && ep_clock_ns() < end)
        usleep(LINGER_LOOK_US);
}

/* ---- open and close ------------------------------------------------------------------ */

static void free_runtime(struct ep_rpc *rpc)
{
    if (rpc->schema)
        google__protobuf__file_descriptor_set__free_unpacked(rpc->schema, NULL);
    free(rpc);
}

static void on_async_closed(uv_handle_t *handle)
{
    free_runtime(handle->data);
}

void ep_rpc_names_by_host(void)
{
    (void)setenv("GRPC_DNS_RESOLVER", "native", 0); /* gRPC offers no other way to say it; without it names take longer */
}

ep_status ep_rpc_open(uv_loop_t *loop, struct ep_rpc **out, struct ep_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct ep_rpc *rpc = calloc(1, sizeof *rpc);
    int result;

    if (!rpc)
        return ep_error_set(error, EP_NO_MEMORY, "cannot open the RPC runtime: out of memory");
    rpc->connect_ms = RPC_CONNECT_MS;
    if (rpc_schema_load(&rpc->schema, error) != EP_OK)
        goto free_rpc;
    if (loop && (result = uv_async_init(loop, &rpc->async, on_async)) != 0) {
        ep_error_set(error, EP_INTERNAL, "cannot open the RPC runtime: %s", uv_strerror(result));
        goto free_rpc;
    }
    if (loop) {
        rpc->loop = loop;
        rpc->async.data = rpc;
        uv_unref((uv_handle_t *)&rpc->async); /* servers and calls keep the loop alive, a runtime does not */
    }
    pthread_once(&once, route_log);
    if (start_grpc(error) != EP_OK)
        goto close_async;
    rpc->cq = grpc_completion_queue_create_for_next(NULL);
    result = uv_thread_create(&rpc->thread, cq_main, rpc);
    if (result != 0) {
        ep_error_set(error, EP_INTERNAL, "cannot start the RPC thread: %s", uv_strerror(result));
        goto shut_grpc;
    }
    *out = rpc;
    return EP_OK;

shut_grpc:
    grpc_completion_queue_shutdown(rpc->cq);
    grpc_completion_queue_destroy(rpc->cq);
    stop_grpc();
close_async:
    if (loop) {
        uv_close((uv_handle_t *)&rpc->async, on_async_closed);
        return error ? error->status : EP_INTERNAL;
    }
free_rpc:
    free_runtime(rpc);
    return error ? error->status : EP_INTERNAL;
}

void ep_rpc_connect_within(struct ep_rpc *rpc, int64_t timeout_ms)
{
    const bool bounded = timeout_ms >= 0 && timeout_ms < RPC_CONNECT_MS - RPC_CONNECT_SLACK_MS;

    rpc->connect_ms = bounded ? (int)timeout_ms + RPC_CONNECT_SLACK_MS : RPC_CONNECT_MS;
}

void ep_rpc_close(struct ep_rpc *rpc)
{
    if (!rpc)
        return;
    assert(rpc->users == 0);
    grpc_completion_queue_shutdown(rpc->cq);
    uv_thread_join(&rpc->thread);
    rpc_run_inbox(rpc);
    grpc_completion_queue_destroy(rpc->cq);
    stop_grpc(); /* what gRPC frees is freed when this returns, and the credential sources are idle */
    rpc_server_tls_free_all(rpc);
    if (rpc->loop)
        uv_close((uv_handle_t *)&rpc->async, on_async_closed);
    else
        free_runtime(rpc);
}
