/* Do a group's windows fit, and if not, what would. */
#include <inttypes.h>
#include <stdio.h>

#include "spec.h"

/* One search: token counts that vary, everything else as settled. */
struct search {
    const struct ep_limits *limits;
    const struct ep_placement *placement;
    const struct ep_spec_bounds *bounds;
    bool default_arena;
    uint64_t memory; /* that one rank may have */
    uint32_t ll, ht; /* the settled counts; 0: the mode is not part of the group */
    bool vary_ll, vary_ht;
};

static bool fits(const struct search *s, uint32_t ll, uint32_t ht)
{
    struct ep_limits limits = *s->limits;
    struct ep_layout_map map;

    limits.ll_max_tokens = ll;
    limits.ht_max_tokens = ht;
    return ep_spec_layout(&limits, s->default_arena, &map, NULL) == EP_OK &&
           ep_spec_rank_bytes(&map, s->placement, s->bounds) <= s->memory;
}

/* share / 2^16 of count, at least 1 of what there is. */
static uint32_t scale(uint32_t count, bool vary, uint32_t share)
{
    uint32_t scaled = (uint32_t)((uint64_t)count * share >> 16);

    return !vary || !count ? count : scaled ? scaled : 1;
}

/* The largest share that fits; false: not even one token does. */
static bool largest(const struct search *s, uint32_t *ll, uint32_t *ht)
{
    uint32_t low = 0, high = 1u << 16; /* low fits, high does not */

    if (!fits(s, scale(s->ll, s->vary_ll, 0), scale(s->ht, s->vary_ht, 0)))
        return false;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (fits(s, scale(s->ll, s->vary_ll, middle), scale(s->ht, s->vary_ht, middle)))
            low = middle;
        else
            high = middle;
    }
    *ll = scale(s->ll, s->vary_ll, low);
    *ht = scale(s->ht, s->vary_ht, low);
    return true;
}

/* The exact largest of one count: a share is coarser than a token above 2^16 of them. */
static uint32_t grow(const struct search *s, uint32_t ll, uint32_t ht)
{
    uint32_t *count = s->vary_ll ? &ll : &ht;

    while (*count < (s->vary_ll ? s->ll : s->ht)) {
        ++*count;
        if (!fits(s, ll, ht))
            return *count - 1;
    }
    return *count;
}

static void advise(struct search *s, char *text, size_t size)
{
    uint32_t ll, ht;
    char by_ll[48] = "", by_ht[48] = "";

    s->vary_ll = s->ll > 0;
    s->vary_ht = false;
    if (s->vary_ll && largest(s, &ll, &ht))
        snprintf(by_ll, sizeof by_ll, "ll_max_tokens %u", grow(s, ll, ht));
    s->vary_ll = false;
    s->vary_ht = s->ht > 0;
    if (s->vary_ht && largest(s, &ll, &ht))
        snprintf(by_ht, sizeof by_ht, "ht_max_tokens %u", grow(s, ll, ht));
    if (*by_ll || *by_ht) {
        snprintf(text, size, "%s%s%s would fit", by_ll, *by_ll && *by_ht ? " or " : "", by_ht);
        return;
    }
    s->vary_ll = s->ll > 0;
    if (s->vary_ll && s->vary_ht && largest(s, &ll, &ht))
        snprintf(text, size, "ll_max_tokens %u with ht_max_tokens %u would fit", ll, ht);
    else
        snprintf(text, size, "%s",
                 s->default_arena ? "no number of tokens would fit: lower hidden, top_k or ranks"
                                  : "no number of tokens would fit: lower arena_bytes or ranks");
}

/* Of `ranks` in all; every device that has memory of its own shares it out among the ranks on it. */
struct share {
    uint64_t memory;
    uint32_t device, ranks; /* whose memory is the scarcest, how many ranks are on it */
};

static struct share smallest_share(uint32_t ranks, const struct ep_spec_bounds *bounds)
{
    struct share smallest = { .memory = bounds->memory_left / ranks, .ranks = ranks };

    if (!bounds->device_left)
        return smallest;
    smallest.memory = UINT64_MAX;
    for (uint32_t device = 0; device < bounds->devices && device < ranks; device++) {
        uint32_t here = (ranks - device - 1) / bounds->devices + 1;
        uint64_t memory = bounds->device_left[device] / here;

        if (memory < smallest.memory)
            smallest = (struct share){ .memory = memory, .device = device, .ranks = here };
    }
    return smallest;
}

static ep_status refuse(const struct ep_settled *settled, const struct ep_spec_bounds *bounds,
                        const struct share *share, const char *advice, struct ep_error *error)
{
    if (!bounds->device_left)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "%u windows of %" PRIu64 " bytes need %" PRIu64 ", node %s has %" PRIu64 " left: %s",
                            share->ranks, settled->rank_bytes, settled->rank_bytes * share->ranks, bounds->node,
                            bounds->memory_left, advice);
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                        "%u of the ranks are on GPU %u of node %s and need %" PRIu64 " bytes each, it has %" PRIu64
                        " left: %s",
                        share->ranks, share->device, bounds->node, settled->rank_bytes,
                        bounds->device_left[share->device], advice);
}

ep_status ep_spec_fit(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                      const struct ep_spec_bounds *bounds, struct ep_error *error)
{
    const struct ep_limits *limits = &settled->map.limits;
    const struct share share = smallest_share(limits->ranks, bounds);
    struct search s = {
        .limits = limits,
        .placement = &settled->placement,
        .bounds = bounds,
        .default_arena = !asked->arena_bytes,
        .memory = share.memory,
        .ll = limits->ll_max_tokens,
        .ht = limits->ht_max_tokens,
    };
    char advice[160];

    if (settled->rank_bytes <= share.memory)
        return EP_OK;
    advise(&s, advice, sizeof advice);
    return refuse(settled, bounds, &share, advice, error);
}
