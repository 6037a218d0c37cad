/* The host team, on one node. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "host_fixture.h"

/* ---- every layout and dtype ------------------------------------------------------------ */

static void here(ep_mode mode, ep_layout layout, bool replicas, uint32_t ranks)
{
    struct fixture *f = fixture_new(ranks, replicas, 20000);

    all_dtypes(f, mode, layout);
    fixture_free(f);
}

static void ll_expert_major(void **s) { (void)s; here(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR, false, 3); }
static void ll_rank_major(void **s) { (void)s; here(EP_MODE_LL, EP_LAYOUT_RANK_MAJOR, false, 3); }
static void ll_packed(void **s) { (void)s; here(EP_MODE_LL, EP_LAYOUT_PACKED, false, 3); }
static void ll_replicas(void **s) { (void)s; here(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR, true, 4); }
static void ll_one_rank(void **s) { (void)s; here(EP_MODE_LL, EP_LAYOUT_PACKED, false, 1); }
static void ht_flat(void **s) { (void)s; here(EP_MODE_HT, EP_LAYOUT_FLAT, false, 3); }
static void ht_packed(void **s) { (void)s; here(EP_MODE_HT, EP_LAYOUT_PACKED, false, 3); }
static void ht_replicas(void **s) { (void)s; here(EP_MODE_HT, EP_LAYOUT_PACKED, true, 4); }
static void ht_one_rank(void **s) { (void)s; here(EP_MODE_HT, EP_LAYOUT_FLAT, false, 1); }

/* ---- late ranks ---------------------------------------------------------------------------------------- */

static void late(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(3, false, 1000); /* a thread may begin late */
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 2; r++) { /* rank 2 does not come */
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_TIMEOUT);
        assert_int_equal(one[r].result.late_rank, 2);
        assert_int_equal(one[r].result.wait_phase, mode == EP_MODE_LL ? EP_WAIT_ARRIVAL : EP_WAIT_READY);
        assert_non_null(strstr(one[r].result.text, "rank 2 was late"));
        assert_true(one[r].result.wait_ns >= 500 * EP_NS_PER_MS);
    }
    /* a handle whose dispatch failed cannot be combined */
    build_combine(f, 0, c, 0, &one[0].op);
    assert_int_equal(execute(f, 0, &one[0].op, &one[0].result), EP_STALE_HANDLE);

    /* it comes after all, finds what it can, and then all go on together */
    one[2].op = c->dispatch[2];
    run_one(f, 2, &one[2]);
    assert_int_equal(one[2].result.status, EP_OK);
    if (mode == EP_MODE_HT)
        assert_int_equal(one[2].result.arrived[0], 4); /* the others had closed */
    else
        assert_int_equal(one[2].result.arrived[0], 7); /* their rows had come */
    ep_host_team_set_timeout(f->team, 20000);
    c->bias = true;
    for (int i = 0; i < 5; i++)
        parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

static void a_late_rank_is_named_ll(void **s) { (void)s; late(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR); }
static void a_late_rank_is_named_ht(void **s) { (void)s; late(EP_MODE_HT, EP_LAYOUT_FLAT); }

/* ---- leaving ---------------------------------------------------------------------------------------------- */

static bool in_arrived(const struct ep_op_result *result, uint32_t r) { return result->arrived[0] >> r & 1; }

/* Rank 2 never begins and leaves: peers that wait for it end well without it. */
static void leave_before(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 2; r++) {
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    ep_host_team_leave(f->team, 2);
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_OK);
        assert_false(in_arrived(&one[r].result, 2));
        assert_int_equal(one[r].result.absent, 1);
    }
    execute(f, 2, &c->dispatch[2], &one[2].result);
    assert_int_equal(one[2].result.status, EP_DETACHED);
    /* it comes back with a clean window */
    memset(f->window[2], 0, f->map.total_bytes);
    ep_host_team_join(f->team, 2);
    for (int i = 0; i < 4; i++)
        parallel(f, pass, c);
    /* everybody leaves and starts anew */
    for (uint32_t r = 0; r < 3; r++)
        ep_host_team_leave(f->team, r);
    ep_host_team_reset(f->team);
    for (int i = 0; i < 3; i++)
        parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

