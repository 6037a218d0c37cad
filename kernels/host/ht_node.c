/*
 * What a node's ranks have of the tokens of a rank elsewhere, summed up before it travels.
 *
 * Each rank offers its rows when its combine begins.  When all ranks of the node that take part have come, the first to
 * see it makes the sums for one rank elsewhere, straight from what the others offer, and so for each such rank; nobody
 * goes on before the sums that read its rows are made.  A rank's part is rounded once, the sum of the node, ascending
 * by rank, once more.
 *
 * Who reads what others offer is announced as a writer is, to any window (gate): a rank that leaves, or whose time is
 * over, withdraws its offer and waits until nobody is announced.  Nothing is waited for in there.  When an offer goes
 * away between two frames the sums for that rank are made anew without it; the last frame says whose parts are in them.
 * When the rank that makes them leaves, another one takes over.
 */
#include <string.h>

#include "ht.h"

static bool over_nodes(const struct ht *h) { return h->call->team->shape.nodes > 1; }

/* ---- offers -------------------------------------------------------------------------------- */

void ht_offer(struct ht *h, bool usable)
{
    struct ep_host_offer *offer = &h->call->me->offer;

    if (!over_nodes(h))
        return;
    offer->handle = h->handle;
    offer->op = h->op;
    offer->usable = usable;
    __atomic_store_n(&offer->tag, h->tag, __ATOMIC_SEQ_CST); /* partner: offered */
    ep_host_wake_all(h->call->team);
}

void ht_withdraw(struct ht *h)
{
    if (!over_nodes(h))
        return;
    __atomic_store_n(&h->call->me->offer.tag, 0, __ATOMIC_SEQ_CST); /* partner: offered, in the gate */
    ep_host_gate_drain(h->call->team, h->call->rank);
}

static bool offered(const struct ht *h, uint32_t r)
{
    return __atomic_load_n(&h->call->team->ranks[r].offer.tag, __ATOMIC_SEQ_CST) == h->tag &&
           !ep_host_is_absent(h->call->team, r);
}

/* The first rank of this node that may still come, or R. */
static uint32_t first_to_come(const struct ht *h)
{
    for (uint32_t r = 0; r < ht_ranks(h); r++)
        if (ep_mask_test(h->expected, r) && ht_is_here(h, r) && !offered(h, r) &&
            !ht_is_over(h->call->team, r, h->tag))
            return r;
    return ht_ranks(h);
}

enum ht_state ht_sum_state(const struct ht *h, uint32_t s, uint32_t *blocked)
{
    const struct ep_host_rank *source = &h->call->team->ranks[s];
    enum ht_state asked;
    uint32_t late;

    if (__atomic_load_n(&source->reduced, __ATOMIC_SEQ_CST) >= h->tag)
        return HT_GONE;
    *blocked = s;
    asked = ht_ask_state(h, s);
    if (asked != HT_THERE || __atomic_load_n(&source->claimed, __ATOMIC_SEQ_CST) >= h->tag)
        return asked == HT_GONE ? HT_GONE : HT_WAIT;
    late = first_to_come(h);
    if (late == ht_ranks(h))
        return HT_THERE;
    *blocked = late;
    return HT_WAIT;
}

/* ---- one sum ---------------------------------------------------------------------------------- */

struct summing {
    struct ht *h;
    uint32_t s;
    struct ep_host_traits traits;      /* of s */
    uint64_t givers[EP_MASK_WORDS];    /* ranks whose rows are in it */
    uint32_t *next;                    /* [R] next row of each */
};

/* In the gate. */
static bool gives(const struct summing *m, uint32_t r)
{
    const struct ep_host_offer *offer = &m->h->call->team->ranks[r].offer;
    const struct ep_host_handle *handle;

    if (!ht_is_here(m->h, r) || !offered(m->h, r) || !offer->usable)
        return false;
    handle = offer->handle;
    return handle->number == m->traits.routing && offer->op->input_dtype == m->traits.dtype &&
           ep_mask_test(handle->participants, m->s) && handle->source_first[m->s + 1] > handle->source_first[m->s];
}

static bool all_still_give(const struct summing *m)
{
    for (uint32_t r = 0; r < ht_ranks(m->h); r++)
        if (ep_mask_test(m->givers, r) && !offered(m->h, r))
            return false;
    return true;
}

static const struct ep_host_handle *handle_of(const struct summing *m, uint32_t r)
{
    return m->h->call->team->ranks[r].offer.handle;
}

