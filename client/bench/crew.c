#include "crew.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

enum {
    HANG_MS = 30000,       /* without any progress, on top of what ops may wait for each other */
    HANG_FAILED_MS = 3000, /* when another rank has failed already */
    LEAVE_MS = 15000,      /* for BENCH_EXIT */
    POLL_MS = 100,
    LOG_SHOWN = 8192
};

extern char **environ;
volatile int crew_cancelled;

/* ---- shared memory -------------------------------------------------------------------- */

static uint64_t line(uint64_t bytes)
{
    return (bytes + 63) & ~63ull;
}

ep_status crew_open(const struct bench_config *config, struct crew *crew, struct ep_error *error)
{
    uint64_t stride = line(sizeof(struct bench_rank_result) + config->iters * sizeof(struct bench_sample));
    uint64_t results = line(sizeof(struct bench_shared));
    uint32_t room = config->follow ? BENCH_MAX_RANKS : config->ranks;

    *crew = (struct crew){ .ranks = config->ranks, .shared_bytes = results + stride * room };
    for (uint32_t r = 0; r < BENCH_MAX_RANKS; r++)
        crew->member[r] = (struct crew_member){ .socket = -1, .log = -1 };
    crew->memory = memfd_create("ep-bench", MFD_CLOEXEC);
    if (crew->memory < 0 || ftruncate(crew->memory, (off_t)crew->shared_bytes) != 0)
        return ep_error_errno(error, EP_NO_MEMORY, "cannot share %zu bytes", crew->shared_bytes);
    crew->shared = mmap(NULL, crew->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, crew->memory, 0);
    if (crew->shared == MAP_FAILED) {
        crew->shared = NULL;
        return ep_error_errno(error, EP_NO_MEMORY, "cannot map %zu bytes", crew->shared_bytes);
    }
    crew->shared->config = *config;
    crew->shared->results = results;
    crew->shared->result_stride = stride;
    for (uint32_t w = 0; w < BENCH_MAX_RANKS; w++)
        crew->shared->rank_of[w] = w;
    return EP_OK;
}

void crew_close(struct crew *crew)
{
    crew_stop_all(crew);
    if (crew->shared)
        munmap(crew->shared, crew->shared_bytes);
    if (crew->memory >= 0)
        close(crew->memory);
    crew->shared = NULL;
    crew->memory = -1;
}

struct bench_rank_result *crew_result(const struct crew *crew, uint32_t rank)
{
    return bench_result(crew->shared, rank);
}

uint64_t crew_all(const struct crew *crew)
{
    return crew->ranks >= 64 ? ~0ull : (1ull << crew->ranks) - 1;
}

/* ---- starting -------------------------------------------------------------------------- */

/* fork without exec is not allowed beside gRPC: posix_spawn, of this very program. */
static int spawn(struct crew *crew, uint32_t rank, int socket, int log)
{
    posix_spawn_file_actions_t actions;
    char argument[64];
    char *argv[] = { (char *)"ep-bench", argument, NULL };
    int failed;

    snprintf(argument, sizeof argument, "--worker=%u,%d,%d", rank, socket, crew->memory);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, log, 1);
    posix_spawn_file_actions_adddup2(&actions, log, 2);
    posix_spawn_file_actions_adddup2(&actions, socket, socket); /* to itself: not closed by exec */
    posix_spawn_file_actions_adddup2(&actions, crew->memory, crew->memory);
    failed = posix_spawn(&crew->member[rank].pid, "/proc/self/exe", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

ep_status crew_start(struct crew *crew, uint32_t rank, struct ep_error *error)
{
    struct crew_member *member = &crew->member[rank];
    struct bench_rank_result *result = crew_result(crew, rank);
    int sockets[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "cannot make a socket pair for rank %u", rank);
    if (member->log < 0)
        member->log = memfd_create("ep-bench-log", MFD_CLOEXEC);
    memset(result, 0, sizeof *result);
    if (rank >= crew->ranks)
        crew->ranks = rank + 1;

    int failed = member->log < 0 ? errno : spawn(crew, rank, sockets[1], member->log);

    close(sockets[1]);
    if (failed) {
        member->pid = 0;
        close(sockets[0]);
        errno = failed;
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "cannot start the worker of rank %u", rank);
    }
    member->socket = sockets[0];
    return EP_OK;
}

