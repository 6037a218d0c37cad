/* ht_sum.cuh: sums of rows, a warp's work, and what partials bring beside them. */
#ifndef EP_HT_SUM_CUH
#define EP_HT_SUM_CUH

#include "ht_bulk.cuh"
#include "ht_device.cuh"

namespace ep {
namespace ht {
namespace combine {

using ep::combine::Format;

constexpr uint32_t kNowhere = 0xffffffffu;

/* ---- sums ------------------------------------------------------------------------------------ */

/* The terms of a sum, a warp's: lanes of the mask have one each, the lowest lane's comes first. */
struct Terms {
    uint32_t mask;
    const uint8_t *row;
    float weight;
};

constexpr uint32_t kLaneVecs = kPieceBytes / 512; /* 16 bytes of a piece that are a lane's */

/* The terms piece by piece, and of each piece one after the other. */
struct Walk {
    uint32_t rest, at; /* terms of the piece that are to come, and where it begins */
};

/* A warp: the next term's piece of the walk into the ring, if there is one. */
__device__ inline void load_next(Ring *ring, const Terms &terms, uint32_t bytes, Walk *walk)
{
    if (walk->at >= bytes)
        return;
    const uint64_t row = __shfl_sync(kAll, (uint64_t)terms.row, __ffs(walk->rest) - 1);

    load_piece(ring, (const uint8_t *)row + walk->at, min(bytes - walk->at, kPieceBytes));
    walk->rest &= walk->rest - 1;
    if (walk->rest)
        return;
    walk->rest = terms.mask;
    walk->at += kPieceBytes;
}

/* fn(i, byte) for the 16 bytes of a lane in the piece that begins at `at`. */
template <class Fn> __device__ inline void each_vec(uint32_t at, uint32_t bytes, Fn fn)
{
#pragma unroll
    for (uint32_t i = 0; i < kLaneVecs; i++) {
        const uint32_t byte = at + (i * 32 + threadIdx.x % 32) * 16;

        if (byte < bytes)
            fn(i, byte);
    }
}

/* A warp: the sum of the terms, and of the bias in the end, to `to`. */
template <class T>
__device__ inline void sum_rows(Ring *ring, const Terms &terms, uint32_t bytes, const uint8_t *bias, uint8_t *to)
{
    constexpr uint32_t kElements = Format<T>::n;
    Walk walk = { terms.mask, terms.mask ? 0 : bytes };

    for (uint32_t i = 0; i < kStages; i++)
        load_next(ring, terms, bytes, &walk);
#pragma unroll 1
    for (uint32_t at = 0; at < bytes; at += kPieceBytes) {
        float sum[kLaneVecs][kElements] = {};

#pragma unroll 1
        for (uint32_t rest = terms.mask; rest; rest &= rest - 1) {
            const float weight = __shfl_sync(kAll, terms.weight, __ffs(rest) - 1);
            const uint8_t *piece = take_piece(ring);

            each_vec(at, bytes, [&](uint32_t i, uint32_t byte) {
                float x[kElements];

                Format<T>::decode(*(const Vec *)(piece + (byte - at)), x);
                for (uint32_t e = 0; e < kElements; e++)
                    sum[i][e] = fmaf(weight, x[e], sum[i][e]);
            });
            fence_stage(); /* it is read */
            __syncwarp();
            load_next(ring, terms, bytes, &walk);
        }
        each_vec(at, bytes, [&](uint32_t i, uint32_t byte) {
            if (bias) {
                float x[kElements];

                Format<T>::decode(load_row(bias + byte), x);
                for (uint32_t e = 0; e < kElements; e++)
                    sum[i][e] += x[e];
            }
            store_row(to + byte, Format<T>::encode(sum[i]));
        });
    }
}

/* One term of weight 1 is a copy, bit for bit. */
template <class T>
__device__ inline void sum_or_copy(Ring *ring, const Terms &terms, uint32_t bytes, const uint8_t *bias, uint8_t *to)
{
    const uint32_t first = terms.mask ? __ffs(terms.mask) - 1 : 0;
    const float weight = __shfl_sync(kAll, terms.weight, first);
    const uint8_t *row = (const uint8_t *)__shfl_sync(kAll, (uint64_t)terms.row, first);

    __syncwarp();
    fence_acquired();
    if (__popc(terms.mask) == 1 && weight == 1.0f && !bias)
        copy_row(ring, row, bytes, threadIdx.x % 32 == 0 ? to : nullptr);
    else
        sum_rows<T>(ring, terms, bytes, bias, to);
}

} // namespace combine
} // namespace ht
} // namespace ep

#endif
