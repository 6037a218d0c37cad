#include "crew.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

enum {
    POLL_US = 500,
    YIELDS = 200, /* between two naps of a rank that waits */
    NAP_US = 20,
    GRACE_MS = 3000, /* after the deadline, or another's failure, a rank has ended by itself, if it can */
    END_MS = 10000   /* for exit handlers: a sanitizer looks for leaks */
};

/* A rank's process, as the parent knows it. */
struct child {
    pid_t pid;
    bool ended, stopped;
    bool killed; /* by the parent, since it did not end */
    int status;  /* of waitpid, once it has ended */
};

static void nap(uint32_t us)
{
    nanosleep(&(struct timespec){ .tv_nsec = (long)us * 1000 }, NULL);
}

static struct crew_member *member_of(const struct crew *crew, uint32_t rank)
{
    return &crew->shared->member[rank];
}

/* ---- in a rank's process ------------------------------------------------------------------------- */

struct crew_member *crew_me(const struct crew *crew)
{
    return member_of(crew, crew->rank);
}

void crew_doing(const struct crew *crew, enum crew_thread thread, const char *what, uint32_t peer)
{
    struct crew_member *me = crew_me(crew);

    __atomic_store_n(&me->peer[thread], peer, __ATOMIC_RELAXED);
    __atomic_store_n(&me->doing[thread], what, __ATOMIC_RELAXED);
}

static bool others_failed(const struct crew *crew)
{
    return __atomic_load_n(&crew->shared->failed, __ATOMIC_RELAXED) != 0;
}

bool crew_go_on(const struct crew *crew, uint32_t *turn)
{
    if (++*turn % YIELDS != 0) {
        sched_yield();
        return true;
    }
    nap(NAP_US);
    return !others_failed(crew) && ep_clock_ns() < crew->deadline_ns;
}

ep_status crew_late(const struct crew *crew, struct ep_error *error, const char *format, ...)
{
    const unsigned seconds = (unsigned)((crew->deadline_ns - crew->begin_ns) / EP_NS_PER_S);
    char what[EP_ERROR_TEXT_MAX];
    va_list args;

    if (others_failed(crew))
        return ep_error_set(error, EP_CANCELLED, "another rank failed");
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "%.300s, %u s after the case began", what, seconds);
}

ep_status crew_barrier(struct crew *crew, struct ep_error *error)
{
    const uint32_t mine = __atomic_add_fetch(&crew_me(crew)->arrived, 1, __ATOMIC_RELEASE);
    uint32_t turn = 0;

    for (uint32_t r = 0; r < crew->ranks; r++) {
        const struct crew_member *other = member_of(crew, r);

        /* Acquire: partner is the addition above, in the other's process. */
        while (__atomic_load_n(&other->arrived, __ATOMIC_ACQUIRE) < mine &&
               !__atomic_load_n(&other->leaving, __ATOMIC_RELAXED))
            if (!crew_go_on(crew, &turn))
                return crew_late(crew, error, "rank %u has not come to barrier %u", r, mine);
    }
    return EP_OK;
}

void crew_die(const struct crew *crew)
{
    __atomic_store_n(&crew_me(crew)->leaving, 1, __ATOMIC_RELAXED);
    raise(SIGKILL);
    abort();
}

void crew_stop(const struct crew *crew)
{
    (void)crew;
    raise(SIGSTOP);
}

void crew_resume(const struct crew *crew)
{
    __atomic_store_n(&crew->shared->resume, 1, __ATOMIC_RELAXED);
}

static _Noreturn void run_rank(struct crew *crew, pid_t parent, crew_fn *fn, const void *arg)
{
    struct ep_error error = EP_ERROR_INIT;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    error.status = fn(crew, arg, &error);
    crew_me(crew)->error = error;
    /* Release: partner is judge. */
    __atomic_store_n(&crew_me(crew)->over, 1, __ATOMIC_RELEASE);
    if (error.status == EP_OK)
        exit(0);
    __atomic_store_n(&crew->shared->failed, 1, __ATOMIC_RELAXED);
    raise(SIGKILL); /* threads may run: nothing is taken down behind them, and no sanitizer asks where they are */
    abort();
}

/* ---- the parent: watching ------------------------------------------------------------------------ */

static bool leaves(const struct crew *crew, uint32_t rank)
{
    return __atomic_load_n(&member_of(crew, rank)->leaving, __ATOMIC_RELAXED) != 0;
}

/* Who ends by a signal that the case did not want takes the others with it: they would wait for it. */
static void note_end(const struct crew *crew, uint32_t rank, struct child *child, int status)
{
    child->ended = true;
    child->status = status;
    if (status != 0 && !leaves(crew, rank))
        __atomic_store_n(&crew->shared->failed, 1, __ATOMIC_RELAXED);
}

static void look(const struct crew *crew, uint32_t rank, struct child *child)
{
    int status;

    if (!child->ended && waitpid(child->pid, &status, WNOHANG | WUNTRACED) == child->pid) {
        child->stopped = WIFSTOPPED(status);
        if (!child->stopped)
            note_end(crew, rank, child, status);
    }
    if (child->stopped && __atomic_load_n(&crew->shared->resume, __ATOMIC_RELAXED)) {
        child->stopped = false;
        kill(child->pid, SIGCONT);
    }
}

static bool all_ended(const struct crew *crew, struct child *children)
{
    bool all = true;

    for (uint32_t r = 0; r < crew->ranks; r++) {
        look(crew, r, &children[r]);
        all = all && children[r].ended;
    }
    return all;
}

/* When a rank that has not ended must be over: what it does after its verdict is exit handlers. */
static uint64_t end_of(const struct crew *crew, uint32_t rank, uint64_t since)
{
    const bool over = __atomic_load_n(&member_of(crew, rank)->over, __ATOMIC_RELAXED) != 0;

    return since + (over ? GRACE_MS + END_MS : GRACE_MS) * EP_NS_PER_MS;
}

