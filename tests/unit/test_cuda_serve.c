/*
 * Executor server and direct, the host's part: how many blocks kernels have, which kernel stands behind each look at a
 * doorbell, and how that ends.  Driver and kernels are played by this file: a stream that goes on when it can.
 */
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
#include "ht.h"
#include "ll.h"
#include "ll_op.h"

enum { RANKS = 2, EXPERTS = 4, LOCAL = 2, K = 2, HIDDEN = 256, TOKENS = 512, SMS = 132, POST = 64,
       EVERY = 31 /* entries there is one that expects nothing */ };

/* ---- the driver and the kernels ------------------------------------------------------------- */

enum kind { LOOK, POLL, ONE, HT_ONE, EXPECT, HT_EXPECT, EVENT };

struct item {
    enum kind kind;
    struct ep_ll_serve serve;
    struct ep_forecast_op at;
    CUevent event;
    bool over;
};

/* The one stream that serves. */
static struct item items[1u << 15];
static uint32_t n_items, next;

static struct ep_control control;
static struct ep_mailbox *const mailbox = &control.gpu.mailbox;
static uint32_t places, streams, executed, left; /* memories and streams there are; ops, and entries that left theirs */
static struct ep_op last;
static bool out_of_patience; /* warps that poll */
static struct {
    uint32_t *at, value; /* NULL: nothing is to be written any more */
} written;

/* What the kernels say of themselves, and were asked. */
static struct {
    int result;
    uint32_t ll, ht; /* blocks that fit */
    bool shares;
} fits;
static CUresult wait_result;
static int launch_result;
static uint32_t launched_blocks;

static void put(struct item item)
{
    assert_in_range(n_items, 0, sizeof items / sizeof *items - 1);
    items[n_items++] = item;
}

static void execute(const struct ep_ll_serve *s, const struct ep_op *op, uint32_t place)
{
    struct ep_forecast_log *log = &s->desk->log;
    struct ep_forecast_op *to = &log->op[log->ended % EP_FORECAST_OPS];

    memset(to, 0, sizeof *to);
    to->op = last = *op;
    to->place = place;
    log->ended++;
    log->entry = s->number;
    mailbox->bell = EP_BELL_DONE;
    executed++;
}

static bool is_ht(const struct ep_op *op)
{
    return op->mode == EP_MODE_HT && (op->kind == EP_OP_DISPATCH || op->kind == EP_OP_COMBINE);
}

static bool is_the_op(const struct item *item)
{
    const struct ep_op *op = &mailbox->op[ep_bell_op(mailbox->bell)];

    return item->at.place == ep_bell_op(mailbox->bell) && memcmp(&item->at.op, op, sizeof *op) == 0;
}

/* Can the kernel that expects one execute what is there? */
static bool takes(const struct item *item)
{
    const struct ep_op *op = &mailbox->op[ep_bell_op(mailbox->bell)];

    return is_the_op(item) || (item->kind == EXPECT && ep_forecast_alike(&item->at.op, op));
}

/* A warp has heard the bell, or given up. */
static void poll(const struct item *item)
{
    assert_true(item->serve.poll_ns > 0);
    item->serve.desk->found = mailbox->bell & EP_BELL_RUNG;
}

static void run_kernel(const struct item *item)
{
    const struct ep_ll_serve *s = &item->serve;
    const uint32_t place = ep_bell_op(mailbox->bell);
    const struct ep_op *op = &mailbox->op[place];

    if (item->kind == POLL)
        poll(item);
    if (item->kind == POLL || s->desk->closing)
        return;
    if (item->kind == ONE && is_ht(op))
        s->desk->ht.number = s->number;
    else if (item->kind == ONE || (item->kind == HT_ONE && s->desk->ht.number == s->number))
        execute(s, op, place);
    else if (item->kind != HT_ONE && (!s->poll_ns || s->desk->found) && takes(item))
        execute(s, op, place);
    else
        left += item->kind != HT_ONE;
}

