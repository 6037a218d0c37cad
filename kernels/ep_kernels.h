/*
 * ep_kernels: what the rest of the system sees of the data path.
 *
 *   layout     sizes and offsets of a window            (layout.c)
 *   placement  which rank holds which expert            (placement.c)
 *   op check   is a descriptor safe to execute          (op_check.c)
 *   op text    what happened to an op, in words         (op_text.c)
 *   host team  the host backend: CPU threads and shared memory, on one node or several (host/)
 *
 * The reference (reference/ep_reference.h) checks all of it and shares no code with it.
 *
 * ## Dispatch and combine, and why memory is never reused too early
 *
 * Each rank executes its ops in order.  LL dispatches carry a number n = 1, 2, ... that all
 * ranks of the group agree on by counting; HT ops (dispatch and combine) have a number of their
 * own.  A rank takes part in op n when it is not absent and n >= the number it joined at.
 *
 * LL dispatch n uses bank n mod B.
 *   1. Source s waits for each participant d's credit: d has released number n - B (or B >= n, or
 *      d joined after n - B).
 *   2. s writes header, scales and row of each token once per destination rank into
 *      d.bank[s][slot], slots 0, 1, ... in token order, then the flag {n, count}, release.
 *   3. d waits for each participant's flag {n, .}, acquire, and lays the rows out in order of
 *      source.  Header fields are bounds-checked on a private copy; routing goes to the handle.
 * LL combine of number n: d reduces a token's rows over its local experts in fp32 in ascending k,
 *   rounds once, writes the partial to s.bank.combine[d][token], then the flag {n, count}; then
 *   credits: d tells every peer that it has released n.  s waits for the flags of those ranks it
 *   sent to, sums the partials in fp32 by ascending rank, adds bias, rounds once.
 * A handle released without a combine, a bank taken by n while n - B was never combined, or a dispatch
 *   that failed posts the credit too, so a skipped combine blocks nobody; and who waits for the flag of
 *   a rank that has posted it without, waits no more.
 *   (Safe: region [s] of a bank has one writer, s; s overwrites it only after d released it.  A
 *   combine region [d] is overwritten by d for n only after d saw s's dispatch flag n, which s
 *   sent after it finished or abandoned n - B.)
 *
 * HT ops have a tag (ep_ht_tag): the number of the dispatch, and how many combines followed it.  A dispatch: every rank
 *   asks each participant for room (how many rows, of which experts); whoever receives decides alone where rows go, and
 *   grants each source its part, when all have asked, have given up, or are absent; then rows are pushed, then the
 *   data flag {tag, count}.  A combine: a source says that its memory for partials is free, its peers push them and
 *   the flag; those of rank d begin where the tokens for ranks below d end.  Nobody has to agree on who takes part, so
 *   nobody can disagree about where a row goes, whoever dies meanwhile.  A rank that has joined begins with a dispatch.
 *   A late writer must not touch memory whose owner gave the op up: before pushing to d, s
 *   announces "pushing to d" and then looks at d's `closed` word; d, giving up m, writes `closed`
 *   and then waits until nobody is announced.  (Dekker; pushes never wait, so this is bounded.)
 *   host/ht.c has it in full, cuda/ht_device.cuh the same for GPUs.
 *
 * What decides over another rank's memory (credits, asks, grants, `closed`) a host team keeps
 * in the server's own memory, where no client can forge it; flags, headers and rows are in the windows.
 * On GPUs a rank's notes to its peers are in its own window, so that they can lead into that window only.
 *
 * Several nodes (host backend).  Each node has a team with the ranks that are there; what they tell and send others
 *   travels in frames, in order, from node to node (host/net.h over gin/).  What a rank of another node would do to the
 *   windows and credits here, the thread that works off its node's frames does for it, with the same gates and flags
 *   (host/remote.c).  LL sends frames per destination rank and op.  HT sends each token once per node, which spreads
 *   it; a combine sums up a token's parts inside the node first: each rank's part rounded once, their sum in fp32
 *   ascending by rank rounded once, and at the source the terms ascending by node: of its own node each rank's part, of
 *   another its sum.  A node that is lost takes its ranks with it; a frame that no node sends ends its connection.
 *
 * Waits are bounded by the group's timeout; a participant that turns absent while it is waited for
 * is dropped from the op.  The result says who arrived.
 */
#ifndef EP_KERNELS_H
#define EP_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"
#include "window.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- layout ------------------------------------------------------------------- */

/* Checks every limit (the error names the field) and fills *map. */
ep_status ep_layout_compute(const struct ep_limits *limits, struct ep_layout_map *map,
                            struct ep_error *error);

