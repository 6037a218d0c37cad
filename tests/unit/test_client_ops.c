/*
 * The client's data path against real engines in this process: arguments, results, waiting, the end.
 * Client and engine share one mapping here, so ThreadSanitizer sees both halves of the ring.
 */
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "client_private.h"
#include "ep_engine.h"
#include "ep_reference.h"

enum { RANKS = 2, EXPERTS = 4, LOCAL = 2, HIDDEN = 16, K = 2, LL_TOKENS = 4, HT_TOKENS = 8 };

/* A rank as ep_join() makes it, without a server. */
struct member {
    struct ep_client client;
    struct ep_rank rank;
    struct ep_engine *engine;
    struct ep_rank_counters counters;
    int server_socket;
    bool stopped;
};

struct fixture {
    uv_loop_t loop;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_host_team *team;
    struct member member[RANKS];
};

static void on_stopped(void *user)
{
    *(bool *)user = true;
}

static void stop_engine(struct fixture *f, struct member *m)
{
    if (!m->engine)
        return;
    ep_host_team_leave(f->team, m->rank.rank);
    ep_engine_stop(m->engine, on_stopped, &m->stopped);
    while (!m->stopped)
        uv_run(&f->loop, UV_RUN_ONCE);
    m->engine = NULL;
}

static void make_member(struct fixture *f, uint32_t r)
{
    struct member *m = &f->member[r];
    struct ep_rank *rank = &m->rank;
    struct ep_error error = EP_ERROR_INIT;
    int pair[2];

    rank->client = &m->client;
    rank->rank = r;
    rank->spin_ns = 1;
    rank->shape.map = f->map;
    rank->shape.timeout_ms = 10000;
    rank->window = mmap(NULL, f->map.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(rank->window != MAP_FAILED);
    rank->control = (struct ep_control *)(void *)rank->window;
    rank->executor = &ring_executor;
    assert_int_equal(arena_init(&rank->arena, f->map.limits.arena_bytes, &error), EP_OK);
    assert_int_equal(events_init(rank, &error), EP_OK);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair), 0);
    rank->socket = pair[0];
    m->server_socket = pair[1];
    ep_host_team_set_window(f->team, r, rank->window);

    const struct ep_engine_options options = { .loop = &f->loop, .team = f->team, .map = &f->map, .rank = r,
                                               .window = rank->window, .counters = &m->counters };
    assert_int_equal(ep_engine_start(&options, &m->engine, &error), EP_OK);
    assert_int_equal(monitor_start(&m->client, &error), EP_OK);
    assert_int_equal(monitor_add(rank, &error), EP_OK);
}

static struct fixture *make(void)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_limits limits = {
        .ranks = RANKS, .experts = EXPERTS, .local_experts = LOCAL, .top_k = K, .hidden = HIDDEN,
        .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT, .dtypes = 1u << EP_FP32 | 1u << EP_FP8_E4M3,
        .ll_max_tokens = LL_TOKENS, .ht_max_tokens = HT_TOKENS, .ll_banks = 2, .arena_bytes = 1 << 17,
    };

    assert_int_equal(uv_loop_init(&f->loop), 0);
    assert_int_equal(ep_layout_compute(&limits, &f->map, &error), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, EXPERTS, &f->placement, &error), EP_OK);
    assert_int_equal(ep_host_team_create(&f->map, &f->placement, 10000, NULL, &f->team, &error), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        make_member(f, r);
    return f;
}

static void destroy(struct fixture *f)
{
    for (uint32_t r = 0; r < RANKS; r++)
        stop_engine(f, &f->member[r]);
    for (uint32_t r = 0; r < RANKS; r++) {
        struct member *m = &f->member[r];

        monitor_remove(&m->rank);
        monitor_stop(&m->client);
        handles_free(&m->rank);
        events_fini(&m->rank);
        arena_fini(&m->rank.arena);
        munmap(m->rank.window, f->map.total_bytes);
        close(m->rank.socket);
        if (m->server_socket >= 0)
            close(m->server_socket);
    }
    while (uv_run(&f->loop, UV_RUN_NOWAIT))
        ;
    assert_int_equal(uv_loop_close(&f->loop), 0);
    ep_host_team_destroy(f->team);
    ep_placement_free(&f->placement);
    free(f);
}

/* ---- one rank's buffers ---------------------------------------------------------------------- */

struct lane {
    ep_rank *rank;
    ep_handle *handle;
    float *x, *out, *y, *weights;
    int32_t *topk, *counts, *offsets, *out_topk;
    float *out_weights;
    ep_source_row *sources;
    size_t out_bytes;
};

static struct lane make_lane(struct fixture *f, uint32_t r)
{
    ep_rank *rank = &f->member[r].rank;
    struct lane l = { .rank = rank, .out_bytes = LOCAL * RANKS * LL_TOKENS * HIDDEN * sizeof(float) };

    assert_int_equal(ep_handle_create(rank, &l.handle), EP_OK);
    l.x = ep_alloc(rank, LL_TOKENS * HIDDEN * sizeof(float));
    l.y = ep_alloc(rank, LL_TOKENS * HIDDEN * sizeof(float));
    l.out = ep_alloc(rank, l.out_bytes);
    l.topk = ep_alloc(rank, LL_TOKENS * K * sizeof(int32_t));
    l.weights = ep_alloc(rank, LL_TOKENS * K * sizeof(float));
    l.counts = ep_alloc(rank, RANKS * LOCAL * sizeof(int32_t));
    l.offsets = ep_alloc(rank, (LOCAL + 1) * sizeof(int32_t));
    l.out_topk = ep_alloc(rank, RANKS * LL_TOKENS * K * 4);
    l.out_weights = ep_alloc(rank, RANKS * LL_TOKENS * K * 4);
    l.sources = ep_alloc(rank, RANKS * LL_TOKENS * K * sizeof(ep_source_row));
    assert_true(l.x && l.y && l.out && l.topk && l.weights && l.counts && l.offsets && l.out_topk
                && l.out_weights && l.sources);
    for (int t = 0; t < LL_TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            l.x[t * HIDDEN + h] = (float)(1 + 10 * (int)r + t);
        for (int k = 0; k < K; k++) {
            l.topk[t * K + k] = (t + 2 * k + (int)r) % EXPERTS;
            l.weights[t * K + k] = k == 0 ? 0.25f : 0.75f;
        }
    }
    return l;
}

