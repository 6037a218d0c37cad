/* The sqlite store: what it refuses to open, and what a crash or a full disk leaves behind.  What it has in common
 * with the other: test_store_contract.c. */
#include "store_fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "store_private.h"

static char program[512]; /* this test, to be run as the writer that gets killed */

/* ---- records ----------------------------------------------------------------------- */

static void writes_are_there_after_a_reopen(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "groups/a/spec", "one", EP_STORE_ABSENT).revision, 1);
    assert_int_equal(put(f, "groups/b/spec", "two", EP_STORE_ANY).revision, 2);
    assert_int_equal(put(f, "node/cordon", "", EP_STORE_ABSENT).revision, 3);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_string_equal(list(f, "groups/").text, "groups/a/spec=one groups/b/spec=two ");
    assert_string_equal(list(f, "").text, "groups/a/spec=one groups/b/spec=two node/cordon= ");
    assert_int_equal(put(f, "x", "y", EP_STORE_ANY).revision, 4);
}

static void revisions_never_go_back(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "a", "1", EP_STORE_ANY).revision, 1);
    assert_int_equal(put(f, "a", NULL, 1).revision, 2);
    assert_int_equal(list(f, "").n, 0);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "a", "1", EP_STORE_ABSENT).revision, 3);
}

/* ---- opening ------------------------------------------------------------------------- */

static void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *file = fopen(path, "we");

    assert_int_equal(fwrite(bytes, 1, n, file), n);
    fclose(file);
}

static long file_size(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? (long)st.st_size : -1;
}

