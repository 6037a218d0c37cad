/*
 * The engine against a real team.  The "client" is this file: it writes the ring by hand, through
 * a mapping of its own, as a worker's process would.
 */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "ep_clock.h"
#include "ep_engine.h"
#include "ep_futex.h"

enum { MAX_RANKS = 2, EXPERTS = 4, HIDDEN = 16, TOP_K = 2, LL_TOKENS = 4, ARENA = 65536 };
#define PATIENCE_NS (20 * EP_NS_PER_S)

struct rank {
    struct ep_engine *engine;
    struct ep_rank_counters counters;
    uint8_t *server, *client, *hostile; /* mappings of one window: of three processes, as it were */
    struct ep_control *control;         /* the client's */
    uint64_t next;
    struct ep_engine_timeout timeout;
    int timeouts;
    bool stopped;
};

struct fixture {
    uv_loop_t loop;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_host_team *team;
    uint32_t n;
    struct rank rank[MAX_RANKS];
};

/* ---- set-up ------------------------------------------------------------------------------ */

static void on_timeout(const struct ep_engine_timeout *timeout, void *user)
{
    struct rank *rank = user;

    rank->timeout = *timeout;
    rank->timeouts++;
}

static void on_stopped(void *user)
{
    ((struct rank *)user)->stopped = true;
}

static void start(struct fixture *f, uint32_t r)
{
    struct rank *rank = &f->rank[r];
    struct ep_error error = EP_ERROR_INIT;
    const struct ep_engine_options options = {
        .loop = &f->loop, .team = f->team, .map = &f->map, .rank = r, .epoch = 7, .window = rank->server,
        .counters = &rank->counters, .on_timeout = on_timeout, .user = rank,
    };

    rank->stopped = false;
    rank->next = 0;
    if (ep_engine_start(&options, &rank->engine, &error) != EP_OK)
        fail_msg("%s", error.text);
}

/* Runs the loop until *flag is set. */
static void run_until(struct fixture *f, const bool *flag)
{
    const uint64_t end = ep_clock_ns() + PATIENCE_NS;

    while (!*flag && ep_clock_ns() < end)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_true(*flag);
}

static void stop(struct fixture *f, uint32_t r)
{
    struct rank *rank = &f->rank[r];

    if (!rank->engine)
        return;
    ep_host_team_leave(f->team, r);
    ep_engine_stop(rank->engine, on_stopped, rank);
    rank->engine = NULL;
    run_until(f, &rank->stopped);
}

static void map_window(struct fixture *f, uint32_t r)
{
    struct rank *rank = &f->rank[r];
    int fd = memfd_create("test_engine", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)f->map.total_bytes), 0);
    rank->server = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    rank->client = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    rank->hostile = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(rank->server != MAP_FAILED && rank->client != MAP_FAILED && rank->hostile != MAP_FAILED);
    rank->control = (struct ep_control *)(void *)rank->client;
    close(fd);
    ep_host_team_set_window(f->team, r, rank->server);
}

static struct fixture *make(uint32_t ranks, uint32_t timeout_ms)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_limits limits = {
        .ranks = ranks, .experts = EXPERTS, .local_experts = EXPERTS / ranks, .top_k = TOP_K,
        .hidden = HIDDEN, .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT, .dtypes = 1u << EP_FP32,
        .ll_max_tokens = LL_TOKENS, .ht_max_tokens = 8, .ll_banks = 2, .arena_bytes = ARENA,
    };

    f->n = ranks;
    assert_int_equal(uv_loop_init(&f->loop), 0);
    assert_int_equal(ep_layout_compute(&limits, &f->map, &error), EP_OK);
    assert_int_equal(ep_placement_contiguous(ranks, EXPERTS, &f->placement, &error), EP_OK);
    assert_int_equal(ep_host_team_create(&f->map, &f->placement, timeout_ms, NULL, &f->team, &error), EP_OK);
    for (uint32_t r = 0; r < ranks; r++) {
        map_window(f, r);
        start(f, r);
    }
    return f;
}

static void destroy(struct fixture *f)
{
    for (uint32_t r = 0; r < f->n; r++)
        stop(f, r);
    while (uv_run(&f->loop, UV_RUN_NOWAIT))
        ;
    assert_int_equal(uv_loop_close(&f->loop), 0);
    ep_host_team_destroy(f->team);
    ep_placement_free(&f->placement);
    for (uint32_t r = 0; r < f->n; r++) {
        munmap(f->rank[r].server, f->map.total_bytes);
        munmap(f->rank[r].client, f->map.total_bytes);
        munmap(f->rank[r].hostile, f->map.total_bytes);
    }
    free(f);
}

