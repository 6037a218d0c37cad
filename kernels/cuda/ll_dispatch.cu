/*
 * LL dispatch: one-sided push of each token, once per destination rank, then rows to their experts as they
 * land.  ll_device.cuh has the protocol.
 *
 * Who does what: each token belongs to a block, counted from the end.  The block finds where the token goes
 * and in which slot (the tokens before it that go there too), pushes the row and then its header.  The counts
 * per expert for rank d are made by one of the very last blocks.  As receivers, blocks take the rows (slot,
 * source) in turn from the beginning, the first slots of all sources first, as those land first.  So with
 * small batches no block has two things to do.
 */
#include "ll_device.cuh"

namespace ep {
namespace {

constexpr uint32_t kNoPlace = 0xffffffffu; /* in a row's places: this choice is not here */
constexpr uint32_t kVecs = 4; /* 16 byte pieces of a row that a thread has under way */

enum class Cast { none, bf16, fp16, fp32 }; /* to fp8, from */

/* One block's view of the batch. */
struct Batch {
    int32_t *route; /* [T * k] in shared memory, as device_state.h has them */
    /* of the present token */
    uint32_t *slot;  /* [R] */
    uint32_t *index; /* [k] */
    float *weight;   /* [k] */
    uint32_t *to;    /* the ranks it goes to */
};

/* ---- routing ----------------------------------------------------------------------- */

__device__ int32_t route_of(const ep_ll_args &a, int64_t expert, uint32_t token)
{
    uint32_t rank, local;

    if (expert == -1)
        return -1;
    if (expert < 0 || expert >= a.experts)
        return kBadRoute;
    const uint32_t e = (uint32_t)expert;

    if (a.home_first) {
        const uint32_t first = a.home_first[e], homes = a.home_first[e + 1] - first;
        const uint32_t home = first + (a.rank + token) % homes;

        rank = a.home_rank[home];
        local = a.home_local[home];
    } else {
        const uint32_t end = a.larger * (a.share + 1);

        rank = e < end ? e / (a.share + 1) : a.larger + (e - end) / a.share;
        local = e < end ? e % (a.share + 1) : (e - end) % a.share;
    }
    return (int32_t)(rank << 16 | local);
}

__device__ int64_t choice(const ep_ll_args &a, uint32_t i)
{
    return a.index_bytes == 4 ? ((const int32_t *)a.topk)[i] : ((const int64_t *)a.topk)[i];
}

constexpr uint32_t kRouters = kThreads - 32; /* all but the first warp */
constexpr uint32_t kChoices = 5;             /* that a thread has under way: 128 tokens of 8 at once */

/* Choices i, i + kRouters ... of one thread; all of them are asked for before one is used. */
__device__ void read_some(const ep_ll_args &a, int32_t *route, uint32_t i, uint32_t n)
{
    int64_t asked[kChoices];

#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++) {
        const uint32_t at = i + j * kRouters;

        if (at < n)
            asked[j] = a.cached ? a.routing[at] : choice(a, at);
    }
#pragma unroll
    for (uint32_t j = 0; j < kChoices; j++) {
        const uint32_t at = i + j * kRouters;

        if (at < n)
            route[at] = a.cached ? (int32_t)asked[j] : route_of(a, asked[j], at / a.top_k);
    }
}

/* The first n choices of the batch; meanwhile() is what the first warp does. */
template <class Meanwhile>
__device__ void read_routes(const ep_ll_args &a, int32_t *route, uint32_t n, Meanwhile meanwhile)
{
    if (threadIdx.x < 32)
        meanwhile();
    else
        for (uint32_t i = threadIdx.x - 32; i < n; i += kChoices * kRouters)
            read_some(a, route, i, n);
    __syncthreads();
    if (a.cached)
        return;
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
        const uint32_t first = i / a.top_k * a.top_k;
        const int32_t mine = route[i];
        bool again = false;

        for (uint32_t j = first; j < i; j++)
            again |= (route[j] & ~EP_DEVICE_ROUTE_AGAIN) == mine;
        if (again && mine >= 0)
            route[i] = mine | EP_DEVICE_ROUTE_AGAIN; /* nobody looks at this bit here */
    }
    __syncthreads();
}

__device__ bool has_row(int32_t route) { return route >= 0 && !(route & EP_DEVICE_ROUTE_AGAIN); }
__device__ uint32_t rank_of(int32_t route) { return (uint32_t)(route & ~EP_DEVICE_ROUTE_AGAIN) >> 16; }

/* Ranks that token t goes to. */
__device__ uint32_t ranks_of(const ep_ll_args &a, const int32_t *route, uint32_t t)
{
    uint32_t mask = 0;

    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t r = route[t * a.top_k + k];

        if (r >= 0)
            mask |= 1u << rank_of(r);
    }
    return mask;
}

