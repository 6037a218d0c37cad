/* Groups: create, get, list, update, delete.  Who does not lead hands changes on to whoever does. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep/v1/node.pb-c.h"

#define FORWARD_MS 20000u /* a change that was handed on; less where its caller waits for less */
#define MARGIN     10     /* of that one part is for the answer */
#define SEE_MS     3000u  /* until this server's view has what the leader has answered */

/* ---- answers from this server's view ---------------------------------------------------------- */

/* Packing does not write; the generated types have no const. */
static char *text(const char *behind)
{
    return (char *)(uintptr_t)behind;
}

static void reply_group(struct ep_rpc_call *call, const Ep__V1__Group *group, const char *behind)
{
    Ep__V1__Group reply = *group;

    reply.behind = text(behind);
    ep_rpc_reply(call, &reply.base);
}

/* Nor is it certain then that what is not here is not there. */
static void fail_read(struct ep_rpc_call *call, const struct ep_error *error, const char *behind)
{
    struct ep_error why = *error;

    if (*behind && error->status == EP_NOT_FOUND)
        ep_error_set(&why, error->status, "%s, as far as this server knows: %.200s", error->text, behind);
    ep_rpc_fail(call, &why);
}

/* ---- changes that are made here --------------------------------------------------------------- */

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

typedef void (*change_fn)(struct ep_api *api, struct api_pending *pending, const ProtobufCMessage *request);

static void create_here(struct ep_api *api, struct api_pending *pending, const ProtobufCMessage *message)
{
    const Ep__V1__CreateGroupRequest *request = (const Ep__V1__CreateGroupRequest *)message;

    ep_groups_create(api->options.groups, request->name, spec_or_empty(request->spec), pending->dry_run,
                     &pending->asker, on_changed, pending);
}

static void update_here(struct ep_api *api, struct api_pending *pending, const ProtobufCMessage *message)
{
    const Ep__V1__UpdateGroupRequest *request = (const Ep__V1__UpdateGroupRequest *)message;

    ep_groups_update(api->options.groups, request->name, request->revision, spec_or_empty(request->spec),
                     request->fields, request->n_fields, pending->dry_run, &pending->asker, on_changed, pending);
}

static void delete_here(struct ep_api *api, struct api_pending *pending, const ProtobufCMessage *message)
{
    const Ep__V1__DeleteGroupRequest *request = (const Ep__V1__DeleteGroupRequest *)message;

    ep_groups_delete(api->options.groups, request->name, request->force != 0, &pending->asker, on_deleted,
                     pending);
}

static uint32_t time_for(const struct ep_rpc_call *call)
{
    const int64_t left = ep_rpc_call_remaining_ms(call), time = left - left / MARGIN;

    return time < 1 ? 1 : time < FORWARD_MS ? (uint32_t)time : FORWARD_MS;
}

/* ---- changes that are handed on ------------------------------------------------------------------ */

/* Also where it is not seen in time: the leader has made the change, and reads here say that they may be older. */
static void on_seen(const struct ep_error *seen, void *user)
{
    struct api_pending *pending = user;
    ProtobufCMessage *answer = pending->answer;
    struct ep_rpc_call *call = api_pending_finish(pending, NULL);

    (void)seen;
    if (call)
        ep_rpc_reply(call, answer);
    protobuf_c_message_free_unpacked(answer, NULL);
}

/* What the caller asks for next should not be older than what it is told. */
static void on_forwarded(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    const Ep__V1__Group *group = (const Ep__V1__Group *)reply;
    struct api_pending *pending = user;
    struct ep_rpc_call *call;

    if (!error->status && !pending->dry_run) {
        pending->answer = ep_message_copy(reply);
        ep_groups_see(pending->api->options.groups, pending->target, pending->deletes ? 0 : group->revision,
                      pending->deletes || !group->status ? 0 : group->status->epoch, SEE_MS, on_seen, pending);
        return;
    }
    call = api_pending_finish(pending, error);
    if (call && !api_failed(call, error))
        ep_rpc_reply(call, reply);
}

