/*
 * Formats of elements.  All loops are plain arithmetic on bits, so that every instruction set gives
 * the same results: -ffp-contract=off, no reassociation.
 */
#include "host_private.h"

#include <string.h>

/* One body, compiled for two instruction sets and chosen at load time (avx512f alone has no 16-bit
 * lanes).  Resolvers run before a sanitizer's run-time is up, so such builds take the plain one. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define EP_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EP_SANITIZED 1
#endif
#if defined(__has_attribute)
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(EP_SANITIZED) && __has_attribute(target_clones)
#define EP_CLONES __attribute__((target_clones("default", "avx2")))
#endif
#endif
#ifndef EP_CLONES
#define EP_CLONES
#endif
#define EP_INLINE static inline __attribute__((always_inline))

/* Elements that are summed at a time: 1 KiB of fp32 stays in registers and L1. */
#define CHUNK 256u

#define FP8_MAX 448.0f

EP_INLINE uint32_t bits_of(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof u);
    return u;
}

EP_INLINE float float_of(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof f);
    return f;
}

/* yes ? a : b without a branch: compilers do not vectorise a branch around floating point. */
EP_INLINE uint32_t pick(bool yes, uint32_t a, uint32_t b)
{
    uint32_t mask = 0u - (uint32_t)yes;

    return (a & mask) | (b & ~mask);
}

/* ---- single elements ----------------------------------------------------------- */

EP_INLINE float bf16_decode(uint16_t code) { return float_of((uint32_t)code << 16); }

EP_INLINE uint16_t bf16_encode(float f)
{
    uint32_t u = bits_of(f);
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    uint32_t quiet = u >> 16 | 0x40u; /* rounding could turn a NaN into an infinity */

    return (uint16_t)pick((u & 0x7fffffffu) > 0x7f800000u, quiet, rounded);
}

EP_INLINE float fp16_decode(uint16_t code)
{
    uint32_t magnitude = (uint32_t)(code & 0x7fffu) << 13;
    uint32_t exponent = magnitude & 0x0f800000u;
    uint32_t normal = magnitude + (112u << 23);
    uint32_t special = magnitude + (224u << 23);
    /* 2^-14 + fraction - 2^-14: exact */
    uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    uint32_t u = pick(exponent == 0, subnormal, pick(exponent == 0x0f800000u, special, normal));

    return float_of(u | (uint32_t)(code & 0x8000u) << 16);
}

EP_INLINE uint16_t fp16_encode(float f)
{
    uint32_t u = bits_of(f) & 0x7fffffffu;
    uint32_t normal = (u - (112u << 23) + 0xfffu + (u >> 13 & 1u)) >> 13;
    /* the addition rounds to multiples of 2^-24, to nearest even */
    uint32_t subnormal = bits_of(float_of(u) + 0.5f) - bits_of(0.5f);
    uint32_t large = pick(u > 0x7f800000u, 0x7e00u, 0x7c00u);
    uint32_t code = pick(u >= 0x47800000u, large, pick(u < 0x38800000u, subnormal, normal));

    return (uint16_t)(code | (bits_of(f) >> 16 & 0x8000u));
}

EP_INLINE float fp32_decode(float code) { return code; }
EP_INLINE float fp32_encode(float f) { return f; }

EP_INLINE uint8_t e4m3_encode(float f)
{
    uint32_t full = bits_of(f) & 0x7fffffffu;
    uint32_t u = pick(full > bits_of(FP8_MAX), bits_of(FP8_MAX), full);
    uint32_t normal = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - (120u << 3);
    /* the addition rounds to multiples of 2^-9, to nearest even */
    uint32_t subnormal = bits_of(float_of(u) + 16384.0f) - bits_of(16384.0f);
    uint32_t code = pick(full > 0x7f800000u, 0x7fu, pick(u < 0x3c800000u, subnormal, normal));

    return (uint8_t)(code | (bits_of(f) >> 24 & 0x80u));
}

/* ---- sums ------------------------------------------------------------------------ */

/*
 * With a constant `n` the compiler vectorises each loop at any level of optimisation; the first
 * term is assigned, so that a lone -0 stays what it is.
 */
#define DEFINE_SUM(format, type)                                                                  \
    EP_INLINE void first_##format(float *restrict sum, const type *restrict row, float weight,    \
                                  uint32_t n)                                                     \
    {                                                                                             \
        for (uint32_t i = 0; i < n; i++)                                                          \
            sum[i] = weight * format##_decode(row[i]);                                            \
    }                                                                                             \
                                                                                                  \
    EP_INLINE void add_##format(float *restrict sum, const type *restrict row, float weight,      \
                                uint32_t n)                                                       \
    {                                                                                             \
        for (uint32_t i = 0; i < n; i++)                                                          \
            sum[i] += weight * format##_decode(row[i]);                                           \
    }                                                                                             \
                                                                                                  \
    EP_INLINE void round_##format(type *restrict dst, const float *restrict sum, uint32_t n)      \
    {                                                                                             \
        for (uint32_t i = 0; i < n; i++)                                                          \
            dst[i] = format##_encode(sum[i]);                                                     \
    }                                                                                             \
                                                                                                  \
    EP_INLINE void sum_chunk_##format(type *dst, const void *const *rows, const float *weights,   \
                                      uint32_t terms, uint32_t first, uint32_t n)                 \
    {                                                                                             \
        float sum[CHUNK];                                                                         \
                                                                                                  \
        first_##format(sum, (const type *)rows[0] + first, weights[0], n);                        \
        for (uint32_t t = 1; t < terms; t++) {                                                    \
            add_##format(sum, (const type *)rows[t] + first, weights[t], n);                      \
            __asm__ volatile(""); /* gcc's unroll-and-jam would make it three times as slow */    \
        }                                                                                         \
        round_##format(dst + first, sum, n);                                                      \
    }                                                                                             \
                                                                                                  \
    EP_CLONES static void sum_##format(type *dst, const void *const *rows, const float *weights,  \
                                       uint32_t terms, uint32_t hidden)                           \
    {                                                                                             \
        uint32_t at = 0;                                                                          \
                                                                                                  \
        for (; at + CHUNK <= hidden; at += CHUNK)                                                 \
            sum_chunk_##format(dst, rows, weights, terms, at, CHUNK);                             \
        if (at < hidden)                                                                          \
            sum_chunk_##format(dst, rows, weights, terms, at, hidden - at);                       \
    }

