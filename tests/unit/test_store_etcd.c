/*
 * The etcd store when things fail: etcd killed, a member of three killed, answers lost, the line cut, and what is no
 * etcd at all.
 */
#include "store_fixture.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- what opens, and what is told -------------------------------------------------- */

static void a_url_that_is_none_is_told(void **state)
{
    static const char *const urls[] = {
        "",
        "etcd:/",
        "http://127.0.0.1:1",
        "etcd://",
        "etcd://host",
        "etcd://:1",
        "etcd://host:0",
        "etcd://host:x",
        "etcd://host:1x",
        "etcd://host:65536",
        "etcd://a:1,,b:1",
        "etcd://a:1,",
    };
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        const struct ep_store_etcd options = { .url = urls[i] };
        struct ep_error error = EP_ERROR_INIT;
        struct ep_store *store;

        assert_int_equal(ep_store_open_etcd(&f->loop, &options, &store, &error), EP_INVALID_ARGUMENT);
        assert_text(error.text, "store is \"");
    }
}

/* Callers are told within the time they were promised, also those behind others. */
static void no_etcd_there_names_the_endpoints_and_the_cause(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct listed listed;
    char url[128];

    snprintf(url, sizeof url, "etcd://127.0.0.1:%d,127.0.0.1:%d/x", free_port(), free_port());
    f->store = open_url(f, url);
    listed = list(f, "groups/");
    assert_int_equal(listed.error.status, EP_UNAVAILABLE);
    *strrchr(url, '/') = '\0';
    assert_text(listed.error.text, url);
    assert_text(listed.error.text, "cannot read");
    assert_text(listed.error.text, "refused");
    assert_int_equal(put(f, "a", "1", EP_STORE_ANY).error.status, EP_UNAVAILABLE);
    assert_int_equal(ep_store_health(f->store, &error), EP_UNAVAILABLE);
    assert_text(error.text, url);
}

/* Takes connections and says what no etcd says. */
static pid_t start_garbage(int port)
{
    static const char source[] = "import os, socket, sys, threading\n"
                                 "l = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
                                 "while True:\n"
                                 "    c = l.accept()[0]\n"
                                 "    c.sendall(os.urandom(100))\n";
    char text[16];
    pid_t pid = process_fork();

    snprintf(text, sizeof text, "%d", port);
    if (pid == 0) {
        execlp("python3", "python3", "-c", source, text, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static void garbage_on_the_port_is_told_and_the_next_endpoint_asked(void **state)
{
    struct fixture *f = *state;
    int port = free_port();
    pid_t pid = start_garbage(port);
    struct ep_store *store;
    struct written w = { 0 };
    struct listed listed;
    char url[128], text[64];

    snprintf(text, sizeof text, "127.0.0.1:%d", port);
    snprintf(url, sizeof url, "etcd://%s", text);
    store = open_url(f, url);
    listed = list_of(f, store, "");
    assert_int_equal(listed.error.status, EP_UNAVAILABLE);
    assert_text(listed.error.text, text);
    close_store(f, store);

    cluster_start(&f->etcd, 1, f->directory);
    snprintf(url, sizeof url, "etcd://%s,127.0.0.1:%d/x", text, f->etcd.client[0]);
    f->store = open_url(f, url);
    ep_store_commit(f->store, NULL, 0, on_written, &w);
    RUN_UNTIL(f, w.done);
    assert_string_equal(w.error.text, "");
    process_end(&pid);
}

static void prefixes_keep_stores_apart(void **state)
{
    struct fixture *f = *state;
    struct ep_store *other;
    char url[128];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "a", "1");
    other = open_url(f, cluster_url(&f->etcd, "/test2", url, sizeof url));
    assert_int_equal(list_of(f, other, "").n, 0);
    close_store(f, other);
    other = open_url(f, cluster_url(&f->etcd, "/", url, sizeof url));
    assert_int_equal(list_of(f, other, "").n, 0);
    close_store(f, other);
    assert_string_equal(list_surely(f, "").text, "a=1 ");
}

static void long_lists_come_in_pages_of_one_moment(void **state)
{
    struct fixture *f = *state;
    struct ep_store_write writes[EP_STORE_MAX_WRITES];
    char keys[EP_STORE_MAX_WRITES][16];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    for (size_t batch = 0; batch < 5; batch++) {
        for (size_t i = 0; i < EP_STORE_MAX_WRITES; i++) {
            snprintf(keys[i], sizeof keys[i], "k%03zu", batch * EP_STORE_MAX_WRITES + i);
            writes[i] = (struct ep_store_write){ .key = keys[i], .value = "v", .size = 1 };
        }
        assert_int_equal(commit(f, writes, EP_STORE_MAX_WRITES).error.status, EP_OK);
    }
    assert_int_equal(list_surely(f, "k").n, 5 * EP_STORE_MAX_WRITES);
    assert_int_equal(list_surely(f, "k49").n, 10);
}

/* ---- etcd comes and goes ----------------------------------------------------------- */

static void kill_9_of_etcd_loses_nothing_and_the_watch_goes_on(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct ep_watch *watch;
    char key[16];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 5; i++) {
            snprintf(key, sizeof key, "k/%d%d", round, i);
            put_surely(f, key, "v");
        }
        cluster_kill_member(&f->etcd, 0);
        assert_int_equal(put(f, "other", "v", EP_STORE_ABSENT).error.status, EP_UNAVAILABLE);
        assert_int_equal(ep_store_health(f->store, NULL), EP_UNAVAILABLE);
        cluster_start_member(&f->etcd, 0);
        RUN_UNTIL(f, ep_store_health(f->store, NULL) == EP_OK); /* by itself: nobody writes */
    }
    put_surely(f, "k/end", "v");
    RUN_UNTIL(f, seen.changes == 11);
    assert_int_equal(list_surely(f, "k/").n, 11);
    assert_int_equal(seen.wholes, 1);
    assert_false(seen.disorder);
    ep_watch_close(watch);
}

