/*
 * High throughput: ready records, exact rows, and a gate that a late writer cannot pass.
 *
 * An op m has these steps.
 *   publish   the rank's record: where its rows go, how many it sends to whom
 *   agree     once every participant has published, has given m up or is absent, the first to see it
 *             writes the roster of m.  All ranks compute rows from the records of the roster, so no two
 *             of them can disagree about where a row goes, whoever dies meanwhile.
 *   push      rows (or partials) to each member through the gate, then the flag {m, count}
 *   await     the members' flags
 *   close     nothing more is taken for m; whoever still writes is waited for
 *   lay out   (or sum)
 * A rank that has joined has nothing to combine: the others' combines do not wait for it, and its first
 * dispatch takes the number of the next dispatch that they make.
 * Records and roster are double-buffered by parity and guarded by the team's mutex; a rank publishes
 * m + 2 only when m + 1 is over for it.
 *
 * A combine's partials lie at the source in the order of its lists: rank d's begin where the tokens for
 * ranks below d end, so d writes one contiguous piece.
 */
#include "host_private.h"

#include <string.h>

struct ht {
    struct ep_host_call *call;
    struct ep_host_handle *handle;
    const struct ep_op *op;
    uint64_t number;
    uint64_t expected[EP_MASK_WORDS]; /* participants when it began */
    uint64_t members[EP_MASK_WORDS];  /* of the roster, those whose op fits this one */
    uint64_t arrived[EP_MASK_WORDS];
    uint32_t mismatched; /* a member whose op does not fit, or R */
    uint32_t row_bytes, scale_bytes;
};

static uint32_t n_ranks(const struct ht *h) { return h->call->team->map.limits.ranks; }
static uint32_t n_local(const struct ht *h) { return h->call->team->map.limits.local_experts; }

/* ---- publish ---------------------------------------------------------------------------------- */

/* Counts lie by rank: rows to d at [d * (1 + L)], rows to its expert l at [d * (1 + L) + 1 + l]. */
static uint32_t *counts_of(const struct ht *h, uint32_t *counts, uint32_t d)
{
    return counts + (uint64_t)d * (1 + n_local(h));
}

/* Is choice j the first of its token that names this expert of this rank? */
static bool first_choice(const struct ep_host_choice *choice, uint32_t j)
{
    if (choice[j].rank < 0)
        return false;
    for (uint32_t i = 0; i < j; i++)
        if (choice[i].rank == choice[j].rank && choice[i].local == choice[j].local)
            return false;
    return true;
}

static void count_rows(const struct ht *h, uint32_t *counts)
{
    const struct ep_host_handle *handle = h->handle;

    memset(counts, 0, (uint64_t)n_ranks(h) * (1 + n_local(h)) * sizeof *counts);
    for (uint32_t d = 0; d < n_ranks(h); d++)
        *counts_of(h, counts, d) = handle->dest_first[d + 1] - handle->dest_first[d];
    for (uint32_t t = 0; t < handle->tokens; t++) {
        const struct ep_host_choice *choice = handle->choices + (uint64_t)t * handle->top_k;

        for (uint32_t j = 0; j < handle->top_k; j++)
            if (first_choice(choice, j))
                counts_of(h, counts, (uint32_t)choice[j].rank)[1 + choice[j].local]++;
    }
}

static void publish(struct ht *h)
{
    struct ep_host_team *team = h->call->team;
    struct ep_host_rank *me = h->call->me;
    struct ep_host_ready *record = &me->ready[h->number & 1];
    const struct ep_op *op = h->op;
    bool dispatch = op->kind == EP_OP_DISPATCH;

    if (dispatch)
        count_rows(h, me->dest_base); /* scratch until the plan is made */
    pthread_mutex_lock(&team->mutex);
    record->routing = dispatch ? 0 : h->handle->number;
    record->rows = op->out;
    record->scales = op->out_scales;
    record->op = op->kind;
    record->layout = op->layout;
    record->dtype = op->wire_dtype;
    record->scale_format = op->scale_format;
    record->alignment = op->alignment;
    record->wants_grads = op->topk_grads.bytes != 0;
    if (dispatch)
        memcpy(record->counts, me->dest_base, (uint64_t)n_ranks(h) * (1 + n_local(h)) * sizeof *record->counts);
    __atomic_store_n(&record->number, h->number, __ATOMIC_SEQ_CST); /* partner: published */
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
}

/* ---- agree ------------------------------------------------------------------------------------- */

static uint64_t closed(const struct ep_host_team *team, uint32_t r)
{
    return __atomic_load_n(&team->ranks[r].ht_closed, __ATOMIC_SEQ_CST);
}

