/*
 * etcd_client: calls to a cluster of etcd, over all of its endpoints; what the files of the etcd store share.
 *
 * Every call blocks its thread, for a bounded time.
 */
#ifndef EP_ETCD_CLIENT_H
#define EP_ETCD_CLIENT_H

#include <pthread.h>

#include "ep_rpc.h"
#include "ep_store_url.h"
#include "etcd/rpc.pb-c.h"
#include "store_private.h"

/* One try at one endpoint: two fit into the time in which an answer is due. */
#define ETCD_TRY_MS 2000

/* The record in every commit that tells whether it was done (etcd_kv.c). */
struct etcd_marker {
    char *key;
    int64_t lease;
    uint64_t born;    /* ep_clock_boot_ns when its lease was asked for; 0: there is none */
    int64_t revision; /* it had when last heard of */
    uint64_t commits; /* its value is the number of the commit that wrote it */
};

struct etcd {
    struct ep_rpc *rpc;
    struct ep_store_url url;
    char *name; /* for messages: the endpoints */
    struct ep_rpc_channel *channels[EP_STORE_MAX_ENDPOINTS];
    atomic_size_t current; /* the endpoint that answered last */
    atomic_bool away;      /* no endpoint did, at the last call */

    char *user, *password_file;
    pthread_mutex_t lock; /* token */
    char *token;

    /* the store's thread */
    struct etcd_marker marker;
    bool refuses; /* the last commit failed, and not by its own fault */
};

ep_status etcd_open(const struct ep_store_etcd *options, struct etcd **out, struct ep_error *error);
void etcd_close(struct etcd *etcd);

struct etcd_call {
    const ProtobufCServiceDescriptor *service;
    const char *method;
    const char *what; /* for the message: "cannot WHAT" */
    const ProtobufCMessage *request;
    uint64_t deadline;
    const atomic_bool *stop; /* ends it early; may be NULL */
    unsigned tries;          /* out: more than one: an earlier one may have done it as well */
};

/* Tries the endpoints in turn until one answers.  The request may be done more than once. */
ep_status etcd_call(struct etcd *etcd, struct etcd_call *call, ProtobufCMessage **reply,
                    struct ep_error *error);

static inline void etcd_free(void *message)
{
    protobuf_c_message_free_unpacked(message, NULL);
}

/* ---- threads of their own: watches and leases ------------------------------------------- */

struct etcd_task {
    struct etcd *etcd;
    uv_thread_t thread;
    bool running;
    atomic_bool stop;
    pthread_mutex_t mutex; /* what follows, and stop's change */
    pthread_cond_t stopped;
    struct ep_rpc_stream *stream;
    size_t endpoint; /* the stream's */
};

void etcd_task_start(struct etcd_task *task, struct etcd *etcd, void (*main)(void *arg), void *arg);
void etcd_task_stop(struct etcd_task *task);               /* cuts its stream and waits for its end */
void etcd_task_sleep(struct etcd_task *task, uint64_t ms); /* shorter when it is stopped */
/* To the current endpoint; only while there is a leader, else etcd ends it. */
ep_status etcd_task_stream(struct etcd_task *task, const ProtobufCServiceDescriptor *service,
                           const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                           struct ep_error *error);
/* failed: the next one goes to another endpoint. */
void etcd_task_end_stream(struct etcd_task *task, const struct ep_error *failed);

/* ---- etcd_kv.c --------------------------------------------------------------------------- */

char *etcd_key(const struct etcd *etcd, const char *key); /* malloc'ed: below the store's prefix */
/* The key as callers know it; NULL: it is the store's own. */
const char *etcd_key_of(const struct etcd *etcd, const ProtobufCBinaryData *key, char *text, size_t size);
/* The first key after all that begin with this text; malloc'ed. */
char *etcd_range_end(const char *prefix);
ProtobufCBinaryData etcd_bytes(const char *text);

/* All of one moment, in pages; *revision is that moment. */
ep_status etcd_list(struct etcd *etcd, const char *prefix, uint64_t deadline, const atomic_bool *stop,
                    struct ep_record_list *out, uint64_t *revision, struct ep_error *error);
ep_status etcd_commit(struct etcd *etcd, const struct ep_store_write *writes, size_t n, uint64_t deadline,
                      uint64_t *revision, struct ep_error *error);
/* Is a majority there?  *revision may be NULL. */
ep_status etcd_ask_revision(struct etcd *etcd, uint64_t deadline, const atomic_bool *stop, uint64_t *revision,
                            struct ep_error *error);
void etcd_forget_marker(struct etcd *etcd);

/* ---- etcd_lease.c, etcd_watch.c ---------------------------------------------------------- */

/* *lease: of our own choice, so that one whose answer was lost is known.  *granted_ms: may be more than asked. */
ep_status etcd_grant(struct etcd *etcd, uint64_t ttl_ms, uint64_t deadline, int64_t *lease,
                     uint64_t *granted_ms, struct ep_error *error);
ep_status etcd_revoke(struct etcd *etcd, int64_t lease, uint64_t deadline, struct ep_error *error);
uint64_t etcd_random(void);

ep_status etcd_begin_session(struct etcd *etcd, struct ep_session *session, uint64_t deadline,
                             struct ep_error *error);
void etcd_end_session(struct etcd *etcd, struct ep_session *session, uint64_t deadline);

void etcd_begin_watch(struct etcd *etcd, struct ep_watch *watch);
void etcd_end_watch(struct ep_watch *watch);

#endif
