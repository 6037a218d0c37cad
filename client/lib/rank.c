/* What holds for a rank whoever runs its ops: waiting, failures that are told once, the end. */
#include "client_private.h"
#include "ep_futex.h"

/* ---- the end --------------------------------------------------------------------- */

ep_status rank_lost(const struct ep_rank *rank, struct ep_error *error)
{
    /* Acquire: partner is rank_lose; the text is there. */
    uint32_t why = __atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST);

    return why == EP_OK ? EP_OK : ep_error_set(error, (ep_status)why, "%s", rank->lost_text);
}

void rank_lose(struct ep_rank *rank, ep_status why, const char *text)
{
    if (__atomic_load_n(&rank->lost, __ATOMIC_RELAXED) != EP_OK)
        return;
    copy_text(rank->lost_text, sizeof rank->lost_text, text);
    __atomic_store_n(&rank->lost, (uint32_t)why, __ATOMIC_SEQ_CST);
    rank->executor->cut(rank);
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

/* ---- the calls ------------------------------------------------------------------- */

static ep_status take_failure(struct failure *failure, struct ep_error *error)
{
    ep_status status = failure->status;

    if (status == EP_OK)
        return EP_OK;
    failure->status = EP_OK;
    return ep_error_set(error, status, "%s", failure->text);
}

ep_status ep_sync(ep_rank *rank, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (rank->executor->wait(rank, NULL, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (take_failure(&rank->failure, error) != EP_OK)
        return error->status;
    return rank_lost(rank, error);
}

ep_status ep_handle_wait(ep_handle *handle, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!handle)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is NULL");

    struct ep_rank *rank = handle->rank;

    if (rank->executor->wait(rank, handle, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (take_failure(&handle->failure, error) != EP_OK) {
        if (rank->failure.seq == handle->failure.seq)
            rank->failure.status = EP_OK; /* told once */
        return error->status;
    }
    return rank_lost(rank, error);
}
