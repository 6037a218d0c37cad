/*
 * The client's half of the ring (window.h).  The order of `doorbell`, `wake` and `asleep` pairs with
 * the engine's wait for a doorbell, that of `waiters` and `done` with its giving of results.
 */
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#include "client_private.h"
#include "ep_futex.h"

/*
 * How long to look at `done` before sleeping.  What a spin may cost follows what the last ones
 * brought: with more threads than cores it only keeps the engine from running.
 */
#define SPIN_MIN_NS (1 * EP_NS_PER_US)
#define SPIN_MAX_NS (50 * EP_NS_PER_US)
#define SPIN_LOOKS 16 /* between two looks at the clock */

/* Bounds a sleep; what ends it is a wake-up. */
#define SLEEP_NS EP_NS_PER_S

static struct ep_ring_slot *slot_of(const struct ep_rank *rank, uint64_t seq)
{
    return &rank->control->slot[seq % EP_RING_SLOTS];
}

/* ---- the end --------------------------------------------------------------------- */

/*
 * Dekker: rank_lose stored `lost`, here `done` of every slot; the rank's thread clears `done` (reap), then
 * looks at `lost` (submit).  Either it sees the loss or its slot gets poisoned.
 */
static void cut(struct ep_rank *rank)
{
    for (uint32_t i = 0; i < EP_RING_SLOTS; i++) {
        uint32_t *done = &rank->control->slot[i].done;
        uint32_t running = 0;

        __atomic_compare_exchange_n(done, &running, EP_DONE_POISON, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST);
        ep_futex_wake_all(done);
    }
}

/* Everything that has no result gets this one. */
static void give_up(struct ep_rank *rank)
{
    struct ep_op_result result = { .status = (int32_t)__atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST) };

    copy_text(result.text, sizeof result.text, rank->lost_text);
    for (; rank->tail != rank->head; rank->tail++)
        handle_result(rank, rank->tail, &rank->pending[rank->tail % EP_RING_SLOTS], &result);
}

/* ---- results --------------------------------------------------------------------- */

static bool finished(const struct ep_rank *rank)
{
    /* Acquire: partner is the engine's store of 1; the result is there. */
    return __atomic_load_n(&slot_of(rank, rank->tail)->done, __ATOMIC_ACQUIRE) == 1;
}

/* Takes the results that are there. */
static void reap(struct ep_rank *rank)
{
    while (rank->tail != rank->head && finished(rank)) {
        struct ep_ring_slot *slot = slot_of(rank, rank->tail);
        struct ep_op_result result;

        memcpy(&result, &slot->result, sizeof result);
        result.text[sizeof result.text - 1] = '\0';
        __atomic_store_n(&slot->done, 0, __ATOMIC_SEQ_CST); /* Dekker with cut */
        handle_result(rank, rank->tail, &rank->pending[rank->tail % EP_RING_SLOTS], &result);
        rank->tail++;
    }
}

/* ---- waiting --------------------------------------------------------------------- */

static bool spin(struct ep_rank *rank)
{
    const uint64_t end = ep_clock_ns() + rank->spin_ns;

    do {
        for (int i = 0; i < SPIN_LOOKS; i++) {
            if (finished(rank)) {
                rank->spin_ns = rank->spin_ns * 2 < SPIN_MAX_NS ? rank->spin_ns * 2 : SPIN_MAX_NS;
                return true;
            }
            ep_cpu_relax();
        }
        sched_yield(); /* the engine that we wait for may want this core */
    } while (ep_clock_ns() < end);
    rank->spin_ns = rank->spin_ns / 2 > SPIN_MIN_NS ? rank->spin_ns / 2 : SPIN_MIN_NS;
    return false;
}

static void sleep_on_done(struct ep_rank *rank, uint64_t deadline_ns, bool interruptible)
{
    struct ep_ring_slot *slot = slot_of(rank, rank->tail);

    /* Dekker: partner is the engine's `done` then `waiters`. */
    __atomic_store_n(&slot->waiters, 1, __ATOMIC_SEQ_CST);
    wait_asleep(rank, &slot->done, SLEEP_NS, deadline_ns, interruptible);
    __atomic_store_n(&slot->waiters, 0, __ATOMIC_RELAXED);
}

