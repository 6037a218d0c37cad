/*
 * The etcd store when things fail: etcd killed, a member of three killed, answers lost, the line cut, a process
 * stopped for longer than its lease, users, TLS, and what is no etcd at all.
 */
#include "store_fixture.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep_log.h"

static char program[512]; /* this test, to be run as a candidate */

static int setup(void **state)
{
    struct fixture *f;

    fixture_setup(state);
    f = *state;
    f->on_etcd = true;
    return 0;
}

static struct ep_store *open_at(struct fixture *f, const struct ep_store_etcd *options)
{
    struct ep_store *store;
    struct ep_error error = EP_ERROR_INIT;

    if (ep_store_open_etcd(&f->loop, options, &store, &error))
        fail_msg("%s", error.text);
    return store;
}

static struct ep_store *open_url(struct fixture *f, const char *url)
{
    return open_at(f, &(const struct ep_store_etcd){ .url = url, .answer_within_ms = ANSWER_WITHIN_MS });
}

static struct listed list_of(struct fixture *f, struct ep_store *store, const char *prefix)
{
    struct listed listed = { 0 };

    ep_store_list(store, prefix, on_listed, &listed);
    RUN_UNTIL(f, listed.done);
    return listed;
}

/* Until it is taken: etcd may be on its way back. */
static uint64_t put_surely(struct fixture *f, const char *key, const char *value)
{
    for (int i = 0; i < 20; i++) {
        struct written w = put(f, key, value, EP_STORE_ANY);

        if (!w.error.status)
            return w.revision;
    }
    fail_msg("%s was never written", key);
    return 0;
}

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
    pid_t pid = fork();

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
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
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
    assert_string_equal(list(f, "").text, "a=1 ");
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
    assert_int_equal(list(f, "k").n, 5 * EP_STORE_MAX_WRITES);
    assert_int_equal(list(f, "k49").n, 10);
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
    assert_int_equal(list(f, "k/").n, 11);
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
    assert_string_equal(list(f, "").text, "a=3 ");
}

/* ---- the line ------------------------------------------------------------------------ */

static struct ep_store *open_through(struct fixture *f, struct proxy *p)
{
    char url[128];

    cluster_start(&f->etcd, 1, f->directory);
    proxy_start(p, f->etcd.client[0]);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d/test", p->port);
    return open_url(f, url);
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

    f->store = open_through(f, &p);
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

    f->store = open_through(f, &p);
    put_surely(f, "a", "0");
    proxy_swallow(&p);
    w = put(f, "a", "given up", EP_STORE_ANY);
    assert_int_equal(w.error.status, EP_UNAVAILABLE);
    proxy_stop(&p);
    proxy_start(&p, f->etcd.client[0]);
    put_surely(f, "a", "last");
    fixture_run_ms(f, 500);
    assert_string_equal(list(f, "").text, "a=last ");
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

    direct = open_through(f, &p);
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

static void a_compaction_during_a_break_brings_the_whole_once(void **state)
{
    struct fixture *f = *state;
    struct proxy p = { 0 };
    struct ep_store *behind;
    struct seen seen = { 0 };
    struct ep_watch *watch;
    char url[128], json[64];

    behind = open_through(f, &p);
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

    f->store = open_through(f, &p);
    direct = open_url(f, cluster_url(&f->etcd, "/test", url, sizeof url));
    session = ep_session_open(f->store, 2000, on_session, &told);
    RUN_UNTIL(f, told.begun);
    write.session = session;
    assert_int_equal(commit(f, &write, 1).error.status, EP_OK);
    watch = ep_watch_open(direct, "a", EP_STORE_BEGIN, on_changes, &seen);
    fixture_run_ms(f, 4500); /* it is renewed */
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
    assert_int_equal(list(f, "big").n, 1);
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

/* ---- users and TLS --------------------------------------------------------------------- */

static void make_users(struct fixture *f)
{
    cluster_post(&f->etcd, "/v3/auth/user/add", "{\"name\": \"root\", \"password\": \"secret\"}");
    cluster_post(&f->etcd, "/v3/auth/role/add", "{\"name\": \"root\"}");
    cluster_post(&f->etcd, "/v3/auth/user/grant", "{\"user\": \"root\", \"role\": \"root\"}");
    cluster_post(&f->etcd, "/v3/auth/user/add", "{\"name\": \"nobody\", \"password\": \"secret\"}");
    cluster_post(&f->etcd, "/v3/auth/enable", "{}");
}

static void make_certificates(const char *directory)
{
    shell(
        "cd %s && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca "
        "-keyout ca.key -out ca.pem 2>/dev/null",
        directory);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "client" : "server";

        shell("cd %s && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=%s -keyout "
              "%s.key "
              "-out %s.csr 2>/dev/null && printf "
              "'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth' "
              "> %s.ext && openssl x509 -req -in %s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
              "-extfile "
              "%s.ext -out %s.pem 2>/dev/null",
              directory, name, name, name, name, name, name, name);
    }
}

/* What a login needs, in the fixture's directory. */
struct credentials {
    char url[128], ca[96], cert[96], key[96], password[96];
};

static struct credentials credentials_of(struct fixture *f, const char *password)
{
    struct credentials c;

