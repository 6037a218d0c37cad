/* A worker's process: the loop that takes commands. */
#include "worker_private.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

static ep_status obey(struct worker *worker, const struct bench_message *message, struct ep_error *error)
{
    switch ((enum bench_command)message->command) {
    case BENCH_ATTACH: return worker_attach(worker, (message->flags & BENCH_FLAG_RETRY) != 0, error);
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
            worker_detach(worker);
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
