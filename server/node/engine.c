/*
 * engine: one thread that serves one rank's ring.
 *
 * Everything in the window can change under our hands: the client maps it too.  The engine reads
 * from it only the doorbell it waits for, the descriptor (copied, then checked) and the words of
 * the two sleeping protocols, none of which decides what memory it touches: slot number, sizes and
 * limits are private copies.
 *
 * Sleeping (the order of each pair is sequentially consistent, as in Dekker's algorithm):
 *     engine: asleep = 1; w = wake; look at doorbell and stopping; futex_wait(wake, w)
 *     client: doorbell = 1; wake += 1; if asleep, futex_wake(wake)
 * Either the engine's look finds the doorbell, or the client finds asleep set and the futex either
 * sees a changed word or gets the wake-up.
 */
#include "ep_engine.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_futex.h"
#include "ep_log.h"
#include "ep_thread.h"

/*
 * How long to look at the doorbell before sleeping.  A spin that ends with a doorbell saves the
 * futex's way through the scheduler, one that does not takes a core from the client that would
 * ring: the budget follows what the last spins brought.
 */
#define SPIN_MIN_NS (1 * EP_NS_PER_US)
#define SPIN_MAX_NS (20 * EP_NS_PER_US)
#define SPIN_LOOKS 16 /* between two looks at the clock */

/* A sleep is bounded all the same: a client may ring without waking. */
#define SLEEP_NS (10 * EP_NS_PER_S)

/* While stopping, the thread is woken this often until it is gone: the client can overwrite `wake`. */
#define STOP_NUDGE_MS 5

struct ep_engine {
    struct ep_engine_options options; /* map is not used: see below */
    struct ep_layout_map map;
    struct ep_control *control;
    pthread_t thread;

    /* the engine's thread */
    uint32_t next; /* slot */
    uint64_t spin_ns;

    /* between the threads */
    uint32_t stopping; /* atomic; set by the loop's thread */
    uint32_t exited;   /* atomic; set by the engine's as the last thing */
    pthread_mutex_t lock;
    struct ep_engine_timeout timeout; /* under lock */
    bool timeout_new;                 /* under lock */

    /* the loop's thread */
    uv_async_t async; /* a timeout is there, or the thread has exited */
    uv_timer_t nudge;
    unsigned open_handles;
    void (*on_stopped)(void *user);
    void *stopped_user;
};

/* ---- names and counters -------------------------------------------------------- */

const char *ep_op_class_name(enum ep_op_class op)
{
    static const char *const names[EP_OP_CLASSES] = {
        [EP_CLASS_LL_DISPATCH] = "ll_dispatch", [EP_CLASS_LL_COMBINE] = "ll_combine",
        [EP_CLASS_HT_DISPATCH] = "ht_dispatch", [EP_CLASS_HT_COMBINE] = "ht_combine",
        [EP_CLASS_COMPLETE] = "complete",       [EP_CLASS_RELEASE] = "release",
    };

    return (unsigned)op < EP_OP_CLASSES ? names[op] : "?";
}

/* The op has passed ep_op_check. */
static enum ep_op_class class_of(const struct ep_op *op)
{
    bool ht = op->mode == EP_MODE_HT;

    switch (op->kind) {
    case EP_OP_DISPATCH: return ht ? EP_CLASS_HT_DISPATCH : EP_CLASS_LL_DISPATCH;
    case EP_OP_COMBINE:  return ht ? EP_CLASS_HT_COMBINE : EP_CLASS_LL_COMBINE;
    case EP_OP_COMPLETE: return EP_CLASS_COMPLETE;
    default:             return EP_CLASS_RELEASE;
    }
}

/* One writer, so no read-modify-write is needed; readers may be a moment behind. */
static void add(uint64_t *counter, uint64_t n)
{
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
}

static unsigned bucket_of(uint64_t busy_ns)
{
    uint64_t us = busy_ns / EP_NS_PER_US;
    unsigned bucket = 0;

    while (bucket < 15 && us >= 1ull << bucket)
        bucket++;
    return bucket;
}

static void count_op(struct ep_rank_counters *counters, const struct ep_op *op,
                     const struct ep_op_result *result, uint64_t busy_ns)
{
    struct ep_op_counters *c = &counters->op[class_of(op)];

    add(&c->count, 1);
    if (result->status != EP_OK)
        add(&c->errors, 1);
    if (result->status == EP_TIMEOUT)
        add(&c->timeouts, 1);
    if (op->kind == EP_OP_DISPATCH || op->kind == EP_OP_COMBINE)
        add(&c->tokens, op->tokens);
    add(&c->wire_bytes, result->wire_bytes);
    add(&c->busy_ns, busy_ns);
    add(&c->wait_ns, result->wait_ns);
    if (result->wait_ns > __atomic_load_n(&c->max_wait_ns, __ATOMIC_RELAXED))
        __atomic_store_n(&c->max_wait_ns, result->wait_ns, __ATOMIC_RELAXED);
    add(&c->buckets[bucket_of(busy_ns)], 1);
    add(&counters->dropped_routes, result->dropped);
}

