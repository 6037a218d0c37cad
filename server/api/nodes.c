/* Nodes: list, get, drain, uncordon; the version. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_log.h"

#define CORDON_KEY "node/cordon" /* value: the reason */

/* ---- reading ---------------------------------------------------------------------------- */

static bool is_on(const Ep__V1__Group *group, const char *device)
{
    for (size_t i = 0; i < group->status->n_ranks; i++)
        if (!strcmp(group->status->ranks[i]->device, device))
            return true;
    return false;
}

/* A group counts once on a device, however many of its ranks are there. */
static void count_groups(const Ep__V1__Group *group, Ep__V1__NodeInfo *info)
{
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->groups += is_on(group, info->devices[d]->name);
}

static void fill(struct ep_api *api, Ep__V1__NodeInfo *info)
{
    struct ep_groups *groups = api->options.groups;
    struct ep_error store = EP_ERROR_INIT;
    char *text;

    ep_node_info(api->options.node, info);
    if (ep_store_health(api->options.store, &store) != EP_OK && (text = strdup(store.text))) {
        free(info->store_error);
        info->store_error = text;
    }
    info->attachments = ep_groups_attachments(groups);
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->sms_held = ep_groups_sms(groups, (uint32_t)d);
    for (size_t i = 0; i < ep_groups_count(groups); i++)
        count_groups(ep_groups_at(groups, i), info);
}

static bool check_name(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    const char *own = ep_node_name(api->options.node);
    struct ep_error error = EP_ERROR_INIT;

    if (!*name || !strcmp(name, own))
        return true;
    ep_error_set(&error, EP_NOT_FOUND, "node \"%s\" is not known here: this server is node \"%s\"", name,
                 own);
    ep_rpc_fail(call, &error);
    return false;
}

static void reply_info(struct ep_api *api, struct ep_rpc_call *call)
{
    Ep__V1__NodeInfo info;

    fill(api, &info);
    ep_rpc_reply(call, &info.base);
    ep_node_info_clear(&info);
}

void api_list_nodes(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    Ep__V1__ListNodesReply reply = EP__V1__LIST_NODES_REPLY__INIT;
    Ep__V1__NodeInfo info, *nodes[] = { &info };
    struct ep_api *api = user;

    (void)message;
    api->requests++;
    fill(api, &info);
    reply.nodes = nodes;
    reply.n_nodes = 1;
    ep_rpc_reply(call, &reply.base);
    ep_node_info_clear(&info);
}

void api_get_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__GetNodeRequest *request = (const Ep__V1__GetNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    if (check_name(api, call, request->name))
        reply_info(api, call);
}

void api_get_version(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct ep_api *api = user;
    Ep__V1__NodeInfo info;

    (void)message;
    api->requests++;
    ep_node_info(api->options.node, &info);
    ep_rpc_reply(call, &info.version->base);
    ep_node_info_clear(&info);
}

/* ---- drain and uncordon -------------------------------------------------------------------- */

/* Both wait for the store and then change the node; the reason goes with the request. */
struct api_cordon_change {
    struct api_cordon_change *next;
    struct api_pending *pending;
    struct ep_api *api; /* NULL: the API has gone; the store has the last word at the next start */
    bool cordon;
    char reason[];
};

static void unlink_change(struct api_cordon_change *change)
{
    struct api_cordon_change **at = &change->api->cordon_changes;

    while (*at != change)
        at = &(*at)->next;
    *at = change->next;
}

static void apply(const struct api_cordon_change *change)
{
    struct ep_api *api = change->api;

    ep_node_cordon(api->options.node, change->cordon, change->reason);
    if (change->cordon)
        ep_groups_announce_drain(api->options.groups, change->reason);
}

static void on_stored(const struct ep_error *error, uint64_t revision, void *user)
{
    struct api_cordon_change *change = user;
    struct ep_rpc_call *call;

    (void)revision;
    if (change->api)
        unlink_change(change);
    if (change->api && (!error || error->status == EP_OK))
        apply(change);
    call = api_pending_finish(change->pending, error);
    if (call && change->api && !api_failed(call, error))
        reply_info(change->api, call);
    free(change);
}

static void change_cordon(struct ep_api *api, struct ep_rpc_call *call, bool cordon, const char *reason)
{
    const char *action = cordon ? "node.drain" : "node.uncordon";
    struct api_pending *pending =
        api_pending_create(api, call, action, ep_node_name(api->options.node), false);
    size_t n = strlen(reason) + 1;
    struct api_cordon_change *change = pending ? calloc(1, sizeof *change + n) : NULL;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    struct ep_store_write write = {
        .key = CORDON_KEY, .value = cordon ? reason : NULL, .size = cordon ? n : 0, .expected = EP_STORE_ANY
    };

    if (!pending)
        return;
    if (!change) {
        ep_rpc_fail(api_pending_finish(pending, &error), &error);
        return;
    }
    *change = (struct api_cordon_change){
        .next = api->cordon_changes, .pending = pending, .api = api, .cordon = cordon
    };
    memcpy(change->reason, reason, n);
    api->cordon_changes = change;
    ep_store_commit(api->options.store, &write, 1, on_stored, change);
}

void api_drain_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__DrainNodeRequest *request = (const Ep__V1__DrainNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    if (check_name(api, call, request->name))
        change_cordon(api, call, true, *request->reason ? request->reason : "drained by an operator");
}

void api_uncordon_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__UncordonNodeRequest *request = (const Ep__V1__UncordonNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    if (check_name(api, call, request->name))
        change_cordon(api, call, false, "");
}

/* ---- the cordon of the last run --------------------------------------------------------------- */

struct restoring {
    struct ep_node *node;
    ep_api_restored_fn done;
    void *user;
};

static void cordon_as_stored(struct ep_node *node, const struct ep_record *record)
{
    const char *reason = record->value;

    if (!strcmp(record->key, CORDON_KEY) && record->size > 0 && reason[record->size - 1] == '\0')
        ep_node_cordon(node, true, reason);
}

static void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct restoring restoring = *(struct restoring *)user;
    struct ep_error local = *error;

    free(user);
    for (size_t i = 0; i < n; i++)
        cordon_as_stored(restoring.node, &records[i]);
    if (local.status)
        ep_error_prefix(&local, "cannot tell whether the node is drained");
    restoring.done(&local, restoring.user);
}

ep_status ep_api_restore_node(struct ep_store *store, struct ep_node *node, ep_api_restored_fn done, void *user,
                              struct ep_error *error)
{
    struct restoring *restoring = malloc(sizeof *restoring);

    if (!restoring)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    *restoring = (struct restoring){ .node = node, .done = done, .user = user };
    ep_store_list(store, CORDON_KEY, on_listed, restoring);
    return EP_OK;
}

void api_cordon_forget(struct ep_api *api)
{
    for (struct api_cordon_change *change = api->cordon_changes; change; change = change->next)
        change->api = NULL;
}
