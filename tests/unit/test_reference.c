/* The oracle against cases worked out by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ep_reference.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- numbers -------------------------------------------------------------------- */

static double decode(ep_dtype dtype, uint32_t code)
{
    return ep_ref_decode(dtype, &code);
}

/* The e4m3 table, written down from its definition in the OCP 8-bit formats: rows of one exponent. */
static void e4m3_table_is_the_published_one(void **state)
{
    static const double first_of_exponent[16] = { 0, 0x1p-6, 0x1p-5, 0x1p-4, 0.125, 0.25, 0.5, 1,
                                                  2, 4,      8,      16,     32,    64,   128, 256 };
    (void)state;

    for (uint32_t code = 0; code < 0x7f; code++) {
        uint32_t row = code >> 3, column = code & 7;
        double expected = row == 0 ? column / 512.0 : first_of_exponent[row] * (1 + column / 8.0);

        assert_true(decode(EP_FP8_E4M3, code) == expected);
        assert_true(decode(EP_FP8_E4M3, code | 0x80) == -expected);
    }
    assert_true(isnan(decode(EP_FP8_E4M3, 0x7f)));
    assert_true(isnan(decode(EP_FP8_E4M3, 0xff)));
    assert_true(decode(EP_FP8_E4M3, 0x7e) == 448);
}

static void every_code_survives_a_round_trip(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 256; code++)
        if (!isnan(decode(EP_FP8_E4M3, code)))
            assert_int_equal(ep_ref_encode(EP_FP8_E4M3, decode(EP_FP8_E4M3, code)), code);
    for (uint32_t code = 0; code < 65536; code++) {
        if (!isnan(decode(EP_BF16, code)))
            assert_int_equal(ep_ref_encode(EP_BF16, decode(EP_BF16, code)), code);
        if (!isnan(decode(EP_FP16, code)))
            assert_int_equal(ep_ref_encode(EP_FP16, decode(EP_FP16, code)), code);
    }
}

static void midpoints_of_e4m3_go_to_the_even_code(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x7e; code++) {
        double middle = (decode(EP_FP8_E4M3, code) + decode(EP_FP8_E4M3, code + 1)) / 2;
        uint32_t even = code & 1 ? code + 1 : code;

        assert_int_equal(ep_ref_encode(EP_FP8_E4M3, middle), even);
        assert_int_equal(ep_ref_encode(EP_FP8_E4M3, -middle), even | 0x80);
        assert_int_equal(ep_ref_encode(EP_FP8_E4M3, nextafter(middle, 0)), code);
        assert_int_equal(ep_ref_encode(EP_FP8_E4M3, nextafter(middle, 1000)), code + 1);
    }
    assert_int_equal(ep_ref_encode(EP_FP8_E4M3, 1e9), 0x7e);
    assert_int_equal(ep_ref_encode(EP_FP8_E4M3, -INFINITY), 0xfe);
}

static void bf16_and_fp16_round_ties_to_even(void **state)
{
    (void)state;
    assert_int_equal(ep_ref_encode(EP_BF16, 1.0), 0x3f80);
    assert_int_equal(ep_ref_encode(EP_BF16, 1.0 + 0x1p-8), 0x3f80); /* tie, down to even */
    assert_int_equal(ep_ref_encode(EP_BF16, 1.0 + 0x3p-8), 0x3f82); /* tie, up to even */
    assert_int_equal(ep_ref_encode(EP_BF16, 1.0 + 0x1.1p-8), 0x3f81);
    assert_int_equal(ep_ref_encode(EP_BF16, -2.0 + 0x1p-8), 0xc000); /* tie across a binade */
    assert_int_equal(ep_ref_encode(EP_BF16, 0x1p-134), 0);           /* half of the least subnormal */
    assert_int_equal(ep_ref_encode(EP_BF16, 0x3p-134), 2);
    assert_int_equal(ep_ref_encode(EP_BF16, 3.4e38), 0x7f80);
    assert_int_equal(ep_ref_encode(EP_BF16, NAN) & 0x7fff, 0x7fff);

    assert_int_equal(ep_ref_encode(EP_FP16, 1.0 + 0x1p-11), 0x3c00);
    assert_int_equal(ep_ref_encode(EP_FP16, 1.0 + 0x3p-11), 0x3c02);
    assert_int_equal(ep_ref_encode(EP_FP16, 0x1p-25), 0);
    assert_int_equal(ep_ref_encode(EP_FP16, 0x3p-25), 2);
    assert_int_equal(ep_ref_encode(EP_FP16, 65519.0), 0x7bff);
    assert_int_equal(ep_ref_encode(EP_FP16, 65520.0), 0x7c00);
    assert_int_equal(ep_ref_encode(EP_FP16, 0x1p-14 - 0x1p-25), 0x0400); /* rounds up to normal */
}

