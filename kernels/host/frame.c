/* What is in a frame.  Pure: no state but the team's shape. */
#include "frame.h"

#include <string.h>

static uint64_t section(uint64_t bytes)
{
    return (bytes + EP_HOST_SECTION - 1) / EP_HOST_SECTION * EP_HOST_SECTION;
}

struct ep_host_sections ep_host_ll_rows_sections(const struct ep_layout_map *map, uint32_t count, uint32_t row_bytes,
                                                 uint32_t scale_bytes)
{
    struct ep_host_sections s = { .scales = section((uint64_t)count * map->header_bytes) };

    s.rows = s.scales + section((uint64_t)count * scale_bytes);
    s.bytes = s.rows + (uint64_t)count * row_bytes;
    return s;
}

struct ep_host_sections ep_host_ll_partials_sections(uint32_t count, uint32_t row_bytes)
{
    struct ep_host_sections s = { .rows = section((uint64_t)count * sizeof(uint32_t)) };

    s.bytes = s.rows + (uint64_t)count * row_bytes;
    return s;
}

struct ep_host_sections ep_host_ht_rows_sections(const struct ep_layout_map *map, uint32_t count, uint32_t row_bytes,
                                                 uint32_t scale_bytes)
{
    struct ep_host_sections s = { .choices = section((uint64_t)count * sizeof(uint32_t)) };

    s.scales = s.choices + section((uint64_t)count * map->limits.top_k * sizeof(struct ep_host_choice));
    s.rows = s.scales + section((uint64_t)count * scale_bytes);
    s.bytes = s.rows + (uint64_t)count * row_bytes;
    return s;
}

struct ep_host_sections ep_host_ht_partials_sections(uint32_t ranks, uint32_t count, uint32_t row_bytes,
                                                     uint32_t grad_bytes)
{
    struct ep_host_sections s = { .tokens = section((uint64_t)ranks * sizeof(uint32_t)) };

    s.scales = s.tokens + section((uint64_t)count * sizeof(uint32_t));
    s.rows = s.scales + section((uint64_t)count * grad_bytes);
    s.bytes = s.rows + (uint64_t)count * row_bytes;
    return s;
}

uint32_t ep_host_ranks_on(const struct ep_host_shape *shape, uint32_t node)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < shape->map->limits.ranks; r++)
        n += shape->node[r] == node;
    return n;
}

uint64_t ep_host_ht_ask_bytes(const struct ep_host_shape *shape, uint32_t node, uint64_t tag)
{
    uint64_t counts = (uint64_t)ep_host_ranks_on(shape, node) * (1ull + shape->map->limits.local_experts);

    return sizeof(struct ep_host_traits) + (ep_host_is_dispatch(tag) ? counts * sizeof(uint32_t) : 0);
}

/* ---- judging ----------------------------------------------------------------------------- */

static bool ranks_good(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    const uint32_t ranks = shape->map->limits.ranks;

    return head->rank < ranks && shape->node[head->rank] == node && head->peer < ranks &&
           shape->node[head->peer] == shape->own;
}

static bool counts_good(const struct ep_host_frame *head, uint32_t most)
{
    return head->total <= most && head->first <= head->total && head->count <= head->total - head->first &&
           (head->last == 0 || (head->last == 1 && head->first + head->count == head->total));
}

static bool bytes_are(const struct ep_host_frame *head, uint64_t payload)
{
    return head->size.bytes == sizeof *head + payload;
}

static bool judge_state(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    return head->rank < shape->map->limits.ranks && shape->node[head->rank] == node &&
           bytes_are(head, sizeof(struct ep_host_state));
}

static bool judge_ll_rows(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    const struct ep_layout_map *map = shape->map;

    return ranks_good(shape, node, head) && head->number > 0 && counts_good(head, map->limits.ll_max_tokens) &&
           head->row_bytes % 16 == 0 && head->row_bytes <= map->row_bytes && head->scale_bytes <= map->scales_bytes &&
           bytes_are(head, ep_host_ll_rows_sections(map, head->count, head->row_bytes, head->scale_bytes).bytes);
}

static bool judge_ll_partials(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    const struct ep_layout_map *map = shape->map;

    return ranks_good(shape, node, head) && head->number > 0 && counts_good(head, map->limits.ll_max_tokens) &&
           head->row_bytes % 16 == 0 && head->row_bytes <= map->combine_row_bytes &&
           bytes_are(head, ep_host_ll_partials_sections(head->count, head->row_bytes).bytes);
}

static bool tag_good(const struct ep_host_frame *head) { return head->number >> EP_HT_TAG_SHIFT > 0; }

static bool judge_ht_ask(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    return ranks_good(shape, node, head) && tag_good(head) &&
           bytes_are(head, ep_host_ht_ask_bytes(shape, shape->own, head->number));
}

static bool judge_ht_grant(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    return ranks_good(shape, node, head) && tag_good(head) && ep_host_is_dispatch(head->number) &&
           bytes_are(head, ep_host_ranks_on(shape, shape->own) * sizeof(uint32_t));
}

static bool judge_ht_rows(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    const struct ep_layout_map *map = shape->map;

    return ranks_good(shape, node, head) && tag_good(head) && ep_host_is_dispatch(head->number) &&
           counts_good(head, map->limits.ht_max_tokens) && head->row_bytes % 16 == 0 &&
           head->row_bytes <= map->row_bytes && head->scale_bytes <= map->scales_bytes &&
           bytes_are(head, ep_host_ht_rows_sections(map, head->count, head->row_bytes, head->scale_bytes).bytes);
}

static bool judge_ht_partials(const struct ep_host_shape *shape, uint32_t node, const struct ep_host_frame *head)
{
    const struct ep_layout_map *map = shape->map;

    return ranks_good(shape, node, head) && tag_good(head) && !ep_host_is_dispatch(head->number) &&
           head->count <= map->limits.ht_max_tokens && head->last <= 1 && head->row_bytes % 16 == 0 &&
           head->row_bytes <= map->combine_row_bytes &&
           head->scale_bytes <= map->limits.top_k * sizeof(float) &&
           bytes_are(head, ep_host_ht_partials_sections(ep_host_ranks_on(shape, node), head->count, head->row_bytes,
                                                        head->scale_bytes).bytes);
}

bool ep_host_frame_judge(const struct ep_host_shape *shape, uint32_t node, const void *frame, uint32_t bytes,
                         struct ep_host_frame *head)
{
    if (bytes < sizeof *head || node >= shape->nodes || node == shape->own)
        return false;
    memcpy(head, frame, sizeof *head);
    if (head->size.bytes != bytes)
        return false;
    switch (head->size.kind) {
    case EP_FRAME_STATE: return judge_state(shape, node, head);
    case EP_FRAME_LL_ROWS: return judge_ll_rows(shape, node, head);
    case EP_FRAME_LL_PARTIALS: return judge_ll_partials(shape, node, head);
    case EP_FRAME_HT_ASK: return judge_ht_ask(shape, node, head);
    case EP_FRAME_HT_GRANT: return judge_ht_grant(shape, node, head);
    case EP_FRAME_HT_ROWS: return judge_ht_rows(shape, node, head);
    case EP_FRAME_HT_PARTIALS: return judge_ht_partials(shape, node, head);
    default: return false;
    }
}
