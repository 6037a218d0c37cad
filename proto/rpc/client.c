/* Channels and unary calls: what all calls share, and those that block, for any thread but the loop's. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc_private.h"

/* ---- channels ------------------------------------------------------------------------ */

static grpc_channel *new_grpc_channel(const struct ep_rpc_channel *ch, const struct rpc_pem *pem)
{
    grpc_arg args[] = {
        rpc_arg_int(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)ch->max_message_bytes),
        rpc_arg_int(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, ch->connect_ms),
        rpc_arg_int(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200),
        rpc_arg_int(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000),
        rpc_arg_int(GRPC_ARG_KEEPALIVE_TIME_MS, RPC_CLIENT_KEEPALIVE_MS),
        rpc_arg_int(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, RPC_KEEPALIVE_TIMEOUT_MS),
        rpc_arg_int(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        rpc_arg_int(GRPC_ARG_HTTP2_BDP_PROBE, 0),
        /* The environment's proxy is for browsers. */
        rpc_arg_int(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        /* A change that was sent twice is worse than one that failed. */
        rpc_arg_int(GRPC_ARG_ENABLE_RETRIES, 0),
        rpc_arg_int(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
        /* A channel is a connection: neither its state nor its backoff is shared with others. */
        rpc_arg_int(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        rpc_arg_string(GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, ch->tls.name),
    };
    grpc_channel_args all = { .num_args = sizeof args / sizeof *args - (ch->tls.name ? 0 : 1),
                              .args = args };
    grpc_channel_credentials *credentials =
        ch->secure ? rpc_client_credentials(pem) : grpc_insecure_credentials_create();
    grpc_channel *channel;

    if (!credentials)
        return NULL;
    channel = grpc_channel_create(ch->uri, credentials, &all);
    grpc_channel_credentials_release(credentials);
    return channel;
}

static char *copy_or_null(const char *text, bool *failed)
{
    char *copy = text ? strdup(text) : NULL;

    *failed |= text && !copy;
    return copy;
}

void rpc_channel_free(struct ep_rpc_channel *ch)
{
    if (ch->channel)
        grpc_channel_destroy(ch->channel);
    rpc_pem_fini(&ch->pem);
    free((char *)(uintptr_t)ch->tls.ca);
    free((char *)(uintptr_t)ch->tls.cert);
    free((char *)(uintptr_t)ch->tls.key);
    free((char *)(uintptr_t)ch->tls.name);
    free(ch->target);
    free(ch->uri);
    pthread_mutex_destroy(&ch->lock);
    free(ch);
}

/* dns: also takes numbers; without a scheme gRPC would guess one from what stands before ':'. */
static char *uri_of(const char *target)
{
    char *uri;

    if (strncmp(target, "unix:", 5) == 0)
        return strdup(target);
    return asprintf(&uri, "dns:///%s", target) < 0 ? NULL : uri;
}

static struct ep_rpc_channel *new_channel(struct ep_rpc *rpc, const char *target,
                                          const struct ep_rpc_tls *tls, uint32_t max_message_bytes)
{
    struct ep_rpc_channel *ch = calloc(1, sizeof *ch);
    bool failed = false;

    if (!ch || pthread_mutex_init(&ch->lock, NULL) != 0) {
        free(ch);
        return NULL;
    }
    ch->rpc = rpc;
    ch->connect_ms = rpc->connect_ms;
    ch->max_message_bytes = max_message_bytes ? max_message_bytes : RPC_DEFAULT_MESSAGE_BYTES;
    if (ch->max_message_bytes > INT32_MAX)
        ch->max_message_bytes = INT32_MAX;
    ch->target = copy_or_null(target, &failed);
    ch->uri = uri_of(target);
    ch->secure = tls != NULL;
    if (tls) {
        ch->tls.ca = copy_or_null(tls->ca, &failed);
        ch->tls.cert = copy_or_null(tls->cert, &failed);
        ch->tls.key = copy_or_null(tls->key, &failed);
        ch->tls.name = copy_or_null(tls->name, &failed);
    }
    if (failed || !ch->uri) {
        rpc_channel_free(ch);
        return NULL;
    }
    return ch;
}

static ep_status check_target(const char *target, bool secure, struct ep_error *error)
{
    const char *colon = strrchr(target, ':');

    if (strncmp(target, "unix:", 5) == 0) {
        if (!target[5])
            return ep_error_set(error, EP_INVALID_ARGUMENT, "target \"%s\": no path", target);
        if (secure)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "target \"%s\": a unix socket carries no TLS", target);
        return EP_OK;
    }
    if (!colon || colon == target || !colon[1])
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "target \"%s\": must be unix:PATH or HOST:PORT", target);
    return EP_OK;
}

ep_status ep_rpc_channel_open(struct ep_rpc *rpc, const char *target, const struct ep_rpc_tls *tls,
                              uint32_t max_message_bytes, struct ep_rpc_channel **out,
                              struct ep_error *error)
{
    struct ep_rpc_channel *ch;
    ep_status status = check_target(target, tls != NULL, error);

    if (status != EP_OK)
        return status;
    ch = new_channel(rpc, target, tls, max_message_bytes);
    if (!ch)
        return ep_error_set(error, EP_NO_MEMORY, "cannot open %s: out of memory", target);
    if (ch->secure && (status = rpc_pem_read(&ch->tls, &ch->pem, error)) != EP_OK)
        goto free_channel;
    ch->channel = new_grpc_channel(ch, &ch->pem);
    if (!ch->channel) {
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "cannot open %s: TLS files refused", target);
        goto free_channel;
    }
    *out = ch;
    return EP_OK;

free_channel:
    rpc_channel_free(ch);
    return status;
}

