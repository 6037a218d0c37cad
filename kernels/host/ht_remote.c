/* HT with ranks of other nodes: frames to them, and what theirs do here. */
#include <string.h>

#include "ht.h"

static uint8_t *payload_of(struct ep_host_frame *frame) { return (uint8_t *)(frame + 1); }

static bool has_some(const struct ht *h, const uint64_t *mask, uint32_t node)
{
    for (uint32_t r = 0; r < ht_ranks(h); r++)
        if (ep_mask_test(mask, r) && h->call->team->node[r] == node)
            return true;
    return false;
}

/* Whom a frame to the node is for, when it is for all of its ranks: whoever is waited for, and named, when there is no room;
 * so one that takes part, where one does. */
static uint32_t first_on(const struct ht *h, uint32_t node)
{
    uint32_t first = ht_ranks(h);

    for (uint32_t r = 0; r < ht_ranks(h); r++) {
        if (h->call->team->node[r] != node)
            continue;
        if (ep_mask_test(h->expected, r))
            return r;
        first = r < first ? r : first;
    }
    return first;
}

static ep_status begin(struct ht *h, uint32_t node, uint64_t payload_bytes, struct ep_host_frame **frame)
{
    ep_status status = ep_host_place(h->call, first_on(h, node), (uint32_t)(sizeof **frame + payload_bytes), frame);

    if (status == EP_OK && *frame)
        **frame = (struct ep_host_frame){ .rank = h->call->rank, .peer = first_on(h, node), .number = h->tag };
    return status;
}

static void commit(struct ht *h, uint32_t node, enum ep_host_frame_kind kind)
{
    ep_host_net_commit(h->call->team->net, node, (uint32_t)kind);
}

/* ---- asks and grants ------------------------------------------------------------------------ */

/* A dispatch's has counts for each rank of the node. */
static ep_status send_ask(struct ht *h, uint32_t node)
{
    struct ep_host_team *team = h->call->team;
    uint32_t each = 1 + ht_local(h);
    struct ep_host_frame *frame;
    uint32_t *counts;
    ep_status status = begin(h, node, ep_host_ht_ask_bytes(&team->shape, node, h->tag), &frame);

    if (status != EP_OK || !frame)
        return status;
    memcpy(payload_of(frame), &h->traits, sizeof h->traits);
    counts = (uint32_t *)(void *)(payload_of(frame) + sizeof h->traits);
    for (uint32_t d = 0; ep_host_is_dispatch(h->tag) && d < ht_ranks(h); d++)
        if (team->node[d] == node) {
            ht_count_rows(h, d, counts);
            counts += each;
        }
    commit(h, node, EP_FRAME_HT_ASK);
    return EP_OK;
}

ep_status ht_send_asks(struct ht *h)
{
    const struct ep_host_shape *shape = &h->call->team->shape;
    ep_status status = EP_OK;

    for (uint32_t n = 0; n < shape->nodes && status == EP_OK; n++)
        if (n != shape->own && has_some(h, h->expected, n))
            status = send_ask(h, n);
    ep_host_flush(h->call->team);
    return status;
}

static ep_status send_grant(struct ht *h, uint32_t node)
{
    const struct ep_host_team *team = h->call->team;
    struct ep_host_frame *frame;
    uint32_t *answers;
    ep_status status = begin(h, node, ep_host_ranks_on(&team->shape, node) * sizeof *answers, &frame);

    if (status != EP_OK || !frame)
        return status;
    answers = (uint32_t *)(void *)payload_of(frame);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        if (team->node[s] == node) /* nobody else writes grants of this rank */
            *answers++ = h->call->me->grants[s].tag == h->tag ? h->call->me->grants[s].answer : EP_HOST_UNANSWERED;
    commit(h, node, EP_FRAME_HT_GRANT);
    return EP_OK;
}

ep_status ht_send_grants(struct ht *h)
{
    const struct ep_host_shape *shape = &h->call->team->shape;
    ep_status status = EP_OK;

    for (uint32_t n = 0; n < shape->nodes && status == EP_OK; n++)
        if (n != shape->own && has_some(h, h->expected, n))
            status = send_grant(h, n);
    ep_host_flush(h->call->team);
    return status;
}

/* ---- rows ---------------------------------------------------------------------------------------- */

static bool goes_to(const struct ht *h, uint32_t t, uint32_t node, const uint64_t *granted)
{
    const struct ep_host_choice *choice = h->handle->choices + (uint64_t)t * h->handle->top_k;

    for (uint32_t j = 0; j < h->handle->top_k; j++)
        if (choice[j].rank >= 0 && h->call->team->node[choice[j].rank] == node &&
            ep_mask_test(granted, (uint32_t)choice[j].rank))
            return true;
    return false;
}

