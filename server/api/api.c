/* The API's life, and the table of Admin's handlers. */
#include <stdlib.h>

#include "api_private.h"

/* ---- Admin ---------------------------------------------------------------------------- */

static const struct ep_rpc_handler admin_handlers[] = {
    { .method = "CreateGroup", .is_for_viewers = api_creates_nothing, .on_request = api_create_group,
      .on_closed = api_pending_closed },
    { .method = "GetGroup", .for_viewers = true, .on_request = api_get_group, .on_closed = api_read_closed },
    { .method = "ListGroups", .for_viewers = true, .on_request = api_list_groups, .on_closed = api_read_closed },
    { .method = "UpdateGroup", .is_for_viewers = api_updates_nothing, .on_request = api_update_group,
      .on_closed = api_pending_closed },
    { .method = "DeleteGroup", .on_request = api_delete_group, .on_closed = api_pending_closed },
    { .method = "GetHistory", .for_viewers = true, .on_request = api_get_history, .on_closed = api_read_closed },
    { .method = "WatchGroups", .for_viewers = true, .on_request = api_watch_groups, .on_writable = api_watch_writable,
      .on_closed = api_watch_closed },
    { .method = "ListNodes", .for_viewers = true, .on_request = api_list_nodes, .on_closed = api_read_closed },
    { .method = "GetNode", .for_viewers = true, .on_request = api_get_node, .on_closed = api_look_closed },
    { .method = "DrainNode", .on_request = api_drain_node, .on_closed = api_pending_closed },
    { .method = "UncordonNode", .on_request = api_uncordon_node, .on_closed = api_pending_closed },
    { .method = "GetStats", .for_viewers = true, .on_request = api_get_stats, .on_closed = api_gather_closed },
    { .method = "WatchStats", .for_viewers = true, .on_request = api_watch_stats, .on_closed = api_watch_stats_closed },
    { .method = "GetVersion", .for_viewers = true, .on_request = api_get_version },
};

ep_status ep_api_add_admin(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error)
{
    ep_status status = ep_rpc_server_add_service(server, &ep__v1__admin__descriptor, admin_handlers,
                                                 sizeof admin_handlers / sizeof *admin_handlers, api,
                                                 error);

    return status == EP_OK ? ep_rpc_server_add_health(server, error) : status;
}

ep_status ep_api_add_attach(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error)
{
    return ep_rpc_server_add_service(server, &ep__v1__attach__descriptor, api_attach_handlers,
                                     api_attach_handlers_count, api, error);
}

/* ---- life --------------------------------------------------------------------------------- */

ep_status ep_api_create(const struct ep_api_options *options, struct ep_api **out, struct ep_error *error)
{
    struct ep_api *api = calloc(1, sizeof *api);

    if (!api)
        return ep_error_set(error, EP_NO_MEMORY, "cannot make the API: out of memory");
    api->options = *options;
    api->nodes = ep_cluster_watch(options->cluster, api_on_cluster, api);
    *out = api;
    return EP_OK;
}

void ep_api_end_streams(struct ep_api *api)
{
    api->ending = true;
    api_watches_end(api);
    api_stats_end(api);
    api_claims_end(api);
}

void ep_api_destroy(struct ep_api *api)
{
    if (!api)
        return;
    ep_cluster_unwatch(api->nodes);
    free(api);
}
