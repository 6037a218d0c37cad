/* Host teams on several nodes: in one process, or in two of which one is killed, connected over loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host_fixture.h"

static const uint32_t three_each[] = { 0, 0, 0, 1, 1, 1 };
static const uint32_t two_and_one[] = { 0, 0, 1 }, one_and_two[] = { 0, 1, 1 }, mixed[] = { 1, 0, 2, 0, 1, 3 };

/* ---- every layout and dtype ------------------------------------------------------------ */

static void over(uint32_t ranks, const uint32_t *node, bool replicas, ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new_over(ranks, node, replicas, 20000);

    all_dtypes(f, mode, layout);
    fixture_free(f);
}

static void ll_expert_major(void **s) { (void)s; over(3, two_and_one, false, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR); }
static void ll_rank_major(void **s) { (void)s; over(3, two_and_one, false, EP_MODE_LL, EP_LAYOUT_RANK_MAJOR); }
static void ll_packed(void **s) { (void)s; over(3, two_and_one, false, EP_MODE_LL, EP_LAYOUT_PACKED); }
static void ll_four_nodes(void **s) { (void)s; over(6, mixed, true, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR); }

static void ht_flat(void **s) { (void)s; over(3, two_and_one, false, EP_MODE_HT, EP_LAYOUT_FLAT); }
static void ht_packed(void **s) { (void)s; over(3, one_and_two, false, EP_MODE_HT, EP_LAYOUT_PACKED); }
static void ht_four_nodes(void **s) { (void)s; over(6, mixed, true, EP_MODE_HT, EP_LAYOUT_PACKED); }
static void ht_flat_four_nodes(void **s) { (void)s; over(6, mixed, false, EP_MODE_HT, EP_LAYOUT_FLAT); }

/* More ranks than a word of a mask has bits. */
static void many_ranks(void **s)
{
    uint32_t node[70];
    struct fixture *f;

    (void)s;
    for (uint32_t r = 0; r < 70; r++)
        node[r] = r % 7 == 0 ? 2 : r % 3 == 0;
    f = fixture_new_over(70, node, false, 60000);
    passes(f, EP_MODE_LL, EP_LAYOUT_PACKED, EP_BF16, EP_BF16, EP_SCALE_FP32, 2);
    passes(f, EP_MODE_HT, EP_LAYOUT_FLAT, EP_BF16, EP_BF16, EP_SCALE_FP32, 2);
    fixture_free(f);
}

/* ---- what is rounded, and when ------------------------------------------------------------ */

static float bf16(uint16_t code)
{
    uint32_t u = (uint32_t)code << 16;
    float v;

    memcpy(&v, &u, sizeof v);
    return v;
}

static uint16_t to_bf16(float v) /* to nearest, ties to even; finite */
{
    uint32_t u;

    memcpy(&u, &v, sizeof u);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* What rank d gives for element h of token t of s: rounds at every step. */
static uint16_t part(uint32_t d, uint32_t s, uint32_t t, uint32_t h)
{
    uint32_t seed = ((d * 7 + s) * 31 + t) * 1009 + h;

    return (uint16_t)(0x3f00 + next_random(&seed) % 0x180);
}

static void give_parts(struct fixture *f, uint32_t d, const struct config *c, const struct ep_op *op)
{
    const int32_t *counts = at(f, d, c->dispatch[d].counts);
    const struct ep_source *sources = at(f, d, c->dispatch[d].sources);
    uint16_t *rows = at(f, d, op->x);
    uint32_t n = 0;

    for (uint32_t s = 0; s < f->R; s++)
        n += (uint32_t)counts[s];
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < HIDDEN; h++)
            rows[(size_t)i * HIDDEN + h] = part(d, sources[i].rank, sources[i].token, h);
}

static bool wants(struct fixture *f, const struct config *c, uint32_t s, uint32_t t, uint32_t d)
{
    for (uint32_t j = 0; j < c->in.k; j++) {
        uint32_t rank, local;

        if (home(f, &c->in, s, t, j, &rank, &local) && rank == d)
            return true;
    }
    return false;
}