static void fp32_matches_the_compiler(void **state)
{
    static const double values[] = {
        0, 1, -1, 0.1, 1e-40, 0x1p-149, 0x1p-150, 0x3p-150, 3.4e38, 1 + 0x1p-24
    };
    (void)state;

    for (size_t i = 0; i < COUNT(values); i++) {
        float f = (float)values[i];
        uint32_t bits;

        memcpy(&bits, &f, sizeof bits);
        assert_int_equal(ep_ref_encode(EP_FP32, values[i]), bits);
        assert_true(ep_ref_decode(EP_FP32, &f) == (double)f);
    }
    assert_int_equal(ep_ref_encode(EP_FP32, -0.0), 0x80000000u);
}

static void half_ulp_is_half_the_gap(void **state)
{
    (void)state;
    assert_true(ep_ref_half_ulp(EP_BF16, 1.0) == 0x1p-8);
    assert_true(ep_ref_half_ulp(EP_BF16, -1.99) == 0x1p-8);
    assert_true(ep_ref_half_ulp(EP_FP16, 1.0) == 0x1p-11);
    assert_true(ep_ref_half_ulp(EP_FP32, 4.0) == 0x1p-22);
    assert_true(ep_ref_half_ulp(EP_FP8_E4M3, 448) == 16);
    assert_true(ep_ref_half_ulp(EP_FP8_E4M3, 0) == 0x1p-10);
    assert_true(ep_ref_half_ulp(EP_FP8_E4M3, 0x1p-9) == 0x1p-10);
    assert_true(ep_ref_half_ulp(EP_BF16, 0) == 0x1p-134);
}

/* A straightforward quantiser, in the ways a kernel may do it, stays inside the radius. */
static void fp8_radius_covers_division_and_reciprocal(void **state)
{
    double worst = 0;
    (void)state;

    for (uint32_t i = 1; i <= 40000; i++) {
        float amax = 0.3f + (float)(i % 977) * 0.01f;
        float x = amax * (float)i / 40000.0f / (float)(1u << i % 14);
        float scale = amax / 448.0f;
        float ways[] = { x / scale, x * (1.0f / scale), x * (448.0f / amax) };

        assert_true(ep_ref_fp8_scale_ok(EP_SCALE_FP32, (double)amax, (double)scale));
        for (size_t w = 0; w < COUNT(ways); w++) {
            double back = ep_ref_round(EP_FP8_E4M3, (double)ways[w]) * (double)scale;
            double ratio = fabs(back - (double)x) / ep_ref_fp8_radius(EP_SCALE_FP32, (double)x, (double)amax);

            assert_true(ratio <= 1);
            worst = ratio > worst ? ratio : worst;
        }
    }
    assert_true(worst > 0.99); /* and it is no wider than it has to be */
    assert_false(ep_ref_fp8_scale_ok(EP_SCALE_FP32, 448.0, 1.001));
    assert_true(ep_ref_fp8_radius(EP_SCALE_FP32, 0, 0) == 0);
}

static bool is_scale(double amax, int exponent)
{
    return ep_ref_fp8_scale_ok(EP_SCALE_UE8M0, amax, ldexp(1, exponent))
        && !ep_ref_fp8_scale_ok(EP_SCALE_UE8M0, amax, ldexp(1, exponent - 1))
        && !ep_ref_fp8_scale_ok(EP_SCALE_UE8M0, amax, ldexp(1, exponent + 1));
}

