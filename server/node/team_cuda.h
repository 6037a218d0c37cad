/* team_cuda: the cuda backend's team, for the files that implement it. */
#ifndef EP_TEAM_CUDA_H
#define EP_TEAM_CUDA_H

#include "ep_cuda.h"
#include "team_private.h"

struct cuda_rank {
    bool here;        /* on this node; else it has nothing of what follows */
    uint32_t ordinal; /* of its GPU in this process */
    struct ep_cuda_memory *state;
    struct ep_cuda_memory *net;   /* of struct ep_device_net and its tables; NULL without a span */
    uint8_t *window, *beside; /* on the GPU */
    struct ep_device_counters seen[EP_DEVICE_PARTS]; /* of the state: what has been counted already */
    struct ep_device_counters ht_seen[EP_DEVICE_PARTS];
    uint64_t *expert_rows; /* [experts] that it has sent to each, as loads_cuda.c reckons */
    uint64_t sampled[2];   /* dispatches, of LL and of HT, that are in that */
    struct cuda_look *look; /* that is under way, whoever it was begun for (watch_cuda.c) */
    bool used; /* a worker has had the window since it was clean */
    bool stuck; /* a kernel of ours has not ended, see ep_team_stuck() */
};

struct cuda_team {
    struct ep_team base;
    const struct ep_cuda_api *api;
    uv_loop_t *loop;
    const struct ep_layout_map *map;
    const struct ep_placement *placement;
    uint64_t epoch;
    uint32_t timeout_ms;
    uint64_t region_bytes;              /* of workers' own memory that are mapped for a rank, at most */
    bool whole_lines;                   /* of every state */
    uint64_t from[EP_DEVICE_MAX_RANKS]; /* as it is in every state: nobody else writes it */
    uint64_t ht_from[EP_DEVICE_MAX_RANKS];
    uint64_t never[EP_DEVICE_MAX_RANKS]; /* EP_DEVICE_NEVER: what is written when all are absent */
    uint32_t n;                          /* ranks */
    struct cuda_rank *ranks;
    uint32_t *expert_at;                 /* [ranks][local experts] which expert has its home there */
    struct cuda_span *span; /* NULL: all ranks are here */
};

static inline bool cuda_is_here(const struct cuda_team *team, uint32_t rank) { return team->ranks[rank].here; }

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

/* ---- team_cuda.c ---- */

/* The numbers of the rank into every state that is here. */
ep_status cuda_tell_from(struct cuda_team *team, uint32_t rank, struct ep_error *error);
/* The highest numbers that a rank here has begun. */
ep_status cuda_read_begun(const struct cuda_team *team, struct ep_team_numbers *out, struct ep_error *error);
/* The beginning of the rank's state, as of a rank that has done all before it takes part. */
ep_status cuda_write_state(struct cuda_team *team, uint32_t rank, struct ep_error *error);

/* ---- span_cuda.c: a team over several nodes ---------------------------------------------- */

ep_status cuda_span_open(struct cuda_team *team, const struct ep_team_span *span, struct ep_error *error);
void cuda_span_close(struct cuda_team *team); /* without one: nothing */
/* What was opened is the caller's again. */
void cuda_span_give_back(struct cuda_team *team);
/* The rank's struct ep_device_net. */
ep_status cuda_span_make_net(struct cuda_team *team, uint32_t rank, struct ep_error *error);
/* Where the rank's window and the memory beside it are, to all that are here.  Without a span: nothing. */
ep_status cuda_span_tell_window(struct cuda_team *team, uint32_t rank, struct ep_error *error);
uint64_t cuda_span_held(const struct cuda_team *team);
/* As of struct ep_team_ops. */
void cuda_span_cut(struct ep_team *team, uint32_t node);
void cuda_span_distrust(struct ep_team *team);
ep_status cuda_span_hold(struct ep_team *team, uint32_t hold_ms, uint64_t *hold, struct ep_team_numbers *begun,
                         struct ep_error *error);
