/*
 * client_private: what the files of libepclient share.
 *
 *   error.c    the thread's last error, versioned structs
 *   client.c   connection to the server
 *   spec.c     a group's spec as limits, layout and placement
 *   join.c     claim, side socket, mapping
 *   monitor.c  the thread that hears the server: events, and its end
 *   events.c   the queue of a rank's events
 *   arena.c    ep_alloc
 *   region.c   ep_register
 *   handle.c   handles and what is known of their ops; failures, which are told once
 *   op.c       dispatch, combine, complete: arguments to descriptors
 *   rank.c     a rank's beginning and end; waiting for its ops
 *   advance.c  ep_advance: a rank that follows its group, and the thread that attaches to the next epoch
 *   wait.c     how long a wait is and what ends it: an interrupt, the loss of the rank
 *   copy.c     ep_write, ep_read
 *   ring.c     executor server on the host: descriptors in, results out
 *   device.c   a rank on a GPU: its window, streams, waiting, copies
 *   direct.c   executor direct: launches the kernels on windows of its own and its peers
 *   mailbox.c  executor server on a GPU: descriptors in, in stream order
 *   request.c  what a rank asks of the server
 *   result.c   what a GPU says of ops, as results
 *
 * Threads.  A rank and its handles belong to one thread at a time (the rank's thread).  The
 * client's monitor thread shares with it the fields named so below.  Lock order: client, following, turn; client, events.
 */
#ifndef EP_CLIENT_PRIVATE_H
#define EP_CLIENT_PRIVATE_H

#include <pthread.h>

#include "attach_frame.h"
#include "ep_client.h"
#include "ep_clock.h"
#include "ep_cuda.h"
#include "ep_kernels.h"
#include "ep_rpc.h"
#include "ep/v1/attach.pb-c.h"

#define EVENT_QUEUE 64u
#define NO_DEADLINE UINT64_MAX
#define SPAN_ALIGN 16u /* of memory that ops use */
#define HIGH_FD 1024u  /* ranks' connections have the highest descriptors below it, see join.c */

/* ---- error.c ------------------------------------------------------------------ */

/* Where this thread's calls put their sentence. */
struct ep_error *last_error(void);

/* Is it there, with its size? */
ep_status check_struct(const char *type, const void *given);
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

/* ---- region.c ----------------------------------------------------------------- */

/* Bytes from there to the end of the region around it, whose `offset` is as in struct ep_span; 0: in none. */
uint64_t registered_reach(const struct ep_regions *regions, const void *memory, uint64_t *offset);

/* ---- advance.c: what it has of client and rank ---------------------------------- */

/* The thread that attaches ranks to their group's next epoch. */
struct following {
    pthread_mutex_t lock;
    pthread_cond_t work;          /* there may be some, or it is to stop; monotonic clock */
    bool started, stop;           /* under lock, as all below */
    pthread_t thread;
    struct successor *successors; /* one for each rank that follows */
    struct ep_rank *left;         /* ranks that have gone over and left, and are to be finished */
};

/* What the rank's thread and the monitor agree on: see attach_frame.h. */
struct turn {
    pthread_mutex_t lock;
    bool advances;            /* the program has called ep_advance(); under lock, as the next five */
    uint64_t passed;
    uint64_t promised, at;    /* positions: where it waits for the decision, and the decision; or EP_ATTACH_NO_TURN */
    uint64_t epoch;           /* of the decision */
    bool missed;              /* the rank had passed the position when it was told */
    uint32_t news;            /* 1: something has changed; atomic, a word to sleep on */
    uint64_t position;        /* atomic: the rank's thread writes */
    bool stands;              /* before a boundary that ep_advance() has not passed; the rank's thread */
    bool over;                /* gone over; likewise */
    struct ep_error no_place; /* of a rank that has gone over to nowhere; likewise */
};

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

    struct following following;
};

