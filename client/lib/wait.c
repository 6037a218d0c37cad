/* Waiting for a rank's ops: how long, and what ends it early. */
#include <errno.h>
#include <unistd.h>

#include "client_private.h"
#include "ep_futex.h"

/* ---- a rank that is lost ---------------------------------------------------------- */

ep_status rank_lost(const struct ep_rank *rank, struct ep_error *error)
{
    /* Acquire: partner is rank_lose; the text is there. */
    uint32_t why = __atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST);

    if (why == EP_OK)
        return EP_OK;
    if (why == EP_SERVER_LOST && rank->device && device_is_lost(rank->device, error))
        return EP_DEVICE_LOST;
    return ep_error_set(error, (ep_status)why, "%s", rank->lost_text);
}

void rank_lose(struct ep_rank *rank, ep_status why, const char *text)
{
    if (__atomic_load_n(&rank->lost, __ATOMIC_RELAXED) != EP_OK)
        return;
    copy_text(rank->lost_text, sizeof rank->lost_text, text);
    __atomic_store_n(&rank->lost, (uint32_t)why, __ATOMIC_SEQ_CST);
    rank->executor->cut(rank);
}

/* ---- eventfds -------------------------------------------------------------------- */

void raise_fd(int fd)
{
    const uint64_t one = 1;

    (void)!write(fd, &one, sizeof one); /* full means raised */
}

void lower_fd(int fd)
{
    uint64_t count;

    (void)!read(fd, &count, sizeof count);
}

/* ---- interrupt ------------------------------------------------------------------- */

/* Only what a signal handler may do. */
void ep_rank_interrupt(ep_rank *rank)
{
    const int saved = errno;

    if (!rank)
        return;
    /* Partner is wait_asleep.  It may look at the flag just before and sleep just after: the
     * monitor hears of interrupt_fd and wakes it again until the flag is taken. */
    __atomic_store_n(&rank->interrupted, 1, __ATOMIC_SEQ_CST);
    raise_fd(rank->interrupt_fd);

    uint32_t *word = __atomic_load_n(&rank->waiting, __ATOMIC_SEQ_CST);

    if (word)
        ep_futex_wake_all(word);
    errno = saved;
}

ep_status take_interrupt(struct ep_rank *rank)
{
    if (!__atomic_load_n(&rank->interrupted, __ATOMIC_RELAXED))
        return EP_OK;
    __atomic_store_n(&rank->interrupted, 0, __ATOMIC_SEQ_CST);
    return EP_CANCELLED;
}

/* ---- waiting --------------------------------------------------------------------- */

uint64_t deadline_after(int32_t timeout_ms)
{
    return timeout_ms < 0 ? NO_DEADLINE : ep_clock_ns() + (uint32_t)timeout_ms * EP_NS_PER_MS;
}

ep_status wait_over(struct ep_rank *rank, uint64_t deadline_ns, bool interruptible, struct ep_error *error)
{
    if (interruptible && take_interrupt(rank) == EP_CANCELLED)
        return ep_error_set(error, EP_CANCELLED, "the wait was interrupted");
    if (deadline_ns != NO_DEADLINE && ep_clock_ns() >= deadline_ns)
        return ep_error_set(error, EP_DEADLINE_EXCEEDED, "ops of this rank are still running");
    return EP_OK;
}

void wait_asleep(struct ep_rank *rank, uint32_t *word, uint64_t most_ns, uint64_t deadline_ns,
                 bool interruptible)
{
    const uint64_t now = ep_clock_ns();
    const uint64_t bound = deadline_ns - now < most_ns ? deadline_ns - now : most_ns;

    if (now >= deadline_ns)
        return;
    /* Partner is ep_rank_interrupt: it sets the flag, then wakes the word that it finds here. */
    __atomic_store_n(&rank->waiting, word, __ATOMIC_SEQ_CST);
    if (!(interruptible && __atomic_load_n(&rank->interrupted, __ATOMIC_SEQ_CST))
        && !__atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST) && __atomic_load_n(word, __ATOMIC_SEQ_CST) == 0)
        ep_futex_wait(word, 0, bound);
    __atomic_store_n(&rank->waiting, NULL, __ATOMIC_SEQ_CST);
}
