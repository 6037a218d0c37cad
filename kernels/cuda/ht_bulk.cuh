/*
 * ht_bulk.cuh: rows through shared memory, carried by the engine for bulk copies.
 *
 * Each warp has a ring of stages.  A row goes through it in pieces: loads are several pieces ahead, and what a stage
 * holds is stored by the engine, to as many places as it is wanted, or read by the warp.  So a warp has all of its ring
 * under way where registers would hold a third of that, and waits for its own stores alone where a fence would wait for
 * those of the whole multiprocessor: few multiprocessors keep the wire busy.
 *
 * The engine is a proxy of its own.  What ordinary accesses wrote or acquired is there for it behind
 * fence.proxy.async, and so is a stage that was read; what it has stored is there for ordinary accesses of a thread
 * that has waited for its stores, and for whom that one tells.
 */
#ifndef EP_HT_BULK_CUH
#define EP_HT_BULK_CUH

#include "ll_device.cuh"

namespace ep {
namespace ht {

constexpr uint32_t kStages = 4, kPieceBytes = EP_DEVICE_HT_RING_BYTES / EP_DEVICE_HT_WARPS / kStages;
static_assert(kWarps == EP_DEVICE_HT_WARPS && kPieceBytes % 512 == 0, "a piece is 16 bytes of each lane, some times");

/* A warp's; all lanes know the same of it. */
struct Ring {
    uint8_t *stage;          /* kStages of them */
    uint64_t *full;          /* a barrier for each */
    uint32_t loaded, taken;  /* pieces, ever */
};

/* All threads of a block, once, when nobody uses the shared memory for anything else any more. */
__device__ inline Ring open_ring(uint32_t *shared)
{
    __shared__ uint64_t full[kWarps][kStages];
    const uint32_t warp = threadIdx.x / 32;

    if (threadIdx.x % 32 == 0) {
        for (uint32_t i = 0; i < kStages; i++)
            barrier_init(&full[warp][i]);
        fence_barriers();
    }
    fence_stage();
    __syncthreads();
    return { (uint8_t *)shared + warp * kStages * kPieceBytes, full[warp], 0, 0 };
}

__device__ inline uint8_t *stage_of(const Ring &ring, uint32_t piece)
{
    return ring.stage + piece % kStages * kPieceBytes;
}

/* A warp: the next piece, into a stage that is free. */
__device__ inline void load_piece(Ring *ring, const uint8_t *from, uint32_t bytes)
{
    if (threadIdx.x % 32 == 0)
        bulk_load(stage_of(*ring, ring->loaded), from, bytes, ring->full + ring->loaded % kStages);
    ring->loaded++;
}

/* A warp: where the oldest piece is that nobody took.  It comes by itself. */
__device__ inline uint8_t *take_piece(Ring *ring)
{
    uint64_t *full = ring->full + ring->taken % kStages;
    const uint32_t parity = ring->taken / kStages % 2;

    while (!barrier_passed(full, parity))
        ;
    return stage_of(*ring, ring->taken++);
}

/* A warp: a row to where each lane wants it, NULL: it does not.  It is there for those lanes when this is over. */
__device__ inline void copy_row(Ring *ring, const uint8_t *from, uint32_t bytes, uint8_t *to)
{
    const uint32_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
    auto size_of = [&](uint32_t piece) { return min(bytes - piece * kPieceBytes, kPieceBytes); };
    uint32_t next = 0;

    for (; next < min(pieces, kStages); next++)
        load_piece(ring, from + next * kPieceBytes, size_of(next));
#pragma unroll 1
    for (uint32_t piece = 0; piece < pieces; piece++) {
        const uint8_t *stage = take_piece(ring);

        if (to)
            bulk_store(to + piece * kPieceBytes, stage, size_of(piece));
        bulk_commit();
        if (piece == 0 || next == pieces)
            continue;
        bulk_read<1>(); /* the stage of the piece before */
        __syncwarp();
        load_piece(ring, from + next * kPieceBytes, size_of(next));
        next++;
    }
    bulk_stored();
    __syncwarp();
}

} // namespace ht
} // namespace ep

#endif