/* The token of r's next row; rows whose headers were overwritten are passed over.  False: it has no more. */
static bool token_of(const struct summing *m, uint32_t r, uint32_t *token)
{
    const struct ep_host_handle *handle = handle_of(m, r);

    while (m->next[r] < handle->source_first[m->s + 1] && handle->arrived_token[m->next[r]] == EP_NO_TOKEN)
        m->next[r]++;
    if (m->next[r] == handle->source_first[m->s + 1])
        return false;
    *token = handle->arrived_token[m->next[r]];
    return true;
}

static bool lowest_token(const struct summing *m, uint32_t *lowest)
{
    bool some = false;

    for (uint32_t r = 0; r < ht_ranks(m->h); r++) {
        uint32_t token;

        if (!ep_mask_test(m->givers, r) || !token_of(m, r, &token) || (some && token >= *lowest))
            continue;
        *lowest = token;
        some = true;
    }
    return some;
}

static void rewind_all(const struct summing *m)
{
    for (uint32_t r = 0; r < ht_ranks(m->h); r++)
        if (ep_mask_test(m->givers, r))
            m->next[r] = handle_of(m, r)->source_first[m->s];
}

/* How many sums there will be. */
static uint32_t count_tokens(const struct summing *m)
{
    uint32_t token, lowest = 0, n = 0;

    rewind_all(m);
    for (; lowest_token(m, &lowest); n++)
        for (uint32_t r = 0; r < ht_ranks(m->h); r++)
            if (ep_mask_test(m->givers, r) && token_of(m, r, &token) && token == lowest)
                m->next[r]++;
    rewind_all(m);
    return n;
}

/* r's part of a row of its, rounded once: where it lies, or summed up into `to`. */
static const void *part_of(const struct summing *m, uint32_t r, uint32_t i, uint8_t *to)
{
    const struct ep_host_team *team = m->h->call->team;
    const struct ep_op *op = team->ranks[r].offer.op;
    const uint8_t *x = op->x.bytes ? team->ranks[r].window + op->x.offset : NULL;
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t n;

    if (op->layout != EP_LAYOUT_PACKED)
        return x + (uint64_t)i * m->h->row_bytes;
    n = ep_host_partial_terms(team, handle_of(m, r), i, x, m->h->row_bytes, rows, weights);
    ep_host_sum((ep_dtype)op->input_dtype, to, rows, weights, n, team->map.limits.hidden);
    return to;
}

static void add_grads(const struct summing *m, uint32_t r, uint32_t i, float *grads)
{
    const struct ep_host_team *team = m->h->call->team;
    const struct ep_host_arrived *arrived = handle_of(m, r)->arrived + (uint64_t)i * team->map.limits.top_k;
    float own[EP_MAX_TOP_K];

    ht_write_grads(team, r, handle_of(m, r), team->ranks[r].offer.op, i, own);
    for (uint32_t j = 0; j < team->map.limits.top_k; j++)
        if (arrived[j].local >= 0)
            grads[j] = own[j];
}

/* The next token: its sum and its gradients (NULL: nobody wants them). */
static uint32_t sum_next(const struct summing *m, uint8_t *to, float *grads)
{
    const struct ep_layout_map *map = &m->h->call->team->map;
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t lowest = 0, token, n = 0;

    (void)lowest_token(m, &lowest); /* count_tokens has found it */
    if (grads)
        memset(grads, 0, map->limits.top_k * sizeof *grads);
    for (uint32_t r = 0; r < ht_ranks(m->h) && n < map->ht_fanout; r++) {
        if (!ep_mask_test(m->givers, r) || !token_of(m, r, &token) || token != lowest)
            continue;
        rows[n] = part_of(m, r, m->next[r], m->h->call->me->partials + (uint64_t)n * map->combine_row_bytes);
        weights[n++] = 1.0f;
        if (grads)
            add_grads(m, r, m->next[r], grads);
        m->next[r]++;
    }
    if (n == 1) /* as it is: it has been rounded */
        ep_host_copy_row(to, rows[0], m->h->row_bytes);
    else
        ep_host_sum((ep_dtype)m->h->op->input_dtype, to, rows, weights, n, map->limits.hidden);
    return lowest;
}

/* ---- frames of it --------------------------------------------------------------------------------- */

static uint32_t grad_bytes(const struct summing *m)
{
    return m->traits.wants_grads ? m->h->call->team->map.limits.top_k * (uint32_t)sizeof(float) : 0;
}

static struct ep_host_sections sections_of(const struct summing *m, uint32_t count)
{
    return ep_host_ht_partials_sections(ep_host_ranks_on(&m->h->call->team->shape, m->h->call->team->shape.own), count,
                                        m->h->row_bytes, grad_bytes(m));
}