DEFINE_SUM(bf16, uint16_t)
DEFINE_SUM(fp16, uint16_t)
DEFINE_SUM(fp32, float)

void ep_host_sum(ep_dtype dtype, void *dst, const void *const *rows, const float *weights, uint32_t n,
                 uint32_t hidden)
{
    if (n == 0) {
        memset(dst, 0, (size_t)hidden * ep_dtype_bytes(dtype));
        return;
    }
    if (n == 1 && bits_of(weights[0]) == bits_of(1.0f)) {
        ep_host_copy_row(dst, rows[0], (size_t)hidden * ep_dtype_bytes(dtype));
        return;
    }
    switch (dtype) {
    case EP_BF16: sum_bf16(dst, rows, weights, n, hidden); break;
    case EP_FP16: sum_fp16(dst, rows, weights, n, hidden); break;
    case EP_FP32: sum_fp32(dst, rows, weights, n, hidden); break;
    case EP_FP8_E4M3: break; /* never a combine's format */
    }
}

/* ---- fp8 -------------------------------------------------------------------------- */

/* The bits of it: magnitudes compare like their bits, and integers vectorise. */
EP_INLINE uint32_t block_amax(const float *x, uint32_t n)
{
    uint32_t amax = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;

        u = pick(u > 0x7f800000u, 0, u); /* NaN */
        amax = u > amax ? u : amax;
    }
    return amax;
}

EP_INLINE void encode_fp32(const float *x, uint32_t n, uint8_t *codes, float *scale)
{
    float s = float_of(block_amax(x, n)) / FP8_MAX;

    s = s == 0 ? 1.0f : s; /* zeros, or so little that nothing can be divided by it */
    *scale = s;
    for (uint32_t i = 0; i < n; i++)
        codes[i] = e4m3_encode(x[i] / s);
}

/* 448 is 1.75 * 2^8: a fraction above .75 takes the next exponent.  Powers of two scale exactly, and 2^127, the
 * inverse of the smallest scale, is a number like any other. */
EP_INLINE void encode_ue8m0(const float *x, uint32_t n, uint8_t *codes, uint8_t *scale)
{
    uint32_t amax = block_amax(x, n), exponent = (amax + 0x1fffffu) >> 23;
    uint32_t b = amax == 0 ? 127 : exponent > 8 ? exponent - 8 : 0;
    float inverse = float_of((254 - b) << 23);

    *scale = (uint8_t)b;
    for (uint32_t i = 0; i < n; i++)
        codes[i] = e4m3_encode(x[i] * inverse);
}

/* Block `at / EP_FP8_BLOCK` of a row. */
EP_INLINE void quantise_block(const float *x, uint32_t at, uint32_t n, ep_scale_format format, uint8_t *codes,
                              void *scales)
{
    if (format == EP_SCALE_UE8M0)
        encode_ue8m0(x, n, codes + at, (uint8_t *)scales + at / EP_FP8_BLOCK);
    else
        encode_fp32(x, n, codes + at, (float *)scales + at / EP_FP8_BLOCK);
}

#define DEFINE_QUANTISE(format, type)                                                             \
    EP_CLONES static void quantise_##format(const type *row, uint32_t hidden,                     \
                                            ep_scale_format scale_format, uint8_t *codes,         \
                                            void *scales)                                         \
    {                                                                                             \
        float x[EP_FP8_BLOCK];                                                                    \
        uint32_t at = 0;                                                                          \
                                                                                                  \
        for (; at + EP_FP8_BLOCK <= hidden; at += EP_FP8_BLOCK) {                                 \
            for (uint32_t i = 0; i < EP_FP8_BLOCK; i++)                                           \
                x[i] = format##_decode(row[at + i]);                                              \
            quantise_block(x, at, EP_FP8_BLOCK, scale_format, codes, scales);                     \
        }                                                                                         \
        if (at < hidden) {                                                                        \
            for (uint32_t i = 0; i < hidden - at; i++)                                            \
                x[i] = format##_decode(row[at + i]);                                              \
            quantise_block(x, at, hidden - at, scale_format, codes, scales);                      \
        }                                                                                         \
    }

DEFINE_QUANTISE(bf16, uint16_t)
DEFINE_QUANTISE(fp16, uint16_t)
DEFINE_QUANTISE(fp32, float)

void ep_host_quantise(ep_dtype dtype, const void *row, uint32_t hidden, ep_scale_format format, uint8_t *codes,
                      void *scales)
{
    switch (dtype) {
    case EP_BF16: quantise_bf16(row, hidden, format, codes, scales); break;
    case EP_FP16: quantise_fp16(row, hidden, format, codes, scales); break;
    case EP_FP32: quantise_fp32(row, hidden, format, codes, scales); break;
    case EP_FP8_E4M3: break; /* is already */
    }
}
