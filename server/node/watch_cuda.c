/*
 * Kernels, whoever launches them, count in the rank's state and report in its window.  The server reads both
 * every second, and when somebody asks, adds what is new to the rank's counters and tells of an op that timed
 * out.  The worker can write them too: what is read decides nothing, but for its own loads (loads_cuda.c) where an
 * operator asks for a placement by these.
 *
 * For a worker that runs its own ops that is all the server does.
 */
#include <stdlib.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "team_cuda.h"

#define LOOK_MS 1000

static const enum ep_op_class classes[EP_DEVICE_PARTS] = {
    [EP_DEVICE_DISPATCH] = EP_CLASS_LL_DISPATCH,
    [EP_DEVICE_COMBINE] = EP_CLASS_LL_COMBINE,
};
static const enum ep_op_class ht_classes[EP_DEVICE_PARTS] = {
    [EP_DEVICE_DISPATCH] = EP_CLASS_HT_DISPATCH,
    [EP_DEVICE_COMBINE] = EP_CLASS_HT_COMBINE,
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
        .op_class = (report->failure.mode == EP_MODE_HT ? ht_classes : classes)[part],
        .wait_phase = report->failure.wait_phase,
        .late_rank = report->failure.late_rank,
    };

    if (report->failure.status != EP_TIMEOUT || timeout.late_rank >= watch->team->n)
        return; /* none, or none that a kernel writes */
    if (watch->options.on_timeout)
        watch->options.on_timeout(&timeout, watch->options.user);
}

static struct ep_device_report *report_of(const struct cuda_watch *watch)
{
    struct ep_control *control = (struct ep_control *)(void *)watch->team->ranks[watch->options.rank].window;

    return &control->gpu.report;
}

/* Those of one mode; *seen: what has been counted already. */
static ep_status take_mode(struct cuda_watch *watch, const struct ep_device_counters *from,
                           const enum ep_op_class *of, struct ep_device_counters *seen, struct ep_error *error)
{
    struct ep_device_counters now[EP_DEVICE_PARTS];
    ep_status status = cuda_read(watch->team, watch->options.rank, now, from, sizeof now, error);

    if (status)
        return status;
    for (int part = 0; part < EP_DEVICE_PARTS; part++) {
        if (now[part].timeouts > seen[part].timeouts)
            ep_team_distrust(&watch->team->base); /* the way to another node may be broken */
        count(&watch->options.counters->op[of[part]], &now[part], &seen[part]);
        add_new(&watch->options.counters->dropped_routes, now[part].dropped, seen[part].dropped);
        seen[part] = now[part];
    }
    return EP_OK;
}

static bool has_ht(const struct cuda_watch *watch)
{
    return watch->team->map->limits.modes >> EP_MODE_HT & 1;
}

static ep_status take_counters(struct cuda_watch *watch, struct ep_error *error)
{
    struct cuda_rank *r = &watch->team->ranks[watch->options.rank];
    const struct ep_device_state *state = cuda_state(watch->team, watch->options.rank);
    ep_status status = take_mode(watch, state->counters, classes, r->seen, error);

    if (!status && has_ht(watch))
        status = take_mode(watch, state->ht_counters, ht_classes, r->ht_seen, error);
    return status;
}

static ep_status take_loads(struct cuda_watch *watch, struct ep_error *error)
{
    const uint32_t rank = watch->options.rank;
    const struct cuda_rank *r = &watch->team->ranks[rank];
    ep_status status = cuda_loads_sample(watch->team, rank, false, r->seen[EP_DEVICE_DISPATCH].count, error);

    if (!status && has_ht(watch))
        status = cuda_loads_sample(watch->team, rank, true, r->ht_seen[EP_DEVICE_DISPATCH].count, error);
    return status;
}

/*
 * The kernel keeps the first failure since the worker has taken one.  It is the worker's: were it taken here too, an
 * op in a graph that is launched again could overwrite its record before the worker has looked.
 */
static ep_status look_at_failure(struct cuda_watch *watch, struct ep_error *error)
{
    struct ep_device_report report; /* its beginning */
    ep_status status = cuda_read(watch->team, watch->options.rank, &report, report_of(watch),
                                 offsetof(struct ep_device_report, records), error);

    if (status || report.failure.sequence == watch->told)
        return status;
    watch->told = report.failure.sequence;
    tell_timeout(watch, &report);
    return EP_OK;
}

static ep_status look(struct cuda_watch *watch, struct ep_error *error)
{
    ep_status status = take_counters(watch, error);

    if (!status)
        status = look_at_failure(watch, error);
    return status ? status : take_loads(watch, error);
}

void cuda_watch_look(struct cuda_watch *watch)
{
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = look(watch, &error);

    if (status && !watch->blind)
        EP_ERROR("node", "a rank's counters cannot be read", EP_U("rank", watch->options.rank),
                 EP_U("epoch", watch->team->epoch), EP_S("error", error.text));
    watch->blind = status != EP_OK;
}

/* ---- life --------------------------------------------------------------------------- */

static void on_timer(uv_timer_t *timer)
{
    cuda_watch_look(timer->data);
}

void cuda_watch_start(struct cuda_watch *watch, struct cuda_team *team, const struct ep_executor_options *options)
{
    watch->team = team;
    watch->options = *options;
    watch->timer.data = watch;
    uv_timer_init(team->loop, &watch->timer); /* cannot fail */
    uv_timer_start(&watch->timer, on_timer, LOOK_MS, LOOK_MS);
}

static void on_closed(uv_handle_t *handle)
{
    struct cuda_watch *watch = handle->data;

    watch->on_closed(watch);
}

void cuda_watch_stop(struct cuda_watch *watch, void (*on_watch_closed)(struct cuda_watch *watch))
{
    cuda_watch_look(watch);
    watch->on_closed = on_watch_closed;
    uv_close((uv_handle_t *)&watch->timer, on_closed);
}

/* ---- executor direct ------------------------------------------------------------------ */

struct onlooker {
    struct cuda_watch watch;
    void (*on_stopped)(void *user);
    void *user;
};

static void refresh(struct ep_executor *executor)
{
    cuda_watch_look((struct cuda_watch *)executor);
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