/* Warp 0: lane r adds up how many of the tokens [from, to) go to rank r. */
__device__ uint32_t count_tokens(const ep_ll_args &a, const int32_t *route, uint32_t from, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t count = 0;

    for (uint32_t at = from; at < to; at += 32) {
        const uint32_t mask = at + lane < to ? ranks_of(a, route, at + lane) : 0;

        for (uint32_t r = 0; r < a.ranks; r++) {
            const uint32_t goes = __popc(__ballot_sync(kAll, mask >> r & 1));

            count += lane == r ? goes : 0;
        }
    }
    return count;
}

/* A warp: how many of the first n choices name the same expert, with a row. */
__device__ uint32_t count_same(const int32_t *route, uint32_t n, int32_t same)
{
    const uint32_t lane = threadIdx.x % 32, whole = n / 4 * 4;
    uint32_t count = 0;

    for (uint32_t i = lane * 4; i < whole; i += 128) {
        const int4 r = *(const int4 *)(route + i);

        count += (r.x == same) + (r.y == same) + (r.z == same) + (r.w == same);
    }
    if (lane < n - whole)
        count += route[whole + lane] == same;
    return __reduce_add_sync(kAll, count);
}

/* ---- rows ----------------------------------------------------------------------------- */

/* Pieces of a row as they travel: piece i of this thread's is kThreads * i + threadIdx.x. */
template <Cast C> struct Row {
    Vec piece[kVecs];
    float scale[kVecs]; /* of the piece's block, with a cast */
};

__device__ inline float amax_of(float amax, float x)
{
    const uint32_t u = __float_as_uint(x) & 0x7fffffffu;

    return u > 0x7f800000u ? amax : fmaxf(amax, __uint_as_float(u)); /* NaN does not count */
}

template <Cast C> __device__ void decode(const Vec *from, float *x)
{
    if constexpr (C == Cast::fp32) {
        for (uint32_t i = 0; i < 16; i++)
            x[i] = __uint_as_float(from[i / 4].w[i % 4]);
    } else {
        for (uint32_t i = 0; i < 16; i++) {
            const uint16_t bits = (uint16_t)(from[i / 8].w[i % 8 / 2] >> (i % 2 * 16));

            if constexpr (C == Cast::bf16)
                x[i] = __uint_as_float((uint32_t)bits << 16);
            else
                x[i] = __half2float(__ushort_as_half(bits));
        }
    }
}

/* 16 elements to 16 bytes, with the scale of the 128 that 8 neighbouring threads have. */
template <Cast C> __device__ void quantise(const Vec *from, bool there, Vec *piece, float *scale)
{
    float x[16], amax = 0;

    if (there)
        decode<C>(from, x);
    for (uint32_t i = 0; there && i < 16; i++)
        amax = amax_of(amax, x[i]);
    for (uint32_t step = 1; step < 8; step *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, step));
    *scale = amax == 0 ? 1.0f : amax / 448.0f;
    const float inverse = __frcp_rn(*scale);
    /* Scales of which there is no inverse are those of blocks that are next to nothing. */
    const auto scaled = [&](float value) { return isinf(inverse) ? __fdiv_rn(value, *scale) : value * inverse; };

    for (uint32_t i = 0; there && i < 16; i += 4) {
        const auto two = [&](uint32_t j) {
            return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(scaled(x[j]), scaled(x[j + 1])),
                                                      __NV_SATFINITE, __NV_E4M3);
        };

        piece->w[i / 4] = two(i) | two(i + 2) << 16;
    }
}

/* Pieces [pass * kVecs * kThreads, ...) of token t; every thread of a warp must come here. */
template <Cast C> __device__ void load_token(const ep_ll_args &a, uint32_t t, uint32_t pass, Row<C> *row)
{
    const uint32_t pieces = a.row_bytes / 16;
    constexpr uint32_t kIn = C == Cast::none ? 1 : C == Cast::fp32 ? 4 : 2; /* 16 bytes of input per piece */
    const uint8_t *x = a.x + (uint64_t)t * pieces * kIn * 16;

#pragma unroll
    for (uint32_t i = 0; i < kVecs; i++) {
        const uint32_t p = (pass * kVecs + i) * kThreads + threadIdx.x;

        if constexpr (C == Cast::none) {
            if (p < pieces)
                row->piece[i] = load_row(x + (uint64_t)p * 16);
        } else {
            Vec in[kIn];

            for (uint32_t j = 0; j < kIn && p < pieces; j++)
                in[j] = load_row(x + ((uint64_t)p * kIn + j) * 16);
            quantise<C>(in, p < pieces, &row->piece[i], &row->scale[i]);
        }
    }
}

template <Cast C>
__device__ void push_pieces(const ep_ll_args &a, const Op &op, const Row<C> &row, uint32_t pass, uint32_t d,
                            uint32_t slot)
{
    const uint32_t pieces = a.row_bytes / 16;
    uint8_t *to = item_at(a, d, op.bank, a.bank.rows, a.rank, slot, a.row_bytes);
    float *scales = (float *)item_at(a, d, op.bank, a.bank.scales, a.rank, slot, a.scales_bytes);

#pragma unroll
    for (uint32_t i = 0; i < kVecs; i++) {
        const uint32_t p = (pass * kVecs + i) * kThreads + threadIdx.x;

        if (p >= pieces)
            continue;
        store_row(to + (uint64_t)p * 16, row.piece[i]);
        if (C != Cast::none && p % 8 == 0)
            scales[p / 8] = row.scale[i];
    }
}

