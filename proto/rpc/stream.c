/*
 * Streams on the client side.
 *
 * One thread may read and another send; any may cancel.  Each operation is in flight at most
 * once, and whoever needs its end waits for its tag: the fields' addresses are the tags.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "rpc_private.h"

struct ep_rpc_stream {
    struct rpc_client_call call;
    enum rpc_kind kind;

    /* The sender's. */
    bool opening; /* the first batch is in flight: metadata and, mostly, a request */
    bool closing, half_closed;
    char t_open, t_send, t_half;

    /* The reader's. */
    bool asked_initial; /* gRPC holds messages back until their metadata was asked for */
    bool reading, status_taken;
    grpc_byte_buffer *received;
    char t_read, t_status;
    ep_status result;
    struct ep_error error;

    atomic_bool ended;
};

/* ---- open ---------------------------------------------------------------------------- */

static ep_status start_status(struct ep_rpc_stream *s, struct ep_error *error)
{
    grpc_op op = { .op = GRPC_OP_RECV_STATUS_ON_CLIENT };

    op.data.recv_status_on_client.trailing_metadata = &s->call.trailing;
    op.data.recv_status_on_client.status = &s->call.code;
    op.data.recv_status_on_client.status_details = &s->call.details;
    return rpc_client_start(&s->call, &op, 1, &s->t_status, error);
}

static ep_status start_open(struct ep_rpc_stream *s, grpc_byte_buffer *request,
                            struct ep_error *error)
{
    grpc_op ops[3];
    size_t n = 0;
    ep_status status;

    memset(ops, 0, sizeof ops);
    ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[n].data.send_initial_metadata.metadata = s->call.metadata;
    ops[n++].data.send_initial_metadata.count = s->call.n_metadata;
    if (request) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = request;
    }
    if (s->kind == RPC_SERVER_STREAM)
        ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    status = rpc_client_start(&s->call, ops, n, &s->t_open, error);
    s->opening = status == EP_OK;
    s->half_closed = s->kind == RPC_SERVER_STREAM;
    return status;
}

static ep_status open_stream(struct ep_rpc_stream *s, const ProtobufCMessage *request,
                             struct ep_error *error)
{
    grpc_byte_buffer *bytes = NULL;
    ep_status status = EP_OK;

    if (request || s->kind == RPC_SERVER_STREAM)
        status = rpc_client_pack(&s->call, request, &bytes, error);
    if (status == EP_OK)
        status = start_open(s, bytes, error);
    if (bytes)
        grpc_byte_buffer_destroy(bytes);
    if (status != EP_OK)
        return status;
    status = start_status(s, error);
    s->status_taken = status != EP_OK;
    return status;
}

ep_status ep_rpc_stream_open(struct ep_rpc_channel *channel,
                             const ProtobufCServiceDescriptor *service, const char *method,
                             const struct ep_rpc_metadata *metadata, size_t n_metadata,
                             const ProtobufCMessage *request, int64_t timeout_ms,
                             struct ep_rpc_stream **out, struct ep_error *error)
{
    enum rpc_kind kind;
    struct ep_rpc_stream *s;
    ep_status status = rpc_schema_kind(channel->rpc->schema, service->name, method, &kind, error);

    if (status != EP_OK)
        return status;
    if (kind != RPC_SERVER_STREAM && kind != RPC_BIDI)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s/%s does not answer with a stream",
                            service->name, method);
    s = calloc(1, sizeof *s);
    if (!s)
        return ep_error_set(error, EP_NO_MEMORY, "%s/%s: out of memory", service->name, method);
    s->kind = kind;
    s->status_taken = true; /* until it is in flight */
    status = rpc_client_call_init(&s->call, channel, service, method, metadata, n_metadata,
                                  timeout_ms, NULL, error);
    if (status != EP_OK) {
        free(s);
        return status;
    }
    status = open_stream(s, request, error);
    if (status != EP_OK) {
        ep_rpc_stream_close(s);
        return status;
    }
    *out = s;
    return EP_OK;
}

/* ---- send ---------------------------------------------------------------------------- */

static ep_status say_ended(const struct ep_rpc_stream *s, struct ep_error *error)
{
    return ep_error_set(error, EP_UNAVAILABLE, "%s: the stream has ended, reading tells why",
                        s->call.path);
}

/* The opening batch may carry a message, and gRPC takes one at a time. */
static bool opened(struct ep_rpc_stream *s)
{
    bool ok = true;

    if (s->opening)
        (void)rpc_client_wait(&s->call, &s->t_open, -1, &ok);
    s->opening = false;
    return ok;
}

ep_status ep_rpc_stream_send(struct ep_rpc_stream *s, const ProtobufCMessage *request,
                             struct ep_error *error)
{
    grpc_op op = { .op = GRPC_OP_SEND_MESSAGE };
    grpc_byte_buffer *bytes;
    ep_status status;
    bool ok = false;

