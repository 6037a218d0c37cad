#include "order.h"

#include <string.h>

static struct ep_gin_slot *slot_of(struct ep_gin_order *order, uint64_t number)
{
    return &order->slots[number % EP_GIN_WINDOW];
}

void ep_gin_order_init(struct ep_gin_order *order, uint64_t first)
{
    order->first = first;
}

/* Differences, so that numbers may wrap. */
enum ep_gin_place ep_gin_order_place(const struct ep_gin_order *order, uint64_t number)
{
    const uint64_t ahead = number - order->first;

    if (ahead < EP_GIN_WINDOW)
        return EP_GIN_WITHIN;
    return ahead < UINT64_MAX / 2 ? EP_GIN_BEYOND : EP_GIN_BEFORE;
}

static bool complete(const struct ep_gin_slot *slot)
{
    return slot->seen && slot->landed == slot->total;
}

/* ---- checks ------------------------------------------------------------------------------ */

static bool same_signal(const struct ep_gin_signal *a, const struct ep_gin_signal *b)
{
    return a->region == b->region && a->op == b->op && a->offset == b->offset && a->value == b->value;
}

/* What is behind the window has retired, whoever it was. */
static struct ep_gin_slot *before(struct ep_gin_order *order, const struct ep_gin_piece *piece)
{
    if (piece->back == 0 || ep_gin_order_place(order, piece->number - piece->back) != EP_GIN_WITHIN)
        return NULL;
    return slot_of(order, piece->number - piece->back);
}

static bool fits_again(const struct ep_gin_slot *slot, const struct ep_gin_piece *piece)
{
    return slot->total == piece->total && slot->back == piece->back && piece->bytes != 0 &&
           piece->bytes <= slot->total - slot->landed && same_signal(&slot->signal, &piece->signal);
}

static bool fits_first(struct ep_gin_order *order, const struct ep_gin_piece *piece)
{
    const struct ep_gin_slot *previous = before(order, piece);

    if (previous && previous->next != 0)
        return false;
    return piece->bytes <= piece->total && (piece->bytes != 0) == (piece->total != 0);
}

/* ---- landing ------------------------------------------------------------------------------- */

static void enter(struct ep_gin_order *order, const struct ep_gin_piece *piece)
{
    struct ep_gin_slot *slot = slot_of(order, piece->number), *previous = before(order, piece);

    slot->seen = true;
    slot->total = piece->total;
    slot->back = piece->back;
    slot->signal = piece->signal;
    if (previous)
        previous->next = piece->back;
}

static bool may_retire(struct ep_gin_order *order, uint64_t number)
{
    const struct ep_gin_slot *slot = slot_of(order, number);
    const uint64_t previous = number - slot->back;

    if (!complete(slot))
        return false;
    return slot->back == 0 || ep_gin_order_place(order, previous) != EP_GIN_WITHIN || slot_of(order, previous)->retired;
}

static void advance(struct ep_gin_order *order)
{
    while (slot_of(order, order->first)->retired) {
        memset(slot_of(order, order->first), 0, sizeof(struct ep_gin_slot));
        order->first++;
    }
}

/* The put, and those after it in its context that have waited for it. */
static void retire_from(struct ep_gin_order *order, uint64_t number,
                        void (*apply)(void *user, const struct ep_gin_signal *signal), void *user)
{
    while (may_retire(order, number)) {
        struct ep_gin_slot *slot = slot_of(order, number);

        slot->retired = true;
        if (slot->signal.region != 0)
            apply(user, &slot->signal);
        if (slot->next == 0)
            break;
        number += slot->next;
    }
    advance(order);
}

bool ep_gin_order_land(struct ep_gin_order *order, const struct ep_gin_piece *piece,
                       void (*apply)(void *user, const struct ep_gin_signal *signal), void *user)
{
    struct ep_gin_slot *slot = slot_of(order, piece->number);

    if (ep_gin_order_place(order, piece->number) != EP_GIN_WITHIN)
        return false;
    if (slot->seen ? !fits_again(slot, piece) : !fits_first(order, piece))
        return false;
    if (!slot->seen)
        enter(order, piece);
    slot->landed += piece->bytes;
    retire_from(order, piece->number, apply, user);
    return true;
}
