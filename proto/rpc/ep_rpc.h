/*
 * ep_rpc: the C11 RPC runtime over gRPC C core, protobuf-c and libuv.
 *
 * The only folder that includes <grpc/...>.  Servers, clients and tools use the
 * same runtime; one completion-queue thread per process polls for all of them
 * (a gRPC channel reconnects only while some thread polls).
 *
 * Threads.  A runtime is bound to one libuv loop, or to none.
 *   With a loop: every callback runs on the loop's thread, and server functions
 *   and ep_rpc_ask() are called on it.
 *   Without: neither of them; the blocking client functions below are for any thread.
 *   Blocking client calls must not be made on the loop's thread.
 * fork() without exec is not allowed once a runtime is open (gRPC's rule).
 *
 * Ownership.  A request given to a callback lives until the callback returns.
 * A reply given to the runtime is packed before the call returns.  A reply
 * handed to a client belongs to it: protobuf_c_message_free_unpacked(reply, NULL).
 *
 * Errors travel as gRPC status + message, and exactly, as the ep_status name in
 * the trailing metadata entry "ep-status".
 */
#ifndef EP_RPC_H
#define EP_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <protobuf-c/protobuf-c.h>
#include <uv.h>

#include "ep_error.h"

/* ---- runtime ------------------------------------------------------------------------- */

struct ep_rpc;

/* loop NULL: a client-only runtime.  Several runtimes may be open in one process. */
ep_status ep_rpc_open(uv_loop_t *loop, struct ep_rpc **out, struct ep_error *error);

/*
 * For main(), before other threads and runtimes: names of servers are looked up as the host's other programs do it,
 * unless GRPC_DNS_RESOLVER says otherwise.  gRPC's own way asks DNS for an IPv6 address, and waits for that answer, also
 * where /etc/hosts has the name.
 */
void ep_rpc_names_by_host(void);

/*
 * Channels that are opened from now on are for calls of this timeout, as these have it (< 0: none): an attempt to connect ends
 * soon after that, or after 20 s.  Nothing else ends one whose server accepts and then says nothing, a stopped one say, and
 * ep_rpc_close() waits for it, 2 s at most.
 */
void ep_rpc_connect_within(struct ep_rpc *rpc, int64_t timeout_ms);

/*
 * Everything made from the runtime must be closed before.  Joins the thread and
 * leaves nothing behind.  With a loop: called on its thread after the loop ran
 * dry of RPC work; run the loop once more afterwards for the closing handles.
 */
void ep_rpc_close(struct ep_rpc *rpc);

/* ---- transport security -------------------------------------------------------------- */

/* PEM files.  On a server `ca` set means: clients must present a certificate of it (mTLS).
 * Files are read again when they change, at the next handshake (rotation without restart). */
struct ep_rpc_tls {
    const char *ca;   /* roots that the other side is verified against */
    const char *cert; /* own chain */
    const char *key;
    const char *name; /* client: name expected in the server's certificate; NULL: the target's host */
};

/* ---- server -------------------------------------------------------------------------- */

struct ep_rpc_server;
struct ep_rpc_call;

/*
 * One method of a service.  Which kind it is (unary, server streaming, bidi)
 * and its message types come from the embedded schema.
 *
 *   on_request   unary, server stream: once.  bidi: per message, the next when no write
 *                is in flight; the client's half-close ends the call with OK.  Answer now
 *                or later with ep_rpc_reply / _write / _finish.
 *   on_writable  streams: the previous ep_rpc_write has left; the next may come.
 *   on_closed    last callback of a call that saw on_request, whatever ended it
 *                (finished, cancelled, deadline, connection lost, shutdown); free
 *                what ep_rpc_call_set_user holds.
 *
 * Who may call: operators all, and viewers the methods that are for viewers, and requests that are; the runtime refuses
 * them all others.  Viewers are those whose certificate has the unit (OU) "viewer" in its subject, and whoever is_operator
 * of the server's options does not know.  Where peer_unit of these says which certificates other servers have, methods for
 * peers are for nobody else.
 */
struct ep_rpc_handler {
    const char *method; /* "CreateGroup" */
    bool for_viewers, for_peers;
    bool (*is_for_viewers)(const ProtobufCMessage *request); /* this request; may be NULL: none is */
    void (*on_request)(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user);
    void (*on_writable)(struct ep_rpc_call *call, void *user);
    void (*on_closed)(struct ep_rpc_call *call, void *user);
};

