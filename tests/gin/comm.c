/* Communicators, their regions and queues, as NCCL makes and uses them. */
#include <stdlib.h>
#include <string.h>

#include "player_private.h"

/* ---- connecting ---------------------------------------------------------------------------------- */

/* A handle must stay within its bytes: what comes after them in listen()'s argument. */
#define GUARD 0xa5

ep_status comm_listen(struct player *player, void **listener, struct ep_error *error)
{
    uint8_t handle[2 * CREW_HANDLE];
    ep_status status;

    memset(handle, GUARD, sizeof handle);
    crew_doing(player->crew, CREW_MAIN, "listen", CREW_NOBODY);
    status = player_said(player, "listen", player->plugin.listen(player->context, 0, handle, listener), error);
    if (status != EP_OK)
        return status;
    for (size_t i = CREW_HANDLE; i < sizeof handle; i++)
        if (handle[i] != GUARD)
            return ep_error_set(error, EP_VERIFY_FAILED, "listen wrote byte %zu of a handle of %d", i, CREW_HANDLE);
    memcpy(crew_me(player->crew)->handle, handle, CREW_HANDLE);
    return EP_OK;
}

ep_status comm_connect(struct player *player, uint32_t ranks, void *listener, void **plugin_comm,
                       struct ep_error *error)
{
    uint8_t handles[CREW_MAX_RANKS][CREW_HANDLE];
    void *each[CREW_MAX_RANKS];
    /* NCCL 2.28 gives the context to a process's first communicator only. */
    void *context = player->plugin.has_contexts || !player->connected ? player->context : NULL;

    for (uint32_t r = 0; r < ranks; r++) {
        memcpy(handles[r], player->crew->shared->member[r].handle, CREW_HANDLE);
        each[r] = handles[r];
    }
    player->connected = true;
    crew_doing(player->crew, CREW_MAIN, "connect", CREW_NOBODY);
    return player_said(
        player, "connect",
        player->plugin.connect(context, each, (int)ranks, (int)player->crew->rank, listener, plugin_comm), error);
}

static ep_status close_listener(struct player *player, void *listener, struct ep_error *error)
{
    crew_doing(player->crew, CREW_MAIN, "closeListen", CREW_NOBODY);
    return player_said(player, "closeListen", player->plugin.close_listen(listener), error);
}

/* ---- regions ------------------------------------------------------------------------------------- */

ep_status region_open(struct comm *comm, const struct memory *memory, uint64_t flags, struct region *region,
                      struct ep_error *error)
{
    struct player *player = comm->player;
    const int type = memory->cuda ? NCCL_MEMORY_CUDA : NCCL_MEMORY_HOST;
    ep_status status;

    *region = (struct region){ .memory = memory };
    crew_doing(player->crew, CREW_MAIN, "regMrSym", CREW_NOBODY);
    status = player_said(player, "regMrSym",
                         plugin_register(&player->plugin, comm->plugin_comm, memory->at, memory->bytes, type, flags,
                                         &region->handle, &region->gin_handle),
                         error);
    if (status == EP_OK && (!region->handle || !region->gin_handle))
        return ep_error_set(error, EP_VERIFY_FAILED, "regMrSym gave no handle");
    if (status == EP_OK && (uintptr_t)region->gin_handle >> 63)
        return ep_error_set(error, EP_VERIFY_FAILED, "regMrSym gave handle %p: NCCL's descriptors hold 63 bits",
                            region->gin_handle);
    return status;
}

ep_status region_close(struct comm *comm, struct region *region, struct ep_error *error)
{
    struct player *player = comm->player;
    void *handle = region->handle;

    *region = (struct region){ 0 };
    if (!handle)
        return EP_OK;
    crew_doing(player->crew, CREW_MAIN, "deregMrSym", CREW_NOBODY);
    return player_said(player, "deregMrSym", player->plugin.deregister(comm->plugin_comm, handle), error);
}

/* ---- open ---------------------------------------------------------------------------------------- */

