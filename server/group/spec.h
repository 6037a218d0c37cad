/*
 * spec: from what an operator asks for to what a group is made of.  Decides; does no I/O.
 */
#ifndef EP_GROUP_SPEC_H
#define EP_GROUP_SPEC_H

#include <stdbool.h>

#include "ep_error.h"
#include "ep_group.h"
#include "ep_kernels.h"
#include "ep_message.h"
#include "ep/v1/common.pb-c.h"

#define EP_DEFAULT_LL_MAX_TOKENS 128u
#define EP_DEFAULT_HT_MAX_TOKENS 4096u
#define EP_DEFAULT_LL_BANKS      2u
#define EP_DEFAULT_TIMEOUT_MS    10000u
#define EP_MAX_TIMEOUT_MS        3600000u
#define EP_MAX_LABELS            64u

/* What there is to settle within. */
struct ep_spec_bounds {
    const char *node;
    Ep__V1__Backend backend;     /* of the node; UNSPECIFIED is host */
    uint32_t devices;
    uint64_t memory_left;        /* bytes for the windows of all ranks */
    const uint64_t *device_left; /* [devices] of it, where each has memory of its own; else NULL */
    uint64_t granule;            /* memory is given in multiples of this; 0 is 1 */
    uint32_t nodes;              /* whose devices these are; 0 is 1 */
    uint32_t modes, dtypes;      /* bits: what all of them have; 0: everything */
    const char *least;           /* the node that has the fewest of these */
    const uint32_t *rank_node;   /* [placed] where the ranks are, for homes by load; NULL: all together */
    uint32_t placed;
    char left_out[160];          /* why a node is not among them; empty: none is left out */
};

/* Memory that some ranks of a group share. */
struct ep_spec_pool {
    const char *node, *device; /* device NULL: all devices of the node share it */
    uint64_t left;
    uint64_t beside;           /* of that, what is taken whatever the sizes are */
    uint64_t granule;          /* 0 is 1 */
    uint32_t ranks;
};

struct ep_settled {
    Ep__V1__GroupSpec *spec; /* every default filled in, homes listed; own message */
    struct ep_layout_map map;
    struct ep_placement placement;
    uint64_t rank_bytes; /* memory of one rank: its window and what the backend keeps beside it */
    char **notes; /* what was settled, and why */
    size_t n_notes;
};

/*
 * Checks every field (the error names it, what was wrong and what would be right) and settles what
 * is 0 or empty.  Does not look at memory: that is ep_spec_fit.
 */
ep_status ep_spec_settle(const Ep__V1__GroupSpec *asked, const struct ep_spec_bounds *bounds,
                         struct ep_settled *out, struct ep_error *error);
void ep_settled_clear(struct ep_settled *settled);
__attribute__((format(printf, 2, 3))) void ep_settled_note(struct ep_settled *settled, const char *format, ...);
/* Instead of those that it has. */
void ep_settled_set_notes(struct ep_settled *settled, char *const *notes, size_t n);

/* Do its windows fit into all of the pools?  The refusal names the scarcest, and the largest ll_max_tokens,
 * ht_max_tokens or arena_bytes that would fit into all of them. */
ep_status ep_spec_fit(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                      const struct ep_spec_pool *pools, size_t n, struct ep_error *error);

/* Sizes that nobody asked for may be smaller than their defaults, down to an eighth: the largest that fit; false: none
 * do, or all were asked for. */
struct ep_spec_lowered {
    uint32_t ll_max_tokens, ht_max_tokens;
    const struct ep_spec_pool *pool; /* that makes it necessary */
};
bool ep_spec_lower(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_spec_pool *pools,
                   size_t n, struct ep_spec_lowered *out);

/* Of ep_spec_settle(): the placement (spec_placement.c). */
ep_status ep_spec_place(struct ep_settled *settled, const struct ep_spec_bounds *bounds, struct ep_error *error);

/* Memory of one rank. */
uint64_t ep_spec_rank_bytes(const struct ep_layout_map *map, const struct ep_placement *placement,
                            const struct ep_spec_bounds *bounds);

/* Sizes for other token counts than the settled ones; the arena follows if it was not asked for. */
ep_status ep_spec_layout(const struct ep_limits *limits, bool default_arena, struct ep_layout_map *map,
                         struct ep_error *error);

/* ---- messages (spec_message.c) ---------------------------------------------------- */

/* base with the named fields taken from `from`; *out is a new message.  An unknown name is refused. */
ep_status ep_spec_take(const Ep__V1__GroupSpec *base, const Ep__V1__GroupSpec *from, char *const *fields,
                       size_t n, Ep__V1__GroupSpec **out, struct ep_error *error);

/* Of an attach token only that there is one, as everybody may see it. */
void ep_spec_hide_token(Ep__V1__GroupSpec *spec);

/* Equal in everything that an epoch is made of: all but timeout_ms, labels, direct and attach_token. */
bool ep_spec_same_epoch(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b);
bool ep_spec_same(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b);

#endif
