/*
 * LL combine: each rank sums a token's rows over its own experts in fp32, rounds once and pushes the partial
 * to the token's source; the source sums partials in the order of ranks as they land.  ll_device.cuh has the
 * protocol.
 *
 * Rows are cut into parts that different blocks work on: more under way when there are few tokens.  To ranks of this node
 * they go in packets (ll_packet.cuh), to others as rows in boxes.
 */
#ifndef EP_LL_COMBINE_CUH
#define EP_LL_COMBINE_CUH

#include "ll_packet.cuh"

namespace ep {
namespace combine {

/* ---- formats ------------------------------------------------------------------------ */

/* 16 bytes of a row, as floats and back. */
template <class T> struct Format;

template <> struct Format<__nv_bfloat16> {
    static constexpr uint32_t n = 8;
    static __device__ void decode(const Vec &v, float *x)
    {
        for (uint32_t i = 0; i < n; i++)
            x[i] = __uint_as_float(i % 2 ? v.w[i / 2] & 0xffff0000u : v.w[i / 2] << 16);
    }
    static __device__ Vec encode(const float *x)
    {
        Vec v;

        for (uint32_t i = 0; i < n / 2; i++) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);

            v.w[i] = *(const uint32_t *)&pair;
        }
        return v;
    }
};

template <> struct Format<__half> {
    static constexpr uint32_t n = 8;
    static __device__ void decode(const Vec &v, float *x)
    {
        for (uint32_t i = 0; i < n; i++)
            x[i] = __half2float(__ushort_as_half((uint16_t)(v.w[i / 2] >> (i % 2 * 16))));
    }
    static __device__ Vec encode(const float *x)
    {
        Vec v;

        for (uint32_t i = 0; i < n / 2; i++) {
            const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);

            v.w[i] = *(const uint32_t *)&pair;
        }
        return v;
    }
};

template <> struct Format<float> {
    static constexpr uint32_t n = 4;
    static __device__ void decode(const Vec &v, float *x)
    {
        for (uint32_t i = 0; i < n; i++)
            x[i] = __uint_as_float(v.w[i]);
    }
    static __device__ Vec encode(const float *x)
    {
        Vec v;

        for (uint32_t i = 0; i < n; i++)
            v.w[i] = __float_as_uint(x[i]);
        return v;
    }
};

/* ---- sums ---------------------------------------------------------------------------- */

/* The terms of a sum: rows and what they are multiplied by, in the order of the sum. */
struct Terms {
    uint32_t n, token;
    const uint8_t *row[EP_MAX_TOP_K]; /* a token goes to no more ranks */
    uint32_t rank[EP_MAX_TOP_K];      /* that it comes from, of a sum of partials */
    float weight[EP_MAX_TOP_K];
};

/* Packets [from, to) of a row, or the pieces of 16 bytes that they have. */
struct Range {
    uint32_t from, to;
};

__device__ inline Range packets_of(const ep_ll_args &a, uint32_t part)
{
    const uint32_t packets = ep_packets(a.row_bytes), each = (packets + EP_COMBINE_PARTS - 1) / EP_COMBINE_PARTS;

    return { min(part * each, packets), min((part + 1) * each, packets) };
}
__device__ inline Range pieces_of(const ep_ll_args &a, Range packets)
{
    const uint32_t pieces = a.row_bytes / 16;

    return { min(packets.from * EP_PACKET_PIECES, pieces), min(packets.to * EP_PACKET_PIECES, pieces) };
}

constexpr uint32_t kUnder = 2, kTerms = 4; /* pieces and terms that a thread has under way */

/* Terms j .. j + kTerms - 1 are fetched, then added in their order. */
template <class T, uint32_t kBy>
__device__ inline void add_terms(const Terms &terms, uint32_t j, uint32_t at, uint32_t end, Vec (*v)[kUnder],
                                 float (*sum)[Format<T>::n])
{
#pragma unroll
    for (uint32_t k = 0; k < kTerms; k++)
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++)
            if (j + k < terms.n && at + i * kBy < end)
                v[k][i] = load_row(terms.row[j + k] + (uint64_t)(at + i * kBy) * 16);