    cluster_url(&f->etcd, "/test", c.url, sizeof c.url);
    snprintf(c.ca, sizeof c.ca, "%s/ca.pem", f->directory);
    snprintf(c.cert, sizeof c.cert, "%s/client.pem", f->directory);
    snprintf(c.key, sizeof c.key, "%s/client.key", f->directory);
    snprintf(c.password, sizeof c.password, "%s/password", f->directory);
    shell("printf '%s\\n' > %s", password, c.password);
    return c;
}

static void expect_refused(struct fixture *f, const struct ep_store_etcd *options, ep_status status,
                           const char *why)
{
    struct ep_store *store = open_at(f, options);
    struct listed listed = list_of(f, store, "");

    assert_int_equal(listed.error.status, status);
    assert_text(listed.error.text, why);
    close_store(f, store);
}

static void users_log_in_and_again_when_etcd_has_forgotten_them(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_watch *watch;
    struct ep_store_etcd options;
    struct credentials c;

    cluster_start(&f->etcd, 1, f->directory);
    make_users(f);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){
        .url = c.url, .user = "root", .password_file = c.password, .answer_within_ms = ANSWER_WITHIN_MS
    };
    f->store = open_at(f, &options);
    put_surely(f, "k/a", "1");
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    session = ep_session_open(f->store, 15000, on_session, &told);
    RUN_UNTIL(f, seen.calls == 1 && told.begun);
    cluster_kill_member(&f->etcd, 0); /* its tokens are gone with it */
    cluster_start_member(&f->etcd, 0);
    put_surely(f, "k/a", "2");
    RUN_UNTIL(f, seen.changes == 1);
    fixture_run_ms(f, 6000); /* a renewal */
    assert_true(ep_session_alive(session));
    ep_watch_close(watch);
    ep_session_close(session);

    options.user = "nobody";
    expect_refused(f, &options, EP_PERMISSION_DENIED, "permission denied");
    options.user = NULL;
    expect_refused(f, &options, EP_UNAUTHENTICATED, "asks for a user");
    options.user = "root";
    shell("printf wrong > %s", c.password);
    expect_refused(f, &options, EP_UNAUTHENTICATED, "etcd refuses user root");
    options.password_file = "/no/such/file";
    expect_refused(f, &options, EP_UNAUTHENTICATED, "/no/such/file");
}

static void a_user_where_there_are_none_is_told(void **state)
{
    struct fixture *f = *state;
    struct ep_store_etcd options;
    struct credentials c;

    cluster_start(&f->etcd, 1, f->directory);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){
        .url = c.url, .user = "root", .password_file = c.password, .answer_within_ms = ANSWER_WITHIN_MS
    };
    expect_refused(f, &options, EP_UNAUTHENTICATED, "authentication is not enabled");
}

static void tls_with_certificates_on_both_sides(void **state)
{
    struct fixture *f = *state;
    struct ep_store_etcd options;
    struct credentials c;

    make_certificates(f->directory);
    cluster_start(&f->etcd, 1, f->directory);
    make_users(f);
    cluster_kill_member(&f->etcd, 0);
    f->etcd.tls = true;
    cluster_start_member(&f->etcd, 0);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){ .url = c.url,
                                      .ca = c.ca,
                                      .cert = c.cert,
                                      .key = c.key,
                                      .user = "root",
                                      .password_file = c.password,
                                      .answer_within_ms = ANSWER_WITHIN_MS };
    f->store = open_at(f, &options);
    put_surely(f, "a", "1");
    assert_string_equal(list(f, "").text, "a=1 ");
    options.cert = options.key = NULL; /* etcd asks for one */
    expect_refused(f, &options, EP_UNAVAILABLE, "127.0.0.1");
    options.ca = NULL;
    expect_refused(f, &options, EP_UNAVAILABLE, "does the server expect TLS?");
}

/* ---- two candidates ---------------------------------------------------------------------- */

/*
 * A candidate: a process that runs for the lead and, as long as it thinks it leads, writes "work" with its term in a
 * guarded commit, one after the other.  On stdout a letter for each thing it sees: L leads, N does not, W written,
 * R refused, X session lost.
 */