/* Of the smallest window that there can be, bytes. */
uint64_t ep_layout_smallest(void);

/* Arena that holds one op's inputs and the largest outputs of every mode and layout. */
uint64_t ep_layout_default_arena(const struct ep_limits *limits);

/* ---- placement ---------------------------------------------------------------- */

/* Homes of expert e: entries first[e] .. first[e + 1] - 1 of rank[] and local[].  Token t of source s
 * goes to home (s + t) mod (number of homes), whether or not that rank is present. */
struct ep_placement {
    uint32_t ranks, experts;
    uint32_t *first; /* [E + 1] */
    uint32_t *rank;  /* [first[E]] */
    uint32_t *local;
    uint32_t *local_experts; /* [R] experts that rank holds */
    uint32_t max_local;      /* largest of them */
};

struct ep_expert_home { uint32_t expert, rank; };

/* Expert e on the rank that holds it when the first E mod R ranks hold one more than the others. */
ep_status ep_placement_contiguous(uint32_t ranks, uint32_t experts, struct ep_placement *out,
                                  struct ep_error *error);
/* Local numbers follow the order of `homes`.  Every expert at least once, no (expert, rank) twice. */
ep_status ep_placement_explicit(uint32_t ranks, uint32_t experts, const struct ep_expert_home *homes,
                                uint32_t n, struct ep_placement *out, struct ep_error *error);
void ep_placement_free(struct ep_placement *placement);

/* ---- regions ------------------------------------------------------------------- */

/* Memory beside the window that ops of a rank may use, where it is for whoever runs them.  Its number is a region's
 * own as long as it is there. */
struct ep_region {
    uint8_t *start;
    uint64_t bytes; /* 0: there is none of this number */
};
struct ep_regions {
    uint32_t n; /* from this number on there are none */
    struct ep_region region[EP_MAX_REGIONS];
};

/* The address that an offset of a span names, which is not below EP_REGION_BYTES; NULL: there is no such region. */
EP_HD static inline void *ep_region_at(const struct ep_regions *regions, uint64_t offset)
{
    const uint64_t region = offset / EP_REGION_BYTES - 1;

    return region < regions->n ? regions->region[region].start + offset % EP_REGION_BYTES : NULL;
}

/* ---- op check ------------------------------------------------------------------ */

/*
 * Every field of a descriptor that can be judged without a handle: kinds, dtypes, sizes, spans
 * inside the arena and large enough.  `op` is a private copy.  The error names the field.
 */
ep_status ep_op_check(const struct ep_layout_map *map, const struct ep_op *op, struct ep_error *error);
/* The same, and a span may also lie in one of the regions.  NULL: there are none. */
ep_status ep_op_check_own(const struct ep_layout_map *map, const struct ep_regions *regions, const struct ep_op *op,
                          struct ep_error *error);

/* EP_TIMEOUT's sentence: whom the op waited for, how long and for what (enum ep_wait_phase). */
void ep_op_late_text(char *text, size_t size, uint32_t late_rank, uint32_t mode, uint64_t number,
                     uint64_t waited_ms, uint32_t phase);

/* ---- network of a host team --------------------------------------------------------- */

/* How the nodes of a group reach each other; kernels/gin carries it, and its environment says how (gin/plugin.c). */
struct ep_host_net;

#define EP_HOST_CARD_BYTES 288u
struct ep_host_card { uint8_t bytes[EP_HOST_CARD_BYTES]; }; /* how other nodes reach this one; as secret as a key */

/* silence_ms: a node that acknowledges nothing for so long over TCP is lost; EP_GIN_SILENCE_S holds where that is less. */
ep_status ep_host_net_listen(uint32_t silence_ms, struct ep_host_net **out, struct ep_host_card *card,
                             struct ep_error *error);
/* Collective: all nodes call it with all cards.  Blocks until all are connected, timeout_ms at most; the error names
 * the node.  One that failed can only be closed. */
ep_status ep_host_net_connect(struct ep_host_net *net, const struct ep_host_card *cards, uint32_t nodes, uint32_t own,
                              uint32_t timeout_ms, struct ep_error *error);
/* Only before a team has it.  NULL: nothing. */
void ep_host_net_close(struct ep_host_net *net);
/* Memory that it takes once it is connected. */
uint64_t ep_host_net_bytes(uint32_t nodes);

/* Who needs such a net for nothing but to hear of nodes that are gone: on_lost runs on a thread of the net's, once per
 * node.  The net is the watch's from then on, when it could be started. */
