/*
 * Executor server on a GPU: the ops of an attached rank are run here.
 *
 * The worker's streams hand them over through the mailbox in the rank's window, in stream order (window.h).
 * The backend's streams wait there for the doorbell, which has to be prepared: a thread of the rank's keeps
 * two batches of ops ready, and sleeps until the first of them is used up.
 *
 * The end may have to wait for a kernel, so it happens on threads of the pool, a slice of time each, until
 * nothing runs.  Membership has ended what waits for peers by then.  What still runs after the group's bound
 * for such waits is given up: it keeps its memory, and the rank is stuck.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "ep_thread.h"
#include "team_cuda.h"

#define BATCH_OPS (EP_CUDA_SERVE_OPS / 2)
#define END_SLICE_MS 50u    /* the pool has few threads */
#define END_SLACK_MS 1000u  /* beyond the group's bound */

struct serve {
    struct cuda_watch watch;
    const struct ep_cuda_api *api;
    struct ep_cuda_serve *serve;
    struct cuda_regions *regions; /* the loop's thread */
    pthread_t thread; /* uses what is below, and `api` and `serve` */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopping;       /* under lock */
    bool exited;         /* under lock */
    bool abandoned;      /* under lock: the thread has not come back, and keeps this struct */
    struct ep_error why; /* under lock: of the thread, when it exited unasked */

    /* the pool's thread, while `ending` is queued; else the loop's */
    bool back;        /* `thread` has exited */
    bool ended, late;
    struct ep_error end_error;

    /* the loop's thread */
    uv_async_t news; /* the thread has exited */
    uv_work_t ending;
    uint64_t end_by_ns;
    bool told;
    void (*on_stopped)(void *user);
    void *user;
};

/* ---- the rank's thread -------------------------------------------------------------------- */

static bool stopping(struct serve *serve)
{
    bool now;

    pthread_mutex_lock(&serve->lock);
    now = serve->stopping;
    pthread_mutex_unlock(&serve->lock);
    return now;
}

static void exited(struct serve *serve, const struct ep_error *why)
{
    pthread_mutex_lock(&serve->lock);
    if (!serve->stopping)
        serve->why = *why;
    serve->exited = true;
    pthread_cond_broadcast(&serve->changed);
    if (!serve->abandoned)
        uv_async_send(&serve->news);
    pthread_mutex_unlock(&serve->lock);
}

static void *run(void *arg)
{
    struct serve *serve = arg;
    const struct ep_cuda_api *api = serve->api;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status;

    (void)ep_thread_runs_ops();
    nccl_serve_begins();
    status = api->serve_post(serve->serve, BATCH_OPS, &error);
    while (!status && !stopping(serve)) {
        status = api->serve_post(serve->serve, BATCH_OPS, &error);
        if (!status)
            status = api->serve_wait(serve->serve, &error);
    }
    exited(serve, &error);
    return NULL;
}

/* The GPU or the driver fails us: the worker must not wait for its ops. */
static void on_news(uv_async_t *async)
{
    struct serve *serve = async->data;
    struct ep_error why;

    pthread_mutex_lock(&serve->lock);
    why = serve->why;
    pthread_mutex_unlock(&serve->lock);
    if (!why.status || serve->told)
        return;
    serve->told = true;
    EP_ERROR("node", "a rank's ops cannot be run any more", EP_U("rank", serve->watch.options.rank),
             EP_U("epoch", serve->watch.team->epoch), EP_S("error", why.text));
    if (serve->watch.options.on_failed)
        serve->watch.options.on_failed(&why, serve->watch.options.user);
}

/* ---- the end, on the loop's thread ----------------------------------------------------------- */

static void free_serve(struct serve *serve)
{
    pthread_cond_destroy(&serve->changed);
    pthread_mutex_destroy(&serve->lock);
    free(serve);
}