static void go_on(void)
{
    for (; next < n_items; next++) {
        struct item *item = &items[next];

        if (!(mailbox->bell & EP_BELL_RUNG) && (item->kind == LOOK || (item->kind == POLL && !out_of_patience)))
            return;
        if (item->kind != LOOK && item->kind != EVENT)
            run_kernel(item);
        item->over = true;
    }
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags)
{
    (void)stream;
    assert_int_equal(at, (CUdeviceptr)&mailbox->bell);
    assert_int_equal(value, EP_BELL_RUNG);
    assert_int_equal(flags, CU_STREAM_WAIT_VALUE_AND);
    if (wait_result == CUDA_SUCCESS)
        put((struct item){ .kind = LOOK });
    return wait_result;
}

/* Of the module's own stream: done when the next one is asked for, or when somebody waits for it. */
static void write_now(void)
{
    if (written.at)
        *written.at = written.value;
    written.at = NULL;
    go_on();
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned int flags)
{
    (void)stream;
    assert_int_equal(flags, CU_STREAM_WRITE_VALUE_DEFAULT);
    write_now();
    written.at = (uint32_t *)at;
    written.value = value;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    write_now();
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream)
{
    (void)stream;
    return next == n_items ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamDestroy(CUstream stream)
{
    (void)stream;
    streams--;
    return CUDA_SUCCESS;
}

ep_status ep_cuda_stream_make(uint32_t device, CUstream *stream, struct ep_error *error)
{
    (void)device, (void)error;
    *stream = (CUstream)(uintptr_t)++streams;
    return EP_OK;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    static uintptr_t events;

    assert_true(flags & CU_EVENT_BLOCKING_SYNC);
    *event = (CUevent)++events;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
    (void)event;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    put((struct item){ .kind = EVENT, .event = event });
    return CUDA_SUCCESS;
}

/* Nothing goes on meanwhile, so what is waited for has come. */
CUresult cuEventSynchronize(CUevent event)
{
    uint32_t i = n_items;

    while (i > 0 && items[i - 1].event != event)
        i--;
    assert_true(i > 0 && items[i - 1].over);
    return CUDA_SUCCESS;
}

struct ep_cuda_memory {
    struct ep_ll_desk desk;
};

ep_status ep_cuda_memory_create(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out, struct ep_error *error)
{
    (void)device, (void)error;
    assert_int_equal(bytes, sizeof(struct ep_ll_desk));
    *out = calloc(1, sizeof **out);
    assert_non_null(*out);
    places++;
    return EP_OK;
}

void ep_cuda_memory_destroy(struct ep_cuda_memory *memory)
{
    free(memory);
    places--;
}

void *ep_cuda_memory_at(const struct ep_cuda_memory *memory)
{
    return (void *)(uintptr_t)&memory->desk;
}

ep_status ep_cuda_write(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    memcpy(to, from, bytes);
    return EP_OK;
}

ep_status ep_cuda_read(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream, struct ep_error *error)
{
    return ep_cuda_write(device, to, from, bytes, stream, error);
}

ep_status ep_cuda_device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error)
{
    (void)device, (void)error;
    *info = (struct ep_cuda_device){ .sms = SMS, .major = 9, .name = "GPU" };
    return EP_OK;
}

ep_status ep_cuda_enter(uint32_t device, const struct ep_cuda_context **context, struct ep_error *error)
{
    static const struct ep_cuda_context only;

    (void)device, (void)error;
    if (context)
        *context = &only;
    return EP_OK;
}

void ep_cuda_leave(void)
{
}

ep_status ep_cuda_stream_sync(uint32_t device, void *stream, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    return EP_OK;
}

ep_status ep_cuda_fail(struct ep_error *error, CUresult result, const char *format, ...)
{
    (void)result;
    return ep_error_set(error, EP_INTERNAL, "%s", format);
}

const char *ep_ll_error_text(int error)
{
    return error ? "an error" : "no error";
}

/* As the kernels' own: blocks are told in any case. */
static int prepare(bool shares, uint32_t fit, uint32_t *blocks)
{
    fits.shares = shares;
    *blocks = fit;
    return fits.result;
}

int ep_ll_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    (void)shared_bytes;
    return prepare(shares, fits.ll, blocks);
}

int ep_ht_serve_prepare(uint32_t shared_bytes, bool shares, uint32_t *blocks)
{
    (void)shared_bytes;
    return prepare(shares, fits.ht, blocks);
}

int ep_ll_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks)
{
    (void)shared_bytes;
    *dispatch_blocks = fits.ll;
    return prepare(shares, fits.ll, combine_blocks);
}

