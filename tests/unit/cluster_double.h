/*
 * cluster_double: ep_cluster.h in one process.  Servers of a world share a store and a loop; sessions and the election
 * are the store's own.  Calls between them are messages in one queue, delivered one by one, so that a test can count
 * them, and end a server at any of them.
 */
#ifndef EP_CLUSTER_DOUBLE_H
#define EP_CLUSTER_DOUBLE_H

#include "ep_cluster.h"
#include "ep_group.h"

struct world;

struct world *world_open(uv_loop_t *loop, struct ep_store *store);
void world_close(struct world *world); /* its servers are closed; the loop has to run for a turn */

/* Registers the node, and runs for leader. */
struct ep_cluster *world_add(struct world *world, struct ep_node *node);
/* Whose messages go to these groups. */
void world_serve(struct ep_cluster *cluster, struct ep_groups *groups);
/* Its session ends, it is called no more, and what it asked others for is answered with an error. */
void world_crash(struct ep_cluster *cluster);
/* Its session is lost, and it lives on: others take it for gone, until it has another. */
void world_lose_session(struct ep_cluster *cluster);
void world_regain_session(struct ep_cluster *cluster);
/* It has been crashed, or its groups are closed. */
void world_remove(struct ep_cluster *cluster);

/* Its table does not come to marks that are written from now on, until it does again. */
void world_hold_table(struct ep_cluster *cluster, bool held);

/* It does not know who leads by its watch, until it does again. */
void world_hold_term(struct ep_cluster *cluster, bool held);

/* Between the two no message arrives: their callers are told so. */
void world_part(struct ep_cluster *one, struct ep_cluster *other, bool parted);

/* Its server is of an older version, which does not know that method; NULL: it knows all. */
void world_unlearn(struct ep_cluster *cluster, const char *method);

/* It says that it was started again, which the store does not know of. */
void world_reboot(struct ep_cluster *cluster, bool rebooted);

/* Messages of that kind that are sent from now on are kept back, until they are handed over; NULL: none. */
void world_keep(struct world *world, const char *kind);
size_t world_kept(const struct world *world); /* so many are */
void world_hand_over(struct world *world);

/* What others are told of its node stays as it is now, until it is told anew. */
void world_hold_offer(struct ep_cluster *cluster, bool held);

/* No message is delivered, until they are again; for a step's function: none after this one. */
void world_hold(struct world *world, bool held);

/* Called before each message is delivered, and after each commit of a leader was asked of the store; kind: the method,
 * with "-reply", or "commit". */
typedef void (*world_step_fn)(struct world *world, const char *kind, void *user);
void world_on_step(struct world *world, world_step_fn fn, void *user);
/* For a step's function: the message, or the answer of the commit, is lost, and its caller told so. */
void world_lose(struct world *world);

#endif
