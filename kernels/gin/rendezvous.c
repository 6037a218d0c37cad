/*
 * How the ranks of a communicator find each other.
 *
 * A rank dials all that are lower, one connection for control and some for data, and then accepts those that are
 * higher: whoever it waits for has nobody above to wait for.  On one host the control connection is a unix socket,
 * which carries descriptors.  The listening port is open to everyone: whoever does not say the token of the handle, or
 * says nothing for a while, is sent away, and costs the others nothing.
 *
 * One that dies meanwhile, or gives up, is missed by those that it was connected to, who give up in turn; so all do,
 * also who waits for it to come.
 */
#include "transport.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { GUESTS = 64, BACKLOG = 1024, BUFFER_BYTES = 4 << 20 };

/* A connection that says nothing is closed. */
#define GUEST_NS (5 * EP_NS_PER_S)
/* TCP itself asks again after 1, 3, 7 s: who dials anew finds a path that was mended meanwhile sooner. */
#define DIAL_NS (1 * EP_NS_PER_S)

struct ep_gin_listener {
    int tcp, local; /* -1: none */
    struct ep_gin_handle handle;
};

/* Somebody who has not said who he is. */
struct guest {
    int fd; /* -1: nobody */
    bool local;
    uint64_t deadline;
    size_t got;
    struct ep_gin_hello hello;
};

/* ---- addresses ------------------------------------------------------------------------------------ */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
    struct sockaddr_storage storage;
};

static socklen_t local_address(uint64_t name, union address *address)
{
    memset(address, 0, sizeof *address);
    address->local.sun_family = AF_UNIX;
    snprintf(address->local.sun_path + 1, sizeof address->local.sun_path - 1, "ep-gin-%016llx",
             (unsigned long long)name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address->local.sun_path + 1));
}

static socklen_t handle_address(const struct ep_gin_handle *handle, union address *address)
{
    memset(address, 0, sizeof *address);
    if (handle->family == 4) {
        address->v4.sin_family = AF_INET;
        address->v4.sin_port = handle->port;
        memcpy(&address->v4.sin_addr, handle->address, sizeof address->v4.sin_addr);
        return sizeof address->v4;
    }
    address->v6.sin6_family = AF_INET6;
    address->v6.sin6_port = handle->port;
    memcpy(&address->v6.sin6_addr, handle->address, sizeof address->v6.sin6_addr);
    return sizeof address->v6;
}

static void handle_set(struct ep_gin_handle *handle, const union address *address)
{
    if (address->any.sa_family == AF_INET) {
        handle->family = 4;
        handle->port = address->v4.sin_port;
        memcpy(handle->address, &address->v4.sin_addr, sizeof address->v4.sin_addr);
    } else {
        handle->family = 6;
        handle->port = address->v6.sin6_port;
        memcpy(handle->address, &address->v6.sin6_addr, sizeof address->v6.sin6_addr);
    }
}

/* ---- listening -------------------------------------------------------------------------------------- */

static ep_status listen_at(const union address *address, socklen_t length, int *out, struct ep_error *error)
{
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "socket to listen on");
    if (bind(fd, &address->any, length) != 0 || listen(fd, BACKLOG) != 0) {
        ep_status status = ep_error_errno(error, EP_IO, "listening");

        close(fd);
        return status;
    }
    *out = fd;
    return EP_OK;
}

static ep_status listen_tcp(const struct ep_gin_settings *settings, struct ep_gin_listener *listener,
                            struct ep_error *error)
{
    union address address;
    socklen_t length = sizeof address.storage;
    ep_status status = ep_gin_address_choose(settings, &address.storage, error);
    const socklen_t size = address.any.sa_family == AF_INET ? sizeof address.v4 : sizeof address.v6;

    if (status == EP_OK)
        status = listen_at(&address, size, &listener->tcp, error);
    if (status != EP_OK)
        return status;
    if (getsockname(listener->tcp, &address.any, &length) != 0)
        return ep_error_errno(error, EP_IO, "getsockname");
    handle_set(&listener->handle, &address);
    return EP_OK;
}

