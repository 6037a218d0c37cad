#include "ring.h"

#include <string.h>

void ep_gin_ring_format(struct ep_gin_ring *ring)
{
    ring->magic = EP_GIN_MAGIC;
    ring->version = EP_GIN_RING_VERSION;
}

bool ep_gin_ring_valid(const struct ep_gin_ring *ring)
{
    return ring->magic == EP_GIN_MAGIC && ring->version == EP_GIN_RING_VERSION;
}

bool ep_gin_ring_write(struct ep_gin_ring *ring, const struct ep_gin_message *message)
{
    const uint64_t at = ring->written;

    if (at - __atomic_load_n(&ring->read, __ATOMIC_ACQUIRE) >= EP_GIN_RING_SLOTS) /* partner: ep_gin_ring_next */
        return false;
    memcpy(&ring->slots[at % EP_GIN_RING_SLOTS], message, sizeof *message);
    /* Partner: ep_gin_ring_peek; and in one order with `asleep`, see ep_gin_ring_sleep. */
    __atomic_store_n(&ring->written, at + 1, __ATOMIC_SEQ_CST);
    return true;
}

bool ep_gin_ring_sleeps(const struct ep_gin_ring *ring)
{
    return __atomic_load_n(&ring->asleep, __ATOMIC_SEQ_CST) != 0;
}

bool ep_gin_ring_peek(const struct ep_gin_ring *ring, struct ep_gin_message *message, bool *broken)
{
    const uint64_t at = ring->read;
    const uint64_t there = __atomic_load_n(&ring->written, __ATOMIC_SEQ_CST) - at; /* partner: ep_gin_ring_write */

    *broken = there > EP_GIN_RING_SLOTS;
    if (there == 0 || *broken)
        return false;
    memcpy(message, &ring->slots[at % EP_GIN_RING_SLOTS], sizeof *message);
    return true;
}

void ep_gin_ring_next(struct ep_gin_ring *ring)
{
    __atomic_store_n(&ring->read, ring->read + 1, __ATOMIC_RELEASE); /* partner: ep_gin_ring_write */
}

/* The writer writes, then looks here; the reader says this, then looks there (Dekker): one of them sees the other. */
void ep_gin_ring_sleep(struct ep_gin_ring *ring, bool asleep)
{
    __atomic_store_n(&ring->asleep, asleep, __ATOMIC_SEQ_CST);
}