static bool left_out(const struct ht *h, uint32_t r)
{
    const struct ep_host_team *team = h->call->team;

    return ep_host_is_absent(team, r) ||
           __atomic_load_n(&team->ranks[r].joined_ht, __ATOMIC_SEQ_CST) > h->number;
}

static bool fresh(const struct ht *h, uint32_t r)
{
    return __atomic_load_n(&h->call->team->ranks[r].ht_fresh, __ATOMIC_SEQ_CST) != 0;
}

static bool published(const struct ht *h, uint32_t r)
{
    const struct ep_host_ready *record = &h->call->team->ranks[r].ready[h->number & 1];

    return __atomic_load_n(&record->number, __ATOMIC_SEQ_CST) == h->number;
}

/* The first participant that is still to publish, or R. */
static uint32_t first_unready(const struct ht *h)
{
    for (uint32_t r = 0; r < n_ranks(h); r++)
        if (ep_mask_test(h->expected, r) && !left_out(h, r) && closed(h->call->team, r) < h->number &&
            !published(h, r) && !(h->op->kind == EP_OP_COMBINE && fresh(h, r)))
            return r;
    return n_ranks(h);
}

/* A later one of the same parity: the op went by without this rank. */
static bool decided(const struct ht *h)
{
    const struct ep_host_roster *roster = &h->call->team->roster[h->number & 1];

    return __atomic_load_n(&roster->number, __ATOMIC_SEQ_CST) >= h->number;
}

static bool may_agree(void *context)
{
    const struct ht *h = context;

    return decided(h) || first_unready(h) == n_ranks(h);
}

static bool ready_to_take_part(const struct ht *h, uint32_t r)
{
    return !left_out(h, r) && closed(h->call->team, r) < h->number && published(h, r);
}

/* Is it a combine for those who have something to combine?  Mutex held. */
static bool is_combine(const struct ht *h)
{
    for (uint32_t r = 0; r < n_ranks(h); r++)
        if (ready_to_take_part(h, r) && !fresh(h, r) &&
            h->call->team->ranks[r].ready[h->number & 1].op == EP_OP_COMBINE)
            return true;
    return false;
}

