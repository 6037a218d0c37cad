#include "exchange.h"

#include <stdlib.h>
#include <string.h>

#include "player_private.h"

#define UNWRITTEN 0xc3 /* of target memory */
#define MAX_GAP   24u  /* bytes between puts */

/* One put of a batch. */
struct piece {
    uint64_t from, to; /* in the slots */
    uint64_t bytes, key;
};

struct batch {
    uint32_t puts;
    bool signal_alone; /* or with the last put */
    struct piece piece[EXCHANGE_PUTS];
};

/* ---- what a batch is ----------------------------------------------------------------------------- */

static uint64_t next(uint64_t *state, uint64_t below)
{
    return player_mix((*state)++) % below;
}

/* Small ones and large ones alike: a random number of bits, then a random number of so many bits. */
static uint64_t random_size(uint64_t *state, uint64_t most)
{
    uint32_t bits = 0;
    uint64_t bytes;

    while (bits < 63 && (2ull << bits) <= most)
        bits++;
    bytes = next(state, 2ull << next(state, bits + 1));
    return bytes < most ? bytes : most;
}

static void shuffle(uint64_t *state, struct batch *batch)
{
    for (uint32_t i = batch->puts; i > 1; i--) {
        const uint32_t j = (uint32_t)next(state, i);
        const struct piece piece = batch->piece[j];

        batch->piece[j] = batch->piece[i - 1];
        batch->piece[i - 1] = piece;
    }
}

static void make_batch(const struct exchange *x, uint32_t sender, uint32_t receiver, uint32_t round,
                       struct batch *batch)
{
    uint64_t state = player_mix(x->key ^ player_mix(sender << 16 | receiver) ^ player_mix((uint64_t)round << 32));
    const uint32_t puts = x->mix.sizes ? x->mix.puts : 1 + (uint32_t)next(&state, x->mix.puts);
    uint64_t from = 0, to = 0;

    *batch = (struct batch){ .signal_alone = next(&state, 2) == 0 };
    for (uint32_t i = 0; i < puts; i++) {
        const uint64_t bytes = x->mix.sizes ? x->mix.sizes[i] : random_size(&state, x->mix.bytes);

        from += next(&state, MAX_GAP);
        to += next(&state, MAX_GAP);
        if (from + bytes > x->mix.slot_bytes || to + bytes > x->mix.slot_bytes)
            break;
        batch->piece[batch->puts++] = (struct piece){ from, to, bytes, next(&state, UINT64_MAX) };
        from += bytes;
        to += bytes;
    }
    shuffle(&state, batch);
}

static void fill(uint8_t *to, const struct piece *piece)
{
    uint64_t word;

    for (uint64_t at = 0; at < piece->bytes; at += sizeof word) {
        const uint64_t left = piece->bytes - at;

        word = player_mix(piece->key + at);
        memcpy(to + at, &word, left < sizeof word ? left : sizeof word);
    }
}

/* ---- open and close ------------------------------------------------------------------------------ */

static ep_status open_buffers(struct exchange *x, struct ep_error *error)
{
    const uint64_t bytes = x->comm->ranks * x->mix.slot_bytes;

    x->image = malloc(bytes);
    x->expected = malloc(x->mix.slot_bytes);
    x->seen = malloc(x->mix.slot_bytes);
    if (!x->image || !x->expected || !x->seen)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to compare with");
    memset(x->image, UNWRITTEN, bytes);
    return EP_OK;
}

ep_status exchange_open(struct comm *comm, uint32_t context, uint32_t number, const struct mix *mix, struct exchange *x,
                        struct ep_error *error)
{
    struct player *player = comm->player;
    const bool cuda = player->setting->cuda;
    ep_status status;

    *x = (struct exchange){ .comm = comm, .mix = *mix, .context = context, .base = 2 * comm->ranks * number };
    x->key = player_mix(player->setting->seed + number);
    if (!x->mix.slot_bytes)
        x->mix.slot_bytes = EXCHANGE_SLOT;

    const uint64_t bytes = comm->ranks * x->mix.slot_bytes;

    status = open_buffers(x, error);
    if (status == EP_OK)
        status = memory_open(player, bytes, cuda && !mix->host_source, &x->source, error);
    if (status == EP_OK)
        status = memory_open(player, bytes, cuda && !mix->host_target, &x->target, error);
    if (status == EP_OK)
        status = memory_write(player, &x->target, 0, x->image, bytes, error);
    if (status == EP_OK)
        status = region_open(comm, &x->source, 0, &x->source_region, error);
    return status == EP_OK ? region_open(comm, &x->target, 0, &x->target_region, error) : status;
}

