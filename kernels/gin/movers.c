/* Threads that carry long payloads between sockets and memory: one thread for all connections would be what limits them. */
#include "movers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ep_futex.h"
#include "ep_thread.h"
#include "gin.h"

enum { IDLE, UNDER_WAY, OVER };
enum { CLOSE_STEP_US = 20, PATIENCE_NS = 30000 };

struct ep_gin_movers {
    int epoll;
    int end; /* eventfd: readable when all are to end */
    struct ep_gin_comm *comm;
    uint32_t n;
    pthread_t threads[];
};

/* ---- a thread ------------------------------------------------------------------------------------------ */

/* That there is something to look at. */
static void tell(const struct ep_gin_comm *comm)
{
    const uint64_t one = 1;

    if (__atomic_load_n(&comm->asleep, __ATOMIC_SEQ_CST) != 0)
        (void)!write(comm->wake, &one, sizeof one); /* full: it is awake */
}

static void finish(struct ep_gin_movers *movers, struct ep_gin_move *move, int failure)
{
    const struct ep_gin_comm *comm = movers->comm; /* the move may go when it is over */

    (void)epoll_ctl(movers->epoll, EPOLL_CTL_DEL, move->fd, NULL);
    move->failure = failure;
    __atomic_store_n(&move->state, OVER, __ATOMIC_SEQ_CST); /* partner: ep_gin_move_over */
    tell(comm);
}

static void advance(struct ep_gin_move *move, uint64_t bytes)
{
    __atomic_store_n(&move->moved, move->moved + bytes, __ATOMIC_RELEASE); /* partner: ep_gin_move_moved */
    move->fresh = false;
    for (; move->next < move->parts && bytes >= move->part[move->next].iov_len; move->next++)
        bytes -= move->part[move->next].iov_len;
    if (move->next == move->parts)
        return;
    move->part[move->next].iov_base = (uint8_t *)move->part[move->next].iov_base + bytes;
    move->part[move->next].iov_len -= bytes;
}

static bool has_parts(const struct ep_gin_movers *movers, struct ep_gin_move *move)
{
    if (move->next < move->parts)
        return true;
    if (!move->more || !move->more(move->user))
        return false;
    move->next = 0;
    move->fresh = true;
    tell(movers->comm);
    return true;
}

static ssize_t carry(struct ep_gin_move *move)
{
    struct msghdr header = { .msg_iov = move->part + move->next, .msg_iovlen = move->parts - move->next };

    return move->out ? sendmsg(move->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(move->fd, &header, MSG_DONTWAIT);
}

/* What is under way comes sooner than a thread that sleeps is woken. */
static ssize_t carry_patiently(struct ep_gin_move *move)
{
    const uint64_t end = ep_clock_ns() + PATIENCE_NS;
    ssize_t n;

    while ((n = carry(move)) < 0 && (errno == EINTR || (errno == EAGAIN && ep_clock_ns() < end)))
        ep_cpu_relax();
    return n;
}

/* Wakes one thread, once, when the socket is ready.  how: EPOLL_CTL_ADD, or MOD while the move is under way. */
static int arm(const struct ep_gin_movers *movers, struct ep_gin_move *move, int how)
{
    struct epoll_event event = { .events = (move->out ? EPOLLOUT : EPOLLIN) | EPOLLONESHOT, .data.ptr = move };

    __atomic_store_n(&move->state, UNDER_WAY, __ATOMIC_RELEASE); /* partner: run_move, of the thread that it wakes */
    return epoll_ctl(movers->epoll, how, move->fd, &event) == 0 ? 0 : errno;
}

/* As far as the socket goes now. */
static void run_move(struct ep_gin_movers *movers, struct ep_gin_move *move)
{
    int failure = 0;

    (void)__atomic_load_n(&move->state, __ATOMIC_ACQUIRE); /* partner: arm */
    while (failure == 0 && has_parts(movers, move)) {
        const ssize_t n = carry_patiently(move);

        if (n > 0)
            advance(move, (uint64_t)n);
        else if (n == 0)
            failure = ECONNRESET;
        else if (errno == EAGAIN && move->fresh)
            break;
        else if (errno == EAGAIN) {
            failure = arm(movers, move, EPOLL_CTL_MOD);
            if (failure == 0)
                return; /* another thread may have it already */
        } else
            failure = errno;
    }
    finish(movers, move, failure);
}

static void *run(void *arg)
{
    struct ep_gin_movers *movers = arg;
    struct epoll_event event;
    int n;

    (void)ep_thread_runs_ops();
    while ((n = epoll_wait(movers->epoll, &event, 1, -1)) == 1 || (n < 0 && errno == EINTR)) {
        if (n == 1 && !event.data.ptr)
            break;
        if (n == 1)
            run_move(movers, event.data.ptr);
    }
    return NULL;
}

/* ---- the threads ------------------------------------------------------------------------------------------ */

static ep_status open_descriptors(struct ep_gin_movers *movers, struct ep_error *error)
{
    struct epoll_event event = { .events = EPOLLIN };

    movers->epoll = epoll_create1(EPOLL_CLOEXEC);
    movers->end = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (movers->epoll < 0 || movers->end < 0 || epoll_ctl(movers->epoll, EPOLL_CTL_ADD, movers->end, &event) != 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "descriptors of threads that carry payloads");
    return EP_OK;
}

static ep_status start(struct ep_gin_movers *movers, uint32_t threads, struct ep_error *error)
{
    int failure = 0;

    while (movers->n < threads && failure == 0) {
        failure = ep_thread_start(&movers->threads[movers->n], "ep-gin mover", run, movers);
        movers->n += failure == 0;
    }
    if (failure != 0)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "threads that carry payloads: %s", strerror(failure));
    return EP_OK;
}

