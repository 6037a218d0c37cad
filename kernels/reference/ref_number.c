/* Formats, by their definition: sign, exponent field, fraction field. */
#include "ep_reference.h"

#include <float.h>
#include <math.h>
#include <string.h>

struct format {
    int exponent_bits, fraction_bits;
    int bias;
    double largest;
    bool infinite; /* an exponent field of ones is infinity or NaN; else only code 0x7f is NaN */
};

static const struct format bf16 = { 8, 7, 127, 0x1.fep127, true };
static const struct format fp16 = { 5, 10, 15, 65504.0, true };
static const struct format fp32 = { 8, 23, 127, FLT_MAX, true };
static const struct format e4m3 = { 4, 3, 7, 448.0, false };

static const struct format *format_of(ep_dtype dtype)
{
    switch (dtype) {
    case EP_BF16: return &bf16;
    case EP_FP16: return &fp16;
    case EP_FP32: return &fp32;
    case EP_FP8_E4M3: return &e4m3;
    }
    return &fp32;
}

uint32_t ep_ref_bytes(ep_dtype dtype)
{
    switch (dtype) {
    case EP_BF16: return 2;
    case EP_FP16: return 2;
    case EP_FP32: return 4;
    case EP_FP8_E4M3: return 1;
    }
    return 0;
}

/* Numbers of bytes that the compiler knows, else each is a call.  Little-endian hosts only. */
static uint32_t load_code(ep_dtype dtype, const void *element)
{
    uint8_t byte;
    uint16_t half;
    uint32_t word = 0;

    switch (ep_ref_bytes(dtype)) {
    case 1: memcpy(&byte, element, sizeof byte); return byte;
    case 2: memcpy(&half, element, sizeof half); return half;
    case 4: memcpy(&word, element, sizeof word); return word;
    }
    return word;
}

static void store_code(ep_dtype dtype, uint32_t code, void *element)
{
    const uint8_t byte = (uint8_t)code;
    const uint16_t half = (uint16_t)code;

    switch (ep_ref_bytes(dtype)) {
    case 1: memcpy(element, &byte, sizeof byte); return;
    case 2: memcpy(element, &half, sizeof half); return;
    case 4: memcpy(element, &code, sizeof code); return;
    }
}

/* ---- powers of two, as a double has them ------------------------------------------- */

enum { DOUBLE_FRACTION_BITS = 52, DOUBLE_BIAS = 1023, DOUBLE_EXPONENTS = 0x7ff };

/* 2^n, -1022 <= n <= 1023.  Products with it are those of ldexp(), which would be most of what a number takes. */
static double power(int n)
{
    const uint64_t code = (uint64_t)(n + DOUBLE_BIAS) << DOUBLE_FRACTION_BITS;
    double value;

    memcpy(&value, &code, sizeof value);
    return value;
}

/* n of 2^n <= magnitude < 2^(n + 1); below the normal doubles any n that is less than theirs. */
static int exponent_of(double magnitude)
{
    uint64_t code;

    memcpy(&code, &magnitude, sizeof code);
    return (int)(code >> DOUBLE_FRACTION_BITS & DOUBLE_EXPONENTS) - DOUBLE_BIAS;
}

/* ---- codes ------------------------------------------------------------------------- */

static bool is_special(const struct format *f, uint32_t exponent, uint32_t fraction)
{
    bool ones = exponent == (1u << f->exponent_bits) - 1;

    return f->infinite ? ones : ones && fraction == (1u << f->fraction_bits) - 1;
}

double ep_ref_decode(ep_dtype dtype, const void *element)
{
    const struct format *f = format_of(dtype);
    uint32_t code = load_code(dtype, element);
    uint32_t fraction = code & ((1u << f->fraction_bits) - 1);
    uint32_t exponent = code >> f->fraction_bits & ((1u << f->exponent_bits) - 1);
    double sign = code >> (f->fraction_bits + f->exponent_bits) & 1 ? -1.0 : 1.0;

    if (is_special(f, exponent, fraction))
        return f->infinite && fraction == 0 ? sign * INFINITY : (double)NAN;
    if (exponent == 0)
        return sign * fraction * power(1 - f->bias - f->fraction_bits);
    return sign * (fraction | 1u << f->fraction_bits) * power((int)exponent - f->bias - f->fraction_bits);
}

