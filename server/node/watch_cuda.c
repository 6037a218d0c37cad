/*
 * Kernels, whoever launches them, count in the rank's state and report in its window.  The server reads both
 * every second, and when somebody asks, adds what is new to the rank's counters and tells of an op that timed
 * out.  The worker can write them too: what is read decides nothing, but for its own loads (loads_cuda.c) where an
 * operator asks for a placement by these.
 *
 * For a worker that runs its own ops that is all the server does.
 *
 * A GPU, or its driver, may not answer for a while, or ever.  So a look, which is all that is read at a time, has a
 * thread of its own, and the loop's takes what it has brought, all of it or nothing.  There is one of a rank at most: one
 * that does not come back costs the rank its figures.  A watch that stops gives it up in the end.  Then it still
 * reads what it was begun for, so team and windows are kept until it is back (ep_team_stuck()), and the rank's next watch
 * has to wait for it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "ep_thread.h"
#include "team_cuda.h"

#define LOOK_MS 1000u
#define LATE_MS 5000u /* the driver may well be busy for seconds, giving back memory */
#define MODES   2     /* LL, HT */

struct cuda_look {
    /* the loop's thread */
    struct cuda_watch *watch; /* NULL: nobody waits for it any more */
    uint64_t began_ns;
    bool told; /* that it is late */

    /* what it reads, and what it brings: its own thread's until it is over */
    const struct cuda_team *team; /* what of it does not change while it is there */
    uint32_t rank;
    struct ep_device_counters counters[MODES][EP_DEVICE_PARTS];
    struct ep_device_report report; /* its beginning */
    struct cuda_sample sample[MODES];
    struct ep_error error;
    uint32_t over; /* atomic */
};

static const enum ep_op_class classes[MODES][EP_DEVICE_PARTS] = {
    { [EP_DEVICE_DISPATCH] = EP_CLASS_LL_DISPATCH, [EP_DEVICE_COMBINE] = EP_CLASS_LL_COMBINE },
    { [EP_DEVICE_DISPATCH] = EP_CLASS_HT_DISPATCH, [EP_DEVICE_COMBINE] = EP_CLASS_HT_COMBINE },
};

/* ---- counters ----------------------------------------------------------------------- */

/* Relaxed, as the readers are; a counter that went back was written by somebody else and adds nothing. */
static void add_new(uint64_t *sum, uint64_t now, uint64_t before)
{
    if (now > before)
        __atomic_store_n(sum, __atomic_load_n(sum, __ATOMIC_RELAXED) + (now - before), __ATOMIC_RELAXED);
}

static void count(struct ep_op_counters *sum, const struct ep_device_counters *now,
                  const struct ep_device_counters *before)
{
    add_new(&sum->count, now->count, before->count);
    add_new(&sum->errors, now->errors, before->errors);
    add_new(&sum->timeouts, now->timeouts, before->timeouts);
    add_new(&sum->tokens, now->tokens, before->tokens);
    add_new(&sum->wire_bytes, now->wire_bytes, before->wire_bytes);
    add_new(&sum->busy_ns, now->busy_ns, before->busy_ns);
    add_new(&sum->wait_ns, now->wait_ns, before->wait_ns);
    if (now->max_wait_ns > __atomic_load_n(&sum->max_wait_ns, __ATOMIC_RELAXED))
        __atomic_store_n(&sum->max_wait_ns, now->max_wait_ns, __ATOMIC_RELAXED);
}

static void tell_timeout(struct cuda_watch *watch, const struct ep_device_report *report)
{
    const uint32_t part = report->failure_op == EP_DEVICE_COMBINE ? EP_DEVICE_COMBINE : EP_DEVICE_DISPATCH;
    const struct ep_engine_timeout timeout = {
        .number = report->failure.number,
        .waited_us = report->failure.wait_ns / EP_NS_PER_US,
        .time_us = ep_clock_wall_us(),
        .op_class = classes[report->failure.mode == EP_MODE_HT][part],
        .wait_phase = report->failure.wait_phase,
        .late_rank = report->failure.late_rank,
    };

    if (report->failure.status != EP_TIMEOUT || timeout.late_rank >= watch->team->n)
        return; /* none, or none that a kernel writes */
    if (watch->options.on_timeout)
        watch->options.on_timeout(&timeout, watch->options.user);
}

