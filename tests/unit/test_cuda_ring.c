/* The worker's half of a mailbox: what is in it whenever it rings.  The driver is played by this file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#ifndef EP_WITH_CUDA
int main(void)
{
    printf("no CUDA compiler: kernels/cuda is not built\n");
    return 77;
}
#else

#include "cuda_private.h"
#include "ll.h"

enum { MANY = 4 * EP_MAILBOX_OPS };

/* What a stream does of one op. */
struct batch {
    CUstreamBatchMemOpParams op[64];
    unsigned int n;
};

static struct ep_control control;
static struct ep_mailbox *const mailbox = &control.gpu.mailbox;
static bool capturing, failing;
static struct batch captured[MANY];
static unsigned int n_captured, written, launched; /* written: words of ops, by streams */
static struct ep_op rung;                          /* the last op that was rung for, as it is in the mailbox */

/* ---- the driver, and the rest of the module --------------------------------------------- */

static bool wants_answer(const CUstreamBatchMemOpParams *op)
{
    return op->waitValue.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64
           && op->waitValue.address == (CUdeviceptr)&mailbox->bell && op->waitValue.flags == CU_STREAM_WAIT_VALUE_AND
           && (op->waitValue.value64 & EP_BELL_RUNG) == 0;
}

static void ring_bell(uint32_t bell)
{
    assert_true(bell & EP_BELL_RUNG);
    assert_false(bell & EP_BELL_DONE);
    rung = mailbox->op[ep_bell_op(bell)];
}

static void run(const struct batch *batch)
{
    for (unsigned int i = 0; i < batch->n; i++) {
        const CUstreamBatchMemOpParams *op = &batch->op[i];

        if (op->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
            memcpy((void *)op->writeValue.address, &op->writeValue.value64, sizeof(uint64_t));
            written++;
        } else if (op->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            assert_int_equal(op->writeValue.address, (CUdeviceptr)&mailbox->bell);
            ring_bell(op->writeValue.value);
        } else {
            assert_true(wants_answer(op));
            assert_int_equal(i, batch->n - 1);
        }
    }
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned int n, CUstreamBatchMemOpParams *ops, unsigned int flags)
{
    struct batch batch = { .n = n };

    (void)stream;
    assert_int_equal(flags, 0);
    assert_in_range(n, 2, sizeof batch.op / sizeof *batch.op);
    if (failing)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(batch.op, ops, n * sizeof *ops);
    if (capturing)
        captured[n_captured++] = batch;
    else
        run(&batch);
    return CUDA_SUCCESS;
}

ep_status ep_cuda_is_captured(uint32_t device, CUstream stream, bool *is, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    *is = capturing;
    return EP_OK;
}

static CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    const CUstreamCaptureMode before = capture_mode;

    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

ep_status ep_cuda_write(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                        struct ep_error *error)
{
    (void)device, (void)error;
    assert_null(stream);
    assert_true(!capturing || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    memcpy(to, from, bytes);
    return EP_OK;
}

ep_status ep_cuda_enter(uint32_t device, const struct ep_cuda_context **context, struct ep_error *error)
{
    static const struct ep_cuda_context only;

    (void)device, (void)error;
    *context = &only;
    return EP_OK;
}

void ep_cuda_leave(void)
{
}

ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...)
{
    (void)result;
    return ep_error_set(error, EP_INTERNAL, "%s", format);
}

ep_status ep_cuda_check_reach(const struct ep_op *op, struct ep_error *error)
{
    (void)op;
    (void)error;
    return EP_OK;
}

int ep_ll_gate(struct ep_mailbox *to, const struct ep_op *op, void *stream)
{
    (void)stream;
    assert_ptr_equal(to, mailbox);
    mailbox->op[0] = rung = *op;
    launched++;
    return 0;
}

/* ---- ops ----------------------------------------------------------------------------------- */

static struct ep_cuda_ringer *open_ringer(bool spins)
{
    struct ep_cuda_ringer *ringer = NULL;

    memset(&control, 0x5a, sizeof control);
    capturing = failing = false;
    n_captured = written = launched = 0;
    assert_int_equal(ep_cuda_ring_open(0, &control, spins, &ringer, NULL), EP_OK);
    assert_int_equal(mailbox->spins, spins);
    return ringer;
}

static struct ep_op op_of(uint32_t kind, uint32_t generation)
{
    return (struct ep_op){ .kind = kind, .tokens = 7 * kind, .handle = 3, .generation = generation, .top_k = 8,
                           .x = { 4096ull * kind, 512 }, .out = { 1u << 20, 8192ull + kind }, .reserved1 = kind,
                           .topk_idx = { 64ull * kind, 8ull * kind }, .counts = { 128ull * kind, 4 } };
}

