/* kernels/cuda/ll_quantise.cuh as host code, for test_ll_quantise.c: a warp's exchange is a loop here. */
#include "ll_quantise.cuh"

#include "quantise_host.h"

using namespace ep;

enum { LANES = 8, PIECE = 16 };

/* Pieces of block b, and of those after it that a thread has at once. */
template <Cast C> static void quantise_blocks(const uint8_t *row, uint32_t pieces, uint32_t b, bool powers,
                                              uint8_t *codes, uint8_t *scales)
{
    Vec v[LANES][kVecs] = {};
    uint32_t most[LANES];

    for (uint32_t lane = 0; lane < LANES; lane++) {
        for (uint32_t i = 0; i < kVecs; i++) {
            const uint32_t p = (b + i / kIn<C>) * LANES + lane;

            if (p < pieces)
                memcpy(&v[lane][i], row + ((size_t)p * kIn<C> + i % kIn<C>) * sizeof(Vec), sizeof(Vec));
        }
        most[lane] = largest<C>(v[lane]);
    }
    for (uint32_t step = 1; step < LANES; step *= 2) {
        uint32_t before[LANES];

        memcpy(before, most, sizeof before);
        for (uint32_t lane = 0; lane < LANES; lane++)
            most[lane] = larger<C>(before[lane], before[lane ^ step]);
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        for (uint32_t i = 0; i < kPieces<C>; i++) {
            const uint32_t p = (b + i) * LANES + lane;
            const float amax = largest_at<C>(most[lane], i);
            const Scale scale = powers ? ue8m0_scale(amax) : fp32_scale(amax);
            const Vec piece = encode<C>(v[lane] + i * kIn<C>, scale);

            if (p >= pieces)
                continue;
            memcpy(codes + (size_t)p * PIECE, &piece, PIECE);
            if (lane == 0)
                memcpy(scales + (size_t)(b + i) * (powers ? 1 : 4), &scale.stored, powers ? 1 : 4);
        }
}

template <Cast C> static void quantise_row(const void *row, uint32_t hidden, bool powers, uint8_t *codes, void *scales)
{
    for (uint32_t b = 0; b * LANES * PIECE < hidden; b += kPieces<C>)
        quantise_blocks<C>((const uint8_t *)row, hidden / PIECE, b, powers, codes, (uint8_t *)scales);
}

void quantise_host(ep_dtype dtype, const void *row, uint32_t hidden, ep_scale_format format, uint8_t *codes,
                   void *scales)
{
    const bool powers = format == EP_SCALE_UE8M0;

    switch (dtype) {
    case EP_BF16: quantise_row<Cast::bf16>(row, hidden, powers, codes, scales); break;
    case EP_FP16: quantise_row<Cast::fp16>(row, hidden, powers, codes, scales); break;
    default:      quantise_row<Cast::fp32>(row, hidden, powers, codes, scales); break;
    }
}

float quantise_host_by_448(float amax)
{
    return by_448(amax);
}
