/*
 * Executor server: the server's half of a mailbox.  window.h has the hand-over, ring.c the worker's half, ll_serve.cu
 * the kernels.
 *
 * The server waits with operations of its stream, which the GPU's front end looks at.  So does the worker's stream,
 * unless both work through an MPS server: a kernel that waited for another process's could keep it off the GPU for a
 * whole time slice, as contexts take turns where there is no MPS.  Where there is one, the server may be asked to have a
 * warp look (ll_poll.cu), as it does for LL ops that are expected.
 *
 * A kernel that is told by value what to do is faster than one that finds out.  So when the ops of a worker repeat
 * themselves (forecast.h), most entries have the kernel for the op that is expected.  It executes others of the same form as
 * well.  When an op of another form comes, or one for HT, the kernel leaves it to the entry behind it, and so on until one is
 * for this op.  FIND_OUT_EVERY entries there is one for any.  An entry that leaves its op costs 4.6 us on an H200.  At most
 * EP_CUDA_SERVE_OPS entries stand in the stream, so a worker that begins to do something else has
 * EP_CUDA_SERVE_OPS / FIND_OUT_EVERY ops at most that wait for FIND_OUT_EVERY - 1 entries each; what is posted after them
 * expects nothing until ops repeat themselves again.
 *
 * In a group that has HT, a kernel for HT ops stands behind each that finds out.
 *
 * ## What a process that serves may ask of the driver
 * A stream of it waits for a doorbell nearly all the time, for as long as a worker likes.  Whatever waits for all
 * of a context's work waits as long: cuCtxSynchronize, cuMemFree, unloading a module, work on the default
 * stream, and loading a kernel that was not used before.  The last one is for all devices at once, with the locks of
 * their contexts held: ops of two ranks that wait for each other may then wait for what cannot be posted.  So
 *   - all kernels that any group may want are loaded before the first wait is enqueued (load_kernels);
 *   - memory is VMM's: cuMemCreate, cuMemMap, cuMemSetAccess and cuMemUnmap do not wait for streams.  What a
 *     serve has beside its options is kept for the next one, and never freed;
 *   - all streams are non-blocking ones, and copies are waited for on their own stream;
 *   - a context has room for 35 streams, or for as many as it had at once; to make more the driver waits for all of
 *     its work, with the lock of the context held (seen on H200, driver 580, whatever their priorities and with 16
 *     or 32 hardware queues).  NCCL makes streams for each communicator, so there is room before the first wait;
 *   - streams that share a hardware queue wait for each other.  There are CUDA_DEVICE_MAX_CONNECTIONS of them
 *     (ep_cuda.h: 32), which the driver gives out as streams are made.  Streams that wait are made once and
 *     kept, and only so many that some queues are left for others.
 */
#include "cuda_private.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "rank_base.h"

#define FIND_OUT_EVERY 31u /* odd, so that it is not always a combine that finds out */
#define QUEUES_LEFT 4u /* for the module's own stream, and what else the process makes */
/* That a warp looks at the doorbell.  FIND_OUT_EVERY of them may do so one after the other before the stream does, also
 * when this process is killed: then MPS lets what it had posted run on, but takes no new process on if that is not over soon
 * (seen on H200, driver 580: 75 ms are, 300 ms are not). */
#define POLL_NS 1000000u
#define RING_US 100u   /* between two rings at the end */
#define STREAMS 512u   /* that a context has room for, before the first of them waits */

/* What outlives a serve.  Of one device; in use by one serve or free. */
struct place {
    struct place *next; /* free */
    CUstream stream;
    CUevent event[2];
    struct ep_cuda_memory *memory;
};

static const struct ep_cuda_kernels near_kernels = {
    .prepare = ep_ll_serve_prepare,
    .one = ep_ll_serve_one,
    .expect = ep_ll_expect,
    .ht_prepare = ep_ht_serve_prepare,
    .ht_one = ep_ht_serve_one,
    .ht_expect = ep_ht_expect,
};

