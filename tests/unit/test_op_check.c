/* ep_op_check: a good descriptor of each kind passes, and each bad field is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ep_kernels.h"

enum { RANKS = 2, EXPERTS = 4, LOCAL = 2, K = 2, HIDDEN = 256, T_LL = 4, T_HT = 8 };

static struct ep_layout_map map;

static int set_up(void **state)
{
    const struct ep_limits limits = {
        .ranks = RANKS, .experts = EXPERTS, .local_experts = LOCAL, .top_k = K, .hidden = HIDDEN,
        .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
        .dtypes = 1u << EP_BF16 | 1u << EP_FP8_E4M3,
        .ll_max_tokens = T_LL, .ht_max_tokens = T_HT, .ll_banks = 2, .arena_bytes = 1u << 20,
    };

    (void)state;
    return ep_layout_compute(&limits, &map, NULL);
}

/* Spans one after the other in the arena. */
static struct ep_span take(uint64_t *at, uint64_t bytes)
{
    struct ep_span span = { map.arena + *at, bytes };

    *at += (bytes + 15) / 16 * 16;
    return span;
}

static struct ep_op dispatch(ep_mode mode, ep_layout layout)
{
    uint64_t at = 0, rows = layout == EP_LAYOUT_EXPERT_MAJOR ? LOCAL * RANKS * T_LL : 16;
    struct ep_op op = {
        .kind = EP_OP_DISPATCH, .mode = mode, .layout = layout, .input_dtype = EP_BF16,
        .wire_dtype = EP_BF16, .tokens = 3, .top_k = K, .index_bytes = 4, .alignment = 1,
    };

    op.x = take(&at, 3 * HIDDEN * 2);
    op.topk_idx = take(&at, 3 * K * 4);
    op.topk_weights = take(&at, 3 * K * 4);
    if (layout != EP_LAYOUT_RANK_MAJOR)
        op.out = take(&at, rows * HIDDEN * 2);
    op.counts = take(&at, 4 * 8);
    if (layout == EP_LAYOUT_PACKED)
        op.offsets = take(&at, 4 * (LOCAL + 1));
    return op;
}

static struct ep_op combine(ep_mode mode, ep_layout layout)
{
    uint64_t at = 0;
    struct ep_op op = {
        .kind = EP_OP_COMBINE, .mode = mode, .layout = layout, .input_dtype = EP_BF16,
        .wire_dtype = EP_BF16, .tokens = 3, .top_k = K,
    };

    op.x = take(&at, LOCAL * RANKS * T_LL * HIDDEN * 2);
    op.out = take(&at, 3 * HIDDEN * 2);
    return op;
}

static void good_ops_pass(void **state)
{
    static const struct { ep_mode mode; ep_layout layout; } all[] = {
        { EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR }, { EP_MODE_LL, EP_LAYOUT_RANK_MAJOR },
        { EP_MODE_LL, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_PACKED },
        { EP_MODE_HT, EP_LAYOUT_FLAT },
    };

    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct ep_op d = dispatch(all[i].mode, all[i].layout);
        struct ep_op c = combine(all[i].mode, all[i].layout);
        struct ep_error error = EP_ERROR_INIT;

        if (ep_op_check(&map, &d, &error) != EP_OK || ep_op_check(&map, &c, &error) != EP_OK)
            fail_msg("mode %d layout %d: %s", all[i].mode, all[i].layout, error.text);
    }
}

