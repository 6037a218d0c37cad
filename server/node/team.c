/* The backend's functions behind ep_team.h. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "node_private.h"
#include "team_private.h"

/* ---- network ---------------------------------------------------------------------- */

#define GPUS_CARD 128u /* of a card, what comes before is the host net's */

_Static_assert(sizeof(struct ep_team_card) == sizeof(struct ep_host_card), "cards are passed on as they are");
_Static_assert(GPUS_CARD + sizeof(struct nccl_card) <= EP_TEAM_CARD_BYTES, "a card has room for NCCL's");

static bool is_cuda(const struct ep_node *node)
{
    return ep_node_backend(node) == EP__V1__BACKEND__BACKEND_CUDA;
}

static ep_status open_gpus(struct ep_team_net *net, const struct ep_team_net_options *options, struct nccl_card *card,
                           struct ep_error *error)
{
    net->here = calloc(options->n, sizeof *net->here);
    if (!net->here)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team's network");
    net->n = options->n;
    for (uint32_t i = 0; i < options->n; i++) {
        net->here[i].rank = options->here[i].rank;
        net->here[i].device = net->node->devices[options->here[i].device].ordinal;
    }
    return nccl_open(net->node->cuda, options->group, options->ranks, net->here, net->n, &net->gpus, card, error);
}

ep_status ep_team_net_listen(struct ep_node *node, const struct ep_team_net_options *options, struct ep_team_net **out,
                             struct ep_team_card *card, struct ep_error *error)
{
    struct ep_team_net *net;
    struct nccl_card gpus;
    ep_status status = is_cuda(node) ? nccl_check(node->cuda, error) : EP_OK;

    if (status)
        return status;
    net = calloc(1, sizeof *net);
    if (!net)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team's network");
    net->node = node;
    status = ep_host_net_listen(node->silence_ms, &net->host, (struct ep_host_card *)card, error);
    if (!status && is_cuda(node)) {
        status = open_gpus(net, options, &gpus, error);
        if (!status && options->first)
            status = nccl_invite(&gpus, error);
        if (!status)
            memcpy(card->bytes + GPUS_CARD, &gpus, sizeof gpus);
    }
    if (status)
        ep_team_net_close(net);
    else
        *out = net;
    return status;
}

void ep_team_net_expect(struct ep_team_net *net, struct ep_node_window *const *windows)
{
    for (uint32_t i = 0; i < net->n; i++)
        net->here[i].memory = (struct nccl_memory){ .at = ep_node_window_beside(windows[i]),
                                                    .bytes = windows[i]->beside_bytes };
}

static ep_status connect_gpus(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes, uint32_t timeout_ms,
                              struct ep_error *error)
{
    struct nccl_card card, first;
    bool goes_on = true;

    memcpy(&first, cards[0].bytes + GPUS_CARD, sizeof first);
    for (uint32_t n = 0; n < nodes; n++) {
        memcpy(&card, cards[n].bytes + GPUS_CARD, sizeof card);
        goes_on &= nccl_goes_on(net->gpus, &card);
    }
    return nccl_form(&net->gpus, goes_on ? NULL : &first, net->here, timeout_ms, error);
}

ep_status ep_team_net_connect(struct ep_team_net *net, const struct ep_team_card *cards, uint32_t nodes, uint32_t own,
                              uint32_t timeout_ms, struct ep_error *error)
{
    const uint64_t start = ep_clock_ns();
    ep_status status = ep_host_net_connect(net->host, (const struct ep_host_card *)cards, nodes, own, timeout_ms, error);
    uint64_t took_ms;

    if (status || !net->gpus)
        return status;
    took_ms = (ep_clock_ns() - start) / EP_NS_PER_MS;
    return connect_gpus(net, cards, nodes, took_ms < timeout_ms ? timeout_ms - (uint32_t)took_ms : 1, error);
}

void ep_team_net_close(struct ep_team_net *net)
{
    if (!net)
        return;
    nccl_close(net->gpus);
    ep_host_net_close(net->host);
    free(net->here);
    free(net);
}

/* On the host rings, which depend on the nodes alone.  On GPUs these are small, and the host's; each rank has more beside
 * its window. */
struct ep_team_beside ep_team_beside(Ep__V1__Backend backend, const struct ep_layout_map *map, const uint32_t *where)
{
    const struct ep_net_shape shape = ep_net_shape_of(where, map->limits.ranks);

    if (shape.nodes < 2)
        return (struct ep_team_beside){ 0 };
    if (backend == EP__V1__BACKEND__BACKEND_CUDA) {
        const uint64_t window = ep_net_beside_bytes(map, &shape);

        return (struct ep_team_beside){ .rank = window + ep_net_bytes(map, &shape), .window = window };
    }
    return (struct ep_team_beside){ .node = ep_host_net_bytes(shape.nodes) };
}

