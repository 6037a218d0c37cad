/*
 * ep_engine: executes the ops of one rank.  One thread per engine.
 *
 * It sleeps on the window's `wake` word, takes ops off the ring in order, copies and checks each
 * descriptor (ep_op_check), runs it on the backend and writes the result.  A bad descriptor ends
 * with a result that names the field and disturbs nobody.  Idle engines use no CPU.
 */
#ifndef EP_ENGINE_H
#define EP_ENGINE_H

#include <stdint.h>

#include <uv.h>

#include "ep_error.h"
#include "ep_kernels.h"

struct ep_engine;

enum ep_op_class {
    EP_CLASS_LL_DISPATCH, EP_CLASS_LL_COMBINE, EP_CLASS_HT_DISPATCH, EP_CLASS_HT_COMBINE,
    EP_CLASS_COMPLETE, EP_CLASS_RELEASE, EP_OP_CLASSES
};
const char *ep_op_class_name(enum ep_op_class op); /* "ll_dispatch" ... */

/* Counters of one rank.  The engine's thread writes, anyone reads (relaxed atomics). */
struct ep_op_counters {
    uint64_t count, errors, timeouts, tokens, wire_bytes, busy_ns, wait_ns, max_wait_ns;
    uint64_t buckets[16]; /* of busy time: bucket i counts ops under 2^i us, the last all others */
};
struct ep_rank_counters {
    struct ep_op_counters op[EP_OP_CLASSES];
    uint64_t dropped_routes;
    uint64_t bad_descriptors;
};

struct ep_engine_timeout { /* the last late rank seen, for the group's record */
    uint64_t number, waited_us, time_us;
    uint32_t op_class, wait_phase, late_rank;
};

struct ep_engine_options {
    uv_loop_t *loop;
    struct ep_host_team *team;
    const struct ep_layout_map *map;
    uint32_t rank;
    uint64_t epoch;
    void *window;
    struct ep_rank_counters *counters; /* outlives the engine; several engines may use it in turn */
    /* On the loop's thread, after an op timed out (coalesced). */
    void (*on_timeout)(const struct ep_engine_timeout *timeout, void *user);
    void *user;
};

/* Formats the window's control block (magic, limits, empty ring), then starts to serve it. */
ep_status ep_engine_start(const struct ep_engine_options *options, struct ep_engine **out,
                          struct ep_error *error);

/*
 * ep_host_team_leave() must have been called, so that the running op ends.  on_stopped runs on the
 * loop's thread once no code of the engine touches the window; the engine is freed then.
 */
void ep_engine_stop(struct ep_engine *engine, void (*on_stopped)(void *user), void *user);

#endif