/* By node; of the own one each part, of another their sum. */
static uint16_t expected(struct fixture *f, const struct config *c, uint32_t s, uint32_t t, uint32_t h)
{
    float total = 0;

    for (uint32_t n = 0; n < f->nodes; n++) {
        float sum = 0;
        bool some = false;

        for (uint32_t d = 0; d < f->R; d++) {
            if (f->node[d] != n || !wants(f, c, s, t, d))
                continue;
            if (n == f->node[s])
                total += bf16(part(d, s, t, h));
            else
                sum = some ? sum + bf16(part(d, s, t, h)) : bf16(part(d, s, t, h));
            some = true;
        }
        if (some && n != f->node[s])
            total += bf16(to_bf16(sum));
    }
    return to_bf16(total);
}

static void rounding_pass(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;
    struct ep_op_result result;

    f->used[r] = 0;
    build_dispatch(f, r, c, 0, &c->dispatch[r]);
    must(f, r, &c->dispatch[r], &c->dispatched[r]);
    build_combine(f, r, c, 0, &c->comb[r]);
    give_parts(f, r, c, &c->comb[r]);
    must(f, r, &c->comb[r], &result);
    for (uint32_t t = 0; t < c->in.tokens[r]; t++)
        for (uint32_t h = 0; h < HIDDEN; h++) {
            uint16_t have = ((const uint16_t *)at(f, r, c->comb[r].out))[(size_t)t * HIDDEN + h];

            CHECK(have == expected(f, c, r, t, h), "token %u of %u at %u: 0x%x, not 0x%x", t, r, h, have,
                  expected(f, c, r, t, h));
        }
}

static void a_nodes_sum_is_rounded_once(void **s)
{
    struct fixture *f = fixture_new_over(6, mixed, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    (void)s;
    for (int i = 0; i < 10; i++) {
        simple_config(c, f, EP_MODE_HT, EP_LAYOUT_FLAT, HT_TOKENS);
        c->in.k = MAX_K;
        for (uint32_t r = 0; r < f->R; r++)
            for (uint32_t t = 0; t < HT_TOKENS; t++)
                for (uint32_t j = 0; j < MAX_K; j++)
                    c->in.topk[r][t][j] = (t * 3 + j * 4 + r + (uint32_t)i) % f->E;
        parallel(f, rounding_pass, c);
    }
    free(c);
    fixture_free(f);
}

/* ---- any order ------------------------------------------------------------------------------ */

static void any_order(ep_mode mode)
{
    struct fixture *f = fixture_new_over(3, one_and_two, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    for (uint32_t seed = 0; seed < 12; seed++) {
        memset(c, 0, sizeof *c);
        c->mode = mode;
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

static void ll_any_order_of_handles(void **s) { (void)s; any_order(EP_MODE_LL); }

static void ht_any_order_of_handles(void **s) { (void)s; any_order(EP_MODE_HT); }

/* ---- late ranks ---------------------------------------------------------------------------- */

static void a_late_rank_is_named(ep_mode mode, ep_layout layout)
{
    struct fixture *f = fixture_new_over(3, two_and_one, false, 2000); /* the two are there by then */
    struct config *c = calloc(1, sizeof *c);
    struct one_op one[2];
    struct thread threads[2];

    simple_config(c, f, mode, layout, 4);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 2; r++) { /* rank 2, on the other node, does not come */
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_TIMEOUT);
        assert_int_equal(one[r].result.late_rank, 2);
        assert_non_null(strstr(one[r].result.text, "rank 2 was late"));
    }
    one[0].op = c->dispatch[2]; /* it comes after all, and then all go on together */
    run_one(f, 2, &one[0]);
    assert_int_equal(one[0].result.status, EP_OK);
    for (uint32_t n = 0; n < f->nodes; n++)
        ep_host_team_set_timeout(f->teams[n], 20000);
    for (int i = 0; i < 5; i++)
        parallel(f, pass, c);
    free(c);
    fixture_free(f);
}

static void ll_a_late_rank_is_named(void **s) { (void)s; a_late_rank_is_named(EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR); }

static void ht_a_late_rank_is_named(void **s) { (void)s; a_late_rank_is_named(EP_MODE_HT, EP_LAYOUT_FLAT); }

/* ---- joining ---------------------------------------------------------------------------------- */

/* Rank 2 comes and goes at any moment; the others only ever see ok, nothing hangs, nobody writes to a window that was
 * given up. */
static void ranks_come_and_go(bool ll_only)
{
    struct fixture *f = fixture_new_over(3, one_and_two, false, 30000);
    struct config *c = calloc(1, sizeof *c);
    struct churn churn = { .c = c, .ll_only = ll_only };
    struct thread two[2], dying;
    uint32_t seed = 5;

    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 5);
    for (uint32_t r = 0; r < 2; r++)
        start(&two[r], f, r, survivor, &churn);
    while (!__atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST)) {
        start(&dying, f, 2, victim, &churn);
        for (uint32_t i = next_random(&seed) % 100000; i > 0; i--)
            __atomic_load_n(&churn.stop, __ATOMIC_SEQ_CST);
        leave_over(f, 2);
        pthread_join(dying.id, NULL);
        memset(f->window[2], 0, f->map.total_bytes);
        join_over(f, 2);
    }
    leave_over(f, 2);
    for (uint32_t r = 0; r < 2; r++)
        pthread_join(two[r].id, NULL);
    free(c);
    fixture_free(f);
}