static ep_dispatch_args dispatch_args(const struct lane *l, ep_mode mode, ep_layout layout)
{
    bool by_expert = layout == EP_LAYOUT_EXPERT_MAJOR || layout == EP_LAYOUT_PACKED;

    return (ep_dispatch_args){
        .size = sizeof(ep_dispatch_args), .mode = mode, .layout = layout, .input_dtype = EP_FP32,
        .num_tokens = LL_TOKENS, .tokens = l->x, .topk_idx = l->topk, .topk_weights = l->weights,
        .out = layout == EP_LAYOUT_RANK_MAJOR ? NULL : l->out, .out_bytes = l->out_bytes, .counts = l->counts,
        .offsets = layout == EP_LAYOUT_PACKED ? l->offsets : NULL,
        .out_topk = by_expert ? NULL : l->out_topk, .out_weights = by_expert ? NULL : l->out_weights,
    };
}

static ep_combine_args combine_args(const struct lane *l)
{
    return (ep_combine_args){ .size = sizeof(ep_combine_args), .dtype = EP_FP32, .rows = l->out,
                              .rows_bytes = l->out_bytes, .out = l->y };
}

static void ok(ep_status status)
{
    if (status != EP_OK)
        fail_msg("%s: %s", ep_status_name(status), ep_error_message());
}

static void check_identity(const struct lane *l)
{
    for (int i = 0; i < LL_TOKENS * HIDDEN; i++)
        if (fabsf(l->y[i] - l->x[i]) > 1e-4f)
            fail_msg("element %d is %g: must be %g", i, (double)l->y[i], (double)l->x[i]);
}

/* Both ranks: dispatch, wait, experts(), combine, wait. */
static void round_trip(struct lane l[RANKS], const ep_dispatch_args d[RANKS], void (*experts)(struct lane *),
                       const ep_combine_args c[RANKS])
{
    for (int r = 0; r < RANKS; r++)
        ok(ep_dispatch(l[r].handle, &d[r], NULL));
    for (int r = 0; r < RANKS; r++) {
        ok(ep_handle_wait(l[r].handle, 20000));
        if (experts)
            experts(&l[r]);
    }
    for (int r = 0; r < RANKS; r++)
        ok(ep_combine(l[r].handle, &c[r], NULL));
    for (int r = 0; r < RANKS; r++)
        ok(ep_sync(l[r].rank, 20000));
}

/* ---- round trips ------------------------------------------------------------------------------ */

static void experts_have_rows_of_their_own(void **state)
{
    static const struct { ep_mode mode; ep_layout layout; } cases[] = {
        { EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR }, { EP_MODE_LL, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_PACKED },
    };
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int times = 0; times < 50; times++) {
            const ep_dispatch_args d[RANKS] = { dispatch_args(&l[0], cases[i].mode, cases[i].layout),
                                                dispatch_args(&l[1], cases[i].mode, cases[i].layout) };
            const ep_combine_args c[RANKS] = { combine_args(&l[0]), combine_args(&l[1]) };
            ep_op_info info = { .size = sizeof info };

            round_trip(l, d, NULL, c);
            check_identity(&l[0]);
            check_identity(&l[1]);
            ok(ep_dispatch_info(l[0].handle, &info));
            assert_int_equal(info.rows, RANKS * LL_TOKENS * K / RANKS);
            assert_int_equal(info.arrived[0], 3);
            assert_int_equal(info.absent, 0);
            assert_true(info.total_ns > 0);
        }
    destroy(f);
}

/* The rank's sum for each token, weights included, made from the tables. */
static void weigh(struct lane *l, float *rows, uint64_t stride, uint64_t row, uint64_t n)
{
    (void)stride;
    for (uint64_t i = 0; i < n; i++) {
        float w = 0;

        for (int k = 0; k < K; k++)
            if (l->out_topk[(row + i) * K + (uint64_t)k] >= 0)
                w += l->out_weights[(row + i) * K + (uint64_t)k];
        for (int h = 0; h < HIDDEN; h++)
            rows[i * HIDDEN + (uint64_t)h] *= w;
    }
}

static void weigh_flat(struct lane *l)
{
    ep_op_info info = { .size = sizeof info };

    ok(ep_dispatch_info(l->handle, &info));
    weigh(l, l->out, 0, 0, info.rows);
}

static void flat_rows_come_once_per_token(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    const ep_dispatch_args d[RANKS] = { dispatch_args(&l[0], EP_MODE_HT, EP_LAYOUT_FLAT),
                                        dispatch_args(&l[1], EP_MODE_HT, EP_LAYOUT_FLAT) };
    const ep_combine_args c[RANKS] = { combine_args(&l[0]), combine_args(&l[1]) };

    (void)state;
    round_trip(l, d, weigh_flat, c);
    check_identity(&l[0]);
    check_identity(&l[1]);
    destroy(f);
}

static void weigh_in_place(struct lane *l)
{
    ep_op_info info = { .size = sizeof info };

    ok(ep_dispatch_info(l->handle, &info));
    assert_non_null(info.view);
    for (uint64_t r = 0; r < RANKS; r++)
        weigh(l, (float *)(uintptr_t)((const uint8_t *)info.view + r * info.view_stride), 0, r * LL_TOKENS,
              (uint64_t)l->counts[r]);
}

