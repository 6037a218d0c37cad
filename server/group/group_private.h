/*
 * group_private: what the files of this folder share.  Everything is owned by the loop's thread.
 *
 *   group.c    opening and closing, the list of groups, what is put off to the next turn of the loop
 *   spec*.c    from what is asked to what is settled;  plan*.c: on which nodes;  group_phase.c: the state machines
 *   nodes.c    the nodes that can be planned on, as the cluster knows them;  negotiate.c: what they have, what is asked
 *   share.c    what groups have of each node
 *
 *   preview.c  what a change would do;  balance.c: homes of experts by their loads
 *
 *   change.c   create, update: what is asked is judged, and what has to be agreed on is handed to agree.c
 *   delete.c   delete, likewise; nobody claims a rank anywhere while that is decided
 *   agree.c    the leader's side: prepare and connect the members, commit the records, see it done; or abort
 *   part.c     the member's side: its part of an epoch that is not decided yet
 *   term.c     whose requests a member heeds: those of the last leader there has been
 *   heal.c     the leader forms an epoch anew that a member does not have, or that all workers have left
 *   reach.c    whether members that have lost each other find each other again
 *   records.c  what the store keeps of a group, and how it is written;  history.c: the last changes
 *   view.c     the watch of these records: what is there is put into service
 *
 *   epoch.c    windows, team and counters of one configuration, and the ranks of all nodes
 *   member.c   claim, attach, release of the ranks that are here
 *   join.c     a rank that joins ranks on other nodes, or leaves them
 *   follow.c   workers that go over to the newest epoch: what those here are asked, promise and are told
 *   turn.c     the leader's side of that: it looks, asks, decides
 *   together.c which ranks go over together
 *   report.c   what every node lets the others know of its ranks
 *   token.c    attach tokens: their hashes, and who has given the right one
 *   executor.c who runs the ops of a rank, and on what part of its GPU
 *   status.c   messages for operators: groups, counters, watches
 *
 * Listeners (on_event, watches) may call back into this folder.  So nothing is freed, and no list is
 * shortened, while they run: that is put off to on_tick(), which runs from the loop.
 */
#ifndef EP_GROUP_PRIVATE_H
#define EP_GROUP_PRIVATE_H

#include "arena.h"
#include "ep_cluster.h"
#include "ep_group.h"
#include "ep_kernels.h"
#include "ep_team.h"
#include "group_phase.h"
#include "plan.h"
#include "spec.h"

#define REASON_MAX    256u
#define RANK_STATES   (EP_RANK_STATE(QUARANTINED) + 1)
#define TIMEOUTS_KEPT 8u
#define HISTORY_KEPT  EP_GROUP_HISTORY

/* A claimed rank.  Outlives its epoch when the groups are closed first: rank is NULL then. */
struct ep_membership {
    struct rank *rank;
    struct join *join; /* under way */
    bool attached, released; /* released: quarantined, waits for writer_gone */
    ep_group_turn_fn on_turn; /* it follows its group; NULL: it does not */
    uint64_t after;           /* the epoch whose rank of this number it succeeds; 0: of none */
    uint32_t asked;           /* number of the ask that it has not answered; 0: of none */
    uint64_t far;             /* how far it is, in its last answer; 0: it has not answered the last ask */
    bool left_out;            /* of that: it does not go over with the others */
    uint64_t welcome_by;      /* loop time, ms: it is attached, and told so by then; 0: it has been told */
    uint64_t turned_to;       /* it has gone over to that epoch, and finished what it began here; 0: it has not */
    bool tell_epoch;         /* it attached to an epoch that had been replaced meanwhile */
    Ep__V1__Executor executor; /* settled */
    uint32_t ht_sms;           /* settled: multiprocessors that HT ops fill; 0: there are none */
    ep_group_event_fn on_event;
    ep_membership_attached_fn on_attached;
    void *user;
};

struct worker {
    pid_t pid; /* 0: none yet, or its node has not told */
    uid_t uid;
    char *name; /* NULL: "" */
    struct { uint64_t ops, timeouts, dropped_routes; } counted; /* of a rank on another node, as that one told */
};

/* Of a rank that is here. */
struct own_rank {
    uint32_t device; /* of this node */
    uint32_t sms;    /* of its GPU, held for what the server runs for it: from the claim to the executor's end */
    struct ep_membership *member;      /* who has claimed it; NULL: nobody */
    struct ep_membership *quarantined; /* who may still write its window */
    uint64_t claimed_us;
    struct worker claimant;            /* of member */
    struct ep_executor *executor;      /* not NULL until it has stopped */
    struct ep_rank_counters *counters;
    struct ep_node_window *window;
    bool reserved;
};

/*
 * One rank of one epoch.  Of one on another node, state, since_us, reason and worker are as that node told them last.
 * Every node has all ranks of a group: they are kept small.
 */
