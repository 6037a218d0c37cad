/*
 * attach_frame: what passes on the side socket between a worker and its ep-server.
 *
 * The socket is AF_UNIX, SOCK_SEQPACKET: one frame per message.  The worker sends HELLO with the
 * ticket that the Attach service gave it; the server answers WELCOME with the window's file
 * descriptor in SCM_RIGHTS, or REFUSED, and closes.  From then on the connection is the
 * attachment: when it closes the rank is released.  A worker that runs its own ops (executor direct)
 * gets more memory right after WELCOME, a descriptor in each MEMORY frame.  BYE says that the worker has unmapped the
 * window, so the memory can be reused at once; without it the server waits for the process to go.  It may follow HELLO
 * at any time: a worker that cannot make use of what it is given, or does not wait for it any more, says it too.
 *
 * A worker whose ops the server runs on a GPU (executor server) may have it map GPU memory of the worker's own, for
 * these ops: REGISTER with a descriptor, UNREGISTER.  Each of them has one ANSWER, with the same count, in its own time
 * among the events; a worker waits for it before it asks again, and is answered EP_UNAVAILABLE when it does not.
 *
 * A worker that follows its group (its claim said so) is asked about the turn to the next epoch, on the connection of
 * the epoch that it leaves: ASK, to which it answers PROMISE, and in the end TURN.  These are never dropped, as events
 * may be; a worker that does not read them is cut off.  A rank's *position* is how many dispatches, LL and HT, have
 * begun before, counted from the epoch's beginning by the group's numbers (HT combines have none of their own); WELCOME
 * says at which the worker begins, and how many of these are HT.  *passed* is 1 + the position of the last boundary
 * between its steps that it passed without turning; before the first it is 1 + the position at which it began.  A worker
 * that promises T waits for the decision at the first boundary whose position is T or more, for the group's timeout at
 * most; at that boundary it goes over when it hears TURN, and goes on when it hears of another ASK that does not ask
 * for it.
 *
 * Frames are host-endian: both ends are on one host.
 */
#ifndef EP_ATTACH_FRAME_H
#define EP_ATTACH_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "ep_error.h"

#define EP_ATTACH_MAGIC 0x41535045u /* "EPSA" */
#define EP_ATTACH_VERSION 5u
#define EP_ATTACH_TICKET_BYTES 16u
#define EP_ATTACH_TEXT_BYTES 256u
#define EP_ATTACH_NO_TURN UINT64_MAX /* ASK: promises nothing; what was promised is withdrawn */
#define EP_ATTACH_MISSED 0ull /* TURN: the others have gone over, or will, at a position that is not for this rank */
#define EP_ATTACH_FURTHEST (1ull << 56) /* no position is beyond: ops have no higher numbers */

enum ep_attach_type {
    EP_ATTACH_HELLO = 1,   /* worker: ticket */
    EP_ATTACH_WELCOME = 2, /* server: + fd */
    EP_ATTACH_REFUSED = 3, /* server: status, text */
    EP_ATTACH_EVENT = 4,   /* server: event */
    EP_ATTACH_BYE = 5,     /* worker: window unmapped; epoch: to which it has gone over, with all that it began
                            * finished; 0: it just leaves */
    EP_ATTACH_MEMORY = 6,  /* server: + fd; as many as WELCOME's count */
    EP_ATTACH_REGISTER = 7,   /* worker: + fd; region, value, offset */
    EP_ATTACH_UNREGISTER = 8, /* worker: region */
    EP_ATTACH_ANSWER = 9,     /* server: status, text */
    EP_ATTACH_ASK = 10,       /* server: epoch, value; answered by PROMISE with the same count */
    EP_ATTACH_PROMISE = 11,   /* worker: status, value, offset; EP_ABORTED: it has passed the boundary asked for */
    EP_ATTACH_TURN = 12       /* server: epoch, value; decided */
};