struct ep_host_watch;
ep_status ep_host_watch_start(struct ep_host_net *net, void (*on_lost)(uint32_t node, const char *why, void *user),
                              void *user, struct ep_host_watch **out, struct ep_error *error);
/* There is no path to the node from here on, nor from it to this one. */
void ep_host_watch_cut(struct ep_host_watch *watch, uint32_t node);
void ep_host_watch_end(struct ep_host_watch *watch);

/* ---- host team ------------------------------------------------------------------ */

/*
 * The ranks of one group and epoch that run on this host.  Thread rules: ep_host_execute of one
 * rank from one thread at a time; everything else from any thread.
 */
struct ep_host_team;

/* A team whose ranks are on several nodes: each has a team, with windows for its own ranks. */
struct ep_host_span {
    uint32_t nodes, own;
    const uint32_t *node;    /* [R] where each rank is */
    struct ep_host_net *net; /* connected, with these nodes; the team's from then on, when that is made */
    /* On a thread of the team's: there is no path to the node any more, and its ranks have left.  Once per node. */
    void (*on_lost)(uint32_t node, const char *why, void *user);
    void *user;
};

/* span NULL: all ranks are here.  It is looked at during the call only. */
ep_status ep_host_team_create(const struct ep_layout_map *map, const struct ep_placement *placement,
                              uint32_t timeout_ms, const struct ep_host_span *span, struct ep_host_team **out,
                              struct ep_error *error);
/* No execute may be running. */
void ep_host_team_destroy(struct ep_host_team *team);

void ep_host_team_set_timeout(struct ep_host_team *team, uint32_t timeout_ms);

/* The rank's window, map->total_bytes, zeroed, page-aligned; before its first op.  Over several nodes what ranks
 * elsewhere send waits until all ranks here have one. */
void ep_host_team_set_window(struct ep_host_team *team, uint32_t rank, void *window);

/*
 * Membership.  A new team expects every rank: ops wait for all.
 *   leave   the rank turns absent: nobody waits for it any more, and its own running op ends
 *           with EP_DETACHED.
 *   join    it takes part again, from the next op that no rank has begun.  Forgets its handles.
 *           Only after leave, when no execute of it runs, and when all ranks are here.
 *   reset   every rank is expected again; only when all are absent and none executes, and all are here.
 */
void ep_host_team_leave(struct ep_host_team *team, uint32_t rank);
void ep_host_team_join(struct ep_host_team *team, uint32_t rank);
void ep_host_team_reset(struct ep_host_team *team);
/* The path to another node of its span ends, at both ends: as if it were lost (on_lost). */
void ep_host_team_cut(struct ep_host_team *team, uint32_t node);

/*
 * Joining at a number that several teams agree on: each is held, and tells what its ranks have begun; then each admits
 * the rank from the same number on, above all of these.  The rank's own node admits it first: what others send it from
 * then on is taken there only when it takes part.
 *   hold    no rank here begins an op until admit, unhold, or hold_ms are over.  Several may hold.
 *   admit   ends the hold.  EP_ABORTED: it had ended by itself, and the rank has not joined.
 */
struct ep_host_numbers { uint64_t ll, ht; };
ep_status ep_host_team_hold(struct ep_host_team *team, uint32_t hold_ms, uint64_t *hold,
                            struct ep_host_numbers *begun, struct ep_error *error);
ep_status ep_host_team_admit(struct ep_host_team *team, uint64_t hold, uint32_t rank,
                             const struct ep_host_numbers *from, struct ep_error *error);
void ep_host_team_unhold(struct ep_host_team *team, uint64_t hold);

/* The first numbers that the rank takes part in, since it was expected or joined last. */
struct ep_host_numbers ep_host_team_first(const struct ep_host_team *team, uint32_t rank);

/*
 * How long `rank` has waited for `peer` in all its ops, and the longest of these waits.  Where it waits
 * for several at once the time counts against the one it looks at first.
 */
void ep_host_team_peer_wait(const struct ep_host_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                            uint64_t *max_ns);

/* Rows that the rank has sent to the expert, in all dispatches that routed anew. */
uint64_t ep_host_team_expert_rows(const struct ep_host_team *team, uint32_t rank, uint32_t expert);

/* Runs one op to its end and fills *result (always, status included).  `op` is a private copy that
 * passed ep_op_check.  Blocks for peers, bounded by the timeout. */
void ep_host_execute(struct ep_host_team *team, uint32_t rank, const struct ep_op *op,
                     struct ep_op_result *result);

#ifdef __cplusplus
}
#endif
#endif
