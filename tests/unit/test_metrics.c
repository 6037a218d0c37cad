/* The text format, and HTTP as a scraper and as somebody hostile would use it. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "ep_clock.h"
#include "ep_metrics.h"

#define PATIENCE_NS (60 * EP_NS_PER_S) /* on a machine that stands still for seconds */

/* ---- the text format --------------------------------------------------------------------- */

static void expect_sample(double value, const char *expected)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    ep_metrics_sample(out, "m", NULL, 0, value);
    fclose(out);
    assert_string_equal(text, expected);
    free(text);
}

static void numbers_read_back_exactly(void **state)
{
    (void)state;
    expect_sample(0, "m 0\n");
    expect_sample(-3, "m -3\n");
    expect_sample(1e15, "m 1000000000000000\n");
    expect_sample(9007199254740992.0, "m 9007199254740992\n");
    expect_sample(0.5, "m 0.5\n");
    expect_sample(0.1, "m 0.10000000000000001\n");
    expect_sample(1e300, "m 1.0000000000000001e+300\n");
    expect_sample((double)INFINITY, "m +Inf\n");
    expect_sample(-(double)INFINITY, "m -Inf\n");
    expect_sample((double)NAN, "m NaN\n");
}

static void labels_and_help_are_escaped(void **state)
{
    const struct ep_metrics_label labels[] = { { "a", "x\"y\\z\n" }, { "b", "\xc3\xa9" }, { "c", NULL } };
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    (void)state;
    ep_metrics_family(out, "ep_x_total", "counter", "a \\ \"b\"\nc");
    ep_metrics_sample(out, "ep_x_total", labels, 3, 1);
    fclose(out);
    assert_string_equal(text, "# HELP ep_x_total a \\\\ \"b\"\\nc\n"
                              "# TYPE ep_x_total counter\n"
                              "ep_x_total{a=\"x\\\"y\\\\z\\n\",b=\"\xc3\xa9\",c=\"\"} 1\n");
    free(text);
}

/* ---- a server in this thread's loop -------------------------------------------------------- */

struct fixture {
    uv_loop_t loop;
    struct ep_metrics *metrics;
    int port;
    bool ready;
    size_t padding; /* bytes of comment on /metrics */
};

static void render(FILE *out, void *user)
{
    const struct fixture *f = user;

    ep_metrics_family(out, "ep_up", "gauge", "Always one.");
    ep_metrics_sample(out, "ep_up", NULL, 0, 1);
    for (size_t i = 0; i < f->padding; i += 64)
        fprintf(out, "# %-61s\n", "padding");
}

static bool ready(const char **why, void *user)
{
    const struct fixture *f = user;

    *why = "draining";
    return f->ready;
}

static int open_server(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    const struct ep_metrics_source source = { render, ready, f };
    struct ep_error error = EP_ERROR_INIT;

    uv_loop_init(&f->loop);
    f->ready = true;
    if (ep_metrics_open(&f->loop, "127.0.0.1:0", &source, &f->metrics, &f->port, &error) != EP_OK)
        return -1;
    *state = f;
    return 0;
}

static int close_server(void **state)
{
    struct fixture *f = *state;
    int failed;

    ep_metrics_close(f->metrics);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    failed = uv_loop_close(&f->loop);
    free(f);
    return failed;
}

static int connect_to(const struct fixture *f)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)f->port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(s >= 0);
    assert_int_equal(connect(s, (struct sockaddr *)&address, sizeof address), 0);
    fcntl(s, F_SETFL, O_NONBLOCK);
    return s;
}

static void turn(struct fixture *f)
{
    uv_run(&f->loop, UV_RUN_NOWAIT);
    usleep(200);
}

/* What comes until the server closes, or until `enough` is in it; malloc'ed. */
static char *read_answer(struct fixture *f, int s, const char *enough, size_t chunk)
{
    uint64_t end = ep_clock_ns() + PATIENCE_NS;
    char *text = calloc(1, 1), *buffer = malloc(chunk);
    size_t size = 0;
    ssize_t n = -1;

    while (n != 0 && !(enough && strstr(text, enough))) {
        turn(f);
        n = recv(s, buffer, chunk, 0);
        if (n < 0 && errno != EAGAIN)
            break; /* reset */
        if (n > 0) {
            text = realloc(text, size + (size_t)n + 1);
            memcpy(text + size, buffer, (size_t)n);
            size += (size_t)n;
            text[size] = '\0';
        }
        if (ep_clock_ns() > end)
            fail_msg("no answer; so far: %s", text);
    }
    free(buffer);
    return text;
}