/* Those of one mode; *seen: what has been counted already. */
static void take_counters(struct cuda_watch *watch, const struct ep_device_counters *now, const enum ep_op_class *of,
                          struct ep_device_counters *seen)
{
    for (int part = 0; part < EP_DEVICE_PARTS; part++) {
        if (now[part].timeouts > seen[part].timeouts)
            ep_team_distrust(&watch->team->base); /* the way to another node may be broken */
        count(&watch->options.counters->op[of[part]], &now[part], &seen[part]);
        add_new(&watch->options.counters->dropped_routes, now[part].dropped, seen[part].dropped);
        seen[part] = now[part];
    }
}

/*
 * The kernel keeps the first failure since the worker has taken one.  It is the worker's: were it taken here too, an
 * op in a graph that is launched again could overwrite its record before the worker has looked.
 */
static void take_failure(struct cuda_watch *watch, const struct ep_device_report *report)
{
    if (report->failure.sequence == watch->told)
        return;
    watch->told = report->failure.sequence;
    tell_timeout(watch, report);
}

/* ---- a look: its thread -------------------------------------------------------------- */

static bool has_ht(const struct cuda_team *team)
{
    return team->map->limits.modes >> EP_MODE_HT & 1;
}

static ep_status read_counters(struct cuda_look *look)
{
    const struct ep_device_state *state = cuda_state(look->team, look->rank);
    ep_status status = cuda_read(look->team, look->rank, look->counters[false], state->counters,
                                 sizeof look->counters[false], &look->error);

    if (!status && has_ht(look->team))
        status = cuda_read(look->team, look->rank, look->counters[true], state->ht_counters,
                           sizeof look->counters[true], &look->error);
    return status;
}

static ep_status read_report(struct cuda_look *look)
{
    const struct ep_control *control = (const void *)look->team->ranks[look->rank].window;

    return cuda_read(look->team, look->rank, &look->report, &control->gpu.report,
                     offsetof(struct ep_device_report, records), &look->error);
}

static ep_status read_loads(struct cuda_look *look)
{
    ep_status status = EP_OK;

    for (int mode = 0; !status && mode < MODES; mode++) {
        look->sample[mode].dispatches = look->counters[mode][EP_DEVICE_DISPATCH].count;
        status = cuda_loads_read(look->team, look->rank, mode, &look->sample[mode], &look->error);
    }
    return status;
}

static void *run(void *arg)
{
    struct cuda_look *look = arg;
    ep_status status = read_counters(look);

    if (!status)
        status = read_report(look);
    if (!status)
        (void)read_loads(look);
    __atomic_store_n(&look->over, 1, __ATOMIC_RELEASE); /* partner: is_over; it may be freed now */
    return NULL;
}

/* ---- a look: the loop's thread ------------------------------------------------------- */

static bool is_over(const struct cuda_look *look)
{
    return __atomic_load_n(&look->over, __ATOMIC_ACQUIRE); /* partner: run */
}

static struct cuda_rank *rank_of(const struct cuda_watch *watch)
{
    return &watch->team->ranks[watch->options.rank];
}

static void free_look(struct cuda_look *look)
{
    for (int mode = 0; mode < MODES; mode++)
        free(look->sample[mode].routes);
    free(look);
}

/* One that is over. */
static void end_look(struct cuda_rank *r)
{
    struct cuda_look *look = r->look;

    if (look->told)
        EP_INFO("node", "a GPU answers again that has not for a while", EP_U("rank", look->rank),
                EP_U("epoch", look->team->epoch), EP_U("after_ms", (ep_clock_ns() - look->began_ns) / EP_NS_PER_MS));
    free_look(look);
    r->look = NULL;
}