/* ---- the client's half, by hand ------------------------------------------------------------ */

static struct ep_ring_slot *slot_at(struct rank *rank, uint64_t n)
{
    return &rank->control->slot[n % EP_RING_SLOTS];
}

static void ring(struct rank *rank, struct ep_ring_slot *slot)
{
    __atomic_store_n(&slot->doorbell, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&rank->control->wake, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&rank->control->asleep, __ATOMIC_SEQ_CST))
        ep_futex_wake_all(&rank->control->wake);
}

static uint64_t post(struct rank *rank, const struct ep_op *op)
{
    struct ep_ring_slot *slot = slot_at(rank, rank->next);

    slot->op = *op;
    ring(rank, slot);
    return rank->next++;
}

static struct ep_op_result await(struct rank *rank, uint64_t n)
{
    struct ep_ring_slot *slot = slot_at(rank, n);
    const uint64_t end = ep_clock_ns() + PATIENCE_NS;
    struct ep_op_result result;

    while (__atomic_load_n(&slot->done, __ATOMIC_ACQUIRE) != 1) {
        assert_true(ep_clock_ns() < end);
        __atomic_store_n(&slot->waiters, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&slot->done, __ATOMIC_SEQ_CST) == 0)
            ep_futex_wait(&slot->done, 0, EP_NS_PER_S);
    }
    result = slot->result;
    __atomic_store_n(&slot->waiters, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->done, 0, __ATOMIC_RELEASE);
    return result;
}

static struct ep_op_result run(struct rank *rank, const struct ep_op *op)
{
    return await(rank, post(rank, op));
}

/* Fixed places in the arena. */
enum { AT_X = 0, AT_TOPK = 4096, AT_COUNTS = 4352, AT_RESULT = 8192, AT_OUT = 16384 };

static struct ep_span at(const struct fixture *f, uint64_t offset, uint64_t bytes)
{
    return (struct ep_span){ .offset = f->map.arena + offset, .bytes = bytes };
}

static uint64_t out_bytes(const struct fixture *f)
{
    return (uint64_t)f->map.limits.local_experts * f->n * LL_TOKENS * HIDDEN * 4;
}

static struct ep_op dispatch_op(const struct fixture *f)
{
    return (struct ep_op){
        .kind = EP_OP_DISPATCH, .mode = EP_MODE_LL, .layout = EP_LAYOUT_EXPERT_MAJOR,
        .input_dtype = EP_FP32, .wire_dtype = EP_FP32, .tokens = LL_TOKENS, .top_k = TOP_K,
        .index_bytes = 4, .alignment = 1, .handle = 0, .generation = 1,
        .x = at(f, AT_X, LL_TOKENS * HIDDEN * 4), .topk_idx = at(f, AT_TOPK, LL_TOKENS * TOP_K * 4),
        .out = at(f, AT_OUT, out_bytes(f)), .counts = at(f, AT_COUNTS, 4ull * f->map.limits.local_experts),
    };
}

static struct ep_op combine_op(const struct fixture *f)
{
    return (struct ep_op){
        .kind = EP_OP_COMBINE, .mode = EP_MODE_LL, .layout = EP_LAYOUT_EXPERT_MAJOR,
        .input_dtype = EP_FP32, .wire_dtype = EP_FP32, .tokens = LL_TOKENS, .top_k = TOP_K,
        .index_bytes = 4, .alignment = 1, .handle = 0, .generation = 1, .x = at(f, AT_OUT, out_bytes(f)),
        .out = at(f, AT_RESULT, LL_TOKENS * HIDDEN * 4),
    };
}

static void write_inputs(struct fixture *f, uint32_t r)
{
    float *x = (float *)(void *)(f->rank[r].client + f->map.arena + AT_X);
    int32_t *topk = (int32_t *)(void *)(f->rank[r].client + f->map.arena + AT_TOPK);

    for (int t = 0; t < LL_TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            x[t * HIDDEN + h] = (float)(100 * (int)r + t);
        for (int k = 0; k < TOP_K; k++)
            topk[t * TOP_K + k] = (t + 2 * k) % EXPERTS;
    }
}

