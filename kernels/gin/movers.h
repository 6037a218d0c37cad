/*
 * movers.h: threads that carry long payloads over TCP.
 *
 * Where a payload belongs and what it means is the business of the threads of progress and receive alone (transport.h):
 * they start a move and look whether it is over.  A mover touches the socket, and the memory that the move names, which
 * has to stay until then.
 */
#ifndef EP_GIN_MOVERS_H
#define EP_GIN_MOVERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "ep_error.h"

#define EP_GIN_MOVE_PARTS 8u

struct ep_gin_comm;
struct ep_gin_movers;

/* One direction of a connection; one thread at a time has it, and between start and over a mover. */
struct ep_gin_move {
    struct ep_gin_movers *movers; /* NULL: not open */
    int fd;                       /* of its own, so that both directions can be waited for */
    bool out;
    /* Asked by the mover when all is moved: true when it has set parts anew, so that what follows need not wait for a
     * thread of the owner's.  Where nothing of these goes at once, the move is over all the same.  What it touches is
     * the mover's while the move is under way.  NULL: nothing follows. */
    bool (*more)(void *user);
    void *user;
    /* what to move, set before it starts */
    struct iovec part[EP_GIN_MOVE_PARTS];
    uint32_t parts;
    /* what becomes of it */
    uint32_t next;  /* the first part that is not moved */
    bool fresh;     /* nothing of what `more` has set last is moved */
    uint64_t moved; /* bytes; atomic */
    /* and when it is over */
    int failure;    /* errno; ECONNRESET too when the peer has closed; 0: all is moved */
    uint32_t state; /* atomic */
};

/* All moves are closed before the movers are. */
ep_status ep_gin_movers_open(struct ep_gin_comm *comm, uint32_t threads, struct ep_gin_movers **out,
                             struct ep_error *error);
void ep_gin_movers_close(struct ep_gin_movers *movers);

ep_status ep_gin_move_open(struct ep_gin_movers *movers, int fd, bool out, struct ep_gin_move *move,
                           struct ep_error *error);
/* Its connection is cut where it is still under way. */
void ep_gin_move_close(struct ep_gin_move *move);
void ep_gin_move_start(struct ep_gin_move *move);
bool ep_gin_move_over(const struct ep_gin_move *move);
/* Bytes so far: the memory of these is the caller's again. */
uint64_t ep_gin_move_moved(const struct ep_gin_move *move);

#endif
