/* LL combine. */
#include "ll.h"

/* ---- sending ------------------------------------------------------------------------------------ */

/* Rows of the op, or of the bank when the op has none. */
struct partials {
    const uint8_t *rows;
    uint64_t rank_stride; /* rank-major */
    uint32_t row_bytes;
    bool usable; /* false: too few rows were given, nothing is sent */
};

static void find_partials(struct ep_host_call *call, const struct ep_host_handle *handle, struct partials *p)
{
    const struct ep_op *op = call->op;
    const struct ep_layout_map *map = &call->team->map;

    p->row_bytes = map->limits.hidden * ep_dtype_bytes((ep_dtype)op->input_dtype);
    p->rank_stride = (uint64_t)map->limits.ll_max_tokens * p->row_bytes;
    p->rows = ep_host_at(call, op->x);
    p->usable = op->x.bytes / p->row_bytes >= handle->rows;
    if (op->layout == EP_LAYOUT_RANK_MAJOR && op->x.bytes == 0) {
        p->rows = call->me->window + ll_bank_at(call->team, handle->number) + map->bank.rows;
        p->rank_stride = (uint64_t)map->limits.ll_max_tokens * map->row_bytes;
        p->usable = p->row_bytes <= map->row_bytes;
    }
}

/* The sum of row `slot` of s. */
static void sum_partial(struct ep_host_call *call, const struct ep_host_handle *handle, const struct partials *p,
                        uint32_t s, uint32_t slot, uint8_t *to)
{
    uint32_t i = handle->source_first[s] + slot, n = 1;
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];

    if (handle->layout == EP_LAYOUT_RANK_MAJOR) {
        rows[0] = p->rows + s * p->rank_stride + (uint64_t)slot * p->row_bytes;
        weights[0] = 1.0f;
    } else {
        n = ep_host_partial_terms(call->team, handle, i, p->rows, p->row_bytes, rows, weights);
    }
    ep_host_sum((ep_dtype)call->op->input_dtype, to, rows, weights, n, call->team->map.limits.hidden);
}

static bool return_here(struct ep_host_call *call, const struct ep_host_handle *handle, const struct partials *p,
                        uint32_t s, uint32_t count)
{
    const struct ep_layout_map *map = &call->team->map;
    uint64_t region = ll_region_at(call->team, handle->number, map->bank.combine_rows, call->rank,
                                   map->combine_row_bytes);
    uint8_t *window = ep_host_ll_enter(call->team, call->rank, s, handle->number);
    uint32_t slot = 0;

    if (!window)
        return false;
    for (; slot < count && !ep_host_is_absent(call->team, s); slot++) {
        uint32_t token = handle->arrived_token[handle->source_first[s] + slot];

        if (token != EP_NO_TOKEN) /* else its header was overwritten: nobody knows whose row it is */
            sum_partial(call, handle, p, s, slot, window + region + (uint64_t)token * p->row_bytes);
    }
    if (slot == count)
        ep_host_ll_announce(call->team, call->rank, s, window, ll_combine_flags(call->team, handle->number),
                            handle->number, count);
    ep_host_gate_leave(call->me);
    return slot == count;
}

struct returning {
    struct ep_host_call *call;
    const struct ep_host_handle *handle;
    const struct partials *p;
    uint32_t s;
};

static void sum_for_frame(void *user, uint32_t slot, uint8_t *to, uint32_t *token)
{
    const struct returning *r = user;

    *token = r->handle->arrived_token[r->handle->source_first[r->s] + slot];
    sum_partial(r->call, r->handle, r->p, r->s, slot, to);
}

static ep_status return_to(struct ep_host_call *call, const struct ep_host_handle *handle,
                           const struct partials *p, uint32_t s)
{
    uint32_t count = handle->source_first[s + 1] - handle->source_first[s];
    struct returning r = { .call = call, .handle = handle, .p = p, .s = s };
    ep_status status = EP_OK;
    bool sent;

    if (count == 0)
        return EP_OK;
    if (!p->usable)
        count = 0;
    if (ep_host_is_here(call->team, s))
        sent = return_here(call, handle, p, s, count);
    else
        status = ep_host_ll_send_partials(call, handle, s, count, p->row_bytes, sum_for_frame, &r, &sent);
    if (status == EP_OK && sent && s != call->rank)
        call->result->wire_bytes += (uint64_t)count * p->row_bytes;
    return status;
}

