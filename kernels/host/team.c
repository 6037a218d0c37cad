/* The host team and its memory. */
#include "host_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- tables ------------------------------------------------------------------------ */

/* Hands out pieces of one block; with base NULL it only measures. */
struct carver {
    uint8_t *base;
    size_t used;
};

static void *carve(struct carver *c, uint64_t count, size_t size)
{
    void *piece = c->base ? c->base + c->used : NULL;

    c->used += (count * size + EP_LINE - 1) / EP_LINE * EP_LINE;
    return piece;
}

static uint32_t most_tokens(const struct ep_limits *l)
{
    return l->ll_max_tokens > l->ht_max_tokens ? l->ll_max_tokens : l->ht_max_tokens;
}

static void carve_handle(struct carver *c, const struct ep_layout_map *map, uint32_t nodes,
                         struct ep_host_handle *handle)
{
    const struct ep_limits *l = &map->limits;
    uint64_t tokens = most_tokens(l);

    handle->choices = carve(c, tokens * l->top_k, sizeof *handle->choices);
    handle->dest_first = carve(c, (uint64_t)l->ranks + 1, sizeof *handle->dest_first);
    handle->dest_token = carve(c, tokens * map->ht_fanout, sizeof *handle->dest_token);
    handle->sent = carve(c, l->ranks, sizeof *handle->sent);
    handle->node_first = carve(c, nodes, sizeof *handle->node_first);
    handle->node_count = carve(c, nodes, sizeof *handle->node_count);
    handle->node_token = carve(c, nodes > 1 ? tokens * map->ht_fanout : 0, sizeof *handle->node_token);
    handle->source_first = carve(c, (uint64_t)l->ranks + 1, sizeof *handle->source_first);
    handle->arrived_token = carve(c, tokens * l->ranks, sizeof *handle->arrived_token);
    handle->arrived = carve(c, tokens * l->ranks * l->top_k, sizeof *handle->arrived);
}

static void carve_asks(struct carver *c, const struct ep_limits *l, struct ep_host_rank *rank)
{
    struct ep_host_ask *asks = carve(c, l->ranks, sizeof *asks);

    for (uint32_t r = 0; r < l->ranks; r++) {
        uint32_t *counts = carve(c, 1ull + l->local_experts, sizeof *counts);

        if (asks)
            asks[r].counts = counts;
    }
    rank->asks = asks;
}

static void carve_grants(struct carver *c, const struct ep_limits *l, struct ep_host_rank *rank)
{
    struct ep_host_grant *grants = carve(c, l->ranks, sizeof *grants);

    for (uint32_t r = 0; r < l->ranks; r++) {
        uint32_t *rows = carve(c, 2ull * l->local_experts, sizeof *rows);

        if (grants) {
            grants[r].next = rows;
            grants[r].end = rows + l->local_experts;
        }
    }
    rank->grants = grants;
}

/* Of a rank that runs here. */
static void carve_rank(struct carver *c, const struct ep_layout_map *map, uint32_t nodes, struct ep_host_rank *rank)
{
    const struct ep_limits *l = &map->limits;
    uint64_t ranks = l->ranks, local = l->local_experts;
    uint64_t staged = (uint64_t)l->hidden + ep_row_scales(l->hidden) * sizeof(float);

    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++)
        carve_handle(c, map, nodes, &rank->handles[h]);
    rank->mark = carve(c, ranks, sizeof *rank->mark);
    rank->cursor = carve(c, (ranks > local ? ranks : local) + 1, sizeof *rank->cursor);
    rank->expert_count = carve(c, local, sizeof *rank->expert_count);
    rank->total = carve(c, local + 1, sizeof *rank->total);
    rank->expert_offset = carve(c, local + 1, sizeof *rank->expert_offset);
    rank->source_count = carve(c, ranks, sizeof *rank->source_count);
    rank->source_expert = carve(c, ranks * local, sizeof *rank->source_expert);
    rank->waits = carve(c, ranks, sizeof *rank->waits);
    rank->expert_rows = carve(c, l->experts, sizeof *rank->expert_rows);
    rank->staging = carve(c, most_tokens(l), staged);
    rank->partials = carve(c, nodes > 1 ? map->ht_fanout : 0, map->combine_row_bytes);
    rank->node_cursor = carve(c, nodes, sizeof *rank->node_cursor);
    rank->told = carve(c, ranks, sizeof *rank->told);
    rank->node_done = carve(c, nodes, sizeof *rank->node_done);
    rank->contributed = carve(c, ranks, sizeof *rank->contributed);
    carve_asks(c, l, rank);
    carve_grants(c, l, rank);
}