/* The distance of neighbouring numbers at this magnitude, as a power of two. */
static int spacing_exponent(const struct format *f, double magnitude)
{
    int exponent = exponent_of(magnitude), lowest = 1 - f->bias;

    return (exponent < lowest ? lowest : exponent) - f->fraction_bits;
}

double ep_ref_round(ep_dtype dtype, double value)
{
    const struct format *f = format_of(dtype);

    if (isnan(value) || value == 0)
        return value;
    if (isinf(value))
        return f->infinite ? value : copysign(f->largest, value);

    int spacing = spacing_exponent(f, fabs(value));
    double rounded = rint(value * power(-spacing)) * power(spacing); /* rint: nearest, ties to even */

    if (fabs(rounded) > f->largest)
        return copysign(f->infinite ? (double)INFINITY : f->largest, value);
    return rounded;
}

static uint32_t magnitude_code(const struct format *f, double magnitude)
{
    uint32_t ones = (1u << f->exponent_bits) - 1;

    if (isnan(magnitude))
        return ones << f->fraction_bits | ((1u << f->fraction_bits) - 1);
    if (isinf(magnitude))
        return ones << f->fraction_bits;

    int spacing = spacing_exponent(f, magnitude);
    uint32_t steps = (uint32_t)(magnitude * power(-spacing)); /* whole by now */
    uint32_t hidden = 1u << f->fraction_bits;

    if (steps < hidden)
        return steps; /* subnormal or zero */
    return (uint32_t)(spacing + f->fraction_bits + f->bias) << f->fraction_bits | (steps - hidden);
}

uint32_t ep_ref_encode(ep_dtype dtype, double value)
{
    const struct format *f = format_of(dtype);
    uint32_t sign = signbit(value) ? 1u : 0u;

    return sign << (f->exponent_bits + f->fraction_bits) |
           magnitude_code(f, fabs(ep_ref_round(dtype, value)));
}

void ep_ref_store(ep_dtype dtype, double value, void *element)
{
    store_code(dtype, ep_ref_encode(dtype, value), element);
}

double ep_ref_half_ulp(ep_dtype dtype, double magnitude)
{
    return power(spacing_exponent(format_of(dtype), fabs(magnitude)) - 1);
}

static const double fp32_u = 0x1p-24;

double ep_ref_gamma(uint32_t n)
{
    return n * fp32_u / (1 - n * fp32_u);
}

/* ---- scales of fp8 ---------------------------------------------------------------- */

uint32_t ep_ref_scale_bytes(ep_scale_format format)
{
    return format == EP_SCALE_UE8M0 ? 1 : 4;
}

double ep_ref_scale(ep_scale_format format, const void *scales, uint32_t i)
{
    uint8_t code;
    float scale;

    if (format == EP_SCALE_UE8M0) {
        memcpy(&code, (const char *)scales + i, sizeof code);
        return code == 255 ? (double)NAN : power(code - 127);
    }
    memcpy(&scale, (const char *)scales + (size_t)i * sizeof scale, sizeof scale);
    return (double)scale;
}

static double ue8m0_scale(double amax)
{
    int exponent = -127;

    if (amax == 0)
        return 1;
    while (exponent < 127 && 448 * power(exponent) < amax)
        exponent++;
    return power(exponent);
}

double ep_ref_fp8_radius(ep_scale_format format, double x, double amax)
{
    if (amax == 0)
        return 0;
    if (format == EP_SCALE_UE8M0) {
        double scale = ue8m0_scale(amax);

        return scale * ep_ref_half_ulp(EP_FP8_E4M3, x / scale);
    }

    double z = 448 * fabs(x) / amax;

    return amax / 448 * (1 + fp32_u) * (ep_ref_half_ulp(EP_FP8_E4M3, z * (1 + 4 * fp32_u)) + 4 * fp32_u * z) +
           fp32_u * fabs(x);
}

bool ep_ref_fp8_scale_ok(ep_scale_format format, double amax, double scale)
{
    if (format == EP_SCALE_UE8M0)
        return scale == ue8m0_scale(amax);
    if (amax == 0)
        return isfinite(scale) != 0;

    double expected = ep_ref_round(EP_FP32, amax / 448);

    return fabs(scale - expected) <= 2 * ep_ref_half_ulp(EP_FP32, expected);
}