static void peers_go_on_without_a_rank_ll(void **s) { (void)s; leave_before(EP_MODE_LL, EP_LAYOUT_PACKED); }
static void peers_go_on_without_a_rank_ht(void **s) { (void)s; leave_before(EP_MODE_HT, EP_LAYOUT_PACKED); }

/* Rank 1's row for a token of rank 0, which announced it: zero, from no token, for no expert. */
static void check_missing(struct fixture *f, const struct ep_op *op, uint64_t row)
{
    const struct ep_source *source = (const struct ep_source *)at(f, 1, op->sources) + row;
    const uint8_t *bytes = (const uint8_t *)at(f, 1, op->out) + row * row_bytes(EP_BF16);

    CHECK(source->rank == 0 && source->token == EP_NO_TOKEN, "row %llu is token %u of rank %u", (unsigned long long)row,
          source->token, source->rank);
    for (uint32_t i = 0; i < row_bytes(EP_BF16); i++)
        CHECK(bytes[i] == 0, "row %llu is not zero", (unsigned long long)row);
    for (uint32_t j = 0; op->out_topk.bytes && j < op->top_k; j++)
        CHECK(((const int32_t *)at(f, 1, op->out_topk))[row * op->top_k + j] == -1, "row %llu has an expert",
              (unsigned long long)row);
}

/* Rows of rank 0 at rank 1, in order; how many are missing. */
static uint32_t missing_rows(struct fixture *f, const struct config *c, const struct ep_op *op)
{
    const int32_t *counts = at(f, 1, op->counts), *offsets = op->offsets.bytes ? at(f, 1, op->offsets) : NULL;
    uint32_t missing = 0;

    for (uint32_t l = 0; l < (offsets ? f->L : 1); l++) {
        uint64_t row = offsets ? (uint64_t)offsets[l] : 0, end = row + (uint64_t)counts[l];

        for (; row < end && ((const struct ep_source *)at(f, 1, op->sources))[row].rank == 0; row++, missing++)
            check_missing(f, op, row);
        for (; row < end; row++)
            CHECK(((const struct ep_source *)at(f, 1, op->sources))[row].token < c->in.tokens[1], "row %llu",
                  (unsigned long long)row);
    }
    return missing;
}

/* How many of rank 0's rows go to rank 1. */
static uint32_t rows_announced(struct fixture *f, const struct config *c)
{
    uint32_t n = 0;

    for (uint32_t t = 0; t < c->in.tokens[0]; t++) {
        uint32_t rank, local, last = UINT32_MAX;

        for (uint32_t j = 0; j < c->in.k; j++)
            if (home(f, &c->in, 0, t, j, &rank, &local) && rank == 1) {
                n += c->layout == EP_LAYOUT_PACKED ? local != last : last == UINT32_MAX;
                last = local;
            }
    }
    return n;
}

/* Rank 0 announces its rows and leaves while rank 1, which knows of them, still waits for rank 2's. */
static uint32_t leave_between(struct fixture *f, struct config *c)
{
    struct one_op one[3];
    struct thread threads[3];
    uint32_t missing;

    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 3; r++) {
        one[r].op = c->dispatch[r];
        if (r == 2) {
            nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL); /* they have begun, most of the time */
            ep_host_team_leave(f->team, 0);
        }
        start(&threads[r], f, r, run_one, &one[r]);
    }
    for (uint32_t r = 0; r < 3; r++)
        pthread_join(threads[r].id, NULL);
    assert_int_equal(one[0].result.status, EP_DETACHED);
    assert_int_equal(one[1].result.status, EP_OK);
    assert_false(in_arrived(&one[1].result, 0));
    missing = missing_rows(f, c, &one[1].op);
    assert_true(missing == 0 || missing == rows_announced(f, c));
    memset(f->window[0], 0, f->map.total_bytes);
    ep_host_team_join(f->team, 0);
    parallel(f, pass, c);
    return missing;
}

