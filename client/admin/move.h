/* ep_node_move: node drain --move. */
#ifndef EP_ADMIN_MOVE_H
#define EP_ADMIN_MOVE_H

#include "admin.h"

/*
 * Moves the ranks of all groups away from the node, which takes no new work from here on, waits until their workers have gone
 * over, and asks who is still there to leave; at most so long.  *drained: the node then; freed with ep_admin_free().  An error
 * names the group; the node stays as it is then, nobody was asked to leave, and a note says how to go on.
 */
ep_status ep_node_move(struct ep_admin *admin, const char *node, const char *reason, int64_t wait_ms,
                       ProtobufCMessage **drained, struct ep_error *error);

/* How many ranks of the newest epoch are there. */
size_t ep_group_ranks_on(const Ep__V1__Group *group, const char *node);

#endif
