/*
 * order.h: when the signal of a put may be applied.
 *
 * Pieces of puts land in any order: over several connections, on several transports at once, on a NIC that
 * reorders.  Each put to a peer has a number, one more than the one before it, whatever its context, and says how
 * far back the one before it in its own context is.  A put retires when all of its bytes have landed and the one
 * before it in its context has retired; its signal is applied then.
 *
 * What has not retired is kept in a window of EP_GIN_WINDOW numbers.  Who has a message from beyond it leaves it,
 * and all that follows on that connection, where it is.  That ends: a connection carries puts in the order of their
 * numbers, so whatever the first one in the window misses stands before everything that is beyond.
 *
 * Pure: no memory but its own, no time, one thread.
 */
#ifndef EP_GIN_ORDER_H
#define EP_GIN_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#define EP_GIN_WINDOW 1024u /* a power of two */

struct ep_gin_signal {
    uint32_t region; /* key; 0: no signal */
    uint32_t op;     /* NCCL_SIGNAL_* */
    uint64_t offset, value;
};

struct ep_gin_piece {
    uint64_t number;
    uint32_t back;   /* number - back is the put before it in its context; 0: none, or long ago */
    uint64_t bytes;  /* that have landed */
    uint64_t total;  /* of the put; 0: one piece of 0 bytes */
    struct ep_gin_signal signal;
};

struct ep_gin_slot {
    uint64_t landed, total;
    uint32_t back, next; /* distance to the puts before and after it in its context; 0: none, not known */
    bool seen, retired;
    struct ep_gin_signal signal;
};

struct ep_gin_order {
    uint64_t first; /* lowest number that has not retired */
    struct ep_gin_slot slots[EP_GIN_WINDOW];
};

enum ep_gin_place { EP_GIN_WITHIN, EP_GIN_BEYOND, EP_GIN_BEFORE };

/* *order is zeroed memory.  `first`: the number of the first put. */
void ep_gin_order_init(struct ep_gin_order *order, uint64_t first);
enum ep_gin_place ep_gin_order_place(const struct ep_gin_order *order, uint64_t number);

/*
 * A piece has landed.  Calls apply for the signals of all puts that retire, in the order of each context.
 * False: it contradicts what was told before, or is not within; nothing has changed.
 */
bool ep_gin_order_land(struct ep_gin_order *order, const struct ep_gin_piece *piece,
                       void (*apply)(void *user, const struct ep_gin_signal *signal), void *user);

#endif