static void ue8m0_scales_are_the_smallest_powers_that_hold_the_block(void **state)
{
    static const struct { double amax; int exponent; } known[] = {
        { 0, 0 }, { 448, 0 }, { 1, -8 }, { 1.75, -8 }, { 1.7500001, -7 }, { 2, -7 }, { 3.5, -7 }, { 6, -6 },
        { 0x1p-140, -127 }, { 0x1.cp-119, -127 }, { 0x1.c00002p-119, -126 }, { 0x1p-149, -127 },
        { 0x1.cp127, 119 }, { 0x1.fffffep127, 120 },
    };
    (void)state;

    for (size_t i = 0; i < COUNT(known); i++)
        if (!is_scale(known[i].amax, known[i].exponent))
            fail_msg("amax %a: its scale is not 2^%d", known[i].amax, known[i].exponent);
}

static void ue8m0_radius_is_that_of_the_nearest_code(void **state)
{
    double worst = 0;
    (void)state;

    for (uint32_t i = 1; i <= 40000; i++) {
        double amax = 0.3 + i % 977 * 0.01, scale = exp2(ceil(log2(amax / 448)));
        double x = amax * i / 40000.0 / (double)(1u << i % 14);
        double back = ep_ref_round(EP_FP8_E4M3, x / scale) * scale;
        double ratio = fabs(back - x) / ep_ref_fp8_radius(EP_SCALE_UE8M0, x, amax);

        assert_true(ep_ref_fp8_scale_ok(EP_SCALE_UE8M0, amax, scale));
        assert_true(ratio <= 1);
        worst = ratio > worst ? ratio : worst;
    }
    assert_true(worst > 0.99);
    assert_true(ep_ref_fp8_radius(EP_SCALE_UE8M0, 0, 0) == 0);
}

static void scales_are_read_by_their_format(void **state)
{
    static const float fp32[] = { 1, 0.375f };
    static const uint8_t ue8m0[] = { 127, 0, 254, 255, 120 };
    (void)state;

    assert_int_equal(ep_ref_scale_bytes(EP_SCALE_FP32), 4);
    assert_int_equal(ep_ref_scale_bytes(EP_SCALE_UE8M0), 1);
    assert_true(ep_ref_scale(EP_SCALE_FP32, fp32, 1) == 0.375);
    assert_true(ep_ref_scale(EP_SCALE_UE8M0, ue8m0, 0) == 1);
    assert_true(ep_ref_scale(EP_SCALE_UE8M0, ue8m0, 1) == 0x1p-127);
    assert_true(ep_ref_scale(EP_SCALE_UE8M0, ue8m0, 2) == 0x1p127);
    assert_true(isnan(ep_ref_scale(EP_SCALE_UE8M0, ue8m0, 3)));
    assert_true(ep_ref_scale(EP_SCALE_UE8M0, ue8m0, 4) == 1.0 / 128);
}

/* ---- routing -------------------------------------------------------------------- */

static void uneven_experts_go_to_the_first_ranks(void **state)
{
    struct ep_ref_routing routing = { .ranks = 3, .experts = 8, .top_k = 1 };
    static const uint32_t rank_of[8] = { 0, 0, 0, 1, 1, 1, 2, 2 }, local_of[8] = { 0, 1, 2, 0, 1, 2, 0, 1 };
    uint32_t rank, local;
    (void)state;

    for (int64_t e = 0; e < 8; e++) {
        assert_true(ep_ref_home(&routing, 0, 0, e, &rank, &local));
        assert_int_equal(rank, rank_of[e]);
        assert_int_equal(local, local_of[e]);
        assert_int_equal(ep_ref_expert_at(&routing, rank, local), e);
    }
    assert_int_equal(ep_ref_local_experts(&routing, 0), 3);
    assert_int_equal(ep_ref_local_experts(&routing, 2), 2);
    assert_int_equal(ep_ref_expert_at(&routing, 2, 2), -1);
    assert_false(ep_ref_home(&routing, 0, 0, -1, &rank, &local));
    assert_false(ep_ref_home(&routing, 0, 0, 8, &rank, &local));
    assert_false(ep_ref_home(&routing, 0, 0, INT64_MIN, &rank, &local));
}

