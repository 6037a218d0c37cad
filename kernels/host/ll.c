/*
 * Low latency: banks, flags and credits as ep_kernels.h describes them.
 *
 * A credit is one word per rank and bank, `released`: what a rank gives up, it gives up for all
 * sources alike.  Flags lie in the windows.
 */
#include "host_private.h"

#include <string.h>

/* ---- places in a bank ---------------------------------------------------------------------- */

static uint64_t bank_at(const struct ep_host_team *team, uint64_t number)
{
    return team->map.ll + number % team->map.limits.ll_banks * team->map.bank_bytes;
}

static uint64_t *flag_at(uint8_t *window, uint64_t flags, uint32_t peer)
{
    return (uint64_t *)(void *)(window + flags + (uint64_t)peer * EP_LINE);
}

static uint64_t dispatch_flags(const struct ep_host_team *team, uint64_t number)
{
    return bank_at(team, number) + team->map.bank.dispatch_flags;
}

static uint64_t combine_flags(const struct ep_host_team *team, uint64_t number)
{
    return bank_at(team, number) + team->map.bank.combine_flags;
}

/* Where the region of one peer begins: [R][T_ll] items. */
static uint64_t region_at(const struct ep_host_team *team, uint64_t number, uint64_t start, uint32_t peer,
                          uint32_t item_bytes)
{
    return bank_at(team, number) + start + (uint64_t)peer * team->map.limits.ll_max_tokens * item_bytes;
}

/* ---- credits ---------------------------------------------------------------------------------- */

static uint64_t released(const struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    return __atomic_load_n(&team->ranks[rank].released[number % team->map.limits.ll_banks], __ATOMIC_SEQ_CST);
}

void ep_host_ll_release(struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    if (released(team, rank, number) >= number)
        return;
    /* release: what was read from the bank lies before; partner: `granted` of each source */
    __atomic_store_n(&team->ranks[rank].released[number % team->map.limits.ll_banks], number,
                     __ATOMIC_SEQ_CST);
    ep_host_wake_all(team);
}

/* ---- state of a peer --------------------------------------------------------------------------- */

enum peer_state { PEER_WAIT, PEER_THERE, PEER_GONE };

/* Not a participant (any more). */
static bool left_out(const struct ep_host_team *team, uint32_t rank, uint64_t number)
{
    return ep_host_is_absent(team, rank) ||
           __atomic_load_n(&team->ranks[rank].joined_ll, __ATOMIC_SEQ_CST) > number;
}

/* May this rank write number n to d's bank? */
static enum peer_state credit_of(const struct ep_host_team *team, uint32_t d, uint64_t number)
{
    uint32_t banks = team->map.limits.ll_banks;

    if (left_out(team, d, number))
        return PEER_GONE;
    if (!__atomic_load_n(&team->ranks[d].window, __ATOMIC_SEQ_CST))
        return PEER_WAIT;
    return number <= banks || released(team, d, number) >= number - banks ? PEER_THERE : PEER_WAIT;
}

/*
 * Has the flag come?  `over`: the peer will not write it any more.  It was read before the flag, and
 * the peer writes the flag first, so a flag that is missing then will never come.
 */
static enum peer_state flag_state(const struct ep_host_call *call, uint64_t flags, uint32_t peer,
                                  uint64_t number, bool over, uint32_t *count)
{
    /* acquire: the rows that the flag announces; partner: `announce` */
    uint64_t flag = __atomic_load_n(flag_at(call->me->window, flags, peer), __ATOMIC_SEQ_CST);

    if (ep_flag_number(flag) == ep_host_wire_number(number)) {
        *count = ep_flag_count(flag);
        return PEER_THERE;
    }
    return over ? PEER_GONE : PEER_WAIT;
}

static enum peer_state rows_of(const struct ep_host_call *call, uint32_t s, uint64_t number, uint32_t *count)
{
    bool over = left_out(call->team, s, number) ||
                __atomic_load_n(&call->team->ranks[s].ll_sent, __ATOMIC_SEQ_CST) >= number;

