/* What ranks run: passes that are checked, legal orders of ops, ranks that come and go. */
#include "host_fixture.h"

#include <string.h>

/* ---- a pass: dispatch, check, combine, check ---------------------------------------------------------- */

void complete(struct fixture *f, uint32_t r, uint32_t handle, struct ep_op_result *result)
{
    struct ep_op op = { .kind = EP_OP_COMPLETE, .handle = handle, .generation = 7 };

    must(f, r, &op, result);
}

void run_dispatch(struct fixture *f, uint32_t r, struct config *c, uint32_t handle)
{
    struct ep_op *op = &c->dispatch[r];
    struct ep_op_result *result = &c->dispatched[r];

    must(f, r, op, result);
    check_numbers(f, c, r, result);
    if (c->send_only)
        complete(f, r, handle, result);
    check_dispatch(f, c, r, op, result);
}

void run_combine(struct fixture *f, uint32_t r, struct config *c, uint32_t handle)
{
    struct ep_op *op = &c->comb[r];
    struct ep_op_result result;

    build_combine(f, r, c, handle, op);
    must(f, r, op, &result);
    if (c->send_only)
        complete(f, r, handle, &result);
    check_combine(f, c, r, op);
}

void pass(struct fixture *f, uint32_t r, void *arg)
{
    struct config *c = arg;

    f->used[r] = 0;
    build_dispatch(f, r, c, 3, &c->dispatch[r]);
    run_dispatch(f, r, c, 3);
    run_combine(f, r, c, 3);
    if (c->cached) {
        c->dispatch[r].flags |= EP_OP_CACHED;
        c->dispatch[r].topk_idx = c->dispatch[r].topk_weights = (struct ep_span){ 0, 0 };
        run_dispatch(f, r, c, 3);
        run_combine(f, r, c, 3);
    }
}

void passes(struct fixture *f, ep_mode mode, ep_layout layout, ep_dtype input, ep_dtype wire,
                   ep_scale_format scales, uint32_t n)
{
    struct config *c = calloc(1, sizeof *c);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t v = i + (uint32_t)input * 3 + (uint32_t)layout;

        memset(c, 0, sizeof *c);
        c->mode = mode;
        c->layout = layout;
        c->input = input;
        c->wire = wire;
        c->scales = scales;
        c->combine = input == EP_FP8_E4M3 ? EP_BF16 : input;
        c->alignment = 1u << v % 4;
        c->index_bytes = v % 2 ? 8 : 4;
        c->send_only = mode == EP_MODE_LL && v % 3 == 0;
        c->cached = v % 2 == 0;
        c->bias = v % 3 == 1;
        c->grads = mode == EP_MODE_HT && v % 2 == 1;
        c->in_place = v % 2 == 0;
        random_inputs(f, &c->in, mode == EP_MODE_LL ? LL_TOKENS : HT_TOKENS, v * 977 + 1);
        parallel(f, pass, c);
    }
    free(c);
}

void all_dtypes(struct fixture *f, ep_mode mode, ep_layout layout)
{
    static const ep_dtype pairs[][2] = { { EP_BF16, EP_BF16 }, { EP_FP16, EP_FP16 }, { EP_FP32, EP_FP32 },
                                         { EP_FP8_E4M3, EP_FP8_E4M3 }, { EP_BF16, EP_FP8_E4M3 },
                                         { EP_FP16, EP_FP8_E4M3 }, { EP_FP32, EP_FP8_E4M3 } };

    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (ep_scale_format s = EP_SCALE_FP32; s <= (pairs[i][1] == EP_FP8_E4M3 ? EP_SCALE_UE8M0 : EP_SCALE_FP32); s++)
            passes(f, mode, layout, pairs[i][0], pairs[i][1], s, 6);
}

/* ---- one op ------------------------------------------------------------------------------------ */

void run_one(struct fixture *f, uint32_t r, void *arg)
{
    struct one_op *one = (struct one_op *)arg;

    execute(f, r, &one->op, &one->result);
    __atomic_store_n(&one->over, 1, __ATOMIC_RELEASE);
}

void simple_config(struct config *c, struct fixture *f, ep_mode mode, ep_layout layout, uint32_t tokens)
{
    memset(c, 0, sizeof *c);
    c->mode = mode;
    c->layout = layout;
    c->input = c->wire = c->combine = EP_BF16;
    c->alignment = 4;
    c->index_bytes = 4;
    c->in.k = 2;
    for (uint32_t r = 0; r < f->R; r++) {
        c->in.tokens[r] = tokens;
        for (uint32_t t = 0; t < tokens; t++)
            for (uint32_t j = 0; j < 2; j++) {
                c->in.topk[r][t][j] = (t * 3 + j * 5 + r) % f->E;
                c->in.weight[r][t][j] = 1;
            }
    }
}