static ep_status draw(struct ep_gin_handle *handle, struct ep_error *error)
{
    if (getrandom(handle->token, sizeof handle->token, 0) != sizeof handle->token ||
        getrandom(&handle->name, sizeof handle->name, 0) != sizeof handle->name)
        return ep_error_errno(error, EP_IO, "getrandom");
    return EP_OK;
}

static ep_status open_listener(const struct ep_gin_settings *settings, struct ep_gin_listener *listener,
                               struct ep_error *error)
{
    struct ep_gin_handle *handle = &listener->handle;
    union address address;
    ep_status status = draw(handle, error);

    handle->magic = EP_GIN_MAGIC;
    handle->protocol = EP_GIN_PROTOCOL;
    if (status == EP_OK)
        status = ep_gin_host_id_read(&handle->host, error);
    if (status == EP_OK)
        status = listen_tcp(settings, listener, error);
    if (status == EP_OK)
        status = listen_at(&address, local_address(handle->name, &address), &listener->local, error);
    return status;
}

ep_status ep_gin_listen(const struct ep_gin_settings *settings, struct ep_gin_handle *handle,
                        struct ep_gin_listener **out, struct ep_error *error)
{
    struct ep_gin_listener *listener = calloc(1, sizeof *listener);
    ep_status status;

    if (!listener)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a listener");
    listener->tcp = listener->local = -1;
    status = open_listener(settings, listener, error);
    if (status != EP_OK) {
        ep_gin_listener_close(listener);
        return status;
    }
    *handle = listener->handle;
    *out = listener;
    return EP_OK;
}

void ep_gin_listener_close(struct ep_gin_listener *listener)
{
    if (!listener)
        return;
    if (listener->tcp >= 0)
        close(listener->tcp);
    if (listener->local >= 0)
        close(listener->local);
    free(listener);
}

/* ---- what is said -------------------------------------------------------------------------------------- */

static struct ep_gin_hello hello_to(struct ep_gin_comm *comm, const struct ep_gin_handle *to, bool local)
{
    struct ep_gin_hello hello = {
        .magic = EP_GIN_MAGIC,
        .protocol = EP_GIN_PROTOCOL,
        .purpose = EP_GIN_CONTROL,
        .rank = comm->rank,
        .ranks = comm->ranks,
        .wanted = comm->settings.transport,
        .able = ep_gin_transports_usable(comm, local),
        .connections = comm->settings.connections,
        .piece_bytes = comm->settings.piece_bytes,
        .host = comm->host,
    };

    memcpy(hello.token, to->token, sizeof hello.token);
    return hello;
}

static uint32_t fewer(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Both sides come to the same.  What does not go through the main link is little: one connection does. */
static ep_status agree(struct ep_gin_peer *peer, struct ep_error *error)
{
    ep_status status = ep_gin_transport_choose(&peer->mine, &peer->theirs, &peer->chosen, error);

    peer->connections = peer->chosen == EP_GIN_TCP ? fewer(peer->mine.connections, peer->theirs.connections) : 1;
    peer->piece_bytes = fewer(peer->mine.piece_bytes, peer->theirs.piece_bytes);
    return status;
}

/* ---- sockets -------------------------------------------------------------------------------------------- */

static ep_status late(uint32_t rank, struct ep_error *error)
{
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "rank %u did not connect in time", rank);
}

/* False: not within the time. */
static bool wait_for(int fd, short events, uint64_t deadline)
{
    struct pollfd p = { .fd = fd, .events = events };
    uint64_t now;
    int n = 0;

    while (n <= 0 && (now = ep_clock_ns()) < deadline) {
        n = poll(&p, 1, (int)((deadline - now) / EP_NS_PER_MS) + 1);
        if (n < 0 && errno != EINTR)
            return false;
    }
    return n > 0;
}

