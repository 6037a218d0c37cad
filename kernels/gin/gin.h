/*
 * gin.h: what the files of kernels/gin share.
 *
 *   plugin.c           the tables that NCCL looks up; environment variables
 *   settings.c         what the environment asks for
 *   report.c           NCCL's log
 *   address.c          which interface to listen on; which host this is
 *   rendezvous.c       listening, dialling, strangers
 *   control.c          frames on the control connections
 *   comm.c             connect and close: peers and their links
 *   region.c           memory that puts come from and go to
 *   put.c, queue.c     requests, from iput to done
 *   receive.c          the receive thread: pieces, signals
 *   shared.c           counts, peers that are gone, both locks
 *   order.c            when a signal may be applied
 *   message.c          what is said, and what is not believed
 *   stream.c           work on the GPU, and how far it is
 *   staging.c          pinned memory that data passes through
 *   ring.c             messages through memory that two processes share
 *   movers.c           threads that carry long payloads over TCP
 *   transport.h        what a transport is; transport.c: which one; transport_host.c, transport_verbs.c, and
 *                      transport_tcp.c with tcp_send.c and tcp_receive.c (tcp.h)
 */
#ifndef EP_GIN_H
#define EP_GIN_H

#include <pthread.h>

#include "ep_clock.h"
#include "ep_cuda.h"
#include "message.h"
#include "order.h"

#define EP_GIN_NAME "EP-GIN"
#define EP_GIN_DEPTH 1024u        /* puts of one peer and context that may be under way */
#define EP_GIN_PUTS (1u << 16)    /* of all peers, at least, for each context */
#define EP_GIN_MANY_CPUS 16       /* a host that has so many can spare one */
#define EP_GIN_MAX_CONTEXTS 128u  /* of a communicator, at a time */
#define EP_GIN_MAX_REGIONS 1024u  /* of a communicator, at a time */

struct ep_gin_comm;
struct ep_gin_peer;

/* ---- settings -------------------------------------------------------------------------- */

enum ep_gin_transport_id {
    EP_GIN_TCP,
    EP_GIN_HOST,
    EP_GIN_VERBS,
    EP_GIN_TRANSPORTS, /* how many */
    EP_GIN_AUTO = EP_GIN_TRANSPORTS
};

struct ep_gin_settings {
    enum ep_gin_transport_id transport;
    char interfaces[256]; /* as NCCL_SOCKET_IFNAME; "": the first that will do */
    uint8_t family;       /* 4, 6; 0: either */
    uint32_t connections; /* to each TCP peer; 0: the usual number */
    uint32_t movers;      /* threads of a communicator that carry long payloads over TCP; 0: none */
    uint32_t piece_bytes;
    uint64_t staging_bytes; /* each way, of a communicator */
    uint64_t timeout_ns;    /* of what is collective */
    uint32_t silence_ms;    /* after which a TCP peer that acknowledges nothing is dead */
    uint64_t spin_ns;       /* before the receive thread sleeps */
};

/* EP_INVALID_ARGUMENT names the variable, what it is and what it must be. */
ep_status ep_gin_settings_read(struct ep_gin_settings *settings, struct ep_error *error);
uint32_t ep_gin_usual_connections(uint32_t ranks);

/* ---- log: report.c ---------------------------------------------------------------------- */

void ep_gin_report_to(nccl_logger logger);
__attribute__((format(printf, 1, 2))) void ep_gin_warn(const char *format, ...);
__attribute__((format(printf, 1, 2))) void ep_gin_info(const char *format, ...);
/* Warns, and says which of NCCL's results a status is. */
nccl_result ep_gin_failed(const char *call, const struct ep_error *error);

/* ---- addresses: address.c; choices: transport.c ----------------------------------------------------------------- */

struct sockaddr_storage;

/* Of this process, from the kernel. */
ep_status ep_gin_host_id_read(struct ep_gin_host_id *id, struct ep_error *error);
/* The first address that the settings allow, port 0. */
ep_status ep_gin_address_choose(const struct ep_gin_settings *settings, struct sockaddr_storage *address,
                                struct ep_error *error);
/* Does NCCL's list ("eth,ib": prefixes; "=eth0": exactly; "^docker": all others) have the name?  "" has every name. */
bool ep_gin_interface_listed(const char *list, const char *name);