struct rank {
    struct epoch *epoch;
    uint32_t number, node; /* node: of epoch->plan */
    bool here;
    bool away; /* on another node, which was lost */
    bool began_absent; /* as the epoch's record has it */
    bool follows;  /* its worker, or its last */
    bool forsaken; /* the rank that it would succeed was lost */
    ep_rank_state state; /* changed by rank_put_state(), and where the epoch begins */
    uint64_t since_us; /* of the last change of state.  It grows with each, so that it orders what others hear */
    uint64_t hold;     /* on another node: it joins, and holds the team here; 0: no */
    char *reason;   /* why it is absent or quarantined; NULL: "" */
    struct worker *worker;    /* the attached or last one; NULL: none yet */
    struct own_rank *own;     /* of another node: one that has nothing */
};

/* How far a node's part of an epoch has come. */
enum epoch_part {
    EPOCH_KNOWN,      /* nothing is made: none of its ranks are here, or they are not served */
    EPOCH_PREPARED,   /* memory is reserved, other nodes can reach it */
    EPOCH_CONNECTING, /* a thread of the pool is at it */
    EPOCH_FORMED      /* windows and team are there */
};

struct epoch {
    struct epoch *next; /* older ones that still have workers */
    struct group *group;
    uint64_t number;
    struct ep_settled settled;
    struct ep_plan plan;
    uint32_t own;         /* this node in plan; plan.n_nodes: none of its ranks are here */
    enum epoch_part part;
    uint64_t fence;       /* of the leader that had it prepared */
    uint64_t expires;     /* loop time, ms: when it goes, if it is not decided on by then */
    struct ep_team_net *net;  /* of several nodes; the team's once that is there */
    struct ep_team_span span;
    uint64_t each_bytes;  /* reserved for each rank here */
    uint64_t span_bytes;  /* and beside them, with the first one's */
    struct connecting *connecting;
    char torn[REASON_MAX]; /* why this member is not connected with all others any more; empty: it is */
    char torn_there[REASON_MAX]; /* why one of the others is not, in its words; empty: none has said so */
    bool store_lost;             /* the store has lost a member since it was agreed on */
    uint64_t empty_since;  /* loop time, ms, since when no rank of several nodes is attached; 0: one is */
    struct ep_team *team;
    struct rank *ranks;
    struct own_rank *own_ranks; /* of those that are here, in their order */
    uint32_t n_ranks;
    uint32_t *by_node, *first_of; /* numbers of the ranks, by node of the plan; where those of a node begin */
    uint32_t in_state[RANK_STATES]; /* so many ranks */
    uint32_t lost_from; /* no rank before it is lost; 0 where the epoch begins */
    uint32_t members; /* claimed, attached or not */
    uint32_t attached;
    uint32_t executors; /* running or stopping */
    uint32_t dropping; /* windows that are being given back */
    uint32_t quarantined;
    bool used;     /* a rank has attached since it was formed or reset */
    bool detached; /* its group is gone: no attach any more */
    bool apart;    /* a reset has failed: ranks that are expected have to join too */
    bool lost;     /* its team is stuck: its memory is never given back */
    bool dropped;  /* to be freed, once it is not connecting any more */
    uint64_t promised;   /* ranks here have promised to wait for the decision about the turn to that epoch; 0: none */
    uint64_t turn_to;    /* it is decided: they go over to that epoch; 0: it is not */
    uint64_t idle_since; /* loop time, ms: nothing has run here since then; 0: something does */
    uv_work_t freeing;
};

/* Numbers of the ranks that are on a node of the plan; epoch->own: on this one, none if it is no member. */
struct ranks {
    const uint32_t *number;
    uint32_t n;
};
static inline struct ranks epoch_ranks_of(const struct epoch *epoch, uint32_t node)
{
    return (struct ranks){ epoch->by_node + epoch->first_of[node], epoch->first_of[node + 1] - epoch->first_of[node] };
}
static inline bool rank_is_lost(ep_rank_state state)
{
    return state == EP_RANK_STATE(ABSENT) || state == EP_RANK_STATE(QUARANTINED);
}
static inline uint32_t epoch_lost_ranks(const struct epoch *epoch)
{
    return epoch->in_state[EP_RANK_STATE(ABSENT)] + epoch->in_state[EP_RANK_STATE(QUARANTINED)];
}

/* What another node lets know of its part: its record.  What all of them are asked again and again is beside it. */
struct report {
    char *node;
    Ep__V1__GroupStatus *status; /* in memory */
    struct arena memory;
    uint64_t epoch, from; /* from: of its turn_part; 0: none */
    bool alive;           /* the node is there */
    bool follow;          /* its workers go over from there */
    bool whole;
    bool other;           /* it is of a group that had the name before, and tells nothing of this one: its epoch is 0 */
};

/* Of this group, as it is now? */
static inline bool report_tells(const struct report *report)
{
    return report->alive && !report->other;
}

/* What the workers here were asked for the leader.  One at a time. */
struct ask {
    uint64_t fence, number;  /* of the last request about this group */
    ep_cluster_done_fn done; /* NULL: it is answered */
    void *user;
    struct epoch *from;
    uint64_t at;
    uint32_t waiting;        /* answers that are missing */
    uint64_t until;          /* loop time, ms */
    bool given;              /* by all so far */
};

/* No rank here is claimed, as the group is about to be deleted. */
struct closed {
    uint64_t fence;    /* of the leader that deletes it */
    uint64_t deletion; /* its number in the group's history */
    uint64_t until;    /* loop time, ms; 0: it is not closed */
};

