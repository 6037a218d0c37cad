#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_cpu.h"
#include "ep_clock.h"
#include "ep_reference.h"

enum { AGAIN = 1 }; /* ep_route.index: the expert of an earlier choice of the token: a weight and no row */

/* One op on its way. */
struct run {
    struct cpu_rank *r;
    const struct ep_op *op;
    struct cpu_handle *handle;
    struct ep_device_handle shared; /* the state's, as this op has it: share_handle() */
    uint64_t number, deadline_ns, members, missed;
    uint64_t bank; /* offset from a window's start */
    struct ep_device_record record;
};

/* ---- life -------------------------------------------------------------------------------------- */

static bool copy_placement(const struct ep_placement *from, struct ep_placement *to)
{
    struct ep_expert_home *homes = calloc(from->first[from->experts], sizeof *homes);
    struct ep_error unused = EP_ERROR_INIT;
    ep_status status = EP_NO_MEMORY;

    for (uint32_t e = 0; homes && e < from->experts; e++)
        for (uint32_t i = from->first[e]; i < from->first[e + 1]; i++)
            homes[i] = (struct ep_expert_home){ e, from->rank[i] };
    if (homes)
        status = ep_placement_explicit(from->ranks, from->experts, homes, from->first[from->experts], to, &unused);
    free(homes);
    /* Local numbers are whatever the original says. */
    if (status == EP_OK)
        memcpy(to->local, from->local, from->first[from->experts] * sizeof *to->local);
    return status == EP_OK;
}

static ep_status no_memory(struct ep_error *error)
{
    return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
}

ep_status cpu_rank_init(struct cpu_rank *r, const struct ep_placement *placement, struct ep_error *error)
{
    const struct ep_limits *l = &r->map.limits;
    const size_t choices = (size_t)l->ll_max_tokens * l->top_k;

    if (r->ranks > EP_DEVICE_NODE_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks is %u: this module has at most %u", r->ranks,
                            EP_DEVICE_NODE_RANKS);
    if (!copy_placement(placement, &r->placement))
        return no_memory(error);
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++) {
        struct cpu_handle *handle = &r->handle[h];

        handle->home = malloc(choices * sizeof *handle->home);
        handle->local = malloc(choices * sizeof *handle->local);
        handle->weight = malloc(choices * sizeof *handle->weight);
        handle->arrived = calloc(l->ranks, sizeof *handle->arrived);
        handle->arrival = malloc((size_t)l->ranks * l->ll_max_tokens * sizeof *handle->arrival);
        if (!handle->home || !handle->local || !handle->weight || !handle->arrived || !handle->arrival)
            return no_memory(error);
    }
    return EP_OK;
}

void cpu_rank_fini(struct cpu_rank *r)
{
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++) {
        free(r->handle[h].home);
        free(r->handle[h].local);
        free(r->handle[h].weight);
        free(r->handle[h].arrived);
        free(r->handle[h].arrival);
    }
    ep_placement_free(&r->placement);
}

/* ---- places ------------------------------------------------------------------------------------ */

static uint64_t *line(const struct run *c, uint32_t where, uint64_t bank, uint64_t region, uint32_t from)
{
    return (uint64_t *)(void *)(c->r->window[where] + bank + region + (uint64_t)from * EP_LINE);
}

static uint8_t *item(const struct run *c, uint32_t where, uint64_t region, uint32_t from, uint32_t i, uint64_t bytes)
{
    return c->r->window[where] + c->bank + region + ((uint64_t)from * c->r->map.limits.ll_max_tokens + i) * bytes;
}

/* Of the bank: whatever the op's dtype is, a source's begin at the same place. */
static uint8_t *bank_row(const struct run *c, uint32_t where, uint32_t from, uint32_t slot, uint64_t bytes)
{
    const struct ep_layout_map *map = &c->r->map;

    return item(c, where, map->bank.rows, from, 0, map->row_bytes) + slot * bytes;
}

