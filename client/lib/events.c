#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client_private.h"

/* ---- queue ----------------------------------------------------------------------- */

ep_status events_init(struct ep_rank *rank, struct ep_error *error)
{
    rank->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    rank->interrupt_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (rank->event_fd >= 0 && rank->interrupt_fd >= 0) {
        pthread_mutex_init(&rank->events_lock, NULL);
        return EP_OK;
    }
    ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "eventfd for the rank's events");
    if (rank->event_fd >= 0)
        close(rank->event_fd);
    rank->event_fd = -1;
    return EP_RESOURCE_EXHAUSTED;
}

void events_fini(struct ep_rank *rank)
{
    pthread_mutex_destroy(&rank->events_lock);
    close(rank->event_fd);
    close(rank->interrupt_fd);
}

/* The last place is kept for the end of the rank, which comes once. */
static bool has_room(const struct ep_rank *rank, ep_event_type type)
{
    bool last = type == EP_EVENT_SERVER_LOST || type == EP_EVENT_DETACHED;

    return rank->n_events < (last ? EVENT_QUEUE : EVENT_QUEUE - 1);
}

void events_push(struct ep_rank *rank, const ep_event *event)
{
    pthread_mutex_lock(&rank->events_lock);
    if (event->type == EP_EVENT_EVENTS_LOST)
        rank->events_lost += event->value;
    else if (has_room(rank, event->type))
        rank->events[(rank->first_event + rank->n_events++) % EVENT_QUEUE] = *event;
    else
        rank->events_lost++;
    raise_fd(rank->event_fd);
    pthread_mutex_unlock(&rank->events_lock);
}

/* Those that had room first, then how many had none. */
static bool pop(struct ep_rank *rank, ep_event *event)
{
    bool found = true;

    pthread_mutex_lock(&rank->events_lock);
    if (rank->n_events > 0) {
        *event = rank->events[rank->first_event];
        rank->first_event = (rank->first_event + 1) % EVENT_QUEUE;
        rank->n_events--;
    } else if (rank->events_lost > 0) {
        *event = (ep_event){ .type = EP_EVENT_EVENTS_LOST, .value = rank->events_lost };
        rank->events_lost = 0;
    } else {
        found = false;
    }
    if (rank->n_events == 0 && rank->events_lost == 0)
        lower_fd(rank->event_fd);
    pthread_mutex_unlock(&rank->events_lock);
    return found;
}

/* ---- the calls ------------------------------------------------------------------- */

int ep_event_fd(const ep_rank *rank)
{
    return rank ? rank->event_fd : -1;
}

/* EP_OK: look again.  lost: before the last look, so that the event of the loss was seen. */
static ep_status wait_event(struct ep_rank *rank, bool lost, uint64_t deadline_ns, struct ep_error *error)
{
    struct pollfd fds[2] = { { .fd = rank->event_fd, .events = POLLIN },
                             { .fd = rank->interrupt_fd, .events = POLLIN } };
    const uint64_t now = ep_clock_ns();
    int wait_ms = -1;

    /* First the fd, then the flag: ep_rank_interrupt() raises it when the flag may have been taken already. */
    lower_fd(rank->interrupt_fd);
    if (take_interrupt(rank) == EP_CANCELLED)
        return ep_error_set(error, EP_CANCELLED, "the wait was interrupted");
    if (lost)
        return rank_lost(rank, error); /* none will ever come */
    if (deadline_ns != NO_DEADLINE) {
        if (now >= deadline_ns)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "no event has come in time");
        wait_ms = (int)((deadline_ns - now + EP_NS_PER_MS - 1) / EP_NS_PER_MS);
    }
    (void)poll(fds, 2, wait_ms);
    return EP_OK;
}

ep_status ep_event_next(ep_rank *rank, int32_t timeout_ms, ep_event *out)
{
    struct ep_error *error = last_error();
    uint64_t deadline;
    ep_event event;

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (check_struct("ep_event", out) != EP_OK) /* before an event is taken for it */
        return error->status;
    deadline = deadline_after(timeout_ms);
    for (;;) {
        const bool lost = __atomic_load_n(&rank->lost, __ATOMIC_SEQ_CST) != EP_OK;

        if (pop(rank, &event))
            break;
        if (wait_event(rank, lost, deadline, error) != EP_OK)
            return error->status;
    }
    event.size = sizeof event;
    return give_struct("ep_event", out, &event, sizeof event);
}