/* NULL: this server leads, or nobody that could be asked does. */
static const char *other_leader(const struct ep_api *api)
{
    const char *leader = ep_cluster_leader(api->options.cluster);

    return ep_cluster_leads(api->options.cluster) || !leader || !strcmp(leader, ep_node_name(api->options.node)) ? NULL
                                                                                                               : leader;
}

/* The request, saying who asked. */
union named {
    ProtobufCMessage base;
    Ep__V1__CreateGroupRequest create;
    Ep__V1__UpdateGroupRequest update;
    Ep__V1__DeleteGroupRequest delete;
};

static const ProtobufCMessage *name_asker(const ProtobufCMessage *request, Ep__V1__Asker *asker, union named *out)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(request->descriptor, "asker");

    memcpy(out, request, request->descriptor->sizeof_message);
    memcpy((uint8_t *)out + field->offset, &asker, sizeof asker);
    return &out->base;
}

static void hand_on(struct ep_api *api, struct api_pending *pending, const char *leader,
                    const ProtobufCMessage *request)
{
    union named named;

    ep_cluster_call(api->options.cluster, leader, &ep__v1__node__descriptor, pending->method,
                    name_asker(request, &pending->asker, &named), time_for(pending->call), on_forwarded, pending);
}

/* ---- here, or at whoever leads --------------------------------------------------------------------- */

static void refuse(struct api_pending *pending, const struct ep_error *error)
{
    struct ep_rpc_call *call = api_pending_finish(pending, error);

    if (call)
        ep_rpc_fail(call, error);
}

/* Another may have come to lead meanwhile. */
static void on_time(const struct ep_error *error, void *user)
{
    static const struct ep_error gone = { EP_CANCELLED, "who asked for it has gone" };
    struct api_pending *pending = user;
    const char *leader;

    if (error->status || !pending->call) { /* with the call the API may have gone */
        refuse(pending, error->status ? error : &gone);
        return;
    }
    leader = pending->method ? other_leader(pending->api) : NULL;
    if (leader)
        hand_on(pending->api, pending, leader, pending->request);
    else
        pending->here(pending->api, pending, pending->request);
}

/* From here on the request has the hash of a token, not the token. */
static ep_status seal_token(const struct api_pending *pending, struct ep_error *error)
{
    ProtobufCMessage *request = pending->request;
    Ep__V1__GroupSpec *spec = NULL;

    if (request->descriptor == &ep__v1__create_group_request__descriptor)
        spec = ((Ep__V1__CreateGroupRequest *)request)->spec;
    else if (request->descriptor == &ep__v1__update_group_request__descriptor)
        spec = ((Ep__V1__UpdateGroupRequest *)request)->spec;
    return spec ? ep_groups_seal_token(spec, !pending->method, error) : EP_OK;
}

/* method: of Node, for whoever leads; NULL: it is not handed on, as a server has done that. */
static void change(struct ep_api *api, struct api_pending *pending, const char *method, const ProtobufCMessage *request,
                   change_fn here)
{
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    const char *leader = method ? other_leader(api) : NULL;

    if (!pending)
        return;
    pending->method = method;
    pending->here = here;
    pending->request = ep_message_copy(request);
    if (seal_token(pending, &error))
        refuse(pending, &error);
    else if (leader)
        hand_on(api, pending, leader, pending->request);
    else
        ep_groups_before_change(api->options.groups, pending->target, time_for(pending->call), on_time, pending);
}

/* ---- the handlers: of Admin, and of Node, which hands nothing on ------------------------------------ */

static struct api_pending *begin_create(struct ep_api *api, struct ep_rpc_call *call, const ProtobufCMessage *message)
{
    const Ep__V1__CreateGroupRequest *request = (const Ep__V1__CreateGroupRequest *)message;

    api->requests++;
    return api_pending_create(api, call, "group.create", request->name, request->dry_run != 0);
}

static struct api_pending *begin_update(struct ep_api *api, struct ep_rpc_call *call, const ProtobufCMessage *message)
{
    const Ep__V1__UpdateGroupRequest *request = (const Ep__V1__UpdateGroupRequest *)message;