static void ll_ranks_come_and_go(void **s) { (void)s; ranks_come_and_go(true); }

static void ranks_of_both_modes_come_and_go(void **s) { (void)s; ranks_come_and_go(false); }

/* Tokens of who is there, to experts of who is there. */
static void choose_among_the_living(struct fixture *f, struct config *c)
{
    uint32_t next = 0;

    for (uint32_t r = 0; r < f->R; r++) {
        c->in.tokens[r] = f->away[r] ? 0 : HT_TOKENS;
        for (uint32_t t = 0; t < HT_TOKENS; t++)
            for (uint32_t j = 0; j < c->in.k; j++) {
                do
                    next = (next + 1) % f->E;
                while (f->away[f->placement.rank[f->placement.first[next]]]);
                c->in.topk[r][t][j] = next;
                c->in.weight[r][t][j] = 1;
            }
    }
}

static void pass_of_the_living(struct fixture *f, uint32_t r, void *arg)
{
    if (!f->away[r])
        pass(f, r, arg);
}

/* Whoever of a node is absent, the others get all that is theirs: here no rank's tokens go by way of a certain one. */
static void any_ranks_of_a_node_may_be_absent(ep_layout layout)
{
    struct fixture *f = fixture_new_over(6, three_each, false, 20000);
    struct config *c = calloc(1, sizeof *c);

    for (uint32_t i = 1; i <= 16; i++) { /* each set of them, twice; in the end all are back */
        for (uint32_t r = 3; r < 6; r++)
            if (f->away[r] && !(i >> (r - 3) & 1))
                join_over(f, r);
            else if (!f->away[r] && i >> (r - 3) & 1)
                leave_over(f, r);
        simple_config(c, f, EP_MODE_HT, layout, HT_TOKENS);
        c->cached = true;
        choose_among_the_living(f, c);
        parallel(f, pass_of_the_living, c);
    }
    free(c);
    fixture_free(f);
}

static void ht_ranks_of_a_node_are_absent(void **s) { (void)s; any_ranks_of_a_node_may_be_absent(EP_LAYOUT_FLAT); }

static void ht_ranks_of_a_node_are_absent_packed(void **s)
{
    (void)s;
    any_ranks_of_a_node_may_be_absent(EP_LAYOUT_PACKED);
}

static void an_op_waits_for_the_end_of_a_hold(void **s)
{
    struct fixture *f = fixture_new_over(2, two_and_one + 1, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct ep_host_numbers begun;
    struct ep_error error = EP_ERROR_INIT;
    struct thread threads[2];
    struct one_op one[2];
    uint64_t first, second;

    (void)s;
    simple_config(c, f, EP_MODE_LL, EP_LAYOUT_PACKED, 3);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    assert_int_equal(ep_host_team_hold(f->teams[0], 20000, &first, &begun, &error), EP_OK);
    assert_int_equal(ep_host_team_hold(f->teams[0], 1, &second, &begun, &error), EP_OK); /* ends by itself */
    assert_int_equal(begun.ll, 0);
    for (uint32_t r = 0; r < 2; r++) {
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    for (uint64_t end = ep_clock_ns() + 20 * EP_NS_PER_MS; ep_clock_ns() < end;)
        assert_false(__atomic_load_n(&one[0].over, __ATOMIC_ACQUIRE));
    assert_int_equal(ep_host_team_admit(f->teams[0], second, 1, &(struct ep_host_numbers){ 1, 1 }, &error), EP_ABORTED);
    ep_host_team_unhold(f->teams[0], first);
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_OK);
    }
    /* what has begun cannot be joined */
    assert_int_equal(ep_host_team_hold(f->teams[0], 20000, &first, &begun, &error), EP_OK);
    assert_int_equal(begun.ll, 1);
    assert_int_equal(ep_host_team_admit(f->teams[0], first, 1, &(struct ep_host_numbers){ 1, 1 }, &error),
                     EP_INVALID_ARGUMENT);
    free(c);
    fixture_free(f);
}