/* ---- sending ---------------------------------------------------------------------------- */

/* Weight of choice threadIdx.x of token t. */
__device__ float load_weight(const ep_ll_args &a, uint32_t t)
{
    const float *weights = a.cached ? a.weights : a.topk_weights;

    return weights && threadIdx.x < a.top_k ? weights[t * a.top_k + threadIdx.x] : 1.0f;
}

/* Slots and indexes of token t; *counted: tokens that this block has counted, lane r of warp 0 has the sum. */
__device__ void place_token(const ep_ll_args &a, const Batch &b, uint32_t t, uint32_t to, uint32_t *counted,
                            uint32_t *sum)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp == 0) {
        *sum += count_tokens(a, b.route, *counted, t);
        *counted = t;
        b.slot[lane] = *sum;
        if (to >> lane & 1)
            b.to[__popc(to & ((1u << lane) - 1))] = lane;
    }
    for (uint32_t k = kWarps - 1 - warp; k < a.top_k; k += kWarps) { /* warp 0 has done some work already */
        const int32_t r = b.route[t * a.top_k + k];
        const uint32_t index = r < 0 ? 0 : count_same(b.route, t * a.top_k, r & ~EP_DEVICE_ROUTE_AGAIN);

        if (lane == 0)
            b.index[k] = index;
    }
}

/* The headers of token t for the ranks in `to`, after the rows: a thread per 16 bytes. */
__device__ void push_headers(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t t, uint32_t to)
{
    const uint32_t parts = a.max_top_k + 1;

    for (uint32_t i = threadIdx.x; i < __popc(to) * parts; i += kThreads) {
        const uint32_t d = b.to[i / parts], part = i % parts, k = part - 1;
        uint8_t *header = item_at(a, d, op.bank, a.bank.headers, a.rank, b.slot[d], a.header_bytes);
        Vec v = { { 0, 0, 0, op.wire } };

        if (part == 0) {
            v.w[0] = t;
            for (uint32_t j = 0; j < a.top_k; j++) {
                const int32_t r = b.route[t * a.top_k + j];

                v.w[1] += r >= 0 && rank_of(r) == d;
            }
        } else {
            const int32_t r = k < a.top_k ? b.route[t * a.top_k + k] : -1;
            const bool here = r >= 0 && rank_of(r) == d;

            v.w[0] = here ? (uint32_t)r & 0xffff : kAll;
            if (here) {
                v.w[1] = __float_as_uint(b.weight[k]);
                v.w[2] = b.index[k];
            }
        }
        fence_sys(); /* release; partner: take_header, find_term */
        store_vec(header + part * 16u, v);
    }
}

/* fp8 that came with scales. */
__device__ void push_scales(const ep_ll_args &a, const Op &op, uint32_t t, uint32_t d, uint32_t slot)
{
    float *to = (float *)item_at(a, d, op.bank, a.bank.scales, a.rank, slot, a.scales_bytes);

    for (uint32_t i = threadIdx.x; i < a.row_scales; i += kThreads)
        to[i] = a.x_scales[(uint64_t)t * a.row_scales + i];
}

/* The row of token t to the ranks in `to`, the next rank first so that not all push to the same one. */
template <Cast C>
__device__ void push_row(const ep_ll_args &a, const Op &op, const Batch &b, Row<C> &row, uint32_t t, uint32_t to)
{
    const uint32_t passes = (a.row_bytes / 16 + kVecs * kThreads - 1) / (kVecs * kThreads);

    for (uint32_t pass = 0; pass < passes; pass++) {
        if (pass > 0)
            load_token<C>(a, t, pass, &row);
        for (uint32_t i = 1; i <= a.ranks; i++) {
            const uint32_t d = a.rank + i < a.ranks ? a.rank + i : a.rank + i - a.ranks;

            if (!(to >> d & 1))
                continue;
            push_pieces<C>(a, op, row, pass, d, b.slot[d]);
            if (C == Cast::none && a.row_scales && pass == 0)
                push_scales(a, op, t, d, b.slot[d]);
        }
    }
}

/* Does rank d, which takes part from `from` on, owe us no credit for number n? */
__device__ bool has_credit(const ep_ll_args &a, uint64_t n, uint64_t from, uint64_t credit)
{
    return n <= a.banks || from > n - a.banks || credit >= n - a.banks;
}

