/* ep_node_move: node drain, with --move and without. */
#ifndef EP_ADMIN_MOVE_H
#define EP_ADMIN_MOVE_H

#include "admin.h"

/* One call.  reason: NULL, there is none; workers_stay: nobody is asked to leave.  *drained: the node then; freed with
 * ep_admin_free(). */
ep_status ep_node_drain_call(struct ep_admin *admin, const char *node, const char *reason, bool workers_stay,
                             ProtobufCMessage **drained, struct ep_error *error);

/*
 * Moves the ranks of all groups away from the node, which takes no new work from here on, waits until their workers have gone
 * over, and asks who is still there to leave; at most so long.  *drained: as above.  An error names the group, if
 * it is about one; the node stays as it is then, nobody was asked to leave, and a note says how to go on.
 */
ep_status ep_node_move(struct ep_admin *admin, const char *node, const char *reason, int64_t wait_ms,
                       ProtobufCMessage **drained, struct ep_error *error);

/* How many ranks of the newest epoch are there. */
size_t ep_group_ranks_on(const Ep__V1__Group *group, const char *node);

#endif