    return flag_state(call, dispatch_flags(call->team, number), s, number, over, count);
}

/* A peer that released the number without a flag has skipped the combine. */
static enum peer_state partials_of(const struct ep_host_call *call, uint32_t d, uint64_t number,
                                   uint32_t *count)
{
    bool over = left_out(call->team, d, number) || released(call->team, d, number) >= number;

    return flag_state(call, combine_flags(call->team, number), d, number, over, count);
}

static void announce(struct ep_host_call *call, uint32_t peer, uint8_t *window, uint64_t flags,
                     uint64_t number, uint32_t count)
{
    /* release: headers and rows lie before; partner: flag_state */
    __atomic_store_n(flag_at(window, flags, call->rank), ep_flag_make(ep_host_wire_number(number), count),
                     __ATOMIC_SEQ_CST);
    ep_host_wake(call->team, peer);
}

/* Through the gate to peer's window; NULL when it is no participant any more. */
static uint8_t *enter(struct ep_host_call *call, uint32_t peer, uint64_t number)
{
    ep_host_gate_enter(call->me, peer);
    if (!left_out(call->team, peer, number))
        return __atomic_load_n(&call->team->ranks[peer].window, __ATOMIC_ACQUIRE);
    ep_host_gate_leave(call->me);
    return NULL;
}

/* ---- dispatch: sending ------------------------------------------------------------------------- */

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
    uint8_t *headers = window + region_at(team, n, map->bank.headers, me, map->header_bytes);
    uint8_t *rows = window + region_at(team, n, map->bank.rows, me, map->row_bytes);

    ep_host_header_write(team, s->handle, token, d,
                         (struct ep_row_header *)(void *)(headers + (uint64_t)slot * map->header_bytes));
    ep_host_copy_row(rows + (uint64_t)slot * p->row_bytes, p->rows + (uint64_t)token * p->row_bytes,
                     p->row_bytes);
    if (p->scale_bytes) {
        uint8_t *scales = window + region_at(team, n, map->bank.scales, me, map->scales_bytes);

        memcpy(scales + (uint64_t)slot * map->scales_bytes, p->scales + (uint64_t)token * p->scale_bytes,
               p->scale_bytes);
    }
}

static void push_to(struct sending *s, uint32_t d)
{
    struct ep_host_call *call = s->call;
    struct ep_host_handle *handle = s->handle;
    uint32_t first = handle->dest_first[d], count = handle->dest_first[d + 1] - first;
    uint8_t *window = enter(call, d, handle->number);
    uint32_t slot = 0;

    if (!window)
        return;
    for (; slot < count && !ep_host_is_absent(call->team, d); slot++)
        push_row(s, d, window, slot, handle->dest_token[first + slot]);
    if (slot == count) {
        announce(call, d, window, dispatch_flags(call->team, handle->number), handle->number, count);
        handle->sent[d] = count;
        if (d != call->rank)
            call->result->wire_bytes += (uint64_t)count * (s->payload.row_bytes + s->payload.scale_bytes);
    }
    ep_host_gate_leave(call->me);
}

/* One round over all destinations, the next rank first so that not all push to the same one.
 * Returns true when nobody is left; else *blocked is one whose credit is missing. */
static bool push_round(struct sending *s, bool *progress, uint32_t *blocked)
{
    uint32_t ranks = s->call->team->map.limits.ranks;
    bool done = true;

    *progress = false;
    for (uint32_t i = 1; i <= ranks; i++) {
        uint32_t d = (s->call->rank + i) % ranks;
        enum peer_state state;

        if (!ep_mask_test(s->pending, d))
            continue;
        state = credit_of(s->call->team, d, s->handle->number);
        if (state == PEER_WAIT) {
            *blocked = d;
            done = false;
            continue;
        }
        if (state == PEER_THERE)
            push_to(s, d);
        ep_mask_clear(s->pending, d);
        *progress = true;
    }
    return done;
}

static bool some_credit(void *context)
{
    const struct sending *s = context;

    for (uint32_t d = 0; d < s->call->team->map.limits.ranks; d++)
        if (ep_mask_test(s->pending, d) && credit_of(s->call->team, d, s->handle->number) != PEER_WAIT)
            return true;
    return false;
}

