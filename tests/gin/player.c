/* Opening a plugin, and the progress thread. */
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ep_clock.h"
#include "ep_thread.h"
#include "player_private.h"

enum { IDLE_ROUNDS = 64, NAP_US = 20 }; /* NCCL only yields, but has a processor for every rank */

/* The plugin's logger has no context. */
static struct crew *logs_to;
static bool logs_all;
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER; /* any thread of a plugin may log */

static void keep_warning(nccl_log_level level, unsigned long subsystems, const char *file, int line, const char *format,
                         ...)
{
    struct crew_member *me = crew_me(logs_to);
    char said[sizeof me->said];
    va_list args;

    (void)subsystems, (void)file, (void)line;
    va_start(args, format);
    vsnprintf(said, sizeof said, format, args);
    va_end(args);
    if (logs_all)
        fprintf(stderr, "rank %u: %s\n", logs_to->rank, said);
    if (level != NCCL_LOG_WARN)
        return;
    pthread_mutex_lock(&keeping);
    memcpy(me->said, said, sizeof said);
    pthread_mutex_unlock(&keeping);
}

/* ---- random numbers, results --------------------------------------------------------------------- */

uint64_t player_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t player_random(struct player *player, uint64_t below)
{
    return player_mix(player->random++) % below;
}

ep_status player_said(const struct player *player, const char *what, nccl_result result, struct ep_error *error)
{
    crew_doing(player->crew, CREW_MAIN, NULL, CREW_NOBODY);
    return result == NCCL_SUCCESS ? EP_OK : ep_error_set(error, EP_VERIFY_FAILED, "%s gave %d", what, (int)result);
}

ep_status player_check(const struct player *player, struct ep_error *error)
{
    /* Acquire: partner is break_player. */
    if (!__atomic_load_n(&player->broken, __ATOMIC_ACQUIRE))
        return EP_OK;
    *error = player->error;
    return error->status;
}

/* ---- the progress thread ------------------------------------------------------------------------- */

static void break_player(struct player *player, const char *what, const struct plugin_put *put, uint64_t number)
{
    if (__atomic_load_n(&player->broken, __ATOMIC_RELAXED))
        return;
    ep_error_set(&player->error, EP_VERIFY_FAILED, "%s %s for operation %llu, %llu bytes to rank %u",
                 put->signal_op ? "iputSignal" : "iput", what, (unsigned long long)number,
                 (unsigned long long)put->bytes, put->rank);
    /* Release: partner is player_check. */
    __atomic_store_n(&player->broken, 1, __ATOMIC_RELEASE);
}

static void test_one(struct comm *comm, struct queue_op *op)
{
    struct player *player = comm->player;
    int done = 0;

    crew_doing(player->crew, CREW_PROGRESS, "test", op->put.rank);
    player->plugin.test(comm->plugin_comm, op->request, &done); /* NCCL does not look at what it gives */
    /* Release: partner is comm_is_done. */
    if (done)
        __atomic_store_n(&op->done, 1, __ATOMIC_RELEASE);
}

/* NCCL asks from the oldest on; a shuffled one begins anywhere. */
static void test_all(struct comm *comm, struct queue *queue)
{
    const uint64_t first = queue->consumed, n = queue->seen - first;
    const bool shuffle = __atomic_load_n(&comm->shuffle, __ATOMIC_RELAXED) != 0;
    const uint64_t start = n && shuffle ? player_mix(queue->seen ^ ep_clock_ns()) % n : 0;
    uint64_t consumed = first;

    for (uint64_t i = 0; i < n; i++) {
        struct queue_op *op = &queue->op[(first + (start + i) % n) % comm->depth];

        if (!op->done)
            test_one(comm, op);
    }
    while (consumed < queue->seen && queue->op[consumed % comm->depth].done)
        consumed++;
    /* Release: partner is comm_post, which writes the slot again. */
    __atomic_store_n(&queue->consumed, consumed, __ATOMIC_RELEASE);
}

