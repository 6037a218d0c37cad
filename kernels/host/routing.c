/* Where tokens go, where received rows lie, and the tables that tell the client. */
#include "host_private.h"

#include <string.h>

/* ---- choices of the source ------------------------------------------------------------- */

/* The client may change its indices while we read: each is read once and judged from the copy. */
static int64_t read_index(const uint8_t *index, uint32_t bytes, uint64_t i)
{
    return bytes == 8 ? __atomic_load_n((const int64_t *)(const void *)index + i, __ATOMIC_RELAXED)
                      : __atomic_load_n((const int32_t *)(const void *)index + i, __ATOMIC_RELAXED);
}

static float read_float(const uint8_t *values, uint64_t i)
{
    uint32_t u = __atomic_load_n((const uint32_t *)(const void *)values + i, __ATOMIC_RELAXED);
    float f;

    memcpy(&f, &u, sizeof f);
    return f;
}

/* The home of a valid expert for token t of source s. */
static struct ep_host_choice choose(const struct ep_host_team *team, uint32_t s, uint32_t t, int64_t expert)
{
    uint32_t first = team->home_first[expert];
    uint32_t homes = team->home_first[expert + 1] - first;
    uint32_t at = first + (uint32_t)(((uint64_t)s + t) % homes);

    return (struct ep_host_choice){ .rank = (int32_t)team->home_rank[at],
                                    .local = (int32_t)team->home_local[at] };
}

