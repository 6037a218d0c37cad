/* When the signal of a put may be applied: every order of arrival, gaps, contradictions, numbers that wrap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "order.h"

enum { PUTS = 4000, CONTEXTS = 3, MOST_PIECES = 4, PIECES = PUTS * MOST_PIECES };

/* ---- what is applied ------------------------------------------------------------------------------- */

/* Signals of the test have the put's number as offset, and its context as region less one. */
struct seen {
    uint32_t n;
    uint64_t last[CONTEXTS + 1];
    uint64_t number[64]; /* of the first of them */
};

static void note(void *user, const struct ep_gin_signal *signal)
{
    struct seen *seen = user;

    assert_true(signal->region >= 1 && signal->region <= CONTEXTS + 1);
    assert_true((int64_t)(signal->offset - seen->last[signal->region - 1]) > 0); /* in the order of its context */
    seen->last[signal->region - 1] = signal->offset;
    if (seen->n < 64)
        seen->number[seen->n] = signal->offset;
    seen->n++;
}

static struct ep_gin_order *make(uint64_t first)
{
    struct ep_gin_order *order = calloc(1, sizeof *order);

    assert_non_null(order);
    ep_gin_order_init(order, first);
    return order;
}

static struct ep_gin_piece piece(uint64_t number, uint32_t back, uint64_t bytes, uint64_t total)
{
    return (struct ep_gin_piece){ .number = number,
                                  .back = back,
                                  .bytes = bytes,
                                  .total = total,
                                  .signal = { .region = 1, .op = 1, .offset = number, .value = 1 } };
}

static bool land(struct ep_gin_order *order, uint64_t number, uint32_t back, uint64_t bytes, uint64_t total,
                 struct seen *seen)
{
    const struct ep_gin_piece p = piece(number, back, bytes, total);

    return ep_gin_order_land(order, &p, note, seen);
}

/* ---- one after the other ----------------------------------------------------------------------------- */

static void a_signal_waits_for_all_bytes_of_its_put(void **state)
{
    struct ep_gin_order *order = make(1);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 1, 0, 10, 30, &seen));
    assert_true(land(order, 1, 0, 10, 30, &seen));
    assert_int_equal(seen.n, 0);
    assert_true(land(order, 1, 0, 10, 30, &seen));
    assert_int_equal(seen.n, 1);
    free(order);
}

static void a_signal_waits_for_earlier_puts_of_its_context(void **state)
{
    struct ep_gin_order *order = make(1);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 3, 1, 8, 8, &seen));
    assert_true(land(order, 2, 1, 0, 0, &seen));
    assert_int_equal(seen.n, 0);
    assert_true(land(order, 1, 0, 8, 8, &seen));
    assert_int_equal(seen.n, 3);
    assert_int_equal(seen.number[0], 1);
    assert_int_equal(seen.number[1], 2);
    assert_int_equal(seen.number[2], 3);
    free(order);
}

static void a_signal_does_not_wait_for_other_contexts(void **state)
{
    struct ep_gin_order *order = make(1);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 1, 0, 8, 16, &seen)); /* half of it */
    assert_true(land(order, 2, 0, 8, 8, &seen));
    assert_int_equal(seen.n, 1);
    assert_int_equal(seen.number[0], 2);
    free(order);
}

static void a_put_without_a_signal_is_waited_for(void **state)
{
    struct ep_gin_order *order = make(1);
    struct ep_gin_piece silent = piece(1, 0, 8, 8);
    struct seen seen = { 0 };

    (void)state;
    silent.signal = (struct ep_gin_signal){ 0 };
    assert_true(land(order, 2, 1, 0, 0, &seen));
    assert_int_equal(seen.n, 0);
    assert_true(ep_gin_order_land(order, &silent, note, &seen));
    assert_int_equal(seen.n, 1);
    assert_int_equal(seen.number[0], 2);
    free(order);
}

/* ---- the window ----------------------------------------------------------------------------------------- */

static void what_is_missing_holds_the_window(void **state)
{
    struct ep_gin_order *order = make(1);
    struct seen seen = { 0 };

    (void)state;
    for (uint32_t i = 1; i < EP_GIN_WINDOW; i++)
        assert_true(land(order, 1 + i, 1, 8, 8, &seen));
    assert_int_equal(seen.n, 0);
    assert_int_equal(ep_gin_order_place(order, 1 + EP_GIN_WINDOW), EP_GIN_BEYOND);
    assert_false(land(order, 1 + EP_GIN_WINDOW, 0, 8, 8, &seen));
    assert_true(land(order, 1, 0, 8, 8, &seen));
    assert_int_equal(ep_gin_order_place(order, 1), EP_GIN_BEFORE);
    assert_int_equal(ep_gin_order_place(order, 1 + EP_GIN_WINDOW), EP_GIN_WITHIN);
    assert_true(land(order, 1 + EP_GIN_WINDOW, 1, 8, 8, &seen));
    assert_int_equal(seen.n, EP_GIN_WINDOW + 1);
    free(order);
}

static void a_predecessor_behind_the_window_has_retired(void **state)
{
    struct ep_gin_order *order = make(100);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 100, 99, 8, 8, &seen));
    assert_true(land(order, 101, UINT32_MAX, 8, 8, &seen));
    assert_int_equal(seen.n, 2);
    free(order);
}

/* ---- contradictions ---------------------------------------------------------------------------------------- */

