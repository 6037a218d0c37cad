/* Nodes: list, get, drain, uncordon; the version. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_clock.h"
#include "ep_log.h"
#include "ep/v1/node.pb-c.h"

#define PING_MS 2000

#define NODE_STATE(x) EP__V1__NODE_STATE__NODE_STATE_##x

/* ---- this node -------------------------------------------------------------------------- */

static bool is_on(const Ep__V1__Group *group, const char *node, const char *device)
{
    for (size_t i = 0; i < group->status->n_ranks; i++)
        if (!strcmp(group->status->ranks[i]->node, node) && !strcmp(group->status->ranks[i]->device, device))
            return true;
    return false;
}

/* A group counts once on a device, however many of its ranks are there. */
static void count_groups(const Ep__V1__Group *group, Ep__V1__NodeInfo *info)
{
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->groups += is_on(group, info->name, info->devices[d]->name);
}

void ep_api_describe_node(struct ep_api *api, Ep__V1__NodeInfo *info)
{
    struct ep_groups *groups = api->options.groups;

    info->attachments = ep_groups_attachments(groups);
    for (size_t d = 0; d < info->n_devices; d++)
        info->devices[d]->sms_held = ep_groups_sms(groups, (uint32_t)d);
    for (size_t i = 0; i < ep_groups_count(groups); i++)
        count_groups(ep_groups_at(groups, i), info);
}

static bool is_leader(const struct ep_api *api, const char *name)
{
    const char *leader = ep_cluster_leader(api->options.cluster);

    return leader && !strcmp(leader, name);
}

/* As of now, which the table is a little behind; free with ep_node_info_clear(). */
static void fill_own(struct ep_api *api, Ep__V1__NodeInfo *info)
{
    struct ep_error store = EP_ERROR_INIT;
    char *text;

    ep_node_info(api->options.node, info);
    ep_api_describe_node(api, info);
    info->leader = is_leader(api, info->name);
    if (ep_store_health(api->options.store, &store) != EP_OK && (text = strdup(store.text))) {
        free(info->store_error);
        info->store_error = text;
    }
}

static bool is_own(const struct ep_api *api, const char *name)
{
    return !*name || !strcmp(name, ep_node_name(api->options.node));
}

/* ---- any node --------------------------------------------------------------------------- */

/* Another one, as the table has it: a view whose texts are the table's, to be packed and not freed. */
static Ep__V1__NodeInfo view_of(const struct ep_api *api, const struct ep_cluster_node *node)
{
    const Ep__V1__NodeInfo *said = ep_cluster_info(api->options.cluster, node);
    Ep__V1__NodeInfo info = EP__V1__NODE_INFO__INIT;

    if (said)
        info = *said;
    info.name = (char *)(uintptr_t)node->name;
    info.leader = is_leader(api, node->name);
    if (!node->alive)
        info.state = NODE_STATE(LOST);
    else if (node->cordoned && info.state == NODE_STATE(READY))
        info.state = NODE_STATE(CORDONED);
    if (info.state != NODE_STATE(STOPPING))
        info.reason = (char *)(uintptr_t)node->reason;
    return info;
}

static const struct ep_cluster_node *look_up(const struct ep_api *api, const char *name, struct ep_error *error)
{
    const struct ep_cluster_node *node = ep_cluster_find(api->options.cluster, name);

    if (!node)
        ep_error_set(error, EP_NOT_FOUND, "node \"%.200s\" is not known: this server is node \"%s\", one of %zu", name,
                     ep_node_name(api->options.node), ep_cluster_count(api->options.cluster));
    return node;
}

static const struct ep_cluster_node *find(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    struct ep_error error = EP_ERROR_INIT;
    const struct ep_cluster_node *node = look_up(api, name, &error);

    if (!node)
        ep_rpc_fail(call, &error);
    return node;
}

static void reply_own(struct ep_api *api, struct ep_rpc_call *call)
{
    Ep__V1__NodeInfo info;

    fill_own(api, &info);
    ep_rpc_reply(call, &info.base);
    ep_node_info_clear(&info);
}

/* ---- list ------------------------------------------------------------------------------- */

struct listing {
    Ep__V1__NodeInfo own, *views, **list;
    size_t n;
};

static void list_all(struct ep_api *api, struct listing *l)
{
    struct ep_cluster *cluster = api->options.cluster;
    bool found = false;

    for (size_t i = 0; i < ep_cluster_count(cluster); i++) {
        const struct ep_cluster_node *node = ep_cluster_at(cluster, i);
        bool own = is_own(api, node->name);

        if (!own)
            l->views[i] = view_of(api, node);
        l->list[l->n++] = own ? &l->own : &l->views[i];
        found = found || own;
    }
    if (!found) /* not registered yet */
        l->list[l->n++] = &l->own;
}

void api_list_nodes(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    Ep__V1__ListNodesReply reply = EP__V1__LIST_NODES_REPLY__INIT;
    struct ep_api *api = user;
    size_t room = ep_cluster_count(api->options.cluster) + 1;
    struct listing l = { .views = calloc(room, sizeof *l.views), .list = calloc(room, sizeof *l.list) };

    (void)message;
    api->requests++;
    if (l.views && l.list) {
        fill_own(api, &l.own);
        list_all(api, &l);
        reply.nodes = l.list;
        reply.n_nodes = l.n;
        ep_rpc_reply(call, &reply.base);
        ep_node_info_clear(&l.own);
    } else {
        ep_rpc_fail(call, &error);
    }
    free(l.views);
    free(l.list);
}

