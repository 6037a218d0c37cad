/* Where the server is, how to reach it, and how to say that it cannot be reached. */
#include "admin.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ep_address.h"
#include "output.h"
#include "progress.h"

enum { DEFAULT_TIMEOUT_MS = 5000, MAX_MESSAGE_BYTES = 64 << 20, TURNED_AWAY_MS = 200 };

/* ---- options --------------------------------------------------------------------- */

static const char *environment(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static ep_status check_unix(struct ep_admin *admin, const char *path, struct ep_error *error)
{
    struct sockaddr_un address;
    const char *from = path;

    while (from[0] == '/' && from[1] == '/') /* unix:///run/x */
        from++;
    if (!*from)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server is 'unix:': a path is missing");
    if (strlen(from) >= sizeof address.sun_path)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "--server: the path has %zu bytes, a socket's has at most %zu", strlen(from),
                            sizeof address.sun_path - 1);
    snprintf(admin->server, sizeof admin->server, "unix:%s", from);
    admin->server_is_unix = true;
    return EP_OK;
}

static ep_status check_tcp(struct ep_admin *admin, const char *text, struct ep_error *error)
{
    const char *colon = strrchr(text, ':');
    uint64_t port;

    if (!colon || colon == text || strchr(text, '/') || !ep_text_parse_u64(colon + 1, 65535, &port) || port == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server is '%s': must be unix:PATH or HOST:PORT",
                            text);
    if (strlen(text) >= sizeof admin->server)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server is too long");
    snprintf(admin->server, sizeof admin->server, "%s", text);
    return EP_OK;
}

static ep_status set_server(struct ep_admin *admin, const struct ep_invocation *invocation,
                            struct ep_error *error)
{
    const char *text = ep_invocation_text(invocation, "server");
    char by_default[EP_ADDRESS_MAX];

    if (!text)
        text = ep_address_default(by_default, sizeof by_default);
    if (strncmp(text, "unix:", 5) == 0)
        return check_unix(admin, text + 5, error);
    if (text[0] == '/')
        return check_unix(admin, text, error);
    return check_tcp(admin, text, error);
}

static const char *tls_text(const struct ep_invocation *invocation, const char *flag, const char *variable)
{
    const char *text = ep_invocation_text(invocation, flag);

    return text ? text : environment(variable);
}

/* Said before the server is called, of the flag or the variable that named it. */
static ep_status check_tls_file(const struct ep_invocation *invocation, const char *flag, const char *variable,
                                const char *path, struct ep_error *error)
{
    const bool given = ep_invocation_given(invocation, flag);

    if (!path || access(path, R_OK) == 0)
        return EP_OK;
    return ep_error_errno(error, EP_INVALID_ARGUMENT, "%s%s: cannot read %s", given ? "--" : "", given ? flag : variable,
                          path);
}

static ep_status check_tls_files(const struct ep_rpc_tls *tls, const struct ep_invocation *invocation, struct ep_error *error)
{
    ep_status status = check_tls_file(invocation, "tls-ca", "EP_TLS_CA", tls->ca, error);

    if (status == EP_OK)
        status = check_tls_file(invocation, "tls-cert", "EP_TLS_CERT", tls->cert, error);
    return status == EP_OK ? check_tls_file(invocation, "tls-key", "EP_TLS_KEY", tls->key, error) : status;
}

static ep_status set_tls(struct ep_admin *admin, const struct ep_invocation *invocation,
                         struct ep_error *error)
{
    struct ep_rpc_tls *tls = &admin->tls;

    tls->ca = tls_text(invocation, "tls-ca", "EP_TLS_CA");
    tls->cert = tls_text(invocation, "tls-cert", "EP_TLS_CERT");
    tls->key = tls_text(invocation, "tls-key", "EP_TLS_KEY");
    tls->name = tls_text(invocation, "tls-name", "EP_TLS_NAME");
    if (admin->server_is_unix)
        return EP_OK; /* TLS is for TCP; the variables may be set for other calls */
    if (!tls->cert != !tls->key)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "--tls-%s is not given: a certificate and its key go together",
                            tls->cert ? "key" : "cert");
    if (!tls->ca && (tls->cert || tls->name))
        return ep_error_set(
            error, EP_INVALID_ARGUMENT,
            "--tls-ca is not given: the roots that the server's certificate is checked against");
    admin->use_tls = tls->ca != NULL;
    return check_tls_files(tls, invocation, error);
}

