/* ll_receive.cuh: the receiving half of a dispatch: rows to their experts as they land. */
#ifndef EP_LL_RECEIVE_CUH
#define EP_LL_RECEIVE_CUH

#include "ll_device.cuh"

namespace ep {

constexpr uint32_t kNoPlace = 0xffffffffu; /* in a row's places: this choice is not here */

/* ---- receiving ----------------------------------------------------------------------------- */

/* Warp 0 asks who takes part by now, each lane about its rank, and needs not wait for it. */
__device__ inline uint64_t ask_again(const ep_ll_args &a, bool fenced)
{
    if (!fenced)
        fence_total(); /* `begun` is out; partner: the server's write of `from` */
    return from_of_lane(a);
}

/* Mask: whoever has joined since the op began is a member too, and is to get his part. */
__device__ inline uint32_t newcomers(const ep_ll_args &a, const Op &op, uint64_t from)
{
    if constexpr (kNet)
        return 0;
    const uint32_t now = __ballot_sync(kAll, from <= op.number), members = op.members[0];

    return a.phases & EP_LL_SEND && members ? now & ~members : 0;
}

/* Of a rank on another node: is what it has put for this op there, if it has? */
__device__ inline bool has_come(const ep_ll_args &a, const Op &op, uint32_t s)
{
    return told_by(a, EP_NET_SENT, bank_of(a, op.number), s) >= op.number || has_released(a, op, s);
}

/* All warps but the first: what each source sends, once it has told, to rows[s] and base[l * R + s]. */
__device__ inline void take_counts(const ep_ll_args &a, Op *op, uint32_t *rows, uint32_t *base)
{
    const uint32_t vecs = a.counts_bytes / sizeof(Vec);

#pragma unroll 1
    for (uint32_t i = threadIdx.x - 32; i < a.ranks * vecs; i += kThreads - 32) {
        const uint32_t s = i / vecs, at = i % vecs;
        Vec v = { { 0, 0, 0, 0 } };

        if (has(op->members, s)) {
            const uint8_t *from = counts_at(a, *op, s, a.rank) + at * sizeof(Vec);
            const bool far = is_far(a, s);
            const Wait end = wait_for(
                a, *op, s,
                [&] {
                    if (far && !has_come(a, *op, s))
                        return false;
                    v = load_vec(from); /* partner: push_counts */
                    return v.w[3] == op->wire;
                },
                [&] { return looks_back(a, s, far && at == 0 && tells(a)) || has_released(a, *op, s); });

            if (end != Wait::there) {
                miss(a, op, s, end, EP_WAIT_ARRIVAL);
                v = { { 0, 0, 0, 0 } };
            }
        }
        for (uint32_t j = 0; j < kCountsInVec; j++) {
            const uint32_t value = at * kCountsInVec + j;

            if (value == 0)
                rows[s] = min(v.w[j], a.max_tokens);
            else if (value <= a.local_experts)
                base[(value - 1) * a.ranks + s] = v.w[j];
        }
    }
}

/* A header as it is in memory: lane 0 has the token, lane 1 + k choice k. */
struct Header {
    Vec v;
    bool there;
};

__device__ inline bool look_at_header(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot, Header *h)
{
    const uint32_t lane = threadIdx.x;
    const uint8_t *header = header_at(a, op, s, a.rank, slot);

    h->there = lane > a.max_top_k;
    if (lane <= a.max_top_k) {
        h->v = acquire_vec(header + lane * 16u); /* partner: push_headers */
        h->there = h->v.w[3] == op.wire;
    }
    return h->there;
}

/* Who shares the rows: block `part` of `parts`. */
struct Share {
    uint32_t part, parts;
};

/* A row of `out` or none: the expert-major or packed place of route k of a header. */
struct Places {
    uint32_t n;
    uint64_t at[EP_MAX_TOP_K];
    uint32_t token;
    bool there;
};

/* Warp 0: waits for the header of (s, slot), unless it is there already, and finds the places of its row. */
__device__ inline void take_header(const ep_ll_args &a, Op *op, const uint32_t *base, const uint32_t *total,
                                   const uint32_t *first, uint32_t s, uint32_t slot, Header h, Places *places)
{
    const uint32_t lane = threadIdx.x, k = lane - 1;
    uint32_t *kept = (uint32_t *)item_at(a, a.rank, op->bank, a.bank.places, s, slot, a.places_bytes);
    const bool route = lane >= 1 && lane <= a.max_top_k;

    if (!h.there) {
        const Wait end = wait_for(
            a, *op, s, [&] { return look_at_header(a, *op, s, slot, &h); }, [&] { return has_released(a, *op, s); });

        if (end != Wait::there)
            miss(a, op, s, end, EP_WAIT_ARRIVAL);
    }
    const bool there = __all_sync(kAll, h.there);
    const uint32_t l = route ? h.v.w[0] : kAll, index = h.v.w[2];
    const bool here = there && l < a.local_experts && index < rows_between(a, base, total, l, s);
    const uint64_t at = here ? block_of(a, first, l) + base[l * a.ranks + s] + index : kNoPlace;
    /* An expert that was named before has its row already. */
    const bool again = __match_any_sync(kAll, l) & ((1u << lane) - 1);
    const uint32_t mine = __ballot_sync(kAll, here && !again);

    if (route)
        kept[k] = (uint32_t)at;
    if (here && !again)
        places->at[__popc(mine & ((1u << lane) - 1))] = at;
    if (lane == 0) {
        places->n = __popc(mine);
        places->token = h.v.w[0];
        places->there = there;
    }
    __syncwarp();
}

/* The part of a row that one of so many movers has, from piece `at` on: asked for, and not waited for. */
__device__ inline void load_pieces(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot, uint32_t at,
                                   uint32_t movers, Vec *v)
{
    const uint8_t *row = row_at(a, op, s, a.rank, slot);

#pragma unroll
    for (uint32_t i = 0; i < kVecs; i++)
        if (at + i * movers < a.row_bytes / 16)
            v[i] = load_row(row + (uint64_t)(at + i * movers) * 16);
}

/* So many movers: the row to its places, and what stands beside it.  fetched: its first pieces are in v. */
__device__ inline void place_row(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot, const Places &places,
                                 uint32_t movers, bool fetched, Vec *v)
{
    const uint32_t pieces = a.row_bytes / 16, n = places.n;
    const uint8_t *scales = scales_at(a, op, s, a.rank, slot);

#pragma unroll 1
    for (uint32_t at = threadIdx.x; at < pieces; at += kVecs * movers) {
        if (!fetched)
            load_pieces(a, op, s, slot, at, movers, v);
        fetched = false;
#pragma unroll 1
        for (uint32_t j = 0; j < n; j++) {
            uint8_t *to = a.out + places.at[j] * a.row_bytes;

#pragma unroll
            for (uint32_t i = 0; i < kVecs; i++)
                if (at + i * movers < pieces)
                    store_row(to + (uint64_t)(at + i * movers) * 16, v[i]);
        }
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.row_scales; i += movers) {
        const uint32_t scale = load_scale(a, scales, i);

#pragma unroll 1
        for (uint32_t j = 0; j < n; j++)
            store_scale(a, a.out_scales + places.at[j] * a.row_scales * a.scale_bytes, i, scale);
    }
    if (threadIdx.x < n && a.sources)
        a.sources[places.at[threadIdx.x]] = { s, places.token };
}

__device__ inline void zero_row(const ep_ll_args &a, uint64_t at)
{
    const Vec zero = { { 0, 0, 0, 0 } };

#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < a.row_bytes / 16; p += kThreads)
        store_row(a.out + at * a.row_bytes + (uint64_t)p * 16, zero);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.row_scales; i += kThreads)
        store_scale(a, a.out_scales + at * a.row_scales * a.scale_bytes, i, 0);
}