int ep_ht_prepare(uint32_t shared_bytes, bool shares, uint32_t *dispatch_blocks, uint32_t *combine_blocks)
{
    (void)shared_bytes;
    *dispatch_blocks = fits.ht;
    return prepare(shares, fits.ht, combine_blocks);
}

int ep_ll_serve_one(const struct ep_ll_serve *serve, uint32_t blocks, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    launched_blocks = blocks;
    put((struct item){ .kind = ONE, .serve = *serve });
    return launch_result;
}

int ep_ht_serve_one(const struct ep_ll_serve *serve, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    put((struct item){ .kind = HT_ONE, .serve = *serve });
    return launch_result;
}

int ep_ll_expect(const struct ep_ll_expected *expected, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    assert_int_equal(expected->args.tokens, expected->at.op.tokens);
    put((struct item){ .kind = EXPECT, .serve = expected->serve, .at = expected->at });
    return launch_result;
}

int ep_ll_poll_prepare(void)
{
    return 0;
}

int ep_ll_poll(const struct ep_ll_expected *expected, void *stream)
{
    (void)stream;
    put((struct item){ .kind = POLL, .serve = expected->serve, .at = expected->at });
    return launch_result;
}

int ep_ht_expect(const struct ep_ht_expected *expected, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    put((struct item){ .kind = HT_EXPECT, .serve = expected->serve, .at = expected->at });
    return launch_result;
}

const struct ep_cuda_kernels ep_cuda_net_kernels = {
    .prepare = ep_ll_serve_prepare, .one = ep_ll_serve_one, .expect = ep_ll_expect, .ht_prepare = ep_ht_serve_prepare,
};

static int launch_own(uint32_t blocks)
{
    launched_blocks = blocks;
    return launch_result;
}

int ep_ll_dispatch(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    return launch_own(args->blocks);
}

int ep_ll_combine(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream)
{
    return ep_ll_dispatch(args, shared_bytes, stream);
}

int ep_ll_release(const struct ep_ll_args *args, void *stream)
{
    return ep_ll_dispatch(args, 0, stream);
}

int ep_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream)
{
    (void)shared_bytes, (void)stream;
    return launch_own(args->blocks);
}

int ep_ht_combine(const struct ep_ht_args *args, void *stream)
{
    return ep_ht_dispatch(args, 0, stream);
}

/* ---- a rank that is served ---------------------------------------------------------------- */

struct rank {
    struct ep_layout_map map;
    struct ep_placement placement;
    void *windows[RANKS];
    struct ep_device_state *state;
    struct ep_cuda_rank_options options;
    struct ep_cuda_serve *serve;
};