static void kill_late(const struct crew *crew, struct child *children, uint64_t since)
{
    const uint64_t now = ep_clock_ns();

    for (uint32_t r = 0; r < crew->ranks; r++)
        if (!children[r].ended && now >= end_of(crew, r, since)) {
            kill(children[r].pid, SIGKILL);
            waitpid(children[r].pid, &children[r].status, 0);
            children[r].ended = children[r].killed = true;
        }
}

static void watch(const struct crew *crew, struct child *children)
{
    uint64_t since = crew->deadline_ns;
    bool failed = false;

    while (!all_ended(crew, children)) {
        if (!failed && others_failed(crew)) {
            failed = true;
            since = ep_clock_ns();
        }
        kill_late(crew, children, since);
        nap(POLL_US);
    }
}

/* ---- the parent: judging ------------------------------------------------------------------------- */

/* "in iput for rank 2, progress thread in test": what a rank's threads were doing when it ended. */
static void describe_doing(const struct crew_member *member, char *text, size_t size)
{
    static const char *const names[CREW_THREADS] = { "main thread", "progress thread" };
    size_t n = 0;

    text[0] = '\0';
    for (int t = 0; t < CREW_THREADS; t++) {
        const char *what = __atomic_load_n(&member->doing[t], __ATOMIC_RELAXED);
        const uint32_t peer = __atomic_load_n(&member->peer[t], __ATOMIC_RELAXED);

        if (what && n < size)
            n += (size_t)snprintf(text + n, size - n, "; %s: in %s", names[t], what);
        if (what && peer != CREW_NOBODY && n < size)
            n += (size_t)snprintf(text + n, size - n, " for rank %u", peer);
    }
}

static ep_status judge_end(const struct child *child, const struct crew_member *member, struct ep_error *error)
{
    char doing[160];

    describe_doing(member, doing, sizeof doing);
    if (child->killed)
        return ep_error_set(error, EP_VERIFY_FAILED, "hangs, was killed%s", doing);
    if (WIFSIGNALED(child->status))
        return ep_error_set(error, EP_VERIFY_FAILED, "died of signal %d (%s)%s", WTERMSIG(child->status),
                            strsignal(WTERMSIG(child->status)), doing);
    return ep_error_set(error, EP_VERIFY_FAILED, "ended with %d, its output says why%s", WEXITSTATUS(child->status),
                        doing);
}

static ep_status judge(const struct crew *crew, uint32_t rank, const struct child *child, struct ep_error *error)
{
    const struct crew_member *member = member_of(crew, rank);
    /* Acquire: partner is run_rank. */
    const bool over = __atomic_load_n(&member->over, __ATOMIC_ACQUIRE) != 0;

    if (leaves(crew, rank) && !child->killed && WIFSIGNALED(child->status))
        return EP_OK;
    if (!over || (member->error.status == EP_OK && child->status != 0))
        return judge_end(child, member, error);
    *error = member->error;
    return error->status;
}

static ep_status judge_all(const struct crew *crew, const struct child *children, char report[CREW_REPORT])
{
    ep_status worst = EP_OK;
    size_t n = 0;

    report[0] = '\0';
    for (uint32_t r = 0; r < crew->ranks; r++) {
        struct ep_error error = EP_ERROR_INIT;
        const ep_status status = judge(crew, r, &children[r], &error);

        if (status == EP_OK || status == EP_CANCELLED)
            continue;
        if (worst != EP_VERIFY_FAILED)
            worst = status == EP_UNIMPLEMENTED ? EP_UNIMPLEMENTED : EP_VERIFY_FAILED;
        if (status == EP_UNIMPLEMENTED)
            snprintf(report, CREW_REPORT, "%s\n", error.text); /* the same of all ranks */
        else if (n < CREW_REPORT)
            n += (size_t)snprintf(report + n, CREW_REPORT - n, "rank %u: %s\n", r, error.text);
        if (n < CREW_REPORT && member_of(crew, r)->said[0])
            n += (size_t)snprintf(report + n, CREW_REPORT - n, "rank %u: the plugin said: %.250s\n", r,
                                  member_of(crew, r)->said);
    }
    return worst;
}

static ep_status no_crew(char report[CREW_REPORT], const char *what)
{
    snprintf(report, CREW_REPORT, "%s: %s\n", what, strerror(errno));
    return EP_VERIFY_FAILED;
}

static void start(struct crew *crew, struct child *children, crew_fn *fn, const void *arg)
{
    const pid_t parent = getpid();

    for (crew->rank = 0; crew->rank < crew->ranks; crew->rank++) {
        struct child *child = &children[crew->rank];

        child->pid = fork();
        if (child->pid == 0)
            run_rank(crew, parent, fn, arg);
        if (child->pid < 0)
            note_end(crew, crew->rank, child, SIGABRT);
    }
}

ep_status crew_run(uint32_t ranks, uint32_t seconds, crew_fn *fn, const void *arg, char report[CREW_REPORT])
{
    struct crew crew = { .ranks = ranks, .begin_ns = ep_clock_ns() };
    struct child children[CREW_MAX_RANKS] = { 0 };
    ep_status status;

    crew.deadline_ns = crew.begin_ns + seconds * EP_NS_PER_S;
    crew.shared = mmap(NULL, sizeof *crew.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (crew.shared == MAP_FAILED)
        return no_crew(report, "no memory to share");
    fflush(NULL); /* or the children would say it again */
    start(&crew, children, fn, arg);
    watch(&crew, children);
    status = judge_all(&crew, children, report);
    munmap(crew.shared, sizeof *crew.shared);
    return status;
}
