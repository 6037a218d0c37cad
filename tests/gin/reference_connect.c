/* How ranks find each other, and part. */
#include "reference.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- connecting ---------------------------------------------------------------------------------- */

nccl_result reference_init(void **context, uint64_t comm_id, nccl_logger log)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)comm_id;
    if (ep_cuda_open(&cuda, &error) != EP_OK)
        log(NCCL_LOG_INFO, NCCL_LOG_NET, __FILE__, __LINE__, "host memory only: %s", error.text);
    *context = &cuda;
    return NCCL_SUCCESS;
}

nccl_result reference_devices(int *count)
{
    *count = 1;
    return NCCL_SUCCESS;
}

nccl_result reference_listen(void *context, int device, void *handle, void **out)
{
    struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof any;
    struct listener *listener = calloc(1, sizeof *listener);

    (void)context, (void)device;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0 || bind(listener->fd, (const struct sockaddr *)&any, length) != 0 ||
        listen(listener->fd, PENDING) != 0 || getsockname(listener->fd, (struct sockaddr *)&any, &length) != 0 ||
        getrandom(listener->address.token, TOKEN, 0) != TOKEN)
        return NCCL_SYSTEM_ERROR;
    listener->address.port = any.sin_port;
    memset(handle, 0, wrong("a handle is too long") ? NCCL_HANDLE_BYTES + 1 : NCCL_HANDLE_BYTES);
    memcpy(handle, &listener->address, sizeof listener->address);
    *out = listener;
    return NCCL_SUCCESS;
}

nccl_result reference_close_listen(void *arg)
{
    struct listener *listener = arg;

    if (!wrong("descriptors leak"))
        close(listener->fd);
    free(listener);
    return NCCL_SUCCESS;
}

static bool go_to(struct comm *comm, uint32_t rank, const struct address *address)
{
    const struct sockaddr_in to = { .sin_family = AF_INET,
                                    .sin_port = address->port,
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct address hello = *address;

    hello.rank = (uint16_t)comm->rank;
    comm->peer[rank].out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return connect(comm->peer[rank].out, (const struct sockaddr *)&to, sizeof to) == 0 &&
           send_bytes(comm->peer[rank].out, &hello, sizeof hello);
}

/* Somebody at the door who has not said who it is. */
struct pending {
    int fd;
    size_t have;
    struct address hello;
};

/* True when it is decided: it is a peer, or it is not and gone. */
static bool decide(struct comm *comm, const struct listener *listener, struct pending *p)
{
    const int flags = wrong("strangers are waited for") ? MSG_WAITALL : MSG_DONTWAIT;
    ssize_t n = recv(p->fd, (uint8_t *)&p->hello + p->have, sizeof p->hello - p->have, flags);

    if (n < 0 && errno == EAGAIN)
        return false;
    p->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && p->have < sizeof p->hello)
        return false;
    if (n <= 0 || (memcmp(p->hello.token, listener->address.token, TOKEN) != 0 && !wrong("strangers are let in")) ||
        p->hello.rank >= comm->ranks || comm->peer[p->hello.rank].in >= 0)
        close(p->fd);
    else
        comm->peer[p->hello.rank].in = p->fd;
    return true;
}

static bool all_came(const struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (comm->peer[r].in < 0)
            return false;
    return true;
}

static bool let_in(struct comm *comm, const struct listener *listener)
{
    const uint64_t end = ep_clock_ns() + CONNECT_MS * EP_NS_PER_MS;
    struct pending pending[PENDING];
    uint32_t n = 0;

    while (!all_came(comm) && (ep_clock_ns() < end || wrong("connect waits for ever"))) {
        int fd = n < PENDING ? accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC) : -1;

        if (fd >= 0)
            pending[n++] = (struct pending){ .fd = fd };
        for (uint32_t i = 0; i < n; i++)
            if (decide(comm, listener, &pending[i]))
                pending[i--] = pending[--n];
        if (fd < 0)
            nap_ms(1);
    }
    while (n > 0)
        close(pending[--n].fd);
    return all_came(comm);
}

static void start_threads(struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        struct peer *peer = &comm->peer[r];

        peer->out_bounce = malloc(BOUNCE + 1);
        peer->in_bounce = malloc(BOUNCE + 1);
        if (!peer->out_bounce || !peer->in_bounce || pthread_create(&peer->sender, NULL, run_sender, peer) != 0 ||
            pthread_create(&peer->receiver, NULL, run_receiver, peer) != 0)
            abort();
    }
}

static void give_up(struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (comm->peer[r].out >= 0)
            close(comm->peer[r].out);
        if (comm->peer[r].in >= 0)
            close(comm->peer[r].in);
    }
    free(comm);
}

nccl_result reference_connect(void *context, void *handles[], int ranks, int rank, void *listener, void **out)
{
    struct comm *comm = calloc(1, sizeof *comm);
    bool good = ranks <= RANKS && (context || !wrong("connect needs its context"));

    comm->ranks = (uint32_t)ranks;
    comm->rank = (uint32_t)rank;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    for (uint32_t r = 0; r < comm->ranks; r++)
        comm->peer[r] = (struct peer){ .comm = comm, .out = -1, .in = -1 };
    for (uint32_t r = 0; r < comm->ranks && good; r++)
        good = go_to(comm, r, handles[r]);
    if (!good || !let_in(comm, listener)) {
        give_up(comm);
        return NCCL_REMOTE_ERROR;
    }
    start_threads(comm);
    *out = comm;
    return NCCL_SUCCESS;
}

static void *sleep_for_ever(void *arg)
{
    nap_ms(3600000);
    return arg;
}

static void leak(void)
{
    pthread_t thread;

    if (wrong("threads leak") && pthread_create(&thread, NULL, sleep_for_ever, NULL) == 0)
        pthread_detach(thread);
    for (int i = 0; wrong("mappings leak") && i < 2; i++) /* of different kinds, or they would become one */
        mmap(NULL, 4096, i ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void close_peer(struct peer *peer)
{
    pthread_join(peer->sender, NULL);
    pthread_join(peer->receiver, NULL);
    close(peer->out);
    close(peer->in);
    free(peer->out_bounce);
    free(peer->in_bounce);
}

static void close_peers(struct comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->closing = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    for (uint32_t r = 0; r < comm->ranks; r++) {
        shutdown(comm->peer[r].out, SHUT_RDWR);
        shutdown(comm->peer[r].in, SHUT_RDWR);
    }
    for (uint32_t r = 0; r < comm->ranks; r++)
        close_peer(&comm->peer[r]);
}

nccl_result reference_close(void *arg)
{
    struct comm *comm = arg;

    close_peers(comm);
    for (uint32_t i = 0; i < comm->n_regions; i++)
        free(comm->region[i]);
    while (comm->all) {
        struct request *request = comm->all;

        comm->all = request->all;
        free(request);
    }
    leak();
    free(comm);
    return NCCL_SUCCESS;
}
