/*
 * spec: from what an operator asks for to what a group is made of.  Decides; does no I/O.
 */
#ifndef EP_GROUP_SPEC_H
#define EP_GROUP_SPEC_H

#include <stdbool.h>

#include "ep_error.h"
#include "ep_kernels.h"
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
};

/* Ranks take the devices in turn. */
static inline uint32_t ep_spec_device(uint32_t rank, uint32_t devices)
{
    return rank % devices;
}

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

/* Do its windows fit?  The refusal says which ll_max_tokens or ht_max_tokens would. */
ep_status ep_spec_fit(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                      const struct ep_spec_bounds *bounds, struct ep_error *error);

/* Memory of one rank. */
uint64_t ep_spec_rank_bytes(const struct ep_layout_map *map, const struct ep_placement *placement,
                            const struct ep_spec_bounds *bounds);

/* Sizes for other token counts than the settled ones; the arena follows if it was not asked for. */
ep_status ep_spec_layout(const struct ep_limits *limits, bool default_arena, struct ep_layout_map *map,
                         struct ep_error *error);

/* [a-z0-9]([-a-z0-9]{0,61}[a-z0-9])? */
ep_status ep_group_name_check(const char *name, struct ep_error *error);

/* ---- messages (spec_message.c) ---------------------------------------------------- */

/* Deep copy of any message; free with protobuf_c_message_free_unpacked. */
void *ep_message_copy(const ProtobufCMessage *message);
void *ep_message_pack(const ProtobufCMessage *message, size_t *size); /* malloc'ed */

/* base with the named fields taken from `from`; *out is a new message.  An unknown name is refused. */
ep_status ep_spec_take(const Ep__V1__GroupSpec *base, const Ep__V1__GroupSpec *from, char *const *fields,
                       size_t n, Ep__V1__GroupSpec **out, struct ep_error *error);

/* Equal in everything that an epoch is made of: all but timeout_ms, labels and direct. */
bool ep_spec_same_epoch(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b);
bool ep_spec_same(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b);

#endif
