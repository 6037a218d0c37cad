/* ep_placement: contiguous and explicit maps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ep_kernels.h"

static void contiguous_divides_evenly(void **state)
{
    struct ep_placement p;

    (void)state;
    assert_int_equal(ep_placement_contiguous(4, 16, &p, NULL), EP_OK);
    for (uint32_t e = 0; e < 16; e++) {
        assert_int_equal(p.first[e + 1] - p.first[e], 1);
        assert_int_equal(p.rank[p.first[e]], e / 4);
        assert_int_equal(p.local[p.first[e]], e % 4);
    }
    assert_int_equal(p.max_local, 4);
    ep_placement_free(&p);
}

static void contiguous_gives_the_rest_to_the_first_ranks(void **state)
{
    const uint32_t held[] = { 3, 3, 2 };
    struct ep_placement p;

    (void)state;
    assert_int_equal(ep_placement_contiguous(3, 8, &p, NULL), EP_OK);
    assert_memory_equal(p.local_experts, held, sizeof held);
    assert_int_equal(p.rank[2], 0);
    assert_int_equal(p.rank[3], 1);
    assert_int_equal(p.rank[6], 2);
    assert_int_equal(p.local[7], 1);
    ep_placement_free(&p);
}

static void fewer_experts_than_ranks_leave_ranks_empty(void **state)
{
    struct ep_placement p;

    (void)state;
    assert_int_equal(ep_placement_contiguous(4, 2, &p, NULL), EP_OK);
    assert_int_equal(p.local_experts[3], 0);
    assert_int_equal(p.max_local, 1);
    ep_placement_free(&p);
}

static void an_expert_may_have_several_homes(void **state)
{
    const struct ep_expert_home homes[] = { { 1, 0 }, { 0, 1 }, { 1, 1 }, { 2, 0 } };
    struct ep_placement p;

    (void)state;
    assert_int_equal(ep_placement_explicit(2, 3, homes, 4, &p, NULL), EP_OK);
    assert_int_equal(p.first[1], 1);
    assert_int_equal(p.first[2], 3);
    assert_int_equal(p.first[3], 4);
    assert_int_equal(p.rank[1], 0);  /* expert 1, first home */
    assert_int_equal(p.local[1], 0);
    assert_int_equal(p.rank[2], 1);  /* and its second */
    assert_int_equal(p.local[2], 1); /* after expert 0, by the order of the list */
    assert_int_equal(p.local[3], 1);
    assert_int_equal(p.max_local, 2);
    ep_placement_free(&p);
}

static void check_refused(uint32_t ranks, uint32_t experts, const struct ep_expert_home *homes, uint32_t n,
                          const char *what)
{
    struct ep_placement p;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_placement_explicit(ranks, experts, homes, n, &p, &error), EP_INVALID_ARGUMENT);
    if (!strstr(error.text, what))
        fail_msg("\"%s\" does not say \"%s\"", error.text, what);
}

static void bad_maps_are_refused_by_name(void **state)
{
    const struct ep_expert_home unknown_expert[] = { { 0, 0 }, { 2, 0 } };
    const struct ep_expert_home unknown_rank[] = { { 0, 0 }, { 1, 2 } };
    const struct ep_expert_home homeless[] = { { 0, 0 }, { 0, 1 } };
    const struct ep_expert_home twice[] = { { 0, 0 }, { 1, 0 }, { 1, 0 } };

    (void)state;
    check_refused(2, 2, unknown_expert, 2, "placement.homes[1].expert is 2");
    check_refused(2, 2, unknown_rank, 2, "placement.homes[1].rank is 2");
    check_refused(2, 2, homeless, 2, "expert 1 has no home");
    check_refused(2, 2, twice, 3, "placement.homes[2]: expert 1 is on rank 0 already");
    check_refused(2, 2, twice, 1, "placement.homes has 1 entries");
    check_refused(0, 2, twice, 2, "ranks is 0");
    check_refused(2, 0, twice, 2, "experts is 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contiguous_divides_evenly),
        cmocka_unit_test(contiguous_gives_the_rest_to_the_first_ranks),
        cmocka_unit_test(fewer_experts_than_ranks_leave_ranks_empty),
        cmocka_unit_test(an_expert_may_have_several_homes),
        cmocka_unit_test(bad_maps_are_refused_by_name),
    };

    return cmocka_run_group_tests_name("placement", tests, NULL, NULL);
}
