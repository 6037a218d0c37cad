#include "daemon.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>
#include <uv.h>

#include "ep_api.h"
#include "ep_attach.h"
#include "ep_cluster.h"
#include "ep_descriptors.h"
#include "ep_group.h"
#include "ep_log.h"
#include "ep_metrics.h"
#include "ep_node.h"
#include "ep_rpc.h"
#include "ep_store.h"
#include "ep_thread.h"
#include "files.h"

#define MODULE "main"
#define DRAIN_POLL_MS 20      /* how soon the last worker's leaving is noticed */
#define RPC_GRACE_MS 1000     /* calls under way when the servers close */
#define STORE_FILE "ep-server.db"
#define DESCRIPTORS 16384     /* so many have room from the beginning */
#define DESCRIPTORS_LEAST 48  /* to start, and to answer a few with a small group */
#define STORE_FIRST_MS 500u   /* of a server that is gone the store is to know before its connections to others end */

enum phase { STARTING, SERVING, DRAINING, CLOSING };

struct daemon {
    struct ep_options *options;
    int argc;
    char **argv;
    enum phase phase;
    struct ep_error failure; /* why it ends, if not by a signal */
    bool now;                /* a second signal: wait for nobody */

    uv_loop_t loop;
    uv_signal_t on_term, on_int, on_hup;
    uv_timer_t watchdog, drain_timer, step_timer;
    uv_work_t first_work; /* of the loop's pool */
    uint64_t drain_began; /* loop time, ms */
    size_t closing;       /* next of close_steps */

    struct ep_lock_file state_lock, socket_lock, pid_lock;
    char *token;
    char *side_socket;
    int listen_port, metrics_port;
    bool wrote_port_file;

    struct ep_node *node;
    struct ep_store *store;
    struct ep_cluster *cluster;
    bool cluster_ready, groups_ready;
    struct ep_groups *groups;
    struct ep_attach *attach;
    struct ep_api *api;
    struct ep_rpc *rpc;
    struct ep_rpc_server *unix_server, *tcp_server;
    int servers_draining;
    struct ep_metrics *metrics;
};

static void begin_closing(struct daemon *d);

/* ---- health, readiness ---------------------------------------------------------------- */

static void set_health(struct daemon *d, bool serving)
{
    struct ep_rpc_server *const servers[] = { d->unix_server, d->tcp_server };

    for (size_t i = 0; i < sizeof servers / sizeof *servers; i++) {
        if (!servers[i])
            continue;
        ep_rpc_server_set_health(servers[i], "", serving);
        ep_rpc_server_set_health(servers[i], "ep.v1.Admin", serving);
    }
    if (d->unix_server)
        ep_rpc_server_set_health(d->unix_server, "ep.v1.Attach", serving);
}

static bool is_ready(const char **why, void *user)
{
    static const char *const reasons[] = {
        [STARTING] = "starting: the groups are being formed", [DRAINING] = "draining", [CLOSING] = "stopping",
    };
    const struct daemon *d = user;

    if (d->phase != SERVING)
        *why = reasons[d->phase];
    return d->phase == SERVING;
}

static void render_metrics(FILE *out, void *user)
{
    const struct daemon *d = user;

    if (d->api)
        ep_api_render_metrics(d->api, out);
}

static ep_status write_port_file(struct daemon *d, struct ep_error *error)
{
    char *text = NULL;
    size_t size;
    FILE *out;
    ep_status status;

    if (!*d->options->port_file)
        return EP_OK;
    out = open_memstream(&text, &size);
    if (!out)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    fprintf(out, "PID=%ld\nSOCKET=%s\nSIDE_SOCKET=%s\n", (long)getpid(), d->options->socket, d->side_socket);
    if (d->tcp_server)
        fprintf(out, "LISTEN_PORT=%d\n", d->listen_port);
    if (d->metrics)
        fprintf(out, "METRICS_PORT=%d\n", d->metrics_port);
    fclose(out);
    status = ep_files_write_atomically(d->options->port_file, text, error);
    d->wrote_port_file = status == EP_OK;
    free(text);
    return status;
}

/* ---- failure ------------------------------------------------------------------------------ */

/* The first reason is the one that is told. */
static void fail(struct daemon *d, const struct ep_error *error)
{
    if (d->failure.status == EP_OK)
        d->failure = *error;
    begin_closing(d);
}

