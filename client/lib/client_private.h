/*
 * client_private: what the files of libepclient share.
 *
 *   error.c    the thread's last error, versioned structs
 *   client.c   connection to the server
 *   spec.c     a group's spec as limits, layout and placement
 *   join.c     claim, side socket, mapping; leave
 *   monitor.c  the thread that hears the server: events, and its end
 *   events.c   the queue of a rank's events
 *   arena.c    ep_alloc
 *   handle.c   handles and what is known of their ops
 *   op.c       dispatch, combine, complete: arguments to descriptors
 *   ring.c     descriptors in, results out, waiting
 *
 * Threads.  A rank and its handles belong to one thread at a time (the rank's thread).  The
 * client's monitor thread shares with it the fields named so below.  Lock order: client, events.
 */
#ifndef EP_CLIENT_PRIVATE_H
#define EP_CLIENT_PRIVATE_H

#include <pthread.h>

#include "attach_frame.h"
#include "ep_client.h"
#include "ep_clock.h"
#include "ep_kernels.h"
#include "ep_rpc.h"
#include "ep/v1/attach.pb-c.h"

#define EVENT_QUEUE 64u
#define NO_DEADLINE UINT64_MAX

/* ---- error.c ------------------------------------------------------------------ */

/* Where this thread's calls put their sentence. */
struct ep_error *last_error(void);

/*
 * Copies a versioned struct of the caller: what it does not have is 0; what we do not know must
 * be 0.  `size` is its first field.
 */
ep_status take_struct(const char *type, const void *given, void *copy, size_t copy_size);
/* Fills as much of it as the caller has. */
ep_status give_struct(const char *type, void *given, const void *full, size_t full_size);

/* As much of the text as there is room for, terminated. */
void copy_text(char *to, size_t size, const char *from);

/* ---- spec.c ------------------------------------------------------------------- */

struct group_shape {
    struct ep_layout_map map;
    struct ep_placement placement; /* ep_placement_free */
    uint32_t timeout_ms;
};

/* What the server computed from the same spec; an error when its window has another size. */
ep_status shape_from_spec(const Ep__V1__GroupSpec *spec, uint64_t window_bytes,
                          struct group_shape *shape, struct ep_error *error);
void shape_info(const struct group_shape *shape, uint64_t epoch, ep_group_info *info);

/* ---- arena.c ------------------------------------------------------------------ */

/* First fit over a table in private memory: blocks by offset, without gaps, no two free neighbours. */
#define ARENA_ALIGN 256u
struct arena_block {
    uint64_t offset, bytes; /* from the arena's start */
    bool used;
};
struct arena {
    struct arena_block *block;
    uint32_t n, room;
    uint64_t bytes;
};

ep_status arena_init(struct arena *arena, uint64_t bytes, struct ep_error *error);
void arena_fini(struct arena *arena);
ep_status arena_take(struct arena *arena, uint64_t bytes, uint64_t *offset, struct ep_error *error);
/* False: no block begins there. */
bool arena_give(struct arena *arena, uint64_t offset);
/* Bytes from offset to the end of the used block around it; 0: in no such block. */
uint64_t arena_reach(const struct arena *arena, uint64_t offset);

/* ---- objects ------------------------------------------------------------------ */

struct ep_client {
    struct ep_rpc *rpc;
    struct ep_rpc_channel *channel;
    char *path; /* of the server's socket */
    char *name, *token;
    int32_t timeout_ms;

    pthread_t monitor;
    int epoll, stop; /* stop: eventfd that ends the monitor */
    pthread_mutex_t lock;
    struct ep_rank *ranks; /* under lock */
    uint64_t next_id;      /* under lock */
};

/* The first failure that nobody has been told of. */
struct failure {
    uint64_t seq; /* of the op */
    ep_status status;
    char text[EP_ERROR_TEXT_MAX];
};

enum op_part { PART_DISPATCH, PART_COMBINE, PART_RELEASE };

/* An op in the ring. */
struct pending {
    ep_handle *handle; /* NULL: it was destroyed meanwhile */
    enum op_part part;
    bool half; /* the sending half: its complete() has the result */
    uint64_t start_ns;
};

