/*
 * ht_receive.cuh: the receiving half of an HT dispatch: what stands beside rows, and packed, copies for the further
 * experts of a token, as rows land.
 */
#ifndef EP_HT_RECEIVE_CUH
#define EP_HT_RECEIVE_CUH

#include "ht_exchange.cuh"

namespace ep {
namespace ht {

constexpr uint32_t kNowhere = 0xffffffffu; /* the place of a choice that is not here */

/* Of a row that comes, a warp's: lane k has choice k. */
struct Arrival {
    uint32_t s, token;
    uint64_t i;       /* among all that come */
    bool there;
    int32_t local;    /* -1: not here */
    float weight;
    uint32_t place;
    bool first;       /* of those that name its expert */
};

/* ---- headers ------------------------------------------------------------------------------ */

__device__ inline bool await_header(const ep_ht_args &a, const Op &op, Arrival *row)
{
    const uint8_t *header = header_at(a, a.rank, row->i);
    const struct ep_ht_flags *flags = flags_of(a, a.rank, row->s);
    Vec v;

    if (threadIdx.x % 32 == 0) {
        const Wait end = wait_for(
            a, op, via(a, row->s),
            [&] {
                v = acquire_vec(header); /* partner: push_headers */
                return tag_of(v) == op.tag;
            },
            [&] { return load_u64(&flags->ceased) == op.tag || load_u64(&flags->done) == op.tag; });
        if (end != Wait::there)
            miss(a, row->s, end, EP_WAIT_ARRIVAL);
        row->token = v.w[0];
        row->there = end == Wait::there;
    }
    __syncwarp(); /* what lane 0 has acquired is there for all */
    row->token = __shfl_sync(kAll, row->token, 0);
    row->there = __shfl_sync(kAll, row->there, 0);
    return row->there;
}

/* Fields of a header that are out of bounds are of no choice that is here. */
__device__ inline void take_header(const ep_ht_args &a, const Op &op, uint64_t rows, Arrival *row)
{
    const uint32_t lane = threadIdx.x % 32;

    row->local = -1;
    row->weight = 0;
    row->place = kNowhere;
    if (await_header(a, op, row) && lane < a.max_top_k) {
        const Vec v = load_row(header_at(a, a.rank, row->i) + sizeof(struct ep_row_header)
                               + lane * sizeof(struct ep_route));

        if (v.w[0] < a.local_experts && (a.layout != EP_LAYOUT_PACKED || v.w[2] < rows)) {
            row->local = (int32_t)v.w[0];
            row->weight = __uint_as_float(v.w[1]);
            row->place = v.w[2];
        }
    }
    row->first = row->local >= 0;
#pragma unroll 1
    for (uint32_t k = 0; k < a.max_top_k; k++)
        if (__shfl_sync(kAll, row->local, k) == row->local && k < lane)
            row->first = false;
}

/* ---- what stands beside a row ------------------------------------------------------------------ */

__device__ inline void write_flat(const ep_ht_args &a, const Arrival &row)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t at = row.i * a.top_k + lane;

    if (lane < a.top_k && a.out_topk)
        a.out_topk[at] = row.local;
    if (lane < a.top_k && a.out_weights)
        a.out_weights[at] = row.weight;
    if (lane == 0 && a.sources)
        a.sources[row.i] = { row.s, row.there ? row.token : EP_NO_TOKEN };
}

/* For the combine. */
__device__ inline void keep_places(const ep_ht_args &a, const Arrival &row)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane >= a.max_top_k)
        return;
    a.places[row.i * a.max_top_k + lane] = row.local >= 0 ? row.place : kNowhere;
    a.place_weights[row.i * a.max_top_k + lane] = row.weight;
}

/* The row lies where its first expert wants it. */
__device__ inline void copy_to_experts(const ep_ht_args &a, const Arrival &row)
{
    const uint32_t lane = threadIdx.x % 32, all = __ballot_sync(kAll, row.first), rest = all & (all - 1);
    const uint32_t pieces = a.row_bytes / 16, scales = a.row_scales * a.scale_bytes;

    if (row.first && a.sources)
        a.sources[row.place] = { row.s, row.token };
    if (!rest)
        return;
    const uint64_t from = __shfl_sync(kAll, row.place, __ffs(all) - 1);

    walk_row(a.out + from * a.row_bytes, pieces, [&](uint32_t at, const Vec *v) {
        for (uint32_t k = rest; k; k &= k - 1)
            store_pieces(a.out + (uint64_t)__shfl_sync(kAll, row.place, __ffs(k) - 1) * a.row_bytes, at, pieces, v);
    });
    for (uint32_t i = lane; i < (a.row_scales + 31) / 32 * 32; i += 32) {
        const uint32_t scale = i < a.row_scales ? load_scale(a, a.out_scales + from * scales, i) : 0;

        for (uint32_t k = rest; k; k &= k - 1) {
            const uint64_t to = __shfl_sync(kAll, row.place, __ffs(k) - 1);

            if (i < a.row_scales)
                store_scale(a, a.out_scales + to * scales, i, scale);
        }
    }
}

