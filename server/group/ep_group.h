/*
 * ep_group: expert groups: spec, placement, epochs, ranks and their state machine.
 * Everything here is owned by the loop's thread.
 *
 * Every server knows all groups, from their records in the store, and serves the ranks that are on its node.  One
 * server leads: it plans which rank is where, has the nodes prepare their parts, and commits the records.  With one
 * node that is the same server, by the same code.
 *
 * A group has a desired spec (stored) and a status.  An epoch is one agreed configuration: sizes,
 * placement, one window per rank and what serves it.  Updating what an epoch is made of forms epoch
 * n + 1 beside n; ranks attached to n stay there until they leave, new ones join n + 1, and n is
 * retired with its last rank.  Where all workers of n follow, they go over to n + 1 together, at one boundary between
 * their steps (turn.c), once each has attached to its rank of n + 1, and no rank there is expected any more; until then
 * the group is RECONFIGURING, and the reason says whom it waits for.
 *
 * Phases (the transition function is group_phase.c, a table):
 *   PENDING -> FORMING -> READY <-> DEGRADED      a rank is absent <-> all present or expected
 *   READY, DEGRADED -> RECONFIGURING -> READY     a new epoch is being formed, or workers are to go over to it
 *   FORMING, RECONFIGURING -> FAILED              why: status.reason
 *   any -> DRAINING -> DELETED
 *
 * Ranks: EXPECTED -> ATTACHED -> (QUARANTINED ->) ABSENT -> ATTACHED ...; when the last rank of an
 * epoch has left, all are EXPECTED again (over several nodes: in a further epoch).  Ranks that are absent when workers
 * that follow get a new epoch are ABSENT there from the beginning, and so is one that is lost before it came over.
 */
#ifndef EP_GROUP_H
#define EP_GROUP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "ep_cluster.h"
#include "ep_engine.h"
#include "ep_error.h"
#include "ep_node.h"
#include "ep_store.h"
#include "ep_team.h"
#include "ep/v1/admin.pb-c.h"
#include "ep/v1/attach.pb-c.h"
#include "ep/v1/common.pb-c.h"
#include "ep/v1/node.pb-c.h"

struct ep_groups;

/* Loads the groups from the store and forms them; on_ready once, when all of that is over. */
ep_status ep_groups_open(uv_loop_t *loop, struct ep_node *node, struct ep_store *store, struct ep_cluster *cluster,
                         void (*on_ready)(const struct ep_error *error, void *user), void *user,
                         struct ep_groups **out, struct ep_error *error);

/* Detaches everybody (listeners hear DETACHED), stops the executors, frees the windows; the stored
 * specs stay.  Then on_closed. */
void ep_groups_close(struct ep_groups *groups, void (*on_closed)(void *user), void *user);

/* ---- operators ------------------------------------------------------------------ */

/*
 * Changes are for the server that leads; others answer EP_UNAVAILABLE and say who does.  Answers come after the store
 * has them, and this server and the members that are there have put them into service.  group: NULL on error, else valid
 * during the call.
 * One change of a group at a time: a second one is refused with EP_FAILED_PRECONDITION.
 * delete answers when the group, its name and its memory are gone; but with workers that have to be
 * told (force) it answers at once, and the group is DRAINING until they have let go.
 */
/* asker: who asked, for the history; NULL: this server. */
typedef void (*ep_group_done_fn)(const struct ep_error *error, const Ep__V1__Group *group, void *user);

void ep_groups_create(struct ep_groups *groups, const char *name, const Ep__V1__GroupSpec *spec,
                      bool dry_run, const Ep__V1__Asker *asker, ep_group_done_fn done, void *user);
/* fields: names of GroupSpec fields to take from spec; a dry run without any says what is there. */
void ep_groups_update(struct ep_groups *groups, const char *name, uint64_t revision,
                      const Ep__V1__GroupSpec *spec, char *const *fields, size_t n_fields, bool dry_run,
                      const Ep__V1__Asker *asker, ep_group_done_fn done, void *user);
void ep_groups_delete(struct ep_groups *groups, const char *name, bool force, const Ep__V1__Asker *asker,
                      ep_group_done_fn done, void *user);

/* [a-z0-9]([-a-z0-9]{0,61}[a-z0-9])? */
ep_status ep_group_name_check(const char *name, struct ep_error *error);

/*
 * Of a spec that was asked for: takes a token out of it and puts its hash there, which is all that these functions know.
 * To be called first.  by_server: another server asks, and may have done that already; nobody else may give a hash.
 */
ep_status ep_groups_seal_token(Ep__V1__GroupSpec *spec, bool by_server, struct ep_error *error);

