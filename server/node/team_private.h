/* team_private: what the backends implement of ep_team.h. */
#ifndef EP_TEAM_PRIVATE_H
#define EP_TEAM_PRIVATE_H

#include "ep_team.h"
#include "nccl.h"

/* Each is the function of ep_team.h that has its name. */
struct ep_team_ops {
    void (*destroy)(struct ep_team *team);
    void (*set_timeout)(struct ep_team *team, uint32_t timeout_ms);
    ep_status (*set_window)(struct ep_team *team, uint32_t rank, struct ep_node_window *window,
                            struct ep_error *error);
    void (*leave)(struct ep_team *team, uint32_t rank);
    void (*leave_all)(struct ep_team *team);
    void (*cut)(struct ep_team *team, uint32_t node); /* NULL: as hold */
    void (*distrust)(struct ep_team *team); /* NULL: no team goes on with what another one had */
    ep_status (*join)(struct ep_team *team, uint32_t rank, struct ep_error *error);
    ep_status (*reset)(struct ep_team *team, struct ep_error *error);
    /* All three, or none: the backend has no teams over several nodes. */
    ep_status (*hold)(struct ep_team *team, uint32_t hold_ms, uint64_t *hold, struct ep_team_numbers *begun,
                      struct ep_error *error);
    ep_status (*admit)(struct ep_team *team, uint64_t hold, uint32_t rank, const struct ep_team_numbers *from,
                       struct ep_error *error);
    void (*unhold)(struct ep_team *team, uint64_t hold);
    struct ep_team_numbers (*first)(const struct ep_team *team, uint32_t rank);
    bool (*clean)(struct ep_team *team, uint32_t rank);
    bool (*peer_wait)(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                      uint64_t *max_ns);
    uint64_t (*expert_rows)(const struct ep_team *team, uint32_t rank, uint32_t expert);
    bool (*stuck)(const struct ep_team *team, int32_t rank);
    ep_status (*state_export)(const struct ep_team *team, uint32_t rank, int *fd, struct ep_error *error);
    ep_status (*start)(struct ep_team *team, const struct ep_executor_options *options,
                       struct ep_executor **out, struct ep_error *error);
};

/* The first member of each backend's own struct. */
struct ep_team {
    const struct ep_team_ops *ops;
    uint64_t state_bytes;
};

struct ep_executor_ops {
    bool (*refresh)(struct ep_executor *executor, uint64_t since_ns);
    void (*stop)(struct ep_executor *executor, void (*on_stopped)(void *user), void *user);
    /* Both or neither. */
    void (*add_region)(struct ep_executor *executor, const struct ep_executor_region *region, ep_region_done_fn on_done,
                       void *user);
    void (*drop_region)(struct ep_executor *executor, uint32_t number, ep_region_done_fn on_done, void *user);
};

struct ep_executor {
    const struct ep_executor_ops *ops;
};

/* A team's network: of hosts, which with GPUs is for the news that a node is gone; and of GPUs. */
struct ep_team_net {
    struct ep_node *node;
    struct ep_host_net *host;
    struct nccl_net *gpus;  /* NULL: the host backend, or it could not be connected */
    struct nccl_rank *here; /* cuda: n of them */
    uint32_t n;
};

/* ---- lost.c: nodes that are gone, from a net's thread to the loop's ---- */

struct lost_nodes;
ep_status lost_nodes_open(uv_loop_t *loop, const struct ep_team_span *span, struct lost_nodes **out,
                          struct ep_error *error);
/* The net's thread; user: the struct lost_nodes. */
void lost_nodes_tell(uint32_t node, const char *why, void *user);
/* The net's thread has ended.  Any thread: it is freed on the loop's. */
void lost_nodes_close(struct lost_nodes *lost);

ep_status ep_team_host_create(const struct ep_team_options *options, struct ep_team **out,
                              struct ep_error *error);
ep_status ep_team_cuda_create(const struct ep_team_options *options, struct ep_team **out,
                              struct ep_error *error);

#endif
