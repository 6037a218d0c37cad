#include "plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_state.h"
#include "ep_team.h"
#include "plan_devices.h"

#define ALIKE 16u /* ranks: as many as nodes mostly have devices */
#define STRATEGY(name) EP__V1__NODE_STRATEGY__NODE_STRATEGY_##name

/* ---- plans ------------------------------------------------------------------------- */

static void *allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);

    if (!memory)
        abort(); /* as in arena.c */
    return memory;
}

static void init(struct ep_plan *plan, uint32_t ranks)
{
    *plan = (struct ep_plan){ .n_ranks = ranks };
    plan->node = allocate(ranks, sizeof *plan->node);
    plan->device = allocate(ranks, sizeof *plan->device);
}

void ep_plan_clear(struct ep_plan *plan)
{
    arena_clear(&plan->texts);
    free(plan->name);
    free(plan->by_name);
    free(plan->node);
    free(plan->device);
    *plan = (struct ep_plan){ 0 };
}

/* Its place in by_name, or where it would be. */
static uint32_t place_of(const struct ep_plan *plan, const char *node)
{
    uint32_t low = 0, high = plan->n_nodes;

    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;

        if (strcmp(plan->name[plan->by_name[middle]], node) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(const struct ep_plan *plan, uint32_t place, const char *node)
{
    return place < plan->n_nodes && !strcmp(plan->name[plan->by_name[place]], node);
}

uint32_t ep_plan_find(const struct ep_plan *plan, const char *node)
{
    const uint32_t place = place_of(plan, node);

    return is_at(plan, place, node) ? plan->by_name[place] : plan->n_nodes;
}

static void *enlarge(void *memory, size_t n, size_t size)
{
    void *larger = reallocarray(memory, n, size);

    if (!larger)
        abort(); /* as in arena.c */
    return larger;
}

/* There is room for 1, 2, 4, ... of them. */
static void make_room(struct ep_plan *plan)
{
    const uint32_t n = plan->n_nodes;

    if (n & (n - 1))
        return;
    plan->name = enlarge(plan->name, n ? 2 * n : 1, sizeof *plan->name);
    plan->by_name = enlarge(plan->by_name, n ? 2 * n : 1, sizeof *plan->by_name);
}

static uint32_t add_node(struct ep_plan *plan, uint32_t place, const char *node)
{
    make_room(plan);
    memmove(plan->by_name + place + 1, plan->by_name + place, (plan->n_nodes - place) * sizeof *plan->by_name);
    plan->by_name[place] = plan->n_nodes;
    plan->name[plan->n_nodes] = arena_strdup(&plan->texts, node);
    return plan->n_nodes++;
}

/* Nodes mostly name their devices alike, and every node has the plan: a name that a rank a little before has is not copied. */
static char *device_text(struct ep_plan *plan, uint32_t rank, const char *device)
{
    for (uint32_t back = 1; back <= ALIKE && back <= rank; back++)
        if (!strcmp(plan->device[rank - back], device))
            return plan->device[rank - back];
    return arena_strdup(&plan->texts, device);
}

/* Consecutive ranks are mostly on one node. */
static void put(struct ep_plan *plan, uint32_t rank, const char *node, const char *device)
{
    uint32_t place;

    if (rank && !strcmp(plan->name[plan->node[rank - 1]], node)) {
        plan->node[rank] = plan->node[rank - 1];
    } else {
        place = place_of(plan, node);
        plan->node[rank] = is_at(plan, place, node) ? plan->by_name[place] : add_node(plan, place, node);
    }
    plan->device[rank] = device_text(plan, rank, device);
}

void ep_plan_copy(const struct ep_plan *plan, struct ep_plan *out)
{
    init(out, plan->n_ranks);
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        put(out, r, plan->name[plan->node[r]], plan->device[r]);
}

/* Each run has a node, and its ranks have devices; so many ranks. */
static ep_status check_runs(Ep__V1__RankRun *const *runs, size_t n, size_t *ranks, struct ep_error *error)
{
    *ranks = 0;
    for (size_t i = 0; i < n; i++) {
        size_t named = 0;

        while (named < runs[i]->n_devices && *runs[i]->devices[named])
            named++;
        if (!*runs[i]->node || !named || named < runs[i]->n_devices)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "runs[%zu] must have a node, and a device for each rank", i);
        *ranks += named;
    }
    if (!*ranks || *ranks > EP_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "runs has %zu ranks: must be 1 to %d", *ranks, EP_MAX_RANKS);
    return EP_OK;
}

ep_status ep_plan_read(Ep__V1__RankRun *const *runs, size_t n, struct ep_plan *out, struct ep_error *error)
{
    size_t ranks;
    ep_status status = check_runs(runs, n, &ranks, error);
    uint32_t r = 0;

    if (status)
        return status;
    init(out, (uint32_t)ranks);
    for (size_t i = 0; i < n; i++)
        for (size_t d = 0; d < runs[i]->n_devices; d++)
            put(out, r++, runs[i]->node, runs[i]->devices[d]);
    return EP_OK;
}

Ep__V1__RankRun **ep_plan_runs(const struct ep_plan *plan, struct arena *arena, size_t *n)
{
    Ep__V1__RankRun **runs = arena_alloc(arena, plan->n_ranks * sizeof *runs), *run = NULL;

    *n = 0;
    for (uint32_t r = 0; r < plan->n_ranks; r++) {
        if (!r || plan->node[r] != plan->node[r - 1]) {
            run = runs[(*n)++] = arena_alloc(arena, sizeof *run);
            ep__v1__rank_run__init(run);
            run->node = plan->name[plan->node[r]];
            run->devices = &plan->device[r];
        }
        run->n_devices++;
    }
    return runs;
}

/* Of each node, [n_nodes]; the caller's to free. */
static uint32_t *count_ranks(const struct ep_plan *plan)
{
    uint32_t *ranks = allocate(plan->n_nodes, sizeof *ranks);

    for (uint32_t r = 0; r < plan->n_ranks; r++)
        ranks[plan->node[r]]++;
    return ranks;
}

void ep_plan_text(const struct ep_plan *plan, char *text, size_t size)
{
    uint32_t *ranks = count_ranks(plan);
    size_t used = 0;

    *text = '\0';
    for (uint32_t i = 0; i < plan->n_nodes && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s (%u rank%s)", i ? ", " : "", plan->name[i], ranks[i],
                                 ranks[i] == 1 ? "" : "s");
    free(ranks);
}

/* ---- nodes -------------------------------------------------------------------------- */

static uint32_t bits_of(const int *values, size_t n)
{
    uint32_t bits = 0;

    for (size_t i = 0; i < n; i++)
        bits |= values[i] > 0 && values[i] < 32 ? 1u << values[i] : 0;
    return bits;
}

static uint32_t modes_of(const Ep__V1__GroupSpec *spec)
{
    return bits_of((const int *)spec->modes, spec->n_modes);
}

static uint32_t dtypes_of(const Ep__V1__GroupSpec *spec)
{
    return bits_of((const int *)spec->dtypes, spec->n_dtypes);
}

static bool lacks(uint32_t wanted, uint32_t has)
{
    return has && (wanted & ~has);
}

/* Why a node of the right backend can be no member; NULL: it can. */
static const char *unfit(const struct ep_plan_node *node, const Ep__V1__GroupSpec *spec)
{
    if (node->release)
        return node->release;
    if (lacks(modes_of(spec), node->modes))
        return "lacks a mode that is asked for";
    return lacks(dtypes_of(spec), node->dtypes) ? "lacks a dtype that is asked for" : NULL;
}

static bool serves(const struct ep_plan_node *node, const Ep__V1__GroupSpec *spec, Ep__V1__Backend backend,
                   bool cordoned)
{
    return node->has.backend == backend && (cordoned || !node->cordoned) && !unfit(node, spec);
}

static bool any(const struct ep_plan_node *nodes, size_t n, Ep__V1__Backend backend)
{
    for (size_t i = 0; i < n; i++)
        if (nodes[i].has.backend == backend)
            return true;
    return false;
}

static Ep__V1__Backend choose_backend(const Ep__V1__GroupSpec *asked, const struct ep_plan_node *nodes, size_t n)
{
    const bool cuda = any(nodes, n, EP__V1__BACKEND__BACKEND_CUDA), host = any(nodes, n, EP__V1__BACKEND__BACKEND_HOST);

    if (cuda && host && asked->backend)
        return asked->backend;
    return cuda ? EP__V1__BACKEND__BACKEND_CUDA : EP__V1__BACKEND__BACKEND_HOST;
}

/* What both have, and who has least of it. */
static void meet(struct ep_spec_bounds *all, const struct ep_plan_node *node)
{
    const uint32_t modes = node->modes & (all->modes ? all->modes : UINT32_MAX);
    const uint32_t dtypes = node->dtypes & (all->dtypes ? all->dtypes : UINT32_MAX);

    if (!all->least || (node->modes && modes != all->modes) || (node->dtypes && dtypes != all->dtypes))
        all->least = node->has.node;
    all->modes = node->modes ? modes : all->modes;
    all->dtypes = node->dtypes ? dtypes : all->dtypes;
}

static void add_offer(struct ep_spec_bounds *all, const struct ep_plan_node *node)
{
    const struct ep_spec_bounds sum = *all;

    if (!sum.nodes) {
        *all = node->has;
        memcpy(all->left_out, sum.left_out, sizeof all->left_out);
    } else {
        all->devices += node->has.devices;
    }
    all->nodes = sum.nodes + 1;
    meet(all, node);
}

static ep_status no_node(const struct ep_spec_bounds *none, Ep__V1__Backend backend, size_t n, struct ep_error *error)
{
    const char *name = backend == EP__V1__BACKEND__BACKEND_CUDA ? "cuda" : "host";

    if (*none->left_out)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "no node with backend %s can be a member%s", name,
                            none->left_out);
    return ep_error_set(error, EP_UNAVAILABLE, "no node with backend %s takes workers: %s", name,
                        n ? "all are drained; uncordon one" : "none is there");
}

