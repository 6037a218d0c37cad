/*
 * group_fixture: a node, a store and its groups in a directory of their own, on one loop; workers
 * that claim ranks and ring their windows' doorbells as libepclient does.
 */
#ifndef EP_GROUP_FIXTURE_H
#define EP_GROUP_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <uv.h>

#include "cluster_double.h"
#include "ep_group.h"
#include "ep_kernels.h"

struct fixture {
    uv_loop_t loop;
    char directory[64], path[96];
    const char *name; /* of the node; NULL: n1 */
    uint32_t devices;
    uint64_t budget;
    uint32_t sms_per_rank;
    bool polls;
    const struct ep_cuda_api *cuda; /* GPUs instead of host devices */
    struct ep_worker identity;      /* who claims: this process */
    struct ep_node *node;
    struct ep_store *store;
    struct world *world;
    struct ep_cluster *cluster; /* of this node alone */
    struct ep_groups *groups;
    bool ready;
};

int fixture_setup(void **state); /* 4 devices, 1 GiB */
int fixture_setup_gpus(void **state, const struct ep_cuda_api *cuda); /* 1 GiB on each */
int fixture_teardown(void **state);
void fixture_open(struct fixture *f); /* and until ready */
void fixture_close(struct fixture *f);
void fixture_restart(struct fixture *f);

/* Runs the loop until the condition holds. */
#define RUN_UNTIL(f, condition)                                                                              \
    do {                                                                                                     \
        while (!(condition))                                                                                 \
            uv_run(&(f)->loop, UV_RUN_ONCE);                                                                 \
    } while (0)

/* ---- operators ------------------------------------------------------------------- */

struct answer {
    bool done;
    struct ep_error error;
    Ep__V1__Group *group; /* a copy */
};
void answer_clear(struct answer *answer);
void on_answer(const struct ep_error *error, const Ep__V1__Group *group, void *answer);

/* 4 ranks, 8 experts, hidden 64, top-2, small and default sizes. */
Ep__V1__GroupSpec small_spec(void);
/* Each fills *answer and fails the test when it does not end as expected. */
void create(struct fixture *f, const char *name, const Ep__V1__GroupSpec *spec);
struct answer create_refused(struct fixture *f, const char *name, const Ep__V1__GroupSpec *spec);
struct answer update(struct fixture *f, const char *name, uint64_t revision, const Ep__V1__GroupSpec *spec,
                     const char *field);
struct answer delete (struct fixture *f, const char *name, bool force);
const Ep__V1__Group *get(struct fixture *f, const char *name); /* NULL: not there */
int rank_state(struct fixture *f, const char *name, uint32_t rank);

/* ---- workers --------------------------------------------------------------------- */

struct worker {
    struct fixture *f;
    struct ep_membership *membership;
    struct ep_membership_info info;
    struct ep_layout_map map;
    uint8_t *window; /* mapped by the descriptor, as a worker does */
    uint64_t window_bytes;
    uint32_t slot;
    unsigned lost, joined, epochs, draining, detached; /* events heard */
    uint32_t lost_rank;
    uint64_t epoch_told;
    char text[256];
    struct ep_error attached; /* what attaching came to */
};
void on_attached(const struct ep_error *error, void *worker);

ep_status claim(struct fixture *f, struct worker *worker, const char *group, int32_t rank,
                struct ep_error *error);
/* As the Attach service does: EP_UNAVAILABLE is tried again as the loop goes on. */
void claim_when_free(struct fixture *f, struct worker *worker, const char *group, int32_t rank);
void attach(struct worker *worker);
void join(struct fixture *f, struct worker *worker, const char *group, int32_t rank); /* both */
void *map_window(const struct worker *worker); /* once more */
void release(struct worker *worker, bool writer_alive);
void writer_gone(struct worker *worker);

/* An LL dispatch of no tokens: an op that every rank takes part in. */
void ring_dispatch(struct worker *worker);
/* Its result, waited for while the loop runs. */
struct ep_op_result result_of(struct worker *worker);
bool is_done(const struct worker *worker);

#endif