/* What the descriptor of a MEMORY frame is. */
enum ep_attach_memory {
    EP_ATTACH_MEMORY_STATE = 1, /* the rank's struct ep_device_state */
    EP_ATTACH_MEMORY_WINDOW = 2 /* a peer's window; rank: whose */
};

enum ep_attach_event {
    EP_ATTACH_RANK_LOST = 1,   /* rank, text: why */
    EP_ATTACH_RANK_JOINED = 2, /* rank */
    EP_ATTACH_EPOCH = 3,       /* epoch: a newer one is there; join again to move */
    EP_ATTACH_DRAINING = 4,    /* text: the server or node wants this worker to leave */
    EP_ATTACH_DETACHED = 5,    /* text: the group was deleted */
    EP_ATTACH_EVENTS_LOST = 6  /* value: how many the worker did not read in time */
};

struct ep_attach_frame {
    uint32_t magic;
    uint16_t version;
    uint16_t type;      /* enum ep_attach_type */
    uint32_t status;    /* REFUSED, ANSWER: ep_status; PROMISE: EP_OK or EP_ABORTED */
    uint32_t event;     /* EVENT: enum ep_attach_event */
    uint32_t rank;      /* WELCOME: own; EVENT, MEMORY: whose */
    uint32_t count;     /* WELCOME: MEMORY frames that follow; MEMORY: enum ep_attach_memory; REGISTER, UNREGISTER,
                         * ANSWER: the worker's number of the request; ASK, PROMISE: the server's; else 0 */
    uint64_t epoch;     /* ASK, PROMISE, TURN: that to go over to, not 0; BYE */
    uint64_t value;     /* WELCOME: window bytes; MEMORY, REGISTER: its bytes; ASK: position, or EP_ATTACH_NO_TURN;
                         * TURN: position, or EP_ATTACH_MISSED; PROMISE: passed */
    uint64_t offset;    /* REGISTER: where these begin in the memory of the descriptor; WELCOME: position at which the
                         * rank begins; PROMISE: position now; else 0 */
    uint64_t ht;        /* WELCOME: dispatches of the position that are HT; else 0 */
    uint32_t region;    /* REGISTER, UNREGISTER: number of the region, see window.h; else 0 */
    uint32_t reserved;  /* 0 */
    uint8_t ticket[EP_ATTACH_TICKET_BYTES]; /* HELLO */
    char text[EP_ATTACH_TEXT_BYTES];        /* NUL-terminated */
};
_Static_assert(sizeof(struct ep_attach_frame) == 336, "ep_attach_frame is part of the protocol");

void ep_attach_frame_init(struct ep_attach_frame *frame, enum ep_attach_type type);

/*
 * bytes/n: one message as it came off the socket, any content.  Fills *frame when it is a whole
 * frame of this version whose fields make sense; else EP_PROTOCOL and the field that does not.
 */
ep_status ep_attach_frame_parse(const void *bytes, size_t n, struct ep_attach_frame *frame,
                                struct ep_error *error);

/*
 * One frame on a connected socket, with at most one descriptor (-1: none).  Never blocks longer
 * than the socket does; EP_UNAVAILABLE when it would block, EP_SERVER_LOST when the other side is
 * gone.  MSG_NOSIGNAL, so no SIGPIPE.
 */
ep_status ep_attach_send(int socket, const struct ep_attach_frame *frame, int fd, struct ep_error *error);

/* What *fd is when one came that this process has no room for (ulimit -n): the system has closed it. */
#define EP_ATTACH_FD_LOST (-2)

/* The next frame; *fd gets the descriptor that came with it (close-on-exec), -1, or EP_ATTACH_FD_LOST.  Surplus
 * descriptors are closed.  Same errors as send, EP_PROTOCOL for anything that is no frame. */
ep_status ep_attach_receive(int socket, struct ep_attach_frame *frame, int *fd, struct ep_error *error);

#endif
