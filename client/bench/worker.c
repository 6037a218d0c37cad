/* A worker's process: attaching, and the loop that takes commands. */
#include "worker_private.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

enum { CLAIM_WAIT_MS = 10000 };

/* ---- attaching --------------------------------------------------------------------- */

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

static ep_status attach(struct worker *worker, bool retry, struct ep_error *error)
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

static void detach(struct worker *worker)
{
    worker_end(worker);
    ep_leave(worker->ep);
    if (worker->stream)
        worker->cuda->stream_destroy(worker->device, worker->stream);
    ep_client_close(worker->client);
    routing_close(worker->routing);
    free(worker->fitted);
}

/* ---- commands ---------------------------------------------------------------------- */

static ep_status obey(struct worker *worker, const struct bench_message *message, struct ep_error *error)
{
    switch ((enum bench_command)message->command) {
    case BENCH_ATTACH: return attach(worker, (message->flags & BENCH_FLAG_RETRY) != 0, error);
    case BENCH_PREPARE: return worker_prepare(worker, message->case_index, error);
    case BENCH_VERIFY: return worker_verify(worker, (message->flags & BENCH_FLAG_MASKED) != 0, error);
    case BENCH_TIME: return worker_time(worker, message->flags, error);
    case BENCH_TIME_GRAPH: return device_time_graph(worker, error);
    case BENCH_SOAK: return worker_soak(worker, error);
    case BENCH_END: worker_end(worker); return EP_OK;
    case BENCH_EXIT: return EP_OK;
    }
    return ep_error_set(error, EP_INTERNAL, "unknown command %u", message->command);
}

/* A failure is an answer; the coordinator decides what follows.  Ends with BENCH_EXIT or when the
 * coordinator is gone. */
static int serve(struct worker *worker)
{
    struct bench_message message;

    while (recv(worker->socket, &message, sizeof message, 0) == (ssize_t)sizeof message) {
        struct ep_error error = EP_ERROR_INIT;
        bool last = message.command == BENCH_EXIT;

        message.status = (int32_t)obey(worker, &message, &error);
        memcpy(message.text, error.text, sizeof message.text);
        if (last)
            detach(worker);
        if (send(worker->socket, &message, sizeof message, MSG_NOSIGNAL) != (ssize_t)sizeof message || last)
            break;
    }
    return 0;
}

static bool map_shared(struct worker *worker, int fd)
{
    struct stat stat;

    if (fstat(fd, &stat) != 0)
        return false;
    worker->shared = mmap(NULL, (size_t)stat.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return worker->shared != MAP_FAILED;
}

int bench_worker(const char *argument)
{
    struct worker worker = { 0 };
    uint32_t number;
    int memory;

    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never longer than the coordinator */
    signal(SIGINT, SIG_IGN);          /* a terminal's is for that one, too */
    if (sscanf(argument, "%u,%d,%d", &number, &worker.socket, &memory) != 3 ||
        !map_shared(&worker, memory)) {
        fprintf(stderr, "ep-bench: --worker is ep-bench's own\n");
        return ep_status_exit_code(EP_INVALID_ARGUMENT);
    }
    worker.config = &worker.shared->config;
    worker.rank = worker.shared->rank_of[number];
    worker.result = bench_result(worker.shared, number);
    return serve(&worker);
}
