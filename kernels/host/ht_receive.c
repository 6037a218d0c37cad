/* HT dispatch: what has come, and where it lies. */
#include "ht.h"

#include <string.h>

static struct ep_host_arrived *arrived_at(const struct ht *h, uint32_t i)
{
    return h->handle->arrived + (uint64_t)i * h->call->team->map.limits.top_k;
}

/* A row that never came. */
static void mark_missing(struct ht *h, uint32_t i)
{
    h->handle->arrived_token[i] = EP_NO_TOKEN;
    for (uint32_t j = 0; j < h->call->team->map.limits.top_k; j++)
        arrived_at(h, i)[j] = (struct ep_host_arrived){ .local = -1 };
}

static void read_headers(struct ht *h)
{
    const struct ep_layout_map *map = &h->call->team->map;
    uint32_t *first = h->handle->source_first;

    first[0] = 0;
    for (uint32_t s = 0; s < ht_ranks(h); s++) {
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
    uint32_t *next = me->cursor, *end = me->total, local = ht_local(h);

    memcpy(end, me->expert_offset, local * sizeof *end);
    for (uint32_t s = 0; s < ht_ranks(h); s++) {
        memcpy(next, end, local * sizeof *next);
        for (uint32_t l = 0; l < local; l++)
            end[l] += me->source_expert[(uint64_t)s * local + l];
        for (uint32_t i = h->handle->source_first[s]; i < h->handle->source_first[s + 1]; i++)
            number_token(h, i, next, end);
        for (uint32_t l = 0; zero && l < local; l++)
            ep_host_zero_rows(h->call, h->op, s, next[l], end[l]);
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

    memset(me->expert_count, 0, ht_local(h) * sizeof *me->expert_count);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        for (uint32_t l = 0; l < ht_local(h); l++)
            me->expert_count[l] += me->source_expert[(uint64_t)s * ht_local(h) + l];
}

static ep_status give_packed(struct ht *h)
{
    struct ep_host_rank *me = h->call->me;
    bool room;

    sum_expert_counts(h);
    h->handle->rows = ep_host_packed_offsets(me->expert_count, ht_local(h), h->op->alignment, me->expert_offset);
    ep_host_write_counts(h->call, h->op, me->expert_count, ht_local(h), me->expert_offset);
    room = out_fits(h, h->handle->rows);
    number_rows(h, room);
    if (!room)
        return overflow(h);
    for (uint32_t s = 0; s < ht_ranks(h); s++)
        for (uint32_t i = h->handle->source_first[s]; i < h->handle->source_first[s + 1]; i++) {
            copy_to_experts(h, i);
            ep_host_write_expert_sources(h->call, h->op, h->handle, s, i);
        }
    for (uint32_t l = 0; l < ht_local(h); l++)
        ep_host_zero_rows(h->call, h->op, EP_NO_RANK, (uint64_t)me->expert_offset[l] + me->expert_count[l],
                          me->expert_offset[l + 1]);
    return EP_OK;
}

static ep_status give_flat(struct ht *h)
{
    const uint32_t *first = h->handle->source_first;

    h->handle->rows = first[ht_ranks(h)];
    ep_host_write_counts(h->call, h->op, h->call->me->source_count, ht_ranks(h), NULL);
    if (!out_fits(h, h->handle->rows))
        return overflow(h);
    for (uint32_t s = 0; s < ht_ranks(h); s++) {
        if (!ep_mask_test(h->arrived, s))
            ep_host_zero_rows(h->call, h->op, s, first[s], first[s + 1]);
        for (uint32_t i = first[s]; i < first[s + 1]; i++)
            ep_host_write_tables(h->call, h->op, h->handle, s, i, i);
    }
    return EP_OK;
}

ep_status ht_give_rows(struct ht *h)
{
    ep_status status;

    read_headers(h);
    memcpy(h->handle->participants, h->arrived, sizeof h->arrived);
    status = h->op->layout == EP_LAYOUT_PACKED ? give_packed(h) : give_flat(h);
    h->call->result->rows = h->handle->rows;
    h->handle->state = EP_HANDLE_ROUTED; /* even after an overflow: peers' combines need this rank */
    return status;
}
