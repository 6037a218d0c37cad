/*
 * bench: what the parts of ep-bench share.
 *
 *   options      the command line                       options.c
 *   routing      which experts a token goes to           routing*.c
 *   inputs       every rank's inputs, from the seed      inputs.c
 *   experts      what experts make of rows               experts.c
 *   verify       results against the reference           verify.c
 *   soak         random ops for a while, and kills       soak_plan.c, soak.c
 *   follow       a soak over changes of its group        soak_follow.c, worker_follow.c
 *   worker       one rank: a process of its own          worker*.c
 *   crew         the workers' processes and messages     crew.c
 *   sweep        the cases, one after the other          sweep.c, kill.c
 *   group        the group, through the Admin service    group.c
 *   private      --spawn: a server for this run          private_server.c
 *   figures      --reference                             figures.c
 *   report       table, JSON, CSV                        report*.c
 *
 * The coordinator starts one worker per rank (exec of itself with --worker).  Commands and answers
 * are small messages on a socket pair; the configuration and results are in shared memory.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_error.h"
#include "ep_reference.h"
#include "ep_types.h"
#include "routing.h"

enum {
    BENCH_MAX_HOMES = 8192,
    BENCH_MAX_CASES = 1024,
    BENCH_MAX_RANKS = 64,
    BENCH_MAX_SERVERS = 16,
    BENCH_MAX_EPOCHS = 1024,
    BENCH_MAX_ITERS = 100000,
    BENCH_TEXT = 320,
    BENCH_NODES_TEXT = 4 * BENCH_MAX_RANKS
};

enum bench_dtype {
    BENCH_BF16,
    BENCH_FP16,
    BENCH_FP32,
    BENCH_FP8,
    BENCH_FP16_TO_FP8,
    BENCH_FP32_TO_FP8,
    BENCH_FP8_GIVEN,
    BENCH_DTYPES
};

struct bench_dtype_info {
    const char *name;
    ep_dtype input, wire, combine;
    const char *powers; /* fp8: its name with scales in UE8M0 */
};
extern const struct bench_dtype_info bench_dtypes[BENCH_DTYPES];
bool bench_quantised(enum bench_dtype dtype); /* on the way */

/*
 * What is measured of a case.  Backward, as in training: after a dispatch and its combine, the gradients of the
 * combine's output are dispatched with the handle's routing, and a combine of the experts' gradients gives those of
 * the dispatch's input and of the weights.
 */
enum bench_pass { BENCH_FORWARD, BENCH_BACKWARD };
const char *bench_pass_name(enum bench_pass pass);
bool bench_pass_exists(ep_mode mode, enum bench_pass pass);

const char *bench_mode_name(ep_mode mode);
const char *bench_scales_name(ep_scale_format format);
/* An ep_executor, or this: ranks of odd numbers have server, the others direct. */
#define BENCH_EXECUTOR_MIXED 3u
const char *bench_executor_name(uint32_t executor);
const char *bench_layout_name(ep_layout layout);
bool bench_layout_exists(ep_mode mode, ep_layout layout);

struct bench_case {
    ep_mode mode;
    ep_layout layout;
    enum bench_dtype dtype;
    uint32_t tokens;
    ep_scale_format scales; /* of fp8; else 0 */
    enum bench_pass pass;
    uint32_t ht_sms; /* multiprocessors that HT ops fill; 0: all.  LL's: whatever its ranks have */
};
bool bench_scaled(const struct bench_case *of);          /* travels in fp8 */
const char *bench_case_dtype(const struct bench_case *of); /* as "fp8/ue8m0" */
void bench_case_text(const struct bench_case *of, char *text, size_t size); /* for people */

/* AUTO: what the group or the node has; settled before a worker begins. */
enum bench_backend { BENCH_BACKEND_AUTO, BENCH_BACKEND_HOST, BENCH_BACKEND_CUDA };
extern const char *const bench_backends[3];

enum bench_output { BENCH_TABLE, BENCH_JSON, BENCH_CSV };

/* Everything that was asked for.  Plain data: workers find a copy in shared memory. */
struct bench_config {
    char server[BENCH_MAX_SERVERS][256]; /* "unix:PATH", of nodes of one cluster; empty: the library's default */
    uint32_t servers;                    /* how many were given */
    /* Settled before a worker begins: */
    uint8_t server_of[BENCH_MAX_RANKS]; /* the one on each rank's node */
    uint32_t node_of[BENCH_MAX_RANKS];  /* which node that is: the same number, the same node */
    char group[128];  /* empty: one of our own */
    bool spawn;
    enum bench_backend backend;
    uint32_t executor; /* that is asked for */
    uint32_t ht_sms;   /* that ranks join with: of the first case, then of the one that is run */
    bool own_memory;   /* inputs and outputs in memory that workers register, not in the arena */
    uint32_t graph;                         /* pairs in a CUDA graph; 0: none is timed */
    uint32_t replays;                       /* of that, with other inputs each time */
    uint32_t ranks, experts, hidden, top_k; /* 0: not given */
    uint32_t alignment;                     /* of packed */
    struct routing_spec routing;
    char routing_text[1100];
    uint32_t iters, warmup;
    uint64_t seed;
    bool verify;
    int32_t zero_rank; /* -1: none */
    double drop;
    bool bias; /* combines of forward passes add one to each token */
    enum bench_output output;
    char record[1024];
    uint32_t timeout_ms;
    int32_t kill_rank, kill_case; /* -1: none */
    uint32_t soak_s, soak_kill_s; /* instead of a sweep, for so long, and a worker is killed so often; 0: not */
    uint64_t soak_ops;            /* the soak ends with that one; 0: it does not */
    bool follow;                  /* the soak goes on over changes of its group; cases are as asked for */
    bool keep_going, reference;
    bool modes_given, tokens_given; /* else cases that an existing group cannot hold are left out */
    bool ht_sms_given;
    uint32_t n_cases;
    struct bench_case cases[BENCH_MAX_CASES];
    uint32_t n_homes; /* of an existing group with an explicit placement; 0: contiguous */
    struct ep_ref_home homes[BENCH_MAX_HOMES];
};

