/*
 * A call on the server side.
 *
 *     armed --request comes--> open --_reply, _fail, _finish, cancelled--> over --> gone
 *
 * Who comes in is replaced by another that is armed.  Without memory for that one it is refused, and armed again itself
 * when it is gone: a method is never without.
 *
 * References: one for each operation that gRPC has in flight, and one that stands for the status
 * still to be sent.  At zero the call is gone: on_closed, then free.  Operations end in gRPC's
 * time and are run from the inbox, so no function below ever frees the call it was given.
 * All of it on the loop's thread.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <grpc/support/alloc.h>

#include "rpc_private.h"

struct ep_rpc_call {
    struct ep_rpc_server *server;
    const struct rpc_method *method; /* NULL: a method that nobody registered */
    grpc_call *call;
    unsigned refs;
    struct rpc_tag t_new, t_close, t_read, t_write, t_status;

    grpc_metadata_array metadata;
    grpc_call_details details;
    gpr_timespec deadline;
    grpc_byte_buffer *payload;
    int cancelled; /* written by gRPC before t_close */

    bool again;         /* there is no other armed: it will be, once it is gone */
    bool watches;       /* is one of the server's watches */
    bool seen;          /* the handler has seen a request: on_closed is due */
    bool over;          /* the handler has nothing more to say */
    bool sent_metadata;
    bool local;         /* `peer` is known: it came over a unix socket of ours */
    struct ep_rpc_peer peer;
    bool writing;
    bool status_sent;
    bool status_waits;  /* for the write in flight */
    struct ep_error result;

    void *user;
    char *identity;
    struct text { struct text *next; char *key, *value; } *texts; /* metadata that was asked for */
};

/* ---- life ---------------------------------------------------------------------------- */

static void free_texts(struct text *text)
{
    while (text) {
        struct text *next = text->next;

        free(text->key);
        free(text->value);
        free(text);
        text = next;
    }
}

static void arm(struct ep_rpc_call *c, struct ep_rpc_server *server, const struct rpc_method *method);

static void unref(struct ep_rpc_call *c)
{
    struct ep_rpc_server *server = c->server;

    if (--c->refs > 0)
        return;
    if (c->seen && c->method->handler.on_closed)
        c->method->handler.on_closed(c, c->method->user);
    if (c->watches)
        server->watches--;
    if (c->call)
        grpc_call_unref(c->call);
    grpc_metadata_array_destroy(&c->metadata);
    grpc_call_details_destroy(&c->details);
    if (c->payload)
        grpc_byte_buffer_destroy(c->payload);
    free_texts(c->texts);
    free(c->identity);
    server->calls--;
    if (c->again && server->state == RPC_SERVER_STARTED)
        arm(c, server, c->method);
    else
        free(c);
    server->on_call_gone(server); /* last: it may end the server */
}

/* The tag comes back in any case: from gRPC, or from us when gRPC refuses the batch. */
static void start(struct ep_rpc_call *c, const grpc_op *ops, size_t n, struct rpc_tag *tag)
{
    c->refs++;
    rpc_tag_arm(tag);

    grpc_call_error e = grpc_call_start_batch(c->call, ops, n, tag, NULL);

    if (e != GRPC_CALL_OK) {
        EP_ERROR("rpc", "batch refused", EP_S("error", grpc_call_error_to_string(e)),
                 EP_S("method", c->method ? c->method->path : "?"));
        rpc_tag_post(c->server->rpc, tag, false);
    }
}

/* ---- the end ------------------------------------------------------------------------- */

static void on_status(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_status);

    (void)ok;
    unref(c);
    unref(c); /* the one that stood for the status */
}

static size_t add_metadata_op(struct ep_rpc_call *c, grpc_op *op)
{
    if (c->sent_metadata)
        return 0;
    c->sent_metadata = true;
    op->op = GRPC_OP_SEND_INITIAL_METADATA;
    return 1;
}

