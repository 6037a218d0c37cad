/* Do a group's windows fit, and if not, what would. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "spec.h"

#define LOWEST_PART 8u /* of a default: below this a size is better asked for than found out by who needs more */

/* The memory that is the scarcest for one rank. */
struct share {
    const struct ep_spec_pool *pool;
    uint64_t bytes; /* that a rank may have */
    uint64_t granule;
};

/* One search: token counts that vary, everything else as settled. */
struct search {
    const struct ep_limits *limits;
    const struct ep_placement *placement;
    struct ep_spec_bounds bounds;
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
           ep_spec_rank_bytes(&map, s->placement, &s->bounds) <= s->memory;
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

/* The largest of the counts that vary; false: not even one token fits. */
static bool best(struct search *s, bool vary_ll, bool vary_ht, uint32_t *ll, uint32_t *ht)
{
    s->vary_ll = vary_ll && s->ll;
    s->vary_ht = vary_ht && s->ht;
    if ((!s->vary_ll && !s->vary_ht) || !largest(s, ll, ht))
        return false;
    if (s->vary_ll != s->vary_ht)
        *(s->vary_ll ? ll : ht) = grow(s, *ll, *ht);
    return true;
}

/* The largest arena, the tokens as they are; 0: none. */
static uint64_t best_arena(const struct search *s)
{
    struct ep_limits limits = *s->limits;
    struct search with = *s;
    uint64_t low = 0, high = s->limits->arena_bytes; /* low fits, high does not */

    with.limits = &limits;
    limits.arena_bytes = 0;
    if (!fits(&with, s->ll, s->ht))
        return 0;
    while (high - low > 1) {
        limits.arena_bytes = low + (high - low) / 2;
        if (fits(&with, s->ll, s->ht))
            low = limits.arena_bytes;
        else
            high = limits.arena_bytes;
    }
    return low;
}

__attribute__((format(printf, 3, 4))) static void add_choice(char *text, size_t size, const char *format, ...)
{
    const size_t used = strlen(text), start = used + (used ? 4 : 0);
    va_list args;

    if (start >= size)
        return;
    if (used)
        memcpy(text + used, " or ", 5);
    va_start(args, format);
    vsnprintf(text + start, size - start, format, args);
    va_end(args);
}

/* Each by itself, and what lies between them only where none of them does. */
static void advise(struct search *s, char *text, size_t size)
{
    uint32_t ll, ht;
    uint64_t arena = s->default_arena ? 0 : best_arena(s);

    *text = '\0';
    if (best(s, true, false, &ll, &ht))
        add_choice(text, size, "ll_max_tokens %u", ll);
    if (best(s, false, true, &ll, &ht))
        add_choice(text, size, "ht_max_tokens %u", ht);
    if (arena)
        add_choice(text, size, "arena_bytes %" PRIu64, arena);
    if (!*text && s->ll && s->ht && best(s, true, true, &ll, &ht))
        add_choice(text, size, "ll_max_tokens %u with ht_max_tokens %u", ll, ht);
    if (*text)
        snprintf(text + strlen(text), size - strlen(text), " would fit");
    else
        snprintf(text, size, "%s", s->default_arena ? "no number of tokens would fit: lower hidden, top_k or ranks"
                                                    : "no number of tokens would fit: lower arena_bytes or ranks");
}

/* Windows are symmetric: the smallest share decides for all. */
static struct share smallest_share(const struct ep_spec_pool *pools, size_t n)
{
    struct share smallest = { .pool = pools, .bytes = UINT64_MAX };

    for (size_t i = 0; i < n; i++) {
        const uint64_t left = pools[i].left > pools[i].beside ? pools[i].left - pools[i].beside : 0;

        if (pools[i].granule > smallest.granule)
            smallest.granule = pools[i].granule;
        if (!pools[i].ranks || left / pools[i].ranks >= smallest.bytes)
            continue;
        smallest.bytes = left / pools[i].ranks;
        smallest.pool = &pools[i];
    }
    return smallest;
}

static struct search search_of(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                               const struct share *share)
{
    const struct ep_limits *limits = &settled->map.limits;

    return (struct search){
        .limits = limits,
        .placement = &settled->placement,
        .bounds = { .backend = settled->spec->backend, .granule = share->granule },
        .default_arena = !asked->arena_bytes,
        .memory = share->bytes,
        .ll = limits->ll_max_tokens,
        .ht = limits->ht_max_tokens,
    };
}

static ep_status refuse(const struct ep_settled *settled, const struct share *share, const char *advice,
                        struct ep_error *error)
{
    const struct ep_spec_pool *pool = share->pool;
    const uint64_t left = pool->left > pool->beside ? pool->left - pool->beside : 0;

    if (!pool->device)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "%u windows of %" PRIu64 " bytes need %" PRIu64 ", node %s has %" PRIu64 " left: %s",
                            pool->ranks, settled->rank_bytes, settled->rank_bytes * pool->ranks, pool->node, left,
                            advice);
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                        "%u of the ranks are on %s of node %s and need %" PRIu64 " bytes each, it has %" PRIu64
                        " left: %s",
                        pool->ranks, pool->device, pool->node, settled->rank_bytes, left, advice);
}

ep_status ep_spec_fit(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                      const struct ep_spec_pool *pools, size_t n, struct ep_error *error)
{
    const struct share share = smallest_share(pools, n);
    struct search s = search_of(asked, settled, &share);
    char advice[160];

    if (fits(&s, s.ll, s.ht))
        return EP_OK;
    advise(&s, advice, sizeof advice);
    return refuse(settled, &share, advice, error);
}

/* ---- sizes that nobody asked for ------------------------------------------------------------ */

static bool is_enough(const struct search *s, uint32_t ll, uint32_t ht)
{
    return (!s->vary_ll || ll >= EP_DEFAULT_LL_MAX_TOKENS / LOWEST_PART) &&
           (!s->vary_ht || ht >= EP_DEFAULT_HT_MAX_TOKENS / LOWEST_PART);
}

/* HT before LL: its defaults take most of the memory, and a smaller batch costs it least. */
bool ep_spec_lower(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_spec_pool *pools,
                   size_t n, struct ep_spec_lowered *out)
{
    const struct share share = smallest_share(pools, n);
    const bool free_ll = !asked->ll_max_tokens, free_ht = !asked->ht_max_tokens;
    struct search s = search_of(asked, settled, &share);
    uint32_t ll = 0, ht = 0;

    if (!(free_ht && best(&s, false, true, &ll, &ht) && is_enough(&s, ll, ht)) &&
        !(free_ll && best(&s, true, false, &ll, &ht) && is_enough(&s, ll, ht)) &&
        !(free_ll && free_ht && best(&s, true, true, &ll, &ht) && is_enough(&s, ll, ht)))
        return false;
    *out = (struct ep_spec_lowered){ .ll_max_tokens = ll, .ht_max_tokens = ht, .pool = share.pool };
    return true;
}