static char *ask(struct fixture *f, const char *request)
{
    int s = connect_to(f);
    char *answer;

    assert_int_equal(send(s, request, strlen(request), MSG_NOSIGNAL), strlen(request));
    answer = read_answer(f, s, NULL, 4096);
    close(s);
    return answer;
}

static void expect_answer(struct fixture *f, const char *request, const char *start, const char *body)
{
    char *answer = ask(f, request), *end = strstr(answer, "\r\n\r\n");

    if (strncmp(answer, start, strlen(start)) != 0)
        fail_msg("\nexpected: %s\n     got: %s", start, answer);
    assert_non_null(end);
    if (body)
        assert_string_equal(end + 4, body);
    free(answer);
}

#define REQUEST(method, path) method " " path " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

/* ---- as it should be used ------------------------------------------------------------------- */

static void pages_are_served(void **state)
{
    struct fixture *f = *state;

    expect_answer(f, REQUEST("GET", "/healthz"), "HTTP/1.1 200 OK\r\n", "ok\n");
    expect_answer(f, REQUEST("GET", "/readyz"), "HTTP/1.1 200 OK\r\n", "ok\n");
    expect_answer(f, REQUEST("GET", "/metrics"), "HTTP/1.1 200 OK\r\n",
                  "# HELP ep_up Always one.\n# TYPE ep_up gauge\nep_up 1\n");
    expect_answer(f, REQUEST("GET", "/metrics?x=1"), "HTTP/1.1 200 OK\r\n", NULL);
    expect_answer(f, "GET /healthz HTTP/1.0\r\n\r\n", "HTTP/1.", "ok\n");
}