/* Hands a late rank to the loop; of several before it looks, the last one stays. */
static void report_timeout(struct ep_engine *engine, const struct ep_op *op,
                           const struct ep_op_result *result)
{
    pthread_mutex_lock(&engine->lock);
    engine->timeout = (struct ep_engine_timeout){
        .number = result->number,
        .waited_us = result->wait_ns / EP_NS_PER_US,
        .time_us = ep_clock_wall_us(),
        .op_class = class_of(op),
        .wait_phase = result->wait_phase,
        .late_rank = result->late_rank,
    };
    engine->timeout_new = true;
    pthread_mutex_unlock(&engine->lock);
    uv_async_send(&engine->async);
}

/* ---- the engine's thread --------------------------------------------------------- */

static bool stopping(struct ep_engine *engine)
{
    return __atomic_load_n(&engine->stopping, __ATOMIC_SEQ_CST);
}

/* Acquire: partner is the client's release of the doorbell; the descriptor is there. */
static bool rung(const struct ep_ring_slot *slot)
{
    return __atomic_load_n(&slot->doorbell, __ATOMIC_ACQUIRE) == 1;
}

static bool spin(struct ep_engine *engine, const struct ep_ring_slot *slot)
{
    const uint64_t end = ep_clock_ns() + engine->spin_ns;

    do {
        for (int i = 0; i < SPIN_LOOKS; i++) {
            if (rung(slot)) {
                engine->spin_ns = engine->spin_ns * 2 < SPIN_MAX_NS ? engine->spin_ns * 2 : SPIN_MAX_NS;
                return true;
            }
            ep_cpu_relax();
        }
        sched_yield(); /* the client that would ring may want this core */
    } while (ep_clock_ns() < end && !stopping(engine));
    engine->spin_ns = engine->spin_ns / 2 > SPIN_MIN_NS ? engine->spin_ns / 2 : SPIN_MIN_NS;
    return false;
}

/* False: the engine is stopping. */
static bool wait_doorbell(struct ep_engine *engine, const struct ep_ring_slot *slot)
{
    struct ep_control *control = engine->control;

    if (stopping(engine))
        return false;
    if (rung(slot) || spin(engine, slot))
        return true;
    while (!stopping(engine)) {
        /* Dekker: partners are the client's `wake` then `asleep`, and ep_engine_stop's nudge. */
        __atomic_store_n(&control->asleep, 1, __ATOMIC_SEQ_CST);

        uint32_t wake = __atomic_load_n(&control->wake, __ATOMIC_SEQ_CST);

        if (rung(slot) || stopping(engine))
            break;
        ep_futex_wait(&control->wake, wake, SLEEP_NS);
    }
    __atomic_store_n(&control->asleep, 0, __ATOMIC_RELAXED);
    return !stopping(engine);
}

/* The descriptor as it is at one moment; what the client writes afterwards has no effect. */
static void take_op(struct ep_ring_slot *slot, struct ep_op *op)
{
    memcpy(op, &slot->op, sizeof *op);
    /* The compiler may not read the window again in place of the copy. */
    __asm__ volatile("" : : "r"(op) : "memory");
    __atomic_store_n(&slot->doorbell, 0, __ATOMIC_RELAXED); /* ordered by the release of `done` */
}

static void give_result(struct ep_ring_slot *slot, const struct ep_op_result *result)
{
    memcpy(&slot->result, result, sizeof *result);
    /* Release: partner is the client's acquire of `done`.  Sequentially consistent, because of
     * Dekker with the client's `waiters` then `done`. */
    __atomic_store_n(&slot->done, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&slot->waiters, __ATOMIC_SEQ_CST))
        ep_futex_wake_all(&slot->done);
}

static void refuse(struct ep_engine *engine, const struct ep_error *error, struct ep_op_result *result)
{
    memset(result, 0, sizeof *result);
    result->status = (int32_t)error->status;
    result->start_ns = result->end_ns = ep_clock_ns();
    snprintf(result->text, sizeof result->text, "%.*s", EP_RESULT_TEXT - 1, error->text);
    add(&engine->options.counters->bad_descriptors, 1);
    EP_DEBUG("engine", "bad descriptor", EP_U("rank", engine->options.rank), EP_S("why", error->text));
}

static void serve(struct ep_engine *engine, struct ep_ring_slot *slot)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_op_result result;
    struct ep_op op;

    take_op(slot, &op);
    if (ep_op_check(&engine->map, &op, &error) != EP_OK) {
        refuse(engine, &error, &result);
    } else {
        const uint64_t start = ep_clock_ns();

        ep_host_execute(engine->options.team, engine->options.rank, &op, &result);
        count_op(engine->options.counters, &op, &result, ep_clock_ns() - start);
        if (result.status == EP_TIMEOUT)
            report_timeout(engine, &op, &result);
    }
    give_result(slot, &result);
}

