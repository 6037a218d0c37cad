/* How the memory beside a window is laid out, and which rank goes through which. */
#include "device_net.h"

#include <string.h>

#define BOX_ALIGN 4096u
#define WHOLE     (2u << 20) /* memory of GPUs is made in multiples of it */
#define TABLE_ALIGN 256u

static uint64_t align_to(uint64_t n, uint64_t align)
{
    return (n + align - 1) / align * align;
}

/* ---- beside a window ------------------------------------------------------------------------- */

struct ep_net_shape ep_net_shape_of(const uint32_t *node, uint32_t ranks)
{
    struct ep_net_shape shape = { .nodes = 0, .most = 0, .least = ranks };

    for (uint32_t r = 0; r < ranks; r++)
        if (node[r] >= shape.nodes)
            shape.nodes = node[r] + 1;
    for (uint32_t n = 0; n < shape.nodes; n++) {
        uint32_t here = 0;

        for (uint32_t r = 0; r < ranks; r++)
            here += node[r] == n;
        shape.most = here > shape.most ? here : shape.most;
        shape.least = here && here < shape.least ? here : shape.least;
    }
    return shape;
}

static uint64_t take(uint64_t *end, uint64_t bytes)
{
    const uint64_t start = *end;

    *end = align_to(start + bytes, BOX_ALIGN);
    return start;
}

static void lay_ht(const struct ep_layout_map *map, const struct ep_net_shape *shape, struct ep_net_map *out)
{
    const struct ep_limits *l = &map->limits;
    const uint64_t tokens = l->ht_max_tokens;

    out->outs = shape->nodes - 1;
    out->ways = shape->most > 1 ? 2 : 1;
    out->gated = out->outs * ((shape->most + shape->least - 1) / shape->least);
    out->ins = out->ways * out->gated;
    out->places = shape->most;
    out->ask_bytes = (uint32_t)map->ht_note_stride;
    out->rows_bytes = align_to(tokens * ep_net_record_bytes(l->top_k, map->row_bytes, map->scales_bytes), BOX_ALIGN);
    out->sums_bytes = align_to(tokens * (ep_net_sum_head(l->top_k) + map->combine_row_bytes), BOX_ALIGN);
    out->asks = take(&out->bytes, l->ranks * map->ht_note_stride);
    out->asks_out = take(&out->bytes, l->ranks * map->ht_note_stride);
    out->rows_out = take(&out->bytes, out->ways * out->outs * out->rows_bytes);
    out->sums_in = take(&out->bytes, out->ways * out->outs * out->sums_bytes);
    out->rows_in = take(&out->bytes, out->ins * out->rows_bytes);
    out->sums_out = take(&out->bytes, out->ins * out->sums_bytes);
    out->partials = take(&out->bytes, out->gated * out->places * tokens * map->combine_row_bytes);
    out->tags = take(&out->bytes, out->gated * out->places * tokens * sizeof(uint64_t));
    out->grads = take(&out->bytes, out->gated * out->places * tokens * l->top_k * sizeof(float));
}

void ep_net_lay_out(const struct ep_layout_map *map, const struct ep_net_shape *shape, struct ep_net_map *out)
{
    *out = (struct ep_net_map){ .bytes = align_to(map->limits.ll_banks * map->bank_bytes, BOX_ALIGN) };
    if (map->limits.modes >> EP_MODE_HT & 1 && shape->nodes > 1)
        lay_ht(map, shape, out);
    out->bytes = align_to(out->bytes, WHOLE);
}

uint64_t ep_net_beside_bytes(const struct ep_layout_map *map, const struct ep_net_shape *shape)
{
    struct ep_net_map net;

    ep_net_lay_out(map, shape, &net);
    return net.bytes;
}

/* ---- who goes through whom ----------------------------------------------------------------------- */

/* Ranks of r's node below r. */
static uint32_t place_of(const uint32_t *node, uint32_t r)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r; i++)
        n += node[i] == node[r];
    return n;
}