/*
 * Rotation: a connection that must be made anew is made with what the files hold now.  gRPC's
 * credentials are fixed, so the channel is replaced; calls on the old one keep it.
 */
static void refresh(struct ep_rpc_channel *ch)
{
    struct ep_error error = EP_ERROR_INIT;
    struct rpc_pem pem;
    grpc_channel *channel;

    if (grpc_channel_check_connectivity_state(ch->channel, 0) == GRPC_CHANNEL_READY)
        return;
    if (rpc_pem_read(&ch->tls, &pem, &error) != EP_OK) {
        EP_WARN("rpc", "certificates not reloaded", EP_S("error", error.text));
        return;
    }
    if (rpc_pem_equal(&pem, &ch->pem) || !(channel = new_grpc_channel(ch, &pem))) {
        rpc_pem_fini(&pem);
        return;
    }
    grpc_channel_destroy(ch->channel);
    ch->channel = channel;
    rpc_pem_fini(&ch->pem);
    ch->pem = pem;
}

/* ---- calls --------------------------------------------------------------------------- */

static gpr_timespec deadline_after(int64_t ms)
{
    if (ms < 0)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
}

static ep_status copy_metadata(struct rpc_client_call *c, const struct ep_rpc_metadata *metadata,
                               size_t n, struct ep_error *error)
{
    if (n == 0)
        return EP_OK;
    c->metadata = calloc(n, sizeof *c->metadata);
    if (!c->metadata)
        return ep_error_set(error, EP_NO_MEMORY, "%s: out of memory", c->path);
    for (; c->n_metadata < n; c->n_metadata++) {
        grpc_metadata *m = &c->metadata[c->n_metadata];

        m->key = grpc_slice_from_copied_string(metadata[c->n_metadata].key);
        m->value = grpc_slice_from_copied_string(metadata[c->n_metadata].value);
        if (!grpc_header_key_is_legal(m->key) || !grpc_header_nonbin_value_is_legal(m->value)) {
            ep_error_set(error, EP_INVALID_ARGUMENT,
                         "metadata \"%s\": names are lower-case, values printable ASCII",
                         metadata[c->n_metadata].key);
            c->n_metadata++; /* this one is ours to release as well */
            return EP_INVALID_ARGUMENT;
        }
    }
    return EP_OK;
}

