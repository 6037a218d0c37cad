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
 * have landed.  All else, what is short above all, is sent and received here, as it comes.
 */
#include "movers.h"
#include "transport.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CHUNKS = EP_GIN_PIECES, /* pieces of a link, to be sent */
    BATCH = 16,             /* pieces in one system call */
    BUFFER = 8 << 10,       /* bytes in one, of small messages */
    LONG_BYTES = 64 << 10,  /* of a payload, from which on a mover is worth being woken */
    TURN = 16,              /* messages and payloads from one connection, then the others */
    PLACES = 16,            /* for long payloads of a connection, a power of two */
    LINGER_STEP_US = 100
};
#define NO_STAGING UINT32_MAX

/* A piece on its way out. */
struct chunk {
    struct ep_gin_message message;
    struct ep_gin_put *put;
    const uint8_t *payload;
    uint64_t mark;   /* of the sender's stream, after which the payload is there */
    uint32_t staged; /* piece of the staging memory */
    uint32_t next;   /* of its connection, or free; CHUNKS: none */
};

/* A piece on its way in. */
struct incoming {
    struct ep_gin_message message;
    uint8_t *to; /* NULL: nobody wants it */
    uint32_t staged;
    uint32_t got; /* bytes of the payload */
    bool under_way;
};

/* A place for a piece that a mover brings, and what has come there. */
struct arrival {
    struct ep_gin_message message;
    uint8_t *at; /* staging memory, for the longest there may be */
    uint32_t staged;
};

struct connection {
    int fd;
    uint32_t piece_bytes; /* at most, of the peer's */
    /* progress */
    uint32_t first, last; /* chunks */
    uint64_t queued;      /* bytes */
    uint64_t sent;        /* of the first chunk, message and payload */
    struct ep_gin_move out;
    bool sending;         /* it is under way, or what became of it was not looked at */
    uint64_t seen;        /* bytes of it */
    /* receive */
    bool held; /* something in the buffer has not been taken */
    bool ended; /* nothing more comes */
    struct incoming in;
    struct ep_gin_move brought;
    bool receiving; /* as sending */
    struct arrival arrivals[PLACES]; /* from landed to offered the mover's */
    uint32_t offered;                /* so far; atomic: the mover reads it */
    uint32_t taken;
    struct ep_gin_staging staging;
    /* receive, and the mover's while it is receiving */
    uint32_t start, end; /* in the buffer */
    uint8_t buffer[BUFFER];
    bool heading;        /* it waits for a message, not for a payload */
    uint32_t landed;     /* so far; atomic: the receive thread reads it */
};

/* Of all links of a communicator. */
struct tcp_shared {
    struct ep_gin_stream sender;
    struct ep_gin_movers *movers; /* NULL: none */
};

struct tcp_link {
    struct ep_gin_comm *comm;
    struct ep_gin_peer *peer;
    struct ep_gin_stream *sender; /* the shared ones */
    struct ep_gin_movers *movers;
    uint32_t n;
    struct connection *connections; /* [n] */
    struct chunk chunks[CHUNKS];
    uint32_t free;
    struct ep_gin_staging staging;
    void *pages; /* of all staging memory */
    uint64_t pages_bytes;
};

/* ---- opening ---------------------------------------------------------------------------------------- */

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

static bool more(void *user);

static ep_status open_moves(struct tcp_link *link, struct connection *c, struct ep_error *error)
{
    ep_status status;

    if (!link->movers)
        return EP_OK;
    status = ep_gin_move_open(link->movers, c->fd, true, &c->out, error);
    if (status == EP_OK)
        status = ep_gin_move_open(link->movers, c->fd, false, &c->brought, error);
    c->brought.more = more;
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
        link->connections[i].first = link->connections[i].last = CHUNKS;
        link->peer->data[i] = -1; /* it is the link's now */
    }
    for (uint32_t i = 0; i < CHUNKS; i++)
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

/* ---- sending: chunks ----------------------------------------------------------------------------------- */

static struct connection *least_queued(struct tcp_link *link)
{
    struct connection *least = &link->connections[0];

    for (uint32_t i = 1; i < link->n; i++)
        if (link->connections[i].queued < least->queued)
            least = &link->connections[i];
    return least;
}