static void replicas_are_taken_in_turn(void **state)
{
    static const struct ep_ref_home homes[] = { { 0, 1 }, { 1, 0 }, { 0, 0 }, { 0, 1 + 1 } };
    struct ep_ref_routing routing = { .ranks = 3, .experts = 2, .top_k = 1, .n_homes = 4, .homes = homes };
    uint32_t rank, local;
    (void)state;

    assert_true(ep_ref_home(&routing, 0, 0, 0, &rank, &local)); /* (0 + 0) mod 3 = first listed */
    assert_int_equal(rank, 1);
    assert_int_equal(local, 0);
    assert_true(ep_ref_home(&routing, 1, 3, 0, &rank, &local)); /* 4 mod 3 = second */
    assert_int_equal(rank, 0);
    assert_int_equal(local, 1); /* expert 1 is listed before on rank 0 */
    assert_true(ep_ref_home(&routing, 2, 0, 0, &rank, &local));
    assert_int_equal(rank, 2);
    assert_true(ep_ref_home(&routing, 2, 7, 1, &rank, &local)); /* one home only */
    assert_int_equal(rank, 0);
    assert_int_equal(local, 0);
    assert_int_equal(ep_ref_expert_at(&routing, 0, 1), 0);
    assert_int_equal(ep_ref_local_experts(&routing, 0), 2);
}

/*
 * The example of the layout tests.  2 ranks, 4 experts (0, 1 on rank 0; 2, 3 on rank 1), k 2.
 *     rank 0: t0 -> 0, 2   t1 -> 1, 1   t2 -> -1, 3
 *     rank 1: t0 -> 2, 3   t1 -> 9, 0   (9 is no expert)
 */
static const int64_t topk0[] = { 0, 2, 1, 1, -1, 3 };
static const int64_t topk1[] = { 2, 3, 9, 0 };
static const float weights0[] = { 0.5f, 0.25f, 1, 2, 4, 8 };
static const float weights1[] = { 16, 32, 64, 128 };

static struct ep_ref_rank example_ranks[2];

static struct ep_ref_routing example(bool present1)
{
    example_ranks[0] = (struct ep_ref_rank){ true, 3, topk0, weights0, false };
    example_ranks[1] = (struct ep_ref_rank){ present1, 2, topk1, weights1, false };
    return (struct ep_ref_routing){ .ranks = 2, .experts = 4, .top_k = 2, .rank = example_ranks };
}

static void check_rows(const struct ep_ref_dispatch *d, const struct ep_ref_row *expected, size_t n)
{
    assert_int_equal(d->n_rows, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(d->rows[i].position, expected[i].position);
        assert_int_equal(d->rows[i].padding, expected[i].padding);
        assert_int_equal(d->rows[i].missing, expected[i].missing);
        assert_int_equal(d->rows[i].source, expected[i].source);
        assert_int_equal(d->rows[i].token, expected[i].token);
        assert_int_equal(d->rows[i].expert, expected[i].expert);
    }
}

static void expert_major_by_hand(void **state)
{
    struct ep_ref_routing routing = example(true);
    struct ep_ref_dispatch d;
    static const struct ep_ref_row rows0[] = { { 0, 0, 0, 0, false, false },
                                               { 1, 1, 1, 0, false, false },
                                               { 8, 0, 1, 1, false, false } };
    static const struct ep_ref_row rows1[] = {
        { 0, 0, 0, 0, false, false }, { 1, 1, 0, 0, false, false }, { 8, 0, 2, 1, false, false }, { 9, 1, 0, 1, false, false }
    };
    (void)state;

    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_EXPERT_MAJOR, 1, 4, &d));
    check_rows(&d, rows0, COUNT(rows0)); /* the doubled choice of t1 has one row */
    assert_int_equal(d.positions, 16);
    assert_int_equal(d.n_counts, 2);
    assert_int_equal(d.counts[0], 2);
    assert_int_equal(d.counts[1], 1);
    ep_ref_dispatch_free(&d);
    assert_true(ep_ref_dispatch(&routing, 1, EP_LAYOUT_EXPERT_MAJOR, 1, 4, &d));
    check_rows(&d, rows1, COUNT(rows1));
    ep_ref_dispatch_free(&d);
}

