/* ep_team.h without a data path: who is connected with whom, and nothing else.  sim.h says what is left out. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "ep_team.h"

struct ep_team_net {
    uint32_t own;    /* node of the simulation */
    uint32_t *peers; /* the same, by the plan's order; NULL: not connected */
    uint32_t nodes;
};

struct ep_team {
    struct ep_team *next, **link; /* of all teams that span nodes */
    struct ep_team_net *net;      /* NULL: all ranks are here */
    struct ep_team_span span;
    uint64_t epoch;
    bool *lost;  /* [nodes] told */
    bool closed; /* atomic: by a thread of the pool */
};

struct ep_executor {
    void (*on_stopped)(void *user);
    void *user;
};

static struct ep_team *teams; /* the loop's */

/* ---- losing each other -------------------------------------------------------------------- */

struct loss {
    uint32_t node;
    uint64_t epoch; /* 0: all */
};

/* Its place in the plan: mostly that of its name among all; nodes: it has none. */
static uint32_t place_of(const struct ep_team_net *net, uint32_t node)
{
    uint32_t i = 0;

    if (node < net->nodes && net->peers[node] == node)
        return node;
    while (i < net->nodes && net->peers[i] != node)
        i++;
    return i;
}

static void lose(struct ep_team *team, uint32_t node)
{
    const uint32_t i = place_of(team->net, node);

    if (i == team->net->nodes || i == team->span.own || team->lost[i])
        return;
    team->lost[i] = true;
    team->span.on_lost(i, "its connection is closed", team->span.user);
}

static bool is_closed(const struct ep_team *team)
{
    return __atomic_load_n(&team->closed, __ATOMIC_ACQUIRE); /* partner: ep_team_destroy */
}

static void spread(void *user)
{
    const struct loss loss = *(struct loss *)user;

    free(user);
    for (struct ep_team *team = teams; team; team = team->next)
        if (!is_closed(team) && (!loss.epoch || team->epoch == loss.epoch) && !sim.node[team->net->own].away)
            lose(team, loss.node);
}

static void cut(uint32_t node, uint64_t epoch)
{
    struct loss *loss = sim_allocate(1, sizeof *loss);

    *loss = (struct loss){ node, epoch };
    sim_later(spread, loss);
}

void teams_cut(uint32_t node)
{
    cut(node, 0);
}

void teams_split(uint32_t node)
{
    for (struct ep_team *team = teams; team; team = team->next)
        for (uint32_t i = 0; i < sim.nodes; i++)
            if (!is_closed(team) && (team->net->own < node) != (i < node))
                lose(team, i);
}

/* ---- network ------------------------------------------------------------------------------ */

struct ep_team_beside ep_team_beside(Ep__V1__Backend backend, const struct ep_layout_map *map, const uint32_t *where)
{
    uint32_t nodes = 0;

    (void)backend;
    for (uint32_t r = 0; r < map->limits.ranks; r++)
        nodes = where[r] >= nodes ? where[r] + 1 : nodes;
    return (struct ep_team_beside){ .node = nodes > 1 ? 4096ull * nodes : 0 };
}

/* Of GPUs, which there are none of. */
void ep_team_net_expect(struct ep_team_net *net, struct ep_node_window *const *windows)
{
    (void)net, (void)windows;
}

ep_status ep_team_net_listen(struct ep_node *node, const struct ep_team_net_options *options, struct ep_team_net **out,
                             struct ep_team_card *card, struct ep_error *error)
{
    struct ep_team_net *net = sim_allocate(1, sizeof *net);

    (void)options, (void)error;
    net->own = sim_find(ep_node_name(node))->index;
    memset(card, 0, sizeof *card);
    memcpy(card->bytes, &net->own, sizeof net->own);
    *out = net;
    return EP_OK;
}

/* A thread of the pool. */
ep_status ep_team_net_connect(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes, uint32_t own,
                              uint32_t timeout_ms, struct ep_error *error)
{
    (void)timeout_ms;
    net->nodes = nodes;
    net->peers = sim_allocate(nodes, sizeof *net->peers);
    for (uint32_t i = 0; i < nodes; i++)
        memcpy(&net->peers[i], cards[i].bytes, sizeof net->peers[i]);
    if (net->peers[own] == net->own)
        return EP_OK;
    return ep_error_set(error, EP_INTERNAL, "card %u is not this node's", own);
}

void ep_team_net_close(struct ep_team_net *net)
{
    free(net->peers);
    free(net);
}

/* ---- teams ----------------------------------------------------------------------------------- */

static void list(struct ep_team *team)
{
    team->next = teams;
    team->link = &teams;
    if (teams)
        teams->link = &team->next;
    teams = team;
}

static void unlist(struct ep_team *team)
{
    *team->link = team->next;
    if (team->next)
        team->next->link = team->link;
}

ep_status ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error)
{
    struct ep_team *team = sim_allocate(1, sizeof *team);

    (void)error;
    team->epoch = options->epoch;
    if (options->span) {
        team->span = *options->span;
        team->net = options->span->net;
        team->lost = sim_allocate(team->net->nodes, sizeof *team->lost);
        list(team);
    }
    *out = team;
    return EP_OK;
}

