/* What comes over TCP: messages, and their payloads.  Which of them movers bring, transport_tcp.c says. */
#include "tcp.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

enum { TURN = 16 }; /* messages and payloads from one connection, then the others */

/* ---- a socket ------------------------------------------------------------------------------------------------ */

/* After one: there may be more; nothing more is there; it waits for other pieces, for staging memory or a mover, and is
 * tried again; the connection is of no use any more. */
enum step { STEP_ON, STEP_EMPTY, STEP_LATER, STEP_FULL, STEP_MOVES, STEP_BROKEN };

static uint32_t buffered(const struct tcp_connection *c)
{
    return c->end - c->start;
}

static enum step receive(struct tcp_connection *c, void *to, size_t bytes, ssize_t *n)
{
    *n = recv(c->fd, to, bytes, MSG_DONTWAIT);
    if (*n > 0)
        return STEP_ON;
    return *n < 0 && (errno == EAGAIN || errno == EINTR) ? STEP_EMPTY : STEP_BROKEN;
}

static enum step fill_buffer(struct tcp_connection *c)
{
    enum step step;
    ssize_t n;

    memmove(c->buffer, c->buffer + c->start, buffered(c));
    c->end = buffered(c);
    c->start = 0;
    step = receive(c, c->buffer + c->end, EP_GIN_TCP_BUFFER - c->end, &n);
    if (step == STEP_ON)
        c->end += (uint32_t)n;
    return step;
}

static enum step refuse(struct tcp_link *link)
{
    ep_gin_count(link->comm, &link->comm->counts.bad_messages, "a message that no rank sends");
    return STEP_BROKEN;
}

/* STEP_ON: it can be taken up.  to is NULL where nobody wants its payload, or it has none. */
static enum step judge(struct tcp_link *link, const struct ep_gin_message *m, const struct ep_gin_region **region, void **to)
{
    switch (ep_gin_judge(link->peer, m, region, to)) {
    case EP_GIN_REFUSE: return refuse(link);
    case EP_GIN_LATER: return STEP_LATER;
    case EP_GIN_TAKE:
    case EP_GIN_DROP: break;
    }
    return STEP_ON;
}

