/*
 * Executor server: the worker's half of a mailbox.  window.h has the hand-over.
 *
 * Under an MPS server a kernel puts the op to place 0, rings, and waits.
 *
 * Where there is none, a kernel of ours between two of the server's makes the GPU switch contexts there and back, 140
 * us each way on an H200, and so does a copy.  Words that the stream itself writes do not, for 0.7 us each.  An op has
 * 36, but few of them differ from one op to the next.  So
 *   - an op that is captured is written when it is, to a place that it has for ever: a graph may be launched at any
 *     time.  Ops that are the same have one place.  The stream only rings.  When there are no places left, the stream
 *     writes the whole op to place 0, 36 words, each time.
 *   - any other op goes to one of a few places that are used again.  Nobody else writes there, so it is known here
 *     what they hold when the stream has come so far, and the stream writes the words that differ.
 * The op that was at a place before is over by then, as its wait stands before in the order of a rank's streams.
 */
#include "cuda_private.h"

#include <stdlib.h>
#include <string.h>

#include "ll.h"

enum { PLACE_WHOLE = 0, PLACE_RECENT = 1, PLACE_KEPT = 9, OP_WORDS = sizeof(struct ep_op) / 8, FEW_WORDS = 4 };

struct ep_cuda_ringer {
    uint32_t device;
    bool spins;
    struct ep_mailbox *mailbox; /* GPU memory */
    uint32_t kept;              /* the first place that no captured op has */
    uint64_t turn, used[PLACE_KEPT]; /* of ops to recent places; the last one of each, 0: none yet */
    struct ep_op op[EP_MAILBOX_OPS]; /* what is there, when the stream has come so far */
};

/* All that a stream does of one op. */
struct batch {
    CUstreamBatchMemOpParams op[OP_WORDS + 2];
    unsigned int n;
};

/* ---- words ------------------------------------------------------------------------------ */

/* Ops are copied here, as words of their bytes. */
static uint64_t word_of(const struct ep_op *op, uint32_t i)
{
    uint64_t word;

    memcpy(&word, (const char *)op + i * sizeof word, sizeof word);
    return word;
}

static void add_write(struct batch *batch, void *at, uint64_t word)
{
    CUstreamBatchMemOpParams *op = &batch->op[batch->n++];

    memset(op, 0, sizeof *op);
    op->writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op->writeValue.address = (CUdeviceptr)at;
    op->writeValue.value64 = word;
    op->writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT; /* the other one is refused in a batch */
}

/* before: what is there; NULL: nobody knows. */
static void add_op(struct batch *batch, struct ep_op *at, const struct ep_op *op, const struct ep_op *before)
{
    for (uint32_t i = 0; i < OP_WORDS; i++)
        if (!before || word_of(op, i) != word_of(before, i))
            add_write(batch, (char *)at + i * sizeof(uint64_t), word_of(op, i));
}

/* Bell and `closed` are one word to who waits, and two to who writes. */
static void add_bell(struct batch *batch, struct ep_mailbox *mailbox, uint32_t place)
{
    CUstreamBatchMemOpParams *rings = &batch->op[batch->n++], *waits = &batch->op[batch->n++];

    memset(rings, 0, 2 * sizeof *rings);
    rings->writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    rings->writeValue.address = (CUdeviceptr)&mailbox->bell;
    rings->writeValue.value = ep_bell_of(place);
    rings->writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    waits->waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    waits->waitValue.address = (CUdeviceptr)&mailbox->bell;
    waits->waitValue.value64 = EP_BELL_DONE | 0xffffffffull << 32;
    waits->waitValue.flags = CU_STREAM_WAIT_VALUE_AND; /* any of these bits */
}

_Static_assert(offsetof(struct ep_mailbox, closed) == offsetof(struct ep_mailbox, bell) + 4, "looked at as one word");

/* ---- places ------------------------------------------------------------------------------ */

/* Now, not in the order of the stream: nothing that was enqueued looks there. */
static ep_status write_now(const struct ep_cuda_ringer *ringer, uint32_t place, const struct ep_op *op,
                           struct ep_error *error)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the copy is no part of what is captured */
    ep_status status;

    cuThreadExchangeStreamCaptureMode(&mode);
    status = ep_cuda_write(ringer->device, &ringer->mailbox->op[place], op, sizeof *op, NULL, error);
    cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

/* For a captured op: where it is, or will be when the batch is through. */
static ep_status keep(struct ep_cuda_ringer *ringer, const struct ep_op *op, struct batch *batch, uint32_t *place,
                      struct ep_error *error)
{
    ep_status status;

    for (*place = PLACE_KEPT; *place < ringer->kept; ++*place)
        if (memcmp(&ringer->op[*place], op, sizeof *op) == 0)
            return EP_OK;
    if (*place == EP_MAILBOX_OPS) {
        *place = PLACE_WHOLE;
        add_op(batch, &ringer->mailbox->op[PLACE_WHOLE], op, NULL);
        return EP_OK;
    }
    status = write_now(ringer, *place, op, error);
    if (status == EP_OK)
        ringer->op[ringer->kept++] = *op;
    return status;
}

