/* What the tests of the store share: a store on a loop, questions that wait for their answer, and etcd to run it on. */
#ifndef STORE_FIXTURE_H
#define STORE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "ep_clock.h"
#include "ep_store.h"

#define MEMBERS_MAX      3
#define ANSWER_WITHIN_MS 4000 /* many cases wait until it is over */

/* An etcd of one or three members on free ports of 127.0.0.1, its data in a directory of the fixture's. */
struct cluster {
    size_t n;
    int client[MEMBERS_MAX], peer[MEMBERS_MAX];
    pid_t pid[MEMBERS_MAX]; /* 0: not running */
    const char *directory;
    const char *flags; /* more of them, for each member; may be NULL */
    bool tls;          /* certificates in directory */
};

/* Between a store and etcd, to be cut. */
struct proxy {
    int port, to;
    pid_t pid;
    const char *swallow_at; /* a request that holds this text and all after it get no answer; NULL: none */
};

/*
 * Cases are run by the fixture.  One that fails leaves from its middle, with watches, sessions and calls that point
 * into its stack: its processes are killed, and nothing of its loop is touched any more, so that it is one failure.
 */
struct fixture_case {
    void (*run)(void **state);
};
#define FIXTURE_TEST(name, run, setup)                                                                       \
    { name, fixture_run_case, setup, fixture_teardown, &(struct fixture_case){ run } }

struct fixture {
    const struct fixture_case *test;
    bool passed;
    struct fixture *next; /* of those that did not */
    uv_loop_t loop;
    char directory[64], path[96];
    struct ep_store *store;
    uint32_t answer_within_ms;
    bool on_etcd;
    struct cluster etcd;
};

/* Fails the test after a minute. */
#define RUN_UNTIL(f, condition)                                                                              \
    do {                                                                                                     \
        uint64_t until_ = ep_clock_ns() + 60 * EP_NS_PER_S;                                                  \
        uv_timer_t tick_;                                                                                    \
        fixture_tick_start(f, &tick_);                                                                       \
        while (!(condition) && ep_clock_ns() < until_)                                                       \
            uv_run(&(f)->loop, UV_RUN_ONCE);                                                                 \
        fixture_tick_stop(f, &tick_);                                                                        \
        if (!(condition))                                                                                    \
            fail_msg("never became true: %s", #condition);                                                   \
    } while (0)

#define assert_text(said, part)                                                                              \
    do {                                                                                                     \
        if (!strstr((said), (part)))                                                                         \
            fail_msg("\"%s\" does not say \"%s\"", (said), (part));                                          \
    } while (0)

int fixture_setup(void **state); /* a directory and a loop */
int fixture_setup_etcd(void **state);
int fixture_teardown(void **state);
void fixture_run_case(void **state);
void fixture_tick_start(struct fixture *f, uv_timer_t *tick);
void fixture_tick_stop(struct fixture *f, uv_timer_t *tick);
void fixture_run_ms(struct fixture *f, uint64_t ms);

/* Of the fixture's kind; etcd is started when it is not there. */
ep_status fixture_open(struct fixture *f, struct ep_error *error);
/* The same, of a test's state; on etcd the case is skipped where there is none. */
struct fixture *fixture_begin(void **state);
void fixture_close(struct fixture *f);
/* Others beside the fixture's own; on etcd. */
struct ep_store *open_at(struct fixture *f, const struct ep_store_etcd *options);
struct ep_store *open_url(struct fixture *f, const char *url);
void close_store(struct fixture *f, struct ep_store *store);

/* ---- asking ------------------------------------------------------------------------ */

struct written {
    bool done;
    struct ep_error error;
    uint64_t revision;
};
void on_written(const struct ep_error *error, uint64_t revision, void *user);
struct written commit_to(struct fixture *f, struct ep_store *store, const struct ep_store_write *writes,
                         size_t n);
struct written commit(struct fixture *f, const struct ep_store_write *writes, size_t n);
struct written put(struct fixture *f, const char *key, const char *value, uint64_t expected);
/* Until it is taken, as etcd may be on its way back: the revision. */
uint64_t put_surely(struct fixture *f, const char *key, const char *value);

struct listed {
    bool done;
    struct ep_error error;
    size_t n;
    char text[512]; /* "key=value " each */
    uint64_t newest;
};
void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user);
struct listed list_of(struct fixture *f, struct ep_store *store, const char *prefix);
struct listed list(struct fixture *f, const char *prefix);
/* Until etcd answers, which may stand still. */
struct listed list_surely(struct fixture *f, const char *prefix);

/* What a watch has told: "[a=1 b=2 ]" is the whole, "a=1 " a change, "-a " a deletion, "| " ends a call. */
struct seen {
    char text[2048]; /* "[all of a whole ]a=1 b=2 | -c | ": with a bar behind each commit, however many come at once */
    size_t used, calls, wholes, changes;
    uint64_t newest;
    bool disorder; /* a revision came twice, or late */
};
void on_changes(const struct ep_store_changes *changes, void *user);

struct told {
    unsigned begun, failed;
    struct ep_error error;
};
void on_session(const struct ep_error *error, void *user);

/* ---- etcd -------------------------------------------------------------------------- */

bool cluster_installed(void);
void cluster_start(struct cluster *c, size_t n, const char *directory); /* until it answers */
void cluster_start_member(struct cluster *c, size_t member);
void cluster_kill_member(struct cluster *c, size_t member);
void cluster_stop(struct cluster *c); /* kills what runs */
char *cluster_url(const struct cluster *c, const char *prefix, char *url, size_t size);
/* POST to its JSON gateway, GET where there is no json; waits until it answers. */
void cluster_post(const struct cluster *c, const char *path, const char *json);
/* Tells an etcd that ran out of space that it has some again. */
void cluster_disarm(const struct cluster *c);

/* A program of Python's; its source is in the fixture. */
void proxy_start(struct proxy *p, int to);
void proxy_stop(struct proxy *p); /* cuts what goes through it */
/* From now on answers are swallowed; connections end a little later. */
void proxy_swallow(struct proxy *p);

/* As fork(): the child ends with this process, and with its case if that fails. */
pid_t process_fork(void);
void process_end(pid_t *pid); /* killed, unless it is 0; then it is 0 */

int free_port(void);
void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