/* ---- nodes that go ------------------------------------------------------------------------------ */

static void await_loss(struct fixture *f, uint32_t own, uint32_t bits)
{
    const uint64_t end = ep_clock_ns() + 20 * EP_NS_PER_S;

    while (__atomic_load_n(&f->lost[own], __ATOMIC_SEQ_CST) != bits)
        CHECK(ep_clock_ns() < end, "node %u has lost 0x%x, not 0x%x", own, f->lost[own], bits);
}

/* Node 1 closes while the others wait for its ranks: they go on without them. */
static void a_node_closes(ep_mode mode, ep_layout layout)
{
    static const uint32_t three[] = { 0, 1, 1, 2 };
    struct fixture *f = fixture_new_over(4, three, false, 20000);
    struct config *c = calloc(1, sizeof *c);
    struct thread threads[4];
    struct one_op one[4];

    simple_config(c, f, mode, layout, 4);
    parallel(f, pass, c);
    build_all(f, c, 0);
    memset(one, 0, sizeof one);
    for (uint32_t r = 0; r < 4; r += 3) {
        one[r].op = c->dispatch[r];
        start(&threads[r], f, r, run_one, &one[r]);
    }
    ep_host_team_destroy(f->teams[1]);
    f->teams[1] = NULL;
    for (uint32_t r = 0; r < 4; r += 3) {
        pthread_join(threads[r].id, NULL);
        assert_int_equal(one[r].result.status, EP_OK);
        assert_int_equal(one[r].result.arrived[0], 1 | 8);
        await_loss(f, f->node[r], 2);
    }
    free(c);
    fixture_free(f);
}

static void ll_a_node_closes(void **s) { (void)s; a_node_closes(EP_MODE_LL, EP_LAYOUT_PACKED); }

static void ht_a_node_closes(void **s) { (void)s; a_node_closes(EP_MODE_HT, EP_LAYOUT_PACKED); }

/* What two processes share before they are connected. */
struct meeting {
    struct ep_host_card card[2];
    uint32_t ready; /* atomic */
};

static void meet(struct meeting *m, uint32_t own, struct ep_host_net **net)
{
    struct ep_error error = EP_ERROR_INIT;

    setenv("EP_GIN_INTERFACE", "=lo", 0);
    CHECK(ep_host_net_listen(SILENCE_MS, net, &m->card[own], &error) == EP_OK, "%s", error.text);
    __atomic_fetch_add(&m->ready, 1, __ATOMIC_SEQ_CST);
    for (uint64_t end = ep_clock_ns() + 20 * EP_NS_PER_S; __atomic_load_n(&m->ready, __ATOMIC_SEQ_CST) < 2;)
        CHECK(ep_clock_ns() < end, "the other process does not come");
    CHECK(ep_host_net_connect(*net, m->card, 2, own, 20000, &error) == EP_OK, "%s", error.text);
}

struct endless {
    struct config *c;
    uint32_t passes; /* atomic */
};

/* A dispatch and its combine, whoever takes part. */
static void one_pass(struct fixture *f, uint32_t r, struct config *c)
{
    struct ep_op_result result;

    f->used[r] = 0;
    build_dispatch(f, r, c, 1, &c->dispatch[r]);
    must(f, r, &c->dispatch[r], &c->dispatched[r]);
    build_combine(f, r, c, 1, &c->comb[r]);
    must(f, r, &c->comb[r], &result);
}

