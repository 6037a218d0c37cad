/* What handlers share: failed calls, and those that are answered later, with the line that says who changed what. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_log.h"

bool api_failed(struct ep_rpc_call *call, const struct ep_error *error)
{
    if (!error || error->status == EP_OK)
        return false;
    ep_rpc_fail(call, error);
    return true;
}

static void set_asker(struct api_pending *pending)
{
    ep__v1__asker__init(&pending->asker);
    pending->asker.by = pending->identity;
    pending->asker.server = pending->server;
}

struct api_pending *api_pending_create(struct ep_api *api, struct ep_rpc_call *call, const char *action,
                                       const char *target, bool dry_run)
{
    struct api_pending *pending = calloc(1, sizeof *pending);

    if (pending) {
        *pending = (struct api_pending){ .api = api, .call = call, .action = action,
                                         .dry_run = dry_run };
        pending->target = strdup(target);
        pending->identity = strdup(ep_rpc_call_identity(call));
        pending->server = strdup(ep_node_name(api->options.node));
        set_asker(pending);
    }
    if (!pending || !pending->target || !pending->identity || !pending->server) {
        struct ep_error error = { EP_NO_MEMORY, "out of memory" };

        if (pending) {
            free(pending->target);
            free(pending->identity);
            free(pending->server);
        }
        free(pending);
        ep_rpc_fail(call, &error);
        return NULL;
    }
    ep_rpc_call_set_user(call, pending);
    return pending;
}

void api_pending_asked_by(struct api_pending *pending, const Ep__V1__Asker *asker)
{
    char *by = asker ? strdup(asker->by) : NULL, *server = asker ? strdup(asker->server) : NULL;

    if (!by || !server) {
        free(by);
        free(server);
        return;
    }
    free(pending->identity);
    free(pending->server);
    pending->identity = by;
    pending->server = server;
    set_asker(pending);
}

static void audit(const struct api_pending *pending, const struct ep_error *error)
{
    bool failed = error && error->status != EP_OK;

    if (pending->dry_run)
        return;
    EP_AUDIT(failed ? "change refused" : "change made", EP_S("action", pending->action),
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
    free(pending->server);
    if (pending->request)
        protobuf_c_message_free_unpacked(pending->request, NULL);
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