/* fp8 that is given, with scales of `each` bytes. */
static struct ep_op scaled(ep_scale_format format, uint64_t each)
{
    struct ep_op op = dispatch(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
    uint64_t at = 1u << 19, n = HIDDEN / EP_FP8_BLOCK * each;

    op.input_dtype = op.wire_dtype = EP_FP8_E4M3;
    op.scale_format = format;
    op.x_scales = take(&at, 3 * n);
    op.out_scales = take(&at, LOCAL * RANKS * T_LL * n);
    return op;
}

static void scales_have_the_size_of_their_format(void **state)
{
    struct ep_op fp32 = scaled(EP_SCALE_FP32, 4), ue8m0 = scaled(EP_SCALE_UE8M0, 1);

    (void)state;
    assert_int_equal(ep_op_check(&map, &fp32, NULL), EP_OK);
    assert_int_equal(ep_op_check(&map, &ue8m0, NULL), EP_OK);
    ue8m0.scale_format = EP_SCALE_FP32;
    assert_int_equal(ep_op_check(&map, &ue8m0, NULL), EP_INVALID_ARGUMENT);
}

static void zero_tokens_need_no_memory(void **state)
{
    struct ep_op op = dispatch(EP_MODE_HT, EP_LAYOUT_FLAT);

    (void)state;
    op.tokens = 0;
    op.x = op.topk_idx = op.topk_weights = op.out = (struct ep_span){ 0 };
    assert_int_equal(ep_op_check(&map, &op, NULL), EP_OK);
}

static void refused(const struct ep_op *op, const char *begin)
{
    struct ep_error error = EP_ERROR_INIT;

    if (ep_op_check(&map, op, &error) != EP_INVALID_ARGUMENT)
        fail_msg("accepted; should have said \"%s...\"", begin);
    if (strncmp(error.text, begin, strlen(begin)) != 0)
        fail_msg("\"%s\" does not begin with \"%s\"", error.text, begin);
}

#define REFUSED(make, change, begin)  \
    do {                              \
        struct ep_op op = make;       \
        change;                       \
        refused(&op, begin);          \
    } while (0)
#define LL dispatch(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR)
#define RM dispatch(EP_MODE_LL, EP_LAYOUT_RANK_MAJOR)
#define HT dispatch(EP_MODE_HT, EP_LAYOUT_PACKED)

static void bad_fields_of_a_dispatch_are_named(void **state)
{
    (void)state;
    REFUSED(LL, op.kind = 0, "kind is 0");
    REFUSED(LL, op.kind = 5, "kind is 5");
    REFUSED(LL, op.handle = EP_MAX_HANDLES, "handle is 64");
    REFUSED(LL, op.mode = 0, "mode is 0");
    REFUSED(LL, op.mode = 40, "mode is 40");
    REFUSED(LL, op.layout = EP_LAYOUT_FLAT, "layout is 4: LL has");
    REFUSED(HT, op.layout = EP_LAYOUT_EXPERT_MAJOR, "layout is 1: HT has");
    REFUSED(HT, op.flags = EP_OP_SEND_ONLY, "flags: send-only");
    REFUSED(LL, op.flags = 1u << 30, "flags is 0x40000000");
    REFUSED(LL, op.tokens = T_LL + 1, "tokens is 5: the group allows at most 4");
    REFUSED(HT, op.tokens = UINT32_MAX, "tokens is 4294967295");
    REFUSED(LL, op.top_k = 0, "top_k is 0");
    REFUSED(LL, op.top_k = K + 1, "top_k is 3");
    REFUSED(LL, op.wire_dtype = EP_FP16, "wire_dtype is 2");
    REFUSED(LL, op.input_dtype = 9, "input_dtype is 9");
    REFUSED(LL, op.input_dtype = EP_FP32, "wire_dtype is 1");
    REFUSED(LL, op.scale_format = EP_SCALE_UE8M0, "scale_format is 1: only fp8 has scales, wire_dtype is 1");
    REFUSED(scaled(EP_SCALE_UE8M0, 1), op.scale_format = 2, "scale_format is 2: must be fp32 0 or ue8m0 1");
    REFUSED(LL, op.index_bytes = 3, "index_bytes is 3");
    REFUSED(HT, op.alignment = 0, "alignment is 0");
    REFUSED(HT, op.alignment = 12, "alignment is 12");
}

static void bad_spans_of_a_dispatch_are_named(void **state)
{
    (void)state;
    REFUSED(LL, op.x.bytes = 0, "x is missing");
    REFUSED(LL, op.x.bytes -= 16, "x has");
    REFUSED(LL, op.x.offset += 8, "x.offset is");
    REFUSED(LL, op.x.offset = 0, "x is [0,");
    REFUSED(LL, op.x.offset = map.arena - 16, "x is [");
    REFUSED(LL, op.x.offset = map.total_bytes, "x is [");
    REFUSED(LL, op.x.offset = UINT64_MAX - 15, "x is [");
    REFUSED(LL, op.x.bytes = UINT64_MAX, "x is [");
    REFUSED(LL, op.topk_idx.bytes = 0, "topk_idx is missing");
    REFUSED(LL, op.index_bytes = 8, "topk_idx has");
    REFUSED(LL, op.topk_weights.bytes = 16, "topk_weights has 16");
    REFUSED(LL, op.out.bytes -= 16, "out has");
    REFUSED(LL, op.counts.bytes = 0, "counts is missing");
    REFUSED(LL, op.offsets = op.counts, "offsets is given");
    REFUSED(LL, op.out_topk = op.counts, "out_topk is given");
    REFUSED(LL, op.x_scales = op.counts, "x_scales is given");
    REFUSED(LL, op.out_scales = op.counts, "out_scales is given");
    REFUSED(LL, op.wire_dtype = EP_FP8_E4M3, "out_scales is missing");
    REFUSED(RM, op.out = op.x, "out is given");
    REFUSED(RM, op.out_topk = op.counts, "out_topk has");
    REFUSED(HT, op.offsets.bytes = 4, "offsets has 4");
    REFUSED(HT, op.sources = op.counts, "sources has");
    REFUSED(HT, (op.wire_dtype = EP_FP8_E4M3, op.out.bytes = 0, op.out_scales = (struct ep_span){ 0, 16 }),
            "out_scales is [0,");
    REFUSED(LL, op.flags = EP_OP_CACHED, "topk_idx is given: a cached");
    REFUSED(LL, (op.input_dtype = op.wire_dtype = EP_FP8_E4M3), "x_scales is missing");
    REFUSED(scaled(EP_SCALE_UE8M0, 1), op.x_scales.bytes -= 1, "x_scales has 5 bytes: this op needs 6");
    REFUSED(scaled(EP_SCALE_UE8M0, 1), op.out_scales.bytes -= 1, "out_scales has 31 bytes: this op needs 32");
    REFUSED(scaled(EP_SCALE_FP32, 4), op.out_scales.bytes = 32, "out_scales has 32 bytes: this op needs 128");
}

static void a_rank_without_tokens_gives_gradients_of_others(void **state)
{
    struct ep_op op = combine(EP_MODE_HT, EP_LAYOUT_FLAT);

    (void)state;
    op.row_grads = op.out;
    assert_int_equal(ep_op_check(&map, &op, NULL), EP_INVALID_ARGUMENT);
    op.tokens = 0;
    assert_int_equal(ep_op_check(&map, &op, NULL), EP_OK);
}

static void bad_fields_of_a_combine_are_named(void **state)
{
    (void)state;
#define C combine(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR)
#define CH combine(EP_MODE_HT, EP_LAYOUT_FLAT)
    REFUSED(C, op.input_dtype = op.wire_dtype = EP_FP8_E4M3, "input_dtype is 4");
    REFUSED(C, op.input_dtype = op.wire_dtype = EP_FP16, "input_dtype is 2");
    REFUSED(C, op.wire_dtype = EP_FP8_E4M3, "wire_dtype is 4");
    REFUSED(C, op.flags = EP_OP_CACHED, "flags: cached");
    REFUSED(C, op.x.bytes = 0, "x is missing");
    REFUSED(C, op.out.bytes -= 16, "out has");
    REFUSED(C, op.bias = ((struct ep_span){ op.x.offset, 16 }), "bias has 16");
    REFUSED(C, op.row_grads = op.out, "row_grads is given: gradients are for HT");
    REFUSED(CH, op.row_grads = op.out, "row_grads is given: topk_grads");
    REFUSED(CH, op.topk_grads = ((struct ep_span){ op.x.offset, 16 }), "topk_grads has 16");
}

/* Numbers 0 and 2; 1 is not there. */
static const struct ep_regions regions = { 3, { { NULL, 4096 }, { NULL, 0 }, { NULL, EP_REGION_BYTES } } };

static void spans_may_lie_in_regions(void **state)
{
    const uint64_t bytes = 3 * HIDDEN * 2;
    struct ep_op op = LL;

    (void)state;
    op.x.offset = ep_region_offset(0);
    assert_int_equal(ep_op_check_own(&map, &regions, &op, NULL), EP_OK);
    op.x.offset = ep_region_offset(0) + 4096 - bytes;
    assert_int_equal(ep_op_check_own(&map, &regions, &op, NULL), EP_OK);
    op.x.offset = ep_region_offset(2) + EP_REGION_BYTES - bytes;
    assert_int_equal(ep_op_check_own(&map, &regions, &op, NULL), EP_OK);
    op.out.offset = ep_region_offset(2);
    assert_int_equal(ep_op_check_own(&map, &regions, &op, NULL), EP_OK);
    assert_int_equal(ep_op_check(&map, &op, NULL), EP_INVALID_ARGUMENT);
    op = LL; /* the arena is as good as ever */
    assert_int_equal(ep_op_check_own(&map, &regions, &op, NULL), EP_OK);
}

static void spans_outside_of_all_regions_are_refused(void **state)
{
    const uint64_t bytes = 3 * HIDDEN * 2;
    const struct { uint64_t offset, bytes; } bad[] = {
        { EP_REGION_BYTES - 16, bytes }, /* below the first one, and into it */
        { ep_region_offset(0) + 4096 - bytes + 16, bytes },
        { ep_region_offset(0) + 4096, bytes },
        { ep_region_offset(0) + 8, bytes },
        { ep_region_offset(1) - 16, bytes },
        { ep_region_offset(1), bytes },
        { ep_region_offset(2), EP_REGION_BYTES + 16 },
        { ep_region_offset(2), UINT64_MAX },
        { ep_region_offset(2) + EP_REGION_BYTES - bytes + 16, bytes },
        { ep_region_offset(3), bytes },
        { ep_region_offset(EP_MAX_REGIONS - 1), bytes },
        { ep_region_offset(EP_MAX_REGIONS), bytes },
        { UINT64_MAX - 15, bytes },
        { UINT64_MAX - 15, 16 },
    };
    struct ep_regions none = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ep_error error = EP_ERROR_INIT;
        struct ep_op op = LL;

        op.x = (struct ep_span){ bad[i].offset, bad[i].bytes };
        if (ep_op_check_own(&map, &regions, &op, &error) != EP_INVALID_ARGUMENT)
            fail_msg("[%#llx, +%llu) is accepted", (unsigned long long)bad[i].offset, (unsigned long long)bad[i].bytes);
        assert_non_null(strstr(error.text, i == 3 ? "x.offset is" : "x is ["));
        op.x.offset = ep_region_offset(0);
        assert_int_equal(ep_op_check_own(&map, &none, &op, NULL), EP_INVALID_ARGUMENT);
    }
}

/* The host backend runs ops by this check. */
static void without_a_table_there_are_no_regions(void **state)
{
    (void)state;
    REFUSED(LL, op.x.offset = ep_region_offset(0), "x is [");
    REFUSED(LL, op.out.offset = ep_region_offset(EP_MAX_REGIONS - 1), "out is [");
    REFUSED(RM, op.counts.offset = ep_region_offset(0), "counts is [");
    REFUSED(HT, op.x.offset = ep_region_offset(7), "x is [");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_ops_pass),
        cmocka_unit_test(scales_have_the_size_of_their_format),
        cmocka_unit_test(zero_tokens_need_no_memory),
        cmocka_unit_test(bad_fields_of_a_dispatch_are_named),
        cmocka_unit_test(bad_spans_of_a_dispatch_are_named),
        cmocka_unit_test(a_rank_without_tokens_gives_gradients_of_others),
        cmocka_unit_test(bad_fields_of_a_combine_are_named),
        cmocka_unit_test(spans_may_lie_in_regions),
        cmocka_unit_test(spans_outside_of_all_regions_are_refused),
        cmocka_unit_test(without_a_table_there_are_no_regions),
    };

    return cmocka_run_group_tests_name("op_check", tests, set_up, NULL);
}
