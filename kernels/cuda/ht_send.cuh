/*
 * ht_send.cuh: a source's work for other nodes in a dispatch: its tokens become records, which are put to its gates piece
 * by piece (ht_net.cuh).  Where a row goes there the gate finds out, so nothing here waits for grants: records are under
 * way while ranks hear of each other.
 */
#ifndef EP_HT_SEND_CUH
#define EP_HT_SEND_CUH

#include "ht_push.cuh"

namespace ep {
namespace ht {
namespace send {

#if EP_LL_NET

constexpr uint32_t kSenders = kWarps / 2; /* of a block: with more under way at once the first piece is complete later */

/* Of a token, at a gate. */
struct Record {
    uint32_t lanes; /* mask: choices of the gate's node; 0: there is none */
    uint32_t i;     /* which record */
    uint8_t *at;
};

/* All that the batch has for the gate, whoever takes part there: so many are put.  Its row goes where the record is. */
__device__ inline Record find_record(const ep_ht_args &a, const Box &box, uint32_t gate, Token *token)
{
    const bool goes = token->rank != kNobody && has(net_of(a)->through, token->rank) && gate_of(a, token->rank) == gate;
    Record record = { __ballot_sync(kAll, goes), 0, nullptr };

    if (!record.lanes)
        return record;
    record.i = __ldcg(node_slots(a, a.handle) + token->t * a.top_k + __ffs(record.lanes) - 1);
    record.at = item_out(a, box, box_for(a, gate), record.i);
    token->out = record.at + ep_net_record_head(a.max_top_k);
    token->scales = token->out + a.row_bytes;
    return record;
}

/* What stands before the row. */
__device__ inline void write_head(const ep_ht_args &a, const Op &op, uint32_t t, const Choice &c, const Record &record)
{
    const uint32_t lane = threadIdx.x % 32;
    const Vec v = { { record.lanes >> lane & 1 ? (uint32_t)c.route : kAll, __float_as_uint(c.weight), c.slot, c.index } };

    if (lane < a.max_top_k)
        store_row(record.at + sizeof(struct ep_net_record) + lane * sizeof v, v);
    if (lane == 0)
        store_row(record.at, tagged(t, 0, op.tag));
}

/* Of token t, if it has one for the gate. */
template <Cast C>
__device__ inline void write_record(const ep_ht_args &a, const Op &op, const Box &box, uint32_t gate, uint32_t t)
{
    const Choice c = own_choice(a, t, [&](uint32_t rank) { return is_through(a, op, rank); },
                                [](uint32_t) { return true; });
    Token token = {};

    token.t = t;
    token.rank = c.route < 0 ? kNobody : rank_of(c.route);
    const Record record = find_record(a, box, gate, &token);

    if (!record.lanes)
        return;
    write_head(a, op, t, c, record);
    push_row<C>(a, token, record.lanes & -record.lanes);
    __syncwarp(); /* of all that lanes wrote; partner: put_pieces */
    if (threadIdx.x % 32 == 0)
        count_item(a, box, gate, record.i);
}

/*
 * A warp takes tokens that nobody has taken, gate by gate: the first pieces are complete earlier than if each token went
 * everywhere at once, and as long as nodes keep step, each is put to by one of the others at a time.
 */
template <Cast C> __device__ inline void write_all_records(const ep_ht_args &a, const Op &op)
{
    struct ep_device_net *net = net_of(a);
    const Box box = records_of(a);

#pragma unroll 1
    for (;;) {
        const uint32_t item = take_work(&net->next_token);

        if (item >= net->map.outs * a.tokens)
            break;
        write_record<C>(a, op, box, net->gates[item / a.tokens], item % a.tokens);
    }
}

/* A warp: what the others write goes out as it gets complete; put_boxes. */
template <class Pauses> __device__ inline void put_records(const ep_ht_args &a, const Op &op, Pauses pauses)
{
    const struct ep_device_net *net = net_of(a);

    put_boxes(a, op.tag, records_of(a), net->map.outs, [&](uint32_t i) -> Load {
        const uint32_t gate = net->gates[i];

        if (!is_open_gate(a, gate))
            return { gate, 0, 0, 0, 0 };
        return { gate, acts_as(a, gate), a.totals[gate_column(a, gate)], box_for(a, gate), box_at(a, gate) };
    }, pauses);
}

/* Does this warp put?  All wait for it at the next barrier, and a post takes long: it pauses when nobody else is missing
 * there, and puts the rest when the others push (put_rest). */
__device__ inline bool puts_records(const ep_ht_args &a)
{
    return blockIdx.x == first_numbering(a) && threadIdx.x / 32 == 1;
}

/* All threads of the blocks that number rows, each of which has done its part, when asks are on their way.  met: how often
 * they have met at barriers. */
template <Cast C> __device__ inline void send_records(const ep_ht_args &a, const Op &op, uint32_t met)
{
    uint32_t *numbered = &net_of(a)->numbered;

    __syncthreads();
    if (threadIdx.x == 0) {
        count_release(numbered);
        while (acquire_count(numbered) < a.blocks - first_numbering(a))
            ;
    }
    __syncthreads(); /* what thread 0 has acquired is there for all */
    if (puts_records(a))
        put_records(a, op, [&] {
            return __shfl_sync(kAll, load_u32(&run_of(a).barrier), 0) + 1 >= (met + 1) * a.blocks;
        });
    else if (threadIdx.x / 32 < kSenders)
        write_all_records<C>(a, op);
}

/* The warp that puts. */
__device__ inline void put_rest(const ep_ht_args &a, const Op &op)
{
    put_records(a, op, [] { return false; });
}

#else

__device__ inline bool puts_records(const ep_ht_args &) { return false; }
__device__ inline void put_rest(const ep_ht_args &, const Op &) {}
template <Cast C> __device__ inline void send_records(const ep_ht_args &, const Op &, uint32_t) {}

#endif

} // namespace send
} // namespace ht
} // namespace ep

#endif