/* The last changes of a group, the oldest first; they are the group's, valid until the loop runs again. */
#define EP_GROUP_HISTORY 64u
ep_status ep_groups_history(struct ep_groups *groups, const char *name, Ep__V1__GroupChange *list[EP_GROUP_HISTORY],
                            size_t *n, struct ep_error *error);

typedef void (*ep_groups_wait_fn)(const struct ep_error *error, void *user);

/*
 * To be waited for before a change is asked for here.  done: once there is a leader, and, where that is this server, its
 * view has all that the store had when this was called, of nodes and of groups, and it is not at work on the group of
 * its own accord (another epoch, a turn).  Or when time is up, or the store is away: then the change itself is refused
 * with what is amiss, or, where only the view is behind, *error says so.
 */
void ep_groups_before_change(struct ep_groups *groups, const char *name, uint32_t within_ms, ep_groups_wait_fn done,
                             void *user);

/*
 * To be waited for before what is here is told.  done: once this server's view, of nodes and of groups, has all changes that
 * any server had acknowledged when this was called.  Or when time is up, or the store does not answer: then *error says
 * why the view may be behind.
 */
void ep_groups_before_read(struct ep_groups *groups, uint32_t within_ms, ep_groups_wait_fn done, void *user);

/*
 * To be waited for before counters are told that shall be of now: kernels count on GPUs, and what they counted has to be
 * fetched.  done: once what was done before this was called is counted, of the ranks here of one group (name) or all (NULL).
 * Or when time is up: then *error says which GPUs do not answer.  Without it counters are a second old at most.
 */
void ep_groups_before_stats(struct ep_groups *groups, const char *name, uint32_t within_ms, ep_groups_wait_fn done,
                            void *user);

/* done: once this server's view has the group at this revision and epoch, or has it no more (revision 0); or time is up:
 * then *error says that the view is behind. */
void ep_groups_see(struct ep_groups *groups, const char *name, uint64_t revision, uint64_t epoch, uint32_t within_ms,
                   ep_groups_wait_fn done, void *user);

/* Messages owned by the group, valid until the loop runs again; NULL + error when there is none. */
const Ep__V1__Group *ep_groups_get(struct ep_groups *groups, const char *name, struct ep_error *error);
size_t ep_groups_count(const struct ep_groups *groups);
const Ep__V1__Group *ep_groups_at(struct ep_groups *groups, size_t index);

/* Told of every change; returned by add, removed by remove. */
struct ep_group_watch;
typedef void (*ep_group_watch_fn)(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user);
struct ep_group_watch *ep_groups_watch(struct ep_groups *groups, ep_group_watch_fn fn, void *user);
void ep_groups_unwatch(struct ep_group_watch *watch);

/* Counters of all ranks here of one group (name) or all (NULL), with rows of experts or without; free with
 * ep_groups_stats_clear. */
void ep_groups_stats(struct ep_groups *groups, const char *name, bool experts, Ep__V1__Stats *stats);
void ep_groups_stats_clear(Ep__V1__Stats *stats);

/* Ranks that the group has or has had since the server started are below it. */
uint32_t ep_groups_rank_end(const struct ep_groups *groups, const char *name);
/*
 * One rank's counters, all epochs since the server started added up: they only grow, as metrics must.
 * False: no epoch of the group has had that rank here.
 */
bool ep_groups_rank_counters(const struct ep_groups *groups, const char *name, uint32_t rank,
                             struct ep_rank_counters *out);

/* Tells every worker to leave when it suits (node drain, shutdown), also those that have claimed and are not attached yet. */
void ep_groups_announce_drain(struct ep_groups *groups, const char *reason);
uint32_t ep_groups_attachments(const struct ep_groups *groups);
/* Multiprocessors of a GPU that are held by ranks whose ops the server runs. */
uint32_t ep_groups_sms(const struct ep_groups *groups, uint32_t device);

/*
 * What groups take of a node is told by its reports of them; what it registers is only the rest.
 * untell: takes off what this node's reports tell, for its registration.
 * describe_own, describe_other: add what groups take to what ep_node_info(), or the node's registration, says.
 */
void ep_groups_untell(const struct ep_groups *groups, Ep__V1__NodeInfo *info);
void ep_groups_describe_own(const struct ep_groups *groups, Ep__V1__NodeInfo *info);
void ep_groups_describe_other(const struct ep_groups *groups, const char *node, Ep__V1__NodeInfo *info);

/* ---- other servers ------------------------------------------------------------------ */

