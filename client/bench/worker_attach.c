/* A worker and its rank: attaching, and what the library says of it. */
#include "worker_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ep_clock.h"

enum { CLAIM_WAIT_MS = 10000 };

/* Someone else's rank that is about to be free again. */
static bool worth_another_try(ep_status status)
{
    return status == EP_ALREADY_EXISTS || status == EP_FAILED_PRECONDITION || status == EP_UNAVAILABLE;
}

static ep_executor executor_of(const struct worker *worker)
{
    if (worker->config->executor == BENCH_EXECUTOR_MIXED)
        return worker->rank % 2 ? EP_EXECUTOR_SERVER : EP_EXECUTOR_DIRECT;
    return (ep_executor)worker->config->executor;
}

ep_status worker_join(struct worker *worker, bool retry, struct ep_error *error)
{
    ep_join_options options = { .size = sizeof options,
                                .group = worker->config->group,
                                .rank = (int32_t)worker->rank,
                                .executor = executor_of(worker),
                                .ht_sms = worker->config->ht_sms,
                                .follow = worker->config->follow };
    uint64_t first = ep_clock_ns(), start;
    ep_status status;

    for (;;) {
        start = ep_clock_ns();
        status = ep_join(worker->client, &options, &worker->ep);
        if (status == EP_OK || !retry || !worth_another_try(status) ||
            start - first > CLAIM_WAIT_MS * EP_NS_PER_MS)
            break;
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        worker_get_on(worker);
    }
    worker->result->claim_wait_us = (double)(start - first) / 1e3;
    worker->result->join_us = (double)(ep_clock_ns() - start) / 1e3;
    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_join");
}

/*
 * What a worker has long before it attaches, and no other part of attaching compares to.  Which GPU its rank is
 * on it knows as all workers do: rank by rank.
 */
static ep_status make_context(struct worker *worker, struct ep_error *error)
{
    const uint64_t start = ep_clock_ns();
    const struct ep_cuda_api *api;
    uint32_t count = 0;
    void *stream;

    if (worker->config->backend != BENCH_BACKEND_CUDA || ep_cuda_open(&api, NULL) != EP_OK)
        return EP_OK; /* what is missing ep_join() says */
    if (api->device_count(&count, error) != EP_OK ||
        api->stream_create(worker->rank % count, &stream, error) != EP_OK)
        return error->status;
    api->stream_destroy(worker->rank % count, stream);
    worker->result->context_us = (double)(ep_clock_ns() - start) / 1e3;
    return EP_OK;
}

/* Streams, marks and graphs are the caller's; ep-bench has them from where the library has them. */
static ep_status open_gpu(struct worker *worker, struct ep_error *error)
{
    worker->gpu = worker->info.backend == EP_BACKEND_CUDA;
    if (!worker->gpu)
        return EP_OK;
    if (ep_cuda_open(&worker->cuda, error) != EP_OK ||
        worker->cuda->device_find(worker->info.device_uuid, &worker->device, error) != EP_OK)
        return error->status;
    return worker->cuda->stream_create(worker->device, &worker->stream, error);
}

static ep_status check_memory(const struct worker *worker, struct ep_error *error)
{
    if (!worker->config->own_memory || worker->gpu)
        return EP_OK;
    return ep_error_set(error, EP_UNIMPLEMENTED,
                        "--memory own: rank %u is on the host backend, where the server sees its window only; on GPUs "
                        "it can have it", worker->rank);
}

ep_status worker_describe(struct worker *worker, struct ep_error *error)
{
    ep_status status;

    worker->info = (ep_rank_info){ .size = sizeof worker->info };
    status = ep_rank_describe(worker->ep, &worker->info);
    if (status != EP_OK)
        return worker_failure(error, status, "ep_rank_describe");
    worker->result->window_bytes = worker->info.group.window_bytes;
    worker->result->arena_bytes = worker->info.group.arena_bytes;
    worker->result->backend = worker->info.backend;
    worker->result->executor = worker->info.executor;
    worker->result->ht_sms = worker->info.ht_sms;
    __atomic_store_n(&worker->result->epoch, worker->info.group.epoch, __ATOMIC_RELEASE); /* partner: the coordinator */
    return EP_OK;
}

ep_status worker_open_routing(struct worker *worker, struct ep_error *error)
{
    const struct bench_config *config = worker->config;
    struct routing_shape shape = { config->ranks, config->experts, config->top_k, config->seed,
                                   config->drop };

    routing_close(worker->routing);
    worker->routing = NULL;
    return routing_open(&config->routing, &shape, &worker->routing, error);
}

ep_status worker_attach(struct worker *worker, bool retry, struct ep_error *error)
{
    const struct bench_config *config = worker->config;
    const char *server = config->server[config->server_of[worker->rank]];
    uint64_t start;
    char name[64];
    ep_client_options options = { .size = sizeof options, .name = name };
    ep_status status;

    if (make_context(worker, error) != EP_OK)
        return error->status;
    snprintf(name, sizeof name, "ep-bench rank %u", worker->rank);
    start = ep_clock_ns();
    status = ep_client_open(server[0] ? server : NULL, &options, &worker->client);
    if (status != EP_OK)
        return worker_failure(error, status, "ep_client_open");
    worker->result->open_us = (double)(ep_clock_ns() - start) / 1e3;
    if (worker_join(worker, retry, error) != EP_OK || worker_describe(worker, error) != EP_OK ||
        open_gpu(worker, error) != EP_OK || check_memory(worker, error) != EP_OK)
        return error->status;
    return worker_open_routing(worker, error);
}

void worker_detach(struct worker *worker)
{
    worker_end(worker);
    ep_leave(worker->ep);
    if (worker->stream)
        worker->cuda->stream_destroy(worker->device, worker->stream);
    ep_client_close(worker->client);
    routing_close(worker->routing);
    free(worker->fitted);
}