static void packed_by_hand(void **state)
{
    struct ep_ref_routing routing = example(true);
    struct ep_ref_dispatch d;
    static const struct ep_ref_row rows0[] = { { 0, 0, 0, 0, false, false }, { 1, 1, 1, 0, false, false },
                                               { 2, 0, 0, -1, true, false }, { 3, 0, 0, -1, true, false },
                                               { 4, 0, 1, 1, false, false }, { 5, 0, 0, -1, true, false },
                                               { 6, 0, 0, -1, true, false }, { 7, 0, 0, -1, true, false } };
    static const struct ep_ref_row rows1[] = {
        { 0, 0, 0, 0, false, false }, { 1, 1, 0, 0, false, false }, { 2, 0, 2, 1, false, false }, { 3, 1, 0, 1, false, false }
    };
    (void)state;

    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_PACKED, 4, 0, &d));
    check_rows(&d, rows0, COUNT(rows0));
    assert_int_equal(d.positions, 8);
    assert_memory_equal(d.offsets, ((int32_t[]){ 0, 4, 8 }), 12);
    assert_memory_equal(d.counts, ((int32_t[]){ 2, 1 }), 8);
    ep_ref_dispatch_free(&d);
    assert_true(ep_ref_dispatch(&routing, 1, EP_LAYOUT_PACKED, 1, 0, &d));
    check_rows(&d, rows1, COUNT(rows1));
    assert_memory_equal(d.offsets, ((int32_t[]){ 0, 2, 4 }), 12);
    ep_ref_dispatch_free(&d);
}

/* Rank 1 told rank 0 what would come, and was gone. */
static void rows_that_were_announced_and_not_sent(void **state)
{
    struct ep_ref_routing routing = example(false);
    struct ep_ref_dispatch d;
    static const struct ep_ref_row packed[] = { { 0, 0, 0, 0, false, false },
                                                { 1, 1, 1, 0, false, true },
                                                { 2, 0, 1, 1, false, false } };
    (void)state;

    example_ranks[1].announced = true;
    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_PACKED, 1, 0, &d));
    check_rows(&d, packed, COUNT(packed));
    assert_memory_equal(d.counts, ((int32_t[]){ 2, 1 }), 8);
    ep_ref_dispatch_free(&d);
    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_FLAT, 1, 0, &d));
    assert_memory_equal(d.counts, ((int32_t[]){ 2, 1 }), 8);
    assert_int_equal(d.n_rows, 3);
    assert_true(d.rows[2].missing);
    assert_memory_equal(d.topk, ((int32_t[]){ 0, -1, 1, 1, -1, -1 }), 24);
    assert_memory_equal(d.weights, ((float[]){ 0.5f, 0, 1, 2, 0, 0 }), 24);
    ep_ref_dispatch_free(&d);
}