static void make_rank(struct rank *rank, uint32_t modes)
{
    const struct ep_limits limits = {
        .ranks = RANKS, .experts = EXPERTS, .local_experts = LOCAL, .top_k = K, .hidden = HIDDEN, .modes = modes,
        .dtypes = 1u << EP_BF16, .ll_max_tokens = TOKENS, .ht_max_tokens = TOKENS, .ll_banks = 2,
        .arena_bytes = 1u << 24,
    };

    memset(&control, 0, sizeof control);
    n_items = next = executed = left = 0;
    fits.result = launch_result = 0;
    fits.ll = 3;
    fits.ht = 2;
    wait_result = CUDA_SUCCESS;
    out_of_patience = false;
    memset(rank, 0, sizeof *rank);
    assert_int_equal(ep_layout_compute(&limits, &rank->map, NULL), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, EXPERTS, &rank->placement, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        rank->windows[r] = &control;
    rank->state = calloc(1, sizeof *rank->state);
    assert_non_null(rank->state);
    rank->options = (struct ep_cuda_rank_options){ .rank = 1, .map = &rank->map, .placement = &rank->placement,
                                                   .windows = rank->windows, .state = rank->state };
}

static void open_served(struct rank *rank)
{
    struct ep_error error = EP_ERROR_INIT;

    if (ep_cuda_serve_open(&rank->options, &rank->serve, &error) != EP_OK)
        fail_msg("%s", error.text);
}

static void end_served(struct rank *rank)
{
    assert_int_equal(ep_cuda_serve_end(rank->serve, 1000, NULL), EP_OK);
    ep_cuda_serve_close(rank->serve);
    rank->serve = NULL;
}

static void free_rank(struct rank *rank)
{
    ep_placement_free(&rank->placement);
    free(rank->state);
}

static void serve(struct rank *rank, uint32_t modes)
{
    make_rank(rank, modes);
    open_served(rank);
}

static void end(struct rank *rank)
{
    end_served(rank);
    free_rank(rank);
}

static void post(struct rank *rank)
{
    struct ep_error error = EP_ERROR_INIT;

    if (ep_cuda_serve_post(rank->serve, POST, &error) != EP_OK)
        fail_msg("%s", error.text);
}

static struct ep_ll_desk *its_desk(void)
{
    assert_true(n_items > 1);
    return items[1].serve.desk; /* behind the first look */
}

static uint32_t of_kind(enum kind kind, uint32_t from)
{
    uint32_t n = 0;

    for (uint32_t i = from; i < n_items; i++)
        n += items[i].kind == kind;
    return n;
}

/* As the server does: half of what may stand in the stream, whenever the half before is over. */
static void keep_posted(struct rank *rank)
{
    while (of_kind(LOOK, next) + of_kind(POLL, next) <= POST) {
        assert_int_equal(ep_cuda_serve_wait(rank->serve, NULL), EP_OK);
        post(rank);
    }
}

static struct ep_span take(const struct rank *rank, uint64_t *at, uint64_t bytes)
{
    const struct ep_span span = { rank->map.arena + *at, bytes };

    *at += (bytes + 15) / 16 * 16;
    return span;
}

static struct ep_op op_of(const struct rank *rank, uint32_t kind, ep_mode mode, uint32_t tokens)
{
    const uint64_t rows = (uint64_t)LOCAL * RANKS * TOKENS;
    uint64_t at = 0;
    struct ep_op op = { .kind = kind, .mode = mode, .input_dtype = EP_BF16, .wire_dtype = EP_BF16, .tokens = tokens,
                        .layout = mode == EP_MODE_HT ? EP_LAYOUT_FLAT : EP_LAYOUT_EXPERT_MAJOR, .top_k = K,
                        .index_bytes = 4, .alignment = 1 };

    if (kind == EP_OP_COMBINE) {
        op.x = take(rank, &at, rows * HIDDEN * 2);
        op.out = take(rank, &at, (uint64_t)tokens * HIDDEN * 2);
        return op;
    }
    op.x = take(rank, &at, (uint64_t)tokens * HIDDEN * 2);
    op.topk_idx = take(rank, &at, (uint64_t)tokens * K * 4);
    op.out = take(rank, &at, rows * HIDDEN * 2);
    op.counts = take(rank, &at, 64);
    return op;
}

static void ring(struct rank *rank, const struct ep_op *op, uint32_t place)
{
    const uint32_t before = executed;
    struct ep_error error = EP_ERROR_INIT;

    if (ep_op_check(&rank->map, op, &error) != EP_OK)
        fail_msg("%s", error.text);
    keep_posted(rank);
    mailbox->op[place] = *op;
    mailbox->bell = ep_bell_of(place);
    go_on();
    assert_int_equal(mailbox->bell, EP_BELL_DONE);
    assert_int_equal(executed, before + 1);
    assert_memory_equal(&last, op, sizeof *op);
}

static void ring_pairs(struct rank *rank, ep_mode mode, uint32_t pairs, uint32_t tokens)
{
    const struct ep_op dispatch = op_of(rank, EP_OP_DISPATCH, mode, tokens);
    const struct ep_op combine = op_of(rank, EP_OP_COMBINE, mode, tokens);

    for (uint32_t i = 0; i < pairs; i++) {
        ring(rank, &dispatch, 3);
        ring(rank, &combine, 4);
    }
}

/* ---- how many blocks ------------------------------------------------------------------------ */

static const uint32_t both = 1u << EP_MODE_LL | 1u << EP_MODE_HT;

static void check_served_blocks(uint32_t max_sms, bool shares, uint32_t sms, uint32_t ll, uint32_t ht)
{
    struct rank rank;
    const struct ep_ll_desk *desk;

    make_rank(&rank, both);
    rank.options.max_sms = max_sms;
    open_served(&rank);
    assert_int_equal(fits.shares, shares);
    post(&rank);
    desk = its_desk();
    assert_int_equal(desk->rank.sms, sms);
    assert_int_equal(desk->rank.dispatch_blocks, ll);
    assert_int_equal(desk->rank.combine_blocks, ll);
    assert_int_equal(desk->ht.rank.dispatch_blocks, ht);
    assert_int_equal(launched_blocks, ll);
    assert_int_equal(items[1].serve.ht_blocks, ht);
    end(&rank);
}

/* One multiprocessor is the worker's.  Who has but a part of a GPU has two blocks on each. */
static void a_served_rank_has_what_fits(void **state)
{
    (void)state;
    check_served_blocks(0, false, SMS - 1, 3 * (SMS - 1), 2 * (SMS - 1));
    check_served_blocks(SMS, false, SMS - 1, 3 * (SMS - 1), 2 * (SMS - 1));
    check_served_blocks(66, true, 65, 2 * 65, 2 * 65);
    check_served_blocks(1, true, 1, 2, 2);
}

static void check_own_blocks(uint32_t max_sms, uint32_t ll, uint32_t ht)
{
    struct rank rank;
    struct ep_cuda_rank *own;
    struct ep_op op;

    make_rank(&rank, both);
    rank.options.max_sms = max_sms;
    assert_int_equal(ep_cuda_rank_open(&rank.options, &own, NULL), EP_OK);
    op = op_of(&rank, EP_OP_DISPATCH, EP_MODE_LL, TOKENS);
    assert_int_equal(ep_cuda_rank_run(own, &op, NULL, NULL), EP_OK);
    assert_int_equal(launched_blocks, ll);
    op = op_of(&rank, EP_OP_DISPATCH, EP_MODE_HT, TOKENS);
    assert_int_equal(ep_cuda_rank_run(own, &op, NULL, NULL), EP_OK);
    assert_int_equal(launched_blocks, ht);
    ep_cuda_rank_close(own);
    free_rank(&rank);
}

static void a_rank_that_launches_has_what_fits(void **state)
{
    (void)state;
    check_own_blocks(0, 3 * SMS, 2 * SMS);
    check_own_blocks(33, 2 * 33, 2 * 33);
}

static void check_refused(uint32_t modes, int result, uint32_t ll, uint32_t ht)
{
    struct rank rank;
    struct ep_cuda_rank *own = NULL;
    struct ep_error error = EP_ERROR_INIT;

    make_rank(&rank, modes);
    fits.result = result;
    fits.ll = ll;
    fits.ht = ht;
    assert_int_equal(ep_cuda_serve_open(&rank.options, &rank.serve, &error), EP_UNIMPLEMENTED);
    assert_non_null(strstr(error.text, "do not run on device 0 (GPU, sm_90)"));
    assert_int_equal(ep_cuda_rank_open(&rank.options, &own, &error), EP_UNIMPLEMENTED);
    free_rank(&rank);
}

static void kernels_that_do_not_run_are_not_served(void **state)
{
    (void)state;
    check_refused(both, 1, 3, 2);
    check_refused(both, 0, 0, 2);
    check_refused(both, 0, 3, 0);
    check_refused(1u << EP_MODE_LL, 0, 0, 2);
}

/* ---- which kernels -------------------------------------------------------------------------- */

static void ops_that_repeat_are_expected(void **state)
{
    struct rank rank;
    uint32_t from;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 2 * POST, 7);
    from = n_items;
    ring_pairs(&rank, EP_MODE_LL, 4 * POST, 7);
    assert_in_range(of_kind(ONE, from), of_kind(LOOK, from) / EVERY, of_kind(LOOK, from) / EVERY + 1);
    assert_int_equal(of_kind(EXPECT, from), of_kind(LOOK, from) - of_kind(ONE, from));
    assert_int_equal(of_kind(HT_ONE, 0), 0);
    assert_int_equal(left, 0);
    end(&rank);
}

