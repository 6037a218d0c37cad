/*
 * Doors: ports with TLS, at which gRPC accepts, and the connections that came in by each.
 *
 * gRPC has no limit for these.  What it accepts passes accept4() of accept.c, on threads of its own: there each newcomer
 * is counted, and hung up on when all places are taken.
 */
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "rpc_accept.h"
#include "rpc_private.h"

#define LOG_PERIOD_MS 1000

struct door {
    struct door *next;
    const struct ep_rpc_server *server;
    int port;
    struct rpc_held held;
    uint64_t refused, logged_ms;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct door *doors; /* guarded by lock, with all that is in them */

int rpc_port_of(int fd)
{
    struct sockaddr_storage address;
    socklen_t size = sizeof address;

    if (getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        return 0;
    switch (address.ss_family) {
    case AF_INET: return ntohs(((struct sockaddr_in *)(void *)&address)->sin_port);
    case AF_INET6: return ntohs(((struct sockaddr_in6 *)(void *)&address)->sin6_port);
    default: return 0;
    }
}

static struct door *find(int port)
{
    struct door *door = doors;

    while (door && door->port != port)
        door = door->next;
    return door;
}

static bool admit(struct door *door, int fd)
{
    if (door->held.n == door->held.limit)
        rpc_held_sweep(&door->held);
    return door->held.n < door->held.limit && rpc_held_add(&door->held, fd);
}

static void say_refused(struct door *door)
{
    const uint64_t now = rpc_now_ms();

    door->refused++;
    if (door->logged_ms && now - door->logged_ms < LOG_PERIOD_MS)
        return;
    EP_WARN("rpc", "connection refused", EP_S("reason", "max_connections"), EP_U("refused", door->refused),
            EP_U("open", door->held.n));
    door->logged_ms = now;
    door->refused = 0;
}

bool rpc_door_admits(int fd)
{
    const int port = rpc_port_of(fd);
    struct door *door;
    bool admitted;

    pthread_mutex_lock(&lock);
    door = port ? find(port) : NULL;
    admitted = !door || admit(door, fd);
    if (!admitted)
        say_refused(door);
    pthread_mutex_unlock(&lock);
    return admitted;
}

ep_status rpc_door_open(const struct ep_rpc_server *server, int port, size_t limit, struct ep_error *error)
{
    struct door *door = calloc(1, sizeof *door);

    if (!door || !rpc_held_open(&door->held, limit)) {
        free(door);
        return ep_error_set(error, EP_NO_MEMORY, "cannot listen on port %d: out of memory", port);
    }
    door->server = server;
    door->port = port;
    pthread_mutex_lock(&lock);
    door->next = doors;
    doors = door;
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

void rpc_doors_close(const struct ep_rpc_server *server)
{
    struct door **at = &doors;

    pthread_mutex_lock(&lock);
    while (*at) {
        struct door *door = *at;

        if (door->server != server) {
            at = &door->next;
            continue;
        }
        *at = door->next;
        rpc_held_close(&door->held);
        free(door);
    }
    pthread_mutex_unlock(&lock);
}
