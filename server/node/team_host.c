/* The host backend: a host team, and an engine for each attached rank. */
#include <stdlib.h>

#include "team_private.h"

struct host_team {
    struct ep_team base;
    struct ep_host_team *team;
    uv_loop_t *loop;
    const struct ep_layout_map *map;
    uint64_t epoch;
    void **windows; /* [R] */
    struct ep_team_net *net;  /* NULL: all ranks are here */
    struct lost_nodes *lost;  /* the same */
};

static struct host_team *host(struct ep_team *team)
{
    return (struct host_team *)team;
}

/* ---- executor: an engine ---------------------------------------------------------- */

struct host_executor {
    struct ep_executor base;
    struct ep_engine *engine;
    void (*on_stopped)(void *user);
    void *user;
};

/* The engine counts by itself. */
static bool refresh(struct ep_executor *executor, uint64_t since_ns)
{
    (void)executor, (void)since_ns;
    return true;
}

static void on_engine_stopped(void *user)
{
    struct host_executor *executor = user;
    void (*on_stopped)(void *user) = executor->on_stopped;
    void *stopped_user = executor->user;

    free(executor);
    on_stopped(stopped_user);
}

static void stop(struct ep_executor *base, void (*on_stopped)(void *user), void *user)
{
    struct host_executor *executor = (struct host_executor *)base;

    executor->on_stopped = on_stopped;
    executor->user = user;
    ep_engine_stop(executor->engine, on_engine_stopped, executor);
}

static ep_status start(struct ep_team *base, const struct ep_executor_options *options,
                       struct ep_executor **out, struct ep_error *error)
{
    static const struct ep_executor_ops ops = { .refresh = refresh, .stop = stop };
    struct host_team *team = host(base);
    struct host_executor *executor = calloc(1, sizeof *executor);
    const struct ep_engine_options engine = {
        .loop = team->loop,
        .team = team->team,
        .map = team->map,
        .rank = options->rank,
        .epoch = team->epoch,
        .window = team->windows[options->rank],
        .counters = options->counters,
        .on_timeout = options->on_timeout,
        .user = options->user,
    };
    ep_status status;

    if (!executor)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an engine");
    executor->base.ops = &ops;
    status = ep_engine_start(&engine, &executor->engine, error);
    if (status)
        free(executor);
    else
        *out = &executor->base;
    return status;
}

/* ---- team ------------------------------------------------------------------------- */

static void destroy(struct ep_team *base)
{
    struct host_team *team = host(base);

    if (team->team)
        ep_host_team_destroy(team->team); /* with the network of hosts */
    if (team->lost)
        lost_nodes_close(team->lost);
    free(team->net);
    free(team->windows);
    free(team);
}

static void set_timeout(struct ep_team *team, uint32_t timeout_ms)
{
    ep_host_team_set_timeout(host(team)->team, timeout_ms);
}

/* The engine writes who it belongs to when it starts. */
static ep_status set_window(struct ep_team *base, uint32_t rank, struct ep_node_window *window,
                            struct ep_error *error)
{
    struct host_team *team = host(base);

    (void)error;
    team->windows[rank] = ep_node_window_base(window);
    ep_host_team_set_window(team->team, rank, team->windows[rank]);
    return EP_OK;
}

static void leave(struct ep_team *team, uint32_t rank)
{
    ep_host_team_leave(host(team)->team, rank);
}

static void leave_all(struct ep_team *team)
{
    for (uint32_t rank = 0; rank < host(team)->map->limits.ranks; rank++)
        leave(team, rank);
}

static void cut(struct ep_team *team, uint32_t node)
{
    ep_host_team_cut(host(team)->team, node);
}

static ep_status refuse_span(const struct ep_team *team, const char *what, struct ep_error *error)
{
    if (!((const struct host_team *)team)->net)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION, "%s: ranks of a team over several nodes join on all of them, held "
                        "and admitted", what);
}

static ep_status join(struct ep_team *team, uint32_t rank, struct ep_error *error)
{
    ep_status status = refuse_span(team, "join", error);

    if (status)
        return status;
    ep_host_team_join(host(team)->team, rank);
    return EP_OK;
}

