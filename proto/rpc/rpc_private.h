/* What the files of the RPC runtime share.  Nobody else includes this. */
#ifndef EP_RPC_PRIVATE_H
#define EP_RPC_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "ep_rpc.h"
#include "google/protobuf/descriptor.pb-c.h"

#define RPC_DEFAULT_MESSAGE_BYTES    (4u << 20)
#define RPC_DEFAULT_CONNECTIONS      1024u
#define RPC_DEFAULT_WATCHES          1024u
#define RPC_DEFAULT_HANDSHAKE_MS     10000u
/* Also what gRPC gives a connection to get through its handshake: TLS on a busy machine takes a while. */
#define RPC_CONNECT_MS               20000
#define RPC_CONNECT_SLACK_MS         100 /* so that a call's own bound comes first, and is what its error names */
#define RPC_STATUS_KEY               "ep-status"

/*
 * Both ends ping an idle connection; a server that saw pings more often than RPC_MIN_PING_MS would
 * hang up, so it is well below the client's period.
 */
#define RPC_CLIENT_KEEPALIVE_MS      20000
#define RPC_SERVER_KEEPALIVE_MS      30000
#define RPC_KEEPALIVE_TIMEOUT_MS     10000
#define RPC_MIN_PING_MS              5000

#define RPC_CONTAINER_OF(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

/* ---- runtime.c: completion queue, its thread, the way to the loop -------------------- */

/*
 * One operation in flight.  Made ready by the thread that starts the operation, taken by the
 * completion-queue thread, run on the loop.  `armed` carries the release/acquire pair between the
 * first two: gRPC orders them as well, but out of sight of tools that check.
 */
struct rpc_tag {
    void (*fn)(struct rpc_tag *tag, bool ok);
    struct rpc_tag *next;
    bool ok;
    atomic_bool armed;
};

struct ep_rpc {
    uv_loop_t *loop;
    uv_async_t async;
    grpc_completion_queue *cq;
    uv_thread_t thread;
    _Atomic(struct rpc_tag *) inbox; /* newest first; pushed by the CQ thread */
    struct rpc_tag *ready;           /* oldest first; the loop's own */
    uint32_t users;                  /* loop's: servers and calls, which keep the loop alive */
    int connect_ms;                  /* of channels to come */
    struct rpc_server_tls *tls;      /* loop's: credential sources, they outlive their servers */
    _Atomic(uintptr_t) dispatcher;   /* thread that runs a callback now, 0: none */
    Google__Protobuf__FileDescriptorSet *schema;
};

void rpc_tag_arm(struct rpc_tag *tag);                          /* before gRPC gets it */
void rpc_tag_post(struct ep_rpc *rpc, struct rpc_tag *tag, bool ok); /* run it on the loop, soon */
void rpc_run_inbox(struct ep_rpc *rpc);                         /* loop's thread */
bool rpc_on_dispatcher(const struct ep_rpc *rpc);               /* inside a callback of ours? */
void rpc_hold_loop(struct ep_rpc *rpc);                         /* loop's thread; until it is let go */
void rpc_let_loop(struct ep_rpc *rpc);

static inline uint64_t rpc_now_ms(void)
{
    return ep_clock_ns() / EP_NS_PER_MS;
}

static inline grpc_arg rpc_arg_int(const char *key, int value)
{
    return (grpc_arg){ .type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key, .value.integer = value };
}

static inline grpc_arg rpc_arg_string(const char *key, const char *value)
{
    return (grpc_arg){ .type = GRPC_ARG_STRING,
                       .key = (char *)(uintptr_t)key,
                       .value.string = (char *)(uintptr_t)value };
}

/* ---- schema.c: the embedded descriptor set ------------------------------------------- */

enum rpc_kind { RPC_UNARY, RPC_SERVER_STREAM, RPC_CLIENT_STREAM, RPC_BIDI };

ep_status rpc_schema_load(Google__Protobuf__FileDescriptorSet **out, struct ep_error *error);
ep_status rpc_schema_kind(const Google__Protobuf__FileDescriptorSet *schema, const char *service,
                          const char *method, enum rpc_kind *kind, struct ep_error *error);
const Google__Protobuf__FileDescriptorProto *
rpc_schema_file(const Google__Protobuf__FileDescriptorSet *schema, const char *name);
const Google__Protobuf__FileDescriptorProto *
rpc_schema_symbol(const Google__Protobuf__FileDescriptorSet *schema, const char *symbol);

/* ---- message.c: messages, slices, status --------------------------------------------- */

/* NULL: no memory. */
grpc_byte_buffer *rpc_pack(const ProtobufCMessage *message);
/* EP_PROTOCOL: not a message of this type; EP_NO_MEMORY.  Freed as any other. */
ep_status rpc_unpack(const ProtobufCMessageDescriptor *type, grpc_byte_buffer *bytes, ProtobufCMessage **out);
char *rpc_slice_text(grpc_slice slice); /* malloc'ed and terminated; NULL: no memory */
/* The value of a metadata entry, malloc'ed; NULL: absent. */
char *rpc_metadata_text(const grpc_metadata_array *metadata, const char *key);