struct ep_cuda_serve {
    uint32_t device, shared_bytes, ht_shared_bytes;
    const struct ep_cuda_kernels *kernels;
    const struct ep_cuda_context *context;
    struct place *place;
    struct ep_ll_serve ll; /* its number: of the last entry that was posted */
    struct ep_ll_rank rank;
    struct ep_ht_rank ht;
    struct ep_layout_map map;
    struct ep_forecast_log log; /* of whoever posts, as the next two */
    uint32_t period, spins;
    bool may_poll;
    CUdeviceptr bell, closing;

    pthread_mutex_t lock; /* of what follows; held while ops are enqueued, which does not wait */
    uint32_t posts;       /* so far: event[n % 2] stands behind post n */
    uint32_t last, waiting; /* ops: of the last post; of all that may not be over */
    bool ending, over;
};

/* ---- places ------------------------------------------------------------------------ */

static pthread_mutex_t places_lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *places_free[EP_CUDA_MAX_DEVICES];
static uint32_t places_made[EP_CUDA_MAX_DEVICES];

/* What the driver was told when it started, if nobody has changed it since. */
static uint32_t hardware_queues(void)
{
    const char *told = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    const long n = told ? strtol(told, NULL, 10) : 8;

    return n < 1 ? 1 : n > 32 ? 32 : (uint32_t)n;
}

static ep_status make_events(struct place *place, uint32_t device, struct ep_error *error)
{
    for (uint32_t i = 0; i < 2; i++) {
        const CUresult result = cuEventCreate(&place->event[i], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING);

        if (result != CUDA_SUCCESS)
            return ep_cuda_fail(error, result, "cuEventCreate on device %u", device);
    }
    return EP_OK;
}

/* The device's context is current. */
static ep_status fill_place(struct place *place, uint32_t device, struct ep_error *error)
{
    ep_status status = ep_cuda_memory_create(device, sizeof(struct ep_ll_desk), &place->memory, error);

    if (status != EP_OK)
        return status;
    status = make_events(place, device, error);
    if (status == EP_OK)
        status = ep_cuda_stream_make(device, &place->stream, error);
    if (status == EP_OK)
        return EP_OK;
    for (uint32_t i = 0; i < 2; i++)
        if (place->event[i])
            cuEventDestroy(place->event[i]);
    ep_cuda_memory_destroy(place->memory);
    return status;
}

/* Streams that are made and given back leave their room, and 512 take a few ms. */
static ep_status make_room(uint32_t device, struct ep_error *error)
{
    CUstream *streams = calloc(STREAMS, sizeof(CUstream));
    ep_status status = EP_OK;
    uint32_t n = 0;

    if (!streams)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to serve a rank");
    while (!status && n < STREAMS) {
        status = ep_cuda_stream_make(device, &streams[n], error);
        n += !status;
    }
    while (n > 0)
        cuStreamDestroy(streams[--n]);
    free(streams);
    return status;
}

/* For groups to come too: with another mode, or on several nodes.  Whoever needs one that cannot be loaded hears of it when
 * it sizes its grid. */
static void load_kernels(void)
{
    uint32_t blocks;

    (void)ep_ll_poll_prepare();
    (void)near_kernels.prepare(0, false, &blocks);
    (void)near_kernels.ht_prepare(0, false, &blocks);
    (void)ep_cuda_net_kernels.prepare(0, false, &blocks);
    (void)ep_cuda_net_kernels.ht_prepare(0, false, &blocks);
}

/* Under the lock. */
static ep_status make_place(uint32_t device, struct place **out, struct ep_error *error)
{
    const uint32_t queues = hardware_queues(), most = queues > QUEUES_LEFT ? queues - QUEUES_LEFT : 0;
    struct place *place;

    if (places_made[device] >= most)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "device %u serves %u ranks already: with CUDA_DEVICE_MAX_CONNECTIONS=%u, which is 32 at "
                            "most, one process can serve %u on a GPU", device, places_made[device], queues, most);
    if (places_made[device] == 0) { /* none of its streams waits yet */
        load_kernels();
        if (make_room(device, error) != EP_OK)
            return error->status;
    }
    place = calloc(1, sizeof *place);
    if (!place)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to serve a rank");
    if (fill_place(place, device, error) != EP_OK) {
        free(place);
        return error->status;
    }
    places_made[device]++;
    *out = place;
    return EP_OK;
}

