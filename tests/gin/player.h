/*
 * player: a rank's process plays NCCL's part.
 *
 * The main thread plays the GPU: it posts operations to a queue per context and peer and polls memory. One progress
 * thread does what NCCL's does (src/gin/gin_host_proxy.cc at v2.28.9-1 and v2.30.7-1): tests all requests that are not
 * done, takes one operation of each queue, hands it to the plugin, lets the plugin progress. It is the only one that
 * calls iput, iputSignal, test and ginProgress; registration and connecting are the main thread's, while it runs.
 */
#ifndef PLAYER_H
#define PLAYER_H

#include <pthread.h>

#include "crew.h"
#include "ep_cuda.h"
#include "plugin.h"

enum { PLAYER_COMMS = 64, PLAYER_SIGNALS = 1024, PLAYER_MAX_CONTEXTS = 4, PLAYER_ALL = CREW_MAX_RANKS };

/* What the command line says. */
struct gin_setting {
    const char *plugin, *table; /* table NULL: the plugin's first */
    bool cuda;                  /* windows and signals are in GPU memory */
    uint32_t ranks, seconds;    /* of a case */
    uint64_t seed;
    bool log;                   /* what the plugin logs goes to stderr */
};

/* ---- memory -------------------------------------------------------------------------------------- */

/* Memory that operations use; the host may not follow `at` of GPU memory. Zeroed; pages around host memory are not
 * there, so that who runs over its ends dies. */
struct memory {
    uint8_t *at;
    uint64_t bytes;
    struct ep_cuda_memory *cuda; /* NULL: host memory */
};

struct region {
    const struct memory *memory;
    void *handle, *gin_handle;
};

/* ---- a rank -------------------------------------------------------------------------------------- */

struct queue_op {
    struct plugin_put put;
    void *request;
    uint32_t done; /* atomic, release, partner: player_is_done */
};

/* Operations to one peer in one context, as the GPU posts them. */
struct queue {
    struct queue_op *op; /* [depth] */
    uint64_t produced,
        consumed;  /* the main thread's and the progress thread's; atomic, release, each other's partner */
    uint64_t seen; /* the progress thread's: handed to the plugin; atomic */
};

struct player;

struct comm {
    struct player *player;
    void *plugin_comm, *gin;
    uint32_t ranks, contexts, depth;
    struct queue *queues; /* [contexts * ranks] */
    struct memory signals, inlines;
    struct region signals_region, inlines_region;
    uint32_t hold;    /* hands over, asks for no request; atomic */
    uint32_t shuffle; /* asks for requests in random order; atomic */
    uint32_t quiet;   /* lets the plugin make no progress but in test; atomic */
};

struct player {
    struct crew *crew;
    const struct gin_setting *setting;
    uint64_t random; /* the main thread's */
    struct plugin plugin;
    void *context; /* of init */
    struct nccl_properties_v12 properties;
    /* GPU memory; the stream is ours alone: nothing that the plugin enqueues may be waited for by accident */
    const struct ep_cuda_api *cuda;
    uint32_t device;
    void *stream;

    pthread_t thread;
    uint32_t stop, rounds, broken;    /* atomic; broken: `error` is written, release, partner: player_check */
    struct comm *comms[PLAYER_COMMS]; /* atomic; NULL: none */
    bool connected;                   /* some communicator was made */
    struct ep_error error;            /* the progress thread's */
};

/* Loads and starts the plugin, and the progress thread. */
ep_status player_open(struct crew *crew, const struct gin_setting *setting, struct player *player,
                      struct ep_error *error);
/* After its communicators. */
ep_status player_close(struct player *player, struct ep_error *error);
/* Without the process's first init(): what NCCL does with another communicator. */
ep_status player_restart(struct player *player, struct ep_error *error);
/* The progress thread's error, if it has one. */
ep_status player_check(const struct player *player, struct ep_error *error);
/* What a call of the plugin's gave. Ends the crew_doing() of the main thread. */
ep_status player_said(const struct player *player, const char *what, nccl_result result, struct ep_error *error);
uint64_t player_random(struct player *player, uint64_t below);

/* The rank's GPU is the calling thread's, as cudaSetDevice() makes it: plugins look. */
ep_status memory_make_current(struct player *player, struct ep_error *error);
ep_status memory_open(struct player *player, uint64_t bytes, bool cuda, struct memory *memory, struct ep_error *error);
void memory_close(struct player *player, struct memory *memory);
ep_status memory_write(struct player *player, struct memory *to, uint64_t offset, const void *from, uint64_t bytes,
                       struct ep_error *error);
ep_status memory_read(struct player *player, const struct memory *from, uint64_t offset, void *to, uint64_t bytes,
                      struct ep_error *error);

/* ---- communicators ------------------------------------------------------------------------------- */

struct comm_options {
    uint32_t ranks;    /* the first so many of all; 0: all */
    uint32_t contexts; /* 0: one */
    /* Between listen and connect, while others may connect already. NULL: nothing. */
    ep_status (*before_connect)(struct player *player, void *user, struct ep_error *error);
    void *user;
};

/* Collective, of all ranks: who does not take part gets none. */
ep_status comm_open(struct player *player, const struct comm_options *options, struct comm **out,
                    struct ep_error *error);
/* As NCCL does: the memory of the inline values is gone before it is deregistered. NULL is allowed. */
ep_status comm_close(struct comm *comm, struct ep_error *error);
/* listen only; the handle is with all others after the next barrier. */
ep_status comm_listen(struct player *player, void **listener, struct ep_error *error);
ep_status comm_connect(struct player *player, uint32_t ranks, void *listener, void **plugin_comm,
                       struct ep_error *error);

/* Collective, in the same order on all ranks. */
ep_status region_open(struct comm *comm, const struct memory *memory, uint64_t flags, struct region *region,
                      struct ep_error *error);
ep_status region_close(struct comm *comm, struct region *region, struct ep_error *error);

/* Waits while the queue is full. Signals are the communicator's own: put->signal is set when signal_op is. */
ep_status comm_post(struct comm *comm, uint32_t context, const struct plugin_put *put, uint64_t *number,
                    struct ep_error *error);
/* A value of up to 8 bytes that travels in the descriptor; the proxy keeps it in a region of host memory. */
ep_status comm_post_value(struct comm *comm, uint32_t context, const struct plugin_put *put, uint64_t value,
                          struct ep_error *error);
bool comm_is_done(const struct comm *comm, uint32_t context, uint32_t rank, uint64_t number);
/* All that was posted is done; rank PLAYER_ALL: to all. */
ep_status comm_drain(struct comm *comm, uint32_t rank, struct ep_error *error);
/* All that was posted is with the plugin. */
ep_status comm_wait_handed(struct comm *comm, struct ep_error *error);

ep_status comm_signal(struct comm *comm, uint32_t signal, uint64_t *value, struct ep_error *error);
ep_status comm_wait_signal(struct comm *comm, uint32_t signal, uint64_t least, uint32_t from, struct ep_error *error);
/* queryLastError. */
ep_status comm_query(struct comm *comm, bool *failed, struct ep_error *error);

#endif