static void a_new_file_is_private(void **state)
{
    struct fixture *f = *state;
    struct stat st;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(stat(f->path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
}

static void a_file_that_is_no_database_is_refused_and_kept(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    char text[5000];

    memset(text, 'x', sizeof text);
    write_file(f->path, text, sizeof text);
    assert_int_not_equal(fixture_open(f, &error), EP_OK);
    assert_non_null(strstr(error.text, f->path));
    assert_non_null(strstr(error.text, "not a store of ep-server"));
    assert_int_equal(file_size(f->path), sizeof text);
}

static void run_sql(const char *path, const char *sql)
{
    char command[512];

    snprintf(command, sizeof command,
             "python3 -c \"import sqlite3,sys; c=sqlite3.connect(sys.argv[1]); c.executescript(sys.argv[2]); "
             "c.close()\""
             " %s \"%s\"",
             path, sql);
    assert_int_equal(system(command), 0);
}

static void another_programs_database_is_refused_and_kept(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    long before;

    run_sql(f->path, "CREATE TABLE mine (x); PRAGMA application_id = 17;");
    before = file_size(f->path);
    assert_int_equal(fixture_open(f, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "database of another program"));
    assert_int_equal(file_size(f->path), before);
}

static void a_newer_schema_is_refused(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    fixture_close(f);
    run_sql(f->path, "PRAGMA user_version = 9;");
    assert_int_equal(fixture_open(f, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "schema 9"));
    assert_non_null(strstr(error.text, "newer server"));
}

static void fill_with(struct fixture *f, unsigned keys, size_t bytes)
{
    char *value = calloc(1, bytes + 1), key[16];

    memset(value, 'v', bytes);
    for (unsigned i = 0; i < keys; i++) {
        snprintf(key, sizeof key, "k%u", i);
        assert_int_equal(put(f, key, value, EP_STORE_ANY).error.status, EP_OK);
    }
    free(value);
}

static void scratch(const char *path, long at)
{
    char garbage[64];
    FILE *file = fopen(path, "r+e");

    memset(garbage, 0xa5, sizeof garbage);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fwrite(garbage, 1, sizeof garbage, file), sizeof garbage);
    fclose(file);
}

/* The start of every page in turn.  Pages that hold nothing but a value cannot be judged. */
static void damage_is_told_not_crashed_on(void **state)
{
    struct fixture *f = *state;
    char original[128], command[400];
    unsigned refused = 0, taken = 0;
    long size;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    fill_with(f, 20, 6000);
    fixture_close(f);
    size = file_size(f->path);
    snprintf(original, sizeof original, "%s/original", f->directory);
    assert_int_equal(rename(f->path, original), 0);
    snprintf(command, sizeof command, "rm -f %s* && cp %s %s", f->path, original, f->path);
    for (long at = 0; at < size; at += 4096) {
        struct ep_error error = EP_ERROR_INIT;

        assert_int_equal(system(command), 0);
        scratch(f->path, at);
        if (fixture_open(f, &error) == EP_OK) {
            taken++;
            (void)list(f, "");
            fixture_close(f);
        } else {
            refused++;
            assert_non_null(strstr(error.text, f->path));
        }
    }
    assert_true(refused >= 3); /* header and both tables' roots at least */
    print_message("%u pages refused, %u not judged\n", refused, taken);
}

static void a_cut_file_is_told(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    fill_with(f, 1, 20000);
    fixture_close(f);
    assert_int_equal(truncate(f->path, file_size(f->path) - 8192), 0);
    assert_int_equal(fixture_open(f, &error), EP_IO);
    assert_non_null(strstr(error.text, "damaged"));
}

static void one_process_at_a_time(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    char command[700];

    assert_int_equal(fixture_open(f, NULL), EP_OK);
    snprintf(command, sizeof command, "%s open %s > /dev/null", program, f->path);
    assert_int_equal(WEXITSTATUS(system(command)), 1);
    fixture_close(f);
    assert_int_equal(WEXITSTATUS(system(command)), 0);
    assert_int_equal(fixture_open(f, &error), EP_OK);
}

static void what_is_no_file_is_refused(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(mkdir(f->path, 0700), 0);
    assert_int_not_equal(fixture_open(f, &error), EP_OK);
    assert_int_equal(rmdir(f->path), 0);
    snprintf(f->path, sizeof f->path, "%s/no/such/store.db", f->directory);
    assert_int_equal(fixture_open(f, &error), EP_IO);
    assert_non_null(strstr(error.text, "No such file"));
}

/* ---- no memory ------------------------------------------------------------------------- */

bool __real_ep_record_list_add(struct ep_record_list *list, const char *key, const void *value, size_t size,
                               uint64_t revision);
bool __wrap_ep_record_list_add(struct ep_record_list *list, const char *key, const void *value, size_t size,
                               uint64_t revision);

static atomic_int records_lost; /* so many of the next */

bool __wrap_ep_record_list_add(struct ep_record_list *list, const char *key, const void *value, size_t size,
                               uint64_t revision)
{
    if (atomic_load(&records_lost) > 0 && atomic_fetch_sub(&records_lost, 1) > 0)
        return false;
    return __real_ep_record_list_add(list, key, value, size, revision);
}

/* Nobody writes meanwhile. */
static void a_watch_that_found_no_memory_is_told_later(void **state)
{
    for (int lost = 1; lost <= 3; lost++) {
        struct fixture *f = *state;
        struct seen seen = { 0 };
        struct ep_watch *watch;

        assert_int_equal(fixture_open(f, NULL), EP_OK);
        (void)put(f, "a/1", "x", EP_STORE_ANY);
        atomic_store(&records_lost, lost);
        watch = ep_watch_open(f->store, "a/", EP_STORE_BEGIN, on_changes, &seen);
        RUN_UNTIL(f, seen.calls);
        assert_string_equal(seen.text, "[a/1=x ]");
        (void)put(f, "a/2", "y", EP_STORE_ANY);
        RUN_UNTIL(f, seen.calls == 2);
        assert_string_equal(seen.text, "[a/1=x ]a/2=y | ");
        ep_watch_close(watch);
        (void)put(f, "a/2", NULL, EP_STORE_ANY);
        fixture_close(f);
    }
}

/* ---- a full disk ------------------------------------------------------------------------ */

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void a_full_disk_is_told_and_got_over(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct written w;

    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "a", "before", EP_STORE_ANY).error.status, EP_OK);
    limit_files(1024);
    w = put(f, "a", "meanwhile", EP_STORE_ANY);
    limit_files(RLIM_INFINITY);
    assert_int_equal(w.error.status, EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(w.error.text, f->path));
    assert_int_equal(ep_store_health(f->store, &error), EP_RESOURCE_EXHAUSTED);
    assert_string_equal(error.text, w.error.text);
    assert_string_equal(list(f, "").text, "a=before ");
    assert_int_equal(put(f, "a", "after", 1).error.status, EP_OK);
    assert_int_equal(ep_store_health(f->store, NULL), EP_OK);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_string_equal(list(f, "").text, "a=after ");
}

/* ---- a file that is gone ----------------------------------------------------------------- */

static void what_a_removed_file_would_take_is_refused(void **state)
{
    struct fixture *f = *state;
    char away[sizeof f->path + 8];
    struct written w;

    snprintf(away, sizeof away, "%s.away", f->path);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "a", "before", EP_STORE_ANY).error.status, EP_OK);
    assert_int_equal(rename(f->path, away), 0);
    for (int other = 0; other < 2; other++) {
        if (other)
            write_file(f->path, "", 0);
        w = put(f, "a", "meanwhile", EP_STORE_ANY);
        assert_int_equal(w.error.status, EP_UNAVAILABLE);
        assert_non_null(strstr(w.error.text, "it has been removed"));
        assert_int_equal(ep_store_health(f->store, NULL), EP_UNAVAILABLE);
        assert_string_equal(list(f, "").text, "a=before ");
    }
    assert_int_equal(rename(away, f->path), 0);
    assert_int_equal(put(f, "a", "after", 1).error.status, EP_OK);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_string_equal(list(f, "").text, "a=after ");
}