/* The first failure that nobody has been told of.  Each is noted in one place: with its handle, or with the rank when
 * that is gone. */
struct failure {
    uint64_t seq; /* of the op */
    ep_status status;
    uint64_t told; /* those of ops below this one are told */
    char text[EP_ERROR_TEXT_MAX];
};

enum op_part { PART_DISPATCH, PART_COMBINE, PART_RELEASE };

/* An op whose result is not known yet. */
struct pending {
    ep_handle *handle; /* NULL: it was destroyed meanwhile */
    enum op_part part;
    bool half; /* the sending half: its complete() has the result */
    uint64_t start_ns;
};

/* Who runs the rank's ops, and how they and their memory are reached.  Chosen by ep_join(). */
struct executor {
    ep_backend backend;
    ep_executor kind;
    bool streams; /* ops and copies may be given one */
    const char *only_window; /* NULL: ops may use registered memory too; else why not, and what to do instead */

    /* Memory that is a region from here on, and one that is none any more, to whoever runs the ops.  NULL: that is this
     * process.  Dropping one that is not there is no error. */
    ep_status (*add_region)(struct ep_rank *rank, uint32_t number, const struct ep_region *region,
                            uint64_t deadline_ns, struct ep_error *error);
    ep_status (*drop_region)(struct ep_rank *rank, uint32_t number, uint64_t deadline_ns, struct ep_error *error);

    /* May wait for room.  Of `pending` the start is filled in. */
    ep_status (*submit)(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                        ep_stream stream, struct ep_error *error);
    /* Is what is put on the stream kept, to run when a graph is launched?  NULL: it never is. */
    ep_status (*captured)(struct ep_rank *rank, ep_stream stream, bool *captured, struct ep_error *error);
    /* Until the handle's ops, or with NULL all of the rank's, are over and handle_result() has what became
     * of them. */
    ep_status (*wait)(struct ep_rank *rank, ep_handle *handle, uint64_t deadline_ns, bool interruptible,
                      struct ep_error *error);
    /* Between own memory and the window, after the ops before; over when they return. */
    ep_status (*write)(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                       struct ep_error *error);
    ep_status (*read)(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                      struct ep_error *error);
    /* `lost` is set: ends what waits for peers or for the server.  Any thread. */
    void (*cut)(struct ep_rank *rank);
    /* False: at the deadline something still runs that uses the rank's memory. */
    bool (*drain)(struct ep_rank *rank, uint64_t deadline_ns);
    /* Nothing runs: unmaps everything.  Works on a half-made rank too. */
    void (*detach)(struct ep_rank *rank);
};

struct ep_rank {
    struct ep_client *client;
    struct ep_rank *next; /* under the client's lock; of one that has left, under following.lock */
    uint64_t id;
    int socket;
    uint32_t rank;
    uint64_t epoch;
    uint8_t ticket[EP_ATTACH_TICKET_BYTES]; /* by which it attached */
    uint32_t ht_sms, ht_sms_at_most; /* ep_join_options; ep_rank_info.ht_sms */
    uint64_t ll_begun, ht_begun; /* ep_rank_info */
    struct group_shape shape;
    uint32_t *local_to_expert;
    ep_home *homes;
    uint32_t n_homes;

    const struct executor *executor; /* NULL until the rank is claimed */
    uint8_t *window; /* cuda: GPU memory, never followed here */
    struct arena arena;
    struct ep_regions regions;
    uint64_t unsure; /* bit i: the server may still have a region i, so none of ours has that number */

    ep_handle *handles[EP_MAX_HANDLES];
    uint32_t generations; /* given so far: no two handles of the rank have the same */
    struct failure failure; /* of handles that are gone */

    /* ring: ops are counted; op n is in slot n mod EP_RING_SLOTS */
    struct ep_control *control; /* the window's start */
    uint64_t head, tail; /* next to submit; oldest that has no result yet */
    struct pending pending[EP_RING_SLOTS];
    uint64_t spin_ns;