/* Until the others are gone; what came of the op in which they went, nobody can say. */
static void endless(struct fixture *f, uint32_t r, void *arg)
{
    struct endless *e = arg;
    struct config c = *e->c;
    const struct ep_op_result *result = &c.dispatched[r];

    do {
        one_pass(f, r, &c);
        __atomic_fetch_add(&e->passes, 1, __ATOMIC_SEQ_CST);
    } while (result->absent == 0);
    CHECK(result->number > 10 && (result->arrived[0] & 1), "number %llu, arrived %llx",
          (unsigned long long)result->number, (unsigned long long)result->arrived[0]);
    one_pass(f, r, &c); /* once more, from the beginning without them */
    CHECK(result->arrived[0] == 1, "arrived %llx", (unsigned long long)result->arrived[0]);
}

static void run_node(struct meeting *m, uint32_t own, ep_mode mode, ep_layout layout, pid_t other)
{
    struct fixture *f = fixture_begin_over(3, one_and_two, false);
    struct config *c = calloc(1, sizeof *c);
    struct endless e = { .c = c };
    struct thread threads[3];
    struct ep_host_net *net;

    meet(m, own, &net);
    fixture_make_team(f, own, net, 20000);
    simple_config(c, f, mode, layout, 5);
    for (uint32_t r = 0; r < 3; r++)
        if (f->node[r] == own)
            start(&threads[r], f, r, endless, &e);
    while (__atomic_load_n(&e.passes, __ATOMIC_SEQ_CST) < 50)
        usleep(100);
    if (other > 0)
        kill(other, SIGKILL);
    for (uint32_t r = 0; r < 3; r++)
        if (f->node[r] == own)
            pthread_join(threads[r].id, NULL);
    await_loss(f, own, 2);
    free(c);
    fixture_free(f);
}

static void a_process_is_killed(ep_mode mode, ep_layout layout)
{
    struct meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child;
    int status;

    assert_ptr_not_equal(m, MAP_FAILED);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        run_node(m, 1, mode, layout, 0);
        _exit(0);
    }
    run_node(m, 0, mode, layout, child);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    munmap(m, sizeof *m);
}

static void ll_a_process_is_killed(void **s) { (void)s; a_process_is_killed(EP_MODE_LL, EP_LAYOUT_PACKED); }

static void ht_a_process_is_killed(void **s) { (void)s; a_process_is_killed(EP_MODE_HT, EP_LAYOUT_FLAT); }

/* ---- what cannot be -------------------------------------------------------------------------------- */

static void what_does_not_fit_the_network_is_refused(void **s)
{
    struct fixture *f = fixture_new_over(3, one_and_two, false, 20000);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_host_card card;
    struct ep_host_net *net;

    (void)s;
    assert_int_equal(ep_host_net_listen(SILENCE_MS, &net, &card, &error), EP_OK);
    assert_int_equal(ep_host_net_connect(net, &card, 1, 0, 100, &error), EP_INVALID_ARGUMENT);
    ep_host_net_close(net);
    assert_int_equal(ep_host_net_bytes(1), 0);
    fixture_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ll_a_process_is_killed), /* first: it forks, and no thread is left */
        cmocka_unit_test(ht_a_process_is_killed),
        cmocka_unit_test(ll_expert_major),
        cmocka_unit_test(ll_rank_major),
        cmocka_unit_test(ll_packed),
        cmocka_unit_test(ll_four_nodes),
        cmocka_unit_test(ht_flat),
        cmocka_unit_test(ht_packed),
        cmocka_unit_test(ht_four_nodes),
        cmocka_unit_test(ht_flat_four_nodes),
        cmocka_unit_test(many_ranks),
        cmocka_unit_test(a_nodes_sum_is_rounded_once),
        cmocka_unit_test(ll_any_order_of_handles),
        cmocka_unit_test(ht_any_order_of_handles),
        cmocka_unit_test(ll_a_late_rank_is_named),
        cmocka_unit_test(ht_a_late_rank_is_named),
        cmocka_unit_test(ll_ranks_come_and_go),
        cmocka_unit_test(ranks_of_both_modes_come_and_go),
        cmocka_unit_test(ht_ranks_of_a_node_are_absent),
        cmocka_unit_test(ht_ranks_of_a_node_are_absent_packed),
        cmocka_unit_test(an_op_waits_for_the_end_of_a_hold),
        cmocka_unit_test(ll_a_node_closes),
        cmocka_unit_test(ht_a_node_closes),
        cmocka_unit_test(what_does_not_fit_the_network_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
