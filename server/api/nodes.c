/* Nodes: list, get, drain, uncordon; the version. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_clock.h"
#include "ep_log.h"
#include "ep/v1/node.pb-c.h"

#define PING_MS    2000
#define REASON_MAX 1024 /* bytes, of a cordon: all servers keep it */

#define NODE_STATE(x) EP__V1__NODE_STATE__NODE_STATE_##x

/* ---- this node -------------------------------------------------------------------------- */

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
    ep_groups_describe_own(api->options.groups, info);
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

/* Devices of its own, in one piece, with the table's texts. */
static bool copy_devices(Ep__V1__NodeInfo *view)
{
    const size_t n = view->n_devices;
    Ep__V1__Device **list = calloc(n + 1, sizeof *list + sizeof **list), *copies = (Ep__V1__Device *)(list + n);

    for (size_t d = 0; list && d < n; d++) {
        copies[d] = *view->devices[d];
        list[d] = &copies[d];
    }
    view->devices = list;
    return list != NULL;
}

static void set_state(const struct ep_cluster_node *node, Ep__V1__NodeInfo *view)
{
    if (!node->alive)
        view->state = NODE_STATE(LOST);
    else if (node->cordoned && view->state == NODE_STATE(READY))
        view->state = NODE_STATE(CORDONED);
    if (view->state != NODE_STATE(STOPPING))
        view->reason = (char *)(uintptr_t)node->reason;
}

/* Another one: a view whose texts are the table's, to be packed; its devices are to be freed.  False: no memory. */
static bool view_of(const struct ep_api *api, const struct ep_cluster_node *node, Ep__V1__NodeInfo *view)
{
    const Ep__V1__NodeInfo *said = ep_cluster_info(api->options.cluster, node);

    ep__v1__node_info__init(view);
    if (said)
        *view = *said;
    if (!copy_devices(view))
        return false;
    view->name = (char *)(uintptr_t)node->name;
    view->leader = is_leader(api, node->name);
    set_state(node, view);
    ep_groups_describe_other(api->options.groups, node->name, view);
    return true;
}

static void reply_view(struct ep_rpc_call *call, const Ep__V1__NodeInfo *view)
{
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };

    if (view->devices)
        ep_rpc_reply(call, &view->base);
    else
        ep_rpc_fail(call, &error);
    free(view->devices);
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

/* False: no memory. */
static bool list_all(struct ep_api *api, struct listing *l)
{
    struct ep_cluster *cluster = api->options.cluster;
    bool found = false, made = true;

    for (size_t i = 0; made && i < ep_cluster_count(cluster); i++) {
        const struct ep_cluster_node *node = ep_cluster_at(cluster, i);
        bool own = is_own(api, node->name);

        if (!own)
            made = view_of(api, node, &l->views[i]);
        l->list[l->n++] = own ? &l->own : &l->views[i];
        found = found || own;
    }
    if (!found) /* not registered yet */
        l->list[l->n++] = &l->own;
    return made;
}

static void listing_clear(struct listing *l, size_t room)
{
    for (size_t i = 0; l->views && i < room; i++)
        free(l->views[i].devices);
    if (l->own.name)
        ep_node_info_clear(&l->own);
    free(l->views);
    free(l->list);
}

static void answer_nodes(struct ep_api *api, struct ep_rpc_call *call, const char *name, const char *behind)
{
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    Ep__V1__ListNodesReply reply = EP__V1__LIST_NODES_REPLY__INIT;
    size_t room = ep_cluster_count(api->options.cluster) + 1;
    struct listing l = { .views = calloc(room, sizeof *l.views), .list = calloc(room, sizeof *l.list) };

    (void)name;
    if (l.views && l.list)
        fill_own(api, &l.own);
    if (l.own.name && list_all(api, &l)) {
        reply.nodes = l.list;
        reply.n_nodes = l.n;
        reply.behind = (char *)(uintptr_t)behind;
        ep_rpc_reply(call, &reply.base);
    } else {
        ep_rpc_fail(call, &error);
    }
    listing_clear(&l, room);
}

void api_list_nodes(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    (void)message;
    api_read(user, call, "", answer_nodes);
}

/* ---- get -------------------------------------------------------------------------------- */

/* A look at another node waits for its answer to a ping, and then as all reads do.  The call may end before. */
struct look {
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it has ended */
    uint64_t began_ns, round_trip_us; /* 0: another than the one in the table has answered */
    struct ep_error error;            /* of the ping */
    char name[];
};

static void reply_look(const struct look *look, const char *behind)
{
    const struct ep_cluster_node *node = find(look->api, look->call, look->name);
    Ep__V1__NodeInfo info;

    if (!node)
        return;
    (void)view_of(look->api, node, &info);
    info.unreachable = (char *)(uintptr_t)look->error.text;
    info.round_trip_us = look->round_trip_us;
    info.behind = (char *)(uintptr_t)behind;
    reply_view(look->call, &info);
}

static void on_time(const struct ep_error *error, void *user)
{
    struct look *look = user;

    if (look->call) {
        ep_rpc_call_set_user(look->call, NULL);
        reply_look(look, error->text);
    }
    free(look);
}

static void on_pong(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    const Ep__V1__PingReply *pong = (const Ep__V1__PingReply *)reply;
    struct look *look = user;
    const struct ep_cluster_node *node;

    if (!look->call) {
        free(look);
        return;
    }
    node = ep_cluster_find(look->api->options.cluster, look->name);
    look->error = *error;
    if (pong && node && pong->boot_us == node->boot)
        look->round_trip_us = (ep_clock_ns() - look->began_ns) / EP_NS_PER_US + 1;
    ep_groups_before_read(look->api->options.groups, api_read_ms(look->call), on_time, look);
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
        (void)view_of(api, node, &info);
    else
        (void)copy_devices(&info);
    reply_view(call, &info);
}

static void on_changed(const struct ep_error *error, void *user)
{
    struct cordon_change *change = user;
    struct ep_rpc_call *call = api_pending_finish(change->pending, error);

    if (call && !api_failed(call, error))
        reply_changed(change->api, call, change->name);
    free(change);
}

static ep_status check_cordon(struct ep_api *api, const char *name, const char *reason,
                              struct ep_error *error)
{
    if (reason && strlen(reason) > REASON_MAX)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "reason has %zu bytes: it may have %d",
                            strlen(reason), REASON_MAX);
    return is_own(api, name) || look_up(api, name, error) ? EP_OK : error->status;
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
    if (!change || check_cordon(api, name, reason, &error)) {
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