static void hand_over(struct comm *comm, uint32_t context, struct queue *queue, struct queue_op *op)
{
    struct player *player = comm->player;
    nccl_result result;

    op->request = NULL;
    crew_doing(player->crew, CREW_PROGRESS, op->put.signal_op ? "iputSignal" : "iput", op->put.rank);
    result = plugin_put(&player->plugin, comm->gin, context, &op->put, &op->request);
    if (result != NCCL_SUCCESS)
        break_player(player, "gave an error, which ends GIN for good,", &op->put, queue->seen);
    else if (!op->request)
        break_player(player, "gave no request", &op->put, queue->seen);
    else
        __atomic_store_n(&queue->seen, queue->seen + 1, __ATOMIC_RELAXED);
}

/* One operation of a queue, when there is one. */
static bool take_one(struct comm *comm, uint32_t context, struct queue *queue)
{
    /* Acquire: partner is comm_post. */
    if (__atomic_load_n(&queue->produced, __ATOMIC_ACQUIRE) == queue->seen)
        return false;
    hand_over(comm, context, queue, &queue->op[queue->seen % comm->depth]);
    return true;
}

static void let_progress(struct comm *comm)
{
    struct player *player = comm->player;

    if (!player->plugin.progress || __atomic_load_n(&comm->quiet, __ATOMIC_RELAXED))
        return;
    crew_doing(player->crew, CREW_PROGRESS, "ginProgress", CREW_NOBODY);
    player->plugin.progress(comm->gin);
}

static bool progress_context(struct comm *comm, uint32_t context)
{
    struct queue *queues = &comm->queues[context * comm->ranks];
    bool busy = false;

    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (!__atomic_load_n(&comm->hold, __ATOMIC_RELAXED))
            test_all(comm, &queues[r]);
        busy = busy || queues[r].seen != queues[r].consumed;
    }
    for (uint32_t r = 0; r < comm->ranks && !__atomic_load_n(&comm->player->broken, __ATOMIC_RELAXED); r++) {
        busy = take_one(comm, context, &queues[r]) || busy;
        if (!comm->player->plugin.has_contexts) /* 2.28: after each rank; 2.30: once */
            let_progress(comm);
    }
    return busy;
}

static bool progress_comm(struct comm *comm)
{
    bool busy = false;

    for (uint32_t c = 0; c < comm->contexts; c++)
        busy = progress_context(comm, c) || busy;
    if (comm->player->plugin.has_contexts)
        let_progress(comm);
    crew_doing(comm->player->crew, CREW_PROGRESS, NULL, CREW_NOBODY);
    return busy;
}

static void *run_progress(void *arg)
{
    struct player *player = arg;
    uint32_t idle = 0;

    while (!__atomic_load_n(&player->stop, __ATOMIC_RELAXED)) {
        bool busy = false;

        for (uint32_t i = 0; i < PLAYER_COMMS; i++) {
            /* Acquire: partner is player_add. */
            struct comm *comm = __atomic_load_n(&player->comms[i], __ATOMIC_ACQUIRE);

            busy = (comm && progress_comm(comm)) || busy;
        }
        /* Release: partner is player_remove. */
        __atomic_add_fetch(&player->rounds, 1, __ATOMIC_RELEASE);
        idle = busy ? 0 : idle + 1;
        if (idle < IDLE_ROUNDS)
            sched_yield();
        else
            nanosleep(&(struct timespec){ .tv_nsec = NAP_US * 1000 }, NULL);
    }
    return NULL;
}

/* ---- communicators of the progress thread -------------------------------------------------------- */

ep_status player_add(struct player *player, struct comm *comm, struct ep_error *error)
{
    for (uint32_t i = 0; i < PLAYER_COMMS; i++)
        if (!player->comms[i]) {
            /* Release: partner is run_progress. */
            __atomic_store_n(&player->comms[i], comm, __ATOMIC_RELEASE);
            return EP_OK;
        }
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "more than %d communicators", PLAYER_COMMS);
}

ep_status player_remove(struct player *player, const struct comm *comm, struct ep_error *error)
{
    const uint32_t before = __atomic_load_n(&player->rounds, __ATOMIC_RELAXED);
    uint32_t turn = 0;

    for (uint32_t i = 0; i < PLAYER_COMMS; i++)
        if (player->comms[i] == comm)
            __atomic_store_n(&player->comms[i], NULL, __ATOMIC_RELAXED);
    /* Acquire: partner is run_progress. Two rounds later none has begun before. */
    while (__atomic_load_n(&player->rounds, __ATOMIC_ACQUIRE) - before < 2)
        if (!crew_go_on(player->crew, &turn))
            return crew_late(player->crew, error, "the progress thread does not come back from the plugin");
    return EP_OK;
}

