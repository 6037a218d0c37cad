/*
 * ep_api: the RPC handlers (Admin, Attach, Node) over ep_rpc.  They translate; decisions are below.
 */
#ifndef EP_API_H
#define EP_API_H

#include "ep_attach.h"
#include "ep_cluster.h"
#include "ep_group.h"
#include "ep_node.h"
#include "ep_rpc.h"
#include "ep_store.h"

struct ep_api;

struct ep_api_options {
    uv_loop_t *loop;
    struct ep_node *node;
    struct ep_groups *groups;
    struct ep_attach *attach;
    struct ep_store *store;
    struct ep_cluster *cluster;
    uint32_t max_claims; /* that wait for a rank, at a time */
};

ep_status ep_api_create(const struct ep_api_options *options, struct ep_api **out, struct ep_error *error);
/* After the RPC servers are gone, and when neither the cluster nor the store owes it an answer. */
void ep_api_destroy(struct ep_api *api);

/* Admin, health and reflection on any server; Attach on the unix one as well, Node on the one that others reach. */
ep_status ep_api_add_admin(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error);
ep_status ep_api_add_attach(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error);
ep_status ep_api_add_node(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error);

/* Ends the watches, so that a drain can finish. */
void ep_api_end_streams(struct ep_api *api);

/* Everything on /metrics. */
void ep_api_render_metrics(struct ep_api *api, FILE *out);

#endif
