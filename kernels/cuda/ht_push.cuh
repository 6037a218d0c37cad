/* ht_push.cuh: the sending half of an HT dispatch: a warp takes a token's row to each of its ranks. */
#ifndef EP_HT_PUSH_CUH
#define EP_HT_PUSH_CUH

#include "ht_exchange.cuh"

namespace ep {
namespace ht {

/* What this rank was granted; in shared memory. */
struct Grants {
    uint32_t mask;
    uint32_t row[EP_DEVICE_MAX_RANKS], rows[EP_DEVICE_MAX_RANKS], bits[EP_DEVICE_MAX_RANKS];
    uint8_t *out[EP_DEVICE_MAX_RANKS], *scales[EP_DEVICE_MAX_RANKS]; /* at that rank */
};

/* All threads, when block 0 has taken them. */
__device__ inline void find_grants(const ep_ht_args &a, Grants *g)
{
    const uint32_t d = threadIdx.x;

    if (d < a.ranks) {
        const struct ep_device_ht_grant &granted = a.state->ht_grants[d];

        g->row[d] = granted.row;
        g->rows[d] = granted.rows;
        g->bits[d] = granted.bits;
        g->out[d] = a.window[d] + granted.out;
        g->scales[d] = a.window[d] + granted.scales;
    }
    if (d == 0)
        g->mask = load_u32(&run_of(a).granted);
    __syncthreads();
}

/* ---- where a token goes ------------------------------------------------------------------------ */

/* Of the present token, a warp's: lane k has choice k, lane d what goes to rank d. */
struct Token {
    uint32_t t;
    int32_t route;        /* choice */
    uint32_t place;       /* choice: its row at its rank when that is packed */
    float weight;
    uint32_t to;          /* mask */
    uint32_t slot;        /* rank: among all that this rank sends there */
    uint32_t row;         /* rank: of its `out` */
    uint32_t routes;      /* rank: choices there */
};

/* Lane k choice k.  False: its rank did not grant it a row. */
__device__ inline bool load_choice(const ep_ht_args &a, const Grants &g, uint32_t t, Token *token, uint32_t *slot)
{
    const uint32_t lane = threadIdx.x % 32, i = t * a.top_k + lane;

    token->t = t;
    token->route = -1;
    token->weight = 0;
    token->place = *slot = 0;
    if (lane >= a.top_k)
        return true;
    token->route = __ldcg(a.routing + i);
    if (token->route < 0 || !(g.mask >> rank_of(token->route) & 1))
        return true;
    const uint32_t r = rank_of(token->route);

    token->weight = __ldcg(a.weights + i);
    *slot = __ldcg(a.slots + i);
    if (has_row(token->route) && g.bits[r] & EP_HT_GRANT_PACKED) {
        const uint32_t *granted = a.granted + 2 * (r * a.local_experts + (token->route & 0xffff));
        const uint32_t index = __ldcg(a.index + i);

        token->place = granted[0] + index;
        if (index >= granted[1])
            return false;
    }
    return *slot < g.rows[r];
}

__device__ inline Token find_token(const ep_ht_args &a, const Grants &g, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t slot;
    Token token;
    const bool granted = load_choice(a, g, t, &token, &slot);
    const uint32_t refused = __reduce_or_sync(kAll, granted ? 0 : 1u << rank_of(token.route));

    token.to = __reduce_or_sync(kAll, token.route >= 0 ? 1u << rank_of(token.route) : 0);
    if (refused && lane == 0)
        atomicOr(&run_of(a).unsent, refused);
    token.to &= ~refused;
    token.slot = token.row = token.routes = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t route = __shfl_sync(kAll, token.route, k);
        const uint32_t place = __shfl_sync(kAll, token.place, k), at = __shfl_sync(kAll, slot, k);
        const bool same = token.route >= 0 && (token.route & ~EP_DEVICE_ROUTE_AGAIN) == route;

        if (same && lane > k)
            token.place = place; /* named again: the row of the first time */
        if (route < 0 || rank_of(route) != lane)
            continue;
        if (token.routes++ == 0) {
            token.slot = at;
            token.row = g.bits[lane] & EP_HT_GRANT_PACKED ? place : g.row[lane] + at;
        }
    }
    return token;
}

/* ---- rows ------------------------------------------------------------------------------------------ */

/* fn(d) for the ranks of the mask, the next rank first so that not all push to the same one. */
template <class Fn> __device__ inline void each_rank(const ep_ht_args &a, uint32_t mask, Fn fn)
{
    const uint32_t above = mask & ~((2u << a.rank) - 1);

#pragma unroll 1
    for (uint32_t rest = above; rest; rest &= rest - 1)
        fn(__ffs(rest) - 1);
#pragma unroll 1
    for (uint32_t rest = mask & ~above; rest; rest &= rest - 1)
        fn(__ffs(rest) - 1);
}

/* As it is. */
__device__ inline void push_plain(const ep_ht_args &a, const Grants &g, const Token &token, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16;

    walk_row(a.x + (uint64_t)token.t * a.row_bytes, pieces, [&](uint32_t at, const Vec *v) {
        each_rank(a, to, [&](uint32_t d) {
            store_pieces(g.out[d] + (uint64_t)__shfl_sync(kAll, token.row, d) * a.row_bytes, at, pieces, v);
        });
    });
    if (a.row_scales == 0)
        return;
    const uint32_t bytes = a.row_scales * a.scale_bytes;
    const uint8_t *scales = a.x_scales + (uint64_t)token.t * bytes;

    each_rank(a, to, [&](uint32_t d) {
        uint8_t *there = g.scales[d] + (uint64_t)__shfl_sync(kAll, token.row, d) * bytes;

        for (uint32_t i = lane; i < a.row_scales; i += 32)
            store_scale(a, there, i, load_scale(a, scales, i));
    });
}

/* A lane's part of a row on its way to fp8: piece i of a pass is 32 * (kPieces * pass + i) + lane. */
template <Cast C> struct CastRow {
    Vec v[kVecs];
    uint32_t scale[kPieces<C>];
};

template <Cast C>
__device__ inline void load_cast(const ep_ht_args &a, uint32_t t, uint32_t pass, CastRow<C> *row)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16;
    const uint8_t *x = a.x + (uint64_t)t * pieces * kIn<C> * 16;
    uint32_t most;

#pragma unroll
    for (uint32_t i = 0; i < kVecs; i++) {
        const uint32_t p = (pass * kPieces<C> + i / kIn<C>) * 32 + lane;

        row->v[i] = { { 0, 0, 0, 0 } };
        if (p < pieces)
            row->v[i] = load_row(x + ((uint64_t)p * kIn<C> + i % kIn<C>) * 16);
    }
    most = largest<C>(row->v);
    for (uint32_t step = 1; step < 8; step *= 2)
        most = larger<C>(most, __shfl_xor_sync(kAll, most, step));
#pragma unroll
    for (uint32_t i = 0; i < kPieces<C>; i++) {
        const float amax = largest_at<C>(most, i);
        const Scale scale = a.scale_bytes == 1 ? ue8m0_scale(amax) : fp32_scale(amax);

        row->v[i] = encode<C>(row->v + i * kIn<C>, scale);
        row->scale[i] = scale.stored;
    }
}