static void rank_major_and_flat_by_hand(void **state)
{
    struct ep_ref_routing routing = example(true);
    struct ep_ref_dispatch d;
    static const struct ep_ref_row slots[] = { { 0, 0, 0, -1, false, false },
                                               { 1, 0, 1, -1, false, false },
                                               { 4, 1, 1, -1, false, false } };
    static const struct ep_ref_row flat[] = { { 0, 0, 0, -1, false, false },
                                              { 1, 0, 1, -1, false, false },
                                              { 2, 1, 1, -1, false, false } };
    static const int32_t topk[] = { 0, -1, 1, 1, -1, 0 };
    static const float weights[] = { 0.5f, 0, 1, 2, 0, 128 };
    (void)state;

    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_RANK_MAJOR, 1, 4, &d));
    check_rows(&d, slots, COUNT(slots));
    assert_int_equal(d.positions, 8);
    assert_memory_equal(d.counts, ((int32_t[]){ 2, 1 }), 8);
    assert_memory_equal(d.topk, topk, sizeof topk);
    assert_memory_equal(d.weights, weights, sizeof weights);
    ep_ref_dispatch_free(&d);

    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_FLAT, 1, 4, &d));
    check_rows(&d, flat, COUNT(flat));
    assert_int_equal(d.positions, 3);
    assert_memory_equal(d.topk, topk, sizeof topk);
    ep_ref_dispatch_free(&d);
}

static void an_absent_rank_sends_nothing_and_gets_nothing(void **state)
{
    struct ep_ref_routing routing = example(false);
    struct ep_ref_dispatch d;
    static const struct ep_ref_row rows0[] = { { 0, 0, 0, 0, false, false }, { 8, 0, 1, 1, false, false } };
    (void)state;

    assert_true(ep_ref_dispatch(&routing, 0, EP_LAYOUT_EXPERT_MAJOR, 1, 4, &d));
    check_rows(&d, rows0, COUNT(rows0));
    ep_ref_dispatch_free(&d);
    assert_int_equal(ep_ref_dropped(&routing, 0), 2); /* t0 -> 2 and t2 -> 3 */
    assert_int_equal(ep_ref_remote_rows(&routing, NULL, 0), 0);
    routing = example(true);
    assert_int_equal(ep_ref_dropped(&routing, 0), 0);
    assert_int_equal(ep_ref_dropped(&routing, 1), 1); /* 9 */
    assert_int_equal(ep_ref_remote_rows(&routing, NULL, 0), 2);
    assert_int_equal(ep_ref_remote_rows(&routing, NULL, 1), 1);
}

/* ---- combine -------------------------------------------------------------------- */

/* Expert e makes 1 + e in column 0 and -(1 + e) * 2^-20 in column 1; column 2 is fuzzy. */
static void toy_expert(void *user, uint32_t source, uint32_t token, uint32_t expert, double *value,
                       double *radius)
{
    (void)user, (void)source, (void)token;
    value[0] = 1.0 + expert;
    value[1] = -(1.0 + expert) * 0x1p-20;
    value[2] = 1.0;
    radius[0] = radius[1] = 0;
    radius[2] = 0.125;
}

static void combine_by_hand(void **state)
{
    struct ep_ref_routing routing = example(true);
    struct ep_ref_combine combine = { .dtype = EP_BF16, .hidden = 3, .expert = toy_expert };
    double value[3], bound[3];
    double g1 = ep_ref_gamma(1), g2 = ep_ref_gamma(2);
    (void)state;

    /* rank 0, t0: expert 0 (w 0.5) on rank 0, expert 2 (w 0.25) on rank 1: 0.5 and 0.75 */
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 0, value, bound));
    assert_true(value[0] == 1.25);
    assert_true(value[1] == -1.25 * 0x1p-20);

    /* Each partial: h(0.5) = h(0.75) = 2^-9; the result: h(1.25) = 2^-8. */
    double e0 = g1 * 0.5 + 0x1p-9, e1 = g1 * 0.75 + 0x1p-9;
    double e = e0 + e1 + g2 * (0.5 + e0 + 0.75 + e1);

    assert_true(fabs(bound[0] - (e + 0x1p-8)) < 1e-15);
    assert_true(bound[2] > 0.75 * 0.125);
    assert_true(bound[2] < 0.75 * 0.125 + 0x1p-7);

    /* t1 names expert 1 twice, with 1 and 2 */
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 1, value, bound));
    assert_true(value[0] == 6.0);
    /* t2: no choice and expert 3 with 8 */
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 2, value, bound));
    assert_true(value[0] == 32.0);
}