ep_status ep_plan_bounds(const Ep__V1__GroupSpec *asked, const struct ep_plan_node *nodes, size_t n, bool cordoned,
                         struct ep_spec_bounds *out, struct ep_error *error)
{
    const Ep__V1__Backend backend = choose_backend(asked, nodes, n);
    struct ep_spec_bounds all = { 0 };

    for (size_t i = 0; i < n; i++) {
        const char *why = unfit(&nodes[i], asked);

        if (serves(&nodes[i], asked, backend, cordoned))
            add_offer(&all, &nodes[i]);
        else if (nodes[i].has.backend == backend && why && !*all.left_out)
            snprintf(all.left_out, sizeof all.left_out, " (node %.40s %s)", nodes[i].has.node, why);
    }
    if (!all.nodes)
        return no_node(&all, backend, n, error);
    *out = all;
    return EP_OK;
}

/* ---- room ---------------------------------------------------------------------------- */

/* Of a group of so many, however much memory there is.  On GPUs one that one node cannot have is on several, where each
 * rank has a GPU of its own. */
static uint32_t most_ranks(const struct ep_spec_bounds *has, uint32_t wanted)
{
    if (has->backend != EP__V1__BACKEND__BACKEND_CUDA)
        return has->devices;
    return wanted > EP_DEVICE_NODE_RANKS && has->devices < EP_DEVICE_NODE_RANKS ? has->devices : EP_DEVICE_NODE_RANKS;
}