static void rank_major_is_combined_in_place(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (int times = 0; times < 10; times++) { /* every bank */
        const ep_dispatch_args d[RANKS] = { dispatch_args(&l[0], EP_MODE_LL, EP_LAYOUT_RANK_MAJOR),
                                            dispatch_args(&l[1], EP_MODE_LL, EP_LAYOUT_RANK_MAJOR) };
        ep_combine_args c[RANKS] = { combine_args(&l[0]), combine_args(&l[1]) };

        c[0].rows = c[1].rows = NULL;
        round_trip(l, d, weigh_in_place, c);
        check_identity(&l[0]);
        check_identity(&l[1]);
    }
    destroy(f);
}

/* Numbers up to 14 lose nothing in e4m3, whatever power of two they are divided by. */
static void check_scaled(const uint8_t *codes, uint8_t scale, double value)
{
    assert_true(value > 224 * ldexp(1, scale - 127) && value <= 448 * ldexp(1, scale - 127));
    for (int h = 0; h < HIDDEN; h++)
        assert_true(ep_ref_decode(EP_FP8_E4M3, &codes[h]) * ldexp(1, scale - 127) == value);
}

static void scales_in_ue8m0_are_bytes(void **state)
{
    static const struct { ep_mode mode; ep_layout layout; } cases[] = {
        { EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR }, { EP_MODE_LL, EP_LAYOUT_PACKED },
        { EP_MODE_HT, EP_LAYOUT_PACKED }, { EP_MODE_HT, EP_LAYOUT_FLAT },
    };
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t *scales[RANKS];

        for (int r = 0; r < RANKS; r++) {
            ep_dispatch_args d = dispatch_args(&l[r], cases[i].mode, cases[i].layout);

            d.wire_dtype = EP_FP8_E4M3;
            d.scale_format = EP_SCALE_UE8M0;
            d.out_bytes = RANKS * LL_TOKENS * K * HIDDEN;
            d.out_scales = scales[r] = ep_alloc(l[r].rank, RANKS * LL_TOKENS * K);
            d.sources = l[r].sources;
            ok(ep_dispatch(l[r].handle, &d, NULL));
        }
        for (int r = 0; r < RANKS; r++) {
            const uint64_t stride = cases[i].layout == EP_LAYOUT_EXPERT_MAJOR ? RANKS * LL_TOKENS : 0;

            ok(ep_sync(l[r].rank, 20000));
            for (int n = 0; n < (stride ? l[r].counts[1] : LL_TOKENS); n++) {
                const uint64_t row = stride + (uint64_t)n;

                check_scaled((const uint8_t *)l[r].out + row * HIDDEN, scales[r][row],
                             1 + 10 * l[r].sources[row].rank + l[r].sources[row].token);
            }
            ep_free(l[r].rank, scales[r]);
        }
    }
    destroy(f);
}

static void scales_in_ue8m0_are_read_in_place(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    ep_op_info info = { .size = sizeof info };

    (void)state;
    for (int r = 0; r < RANKS; r++) {
        ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_RANK_MAJOR);
        uint8_t *scales = ep_alloc(l[r].rank, LL_TOKENS);

        for (int i = 0; i < LL_TOKENS * HIDDEN; i++)
            ((uint8_t *)l[r].x)[i] = (uint8_t)ep_ref_encode(EP_FP8_E4M3, 1 + i % 3);
        for (int t = 0; t < LL_TOKENS; t++)
            scales[t] = (uint8_t)(10 * r + t);
        d.input_dtype = EP_FP8_E4M3;
        d.scales = scales;
        d.scale_format = EP_SCALE_UE8M0;
        d.sources = l[r].sources;
        ok(ep_dispatch(l[r].handle, &d, NULL));
    }
    for (int r = 0; r < RANKS; r++) {
        ok(ep_sync(l[r].rank, 20000));
        ok(ep_dispatch_info(l[r].handle, &info));
        for (int s = 0; s < RANKS; s++)
            for (int i = 0; i < l[r].counts[s]; i++) {
                const uint8_t *at = (const uint8_t *)info.scales_view + (uint64_t)s * info.scales_view_stride
                                    + (uint64_t)i * info.scales_row_stride;
                uint8_t mine;

                assert_int_equal(*at, 10 * s + (int)l[r].sources[s * LL_TOKENS + i].token);
                ok(ep_read(l[r].rank, &mine, at, 1, NULL));
                assert_int_equal(mine, *at);
            }
    }
    destroy(f);
}

static void send_only_and_complete(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    ep_op_info info = { .size = sizeof info };

    (void)state;
    for (int r = 0; r < RANKS; r++) {
        ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);

        d.flags = EP_OP_SEND_ONLY;
        assert_int_equal(ep_complete(l[r].handle, NULL), EP_FAILED_PRECONDITION);
        ok(ep_dispatch(l[r].handle, &d, NULL));
        const ep_combine_args early = combine_args(&l[r]);
        assert_int_equal(ep_combine(l[r].handle, &early, NULL), EP_FAILED_PRECONDITION);
    }
    for (int r = 0; r < RANKS; r++) {
        ok(ep_complete(l[r].handle, NULL));
        ok(ep_handle_wait(l[r].handle, 20000));
    }
    for (int r = 0; r < RANKS; r++) {
        ep_combine_args c = combine_args(&l[r]);

        c.flags = EP_OP_SEND_ONLY;
        ok(ep_combine(l[r].handle, &c, NULL));
    }
    for (int r = 0; r < RANKS; r++) {
        ok(ep_complete(l[r].handle, NULL));
        ok(ep_sync(l[r].rank, 20000));
        check_identity(&l[r]);
    }
    ok(ep_dispatch_info(l[0].handle, &info));
    assert_int_equal(info.rows, LL_TOKENS * K);
    assert_true(info.logical_bytes > 0 && info.wire_bytes > 0); /* counted by the first half */
    destroy(f);
}