#pragma unroll
    for (uint32_t k = 0; k < kTerms; k++) {
        if (j + k >= terms.n)
            break;
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++) {
            float x[Format<T>::n];

            Format<T>::decode(v[k][i], x);
            for (uint32_t e = 0; e < Format<T>::n; e++)
                sum[i][e] = fmaf(terms.weight[j + k], x[e], sum[i][e]);
        }
    }
}

/* All terms, weighted, of a thread's pieces at, at + kBy, ... below `end`, as they travel.  One term with weight 1 is a copy,
 * bit for bit. */
template <class T, uint32_t kBy>
__device__ inline void sum_rows(const Terms &terms, uint32_t at, uint32_t end, Vec *sums)
{
    const bool copies = terms.n == 1 && terms.weight[0] == 1.0f;
    float sum[kUnder][Format<T>::n] = {};
    Vec v[kTerms][kUnder];

    for (uint32_t j = 0; j < terms.n; j += kTerms)
        add_terms<T, kBy>(terms, j, at, end, v, sum);
#pragma unroll
    for (uint32_t i = 0; i < kUnder; i++)
        sums[i] = copies ? v[0][i] : Format<T>::encode(sum[i]);
}

/* ---- pushing partials ------------------------------------------------------------------- */

/* The header of a row, and where dispatch has put it: lane 1 + k has choice k. */
struct Header {
    Vec v;
    uint32_t place;
};

__device__ inline Header load_header(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot)
{
    const uint32_t lane = threadIdx.x;
    const uint8_t *header = header_at(a, op, s, a.rank, slot);
    const uint32_t *places = (const uint32_t *)item_at(a, a.rank, op.bank, a.bank.places, s, slot, a.places_bytes);
    Header h = { { { kAll, 0, 0, 0 } }, kAll };

    if (lane <= a.max_top_k)
        h.v = load_vec(header + lane * 16u);
    if (lane >= 1 && lane <= a.max_top_k && by_expert(a))
        h.place = load_u32(places + lane - 1);
    return h;
}

/* Warp 0: the terms of row (s, slot); no token when its header is not of this number. */
__device__ inline void find_terms(const ep_ll_args &a, const Op &op, const Header &h, uint32_t s, uint32_t slot,
                           Terms *terms)
{
    const uint32_t lane = threadIdx.x, token = __shfl_sync(kAll, h.v.w[0], 0);
    const bool there = __all_sync(kAll, lane > a.max_top_k || h.v.w[3] == op.wire) && token < a.max_tokens;
    const bool here = there && h.place < a.in_rows;
    const uint32_t mine = __ballot_sync(kAll, here), at = __popc(mine & ((1u << lane) - 1));

    if (here) {
        terms->row[at] = a.x + (uint64_t)h.place * a.row_bytes;
        terms->weight[at] = __uint_as_float(h.v.w[1]);
    }
    if (lane == 0) {
        terms->token = there ? token : kAll;
        terms->n = __popc(mine);
        if (!by_expert(a)) { /* the rank's sum already: from the caller's rows or from the bank */
            terms->n = 1;
            terms->weight[0] = 1.0f;
            terms->row[0] = a.x ? a.x + ((uint64_t)s * a.max_tokens + slot) * a.row_bytes
                                : bank_row_at(a, a.rank, op.bank, s, slot);
        }
    }
    __syncwarp();
}

/* Rows of source s that are here, by what it has told.  excluded: mask, or with many ranks the handle says so. */
__device__ inline uint32_t rows_here(const ep_ll_args &a, const Op &op, uint32_t excluded, uint32_t s)
{
    const bool out = has(kNet ? a.state->handles[a.handle].excluded : &excluded, s);
    uint32_t n = 0;

    return has(op.members, s) && !out && rows_of(a, op, s, &n) ? n : 0;
}

/* A block's share of the partials: the parts of a row together, all sources of a slot together, the next rank
 * first, so that not all push to the same one. */