/* What a rank takes, and what is taken of a node whatever number of ranks it has; 0: memory is not minded. */
struct need {
    uint64_t rank, node;
};

/* Each on the device that it would have. */
static bool devices_have_room(const struct ep_plan_node *node, uint32_t ranks, uint64_t rank_bytes, uint64_t held)
{
    uint32_t device[EP_DEVICE_NODE_RANKS];

    ep_plan_devices(node, ranks, rank_bytes, held, device);
    for (uint32_t k = 0; k < ranks; k++)
        if (k / node->has.devices + 1 > node->has.device_left[device[k]] / rank_bytes)
            return false;
    return true;
}

static bool has_room(const struct ep_plan_node *node, uint32_t ranks, struct need need, uint64_t held)
{
    const uint64_t left = node->has.memory_left > need.node ? node->has.memory_left - need.node : 0;

    if (!need.rank)
        return true;
    return node->has.device_left ? devices_have_room(node, ranks, need.rank, held) : ranks <= left / need.rank;
}

static uint32_t room_of(const struct ep_plan_node *node, uint32_t wanted, struct need need, uint64_t held)
{
    const uint32_t most = most_ranks(&node->has, wanted);
    uint32_t ranks = wanted < most ? wanted : most;

    while (ranks && !has_room(node, ranks, need, held))
        ranks--;
    return ranks;
}

