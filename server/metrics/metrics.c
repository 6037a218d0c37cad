/*
 * libmicrohttpd without threads: its epoll descriptor is one handle of the loop, its timeouts are one
 * timer, and every callback runs on the loop's thread.
 */
#include "metrics_private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <microhttpd.h>

#include "ep_log.h"

#define MODULE "metrics"
#define CONNECTIONS_MAX 128u      /* scrapers and probes are few; more wait in the backlog */
#define CONNECTION_TIMEOUT_S 5u   /* without a byte either way */
#define REQUEST_MEMORY (16u * 1024) /* request line and headers */
#define FALLBACK_MS 500u          /* libmicrohttpd may know no timeout while one is pending */

struct ep_metrics {
    struct ep_metrics_source source;
    struct MHD_Daemon *daemon;
    uv_poll_t poll;
    uv_timer_t timer;
    int open_handles; /* freed when the last is closed */
};

/* ---- answers ---------------------------------------------------------------------- */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned status, const char *type,
                              char *body, size_t size, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(size, body, mode);
    enum MHD_Result result;

    if (!response) {
        if (mode == MHD_RESPMEM_MUST_FREE)
            free(body);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

/* "text\n": at most one line. */
static enum MHD_Result answer_text(struct MHD_Connection *connection, unsigned status, const char *text)
{
    char line[512];
    int n = snprintf(line, sizeof line, "%.500s\n", text);

    return answer(connection, status, "text/plain; charset=utf-8", line, (size_t)n, MHD_RESPMEM_MUST_COPY);
}

static enum MHD_Result answer_metrics(struct ep_metrics *metrics, struct MHD_Connection *connection)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    if (!out)
        return answer_text(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory");
    metrics->source.render(out, metrics->source.user);
    if (fclose(out) != 0) {
        free(text);
        return answer_text(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory");
    }
    return answer(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text, size,
                  MHD_RESPMEM_MUST_FREE);
}

/* The loop runs, or nobody would answer. */
static enum MHD_Result answer_healthz(struct ep_metrics *metrics, struct MHD_Connection *connection)
{
    (void)metrics;
    return answer_text(connection, MHD_HTTP_OK, "ok");
}

static enum MHD_Result answer_readyz(struct ep_metrics *metrics, struct MHD_Connection *connection)
{
    const char *why = "not ready";

    if (metrics->source.ready(&why, metrics->source.user))
        return answer_text(connection, MHD_HTTP_OK, "ok");
    return answer_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, why);
}

static const struct {
    const char *path;
    enum MHD_Result (*answer)(struct ep_metrics *metrics, struct MHD_Connection *connection);
} pages[] = {
    { "/metrics", answer_metrics },
    { "/healthz", answer_healthz },
    { "/readyz", answer_readyz },
};

/* Called once with the headers, then with each part of the body, at last with none. */
static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **state)
{
    bool first = !*state;

    (void)version, (void)upload;
    *state = user;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return first ? answer_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD") : MHD_NO;
    if (first)
        return MHD_YES; /* an answer now would close the connection */
    if (*upload_size) {
        *upload_size = 0; /* a body is not read */
        return MHD_YES;
    }
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
        if (strcmp(url, pages[i].path) == 0)
            return pages[i].answer(user, connection);
    return answer_text(connection, MHD_HTTP_NOT_FOUND, "there are /metrics, /healthz and /readyz");
}

/* What it has to say is about clients that misbehave. */
__attribute__((format(printf, 2, 0)))
static void on_log(void *user, const char *format, va_list args)
{
    char text[256];

    (void)user;
    vsnprintf(text, sizeof text, format, args);
    text[strcspn(text, "\r\n")] = '\0';
    EP_DEBUG(MODULE, "http", EP_S("text", text));
}

/* ---- the loop ----------------------------------------------------------------------- */

static void step(struct ep_metrics *metrics);

static void on_timer(uv_timer_t *timer)
{
    step(timer->data);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    (void)status, (void)events;
    step(poll->data);
}

static unsigned connections(const struct ep_metrics *metrics)
{
    const union MHD_DaemonInfo *info =
        MHD_get_daemon_info(metrics->daemon, MHD_DAEMON_INFO_CURRENT_CONNECTIONS);

    return info ? info->num_connections : 0;
}

/*
 * At its limit libmicrohttpd stops listening, and starts again only in the run after the one in which a
 * connection went: that run must not wait for an event, for there may never be one.
 */
static void step(struct ep_metrics *metrics)
{
    MHD_UNSIGNED_LONG_LONG ms;
    unsigned before;

    do {
        before = connections(metrics);
        MHD_run(metrics->daemon);
    } while (connections(metrics) < before);
    uv_timer_stop(&metrics->timer);
    if (MHD_get_timeout(metrics->daemon, &ms) == MHD_YES)
        uv_timer_start(&metrics->timer, on_timer, ms < FALLBACK_MS ? ms : FALLBACK_MS, 0);
}

static void on_closed(uv_handle_t *handle)
{
    struct ep_metrics *metrics = handle->data;

    if (--metrics->open_handles == 0)
        free(metrics);
}

static ep_status watch(struct ep_metrics *metrics, uv_loop_t *loop, struct ep_error *error)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(metrics->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    int failed = info ? uv_poll_init(loop, &metrics->poll, info->epoll_fd) : UV_ENOTSUP;

    if (failed)
        return ep_error_set(error, EP_INTERNAL, "cannot watch the metrics port: %s", uv_strerror(failed));
    metrics->poll.data = metrics->timer.data = metrics;
    metrics->open_handles = 2;
    uv_timer_init(loop, &metrics->timer);
    uv_poll_start(&metrics->poll, UV_READABLE, on_readable);
    step(metrics);
    return EP_OK;
}

static struct MHD_Daemon *start(struct ep_metrics *metrics, int s)
{
    /* clang-format off */
    return MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_request, metrics,
                            MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL,
                            MHD_OPTION_LISTEN_SOCKET, (MHD_socket)s,
                            MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX,
                            MHD_OPTION_CONNECTION_TIMEOUT, CONNECTION_TIMEOUT_S,
                            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)REQUEST_MEMORY,
                            MHD_OPTION_END);
    /* clang-format on */
}

ep_status ep_metrics_open(uv_loop_t *loop, const char *address, const struct ep_metrics_source *source,
                          struct ep_metrics **out, int *port, struct ep_error *error)
{
    struct ep_metrics *metrics = calloc(1, sizeof *metrics);
    int s = -1, bound = 0;
    ep_status status;

    if (!metrics)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    metrics->source = *source;
    status = ep_metrics_listen(address, &s, &bound, error);
    if (status != EP_OK)
        goto free_metrics;
    metrics->daemon = start(metrics, s); /* owns the socket from here on */
    if (!metrics->daemon) {
        status = ep_error_set(error, EP_INTERNAL, "cannot serve HTTP on %s", address);
        close(s);
        goto free_metrics;
    }
    status = watch(metrics, loop, error);
    if (status != EP_OK)
        goto stop_daemon;
    *out = metrics;
    *port = bound;
    return EP_OK;

stop_daemon:
    MHD_stop_daemon(metrics->daemon);
free_metrics:
    free(metrics);
    return status;
}

void ep_metrics_close(struct ep_metrics *metrics)
{
    if (!metrics)
        return;
    uv_poll_stop(&metrics->poll); /* before its descriptor is closed */
    uv_close((uv_handle_t *)&metrics->poll, on_closed);
    uv_close((uv_handle_t *)&metrics->timer, on_closed);
    MHD_stop_daemon(metrics->daemon);
}
