/*
 * ll_packet.cuh: how partials go from one GPU of a node to another.
 *
 * A warp stores a packet at once (window.h), and another one loads it at once.  Each of its lines bears the number, so who
 * sees that in all four has the pieces as well: nothing is fenced or announced, and what has come is summed up while the
 * rest is on its way.  After the protocol LL128 of NCCL.
 *
 * That a line of 128 bytes is written as a whole is no rule of PTX's.  It is so over NVLink and within a GPU, which NCCL
 * counts on for the same purpose.  The server says whether all ranks of the node are joined so (whole_lines in the state).
 * Where they are not, the lane with the number fences first, and who has seen all numbers loads the packet again.
 */
#ifndef EP_LL_PACKET_CUH
#define EP_LL_PACKET_CUH

#include "ll_device.cuh"

namespace ep {
namespace combine {

constexpr uint32_t kLine = 8; /* lanes, 16 bytes each */

/* Its words, so many places further. */
__device__ inline Vec turn(Vec v, uint32_t by)
{
    if (by & 1)
        v = { { v.w[3], v.w[0], v.w[1], v.w[2] } };
    if (by & 2)
        v = { { v.w[2], v.w[3], v.w[0], v.w[1] } };
    return v;
}

/* A warp.  Line i of a packet has 31 words from word 31 i of the pieces on: word w of a piece is i places further in its lane,
 * or beyond that in the next one. */
__device__ inline Vec pack(const Vec &piece, uint32_t number)
{
    const uint32_t lane = threadIdx.x % 32, line = lane / kLine;
    Vec v;

#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        v.w[w] = __shfl_sync(kAll, piece.w[w], lane - (w + line >= 4));
    v = turn(v, line);
    if (lane % kLine == kLine - 1)
        v.w[3] = number;
    return v;
}

/* And back; the last lane gets nothing. */
__device__ inline Vec unpack(const Vec &packed)
{
    const uint32_t lane = threadIdx.x % 32, next = min(lane + 1, 31u);
    const Vec v = turn(packed, 4 - lane / kLine);
    Vec piece;

#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        piece.w[w] = __shfl_sync(kAll, v.w[w], w + next / kLine >= 4 ? next : lane);
    return piece;
}

/* A warp. */
__device__ inline void store_packet(uint8_t *packet, const Vec &v, bool whole)
{
    const uint32_t lane = threadIdx.x % 32;
    const bool has_number = lane % kLine == kLine - 1;

    if (whole || !has_number)
        store_vec(packet + lane * sizeof(Vec), v);
    if (whole)
        return;
    __syncwarp();
    if (has_number) {
        fence_sys(); /* release; partner: await_packets */
        store_vec(packet + lane * sizeof(Vec), v);
    }
}

__device__ inline Vec load_packet(const uint8_t *packet)
{
    return load_vec(packet + threadIdx.x % 32 * sizeof(Vec));
}

/* Does what this lane has say that its line is there?  The others say yes. */
__device__ inline bool is_numbered(const Vec &v, uint32_t number)
{
    return threadIdx.x % kLine != kLine - 1 || v.w[3] == number;
}

} // namespace combine
} // namespace ep

#endif