static void serve(struct daemon *d)
{
    struct ep_error error = EP_ERROR_INIT;

    d->phase = SERVING;
    set_health(d, true);
    if (write_port_file(d, &error) != EP_OK) {
        fail(d, &error);
        return;
    }
    sd_notifyf(0, "READY=1\nMAINPID=%ld\nSTATUS=Serving %zu groups on %s", (long)getpid(),
               ep_groups_count(d->groups), d->options->socket);
    EP_INFO(MODULE, "serving", EP_S("node", ep_node_name(d->node)), EP_S("socket", d->options->socket),
            EP_I("listen_port", d->listen_port), EP_I("metrics_port", d->metrics_port),
            EP_U("groups", ep_groups_count(d->groups)));
}

static void go_on_starting(struct daemon *d, bool *part, const struct ep_error *error)
{
    if (d->phase != STARTING)
        return;
    *part = error->status == EP_OK;
    if (error->status != EP_OK)
        fail(d, error);
    else if (d->cluster_ready && d->groups_ready)
        serve(d);
}

/* Only then is known whether this node was drained: it must not take work again by a restart. */
static void on_cluster_ready(const struct ep_error *error, void *user)
{
    struct daemon *d = user;

    go_on_starting(d, &d->cluster_ready, error);
}

/* Two servers with one name: this one ends, as it would have if it had come second.  One that stops already goes on. */
static void on_replaced(const struct ep_error *error, void *user)
{
    struct daemon *d = user;

    if (d->phase == STARTING || d->phase == SERVING)
        fail(d, error);
}

static void on_groups_ready(const struct ep_error *error, void *user)
{
    struct daemon *d = user;

    go_on_starting(d, &d->groups_ready, error);
}

/* ---- draining -------------------------------------------------------------------------------- */

static void on_drain_timer(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    uint32_t attached = ep_groups_attachments(d->groups);
    bool over = uv_now(&d->loop) - d->drain_began >= d->options->drain_grace;

    if (attached && !over)
        return;
    if (attached)
        EP_WARN(MODULE, "workers did not leave in time and are detached", EP_U("attachments", attached),
                EP_U("drain_grace_ms", d->options->drain_grace));
    begin_closing(d);
}

static void begin_draining(struct daemon *d, const char *signal_name)
{
    d->phase = DRAINING;
    d->drain_began = uv_now(&d->loop);
    EP_INFO(MODULE, "draining", EP_S("signal", signal_name),
            EP_U("attachments", ep_groups_attachments(d->groups)),
            EP_U("drain_grace_ms", d->options->drain_grace));
    sd_notify(0, "STOPPING=1\nSTATUS=Waiting for workers to leave");
    set_health(d, false);
    ep_node_set_stopping(d->node);
    ep_cluster_refresh(d->cluster);
    ep_groups_announce_drain(d->groups, "the server is stopping");
    uv_timer_start(&d->drain_timer, on_drain_timer, 0, DRAIN_POLL_MS);
}

static void on_stop_signal(uv_signal_t *handle, int number)
{
    struct daemon *d = handle->data;

    switch (d->phase) {
    case SERVING:
        begin_draining(d, number == SIGINT ? "SIGINT" : "SIGTERM");
        break;
    case STARTING:
    case DRAINING:
        EP_INFO(MODULE, "stopping now");
        d->now = true;
        begin_closing(d);
        break;
    case CLOSING:
        d->now = true;
        break;
    }
}

/* ---- reload ------------------------------------------------------------------------------------ */

static void on_changed(const char *name, const char *text, bool applied, void *user)
{
    (void)user;
    if (applied)
        EP_INFO(MODULE, "option changed", EP_S("option", name), EP_S("value", text));
    else
        EP_WARN(MODULE, "option changed in the file, but needs a restart", EP_S("option", name),
                EP_S("value", text));
}

