/*
 * group_private: what the files of this folder share.  Everything is owned by the loop's thread.
 *
 *   group.c    opening and closing, the list of groups, what is put off to the next turn of the loop
 *   change.c   create, update, delete
 *   records.c  what the store keeps of a group
 *   epoch.c    windows, team and counters of one configuration
 *   member.c   claim, attach, release
 *   executor.c who runs the ops of a rank, and on what part of its GPU
 *   status.c   messages for operators: groups, counters, watches
 *   spec*.c    from what is asked to what is settled;  group_phase.c: the state machines
 *
 * Listeners (on_event, watches) may call back into this folder.  So nothing is freed, and no list is
 * shortened, while they run: that is put off to on_tick(), which runs from the loop.
 */
#ifndef EP_GROUP_PRIVATE_H
#define EP_GROUP_PRIVATE_H

#include "arena.h"
#include "ep_group.h"
#include "ep_kernels.h"
#include "ep_team.h"
#include "group_phase.h"
#include "spec.h"

#define REASON_MAX    256u
#define TIMEOUTS_KEPT 8u

/* A claimed rank.  Outlives its epoch when the groups are closed first: rank is NULL then. */
struct ep_membership {
    struct rank *rank;
    bool attached, released; /* released: quarantined, waits for writer_gone */
    bool tell_epoch;         /* it attached to an epoch that had been replaced meanwhile */
    Ep__V1__Executor executor; /* settled */
    ep_group_event_fn on_event;
    void *user;
};

struct worker {
    pid_t pid; /* 0: none yet */
    uid_t uid;
    char *name;
};

/* One rank of one epoch. */
struct rank {
    struct epoch *epoch;
    uint32_t number, device;
    ep_rank_state state;
    uint64_t since_us;
    char reason[REASON_MAX];           /* why it is absent or quarantined */
    struct ep_membership *member;      /* who has claimed it; NULL: nobody */
    struct ep_membership *quarantined; /* who may still write its window */
    uint64_t claimed_us;
    struct worker claimant;   /* of member */
    struct worker worker;     /* the attached or last one */
    struct ep_executor *executor; /* not NULL until it has stopped */
    uint32_t sms; /* of its GPU, held for what the server runs for it: from the claim to the executor's end */
    struct ep_rank_counters counters;
    struct ep_node_window *window;
    bool reserved;
};

struct epoch {
    struct epoch *next; /* older ones that still have workers */
    struct group *group;
    uint64_t number;
    struct ep_settled settled;
    struct ep_team *team;
    struct rank *ranks;
    uint32_t n_ranks;
    uint32_t members; /* claimed, attached or not */
    uint32_t attached;
    uint32_t executors; /* running or stopping */
    uint32_t dropping; /* windows that are being given back */
    uint32_t quarantined;
    bool used;     /* a rank has attached since it was formed or reset */
    bool detached; /* its group is gone: no attach any more */
    bool apart;    /* a reset has failed: ranks that are expected have to join too */
    bool lost;     /* its team is stuck: its memory is never given back */
    uv_work_t freeing;
};

struct group {
    struct ep_groups *groups;
    char *name;
    ep_phase phase;
    char reason[REASON_MAX];
    uint64_t revision;        /* of the stored spec */
    uint64_t status_revision; /* of the stored status */
    Ep__V1__GroupSpec *asked; /* as the operator gave it; stored */
    uint64_t epoch_number;    /* the highest that was ever formed */
    struct epoch *epoch;      /* the newest; NULL: none could be formed */
    struct epoch *older;
    uint64_t created_us, updated_us;
    bool visible;                                  /* stored: before, only its name is taken */
    const char *change;                            /* under way: "creation" ...; NULL: none */
    bool dead;                                     /* removed from the list at the next tick */
    struct change *waiting;                        /* a delete to be answered when the group is gone */
    Ep__V1__TimeoutRecord timeouts[TIMEOUTS_KEPT]; /* a ring; texts are constants */
    uint64_t n_timeouts;
    struct ep_rank_counters *retired; /* [n_retired] sums of epochs that are gone, by rank */
    uint32_t n_retired;
    uint32_t freeing;   /* epochs whose memory is on its way back */
    struct arena arena; /* the last message made; older ones of this turn are in ep_groups.stale */
};

struct ep_group_watch {
    struct ep_group_watch *next;
    struct ep_groups *groups;
    ep_group_watch_fn fn; /* NULL: removed */
    void *user;
};

struct ep_groups {
    uv_loop_t *loop;
    struct ep_node *node;
    struct ep_store *store;
    struct group **list; /* by name */
    size_t n;
    struct ep_group_watch *watches;
    struct arena *stale; /* messages of this turn of the loop that were replaced */
    size_t n_stale;
    uv_async_t tick;
    uv_prepare_t turn;
    uint32_t open_handles;
    uint32_t commits; /* asked of the store and not answered */
    bool ready, closing;
    bool dead_watches; /* some have been removed and are still in the list */
    void (*on_ready)(const struct ep_error *error, void *user);
    void *ready_user;
    void (*on_closed)(void *user);
    void *closed_user;
};

