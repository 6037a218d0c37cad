/* One node of the simulation, as server/daemon.c puts it together; its workers, as server/attach does. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "group_private.h"
#include "etcd_client.h"

#define BUDGET (1ull << 50)

/* ---- life ------------------------------------------------------------------------------- */

static void on_cluster_ready(const struct ep_error *error, void *user)
{
    struct sim_node *node = user;

    if (error->status)
        sim_fail("%s: %s", node->name, error->text);
    node->cluster_ready = true;
}

static void on_groups_ready(const struct ep_error *error, void *user)
{
    struct sim_node *node = user;

    if (error->status)
        sim_fail("%s: %s", node->name, error->text);
    node->groups_ready = true;
}

static void leave_to_reports(Ep__V1__NodeInfo *info, void *user)
{
    const struct sim_node *node = user;

    if (node->groups)
        ep_groups_untell(node->groups, info);
}

static void open_cluster(struct sim_node *node)
{
    const struct ep_cluster_options options = {
        .loop = &sim.loop, .store = node->store, .node = node->node, .ttl_ms = sim.ttl_ms,
        .describe = leave_to_reports, .on_ready = on_cluster_ready, .user = node,
    };
    struct ep_error error = EP_ERROR_INIT;

    if (ep_cluster_open(&options, &node->cluster, &error))
        sim_fail("%s: %s", node->name, error.text);
}

void node_start(struct sim_node *node)
{
    const struct ep_node_options options = {
        .name = node->name, .backend = EP_NODE_HOST, .host_devices = sim.ranks, .memory_budget = BUDGET,
        .admin_address = "127.0.0.1:7300",
    };
    struct ep_error error = EP_ERROR_INIT;

    node->cluster_ready = node->groups_ready = node->away = false;
    if (ep_node_open(&options, &node->node, &error))
        sim_fail("%s: %s", node->name, error.text);
    open_cluster(node);
    if (ep_groups_open(&sim.loop, node->node, node->store, node->cluster, on_groups_ready, node, &node->groups, &error))
        sim_fail("%s: %s", node->name, error.text);
    ep_cluster_join(node->cluster);
}

struct closing {
    struct ep_node *node;
    struct ep_cluster *cluster;
    uint32_t *closed; /* NULL: nobody waits */
};

static void on_cluster_closed(void *user)
{
    struct closing closing = *(struct closing *)user;

    free(user);
    ep_node_close(closing.node);
    if (closing.closed)
        ++*closing.closed;
}

static void on_left(void *user)
{
    struct closing *closing = user;

    ep_cluster_close(closing->cluster, on_cluster_closed, closing);
}

static void on_groups_closed(void *user)
{
    struct closing *closing = user;

    ep_cluster_leave(closing->cluster, on_left, closing);
}

static void close_all(struct sim_node *node, uint32_t *closed)
{
    struct closing *closing = sim_allocate(1, sizeof *closing);

    *closing = (struct closing){ node->node, node->cluster, closed };
    ep_groups_close(node->groups, on_groups_closed, closing);
    node->node = NULL;
    node->cluster = NULL;
    node->groups = NULL;
}

/* Its keeper, which begins with a task, is taken from it: nobody renews the lease, and nobody revokes it. */
static void let_run_out(struct ep_session *session)
{
    etcd_task_stop(session->state);
    free(session->state);
    session->state = NULL;
    atomic_store(&session->valid_until, 0);
}

void node_kill(struct sim_node *node)
{
    struct ep_session *session = ep_cluster_session(node->cluster);

    node->away = true;
    if (session)
        let_run_out(session);
    node_release(node);
    ep_cluster_leave(node->cluster, NULL, NULL);
    teams_cut(node->index);
    close_all(node, NULL);
}

void node_close(struct sim_node *node, uint32_t *closed)
{
    node_release(node);
    close_all(node, closed);
    node->away = true;
}

/* ---- workers ---------------------------------------------------------------------------------- */

static void on_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    (void)event, (void)rank, (void)epoch, (void)text, (void)user;
}

static void on_attached(const struct ep_error *error, void *user)
{
    if (error->status)
        sim_fail("%s: a worker cannot attach: %s", ((struct sim_node *)user)->name, error->text);
}

static bool attach_one(struct sim_node *node, uint32_t slot)
{
    const struct ep_worker worker = { .pid = (pid_t)(1000 + slot), .uid = 1000, .name = "simulated" };
    struct ep_error error = EP_ERROR_INIT;
    ep_status status;

    if (node->workers[slot])
        return true;
    status = ep_groups_claim(node->groups, SIM_GROUP, -1, &worker, on_event, node, &node->workers[slot], &error);
    if (status == EP_UNAVAILABLE)
        return false;
    if (status)
        sim_fail("%s: a worker cannot have a rank: %s", node->name, error.text);
    ep_membership_attach(node->workers[slot], &worker, on_attached);
    return true;
}

bool node_attach(struct sim_node *node)
{
    bool all = true;

    for (uint32_t slot = 0; slot < sim.ranks; slot++)
        all &= attach_one(node, slot);
    return all;
}

void node_release(struct sim_node *node)
{
    for (uint32_t slot = 0; slot < sim.ranks; slot++) {
        if (node->workers[slot])
            ep_membership_release(node->workers[slot], "it has left", false);
        node->workers[slot] = NULL;
    }
}

/* ---- what it knows -------------------------------------------------------------------------------- */

static const struct group *group_of(const struct sim_node *node)
{
    const struct group *group = group_find(node->groups, SIM_GROUP);

    return group && group->visible ? group : NULL;
}

bool node_leads(const struct sim_node *node)
{
    return !node->away && ep_cluster_leads(node->cluster);
}

bool node_sees(const struct sim_node *node, uint32_t alive)
{
    uint32_t n = 0;

    for (size_t i = 0; i < ep_cluster_count(node->cluster); i++)
        n += ep_cluster_at(node->cluster, i)->alive;
    return n == alive;
}

bool node_has_epoch(const struct sim_node *node, uint64_t epoch)
{
    const struct group *group = group_of(node);

    return group && group->epoch && group->epoch->number >= epoch && epoch_whole(group->epoch);
}

bool node_serves(const struct sim_node *node, uint64_t epoch)
{
    const struct group *group = group_of(node);

    if (!epoch)
        return !group_find(node->groups, SIM_GROUP);
    return node_has_epoch(node, epoch) && !group->older && !group->freeing && group->phase == EP_PHASE(READY);
}

static uint32_t ranks_in(const struct epoch *epoch, ep_rank_state state)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        n += epoch->ranks[i].state == state;
    return n;
}

bool node_counts(const struct sim_node *node, uint32_t attached)
{
    const struct group *group = group_of(node);

    return group && group->epoch && ranks_in(group->epoch, EP_RANK_STATE(ATTACHED)) == attached;
}

bool node_mourns(const struct sim_node *node, uint32_t absent)
{
    const struct group *group = group_of(node);

    return group && group->epoch && group->phase == EP_PHASE(DEGRADED) &&
           ranks_in(group->epoch, EP_RANK_STATE(ABSENT)) == absent;
}

uint64_t node_epoch(const struct sim_node *node)
{
    const struct group *group = group_of(node);

    return group ? group->epoch_number : 0;
}