static void cached_routing_and_bias(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    ep_dispatch_args d[RANKS];
    ep_combine_args c[RANKS];

    (void)state;
    for (int r = 0; r < RANKS; r++) {
        d[r] = dispatch_args(&l[r], EP_MODE_HT, EP_LAYOUT_PACKED);
        c[r] = combine_args(&l[r]);
        d[r].flags = EP_OP_CACHED;
        d[r].topk_idx = NULL;
        d[r].topk_weights = NULL;
        assert_int_equal(ep_dispatch(l[r].handle, &d[r], NULL), EP_FAILED_PRECONDITION);
        d[r] = dispatch_args(&l[r], EP_MODE_HT, EP_LAYOUT_PACKED);
    }
    round_trip(l, d, NULL, c);
    for (int r = 0; r < RANKS; r++) {
        d[r].flags = EP_OP_CACHED;
        assert_int_equal(ep_dispatch(l[r].handle, &d[r], NULL), EP_INVALID_ARGUMENT); /* topk_idx is given */
        d[r].topk_idx = NULL;
        d[r].topk_weights = NULL;
        d[r].num_tokens = LL_TOKENS - 1;
        assert_int_equal(ep_dispatch(l[r].handle, &d[r], NULL), EP_INVALID_ARGUMENT);
        d[r].num_tokens = LL_TOKENS;
        c[r].bias = l[r].x;
    }
    round_trip(l, d, NULL, c);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < LL_TOKENS * HIDDEN; i++)
            assert_true(fabsf(l[r].y[i] - 2 * l[r].x[i]) < 1e-4f);
    destroy(f);
}

static void gradients_of_the_weights_come_back(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    ep_dispatch_args d[RANKS];
    ep_combine_args c[RANKS];
    float *topk_grads[RANKS];

    (void)state;
    for (uint32_t r = 0; r < RANKS; r++) {
        float *row_grads = ep_alloc(l[r].rank, l[r].out_bytes / HIDDEN);

        d[r] = dispatch_args(&l[r], EP_MODE_HT, EP_LAYOUT_PACKED);
        c[r] = combine_args(&l[r]);
        for (size_t i = 0; i < l[r].out_bytes / HIDDEN / 4; i++)
            row_grads[i] = (float)(r + 1);
        topk_grads[r] = ep_alloc(l[r].rank, LL_TOKENS * K * 4);
        c[r].row_grads = row_grads;
        c[r].topk_grads = topk_grads[r];
    }
    round_trip(l, d, NULL, c);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < LL_TOKENS * K; i++)
            assert_true(topk_grads[r][i] == (float)(l[r].topk[i] / LOCAL + 1)); /* the rank that holds it */
    destroy(f);
}

static void many_ops_and_abandoned_handles(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (int i = 0; i < 200; i++) /* six times around the ring, no combine at all */
        for (int r = 0; r < RANKS; r++) {
            const ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
            ep_handle *handle;

            ok(ep_handle_create(l[r].rank, &handle));
            ok(ep_dispatch(handle, &d, NULL));
            ep_handle_destroy(handle);
        }
    for (int r = 0; r < RANKS; r++)
        ok(ep_sync(l[r].rank, 20000));
    assert_int_equal(f->member[0].counters.op[EP_CLASS_RELEASE].count, 200);
    destroy(f);
}

/* ---- arguments --------------------------------------------------------------------------------- */

static void refused(ep_status status, ep_status expected, const char *text)
{
    assert_int_equal(status, expected);
    if (!strstr(ep_error_message(), text))
        fail_msg("\"%s\" does not say \"%s\"", ep_error_message(), text);
}

#define REFUSE(change, text)                                                              \
    do {                                                                                  \
        ep_dispatch_args a = dispatch_args(&l, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);       \
        change;                                                                           \
        refused(ep_dispatch(l.handle, &a, NULL), EP_INVALID_ARGUMENT, text);              \
    } while (0)

static void bad_dispatch_arguments_are_named(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);
    float outside[HIDDEN * LL_TOKENS];

    (void)state;
    REFUSE(a.size = 0, "ep_dispatch_args.size is 0");
    REFUSE(a.mode = (ep_mode)7, "mode is 7");
    REFUSE(a.layout = EP_LAYOUT_FLAT, "layout is 4");
    REFUSE(a.flags = 1u << 9, "flags is 0x200");
    REFUSE(a.num_tokens = LL_TOKENS + 1, "num_tokens is 5: the group allows at most 4");
    REFUSE(a.top_k = 9, "top_k is 9: the group allows at most 2");
    REFUSE(a.index_bytes = 2, "index_bytes is 2");
    REFUSE(a.alignment = 3, "alignment is 3");
    REFUSE(a.input_dtype = EP_BF16, "input_dtype is 1");
    REFUSE(a.wire_dtype = EP_FP16, "wire_dtype is 2");
    REFUSE(a.scale_format = EP_SCALE_UE8M0, "scale_format is EP_SCALE_UE8M0: only rows that travel in fp8");
    REFUSE((a.wire_dtype = EP_FP8_E4M3, a.scale_format = (ep_scale_format)7), "scale_format is 7: must be");
    REFUSE((a.wire_dtype = EP_FP8_E4M3, a.scale_format = EP_SCALE_UE8M0),
           "out_scales is NULL: this op needs 16 bytes");
    REFUSE((a.wire_dtype = EP_FP8_E4M3), "out_scales is NULL: this op needs 64 bytes");
    REFUSE((a.input_dtype = EP_FP8_E4M3, a.scale_format = EP_SCALE_UE8M0), "scales is NULL: this op needs 4 bytes");
    REFUSE(a.tokens = NULL, "tokens is NULL");
    REFUSE(a.tokens = outside, "tokens does not point into memory of ep_alloc() of this rank");
    REFUSE(a.tokens = (char *)l.x + 4, "tokens is 0x");
    REFUSE(a.topk_idx = NULL, "topk_idx is NULL");
    REFUSE(a.out = l.topk, "out has 256 bytes");
    REFUSE(a.out = NULL, "out is NULL");
    REFUSE(a.counts = NULL, "counts is NULL");
    REFUSE(a.offsets = l.offsets, "offsets is given");
    REFUSE(a.out_scales = l.y, "out_scales is given");
    REFUSE(a.scales = l.y, "scales is given");
    REFUSE(a.out_topk = l.out_topk, "out_topk is given");
    refused(ep_dispatch(l.handle, NULL, NULL), EP_INVALID_ARGUMENT, "ep_dispatch_args is NULL");
    ep_free(l.rank, l.x);
    REFUSE((void)a, "tokens does not point into memory");
    assert_int_equal(l.rank->head, 0); /* nothing of it reached the ring */
    destroy(f);
}

