/*
 * A host team and its ranks, on one node or on several within this process: one thread per rank, windows that are plain
 * mappings, nodes that are connected over loopback.
 *
 * Values are chosen so that every format holds them exactly: small integers times weights that are
 * quarters.  Expectations are worked out from all ranks' inputs, token by token.
 *
 *   host_fixture.c   the group: its teams, windows and threads
 *   host_play.c      inputs, ops, what experts make of tokens
 *   host_expect.c    what must have come of them
 *   host_pass.c      passes over all of it
 */
#ifndef EP_HOST_FIXTURE_H
#define EP_HOST_FIXTURE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ep_clock.h"
#include "ep_kernels.h"

#define MAX_NODES 4u
#define MAX_R 72u
#define MAX_T 16u
#define MAX_K 4u
#define HIDDEN 272u /* two whole fp8 blocks and a piece, one whole chunk of a sum and a piece */
#define LL_TOKENS 8u
#define HT_TOKENS 12u
#define SILENCE_MS 20000u /* no shorter than the machine may stand still */

/* Runs in any thread, where cmocka's assertions may not. */
#define CHECK(condition, ...)                                                        \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);          \
            fprintf(stderr, __VA_ARGS__);                                            \
            fprintf(stderr, "\n");                                                   \
            abort();                                                                 \
        }                                                                            \
    } while (0)

/* ---- a group ------------------------------------------------------------------------- */

struct fixture;
typedef void (*rank_fn)(struct fixture *f, uint32_t rank, void *arg);

struct fixture {
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_host_team *team;              /* of node 0 */
    struct ep_host_team *teams[MAX_NODES];
    uint32_t nodes, node[MAX_R];            /* which node each rank is on */
    uint32_t lost[MAX_NODES];               /* atomic: bit n of [m]: node m has lost node n */
    bool away[MAX_R];                       /* between leave_over() and join_over() */
    uint8_t *window[MAX_R];
    uint64_t used[MAX_R]; /* of the arena */
    uint32_t R, E, L, K;
};

struct thread {
    pthread_t id;
    struct fixture *f;
    uint32_t rank;
    rank_fn fn;
    void *arg;
};

struct inputs {
    uint32_t tokens[MAX_R], k;
    int64_t topk[MAX_R][MAX_T][MAX_K];
    float weight[MAX_R][MAX_T][MAX_K];
    bool weights;
};

struct config {
    ep_mode mode;
    ep_layout layout;
    ep_dtype input, wire, combine;
    ep_scale_format scales;
    uint32_t alignment, index_bytes, seed;
    bool send_only, cached, bias, grads, in_place;
    struct inputs in;
    struct ep_op dispatch[MAX_R], comb[MAX_R];
    struct ep_op_result dispatched[MAX_R];
};

struct one_op {
    struct ep_op op;
    struct ep_op_result result;
    uint32_t over; /* atomic */
};

struct churn {
    struct config *c;
    bool ll_only;
    uint32_t stop; /* atomic: a survivor is through */
};

/* ---- host_fixture.c ------------------------------------------------------------------------ */

/* One node. */
struct fixture *fixture_new(uint32_t ranks, bool replicas, uint32_t timeout_ms);
/* node[r]: where rank r is, 0 to the largest of them. */
struct fixture *fixture_new_over(uint32_t ranks, const uint32_t *node, bool replicas, uint32_t timeout_ms);
/* The same in steps, for nodes in processes of their own: no team yet; one node's. */
struct fixture *fixture_begin_over(uint32_t ranks, const uint32_t *node, bool replicas);
void fixture_make_team(struct fixture *f, uint32_t own, struct ep_host_net *net, uint32_t timeout_ms);
void leave_over(struct fixture *f, uint32_t rank);
void join_over(struct fixture *f, uint32_t rank);
struct ep_host_team *team_of(struct fixture *f, uint32_t rank);
void fixture_free(struct fixture *f);
struct ep_span take(struct fixture *f, uint32_t r, uint64_t bytes);
void *at(struct fixture *f, uint32_t r, struct ep_span span);
void start(struct thread *t, struct fixture *f, uint32_t rank, rank_fn fn, void *arg);
void parallel(struct fixture *f, rank_fn fn, void *arg);
ep_status execute(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result);
void must(struct fixture *f, uint32_t r, const struct ep_op *op, struct ep_op_result *result);

/* ---- host_play.c --------------------------------------------------------------------------- */

void put(ep_dtype d, void *row, uint32_t h, double v);
double get(ep_dtype d, const void *row, uint32_t h);
uint32_t row_bytes(ep_dtype d);
double x_value(uint32_t r, uint32_t t, uint32_t h);
uint32_t next_random(uint32_t *seed);
void random_inputs(struct fixture *f, struct inputs *in, uint32_t max_tokens, uint32_t seed);
bool home(struct fixture *f, const struct inputs *in, uint32_t s, uint32_t t, uint32_t j, uint32_t *rank,
          uint32_t *local);
void build_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op);
double expert_factor(int64_t e);
void build_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle, struct ep_op *op);
uint64_t scale_bytes(const struct config *c);
float grad_value(uint32_t s, uint32_t t, uint32_t l);

/* ---- host_expect.c ------------------------------------------------------------------------- */

void check_dispatch(struct fixture *f, const struct config *c, uint32_t d, const struct ep_op *op,
                    const struct ep_op_result *result);
void check_numbers(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op_result *result);
void check_combine(struct fixture *f, const struct config *c, uint32_t r, const struct ep_op *op);

/* ---- host_pass.c --------------------------------------------------------------------------- */

void complete(struct fixture *f, uint32_t r, uint32_t handle, struct ep_op_result *result);
void run_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle);
void run_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle);
void pass(struct fixture *f, uint32_t r, void *arg);
void passes(struct fixture *f, ep_mode mode, ep_layout layout, ep_dtype input, ep_dtype wire,
            ep_scale_format scales, uint32_t n);
void all_dtypes(struct fixture *f, ep_mode mode, ep_layout layout);
void run_one(struct fixture *f, uint32_t r, void *arg);
void simple_config(struct config *c, struct fixture *f, ep_mode mode, ep_layout layout, uint32_t tokens);
void build_all(struct fixture *f, struct config *c, uint32_t handle);
void wander(struct fixture *f, uint32_t r, void *arg); /* arg: struct config */
/* Two ranks that stay and one that is made to leave; arg: struct churn. */
void survivor(struct fixture *f, uint32_t r, void *arg);
void victim(struct fixture *f, uint32_t r, void *arg);

#endif
