/* A server: its listeners, its life.  All of it on the loop's thread. */
#include <stdlib.h>
#include <string.h>

#include "rpc_private.h"

/* ---- drained -------------------------------------------------------------------------- */

static bool is_quiet(const struct ep_rpc_server *server)
{
    return server->shut && server->calls == 0;
}

static void check_drained(struct ep_rpc_server *server)
{
    if (server->state != RPC_SERVER_DRAINING || !is_quiet(server))
        return;
    server->state = RPC_SERVER_DRAINED;
    uv_timer_stop(server->grace);
    if (server->on_drained)
        server->on_drained(server, server->drained_user); /* may destroy the server */
}

/* ---- create, listen, start ----------------------------------------------------------- */

static void settle(struct ep_rpc_server_options *out, const struct ep_rpc_server_options *in)
{
    *out = in ? *in : (struct ep_rpc_server_options){ 0 };
    if (out->max_message_bytes == 0)
        out->max_message_bytes = RPC_DEFAULT_MESSAGE_BYTES;
    if (out->max_message_bytes > INT32_MAX)
        out->max_message_bytes = INT32_MAX; /* gRPC's argument is an int */
    if (out->max_connections == 0)
        out->max_connections = RPC_DEFAULT_CONNECTIONS;
    if (out->max_watches == 0)
        out->max_watches = RPC_DEFAULT_WATCHES;
    if (out->handshake_timeout_ms == 0)
        out->handshake_timeout_ms = RPC_DEFAULT_HANDSHAKE_MS;
    if (out->handshake_timeout_ms > INT32_MAX)
        out->handshake_timeout_ms = INT32_MAX;
}

static grpc_server *new_grpc_server(const struct ep_rpc_server_options *options)
{
    grpc_arg args[] = {
        rpc_arg_int(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)options->max_message_bytes),
        rpc_arg_int(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, (int)options->handshake_timeout_ms),
        rpc_arg_int(GRPC_ARG_KEEPALIVE_TIME_MS, RPC_SERVER_KEEPALIVE_MS),
        rpc_arg_int(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, RPC_KEEPALIVE_TIMEOUT_MS),
        rpc_arg_int(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        rpc_arg_int(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        rpc_arg_int(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, RPC_MIN_PING_MS),
        /* Else two servers share a port without a word. */
        rpc_arg_int(GRPC_ARG_ALLOW_REUSEPORT, 0),
        /* What a slow reader may leave with us: the default window, not one that grows. */
        rpc_arg_int(GRPC_ARG_HTTP2_BDP_PROBE, 0),
        rpc_arg_int(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024),
    };
    grpc_channel_args all = { .num_args = sizeof args / sizeof *args, .args = args };

    return grpc_server_create(&all, NULL);
}

static void free_handle(uv_handle_t *handle)
{
    free(handle);
}

ep_status ep_rpc_server_create(struct ep_rpc *rpc, const struct ep_rpc_server_options *options,
                               struct ep_rpc_server **out, struct ep_error *error)
{
    struct ep_rpc_server *server;
    ep_status status = EP_OK;

    if (!rpc->loop)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "a server needs a runtime that was opened with a loop");
    server = calloc(1, sizeof *server);
    if (!server || !(server->grace = calloc(1, sizeof *server->grace))) {
        free(server);
        return ep_error_set(error, EP_NO_MEMORY, "cannot create a server: out of memory");
    }
    server->rpc = rpc;
    server->on_call_gone = check_drained;
    settle(&server->options, options);
    uv_timer_init(rpc->loop, server->grace); /* cannot fail */
    server->grace->data = server;
    server->server = new_grpc_server(&server->options);
    grpc_server_register_completion_queue(server->server, rpc->cq, NULL);
    rpc_hold_loop(rpc);
    status = rpc_gate_create(server, error);
    if (status == EP_OK && server->options.reflection)
        status = rpc_reflection_add(server, error);
    if (status != EP_OK) {
        ep_rpc_server_destroy(server);
        return status;
    }
    *out = server;
    return EP_OK;
}

/* gRPC says only that it could not; the likely reasons are looked into by ourselves. */
static ep_status explain_tls_listen(const char *address, const struct ep_rpc_tls *tls,
                                    struct ep_error *error)
{
    ep_status status = rpc_explain_bind(address, error);

    if (status != EP_OK)
        return status;
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "cannot serve TLS on %s: does the key %s belong to the certificate %s?",
                        address, tls->key, tls->cert);
}

