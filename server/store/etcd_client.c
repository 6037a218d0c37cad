/* Endpoints, users, and calls that go from one endpoint to the next. */
#include "etcd_client.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_log.h"

#define FIRST_PAUSE_MS 50 /* after all endpoints failed; doubled each time */
#define LAST_PAUSE_MS  1000
#define AWAY_MS        2500 /* nobody answered the last time: long enough for a connection to be tried anew */
#define LOGINS         3    /* in one call */
#define SECRET_MAX     4096

/* A page of the largest records that etcd takes (1.5 MiB) must fit. */
#define MESSAGE_BYTES (256u << 20)

/* ---- opening ------------------------------------------------------------------------- */

static bool is_set(const char *text)
{
    return text && *text;
}

static char *name_of(const struct ep_store_url *url)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    if (!out)
        abort();
    fputs(EP_STORE_SCHEME, out);
    for (size_t i = 0; i < url->n; i++)
        fprintf(out, "%s%s", i ? "," : "", url->endpoints[i]);
    fclose(out);
    return text;
}

static ep_status open_channels(struct etcd *etcd, const struct ep_store_etcd *options, struct ep_error *error)
{
    const struct ep_rpc_tls tls = {
        .ca = is_set(options->ca) ? options->ca : NULL,
        .cert = is_set(options->cert) ? options->cert : NULL,
        .key = is_set(options->key) ? options->key : NULL,
    };
    bool secure = tls.ca || tls.cert || tls.key;

    for (size_t i = 0; i < etcd->url.n; i++)
        if (ep_rpc_channel_open(etcd->rpc, etcd->url.endpoints[i], secure ? &tls : NULL, MESSAGE_BYTES,
                                &etcd->channels[i], error))
            return ep_error_prefix(error, "store %s", etcd->name);
    return EP_OK;
}

ep_status etcd_open(const struct ep_store_etcd *options, struct etcd **out, struct ep_error *error)
{
    struct ep_error local = EP_ERROR_INIT;
    struct ep_store_url url;
    struct etcd *etcd;

    if (ep_store_url_parse(options->url, &url, error))
        return EP_INVALID_ARGUMENT;
    etcd = store_allocate(1, sizeof *etcd);
    etcd->url = url;
    etcd->name = name_of(&url);
    pthread_mutex_init(&etcd->lock, NULL);
    if (is_set(options->user)) {
        etcd->user = store_copy_text(options->user);
        etcd->password_file = store_copy_text(options->password_file ? options->password_file : "");
    }
    if (ep_rpc_open(NULL, &etcd->rpc, &local) || open_channels(etcd, options, &local)) {
        etcd_close(etcd);
        return ep_error_set(error, local.status, "%s", local.text);
    }
    *out = etcd;
    return EP_OK;
}

static void forget_token(struct etcd *etcd)
{
    if (etcd->token)
        explicit_bzero(etcd->token, strlen(etcd->token));
    free(etcd->token);
    etcd->token = NULL;
}

void etcd_close(struct etcd *etcd)
{
    for (size_t i = 0; i < etcd->url.n; i++)
        ep_rpc_channel_close(etcd->channels[i]);
    ep_rpc_close(etcd->rpc);
    pthread_mutex_destroy(&etcd->lock);
    forget_token(etcd);
    free(etcd->marker.key);
    free(etcd->user);
    free(etcd->password_file);
    free(etcd->name);
    ep_store_url_fini(&etcd->url);
    free(etcd);
}

/* ---- users --------------------------------------------------------------------------- */

/* Opening a pipe that nobody writes to, and reading it, would take for ever. */
static FILE *open_without_waiting(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;

    if (fd >= 0 && !file)
        close(fd);
    return file;
}

/* The first line. */
static ep_status read_password(const struct etcd *etcd, char *password, size_t size, struct ep_error *error)
{
    FILE *file = open_without_waiting(etcd->password_file);
    bool got;

    if (!file)
        return ep_error_errno(error, EP_UNAUTHENTICATED, "user %s: cannot read the password in %s",
                              etcd->user, etcd->password_file);
    got = fgets(password, (int)size, file) != NULL;
    fclose(file);
    if (!got)
        return ep_error_set(error, EP_UNAUTHENTICATED, "user %s: %s holds no password", etcd->user,
                            etcd->password_file);
    password[strcspn(password, "\r\n")] = '\0';
    return EP_OK;
}