static void rows_that_never_come_are_zero(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    uint32_t seen = 0;

    (void)s;
    for (int layout = EP_LAYOUT_PACKED; layout <= EP_LAYOUT_FLAT; layout++, seen = 0) {
        simple_config(c, f, EP_MODE_HT, (ep_layout)layout, 4);
        for (int i = 0; i < 100 && seen < 5; i++)
            seen += leave_between(f, c) > 0;
        assert_true(seen > 0);
    }
    free(c);
    fixture_free(f);
}

/* A rank that waits for peers leaves: its op ends as detached. */
static void own_op_ends(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new(2, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one = { .over = 0 };
    struct thread thread;

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    one.op = c->dispatch[0];
    start(&thread, f, 0, run_one, &one);
    ep_host_team_leave(f->team, 0);
    pthread_join(thread.id, NULL);
    assert_int_equal(one.result.status, EP_DETACHED);
    free(c);
    fixture_free(f);
}

static void own_op_ends_when_its_rank_leaves(void **s)
{
    (void)s;
    for (int i = 0; i < 20; i++) {
        own_op_ends(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
        own_op_ends(EP_MODE_HT, EP_LAYOUT_FLAT);
    }
}

/* The combine of a dispatch whose peer is gone: its experts contribute nothing. */
static void combine_without_a_peer(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[3];
    struct thread threads[3];

    (void)s;
    for (int mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++) {
        simple_config(c, f, (ep_mode)mode, EP_LAYOUT_PACKED, 4);
        build_all(f, c, 0);
        memset(one, 0, sizeof one);
        for (int half = 0; half < 2; half++) {
            for (uint32_t r = 0; r < 3u - (uint32_t)half; r++) {
                one[r].op = c->dispatch[r];
                if (half)
                    build_combine(f, r, c, 0, &one[r].op);
                start(&threads[r], f, r, run_one, &one[r]);
            }
            if (half)
                ep_host_team_leave(f->team, 2);
            for (uint32_t r = 0; r < 3u - (uint32_t)half; r++) {
                pthread_join(threads[r].id, NULL);
                assert_int_equal(one[r].result.status, EP_OK);
                assert_int_equal(in_arrived(&one[r].result, 2), !half);
            }
        }
        for (uint32_t t = 0; t < 4; t++) { /* of rank 0, without the choices of rank 2's experts */
            double factor = 0;

            for (uint32_t j = 0; j < 2; j++) {
                uint32_t rank, local;

                if (home(f, &c->in, 0, t, j, &rank, &local) && rank != 2)
                    factor += expert_factor(c->in.topk[0][t][j]);
            }
            for (uint32_t h = 0; h < HIDDEN; h++)
                CHECK(get(EP_BF16, (uint8_t *)at(f, 0, one[0].op.out) + (size_t)t * row_bytes(EP_BF16), h) ==
                          factor * x_value(0, t, h), "token %u", t);
        }
        memset(f->window[2], 0, f->map.total_bytes);
        ep_host_team_join(f->team, 2);
    }
    free(c);
    fixture_free(f);
}

/* Rank 2 comes and goes at any moment; the others only ever see ok, and nothing hangs. */
static void a_rank_comes_and_goes(void **s)
{
    struct fixture *f = fixture_new(3, false, 100);
    struct config *c = calloc(1, sizeof *c);
    struct churn churn = { .c = c };
    struct thread two[2], dying;
    uint32_t seed = 5;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 5);
    ep_host_team_set_timeout(f->team, 30000);
    for (uint32_t r = 0; r < 2; r++)
        start(&two[r], f, r, survivor, &churn);
    while (!__atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST)) {
        start(&dying, f, 2, victim, &churn);
        for (uint32_t i = next_random(&seed) % 3000; i > 0; i--)
            __atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST);
        ep_host_team_leave(f->team, 2);
        pthread_join(dying.id, NULL);
        memset(f->window[2], 0, f->map.total_bytes); /* nobody writes to it any more */
        ep_host_team_join(f->team, 2);
    }
    ep_host_team_leave(f->team, 2);
    for (uint32_t r = 0; r < 2; r++)
        pthread_join(two[r].id, NULL);
    free(c);
    fixture_free(f);
}

