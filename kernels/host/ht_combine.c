/* HT combine. */
#include "ht.h"

#include <string.h>

static bool fits(struct ep_span span, uint64_t rows, uint64_t row_bytes)
{
    return span.bytes == 0 || span.bytes / row_bytes >= rows;
}

/* Does the client give as many rows (and gradients) as its dispatch laid out? */
static bool rows_given(const struct ht *h)
{
    uint64_t grad_bytes = h->op->layout == EP_LAYOUT_PACKED ? sizeof(float) : h->handle->top_k * sizeof(float);

    return h->op->x.bytes / h->row_bytes >= h->handle->rows &&
           fits(h->op->row_grads, h->handle->rows, grad_bytes);
}

/* ---- ask ---------------------------------------------------------------------------------- */

/* Whose rows came, and who has this rank's. */
static void find_members(struct ht *h)
{
    for (uint32_t r = 0; r < ht_ranks(h); r++)
        if ((ep_mask_test(h->handle->participants, r) || h->handle->sent[r] > 0) &&
            !ht_left_out(h->call->team, r, ep_ht_tag(h->handle->number, 0)))
            ep_mask_set(h->expected, r);
    memcpy(h->members, h->expected, sizeof h->members);
}

static void ask_here(struct ht *h)
{
    struct ep_host_ask ask = { .tag = h->tag, .traits = h->traits };

    for (uint32_t d = 0; d < ht_ranks(h); d++) {
        if (!ht_is_here(h, d))
            continue;
        if (h->handle->sent[d] > 0)
            ht_put_ask(h->call->team, d, h->call->rank, &ask);
        ask.base += h->handle->dest_first[d + 1] - h->handle->dest_first[d];
    }
}

/* ---- return ---------------------------------------------------------------------------------- */

struct returning {
    struct ht *h;
    bool usable;
    uint64_t pending[EP_MASK_WORDS]; /* whose rows came */
};