static uint64_t length_of(const struct chunk *chunk)
{
    return sizeof chunk->message + chunk->message.bytes;
}

static void queue_chunk(struct tcp_link *link, uint32_t index)
{
    struct connection *c = least_queued(link);

    link->chunks[index].next = CHUNKS;
    if (c->first == CHUNKS)
        c->first = index;
    else
        link->chunks[c->last].next = index;
    c->last = index;
    c->queued += length_of(&link->chunks[index]);
}

static uint32_t unqueue_chunk(struct tcp_link *link, struct connection *c)
{
    const uint32_t index = c->first;

    c->first = link->chunks[index].next;
    c->queued -= length_of(&link->chunks[index]);
    return index;
}

/* False: no room. */
static bool stage(struct tcp_link *link, struct chunk *chunk, const uint8_t *from, uint32_t bytes)
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
    struct chunk *chunk = &link->chunks[index];
    const uint32_t next = index < CHUNKS ? chunk->next : CHUNKS;

    if (index == CHUNKS)
        return false;
    *chunk = (struct chunk){ .put = put, .staged = NO_STAGING, .next = next };
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

static bool tcp_put_start(void *opened, struct ep_gin_put *put)
{
    struct tcp_link *link = opened;

    do {
        if (!start_piece(link, put))
            return false;
    } while (put->taken < put->bytes);
    return true;
}

/* ---- sending: sockets -------------------------------------------------------------------------------------- */

static void finish_chunk(struct tcp_link *link, struct connection *c)
{
    const uint32_t index = unqueue_chunk(link, c);
    struct chunk *chunk = &link->chunks[index];

    if (chunk->staged != NO_STAGING)
        ep_gin_staging_give(&link->staging, chunk->staged, 0);
    ep_gin_put_sent(chunk->put, chunk->message.bytes);
    chunk->next = link->free;
    link->free = index;
}

/* It passes through memory of the link's, which stays. */
static bool is_long(const struct tcp_link *link, const struct chunk *chunk)
{
    return link->movers && chunk->staged != NO_STAGING && chunk->message.bytes >= LONG_BYTES;
}

/* Message and payload but for the first `skip` bytes. */
static uint32_t describe(struct chunk *chunk, uint64_t skip, struct iovec *parts)
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
static uint32_t gather(struct tcp_link *link, const struct connection *c, bool longs, uint32_t most, struct iovec *parts)
{
    uint64_t skip = c->sent;
    uint32_t n = 0;

    for (uint32_t i = c->first; i < CHUNKS && n + 2 <= most; i = link->chunks[i].next) {
        struct chunk *chunk = &link->chunks[i];

        if (is_long(link, chunk) != longs || !ep_gin_stream_reached(link->sender, chunk->mark))
            break;
        n += describe(chunk, skip, parts + n);
        skip = 0;
    }
    return n;
}

static void account(struct tcp_link *link, struct connection *c, uint64_t bytes)
{
    c->sent += bytes;
    while (c->first < CHUNKS && c->sent >= length_of(&link->chunks[c->first])) {
        c->sent -= length_of(&link->chunks[c->first]);
        finish_chunk(link, c);
    }
}

/* True: all that is ready is with the kernel, which may take more. */
static bool send_some(struct tcp_link *link, struct connection *c)
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
static void send_long(struct tcp_link *link, struct connection *c)
{
    if (!link->movers)
        return;
    c->out.parts = gather(link, c, true, EP_GIN_MOVE_PARTS, c->out.part);
    c->seen = 0;
    c->sending = c->out.parts > 0 && ep_gin_peer_is_served(link->peer); /* asked after the marks, as in send_some() */
    if (c->sending)
        ep_gin_move_start(&c->out);
}

static void account_move(struct tcp_link *link, struct connection *c)
{
    const uint64_t moved = ep_gin_move_moved(&c->out);

    account(link, c, moved - c->seen);
    c->seen = moved;
}

/* False: a mover has the connection. */
static bool take_back(struct tcp_link *link, struct connection *c)
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
static void drop_chunks(struct tcp_link *link, struct connection *c)
{
    while (c->first < CHUNKS && ep_gin_stream_reached(link->sender, link->chunks[c->first].mark))
        finish_chunk(link, c);
}