static ep_status reset(struct ep_team *team, struct ep_error *error)
{
    ep_status status = refuse_span(team, "reset", error);

    if (status)
        return status;
    leave_all(team); /* it wants all absent; ranks that nobody ever took are not */
    ep_host_team_reset(host(team)->team);
    return EP_OK;
}

static ep_status hold(struct ep_team *team, uint32_t hold_ms, uint64_t *id, struct ep_team_numbers *begun,
                      struct ep_error *error)
{
    struct ep_host_numbers numbers;
    ep_status status = ep_host_team_hold(host(team)->team, hold_ms, id, &numbers, error);

    if (!status)
        *begun = (struct ep_team_numbers){ numbers.ll, numbers.ht };
    return status;
}

static ep_status admit(struct ep_team *team, uint64_t id, uint32_t rank, const struct ep_team_numbers *from,
                       struct ep_error *error)
{
    return ep_host_team_admit(host(team)->team, id, rank, &(struct ep_host_numbers){ from->ll, from->ht }, error);
}

static void unhold(struct ep_team *team, uint64_t id)
{
    ep_host_team_unhold(host(team)->team, id);
}

static struct ep_team_numbers first(const struct ep_team *team, uint32_t rank)
{
    const struct ep_host_numbers numbers = ep_host_team_first(((const struct host_team *)team)->team, rank);

    return (struct ep_team_numbers){ numbers.ll, numbers.ht };
}

/* Its worker may have kept the mapping: only other memory is safe from it. */
static bool clean(struct ep_team *team, uint32_t rank)
{
    (void)team, (void)rank;
    return false;
}

static bool peer_wait(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                      uint64_t *max_ns)
{
    ep_host_team_peer_wait(((const struct host_team *)team)->team, rank, peer, sum_ns, max_ns);
    return true;
}

static uint64_t expert_rows(const struct ep_team *team, uint32_t rank, uint32_t expert)
{
    return ep_host_team_expert_rows(((const struct host_team *)team)->team, rank, expert);
}

/* An engine that does not end has not stopped, and is waited for. */
static bool stuck(const struct ep_team *team, int32_t rank)
{
    (void)team, (void)rank;
    return false;
}

static ep_status state_export(const struct ep_team *team, uint32_t rank, int *fd, struct ep_error *error)
{
    (void)team, (void)fd;
    return ep_error_set(error, EP_UNIMPLEMENTED, "rank %u has no state of its own on the host backend", rank);
}

static const struct ep_team_ops host_ops = {
    .destroy = destroy,
    .set_timeout = set_timeout,
    .set_window = set_window,
    .leave = leave,
    .leave_all = leave_all,
    .cut = cut,
    .join = join,
    .reset = reset,
    .hold = hold,
    .admit = admit,
    .unhold = unhold,
    .first = first,
    .clean = clean,
    .peer_wait = peer_wait,
    .expert_rows = expert_rows,
    .stuck = stuck,
    .state_export = state_export,
    .start = start,
};

static ep_status create_over_nodes(struct host_team *team, const struct ep_team_options *options,
                                   struct ep_error *error)
{
    const struct ep_team_span *span = options->span;
    ep_status status = lost_nodes_open(team->loop, span, &team->lost, error);

    if (status)
        return status;
    status = ep_host_team_create(options->map, options->placement, options->timeout_ms,
                                 &(struct ep_host_span){ .nodes = span->nodes,
                                                         .own = span->own,
                                                         .node = span->node,
                                                         .net = span->net->host,
                                                         .on_lost = lost_nodes_tell,
                                                         .user = team->lost },
                                 &team->team, error);
    if (!status)
        team->net = span->net;
    return status;
}

ep_status ep_team_host_create(const struct ep_team_options *options, struct ep_team **out,
                              struct ep_error *error)
{
    struct host_team *team = calloc(1, sizeof *team);
    ep_status status;

    if (!team || !(team->windows = calloc(options->map->limits.ranks, sizeof *team->windows))) {
        free(team);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team");
    }
    team->base.ops = &host_ops;
    team->loop = options->loop;
    team->map = options->map;
    team->epoch = options->epoch;
    status = options->span ? create_over_nodes(team, options, error)
                           : ep_host_team_create(options->map, options->placement, options->timeout_ms, NULL,
                                                 &team->team, error);
    if (status)
        destroy(&team->base);
    else
        *out = &team->base;
    return status;
}
