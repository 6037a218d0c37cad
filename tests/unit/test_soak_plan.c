/* The plan of a soak: the same at all ranks, fit to be run, and with everything in it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "soak_plan.h"

enum { RANKS = 3, TOKENS = 24, STEPS = 20 * SOAK_CHAPTER };

static const struct bench_case cases[] = {
    { EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR, BENCH_BF16, TOKENS, EP_SCALE_FP32, BENCH_FORWARD, 0 },
    { EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, BENCH_BF16, TOKENS, EP_SCALE_FP32, BENCH_FORWARD, 0 },
    { EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, BENCH_FP8, TOKENS, EP_SCALE_UE8M0, BENCH_FORWARD, 0 },
    { EP_MODE_HT, EP_LAYOUT_PACKED, BENCH_BF16, 2 * TOKENS, EP_SCALE_FP32, BENCH_FORWARD, 0 },
    { EP_MODE_HT, EP_LAYOUT_FLAT, BENCH_BF16, 1, EP_SCALE_FP32, BENCH_FORWARD, 0 },
};

static struct bench_config config;

static int make_config(void **state)
{
    (void)state;
    config = (struct bench_config){ .ranks = RANKS, .seed = 5, .zero_rank = -1 };
    config.n_cases = sizeof cases / sizeof *cases;
    memcpy(config.cases, cases, sizeof cases);
    return 0;
}

static struct soak_step step_at(uint64_t number)
{
    struct soak_step step;

    soak_step_of(&config, number, &step);
    return step;
}

static struct bench_case case_at(uint64_t number, uint32_t rank)
{
    const struct soak_step step = step_at(number);
    struct bench_case of;

    soak_case_of(&config, &step, rank, &of);
    return of;
}

static void what_must_agree_does_at_all_ranks(void **state)
{
    uint64_t other_tokens = 0, other_layout = 0;

    (void)state;
    for (uint64_t i = 0; i < STEPS; i++)
        for (uint32_t r = 1; r < RANKS; r++) {
            const struct bench_case a = case_at(i, 0), b = case_at(i, r);

            assert_true(a.mode == b.mode && a.dtype == b.dtype && a.scales == b.scales);
            other_tokens += a.tokens != b.tokens;
            other_layout += a.layout != b.layout;
        }
    assert_true(other_tokens > STEPS && other_layout > STEPS / 4);
}

/* A step's cases are cases that there are, but for the number of tokens. */
static void only_what_was_asked_for_is_drawn(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < STEPS; i++) {
        const struct bench_case of = case_at(i, 1);
        bool known = false;

        for (uint32_t c = 0; c < config.n_cases; c++)
            known = known || (cases[c].mode == of.mode && cases[c].layout == of.layout &&
                              cases[c].dtype == of.dtype && cases[c].scales == of.scales);
        assert_true(known);
        assert_true(of.tokens <= (of.mode == EP_MODE_LL ? (uint32_t)TOKENS : 2u * TOKENS));
    }
}

/* The step that had the lane before is over when the next one takes it. */
static void a_lane_has_one_step_at_a_time(void **state)
{
    uint64_t over[SOAK_LANES] = { 0 }; /* the first step that may take it */

    (void)state;
    for (uint64_t i = 0; i < STEPS; i++) {
        const struct soak_step step = step_at(i);

        if (i % SOAK_CHAPTER == 0) /* all are over at the end of a chapter */
            memset(over, 0, sizeof over);
        assert_true(step.lane < SOAK_LANES && i >= over[step.lane]);
        assert_true(step.result_after >= step.combine_after);
        over[step.lane] = i + step.result_after + 1;
    }
}

static void a_cached_step_repeats_the_one_before(void **state)
{
    uint64_t cached = 0;

    (void)state;
    for (uint64_t i = 0; i < STEPS; i++) {
        const struct soak_step step = step_at(i);

        if (!step.cached) {
            assert_int_equal(step.routes, i);
            continue;
        }
        cached++;
        assert_int_equal(step.routes, i - 1);
        assert_true(i % SOAK_CHAPTER != 0); /* whoever joins there has no routing */
        assert_false(step_at(i - 1).cached);
        assert_int_equal(step_at(i - 1).result_after, 0);
        assert_int_equal(step_at(i - 1).lane, step.lane);
        for (uint32_t r = 0; r < RANKS; r++) {
            assert_int_equal(case_at(i, r).mode, case_at(i - 1, r).mode);
            assert_int_equal(case_at(i, r).tokens, case_at(i - 1, r).tokens);
        }
    }
    assert_true(cached > 0);
}

static void everything_occurs(void **state)
{
    uint64_t halves = 0, skipped = 0, in_place = 0, later = 0, none = 0, fp8 = 0, flat = 0;

    (void)state;
    for (uint64_t i = 0; i < STEPS; i++) {
        const struct soak_step step = step_at(i);
        const struct bench_case of = case_at(i, 0);

        assert_true(!step.halves || of.mode == EP_MODE_LL);
        halves += step.halves;
        skipped += step.skipped;
        in_place += step.in_place;
        later += step.combine_after > 1;
        none += of.tokens == 0;
        fp8 += of.dtype == BENCH_FP8;
        flat += of.layout == EP_LAYOUT_FLAT;
    }
    assert_true(halves && skipped && in_place && in_place < STEPS && later && none && fp8 && flat);
}

static void the_seed_decides(void **state)
{
    uint64_t different = 0;

    (void)state;
    for (uint64_t i = 0; i < STEPS; i++) {
        const struct bench_case a = case_at(i, 0), again = case_at(i, 0);
        struct bench_case other;

        assert_memory_equal(&a, &again, sizeof a);
        config.seed++;
        other = case_at(i, 0);
        config.seed--;
        different += a.tokens != other.tokens;
    }
    assert_true(different > STEPS / 2);
}

/* Someone who reads of a failure runs the same ops again: to the end of the chapter, as all of it shapes them. */
static void a_step_says_how_to_run_it_again(void **state)
{
    const struct soak_step step = step_at(SOAK_CHAPTER + 3);
    char text[256];

    (void)state;
    soak_step_text(&config, &step, 2, text, sizeof text);
    assert_non_null(strstr(text, "op 35 of rank 2 ("));
    assert_non_null(strstr(text, "--seed=5 --soak-ops=64"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_must_agree_does_at_all_ranks),
        cmocka_unit_test(only_what_was_asked_for_is_drawn),
        cmocka_unit_test(a_lane_has_one_step_at_a_time),
        cmocka_unit_test(a_cached_step_repeats_the_one_before),
        cmocka_unit_test(everything_occurs),
        cmocka_unit_test(the_seed_decides),
        cmocka_unit_test(a_step_says_how_to_run_it_again),
    };

    return cmocka_run_group_tests(tests, make_config, NULL);
}
