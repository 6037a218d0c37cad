/* The API's life, the table of Admin's handlers, and what all handlers share. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_log.h"

/* ---- calls that are answered later ------------------------------------------------ */

struct api_pending *api_pending_create(struct ep_api *api, struct ep_rpc_call *call, const char *action,
                                       const char *target, bool dry_run)
{
    struct api_pending *pending = calloc(1, sizeof *pending);

    if (pending) {
        *pending = (struct api_pending){ .api = api, .call = call, .action = action,
                                         .dry_run = dry_run };
        pending->target = strdup(target);
        pending->identity = strdup(ep_rpc_call_identity(call));
    }
    if (!pending || !pending->target || !pending->identity) {
        struct ep_error error = { EP_NO_MEMORY, "out of memory" };

        if (pending) {
            free(pending->target);
            free(pending->identity);
        }
        free(pending);
        ep_rpc_fail(call, &error);
        return NULL;
    }
    ep_rpc_call_set_user(call, pending);
    return pending;
}

static void audit(const struct api_pending *pending, const struct ep_error *error)
{
    bool failed = error && error->status != EP_OK;

    if (pending->dry_run)
        return;
    EP_INFO("audit", failed ? "change refused" : "change made", EP_S("action", pending->action),
            EP_S("target", pending->target), EP_S("by", pending->identity),
            EP_S("status", ep_status_name(failed ? error->status : EP_OK)),
            EP_S("reason", failed ? error->text : ""));
}

struct ep_rpc_call *api_pending_finish(struct api_pending *pending, const struct ep_error *error)
{
    struct ep_rpc_call *call = pending->call;

    audit(pending, error);
    if (call)
        ep_rpc_call_set_user(call, NULL);
    free(pending->target);
    free(pending->identity);
    free(pending);
    return call;
}

void api_pending_closed(struct ep_rpc_call *call, void *user)
{
    struct api_pending *pending = ep_rpc_call_user(call);

    (void)user;
    if (pending)
        pending->call = NULL;
}

bool api_failed(struct ep_rpc_call *call, const struct ep_error *error)
{
    if (!error || error->status == EP_OK)
        return false;
    ep_rpc_fail(call, error);
    return true;
}

/* ---- Admin ---------------------------------------------------------------------------- */

static const struct ep_rpc_handler admin_handlers[] = {
    { .method = "CreateGroup", .on_request = api_create_group, .on_closed = api_pending_closed },
    { .method = "GetGroup", .on_request = api_get_group },
    { .method = "ListGroups", .on_request = api_list_groups },
    { .method = "UpdateGroup", .on_request = api_update_group, .on_closed = api_pending_closed },
    { .method = "DeleteGroup", .on_request = api_delete_group, .on_closed = api_pending_closed },
    { .method = "WatchGroups", .on_request = api_watch_groups, .on_writable = api_watch_writable,
      .on_closed = api_watch_closed },
    { .method = "ListNodes", .on_request = api_list_nodes },
    { .method = "GetNode", .on_request = api_get_node },
    { .method = "DrainNode", .on_request = api_drain_node, .on_closed = api_pending_closed },
    { .method = "UncordonNode", .on_request = api_uncordon_node, .on_closed = api_pending_closed },
    { .method = "GetStats", .on_request = api_get_stats },
    { .method = "WatchStats", .on_request = api_watch_stats, .on_closed = api_watch_stats_closed },
    { .method = "GetVersion", .on_request = api_get_version },
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
    api_cordon_forget(api);
    free(api);
}
