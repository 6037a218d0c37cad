/*
 * What a GIN plugin must do, one behaviour a case. A case is a function that each rank runs, in a process of its own,
 * with the plugin loaded and no communicator yet.
 *
 *   case_signals.c   signals, and what stands around them
 *   case_puts.c      sizes, memory, order, several communicators and contexts
 *   case_queues.c    many operations at once
 *   case_regions.c   registration, and puts that are not inside
 *   case_faults.c    ranks that stop, die or leave, strangers, peers that never come
 *   case_churn.c     communicators that come and go
 */
#ifndef GIN_TESTS_H
#define GIN_TESTS_H

#include "exchange.h"

typedef ep_status gin_case_fn(struct player *player, struct ep_error *error);

struct gin_case {
    const char *name;
    gin_case_fn *run;
    uint32_t least_ranks;
};

gin_case_fn gin_case_tables;
gin_case_fn gin_case_signal_alone;
gin_case_fn gin_case_increments;
gin_case_fn gin_case_values;

gin_case_fn gin_case_order;
gin_case_fn gin_case_sizes;
gin_case_fn gin_case_self;
gin_case_fn gin_case_large;
gin_case_fn gin_case_far;
gin_case_fn gin_case_no_progress;
gin_case_fn gin_case_host_source;
gin_case_fn gin_case_host_target;
gin_case_fn gin_case_communicators;
gin_case_fn gin_case_contexts;

gin_case_fn gin_case_full_queues;
gin_case_fn gin_case_many;
gin_case_fn gin_case_shuffled;
gin_case_fn gin_case_source_again;
gin_case_fn gin_case_unequal;

gin_case_fn gin_case_regions;
gin_case_fn gin_case_regions_change;
gin_case_fn gin_case_outside;

gin_case_fn gin_case_stopped;
gin_case_fn gin_case_killed;
gin_case_fn gin_case_closed;
gin_case_fn gin_case_closed_busy;
gin_case_fn gin_case_strangers;
gin_case_fn gin_case_never_connects;
gin_case_fn gin_case_died_before;

gin_case_fn gin_case_churn;
gin_case_fn gin_case_restart;

/* A communicator of all ranks with one context. */
ep_status gin_open(struct player *player, struct comm **comm, struct ep_error *error);
/* When all ranks have done what is under way: the region and the communicator. */
ep_status gin_close(struct comm *comm, struct region *region, struct ep_error *error);

/* Printed, never judged. Runs on all ranks; rank 0 prints. */
ep_status gin_bench(struct player *player, struct ep_error *error);

#endif