struct Item {
    uint32_t part, s, slot;
};

__device__ inline Item item_of(const ep_ll_args &a, uint32_t i)
{
    return { i % EP_COMBINE_PARTS, (i / EP_COMBINE_PARTS + a.rank + 1) % a.ranks, i / EP_COMBINE_PARTS / a.ranks };
}

/* A warp's packets, every kWarps-th from the first on. */
template <class T>
__device__ inline void push_packets(const ep_ll_args &a, const Op &op, const Terms &terms, Range range, uint8_t *to)
{
    const uint32_t lane = threadIdx.x % 32, end = lane < EP_PACKET_PIECES ? pieces_of(a, range).to : 0;

    for (uint32_t at = range.from + threadIdx.x / 32; at < range.to; at += kUnder * kWarps) {
        Vec sums[kUnder];

        sum_rows<T, kWarps * EP_PACKET_PIECES>(terms, at * EP_PACKET_PIECES + lane, end, sums);
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++)
            if (at + i * kWarps < range.to)
                store_packet(to + (uint64_t)(at + i * kWarps) * EP_PACKET_BYTES, pack(sums[i], op.wire), op.whole);
    }
}

/* To a box. */
template <class T> __device__ inline void push_row(const Terms &terms, Range range, uint8_t *to)
{
    for (uint32_t at = range.from + threadIdx.x; at < range.to; at += kUnder * kThreads) {
        Vec sums[kUnder];

        sum_rows<T, kThreads>(terms, at, range.to, sums);
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++)
            if (at + i * kThreads < range.to)
                store_row(to + (uint64_t)(at + i * kThreads) * 16, sums[i]);
    }
}

/* What goes to another node is put there when all have pushed. */
template <class T>
__device__ inline void push_partial(const ep_ll_args &a, const Op &op, const Item &item, const Terms &terms)
{
    const Range range = packets_of(a, item.part);

    if (terms.token == kAll)
        return;
    if (is_far(a, item.s)) {
        push_row<T>(terms, pieces_of(a, range), partial_at(a, op, item.s, a.rank, item.slot));
        if (item.part == 0 && threadIdx.x == 0)
            store_u32(number_in(a, box_of(a, op, item.s, a.rank), item.slot), op.wire);
    } else {
        push_packets<T>(a, op, terms, range, partial_at(a, op, item.s, a.rank, terms.token));
    }
}

/* The clerk, when all have pushed: the others look for peers' partials already.  The last block's gives the credit,
 * which for ranks on other nodes says that the partials are there. */
__device__ inline void end_push(const ep_ll_args &a, const Op &op, const uint32_t *rows)
{
    uint32_t before = 0;

    if (threadIdx.x % 32 == 0)
        before = count_acq_rel(&a.state->scratch.pushed);
    if (__shfl_sync(kAll, before, 0) != a.blocks - 1)
        return;
    if (threadIdx.x % 32 == 0)
        a.state->handles[a.handle].combined = op.number;
    if (kNet) {
        fence_sys(); /* of what all blocks have pushed, which the count has acquired */
        each_rank(a, [&](uint32_t s) {
            if (is_far(a, s) && rows[s]) /* all its rows have come: that is what ACK says beyond CREDIT */
                put_box(a, bank_of(a, op.number), s, a.rank, rows[s], EP_NET_ACK, op.number);
        });
        __syncwarp();
    }
    give_credit(a, op.number);
}

/* To other ranks. */
__device__ inline uint32_t rows_sent(const ep_ll_args &a, const uint32_t *rows)
{
    uint32_t sent = 0;

#pragma unroll 1
    for (uint32_t s = 0; s < a.ranks; s++)
        sent += s == a.rank ? 0 : rows[s];
    return sent;
}