/* A host that has gone without a word is noticed by what is not acknowledged, and by probes when nothing is sent. */
static void set_options(int fd, uint32_t silence_ms)
{
    const int one = 1, buffer = BUFFER_BYTES, probe_s = silence_ms > 3000 ? (int)silence_ms / 3000 : 1, probes = 2;

    /* Each makes it faster, or death sooner known; none is needed. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence_ms, sizeof silence_ms);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_s, sizeof probe_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

/* Hellos fit into what a new connection holds. */
static bool say_hello(int fd, const struct ep_gin_hello *hello)
{
    return send(fd, hello, sizeof *hello, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *hello;
}

static ep_status hear_hello(int fd, uint32_t rank, struct ep_gin_hello *hello, uint64_t deadline,
                            struct ep_error *error)
{
    size_t got = 0;

    while (got < sizeof *hello) {
        ssize_t n = recv(fd, (uint8_t *)hello + got, sizeof *hello - got, MSG_DONTWAIT);

        if (n > 0) {
            got += (size_t)n;
            continue;
        }
        if (n == 0)
            return ep_error_set(error, EP_PROTOCOL,
                                "rank %u has closed the connection: it has gone, or runs another release of %s, or "
                                "another communicator",
                                rank, EP_GIN_NAME);
        if (errno != EAGAIN && errno != EINTR)
            return ep_error_errno(error, EP_IO, "hello of rank %u", rank);
        if (!wait_for(fd, POLLIN, deadline))
            return late(rank, error);
    }
    return EP_OK;
}

/* ---- dialling --------------------------------------------------------------------------------------------- */

static ep_status finish_connect(int fd, uint32_t rank, uint64_t deadline, struct ep_error *error)
{
    int result = 0;
    socklen_t length = sizeof result;

    if (!wait_for(fd, POLLOUT, deadline))
        return late(rank, error);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &result, &length) != 0)
        return ep_error_errno(error, EP_IO, "connecting to rank %u", rank);
    errno = result;
    return result == 0 ? EP_OK : ep_error_errno(error, EP_IO, "connecting to rank %u", rank);
}

static ep_status dial_once(const union address *address, socklen_t length, uint32_t rank, uint64_t deadline, int *out,
                           struct ep_error *error)
{
    ep_status status = EP_OK;
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "socket to rank %u", rank);
    if (connect(fd, &address->any, length) != 0)
        status = errno == EINPROGRESS ? finish_connect(fd, rank, deadline, error)
                                      : ep_error_errno(error, EP_IO, "connecting to rank %u", rank);
    if (status != EP_OK)
        close(fd);
    else
        *out = fd;
    return status;
}

/* The error is the last dial's, and stays as it is where that one was answered. */
static ep_status dial(const union address *address, socklen_t length, uint32_t rank, uint64_t deadline, int *out,
                      struct ep_error *error)
{
    struct ep_error last = EP_ERROR_INIT;
    ep_status status;

    do {
        const uint64_t soon = ep_clock_ns() + DIAL_NS;

        status = dial_once(address, length, rank, soon < deadline ? soon : deadline, out, &last);
    } while (status == EP_DEADLINE_EXCEEDED && ep_clock_ns() < deadline);
    return status == EP_OK ? EP_OK : ep_error_set(error, status, "%s", last.text);
}

static ep_status dial_tcp(const struct ep_gin_comm *comm, const struct ep_gin_handle *handle, uint32_t rank,
                          uint64_t deadline, int *fd, struct ep_error *error)
{
    union address address;
    ep_status status = dial(&address, handle_address(handle, &address), rank, deadline, fd, error);

    if (status == EP_OK)
        set_options(*fd, comm->settings.silence_ms);
    return status;
}

static ep_status greet(struct ep_gin_comm *comm, int fd, const struct ep_gin_hello *mine, uint32_t rank,
                       const struct ep_gin_listener *listener, struct ep_gin_hello *theirs, uint64_t deadline,
                       struct ep_error *error)
{
    ep_status status;

    if (!say_hello(fd, mine))
        return ep_error_errno(error, EP_IO, "hello to rank %u", rank);
    status = hear_hello(fd, rank, theirs, deadline, error);
    if (status != EP_OK)
        return status;
    if (!ep_gin_hello_valid(theirs, listener->handle.token, comm->ranks) || theirs->rank != rank)
        return ep_error_set(error, EP_PROTOCOL, "who answers for rank %u is another", rank);
    return EP_OK;
}

