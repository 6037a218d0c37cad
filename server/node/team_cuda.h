/* team_cuda: the cuda backend's team, for the two files that implement it. */
#ifndef EP_TEAM_CUDA_H
#define EP_TEAM_CUDA_H

#include "ep_cuda.h"
#include "team_private.h"

struct cuda_rank {
    uint32_t ordinal; /* of its GPU in this process */
    struct ep_cuda_memory *state;
    uint8_t *window; /* on the GPU */
    struct ep_device_counters seen[EP_DEVICE_PARTS]; /* of the state: what has been counted already */
    bool used; /* a worker has had the window since it was clean */
};

struct cuda_team {
    struct ep_team base;
    const struct ep_cuda_api *api;
    uv_loop_t *loop;
    const struct ep_layout_map *map;
    const struct ep_placement *placement;
    uint64_t epoch;
    uint32_t timeout_ms;
    uint64_t from[EP_DEVICE_MAX_RANKS]; /* as it is in every state: nobody else writes it */
    uint32_t n;
    struct cuda_rank ranks[EP_DEVICE_MAX_RANKS];
};

static inline struct ep_device_state *cuda_state(const struct cuda_team *team, uint32_t rank)
{
    return team->api->memory_at(team->ranks[rank].state);
}

/* On the rank's GPU, over when they return. */
static inline ep_status cuda_write(const struct cuda_team *team, uint32_t rank, void *to, const void *from,
                                   uint64_t bytes, struct ep_error *error)
{
    return team->api->write(team->ranks[rank].ordinal, to, from, bytes, NULL, error);
}

static inline ep_status cuda_read(const struct cuda_team *team, uint32_t rank, void *to, const void *from,
                                  uint64_t bytes, struct ep_error *error)
{
    return team->api->read(team->ranks[rank].ordinal, to, from, bytes, NULL, error);
}

static inline ep_status cuda_clear(const struct cuda_team *team, uint32_t rank, void *to, uint64_t bytes,
                                   struct ep_error *error)
{
    return bytes ? team->api->fill(team->ranks[rank].ordinal, to, 0, bytes, NULL, error) : EP_OK;
}

/* What the worker of an earlier attachment left is gone; nothing to do when nobody has had the window. */
ep_status ep_team_cuda_clean(struct cuda_team *team, uint32_t rank, struct ep_error *error);

/* watch_cuda.c */
ep_status ep_team_cuda_start(struct ep_team *team, const struct ep_executor_options *options,
                             struct ep_executor **out, struct ep_error *error);

#endif