/* message: the last one, NULL for none. */
static void send_status(struct ep_rpc_call *c, grpc_byte_buffer *message)
{
    ep_status status = c->result.status;
    grpc_slice details = grpc_slice_from_copied_string(c->result.text);
    grpc_metadata trailing = { .key = grpc_slice_from_static_string(RPC_STATUS_KEY),
                               .value = grpc_slice_from_static_string(ep_status_name(status)) };
    grpc_op ops[3];
    size_t n;

    c->status_sent = true;
    memset(ops, 0, sizeof ops);
    n = add_metadata_op(c, &ops[0]);
    if (message) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = message;
    }
    ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n].data.send_status_from_server.status = (grpc_status_code)ep_status_to_grpc(status);
    ops[n].data.send_status_from_server.status_details = &details;
    if (status != EP_OK) {
        ops[n].data.send_status_from_server.trailing_metadata_count = 1;
        ops[n].data.send_status_from_server.trailing_metadata = &trailing;
    }
    start(c, ops, n + 1, &c->t_status);
    grpc_slice_unref(details); /* gRPC has its own by now */
}

/* A status may not overtake the message before it. */
static void end(struct ep_rpc_call *c, ep_status status, const char *text)
{
    if (c->over)
        return;
    c->over = true;
    ep_error_set(&c->result, status, "%s", text);
    if (c->writing)
        c->status_waits = true;
    else
        send_status(c, NULL);
}

static void on_close(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_close);

    (void)ok;
    if (c->cancelled)
        end(c, EP_CANCELLED, "the call was cancelled");
    unref(c);
}

/* ---- requests ------------------------------------------------------------------------ */

static void read_next(struct ep_rpc_call *c)
{
    grpc_op op = { .op = GRPC_OP_RECV_MESSAGE };

    op.data.recv_message.recv_message = &c->payload;
    start(c, &op, 1, &c->t_read);
}

/* The audit has who tried; the others are the handlers' to note. */
static void refuse_viewer(struct ep_rpc_call *c, bool by_certificate)
{
    const char *operators = c->server->options.operators;
    char text[400];

    if (by_certificate)
        snprintf(text, sizeof text,
                 "%.120s is for operators, and the certificate of \"%.80s\" is a viewer's (OU=viewer)",
                 c->method->path, ep_rpc_call_identity(c));
    else
        snprintf(text, sizeof text,
                 "%.120s is for operators, and \"%.80s\" may only look: operators are %.140s",
                 c->method->path, ep_rpc_call_identity(c), operators ? operators : "others");
    EP_AUDIT("call refused", EP_S("method", c->method->path), EP_S("by", ep_rpc_call_identity(c)),
             EP_S("role", "viewer"));
    end(c, EP_PERMISSION_DENIED, text);
}

static void refuse_other(struct ep_rpc_call *c)
{
    char text[400];

    snprintf(text, sizeof text,
             "%.120s is for servers of the cluster, and the certificate of \"%.80s\" is no server's (OU=%.80s)",
             c->method->path, ep_rpc_call_identity(c), c->server->options.peer_unit);
    EP_AUDIT("call refused", EP_S("method", c->method->path), EP_S("by", ep_rpc_call_identity(c)),
             EP_S("role", "operator"));
    end(c, EP_PERMISSION_DENIED, text);
}

static bool is_for_viewers(const struct ep_rpc_handler *handler, const ProtobufCMessage *request)
{
    return handler->for_viewers || (handler->is_for_viewers && handler->is_for_viewers(request));
}

static bool is_operator(const struct ep_rpc_call *c)
{
    const struct ep_rpc_server_options *options = &c->server->options;

    return !options->is_operator || options->is_operator(c->local ? &c->peer : NULL, options->user);
}

/* False: it is refused. */
static bool admit(struct ep_rpc_call *c, const ProtobufCMessage *request)
{
    const char *peers = c->server->options.peer_unit;
    bool is_viewers;

    if (is_for_viewers(&c->method->handler, request))
        return true;
    is_viewers = rpc_certificate_has_unit(c->call, "viewer");
    if (is_viewers || !is_operator(c))
        refuse_viewer(c, is_viewers);
    else if (c->method->handler.for_peers && peers && !rpc_certificate_has_unit(c->call, peers))
        refuse_other(c);
    return !c->over;
}