struct ep_rpc_peer {
    pid_t pid;
    uid_t uid;
    gid_t gid;
};

struct ep_rpc_server_options {
    uint32_t max_message_bytes;   /* either way; 0: 4 MiB */
    uint32_t max_connections;     /* without TLS, and at each port with it; 0: 1024, and never more than
                                     half of the process's open files */
    uint32_t max_watches;         /* calls of methods that stream, at a time; 0: 1024 */
    uint32_t handshake_timeout_ms; /* a connection that says nothing is dropped; 0: 10000.  When all
                                      places are taken, the oldest silent one goes first */
    bool reflection;              /* serve grpc.reflection.v1 and v1alpha */
    /* Of those that were let in and show no viewer's certificate; peer NULL: it came over no unix socket.  NULL: all are */
    bool (*is_operator)(const struct ep_rpc_peer *peer, void *user);
    void *user;
    const char *operators; /* who they are, for whoever is refused: "those that ..." */
    const char *peer_unit; /* OU of other servers' certificates; NULL: any operator's will do */
};

ep_status ep_rpc_server_create(struct ep_rpc *rpc, const struct ep_rpc_server_options *options,
                               struct ep_rpc_server **out, struct ep_error *error);

/* Every handler must name a method of the descriptor and every method needs a handler. */
ep_status ep_rpc_server_add_service(struct ep_rpc_server *server,
                                    const ProtobufCServiceDescriptor *service,
                                    const struct ep_rpc_handler *handlers, size_t n, void *user,
                                    struct ep_error *error);

/* "HOST:PORT"; port 0 picks one.  *port gets the bound port.  tls NULL: plaintext. */
ep_status ep_rpc_server_listen_tcp(struct ep_rpc_server *server, const char *address,
                                   const struct ep_rpc_tls *tls, int *port, struct ep_error *error);

/*
 * A unix listener that this side owns: accept, SO_PEERCRED, then hand the
 * connection to gRPC.  accept_peer returns false to turn a peer away (NULL: all
 * are let in).  A live socket of another process at `path` is an error, a dead
 * one is replaced; the file gets `mode` and goes away with the server.
 */
ep_status ep_rpc_server_listen_unix(struct ep_rpc_server *server, const char *path, mode_t mode,
                                    bool (*accept_peer)(const struct ep_rpc_peer *peer, void *user),
                                    void *user, struct ep_error *error);

ep_status ep_rpc_server_start(struct ep_rpc_server *server, struct ep_error *error);

/*
 * Graceful end: stop accepting, wait for the calls in flight at most grace_ms,
 * cancel the rest, then on_drained.  After it ep_rpc_server_destroy.  Streams that would not
 * end by themselves are the caller's to finish (see health below).
 */
void ep_rpc_server_drain(struct ep_rpc_server *server, uint64_t grace_ms,
                         void (*on_drained)(struct ep_rpc_server *server, void *user), void *user);
/* Without a drain before it: cancels every call, waits for that, and on_closed is called in here. */
void ep_rpc_server_destroy(struct ep_rpc_server *server);

/* Answers.  After _reply, _fail or _finish the call is over for the handler.  _reply on a stream
 * sends its last message and OK; no write may be in flight. */
void ep_rpc_reply(struct ep_rpc_call *call, const ProtobufCMessage *message);
void ep_rpc_fail(struct ep_rpc_call *call, const struct ep_error *error);
void ep_rpc_finish(struct ep_rpc_call *call); /* streams: end with OK */

/* Streams: one write at a time; false while the previous one has not left (backpressure: wait for
 * on_writable) or the call is over. */
bool ep_rpc_write(struct ep_rpc_call *call, const ProtobufCMessage *message);

void ep_rpc_call_set_user(struct ep_rpc_call *call, void *user);
void *ep_rpc_call_user(const struct ep_rpc_call *call);
const char *ep_rpc_call_metadata(const struct ep_rpc_call *call, const char *key); /* NULL: absent */
/* Identity: the certificate's common name, "uid:N" on a unix socket, "anonymous" on plaintext TCP. */
const char *ep_rpc_call_identity(const struct ep_rpc_call *call);
/* True and *peer filled when the call came over a unix listener. */
bool ep_rpc_call_peer(const struct ep_rpc_call *call, struct ep_rpc_peer *peer);
/* Milliseconds left, INT64_MAX without a deadline. */
int64_t ep_rpc_call_remaining_ms(const struct ep_rpc_call *call);