static ep_status listen_tls(struct ep_rpc_server *server, const char *address,
                            const struct ep_rpc_tls *tls, int *port, struct ep_error *error)
{
    grpc_server_credentials *credentials;
    ep_status status = rpc_server_credentials(server->rpc, tls, &credentials, error);

    if (status != EP_OK)
        return status;
    *port = grpc_server_add_http2_port(server->server, address, credentials);
    grpc_server_credentials_release(credentials);
    return *port > 0 ? rpc_door_open(server, *port, rpc_gate_limit(server), error)
                     : explain_tls_listen(address, tls, error);
}

ep_status ep_rpc_server_listen_tcp(struct ep_rpc_server *server, const char *address,
                                   const struct ep_rpc_tls *tls, int *port, struct ep_error *error)
{
    int bound = 0;
    ep_status status;

    if (server->state != RPC_SERVER_NEW)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "cannot listen on %s: the server has been started",
                            address);
    if (tls)
        status = listen_tls(server, address, tls, &bound, error);
    else
        status = rpc_listen_tcp(server, address, &bound, error);
    if (status == EP_OK && port)
        *port = bound;
    return status;
}

/* One call of each method, and one for the rest: without it an unknown method hangs until its deadline. */
static bool arm_all(struct ep_rpc_server *server)
{
    for (const struct rpc_method *m = server->methods; m; m = m->next)
        if (!rpc_call_arm(server, m))
            return false;
    return rpc_call_arm(server, NULL);
}

ep_status ep_rpc_server_start(struct ep_rpc_server *server, struct ep_error *error)
{
    if (server->state != RPC_SERVER_NEW)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "the server has been started already");
    grpc_server_start(server->server);
    server->state = RPC_SERVER_STARTED;
    if (!arm_all(server))
        return ep_error_set(error, EP_NO_MEMORY, "cannot start a server: out of memory");
    return rpc_listeners_start(server, error);
}

/* ---- drain and destroy --------------------------------------------------------------- */

static void on_shutdown(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_server *server = RPC_CONTAINER_OF(tag, struct ep_rpc_server, t_shutdown);

    (void)ok;
    server->shut = true;
    check_drained(server);
}

static void on_grace_over(uv_timer_t *timer)
{
    struct ep_rpc_server *server = timer->data;

    EP_WARN("rpc", "drain: cancelling the calls that are left", EP_U("calls", server->calls));
    grpc_server_cancel_all_calls(server->server);
}

static void begin_shutdown(struct ep_rpc_server *server)
{
    server->state = RPC_SERVER_DRAINING;
    rpc_listeners_close(server);
    rpc_health_drain(server);
    server->t_shutdown.fn = on_shutdown;
    rpc_tag_arm(&server->t_shutdown);
    grpc_server_shutdown_and_notify(server->server, server->rpc->cq, &server->t_shutdown);
}

void ep_rpc_server_drain(struct ep_rpc_server *server, uint64_t grace_ms,
                         void (*on_drained)(struct ep_rpc_server *server, void *user), void *user)
{
    server->on_drained = on_drained;
    server->drained_user = user;
    if (server->state == RPC_SERVER_NEW || server->state == RPC_SERVER_STARTED)
        begin_shutdown(server);
    if (server->state == RPC_SERVER_DRAINING) /* asked again: the new grace counts */
        uv_timer_start(server->grace, on_grace_over, grace_ms, 0);
}

/* Without a drain before it: cancel everything and wait for it here. */
static void force_down(struct ep_rpc_server *server)
{
    server->on_drained = NULL;
    if (server->state == RPC_SERVER_NEW || server->state == RPC_SERVER_STARTED)
        begin_shutdown(server);
    grpc_server_cancel_all_calls(server->server);
    while (rpc_run_inbox(server->rpc), server->state != RPC_SERVER_DRAINED)
        uv_sleep(1);
}

void ep_rpc_server_destroy(struct ep_rpc_server *server)
{
    if (!server)
        return;
    if (server->state != RPC_SERVER_DRAINED)
        force_down(server);
    grpc_server_destroy(server->server);
    rpc_health_free(server);
    rpc_doors_close(server);
    rpc_gate_free(server);
    rpc_server_free_methods(server);
    uv_close((uv_handle_t *)server->grace, free_handle);
    rpc_let_loop(server->rpc);
    free(server);
}