/* Whichever of three is killed, or stopped: writes go on, and neither watch nor session notices. */
static void one_of_three_members_may_be_gone(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_watch *watch;

    cluster_start(&f->etcd, 3, f->directory);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "k/begin", "v");
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    session = ep_session_open(f->store, 10000, on_session, &told);
    RUN_UNTIL(f, seen.calls == 1 && told.begun);
    for (size_t member = 0; member < 3; member++) {
        if (member == 1)
            kill(f->etcd.pid[member], SIGSTOP); /* its connections stay, and nothing answers */
        else
            cluster_kill_member(&f->etcd, member);
        put_surely(f, "k/a", "1");
        put_surely(f, "k/a", "2");
        RUN_UNTIL(f, seen.changes == 2 * (member + 1));
        if (member == 1)
            kill(f->etcd.pid[member], SIGCONT);
        else
            cluster_start_member(&f->etcd, member);
        put_surely(f, "other", "v");
        fixture_run_ms(f, 1000); /* it finds the others again */
    }
    assert_false(seen.disorder);
    assert_int_equal(seen.wholes, 1);
    assert_true(ep_session_alive(session));
    assert_int_equal(told.failed, 0);
    ep_watch_close(watch);
    ep_session_close(session);
}

static void without_a_majority_nothing_is_taken_and_it_is_told(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    cluster_start(&f->etcd, 3, f->directory);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "a", "1");
    cluster_kill_member(&f->etcd, 0);
    cluster_kill_member(&f->etcd, 1);
    assert_int_equal(put(f, "a", "2", EP_STORE_ANY).error.status, EP_UNAVAILABLE);
    assert_int_equal(ep_store_health(f->store, &error), EP_UNAVAILABLE);
    assert_text(error.text, "cannot write");
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, ep_store_health(f->store, NULL) == EP_OK);
    put_surely(f, "a", "3");
    assert_string_equal(list_surely(f, "").text, "a=3 ");
}

/* ---- the line ------------------------------------------------------------------------ */

#define WORD_MS    12000 /* by then a watch that hears nothing has asked etcd for a word, and heard it */
#define PATIENT_MS 60000 /* until the line is mended, however busy the machine is */