/*
 * How far a rank is, as its worker says: nobody else counts what a program has put on a GPU's streams.  Ranks wait for each
 * other, so they are no further apart than these streams hold dispatches: a stream takes some 1000 launches, of graphs
 * with 100 of them at most.  Who is further has not counted right: a turn that waited for both would never come.
 */
#define TURN_APART    (1ull << 17)
#define TURN_FURTHEST (1ull << 56) /* as far as ops are numbered */

/*
 * Ranks whose nodes have lost each other do not wait for each other any more.  Where some are so much further than others,
 * these have to do as many steps alone until they come to the boundary, and each op of those who are over there waits for
 * them meanwhile: with steps of 10 ms, less than most groups' timeouts.
 */
#define TURN_NEAR 64u

struct how_far {
    uint32_t rank;
    uint32_t node;     /* the number of its node's answer */
    uint32_t part;     /* ranks of one belong together; set by together_find() */
    uint64_t position; /* or one more than it has passed */
};

struct lost_rank {
    uint32_t node, rank; /* the one has lost the other */
};

enum turn_step { TURN_NONE, TURN_PROVE, TURN_WITHDRAW, TURN_LOOK, TURN_LOOK_AGAIN, TURN_ASK, TURN_DECIDE, TURN_SETTLE };

/* What the leader does about it; the transitions are in turn.c. */
struct turn {
    enum turn_step step;
    uint64_t from, to, at;
    uint64_t fence;   /* the term in which it was begun */
    uint64_t proven;  /* the term in which nothing of earlier leaders can be decided any more; 0: in none */
    bool open;        /* promises may have been given that are not withdrawn */
    uint64_t number;  /* of the last request */
    uint32_t waiting; /* answers that are missing; the group is not freed before */
    bool promised;    /* by all so far */
    struct how_far *fars;     /* of all ranks that were asked; once all have answered, part by part, in the order of
                               * their positions */
    uint32_t n_fars;
    struct lost_rank *lost;
    uint32_t n_lost;
    uint32_t n_nodes;         /* answers so far */
    uint32_t together, n_together;    /* those of them that go over: the first, and how many; the others are left out */
    uint64_t first;                   /* the furthest of these at the first look */
    struct ep_error failure;          /* the first of this step */
    uint32_t failures;                /* in a row */
    uint64_t until, since;            /* loop time, ms: when to look again; when it was begun */
};

/* What the leader asks members that have lost each other. */
struct reach {
    uint32_t waiting;        /* answers that are missing; the group is not freed before */
    uint64_t asked;          /* the epoch whose members they are of */
    struct ep_error failure; /* the first of this round */
    bool found;              /* in the last round all did, and nobody has looked yet */
    bool failed;             /* in the last round somebody did not */
    uint64_t blind_after;    /* loop time, ms: then it is done without those who do not know the question */
};

struct retired {
    uint32_t rank;
    struct ep_rank_counters counters;
};

struct group {
    struct ep_groups *groups;
    char *name;
    ep_phase phase;
    char reason[REASON_MAX];
    uint64_t revision;        /* of the stored spec */
    uint64_t status_revision; /* of the stored status */
    Ep__V1__GroupSpec *asked; /* as the operator gave it; stored */
    uint64_t epoch_number;    /* the newest that is agreed on; 0: none ever was */
    uint64_t tried;           /* the highest that members were asked to prepare */
    struct epoch *epoch;      /* the newest; NULL: none could be formed */
    struct epoch *older;
    struct epoch *prepared;   /* the part here of one that is not decided yet */
    struct report *reports;   /* of the other nodes, by name */
    size_t n_reports;
    bool report_due, report_under_way;
    uint64_t reported;        /* the report of this node's in the store has that revision; 0: there is none */
    uint64_t report_after;    /* loop time, ms: not before, as the store did not take the last one */
    uint64_t report_by;       /* loop time, ms: then at the latest, as something is new that all see for themselves; 0: nothing */
    uint64_t heal_after;      /* loop time, ms */
    uint32_t heal_failures;   /* in a row */
    struct reach reach;
    uint64_t created_us, updated_us;
    bool visible;          /* its records are there: before, only its name is taken */
    bool seen, gone;       /* view.c: among all that is there; its records are not there any more */
    bool replaced;         /* gone, and another has its name */
    struct change *change; /* under way; NULL: none */
    struct closed closed;
    struct ask ask;
    struct turn turn;
    Ep__V1__Turn turned;   /* the last that was decided */
    bool turning;          /* the phase says that a turn is waited for */
    Ep__V1__GroupChange *history[HISTORY_KEPT]; /* by their numbers' remainders; NULL: none */
    uint64_t history_number; /* the highest */
    uint64_t history_slots;  /* bits: which records there may be */
    bool dead;             /* removed from the list at the next tick */
    Ep__V1__TimeoutRecord timeouts[TIMEOUTS_KEPT]; /* a ring; texts are constants */
    uint64_t n_timeouts;
    struct retired *retired; /* [n_retired] sums of epochs that are gone, of ranks that were here */
    uint32_t n_retired;
    uint32_t freeing;   /* epochs whose memory is on its way back */
    uint64_t *reserved; /* [devices] bytes here, of all epochs until they are given back */
    uint64_t *told;     /* [devices] of it, as the last report has it */
    struct arena arena; /* the last message made; older ones of this turn are in ep_groups.stale */
};