/* Ranks 0 and 1 on node 0, 2 and 3 on node 1; two experts each, one choice of each rank. */
static void a_nodes_parts_are_summed_up_there(void **state)
{
    static const int64_t topk[4] = { 0, 2, 4, 6 };
    static const uint32_t node[4] = { 0, 0, 1, 1 };
    const struct ep_ref_rank ranks[4] = { { true, 1, topk, NULL, false }, { .present = true }, { .present = true },
                                          { .present = true } };
    const struct ep_ref_routing routing = { .ranks = 4, .experts = 8, .top_k = 4, .rank = ranks };
    struct ep_ref_combine combine = { .dtype = EP_BF16, .hidden = 3, .node = node, .expert = toy_expert };
    const double g1 = ep_ref_gamma(1), g2 = ep_ref_gamma(2), g3 = ep_ref_gamma(3);
    double value[3], bound[3];
    (void)state;

    assert_int_equal(ep_ref_remote_rows(&routing, NULL, 0), 3);
    assert_int_equal(ep_ref_remote_rows(&routing, node, 0), 2);
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 0, value, bound));
    assert_true(value[0] == 1 + 3 + 5 + 7);

    /* h: of 1 and 3 2^-8 and 2^-7, of 5 and 7 2^-6, of their sum 12 2^-5, of 16 2^-4 */
    double e0 = g1 * 1 + 0x1p-8, e1 = g1 * 3 + 0x1p-7, e2 = g1 * 5 + 0x1p-6, e3 = g1 * 7 + 0x1p-6;
    double en = e2 + e3 + g2 * (5 + e2 + 7 + e3) + 0x1p-5;
    double e = e0 + e1 + en + g3 * (1 + e0 + 3 + e1 + 12 + en);

    assert_true(fabs(bound[0] - (e + 0x1p-4)) < 1e-15);

    /* what is alone on its node is not rounded again */
    combine.arrived = (const bool[4]){ true, true, true, false };
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 0, value, bound));
    assert_true(value[0] == 9);
    e = e0 + e1 + e2 + g3 * (1 + e0 + 3 + e1 + 5 + e2);
    assert_true(fabs(bound[0] - (e + 0x1p-5)) < 1e-15);
}

static void combine_leaves_out_who_did_not_arrive(void **state)
{
    struct ep_ref_routing routing = example(true);
    bool arrived[2] = { true, false };
    struct ep_ref_combine combine = {
        .dtype = EP_FP32, .hidden = 3, .arrived = arrived, .expert = toy_expert
    };
    double value[3], bound[3];
    (void)state;

    assert_true(ep_ref_combine_token(&routing, &combine, 0, 0, value, bound));
    assert_true(value[0] == 0.5);
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 2, value, bound));
    assert_true(value[0] == 0.0);
    assert_true(bound[0] <= 0x1p-149);
}

static void combine_adds_the_bias_once(void **state)
{
    struct ep_ref_routing routing = example(true);
    uint16_t bias[9];
    struct ep_ref_combine combine = { .dtype = EP_BF16, .hidden = 3, .bias = bias, .expert = toy_expert };
    double value[3], bound[3];
    (void)state;

    for (uint32_t i = 0; i < 9; i++)
        bias[i] = (uint16_t)ep_ref_encode(EP_BF16, 100.0 + i);
    assert_true(ep_ref_combine_token(&routing, &combine, 0, 1, value, bound));
    assert_true(value[0] == 6.0 + 103.0);
    assert_true(bound[0] >= 0x1p-2 && bound[0] < 0.3); /* h(109) = 2^-2 and little else */
}