bool cuda_watch_lost(const struct cuda_team *team, uint32_t rank)
{
    struct cuda_rank *r = &team->ranks[rank];

    if (r->look && !r->look->watch && is_over(r->look))
        end_look(r);
    return r->look && !r->look->watch;
}

static ep_status start_look(struct cuda_watch *watch, uint64_t now_ns, struct ep_error *error)
{
    struct cuda_look *look = calloc(1, sizeof *look);
    struct cuda_rank *r = rank_of(watch);
    pthread_t thread;
    char name[16];

    if (!look)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to read them to");
    look->watch = watch;
    look->began_ns = now_ns;
    look->team = watch->team;
    look->rank = watch->options.rank;
    for (int mode = 0; mode < MODES; mode++)
        look->sample[mode].before = r->sampled[mode];
    snprintf(name, sizeof name, "ep-look-%u", look->rank % 10000u);
    errno = ep_thread_start(&thread, name, run, look);
    if (errno == 0) {
        pthread_detach(thread); /* the driver's own for a thread, which goes last, may wait for the driver */
        r->look = look;
        return EP_OK;
    }
    ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "thread to read them");
    free_look(look);
    return EP_RESOURCE_EXHAUSTED;
}

/* A look that began at `began_ns` is done, or could not be. */
static void looked(struct cuda_watch *watch, uint64_t began_ns, const struct ep_error *error)
{
    if (error->status && !watch->blind)
        EP_ERROR("node", "a rank's counters cannot be read", EP_U("rank", watch->options.rank),
                 EP_U("epoch", watch->team->epoch), EP_S("error", error->text));
    watch->blind = error->status != EP_OK;
    watch->looked_ns = began_ns;
    if (watch->options.on_refreshed)
        watch->options.on_refreshed(watch->options.user);
}

static void take(struct cuda_watch *watch)
{
    struct cuda_rank *r = rank_of(watch);
    const struct cuda_look *look = r->look;

    if (look->watch == watch && !look->error.status) {
        take_counters(watch, look->counters[false], classes[false], r->seen);
        take_counters(watch, look->counters[true], classes[true], r->ht_seen);
        take_failure(watch, &look->report);
        for (int mode = 0; mode < MODES; mode++)
            cuda_loads_add(watch->team, look->rank, mode, &look->sample[mode]);
    }
    if (look->watch == watch)
        looked(watch, look->began_ns, &look->error);
    end_look(r);
}

static void tell_late(struct cuda_look *look, uint64_t waited_ms)
{
    look->told = true;
    EP_ERROR("node", "a GPU does not answer: the counters, timeouts and loads of a rank stay as they are until it does",
             EP_U("rank", look->rank), EP_U("epoch", look->team->epoch), EP_U("waited_ms", waited_ms),
             EP_U("since_us", ep_clock_wall_us() - waited_ms * 1000));
}

static void on_closed(uv_handle_t *handle)
{
    struct cuda_watch *watch = handle->data;

    watch->on_closed(watch);
}

static void close_watch(struct cuda_watch *watch)
{
    struct cuda_look *look = rank_of(watch)->look;

    if (look) {
        look->watch = NULL;
        EP_ERROR("node", "what a rank's last ops have counted is not known, and its group, should it end before the GPU "
                 "answers, keeps its memory", EP_U("rank", look->rank), EP_U("epoch", look->team->epoch));
    }
    uv_close((uv_handle_t *)&watch->timer, on_closed);
}

static void on_timer(uv_timer_t *timer);

/* Most looks are over at once.  What takes longer is asked after less and less often. */
static void wait_on(struct cuda_watch *watch, struct cuda_look *look)
{
    const uint64_t waited_ms = (ep_clock_ns() - look->began_ns) / EP_NS_PER_MS, next_ms = 1 + waited_ms / 8;

    if (waited_ms >= LATE_MS && !look->told)
        tell_late(look, waited_ms);
    uv_timer_start(&watch->timer, on_timer, next_ms < LOOK_MS ? next_ms : LOOK_MS, 0);
}