static void on_reload_signal(uv_signal_t *handle, int number)
{
    struct daemon *d = handle->data;
    struct ep_options *fresh = NULL;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = ep_options_load(d->argc, d->argv, environ, &fresh, &error);

    (void)number;
    if (status == EP_OK)
        status = ep_options_check(fresh, &error);
    if (status == EP_OK) {
        ep_options_reload(d->options, fresh, on_changed, d);
        ep_log_configure((enum ep_log_level)d->options->log_level, (enum ep_log_format)d->options->log_format);
        EP_INFO(MODULE, "configuration reloaded");
    } else {
        EP_ERROR(MODULE, "configuration not reloaded, the old one stays", EP_S("error", error.text));
    }
    ep_options_free(fresh);
}

/* ---- opening: each step says what it needs of the ones before ------------------------------------ */

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    sd_notify(0, "WATCHDOG=1");
}

static ep_status open_loop(struct daemon *d, struct ep_error *error)
{
    uv_timer_t *const timers[] = { &d->watchdog, &d->drain_timer, &d->step_timer };
    uv_signal_t *const signals[] = { &d->on_term, &d->on_int, &d->on_hup };
    uint64_t watchdog_us = 0;

    if (uv_loop_init(&d->loop) != 0)
        return ep_error_set(error, EP_INTERNAL, "cannot make an event loop");
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++) {
        uv_timer_init(&d->loop, timers[i]);
        timers[i]->data = d;
    }
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        uv_signal_init(&d->loop, signals[i]);
        signals[i]->data = d;
    }
    uv_signal_start(&d->on_term, on_stop_signal, SIGTERM);
    uv_signal_start(&d->on_int, on_stop_signal, SIGINT);
    uv_signal_start(&d->on_hup, on_reload_signal, SIGHUP);
    if (sd_watchdog_enabled(0, &watchdog_us) > 0)
        uv_timer_start(&d->watchdog, on_watchdog, 0, watchdog_us / 2000 + 1);
    return EP_OK;
}

static void do_nothing(uv_work_t *work)
{
    (void)work;
}

/* libuv makes its pool with the first work for it, and ends the process where it cannot: not while groups are served. */
static ep_status open_pool(struct daemon *d, struct ep_error *error)
{
    int started, failure = ep_threads_try(EP_POOL_THREADS, &started);

    if (failure == 0)
        failure = -uv_queue_work(&d->loop, &d->first_work, do_nothing, NULL);
    if (failure == 0)
        return EP_OK;
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%d of the %d threads of the pool can be started: %s: see the limits of "
                        "threads (ulimit -u, the cgroup's pids.max) and of address space (ulimit -v)", started,
                        EP_POOL_THREADS, uv_strerror(-failure));
}

/* Two servers with one state or one socket would corrupt or steal from each other. */
static ep_status take_lock(struct ep_lock_file *lock, const char *path, const char *suffix,
                           const char *option, struct ep_error *error)
{
    char *full = NULL, *what = NULL;
    ep_status status = EP_NO_MEMORY;

    if (asprintf(&full, "%s%s", path, suffix) < 0)
        full = NULL;
    if (asprintf(&what, "%s %s", option, path) < 0)
        what = NULL;
    if (full && what)
        status = ep_lock_file_take(lock, full, what, error);
    else
        ep_error_set(error, EP_NO_MEMORY, "out of memory");
    free(full);
    free(what);
    return status;
}

/* Of a server whose state is in etcd there is none. */
static ep_status open_state_dir(struct daemon *d, struct ep_error *error)
{
    const struct ep_options *o = d->options;

    if (*o->store)
        return EP_OK;
    if (ep_files_make_directory(o->state_dir, 0700, error) != EP_OK)
        return error->status;
    return take_lock(&d->state_lock, o->state_dir, "/lock", "state-dir", error);
}

static ep_status open_files(struct daemon *d, struct ep_error *error)
{
    const struct ep_options *o = d->options;
    ep_status status = open_state_dir(d, error);

    if (status == EP_OK)
        status = ep_files_make_parent(o->socket, 0755, error);
    if (status == EP_OK)
        status = take_lock(&d->socket_lock, o->socket, ".lock", "socket", error);
    if (status == EP_OK && *o->pid_file)
        status = take_lock(&d->pid_lock, o->pid_file, "", "pid-file", error);
    if (status == EP_OK && *o->attach_token_file
        && (status = ep_files_read_secret(o->attach_token_file, &d->token, error)) != EP_OK)
        ep_error_prefix(error, "attach-token-file");
    return status;
}