/* Of another form: it is executed once, by the next kernel that finds out. */
static void one_that_was_not_expected_is_left_to_the_next(void **state)
{
    struct rank rank;

    (void)state;
    serve(&rank, both);
    for (uint32_t i = 1; i <= 32; i++)
        ring_pairs(&rank, i % 2 ? EP_MODE_LL : EP_MODE_HT, 2 * POST + i % 16, 7);
    assert_true(left > 0);
    end(&rank);
}

/* And so are HT ops of the same form. */
static void another_ht_op_is_left_to_the_next(void **state)
{
    struct rank rank;

    (void)state;
    serve(&rank, both);
    for (uint32_t tokens = 1; tokens <= 32; tokens++)
        ring_pairs(&rank, EP_MODE_HT, 2 * POST + tokens % 16, tokens);
    assert_true(left > 0);
    end(&rank);
}

static void one_of_the_same_form_is_not(void **state)
{
    struct rank rank;
    uint32_t from;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 2 * POST, 1);
    from = n_items;
    for (uint32_t tokens = 1; tokens <= 4 * POST; tokens++)
        ring_pairs(&rank, EP_MODE_LL, 1, tokens);
    assert_in_range(of_kind(ONE, from), of_kind(LOOK, from) / EVERY, of_kind(LOOK, from) / EVERY + 1);
    assert_int_equal(left, 0);
    end(&rank);
}