/* Packed: rows between one expert's last and the next one's first. */
__device__ inline void zero_padding(const ep_ll_args &a, Share share, const uint32_t *total, const uint32_t *first)
{
#pragma unroll 1
    for (uint32_t l = share.part; l < a.local_experts; l += share.parts)
#pragma unroll 1
        for (uint32_t at = first[l] + total[l]; at < first[l + 1]; at++)
            zero_row(a, at);
}

__device__ inline void write_expert_counts(const ep_ll_args &a, const uint32_t *total, const uint32_t *first,
                                           uint64_t spanned)
{
    uint32_t sum = 0;

#pragma unroll 1
    for (uint32_t l = threadIdx.x; l < a.local_experts; l += kThreads) {
        a.counts[l] = (int32_t)total[l];
        sum += total[l];
    }
#pragma unroll 1
    for (uint32_t l = threadIdx.x; a.layout == EP_LAYOUT_PACKED && l <= a.local_experts; l += kThreads)
        a.offsets[l] = (int32_t)first[l];
    sum = __reduce_add_sync(kAll, sum);
    if (a.layout == EP_LAYOUT_EXPERT_MAJOR && threadIdx.x % 32 == 0)
        atomicAdd((unsigned long long *)&a.state->scratch.rows, sum);
    else if (a.layout == EP_LAYOUT_PACKED && threadIdx.x == 0)
        a.state->scratch.rows = spanned;
}