/* How many ranks each node gets. */
struct shares {
    const struct ep_plan_node *nodes;
    size_t n;
    const struct ep_plan *before;
    struct need need;
    uint64_t *held;         /* [n] devices that the group is on */
    uint32_t *room, *ranks; /* [n] */
    uint32_t wanted, left;
};

static void shares_init(struct shares *s, const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                        const struct ep_plan *before, struct need need)
{
    *s = (struct shares){ .nodes = nodes, .n = n, .before = before, .need = need,
                          .wanted = settled->spec->ranks, .left = settled->spec->ranks };
    s->held = allocate(n, sizeof *s->held);
    s->room = allocate(n, sizeof *s->room);
    s->ranks = allocate(n, sizeof *s->ranks);
    for (size_t i = 0; i < n; i++) {
        if (!serves(&nodes[i], settled->spec, settled->spec->backend, false))
            continue;
        s->held[i] = nodes[i].device_used ? ep_plan_held(&nodes[i], before, s->wanted) : 0;
        s->room[i] = room_of(&nodes[i], s->wanted, need, s->held[i]);
    }
}

static void shares_clear(struct shares *s)
{
    free(s->held);
    free(s->room);
    free(s->ranks);
}

static void give(struct shares *s, size_t node, uint32_t ranks)
{
    s->ranks[node] += ranks;
    s->left -= ranks;
}

/* The node that is better than the others; n: none has room left. */
static size_t best(const struct shares *s, bool (*better)(const struct shares *s, size_t a, size_t b))
{
    size_t found = s->n;

    for (size_t i = 0; i < s->n; i++)
        if (s->ranks[i] < s->room[i] && (found == s->n || better(s, i, found)))
            found = i;
    return found;
}

/* Whoever has room for all that is left, of those the one with the most memory; else the one with most room. */
static bool packs_better(const struct shares *s, size_t a, size_t b)
{
    if (s->room[a] >= s->left && s->room[b] >= s->left)
        return s->nodes[a].has.memory_left > s->nodes[b].has.memory_left;
    return s->room[a] > s->room[b];
}

static void pack(struct shares *s)
{
    while (s->left) {
        const size_t node = best(s, packs_better);

        if (node == s->n)
            return;
        give(s, node, s->room[node] < s->left ? s->room[node] : s->left);
    }
}

static bool spreads_better(const struct shares *s, size_t a, size_t b)
{
    return s->ranks[a] < s->ranks[b];
}

static void spread(struct shares *s)
{
    while (s->left) {
        const size_t node = best(s, spreads_better);

        if (node == s->n)
            return;
        give(s, node, 1);
    }
}

/* ---- the strategies --------------------------------------------------------------------- */