static ep_status take_place(uint32_t device, struct place **out, struct ep_error *error)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&places_lock);
    if (places_free[device]) {
        *out = places_free[device];
        places_free[device] = (*out)->next;
    } else {
        status = make_place(device, out, error);
    }
    pthread_mutex_unlock(&places_lock);
    return status;
}

static void give_place(uint32_t device, struct place *place)
{
    pthread_mutex_lock(&places_lock);
    place->next = places_free[device];
    places_free[device] = place;
    pthread_mutex_unlock(&places_lock);
}

/* ---- open and close -------------------------------------------------------------------- */

/* The kernel, and how many blocks of it there are.  The device's context is current. */
static ep_status size_grid(const struct ep_cuda_rank_options *o, struct ep_cuda_serve *serve, struct ep_error *error)
{
    struct ep_ll_rank *rank = &serve->rank;
    struct ep_cuda_share share;
    uint32_t blocks = 0;
    ep_status status = ep_cuda_rank_share(o, &share, error);
    int result;

    if (status != EP_OK)
        return status;
    result = serve->kernels->prepare(serve->shared_bytes, share.shares, &blocks);
    status = ep_cuda_rank_runs(o, result, blocks, error);
    /* One multiprocessor is left to the worker's kernel that waits: it may have split its memory otherwise than ours
     * need it, and goes only when all of our blocks have come. */
    rank->sms = share.sms > 1 ? share.sms - 1 : share.sms;
    rank->dispatch_blocks = rank->combine_blocks = ep_cuda_share_blocks(&share, rank->sms, blocks);
    return status;
}

/* And of the one for HT ops, on as many multiprocessors or on less.  None, if the group has no HT. */
static ep_status size_ht_grid(const struct ep_cuda_rank_options *o, struct ep_cuda_serve *serve, struct ep_error *error)
{
    struct ep_ht_rank *ht = &serve->ht;
    struct ep_cuda_share share;
    uint32_t blocks = 0;
    ep_status status;
    int result;

    if (!(o->map->limits.modes >> EP_MODE_HT & 1))
        return EP_OK;
    status = ep_cuda_rank_share(o, &share, error);
    if (status != EP_OK)
        return status;
    result = serve->kernels->ht_prepare(serve->ht_shared_bytes, share.shares, &blocks);
    status = ep_cuda_rank_runs(o, result, blocks, error);
    ht->sms = ep_cuda_rank_ht_sms(o, serve->rank.sms);
    ht->dispatch_blocks = ht->combine_blocks = ep_cuda_share_blocks(&share, ht->sms, blocks);
    return status;
}

static void describe(const struct ep_cuda_rank_options *o, struct ep_cuda_serve *serve)
{
    struct ep_ll_serve *ll = &serve->ll;
    struct ep_ll_desk *desk = ep_cuda_memory_at(serve->place->memory);

    serve->map = *o->map;
    ll->ht_blocks = serve->ht.dispatch_blocks;
    ll->mailbox = &((struct ep_control *)o->windows[o->rank])->gpu.mailbox;
    ll->desk = desk;
    serve->bell = (CUdeviceptr)&ll->mailbox->bell;
    serve->closing = (CUdeviceptr)&desk->closing;
    serve->rank.base.arrived = &ll->mailbox->through;
}

static ep_status lay_desk(const struct ep_cuda_rank_options *o, const struct ep_cuda_serve *serve,
                          struct ep_error *error)
{
    struct ep_ll_desk *desk = calloc(1, sizeof *desk);
    ep_status status;

    if (!desk)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to serve a rank");
    desk->rank = serve->rank;
    desk->ht.rank = serve->ht;
    desk->limits = o->map->limits;
    desk->arena = o->map->arena;
    status = ep_cuda_write(o->device, serve->ll.desk, desk, sizeof *desk, NULL, error);
    free(desk);
    return status;
}

/* The device's context is current. */
static ep_status set_up(const struct ep_cuda_rank_options *o, struct ep_cuda_serve *serve, struct ep_error *error)
{
    ep_status status;

    ep_cuda_rank_base(o, &serve->rank);
    ep_cuda_rank_ht_base(o, &serve->rank.base, &serve->ht);
    status = size_grid(o, serve, error);
    if (status == EP_OK)
        status = size_ht_grid(o, serve, error);
    if (status != EP_OK)
        return status;
    status = take_place(o->device, &serve->place, error);
    if (status != EP_OK)
        return status;
    describe(o, serve);
    status = lay_desk(o, serve, error);
    if (status != EP_OK)
        give_place(o->device, serve->place);
    return status;
}