template <class T>
__device__ inline void push_partials(const ep_ll_args &a, const Op &op, uint32_t excluded, Terms *terms)
{
    uint32_t *rows = rows_of_ranks();

    if (threadIdx.x < 32) {
        const Item item = item_of(a, blockIdx.x);
        Header header;

        if (item.slot < a.max_tokens) /* at once with the counts, which tell whether there is such a row */
            header = load_header(a, op, item.s, item.slot);
        each_rank(a, [&](uint32_t s) { rows[s] = rows_here(a, op, excluded, s); });
        __syncwarp();
        if (item.slot < rows[item.s])
            find_terms(a, op, header, item.s, item.slot, terms);
    }
    __syncthreads();
    const uint32_t most = most_rows(a, rows);

    if (tells(a) && threadIdx.x == 0)
        a.state->scratch.wire_bytes = (uint64_t)rows_sent(a, rows) * a.row_bytes;
    for (uint32_t i = blockIdx.x; i < most * a.ranks * EP_COMBINE_PARTS; i += a.blocks) {
        const Item item = item_of(a, i);

        if (item.slot >= rows[item.s])
            continue;
        if (i != blockIdx.x) {
            __syncthreads(); /* the terms before are done with */
            if (threadIdx.x < 32)
                find_terms(a, op, load_header(a, op, item.s, item.slot), item.s, item.slot, terms);
            __syncthreads();
        }
        push_partial<T>(a, op, item, *terms);
    }
    __syncthreads();
    if (is_clerk())
        end_push(a, op, rows);
}

/* ---- summing them up -------------------------------------------------------------------- */

/* A warp: the ranks that token t went to, from the choice that each lane has. */
__device__ inline int32_t load_route(const ep_ll_args &a, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;

    return t < a.tokens && lane < a.top_k ? a.routing[t * a.top_k + lane] : -1;
}
__device__ inline uint32_t ranks_of(int32_t route)
{
    return __reduce_or_sync(kAll, route >= 0 ? 1u << ((route & ~EP_DEVICE_ROUTE_AGAIN) >> 16) : 0);
}

/* A warp: the rank whose partial comes to this lane, kNobody: none.  Where each rank has a lane its own, else that of the
 * first choice there. */
__device__ inline uint32_t peer_of_lane(int32_t route)
{
    const uint32_t lane = threadIdx.x % 32;

    if constexpr (kNet) {
        const uint32_t rank = route < 0 ? kNobody : (route & ~EP_DEVICE_ROUTE_AGAIN) >> 16;

        return lane == (uint32_t)__ffs(__match_any_sync(kAll, rank)) - 1 ? rank : kNobody;
    }
    return ranks_of(route) >> lane & 1 ? lane : kNobody;
}

/* A warp: which term it is that comes to this lane, in the order of ranks; all: mask of lanes that something comes to. */
__device__ inline uint32_t term_of_lane(uint32_t peer, uint32_t all)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t at = 0;

    if constexpr (kNet) {
        const uint32_t rank = all >> lane & 1 ? peer : kNobody;

#pragma unroll
        for (uint32_t k = 0; k < EP_MAX_TOP_K; k++)
            at += __shfl_sync(kAll, rank, k) < rank;
        return at;
    }
    return __popc(all & ((1u << lane) - 1));
}

/* A lane: until a partial from another node is there. */
__device__ inline bool await_row(const ep_ll_args &a, Op *op, uint32_t peer, uint32_t place)
{
    const uint32_t *number = number_in(a, box_of(a, *op, a.rank, peer), place);
    const auto released = [&] { return has_released(a, *op, peer); };
    const Wait end = wait_for(
        a, *op, peer, [&] { return released() && acquire_u32(number) == op->wire; }, /* partner: end_push */
        [&] { return looks_back(a, peer, tells(a)) || released(); });

    if (end != Wait::there) {
        miss(a, op, peer, end, EP_WAIT_ARRIVAL);
        fence_gpu(); /* release; partner: arrive(), which the clerk does when it has heard of this warp */
    }
    return end == Wait::there;
}