struct runner {
    uv_loop_t loop;
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
    r->session = ep_session_open(r->store, 2000, on_runner_session, r);
    r->election = ep_election_open(r->store, r->session, "leader", r->name, on_lead, r);
}

static int candidate(const char *url)
{
    const struct ep_store_etcd options = { .url = url };
    struct runner r = { .store = NULL };

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
    char text[1 << 16]; /* the newest letters */
    size_t n;
};

static void child_start(struct child *child, const char *url)
{
    int pipes[2];

    assert_int_equal(pipe2(pipes, O_CLOEXEC | O_NONBLOCK), 0);
    child->n = 0;
    child->out = pipes[0];
    child->pid = fork();
    assert_true(child->pid >= 0);
    if (child->pid == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        fcntl(STDOUT_FILENO, F_SETFL, 0);
        execl(program, program, "candidate", url, (char *)NULL);
        _exit(4);
    }
    close(pipes[1]);
}

static void child_end(struct child *child)
{
    kill(child->pid, SIGKILL);
    waitpid(child->pid, NULL, 0);
    close(child->out);
}

/* Has it said this letter since the last forget? */
static bool child_said(struct child *child, char letter)
{
    ssize_t k;

    while ((k = read(child->out, child->text + child->n, sizeof child->text - child->n - 1)) > 0) {
        child->n += (size_t)k;
        if (child->n > sizeof child->text / 2)
            child->n = 0;
    }
    return memchr(child->text, letter, child->n) != NULL;
}

static void child_forget(struct child *child)
{
    (void)child_said(child, 0);
    child->n = 0;
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

static void a_stopped_leader_has_lost_the_lead_and_is_told(void **state)
{
    struct fixture *f = *state;
    static struct child a, b;
    struct terms terms = { "", 0, 0, false };
    struct ep_watch *watch;
    char url[128];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    put_surely(f, "begin", "v");
    cluster_url(&f->etcd, "/test", url, sizeof url);
    watch = ep_watch_open(f->store, "work", EP_STORE_BEGIN, on_work, &terms);
    child_start(&a, url);
    RUN_UNTIL(f, child_said(&a, 'W'));
    child_start(&b, url);
    RUN_UNTIL(f, child_said(&b, 'N'));
    kill(a.pid, SIGSTOP);
    child_forget(&a);
    RUN_UNTIL(f, child_said(&b, 'W'));
    kill(a.pid, SIGCONT);
    RUN_UNTIL(f, child_said(&a, 'X')); /* its session is lost */
    child_forget(&a);
    RUN_UNTIL(f, child_said(&a, 'N')); /* it runs again, and another leads */
    assert_false(child_said(&a, 'W'));
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
        child_start(&children[i], url);
    for (int round = 0; round < 10; round++) {
        struct child *victim = &children[(unsigned)rand_r(&seed) % 3];

        if (round == 5) {
            cluster_kill_member(&f->etcd, 0);
            cluster_start_member(&f->etcd, 0);
        }
        if (rand_r(&seed) % 3 == 0) {
            child_end(victim);
            child_start(victim, url);
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
    child_start(&children[0], url); /* a term that is not the first, whatever chance has brought */
    RUN_UNTIL(f, child_said(&children[0], 'W') && terms.terms >= 2);
    child_end(&children[0]);
    ep_watch_close(watch);
    print_message("%u writes in %u terms\n", terms.works, terms.terms);
    assert_false(terms.back);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)

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
        TEST(changes_during_a_break_come_afterwards),
        TEST(a_compaction_during_a_break_brings_the_whole_once),
        TEST(a_session_that_cannot_renew_is_over_in_time),
        TEST(a_lease_that_etcd_has_ended_is_told),
        TEST(a_store_that_was_set_back_brings_the_whole),
        TEST(a_full_etcd_is_told_and_got_over),
        TEST(a_record_that_is_too_large_is_no_fault_of_the_store),
        TEST(users_log_in_and_again_when_etcd_has_forgotten_them),
        TEST(a_user_where_there_are_none_is_told),
        TEST(tls_with_certificates_on_both_sides),
        TEST(a_stopped_leader_has_lost_the_lead_and_is_told),
        TEST(two_leaders_never_both_write),
    };
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);

    if (argc == 3 && !strcmp(argv[1], "candidate"))
        return candidate(argv[2]);
    if (n < 0 || !cluster_installed()) {
        fprintf(stderr, "etcd is not installed (package etcd-server): nothing of the etcd store is tested\n");
        return 77;
    }
    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