/* The rows of a block: slots in turn, all sources of a slot together, every parts-th of them. */
struct Item {
    uint32_t s, slot;
};

__device__ inline void step(const ep_ll_args &a, Share share, Item *item)
{
    item->s += share.parts % a.ranks;
    item->slot += share.parts / a.ranks;
    if (item->s >= a.ranks) {
        item->s -= a.ranks;
        item->slot++;
    }
}

/* The first row at or after `item`; false when there is none. */
__device__ inline bool find_row(const ep_ll_args &a, const uint32_t *rows, uint32_t most, Share share, Item *item)
{
#pragma unroll 1
    for (; item->slot < most; step(a, share, item))
        if (item->slot < rows[item->s])
            return true;
    return false;
}

/* The header is that of the block's first item, which may not be there; `there`: it is, and so is the row.  Does
 * arrives() with the clerk when no more has to be waited for: while the last row is placed. */
template <class Arrives>
__device__ void receive_by_expert(const ep_ll_args &a, Op *op, Share share, Header header, bool there,
                                  const uint32_t *rows, uint32_t *base, uint32_t *total, uint32_t *first,
                                  Arrives arrives)
{
    const bool tells = share.part == share.parts / 2;
    __shared__ Places places;
    Item item = { share.part % a.ranks, share.part / a.ranks };
    const uint32_t first_slot = item.slot, first_source = item.s;
    uint32_t most = 0;
    Vec v[kVecs];

    if (there && !is_clerk())
        load_pieces(a, *op, first_source, first_slot, threadIdx.x, kMovers, v);
    const uint64_t spanned = place_rows(a, rows, base, total, first);

    if (tells)
        write_expert_counts(a, total, first, spanned);
    if (spanned <= a.out_rows) {
        most = most_rows(a, rows);
        if (a.layout == EP_LAYOUT_PACKED)
            zero_padding(a, share, total, first);
    } else if (tells && threadIdx.x == 0) {
        a.state->scratch.overflow = 1;
        a.state->scratch.rows_needed = spanned;
    }
    __syncthreads(); /* all that is told is told */
    bool more = find_row(a, rows, most, share, &item);

    if (!more && is_clerk())
        arrives();
#pragma unroll 1
    while (more) {
        const Item here = item;
        const bool is_first = here.slot == first_slot && here.s == first_source, fetched = there && is_first;

        header.there = header.there && is_first;
        if (threadIdx.x < 32)
            take_header(a, op, base, total, first, here.s, here.slot, header, &places);
        __syncthreads();
        step(a, share, &item);
        more = find_row(a, rows, most, share, &item);
        if (!more && is_clerk())
            arrives();
        const uint32_t movers = more && !fetched ? kThreads : kMovers;

        if (places.there && threadIdx.x < movers)
            place_row(a, *op, here.s, here.slot, places, movers, fetched, v);
        if (more)
            __syncthreads(); /* the places are done with */
    }
}

__device__ inline void write_rank_counts(const ep_ll_args &a, const uint32_t *rows)
{
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < a.ranks; s += kThreads) {
        a.counts[s] = (int32_t)rows[s];
        atomicAdd((unsigned long long *)&a.state->scratch.rows, rows[s]);
    }
}