/* ---- teams ------------------------------------------------------------------------ */

ep_status ep_team_create(const struct ep_team_options *options, struct ep_team **out, struct ep_error *error)
{
    if (ep_node_backend(options->node) == EP__V1__BACKEND__BACKEND_CUDA)
        return ep_team_cuda_create(options, out, error);
    return ep_team_host_create(options, out, error);
}

void ep_team_destroy(struct ep_team *team)
{
    team->ops->destroy(team);
}

void ep_team_set_timeout(struct ep_team *team, uint32_t timeout_ms)
{
    team->ops->set_timeout(team, timeout_ms);
}

ep_status ep_team_set_window(struct ep_team *team, uint32_t rank, struct ep_node_window *window,
                             struct ep_error *error)
{
    return team->ops->set_window(team, rank, window, error);
}

void ep_team_leave(struct ep_team *team, uint32_t rank)
{
    team->ops->leave(team, rank);
}

void ep_team_leave_all(struct ep_team *team)
{
    team->ops->leave_all(team);
}

void ep_team_cut(struct ep_team *team, uint32_t node)
{
    if (team->ops->cut)
        team->ops->cut(team, node);
}

void ep_team_distrust(struct ep_team *team)
{
    if (team->ops->distrust)
        team->ops->distrust(team);
}

ep_status ep_team_join(struct ep_team *team, uint32_t rank, struct ep_error *error)
{
    return team->ops->join(team, rank, error);
}

ep_status ep_team_reset(struct ep_team *team, struct ep_error *error)
{
    return team->ops->reset(team, error);
}

ep_status ep_team_hold(struct ep_team *team, uint32_t hold_ms, uint64_t *hold, struct ep_team_numbers *begun,
                       struct ep_error *error)
{
    if (!team->ops->hold)
        return ep_error_set(error, EP_UNIMPLEMENTED, "ranks of this backend join without a hold");
    return team->ops->hold(team, hold_ms, hold, begun, error);
}

ep_status ep_team_admit(struct ep_team *team, uint64_t hold, uint32_t rank, const struct ep_team_numbers *from,
                        struct ep_error *error)
{
    if (!team->ops->admit)
        return ep_error_set(error, EP_UNIMPLEMENTED, "ranks of this backend join without a hold");
    return team->ops->admit(team, hold, rank, from, error);
}

void ep_team_unhold(struct ep_team *team, uint64_t hold)
{
    if (team->ops->unhold)
        team->ops->unhold(team, hold);
}

struct ep_team_numbers ep_team_first(const struct ep_team *team, uint32_t rank)
{
    return team->ops->first(team, rank);
}

bool ep_team_clean(struct ep_team *team, uint32_t rank)
{
    return team->ops->clean(team, rank);
}

bool ep_team_peer_wait(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                       uint64_t *max_ns)
{
    return team->ops->peer_wait(team, rank, peer, sum_ns, max_ns);
}

uint64_t ep_team_expert_rows(const struct ep_team *team, uint32_t rank, uint32_t expert)
{
    return team->ops->expert_rows(team, rank, expert);
}

bool ep_team_stuck(const struct ep_team *team, int32_t rank)
{
    return team->ops->stuck(team, rank);
}

uint64_t ep_team_state_bytes(const struct ep_team *team)
{
    return team->state_bytes;
}

ep_status ep_team_state_export(const struct ep_team *team, uint32_t rank, int *fd, struct ep_error *error)
{
    return team->ops->state_export(team, rank, fd, error);
}

ep_status ep_executor_start(struct ep_team *team, const struct ep_executor_options *options,
                            struct ep_executor **out, struct ep_error *error)
{
    return team->ops->start(team, options, out, error);
}

bool ep_executor_refresh(struct ep_executor *executor, uint64_t since_ns)
{
    return executor->ops->refresh(executor, since_ns);
}

void ep_executor_stop(struct ep_executor *executor, void (*on_stopped)(void *user), void *user)
{
    executor->ops->stop(executor, on_stopped, user);
}

static void refuse_region(ep_region_done_fn on_done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)ep_error_set(&error, EP_UNIMPLEMENTED, "ops of this rank use no memory that the server maps: that is for ops "
                       "that it runs on GPUs");
    on_done(&error, user);
}

void ep_executor_register(struct ep_executor *executor, const struct ep_executor_region *region,
                          ep_region_done_fn on_done, void *user)
{
    if (executor->ops->add_region) {
        executor->ops->add_region(executor, region, on_done, user);
        return;
    }
    if (region->fd >= 0)
        close(region->fd);
    refuse_region(on_done, user);
}

void ep_executor_unregister(struct ep_executor *executor, uint32_t number, ep_region_done_fn on_done, void *user)
{
    if (executor->ops->drop_region)
        executor->ops->drop_region(executor, number, on_done, user);
    else
        refuse_region(on_done, user);
}
