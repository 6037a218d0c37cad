/*
 * sweep: runs the cases one after the other and gathers what the ranks measured.
 *
 * A case: all ranks prepare, verify (one run against the reference, two that must equal it bit by bit,
 * the last with the handle's cached routing and, in LL, sent and completed apart), then time:
 * each op alone, and pairs of dispatch and combine back to back; on GPUs also in a graph.
 *
 * Per iteration the slowest rank counts; percentiles are over iterations.
 */
#ifndef SWEEP_H
#define SWEEP_H

#include "crew.h"
#include "group.h"

struct bench_quantiles {
    double p50, p90, p99;
};

struct case_result {
    struct bench_case of;
    struct ep_error error; /* why it could not be finished; EP_OK otherwise */
    bool measured;         /* the timed part is there */
    bool verified;
    uint64_t mismatches, hash; /* hash: of all ranks' outputs */
    char first[BENCH_TEXT + 32];
    double max_error, max_bound_ratio;
    struct bench_quantiles dispatch, combine, pair; /* us */
    double service_us;                /* p50 of what the client saw of a pair beyond the executor's time */
    double pair_us;                   /* period, back to back */
    double graph_us;                  /* period in a CUDA graph; 0: not measured */
    double wire_bytes, logical_bytes; /* of a dispatch and a combine, mean over the ranks */
    double wire_gbps, logical_gbps;   /* per rank: those bytes per period */
    double copy_gbps;                 /* rank-major: all ranks' payload per time not spent waiting */
    uint64_t buffer_bytes;            /* window of a rank without its arena */
    uint32_t sms;                     /* multiprocessors that HT ops fill at most, at the rank with the most; 0: no such */
};

struct kill_result {
    bool done;
    uint32_t rank, case_index;
    uint32_t survivors;
    uint64_t ops_expected, ops_finished, ops_failed; /* of the survivors */
    double longest_op_us;
    bool masked_verified;
    double claim_wait_us;      /* from the new worker's first try until the rank could be claimed */
    double attach_us, join_us; /* of the new worker: connecting and joining; joining alone */
    double context_us;         /* of the new worker, before it attached: making a GPU's context */
};

struct soak_result {
    bool run;
    struct ep_error error;    /* what ended it before its time; EP_OK otherwise */
    double seconds;
    uint64_t steps;           /* that all ranks there have taken */
    struct bench_soak totals; /* of all ranks, killed ones as far as they came */
    uint64_t wrong;           /* elements, counts and rows */
    uint32_t kills;
    double longest_claim_us;  /* until a new worker could claim the rank */
    uint32_t turns, added, removed; /* --follow; workers that came for new ranks, and that had no place any more */
    double step_us;           /* mean, from result to result of a rank */
    struct soak_turn {
        uint64_t epoch, step; /* gone over to, and its first step */
        double pause_us;      /* at the slowest rank */
    } turn[BENCH_MAX_EPOCHS];
    double pause_p50_us, pause_p99_us, pause_max_us; /* of these */
};

struct sweep {
    struct bench_config config;
    struct soak_result soak;
    uint32_t n_results;
    struct case_result *results; /* [config.n_cases] */
    struct kill_result kill;
    uint32_t executor;         /* of the ranks */
    double attach_us, join_us, context_us; /* slowest rank at the start */
};

/* The error of a case is in its result; what is returned stopped the sweep. */
ep_status sweep_run(struct sweep *sweep, struct ep_error *error);
void sweep_free(struct sweep *sweep);

/* EP_OK when every case was run and verified (or need not be); else the worst of them. */
ep_status sweep_verdict(const struct sweep *sweep);

/* All ranks at work, and what attaching took. */
ep_status sweep_attach(struct crew *crew, struct sweep *sweep, struct ep_error *error);

/* soak.c: instead of the cases.  What went wrong is in the result, what is returned kept it from being run. */
ep_status soak_run(struct sweep *sweep, struct group_link *link, struct ep_error *error);

/* soak_follow.c: the group that a soak follows. */
struct follower {
    struct group_link *link; /* NULL: it does not */
    struct crew *crew;
    uint64_t look_ns;        /* of the last look */
    struct group_view view;
    uint32_t servers;
    char node[BENCH_MAX_SERVERS][64];    /* that each server is on */
    uint32_t server_of[BENCH_MAX_RANKS]; /* of each worker */
};
ep_status follower_open(struct follower *f, struct group_link *link, struct crew *crew, struct ep_error *error);
/* Looks at the group when the last time is a while ago; workers find its newest epoch in shared memory then. */
ep_status follower_look(struct follower *f, struct ep_error *error);
/* Starts a worker for a rank that waits for its first one and is not that of any of the workers `taken`, and has it
 * attach; *worker: its number, which answers when it has, or BENCH_MAX_RANKS when there is none to start. */
ep_status follower_add(struct follower *f, uint64_t taken, uint32_t *worker, struct ep_error *error);
/* Turns, from shared memory. */
void follower_sum(const struct follower *f, struct soak_result *result);

/* kill.c: the middle of a prepared and verified case; afterwards everybody is there again. */
ep_status kill_run(struct crew *crew, const struct bench_config *config, uint32_t case_index,
                   struct kill_result *kill, struct ep_error *error);

/* summary.c: what the ranks measured, as one case's result. */
void summarise(const struct crew *crew, struct case_result *result);
void summarise_verdicts(const struct crew *crew, uint64_t mask, struct case_result *result);
double percentile(double *values, uint32_t n, double p); /* sorts */

uint64_t soak_ops(const struct bench_soak *totals);
double soak_ops_per_second(const struct soak_result *soak);

/* progress.c: where we are, on stderr. */
void progress(uint32_t index, uint32_t n, const struct bench_case *of, const char *what);
void progress_soak(uint64_t steps, uint32_t kills);
void progress_end(void);

#endif
