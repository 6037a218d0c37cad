/*
 * attach_private: what the files of this folder share.  Everything is owned by the loop's thread.
 *
 *   attach.c      open, close, who is allowed, the limits
 *   claim.c       tickets, and the claimed rank from the claim to its release
 *   connection.c  one side-socket connection: hello, events out, end
 *   listener.c    the socket file and accept
 *   process.c     is a process still there?
 *
 * A claim's life, transitions in claim.c:
 *
 *   RESERVED  -- hello with the ticket --> ATTACHED    the rank takes part
 *   RESERVED  -- ticket expires -------> (freed)
 *   RESERVED  -- process gone ---------> (freed)       also before it is taken in
 *   ATTACHED  -- BYE ------------------> (freed)       memory reusable; also before it is taken in
 *   ATTACHED  -- process gone ---------> (freed)       the same
 *   ATTACHED  -- connection ends ------> LEAVING       the rank is absent, its process may live
 *   ATTACHED  -- group is gone --------> LEAVING       the same, connection kept for its BYE
 *   LEAVING   -- BYE or process gone --> (freed)       memory reusable
 */
#ifndef EP_ATTACH_PRIVATE_H
#define EP_ATTACH_PRIVATE_H

#include "attach_frame.h"
#include "ep_attach.h"

/* Events that wait for a worker that does not read. */
#define EVENT_QUEUE 64u

struct claim;
struct connection;

struct listener {
    uv_poll_t poll;
    uv_timer_t pause; /* running: out of descriptors, not accepting */
    int fd;
    char *path;
    dev_t dev; /* of our socket file: we remove no other */
    ino_t ino;
};

struct ep_attach {
    uv_loop_t *loop;
    struct ep_groups *groups;
    struct ep_node *node;
    struct listener listener;
    mode_t mode;
    bool (*is_allowed)(uid_t uid, gid_t gid, void *user);
    void *user;
    char *token;
    uint32_t ticket_ms, hello_timeout_ms, max_connections;
    uint32_t n_connections;
    uint32_t open_handles; /* uv handles that are not closed yet, connections' and claims' included */
    bool closing;
    void (*on_closed)(void *user);
    void *closed_user;
    struct claim *claims;
    struct connection *oldest, *newest; /* by time of accept */
    struct ep_attach_counters counters;
};

/* One uv handle of this attach is there; one has been closed (the last one ends ep_attach_close). */
void attach_handle_opened(struct ep_attach *attach);
void attach_handle_closed(struct ep_attach *attach);

/* ---- process.c ---------------------------------------------------------------- */

/* Watches for the end of a process. */
struct process {
    pid_t pid;         /* 0: in a pid namespace that we do not see */
    int pidfd;         /* -1: the kernel has none to give */
    uint64_t start;    /* when it started, in clock ticks; tells a reused pid; 0: unknown */
    uint64_t watch_ns; /* when we began to watch */
};

/* socket: connected to it; its pidfd comes from there when the kernel can.  -1: none. */
void process_open(struct process *process, pid_t pid, int socket);
void process_close(struct process *process);
bool process_gone(const struct process *process);
/* It has begun to end: what it had open is being closed.  False also when that cannot be seen. */
bool process_dying(const struct process *process);

/* ---- listener.c --------------------------------------------------------------- */

ep_status listener_open(struct ep_attach *attach, const char *path, struct ep_error *error);
void listener_close(struct ep_attach *attach);

/* ---- connection.c ------------------------------------------------------------- */

/* JOINING: it has said hello, and waits for its rank to be taken in. */
enum connection_state { CONNECTION_SILENT, CONNECTION_JOINING, CONNECTION_ATTACHED, CONNECTION_CLOSED };

struct connection {
    struct ep_attach *attach;
    struct connection *older, *newer;
    enum connection_state state;
    int fd;
    pid_t pid;
    uid_t uid;
    struct claim *claim;
    uint32_t memory, memories; /* the next to be sent, of how many: WELCOME takes the first */
    bool asking;               /* a request of the worker has no answer yet: like a handle, it keeps this struct */
    uint32_t asked;            /* its number */
    uv_poll_t poll;
    uv_timer_t deadline; /* of the hello */
    unsigned handles;
    /* Events the socket had no room for. */
    struct ep_attach_frame *queue; /* [EVENT_QUEUE], allocated when first needed */
    uint32_t first, queued;
    uint64_t lost;
};

/* Takes the descriptor over, whatever comes. */
void connection_accept(struct ep_attach *attach, int fd);
/* Ends the one that has been silent the longest; false when all have said hello. */
bool connection_drop_silent(struct ep_attach *attach);
void connection_event(struct connection *connection, const struct ep_attach_frame *event);
/* One that is never dropped: a worker that has not read so many before is cut off, when the loop runs again. */
void connection_tell(struct connection *connection, const struct ep_attach_frame *frame);
/* The rank of its claim is attached, or why not: then the claim is gone, and the connection closed. */
void connection_joined(struct connection *connection, const struct ep_error *error);
/* Closes the socket; frees it when its handles are closed.  The claim is not touched. */
void connection_close(struct connection *connection);

/* ---- claim.c ------------------------------------------------------------------ */

enum claim_state { CLAIM_RESERVED, CLAIM_JOINING, CLAIM_ATTACHED, CLAIM_LEAVING };

struct claim {
    struct ep_attach *attach;
    struct claim *next;
    enum claim_state state;
    uint8_t ticket[EP_ATTACH_TICKET_BYTES];
    char *worker; /* its name */
    pid_t pid;
    uid_t uid;
    Ep__V1__Executor executor; /* asked for */
    uint32_t ht_sms;           /* asked for */
    bool follow;
    uint64_t after; /* as in struct ep_worker */
    struct ep_membership *membership;
    struct connection *joining;    /* JOINING: who waits for its welcome */
    struct connection *connection; /* NULL: none (yet or any more) */
    struct process process;        /* without a pidfd from JOINING on */
    uv_timer_t timer;              /* RESERVED: expiry.  LEAVING without pidfd: look again */
    uv_poll_t gone;                /* with pidfd */
    bool gone_open;
    bool on_gpu;                   /* kernels of peers wait for its ops */
    bool detached;                 /* the group said so; acted on when the loop runs again */
    bool is_draining;              /* its worker is to hear that it should leave, when it is welcomed: */
    struct ep_attach_frame draining;
    char *reason;
    unsigned handles;
};

/* The one that `ticket` belongs to, if this peer may use it now.  Else NULL and why. */
struct claim *claim_find(struct ep_attach *attach, const uint8_t *ticket, pid_t pid, uid_t uid,
                         struct ep_error *error);
/* RESERVED -> JOINING; then connection_joined(), before this returns or later, unless the connection ends first. */
void claim_attach(struct claim *claim, struct connection *connection);
/* From now on it hears events, and what it must not miss of those before. */
void claim_welcomed(struct claim *claim, struct connection *connection);
/* The worker said BYE: it has nothing mapped.  turned_to: the epoch to which it has gone over; 0: it just leaves. */
void claim_bye(struct claim *claim, uint64_t turned_to);
/* The connection ended without BYE. */
void claim_disconnected(struct claim *claim, const char *why);
/* At close: whatever state it is in. */
void claim_abandon(struct claim *claim, const char *why);

#endif
