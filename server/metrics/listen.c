/* The listening socket: made here, so that a failure names the address and the reason. */
#include "metrics_private.h"

#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 128

/* "[::1]:9090" into host "::1" and port "9090". */
static ep_status split_address(const char *address, char *host, size_t size, const char **port,
                               struct ep_error *error)
{
    const char *colon = strrchr(address, ':');
    const char *start = address;
    size_t length = colon ? (size_t)(colon - address) : 0;

    if (length >= 2 && address[0] == '[' && colon[-1] == ']') {
        start++;
        length -= 2;
    }
    if (length == 0 || length >= size || !colon[1])
        return ep_error_set(error, EP_INVALID_ARGUMENT, "\"%s\" is not HOST:PORT", address);
    memcpy(host, start, length);
    host[length] = '\0';
    *port = colon + 1;
    return EP_OK;
}

static int bind_socket(const struct addrinfo *info)
{
    int s = socket(info->ai_family, info->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, info->ai_protocol);
    int on = 1, off = 0;

    if (s < 0)
        return -1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* connections in TIME_WAIT do not matter */
    if (info->ai_family == AF_INET6)
        setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(s, info->ai_addr, info->ai_addrlen) == 0 && listen(s, BACKLOG) == 0)
        return s;
    close(s);
    return -1;
}

static int bound_port(int s)
{
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } name = { .any.sa_family = AF_UNSPEC };
    socklen_t size = sizeof name;

    if (getsockname(s, &name.any, &size) != 0)
        return 0;
    return ntohs(name.any.sa_family == AF_INET6 ? name.in6.sin6_port : name.in.sin_port);
}

ep_status ep_metrics_listen(const char *address, int *s, int *port, struct ep_error *error)
{
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    struct addrinfo *list = NULL;
    char host[256];
    const char *service = NULL;
    int failed;

    if (split_address(address, host, sizeof host, &service, error) != EP_OK)
        return EP_INVALID_ARGUMENT;
    failed = getaddrinfo(host, service, &hints, &list);
    if (failed)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "cannot listen on %s: %s", address,
                            gai_strerror(failed));
    *s = bind_socket(list); /* the first address only: one port, one family */
    if (*s < 0)
        ep_error_errno(error, EP_FAILED_PRECONDITION, "cannot listen on %s", address);
    else
        *port = bound_port(*s);
    freeaddrinfo(list);
    return *s < 0 ? EP_FAILED_PRECONDITION : EP_OK;
}