/* Failures that another endpoint would not mend. */
static bool login_is_refused(const struct ep_error *error)
{
    return error->status == EP_INVALID_ARGUMENT || error->status == EP_FAILED_PRECONDITION ||
           error->status == EP_PERMISSION_DENIED || error->status == EP_NOT_FOUND;
}

static ep_status authenticate(struct etcd *etcd, struct ep_rpc_channel *channel, const char *password,
                              int64_t timeout_ms, struct ep_error *error)
{
    Etcdserverpb__AuthenticateRequest request = ETCDSERVERPB__AUTHENTICATE_REQUEST__INIT;
    ProtobufCMessage *reply;

    request.name = etcd->user;
    request.password = (char *)(uintptr_t)password;
    if (ep_rpc_unary(channel, &etcdserverpb__auth__descriptor, "Authenticate", NULL, 0, &request.base,
                     timeout_ms, &reply, error)) {
        if (!login_is_refused(error))
            return error->status;
        ep_error_prefix(error, "etcd refuses user %s", etcd->user);
        return error->status = EP_UNAUTHENTICATED;
    }
    pthread_mutex_lock(&etcd->lock);
    forget_token(etcd);
    etcd->token = store_copy_text(((Etcdserverpb__AuthenticateResponse *)reply)->token);
    pthread_mutex_unlock(&etcd->lock);
    etcd_free(reply);
    return EP_OK;
}

/* A copy of the token, after a login where there is none; *token NULL: there are no users. */
static ep_status get_token(struct etcd *etcd, struct ep_rpc_channel *channel, int64_t timeout_ms,
                           char **token, struct ep_error *error)
{
    char password[SECRET_MAX];
    ep_status status = EP_OK;

    *token = NULL;
    if (!etcd->user)
        return EP_OK;
    for (int i = 0; i < 2 && !*token && !status; i++) {
        pthread_mutex_lock(&etcd->lock);
        *token = etcd->token ? store_copy_text(etcd->token) : NULL;
        pthread_mutex_unlock(&etcd->lock);
        if (!*token && !(status = read_password(etcd, password, sizeof password, error)))
            status = authenticate(etcd, channel, password, timeout_ms, error);
    }
    explicit_bzero(password, sizeof password);
    if (!status && !*token)
        return ep_error_set(error, EP_UNAVAILABLE, "user %s was logged out at once", etcd->user);
    return status;
}

/* Only the one that was refused: another thread may have got a new one. */
static void drop_token(struct etcd *etcd, const char *refused)
{
    pthread_mutex_lock(&etcd->lock);
    if (etcd->token && refused && strcmp(etcd->token, refused) == 0)
        forget_token(etcd);
    pthread_mutex_unlock(&etcd->lock);
}

/* etcd forgets tokens at a restart and after some minutes, and all of them when its users change. */
static bool token_is_refused(const struct ep_error *error)
{
    return error->status == EP_UNAUTHENTICATED || strstr(error->text, "invalid auth token") ||
           strstr(error->text, "revision of auth store is old");
}

/* ---- one try ------------------------------------------------------------------------- */

static size_t metadata_of(const char *token, bool needs_leader, struct ep_rpc_metadata metadata[2])
{
    size_t n = 0;

    if (token)
        metadata[n++] = (struct ep_rpc_metadata){ "token", token };
    if (needs_leader)
        metadata[n++] = (struct ep_rpc_metadata){ "hasleader", "true" };
    return n;
}

enum verdict { ANSWERED, LOG_IN, ELSEWHERE };

