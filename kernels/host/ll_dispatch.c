/* LL dispatch. */
#include "ll.h"

#include <string.h>

/* ---- sending ------------------------------------------------------------------------------------ */

struct sending {
    struct ep_host_call *call;
    struct ep_host_handle *handle;
    struct ep_host_payload payload;
    uint64_t pending[EP_MASK_WORDS]; /* destinations that have not got their rows */
};

static void push_row(const struct sending *s, uint32_t d, uint8_t *window, uint32_t slot, uint32_t token)
{
    const struct ep_host_team *team = s->call->team;
    const struct ep_layout_map *map = &team->map;
    const struct ep_host_payload *p = &s->payload;
    uint64_t n = s->handle->number;
    uint32_t me = s->call->rank;
    uint8_t *headers = window + ll_region_at(team, n, map->bank.headers, me, map->header_bytes);
    uint8_t *rows = window + ll_region_at(team, n, map->bank.rows, me, map->row_bytes);

    ep_host_header_write(team, s->handle, token, d,
                         (struct ep_row_header *)(void *)(headers + (uint64_t)slot * map->header_bytes));
    ep_host_copy_row(rows + (uint64_t)slot * p->row_bytes, p->rows + (uint64_t)token * p->row_bytes,
                     p->row_bytes);
    if (p->scale_bytes) {
        uint8_t *scales = window + ll_region_at(team, n, map->bank.scales, me, map->scales_bytes);

        memcpy(scales + (uint64_t)slot * map->scales_bytes, p->scales + (uint64_t)token * p->scale_bytes,
               p->scale_bytes);
    }
}

/* True: all rows are there, and the flag. */
static bool push_here(struct sending *s, uint32_t d)
{
    struct ep_host_call *call = s->call;
    struct ep_host_handle *handle = s->handle;
    uint32_t first = handle->dest_first[d], count = handle->dest_first[d + 1] - first;
    uint8_t *window = ep_host_ll_enter(call->team, call->rank, d, handle->number);
    uint32_t slot = 0;

    if (!window)
        return false;
    for (; slot < count && !ep_host_is_absent(call->team, d); slot++)
        push_row(s, d, window, slot, handle->dest_token[first + slot]);
    if (slot == count)
        ep_host_ll_announce(call->team, call->rank, d, window, ll_dispatch_flags(call->team, handle->number),
                            handle->number, count);
    ep_host_gate_leave(call->me);
    return slot == count;
}

static ep_status push_to(struct sending *s, uint32_t d)
{
    struct ep_host_handle *handle = s->handle;
    uint32_t count = handle->dest_first[d + 1] - handle->dest_first[d];
    ep_status status = EP_OK;
    bool sent;

    if (ep_host_is_here(s->call->team, d))
        sent = push_here(s, d);
    else
        status = ep_host_ll_send_rows(s->call, handle, &s->payload, d, &sent);
    if (status != EP_OK || !sent)
        return status;
    handle->sent[d] = count;
    if (d != s->call->rank)
        s->call->result->wire_bytes += (uint64_t)count * (s->payload.row_bytes + s->payload.scale_bytes);
    return EP_OK;
}

/* One round over all destinations, the next rank first so that not all push to the same one.
 * *done when nobody is left; else *blocked is one whose credit is missing. */
static ep_status push_round(struct sending *s, bool *done, bool *progress, uint32_t *blocked)
{
    uint32_t ranks = s->call->team->map.limits.ranks;
    ep_status status = EP_OK;

    *done = true;
    *progress = false;
    for (uint32_t i = 1; i <= ranks; i++) {
        uint32_t d = (s->call->rank + i) % ranks;
        enum ll_state state;

        if (!ep_mask_test(s->pending, d))
            continue;
        state = ll_credit_of(s->call->team, d, s->handle->number);
        if (state == LL_WAIT) {
            *blocked = d;
            *done = false;
            continue;
        }
        if (state == LL_THERE && (status = push_to(s, d)) != EP_OK)
            break;
        ep_mask_clear(s->pending, d);
        *progress = true;
    }
    ep_host_flush(s->call->team);
    return status;
}