/* Mutex held. */
static void decide(const struct ht *h)
{
    struct ep_host_roster *roster = &h->call->team->roster[h->number & 1];
    bool combine = is_combine(h);

    memset(roster->members, 0, sizeof roster->members);
    for (uint32_t r = 0; r < n_ranks(h); r++) {
        if (!ready_to_take_part(h, r) || (combine && fresh(h, r)))
            continue;
        ep_mask_set(roster->members, r);
        __atomic_store_n(&h->call->team->ranks[r].ht_fresh, 0, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&roster->number, h->number, __ATOMIC_SEQ_CST);
}

/* ---- plan: mutex held ---------------------------------------------------------------------------- */

/* Do two ranks' ops belong together?  Every rank answers alike for every pair. */
static bool fit(const struct ep_host_ready *a, const struct ep_host_ready *b)
{
    return a->op == b->op && a->dtype == b->dtype && a->scale_format == b->scale_format &&
           a->routing == b->routing;
}

static const struct ep_host_ready *record_of(const struct ht *h, uint32_t r)
{
    return &h->call->team->ranks[r].ready[h->number & 1];
}

/* Copies the roster's records.  False when one was overwritten: its owner is two ops further. */
static bool copy_records(struct ht *h)
{
    const struct ep_host_roster *roster = &h->call->team->roster[h->number & 1];
    const struct ep_host_ready *mine = record_of(h, h->call->rank);

    memset(h->members, 0, sizeof h->members);
    h->mismatched = n_ranks(h);
    for (uint32_t r = 0; r < n_ranks(h); r++) {
        if (!ep_mask_test(roster->members, r))
            continue;
        if (record_of(h, r)->number != h->number)
            return false;
        h->call->me->peers[r] = *record_of(h, r);
        if (fit(mine, record_of(h, r)))
            ep_mask_set(h->members, r);
        else
            h->mismatched = r;
    }
    return true;
}

/* Where this rank's rows begin at d, how many rows d's `out` has. */
static void plan_destination(struct ht *h, uint32_t d, uint32_t *total)
{
    const struct ep_host_ready *there = record_of(h, d);
    uint32_t *base = counts_of(h, h->call->me->dest_base, d), n = 1 + n_local(h);
    uint32_t *offset = h->call->me->expert_offset;

    memset(base, 0, n * sizeof *base);
    memset(total, 0, n * sizeof *total);
    for (uint32_t s = 0; s < n_ranks(h); s++) {
        const uint32_t *counts;

        if (!ep_mask_test(h->members, s))
            continue;
        counts = counts_of(h, record_of(h, s)->counts, d);
        for (uint32_t i = 0; i < n; i++) {
            if (s == h->call->rank)
                base[i] = total[i];
            total[i] += counts[i];
        }
    }
    h->call->me->dest_rows[d] = total[0];
    if (there->layout != EP_LAYOUT_PACKED)
        return;
    h->call->me->dest_rows[d] = ep_host_packed_offsets(total + 1, n_local(h), there->alignment, offset);
    for (uint32_t l = 0; l < n_local(h); l++)
        base[1 + l] += offset[l];
}

/* What this rank receives from whom, and where its partials go later. */
static void plan_source(struct ht *h, uint32_t s)
{
    struct ep_host_rank *me = h->call->me;
    uint32_t *counts = record_of(h, s)->counts, *mine = counts_of(h, counts, h->call->rank);

    me->source_count[s] = mine[0];
    memcpy(me->source_expert + (uint64_t)s * n_local(h), mine + 1, n_local(h) * sizeof *mine);
    h->handle->source_base[s] = 0;
    for (uint32_t d = 0; d < h->call->rank; d++)
        h->handle->source_base[s] += *counts_of(h, counts, d);
}

static void plan_dispatch(struct ht *h)
{
    struct ep_host_rank *me = h->call->me;
    uint32_t *total = me->total;

    memset(me->source_count, 0, n_ranks(h) * sizeof *me->source_count);
    memset(me->source_expert, 0, (uint64_t)n_ranks(h) * n_local(h) * sizeof *me->source_expert);
    for (uint32_t r = 0; r < n_ranks(h); r++)
        if (ep_mask_test(h->members, r)) {
            plan_destination(h, r, total);
            plan_source(h, r);
        }
}

/* Takes part in the roster, or gives the op up when it is late; both under the mutex, so that they
 * exclude each other.  *unready: whom the op still waits for. */
static bool join_roster(struct ht *h, bool late, uint32_t *unready)
{
    const struct ep_host_roster *roster = &h->call->team->roster[h->number & 1];
    bool in;

    pthread_mutex_lock(&h->call->team->mutex);
    *unready = first_unready(h);
    if (!decided(h) && *unready == n_ranks(h))
        decide(h);
    in = roster->number == h->number && ep_mask_test(roster->members, h->call->rank) && copy_records(h);
    if (in && h->op->kind == EP_OP_DISPATCH)
        plan_dispatch(h);
    if (!in && (late || decided(h)))
        __atomic_store_n(&h->call->me->ht_closed, h->number, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&h->call->team->mutex);
    ep_host_wake_all(h->call->team);
    return in;
}

/* Until the rank is in the roster of its number, or will not be. */
static enum ep_host_wait_end await_roster(struct ht *h, bool *in, uint32_t *unready)
{
    enum ep_host_wait_end end;

    *in = false;
    do {
        end = ep_host_wait(h->call, may_agree, h);
        if (end != EP_HOST_DETACHED)
            *in = join_roster(h, end == EP_HOST_LATE, unready);
    } while (end == EP_HOST_REACHED && !*in && !decided(h));
    return end;
}

/* The op takes its number and its members, or fails. */
static ep_status agree(struct ht *h)
{
    struct ep_host_call *call = h->call;
    enum ep_host_wait_end end;
    uint32_t unready = 0;
    bool in;

    do {
        h->number = ep_host_begin(call, EP_MODE_HT, h->expected);
        publish(h);
        end = await_roster(h, &in, &unready);
        if (in)
            return EP_OK;
    } while (end == EP_HOST_REACHED && fresh(h, call->rank) && !ep_host_is_absent(call->team, call->rank));
    __atomic_store_n(&call->me->ht_closed, h->number, __ATOMIC_SEQ_CST);
    ep_host_gate_drain(call->team, call->rank);
    if (end == EP_HOST_DETACHED || ep_host_is_absent(call->team, call->rank))
        return ep_host_detached(call);
    return ep_host_late(call, unready < n_ranks(h) ? unready : call->rank, EP_WAIT_READY);
}

/* ---- gate and flags ---------------------------------------------------------------------------------- */

static uint64_t *flag_at(const struct ht *h, uint8_t *window, uint32_t from)
{
    return (uint64_t *)(void *)(window + h->call->team->map.ht_flags + (uint64_t)from * EP_LINE);
}

static bool may_push(const struct ht *h, uint32_t d)
{
    return !left_out(h, d) && closed(h->call->team, d) < h->number; /* partner: close_op, leave */
}

static uint8_t *enter(struct ht *h, uint32_t d)
{
    ep_host_gate_enter(h->call->me, d);
    if (may_push(h, d))
        return __atomic_load_n(&h->call->team->ranks[d].window, __ATOMIC_ACQUIRE);
    ep_host_gate_leave(h->call->me);
    return NULL;
}

static void announce(struct ht *h, uint32_t d, uint8_t *window, uint32_t count)
{
    /* release: what was pushed lies before; partner: peer_settled */
    __atomic_store_n(flag_at(h, window, h->call->rank),
                     ep_flag_make(ep_host_wire_number(h->number), count), __ATOMIC_SEQ_CST);
    ep_host_wake(h->call->team, d);
}

struct awaited {
    const struct ht *h;
    uint32_t peer, count;
    bool there;
};

static bool peer_settled(void *context)
{
    struct awaited *a = context;
    const struct ht *h = a->h;
    /* first: a peer writes its flag before it closes the op */
    bool over = left_out(h, a->peer) || closed(h->call->team, a->peer) >= h->number;
    /* acquire: what the peer pushed */
    uint64_t flag = __atomic_load_n(flag_at(h, h->call->me->window, a->peer), __ATOMIC_SEQ_CST);

    a->there = ep_flag_number(flag) == ep_host_wire_number(h->number);
    a->count = ep_flag_count(flag);
    return a->there || over;
}

/* Waits for the flags of members that owe rows: expect[r] of them. */
static ep_status await_all(struct ht *h, const uint32_t *expect)
{
    for (uint32_t r = 0; r < n_ranks(h); r++) {
        struct awaited a = { .h = h, .peer = r };

        if (!ep_mask_test(h->members, r))
            continue;
        if (expect[r] > 0) {
            switch (ep_host_wait_for(h->call, r, peer_settled, &a)) {
            case EP_HOST_REACHED: break;
            case EP_HOST_LATE: return ep_host_late(h->call, r, EP_WAIT_ARRIVAL);
            case EP_HOST_DETACHED: return ep_host_detached(h->call);
            }
            if (!a.there || a.count != expect[r])
                continue;
        } else if (left_out(h, r)) {
            continue;
        }
        ep_mask_set(h->arrived, r);
    }
    return EP_OK;
}

/* From here on nobody writes to this rank's window for this op. */
static void close_op(struct ht *h)
{
    __atomic_store_n(&h->call->me->ht_closed, h->number, __ATOMIC_SEQ_CST); /* partner: may_push */
    if (memcmp(h->arrived, h->members, sizeof h->arrived) != 0)
        ep_host_gate_drain(h->call->team, h->call->rank);
    ep_host_wake_all(h->call->team);
}

/* The result of an op that went to its end. */
static ep_status finish(struct ht *h)
{
    ep_host_set_arrived(h->call, h->arrived);
    if (h->mismatched == n_ranks(h))
        return EP_OK;
    return ep_host_fail(h->call, EP_FAILED_PRECONDITION,
                        "rank %u runs another op, dtype, scale format or dispatch as HT %llu: ranks must make "
                        "the same calls",
                        h->mismatched, (unsigned long long)h->number);
}

/* ---- dispatch: sending ----------------------------------------------------------------------------------- */

/* Where the next rows of this rank go at one destination. */
struct target {
    uint32_t d;
    uint8_t *window, *rows, *scales; /* rows NULL: d has no room, only routing is sent */
    uint32_t flat;                   /* next row in flat order */
    uint32_t *next;                  /* packed: next row of each expert */
    bool packed;
};

static void find_target(struct ht *h, uint32_t d, uint8_t *window, struct target *to)
{
    const struct ep_host_ready *there = &h->call->me->peers[d];
    const uint32_t *base = counts_of(h, h->call->me->dest_base, d);
    uint64_t rows = h->call->me->dest_rows[d];
    bool room = there->rows.bytes / h->row_bytes >= rows &&
                (!h->scale_bytes || there->scales.bytes == 0 || there->scales.bytes / h->scale_bytes >= rows);

    *to = (struct target){ .d = d,
                           .window = window,
                           .rows = room && there->rows.bytes ? window + there->rows.offset : NULL,
                           .flat = base[0],
                           .next = h->call->me->cursor,
                           .packed = there->layout == EP_LAYOUT_PACKED };
    if (h->scale_bytes && there->scales.bytes)
        to->scales = window + there->scales.offset;
    memcpy(to->next, base + 1, n_local(h) * sizeof *base);
}

/* Row of `out` for the token; in packed layout that of the first expert it names. */
static uint32_t next_row(const struct ht *h, struct target *to, uint32_t token)
{
    const struct ep_host_choice *choice = h->handle->choices + (uint64_t)token * h->handle->top_k;
    uint32_t row = UINT32_MAX;

    if (!to->packed)
        return to->flat;
    for (uint32_t j = 0; j < h->handle->top_k; j++)
        if (choice[j].rank == (int32_t)to->d && first_choice(choice, j)) {
            uint32_t at = to->next[choice[j].local]++;

            row = row == UINT32_MAX ? at : row;
        }
    return row;
}

static void push_row(struct ht *h, struct target *to, const struct ep_host_payload *p, uint32_t token)
{
    const struct ep_layout_map *map = &h->call->team->map;
    uint32_t row = next_row(h, to, token);
    uint8_t *header = to->window + map->ht_headers + (uint64_t)to->flat * map->header_bytes;

    ep_host_header_write(h->call->team, h->handle, token, to->d, (struct ep_row_header *)(void *)header);
    to->flat++;
    if (!to->rows)
        return;
    ep_host_copy_row(to->rows + (uint64_t)row * p->row_bytes, p->rows + (uint64_t)token * p->row_bytes,
                     p->row_bytes);
    if (to->scales)
        memcpy(to->scales + (uint64_t)row * p->scale_bytes, p->scales + (uint64_t)token * p->scale_bytes,
               p->scale_bytes);
}

static void push_rows(struct ht *h, const struct ep_host_payload *p, uint32_t d)
{
    struct ep_host_handle *handle = h->handle;
    uint32_t first = handle->dest_first[d], count = handle->dest_first[d + 1] - first, i = 0;
    struct target to;
    uint8_t *window = count ? enter(h, d) : NULL;

    if (!window)
        return;
    find_target(h, d, window, &to);
    for (; i < count && may_push(h, d); i++)
        push_row(h, &to, p, handle->dest_token[first + i]);
    if (i == count) {
        announce(h, d, window, count);
        handle->sent[d] = count;
        if (d != h->call->rank && to.rows)
            h->call->result->wire_bytes += (uint64_t)count * (p->row_bytes + p->scale_bytes);
    }
    ep_host_gate_leave(h->call->me);
}

static void push_all_rows(struct ht *h, const struct ep_host_payload *p)
{
    struct ep_host_handle *handle = h->handle;

    memset(handle->sent, 0, n_ranks(h) * sizeof *handle->sent);
    for (uint32_t i = 1; i <= n_ranks(h); i++) {
        uint32_t d = (h->call->rank + i) % n_ranks(h);

        if (ep_mask_test(h->members, d))
            push_rows(h, p, d);
    }
    h->call->result->dropped = handle->bad;
    for (uint32_t d = 0; d < n_ranks(h); d++)
        if (handle->sent[d] != handle->dest_first[d + 1] - handle->dest_first[d])
            h->call->result->dropped += ep_host_routes_to(handle, d);
}

/* ---- dispatch: receiving ----------------------------------------------------------------------------------- */

static struct ep_host_arrived *arrived_at(const struct ht *h, uint32_t i)
{
    return h->handle->arrived + (uint64_t)i * h->call->team->map.limits.top_k;
}

/* A row that never came. */
static void mark_missing(struct ht *h, uint32_t i)
{
    h->handle->arrived_token[i] = UINT32_MAX;
    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++)
        arrived_at(h, i)[j] = (struct ep_host_arrived){ .local = -1 };
}

