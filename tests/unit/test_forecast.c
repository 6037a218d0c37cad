/* Which op is expected next. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "forecast.h"

/* Ops differ in what tests say of them: a number in `tokens`.  Of HT ones no other is alike. */
static struct ep_forecast_op op_named(uint32_t name)
{
    return (struct ep_forecast_op){ .op = { .kind = EP_OP_DISPATCH, .mode = EP_MODE_HT, .tokens = name } };
}

static struct ep_forecast_op ll_op(enum ep_op_kind kind, uint32_t name)
{
    return (struct ep_forecast_op){ .op = { .kind = kind, .mode = EP_MODE_LL, .tokens = name } };
}

static void ring_op(struct ep_forecast_log *log, struct ep_forecast_op op)
{
    log->op[log->ended++ % EP_FORECAST_OPS] = op;
    log->entry++;
}

static void ring(struct ep_forecast_log *log, uint32_t name)
{
    ring_op(log, op_named(name));
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

/* ---- forms of LL ops ------------------------------------------------------------------------ */

static void ring_pairs(struct ep_forecast_log *log, uint32_t n, uint32_t name, uint32_t step)
{
    for (uint32_t i = 0; i < n; i++, name += step) {
        ring_op(log, ll_op(EP_OP_DISPATCH, name));
        ring_op(log, ll_op(EP_OP_COMBINE, name));
    }
}

static void check_next(const struct ep_forecast_log *log, uint64_t after, enum ep_op_kind kind, uint32_t name)
{
    const struct ep_forecast_op *at = ep_forecast_of(log, ep_forecast_period(log), log->entry + after);

    assert_non_null(at);
    assert_int_equal(at->op.kind, kind);
    assert_int_equal(at->op.tokens, name);
}

static void ops_of_the_same_form_are_expected_like_the_last(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_pairs(&log, 3, 10, 1);
    check_next(&log, 1, EP_OP_DISPATCH, 12);
    check_next(&log, 2, EP_OP_COMBINE, 12);
    check_next(&log, 3, EP_OP_DISPATCH, 12);
    ring_op(&log, ll_op(EP_OP_DISPATCH, 13));
    check_next(&log, 1, EP_OP_COMBINE, 12);
    check_next(&log, 2, EP_OP_DISPATCH, 13);
}

/* Two pairs by turns, in other sizes than before: the very ones are expected as soon as one of them has come again. */
static void the_very_ops_count_for_more(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    for (uint32_t i = 0; i < EP_FORECAST_OPS; i++)
        ring_pairs(&log, 2, 10, 1);
    check_next(&log, 1, EP_OP_DISPATCH, 10);
    check_next(&log, 3, EP_OP_DISPATCH, 11);
    ring_pairs(&log, 2, 20, 1);
    ring_op(&log, ll_op(EP_OP_DISPATCH, 20));
    check_next(&log, 1, EP_OP_COMBINE, 20);
    check_next(&log, 2, EP_OP_DISPATCH, 21);
    check_next(&log, 4, EP_OP_DISPATCH, 20);
}

static void another_form_ends_it(void **state)
{
    struct ep_forecast_log log = { 0 };

    (void)state;
    ring_pairs(&log, 20, 10, 1);
    ring_op(&log, ll_op(EP_OP_COMBINE, 30));
    assert_int_equal(ep_forecast_period(&log), 0);
    ring_pairs(&log, EP_FORECAST_OPS, 10, 1);
    check_next(&log, 1, EP_OP_DISPATCH, 10 + EP_FORECAST_OPS - 1);
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
        cmocka_unit_test(ops_of_the_same_form_are_expected_like_the_last),
        cmocka_unit_test(the_very_ops_count_for_more),
        cmocka_unit_test(another_form_ends_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