static grpc_call *new_grpc_call(struct rpc_client_call *c, grpc_completion_queue *cq)
{
    struct ep_rpc_channel *ch = c->channel;
    grpc_slice path = grpc_slice_from_copied_string(c->path);
    grpc_call *call;

    pthread_mutex_lock(&ch->lock);
    if (ch->secure)
        refresh(ch);
    call = grpc_channel_create_call(ch->channel, NULL, GRPC_PROPAGATE_DEFAULTS, cq, path, NULL,
                                    deadline_after(c->timeout_ms), NULL);
    pthread_mutex_unlock(&ch->lock);
    grpc_slice_unref(path);
    return call;
}

ep_status rpc_client_call_init(struct rpc_client_call *c, struct ep_rpc_channel *channel,
                               const ProtobufCServiceDescriptor *service, const char *method,
                               const struct ep_rpc_metadata *metadata, size_t n_metadata,
                               int64_t timeout_ms, grpc_completion_queue *shared, struct ep_error *error)
{
    ep_status status;

    *c = (struct rpc_client_call){ .channel = channel, .timeout_ms = timeout_ms,
                                   .code = GRPC_STATUS_UNKNOWN, .details = grpc_empty_slice() };
    grpc_metadata_array_init(&c->initial);
    grpc_metadata_array_init(&c->trailing);
    c->method = protobuf_c_service_descriptor_get_method_by_name(service, method);
    if (!c->method)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "%s has no method %s", service->name, method);
    else if (!shared && rpc_on_dispatcher(channel->rpc))
        status = ep_error_set(error, EP_FAILED_PRECONDITION,
                              "%s: a blocking call on the loop's thread would never end", method);
    else if (asprintf(&c->path, "/%s/%s", service->name, method) < 0)
        status = ep_error_set(error, EP_NO_MEMORY, "%s: out of memory", method);
    else
        status = copy_metadata(c, metadata, n_metadata, error);
    if (status != EP_OK) {
        rpc_client_call_fini(c);
        return status;
    }
    if (!shared)
        c->cq = grpc_completion_queue_create_for_pluck(NULL);
    c->call = new_grpc_call(c, shared ? shared : c->cq);
    return EP_OK;
}

void rpc_client_call_fini(struct rpc_client_call *c)
{
    if (c->call)
        grpc_call_unref(c->call);
    if (c->cq) {
        grpc_completion_queue_shutdown(c->cq);
        while (grpc_completion_queue_pluck(c->cq, c, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type
               != GRPC_QUEUE_SHUTDOWN)
            ;
        grpc_completion_queue_destroy(c->cq);
    }
    for (size_t i = 0; i < c->n_metadata; i++) {
        grpc_slice_unref(c->metadata[i].key);
        grpc_slice_unref(c->metadata[i].value);
    }
    free(c->metadata);
    free(c->path);
    grpc_slice_unref(c->details);
    grpc_metadata_array_destroy(&c->initial);
    grpc_metadata_array_destroy(&c->trailing);
}

ep_status rpc_client_pack(const struct rpc_client_call *c, const ProtobufCMessage *request,
                          grpc_byte_buffer **out, struct ep_error *error)
{
    uint32_t limit = c->channel->max_message_bytes;
    size_t size;

    if (!request || request->descriptor != c->method->input)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: the request must be a %s", c->path,
                            c->method->input->name);
    size = protobuf_c_message_get_packed_size(request);
    if (size > limit)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "%s: the request is %zu bytes: the limit is %" PRIu32, c->path, size, limit);
    *out = rpc_pack(request);
    if (!*out)
        return ep_error_set(error, EP_NO_MEMORY, "%s: out of memory", c->path);
    return EP_OK;
}

