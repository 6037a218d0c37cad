/* LL dispatch: what has come, and where it goes. */
#include "ll.h"

#include <string.h>

/* The headers of one source's rows, checked, to the handle. */
static void collect(struct ep_host_call *call, struct ep_host_handle *handle, uint32_t s, uint32_t count)
{
    const struct ep_layout_map *map = &call->team->map;
    const uint8_t *headers = call->me->window +
                             ll_region_at(call->team, handle->number, map->bank.headers, s, map->header_bytes);
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
        struct ll_awaited a = { .call = call, .number = handle->number, .peer = s, .look = ll_rows_of };
        ep_status status;

        handle->source_first[s + 1] = handle->source_first[s];
        if (!ep_mask_test(handle->participants, s))
            continue;
        status = ll_await(&a);
        if (status != EP_OK)
            return status;
        if (a.state != LL_THERE || a.count > call->team->map.limits.ll_max_tokens)
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
    const uint8_t *row = window + ll_region_at(call->team, handle->number, map->bank.rows, s, map->row_bytes) +
                         slot * row_bytes;
    const uint8_t *scale = window + ll_region_at(call->team, handle->number, map->bank.scales, s, map->scales_bytes) +
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
        ep_host_zero_rows(call, op, EP_NO_RANK, (uint64_t)offset[e] + count[e], offset[e + 1]);
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
    call->result->view = ll_bank_at(call->team, handle->number) + map->bank.rows;
    call->result->view_stride = (uint64_t)slots * map->row_bytes;
    if (op->wire_dtype == EP_FP8_E4M3) {
        call->result->scales_view = ll_bank_at(call->team, handle->number) + map->bank.scales;
        call->result->scales_view_stride = (uint64_t)slots * map->scales_bytes;
    }
    return EP_OK;
}

ep_status ll_receive(struct ep_host_call *call, const struct ep_op *op, struct ep_host_handle *handle)
{
    ep_status status = receive_headers(call, handle);

    if (status != EP_OK)
        return status;
    handle->state = EP_HANDLE_ROUTED; /* even when `out` overflows: peers' combines need this rank */
    return op->layout == EP_LAYOUT_RANK_MAJOR ? give_by_rank(call, op, handle)
                                              : give_by_expert(call, op, handle);
}