static void *run(void *arg)
{
    struct ep_engine *engine = arg;

    (void)ep_thread_runs_ops();
    for (;;) {
        struct ep_ring_slot *slot = &engine->control->slot[engine->next];

        if (!wait_doorbell(engine, slot))
            break;
        serve(engine, slot);
        engine->next = (engine->next + 1) % EP_RING_SLOTS;
    }
    /* Release: partner is on_async; the window is not touched after this. */
    __atomic_store_n(&engine->exited, 1, __ATOMIC_RELEASE);
    uv_async_send(&engine->async);
    return NULL;
}

/* ---- the loop's thread ----------------------------------------------------------- */

static void destroy(struct ep_engine *engine)
{
    void (*on_stopped)(void *user) = engine->on_stopped;
    void *user = engine->stopped_user;

    pthread_mutex_destroy(&engine->lock);
    free(engine);
    if (on_stopped)
        on_stopped(user);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct ep_engine *engine = handle->data;

    if (--engine->open_handles == 0)
        destroy(engine);
}

static void close_handles(struct ep_engine *engine)
{
    uv_close((uv_handle_t *)&engine->async, on_handle_closed);
    uv_close((uv_handle_t *)&engine->nudge, on_handle_closed);
}

static void deliver_timeout(struct ep_engine *engine)
{
    struct ep_engine_timeout timeout;
    bool is_new;

    pthread_mutex_lock(&engine->lock);
    is_new = engine->timeout_new;
    timeout = engine->timeout;
    engine->timeout_new = false;
    pthread_mutex_unlock(&engine->lock);
    if (is_new && engine->options.on_timeout)
        engine->options.on_timeout(&timeout, engine->options.user);
}

static void on_async(uv_async_t *async)
{
    struct ep_engine *engine = async->data;

    deliver_timeout(engine);
    if (!__atomic_load_n(&engine->exited, __ATOMIC_ACQUIRE) || uv_is_closing((uv_handle_t *)async))
        return;
    pthread_join(engine->thread, NULL);
    close_handles(engine);
}

/* Partner is wait_doorbell: `stopping` is set before `wake` changes. */
static void nudge(struct ep_engine *engine)
{
    __atomic_fetch_add(&engine->control->wake, 1, __ATOMIC_SEQ_CST);
    ep_futex_wake_all(&engine->control->wake);
}

static void on_nudge(uv_timer_t *timer)
{
    nudge(timer->data);
}

void ep_engine_stop(struct ep_engine *engine, void (*on_stopped)(void *user), void *user)
{
    engine->on_stopped = on_stopped;
    engine->stopped_user = user;
    __atomic_store_n(&engine->stopping, 1, __ATOMIC_SEQ_CST);
    nudge(engine);
    uv_timer_start(&engine->nudge, on_nudge, STOP_NUDGE_MS, STOP_NUDGE_MS);
}

static void format_control(const struct ep_engine *engine)
{
    struct ep_control *control = engine->control;

    memset(control, 0, sizeof *control);
    control->head = (struct ep_window_head){
        .magic = EP_WINDOW_MAGIC,
        .version = EP_WINDOW_VERSION,
        .rank = engine->options.rank,
        .epoch = engine->options.epoch,
        .limits = engine->map.limits,
    };
}

static int start_thread(struct ep_engine *engine)
{
    char name[16];

    snprintf(name, sizeof name, "ep-rank-%u", engine->options.rank % 10000u);
    return ep_thread_start(&engine->thread, name, run, engine);
}

ep_status ep_engine_start(const struct ep_engine_options *options, struct ep_engine **out,
                          struct ep_error *error)
{
    struct ep_engine *engine = calloc(1, sizeof *engine);

    if (!engine)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an engine");
    engine->options = *options;
    engine->options.map = NULL;
    engine->map = *options->map;
    engine->control = options->window;
    engine->spin_ns = SPIN_MIN_NS;
    pthread_mutex_init(&engine->lock, NULL);
    engine->async.data = engine->nudge.data = engine;

    int rc = uv_async_init(options->loop, &engine->async, on_async);

    if (rc < 0) {
        pthread_mutex_destroy(&engine->lock);
        free(engine);
        return ep_error_set(error, EP_IO, "engine of rank %u: %s", options->rank, uv_strerror(rc));
    }
    uv_timer_init(options->loop, &engine->nudge);
    engine->open_handles = 2;
    format_control(engine);
    errno = start_thread(engine);
    if (errno) {
        ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "thread for the engine of rank %u", options->rank);
        close_handles(engine); /* frees it; on_stopped is not set */
        return EP_RESOURCE_EXHAUSTED;
    }
    *out = engine;
    return EP_OK;
}
