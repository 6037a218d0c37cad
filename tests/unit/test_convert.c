/* The host backend's formats: sums are rounded once, to nearest, ties to even. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ep_reference.h"
#include "host_private.h"

enum { N = 128 }; /* a whole block, so that vector code runs */

static float from_bits(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/* A sum a + b that lies halfway between two numbers of the format, by its place above 1. */
static void check_ties(ep_dtype dtype, int fraction_bits)
{
    uint16_t a[N], b[N], out[N];
    const void *rows[] = { a, b };
    const float weights[] = { 1, 1 };
    double half = 1.0 / (double)(2u << fraction_bits);

    for (int i = 0; i < N; i++) { /* 1 + i ulp, plus half an ulp */
        ep_ref_store(dtype, 1 + i * 2 * half, &a[i]);
        ep_ref_store(dtype, half, &b[i]);
    }
    ep_host_sum(dtype, out, rows, weights, 2, N);
    for (int i = 0; i < N; i++) {
        int even = i % 2 == 0 ? i : i + 1;

        assert_true(ep_ref_decode(dtype, &out[i]) == 1 + even * 2 * half);
    }
}

static void ties_of_bf16_go_to_even(void **state)
{
    (void)state;
    check_ties(EP_BF16, 7);
}

static void ties_of_fp16_go_to_even(void **state)
{
    (void)state;
    check_ties(EP_FP16, 10);
}

/* In fp32 the sum keeps what bf16 would lose on the way. */
static void sums_are_rounded_once(void **state)
{
    uint16_t big[N], small[N], out[N];
    const void *rows[] = { big, small, small, small, small };
    const float weights[] = { 1, 1, 1, 1, 1 };

    (void)state;
    for (int i = 0; i < N; i++) {
        ep_ref_store(EP_BF16, 256, &big[i]);
        ep_ref_store(EP_BF16, 0.5, &small[i]); /* a quarter of an ulp of 256 */
    }
    ep_host_sum(EP_BF16, out, rows, weights, 5, N);
    for (int i = 0; i < N; i++)
        assert_true(ep_ref_decode(EP_BF16, &out[i]) == 258);
}

/* Every finite magnitude of e4m3, and halfway points between neighbours, at scale 1. */
static void codes_of_fp8_are_the_nearest(void **state)
{
    float x[N];
    uint8_t codes[N];
    float scale;

    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = (float)ep_ref_decode(EP_FP8_E4M3, &(uint8_t){ (uint8_t)(i == 127 ? 126 : i) });
    for (int i = 1; i < 126; i += 2) /* odd places: halfway to the next code */
        x[i] = (x[i] + (float)ep_ref_decode(EP_FP8_E4M3, &(uint8_t){ (uint8_t)(i + 1) })) / 2;
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_FP32, codes, &scale);
    assert_true(scale == 1.0f);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], ep_ref_encode(EP_FP8_E4M3, x[i]));
}

static void a_block_of_zeros_has_scale_one(void **state)
{
    float x[N] = { 0 }, scale = 0;
    uint8_t codes[N], power = 0;

    (void)state;
    memset(codes, 1, sizeof codes);
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_FP32, codes, &scale);
    assert_true(scale == 1.0f);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], 0);
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_UE8M0, codes, &power);
    assert_int_equal(power, 127);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], 0);
}

/* amax / 448 is 0 in fp32; codes of zeros must not become 0 / 0. */
static void a_block_of_next_to_nothing_has_scale_one(void **state)
{
    float x[N] = { 0 }, scale = 0;
    uint8_t codes[N];

    (void)state;
    x[3] = 0x1p-149f;
    x[4] = -0x1.8p-142f;
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_FP32, codes, &scale);
    assert_true(scale == 1.0f);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], i == 4 ? 0x80 : 0);
    x[5] = 0x1p-140f;
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_FP32, codes, &scale);
    assert_true(scale == 0x1p-149f);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[5], 0x7e);
}

/* One row of N with this largest magnitude: the scale, and every code, worked out in double precision. */
static void check_powers(uint32_t amax_bits)
{
    float x[N], amax = from_bits(amax_bits);
    int exponent = -127;
    uint8_t codes[N], scale;

    while (ldexp(448, exponent) < (double)amax)
        exponent++;
    for (int i = 0; i < N; i++)
        x[i] = (i % 2 ? -amax : amax) * (1.0f - (float)i / N) / (float)(1u << i % 20);
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_UE8M0, codes, &scale);
    if (scale != exponent + 127)
        fail_msg("amax %a: scale 2^%d, must be 2^%d", (double)amax, scale - 127, exponent);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], ep_ref_encode(EP_FP8_E4M3, ldexp((double)x[i], -exponent)));
}

/* Around each exponent and where .75 ends, subnormal numbers and the largest one included. */
static void ue8m0_scales_are_powers_of_two(void **state)
{
    (void)state;
    for (uint32_t exponent = 0; exponent < 255; exponent++)
        for (uint32_t near = 0; near < 3; near++) {
            check_powers(exponent << 23 | (near + 1)); /* 0 has a test of its own */
            check_powers(exponent << 23 | (0x5fffff + near));
            check_powers(exponent << 23 | (0x7ffffd + near));
        }
}