struct ep_rank {
    struct ep_client *client;
    struct ep_rank *next; /* under the client's lock */
    uint64_t id;
    int socket;
    uint32_t rank;
    uint64_t epoch;
    struct group_shape shape;
    uint32_t *local_to_expert;

    uint8_t *window;
    struct ep_control *control; /* its start */
    struct arena arena;

    ep_handle *handles[EP_MAX_HANDLES];
    uint32_t generations[EP_MAX_HANDLES];

    /* ring: ops are counted; op n is in slot n mod EP_RING_SLOTS */
    uint64_t head, tail; /* next to submit; oldest that has no result yet */
    struct pending pending[EP_RING_SLOTS];
    struct failure failure;
    uint64_t spin_ns;

    /* shared with the monitor and with ep_rank_interrupt(); atomics */
    uint32_t lost;        /* ep_status: why the ring is dead; lost_text is set before */
    uint32_t interrupted;
    uint32_t *waiting;    /* the word that the rank's thread sleeps on */
    int interrupt_fd;     /* eventfd, readable while interrupted */
    char lost_text[EP_ERROR_TEXT_MAX];

    pthread_mutex_t events_lock;
    ep_event events[EVENT_QUEUE]; /* under events_lock, like all below */
    uint32_t first_event, n_events;
    uint64_t events_lost;
    int event_fd; /* readable while an event waits */
};

/* What became of one direction. */
struct outcome {
    bool known;
    ep_op_info info;
};

struct ep_handle {
    struct ep_rank *rank;
    uint32_t id, generation;
    bool routed;     /* a dispatch has been submitted: `op` is its descriptor */
    bool combined;   /* and a combine since */
    bool open;       /* a send-only op waits for its complete() */
    enum op_part open_part;
    struct ep_op op; /* of the last dispatch: mode, layout, tokens, top_k ... */
    uint64_t last_seq; /* count of its last op + 1; 0: none */
    struct failure failure;
    struct outcome dispatch, combine;
    struct ep_op_result half; /* of the last sending half */
};

/* ---- monitor.c ---------------------------------------------------------------- */

ep_status monitor_start(struct ep_client *client, struct ep_error *error);
void monitor_stop(struct ep_client *client);
/* After remove the monitor does not touch the rank any more. */
ep_status monitor_add(struct ep_rank *rank, struct ep_error *error);
void monitor_remove(struct ep_rank *rank);

/* ---- events.c ----------------------------------------------------------------- */

ep_status events_init(struct ep_rank *rank, struct ep_error *error);
void events_fini(struct ep_rank *rank);
void events_push(struct ep_rank *rank, const ep_event *event);
/* EP_CANCELLED and the flag is down again, when ep_rank_interrupt() was called. */
ep_status take_interrupt(struct ep_rank *rank);

/* ---- ring.c ------------------------------------------------------------------- */

/* Why the rank's ops cannot run any more, as an error; EP_OK when they can. */
ep_status ring_lost(const struct ep_rank *rank, struct ep_error *error);
/* Any thread: no op of the rank will end any more; wakes whoever waits for one. */
void ring_poison(struct ep_rank *rank, ep_status why, const char *text);
/* Waits for a free slot if need be.  handle may be NULL. */
ep_status ring_submit(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                      struct ep_error *error);
/* Until the first `count` ops of the rank are over. */
ep_status ring_wait(struct ep_rank *rank, uint64_t count, uint64_t deadline_ns, bool interruptible,
                    struct ep_error *error);

/* timeout_ms < 0: NO_DEADLINE. */
uint64_t deadline_after(int32_t timeout_ms);

/* ---- handle.c ----------------------------------------------------------------- */

/* Op `seq` of the rank ended so; pending says whose it was. */
void handle_result(struct ep_rank *rank, uint64_t seq, const struct pending *pending,
                   const struct ep_op_result *result);
void handles_free(struct ep_rank *rank);

/* ---- join.c ------------------------------------------------------------------- */

ep_status call_server(struct ep_client *client, const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct ep_error *error);

#endif
