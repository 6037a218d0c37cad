/* HT dispatch. */
#include "ht.h"

#include <string.h>

/* ---- ask ------------------------------------------------------------------------------------- */

static void ask_here(struct ht *h)
{
    struct ep_host_ask ask = { .tag = h->tag, .traits = h->traits, .counts = h->call->me->total };

    for (uint32_t d = 0; d < ht_ranks(h); d++)
        if (ep_mask_test(h->expected, d) && ht_is_here(h, d)) {
            ht_count_rows(h, d, ask.counts);
            ht_put_ask(h->call->team, d, h->call->rank, &ask);
        }
}

/* Those that have asked, and whose ops fit, are the members. */
static ep_status await_asks(struct ht *h)
{
    for (uint32_t s = 0; s < ht_ranks(h); s++) {
        enum ht_state state;
        ep_status status;

        if (!ep_mask_test(h->expected, s))
            continue;
        status = ht_await_ask(h, s, &state);
        if (status != EP_OK)
            return status;
        if (state == HT_THERE)
            ep_mask_set(h->members, s);
    }
    return EP_OK;
}

/* ---- grant: notes held -------------------------------------------------------------------------- */

static void check_fit(struct ht *h)
{
    h->mismatched = ht_ranks(h);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        if (ep_mask_test(h->members, s) && !ht_fit(&h->traits, &h->call->me->asks[s].traits))
            h->mismatched = s;
}

static bool takes_part(const struct ht *h, uint32_t s)
{
    return ep_mask_test(h->members, s) && ht_fit(&h->traits, &h->call->me->asks[s].traits);
}

/* What comes from whom, and all in all. */
static void add_up(struct ht *h, uint32_t *total)
{
    struct ep_host_rank *me = h->call->me;
    uint32_t local = ht_local(h);

    memset(total, 0, (1ull + local) * sizeof *total);
    memset(me->source_count, 0, ht_ranks(h) * sizeof *me->source_count);
    memset(me->source_expert, 0, (uint64_t)ht_ranks(h) * local * sizeof *me->source_expert);
    for (uint32_t s = 0; s < ht_ranks(h); s++) {
        const uint32_t *counts = me->asks[s].counts;

        if (!takes_part(h, s))
            continue;
        me->source_count[s] = counts[0];
        memcpy(me->source_expert + (uint64_t)s * local, counts + 1, local * sizeof *counts);
        for (uint32_t i = 0; i <= local; i++)
            total[i] += counts[i];
    }
}

/* Rows of this rank's `out`. */
static uint64_t rows_of_out(struct ht *h, const uint32_t *total)
{
    if (h->op->layout != EP_LAYOUT_PACKED)
        return total[0];
    return ep_host_packed_offsets(total + 1, ht_local(h), h->op->alignment, h->call->me->expert_offset);
}

static bool has_room(const struct ht *h, uint64_t rows)
{
    const struct ep_op *op = h->op;

    return op->out.bytes / h->row_bytes >= rows &&
           (!h->scale_bytes || op->out_scales.bytes == 0 || op->out_scales.bytes / h->scale_bytes >= rows);
}

/* Rows of s lie behind those of ranks below s, and so do those of each expert. */
static void grant_to(struct ht *h, uint32_t s, bool room, uint32_t *flat, uint32_t *next)
{
    struct ep_host_rank *me = h->call->me;
    struct ep_host_grant *grant = &me->grants[s];
    const uint32_t *counts = me->asks[s].counts;
    bool fits = takes_part(h, s);

    grant->answer = fits ? EP_HOST_GRANTED : EP_HOST_MISFIT;
    if (fits) {
        grant->packed = h->op->layout == EP_LAYOUT_PACKED;
        grant->flat = *flat;
        grant->rows = grant->all = counts[0];
        grant->row_bytes = h->row_bytes;
        grant->scale_bytes = h->scale_bytes;
        grant->out = room && h->op->out.bytes ? h->op->out.offset : 0;
        grant->scales = h->scale_bytes && h->op->out_scales.bytes ? h->op->out_scales.offset : 0;
        *flat += counts[0];
    }
    for (uint32_t l = 0; fits && l < ht_local(h); l++) {
        grant->next[l] = next[l];
        grant->end[l] = next[l] += counts[1 + l];
    }
    __atomic_store_n(&grant->tag, h->tag, __ATOMIC_SEQ_CST); /* partner: answer_of */
}