/* In the window or beside it, below it too: see resolve() in module.c. */
static void *at(const struct run *c, struct ep_span span)
{
    return span.bytes ? (void *)((uintptr_t)c->r->window[c->r->rank] + span.offset) : NULL;
}

static uint64_t wire_row(const struct run *c)
{
    return (uint64_t)c->r->map.limits.hidden * ep_ref_bytes((ep_dtype)c->op->wire_dtype);
}

static bool in(uint64_t mask, uint32_t rank)
{
    return mask >> rank & 1;
}

/* ---- who takes part, and waiting ---------------------------------------------------------------- */

static uint64_t from_of(const struct run *c, uint32_t rank)
{
    return __atomic_load_n(&c->r->state->from[rank], __ATOMIC_SEQ_CST);
}

static void begin(struct run *c, uint64_t number)
{
    const uint64_t start = ep_clock_ns();

    c->number = number;
    c->bank = c->r->map.ll + number % c->r->map.limits.ll_banks * c->r->map.bank_bytes;
    c->record.start_ns = start;
    c->deadline_ns = start + __atomic_load_n(&c->r->state->timeout_ns, __ATOMIC_RELAXED); /* the server may change it */
    if (c->r->state->begun < number) /* Dekker: the server writes `from`, then looks here */
        __atomic_store_n(&c->r->state->begun, number, __ATOMIC_SEQ_CST);
    for (uint32_t r = 0; r < c->r->ranks; r++)
        if (from_of(c, r) <= number)
            c->members |= 1ull << r;
    if (!in(c->members, c->r->rank))
        c->members = 0;
}

static void late(struct run *c, uint32_t peer, enum ep_wait_phase phase)
{
    c->missed |= 1ull << peer;
    if (c->record.status == EP_TIMEOUT)
        return;
    c->record.status = EP_TIMEOUT;
    c->record.late_rank = peer;
    c->record.wait_phase = phase;
}

/* The word reaches `least`; false when the peer is waited for no more. */
static bool wait_word(struct run *c, uint32_t peer, const uint64_t *word, uint64_t least, enum ep_wait_phase phase)
{
    const uint64_t start = ep_clock_ns();

    /* Acquire: partner is the release of whoever wrote it. */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < least) {
        if (from_of(c, peer) > c->number) {
            c->missed |= 1ull << peer;
            break;
        }
        if (ep_clock_ns() > c->deadline_ns) {
            late(c, peer, phase);
            break;
        }
        usleep(NAP_US);
    }
    c->record.wait_ns += ep_clock_ns() - start;
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= least;
}

static void give_credit(const struct run *c, uint64_t number)
{
    uint64_t *released = &c->r->state->released[number % c->r->map.limits.ll_banks];

    if (number == 0 || *released >= number)
        return;
    *released = number;
    for (uint32_t r = 0; r < c->r->ranks; r++)
        __atomic_store_n(line(c, r, c->r->map.ll, c->r->map.bank.credits, c->r->rank)
                             + number % c->r->map.limits.ll_banks, number, __ATOMIC_RELEASE);
}

static bool has_credit(struct run *c, uint32_t peer)
{
    const uint64_t before = c->number - c->r->map.limits.ll_banks;
    const uint64_t *credit = line(c, c->r->rank, c->r->map.ll, c->r->map.bank.credits, peer)
                             + c->number % c->r->map.limits.ll_banks;

    if (c->number <= c->r->map.limits.ll_banks || from_of(c, peer) > before)
        return true;
    return wait_word(c, peer, credit, before, EP_WAIT_CREDIT);
}

/* ---- numbers ------------------------------------------------------------------------------------- */

static bool powers(const struct run *c)
{
    return c->op->scale_format == EP_SCALE_UE8M0;
}

