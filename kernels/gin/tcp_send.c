/* What is sent over TCP: puts, cut into pieces, on the connection that has the least to send. */
#include "tcp.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

enum { BATCH = 16 }; /* pieces in one system call */

/* ---- chunks ----------------------------------------------------------------------------------- */

static struct tcp_connection *least_queued(struct tcp_link *link)
{
    struct tcp_connection *least = &link->connections[0];

    for (uint32_t i = 1; i < link->n; i++)
        if (link->connections[i].queued < least->queued)
            least = &link->connections[i];
    return least;
}

static uint64_t length_of(const struct tcp_chunk *chunk)
{
    return sizeof chunk->message + chunk->message.bytes;
}

static void queue_chunk(struct tcp_link *link, uint32_t index)
{
    struct tcp_connection *c = least_queued(link);

    link->chunks[index].next = EP_GIN_TCP_CHUNKS;
    if (c->first == EP_GIN_TCP_CHUNKS)
        c->first = index;
    else
        link->chunks[c->last].next = index;
    c->last = index;
    c->queued += length_of(&link->chunks[index]);
}

static uint32_t unqueue_chunk(struct tcp_link *link, struct tcp_connection *c)
{
    const uint32_t index = c->first;

    c->first = link->chunks[index].next;
    c->queued -= length_of(&link->chunks[index]);
    return index;
}

/* False: no room. */
static bool stage(struct tcp_link *link, struct tcp_chunk *chunk, const uint8_t *from, uint32_t bytes)
{
    void *at;

    if (!ep_gin_staging_take(&link->staging, bytes, &chunk->staged, &at))
        return false;
    ep_gin_stream_copy(link->sender, at, from, bytes);
    chunk->payload = at;
    chunk->mark = ep_gin_stream_mark(link->sender);
    return true;
}

/* The next piece of the put.  False: no room. */
static bool start_piece(struct tcp_link *link, struct ep_gin_put *put)
{
    const uint64_t left = put->bytes - put->taken;
    const uint32_t bytes = left < link->peer->piece_bytes ? (uint32_t)left : link->peer->piece_bytes;
    const uint32_t index = link->free;
    struct tcp_chunk *chunk = &link->chunks[index];
    const uint32_t next = index < EP_GIN_TCP_CHUNKS ? chunk->next : EP_GIN_TCP_CHUNKS;

    if (index == EP_GIN_TCP_CHUNKS)
        return false;
    *chunk = (struct tcp_chunk){ .put = put, .staged = NO_STAGING, .next = next };
    if (bytes > 0 && put->source->type == NCCL_MEMORY_HOST)
        chunk->payload = put->from + put->taken;
    else if (bytes > 0 && !stage(link, chunk, put->from + put->taken, bytes))
        return false;
    ep_gin_put_message(put, put->taken, bytes, &chunk->message);
    chunk->message.flags = bytes > 0 ? EP_GIN_PAYLOAD : 0;
    put->taken += bytes;
    link->free = next;
    queue_chunk(link, index);
    return true;
}

bool ep_gin_tcp_put_start(void *opened, struct ep_gin_put *put)
{
    struct tcp_link *link = opened;

    do {
        if (!start_piece(link, put))
            return false;
    } while (put->taken < put->bytes);
    return true;
}

/* ---- sockets -------------------------------------------------------------------------------------- */

static void finish_chunk(struct tcp_link *link, struct tcp_connection *c)
{
    const uint32_t index = unqueue_chunk(link, c);
    struct tcp_chunk *chunk = &link->chunks[index];

    if (chunk->staged != NO_STAGING)
        ep_gin_staging_give(&link->staging, chunk->staged, 0);
    ep_gin_put_sent(chunk->put, chunk->message.bytes);
    chunk->next = link->free;
    link->free = index;
}

/* It passes through memory of the link's, which stays. */
static bool is_long(const struct tcp_link *link, const struct tcp_chunk *chunk)
{
    return link->movers && chunk->staged != NO_STAGING && chunk->message.bytes >= EP_GIN_TCP_LONG;
}

