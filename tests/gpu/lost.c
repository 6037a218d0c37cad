/*
 * A worker whose server is killed while its op is under way: every stream must go on.  product.sh runs it, with
 * different numbers of streams: those that share a hardware queue of the GPU wait for each other, and what lets
 * the op go on must not be behind it.
 *
 *     lost GROUP STREAMS     joins rank 0, whose peers never come; makes so many streams; the op is on the last
 *
 * Says "waiting" when the op is there.  0: all went on; 77: no GPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ep_client.h"
#include "ep_clock.h"
#include "ep_cuda.h"

enum { MAX_STREAMS = 64, TOKENS = 1, GO_ON_S = 5, UNTIL_KILLED_MS = 30000 };

struct lost {
    const struct ep_cuda_api *api;
    uint32_t device, n;
    void *stream[MAX_STREAMS], *event[MAX_STREAMS];
    ep_client *client;
    ep_rank *rank;
    ep_rank_info info;
    ep_handle *handle;
};

static void die(const char *what, const char *why)
{
    printf("%s: %s\n", what, why);
    exit(1);
}

static void ok(ep_status status, const char *what)
{
    if (status != EP_OK)
        die(what, ep_error_message());
}

static void done(ep_status status, const char *what, const struct ep_error *error)
{
    if (status != EP_OK)
        die(what, error->text);
}

static void join(struct lost *l, const char *group)
{
    const ep_join_options options = { .size = sizeof options, .group = group, .rank = 0 };
    struct ep_error error = EP_ERROR_INIT;

    ok(ep_client_open(NULL, NULL, &l->client), "ep_client_open");
    ok(ep_join(l->client, &options, &l->rank), "ep_join");
    l->info.size = sizeof l->info;
    ok(ep_rank_describe(l->rank, &l->info), "ep_rank_describe");
    done(l->api->device_find(l->info.device_uuid, &l->device, &error), "device_find", &error);
    for (uint32_t i = 0; i < l->n; i++)
        done(l->api->stream_create(l->device, &l->stream[i], &error), "stream_create", &error);
}

static void *take(struct lost *l, size_t bytes)
{
    void *memory = ep_alloc(l->rank, bytes);

    if (!memory)
        die("ep_alloc", ep_error_message());
    return memory;
}

static void dispatch(struct lost *l)
{
    const ep_group_info *g = &l->info.group;
    const int32_t choices[EP_MAX_TOP_K] = { 0 };
    ep_dispatch_args args = {
        .size = sizeof args,
        .mode = EP_MODE_LL,
        .layout = EP_LAYOUT_RANK_MAJOR,
        .input_dtype = EP_BF16,
        .num_tokens = TOKENS,
        .tokens = take(l, (size_t)TOKENS * g->hidden * 2),
        .topk_idx = take(l, sizeof choices),
        .counts = take(l, g->ranks * sizeof(int32_t)),
    };

    ok(ep_write(l->rank, (void *)(uintptr_t)args.topk_idx, choices, TOKENS * g->top_k * sizeof *choices, NULL),
       "ep_write");
    ok(ep_handle_create(l->rank, &l->handle), "ep_handle_create");
    ok(ep_dispatch(l->handle, &args, l->stream[l->n - 1]), "ep_dispatch");
}

/* Something on every stream, also on those that are in a queue with the op. */
static void fill_streams(struct lost *l)
{
    struct ep_error error = EP_ERROR_INIT;

    for (uint32_t i = 0; i < l->n; i++) {
        done(l->api->event_create(l->device, &l->event[i], &error), "event_create", &error);
        done(l->api->event_record(l->device, l->event[i], l->stream[i], &error), "event_record", &error);
    }
}

static void wait_for_the_end(struct lost *l)
{
    const ep_status status = ep_sync(l->rank, UNTIL_KILLED_MS);

    if (status != EP_SERVER_LOST)
        die("ep_sync, whose server was to be killed", ep_error_message());
}

static void check_streams(struct lost *l)
{
    const uint64_t end = ep_clock_ns() + GO_ON_S * EP_NS_PER_S;
    struct ep_error error = EP_ERROR_INIT;

    for (uint32_t i = 0; i < l->n;) {
        ep_status status = l->api->stream_query(l->device, l->stream[i], &error);

        if (status != EP_OK && (status != EP_UNAVAILABLE || ep_clock_ns() > end)) {
            printf("stream %u of %u does not go on: %s\n", i + 1, l->n, error.text);
            exit(1);
        }
        i += status == EP_OK;
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

int main(int argc, char **argv)
{
    struct lost l = { .n = 0 };
    struct ep_error error = EP_ERROR_INIT;

    if (argc != 3 || (l.n = (uint32_t)atoi(argv[2])) < 1 || l.n > MAX_STREAMS) {
        fputs("usage: lost GROUP STREAMS\n", stderr);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (ep_cuda_open(&l.api, &error) != EP_OK) {
        printf("%s\n", error.text);
        return 77;
    }
    join(&l, argv[1]);
    dispatch(&l);
    fill_streams(&l);
    puts("waiting");
    wait_for_the_end(&l);
    check_streams(&l);
    for (uint32_t i = 0; i < l.n; i++) {
        l.api->event_destroy(l.device, l.event[i]);
        l.api->stream_destroy(l.device, l.stream[i]);
    }
    ep_leave(l.rank);
    ep_client_close(l.client);
    printf("all of %u streams went on\n", l.n);
    return 0;
}