    struct device *device; /* cuda */

    /* shared with the monitor and with ep_rank_interrupt(); atomics */
    uint32_t lost;        /* ep_status: why no op can run any more; lost_text is set before */
    uint32_t interrupted;
    uint32_t *waiting;    /* the word that the rank's thread sleeps on */
    int interrupt_fd;     /* eventfd, raised after the flag; lowered by wait_event(), which sleeps on it */
    char lost_text[EP_ERROR_TEXT_MAX];

    pthread_mutex_t events_lock;
    ep_event events[EVENT_QUEUE]; /* under events_lock, like all below */
    uint32_t first_event, n_events;
    uint64_t events_lost;
    int event_fd; /* readable while an event waits */

    struct successor *successor; /* NULL: it does not follow */
    bool ahead;                  /* is the successor of a rank that has not gone over; under following.lock */
    struct turn turn;

    uint32_t asked;                /* under events_lock: number of the last request */
    struct ep_attach_frame answer; /* to it; written under events_lock before `answered` */
    uint32_t answered;             /* 1: it is there; atomic, a word to sleep on */
};

/* What became of one direction. */
struct outcome {
    bool known;
    ep_op_info info;
};

/* A handle's ops on a GPU. */
struct device_ops {
    ep_stream stream; /* of the last one */
    uint64_t round;   /* in which it was given, see struct device */
    uint64_t seen[EP_DEVICE_PARTS]; /* sequence of the last record that was looked at */
    struct pending pending[EP_DEVICE_PARTS]; /* handle NULL: no call since that look */
};