struct ep_group_watch {
    struct ep_group_watch *next;
    struct ep_groups *groups;
    ep_group_watch_fn fn; /* NULL: removed */
    void *user;
};

/* Wrong attach tokens of users in the present second (token.c). */
#define TOKEN_GUESSERS 8u
struct token_guesses {
    struct token_guesser {
        uid_t uid;
        uint32_t wrong;
        uint64_t second; /* loop time */
    } by[TOKEN_GUESSERS];
};

struct ep_groups {
    uv_loop_t *loop;
    struct ep_node *node;
    struct ep_store *store;
    struct ep_cluster *cluster;
    struct ep_cluster_watch *cluster_watch;
    struct ep_watch *watch;
    uint64_t view;  /* revision until which all records of groups are known */
    uint64_t fence; /* the latest term of a leader that is known (term.c) */
    uint32_t asks;  /* numbers of what workers were asked */
    struct join *joins;
    struct wait *waits;
    bool reading_marks; /* for those of them that asked for it before it was begun */
    struct group **list; /* by name */
    size_t n;
    struct ep_group_watch *watches;
    struct arena *stale; /* messages of this turn of the loop that were replaced */
    size_t n_stale;
    uv_async_t tick;
    uv_prepare_t turn;
    uv_timer_t sweep; /* deadlines */
    uv_timer_t soon;  /* on_tick() once, earlier than that */
    uint32_t open_handles;
    uint32_t commits; /* asked of the store and not answered */
    uint32_t calls;   /* asked of other nodes and not answered; epochs that connect */
    uint32_t connects; /* of these, with other nodes: with a thread of the pool */
    struct connecting *connects_due; /* and without: in their order */
    struct token_guesses guesses;
    uint64_t opened;  /* loop time, ms */
    bool loaded;      /* the first view of the records is there */
    bool ready, told_ready, closing;
    bool dead_watches; /* some have been removed and are still in the list */
    void (*on_ready)(const struct ep_error *error, void *user);
    void *ready_user;
    void (*on_closed)(void *user);
    void *closed_user;
};

/* ---- group.c ------------------------------------------------------------------ */

void *group_allocate(size_t n, size_t size); /* zeroed; the process ends when there is none */
char *group_copy(const char *text);          /* as group_allocate() */
struct group *group_find(struct ep_groups *groups, const char *name); /* invisible ones too */
struct group *group_new(struct ep_groups *groups, const char *name);
/* Groups may be added meanwhile; dead ones are left out. */
void group_each(struct ep_groups *groups, void (*fn)(struct group *group));
/* The visible group, or NULL and why not. */
struct group *group_get(struct ep_groups *groups, const char *name, struct ep_error *error);
/* Goes by the table; a move that is not in it is a bug and is logged.  reason NULL: none. */
void group_phase(struct group *group, enum ep_phase_event event, const char *reason);
/* A new epoch is in service, from whatever phase. */
void group_formed(struct group *group);
/* READY or DEGRADED, from the ranks of the newest epoch. */
void group_assess(struct group *group);
/* on_tick() soon, from the loop. */
void group_later(struct ep_groups *groups);
/* In so many ms at the latest: who still waits then asks again. */
void group_after(struct ep_groups *groups, uint64_t ms);
/* Its records are gone: workers are told, and when they have let go, so is the group. */
void group_remove(struct group *group);
uint64_t group_now(const struct ep_groups *groups); /* loop time, ms */
uint32_t group_attachments(const struct group *group); /* workers here, of all epochs */
bool group_is_listed(const struct group *group);       /* operators see it */

/* ---- nodes.c ------------------------------------------------------------------ */

/* The nodes that are there, by name. */
struct node_table {
    struct ep_plan_node *nodes;
    size_t n;
};
struct node_table nodes_table(const struct ep_groups *groups, const struct group *group); /* for a plan of this group */
struct node_table nodes_own(const struct ep_groups *groups); /* this one alone, if it is there */
void nodes_clear(struct node_table *table);
const char *nodes_self(const struct ep_groups *groups);
/* Is that another release than this server's?  text: both, as "release 2 (windows 8), not 1 (windows 7)".  Servers of
 * different releases form no group: nothing says that they would understand each other. */
bool nodes_release_differs(const Ep__V1__Version *theirs, char *text, size_t size);
bool nodes_alive(const struct ep_groups *groups, const char *name);

/* ---- share.c ------------------------------------------------------------------ */

void share_open(struct group *group);
void share_close(struct group *group);
/* As ep_node_reserve() and ep_node_release(), for the group. */
ep_status share_reserve(struct group *group, uint32_t device, uint64_t bytes, struct ep_error *error);
void share_release(struct group *group, uint32_t device, uint64_t bytes);
/* Into a report of this node's; it is written; what it would tell now is something else. */
void share_report(struct arena *arena, const struct group *group, Ep__V1__GroupStatus *report);
void share_note(struct group *group);
bool share_is_news(const struct group *group);