/* Of one row. */
static uint64_t scale_bytes(const struct run *c)
{
    return (uint64_t)ep_row_scales(c->r->map.limits.hidden) * ep_ref_scale_bytes((ep_scale_format)c->op->scale_format);
}

/* The scale of a block, to its place. */
static float make_scale(const struct run *c, float most, uint32_t block, void *scales)
{
    uint8_t code = 0;

    if (!powers(c))
        return ((float *)scales)[block] = most / 448.0f > 0 ? most / 448.0f : 1.0f;
    while (most > 0 && ldexpf(448.0f, code - 127) < most)
        code++;
    ((uint8_t *)scales)[block] = most > 0 ? code : 127;
    return most > 0 ? ldexpf(1.0f, code - 127) : 1.0f;
}

/* One row of `from` to `to` in fp8, with its scales. */
static void quantise(const struct run *c, const uint8_t *from, uint8_t *to, void *scales)
{
    const ep_dtype dtype = (ep_dtype)c->op->input_dtype;
    const uint32_t hidden = c->r->map.limits.hidden, bytes = ep_ref_bytes(dtype);

    for (uint32_t first = 0; first < hidden; first += EP_FP8_BLOCK) {
        const uint32_t end = first + EP_FP8_BLOCK < hidden ? first + EP_FP8_BLOCK : hidden;
        float most = 0;

        for (uint32_t h = first; h < end; h++) {
            const float x = (float)ep_ref_decode(dtype, from + (size_t)h * bytes);

            most = x > most ? x : -x > most ? -x : most;
        }
        const float scale = make_scale(c, most, first / EP_FP8_BLOCK, scales);

        for (uint32_t h = first; h < end; h++)
            ep_ref_store(EP_FP8_E4M3, (double)((float)ep_ref_decode(dtype, from + (size_t)h * bytes) / scale),
                         to + h);
    }
}

static void add_row(const struct run *c, float *sum, const void *row, float weight)
{
    const ep_dtype dtype = (ep_dtype)c->op->input_dtype;
    const uint32_t bytes = ep_ref_bytes(dtype);

    for (uint32_t h = 0; h < c->r->map.limits.hidden; h++)
        sum[h] += weight * (float)ep_ref_decode(dtype, (const uint8_t *)row + (size_t)h * bytes);
}

static void store_row(const struct run *c, const float *sum, void *row)
{
    const ep_dtype dtype = (ep_dtype)c->op->input_dtype;
    const uint32_t bytes = ep_ref_bytes(dtype);

    for (uint32_t h = 0; h < c->r->map.limits.hidden; h++)
        ep_ref_store(dtype, (double)sum[h], (uint8_t *)row + (size_t)h * bytes);
}

/* ---- dispatch: sending ---------------------------------------------------------------------------- */

static int64_t choice_of(const struct run *c, uint32_t i)
{
    const void *topk = at(c, c->op->topk_idx);

    return c->op->index_bytes == 8 ? ((const int64_t *)topk)[i] : ((const int32_t *)topk)[i];
}

/* Fresh routing, before it is known who takes part. */
static void read_choices(struct run *c)
{
    const struct ep_placement *p = &c->r->placement;
    const float *weights = at(c, c->op->topk_weights);

    c->handle->tokens = c->op->tokens;
    c->handle->top_k = c->op->top_k;
    for (uint32_t i = 0; i < c->op->tokens * c->op->top_k; i++) {
        const int64_t e = choice_of(c, i);

        c->handle->weight[i] = weights ? weights[i] : 1.0f;
        c->handle->home[i] = e == -1 ? -1 : -2; /* -2: there is no such expert */
        if (e < 0 || e >= p->experts)
            continue;

        const uint32_t homes = p->first[e + 1] - p->first[e];
        const uint32_t home = p->first[e] + (c->r->rank + i / c->op->top_k) % homes;

        c->handle->home[i] = (int32_t)p->rank[home];
        c->handle->local[i] = (int32_t)p->local[home];
    }
}

