/*
 * Puts over TCP: from anywhere to anywhere.
 *
 * A put is cut into pieces, and a piece goes over the connection that has the least to send.  What comes from the GPU
 * passes through pinned memory on both sides: pieces are copied there and sent when the copy is over, while the next
 * ones are copied; the receiver reads into pinned memory and copies on from there, in the order of its stream.
 * Host memory is sent from and received into where it is.
 *
 * Between socket and pinned memory long payloads are carried by movers.  A mover that receives goes on with the message
 * behind the payload, as long as these are long and there are places for them; where they belong is looked up when they
 * have landed.  All else, what is short above all, progress sends and the receive thread receives as it comes.
 */
#include "tcp.h"

#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LINGER_STEP_US = 100 };

/* Of all links of a communicator. */
struct tcp_shared {
    struct ep_gin_stream sender;
    struct ep_gin_movers *movers; /* NULL: none */
};

/* ---- links ------------------------------------------------------------------------------------------ */

static ep_status tcp_usable(struct ep_gin_comm *comm, struct ep_error *error)
{
    (void)comm, (void)error;
    return EP_OK;
}

static void tcp_stop(void *opened)
{
    struct tcp_shared *shared = opened;

    ep_gin_movers_close(shared->movers);
    ep_gin_stream_close(&shared->sender);
    ep_gin_marker_close(shared->sender.comm, shared->sender.marker);
    free(shared);
}

/* One stream brings what is sent to all peers: they share the way from the GPU anyway. */
static ep_status open_sender(struct ep_gin_comm *comm, struct ep_gin_stream *sender, struct ep_error *error)
{
    struct ep_cuda_marker *marker;
    ep_status status = ep_gin_marker_open(comm, &marker, error);

    sender->comm = comm;
    return status == EP_OK ? ep_gin_stream_open(comm, sender, marker, error) : status;
}

/* Anything from a GPU, but for what other transports cannot reach. */
static bool wants_movers(const struct ep_gin_comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (comm->cuda && r != comm->rank && comm->peers[r].chosen == EP_GIN_TCP)
            return comm->settings.movers > 0;
    return false;
}

static ep_status tcp_start(struct ep_gin_comm *comm, void **out, struct ep_error *error)
{
    struct tcp_shared *shared = calloc(1, sizeof *shared);
    ep_status status;

    if (!shared)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a stream");
    status = open_sender(comm, &shared->sender, error);
    if (status == EP_OK && wants_movers(comm))
        status = ep_gin_movers_open(comm, comm->settings.movers, &shared->movers, error);
    if (status == EP_OK)
        *out = shared;
    else
        tcp_stop(shared);
    return status;
}

/* Two pieces for each connection, one that is copied and one on the way, or what is this link's part of all there
 * may be.  A spare link has little to carry. */
static uint64_t staging_bytes(const struct tcp_link *link)
{
    const uint64_t least = 2ull * link->peer->piece_bytes;
    const uint64_t part = link->comm->settings.staging_bytes / link->comm->ranks / link->n / 4096 * 4096;

    return part < least || link->peer->chosen != EP_GIN_TCP ? least : part;
}

static ep_status open_staging(struct tcp_link *link, struct ep_error *error)
{
    const uint64_t each = staging_bytes(link);
    uint8_t *at;
    ep_status status;

    if (!link->comm->cuda)
        return EP_OK;
    link->pages_bytes = 2 * each * link->n;
    status = ep_gin_pages_open(link->comm, link->pages_bytes, &link->pages, error);
    if (status != EP_OK)
        return status;
    at = link->pages;
    link->staging = (struct ep_gin_staging){ .at = at, .bytes = each * link->n };
    for (uint32_t i = 0; i < link->n; i++)
        link->connections[i].staging = (struct ep_gin_staging){ .at = at + (link->n + i) * each, .bytes = each };
    return EP_OK;
}

