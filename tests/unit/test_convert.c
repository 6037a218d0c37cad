/* The host backend's formats: sums are rounded once, to nearest, ties to even. */
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
    ep_host_quantise(EP_FP32, x, N, codes, &scale);
    assert_true(scale == 1.0f);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], ep_ref_encode(EP_FP8_E4M3, x[i]));
}

static void a_block_of_zeros_has_scale_one(void **state)
{
    float x[N] = { 0 }, scale = 0;
    uint8_t codes[N];

    (void)state;
    memset(codes, 1, sizeof codes);
    ep_host_quantise(EP_FP32, x, N, codes, &scale);
    assert_true(scale == 1.0f);
    for (int i = 0; i < N; i++)
        assert_int_equal(codes[i], 0);
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
        cmocka_unit_test(infinities_and_nan_survive),
        cmocka_unit_test(rows_of_any_size_are_copied_whole_and_nothing_else),
    };

    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