ep_status ep_admin_init(struct ep_admin *admin, const struct ep_invocation *invocation,
                        struct ep_error *error)
{
    const char *format = ep_invocation_text(invocation, "output");

    snprintf(admin->what, sizeof admin->what, "%s", ep_command_name(invocation->command).s);
    admin->format = !format || format[0] == 't' ? EP_FORMAT_TABLE
                    : format[0] == 'j'          ? EP_FORMAT_JSON
                                                : EP_FORMAT_YAML;
    admin->timeout_given = ep_invocation_given(invocation, "timeout");
    admin->timeout_ms = ep_invocation_ms(invocation, "timeout", DEFAULT_TIMEOUT_MS);
    if (admin->timeout_ms == 0)
        admin->timeout_ms = -1; /* no bound */
    admin->quiet = ep_invocation_given(invocation, "quiet");
    ep_status status = set_server(admin, invocation, error);
    return status == EP_OK ? set_tls(admin, invocation, error) : status;
}

/* ---- calls ----------------------------------------------------------------------- */

/* timeout_ms: of the first call. */
static ep_status connect_once(struct ep_admin *admin, int64_t timeout_ms, struct ep_error *error)
{
    ep_status status = EP_OK;

    if (admin->channel)
        return EP_OK;
    if (!admin->rpc)
        status = ep_rpc_open(NULL, &admin->rpc, error);
    if (status == EP_OK)
        ep_rpc_connect_within(admin->rpc, timeout_ms);
    if (status == EP_OK)
        status = ep_rpc_channel_open(admin->rpc, admin->server, admin->use_tls ? &admin->tls : NULL,
                                     MAX_MESSAGE_BYTES, &admin->channel, error);
    return status;
}

void ep_admin_close(struct ep_admin *admin)
{
    if (admin->channel)
        ep_rpc_channel_close(admin->channel);
    if (admin->rpc)
        ep_rpc_close(admin->rpc);
    admin->channel = NULL;
    admin->rpc = NULL;
}

/* True when the server closes a connection before it says anything: HTTP/2 servers speak first. */
static bool turned_away(int fd)
{
    struct pollfd in = { .fd = fd, .events = POLLIN };
    char byte;

    return poll(&in, 1, TURNED_AWAY_MS) > 0 && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0;
}

/* Tries to connect; 0, the errno, or -1 when the connection was closed at once. */
static int try_unix(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int cause = 0;

    if (fd < 0)
        return 0;
    memcpy(address.sun_path, path, strnlen(path, sizeof address.sun_path - 1));
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        cause = errno;
    else if (turned_away(fd))
        cause = -1;
    close(fd);
    return cause;
}

static bool is_socket(const char *path)
{
    struct stat there;

    return stat(path, &there) != 0 || S_ISSOCK(there.st_mode);
}

/*
 * Why a unix socket cannot be used, from the system itself; EP_OK when that knows no reason.  A server
 * that has answered before lets us in: when it closes connections now, it is ending.
 */
static ep_status probe_unix(const char *path, bool answered, struct ep_error *error)
{
    switch (try_unix(path)) {
    case ENOENT:
    case ENOTDIR:
        return ep_error_set(error, EP_UNAVAILABLE,
                            "cannot reach unix:%s: no such file: is ep-server running, "
                            "with this --socket?",
                            path);
    case ECONNREFUSED:
        if (!is_socket(path))
            return ep_error_set(error, EP_UNAVAILABLE, "cannot reach unix:%s: it is not a socket", path);
        return ep_error_set(error, EP_UNAVAILABLE,
                            "cannot reach unix:%s: connection refused: the socket is there, "
                            "but no ep-server listens on it",
                            path);
    case EACCES:
    case EPERM:
        return ep_error_set(error, EP_PERMISSION_DENIED,
                            "cannot reach unix:%s: permission denied: uid %u may not "
                            "use the socket (see its owner, group and mode)",
                            path, (unsigned)geteuid());
    case -1:
        if (answered)
            return EP_OK;
        return ep_error_set(
            error, EP_PERMISSION_DENIED,
            "%s closes the connection at once: its ep-server does not "
            "let uid %u in (allow-uid, allow-gid, admin-uid, admin-gid), or has too many connections",
            path, (unsigned)geteuid());
    default: return EP_OK;
    }
}