    if (s->half_closed)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%s: the sending half is closed",
                            s->call.path);
    status = rpc_client_pack(&s->call, request, &bytes, error);
    if (status != EP_OK)
        return status;
    if (!opened(s)) {
        grpc_byte_buffer_destroy(bytes);
        return say_ended(s, error);
    }
    op.data.send_message.send_message = bytes;
    status = rpc_client_start(&s->call, &op, 1, &s->t_send, error);
    grpc_byte_buffer_destroy(bytes);
    if (status != EP_OK)
        return status;
    (void)rpc_client_wait(&s->call, &s->t_send, -1, &ok);
    return ok ? EP_OK : say_ended(s, error);
}

void ep_rpc_stream_half_close(struct ep_rpc_stream *s)
{
    grpc_op op = { .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT };

    if (s->half_closed)
        return;
    s->half_closed = true;
    s->closing = rpc_client_start(&s->call, &op, 1, &s->t_half, NULL) == EP_OK;
}

/* ---- read ---------------------------------------------------------------------------- */

static ep_status start_read(struct ep_rpc_stream *s, struct ep_error *error)
{
    grpc_op ops[2];
    size_t n = 0;
    ep_status status;

    memset(ops, 0, sizeof ops);
    ops[n].op = GRPC_OP_RECV_MESSAGE;
    ops[n++].data.recv_message.recv_message = &s->received;
    if (!s->asked_initial) {
        ops[n].op = GRPC_OP_RECV_INITIAL_METADATA;
        ops[n++].data.recv_initial_metadata.recv_initial_metadata = &s->call.initial;
    }
    status = rpc_client_start(&s->call, ops, n, &s->t_read, error);
    if (status == EP_OK)
        s->reading = s->asked_initial = true;
    return status;
}

/* No further message: the status is there, or on its way. */
static void take_status(struct ep_rpc_stream *s)
{
    bool ok;

    if (!s->status_taken)
        (void)rpc_client_wait(&s->call, &s->t_status, -1, &ok);
    s->status_taken = true;
    s->result = rpc_client_result(&s->call, &s->error);
    atomic_store(&s->ended, true);
}

static ep_status say_result(const struct ep_rpc_stream *s, struct ep_error *error)
{
    return s->result == EP_OK ? EP_OK : ep_error_set(error, s->result, "%s", s->error.text);
}

/* What cannot be understood ends the stream: what follows could not be trusted either. */
static ep_status unpack_received(struct ep_rpc_stream *s, ProtobufCMessage **reply,
                                 struct ep_error *error)
{
    const ep_status status = rpc_unpack(s->call.method->output, s->received, reply);

    grpc_byte_buffer_destroy(s->received);
    s->received = NULL;
    if (status == EP_OK) {
        atomic_store(&s->call.channel->spoken, true);
        return EP_OK;
    }
    grpc_call_cancel(s->call.call, NULL);
    take_status(s);
    if (status == EP_NO_MEMORY)
        s->result = ep_error_set(&s->error, status, "%s: no memory for a message", s->call.path);
    else
        s->result = ep_error_set(&s->error, status, "%s: a message is not a valid %s",
                                 s->call.path, s->call.method->output->name);
    return say_result(s, error);
}

ep_status ep_rpc_stream_read(struct ep_rpc_stream *s, int64_t wait_ms, ProtobufCMessage **reply,
                             struct ep_error *error)
{
    ep_status status;
    bool ok = false;

    *reply = NULL;
    if (atomic_load(&s->ended))
        return say_result(s, error);
    if (!s->reading && (status = start_read(s, error)) != EP_OK)
        return status;
    if (!rpc_client_wait(&s->call, &s->t_read, wait_ms, &ok))
        return ep_error_set(error, EP_DEADLINE_EXCEEDED, "%s: no message within %" PRId64 " ms",
                            s->call.path, wait_ms);
    s->reading = false;
    if (ok && s->received)
        return unpack_received(s, reply, error);
    take_status(s);
    return say_result(s, error);
}

bool ep_rpc_stream_ended(const struct ep_rpc_stream *s)
{
    return atomic_load(&s->ended);
}

/* ---- end ----------------------------------------------------------------------------- */

void ep_rpc_stream_cancel(struct ep_rpc_stream *s)
{
    atomic_store(&s->call.cancelled, true);
    grpc_call_cancel(s->call.call, NULL);
}

void ep_rpc_stream_close(struct ep_rpc_stream *s)
{
    bool ok;

    if (!s)
        return;
    grpc_call_cancel(s->call.call, NULL); /* nothing changes when it is over already */
    (void)opened(s);
    if (s->closing)
        (void)rpc_client_wait(&s->call, &s->t_half, -1, &ok);
    if (s->reading)
        (void)rpc_client_wait(&s->call, &s->t_read, -1, &ok);
    if (!s->status_taken)
        (void)rpc_client_wait(&s->call, &s->t_status, -1, &ok);
    if (s->received)
        grpc_byte_buffer_destroy(s->received);
    rpc_client_call_fini(&s->call);
    free(s);
}