/* From the staging memory to where it belongs: to, or NULL where that has gone. */
static void unstage(struct tcp_link *link, struct tcp_connection *c, uint32_t staged, const uint8_t *at,
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

/* ---- by a mover ---------------------------------------------------------------------------------------------- */

static bool carried(const struct tcp_connection *c, const struct ep_gin_message *m)
{
    return m->flags & EP_GIN_PAYLOAD && m->bytes >= EP_GIN_TCP_LONG && ep_gin_message_valid(m, c->piece_bytes);
}

/* The payload of the message that is next in the buffer, at the next place. */
static void await_payload(struct tcp_connection *c, const struct ep_gin_message *m)
{
    struct tcp_arrival *a = &c->arrivals[c->landed % EP_GIN_TCP_PLACES];
    uint32_t n;

    _Static_assert(EP_GIN_TCP_BUFFER < EP_GIN_TCP_LONG, "the buffer never holds all of it");
    a->message = *m;
    c->start += (uint32_t)sizeof *m;
    n = buffered(c);
    memcpy(a->at, c->buffer + c->start, n);
    c->start = c->end = 0;
    c->brought.part[0] = (struct iovec){ .iov_base = a->at + n, .iov_len = m->bytes - n };
    c->brought.parts = 1;
    c->heading = false;
}

static bool await_message(struct tcp_connection *c)
{
    if (c->landed == __atomic_load_n(&c->offered, __ATOMIC_ACQUIRE)) /* partner: offer */
        return false;
    c->brought.part[0] = (struct iovec){ .iov_base = c->buffer, .iov_len = sizeof(struct ep_gin_message) };
    c->brought.parts = 1;
    c->heading = true;
    return true;
}

/* Asked by the mover, which has brought all of a payload, or of a message. */
bool ep_gin_tcp_more(void *user)
{
    struct tcp_connection *c = user;
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
static void offer(struct tcp_link *link, struct tcp_connection *c)
{
    uint32_t offered = c->offered;
    void *at;

    ep_gin_staging_reclaim(&c->staging, &link->comm->receiver);
    while (offered - c->taken < EP_GIN_TCP_PLACES) {
        struct tcp_arrival *a = &c->arrivals[offered % EP_GIN_TCP_PLACES];

        if (!ep_gin_staging_take(&c->staging, c->piece_bytes, &a->staged, &at))
            break;
        a->at = at;
        offered++;
    }
    __atomic_store_n(&c->offered, offered, __ATOMIC_RELEASE); /* partner: await_message */
}

/* Staging memory becomes free in the order in which it was taken: places that are not used may not stay. */
static void withdraw(struct tcp_connection *c)
{
    for (; c->offered != c->landed; c->offered--)
        ep_gin_staging_give(&c->staging, c->arrivals[(c->offered - 1) % EP_GIN_TCP_PLACES].staged, 0);
}

static enum step start_move(struct tcp_link *link, struct tcp_connection *c)
{
    offer(link, c);
    if (c->offered == c->landed)
        return STEP_FULL;
    await_payload(c, &c->in.message);
    c->receiving = true;
    ep_gin_move_start(&c->brought);
    return STEP_MOVES;
}

static enum step take_arrival(struct tcp_link *link, struct tcp_connection *c)
{
    const struct tcp_arrival *a = &c->arrivals[c->taken % EP_GIN_TCP_PLACES];
    const struct ep_gin_region *region;
    void *to;
    const enum step s = judge(link, &a->message, &region, &to);

    if (s != STEP_ON)
        return s;
    unstage(link, c, a->staged, a->at, region, to, a->message.bytes);
    c->taken++;
    return ep_gin_landed(link->peer, &a->message) ? STEP_ON : refuse(link);
}

/* What a mover has brought, one after the other. */
static enum step take_brought(struct tcp_link *link, struct tcp_connection *c)
{
    const bool over = ep_gin_move_over(&c->brought); /* if so, nothing lands any more */
    enum step s;

    if (c->taken != __atomic_load_n(&c->landed, __ATOMIC_ACQUIRE)) { /* partner: ep_gin_tcp_more */
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

/* ---- by the receive thread ----------------------------------------------------------------------------------- */

/* Where the payload goes on its way to `to`.  False: no room now. */
static bool place(struct tcp_link *link, struct tcp_connection *c, const struct ep_gin_region *region, void *to)
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

static enum step begin(struct tcp_link *link, struct tcp_connection *c)
{
    const struct ep_gin_region *region;
    enum step s;
    void *to;

    memcpy(&c->in.message, c->buffer + c->start, sizeof c->in.message);
    if (link->movers && carried(c, &c->in.message))
        return start_move(link, c);
    s = judge(link, &c->in.message, &region, &to);
    if (s != STEP_ON)
        return s;
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
static enum step read_payload(struct tcp_connection *c)
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
                        : receive(c, c->buffer, left < EP_GIN_TCP_BUFFER ? left : EP_GIN_TCP_BUFFER, &n);
        if (step != STEP_ON)
            return step;
    }
    c->in.got += (uint32_t)n;
    return STEP_ON;
}

static enum step finish(struct tcp_link *link, struct tcp_connection *c)
{
    const struct ep_gin_message *m = &c->in.message;
    const struct ep_gin_region *region = ep_gin_region_of(link->comm, m->region); /* it may have gone meanwhile */

    if (c->in.staged != NO_STAGING)
        unstage(link, c, c->in.staged, c->in.to, region, region ? region->at + m->offset : NULL, m->bytes);
    c->in.under_way = false;
    return ep_gin_landed(link->peer, m) ? STEP_ON : refuse(link);
}

static enum step step(struct tcp_link *link, struct tcp_connection *c)
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
static void look_again(struct tcp_link *link, struct tcp_connection *c)
{
    if (c->in.under_way && c->in.staged == NO_STAGING && !ep_gin_region_of(link->comm, c->in.message.region))
        c->in.to = NULL;
}

/* What a broken connection was to carry does not come any more: the peer is of no use. */
static void hang_up(struct tcp_link *link, struct tcp_connection *c)
{
    ep_gin_unwatch(link->comm, c->fd);
    shutdown(c->fd, SHUT_RDWR);
    c->held = false;
    c->ended = true;
    ep_gin_peer_lost(link->peer, "a connection is closed");
}

bool ep_gin_tcp_ready(void *opened, uint32_t index)
{
    struct tcp_link *link = opened;
    struct tcp_connection *c = &link->connections[index];
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
bool ep_gin_tcp_poll(void *opened)
{
    struct tcp_link *link = opened;
    bool found = false;

    for (uint32_t i = 0; i < link->n; i++)
        if (link->connections[i].held)
            found |= ep_gin_tcp_ready(link, i);
    return found;
}

/* A peer that goes closes its connections; what it sent lies before that. */
bool ep_gin_tcp_drained(void *opened)
{
    const struct tcp_link *link = opened;

    for (uint32_t i = 0; i < link->n; i++)
        if (!link->connections[i].ended)
            return false;
    return true;
}
