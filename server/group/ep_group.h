/*
 * ep_group: expert groups of this node: spec, placement, epochs, ranks and their state machine.
 * Everything here is owned by the loop's thread.
 *
 * A group has a desired spec (stored) and a status.  An epoch is one agreed configuration: sizes,
 * placement, one window per rank and what serves it.  Updating what an epoch is made of forms epoch
 * n + 1 beside n; ranks attached to n stay there until they leave, new ones join n + 1, and n is
 * retired with its last rank.
 *
 * Phases (the transition function is group_phase.c, a table):
 *   PENDING -> FORMING -> READY <-> DEGRADED      a rank is absent <-> all present or expected
 *   READY, DEGRADED -> RECONFIGURING -> READY     a new epoch is being formed
 *   FORMING, RECONFIGURING -> FAILED              why: status.reason
 *   any -> DRAINING -> DELETED
 *
 * Ranks: EXPECTED -> ATTACHED -> (QUARANTINED ->) ABSENT -> ATTACHED ...; when the last rank of an
 * epoch has left, all are EXPECTED again.
 */
#ifndef EP_GROUP_H
#define EP_GROUP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "ep_engine.h"
#include "ep_error.h"
#include "ep_node.h"
#include "ep_store.h"
#include "ep_team.h"
#include "ep/v1/admin.pb-c.h"
#include "ep/v1/attach.pb-c.h"
#include "ep/v1/common.pb-c.h"

struct ep_groups;

/* Loads the groups from the store and forms them; on_ready once, when all of that is over. */
ep_status ep_groups_open(uv_loop_t *loop, struct ep_node *node, struct ep_store *store,
                         void (*on_ready)(const struct ep_error *error, void *user), void *user,
                         struct ep_groups **out, struct ep_error *error);

/* Detaches everybody (listeners hear DETACHED), stops the executors, frees the windows; the stored
 * specs stay.  Then on_closed. */
void ep_groups_close(struct ep_groups *groups, void (*on_closed)(void *user), void *user);

/* ---- operators ------------------------------------------------------------------ */

/*
 * Answers of changes come after the store has them.  group NULL on error, else valid during the call.
 * One change of a group at a time: a second one is refused with EP_FAILED_PRECONDITION.
 * delete answers when the group, its name and its memory are gone; but with workers that have to be
 * told (force) it answers at once, and the group is DRAINING until they have let go.
 */
typedef void (*ep_group_done_fn)(const struct ep_error *error, const Ep__V1__Group *group, void *user);

void ep_groups_create(struct ep_groups *groups, const char *name, const Ep__V1__GroupSpec *spec,
                      bool dry_run, ep_group_done_fn done, void *user);
/* fields: names of GroupSpec fields to take from spec. */
void ep_groups_update(struct ep_groups *groups, const char *name, uint64_t revision,
                      const Ep__V1__GroupSpec *spec, char *const *fields, size_t n_fields, bool dry_run,
                      ep_group_done_fn done, void *user);
void ep_groups_delete(struct ep_groups *groups, const char *name, bool force, ep_group_done_fn done,
                      void *user);

/* Messages owned by the group, valid until the loop runs again; NULL + error when there is none. */
const Ep__V1__Group *ep_groups_get(struct ep_groups *groups, const char *name, struct ep_error *error);
size_t ep_groups_count(const struct ep_groups *groups);
const Ep__V1__Group *ep_groups_at(struct ep_groups *groups, size_t index);

/* Told of every change; returned by add, removed by remove. */
struct ep_group_watch;
typedef void (*ep_group_watch_fn)(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user);
struct ep_group_watch *ep_groups_watch(struct ep_groups *groups, ep_group_watch_fn fn, void *user);
void ep_groups_unwatch(struct ep_group_watch *watch);

/* Counters of all ranks of one group (name) or all (NULL); free with ep_groups_stats_clear. */
void ep_groups_stats(struct ep_groups *groups, const char *name, Ep__V1__Stats *stats);
void ep_groups_stats_clear(Ep__V1__Stats *stats);

/*
 * One rank's counters, all epochs since the server started added up: they only grow, as metrics must.
 * False: no epoch of the group has had that rank.
 */
bool ep_groups_rank_counters(const struct ep_groups *groups, const char *name, uint32_t rank,
                             struct ep_rank_counters *out);