static void list_tokens(struct ht *h, uint32_t node, const uint64_t *granted)
{
    struct ep_host_handle *handle = h->handle;

    handle->node_first[node] = handle->node_total;
    for (uint32_t t = 0; t < handle->tokens; t++)
        if (goes_to(h, t, node, granted))
            handle->node_token[handle->node_total++] = t;
    handle->node_count[node] = handle->node_total - handle->node_first[node];
}

/* What of the token's choices concerns that node. */
static void write_choices(const struct ht *h, uint32_t t, uint32_t node, const uint64_t *granted,
                          struct ep_host_choice *to)
{
    const struct ep_host_choice *choice = h->handle->choices + (uint64_t)t * h->handle->top_k;

    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++) {
        bool there = j < h->handle->top_k && choice[j].rank >= 0 && h->call->team->node[choice[j].rank] == node &&
                     ep_mask_test(granted, (uint32_t)choice[j].rank);

        to[j] = there ? choice[j] : (struct ep_host_choice){ .rank = -1, .local = -1 };
    }
}

static void write_rows(const struct ht *h, const struct ep_host_payload *x, uint32_t node, const uint64_t *granted,
                       struct ep_host_frame *frame)
{
    const struct ep_layout_map *map = &h->call->team->map;
    const struct ep_host_sections at = ep_host_ht_rows_sections(map, frame->count, x->row_bytes, x->scale_bytes);
    const uint32_t *list = h->handle->node_token + h->handle->node_first[node] + frame->first;
    uint8_t *payload = payload_of(frame);

    for (uint32_t i = 0; i < frame->count; i++) {
        uint32_t t = list[i];

        ((uint32_t *)(void *)payload)[i] = t;
        write_choices(h, t, node, granted,
                      (struct ep_host_choice *)(void *)(payload + at.choices) + (uint64_t)i * map->limits.top_k);
        if (x->scale_bytes)
            memcpy(payload + at.scales + (uint64_t)i * x->scale_bytes, x->scales + (uint64_t)t * x->scale_bytes,
                   x->scale_bytes);
        ep_host_copy_row(payload + at.rows + (uint64_t)i * x->row_bytes, x->rows + (uint64_t)t * x->row_bytes,
                         x->row_bytes);
    }
}

static void mark_sent(struct ht *h, uint32_t node, const uint64_t *granted)
{
    struct ep_host_handle *handle = h->handle;

    for (uint32_t d = 0; d < ht_ranks(h); d++)
        if (h->call->team->node[d] == node && ep_mask_test(granted, d))
            handle->sent[d] = handle->dest_first[d + 1] - handle->dest_first[d];
}

ep_status ht_send_rows(struct ht *h, const struct ep_host_payload *x, uint32_t node, const uint64_t *granted)
{
    const struct ep_layout_map *map = &h->call->team->map;
    const uint64_t each = sizeof(uint32_t) + map->limits.top_k * sizeof(struct ep_host_choice) + x->scale_bytes +
                          x->row_bytes;
    const uint32_t most = (uint32_t)((ep_host_net_most(h->call->team->net) - sizeof(struct ep_host_frame) -
                                      4 * EP_HOST_SECTION) / each);
    uint32_t first = 0, total;

    list_tokens(h, node, granted);
    total = h->handle->node_count[node];
    while (first < total) {
        uint32_t count = total - first < most ? total - first : most;
        struct ep_host_frame *frame;
        ep_status status = begin(h, node, ep_host_ht_rows_sections(map, count, x->row_bytes, x->scale_bytes).bytes,
                                 &frame);

        if (status != EP_OK || !frame)
            return status;
        frame->first = first;
        frame->count = count;
        frame->total = total;
        frame->last = first + count == total;
        frame->row_bytes = x->row_bytes;
        frame->scale_bytes = x->scale_bytes;
        write_rows(h, x, node, granted, frame);
        commit(h, node, EP_FRAME_HT_ROWS);
        ep_host_net_flush(h->call->team->net, node); /* it travels while the next one is made */
        first += count;
    }
    h->call->result->wire_bytes += (uint64_t)total * (x->row_bytes + x->scale_bytes);
    mark_sent(h, node, granted);
    return EP_OK;
}

/* ---- what comes: the net's thread ----------------------------------------------------------------- */

/* No rank sends more than it may have. */
static bool counts_good(const struct ep_host_team *team, const uint32_t *counts)
{
    for (uint32_t i = 0; i <= team->map.limits.local_experts; i++)
        if (counts[i] > team->map.limits.ht_max_tokens || counts[i] > counts[0])
            return false;
    return true;
}