void exchange_abandon(struct player *player, struct exchange *x)
{
    memory_close(player, &x->source);
    memory_close(player, &x->target);
    free(x->image);
    free(x->expected);
    free(x->seen);
    *x = (struct exchange){ 0 };
}

ep_status exchange_close(struct exchange *x, struct ep_error *error)
{
    ep_status status = region_close(x->comm, &x->source_region, error);

    if (status == EP_OK)
        status = region_close(x->comm, &x->target_region, error);
    exchange_abandon(x->comm->player, x);
    return status;
}

/* ---- sending ------------------------------------------------------------------------------------- */

static uint32_t data_signal(const struct exchange *x, uint32_t sender)
{
    return x->base + sender;
}

static uint32_t ack_signal(const struct exchange *x, uint32_t receiver)
{
    return x->base + x->comm->ranks + receiver;
}

static ep_status write_source(struct exchange *x, uint32_t to, const struct batch *batch, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < batch->puts && status == EP_OK; i++) {
        const struct piece *piece = &batch->piece[i];

        fill(x->expected, piece);
        status = memory_write(x->comm->player, &x->source, to * x->mix.slot_bytes + piece->from, x->expected,
                              piece->bytes, error);
    }
    return status;
}

static struct plugin_put put_of(const struct exchange *x, uint32_t to, const struct piece *piece)
{
    const uint32_t me = x->comm->player->crew->rank;

    return (struct plugin_put){ .source = x->source_region.gin_handle,
                                .from = to * x->mix.slot_bytes + piece->from,
                                .target = x->target_region.gin_handle,
                                .to = me * x->mix.slot_bytes + piece->to,
                                .bytes = piece->bytes,
                                .rank = to };
}

static ep_status signal_alone(struct exchange *x, uint32_t to, uint32_t signal, struct ep_error *error)
{
    const struct plugin_put put = {
        .rank = to, .signal_at = signal * sizeof(uint64_t), .signal_op = NCCL_SIGNAL_ADD, .value = 1
    };

    return comm_post(x->comm, x->context, &put, NULL, error);
}

ep_status exchange_send(struct exchange *x, uint32_t to, struct ep_error *error)
{
    const uint32_t me = x->comm->player->crew->rank;
    struct batch batch;
    ep_status status;

    make_batch(x, me, to, x->sent[to]++, &batch);
    status = write_source(x, to, &batch, error);
    for (uint32_t i = 0; i < batch.puts && status == EP_OK; i++) {
        struct plugin_put put = put_of(x, to, &batch.piece[i]);

        if (i + 1 == batch.puts && !batch.signal_alone) {
            put.signal_op = NCCL_SIGNAL_INC;
            put.signal_at = data_signal(x, me) * sizeof(uint64_t);
            put.value = 1;
        }
        status = comm_post(x->comm, x->context, &put, NULL, error);
    }
    if (status == EP_OK && (batch.signal_alone || batch.puts == 0))
        status = signal_alone(x, to, data_signal(x, me), error);
    return status;
}

/* ---- receiving ----------------------------------------------------------------------------------- */

static uint64_t first_difference(const uint8_t *a, const uint8_t *b, uint64_t bytes)
{
    uint64_t at = 0;

    while (at < bytes && a[at] == b[at])
        at++;
    return at;
}

static ep_status check_piece(struct exchange *x, uint32_t from, const struct batch *batch, uint32_t i,
                             struct ep_error *error)
{
    const struct piece *piece = &batch->piece[i];
    const uint64_t at = from * x->mix.slot_bytes + piece->to;
    ep_status status = memory_read(x->comm->player, &x->target, at, x->seen, piece->bytes, error);

    if (status != EP_OK)
        return status;
    fill(x->expected, piece);
    memcpy(x->image + at, x->expected, piece->bytes);
    if (memcmp(x->expected, x->seen, piece->bytes) == 0)
        return EP_OK;

    const uint64_t byte = first_difference(x->expected, x->seen, piece->bytes);

    return ep_error_set(error, EP_VERIFY_FAILED,
                        "signal of round %u from rank %u is there, byte %llu of put %u of %u (%llu bytes) is not: "
                        "0x%02x, must be 0x%02x",
                        x->received[from], from, (unsigned long long)byte, i + 1, batch->puts,
                        (unsigned long long)piece->bytes, x->seen[byte], x->expected[byte]);
}