/*
 * Any thread.  What is still to be done on any GPU would fail, one call after the other; a new process can use those that work.
 * Workers, other servers and the store are used to one that ends without a word.
 */
static void on_gpu_lost(const struct ep_error *why, void *user)
{
    (void)user;
    EP_ERROR(MODULE, "a GPU is lost: this server ends, to be started again", EP_S("error", why->text));
    _exit(ep_status_exit_code(why->status));
}

static ep_status open_node(struct daemon *d, struct ep_error *error)
{
    static const enum ep_node_choice backends[] = {
        [EP_OPTIONS_AUTO] = EP_NODE_AUTO, [EP_OPTIONS_HOST] = EP_NODE_HOST, [EP_OPTIONS_CUDA] = EP_NODE_CUDA,
    };
    static const enum ep_node_mps mps[] = {
        [EP_OPTIONS_MPS_AUTO] = EP_NODE_MPS_AUTO,
        [EP_OPTIONS_MPS_REQUIRE] = EP_NODE_MPS_REQUIRE,
        [EP_OPTIONS_MPS_OFF] = EP_NODE_MPS_OFF,
    };
    const struct ep_node_options options = {
        .name = d->options->name,
        .backend = backends[d->options->backend],
        .mps = mps[d->options->mps],
        .polls = d->options->doorbell == EP_OPTIONS_DOORBELL_POLL,
        .gpus = d->options->gpus,
        .host_devices = (uint32_t)d->options->host_ranks,
        .memory_budget = d->options->memory,
        .sms_per_rank = (uint32_t)d->options->sms_per_rank,
        .region_bytes = d->options->max_region_bytes,
        .several = *d->options->store != '\0',
        .silence_ms = (uint32_t)d->options->lost_after + STORE_FIRST_MS,
        .socket = d->options->socket,
        .admin_address = d->options->listen,
        .on_lost = on_gpu_lost,
    };

    return ep_node_open(&options, &d->node, error);
}

static ep_status open_etcd(struct daemon *d, struct ep_error *error)
{
    const struct ep_options *o = d->options;
    const struct ep_store_etcd options = {
        .url = o->store, .ca = o->store_ca, .cert = o->store_cert, .key = o->store_key,
        .user = o->store_user, .password_file = o->store_password_file,
    };

    return ep_store_open_etcd(&d->loop, &options, &d->store, error);
}

static ep_status open_store(struct daemon *d, struct ep_error *error)
{
    char *path = NULL;
    ep_status status;

    if (*d->options->store)
        return open_etcd(d, error);
    if (asprintf(&path, "%s/" STORE_FILE, d->options->state_dir) < 0)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = ep_store_open_sqlite(&d->loop, path, &d->store, error);
    free(path);
    return status;
}

/* What this server shows, and checks, on either side of a connection. */
static struct ep_rpc_tls tls_of(const struct ep_options *o)
{
    return (struct ep_rpc_tls){ .ca = *o->tls_ca ? o->tls_ca : NULL, .cert = o->tls_cert, .key = o->tls_key };
}

static void leave_to_reports(Ep__V1__NodeInfo *info, void *user)
{
    const struct daemon *d = user;

    if (d->groups)
        ep_groups_untell(d->groups, info);
}

static ep_status open_cluster(struct daemon *d, struct ep_error *error)
{
    const struct ep_rpc_tls tls = tls_of(d->options);
    const struct ep_cluster_options options = {
        .loop = &d->loop, .rpc = d->rpc, .store = d->store, .node = d->node,
        .tls = *d->options->tls_cert ? &tls : NULL,
        .ttl_ms = d->options->lost_after,
        .describe = leave_to_reports, .on_ready = on_cluster_ready, .on_replaced = on_replaced, .user = d,
    };

    return ep_cluster_open(&options, &d->cluster, error);
}

static ep_status open_groups(struct daemon *d, struct ep_error *error)
{
    return ep_groups_open(&d->loop, d->node, d->store, d->cluster, on_groups_ready, d, &d->groups, error);
}

/* With neither list: the server's own user and root. */
static bool is_listed(const struct ep_id_list *uids, const struct ep_id_list *gids, uid_t uid, gid_t gid)
{
    for (size_t i = 0; i < uids->n; i++)
        if (uids->ids[i] == uid)
            return true;
    for (size_t i = 0; i < gids->n; i++)
        if (gids->ids[i] == gid)
            return true;
    return uids->n == 0 && gids->n == 0 && (uid == 0 || uid == geteuid());
}