bool ep_host_ht_take_ask(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    const uint32_t each = 1 + team->map.limits.local_experts;
    struct ep_host_ask ask = { .tag = head->number };
    const uint32_t *counts = (const uint32_t *)(const void *)(payload + sizeof ask.traits);

    memcpy(&ask.traits, payload, sizeof ask.traits);
    for (uint32_t d = 0; d < team->map.limits.ranks; d++) {
        if (!ep_host_is_here(team, d))
            continue;
        if (ep_host_is_dispatch(head->number)) {
            if (!counts_good(team, counts))
                return false;
            ask.counts = (uint32_t *)(uintptr_t)counts; /* read only */
            counts += each;
        }
        ht_put_ask(team, d, head->rank, &ask);
    }
    return true;
}

void ep_host_ht_take_grants(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    const uint32_t *answers = (const uint32_t *)(const void *)payload;

    for (uint32_t s = 0; s < team->map.limits.ranks; s++) {
        struct ep_host_told *told;
        uint32_t answer;

        if (!ep_host_is_here(team, s))
            continue;
        answer = *answers++;
        if (answer != EP_HOST_GRANTED && answer != EP_HOST_MISFIT)
            continue;
        told = &team->ranks[s].told[head->rank];
        __atomic_store_n(&told->answer, answer, __ATOMIC_RELAXED);
        __atomic_store_n(&told->tag, head->number, __ATOMIC_SEQ_CST); /* partner: answer_of */
        ep_host_wake(team, s);
    }
}

/* The stand-in's copies of what ranks here have granted to s. */
static void copy_grants(struct ep_host_team *team, uint32_t s)
{
    const uint64_t bytes = team->map.limits.local_experts * sizeof(uint32_t);

    for (uint32_t d = 0; d < team->map.limits.ranks; d++) {
        struct ep_host_grant *mine = &team->ranks[s].grants[d], *theirs;
        uint32_t *next = mine->next, *end = mine->end;

        if (!ep_host_is_here(team, d))
            continue;
        theirs = &team->ranks[d].grants[s];
        pthread_mutex_lock(&team->ranks[d].notes);
        *mine = *theirs;
        memcpy(next, theirs->next, bytes);
        memcpy(end, theirs->end, bytes);
        pthread_mutex_unlock(&team->ranks[d].notes);
        mine->next = next;
        mine->end = end;
    }
}

struct row {
    const struct ep_host_choice *choice; /* [K] */
    const uint8_t *row, *scale;
    uint32_t token;
};

static bool choices_good(const struct ep_host_team *team, const struct ep_host_choice *choice)
{
    for (uint32_t j = 0; j < team->map.limits.top_k; j++) {
        if (choice[j].rank == -1)
            continue;
        if (choice[j].rank < 0 || (uint32_t)choice[j].rank >= team->map.limits.ranks ||
            !ep_host_is_here(team, (uint32_t)choice[j].rank) || choice[j].local < 0 ||
            (uint32_t)choice[j].local >= team->local_experts[choice[j].rank])
            return false;
    }
    return true;
}

static bool first_of_rank(const struct ep_host_choice *choice, uint32_t j)
{
    for (uint32_t i = 0; i < j; i++)
        if (choice[i].rank == choice[j].rank)
            return false;
    return choice[j].rank >= 0;
}

/* To one of its ranks.  False: that rank has granted no such row. */
static bool spread_to(struct ep_host_team *team, const struct ep_host_frame *head, const struct row *row, uint32_t d)
{
    struct ep_host_grant *grant = &team->ranks[head->rank].grants[d];
    uint8_t *window;
    bool good;

    if (grant->tag != head->number || grant->answer != EP_HOST_GRANTED)
        return true; /* it has gone on to another op meanwhile */
    if (grant->row_bytes != head->row_bytes || grant->scale_bytes != head->scale_bytes)
        return false;
    window = ht_enter(team, head->rank, d, head->number);
    if (!window)
        return true;
    good = ht_place_row(team, grant, d, window, row->choice, team->map.limits.top_k, row->token, row->row, row->scale);
    ep_host_gate_leave(&team->ranks[head->rank]);
    return good;
}

static bool spread(struct ep_host_team *team, const struct ep_host_frame *head, const struct row *row)
{
    if (!choices_good(team, row->choice))
        return false;
    for (uint32_t j = 0; j < team->map.limits.top_k; j++)
        if (first_of_rank(row->choice, j) && !spread_to(team, head, row, (uint32_t)row->choice[j].rank))
            return false;
    return true;
}