/* ---- any legal order: skipped combines, interleaved handles, releases -------------------------------------- */

static void any_order_of_handles(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (uint32_t seed = 0; seed < 24; seed++) {
        memset(c, 0, sizeof *c);
        c->mode = seed % 2 ? EP_MODE_LL : EP_MODE_HT;
        c->layout = EP_LAYOUT_PACKED;
        c->input = c->wire = c->combine = EP_BF16;
        c->alignment = 2;
        c->index_bytes = 4;
        c->seed = seed * 31 + 7;
        parallel(f, wander, c);
    }
    free(c);
    fixture_free(f);
}

static void a_taken_bank_makes_the_handle_stale(void **s)
{
    struct fixture *f = fixture_new(1, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct ep_op_result result;
    struct ep_op op;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 3);
    build_all(f, c, 0);
    must(f, 0, &c->dispatch[0], &c->dispatched[0]);
    build_combine(f, 0, c, 0, &op);
    for (uint32_t h = 1; h <= 2; h++) {
        c->dispatch[0].handle = h;
        must(f, 0, &c->dispatch[0], &result);
    }
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    assert_non_null(strstr(result.text, "handle 0"));
    op.handle = 1;
    op.generation = 6;
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    op.generation = 7;
    op.tokens = 2;
    assert_int_equal(execute(f, 0, &op, &result), EP_INVALID_ARGUMENT);
    op.tokens = 3;
    must(f, 0, &op, &result);
    assert_int_equal(execute(f, 0, &op, &result), EP_STALE_HANDLE);
    assert_non_null(strstr(result.text, "combined already"));
    free(c);
    fixture_free(f);
}

/* ---- too small outputs ---------------------------------------------------------------------------------------- */

static void small_out(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;
    struct ep_op *op = &c->dispatch[r];
    struct ep_op_result result;

    f->used[r] = 0;
    build_dispatch(f, r, c, 0, op);
    if (r == 1)
        op->out.bytes = row_bytes(c->wire) * 2;
    if (r == 1) {
        CHECK(execute(f, r, op, &c->dispatched[r]) == EP_OVERFLOW, "%s", c->dispatched[r].text);
        CHECK(c->dispatched[r].rows_needed > 2, "rows needed");
    } else {
        must(f, r, op, &c->dispatched[r]);
        check_dispatch(f, c, r, op, &c->dispatched[r]);
    }
    /* its combine takes part, and gives nothing */
    c->comb[r] = (struct ep_op){ .kind = EP_OP_COMBINE, .mode = c->mode, .layout = c->layout, .tokens = op->tokens,
                                 .top_k = op->top_k, .input_dtype = EP_BF16, .wire_dtype = EP_BF16,
                                 .generation = 7, .x = op->out, .out = take(f, r, (uint64_t)op->tokens * row_bytes(EP_BF16)) };
    execute(f, r, &c->comb[r], &result);
    CHECK(result.status == (r == 1 ? EP_OVERFLOW : EP_OK), "rank %u: %s", r, result.text);
    CHECK(in_arrived(&result, 0) && !in_arrived(&result, 1), "arrived");
}

static void an_overflow_stays_with_its_rank(void **s)
{
    static const struct { ep_mode mode; ep_layout layout; } cases[] = {
        { EP_MODE_LL, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_FLAT }
    };
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (size_t i = 0; i < 3; i++) {
        simple_config(c, f, cases[i].mode, cases[i].layout, 8);
        parallel(f, small_out, c);
        parallel(f, pass, c);
    }
    free(c);
    fixture_free(f);
}

