/*
 * ep_api: the RPC handlers (Admin, Attach) over ep_rpc.  They translate; decisions are below.
 */
#ifndef EP_API_H
#define EP_API_H

#include "ep_attach.h"
#include "ep_group.h"
#include "ep_node.h"
#include "ep_rpc.h"

struct ep_api;

struct ep_api_options {
    uv_loop_t *loop;
    struct ep_node *node;
    struct ep_groups *groups;
    struct ep_attach *attach;
    struct ep_store *store;
};

/*
 * Takes up from the store whether the node was drained.  Before ep_groups_open(): the store answers in
 * order, so the node is as it was left when the groups are ready.  The node outlives the store.  done is told
 * EP_OK, or why it could not be read: then the node may not serve.
 */
typedef void (*ep_api_restored_fn)(const struct ep_error *error, void *user);
ep_status ep_api_restore_node(struct ep_store *store, struct ep_node *node, ep_api_restored_fn done, void *user,
                              struct ep_error *error);

ep_status ep_api_create(const struct ep_api_options *options, struct ep_api **out, struct ep_error *error);
/* After the RPC servers are gone.  Runs the loop's handles of its own down with the next turns. */
void ep_api_destroy(struct ep_api *api);

/* Admin, health and reflection on any server; Attach on the unix one as well. */
ep_status ep_api_add_admin(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error);
ep_status ep_api_add_attach(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error);

/* Ends the watches, so that a drain can finish. */
void ep_api_end_streams(struct ep_api *api);

/* Everything on /metrics. */
void ep_api_render_metrics(struct ep_api *api, FILE *out);

#endif