/* ---- text.c: is the text of messages UTF-8 ------------------------------------------- */

#define RPC_TEXT_PATH 96 /* "spec.placement.ranks.node" */

/* True: a string of the message is not; `path` gets the first such field. */
bool rpc_text_is_wrong(const ProtobufCMessage *message, char *path, size_t size);
/* A copy with a '?' for each byte that is not, for free_unpacked(); NULL: all of it is. */
ProtobufCMessage *rpc_text_mended(const ProtobufCMessage *message);

/* ---- tls.c --------------------------------------------------------------------------- */

/* The three files' contents; a member is NULL where no file is named. */
struct rpc_pem { char *ca, *cert, *key; };

ep_status rpc_pem_read(const struct ep_rpc_tls *tls, struct rpc_pem *out, struct ep_error *error);
bool rpc_pem_equal(const struct rpc_pem *a, const struct rpc_pem *b);
void rpc_pem_fini(struct rpc_pem *pem);

grpc_channel_credentials *rpc_client_credentials(const struct rpc_pem *pem);
/* Reads the files at every handshake from then on. */
ep_status rpc_server_credentials(struct ep_rpc *rpc, const struct ep_rpc_tls *tls,
                                 grpc_server_credentials **out, struct ep_error *error);
void rpc_server_tls_free_all(struct ep_rpc *rpc);

/* The caller's common name or, without one, its first other name; malloc'ed, NULL: it has shown no certificate. */
char *rpc_certificate_name(grpc_call *call);
/* Has its subject this unit (OU)? */
bool rpc_certificate_has_unit(grpc_call *call, const char *unit);

/* ---- server.c, methods.c, call.c ----------------------------------------------------- */

struct rpc_method {
    struct rpc_method *next;
    char *path; /* "/ep.v1.Admin/GetGroup" */
    enum rpc_kind kind;
    const ProtobufCMessageDescriptor *input, *output;
    struct ep_rpc_handler handler;
    void *user;
    void *registration; /* gRPC's */
};

struct rpc_service {
    struct rpc_service *next;
    char *name;
};

enum rpc_server_state { RPC_SERVER_NEW, RPC_SERVER_STARTED, RPC_SERVER_DRAINING, RPC_SERVER_DRAINED };

/* Owned by the loop's thread, with everything that hangs on it. */
struct ep_rpc_server {
    struct ep_rpc *rpc;
    struct ep_rpc_server_options options;
    grpc_server *server;
    enum rpc_server_state state;
    struct rpc_method *methods;
    struct rpc_service *services;
    struct rpc_listener *listeners;
    struct rpc_gate *gate; /* connections of our own listeners */
    struct rpc_health *health;
    size_t watches;        /* calls of methods that stream */
    size_t calls;          /* in flight or waiting for one; each holds the server */
    void (*on_call_gone)(struct ep_rpc_server *server); /* one less; may destroy the server */
    bool shut;             /* gRPC has reported the end of the shutdown */
    struct rpc_tag t_shutdown;
    uv_timer_t *grace;
    void (*on_drained)(struct ep_rpc_server *server, void *user);
    void *drained_user;
};

ep_status rpc_server_add_method(struct ep_rpc_server *server, const char *service,
                                const char *method, const ProtobufCMessageDescriptor *input,
                                const ProtobufCMessageDescriptor *output,
                                const struct ep_rpc_handler *handler, void *user,
                                struct ep_error *error);
ep_status rpc_server_add_service_name(struct ep_rpc_server *server, const char *name,
                                      struct ep_error *error);
void rpc_server_free_methods(struct ep_rpc_server *server);

/* Wait for one call of the method; NULL: of any method that was not registered.  False: no memory. */
bool rpc_call_arm(struct ep_rpc_server *server, const struct rpc_method *method);

/* A write is in flight: ep_rpc_write() would refuse. */
bool rpc_call_is_writing(const struct ep_rpc_call *call);

/* ---- gate.c: connections that we accept ourselves; listen_unix.c, listen_tcp.c ------- */

/* gRPC takes a unix socket's connect() that found no room for one that goes on, and fails: who is silent leaves room. */
#define RPC_BACKLOG SOMAXCONN

struct rpc_listener {
    uv_poll_t poll;
    struct rpc_listener *next;
    struct rpc_gate *gate;
    int fd;
    bool polling;
    char *path; /* unix */
    dev_t dev;
    ino_t ino;  /* of the file at path */
    bool (*accept_peer)(const struct ep_rpc_peer *peer, void *user);
    void *user;
};

ep_status rpc_gate_create(struct ep_rpc_server *server, struct ep_error *error);
void rpc_gate_free(struct ep_rpc_server *server);
/* Takes over fd and, when it succeeds, path (malloc'ed, NULL for TCP). */
ep_status rpc_listener_add(struct ep_rpc_server *server, int fd, char *path,
                           struct rpc_listener **out, struct ep_error *error);