/* Identity experts, weights 1: a token comes back TOP_K times itself. */
static void check_result(struct fixture *f, uint32_t r)
{
    const float *y = (const float *)(const void *)(f->rank[r].client + f->map.arena + AT_RESULT);

    for (int t = 0; t < LL_TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            assert_true(fabsf(y[t * HIDDEN + h] - (float)TOP_K * (float)(100 * (int)r + t)) < 1e-3f);
}

static void round_trip(struct fixture *f)
{
    const struct ep_op dispatch = dispatch_op(f), combine = combine_op(f);
    uint64_t first[MAX_RANKS];

    for (uint32_t r = 0; r < f->n; r++) {
        write_inputs(f, r);
        first[r] = post(&f->rank[r], &dispatch);
        post(&f->rank[r], &combine);
    }
    for (uint32_t r = 0; r < f->n; r++)
        for (uint64_t n = 0; n < 2; n++) {
            struct ep_op_result result = await(&f->rank[r], first[r] + n);

            if (result.status != EP_OK)
                fail_msg("rank %u op %d: %s", r, (int)n, result.text);
        }
    for (uint32_t r = 0; r < f->n; r++)
        check_result(f, r);
}

static void await_asleep(struct rank *rank)
{
    const uint64_t end = ep_clock_ns() + PATIENCE_NS;

    while (!__atomic_load_n(&rank->control->asleep, __ATOMIC_SEQ_CST))
        assert_true(ep_clock_ns() < end);
}

static uint64_t count(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void the_control_block_is_formatted(void **state)
{
    struct fixture *f = make(2, 10000);
    const struct ep_control *c = f->rank[1].control;

    (void)state;
    assert_int_equal(c->head.magic, EP_WINDOW_MAGIC);
    assert_int_equal(c->head.version, EP_WINDOW_VERSION);
    assert_int_equal(c->head.rank, 1);
    assert_int_equal(c->head.epoch, 7);
    assert_memory_equal(&c->head.limits, &f->map.limits, sizeof c->head.limits);
    destroy(f);
}

static void ops_go_through(void **state)
{
    struct fixture *f = make(2, 10000);

    (void)state;
    for (int i = 0; i < 100; i++) /* the ring wraps a few times */
        round_trip(f);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_DISPATCH].count), 100);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_COMBINE].count), 100);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_DISPATCH].tokens), 100 * LL_TOKENS);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_DISPATCH].errors), 0);
    uint64_t in_buckets = 0;
    for (int i = 0; i < 16; i++)
        in_buckets += count(&f->rank[0].counters.op[EP_CLASS_LL_DISPATCH].buckets[i]);
    assert_int_equal(in_buckets, 100);
    destroy(f);
}

static void a_full_ring_is_served_in_order(void **state)
{
    struct fixture *f = make(1, 10000);
    const struct ep_op dispatch = dispatch_op(f), combine = combine_op(f);
    uint64_t last = 0;

    (void)state;
    write_inputs(f, 0);
    for (int i = 0; i < (int)EP_RING_SLOTS / 2; i++) {
        post(&f->rank[0], &dispatch);
        post(&f->rank[0], &combine);
    }
    for (uint64_t n = 0; n < EP_RING_SLOTS; n++) {
        struct ep_op_result result = await(&f->rank[0], n);

        assert_int_equal(result.status, EP_OK);
        assert_true(result.start_ns >= last);
        last = result.end_ns;
    }
    destroy(f);
}

static void expect_refusal(struct fixture *f, const struct ep_op *op, const char *field)
{
    struct rank *rank = &f->rank[0];
    const uint64_t before = count(&rank->counters.bad_descriptors);
    struct ep_op_result result = run(rank, op);

    assert_int_equal(result.status, EP_INVALID_ARGUMENT);
    if (!strstr(result.text, field))
        fail_msg("\"%s\" does not name %s", result.text, field);
    assert_int_equal(count(&rank->counters.bad_descriptors), before + 1);
}

static void bad_descriptors_are_refused_and_named(void **state)
{
    struct fixture *f = make(1, 10000);
    struct ep_op op = dispatch_op(f);

    (void)state;
    op.kind = 99;
    expect_refusal(f, &op, "kind");
    op = dispatch_op(f);
    op.mode = 77;
    expect_refusal(f, &op, "mode");
    op = dispatch_op(f);
    op.tokens = LL_TOKENS + 1;
    expect_refusal(f, &op, "tokens");
    op = dispatch_op(f);
    op.top_k = TOP_K + 1;
    expect_refusal(f, &op, "top_k");
    op = dispatch_op(f);
    op.handle = EP_MAX_HANDLES;
    expect_refusal(f, &op, "handle");
    op = dispatch_op(f);
    op.x.offset = UINT64_MAX - 15;
    expect_refusal(f, &op, "x");
    op = dispatch_op(f);
    op.x.offset = 0; /* the control block */
    expect_refusal(f, &op, "x");
    op = dispatch_op(f);
    op.out.offset = f->map.total_bytes;
    expect_refusal(f, &op, "out");
    op = dispatch_op(f);
    op.counts.bytes = UINT64_MAX;
    expect_refusal(f, &op, "counts");
    memset(&op, 0xff, sizeof op);
    expect_refusal(f, &op, "");
    round_trip(f); /* and it still works */
    destroy(f);
}