ep_status rpc_client_start(struct rpc_client_call *c, const grpc_op *ops, size_t n, void *tag,
                           struct ep_error *error)
{
    grpc_call_error e = grpc_call_start_batch(c->call, ops, n, tag, NULL);

    if (e != GRPC_CALL_OK)
        return ep_error_set(error, EP_INTERNAL, "%s: %s", c->path, grpc_call_error_to_string(e));
    return EP_OK;
}

bool rpc_client_wait(struct rpc_client_call *c, void *tag, int64_t wait_ms, bool *ok)
{
    grpc_event event = grpc_completion_queue_pluck(c->cq, tag, deadline_after(wait_ms), NULL);

    if (event.type != GRPC_OP_COMPLETE)
        return false;
    *ok = event.success != 0;
    return true;
}

/* ---- errors in words ----------------------------------------------------------------- */

static bool has_any(const char *text, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcasestr(text, words[i]))
            return true;
    return false;
}

static const char not_tls[] = " (is the server plaintext, or does it refuse this certificate?)";
static const char is_tls[] = " (does the server expect TLS? this side spoke plaintext)";

bool ep_rpc_hints_at_tls(const struct ep_error *error)
{
    return strstr(error->text, not_tls) || strstr(error->text, is_tls);
}

/*
 * TLS failures look the same from outside: the other end hangs up.  So the hint is given when a
 * connection was lost on which the server has never said a word.
 */
static const char *tls_hint(const struct ep_rpc_channel *ch, const char *details)
{
    static const char *const lost[] = { "socket closed", "connection reset", "broken pipe",
                                        "handshake", "ssl" };

    if (atomic_load(&ch->spoken) || strncmp(ch->target, "unix:", 5) == 0
        || !has_any(details, lost, sizeof lost / sizeof *lost))
        return "";
    return ch->secure ? not_tls : is_tls;
}

/* "failed to connect to all addresses; last error: UNKNOWN: unix:/x: No such file" -> the end of it */
static const char *cause_of(const struct ep_rpc_channel *ch, const char *details)
{
    static const char last[] = "last error: ";
    const char *cause = strstr(details, last);
    size_t n = strlen(ch->target);

    if (!cause)
        return details;
    cause += sizeof last - 1;
    cause += strspn(cause, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"); /* a gRPC code */
    cause += strspn(cause, ": ");
    if (strncmp(cause, ch->target, n) == 0 && cause[n] == ':')
        cause += n + 1 + strspn(cause + n + 1, " ");
    return cause;
}

static ep_status say_unreachable(const struct ep_rpc_channel *ch, const char *details,
                                 struct ep_error *error)
{
    bool connected = !strstr(details, "failed to connect") && !strstr(details, "resolution");

    return ep_error_set(error, EP_UNAVAILABLE, "%s %s: %.200s%s",
                        connected ? "lost the connection to" : "cannot reach", ch->target,
                        cause_of(ch, details), tls_hint(ch, details));
}

static ep_status say_late(const struct rpc_client_call *c, struct ep_error *error)
{
    if (c->timeout_ms < 0)
        return ep_error_set(error, EP_DEADLINE_EXCEEDED, "no answer from %s in time",
                            c->channel->target);
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "no answer from %s within %" PRId64 " ms",
                        c->channel->target, c->timeout_ms);
}

/* The exact status that an ep server named; EP_OK when the answer is not from one. */
static ep_status named_status(const struct rpc_client_call *c)
{
    char *name = rpc_metadata_text(&c->trailing, RPC_STATUS_KEY);
    ep_status status = EP_OK;

    if (name) {
        status = ep_status_from_name(name);
        if (strcmp(ep_status_name(status), name) != 0) /* a name of a later version */
            status = ep_status_from_grpc((int)c->code);
    }
    free(name);
    return status;
}