static bool is_admin(const struct daemon *d, uid_t uid, gid_t gid)
{
    return is_listed(&d->options->admin_uid, &d->options->admin_gid, uid, gid);
}

/* May this user use the sockets? */
static bool is_allowed(uid_t uid, gid_t gid, void *user)
{
    const struct daemon *d = user;

    return is_listed(&d->options->allow_uid, &d->options->allow_gid, uid, gid) || is_admin(d, uid, gid);
}

static ep_status open_attach(struct daemon *d, struct ep_error *error)
{
    const struct ep_options *o = d->options;
    struct ep_attach_options options = {
        .mode = o->socket_mode,
        .is_allowed = is_allowed, .user = d,
        .token = d->token,
        .max_connections = (uint32_t)o->max_connections,
    };

    if (asprintf(&d->side_socket, "%s.attach", o->socket) < 0) {
        d->side_socket = NULL;
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    }
    options.socket = d->side_socket;
    return ep_attach_open(&d->loop, d->groups, d->node, &options, &d->attach, error);
}

static ep_status open_api(struct daemon *d, struct ep_error *error)
{
    const struct ep_api_options options = {
        .loop = &d->loop, .node = d->node, .groups = d->groups, .attach = d->attach,
        .store = d->store, .cluster = d->cluster, .max_claims = (uint32_t)d->options->max_watches,
    };

    return ep_api_create(&options, &d->api, error);
}

static ep_status open_rpc(struct daemon *d, struct ep_error *error)
{
    return ep_rpc_open(&d->loop, &d->rpc, error);
}

static struct ep_rpc_server_options server_options(const struct daemon *d)
{
    return (struct ep_rpc_server_options){
        .max_message_bytes = (uint32_t)d->options->max_message_bytes,
        .max_connections = (uint32_t)d->options->max_connections,
        .max_watches = (uint32_t)d->options->max_watches,
        .reflection = true,
    };
}

static bool may_connect(const struct ep_rpc_peer *peer, void *user)
{
    return is_allowed(peer->uid, peer->gid, user);
}

/* Workers come over the unix socket too, and are not trusted with more than their own results. */
static bool may_change(const struct ep_rpc_peer *peer, void *user)
{
    return peer && is_admin(user, peer->uid, peer->gid);
}

static ep_status open_unix_server(struct daemon *d, struct ep_error *error)
{
    struct ep_rpc_server_options options = server_options(d);
    ep_status status;

    options.is_operator = may_change;
    options.user = d;
    options.operators = "the users of admin-uid and the groups of admin-gid";
    status = ep_rpc_server_create(d->rpc, &options, &d->unix_server, error);
    if (status == EP_OK)
        status = ep_api_add_admin(d->api, d->unix_server, error);
    if (status == EP_OK)
        status = ep_api_add_attach(d->api, d->unix_server, error);
    if (status == EP_OK)
        status = ep_rpc_server_listen_unix(d->unix_server, d->options->socket, d->options->socket_mode,
                                           may_connect, d, error);
    if (status == EP_OK)
        status = ep_rpc_server_start(d->unix_server, error);
    return status;
}

/* The host that was asked for; the port as well, or the one that was bound. */
static void publish_address(struct daemon *d)
{
    const char *asked = *d->options->advertise ? d->options->advertise : d->options->listen;
    const char *colon = strrchr(asked, ':');
    int port = *d->options->advertise ? atoi(colon + 1) : 0;
    char address[320];

    snprintf(address, sizeof address, "%.*s:%d", (int)(colon - asked), asked, port ? port : d->listen_port);
    ep_node_set_admin_address(d->node, address);
}

/* Any user of this machine comes to its loopback, where no certificate says who it is. */
static bool may_not_change(const struct ep_rpc_peer *peer, void *user)
{
    (void)peer, (void)user;
    return false;
}