static ep_status make_queues(struct comm *comm, struct ep_error *error)
{
    const size_t n = (size_t)comm->contexts * comm->ranks;

    comm->depth = NCCL_MAX_REQUESTS * (uint32_t)comm->player->properties.maxRecvs;
    comm->queues = calloc(n, sizeof *comm->queues);
    for (size_t i = 0; comm->queues && i < n; i++) {
        comm->queues[i].op = calloc(comm->depth, sizeof *comm->queues[i].op);
        if (!comm->queues[i].op)
            return ep_error_set(error, EP_NO_MEMORY, "no memory for queues of %u operations", comm->depth);
    }
    return comm->queues ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for %zu queues", n);
}

static ep_status make_signals(struct comm *comm, struct ep_error *error)
{
    struct player *player = comm->player;
    ep_status status =
        memory_open(player, PLAYER_SIGNALS * sizeof(uint64_t), player->setting->cuda, &comm->signals, error);

    if (status == EP_OK)
        status = region_open(comm, &comm->signals, NCCL_REGION_ORDERED, &comm->signals_region, error);
    if (status == EP_OK)
        status = memory_open(player, (uint64_t)comm->contexts * comm->ranks * comm->depth * sizeof(uint64_t), false,
                             &comm->inlines, error);
    return status == EP_OK ? region_open(comm, &comm->inlines, 0, &comm->inlines_region, error) : status;
}

static ep_status make_context(struct comm *comm, struct ep_error *error)
{
    struct player *player = comm->player;
    ep_status status;

    crew_doing(player->crew, CREW_MAIN, "createContext", CREW_NOBODY);
    status = player_said(player, "createContext",
                         plugin_create_context(&player->plugin, comm->plugin_comm, comm->contexts, &comm->gin), error);
    if (status == EP_OK)
        status = make_queues(comm, error);
    return status == EP_OK ? make_signals(comm, error) : status;
}

/* 2.28 registers before the listener is closed, 2.30 after. */
static ep_status finish(struct comm *comm, void *listener, struct ep_error *error)
{
    struct player *player = comm->player;
    ep_status status = EP_OK;

    if (player->plugin.has_contexts)
        status = close_listener(player, listener, error);
    if (status == EP_OK)
        status = make_context(comm, error);
    if (status == EP_OK && !player->plugin.has_contexts)
        status = close_listener(player, listener, error);
    return status == EP_OK ? player_add(player, comm, error) : status;
}

static ep_status connect_new(struct player *player, const struct comm_options *options, struct comm *comm,
                             struct ep_error *error)
{
    void *listener;
    ep_status status = comm_listen(player, &listener, error);

    if (status == EP_OK)
        status = crew_barrier(player->crew, error);
    if (status == EP_OK && options->before_connect)
        status = options->before_connect(player, options->user, error);
    if (status == EP_OK)
        status = comm_connect(player, comm->ranks, listener, &comm->plugin_comm, error);
    return status == EP_OK ? finish(comm, listener, error) : status;
}

ep_status comm_open(struct player *player, const struct comm_options *options, struct comm **out,
                    struct ep_error *error)
{
    const uint32_t ranks = options->ranks ? options->ranks : player->crew->ranks;
    struct comm *comm = NULL;
    ep_status status;

    if (player->crew->rank >= ranks) {
        status = crew_barrier(player->crew, error);
    } else {
        comm = calloc(1, sizeof *comm);
        if (!comm)
            return ep_error_set(error, EP_NO_MEMORY, "no memory for a communicator");
        *comm =
            (struct comm){ .player = player, .ranks = ranks, .contexts = options->contexts ? options->contexts : 1 };
        status = connect_new(player, options, comm, error);
    }
    if (status == EP_OK)
        status = crew_barrier(player->crew, error); /* the handles may be written again */
    if (status == EP_OK)
        *out = comm;
    return status; /* a rank that fails ends: nothing is given back */
}