ep_status ep_cuda_serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                             struct ep_error *error)
{
    struct ep_error unused = EP_ERROR_INIT;
    struct ep_cuda_serve *serve;
    ep_status status;

    error = error ? error : &unused;
    status = ep_cuda_rank_check(options, error);
    if (status != EP_OK)
        return status;
    serve = calloc(1, sizeof *serve);
    if (!serve)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to serve a rank");
    serve->device = options->device;
    serve->kernels = options->net ? &ep_cuda_net_kernels : &near_kernels;
    serve->may_poll = options->polls && !options->net; /* between nodes an op takes far longer than a look */
    serve->shared_bytes = (uint32_t)ep_device_shared_bytes(&options->map->limits);
    serve->ht_shared_bytes = ep_ht_served_bytes((uint32_t)ep_device_ht_shared_bytes(&options->map->limits));
    status = ep_cuda_enter(options->device, &serve->context, error);
    if (status != EP_OK)
        goto free_serve;
    status = set_up(options, serve, error);
    ep_cuda_leave();
    if (status != EP_OK)
        goto free_serve;
    pthread_mutex_init(&serve->lock, NULL);
    *out = serve;
    return EP_OK;

free_serve:
    free(serve);
    return status;
}

void ep_cuda_serve_close(struct ep_cuda_serve *serve)
{
    if (!serve || !serve->over) /* a kernel that still runs uses the place; so little can be lost with it */
        return;
    give_place(serve->device, serve->place);
    pthread_mutex_destroy(&serve->lock);
    free(serve);
}

/* ---- serving --------------------------------------------------------------------------- */

/* What the worker has rung for lately says what it will ring for. */
static ep_status look_ahead(struct ep_cuda_serve *serve, struct ep_error *error)
{
    ep_status status;

    if (serve->ll.number == 0)
        return EP_OK;
    status = ep_cuda_read(serve->device, &serve->log, &serve->ll.desk->log, sizeof serve->log, NULL, error);
    if (status == EP_OK && serve->may_poll)
        status = ep_cuda_read(serve->device, &serve->spins, &serve->ll.mailbox->spins, sizeof serve->spins, NULL, error);
    if (status == EP_OK)
        serve->period = ep_forecast_period(&serve->log);
    return status;
}

/* The op that is expected of the entry that is posted now, if a kernel can be told of it; or NULL.  It is judged here: what
 * was copied of the log may be parts of two ops. */
static const struct ep_forecast_op *expected(const struct ep_cuda_serve *serve)
{
    const struct ep_forecast_op *at = ep_forecast_of(&serve->log, serve->period, serve->ll.number);
    struct ep_error ignored = EP_ERROR_INIT;

    if (serve->ll.number % FIND_OUT_EVERY == 0 || !at || at->place >= EP_MAILBOX_OPS
        || (at->op.kind != EP_OP_DISPATCH && at->op.kind != EP_OP_COMBINE)
        || ep_op_check(&serve->map, &at->op, &ignored) != EP_OK)
        return NULL;
    if (at->op.mode == EP_MODE_HT)
        return serve->ll.ht_blocks > 0 && ep_ht_can_reach(&at->op) ? at : NULL;
    return at;
}

static int launch_ll(const struct ep_cuda_serve *serve, const struct ep_forecast_op *at, CUstream stream)
{
    struct ep_ll_expected e = { .args = serve->rank.base, .at = *at, .serve = serve->ll };
    int failed = 0;

    ep_ll_fill(&serve->rank, NULL, &at->op, false, &e.args);
    if (serve->ll.poll_ns)
        failed = ep_ll_poll(&e, stream);
    return failed ? failed : serve->kernels->expect(&e, serve->shared_bytes, stream);
}