static void an_error_of_an_op_is_no_bad_descriptor(void **state)
{
    struct fixture *f = make(1, 10000);
    const struct ep_op combine = combine_op(f);
    struct ep_op_result result = run(&f->rank[0], &combine);

    (void)state;
    assert_int_equal(result.status, EP_STALE_HANDLE);
    assert_int_equal(count(&f->rank[0].counters.bad_descriptors), 0);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_COMBINE].errors), 1);
    destroy(f);
}

static void idle_engines_use_no_cpu(void **state)
{
    struct fixture *f = make(2, 10000);
    struct timespec before, after;

    (void)state;
    await_asleep(&f->rank[0]);
    await_asleep(&f->rank[1]);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep(300 * 1000); /* the time that is measured */
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    assert_true((after.tv_sec - before.tv_sec) * 1000000000l + after.tv_nsec - before.tv_nsec < 20000000l);
    round_trip(f);
    destroy(f);
}

static void a_late_rank_is_reported_on_the_loop(void **state)
{
    struct fixture *f = make(2, 1000);
    const struct ep_op dispatch = dispatch_op(f);
    struct ep_op_result result;
    const uint64_t end = ep_clock_ns() + PATIENCE_NS;

    (void)state;
    write_inputs(f, 0);
    result = run(&f->rank[0], &dispatch);
    assert_int_equal(result.status, EP_TIMEOUT);
    assert_int_equal(result.late_rank, 1);
    while (!f->rank[0].timeouts && ep_clock_ns() < end)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->rank[0].timeouts, 1);
    assert_int_equal(f->rank[0].timeout.late_rank, 1);
    assert_int_equal(f->rank[0].timeout.op_class, EP_CLASS_LL_DISPATCH);
    assert_true(f->rank[0].timeout.waited_us >= 500000);
    assert_int_equal(count(&f->rank[0].counters.op[EP_CLASS_LL_DISPATCH].timeouts), 1);
    destroy(f);
}

static void stop_ends_a_running_op(void **state)
{
    struct fixture *f = make(2, 60000);
    const struct ep_op dispatch = dispatch_op(f);
    const uint64_t start_ns = ep_clock_ns();
    uint64_t n;

    (void)state;
    write_inputs(f, 0);
    n = post(&f->rank[0], &dispatch); /* waits for rank 1 */
    stop(f, 0);
    assert_true(ep_clock_ns() - start_ns < PATIENCE_NS);
    if (__atomic_load_n(&slot_at(&f->rank[0], n)->done, __ATOMIC_ACQUIRE))
        assert_int_equal(slot_at(&f->rank[0], n)->result.status, EP_DETACHED);
    destroy(f);
}

static void a_rank_can_be_served_again(void **state)
{
    struct fixture *f = make(2, 10000);

    (void)state;
    for (int i = 0; i < 20; i++) {
        round_trip(f);
        stop(f, 1);
        ep_host_team_join(f->team, 1);
        start(f, 1);
    }
    round_trip(f);
    destroy(f);
}

/* ---- hostile clients ------------------------------------------------------------------------ */

struct hostile {
    struct fixture *fixture;
    struct ep_control *control; /* of rank 0 */
    pthread_t thread;
    uint32_t stop;
    void (*act)(struct hostile *hostile, unsigned *seed);
};

static void *run_hostile(void *arg)
{
    struct hostile *h = arg;
    unsigned seed = 1;

    while (!__atomic_load_n(&h->stop, __ATOMIC_RELAXED))
        h->act(h, &seed);
    return NULL;
}

static void begin(struct hostile *h)
{
    h->control = (struct ep_control *)(void *)h->fixture->rank[0].hostile;
    assert_int_equal(pthread_create(&h->thread, NULL, run_hostile, h), 0);
}

static void end(struct hostile *h)
{
    __atomic_store_n(&h->stop, 1, __ATOMIC_RELAXED);
    pthread_join(h->thread, NULL);
}

/* Any word of the control block, limits and ring included, gets any value. */
static void scribble(struct hostile *h, unsigned *seed)
{
    uint32_t *words = (uint32_t *)(void *)h->control;

    for (int i = 0; i < 1000; i++)
        __atomic_store_n(&words[(unsigned)rand_r(seed) % (sizeof(struct ep_control) / 4)],
                         (uint32_t)rand_r(seed) & (rand_r(seed) % 4 ? 3u : UINT32_MAX), __ATOMIC_RELAXED);
}