/* ---- open and close ------------------------------------------------------------------------------ */

static ep_status open_cuda(struct player *player, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;
    uint32_t devices = 0, current;
    ep_status status = ep_cuda_open(&player->cuda, &why);

    if (status != EP_OK)
        return ep_error_set(error, EP_UNIMPLEMENTED, "no GPU here: %.300s", why.text);
    status = player->cuda->device_count(&devices, error);
    if (status != EP_OK)
        return status;
    player->device = player->crew->rank % devices;
    status = player->cuda->stream_create(player->device, &player->stream, error);
    /* A double has a current device always. */
    if (status == EP_OK && player->cuda->device_current(&current, &why) == EP_FAILED_PRECONDITION)
        status = memory_make_current(player, error);
    return status;
}

static ep_status check_properties(struct player *player, struct ep_error *error)
{
    const int wanted = player->setting->cuda ? NCCL_MEMORY_HOST | NCCL_MEMORY_CUDA : NCCL_MEMORY_HOST;
    int devices = 0;
    ep_status status = player_said(player, "devices", player->plugin.devices(&devices), error);

    if (status == EP_OK && devices < 1)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the plugin says that it has %d devices", devices);
    if (status == EP_OK)
        status =
            player_said(player, "getProperties", plugin_properties(&player->plugin, 0, &player->properties), error);
    if (status == EP_OK && (player->properties.ptrSupport & wanted) != wanted)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the plugin's ptrSupport is %d: %d is asked for",
                            player->properties.ptrSupport, wanted);
    if (status == EP_OK && player->properties.maxRecvs < 1)
        return ep_error_set(error, EP_VERIFY_FAILED, "maxRecvs is %d: must be 1 or more", player->properties.maxRecvs);
    return status;
}

static ep_status start_plugin(struct player *player, struct ep_error *error)
{
    ep_status status;

    crew_doing(player->crew, CREW_MAIN, "init", CREW_NOBODY);
    status = player_said(player, "init", player->plugin.init(&player->context, 1, keep_warning), error);
    return status == EP_OK ? check_properties(player, error) : status;
}

/* As in a process that NCCL lives in. */
static ep_status start_progress(struct player *player, struct ep_error *error)
{
    const int failed = ep_thread_start(&player->thread, "progress", run_progress, player);

    return failed ? ep_error_set(error, EP_RESOURCE_EXHAUSTED, "no progress thread: %s", strerror(failed)) : EP_OK;
}

ep_status player_open(struct crew *crew, const struct gin_setting *setting, struct player *player,
                      struct ep_error *error)
{
    ep_status status;

    *player = (struct player){ .crew = crew, .setting = setting };
    player->random = player_mix(setting->seed) ^ (uint64_t)(crew->rank + 1) << 48;
    logs_to = crew;
    logs_all = setting->log;
    status = plugin_open(setting->plugin, setting->table, &player->plugin, error);
    if (status == EP_OK && setting->cuda)
        status = open_cuda(player, error);
    if (status == EP_OK)
        status = start_plugin(player, error);
    return status == EP_OK ? start_progress(player, error) : status;
}

ep_status player_restart(struct player *player, struct ep_error *error)
{
    ep_status status;

    crew_doing(player->crew, CREW_MAIN, "finalize", CREW_NOBODY);
    status = player_said(player, "finalize", player->plugin.finalize(player->context), error);
    player->connected = false;
    return status == EP_OK ? start_plugin(player, error) : status;
}

ep_status player_close(struct player *player, struct ep_error *error)
{
    ep_status status;

    __atomic_store_n(&player->stop, 1, __ATOMIC_RELAXED);
    pthread_join(player->thread, NULL);
    crew_doing(player->crew, CREW_MAIN, "finalize", CREW_NOBODY);
    status = player_said(player, "finalize", player->plugin.finalize(player->context), error);
    if (player->cuda)
        player->cuda->stream_destroy(player->device, player->stream);
    return status;
}