/* A rank without credit holds up nobody else's rows. */
static ep_status push_all(struct sending *s)
{
    bool progress;
    uint32_t blocked = 0;

    while (!push_round(s, &progress, &blocked)) {
        if (progress)
            continue;
        switch (ep_host_wait_for(s->call, blocked, some_credit, s)) {
        case EP_HOST_REACHED: break;
        case EP_HOST_LATE: return ep_host_late(s->call, blocked, EP_WAIT_CREDIT);
        case EP_HOST_DETACHED: return ep_host_detached(s->call);
        }
    }
    return EP_OK;
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
    /* after the flags; partner: rows_of */
    __atomic_store_n(&call->me->ll_sent, handle->number, __ATOMIC_SEQ_CST);
    if (status != EP_OK)
        ep_host_wake_all(call->team); /* peers without a flag need not wait for it */
    count_dropped(call, handle);
    return status;
}

/* ---- waiting for one peer ------------------------------------------------------------------------ */

struct awaited {
    struct ep_host_call *call;
    uint64_t number;
    uint32_t peer, count;
    enum peer_state (*look)(const struct ep_host_call *, uint32_t, uint64_t, uint32_t *);
    enum peer_state state;
};

static bool settled(void *context)
{
    struct awaited *a = context;

    a->state = a->look(a->call, a->peer, a->number, &a->count);
    return a->state != PEER_WAIT;
}

static ep_status await(struct awaited *a)
{
    switch (ep_host_wait_for(a->call, a->peer, settled, a)) {
    case EP_HOST_REACHED: return EP_OK;
    case EP_HOST_LATE: return ep_host_late(a->call, a->peer, EP_WAIT_ARRIVAL);
    case EP_HOST_DETACHED: break;
    }
    return ep_host_detached(a->call);
}

/* ---- dispatch: receiving ------------------------------------------------------------------------- */

/* The headers of one source's rows, checked, to the handle. */
static void collect(struct ep_host_call *call, struct ep_host_handle *handle, uint32_t s, uint32_t count)
{
    const struct ep_layout_map *map = &call->team->map;
    const uint8_t *headers = call->me->window +
                             region_at(call->team, handle->number, map->bank.headers, s, map->header_bytes);
    uint32_t first = handle->source_first[s];

    for (uint32_t i = 0; i < count; i++)
        ep_host_header_read(call, handle,
                            (const struct ep_row_header *)(const void *)(headers + (uint64_t)i * map->header_bytes),
                            first + i, map->limits.ll_max_tokens);
    handle->source_first[s + 1] = first + count;
}

static ep_status receive_headers(struct ep_host_call *call, struct ep_host_handle *handle)
{
    uint64_t arrived[EP_MASK_WORDS] = { 0 };

    handle->source_first[0] = 0;
    for (uint32_t s = 0; s < call->team->map.limits.ranks; s++) {
        struct awaited a = { .call = call, .number = handle->number, .peer = s, .look = rows_of };
        ep_status status;

        handle->source_first[s + 1] = handle->source_first[s];
        if (!ep_mask_test(handle->participants, s))
            continue;
        status = await(&a);
        if (status != EP_OK)
            return status;
        if (a.state != PEER_THERE || a.count > call->team->map.limits.ll_max_tokens)
            continue; /* gone, or its flag was overwritten */
        collect(call, handle, s, a.count);
        ep_mask_set(arrived, s);
    }
    ep_host_set_arrived(call, arrived);
    return EP_OK;
}

/* Rows of `out` in order of (expert, source, slot): how many per expert, then which. */
static void count_by_expert(struct ep_host_call *call, struct ep_host_handle *handle)
{
    uint32_t top_k = call->team->map.limits.top_k;
    uint32_t rows = handle->source_first[call->team->map.limits.ranks];

    memset(call->me->expert_count, 0, call->team->map.limits.local_experts * sizeof *call->me->expert_count);
    for (uint32_t i = 0; i < rows; i++) {
        const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * top_k;

        for (uint32_t j = 0; j < top_k; j++)
            if (ep_host_first_of_expert(arrived, j))
                call->me->expert_count[arrived[j].local]++;
    }
}

