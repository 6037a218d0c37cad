/* What other servers ask: the Node service, on the TCP server only. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_clock.h"
#include "ep/v1/node.pb-c.h"

/* An address that has become another server's must not be taken for the one that was meant. */
static bool is_for_us(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    const char *own = ep_node_name(api->options.node);
    struct ep_error error = EP_ERROR_INIT;

    if (!*name || !strcmp(name, own))
        return true;
    ep_error_set(&error, EP_NOT_FOUND, "asked for node \"%.200s\", but this is node \"%s\"", name, own);
    ep_rpc_fail(call, &error);
    return false;
}

static void on_ping(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__PingRequest *request = (const Ep__V1__PingRequest *)message;
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;
    struct ep_api *api = user;

    api->requests++;
    if (!is_for_us(api, call, request->node))
        return;
    reply.node = (char *)(uintptr_t)ep_node_name(api->options.node);
    reply.time_us = ep_clock_wall_us();
    reply.boot_us = ep_node_boot(api->options.node);
    ep_rpc_reply(call, &reply.base);
}

/* ---- groups ------------------------------------------------------------------------------- */

/* NULL: the caller has gone meanwhile. */
struct answer {
    struct ep_rpc_call *call;
};

static void on_answer(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct answer *answer = user;
    struct ep_rpc_call *call = answer->call;

    free(answer);
    if (!call)
        return;
    ep_rpc_call_set_user(call, NULL);
    if (!api_failed(call, error))
        ep_rpc_reply(call, reply);
}

static struct answer *begin(struct ep_api *api, struct ep_rpc_call *call)
{
    struct answer *answer = calloc(1, sizeof *answer);
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };

    api->requests++;
    if (!answer) {
        ep_rpc_fail(call, &error);
        return NULL;
    }
    answer->call = call;
    ep_rpc_call_set_user(call, answer);
    return answer;
}

static void on_closed(struct ep_rpc_call *call, void *user)
{
    struct answer *answer = ep_rpc_call_user(call);

    (void)user;
    if (answer)
        answer->call = NULL;
}

#define GROUP_HANDLER(name, function, Request)                                                                        \
    static void name(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)                            \
    {                                                                                                                 \
        struct ep_api *api = user;                                                                                    \
        struct answer *answer = begin(api, call);                                                                     \
                                                                                                                      \
        if (answer)                                                                                                   \
            function(api->options.groups, (const Request *)message, on_answer, answer);                               \
    }

GROUP_HANDLER(on_prepare, ep_groups_prepare, Ep__V1__PrepareRequest)
GROUP_HANDLER(on_connect, ep_groups_connect, Ep__V1__ConnectRequest)
GROUP_HANDLER(on_abort, ep_groups_abort, Ep__V1__AbortRequest)
GROUP_HANDLER(on_close, ep_groups_close_claims, Ep__V1__CloseRequest)
GROUP_HANDLER(on_hold, ep_groups_hold, Ep__V1__HoldRequest)
GROUP_HANDLER(on_admit, ep_groups_admit, Ep__V1__AdmitRequest)
GROUP_HANDLER(on_left, ep_groups_left, Ep__V1__LeaveRequest)
GROUP_HANDLER(on_turn, ep_groups_turn, Ep__V1__TurnRequest)
GROUP_HANDLER(on_reach, ep_groups_reach, Ep__V1__ReachRequest)

static const struct ep_rpc_handler handlers[] = {
    { .method = "Ping", .for_peers = true, .on_request = on_ping },
    { .method = "Prepare", .for_peers = true, .on_request = on_prepare, .on_closed = on_closed },
    { .method = "Connect", .for_peers = true, .on_request = on_connect, .on_closed = on_closed },
    { .method = "Abort", .for_peers = true, .on_request = on_abort, .on_closed = on_closed },
    { .method = "Close", .for_peers = true, .on_request = on_close, .on_closed = on_closed },
    { .method = "Hold", .for_peers = true, .on_request = on_hold, .on_closed = on_closed },
    { .method = "Admit", .for_peers = true, .on_request = on_admit, .on_closed = on_closed },
    { .method = "Leave", .for_peers = true, .on_request = on_left, .on_closed = on_closed },
    { .method = "Turn", .for_peers = true, .on_request = on_turn, .on_closed = on_closed },
    { .method = "Reach", .for_peers = true, .on_request = on_reach, .on_closed = on_closed },
    { .method = "GetStats", .for_peers = true, .on_request = api_get_stats_here, .on_closed = api_gather_closed },
    { .method = "CreateGroup", .for_peers = true, .on_request = api_create_group_here, .on_closed = api_pending_closed },
    { .method = "UpdateGroup", .for_peers = true, .on_request = api_update_group_here, .on_closed = api_pending_closed },
    { .method = "DeleteGroup", .for_peers = true, .on_request = api_delete_group_here, .on_closed = api_pending_closed },
};

ep_status ep_api_add_node(struct ep_api *api, struct ep_rpc_server *server, struct ep_error *error)
{
    return ep_rpc_server_add_service(server, &ep__v1__node__descriptor, handlers, sizeof handlers / sizeof *handlers,
                                     api, error);
}
