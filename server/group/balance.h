/*
 * balance: homes of experts by their loads.  Decides; does no I/O.
 *
 * The idea is that of EPLB (github.com/deepseek-ai/EPLB): experts with much load get more homes, which share it, and
 * homes go to ranks so that all have about the same to do, over the nodes first, then over the ranks of each node.
 * Here every rank has the same number of homes, or one more than others; no expert has two on one rank; and the same
 * input gives the same homes.
 *
 * How good that is: a home goes to the rank that has the least so far, the heaviest first, so that no rank has more
 * than the mean and one home's load, as long as ranks are not full; that they are costs something where many experts
 * have next to no load.
 */
#ifndef EP_GROUP_BALANCE_H
#define EP_GROUP_BALANCE_H

#include "ep_error.h"
#include "ep_kernels.h"

struct ep_balance {
    uint32_t ranks, experts;
    uint32_t redundant;   /* homes beyond one for each expert; at most experts * (ranks - 1) */
    const uint64_t *load; /* [experts] */
    const uint32_t *node; /* [ranks] which one, from 0; NULL: all are on one */
    uint64_t *steps;      /* gets how many it took: it is run where nothing may take long; NULL: nobody counts */
};

/* homes: room for experts + redundant; by expert, then rank. */
ep_status ep_balance_homes(const struct ep_balance *balance, struct ep_expert_home *homes, struct ep_error *error);

/* Of each rank, an expert's load being shared out evenly over its homes; ranks: [placement->ranks]. */
void ep_balance_ranks(const struct ep_placement *placement, const uint64_t *load, double *ranks);

/* The fullest rank's load by the mean; 1 where there is no load at all. */
double ep_balance_peak(const struct ep_placement *placement, const uint64_t *load);

#endif