/* Tells every attached worker to leave when it suits (node drain, shutdown). */
void ep_groups_announce_drain(struct ep_groups *groups, const char *reason);
uint32_t ep_groups_attachments(const struct ep_groups *groups);
/* Multiprocessors of a GPU that are held by ranks whose ops the server runs. */
uint32_t ep_groups_sms(const struct ep_groups *groups, uint32_t device);

/* ---- attachments ------------------------------------------------------------------ */

/* A claimed rank.  Its life: claim -> [attach ->] release.  Freed by release, or by writer_gone when
 * release said that the writer is alive.  It may outlive the groups. */
struct ep_membership;

struct ep_worker {
    pid_t pid;
    uid_t uid;
    const char *name;
    Ep__V1__Executor executor; /* asked for */
};

struct ep_membership_info {
    const char *group;
    uint32_t rank;
    uint64_t epoch;
    const Ep__V1__GroupSpec *spec; /* defaults filled in, placement homes listed */
    uint64_t window_bytes;
    Ep__V1__Executor executor;  /* settled: server or direct */
    const uint8_t *device_uuid; /* EP_CUDA_UUID_BYTES of the GPU that the window is on; NULL: host */
    bool mps;                   /* the server's work on that GPU goes through an MPS server */
    uint64_t state_bytes;       /* direct: of the rank's state */
    uint32_t sms;               /* direct: multiprocessors that its kernels may fill; 0: all */
    uint32_t memories;          /* that the worker gets: its window; direct: its state, its peers' windows */
};

/* One of them. */
struct ep_membership_memory {
    enum { EP_MEMORY_OWN_WINDOW, EP_MEMORY_STATE, EP_MEMORY_PEER_WINDOW } kind;
    uint32_t rank; /* whose */
    uint64_t bytes;
    int fd; /* the caller's to close */
};

/* What a claimed rank hears; `user` is of the claim.  Called on the loop's thread. */
enum ep_group_event {
    EP_GROUP_RANK_LOST, EP_GROUP_RANK_JOINED, EP_GROUP_EPOCH, EP_GROUP_DRAINING, EP_GROUP_DETACHED
};
typedef void (*ep_group_event_fn)(enum ep_group_event event, uint32_t rank, uint64_t epoch,
                                  const char *text, void *user);

/*
 * Reserves a rank of the newest epoch: rank < 0 takes the lowest free one.  An executor that the backend
 * has not, or that the group does not allow this worker, is refused.  EP_ALREADY_EXISTS: it is
 * held, and the text says by whom (pid, uid, name, since when).  EP_UNAVAILABLE: it will be free
 * without anybody's doing, as soon as executors have stopped or an old worker's process has ended; ask
 * again after the next change.  EP_RESOURCE_EXHAUSTED: executor server, and the rank's GPU is full; the text
 * says of what.
 */
ep_status ep_groups_claim(struct ep_groups *groups, const char *group, int32_t rank,
                          const struct ep_worker *worker, ep_group_event_fn on_event, void *user,
                          struct ep_membership **out, struct ep_error *error);
/* Would a claim of this rank (< 0: of any) be granted now? */
bool ep_groups_rank_free(struct ep_groups *groups, const char *group, int32_t rank);
void ep_membership_info(const struct ep_membership *membership, struct ep_membership_info *info);
/* The index'th, 0 being the own window; EP_DETACHED when the group is gone. */
ep_status ep_membership_memory(const struct ep_membership *membership, uint32_t index,
                               struct ep_membership_memory *out, struct ep_error *error);

/* The worker has connected: the rank joins the team, its executor runs; peers are told. */
ep_status ep_membership_attach(struct ep_membership *membership, const struct ep_worker *worker,
                               struct ep_error *error);

/* GPU memory of an attached worker, as ep_executor_register() and ep_executor_unregister(). */
void ep_membership_register(struct ep_membership *membership, const struct ep_executor_region *region,
                            ep_region_done_fn on_done, void *user);
void ep_membership_unregister(struct ep_membership *membership, uint32_t number, ep_region_done_fn on_done,
                              void *user);

/*
 * The worker is gone, or leaves.  The rank is absent at once and peers go on; `reason` says why.
 * writer_alive: its process may still write the window; the rank stays quarantined until
 * ep_membership_writer_gone().  Otherwise it is claimable as soon as its executor has stopped.
 */
void ep_membership_release(struct ep_membership *membership, const char *reason, bool writer_alive);
void ep_membership_writer_gone(struct ep_membership *membership);

#endif