/* ---- close --------------------------------------------------------------------------------------- */

static ep_status close_plugin_comm(struct comm *comm, struct ep_error *error)
{
    struct player *player = comm->player;

    crew_doing(player->crew, CREW_MAIN, "closeColl", CREW_NOBODY);
    return player_said(player, "closeColl", player->plugin.close(comm->plugin_comm), error);
}

static void free_comm(struct comm *comm)
{
    for (size_t i = 0; i < (size_t)comm->contexts * comm->ranks; i++)
        free(comm->queues[i].op);
    free(comm->queues);
    memory_close(comm->player, &comm->signals);
    free(comm);
}

ep_status comm_close(struct comm *comm, struct ep_error *error)
{
    ep_status status = comm ? player_remove(comm->player, comm, error) : EP_OK;

    if (!comm || status != EP_OK)
        return status;
    crew_doing(comm->player->crew, CREW_MAIN, "destroyContext", CREW_NOBODY);
    status =
        player_said(comm->player, "destroyContext", plugin_destroy_context(&comm->player->plugin, comm->gin), error);
    if (status == EP_OK)
        status = region_close(comm, &comm->signals_region, error);
    memory_close(comm->player, &comm->inlines);
    if (status == EP_OK)
        status = region_close(comm, &comm->inlines_region, error);
    if (status == EP_OK)
        status = close_plugin_comm(comm, error);
    free_comm(comm);
    return status;
}

/* ---- posting ------------------------------------------------------------------------------------- */

static struct queue *queue_of(const struct comm *comm, uint32_t context, uint32_t rank)
{
    return &comm->queues[context * comm->ranks + rank];
}

static uint64_t consumed_of(const struct queue *queue)
{
    /* Acquire: partner is test_all. */
    return __atomic_load_n(&queue->consumed, __ATOMIC_ACQUIRE);
}

static ep_status still_there(const struct comm *comm, const struct queue *queue, uint32_t rank, struct ep_error *error)
{
    const uint64_t oldest = consumed_of(queue);
    const struct plugin_put *put = &queue->op[oldest % comm->depth].put;

    if (player_check(comm->player, error) != EP_OK)
        return error->status;
    return crew_late(comm->player->crew, error, "operation %llu to rank %u, %s of %llu bytes, is not done",
                     (unsigned long long)oldest, rank, put->signal_op ? "a signal" : "a put",
                     (unsigned long long)put->bytes);
}

static ep_status wait_for_room(const struct comm *comm, const struct queue *queue, uint32_t rank,
                               struct ep_error *error)
{
    uint32_t turn = 0;

    while (queue->produced - consumed_of(queue) == comm->depth)
        if (__atomic_load_n(&comm->player->broken, __ATOMIC_RELAXED) || !crew_go_on(comm->player->crew, &turn))
            return still_there(comm, queue, rank, error);
    return EP_OK;
}

static void publish(const struct comm *comm, struct queue *queue, const struct plugin_put *put)
{
    struct queue_op *op = &queue->op[queue->produced % comm->depth];

    *op = (struct queue_op){ .put = *put };
    if (put->signal_op && !put->signal)
        op->put.signal = comm->signals_region.gin_handle;
    /* Release: partner is take_one. */
    __atomic_store_n(&queue->produced, queue->produced + 1, __ATOMIC_RELEASE);
}

ep_status comm_post(struct comm *comm, uint32_t context, const struct plugin_put *put, uint64_t *number,
                    struct ep_error *error)
{
    struct queue *queue = queue_of(comm, context, put->rank);
    ep_status status = wait_for_room(comm, queue, put->rank, error);

    if (status != EP_OK)
        return status;
    if (number)
        *number = queue->produced;
    publish(comm, queue, put);
    return EP_OK;
}

ep_status comm_post_value(struct comm *comm, uint32_t context, const struct plugin_put *put, uint64_t value,
                          struct ep_error *error)
{
    struct queue *queue = queue_of(comm, context, put->rank);
    ep_status status = wait_for_room(comm, queue, put->rank, error);
    struct plugin_put inlined = *put;

