/* Homes of experts by their loads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "balance.h"

#define MAX_HOMES 4096u

struct result {
    struct ep_expert_home homes[MAX_HOMES];
    struct ep_placement placement;
    uint32_t n;
};

/* Every expert has a home, none two on a rank (the placement refuses that), and ranks differ by one home at most. */
static void balance(const struct ep_balance *b, struct result *out)
{
    uint32_t least = UINT32_MAX;

    out->n = b->experts + b->redundant;
    assert_true(out->n <= MAX_HOMES);
    assert_int_equal(ep_balance_homes(b, out->homes, NULL), EP_OK);
    assert_int_equal(ep_placement_explicit(b->ranks, b->experts, out->homes, out->n, &out->placement, NULL), EP_OK);
    for (uint32_t r = 0; r < b->ranks; r++)
        if (out->placement.local_experts[r] < least)
            least = out->placement.local_experts[r];
    assert_in_range(out->placement.max_local, least, least + 1);
}

/* Expert i has about 1 / (i + 1) of the hottest one's load, in an order of its own. */
static void skew(uint64_t *load, uint32_t experts)
{
    for (uint32_t i = 0; i < experts; i++)
        load[(i * 37u + 11u) % experts] = 1000000u / (i + 1);
}

static void eight_to_a_node(uint32_t *node, uint32_t ranks)
{
    for (uint32_t r = 0; r < ranks; r++)
        node[r] = r / 8;
}

static void skewed_loads_are_evened_out(void **state)
{
    uint64_t load[256];
    uint32_t node[64];
    struct ep_balance b = { .ranks = 64, .experts = 256, .redundant = 64, .load = load, .node = node };
    struct ep_placement contiguous;
    struct result with, without;

    (void)state;
    skew(load, 256);
    eight_to_a_node(node, 64);
    balance(&b, &with);
    b.redundant = 0;
    balance(&b, &without);
    assert_int_equal(ep_placement_contiguous(64, 256, &contiguous, NULL), EP_OK);
    assert_true(ep_balance_peak(&contiguous, load) > 10);
    assert_true(ep_balance_peak(&without.placement, load) > 5); /* one expert has more than a rank's part */
    assert_true(ep_balance_peak(&with.placement, load) < 1.25);
    ep_placement_free(&contiguous);
    ep_placement_free(&with.placement);
    ep_placement_free(&without.placement);
}

static void nodes_are_balanced_before_ranks(void **state)
{
    uint64_t load[64];
    uint32_t node[16];
    const struct ep_balance b = { .ranks = 16, .experts = 64, .redundant = 16, .load = load, .node = node };
    double ranks[16], sums[2] = { 0 };
    struct result result;

    (void)state;
    skew(load, 64);
    eight_to_a_node(node, 16);
    balance(&b, &result);
    ep_balance_ranks(&result.placement, load, ranks);
    for (uint32_t r = 0; r < 16; r++)
        sums[node[r]] += ranks[r];
    assert_true(sums[0] < 1.02 * sums[1] && sums[1] < 1.02 * sums[0]);
    ep_placement_free(&result.placement);
}

static void the_same_loads_give_the_same_homes(void **state)
{
    uint64_t load[256];
    const struct ep_balance b = { .ranks = 24, .experts = 256, .redundant = 50, .load = load };
    struct result one, two;

    (void)state;
    skew(load, 256);
    balance(&b, &one);
    balance(&b, &two);
    assert_memory_equal(one.homes, two.homes, one.n * sizeof *one.homes);
    ep_placement_free(&one.placement);
    ep_placement_free(&two.placement);
}

/* The hottest has a home everywhere, and no more. */
static void one_expert_with_all_the_load_is_on_every_rank(void **state)
{
    uint64_t load[16] = { [3] = 1000 };
    const struct ep_balance b = { .ranks = 4, .experts = 16, .redundant = 8, .load = load };
    struct result result;

    (void)state;
    balance(&b, &result);
    assert_int_equal(result.placement.first[4] - result.placement.first[3], 4);
    assert_true(ep_balance_peak(&result.placement, load) < 1.001);
    ep_placement_free(&result.placement);
}

static void no_load_at_all_is_a_placement_too(void **state)
{
    uint64_t load[10] = { 0 };
    const struct ep_balance b = { .ranks = 4, .experts = 10, .redundant = 0, .load = load };
    struct result result;

    (void)state;
    balance(&b, &result);
    assert_true(ep_balance_peak(&result.placement, load) == 1);
    ep_placement_free(&result.placement);
}

