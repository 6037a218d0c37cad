/*
 * ep_scale: the control plane of many nodes in one process, on one loop, against a real etcd.
 *
 * What is the product's own: ep_cluster (registration, leases, election, the table of nodes), ep_groups (plans, agreement,
 * records, reports, healing), ep_node, and ep_store with its etcd client: each node has its own watches and its own lease.
 * All nodes share this process's loop, so what N servers do at once is done here one after the other.
 *
 * What is simulated:
 *   - calls between servers: messages are packed, queued and unpacked as ever, but carried by this process, not by gRPC
 *     (wire.c).  A node that was killed answers nothing, and who calls it hears EP_UNAVAILABLE;
 *   - teams, executors and windows (teams.c): nets connect at once, windows have no memory, ops do not exist.  Whoever
 *     had a net with a node that is killed, or that gives its part of the epoch back, hears that, as over TCP;
 *   - workers: they claim, attach and release ranks by the calls that server/attach makes;
 *   - a store's client is shared by several nodes, so their commits go one after the other;
 *   - a node is killed by forgetting it: its lease is not renewed, and not revoked either.
 *
 * It is built with EP_MAX_RANKS of its own (CMakeLists.txt): a group of the product has 1024 ranks at most, which the
 * masks in the windows have places for, and there are no windows here.
 */
#ifndef EP_SCALE_SIM_H
#define EP_SCALE_SIM_H

#include "ep_cluster.h"
#include "ep_group.h"

#define SIM_GROUP "moe"

struct sim_node {
    char name[16];
    uint32_t index;
    struct ep_store *store; /* shared with others */
    struct ep_node *node;
    struct ep_cluster *cluster;
    struct ep_groups *groups;
    struct ep_membership **workers; /* [sim.ranks] */
    bool cluster_ready, groups_ready;
    bool away; /* killed, and not started again */
};

/* Counted since tally_reset(). */
struct tally {
    uint64_t commits, writes, bytes; /* records written or deleted, and their keys and values; without etcd's markers */
    uint64_t most_writes;            /* by one node; the leader's records are not among them */
    uint64_t calls, call_bytes;      /* requests and answers between nodes */
    uint64_t most_opened;            /* connections for one call, by one node at once */
};

struct sim {
    uv_loop_t loop;
    uint32_t nodes, ranks; /* ranks: of each node */
    uint32_t ttl_ms;       /* of the nodes' sessions */
    struct sim_node *node; /* [nodes] */
    struct ep_store **stores;
    uint32_t n_stores;
};

extern struct sim sim; /* the link-time doubles have no other way to it */

void sim_open(void); /* the loop */
void sim_close(void);
void *sim_allocate(size_t n, size_t size); /* zeroed; ends the process when there is none */
__attribute__((noreturn, format(printf, 1, 2))) void sim_fail(const char *format, ...);

/* fn is called from the loop, in the order of the calls.  Any thread. */
void sim_later(void (*fn)(void *user), void *user);

/* NULL: no node of the simulation has that name. */
struct sim_node *sim_find(const char *name);

/* ---- node.c --------------------------------------------------------------------------- */

void node_start(struct sim_node *node);
/* As kill -9 does. */
void node_kill(struct sim_node *node);
/* As SIGTERM does; *closed is counted up when it is over. */
void node_close(struct sim_node *node, uint32_t *closed);

/* Ranks of the newest epoch that are on the node: all are attached, or let go. */
bool node_attach(struct sim_node *node); /* false: not all are free yet */
void node_release(struct sim_node *node);

/* What this node knows. */
bool node_leads(const struct sim_node *node);
bool node_sees(const struct sim_node *node, uint32_t alive);      /* so many nodes */
bool node_serves(const struct sim_node *node, uint64_t epoch);    /* whole, and nothing older is left; 0: it has no group */
bool node_has_epoch(const struct sim_node *node, uint64_t epoch); /* or a later one: whole */
bool node_counts(const struct sim_node *node, uint32_t attached); /* so many ranks of the newest epoch, on all nodes */
bool node_mourns(const struct sim_node *node, uint32_t absent);
uint64_t node_epoch(const struct sim_node *node); /* the newest */

/* ---- teams.c --------------------------------------------------------------------------- */

/* All that had a net with the node lose it. */
void teams_cut(uint32_t node);
/* Nodes before that one and the others lose each other, though messages arrive. */
void teams_split(uint32_t node);

/* ---- count.c --------------------------------------------------------------------------- */

void tally_reset(void);
struct tally tally_read(void);
void tally_call(size_t bytes);
void tally_opened(const struct sim_node *node);
void tally_closed(const struct sim_node *node);

#endif
