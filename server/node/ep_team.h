/*
 * ep_team: the ranks of one group and epoch on this node, on whichever backend they are; and what the
 * server does for a rank while a worker is attached to it.
 *
 * Owned by the loop's thread; only destroy may run on another one.
 *
 *   host   ep_host_team.  An engine of the server executes the ops of an attached rank.
 *   cuda   memory of the GPUs: each rank's window and, beside it, its state (device_state.h).  The server
 *          writes who takes part, and reads what was counted.  Workers launch the kernels themselves
 *          (executor direct), or hand their ops to the server, which does (executor server) and maps memory that
 *          they register.  No call of a team waits for a kernel.  Over several nodes (a span) ops reach the others
 *          through NCCL, and it is the server that runs them.
 */
#ifndef EP_TEAM_H
#define EP_TEAM_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "ep_engine.h"
#include "ep_error.h"
#include "ep_kernels.h"
#include "ep_node.h"

struct ep_team;

/* ---- a team over several nodes --------------------------------------------------- */

#define EP_TEAM_CARD_BYTES 288u
struct ep_team_card { uint8_t bytes[EP_TEAM_CARD_BYTES]; }; /* how the other nodes reach this one; as secret as a key */
struct ep_team_net;                                         /* this node's end of a team's network */

struct ep_team_net_rank {
    uint32_t rank, device; /* device: of the node */
};
struct ep_team_net_options {
    bool first;                          /* the first node, whose card has more to say */
    const char *group;                   /* of nets of one group with the same ranks the next goes on where it can */
    uint32_t ranks;                      /* R */
    const struct ep_team_net_rank *here; /* cuda: those of this node, one per GPU */
    uint32_t n;
};
ep_status ep_team_net_listen(struct ep_node *node, const struct ep_team_net_options *options, struct ep_team_net **out,
                             struct ep_team_card *card, struct ep_error *error);
/* cuda, before it is connected: the windows of the ranks that are here, in that order, which others put to. */
void ep_team_net_expect(struct ep_team_net *net, struct ep_node_window *const *windows);
/* Collective: every node, with the cards of all.  Blocks until all are connected, timeout_ms at most, so on a thread
 * of the pool; the error names the node's index.  After a failure the net can only be closed. */
ep_status ep_team_net_connect(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes, uint32_t own,
                              uint32_t timeout_ms, struct ep_error *error);
/* One that no team has.  May block for a moment. */
void ep_team_net_close(struct ep_team_net *net);

/* Each node has a team, with the ranks that are there.  What others send waits until all of these have a window. */
struct ep_team_span {
    uint32_t nodes, own;
    const uint32_t *node;    /* [R] which node each rank is on; looked at when the team is created only */
    struct ep_team_net *net; /* connected; the team's from then on, when that could be created */
    /* Loop's thread, once per node: there is no path to it any more, and its ranks have been left. */
    void (*on_lost)(uint32_t node, const char *why, void *user);
    void *user;
};

/* Memory that a span takes beside windows: of each node, and of each rank, of that what ep_node_window_extend() wants.
 * where: [R] which node each rank is on.  None with one node. */
struct ep_team_beside {
    uint64_t node, rank, window;
};
struct ep_team_beside ep_team_beside(Ep__V1__Backend backend, const struct ep_layout_map *map, const uint32_t *where);

/* ---- teams ------------------------------------------------------------------------- */

struct ep_team_options {
    struct ep_node *node;
    uv_loop_t *loop;
    const struct ep_layout_map *map;         /* outlives the team */
    const struct ep_placement *placement;    /* the same */
    const uint32_t *devices;                 /* [R] of the node: where each rank is */
    uint64_t epoch;
    uint32_t timeout_ms;
    const struct ep_team_span *span;         /* NULL: all ranks are here.  Else devices[] of the others do not matter */
};

ep_status ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error);
/* No executor may be there, and nobody may use the windows.  Windows are not the team's. */
void ep_team_destroy(struct ep_team *team);

void ep_team_set_timeout(struct ep_team *team, uint32_t timeout_ms);

/* The rank's window, zeroed, before anybody attaches to it. */
ep_status ep_team_set_window(struct ep_team *team, uint32_t rank, struct ep_node_window *window,
                             struct ep_error *error);

/*
 * Membership.  A new team expects every rank: ops wait for all.  One that is absent from the beginning leaves at once.
 *   leave      the rank turns absent: nobody waits for it any more, and its own running op ends.
 *   leave_all  all do.
 *   join       it takes part again, from the next op that no rank has begun.  Only after leave, when none
 *              of its ops runs.
 *   reset      every rank is expected again; only when nobody is attached.
 * An error of join or reset leaves the ranks absent.  With a span ranks join by hold and admit (below), and nothing is
 * reset; leave takes ranks of other nodes too.
 */
void ep_team_leave(struct ep_team *team, uint32_t rank);
void ep_team_leave_all(struct ep_team *team);
ep_status ep_team_join(struct ep_team *team, uint32_t rank, struct ep_error *error);
ep_status ep_team_reset(struct ep_team *team, struct ep_error *error);
/*
 * With a span: another node has been left for good.  The path to it ends (on_lost), also for that node, whose ranks would
 * otherwise go on among themselves and not know why.
 */
void ep_team_cut(struct ep_team *team, uint32_t node);
/* What leads to the other nodes may be broken: the next team does not go on with it. */
void ep_team_distrust(struct ep_team *team);