/* ---- rows that nobody sends ---------------------------------------------------------------------- */

/* A warp; from no token of this rank (EP_NO_RANK: padding). */
__device__ inline void zero_row(const ep_ht_args &a, uint32_t source, uint64_t at)
{
    const uint32_t lane = threadIdx.x % 32;
    const Vec zero = { { 0, 0, 0, 0 } };

    for (uint32_t p = lane; p < a.row_bytes / 16; p += 32)
        store_row(a.out + at * a.row_bytes + (uint64_t)p * 16, zero);
    for (uint32_t i = lane; i < a.row_scales; i += 32)
        store_scale(a, a.out_scales + at * a.row_scales * a.scale_bytes, i, 0);
    if (lane == 0 && a.sources)
        a.sources[at] = { source, EP_NO_TOKEN };
}

/* A warp's share of what lies between the rows of one expert and the next one's. */
__device__ inline void zero_padding(const ep_ht_args &a, uint32_t part, uint32_t parts)
{
    for (uint32_t l = part; l < a.local_experts; l += parts)
        for (uint64_t at = (uint64_t)a.starts_in[l] + (uint32_t)a.counts[l]; at < a.starts_in[l + 1]; at++)
            zero_row(a, EP_NO_RANK, at);
}

/* A warp's share of the rows of source s, which were not all sent: as if none had been. */
__device__ inline void zero_source(const ep_ht_args &a, uint32_t s, uint64_t rows, uint32_t part, uint32_t parts)
{
    const bool room = rows <= a.out_rows;
    Arrival none = { s, 0, 0, false, -1, 0, kNowhere, false };

    for (uint32_t slot = part; slot < a.from[s]; slot += parts) {
        none.i = (uint64_t)a.from_first[s] + slot;
        keep_places(a, none);
        if (a.layout == EP_LAYOUT_PACKED || !room)
            continue;
        zero_row(a, s, none.i);
        __syncwarp();
        write_flat(a, none);
    }
    if (a.layout != EP_LAYOUT_PACKED || !room)
        return;
    for (uint32_t l = part; l < a.local_experts; l += parts)
        for (uint32_t i = 0; i < a.counts_in[s * a.local_experts + l]; i++)
            zero_row(a, s, (uint64_t)a.bases_in[s * a.local_experts + l] + i);
}

/* ---- all rows ------------------------------------------------------------------------------------- */

/* Is there anything to do for each row? */
__device__ inline bool looks_at_rows(const ep_ht_args &a)
{
    return a.layout == EP_LAYOUT_PACKED || a.out_topk || a.out_weights || a.sources;
}

/* A warp takes rows that nobody has taken: first ones of all sources first, as these land first. */
__device__ inline void receive_rows(const ep_ht_args &a, const Op &op, uint64_t rows)
{
    const bool room = rows <= a.out_rows;
    uint32_t most = 0;

    if (!looks_at_rows(a))
        return;
    each_rank(a, [&](uint32_t s) { most = max(most, a.from[s]); });
    const uint32_t end = __reduce_max_sync(kAll, most) * a.ranks;

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&run_of(a).next_row);
        Arrival row;

        if (item >= end)
            break;
        row.s = item % a.ranks;
        row.token = 0;
        if (item / a.ranks >= a.from[row.s])
            continue;
        row.i = (uint64_t)a.from_first[row.s] + item / a.ranks;
        take_header(a, op, rows, &row);
        keep_places(a, row);
        if (!row.there || !room)
            continue;
        if (a.layout == EP_LAYOUT_PACKED)
            copy_to_experts(a, row);
        else
            write_flat(a, row);
    }
}

/* Is all there that comes of the rank that has these flags?  It may be past this op already, in a combine that waits for
 * nothing of a rank without tokens, and `done` is that one's; then `ceased` would be this op's, or a later one's, if not all
 * had come. */
__device__ inline bool has_sent(const struct ep_ht_flags *flags, uint64_t tag)
{
    const uint64_t done = acquire_u64(&flags->done); /* partners: pushed, relayed */

    return done == tag || (done > tag && load_u64(&flags->ceased) < tag);
}

/* Warp 0 of block 0: all that was announced. */
__device__ inline void await_rows(const ep_ht_args &a, const Op &op)
{
    const uint64_t start = now_ns();

    each_rank(a, [&](uint32_t s) {
        const struct ep_ht_flags *flags = flags_of(a, a.rank, s);

        if (a.from[s] == 0)
            return;
        const Wait end = wait_for(
            a, op, via(a, s), [&] { return has_sent(flags, op.tag); }, [&] { return load_u64(&flags->ceased) == op.tag; });

        if (end != Wait::there)
            miss(a, s, end, EP_WAIT_ARRIVAL);
    });
    __syncwarp();
    if (threadIdx.x == 0)
        run_of(a).wait_ns += now_ns() - start;
}

} // namespace ht
} // namespace ep

#endif