static void number_rows(struct ep_host_call *call, struct ep_host_handle *handle)
{
    uint32_t top_k = call->team->map.limits.top_k, *next = call->me->cursor;
    uint32_t rows = handle->source_first[call->team->map.limits.ranks];

    memcpy(next, call->me->expert_offset, call->team->map.limits.local_experts * sizeof *next);
    for (uint32_t i = 0; i < rows; i++) {
        struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * top_k;

        for (uint32_t j = 0; j < top_k; j++) {
            if (ep_host_first_of_expert(arrived, j))
                arrived[j].row = next[arrived[j].local]++;
            for (uint32_t k = 0; k < j; k++) /* named again: the same row */
                if (arrived[j].local >= 0 && arrived[k].local == arrived[j].local)
                    arrived[j].row = arrived[k].row;
        }
    }
}

/* Fixed blocks of R * T_ll rows, or packed ones. */
static void place_by_expert(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    const struct ep_limits *l = &call->team->map.limits;
    uint32_t *offset = call->me->expert_offset;

    count_by_expert(call, handle);
    if (op->layout == EP_LAYOUT_PACKED) {
        handle->rows = ep_host_packed_offsets(call->me->expert_count, l->local_experts, op->alignment, offset);
        call->result->rows = handle->rows;
    } else {
        for (uint32_t e = 0; e <= l->local_experts; e++)
            offset[e] = e * l->ranks * l->ll_max_tokens;
        handle->rows = offset[l->local_experts];
        for (uint32_t e = 0; e < l->local_experts; e++)
            call->result->rows += call->me->expert_count[e];
    }
    number_rows(call, handle);
}

/* One arrived row to the rows of each of its experts. */
static void copy_row(struct ep_host_call *call, const struct ep_op *op, const struct ep_host_handle *handle,
                     uint32_t s, uint32_t slot)
{
    const struct ep_layout_map *map = &call->team->map;
    uint32_t i = handle->source_first[s] + slot;
    const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * map->limits.top_k;
    uint64_t row_bytes = (uint64_t)map->limits.hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    uint64_t scale_bytes = ep_row_scale_bytes(map->limits.hidden, op->scale_format);
    const uint8_t *window = call->me->window;
    const uint8_t *row = window + region_at(call->team, handle->number, map->bank.rows, s, map->row_bytes) +
                         slot * row_bytes;
    const uint8_t *scale = window + region_at(call->team, handle->number, map->bank.scales, s, map->scales_bytes) +
                           (uint64_t)slot * map->scales_bytes;
    uint8_t *out = ep_host_at(call, op->out), *out_scales = ep_host_at(call, op->out_scales);

    for (uint32_t j = 0; j < map->limits.top_k; j++) {
        if (!ep_host_first_of_expert(arrived, j))
            continue;
        ep_host_copy_row(out + arrived[j].row * row_bytes, row, row_bytes);
        if (out_scales && op->wire_dtype == EP_FP8_E4M3)
            memcpy(out_scales + arrived[j].row * scale_bytes, scale, scale_bytes);
    }
}

static bool fits(struct ep_span span, uint64_t rows, uint64_t row_bytes)
{
    return span.bytes == 0 || span.bytes / row_bytes >= rows;
}

static bool out_fits(const struct ep_host_call *call, const struct ep_op *op, uint64_t rows)
{
    uint32_t hidden = call->team->map.limits.hidden;
    uint64_t row_bytes = (uint64_t)hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);

    return op->out.bytes / row_bytes >= rows &&
           fits(op->out_scales, rows, ep_row_scale_bytes(hidden, op->scale_format)) &&
           fits(op->sources, rows, sizeof(struct ep_source));
}