static void ht_ops_have_kernels_of_their_own(void **state)
{
    struct rank rank;
    uint32_t from;

    (void)state;
    serve(&rank, both);
    ring_pairs(&rank, EP_MODE_HT, 2 * POST, 300);
    assert_int_equal(items[1].kind, ONE);
    assert_int_equal(items[2].kind, HT_ONE);
    from = n_items;
    ring_pairs(&rank, EP_MODE_HT, 2 * POST, 300);
    assert_true(of_kind(HT_EXPECT, from) > 0);
    assert_int_equal(of_kind(EXPECT, from), 0);
    assert_int_equal(of_kind(ONE, from), of_kind(HT_ONE, from));
    ring_pairs(&rank, EP_MODE_LL, 2, 5);
    end(&rank);
}

/* ---- a warp polls the doorbell ----------------------------------------------------------------- */

static void serve_polled(struct rank *rank, uint32_t modes)
{
    make_rank(rank, modes);
    rank->options.polls = true;
    mailbox->spins = true;
    open_served(rank);
}

/* Did a warp poll for the entry before item i's? */
static bool polled_ahead(uint32_t i)
{
    for (uint32_t j = i; j-- > 0;)
        if (items[j].kind != EVENT && items[j].serve.number == items[i].serve.number - 1)
            return items[j].serve.poll_ns > 0;
    return false;
}

/* In place of the stream, and of nothing else. */
static void a_warp_polls_for_ops_that_are_expected(void **state)
{
    struct rank rank;
    uint32_t from;

    (void)state;
    serve_polled(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 2 * POST, 7);
    from = n_items;
    ring_pairs(&rank, EP_MODE_LL, 4 * POST, 7);
    assert_true(of_kind(POLL, from) > 0);
    assert_int_equal(of_kind(POLL, from), of_kind(EXPECT, from));
    assert_in_range(of_kind(POLL, from) + of_kind(LOOK, from), of_kind(LOOK, from) * EVERY - EVERY,
                    of_kind(LOOK, from) * EVERY + EVERY);
    for (uint32_t i = from; i < n_items; i++)
        assert_int_equal(items[i].kind == EXPECT, items[i - 1].kind == POLL);
    for (uint32_t i = from; i < n_items; i++)
        if (items[i].kind == POLL)
            assert_int_equal(items[i].serve.ahead_polls, polled_ahead(i));
    assert_int_equal(left, 0);
    for (uint32_t tokens = 1; tokens <= 32; tokens++)
        ring_pairs(&rank, EP_MODE_LL, 2 * POST + tokens % 16, tokens);
    assert_int_equal(left, 0);
    end(&rank);
}

static void check_waits(struct rank *rank)
{
    open_served(rank);
    ring_pairs(rank, EP_MODE_LL, 4 * POST, 7);
    assert_true(of_kind(EXPECT, 0) > 0);
    assert_int_equal(of_kind(POLL, 0), 0);
    end(rank);
}

static void no_warp_polls_for_a_worker_without_mps(void **state)
{
    struct rank rank;

    (void)state;
    make_rank(&rank, 1u << EP_MODE_LL);
    rank.options.polls = true;
    check_waits(&rank);
}

static void no_warp_polls_between_nodes(void **state)
{
    struct rank rank;

    (void)state;
    make_rank(&rank, 1u << EP_MODE_LL);
    rank.options.polls = rank.options.net = true;
    mailbox->spins = true;
    check_waits(&rank);
}