/*
 * What the Node service is asked for.  done: at once, or later (connect), with the reply that belongs to the request,
 * or NULL and the reason.
 */
void ep_groups_prepare(struct ep_groups *groups, const Ep__V1__PrepareRequest *request, ep_cluster_done_fn done,
                       void *user);
void ep_groups_connect(struct ep_groups *groups, const Ep__V1__ConnectRequest *request, ep_cluster_done_fn done,
                       void *user);
void ep_groups_abort(struct ep_groups *groups, const Ep__V1__AbortRequest *request, ep_cluster_done_fn done, void *user);
void ep_groups_close_claims(struct ep_groups *groups, const Ep__V1__CloseRequest *request, ep_cluster_done_fn done,
                            void *user);
void ep_groups_hold(struct ep_groups *groups, const Ep__V1__HoldRequest *request, ep_cluster_done_fn done, void *user);
void ep_groups_admit(struct ep_groups *groups, const Ep__V1__AdmitRequest *request, ep_cluster_done_fn done, void *user);
void ep_groups_left(struct ep_groups *groups, const Ep__V1__LeaveRequest *request, ep_cluster_done_fn done, void *user);
void ep_groups_turn(struct ep_groups *groups, const Ep__V1__TurnRequest *request, ep_cluster_done_fn done, void *user);
void ep_groups_reach(struct ep_groups *groups, const Ep__V1__ReachRequest *request, ep_cluster_done_fn done, void *user);

/* ---- attachments ------------------------------------------------------------------ */

/* A claimed rank.  Its life: claim -> [attach ->] release.  Freed by release, or by writer_gone when
 * release said that the writer is alive.  It may outlive the groups. */
struct ep_membership;

/*
 * What a worker that follows its group hears of the turn to another epoch, on the rank that it would leave; attach_frame.h
 * says what it means.  An ask is answered by ep_membership_promise().  `user` is of the claim.
 */
#define EP_GROUP_NO_TURN UINT64_MAX
#define EP_GROUP_MISSED  0ull /* there is no worker that has not passed it */
struct ep_group_turn {
    bool decided;    /* else it is asked */
    uint32_t number; /* of the ask */
    uint64_t to;     /* the epoch */
    uint64_t at;     /* position; an ask: or EP_GROUP_NO_TURN; decided: or EP_GROUP_MISSED, the others go without it */
};
typedef void (*ep_group_turn_fn)(const struct ep_group_turn *turn, void *user);

struct ep_worker {
    pid_t pid;
    uid_t uid;
    const char *name;
    Ep__V1__Executor executor; /* asked for */
    uint32_t ht_sms;           /* asked for: multiprocessors that HT ops are to fill; 0: all that its ops may */
    ep_group_turn_fn on_turn;  /* it follows its group; NULL: it does not */
    uint64_t after;            /* it claims the successor of the rank that it holds in this older epoch; 0: of none */
    bool holds;                /* it has shown that it does; else its pid tells, and pid 0, which several may have, does not */
    const char *token;         /* of the group, as it gave it; NULL, "": none; read by a claim alone */
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
    uint32_t ht_sms;            /* cuda: settled, that HT ops fill at most */
    uint32_t memories;          /* that the worker gets: its window; direct: its state, its peers' windows */
    uint64_t position, ht;      /* attached: at which it began; dispatches of that which are HT */
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
 * Reserves a rank of the newest epoch: rank < 0 takes the lowest free one.  While a worker that follows holds a rank of
 * an older epoch, its successor, the same number on the same node, is kept for it; EP_NOT_FOUND: there is none, and the
 * text says where the rank is.  EP_PERMISSION_DENIED: the group has an attach token, and the worker has not given it,
 * which who follows need not; nothing else is told then.  An executor that the backend
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

/*
 * The worker has connected: the rank joins the team, its executor runs; peers are told.  done is told before this
 * returns, or later where ranks on other nodes have to take it in, which is bounded; never, if it is released first.
 * `user` is of the claim.  After an error the membership is still to be released.
 */
typedef void (*ep_membership_attached_fn)(const struct ep_error *error, void *user);
void ep_membership_attach(struct ep_membership *membership, const struct ep_worker *worker,
                          ep_membership_attached_fn done);

/* The answer to an ask of that number: is the promise given, and how far is the rank? */
void ep_membership_promise(struct ep_membership *membership, uint32_t number, bool given, uint64_t passed,
                           uint64_t position);
/* The worker has gone over to that epoch, and what it began here is finished: when it is released, nobody who is still
 * here goes on without it. */
void ep_membership_turned(struct ep_membership *membership, uint64_t to);

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