/* In the gate.  Which ranks of this node are in it, then tokens, gradients, sums. */
static void fill(const struct summing *m, struct ep_host_frame *frame, uint32_t count, bool last)
{
    const struct ep_host_sections at = sections_of(m, count);
    uint8_t *payload = (uint8_t *)(frame + 1);
    uint32_t *given = (uint32_t *)(void *)payload, *tokens = (uint32_t *)(void *)(payload + at.tokens);

    *frame = (struct ep_host_frame){ .rank = m->h->call->rank, .peer = m->s, .number = m->h->tag, .count = count,
                                     .total = count, .last = last, .row_bytes = m->h->row_bytes,
                                     .scale_bytes = grad_bytes(m) };
    for (uint32_t r = 0; r < ht_ranks(m->h); r++)
        if (ht_is_here(m->h, r))
            *given++ = ep_mask_test(m->givers, r);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = sum_next(m, payload + at.rows + (uint64_t)i * m->h->row_bytes,
                             grad_bytes(m) ? (float *)(void *)(payload + at.scales) +
                                                 (uint64_t)i * m->h->call->team->map.limits.top_k
                                           : NULL);
}

/* In the gate, from the beginning: who gives, and how much. */
static uint32_t begin_sum(struct summing *m)
{
    uint32_t n;

    ep_host_gate_enter_any(m->h->call->me);
    memset(m->givers, 0, sizeof m->givers);
    for (uint32_t r = 0; r < ht_ranks(m->h); r++)
        if (gives(m, r))
            ep_mask_set(m->givers, r);
    n = count_tokens(m);
    ep_host_gate_leave(m->h->call->me);
    return n;
}

/* *again: somebody has withdrawn what is in it. */
static ep_status send_part(struct summing *m, uint32_t count, bool last, bool *again)
{
    struct ep_host_team *team = m->h->call->team;
    struct ep_host_frame *frame;
    ep_status status = ep_host_place(m->h->call, m->s, (uint32_t)(sizeof *frame + sections_of(m, count).bytes), &frame);

    if (status != EP_OK || !frame)
        return status;
    ep_host_gate_enter_any(m->h->call->me);
    *again = !all_still_give(m);
    if (!*again)
        fill(m, frame, count, last);
    ep_host_gate_leave(m->h->call->me);
    if (*again) {
        ep_host_net_cancel(team->net, team->node[m->s]);
        return EP_OK;
    }
    ep_host_net_commit(team->net, team->node[m->s], EP_FRAME_HT_PARTIALS);
    m->h->call->result->wire_bytes += (uint64_t)count * m->h->row_bytes;
    return EP_OK;
}

static ep_status send_sum(struct summing *m)
{
    const uint64_t each = sizeof(uint32_t) + m->h->row_bytes + grad_bytes(m);
    const uint32_t most = (uint32_t)((ep_host_net_most(m->h->call->team->net) - sizeof(struct ep_host_frame) -
                                      sections_of(m, 0).bytes - 4 * EP_HOST_SECTION) / each);
    uint32_t left = begin_sum(m);
    bool last = false;

    while (!last && !ep_host_net_is_lost(m->h->call->team->net, m->h->call->team->node[m->s])) {
        uint32_t count = left < most ? left : most;
        bool again = false;
        ep_status status;

        last = count == left;
        status = send_part(m, count, last, &again);
        if (status != EP_OK)
            return status;
        left -= count;
        if (again) {
            left = begin_sum(m);
            last = false;
        }
    }
    return EP_OK;
}

static bool claim(struct ep_host_rank *source, uint64_t tag)
{
    uint64_t before = __atomic_load_n(&source->claimed, __ATOMIC_SEQ_CST);

    return before < tag && __atomic_compare_exchange_n(&source->claimed, &before, tag, false, __ATOMIC_SEQ_CST,
                                                       __ATOMIC_SEQ_CST);
}

/* What s asked for in this op; false: it has gone on to another one. */
static bool read_traits(const struct ht *h, uint32_t s, struct ep_host_traits *traits)
{
    bool there;

    pthread_mutex_lock(&h->call->me->notes);
    there = h->call->me->asks[s].tag == h->tag;
    *traits = h->call->me->asks[s].traits;
    pthread_mutex_unlock(&h->call->me->notes);
    return there;
}

/* After the claim: s cannot have got its sums from another rank and gone on.  *made: nobody has to make them again. */
static ep_status sum_claimed(struct ht *h, uint32_t s, bool *made)
{
    struct summing m = { .h = h, .s = s, .next = h->call->me->cursor };
    ep_status status;

    *made = false;
    if (!read_traits(h, s, &m.traits))
        return EP_OK;
    if (!ht_fit(&h->traits, &m.traits)) {
        h->mismatched = s;
        return EP_OK;
    }
    status = send_sum(&m);
    ep_host_flush(h->call->team);
    *made = status != EP_DETACHED; /* a rank that leaves lets another one do it */
    return status;
}