/* ---- get -------------------------------------------------------------------------------- */

/* A look at another node waits for its answer to a ping.  The call may end before. */
struct look {
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it has ended */
    uint64_t began_ns;
    char name[];
};

static void reply_look(const struct look *look, const struct ep_error *error, bool same_boot)
{
    const struct ep_cluster_node *node = find(look->api, look->call, look->name);
    Ep__V1__NodeInfo info;

    if (!node)
        return;
    info = view_of(look->api, node);
    if (error->status)
        info.unreachable = (char *)(uintptr_t)error->text;
    else if (same_boot)
        info.round_trip_us = (ep_clock_ns() - look->began_ns) / EP_NS_PER_US + 1;
    ep_rpc_reply(look->call, &info.base);
}

static void on_pong(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    const Ep__V1__PingReply *pong = (const Ep__V1__PingReply *)reply;
    struct look *look = user;
    const struct ep_cluster_node *node = ep_cluster_find(look->api->options.cluster, look->name);

    if (look->call) {
        ep_rpc_call_set_user(look->call, NULL);
        reply_look(look, error, pong && node && pong->boot_us == node->boot);
    }
    free(look);
}

void api_look_closed(struct ep_rpc_call *call, void *user)
{
    struct look *look = ep_rpc_call_user(call);

    (void)user;
    if (look)
        look->call = NULL;
}

static void look_at(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    size_t n = strlen(name) + 1;
    struct look *look = malloc(sizeof *look + n);

    if (!look) {
        ep_rpc_fail(call, &error);
        return;
    }
    *look = (struct look){ .api = api, .call = call, .began_ns = ep_clock_ns() };
    memcpy(look->name, name, n);
    ep_rpc_call_set_user(call, look);
    request.node = look->name;
    ep_cluster_call(api->options.cluster, name, &ep__v1__node__descriptor, "Ping", &request.base, PING_MS, on_pong,
                    look);
}

void api_get_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__GetNodeRequest *request = (const Ep__V1__GetNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    if (is_own(api, request->name))
        reply_own(api, call);
    else if (find(api, call, request->name))
        look_at(api, call, request->name);
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

struct cordon_change {
    struct api_pending *pending;
    struct ep_api *api;
    char name[];
};

/* A node that was lost and is no longer drained is known no more. */
static void reply_changed(struct ep_api *api, struct ep_rpc_call *call, char *name)
{
    const struct ep_cluster_node *node = ep_cluster_find(api->options.cluster, name);
    Ep__V1__NodeInfo info = EP__V1__NODE_INFO__INIT;

    if (is_own(api, name)) {
        reply_own(api, call);
        return;
    }
    info.name = name;
    info.state = NODE_STATE(LOST);
    if (node)
        info = view_of(api, node);
    ep_rpc_reply(call, &info.base);
}

static void on_changed(const struct ep_error *error, void *user)
{
    struct cordon_change *change = user;
    struct ep_rpc_call *call = api_pending_finish(change->pending, error);

    if (call && !api_failed(call, error))
        reply_changed(change->api, call, change->name);
    free(change);
}

static void change_cordon(struct ep_api *api, struct ep_rpc_call *call, const char *asked, const char *reason,
                          bool workers_stay)
{
    const char *name = *asked ? asked : ep_node_name(api->options.node);
    struct api_pending *pending = api_pending_create(api, call, reason ? "node.drain" : "node.uncordon", name, false);
    size_t n = strlen(name) + 1;
    struct cordon_change *change = pending ? malloc(sizeof *change + n) : NULL;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };

    if (!pending)
        return;
    if (!change || (!is_own(api, name) && !look_up(api, name, &error))) {
        ep_rpc_fail(api_pending_finish(pending, &error), &error);
        free(change);
        return;
    }
    *change = (struct cordon_change){ .pending = pending, .api = api };
    memcpy(change->name, name, n);
    ep_cluster_cordon(api->options.cluster, name, reason, workers_stay, on_changed, change);
}

void api_drain_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__DrainNodeRequest *request = (const Ep__V1__DrainNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    change_cordon(api, call, request->name, *request->reason ? request->reason : "drained by an operator",
                  request->workers_stay != 0);
}

void api_uncordon_node(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__UncordonNodeRequest *request = (const Ep__V1__UncordonNodeRequest *)message;
    struct ep_api *api = user;

    api->requests++;
    change_cordon(api, call, request->name, NULL, false);
}

/* Whoever drained this node, its workers are told here. */
void api_on_cluster(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user)
{
    struct ep_api *api = user;
    bool leave;

    (void)event;
    if (!node || !is_own(api, node->name))
        return;
    leave = node->cordoned && !node->workers_stay;
    if (leave && !api->told_to_leave)
        ep_groups_announce_drain(api->options.groups, node->reason);
    api->told_to_leave = leave;
}
