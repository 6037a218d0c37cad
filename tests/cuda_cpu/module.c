#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_cpu.h"
#include "ep_clock.h"

enum { QUEUE = 8192, GRAPH_OPS = 1024, RANKS = 64, WORDS_BYTES = 32768 };

struct mark {
    uint64_t ns;
};

/* What a stream holds: an op, or a mark that wants the time. */
struct work {
    void *stream;
    struct mark *mark;
    struct ep_op op;
};

struct ep_cuda_rank {
    struct cpu_rank rank;
    uint32_t device;
    pthread_t thread;
    uint64_t head, tail; /* next to put, next to run */
    bool closing;
    struct work queue[QUEUE];
};

struct ep_cuda_graph {
    uint32_t n;
    struct {
        struct ep_cuda_rank *rank;
        struct ep_op op;
    } op[GRAPH_OPS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct ep_cuda_rank *ranks[RANKS];
static void *capturing;
static struct ep_cuda_graph *captured;
static const struct ep_cuda_api *fixture;

/* ---- queues: under the lock ----------------------------------------------------------------------- */

static struct ep_cuda_rank *rank_on(const void *stream)
{
    for (uint32_t i = 0; i < RANKS; i++)
        for (uint64_t n = ranks[i] ? ranks[i]->tail : 0; ranks[i] && n < ranks[i]->head; n++)
            if (ranks[i]->queue[n % QUEUE].stream == stream)
                return ranks[i];
    return NULL;
}

static void put(struct ep_cuda_rank *rank, const struct work *work)
{
    while (rank->head - rank->tail == QUEUE)
        pthread_cond_wait(&changed, &lock);
    rank->queue[rank->head++ % QUEUE] = *work;
    pthread_cond_broadcast(&changed);
}

static void drain(const void *stream)
{
    pthread_mutex_lock(&lock);
    while (rank_on(stream))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void run_one(struct ep_cuda_rank *rank)
{
    struct work work = rank->queue[rank->tail % QUEUE];

    pthread_mutex_unlock(&lock);
    if (work.mark)
        work.mark->ns = ep_clock_ns();
    else
        cpu_execute(&rank->rank, &work.op);
    pthread_mutex_lock(&lock);
    rank->tail++;
    pthread_cond_broadcast(&changed);
}

static void *run_queue(void *arg)
{
    struct ep_cuda_rank *rank = arg;

    pthread_mutex_lock(&lock);
    while (!rank->closing || rank->tail != rank->head) {
        if (rank->tail == rank->head)
            pthread_cond_wait(&changed, &lock);
        else
            run_one(rank);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- ranks ------------------------------------------------------------------------------------------ */

static ep_status fill(const struct ep_cuda_rank_options *options, struct ep_cuda_rank *rank,
                      struct ep_error *error)
{
    struct cpu_rank *r = &rank->rank;

    rank->device = options->device;
    r->rank = options->rank;
    r->ranks = options->map->limits.ranks;
    r->map = *options->map;
    r->state = cuda_fixture_host(options->state);
    for (uint32_t i = 0; i < r->ranks; i++)
        r->window[i] = cuda_fixture_host(options->windows[i]);
    return cpu_rank_init(r, options->placement) ? EP_OK
                                                   : ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
}

static ep_status rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                           struct ep_error *error)
{
    struct ep_cuda_rank *rank = calloc(1, sizeof *rank);
    uint32_t i = 0;

    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    if (fill(options, rank, error) != EP_OK) {
        cpu_rank_fini(&rank->rank);
        free(rank);
        return error->status;
    }
    pthread_mutex_lock(&lock);
    while (i < RANKS && ranks[i])
        i++;
    if (i == RANKS)
        abort();
    ranks[i] = rank;
    pthread_mutex_unlock(&lock);
    pthread_create(&rank->thread, NULL, run_queue, rank);
    *out = rank;
    return EP_OK;
}

static void rank_close(struct ep_cuda_rank *rank)
{
    if (!rank)
        return;
    pthread_mutex_lock(&lock);
    rank->closing = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(rank->thread, NULL);
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < RANKS; i++)
        if (ranks[i] == rank)
            ranks[i] = NULL;
    pthread_mutex_unlock(&lock);
    cpu_rank_fini(&rank->rank);
    free(rank);
}

static ep_status rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    if (stream && stream == capturing && captured->n < GRAPH_OPS) {
        captured->op[captured->n].rank = rank;
        captured->op[captured->n++].op = *op;
    } else {
        put(rank, &(struct work){ .stream = stream, .op = *op });
    }
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

/* ---- streams, marks, graphs ---------------------------------------------------------------------------- */

static ep_status stream_query(uint32_t device, void *stream, struct ep_error *error)
{
    bool busy;

    (void)device;
    pthread_mutex_lock(&lock);
    busy = rank_on(stream) != NULL;
    pthread_mutex_unlock(&lock);
    return busy ? ep_error_set(error, EP_UNAVAILABLE, "work is under way") : EP_OK;
}

static ep_status stream_sync(uint32_t device, void *stream, struct ep_error *error)
{
    (void)device, (void)error;
    drain(stream);
    return EP_OK;
}

/*
 * Words, so that an op that looks at one (`from`, above all) sees the old or the new one.  Rows are large
 * and nobody looks at them meanwhile.
 */
static bool copy_words(void *to, const void *from, uint64_t bytes)
{
    const uint64_t word = sizeof(uint64_t);

    if (!to || !from || bytes > WORDS_BYTES || ((uintptr_t)to | (uintptr_t)from | bytes) % word != 0)
        return false;
    for (uint64_t at = 0; at < bytes; at += word)
        __atomic_store_n((uint64_t *)(void *)((uint8_t *)to + at),
                         __atomic_load_n((const uint64_t *)(const void *)((const uint8_t *)from + at),
                                         __ATOMIC_RELAXED),
                         __ATOMIC_SEQ_CST);
    return true;
}

static ep_status write_gpu(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                           struct ep_error *error)
{
    drain(stream);
    if (copy_words(cuda_fixture_host(to), from, bytes))
        return EP_OK;
    return fixture->write(device, to, from, bytes, stream, error);
}

static ep_status read_gpu(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                          struct ep_error *error)
{
    drain(stream);
    if (copy_words(to, cuda_fixture_host(from), bytes))
        return EP_OK;
    return fixture->read(device, to, from, bytes, stream, error);
}

static ep_status fill_gpu(uint32_t device, void *to, uint8_t value, uint64_t bytes, void *stream,
                          struct ep_error *error)
{
    drain(stream);
    return fixture->fill(device, to, value, bytes, stream, error);
}

static ep_status event_create(uint32_t device, void **event, struct ep_error *error)
{
    (void)device;
    *event = calloc(1, sizeof(struct mark));
    return *event ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for an event");
}

static void event_destroy(uint32_t device, void *event)
{
    (void)device;
    free(event);
}

static ep_status event_record(uint32_t device, void *event, void *stream, struct ep_error *error)
{
    struct ep_cuda_rank *rank;
    struct mark *mark = event;

    (void)device, (void)error;
    pthread_mutex_lock(&lock);
    rank = rank_on(stream);
    if (rank)
        put(rank, &(struct work){ .stream = stream, .mark = mark });
    else
        mark->ns = ep_clock_ns();
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static ep_status event_elapsed(uint32_t device, void *from, void *to, float *us, struct ep_error *error)
{
    (void)device, (void)error;
    *us = (float)(((const struct mark *)to)->ns - ((const struct mark *)from)->ns) / 1000.0f;
    return EP_OK;
}

static ep_status graph_begin(uint32_t device, void *stream, struct ep_error *error)
{
    (void)device;
    captured = calloc(1, sizeof *captured);
    if (!captured)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a graph");
    capturing = stream;
    return EP_OK;
}

static ep_status graph_end(uint32_t device, void *stream, struct ep_cuda_graph **out, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    *out = captured;
    capturing = NULL;
    captured = NULL;
    return EP_OK;
}

static ep_status graph_launch(struct ep_cuda_graph *graph, void *stream, struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < graph->n; i++)
        put(graph->op[i].rank, &(struct work){ .stream = stream, .op = graph->op[i].op });
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static void graph_destroy(struct ep_cuda_graph *graph)
{
    free(graph);
}

/* ---- the table -------------------------------------------------------------------------------------------- */

const struct ep_cuda_api *ep_cuda_api(void);

const struct ep_cuda_api *ep_cuda_api(void)
{
    static struct ep_cuda_api api;

    fixture = cuda_fixture_api();
    api = *fixture;
    api.write = write_gpu;
    api.read = read_gpu;
    api.fill = fill_gpu;
    api.rank_open = rank_open;
    api.rank_close = rank_close;
    api.rank_run = rank_run;
    api.stream_query = stream_query;
    api.stream_sync = stream_sync;
    api.graph_begin = graph_begin;
    api.graph_end = graph_end;
    api.graph_launch = graph_launch;
    api.graph_destroy = graph_destroy;
    api.event_create = event_create;
    api.event_destroy = event_destroy;
    api.event_record = event_record;
    api.event_elapsed = event_elapsed;
    return &api;
}