/* "auto" for what is no transport's number. */
const char *ep_gin_transport_name(uint32_t transport);
/* Sets comm->usable: looks at libraries, NICs and the GPU once for all peers. */
void ep_gin_transports_look(struct ep_gin_comm *comm);
/* Bit t: this process can use transport t to a peer whose control connection carries descriptors, or does not. */
uint32_t ep_gin_transports_usable(const struct ep_gin_comm *comm, bool local);
/*
 * What carries puts between two ranks: what both name, or when one says auto what the other names, or else the
 * best that both can.  EP_FAILED_PRECONDITION: they name different ones, or one that a side cannot.
 */
ep_status ep_gin_transport_choose(const struct ep_gin_hello *mine, const struct ep_gin_hello *theirs,
                                  enum ep_gin_transport_id *chosen, struct ep_error *error);

/* ---- work on the GPU: stream.c --------------------------------------------------------------- */

/*
 * A stream, and a word of pinned memory that says how far it is.  Marks are numbers that grow; asking whether one is
 * reached is a load.  Without a cuda backend there is no stream, and every mark is reached.  One thread at a time.
 */
struct ep_gin_stream {
    struct ep_gin_comm *comm;
    void *stream;
    struct ep_cuda_marker *marker; /* of whoever opened it; NULL: the stream writes by itself */
    uint64_t *word;
    uint64_t written; /* the last mark that is, or will be, in it */
    bool dirty;       /* work after it */
    bool asked;       /* whose end somebody looks for */
};

/*
 * marker: writes the marks of several streams, NULL: each is written in the stream, between what comes before and after it.
 * A copy engine then waits for the mark: copies of 4 MiB, each marked, bring 255 GB/s instead of 323, and a mark is seen
 * 10 us later (H100).
 */
ep_status ep_gin_stream_open(struct ep_gin_comm *comm, struct ep_gin_stream *stream, struct ep_cuda_marker *marker,
                             struct ep_error *error);
/* Waits for what it holds; a GPU that does not get there within the timeout keeps it, and all that it may touch. */
void ep_gin_stream_settle(struct ep_gin_stream *stream);
/* The same, and it is gone. */
void ep_gin_stream_close(struct ep_gin_stream *stream);
/* Either side may be host memory.  A copy that the GPU refuses is the communicator's failure. */
void ep_gin_stream_copy(struct ep_gin_stream *stream, void *to, const void *from, uint64_t bytes);
void ep_gin_stream_store(struct ep_gin_stream *stream, void *to, uint64_t value);
/* What will be reached when all that it holds is over, once the stream is flushed. */
uint64_t ep_gin_stream_mark(struct ep_gin_stream *stream);
/* Writes the mark that was asked for, if one was: to do so takes a call of the driver's. */
void ep_gin_stream_flush(struct ep_gin_stream *stream);
bool ep_gin_stream_reached(const struct ep_gin_stream *stream, uint64_t mark);
/* All that it holds is over, and marked so. */
bool ep_gin_stream_idle(const struct ep_gin_stream *stream);
/* Flushes and waits.  False: not within the time. */
bool ep_gin_stream_wait(struct ep_gin_stream *stream, uint64_t timeout_ns);
/* To be closed behind its streams.  *out is NULL without a cuda backend. */
ep_status ep_gin_marker_open(struct ep_gin_comm *comm, struct ep_cuda_marker **out, struct ep_error *error);
void ep_gin_marker_close(struct ep_gin_comm *comm, struct ep_cuda_marker *marker);

/* ---- pinned memory: staging.c ------------------------------------------------------------------ */

/* Zeroed pages that GPU and host both reach. */
ep_status ep_gin_pages_open(struct ep_gin_comm *comm, uint64_t bytes, void **at, struct ep_error *error);
void ep_gin_pages_close(struct ep_gin_comm *comm, void *at, uint64_t bytes);

#define EP_GIN_PIECES 256u /* of a staging memory, at a time; a power of two */

/* Memory that pieces take in turn and give back in any order. */
struct ep_gin_staging {
    uint8_t *at;
    uint64_t bytes;
    uint64_t taken, freed; /* bytes ever; their difference is in use */
    uint32_t head, tail;   /* pieces ever */
    struct {
        uint64_t end;  /* `taken` after it */
        uint64_t mark; /* of the stream, after which it is free */
        bool given_back;
    } piece[EP_GIN_PIECES];
};

/* A piece of that many bytes in one stretch; false: no room now.  *piece is for the other two. */
bool ep_gin_staging_take(struct ep_gin_staging *staging, uint32_t bytes, uint32_t *piece, void **at);
/* Free when the stream has reached the mark. */
void ep_gin_staging_give(struct ep_gin_staging *staging, uint32_t piece, uint64_t mark);
void ep_gin_staging_reclaim(struct ep_gin_staging *staging, const struct ep_gin_stream *stream);