static int launch_ht(const struct ep_cuda_serve *serve, const struct ep_forecast_op *at, CUstream stream)
{
    struct ep_ht_expected e = { .args = serve->ht.base, .at = *at, .serve = serve->ll };

    ep_ht_fill(&serve->ht, NULL, &at->op, &e.args);
    return serve->kernels->ht_expect(&e, serve->ht_shared_bytes, stream);
}

/* For any op. */
static int launch_any(const struct ep_cuda_serve *serve, CUstream stream)
{
    const uint32_t blocks = serve->rank.dispatch_blocks;
    const int failed = serve->kernels->one(&serve->ll, blocks, serve->shared_bytes, stream);

    if (failed || serve->ll.ht_blocks == 0)
        return failed;
    return serve->kernels->ht_one(&serve->ll, serve->ht_shared_bytes, stream);
}

/* What is done when the doorbell rings. */
static int launch(const struct ep_cuda_serve *serve, const struct ep_forecast_op *at, CUstream stream)
{
    if (!at)
        return launch_any(serve, stream);
    return at->op.mode == EP_MODE_HT ? launch_ht(serve, at, stream) : launch_ll(serve, at, stream);
}

/* A worker without MPS would take turns with the warp; that it spins is its word that it has MPS. */
static bool polls(const struct ep_cuda_serve *serve, const struct ep_forecast_op *at)
{
    return serve->may_poll && serve->spins && at && at->op.mode != EP_MODE_HT;
}

/* Under the lock; the device's context is current. */
static ep_status post_one(struct ep_cuda_serve *serve, struct ep_error *error)
{
    const CUstream stream = serve->place->stream;
    const struct ep_forecast_op *at;
    CUresult result = CUDA_SUCCESS;

    serve->ll.number++;
    at = expected(serve);
    serve->ll.ahead_polls = serve->ll.poll_ns > 0;
    serve->ll.poll_ns = polls(serve, at) ? POLL_NS : 0;
    if (!serve->ll.poll_ns)
        result = cuStreamWaitValue32(stream, serve->bell, EP_BELL_RUNG, CU_STREAM_WAIT_VALUE_AND);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuStreamWaitValue32 on device %u, to wait for ops", serve->device);
    return ep_cuda_launched(error, serve->device, launch(serve, at, stream));
}

/* Under the lock; the device's context is current. */
static ep_status enqueue(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    CUresult result;

    for (uint32_t i = 0; i < ops; i++)
        if (post_one(serve, error) != EP_OK)
            return error->status;
    result = cuEventRecord(serve->place->event[serve->posts % 2], serve->place->stream);
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventRecord on device %u", serve->device);
    return EP_OK;
}

static ep_status ended(struct ep_error *error)
{
    return ep_error_set(error, EP_CANCELLED, "no op is served any more");
}

ep_status ep_cuda_serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    ep_status status = look_ahead(serve, error);

    if (status == EP_OK)
        status = ep_cuda_enter(serve->device, NULL, error);
    if (status != EP_OK)
        return status;
    pthread_mutex_lock(&serve->lock);
    if (serve->ending)
        status = ended(error);
    else if (ops > EP_CUDA_SERVE_OPS - serve->waiting)
        status = ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%u ops more than %u that wait: at most %u do", ops,
                              serve->waiting, EP_CUDA_SERVE_OPS);
    else
        status = enqueue(serve, ops, error);
    if (status == EP_OK) {
        serve->posts++;
        serve->last = ops;
        serve->waiting += ops;
    }
    pthread_mutex_unlock(&serve->lock);
    ep_cuda_leave();
    return status;
}

/* The event of the post before the last; NULL when there was none. */
static CUevent event_before(struct ep_cuda_serve *serve)
{
    CUevent event;

    pthread_mutex_lock(&serve->lock);
    event = serve->posts >= 2 ? serve->place->event[serve->posts % 2] : NULL;
    pthread_mutex_unlock(&serve->lock);
    return event;
}

ep_status ep_cuda_serve_wait(struct ep_cuda_serve *serve, struct ep_error *error)
{
    const CUevent event = event_before(serve);
    ep_status status = ep_cuda_enter(serve->device, NULL, error);
    CUresult result = CUDA_SUCCESS;

    if (status != EP_OK)
        return status;
    if (event)
        result = cuEventSynchronize(event);
    ep_cuda_leave();
    if (result != CUDA_SUCCESS)
        return ep_cuda_fail(error, result, "cuEventSynchronize on device %u, while ops are served", serve->device);
    pthread_mutex_lock(&serve->lock);
    serve->waiting = serve->last;
    status = serve->ending ? ended(error) : EP_OK;
    pthread_mutex_unlock(&serve->lock);
    return status;
}