static bool over(struct ep_rank *rank, uint64_t count)
{
    reap(rank);
    if (rank->tail < count && __atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST)) {
        reap(rank); /* what ended before the loss has its result */
        give_up(rank);
    }
    return rank->tail >= count;
}

/* Until the first `count` ops of the rank are over. */
static ep_status wait_count(struct ep_rank *rank, uint64_t count, uint64_t deadline_ns, bool interruptible,
                            struct ep_error *error)
{
    while (!over(rank, count)) {
        if (wait_over(rank, deadline_ns, interruptible, error) != EP_OK)
            return error->status;
        if (!spin(rank))
            sleep_on_done(rank, deadline_ns, interruptible);
    }
    return EP_OK;
}

static ep_status wait_ops(struct ep_rank *rank, ep_handle *handle, uint64_t deadline_ns, bool interruptible,
                          struct ep_error *error)
{
    return wait_count(rank, handle ? handle->last_seq : rank->head, deadline_ns, interruptible, error);
}

/* The engine has a mapping of its own: an op that still runs does not need ours. */
static bool drain(struct ep_rank *rank, uint64_t deadline_ns)
{
    struct ep_error ignored = EP_ERROR_INIT;

    (void)wait_count(rank, rank->head, deadline_ns, false, &ignored);
    return true;
}

static void detach(struct ep_rank *rank)
{
    if (rank->window)
        munmap(rank->window, rank->shape.map.total_bytes);
    rank->window = NULL;
}

/* ---- descriptors ----------------------------------------------------------------- */

static void ring_bell(struct ep_rank *rank, struct ep_ring_slot *slot)
{
    struct ep_control *control = rank->control;

    /* Release: partner is the engine's acquire; the descriptor is there. */
    __atomic_store_n(&slot->doorbell, 1, __ATOMIC_RELEASE);
    /* Dekker: partner is the engine's `asleep` then `wake`. */
    __atomic_fetch_add(&control->wake, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&control->asleep, __ATOMIC_SEQ_CST))
        ep_futex_wake_all(&control->wake);
}

static ep_status submit(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                        ep_stream stream, struct ep_error *error)
{
    (void)stream; /* there is none */
    reap(rank);
    if (rank->head - rank->tail == EP_RING_SLOTS
        && wait_count(rank, rank->tail + 1, NO_DEADLINE, pending->part != PART_RELEASE, error) != EP_OK)
        return error->status;
    if (rank_lost(rank, error) != EP_OK)
        return error->status;

    struct ep_ring_slot *slot = slot_of(rank, rank->head);

    memcpy(&slot->op, op, sizeof *op);
    rank->pending[rank->head % EP_RING_SLOTS] = *pending;
    rank->pending[rank->head % EP_RING_SLOTS].start_ns = ep_clock_ns();
    rank->head++;
    if (pending->handle)
        pending->handle->last_seq = rank->head;
    ring_bell(rank, slot);
    return EP_OK;
}

/* ---- copies ---------------------------------------------------------------------- */

static ep_status copy(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                      struct ep_error *error)
{
    (void)stream;
    if (wait_count(rank, rank->head, NO_DEADLINE, true, error) != EP_OK)
        return error->status;
    if (rank_lost(rank, error) != EP_OK)
        return error->status;
    memcpy(to, from, bytes);
    return EP_OK;
}

const struct executor ring_executor = {
    .backend = EP_BACKEND_HOST,
    .kind = EP_EXECUTOR_SERVER,
    .only_window = "the group's backend is host, where ops run in the server, which sees nothing of this process but the "
                   "window: take memory from ep_alloc(), which this process uses as its own",
    .submit = submit,
    .wait = wait_ops,
    .write = copy,
    .read = copy,
    .cut = cut,
    .drain = drain,
    .detach = detach,
};