/* ---- regions: region.c -------------------------------------------------------------------------- */

/* A region at one peer. */
struct ep_gin_remote {
    uint32_t key;   /* 0: the peer does not have it, or is gone */
    void *reached;  /* by the peer's main link; NULL: not that way */
};

struct ep_gin_region {
    uint32_t key;    /* what peers call it; 0: not registered.  Atomic: the receive thread looks */
    uint32_t slot, generation;
    int type;        /* NCCL_MEMORY_HOST, NCCL_MEMORY_CUDA */
    uint8_t *at;
    uint64_t bytes;
    uint64_t *shadow; /* what signals stand at, for NCCL_REGION_ORDERED; NULL: read before they are raised */
    int dmabuf;       /* descriptor of it for the time of the registration; -1: none */
    uint64_t dmabuf_offset;
    struct ep_gin_remote *remote; /* [ranks] */
    uint32_t uses;    /* puts under way that have it as source or target; atomic */
    uint64_t moved;   /* bytes ever of such puts; atomic */
};

ep_status ep_gin_region_add(struct ep_gin_comm *comm, void *at, uint64_t bytes, int type, uint64_t flags, int dmabuf,
                            uint64_t dmabuf_offset, struct ep_gin_region **out, struct ep_error *error);
/*
 * Lets puts that are under way come to their end, as long as they get on; drop does not.  Who has not taken a put by then is
 * given up with it: half of it may be on its way.
 */
void ep_gin_region_remove(struct ep_gin_comm *comm, struct ep_gin_region *region);
void ep_gin_region_drop(struct ep_gin_comm *comm, struct ep_gin_region *region);
/* receive: NULL: there is none of that key, or no longer. */
struct ep_gin_region *ep_gin_region_of(struct ep_gin_comm *comm, uint32_t key);

/* ---- puts: put.c, queue.c ------------------------------------------------------------------------- */

/* What NCCL calls a request. */
struct ep_gin_put {
    struct ep_gin_put *next; /* in a queue, its context's or a link's, or of those that are free */
    struct ep_gin_peer *peer;
    struct ep_gin_region *source, *target; /* NULL with no bytes */
    const uint8_t *from;
    void *reached;           /* the target, for the main link; NULL: the spare link */
    uint64_t bytes, offset;  /* offset: in the target */
    uint64_t taken, sent;    /* bytes: by the link, of which so many may be written again */
    const struct ep_gin_stream *stream; /* the link's, and in it: */
    uint64_t mark;
    uint64_t number;
    uint32_t context, back, region;
    struct ep_gin_signal signal;
    bool done;               /* and then it is the caller's until test says so; atomic */
    bool in_use, orphan;     /* orphan: nobody will test it */
};

/* Those of one peer and context that have not begun, in their order. */
struct ep_gin_queue {
    struct ep_gin_put *head, *tail;
    uint64_t last; /* number of the last that was started */
};

void ep_gin_queue_push(struct ep_gin_queue *queue, struct ep_gin_put *put);
struct ep_gin_put *ep_gin_queue_pop(struct ep_gin_queue *queue);

/* All puts of a communicator, in slabs.  Of the last slab some have never been used: their pages are not there yet. */
struct ep_gin_pool {
    struct ep_gin_put *slabs[EP_GIN_MAX_CONTEXTS];
    struct ep_gin_put *free;
    uint32_t n, size, used; /* slabs; puts of each; puts of the last one that were used */
};

/* n more, for as long as the pool lives; each time as many. */
ep_status ep_gin_pool_grow(struct ep_gin_pool *pool, uint32_t n, struct ep_error *error);
void ep_gin_pool_close(struct ep_gin_pool *pool);
/* The i-th of all that were ever used; NULL: there are not so many. */
struct ep_gin_put *ep_gin_pool_at(struct ep_gin_pool *pool, uint32_t i);
/* Zeroed; NULL: all are under way. */
struct ep_gin_put *ep_gin_pool_take(struct ep_gin_pool *pool);
void ep_gin_pool_give(struct ep_gin_pool *pool, struct ep_gin_put *put);

struct ep_gin_put_args {
    uint32_t rank, context;
    struct ep_gin_region *source, *target;
    uint64_t source_offset, target_offset, bytes;
    const struct ep_gin_region *signal; /* NULL: none */
    uint64_t signal_offset, signal_value;
    uint32_t signal_op;
};