ep_status ht_sum(struct ht *h, uint32_t s)
{
    struct ep_host_rank *source = &h->call->team->ranks[s];
    ep_status status;
    bool made;

    if (!claim(source, h->tag))
        return EP_OK;
    status = sum_claimed(h, s, &made);
    if (made)
        __atomic_store_n(&source->reduced, h->tag, __ATOMIC_SEQ_CST); /* partner: ht_sum_state */
    else
        __atomic_store_n(&source->claimed, h->tag - 1, __ATOMIC_SEQ_CST);
    ep_host_wake_all(h->call->team);
    return status;
}

/* ---- sums that come ----------------------------------------------------------------------------------- */

uint32_t ht_node_base(const struct ep_host_team *team, const struct ep_host_handle *handle, uint32_t node)
{
    uint32_t base = handle->node_first[node];

    for (uint32_t d = 0; d < team->map.limits.ranks; d++)
        if (ep_host_is_here(team, d))
            base += handle->dest_first[d + 1] - handle->dest_first[d];
    return base;
}

void ht_open(struct ht *h)
{
    struct ep_host_open *open = &h->call->me->open;

    if (!over_nodes(h))
        return;
    open->handle = h->handle;
    open->row_bytes = h->row_bytes;
    open->wants_grads = h->traits.wants_grads;
    __atomic_store_n(&open->tag, h->tag, __ATOMIC_SEQ_CST); /* partner: ep_host_ht_take_partials */
}

struct awaited {
    const struct ht *h;
    uint32_t node;
    bool there;
};

static bool still_owes(const struct ht *h, uint32_t d)
{
    return h->handle->sent[d] > 0 && !ht_is_over(h->call->team, d, h->tag) &&
           __atomic_load_n(&h->call->me->asks[d].tag, __ATOMIC_SEQ_CST) <= h->tag;
}

/* It is there, or none of the node's ranks is left that would send it. */
static bool sum_settled(void *context)
{
    struct awaited *a = context;
    const struct ht *h = a->h;
    bool owed = false;

    for (uint32_t d = 0; d < ht_ranks(h); d++) /* first: what they send comes before they say that they are over */
        owed = owed || (h->call->team->node[d] == a->node && still_owes(h, d));
    a->there = __atomic_load_n(&h->call->me->node_done[a->node], __ATOMIC_SEQ_CST) == h->tag;
    return a->there || !owed;
}

/* Of the node's ranks the first that has not begun this op; or else one that owes a part. */
static uint32_t late_of(const struct ht *h, uint32_t node)
{
    uint32_t some = h->call->rank;

    for (uint32_t d = ht_ranks(h); d-- > 0;)
        if (h->call->team->node[d] == node && still_owes(h, d))
            some = d;
    for (uint32_t d = 0; d < ht_ranks(h); d++)
        if (h->call->team->node[d] == node && still_owes(h, d) &&
            __atomic_load_n(&h->call->me->asks[d].tag, __ATOMIC_SEQ_CST) < h->tag)
            return d;
    return some;
}

static ep_status await_sum(struct ht *h, uint32_t node)
{
    struct awaited a = { .h = h, .node = node };

    switch (ep_host_wait_for(h->call, late_of(h, node), sum_settled, &a)) {
    case EP_HOST_REACHED: break;
    case EP_HOST_LATE: return ep_host_late(h->call, late_of(h, node), EP_WAIT_ARRIVAL);
    case EP_HOST_DETACHED: return ep_host_detached(h->call);
    }
    for (uint32_t d = 0; d < ht_ranks(h); d++)
        if (a.there && h->call->team->node[d] == node && h->handle->sent[d] > 0 && h->call->me->contributed[d])
            ep_mask_set(h->arrived, d);
    return EP_OK;
}

ep_status ht_await_sums(struct ht *h)
{
    ep_status status = EP_OK;

    for (uint32_t d = 0; d < ht_ranks(h); d++) /* they owe nothing */
        if (ep_mask_test(h->expected, d) && !ht_is_here(h, d) && h->handle->sent[d] == 0 &&
            !ht_left_out(h->call->team, d, h->tag))
            ep_mask_set(h->arrived, d);
    for (uint32_t n = 0; n < h->call->team->shape.nodes && status == EP_OK; n++)
        if (h->handle->node_count[n] > 0)
            status = await_sum(h, n);
    return status;
}