/* The slot as a whole: nothing was written that nobody put. */
static ep_status check_around(struct exchange *x, uint32_t from, struct ep_error *error)
{
    const uint64_t at = from * x->mix.slot_bytes, bytes = x->mix.slot_bytes;
    ep_status status = memory_read(x->comm->player, &x->target, at, x->seen, bytes, error);

    if (status != EP_OK || memcmp(x->image + at, x->seen, bytes) == 0)
        return status;

    const uint64_t byte = first_difference(x->image + at, x->seen, bytes);

    return ep_error_set(error, EP_VERIFY_FAILED,
                        "round %u: byte %llu of what rank %u may write, where it put nothing, is 0x%02x: was 0x%02x",
                        x->received[from], (unsigned long long)byte, from, x->seen[byte], x->image[at + byte]);
}

static ep_status check_batch(struct exchange *x, uint32_t from, struct ep_error *error)
{
    const uint32_t me = x->comm->player->crew->rank;
    struct batch batch;
    ep_status status = EP_OK;

    make_batch(x, from, me, x->received[from], &batch);
    for (uint32_t i = batch.puts; i > 0 && status == EP_OK; i--)
        status = check_piece(x, from, &batch, i - 1, error);
    return status == EP_OK ? check_around(x, from, error) : status;
}

/* When the signal of a rank's batch is there: checks it, acknowledges it and takes the rank out of the mask. */
static ep_status receive_one(struct exchange *x, uint32_t from, uint32_t *mask, struct ep_error *error)
{
    const uint64_t batches = x->received[from];
    uint64_t value;
    ep_status status = comm_signal(x->comm, data_signal(x, from), &value, error);

    if (status != EP_OK || value == batches)
        return status;
    if (value != batches + 1)
        return ep_error_set(error, EP_VERIFY_FAILED, "signal %u is %llu: rank %u has sent %llu", data_signal(x, from),
                            (unsigned long long)value, from, (unsigned long long)batches + 1);
    status = check_batch(x, from, error);
    x->received[from]++;
    *mask &= ~(1u << from);
    return status == EP_OK ? signal_alone(x, from, ack_signal(x, x->comm->player->crew->rank), error) : status;
}

static uint32_t members(const struct exchange *x, uint32_t mask)
{
    return mask & (uint32_t)((1ull << x->comm->ranks) - 1);
}

ep_status exchange_receive(struct exchange *x, uint32_t from, struct ep_error *error)
{
    const struct player *player = x->comm->player;
    uint32_t mask = members(x, from), turn = 0;
    ep_status status = EP_OK;

    while (mask && status == EP_OK) {
        for (uint32_t r = 0; r < x->comm->ranks && status == EP_OK; r++)
            if (mask >> r & 1)
                status = receive_one(x, r, &mask, error);
        if (status == EP_OK)
            status = player_check(player, error);
        if (status == EP_OK && mask && !crew_go_on(player->crew, &turn))
            return crew_late(player->crew, error, "no signal for round %u from the ranks 0x%x",
                             x->received[__builtin_ctz(mask)], mask);
    }
    return status;
}

ep_status exchange_settle(struct exchange *x, uint32_t with, struct ep_error *error)
{
    const uint32_t mask = members(x, with);
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < x->comm->ranks && status == EP_OK; r++)
        if (mask >> r & 1)
            status = comm_wait_signal(x->comm, ack_signal(x, r), ++x->acknowledged[r], r, error);
    for (uint32_t r = 0; r < x->comm->ranks && status == EP_OK; r++)
        if (mask >> r & 1)
            status = comm_drain(x->comm, r, error);
    return status;
}

static ep_status send_all(struct exchange *x, uint32_t to, struct ep_error *error)
{
    const uint32_t ranks = x->comm->ranks, first = (uint32_t)player_random(x->comm->player, ranks);
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < ranks && status == EP_OK; i++)
        if (to >> (first + i) % ranks & 1)
            status = exchange_send(x, (first + i) % ranks, error);
    return status;
}

ep_status exchange_rounds(struct exchange *x, uint32_t rounds, uint32_t to, uint32_t from, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < rounds && status == EP_OK; i++) {
        status = send_all(x, to, error);
        if (status == EP_OK)
            status = exchange_receive(x, from, error);
        if (status == EP_OK)
            status = exchange_settle(x, from, error);
    }
    return status;
}