/* *usable: the client gave what its dispatch laid out. */
static ep_status return_all(struct ep_host_call *call, const struct ep_host_handle *handle, bool *usable)
{
    uint32_t ranks = call->team->map.limits.ranks;
    ep_status status = EP_OK;
    struct partials p;

    find_partials(call, handle, &p);
    call->result->logical_bytes = (uint64_t)call->op->tokens * handle->top_k * p.row_bytes;
    for (uint32_t i = 1; i <= ranks && status == EP_OK; i++)
        status = return_to(call, handle, &p, (call->rank + i) % ranks);
    ep_host_ll_release(call->team, call->rank, handle->number); /* after the flags; partner: ll_partials_of */
    ep_host_flush(call->team);
    *usable = p.usable;
    return status;
}

/* ---- receiving ------------------------------------------------------------------------------------ */

static ep_status await_partials(struct ep_host_call *call, const struct ep_host_handle *handle,
                                uint64_t *arrived)
{
    for (uint32_t d = 0; d < call->team->map.limits.ranks; d++) {
        struct ll_awaited a = { .call = call, .number = handle->number, .peer = d, .look = ll_partials_of };
        ep_status status;

        if (handle->sent[d] == 0) { /* owes nothing */
            if (!ep_host_is_absent(call->team, d))
                ep_mask_set(arrived, d);
            continue;
        }
        status = ll_await(&a);
        if (status != EP_OK)
            return status;
        if (a.state == LL_THERE && a.count == handle->sent[d])
            ep_mask_set(arrived, d);
    }
    return EP_OK;
}

static void sum_token(struct ep_host_call *call, const struct ep_op *op, const struct ep_host_handle *handle,
                      const uint64_t *arrived, uint32_t t)
{
    const struct ep_layout_map *map = &call->team->map;
    uint64_t row_bytes = (uint64_t)map->limits.hidden * ep_dtype_bytes((ep_dtype)op->input_dtype);
    const uint8_t *bias = ep_host_at(call, op->bias);
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t ranks[EP_MAX_TOP_K], n = 0, n_ranks = ep_host_token_ranks(handle, t, ranks);

    for (uint32_t i = 0; i < n_ranks; i++)
        if (ep_mask_test(arrived, ranks[i]) && handle->sent[ranks[i]] > 0)
            rows[n++] = call->me->window +
                        ll_region_at(call->team, handle->number, map->bank.combine_rows, ranks[i],
                                  map->combine_row_bytes) + t * row_bytes;
    if (bias)
        rows[n++] = bias + t * row_bytes;
    for (uint32_t i = 0; i < n; i++)
        weights[i] = 1.0f;
    ep_host_sum((ep_dtype)op->input_dtype, ep_host_at(call, op->out) + t * row_bytes, rows, weights, n,
                map->limits.hidden);
}

static ep_status gather(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    uint64_t arrived[EP_MASK_WORDS] = { 0 };
    ep_status status = await_partials(call, handle, arrived);

    handle->state = status == EP_OK ? EP_HANDLE_COMBINED : EP_HANDLE_FAILED;
    if (status != EP_OK)
        return status;
    ep_host_set_arrived(call, arrived);
    for (uint32_t t = 0; t < op->tokens; t++)
        sum_token(call, op, handle, arrived, t);
    return EP_OK;
}

/* ---- the op ------------------------------------------------------------------------------------- */

ep_status ep_host_ll_combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = ll_check_bank(call, handle);
    bool usable;

    call->result->number = handle->number;
    if (status != EP_OK)
        return status;
    status = return_all(call, handle, &usable);
    if (status != EP_OK) {
        handle->state = EP_HANDLE_FAILED;
        return status;
    }
    if (call->op->flags & EP_OP_SEND_ONLY) {
        handle->pending = *call->op;
        handle->state = EP_HANDLE_COMBINE_SENT;
    } else {
        status = gather(call, call->op, handle);
    }
    if (status != EP_OK || usable)
        return status;
    call->result->rows_needed = handle->rows;
    return ep_host_fail(call, EP_OVERFLOW, "x has %llu bytes: the dispatch laid out %llu rows, so none was sent",
                        (unsigned long long)call->op->x.bytes, (unsigned long long)handle->rows);
}

ep_status ep_host_ll_complete_combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op op = handle->pending;
    ep_status status = ll_begin_second_half(call, handle);

    return status ? status : gather(call, &op, handle);
}
