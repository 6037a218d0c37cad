/*
 * plan: which rank of a group is on which node and device.  Decides; does no I/O.
 *
 * The leader plans; what it planned is stored with the epoch, so that all servers know the same.
 *
 * Kernels reach ranks of their node by loads and stores, and others through NCCL: to the plan a node is one NVLink domain, and
 * packing fills one before it takes another.  On a node, ranks get GPUs that reach each other (plan_devices.h); where there are
 * not so many they are refused, as are two that are placed one by one on such: the node could not form the group.
 */
#ifndef EP_GROUP_PLAN_H
#define EP_GROUP_PLAN_H

#include <stdbool.h>

#include "arena.h"
#include "spec.h"

/* A node as the cluster knows it. */
struct ep_plan_node {
    struct ep_spec_bounds has;
    const char *const *device; /* [has.devices] names */
    const uint64_t *apart;     /* [has.devices] bit d: it and device d do not reach each other's memory; NULL: all do */
    const uint64_t *device_used; /* [has.devices] bytes that groups have of each; NULL: its devices are alike */
    bool cordoned;
    uint32_t modes, dtypes;    /* bits: what it has; 0: everything */
    uint32_t nccl_version;     /* and nccl: as NodeInfo has them */
    const char *nccl;
    const char *release;       /* why it is no member: it is of another release than the leader; NULL: it is not */
};

struct ep_plan {
    uint32_t n_ranks, n_nodes;
    char **name;       /* [n_nodes] in the order of their first ranks */
    uint32_t *by_name; /* [n_nodes] indices of them, by name */
    uint32_t *node;    /* [n_ranks] which of them */
    char **device;     /* [n_ranks] texts, which ranks share */
    struct arena texts; /* names and devices */
};

/*
 * Places the ranks of a settled spec on nodes of its backend, which are not cordoned, as spec->placement says.  The
 * refusal says what is missing and what would fit.  asked, settled: as for ep_spec_fit().  nodes: by name.  before: where its
 * ranks are now, for those that come to the same node again; NULL: nowhere.
 */
ep_status ep_plan_make(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_plan_node *nodes,
                       size_t n, const struct ep_plan *before, struct ep_plan *out, struct ep_error *error);

/*
 * After a refusal for want of memory: sizes that nobody asked for and that would fit where the ranks would be, as
 * ep_spec_lower().  why: which default does not fit, and where.
 */
struct ep_plan_lowered {
    uint32_t ll_max_tokens, ht_max_tokens;
    char why[200];
};
bool ep_plan_lower(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_plan_node *nodes,
                   size_t n, const struct ep_plan *before, struct ep_plan_lowered *out);

/* Would the part of one node fit there?  nodes has that node only.  The last word is the node's own. */
ep_status ep_plan_fit_part(const struct ep_settled *settled, const struct ep_plan_node *own,
                           const struct ep_plan *plan, struct ep_error *error);

/* May the ranks stay where they are?  Else why not.  Cordoned nodes are good enough where `cordoned` says so. */
ep_status ep_plan_check(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                        const struct ep_plan_node *nodes, size_t n, const struct ep_plan *plan, bool cordoned,
                        struct ep_error *error);

/* Can GPUs of these nodes be one group's, if it is on GPUs of several? */
ep_status ep_plan_check_span(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                             const struct ep_plan *plan, struct ep_error *error);

/* What all nodes of the backend that the spec asks for, or that there is, have together: for ep_spec_settle().
 * EP_UNAVAILABLE: every one of them is cordoned. */
ep_status ep_plan_bounds(const Ep__V1__GroupSpec *asked, const struct ep_plan_node *nodes, size_t n, bool cordoned,
                         struct ep_spec_bounds *out, struct ep_error *error);

/* From the runs of a record. */
ep_status ep_plan_read(Ep__V1__RankRun *const *runs, size_t n, struct ep_plan *out, struct ep_error *error);
/* As many runs as nodes, or more; *n of them, the arena's.  Devices are the plan's. */
Ep__V1__RankRun **ep_plan_runs(const struct ep_plan *plan, struct arena *arena, size_t *n);
void ep_plan_copy(const struct ep_plan *plan, struct ep_plan *out);
void ep_plan_clear(struct ep_plan *plan);
/* Index of a node; n_nodes: none of its ranks are there. */
uint32_t ep_plan_find(const struct ep_plan *plan, const char *node);
/* The node's name with the number of its ranks, of all: "n1 (2 ranks), n2 (1 rank)". */
void ep_plan_text(const struct ep_plan *plan, char *text, size_t size);

#endif
