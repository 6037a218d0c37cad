/* What ep-bench calls its cases, and the nodes that they are run on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "bench.h"

static struct bench_config config;

/* Ranks 0, 1, ... are on these; a node is known by its first rank. */
static const char *nodes_of(uint32_t ranks, const uint32_t *node_of)
{
    static char text[BENCH_NODES_TEXT];

    config.ranks = ranks;
    memcpy(config.node_of, node_of, ranks * sizeof *node_of);
    bench_nodes_text(&config, text);
    return text;
}

static void nodes_that_are_alike_are_multiplied(void **state)
{
    (void)state;
    assert_string_equal(nodes_of(1, (uint32_t[]){ 0 }), "1x1");
    assert_string_equal(nodes_of(3, (uint32_t[]){ 0, 0, 0 }), "1x3");
    assert_string_equal(nodes_of(6, (uint32_t[]){ 0, 1, 0, 1, 0, 1 }), "2x3");
    assert_string_equal(nodes_of(3, (uint32_t[]){ 0, 1, 2 }), "3x1");
}

static void others_are_listed_by_their_first_rank(void **state)
{
    (void)state;
    assert_string_equal(nodes_of(6, (uint32_t[]){ 0, 0, 2, 2, 4, 2 }), "2+3+1");
    assert_string_equal(nodes_of(4, (uint32_t[]){ 0, 1, 1, 1 }), "1+3");
}

static void as_many_nodes_as_there_may_be_have_room(void **state)
{
    uint32_t node_of[BENCH_MAX_RANKS];

    (void)state;
    for (uint32_t r = 0; r < BENCH_MAX_RANKS; r++)
        node_of[r] = r;
    assert_string_equal(nodes_of(BENCH_MAX_RANKS, node_of), "64x1");
    node_of[1] = 0;
    assert_int_equal(strlen(nodes_of(BENCH_MAX_RANKS, node_of)), 2 * (BENCH_MAX_RANKS - 1) - 1);
}

static void what_ht_ops_fill_is_in_the_name_of_their_cases(void **state)
{
    struct bench_case of = { EP_MODE_HT, EP_LAYOUT_FLAT, BENCH_BF16, 7, EP_SCALE_FP32, BENCH_BACKWARD, 24 };
    char text[80];

    (void)state;
    bench_case_text(&of, text, sizeof text);
    assert_string_equal(text, "ht flat bf16 T=7 backward on 24 SMs");
    of.ht_sms = 0;
    bench_case_text(&of, text, sizeof text);
    assert_string_equal(text, "ht flat bf16 T=7 backward");
    of = (struct bench_case){ EP_MODE_LL, EP_LAYOUT_PACKED, BENCH_BF16, 7, EP_SCALE_FP32, BENCH_FORWARD, 24 };
    bench_case_text(&of, text, sizeof text);
    assert_string_equal(text, "ll packed bf16 T=7");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_that_are_alike_are_multiplied),
        cmocka_unit_test(others_are_listed_by_their_first_rank),
        cmocka_unit_test(as_many_nodes_as_there_may_be_have_room),
        cmocka_unit_test(what_ht_ops_fill_is_in_the_name_of_their_cases),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
