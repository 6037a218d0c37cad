/* ep-bench's gradients of weights: what experts make of rows, and what the verifier takes for right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "experts.h"
#include "verify.h"

enum { RANKS = 2, EXPERTS = 5, TOP_K = 3, HIDDEN = 272, TOKENS = 9, ALIGNMENT = 4, ME = 1 };

struct fixture {
    struct bench_config config;
    struct routing *routing;
    struct inputs inputs;
    struct bench_verdict verdict;
    uint64_t progress;
    float grads[TOKENS * TOP_K];
};

static struct fixture *make(ep_layout layout)
{
    struct fixture *f = calloc(1, sizeof *f);
    const struct bench_case of = { EP_MODE_HT, layout, BENCH_BF16, TOKENS, EP_SCALE_FP32, BENCH_BACKWARD, 0 };
    const struct routing_shape shape = { RANKS, EXPERTS, TOP_K, 7, 0.2 };
    struct ep_error error = EP_ERROR_INIT;

    assert_non_null(f);
    f->config = (struct bench_config){ .ranks = RANKS, .experts = EXPERTS, .hidden = HIDDEN, .top_k = TOP_K,
                                       .alignment = ALIGNMENT, .seed = 7, .zero_rank = -1 };
    assert_int_equal(routing_open(&f->config.routing, &shape, &f->routing, &error), EP_OK);
    assert_int_equal(inputs_open(&f->config, &of, f->routing, &f->inputs, &error), EP_OK);
    return f;
}

static void destroy(struct fixture *f)
{
    inputs_close(&f->inputs);
    routing_close(f->routing);
    free(f);
}

/* What a perfect dispatch of one pass brings to a rank. */
static struct received receive(struct fixture *f, enum bench_pass pass, const struct ep_ref_dispatch *plan)
{
    const uint64_t row = HIDDEN * sizeof(uint16_t);
    char *rows = calloc(plan->positions + 1, row);

    assert_non_null(rows);
    f->inputs.pass = pass;
    for (uint64_t i = 0; i < plan->n_rows; i++)
        if (!plan->rows[i].padding)
            inputs_row(&f->inputs, plan->rows[i].source, plan->rows[i].token, rows + plan->rows[i].position * row,
                       NULL);
    return (struct received){ .layout = f->inputs.of.layout, .dtype = EP_BF16, .hidden = HIDDEN, .top_k = TOP_K,
                              .row_bytes = row, .base = rows, .topk = plan->topk, .weights = plan->weights };
}

/* Of all rows of one rank; the caller frees them. */
static float *row_grads(struct fixture *f, uint32_t rank)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_ref_dispatch plan;
    struct received forward, backward;
    float *grads;

    assert_true(ep_ref_dispatch(&f->inputs.routing, rank, f->inputs.of.layout, ALIGNMENT, 0, &plan));
    forward = receive(f, BENCH_FORWARD, &plan);
    backward = receive(f, BENCH_BACKWARD, &plan);
    grads = calloc(plan.positions * TOP_K + 1, sizeof *grads);
    assert_non_null(grads);
    assert_int_equal(experts_weight_grads(&f->inputs, rank, &forward, &backward, &plan, grads, &error), EP_OK);
    free((void *)(uintptr_t)forward.base);
    free((void *)(uintptr_t)backward.base);
    ep_ref_dispatch_free(&plan);
    return grads;
}

/* What a perfect combine brings back to ME from the ranks in `arrived`. */
static void bring_back(struct fixture *f, uint64_t arrived)
{
    struct ep_ref_gradient places[TOKENS * TOP_K];
    float *of_rank[RANKS];

    for (uint32_t r = 0; r < RANKS; r++)
        of_rank[r] = row_grads(f, r);
    assert_true(ep_ref_gradients(&f->inputs.routing, f->inputs.of.layout, ALIGNMENT, ME, places));
    for (uint32_t i = 0; i < TOKENS * TOP_K; i++)
        f->grads[i] = places[i].rank >= 0 && arrived >> places[i].rank & 1
                          ? of_rank[places[i].rank][places[i].index]
                          : 0.0f;
    for (uint32_t r = 0; r < RANKS; r++)
        free(of_rank[r]);
}

static uint64_t mismatches(struct fixture *f, uint64_t arrived)
{
    struct verifier verifier = { &f->inputs, ME, &f->verdict, &f->progress, false };
    const uint64_t mask[EP_MASK_WORDS] = { arrived };
    struct ep_error error = EP_ERROR_INIT;

    memset(&f->verdict, 0, sizeof f->verdict);
    f->inputs.pass = BENCH_BACKWARD;
    assert_int_equal(verify_weight_grads(&verifier, f->grads, mask, &error), EP_OK);
    return f->verdict.mismatches;
}

static const ep_layout layouts[] = { EP_LAYOUT_PACKED, EP_LAYOUT_FLAT };

static void right_gradients_are_within_the_bound(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct fixture *f = make(layouts[i]);

        bring_back(f, 3);
        assert_int_equal(mismatches(f, 3), 0);
        assert_true(f->verdict.max_bound_ratio > 0 && f->verdict.max_bound_ratio <= 1);
        destroy(f);
    }
}

static void a_rank_that_is_gone_gives_none(void **state)
{
    struct fixture *f = make(EP_LAYOUT_FLAT);

    (void)state;
    bring_back(f, 1u << ME);
    assert_int_equal(mismatches(f, 1u << ME), 0);
    assert_true(mismatches(f, 3) > 0);
    destroy(f);
}

/* One unit in the last place is enough. */
static void a_wrong_gradient_is_named(void **state)
{
    struct fixture *f = make(EP_LAYOUT_PACKED);
    uint32_t at = 0, bits;

    (void)state;
    bring_back(f, 3);
    while (f->grads[at] == 0)
        at++;
    memcpy(&bits, &f->grads[at], sizeof bits);
    bits += 1;
    memcpy(&f->grads[at], &bits, sizeof bits);
    assert_int_equal(mismatches(f, 3), 1);
    assert_non_null(strstr(f->verdict.first, "topk_grads: choice"));
    destroy(f);
}

/* The other choice's gradient, or that of the tokens instead of the gradients. */
static void gradients_of_something_else_are_found(void **state)
{
    struct fixture *f = make(EP_LAYOUT_FLAT);
    float swapped;
    uint32_t at = 0;

    (void)state;
    bring_back(f, 3);
    while (at % TOP_K + 1 == TOP_K || f->grads[at] == 0 || f->grads[at + 1] == f->grads[at])
        at++;
    swapped = f->grads[at];
    f->grads[at] = f->grads[at + 1];
    f->grads[at + 1] = swapped;
    assert_int_equal(mismatches(f, 3), 2);
    destroy(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_gradients_are_within_the_bound),
        cmocka_unit_test(a_rank_that_is_gone_gives_none),
        cmocka_unit_test(a_wrong_gradient_is_named),
        cmocka_unit_test(gradients_of_something_else_are_found),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