/* What groups have of another node, which has said `of` of itself: by its reports, and by changes under way here, but
 * not by one of `but`.  The caller frees `device`, [of->n_devices]. */
struct share_told {
    uint64_t all, *device;
};
struct share_told share_told(const struct ep_groups *groups, const struct group *but, const Ep__V1__NodeInfo *of,
                               const char *node);

/* ---- negotiate.c --------------------------------------------------------------- */

/* Settles and plans the group within what nodes offer; `stay`: with its ranks where they are, if they can stay there.
 * *plan and *settled are set on success; the refusal says what would fit. */
ep_status negotiate(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay, struct ep_settled *settled,
                    struct ep_plan *plan, struct ep_error *error);

/* ---- change.c, agree.c ---------------------------------------------------------- */

enum change_kind { CHANGE_CREATION, CHANGE_UPDATE, CHANGE_LIVE, CHANGE_DELETION, CHANGE_RENEWAL };

struct agreed {               /* what is asked of a member, and what it said */
    struct change *change;
    uint32_t node;            /* of the plan */
    bool answered;            /* in this step */
    struct ep_team_card card;
};

struct change {
    enum change_kind kind;
    struct group *group;
    uint64_t spec_revision, status_revision; /* of the group that it was judged on */
    Ep__V1__GroupSpec *asked;   /* to be stored; NULL: a deletion */
    Ep__V1__GroupStatus *status; /* the same; own message */
    struct ep_plan plan;        /* of a new epoch; a deletion: names alone, of whom it asks */
    uint64_t rank_bytes, node_bytes; /* that takes for each rank, and beside them on each of its nodes */
    enum { AGREE_BEGIN, AGREE_CLOSE, AGREE_PREPARE, AGREE_OFFER, AGREE_CONNECT, AGREE_COMMIT, AGREE_SEE, AGREE_SETTLE } step;
    struct agreed *members;
    Ep__V1__GroupChange *entry; /* of the history */
    uint64_t step_ns;           /* since when it is at its step */
    uint32_t waiting;           /* answers that are missing */
    struct ep_error failure;    /* the first */
    uint32_t refuser;           /* whose it is, in plan */
    bool again;                 /* this is the second plan */
    uint64_t fence;
    uint64_t revision;          /* of the commit */
    uint64_t until;             /* loop time, ms: of the steps that wait for the store */
    bool workers;               /* a deletion: there are some, who have to be told */
    ep_group_done_fn done;      /* NULL: nobody asked */
    void *user;
};

const char *change_text(const struct change *change);
/* It is over: answers, frees. */
void change_finish(struct change *change, const struct ep_error *error);
/* Only the leader changes groups.  EP_UNAVAILABLE: this server does not lead. */
ep_status change_check_lead(const struct ep_groups *groups, struct ep_error *error);
ep_status change_check_quiet(const struct group *group, struct ep_error *error);
/* The change of a quiet group. */
struct change *change_new(struct group *group, enum change_kind kind, const Ep__V1__Asker *asker, ep_group_done_fn done,
                          void *user);
/* The same, that forms an epoch; settled and plan are taken over. */
struct change *change_new_epoch(struct group *group, enum change_kind kind, Ep__V1__GroupSpec *asked,
                                struct ep_settled *settled, struct ep_plan *plan, const Ep__V1__Asker *asker,
                                ep_group_done_fn done, void *user);

/* With what the members offer by now.  False: it would not do either, and nothing has changed. */
bool change_plan_again(struct change *change);

/* ---- delete.c ----------------------------------------------------------------------- */

/* Are claims of ranks here refused? */
bool close_holds(const struct group *group);
/* That deletion is given up; a later one may have closed it again. */
void close_lift(struct group *group, uint64_t deletion);
/* What a member's answer to Close means: why the group stays, or no error: it has no workers and will have none. */
void close_judge(const struct group *group, const struct ep_error *asked, const Ep__V1__CloseReply *reply,
                 struct ep_error *error);

/* ---- agree.c ------------------------------------------------------------------------ */

/* From the first step of its kind on; ends with change_finish(). */
void agree_begin(struct change *change);
/* The records or a member's report have changed, or time has passed. */
void agree_look(struct group *group);
/* A deletion is under way, and other members have not let go of their parts yet; bounded. */
bool agree_waits_for_others(const struct group *group);
/* This server has begun to lead: what leaders before it have left is aborted. */
void agree_clear_field(struct ep_groups *groups);

/* ---- term.c ------------------------------------------------------------------------ */

typedef void (*term_serve_fn)(struct ep_groups *groups, const ProtobufCMessage *request,
                              ep_cluster_done_fn done, void *user);
/*
 * Serves the request of a leader of that term: at once where the term, or a later one, is known here, else, with a copy,
 * once the store has told of it.  A term that no leader has is refused.
 */
void term_serve(struct ep_groups *groups, uint64_t fence, const ProtobufCMessage *request,
                term_serve_fn serve, ep_cluster_done_fn done, void *user);
/* For those that are served: is there no later leader? */
ep_status term_check(const struct ep_groups *groups, uint64_t fence, struct ep_error *error);

/* ---- part.c (and what ep_group.h has for the Node service) ------------------------ */

