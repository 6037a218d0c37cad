/*
 * A server in a thread and clients beside it, for the tests of the RPC runtime.
 *
 * It serves ep.v1.Node and ep.v1.Admin with handlers that do what the request's text says, and
 * counts what happened to them.
 */
#ifndef RPC_FIXTURE_H
#define RPC_FIXTURE_H

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "ep/v1/admin.pb-c.h"
#include "ep/v1/node.pb-c.h"
#include "ep_clock.h"
#include "ep_rpc.h"

/* Wait for a condition that another thread brings about; fail after 20 s. */
#define EVENTUALLY(condition)                                                                  \
    do {                                                                                       \
        uint64_t until_ = ep_clock_ns() + 20 * EP_NS_PER_S;                                    \
        while (!(condition) && ep_clock_ns() < until_)                                         \
            usleep(500);                                                                       \
        if (!(condition))                                                                      \
            fail_msg("never became true: %s", #condition);                                     \
    } while (0)

#define assert_ok(result, error)                                                               \
    do {                                                                                       \
        if ((result) != EP_OK)                                                                 \
            fail_msg("%s: %s", ep_status_name((error)->status), (error)->text);                \
    } while (0)

#define assert_text(said, part)                                                                \
    do {                                                                                       \
        if (!strstr((said), (part)))                                                           \
            fail_msg("\"%s\" does not say \"%s\"", (said), (part));                            \
    } while (0)

struct fixture {
    /* What to start; set before fixture_start(). */
    struct ep_rpc_server_options options;
    bool health, tcp;
    const struct ep_rpc_tls *tls;
    bool (*accept_peer)(const struct ep_rpc_peer *peer, void *user);

    char dir[64], path[96], unix_target[112], tcp_target[64];
    int port;

    uv_loop_t loop;
    uv_thread_t thread;
    uv_async_t post;
    sem_t ready;
    pthread_mutex_t lock;
    void (*task)(struct fixture *f);
    sem_t task_done;
    struct ep_rpc *rpc;
    struct ep_rpc_server *server;
    ep_status start_status;
    struct ep_error start_error;

    struct ep_rpc *client;          /* a runtime without a loop */
    struct ep_rpc_channel *channel; /* to the unix socket */

    /* What the handlers did. */
    atomic_int requests, held, closed, writes, refused_writes, drained;
    struct ep_rpc_call *held_call; /* the last one kept by "hold"; loop's thread */
    uint64_t grace_ms;
};

void fixture_init(struct fixture *f);
/* Server up, client runtime and channel open.  False: start_error says why not. */
bool fixture_try(struct fixture *f);
void fixture_start(struct fixture *f);
void fixture_stop(struct fixture *f);
/* Run a function on the server's loop and wait for it. */
void fixture_run(struct fixture *f, void (*task)(struct fixture *f));
/* Drain on the loop; f->drained tells when it is done. */
void fixture_drain(struct fixture *f, uint64_t grace_ms);

/* Node.Ping with this text; the reply's text lands in `answer` (128 bytes, may be NULL). */
ep_status ping(struct ep_rpc_channel *channel, const char *text, int64_t timeout_ms, char *answer,
               struct ep_error *error);
ep_status open_stats(struct ep_rpc_channel *channel, const char *text, int64_t timeout_ms,
                     struct ep_rpc_stream **out, struct ep_error *error);

#endif
