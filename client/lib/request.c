/*
 * What a worker asks of its server over the rank's connection, and waits for: the monitor hears the answer.
 *
 * Requests of a rank are numbered.  An answer that comes when its wait is over has another number than the one that is
 * waited for, and is passed over.
 */
#include <poll.h>
#include <time.h>

#include "client_private.h"
#include "ep_futex.h"

#define LOOK_NS (10 * EP_NS_PER_MS) /* between two looks at whether the rank is lost; and before it is asked again */

/* The monitor's thread. */
void request_answered(struct ep_rank *rank, const struct ep_attach_frame *frame)
{
    pthread_mutex_lock(&rank->events_lock);
    if (frame->count == rank->asked && !__atomic_load_n(&rank->answered, __ATOMIC_RELAXED)) {
        rank->answer = *frame;
        __atomic_store_n(&rank->answered, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&rank->events_lock);
    ep_futex_wake_all(&rank->answered);
}

static uint32_t number_request(struct ep_rank *rank)
{
    uint32_t number;

    pthread_mutex_lock(&rank->events_lock);
    number = ++rank->asked;
    __atomic_store_n(&rank->answered, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&rank->events_lock);
    return number;
}

static ep_status not_in_time(struct ep_error *error)
{
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "the server has not answered in time");
}

static ep_status deliver(struct ep_rank *rank, const struct ep_attach_frame *frame, int fd, uint64_t deadline_ns,
                         struct ep_error *error)
{
    struct pollfd room = { .fd = rank->socket, .events = POLLOUT };

    if (ep_clock_ns() >= deadline_ns)
        return not_in_time(error);
    while (ep_attach_send(rank->socket, frame, fd, error) == EP_UNAVAILABLE) {
        if (ep_clock_ns() >= deadline_ns)
            return not_in_time(error);
        (void)poll(&room, 1, (int)(LOOK_NS / EP_NS_PER_MS));
        *error = (struct ep_error)EP_ERROR_INIT;
    }
    return error->status;
}

static ep_status wait_answer(struct ep_rank *rank, uint64_t deadline_ns, struct ep_error *error)
{
    /* Acquire: partner is request_answered(). */
    while (!__atomic_load_n(&rank->answered, __ATOMIC_SEQ_CST)) {
        if (rank_lost(rank, error) != EP_OK)
            return error->status;
        if (ep_clock_ns() >= deadline_ns)
            return not_in_time(error);
        wait_asleep(rank, &rank->answered, LOOK_NS, deadline_ns, false);
    }
    return EP_OK;
}

/* What is unregistered may be in use by an op that runs: the server answers when that is over. */
uint64_t request_deadline(const struct ep_rank *rank)
{
    return ep_clock_ns() + ((uint64_t)rank->client->timeout_ms + rank->shape.timeout_ms) * EP_NS_PER_MS;
}

static ep_status ask(struct ep_rank *rank, struct ep_attach_frame *frame, int fd, uint64_t deadline_ns,
                     struct ep_error *error)
{
    *error = (struct ep_error)EP_ERROR_INIT;
    frame->count = number_request(rank);
    if (rank_lost(rank, error) != EP_OK || deliver(rank, frame, fd, deadline_ns, error) != EP_OK
        || wait_answer(rank, deadline_ns, error) != EP_OK)
        return error->status;
    return rank->answer.status == EP_OK
               ? EP_OK
               : ep_error_set(error, (ep_status)rank->answer.status, "%s", rank->answer.text);
}

/* The server does one after the other, and is still at one that was not waited for any more. */
ep_status request(struct ep_rank *rank, struct ep_attach_frame *frame, int fd, uint64_t deadline_ns,
                  struct ep_error *error)
{
    const struct timespec pause = { .tv_nsec = LOOK_NS };

    while (ask(rank, frame, fd, deadline_ns, error) == EP_UNAVAILABLE)
        nanosleep(&pause, NULL);
    return error->status;
}