static struct ep_store *open_through(struct fixture *f, struct proxy *p, uint32_t answer_within_ms)
{
    char url[128];

    cluster_start(&f->etcd, 1, f->directory);
    proxy_start(p, f->etcd.client[0]);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d/test", p->port);
    return open_at(f, &(const struct ep_store_etcd){ .url = url, .answer_within_ms = answer_within_ms });
}

/* The commit is done and its answer lost; sent again it must be known, and neither refused nor done twice. */
static void a_write_whose_answer_is_lost_is_done_once(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct ep_store *direct;
    struct seen seen = { 0 };
    struct ep_watch *watch;
    char url[128];

    f->store = open_through(f, &p, PATIENT_MS);
    put_surely(f, "begin", "v");
    direct = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    watch = ep_watch_open(direct, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    for (unsigned i = 0; i < 5; i++) {
        char key[16];
        const struct ep_store_write write = {
            .key = key, .value = "v", .size = 1, .expected = EP_STORE_ABSENT
        };
        struct written w = { 0 };

        snprintf(key, sizeof key, "k/%u", i);
        proxy_swallow(&p);
        ep_store_commit(f->store, &write, 1, on_written, &w);
        RUN_UNTIL(f, seen.changes == i + 1); /* it is done, and this store does not know */
        assert_false(w.done);
        proxy_stop(&p);
        proxy_start(&p, f->etcd.client[0]);
        RUN_UNTIL(f, w.done);
        assert_string_equal(w.error.text, "");
        assert_int_equal(w.revision, seen.newest);
    }
    put_surely(f, "k/end", "v");
    RUN_UNTIL(f, seen.changes == 6);
    assert_false(seen.disorder);
    ep_watch_close(watch);
    close_store(f, direct);
    fixture_close(f);
    proxy_stop(&p);
}

/* A commit that was given up, and done for all that, does not stand in the way of the next. */
static void a_write_that_was_given_up_may_be_done_but_never_late(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct written w;

    f->store = open_through(f, &p, ANSWER_WITHIN_MS);
    put_surely(f, "a", "0");
    proxy_swallow(&p);
    w = put(f, "a", "given up", EP_STORE_ANY);
    assert_int_equal(w.error.status, EP_UNAVAILABLE);
    proxy_stop(&p);
    proxy_start(&p, f->etcd.client[0]);
    put_surely(f, "a", "last");
    fixture_run_ms(f, 500);
    assert_string_equal(list_surely(f, "").text, "a=last ");
    fixture_close(f);
    proxy_stop(&p);
}

static void on_lead(struct ep_election *election, bool leading, void *user)
{
    (void)election;
    *(bool *)user = leading;
}

static struct written write_as_leader(struct fixture *f, const struct ep_election *election)
{
    const struct ep_store_write writes[] = {
        ep_election_guard(election),
        { .key = "plan", .value = "v", .size = 1, .expected = EP_STORE_ANY },
    };

    return commit(f, writes, 2);
}

/* The record is there, and goes with a session that lives on: nobody else can lead, so this side has to. */
static void a_campaign_whose_answer_is_lost_is_won_all_the_same(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { .swallow_at = "node-a" };
    struct told told = { 0 };
    struct seen seen = { 0 };
    struct ep_election *election;
    struct ep_session *session;
    struct ep_store *direct;
    struct ep_watch *watch;
    struct written w;
    bool leading = false;
    char url[128];

    f->store = open_through(f, &p, ANSWER_WITHIN_MS);
    direct = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    put_surely(f, "begin", "v");
    session = ep_session_open(f->store, 300000, on_session, &told);
    watch = ep_watch_open(direct, "leader", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, told.begun && seen.calls == 1);
    election = ep_election_open(f->store, session, "leader", "node-a", on_lead, &leading);
    RUN_UNTIL(f, seen.changes == 1 && ep_store_health(f->store, NULL)); /* it is done and was given up */
    assert_false(leading);
    proxy_stop(&p);
    p.swallow_at = NULL;
    proxy_start(&p, f->etcd.client[0]);
    RUN_UNTIL(f, leading);
    assert_true(ep_election_leads(election));
    assert_string_equal(ep_election_leader(election), "node-a");
    assert_int_equal(ep_election_guard(election).expected, seen.newest);
    do
        w = write_as_leader(f, election);
    while (w.error.status == EP_UNAVAILABLE); /* the line was mended only now */
    assert_string_equal(w.error.text, "");
    ep_election_close(election);
    RUN_UNTIL(f, seen.changes == 2);
    assert_string_equal(seen.text, "[]leader=node-a | -leader | ");
    ep_session_close(session);
    ep_watch_close(watch);
    close_store(f, direct);
    fixture_close(f);
    proxy_stop(&p);
}

static void changes_during_a_break_come_afterwards(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct ep_store *direct;
    struct seen seen = { 0 };
    struct ep_watch *watch;
    char url[128];

    direct = open_through(f, &p, PATIENT_MS);
    f->store = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    put_surely(f, "k/a", "0");
    watch = ep_watch_open(direct, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    for (unsigned i = 1; i <= 3; i++) {
        proxy_stop(&p);
        put_surely(f, "k/a", "1");
        put_surely(f, "k/a", NULL);
        proxy_start(&p, f->etcd.client[0]);
        RUN_UNTIL(f, seen.changes == 2 * i);
    }
    assert_string_equal(seen.text, "[k/a=0 ]k/a=1 | -k/a | k/a=1 | -k/a | k/a=1 | -k/a | ");
    assert_false(seen.disorder);
    ep_watch_close(watch);
    close_store(f, direct);
    proxy_stop(&p);
}

/* ---- many changes at once ------------------------------------------------------------ */

#define MANY 80
#define EACH 64

struct flood {
    size_t wholes, calls, commits, apart; /* apart: of a commit, not told with the rest of it */
    uint64_t told[MANY + 1];              /* [commits] their revisions */
    bool disorder;
};

static uint64_t newest_told(const struct flood *flood)
{
    return flood->commits ? flood->told[flood->commits - 1] : 0;
}

static bool is_told(const struct flood *flood, uint64_t revision)
{
    for (size_t i = 0; i < flood->commits; i++)
        if (flood->told[i] == revision)
            return true;
    return false;
}

static void on_flood(const struct ep_store_changes *changes, void *user)
{
    struct flood *flood = user;
    size_t same = 0;

    flood->wholes += changes->whole;
    if (changes->whole)
        return;
    for (size_t i = 0; i < changes->n; i++) {
        const struct ep_record *r = &changes->records[i];

        same++;
        if (i + 1 < changes->n && r[1].revision == r->revision)
            continue;
        flood->disorder |= r->revision <= newest_told(flood) || flood->commits == MANY + 1;
        if (!flood->disorder)
            flood->told[flood->commits++] = r->revision;
        flood->apart += same != EACH;
        same = 0;
    }
    flood->calls++;
}

static void write_many(struct fixture *f, struct written written[MANY])
{
    struct ep_store_write writes[EACH];
    char keys[EACH][16];

    for (size_t i = 0; i < EACH; i++) {
        snprintf(keys[i], sizeof keys[i], "k/%02zu", i);
        writes[i] = (struct ep_store_write){ .key = keys[i], .value = "x", .size = 1, .expected = EP_STORE_ANY };
    }
    for (size_t i = 0; i < MANY; i++)
        ep_store_commit(f->store, writes, EACH, on_written, &written[i]);
}

static size_t count_done(const struct written written[MANY])
{
    size_t n = 0;

    for (size_t i = 0; i < MANY; i++)
        n += written[i].done;
    return n;
}

/* One that is given up, as etcd stands still, may be done all the same. */
static uint64_t newest_acknowledged(const struct written written[MANY])
{
    uint64_t newest = 0;

    for (size_t i = 0; i < MANY; i++)
        if (written[i].error.status == EP_OK && written[i].revision > newest)
            newest = written[i].revision;
    return newest;
}

/* Those that come while it looks away come together, and the first after a quiet time at once. */
static void many_changes_come_gathered_and_none_is_lost(void **state)
{
    struct written written[MANY] = { 0 };
    struct fixture *f = *state;
    struct flood flood = { 0 };
    struct ep_watch *watch;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_flood, &flood);
    RUN_UNTIL(f, flood.wholes == 1);
    write_many(f, written);
    RUN_UNTIL(f, count_done(written) == MANY);
    assert_true(newest_acknowledged(written) > 0);
    RUN_UNTIL(f, newest_told(&flood) >= newest_acknowledged(written));
    for (size_t i = 0; i < MANY; i++)
        assert_true(written[i].error.status != EP_OK || is_told(&flood, written[i].revision));
    fixture_run_ms(f, 500);
    assert_int_equal(flood.wholes, 1);
    assert_false(flood.disorder);
    assert_int_equal(flood.apart, 0);
    assert_true(flood.commits <= MANY);
    assert_true(flood.calls < MANY);
    put_surely(f, "k/00", "1");
    RUN_UNTIL(f, flood.apart > 0);
    ep_watch_close(watch);
}

static void a_compaction_during_a_break_brings_the_whole_once(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct ep_store *behind;
    struct seen seen = { 0 };
    struct ep_watch *watch;
    char url[128], json[64];

    behind = open_through(f, &p, PATIENT_MS);
    f->store = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    put_surely(f, "k/a", "0");
    put_surely(f, "k/b", "0");
    watch = ep_watch_open(behind, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    proxy_stop(&p);
    put_surely(f, "k/a", "1");
    put_surely(f, "k/b", NULL);
    snprintf(json, sizeof json, "{\"revision\": %" PRIu64 "}", put_surely(f, "k/c", "2"));
    cluster_post(&f->etcd, "/v3/kv/compaction", json);
    proxy_start(&p, f->etcd.client[0]);
    RUN_UNTIL(f, seen.calls == 2);
    put_surely(f, "k/d", "3");
    RUN_UNTIL(f, seen.calls == 3);
    assert_string_equal(seen.text, "[k/a=0 k/b=0 ][k/a=1 k/c=2 ]k/d=3 | ");
    assert_int_equal(seen.wholes, 2);
    ep_watch_close(watch);
    close_store(f, behind);
    proxy_stop(&p);
}

/* This side knows before the record is gone, and so before anybody can take its place. */
static void a_session_that_cannot_renew_is_over_in_time(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct told told = { 0 };
    struct seen seen = { 0 };
    struct ep_store_write write = { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY };
    struct ep_session *session;
    struct ep_store *direct;
    struct ep_watch *watch;
    struct written w;
    char url[128];

    f->store = open_through(f, &p, PATIENT_MS);
    direct = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    session = ep_session_open(f->store, 15000, on_session, &told); /* etcd may stand still for seconds */
    RUN_UNTIL(f, told.begun);
    write.session = session;
    assert_int_equal(commit(f, &write, 1).error.status, EP_OK);
    watch = ep_watch_open(direct, "a", EP_STORE_BEGIN, on_changes, &seen);
    fixture_run_ms(f, 17000); /* it is renewed */
    assert_true(ep_session_alive(session));
    assert_string_equal(seen.text, "[a=1 ]");
    proxy_stop(&p);
    RUN_UNTIL(f, seen.changes || !ep_session_alive(session));
    assert_false(ep_session_alive(session));
    RUN_UNTIL(f, told.failed && seen.changes);
    assert_string_equal(seen.text, "[a=1 ]-a | ");
    assert_text(told.error.text, "the session is lost");
    proxy_start(&p, f->etcd.client[0]);
    w = commit(f, &write, 1);
    assert_int_equal(w.error.status, EP_FAILED_PRECONDITION);
    assert_text(w.error.text, "session");
    assert_int_equal(told.failed, 1);
    ep_session_close(session);
    ep_watch_close(watch);
    close_store(f, direct);
    fixture_close(f);
    proxy_stop(&p);
}

static _Atomic uint64_t suspended_ns;

int __real_clock_gettime(clockid_t clock, struct timespec *out);
int __wrap_clock_gettime(clockid_t clock, struct timespec *out);

/* Of a machine that was suspended for so long. */
int __wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    int rc = __real_clock_gettime(clock, out);

    if (rc == 0 && clock == CLOCK_BOOTTIME)
        out->tv_sec += (time_t)(atomic_load(&suspended_ns) / EP_NS_PER_S);
    return rc;
}

/* etcd ends a lease by its own clock: this side must know at once, and not when it gets round to renewing it. */
static void a_session_does_not_outlive_its_lease_in_suspend(void **state)
{
    struct fixture *f = *state;
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_store_write write = { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY };
    struct written w;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    session = ep_session_open(f->store, 20000, on_session, &told);
    RUN_UNTIL(f, told.begun);
    assert_true(ep_session_alive(session));
    atomic_fetch_add(&suspended_ns, 20 * EP_NS_PER_S);
    assert_false(ep_session_alive(session));
    write.session = session;
    w = commit(f, &write, 1);
    assert_int_equal(w.error.status, EP_FAILED_PRECONDITION);
    assert_text(w.error.text, "session");
    RUN_UNTIL(f, told.failed);
    ep_session_close(session);
}

/* Somebody ends the lease at etcd: told at the next renewal, and a write is refused before that. */
static void a_lease_that_etcd_has_ended_is_told(void **state)
{
    struct fixture *f = *state;
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_store_write write = { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY };

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    session = ep_session_open(f->store, 20000, on_session, &told);
    RUN_UNTIL(f, told.begun);
    write.session = session;
    cluster_kill_member(&f->etcd, 0);
    shell("rm -rf %s/m0", f->directory); /* an etcd that has forgotten everything */
    cluster_start_member(&f->etcd, 0);
    for (int i = 0; i < 20 && put(f, "b", "1", EP_STORE_ANY).error.status; i++)
        ;
    assert_int_equal(commit(f, &write, 1).error.status, EP_FAILED_PRECONDITION);
    RUN_UNTIL(f, told.failed);
    assert_text(told.error.text, "etcd has ended it");
    ep_session_close(session);
}

/* A watch that is ahead of the store: it was set back to an older state. */
static void a_store_that_was_set_back_brings_the_whole(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct ep_watch *watch;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    for (int i = 0; i < 10; i++)
        put_surely(f, "k/a", "old");
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    cluster_kill_member(&f->etcd, 0);
    shell("rm -rf %s/m0", f->directory);
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, seen.wholes == 2);
    put_surely(f, "k/a", "new");
    RUN_UNTIL(f, seen.changes == 1);
    assert_string_equal(seen.text, "[k/a=old ][]k/a=new | ");
    ep_watch_close(watch);
}