static bool is_again(const struct cpu_handle *handle, uint32_t first, uint32_t k)
{
    for (uint32_t j = 0; j < k; j++)
        if (handle->home[first + j] == handle->home[first + k]
            && handle->local[first + j] == handle->local[first + k])
            return true;
    return false;
}

/* Token t's row to rank d, if it has any choice there. */
static bool send_row(struct run *c, uint32_t t, uint32_t d, uint32_t slot)
{
    const struct cpu_handle *handle = c->handle;
    const struct ep_layout_map *map = &c->r->map;
    const uint64_t input = (uint64_t)map->limits.hidden * ep_ref_bytes((ep_dtype)c->op->input_dtype);
    const uint8_t *x = (const uint8_t *)at(c, c->op->x) + t * input;
    struct ep_row_header *header =
        (struct ep_row_header *)(void *)item(c, d, map->bank.headers, c->r->rank, slot, map->header_bytes);
    uint8_t *row = bank_row(c, d, c->r->rank, slot, wire_row(c));
    uint8_t *scales = item(c, d, map->bank.scales, c->r->rank, slot, map->scales_bytes);
    const uint32_t first = t * handle->top_k;
    uint32_t routes = 0;

    for (uint32_t k = 0; k < handle->top_k; k++)
        routes += handle->home[first + k] == (int32_t)d;
    if (routes == 0)
        return false;
    header->token = t;
    header->routes = routes;
    for (uint32_t k = 0; k < handle->top_k; k++) {
        const bool here = handle->home[first + k] == (int32_t)d;

        header->route[k] = (struct ep_route){ here ? handle->local[first + k] : -1, handle->weight[first + k],
                                              is_again(handle, first, k) ? AGAIN : 0, 0 };
    }
    if (c->op->wire_dtype != c->op->input_dtype)
        quantise(c, x, row, scales);
    else
        memcpy(row, x, input);
    if (c->op->input_dtype == EP_FP8_E4M3)
        memcpy(scales, (const uint8_t *)at(c, c->op->x_scales) + t * scale_bytes(c), scale_bytes(c));
    if (d != c->r->rank)
        c->record.wire_bytes += wire_row(c) + (c->op->wire_dtype == EP_FP8_E4M3 ? scale_bytes(c) : 0);
    return true;
}

static void count_dropped(struct run *c)
{
    for (uint32_t i = 0; i < c->handle->tokens * c->handle->top_k; i++) {
        const int32_t home = c->handle->home[i];

        c->record.dropped += home == -2 || (home >= 0 && !in(c->members, (uint32_t)home));
    }
}

static void send_rows(struct run *c)
{
    for (uint32_t d = 0; d < c->r->ranks; d++) {
        uint32_t slot = 0;

        if (!in(c->members, d) || !has_credit(c, d))
            continue;
        for (uint32_t t = 0; t < c->handle->tokens; t++)
            slot += send_row(c, t, d, slot);
        __atomic_store_n(line(c, d, c->bank, c->r->map.bank.dispatch_flags, c->r->rank),
                         ep_flag_make(c->number, slot), __ATOMIC_RELEASE);
    }
    count_dropped(c);
    c->record.logical_bytes = (uint64_t)c->handle->tokens * c->handle->top_k * wire_row(c);
}

/* ---- dispatch: receiving --------------------------------------------------------------------------- */

static bool by_expert(uint32_t layout)
{
    return layout == EP_LAYOUT_EXPERT_MAJOR || layout == EP_LAYOUT_PACKED;
}

static void wait_rows(struct run *c)
{
    for (uint32_t s = 0; s < c->r->ranks; s++) {
        const uint64_t *flag = line(c, c->r->rank, c->bank, c->r->map.bank.dispatch_flags, s);

        c->handle->arrived[s] = 0;
        if (in(c->members, s) && wait_word(c, s, flag, ep_flag_make(c->number, 0), EP_WAIT_ARRIVAL))
            c->handle->arrived[s] = ep_flag_count(*flag);
    }
}