static void read_headers(struct ht *h)
{
    const struct ep_layout_map *map = &h->call->team->map;
    uint32_t *first = h->handle->source_first;

    first[0] = 0;
    for (uint32_t s = 0; s < n_ranks(h); s++) {
        first[s + 1] = first[s] + h->call->me->source_count[s];
        for (uint32_t i = first[s]; i < first[s + 1]; i++) {
            const uint8_t *header = h->call->me->window + map->ht_headers + (uint64_t)i * map->header_bytes;

            if (ep_mask_test(h->arrived, s))
                ep_host_header_read(h->call, h->handle, (const struct ep_row_header *)(const void *)header, i,
                                    map->limits.ht_max_tokens);
            else
                mark_missing(h, i);
        }
    }
}

/* Rows of one token's experts; an overwritten header cannot reach beyond its source's rows. */
static void number_token(struct ht *h, uint32_t i, uint32_t *next, const uint32_t *end)
{
    struct ep_host_arrived *arrived = arrived_at(h, i);

    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++) {
        int32_t local = arrived[j].local;
        uint32_t k = 0;

        if (local < 0)
            continue;
        while (k < j && arrived[k].local != local)
            k++;
        if (k < j)
            arrived[j].row = arrived[k].row; /* named again: the same row */
        else if (next[local] < end[local])
            arrived[j].row = next[local]++;
        else
            arrived[j].local = -1;
    }
}