/* ---- kill -9 ---------------------------------------------------------------------------- */

/* The writer: pairs of records that must always agree; acknowledged revisions go to stdout. */
static void acknowledge(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)user;
    if (error->status || write(STDOUT_FILENO, &revision, sizeof revision) != sizeof revision)
        _exit(3);
}

static int writer(const char *path)
{
    uv_loop_t loop;
    struct ep_store *store;

    uv_loop_init(&loop);
    if (ep_store_open_sqlite(&loop, path, &store, NULL))
        return 1;
    for (uint64_t i = 0;; i++) {
        char left[32], right[32], value[32];
        struct ep_store_write writes[2];
        int n = snprintf(value, sizeof value, "%" PRIu64, i);

        snprintf(left, sizeof left, "left/%" PRIu64, i % 16);
        snprintf(right, sizeof right, "right/%" PRIu64, i % 16);
        writes[0] = (struct ep_store_write){
            .key = left, .value = value, .size = (size_t)n, .expected = EP_STORE_ANY
        };
        writes[1] = (struct ep_store_write){
            .key = right, .value = value, .size = (size_t)n, .expected = EP_STORE_ANY
        };
        ep_store_commit(store, writes, 2, acknowledge, NULL);
        for (int turn = 0; turn < 3; turn++) /* some commits are under way at once */
            uv_run(&loop, UV_RUN_NOWAIT);
        if (i % 8 == 7)
            uv_run(&loop, UV_RUN_ONCE);
    }
}

static int try_open(const char *path)
{
    struct fixture f = { .store = NULL };
    ep_status status;

    uv_loop_init(&f.loop);
    status = ep_store_open_sqlite(&f.loop, path, &f.store, NULL);
    if (!status)
        fixture_close(&f);
    uv_loop_close(&f.loop);
    return status != EP_OK;
}

/* Starts the writer, reads `count` acknowledgements, kills it, reads the rest. */
static uint64_t write_until_killed(const char *path, unsigned count)
{
    uint64_t revision = 0, last = 0;
    int pipes[2], status;
    pid_t pid;

    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        execl(program, program, "writer", path, (char *)NULL);
        _exit(4);
    }
    close(pipes[1]);
    while (read(pipes[0], &revision, sizeof revision) == sizeof revision) {
        assert_true(revision > last);
        last = revision;
        if (count && --count == 0)
            kill(pid, SIGKILL);
    }
    close(pipes[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    return last;
}

struct audit {
    bool done;
    uint64_t newest;
    unsigned pairs, torn;
};

/* left/N and right/N were written together: same value, same revision. */
static void on_audit(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct audit *audit = user;

    audit->done = true;
    audit->torn += error->status != EP_OK || n % 2;
    for (size_t i = 0; i < n / 2; i++) {
        const struct ep_record *left = &records[i], *right = &records[n / 2 + i];

        audit->pairs++;
        audit->torn += strcmp(left->key + 5, right->key + 6) || left->revision != right->revision ||
                       left->size != right->size || memcmp(left->value, right->value, left->size);
        if (left->revision > audit->newest)
            audit->newest = left->revision;
    }
}

static void kill_9_loses_nothing_that_was_acknowledged(void **state)
{
    struct fixture *f = *state;
    unsigned seed = (unsigned)time(NULL);

    print_message("seed %u\n", seed);
    for (int round = 0; round < 30; round++) {
        uint64_t acknowledged = write_until_killed(f->path, 1 + (unsigned)rand_r(&seed) % 60);
        struct audit audit = { 0 };

        assert_int_equal(fixture_open(f, NULL), EP_OK);
        ep_store_list(f->store, "", on_audit, &audit);
        RUN_UNTIL(f, audit.done);
        assert_int_equal(audit.torn, 0);
        assert_true(audit.newest >= acknowledged);
        fixture_close(f);
    }
}

#define TEST(name) FIXTURE_TEST(#name, name, fixture_setup)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(writes_are_there_after_a_reopen),
        TEST(revisions_never_go_back),
        TEST(a_new_file_is_private),
        TEST(a_file_that_is_no_database_is_refused_and_kept),
        TEST(another_programs_database_is_refused_and_kept),
        TEST(a_newer_schema_is_refused),
        TEST(damage_is_told_not_crashed_on),
        TEST(a_cut_file_is_told),
        TEST(one_process_at_a_time),
        TEST(what_is_no_file_is_refused),
        TEST(a_full_disk_is_told_and_got_over),
        TEST(what_a_removed_file_would_take_is_refused),
        TEST(a_watch_that_found_no_memory_is_told_later),
        TEST(kill_9_loses_nothing_that_was_acknowledged),
    };

    if (argc == 3 && !strcmp(argv[1], "writer"))
        return writer(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "open"))
        return try_open(argv[2]);
    assert_true(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