/* May a request of a leader of that term be heard? */
ep_status part_heed(const struct ep_groups *groups, uint64_t fence, struct ep_error *error);
/* The part of the record's epoch, if it is there and formed; it is the caller's then. */
struct epoch *part_take(struct group *group, const Ep__V1__GroupStatus *agreed);
void part_drop(struct group *group, const char *why);
void part_give_up(struct group *group, uint64_t fence, const char *why);
void part_sweep(struct group *group);

/* ---- reach.c ----------------------------------------------------------------------- */

/* Members of the epoch have lost each other, and the store has lost none. */
bool reach_needed(const struct group *group);
/* All of them have just said that they find each other again.  That counts once: the way may be lost again. */
bool reach_take(struct group *group);
/* Asks them, if they are not being asked. */
void reach_ask(struct group *group);
/* A member is lost now. */
void reach_lost(struct group *group);
/* What failed until now says nothing about the next attempt. */
void reach_forget(struct group *group);

/* ---- heal.c ------------------------------------------------------------------------ */

/* Looks at a group that the leader might have to form anew.  Each attempt that fails makes the next one later. */
void heal_look(struct group *group);
/* Is there anything that it would do as soon as it may? */
bool heal_due(const struct group *group);
bool heal_failed(const struct group *group); /* the last time, or members did not find each other */
void heal_later(struct group *group);        /* a member was lost */
void heal_at_once(struct ep_groups *groups); /* what hindered it may be gone */

/* ---- history.c ------------------------------------------------------------------------- */

/* An entry with a number of its own; asker NULL: this server, of its own accord.  Freed with free_unpacked. */
Ep__V1__GroupChange *history_begin(struct group *group, const char *change, const Ep__V1__Asker *asker);
/* What is to change; from NULL: nothing was there. */
void history_fields(Ep__V1__GroupChange *entry, const Ep__V1__GroupSpec *from, const Ep__V1__GroupSpec *to);
void history_nodes(Ep__V1__GroupChange *entry, const struct ep_plan *from, const struct ep_plan *to);
/* It is over; what is known of it is written, if it can be. */
void history_end(struct group *group, Ep__V1__GroupChange *entry, const char *outcome, const struct ep_error *error);
/* All of that for what was not begun; asked NULL: nobody knows what. */
void history_refused(struct group *group, const char *change, const Ep__V1__Asker *asker,
                     const Ep__V1__GroupSpec *asked, const struct ep_error *error);
void history_read(struct group *group, uint32_t slot, const struct ep_record *record);
void history_forget(struct group *group);

/* ---- preview.c -------------------------------------------------------------------------- */

/* What the group would be, in the arena; new_epoch false: it stays as it is but for what is live. */
Ep__V1__Plan *preview_plan(struct arena *arena, const struct group *group, const Ep__V1__GroupSpec *asked,
                           const struct ep_settled *settled, const struct ep_plan *plan, bool new_epoch);

/* ---- records.c, view.c --------------------------------------------------------------- */

#define RECORDS_PREFIX "groups/"
#define RECORDS_KEY_MAX 352u

typedef void (*records_done_fn)(const struct ep_error *error, uint64_t revision, void *user);
/* Spec and status, both or none, against the revisions that the change under way was judged on, or else those that the
 * group has; only while this server leads.  With them, as with the status alone, goes the history's entry of that change. */
void records_save(struct group *group, const Ep__V1__GroupSpec *asked, const Ep__V1__GroupStatus *status,
                  records_done_fn done, void *user);
/* The status alone: the spec, and so the group's revision, stays. */
void records_renew(struct group *group, const Ep__V1__GroupStatus *status, records_done_fn done, void *user);
/* An entry of the history alone, while the group is as this server knows it. */
void records_history(struct group *group, const Ep__V1__GroupChange *entry, records_done_fn done, void *user);
/* Tells nothing: what was in the store before, a view that has come to its revision knows. */
void records_mark(struct ep_groups *groups, records_done_fn done, void *user);

/* Revisions at which the store has the marks now: who has come to them knows all that was acknowledged. */
struct records_marks {
    uint64_t groups, nodes;
};
typedef void (*records_marks_fn)(const struct ep_error *error, const struct records_marks *marks, void *user);
void records_read_marks(struct ep_groups *groups, records_marks_fn done, void *user);

void records_delete(struct group *group, records_done_fn done, void *user);
/* This node's report, bound to its session; NULL takes away the one of that revision. */
void records_report(struct group *group, const Ep__V1__GroupStatus *status, uint64_t expected,
                    struct ep_session *session, records_done_fn done, void *user);

void view_open(struct ep_groups *groups);
void view_close(struct ep_groups *groups);

/* ---- wait.c ---------------------------------------------------------------------------- */

void wait_look(struct ep_groups *groups); /* is there anything that somebody waits for? */

/* ---- report.c -------------------------------------------------------------------------- */