/* Rows by (expert, source, token).  What a source owed and did not send is zeroed. */
static void number_rows(struct ht *h, bool zero)
{
    struct ep_host_rank *me = h->call->me;
    uint32_t *next = me->cursor, *end = me->total, local = n_local(h);

    memcpy(end, me->expert_offset, local * sizeof *end);
    for (uint32_t s = 0; s < n_ranks(h); s++) {
        memcpy(next, end, local * sizeof *next);
        for (uint32_t l = 0; l < local; l++)
            end[l] += me->source_expert[(uint64_t)s * local + l];
        for (uint32_t i = h->handle->source_first[s]; i < h->handle->source_first[s + 1]; i++)
            number_token(h, i, next, end);
        for (uint32_t l = 0; zero && l < local; l++)
            ep_host_zero_rows(h->call, h->op, next[l], end[l]);
    }
}

/* A token crosses once: its row is copied to the other experts that it names here. */
static void copy_to_experts(struct ht *h, uint32_t i)
{
    const struct ep_host_arrived *arrived = arrived_at(h, i);
    uint8_t *out = ep_host_at(h->call, h->op->out), *scales = ep_host_at(h->call, h->op->out_scales);
    uint32_t from = UINT32_MAX;

    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++) {
        uint64_t row = arrived[j].row;

        if (!ep_host_first_of_expert(arrived, j))
            continue;
        if (from == UINT32_MAX) {
            from = arrived[j].row;
            continue;
        }
        ep_host_copy_row(out + row * h->row_bytes, out + (uint64_t)from * h->row_bytes, h->row_bytes);
        if (scales && h->scale_bytes)
            memcpy(scales + row * h->scale_bytes, scales + (uint64_t)from * h->scale_bytes, h->scale_bytes);
    }
}

