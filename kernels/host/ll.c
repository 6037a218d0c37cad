/*
 * Low latency: banks, flags and credits as ep_kernels.h describes them.
 *
 * A credit is one word per rank and bank, `released`: what a rank gives up, it gives up for all
 * sources alike.  Flags lie in the windows.
 *
 * A rank of another node is written to with frames (ll_remote.c): one row of frames per destination and op.  There the
 * thread that works them off does what the rank itself would do if it were there: the same gate, the same flags.  What
 * such a rank has released comes as state, behind the partials that it sent before.
 */
#include "ll.h"

/* ---- credits ---------------------------------------------------------------------------------- */

static uint64_t released(const struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    return __atomic_load_n(&team->ranks[rank].released[number % team->map.limits.ll_banks], __ATOMIC_SEQ_CST);
}

void ep_host_ll_release(struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    if (released(team, rank, number) >= number)
        return;
    /* release: what was read from the bank lies before; partner: ep_host_ll_has_credit of each source */
    __atomic_store_n(&team->ranks[rank].released[number % team->map.limits.ll_banks], number,
                     __ATOMIC_SEQ_CST);
    ep_host_wake_all(team);
    ep_host_tell_state(team, rank);
}

/* ---- state of a peer --------------------------------------------------------------------------- */

bool ep_host_ll_left_out(const struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    return ep_host_is_absent(team, rank) ||
           __atomic_load_n(&team->ranks[rank].joined_ll, __ATOMIC_SEQ_CST) > number;
}

bool ep_host_ll_has_credit(const struct ep_host_team *team, uint32_t d, uint64_t number)
{
    uint32_t banks = team->map.limits.ll_banks;

    return number <= banks || released(team, d, number) >= number - banks;
}

static bool has_window(const struct ep_host_team *team, uint32_t d)
{
    return !ep_host_is_here(team, d) || __atomic_load_n(&team->ranks[d].window, __ATOMIC_SEQ_CST);
}

/* May this rank write number n to d's bank? */
enum ll_state ll_credit_of(const struct ep_host_team *team, uint32_t d, uint64_t number)
{
    if (ep_host_ll_left_out(team, d, number))
        return LL_GONE;
    return has_window(team, d) && ep_host_ll_has_credit(team, d, number) ? LL_THERE : LL_WAIT;
}

/*
 * Has the flag come?  `over`: the peer will not write it any more.  It was read before the flag, and
 * the peer writes the flag first, so a flag that is missing then will never come.
 */
static enum ll_state flag_state(const struct ep_host_call *call, uint64_t flags, uint32_t peer,
                                  uint64_t number, bool over, uint32_t *count)
{
    /* acquire: the rows that the flag announces; partner: ep_host_ll_announce */
    uint64_t flag = __atomic_load_n(ll_flag_at(call->me->window, flags, peer), __ATOMIC_SEQ_CST);

    if (ep_flag_number(flag) == ep_host_wire_number(number)) {
        *count = ep_flag_count(flag);
        return LL_THERE;
    }
    return over ? LL_GONE : LL_WAIT;
}

enum ll_state ll_rows_of(const struct ep_host_call *call, uint32_t s, uint64_t number, uint32_t *count)
{
    bool over = ep_host_ll_left_out(call->team, s, number) ||
                __atomic_load_n(&call->team->ranks[s].ll_sent, __ATOMIC_SEQ_CST) >= number;

    return flag_state(call, ll_dispatch_flags(call->team, number), s, number, over, count);
}

/* A peer that released the number without a flag has skipped the combine. */
enum ll_state ll_partials_of(const struct ep_host_call *call, uint32_t d, uint64_t number,
                                   uint32_t *count)
{
    bool over = ep_host_ll_left_out(call->team, d, number) || released(call->team, d, number) >= number;

    return flag_state(call, ll_combine_flags(call->team, number), d, number, over, count);
}

void ep_host_ll_announce(struct ep_host_team *team, uint32_t from, uint32_t peer, uint8_t *window, uint64_t flags,
                         uint64_t number, uint32_t count)
{
    /* release: headers and rows lie before; partner: flag_state */
    __atomic_store_n(ll_flag_at(window, flags, from), ep_flag_make(ep_host_wire_number(number), count),
                     __ATOMIC_SEQ_CST);
    ep_host_wake(team, peer);
}

uint8_t *ep_host_ll_enter(struct ep_host_team *team, uint32_t from, uint32_t peer, uint64_t number)
{
    uint8_t *window = NULL;

    ep_host_gate_enter(&team->ranks[from], peer);
    if (!ep_host_ll_left_out(team, peer, number))
        window = __atomic_load_n(&team->ranks[peer].window, __ATOMIC_ACQUIRE);
    if (!window)
        ep_host_gate_leave(&team->ranks[from]);
    return window;
}

/* ---- waiting for one peer ------------------------------------------------------------------------ */

static bool settled(void *context)
{
    struct ll_awaited *a = context;

    a->state = a->look(a->call, a->peer, a->number, &a->count);
    return a->state != LL_WAIT;
}

ep_status ll_await(struct ll_awaited *a)
{
    switch (ep_host_wait_for(a->call, a->peer, settled, a)) {
    case EP_HOST_REACHED: return EP_OK;
    case EP_HOST_LATE: return ep_host_late(a->call, a->peer, EP_WAIT_ARRIVAL);
    case EP_HOST_DETACHED: break;
    }
    return ep_host_detached(a->call);
}

ep_status ll_check_bank(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    uint64_t newer = call->me->ll_number - handle->number;

    if (newer < call->team->map.limits.ll_banks)
        return EP_OK;
    return ep_host_fail(call, EP_STALE_HANDLE,
                        "handle %u: %llu LL dispatches came after its own, and there are %u banks", call->op->handle,
                        (unsigned long long)newer, call->team->map.limits.ll_banks);
}

ep_status ll_begin_second_half(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = ll_check_bank(call, handle);

    call->result->number = handle->number;
    if (status != EP_OK)
        handle->state = EP_HANDLE_FAILED;
    return status;
}
