/* proto/base: status, error, log, secret, thread. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "ep_error.h"
#include "ep_log.h"
#include "ep_secret.h"
#include "ep_status.h"
#include "ep_thread.h"
#include "ep_utf8.h"

/* ---- status -------------------------------------------------------------------------- */

static void names_go_there_and_back(void **state)
{
    (void)state;
#define X(name, value, grpc, exit, text)                                \
    assert_string_equal(ep_status_name(EP_##name), #name);              \
    assert_int_equal(ep_status_from_name(#name), EP_##name);            \
    assert_string_equal(ep_status_text(EP_##name), text);               \
    assert_int_equal(ep_status_to_grpc(EP_##name), grpc);               \
    assert_int_equal(ep_status_exit_code(EP_##name), exit);
    EP_STATUS_LIST(X)
#undef X
}

static void values_outside_the_list_are_harmless(void **state)
{
    (void)state;
    assert_string_equal(ep_status_name((ep_status)999), "?");
    assert_string_equal(ep_status_name((ep_status)-1), "?");
    assert_non_null(ep_status_text((ep_status)999));
    assert_int_equal(ep_status_to_grpc((ep_status)999), 13);
    assert_int_equal(ep_status_exit_code((ep_status)999), 1);
    assert_int_equal(ep_status_from_name("NO_SUCH"), EP_INTERNAL);
    assert_int_equal(ep_status_from_name(NULL), EP_INTERNAL);
}

static void every_grpc_code_becomes_a_status(void **state)
{
    (void)state;
    for (int code = 1; code <= 16; code++)
        assert_int_not_equal(ep_status_from_grpc(code), EP_OK);
    assert_int_equal(ep_status_from_grpc(0), EP_OK);
    assert_int_equal(ep_status_from_grpc(4), EP_DEADLINE_EXCEEDED);
    assert_int_equal(ep_status_from_grpc(14), EP_UNAVAILABLE);
    assert_int_equal(ep_status_from_grpc(2), EP_INTERNAL);
    assert_int_equal(ep_status_from_grpc(10), EP_FAILED_PRECONDITION);
    assert_int_equal(ep_status_from_grpc(77), EP_INTERNAL);
}

/* ---- error --------------------------------------------------------------------------- */

static void error_is_filled_and_returned(void **state)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    assert_int_equal(ep_error_set(&error, EP_INVALID_ARGUMENT, "top_k is %d", 99), EP_INVALID_ARGUMENT);
    assert_int_equal(error.status, EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, "top_k is 99");
    assert_int_equal(ep_error_set(NULL, EP_IO, "x"), EP_IO);
}

static void error_takes_its_own_text(void **state)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    ep_error_set(&error, EP_IO, "inner");
    ep_error_set(&error, EP_IO, "outer: %s", error.text);
    assert_string_equal(error.text, "outer: inner");
}

static void errno_is_appended_and_kept(void **state)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    errno = ENOENT;
    assert_int_equal(ep_error_errno(&error, EP_NOT_FOUND, "open %s", "/x"), EP_NOT_FOUND);
    assert_string_equal(error.text, "open /x: No such file or directory");
    assert_int_equal(errno, ENOENT);
}

static void prefix_goes_before(void **state)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    ep_error_set(&error, EP_NOT_FOUND, "no such key");
    assert_int_equal(ep_error_prefix(&error, "group %s", "moe"), EP_NOT_FOUND);
    assert_string_equal(error.text, "group moe: no such key");
    assert_int_not_equal(ep_error_prefix(NULL, "x"), EP_OK);
}

static void long_text_is_cut(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    char text[2 * EP_ERROR_TEXT_MAX];

    (void)state;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    ep_error_set(&error, EP_IO, "%s", text);
    assert_int_equal(strlen(error.text), EP_ERROR_TEXT_MAX - 1);
    ep_error_prefix(&error, "%s", text);
    assert_int_equal(strlen(error.text), EP_ERROR_TEXT_MAX - 1);
    errno = EIO;
    ep_error_errno(&error, EP_IO, "%s", text);
    assert_int_equal(strlen(error.text), EP_ERROR_TEXT_MAX - 1);
}

static void text_is_not_cut_inside_a_character(void **state)
{
    (void)state;
    for (size_t lead = 0; lead < 8; lead++) {
        struct ep_error error = EP_ERROR_INIT;
        char text[2 * EP_ERROR_TEXT_MAX] = "";
        json_t *json;

        memset(text, 'a', lead);
        while (strlen(text) < EP_ERROR_TEXT_MAX + 8)
            strcat(text, "\xf0\x9f\x92\xa5"); /* four bytes each */
        ep_error_set(&error, EP_IO, "%s", text);
        assert_true(strlen(error.text) >= EP_ERROR_TEXT_MAX - 4);
        json = json_string(error.text); /* takes valid UTF-8 only */
        assert_non_null(json);
        json_decref(json);
    }
}

/* ---- utf8 ---------------------------------------------------------------------------- */

static void utf8_is_told_from_other_bytes(void **state)
{
    static const char *const valid[] = { "", "plain", "\xc3\xa9", "a\xe2\x82\xac", "\xf0\x9f\x92\xa5!" };
    static const char *const wrong[] = { "\xff", "a\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x92", "\xc0\x80", "\xed\xa0\x80",
                                         "\xf4\x90\x80\x80" };

    (void)state;
    for (size_t i = 0; i < sizeof valid / sizeof *valid; i++)
        assert_true(ep_utf8_is_valid(valid[i]));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_false(ep_utf8_is_valid(wrong[i]));
}

static void utf8_fits_in_whole_characters(void **state)
{
    static const char text[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x92\xa5";
    static const size_t fit[] = { 0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10 };

    (void)state;
    for (size_t most = 0; most < sizeof fit / sizeof *fit; most++)
        assert_int_equal(ep_utf8_fit(text, most), fit[most]);
}

static void utf8_is_mended_in_place(void **state)
{
    char text[] = "a\xff\xc3\xa9\xe2\x82";

    (void)state;
    ep_utf8_mend(text);
    assert_string_equal(text, "a?\xc3\xa9??");
}

/* ---- log ----------------------------------------------------------------------------- */

/* What was written to standard error, and in how many write(2) calls. */
struct capture {
    int pipe[2], old;
    char text[16384];
};

static void capture_begin(struct capture *c)
{
    assert_int_equal(pipe(c->pipe), 0);
    c->old = dup(STDERR_FILENO);
    dup2(c->pipe[1], STDERR_FILENO);
}

static void capture_end(struct capture *c)
{
    ssize_t n;

    dup2(c->old, STDERR_FILENO);
    close(c->old);
    close(c->pipe[1]);
    n = read(c->pipe[0], c->text, sizeof c->text - 1);
    close(c->pipe[0]);
    c->text[n > 0 ? n : 0] = '\0';
}

static void logfmt_quotes_what_needs_it(void **state)
{
    struct capture c;

    (void)state;
    ep_log_configure(EP_LOG_INFO, EP_LOG_LOGFMT);
    capture_begin(&c);
    EP_INFO("attach", "rank claimed", EP_S("group", "moe-1"), EP_I("rank", -3), EP_U("n", UINT64_MAX),
            EP_D("d", 0.5), EP_B("b", true), EP_S("empty", ""), EP_S("eq", "a=b"),
            EP_S("q", "say \"hi\"\\\n\t\x01\x7f"), EP_S("none", NULL), EP_S("bad key", "x"));
    capture_end(&c);
    assert_memory_equal(c.text, "ts=", 3);
    assert_non_null(strstr(c.text, " level=info mod=attach msg=\"rank claimed\" group=moe-1 rank=-3"
                                   " n=18446744073709551615 d=0.5 b=true empty=\"\" eq=\"a=b\""
                                   " q=\"say \\\"hi\\\"\\\\\\n\\t\\u0001\\u007f\" none=null bad_key=x\n"));
}

static void json_line_holds_every_byte(void **state)
{
    char all[256];
    struct capture c;
    json_t *json;

    (void)state;
    for (int i = 1; i < 256; i++)
        all[i - 1] = (char)i;
    all[255] = '\0';
    ep_log_configure(EP_LOG_INFO, EP_LOG_JSON);
    capture_begin(&c);
    EP_INFO("m", "msg", EP_S("all", all), EP_D("nan", 0.0 / (all[0] - 1)), EP_S(all, "key"),
            EP_S("utf8", "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x92\xa5"));
    capture_end(&c);
    json = json_loads(c.text, 0, NULL);
    assert_non_null(json);
    assert_memory_equal(json_string_value(json_object_get(json, "all")), all, 127);
    assert_non_null(strstr(json_string_value(json_object_get(json, "all")), "\xef\xbf\xbd"));
    assert_true(json_is_null(json_object_get(json, "nan")));
    assert_string_equal(json_string_value(json_object_get(json, "utf8")),
                        "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x92\xa5");
    assert_string_equal(json_string_value(json_object_get(json, "level")), "info");
    json_decref(json);
}

/* Overlong forms, surrogates, cut sequences, and what is above U+10FFFF are no UTF-8. */
static void json_replaces_invalid_utf8(void **state)
{
    static const char *const bad[] = { "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80",
                                       "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80",
                                       "\xe2\x82", "\xf0\x9f\x92", "\x80", "\xff" };

    (void)state;
    ep_log_configure(EP_LOG_INFO, EP_LOG_JSON);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct capture c;
        json_t *json;

        capture_begin(&c);
        EP_INFO("m", "msg", EP_S("v", bad[i]));
        capture_end(&c);
        json = json_loads(c.text, 0, NULL);
        assert_non_null(json);
        assert_non_null(strstr(json_string_value(json_object_get(json, "v")), "\xef\xbf\xbd"));
        json_decref(json);
    }
}

static void level_decides(void **state)
{
    struct capture c;

    (void)state;
    ep_log_configure(EP_LOG_WARN, EP_LOG_LOGFMT);
    capture_begin(&c);
    EP_INFO("m", "not this");
    EP_WARN("m", "this");
    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    EP_ERROR("m", "nor this");
    capture_end(&c);
    assert_null(strstr(c.text, "not this"));
    assert_non_null(strstr(c.text, "msg=this"));
    assert_null(strstr(c.text, "nor this"));
}

static void audit_lines_are_written_whatever_the_level(void **state)
{
    struct capture c;

    (void)state;
    capture_begin(&c);
    for (int level = EP_LOG_DEBUG; level <= EP_LOG_OFF; level++) {
        ep_log_configure((enum ep_log_level)level, EP_LOG_LOGFMT);
        EP_AUDIT("change made", EP_I("at", level));
    }
    capture_end(&c);
    for (int level = EP_LOG_DEBUG; level <= EP_LOG_OFF; level++) {
        char line[80];

        snprintf(line, sizeof line, " level=info mod=audit msg=\"change made\" at=%d\n", level);
        assert_non_null(strstr(c.text, line));
    }
}

static void long_line_is_whole(void **state)
{
    struct capture c;
    char text[8000];

    (void)state;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    ep_log_configure(EP_LOG_INFO, EP_LOG_LOGFMT);
    capture_begin(&c);
    EP_INFO("m", "long", EP_S("v", text));
    capture_end(&c);
    assert_non_null(strstr(c.text, text));
    assert_int_equal(c.text[strlen(c.text) - 1], '\n');
}

/* Takes what is in the pipe. */
static void drain(struct capture *c)
{
    ssize_t n = read(c->pipe[0], c->text, sizeof c->text - 1);

    assert_true(n > 0);
    c->text[n] = '\0';
}

static unsigned lines_of(const char *text)
{
    unsigned n = 0;

    for (; *text; text++)
        n += *text == '\n';
    return n;
}

/* Where a line that waits for its reader would stand still for ever, this test would too. */
static void a_reader_that_stands_still_stops_nobody(void **state)
{
    const unsigned written = 100;
    unsigned before, lines;
    struct capture c;
    char text[1000];
    const char *tell;

    (void)state;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    ep_log_configure(EP_LOG_INFO, EP_LOG_LOGFMT);
    capture_begin(&c);
    assert_true(fcntl(c.pipe[0], F_SETPIPE_SZ, 8192) <= (int)sizeof c.text - 1);
    for (unsigned i = 0; i < written; i++)
        EP_INFO("m", "before", EP_S("v", text));
    drain(&c);
    before = lines_of(c.text);
    EP_INFO("m", "after");
    capture_end(&c);
    tell = strstr(c.text, "level=warn mod=log msg=\"lines were lost: they could not be written\" lines=");
    assert_non_null(tell);
    assert_int_equal(sscanf(strstr(tell, "lines="), "lines=%u", &lines), 1);
    assert_int_equal(before + lines, written);
    assert_non_null(strstr(tell, "msg=after\n"));
}

/* A line that is longer than the room that there is loses its end, and what follows begins on a line of its own. */
static void a_line_that_is_cut_is_ended(void **state)
{
    struct capture c;
    char text[12000];

    (void)state;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    ep_log_configure(EP_LOG_INFO, EP_LOG_LOGFMT);
    capture_begin(&c);
    assert_true(fcntl(c.pipe[0], F_SETPIPE_SZ, 8192) < (int)sizeof text);
    EP_INFO("m", "cut", EP_S("v", text));
    drain(&c);
    assert_int_equal(lines_of(c.text), 0);
    EP_INFO("m", "after");
    capture_end(&c);
    assert_memory_equal(c.text, "\nts=", 4);
    assert_non_null(strstr(c.text, " lines=1\nts="));
    assert_non_null(strstr(c.text, "msg=after\n"));
}

static void logging_keeps_errno(void **state)
{
    struct capture c;

    (void)state;
    ep_log_configure(EP_LOG_INFO, EP_LOG_LOGFMT);
    capture_begin(&c);
    close(STDERR_FILENO);
    errno = ENOSPC;
    EP_INFO("m", "goes nowhere");
    assert_int_equal(errno, ENOSPC);
    capture_end(&c);
}

/* ---- secrets ---------------------------------------------------------------------- */

static ep_status secret_of(const char *bytes, size_t n, char out[static 9], struct ep_error *error)
{
    char path[] = "/tmp/ep-secret-XXXXXX";
    const int fd = mkstemp(path);
    ep_status status;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
    status = ep_secret_read(path, out, 9, error);
    unlink(path);
    return status;
}

static void a_secret_is_the_first_line(void **state)
{
    static const char *const good[] = { "secret", "secret\n", "secret\r\n", "secret\nand more that is not read\n" };
    struct ep_error error = EP_ERROR_INIT;
    char out[9];

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(secret_of(good[i], strlen(good[i]), out, &error), EP_OK);
        assert_string_equal(out, "secret");
    }
    assert_int_equal(secret_of("12345678\r\n", 10, out, &error), EP_OK);
    assert_string_equal(out, "12345678");
}

static void a_secret_is_short_and_text(void **state)
{
    static const struct { const char *bytes; size_t n; } bad[] = {
        { "", 0 }, { "\n", 1 }, { "\nsecret", 7 }, { "123456789", 9 }, { "123456789\n", 10 }, { "12345678901234", 14 },
        { "a\0b\n", 4 },
    };
    struct ep_error error = EP_ERROR_INIT;
    char out[9];

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(secret_of(bad[i].bytes, bad[i].n, out, &error), EP_INVALID_ARGUMENT);
        assert_non_null(strstr(error.text, "must have 1 to 8 bytes of text"));
        assert_string_equal(out, "");
    }
    assert_int_equal(ep_secret_read("/no/such/file", out, sizeof out, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "cannot read /no/such/file"));
}

/* ---- thread -------------------------------------------------------------------------- */

struct looker {
    pthread_barrier_t named;
    sigset_t blocked;
};

static void *look(void *arg)
{
    struct looker *looker = arg;

    pthread_sigmask(SIG_SETMASK, NULL, &looker->blocked);
    pthread_barrier_wait(&looker->named);
    return looker;
}

static void a_thread_has_its_name_and_no_signals(void **state)
{
    struct looker looker;
    char name[16];
    sigset_t own;
    pthread_t thread;
    void *out;

    (void)state;
    assert_int_equal(pthread_barrier_init(&looker.named, NULL, 2), 0);
    assert_int_equal(ep_thread_start(&thread, "fifteen letters", look, &looker), 0);
    assert_int_equal(pthread_getname_np(thread, name, sizeof name), 0);
    assert_string_equal(name, "fifteen letters");
    pthread_barrier_wait(&looker.named);
    assert_int_equal(pthread_join(thread, &out), 0);
    assert_ptr_equal(out, &looker);
    pthread_barrier_destroy(&looker.named);
    pthread_sigmask(SIG_SETMASK, NULL, &own);
    assert_true(sigismember(&looker.blocked, SIGTERM) && sigismember(&looker.blocked, SIGPROF));
    assert_false(sigismember(&own, SIGTERM) || sigismember(&own, SIGPROF));
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* which have terabytes, and need all of them */
static rlim_t address_space(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%llu", &pages), 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* Where there is room for all stacks, and not for the heaps that the first threads take beside theirs. */
static void threads_are_tried_with_their_heaps(void **state)
{
    enum { N = 8 };
    struct rlimit before, few;
    pthread_attr_t attributes;
    size_t stack;
    int started, failure;

    (void)state;
    assert_int_equal(pthread_getattr_default_np(&attributes), 0);
    assert_int_equal(pthread_attr_getstacksize(&attributes, &stack), 0);
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    few = (struct rlimit){ address_space() + N * stack + (200 << 20), before.rlim_max };
    assert_int_equal(setrlimit(RLIMIT_AS, &few), 0);
    failure = ep_threads_try(N, &started);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_int_not_equal(failure, 0);
    assert_in_range(started, 1, N - 1);
    assert_int_equal(ep_threads_try(N, &started), 0);
    assert_int_equal(started, N);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_go_there_and_back),
        cmocka_unit_test(values_outside_the_list_are_harmless),
        cmocka_unit_test(every_grpc_code_becomes_a_status),
        cmocka_unit_test(error_is_filled_and_returned),
        cmocka_unit_test(error_takes_its_own_text),
        cmocka_unit_test(errno_is_appended_and_kept),
        cmocka_unit_test(prefix_goes_before),
        cmocka_unit_test(long_text_is_cut),
        cmocka_unit_test(text_is_not_cut_inside_a_character),
        cmocka_unit_test(utf8_is_told_from_other_bytes),
        cmocka_unit_test(utf8_fits_in_whole_characters),
        cmocka_unit_test(utf8_is_mended_in_place),
        cmocka_unit_test(logfmt_quotes_what_needs_it),
        cmocka_unit_test(json_line_holds_every_byte),
        cmocka_unit_test(json_replaces_invalid_utf8),
        cmocka_unit_test(level_decides),
        cmocka_unit_test(audit_lines_are_written_whatever_the_level),
        cmocka_unit_test(long_line_is_whole),
        cmocka_unit_test(a_reader_that_stands_still_stops_nobody),
        cmocka_unit_test(a_line_that_is_cut_is_ended),
        cmocka_unit_test(logging_keeps_errno),
        cmocka_unit_test(a_secret_is_the_first_line),
        cmocka_unit_test(a_secret_is_short_and_text),
        cmocka_unit_test(a_thread_has_its_name_and_no_signals),
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
        cmocka_unit_test(threads_are_tried_with_their_heaps),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
