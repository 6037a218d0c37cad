/* The arithmetic of kernels/cuda/ll_quantise.cuh, as host code, against the reference and IEEE's own operations. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "ep_reference.h"
#include "host_private.h"
#include "quantise_host.h"

#ifndef EP_WITH_CUDA
int main(void)
{
    printf("no CUDA compiler: kernels/cuda is not built\n");
    return 77;
}
#else

enum { N = EP_FP8_BLOCK, ODD = 5 * N + 48, SKIPPED_NAN = 0x7f };

static float from_bits(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static void divide(uint32_t first, uint32_t end, uint32_t step)
{
    for (uint32_t bits = first; bits < end; bits += step) {
        const float amax = from_bits(bits);

        if (to_bits(quantise_host_by_448(amax)) != to_bits(amax / 448.0f))
            fail_msg("%a / 448 is %a, not %a", (double)amax, (double)(amax / 448.0f),
                     (double)quantise_host_by_448(amax));
    }
}

/* Every fraction, and everything that it is used for in steps. */
static void dividing_by_448_rounds_as_division_does(void **state)
{
    const uint32_t least = to_bits(448 * 0x1p-126f);

    (void)state;
    divide(127u << 23, 128u << 23, 1);
    divide(least, 0x7f800000u, 1009);
    divide(least, least + 5000, 1);
    divide(0x7f800000u - 5000, 0x7f800000u, 1);
}

/* ---- rows ------------------------------------------------------------------------ */

static float element(ep_dtype dtype, const void *row, uint32_t h)
{
    return (float)ep_ref_decode(dtype, (const char *)row + (size_t)h * ep_ref_bytes(dtype));
}

static float largest(ep_dtype dtype, const void *row, uint32_t first, uint32_t end)
{
    float amax = 0;

    for (uint32_t h = first; h < end; h++)
        amax = fmaxf(amax, fabsf(element(dtype, row, h)));
    return amax;
}

/* A multiplication with the rounded reciprocal; blocks whose scale has none are next to nothing. */
static void check_code(uint8_t code, float x, float scale)
{
    const uint8_t want = (uint8_t)ep_ref_encode(EP_FP8_E4M3, (double)(x * (1.0f / scale)));
    const double there = ep_ref_decode(EP_FP8_E4M3, &code);
    const double z = fmax(-448, fmin(448, (double)x / (double)scale)); /* such a scale is a coarse one */

    if (isinf(1.0f / scale) && !isnan(x))
        assert_true(fabs(there - z) <= ep_ref_half_ulp(EP_FP8_E4M3, z * (1 + 0x1p-21)) + fabs(z) * 0x1p-21);
    else if (isnan(x * (1.0f / scale)))
        assert_int_equal(code & 0x7f, SKIPPED_NAN);
    else
        assert_int_equal(code, want);
}

static void check_fp32(ep_dtype dtype, const void *row, uint32_t hidden)
{
    uint8_t codes[ODD];
    float scales[ODD / N + 1];

    quantise_host(dtype, row, hidden, EP_SCALE_FP32, codes, scales);
    for (uint32_t first = 0; first < hidden; first += N) {
        const uint32_t end = first + N < hidden ? first + N : hidden;
        const float s = largest(dtype, row, first, end) / 448.0f, want = s == 0 ? 1.0f : s;

        assert_int_equal(to_bits(scales[first / N]), to_bits(want));
        for (uint32_t h = first; h < end; h++)
            check_code(codes[h], element(dtype, row, h), want);
    }
}

/* In UE8M0 GPUs and hosts give the same bits, but for the sign of NaN. */
static void check_ue8m0(ep_dtype dtype, const void *row, uint32_t hidden)
{
    uint8_t codes[ODD], want[ODD], scales[ODD / N + 1] = { 0 }, want_scales[ODD / N + 1] = { 0 };

    quantise_host(dtype, row, hidden, EP_SCALE_UE8M0, codes, scales);
    ep_host_quantise(dtype, row, hidden, EP_SCALE_UE8M0, want, want_scales);
    assert_memory_equal(scales, want_scales, sizeof scales);
    for (uint32_t h = 0; h < hidden; h++)
        if ((want[h] & 0x7f) == SKIPPED_NAN)
            assert_int_equal(codes[h] & 0x7f, SKIPPED_NAN);
        else
            assert_int_equal(codes[h], want[h]);
}

/* Rows of ODD elements; codes from all over the format are the largest of a block. */
static void every_code(ep_dtype dtype)
{
    uint16_t row[ODD];

    for (uint32_t first = 0; first < 1u << 16; first += 8 * N / 13) {
        for (uint32_t h = 0; h < ODD; h++) {
            const uint32_t top = first + h / N;

            /* as large, smaller by small steps, and smaller by factors of two, of both signs */
            row[h] = (uint16_t)(h % N == 7 ? top : (top & 0x7fff) > h ? (top - h % N * (h % 5)) ^ (h % 3 << 15) : 0);
            if (h % N > 64)
                ep_ref_store(dtype, ep_ref_decode(dtype, &row[h]) * ldexp(1, -(int)(h % 20)), &row[h]);
        }
        check_fp32(dtype, row, ODD);
        check_ue8m0(dtype, row, ODD);
    }
}

static void bf16_rows(void **state)
{
    (void)state;
    every_code(EP_BF16);
}

static void fp16_rows(void **state)
{
    (void)state;
    every_code(EP_FP16);
}

static void fp32_rows(void **state)
{
    float row[ODD];

    (void)state;
    for (uint32_t top = 1; top < 0x7f800000u; top += 0x1fffff / 8 + top % 97)
        for (uint32_t short_by = 0; short_by <= 112; short_by += 112) {
            for (uint32_t h = 0; h < ODD; h++)
                row[h] = from_bits(top - (top > 64 ? h * 37 % 61 : 0)) * ((float)(h % 9) - 4.0f) / 4
                       / (float)(1u << h % 16);
            check_fp32(EP_FP32, row, ODD - short_by);
            check_ue8m0(EP_FP32, row, ODD - short_by);
        }
}

static void zeros_nan_and_infinities(void **state)
{
    static const ep_dtype dtypes[] = { EP_BF16, EP_FP16, EP_FP32 };
    static const double odd[][3] = { { 0, 0, 0 },   { 1, (double)NAN, -2 },          { 3, (double)INFINITY, -5 },
                                     { 0, -0.0, 0 }, { (double)NAN, (double)INFINITY, 1 }, { 0, (double)NAN, 0 },
                                     { 0, 0x1p-149, -0x1p-140 } };
    uint32_t row[ODD];

    (void)state;
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
            for (uint32_t h = 0; h < ODD; h++)
                ep_ref_store(dtypes[d], h / N == 2 ? h * 0.01 : odd[i][h % 3],
                             (char *)row + (size_t)h * ep_ref_bytes(dtypes[d]));
            check_fp32(dtypes[d], row, ODD);
            check_ue8m0(dtypes[d], row, ODD);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dividing_by_448_rounds_as_division_does),
        cmocka_unit_test(bf16_rows),
        cmocka_unit_test(fp16_rows),
        cmocka_unit_test(fp32_rows),
        cmocka_unit_test(zeros_nan_and_infinities),
    };

    return cmocka_run_group_tests_name("ll_quantise", tests, NULL, NULL);
}
#endif