static uint32_t ranks_on(const uint32_t *node, uint32_t ranks, uint32_t which)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < ranks; r++)
        n += node[r] == which;
    return n;
}

/* The gate of rank r on a node. */
static uint32_t gate_of(const uint32_t *node, uint32_t ranks, uint32_t r, uint32_t on)
{
    const uint32_t place = place_of(node, r) % ranks_on(node, ranks, on);
    uint32_t gate = 0;

    while (node[gate] != on || place_of(node, gate) != place)
        gate++;
    return gate;
}

/* Which of the boxes of r's gate is r's: they are in the order of ranks. */
static uint32_t box_at_gate(const uint32_t *node, uint32_t ranks, uint32_t r, uint32_t gate)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r; i++)
        n += node[i] != node[gate] && gate_of(node, ranks, i, node[gate]) == gate;
    return n;
}

/* Which of the boxes of a rank on node `own` is a node's. */
static uint32_t box_of_node(uint32_t own, uint32_t which)
{
    return which < own ? which : which - 1;
}

/* The next rank of r's node, the first after the last. */
static uint32_t next_of(const uint32_t *node, uint32_t ranks, uint32_t r)
{
    uint32_t next = (r + 1) % ranks;

    while (node[next] != node[r])
        next = (next + 1) % ranks;
    return next;
}

static void describe_far(const uint32_t *node, uint32_t ranks, uint32_t rank, uint32_t r, struct ep_device_net *out)
{
    out->far |= 1u << r;
    out->gate[r] = gate_of(node, ranks, rank, node[r]);
    out->gate_here[r] = gate_of(node, ranks, r, node[rank]);
    out->in[r] = box_at_gate(node, ranks, r, out->gate_here[r]);
    out->out[r] = box_of_node(node[rank], node[r]);
    out->there[r] = box_at_gate(node, ranks, rank, r);
    out->back[r] = box_of_node(node[r], node[rank]);
}

static uint64_t table(struct ep_device_net *out, uint64_t bytes)
{
    const uint64_t start = out->bytes;

    out->bytes = align_to(start + bytes, TABLE_ALIGN);
    return start;
}

static void lay_tables(const struct ep_limits *l, struct ep_device_net *out)
{
    const uint64_t choices = (uint64_t)l->ht_max_tokens * l->top_k * sizeof(uint32_t);

    out->bytes = align_to(sizeof *out, TABLE_ALIGN);
    if (!(l->modes >> EP_MODE_HT & 1))
        return;
    out->grants = table(out, out->map.ins * sizeof(struct ep_net_grants));
    out->taken = table(out, (uint64_t)out->map.ins * l->ranks * sizeof(struct ep_device_ht_grant));
    out->granted = table(out, 2ull * out->map.ins * l->ranks * l->local_experts * sizeof(uint32_t));
    out->slots_stride = align_to(choices, TABLE_ALIGN);
    out->relayed_stride = align_to(out->map.ins * choices, TABLE_ALIGN);
    out->slots = table(out, EP_MAX_HANDLES * out->slots_stride);
    out->relayed = table(out, EP_MAX_HANDLES * out->relayed_stride);
}

void ep_net_describe(const struct ep_layout_map *map, const uint32_t *node, uint32_t rank, struct ep_device_net *out)
{
    const uint32_t ranks = map->limits.ranks;
    const struct ep_net_shape shape = ep_net_shape_of(node, ranks);

    memset(out, 0, sizeof *out);
    ep_net_lay_out(map, &shape, &out->map);
    for (uint32_t r = 0; r < ranks; r++) {
        out->place[r] = place_of(node, r);
        out->via[r] = r;
        out->next[r] = next_of(node, ranks, r);
        if (node[r] != node[rank])
            describe_far(node, ranks, rank, r, out);
    }
    lay_tables(&map->limits, out);
}