static const struct ep_row_header *header_of(const struct run *c, uint32_t s, uint32_t slot)
{
    return (const struct ep_row_header *)(const void *)item(c, c->r->rank, c->r->map.bank.headers, s, slot,
                                                            c->r->map.header_bytes);
}

static void count_rows(const struct run *c, uint32_t *counts)
{
    for (uint32_t s = 0; s < c->r->ranks; s++)
        for (uint32_t i = 0; i < c->handle->arrived[s]; i++)
            for (uint32_t k = 0; k < c->op->top_k; k++) {
                const struct ep_route *route = &header_of(c, s, i)->route[k];

                counts[route->expert < 0 ? 0 : route->expert] += route->expert >= 0 && route->index != AGAIN;
            }
}

static void put_row(const struct run *c, uint32_t s, uint32_t slot, uint64_t position)
{
    struct ep_source *sources = at(c, c->op->sources);
    uint8_t *out = at(c, c->op->out), *out_scales = at(c, c->op->out_scales);

    if (sources)
        sources[position] = (struct ep_source){ s, header_of(c, s, slot)->token };
    if (out)
        memcpy(out + position * wire_row(c), bank_row(c, c->r->rank, s, slot, wire_row(c)), wire_row(c));
    if (out_scales)
        memcpy(out_scales + position * scale_bytes(c),
               item(c, c->r->rank, c->r->map.bank.scales, s, slot, c->r->map.scales_bytes), scale_bytes(c));
}

/* next[l]: where the expert's next row goes. */
static void put_by_expert(struct run *c, uint64_t *next)
{
    for (uint32_t s = 0; s < c->r->ranks; s++)
        for (uint32_t i = 0; i < c->handle->arrived[s]; i++) {
            const struct ep_row_header *header = header_of(c, s, i);
            struct cpu_arrival *arrival = &c->handle->arrival[s * c->r->map.limits.ll_max_tokens + i];
            uint64_t where[EP_MAX_TOP_K];

            *arrival = (struct cpu_arrival){ .token = header->token };
            for (uint32_t k = 0; k < c->op->top_k; k++) {
                const struct ep_route *route = &header->route[k];

                if (route->expert < 0)
                    continue;
                if (route->index != AGAIN)
                    put_row(c, s, i, where[k] = next[route->expert]++);
                for (uint32_t j = 0; j < k && route->index == AGAIN; j++)
                    if (header->route[j].expert == route->expert) {
                        where[k] = where[j];
                        break;
                    }
                arrival->position[arrival->n] = where[k];
                arrival->weight[arrival->n++] = route->weight;
            }
        }
}

static void zero_padding(const struct run *c, uint64_t from, uint64_t to)
{
    if (c->op->out.bytes)
        memset((uint8_t *)at(c, c->op->out) + from * wire_row(c), 0, (to - from) * wire_row(c));
}

static void receive_by_expert(struct run *c)
{
    const struct ep_limits *l = &c->r->map.limits;
    const bool packed = c->op->layout == EP_LAYOUT_PACKED;
    uint32_t *counts = calloc(l->local_experts, sizeof *counts);
    uint64_t *next = calloc(l->local_experts, sizeof *next), position = 0;
    int32_t *out_counts = at(c, c->op->counts), *offsets = at(c, c->op->offsets);

    if (!counts || !next)
        abort();
    count_rows(c, counts);
    for (uint32_t e = 0; e < l->local_experts; e++) {
        const uint64_t aligned = (counts[e] + c->op->alignment - 1ull) / c->op->alignment * c->op->alignment;

        next[e] = packed ? position : (uint64_t)e * l->ranks * l->ll_max_tokens;
        position += packed ? aligned : counts[e];
        out_counts[e] = (int32_t)counts[e];
        if (offsets)
            offsets[e] = (int32_t)next[e];
    }
    if (offsets)
        offsets[l->local_experts] = (int32_t)position;
    c->record.rows = position;
    if (packed && position * wire_row(c) > c->op->out.bytes) {
        c->record.status = EP_OVERFLOW;
        c->record.rows_needed = position;
        memset(c->handle->arrived, 0, l->ranks * sizeof *c->handle->arrived);
    } else {
        put_by_expert(c, next);
        for (uint32_t e = 0; packed && e < l->local_experts; e++)
            zero_padding(c, next[e], (uint64_t)(offsets ? offsets[e + 1] : (int32_t)position));
    }
    free(counts);
    free(next);
}