static void on_news_closed(uv_handle_t *handle)
{
    struct serve *serve = handle->data;
    void (*on_stopped)(void *user) = serve->on_stopped;
    void *user = serve->user;

    if (serve->back)
        free_serve(serve);
    on_stopped(user);
}

static void on_watch_closed(struct cuda_watch *watch)
{
    struct serve *serve = (struct serve *)watch;

    pthread_mutex_lock(&serve->lock);
    serve->abandoned = !serve->back;
    pthread_mutex_unlock(&serve->lock);
    uv_close((uv_handle_t *)&serve->news, on_news_closed);
}

static void end(uv_work_t *work);

static void on_ended(uv_work_t *work, int cancelled)
{
    struct serve *serve = work->data;
    struct cuda_team *team = serve->watch.team;
    const uint32_t rank = serve->watch.options.rank;

    (void)cancelled; /* it never is */
    if (!serve->ended && !serve->late) {
        uv_queue_work(team->loop, &serve->ending, end, on_ended);
        return;
    }
    if (!serve->ended) {
        team->ranks[rank].stuck = true;
        EP_ERROR("node", "what the server ran for a rank does not end: its memory is not used again",
                 EP_U("rank", rank), EP_U("epoch", team->epoch), EP_S("error", serve->end_error.text));
    }
    cuda_regions_close(serve->regions, serve->ended);
    cuda_watch_stop(&serve->watch, on_watch_closed);
}

static void begin_end(void *user)
{
    struct serve *serve = user;

    serve->end_by_ns = ep_clock_ns() + (serve->watch.team->timeout_ms + END_SLACK_MS) * EP_NS_PER_MS;
    uv_queue_work(serve->watch.team->loop, &serve->ending, end, on_ended);
}

static void stop(struct ep_executor *executor, void (*on_stopped)(void *user), void *user)
{
    struct serve *serve = (struct serve *)executor;

    serve->on_stopped = on_stopped;
    serve->user = user;
    serve->told = true; /* nobody is left to be told of failures */
    pthread_mutex_lock(&serve->lock);
    serve->stopping = true;
    pthread_mutex_unlock(&serve->lock);
    cuda_regions_stop(serve->regions, begin_end, serve);
}

/* ---- the end, on a thread of the pool --------------------------------------------------------- */

static bool wait_exited(struct serve *serve, uint64_t until_ns)
{
    const struct timespec until = ep_clock_timespec(until_ns);
    bool now;

    pthread_mutex_lock(&serve->lock);
    while (!serve->exited && pthread_cond_timedwait(&serve->changed, &serve->lock, &until) != ETIMEDOUT)
        ;
    now = serve->exited;
    pthread_mutex_unlock(&serve->lock);
    return now;
}