/* What this node has to say of the group has changed. */
void report_changed(struct group *group);
void report_all(struct ep_groups *groups); /* in a session that is new */
void report_write(struct group *group);    /* if that is due; the group is not freed before the store has answered */
/* Another node's record; NULL: it is gone. */
void report_read(struct group *group, const char *node, const struct ep_record *record);
void report_forget(struct group *group); /* all */
const struct report *report_of(const struct group *group, const char *node); /* NULL: there is none */
void report_alive(struct ep_groups *groups, const char *node, bool alive); /* it has come, or gone */
/* A node is not there any more, or not to be reached: nobody waits for its ranks. */
void report_lost(struct ep_groups *groups, const char *node);
void report_torn(struct epoch *epoch, uint32_t node, const char *why);
/* What is known of the ranks of other nodes, for an epoch that is new in service. */
void report_apply(struct group *group);
/* Has every member that is there put this epoch into service?  0: has none any part of the group? */
bool report_settled(const struct group *group, uint64_t epoch);
/* Do workers on another node that is there go over to the newest epoch? */
bool report_follows(const struct group *group);
/* Another node still has something of that older epoch. */
bool report_drains(const struct group *group, uint64_t epoch);
/* The highest number of an epoch that another node tells of, one that was replaced too; 0: of none. */
uint64_t report_highest(const struct group *group);
/* Some member is without its part, or not connected. */
bool report_not_whole(const struct group *group);
/* A rank on another node has left or joined; older news than what is known is dropped.  False: it was. */
bool report_rank(struct rank *rank, ep_rank_state state, uint64_t change, const char *reason);

/* ---- follow.c --------------------------------------------------------------------------- */

/* The older epoch that has workers here who have not gone over; the oldest.  NULL: none. */
struct epoch *follow_epoch(const struct group *group);
/* What this node has to do with the turn to the newest epoch; its text is in `waits`. */
void follow_part(const struct group *group, char waits[static REASON_MAX], Ep__V1__TurnPart *part);
/* Workers that follow are in an older epoch, here or on another node, and go over to the newest. */
bool follow_pending(const struct group *group);
/* Nobody attaches to that epoch any more: its ranks have promised, or go over. */
bool follow_closes(const struct epoch *epoch);
/* The rank of an older epoch, here, that a worker follows from to this one; NULL: none. */
struct rank *follow_before(const struct rank *rank);
/* A record says so; for every record that has one. */
void follow_decided(struct group *group, const Ep__V1__Turn *turn);
/* Another epoch is the newest: what was promised about the one before is void. */
void follow_anew(struct group *group);
/* The member is released: what it was asked it does not answer, and who was to succeed it does not come. */
void follow_left(struct ep_membership *member);
/* Who had claimed the rank did not attach. */
void follow_unclaimed(struct rank *rank);
void follow_sweep(struct group *group);
/* The member has attached.  Is it to be told only when its peers are there?  Then follow_sweep() does that. */
bool follow_delays(struct ep_membership *member);
/* The group goes. */
void follow_close(struct group *group, const char *why);

/* ---- turn.c ------------------------------------------------------------------------------ */

/* Something has changed, or time has passed. */
void turn_look(struct group *group);
/* The leader is about to write records of its own accord: no change of the group begins. */
bool turn_writes(const struct group *group);

/* ---- together.c -------------------------------------------------------------------------- */

/* Of what all nodes have answered: turn->together, n_together. */
void together_find(struct turn *turn);

/* ---- join.c ---------------------------------------------------------------------------- */

typedef void (*join_done_fn)(const struct ep_error *error, void *user);
/* All members admit the rank, which is absent; bounded.  done from the loop, or never if it is cancelled. */
void join_begin(struct ep_membership *member, join_done_fn done, void *user);
void join_cancel(struct ep_membership *member);
/* All other members are told at once; who cannot be told now sees it in the report. */
void join_tell_left(struct rank *rank);

/* ---- epoch.c ------------------------------------------------------------------ */

/* As a record has it, and nothing made of it yet. */
ep_status epoch_new(struct group *group, const Ep__V1__GroupStatus *record, struct epoch **out,
                    struct ep_error *error);
/* Memory of the ranks that are here; several nodes: *card is how the others reach this one. */
ep_status epoch_prepare(struct epoch *epoch, struct ep_team_card *card, struct ep_error *error);
/*
 * The members' cards in the order of the plan; NULL where there is one member.  done: from the loop, or, with one member,
 * before this returns.
 */
typedef void (*epoch_done_fn)(const struct ep_error *error, void *user);
void epoch_connect(struct epoch *epoch, const struct ep_team_card *cards, epoch_done_fn done, void *user);
/* How long that may take in a member, of an epoch with that record. */
uint32_t epoch_connect_ms(const Ep__V1__GroupStatus *record);
/* Memory for the way to other nodes, beside windows. */
struct ep_team_beside epoch_beside(const struct ep_settled *settled, const struct ep_plan *plan);
uint64_t epoch_reserved(const struct epoch *epoch, uint32_t device); /* bytes of it here */
static inline bool epoch_spans(const struct epoch *epoch)
{
    return epoch->plan.n_nodes > 1;
}
static inline bool epoch_is_member(const struct epoch *epoch)
{
    return epoch->own < epoch->plan.n_nodes;
}
/* This node is no member, or serves its ranks. */
static inline bool epoch_served(const struct epoch *epoch)
{
    return !epoch_is_member(epoch) || epoch->part == EPOCH_FORMED;
}
/* And is connected to the others. */
bool epoch_whole(const struct epoch *epoch);
/* No rank of several nodes is attached, some were, and all nodes are there: the leader forms it anew. */
bool epoch_left_by_all(const struct epoch *epoch);
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

