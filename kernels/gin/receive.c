/*
 * The receive thread: pieces that come in, and the signals that they make due.
 *
 * It looks for a while at what peers write into memory and at sockets, then sleeps until one of them wakes it.
 * Signals are raised on the same stream that brings data to the GPU, behind it.
 */
#include "transport.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ep_futex.h"
#include "ep_thread.h"

enum { EVENTS = 64, SLEEP_MS = 100, YIELD_US = 20 };

/* ---- signals ---------------------------------------------------------------------------------------- */

static uint64_t raised_by(const struct ep_gin_signal *signal)
{
    return signal->op == NCCL_SIGNAL_INC ? 1 : signal->value;
}

/* Data that came for the GPU must be there before. */
static void raise_host(struct ep_gin_comm *comm, uint64_t *word, uint64_t by)
{
    if (!ep_gin_stream_wait(&comm->receiver, comm->settings.timeout_ns))
        ep_gin_warn("rank %u: a signal in host memory comes before its data on the GPU", comm->rank);
    __atomic_fetch_add(word, by, __ATOMIC_RELEASE); /* partner: whoever waits for the signal */
}

/* A word that others write too is read first: slow, and rare. */
static void raise_cuda(struct ep_gin_comm *comm, struct ep_gin_region *region, uint64_t offset, uint64_t by)
{
    uint64_t *word = (uint64_t *)(void *)(region->at + offset);
    uint64_t value = 0;
    struct ep_error error = EP_ERROR_INIT;

    if (region->shadow)
        value = region->shadow[offset / sizeof value] += by;
    else if (comm->cuda->read(comm->device, &value, word, sizeof value, comm->receiver.stream, &error) == EP_OK)
        value += by;
    else
        ep_gin_count(comm, &comm->counts.bad_messages, error.text);
    ep_gin_stream_store(&comm->receiver, word, value);
}

static void apply(void *user, const struct ep_gin_signal *signal)
{
    struct ep_gin_comm *comm = user;
    struct ep_gin_region *region = ep_gin_region_of(comm, signal->region);

    if (__atomic_load_n(&comm->failed, __ATOMIC_RELAXED) != 0)
        return; /* its data may not be there */
    if (!region)
        ep_gin_count(comm, &comm->counts.late_pieces, "a signal for a region that is gone");
    else if (!ep_gin_inside(signal->offset, sizeof(uint64_t), region->bytes))
        ep_gin_count(comm, &comm->counts.bad_messages, "a signal out of its region");
    else if (region->type == NCCL_MEMORY_HOST)
        raise_host(comm, (uint64_t *)(void *)(region->at + signal->offset), raised_by(signal));
    else
        raise_cuda(comm, region, signal->offset, raised_by(signal));
}

/* ---- pieces ------------------------------------------------------------------------------------------- */

enum ep_gin_verdict ep_gin_judge(struct ep_gin_peer *peer, const struct ep_gin_message *m,
                                 const struct ep_gin_region **region, void **to)
{
    enum ep_gin_place place;

    /*
     * A program puts what says that it has read a place, and its peer writes there again.  What orders the two lies in
     * another process; here it is this, partner: ep_gin_put.
     */
    (void)__atomic_load_n(&peer->comm->asked, __ATOMIC_ACQUIRE);
    *region = NULL;
    *to = NULL;
    if (!ep_gin_message_valid(m, peer->piece_bytes))
        return EP_GIN_REFUSE;
    place = ep_gin_order_place(&peer->order, m->number);
    if (place != EP_GIN_WITHIN)
        return place == EP_GIN_BEYOND ? EP_GIN_LATER : EP_GIN_REFUSE;
    if (m->total == 0)
        return EP_GIN_TAKE;
    *region = ep_gin_region_of(peer->comm, m->region);
    if (!*region) {
        ep_gin_count(peer->comm, &peer->comm->counts.late_pieces, "data for a region that is gone");
        return EP_GIN_DROP;
    }
    if (!ep_gin_inside(m->offset, ep_gin_message_bytes(m), (*region)->bytes))
        return EP_GIN_REFUSE;
    *to = (*region)->at + m->offset;
    return EP_GIN_TAKE;
}

bool ep_gin_landed(struct ep_gin_peer *peer, const struct ep_gin_message *m)
{
    const struct ep_gin_piece piece = {
        .number = m->number,
        .back = m->back,
        .bytes = ep_gin_message_bytes(m),
        .total = m->total,
        .signal = { .region = m->signal_region,
                    .op = m->signal_op,
                    .offset = m->signal_offset,
                    .value = m->signal_value },
    };

    return ep_gin_order_land(&peer->order, &piece, apply, peer->comm);
}