/* A warp: the partials of token t are the terms, in the order of ranks.  Those that come in packets are still to be awaited. */
__device__ inline void find_partials(const ep_ll_args &a, Op *op, uint32_t t, int32_t route, Terms *terms)
{
    const uint32_t peer = peer_of_lane(route);
    bool comes = peer != kNobody && has(op->members, peer) && !has(op->missed, peer);
    const bool far = comes && is_far(a, peer);
    const uint32_t place = far ? kept_slot(a, t * a.top_k + threadIdx.x % 32) : t;

    if (far)
        comes = await_row(a, op, peer, place);
    const uint32_t all = __ballot_sync(kAll, comes), at = term_of_lane(peer, all);

    if (comes) {
        terms->row[at] = partial_at(a, *op, a.rank, peer, place);
        terms->rank[at] = peer;
    }
    if (threadIdx.x % 32 == 0)
        terms->n = __popc(all);
    __syncwarp();
}

constexpr uint32_t kPartials = 4; /* that a warp has under way */

/* A lane's piece of a packet of a row, as it is where it does not travel in packets. */
__device__ inline Vec load_piece(const ep_ll_args &a, const uint8_t *row, uint32_t packet)
{
    const uint32_t piece = packet * EP_PACKET_PIECES + threadIdx.x % 32;

    return piece < a.row_bytes / 16 ? load_row(row + (uint64_t)piece * 16) : Vec{};
}

/* A warp: the packet of the terms j, j + 1, ... */
__device__ inline void load_packets(const ep_ll_args &a, const Op &op, const Terms &terms, uint32_t j, uint32_t packet,
                                    Vec *v)
{
#pragma unroll
    for (uint32_t k = 0; k < kPartials; k++) {
        if (j + k >= terms.n)
            break;
        if (is_far(a, terms.rank[j + k]))
            v[k] = pack(load_piece(a, terms.row[j + k], packet), op.wire);
        else
            v[k] = load_packet(terms.row[j + k] + (uint64_t)packet * EP_PACKET_BYTES);
    }
}

/* A warp: bit k: v[k] is not there. */
__device__ inline uint32_t missing_of(const Op &op, const Terms &terms, uint32_t j, const Vec *v)
{
    uint32_t missing = 0;

#pragma unroll
    for (uint32_t k = 0; k < kPartials; k++)
        if (j + k < terms.n && !is_numbered(v[k], op.wire))
            missing |= 1u << k;
    return __reduce_or_sync(kAll, missing);
}

constexpr uint32_t kLate = 16; /* bits from there on: those that are late, of terms that are not waited for any longer */

/* A warp that has looked for long: bits of the terms j, j + 1, ... that it waits for no longer, of those that are missing.
 * Which may have sent all that they will by now; that is there when it looks again. */
__device__ inline uint32_t give_up(const ep_ll_args &a, Op *op, const Terms &terms, uint32_t j, uint32_t missing)
{
    uint32_t ended = 0;

    if (threadIdx.x % 32 == 0)
#pragma unroll 1
        for (; missing; missing &= missing - 1) {
            const uint32_t k = __ffs(missing) - 1, rank = terms.rank[j + k];

            if (load_u64(&a.state->from[rank]) > op->number || has_released(a, *op, rank))
                ended |= 1u << k;
            else if (is_late(*op) || is_forsaken(a))
                ended |= 1u << k | 1u << k << kLate;
        }
    fence_sys(); /* acquire: what they did before */
    return __shfl_sync(kAll, ended, 0);
}

/* A warp: the terms j + k of bits k are not in the sum. */
__device__ inline void miss_terms(const ep_ll_args &a, Op *op, const Terms &terms, uint32_t j, uint32_t bits, uint32_t late)
{
    const uint32_t lane = threadIdx.x % 32;

    if (bits >> lane & 1) {
        miss(a, op, terms.rank[j + lane], late >> lane & 1 ? Wait::late : Wait::gone, EP_WAIT_ARRIVAL);
        fence_gpu(); /* as in await_row() */
    }
    __syncwarp();
}

