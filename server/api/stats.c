/* Counters: once, or at an interval. */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_clock.h"

#define INTERVAL_DEFAULT_MS 1000u
#define INTERVAL_MIN_MS 50u
#define INTERVAL_MAX_MS 3600000u

void api_stats_fill(struct ep_api *api, const char *group, bool experts, Ep__V1__Stats *stats)
{
    const struct ep_attach_counters *attach = ep_attach_counters(api->options.attach);

    ep_groups_stats(api->options.groups, group && *group ? group : NULL, experts, stats);
    stats->time_us = ep_clock_wall_us();
    stats->attaches = attach->attaches;
    stats->attach_refused = attach->refused;
    stats->rpc_requests = api->requests;
}

static bool check_group(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!*name || ep_groups_get(api->options.groups, name, &error))
        return true;
    ep_rpc_fail(call, &error);
    return false;
}

void api_get_stats(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__GetStatsRequest *request = (const Ep__V1__GetStatsRequest *)message;
    const struct api_gather what = { .group = request->group, .experts = request->experts, .everywhere = request->experts };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_api *api = user;

    api->requests++;
    if (request->experts && !*request->group) {
        ep_error_set(&error, EP_INVALID_ARGUMENT, "group is empty: experts are those of one group");
        ep_rpc_fail(call, &error);
    } else if (check_group(api, call, request->group)) {
        api_gather_stats(api, call, &what);
    }
}

void api_get_stats_here(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__GetStatsRequest *request = (const Ep__V1__GetStatsRequest *)message;
    const struct api_gather what = { .group = request->group, .experts = request->experts };
    struct ep_api *api = user;

    api->requests++;
    if (check_group(api, call, request->group))
        api_gather_stats(api, call, &what);
}

/* ---- at an interval ---------------------------------------------------------------------- */

struct api_stats_stream {
    struct api_stats_stream *next;
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it has ended, and with it the API may have gone */
    bool waiting;             /* for what ranks have counted */
    uv_timer_t timer;
    char group[];
};

static void on_timer_closed(uv_handle_t *handle)
{
    free(handle->data);
}

/* A reader that has not taken the last one gets the next, later and up to date. */
static void on_counted(const struct ep_error *error, void *user)
{
    struct api_stats_stream *stream = user;
    struct ep_error why = *error;
    Ep__V1__Stats stats;

    stream->waiting = false;
    if (!stream->call) {
        uv_close((uv_handle_t *)&stream->timer, on_timer_closed);
        return;
    }
    if (stream->api->ending)
        return;
    api_stats_fill(stream->api, stream->group, false, &stats);
    stats.behind = why.text; /* lent */
    ep_rpc_write(stream->call, &stats.base);
    ep_groups_stats_clear(&stats);
}

static void on_tick(uv_timer_t *timer)
{
    struct api_stats_stream *stream = timer->data;

    if (stream->waiting)
        return;
    stream->waiting = true;
    ep_groups_before_stats(stream->api->options.groups, stream->group, api_read_ms(stream->call), on_counted, stream);
}

static uint32_t settle_interval(uint32_t asked)
{
    if (asked == 0)
        return INTERVAL_DEFAULT_MS;
    return asked < INTERVAL_MIN_MS ? INTERVAL_MIN_MS : asked > INTERVAL_MAX_MS ? INTERVAL_MAX_MS : asked;
}

void api_watch_stats(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__WatchStatsRequest *request = (const Ep__V1__WatchStatsRequest *)message;
    size_t n = strlen(request->group) + 1;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    struct ep_api *api = user;
    struct api_stats_stream *stream;

    api->requests++;
    if (!check_group(api, call, request->group))
        return;
    stream = api->ending ? NULL : calloc(1, sizeof *stream + n);
    if (!stream) {
        if (api->ending)
            ep_error_set(&error, EP_UNAVAILABLE, "the server is stopping");
        ep_rpc_fail(call, &error);
        return;
    }
    stream->api = api;
    stream->call = call;
    memcpy(stream->group, request->group, n);
    uv_timer_init(api->options.loop, &stream->timer); /* cannot fail */
    stream->timer.data = stream;
    stream->next = api->streams;
    api->streams = stream;
    ep_rpc_call_set_user(call, stream);
    uv_timer_start(&stream->timer, on_tick, 0, settle_interval(request->interval_ms));
}

void api_watch_stats_closed(struct ep_rpc_call *call, void *user)
{
    struct api_stats_stream *stream = ep_rpc_call_user(call), **at;

    (void)user;
    if (!stream)
        return;
    for (at = &stream->api->streams; *at != stream; at = &(*at)->next)
        ;
    *at = stream->next;
    stream->call = NULL;
    uv_timer_stop(&stream->timer);
    if (!stream->waiting)
        uv_close((uv_handle_t *)&stream->timer, on_timer_closed);
}

void api_stats_end(struct ep_api *api)
{
    for (struct api_stats_stream *stream = api->streams; stream; stream = stream->next) {
        uv_timer_stop(&stream->timer);
        ep_rpc_finish(stream->call);
    }
}