static void ring(struct ep_cuda_ringer *ringer, const struct ep_op *op)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_cuda_ring(ringer, op, NULL, &error), EP_OK);
    if (!capturing)
        assert_memory_equal(&rung, op, sizeof *op);
}

static void each_op_is_there_when_it_is_rung_for(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);

    (void)state;
    srand(5);
    for (uint32_t i = 0; i < 5000; i++) {
        struct ep_op op = op_of(1 + (uint32_t)rand() % 12, i / 8);

        if (rand() % 4 == 0)
            op.bias.offset = (uint32_t)rand() % 3;
        ring(ringer, &op);
    }
    assert_int_equal(launched, 0);
    ep_cuda_ring_close(ringer);
}

/* Of pairs that differ in their generation. */
static void only_what_differs_is_written(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);

    (void)state;
    for (uint32_t i = 0; i < 100; i++) {
        struct ep_op dispatch = op_of(EP_OP_DISPATCH, i), combine = op_of(EP_OP_COMBINE, i);

        written = 0;
        ring(ringer, &dispatch);
        ring(ringer, &combine);
        assert_int_equal(written, i == 0 ? 2 * sizeof(struct ep_op) / 8 : 2);
    }
    ep_cuda_ring_close(ringer);
}

static void what_failed_was_not_written(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_op op = op_of(EP_OP_DISPATCH, 1);

    (void)state;
    ring(ringer, &op);
    op.generation = 2;
    failing = true;
    assert_int_equal(ep_cuda_ring(ringer, &op, NULL, &error), EP_INTERNAL);
    failing = false;
    ring(ringer, &op);
    ep_cuda_ring_close(ringer);
}

static void capture(struct ep_cuda_ringer *ringer, uint32_t ops)
{
    capturing = true;
    for (uint32_t i = 0; i < ops; i++) {
        struct ep_op op = op_of(1 + i % 2, i / 2);

        ring(ringer, &op);
    }
    capturing = false;
    assert_int_equal(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static void launch(uint32_t ops)
{
    for (uint32_t i = 0; i < ops; i++) {
        const struct ep_op op = op_of(1 + i % 2, i / 2);

        run(&captured[i]);
        assert_memory_equal(&rung, &op, sizeof op);
    }
}

static void a_graph_only_rings_whatever_came_between(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);

    (void)state;
    capture(ringer, 40);
    for (uint32_t i = 0; i < 50; i++) {
        const struct ep_op op = op_of(1 + i % 11, i);

        ring(ringer, &op);
        written = 0;
        launch(40);
        assert_int_equal(written, 0);
    }
    ep_cuda_ring_close(ringer);
}

static void ops_that_are_the_same_share_a_place(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);

    (void)state;
    for (uint32_t i = 0; i < 50; i++) {
        n_captured = 0;
        capture(ringer, 4);
    }
    written = 0;
    launch(4);
    assert_int_equal(written, 0);
    ep_cuda_ring_close(ringer);
}

/* Those for which no place is left are written each time. */
static void more_captured_ops_than_places_do(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(false);

    (void)state;
    capture(ringer, 2 * EP_MAILBOX_OPS);
    for (uint32_t i = 0; i < 3; i++) {
        const struct ep_op op = op_of(1 + i, 1000 + i);

        launch(2 * EP_MAILBOX_OPS);
        ring(ringer, &op);
    }
    ep_cuda_ring_close(ringer);
}

static void who_spins_has_a_kernel_do_it(void **state)
{
    struct ep_cuda_ringer *ringer = open_ringer(true);
    const struct ep_op op = op_of(EP_OP_DISPATCH, 1);

    (void)state;
    ring(ringer, &op);
    capturing = true;
    ring(ringer, &op);
    assert_int_equal(launched, 2);
    assert_int_equal(n_captured, 0);
    ep_cuda_ring_close(ringer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_op_is_there_when_it_is_rung_for),
        cmocka_unit_test(only_what_differs_is_written),
        cmocka_unit_test(what_failed_was_not_written),
        cmocka_unit_test(a_graph_only_rings_whatever_came_between),
        cmocka_unit_test(ops_that_are_the_same_share_a_place),
        cmocka_unit_test(more_captured_ops_than_places_do),
        cmocka_unit_test(who_spins_has_a_kernel_do_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