    api->requests++;
    return api_pending_create(api, call, "group.update", request->name, request->dry_run != 0);
}

static struct api_pending *begin_delete(struct ep_api *api, struct ep_rpc_call *call, const ProtobufCMessage *message)
{
    const Ep__V1__DeleteGroupRequest *request = (const Ep__V1__DeleteGroupRequest *)message;
    struct api_pending *pending;

    api->requests++;
    pending = api_pending_create(api, call, "group.delete", request->name, false);
    if (pending)
        pending->deletes = true;
    return pending;
}

bool api_creates_nothing(const ProtobufCMessage *message)
{
    return ((const Ep__V1__CreateGroupRequest *)message)->dry_run != 0;
}

bool api_updates_nothing(const ProtobufCMessage *message)
{
    return ((const Ep__V1__UpdateGroupRequest *)message)->dry_run != 0;
}

void api_create_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    change(user, begin_create(user, call, message), "CreateGroup", message, create_here);
}

void api_update_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    change(user, begin_update(user, call, message), "UpdateGroup", message, update_here);
}

void api_delete_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    change(user, begin_delete(user, call, message), "DeleteGroup", message, delete_here);
}

void api_create_group_here(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct api_pending *pending = begin_create(user, call, message);

    if (!pending)
        return;
    api_pending_asked_by(pending, ((const Ep__V1__CreateGroupRequest *)message)->asker);
    change(user, pending, NULL, message, create_here);
}

void api_update_group_here(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct api_pending *pending = begin_update(user, call, message);

    if (!pending)
        return;
    api_pending_asked_by(pending, ((const Ep__V1__UpdateGroupRequest *)message)->asker);
    change(user, pending, NULL, message, update_here);
}

void api_delete_group_here(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct api_pending *pending = begin_delete(user, call, message);

    if (!pending)
        return;
    api_pending_asked_by(pending, ((const Ep__V1__DeleteGroupRequest *)message)->asker);
    change(user, pending, NULL, message, delete_here);
}

/* ---- reading -------------------------------------------------------------------------------------------- */

static void answer_group(struct ep_api *api, struct ep_rpc_call *call, const char *name, const char *behind)
{
    struct ep_error error = EP_ERROR_INIT;
    const Ep__V1__Group *group = ep_groups_get(api->options.groups, name, &error);

    if (group)
        reply_group(call, group, behind);
    else
        fail_read(call, &error, behind);
}

void api_get_group(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    api_read_counted(user, call, ((const Ep__V1__GetGroupRequest *)message)->name, answer_group);
}

static void answer_groups(struct ep_api *api, struct ep_rpc_call *call, const char *name, const char *behind)
{
    Ep__V1__ListGroupsReply reply = EP__V1__LIST_GROUPS_REPLY__INIT;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    size_t n = ep_groups_count(api->options.groups);

    (void)name;
    reply.groups = calloc(n ? n : 1, sizeof *reply.groups);
    if (!reply.groups) {
        ep_rpc_fail(call, &error);
        return;
    }
    for (size_t i = 0; i < n; i++)
        reply.groups[i] = (Ep__V1__Group *)(uintptr_t)ep_groups_at(api->options.groups, i);
    reply.n_groups = n;
    reply.behind = text(behind);
    ep_rpc_reply(call, &reply.base);
    free(reply.groups);
}

void api_list_groups(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    (void)message;
    api_read(user, call, "", answer_groups);
}

static void answer_history(struct ep_api *api, struct ep_rpc_call *call, const char *name, const char *behind)
{
    Ep__V1__GetHistoryReply reply = EP__V1__GET_HISTORY_REPLY__INIT;
    Ep__V1__GroupChange *changes[EP_GROUP_HISTORY];
    struct ep_error error = EP_ERROR_INIT;

    reply.changes = changes;
    reply.behind = text(behind);
    if (ep_groups_history(api->options.groups, name, changes, &reply.n_changes, &error))
        fail_read(call, &error, behind);
    else
        ep_rpc_reply(call, &reply.base);
}

void api_get_history(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    api_read(user, call, ((const Ep__V1__GetHistoryRequest *)message)->name, answer_history);
}
