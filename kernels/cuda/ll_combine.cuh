/*
 * LL combine: each rank sums a token's rows over its own experts in fp32, rounds once and pushes the partial
 * to the token's source; the source sums partials in the order of ranks as they land.  ll_device.cuh has the
 * protocol.
 *
 * Rows are cut into parts that different blocks work on, each announced for itself: more under way when there
 * are few tokens.
 */
#ifndef EP_LL_COMBINE_CUH
#define EP_LL_COMBINE_CUH

#include "ll_device.cuh"

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
    float weight[EP_MAX_TOP_K];
};

/* 16 byte pieces [from, to) of a row. */
struct Range {
    uint32_t from, to;
};

__device__ inline Range range_of(const ep_ll_args &a, uint32_t part)
{
    const uint32_t pieces = a.row_bytes / 16, each = (pieces + EP_COMBINE_PARTS - 1) / EP_COMBINE_PARTS;

    return { min(part * each, pieces), min((part + 1) * each, pieces) };
}

/* kUnder pieces of a thread, from `at` on: terms j .. j + kTerms - 1 are fetched, then added in their order. */
template <class T, bool kWeighted, uint32_t kBy, uint32_t kUnder, uint32_t kTerms>
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
        const float weight = kWeighted && j + k < terms.n ? terms.weight[j + k] : 1.0f;

        if (j + k >= terms.n)
            break;
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++) {
            float x[Format<T>::n];

            Format<T>::decode(v[k][i], x);
            for (uint32_t e = 0; e < Format<T>::n; e++)
                sum[i][e] = kWeighted ? fmaf(weight, x[e], sum[i][e]) : sum[i][e] + x[e];
        }
    }
}

