/*
 * tcp.h: a link over TCP, and who has what of it.
 *
 *   transport_tcp.c  control: links, from open to close
 *   tcp_send.c       progress: pieces, from the put to the socket
 *   tcp_receive.c    receive: messages and payloads, from the socket to where they belong
 */
#ifndef EP_GIN_TCP_H
#define EP_GIN_TCP_H

#include "movers.h"
#include "transport.h"

#define EP_GIN_TCP_CHUNKS EP_GIN_PIECES /* pieces of a link, to be sent */
#define EP_GIN_TCP_BUFFER (8u << 10)    /* bytes of a connection, of small messages */
#define EP_GIN_TCP_PLACES 16u           /* for long payloads of a connection, a power of two */
#define EP_GIN_TCP_LONG   (64u << 10)   /* bytes of a payload, from which on a mover is worth being woken */
#define NO_STAGING        UINT32_MAX

/* A piece on its way out. */
struct tcp_chunk {
    struct ep_gin_message message;
    struct ep_gin_put *put;
    const uint8_t *payload;
    uint64_t mark;   /* of the sender's stream, after which the payload is there */
    uint32_t staged; /* piece of the staging memory */
    uint32_t next;   /* of its connection, or free; EP_GIN_TCP_CHUNKS: none */
};

/* A piece on its way in. */
struct tcp_incoming {
    struct ep_gin_message message;
    uint8_t *to; /* NULL: nobody wants it */
    uint32_t staged;
    uint32_t got; /* bytes of the payload */
    bool under_way;
};

/* A place for a piece that a mover brings, and what has come there. */
struct tcp_arrival {
    struct ep_gin_message message;
    uint8_t *at; /* staging memory, for the longest there may be */
    uint32_t staged;
};

struct tcp_connection {
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
    bool held;  /* something in the buffer has not been taken */
    bool ended; /* nothing more comes */
    struct tcp_incoming in;
    struct ep_gin_staging staging;
    struct ep_gin_move brought;
    bool receiving;          /* as sending */
    uint32_t offered, taken; /* arrivals so far; offered is atomic: the mover reads it */
    struct tcp_arrival arrivals[EP_GIN_TCP_PLACES]; /* the mover's from landed to offered */
    /* receive, and the mover's while it is receiving */
    uint32_t start, end; /* in the buffer */
    uint8_t buffer[EP_GIN_TCP_BUFFER];
    bool heading;    /* it waits for a message, not for a payload */
    uint32_t landed; /* arrivals so far; atomic: the receive thread reads it */
};

struct tcp_link {
    struct ep_gin_comm *comm;
    struct ep_gin_peer *peer;
    struct ep_gin_stream *sender; /* the shared ones */
    struct ep_gin_movers *movers;
    uint32_t n;
    struct tcp_connection *connections; /* [n] */
    struct tcp_chunk chunks[EP_GIN_TCP_CHUNKS];
    uint32_t free;
    struct ep_gin_staging staging;
    void *pages; /* of all staging memory */
    uint64_t pages_bytes;
};

/* What the table of transport_tcp.c has of the other two. */
bool ep_gin_tcp_put_start(void *link, struct ep_gin_put *put);
void ep_gin_tcp_progress(void *link);
bool ep_gin_tcp_ready(void *link, uint32_t index);
bool ep_gin_tcp_poll(void *link);
bool ep_gin_tcp_drained(void *link);
/* For the mover of a connection, see ep_gin_move.more. */
bool ep_gin_tcp_more(void *connection);

#endif