static void no_warp_polls_for_an_ht_op(void **state)
{
    struct rank rank;

    (void)state;
    serve_polled(&rank, both);
    ring_pairs(&rank, EP_MODE_HT, 4 * POST, 300);
    assert_true(of_kind(HT_EXPECT, 0) > 0);
    assert_int_equal(of_kind(POLL, 0), 0);
    end(&rank);
}

/* No warp is there any more for one that rings for nothing. */
static void who_rings_for_nothing_comes_to_a_wait_of_the_stream(void **state)
{
    struct rank rank;

    (void)state;
    serve_polled(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 4 * POST, 7);
    for (uint32_t i = 0; i < EVERY; i++) { /* ops, so that each of the entries is the next one */
        const uint32_t before = executed;

        out_of_patience = true;
        go_on();
        assert_int_equal(items[next].kind, LOOK);
        assert_int_equal(executed, before);
        out_of_patience = false;
        ring_pairs(&rank, EP_MODE_LL, 1 + i % 8, 7);
    }
    end(&rank);
}

static void what_polls_ends(void **state)
{
    struct rank rank;

    (void)state;
    serve_polled(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 4 * POST, 7);
    assert_int_equal(items[next].kind, POLL);
    end(&rank);
    assert_null(written.at); /* the mailbox may be another serve's next */
    assert_int_equal(mailbox->bell, EP_BELL_CLOSING); /* not to be taken for the worker's, who may have announced an op */
    assert_int_equal(next, n_items);
    assert_int_equal(executed, 8 * POST);
}

/* What a worker rang for that the server refuses is expected of nobody. */
static void a_bad_op_is_not_expected(void **state)
{
    struct rank rank;
    struct ep_op op;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    op = op_of(&rank, EP_OP_DISPATCH, EP_MODE_LL, TOKENS);
    op.tokens = TOKENS + 1;
    for (uint32_t i = 0; i < 3 * POST; i++) {
        keep_posted(&rank);
        mailbox->op[0] = op;
        mailbox->bell = ep_bell_of(0);
        go_on();
    }
    assert_int_equal(executed, 3 * POST);
    assert_int_equal(of_kind(EXPECT, 0), 0);
    end(&rank);
}

/* ---- limits and the end ---------------------------------------------------------------------- */

static void a_stream_holds_so_many_entries(void **state)
{
    struct rank rank;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    for (uint32_t i = 0; i < EP_CUDA_SERVE_OPS / POST; i++)
        post(&rank);
    assert_int_equal(ep_cuda_serve_post(rank.serve, 1, &error), EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(error.text, "1 ops more than 128 that wait"));
    end(&rank);
}

static void after_the_end_nothing_runs(void **state)
{
    struct rank rank;

    (void)state;
    serve(&rank, both);
    ring_pairs(&rank, EP_MODE_LL, 3, 9);
    assert_int_equal(ep_cuda_serve_end(rank.serve, 1000, NULL), EP_OK);
    assert_int_equal(next, n_items);
    assert_int_equal(executed, 6);
    assert_int_equal(ep_cuda_serve_post(rank.serve, 1, NULL), EP_CANCELLED);
    assert_int_equal(ep_cuda_serve_wait(rank.serve, NULL), EP_CANCELLED);
    end(&rank);
}

static void what_the_driver_refuses_is_told(void **state)
{
    struct rank rank;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    wait_result = CUDA_ERROR_INVALID_VALUE;
    assert_int_equal(ep_cuda_serve_post(rank.serve, 1, &error), EP_INTERNAL);
    wait_result = CUDA_SUCCESS;
    launch_result = 1;
    assert_int_equal(ep_cuda_serve_post(rank.serve, 1, &error), EP_INTERNAL);
    assert_non_null(strstr(error.text, "launch on device"));
    launch_result = 0;
    end(&rank);
}

