#include "plan_devices.h"

#include <string.h>

#define MOST 64u /* devices that are looked at: bits of `apart` */

/* Devices that reach each other; what speaks against them, the first thing most. */
struct set {
    uint64_t devices;
    uint32_t n, fresh, full;
    uint64_t used;
};

static uint32_t looked_at(const struct ep_plan_node *node)
{
    return node->has.devices < MOST ? node->has.devices : MOST;
}

static uint64_t all_of(uint32_t devices)
{
    return devices < MOST ? (1ull << devices) - 1 : UINT64_MAX;
}

static struct set with(struct set set, const struct ep_plan_node *node, uint64_t rank_bytes, uint64_t held, uint32_t device)
{
    set.devices |= 1ull << device;
    set.n++;
    set.fresh += !(held >> device & 1);
    set.full += node->has.device_left && node->has.device_left[device] < rank_bytes;
    set.used += node->device_used[device];
    return set;
}

static bool is_better(const struct set *a, const struct set *b)
{
    if (a->fresh != b->fresh)
        return a->fresh < b->fresh;
    if (a->full != b->full)
        return a->full < b->full;
    return a->used < b->used;
}

/* With the best one of the candidates more. */
static struct set grow(struct set set, const struct ep_plan_node *node, uint64_t rank_bytes, uint64_t held, uint64_t candidates)
{
    struct set best = { 0 };

    for (uint32_t d = 0; d < looked_at(node); d++) {
        const struct set more = with(set, node, rank_bytes, held, d);

        if (candidates >> d & 1 && (!best.n || is_better(&more, &best)))
            best = more;
    }
    return best;
}

static uint64_t reached_by(const struct ep_plan_node *node, uint64_t devices)
{
    uint64_t reached = all_of(looked_at(node));

    for (uint32_t d = 0; node->apart && d < looked_at(node); d++)
        if (devices >> d & 1)
            reached &= ~node->apart[d];
    return reached;
}

/* So many, among them the first.  n is less where there are no more that reach all of the others. */
static struct set around(const struct ep_plan_node *node, uint32_t want, uint64_t rank_bytes, uint64_t held, uint32_t first)
{
    struct set set = with((struct set){ 0 }, node, rank_bytes, held, first);

    while (set.n < want) {
        const uint64_t candidates = reached_by(node, set.devices) & ~set.devices;

        if (!candidates)
            break;
        set = grow(set, node, rank_bytes, held, candidates);
    }
    return set;
}

/* Where GPUs reach each other in islands, as they do, one of these is the best there is. */
static struct set choose(const struct ep_plan_node *node, uint32_t want, uint64_t rank_bytes, uint64_t held)
{
    struct set best = { 0 };

    for (uint32_t first = 0; first < looked_at(node); first++) {
        const struct set set = around(node, want, rank_bytes, held, first);

        if (set.n == want && (!best.n || is_better(&set, &best)))
            best = set;
    }
    return best;
}

void ep_plan_devices(const struct ep_plan_node *node, uint32_t ranks, uint64_t rank_bytes, uint64_t held, uint32_t *device)
{
    struct set set = { 0 };
    uint32_t next = 0;

    if (node->device_used && ranks < looked_at(node))
        set = choose(node, ranks, rank_bytes, held);
    for (uint32_t k = 0; k < ranks; k++) {
        while (set.n && !(set.devices >> next & 1))
            next++;
        device[k] = set.n ? next++ : k % node->has.devices;
    }
}

uint32_t ep_plan_device_at(const struct ep_plan_node *node, const char *device)
{
    uint32_t i = 0;

    while (i < node->has.devices && strcmp(node->device[i], device) != 0)
        i++;
    return i;
}

/* Where the rank was on this node; MOST: elsewhere. */
static uint32_t was_on(const struct ep_plan_node *node, uint32_t own, const struct ep_plan *before, uint32_t rank)
{
    const uint32_t at = rank < before->n_ranks && before->node[rank] == own ? ep_plan_device_at(node, before->device[rank]) : MOST;

    return at < looked_at(node) ? at : MOST;
}

uint64_t ep_plan_held(const struct ep_plan_node *node, const struct ep_plan *plan, uint32_t ranks)
{
    const uint32_t own = plan ? ep_plan_find(plan, node->has.node) : 0;
    uint64_t held = 0;

    for (uint32_t r = 0; plan && r < ranks; r++) {
        const uint32_t at = was_on(node, own, plan, r);

        held |= at < MOST ? 1ull << at : 0;
    }
    return held;
}

/* Swapped with whoever has it now. */
static void take(uint32_t *device, uint32_t ranks, uint32_t k, uint32_t wanted)
{
    for (uint32_t i = 0; i < ranks; i++)
        if (device[i] == wanted) {
            device[i] = device[k];
            device[k] = wanted;
            return;
        }
}

void ep_plan_stay(const struct ep_plan_node *node, const struct ep_plan *before, uint32_t first, uint32_t ranks,
                  uint32_t *device)
{
    const uint32_t own = before ? ep_plan_find(before, node->has.node) : 0;
    uint64_t stayed = 0;

    if (!before || !node->device_used || ranks > node->has.devices)
        return;
    for (uint32_t k = 0; k < ranks; k++) {
        const uint32_t at = was_on(node, own, before, first + k);

        if (at == MOST || stayed >> at & 1) /* once two of them were there */
            continue;
        take(device, ranks, k, at);
        stayed |= 1ull << at;
    }
}
