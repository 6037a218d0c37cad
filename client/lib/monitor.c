/*
 * One thread per client.  It reads the side sockets of its ranks: events go to the rank's queue, answers to who waits
 * for them, and when the server closes the connection the rank is lost, so that no wait hangs.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client_private.h"
#include "ep_futex.h"
#include "ep_thread.h"

#define STOP_KEY 0u
/* A rank's keys: its id (from 1) times two, plus one for its interrupt_fd. */
#define NUDGE_MS 1 /* a wait that is being interrupted is woken this often */
#define BATCH 16

/* ---- what the server says ---------------------------------------------------------- */

static void lose(struct ep_rank *rank, ep_status why, const char *text)
{
    ep_event event = { .type = EP_EVENT_SERVER_LOST };

    if (__atomic_load_n(&rank->lost, __ATOMIC_RELAXED) != EP_OK)
        return; /* DETACHED came before */
    if (why == EP_SERVER_LOST) { /* another reason has its event in the queue */
        copy_text(event.text, sizeof event.text, text);
        events_push(rank, &event);
    }
    rank_lose(rank, why, text); /* last: who sees the loss finds its event */
}

static void on_event(struct ep_rank *rank, const struct ep_attach_frame *frame)
{
    ep_event event = { .type = (ep_event_type)frame->event, .rank = frame->rank, .epoch = frame->epoch,
                       .value = frame->value };
    char text[EP_ERROR_TEXT_MAX];

    memcpy(event.text, frame->text, sizeof event.text);
    events_push(rank, &event);
    if (event.type == EP_EVENT_EPOCH)
        follow_epoch(rank, event.epoch);
    if (event.type != EP_EVENT_DETACHED)
        return;
    snprintf(text, sizeof text, "the server has detached this rank: %s",
             event.text[0] ? event.text : "no reason given");
    lose(rank, EP_DETACHED, text);
}

/* False: it says nothing that a rank is told while it is attached. */
static bool understand(struct ep_rank *rank, const struct ep_attach_frame *frame)
{
    switch (frame->type) {
    case EP_ATTACH_EVENT:  on_event(rank, frame); return true;
    case EP_ATTACH_ANSWER: request_answered(rank, frame); return true;
    case EP_ATTACH_ASK:    turn_asked(rank, frame); return true;
    case EP_ATTACH_TURN:   turn_decided(rank, frame); return true;
    default:               return false;
    }
}

/* False: the connection has ended. */
static bool read_frame(struct ep_rank *rank)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_attach_frame frame;
    int fd;
    ep_status status = ep_attach_receive(rank->socket, &frame, &fd, &error);

    if (fd >= 0)
        close(fd);
    if (status == EP_UNAVAILABLE)
        return true;
    if (status == EP_OK && understand(rank, &frame))
        return true;
    if (status == EP_OK && frame.type == EP_ATTACH_REFUSED)
        lose(rank, EP_DETACHED, frame.text);
    else if (status == EP_OK || status == EP_PROTOCOL)
        lose(rank, EP_SERVER_LOST, "the server sent something that has no place after WELCOME");
    else
        lose(rank, EP_SERVER_LOST, "the server is gone: it closed the rank's connection");
    return false;
}

/* ---- the thread ------------------------------------------------------------------ */

static struct ep_rank *find(struct ep_client *client, uint64_t id)
{
    struct ep_rank *rank = client->ranks;

    while (rank && rank->id != id)
        rank = rank->next;
    return rank;
}

/* True while a rank's thread has not noticed its interrupt. */
static bool nudge(struct ep_client *client)
{
    bool more = false;

    for (struct ep_rank *rank = client->ranks; rank; rank = rank->next) {
        uint32_t *word = __atomic_load_n(&rank->waiting, __ATOMIC_SEQ_CST);

        if (word && __atomic_load_n(&rank->interrupted, __ATOMIC_SEQ_CST)) {
            ep_futex_wake_all(word);
            more = true;
        }
    }
    return more;
}

static void on_ready(struct ep_client *client, uint64_t key)
{
    struct ep_rank *rank = find(client, key / 2);

    /* Not there: it has left since epoll_wait looked. */
    if (!rank || key % 2 == 1)
        return;
    if (!read_frame(rank))
        epoll_ctl(client->epoll, EPOLL_CTL_DEL, rank->socket, NULL);
}

static void *run(void *arg)
{
    struct ep_client *client = arg;
    struct epoll_event ready[BATCH];
    bool nudging = false;

    for (;;) {
        int n = epoll_wait(client->epoll, ready, BATCH, nudging ? NUDGE_MS : -1);

        pthread_mutex_lock(&client->lock);
        for (int i = 0; i < n; i++) {
            if (ready[i].data.u64 == STOP_KEY) {
                pthread_mutex_unlock(&client->lock);
                return NULL;
            }
            on_ready(client, ready[i].data.u64);
        }
        nudging = nudge(client);
        pthread_mutex_unlock(&client->lock);
    }
}

/* ---- set-up ---------------------------------------------------------------------- */

static int watch(struct ep_client *client, int fd, uint32_t events, uint64_t key)
{
    struct epoll_event event = { .events = events, .data.u64 = key };

    return epoll_ctl(client->epoll, EPOLL_CTL_ADD, fd, &event);
}

ep_status monitor_start(struct ep_client *client, struct ep_error *error)
{
    client->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (client->epoll < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "epoll for the client's monitor");
    client->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (client->stop < 0 || watch(client, client->stop, EPOLLIN, STOP_KEY) < 0) {
        ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "eventfd for the client's monitor");
        goto close_fds;
    }
    client->next_id = 1;
    pthread_mutex_init(&client->lock, NULL);
    errno = ep_thread_start(&client->monitor, "ep-monitor", run, client);
    if (errno == 0)
        return EP_OK;
    ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "thread for the client's monitor");
    pthread_mutex_destroy(&client->lock);
close_fds:
    if (client->stop >= 0)
        close(client->stop);
    close(client->epoll);
    return EP_RESOURCE_EXHAUSTED;
}

void monitor_stop(struct ep_client *client)
{
    const uint64_t one = 1;

    (void)!write(client->stop, &one, sizeof one);
    pthread_join(client->monitor, NULL);
    pthread_mutex_destroy(&client->lock);
    close(client->stop);
    close(client->epoll);
}

ep_status monitor_add(struct ep_rank *rank, struct ep_error *error)
{
    struct ep_client *client = rank->client;
    ep_status status = EP_OK;

    pthread_mutex_lock(&client->lock);
    rank->id = client->next_id++;
    if (watch(client, rank->socket, EPOLLIN, rank->id * 2) < 0
        || watch(client, rank->interrupt_fd, EPOLLIN | EPOLLET, rank->id * 2 + 1) < 0) {
        status = ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "watch the rank's connection");
        epoll_ctl(client->epoll, EPOLL_CTL_DEL, rank->socket, NULL);
    } else {
        rank->next = client->ranks;
        client->ranks = rank;
    }
    pthread_mutex_unlock(&client->lock);
    return status;
}

void monitor_remove(struct ep_rank *rank)
{
    struct ep_client *client = rank->client;

    pthread_mutex_lock(&client->lock);
    for (struct ep_rank **link = &client->ranks; *link; link = &(*link)->next)
        if (*link == rank) {
            *link = rank->next;
            break;
        }
    epoll_ctl(client->epoll, EPOLL_CTL_DEL, rank->socket, NULL); /* may have ended before */
    epoll_ctl(client->epoll, EPOLL_CTL_DEL, rank->interrupt_fd, NULL);
    pthread_mutex_unlock(&client->lock);
}