static void bad_combine_arguments_are_named(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);
    ep_combine_args c = combine_args(&l);

    (void)state;
    refused(ep_combine(l.handle, &c, NULL), EP_FAILED_PRECONDITION, "no dispatch");
    refused(ep_complete(l.handle, NULL), EP_FAILED_PRECONDITION, "send-only");
    refused(ep_complete(NULL, NULL), EP_INVALID_ARGUMENT, "handle is NULL");
    refused(ep_dispatch_info(l.handle, NULL), EP_FAILED_PRECONDITION, "dispatch");
    refused(ep_sync(NULL, 0), EP_INVALID_ARGUMENT, "rank is NULL");
    l.handle->routed = true; /* as if */
    l.handle->op = (struct ep_op){ .mode = EP_MODE_LL, .layout = EP_LAYOUT_EXPERT_MAJOR, .tokens = 1, .top_k = K };
    c.dtype = EP_FP8_E4M3;
    refused(ep_combine(l.handle, &c, NULL), EP_INVALID_ARGUMENT, "dtype is 4");
    c = combine_args(&l);
    c.rows = NULL;
    refused(ep_combine(l.handle, &c, NULL), EP_INVALID_ARGUMENT, "rows is NULL");
    c = combine_args(&l);
    c.out = l.sources + 1000;
    refused(ep_combine(l.handle, &c, NULL), EP_INVALID_ARGUMENT, "out does not point");
    c = combine_args(&l);
    c.topk_grads = l.weights;
    refused(ep_combine(l.handle, &c, NULL), EP_INVALID_ARGUMENT, "topk_grads is given");
    l.handle->routed = false;
    destroy(f);
}

static void newer_structs_are_taken_when_they_ask_for_nothing_new(void **state)
{
    struct { ep_dispatch_args args; uint64_t more; } newer = { 0 };
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (int r = 0; r < RANKS; r++) {
        newer.args = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
        newer.args.size = sizeof newer;
        newer.more = 1;
        refused(ep_dispatch(l[r].handle, &newer.args, NULL), EP_INVALID_ARGUMENT, "newer");
        newer.more = 0;
        ok(ep_dispatch(l[r].handle, &newer.args, NULL));
    }
    for (int r = 0; r < RANKS; r++)
        ok(ep_sync(l[r].rank, 20000));
    destroy(f);
}

static void older_structs_ask_for_fp32_scales(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    for (int r = 0; r < RANKS; r++) {
        ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_RANK_MAJOR);

        d.wire_dtype = EP_FP8_E4M3;
        d.scale_format = (ep_scale_format)7; /* what happens to be there */
        d.size = offsetof(ep_dispatch_args, scale_format);
        ok(ep_dispatch(l[r].handle, &d, NULL));
    }
    for (int r = 0; r < RANKS; r++) {
        ep_op_info info = { .size = sizeof info };
        float scale;

        ok(ep_sync(l[r].rank, 20000));
        ok(ep_dispatch_info(l[r].handle, &info));
        memcpy(&scale, info.scales_view, sizeof scale);
        assert_true(scale > 0 && scale < 1);
    }
    destroy(f);
}

static void handles_are_limited(void **state)
{
    struct fixture *f = make();
    ep_handle *handle[EP_MAX_HANDLES + 1];

    (void)state;
    for (uint32_t i = 0; i < EP_MAX_HANDLES; i++)
        ok(ep_handle_create(&f->member[0].rank, &handle[i]));
    refused(ep_handle_create(&f->member[0].rank, &handle[EP_MAX_HANDLES]), EP_RESOURCE_EXHAUSTED, "64");
    uint32_t id = handle[5]->id, generation = handle[5]->generation;
    ep_handle_destroy(handle[5]);
    ok(ep_handle_create(&f->member[0].rank, &handle[5]));
    assert_int_equal(handle[5]->id, id);
    assert_int_not_equal(handle[5]->generation, generation);
    destroy(f);
}

/* ---- copies ---------------------------------------------------------------------------------------- */

static void *dispatch_late(void *arg)
{
    struct lane *l = arg;
    const ep_dispatch_args d = dispatch_args(l, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);

    usleep(20000);
    ok(ep_dispatch(l->handle, &d, NULL));
    ok(ep_sync(l->rank, 20000));
    return NULL;
}