struct ep_handle {
    struct ep_rank *rank;
    uint32_t id, generation;
    bool routed;     /* a dispatch has been submitted: `op` is its descriptor */
    bool combined;   /* and a combine since */
    bool open;       /* a send-only op waits for its complete() */
    enum op_part open_part;
    struct ep_op op; /* of the last dispatch: mode, layout, tokens, top_k ... */
    uint64_t last_seq; /* ring: count of its last op + 1; 0: none */
    struct device_ops device;
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
/* ---- rank.c ------------------------------------------------------------------- */

/* Nothing of it is there yet; NULL: no memory. */
struct ep_rank *rank_new(struct ep_client *client);
/* Frees what is there; works on a half-made rank too. */
void rank_free(struct ep_rank *rank);
/* Is that the head of rank whose's window, in this epoch and group?  EP_PROTOCOL when not. */
ep_status rank_check_window(const struct ep_rank *rank, uint32_t whose, const struct ep_window_head *head,
                            struct ep_error *error);
/* The end of one that has a connection: nothing of it runs, and its program does not have it.  Tells the server. */
void rank_finish(struct ep_rank *rank);

/* ---- advance.c ------------------------------------------------------------------ */

struct joining;

/* Of a new client; and its end, before its ranks': joins the thread, which a call to the server may take timeout_ms. */
void following_init(struct ep_client *client);
void following_stop(struct ep_client *client);
void following_fini(struct ep_client *client);

/* The rank, which joined so, follows from here on; the monitor may not have it yet. */
ep_status follow_begin(struct ep_rank *rank, const struct joining *how, struct ep_error *error);
/* Drops the successor, if there is one that was not handed over.  Also of ranks that do not follow. */
void follow_end(struct ep_rank *rank);

/* True: the rank, which has gone over and is at rest, is finished by the thread. */
bool follow_finishes(struct ep_rank *rank);

/* The position at which the rank begins; nobody shares it yet. */
void turn_begin(struct ep_rank *rank, uint64_t position);
/* EP_OK: a dispatch may begin. */
ep_status turn_check(const struct ep_rank *rank, struct ep_error *error);
/* So many have begun. */
void turn_count(struct ep_rank *rank, uint32_t dispatches);
/* The monitor's thread has heard EPOCH, ASK, TURN. */
void follow_epoch(struct ep_rank *rank, uint64_t epoch);
void turn_asked(struct ep_rank *rank, const struct ep_attach_frame *ask);
void turn_decided(struct ep_rank *rank, const struct ep_attach_frame *turn);

/* ---- wait.c ------------------------------------------------------------------- */

/* Why the rank's ops cannot run any more, as an error; EP_OK when they can. */
ep_status rank_lost(const struct ep_rank *rank, struct ep_error *error);
/* Any thread, the first one counts: no op of the rank will end well any more; ends all waits. */
void rank_lose(struct ep_rank *rank, ep_status why, const char *text);

/* EP_CANCELLED and the flag is down again, when ep_rank_interrupt() was called. */
ep_status take_interrupt(struct ep_rank *rank);
/* Eventfds. */
void raise_fd(int fd);
void lower_fd(int fd);

/* timeout_ms < 0: NO_DEADLINE. */
uint64_t deadline_after(int32_t timeout_ms);
/* EP_OK: wait on.  Else why a wait ends here. */
ep_status wait_over(struct ep_rank *rank, uint64_t deadline_ns, bool interruptible, struct ep_error *error);
/* Sleeps while *word is 0, at most so long and not beyond the deadline; ep_rank_interrupt() and rank_lose()
 * end it. */
void wait_asleep(struct ep_rank *rank, uint32_t *word, uint64_t most_ns, uint64_t deadline_ns,
                 bool interruptible);

/* ---- ring.c ------------------------------------------------------------------- */

extern const struct executor ring_executor;

/* ---- device.c, direct.c, mailbox.c, result.c ----------------------------------- */

extern const struct executor direct_executor;
extern const struct executor mailbox_executor;

#define DEVICE_STREAMS 16u

/* What a rank has of a GPU. */
struct device {
    const struct ep_cuda_api *api;
    uint32_t ordinal;
    uint8_t uuid[EP_CUDA_UUID_BYTES];
    struct ep_cuda_memory *window[EP_MAX_RANKS]; /* the rank's own one; direct: and its peers' */
    ep_stream own;     /* for ops without a stream */
    ep_stream control; /* of the rank's thread, and... */
    ep_stream alarm;   /* of the monitor: copies that must not wait for ops */
    /* Puts an op that was checked on a stream.  Never waits for ops; may be captured. */
    ep_status (*launch)(struct ep_rank *rank, const struct ep_op *op, ep_stream stream, struct ep_error *error);

    /* executor server */
    struct ep_cuda_ringer *ringer;

    /* direct */
    struct ep_cuda_memory *state_memory;
    struct ep_device_state *state; /* GPU memory */
    struct ep_cuda_rank *runner;

    /* Streams with ops since the last ep_sync(), which begins a new round. */
    ep_stream used[DEVICE_STREAMS];
    uint32_t n_used;
    uint64_t round;
    uint32_t pulse; /* always 0: a word to sleep on */