/* What came in boxes, all of it with the counts, goes to where that of other ranks stays. */
__device__ inline void move_far_rows(const ep_ll_args &a, const Op &op, Share share, const uint32_t *rows, uint32_t most)
{
#pragma unroll 1
    for (uint32_t i = share.part; i < most * a.ranks; i += share.parts) {
        const uint32_t s = i % a.ranks, slot = i / a.ranks;

        if (slot >= rows[s] || !is_far(a, s))
            continue;
        const uint8_t *row = row_at(a, op, s, a.rank, slot), *scales = scales_at(a, op, s, a.rank, slot);
        uint8_t *to = bank_row_at(a, a.rank, op.bank, s, slot);
        uint8_t *scales_to = item_at(a, a.rank, op.bank, a.bank.scales, s, slot, a.scales_bytes);

        for (uint32_t p = threadIdx.x; p < a.row_bytes / 16; p += kThreads)
            store_row(to + (uint64_t)p * 16, load_row(row + (uint64_t)p * 16));
        for (uint32_t p = threadIdx.x; p < a.row_scales; p += kThreads)
            store_scale(a, scales_to, p, load_scale(a, scales, p));
    }
}

/* Rank-major rows stay where they are: a thread per 16 bytes of header waits for it.  Who reads the rows comes later
 * in the stream, and starts with nothing cached. */
__device__ inline void receive_in_place(const ep_ll_args &a, Op *op, Share share, const uint32_t *rows)
{
    const uint32_t parts = a.max_top_k + 1, most = most_rows(a, rows);

#pragma unroll 1
    for (uint32_t i = share.part * kThreads + threadIdx.x; i < most * a.ranks * parts; i += share.parts * kThreads) {
        const uint32_t part = i % parts, s = i / parts % a.ranks, slot = i / parts / a.ranks;
        const uint64_t at = (uint64_t)s * a.max_tokens + slot;
        Vec v;

        if (slot >= rows[s])
            continue;
        const uint8_t *header = header_at(a, *op, s, a.rank, slot);
        const Wait end = wait_for(
            a, *op, s,
            [&] {
                v = load_vec(header + part * 16u);
                return v.w[3] == op->wire;
            },
            [&] { return has_released(a, *op, s); });

        if (end != Wait::there) {
            miss(a, op, s, end, EP_WAIT_ARRIVAL);
            continue;
        }
        if (part == 0) {
            if (a.sources)
                a.sources[at] = { s, v.w[0] };
        } else if (part <= a.top_k) {
            const bool here = v.w[0] < a.local_experts;

            if (a.out_topk)
                a.out_topk[at * a.top_k + part - 1] = here ? (int32_t)v.w[0] : -1;
            if (a.out_weights)
                a.out_weights[at * a.top_k + part - 1] = here ? __uint_as_float(v.w[1]) : 0.0f;
        }
    }
    if (kNet)
        move_far_rows(a, *op, share, rows, most);
    if (share.part == share.parts / 2)
        write_rank_counts(a, rows);
}

/*
 * The last block, when a source was lost or late, or not all blocks counted it in.  So they may have disagreed
 * on where rows lie: this one is to do it all again, without the source.  What counts has come already.
 */
__device__ inline void prepare_again(const ep_ll_args &a, Op *op, uint32_t *rows, uint32_t *base)
{
    if (threadIdx.x == 0) {
        const uint64_t all = a.state->left_before + a.blocks - 1; /* but this one */

        for (uint32_t w = 0; w < words_of(a); w++) {
            const auto &missing = a.state->scratch.ranks[w];

            op->members[w] &= ~(missing.gone | missing.late | missing.outside);
        }
        a.state->scratch.rows = a.state->scratch.rows_needed = a.state->scratch.overflow = 0;
        /* They wait for nobody any more; partner: leave.  Bounded for blocks that do not agree on what the op is,
         * as a worker that a server does not trust can have it. */
        op->deadline = 0;
        while (acquire_u64(&a.state->left) < all && !is_late(*op))
            ;
    }
    __syncthreads();
    if (threadIdx.x >= 32)
        take_counts(a, op, rows, base);
    __syncthreads();
}

/* One thread: this block has written its rows. */
__device__ inline void leave(const ep_ll_args &a)
{
    count_release(&a.state->left);
}

} // namespace ep

#endif
