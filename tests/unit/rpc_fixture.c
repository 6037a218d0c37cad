#include "rpc_fixture.h"

#include <stdio.h>
#include <sys/stat.h>

#include "ep_log.h"
#include "temporary.h"

/* ---- handlers ------------------------------------------------------------------------ */

static void unimplemented(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user)
{
    struct ep_error error;

    (void)request;
    (void)user;
    ep_error_set(&error, EP_UNIMPLEMENTED, "not in this test");
    ep_rpc_fail(call, &error);
}

static void count_closed(struct ep_rpc_call *call, void *user)
{
    struct fixture *f = user;

    if (f->held_call == call)
        f->held_call = NULL;
    atomic_fetch_add(&f->closed, 1);
}

static void reply_long(struct ep_rpc_call *call, size_t size)
{
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;

    reply.node = calloc(1, size + 1);
    memset(reply.node, 'x', size);
    ep_rpc_reply(call, &reply.base);
    free(reply.node);
}

/* What to do stands in the request: "fail", "hold", "identity", "peer", "meta:KEY", "left", "get:SIZE", or
 * anything else to have it back, as far as the text goes. */
static void on_ping(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__PingRequest *request = (const Ep__V1__PingRequest *)message;
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;
    struct fixture *f = user;
    struct ep_rpc_peer peer;
    char text[128];

    atomic_fetch_add(&f->requests, 1);
    snprintf(text, sizeof text, "%s", request->node);
    if (strncmp(request->node, "get:", 4) == 0) {
        reply_long(call, (size_t)atol(request->node + 4));
        return;
    }
    if (strcmp(request->node, "fail") == 0) {
        struct ep_error error;

        ep_error_set(&error, EP_TIMEOUT, "rank 3 was late by \"5\" ms \xc3\xa4");
        ep_rpc_fail(call, &error);
        return;
    }
    if (strcmp(request->node, "hold") == 0) {
        f->held_call = call;
        atomic_fetch_add(&f->held, 1);
        return;
    }
    if (strcmp(request->node, "identity") == 0)
        snprintf(text, sizeof text, "%s", ep_rpc_call_identity(call));
    else if (strcmp(request->node, "peer") == 0)
        snprintf(text, sizeof text, "%d",
                 ep_rpc_call_peer(call, &peer) ? (int)peer.pid : -1);
    else if (strncmp(request->node, "meta:", 5) == 0) {
        const char *value = ep_rpc_call_metadata(call, request->node + 5);

        snprintf(text, sizeof text, "%s", value ? value : "(absent)");
    } else if (strcmp(request->node, "left") == 0)
        snprintf(text, sizeof text, "%lld", (long long)ep_rpc_call_remaining_ms(call));
    else if (strcmp(request->node, "cut") == 0)
        snprintf(text, sizeof text, "caf\xc3");
    reply.node = text;
    ep_rpc_reply(call, &reply.base);
}

/* WatchStats: `group` is "COUNT", "endless" or "quiet"; a message carries its number and 1 KiB. */
struct counter {
    bool endless, quiet;
    uint64_t sent, count;
};

static void write_next(struct ep_rpc_call *call, struct fixture *f)
{
    struct counter *c = ep_rpc_call_user(call);
    Ep__V1__Stats stats = EP__V1__STATS__INIT;
    char filler[1024];

    if (c->quiet)
        return;
    if (!c->endless && c->sent == c->count) {
        ep_rpc_finish(call);
        return;
    }
    memset(filler, 'x', sizeof filler);
    filler[sizeof filler - 1] = '\0';
    stats.time_us = c->sent;
    stats.node = filler;
    if (!ep_rpc_write(call, &stats.base))
        return;
    c->sent++;
    atomic_fetch_add(&f->writes, 1);
    if (!ep_rpc_write(call, &stats.base))
        atomic_fetch_add(&f->refused_writes, 1);
}

static void on_watch_stats(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__WatchStatsRequest *request = (const Ep__V1__WatchStatsRequest *)message;
    struct counter *c = calloc(1, sizeof *c);

    c->endless = strcmp(request->group, "endless") == 0;
    c->quiet = strcmp(request->group, "quiet") == 0;
    c->count = (uint64_t)atoll(request->group);
    ep_rpc_call_set_user(call, c);
    atomic_fetch_add(&((struct fixture *)user)->requests, 1);
    write_next(call, user);
}

static void on_stats_writable(struct ep_rpc_call *call, void *user)
{
    write_next(call, user);
}

static void on_stats_closed(struct ep_rpc_call *call, void *user)
{
    free(ep_rpc_call_user(call));
    count_closed(call, user);
}

/* ---- the server's thread ------------------------------------------------------------- */

/* The one handler, and others that say so. */
static ep_status add_service(struct fixture *f, const ProtobufCServiceDescriptor *service,
                             const struct ep_rpc_handler *handler, struct ep_error *error)
{
    struct ep_rpc_handler *handlers = calloc(service->n_methods, sizeof *handlers);
    ep_status status;

    for (unsigned i = 0; i < service->n_methods; i++) {
        handlers[i] = (struct ep_rpc_handler){ .method = service->methods[i].name, .on_request = unimplemented };
        if (strcmp(handlers[i].method, handler->method) == 0)
            handlers[i] = *handler;
    }
    status = ep_rpc_server_add_service(f->server, service, handlers, service->n_methods, f, error);
    free(handlers);
    return status;
}

static ep_status add_services(struct fixture *f, struct ep_error *error)
{
    const struct ep_rpc_handler ping = { .method = "Ping", .on_request = on_ping, .on_closed = count_closed };
    const struct ep_rpc_handler stats = { .method = "WatchStats", .on_request = on_watch_stats,
                                          .on_writable = on_stats_writable, .on_closed = on_stats_closed };
    ep_status status = add_service(f, &ep__v1__node__descriptor, &ping, error);

    if (status == EP_OK)
        status = add_service(f, &ep__v1__admin__descriptor, &stats, error);
    if (status == EP_OK && f->health)
        status = ep_rpc_server_add_health(f->server, error);
    return status;
}