static uint32_t words_to_write(const struct ep_cuda_ringer *ringer, uint32_t place, const struct ep_op *op)
{
    uint32_t n = 0;

    if (ringer->used[place] == 0)
        return OP_WORDS;
    for (uint32_t i = 0; i < OP_WORDS; i++)
        n += word_of(op, i) != word_of(&ringer->op[place], i);
    return n;
}

/* The recent place whose op differs least; if that is much, the one that was not used for longest. */
static uint32_t choose(const struct ep_cuda_ringer *ringer, const struct ep_op *op)
{
    uint32_t least = PLACE_RECENT, oldest = PLACE_RECENT;

    for (uint32_t place = PLACE_RECENT; place < PLACE_KEPT; place++) {
        if (words_to_write(ringer, place, op) < words_to_write(ringer, least, op))
            least = place;
        if (ringer->used[place] < ringer->used[oldest])
            oldest = place;
    }
    return words_to_write(ringer, least, op) <= FEW_WORDS ? least : oldest;
}

/* ---- ringing ------------------------------------------------------------------------------ */

static ep_status enqueue(const struct ep_cuda_ringer *ringer, struct batch *batch, CUstream stream,
                         struct ep_error *error)
{
    const CUresult result = cuStreamBatchMemOp(stream, batch->n, batch->op, 0);

    if (result == CUDA_SUCCESS)
        return EP_OK;
    return ep_cuda_fail(error, result, "cuStreamBatchMemOp on device %u, with which a stream rings for the server and "
                        "waits (in graphs since CUDA 12.0)", ringer->device);
}

static ep_status ring_kept(struct ep_cuda_ringer *ringer, const struct ep_op *op, CUstream stream,
                           struct ep_error *error)
{
    struct batch batch = { .n = 0 };
    uint32_t place;
    ep_status status = keep(ringer, op, &batch, &place, error);

    if (status != EP_OK)
        return status;
    add_bell(&batch, ringer->mailbox, place);
    return enqueue(ringer, &batch, stream, error);
}

static ep_status ring_recent(struct ep_cuda_ringer *ringer, const struct ep_op *op, CUstream stream,
                             struct ep_error *error)
{
    const uint32_t place = choose(ringer, op);
    struct batch batch = { .n = 0 };
    ep_status status;

    add_op(&batch, &ringer->mailbox->op[place], op, ringer->used[place] ? &ringer->op[place] : NULL);
    add_bell(&batch, ringer->mailbox, place);
    status = enqueue(ringer, &batch, stream, error);
    if (status != EP_OK)
        return status;
    ringer->op[place] = *op;
    ringer->used[place] = ++ringer->turn;
    return EP_OK;
}

static ep_status launch(const struct ep_cuda_ringer *ringer, const struct ep_op *op, CUstream stream,
                        struct ep_error *error)
{
    return ep_cuda_launched(error, ringer->device, ep_ll_gate(ringer->mailbox, op, stream));
}

/* The device's context is current. */
static ep_status ring(struct ep_cuda_ringer *ringer, const struct ep_op *op, CUstream stream, struct ep_error *error)
{
    bool captured;

    if (ep_cuda_check_reach(op, error) != EP_OK)
        return error->status;
    if (ringer->spins)
        return launch(ringer, op, stream, error);
    if (ep_cuda_is_captured(ringer->device, stream, &captured, error) != EP_OK)
        return error->status;
    return captured ? ring_kept(ringer, op, stream, error) : ring_recent(ringer, op, stream, error);
}

ep_status ep_cuda_ring(struct ep_cuda_ringer *ringer, const struct ep_op *op, void *stream, struct ep_error *error)
{
    const struct ep_cuda_context *context;
    ep_status status = ep_cuda_enter(ringer->device, &context, error);

    if (status != EP_OK)
        return status;
    status = ring(ringer, op, ep_cuda_stream(context, stream), error);
    ep_cuda_leave();
    return status;
}

/* ---- open and close ------------------------------------------------------------------------ */

ep_status ep_cuda_ring_open(uint32_t device, void *window, bool spins, struct ep_cuda_ringer **out,
                            struct ep_error *error)
{
    struct ep_cuda_ringer *ringer = calloc(1, sizeof *ringer);
    const uint32_t word = spins;
    ep_status status;

    if (!ringer)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to ring for ops");
    ringer->device = device;
    ringer->spins = spins;
    ringer->mailbox = &((struct ep_control *)window)->gpu.mailbox;
    ringer->kept = PLACE_KEPT;
    status = ep_cuda_write(device, &ringer->mailbox->spins, &word, sizeof word, NULL, error);
    if (status == EP_OK)
        *out = ringer;
    else
        free(ringer);
    return status;
}

void ep_cuda_ring_close(struct ep_cuda_ringer *ringer)
{
    free(ringer);
}
