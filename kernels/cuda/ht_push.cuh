/* ht_push.cuh: the sending half of an HT dispatch: a warp takes a token's row to each of its ranks. */
#ifndef EP_HT_PUSH_CUH
#define EP_HT_PUSH_CUH

#include "ht_exchange.cuh"

namespace ep {
namespace ht {

using Grants = struct ep_net_grants;

/* ---- where a token goes ------------------------------------------------------------------------ */

/* Of the present token, a warp's: lane k has choice k, lane d what goes to rank d. */
struct Token {
    uint32_t t;
    int32_t route;        /* choice */
    uint32_t place;       /* choice: its row at its rank when that is packed */
    float weight;
    uint32_t to;          /* mask */
    uint32_t slot;        /* rank: among all that its source sends there */
    uint32_t routes;      /* rank: choices there */
    uint8_t *out, *scales; /* rank: where its row goes */
};

/* Lane k has choice k of a token: what is known of it before anybody has granted anything. */
using Choice = struct ep_net_choice;

__device__ inline Choice own_choice(const ep_ht_args &a, const Grants &g, uint32_t t)
{
    const uint32_t lane = threadIdx.x % 32, i = t * a.top_k + lane;
    Choice c = { -1, 0, 0, 0 };

    if (lane >= a.top_k)
        return c;
    c.route = __ldcg(a.routing + i);
    if (c.route < 0 || !(g.mask >> rank_of(c.route) & 1))
        return c;
    c.weight = __ldcg(a.weights + i);
    c.slot = __ldcg(a.slots + i);
    if (has_row(c.route) && (g.bits[rank_of(c.route)] & EP_HT_GRANT_PACKED || far_of(a) >> rank_of(c.route) & 1))
        c.index = __ldcg(a.index + i);
    return c;
}

/* Lane k choice k.  False: its rank did not grant it a row. */
__device__ inline bool place_choice(const ep_ht_args &a, const Grants &g, const Choice &c, uint32_t *place)
{
    *place = 0;
    if (c.route < 0 || !(g.mask >> rank_of(c.route) & 1) || far_of(a) >> rank_of(c.route) & 1)
        return true;
    const uint32_t r = rank_of(c.route);

    if (has_row(c.route) && g.bits[r] & EP_HT_GRANT_PACKED) {
        const uint32_t *granted = (const uint32_t *)g.expert + 2 * (r * a.local_experts + (c.route & 0xffff));

        *place = granted[0] + c.index;
        if (c.index >= granted[1])
            return false;
    }
    return c.slot < g.rows[r];
}

/* Of so many choices.  refused: mask of the ranks that did not grant it all. */
__device__ inline Token find_token(const ep_ht_args &a, const Grants &g, uint32_t t, uint32_t choices, const Choice &c,
                                   uint32_t *refused)
{
    const uint32_t lane = threadIdx.x % 32;
    Token token = { t, c.route, 0, c.weight, 0, 0, 0, nullptr, nullptr };
    const bool granted = place_choice(a, g, c, &token.place);
    uint64_t row = 0;

    *refused = __reduce_or_sync(kAll, granted ? 0 : 1u << rank_of(token.route));
    token.to = __reduce_or_sync(kAll, token.route >= 0 ? 1u << rank_of(token.route) : 0) & ~*refused;
#pragma unroll 1
    for (uint32_t k = 0; k < choices; k++) {
        const int32_t route = __shfl_sync(kAll, token.route, k);
        const uint32_t place = __shfl_sync(kAll, token.place, k), at = __shfl_sync(kAll, c.slot, k);
        const bool same = token.route >= 0 && (token.route & ~EP_DEVICE_ROUTE_AGAIN) == route;

        if (same && lane > k)
            token.place = place; /* named again: the row of the first time */
        if (route < 0 || rank_of(route) != lane)
            continue;
        if (token.routes++ == 0) {
            token.slot = at;
            row = g.bits[lane] & EP_HT_GRANT_PACKED ? place : g.row[lane] + at;
        }
    }
    if ((token.to & g.mask & ~far_of(a)) >> lane & 1) {
        token.out = (uint8_t *)g.out[lane] + row * a.row_bytes;
        token.scales = (uint8_t *)g.scales[lane] + row * a.row_scales * a.scale_bytes;
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
__device__ inline void push_plain(const ep_ht_args &a, const uint8_t *row, const uint8_t *scales, const Token &token,
                                  uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16;

    walk_row(row, pieces, [&](uint32_t at, const Vec *v) {
        each_rank(a, to, [&](uint32_t d) {
            store_pieces((uint8_t *)__shfl_sync(kAll, (uint64_t)token.out, d), at, pieces, v);
        });
    });
    if (a.row_scales == 0)
        return;
    each_rank(a, to, [&](uint32_t d) {
        uint8_t *there = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.scales, d);

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

template <Cast C> __device__ inline void push_cast(const ep_ht_args &a, const Token &token, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16, at_once = 32 * kPieces<C>;

#pragma unroll 1
    for (uint32_t pass = 0; pass * at_once < pieces; pass++) {
        CastRow<C> row;

        load_cast<C>(a, token.t, pass, &row);
        each_rank(a, to, [&](uint32_t d) {
            uint8_t *there = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.out, d);
            uint8_t *scales = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.scales, d);

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

/* ---- records ---------------------------------------------------------------------------------------------- */

#if EP_LL_NET
/* Of a token, lane g: what goes to gate g, to its box and there. */
struct Record {
    uint32_t gates; /* mask */
    uint32_t i;     /* which record */
    uint8_t *at;
};

/* The row is written with the others', so it is a place of the token's too. */
__device__ inline Record find_record(const ep_ht_args &a, const Grants &g, const Box &box, Token *token)
{
    const uint32_t lane = threadIdx.x % 32, *slots = node_slots(a, a.handle);
    const uint32_t to = __reduce_or_sync(kAll, token->route >= 0 ? 1u << rank_of(token->route) : 0) & far_of(a);
    const uint32_t slot = to && lane < a.top_k && token->route >= 0 ? __ldcg(slots + token->t * a.top_k + lane) : 0;
    Record record = { gates_of(a, to) & g.gates, 0, nullptr };

#pragma unroll 1
    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t route = __shfl_sync(kAll, token->route, k);
        const uint32_t i = __shfl_sync(kAll, slot, k);

        if (route >= 0 && to >> rank_of(route) & 1 && gate_of(a, rank_of(route)) == lane)
            record.i = i;
    }
    if (record.gates >> lane & 1) {
        record.at = item_out(a, box, box_for(a, lane), record.i);
        token->out = record.at + ep_net_record_head(a.max_top_k);
        token->scales = token->out + a.row_bytes;
    }
    return record;
}

/* What stands before the row. */
__device__ inline void write_records(const ep_ht_args &a, const Op &op, const Token &token, const Choice &c,
                                     const Record &record)
{
    const uint32_t lane = threadIdx.x % 32;

    each_rank(a, record.gates, [&](uint32_t gate) {
        uint8_t *at = (uint8_t *)__shfl_sync(kAll, (uint64_t)record.at, gate);
        const bool there = c.route >= 0 && far_of(a) >> rank_of(c.route) & 1 && gate_of(a, rank_of(c.route)) == gate;
        const Vec v = { { there ? (uint32_t)c.route : kAll, __float_as_uint(c.weight), c.slot, c.index } };

        if (lane < a.max_top_k)
            store_row(at + sizeof(struct ep_net_record) + lane * sizeof v, v);
        if (lane == 0)
            store_row(at, tagged(token.t, 0, op.tag));
    });
}
#endif

/* ---- all tokens ----------------------------------------------------------------------------------------- */

template <Cast C> __device__ inline void push_token(const ep_ht_args &a, const Op &op, const Grants &g, uint32_t t)
{
    uint32_t refused;
    const Choice choice = own_choice(a, g, t);
    Token token = find_token(a, g, t, a.top_k, choice, &refused);
    const uint32_t lane = threadIdx.x % 32, to = open_of(a, op, token.to & g.mask & ~far_of(a));
    const uint32_t unsent = refused | (token.to & ~to & ~(g.mask & far_of(a)));
    uint32_t room = __ballot_sync(kAll, to >> lane & 1 && g.bits[lane] & EP_HT_GRANT_ROOM);

    if (unsent && lane == 0)
        atomicOr(&run_of(a).unsent, unsent);
#if EP_LL_NET
    const Box box = records_of(a);
    const Record record = find_record(a, g, box, &token);

    write_records(a, op, token, choice, record);
    room |= record.gates;
#endif
    if constexpr (C == Cast::none)
        push_plain(a, a.x + (uint64_t)t * a.row_bytes, a.x_scales + (uint64_t)t * a.row_scales * a.scale_bytes, token,
                   room);
    else
        push_cast<C>(a, token, room);
    push_headers(a, op, g, token, to);
#if EP_LL_NET
    if (record.gates >> lane & 1) /* behind the fence for headers */
        count_item(a, box, lane, record.i);
#endif
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
