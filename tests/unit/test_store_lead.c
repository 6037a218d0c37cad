/*
 * Elections of the etcd store among processes: a leader that was stopped for longer than its lease, and two that run
 * for the same record.
 */
#include "store_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep_log.h"

static char program[512]; /* this test, to be run as a candidate */

/*
 * A candidate: a process that runs for the lead and, as long as it thinks it leads, writes "work" with its term in a
 * guarded commit, one after the other.  On stdout a letter for each thing it sees: L leads, N does not, W written,
 * R refused, X session lost.
 */
struct runner {
    uv_loop_t loop;
    uint32_t ttl_ms;
    struct ep_store *store;
    struct ep_session *session;
    struct ep_election *election;
    bool writing, lost;
    char name[16];
};

static void say(char letter)
{
    if (write(STDOUT_FILENO, &letter, 1) != 1)
        _exit(3);
}

static void work_on(struct runner *r);

static void on_worked(const struct ep_error *error, uint64_t revision, void *user)
{
    struct runner *r = user;

    (void)revision;
    r->writing = false;
    say(error->status ? 'R' : 'W');
    work_on(r);
}

/* On purpose it does not ask whether its session lives: the guard alone must hold. */
static void work_on(struct runner *r)
{
    struct ep_store_write writes[2] = { ep_election_guard(r->election) };
    char text[64];
    int n = snprintf(text, sizeof text, "%020" PRIu64 " %s", writes[0].expected, r->name);

    if (r->writing || r->lost || writes[0].expected == INT64_MAX)
        return;
    writes[0].session = NULL;
    writes[1] =
        (struct ep_store_write){ .key = "work", .value = text, .size = (size_t)n, .expected = EP_STORE_ANY };
    r->writing = true;
    ep_store_commit(r->store, writes, 2, on_worked, r);
}

static void on_lead(struct ep_election *election, bool leading, void *user)
{
    (void)election;
    say(leading ? 'L' : 'N');
    if (leading)
        work_on(user);
}

static void on_runner_session(const struct ep_error *error, void *user)
{
    struct runner *r = user;

    r->lost = error->status != EP_OK;
    if (r->lost)
        say('X');
}

/* Sessions that are lost are followed by others, as a server would do. */
static void run_again(struct runner *r)
{
    if (r->election)
        ep_election_close(r->election);
    if (r->session)
        ep_session_close(r->session);
    r->lost = false;
    r->session = ep_session_open(r->store, r->ttl_ms, on_runner_session, r);
    r->election = ep_election_open(r->store, r->session, "leader", r->name, on_lead, r);
}

static int candidate(const char *url, const char *ttl_ms)
{
    const struct ep_store_etcd options = { .url = url };
    struct runner r = { .ttl_ms = (uint32_t)atoi(ttl_ms) };

    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    uv_loop_init(&r.loop);
    snprintf(r.name, sizeof r.name, "%d", (int)getpid());
    if (ep_store_open_etcd(&r.loop, &options, &r.store, NULL))
        return 1;
    run_again(&r);
    for (;;) {
        uv_run(&r.loop, UV_RUN_ONCE);
        if (r.lost && !r.writing)
            run_again(&r);
    }
}

struct child {
    pid_t pid;
    int out;
    unsigned said[256]; /* of each letter, since the last forget */
    unsigned n, last[256]; /* letters it has said in all, and which of them this one was the last time */
};

static void child_start(struct child *child, const char *url, const char *ttl_ms)
{
    int pipes[2];

    assert_int_equal(pipe2(pipes, O_CLOEXEC | O_NONBLOCK), 0);
    *child = (struct child){ .out = pipes[0] };
    child->pid = process_fork();
    if (child->pid == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        fcntl(STDOUT_FILENO, F_SETFL, 0);
        execl(program, program, "candidate", url, ttl_ms, (char *)NULL);
        _exit(4);
    }
    close(pipes[1]);
}

static void child_end(struct child *child)
{
    process_end(&child->pid);
    close(child->out);
}