ep_status crew_start_all(struct crew *crew, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < crew->ranks; r++)
        status = crew_start(crew, r, error);
    return status;
}

/* ---- ending ---------------------------------------------------------------------------- */

static void show_log(const struct crew *crew, uint32_t rank)
{
    char text[LOG_SHOWN];
    off_t end = lseek(crew->member[rank].log, 0, SEEK_END);
    off_t from = end > LOG_SHOWN ? end - LOG_SHOWN : 0;
    ssize_t n = pread(crew->member[rank].log, text, sizeof text, from);

    if (n > 0)
        fprintf(stderr, "ep-bench: output of rank %u:\n%.*s", rank, (int)n, text);
}

static void forget(struct crew_member *member)
{
    if (member->socket >= 0)
        close(member->socket);
    if (member->log >= 0)
        close(member->log);
    *member = (struct crew_member){ .socket = -1, .log = -1 };
}

/* Waits for the process, at most timeout_ms; false when it still runs. */
static bool reap(struct crew_member *member, int timeout_ms, int *status)
{
    for (int waited = 0;; waited++) {
        if (waitpid(member->pid, status, WNOHANG) == member->pid)
            return true;
        if (waited >= timeout_ms)
            return false;
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

void crew_kill(struct crew *crew, uint32_t rank)
{
    struct crew_member *member = &crew->member[rank];
    int status;

    if (member->pid == 0)
        return;
    kill(member->pid, SIGKILL);
    waitpid(member->pid, &status, 0);
    forget(member);
}

static void say_bye(struct crew *crew, uint64_t mask)
{
    struct bench_message bye = { .command = BENCH_EXIT };

    for (uint32_t r = 0; r < crew->ranks; r++)
        if (mask >> r & 1 && crew->member[r].socket >= 0)
            (void)send(crew->member[r].socket, &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void await_end(struct crew *crew, uint32_t rank)
{
    int status = 0;

    if (!reap(&crew->member[rank], crew_cancelled ? 1000 : LEAVE_MS, &status)) {
        crew_kill(crew, rank);
        return;
    }
    if (status != 0) {
        fprintf(stderr, "ep-bench: the worker of rank %u ended with wait status %d\n", rank, status);
        show_log(crew, rank);
    }
    forget(&crew->member[rank]);
}

void crew_stop(struct crew *crew, uint64_t mask)
{
    say_bye(crew, mask);
    for (uint32_t r = 0; r < crew->ranks; r++)
        if (mask >> r & 1 && crew->member[r].pid != 0)
            await_end(crew, r);
}

void crew_stop_all(struct crew *crew)
{
    crew_stop(crew, crew_all(crew));
}

static ep_status died(struct crew *crew, uint32_t rank, struct ep_error *error)
{
    struct crew_member *member = &crew->member[rank];
    int status = 0;
    bool gone = reap(member, 2000, &status);

    show_log(crew, rank);
    if (!gone)
        crew_kill(crew, rank);
    else
        forget(member);
    if (gone && WIFSIGNALED(status))
        return ep_error_set(error, EP_INTERNAL, "rank %u: its worker was ended by signal %d (%s)", rank,
                            WTERMSIG(status), strsignal(WTERMSIG(status)));
    return ep_error_set(error, EP_INTERNAL, "rank %u: its worker ended with exit code %d", rank,
                        gone ? WEXITSTATUS(status) : -1);
}

/* ---- commands and answers ---------------------------------------------------------------- */

ep_status crew_send(struct crew *crew, uint64_t mask, enum bench_command command, uint32_t case_index,
                    uint32_t flags, struct ep_error *error)
{
    struct bench_message message = { .command = command, .case_index = case_index, .flags = flags };

    for (uint32_t r = 0; r < crew->ranks; r++) {
        if (!(mask >> r & 1))
            continue;
        if (crew->member[r].socket < 0)
            return ep_error_set(error, EP_INTERNAL, "rank %u has no worker", r);
        if (send(crew->member[r].socket, &message, sizeof message, MSG_NOSIGNAL) != (ssize_t)sizeof message)
            return died(crew, r, error);
    }
    return EP_OK;
}

static ep_status take_answer(struct crew *crew, uint32_t rank, struct ep_error *error)
{
    struct bench_message answer;
    ssize_t n = recv(crew->member[rank].socket, &answer, sizeof answer, 0);

    if (n != (ssize_t)sizeof answer)
        return died(crew, rank, error);
    if (answer.status == EP_OK)
        return EP_OK;
    answer.text[sizeof answer.text - 1] = '\0';
    return ep_error_set(error, (ep_status)answer.status, "rank %u: %s", rank, answer.text);
}

uint64_t crew_progress(const struct crew *crew)
{
    uint64_t total = 0;

    for (uint32_t r = 0; r < crew->ranks; r++)
        total += __atomic_load_n(&crew_result(crew, r)->progress, __ATOMIC_RELAXED);
    return total;
}

/* `status`: what another rank said before, which is nearer to the cause. */
static ep_status hung(struct crew *crew, uint64_t mask, uint64_t ms, ep_status status, struct ep_error *error)
{
    char list[256] = "";

    for (uint32_t r = 0; r < crew->ranks; r++) {
        if (!(mask >> r & 1))
            continue;
        snprintf(list + strlen(list), sizeof list - strlen(list), " %u", r);
        show_log(crew, r);
        crew_kill(crew, r);
    }
    if (status != EP_OK)
        return status;
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "no progress for %llu ms: still waiting for rank%s",
                        (unsigned long long)ms, list);
}

/* Of the ranks in `mask`: their sockets, and which rank each is of. */
static uint32_t watch(const struct crew *crew, uint64_t mask, struct pollfd *fds, uint32_t *rank)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < crew->ranks; r++)
        if (mask >> r & 1) {
            rank[n] = r;
            fds[n++] = (struct pollfd){ .fd = crew->member[r].socket, .events = POLLIN };
        }
    return n;
}

bool crew_answered(const struct crew *crew, uint64_t mask, int wait_ms)
{
    struct pollfd fds[BENCH_MAX_RANKS];
    uint32_t rank[BENCH_MAX_RANKS];

    return poll(fds, watch(crew, mask, fds, rank), wait_ms) > 0;
}

/* Answers that have come; false when nothing came within POLL_MS.  dead: a worker has ended instead. */
static bool take_some(struct crew *crew, uint64_t *mask, bool *dead, ep_status *status,
                      struct ep_error *error)
{
    struct pollfd fds[BENCH_MAX_RANKS];
    uint32_t rank[BENCH_MAX_RANKS], n = watch(crew, *mask, fds, rank);

    if (poll(fds, n, POLL_MS) <= 0)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        struct ep_error one = EP_ERROR_INIT;

        if (!fds[i].revents)
            continue;
        *mask &= ~(1ull << rank[i]);
        if (take_answer(crew, rank[i], &one) != EP_OK && *status == EP_OK) {
            *status = one.status;
            ep_error_set(error, one.status, "%s", one.text);
        }
        *dead = *dead || crew->member[rank[i]].pid == 0;
    }
    return true;
}

