/* Threads that carry payloads between sockets and memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "gin.h"
#include "movers.h"

enum { THREADS = 3, PAIRS = 5, BYTES = 4 << 20, BUFFER = 16 << 10 };

struct world {
    struct ep_gin_comm comm;
    struct ep_gin_movers *movers;
    int fd[PAIRS][2];
    struct ep_gin_move out[PAIRS], in[PAIRS];
    uint8_t *from[PAIRS], *to[PAIRS];
};

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    const int buffer = BUFFER;

    assert_non_null(w);
    w->comm.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(ep_gin_movers_open(&w->comm, THREADS, &w->movers, NULL), EP_OK);
    for (int i = 0; i < PAIRS; i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, w->fd[i]), 0);
        assert_int_equal(setsockopt(w->fd[i][0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer), 0);
        assert_int_equal(ep_gin_move_open(w->movers, w->fd[i][0], true, &w->out[i], NULL), EP_OK);
        assert_int_equal(ep_gin_move_open(w->movers, w->fd[i][1], false, &w->in[i], NULL), EP_OK);
        w->from[i] = malloc(BYTES);
        w->to[i] = calloc(1, BYTES);
        assert_non_null(w->from[i]);
        assert_non_null(w->to[i]);
        for (uint32_t b = 0; b < BYTES; b++)
            w->from[i][b] = (uint8_t)((b >> 8) * 7 + b * 31 + (uint32_t)i);
    }
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;

    for (int i = 0; i < PAIRS; i++) {
        ep_gin_move_close(&w->out[i]);
        ep_gin_move_close(&w->in[i]);
        close(w->fd[i][0]);
        close(w->fd[i][1]);
        free(w->from[i]);
        free(w->to[i]);
    }
    ep_gin_movers_close(w->movers);
    close(w->comm.wake);
    free(w);
    return 0;
}

static void start(struct ep_gin_move *move, uint8_t *at, uint32_t bytes, uint32_t parts)
{
    const uint32_t each = bytes / parts;

    for (uint32_t i = 0; i < parts; i++)
        move->part[i] = (struct iovec){ .iov_base = at + i * each, .iov_len = i + 1 < parts ? each : bytes - i * each };
    move->parts = parts;
    ep_gin_move_start(move);
}

static void await(const struct ep_gin_move *move)
{
    const uint64_t end = ep_clock_ns() + 60 * EP_NS_PER_S;

    while (!ep_gin_move_over(move)) {
        assert_true(ep_clock_ns() < end);
        usleep(100);
    }
}

static void more_than_sockets_hold_arrives_on_all_at_once(void **state)
{
    struct world *w = *state;

    for (int i = 0; i < PAIRS; i++) {
        start(&w->out[i], w->from[i], BYTES, (uint32_t)i % EP_GIN_MOVE_PARTS + 1);
        start(&w->in[i], w->to[i], BYTES, (uint32_t)(i + 3) % EP_GIN_MOVE_PARTS + 1);
    }
    for (int i = 0; i < PAIRS; i++) {
        await(&w->out[i]);
        await(&w->in[i]);
        assert_int_equal(w->out[i].failure | w->in[i].failure, 0);
        assert_int_equal(ep_gin_move_moved(&w->out[i]), BYTES);
        assert_int_equal(ep_gin_move_moved(&w->in[i]), BYTES);
        assert_memory_equal(w->from[i], w->to[i], BYTES);
    }
}

static void a_connection_takes_one_move_after_the_other(void **state)
{
    enum { TIMES = 300, EACH = 5000 };
    struct world *w = *state;

    for (uint32_t i = 0; i < TIMES; i++) {
        start(&w->in[0], w->to[0] + i * EACH, EACH, 1);
        start(&w->out[0], w->from[0] + i * EACH, EACH, 1 + i % 2);
        await(&w->out[0]);
        await(&w->in[0]);
    }
    assert_memory_equal(w->from[0], w->to[0], TIMES * EACH);
}

/* What follows a move: so many steps more. */
struct rest {
    struct ep_gin_move *move;
    uint8_t *at;
    uint32_t left;
};

enum { STEP = 7000 };

static bool more(void *user)
{
    struct rest *rest = user;

    if (rest->left == 0)
        return false;
    rest->left--;
    rest->at += STEP;
    rest->move->part[0] = (struct iovec){ .iov_base = rest->at, .iov_len = STEP };
    rest->move->parts = 1;
    return true;
}

static void start_steps(struct ep_gin_move *move, uint8_t *at, uint32_t steps, struct rest *rest)
{
    *rest = (struct rest){ .move = move, .at = at, .left = steps - 1 };
    move->more = more;
    move->user = rest;
    start(move, at, STEP, 1);
}

