/* Groups: create, get, list, update, delete. */
#include <stdlib.h>

#include "api_private.h"

/* The store has answered: so do we. */
static void on_changed(const struct ep_error *error, const Ep__V1__Group *group, void *user)
{
    struct ep_rpc_call *call = api_pending_finish(user, error);

    if (call && !api_failed(call, error))
        ep_rpc_reply(call, &group->base);
}

static void on_deleted(const struct ep_error *error, const Ep__V1__Group *group, void *user)
{
    struct ep_rpc_call *call = api_pending_finish(user, error);
    Ep__V1__DeleteGroupReply reply = EP__V1__DELETE_GROUP_REPLY__INIT;

    (void)group;
    if (call && !api_failed(call, error))
        ep_rpc_reply(call, &reply.base);
}

/* A request without a spec asks for all defaults, as an empty one does. */
static const Ep__V1__GroupSpec *spec_or_empty(const Ep__V1__GroupSpec *spec)
{
    static const Ep__V1__GroupSpec empty = EP__V1__GROUP_SPEC__INIT;

    return spec ? spec : &empty;
}

void api_create_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__CreateGroupRequest *request = (const Ep__V1__CreateGroupRequest *)message;
    struct ep_api *api = user;
    bool dry_run = request->dry_run != 0;
    struct api_pending *pending = api_pending_create(api, call, "group.create", request->name, dry_run);

    api->requests++;
    if (pending)
        ep_groups_create(api->options.groups, request->name, spec_or_empty(request->spec), dry_run,
                         on_changed, pending);
}

void api_update_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__UpdateGroupRequest *request = (const Ep__V1__UpdateGroupRequest *)message;
    struct ep_api *api = user;
    bool dry_run = request->dry_run != 0;
    struct api_pending *pending = api_pending_create(api, call, "group.update", request->name, dry_run);

    api->requests++;
    if (pending)
        ep_groups_update(api->options.groups, request->name, request->revision,
                         spec_or_empty(request->spec), request->fields, request->n_fields, dry_run,
                         on_changed, pending);
}

void api_delete_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__DeleteGroupRequest *request = (const Ep__V1__DeleteGroupRequest *)message;
    struct ep_api *api = user;
    struct api_pending *pending = api_pending_create(api, call, "group.delete", request->name, false);

    api->requests++;
    if (pending)
        ep_groups_delete(api->options.groups, request->name, request->force != 0, on_deleted, pending);
}

void api_get_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__GetGroupRequest *request = (const Ep__V1__GetGroupRequest *)message;
    struct ep_api *api = user;
    struct ep_error error = EP_ERROR_INIT;
    const Ep__V1__Group *group = ep_groups_get(api->options.groups, request->name, &error);

    api->requests++;
    if (group)
        ep_rpc_reply(call, &group->base);
    else
        ep_rpc_fail(call, &error);
}

void api_list_groups(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    Ep__V1__ListGroupsReply reply = EP__V1__LIST_GROUPS_REPLY__INIT;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    struct ep_api *api = user;
    size_t n = ep_groups_count(api->options.groups);

    (void)message;
    api->requests++;
    reply.groups = calloc(n ? n : 1, sizeof *reply.groups);
    if (!reply.groups) {
        ep_rpc_fail(call, &error);
        return;
    }
    /* Packing does not write; the generated type has no const. */
    for (size_t i = 0; i < n; i++)
        reply.groups[i] = (Ep__V1__Group *)(uintptr_t)ep_groups_at(api->options.groups, i);
    reply.n_groups = n;
    ep_rpc_reply(call, &reply.base);
    free(reply.groups);
}