/* A warp: the packet of the terms j, j + 1, ... until they are in v, or missed.  Returns bits of those that are there. */
__device__ inline uint32_t await_packets(const ep_ll_args &a, Op *op, const Terms &terms, uint32_t j, uint32_t packet, Vec *v)
{
    uint32_t awaited = (1u << min(terms.n - j, kPartials)) - 1, ended = 0, missing;

    load_packets(a, *op, terms, j, packet, v);
#pragma unroll 1
    for (uint32_t look = 1; (missing = missing_of(*op, terms, j, v) & awaited) != 0; look++) {
        if (missing & ended) {
            miss_terms(a, op, terms, j, missing & ended, ended >> kLate);
            awaited &= ~(missing & ended);
        }
        if (look % kLooks == 0)
            ended |= give_up(a, op, terms, j, missing & awaited);
        load_packets(a, *op, terms, j, packet, v);
    }
    if (!op->whole) {
        fence_sys(); /* acquire; partner: store_packet */
        __syncwarp();
        load_packets(a, *op, terms, j, packet, v);
    }
    return awaited;
}

template <class T> __device__ inline void add(const Vec &v, float *sum)
{
    float x[Format<T>::n];

    Format<T>::decode(v, x);
    for (uint32_t e = 0; e < Format<T>::n; e++)
        sum[e] += x[e];
}

/* A warp: the packet of the sum of the terms and the bias, to the row at `to`.  One term is a copy, bit for bit.  come() when all
 * of it is there that comes. */
template <class T, class Come>
__device__ inline void sum_packet(const ep_ll_args &a, Op *op, const Terms &terms, uint32_t packet, const uint8_t *bias,
                                  uint8_t *to, Come come)
{
    const uint32_t lane = threadIdx.x % 32, piece = packet * EP_PACKET_PIECES + lane;
    bool copies = terms.n == 1 && !bias;
    float sum[Format<T>::n] = {};
    Vec v[kPartials];
    uint32_t j = 0;

#pragma unroll 1
    do {
        const uint32_t there = await_packets(a, op, terms, j, packet, v);

        if (j + kPartials >= terms.n)
            come();
#pragma unroll
        for (uint32_t k = 0; k < kPartials; k++)
            if (there >> k & 1)
                add<T>(v[k], sum);
        copies = copies && there;
        j += kPartials;
    } while (j < terms.n);
    if (bias)
        add<T>(pack(load_piece(a, bias, packet), 0), sum);
    const Vec out = unpack(copies ? v[0] : Format<T>::encode(sum));

    if (lane < EP_PACKET_PIECES && piece < a.row_bytes / 16)
        store_row(to + (uint64_t)piece * 16, out);
}

/*
 * Packets of the tokens' sums, a warp's each, or as many as come to it one after the other: so it finds the terms of a token
 * once.  They are counted from the last block, as rows are from the first: with small batches no block has both.
 */
__device__ inline uint32_t sums_of_warp(const ep_ll_args &a)
{
    return (a.tokens * ep_packets(a.row_bytes) + a.blocks * kWarps - 1) / (a.blocks * kWarps);
}
__device__ inline uint32_t first_sum(const ep_ll_args &a)
{
    return ((a.blocks - 1 - blockIdx.x) * kWarps + threadIdx.x / 32) * sums_of_warp(a);
}

/* All warps, each its packets; the clerk does arrives() when the block has nothing more to wait for. */
template <class T, class Arrives>
__device__ inline void sum_partials(const ep_ll_args &a, Op *op, int32_t route, Terms *terms, uint32_t *through,
                                    Arrives arrives)
{
    const uint32_t packets = ep_packets(a.row_bytes), sums = a.tokens * packets;
    const auto waits_no_more = [&] {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            atomicAdd(through, 1);
        if (!is_clerk())
            return;
        while (!__all_sync(kAll, peek(through) == kWarps))
            ;
        arrives();
    };

    const uint32_t first = first_sum(a), end = min(first + sums_of_warp(a), sums);

    if (first >= end)
        waits_no_more();
#pragma unroll 1
    for (uint32_t i = first; i < end; i++) {
        const uint32_t t = i / packets, packet = i % packets;
        const uint64_t row = (uint64_t)t * a.row_bytes;

        if (i == first || packet == 0) {
            if (i != first)
                route = load_route(a, t);
            __syncwarp(); /* the terms before are done with */
            find_partials(a, op, t, route, terms);
        }
        sum_packet<T>(a, op, *terms, packet, a.bias ? a.bias + row : nullptr, a.out + row, [&] {
            if (i + 1 == end)
                waits_no_more();
        });
    }
}

