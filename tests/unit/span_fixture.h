/*
 * span_fixture: three servers of one world in this process, on one loop, for groups over several nodes.  What the data
 * path would do is left out: nets connect at once, and a node's team takes all ranks for its own.
 */
#ifndef EP_SPAN_FIXTURE_H
#define EP_SPAN_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cluster_double.h"
#include "ep_clock.h"

#define STATE(name) EP__V1__RANK_STATE__RANK_STATE_##name
#define PHASE(name) EP__V1__PHASE__PHASE_##name

#define SERVERS  3
#define BUDGET   (1ull << 28)
#define WAIT_NS  (90ull * 1000000000ull) /* a part that nobody decides about goes after 30 s */
#define NO_STEP  UINT32_MAX

struct server {
    struct ep_node *node;
    struct ep_cluster *cluster;
    struct ep_groups *groups; /* NULL: it is not there */
    bool ready;
};

struct fixture {
    uv_loop_t loop;
    uv_timer_t awake; /* a wait that is over must not sleep for ever */
    char directory[64], path[96];
    struct ep_store *store;
    struct world *world;
    struct server servers[SERVERS];
    uint32_t steps, crash_at, victim; /* of a walk */
    bool crashed, lost;
};

extern const char *const span_names[SERVERS]; /* "a", "b", "c" */

/* Runs the loop until the condition holds; not for ever. */
#define WAIT(f, condition)                                                                                            \
    do {                                                                                                              \
        const uint64_t end = ep_clock_ns() + WAIT_NS;                                                                 \
        while (!(condition)) {                                                                                        \
            if (ep_clock_ns() > end)                                                                                  \
                span_in_vain(f, #condition);                                                                          \
            uv_run(&(f)->loop, UV_RUN_ONCE);                                                                          \
        }                                                                                                             \
    } while (0)

void span_in_vain(const struct fixture *f, const char *what); /* fails the test */

int span_setup(void **state); /* all three, ready, and one leads */
int span_teardown(void **state);
void span_start(struct fixture *f, uint32_t server);
/* Crashed before, or stopped as it should be. */
void span_stop(struct fixture *f, uint32_t server);
bool span_all_ready(const struct fixture *f);
uint32_t span_leader(const struct fixture *f); /* SERVERS: none */
/* It is told of no records of groups, until it is again: of all that are there then, as a whole, as where the store does not
 * have the changes between any more. */
void span_hold_view(struct fixture *f, uint32_t server, bool held);
/* Members of the newest epoch lose each other, as where a connection between them ends. */
void span_tear(struct fixture *f, uint32_t one, uint32_t other);

/* What became of a change. */
struct answer {
    bool done;
    struct ep_error error;
};
void span_on_answer(const struct ep_error *error, const Ep__V1__Group *group, void *user); /* user: struct answer */
Ep__V1__GroupSpec span_spec(uint32_t hidden, uint32_t ranks);                              /* 12 experts, small */

#endif
