/* LL with ranks of other nodes: frames to them, and what theirs do here. */
#include "ll.h"

#include <string.h>

/* Rows of so many bytes each that a frame has room for. */
static uint32_t rows_per_frame(const struct ep_host_team *team, uint64_t each)
{
    uint64_t room = ep_host_net_most(team->net) - sizeof(struct ep_host_frame) - 2 * EP_HOST_SECTION;

    return (uint32_t)(room / each);
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint8_t *payload_of(struct ep_host_frame *frame) { return (uint8_t *)(frame + 1); }

/* What may leave with others' frames. */
static void commit(struct ep_host_call *call, uint32_t peer, enum ep_host_frame_kind kind)
{
    ep_host_net_commit(call->team->net, call->team->shape.node[peer], (uint32_t)kind);
}

static void fill_head(struct ep_host_frame *frame, const struct ep_host_call *call, uint32_t peer, uint64_t number,
                      uint32_t first, uint32_t count, uint32_t total)
{
    *frame = (struct ep_host_frame){ .rank = call->rank,
                                     .peer = peer,
                                     .number = number,
                                     .first = first,
                                     .count = count,
                                     .total = total,
                                     .last = first + count == total };
}

/* ---- sending -------------------------------------------------------------------------------- */

static void write_rows(const struct ep_host_call *call, const struct ep_host_handle *handle,
                       const struct ep_host_payload *p, uint32_t d, struct ep_host_frame *frame)
{
    const struct ep_layout_map *map = &call->team->map;
    const struct ep_host_sections at = ep_host_ll_rows_sections(map, frame->count, p->row_bytes, p->scale_bytes);
    const uint32_t *tokens = handle->dest_token + handle->dest_first[d] + frame->first;
    uint8_t *payload = payload_of(frame);

    for (uint32_t i = 0; i < frame->count; i++) {
        ep_host_header_write(call->team, handle, tokens[i], d,
                             (struct ep_row_header *)(void *)(payload + (uint64_t)i * map->header_bytes));
        if (p->scale_bytes)
            memcpy(payload + at.scales + (uint64_t)i * p->scale_bytes,
                   p->scales + (uint64_t)tokens[i] * p->scale_bytes, p->scale_bytes);
        ep_host_copy_row(payload + at.rows + (uint64_t)i * p->row_bytes, p->rows + (uint64_t)tokens[i] * p->row_bytes,
                         p->row_bytes);
    }
}

ep_status ep_host_ll_send_rows(struct ep_host_call *call, const struct ep_host_handle *handle,
                               const struct ep_host_payload *p, uint32_t d, bool *sent)
{
    const struct ep_layout_map *map = &call->team->map;
    uint32_t total = handle->dest_first[d + 1] - handle->dest_first[d], first = 0;
    uint32_t most = rows_per_frame(call->team, (uint64_t)map->header_bytes + p->scale_bytes + p->row_bytes);

    *sent = false;
    do {
        uint32_t count = smaller(total - first, most);
        uint64_t bytes = sizeof(struct ep_host_frame) +
                         ep_host_ll_rows_sections(map, count, p->row_bytes, p->scale_bytes).bytes;
        struct ep_host_frame *frame;
        ep_status status = ep_host_place(call, d, (uint32_t)bytes, &frame);

        if (status != EP_OK || !frame)
            return status;
        fill_head(frame, call, d, handle->number, first, count, total);
        frame->row_bytes = p->row_bytes;
        frame->scale_bytes = p->scale_bytes;
        write_rows(call, handle, p, d, frame);
        commit(call, d, EP_FRAME_LL_ROWS);
        first += count;
    } while (first < total);
    *sent = true;
    return EP_OK;
}

ep_status ep_host_ll_send_partials(struct ep_host_call *call, const struct ep_host_handle *handle, uint32_t s,
                                   uint32_t total, uint32_t row_bytes, ep_host_ll_sum_fn sum, void *user, bool *sent)
{
    uint32_t most = rows_per_frame(call->team, sizeof(uint32_t) + row_bytes), first = 0;

    *sent = false;
    do {
        uint32_t count = smaller(total - first, most);
        const struct ep_host_sections at = ep_host_ll_partials_sections(count, row_bytes);
        struct ep_host_frame *frame;
        ep_status status = ep_host_place(call, s, (uint32_t)(sizeof *frame + at.bytes), &frame);

        if (status != EP_OK || !frame)
            return status;
        fill_head(frame, call, s, handle->number, first, count, total);
        frame->row_bytes = row_bytes;
        for (uint32_t i = 0; i < count; i++)
            sum(user, first + i, payload_of(frame) + at.rows + (uint64_t)i * row_bytes,
                (uint32_t *)(void *)payload_of(frame) + i);
        commit(call, s, EP_FRAME_LL_PARTIALS);
        first += count;
    } while (first < total);
    *sent = true;
    return EP_OK;
}

/* ---- what comes: the net's thread ----------------------------------------------------------------- */

static void place_rows(const struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload,
                       uint8_t *window)
{
    const struct ep_layout_map *map = &team->map;
    const struct ep_host_sections at = ep_host_ll_rows_sections(map, head->count, head->row_bytes, head->scale_bytes);
    uint64_t n = head->number, first = head->first;
    uint8_t *scales = window + ll_region_at(team, n, map->bank.scales, head->rank, map->scales_bytes);

    memcpy(window + ll_region_at(team, n, map->bank.headers, head->rank, map->header_bytes) +
               first * map->header_bytes,
           payload, (uint64_t)head->count * map->header_bytes);
    for (uint32_t i = 0; head->scale_bytes && i < head->count; i++)
        memcpy(scales + (first + i) * map->scales_bytes, payload + at.scales + (uint64_t)i * head->scale_bytes,
               head->scale_bytes);
    ep_host_copy_row(window + ll_region_at(team, n, map->bank.rows, head->rank, map->row_bytes) +
                         first * head->row_bytes,
                     payload + at.rows, (uint64_t)head->count * head->row_bytes);
}

bool ep_host_ll_take_rows(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    uint8_t *window = ep_host_ll_enter(team, head->rank, head->peer, head->number);
    bool credit;

    if (!window)
        return true;
    credit = ep_host_ll_has_credit(team, head->peer, head->number);
    if (credit)
        place_rows(team, head, payload, window);
    if (credit && head->last)
        ep_host_ll_announce(team, head->rank, head->peer, window, ll_dispatch_flags(team, head->number), head->number,
                            head->total);
    ep_host_gate_leave(&team->ranks[head->rank]);
    return credit;
}

/* UINT32_MAX: the receiver could not tell whose row it was. */
static bool place_partials(const struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload,
                           uint8_t *window)
{
    const struct ep_layout_map *map = &team->map;
    const struct ep_host_sections at = ep_host_ll_partials_sections(head->count, head->row_bytes);
    uint8_t *rows = window + ll_region_at(team, head->number, map->bank.combine_rows, head->rank,
                                          map->combine_row_bytes);

    for (uint32_t i = 0; i < head->count; i++) {
        uint32_t token = ((const uint32_t *)(const void *)payload)[i];

        if (token == EP_NO_TOKEN)
            continue;
        if (token >= map->limits.ll_max_tokens)
            return false;
        ep_host_copy_row(rows + (uint64_t)token * head->row_bytes, payload + at.rows + (uint64_t)i * head->row_bytes,
                         head->row_bytes);
    }
    return true;
}

bool ep_host_ll_take_partials(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    uint8_t *window = ep_host_ll_enter(team, head->rank, head->peer, head->number);
    bool good;

    if (!window)
        return true;
    good = place_partials(team, head, payload, window);
    if (good && head->last)
        ep_host_ll_announce(team, head->rank, head->peer, window, ll_combine_flags(team, head->number), head->number,
                            head->total);
    ep_host_gate_leave(&team->ranks[head->rank]);
    return good;
}