static void begin(struct cuda_watch *watch)
{
    struct ep_error error = EP_ERROR_INIT;
    const uint64_t now_ns = ep_clock_ns();

    if (start_look(watch, now_ns, &error))
        looked(watch, now_ns, &error);
}

static void go_on(struct cuda_watch *watch)
{
    struct cuda_rank *r = rank_of(watch);

    if (r->look && is_over(r->look))
        take(watch);
    if (!r->look && watch->looked_ns < watch->wanted_ns)
        begin(watch);
    if (watch->on_closed && (!r->look || ep_clock_ns() >= watch->stop_by_ns))
        close_watch(watch);
    else if (r->look)
        wait_on(watch, r->look);
    else
        uv_timer_start(&watch->timer, on_timer, LOOK_MS, 0);
}

/* ---- life --------------------------------------------------------------------------- */

/* No look was under way: it is time for the next. */
static void on_timer(uv_timer_t *timer)
{
    struct cuda_watch *watch = timer->data;

    if (!rank_of(watch)->look)
        watch->wanted_ns = ep_clock_ns();
    go_on(watch);
}

void cuda_watch_start(struct cuda_watch *watch, struct cuda_team *team, const struct ep_executor_options *options)
{
    watch->team = team;
    watch->options = *options;
    watch->timer.data = watch;
    uv_timer_init(team->loop, &watch->timer); /* cannot fail */
    uv_timer_start(&watch->timer, on_timer, LOOK_MS, 0);
}

bool cuda_watch_refresh(struct cuda_watch *watch, uint64_t since_ns)
{
    if (watch->looked_ns >= since_ns)
        return true;
    if (watch->on_closed)
        return false; /* the last look is under way */
    if (since_ns > watch->wanted_ns)
        watch->wanted_ns = since_ns;
    if (!rank_of(watch)->look)
        go_on(watch);
    return false;
}

void cuda_watch_stop(struct cuda_watch *watch, void (*on_watch_closed)(struct cuda_watch *watch))
{
    watch->on_closed = on_watch_closed;
    watch->wanted_ns = ep_clock_ns();
    watch->stop_by_ns = watch->wanted_ns + LATE_MS * EP_NS_PER_MS;
    go_on(watch);
}

/* ---- executor direct ------------------------------------------------------------------ */

struct onlooker {
    struct cuda_watch watch;
    void (*on_stopped)(void *user);
    void *user;
};

static bool refresh(struct ep_executor *executor, uint64_t since_ns)
{
    return cuda_watch_refresh((struct cuda_watch *)executor, since_ns);
}

static void on_watch_closed(struct cuda_watch *watch)
{
    struct onlooker *onlooker = (struct onlooker *)watch;
    void (*on_stopped)(void *user) = onlooker->on_stopped;
    void *user = onlooker->user;

    free(onlooker);
    on_stopped(user);
}

static void stop(struct ep_executor *executor, void (*on_stopped)(void *user), void *user)
{
    struct onlooker *onlooker = (struct onlooker *)executor;

    onlooker->on_stopped = on_stopped;
    onlooker->user = user;
    cuda_watch_stop(&onlooker->watch, on_watch_closed);
}

ep_status ep_team_cuda_watch(struct cuda_team *team, const struct ep_executor_options *options,
                             struct ep_executor **out, struct ep_error *error)
{
    static const struct ep_executor_ops ops = { .refresh = refresh, .stop = stop };
    struct onlooker *onlooker = calloc(1, sizeof *onlooker);

    if (!onlooker)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an executor");
    onlooker->watch.base.ops = &ops;
    cuda_watch_start(&onlooker->watch, team, options);
    *out = &onlooker->watch.base;
    return EP_OK;
}