/* The ranks of a node, from this one on. */
static void put_share(const struct shares *s, size_t i, uint32_t first, uint32_t *device, struct ep_plan *out)
{
    const struct ep_plan_node *node = &s->nodes[i];

    ep_plan_devices(node, s->ranks[i], s->need.rank, s->held[i], device);
    ep_plan_stay(node, s->before, first, s->ranks[i], device);
    for (uint32_t k = 0; k < s->ranks[i]; k++)
        put(out, first + k, node->has.node, node->device[device[k]]);
}

static void number(const struct shares *s, struct ep_plan *out)
{
    uint32_t *device = allocate(s->wanted, sizeof *device), first = 0;

    init(out, s->wanted);
    for (size_t i = 0; i < s->n; i++) {
        put_share(s, i, first, device, out);
        first += s->ranks[i];
    }
    free(device);
}

/* False: there is no room for all of them. */
static bool share_out(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n, const struct ep_plan *before,
                      struct need need, struct ep_plan *out)
{
    struct shares s;
    bool all;

    shares_init(&s, settled, nodes, n, before, need);
    if (settled->spec->placement->nodes == STRATEGY(SPREAD))
        spread(&s);
    else
        pack(&s);
    all = !s.left;
    if (all)
        number(&s, out);
    shares_clear(&s);
    return all;
}

static int compare_names(const void *name, const void *node)
{
    return strcmp(name, ((const struct ep_plan_node *)node)->has.node);
}

static const struct ep_plan_node *find_node(const struct ep_plan_node *nodes, size_t n, const char *name)
{
    return n ? bsearch(name, nodes, n, sizeof *nodes, compare_names) : NULL;
}

static bool has_device(const struct ep_plan_node *node, const char *device)
{
    return ep_plan_device_at(node, device) < node->has.devices;
}

static ep_status check_home(const struct ep_plan_node *node, const char *name, const char *device,
                            const Ep__V1__GroupSpec *spec, uint32_t rank, bool cordoned, struct ep_error *error)
{
    if (!node)
        return ep_error_set(error, EP_UNAVAILABLE, "rank %u is on node %.63s, which is not there", rank, name);
    if (node->has.backend != spec->backend)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u is on node %.63s, which has another backend", rank,
                            name);
    if (unfit(node, spec))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u is on node %.63s, which %s", rank, name,
                            unfit(node, spec));
    if (node->cordoned && !cordoned)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u is on node %.63s, which is drained", rank, name);
    if (*device && !has_device(node, device))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "rank %u is on %.80s of node %.63s, which has no such device",
                            rank, device, name);
    return EP_OK;
}

/* The one entry for each rank. */
static ep_status sort_homes(const Ep__V1__GroupSpec *spec, const Ep__V1__RankPlacement **homes, struct ep_error *error)
{
    const Ep__V1__Placement *placement = spec->placement;

    for (size_t i = 0; i < placement->n_ranks; i++) {
        const Ep__V1__RankPlacement *home = placement->ranks[i];

        if (home->rank >= spec->ranks || homes[home->rank])
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement.ranks has rank %u %s: must be each of 0 to %u once", home->rank,
                                home->rank < spec->ranks ? "twice" : "in it", spec->ranks - 1);
        homes[home->rank] = home;
    }
    for (uint32_t r = 0; r < spec->ranks; r++)
        if (!homes[r])
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement.ranks lacks rank %u: must be each of 0 to %u once", r, spec->ranks - 1);
    return EP_OK;
}

static ep_status place_homes(const Ep__V1__GroupSpec *spec, const Ep__V1__RankPlacement **homes,
                             const struct ep_plan_node *nodes, size_t n, struct ep_plan *out, struct ep_error *error)
{
    ep_status status = EP_OK;

    uint32_t *before = allocate(n, sizeof *before); /* ranks on each node */

    init(out, spec->ranks);
    for (uint32_t r = 0; !status && r < spec->ranks; r++) {
        const struct ep_plan_node *node = find_node(nodes, n, homes[r]->node);

        status = check_home(node, homes[r]->node, homes[r]->device, spec, r, false, error);
        if (!status) {
            const uint32_t turn = before[node - nodes]++;

            put(out, r, homes[r]->node,
                *homes[r]->device ? homes[r]->device : node->device[turn % node->has.devices]);
        }
    }
    free(before);
    if (status)
        ep_plan_clear(out);
    return status;
}