/* Of bf16 and fp16, and with a block that is a part of one. */
static void ue8m0_scales_of_short_rows(void **state)
{
    enum { H = N + 16 };
    uint16_t row[H];
    uint8_t codes[H], scales[3] = { 0, 0, 0xee };

    (void)state;
    for (int of = 0; of < 2; of++) {
        const ep_dtype dtype = of ? EP_FP16 : EP_BF16;

        for (int i = 0; i < H; i++)
            ep_ref_store(dtype, i < N ? i % 7 - 3 : (i % 5 - 2) * 0x1p-12, &row[i]);
        ep_host_quantise(dtype, row, H, EP_SCALE_UE8M0, codes, scales);
        assert_int_equal(scales[0], 127 - 7);  /* of 3 */
        assert_int_equal(scales[1], 127 - 19); /* of 2^-11 */
        assert_int_equal(scales[2], 0xee);
        for (int i = 0; i < H; i++)
            assert_true(ep_ref_decode(EP_FP8_E4M3, &codes[i]) * ep_ref_scale(EP_SCALE_UE8M0, scales, (uint32_t)i / N)
                        == ep_ref_decode(dtype, &row[i])); /* so few digits lose nothing */
    }
}

/* As ep_types.h says: each of these blocks has a NaN, an infinity or both. */
static void what_is_not_finite_in_ue8m0(void **state)
{
    float x[N];
    uint8_t codes[N], scale;

    (void)state;
    for (int i = 0; i < N; i++)
        x[i] = i == 5 ? from_bits(0x7fc00000u) : (float)(i % 3);
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_UE8M0, codes, &scale);
    assert_int_equal(scale, 127 - 7);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], i == 5 ? 0x7f : ep_ref_encode(EP_FP8_E4M3, i % 3 * 128.0));

    x[7] = from_bits(0xff800000u);
    x[8] = 0x1p126f;
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_UE8M0, codes, &scale);
    assert_int_equal(scale, 127 + 120);
    assert_int_equal(codes[5], 0x7f);
    assert_int_equal(codes[7], 0xfe);
    assert_int_equal(codes[8], ep_ref_encode(EP_FP8_E4M3, 64));
    assert_int_equal(codes[9], 0);
    assert_true((float)(ep_ref_decode(EP_FP8_E4M3, &codes[7]) * ep_ref_scale(EP_SCALE_UE8M0, &scale, 0)) < -3e38f);

    for (int i = 0; i < N; i++)
        x[i] = from_bits(0x7fc00000u);
    ep_host_quantise(EP_FP32, x, N, EP_SCALE_UE8M0, codes, &scale);
    assert_int_equal(scale, 127);
    assert_int_equal(codes[0], 0x7f);
}

static void infinities_and_nan_survive(void **state)
{
    float in[N], out[N];
    const void *rows[] = { in };
    const float weights[] = { 1 };

    (void)state;
    for (int i = 0; i < N; i++)
        in[i] = from_bits(i % 2 ? 0x7f800000u : 0x7fc00000u);
    ep_host_sum(EP_FP32, out, rows, weights, 1, N);
    for (int i = 0; i < N; i++)
        assert_true(i % 2 ? out[i] > 3e38f : out[i] != out[i]);
}

/* ---- copies ---------------------------------------------------------------------- */

static void check_copy(size_t bytes)
{
    uint8_t from[1024], to[1024];

    for (size_t i = 0; i < sizeof from; i++) {
        from[i] = (uint8_t)(i * 7 + 1);
        to[i] = 0xee;
    }
    ep_host_copy_row(to + 16, from + 32, bytes);
    assert_memory_equal(to + 16, from + 32, bytes);
    for (size_t i = 0; i < sizeof to; i++)
        if (i < 16 || i >= 16 + bytes)
            assert_int_equal(to[i], 0xee);
}

static void rows_of_any_size_are_copied_whole_and_nothing_else(void **state)
{
    (void)state;
    for (size_t bytes = 0; bytes <= 900; bytes++)
        check_copy(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_of_bf16_go_to_even),
        cmocka_unit_test(ties_of_fp16_go_to_even),
        cmocka_unit_test(sums_are_rounded_once),
        cmocka_unit_test(codes_of_fp8_are_the_nearest),
        cmocka_unit_test(a_block_of_zeros_has_scale_one),
        cmocka_unit_test(a_block_of_next_to_nothing_has_scale_one),
        cmocka_unit_test(ue8m0_scales_are_powers_of_two),
        cmocka_unit_test(ue8m0_scales_of_short_rows),
        cmocka_unit_test(what_is_not_finite_in_ue8m0),
        cmocka_unit_test(infinities_and_nan_survive),
        cmocka_unit_test(rows_of_any_size_are_copied_whole_and_nothing_else),
    };

    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