/* ---- the op -------------------------------------------------------------------------------- */

/* Warp 0 of each block.  All that is to be known is read at once: one round trip to memory.  Returns EP_OK
 * when the handle's dispatch can be combined; a bank that was given up may be another's by now. */
__device__ inline int32_t begin(const ep_ll_args &a, Op *op, uint32_t *excluded)
{
    const struct ep_device_handle *h = &a.state->handles[a.handle];
    const uint64_t number = load_u64(&a.state->number), n = load_u64(&h->number), combined = load_u64(&h->combined);
    const uint32_t generation = load_u32(&h->generation), tokens = load_u32(&h->tokens);
    const uint32_t layout = load_u32(&h->layout), routed = load_u32(&h->routed);
    const uint64_t timeout_ns = load_u64(&a.state->timeout_ns), from = kNet ? 0 : from_of_lane(a);
    const uint64_t whole = load_u64(&a.state->whole_lines);

    *excluded = kNet ? 0 : load_u32(&h->excluded[0]);
    op_begin(a, op, n, timeout_ns, [&](uint32_t r) { return (kNet ? load_u64(&a.state->from[r]) : from) <= n; });
    op->whole = whole != 0;
    if (!n || generation != a.generation || number - n >= a.banks || !routed || layout != a.layout
        || tokens != a.tokens || (a.phases & EP_LL_SEND && combined == n))
        return EP_STALE_HANDLE;
    return anybody(a, op->members) ? EP_OK : EP_DETACHED;
}

__device__ inline void finish(const ep_ll_args &a, const Op &op, int32_t status)
{
    __shared__ struct ep_device_scratch s;

    read_scratch(a, &s);
    clear_scratch(a, &s);
    if (status == EP_OK && !anybody_counted_in(a, op, s))
        status = EP_DETACHED;
    op_record(a, op, s, EP_DEVICE_COMBINE, status);
}

template <class T> __device__ __forceinline__ void run(const ep_ll_args &a)
{
    __shared__ Terms terms[kWarps];
    __shared__ Op op;
    __shared__ int32_t begun;
    __shared__ uint32_t through; /* warps that wait for nothing more */
    const int32_t route = load_route(a, first_sum(a) / ep_packets(a.row_bytes));
    uint32_t excluded;

    if (threadIdx.x < 32) {
        const int32_t status = begin(a, &op, &excluded);

        if (threadIdx.x == 0) {
            begun = status;
            through = 0;
        }
    }
    __syncthreads();
    if (begun == EP_OK && a.phases & EP_LL_SEND)
        push_partials<T>(a, op, excluded, terms);
    Arrival arrival;
    const auto arrives = [&] { arrive(a, op, tells(a), &arrival); };

    if (begun == EP_OK && a.phases & EP_LL_RECEIVE) {
        sum_partials<T>(a, &op, route, &terms[threadIdx.x / 32], &through, arrives);
    } else if (is_clerk()) {
        arrives();
    }
    if (is_clerk() && was_last(a, arrival))
        finish(a, op, begun);
}

/* ---- a handle is given up --------------------------------------------------------------------- */

/* Warp 0 of one block. */
__device__ inline void release(const ep_ll_args &a)
{
    struct ep_device_handle *h = &a.state->handles[a.handle];

    if (h->generation != a.generation)
        return;
    if (h->number && a.state->number - h->number < a.banks)
        give_credit(a, h->number);
    __syncwarp();
    if (threadIdx.x == 0)
        h->number = h->routed = 0;
}

} // namespace combine
} // namespace ep

#endif