ep_status rpc_client_result(const struct rpc_client_call *c, struct ep_error *error)
{
    ep_status status;
    char *details;

    if (c->code == GRPC_STATUS_OK) {
        atomic_store(&c->channel->spoken, true);
        return EP_OK;
    }
    details = rpc_slice_text(c->details);
    if (!details)
        return ep_error_set(error, EP_NO_MEMORY, "%s: out of memory", c->path);
    status = named_status(c);
    if (status != EP_OK) {
        atomic_store(&c->channel->spoken, true);
        ep_error_set(error, status, "%s", *details ? details : ep_status_text(status));
    } else if (c->code == GRPC_STATUS_UNAVAILABLE) {
        status = say_unreachable(c->channel, details, error);
    } else if (c->code == GRPC_STATUS_CANCELLED && !atomic_load(&c->cancelled)) {
        /* Not by us: a call that reaches a server between its drain and its GOAWAY. */
        status = ep_error_set(error, EP_UNAVAILABLE, "%s turned the call away: it is shutting down",
                              c->channel->target);
    } else if (c->code == GRPC_STATUS_DEADLINE_EXCEEDED) {
        status = say_late(c, error);
    } else {
        status = ep_status_from_grpc((int)c->code);
        ep_error_set(error, status, "%s: %s", c->path, *details ? details : ep_status_text(status));
    }
    free(details);
    return status;
}

/* ---- unary --------------------------------------------------------------------------- */

ep_status rpc_client_start_unary(struct rpc_client_call *c, const ProtobufCMessage *request,
                                 grpc_byte_buffer **reply, void *tag, struct ep_error *error)
{
    grpc_byte_buffer *bytes;
    grpc_op ops[6];
    ep_status status = rpc_client_pack(c, request, &bytes, error);

    if (status != EP_OK)
        return status;
    memset(ops, 0, sizeof ops);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[0].data.send_initial_metadata.metadata = c->metadata;
    ops[0].data.send_initial_metadata.count = c->n_metadata;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = bytes;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &c->initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = reply;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &c->trailing;
    ops[5].data.recv_status_on_client.status = &c->code;
    ops[5].data.recv_status_on_client.status_details = &c->details;
    status = rpc_client_start(c, ops, sizeof ops / sizeof *ops, tag, error);
    grpc_byte_buffer_destroy(bytes); /* gRPC has what it needs of it */
    return status;
}

ep_status rpc_client_take_reply(const struct rpc_client_call *c, grpc_byte_buffer *received,
                                ProtobufCMessage **reply, struct ep_error *error)
{
    ep_status status = rpc_client_result(c, error);

    if (status != EP_OK)
        return status;
    status = rpc_unpack(c->method->output, received, reply);
    if (status == EP_NO_MEMORY)
        return ep_error_set(error, status, "%s: no memory for the answer", c->path);
    if (status == EP_OK)
        return EP_OK;
    return ep_error_set(error, status, "%s: the answer is not a valid %s", c->path, c->method->output->name);
}

ep_status ep_rpc_unary(struct ep_rpc_channel *channel, const ProtobufCServiceDescriptor *service,
                       const char *method, const struct ep_rpc_metadata *metadata, size_t n_metadata,
                       const ProtobufCMessage *request, int64_t timeout_ms,
                       ProtobufCMessage **reply, struct ep_error *error)
{
    grpc_byte_buffer *received = NULL;
    struct rpc_client_call c;
    ep_status status;
    bool ok;

    *reply = NULL;
    status = rpc_client_call_init(&c, channel, service, method, metadata, n_metadata, timeout_ms, NULL, error);
    if (status != EP_OK)
        return status;
    status = rpc_client_start_unary(&c, request, &received, &c, error);
    if (status == EP_OK) {
        (void)rpc_client_wait(&c, &c, -1, &ok); /* ends with the deadline at the latest; the status tells */
        status = rpc_client_take_reply(&c, received, reply, error);
    }
    if (received)
        grpc_byte_buffer_destroy(received);
    rpc_client_call_fini(&c);
    return status;
}