/* How the ranks lie on nodes: "2x4", 2 nodes with 4 ranks each, or "5+3". */
void bench_nodes_text(const struct bench_config *config, char text[static BENCH_NODES_TEXT]);

/* ---- one rank's results --------------------------------------------------------- */

struct bench_verdict {
    uint32_t runs;          /* verified runs made */
    uint64_t mismatches;    /* elements, counts and rows that were not as they must be */
    uint64_t hash;          /* of all outputs of the last run */
    double max_error;       /* of a combine's element */
    double max_bound_ratio; /* of error and bound: over 1 is wrong */
    char first[BENCH_TEXT]; /* the first thing that was wrong */
};

struct bench_sample { /* one iteration, us */
    float dispatch, combine, pair, service;
    float copy_gbps; /* dispatch: rows laid down per time that was not waiting */
};

/* What a rank's soak has come to. */
struct bench_soak {
    uint64_t dispatches[EP_MODE_HT + 1][EP_LAYOUT_FLAT + 1], combines[EP_MODE_HT + 1][EP_LAYOUT_FLAT + 1];
    uint64_t dropped, masked; /* routes of no home, dispatches without everybody */
    uint64_t waited_ns, longest_ns; /* of an op at its executor */
    uint64_t gaps, gap_ns;          /* between two results, over no turn */
};

/* In shared memory.  The worker writes, and the coordinator reads after the answer; the first
 * block is read at any time. */
struct bench_rank_result {
    uint64_t progress;    /* grows while the worker gets on */
    uint64_t soak_next;   /* steps before it are over; the coordinator sets it for one that joins */
    uint64_t epoch;       /* that the rank is in */
    uint32_t at_the_edge; /* the victim stands in the middle of an op */
    uint32_t gone;        /* its rank has no place in the group's next epoch */

    double open_us, join_us, claim_wait_us; /* attaching; waiting until the rank could be claimed */
    double context_us; /* making a GPU's context, before that */
    uint64_t window_bytes, arena_bytes;
    struct bench_verdict verdict;
    uint64_t wire_bytes, logical_bytes; /* of one dispatch and combine */
    double chain_us;                    /* period of a pair, back to back */
    double graph_us;                    /* of a pair in a CUDA graph: median of its launches */
    uint32_t backend, executor;         /* ep_backend, ep_executor */
    uint32_t ht_sms;                    /* ep_rank_info */
    uint64_t ops_finished, ops_failed;
    double longest_op_us;
    struct bench_soak soak;
    uint32_t samples;
    struct bench_sample sample[]; /* [iters] */
};

/* How far a soak may go.  The coordinator writes, workers look between chapters. */
struct bench_leash {
    uint64_t granted; /* steps before it may be taken */
    uint32_t closed;  /* and no more ever */
    uint32_t reserved;
};

#define BENCH_NOT_BEGUN UINT64_MAX /* soak_next of a rank whose epoch's ops have not begun */

/* An epoch that was seen by the coordinator, and what came of it. */
struct bench_epoch {
    uint64_t epoch;
    uint32_t ranks, node_of[BENCH_MAX_RANKS]; /* as in bench_config */
    uint64_t begins;   /* 1 + the step with which its ops begin; 0: none has gone over to it */
    uint64_t pause_ns; /* longest at any rank: from its last result before to its first one after */
};

struct bench_shared {
    struct bench_config config;
    struct bench_leash leash;
    uint32_t rank_of[BENCH_MAX_RANKS]; /* of each worker: its own number, but of those that come later */
    uint32_t n_epochs;                 /* with --follow; the coordinator adds them */
    struct bench_epoch epoch[BENCH_MAX_EPOCHS];
    uint64_t results, result_stride; /* offset of worker 0's, and from one to the next */
};

static inline struct bench_rank_result *bench_result(struct bench_shared *shared, uint32_t worker)
{
    return (struct bench_rank_result *)((char *)shared + shared->results + worker * shared->result_stride);
}

/* ---- messages ------------------------------------------------------------------- */

enum bench_command {
    BENCH_ATTACH = 1, /* join; BENCH_FLAG_RETRY: until the rank can be claimed */
    BENCH_PREPARE,    /* memory and inputs of a case */
    BENCH_VERIFY,     /* BENCH_FLAG_MASKED: one run, some ranks are gone */
    BENCH_TIME,       /* BENCH_FLAG_VICTIM, _MASKED: latencies only */
    BENCH_TIME_GRAPH, /* replays of a CUDA graph */
    BENCH_SOAK,       /* from soak_next on, until the leash is closed */
    BENCH_END,        /* of the case */
    BENCH_EXIT
};
enum { BENCH_FLAG_RETRY = 1, BENCH_FLAG_MASKED = 2, BENCH_FLAG_VICTIM = 4 };

struct bench_message {
    uint32_t command; /* enum bench_command; an answer repeats it */
    uint32_t case_index, flags;
    int32_t status; /* ep_status */
    char text[EP_ERROR_TEXT_MAX];
};

/* The hidden --worker=RANK,SOCKET,MEMORY.  Returns the process's exit code. */
int bench_worker(const char *argument);

#endif