void build_all(struct fixture *f, struct config *c, uint32_t handle)
{
    for (uint32_t r = 0; r < f->R; r++) {
        f->used[r] = 0;
        build_dispatch(f, r, c, handle, &c->dispatch[r]);
    }
}

/* ---- any legal order: skipped combines, interleaved handles, releases ---------------------------- */

void wander(struct fixture *f, uint32_t r, void *arg)
{
    struct config *base = arg, c[2];
    uint32_t seed = base->seed, live[2] = { 0, 0 }; /* the same choices on every rank */
    struct ep_op_result result;
    uint64_t last = 0;

    for (int i = 0; i < 40; i++) {
        uint32_t h = next_random(&seed) % 2, what = next_random(&seed) % 8;

        if (live[h] && what < 5) {
            if (base->mode == EP_MODE_LL && last - c[h].dispatched[r].number >= f->map.limits.ll_banks) {
                build_combine(f, r, &c[h], h, &c[h].comb[r]);
                CHECK(execute(f, r, &c[h].comb[r], &result) == EP_STALE_HANDLE, "bank was taken");
            } else {
                run_combine(f, r, &c[h], h);
            }
            live[h] = 0;
        } else if (live[h] && what == 5) {
            must(f, r, &(struct ep_op){ .kind = EP_OP_RELEASE, .handle = h, .generation = 7 }, &result);
            live[h] = 0;
        } else {
            c[h] = *base;
            random_inputs(f, &c[h].in, c[h].mode == EP_MODE_LL ? LL_TOKENS : HT_TOKENS, next_random(&seed));
            f->used[r] = h * (f->map.limits.arena_bytes / 2);
            /* a released generation is gone for good: show it, then take a new one */
            build_dispatch(f, r, &c[h], h, &c[h].dispatch[r]);
            if (execute(f, r, &c[h].dispatch[r], &c[h].dispatched[r]) == EP_STALE_HANDLE) {
                c[h].dispatch[r].generation = 8 + (uint32_t)i;
                must(f, r, &c[h].dispatch[r], &c[h].dispatched[r]);
                check_dispatch(f, &c[h], r, &c[h].dispatch[r], &c[h].dispatched[r]);
                last = c[h].dispatched[r].number;
                live[h] = 0; /* combined under its own generation only */
                continue;
            }
            last = c[h].dispatched[r].number;
            CHECK(c[h].dispatched[r].status == EP_OK, "%s", c[h].dispatched[r].text);
            check_dispatch(f, &c[h], r, &c[h].dispatch[r], &c[h].dispatched[r]);
            live[h] = 1;
        }
    }
}

/* ---- ranks that come and go ------------------------------------------------------------------------ */

void survivor(struct fixture *f, uint32_t r, void *arg)
{
    struct churn *churn = arg;
    struct config c = *churn->c;
    struct ep_op_result result;

    for (int i = 0; i < 60; i++) {
        c.mode = i % 3 || churn->ll_only ? EP_MODE_LL : EP_MODE_HT;
        f->used[r] = 0;
        build_dispatch(f, r, &c, (uint32_t)i % 4, &c.dispatch[r]);
        must(f, r, &c.dispatch[r], &c.dispatched[r]);
        if (i % 5 == 4)
            continue; /* never combined */
        build_combine(f, r, &c, (uint32_t)i % 4, &c.comb[r]);
        must(f, r, &c.comb[r], &result);
    }
    __atomic_store_n(&churn->stop, 1, __ATOMIC_SEQ_CST);
}

void victim(struct fixture *f, uint32_t r, void *arg)
{
    struct churn *churn = arg;
    struct config c = *churn->c;
    struct ep_op_result result;
    int i = 0;

    do {
        c.mode = i++ % 3 || churn->ll_only ? EP_MODE_LL : EP_MODE_HT;
        f->used[r] = 0;
        build_dispatch(f, r, &c, 1, &c.dispatch[r]);
        if (execute(f, r, &c.dispatch[r], &c.dispatched[r]) == EP_OK) {
            build_combine(f, r, &c, 1, &c.comb[r]);
            execute(f, r, &c.comb[r], &result);
        } else {
            result = c.dispatched[r];
        }
    } while (result.status != EP_DETACHED);
}
