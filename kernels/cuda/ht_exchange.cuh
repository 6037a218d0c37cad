/* ht_exchange.cuh: a dispatch's asks and grants, block 0's work. */
#ifndef EP_HT_EXCHANGE_CUH
#define EP_HT_EXCHANGE_CUH

#include "ht_ask.cuh"
#include "ht_count.cuh"

namespace ep {
namespace ht {

/* What ranks' ops must have in common. */
__device__ inline uint32_t traits_of(const ep_ht_args &a, uint32_t kind)
{
    return kind | a.wire_dtype << 8 | a.scale_format << 16;
}

/* Block 0's.  What it finds of each rank is the handle's at once: a.first, a.from, a.from_first, a.back. */
struct Exchange {
    uint32_t reached[kRankWords];    /* set: who can be sent anything */
    uint32_t given[kRankWords];      /* set: who is granted */
    uint32_t mismatched[kRankWords]; /* set: whose op is another one */
    uint64_t rows;                   /* that `out` is to have */
};

/* ---- asks -------------------------------------------------------------------------------- */

__device__ inline uint32_t ask_word(const ep_ht_args &a, const Exchange &x, uint32_t d, uint32_t word)
{
    const uint32_t l = word - EP_HT_ASK_EXPERTS;

    if (word == EP_HT_ASK_TRAITS)
        return traits_of(a, EP_OP_DISPATCH);
    if (!has(x.reached, d))
        return 0;
    switch (word) {
    case EP_HT_ASK_ROWS: return a.totals[d];
    case EP_HT_ASK_BACK: return a.first[d];
    case EP_HT_ASK_RECORDS: return records_to(a, d);
    }
    return word >= EP_HT_ASK_EXPERTS && l < a.local_experts ? a.totals[expert_column(a, d, l)] : 0;
}

__device__ inline void write_ask(const ep_ht_args &a, const Op &op, const Exchange &x, uint32_t d, uint32_t v)
{
    store_vec((is_far(a, d) ? far_ask_at(a, d) : note_at(a, kAsk, a.rank, d)) + v * sizeof(Vec),
              tagged(ask_word(a, x, d, 2 * v), ask_word(a, x, d, 2 * v + 1), op.tag));
}

/* Of this node. */
__device__ inline void ask_all(const ep_ht_args &a, const Op &op, const Exchange &x)
{
    const uint32_t vecs = note_vecs(a, kAsk);

    for (uint32_t i = threadIdx.x; i < nears_of(a) * vecs; i += kThreads) {
        const uint32_t d = near_at(a, i / vecs);

        if (has(op.members, d))
            write_ask(a, op, x, d, i % vecs);
    }
}

/* No source sends more than its tokens, and to an expert no more than that: a bound for whatever stands there. */
__device__ inline void keep_asked(const ep_ht_args &a, Exchange *x, uint32_t s, uint32_t word, uint32_t value)
{
    const uint32_t l = word - EP_HT_ASK_EXPERTS;

    if (word == EP_HT_ASK_TRAITS && value != traits_of(a, EP_OP_DISPATCH))
        add(x->mismatched, s);
    else if (word == EP_HT_ASK_ROWS)
        a.from[s] = min(value, a.max_tokens);
    else if (word == EP_HT_ASK_BACK)
        a.back[s] = value;
    else if (word == EP_HT_ASK_RECORDS)
        keep_records(a, s, value);
    else if (word >= EP_HT_ASK_EXPERTS && l < a.local_experts)
        a.counts_in[s * a.local_experts + l] = min(value, a.max_tokens);
}

__device__ inline void take_asks(const ep_ht_args &a, const Op &op, Exchange *x)
{
    const uint32_t vecs = note_vecs(a, kAsk);

    for (uint32_t i = threadIdx.x; i < a.ranks * vecs; i += kThreads) {
        const uint32_t from = i / vecs, v = i % vecs;
        Vec got;

        if (!has(op.members, from) || !take_note(a, op, kAsk, from, a.rank, v, &got))
            continue;
        keep_asked(a, x, from, 2 * v, got.w[0]);
        keep_asked(a, x, from, 2 * v + 1, got.w[1]);
    }
    __syncthreads();
    for (uint32_t s = threadIdx.x; s < a.ranks; s += kThreads)
        if ((uint64_t)a.back[s] + a.from[s] > a.partials)
            add(x->mismatched, s);
}

/* ---- where rows go ------------------------------------------------------------------------- */

/* A warp: counts_in of the granted to bases_in, from the beginning of each expert; returns the sum of expert l. */
__device__ inline uint32_t base_expert(const ep_ht_args &a, const Exchange &x, uint32_t l)
{
    return add_ranks_up(
        a,
        [&](uint32_t s) {
            uint32_t *count = &a.counts_in[s * a.local_experts + l];
            const uint32_t n = has(x.given, s) ? *count : 0;

            *count = n;
            return n;
        },
        [&](uint32_t s, uint32_t before) { a.bases_in[s * a.local_experts + l] = before; });
}

/* Warp 0: experts one after the other, each at a multiple of the alignment. */
__device__ inline void place_experts(const ep_ht_args &a, const uint32_t *total, Exchange *x)
{
    const uint32_t lane = threadIdx.x, mask = a.alignment - 1;
    uint64_t start = 0;

#pragma unroll 1
    for (uint32_t base = 0; base < a.local_experts; base += 32) {
        const uint32_t l = base + lane, n = l < a.local_experts ? total[l] : 0;
        const uint64_t own = ((uint64_t)n + mask) & ~(uint64_t)mask;
        uint64_t upto = own;

        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint64_t other = __shfl_up_sync(kAll, upto, step);

            upto += lane >= step ? other : 0;
        }
        if (l < a.local_experts) {
            a.counts[l] = (int32_t)n;
            a.starts_in[l] = (uint32_t)(start + upto - own);
        }
        start += __shfl_sync(kAll, upto, 31);
    }
    if (lane == 0) {
        a.starts_in[a.local_experts] = (uint32_t)start;
        x->rows = start;
    }
}

/* All threads; shared: a word for each expert. */
__device__ inline void place_rows(const ep_ht_args &a, const Op &op, uint32_t *shared, Exchange *x)
{
    if (threadIdx.x < 32) {
        collect(a, x->given, [&](uint32_t s) {
            return has(op.members, s) && !is_missed(a, s) && !has(x->mismatched, s);
        });
        const uint32_t rows = add_ranks_up(
            a,
            [&](uint32_t s) {
                const uint32_t from = has(x->given, s) ? a.from[s] : 0;

                a.from[s] = from;
                if (a.layout != EP_LAYOUT_PACKED)
                    a.counts[s] = (int32_t)from;
                return from;
            },
            [&](uint32_t s, uint32_t before) { a.from_first[s] = before; });

        if (threadIdx.x == 0)
            x->rows = rows;
    }
    __syncthreads();
    if (a.layout != EP_LAYOUT_PACKED)
        return;
    for (uint32_t l = threadIdx.x / 32; l < a.local_experts; l += kWarps) {
        const uint32_t total = base_expert(a, *x, l);

        if (threadIdx.x % 32 == 0)
            shared[l] = total;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        place_experts(a, shared, x);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.ranks * a.local_experts; i += kThreads)
        a.bases_in[i] += a.starts_in[i % a.local_experts];
    for (uint32_t l = threadIdx.x; l <= a.local_experts; l += kThreads)
        a.offsets[l] = (int32_t)a.starts_in[l];
    __syncthreads();
}

/* ---- grants --------------------------------------------------------------------------------- */

__device__ inline uint32_t grant_word(const ep_ht_args &a, const Exchange &x, uint32_t s, uint32_t word)
{
    const uint64_t out = a.out ? a.out - a.own : 0, scales = a.out_scales ? a.out_scales - a.own : 0;
    const uint32_t l = word / 2 - EP_HT_GRANT_EXPERTS / 2, i = s * a.local_experts + l;

    switch (word) {
    case EP_HT_GRANT_ROW: return a.from_first[s];
    case EP_HT_GRANT_ROWS: return a.from[s];
    case EP_HT_GRANT_BITS:
        return (x.rows <= a.out_rows ? EP_HT_GRANT_ROOM : 0) | (a.layout == EP_LAYOUT_PACKED ? EP_HT_GRANT_PACKED : 0);
    case EP_HT_GRANT_OUT_LOW: return (uint32_t)out;
    case EP_HT_GRANT_OUT_HIGH: return (uint32_t)(out >> 32);
    case EP_HT_GRANT_SCALES_LOW: return (uint32_t)scales;
    case EP_HT_GRANT_SCALES_HIGH: return (uint32_t)(scales >> 32);
    default:
        if (a.layout != EP_LAYOUT_PACKED || word < EP_HT_GRANT_EXPERTS)
            return 0;
        return word % 2 ? a.counts_in[i] : a.bases_in[i];
    }
}

__device__ inline void grant_all(const ep_ht_args &a, const Op &op, const Exchange &x)
{
    const uint32_t vecs = note_vecs(a, kGrant);

    for (uint32_t i = threadIdx.x; i < a.ranks * vecs; i += kThreads) {
        const uint32_t s = i / vecs, v = i % vecs;

        if (has(x.given, s) || is_far(a, s)) /* a gate waits for what is granted others: no rows, if there is nothing else */
            store_vec(note_at(a, kGrant, a.rank, s) + v * sizeof(Vec),
                      tagged(grant_word(a, x, s, 2 * v), grant_word(a, x, s, 2 * v + 1), op.tag));
    }
}

/* ---- what others granted ------------------------------------------------------------------------ */

/* What all of this node that have granted rank `to` anything have, by places; in the state, and what is said of experts. */
struct Taken {
    uint32_t to;
    struct ep_device_ht_grant *grant;
    uint32_t *expert; /* [ranks of this node][L][2] */
    uint32_t *mask;
};

__device__ inline void keep_granted(const ep_ht_args &a, const Taken &t, uint32_t place, uint32_t vec, const Vec &v)
{
    struct ep_device_ht_grant *g = &t.grant[place];
    const uint64_t offset = (uint64_t)v.w[1] << 32 | v.w[0];

    if (vec == EP_HT_GRANT_ROW / 2) {
        g->row = v.w[0];
        g->bits = v.w[1];
    } else if (vec == EP_HT_GRANT_OUT_LOW / 2) {
        g->out = offset;
    } else if (vec == EP_HT_GRANT_SCALES_LOW / 2) {
        g->scales = offset;
    } else if (vec == EP_HT_GRANT_ROWS / 2) {
        g->rows = v.w[0];
    } else {
        uint32_t *expert = t.expert + 2 * (place * a.local_experts + vec - EP_HT_GRANT_EXPERTS / 2);

        expert[0] = v.w[0];
        expert[1] = v.w[1];
    }
}

/* Rows below `end` of what begins there lie in an arena. */
__device__ inline bool in_arena(const ep_ht_args &a, uint64_t offset, uint64_t end, uint64_t row_bytes)
{
    return offset % 16 == 0 && offset >= a.arena && offset <= a.window_bytes
           && end * row_bytes <= a.window_bytes - offset; /* end: 33 bits, row_bytes: 23 */
}

/* A thread: may rows be written where it is said?  The last of them, of all experts when it is packed, is `end`. */
__device__ inline bool grant_holds(const ep_ht_args &a, const Taken &t, uint32_t place)
{
    const struct ep_device_ht_grant &g = t.grant[place];
    uint64_t end = (uint64_t)g.row + g.rows;

    if (g.rows > a.max_tokens || end > (uint64_t)a.ranks * a.max_tokens)
        return false;
    if (!(g.bits & EP_HT_GRANT_ROOM) || g.rows == 0) /* none is written, and there need be no place for any */
        return true;
    if (g.bits & EP_HT_GRANT_PACKED) {
        const uint32_t *expert = t.expert + 2 * place * a.local_experts;

        end = 0;
        for (uint32_t l = 0; l < a.local_experts; l++)
            end = max(end, (uint64_t)expert[2 * l] + expert[2 * l + 1]);
    }
    return in_arena(a, g.out, end, a.row_bytes)
           && (a.row_scales == 0 || in_arena(a, g.scales, end, a.row_scales * a.scale_bytes));
}

/* All threads of block 0; which members have granted what holds is in the mask.  Returns the same of the place
 * threadIdx.x: false, it has granted what does not. */
__device__ inline bool take_notes(const ep_ht_args &a, const Op &op, const Taken &t)
{
    const uint32_t vecs = note_vecs(a, kGrant), place = threadIdx.x;
    bool holds = true;

    if (threadIdx.x < 32) {
        const uint32_t members = nears_that(a, [&](uint32_t r) { return has(op.members, r); });

        if (threadIdx.x == 0)
            *t.mask = members;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < nears_of(a) * vecs; i += kThreads) {
        const uint32_t at = i / vecs, v = i % vecs, from = near_at(a, at);
        Vec got;

        if (!has(op.members, from))
            continue;
        if (take_note(a, op, kGrant, from, t.to, v, &got))
            keep_granted(a, t, at, v, got);
        else
            atomicAnd(t.mask, ~(1u << at));
    }
    __syncthreads();
    if (place < nears_of(a) && load_u32(t.mask) >> place & 1)
        holds = grant_holds(a, t, place);
    if (!holds)
        atomicAnd(t.mask, ~(1u << place));
    __syncthreads();
    return holds;
}

/* Block 0, for all blocks. */
__device__ inline void take_grants(const ep_ht_args &a, const Op &op)
{
    const Taken own = { a.rank, a.state->ht_grants, a.granted, &run_of(a).granted };

    if (!take_notes(a, op, own)) {
        add(run_of(a).gone, near_at(a, threadIdx.x));
        add(run_of(a).mismatched, near_at(a, threadIdx.x));
    }
}

/* All threads of a block that takes them, or that uses them; *to is in shared memory, or for all blocks. */
__device__ inline void find_grants(const ep_ht_args &a, const Taken &t, struct ep_net_grants *to)
{
    const uint32_t place = threadIdx.x;

    if (place < nears_of(a)) {
        const struct ep_device_ht_grant &granted = t.grant[place];
        const uint8_t *window = window_of(a, near_at(a, place));

        to->row[place] = granted.row;
        to->rows[place] = granted.rows;
        to->bits[place] = granted.bits;
        to->out[place] = (uint64_t)(window + granted.out);
        to->scales[place] = (uint64_t)(window + granted.scales);
    }
    if (place == 0) {
        to->mask = load_u32(t.mask);
        to->expert = (uint64_t)t.expert;
    }
    __syncthreads();
}

/* All threads, when block 0 has taken them. */
__device__ inline void find_own_grants(const ep_ht_args &a, struct ep_net_grants *to)
{
    find_grants(a, { a.rank, a.state->ht_grants, a.granted, &run_of(a).granted }, to);
}

#if EP_LL_NET
namespace relay {

/* Block 0, for all blocks: what is granted those whose records go through here. */
__device__ inline void take_grants(const ep_ht_args &a, const Op &op)
{
    const struct ep_device_net *net = net_of(a);

#pragma unroll 1
    for (uint32_t i = 0; i < net->relaying; i++) {
        const uint32_t s = net->relays[i], box = box_of(a, s);
        struct ep_net_grants *grants = net_table<struct ep_net_grants>(a, net->tables.grants) + box;
        const Taken taken = { s, net_table<struct ep_device_ht_grant>(a, net->tables.taken) + box * EP_DEVICE_NODE_RANKS,
                              net_table<uint32_t>(a, net->tables.granted) + 2ull * box * net->nears * a.local_experts,
                              &grants->mask };

        take_notes(a, op, taken);
        find_grants(a, taken, grants);
    }
}

} // namespace relay
#else
namespace relay {
__device__ inline void take_grants(const ep_ht_args &, const Op &) {}
} // namespace relay
#endif

/* ---- all of it -------------------------------------------------------------------------------- */

/* Block 0, when the batch is counted. */
__device__ inline void ask(const ep_ht_args &a, const Op &op, Exchange *x)
{
    for (uint32_t r = threadIdx.x; r < a.ranks; r += kThreads)
        a.from[r] = a.back[r] = 0;
    if (threadIdx.x < 32) {
        if (threadIdx.x < kRankWords)
            x->mismatched[threadIdx.x] = 0;
        add_ranks_up(
            a, [&](uint32_t r) { return is_far(a, r) ? 0 : a.totals[r]; }, /* theirs come in a box */
            [&](uint32_t r, uint32_t before) { a.first[r] = before; });
        collect(a, x->reached, [&](uint32_t r) { return has(op.members, r) && is_reached(a, r); });
        each_word(a, [&](uint32_t r) { return has(op.members, r) && !has(x->reached, r); }, [&](uint32_t w, uint32_t none) {
            if (threadIdx.x == 0 && none)
                atomicOr(&run_of(a).unsent[w], none);
        });
    }
    __syncthreads();
    ask_all(a, op, *x);
    if (threadIdx.x < 32) {
        find_more(a);
        ask_far(
            a, op, [&](uint32_t r) { return has(op.members, r) && is_far(a, r); },
            [&](uint32_t d) {
                for (uint32_t v = threadIdx.x; v < note_vecs(a, kAsk); v += 32)
                    write_ask(a, op, *x, d, v);
            },
            [&](uint32_t d) { put_note(a, op, d); });
        find_through(a);
    }
}

/* And then.  The op takes place if all members have asked in time; who is gone is left out.  shared: a word for each
 * local expert. */
__device__ inline void grant(const ep_ht_args &a, Op *op, uint32_t *shared, Exchange *exchange)
{
    struct ep_device_ht_run &run = run_of(a);
    Exchange &x = *exchange;
    const uint64_t start = now_ns();

    take_asks(a, *op, &x);
    __syncthreads();
    if (threadIdx.x == 0) {
        run.wait_ns += now_ns() - start;
        if (load_u32(&run.first_late))
            run.status = op->status = EP_TIMEOUT;
    }
    if (threadIdx.x < words_of(a) && x.mismatched[threadIdx.x]) {
        atomicOr(&run.gone[threadIdx.x], x.mismatched[threadIdx.x]);
        run.mismatched[threadIdx.x] = x.mismatched[threadIdx.x];
    }
    __syncthreads();
    if (op->status != EP_OK)
        return;
    place_rows(a, *op, shared, &x);
    grant_all(a, *op, x);
    if (threadIdx.x < 32) {
        announce(a, *op);
        announce_relays(a, *op, x.given);
        if (threadIdx.x < words_of(a))
            run.given[threadIdx.x] = x.given[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        a.state->ht_handles[a.handle].rows = run.rows = x.rows;
        run.rows_needed = x.rows > a.out_rows ? x.rows : 0;
    }
    take_grants(a, *op);
    relay::take_grants(a, *op);
}

} // namespace ht
} // namespace ep

#endif
