/*
 * ring.h: messages from one process to another through memory that both have mapped, or within one.
 *
 * One writer and one reader.  Each owns one index and only looks at the other's.  The reader copies a message out
 * before it believes it.
 */
#ifndef EP_GIN_RING_H
#define EP_GIN_RING_H

#include "message.h"

#define EP_GIN_RING_VERSION 1u
#define EP_GIN_RING_SLOTS 1024u /* a power of two */

struct ep_gin_ring {
    uint32_t magic, version;
    uint8_t pad0[56];
    uint64_t written; /* messages ever; the writer's */
    uint8_t pad1[56];
    uint64_t read;    /* the reader's */
    uint8_t pad2[56];
    uint32_t asleep;  /* the reader's: it wants to be woken */
    uint8_t pad3[60];
    struct ep_gin_message slots[EP_GIN_RING_SLOTS];
};
_Static_assert(offsetof(struct ep_gin_ring, written) == 64, "ep_gin_ring.written");
_Static_assert(offsetof(struct ep_gin_ring, read) == 128, "ep_gin_ring.read");
_Static_assert(offsetof(struct ep_gin_ring, asleep) == 192, "ep_gin_ring.asleep");
_Static_assert(offsetof(struct ep_gin_ring, slots) == 256, "ep_gin_ring.slots");
_Static_assert(sizeof(struct ep_gin_ring) == 256 + EP_GIN_RING_SLOTS * sizeof(struct ep_gin_message), "ep_gin_ring");

/* Of zeroed memory. */
void ep_gin_ring_format(struct ep_gin_ring *ring);
bool ep_gin_ring_valid(const struct ep_gin_ring *ring);

/* Writer.  False: full. */
bool ep_gin_ring_write(struct ep_gin_ring *ring, const struct ep_gin_message *message);
/* Writer, after one or more: has the reader to be woken? */
bool ep_gin_ring_sleeps(const struct ep_gin_ring *ring);

/* Reader: the next message, which stays until next; false: there is none.  *broken: the writer's index makes no
 * sense. */
bool ep_gin_ring_peek(const struct ep_gin_ring *ring, struct ep_gin_message *message, bool *broken);
void ep_gin_ring_next(struct ep_gin_ring *ring);
/* Reader: after true, one more look before it sleeps. */
void ep_gin_ring_sleep(struct ep_gin_ring *ring, bool asleep);

#endif