static bool runs_here(const struct ep_host_span *span, uint32_t rank)
{
    return !span || span->node[rank] == span->own;
}

static void carve_team(struct carver *c, struct ep_host_team *team, const struct ep_placement *placement,
                       const struct ep_host_span *span)
{
    uint32_t homes = placement->first[placement->experts], nodes = span ? span->nodes : 1;
    struct ep_host_rank none; /* while measuring there is no rank yet */

    team->home_first = carve(c, (uint64_t)placement->experts + 1, sizeof *team->home_first);
    team->home_rank = carve(c, homes, sizeof *team->home_rank);
    team->home_local = carve(c, homes, sizeof *team->home_local);
    team->local_experts = carve(c, placement->ranks, sizeof *team->local_experts);
    team->node = carve(c, placement->ranks, sizeof *team->node);
    team->owed = carve(c, (uint64_t)nodes * EP_MASK_WORDS, sizeof *team->owed);
    team->ranks = carve(c, placement->ranks, sizeof *team->ranks);
    for (uint32_t r = 0; r < placement->ranks; r++) {
        struct ep_host_rank *rank = team->ranks ? &team->ranks[r] : &none;

        if (runs_here(span, r))
            carve_rank(c, &team->map, nodes, rank);
        else /* no op of its runs here: its stand-in needs to know where rows go */
            carve_grants(c, &team->map.limits, rank);
    }
}

static void copy_placement(struct ep_host_team *team, const struct ep_placement *placement)
{
    uint32_t homes = placement->first[placement->experts];

    memcpy(team->home_first, placement->first, (placement->experts + 1) * sizeof *team->home_first);
    memcpy(team->home_rank, placement->rank, homes * sizeof *team->home_rank);
    memcpy(team->home_local, placement->local, homes * sizeof *team->home_local);
    memcpy(team->local_experts, placement->local_experts, placement->ranks * sizeof *team->local_experts);
}

static void set_shape(struct ep_host_team *team, const struct ep_host_span *span)
{
    if (span)
        memcpy(team->node, span->node, team->map.limits.ranks * sizeof *team->node);
    team->shape = (struct ep_host_shape){ .map = &team->map,
                                          .node = team->node,
                                          .nodes = span ? span->nodes : 1,
                                          .own = span ? span->own : 0 };
}

/* One mapping; pages that no op needs are never touched and cost nothing. */
static bool map_tables(struct ep_host_team *team, const struct ep_placement *placement,
                       const struct ep_host_span *span)
{
    struct carver c = { NULL, 0 };

    carve_team(&c, team, placement, span);
    team->memory_bytes = c.used;
    team->memory = mmap(NULL, c.used, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (team->memory == MAP_FAILED) {
        team->memory = NULL;
        return false;
    }
    c = (struct carver){ team->memory, 0 };
    carve_team(&c, team, placement, span);
    copy_placement(team, placement);
    set_shape(team, span);
    return true;
}

/* What has to fit into one frame: a row of either kind with all that goes with it, and the longest ask. */
static uint64_t widest_frame(const struct ep_layout_map *map, const struct ep_host_span *span)
{
    const struct ep_host_shape shape = { .map = map, .node = span->node, .nodes = span->nodes, .own = span->own };
    uint64_t widest = 0, row = map->row_bytes > map->combine_row_bytes ? map->row_bytes : map->combine_row_bytes;

    for (uint32_t n = 0; n < span->nodes; n++) {
        uint64_t ask = ep_host_ht_ask_bytes(&shape, n, ep_ht_tag(1, 0));

        widest = ask > widest ? ask : widest;
    }
    row += map->header_bytes + map->scales_bytes + ep_host_ht_partials_sections(map->limits.ranks, 1, 0, 64).bytes +
           map->limits.top_k * sizeof(struct ep_host_choice);
    return sizeof(struct ep_host_frame) + 4 * EP_HOST_SECTION + (row > widest ? row : widest);
}

static ep_status check_span(const struct ep_layout_map *map, const struct ep_host_span *span, struct ep_error *error)
{
    if (span->nodes != ep_host_net_nodes(span->net) || span->own != ep_host_net_own(span->net))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "node %u of %u: the network was connected as node %u of %u",
                            span->own, span->nodes, ep_host_net_own(span->net), ep_host_net_nodes(span->net));
    for (uint32_t r = 0; r < map->limits.ranks; r++)
        if (span->node[r] >= span->nodes)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "rank %u is on node %u: there are %u", r, span->node[r],
                                span->nodes);
    if (widest_frame(map, span) > ep_host_net_most(span->net))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "a row of hidden %u, or what a dispatch asks for %u ranks, "
                            "takes %llu bytes: between %u nodes at most %u travel at once", map->limits.hidden,
                            map->limits.ranks, (unsigned long long)widest_frame(map, span), span->nodes,
                            ep_host_net_most(span->net));
    return EP_OK;
}