/* Never fails: what cannot be done is counted and done. */
struct ep_gin_put *ep_gin_put(struct ep_gin_comm *comm, const struct ep_gin_put_args *args);
/* True: it was done, and is not the caller's any more. */
bool ep_gin_put_test(struct ep_gin_comm *comm, struct ep_gin_put *put);
void ep_gin_progress(struct ep_gin_comm *comm);
/* Progress until *count is 0, or for a while, which begins anew whenever *moved grows (NULL: never).  True: it is 0. */
bool ep_gin_settle(struct ep_gin_comm *comm, const uint32_t *count, const uint64_t *moved);
/* Under `sending`: peers that have not taken all puts of the region are taken for gone, which ends those. */
void ep_gin_puts_cut(struct ep_gin_comm *comm, const struct ep_gin_region *region);
/* Under `sending`: what is under way in these contexts will not be tested. */
void ep_gin_puts_forget(struct ep_gin_comm *comm, uint32_t first, uint32_t n);

/* ---- peers and communicators: comm.c -------------------------------------------------------------- */

struct ep_gin_link {
    const struct ep_gin_transport *transport;
    void *link;
};

struct ep_gin_peer {
    struct ep_gin_comm *comm;
    uint32_t rank;
    uint32_t lost;         /* atomic; set by either thread, looked at by both */
    uint32_t drained;      /* atomic: it is lost, and all has been taken that had come of it */
    struct ep_gin_hello mine, theirs; /* what was said on the control connection */
    enum ep_gin_transport_id chosen;
    int control;           /* connection; -1: to oneself */
    bool local;            /* which can carry descriptors */
    int data[EP_GIN_MAX_CONNECTIONS]; /* connections, for the tcp link to take; -1: none */
    uint32_t connections;  /* data connections that both agreed on */
    uint32_t piece_bytes;
    struct ep_gin_link main, spare; /* spare.link is NULL when main is tcp, and to oneself */

    /* progress */
    struct ep_gin_queue queues[EP_GIN_MAX_CONTEXTS];
    uint32_t turn;         /* context whose put is next */
    uint32_t waiting;      /* puts in the queues */
    struct ep_gin_put *starting; /* that a link has no room for as a whole; NULL: none */
    uint32_t active;       /* puts that are not done */
    uint64_t numbers;      /* of puts that were started */

    /* receive */
    struct ep_gin_order order;
    uint64_t lost_ns;      /* when that was seen; 0: not yet */
};

/* What was asked or told that makes no sense; each is logged once. */
struct ep_gin_counts {
    uint64_t bad_puts;     /* out of a region, to no rank, without a region */
    uint64_t lost_puts;    /* to peers that are gone */
    uint64_t late_pieces;  /* for regions that are gone */
    uint64_t bad_messages; /* that no peer would send */
    uint64_t crowded;      /* no put was free */
};

struct ep_gin_watch {
    struct ep_gin_peer *peer; /* NULL: comm->wake */
    struct ep_gin_link *link; /* NULL: the control connection */
    uint32_t index;
    int fd;
};

struct ep_gin_comm {
    struct ep_gin_settings settings;
    const struct ep_cuda_api *cuda; /* NULL: host memory only, since: */
    struct ep_error no_cuda;
    uint32_t device;
    uint32_t rank, ranks;
    struct ep_gin_host_id host;
    struct ep_gin_peer *peers;      /* [ranks] */
    uint32_t usable;                /* bit t: transport t, to some peer at least */
    void *shared[EP_GIN_TRANSPORTS]; /* of those that carry something */
    uint32_t contexts;              /* all that are taken are below it */
    bool taken[EP_GIN_MAX_CONTEXTS];
    uint32_t failed;                /* atomic: the GPU refused something; nothing is promised any more */
    bool stuck;                     /* a stream still works: what it may touch stays */
    struct ep_gin_counts counts;    /* atomic */

    /* Words of streams, 64 bytes apart. */
    uint8_t *words;
    uint32_t words_used;

    /* control */
    struct ep_gin_region *regions;  /* [EP_GIN_MAX_REGIONS] */
    uint64_t registrations;

    /* progress: under `sending` */
    pthread_mutex_t sending;
    struct ep_gin_pool pool;
    struct ep_gin_put refused;      /* always done: what cannot be done */
    uint32_t active;                /* puts that are not done; atomic: also read without the lock */
    uint32_t tests;                 /* of puts that were not done */
    uint32_t large, gathers;        /* transport_host.c: large puts that it has; calls of progress that these still wait */
    uint32_t asked;                 /* puts ever; atomic, see ep_gin_judge */