template <Cast C>
__device__ inline void push_cast(const ep_ht_args &a, const Grants &g, const Token &token, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16, at_once = 32 * kPieces<C>;

#pragma unroll 1
    for (uint32_t pass = 0; pass * at_once < pieces; pass++) {
        CastRow<C> row;

        load_cast<C>(a, token.t, pass, &row);
        each_rank(a, to, [&](uint32_t d) {
            const uint64_t at = __shfl_sync(kAll, token.row, d);
            uint8_t *there = g.out[d] + at * a.row_bytes, *scales = g.scales[d] + at * a.row_scales * a.scale_bytes;

#pragma unroll
            for (uint32_t i = 0; i < kPieces<C>; i++) {
                const uint32_t p = (pass * kPieces<C> + i) * 32 + lane;

                if (p >= pieces)
                    continue;
                store_row(there + (uint64_t)p * 16, row.v[i]);
                if (p % 8 == 0)
                    store_scale(a, scales, p / 8, row.scale[i]);
            }
        });
    }
}

/* ---- headers ------------------------------------------------------------------------------------------ */

/* Routes first, then, behind a fence, what says that the row is there. */
__device__ inline void push_headers(const ep_ht_args &a, const Op &op, const Grants &g, const Token &token, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32;

    each_rank(a, to, [&](uint32_t d) {
        const uint64_t row = (uint64_t)g.row[d] + __shfl_sync(kAll, token.slot, d);
        const bool here = token.route >= 0 && rank_of(token.route) == d;
        const Vec v = { { here ? (uint32_t)token.route & 0xffff : kAll, here ? __float_as_uint(token.weight) : 0,
                          here ? token.place : 0, 0 } };

        if (lane < a.max_top_k)
            store_row(header_at(a, d, row) + sizeof(struct ep_row_header) + lane * sizeof(struct ep_route), v);
    });
    __syncwarp();
    fence_sys(); /* release; partner: take_header */
    if (to >> lane & 1)
        store_vec(header_at(a, lane, (uint64_t)g.row[lane] + token.slot), tagged(token.t, token.routes, op.tag));
}

/* ---- all tokens ----------------------------------------------------------------------------------------- */

template <Cast C> __device__ inline void push_token(const ep_ht_args &a, const Op &op, const Grants &g, uint32_t t)
{
    const Token token = find_token(a, g, t);
    const uint32_t lane = threadIdx.x % 32, to = open_of(a, op, token.to & g.mask);
    const uint32_t room = __ballot_sync(kAll, to >> lane & 1 && g.bits[lane] & EP_HT_GRANT_ROOM);

    if (to != token.to && lane == 0)
        atomicOr(&run_of(a).unsent, token.to & ~to);
    if constexpr (C == Cast::none)
        push_plain(a, g, token, room);
    else
        push_cast<C>(a, g, token, room);
    push_headers(a, op, g, token, to);
}

/* A warp takes tokens that nobody has taken. */
template <Cast C> __device__ inline void push_tokens(const ep_ht_args &a, const Op &op, const Grants &g)
{
#pragma unroll 1
    for (;;) {
        const uint32_t t = take_work(&run_of(a).next_push);

        if (t >= a.tokens)
            break;
        push_token<C>(a, op, g, t);
    }
    pushed(a, op);
}

} // namespace ht
} // namespace ep

#endif