/* Nobody needs to finish for a result that will not be used. */
static void give_up(struct crew *crew)
{
    for (uint32_t r = 0; r < crew->ranks; r++)
        crew_kill(crew, r);
}

ep_status crew_collect(struct crew *crew, uint64_t mask, struct ep_error *error)
{
    uint64_t waits_ms =
        4ull * crew->shared->config.timeout_ms; /* ops wait for each other, and workers for ops */
    uint64_t seen = crew_progress(crew), since = ep_clock_ns();
    ep_status status = EP_OK;
    bool dead = false;

    while (mask) {
        uint64_t now, limit_ms = waits_ms + (status == EP_OK ? HANG_MS : HANG_FAILED_MS);

        if (crew_cancelled && !crew->finishes)
            return ep_error_set(error, EP_CANCELLED, "interrupted");
        if (take_some(crew, &mask, &dead, &status, error))
            since = ep_clock_ns();
        if (dead) {
            give_up(crew);
            return status;
        }
        now = crew_progress(crew);
        if (now != seen)
            since = ep_clock_ns();
        seen = now;
        if (mask && ep_clock_ns() - since > limit_ms * EP_NS_PER_MS)
            return hung(crew, mask, limit_ms, status, error);
    }
    return status;
}

ep_status crew_do(struct crew *crew, uint64_t mask, enum bench_command command, uint32_t case_index,
                  uint32_t flags, struct ep_error *error)
{
    ep_status status = crew_send(crew, mask, command, case_index, flags, error);

    return status == EP_OK ? crew_collect(crew, mask, error) : status;
}