/* ---- regions ------------------------------------------------------------------------------ */

static ep_status write_word(struct ep_cuda_serve *serve, void *to, uint64_t word, struct ep_error *error)
{
    return ep_cuda_write(serve->device, to, &word, sizeof word, NULL, error);
}

/*
 * An op may look while this goes on, at both words at once.  As long as there are no bytes it does not follow the
 * start, so that comes first.  Half of a word that was 0 is not more than all of it.
 */
ep_status ep_cuda_serve_region(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                               struct ep_error *error)
{
    struct ep_region *entry = &serve->ll.desk->region[number];
    ep_status status = write_word(serve, &entry->start, (uint64_t)(uintptr_t)region->start, error);

    return status == EP_OK ? write_word(serve, &entry->bytes, region->bytes, error) : status;
}

/* Dekker; partner: take_regions() of ll_take.cuh. */
ep_status ep_cuda_serve_forget(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error)
{
    struct ep_ll_desk *desk = serve->ll.desk;
    ep_status status = write_word(serve, &desk->region[number].bytes, 0, error);

    return status == EP_OK ? ep_cuda_read(serve->device, entry, &desk->looked, sizeof *entry, NULL, error) : status;
}

ep_status ep_cuda_serve_forgotten(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error)
{
    uint64_t ended;
    const uint64_t *at = &serve->ll.desk->log.entry;
    ep_status status = ep_cuda_read(serve->device, &ended, at, sizeof ended, NULL, error);

    if (status == EP_OK && ended < entry)
        return ep_error_set(error, EP_UNAVAILABLE, "rank %u on device %u: an op that uses it still runs",
                            serve->rank.base.rank, serve->device);
    return status;
}

/* ---- the end ----------------------------------------------------------------------------- */

/*
 * Entries that see `closing` leave without a word.  The worker can clear the doorbell, so it is rung until the
 * stream is empty, in a way that is not taken for the worker's, which may have announced an op.  The module's own stream
 * holds nothing that waits.  What it has still to write of this is waited for: the doorbell may be another serve's next, or
 * not be mapped any more.
 */
static ep_status ring_out(struct ep_cuda_serve *serve, uint64_t until_ns, struct ep_error *error)
{
    const CUstream own = serve->context->stream;
    CUresult result = cuStreamWriteValue32(own, serve->closing, 1, CU_STREAM_WRITE_VALUE_DEFAULT);

    while (result == CUDA_SUCCESS) {
        result = cuStreamQuery(serve->place->stream);
        if (result != CUDA_ERROR_NOT_READY)
            break;
        if (ep_clock_ns() > until_ns)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "rank %u on device %u: an op still runs",
                                serve->rank.base.rank, serve->device);
        result = cuStreamWriteValue32(own, serve->bell, EP_BELL_CLOSING, CU_STREAM_WRITE_VALUE_DEFAULT);
        usleep(RING_US);
    }
    if (result == CUDA_SUCCESS)
        result = cuStreamSynchronize(own);
    return result == CUDA_SUCCESS ? EP_OK
                                  : ep_cuda_fail(error, result, "the end of serving rank %u on device %u",
                                                 serve->rank.base.rank, serve->device);
}

ep_status ep_cuda_serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error)
{
    const uint64_t until_ns = ep_clock_ns() + timeout_ms * EP_NS_PER_MS;
    ep_status status = ep_cuda_enter(serve->device, NULL, error);

    if (status != EP_OK)
        return status;
    pthread_mutex_lock(&serve->lock);
    serve->ending = true; /* nothing is posted from here on */
    pthread_mutex_unlock(&serve->lock);
    status = ring_out(serve, until_ns, error);
    ep_cuda_leave();
    pthread_mutex_lock(&serve->lock);
    serve->over = status == EP_OK;
    pthread_mutex_unlock(&serve->lock);
    return status;
}