/* A batch that is written anew after its dispatch: what travels is the old one. */
static void copies_come_after_the_ops_before_them(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    const ep_dispatch_args d = dispatch_args(&l[0], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
    float mine[LL_TOKENS * HIDDEN] = { 0 };
    int32_t counts[LOCAL];
    pthread_t thread;

    (void)state;
    ok(ep_dispatch(l[0].handle, &d, NULL));
    pthread_create(&thread, NULL, dispatch_late, &l[1]);
    ok(ep_write(l[0].rank, l[0].x, mine, sizeof mine, NULL));
    ok(ep_read(l[0].rank, counts, l[0].counts, sizeof counts, NULL));
    assert_int_equal(counts[0] + counts[1], LL_TOKENS * K);
    for (int i = 0; i < LL_TOKENS * HIDDEN; i++)
        assert_true(l[0].x[i] == 0);
    for (int row = 0; row < counts[0]; row++)
        assert_true(l[0].out[row * HIDDEN] != 0);
    pthread_join(thread, NULL);
    destroy(f);
}

static void bad_copies_are_named(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);
    float mine[4];
    int stream;

    (void)state;
    refused(ep_write(NULL, l.x, mine, 4, NULL), EP_INVALID_ARGUMENT, "rank is NULL");
    refused(ep_write(l.rank, l.x, mine, 4, &stream), EP_INVALID_ARGUMENT, "stream is given");
    refused(ep_write(l.rank, mine, mine, 4, NULL), EP_INVALID_ARGUMENT, "to does not point into");
    refused(ep_read(l.rank, mine, mine, 4, NULL), EP_INVALID_ARGUMENT, "from does not point into");
    refused(ep_read(l.rank, mine, l.x, 4096, NULL), EP_INVALID_ARGUMENT, "from has 256 bytes");
    refused(ep_register(l.rank, mine, sizeof mine), EP_UNIMPLEMENTED, "backend is host");
    refused(ep_unregister(l.rank, mine), EP_UNIMPLEMENTED, "take memory from ep_alloc()");
    ok(ep_read(l.rank, mine, l.x, 16, NULL));
    assert_true(mine[0] == l.x[0]);
    destroy(f);
}

/* ---- failures -------------------------------------------------------------------------------------- */

/* A combine of what the server knows no dispatch of. */
static void combine_nothing(struct lane *l, ep_handle *handle)
{
    const ep_combine_args c = combine_args(l);

    handle->routed = true;
    handle->op = (struct ep_op){ .mode = EP_MODE_LL, .layout = EP_LAYOUT_EXPERT_MAJOR, .tokens = LL_TOKENS, .top_k = K };
    ok(ep_combine(handle, &c, NULL));
}

/* All that was begun has ended, and nobody has been told how. */
static void let_ops_end(struct lane *l)
{
    float mine;

    ok(ep_read(l->rank, &mine, l->x, sizeof mine, NULL));
}

static void a_failure_is_told_once(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);

    (void)state;
    combine_nothing(&l, l.handle);
    refused(ep_handle_wait(l.handle, 20000), EP_STALE_HANDLE, "handle");
    ok(ep_handle_wait(l.handle, 0));
    ok(ep_sync(l.rank, 0));
    combine_nothing(&l, l.handle);
    refused(ep_sync(l.rank, 20000), EP_STALE_HANDLE, "handle");
    ok(ep_sync(l.rank, 0));
    ok(ep_handle_wait(l.handle, 0));
    ep_op_info info = { .size = sizeof info };
    ok(ep_combine_info(l.handle, &info));
    assert_int_equal(info.status, EP_STALE_HANDLE);
    destroy(f);
}

static void a_failure_that_was_told_is_not_of_the_next_op(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };

    (void)state;
    combine_nothing(&l[0], l[0].handle);
    refused(ep_sync(l[0].rank, 20000), EP_STALE_HANDLE, "handle");
    for (int r = 0; r < RANKS; r++) {
        const ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);

        ok(ep_dispatch(l[r].handle, &d, NULL));
    }
    for (int r = 0; r < RANKS; r++)
        ok(ep_handle_wait(l[r].handle, 20000));
    destroy(f);
}

static void ep_sync_tells_what_no_other_wait_has_told(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);
    ep_handle *other;

    (void)state;
    ok(ep_handle_create(l.rank, &other));
    combine_nothing(&l, l.handle);
    combine_nothing(&l, other);
    let_ops_end(&l);
    refused(ep_handle_wait(l.handle, 0), EP_STALE_HANDLE, "handle 0 ");
    refused(ep_sync(l.rank, 0), EP_STALE_HANDLE, "handle 1 ");
    ok(ep_handle_wait(other, 0));
    ok(ep_sync(l.rank, 0));
    destroy(f);
}

/* It is about all that was begun, as one: what follows the first one is in ep_op_info. */
static void ep_sync_tells_the_first_failure_of_several(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);
    ep_op_info info = { .size = sizeof info };
    ep_handle *other;

    (void)state;
    ok(ep_handle_create(l.rank, &other));
    combine_nothing(&l, other);
    combine_nothing(&l, l.handle);
    let_ops_end(&l);
    refused(ep_sync(l.rank, 0), EP_STALE_HANDLE, "handle 1 ");
    ok(ep_sync(l.rank, 0));
    ok(ep_handle_wait(l.handle, 0));
    ok(ep_combine_info(l.handle, &info));
    assert_int_equal(info.status, EP_STALE_HANDLE);
    destroy(f);
}

static void a_failure_outlives_its_handle(void **state)
{
    struct fixture *f = make();
    struct lane l = make_lane(f, 0);

    (void)state;
    combine_nothing(&l, l.handle);
    let_ops_end(&l);
    ep_handle_destroy(l.handle);
    refused(ep_sync(l.rank, 0), EP_STALE_HANDLE, "handle");
    ok(ep_sync(l.rank, 0));

    ok(ep_handle_create(l.rank, &l.handle));
    combine_nothing(&l, l.handle);
    ep_handle_destroy(l.handle); /* before it has ended, perhaps */
    refused(ep_sync(l.rank, 20000), EP_STALE_HANDLE, "handle");
    ok(ep_sync(l.rank, 0));

    ok(ep_handle_create(l.rank, &l.handle));
    combine_nothing(&l, l.handle);
    refused(ep_handle_wait(l.handle, 20000), EP_STALE_HANDLE, "handle");
    ep_handle_destroy(l.handle);
    ok(ep_sync(l.rank, 0));
    destroy(f);
}

