#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_cpu.h"
#include "ep_clock.h"

enum { QUEUE = 8192, GRAPH_OPS = 1024, QUEUES = 128, WORDS_BYTES = 32768 };

struct mark {
    uint64_t ns;
};

/* Bytes, or a value when `from` is NULL, to a place in this process. */
struct move {
    void *to;
    const void *from;
    uint64_t bytes, value;
};

/* What a stream holds: an op, a mark that wants the time, or something to be moved. */
struct work {
    void *stream;
    struct mark *mark;
    struct move move;
    struct ep_op op;
};

/* Work in its order, and the thread that does it. */
struct queue {
    void (*run)(struct queue *queue, const struct ep_op *op);
    pthread_t thread;
    uint64_t head, tail; /* next to put, next to run */
    bool closing;        /* under the lock; also read atomically without */
    struct work work[QUEUE];
};

struct ep_cuda_rank {
    struct queue queue; /* first */
    struct cpu_rank rank;
    const struct ep_regions *regions;
};

/* The worker's half of a mailbox. */
struct ep_cuda_ringer {
    struct queue queue; /* first */
    struct ep_mailbox *mailbox;
};

/* What a stream does that no rank or window is needed for. */
struct copier {
    struct queue queue; /* first */
    void *stream;
};

struct ep_cuda_serve {
    struct cpu_rank rank;
    struct ep_mailbox *mailbox;
    pthread_t thread;
    /* under the lock; `ending` also read atomically without */
    uint64_t posted, before, passed; /* ops; before: those that were posted before the last post */
    bool ending, over;
    struct ep_regions regions;
    uint64_t looked, ended; /* ops, counted from 1: the last that looked at the regions; the last that is over */
    struct ep_op sent[EP_MAX_HANDLES]; /* as half[] of the rank, as it was handed over */
};