static ep_status place_explicit(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                                struct ep_plan *out, struct ep_error *error)
{
    const Ep__V1__RankPlacement **homes = allocate(settled->spec->ranks, sizeof *homes);
    ep_status status = sort_homes(settled->spec, homes, error);

    if (!status)
        status = place_homes(settled->spec, homes, nodes, n, out, error);
    free(homes);
    return status;
}

/* ---- does it fit -------------------------------------------------------------------------- */

/* Where the memory of a plan's ranks comes from: one pool for each GPU, or for the devices of a node that share one. */
struct pools {
    struct ep_spec_pool *list;
    size_t n;
    size_t *first; /* [plan->n_nodes + 1] of each node */
};

static size_t count_pools(const struct ep_plan_node *node)
{
    return node && node->has.device_left ? node->has.devices : 1;
}

static void fill_pools(struct ep_spec_pool *pools, const struct ep_plan_node *node, uint64_t beside)
{
    for (size_t i = 0; i < count_pools(node); i++)
        pools[i] = (struct ep_spec_pool){
            .node = node->has.node,
            .device = node->has.device_left ? node->device[i] : NULL,
            .left = node->has.device_left ? node->has.device_left[i] : node->has.memory_left,
            .beside = beside,
            .granule = node->has.granule,
        };
}

static void count_rank(const struct pools *pools, const struct ep_plan *plan, uint32_t rank, uint64_t beside)
{
    size_t at = pools->first[plan->node[rank]];

    if (at == pools->first[plan->node[rank] + 1]) /* of a node that is not asked about */
        return;
    while (pools->list[at].device && strcmp(pools->list[at].device, plan->device[rank]) != 0 &&
           at + 1 < pools->first[plan->node[rank] + 1])
        at++;
    pools->list[at].ranks++;
    pools->list[at].beside += beside;
}

/* Of the nodes of the plan that are among these. */
static struct pools pools_of(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                             const struct ep_plan *plan)
{
    const struct ep_team_beside beside = ep_team_beside(settled->spec->backend, &settled->map, plan->node);
    struct pools pools = { .first = allocate(plan->n_nodes + 1, sizeof *pools.first) };

    for (uint32_t i = 0; i < plan->n_nodes; i++) {
        const struct ep_plan_node *node = find_node(nodes, n, plan->name[i]);

        pools.first[i + 1] = pools.first[i] + (node ? count_pools(node) : 0);
    }
    pools.n = pools.first[plan->n_nodes];
    pools.list = allocate(pools.n, sizeof *pools.list);
    for (uint32_t i = 0; i < plan->n_nodes; i++)
        if (pools.first[i + 1] > pools.first[i])
            fill_pools(pools.list + pools.first[i], find_node(nodes, n, plan->name[i]), beside.node);
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        count_rank(&pools, plan, r, beside.rank);
    return pools;
}

static void pools_clear(struct pools *pools)
{
    free(pools->list);
    free(pools->first);
}

static ep_status check_number(const struct ep_spec_bounds *has, uint32_t ranks, struct ep_error *error)
{
    const bool cuda = has->backend == EP__V1__BACKEND__BACKEND_CUDA;

    if (cuda && ranks > EP_DEVICE_NODE_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "placement.ranks has %u ranks on node %s: the cuda backend has at most %u of a group on one; "
                            "put the others elsewhere", ranks, has->node, EP_DEVICE_NODE_RANKS);
    if (!cuda && ranks > has->devices)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "placement.ranks has %u ranks on node %s, which has %u devices",
                            ranks, has->node, has->devices);
    return EP_OK;
}

