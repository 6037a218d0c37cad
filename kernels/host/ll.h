/* ll.h: places in a bank, and what pushing to one and waiting for one takes, for the files that run LL. */
#ifndef EP_HOST_LL_H
#define EP_HOST_LL_H

#include "host_private.h"

/* ---- places in a bank ---------------------------------------------------------------------- */

static inline uint64_t ll_bank_at(const struct ep_host_team *team, uint64_t number)
{
    return team->map.ll + number % team->map.limits.ll_banks * team->map.bank_bytes;
}

static inline uint64_t *ll_flag_at(uint8_t *window, uint64_t flags, uint32_t peer)
{
    return (uint64_t *)(void *)(window + flags + (uint64_t)peer * EP_LINE);
}

static inline uint64_t ll_dispatch_flags(const struct ep_host_team *team, uint64_t number)
{
    return ll_bank_at(team, number) + team->map.bank.dispatch_flags;
}

static inline uint64_t ll_combine_flags(const struct ep_host_team *team, uint64_t number)
{
    return ll_bank_at(team, number) + team->map.bank.combine_flags;
}

/* Where the region of one peer begins: [R][T_ll] items. */
static inline uint64_t ll_region_at(const struct ep_host_team *team, uint64_t number, uint64_t start, uint32_t peer,
                          uint32_t item_bytes)
{
    return ll_bank_at(team, number) + start + (uint64_t)peer * team->map.limits.ll_max_tokens * item_bytes;
}

/* ---- pushing: `from` is a rank of this node, or one whose frames this thread works off --------------- */

/* Not a participant (any more). */
bool ep_host_ll_left_out(const struct ep_host_team *team, uint32_t rank, uint64_t number);
/* May number n be written to d's bank: has d released what was in it before? */
bool ep_host_ll_has_credit(const struct ep_host_team *team, uint32_t d, uint64_t number);
/* Through the gate to peer's window; NULL when it is no participant any more. */
uint8_t *ep_host_ll_enter(struct ep_host_team *team, uint32_t from, uint32_t peer, uint64_t number);
/* The flag: all that it counts has been written. */
void ep_host_ll_announce(struct ep_host_team *team, uint32_t from, uint32_t peer, uint8_t *window, uint64_t flags,
                         uint64_t number, uint32_t count);

/* ---- waiting for peers: ll.c ------------------------------------------------------------------ */

/* Of a peer: what it owes is still to come, is there, or will not come. */
enum ll_state { LL_WAIT, LL_THERE, LL_GONE };

/* May this rank write number n to d's bank? */
enum ll_state ll_credit_of(const struct ep_host_team *team, uint32_t d, uint64_t number);
/* Rows of s, and partials of d: how many, once they are there. */
enum ll_state ll_rows_of(const struct ep_host_call *call, uint32_t s, uint64_t number, uint32_t *count);
enum ll_state ll_partials_of(const struct ep_host_call *call, uint32_t d, uint64_t number, uint32_t *count);

struct ll_awaited {
    struct ep_host_call *call;
    uint64_t number;
    uint32_t peer, count;
    enum ll_state (*look)(const struct ep_host_call *, uint32_t, uint64_t, uint32_t *);
    enum ll_state state;
};

/* Until `look` says something else than LL_WAIT; fills in state and count. */
ep_status ll_await(struct ll_awaited *a);
/* EP_STALE_HANDLE: the handle's bank is another dispatch's by now. */
ep_status ll_check_bank(struct ep_host_call *call, const struct ep_host_handle *handle);
/* Of a send-only op; the handle has failed where its bank is gone. */
ep_status ll_begin_second_half(struct ep_host_call *call, struct ep_host_handle *handle);

/* ---- ll_receive.c -------------------------------------------------------------------------------- */

/* Waits for all rows, and lays them out as the op says. */
ep_status ll_receive(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle);

/* ---- to ranks of other nodes: ll_remote.c ---------------------------------------------------- */

/* One (sum of) row(s) into its place; what the handle's rows are, its caller knows. */
typedef void (*ep_host_ll_sum_fn)(void *user, uint32_t slot, uint8_t *to, uint32_t *token);

/* Rows of handle->dest_token to d.  *sent: all of them are on their way. */
ep_status ep_host_ll_send_rows(struct ep_host_call *call, const struct ep_host_handle *handle,
                               const struct ep_host_payload *payload, uint32_t d, bool *sent);
/* `count` partial sums to s. */
ep_status ep_host_ll_send_partials(struct ep_host_call *call, const struct ep_host_handle *handle, uint32_t s,
                                   uint32_t count, uint32_t row_bytes, ep_host_ll_sum_fn sum, void *user, bool *sent);

#endif
