/* ht.h: an HT op under way, for the files that run it.  The protocol is told in ht.c. */
#ifndef EP_HOST_HT_H
#define EP_HOST_HT_H

#include "host_private.h"

struct ht {
    struct ep_host_call *call;
    struct ep_host_handle *handle;
    const struct ep_op *op;
    uint64_t number, tag;
    uint64_t expected[EP_MASK_WORDS]; /* participants when it began */
    uint64_t members[EP_MASK_WORDS];  /* of them, those that asked for what fits this op */
    uint64_t arrived[EP_MASK_WORDS];
    uint32_t mismatched; /* a rank whose op does not fit, or R */
    uint32_t row_bytes, scale_bytes;
    struct ep_host_traits traits; /* this rank's */
};

/* Of a peer: what it owes is still to come, is there, or will not come. */
enum ht_state { HT_WAIT, HT_THERE, HT_GONE };

static inline uint32_t ht_ranks(const struct ht *h) { return h->call->team->map.limits.ranks; }
static inline uint32_t ht_local(const struct ht *h) { return h->call->team->map.limits.local_experts; }
static inline bool ht_is_here(const struct ht *h, uint32_t rank) { return ep_host_is_here(h->call->team, rank); }

/* ---- ht.c ------------------------------------------------------------------------------ */

/* Takes part no more, or has closed the op. */
bool ht_is_over(const struct ep_host_team *team, uint32_t rank, uint64_t tag);
/* At d, an ask of rank s of this or another node. */
void ht_put_ask(struct ep_host_team *team, uint32_t d, uint32_t s, const struct ep_host_ask *ask);
enum ht_state ht_ask_state(const struct ht *h, uint32_t s);
/* Has not joined by then, or takes part no more. */
bool ht_left_out(const struct ep_host_team *team, uint32_t rank, uint64_t tag);
/* Do the ops belong together?  Both sides answer alike. */
bool ht_fit(const struct ep_host_traits *a, const struct ep_host_traits *b);
/* Waits for s's ask; *state THERE or GONE. */
ep_status ht_await_ask(struct ht *h, uint32_t s, enum ht_state *state);

/* Through the gate to d's window, as rank `from`; NULL when d takes nothing for this op. */
uint8_t *ht_enter(struct ep_host_team *team, uint32_t from, uint32_t d, uint64_t tag);
bool ht_may_push(const struct ep_host_team *team, uint32_t d, uint64_t tag);
/* The flag in d's window: all that was to come has come. */
void ht_announce(struct ep_host_team *team, uint32_t from, uint32_t d, uint8_t *window, uint64_t tag, uint32_t count);
/* Waits for the flags of the ranks `from` that owe rows: expect[r] of them.  Of those that owe none the ones that are
 * there have arrived. */
ep_status ht_await_flags(struct ht *h, const uint64_t *from, const uint32_t *expect);
/* Runs `round` until it says *done: it does what it can, and *blocked is whom it waits for with `phase`. */
ep_status ht_rounds(struct ht *h, void (*round)(void *user, bool *done, uint32_t *blocked, ep_status *status),
                    bool (*may_go_on)(void *user), void *user, enum ep_wait_phase phase);
/* Nobody writes for this op any more. */
void ht_close(struct ht *h, ep_status status);
/* The result of an op that went to its end. */
ep_status ht_finish(struct ht *h);

/* Gradients of one row's choices [K]; 0 where the choice is not here or none was given. */
void ht_write_grads(const struct ep_host_team *team, uint32_t rank, const struct ep_host_handle *handle,
                    const struct ep_op *op, uint32_t i, float *grads);

/* ---- ht_rows.c ------------------------------------------------------------------------------- */

/* A row and its header to their places; *at moves on.  False: there is none for it. */
bool ht_place_row(const struct ep_host_team *team, struct ep_host_grant *at, uint32_t d, uint8_t *window,
                  const struct ep_host_choice *choice, uint32_t top_k, uint32_t token, const uint8_t *row,
                  const uint8_t *scale);
/* [1 + L] rows that this rank sends to d, and to each of its experts. */
void ht_count_rows(const struct ht *h, uint32_t d, uint32_t *counts);

/* ---- ht_receive.c ---------------------------------------------------------------------------- */

/* Headers that came, judged, to the handle; the tables beside `out`; a token's other rows, when it is packed. */
ep_status ht_give_rows(struct ht *h);

/* ---- ht_remote.c: to and from ranks of other nodes --------------------------------------------- */

ep_status ht_send_asks(struct ht *h);
ep_status ht_send_grants(struct ht *h);
/* Rows that ranks of the node want, each once; fills in what the handle knows of it.  `granted`: who takes some. */
ep_status ht_send_rows(struct ht *h, const struct ep_host_payload *payload, uint32_t node, const uint64_t *granted);

/* ---- ht_node.c: sums of a node's ranks ------------------------------------------------------------ */

/* What this rank has is there to be summed up by whichever rank of its node; until it is withdrawn. */
void ht_offer(struct ht *h, bool usable);
void ht_withdraw(struct ht *h);
/* A sum for rank s of another node: HT_THERE, it can be made now; HT_GONE: it was, or will not be; else *blocked is
 * waited for. */
enum ht_state ht_sum_state(const struct ht *h, uint32_t s, uint32_t *blocked);
/* Makes it, unless another rank of this node does. */
ep_status ht_sum(struct ht *h, uint32_t s);
/* Sums of other nodes may come. */
void ht_open(struct ht *h);
/* Waits for them; fills in who has arrived. */
ep_status ht_await_sums(struct ht *h);
/* Which of this rank's partials is the first from that node. */
uint32_t ht_node_base(const struct ep_host_team *team, const struct ep_host_handle *handle, uint32_t node);

#endif