ep_status rpc_listeners_start(struct ep_rpc_server *server, struct ep_error *error);
void rpc_listeners_close(struct ep_rpc_server *server); /* also drops who has not spoken yet */
/* The descriptor behind a call's peer name ("fd:7"), -1 when gRPC accepted it. */
int rpc_peer_fd(const char *peer);

size_t rpc_gate_limit(const struct ep_rpc_server *server); /* of connections */

/* held.c */
struct rpc_held { struct rpc_held_fd *fds; size_t n, limit; };

bool rpc_held_open(struct rpc_held *held, size_t limit); /* false: no memory */
void rpc_held_close(struct rpc_held *held);
bool rpc_held_add(struct rpc_held *held, int fd); /* there is a place; false: it is closed already */
void rpc_held_sweep(struct rpc_held *held); /* forgets those that are closed */

/* door.c: so many connections at the port, though gRPC accepts them; until the server's doors are closed. */
ep_status rpc_door_open(const struct ep_rpc_server *server, int port, size_t limit, struct ep_error *error);
void rpc_doors_close(const struct ep_rpc_server *server);
int rpc_port_of(int fd); /* of its own end; 0: none */

/* Plaintext; with TLS gRPC accepts. */
ep_status rpc_listen_tcp(struct ep_rpc_server *server, const char *address, int *port,
                         struct ep_error *error);
/* Why can this address not be bound?  EP_OK: it can. */
ep_status rpc_explain_bind(const char *address, struct ep_error *error);

/* ---- health.c, reflection.c ---------------------------------------------------------- */

void rpc_health_drain(struct ep_rpc_server *server);
void rpc_health_free(struct ep_rpc_server *server);
ep_status rpc_reflection_add(struct ep_rpc_server *server, struct ep_error *error);

/* ---- client.c, ask.c, stream.c ------------------------------------------------------- */

struct rpc_asked;

struct ep_rpc_channel {
    struct ep_rpc *rpc;
    char *target; /* as the caller wrote it: for messages */
    char *uri;    /* as gRPC wants it */
    uint32_t max_message_bytes;
    int connect_ms;        /* an attempt's bound */
    struct ep_rpc_tls tls; /* owned copies */
    bool secure;
    atomic_bool spoken;    /* the server has answered something */
    pthread_mutex_t lock;       /* guards the two below */
    grpc_channel *channel;
    struct rpc_pem pem;    /* what `channel` was made with */
    /* the loop's thread */
    struct rpc_asked *asked; /* under way */
    bool closed;             /* the last of them frees it */
};

void rpc_channel_free(struct ep_rpc_channel *channel);

/* Whoever blocks has a completion queue of its own and does its own waiting; others share the runtime's. */
struct rpc_client_call {
    struct ep_rpc_channel *channel;
    const ProtobufCMethodDescriptor *method;
    char *path;
    grpc_call *call;
    grpc_completion_queue *cq; /* its own; NULL: the runtime's */
    int64_t timeout_ms;
    atomic_bool cancelled;   /* by this side */
    grpc_metadata *metadata; /* to send */
    size_t n_metadata;
    grpc_metadata_array initial, trailing; /* received */
    grpc_status_code code;
    grpc_slice details;
};

ep_status rpc_client_call_init(struct rpc_client_call *c, struct ep_rpc_channel *channel,
                               const ProtobufCServiceDescriptor *service, const char *method,
                               const struct ep_rpc_metadata *metadata, size_t n_metadata,
                               int64_t timeout_ms, grpc_completion_queue *shared, struct ep_error *error);
void rpc_client_call_fini(struct rpc_client_call *c);
ep_status rpc_client_pack(const struct rpc_client_call *c, const ProtobufCMessage *request,
                          grpc_byte_buffer **out, struct ep_error *error);
ep_status rpc_client_start(struct rpc_client_call *c, const grpc_op *ops, size_t n, void *tag,
                           struct ep_error *error);
/* Wait for a tag.  *ok gets its result; false: not within wait_ms (< 0: no bound). */
bool rpc_client_wait(struct rpc_client_call *c, void *tag, int64_t wait_ms, bool *ok);
/* The result of the call once its status is there: EP_OK or the error in words. */
ep_status rpc_client_result(const struct rpc_client_call *c, struct ep_error *error);
/* All of a unary call in one batch; *received is there when its tag has come. */
ep_status rpc_client_start_unary(struct rpc_client_call *c, const ProtobufCMessage *request,
                                 grpc_byte_buffer **received, void *tag, struct ep_error *error);
/* Once it has: *reply is set on success only. */
ep_status rpc_client_take_reply(const struct rpc_client_call *c, grpc_byte_buffer *received,
                                ProtobufCMessage **reply, struct ep_error *error);

#endif