/* False: it is refused.  Of servers all is taken: what they pass on was looked at, and a record must not stop them. */
static bool takes_text(struct ep_rpc_call *c, const ProtobufCMessage *request)
{
    char path[RPC_TEXT_PATH], text[160];

    if (c->method->handler.for_peers || !rpc_text_is_wrong(request, path, sizeof path))
        return true;
    snprintf(text, sizeof text, "%s is no UTF-8: the text of messages must be", path);
    end(c, EP_INVALID_ARGUMENT, text);
    return false;
}

static void deliver(struct ep_rpc_call *c)
{
    ProtobufCMessage *request;
    const ep_status status = rpc_unpack(c->method->input, c->payload, &request);
    char text[160];

    grpc_byte_buffer_destroy(c->payload);
    c->payload = NULL;
    if (status == EP_NO_MEMORY) {
        end(c, EP_NO_MEMORY, "the server has no memory for the request at the moment: try again");
        return;
    }
    if (status != EP_OK) {
        snprintf(text, sizeof text, "the request is not a valid %s message", c->method->input->name);
        end(c, EP_INVALID_ARGUMENT, text);
        return;
    }
    if (admit(c, request) && takes_text(c, request)) {
        c->seen = true;
        c->method->handler.on_request(c, request, c->method->user);
    }
    protobuf_c_message_free_unpacked(request, NULL);
}

/* Bidi: the next request is read once the answer to the last has left. */
static void on_read(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_read);

    if (!c->over) {
        if (!ok || !c->payload)
            end(c, EP_OK, ""); /* the client has said all it wanted to */
        else
            deliver(c);
        if (!c->over && !c->writing)
            read_next(c);
    }
    unref(c);
}

static void begin(struct ep_rpc_call *c)
{
    if (c->method->kind == RPC_BIDI)
        read_next(c);
    else if (!c->payload)
        end(c, EP_INVALID_ARGUMENT, "the call came without a request message");
    else
        deliver(c);
}

/* gRPC names a connection that we accepted "fd:N".  True: it is one, and its peer is looked up. */
static bool look_up_peer(struct ep_rpc_call *c)
{
    char *name = grpc_call_get_peer(c->call);
    int fd = rpc_peer_fd(name), domain = 0;
    socklen_t size = sizeof domain;
    struct ucred cred;

    gpr_free(name);
    if (fd < 0)
        return false;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX)
        return true;
    size = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) == 0) {
        c->local = true;
        c->peer = (struct ep_rpc_peer){ .pid = cred.pid, .uid = cred.uid, .gid = cred.gid };
    }
    return true;
}

static void on_proved(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_write);

    if (!ok)
        end(c, EP_CANCELLED, "the connection is gone");
    else if (!c->over)
        begin(c);
    unref(c);
}

/*
 * When we get to see a call, its connection may be closed already and its descriptor may belong
 * to another connection, maybe of another user: the call would speak in that one's name.  So after
 * the peer was looked up, the connection must prove that it still lives: gRPC takes initial
 * metadata for a live stream only, and closes a descriptor only after the streams have died.
 */
static void prove(struct ep_rpc_call *c)
{
    grpc_op op = { .op = GRPC_OP_SEND_INITIAL_METADATA };

    c->sent_metadata = true;
    c->t_write.fn = on_proved;
    start(c, &op, 1, &c->t_write);
}

/* What streams may go on for ever: there is a limit. */
static bool has_place(struct ep_rpc_call *c)
{
    if (c->method->kind == RPC_UNARY)
        return true;
    c->watches = c->server->watches < c->server->options.max_watches;
    c->server->watches += c->watches;
    return c->watches;
}

static void refuse_watch(struct ep_rpc_call *c)
{
    char text[200];

    snprintf(text, sizeof text, "there are %" PRIu32 " watches at this socket, as many as max-watches allows: end one first",
             c->server->options.max_watches);
    end(c, EP_RESOURCE_EXHAUSTED, text);
}