static void receive_in_place(struct run *c)
{
    const struct ep_limits *l = &c->r->map.limits;
    int32_t *counts = at(c, c->op->counts), *out_topk = at(c, c->op->out_topk);
    float *out_weights = at(c, c->op->out_weights);

    for (uint32_t s = 0; s < l->ranks; s++) {
        counts[s] = (int32_t)c->handle->arrived[s];
        c->record.rows += c->handle->arrived[s];
        for (uint32_t i = 0; i < c->handle->arrived[s]; i++) {
            const uint64_t position = (uint64_t)s * l->ll_max_tokens + i;
            const struct ep_row_header *header = header_of(c, s, i);

            c->handle->arrival[position] = (struct cpu_arrival){ .token = header->token, .n = 1,
                                                                    .position = { position }, .weight = { 1 } };
            put_row(c, s, i, position);
            for (uint32_t k = 0; k < c->op->top_k; k++) {
                if (out_topk)
                    out_topk[position * c->op->top_k + k] = header->route[k].expert;
                if (out_weights)
                    out_weights[position * c->op->top_k + k] =
                        header->route[k].expert >= 0 ? header->route[k].weight : 0;
            }
        }
    }
}

/* ---- what the state keeps of a handle: the server looks at it meanwhile -------------------------------- */

static void share_handle(const struct run *c)
{
    cpu_store_words(&c->r->state->handles[c->op->handle], &c->shared, sizeof c->shared);
}

static void share_routing(const struct run *c)
{
    const struct cpu_handle *handle = c->handle;
    struct ep_device_tables tables;

    ep_device_state_tables(&c->r->map, &c->r->placement, &tables);
    int32_t *routing = (int32_t *)(void *)((uint8_t *)c->r->state + tables.routing
                                           + c->op->handle * tables.handle_stride);

    for (uint32_t i = 0; i < handle->tokens * handle->top_k; i++) {
        const uint32_t again = is_again(handle, i - i % handle->top_k, i % handle->top_k) ? EP_DEVICE_ROUTE_AGAIN : 0;
        const int32_t route = (int32_t)((uint32_t)handle->home[i] << 16 | (uint32_t)handle->local[i] | again);

        __atomic_store_n(&routing[i], handle->home[i] < 0 ? -1 : route, __ATOMIC_RELAXED);
    }
}

/* ---- dispatch ---------------------------------------------------------------------------------------- */

static void dispatch_send(struct run *c)
{
    if (c->op->flags & EP_OP_CACHED && c->shared.generation != c->op->generation) {
        c->record.status = EP_STALE_HANDLE;
        return;
    }
    if (!(c->op->flags & EP_OP_CACHED))
        read_choices(c);
    if (c->shared.number + c->r->map.limits.ll_banks > c->number)
        give_credit(c, c->shared.number);
    if (c->number > c->r->map.limits.ll_banks)
        give_credit(c, c->number - c->r->map.limits.ll_banks);
    send_rows(c);
    c->handle->members = c->members;
    c->shared = (struct ep_device_handle){ .number = c->number, .generation = c->op->generation,
                                           .tokens = c->op->tokens, .top_k = c->op->top_k,
                                           .layout = c->op->layout, .alignment = c->op->alignment,
                                           .wire_dtype = c->op->wire_dtype };
    share_handle(c);
    share_routing(c);
    c->r->state->number = c->number;
}