static bool fits(struct ep_span span, uint64_t rows, uint64_t row_bytes)
{
    return span.bytes == 0 || span.bytes / row_bytes >= rows;
}

static bool out_fits(const struct ht *h, uint64_t rows)
{
    const struct ep_op *op = h->op;
    uint64_t tables = (uint64_t)op->top_k * sizeof(float);

    return op->out.bytes / h->row_bytes >= rows &&
           fits(op->out_scales, rows, h->scale_bytes ? h->scale_bytes : 1) &&
           fits(op->sources, rows, sizeof(struct ep_source)) && fits(op->out_topk, rows, tables) &&
           fits(op->out_weights, rows, tables);
}

static ep_status overflow(struct ht *h)
{
    h->call->result->rows_needed = h->handle->rows;
    return ep_host_fail(h->call, EP_OVERFLOW, "out has %llu bytes: %llu rows arrived",
                        (unsigned long long)h->op->out.bytes, (unsigned long long)h->handle->rows);
}

static void sum_expert_counts(struct ht *h)
{
    struct ep_host_rank *me = h->call->me;

    memset(me->expert_count, 0, n_local(h) * sizeof *me->expert_count);
    for (uint32_t s = 0; s < n_ranks(h); s++)
        for (uint32_t l = 0; l < n_local(h); l++)
            me->expert_count[l] += me->source_expert[(uint64_t)s * n_local(h) + l];
}

static ep_status give_packed(struct ht *h)
{
    struct ep_host_rank *me = h->call->me;
    bool room;

    sum_expert_counts(h);
    h->handle->rows = ep_host_packed_offsets(me->expert_count, n_local(h), h->op->alignment, me->expert_offset);
    ep_host_write_counts(h->call, h->op, me->expert_count, n_local(h), me->expert_offset);
    room = out_fits(h, h->handle->rows);
    number_rows(h, room);
    if (!room)
        return overflow(h);
    for (uint32_t s = 0; s < n_ranks(h); s++)
        for (uint32_t i = h->handle->source_first[s]; i < h->handle->source_first[s + 1]; i++) {
            copy_to_experts(h, i);
            ep_host_write_expert_sources(h->call, h->op, h->handle, s, i);
        }
    for (uint32_t l = 0; l < n_local(h); l++)
        ep_host_zero_rows(h->call, h->op, (uint64_t)me->expert_offset[l] + me->expert_count[l],
                          me->expert_offset[l + 1]);
    return EP_OK;
}

