/* Calls to other servers: a channel for each node that was called, until it goes; or one for a call. */
#include <stdlib.h>
#include <string.h>

#include "cluster_private.h"

struct call {
    struct call *next; /* of those that failed before they began */
    struct ep_cluster *cluster;
    char *node;
    struct ep_rpc_channel *own; /* NULL: it is made over the node's */
    struct ep_error error;
    ep_cluster_done_fn done;
    void *user;
};

void call_check_left(struct ep_cluster *c)
{
    void (*on_left)(void *user) = c->on_left;

    if (c->state != MEMBER_LEFT || c->calls || !on_left)
        return;
    c->on_left = NULL;
    on_left(c->left_user);
}

static void end(struct call *call, const ProtobufCMessage *reply)
{
    struct ep_cluster *c = call->cluster;

    call->done(&call->error, reply, call->user);
    ep_rpc_channel_close(call->own);
    free(call->node);
    free(call);
    c->calls--;
    call_check_left(c);
}

/* ---- those that cannot begin -------------------------------------------------------------- */

static void on_failing(uv_timer_t *timer)
{
    struct ep_cluster *c = timer->data;
    struct call *call = c->failed;

    c->failed = NULL;
    while (call) {
        struct call *next = call->next;

        end(call, NULL);
        call = next;
    }
}

static void fail_later(struct call *call)
{
    struct ep_cluster *c = call->cluster;

    call->next = c->failed;
    c->failed = call;
    uv_timer_start(&c->failing, on_failing, 0, 0);
}

static ep_status open_channel(struct ep_cluster *c, const struct entry *e, struct ep_rpc_channel **out,
                              struct ep_error *error)
{
    if (!*e->node.address)
        return ep_error_set(error, EP_UNAVAILABLE, "node %s has no address: its server listens on no port",
                            e->node.name);
    if (ep_rpc_channel_open(c->options.rpc, e->node.address, c->options.tls ? &c->tls : NULL, 0, out, error))
        return ep_error_prefix(error, "node %s", e->node.name);
    return EP_OK;
}

void call_close_channel(struct entry *e)
{
    ep_rpc_channel_close(e->channel);
    e->channel = NULL;
}

static ep_status find_entry(struct ep_cluster *c, const char *node, struct entry **out, struct ep_error *error)
{
    *out = table_find(c, node);
    if (c->state == MEMBER_LEFT)
        return ep_error_set(error, EP_UNAVAILABLE, "this server is stopping");
    if (!*out)
        return ep_error_set(error, EP_UNAVAILABLE, "node %s is not known", node);
    if (!(*out)->node.alive)
        return ep_error_set(error, EP_UNAVAILABLE, "node %s is not there at present", node);
    return EP_OK;
}

/* ---- those that do ------------------------------------------------------------------------- */

/* A channel is closed when its node goes, or this server does. */
static void on_answered(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct call *call = user;

    call->error = *error;
    if (error->status == EP_CANCELLED)
        ep_error_set(&call->error, EP_UNAVAILABLE, "node %s is lost", call->node);
    else if (error->status)
        ep_error_prefix(&call->error, "node %s", call->node);
    end(call, reply);
}

static struct call *new_call(struct ep_cluster *c, const char *node, ep_cluster_done_fn done, void *user)
{
    struct call *call = cluster_allocate(sizeof *call);

    *call = (struct call){
        .cluster = c, .node = cluster_copy(node), .error = EP_ERROR_INIT, .done = done, .user = user
    };
    c->calls++;
    return call;
}

void ep_cluster_call_anew(struct ep_cluster *c, const char *node, const ProtobufCServiceDescriptor *service,
                          const char *method, const ProtobufCMessage *request, uint32_t timeout_ms,
                          ep_cluster_done_fn done, void *user)
{
    struct call *call = new_call(c, node, done, user);
    struct entry *e;

    if (find_entry(c, node, &e, &call->error) || open_channel(c, e, &call->own, &call->error))
        fail_later(call);
    else
        ep_rpc_ask(call->own, service, method, NULL, 0, request, timeout_ms, on_answered, call);
}

void ep_cluster_call(struct ep_cluster *c, const char *node, const ProtobufCServiceDescriptor *service,
                     const char *method, const ProtobufCMessage *request, uint32_t timeout_ms, ep_cluster_done_fn done,
                     void *user)
{
    struct call *call = new_call(c, node, done, user);
    struct entry *e;

    if (find_entry(c, node, &e, &call->error) || (!e->channel && open_channel(c, e, &e->channel, &call->error)))
        fail_later(call);
    else
        ep_rpc_ask(e->channel, service, method, NULL, 0, request, timeout_ms, on_answered, call);
}