static ep_status open_tcp_server(struct daemon *d, struct ep_error *error)
{
    const struct ep_options *o = d->options;
    struct ep_rpc_server_options options = server_options(d);
    const struct ep_rpc_tls tls = tls_of(o);
    ep_status status;

    if (!*o->listen)
        return EP_OK;
    if (!*o->tls_ca && !o->insecure)
        options.is_operator = may_not_change;
    options.peer_unit = *o->peer_ou ? o->peer_ou : NULL;
    options.operators =
        "those that come over the unix socket, or show a certificate (tls-ca), or all with insecure";
    status = ep_rpc_server_create(d->rpc, &options, &d->tcp_server, error);
    if (status == EP_OK)
        status = ep_api_add_admin(d->api, d->tcp_server, error);
    if (status == EP_OK)
        status = ep_api_add_node(d->api, d->tcp_server, error);
    if (status == EP_OK)
        status = ep_rpc_server_listen_tcp(d->tcp_server, o->listen, *o->tls_cert ? &tls : NULL,
                                          &d->listen_port, error);
    if (status == EP_OK)
        publish_address(d);
    if (status == EP_OK)
        status = ep_rpc_server_start(d->tcp_server, error);
    return status;
}

/* Others may call from now on. */
static ep_status join_cluster(struct daemon *d, struct ep_error *error)
{
    (void)error;
    ep_cluster_join(d->cluster);
    return EP_OK;
}

static ep_status open_metrics(struct daemon *d, struct ep_error *error)
{
    const struct ep_metrics_source source = { render_metrics, is_ready, d };

    if (!*d->options->metrics)
        return EP_OK;
    return ep_metrics_open(&d->loop, d->options->metrics, &source, &d->metrics, &d->metrics_port, error);
}

/* on_cluster_ready and on_groups_ready are called from the loop, when all of these are over. */
static ep_status (*const open_steps[])(struct daemon *d, struct ep_error *error) = {
    open_files, open_pool, open_node, open_rpc, open_store, open_cluster, open_groups, open_attach, open_api,
    open_unix_server, open_tcp_server, join_cluster, open_metrics,
};

/* ---- closing: the steps of opening, backwards ------------------------------------------------------- */

static void close_next(uv_timer_t *timer);

/* The next step runs from the loop, when whoever called us has returned. */
static void step_done(void *user)
{
    struct daemon *d = user;

    uv_timer_start(&d->step_timer, close_next, 0, 0);
}

static void begin_closing(struct daemon *d)
{
    if (d->phase == CLOSING)
        return;
    d->phase = CLOSING;
    sd_notify(0, "STOPPING=1\nSTATUS=Stopping");
    set_health(d, false);
    uv_timer_stop(&d->drain_timer);
    step_done(d);
}

static void on_server_drained(struct ep_rpc_server *server, void *user)
{
    struct daemon *d = user;

    (void)server;
    if (--d->servers_draining == 0)
        step_done(d);
}

static void drain_servers(struct daemon *d)
{
    struct ep_rpc_server *const servers[] = { d->unix_server, d->tcp_server };

    if (d->api)
        ep_api_end_streams(d->api);
    d->servers_draining = !!d->unix_server + !!d->tcp_server;
    if (d->servers_draining == 0)
        step_done(d);
    for (size_t i = 0; i < sizeof servers / sizeof *servers; i++)
        if (servers[i])
            ep_rpc_server_drain(servers[i], d->now ? 0 : RPC_GRACE_MS, on_server_drained, d);
}

static void close_servers(struct daemon *d)
{
    ep_metrics_close(d->metrics);
    d->metrics = NULL;
    ep_rpc_server_destroy(d->tcp_server);
    ep_rpc_server_destroy(d->unix_server);
    d->tcp_server = d->unix_server = NULL;
    step_done(d);
}

static void close_attach(struct daemon *d)
{
    if (d->attach)
        ep_attach_close(d->attach, step_done, d);
    else
        step_done(d);
}

static void on_settled(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    (void)error, (void)records, (void)n;
    step_done(user);
}

/* Others call no more, and what was asked of them is answered. */
static void leave_cluster(struct daemon *d)
{
    if (d->cluster)
        ep_cluster_leave(d->cluster, step_done, d);
    else
        step_done(d);
}

/* Answers come in the order of the requests: after this one the API waits for none. */
static void settle_store(struct daemon *d)
{
    if (d->store)
        ep_store_list(d->store, "settled", on_settled, d);
    else
        step_done(d);
}