static void end(uv_work_t *work)
{
    struct serve *serve = work->data;
    const uint64_t until_ns = ep_clock_ns() + END_SLICE_MS * EP_NS_PER_MS;
    const struct timespec until = ep_clock_timespec(until_ns);
    const ep_status status = serve->api->serve_end(serve->serve, END_SLICE_MS, &serve->end_error);

    serve->back = wait_exited(serve, until_ns);
    serve->ended = serve->back && !status;
    serve->late = ep_clock_ns() >= serve->end_by_ns;
    if (serve->back && (serve->ended || serve->late)) {
        pthread_join(serve->thread, NULL);
        serve->api->serve_close(serve->serve);
        if (serve->ended) /* else something of it still waits on the GPU */
            nccl_serve_ends();
    } else {
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
}

/* ---- the beginning ----------------------------------------------------------------------------- */

static bool refresh(struct ep_executor *executor, uint64_t since_ns)
{
    return cuda_watch_refresh(&((struct serve *)executor)->watch, since_ns);
}

static void add_region(struct ep_executor *executor, const struct ep_executor_region *region, ep_region_done_fn on_done,
                       void *user)
{
    cuda_regions_register(((struct serve *)executor)->regions, region, on_done, user);
}

static void drop_region(struct ep_executor *executor, uint32_t number, ep_region_done_fn on_done, void *user)
{
    cuda_regions_unregister(((struct serve *)executor)->regions, number, on_done, user);
}

static ep_status open_serve(struct serve *serve, struct cuda_team *team, const struct ep_executor_options *options,
                            struct ep_error *error)
{
    const struct cuda_rank *r = &team->ranks[options->rank];
    void **windows = calloc(team->n, sizeof *windows);
    const struct ep_cuda_rank_options cuda = {
        .device = r->ordinal,
        .rank = options->rank,
        .map = team->map,
        .placement = team->placement,
        .windows = windows,
        .state = cuda_state(team, options->rank),
        .max_sms = options->max_sms,
        .max_ht_sms = options->max_ht_sms,
        .net = team->span != NULL,
        .polls = options->polls,
    };

    if (!windows)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u windows", team->n);
    for (uint32_t i = 0; i < team->n; i++)
        windows[i] = team->ranks[i].window;

    ep_status status = team->api->serve_open(&cuda, &serve->serve, error);

    free(windows);
    return status ? ep_error_prefix(error, "the kernels of rank %u", options->rank) : EP_OK;
}

static void init_lock(struct serve *serve)
{
    ep_clock_condition(&serve->changed);
    pthread_mutex_init(&serve->lock, NULL);
}

static int start_thread(struct serve *serve, uint32_t rank)
{
    char name[16];

    snprintf(name, sizeof name, "ep-rank-%u", rank % 10000u);
    return ep_thread_start(&serve->thread, name, run, serve);
}

static void on_unused_closed(uv_handle_t *handle)
{
    free_serve(handle->data);
}

/* Nothing has been posted, so there is nothing to wait for. */
static void close_unused(struct serve *serve)
{
    struct ep_error ignored = EP_ERROR_INIT;

    (void)serve->api->serve_end(serve->serve, 0, &ignored);
    serve->api->serve_close(serve->serve);
}

static ep_status make(struct cuda_team *team, const struct ep_executor_options *options, struct serve **out,
                      struct ep_error *error)
{
    struct serve *serve = calloc(1, sizeof *serve);

    if (!serve)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an executor");
    serve->api = team->api;
    init_lock(serve);
    serve->news.data = serve->ending.data = serve;

    ep_status status = open_serve(serve, team, options, error);

    if (status) {
        free_serve(serve);
        return status;
    }

    int rc = uv_async_init(team->loop, &serve->news, on_news);

    if (rc == 0) {
        *out = serve;
        return EP_OK;
    }
    close_unused(serve);
    free_serve(serve);
    return ep_error_set(error, EP_IO, "executor of rank %u: %s", options->rank, uv_strerror(rc));
}

static ep_status set_going(struct serve *serve, struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    serve->regions = cuda_regions_open(team, rank, serve->serve);
    if (!serve->regions)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an executor");
    errno = start_thread(serve, rank);
    if (errno == 0)
        return EP_OK;
    ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "thread for the ops of rank %u", rank);
    cuda_regions_close(serve->regions, true);
    return EP_RESOURCE_EXHAUSTED;
}

ep_status ep_team_cuda_serve(struct cuda_team *team, const struct ep_executor_options *options,
                             struct ep_executor **out, struct ep_error *error)
{
    static const struct ep_executor_ops ops = {
        .refresh = refresh, .stop = stop, .add_region = add_region, .drop_region = drop_region
    };
    struct serve *serve = NULL;
    ep_status status = make(team, options, &serve, error);

    if (status)
        return status;
    serve->watch.base.ops = &ops;
    status = set_going(serve, team, options->rank, error);
    if (status) {
        close_unused(serve);
        uv_close((uv_handle_t *)&serve->news, on_unused_closed);
        return status;
    }
    cuda_watch_start(&serve->watch, team, options);
    *out = &serve->watch.base;
    return EP_OK;
}