/* Places are kept: a driver that makes another stream while one waits would wait for that. */
static void places_are_used_again_and_there_are_so_many(void **state)
{
    enum { MOST = 4 }; /* queues without those that are left to others */
    struct rank rank[MOST + 1];
    struct ep_error error = EP_ERROR_INIT;
    uint32_t made;

    (void)state;
    assert_int_equal(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1), 0);
    for (uint32_t i = 0; i <= MOST; i++)
        make_rank(&rank[i], 1u << EP_MODE_LL);
    for (uint32_t i = 0; i < MOST; i++)
        open_served(&rank[i]);
    assert_int_equal(places, MOST);
    made = streams;
    assert_int_equal(ep_cuda_serve_open(&rank[MOST].options, &rank[MOST].serve, &error), EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(error.text, "device 0 serves 4 ranks already"));
    end_served(&rank[0]);
    open_served(&rank[MOST]);
    for (uint32_t i = 1; i <= MOST; i++)
        end_served(&rank[i]);
    assert_int_equal(places, MOST);
    assert_int_equal(streams, made);
    for (uint32_t i = 0; i <= MOST; i++)
        free_rank(&rank[i]);
}

/* Nobody is told of the ops of whoever had the place before. */
static void a_new_worker_is_not_expected_to_do_as_the_last_one(void **state)
{
    struct rank rank;
    uint32_t from;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    ring_pairs(&rank, EP_MODE_LL, 4 * POST, 7);
    assert_true(of_kind(EXPECT, 0) > 0);
    end_served(&rank);
    open_served(&rank);
    from = n_items;
    post(&rank);
    post(&rank);
    assert_int_equal(of_kind(EXPECT, from), 0);
    end(&rank);
}

/* ---- regions --------------------------------------------------------------------------------- */

static void a_region_is_forgotten_when_no_op_can_use_it(void **state)
{
    static uint8_t memory[64];
    const struct ep_region region = { memory, sizeof memory };
    struct rank rank;
    struct ep_ll_desk *desk;
    uint64_t entry = 0;

    (void)state;
    serve(&rank, 1u << EP_MODE_LL);
    keep_posted(&rank);
    desk = its_desk();
    assert_int_equal(ep_cuda_serve_region(rank.serve, 5, &region, NULL), EP_OK);
    assert_ptr_equal(desk->region[5].start, memory);
    assert_int_equal(desk->region[5].bytes, sizeof memory);
    desk->looked = 2; /* the second entry runs, and has looked */
    ring_pairs(&rank, EP_MODE_LL, 1, 7);
    desk->log.entry = 1;
    assert_int_equal(ep_cuda_serve_forget(rank.serve, 5, &entry, NULL), EP_OK);
    assert_int_equal(desk->region[5].bytes, 0);
    assert_int_equal(ep_cuda_serve_forgotten(rank.serve, entry, NULL), EP_UNAVAILABLE);
    desk->log.entry = 2;
    assert_int_equal(ep_cuda_serve_forgotten(rank.serve, entry, NULL), EP_OK);
    end(&rank);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_served_rank_has_what_fits),
        cmocka_unit_test(a_rank_that_launches_has_what_fits),
        cmocka_unit_test(kernels_that_do_not_run_are_not_served),
        cmocka_unit_test(ops_that_repeat_are_expected),
        cmocka_unit_test(one_that_was_not_expected_is_left_to_the_next),
        cmocka_unit_test(another_ht_op_is_left_to_the_next),
        cmocka_unit_test(one_of_the_same_form_is_not),
        cmocka_unit_test(ht_ops_have_kernels_of_their_own),
        cmocka_unit_test(a_bad_op_is_not_expected),
        cmocka_unit_test(a_warp_polls_for_ops_that_are_expected),
        cmocka_unit_test(no_warp_polls_for_a_worker_without_mps),
        cmocka_unit_test(no_warp_polls_between_nodes),
        cmocka_unit_test(no_warp_polls_for_an_ht_op),
        cmocka_unit_test(who_rings_for_nothing_comes_to_a_wait_of_the_stream),
        cmocka_unit_test(what_polls_ends),
        cmocka_unit_test(a_stream_holds_so_many_entries),
        cmocka_unit_test(after_the_end_nothing_runs),
        cmocka_unit_test(what_the_driver_refuses_is_told),
        cmocka_unit_test(places_are_used_again_and_there_are_so_many),
        cmocka_unit_test(a_new_worker_is_not_expected_to_do_as_the_last_one),
        cmocka_unit_test(a_region_is_forgotten_when_no_op_can_use_it),
    };

    return cmocka_run_group_tests_name("cuda_serve", tests, NULL, NULL);
}

#endif