/* Before the groups, which it watches. */
static void close_api(struct daemon *d)
{
    if (d->api)
        ep_api_destroy(d->api);
    d->api = NULL;
    step_done(d);
}

static void close_groups(struct daemon *d)
{
    if (d->groups)
        ep_groups_close(d->groups, step_done, d);
    else
        step_done(d);
}

static void close_cluster(struct daemon *d)
{
    if (d->cluster)
        ep_cluster_close(d->cluster, step_done, d);
    else
        step_done(d);
}

static void close_store(struct daemon *d)
{
    if (d->store)
        ep_store_close(d->store, step_done, d);
    else
        step_done(d);
}

static void close_node(struct daemon *d)
{
    if (d->node)
        ep_node_close(d->node);
    uv_stop(&d->loop); /* close_loop does the rest */
}

static void (*const close_steps[])(struct daemon *d) = {
    drain_servers, close_servers, close_attach, leave_cluster, settle_store, close_api, close_groups, close_cluster,
    close_store, close_node,
};

static void close_next(uv_timer_t *timer)
{
    struct daemon *d = timer->data;

    close_steps[d->closing++](d);
}

static void close_handle(uv_handle_t *handle, void *user)
{
    (void)user;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void close_files(struct daemon *d)
{
    if (d->wrote_port_file)
        unlink(d->options->port_file);
    ep_lock_file_release(&d->pid_lock);
    ep_lock_file_release(&d->socket_lock);
    ep_lock_file_release(&d->state_lock);
    free(d->token);
    free(d->side_socket);
}

/* The runtime's thread ends here; then only handles of ours are left. */
/* A handle that is closed gives its signal back its default, which would end us with another exit code:
 * from here on impatience changes nothing. */
static void close_signals(struct daemon *d)
{
    uv_signal_t *const handles[] = { &d->on_term, &d->on_int, &d->on_hup };
    static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (size_t i = 0; i < sizeof handles / sizeof *handles; i++) {
        close_handle((uv_handle_t *)handles[i], NULL);
        signal(numbers[i], SIG_IGN);
    }
}

static void close_loop(struct daemon *d)
{
    uv_timer_t *const timers[] = { &d->watchdog, &d->drain_timer, &d->step_timer };

    if (d->rpc)
        ep_rpc_close(d->rpc);
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++)
        close_handle((uv_handle_t *)timers[i], NULL);
    close_signals(d);
    uv_run(&d->loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&d->loop) != 0)
        EP_ERROR(MODULE, "something is still open in the event loop");
}

/* ---- all of it ------------------------------------------------------------------------------------ */

/* Windows, sockets and connections are descriptors: take as many as we may. */
static void raise_file_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        EP_WARN(MODULE, "cannot raise the limit of open files", EP_S("error", strerror(errno)));
}

/* libuv and gRPC end the process for want of one. */
static ep_status try_descriptors(struct ep_error *error)
{
    const int n = ep_descriptors_try(DESCRIPTORS_LEAST);

    if (n == DESCRIPTORS_LEAST)
        return EP_OK;
    return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "%d of the %d descriptors that a server needs at least are to be had "
                          "(ulimit -n)", n, DESCRIPTORS_LEAST);
}

static void open_all(struct daemon *d)
{
    struct ep_error error = EP_ERROR_INIT;

    for (size_t i = 0; i < sizeof open_steps / sizeof *open_steps && d->phase == STARTING; i++)
        if (open_steps[i](d, &error) != EP_OK)
            fail(d, &error);
}

ep_status ep_daemon_run(struct ep_options *options, int argc, char **argv, struct ep_error *error)
{
    struct daemon d = { .options = options, .argc = argc, .argv = argv, .failure = EP_ERROR_INIT };

    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* windows are files to `ulimit -f` too: a call fails, and says of which group */
    raise_file_limit();
    ep_descriptors_reserve(DESCRIPTORS);
    if (try_descriptors(error) != EP_OK || open_loop(&d, error) != EP_OK)
        return error->status;
    open_all(&d);
    uv_run(&d.loop, UV_RUN_DEFAULT);
    close_loop(&d);
    close_files(&d);
    if (d.failure.status == EP_OK)
        EP_INFO(MODULE, "stopped");
    *error = d.failure;
    return d.failure.status;
}