static void every_limit_can_be_reached_and_not_passed(void **state)
{
    uint64_t load[5] = { 5, 4, 3, 2, 1 };
    struct ep_balance b = { .ranks = 3, .experts = 5, .load = load };
    struct ep_error error = EP_ERROR_INIT;
    struct result result;

    (void)state;
    for (b.redundant = 0; b.redundant <= 10; b.redundant++) {
        balance(&b, &result);
        ep_placement_free(&result.placement);
    }
    assert_int_equal(ep_balance_homes(&b, result.homes, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "placement.redundant is 11: must be at most 10"));
    b = (struct ep_balance){ .ranks = 1, .experts = 5, .load = load };
    balance(&b, &result);
    ep_placement_free(&result.placement);
    b = (struct ep_balance){ .ranks = 8, .experts = 2, .load = load }; /* ranks without any */
    balance(&b, &result);
    ep_placement_free(&result.placement);
}

/* Whatever comes: uneven nodes, many copies, equal loads. */
static void random_inputs_always_have_a_placement(void **state)
{
    uint64_t load[64];
    uint32_t node[24], seed = 7;
    struct result result;

    (void)state;
    for (int round = 0; round < 2000; round++) {
        struct ep_balance b = { .load = load, .node = node };

#define NEXT(n) ((seed = seed * 1664525u + 1013904223u) >> 8) % (n)
        b.ranks = 1 + NEXT(24);
        b.experts = 1 + NEXT(64);
        b.redundant = NEXT(b.experts * (b.ranks - 1) + 1);
        for (uint32_t e = 0; e < b.experts; e++)
            load[e] = NEXT(2) ? NEXT(1000) : NEXT(3);
        for (uint32_t r = 0; r < b.ranks; r++)
            node[r] = NEXT(5);
        balance(&b, &result);
        ep_placement_free(&result.placement);
    }
}

/* Every expert on every rank, of as many as there may be: a look at each rank for each home, and not at other homes. */
static void the_largest_group_takes_no_longer_than_its_homes_by_ranks(void **state)
{
    enum { RANKS = 1024, EXPERTS = 64 };
    static struct ep_expert_home homes[EXPERTS * RANKS];
    static uint32_t node[RANKS];
    uint64_t load[EXPERTS], steps;
    struct ep_balance b = { .ranks = RANKS, .experts = EXPERTS, .redundant = EXPERTS * (RANKS - 1), .load = load,
                            .steps = &steps };

    (void)state;
    for (uint32_t e = 0; e < EXPERTS; e++)
        load[e] = 1;
    assert_int_equal(ep_balance_homes(&b, homes, NULL), EP_OK);
    for (uint32_t i = 0; i < EXPERTS * RANKS; i++) {
        assert_int_equal(homes[i].expert, i / RANKS);
        assert_int_equal(homes[i].rank, i % RANKS);
    }
    assert_true(steps <= 2ull * EXPERTS * RANKS * (RANKS + 1));
    eight_to_a_node(node, RANKS);
    b.node = node;
    assert_int_equal(ep_balance_homes(&b, homes, NULL), EP_OK);
    assert_true(steps <= 2ull * EXPERTS * RANKS * (RANKS / 8 + 8));
}

/* Light experts fill rank after rank, and in the end only ranks that have them already have room. */
static void making_room_again_and_again_takes_no_longer(void **state)
{
    enum { RANKS = 1024, EXPERTS = 96, HOMES = 65536 };
    static struct ep_expert_home homes[HOMES];
    uint64_t load[EXPERTS], steps;
    const struct ep_balance b = { .ranks = RANKS, .experts = EXPERTS, .redundant = HOMES - EXPERTS, .load = load,
                                  .steps = &steps };
    struct ep_placement placement;

    (void)state;
    for (uint32_t e = 0; e < EXPERTS; e++)
        load[e] = e ? 1 : 1ull << 63;
    assert_int_equal(ep_balance_homes(&b, homes, NULL), EP_OK);
    assert_int_equal(ep_placement_explicit(RANKS, EXPERTS, homes, HOMES, &placement, NULL), EP_OK);
    assert_int_equal(placement.max_local, HOMES / RANKS);
    assert_true(steps > (uint64_t)HOMES * (RANKS + 2)); /* room was made */
    assert_true(steps <= 2ull * HOMES * (RANKS + 1));
    ep_placement_free(&placement);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(skewed_loads_are_evened_out),
        cmocka_unit_test(nodes_are_balanced_before_ranks),
        cmocka_unit_test(the_same_loads_give_the_same_homes),
        cmocka_unit_test(one_expert_with_all_the_load_is_on_every_rank),
        cmocka_unit_test(no_load_at_all_is_a_placement_too),
        cmocka_unit_test(every_limit_can_be_reached_and_not_passed),
        cmocka_unit_test(random_inputs_always_have_a_placement),
        cmocka_unit_test(the_largest_group_takes_no_longer_than_its_homes_by_ranks),
        cmocka_unit_test(making_room_again_and_again_takes_no_longer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
