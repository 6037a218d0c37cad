/*
 * ep_cluster: the servers that share a store: who is there, who leads, calls between them.
 *
 * With sqlite a cluster of one, which leads at once, by the same code.  Everything here is of the loop's thread.
 *
 * What the store keeps of a node:
 *
 *   nodes/NAME/server   ep.v1.NodeRecord, written by the node itself and bound to its session: it goes when the server
 *                       does.  Written anew when it changes, at most once a second or so.
 *   nodes/NAME/cordon   why the node takes no new work; written for an operator by any server, stays until an
 *                       operator takes it away.  The node watches it and does what it says.  Behind a NUL there may be
 *                       "stay": its workers are not asked to leave yet.
 *   nodes/.mark         nothing; written with each cordon, and so that a watch comes to that revision (ep_cluster_mark()).
 *   leader              the name of the node that leads; behind a NUL the number of its session.  Its revision is the
 *                       leader's term.
 *
 * The table of nodes follows from that: nodes with a server, and those without one that are cordoned, which an
 * operator knows.  While the store is out of reach it stays as it was.  When this server's own session was lost, the
 * store may have been away for others too: those that answer have some seconds to register again before they count as
 * gone.
 */
#ifndef EP_CLUSTER_H
#define EP_CLUSTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "ep_error.h"
#include "ep_node.h"
#include "ep_rpc.h"
#include "ep_store.h"
#include "ep/v1/admin.pb-c.h"

struct ep_cluster;

struct ep_cluster_options {
    uv_loop_t *loop;
    struct ep_rpc *rpc; /* on that loop */
    struct ep_store *store;
    struct ep_node *node;
    const struct ep_rpc_tls *tls; /* to call others; copied; NULL: plaintext */
    uint64_t ttl_ms;              /* a server that was not heard of for so long is gone */
    /* What of ep_node_info() is to be registered: the floors above know what is told elsewhere; may be NULL. */
    void (*describe)(Ep__V1__NodeInfo *info, void *user);
    /*
     * Once: this node and all others are in the table and somebody leads; or why that cannot be.  A store that is away
     * is waited for, some time.
     */
    void (*on_ready)(const struct ep_error *error, void *user);
    /* After that: another server has taken the name while this one was away, and keeps it.  The error names it. */
    void (*on_replaced)(const struct ep_error *error, void *user);
    void *user;
};

/* Begins to watch, and to do what the store has about this node's cordon. */
ep_status ep_cluster_open(const struct ep_cluster_options *options, struct ep_cluster **out, struct ep_error *error);

/*
 * Registers this node at its admin address (ep_node_set_admin_address()), and runs for leader.  Another server that is
 * registered with the name and stays so is an error for on_ready, which names it; what a server of old has left is
 * waited for.
 */
void ep_cluster_join(struct ep_cluster *cluster);

/*
 * The record, the lead and the session go; calls under way end with EP_UNAVAILABLE, later ones at once.  Then on_left.
 * The table is there until the end.
 */
void ep_cluster_leave(struct ep_cluster *cluster, void (*on_left)(void *user), void *user);
void ep_cluster_close(struct ep_cluster *cluster, void (*on_closed)(void *user), void *user);

/* ---- nodes ----------------------------------------------------------------------------- */

/* A restart is another boot.  Valid until the loop turns, or an event tells that it has changed. */
struct ep_cluster_node {
    const char *name;
    const char *address; /* "HOST:PORT"; "": it is not to be called */
    uint64_t boot;       /* 0: never seen */
    bool alive;          /* registered at present */
    bool cordoned;
    bool workers_stay;   /* it is cordoned, and they are not to be asked to leave */
    const char *reason;  /* of the cordon */
};

size_t ep_cluster_count(const struct ep_cluster *cluster);
const struct ep_cluster_node *ep_cluster_at(const struct ep_cluster *cluster, size_t index); /* by name */
const struct ep_cluster_node *ep_cluster_find(const struct ep_cluster *cluster, const char *name); /* NULL: unknown */
const char *ep_cluster_self(const struct ep_cluster *cluster);
/* What the node said last; NULL: it was never seen, or what it says cannot be read.  Valid as the node is. */
const Ep__V1__NodeInfo *ep_cluster_info(const struct ep_cluster *cluster, const struct ep_cluster_node *node);