static void the_content_type_names_the_format(void **state)
{
    char *answer = ask(*state, REQUEST("GET", "/metrics"));

    assert_non_null(strstr(answer, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    free(answer);
}

static void not_ready_is_503_with_the_reason(void **state)
{
    struct fixture *f = *state;

    f->ready = false;
    expect_answer(f, REQUEST("GET", "/readyz"), "HTTP/1.1 503 ", "draining\n");
    expect_answer(f, REQUEST("GET", "/healthz"), "HTTP/1.1 200 ", "ok\n");
    f->ready = true;
}

static void head_has_the_length_and_no_body(void **state)
{
    char *answer = ask(*state, REQUEST("HEAD", "/healthz"));

    assert_true(strncmp(answer, "HTTP/1.1 200 OK\r\n", 17) == 0);
    assert_non_null(strstr(answer, "Content-Length: 3\r\n"));
    assert_string_equal(strstr(answer, "\r\n\r\n"), "\r\n\r\n");
    free(answer);
}

static void other_paths_and_methods_are_refused(void **state)
{
    char *answer;

    expect_answer(*state, REQUEST("GET", "/"), "HTTP/1.1 404 ", NULL);
    expect_answer(*state, REQUEST("GET", "/metrics/"), "HTTP/1.1 404 ", NULL);
    expect_answer(*state, REQUEST("DELETE", "/metrics"), "HTTP/1.1 405 ", NULL);
    expect_answer(*state, "POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
                  "HTTP/1.1 405 ", NULL);
    answer = ask(*state, REQUEST("PUT", "/nothing"));
    assert_non_null(strstr(answer, "Allow: GET, HEAD\r\n"));
    free(answer);
}

static void one_connection_serves_many_requests(void **state)
{
    static const char request[] = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    int s = connect_to(*state);

    for (int i = 0; i < 50; i++) {
        char *answer;

        assert_int_equal(send(s, request, sizeof request - 1, MSG_NOSIGNAL), sizeof request - 1);
        answer = read_answer(*state, s, "\r\n\r\nok\n", 4096);
        assert_true(strncmp(answer, "HTTP/1.1 200 ", 13) == 0);
        free(answer);
    }
    close(s);
}

static void a_large_page_reaches_a_slow_reader(void **state)
{
    struct fixture *f = *state;
    int s = connect_to(f);
    char *answer;

    f->padding = 8 << 20;
    assert_true(send(s, REQUEST("GET", "/metrics"), strlen(REQUEST("GET", "/metrics")), MSG_NOSIGNAL) > 0);
    answer = read_answer(f, s, NULL, 1 << 20);
    assert_true(strlen(answer) > f->padding);
    free(answer);
    close(s);
    f->padding = 0;
}

/* ---- as it should not be used ----------------------------------------------------------------- */

static void garbage_disturbs_nobody(void **state)
{
    static const char *const garbage[] = {
        "\r\n\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET /metrics HTTP/1.1\r\n\r\n" /* no Host */,
    };

    for (size_t i = 0; i < sizeof garbage / sizeof *garbage; i++) {
        int s = connect_to(*state);

        assert_true(send(s, garbage[i], strlen(garbage[i]), MSG_NOSIGNAL) > 0);
        for (int turns = 0; turns < 20; turns++)
            turn(*state);
        close(s);
        expect_answer(*state, REQUEST("GET", "/healthz"), "HTTP/1.1 200 OK\r\n", "ok\n");
    }
}

static void endless_headers_are_cut_off(void **state)
{
    int s = connect_to(*state);
    char line[1024], *answer;

    memset(line, 'a', sizeof line);
    memcpy(line, "GET / HTTP/1.1\r\nX: ", 19);
    for (int i = 0; i < 64; i++) {
        (void)!send(s, line, sizeof line, MSG_NOSIGNAL);
        turn(*state);
    }
    answer = read_answer(*state, s, NULL, 4096); /* closed, with or without a word */
    assert_true(*answer == '\0' || strncmp(answer, "HTTP/1.1 4", 10) == 0);
    free(answer);
    close(s);
}

static void silence_ends_after_the_timeout(void **state)
{
    int s = connect_to(*state);
    uint64_t start = ep_clock_ns();
    char *answer = read_answer(*state, s, NULL, 16);

    assert_string_equal(answer, "");
    assert_true(ep_clock_ns() - start > 3 * EP_NS_PER_S);
    free(answer);
    close(s);
}

/* More than the server takes at a time: when they have gone the next one is served. */
static void a_crowd_that_leaves_is_forgotten(void **state)
{
    int crowd[200];

    for (size_t i = 0; i < 200; i++) {
        crowd[i] = connect_to(*state);
        turn(*state);
    }
    for (size_t i = 0; i < 200; i++)
        close(crowd[i]);
    expect_answer(*state, REQUEST("GET", "/healthz"), "HTTP/1.1 200 OK\r\n", "ok\n");
}

static void closing_with_open_connections_leaves_nothing(void **state)
{
    void *own = NULL;
    int a, b;

    (void)state;
    assert_int_equal(open_server(&own), 0);
    a = connect_to(own);
    b = connect_to(own);
    (void)!send(b, "GET /met", 8, MSG_NOSIGNAL);
    turn(own);
    assert_int_equal(close_server(&own), 0);
    close(a);
    close(b);
}

static void a_taken_port_is_named(void **state)
{
    struct fixture *f = *state;
    const struct ep_metrics_source source = { render, ready, f };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_metrics *second = NULL;
    char address[32], expected[80];
    int port;

    snprintf(address, sizeof address, "127.0.0.1:%d", f->port);
    snprintf(expected, sizeof expected, "cannot listen on %s: Address already in use", address);
    assert_int_equal(ep_metrics_open(&f->loop, address, &source, &second, &port, &error), EP_FAILED_PRECONDITION);
    assert_string_equal(error.text, expected);
    assert_null(second);
}

static void wrong_addresses_are_refused(void **state)
{
    static const char *const wrong[] = { "", "7300", ":7300", "127.0.0.1:", "127.0.0.1:http", "no.such.host.invalid:1",
                                         "[::1:1" };
    struct fixture *f = *state;
    const struct ep_metrics_source source = { render, ready, f };
    struct ep_metrics *second = NULL;
    int port;

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct ep_error error = EP_ERROR_INIT;

        assert_int_not_equal(ep_metrics_open(&f->loop, wrong[i], &source, &second, &port, &error), EP_OK);
        assert_null(second);
        assert_true(strlen(error.text) > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_read_back_exactly),
        cmocka_unit_test(labels_and_help_are_escaped),
        cmocka_unit_test(pages_are_served),
        cmocka_unit_test(the_content_type_names_the_format),
        cmocka_unit_test(not_ready_is_503_with_the_reason),
        cmocka_unit_test(head_has_the_length_and_no_body),
        cmocka_unit_test(other_paths_and_methods_are_refused),
        cmocka_unit_test(one_connection_serves_many_requests),
        cmocka_unit_test(a_large_page_reaches_a_slow_reader),
        cmocka_unit_test(garbage_disturbs_nobody),
        cmocka_unit_test(endless_headers_are_cut_off),
        cmocka_unit_test(silence_ends_after_the_timeout),
        cmocka_unit_test(a_crowd_that_leaves_is_forgotten),
        cmocka_unit_test(closing_with_open_connections_leaves_nothing),
        cmocka_unit_test(a_taken_port_is_named),
        cmocka_unit_test(wrong_addresses_are_refused),
    };

    return cmocka_run_group_tests(tests, open_server, close_server);
}