/* ---- group.c ------------------------------------------------------------------ */

void *group_allocate(size_t n, size_t size); /* zeroed; the process ends when there is none */
struct group *group_find(struct ep_groups *groups, const char *name); /* invisible ones too */
struct group *group_new(struct ep_groups *groups, const char *name);
/* The visible group, or NULL and why not. */
struct group *group_get(struct ep_groups *groups, const char *name, struct ep_error *error);
/* Goes by the table; a move that is not in it is a bug and is logged.  reason NULL: none. */
void group_phase(struct group *group, enum ep_phase_event event, const char *reason);
/* READY or DEGRADED, from the ranks of the newest epoch. */
void group_assess(struct group *group);
/* on_tick() soon, from the loop. */
void group_later(struct ep_groups *groups);
struct ep_spec_bounds group_bounds(const struct ep_groups *groups);

/* ---- change.c ----------------------------------------------------------------- */

/* The group that `group->waiting` deletes is gone. */
void change_gone(struct group *group);

/* ---- records.c ---------------------------------------------------------------- */

void records_load(struct ep_groups *groups);
typedef void (*records_done_fn)(const struct ep_error *error, struct group *group, void *user);
/* Spec and status, both or none, against the revisions the group has; keeps the new ones. */
void records_save(struct group *group, const Ep__V1__GroupSpec *asked, uint64_t epoch, uint64_t updated_us,
                  records_done_fn done, void *user);
void records_delete(struct group *group, records_done_fn done, void *user);

/* ---- epoch.c ------------------------------------------------------------------ */

/* Takes *settled over, also when it fails. */
ep_status epoch_form(struct group *group, uint64_t number, struct ep_settled *settled, struct epoch **out,
                     struct ep_error *error);
/*
 * The rank's worker is gone and its executor has stopped: the next one gets clean memory and reads nothing
 * of its predecessor's.
 */
void epoch_clean_window(struct rank *rank);
/*
 * Nothing runs in it, nobody is attached.  Its memory goes back on another thread, because that takes
 * long; until then group->freeing counts it.
 */
void epoch_free(struct epoch *epoch);
bool epoch_idle(const struct epoch *epoch);
/* All have left and nothing stands in the way: every rank is expected again. */
bool epoch_reset_due(const struct epoch *epoch);
/* A reset is only waiting for executors to stop. */
bool epoch_resetting(const struct epoch *epoch);
void epoch_reset(struct epoch *epoch);
/* Every claimed rank of it hears the event, except `but`. */
void epoch_tell(struct epoch *epoch, const struct rank *but, bool attached_only, enum ep_group_event event,
                uint32_t rank, uint64_t number, const char *text);
/* The group goes: ops end, workers are told. */
void epoch_detach(struct epoch *epoch, const char *reason);

/* ---- member.c ----------------------------------------------------------------- */

void rank_set_state(struct rank *rank, enum ep_rank_event event);
/* May it be claimed?  Else why not. */
ep_status rank_claimable(const struct rank *rank, struct ep_error *error);
/* Executors of an epoch whose members cannot be waited for (shutdown). */
void rank_orphan(struct rank *rank, const char *reason);
void worker_clear(struct worker *worker);
void worker_set(struct worker *worker, const struct ep_worker *from);

/* ---- executor.c ---------------------------------------------------------------- */

/* What the worker gets of what it asked for; or why the backend or the group do not have it. */
ep_status executor_settle(const struct group *group, const struct ep_worker *worker, Ep__V1__Executor *out,
                          struct ep_error *error);
/*
 * Has the rank's GPU room for what the server would run for it?  EP_UNAVAILABLE: it will, as soon as others
 * have stopped.
 */
ep_status executor_fits(const struct rank *rank, Ep__V1__Executor executor, struct ep_error *error);
/* Takes what executor_fits() found free; it is held in rank->sms. */
void executor_take(struct rank *rank, Ep__V1__Executor executor);
/* Multiprocessors for a rank whose worker launches its ops; 0: all.  Ranks of a group that share a GPU have equal
 * parts: with MPS their kernels run at once, and all blocks of each have to, as they wait for the others'. */
uint32_t executor_direct_sms(const struct rank *rank);

/* ---- status.c ----------------------------------------------------------------- */

/* Valid until the loop's next turn. */
const Ep__V1__Group *status_message(struct group *group);
/* What a group would be: a dry run's answer. */
const Ep__V1__Group *status_preview(struct arena *arena, const char *name, uint64_t revision,
                                    const struct ep_groups *groups, const struct ep_settled *settled,
                                    uint64_t epoch);
/* Watches hear of it. */
void status_changed(struct group *group);
void status_deleted(struct group *group);
void status_free_stale(struct ep_groups *groups);
void status_drop_watches(struct ep_groups *groups);
void status_free_watches(struct ep_groups *groups);
void status_timeout(struct rank *rank, const struct ep_engine_timeout *timeout);
void status_retire_counters(struct epoch *epoch);

#endif
