/*
 * crew: the workers' processes.  A worker has the number of its rank, but for those of soaks that follow their group:
 * there shared->rank_of says whose rank it has.  Everything that waits here is bounded: a worker that ends is noticed
 * at once, and one that makes no progress after a while; what it wrote to stderr is shown.
 */
#ifndef CREW_H
#define CREW_H

#include <sys/types.h>

#include "bench.h"

struct crew_member {
    pid_t pid;  /* 0: not running */
    int socket; /* -1 */
    int log;    /* what it writes to stdout and stderr */
};

struct crew {
    struct bench_shared *shared;
    size_t shared_bytes;
    int memory;
    uint32_t ranks; /* workers that there are or were */
    bool finishes;  /* once cancelled it still waits for its workers: what they do comes to an end */
    struct crew_member member[BENCH_MAX_RANKS];
};

/* Set by a signal handler: every wait ends with EP_CANCELLED, but for those of a crew that finishes. */
extern volatile int crew_cancelled;

/* Shares a copy of the configuration; starts nobody. */
ep_status crew_open(const struct bench_config *config, struct crew *crew, struct ep_error *error);
void crew_close(struct crew *crew); /* stops who is left */

ep_status crew_start(struct crew *crew, uint32_t rank, struct ep_error *error);
ep_status crew_start_all(struct crew *crew, struct ep_error *error);
/* Lets them leave, and kills those that do not. */
void crew_stop(struct crew *crew, uint64_t mask);
void crew_stop_all(struct crew *crew);
void crew_kill(struct crew *crew, uint32_t rank);

/* One command to the ranks in `mask` (bit r), and their answers.  The first failure is returned, named by
 * its rank, after all have answered or nothing more is to be expected. */
ep_status crew_send(struct crew *crew, uint64_t mask, enum bench_command command, uint32_t case_index,
                    uint32_t flags, struct ep_error *error);
ep_status crew_collect(struct crew *crew, uint64_t mask, struct ep_error *error);
ep_status crew_do(struct crew *crew, uint64_t mask, enum bench_command command, uint32_t case_index,
                  uint32_t flags, struct ep_error *error);

/* Has one of them answered, or ended?  Waits for that at most wait_ms. */
bool crew_answered(const struct crew *crew, uint64_t mask, int wait_ms);
/* Grows while any of them gets on. */
uint64_t crew_progress(const struct crew *crew);

uint64_t crew_all(const struct crew *crew);
struct bench_rank_result *crew_result(const struct crew *crew, uint32_t rank);

#endif