static void scribbling_hurts_only_the_scribbler(void **state)
{
    struct fixture *f = make(2, 20);
    struct hostile h = { .fixture = f, .act = scribble };
    const struct ep_op dispatch = dispatch_op(f);

    (void)state;
    write_inputs(f, 1);
    begin(&h);
    for (int i = 0; i < 50; i++) {
        struct ep_op_result result = run(&f->rank[1], &dispatch);

        assert_true(result.status == EP_OK || result.status == EP_TIMEOUT);
    }
    stop(f, 0); /* while it goes on */
    end(&h);
    for (int i = 0; i < 10; i++)
        assert_int_equal(run(&f->rank[1], &dispatch).status, EP_OK); /* without rank 0 */
    destroy(f);
}

static void keep_wake(struct hostile *h, unsigned *seed)
{
    (void)seed;
    __atomic_store_n(&h->control->wake, 5, __ATOMIC_SEQ_CST);
    __atomic_store_n(&h->control->asleep, 0, __ATOMIC_SEQ_CST);
}

static void a_client_that_holds_wake_still_cannot_keep_the_engine(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct fixture *f = make(1, 1000);
        struct hostile h = { .fixture = f, .act = keep_wake };
        uint64_t start_ns;

        begin(&h);
        start_ns = ep_clock_ns();
        stop(f, 0);
        assert_true(ep_clock_ns() - start_ns < PATIENCE_NS);
        end(&h);
        destroy(f);
    }
}

/* A descriptor that is good when it is checked and evil when it is used, if it were read twice. */
static void flip_offsets(struct hostile *h, unsigned *seed)
{
    (void)seed;
    for (uint32_t i = 0; i < EP_RING_SLOTS; i++) {
        struct ep_op *op = &h->control->slot[i].op;

        __atomic_store_n(&op->out.offset, UINT64_MAX - 4095, __ATOMIC_RELAXED);
        __atomic_store_n(&op->tokens, UINT32_MAX, __ATOMIC_RELAXED);
        __atomic_store_n(&op->tokens, LL_TOKENS, __ATOMIC_RELAXED);
        __atomic_store_n(&op->out.offset, h->fixture->map.arena + AT_OUT, __ATOMIC_RELAXED);
    }
}

static void descriptors_are_read_once(void **state)
{
    struct fixture *f = make(1, 1000);
    struct hostile h = { .fixture = f, .act = flip_offsets };
    const struct ep_op dispatch = dispatch_op(f);
    int good = 0, bad = 0;

    (void)state;
    write_inputs(f, 0);
    begin(&h);
    for (int i = 0; i < 5000; i++) {
        struct ep_op_result result = run(&f->rank[0], &dispatch);

        if (result.status == EP_OK)
            good++;
        else
            bad++;
        assert_true(result.status == EP_OK || result.status == EP_INVALID_ARGUMENT);
    }
    end(&h);
    assert_int_equal(count(&f->rank[0].counters.bad_descriptors), bad);
    assert_int_equal(good + bad, 5000);
    destroy(f);
}

static void class_names(void **state)
{
    (void)state;
    assert_string_equal(ep_op_class_name(EP_CLASS_HT_COMBINE), "ht_combine");
    assert_string_equal(ep_op_class_name(EP_OP_CLASSES), "?");
}

int main(void)
{
    /* libuv 1.45 to 1.48 has the kernel poll for it 10 ms from the loop's start, on our bill. */
    setenv("UV_USE_IO_URING", "0", 1);

    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_control_block_is_formatted),
        cmocka_unit_test(ops_go_through),
        cmocka_unit_test(a_full_ring_is_served_in_order),
        cmocka_unit_test(bad_descriptors_are_refused_and_named),
        cmocka_unit_test(an_error_of_an_op_is_no_bad_descriptor),
        cmocka_unit_test(idle_engines_use_no_cpu),
        cmocka_unit_test(a_late_rank_is_reported_on_the_loop),
        cmocka_unit_test(stop_ends_a_running_op),
        cmocka_unit_test(a_rank_can_be_served_again),
        cmocka_unit_test(scribbling_hurts_only_the_scribbler),
        cmocka_unit_test(a_client_that_holds_wake_still_cannot_keep_the_engine),
        cmocka_unit_test(descriptors_are_read_once),
        cmocka_unit_test(class_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