static ep_status dial_control(struct ep_gin_peer *peer, const struct ep_gin_handle *handle,
                              const struct ep_gin_listener *listener, uint64_t deadline, struct ep_error *error)
{
    struct ep_gin_comm *comm = peer->comm;
    union address address;
    ep_status status;

    peer->local =
        ep_gin_same_host(&handle->host, &comm->host) &&
        dial(&address, local_address(handle->name, &address), peer->rank, deadline, &peer->control, NULL) == EP_OK;
    if (!peer->local) {
        status = dial_tcp(comm, handle, peer->rank, deadline, &peer->control, error);
        if (status != EP_OK)
            return status;
    }
    peer->mine = hello_to(comm, handle, peer->local);
    status = greet(comm, peer->control, &peer->mine, peer->rank, listener, &peer->theirs, deadline, error);
    return status == EP_OK ? agree(peer, error) : status;
}

static ep_status dial_data(struct ep_gin_peer *peer, uint32_t index, const struct ep_gin_handle *handle,
                           const struct ep_gin_listener *listener, uint64_t deadline, struct ep_error *error)
{
    struct ep_gin_hello mine = peer->mine, theirs;
    ep_status status = dial_tcp(peer->comm, handle, peer->rank, deadline, &peer->data[index], error);

    if (status != EP_OK)
        return status;
    mine.purpose = EP_GIN_DATA;
    mine.index = (uint8_t)index;
    return greet(peer->comm, peer->data[index], &mine, peer->rank, listener, &theirs, deadline, error);
}

static ep_status dial_peer(struct ep_gin_peer *peer, const struct ep_gin_handle *handle,
                           const struct ep_gin_listener *listener, uint64_t deadline, struct ep_error *error)
{
    ep_status status;

    if (!ep_gin_handle_valid(handle))
        return ep_error_set(error, EP_PROTOCOL, "rank %u listens with another release of %s", peer->rank, EP_GIN_NAME);
    status = dial_control(peer, handle, listener, deadline, error);
    for (uint32_t i = 0; i < peer->connections && status == EP_OK; i++)
        status = dial_data(peer, i, handle, listener, deadline, error);
    return status;
}

/* ---- accepting ---------------------------------------------------------------------------------------------- */

static void send_away(struct guest *guest)
{
    close(guest->fd);
    guest->fd = -1;
}

/* One more, when there is a chair; else he waits outside. */
static void let_in(int listener, bool local, struct guest *guests)
{
    uint32_t i = 0;

    while (i < GUESTS && guests[i].fd >= 0)
        i++;
    if (i < GUESTS)
        guests[i] = (struct guest){ .fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK),
                                    .local = local,
                                    .deadline = ep_clock_ns() + GUEST_NS };
}

static bool expected(const struct ep_gin_comm *comm, const struct guest *guest, const struct ep_gin_listener *listener)
{
    const struct ep_gin_hello *hello = &guest->hello;
    const struct ep_gin_peer *peer;

    if (!ep_gin_hello_valid(hello, listener->handle.token, comm->ranks) || hello->rank <= comm->rank)
        return false;
    peer = &comm->peers[hello->rank];
    if (hello->purpose == EP_GIN_CONTROL)
        return peer->control < 0;
    return !guest->local && peer->control >= 0 && hello->index < peer->connections && peer->data[hello->index] < 0;
}

static ep_status accept_control(struct ep_gin_peer *peer, const struct guest *guest, const struct ep_gin_handle *handle,
                                struct ep_error *error)
{
    peer->control = guest->fd;
    peer->local = guest->local;
    peer->theirs = guest->hello;
    peer->mine = hello_to(peer->comm, handle, guest->local);
    return agree(peer, error);
}

/* One who belongs here.  The connection is the peer's, also when this fails. */
static ep_status seat(struct ep_gin_comm *comm, struct guest *guest, const struct ep_gin_handle *const handles[],
                      struct ep_error *error)
{
    struct ep_gin_peer *peer = &comm->peers[guest->hello.rank];
    ep_status status = EP_OK;
    const int fd = guest->fd;

    if (guest->hello.purpose == EP_GIN_CONTROL)
        status = accept_control(peer, guest, handles[peer->rank], error);
    else
        peer->data[guest->hello.index] = fd;
    guest->fd = -1;
    if (!guest->local)
        set_options(fd, comm->settings.silence_ms);
    /* Also when they do not agree: the other side is to find the same out. */
    if (!say_hello(fd, &peer->mine) && status == EP_OK)
        status = ep_error_errno(error, EP_IO, "hello to rank %u", peer->rank);
    return status;
}