/* Whatever it was before: as its node told. */
void rank_put_state(struct rank *rank, ep_rank_state state);
/* By the table: a rank that is here. */
void rank_set_state(struct rank *rank, enum ep_rank_event event);
void rank_set_reason(struct rank *rank, const char *reason);
const char *rank_reason(const struct rank *rank);
/* May it be claimed?  Else why not. */
ep_status rank_claimable(const struct rank *rank, struct ep_error *error);
/* Executors of an epoch whose members cannot be waited for (shutdown). */
void rank_orphan(struct rank *rank, const char *reason);
void worker_clear(struct worker *worker);
void worker_set(struct worker *worker, const struct ep_worker *from);
const char *worker_name(const struct worker *worker);
/* The attached or last one; where there was none, one that says nothing. */
const struct worker *rank_worker(const struct rank *rank);
struct worker *rank_set_worker(struct rank *rank, const struct ep_worker *from);
void rank_forget_worker(struct rank *rank);

/* ---- token.c ---------------------------------------------------------------------- */

/* Has the worker given the token of the group, if that has one?  EP_UNAVAILABLE: its user has given too many wrong ones
 * just now. */
ep_status token_check(struct group *group, const struct ep_worker *worker, struct ep_error *error);
/* Of what is asked for: "there is one" is refused where `from`, NULL: nothing, has none. */
ep_status token_given(const Ep__V1__GroupSpec *asked, const Ep__V1__GroupSpec *from, struct ep_error *error);
/* And means the one of `from`. */
ep_status token_keep(Ep__V1__GroupSpec *to, const Ep__V1__GroupSpec *from, struct ep_error *error);

/* ---- executor.c ---------------------------------------------------------------- */

/* What the worker gets of what it asked for; or why the backend or the group do not have it. */
ep_status executor_settle(const struct group *group, const struct ep_worker *worker, Ep__V1__Executor *out,
                          struct ep_error *error);
/*
 * Has the rank's GPU room for what the server would run for it?  EP_UNAVAILABLE: it will, as soon as others
 * have stopped.  before: whose successor it is, which gives it what it holds itself; NULL: nobody's.
 */
ep_status executor_fits(const struct rank *rank, const struct rank *before, Ep__V1__Executor executor,
                        struct ep_error *error);
/* Takes what executor_fits() found free; it is held in rank->sms. */
void executor_take(struct rank *rank, Ep__V1__Executor executor);
/* Multiprocessors for a rank whose worker launches its ops; 0: all.  Nobody holds them, but with MPS kernels of ranks that
 * share a GPU run at once, and all blocks of each have to, as they wait for the others'. */
uint32_t executor_direct_sms(const struct rank *rank);
/* Of what the rank may fill, when it has taken it: what HT ops fill, if so many are asked for, 0: all.  Host: 0. */
uint32_t executor_ht_sms(const struct rank *rank, Ep__V1__Executor executor, uint32_t asked);
/* Multiprocessors of a GPU here that the group's ranks hold. */
uint32_t executor_sms(const struct group *group, uint32_t device);

/* ---- status.c ----------------------------------------------------------------- */

/* Valid until the loop's next turn. */
const Ep__V1__Group *status_message(struct group *group);
/* What a group would be: a dry run's answer. */
Ep__V1__Group *status_preview(struct arena *arena, const char *name, uint64_t revision,
                                    const struct ep_settled *settled, const struct ep_plan *plan, uint64_t epoch);
/* What is stored of an epoch; own message. */
Ep__V1__GroupStatus *status_record(const struct ep_settled *settled, const struct ep_plan *plan, uint64_t epoch,
                                   uint64_t created_us, uint64_t updated_us);
/* The record of the epoch that runs, as it is now; own message. */
Ep__V1__GroupStatus *status_record_now(const struct group *group);
/* Nobody waits for that rank when the epoch of the record begins; once for each rank, in order. */
void status_begin_absent(Ep__V1__GroupStatus *record, uint32_t rank);
/* Of a record about the epoch that runs: what the spec does not say. */
void status_keep(const struct group *group, Ep__V1__GroupStatus *record);
/* Of any record: the last turn. */
void status_keep_turn(const struct group *group, Ep__V1__GroupStatus *record);
/* What this node reports of its ranks. */
const Ep__V1__GroupStatus *status_report(struct arena *arena, const struct group *group);
/* Watches hear of it. */
void status_changed(struct group *group);
void status_deleted(struct group *group);
void status_free_stale(struct ep_groups *groups);
void status_drop_watches(struct ep_groups *groups);
void status_free_watches(struct ep_groups *groups);
void status_timeout(struct rank *rank, const struct ep_engine_timeout *timeout);
void status_retire_counters(struct epoch *epoch);
/* Have the ranks here, of that group or (NULL) of all, counted what was done before then (ep_executor_refresh())?  False:
 * no, and which of them have not. */
bool status_fresh(const struct ep_groups *groups, const char *name, uint64_t since_ns, struct ep_error *error);

#endif