static void a_wait_has_a_deadline(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    const ep_dispatch_args d[RANKS] = { dispatch_args(&l[0], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR),
                                        dispatch_args(&l[1], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR) };
    uint64_t start = ep_clock_ns();

    (void)state;
    ok(ep_dispatch(l[0].handle, &d[0], NULL)); /* rank 1 is late */
    refused(ep_sync(l[0].rank, 20), EP_DEADLINE_EXCEEDED, "still running");
    assert_true(ep_clock_ns() - start >= 20 * EP_NS_PER_MS);
    refused(ep_sync(l[0].rank, 0), EP_DEADLINE_EXCEEDED, "still running");
    ok(ep_dispatch(l[1].handle, &d[1], NULL));
    ok(ep_sync(l[0].rank, 20000));
    ok(ep_sync(l[1].rank, 20000));
    destroy(f);
}

struct interrupter {
    ep_rank *rank;
    bool in_sleep;
};

static void *interrupt(void *arg)
{
    struct interrupter *i = arg;

    while (i->in_sleep && !__atomic_load_n(&i->rank->waiting, __ATOMIC_SEQ_CST))
        ;
    ep_rank_interrupt(i->rank);
    return NULL;
}

static void a_wait_can_be_interrupted(void **state)
{
    struct fixture *f = make();
    struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
    const ep_dispatch_args d[RANKS] = { dispatch_args(&l[0], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR),
                                        dispatch_args(&l[1], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR) };

    (void)state;
    ok(ep_dispatch(l[0].handle, &d[0], NULL));
    for (int times = 0; times < 200; times++) {
        struct interrupter i = { l[0].rank, times % 2 == 0 };
        pthread_t thread;

        pthread_create(&thread, NULL, interrupt, &i);
        refused(ep_sync(l[0].rank, 20000), EP_CANCELLED, "interrupted");
        pthread_join(thread, NULL);
    }
    ep_rank_interrupt(l[0].rank); /* before the wait: it counts too */
    refused(ep_sync(l[0].rank, 20000), EP_CANCELLED, "interrupted");
    ep_rank_interrupt(l[0].rank);
    ep_event event = { .size = sizeof event };
    refused(ep_event_next(l[0].rank, 20000, &event), EP_CANCELLED, "interrupted");
    ok(ep_dispatch(l[1].handle, &d[1], NULL));
    ok(ep_sync(l[0].rank, 20000));
    ok(ep_sync(l[1].rank, 20000));
    destroy(f);
}

/* The flag is seen, and the wait over, before the interrupter comes to raise the fd. */
static void an_interrupt_that_was_taken_leaves_no_wait_busy(void **state)
{
    struct fixture *f = make();
    ep_rank *rank = &f->member[0].rank;
    struct pollfd fd = { .fd = rank->interrupt_fd, .events = POLLIN };
    ep_event event = { .size = sizeof event };

    (void)state;
    __atomic_store_n(&rank->interrupted, 1, __ATOMIC_SEQ_CST);
    refused(ep_event_next(rank, 20000, &event), EP_CANCELLED, "interrupted");
    raise_fd(rank->interrupt_fd);
    refused(ep_event_next(rank, 1, &event), EP_DEADLINE_EXCEEDED, "no event");
    assert_int_equal(poll(&fd, 1, 0), 0); /* else the next one would not sleep */
    destroy(f);
}

/* ---- what the server says --------------------------------------------------------------------------- */

static void send_event(struct member *m, enum ep_attach_event type, uint32_t rank, uint64_t value,
                       const char *text)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = type;
    frame.rank = rank;
    frame.value = value;
    snprintf(frame.text, sizeof frame.text, "%s", text);
    assert_int_equal(ep_attach_send(m->server_socket, &frame, -1, NULL), EP_OK);
}

static void events_come_in_order(void **state)
{
    struct fixture *f = make();
    struct member *m = &f->member[0];
    ep_event event = { .size = sizeof event };

    (void)state;
    assert_int_equal(ep_event_next(&m->rank, 0, &event), EP_DEADLINE_EXCEEDED);
    send_event(m, EP_ATTACH_RANK_LOST, 1, 0, "it died");
    send_event(m, EP_ATTACH_RANK_JOINED, 1, 0, "");
    ok(ep_event_next(&m->rank, 20000, &event));
    assert_int_equal(event.type, EP_EVENT_RANK_LOST);
    assert_int_equal(event.rank, 1);
    assert_string_equal(event.text, "it died");
    ok(ep_event_next(&m->rank, 20000, &event));
    assert_int_equal(event.type, EP_EVENT_RANK_JOINED);
    assert_int_equal(ep_event_next(&m->rank, 5, &event), EP_DEADLINE_EXCEEDED);
    destroy(f);
}

static void an_event_that_cannot_be_given_stays(void **state)
{
    struct fixture *f = make();
    ep_rank *rank = &f->member[0].rank;
    const ep_event lost = { .type = EP_EVENT_RANK_LOST, .rank = 1 };
    ep_event event = { .size = 4 };

    (void)state;
    events_push(rank, &lost);
    refused(ep_event_next(rank, 0, &event), EP_INVALID_ARGUMENT, "ep_event.size is 4");
    refused(ep_event_next(rank, 0, NULL), EP_INVALID_ARGUMENT, "event is NULL");
    refused(ep_event_next(NULL, 0, &event), EP_INVALID_ARGUMENT, "rank is NULL");
    event.size = sizeof event;
    ok(ep_event_next(rank, 0, &event));
    assert_int_equal(event.type, EP_EVENT_RANK_LOST);
    assert_int_equal(event.rank, 1);
    destroy(f);
}

