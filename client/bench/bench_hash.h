/*
 * bench_hash: random numbers by counter.  The value for (seed, stream, a, b, c) is always the same, so
 * every worker can tell every other worker's inputs without having been sent them.
 */
#ifndef BENCH_HASH_H
#define BENCH_HASH_H

#include <stdint.h>

#include <xxhash.h>

enum bench_stream {
    STREAM_PICK = 1,
    STREAM_WEIGHT,
    STREAM_DROP,
    STREAM_SCORE,
    STREAM_BIAS,
    STREAM_TOKEN,
    STREAM_SCALE,
    STREAM_ROW_BIAS,
    STREAM_GRADIENT,
    STREAM_GRADIENT_SCALE,
    STREAM_SOAK,
    STREAM_SOAK_STEP,
    STREAM_SOAK_LAYOUT,
    STREAM_SOAK_TOKENS,
    STREAM_SOAK_ODD,
    STREAM_SOAK_NAP,
    STREAM_SOAK_KILL
};

static inline uint64_t bench_hash(uint64_t seed, enum bench_stream stream, uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t counter[4] = { (uint32_t)stream, a, b, c };

    return XXH3_64bits_withSeed(counter, sizeof counter, seed);
}

/* [0, n), n > 0 */
static inline uint32_t bench_below(uint64_t hash, uint32_t n)
{
    return (uint32_t)((hash >> 32) * n >> 32);
}

/* (0, 1) */
static inline double bench_unit(uint64_t hash)
{
    return ((double)(hash >> 12) + 0.5) * 0x1p-52;
}

#endif
