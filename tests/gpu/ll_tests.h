/*
 * What the files of ll_device share.
 *
 *   ll_device.c    options, the list of cases, the closing line
 *   ll_shapes.c    one pass after the other, for every layout, format and shape
 *   ll_order.c     several handles, skipped combines, late and released ones, two groups, outputs that are too small
 *   ll_members.c   ranks that are absent, leave, return or are late
 *   ll_graph.c     a captured pair that is replayed with other inputs
 *   ll_mailbox.c   executor server: workers that do as they like
 *   ll_regions.c   executor server: and memory of theirs
 *   ll_forge.c     executor server: and what they forge in their windows
 *   ll_soak.c      random ops for as long as one likes
 */
#ifndef LL_TESTS_H
#define LL_TESTS_H

#include "pass.h"

struct ll_setting {
    const struct ep_cuda_api *api;
    uint32_t ranks, gpus;
    uint32_t sms;        /* multiprocessors that ops of a rank fill, at most; 0: all, or its share */
    bool served;         /* executor server */
    bool pcie;           /* as where PCIe joins the GPUs */
    uint32_t timeout_ms; /* of ops that nobody delays */
    uint32_t late_ms;    /* and of those for which a rank is late; 0: as is right for GPUs */
    uint64_t seed;
};

typedef ep_status ll_case_fn(const struct ll_setting *setting, const struct shape *shape,
                             struct ep_error *error);

/* Where a case's ranks are. */
enum ll_nodes { LL_ANY_NODES, LL_ONE_NODE, LL_SEVERAL_NODES };

struct ll_case {
    const char *name; /* NULL: says what the shape is */
    ll_case_fn *run;
    struct shape shape;
    uint32_t least_ranks;
    bool served; /* for executor server only */
    enum ll_nodes nodes;
};

/* ---- what cases are made of ---------------------------------------------------------- */

/* A world, and a pass per rank and place: handles are numbered like places. */
enum { LL_PLACES = 2 };
struct ll_passes {
    struct world *world;
    const struct shape *shape;
    struct shape second; /* of the passes of place 1: of the other mode, in a group of both */
    uint32_t places, timeout_ms;
    uint64_t seed;
    uint32_t round; /* of ll_three_passes: each has inputs of its own, the same ones at all ranks */
    bool joined;    /* the last rank has, so others may begin; atomic */
    struct pass *pass[WORLD_MAX_RANKS][LL_PLACES];
};

ep_status ll_open(const struct ll_setting *setting, const struct shape *shape, uint32_t places,
                  struct ll_passes *passes, struct ep_error *error);
void ll_close(struct ll_passes *passes);

/* Runs fn(passes, rank) on the ranks of the mask, each on a thread. */
typedef ep_status (*ll_fn)(struct ll_passes *passes, uint32_t rank, struct ep_error *error);
ep_status ll_each(struct ll_passes *passes, uint64_t mask, ll_fn fn, struct ep_error *error);

/* Three whole passes of place 0; the second form on all ranks of the mask. */
ep_status ll_three_passes(struct ll_passes *passes, uint32_t rank, struct ep_error *error);
ep_status ll_each_three(struct ll_passes *passes, uint64_t mask, struct ep_error *error);

/* Mask of the ranks that a node has. */
uint64_t ll_ranks_on(const struct ll_passes *passes, uint32_t node);

/* ---- a worker that is not trusted (ll_mailbox.c) --------------------------------------- */

/* Opens a world for the case, one pass a rank, and runs fn on all ranks. */
ep_status ll_run_case(const struct ll_setting *setting, const struct shape *shape, ll_fn fn, struct ep_error *error);
/* Without a check: that is the server's. */
ep_status ll_ring_and_wait(struct world_rank *rank, const struct ep_op *op, struct ep_error *error);
/* Until the rank's dispatch of this number, of LL or of HT, runs. */
ep_status ll_wait_begun(struct world_rank *rank, bool ht, uint64_t number, struct ep_error *error);
/* Is this what the report says of the first failure since it was cleared?  Clears it. */
ep_status ll_check_failure(struct world_rank *rank, ep_status expected, const char *what, uint32_t i,
                           struct ep_error *error);

/* ---- cases --------------------------------------------------------------------------- */

/* Against the reference, again bit for bit, with a cached handle in two halves, with other rows. */
ll_case_fn ll_case_shape;

ll_case_fn ll_case_interleaved;
ll_case_fn ll_case_crossed;
ll_case_fn ll_case_halves;
ll_case_fn ll_case_skipped;
ll_case_fn ll_case_released;
ll_case_fn ll_case_released_by_one;
ll_case_fn ll_case_stale;
ll_case_fn ll_case_behind;
ll_case_fn ll_case_two_groups;
ll_case_fn ll_case_overflow;

ll_case_fn ll_case_absent;
ll_case_fn ll_case_leaves_dispatch;
ll_case_fn ll_case_leaves_combine;
ll_case_fn ll_case_leaves_in_dispatch;
ll_case_fn ll_case_leaves_in_combine;
ll_case_fn ll_case_joins_in_dispatch;
ll_case_fn ll_case_joins_between;
ll_case_fn ll_case_absent_in_a_row;
ll_case_fn ll_case_gates_by_chance;
ll_case_fn ll_case_late_dispatch;
ll_case_fn ll_case_late_credit;
ll_case_fn ll_case_late_combine;

ll_case_fn ll_case_graph;

ll_case_fn ll_case_wrong_ops;
ll_case_fn ll_case_unexpected;
ll_case_fn ll_case_expected;
ll_case_fn ll_case_storm;
ll_case_fn ll_case_closed;
ll_case_fn ll_case_end;
ll_case_fn ll_case_churn;

ll_case_fn ll_case_regions;
ll_case_fn ll_case_wrong_regions;
ll_case_fn ll_case_lost_regions;
ll_case_fn ll_case_held_regions;

ll_case_fn ll_case_forged;

/* `pairs` random dispatches, most of them with their combine; ht: of both modes. */
ep_status ll_soak(const struct ll_setting *setting, uint64_t pairs, bool ht, struct ep_error *error);

#endif