/* ---- peers that go -------------------------------------------------------------------------------------- */

static bool said_bye(const struct ep_gin_peer *peer)
{
    struct ep_gin_frame frame;

    return recv(peer->control, &frame, sizeof frame, MSG_PEEK | MSG_DONTWAIT) == (ssize_t)sizeof frame &&
           frame.kind == EP_GIN_FRAME_BYE;
}

static void control_closed(struct ep_gin_peer *peer)
{
    if (!said_bye(peer))
        ep_gin_warn("rank %u: rank %u has died; the others go on without it", peer->comm->rank, peer->rank);
    ep_gin_peer_lost(peer, "its control connection is closed");
    ep_gin_unwatch(peer->comm, peer->control);
}

/* A host that has gone without a word closes nothing. */
#define DRAIN_NS EP_NS_PER_S

static bool link_drained(const struct ep_gin_link *link)
{
    return !link->link || !link->transport->drained || link->transport->drained(link->link);
}

/* True: all has been taken now that a peer had sent before it went. */
static bool drain(struct ep_gin_peer *peer)
{
    if (!ep_gin_peer_is_lost(peer) || ep_gin_peer_is_drained(peer))
        return false;
    if (peer->lost_ns == 0)
        peer->lost_ns = ep_clock_ns();
    if (!(link_drained(&peer->main) && link_drained(&peer->spare)) && ep_clock_ns() - peer->lost_ns < DRAIN_NS)
        return false;
    __atomic_store_n(&peer->drained, 1, __ATOMIC_RELEASE); /* partner: ep_gin_peer_is_drained */
    return true;
}

/* ---- what the thread looks at ------------------------------------------------------------------------------ */

static ep_status watch(struct ep_gin_comm *comm, const struct ep_gin_watch *new, uint32_t events,
                       struct ep_error *error)
{
    struct epoll_event event = { .events = events, .data.u32 = comm->watched };

    if (comm->watched == comm->watches_max)
        return ep_error_set(error, EP_INTERNAL, "more than %u descriptors to watch", comm->watches_max);
    if (epoll_ctl(comm->epoll, EPOLL_CTL_ADD, new->fd, &event) != 0)
        return ep_error_errno(error, EP_IO, "epoll_ctl");
    comm->watches[comm->watched++] = *new;
    return EP_OK;
}

ep_status ep_gin_watch(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void *link, uint32_t index, int fd,
                       struct ep_error *error)
{
    struct ep_gin_link *which = peer->main.link == link ? &peer->main : &peer->spare;

    return watch(comm, &(struct ep_gin_watch){ .peer = peer, .link = which, .index = index, .fd = fd }, EPOLLIN, error);
}

void ep_gin_unwatch(struct ep_gin_comm *comm, int fd)
{
    (void)epoll_ctl(comm->epoll, EPOLL_CTL_DEL, fd, NULL); /* it may have been before */
}

static void wake(const struct ep_gin_comm *comm)
{
    const uint64_t one = 1;

    (void)!write(comm->wake, &one, sizeof one); /* full: it is awake */
}

static void woken(const struct ep_gin_comm *comm)
{
    uint64_t many;

    (void)!read(comm->wake, &many, sizeof many); /* empty: another event */
}

static bool attend(struct ep_gin_comm *comm, const struct ep_gin_watch *w)
{
    if (!w->peer) {
        woken(comm);
        return true;
    }
    if (!w->link) {
        control_closed(w->peer);
        return true;
    }
    return w->link->transport->ready(w->link->link, w->index);
}

static bool look_at_descriptors(struct ep_gin_comm *comm)
{
    struct epoll_event events[EVENTS];
    int n = epoll_wait(comm->epoll, events, EVENTS, 0);
    bool found = false;

    for (int i = 0; i < n; i++)
        found |= attend(comm, &comm->watches[events[i].data.u32]);
    return found;
}

static bool poll_link(const struct ep_gin_link *link)
{
    return link->link && link->transport->poll && link->transport->poll(link->link);
}

static bool look_at_memory(struct ep_gin_comm *comm)
{
    bool found = false;

    for (uint32_t r = 0; r < comm->ranks; r++) {
        found |= poll_link(&comm->peers[r].main);
        found |= poll_link(&comm->peers[r].spare);
    }
    return found;
}