static ep_status check_devices(const struct ep_plan *plan, const struct ep_plan_node *nodes, size_t n,
                               struct ep_error *error)
{
    uint32_t *ranks = count_ranks(plan);
    ep_status status = EP_OK;

    for (uint32_t i = 0; !status && i < plan->n_nodes; i++)
        status = check_number(&find_node(nodes, n, plan->name[i])->has, ranks[i], error);
    free(ranks);
    return status;
}

/* ---- do ranks of a node reach each other ------------------------------------------------------ */

static ep_status refuse_apart(const struct ep_plan *plan, uint32_t first, uint32_t second, struct ep_error *error)
{
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "rank %u would be on %.80s and rank %u on %.80s of node %.63s, which do not reach each other's memory: "
                        "ask for fewer ranks, place them on GPUs that do (placement.nodes explicit), or give the server "
                        "GPUs of one NVLink domain", first, plan->device[first], second, plan->device[second],
                        plan->name[plan->node[first]]);
}

/* before: ranks of the node with lower numbers, n of them. */
static ep_status check_rank_reach(const struct ep_plan *plan, const struct ep_plan_node *node, const uint32_t *before,
                                  uint32_t n, uint32_t rank, struct ep_error *error)
{
    const uint32_t own = ep_plan_device_at(node, plan->device[rank]);

    for (uint32_t i = 0; own < node->has.devices && i < n; i++) {
        const uint32_t other = ep_plan_device_at(node, plan->device[before[i]]);

        if (other < 64 && node->apart[own] >> other & 1)
            return refuse_apart(plan, before[i], rank, error);
    }
    return EP_OK;
}

/* After check_devices(): so many ranks of a node at most. */
static ep_status check_reach(const struct ep_plan *plan, const struct ep_plan_node *nodes, size_t n, struct ep_error *error)
{
    uint32_t (*ranks)[EP_DEVICE_NODE_RANKS] = allocate(plan->n_nodes, sizeof *ranks);
    uint32_t *have = allocate(plan->n_nodes, sizeof *have);
    ep_status status = EP_OK;

    for (uint32_t r = 0; !status && r < plan->n_ranks; r++) {
        const uint32_t at = plan->node[r];
        const struct ep_plan_node *node = find_node(nodes, n, plan->name[at]);

        if (!node->apart || node->has.backend != EP__V1__BACKEND__BACKEND_CUDA)
            continue;
        status = check_rank_reach(plan, node, ranks[at], have[at], r, error);
        ranks[at][have[at]++] = r;
    }
    free(ranks);
    free(have);
    return status;
}

static ep_status fit(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_plan_node *nodes,
                     size_t n, const struct ep_plan *plan, struct ep_error *error)
{
    ep_status status = check_devices(plan, nodes, n, error);
    struct pools pools;

    if (status || (status = check_reach(plan, nodes, n, error)))
        return status;
    pools = pools_of(settled, nodes, n, plan);
    status = ep_spec_fit(asked, settled, pools.list, pools.n, error);
    pools_clear(&pools);
    return status;
}

/* Nobody may have asked for the arena: one of the default size follows the tokens. */
ep_status ep_plan_fit_part(const struct ep_settled *settled, const struct ep_plan_node *own,
                           const struct ep_plan *plan, struct ep_error *error)
{
    Ep__V1__GroupSpec asked = *settled->spec;
    struct ep_limits limits = settled->map.limits;
    struct pools pools = pools_of(settled, own, 1, plan);
    ep_status status;

    limits.arena_bytes = 0;
    if (ep_layout_default_arena(&limits) == asked.arena_bytes)
        asked.arena_bytes = 0;
    status = ep_spec_fit(&asked, settled, pools.list, pools.n, error);
    pools_clear(&pools);
    return status;
}

/* ---- plans made ---------------------------------------------------------------------------- */

