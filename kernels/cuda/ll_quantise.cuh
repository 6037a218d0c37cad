/*
 * ll_quantise.cuh: rows to fp8 on the way.
 *
 * A row travels in pieces of 16 bytes, which are 16 elements; a block that has one scale is those of 8
 * neighbouring threads.  All of this but the exchange between threads is host code too, for tests.
 */
#ifndef EP_LL_QUANTISE_CUH
#define EP_LL_QUANTISE_CUH

#include <stdint.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace ep {

enum class Cast { none, bf16, fp16, fp32 }; /* to fp8, from */

struct alignas(16) Vec {
    uint32_t w[4];
};

constexpr uint32_t kVecs = 4; /* 16 bytes of a row that a thread has under way */

/* Of these, what one piece is made from, and how many pieces that makes. */
template <Cast C> constexpr uint32_t kIn = C == Cast::none ? 1 : C == Cast::fp32 ? 4 : 2;
template <Cast C> constexpr uint32_t kPieces = kVecs / kIn<C>;

template <class To, class From> __host__ __device__ inline To as(From from)
{
    To to;

    static_assert(sizeof to == sizeof from, "as");
    memcpy(&to, &from, sizeof to);
    return to;
}

/* ---- largest magnitudes ------------------------------------------------------------------ */

/* Magnitudes of all pieces of a thread in one word: bf16 and fp16 two, fp32 one.  Their maxima leave NaN out. */
template <Cast C> __host__ __device__ inline uint32_t larger(uint32_t a, uint32_t b)
{
    if constexpr (C == Cast::bf16)
        return as<uint32_t>(__hmax2(as<__nv_bfloat162>(a), as<__nv_bfloat162>(b)));
    else if constexpr (C == Cast::fp16)
        return as<uint32_t>(__hmax2(as<__half2>(a), as<__half2>(b)));
    else
        return as<uint32_t>(fmaxf(as<float>(a), as<float>(b)));
}

/* Of one piece; bf16 and fp16: of its even elements and of its odd ones. */
template <Cast C> __host__ __device__ inline uint32_t largest_of_piece(const Vec *in)
{
    const uint32_t sign = C == Cast::fp32 ? 0x80000000u : 0x80008000u;
    uint32_t most = 0;

    for (uint32_t i = 0; i < 4 * kIn<C>; i++)
        most = larger<C>(most, in[i / 4].w[i % 4] & ~sign);
    return most;
}

template <Cast C> __host__ __device__ inline uint32_t largest(const Vec *in)
{
    const uint32_t a = largest_of_piece<C>(in);

    if constexpr (C == Cast::fp32) {
        return a;
    } else {
        const uint32_t b = largest_of_piece<C>(in + kIn<C>);

        return larger<C>((a & 0xffff) | b << 16, a >> 16 | (b & 0xffff0000u));
    }
}

/* What largest() says of piece i. */
template <Cast C> __host__ __device__ inline float largest_at(uint32_t most, uint32_t i)
{
    if constexpr (C == Cast::bf16)
        return as<float>(most >> 16 * i << 16);
    else if constexpr (C == Cast::fp16)
        return __half2float(as<__half>((uint16_t)(most >> 16 * i)));
    else
        return as<float>(most);
}

/* ---- scales ------------------------------------------------------------------------------- */

struct Scale {
    uint32_t stored; /* as it is in memory */
    float factor;    /* that elements are multiplied with */
    bool raised;     /* after they were multiplied with 2^64: the scale itself may have no inverse */
};

/* amax / 448, rounded to nearest, where that is a normal number: a quotient and what it lacks. */
__host__ __device__ inline float by_448(float amax)
{
    const float q = amax * (1.0f / 448.0f);

    return fmaf(fmaf(-448.0f, q, amax), 1.0f / 448.0f, q);
}

__host__ __device__ inline float inverse_of(float x)
{
#ifdef __CUDA_ARCH__
    return __frcp_rn(x);
#else
    return 1.0f / x;
#endif
}

__host__ __device__ inline Scale fp32_scale(float amax)
{
    const float least = 448 * 0x1p-126f, most = 0x1.fffffep127f;
    float scale = by_448(amax);

    if (!(amax >= least && amax <= most)) {
        scale = amax / 448.0f;
        scale = scale == 0 ? 1.0f : scale; /* zeros, or so little that nothing can be divided by it */
    }
    const bool raised = amax < least;

    return { as<uint32_t>(scale), inverse_of(raised ? scale * 0x1p64f : scale), raised };
}

/* The smallest power of two that is not below amax / 448 = amax / (1.75 * 2^8): a fraction above .75 takes the next
 * exponent.  Its inverse is exact, and at most 2^127. */
__host__ __device__ inline Scale ue8m0_scale(float amax)
{
    const uint32_t exponent = (as<uint32_t>(amax) + 0x1fffffu) >> 23;
    const uint32_t b = amax == 0 ? 127 : exponent > 8 ? exponent - 8 : 0;

    return { b, as<float>((254 - b) << 23), false };
}

/* ---- elements ------------------------------------------------------------------------------ */

template <Cast C> __host__ __device__ inline float element(const Vec *in, uint32_t i)
{
    if constexpr (C == Cast::fp32) {
        return as<float>(in[i / 4].w[i % 4]);
    } else {
        const uint32_t w = in[i / 8].w[i % 8 / 2];

        if constexpr (C == Cast::bf16)
            return as<float>(i % 2 ? w & 0xffff0000u : w << 16);
        else
            return __half2float(as<__half>((uint16_t)(w >> i % 2 * 16)));
    }
}

/* Times 2^64, which is exact: elements of blocks that are next to nothing.  fp16 has none such but zeros. */
template <Cast C> __host__ __device__ inline void raise(Vec *in)
{
    for (uint32_t i = 0; C != Cast::fp16 && i < 4 * kIn<C>; i++) {
        uint32_t *w = &in[i / 4].w[i % 4];

        if constexpr (C == Cast::bf16)
            *w = as<uint32_t>(__hmul2(as<__nv_bfloat162>(*w), as<__nv_bfloat162>(0x5f805f80u)));
        else
            *w = as<uint32_t>(as<float>(*w) * 0x1p64f);
    }
}

/* 16 elements to the 16 bytes of a piece. */
template <Cast C> __host__ __device__ inline Vec encode(Vec *in, const Scale &s)
{
    Vec piece;

    if (s.raised)
        raise<C>(in);
    for (uint32_t i = 0; i < 16; i += 4) {
        const auto two = [&](uint32_t j) {
            return (uint32_t)__nv_cvt_float2_to_fp8x2(
                make_float2(element<C>(in, j) * s.factor, element<C>(in, j + 1) * s.factor), __NV_SATFINITE,
                __NV_E4M3);
        };

        piece.w[i / 4] = two(i) | two(i + 2) << 16;
    }
    return piece;
}

} // namespace ep

#endif