/* The first kBy threads: the sum of the terms to `to`.  One term with weight 1 is a copy, bit for bit. */
template <class T, bool kWeighted, uint32_t kBy>
__device__ inline void sum_rows(const Terms &terms, Range range, const uint8_t *bias, uint8_t *to)
{
    constexpr uint32_t kElements = Format<T>::n, kUnder = 2, kTerms = 4; /* what a thread has under way */
    const bool copies = terms.n == 1 && !bias && (!kWeighted || terms.weight[0] == 1.0f);

    for (uint32_t at = range.from + threadIdx.x; at < range.to; at += kUnder * kBy) {
        float sum[kUnder][kElements] = {};
        Vec v[kTerms][kUnder];

        for (uint32_t j = 0; j < terms.n; j += kTerms)
            add_terms<T, kWeighted, kBy, kUnder, kTerms>(terms, j, at, range.to, v, sum);
#pragma unroll
        for (uint32_t i = 0; i < kUnder; i++) {
            const uint64_t byte = (uint64_t)(at + i * kBy) * 16;

            if (at + i * kBy >= range.to)
                continue;
            if (bias) {
                float x[kElements];

                Format<T>::decode(load_row(bias + byte), x);
                for (uint32_t e = 0; e < kElements; e++)
                    sum[i][e] += x[e];
            }
            store_row(to + byte, copies ? v[0][i] : Format<T>::encode(sum[i]));
        }
    }
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

/* Partials that a block has pushed and not announced. */
constexpr uint32_t kUnannounced = 8;
struct Pushed {
    uint32_t n;
    uint32_t *number[kUnannounced];
};

/* A warp, when all have pushed: the partials are announced, after one fence. */
__device__ inline void announce(const Op &op, const Pushed &pushed)
{
    const uint32_t lane = threadIdx.x % 32;

    if (lane < pushed.n) {
        fence_sys(); /* release; partner: find_partials */
        store_u32(pushed.number[lane], op.wire);
    }
    __syncwarp();
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

template <class T>
__device__ inline void push_partial(const ep_ll_args &a, const Op &op, const Item &item, const Terms &terms,
                             Pushed *pushed)
{
    if (terms.token == kAll)
        return;
    const uint32_t at = is_far(a, item.s) ? item.slot : terms.token;

    sum_rows<T, true, kThreads>(terms, range_of(a, item.part), nullptr,
                                partial_at(a, op, item.s, a.rank, at));
    if (threadIdx.x == 0)
        pushed->number[pushed->n++] = number_at(a, op, item.s, a.rank, at, item.part);
}

/* The clerk, when all have pushed: warp 0 looks for peers' partials already.  The last block's gives the credit,
 * which for ranks on other nodes says that the partials are there. */
__device__ inline void end_push(const ep_ll_args &a, const Op &op, const Pushed &pushed, const uint32_t *rows)
{
    uint32_t before = 0;

    announce(op, pushed);
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
    __shared__ Pushed pushed;
    uint32_t *rows = rows_of_ranks();
    uint32_t under_way = 0;

    if (threadIdx.x < 32) {
        const Item item = item_of(a, blockIdx.x);
        Header header;

        pushed.n = 0;
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
        push_partial<T>(a, op, item, *terms, &pushed);
        if (++under_way % kUnannounced == 0) {
            __syncthreads();
            if (threadIdx.x < 32) {
                announce(op, pushed);
                if (threadIdx.x == 0)
                    pushed.n = 0;
            }
        }
    }
    __syncthreads();
    if (is_clerk())
        end_push(a, op, pushed, rows);
}

/* ---- summing them up -------------------------------------------------------------------- */

/* Warp 0: the ranks that token t went to, from the choice that each lane has. */
__device__ inline int32_t load_route(const ep_ll_args &a, uint32_t t)
{
    return t < a.tokens && threadIdx.x < a.top_k ? a.routing[t * a.top_k + threadIdx.x] : -1;
}
__device__ inline uint32_t ranks_of(int32_t route)
{
    return __reduce_or_sync(kAll, route >= 0 ? 1u << ((route & ~EP_DEVICE_ROUTE_AGAIN) >> 16) : 0);
}

/* Warp 0: the rank whose partial this lane waits for, kNobody: none.  Where each rank has a lane its own, else that of the
 * first choice there. */
__device__ inline uint32_t peer_of_lane(int32_t route)
{
    const uint32_t lane = threadIdx.x;

    if constexpr (kNet) {
        const uint32_t rank = route < 0 ? kNobody : (route & ~EP_DEVICE_ROUTE_AGAIN) >> 16;

        return lane == (uint32_t)__ffs(__match_any_sync(kAll, rank)) - 1 ? rank : kNobody;
    }
    return ranks_of(route) >> lane & 1 ? lane : kNobody;
}

/* Warp 0: which term it is that comes to this lane, in the order of ranks; all: mask of lanes that something comes to. */
__device__ inline uint32_t term_of_lane(uint32_t peer, uint32_t all)
{
    const uint32_t lane = threadIdx.x;
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

/* Warp 0: waits for a part of the partials of token t; those that come are the terms, in the order of ranks. */
__device__ inline void find_partials(const ep_ll_args &a, Op *op, uint32_t t, uint32_t part, int32_t route, Terms *terms)
{
    const uint32_t peer = peer_of_lane(route);
    bool comes = peer != kNobody && has(op->members, peer) && !has(op->missed, peer);

    const bool far = comes && is_far(a, peer);
    const uint32_t place = far ? kept_slot(a, t * a.top_k + threadIdx.x) : t;

    if (comes) {
        const uint32_t *number = number_at(a, *op, a.rank, peer, place, part);
        const auto released = [&] { return has_released(a, *op, peer); };
        const Wait end = wait_for(
            a, *op, peer,
            [&] { return (!far || released()) && acquire_u32(number) == op->wire; }, /* partner: push_partial */
            [&] { return looks_back(a, peer, far && tells(a)) || released(); });

        if (end != Wait::there)
            miss(a, op, peer, end, EP_WAIT_ARRIVAL);
        comes = end == Wait::there;
    }
    const uint32_t all = __ballot_sync(kAll, comes), at = term_of_lane(peer, all);

    if (comes)
        terms->row[at] = partial_at(a, *op, a.rank, peer, place);
    if (threadIdx.x == 0)
        terms->n = __popc(all);
    __syncwarp();
}

/* Parts of tokens are counted from the last block, as rows are from the first: with small batches no block
 * has both.  Does arrives() with the clerk when no more has to be waited for, beside the last sum. */
__device__ inline uint32_t first_sum(const ep_ll_args &a) { return a.blocks - 1 - blockIdx.x; }

template <class T, class Arrives>
__device__ inline void sum_partials(const ep_ll_args &a, Op *op, int32_t route, Terms *terms, Arrives arrives)
{
    const uint32_t sums = a.tokens * EP_COMBINE_PARTS;
    uint32_t i = first_sum(a);
    bool more = i < sums;

    if (!more && is_clerk())
        arrives();
    while (more) {
        const uint32_t t = i / EP_COMBINE_PARTS, part = i % EP_COMBINE_PARTS;
        const uint64_t row = (uint64_t)t * a.row_bytes;

        if (threadIdx.x < 32) {
            if (i != first_sum(a))
                route = load_route(a, t);
            find_partials(a, op, t, part, route, terms);
        }
        __syncthreads();
        i += a.blocks;
        more = i < sums;
        if (!is_clerk())
            sum_rows<T, false, kMovers>(*terms, range_of(a, part), a.bias ? a.bias + row : nullptr, a.out + row);
        else if (!more)
            arrives();
        if (more)
            __syncthreads(); /* the terms are done with */
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

    *excluded = kNet ? 0 : load_u32(&h->excluded[0]);
    op_begin(a, op, n, timeout_ns, [&](uint32_t r) { return (kNet ? load_u64(&a.state->from[r]) : from) <= n; });
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
    __shared__ Terms terms;
    __shared__ Op op;
    __shared__ int32_t begun;
    uint32_t excluded;
    int32_t route = -1;

    if (threadIdx.x < 32) {
        route = load_route(a, first_sum(a) / EP_COMBINE_PARTS);
        const int32_t status = begin(a, &op, &excluded);

        if (threadIdx.x == 0)
            begun = status;
    }
    __syncthreads();
    if (begun == EP_OK && a.phases & EP_LL_SEND)
        push_partials<T>(a, op, excluded, &terms);
    Arrival arrival;
    const auto arrives = [&] { arrive(a, op, tells(a), &arrival); };

    if (begun == EP_OK && a.phases & EP_LL_RECEIVE) {
        sum_partials<T>(a, &op, route, &terms, arrives);
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