static void grant_all(struct ht *h)
{
    struct ep_host_rank *me = h->call->me;
    uint32_t *total = me->total, *next = me->cursor, flat = 0;
    bool room;

    pthread_mutex_lock(&me->notes);
    check_fit(h);
    add_up(h, total);
    room = has_room(h, rows_of_out(h, total));
    if (h->op->layout == EP_LAYOUT_PACKED)
        memcpy(next, me->expert_offset, ht_local(h) * sizeof *next);
    else
        memset(next, 0, ht_local(h) * sizeof *next);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        if (ep_mask_test(h->members, s))
            grant_to(h, s, room, &flat, next);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        if (!takes_part(h, s))
            ep_mask_clear(h->members, s);
    pthread_mutex_unlock(&me->notes);
    ep_host_wake_all(h->call->team);
}

/* ---- push -------------------------------------------------------------------------------------- */

struct pushing {
    struct ht *h;
    const struct ep_host_payload *payload;
    uint64_t pending[EP_MASK_WORDS]; /* asked, and not served yet */
    uint64_t granted[EP_MASK_WORDS]; /* of them, those that take rows */
};

/* *answer when it is there. */
static enum ht_state answer_of(const struct ht *h, uint32_t d, uint32_t *answer)
{
    struct ep_host_team *team = h->call->team;
    bool over = ht_is_over(team, d, h->tag); /* first: an answer comes before */
    uint64_t tag;

    if (ht_is_here(h, d)) {
        tag = __atomic_load_n(&team->ranks[d].grants[h->call->rank].tag, __ATOMIC_SEQ_CST);
        *answer = EP_HOST_UNANSWERED; /* known when the notes are looked at */
    } else {
        tag = __atomic_load_n(&h->call->me->told[d].tag, __ATOMIC_SEQ_CST);
        *answer = __atomic_load_n(&h->call->me->told[d].answer, __ATOMIC_RELAXED);
        over = over || __atomic_load_n(&h->call->me->asks[d].tag, __ATOMIC_SEQ_CST) > h->tag;
    }
    if (tag == h->tag)
        return HT_THERE;
    return over ? HT_GONE : HT_WAIT;
}

/* A copy that this rank can move on in; false: its op does not fit d's. */
static bool read_grant(struct ht *h, uint32_t d, struct ep_host_grant *grant)
{
    struct ep_host_rank *there = &h->call->team->ranks[d], *me = h->call->me;
    uint32_t local = ht_local(h);
    bool granted;

    pthread_mutex_lock(&there->notes);
    *grant = there->grants[h->call->rank];
    memcpy(me->cursor, grant->next, local * sizeof *me->cursor);
    memcpy(me->total, grant->end, local * sizeof *me->total);
    granted = grant->tag == h->tag && grant->answer == EP_HOST_GRANTED;
    pthread_mutex_unlock(&there->notes);
    grant->next = me->cursor;
    grant->end = me->total;
    return granted;
}

static void push_here(struct pushing *p, uint32_t d)
{
    struct ht *h = p->h;
    struct ep_host_handle *handle = h->handle;
    const struct ep_host_payload *x = p->payload;
    uint32_t first = handle->dest_first[d], count = handle->dest_first[d + 1] - first, i = 0;
    struct ep_host_grant grant;
    uint8_t *window;

    if (!read_grant(h, d, &grant) || count == 0 || !(window = ht_enter(h->call->team, h->call->rank, d, h->tag)))
        return;
    for (; i < count && ht_may_push(h->call->team, d, h->tag); i++) {
        uint64_t t = handle->dest_token[first + i];

        (void)ht_place_row(h->call->team, &grant, d, window, handle->choices + t * handle->top_k, handle->top_k,
                           (uint32_t)t, x->rows + t * x->row_bytes,
                           x->scales ? x->scales + t * x->scale_bytes : NULL);
    }
    if (i == count) {
        ht_announce(h->call->team, h->call->rank, d, window, h->tag, count);
        handle->sent[d] = count;
        if (d != h->call->rank && grant.out)
            h->call->result->wire_bytes += (uint64_t)count * (x->row_bytes + x->scale_bytes);
    }
    ep_host_gate_leave(h->call->me);
}

/* All of a node's ranks that are pending have answered, or will not. */
static enum ht_state node_state(struct pushing *p, uint32_t node, uint32_t *blocked)
{
    bool any = false;

    for (uint32_t d = 0; d < ht_ranks(p->h); d++) {
        uint32_t answer;

        if (!ep_mask_test(p->pending, d) || p->h->call->team->node[d] != node)
            continue;
        any = true;
        switch (answer_of(p->h, d, &answer)) {
        case HT_WAIT: *blocked = d; return HT_WAIT;
        case HT_GONE: ep_mask_clear(p->granted, d); break;
        case HT_THERE:
            if (answer == EP_HOST_GRANTED)
                ep_mask_set(p->granted, d);
            break;
        }
    }
    return any ? HT_THERE : HT_GONE;
}