/* Is this etcd's answer, or is another endpoint worth asking? */
static enum verdict judge(const struct etcd *etcd, const struct ep_error *error)
{
    switch (error->status) {
    case EP_OK:
    case EP_NOT_FOUND:
    case EP_ALREADY_EXISTS:
    case EP_FAILED_PRECONDITION:
    case EP_PERMISSION_DENIED: return ANSWERED;
    case EP_UNAUTHENTICATED: return etcd->user ? LOG_IN : ANSWERED;
    case EP_RESOURCE_EXHAUSTED: return strstr(error->text, "too many requests") ? ELSEWHERE : ANSWERED;
    case EP_INVALID_ARGUMENT: return etcd->user && token_is_refused(error) ? LOG_IN : ANSWERED;
    default: return strstr(error->text, "compacted") ? ANSWERED : ELSEWHERE;
    }
}

/* The login's own failure is final where etcd itself has refused it. */
static enum verdict try_once(struct etcd *etcd, const struct etcd_call *call, size_t endpoint,
                             int64_t timeout_ms, ProtobufCMessage **reply, struct ep_error *error)
{
    struct ep_rpc_channel *channel = etcd->channels[endpoint];
    struct ep_rpc_metadata metadata[2];
    enum verdict verdict;
    char *token;

    if (get_token(etcd, channel, timeout_ms, &token, error))
        return error->status == EP_UNAUTHENTICATED ? ANSWERED : ELSEWHERE;
    (void)ep_rpc_unary(channel, call->service, call->method, metadata, metadata_of(token, false, metadata),
                       call->request, timeout_ms, reply, error);
    verdict = judge(etcd, error);
    if (verdict == LOG_IN)
        drop_token(etcd, token);
    free(token);
    return verdict;
}

/* ---- all endpoints ------------------------------------------------------------------- */

static void leave(struct etcd *etcd, size_t endpoint)
{
    (void)atomic_compare_exchange_strong(&etcd->current, &endpoint, (endpoint + 1) % etcd->url.n);
}