/* Warp 0 waits until each of the ranks takes number n in its bank. */
__device__ void wait_credit(const ep_ll_args &a, Op *op, uint32_t ranks)
{
    const uint32_t lane = threadIdx.x;

    if (ranks >> lane & 1) {
        const uint64_t *credit = credit_at(a, a.rank, lane, bank_of(a, op->number)), *from = &a.state->from[lane];
        const Wait end = wait_for(a, *op, lane, [&] {
            return has_credit(a, op->number, load_u64(from), acquire_u64(credit)); /* partner: give_credit */
        });

        if (end != Wait::there)
            miss(a, op, lane, end, EP_WAIT_CREDIT);
    }
    __syncwarp();
}

/* What this rank sends to rank d in all.  The numbers come with it, so nothing has to be fenced. */
__device__ void push_counts(const ep_ll_args &a, const Op &op, const Batch &b, uint32_t *count, uint32_t d)
{
    uint8_t *to = counts_at(a, d, op.bank, a.rank);
    __shared__ uint32_t tokens;

    for (uint32_t l = threadIdx.x; l < a.local_experts; l += kThreads)
        count[l] = 0;
    if (threadIdx.x == 0)
        tokens = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.tokens * a.top_k; i += kThreads)
        if (has_row(b.route[i]) && rank_of(b.route[i]) == d)
            atomicAdd(&count[b.route[i] & 0xffff], 1);
    for (uint32_t t = threadIdx.x; t < a.tokens; t += kThreads)
        if (ranks_of(a, b.route, t) >> d & 1)
            atomicAdd(&tokens, 1);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.counts_bytes / sizeof(Vec); i += kThreads) {
        Vec v = { { 0, 0, 0, op.wire } };

        for (uint32_t j = 0; j < kCountsInVec; j++) {
            const uint32_t value = i * kCountsInVec + j;

            if (value <= a.local_experts)
                v.w[j] = value == 0 ? tokens : count[value - 1];
        }
        store_vec(to + i * sizeof(Vec), v); /* partner: take_counts */
    }
    if (threadIdx.x == 0 && d != a.rank)
        atomicAdd((unsigned long long *)&a.state->scratch.wire_bytes,
                  (unsigned long long)tokens * (a.row_bytes + a.row_scales * sizeof(float)));
    __syncthreads();
}

/* The routing to the handle, for its combine and for cached dispatches; and what goes to nobody. */
__device__ void keep_routing(const ep_ll_args &a, const Op &op, const Batch &b)
{
    uint32_t dropped = 0;

    for (uint32_t i = threadIdx.x; i < a.tokens * a.top_k; i += kThreads) {
        const int32_t r = b.route[i];

        dropped += r == kBadRoute || (r >= 0 && !(op.members >> rank_of(r) & 1));
        if (!a.cached) {
            a.routing[i] = r;
            a.weights[i] = a.topk_weights ? a.topk_weights[i] : 1.0f;
        }
    }
    dropped = __reduce_add_sync(kAll, dropped);
    if (threadIdx.x % 32 == 0 && dropped)
        atomicAdd((unsigned long long *)&a.state->scratch.dropped, dropped);
}

/* This block's part of the sending, once it is fetched. */
template <Cast C> struct Part {
    uint32_t t0;      /* its first token; not below a.tokens: none */
    bool counts;      /* it makes counts for some rank */
    float weight;
    Row<C> row;       /* the first pieces of t0's */
};

/* Tokens are counted from the last block, after those that make counts.  The first warp does meanwhile(). */
template <Cast C, class Meanwhile>
__device__ void fetch(const ep_ll_args &a, const Batch &b, Part<C> *part, Meanwhile meanwhile)
{
    const uint32_t blocks = gridDim.x, from_end = blocks - 1 - blockIdx.x;

    part->counts = from_end < a.ranks;
    part->t0 = (from_end + blocks - a.ranks % blocks) % blocks;
    if (part->t0 < a.tokens) {
        load_token<C>(a, part->t0, 0, &part->row);
        part->weight = load_weight(a, part->t0);
    }
    if (part->counts)
        read_routes(a, b.route, a.tokens * a.top_k, meanwhile);
    else if (part->t0 < a.tokens)
        read_routes(a, b.route, (part->t0 + (a.tokens - 1 - part->t0) / blocks * blocks + 1) * a.top_k, meanwhile);
    else if (threadIdx.x < 32)
        meanwhile();
}