static ep_status give_flat(struct ht *h)
{
    const uint32_t *first = h->handle->source_first;

    h->handle->rows = first[n_ranks(h)];
    ep_host_write_counts(h->call, h->op, h->call->me->source_count, n_ranks(h), NULL);
    if (!out_fits(h, h->handle->rows))
        return overflow(h);
    for (uint32_t s = 0; s < n_ranks(h); s++) {
        if (!ep_mask_test(h->arrived, s))
            ep_host_zero_rows(h->call, h->op, first[s], first[s + 1]);
        for (uint32_t i = first[s]; i < first[s + 1]; i++)
            ep_host_write_tables(h->call, h->op, h->handle, s, i, i);
    }
    return EP_OK;
}

static ep_status give_rows(struct ht *h)
{
    ep_status status;

    read_headers(h);
    memcpy(h->handle->participants, h->arrived, sizeof h->arrived);
    status = h->op->layout == EP_LAYOUT_PACKED ? give_packed(h) : give_flat(h);
    h->call->result->rows = h->handle->rows;
    h->handle->state = EP_HANDLE_ROUTED; /* even after an overflow: peers' combines need this rank */
    return status;
}

ep_status ep_host_ht_dispatch(struct ep_host_call *call, struct ep_host_handle *handle)
{
    struct ht h = { .call = call, .handle = handle, .op = call->op };
    struct ep_host_payload payload;
    ep_status status, given;

    ep_host_payload_prepare(call, &payload);
    h.row_bytes = payload.row_bytes;
    h.scale_bytes = payload.scale_bytes;
    call->result->logical_bytes = (uint64_t)call->op->tokens * call->op->top_k * h.row_bytes;
    status = agree(&h);
    handle->number = h.number;
    if (status != EP_OK)
        return status;
    push_all_rows(&h, &payload);
    status = await_all(&h, call->me->source_count);
    close_op(&h);
    if (status != EP_OK)
        return status;
    given = give_rows(&h);
    status = finish(&h);
    return status != EP_OK ? status : given;
}

/* ---- combine: sending ---------------------------------------------------------------------------------------- */

/* Does the client give as many rows (and gradients) as its dispatch laid out? */
static bool rows_given(const struct ht *h)
{
    uint64_t grad_bytes = h->op->layout == EP_LAYOUT_PACKED ? sizeof(float) : h->handle->top_k * sizeof(float);

    return h->op->x.bytes / h->row_bytes >= h->handle->rows &&
           fits(h->op->row_grads, h->handle->rows, grad_bytes);
}

/* Gradients of one row's choices; 0 where the choice is not here or none was given. */
static void write_grads(const struct ht *h, uint32_t i, float *grads)
{
    const struct ep_host_arrived *arrived = arrived_at(h, i);
    const float *given = (const float *)(void *)ep_host_at(h->call, h->op->row_grads);
    bool packed = h->op->layout == EP_LAYOUT_PACKED;

    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++) {
        uint64_t at = packed ? arrived[j].row : (uint64_t)i * h->handle->top_k + j;
        bool here = given && j < h->handle->top_k && arrived[j].local >= 0;

        grads[j] = here ? given[at] : 0.0f;
    }
}

static void push_partial(const struct ht *h, uint32_t s, uint32_t slot, uint8_t *window)
{
    const struct ep_layout_map *map = &h->call->team->map;
    uint32_t i = h->handle->source_first[s] + slot, n = 1;
    uint64_t row = (uint64_t)h->handle->source_base[s] + slot;
    const uint8_t *x = ep_host_at(h->call, h->op->x);
    const void *rows[EP_HOST_MAX_TERMS] = { x + (uint64_t)i * h->row_bytes };
    float weights[EP_HOST_MAX_TERMS] = { 1.0f };

    if (h->op->layout == EP_LAYOUT_PACKED)
        n = ep_host_partial_terms(h->call->team, h->handle, i, x, h->row_bytes, rows, weights);
    ep_host_sum((ep_dtype)h->op->input_dtype, window + map->ht_combine_rows + row * h->row_bytes, rows, weights,
                n, map->limits.hidden);
    if (h->call->me->peers[s].wants_grads)
        write_grads(h, i, (float *)(void *)(window + map->ht_combine_grads) + row * map->limits.top_k);
}