static void dispatch_receive(struct run *c)
{
    wait_rows(c);
    if (by_expert(c->op->layout))
        receive_by_expert(c);
    else
        receive_in_place(c);
    c->shared.routed = c->record.status == EP_OK;
    share_handle(c);
}

/* ---- combine ------------------------------------------------------------------------------------------ */

static uint64_t payload_row(const struct run *c)
{
    return (uint64_t)c->r->map.limits.hidden * ep_ref_bytes((ep_dtype)c->op->input_dtype);
}

static const void *row_of(const struct run *c, uint32_t s, uint32_t slot, uint64_t position)
{
    const uint8_t *x = at(c, c->op->x);

    return x ? x + position * payload_row(c)
             : bank_row(c, c->r->rank, s, slot, payload_row(c));
}

static void combine_send(struct run *c, float *sum)
{
    const struct ep_limits *l = &c->r->map.limits;

    for (uint32_t s = 0; s < l->ranks; s++) {
        for (uint32_t i = 0; in(c->members, s) && i < c->handle->arrived[s]; i++) {
            const struct cpu_arrival *arrival = &c->handle->arrival[(uint64_t)s * l->ll_max_tokens + i];

            memset(sum, 0, l->hidden * sizeof *sum);
            for (uint32_t n = 0; n < arrival->n; n++)
                add_row(c, sum, row_of(c, s, i, arrival->position[n]), arrival->weight[n]);
            store_row(c, sum, item(c, s, c->r->map.bank.combine_rows, c->r->rank, arrival->token, payload_row(c)));
            c->record.wire_bytes += s == c->r->rank ? 0 : payload_row(c);
        }
        if (in(c->members, s))
            __atomic_store_n(line(c, s, c->bank, c->r->map.bank.combine_flags, c->r->rank),
                             ep_flag_make(c->number, c->handle->arrived[s]), __ATOMIC_RELEASE);
    }
    c->record.logical_bytes = (uint64_t)c->handle->tokens * c->handle->top_k * payload_row(c);
    c->shared.combined = c->number;
    share_handle(c);
    give_credit(c, c->number);
}

static bool sent_to(const struct cpu_handle *handle, uint32_t t, uint32_t d)
{
    for (uint32_t k = 0; k < handle->top_k; k++)
        if (handle->home[t * handle->top_k + k] == (int32_t)d)
            return true;
    return false;
}

static void combine_receive(struct run *c, float *sum)
{
    const struct ep_limits *l = &c->r->map.limits;
    const uint8_t *bias = at(c, c->op->bias);
    uint8_t *out = at(c, c->op->out);
    uint64_t there = 0;

    for (uint32_t d = 0; d < l->ranks; d++)
        if (in(c->members & c->handle->members, d)
            && wait_word(c, d, line(c, c->r->rank, c->bank, c->r->map.bank.combine_flags, d),
                         ep_flag_make(c->number, 0), EP_WAIT_ARRIVAL))
            there |= 1ull << d;
    for (uint32_t t = 0; t < c->handle->tokens; t++) {
        memset(sum, 0, l->hidden * sizeof *sum);
        for (uint32_t d = 0; d < l->ranks; d++)
            if (in(there, d) && sent_to(c->handle, t, d))
                add_row(c, sum, item(c, c->r->rank, c->r->map.bank.combine_rows, d, t, payload_row(c)), 1);
        if (bias)
            add_row(c, sum, bias + t * payload_row(c), 1);
        store_row(c, sum, out + t * payload_row(c));
    }
}

static ep_status check_combine(const struct run *c)
{
    const struct ep_device_handle *h = &c->shared;

    if (h->generation != c->op->generation || !h->routed || h->combined == h->number
        || c->r->state->number - h->number >= c->r->map.limits.ll_banks)
        return EP_STALE_HANDLE;
    return EP_OK;
}