    /* receive: under `receiving` */
    pthread_mutex_t receiving;
    struct ep_gin_stream receiver;  /* data that came in, and signals */
    pthread_t thread;
    bool running;
    uint32_t stop;                  /* atomic */
    int epoll, wake;
    struct ep_gin_watch *watches;   /* [watches_max] */
    uint32_t watched, watches_max;
    uint32_t asleep;                /* atomic: the thread sleeps, or is about to: `wake` has to be written */
    uint32_t wanted;                /* atomic: threads that want `receiving` and would not get it */
    void (*heard)(void *user);
    void *heard_user;

    /* close */
    uint64_t linger_until;          /* for what is on its way over connections */
};

/* control: for what no put and no piece may run beside. */
void ep_gin_lock(struct ep_gin_comm *comm);
void ep_gin_unlock(struct ep_gin_comm *comm);

struct ep_gin_listener;

ep_status ep_gin_listen(const struct ep_gin_settings *settings, struct ep_gin_handle *handle,
                        struct ep_gin_listener **out, struct ep_error *error);
void ep_gin_listener_close(struct ep_gin_listener *listener);
/* Collective.  The device is the one that is current on this thread. */
ep_status ep_gin_comm_open(const struct ep_gin_settings *settings, const struct ep_gin_handle *const handles[],
                           uint32_t ranks, uint32_t rank, struct ep_gin_listener *listener, struct ep_gin_comm **out,
                           struct ep_error *error);
void ep_gin_comm_close(struct ep_gin_comm *comm);
/* Runs on the receive thread, which holds its lock, whenever something has come or a peer is gone: to wake somebody. */
void ep_gin_comm_hear(struct ep_gin_comm *comm, void (*heard)(void *user), void *user);
/* The peer is taken for gone, with what it has sent and was not taken, and is told that this rank is. */
void ep_gin_comm_drop(struct ep_gin_comm *comm, uint32_t rank, const char *why);
/* n contexts, *first and those after it.  Which ones is nobody else's business: the receiver does not know them. */
ep_status ep_gin_contexts_take(struct ep_gin_comm *comm, uint32_t n, uint32_t *first, struct ep_error *error);
void ep_gin_contexts_give(struct ep_gin_comm *comm, uint32_t first, uint32_t n);

/* rendezvous.c: fills in of all peers what connections there are, what was said, and what was chosen. */
ep_status ep_gin_meet(struct ep_gin_comm *comm, const struct ep_gin_handle *const handles[],
                      struct ep_gin_listener *listener, struct ep_error *error);

/* control.c: one frame to and from each peer that is there. */
struct ep_gin_card;
typedef ep_status (*ep_gin_make)(struct ep_gin_peer *peer, void *user, struct ep_gin_frame *frame,
                                 struct ep_gin_card *card, struct ep_error *error);
typedef ep_status (*ep_gin_take)(struct ep_gin_peer *peer, void *user, const struct ep_gin_frame *frame,
                                 const struct ep_gin_card *card, struct ep_error *error);
/* EP_DEADLINE_EXCEEDED names the rank that was late.  A peer that is gone is passed over. */
ep_status ep_gin_exchange(struct ep_gin_comm *comm, enum ep_gin_frame_kind kind, uint64_t order, ep_gin_make make,
                          ep_gin_take take, void *user, struct ep_error *error);
void ep_gin_say_bye(struct ep_gin_comm *comm);

/* receive.c: what the thread waits with, and the thread. */
ep_status ep_gin_receive_open(struct ep_gin_comm *comm, struct ep_error *error);
void ep_gin_receive_close(struct ep_gin_comm *comm);
ep_status ep_gin_receive_start(struct ep_gin_comm *comm, struct ep_error *error);
void ep_gin_receive_stop(struct ep_gin_comm *comm);
/* Once for each kind; what follows is counted. */
void ep_gin_count(struct ep_gin_comm *comm, uint64_t *count, const char *what);

static inline bool ep_gin_peer_is_lost(const struct ep_gin_peer *peer)
{
    return __atomic_load_n(&peer->lost, __ATOMIC_ACQUIRE) != 0; /* partner: ep_gin_peer_lost */
}

/* What it had sent before it went has been taken; or is given up, as it does not come to an end. */
static inline bool ep_gin_peer_is_drained(const struct ep_gin_peer *peer)
{
    return __atomic_load_n(&peer->drained, __ATOMIC_ACQUIRE) != 0; /* partner: drain */
}

/* Of a rank whose GPU does nothing more nothing is told to others: its data would not be there. */
static inline bool ep_gin_peer_is_served(const struct ep_gin_peer *peer)
{
    return !ep_gin_peer_is_lost(peer) && __atomic_load_n(&peer->comm->failed, __ATOMIC_RELAXED) == 0;
}

#endif