static ep_status attend(struct ep_gin_comm *comm, struct guest *guest, const struct ep_gin_handle *const handles[],
                        const struct ep_gin_listener *listener, struct ep_error *error)
{
    ssize_t n = recv(guest->fd, (uint8_t *)&guest->hello + guest->got, sizeof guest->hello - guest->got, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (ep_clock_ns() > guest->deadline)
            send_away(guest);
        return EP_OK;
    }
    guest->got += n > 0 ? (size_t)n : 0;
    if (n > 0 && guest->got < sizeof guest->hello)
        return EP_OK;
    if (n > 0 && expected(comm, guest, listener))
        return seat(comm, guest, handles, error);
    ep_gin_info("rank %u: a connection that is nobody's is closed", comm->rank);
    send_away(guest);
    return EP_OK;
}

/* The lowest that is not connected; ranks: all are. */
static uint32_t missing(const struct ep_gin_comm *comm)
{
    for (uint32_t r = comm->rank + 1; r < comm->ranks; r++) {
        const struct ep_gin_peer *peer = &comm->peers[r];

        if (peer->control < 0)
            return r;
        for (uint32_t i = 0; i < peer->connections; i++)
            if (peer->data[i] < 0)
                return r;
    }
    return comm->ranks;
}

static bool has_gone(const struct ep_gin_peer *peer)
{
    char byte;
    const ssize_t n = recv(peer->control, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

static ep_status look_for_losses(const struct ep_gin_comm *comm, struct ep_error *error)
{
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (comm->peers[r].control >= 0 && has_gone(&comm->peers[r]))
            return ep_error_set(error, EP_UNAVAILABLE, "rank %u has gone before all ranks were connected", r);
    return EP_OK;
}

enum { ROUND_MS = 100 }; /* then guests who say nothing are looked at, and who has gone */

static void wait_for_guests(const struct guest *guests, const struct ep_gin_listener *listener)
{
    struct pollfd fds[GUESTS + 2];

    for (uint32_t i = 0; i < GUESTS; i++)
        fds[i] = (struct pollfd){ .fd = guests[i].fd, .events = POLLIN };
    fds[GUESTS] = (struct pollfd){ .fd = listener->tcp, .events = POLLIN };
    fds[GUESTS + 1] = (struct pollfd){ .fd = listener->local, .events = POLLIN };
    (void)poll(fds, GUESTS + 2, ROUND_MS); /* whatever it says, all are looked at */
}

static ep_status accept_peers(struct ep_gin_comm *comm, const struct ep_gin_handle *const handles[],
                              const struct ep_gin_listener *listener, uint64_t deadline, struct ep_error *error)
{
    struct guest guests[GUESTS];
    ep_status status = EP_OK;
    uint64_t look = ep_clock_ns();

    for (uint32_t i = 0; i < GUESTS; i++)
        guests[i].fd = -1;
    while (status == EP_OK && missing(comm) < comm->ranks) {
        wait_for_guests(guests, listener);
        let_in(listener->tcp, false, guests);
        let_in(listener->local, true, guests);
        for (uint32_t i = 0; i < GUESTS && status == EP_OK; i++)
            if (guests[i].fd >= 0)
                status = attend(comm, &guests[i], handles, listener, error);
        if (status != EP_OK || missing(comm) == comm->ranks)
            break;
        if (ep_clock_ns() > look) {
            look = ep_clock_ns() + ROUND_MS * EP_NS_PER_MS;
            status = look_for_losses(comm, error);
        }
        if (status == EP_OK && ep_clock_ns() > deadline)
            status = late(missing(comm), error);
    }
    for (uint32_t i = 0; i < GUESTS; i++)
        if (guests[i].fd >= 0)
            send_away(&guests[i]);
    return status;
}

ep_status ep_gin_meet(struct ep_gin_comm *comm, const struct ep_gin_handle *const handles[],
                      struct ep_gin_listener *listener, struct ep_error *error)
{
    const uint64_t deadline = ep_clock_ns() + comm->settings.timeout_ns;
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < comm->rank && status == EP_OK; r++)
        status = dial_peer(&comm->peers[r], handles[r], listener, deadline, error);
    if (status == EP_OK)
        status = accept_peers(comm, handles, listener, deadline, error);
    return status;
}