ep_status ep_gin_movers_open(struct ep_gin_comm *comm, uint32_t threads, struct ep_gin_movers **out,
                             struct ep_error *error)
{
    struct ep_gin_movers *movers = calloc(1, sizeof *movers + threads * sizeof *movers->threads);
    ep_status status;

    if (!movers)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u threads", threads);
    movers->comm = comm;
    movers->epoll = movers->end = -1;
    status = open_descriptors(movers, error);
    if (status == EP_OK)
        status = start(movers, threads, error);
    if (status == EP_OK)
        *out = movers;
    else
        ep_gin_movers_close(movers);
    return status;
}

void ep_gin_movers_close(struct ep_gin_movers *movers)
{
    const uint64_t one = 1;

    if (!movers)
        return;
    if (movers->end >= 0)
        (void)!write(movers->end, &one, sizeof one);
    for (uint32_t i = 0; i < movers->n; i++)
        pthread_join(movers->threads[i], NULL);
    if (movers->end >= 0)
        close(movers->end);
    if (movers->epoll >= 0)
        close(movers->epoll);
    free(movers);
}

/* ---- moves --------------------------------------------------------------------------------------------------- */

ep_status ep_gin_move_open(struct ep_gin_movers *movers, int fd, bool out, struct ep_gin_move *move,
                           struct ep_error *error)
{
    *move = (struct ep_gin_move){ .out = out, .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0) };
    if (move->fd < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a descriptor of a connection");
    move->movers = movers;
    return EP_OK;
}

void ep_gin_move_start(struct ep_gin_move *move)
{
    int failure;

    move->next = 0;
    move->fresh = false;
    __atomic_store_n(&move->moved, 0, __ATOMIC_RELAXED);
    failure = arm(move->movers, move, EPOLL_CTL_ADD);
    if (failure != 0)
        finish(move->movers, move, failure);
}

bool ep_gin_move_over(const struct ep_gin_move *move)
{
    return __atomic_load_n(&move->state, __ATOMIC_SEQ_CST) == OVER; /* partner: finish */
}

uint64_t ep_gin_move_moved(const struct ep_gin_move *move)
{
    return __atomic_load_n(&move->moved, __ATOMIC_ACQUIRE);
}

void ep_gin_move_close(struct ep_gin_move *move)
{
    if (!move->movers)
        return;
    while (__atomic_load_n(&move->state, __ATOMIC_ACQUIRE) == UNDER_WAY) {
        shutdown(move->fd, SHUT_RDWR); /* so it ends */
        usleep(CLOSE_STEP_US);
    }
    close(move->fd);
    move->movers = NULL;
}