    struct ep_device_report *report; /* GPU memory: of the window */
    struct ep_device_report seen;    /* as of the last look */
};

/*
 * Take the memory that WELCOME (frame and its descriptor, which stays the caller's) brings, or that follows it,
 * and make the rank ready to run ops.  What was made is left to detach() when they fail.
 */
ep_status direct_attach(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, const struct ep_attach_frame *welcome,
                        int fd, struct ep_error *error);
ep_status mailbox_attach(struct ep_rank *rank, const Ep__V1__ClaimReply *reply, const struct ep_attach_frame *welcome,
                         int fd, struct ep_error *error);

/* What these have in common: GPU and streams, before HELLO; the report at the end. */
ep_status device_prepare(struct ep_rank *rank, const struct ep_cuda_api *api, const Ep__V1__ClaimReply *reply,
                         struct ep_error *error);
ep_status device_ready(struct ep_rank *rank, struct ep_error *error);

/* Memory of rank `whose`, which must have the bytes that we expect. */
ep_status device_import(struct ep_rank *rank, int fd, uint64_t bytes, uint64_t expected, const char *what,
                        uint32_t whose, struct ep_cuda_memory **out, struct ep_error *error);
ep_status device_import_window(struct ep_rank *rank, uint32_t whose, uint64_t bytes, int fd, struct ep_error *error);
/* Is it the window of that rank, in our group and epoch? */
ep_status device_check_window(struct ep_rank *rank, uint32_t whose, struct ep_error *error);
/* From GPU memory, beside the ops. */
ep_status device_read(struct device *d, void *to, const void *from, uint64_t bytes, struct ep_error *error);

/* Of struct executor. */
ep_status device_captured(struct ep_rank *rank, ep_stream stream, bool *captured, struct ep_error *error);
ep_status device_submit(struct ep_rank *rank, const struct ep_op *op, const struct pending *pending,
                        ep_stream given, struct ep_error *error);
ep_status device_wait(struct ep_rank *rank, ep_handle *handle, uint64_t deadline_ns, bool interruptible,
                      struct ep_error *error);
ep_status device_copy_in(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                         struct ep_error *error);
ep_status device_copy_out(struct ep_rank *rank, void *to, const void *from, uint64_t bytes, ep_stream stream,
                          struct ep_error *error);
bool device_drain(struct ep_rank *rank, uint64_t deadline_ns);
/* May be what the server has gone for: then the process is of no use either, and with MPS keeps the server from coming back. */
bool device_is_lost(const struct device *device, struct ep_error *error);
void device_detach(struct ep_rank *rank);

/* Looks at the report: what became of the handle's ops, or with NULL of all. */
ep_status device_collect(struct ep_rank *rank, ep_handle *handle, struct ep_error *error);

/* ---- request.c ---------------------------------------------------------------- */

/* For how long a call of the program may ask the server. */
uint64_t request_deadline(const struct ep_rank *rank);
/*
 * Sends it, numbered, with fd (-1: none), and waits: what the server answers.  It is asked again while that is
 * EP_UNAVAILABLE.  EP_DEADLINE_EXCEEDED: it has not answered.
 */
ep_status request(struct ep_rank *rank, struct ep_attach_frame *frame, int fd, uint64_t deadline_ns,
                  struct ep_error *error);
/* The monitor has heard an answer. */
void request_answered(struct ep_rank *rank, const struct ep_attach_frame *frame);

/* ---- handle.c ----------------------------------------------------------------- */

/* Op `seq` of the rank failed; handle: its own, NULL when that is gone. */
void handle_failure(struct ep_rank *rank, ep_handle *handle, uint64_t seq, const struct ep_op_result *result);
/* Told from here on.  EP_OK: there is none. */
ep_status tell_failure(struct failure *failure, struct ep_error *error);
/* The first one of all the rank's ops; those after it count as told with it. */
ep_status tell_first_failure(struct ep_rank *rank, struct ep_error *error);

/* Op `seq` of the rank ended so; pending says whose it was. */
void handle_result(struct ep_rank *rank, uint64_t seq, const struct pending *pending,
                   const struct ep_op_result *result);
void handles_free(struct ep_rank *rank);

/* ---- join.c ------------------------------------------------------------------- */

/* ep_join() for whoever asks. */
struct joining {
    ep_join_options options; /* its texts are only read during the call */
    uint64_t after;          /* epoch of the rank that this one succeeds; 0: of none */
    uint8_t after_ticket[EP_ATTACH_TICKET_BYTES]; /* of that */
};
ep_status join_group(struct ep_client *client, const struct joining *how, struct ep_rank **rank, struct ep_error *error);

/* ---- client.c ----------------------------------------------------------------- */

/* The first line of the file that the environment names, to room[size], which is empty; none is named: it stays so. */
ep_status read_token(const char *variable, char *room, size_t size, struct ep_error *error);
ep_status call_server(struct ep_client *client, const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct ep_error *error);

#endif
