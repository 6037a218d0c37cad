/* ht_push.cuh: the sending half of an HT dispatch: a warp takes a token's row to each of its ranks on this node. */
#ifndef EP_HT_PUSH_CUH
#define EP_HT_PUSH_CUH

#include "ht_exchange.cuh"

namespace ep {
namespace ht {

using Grants = struct ep_net_grants;

/* ---- where a token goes ------------------------------------------------------------------------ */

/* Of the present token, a warp's: lane k has choice k.  What goes to a rank has the lane of the first choice there. */
struct Token {
    uint32_t t;
    int32_t route;
    uint32_t rank;         /* kNobody: none */
    uint32_t place;        /* its row at its rank when that is packed */
    float weight;
    uint32_t slot;         /* of the token among all that its source sends there */
    uint32_t firsts;       /* mask of lanes: the first choices of their ranks */
    uint32_t routes;       /* choices of its rank */
    bool granted;          /* the rank is on this node, and has granted places */
    uint8_t *out, *scales; /* first choice: where the row goes */
};

/* Lane k has choice k of a token: what is known of it before anybody has granted anything. */
using Choice = struct ep_net_choice;

/* Has it granted places?  Or, on another node, is it sent records? */
__device__ inline bool is_granted(const ep_ht_args &a, const Grants &g, uint32_t rank)
{
    return !is_far(a, rank) && g.mask >> place_at(a, rank) & 1;
}
__device__ inline bool is_through(const ep_ht_args &a, const Op &op, uint32_t rank)
{
#if EP_LL_NET
    return is_far(a, rank) && has(net_of(a)->through, rank) && has(op.members, rank);
#else
    return false;
#endif
}

/* Of token t.  goes(rank): is it known where; is_indexed(rank): and among the rows of the expert? */
template <class Goes, class Indexed>
__device__ inline Choice own_choice(const ep_ht_args &a, uint32_t t, Goes goes, Indexed is_indexed)
{
    const uint32_t lane = threadIdx.x % 32, i = t * a.top_k + lane;
    Choice c = { -1, 0, 0, 0 };

    if (lane >= a.top_k)
        return c;
    c.route = __ldcg(a.routing + i);
    if (c.route < 0)
        return c;
    const uint32_t rank = rank_of(c.route);

    if (!goes(rank))
        return c;
    c.weight = __ldcg(a.weights + i);
    c.slot = __ldcg(a.slots + i);
    if (has_row(c.route) && is_indexed(rank))
        c.index = __ldcg(a.index + i);
    return c;
}

/* Lane k choice k.  False: its rank did not grant it a row. */
__device__ inline bool place_choice(const ep_ht_args &a, const Grants &g, Token *token, uint32_t index)
{
    if (!token->granted)
        return true;
    const uint32_t place = place_at(a, token->rank);

    if (has_row(token->route) && g.bits[place] & EP_HT_GRANT_PACKED) {
        const uint32_t *granted =
            (const uint32_t *)g.expert + 2 * (place * a.local_experts + (token->route & 0xffff));

        token->place = granted[0] + index;
        if (index >= granted[1])
            return false;
    }
    return token->slot < g.rows[place];
}

/* refused: mask of lanes, first choices of the ranks that did not grant it all. */
__device__ inline Token find_token(const ep_ht_args &a, const Grants &g, uint32_t t, const Choice &c, uint32_t *refused)
{
    const uint32_t lane = threadIdx.x % 32;
    const bool named = c.route >= 0;
    Token token = { t, c.route, named ? rank_of(c.route) : kNobody, 0, c.weight, c.slot, 0, 0, false, nullptr, nullptr };

    token.granted = named && is_granted(a, g, token.rank);
    const bool placed = place_choice(a, g, &token, c.index);
    const uint32_t same = __match_any_sync(kAll, token.rank), unplaced = __ballot_sync(kAll, !placed);
    const uint32_t again = __match_any_sync(kAll, named ? token.route & ~EP_DEVICE_ROUTE_AGAIN : -1);
    const bool first = named && lane == (uint32_t)__ffs(same) - 1;

    token.place = __shfl_sync(kAll, token.place, __ffs(again) - 1); /* named again: the row of the first time */
    token.routes = __popc(same);
    *refused = __ballot_sync(kAll, first && same & unplaced);
    token.firsts = __ballot_sync(kAll, first) & ~*refused;
    if (token.granted && token.firsts >> lane & 1) {
        const uint32_t at = place_at(a, token.rank);
        const uint64_t row = g.bits[at] & EP_HT_GRANT_PACKED ? token.place : (uint64_t)g.row[at] + token.slot;

        token.out = (uint8_t *)g.out[at] + row * a.row_bytes;
        token.scales = (uint8_t *)g.scales[at] + row * a.row_scales * a.scale_bytes;
    }
    return token;
}

/* Of those, the ones whose ranks are here and still take it. */
__device__ inline uint32_t open_of(const ep_ht_args &a, const Op &op, const Token &token)
{
    const uint32_t lane = threadIdx.x % 32;

    return __ballot_sync(kAll, token.firsts >> lane & 1 && token.granted && is_open(a, op, token.rank));
}
/* Of these, the ones that have room for the row. */
__device__ inline uint32_t roomy_of(const ep_ht_args &a, const Grants &g, const Token &token, uint32_t open)
{
    return __ballot_sync(kAll, open >> threadIdx.x % 32 & 1 && g.bits[place_at(a, token.rank)] & EP_HT_GRANT_ROOM);
}

/* ---- rows ------------------------------------------------------------------------------------------ */

/* fn(lane) for those of the mask. */
template <class Fn> __device__ inline void each_lane(uint32_t mask, Fn fn)
{
#pragma unroll 1
    for (; mask; mask &= mask - 1)
        fn((uint32_t)__ffs(mask) - 1);
}

/* As it is. */
__device__ inline void push_plain(const ep_ht_args &a, const uint8_t *row, const uint8_t *scales, const Token &token,
                                  uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, pieces = a.row_bytes / 16;

    walk_row(row, pieces, [&](uint32_t at, const Vec *v) {
        each_lane(to, [&](uint32_t first) {
            store_pieces((uint8_t *)__shfl_sync(kAll, (uint64_t)token.out, first), at, pieces, v);
        });
    });
    if (a.row_scales == 0)
        return;
    each_lane(to, [&](uint32_t first) {
        uint8_t *there = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.scales, first);

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
        each_lane(to, [&](uint32_t first) {
            uint8_t *there = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.out, first);
            uint8_t *scales = (uint8_t *)__shfl_sync(kAll, (uint64_t)token.scales, first);

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

template <Cast C> __device__ inline void push_row(const ep_ht_args &a, const Token &token, uint32_t to)
{
    const uint64_t t = token.t;

    if constexpr (C == Cast::none)
        push_plain(a, a.x + t * a.row_bytes, a.x_scales + t * a.row_scales * a.scale_bytes, token, to);
    else
        push_cast<C>(a, token, to);
}

/* ---- headers ------------------------------------------------------------------------------------------ */

/* Routes first, then, behind a fence, what says that the row is there. */
__device__ inline void push_headers(const ep_ht_args &a, const Op &op, const Grants &g, const Token &token, uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32;
    const bool goes = to >> lane & 1;
    uint8_t *header = goes ? header_at(a, token.rank, (uint64_t)g.row[place_at(a, token.rank)] + token.slot) : nullptr;

    each_lane(to, [&](uint32_t first) {
        uint8_t *there = (uint8_t *)__shfl_sync(kAll, (uint64_t)header, first);
        const bool here = token.rank == __shfl_sync(kAll, token.rank, first);
        const Vec v = { { here ? (uint32_t)token.route & 0xffff : kAll, here ? __float_as_uint(token.weight) : 0,
                          here ? token.place : 0, 0 } };

        if (lane < a.max_top_k)
            store_row(there + sizeof(struct ep_row_header) + lane * sizeof(struct ep_route), v);
    });
    __syncwarp();
    fence_sys(); /* release; partner: take_header */
    if (goes)
        store_vec(header, tagged(token.t, token.routes, op.tag));
}

/* ---- all tokens ----------------------------------------------------------------------------------------- */

template <Cast C> __device__ inline void push_token(const ep_ht_args &a, const Op &op, const Grants &g, uint32_t t)
{
    uint32_t refused;
    const Choice choice =
        own_choice(a, t, [&](uint32_t rank) { return is_granted(a, g, rank); },
                   [&](uint32_t rank) { return g.bits[place_at(a, rank)] & EP_HT_GRANT_PACKED; });
    const Token token = find_token(a, g, t, choice, &refused);
    const uint32_t lane = threadIdx.x % 32, to = open_of(a, op, token);

    if ((refused | (token.firsts & ~to)) >> lane & 1 && !is_through(a, op, token.rank))
        add(run_of(a).unsent, token.rank);
    push_row<C>(a, token, roomy_of(a, g, token, to));
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
