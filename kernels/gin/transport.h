/*
 * transport.h: how puts travel to one peer.
 *
 * A transport is a struct of functions; which one serves a peer is settled when a communicator is connected.  What
 * it has for one peer is a link.  Three threads call it, and what they may touch is told by the section:
 *
 *   control    whoever calls connect, regMrSym, deregMrSym, closeColl: one at a time, both locks held where noted
 *   progress   whoever calls iput, test, ginProgress: under comm->sending
 *   receive    the communicator's own thread: under comm->receiving
 *
 * What a transport owes: every put that it started is told done (ep_gin_put_sent) when its source may be written
 * again, also when the peer is gone; every byte of it is told landed at the receiver (ep_gin_landed), in any order.
 * Signals are not its business: they travel in the message, and the receiver applies them when the data of the put
 * and of those before it has landed.
 */
#ifndef EP_GIN_TRANSPORT_H
#define EP_GIN_TRANSPORT_H

#include "gin.h"

/* What a peer must be told, of a link or of a region, and descriptors that go with it (between processes of one
 * host only). */
#define EP_GIN_CARD_BYTES 224u
#define EP_GIN_CARD_FDS   2u

struct ep_gin_card {
    uint8_t bytes[EP_GIN_CARD_BYTES];
    int fd[EP_GIN_CARD_FDS]; /* -1: none.  Of a card that is sent: closed by who sends it */
    uint32_t fds;
};

struct ep_gin_transport {
    const char *name; /* as in EP_GIN_TRANSPORT */
    bool same_host;   /* both ends must be on one host: cards have descriptors */

    /* ---- control, once per communicator ---- */
    /* Can this process use it at all?  The sentence is for who has asked for it by name. */
    ep_status (*usable)(struct ep_gin_comm *comm, struct ep_error *error);
    /* What all of its links share, kept in comm->shared[].  NULL: nothing. */
    ep_status (*start)(struct ep_gin_comm *comm, void **shared, struct ep_error *error);
    void (*stop)(void *shared);

    /* ---- control, once per peer: both sides make a link, tell each other, and connect ---- */
    ep_status (*link_open)(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void **link, struct ep_gin_card *mine,
                           struct ep_error *error);
    ep_status (*link_connect)(void *link, const struct ep_gin_card *theirs, struct ep_error *error);
    /* After the last call of progress and receive; nobody asks for its puts any more. */
    void (*link_close)(void *link);

    /* ---- control, once per region and peer; all three may be NULL ---- */
    /* *card says what the peer needs to reach the region.  EP_UNIMPLEMENTED: cannot be reached this way. */
    ep_status (*region_offer)(void *link, const struct ep_gin_region *region, struct ep_gin_card *card,
                              struct ep_error *error);
    /* The peer's side of the region: *remote, for put_start.  Without it puts take the spare link. */
    ep_status (*region_reach)(void *link, const struct ep_gin_region *region, const struct ep_gin_card *card,
                              void **remote, struct ep_error *error);
    /* Under both locks.  It is offered no more; remote is NULL where the peer's side was not reached. */
    void (*region_leave)(void *link, const struct ep_gin_region *region, void *remote);
    /* progress: can it read puts from there?  If not they take the spare link.  NULL: from anywhere. */
    bool (*reads)(void *link, const struct ep_gin_region *source);

    /* ---- progress ---- */
    /*
     * Takes the put, or more of it: put->taken counts bytes, and what has been taken is not offered again.  True: all
     * of it.  False: no room now.  A put of no bytes is one message.  Puts come in the order of their numbers, which
     * is the order in which each of a link's connections has to carry them (see order.h).
     */
    bool (*put_start)(void *link, struct ep_gin_put *put);
    /* Moves what has been taken.  Never waits. */
    void (*progress)(void *link);

    /* ---- receive; each may be NULL ---- */
    /* Looks at memory; true: there was something. */
    bool (*poll)(void *link);
    /* A descriptor that was given to ep_gin_watch() is ready; true: there was something. */
    bool (*ready)(void *link, uint32_t index);
    /* The peer is gone: nothing more will come that it had sent before.  NULL: so it is at once. */
    bool (*drained)(void *link);
    /* Before the thread sleeps and after it: a peer that wants something has to wake it, or need not.  Poll is called
     * once more after true. */
    void (*sleep)(void *link, bool asleep);
};

/* To add one: its number in gin.h, its line in the table of transport.c, and its rank in ep_gin_transport_choose(). */
extern const struct ep_gin_transport *const ep_gin_transports[EP_GIN_TRANSPORTS];
extern const struct ep_gin_transport ep_gin_tcp;
extern const struct ep_gin_transport ep_gin_host;
extern const struct ep_gin_transport ep_gin_verbs; /* usable where libibverbs and a NIC are */
extern const struct ep_gin_transport ep_gin_self; /* to oneself; not in the table */

/* ---- what a transport may ask of the communicator ---------------------------------------- */

/* control: `index` of the link is ready when fd is readable. */
ep_status ep_gin_watch(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void *link, uint32_t index, int fd,
                       struct ep_error *error);
/* receive: nothing more is to come from it. */
void ep_gin_unwatch(struct ep_gin_comm *comm, int fd);

/* progress: fills in what says where `bytes` of the put go, from its byte `at` on; the flags are the link's. */
void ep_gin_put_message(const struct ep_gin_put *put, uint64_t at, uint32_t bytes, struct ep_gin_message *message);
/* progress: so many bytes of the source may be written again; with all of them the put is done. */
void ep_gin_put_sent(struct ep_gin_put *put, uint64_t bytes);
/* progress, receive: the peer is gone.  Puts to it are done as soon as their sources are. */
void ep_gin_peer_lost(struct ep_gin_peer *peer, const char *why);

/* What a receiver does with a message. */
enum ep_gin_verdict {
    EP_GIN_TAKE,  /* its data is wanted, or has landed */
    EP_GIN_DROP,  /* the region is gone: its data is not wanted; to be landed all the same */
    EP_GIN_LATER, /* too far ahead of what is missing: ask again, and leave what follows where it is */
    EP_GIN_REFUSE /* no peer of ours says that: the connection is to be closed */
};

/* receive: *region and the address that the data goes to, for TAKE. */
enum ep_gin_verdict ep_gin_judge(struct ep_gin_peer *peer, const struct ep_gin_message *message,
                                 const struct ep_gin_region **region, void **to);
/* receive: the bytes of the message are where they belong, or will be by work that comm->receiver holds.
 * False: REFUSE. */
bool ep_gin_landed(struct ep_gin_peer *peer, const struct ep_gin_message *message);

#endif
