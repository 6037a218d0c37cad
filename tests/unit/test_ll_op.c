/* From a descriptor to what a kernel is told: addresses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "ll_op.h"

static uint8_t window[4096], state_memory[64], first[256], second[256];
static struct ep_regions regions = { 3, { { first, 256 }, { NULL, 0 }, { second, 256 } } };

static struct ep_ll_args fill_with(const struct ep_op *op, const struct ep_regions *given)
{
    struct ep_ll_rank rank = { .base = { .rank = 1, .ranks = 2, .hidden = 8 },
                               .sms = 1, .dispatch_blocks = 1, .combine_blocks = 1 };
    struct ep_ll_args args;

    rank.base.own = window;
    rank.base.state = (struct ep_device_state *)(void *)state_memory;
    args = rank.base;
    ep_ll_fill(&rank, given, op, false, &args);
    return args;
}

static struct ep_ll_args fill(const struct ep_op *op)
{
    return fill_with(op, &regions);
}

static void a_span_is_in_the_window_or_in_its_region(void **state)
{
    const struct ep_op op = {
        .kind = EP_OP_DISPATCH, .wire_dtype = EP_BF16, .tokens = 1, .top_k = 1,
        .x = { ep_region_offset(0), 16 }, .topk_idx = { 256, 4 }, .topk_weights = { ep_region_offset(2) + 240, 16 },
        .out = { ep_region_offset(2), 32 }, .counts = { 16, 8 },
    };
    struct ep_ll_args args = fill(&op);

    (void)state;
    assert_ptr_equal(args.x, first);
    assert_ptr_equal(args.topk, window + 256);
    assert_ptr_equal(args.topk_weights, second + 240);
    assert_ptr_equal(args.out, second);
    assert_int_equal(args.out_rows, 2);
    assert_ptr_equal(args.counts, window + 16);
    assert_null(args.sources);
    assert_null(args.bias);
}

/* What the kernel that serves makes of an op before it knows that it is refused. */
static void what_is_not_there_is_not_followed(void **state)
{
    const struct ep_op op = {
        .kind = EP_OP_DISPATCH, .wire_dtype = EP_BF16, .tokens = 1, .top_k = 1,
        .x = { ep_region_offset(1), 16 }, .topk_idx = { ep_region_offset(3), 16 },
        .out = { ep_region_offset(EP_MAX_REGIONS), 16 }, .counts = { UINT64_MAX - 15, 16 },
        .sources = { ep_region_offset(0), 0 },
    };
    struct ep_ll_args args = fill(&op);

    (void)state;
    assert_null(args.x); /* unregistered: its beginning is nowhere */
    assert_null(args.topk);
    assert_null(args.out);
    assert_null(args.counts);
    assert_null(args.sources);
}

static void without_regions_there_is_the_window(void **state)
{
    const struct ep_op op = { .kind = EP_OP_DISPATCH, .wire_dtype = EP_BF16, .tokens = 1, .top_k = 1,
                              .x = { 32, 16 }, .counts = { 16, 8 } };
    struct ep_ll_args args = fill_with(&op, NULL);

    (void)state;
    assert_ptr_equal(args.x, window + 32);
    assert_ptr_equal(args.counts, window + 16);
}

/* A captured launch has them by value. */
static void addresses_do_not_change_with_the_table(void **state)
{
    const struct ep_op op = { .kind = EP_OP_COMBINE, .wire_dtype = EP_BF16, .tokens = 1, .top_k = 1,
                              .x = { ep_region_offset(2) + 16, 16 } };
    const struct ep_ll_args args = fill(&op);

    (void)state;
    regions.region[2] = (struct ep_region){ first, 16 };
    assert_ptr_equal(args.x, second + 16);
    regions.region[2] = (struct ep_region){ second, 256 };
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_span_is_in_the_window_or_in_its_region),
        cmocka_unit_test(what_is_not_there_is_not_followed),
        cmocka_unit_test(without_regions_there_is_the_window),
        cmocka_unit_test(addresses_do_not_change_with_the_table),
    };

    return cmocka_run_group_tests_name("ll_op", tests, NULL, NULL);
}