static bool some_credit(void *context)
{
    const struct sending *s = context;

    for (uint32_t d = 0; d < s->call->team->map.limits.ranks; d++)
        if (ep_mask_test(s->pending, d) && ll_credit_of(s->call->team, d, s->handle->number) != LL_WAIT)
            return true;
    return false;
}

/* A rank without credit holds up nobody else's rows. */
static ep_status push_all(struct sending *s)
{
    bool done, progress;
    uint32_t blocked = 0;

    for (;;) {
        ep_status status = push_round(s, &done, &progress, &blocked);

        if (status != EP_OK || done)
            return status;
        if (progress)
            continue;
        switch (ep_host_wait_for(s->call, blocked, some_credit, s)) {
        case EP_HOST_REACHED: break;
        case EP_HOST_LATE: return ep_host_late(s->call, blocked, EP_WAIT_CREDIT);
        case EP_HOST_DETACHED: return ep_host_detached(s->call);
        }
    }
}

static void count_dropped(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    call->result->dropped = handle->bad;
    for (uint32_t d = 0; d < call->team->map.limits.ranks; d++)
        if (handle->sent[d] != handle->dest_first[d + 1] - handle->dest_first[d])
            call->result->dropped += ep_host_routes_to(handle, d);
}

static ep_status send(struct ep_host_call *call, struct ep_host_handle *handle)
{
    struct sending s = { .call = call, .handle = handle };
    ep_status status;

    memset(handle->sent, 0, call->team->map.limits.ranks * sizeof *handle->sent);
    ep_host_payload_prepare(call, &s.payload);
    call->result->logical_bytes = (uint64_t)call->op->tokens * call->op->top_k * s.payload.row_bytes;
    memcpy(s.pending, handle->participants, sizeof s.pending);
    status = push_all(&s);
    /* after the flags; partner: ll_rows_of */
    __atomic_store_n(&call->me->ll_sent, handle->number, __ATOMIC_SEQ_CST);
    if (status != EP_OK) { /* peers without a flag need not wait for it */
        ep_host_wake_all(call->team);
        ep_host_tell_state(call->team, call->rank);
    }
    count_dropped(call, handle);
    return status;
}

/* ---- the op ------------------------------------------------------------------------------------- */

/* A failed dispatch has no use for its bank. */
static ep_status give_up(struct ep_host_call *call, struct ep_host_handle *handle, ep_status status)
{
    handle->state = EP_HANDLE_FAILED;
    ep_host_ll_release(call->team, call->rank, handle->number);
    return status;
}

ep_status ep_host_ll_dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    uint32_t banks = call->team->map.limits.ll_banks;
    ep_status status = ep_host_begin(call, EP_MODE_LL, handle->participants, &handle->number);

    if (status != EP_OK)
        return status;
    if (handle->number > banks) /* whoever held the bank has lost it */
        ep_host_ll_release(call->team, call->rank, handle->number - banks);
    status = send(call, handle);
    if (status != EP_OK)
        return give_up(call, handle, status);
    if (call->op->flags & EP_OP_SEND_ONLY) {
        handle->pending = *call->op;
        handle->state = EP_HANDLE_SENT;
        return EP_OK;
    }
    status = ll_receive(call, call->op, handle);
    return handle->state == EP_HANDLE_ROUTED ? status : give_up(call, handle, status);
}

ep_status ep_host_ll_complete_dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op op = handle->pending;
    ep_status status = ll_begin_second_half(call, handle);

    if (status != EP_OK)
        return status;
    status = ll_receive(call, &op, handle);
    return handle->state == EP_HANDLE_ROUTED ? status : give_up(call, handle, status);
}