static void tcp_progress(void *opened)
{
    struct tcp_link *link = opened;

    ep_gin_stream_flush(link->sender);
    for (uint32_t i = 0; i < link->n; i++) {
        struct connection *c = &link->connections[i];

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

/* ---- receiving ------------------------------------------------------------------------------------------------- */

/* After one: there may be more; nothing more is there; it waits for other pieces, for staging memory or a mover, and is
 * tried again; the connection is of no use any more. */
enum step { STEP_ON, STEP_EMPTY, STEP_LATER, STEP_FULL, STEP_MOVES, STEP_BROKEN };

static uint32_t buffered(const struct connection *c)
{
    return c->end - c->start;
}

static enum step receive(struct connection *c, void *to, size_t bytes, ssize_t *n)
{
    *n = recv(c->fd, to, bytes, MSG_DONTWAIT);
    if (*n > 0)
        return STEP_ON;
    return *n < 0 && (errno == EAGAIN || errno == EINTR) ? STEP_EMPTY : STEP_BROKEN;
}

static enum step fill_buffer(struct connection *c)
{
    enum step step;
    ssize_t n;

    memmove(c->buffer, c->buffer + c->start, buffered(c));
    c->end = buffered(c);
    c->start = 0;
    step = receive(c, c->buffer + c->end, BUFFER - c->end, &n);
    if (step == STEP_ON)
        c->end += (uint32_t)n;
    return step;
}

static enum step refuse(struct tcp_link *link)
{
    ep_gin_count(link->comm, &link->comm->counts.bad_messages, "a message that no rank sends");
    return STEP_BROKEN;
}

/* From the staging memory to where it belongs: to, or NULL where that has gone. */
static void unstage(struct tcp_link *link, struct connection *c, uint32_t staged, const uint8_t *at,
                    const struct ep_gin_region *region, void *to, uint32_t bytes)
{
    struct ep_gin_stream *receiver = &link->comm->receiver;
    uint64_t mark = 0;

    if (to && region->type == NCCL_MEMORY_CUDA) {
        ep_gin_stream_copy(receiver, to, at, bytes);
        mark = ep_gin_stream_mark(receiver);
    } else if (to)
        memcpy(to, at, bytes);
    ep_gin_staging_give(&c->staging, staged, mark);
}

/* ---- receiving: by a mover ----------------------------------------------------------------------------------- */

static bool carried(const struct connection *c, const struct ep_gin_message *m)
{
    return m->flags & EP_GIN_PAYLOAD && m->bytes >= LONG_BYTES && ep_gin_message_valid(m, c->piece_bytes);
}

/* The payload of the message that is next in the buffer, at the next place. */
static void await_payload(struct connection *c, const struct ep_gin_message *m)
{
    struct arrival *a = &c->arrivals[c->landed % PLACES];
    uint32_t n;

    _Static_assert(BUFFER < LONG_BYTES, "the buffer never holds all of it");
    a->message = *m;
    c->start += (uint32_t)sizeof *m;
    n = buffered(c);
    memcpy(a->at, c->buffer + c->start, n);
    c->start = c->end = 0;
    c->brought.part[0] = (struct iovec){ .iov_base = a->at + n, .iov_len = m->bytes - n };
    c->brought.parts = 1;
    c->heading = false;
}

static bool await_message(struct connection *c)
{
    if (c->landed == __atomic_load_n(&c->offered, __ATOMIC_ACQUIRE)) /* partner: offer */
        return false;
    c->brought.part[0] = (struct iovec){ .iov_base = c->buffer, .iov_len = sizeof(struct ep_gin_message) };
    c->brought.parts = 1;
    c->heading = true;
    return true;
}

/* Asked by the mover, which has brought all of a payload, or of a message. */
static bool more(void *user)
{
    struct connection *c = user;
    struct ep_gin_message m;

    if (!c->heading) {
        __atomic_store_n(&c->landed, c->landed + 1, __ATOMIC_RELEASE); /* partner: take_brought */
        return await_message(c);
    }
    memcpy(&m, c->buffer, sizeof m);
    c->end = sizeof m;
    if (!carried(c, &m))
        return false;
    await_payload(c, &m);
    return true;
}

/* Places, as many as there is memory for. */
static void offer(struct tcp_link *link, struct connection *c)
{
    uint32_t offered = c->offered;
    void *at;

    ep_gin_staging_reclaim(&c->staging, &link->comm->receiver);
    while (offered - c->taken < PLACES) {
        struct arrival *a = &c->arrivals[offered % PLACES];

        if (!ep_gin_staging_take(&c->staging, c->piece_bytes, &a->staged, &at))
            break;
        a->at = at;
        offered++;
    }
    __atomic_store_n(&c->offered, offered, __ATOMIC_RELEASE); /* partner: await_message */
}

/* Staging memory becomes free in the order in which it was taken: places that are not used may not stay. */
static void withdraw(struct connection *c)
{
    for (; c->offered != c->landed; c->offered--)
        ep_gin_staging_give(&c->staging, c->arrivals[(c->offered - 1) % PLACES].staged, 0);
}

static enum step start_move(struct tcp_link *link, struct connection *c)
{
    offer(link, c);
    if (c->offered == c->landed)
        return STEP_FULL;
    await_payload(c, &c->in.message);
    c->receiving = true;
    ep_gin_move_start(&c->brought);
    return STEP_MOVES;
}

static enum step take_arrival(struct tcp_link *link, struct connection *c)
{
    const struct arrival *a = &c->arrivals[c->taken % PLACES];
    const struct ep_gin_region *region;
    void *to;

    switch (ep_gin_judge(link->peer, &a->message, &region, &to)) {
    case EP_GIN_REFUSE: return refuse(link);
    case EP_GIN_LATER: return STEP_LATER;
    case EP_GIN_TAKE:
    case EP_GIN_DROP: break;
    }
    unstage(link, c, a->staged, a->at, region, to, a->message.bytes);
    c->taken++;
    return ep_gin_landed(link->peer, &a->message) ? STEP_ON : refuse(link);
}

/* What a mover has brought, one after the other. */
static enum step take_brought(struct tcp_link *link, struct connection *c)
{
    const bool over = ep_gin_move_over(&c->brought); /* if so, nothing lands any more */
    enum step s;

    if (c->taken != __atomic_load_n(&c->landed, __ATOMIC_ACQUIRE)) { /* partner: more */
        s = take_arrival(link, c);
        if (s == STEP_ON && !over)
            offer(link, c);
        return s;
    }
    if (!over)
        return STEP_MOVES;
    c->receiving = false;
    withdraw(c);
    return c->brought.failure ? STEP_BROKEN : STEP_ON;
}

/* ---- receiving: here ------------------------------------------------------------------------------------------- */

/* Where the payload goes on its way to `to`.  False: no room now. */
static bool place(struct tcp_link *link, struct connection *c, const struct ep_gin_region *region, void *to)
{
    void *at = to;

    c->in.staged = NO_STAGING;
    if (region && region->type == NCCL_MEMORY_CUDA) {
        ep_gin_staging_reclaim(&c->staging, &link->comm->receiver);
        if (!ep_gin_staging_take(&c->staging, c->in.message.bytes, &c->in.staged, &at))
            return false;
    }
    c->in.to = at;
    c->in.got = 0;
    c->in.under_way = true;
    return true;
}

static enum step begin(struct tcp_link *link, struct connection *c)
{
    const struct ep_gin_region *region;
    void *to;

    memcpy(&c->in.message, c->buffer + c->start, sizeof c->in.message);
    if (link->movers && carried(c, &c->in.message))
        return start_move(link, c);
    switch (ep_gin_judge(link->peer, &c->in.message, &region, &to)) {
    case EP_GIN_REFUSE: return refuse(link);
    case EP_GIN_LATER: return STEP_LATER;
    case EP_GIN_TAKE:
    case EP_GIN_DROP: break;
    }
    if (!(c->in.message.flags & EP_GIN_PAYLOAD)) {
        c->start += (uint32_t)sizeof c->in.message;
        return ep_gin_landed(link->peer, &c->in.message) ? STEP_ON : refuse(link);
    }
    if (!place(link, c, region, to))
        return STEP_FULL;
    c->start += (uint32_t)sizeof c->in.message;
    return STEP_ON;
}

/* Bytes that nobody wants pass through the buffer. */
static enum step read_payload(struct connection *c)
{
    const uint32_t left = c->in.message.bytes - c->in.got;
    enum step step;
    ssize_t n;

    if (buffered(c) > 0) {
        n = buffered(c) < left ? buffered(c) : left;
        if (c->in.to)
            memcpy(c->in.to + c->in.got, c->buffer + c->start, (size_t)n);
        c->start += (uint32_t)n;
    } else {
        step = c->in.to ? receive(c, c->in.to + c->in.got, left, &n)
                        : receive(c, c->buffer, left < BUFFER ? left : BUFFER, &n);
        if (step != STEP_ON)
            return step;
    }
    c->in.got += (uint32_t)n;
    return STEP_ON;
}

static enum step finish(struct tcp_link *link, struct connection *c)
{
    const struct ep_gin_message *m = &c->in.message;
    const struct ep_gin_region *region = ep_gin_region_of(link->comm, m->region); /* it may have gone meanwhile */

    if (c->in.staged != NO_STAGING)
        unstage(link, c, c->in.staged, c->in.to, region, region ? region->at + m->offset : NULL, m->bytes);
    c->in.under_way = false;
    return ep_gin_landed(link->peer, m) ? STEP_ON : refuse(link);
}

static enum step step(struct tcp_link *link, struct connection *c)
{
    enum step s;

    if (!c->in.under_way) {
        if (buffered(c) < sizeof c->in.message) {
            s = fill_buffer(c);
            return s == STEP_ON && buffered(c) < sizeof c->in.message ? STEP_EMPTY : s;
        }
        return begin(link, c);
    }
    s = read_payload(c);
    if (s == STEP_ON && c->in.got == c->in.message.bytes)
        return finish(link, c);
    return s;
}

/* A region may have gone since the last turn: nothing more is received into it. */
static void look_again(struct tcp_link *link, struct connection *c)
{
    if (c->in.under_way && c->in.staged == NO_STAGING && !ep_gin_region_of(link->comm, c->in.message.region))
        c->in.to = NULL;
}

/* What a broken connection was to carry does not come any more: the peer is of no use. */
static void hang_up(struct tcp_link *link, struct connection *c)
{
    ep_gin_unwatch(link->comm, c->fd);
    shutdown(c->fd, SHUT_RDWR);
    c->held = false;
    c->ended = true;
    ep_gin_peer_lost(link->peer, "a connection is closed");
}

static bool tcp_ready(void *opened, uint32_t index)
{
    struct tcp_link *link = opened;
    struct connection *c = &link->connections[index];
    enum step s = STEP_ON;
    uint32_t n = 0;

    look_again(link, c);
    for (; n < TURN && s == STEP_ON; n++)
        s = c->receiving ? take_brought(link, c) : step(link, c);
    c->held = s != STEP_EMPTY && s != STEP_BROKEN;
    if (s == STEP_BROKEN)
        hang_up(link, c);
    /* The GPU tells nobody when memory is free: who waits for it goes on looking.  A mover wakes who sleeps. */
    return n > 1 || s == STEP_ON || s == STEP_FULL || s == STEP_BROKEN;
}

/* What is in a buffer already is told by nobody. */
static bool tcp_poll(void *opened)
{
    struct tcp_link *link = opened;
    bool found = false;

    for (uint32_t i = 0; i < link->n; i++)
        if (link->connections[i].held)
            found |= tcp_ready(link, i);
    return found;
}

/* A peer that goes closes its connections; what it sent lies before that. */
static bool tcp_drained(void *opened)
{
    const struct tcp_link *link = opened;

    for (uint32_t i = 0; i < link->n; i++)
        if (!link->connections[i].ended)
            return false;
    return true;
}

const struct ep_gin_transport ep_gin_tcp = {
    .name = "tcp",
    .usable = tcp_usable,
    .start = tcp_start,
    .stop = tcp_stop,
    .link_open = tcp_link_open,
    .link_connect = tcp_link_connect,
    .link_close = tcp_link_close,
    .put_start = tcp_put_start,
    .progress = tcp_progress,
    .poll = tcp_poll,
    .ready = tcp_ready,
    .drained = tcp_drained,
};