static void a_move_goes_on_with_what_its_owner_wants_next(void **state)
{
    enum { STEPS = 500, ALL = STEPS * STEP };
    struct world *w = *state;
    struct rest rest;
    uint32_t there = 0, moves = 0;

    start(&w->out[0], w->from[0], ALL, EP_GIN_MOVE_PARTS);
    for (; there < ALL; moves++) { /* it is over, too, when it has taken all there is */
        start_steps(&w->in[0], w->to[0] + there, STEPS - there / STEP, &rest);
        await(&w->in[0]);
        assert_int_equal(w->in[0].failure, 0);
        assert_int_equal(ep_gin_move_moved(&w->in[0]) % STEP, 0);
        there += (uint32_t)ep_gin_move_moved(&w->in[0]);
    }
    await(&w->out[0]);
    assert_int_equal(rest.left, 0);
    assert_true(moves < STEPS);
    assert_memory_equal(w->from[0], w->to[0], ALL);
}

static void a_move_is_over_when_nothing_follows(void **state)
{
    struct world *w = *state;
    struct rest rest;

    assert_int_equal(send(w->fd[0][0], w->from[0], STEP, 0), STEP);
    start_steps(&w->in[0], w->to[0], 3, &rest);
    await(&w->in[0]);
    assert_int_equal(w->in[0].failure, 0);
    assert_int_equal(ep_gin_move_moved(&w->in[0]), STEP);
    assert_int_equal(send(w->fd[0][0], w->from[0], 10, 0), 10);
    assert_int_equal(recv(w->fd[0][1], w->to[0], 100, 0), 10);
}

static uint64_t wakes(const struct world *w)
{
    uint64_t many;

    return read(w->comm.wake, &many, sizeof many) == sizeof many ? many : 0;
}

static void what_has_begun_is_waited_for_and_what_was_before_is_told(void **state)
{
    const uint64_t end = ep_clock_ns() + 60 * EP_NS_PER_S;
    struct world *w = *state;
    struct rest rest;

    __atomic_store_n(&w->comm.asleep, 1, __ATOMIC_SEQ_CST);
    assert_int_equal(send(w->fd[0][0], w->from[0], STEP + 10, 0), STEP + 10);
    start_steps(&w->in[0], w->to[0], 2, &rest);
    while (wakes(w) == 0)
        assert_true(ep_clock_ns() < end);
    while (ep_gin_move_moved(&w->in[0]) < STEP + 10)
        assert_true(ep_clock_ns() < end);
    usleep(2000); /* longer than a mover looks before it sleeps, which nothing tells */
    assert_false(ep_gin_move_over(&w->in[0]));
    assert_int_equal(send(w->fd[0][0], w->from[0] + STEP + 10, STEP - 10, 0), STEP - 10);
    await(&w->in[0]);
    assert_int_equal(w->in[0].failure, 0);
    assert_memory_equal(w->from[0], w->to[0], 2 * STEP);
}

static void a_peer_that_closes_ends_what_is_under_way(void **state)
{
    struct world *w = *state;

    start(&w->in[0], w->to[0], BYTES, 2);
    assert_int_equal(send(w->fd[0][0], w->from[0], 1000, 0), 1000);
    start(&w->out[1], w->from[1], BYTES, 2);
    assert_int_equal(shutdown(w->fd[0][0], SHUT_RDWR), 0);
    assert_int_equal(shutdown(w->fd[1][1], SHUT_RDWR), 0);
    await(&w->in[0]);
    await(&w->out[1]);
    assert_int_equal(w->in[0].failure, ECONNRESET);
    assert_int_equal(ep_gin_move_moved(&w->in[0]), 1000);
    assert_memory_equal(w->from[0], w->to[0], 1000);
    assert_int_equal(w->out[1].failure, EPIPE);
    assert_true(ep_gin_move_moved(&w->out[1]) < BYTES);
}

static void what_nobody_takes_is_cut_when_it_is_closed(void **state)
{
    struct world *w = *state;

    for (int i = 0; i < PAIRS; i++) {
        start(&w->out[i], w->from[i], BYTES, 1);
        ep_gin_move_close(&w->out[i]);
        assert_int_not_equal(w->out[i].failure, 0);
    }
}

static void who_sleeps_is_woken_when_a_move_is_over_and_nobody_else(void **state)
{
    struct world *w = *state;

    for (uint32_t asleep = 0; asleep < 2; asleep++) {
        __atomic_store_n(&w->comm.asleep, asleep, __ATOMIC_SEQ_CST);
        start(&w->in[0], w->to[0], 100, 1);
        assert_int_equal(send(w->fd[0][0], w->from[0], 100, 0), 100);
        await(&w->in[0]);
        for (const uint64_t end = ep_clock_ns() + 60 * EP_NS_PER_S; asleep && wakes(w) != 1; usleep(100))
            assert_true(ep_clock_ns() < end);
        assert_int_equal(wakes(w), 0);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(more_than_sockets_hold_arrives_on_all_at_once),
        TEST(a_connection_takes_one_move_after_the_other),
        TEST(a_move_goes_on_with_what_its_owner_wants_next),
        TEST(a_move_is_over_when_nothing_follows),
        TEST(what_has_begun_is_waited_for_and_what_was_before_is_told),
        TEST(a_peer_that_closes_ends_what_is_under_way),
        TEST(what_nobody_takes_is_cut_when_it_is_closed),
        TEST(who_sleeps_is_woken_when_a_move_is_over_and_nobody_else),
    };

    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