static void bury(void *user)
{
    struct ep_team *team = user;

    if (team->net) {
        unlist(team);
        cut(team->net->own, team->epoch);
        ep_team_net_close(team->net);
    }
    free(team->lost);
    free(team);
}

/* A thread of the pool; the list is the loop's. */
void ep_team_destroy(struct ep_team *team)
{
    __atomic_store_n(&team->closed, true, __ATOMIC_RELEASE); /* partner: is_closed */
    sim_later(bury, team);
}

void ep_team_set_timeout(struct ep_team *team, uint32_t timeout_ms)
{
    (void)team, (void)timeout_ms;
}

ep_status ep_team_set_window(struct ep_team *team, uint32_t rank, struct ep_node_window *window, struct ep_error *error)
{
    (void)team, (void)rank, (void)window, (void)error;
    return EP_OK;
}

void ep_team_leave(struct ep_team *team, uint32_t rank)
{
    (void)team, (void)rank;
}

void ep_team_cut(struct ep_team *team, uint32_t node)
{
    (void)team, (void)node;
}

void ep_team_distrust(struct ep_team *team)
{
    (void)team;
}

void ep_team_leave_all(struct ep_team *team)
{
    (void)team;
}

ep_status ep_team_join(struct ep_team *team, uint32_t rank, struct ep_error *error)
{
    (void)team, (void)rank, (void)error;
    return EP_OK;
}

ep_status ep_team_reset(struct ep_team *team, struct ep_error *error)
{
    (void)team, (void)error;
    return EP_OK;
}

ep_status ep_team_hold(struct ep_team *team, uint32_t hold_ms, uint64_t *hold, struct ep_team_numbers *begun,
                       struct ep_error *error)
{
    (void)team, (void)hold_ms, (void)error;
    *hold = 1;
    *begun = (struct ep_team_numbers){ 0 };
    return EP_OK;
}

ep_status ep_team_admit(struct ep_team *team, uint64_t hold, uint32_t rank, const struct ep_team_numbers *from,
                        struct ep_error *error)
{
    (void)team, (void)hold, (void)rank, (void)from, (void)error;
    return EP_OK;
}

void ep_team_unhold(struct ep_team *team, uint64_t hold)
{
    (void)team, (void)hold;
}

struct ep_team_numbers ep_team_first(const struct ep_team *team, uint32_t rank)
{
    (void)team, (void)rank;
    return (struct ep_team_numbers){ 1, 1 };
}

bool ep_team_clean(struct ep_team *team, uint32_t rank)
{
    (void)team, (void)rank;
    return true;
}

bool ep_team_stuck(const struct ep_team *team, int32_t rank)
{
    (void)team, (void)rank;
    return false;
}

bool ep_team_peer_wait(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns, uint64_t *max_ns)
{
    (void)team, (void)rank, (void)peer, (void)sum_ns, (void)max_ns;
    return false;
}

uint64_t ep_team_expert_rows(const struct ep_team *team, uint32_t rank, uint32_t expert)
{
    (void)team, (void)rank, (void)expert;
    return 0;
}

uint64_t ep_team_state_bytes(const struct ep_team *team)
{
    (void)team;
    return 0;
}

ep_status ep_team_state_export(const struct ep_team *team, uint32_t rank, int *fd, struct ep_error *error)
{
    (void)team, (void)fd;
    return ep_error_set(error, EP_UNIMPLEMENTED, "rank %u has no state", rank);
}

/* ---- executors --------------------------------------------------------------------------------- */

ep_status ep_executor_start(struct ep_team *team, const struct ep_executor_options *options, struct ep_executor **out,
                            struct ep_error *error)
{
    (void)team, (void)options, (void)error;
    *out = sim_allocate(1, sizeof **out);
    return EP_OK;
}

bool ep_executor_refresh(struct ep_executor *executor, uint64_t since_ns)
{
    (void)executor, (void)since_ns;
    return true;
}

void ep_executor_register(struct ep_executor *executor, const struct ep_executor_region *region, ep_region_done_fn on_done,
                          void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)executor, (void)region;
    ep_error_set(&error, EP_UNIMPLEMENTED, "there are no regions here");
    on_done(&error, user);
}

void ep_executor_unregister(struct ep_executor *executor, uint32_t number, ep_region_done_fn on_done, void *user)
{
    (void)number;
    ep_executor_register(executor, NULL, on_done, user);
}

static void stop(void *user)
{
    struct ep_executor executor = *(struct ep_executor *)user;

    free(user);
    executor.on_stopped(executor.user);
}

void ep_executor_stop(struct ep_executor *executor, void (*on_stopped)(void *user), void *user)
{
    *executor = (struct ep_executor){ on_stopped, user };
    sim_later(stop, executor);
}

/* ---- windows -------------------------------------------------------------------------------------- */

ep_status __wrap_ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                       struct ep_node_window **out, struct ep_error *error);
void __wrap_ep_node_window_destroy(struct ep_node_window *window);

ep_status __wrap_ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                       struct ep_node_window **out, struct ep_error *error)
{
    (void)node, (void)device, (void)name, (void)bytes, (void)error;
    *out = sim_allocate(1, 1);
    return EP_OK;
}

void __wrap_ep_node_window_destroy(struct ep_node_window *window)
{
    free(window);
}