static void on_new(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_new);
    grpc_op op = { .op = GRPC_OP_RECV_CLOSE_ON_SERVER };

    if (!ok) { /* the server shuts down: no call was made */
        unref(c);
        return;
    }
    c->again = c->server->state == RPC_SERVER_STARTED && !rpc_call_arm(c->server, c->method);
    op.data.recv_close_on_server.cancelled = &c->cancelled;
    start(c, &op, 1, &c->t_close);
    if (c->again)
        end(c, EP_NO_MEMORY, "the server has no memory for one call more at the moment: try again");
    else if (!c->method)
        end(c, EP_UNIMPLEMENTED, "this server has no such method");
    else if (!has_place(c))
        refuse_watch(c);
    else if (look_up_peer(c))
        prove(c);
    else
        begin(c);
}

/* ---- writes -------------------------------------------------------------------------- */

static void on_written(struct rpc_tag *tag, bool ok)
{
    struct ep_rpc_call *c = RPC_CONTAINER_OF(tag, struct ep_rpc_call, t_write);

    c->writing = false;
    if (c->status_waits) {
        c->status_waits = false;
        send_status(c, NULL);
    } else if (ok && !c->over) {
        if (c->method->handler.on_writable)
            c->method->handler.on_writable(c, c->method->user);
        if (c->method->kind == RPC_BIDI && !c->over && !c->writing)
            read_next(c);
    }
    unref(c);
}

/* Packs an answer; on failure the call ends with the reason. */
static grpc_byte_buffer *pack_answer(struct ep_rpc_call *c, const ProtobufCMessage *message)
{
    uint32_t limit = c->server->options.max_message_bytes;
    size_t size = protobuf_c_message_get_packed_size(message);
    char text[160];

    if (size > limit) {
        snprintf(text, sizeof text, "the answer is %zu bytes: the limit is %" PRIu32, size, limit);
        end(c, EP_RESOURCE_EXHAUSTED, text);
        return NULL;
    }

    ProtobufCMessage *mended = rpc_text_mended(message);
    grpc_byte_buffer *bytes = rpc_pack(mended ? mended : message);

    if (mended)
        protobuf_c_message_free_unpacked(mended, NULL);
    if (!bytes)
        end(c, EP_NO_MEMORY, "no memory for the answer");
    return bytes;
}

/* On a stream it is the last message.  It leaves in one piece with the status. */
void ep_rpc_reply(struct ep_rpc_call *c, const ProtobufCMessage *message)
{
    grpc_byte_buffer *bytes;

    if (c->over)
        return;
    if (c->writing) {
        end(c, EP_INTERNAL, "the answer came while another was being sent");
        return;
    }
    bytes = pack_answer(c, message);
    if (!bytes)
        return;
    c->over = true;
    send_status(c, bytes);
    grpc_byte_buffer_destroy(bytes); /* gRPC has moved the contents out */
}

bool ep_rpc_write(struct ep_rpc_call *c, const ProtobufCMessage *message)
{
    grpc_byte_buffer *bytes;
    grpc_op ops[2];
    size_t n;

    if (c->over || c->writing)
        return false;
    bytes = pack_answer(c, message);
    if (!bytes)
        return false;
    memset(ops, 0, sizeof ops);
    n = add_metadata_op(c, &ops[0]);
    ops[n].op = GRPC_OP_SEND_MESSAGE;
    ops[n++].data.send_message.send_message = bytes;
    c->writing = true;
    c->t_write.fn = on_written;
    start(c, ops, n, &c->t_write);
    grpc_byte_buffer_destroy(bytes);
    return true;
}

bool rpc_call_is_writing(const struct ep_rpc_call *c)
{
    return c->writing;
}

void ep_rpc_fail(struct ep_rpc_call *c, const struct ep_error *error)
{
    if (error->status == EP_OK)
        end(c, EP_INTERNAL, "the handler failed without saying why");
    else
        end(c, error->status, error->text[0] ? error->text : ep_status_text(error->status));
}