/* Nothing has changed there, so the store is beyond the last change all the same; but not where it was. */
static void a_quiet_watch_of_it_does_so_too(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct ep_watch *watch;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "k/a", "old");
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    cluster_kill_member(&f->etcd, 0);
    shell("cp -r %s/m0 %s/old", f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    for (int i = 0; i < 100; i++)
        put_surely(f, "other", "1");
    fixture_run_ms(f, WORD_MS);
    assert_int_equal(seen.wholes, 1);
    cluster_kill_member(&f->etcd, 0);
    shell("rm -rf %s/m0 && mv %s/old %s/m0", f->directory, f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, seen.wholes == 2);
    ep_watch_close(watch);
}

static void note_nothing(struct ep_election *election, bool leading, void *user)
{
    (void)election, (void)leading, (void)user;
}

/* The copy has the lease, and no record of who leads: nobody would lead until etcd has come to where it was. */
static void who_led_a_store_that_was_set_back_leads_again(void **state)
{
    struct fixture *f = *state;
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_election *election;
    struct ep_store_write writes[] = { { .key = "b", .value = "1", .size = 1, .expected = EP_STORE_ANY }, { 0 } };
    uint64_t before;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    session = ep_session_open(f->store, 60000, on_session, &told);
    RUN_UNTIL(f, told.begun);
    cluster_kill_member(&f->etcd, 0);
    shell("cp -r %s/m0 %s/old", f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    for (int i = 0; i < 100; i++)
        put_surely(f, "a", "old");
    election = ep_election_open(f->store, session, "leader", "me", note_nothing, NULL);
    RUN_UNTIL(f, ep_election_leads(election));
    before = ep_election_guard(election).expected;
    cluster_kill_member(&f->etcd, 0);
    shell("rm -rf %s/m0", f->directory);
    shell("mv %s/old %s/m0", f->directory, f->directory);
    cluster_start_member(&f->etcd, 0);
    RUN_UNTIL(f, ep_election_leads(election) && ep_election_guard(election).expected < before);
    assert_int_equal(told.failed, 0);
    writes[1] = ep_election_guard(election);
    assert_string_equal(commit(f, writes, 2).error.text, "");
    ep_election_close(election);
    ep_session_close(session);
}

static void a_full_etcd_is_told_and_got_over(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct written w = { 0 };
    size_t size = 1000000;
    char *big = calloc(1, size + 1);

    f->etcd.flags = "--quota-backend-bytes 10000000";
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    memset(big, 'x', size);
    for (int i = 0; i < 40 && !w.error.status; i++)
        w = put(f, "big", big, EP_STORE_ANY);
    assert_int_equal(w.error.status, EP_RESOURCE_EXHAUSTED);
    assert_text(w.error.text, "space");
    assert_int_equal(ep_store_health(f->store, &error), EP_RESOURCE_EXHAUSTED);
    fixture_run_ms(f, 4000); /* it is asked by now, and still full */
    assert_int_equal(ep_store_health(f->store, NULL), EP_RESOURCE_EXHAUSTED);
    assert_int_equal(list_surely(f, "big").n, 1);
    cluster_kill_member(&f->etcd, 0);
    f->etcd.flags = NULL;
    cluster_start_member(&f->etcd, 0);
    cluster_disarm(&f->etcd);
    RUN_UNTIL(f, ep_store_health(f->store, NULL) == EP_OK);
    free(big);
}

static void a_record_that_is_too_large_is_no_fault_of_the_store(void **state)
{
    struct fixture *f = *state;
    size_t size = 2000000;
    char *big = calloc(1, size + 1);
    struct written w;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    memset(big, 'x', size);
    w = put(f, "big", big, EP_STORE_ANY);
    assert_int_equal(w.error.status, EP_INVALID_ARGUMENT);
    assert_text(w.error.text, "too large");
    assert_int_equal(ep_store_health(f->store, NULL), EP_OK);
    free(big);
}

#define TEST(name) FIXTURE_TEST(#name, name, fixture_setup_etcd)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(a_url_that_is_none_is_told),
        TEST(no_etcd_there_names_the_endpoints_and_the_cause),
        TEST(garbage_on_the_port_is_told_and_the_next_endpoint_asked),
        TEST(prefixes_keep_stores_apart),
        TEST(long_lists_come_in_pages_of_one_moment),
        TEST(kill_9_of_etcd_loses_nothing_and_the_watch_goes_on),
        TEST(one_of_three_members_may_be_gone),
        TEST(without_a_majority_nothing_is_taken_and_it_is_told),
        TEST(a_write_whose_answer_is_lost_is_done_once),
        TEST(a_write_that_was_given_up_may_be_done_but_never_late),
        TEST(a_campaign_whose_answer_is_lost_is_won_all_the_same),
        TEST(changes_during_a_break_come_afterwards),
        TEST(many_changes_come_gathered_and_none_is_lost),
        TEST(a_compaction_during_a_break_brings_the_whole_once),
        TEST(a_session_that_cannot_renew_is_over_in_time),
        TEST(a_session_does_not_outlive_its_lease_in_suspend),
        TEST(a_lease_that_etcd_has_ended_is_told),
        TEST(a_store_that_was_set_back_brings_the_whole),
        TEST(a_quiet_watch_of_it_does_so_too),
        TEST(who_led_a_store_that_was_set_back_leads_again),
        TEST(a_full_etcd_is_told_and_got_over),
        TEST(a_record_that_is_too_large_is_no_fault_of_the_store),
    };
    if (!cluster_installed()) {
        fprintf(stderr, "etcd is not installed (package etcd-server): nothing of the etcd store is tested\n");
        return 77;
    }
    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