static void copy_rows(struct ep_host_call *call, const struct ep_op *op, const struct ep_host_handle *handle)
{
    for (uint32_t s = 0; s < call->team->map.limits.ranks; s++) {
        uint32_t first = handle->source_first[s], count = handle->source_first[s + 1] - first;

        for (uint32_t slot = 0; slot < count; slot++) {
            copy_row(call, op, handle, s, slot);
            ep_host_write_expert_sources(call, op, handle, s, first + slot);
        }
    }
}

static void zero_padding(struct ep_host_call *call, const struct ep_op *op)
{
    const uint32_t *count = call->me->expert_count, *offset = call->me->expert_offset;

    for (uint32_t e = 0; e < call->team->map.limits.local_experts; e++)
        ep_host_zero_rows(call, op, (uint64_t)offset[e] + count[e], offset[e + 1]);
}

static ep_status give_by_expert(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    bool packed = op->layout == EP_LAYOUT_PACKED;

    place_by_expert(call, op, handle);
    ep_host_write_counts(call, op, call->me->expert_count, call->team->map.limits.local_experts,
                         packed ? call->me->expert_offset : NULL);
    if (!out_fits(call, op, handle->rows)) {
        call->result->rows_needed = handle->rows;
        return ep_host_fail(call, EP_OVERFLOW, "out has %llu bytes: %llu rows arrived",
                            (unsigned long long)op->out.bytes, (unsigned long long)handle->rows);
    }
    copy_rows(call, op, handle);
    if (packed)
        zero_padding(call, op);
    return EP_OK;
}

/* Zero copy: rows stay in the bank. */
static ep_status give_by_rank(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    const struct ep_layout_map *map = &call->team->map;
    uint32_t ranks = map->limits.ranks, slots = map->limits.ll_max_tokens, *counts = call->me->cursor;

    for (uint32_t s = 0; s < ranks; s++) {
        uint32_t first = handle->source_first[s];

        counts[s] = handle->source_first[s + 1] - first;
        for (uint32_t slot = 0; slot < counts[s]; slot++)
            ep_host_write_tables(call, op, handle, s, first + slot, (uint64_t)s * slots + slot);
    }
    ep_host_write_counts(call, op, counts, ranks, NULL);
    handle->rows = (uint64_t)ranks * slots;
    call->result->rows = handle->source_first[ranks];
    call->result->view = bank_at(call->team, handle->number) + map->bank.rows;
    call->result->view_stride = (uint64_t)slots * map->row_bytes;
    if (op->wire_dtype == EP_FP8_E4M3) {
        call->result->scales_view = bank_at(call->team, handle->number) + map->bank.scales;
        call->result->scales_view_stride = (uint64_t)slots * map->scales_bytes;
    }
    return EP_OK;
}

static ep_status receive(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    ep_status status = receive_headers(call, handle);

    if (status != EP_OK)
        return status;
    handle->state = EP_HANDLE_ROUTED; /* even when `out` overflows: peers' combines need this rank */
    return op->layout == EP_LAYOUT_RANK_MAJOR ? give_by_rank(call, op, handle)
                                              : give_by_expert(call, op, handle);
}

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
    ep_status status;

    handle->number = ep_host_begin(call, EP_MODE_LL, handle->participants);
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
    status = receive(call, call->op, handle);
    return handle->state == EP_HANDLE_ROUTED ? status : give_up(call, handle, status);
}

/* ---- combine: sending ---------------------------------------------------------------------------- */

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
        p->rows = call->me->window + bank_at(call->team, handle->number) + map->bank.rows;
        p->rank_stride = (uint64_t)map->limits.ll_max_tokens * map->row_bytes;
        p->usable = p->row_bytes <= map->row_bytes;
    }
}