/* To the ranks in `ranks`. */
template <Cast C>
__device__ void send(const ep_ll_args &a, Op *op, const Batch &b, Part<C> &part, uint32_t *count, uint32_t ranks)
{
    const uint32_t blocks = gridDim.x, from_end = blocks - 1 - blockIdx.x;
    uint32_t counted = 0, sum = 0;

    if (!part.counts && part.t0 >= a.tokens)
        return;
    if (op->lacking & ranks) {
        if (threadIdx.x < 32)
            wait_credit(a, op, op->lacking & ranks);
        __syncthreads();
    }
    for (uint32_t d = from_end; d < a.ranks; d += blocks)
        if ((ranks & ~op->missed) >> d & 1)
            push_counts(a, *op, b, count, d);
    if (from_end == 0 && ranks == op->members) /* not again for those who have just joined */
        keep_routing(a, *op, b);
    for (uint32_t t = part.t0; t < a.tokens; t += blocks) {
        const uint32_t to = ranks_of(a, b.route, t) & ranks & ~op->missed;

        place_token(a, b, t, to, &counted, &sum);
        if (t != part.t0) {
            load_token<C>(a, t, 0, &part.row);
            part.weight = load_weight(a, t);
        }
        if (threadIdx.x < a.top_k)
            b.weight[threadIdx.x] = part.weight;
        __syncthreads();
        push_row<C>(a, *op, b, part.row, t, to);
        __syncthreads();
        push_headers(a, *op, b, t, to);
        __syncthreads();
    }
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Warp 0: whoever has joined since the op began is a member too, and is to get his part. */
__device__ uint32_t newcomers(const ep_ll_args &a, const Op &op)
{
    if (!(a.phases & EP_LL_SEND) || !op.members)
        return 0;
    asm volatile("fence.sc.sys;" : : : "memory"); /* `begun` is out; partner: the server's write of `from` */
    return __ballot_sync(kAll, from_of_lane(a) <= op.number) & ~op.members;
}

/* All warps but the first: what each source sends, once it has told, to rows[s] and base[l * R + s]. */
__device__ void take_counts(const ep_ll_args &a, Op *op, uint32_t *rows, uint32_t *base)
{
    const uint32_t vecs = a.counts_bytes / sizeof(Vec);

    for (uint32_t i = threadIdx.x - 32; i < a.ranks * vecs; i += kThreads - 32) {
        const uint32_t s = i / vecs, at = i % vecs;
        Vec v = { { 0, 0, 0, 0 } };

        if (op->members >> s & 1) {
            const uint8_t *from = counts_at(a, a.rank, op->bank, s) + at * sizeof(Vec);
            const Wait end = wait_for(a, *op, s, [&] {
                v = load_vec(from); /* partner: push_counts */
                return v.w[3] == op->wire;
            });

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

__device__ bool look_at_header(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot, Header *h)
{
    const uint32_t lane = threadIdx.x;
    const uint8_t *header = item_at(a, a.rank, op.bank, a.bank.headers, s, slot, a.header_bytes);

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
__device__ void take_header(const ep_ll_args &a, Op *op, const uint32_t *base, const uint32_t *total,
                            const uint32_t *first, uint32_t s, uint32_t slot, Header h, Places *places)
{
    const uint32_t lane = threadIdx.x, k = lane - 1;
    uint32_t *kept = (uint32_t *)item_at(a, a.rank, op->bank, a.bank.places, s, slot, a.places_bytes);
    const bool route = lane >= 1 && lane <= a.max_top_k;

    if (!h.there) {
        const Wait end = wait_for(a, *op, s, [&] { return look_at_header(a, *op, s, slot, &h); });

        if (end != Wait::there)
            miss(a, op, s, end, EP_WAIT_ARRIVAL);
    }
    const bool there = __all_sync(kAll, h.there);
    const uint32_t l = route ? h.v.w[0] : kAll, index = h.v.w[2];
    const bool here = there && l < a.local_experts && index < rows_between(a, base, total, l, s);
    const uint64_t at = here ? block_of(a, first, l) + base[l * a.ranks + s] + index : kNoPlace;
    bool again = false; /* an expert that was named before has its row already */

    for (uint32_t j = 1; j <= a.max_top_k; j++)
        again |= __shfl_sync(kAll, l, j) == l && j < lane;
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

/* The row to its places, and what stands beside it. */
__device__ void place_row(const ep_ll_args &a, const Op &op, uint32_t s, uint32_t slot, const Places &places)
{
    const uint32_t pieces = a.row_bytes / 16, n = places.n;
    const uint8_t *row = item_at(a, a.rank, op.bank, a.bank.rows, s, slot, a.row_bytes);
    const float *scales = (const float *)item_at(a, a.rank, op.bank, a.bank.scales, s, slot, a.scales_bytes);

    for (uint32_t at = threadIdx.x; at < pieces; at += kVecs * kThreads) {
        Vec v[kVecs];

#pragma unroll
        for (uint32_t i = 0; i < kVecs; i++)
            if (at + i * kThreads < pieces)
                v[i] = load_row(row + (uint64_t)(at + i * kThreads) * 16);
        for (uint32_t j = 0; j < n; j++) {
            uint8_t *to = a.out + places.at[j] * a.row_bytes;

#pragma unroll
            for (uint32_t i = 0; i < kVecs; i++)
                if (at + i * kThreads < pieces)
                    store_row(to + (uint64_t)(at + i * kThreads) * 16, v[i]);
        }
    }
    for (uint32_t i = threadIdx.x; i < a.row_scales; i += kThreads) {
        const float scale = __ldcg(scales + i);

        for (uint32_t j = 0; j < n; j++)
            a.out_scales[places.at[j] * a.row_scales + i] = scale;
    }
    if (threadIdx.x < n && a.sources)
        a.sources[places.at[threadIdx.x]] = { s, places.token };
}

__device__ void zero_row(const ep_ll_args &a, uint64_t at)
{
    const Vec zero = { { 0, 0, 0, 0 } };

    for (uint32_t p = threadIdx.x; p < a.row_bytes / 16; p += kThreads)
        store_row(a.out + at * a.row_bytes + (uint64_t)p * 16, zero);
    for (uint32_t i = threadIdx.x; i < a.row_scales; i += kThreads)
        a.out_scales[at * a.row_scales + i] = 0;
}

/* Packed: rows between one expert's last and the next one's first. */
__device__ void zero_padding(const ep_ll_args &a, Share share, const uint32_t *total, const uint32_t *first)
{
    for (uint32_t l = share.part; l < a.local_experts; l += share.parts)
        for (uint32_t at = first[l] + total[l]; at < first[l + 1]; at++)
            zero_row(a, at);
}

__device__ void write_expert_counts(const ep_ll_args &a, const uint32_t *total, const uint32_t *first,
                                    uint64_t spanned)
{
    uint32_t sum = 0;

    for (uint32_t l = threadIdx.x; l < a.local_experts; l += kThreads) {
        a.counts[l] = (int32_t)total[l];
        sum += total[l];
    }
    for (uint32_t l = threadIdx.x; a.layout == EP_LAYOUT_PACKED && l <= a.local_experts; l += kThreads)
        a.offsets[l] = (int32_t)first[l];
    sum = __reduce_add_sync(kAll, sum);
    if (a.layout == EP_LAYOUT_EXPERT_MAJOR && threadIdx.x % 32 == 0)
        atomicAdd((unsigned long long *)&a.state->scratch.rows, sum);
    else if (a.layout == EP_LAYOUT_PACKED && threadIdx.x == 0)
        a.state->scratch.rows = spanned;
}

/* The rows of this block: slots in turn, all sources of a slot together.  The first at or after item i. */
struct Item {
    uint32_t i, s, slot;
    bool there;
};

__device__ Item next_item(const ep_ll_args &a, const uint32_t *rows, uint32_t i, uint32_t step)
{
    uint32_t most = 0;

    for (uint32_t s = 0; s < a.ranks; s++)
        most = max(most, rows[s]);
    for (; i < most * a.ranks; i += step)
        if (i / a.ranks < rows[i % a.ranks])
            return { i, i % a.ranks, i / a.ranks, true };
    return { i, 0, 0, false };
}

/* Does last() with warp 0 when no more has to be waited for: the row in hand is still on its way then. */
template <class Last>
__device__ void receive_by_expert(const ep_ll_args &a, Op *op, Share share, Header header, const uint32_t *rows,
                                  uint32_t *base, uint32_t *total, uint32_t *first, Last last)
{
    const uint64_t spanned = place_rows(a, rows, base, total, first);
    __shared__ Places places;
    Item item = next_item(a, rows, share.part, share.parts);

    if (share.part == share.parts / 2)
        write_expert_counts(a, total, first, spanned);
    if (spanned > a.out_rows) {
        if (share.part == share.parts / 2 && threadIdx.x == 0) {
            a.state->scratch.overflow = 1;
            a.state->scratch.rows_needed = spanned;
        }
        item.there = false;
    } else if (a.layout == EP_LAYOUT_PACKED) {
        zero_padding(a, share, total, first);
    }
    header.there = header.there && item.i == share.part; /* it was fetched for the first one */
    while (item.there) {
        const Item next = next_item(a, rows, item.i + share.parts, share.parts);

        if (threadIdx.x < 32)
            take_header(a, op, base, total, first, item.s, item.slot, header, &places);
        __syncthreads();
        if (places.there)
            place_row(a, *op, item.s, item.slot, places);
        if (!next.there)
            break;
        __syncthreads();
        header.there = false;
        item = next;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        last();
}

__device__ void write_rank_counts(const ep_ll_args &a, const uint32_t *rows)
{
    if (threadIdx.x >= a.ranks)
        return;
    a.counts[threadIdx.x] = (int32_t)rows[threadIdx.x];
    atomicAdd((unsigned long long *)&a.state->scratch.rows, rows[threadIdx.x]);
}

/* Rank-major rows stay where they are: a thread per 16 bytes of header waits for it. */
__device__ void receive_in_place(const ep_ll_args &a, Op *op, const uint32_t *rows)
{
    const uint32_t parts = a.max_top_k + 1;
    uint32_t most = 0;

    for (uint32_t s = 0; s < a.ranks; s++)
        most = max(most, rows[s]);
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < most * a.ranks * parts; i += gridDim.x * kThreads) {
        const uint32_t part = i % parts, s = i / parts % a.ranks, slot = i / parts / a.ranks;
        const uint64_t at = (uint64_t)s * a.max_tokens + slot;
        Vec v;

        if (slot >= rows[s])
            continue;
        const uint8_t *header = item_at(a, a.rank, op->bank, a.bank.headers, s, slot, a.header_bytes);
        const Wait end = wait_for(a, *op, s, [&] {
            v = load_vec(header + part * 16u);
            return v.w[3] == op->wire;
        });

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
    /* Who reads the rows comes later in the stream, and starts with nothing cached. */
    if (tells())
        write_rank_counts(a, rows);
}

/*
 * The last block, when a source was lost or late.  Blocks may have disagreed on whether it had come, and so
 * on where rows lie: this one does it all again without the source.  What counts has come already.
 */
__device__ void receive_again(const ep_ll_args &a, Op *op, uint32_t *rows, uint32_t *base, uint32_t *total,
                              uint32_t *first)
{
    const uint32_t missing = a.state->scratch.gone | a.state->scratch.late;

    if (threadIdx.x == 0) {
        const uint64_t all = a.state->left_before + gridDim.x - 1; /* but this one */

        op->members &= ~missing;
        a.state->scratch.rows = a.state->scratch.rows_needed = a.state->scratch.overflow = 0;
        while (acquire_u64(&a.state->left) < all) /* they wait for nobody any more; partner: leave */
            ;
    }
    __syncthreads();
    if (threadIdx.x >= 32)
        take_counts(a, op, rows, base);
    __syncthreads();
    if (by_expert(a))
        receive_by_expert(a, op, { 0, 1 }, {}, rows, base, total, first, [] {});
    else
        write_rank_counts(a, rows);
    __syncthreads();
}

/* One thread: this block has written its rows. */
__device__ void leave(const ep_ll_args &a)
{
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(&a.state->left) : "memory");
}

/* ---- the kernel -------------------------------------------------------------------------- */

/* Warp 0 of each block, while the others read routes.  All that it has to know is asked for at once: one round
 * trip to memory. */
__device__ void begin(const ep_ll_args &a, Op *op)
{
    const uint32_t lane = threadIdx.x;
    const bool sends = a.phases & EP_LL_SEND;
    const struct ep_device_handle *h = &a.state->handles[a.handle];
    const uint64_t number = load_u64(&a.state->number), held = load_u64(&h->number);
    const uint32_t generation = load_u32(&h->generation);
    const uint64_t timeout_ns = load_u64(&a.state->timeout_ns), from = from_of_lane(a);
    uint64_t credits[EP_MAX_LL_BANKS], credit = 0;

    for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
        credits[i] = lane < a.ranks && i < a.banks ? load_u64(credit_at(a, a.rank, lane, i)) : 0;

    const uint64_t n = sends ? number + 1 : held;

    if (sends && lane == 0)
        atomicMax((unsigned long long *)&a.state->begun, (unsigned long long)n);
    op_begin(a, op, n, __ballot_sync(kAll, from <= n), timeout_ns);
    for (uint32_t i = 0; i < EP_MAX_LL_BANKS; i++)
        credit = i == bank_of(a, n) ? credits[i] : credit;
    /* Partner: give_credit.  No store of ours is issued before the load that it depends on has returned. */
    const uint32_t lacking = __ballot_sync(kAll, from <= n && !has_credit(a, n, from, credit));

    if (lane == 0) {
        op->lacking = lacking & op->members;
        op->valid = sends || (held && generation == a.generation && number - held < a.banks);
    }
    __syncwarp();
}

/* The bank's last owner, and what the handle held: given up if they were not combined.  Warp 0 of one block,
 * of one that has little else to do. */
__device__ void give_up_old(const ep_ll_args &a, uint64_t n)
{
    const uint64_t held = a.state->handles[a.handle].number;

    if (held && held + a.banks > n)
        give_credit(a, held);
    if (n > a.banks)
        give_credit(a, n - a.banks);
}

/* Warp 0 of the last block.  The handle belongs to this number from here on. */
__device__ void finish(const ep_ll_args &a, const Op &op)
{
    __shared__ struct ep_device_scratch s;
    struct ep_device_handle *h = &a.state->handles[a.handle];

    take_scratch(a, &s);
    if (threadIdx.x == 0)
        a.state->left_before += gridDim.x;
    const int32_t status = !op.members ? EP_DETACHED : s.overflow ? EP_OVERFLOW : EP_OK;

    if (threadIdx.x == 0) {
        const bool routed = a.phases & EP_LL_RECEIVE && status == EP_OK && !s.late;

        a.state->number = a.phases & EP_LL_SEND ? op.number : a.state->number;
        *h = { op.number, 0, a.generation, a.tokens, a.top_k, a.layout, a.alignment, a.wire_dtype, routed, s.gone };
    }
    op_record(a, op, s, EP_DEVICE_DISPATCH, status);
}

/* Warp 0 of the last block: a send-only op's handle has lost its bank meanwhile. */
__device__ void refuse(const ep_ll_args &a, const Op &op)
{
    __shared__ struct ep_device_scratch s;

    take_scratch(a, &s);
    if (threadIdx.x == 0)
        a.state->left_before += gridDim.x;
    op_record(a, op, s, EP_DEVICE_DISPATCH, EP_STALE_HANDLE);
}

template <Cast C> __global__ void __launch_bounds__(kThreads, kBlocks) dispatch(const __grid_constant__ ep_ll_args a)
{
    extern __shared__ uint32_t shared[];
    __shared__ uint32_t slot[EP_DEVICE_MAX_RANKS], to[EP_DEVICE_MAX_RANKS], index[EP_MAX_TOP_K];
    __shared__ uint32_t rows[EP_DEVICE_MAX_RANKS], joined;
    __shared__ float weight[EP_MAX_TOP_K];
    __shared__ Op op;
    const uint32_t wide = max(a.max_tokens * a.max_top_k, a.local_experts * a.ranks);
    uint32_t *base = shared, *total = shared + wide, *first = total + a.local_experts;
    const Batch batch = { (int32_t *)shared, slot, index, weight, to };
    const bool sends = a.phases & EP_LL_SEND;
    Part<C> part;
    const auto open = [&] {
        begin(a, &op);
        if (sends && tells())
            give_up_old(a, op.number);
    };

    if (sends)
        fetch<C>(a, batch, &part, open);
    else if (threadIdx.x < 32)
        open();
    __syncthreads();
    if (!op.valid) {
        if (threadIdx.x < 32 && arrive(a, false))
            refuse(a, op);
        if (threadIdx.x == 0)
            leave(a);
        return;
    }
    const uint64_t start = tells() ? now_ns() : 0;
    const bool receives = a.phases & EP_LL_RECEIVE, told = tells() || gridDim.x - 1 - blockIdx.x < a.ranks;
    uint32_t ranks = op.members;
    Header header = {};
    __shared__ uint32_t counted, again;

    do {
        if (sends && ranks != op.members)
            fetch<C>(a, batch, &part, [] {}); /* counts have been where the routes were */
        if (sends)
            send<C>(a, &op, batch, part, total, ranks);
        if (threadIdx.x == 0)
            counted = again = 0;
        __syncthreads();
        if (threadIdx.x >= 32) {
            if (receives)
                take_counts(a, &op, rows, base);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                atomicAdd(&counted, 1);
        } else {
            const uint32_t some = newcomers(a, op);

            if (threadIdx.x == 0)
                joined = some;
            /* The first row's header mostly comes with the counts. */
            if (receives && by_expert(a) && blockIdx.x / a.ranks < a.max_tokens)
                while (!__all_sync(kAll, look_at_header(a, op, blockIdx.x % a.ranks, blockIdx.x / a.ranks, &header))
                       && *(volatile uint32_t *)&counted < kWarps - 1)
                    ;
        }
        __syncthreads();
        ranks = joined;
        if (ranks | op.missed) {
            __syncthreads();
            if (threadIdx.x == 0)
                op.members |= ranks;
            if (threadIdx.x < a.ranks && op.missed >> threadIdx.x & 1)
                rows[threadIdx.x] = 0;
            __syncthreads();
        }
    } while (ranks);
    if (tells() && threadIdx.x == 0)
        a.state->scratch.wait_ns = now_ns() - start;

    const auto last = [&] {
        if (!arrive(a, told))
            return;
        if (receives && (a.state->scratch.gone | a.state->scratch.late)) {
            if (threadIdx.x == 0)
                again = 1;
        } else {
            finish(a, op);
        }
    };

    if (receives && by_expert(a)) {
        receive_by_expert(a, &op, { blockIdx.x, gridDim.x }, header, rows, base, total, first, last);
    } else {
        if (receives)
            receive_in_place(a, &op, rows);
        __syncthreads();
        if (threadIdx.x < 32)
            last();
    }
    __syncthreads();
    if (again) {
        receive_again(a, &op, rows, base, total, first);
        if (threadIdx.x < 32)
            finish(a, op);
    }
    if (threadIdx.x == 0)
        leave(a);
}

Kernel kernel_of(const ep_ll_args &a)
{
    if (a.wire_dtype == a.input_dtype)
        return dispatch<Cast::none>;
    switch (a.input_dtype) {
    case EP_BF16: return dispatch<Cast::bf16>;
    case EP_FP16: return dispatch<Cast::fp16>;
    default:      return dispatch<Cast::fp32>;
    }
}

} // namespace

int dispatch_prepare(uint32_t shared_bytes, uint32_t *blocks_per_sm)
{
    return fit({ dispatch<Cast::none>, dispatch<Cast::bf16>, dispatch<Cast::fp16>, dispatch<Cast::fp32> },
               shared_bytes, blocks_per_sm);
}

} // namespace ep

extern "C" int ep_ll_dispatch(const struct ep_ll_args *args, uint32_t blocks, uint32_t shared_bytes, void *stream)
{
    ep::kernel_of(*args)<<<blocks, ep::kThreads, shared_bytes, (cudaStream_t)stream>>>(*args);
    return cudaGetLastError();
}
