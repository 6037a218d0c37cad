/* Which op is expected next. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "forecast.h"

/* Ops differ in what tests say of them: a number in `tokens`. */
static struct ep_forecast_op op_named(uint32_t name)
{
    return (struct ep_forecast_op){ .op = { .kind = EP_OP_DISPATCH, .tokens = name } };
}

static void ring(struct ep_forecast_log *log, uint32_t name)
{
    log->op[log->ended++ % EP_FORECAST_OPS] = op_named(name);
    log->entry++;
}

static void ring_round(struct ep_forecast_log *log, uint32_t period, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ring(log, (uint32_t)(log->ended % period));
}

static void expect_round(const struct ep_forecast_log *log, uint32_t period)
{
    assert_int_equal(ep_forecast_period(log), period);
    for (uint64_t n = 1; n <= 3 * EP_FORECAST_OPS; n++)
        assert_int_equal(ep_forecast_of(log, period, log->entry + n)->op.tokens, (log->ended + n - 1) % period);
}

static void nothing_is_expected_of_the_first_ops(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    assert_int_equal(ep_forecast_period(&log), 0);
    ring(&log, 0);
    assert_int_equal(ep_forecast_period(&log), 0);
    assert_null(ep_forecast_of(&log, 0, 2));
}

static void what_came_twice_is_expected_to_go_on(void **state)
{
    (void)state;
    for (uint32_t period = 1; period <= EP_FORECAST_PERIOD; period++) {
        struct ep_forecast_log log = { 0 };

        ring_round(&log, period, 2 * period - 1);
        assert_int_equal(ep_forecast_period(&log), 0);
        for (uint32_t i = 0; i < 3 * EP_FORECAST_OPS; i++) {
            ring_round(&log, period, 1);
            expect_round(&log, period);
        }
    }
}

static void a_period_that_is_too_long_is_none(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_round(&log, EP_FORECAST_PERIOD + 1, 10 * EP_FORECAST_OPS);
    assert_int_equal(ep_forecast_period(&log), 0);
}

/* And is expected again when it has been forgotten. */
static void one_other_op_ends_it(void **state)
{
    struct ep_forecast_log log = { 0 };
    uint32_t n = 0;

    (void)state;
    ring_round(&log, 2, 100);
    ring(&log, 77);
    ring(&log, 1); /* where the round was */
    while (ep_forecast_period(&log) == 0 && n < 1000) {
        ring_round(&log, 2, 1);
        n++;
    }
    assert_in_range(n, 3, EP_FORECAST_OPS);
    expect_round(&log, 2);
}

static void entries_without_an_op_do_not_shift_it(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_round(&log, 3, 50);
    log.entry += 7;
    ring_round(&log, 3, 20);
    expect_round(&log, 3);
}

/* So that whoever is told of an op need not look where it is. */
static void an_op_in_another_place_is_another_op(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_round(&log, 1, 10);
    log.op[9].place = 3;
    assert_int_equal(ep_forecast_period(&log), 0);
}

/* The copy was made while the next op ended: the oldest one is gone. */
static void what_is_written_meanwhile_does_no_harm(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_round(&log, 3, 5 * EP_FORECAST_OPS);
    log.op[log.ended % EP_FORECAST_OPS] = op_named(1000);
    log.op[(log.ended + 1) % EP_FORECAST_OPS] = op_named(1001);
    expect_round(&log, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_expected_of_the_first_ops),
        cmocka_unit_test(what_came_twice_is_expected_to_go_on),
        cmocka_unit_test(a_period_that_is_too_long_is_none),
        cmocka_unit_test(one_other_op_ends_it),
        cmocka_unit_test(entries_without_an_op_do_not_shift_it),
        cmocka_unit_test(an_op_in_another_place_is_another_op),
        cmocka_unit_test(what_is_written_meanwhile_does_no_harm),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