/* A better cause than the transport's, where the system knows one. */
static ep_status explain(struct ep_admin *admin, ep_status status, struct ep_error *error)
{
    ep_status better = EP_OK;

    admin->answered |= status == EP_OK;
    if (status == EP_UNAVAILABLE && admin->server_is_unix)
        better = probe_unix(admin->server + strlen("unix:"), admin->answered, error);
    return better == EP_OK ? status : better;
}

ep_status ep_admin_call_service(struct ep_admin *admin, const ProtobufCServiceDescriptor *service,
                                const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                                ProtobufCMessage **reply, struct ep_error *error)
{
    const int64_t bound_ms = timeout_ms != 0 ? timeout_ms : admin->timeout_ms;
    ep_status status = connect_once(admin, bound_ms, error);

    *reply = NULL;
    if (status == EP_OK)
        status = ep_rpc_unary(admin->channel, service, method, NULL, 0, request, bound_ms, reply, error);
    return explain(admin, status, error);
}

ep_status ep_admin_call(struct ep_admin *admin, const char *method, const ProtobufCMessage *request,
                        int64_t timeout_ms, ProtobufCMessage **reply, struct ep_error *error)
{
    struct ep_progress progress;
    char what[sizeof progress.text];

    snprintf(what, sizeof what, "%s: waiting for %s", admin->what, admin->server);
    ep_progress_begin(&progress, admin->quiet, what);
    ep_status status =
        ep_admin_call_service(admin, &ep__v1__admin__descriptor, method, request, timeout_ms, reply, error);
    ep_progress_end(&progress);
    return status;
}

ep_status ep_admin_stream(struct ep_admin *admin, const char *method, const ProtobufCMessage *request,
                          int64_t timeout_ms, struct ep_rpc_stream **stream, struct ep_error *error)
{
    ep_status status = connect_once(admin, timeout_ms, error);

    if (status == EP_OK)
        status = ep_rpc_stream_open(admin->channel, &ep__v1__admin__descriptor, method, NULL, 0, request,
                                    timeout_ms, stream, error);
    return status == EP_OK ? EP_OK : explain(admin, status, error); /* opening is no answer yet */
}

ep_status ep_admin_stream_read(struct ep_admin *admin, struct ep_rpc_stream *stream, int64_t wait_ms,
                               ProtobufCMessage **reply, struct ep_error *error)
{
    *reply = NULL;
    return explain(admin, ep_rpc_stream_read(stream, wait_ms, reply, error), error);
}

void ep_admin_free(void *message)
{
    if (message)
        protobuf_c_message_free_unpacked(message, NULL);
}

/* ---- what goes to stderr --------------------------------------------------------- */

int ep_admin_fail(const struct ep_admin *admin, const struct ep_error *error)
{
    const char *text = error->text[0] ? error->text : ep_status_text(error->status);
    char clean[EP_ERROR_TEXT_MAX];

    ep_text_clean(text, clean, sizeof clean);
    fflush(stdout);
    fprintf(stderr, "ep-admin: %s%s%s\n", admin->what, admin->what[0] ? ": " : "", clean);
    return ep_status_exit_code(error->status);
}

void ep_admin_note(const struct ep_admin *admin, const char *format, ...)
{
    char text[512], clean[512];
    va_list args;

    if (admin->quiet)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ep_text_clean(text, clean, sizeof clean);
    fprintf(stderr, "ep-admin: %s: %s\n", admin->what, clean);
}

void ep_admin_note_behind(const struct ep_admin *admin, const char *behind)
{
    if (*behind)
        ep_admin_note(admin, "this may be older than what was acknowledged: %s", behind);
}
