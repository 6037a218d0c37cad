/* cuda_words.h: CUDA's words, as far as kernels/cuda uses them, on CPUs: see fibers.h. */
#ifndef CUDA_WORDS_H
#define CUDA_WORDS_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" {
#include "ep_reference.h"
}
#include "fibers.h"

using std::max;
using std::min;

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local /* a block is a thread */

#define threadIdx fiber_thread
#define blockIdx fiber_block
#define gridDim fiber_blocks

/* ---- threads ------------------------------------------------------------------------------- */

inline void __syncthreads() { fibers_meet_block(); }
inline int __syncthreads_or(int v) { return fibers_any_of_block(v != 0); }
inline void __syncwarp() { fibers_meet_warp(); }

template <class T> inline uint64_t bits_of(T value)
{
    uint64_t bits = 0;

    static_assert(sizeof value <= sizeof bits, "a lane gives 8 bytes at most");
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> inline T from_bits(uint64_t bits)
{
    T value;

    memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t own_lane() { return fiber_thread.x % 32; }

/* Masks are of all lanes, wherever one is given. */
template <class T> inline T __shfl_sync(uint32_t, T value, uint32_t lane)
{
    return from_bits<T>(fibers_exchange(bits_of(value))[lane % 32]);
}
template <class T> inline T __shfl_up_sync(uint32_t, T value, uint32_t lanes)
{
    const uint32_t own = own_lane();

    return from_bits<T>(fibers_exchange(bits_of(value))[own < lanes ? own : own - lanes]);
}
template <class T> inline T __shfl_xor_sync(uint32_t, T value, uint32_t mask)
{
    return from_bits<T>(fibers_exchange(bits_of(value))[own_lane() ^ mask]);
}
template <class T, class Add> inline T over_lanes(T value, Add add)
{
    const uint64_t *given = fibers_exchange(bits_of(value));
    T sum = from_bits<T>(given[0]);

    for (uint32_t i = 1; i < 32; i++)
        sum = add(sum, from_bits<T>(given[i]));
    return sum;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v)
{
    return over_lanes(v, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t v)
{
    return over_lanes(v, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v)
{
    return over_lanes(v, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline uint32_t __ballot_sync(uint32_t, bool v) { return __reduce_or_sync(0, (uint32_t)v << own_lane()); }
inline int __all_sync(uint32_t, bool v) { return __ballot_sync(0, v) == 0xffffffffu; }
inline int __any_sync(uint32_t, bool v) { return __ballot_sync(0, v) != 0; }
inline uint32_t __match_any_sync(uint32_t, uint32_t v)
{
    const uint64_t *given = fibers_exchange(v);
    uint32_t mask = 0;

    for (uint32_t i = 0; i < 32; i++)
        mask |= (uint32_t)(given[i] == v) << i;
    return mask;
}

/* ---- words of memory ----------------------------------------------------------------------------- */

template <class T> inline T counted(T was)
{
    fibers_counted();
    return was;
}
template <class T, class U> inline T atomicAdd(T *p, U v)
{
    return counted(__atomic_fetch_add(p, (T)v, __ATOMIC_SEQ_CST));
}
template <class T, class U> inline T atomicOr(T *p, U v)
{
    return counted(__atomic_fetch_or(p, (T)v, __ATOMIC_SEQ_CST));
}
template <class T, class U> inline T atomicAnd(T *p, U v)
{
    return counted(__atomic_fetch_and(p, (T)v, __ATOMIC_SEQ_CST));
}
template <class T, class U, class V> inline T atomicCAS(T *p, U expected, V v)
{
    T was = (T)expected;

    return __atomic_compare_exchange_n(p, &was, (T)v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? counted(was) : was;
}
/* What is there becomes `next` of it. */
template <class T, class Next> inline T change(T *p, Next next)
{
    T was = __atomic_load_n(p, __ATOMIC_SEQ_CST);

    while (!__atomic_compare_exchange_n(p, &was, next(was), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
    return counted(was);
}
template <class T, class U> inline T atomicMax(T *p, U v)
{
    return change(p, [v](T was) { return max(was, (T)v); });
}
inline uint32_t atomicInc(uint32_t *p, uint32_t last)
{
    return change(p, [last](uint32_t was) { return was >= last ? 0 : was + 1; });
}
template <class T> inline T __ldcg(const T *p)
{
    T v;

    memcpy(&v, p, sizeof v);
    return v;
}

/* ---- numbers ------------------------------------------------------------------------------------- */

inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs((int)v); }
inline uint32_t float_word(float v) { return from_bits<uint32_t>(bits_of(v)); }
inline float word_float(uint32_t v) { return from_bits<float>(v); }
#define __float_as_uint float_word /* compilers have functions of these names */
#define __uint_as_float word_float

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
struct float2 {
    float x, y;
};
struct int4 {
    int32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return { x, y }; }

inline __half __ushort_as_half(uint16_t bits) { return { bits }; }
inline float __half2float(__half v) { return (float)ep_ref_decode(EP_FP16, &v); }
inline float bf16_value(__nv_bfloat16 v) { return word_float((uint32_t)v.bits << 16); }
inline __half half_of(float v) { return { (uint16_t)ep_ref_encode(EP_FP16, v) }; }
inline __nv_bfloat16 bf16_of(float v) { return { (uint16_t)ep_ref_encode(EP_BF16, v) }; }
inline __half2 __floats2half2_rn(float x, float y) { return { half_of(x), half_of(y) }; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return { bf16_of(x), bf16_of(y) }; }
inline __half2 __hmax2(__half2 a, __half2 b)
{
    return { half_of(fmaxf(__half2float(a.x), __half2float(b.x))), half_of(fmaxf(__half2float(a.y), __half2float(b.y))) };
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return { bf16_of(fmaxf(bf16_value(a.x), bf16_value(b.x))), bf16_of(fmaxf(bf16_value(a.y), bf16_value(b.y))) };
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return { bf16_of(bf16_value(a.x) * bf16_value(b.x)), bf16_of(bf16_value(a.y) * bf16_value(b.y)) };
}

enum { __NV_SATFINITE, __NV_E4M3 };
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 v, int, int)
{
    return (uint16_t)(ep_ref_encode(EP_FP8_E4M3, v.x) | ep_ref_encode(EP_FP8_E4M3, v.y) << 8);
}

#endif