static uint32_t ranks_here(const struct ep_host_team *team)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        n += ep_host_is_here(team, r);
    return n;
}

static ep_status open_team(struct ep_host_team *team, const struct ep_placement *placement,
                           const struct ep_host_span *span, struct ep_error *error)
{
    if (!map_tables(team, placement, span))
        return ep_error_errno(error, EP_NO_MEMORY, "routing tables of %zu bytes", team->memory_bytes);
    team->spin_ns = ep_host_spin_ns(ranks_here(team));
    ep_host_begin_membership(team);
    return span ? ep_host_remote_start(team, span, error) : EP_OK;
}

ep_status ep_host_team_create(const struct ep_layout_map *map, const struct ep_placement *placement,
                              uint32_t timeout_ms, const struct ep_host_span *span, struct ep_host_team **out,
                              struct ep_error *error)
{
    struct ep_host_team *team;
    ep_status status = EP_OK;

    if (placement->ranks != map->limits.ranks || placement->experts != map->limits.experts ||
        placement->max_local > map->limits.local_experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "placement does not fit the group's limits");
    if (span)
        status = check_span(map, span, error);
    if (status != EP_OK)
        return status;
    team = calloc(1, sizeof *team);
    if (!team)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory for a team of %u ranks", map->limits.ranks);
    team->map = *map;
    team->timeout_ms = timeout_ms;
    pthread_mutex_init(&team->mutex, NULL);
    status = open_team(team, placement, span, error);
    if (status == EP_OK)
        *out = team;
    else
        ep_host_team_destroy(team);
    return status;
}

/* The net first: its thread works for the team. */
void ep_host_team_destroy(struct ep_host_team *team)
{
    if (!team)
        return;
    ep_host_net_close(team->net);
    ep_host_end_membership(team);
    pthread_mutex_destroy(&team->mutex);
    if (team->memory)
        munmap(team->memory, team->memory_bytes);
    free(team);
}

void ep_host_team_set_timeout(struct ep_host_team *team, uint32_t timeout_ms)
{
    __atomic_store_n(&team->timeout_ms, timeout_ms, __ATOMIC_RELAXED);
}

static bool all_have_windows(const struct ep_host_team *team)
{
    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        if (ep_host_is_here(team, r) && !__atomic_load_n(&team->ranks[r].window, __ATOMIC_SEQ_CST))
            return false;
    return true;
}

/* Another node may be ready before this one: what its ranks send waits until there is a place for all of it. */
void ep_host_team_set_window(struct ep_host_team *team, uint32_t rank, void *window)
{
    __atomic_store_n(&team->ranks[rank].window, window, __ATOMIC_SEQ_CST);
    ep_host_wake_all(team); /* peers that came first wait for it */
    if (team->net && all_have_windows(team))
        ep_host_net_work(team->net);
}