static ep_status no_devices(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                            struct ep_error *error)
{
    const Ep__V1__GroupSpec *spec = settled->spec;
    uint64_t room = 0;

    for (size_t i = 0; i < n; i++)
        if (serves(&nodes[i], spec, spec->backend, false))
            room += most_ranks(&nodes[i].has, spec->ranks);
    if (spec->backend == EP__V1__BACKEND__BACKEND_CUDA)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "ranks is %u: the nodes that take workers have room for %" PRIu64
                            ": on a node there are at most %u of a group, and of one on several nodes no more than it has "
                            "GPUs; ask for fewer, or start ep-server on more nodes", spec->ranks, room, EP_DEVICE_NODE_RANKS);
    return ep_error_set(error, EP_FAILED_PRECONDITION, "the nodes that take workers have too few devices for %u ranks",
                        spec->ranks);
}

/* Ranks on several nodes take memory for the way between them too: how many these are is known after a first look. */
static bool share_out_by_memory(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                                const struct ep_plan *before, struct ep_plan *out)
{
    struct ep_team_beside beside;

    if (!share_out(settled, nodes, n, before, (struct need){ settled->rank_bytes, 0 }, out))
        return false;
    if (out->n_nodes == 1)
        return true;
    beside = ep_team_beside(settled->spec->backend, &settled->map, out->node);
    ep_plan_clear(out);
    return share_out(settled, nodes, n, before, (struct need){ settled->rank_bytes + beside.rank, beside.node }, out);
}

/* Where there is memory for all ranks; else where there are devices, for fit() to say what is missing. */
static ep_status place(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                       const struct ep_plan *before, struct ep_plan *out, struct ep_error *error)
{
    if (settled->spec->placement->nodes == STRATEGY(EXPLICIT))
        return place_explicit(settled, nodes, n, out, error);
    if (share_out_by_memory(settled, nodes, n, before, out) ||
        share_out(settled, nodes, n, before, (struct need){ 0, 0 }, out))
        return EP_OK;
    return no_devices(settled, nodes, n, error);
}

ep_status ep_plan_make(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_plan_node *nodes,
                       size_t n, const struct ep_plan *before, struct ep_plan *out, struct ep_error *error)
{
    ep_status status = place(settled, nodes, n, before, out, error);

    if (!status && (status = fit(asked, settled, nodes, n, out, error)))
        ep_plan_clear(out);
    return status;
}

bool ep_plan_lower(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled, const struct ep_plan_node *nodes,
                   size_t n, const struct ep_plan *before, struct ep_plan_lowered *out)
{
    struct ep_spec_lowered lowered;
    struct ep_plan plan;
    struct pools pools;
    bool found;

    if (place(settled, nodes, n, before, &plan, NULL))
        return false;
    pools = pools_of(settled, nodes, n, &plan);
    found = ep_spec_lower(asked, settled, pools.list, pools.n, &lowered);
    if (found) {
        *out = (struct ep_plan_lowered){ .ll_max_tokens = lowered.ll_max_tokens,
                                         .ht_max_tokens = lowered.ht_max_tokens };
        snprintf(out->why, sizeof out->why, "%s of node %.63s has %" PRIu64 " bytes left for %u ranks",
                 lowered.pool->device ? lowered.pool->device : "the memory", lowered.pool->node, lowered.pool->left,
                 lowered.pool->ranks);
    }
    pools_clear(&pools);
    ep_plan_clear(&plan);
    return found;
}

ep_status ep_plan_check(const Ep__V1__GroupSpec *asked, const struct ep_settled *settled,
                        const struct ep_plan_node *nodes, size_t n, const struct ep_plan *plan, bool cordoned,
                        struct ep_error *error)
{
    ep_status status = EP_OK;

    if (plan->n_ranks != settled->spec->ranks)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%u ranks are placed, %u are wanted", plan->n_ranks,
                            settled->spec->ranks);
    for (uint32_t r = 0; !status && r < plan->n_ranks; r++) {
        const char *name = plan->name[plan->node[r]];

        status = check_home(find_node(nodes, n, name), name, plan->device[r], settled->spec, r, cordoned, error);
    }
    return status ? status : fit(asked, settled, nodes, n, plan, error);
}
