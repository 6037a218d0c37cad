/* ep_node_move: what 'node drain --move' does before it drains. */
#ifndef EP_ADMIN_MOVE_H
#define EP_ADMIN_MOVE_H

#include "admin.h"

/*
 * Moves the ranks of all groups away from the node, which takes no new work from here on, and waits until their workers
 * have gone over, at most so long.  Nobody is asked to leave.  An error names the group; the node stays as it is then, and
 * a note says how to go on.
 */
ep_status ep_node_move(struct ep_admin *admin, const char *node, const char *reason, int64_t wait_ms,
                       struct ep_error *error);

/* How many ranks of the newest epoch are there. */
size_t ep_group_ranks_on(const Ep__V1__Group *group, const char *node);

#endif