static void events_beyond_the_queue_are_counted(void **state)
{
    struct fixture *f = make();
    ep_rank *rank = &f->member[0].rank;
    ep_event event = { .size = sizeof event, .type = EP_EVENT_RANK_JOINED };

    (void)state;
    for (uint32_t i = 0; i < EVENT_QUEUE + 10; i++)
        events_push(rank, &event);
    event = (ep_event){ .type = EP_EVENT_EVENTS_LOST, .value = 5 }; /* the server's own loss */
    events_push(rank, &event);
    event.size = sizeof event;
    for (uint32_t i = 0; i < EVENT_QUEUE - 1; i++) {
        ok(ep_event_next(rank, 0, &event));
        assert_int_equal(event.type, EP_EVENT_RANK_JOINED);
    }
    ok(ep_event_next(rank, 0, &event));
    assert_int_equal(event.type, EP_EVENT_EVENTS_LOST);
    assert_int_equal(event.value, 11 + 5);
    assert_int_equal(ep_event_next(rank, 0, &event), EP_DEADLINE_EXCEEDED);
    destroy(f);
}

static void a_lost_server_ends_every_wait(void **state)
{
    struct fixture *f = make();
    struct member *m = &f->member[0];
    struct lane l = make_lane(f, 0);
    const ep_dispatch_args d = dispatch_args(&l, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
    ep_event event = { .size = sizeof event };

    (void)state;
    ok(ep_dispatch(l.handle, &d, NULL)); /* waits for rank 1, which never comes */
    close(m->server_socket);
    m->server_socket = -1;
    refused(ep_sync(l.rank, 20000), EP_SERVER_LOST, "server");
    refused(ep_sync(l.rank, 0), EP_SERVER_LOST, "server"); /* for good */
    refused(ep_handle_wait(l.handle, 0), EP_SERVER_LOST, "server");
    refused(ep_dispatch(l.handle, &d, NULL), EP_SERVER_LOST, "server");
    ok(ep_event_next(l.rank, 20000, &event));
    assert_int_equal(event.type, EP_EVENT_SERVER_LOST);
    refused(ep_event_next(l.rank, -1, &event), EP_SERVER_LOST, "server");
    ep_handle_destroy(l.handle);
    destroy(f);
}

static void a_detached_rank_says_why(void **state)
{
    struct fixture *f = make();
    struct member *m = &f->member[0];
    struct lane l = make_lane(f, 0);
    const ep_dispatch_args d = dispatch_args(&l, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);
    ep_event event = { .size = sizeof event };

    (void)state;
    ok(ep_dispatch(l.handle, &d, NULL));
    send_event(m, EP_ATTACH_DETACHED, 0, 0, "the group was deleted");
    refused(ep_sync(l.rank, 20000), EP_DETACHED, "the group was deleted");
    close(m->server_socket); /* changes nothing any more */
    m->server_socket = -1;
    ok(ep_event_next(l.rank, 20000, &event));
    assert_int_equal(event.type, EP_EVENT_DETACHED);
    refused(ep_event_next(l.rank, 50, &event), EP_DETACHED, "deleted");
    refused(ep_dispatch(l.handle, &d, NULL), EP_DETACHED, "deleted");
    destroy(f);
}

/* The loss comes at any moment of a busy rank. */
static void a_loss_in_the_middle_of_work(void **state)
{
    (void)state;
    for (int times = 0; times < 30; times++) {
        struct fixture *f = make();
        struct lane l[RANKS] = { make_lane(f, 0), make_lane(f, 1) };
        ep_status status = EP_OK;

        for (int i = 0; status == EP_OK; i++) {
            for (int r = 0; r < RANKS && status == EP_OK; r++) {
                const ep_dispatch_args d = dispatch_args(&l[r], EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR);

                status = ep_dispatch(l[r].handle, &d, NULL);
            }
            if (i == times) {
                shutdown(f->member[0].server_socket, SHUT_RDWR);
                shutdown(f->member[1].server_socket, SHUT_RDWR);
            }
            for (int r = 0; r < RANKS && status == EP_OK; r++)
                status = ep_sync(l[r].rank, 20000);
        }
        assert_int_equal(status, EP_SERVER_LOST);
        destroy(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_have_rows_of_their_own),
        cmocka_unit_test(flat_rows_come_once_per_token),
        cmocka_unit_test(rank_major_is_combined_in_place),
        cmocka_unit_test(scales_in_ue8m0_are_bytes),
        cmocka_unit_test(scales_in_ue8m0_are_read_in_place),
        cmocka_unit_test(send_only_and_complete),
        cmocka_unit_test(cached_routing_and_bias),
        cmocka_unit_test(gradients_of_the_weights_come_back),
        cmocka_unit_test(many_ops_and_abandoned_handles),
        cmocka_unit_test(bad_dispatch_arguments_are_named),
        cmocka_unit_test(bad_combine_arguments_are_named),
        cmocka_unit_test(newer_structs_are_taken_when_they_ask_for_nothing_new),
        cmocka_unit_test(older_structs_ask_for_fp32_scales),
        cmocka_unit_test(handles_are_limited),
        cmocka_unit_test(copies_come_after_the_ops_before_them),
        cmocka_unit_test(bad_copies_are_named),
        cmocka_unit_test(a_failure_is_told_once),
        cmocka_unit_test(a_failure_that_was_told_is_not_of_the_next_op),
        cmocka_unit_test(ep_sync_tells_what_no_other_wait_has_told),
        cmocka_unit_test(ep_sync_tells_the_first_failure_of_several),
        cmocka_unit_test(a_failure_outlives_its_handle),
        cmocka_unit_test(a_wait_has_a_deadline),
        cmocka_unit_test(a_wait_can_be_interrupted),
        cmocka_unit_test(an_interrupt_that_was_taken_leaves_no_wait_busy),
        cmocka_unit_test(events_come_in_order),
        cmocka_unit_test(an_event_that_cannot_be_given_stays),
        cmocka_unit_test(events_beyond_the_queue_are_counted),
        cmocka_unit_test(a_lost_server_ends_every_wait),
        cmocka_unit_test(a_detached_rank_says_why),
        cmocka_unit_test(a_loss_in_the_middle_of_work),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
