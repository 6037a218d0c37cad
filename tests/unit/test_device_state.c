/* ep_device_check: what groups the kernels can do, to the last token and expert. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "device_state.h"
#include "ep_kernels.h"

static struct ep_limits good(void)
{
    return (struct ep_limits){ .ranks = 8, .experts = 256, .local_experts = 32, .top_k = 8, .hidden = 7168,
                               .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 128,
                               .ll_banks = 2 };
}

static void refused(const struct ep_limits *limits, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_device_check(limits, &error), EP_INVALID_ARGUMENT);
    if (!strstr(error.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, error.text);
}

static void usual_groups_are_good(void **state)
{
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.ll_max_tokens = 1024;
    l.top_k = 16;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l = good();
    l.ranks = EP_DEVICE_MAX_RANKS;
    l.local_experts = 8;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
}

static void ranks_are_those_of_one_nvlink_domain(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.ranks = EP_DEVICE_MAX_RANKS + 1;
    refused(&l, "ranks is 33: the cuda backend has at most 32 in a group");
}

static void modes_are_one_or_both(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT;
    l.ht_max_tokens = 8192;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.modes = 1u << EP_MODE_HT;
    l.ll_max_tokens = l.ll_banks = 0;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
}

/* All of a block's warps count when the experts are few, one when they are as many as can be. */
static void ht_counts_in_shared_memory(void **state)
{
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_device_ht_shared_bytes(&l), 0);
    l.modes = 1u << EP_MODE_HT;
    assert_int_equal(ep_device_ht_counting_warps(&l), EP_DEVICE_HT_WARPS);
    assert_int_equal(ep_device_ht_shared_bytes(&l),
                     EP_DEVICE_HT_WARPS * 4 * (ep_ht_columns(8, 32) + 32 * EP_MAX_TOP_K));
    l.ranks = 1;
    l.experts = l.local_experts = 8191;
    assert_int_equal(ep_device_ht_counting_warps(&l), 1);
    assert_true(ep_device_ht_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    for (l.ranks = 1; l.ranks <= EP_DEVICE_MAX_RANKS; l.ranks++) { /* the most that is let pass */
        l.local_experts = l.experts = EP_DEVICE_MAX_LOCAL;
        while (ep_device_check(&l, NULL) != EP_OK)
            l.local_experts--;
        assert_true(ep_device_ht_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    }
}

/* What the tables of HT take lies behind those of LL, which stay where they are. */
static void without_ht_its_tables_take_nothing(void **state)
{
    struct ep_placement placement;
    struct ep_layout_map map;
    struct ep_device_tables ll, both;
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_placement_contiguous(8, 256, &placement, NULL), EP_OK);
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    ep_device_state_tables(&map, &placement, &ll);
    assert_int_equal(ll.ht.handle_stride, 0);
    assert_int_equal(ll.bytes, ll.ht.before);
    l.modes |= 1u << EP_MODE_HT;
    l.ht_max_tokens = 1000;
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    ep_device_state_tables(&map, &placement, &both);
    assert_int_equal(both.weights, ll.weights);
    assert_true(both.ht.totals >= both.ht.before + 4ull * EP_HT_LISTS * ep_ht_columns(8, 32));
    assert_true(both.ht.place_weights >= both.ht.places + 4ull * 8 * 1000 * 8);
    assert_int_equal(both.bytes, both.ht.routing + EP_MAX_HANDLES * both.ht.handle_stride);
    ep_placement_free(&placement);
}

/* The number that the refusal names is good, and the next one is not. */
static void tokens_are_bounded_by_shared_memory(void **state)
{
    struct ep_limits l = good();
    struct ep_error error = EP_ERROR_INIT;
    const uint32_t most = (EP_DEVICE_MAX_SHARED_BYTES / 4 - 2 * l.local_experts - 1) / l.top_k;
    char text[64];

    (void)state;
    l.ll_max_tokens = 65536;
    snprintf(text, sizeof text, "ll_max_tokens is 65536: with top_k 8 must be at most %u", most);
    refused(&l, text);
    l.ll_max_tokens = most;
    assert_int_equal(ep_device_check(&l, &error), EP_OK);
    assert_true(ep_device_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    l.ll_max_tokens = most + 1;
    refused(&l, "ll_max_tokens is");
}

/* Fewer tokens would not help, so they are not what is named. */
static void experts_are_bounded_too(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.experts = l.local_experts = 8191;
    l.ranks = 1;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.experts = l.local_experts = 8192;
    refused(&l, "experts is 8192, up to 8192 on a rank, with 1 ranks");
    l.experts = 65536; /* all of them on one of many ranks */
    l.local_experts = 65536;
    l.ranks = 32;
    refused(&l, "experts is 65536");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usual_groups_are_good),
        cmocka_unit_test(ranks_are_those_of_one_nvlink_domain),
        cmocka_unit_test(modes_are_one_or_both),
        cmocka_unit_test(ht_counts_in_shared_memory),
        cmocka_unit_test(without_ht_its_tables_take_nothing),
        cmocka_unit_test(tokens_are_bounded_by_shared_memory),
        cmocka_unit_test(experts_are_bounded_too),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