static int64_t left_ms(uint64_t deadline)
{
    uint64_t now = ep_clock_ns();

    return now < deadline ? (int64_t)((deadline - now) / EP_NS_PER_MS) : 0;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* More each time that all have failed. */
static void pause_between(uint64_t *pause_ms, uint64_t deadline)
{
    usleep((useconds_t)least((int64_t)*pause_ms, left_ms(deadline)) * 1000);
    *pause_ms = *pause_ms * 2 > LAST_PAUSE_MS ? LAST_PAUSE_MS : *pause_ms * 2;
}

static bool stopped(const struct etcd_call *call)
{
    return call->stop && atomic_load(call->stop);
}

static enum verdict try_all(struct etcd *etcd, struct etcd_call *call, uint64_t deadline,
                            ProtobufCMessage **reply, struct ep_error *error)
{
    uint64_t pause_ms = FIRST_PAUSE_MS;
    unsigned failed = 0, logins = 0;

    while (left_ms(deadline) > 0 && !stopped(call)) {
        size_t endpoint = atomic_load(&etcd->current);
        enum verdict verdict;

        *error = (struct ep_error)EP_ERROR_INIT;
        call->tries++;
        verdict = try_once(etcd, call, endpoint, least(left_ms(deadline), ETCD_TRY_MS), reply, error);
        if (verdict == ANSWERED || (verdict == LOG_IN && ++logins == LOGINS))
            return ANSWERED;
        if (verdict == LOG_IN)
            continue;
        leave(etcd, endpoint);
        if (++failed % etcd->url.n == 0)
            pause_between(&pause_ms, deadline);
    }
    return ELSEWHERE;
}

/* Callers tell states of the store from those of a record by the status: no user is not a wrong request. */
static void explain(const struct etcd *etcd, const struct etcd_call *call, struct ep_error *error)
{
    if (!etcd->user && strstr(error->text, "user name is empty")) {
        error->status = EP_UNAUTHENTICATED;
        ep_error_prefix(error, "etcd asks for a user and a password");
    }
    ep_error_prefix(error, "store %s: cannot %s", etcd->name, call->what);
}

ep_status etcd_call(struct etcd *etcd, struct etcd_call *call, ProtobufCMessage **reply,
                    struct ep_error *error)
{
    struct ep_error local = { EP_UNAVAILABLE, "it was not reached in time" };
    uint64_t deadline = call->deadline, soon = ep_clock_ns() + AWAY_MS * EP_NS_PER_MS;
    enum verdict verdict;

    if (atomic_load(&etcd->away) && soon < deadline)
        deadline = soon;
    call->tries = 0;
    *reply = NULL;
    verdict = try_all(etcd, call, deadline, reply, &local);
    if (!stopped(call))
        atomic_store(&etcd->away, verdict != ANSWERED);
    if (!local.status)
        return EP_OK;
    if (verdict != ANSWERED)
        local.status = EP_UNAVAILABLE;
    explain(etcd, call, &local);
    if (error)
        *error = local;
    return local.status;
}

/* ---- threads of their own ------------------------------------------------------------ */

void etcd_task_start(struct etcd_task *task, struct etcd *etcd, void (*main)(void *arg), void *arg)
{
    task->etcd = etcd;
    pthread_mutex_init(&task->mutex, NULL);
    ep_clock_condition(&task->stopped);
    task->running = uv_thread_create(&task->thread, main, arg) == 0;
    if (!task->running)
        abort(); /* as with memory: a watch that is not there would be silent for ever */
}

void etcd_task_stop(struct etcd_task *task)
{
    pthread_mutex_lock(&task->mutex);
    atomic_store(&task->stop, true);
    if (task->stream)
        ep_rpc_stream_cancel(task->stream);
    pthread_cond_signal(&task->stopped);
    pthread_mutex_unlock(&task->mutex);
    uv_thread_join(&task->thread);
    pthread_cond_destroy(&task->stopped);
    pthread_mutex_destroy(&task->mutex);
}

void etcd_task_sleep(struct etcd_task *task, uint64_t ms)
{
    const struct timespec until = ep_clock_timespec(ep_clock_ns() + ms * EP_NS_PER_MS);
    int rc = 0;

    pthread_mutex_lock(&task->mutex);
    while (!atomic_load(&task->stop) && rc == 0)
        rc = pthread_cond_timedwait(&task->stopped, &task->mutex, &until);
    pthread_mutex_unlock(&task->mutex);
}

static ep_status start_stream(struct etcd_task *task, const ProtobufCServiceDescriptor *service,
                              const char *method, const char *token, const ProtobufCMessage *request,
                              int64_t timeout_ms, struct ep_error *error)
{
    struct ep_rpc_metadata metadata[2];
    size_t n = metadata_of(token, true, metadata);
    struct ep_rpc_stream *stream;
    ep_status status = ep_rpc_stream_open(task->etcd->channels[task->endpoint], service, method, metadata, n,
                                          request, timeout_ms, &stream, error);

    if (status)
        return status;
    pthread_mutex_lock(&task->mutex);
    task->stream = stream;
    if (atomic_load(&task->stop))
        ep_rpc_stream_cancel(stream);
    pthread_mutex_unlock(&task->mutex);
    return EP_OK;
}

ep_status etcd_task_stream(struct etcd_task *task, const ProtobufCServiceDescriptor *service,
                           const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                           struct ep_error *error)
{
    ep_status status;
    char *token = NULL;

    task->endpoint = atomic_load(&task->etcd->current);
    status = get_token(task->etcd, task->etcd->channels[task->endpoint],
                       timeout_ms < 0 ? ETCD_TRY_MS : least(timeout_ms, ETCD_TRY_MS), &token, error);
    if (!status)
        status = start_stream(task, service, method, token, request, timeout_ms, error);
    free(token);
    return status;
}

void etcd_task_end_stream(struct etcd_task *task, const struct ep_error *failed)
{
    struct ep_rpc_stream *stream = task->stream;

    pthread_mutex_lock(&task->mutex);
    task->stream = NULL;
    pthread_mutex_unlock(&task->mutex);
    ep_rpc_stream_close(stream);
    if (!failed)
        return;
    /* etcd 3.4 also says of a watch with a token of old that it is not permitted. */
    if (token_is_refused(failed) || failed->status == EP_PERMISSION_DENIED) {
        pthread_mutex_lock(&task->etcd->lock);
        forget_token(task->etcd);
        pthread_mutex_unlock(&task->etcd->lock);
    } else {
        leave(task->etcd, task->endpoint);
    }
}