/*
 * A rank joins on all nodes at the same numbers: each node is held and tells what its ranks have begun, and each admits
 * the rank from numbers that are above all of those (the largest + 1).  The rank's own node admits it first: what ranks
 * elsewhere send it from then on it must not miss.  Between hold and admit no rank here begins an op; running ones go
 * on.  Several may hold; a hold ends by itself after hold_ms.
 */
struct ep_team_numbers { uint64_t ll, ht; };
ep_status ep_team_hold(struct ep_team *team, uint32_t hold_ms, uint64_t *hold, struct ep_team_numbers *begun,
                       struct ep_error *error);
/* Ends the hold.  EP_ABORTED: it had ended by itself; the rank has not joined here, and must leave everywhere. */
ep_status ep_team_admit(struct ep_team *team, uint64_t hold, uint32_t rank, const struct ep_team_numbers *from,
                        struct ep_error *error);
void ep_team_unhold(struct ep_team *team, uint64_t hold);

/* The first numbers that the rank takes part in, since it was expected or joined last. */
struct ep_team_numbers ep_team_first(const struct ep_team *team, uint32_t rank);

/*
 * The rank's worker is gone, and nothing of the server's touches its window.  True: the next worker will
 * read nothing of it.  False: the backend has no way to see to that, the rank wants another window.
 */
bool ep_team_clean(struct ep_team *team, uint32_t rank);

/*
 * Something of the server's has not ended when the executor of the rank (< 0: of any) had to stop, and may
 * still use every window of the team.  So the rank has no further executor, numbers do not start anew, and
 * neither team nor windows are ever given back.  rank < 0: also as long as a GPU has not answered what the server had
 * to give up reading; the rank may be taken again meanwhile.
 */
bool ep_team_stuck(const struct ep_team *team, int32_t rank);

/*
 * How long `rank` has waited for `peer` in all its ops, and the longest of these waits.  False: the
 * backend does not know.
 */
bool ep_team_peer_wait(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                       uint64_t *max_ns);

/* Rows that the rank has sent to an expert; on GPUs an estimate. */
uint64_t ep_team_expert_rows(const struct ep_team *team, uint32_t rank, uint32_t expert);

/* Who runs its own ops needs its rank's state: bytes (0: the backend has none) and a descriptor, which is
 * the caller's to close. */
uint64_t ep_team_state_bytes(const struct ep_team *team);
ep_status ep_team_state_export(const struct ep_team *team, uint32_t rank, int *fd, struct ep_error *error);

/* ---- an attached rank ------------------------------------------------------------- */

struct ep_executor;

struct ep_executor_options {
    uint32_t rank;
    bool direct;      /* the worker runs its own ops */
    /* cuda, where it does not: multiprocessors that its kernels may fill, and of these, those that HT ops fill; 0: all */
    uint32_t max_sms, max_ht_sms;
    bool polls;       /* cuda, likewise: its doorbell is polled, ep_cuda_rank_options */
    struct ep_rank_counters *counters; /* outlive the executor; several may use them in turn */
    /* On the loop's thread, after an op timed out (coalesced). */
    void (*on_timeout)(const struct ep_engine_timeout *timeout, void *user);
    /* On the loop's thread: what ep_executor_refresh() has not waited for is there. */
    void (*on_refreshed)(void *user);
    /* On the loop's thread, once at most: no op of the rank will be run any more. */
    void (*on_failed)(const struct ep_error *why, void *user);
    void *user;
};

ep_status ep_executor_start(struct ep_team *team, const struct ep_executor_options *options,
                            struct ep_executor **out, struct ep_error *error);
/*
 * True: the counters, and what ep_team_expert_rows() says, have what was done before since_ns of ep_clock_ns(), which is
 * not in the future; or cannot be had, which is logged.  False: they are being read, and this is to be asked again.  They
 * are read every second without being asked for, and a GPU that does not answer keeps nobody else waiting.
 */
bool ep_executor_refresh(struct ep_executor *executor, uint64_t since_ns);

/* GPU memory of the worker's own, which it hands on. */
struct ep_executor_region {
    uint32_t number;        /* of the region (window.h) */
    int fd;                 /* of VMM memory; -1: the worker sent none */
    uint64_t offset, bytes; /* where the region lies in it */
};

/* On the loop's thread, once: it is done, or error says why not. */
typedef void (*ep_region_done_fn)(const struct ep_error *error, void *user);

/*
 * Ops of the rank may use it from then on; or it is unmapped, when no op uses it any more.  on_done runs before these
 * return or later, and no later than on_stopped.  One request at a time: EP_UNAVAILABLE, the last one is not done.
 * EP_UNIMPLEMENTED: the server runs no ops of the rank on a GPU.  fd is taken over.
 */
void ep_executor_register(struct ep_executor *executor, const struct ep_executor_region *region,
                          ep_region_done_fn on_done, void *user);
void ep_executor_unregister(struct ep_executor *executor, uint32_t number, ep_region_done_fn on_done, void *user);

/*
 * ep_team_leave() must have been called, so that the running op ends.  on_stopped runs on the loop's
 * thread, later, once nothing of the executor touches the window, or the rank is stuck; it is freed then.
 */
void ep_executor_stop(struct ep_executor *executor, void (*on_stopped)(void *user), void *user);

#endif