static void contradictions_change_nothing(void **state)
{
    struct ep_gin_order *order = make(1), *before = malloc(sizeof *before);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 2, 1, 8, 16, &seen));
    memcpy(before, order, sizeof *order);
    assert_false(land(order, 2, 1, 9, 16, &seen)); /* more than is missing */
    assert_false(land(order, 2, 1, 8, 17, &seen)); /* another size */
    assert_false(land(order, 2, 0, 8, 16, &seen)); /* another predecessor */
    assert_false(land(order, 2, 1, 0, 16, &seen)); /* nothing */
    assert_false(land(order, 3, 2, 8, 8, &seen));  /* two after 1 */
    assert_false(land(order, 5, 0, 9, 8, &seen));  /* more than all */
    assert_false(land(order, 5, 0, 0, 8, &seen));  /* nothing of something */
    assert_false(land(order, 0, 0, 8, 8, &seen));  /* before the first */
    assert_int_equal(seen.n, 0);
    assert_memory_equal(before, order, sizeof *order);
    free(before);
    free(order);
}

static void another_signal_for_the_same_put_is_refused(void **state)
{
    struct ep_gin_order *order = make(1);
    struct ep_gin_piece p = piece(1, 0, 8, 16);
    struct seen seen = { 0 };

    (void)state;
    assert_true(ep_gin_order_land(order, &p, note, &seen));
    p.signal.value = 2;
    assert_false(ep_gin_order_land(order, &p, note, &seen));
    free(order);
}

static void what_has_landed_does_not_land_again(void **state)
{
    struct ep_gin_order *order = make(1);
    struct seen seen = { 0 };

    (void)state;
    assert_true(land(order, 2, 1, 0, 0, &seen));
    assert_false(land(order, 2, 1, 0, 0, &seen));
    assert_true(land(order, 1, 0, 8, 8, &seen));
    assert_false(land(order, 1, 0, 8, 8, &seen));
    assert_int_equal(seen.n, 2);
    free(order);
}

/* ---- everything, in random order -------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* PUTS puts of several contexts, each in up to MOST_PIECES pieces; *n is how many. */
static void plan(uint64_t first, uint64_t *random, struct ep_gin_piece *pieces, uint32_t *n)
{
    uint64_t last[CONTEXTS];
    bool any[CONTEXTS] = { false };

    *n = 0;
    for (uint32_t i = 0; i < PUTS; i++) {
        const uint32_t context = (uint32_t)(next_random(random) % CONTEXTS);
        const uint32_t parts = (uint32_t)(next_random(random) % (MOST_PIECES + 1));
        const uint64_t back = any[context] ? first + i - last[context] : 0;
        struct ep_gin_piece p =
            piece(first + i, back < EP_GIN_WINDOW ? (uint32_t)back : 0, parts ? 8 : 0, 8ull * parts);

        p.signal.region = context + 1;
        last[context] = first + i;
        any[context] = true;
        for (uint32_t k = 0; k < (parts ? parts : 1); k++)
            pieces[(*n)++] = p;
    }
}

/* Each piece takes the place of one that is up to `reach` further on. */
static void shuffle(struct ep_gin_piece *pieces, uint32_t n, uint32_t reach, uint64_t *random)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t left = n - i - 1, by = (uint32_t)(next_random(random) % reach);
        struct ep_gin_piece p = pieces[i], *other = &pieces[i + (by < left ? by : left)];

        pieces[i] = *other;
        *other = p;
    }
}

/* As a receiver does: what is beyond the window is tried again. */
static void deliver(struct ep_gin_order *order, struct ep_gin_piece *pieces, uint32_t n, struct seen *seen)
{
    while (n > 0) {
        uint32_t held = 0;

        for (uint32_t i = 0; i < n; i++)
            if (ep_gin_order_place(order, pieces[i].number) == EP_GIN_BEYOND)
                pieces[held++] = pieces[i];
            else
                assert_true(ep_gin_order_land(order, &pieces[i], note, seen));
        assert_true(held < n);
        n = held;
    }
}

static void in_any_order(uint64_t first, uint64_t seed, uint32_t reach)
{
    struct ep_gin_piece *pieces = malloc(PIECES * sizeof *pieces);
    struct ep_gin_order *order = make(first);
    struct seen seen = { 0 };
    uint32_t n;

    for (uint32_t c = 0; c <= CONTEXTS; c++)
        seen.last[c] = first - 1;
    plan(first, &seed, pieces, &n);
    shuffle(pieces, n, reach, &seed);
    deliver(order, pieces, n, &seen);
    assert_int_equal(seen.n, PUTS);
    assert_int_equal(order->first, first + PUTS);
    free(order);
    free(pieces);
}

static void every_signal_is_applied_once_and_in_order(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++)
        in_any_order(1, seed, (uint32_t)(seed * seed * 2));
}

static void numbers_may_wrap(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++)
        in_any_order(UINT64_MAX - 1500, seed, 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_signal_waits_for_all_bytes_of_its_put),
        cmocka_unit_test(a_signal_waits_for_earlier_puts_of_its_context),
        cmocka_unit_test(a_signal_does_not_wait_for_other_contexts),
        cmocka_unit_test(a_put_without_a_signal_is_waited_for),
        cmocka_unit_test(what_is_missing_holds_the_window),
        cmocka_unit_test(a_predecessor_behind_the_window_has_retired),
        cmocka_unit_test(contradictions_change_nothing),
        cmocka_unit_test(another_signal_for_the_same_put_is_refused),
        cmocka_unit_test(what_has_landed_does_not_land_again),
        cmocka_unit_test(every_signal_is_applied_once_and_in_order),
        cmocka_unit_test(numbers_may_wrap),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
