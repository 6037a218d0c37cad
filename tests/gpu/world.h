/*
 * world: the ranks of a group in one process, on one GPU or several.
 *
 * Rank r is on GPU r mod N.  Each has a window, which all of the GPUs can use, a state, a stream and what
 * launches its ops; a test gives each rank a thread.  What a server would do about membership is done here
 * by writing states, and it can run the ops too (executor server): then world_run() rings for a rank's op, and
 * a thread per rank serves it on a stream of its own.  No wait is without an end: a stream that does not come to one shows every rank's
 * state and ends the program.
 */
#ifndef WORLD_H
#define WORLD_H

#include <pthread.h>

#include "ep_cuda.h"

enum { WORLD_MAX_RANKS = 64 }; /* bits of a mask, and ep-bench's */

struct world;

struct world_rank {
    struct world *world;
    uint32_t rank, device;
    struct ep_cuda_memory *window_memory, *state_memory;
    uint8_t *window;               /* GPU memory, like the state */
    struct ep_device_state *state;
    void *stream;
    struct ep_cuda_rank *ops;    /* one of them: who runs its ops */
    struct ep_cuda_serve *serve;
    struct ep_cuda_ringer *ringer; /* when there is a serve, as the next one */
    pthread_t server;              /* keeps posting */
};

/* Executor server: what waits for the end of an op that was rung for, and for the bell, see ep_cuda.h: streams; a kernel for
 * the end; and a warp for the bell.  By turns: ranks, and of each the worlds that a program opens. */
enum world_waits { WORLD_BY_TURNS, WORLD_STREAMS, WORLD_KERNEL, WORLD_POLLED };

struct world {
    const struct ep_cuda_api *api;
    uint32_t ranks, gpus;
    bool served;
    bool whole_lines; /* of every state */
    enum world_waits waits;
    uint32_t max_sms;
    uint64_t stuck_ns; /* a stream that is not empty after so long never will be */
    struct ep_layout_map map;
    struct ep_placement placement;
    uint64_t from[WORLD_MAX_RANKS];    /* the number that each rank takes part from */
    uint64_t ht_from[WORLD_MAX_RANKS]; /* and the HT number */
    struct world_rank rank[WORLD_MAX_RANKS];
};

struct world_options {
    uint32_t gpus, timeout_ms;
    uint32_t max_sms; /* of a rank; 0: all, or its share of a GPU */
    bool served; /* executor server */
    bool pcie;   /* as where PCIe joins the GPUs */
    enum world_waits waits;
    struct ep_limits limits;
    struct ep_placement placement; /* the world's from here on, also when opening fails */
};

ep_status world_open(const struct ep_cuda_api *api, const struct world_options *options, struct world **out,
                     struct ep_error *error);
void world_close(struct world *world); /* NULL is allowed */

static inline uint64_t world_bit(uint32_t rank)
{
    return 1ull << rank;
}

static inline uint64_t world_all(const struct world *world)
{
    return UINT64_MAX >> (WORLD_MAX_RANKS - world->ranks);
}

/* fn on a thread for each rank of the mask; the first failure.  A rank that fails leaves. */
typedef ep_status (*world_fn)(struct world_rank *rank, void *arg, struct ep_error *error);
ep_status world_each(struct world *world, uint64_t mask, world_fn fn, void *arg, struct ep_error *error);

/* ---- ops ----------------------------------------------------------------------------- */

/* To a rank's server, unchecked. */
ep_status world_ring(struct world_rank *rank, const struct ep_op *op, struct ep_error *error);
/* Checks and enqueues.  EP_OP_COMPLETE and EP_OP_RELEASE too. */
ep_status world_run(struct world_rank *rank, const struct ep_op *op, struct ep_error *error);
/* Until the rank's stream is empty. */
ep_status world_wait(struct world_rank *rank, struct ep_error *error);
/* part: EP_DEVICE_DISPATCH or EP_DEVICE_COMBINE. */
ep_status world_record(struct world_rank *rank, uint32_t handle, uint32_t part,
                       struct ep_device_record *record, struct ep_error *error);

/* ---- memory -------------------------------------------------------------------------- */

/* `offset` is from the start of the rank's window.  In stream order, and over when they return. */
ep_status world_put(struct world_rank *rank, uint64_t offset, const void *from, uint64_t bytes,
                    struct ep_error *error);
ep_status world_get(struct world_rank *rank, uint64_t offset, void *to, uint64_t bytes,
                    struct ep_error *error);
ep_status world_fill(struct world_rank *rank, uint64_t offset, uint8_t value, uint64_t bytes,
                     struct ep_error *error);

/* ---- membership, as a server changes it; ops may be under way ------------------------ */

ep_status world_set_timeout(struct world *world, uint32_t timeout_ms, struct ep_error *error);
/* The rank takes part in nothing any more: its peers stop waiting for it, and then it for them. */
ep_status world_leave(struct world *world, uint32_t rank, struct ep_error *error);
/* All begin anew at number 1, as in a group that nobody was in; no stream has work. */
ep_status world_reset(struct world *world, uint32_t timeout_ms, struct ep_error *error);
/* Of dispatches. */
struct world_numbers {
    uint64_t ll, ht;
};
/* The first ones that nobody has begun. */
ep_status world_next(struct world *world, struct world_numbers *next, struct ep_error *error);
/* It takes part again from these on, and has forgotten its handles.  Who has begun the LL number has not yet looked for the second
 * time who takes part. */
ep_status world_join_at(struct world *world, uint32_t rank, const struct world_numbers *from, struct ep_error *error);
/* From the first that nobody has begun; nothing runs, or what runs is held. */
ep_status world_join(struct world *world, uint32_t rank, struct ep_error *error);
/* Several nodes: no dispatch begins until that ends, so that a rank can join between two of them. */
ep_status world_hold(struct world *world, bool held, struct ep_error *error);
/* The last number of LL, or of HT, that it has begun. */
ep_status world_begun(struct world_rank *rank, bool ht, uint64_t *number, struct ep_error *error);

#endif