static ep_status start_server(struct fixture *f, struct ep_error *error)
{
    ep_status status = ep_rpc_server_create(f->rpc, &f->options, &f->server, error);

    if (status == EP_OK)
        status = add_services(f, error);
    if (status == EP_OK)
        status = ep_rpc_server_listen_unix(f->server, f->path, 0600, f->accept_peer, f, error);
    if (status == EP_OK && f->tcp)
        status = ep_rpc_server_listen_tcp(f->server, "127.0.0.1:0", f->tls, &f->port, error);
    if (status == EP_OK)
        status = ep_rpc_server_start(f->server, error);
    return status;
}

static void on_post(uv_async_t *async)
{
    struct fixture *f = async->data;

    pthread_mutex_lock(&f->lock);
    void (*task)(struct fixture *) = f->task;
    f->task = NULL;
    pthread_mutex_unlock(&f->lock);
    if (task) {
        task(f);
        sem_post(&f->task_done);
    }
}

static void server_main(void *arg)
{
    struct fixture *f = arg;

    uv_loop_init(&f->loop);
    uv_async_init(&f->loop, &f->post, on_post);
    f->post.data = f;
    f->start_status = ep_rpc_open(&f->loop, &f->rpc, &f->start_error);
    if (f->start_status == EP_OK)
        f->start_status = start_server(f, &f->start_error);
    sem_post(&f->ready);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    ep_rpc_close(f->rpc);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&f->loop) != 0)
        abort(); /* a handle was left behind */
}

/* ---- fixture ------------------------------------------------------------------------- */

void fixture_init(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    ep_log_configure(getenv("EP_TEST_LOG") ? EP_LOG_DEBUG : EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_true(temporary_directory(f->dir, sizeof f->dir));
    snprintf(f->path, sizeof f->path, "%s/s.sock", f->dir);
    pthread_mutex_init(&f->lock, NULL);
    sem_init(&f->ready, 0, 0);
    sem_init(&f->task_done, 0, 0);
}

bool fixture_try(struct fixture *f)
{
    struct ep_error error;

    assert_int_equal(uv_thread_create(&f->thread, server_main, f), 0);
    sem_wait(&f->ready);
    snprintf(f->unix_target, sizeof f->unix_target, "unix:%s", f->path);
    snprintf(f->tcp_target, sizeof f->tcp_target, "127.0.0.1:%d", f->port);
    assert_ok(ep_rpc_open(NULL, &f->client, &error), &error);
    assert_ok(ep_rpc_channel_open(f->client, f->unix_target, NULL, 0, &f->channel, &error), &error);
    return f->start_status == EP_OK;
}

void fixture_start(struct fixture *f)
{
    if (!fixture_try(f))
        fail_msg("server: %s", f->start_error.text);
}

void fixture_run(struct fixture *f, void (*task)(struct fixture *f))
{
    pthread_mutex_lock(&f->lock);
    f->task = task;
    pthread_mutex_unlock(&f->lock);
    uv_async_send(&f->post);
    sem_wait(&f->task_done);
}

static void on_drained(struct ep_rpc_server *server, void *user)
{
    (void)server;
    atomic_store(&((struct fixture *)user)->drained, 1);
}

static void drain(struct fixture *f)
{
    ep_rpc_server_drain(f->server, f->grace_ms, on_drained, f);
}

void fixture_drain(struct fixture *f, uint64_t grace_ms)
{
    f->grace_ms = grace_ms;
    fixture_run(f, drain);
}

static void destroy(struct fixture *f)
{
    ep_rpc_server_destroy(f->server);
    f->server = NULL;
    uv_close((uv_handle_t *)&f->post, NULL);
}

void fixture_stop(struct fixture *f)
{
    char command[128];

    ep_rpc_channel_close(f->channel);
    ep_rpc_close(f->client);
    fixture_run(f, destroy);
    uv_thread_join(&f->thread);
    pthread_mutex_destroy(&f->lock);
    sem_destroy(&f->ready);
    sem_destroy(&f->task_done);
    snprintf(command, sizeof command, "rm -rf %s", f->dir);
    assert_int_equal(system(command), 0);
}

/* ---- calls --------------------------------------------------------------------------- */

ep_status ping(struct ep_rpc_channel *channel, const char *text, int64_t timeout_ms, char *answer,
               struct ep_error *error)
{
    static const struct ep_rpc_metadata metadata[] = { { "x-test", "some value" } };
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    ProtobufCMessage *reply;
    ep_status status;

    request.node = (char *)(uintptr_t)text;
    status = ep_rpc_unary(channel, &ep__v1__node__descriptor, "Ping", metadata, 1, &request.base,
                          timeout_ms, &reply, error);
    if (status == EP_OK) {
        if (answer)
            snprintf(answer, 128, "%s", ((Ep__V1__PingReply *)reply)->node);
        protobuf_c_message_free_unpacked(reply, NULL);
    }
    return status;
}

ep_status open_stats(struct ep_rpc_channel *channel, const char *text, int64_t timeout_ms,
                     struct ep_rpc_stream **out, struct ep_error *error)
{
    Ep__V1__WatchStatsRequest request = EP__V1__WATCH_STATS_REQUEST__INIT;

    request.group = (char *)(uintptr_t)text;
    return ep_rpc_stream_open(channel, &ep__v1__admin__descriptor, "WatchStats", NULL, 0,
                              &request.base, timeout_ms, out, error);
}
