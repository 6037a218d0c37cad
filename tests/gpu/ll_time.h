/*
 * ll_time: how long LL ops take.
 *
 * Every figure is the slowest rank's, and of many such the median: samples of one number belong together,
 * as all ranks begin at once and each op waits for the same op of its peers.
 */
#ifndef LL_TIME_H
#define LL_TIME_H

#include "pass.h"

struct ll_times { /* us */
    double dispatch, combine;             /* between events around each, launched one by one */
    double dispatch_kernel, combine_kernel; /* by the GPU's clock, from an op's start to its end; mean */
    double pair;                          /* of pairs chained in a captured graph */
    double changing;                      /* of pairs one by one, of which some dozens have a token less than the next */
    double push;                          /* the dispatch's remote rows with plain stores; 0: not known */
    double push_gbps;
    uint32_t pairs;                       /* in the graphs that were timed */
};

struct ll_time_options {
    uint32_t ranks, gpus, pairs;
    bool served; /* executor server, by another thread of the process, and no push */
    bool polls;  /* and blocks wait for the bell, not its streams */
    bool verify; /* before anything is timed, results are compared with the reference once */
};

/* Makes a group for these ops. */
ep_status ll_time(const struct ep_cuda_api *api, const struct shape *shape, const struct ll_time_options *o,
                  struct ll_times *times, struct ep_error *error);

#endif
