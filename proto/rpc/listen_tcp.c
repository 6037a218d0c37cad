/* Plaintext TCP listeners.  With TLS gRPC listens, and this file says why it could not. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rpc_private.h"

/* "HOST:PORT", "[V6]:PORT", ":PORT" -> host ("": all addresses) and port, in one allocation. */
static ep_status split_address(const char *address, char **host, char **port, struct ep_error *error)
{
    const char *colon = strrchr(address, ':');
    char *copy;

    if (!colon || !colon[1] || (memchr(address, ':', (size_t)(colon - address)) && *address != '['))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "address \"%s\": must be HOST:PORT or [IPV6]:PORT", address);
    copy = strdup(address);
    if (!copy)
        return ep_error_set(error, EP_NO_MEMORY, "address \"%s\": out of memory", address);
    *port = copy + (colon - address) + 1;
    (*port)[-1] = '\0';
    *host = copy;
    if (*copy == '[') {
        size_t n = strlen(copy);

        if (copy[n - 1] == ']') {
            memmove(copy, copy + 1, n - 2);
            copy[n - 2] = '\0';
        }
    }
    return EP_OK;
}

static ep_status resolve(const char *address, struct addrinfo **out, struct ep_error *error)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE };
    char *host = NULL, *port = NULL;
    ep_status status = split_address(address, &host, &port, error);
    int result;

    if (status != EP_OK)
        return status;
    result = getaddrinfo(*host ? host : NULL, port, &hints, out);
    free(host);
    if (result != 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "address \"%s\": %s", address,
                            gai_strerror(result));
    return EP_OK;
}

static void set_port(struct sockaddr *address, int port)
{
    if (address->sa_family == AF_INET)
        ((struct sockaddr_in *)(void *)address)->sin_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in6 *)(void *)address)->sin6_port = htons((uint16_t)port);
}

/* -1 with errno: this address cannot be bound. */
static int bind_tcp(const struct addrinfo *ai, bool only_v6)
{
    int one = 1, v6 = only_v6, reason;
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -1;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0
        && (ai->ai_family != AF_INET6
            || setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6, sizeof v6) == 0)
        && bind(fd, ai->ai_addr, ai->ai_addrlen) == 0 && listen(fd, RPC_BACKLOG) == 0)
        return fd;
    reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

static ep_status bind_failed(const char *address, struct ep_error *error)
{
    switch (errno) {
    case EADDRINUSE:
        return ep_error_errno(error, EP_ALREADY_EXISTS, "cannot listen on %s", address);
    case EACCES:
        return ep_error_errno(error, EP_PERMISSION_DENIED, "cannot listen on %s", address);
    default:
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot listen on %s", address);
    }
}

/* A host without IPv6 still has names that resolve to it. */
static bool is_absent_family(int reason)
{
    return reason == EAFNOSUPPORT || reason == EADDRNOTAVAIL;
}

/* All addresses of the name, on one port.  server NULL: only try. */
static ep_status bind_all(struct ep_rpc_server *server, const char *address, struct addrinfo *list,
                          int *port, struct ep_error *error)
{
    ep_status status = EP_OK;
    int bound = 0;

    for (struct addrinfo *ai = list; ai && status == EP_OK; ai = ai->ai_next) {
        struct rpc_listener *listener;
        int fd;

        if (bound)
            set_port(ai->ai_addr, bound);
        fd = bind_tcp(ai, list->ai_next != NULL);
        if (fd < 0 && is_absent_family(errno) && (bound || ai->ai_next))
            continue;
        if (fd < 0)
            return bind_failed(address, error);
        bound = rpc_port_of(fd);
        if (server)
            status = rpc_listener_add(server, fd, NULL, &listener, error);
        else
            close(fd);
    }
    *port = bound;
    return status;
}

ep_status rpc_listen_tcp(struct ep_rpc_server *server, const char *address, int *port,
                               struct ep_error *error)
{
    struct addrinfo *list;
    ep_status status = resolve(address, &list, error);

    if (status != EP_OK)
        return status;
    status = bind_all(server, address, list, port, error);
    freeaddrinfo(list);
    return status;
}

ep_status rpc_explain_bind(const char *address, struct ep_error *error)
{
    int port;

    return rpc_listen_tcp(NULL, address, &port, error);
}