/* Sums made as a kernel makes them, with roundings where the header says, stay inside the bound. */
static void the_bound_holds_for_fp32_sums(void **state)
{
    enum { EXPERTS = 8, CHOICES = 8 };
    int64_t topk[CHOICES];
    float weights[CHOICES];
    struct ep_ref_rank ranks[4] = { { true, 1, topk, weights, false } };
    struct ep_ref_routing routing = { .ranks = 4, .experts = EXPERTS, .top_k = CHOICES, .rank = ranks };
    struct ep_ref_combine combine = { .dtype = EP_BF16, .hidden = 3, .expert = toy_expert };
    double value[3], bound[3];
    uint32_t random = 1;
    (void)state;

    for (uint32_t r = 1; r < 4; r++)
        ranks[r] = (struct ep_ref_rank){ .present = true };
    for (uint32_t trial = 0; trial < 2000; trial++) {
        float total = 0;

        for (uint32_t j = 0; j < CHOICES; j++) {
            random = random * 1664525u + 1013904223u;
            topk[j] = j;
            weights[j] = (float)(random >> 8) * 0x1p-24f - 0.4f;
        }
        for (uint32_t d = 0; d < 4; d++) {
            float partial = weights[2 * d] * (1.0f + 2.0f * (float)d);

            partial += weights[2 * d + 1] * (2.0f + 2.0f * (float)d);
            total += (float)ep_ref_round(EP_BF16, (double)partial);
        }
        assert_true(ep_ref_combine_token(&routing, &combine, 0, 0, value, bound));
        assert_true(fabs(ep_ref_round(EP_BF16, (double)total) - value[0]) <= bound[0]);
    }
}

static void gradients_come_from_the_rows_that_served(void **state)
{
    struct ep_ref_routing routing = example(true);
    struct ep_ref_gradient places[6];
    (void)state;

    assert_true(ep_ref_gradients(&routing, EP_LAYOUT_FLAT, 1, 0, places));
    assert_int_equal(places[0].rank, 0); /* t0, choice 0: row 0 of rank 0 */
    assert_int_equal(places[0].index, 0);
    assert_int_equal(places[1].rank, 1); /* t0, choice 1: row 0 of rank 1, choice 1 */
    assert_int_equal(places[1].index, 1);
    assert_int_equal(places[2].rank, 0);
    assert_int_equal(places[2].index, 2);
    assert_int_equal(places[3].index, 3);
    assert_int_equal(places[4].rank, -1);
    assert_int_equal(places[5].rank, 1); /* t2: row 1 of rank 1 */
    assert_int_equal(places[5].index, 3);

    assert_true(ep_ref_gradients(&routing, EP_LAYOUT_PACKED, 4, 0, places));
    assert_int_equal(places[2].index, 4); /* expert 1's block starts at 4 */
    assert_int_equal(places[3].index, 4);
    assert_int_equal(places[5].rank, 1);
    assert_int_equal(places[5].index, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_table_is_the_published_one),
        cmocka_unit_test(every_code_survives_a_round_trip),
        cmocka_unit_test(midpoints_of_e4m3_go_to_the_even_code),
        cmocka_unit_test(bf16_and_fp16_round_ties_to_even),
        cmocka_unit_test(fp32_matches_the_compiler),
        cmocka_unit_test(half_ulp_is_half_the_gap),
        cmocka_unit_test(fp8_radius_covers_division_and_reciprocal),
        cmocka_unit_test(ue8m0_scales_are_the_smallest_powers_that_hold_the_block),
        cmocka_unit_test(ue8m0_radius_is_that_of_the_nearest_code),
        cmocka_unit_test(scales_are_read_by_their_format),
        cmocka_unit_test(uneven_experts_go_to_the_first_ranks),
        cmocka_unit_test(replicas_are_taken_in_turn),
        cmocka_unit_test(expert_major_by_hand),
        cmocka_unit_test(packed_by_hand),
        cmocka_unit_test(rows_that_were_announced_and_not_sent),
        cmocka_unit_test(rank_major_and_flat_by_hand),
        cmocka_unit_test(an_absent_rank_sends_nothing_and_gets_nothing),
        cmocka_unit_test(combine_by_hand),
        cmocka_unit_test(a_nodes_parts_are_summed_up_there),
        cmocka_unit_test(combine_leaves_out_who_did_not_arrive),
        cmocka_unit_test(combine_adds_the_bias_once),
        cmocka_unit_test(the_bound_holds_for_fp32_sums),
        cmocka_unit_test(gradients_come_from_the_rows_that_served),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