/*
 * Health (grpc.health.v1): add it to a server, then set the state of a service
 * ("" is the whole server).  Watchers are told, coalesced.  Draining the server sets NOT_SERVING
 * and ends the watches.
 */
ep_status ep_rpc_server_add_health(struct ep_rpc_server *server, struct ep_error *error);
void ep_rpc_server_set_health(struct ep_rpc_server *server, const char *service, bool serving);

/* ---- client: all but ep_rpc_ask() blocks, and is for any thread but the loop's --------- */

struct ep_rpc_channel;
struct ep_rpc_stream;

/* target: "unix:PATH" or "HOST:PORT".  Connects lazily; tls NULL: plaintext.  One that ep_rpc_ask() uses is closed on
 * the loop's thread: what it has asked ends with EP_CANCELLED, soon afterwards. */
ep_status ep_rpc_channel_open(struct ep_rpc *rpc, const char *target, const struct ep_rpc_tls *tls,
                              uint32_t max_message_bytes, struct ep_rpc_channel **out,
                              struct ep_error *error);
void ep_rpc_channel_close(struct ep_rpc_channel *channel);

/* name/value pairs sent with a call; lower-case names. */
struct ep_rpc_metadata { const char *key, *value; };

/* Does a failure of one of these have that hint, which stays true until somebody changes a configuration? */
bool ep_rpc_hints_at_tls(const struct ep_error *error);

/*
 * service + method name the call; request must be of the method's input type, *reply is of its
 * output type.  timeout_ms < 0: none.  On failure *reply is NULL and *error says why, in the
 * server's words when it spoke, else in ours (UNAVAILABLE names target and cause, with a hint
 * when plaintext and TLS were mixed up).
 */
ep_status ep_rpc_unary(struct ep_rpc_channel *channel, const ProtobufCServiceDescriptor *service,
                       const char *method, const struct ep_rpc_metadata *metadata, size_t n_metadata,
                       const ProtobufCMessage *request, int64_t timeout_ms,
                       ProtobufCMessage **reply, struct ep_error *error);

/*
 * The same without waiting, on the thread of the runtime's loop: done is called from the loop, once, within timeout_ms
 * whatever happens, and not before this has returned.  reply is valid during the call; NULL where *error is one.
 */
typedef void (*ep_rpc_done_fn)(const struct ep_error *error, const ProtobufCMessage *reply, void *user);
void ep_rpc_ask(struct ep_rpc_channel *channel, const ProtobufCServiceDescriptor *service, const char *method,
                const struct ep_rpc_metadata *metadata, size_t n_metadata, const ProtobufCMessage *request,
                uint32_t timeout_ms, ep_rpc_done_fn done, void *user);

ep_status ep_rpc_stream_open(struct ep_rpc_channel *channel,
                             const ProtobufCServiceDescriptor *service, const char *method,
                             const struct ep_rpc_metadata *metadata, size_t n_metadata,
                             const ProtobufCMessage *request, int64_t timeout_ms,
                             struct ep_rpc_stream **out, struct ep_error *error);
/* Bidi only: send a further request; end the sending half. */
ep_status ep_rpc_stream_send(struct ep_rpc_stream *stream, const ProtobufCMessage *request,
                             struct ep_error *error);
void ep_rpc_stream_half_close(struct ep_rpc_stream *stream);
/*
 * The next message.  EP_OK with *reply NULL: the stream ended well.  wait_ms < 0: until the
 * stream's own deadline; EP_DEADLINE_EXCEEDED at wait_ms leaves the stream usable, and
 * ep_rpc_stream_ended() tells it from the stream's own end.
 */
ep_status ep_rpc_stream_read(struct ep_rpc_stream *stream, int64_t wait_ms,
                             ProtobufCMessage **reply, struct ep_error *error);
bool ep_rpc_stream_ended(const struct ep_rpc_stream *stream);
void ep_rpc_stream_cancel(struct ep_rpc_stream *stream); /* any thread, also while another reads */
void ep_rpc_stream_close(struct ep_rpc_stream *stream);

#endif