static bool drain_lost(struct ep_gin_comm *comm)
{
    bool found = false;

    for (uint32_t r = 0; r < comm->ranks; r++)
        found |= drain(&comm->peers[r]);
    return found;
}

static bool look(struct ep_gin_comm *comm)
{
    bool found;

    pthread_mutex_lock(&comm->receiving);
    found = look_at_memory(comm);
    found |= look_at_descriptors(comm);
    found |= drain_lost(comm);
    ep_gin_stream_flush(&comm->receiver);
    if (found && comm->heard)
        comm->heard(comm->heard_user);
    pthread_mutex_unlock(&comm->receiving);
    return found;
}

/* ---- sleeping ------------------------------------------------------------------------------------------------ */

static void set_asleep(struct ep_gin_comm *comm, bool asleep)
{
    __atomic_store_n(&comm->asleep, asleep, __ATOMIC_SEQ_CST); /* partner: movers.c */
    for (uint32_t r = 0; r < comm->ranks; r++) {
        const struct ep_gin_link *main = &comm->peers[r].main;

        if (main->transport->sleep)
            main->transport->sleep(main->link, asleep);
    }
}

static bool stopped(const struct ep_gin_comm *comm)
{
    return __atomic_load_n(&comm->stop, __ATOMIC_ACQUIRE) != 0; /* partner: ep_gin_receive_stop */
}

/* Whoever writes after the second look sees that this thread sleeps, and wakes it. */
static void doze(struct ep_gin_comm *comm)
{
    struct epoll_event event;

    set_asleep(comm, true);
    if (!look(comm) && !stopped(comm))
        (void)epoll_wait(comm->epoll, &event, 1, SLEEP_MS); /* what it is, look() finds */
    set_asleep(comm, false);
}

static void *run(void *arg)
{
    struct ep_gin_comm *comm = arg;
    uint64_t last = ep_clock_ns();

    (void)ep_thread_runs_ops();
    while (!stopped(comm)) {
        if (__atomic_load_n(&comm->wanted, __ATOMIC_RELAXED) != 0)
            usleep(YIELD_US); /* a mutex that is locked again at once is nobody else's */
        if (look(comm))
            last = ep_clock_ns();
        else if (ep_clock_ns() - last > comm->settings.spin_ns)
            doze(comm);
        else
            ep_cpu_relax();
    }
    return NULL;
}

/* ---- the interface --------------------------------------------------------------------------------------------- */

ep_status ep_gin_receive_open(struct ep_gin_comm *comm, struct ep_error *error)
{
    /* Control, data, and one that a transport may have of its own, for each peer. */
    comm->watches_max = comm->ranks * (EP_GIN_MAX_CONNECTIONS + 2) + 1;
    comm->watches = calloc(comm->watches_max, sizeof *comm->watches);
    if (!comm->watches)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u descriptors", comm->watches_max);
    comm->epoll = epoll_create1(EPOLL_CLOEXEC);
    comm->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (comm->epoll < 0 || comm->wake < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "descriptors of the receive thread");
    return watch(comm, &(struct ep_gin_watch){ .fd = comm->wake }, EPOLLIN, error);
}

static ep_status watch_control(struct ep_gin_comm *comm, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < comm->ranks && status == EP_OK; r++)
        if (comm->peers[r].control >= 0)
            status = watch(comm, &(struct ep_gin_watch){ .peer = &comm->peers[r], .fd = comm->peers[r].control },
                           EPOLLRDHUP, error);
    return status;
}

ep_status ep_gin_receive_start(struct ep_gin_comm *comm, struct ep_error *error)
{
    char name[16];
    ep_status status = watch_control(comm, error);
    int failure;

    if (status != EP_OK)
        return status;
    snprintf(name, sizeof name, "ep-gin %u", comm->rank % 100000);
    failure = ep_thread_start(&comm->thread, name, run, comm);
    if (failure != 0)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "receive thread: %s", strerror(failure));
    comm->running = true;
    return EP_OK;
}

void ep_gin_receive_stop(struct ep_gin_comm *comm)
{
    if (!comm->running)
        return;
    __atomic_store_n(&comm->stop, 1, __ATOMIC_RELEASE); /* partner: stopped */
    wake(comm);
    pthread_join(comm->thread, NULL);
    comm->running = false;
}

void ep_gin_receive_close(struct ep_gin_comm *comm)
{
    if (comm->wake >= 0)
        close(comm->wake);
    if (comm->epoll >= 0)
        close(comm->epoll);
    free(comm->watches);
}
