/* How the memory beside a window is laid out, and which rank goes through which. */
#include "device_net.h"

#include <stdlib.h>
#include <string.h>

#define BOX_ALIGN 4096u
#define ROW_ALIGN 128u
#define WHOLE     (2u << 20) /* memory of GPUs is made in multiples of it */
#define TABLE_ALIGN 256u

static uint64_t align_to(uint64_t n, uint64_t align)
{
    return (n + align - 1) / align * align;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
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

static void lay_ll(const struct ep_layout_map *map, struct ep_net_map *out)
{
    const struct ep_limits *l = &map->limits;
    const uint64_t tokens = l->ll_max_tokens, boxes = (uint64_t)l->ll_banks * l->ranks;

    out->ll_head_bytes = (uint32_t)sizeof(struct ep_net_head) + map->header_bytes + map->scales_bytes;
    out->ll_middle = align_to(tokens * out->ll_head_bytes, ROW_ALIGN);
    out->ll_rows = (uint32_t)align_to(map->counts_bytes, ROW_ALIGN);
    out->ll_box_bytes = align_to(out->ll_middle + out->ll_rows + tokens * map->row_bytes, ROW_ALIGN);
    out->ll_out = take(&out->bytes, boxes * out->ll_box_bytes);
    out->ll_in = take(&out->bytes, boxes * out->ll_box_bytes);
}

static void lay_ht(const struct ep_layout_map *map, const struct ep_net_shape *shape, struct ep_net_map *out)
{
    const struct ep_limits *l = &map->limits;
    const uint64_t tokens = l->ht_max_tokens;

    out->outs = shape->nodes - 1;
    out->ways = shape->most < EP_NET_WAYS ? shape->most : EP_NET_WAYS;
    out->gated = out->outs * ((shape->most + shape->least - 1) / shape->least);
    out->ins = out->ways * out->gated;
    out->places = shape->most;
    out->ask_bytes = (uint32_t)map->ht_note_stride;
    out->box_bytes = align_to(tokens * larger(ep_net_record_bytes(l->top_k, map->row_bytes, map->scales_bytes),
                                              ep_net_sum_head(l->top_k) + map->combine_row_bytes), BOX_ALIGN);
    out->asks = take(&out->bytes, l->ranks * map->ht_note_stride);
    out->asks_out = take(&out->bytes, l->ranks * map->ht_note_stride);
    out->out = take(&out->bytes, out->ways * out->outs * out->box_bytes);
    out->in = take(&out->bytes, out->ins * out->box_bytes);
    out->partials = take(&out->bytes, out->gated * out->places * tokens * map->combine_row_bytes);
    out->tags = take(&out->bytes, out->gated * out->places * tokens * sizeof(uint64_t));
    out->grads = take(&out->bytes, out->gated * out->places * tokens * l->top_k * sizeof(float));
}

void ep_net_lay_out(const struct ep_layout_map *map, const struct ep_net_shape *shape, struct ep_net_map *out)
{
    memset(out, 0, sizeof *out);
    if (map->limits.modes >> EP_MODE_LL & 1)
        lay_ll(map, out);
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

/* ---- tables ----------------------------------------------------------------------------------------- */

static uint64_t table(struct ep_net_tables *out, uint64_t bytes)
{
    const uint64_t start = out->bytes;

    out->bytes = align_to(start + bytes, TABLE_ALIGN);
    return start;
}

static void lay_ll_tables(const struct ep_limits *l, struct ep_net_tables *out)
{
    out->ll_slots_stride = align_to((uint64_t)l->ll_max_tokens * l->top_k * sizeof(uint32_t), TABLE_ALIGN);
    out->ll_slots = table(out, EP_MAX_HANDLES * out->ll_slots_stride);
}

static void lay_ht_tables(const struct ep_limits *l, const struct ep_net_map *map, uint32_t nears, struct ep_net_tables *out)
{
    const uint64_t choices = (uint64_t)l->ht_max_tokens * l->top_k * sizeof(uint32_t);

    out->grants = table(out, map->ins * sizeof(struct ep_net_grants));
    out->taken = table(out, (uint64_t)map->ins * EP_DEVICE_NODE_RANKS * sizeof(struct ep_device_ht_grant));
    out->granted = table(out, 2ull * map->ins * nears * l->local_experts * sizeof(uint32_t));
    out->filled = table(out, (uint64_t)l->ranks * EP_NET_PIECES * sizeof(uint32_t));
    out->slots_stride = align_to(choices, TABLE_ALIGN);
    out->relayed_stride = align_to(map->ins * choices, TABLE_ALIGN);
    out->ways_stride = align_to(l->ranks * sizeof(struct ep_net_way), TABLE_ALIGN);
    out->slots = table(out, EP_MAX_HANDLES * out->slots_stride);
    out->relayed = table(out, EP_MAX_HANDLES * out->relayed_stride);
    out->ways = table(out, EP_MAX_HANDLES * out->ways_stride);
}

static void lay_tables(const struct ep_limits *l, const struct ep_net_map *map, uint32_t nears, struct ep_net_tables *out)
{
    *out = (struct ep_net_tables){ .bytes = align_to(sizeof(struct ep_device_net), TABLE_ALIGN) };
    if (l->modes >> EP_MODE_LL & 1)
        lay_ll_tables(l, out);
    if (l->modes >> EP_MODE_HT & 1)
        lay_ht_tables(l, map, nears, out);
}

uint64_t ep_net_bytes(const struct ep_layout_map *map, const struct ep_net_shape *shape)
{
    struct ep_net_map net;
    struct ep_net_tables tables;

    ep_net_lay_out(map, shape, &net);
    lay_tables(&map->limits, &net, shape->most, &tables);
    return align_to(tables.bytes, WHOLE);
}

/* ---- who goes through whom ----------------------------------------------------------------------- */

/* The ranks of a group by their nodes: those of node n are by_node[first[n]] and on, in their order. */
struct lie {
    const uint32_t *node;
    uint32_t ranks;
    uint32_t *place, *by_node, *first;
};

static void find_lie(struct lie *lie, const uint32_t *node, uint32_t ranks, uint32_t nodes)
{
    lie->node = node;
    lie->ranks = ranks;
    memset(lie->first, 0, (nodes + 1) * sizeof *lie->first);
    for (uint32_t r = 0; r < ranks; r++)
        lie->place[r] = lie->first[node[r] + 1]++;
    for (uint32_t n = 0; n < nodes; n++)
        lie->first[n + 1] += lie->first[n];
    for (uint32_t r = 0; r < ranks; r++)
        lie->by_node[lie->first[node[r]] + lie->place[r]] = r;
}

static uint32_t ranks_on(const struct lie *lie, uint32_t node)
{
    return lie->first[node + 1] - lie->first[node];
}

/* The i-th rank of a node, the first again after the last. */
static uint32_t rank_on(const struct lie *lie, uint32_t node, uint32_t i)
{
    return lie->by_node[lie->first[node] + i % ranks_on(lie, node)];
}

/* The gate of rank r on a node. */
static uint32_t gate_of(const struct lie *lie, uint32_t r, uint32_t on)
{
    return rank_on(lie, on, lie->place[r]);
}

/* Which of the boxes of r's gate is r's: they are in the order of ranks. */
static uint32_t box_at_gate(const struct lie *lie, uint32_t r, uint32_t gate)
{
    const uint32_t on = lie->node[gate];
    uint32_t n = 0;

    for (uint32_t i = 0; i < r; i++)
        n += lie->node[i] != on && gate_of(lie, i, on) == gate;
    return n;
}

/* Which of the boxes of a rank on node `own` is a node's: the next node's is the first. */
static uint32_t box_of_node(uint32_t own, uint32_t which, uint32_t nodes)
{
    return (which + nodes - own - 1) % nodes;
}

static void describe_far(const struct lie *lie, uint32_t rank, uint32_t r, struct ep_device_net *out)
{
    const uint32_t own = lie->node[rank], its = lie->node[r], nodes = out->map.outs + 1;

    out->far[r / 32] |= 1u << r % 32;
    out->gate[r] = gate_of(lie, rank, its);
    out->gate_here[r] = gate_of(lie, r, own);
    out->in[r] = box_at_gate(lie, r, out->gate_here[r]);
    out->out[r] = box_of_node(own, its, nodes);
    out->there[r] = box_at_gate(lie, rank, r);
    out->back[r] = box_of_node(its, own, nodes);
    out->gates[out->out[r]] = out->gate[r];
}

static void order_all(const struct lie *lie, uint32_t own, struct ep_device_net *out)
{
    const uint32_t nodes = out->map.outs + 1;
    uint32_t n = 0;

    for (uint32_t which = 1; which <= nodes; which++) {
        const uint32_t node = (own + which) % nodes;

        for (uint32_t i = 0; i < ranks_on(lie, node); i++)
            out->order[n++] = rank_on(lie, node, i);
    }
}

static void describe(const struct ep_layout_map *map, const struct lie *lie, uint32_t rank, struct ep_device_net *out)
{
    const uint32_t own = lie->node[rank];

    out->ranks = lie->ranks;
    out->nears = ranks_on(lie, own);
    for (uint32_t i = 0; i < out->nears; i++)
        out->near[i] = rank_on(lie, own, i);
    for (uint32_t r = 0; r < lie->ranks; r++) {
        out->place[r] = lie->place[r];
        out->via[r] = r;
        out->next[r] = rank_on(lie, lie->node[r], lie->place[r] + 1);
        if (lie->node[r] != own)
            describe_far(lie, rank, r, out);
    }
    order_all(lie, own, out);
    lay_tables(&map->limits, &out->map, out->nears, &out->tables);
}

ep_status ep_net_describe(const struct ep_layout_map *map, const uint32_t *node, uint32_t rank, struct ep_device_net *out,
                          struct ep_error *error)
{
    const uint32_t ranks = map->limits.ranks;
    const struct ep_net_shape shape = ep_net_shape_of(node, ranks);
    uint32_t *words = malloc((2ull * ranks + shape.nodes + 1) * sizeof *words);
    struct lie lie = { .place = words, .by_node = words + ranks, .first = words + 2ull * ranks };

    if (!words)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for where %u ranks lie", ranks);
    if (ranks > EP_DEVICE_MAX_RANKS || shape.most > EP_DEVICE_NODE_RANKS) {
        free(words);
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks is %u, up to %u on a node: on GPUs must be at most %u and %u",
                            ranks, shape.most, EP_DEVICE_MAX_RANKS, EP_DEVICE_NODE_RANKS);
    }
    memset(out, 0, sizeof *out);
    ep_net_lay_out(map, &shape, &out->map);
    find_lie(&lie, node, ranks, shape.nodes);
    describe(map, &lie, rank, out);
    free(words);
    return EP_OK;
}