static bool overlap(struct ep_span a, struct ep_span b)
{
    return a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

/* Rows of this rank's own tokens are summed up from where they lie, when nothing has to be made of them first and the
 * sums are not written over them. */
static bool sums_in_place(const struct ht *h)
{
    return h->op->layout != EP_LAYOUT_PACKED && !overlap(h->op->x, h->op->out);
}

/* This rank's part of row i of its handle, rounded once. */
static void write_part(const struct ht *h, uint32_t i, uint8_t *to)
{
    const uint8_t *x = ep_host_at(h->call, h->op->x);
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t n;

    if (h->op->layout != EP_LAYOUT_PACKED) {
        ep_host_copy_row(to, x + (uint64_t)i * h->row_bytes, h->row_bytes);
        return;
    }
    n = ep_host_partial_terms(h->call->team, h->handle, i, x, h->row_bytes, rows, weights);
    ep_host_sum((ep_dtype)h->op->input_dtype, to, rows, weights, n, h->call->team->map.limits.hidden);
}

static void push_partial(const struct ht *h, uint32_t s, uint32_t slot, const struct ep_host_ask *ask, uint8_t *window)
{
    const struct ep_layout_map *map = &h->call->team->map;
    uint32_t i = h->handle->source_first[s] + slot;
    uint64_t row = (uint64_t)ask->base + slot;

    if (s != h->call->rank || !sums_in_place(h))
        write_part(h, i, window + map->ht_combine_rows + row * h->row_bytes);
    if (ask->traits.wants_grads)
        ht_write_grads(h->call->team, h->call->rank, h->handle, h->op, i,
                       (float *)(void *)(window + map->ht_combine_grads) + row * map->limits.top_k);
}

/* Copied: its owner may give the op up and ask for the next. */
static struct ep_host_ask read_ask(const struct ht *h, uint32_t s)
{
    struct ep_host_ask ask;

    pthread_mutex_lock(&h->call->me->notes);
    ask = h->call->me->asks[s];
    pthread_mutex_unlock(&h->call->me->notes);
    return ask;
}

static void return_here(struct returning *r, uint32_t s)
{
    struct ht *h = r->h;
    uint32_t count = h->handle->source_first[s + 1] - h->handle->source_first[s], slot = 0;
    const struct ep_host_ask ask = read_ask(h, s);
    uint8_t *window;

    if (ask.tag == h->tag && !ht_fit(&h->traits, &ask.traits))
        h->mismatched = s;
    if (ask.tag != h->tag || h->mismatched == s || !(window = ht_enter(h->call->team, h->call->rank, s, h->tag)))
        return;
    if (!r->usable || !ep_mask_test(h->handle->participants, s))
        count = 0;
    for (; slot < count && ht_may_push(h->call->team, s, h->tag); slot++)
        push_partial(h, s, slot, &ask, window);
    if (slot == count) {
        ht_announce(h->call->team, h->call->rank, s, window, h->tag, count);
        if (s != h->call->rank)
            h->call->result->wire_bytes += (uint64_t)count * h->row_bytes;
    }
    ep_host_gate_leave(h->call->me);
}

static enum ht_state return_state(const struct ht *h, uint32_t s, uint32_t *blocked)
{
    if (!ht_is_here(h, s))
        return ht_sum_state(h, s, blocked);
    *blocked = s;
    return ht_ask_state(h, s);
}

/* A sum that another rank of this node makes is pending until it is made: it reads what this rank gives. */
static ep_status return_to(struct returning *r, uint32_t s)
{
    if (!ht_is_here(r->h, s))
        return ht_sum(r->h, s);
    return_here(r, s);
    return EP_OK;
}

/* What became of it: HT_WAIT, it is to be looked at again. */
static enum ht_state try_return(struct returning *r, uint32_t s, uint32_t *blocked, ep_status *status)
{
    enum ht_state state = return_state(r->h, s, blocked);

    if (state != HT_THERE)
        return state;
    *status = return_to(r, s);
    if (ht_is_here(r->h, s) || r->h->mismatched == s)
        return HT_GONE;
    return ht_sum_state(r->h, s, blocked) == HT_GONE ? HT_GONE : HT_WAIT;
}

static void return_round(void *user, bool *done, uint32_t *blocked, ep_status *status)
{
    struct returning *r = user;

    for (uint32_t i = 1; i <= ht_ranks(r->h) && *status == EP_OK; i++) {
        uint32_t s = (r->h->call->rank + i) % ht_ranks(r->h), by = s;

        if (!ep_mask_test(r->pending, s))
            continue;
        if (try_return(r, s, &by, status) == HT_GONE) {
            ep_mask_clear(r->pending, s);
        } else {
            *done = false;
            *blocked = by;
        }
    }
}

static bool some_return(void *user)
{
    const struct returning *r = user;
    uint32_t by;

    for (uint32_t s = 0; s < ht_ranks(r->h); s++)
        if (ep_mask_test(r->pending, s) && return_state(r->h, s, &by) != HT_WAIT)
            return true;
    return false;
}

static ep_status return_all(struct ht *h, bool usable)
{
    struct returning r = { .h = h, .usable = usable };

    for (uint32_t s = 0; s < ht_ranks(h); s++)
        if (ep_mask_test(h->expected, s) && h->handle->source_first[s + 1] > h->handle->source_first[s])
            ep_mask_set(r.pending, s);
    return ht_rounds(h, return_round, some_return, &r, EP_WAIT_READY);
}

/* ---- sum --------------------------------------------------------------------------------------- */

/* Where a token's partials lie: of ranks here one each, of another node one for all of its ranks. */
struct places {
    uint32_t rank[EP_MAX_TOP_K], n; /* by node, then by rank */
    uint64_t at[EP_MAX_TOP_K];
};

static uint32_t node_of(const struct ht *h, uint32_t rank) { return h->call->team->node[rank]; }

static void sort_by_node(const struct ht *h, struct places *p)
{
    for (uint32_t i = 1; i < p->n; i++)
        for (uint32_t j = i; j > 0 && node_of(h, p->rank[j - 1]) > node_of(h, p->rank[j]); j--) {
            uint32_t rank = p->rank[j];

            p->rank[j] = p->rank[j - 1];
            p->rank[j - 1] = rank;
        }
}

/* The node's list has the token, unless none of its ranks took it. */
static bool next_of_node(const struct ht *h, uint32_t node, uint32_t t, uint64_t *at)
{
    const struct ep_host_handle *handle = h->handle;
    uint32_t *next = &h->call->me->node_cursor[node];
    bool there = *next < handle->node_count[node] && handle->node_token[handle->node_first[node] + *next] == t;

    *at = (uint64_t)ht_node_base(h->call->team, handle, node) + *next;
    *next += there;
    return there;
}

/* Moves the cursors on.  A rank whose part has not arrived is left out. */
static void find_places(const struct ht *h, uint32_t t, uint32_t *next, struct places *p)
{
    struct places all = { .n = 0 };
    uint32_t node = UINT32_MAX;
    bool there = false;
    uint64_t at = 0;

    all.n = ep_host_token_ranks(h->handle, t, all.rank);
    sort_by_node(h, &all);
    p->n = 0;
    for (uint32_t i = 0; i < all.n; i++) {
        uint32_t r = all.rank[i];

        if (ht_is_here(h, r)) {
            at = next[r]++;
            there = true;
        } else if (node_of(h, r) != node) {
            there = next_of_node(h, node_of(h, r), t, &at);
        }
        node = node_of(h, r);
        if (!there || !ep_mask_test(h->arrived, r))
            continue;
        p->rank[p->n] = r;
        p->at[p->n++] = at;
    }
}

static void gather_grads(const struct ht *h, uint32_t t, const struct places *p)
{
    const struct ep_layout_map *map = &h->call->team->map;
    const struct ep_host_choice *choice = h->handle->choices + (uint64_t)t * h->handle->top_k;
    const float *came = (const float *)(const void *)(h->call->me->window + map->ht_combine_grads);
    float *grads = (float *)(void *)ep_host_at(h->call, h->op->topk_grads);

    for (uint32_t j = 0; grads && j < h->handle->top_k; j++) {
        float *grad = &grads[(uint64_t)t * h->handle->top_k + j];

        *grad = 0.0f;
        for (uint32_t i = 0; i < p->n; i++)
            if (choice[j].rank == (int32_t)p->rank[i])
                *grad = came[p->at[i] * map->limits.top_k + j];
    }
}

/* What sums are made of; `own` takes the place of the partials of this rank itself; NULL: it does not. */
struct parts {
    const uint8_t *partials, *own;
    uint32_t own_first;
};

/* Whether this rank's own rows have arrived, a flag in its window says, which its worker writes too: that there are as many
 * as the handle has is asked here. */
static struct parts find_parts(const struct ht *h, const uint32_t *first, bool usable)
{
    const uint32_t me = h->call->rank;
    const uint8_t *x = ep_host_at(h->call, h->op->x); /* NULL: this rank has had no rows */
    struct parts parts = { .partials = h->call->me->window + h->call->team->map.ht_combine_rows,
                           .own_first = first[me] };

    if (x && usable && sums_in_place(h) && ep_mask_test(h->arrived, me))
        parts.own = x + (uint64_t)h->handle->source_first[me] * h->row_bytes;
    return parts;
}

static const uint8_t *part_at(const struct ht *h, const struct parts *parts, uint32_t rank, uint64_t at)
{
    if (rank == h->call->rank && parts->own)
        return parts->own + (at - parts->own_first) * h->row_bytes;
    return parts->partials + at * h->row_bytes;
}

static void sum_token(const struct ht *h, const struct parts *parts, uint32_t t, uint32_t *next)
{
    const uint8_t *bias = ep_host_at(h->call, h->op->bias);
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    struct places p;
    uint32_t n = 0;

    find_places(h, t, next, &p);
    for (uint32_t i = 0; i < p.n; i++)
        if (i == 0 || p.at[i] != p.at[i - 1]) /* a node's ranks share one */
            rows[n++] = part_at(h, parts, p.rank[i], p.at[i]);
    if (bias)
        rows[n++] = bias + (uint64_t)t * h->row_bytes;
    for (uint32_t i = 0; i < n; i++)
        weights[i] = 1.0f;
    ep_host_sum((ep_dtype)h->op->input_dtype, ep_host_at(h->call, h->op->out) + (uint64_t)t * h->row_bytes, rows,
                weights, n, h->call->team->map.limits.hidden);
    gather_grads(h, t, &p);
}

static void sum_all(const struct ht *h, bool usable)
{
    uint32_t *next = h->call->me->cursor, first = 0; /* next partial of each rank here */
    struct parts parts;

    for (uint32_t d = 0; d < ht_ranks(h); d++) {
        next[d] = first;
        if (ht_is_here(h, d))
            first += h->handle->dest_first[d + 1] - h->handle->dest_first[d];
    }
    parts = find_parts(h, next, usable);
    memset(h->call->me->node_cursor, 0, h->call->team->shape.nodes * sizeof *h->call->me->node_cursor);
    for (uint32_t t = 0; t < h->op->tokens; t++)
        sum_token(h, &parts, t, next);
}

/* ---- the op -------------------------------------------------------------------------------------- */

/* Flags of ranks here; sums of the others. */
static ep_status await_partials(struct ht *h)
{
    uint64_t here[EP_MASK_WORDS] = { 0 };
    ep_status status;

    for (uint32_t r = 0; r < ht_ranks(h); r++)
        if (ep_mask_test(h->expected, r) && ht_is_here(h, r))
            ep_mask_set(here, r);
    status = ht_await_flags(h, here, h->handle->sent);
    return status == EP_OK ? ht_await_sums(h) : status;
}

static ep_status run(struct ht *h, bool usable)
{
    ep_status status;

    h->mismatched = ht_ranks(h);
    find_members(h);
    ht_offer(h, usable);
    ht_open(h);
    ask_here(h);
    status = ht_send_asks(h);
    if (status == EP_OK)
        status = return_all(h, usable);
    if (status == EP_OK)
        status = await_partials(h);
    ht_withdraw(h);
    return status;
}

ep_status ep_host_ht_combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;
    struct ht h = { .call = call,
                    .handle = handle,
                    .op = op,
                    .row_bytes = call->team->map.limits.hidden * ep_dtype_bytes((ep_dtype)op->input_dtype),
                    .traits = { .routing = handle->number,
                                .dtype = op->input_dtype,
                                .wants_grads = op->topk_grads.bytes != 0 } };
    ep_status status;
    bool usable;

    if (op->topk_grads.bytes && op->top_k != handle->top_k)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "top_k is %u: the handle's dispatch had %u", op->top_k,
                            handle->top_k);
    call->result->logical_bytes = (uint64_t)op->tokens * handle->top_k * h.row_bytes;
    usable = rows_given(&h);
    h.number = call->result->number = call->me->ht_number;
    h.tag = ep_ht_tag(h.number, ++call->me->ht_combines);
    status = run(&h, usable);
    ht_close(&h, status);
    if (status != EP_OK)
        return status;
    sum_all(&h, usable);
    status = ht_finish(&h);
    if (status != EP_OK || usable)
        return status;
    call->result->rows_needed = handle->rows;
    return ep_host_fail(call, EP_OVERFLOW, "x has %llu bytes: the dispatch laid out %llu rows, so none was sent",
                        (unsigned long long)op->x.bytes, (unsigned long long)handle->rows);
}
