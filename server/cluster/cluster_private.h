/*
 * What the files of the cluster share.
 *
 *   cluster.c  opening and closing, readiness, events, the tick that everything with a time hangs on
 *   table.c    the nodes, as the store has them
 *   member.c   this node's own part: session, registration, election
 *   grace.c    nodes whose records may come back
 *   cordon.c   draining a node
 *   call.c     calls to other servers
 */
#ifndef EP_CLUSTER_PRIVATE_H
#define EP_CLUSTER_PRIVATE_H

#include "ep_clock.h"
#include "ep_cluster.h"
#include "ep/v1/node.pb-c.h"

#define CLUSTER_MODULE "cluster"

#define NODES_PREFIX  "nodes/"
#define SERVER_SUFFIX "/server"
#define CORDON_SUFFIX "/cordon"
#define CORDON_STAY   "stay" /* behind the reason and its NUL */
#define MARK_KEY      NODES_PREFIX ".mark"
#define LEADER_KEY    "leader"

#define KEY_MAX 320

#define TICK_MS     500   /* of retries, renewals and whatever has waited too long */
#define START_MS    16000 /* until the store is there and somebody leads, beside two leases: one of a former server */
#define APPLY_MS    3000  /* a node that is drained says so */
#define ELECTION_MS 1500  /* what etcd may need on top of the time to live, before it gives a lease up */
#define AWAITED_MS  400   /* a node whose record may come back answers so soon */

enum member_state {
    MEMBER_OUT,      /* not asked to join yet */
    MEMBER_APART,    /* no session; the next tick begins one */
    MEMBER_BEGINS,   /* a session was asked for */
    MEMBER_CLAIMS,   /* the record is on its way */
    MEMBER_WAITS,    /* another has it: until that goes */
    MEMBER_IN,
    MEMBER_LEFT      /* for good */
};

/* A node in the table; node's texts are the entry's. */
struct entry {
    struct ep_cluster_node node; /* as it was told last */
    uint64_t server, cordon;     /* revisions of its records, 0: not there */
    Ep__V1__NodeRecord *record;  /* the same; NULL: never seen */
    Ep__V1__NodeRecord *news;    /* what it says since; NULL: nothing new */
    Ep__V1__NodeInfo *info;      /* the record's, once somebody has asked for it */
    bool changed;                /* in what is told as CHANGED */
    bool seen;                   /* while the whole is read: which records are there */
    bool seen_cordon;
    bool asked;                  /* by grace.c, and has not answered yet */
    bool silent;                 /* it did not answer that */
    struct ep_rpc_channel *channel; /* NULL: not called yet */
};

struct ep_cluster_watch {
    struct ep_cluster_watch *next;
    struct ep_cluster *cluster;
    ep_cluster_fn fn; /* NULL: closed, freed when nobody is in the list */
    void *user;
};

struct cordon_change;

/* The loop's thread owns all of it. */
struct ep_cluster {
    struct ep_cluster_options options;
    struct ep_rpc_tls tls; /* copies; used when options.tls is set */
    unsigned references;   /* open: the handle, the timers, what the store and others have not answered yet */
    bool closing;
    void (*on_closed)(void *user);
    void *closed_user;
    uv_timer_t tick;
    uint64_t joined_ns; /* 0: not asked to */
    bool told_ready;

    struct ep_cluster_watch *watches;
    unsigned telling; /* depth */

    /* table.c */
    struct ep_watch *watch;
    struct entry **entries; /* by name */
    size_t n_entries;
    bool whole;         /* the first one was there */
    uint64_t view;      /* revision until which all is known */
    uint64_t grace_end; /* ep_clock_ns: until then a record that goes may come back; 0: none does */

    /* member.c */
    enum member_state state;
    struct ep_session *session;
    struct ep_election *election;
    uint64_t waits_since; /* MEMBER_WAITS */
    uint64_t claimed;     /* revision that the name had, as far as was known, when it was last tried */
    uint64_t registered;  /* revision of the record */
    uint8_t *written;     /* the record as it was written last */
    size_t n_written;
    bool writing;         /* a renewal is on its way */
    bool told_clash;
    struct ep_error late; /* why it is not in yet; EP_OK: it is, or was not refused so far */

    /* cordon.c */
    struct cordon_change *cordons;

    /* call.c */
    size_t calls;        /* under way */
    struct call *failed; /* to be told from the loop */
    uv_timer_t failing;
    void (*on_left)(void *user);
    void *left_user;
};

void *cluster_allocate(size_t size); /* zeroed; ends the process when there is none */
char *cluster_copy(const char *text);
void cluster_hold(struct ep_cluster *cluster);
void cluster_release(struct ep_cluster *cluster); /* the last one frees it */
void cluster_tell(struct ep_cluster *cluster, enum ep_cluster_event event, const struct ep_cluster_node *node);
/* Something that readiness hangs on has changed. */
void cluster_check_ready(struct ep_cluster *cluster);
/* Not ready, and never will be. */
void cluster_fail(struct ep_cluster *cluster, const struct ep_error *error);

/* ---- table.c ----------------------------------------------------------------------------- */

void table_open(struct ep_cluster *cluster);
void table_close(struct ep_cluster *cluster); /* the watch; the nodes stay until table_free() */
void table_free(struct ep_cluster *cluster);
void table_settle(struct ep_cluster *cluster); /* tells what has become of the nodes */
struct entry *table_find(const struct ep_cluster *cluster, const char *name);
struct entry *table_self(const struct ep_cluster *cluster);
void table_key(char key[KEY_MAX], const char *name, const char *suffix);

/* ---- member.c ---------------------------------------------------------------------------- */

void member_tick(struct ep_cluster *cluster);
void member_look(struct ep_cluster *cluster); /* the table has changed */
void member_set_back(struct ep_cluster *cluster); /* the store was, to an old copy: what it has is not what was written */
void member_leave(struct ep_cluster *cluster);

/* ---- grace.c ----------------------------------------------------------------------------- */

void grace_begin(struct ep_cluster *cluster); /* the session is lost: until grace_limit() and some seconds more */
void grace_limit(struct ep_cluster *cluster); /* this server is registered again, or for the first time */
/* Of a node that was there and has no record now. */
bool grace_awaits(const struct ep_cluster *cluster, const struct entry *entry);
void grace_ask(struct ep_cluster *cluster, struct entry *entry);
void grace_tick(struct ep_cluster *cluster);

/* ---- cordon.c ---------------------------------------------------------------------------- */

void cordon_look(struct ep_cluster *cluster); /* the table has changed, or time has passed */
void cordon_close(struct ep_cluster *cluster);

/* ---- call.c ------------------------------------------------------------------------------ */

void call_close_channel(struct entry *entry);
void call_check_left(struct ep_cluster *cluster);

#endif