ep_status cuda_span_admit(struct ep_team *team, uint64_t hold, uint32_t rank, const struct ep_team_numbers *from,
                          struct ep_error *error);
void cuda_span_unhold(struct ep_team *team, uint64_t hold);

/* ---- watch_cuda.c: what kernels count and report ----------------------------------------- */

/* The loop's thread's. */
struct cuda_watch {
    struct ep_executor base; /* whose watch it is */
    struct cuda_team *team;
    struct ep_executor_options options;
    uv_timer_t timer;
    uint64_t looked_ns; /* what was done before is counted */
    uint64_t wanted_ns; /* what was done before is wanted; later: there is a look to come */
    uint64_t told;      /* sequence of the last failure */
    bool blind;         /* a look has failed, and that was told */
    uint64_t stop_by_ns;
    void (*on_closed)(struct cuda_watch *watch); /* NULL: it is not to stop */
};

void cuda_watch_start(struct cuda_watch *watch, struct cuda_team *team, const struct ep_executor_options *options);
/* As ep_executor_refresh(). */
bool cuda_watch_refresh(struct cuda_watch *watch, uint64_t since_ns);
/* After a last look, or without it when that takes too long; on_closed comes later, from the loop. */
void cuda_watch_stop(struct cuda_watch *watch, void (*on_closed)(struct cuda_watch *watch));
/* A look of the rank's that a watch has given up is still under way. */
bool cuda_watch_lost(const struct cuda_team *team, uint32_t rank);

/* ---- loads_cuda.c: rows of each expert ------------------------------------------------------ */

/* A batch of the rank's that stands for all its dispatches of one mode since the last one. */
struct cuda_sample {
    uint64_t dispatches;       /* so far, */
    uint64_t before;           /* and when the last one was taken */
    uint64_t choices;          /* 0: there is none */
    int32_t *routes;           /* [choices]; malloc'ed */
};

ep_status cuda_loads_open(struct cuda_team *team, struct ep_error *error);
void cuda_loads_close(struct cuda_team *team);
/* Any thread, of an attached rank: reads what belongs to sample->dispatches and ->before; the rest is filled in. */
ep_status cuda_loads_read(const struct cuda_team *team, uint32_t rank, bool ht, struct cuda_sample *sample,
                          struct ep_error *error);
void cuda_loads_add(struct cuda_team *team, uint32_t rank, bool ht, const struct cuda_sample *sample);
uint64_t cuda_expert_rows(const struct ep_team *team, uint32_t rank, uint32_t expert); /* as of struct ep_team_ops */

/* ---- regions_cuda.c: memory of workers, mapped for the ops that the server runs for them ------ */

struct cuda_regions;

/* NULL: no memory. */
struct cuda_regions *cuda_regions_open(const struct cuda_team *team, uint32_t rank, struct ep_cuda_serve *serve);
/* As ep_executor_register() and ep_executor_unregister(). */
void cuda_regions_register(struct cuda_regions *regions, const struct ep_executor_region *asked,
                           ep_region_done_fn on_done, void *user);
void cuda_regions_unregister(struct cuda_regions *regions, uint32_t number, ep_region_done_fn on_done, void *user);
/* No request comes any more; the last one ends.  on_idle runs when it has, at once or later: then `serve` is not used
 * any more. */
void cuda_regions_stop(struct cuda_regions *regions, void (*on_idle)(void *user), void *user);
/* After that.  unused: no op runs any more, and all is unmapped, in its own time; else nothing ever is. */
void cuda_regions_close(struct cuda_regions *regions, bool unused);

/* ---- the executors: of a clean window -------------------------------------------------- */

/* Executor direct, in watch_cuda.c. */
ep_status ep_team_cuda_watch(struct cuda_team *team, const struct ep_executor_options *options,
                             struct ep_executor **out, struct ep_error *error);
/* Executor server, in serve_cuda.c. */
ep_status ep_team_cuda_serve(struct cuda_team *team, const struct ep_executor_options *options,
                             struct ep_executor **out, struct ep_error *error);

#endif