    if (status != EP_OK)
        return status;
    inlined.source = comm->inlines_region.handle;
    inlined.from = ((uint64_t)(queue - comm->queues) * comm->depth + queue->produced % comm->depth) * sizeof value;
    memcpy(comm->inlines.at + inlined.from, &value, sizeof value);
    publish(comm, queue, &inlined);
    return EP_OK;
}

bool comm_is_done(const struct comm *comm, uint32_t context, uint32_t rank, uint64_t number)
{
    const struct queue *queue = queue_of(comm, context, rank);

    /* Acquire: partner is test_one. */
    return consumed_of(queue) > number || __atomic_load_n(&queue->op[number % comm->depth].done, __ATOMIC_ACQUIRE) != 0;
}

static ep_status drain_queue(const struct comm *comm, uint32_t context, uint32_t rank, struct ep_error *error)
{
    const struct queue *queue = queue_of(comm, context, rank);
    uint32_t turn = 0;

    while (consumed_of(queue) != queue->produced)
        if (__atomic_load_n(&comm->player->broken, __ATOMIC_RELAXED) || !crew_go_on(comm->player->crew, &turn))
            return still_there(comm, queue, rank, error);
    return EP_OK;
}

ep_status comm_drain(struct comm *comm, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t c = 0; c < comm->contexts; c++)
        for (uint32_t r = 0; r < comm->ranks && status == EP_OK; r++)
            if (rank == PLAYER_ALL || r == rank)
                status = drain_queue(comm, c, r, error);
    return status;
}

ep_status comm_wait_handed(struct comm *comm, struct ep_error *error)
{
    uint32_t turn = 0;

    for (uint32_t i = 0; i < comm->contexts * comm->ranks; i++) {
        const struct queue *queue = &comm->queues[i];

        while (__atomic_load_n(&queue->seen, __ATOMIC_RELAXED) != queue->produced)
            if (__atomic_load_n(&comm->player->broken, __ATOMIC_RELAXED) || !crew_go_on(comm->player->crew, &turn))
                return still_there(comm, queue, i % comm->ranks, error);
    }
    return EP_OK;
}

/* ---- signals and errors -------------------------------------------------------------------------- */

ep_status comm_signal(struct comm *comm, uint32_t signal, uint64_t *value, struct ep_error *error)
{
    const uint64_t offset = signal * sizeof(uint64_t);

    if (comm->signals.cuda)
        return memory_read(comm->player, &comm->signals, offset, value, sizeof *value, error);
    /* Acquire: partner is the plugin, which has written the data before. */
    *value = __atomic_load_n((uint64_t *)(void *)(comm->signals.at + offset), __ATOMIC_ACQUIRE);
    return EP_OK;
}

ep_status comm_wait_signal(struct comm *comm, uint32_t signal, uint64_t least, uint32_t from, struct ep_error *error)
{
    uint64_t value = 0;
    uint32_t turn = 0;
    ep_status status;

    while ((status = comm_signal(comm, signal, &value, error)) == EP_OK && value < least)
        if (__atomic_load_n(&comm->player->broken, __ATOMIC_RELAXED) || !crew_go_on(comm->player->crew, &turn))
            return player_check(comm->player, error) != EP_OK
                       ? error->status
                       : crew_late(comm->player->crew, error, "signal %u of rank %u is %llu: %llu is waited for",
                                   signal, from, (unsigned long long)value, (unsigned long long)least);
    return status;
}

ep_status comm_query(struct comm *comm, bool *failed, struct ep_error *error)
{
    struct player *player = comm->player;

    *failed = false;
    if (!player->plugin.query)
        return EP_OK;
    crew_doing(player->crew, CREW_MAIN, "queryLastError", CREW_NOBODY);
    return player_said(player, "queryLastError", player->plugin.query(comm->gin, failed), error);
}