static void push_partial(struct ep_host_call *call, const struct ep_host_handle *handle,
                         const struct partials *p, uint32_t s, uint32_t slot, uint8_t *window)
{
    const struct ep_layout_map *map = &call->team->map;
    uint32_t i = handle->source_first[s] + slot, token = handle->arrived_token[i];
    const void *rows[EP_HOST_MAX_TERMS];
    float weights[EP_HOST_MAX_TERMS];
    uint32_t n = 1;

    if (token == UINT32_MAX)
        return; /* its header was overwritten: nobody knows whose row it is */
    if (handle->layout == EP_LAYOUT_RANK_MAJOR) {
        rows[0] = p->rows + s * p->rank_stride + (uint64_t)slot * p->row_bytes;
        weights[0] = 1.0f;
    } else {
        n = ep_host_partial_terms(call->team, handle, i, p->rows, p->row_bytes, rows, weights);
    }
    ep_host_sum((ep_dtype)call->op->input_dtype,
                window + region_at(call->team, handle->number, map->bank.combine_rows, call->rank,
                                   map->combine_row_bytes) + (uint64_t)token * p->row_bytes,
                rows, weights, n, map->limits.hidden);
}

static void return_to(struct ep_host_call *call, const struct ep_host_handle *handle,
                      const struct partials *p, uint32_t s)
{
    uint32_t count = handle->source_first[s + 1] - handle->source_first[s], slot = 0;
    uint8_t *window;

    if (count == 0)
        return;
    window = enter(call, s, handle->number);
    if (!window)
        return;
    if (!p->usable)
        count = 0;
    for (; slot < count && !ep_host_is_absent(call->team, s); slot++)
        push_partial(call, handle, p, s, slot, window);
    if (slot == count) {
        announce(call, s, window, combine_flags(call->team, handle->number), handle->number, count);
        if (s != call->rank)
            call->result->wire_bytes += (uint64_t)count * p->row_bytes;
    }
    ep_host_gate_leave(call->me);
}

static bool return_all(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    uint32_t ranks = call->team->map.limits.ranks;
    struct partials p;

    find_partials(call, handle, &p);
    call->result->logical_bytes = (uint64_t)call->op->tokens * handle->top_k * p.row_bytes;
    for (uint32_t i = 1; i <= ranks; i++)
        return_to(call, handle, &p, (call->rank + i) % ranks);
    ep_host_ll_release(call->team, call->rank, handle->number); /* after the flags; partner: partials_of */
    return p.usable;
}

/* ---- combine: receiving ---------------------------------------------------------------------------- */

static ep_status await_partials(struct ep_host_call *call, const struct ep_host_handle *handle,
                                uint64_t *arrived)
{
    for (uint32_t d = 0; d < call->team->map.limits.ranks; d++) {
        struct awaited a = { .call = call, .number = handle->number, .peer = d, .look = partials_of };
        ep_status status;

        if (handle->sent[d] == 0) { /* owes nothing */
            if (!ep_host_is_absent(call->team, d))
                ep_mask_set(arrived, d);
            continue;
        }
        status = await(&a);
        if (status != EP_OK)
            return status;
        if (a.state == PEER_THERE && a.count == handle->sent[d])
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
                        region_at(call->team, handle->number, map->bank.combine_rows, ranks[i],
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

static ep_status check_bank(struct ep_host_call *call, const struct ep_host_handle *handle)
{
    uint64_t newer = call->me->ll_number - handle->number;

    if (newer < call->team->map.limits.ll_banks)
        return EP_OK;
    return ep_host_fail(call, EP_STALE_HANDLE, "handle %u: %llu LL dispatches came after its own, and there are %u banks",
                        call->op->handle, (unsigned long long)newer, call->team->map.limits.ll_banks);
}

ep_status ep_host_ll_combine(struct ep_host_call *call, struct ep_host_handle *handle)
{
    ep_status status = check_bank(call, handle);
    bool usable;

    call->result->number = handle->number;
    if (status != EP_OK)
        return status;
    usable = return_all(call, handle);
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

/* ---- complete ------------------------------------------------------------------------------------------ */

ep_status ep_host_ll_complete(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op op = handle->pending;
    ep_status status = check_bank(call, handle);

    call->result->number = handle->number;
    if (status != EP_OK) {
        handle->state = EP_HANDLE_FAILED;
        return status;
    }
    if (handle->state == EP_HANDLE_COMBINE_SENT)
        return gather(call, &op, handle);
    status = receive(call, &op, handle);
    return handle->state == EP_HANDLE_ROUTED ? status : give_up(call, handle, status);
}