void ep_rpc_finish(struct ep_rpc_call *c)
{
    end(c, EP_OK, "");
}

/* ---- waiting for calls --------------------------------------------------------------- */

static void arm(struct ep_rpc_call *c, struct ep_rpc_server *server, const struct rpc_method *method)
{
    grpc_completion_queue *cq = server->rpc->cq;
    grpc_call_error e;

    *c = (struct ep_rpc_call){ .server = server, .method = method, .refs = 1 };
    c->t_new.fn = on_new;
    c->t_close.fn = on_close;
    c->t_read.fn = on_read;
    c->t_status.fn = on_status;
    grpc_metadata_array_init(&c->metadata);
    grpc_call_details_init(&c->details);
    server->calls++;
    rpc_tag_arm(&c->t_new);
    if (method)
        e = grpc_server_request_registered_call(
            server->server, method->registration, &c->call, &c->deadline, &c->metadata,
            method->kind == RPC_BIDI ? NULL : &c->payload, cq, cq, &c->t_new);
    else
        e = grpc_server_request_call(server->server, &c->call, &c->details, &c->metadata, cq, cq,
                                     &c->t_new);
    if (e != GRPC_CALL_OK) {
        EP_ERROR("rpc", "cannot wait for calls", EP_S("error", grpc_call_error_to_string(e)),
                 EP_S("method", method ? method->path : "?"));
        rpc_tag_post(server->rpc, &c->t_new, false);
    }
}

bool rpc_call_arm(struct ep_rpc_server *server, const struct rpc_method *method)
{
    struct ep_rpc_call *c = calloc(1, sizeof *c);

    if (!c) {
        EP_ERROR("rpc", "no memory for a call", EP_S("method", method ? method->path : "?"));
        return false;
    }
    arm(c, server, method);
    return true;
}

/* ---- what a handler may ask ---------------------------------------------------------- */

void ep_rpc_call_set_user(struct ep_rpc_call *c, void *user)
{
    c->user = user;
}

void *ep_rpc_call_user(const struct ep_rpc_call *c)
{
    return c->user;
}

/* Slices are not terminated: what is asked for is copied once and kept with the call. */
const char *ep_rpc_call_metadata(const struct ep_rpc_call *call, const char *key)
{
    struct ep_rpc_call *c = (struct ep_rpc_call *)(uintptr_t)call; /* a cache, not a change */
    struct text *text;

    for (text = c->texts; text; text = text->next)
        if (strcmp(text->key, key) == 0)
            return text->value;
    text = calloc(1, sizeof *text);
    if (!text)
        return NULL;
    text->key = strdup(key);
    text->value = rpc_metadata_text(&c->metadata, key);
    if (!text->key || !text->value) {
        free_texts(text);
        return NULL;
    }
    text->next = c->texts;
    c->texts = text;
    return text->value;
}

bool ep_rpc_call_peer(const struct ep_rpc_call *c, struct ep_rpc_peer *peer)
{
    if (c->local)
        *peer = c->peer;
    return c->local;
}

const char *ep_rpc_call_identity(const struct ep_rpc_call *call)
{
    struct ep_rpc_call *c = (struct ep_rpc_call *)(uintptr_t)call; /* a cache, not a change */
    char text[32];

    if (c->identity)
        return c->identity;
    if (c->local) {
        snprintf(text, sizeof text, "uid:%u", (unsigned)c->peer.uid);
        c->identity = strdup(text);
    } else {
        c->identity = rpc_certificate_name(c->call);
    }
    return c->identity ? c->identity : "anonymous";
}

int64_t ep_rpc_call_remaining_ms(const struct ep_rpc_call *c)
{
    gpr_timespec deadline = c->deadline; /* on whatever clock gRPC likes */

    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return INT64_MAX;

    gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
    int64_t ms = left.tv_sec * 1000 + left.tv_nsec / 1000000;

    return ms > 0 ? ms : 0;
}
