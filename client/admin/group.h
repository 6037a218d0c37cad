/*
 * ep_group_view: how groups look, shared by the group commands.
 */
#ifndef EP_ADMIN_GROUP_H
#define EP_ADMIN_GROUP_H

#include <stdio.h>

#include "admin.h"
#include "ep/v1/common.pb-c.h"

/* Never NULL: an empty status when the server sent none. */
const Ep__V1__GroupStatus *ep_group_status(const Ep__V1__Group *group);
const Ep__V1__GroupSpec *ep_group_spec(const Ep__V1__Group *group);
const char *ep_group_phase(const Ep__V1__Group *group);
/* "3/8": ranks attached of all. */
struct ep_text ep_group_ranks(const Ep__V1__Group *group);

void ep_group_view_list(Ep__V1__Group *const *groups, size_t n, FILE *out);
void ep_group_view_settled(const Ep__V1__Settled *settled, FILE *out);
/* What a dry run answers: ranks, experts, memory, what moves. */
void ep_group_view_plan(const Ep__V1__Group *group, FILE *out);
/* Summary, ranks, settled sizes, late ranks. */
void ep_group_view_one(const Ep__V1__Group *group, FILE *out);

/*
 * Watches until the group, at `revision` or a later one, is in the phase, at most so long.  READY is
 * also over with FAILED (an error) and DEGRADED (which the caller sees in the group).  *group, freed with
 * ep_admin_free(), is replaced by what was last seen; NULL when it was deleted.
 */
ep_status ep_group_wait(struct ep_admin *admin, const char *name, uint64_t revision, Ep__V1__Phase phase,
                        int64_t timeout_ms, Ep__V1__Group **group, struct ep_error *error);

#endif