struct ep_cuda_graph {
    uint32_t n;
    struct {
        struct queue *queue;
        struct ep_op op;
    } op[GRAPH_OPS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct queue *queues[QUEUES];
static pthread_mutex_t capture = PTHREAD_MUTEX_INITIALIZER; /* from graph_begin() to graph_end(): one at a time */
static void *capturing;
static struct ep_cuda_graph *captured;
static const struct ep_cuda_api *fixture;

/* ---- queues: under the lock ----------------------------------------------------------------------- */

static struct queue *queue_of(const void *stream)
{
    for (uint32_t i = 0; i < QUEUES; i++)
        for (uint64_t n = queues[i] ? queues[i]->tail : 0; queues[i] && n < queues[i]->head; n++)
            if (queues[i]->work[n % QUEUE].stream == stream)
                return queues[i];
    return NULL;
}

static void put(struct queue *queue, const struct work *work)
{
    while (queue->head - queue->tail == QUEUE)
        pthread_cond_wait(&changed, &lock);
    queue->work[queue->head++ % QUEUE] = *work;
    pthread_cond_broadcast(&changed);
}

static void put_or_capture(struct queue *queue, const struct ep_op *op, void *stream)
{
    if (stream && stream == capturing && captured->n < GRAPH_OPS) {
        captured->op[captured->n].queue = queue;
        captured->op[captured->n++].op = *op;
    } else {
        put(queue, &(struct work){ .stream = stream, .op = *op });
    }
}

static void drain(const void *stream)
{
    pthread_mutex_lock(&lock);
    while (queue_of(stream))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void move(const struct move *m)
{
    if (m->from)
        memmove(m->to, m->from, m->bytes);
    else
        __atomic_store_n((uint64_t *)m->to, m->value, __ATOMIC_RELEASE); /* partner: whoever waits for the value */
}

static void run_one(struct queue *queue)
{
    struct work work = queue->work[queue->tail % QUEUE];

    pthread_mutex_unlock(&lock);
    if (work.mark)
        work.mark->ns = ep_clock_ns();
    else if (work.move.to)
        move(&work.move);
    else
        queue->run(queue, &work.op);
    pthread_mutex_lock(&lock);
    queue->tail++;
    pthread_cond_broadcast(&changed);
}

static void *run_queue(void *arg)
{
    struct queue *queue = arg;

    pthread_mutex_lock(&lock);
    while (!queue->closing || queue->tail != queue->head) {
        if (queue->tail == queue->head)
            pthread_cond_wait(&changed, &lock);
        else
            run_one(queue);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void start_queue(struct queue *queue)
{
    uint32_t i = 0;

    while (i < QUEUES && queues[i])
        i++;
    if (i == QUEUES || pthread_create(&queue->thread, NULL, run_queue, queue) != 0)
        abort();
    queues[i] = queue;
}

/* Not under the lock.  What waits is done first. */
static void stop_queue(struct queue *queue)
{
    pthread_mutex_lock(&lock);
    __atomic_store_n(&queue->closing, true, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(queue->thread, NULL);
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < QUEUES; i++)
        if (queues[i] == queue)
            queues[i] = NULL;
    pthread_mutex_unlock(&lock);
}

/* ---- ranks ------------------------------------------------------------------------------------------ */

static ep_status fill(const struct ep_cuda_rank_options *options, struct cpu_rank *r, struct ep_error *error)
{
    if (options->net)
        return ep_error_set(error, EP_UNIMPLEMENTED, "this module reaches no other node");
    r->rank = options->rank;
    r->ranks = options->map->limits.ranks;
    r->map = *options->map;
    r->state = cuda_fixture_host(options->state);
    for (uint32_t i = 0; i < r->ranks; i++)
        r->window[i] = cuda_fixture_host(options->windows[i]);
    if (cpu_rank_init(r, options->placement, error) == EP_OK)
        return EP_OK;
    cpu_rank_fini(r);
    return error->status;
}

static void run_op(struct queue *queue, const struct ep_op *op)
{
    cpu_execute(&((struct ep_cuda_rank *)queue)->rank, op);
}

static ep_status rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                           struct ep_error *error)
{
    struct ep_cuda_rank *rank = calloc(1, sizeof *rank);

    if (!rank)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    if (fill(options, &rank->rank, error) != EP_OK) {
        free(rank);
        return error->status;
    }
    rank->queue.run = run_op;
    rank->regions = options->regions;
    pthread_mutex_lock(&lock);
    start_queue(&rank->queue);
    pthread_mutex_unlock(&lock);
    *out = rank;
    return EP_OK;
}

static void rank_close(struct ep_cuda_rank *rank)
{
    if (!rank)
        return;
    stop_queue(&rank->queue);
    cpu_rank_fini(&rank->rank);
    free(rank);
}

/*
 * Spans of regions as offsets from the window too, wherever they are: what is queued, or captured, has the
 * addresses of now, as a kernel's arguments have.  One that is in none is one that the op does not use.
 */
static void resolve(const struct cpu_rank *rank, const struct ep_regions *regions, struct ep_op *op)
{
    struct ep_span *const spans[] = { &op->x, &op->x_scales, &op->topk_idx, &op->topk_weights, &op->bias,
                                      &op->row_grads, &op->out, &op->out_scales, &op->counts, &op->offsets,
                                      &op->out_topk, &op->out_weights, &op->sources, &op->topk_grads };

    for (uint32_t i = 0; i < sizeof spans / sizeof *spans; i++) {
        const void *host;

        if (spans[i]->bytes == 0 || spans[i]->offset < EP_REGION_BYTES)
            continue;
        host = regions ? cuda_fixture_host(ep_region_at(regions, spans[i]->offset)) : NULL;
        if (host)
            spans[i]->offset = (uintptr_t)host - (uintptr_t)rank->window[rank->rank];
        else
            spans[i]->bytes = 0;
    }
}

static ep_status rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error)
{
    struct ep_op resolved = *op;

    if (op->kind <= EP_OP_COMBINE && op->mode != EP_MODE_LL)
        return ep_error_set(error, EP_UNIMPLEMENTED, "mode is %u: this module has no such ops", op->mode);
    resolve(&rank->rank, rank->regions, &resolved);
    pthread_mutex_lock(&lock);
    put_or_capture(&rank->queue, &resolved, stream);
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

/* ---- executor server: the worker's half ------------------------------------------------------------- */

static void nap(void)
{
    usleep(NAP_US);
}

/* The stream goes on when the op is done, or when it is closed, or the ringer is. */
static void hand_over(struct queue *queue, const struct ep_op *op)
{
    struct ep_mailbox *mailbox = ((struct ep_cuda_ringer *)queue)->mailbox;

    if (__atomic_load_n(&queue->closing, __ATOMIC_RELAXED) || __atomic_load_n(&mailbox->closed, __ATOMIC_RELAXED))
        return;
    mailbox->op[0] = *op;
    __atomic_store_n(&mailbox->bell, ep_bell_of(0), __ATOMIC_RELEASE); /* partner is rings() */
    /* Acquire: partner is serve_one(). */
    while (__atomic_load_n(&mailbox->bell, __ATOMIC_ACQUIRE) != EP_BELL_DONE
           && !__atomic_load_n(&mailbox->closed, __ATOMIC_ACQUIRE)
           && !__atomic_load_n(&queue->closing, __ATOMIC_RELAXED))
        nap();
}

/* No context is switched here: it is all one who waits. */
static ep_status ring_open(uint32_t device, void *window, bool spins, struct ep_cuda_ringer **out,
                           struct ep_error *error)
{
    struct ep_cuda_ringer *ringer = calloc(1, sizeof *ringer);

    (void)device, (void)spins, (void)error;
    if (!ringer)
        abort();
    ringer->queue.run = hand_over;
    ringer->mailbox = &((struct ep_control *)cuda_fixture_host(window))->gpu.mailbox;
    pthread_mutex_lock(&lock);
    start_queue(&ringer->queue);
    pthread_mutex_unlock(&lock);
    *out = ringer;
    return EP_OK;
}

static ep_status ring(struct ep_cuda_ringer *ringer, const struct ep_op *op, void *stream, struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    put_or_capture(&ringer->queue, op, stream);
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static void ring_close(struct ep_cuda_ringer *ringer)
{
    if (!ringer)
        return;
    stop_queue(&ringer->queue);
    free(ringer);
}

/* ---- executor server: the server's half ------------------------------------------------------------- */

static bool rings(struct ep_cuda_serve *serve)
{
    /* Acquire: partner is hand_over(). */
    while (!(__atomic_load_n(&serve->mailbox->bell, __ATOMIC_ACQUIRE) & EP_BELL_RUNG)) {
        if (__atomic_load_n(&serve->ending, __ATOMIC_RELAXED))
            return false;
        nap();
    }
    return !__atomic_load_n(&serve->ending, __ATOMIC_RELAXED);
}

static void look(struct ep_cuda_serve *serve, struct ep_regions *regions)
{
    pthread_mutex_lock(&lock);
    *regions = serve->regions;
    serve->looked = serve->ended + 1;
    pthread_mutex_unlock(&lock);
}

static ep_status judge(const struct ep_cuda_serve *serve, const struct ep_regions *regions, const struct ep_op *op)
{
    struct ep_error why = EP_ERROR_INIT;
    const bool completes = op->kind == EP_OP_COMPLETE && op->handle < EP_MAX_HANDLES;
    const struct ep_op *sent = completes ? &serve->sent[op->handle] : op;

    if (ep_op_check_own(&serve->rank.map, regions, op, &why) != EP_OK)
        return EP_INVALID_ARGUMENT;
    if (op->kind <= EP_OP_COMBINE && op->mode != EP_MODE_LL)
        return EP_UNIMPLEMENTED;
    if (!sent->kind)
        return EP_FAILED_PRECONDITION;
    return ep_op_check_own(&serve->rank.map, regions, sent, &why);
}

static void execute(struct ep_cuda_serve *serve, const struct ep_regions *regions, struct ep_op *op)
{
    if (op->kind == EP_OP_COMPLETE) {
        serve->rank.half[op->handle] = serve->sent[op->handle];
        resolve(&serve->rank, regions, &serve->rank.half[op->handle]);
    } else if (op->flags & EP_OP_SEND_ONLY) {
        serve->sent[op->handle] = *op;
    }
    resolve(&serve->rank, regions, op);
    cpu_execute(&serve->rank, op);
}

static void serve_one(struct ep_cuda_serve *serve)
{
    struct ep_regions regions;
    struct ep_op op;
    ep_status status;

    if (!rings(serve))
        return;
    memcpy(&op, &serve->mailbox->op[0], sizeof op);
    look(serve, &regions);
    status = judge(serve, &regions, &op);
    if (status == EP_OK)
        execute(serve, &regions, &op);
    else
        cpu_refuse(&serve->rank, &op, status);
    __atomic_store_n(&serve->mailbox->bell, EP_BELL_DONE, __ATOMIC_RELEASE);
    pthread_mutex_lock(&lock);
    serve->ended++;
    pthread_mutex_unlock(&lock);
}

static void *run_serve(void *arg)
{
    struct ep_cuda_serve *serve = arg;

    pthread_mutex_lock(&lock);
    while (!serve->ending) {
        if (serve->passed == serve->posted) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        serve_one(serve);
        pthread_mutex_lock(&lock);
        serve->passed++;
        pthread_cond_broadcast(&changed);
    }
    serve->passed = serve->posted;
    serve->over = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static ep_status serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                            struct ep_error *error)
{
    struct ep_cuda_serve *serve = calloc(1, sizeof *serve);

    if (!serve)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to serve a rank");
    if (fill(options, &serve->rank, error) != EP_OK) {
        free(serve);
        return error->status;
    }
    serve->mailbox = &((struct ep_control *)(void *)serve->rank.window[options->rank])->gpu.mailbox;
    if (pthread_create(&serve->thread, NULL, run_serve, serve) != 0)
        abort();
    *out = serve;
    return EP_OK;
}

static ep_status ended(struct ep_error *error)
{
    return ep_error_set(error, EP_CANCELLED, "no op is served any more");
}

static ep_status serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&lock);
    if (serve->ending)
        status = ended(error);
    else if (serve->posted - serve->passed + ops > EP_CUDA_SERVE_OPS)
        status = ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%u ops more: at most %u wait", ops, EP_CUDA_SERVE_OPS);
    if (status == EP_OK) {
        serve->before = serve->posted;
        serve->posted += ops;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static ep_status serve_wait(struct ep_cuda_serve *serve, struct ep_error *error)
{
    bool ending;

    pthread_mutex_lock(&lock);
    while (serve->passed < serve->before)
        pthread_cond_wait(&changed, &lock);
    ending = serve->ending;
    pthread_mutex_unlock(&lock);
    return ending ? ended(error) : EP_OK;
}

static ep_status serve_region(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                              struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    serve->regions.n = EP_MAX_REGIONS;
    serve->regions.region[number] = *region;
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static ep_status serve_forget(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    serve->regions.region[number] = (struct ep_region){ 0 };
    *entry = serve->looked;
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static ep_status serve_forgotten(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error)
{
    bool over;

    pthread_mutex_lock(&lock);
    over = serve->ended >= entry;
    pthread_mutex_unlock(&lock);
    return over ? EP_OK : ep_error_set(error, EP_UNAVAILABLE, "an op that uses it still runs");
}

static ep_status serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error)
{
    const uint64_t end = ep_clock_ns() + timeout_ms * EP_NS_PER_MS;
    bool over = false;

    pthread_mutex_lock(&lock);
    __atomic_store_n(&serve->ending, true, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&changed);
    while (!(over = serve->over) && ep_clock_ns() < end) {
        pthread_mutex_unlock(&lock);
        nap();
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return over ? EP_OK
                : ep_error_set(error, EP_DEADLINE_EXCEEDED, "rank %u: an op still runs after %u ms", serve->rank.rank,
                               timeout_ms);
}

static void serve_close(struct ep_cuda_serve *serve)
{
    bool over;

    if (!serve)
        return;
    pthread_mutex_lock(&lock);
    over = serve->over;
    pthread_mutex_unlock(&lock);
    if (!over) {
        pthread_detach(serve->thread); /* it keeps its memory */
        return;
    }
    pthread_join(serve->thread, NULL);
    cpu_rank_fini(&serve->rank);
    free(serve);
}

/* ---- streams ---------------------------------------------------------------------------------------------- */

static ep_status stream_query(uint32_t device, void *stream, struct ep_error *error)
{
    bool busy;

    (void)device;
    pthread_mutex_lock(&lock);
    busy = queue_of(stream) != NULL;
    pthread_mutex_unlock(&lock);
    return busy ? ep_error_set(error, EP_UNAVAILABLE, "work is under way") : EP_OK;
}

static ep_status stream_sync(uint32_t device, void *stream, struct ep_error *error)
{
    (void)device, (void)error;
    drain(stream);
    return EP_OK;
}

static ep_status stream_captured(uint32_t device, void *stream, bool *is, struct ep_error *error)
{
    (void)device, (void)error;
    pthread_mutex_lock(&lock);
    *is = captured && capturing == stream;
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static void thread_relax(void)
{
}

/* Acquire: a word that a stream stored (move, its partner) says that something else is there. */
static void copy_word(uint8_t *to, const uint8_t *from)
{
    __atomic_store_n((uint64_t *)(void *)to, __atomic_load_n((const uint64_t *)(const void *)from, __ATOMIC_ACQUIRE),
                     __ATOMIC_SEQ_CST);
}

static void copy_half_word(uint8_t *to, const uint8_t *from)
{
    __atomic_store_n((uint32_t *)(void *)to, __atomic_load_n((const uint32_t *)(const void *)from, __ATOMIC_RELAXED),
                     __ATOMIC_RELAXED);
}

/*
 * Words, so that an op that looks at one (`from`, above all) sees the old or the new one; half of one may be last.
 * Rows are large and nobody looks at them meanwhile.
 */
static bool copy_words(void *to, const void *from, uint64_t bytes)
{
    const uint64_t word = sizeof(uint64_t), half = sizeof(uint32_t);
    uint64_t at = 0;

    if (!to || !from || bytes > WORDS_BYTES || ((uintptr_t)to | (uintptr_t)from) % word != 0 || bytes % half != 0)
        return false;
    for (; at + word <= bytes; at += word)
        copy_word((uint8_t *)to + at, (const uint8_t *)from + at);
    if (at < bytes)
        copy_half_word((uint8_t *)to + at, (const uint8_t *)from + at);
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

/* A GPU that does not answer: what is read of device d waits as long as there is the file $EP_CUDA_DEAF.d. */
static void wait_for_answer(uint32_t device)
{
    const char *name = getenv("EP_CUDA_DEAF");
    char file[PATH_MAX];

    if (!name)
        return;
    snprintf(file, sizeof file, "%s.%u", name, device);
    while (access(file, F_OK) == 0)
        usleep(1000);
}

/* A GPU that is lost: from the first look at device d on that finds the file $EP_CUDA_LOST.d. */
static bool is_lost(uint32_t device)
{
    const char *name = getenv("EP_CUDA_LOST");
    char file[PATH_MAX];

    if (!name)
        return false;
    snprintf(file, sizeof file, "%s.%u", name, device);
    if (access(file, F_OK) == 0)
        __atomic_fetch_or(&cuda_fixture.lost, 1u << device, __ATOMIC_RELAXED);
    return __atomic_load_n(&cuda_fixture.lost, __ATOMIC_RELAXED) >> device & 1;
}

static ep_status read_gpu(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                          struct ep_error *error)
{
    wait_for_answer(device);
    if (is_lost(device))
        return fixture->read(device, to, from, bytes, stream, error);
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

/* ---- copies that nobody waits for -------------------------------------------------------------------------- */

static bool copies(const struct queue *queue, const void *stream)
{
    return queue && !queue->run && ((const struct copier *)queue)->stream == stream;
}

/* Under the lock: the one of a stream, made when it is first asked for. */
static struct queue *copier_of(void *stream)
{
    struct copier *copier;

    for (uint32_t i = 0; i < QUEUES; i++)
        if (copies(queues[i], stream))
            return queues[i];
    copier = calloc(1, sizeof *copier);
    if (!copier)
        abort();
    copier->stream = stream;
    start_queue(&copier->queue);
    return &copier->queue;
}

static void stream_destroy(uint32_t device, void *stream)
{
    struct queue *copier = NULL;

    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < QUEUES; i++)
        if (copies(queues[i], stream))
            copier = queues[i];
    pthread_mutex_unlock(&lock);
    if (copier) {
        stop_queue(copier);
        free(copier);
    }
    fixture->stream_destroy(device, stream);
}

/* An address of now, in this process: GPU memory that goes while it is copied is a fault, as it is there. */
static void *resolved(const void *at)
{
    void *host = cuda_fixture_host(at);

    return host ? host : (void *)(uintptr_t)at;
}

static ep_status enqueue(void *stream, const struct move *m)
{
    pthread_mutex_lock(&lock);
    put(copier_of(stream), &(struct work){ .stream = stream, .move = *m });
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static ep_status copy(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream, struct ep_error *error)
{
    (void)device, (void)error;
    return enqueue(stream, &(struct move){ .to = resolved(to), .from = resolved(from), .bytes = bytes });
}

static ep_status store(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error)
{
    (void)device, (void)error;
    return enqueue(stream, &(struct move){ .to = resolved(to), .value = value });
}

/* Nothing is held up by it there: what copies does not wait for whoever looks. */
static ep_status marker_store(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream,
                              struct ep_error *error)
{
    (void)marker;
    return store(0, to, value, stream, error);
}

/* ---- marks and graphs ---------------------------------------------------------------------------------------- */

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
    struct queue *queue;
    struct mark *mark = event;

    (void)device, (void)error;
    pthread_mutex_lock(&lock);
    queue = queue_of(stream);
    if (queue)
        put(queue, &(struct work){ .stream = stream, .mark = mark });
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
    struct ep_cuda_graph *graph = calloc(1, sizeof *graph);

    (void)device;
    if (!graph)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a graph");
    pthread_mutex_lock(&capture);
    pthread_mutex_lock(&lock);
    captured = graph;
    capturing = stream;
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

static ep_status graph_end(uint32_t device, void *stream, struct ep_cuda_graph **out, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    pthread_mutex_lock(&lock);
    *out = captured;
    capturing = NULL;
    captured = NULL;
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&capture);
    return EP_OK;
}

static ep_status graph_launch(struct ep_cuda_graph *graph, void *stream, struct ep_error *error)
{
    (void)error;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < graph->n; i++)
        put(graph->op[i].queue, &(struct work){ .stream = stream, .op = graph->op[i].op });
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
    api.ring_open = ring_open;
    api.ring = ring;
    api.ring_close = ring_close;
    api.serve_open = serve_open;
    api.serve_post = serve_post;
    api.serve_wait = serve_wait;
    api.serve_region = serve_region;
    api.serve_forget = serve_forget;
    api.serve_forgotten = serve_forgotten;
    api.serve_end = serve_end;
    api.serve_close = serve_close;
    api.copy = copy;
    api.store = store;
    api.marker_store = marker_store;
    api.stream_destroy = stream_destroy;
    api.stream_query = stream_query;
    api.stream_sync = stream_sync;
    api.stream_captured = stream_captured;
    api.thread_relax = thread_relax;
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