/* Message and payload but for the first `skip` bytes. */
static uint32_t describe(struct tcp_chunk *chunk, uint64_t skip, struct iovec *parts)
{
    const uint64_t head = sizeof chunk->message;
    uint32_t n = 0;

    if (skip < head)
        parts[n++] = (struct iovec){ .iov_base = (uint8_t *)&chunk->message + skip, .iov_len = head - skip };
    skip = skip < head ? 0 : skip - head;
    if (skip < chunk->message.bytes)
        parts[n++] = (struct iovec){ .iov_base = (void *)(uintptr_t)(chunk->payload + skip),
                                     .iov_len = chunk->message.bytes - skip };
    return n;
}

/* What goes in one call: of those that are ready the first ones that are long, or that are not. */
static uint32_t gather(struct tcp_link *link, const struct tcp_connection *c, bool longs, uint32_t most, struct iovec *parts)
{
    uint64_t skip = c->sent;
    uint32_t n = 0;

    for (uint32_t i = c->first; i < EP_GIN_TCP_CHUNKS && n + 2 <= most; i = link->chunks[i].next) {
        struct tcp_chunk *chunk = &link->chunks[i];

        if (is_long(link, chunk) != longs || !ep_gin_stream_reached(link->sender, chunk->mark))
            break;
        n += describe(chunk, skip, parts + n);
        skip = 0;
    }
    return n;
}

static void account(struct tcp_link *link, struct tcp_connection *c, uint64_t bytes)
{
    c->sent += bytes;
    while (c->first < EP_GIN_TCP_CHUNKS && c->sent >= length_of(&link->chunks[c->first])) {
        c->sent -= length_of(&link->chunks[c->first]);
        finish_chunk(link, c);
    }
}

/* True: all that is ready is with the kernel, which may take more. */
static bool send_some(struct tcp_link *link, struct tcp_connection *c)
{
    struct iovec parts[2 * BATCH];
    struct msghdr header = { .msg_iov = parts, .msg_iovlen = gather(link, c, false, 2 * BATCH, parts) };
    ssize_t n;

    /* A GPU that fails reaches every mark: asked again after these were. */
    if (header.msg_iovlen == 0 || !ep_gin_peer_is_served(link->peer))
        return false;
    n = sendmsg(c->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            ep_gin_peer_lost(link->peer, strerror(errno));
        return false;
    }
    account(link, c, (uint64_t)n);
    return true;
}

/* By a mover. */
static void send_long(struct tcp_link *link, struct tcp_connection *c)
{
    if (!link->movers)
        return;
    c->out.parts = gather(link, c, true, EP_GIN_MOVE_PARTS, c->out.part);
    c->seen = 0;
    c->sending = c->out.parts > 0 && ep_gin_peer_is_served(link->peer); /* asked after the marks, as in send_some() */
    if (c->sending)
        ep_gin_move_start(&c->out);
}

static void account_move(struct tcp_link *link, struct tcp_connection *c)
{
    const uint64_t moved = ep_gin_move_moved(&c->out);

    account(link, c, moved - c->seen);
    c->seen = moved;
}

/* False: a mover has the connection. */
static bool take_back(struct tcp_link *link, struct tcp_connection *c)
{
    if (!c->sending)
        return true;
    c->sending = !ep_gin_move_over(&c->out);
    account_move(link, c);
    if (!c->sending && c->out.failure)
        ep_gin_peer_lost(link->peer, strerror(c->out.failure));
    else if (c->sending && !ep_gin_peer_is_served(link->peer))
        shutdown(c->fd, SHUT_WR); /* so it ends */
    return !c->sending;
}

/* Of a peer that is gone: a source is free when the copy from it is over. */
static void drop_chunks(struct tcp_link *link, struct tcp_connection *c)
{
    while (c->first < EP_GIN_TCP_CHUNKS && ep_gin_stream_reached(link->sender, link->chunks[c->first].mark))
        finish_chunk(link, c);
}

void ep_gin_tcp_progress(void *opened)
{
    struct tcp_link *link = opened;

    ep_gin_stream_flush(link->sender);
    for (uint32_t i = 0; i < link->n; i++) {
        struct tcp_connection *c = &link->connections[i];

        if (!take_back(link, c))
            continue;
        while (send_some(link, c))
            ;
        send_long(link, c);
        if (!ep_gin_peer_is_served(link->peer) && !c->sending)
            drop_chunks(link, c);
    }
    ep_gin_staging_reclaim(&link->staging, link->sender);
}
