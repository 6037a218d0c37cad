/*
 * Any messages of a peer, on a data connection or in a ring: each is refused, and then changes nothing, or what it says is
 * done inside the regions that it names.
 *
 * The input is a list of messages: which good one it is made from, the distance of its number from the first one that has
 * not retired, and patches to it.  Some are no message: a region goes, and its memory is given back, or comes again.
 */
#include <stdlib.h>
#include <string.h>

#include "transport.h"

enum { REGIONS = 3, PIECE = 4096, BYTES = 3 * PIECE, KINDS = 4, GOES_OR_COMES = KINDS };

static struct ep_gin_region regions[EP_GIN_MAX_REGIONS];
static struct ep_gin_comm comm;
static struct ep_gin_peer peer;

static void check(bool good)
{
    if (!good)
        abort();
}

/* ---- regions ------------------------------------------------------------------------------ */

static uint32_t key_of(uint32_t slot)
{
    return EP_GIN_MAX_REGIONS * (slot + 1) + slot;
}

static void go(uint32_t slot)
{
    regions[slot].key = 0;
    free(regions[slot].at);
    regions[slot].at = NULL;
}

static void come(uint32_t slot)
{
    regions[slot] = (struct ep_gin_region){ .key = key_of(slot), .type = NCCL_MEMORY_HOST, .at = calloc(1, BYTES),
                                            .bytes = BYTES };
    check(regions[slot].at != NULL);
}

static void go_or_come(uint32_t slot)
{
    if (regions[slot].key)
        go(slot);
    else
        come(slot);
}

/* ---- messages ------------------------------------------------------------------------------- */

/* A put of two pieces, of none, of one that is there already, and of one without a signal. */
static struct ep_gin_message template_message(uint32_t kind, uint64_t number)
{
    struct ep_gin_message m = { .magic = EP_GIN_MAGIC, .signal_op = NCCL_SIGNAL_ADD, .number = number, .back = 1,
                                .signal_region = key_of(1), .signal_offset = 16, .signal_value = 5 };

    if (kind == 1)
        return m;
    m.region = key_of(kind % REGIONS);
    m.total = PIECE;
    m.offset = 4097;
    if (kind == 2) {
        m.flags = EP_GIN_WHOLE;
        return m;
    }
    m.flags = EP_GIN_PAYLOAD;
    m.bytes = kind == 0 ? PIECE / 2 : PIECE;
    if (kind == 3)
        m.signal_op = m.signal_region = 0;
    return m;
}

/* count, then count times (word, 4 bytes).  Returns what is used of the input. */
static size_t patch(struct ep_gin_message *m, const uint8_t *data, size_t size)
{
    size_t n = size ? data[0] % 4u : 0, used = size ? 1 : 0;

    for (size_t i = 0; i < n && size - used >= 5; i++, used += 5)
        memcpy((uint8_t *)m + data[used] % (sizeof *m / 4) * 4, data + used + 1, 4);
    return used;
}

static void land(const struct ep_gin_message *m)
{
    static struct ep_gin_order before;

    before = peer.order;
    if (!ep_gin_landed(&peer, m))
        check(memcmp(&before, &peer.order, sizeof before) == 0);
    check(peer.order.first - before.first <= EP_GIN_WINDOW);
    check(peer.order.slots[m->number % EP_GIN_WINDOW].landed <= peer.order.slots[m->number % EP_GIN_WINDOW].total);
}

/* As a transport does it. */
static void hear(const struct ep_gin_message *m)
{
    const struct ep_gin_region *region;
    void *to;
    const enum ep_gin_verdict verdict = ep_gin_judge(&peer, m, &region, &to);

    if (verdict == EP_GIN_REFUSE || verdict == EP_GIN_LATER)
        return;
    check((verdict == EP_GIN_TAKE && m->total > 0) == (to != NULL));
    check(!(m->flags & EP_GIN_PAYLOAD) || (m->bytes > 0 && m->bytes <= PIECE));
    check(m->signal_op == 0 || m->signal_offset % sizeof(uint64_t) == 0);
    if (to)
        memset(to, 0x5a, ep_gin_message_bytes(m));
    land(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    comm = (struct ep_gin_comm){ .ranks = 2, .regions = regions };
    peer = (struct ep_gin_peer){ .comm = &comm, .rank = 1, .piece_bytes = PIECE };
    ep_gin_order_init(&peer.order, size ? data[0] - 128u : 1); /* numbers may wrap */
    for (uint32_t slot = 0; slot < REGIONS; slot++)
        come(slot);
    for (size_t used = 1; used + 2 <= size;) {
        const uint8_t kind = data[used] % (KINDS + 1), distance = data[used + 1];
        struct ep_gin_message m = template_message(kind, peer.order.first + distance);

        used += 2;
        if (kind == GOES_OR_COMES) {
            go_or_come(distance % REGIONS);
            continue;
        }
        used += patch(&m, data + used, size - used);
        hear(&m);
    }
    for (uint32_t slot = 0; slot < REGIONS; slot++)
        go(slot);
    return 0;
}