static void return_to(struct ht *h, uint32_t s, bool usable)
{
    uint32_t count = h->handle->source_first[s + 1] - h->handle->source_first[s], slot = 0;
    uint8_t *window = count ? enter(h, s) : NULL;

    if (!window)
        return;
    if (!usable || !ep_mask_test(h->handle->participants, s))
        count = 0;
    for (; slot < count && may_push(h, s); slot++)
        push_partial(h, s, slot, window);
    if (slot == count) {
        announce(h, s, window, count);
        if (s != h->call->rank)
            h->call->result->wire_bytes += (uint64_t)count * h->row_bytes;
    }
    ep_host_gate_leave(h->call->me);
}

static void return_all(struct ht *h, bool usable)
{
    for (uint32_t i = 1; i <= n_ranks(h); i++) {
        uint32_t s = (h->call->rank + i) % n_ranks(h);

        if (ep_mask_test(h->members, s))
            return_to(h, s, usable);
    }
}

/* ---- combine: receiving -------------------------------------------------------------------------------------- */

static void gather_grads(const struct ht *h, uint32_t t, const uint32_t *ranks, const uint64_t *at, uint32_t n)
{
    const struct ep_layout_map *map = &h->call->team->map;
    const struct ep_host_choice *choice = h->handle->choices + (uint64_t)t * h->handle->top_k;
    const float *came = (const float *)(const void *)(h->call->me->window + map->ht_combine_grads);
    float *grads = (float *)(void *)ep_host_at(h->call, h->op->topk_grads);

    for (uint32_t j = 0; grads && j < h->handle->top_k; j++) {
        float *grad = &grads[(uint64_t)t * h->handle->top_k + j];

        *grad = 0.0f;
        for (uint32_t i = 0; i < n; i++)
            if (choice[j].rank == (int32_t)ranks[i] && ep_mask_test(h->arrived, ranks[i]))
                *grad = came[at[i] * map->limits.top_k + j];
    }
}

static void sum_token(const struct ht *h, uint32_t t, uint32_t *next)
{
    const uint8_t *partials = h->call->me->window + h->call->team->map.ht_combine_rows;
    const uint8_t *bias = ep_host_at(h->call, h->op->bias);
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t ranks[EP_MAX_TOP_K], n = 0, n_token_ranks = ep_host_token_ranks(h->handle, t, ranks);
    uint64_t at[EP_MAX_TOP_K];

    for (uint32_t i = 0; i < n_token_ranks; i++) {
        at[i] = next[ranks[i]]++;
        if (ep_mask_test(h->arrived, ranks[i]))
            rows[n++] = partials + at[i] * h->row_bytes;
    }
    if (bias)
        rows[n++] = bias + (uint64_t)t * h->row_bytes;
    for (uint32_t i = 0; i < n; i++)
        weights[i] = 1.0f;
    ep_host_sum((ep_dtype)h->op->input_dtype, ep_host_at(h->call, h->op->out) + (uint64_t)t * h->row_bytes, rows,
                weights, n, h->call->team->map.limits.hidden);
    gather_grads(h, t, ranks, at, n_token_ranks);
}

static void sum_all(const struct ht *h)
{
    uint32_t *next = h->call->me->cursor; /* next partial of each rank */

    memcpy(next, h->handle->dest_first, n_ranks(h) * sizeof *next);
    for (uint32_t t = 0; t < h->op->tokens; t++)
        sum_token(h, t, next);
}

ep_status ep_host_ht_combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    struct ht h = { .call = call, .handle = handle, .op = call->op };
    ep_status status;
    bool usable;

    if (call->op->topk_grads.bytes && call->op->top_k != handle->top_k)
        return ep_host_fail(call, EP_INVALID_ARGUMENT, "top_k is %u: the handle's dispatch had %u",
                            call->op->top_k, handle->top_k);
    h.row_bytes = call->team->map.limits.hidden * ep_dtype_bytes((ep_dtype)call->op->input_dtype);
    call->result->logical_bytes = (uint64_t)call->op->tokens * handle->top_k * h.row_bytes;
    usable = rows_given(&h);
    status = agree(&h);
    if (status != EP_OK)
        return status;
    return_all(&h, usable);
    status = await_all(&h, handle->sent);
    close_op(&h);
    if (status != EP_OK)
        return status;
    sum_all(&h);
    status = finish(&h);
    if (status != EP_OK || usable)
        return status;
    call->result->rows_needed = handle->rows;
    return ep_host_fail(call, EP_OVERFLOW, "x has %llu bytes: the dispatch laid out %llu rows, so none was sent",
                        (unsigned long long)call->op->x.bytes, (unsigned long long)handle->rows);
}