/*
 * A write for a commit, which tells nothing: once the table knows the commit's revision, it has all that was in the store
 * before.  EP_CLUSTER_MARK is told when one has come.  As cordons are written with it, a table that knows the revision
 * at which the store has its key knows all of them.
 */
struct ep_store_write ep_cluster_mark(void);
bool ep_cluster_knows(const struct ep_cluster *cluster, uint64_t revision);

/* A server that is lost is known to be so after as many ms. */
uint64_t ep_cluster_lost_ms(const struct ep_cluster *cluster);

/* What the node says of itself has changed and should be known soon. */
void ep_cluster_refresh(struct ep_cluster *cluster);

/*
 * Drains a node; reason NULL: takes that back.  workers_stay: it takes no new work, and that is all for now.  done is
 * told once the node itself has said so to this server, or, when it is not there, the store has it.
 */
typedef void (*ep_cluster_cordon_fn)(const struct ep_error *error, void *user);
void ep_cluster_cordon(struct ep_cluster *cluster, const char *name, const char *reason, bool workers_stay,
                       ep_cluster_cordon_fn done, void *user);

/* ---- lead and session -------------------------------------------------------------------- */

bool ep_cluster_leads(const struct ep_cluster *cluster);         /* right now, by the clock */
const char *ep_cluster_leader(const struct ep_cluster *cluster); /* its name; NULL: nobody known */
/* The last leader's term that this server knows of by its watch; 0: none. */
uint64_t ep_cluster_term(const struct ep_cluster *cluster);
/* The term of whoever leads by what the store has now; 0: nobody does.  done is called once, and later. */
typedef void (*ep_cluster_term_fn)(const struct ep_error *error, uint64_t term, void *user);
void ep_cluster_ask_term(struct ep_cluster *cluster, ep_cluster_term_fn done, void *user);
/* For a leader's commits, at once: holds only while it is still the one. */
struct ep_store_write ep_cluster_guard(const struct ep_cluster *cluster);
/* For records that go with this server; NULL: it is not registered at present. */
struct ep_session *ep_cluster_session(const struct ep_cluster *cluster);

/* ---- events ------------------------------------------------------------------------------ */

/*
 * A restart is DOWN, then UP with another boot.  DOWN: node->alive is false, the rest is as it was.
 * LEADER: node NULL; ep_cluster_leader() or ep_cluster_leads() has changed.
 * SESSION: node NULL; it was lost, or there is a new one.  What went with the old one has to be written again.
 * MARK: node NULL; the table has come to a mark, of this server's or of another's.
 */
enum ep_cluster_event {
    EP_CLUSTER_NODE_UP, EP_CLUSTER_NODE_DOWN, EP_CLUSTER_NODE_CHANGED, EP_CLUSTER_LEADER, EP_CLUSTER_SESSION,
    EP_CLUSTER_MARK
};
typedef void (*ep_cluster_fn)(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user);

/* Of what comes after: the table says what is there. */
struct ep_cluster_watch *ep_cluster_watch(struct ep_cluster *cluster, ep_cluster_fn fn, void *user);
void ep_cluster_unwatch(struct ep_cluster_watch *watch); /* fn is not called again */

/* ---- calls ------------------------------------------------------------------------------- */

/*
 * A unary call to the server of a node: done is called from the loop, once, within timeout_ms, not before this has
 * returned.  EP_UNAVAILABLE: no such node, or it is not there; calls under way end with that when it goes.
 * reply is valid during the call, NULL on error.
 */
typedef void (*ep_cluster_done_fn)(const struct ep_error *error, const ProtobufCMessage *reply, void *user);
void ep_cluster_call(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                     const char *method, const ProtobufCMessage *request, uint32_t timeout_ms, ep_cluster_done_fn done,
                     void *user);
/* The same, over a connection of its own: that of the node may still hang where the network was cut. */
void ep_cluster_call_anew(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                          const char *method, const ProtobufCMessage *request, uint32_t timeout_ms,
                          ep_cluster_done_fn done, void *user);

#endif
