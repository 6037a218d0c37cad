/* What kernels are told of a rank, out of its layout, placement and memory. */
#include <string.h>

#include "rank_base.h"

/* Expert e on the rank that holds it when the first E mod R ranks hold one more than the others. */
static bool is_contiguous(const struct ep_placement *p)
{
    const uint32_t share = p->experts / p->ranks, larger = p->experts % p->ranks;
    uint32_t e = 0;

    if (p->first[p->experts] != p->experts)
        return false;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t l = 0; l < share + (r < larger); l++, e++)
            if (p->rank[e] != r || p->local[e] != l)
                return false;
    return true;
}

ep_status ep_cuda_rank_check(const struct ep_cuda_rank_options *o, struct ep_error *error)
{
    const uint32_t ranks = o->map->limits.ranks;

    if (!o->net && ranks > EP_DEVICE_NODE_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks is %u: a node has at most %u of a group on GPUs", ranks,
                            EP_DEVICE_NODE_RANKS);
    return ep_device_check(&o->map->limits, error);
}

void ep_cuda_rank_base(const struct ep_cuda_rank_options *o, struct ep_ll_rank *rank)
{
    const struct ep_layout_map *m = o->map;
    const struct ep_limits *l = &m->limits;
    const uint8_t *state = (const uint8_t *)o->state;
    struct ep_ll_args *a = &rank->base;
    struct ep_device_tables tables;

    ep_device_state_tables(o->map, o->placement, &tables);
    rank->routing = tables.routing;
    rank->weights = tables.weights;
    rank->handle_stride = tables.handle_stride;
    for (uint32_t r = 0; !o->net && r < l->ranks; r++)
        a->window[r] = o->windows[r];
    a->own = o->windows[o->rank];
    a->state = o->state;
    if (!is_contiguous(o->placement)) {
        a->home_first = (const uint32_t *)(const void *)(state + tables.home_first);
        a->home_rank = (const uint32_t *)(const void *)(state + tables.home_rank);
        a->home_local = (const uint32_t *)(const void *)(state + tables.home_local);
    }
    a->rank = o->rank;
    a->ranks = l->ranks;
    a->experts = l->experts;
    a->local_experts = l->local_experts;
    a->hidden = l->hidden;
    a->max_top_k = l->top_k;
    a->max_tokens = l->ll_max_tokens;
    a->banks = l->ll_banks;
    a->share = l->experts / l->ranks;
    a->larger = l->experts % l->ranks;
    a->per_share = ep_ll_inverse(a->share);
    a->per_larger = ep_ll_inverse(a->share + 1);
    a->ll = m->ll;
    a->bank_bytes = m->bank_bytes;
    a->bank = m->bank;
    a->header_bytes = m->header_bytes;
    a->counts_bytes = m->counts_bytes;
    a->places_bytes = m->places_bytes;
    a->scales_bytes = m->scales_bytes;
    a->partial_bytes = m->partial_bytes;
    a->most_row_bytes = m->row_bytes;
}

void ep_cuda_rank_ht_base(const struct ep_cuda_rank_options *o, const struct ep_ll_args *ll, struct ep_ht_rank *rank)
{
    const struct ep_layout_map *m = o->map;
    uint8_t *state = (uint8_t *)o->state;
    struct ep_ht_args *a = &rank->base;
    struct ep_device_tables tables;

    ep_device_state_tables(o->map, o->placement, &tables);
    rank->tables = tables.ht;
    memcpy(a->window, ll->window, sizeof a->window);
    a->own = ll->own;
    a->state = ll->state;
    a->home_first = ll->home_first;
    a->home_rank = ll->home_rank;
    a->home_local = ll->home_local;
    a->rank = ll->rank;
    a->ranks = ll->ranks;
    a->experts = ll->experts;
    a->local_experts = ll->local_experts;
    a->hidden = ll->hidden;
    a->max_top_k = ll->max_top_k;
    a->max_tokens = m->limits.ht_max_tokens;
    a->share = ll->share;
    a->larger = ll->larger;
    a->per_share = ll->per_share;
    a->per_larger = ll->per_larger;
    a->notes = m->ht_notes;
    a->note_stride = m->ht_note_stride;
    a->flags = m->ht_flags;
    a->closed = m->ht_closed;
    a->combine_tags = m->ht_combine_tags;
    a->headers = m->ht_headers;
    a->combine_rows = m->ht_combine_rows;
    a->combine_grads = m->ht_combine_grads;
    a->header_bytes = m->header_bytes;
    a->counting_warps = ep_device_ht_counting_warps(&m->limits);
    a->arena = m->arena;
    a->window_bytes = m->total_bytes;
    a->partials = (uint64_t)m->limits.ht_max_tokens * m->ht_fanout;
    a->before = (uint32_t *)(void *)(state + tables.ht.before);
    a->totals = (uint32_t *)(void *)(state + tables.ht.totals);
    a->index = (uint32_t *)(void *)(state + tables.ht.index);
    a->counts_in = (uint32_t *)(void *)(state + tables.ht.counts);
    a->bases_in = (uint32_t *)(void *)(state + tables.ht.bases);
    a->starts_in = (uint32_t *)(void *)(state + tables.ht.starts);
    a->granted = (uint32_t *)(void *)(state + tables.ht.granted);
}