static void announce_all(struct ep_host_team *team, const struct ep_host_frame *head)
{
    for (uint32_t d = 0; d < team->map.limits.ranks; d++) {
        const struct ep_host_grant *grant = &team->ranks[head->rank].grants[d];
        uint8_t *window;

        if (!ep_host_is_here(team, d) || grant->tag != head->number || grant->answer != EP_HOST_GRANTED ||
            grant->all == 0 || grant->rows > 0 || !(window = ht_enter(team, head->rank, d, head->number)))
            continue;
        ht_announce(team, head->rank, d, window, head->number, grant->all);
        ep_host_gate_leave(&team->ranks[head->rank]);
    }
}

/* A private copy of what is judged: the frame lies where another process puts. */
static bool take_row(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload, uint32_t i)
{
    const struct ep_layout_map *map = &team->map;
    const struct ep_host_sections at = ep_host_ht_rows_sections(map, head->count, head->row_bytes, head->scale_bytes);
    struct ep_host_choice choice[EP_MAX_TOP_K];
    struct row row = { .choice = choice,
                       .row = payload + at.rows + (uint64_t)i * head->row_bytes,
                       .scale = payload + at.scales + (uint64_t)i * head->scale_bytes,
                       .token = ((const uint32_t *)(const void *)payload)[i] };

    memcpy(choice, payload + at.choices + (uint64_t)i * map->limits.top_k * sizeof *choice,
           map->limits.top_k * sizeof *choice);
    return spread(team, head, &row);
}

bool ep_host_ht_take_rows(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    if (head->first == 0)
        copy_grants(team, head->rank);
    for (uint32_t i = 0; i < head->count; i++)
        if (!take_row(team, head, payload, i))
            return false;
    if (head->last)
        announce_all(team, head);
    return true;
}

/* Which of the tokens that s sent to the node; false: none of them. */
static bool find_token(const struct ep_host_handle *handle, uint32_t node, uint32_t token, uint32_t *slot)
{
    const uint32_t *list = handle->node_token + handle->node_first[node];
    uint32_t low = 0, high = handle->node_count[node];

    while (low < high) {
        uint32_t middle = (low + high) / 2;

        if (list[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    *slot = low;
    return low < handle->node_count[node] && list[low] == token;
}

/* In the gate of s.  Tokens that s did not send are what a worker there wrote over its headers: nobody asked for
 * them. */
static void place_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload,
                           uint8_t *window)
{
    const struct ep_layout_map *map = &team->map;
    const struct ep_host_handle *handle = team->ranks[head->peer].open.handle;
    const uint32_t node = team->node[head->rank];
    const struct ep_host_sections at = ep_host_ht_partials_sections(ep_host_ranks_on(&team->shape, node), head->count,
                                                                    head->row_bytes, head->scale_bytes);
    const uint32_t base = ht_node_base(team, handle, node);

    for (uint32_t i = 0; i < head->count; i++) {
        uint32_t slot;

        if (!find_token(handle, node, ((const uint32_t *)(const void *)(payload + at.tokens))[i], &slot))
            continue;
        ep_host_copy_row(window + map->ht_combine_rows + (uint64_t)(base + slot) * head->row_bytes,
                         payload + at.rows + (uint64_t)i * head->row_bytes, head->row_bytes);
        if (head->scale_bytes)
            memcpy(window + map->ht_combine_grads + (uint64_t)(base + slot) * head->scale_bytes,
                   payload + at.scales + (uint64_t)i * head->scale_bytes, head->scale_bytes);
    }
}

static void end_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    const uint32_t *given = (const uint32_t *)(const void *)payload, node = team->node[head->rank];
    struct ep_host_rank *s = &team->ranks[head->peer];

    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        if (team->node[r] == node)
            s->contributed[r] = *given++ != 0;
    __atomic_store_n(&s->node_done[node], head->number, __ATOMIC_SEQ_CST); /* partner: sum_settled */
    ep_host_wake(team, head->peer);
}

bool ep_host_ht_take_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    const struct ep_host_open *open = &team->ranks[head->peer].open;
    uint8_t *window = ht_enter(team, head->rank, head->peer, head->number);
    bool good = true;

    if (!window)
        return true;
    if (__atomic_load_n(&open->tag, __ATOMIC_SEQ_CST) == head->number) { /* partner: ht_open */
        good = head->row_bytes == open->row_bytes &&
               head->scale_bytes == (open->wants_grads ? team->map.limits.top_k * sizeof(float) : 0);
        if (good)
            place_partials(team, head, payload, window);
        if (good && head->last)
            end_partials(team, head, payload);
    }
    ep_host_gate_leave(&team->ranks[head->rank]);
    return good;
}