static void combine(struct run *c, bool sends, bool receives)
{
    float *sum = malloc(c->r->map.limits.hidden * sizeof *sum);

    if (!sum)
        abort();
    if (sends)
        c->record.status = check_combine(c);
    if (c->record.status == EP_OK && sends)
        combine_send(c, sum);
    if (c->record.status == EP_OK && receives)
        combine_receive(c, sum);
    free(sum);
}

/* ---- an op ---------------------------------------------------------------------------------------------- */

/* The receiving half of a send-only op tells of both. */
static void add_half(struct ep_device_record *record, const struct ep_device_record *half)
{
    if (half->number != record->number || half->generation != record->generation)
        return;
    record->dropped += half->dropped;
    record->wire_bytes += half->wire_bytes;
    record->logical_bytes += half->logical_bytes;
    record->wait_ns += half->wait_ns;
    record->start_ns -= half->end_ns - half->start_ns;
}

static void write_record(struct run *c, uint32_t part, bool second_half)
{
    struct ep_device_state *state = c->r->state;
    struct ep_device_report *report = &((struct ep_control *)(void *)c->r->window[c->r->rank])->gpu.report;
    struct ep_device_counters counters = state->counters[part];

    if (c->members == 0 && c->record.status == EP_OK)
        c->record.status = EP_DETACHED;
    c->record.generation = c->op->generation;
    c->record.number = c->number;
    c->record.arrived[0] = c->members & ~c->missed;
    c->record.layout = c->op->layout;
    c->record.wire_dtype = c->op->wire_dtype;
    c->record.timeout_ns = __atomic_load_n(&state->timeout_ns, __ATOMIC_RELAXED);
    c->record.end_ns = ep_clock_ns();
    c->record.sequence = ++state->scratch.sequence;
    counters.count++;
    counters.errors += c->record.status != EP_OK;
    counters.timeouts += c->record.status == EP_TIMEOUT;
    counters.tokens += c->op->tokens;
    counters.wire_bytes += c->record.wire_bytes;
    counters.busy_ns += c->record.end_ns - c->record.start_ns;
    counters.wait_ns += c->record.wait_ns;
    counters.dropped += c->record.dropped;
    cpu_store_words(&state->counters[part], &counters, sizeof counters);
    if (second_half)
        add_half(&c->record, &report->records[c->op->handle][part]);
    cpu_store_words(&report->records[c->op->handle][part], &c->record, sizeof c->record);
    if (c->record.status != EP_OK)
        cpu_note_failure(report, &c->record, part);
}

static void run(struct cpu_rank *r, const struct ep_op *op, bool sends, bool receives)
{
    struct run c = { .r = r, .op = op, .handle = &r->handle[op->handle], .shared = r->state->handles[op->handle] };
    const bool dispatch = op->kind == EP_OP_DISPATCH;

    begin(&c, dispatch && sends ? r->state->number + 1 : c.shared.number);
    if (c.members && dispatch && sends)
        dispatch_send(&c);
    if (c.members && dispatch && receives && c.record.status != EP_STALE_HANDLE)
        dispatch_receive(&c);
    if (c.members && !dispatch)
        combine(&c, sends, receives);
    write_record(&c, dispatch ? EP_DEVICE_DISPATCH : EP_DEVICE_COMBINE, receives && !sends);
}

void cpu_execute(struct cpu_rank *r, const struct ep_op *op)
{
    if (op->kind == EP_OP_COMPLETE) {
        run(r, &r->half[op->handle], false, true);
    } else if (op->kind != EP_OP_RELEASE) {
        const bool half = op->flags & EP_OP_SEND_ONLY;

        if (half)
            r->half[op->handle] = *op;
        run(r, op, true, !half);
    }
}