/* One writer, the rank's own thread. */
static void count_row(struct ep_host_rank *me, int64_t expert)
{
    uint64_t *rows = &me->expert_rows[expert];

    __atomic_store_n(rows, __atomic_load_n(rows, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

uint64_t ep_host_team_expert_rows(const struct ep_host_team *team, uint32_t rank, uint32_t expert)
{
    return __atomic_load_n(&team->ranks[rank].expert_rows[expert], __ATOMIC_RELAXED);
}

static void read_choices(struct ep_host_call *call, struct ep_host_handle *handle)
{
    const struct ep_op *op = call->op;
    const struct ep_host_team *team = call->team;
    const uint8_t *index = ep_host_at(call, op->topk_idx), *weights = ep_host_at(call, op->topk_weights);

    handle->bad = 0;
    for (uint32_t t = 0; t < op->tokens; t++)
        for (uint32_t j = 0; j < op->top_k; j++) {
            uint64_t i = (uint64_t)t * op->top_k + j;
            int64_t expert = read_index(index, op->index_bytes, i);
            struct ep_host_choice choice = { .rank = -1 };

            if (expert >= 0 && expert < (int64_t)team->map.limits.experts) {
                choice = choose(team, call->rank, t, expert);
                count_row(call->me, expert);
            } else if (expert != -1) {
                handle->bad++;
            }
            choice.weight = weights ? read_float(weights, i) : 1.0f;
            handle->choices[i] = choice;
        }
}

/* Calls that a token goes to rank d, once per (token, rank), ascending by token: counts into
 * first[d + 1] (fill false), or writes the token to list[first[d]++]. */
static void each_destination(struct ep_host_call *call, struct ep_host_handle *handle, bool fill)
{
    uint32_t *mark = call->me->mark, *first = handle->dest_first;

    memset(mark, 0, call->team->map.limits.ranks * sizeof *mark);
    for (uint32_t t = 0; t < handle->tokens; t++)
        for (uint32_t j = 0; j < handle->top_k; j++) {
            int32_t d = handle->choices[(uint64_t)t * handle->top_k + j].rank;

            if (d < 0 || mark[d] == t + 1)
                continue;
            mark[d] = t + 1;
            if (fill)
                handle->dest_token[first[d]++] = t;
            else
                first[d + 1]++;
        }
}

static void list_destinations(struct ep_host_call *call, struct ep_host_handle *handle)
{
    uint32_t ranks = call->team->map.limits.ranks, *first = handle->dest_first;

    memset(first, 0, (ranks + 1) * sizeof *first);
    each_destination(call, handle, false);
    for (uint32_t d = 0; d < ranks; d++)
        first[d + 1] += first[d];
    each_destination(call, handle, true);
    for (uint32_t d = ranks; d > 0; d--) /* filling moved each start to the next one's */
        first[d] = first[d - 1];
    first[0] = 0;
}

void ep_host_routing_read(struct ep_host_call *call, struct ep_host_handle *handle)
{
    read_choices(call, handle);
    list_destinations(call, handle);
    handle->has_choices = true;
}

uint64_t ep_host_routes_to(const struct ep_host_handle *handle, uint32_t d)
{
    uint64_t routes = 0;

    for (uint64_t i = 0; i < (uint64_t)handle->tokens * handle->top_k; i++)
        routes += handle->choices[i].rank == (int32_t)d;
    return routes;
}

uint32_t ep_host_token_ranks(const struct ep_host_handle *handle, uint32_t token, uint32_t *ranks)
{
    const struct ep_host_choice *choice = handle->choices + (uint64_t)token * handle->top_k;
    uint32_t n = 0;

    for (uint32_t j = 0; j < handle->top_k; j++) {
        uint32_t at = 0, r = (uint32_t)choice[j].rank;

        if (choice[j].rank < 0)
            continue;
        while (at < n && ranks[at] < r)
            at++;
        if (at < n && ranks[at] == r)
            continue;
        memmove(ranks + at + 1, ranks + at, (n - at) * sizeof *ranks);
        ranks[at] = r;
        n++;
    }
    return n;
}

/* ---- headers ------------------------------------------------------------------------------ */

void ep_host_header_fill(const struct ep_host_team *team, const struct ep_host_choice *choice, uint32_t top_k,
                         uint32_t token, uint32_t d, struct ep_row_header *header)
{
    uint32_t routes = 0;

    for (uint32_t j = 0; j < team->map.limits.top_k; j++) {
        bool there = j < top_k && choice[j].rank == (int32_t)d;

        header->route[j] = (struct ep_route){ .expert = there ? choice[j].local : -1,
                                              .weight = there ? choice[j].weight : 0.0f };
        routes += there;
    }
    header->token = token;
    header->routes = routes;
}

void ep_host_header_write(const struct ep_host_team *team, const struct ep_host_handle *handle,
                          uint32_t token, uint32_t d, struct ep_row_header *header)
{
    ep_host_header_fill(team, handle->choices + (uint64_t)token * handle->top_k, handle->top_k, token, d, header);
}

void ep_host_header_read(struct ep_host_call *call, struct ep_host_handle *handle,
                         const struct ep_row_header *at, uint32_t i, uint32_t max_tokens)
{
    uint32_t top_k = call->team->map.limits.top_k, local_experts = call->team->local_experts[call->rank];
    struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * top_k;
    uint32_t token = __atomic_load_n(&at->token, __ATOMIC_RELAXED);

    handle->arrived_token[i] = token < max_tokens ? token : EP_NO_TOKEN;
    for (uint32_t j = 0; j < top_k; j++) {
        int32_t local = __atomic_load_n(&at->route[j].expert, __ATOMIC_RELAXED);
        bool here = token < max_tokens && local >= 0 && local < (int32_t)local_experts;

        arrived[j].local = here ? local : -1;
        arrived[j].weight = here ? read_float((const uint8_t *)&at->route[j].weight, 0) : 0.0f;
        arrived[j].row = 0;
    }
}

bool ep_host_first_of_expert(const struct ep_host_arrived *arrived, uint32_t j)
{
    if (arrived[j].local < 0)
        return false;
    for (uint32_t i = 0; i < j; i++)
        if (arrived[i].local == arrived[j].local)
            return false;
    return true;
}

uint64_t ep_host_packed_offsets(const uint32_t *count, uint32_t local_experts, uint32_t alignment,
                                uint32_t *offset)
{
    uint64_t next = 0, align = alignment ? alignment : 1;

    for (uint32_t l = 0; l < local_experts; l++) {
        offset[l] = (uint32_t)next;
        next = (next + count[l] + align - 1) & ~(align - 1);
    }
    offset[local_experts] = (uint32_t)next;
    return next;
}

/* ---- what the client reads ------------------------------------------------------------------ */

void ep_host_write_tables(struct ep_host_call *call, const struct ep_op *op,
                          const struct ep_host_handle *handle, uint32_t source, uint32_t i, uint64_t at)
{
    const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * call->team->map.limits.top_k;
    int32_t *topk = (int32_t *)(void *)ep_host_at(call, op->out_topk);
    float *weights = (float *)(void *)ep_host_at(call, op->out_weights);
    struct ep_source *sources = (struct ep_source *)(void *)ep_host_at(call, op->sources);

    for (uint32_t j = 0; j < op->top_k; j++) {
        if (topk)
            topk[at * op->top_k + j] = arrived[j].local;
        if (weights)
            weights[at * op->top_k + j] = arrived[j].weight;
    }
    if (sources)
        sources[at] = (struct ep_source){ source, handle->arrived_token[i] };
}

void ep_host_write_expert_sources(struct ep_host_call *call, const struct ep_op *op,
                                  const struct ep_host_handle *handle, uint32_t source, uint32_t i)
{
    uint32_t top_k = call->team->map.limits.top_k;
    const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * top_k;
    struct ep_source *sources = (struct ep_source *)(void *)ep_host_at(call, op->sources);

    if (!sources)
        return;
    for (uint32_t j = 0; j < top_k; j++)
        if (ep_host_first_of_expert(arrived, j))
            sources[arrived[j].row] = (struct ep_source){ source, handle->arrived_token[i] };
}

void ep_host_write_counts(struct ep_host_call *call, const struct ep_op *op, const uint32_t *counts,
                          uint32_t n, const uint32_t *offsets)
{
    int32_t *out = (int32_t *)(void *)ep_host_at(call, op->counts);
    int32_t *out_offsets = (int32_t *)(void *)ep_host_at(call, op->offsets);

    for (uint32_t i = 0; out && i < n; i++)
        out[i] = (int32_t)counts[i];
    for (uint32_t i = 0; out_offsets && offsets && i <= n; i++)
        out_offsets[i] = (int32_t)offsets[i];
}

void ep_host_zero_rows(struct ep_host_call *call, const struct ep_op *op, uint32_t source, uint64_t first,
                       uint64_t last)
{
    uint32_t hidden = call->team->map.limits.hidden;
    uint64_t row_bytes = (uint64_t)hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    uint64_t scale_bytes = ep_row_scale_bytes(hidden, op->scale_format);
    uint8_t *out = ep_host_at(call, op->out), *scales = ep_host_at(call, op->out_scales);
    struct ep_source *sources = (struct ep_source *)(void *)ep_host_at(call, op->sources);

    if (first >= last)
        return;
    if (out)
        memset(out + first * row_bytes, 0, (last - first) * row_bytes);
    if (scales)
        memset(scales + first * scale_bytes, 0, (last - first) * scale_bytes);
    for (uint64_t row = first; sources && row < last; row++)
        sources[row] = (struct ep_source){ source, EP_NO_TOKEN };
}

uint32_t ep_host_partial_terms(const struct ep_host_team *team, const struct ep_host_handle *handle,
                               uint32_t i, const uint8_t *x, uint32_t row_bytes, const void **rows,
                               float *weights)
{
    uint32_t top_k = team->map.limits.top_k, n = 0;
    const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * top_k;

    for (uint32_t j = 0; j < top_k; j++)
        if (arrived[j].local >= 0) {
            rows[n] = x + (uint64_t)arrived[j].row * row_bytes;
            weights[n++] = arrived[j].weight;
        }
    return n;
}

/* ---- rows on the way -------------------------------------------------------------------------- */

void ep_host_payload_prepare(struct ep_host_call *call, struct ep_host_payload *payload)
{
    const struct ep_op *op = call->op;
    uint32_t hidden = call->team->map.limits.hidden;
    const uint8_t *x = ep_host_at(call, op->x);
    bool fp8 = op->wire_dtype == EP_FP8_E4M3;

    payload->row_bytes = hidden * ep_dtype_bytes((ep_dtype)op->wire_dtype);
    payload->scale_bytes = fp8 ? ep_row_scale_bytes(hidden, op->scale_format) : 0;
    payload->rows = x;
    payload->scales = fp8 ? ep_host_at(call, op->x_scales) : NULL;
    if (!fp8 || op->input_dtype == EP_FP8_E4M3)
        return;

    uint64_t x_bytes = (uint64_t)hidden * ep_dtype_bytes((ep_dtype)op->input_dtype);
    uint8_t *codes = call->me->staging, *scales = codes + (uint64_t)op->tokens * hidden;

    for (uint64_t t = 0; t < op->tokens; t++)
        ep_host_quantise((ep_dtype)op->input_dtype, x + t * x_bytes, hidden, (ep_scale_format)op->scale_format,
                         codes + t * hidden, scales + t * payload->scale_bytes);
    payload->rows = codes;
    payload->scales = scales;
}