static ep_status open_moves(struct tcp_link *link, struct tcp_connection *c, struct ep_error *error)
{
    ep_status status;

    if (!link->movers)
        return EP_OK;
    status = ep_gin_move_open(link->movers, c->fd, true, &c->out, error);
    if (status == EP_OK)
        status = ep_gin_move_open(link->movers, c->fd, false, &c->brought, error);
    c->brought.more = ep_gin_tcp_more;
    c->brought.user = c;
    return status;
}

static ep_status open_connections(struct tcp_link *link, struct ep_error *error)
{
    ep_status status = EP_OK;

    link->connections = calloc(link->n, sizeof *link->connections);
    if (!link->connections)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u connections", link->n);
    for (uint32_t i = 0; i < link->n; i++) {
        link->connections[i].fd = link->peer->data[i];
        link->connections[i].piece_bytes = link->peer->piece_bytes;
        link->connections[i].first = link->connections[i].last = EP_GIN_TCP_CHUNKS;
        link->peer->data[i] = -1; /* it is the link's now */
    }
    for (uint32_t i = 0; i < EP_GIN_TCP_CHUNKS; i++)
        link->chunks[i].next = i + 1;
    for (uint32_t i = 0; i < link->n && status == EP_OK; i++) {
        status = open_moves(link, &link->connections[i], error);
        if (status == EP_OK)
            status = ep_gin_watch(link->comm, link->peer, link, i, link->connections[i].fd, error);
    }
    return status;
}

/* What is with the kernel and not with the peer's is thrown away when there is something left to be read, too. */
static void linger(const struct tcp_link *link, int fd)
{
    const uint64_t end = link->comm->linger_until;
    int left = 0;

    shutdown(fd, SHUT_WR);
    while (!ep_gin_peer_is_lost(link->peer) && ioctl(fd, SIOCOUTQ, &left) == 0 && left > 0 && ep_clock_ns() < end)
        usleep(LINGER_STEP_US);
}

static void tcp_link_close(void *opened)
{
    struct tcp_link *link = opened;

    for (uint32_t i = 0; link->connections && i < link->n; i++) {
        ep_gin_move_close(&link->connections[i].out);
        ep_gin_move_close(&link->connections[i].brought);
        linger(link, link->connections[i].fd);
        close(link->connections[i].fd);
    }
    if (link->pages)
        ep_gin_stream_settle(link->sender);
    ep_gin_pages_close(link->comm, link->pages, link->pages_bytes);
    free(link->connections);
    free(link);
}

static ep_status tcp_link_open(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void **out, struct ep_gin_card *mine,
                               struct ep_error *error)
{
    struct tcp_link *link = calloc(1, sizeof *link);
    struct tcp_shared *shared = comm->shared[EP_GIN_TCP];

    (void)mine;
    if (!link)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a link to rank %u", peer->rank);
    link->comm = comm;
    link->peer = peer;
    link->sender = &shared->sender;
    link->movers = peer->chosen == EP_GIN_TCP ? shared->movers : NULL;
    link->n = peer->connections;
    *out = link;
    return EP_OK;
}

/* What is watched is known to the peer by now. */
static ep_status tcp_link_connect(void *opened, const struct ep_gin_card *theirs, struct ep_error *error)
{
    struct tcp_link *link = opened;
    ep_status status = open_connections(link, error);

    (void)theirs;
    return status == EP_OK ? open_staging(link, error) : status;
}

const struct ep_gin_transport ep_gin_tcp = {
    .name = "tcp",
    .usable = tcp_usable,
    .start = tcp_start,
    .stop = tcp_stop,
    .link_open = tcp_link_open,
    .link_connect = tcp_link_connect,
    .link_close = tcp_link_close,
    .put_start = ep_gin_tcp_put_start,
    .progress = ep_gin_tcp_progress,
    .poll = ep_gin_tcp_poll,
    .ready = ep_gin_tcp_ready,
    .drained = ep_gin_tcp_drained,
};