/* How often it has said this letter since the last forget. */
static unsigned child_said(struct child *child, char letter)
{
    char text[4096];
    ssize_t n;

    while ((n = read(child->out, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; i++) {
            child->said[(unsigned char)text[i]]++;
            child->last[(unsigned char)text[i]] = ++child->n;
        }
    return child->said[(unsigned char)letter];
}

/* Whether it has said one letter, and then the other. */
static bool child_said_then(struct child *child, char first, char then)
{
    (void)child_said(child, 0);
    return child->last[(unsigned char)first] && child->last[(unsigned char)then] > child->last[(unsigned char)first];
}

static void child_forget(struct child *child)
{
    (void)child_said(child, 0);
    memset(child->said, 0, sizeof child->said);
}

/* When this returns it does nothing any more. */
static void child_stop(struct child *child)
{
    kill(child->pid, SIGSTOP);
    assert_int_equal(waitpid(child->pid, NULL, WUNTRACED), child->pid);
}

/* Terms in the order of the revisions: they must never go back. */
struct terms {
    char last[64];
    unsigned works, terms;
    bool back;
};

static void on_work(const struct ep_store_changes *changes, void *user)
{
    struct terms *t = user;

    for (size_t i = 0; i < changes->n; i++) {
        char value[64] = "";

        memcpy(value, changes->records[i].value, changes->records[i].size);
        t->works++;
        t->terms += strcmp(value, t->last) != 0;
        t->back |= strcmp(value, t->last) < 0;
        memcpy(t->last, value, sizeof value);
    }
}

/*
 * What was on its way when it was stopped may have been done before the other led, and it hears of that when it goes
 * on; nothing else of it is done.
 */
static void a_stopped_leader_has_lost_the_lead_and_is_told(void **state)
{
    struct fixture *f = *state;
    static const char ttl_ms[] = "5000"; /* on a machine that stands still for a moment the leader stays the leader */
    static struct child a, b;
    struct terms terms = { "", 0, 0, false };
    struct ep_watch *watch;
    char url[128];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "begin", "v");
    cluster_url(&f->etcd, "/test", url, sizeof url);
    watch = ep_watch_open(f->store, "work", EP_STORE_BEGIN, on_work, &terms);
    child_start(&a, url, ttl_ms);
    RUN_UNTIL(f, child_said(&a, 'W'));
    child_start(&b, url, ttl_ms);
    RUN_UNTIL(f, child_said(&b, 'N'));
    child_stop(&a);
    child_forget(&a);
    RUN_UNTIL(f, child_said(&b, 'W'));
    kill(a.pid, SIGCONT);
    RUN_UNTIL(f, child_said_then(&a, 'X', 'N')); /* its session is lost; it runs again, and another leads */
    assert_in_range(child_said(&a, 'W'), 0, 1);
    child_forget(&a);
    child_end(&b);
    RUN_UNTIL(f, child_said(&a, 'W') && terms.terms >= 3);
    child_end(&a);
    ep_watch_close(watch);
    assert_false(terms.back);
}

/* Stopped, continued and killed at random, with etcd killed in between: whatever they believe, what is written is
 * written in order of the terms. */
static void two_leaders_never_both_write(void **state)
{
    struct fixture *f = *state;
    static struct child children[3];
    static const char ttl_ms[] = "2000"; /* the least there is */
    struct terms terms = { "", 0, 0, false };
    unsigned seed = (unsigned)(ep_clock_ns() / 1000);
    struct ep_watch *watch;
    char url[128];

    print_message("seed %u\n", seed);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "begin", "v");
    cluster_url(&f->etcd, "/test", url, sizeof url);
    watch = ep_watch_open(f->store, "work", EP_STORE_BEGIN, on_work, &terms);
    for (size_t i = 0; i < 3; i++)
        child_start(&children[i], url, ttl_ms);
    for (int round = 0; round < 10; round++) {
        struct child *victim = &children[(unsigned)rand_r(&seed) % 3];

        if (round == 5) {
            cluster_kill_member(&f->etcd, 0);
            cluster_start_member(&f->etcd, 0);
        }
        if (rand_r(&seed) % 3 == 0) {
            child_end(victim);
            child_start(victim, url, ttl_ms);
        } else {
            kill(victim->pid, SIGSTOP);
        }
        fixture_run_ms(f, 300 + (unsigned)rand_r(&seed) % 3000);
        kill(victim->pid, SIGCONT);
        for (size_t i = 0; i < 3; i++)
            child_forget(&children[i]);
    }
    for (size_t i = 0; i < 3; i++)
        child_end(&children[i]);
    child_start(&children[0], url, ttl_ms); /* a term that is not the first, whatever chance has brought */
    RUN_UNTIL(f, child_said(&children[0], 'W') && terms.terms >= 2);
    child_end(&children[0]);
    ep_watch_close(watch);
    print_message("%u writes in %u terms\n", terms.works, terms.terms);
    assert_false(terms.back);
}

#define TEST(name) FIXTURE_TEST(#name, name, fixture_setup_etcd)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(a_stopped_leader_has_lost_the_lead_and_is_told),
        TEST(two_leaders_never_both_write),
    };
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);

    if (argc == 4 && !strcmp(argv[1], "candidate"))
        return candidate(argv[2], argv[3]);
    if (n < 0)
        return 1;
    if (!cluster_installed()) {
        fprintf(stderr, "etcd is not installed (package etcd-server): nothing of the etcd store is tested\n");
        return 77;
    }
    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