/* ---- memory that a client writes to at the wrong time ------------------------------------------------------------ */

static void headers_are_not_trusted(void **s)
{
    struct fixture *f = fixture_new(1, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct ep_op_result result;
    struct ep_op op;
    uint32_t seed = 3;

    (void)s;
    for (int i = 0; i < 200; i++) {
        uint64_t bank;

        simple_config(c, f, EP_MODE_LL, (ep_layout)(1 + i % 3), 8);
        c->send_only = true;
        build_all(f, c, 0);
        must(f, 0, &c->dispatch[0], &result);
        bank = f->map.ll + result.number % f->map.limits.ll_banks * f->map.bank_bytes;
        for (uint64_t at_byte = 0; at_byte < 8ull * f->map.header_bytes; at_byte += 4) {
            uint32_t bad = next_random(&seed) % 3 ? next_random(&seed) << 16 | next_random(&seed) : next_random(&seed) % 8;

            memcpy(f->window[0] + bank + f->map.bank.headers + at_byte, &bad, 4);
        }
        op = (struct ep_op){ .kind = EP_OP_COMPLETE, .generation = 7 };
        execute(f, 0, &op, &result);
        if (result.status != EP_OK)
            continue;
        op = (struct ep_op){ .kind = EP_OP_COMBINE, .mode = EP_MODE_LL, .layout = c->layout, .input_dtype = EP_BF16,
                             .wire_dtype = EP_BF16, .tokens = 8, .top_k = 2, .generation = 7,
                             .x = c->dispatch[0].out, .out = take(f, 0, 8ull * row_bytes(EP_BF16)) };
        must(f, 0, &op, &result);
    }
    free(c);
    fixture_free(f);
}

struct forgery {
    struct config *c;
    uint64_t tag, count;
    uint32_t done; /* atomic */
};

/* As the worker of rank 1 can, where the op has said that nothing has come of itself: its own rows have arrived. */
static void forger(struct fixture *f, uint32_t r, void *arg)
{
    struct forgery *forgery = arg;
    uint64_t *flag = (uint64_t *)(void *)(f->window[r] + f->map.ht_flags + (uint64_t)r * EP_HT_FLAGS_BYTES);

    while (__atomic_load_n(&flag[0], __ATOMIC_ACQUIRE) != forgery->tag)
        usleep(100);
    __atomic_store_n(&flag[1], forgery->count, __ATOMIC_RELAXED);
    __atomic_store_n(&forgery->done, 1, __ATOMIC_RELEASE);
}

/* Rank 0 lets rank 1 wait, who gives no rows. */
static void combine_of_nothing(struct fixture *f, uint32_t r, void *arg)
{
    struct forgery *forgery = arg;
    struct ep_op_result result;

    while (r == 0 && !__atomic_load_n(&forgery->done, __ATOMIC_ACQUIRE))
        usleep(100);
    execute(f, r, &forgery->c->comb[r], &result);
    CHECK(result.status == (r == 0 ? EP_OK : EP_OVERFLOW), "rank %u: %s", r, result.text);
}

static void dispatch_alone(struct fixture *f, uint32_t r, void *arg)
{
    run_dispatch(f, r, arg, 0);
}

static void own_flags_are_not_trusted(void **s)
{
    enum { TOKENS = 8 };
    struct fixture *f = fixture_new(2, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct forgery forgery = { .c = c, .count = TOKENS - 1 };
    struct thread bad;
    uint8_t *secret, *out;
    uint64_t bytes;

    (void)s;
    simple_config(c, f, EP_MODE_HT, EP_LAYOUT_FLAT, TOKENS);
    c->in.k = 1;
    for (uint32_t r = 0; r < f->R; r++)
        for (uint32_t t = 0; t < TOKENS; t++)
            c->in.topk[r][t][0] = r == 1 && t == 0 ? 0 : r * f->L; /* but for one, to itself */
    build_all(f, c, 0);
    parallel(f, dispatch_alone, c);
    for (uint32_t r = 0; r < f->R; r++)
        build_combine(f, r, c, 0, &c->comb[r]);
    c->comb[1].x = take(f, 1, 16);
    bytes = (uint64_t)TOKENS * row_bytes(EP_BF16);
    secret = at(f, 1, take(f, 1, bytes)); /* what lies behind it */
    memset(secret, 0x41, bytes);
    out = at(f, 1, c->comb[1].out);
    forgery.tag = ep_ht_tag(c->dispatched[1].number, 1);
    start(&bad, f, 1, forger, &forgery);
    parallel(f, combine_of_nothing, &forgery);
    pthread_join(bad.id, NULL);
    for (uint64_t i = row_bytes(EP_BF16); i < bytes; i++) /* token 0 is rank 0's */
        assert_int_not_equal(out[i], 0x41);
    free(c);
    fixture_free(f);
}

struct scribble {
    int32_t *words;
    uint32_t n, stop;
};

static void scribbler(struct fixture *f, uint32_t r, void *arg)
{
    struct scribble *sc = arg;
    uint32_t seed = r;

    (void)f;
    while (!__atomic_load_n(&sc->stop, __ATOMIC_RELAXED))
        __atomic_store_n(&sc->words[next_random(&seed) % sc->n], (int32_t)(next_random(&seed) << 16 | next_random(&seed)),
                         __ATOMIC_RELAXED);
}

static void anything_ends(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;
    struct ep_op_result result;

    for (int i = 0; i < 100; i++) {
        struct ep_op *op = &c->dispatch[r];

        op->mode = i % 2 ? EP_MODE_LL : EP_MODE_HT;
        execute(f, r, op, &result);
        CHECK(result.status == EP_OK || result.status == EP_OVERFLOW, "%s", result.text);
    }
}

static void topk_may_change_under_way(void **s)
{
    struct fixture *f = fixture_new(2, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct scribble sc = { .stop = 0 };
    struct thread threads[2], bad;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 8);
    build_all(f, c, 0);
    sc.words = at(f, 0, c->dispatch[0].topk_idx);
    sc.n = 16;
    start(&bad, f, 0, scribbler, &sc);
    for (uint32_t r = 0; r < 2; r++)
        start(&threads[r], f, r, anything_ends, c);
    for (uint32_t r = 0; r < 2; r++)
        pthread_join(threads[r].id, NULL);
    __atomic_store_n(&sc.stop, 1, __ATOMIC_RELAXED);
    pthread_join(bad.id, NULL);
    free(c);
    fixture_free(f);
}

/* ---- the same bits again ------------------------------------------------------------------------------------------- */

struct repeat {
    struct config *c;
    uint8_t *out[MAX_R];
};

/* Values that round at every step. */
static void rounding_rows(struct fixture *f, uint32_t r, void *arg)
{
    struct repeat *rep = arg;
    struct config c = *rep->c;
    struct ep_op_result result;
    uint32_t seed = r + 1, n;

    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    must(f, r, &c.dispatch[r], &c.dispatched[r]);
    build_combine(f, r, &c, 0, &c.comb[r]);
    n = (uint32_t)(c.comb[r].x.bytes / 2);
    for (uint32_t i = 0; i < n; i++)
        ((uint16_t *)at(f, r, c.comb[r].x))[i] = (uint16_t)(0x3f00 + next_random(&seed) % 0x180);
    must(f, r, &c.comb[r], &result);
    n = (uint32_t)c.comb[r].out.bytes;
    if (!rep->out[r]) {
        rep->out[r] = malloc(n + 1);
        memcpy(rep->out[r], at(f, r, c.comb[r].out), n);
    }
    CHECK(memcmp(rep->out[r], at(f, r, c.comb[r].out), n) == 0, "other bits on rank %u", r);
}

static void repeated_runs_give_the_same_bits(void **s)
{
    struct fixture *f = fixture_new(4, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (int mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++) {
        struct repeat rep = { .c = c };

        simple_config(c, f, (ep_mode)mode, EP_LAYOUT_PACKED, 8);
        c->in.k = MAX_K;
        for (uint32_t r = 0; r < f->R; r++)
            for (uint32_t t = 0; t < 8; t++)
                for (uint32_t j = 0; j < MAX_K; j++) {
                    c->in.topk[r][t][j] = (t * 3 + j * 5 + r) % f->E;
                    c->in.weight[r][t][j] = 0.1f * (float)(1 + j);
                }
        c->in.weights = true;
        for (int i = 0; i < 20; i++)
            parallel(f, rounding_rows, &rep);
        for (uint32_t r = 0; r < f->R; r++)
            free(rep.out[r]);
    }
    free(c);
    fixture_free(f);
}

/* ---- ranks that do not make the same calls ---------------------------------------------------------------------------- */

static void other_dtype(struct fixture *f, uint32_t r, void *arg)
{
    struct config c = *(struct config *)arg;
    struct ep_op_result result;

    c.input = c.wire = r == 1 ? EP_FP32 : EP_BF16;
    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    execute(f, r, &c.dispatch[r], &result);
    CHECK(result.status == EP_FAILED_PRECONDITION, "%s", result.text);
}

static void other_scales(struct fixture *f, uint32_t r, void *arg)
{
    struct config c = *(struct config *)arg;
    struct ep_op_result result;

    c.wire = EP_FP8_E4M3;
    c.scales = r == 1 ? EP_SCALE_UE8M0 : EP_SCALE_FP32;
    f->used[r] = 0;
    build_dispatch(f, r, &c, 0, &c.dispatch[r]);
    execute(f, r, &c.dispatch[r], &result);
    CHECK(result.status == EP_FAILED_PRECONDITION, "%s", result.text);
    CHECK(strstr(result.text, "scale format") != NULL, "%s", result.text);
}

static void ht_ops_that_do_not_fit_are_reported(void **s)
{
    struct fixture *f = fixture_new(3, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    simple_config(c, f, EP_MODE_HT, EP_LAYOUT_FLAT, 4);
    parallel(f, other_dtype, c);
    parallel(f, other_scales, c);
    parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ll_expert_major), cmocka_unit_test(ll_rank_major), cmocka_unit_test(ll_packed),
        cmocka_unit_test(ll_replicas), cmocka_unit_test(ll_one_rank), cmocka_unit_test(ht_flat),
        cmocka_unit_test(ht_packed), cmocka_unit_test(ht_replicas), cmocka_unit_test(ht_one_rank),
        cmocka_unit_test(a_late_rank_is_named_ll),
        cmocka_unit_test(a_late_rank_is_named_ht),
        cmocka_unit_test(peers_go_on_without_a_rank_ll),
        cmocka_unit_test(peers_go_on_without_a_rank_ht),
        cmocka_unit_test(rows_that_never_come_are_zero),
        cmocka_unit_test(own_op_ends_when_its_rank_leaves),
        cmocka_unit_test(combine_without_a_peer),
        cmocka_unit_test(a_rank_comes_and_goes),
        cmocka_unit_test(any_order_of_handles),
        cmocka_unit_test(a_taken_bank_makes_the_handle_stale),
        cmocka_unit_test(an_overflow_stays_with_its_rank),
        cmocka_unit_test(headers_are_not_trusted),
        cmocka_unit_test(own_flags_are_not_trusted),
        cmocka_unit_test(topk_may_change_under_way),
        cmocka_unit_test(repeated_runs_give_the_same_bits),
        cmocka_unit_test(ht_ops_that_do_not_fit_are_reported),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
