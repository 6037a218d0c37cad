/*
 * The client's half of the ring (window.h).  The order of `doorbell`, `wake` and `asleep` pairs with
 * the engine's wait for a doorbell, that of `waiters` and `done` with its giving of results.
 */
#include <sched.h>
#include <string.h>

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

ep_status ring_lost(const struct ep_rank *rank, struct ep_error *error)
{
    /* Acquire: partner is ring_poison; the text is there. */
    uint32_t why = __atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST);

    return why == EP_OK ? EP_OK : ep_error_set(error, (ep_status)why, "%s", rank->lost_text);
}

/*
 * Dekker: here `lost`, then `done` of every slot; the rank's thread clears `done` (reap), then looks
 * at `lost` (submit).  Either it sees the loss or its slot gets poisoned.
 */
void ring_poison(struct ep_rank *rank, ep_status why, const char *text)
{
    if (__atomic_load_n(&rank->lost, __ATOMIC_RELAXED) != EP_OK)
        return;
    copy_text(rank->lost_text, sizeof rank->lost_text, text);
    __atomic_store_n(&rank->lost, (uint32_t)why, __ATOMIC_SEQ_CST);
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
        __atomic_store_n(&slot->done, 0, __ATOMIC_SEQ_CST); /* Dekker with ring_poison */
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
    const uint64_t now = ep_clock_ns();
    uint64_t bound = deadline_ns - now < SLEEP_NS ? deadline_ns - now : SLEEP_NS;

    if (now >= deadline_ns)
        return;
    /* Dekker: partner is the engine's `done` then `waiters`. */
    __atomic_store_n(&slot->waiters, 1, __ATOMIC_SEQ_CST);
    /* Partner is ep_rank_interrupt: it sets the flag, then wakes the word that it finds here. */
    __atomic_store_n(&rank->waiting, &slot->done, __ATOMIC_SEQ_CST);
    if (!(interruptible && __atomic_load_n(&rank->interrupted, __ATOMIC_SEQ_CST))
        && !__atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST)
        && __atomic_load_n(&slot->done, __ATOMIC_SEQ_CST) == 0)
        ep_futex_wait(&slot->done, 0, bound);
    __atomic_store_n(&rank->waiting, NULL, __ATOMIC_SEQ_CST);
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

ep_status ring_wait(struct ep_rank *rank, uint64_t count, uint64_t deadline_ns, bool interruptible,
                    struct ep_error *error)
{
    while (!over(rank, count)) {
        if (interruptible && take_interrupt(rank) == EP_CANCELLED)
            return ep_error_set(error, EP_CANCELLED, "the wait was interrupted");
        if (deadline_ns != NO_DEADLINE && ep_clock_ns() >= deadline_ns)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "%llu ops of this rank are still running",
                                (unsigned long long)(rank->head - rank->tail));
        if (!spin(rank))
            sleep_on_done(rank, deadline_ns, interruptible);
    }
    return EP_OK;
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

ep_status ring_submit(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                      struct ep_error *error)
{
    reap(rank);
    if (rank->head - rank->tail == EP_RING_SLOTS
        && ring_wait(rank, rank->tail + 1, NO_DEADLINE, pending->part != PART_RELEASE, error) != EP_OK)
        return error->status;
    if (ring_lost(rank, error) != EP_OK)
        return error->status;

    struct ep_ring_slot *slot = slot_of(rank, rank->head);

    memcpy(&slot->op, op, sizeof *op);
    rank->pending[rank->head % EP_RING_SLOTS] = *pending;
    rank->pending[rank->head % EP_RING_SLOTS].start_ns = ep_clock_ns();
    rank->head++;
    ring_bell(rank, slot);
    return EP_OK;
}

/* ---- the calls ------------------------------------------------------------------- */

static ep_status take_failure(struct failure *failure, struct ep_error *error)
{
    ep_status status = failure->status;

    if (status == EP_OK)
        return EP_OK;
    failure->status = EP_OK;
    return ep_error_set(error, status, "%s", failure->text);
}

uint64_t deadline_after(int32_t timeout_ms)
{
    return timeout_ms < 0 ? NO_DEADLINE : ep_clock_ns() + (uint32_t)timeout_ms * EP_NS_PER_MS;
}

ep_status ep_sync(ep_rank *rank, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (ring_wait(rank, rank->head, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (take_failure(&rank->failure, error) != EP_OK)
        return error->status;
    return ring_lost(rank, error);
}

ep_status ep_handle_wait(ep_handle *handle, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!handle)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is NULL");

    struct ep_rank *rank = handle->rank;

    if (ring_wait(rank, handle->last_seq, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (take_failure(&handle->failure, error) != EP_OK) {
        if (rank->failure.seq == handle->failure.seq)
            rank->failure.status = EP_OK; /* told once */
        return error->status;
    }
    return ring_lost(rank, error);
}