static void serve_node(struct pushing *p, uint32_t node, bool *done, uint32_t *blocked, ep_status *status)
{
    switch (node_state(p, node, blocked)) {
    case HT_WAIT: *done = false; return;
    case HT_GONE: return;
    case HT_THERE: break;
    }
    *status = ht_send_rows(p->h, p->payload, node, p->granted);
    for (uint32_t d = 0; d < ht_ranks(p->h); d++)
        if (p->h->call->team->node[d] == node)
            ep_mask_clear(p->pending, d);
}

static void push_round(void *user, bool *done, uint32_t *blocked, ep_status *status)
{
    struct pushing *p = user;
    const struct ep_host_shape *shape = &p->h->call->team->shape;

    for (uint32_t i = 1; i <= ht_ranks(p->h); i++) { /* the next one first: not all push to the same */
        uint32_t d = (p->h->call->rank + i) % ht_ranks(p->h), answer;

        if (!ep_mask_test(p->pending, d) || !ht_is_here(p->h, d))
            continue;
        switch (answer_of(p->h, d, &answer)) {
        case HT_WAIT: *blocked = d; *done = false; continue;
        case HT_THERE: push_here(p, d); break;
        case HT_GONE: break;
        }
        ep_mask_clear(p->pending, d);
    }
    for (uint32_t i = 1; i < shape->nodes && *status == EP_OK; i++)
        serve_node(p, (shape->own + i) % shape->nodes, done, blocked, status);
}

static bool some_answer(void *user)
{
    struct pushing *p = user;
    uint32_t blocked, answer;

    for (uint32_t d = 0; d < ht_ranks(p->h); d++)
        if (ep_mask_test(p->pending, d) && ht_is_here(p->h, d) && answer_of(p->h, d, &answer) != HT_WAIT)
            return true;
    for (uint32_t n = 0; n < p->h->call->team->shape.nodes; n++)
        if (n != p->h->call->team->shape.own && node_state(p, n, &blocked) == HT_THERE)
            return true;
    return false;
}

static void count_dropped(struct ht *h)
{
    const struct ep_host_handle *handle = h->handle;

    h->call->result->dropped = handle->bad;
    for (uint32_t d = 0; d < ht_ranks(h); d++)
        if (handle->sent[d] != handle->dest_first[d + 1] - handle->dest_first[d])
            h->call->result->dropped += ep_host_routes_to(handle, d);
}

static ep_status push_all(struct ht *h, const struct ep_host_payload *payload)
{
    struct pushing p = { .h = h, .payload = payload };
    ep_status status;

    memset(h->handle->sent, 0, ht_ranks(h) * sizeof *h->handle->sent);
    memset(h->handle->node_count, 0, h->call->team->shape.nodes * sizeof *h->handle->node_count);
    h->handle->node_total = 0;
    memcpy(p.pending, h->expected, sizeof p.pending);
    status = ht_rounds(h, push_round, some_answer, &p, EP_WAIT_READY);
    count_dropped(h);
    return status;
}

static ep_status run(struct ht *h)
{
    struct ep_host_payload payload;
    ep_status status;

    ep_host_payload_prepare(h->call, &payload);
    ask_here(h);
    status = ht_send_asks(h);
    if (status == EP_OK)
        status = await_asks(h);
    if (status != EP_OK)
        return status;
    grant_all(h);
    status = ht_send_grants(h);
    if (status == EP_OK)
        status = push_all(h, &payload);
    return status == EP_OK ? ht_await_flags(h, h->members, h->call->me->source_count) : status;
}

ep_status ep_host_ht_dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;
    struct ht h = { .call = call,
                    .handle = handle,
                    .op = op,
                    .row_bytes = call->team->map.limits.hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype),
                    .traits = { .dtype = op->wire_dtype, .scale_format = op->scale_format } };
    ep_status status = ep_host_begin(call, EP_MODE_HT, h.expected, &h.number), given;

    if (status != EP_OK)
        return status;
    if (op->wire_dtype == EP_FP8_E4M3)
        h.scale_bytes = ep_row_scale_bytes(call->team->map.limits.hidden, op->scale_format);
    call->me->ht_combines = 0;
    h.tag = ep_ht_tag(h.number, 0);
    handle->number = h.number;
    call->result->logical_bytes = (uint64_t)op->tokens * op->top_k * h.row_bytes;
    status = run(&h);
    ht_close(&h, status);
    if (status != EP_OK)
        return status;
    given = ht_give_rows(&h);
    status = ht_finish(&h);
    return status != EP_OK ? status : given;
}
