/* The cuda backend's teams: what they write into windows and states, and in which order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_fixture.h"
#include "ep_clock.h"
#include "ep_log.h"
#include "ep_team.h"
#include "team_cuda.h"

#define RANKS 4u
#define EPOCH 7u
#define REGION_BYTES (1u << 20)

struct fixture {
    uv_loop_t loop;
    struct ep_node *node;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_node_window *window[RANKS];
    struct ep_team *team;
    struct ep_executor *executor;
    struct ep_rank_counters counters;
    struct ep_engine_timeout timeout;
    unsigned timeouts, failures;
    struct ep_error failure;
    bool stopped;
};

static int set_up(void **state, void (*on_info)(uint32_t device, struct ep_cuda_device *info))
{
    const struct ep_limits limits = { .ranks = RANKS, .experts = 8, .local_experts = 2, .top_k = 2, .hidden = 64,
                                      .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
                                      .dtypes = 1u << EP_BF16, .ll_max_tokens = 8, .ht_max_tokens = 16,
                                      .ll_banks = 2, .arena_bytes = 1 << 16 };
    const uint32_t devices[RANKS] = { 0, 1, 0, 1 };
    struct fixture *f = calloc(1, sizeof *f);
    const struct ep_node_options options = { .name = "n1", .backend = EP_NODE_CUDA,
                                             .cuda = cuda_fixture_api(), .region_bytes = REGION_BYTES };
    struct ep_team_options team = { .loop = &f->loop, .map = &f->map, .placement = &f->placement,
                                    .devices = devices, .epoch = EPOCH, .timeout_ms = 1000 };

    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    cuda_fixture_reset();
    cuda_fixture.on_info = on_info;
    uv_loop_init(&f->loop);
    assert_int_equal(ep_node_open(&options, &f->node, NULL), EP_OK);
    assert_int_equal(ep_layout_compute(&limits, &f->map, NULL), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, 8, &f->placement, NULL), EP_OK);
    team.node = f->node;
    assert_int_equal(ep_team_create(&team, &f->team, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(ep_node_window_create(f->node, devices[r], "moe/7/0", f->map.total_bytes, &f->window[r],
                                               NULL), EP_OK);
        assert_int_equal(ep_team_set_window(f->team, r, f->window[r], NULL), EP_OK);
    }
    *state = f;
    return 0;
}

static int setup(void **state)
{
    return set_up(state, NULL);
}

static void link_all(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->linked = info->peers;
}
static int set_up_linked(void **state)
{
    return set_up(state, link_all);
}

/* Both are to say so. */
static void link_first(uint32_t device, struct ep_cuda_device *info)
{
    if (device == 0)
        info->linked = info->peers;
}
static int set_up_half_linked(void **state)
{
    return set_up(state, link_first);
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    ep_team_destroy(f->team);
    for (uint32_t r = 0; r < RANKS; r++)
        ep_node_window_destroy(f->window[r]);
    ep_placement_free(&f->placement);
    ep_node_close(f->node);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(cuda_fixture.memories, 0);
    free(f);
    return 0;
}

static struct ep_device_state *state_of(const struct fixture *f, uint32_t rank)
{
    return cuda_fixture_host(cuda_state((struct cuda_team *)f->team, rank));
}

static uint8_t *window_of(const struct fixture *f, uint32_t rank)
{
    return cuda_fixture_host(ep_node_window_base(f->window[rank]));
}

static struct ep_device_report *report_of(struct fixture *f, uint32_t rank)
{
    return &((struct ep_control *)(void *)window_of(f, rank))->gpu.report;
}

static void leave_all(struct fixture *f)
{
    for (uint32_t r = 0; r < RANKS; r++)
        ep_team_leave(f->team, r);
}

/* ---- what is there from the beginning ---------------------------------------------------- */

static void windows_say_whose_they_are(void **state)
{
    struct fixture *f = *state;

    for (uint32_t r = 0; r < RANKS; r++) {
        const struct ep_control *control = (const void *)window_of(f, r);

        assert_int_equal(control->head.magic, EP_WINDOW_MAGIC);
        assert_int_equal(control->head.version, EP_WINDOW_VERSION);
        assert_int_equal(control->head.rank, r);
        assert_int_equal(control->head.epoch, EPOCH);
        assert_memory_equal(&control->head.limits, &f->map.limits, sizeof control->head.limits);
    }
}

static void every_rank_is_expected_at_first(void **state)
{
    struct fixture *f = *state;

    for (uint32_t r = 0; r < RANKS; r++) {
        const struct ep_device_state *s = state_of(f, r);

        assert_int_equal(s->magic, EP_DEVICE_STATE_MAGIC);
        assert_int_equal(s->rank, r);
        assert_int_equal(s->epoch, EPOCH);
        assert_int_equal(s->timeout_ns, 1000000000);
        for (uint32_t peer = 0; peer < EP_DEVICE_MAX_RANKS; peer++)
            assert_int_equal(s->from[peer], peer < RANKS ? 1 : EP_DEVICE_NEVER);
    }
}

static void lines_of_gpus_that_nvlink_joins_come_as_a_whole(void **state)
{
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(state_of(*state, r)->whole_lines, 1);
}

static void others_may_not(void **state)
{
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(state_of(*state, r)->whole_lines, 0);
}

static void the_timeout_is_told_to_all(void **state)
{
    struct fixture *f = *state;

    ep_team_set_timeout(f->team, 50);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(state_of(f, r)->timeout_ns, 50000000);
    leave_all(f);
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_int_equal(state_of(f, 1)->timeout_ns, 50000000); /* also to who joins later */
}

/* ---- leave -------------------------------------------------------------------------------- */

static void leaving_is_one_word_in_every_state(void **state)
{
    struct fixture *f = *state;

    cuda_fixture.copies = 0;
    ep_team_leave(f->team, 2);
    assert_int_equal(cuda_fixture.copies, RANKS + 1); /* and what is said to itself */
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->from[2], EP_DEVICE_NEVER);
        assert_int_equal(state_of(f, r)->from[1], r == 2 ? EP_DEVICE_NEVER : 1);
    }
    ep_team_leave(f->team, 2); /* told once */
    assert_int_equal(cuda_fixture.copies, RANKS + 1);
}

/* Its peers send it nothing any more, so an op of its that waits would wait for its timeout. */
static void to_who_leaves_all_are_absent_until_it_joins(void **state)
{
    struct fixture *f = *state;

    ep_team_leave(f->team, 2);
    for (uint32_t peer = 0; peer < RANKS; peer++)
        assert_int_equal(state_of(f, 2)->from[peer], EP_DEVICE_NEVER);
    assert_int_equal(ep_team_join(f->team, 2, NULL), EP_OK);
    for (uint32_t peer = 0; peer < RANKS; peer++)
        assert_int_equal(state_of(f, 2)->from[peer], 1);
}

static void a_broken_gpu_does_not_keep_it_from_the_others(void **state)
{
    struct fixture *f = *state;

    __atomic_store_n(&cuda_fixture.lost, 1u << 0, __ATOMIC_RELAXED);
    ep_team_leave(f->team, 3);
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    assert_int_equal(state_of(f, 0)->from[3], 1);
    assert_int_equal(state_of(f, 1)->from[3], EP_DEVICE_NEVER);
    assert_int_equal(state_of(f, 3)->from[3], EP_DEVICE_NEVER);
}

static void all_leave_at_once(void **state)
{
    struct fixture *f = *state;

    cuda_fixture.copies = 0;
    ep_team_leave_all(f->team);
    assert_int_equal(cuda_fixture.copies, RANKS);
    for (uint32_t r = 0; r < RANKS; r++)
        for (uint32_t peer = 0; peer < RANKS; peer++)
            assert_int_equal(state_of(f, r)->from[peer], EP_DEVICE_NEVER);
}

/* ---- join --------------------------------------------------------------------------------- */

static void who_joins_takes_part_after_what_anybody_has_begun(void **state)
{
    struct fixture *f = *state;
    struct ep_device_state *s = state_of(f, 1);

    ep_team_leave(f->team, 1);
    state_of(f, 0)->begun = 41;
    state_of(f, 2)->begun = 40;
    s->begun = 12;
    s->handles[3].number = 12;
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(state_of(f, r)->from[1], 42);
    assert_int_equal(s->begun, 41);
    assert_int_equal(s->number, 41);
    for (uint32_t bank = 0; bank < EP_MAX_LL_BANKS; bank++)
        assert_int_equal(s->released[bank], 41);
    assert_int_equal(s->from[0], 1);
    assert_int_equal(s->handles[3].number, 0);
}

/* HT counts for itself. */
static void and_after_every_ht_dispatch_that_has_begun(void **state)
{
    struct fixture *f = *state;
    struct ep_device_state *s = state_of(f, 1);

    ep_team_leave(f->team, 1);
    assert_int_equal(state_of(f, 0)->ht_from[1], 1); /* from says that it is absent */
    state_of(f, 0)->begun = 41;
    state_of(f, 2)->ht_begun = 7;
    s->ht_begun = 3;
    s->ht_combines = 2;
    s->ht_handles[5].number = 3;
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->from[1], 42);
        assert_int_equal(state_of(f, r)->ht_from[1], 8);
    }
    assert_int_equal(s->ht_begun, 7);
    assert_int_equal(s->ht_number, 7);
    assert_int_equal(s->ht_combines, 0);
    assert_int_equal(s->ht_from[0], 1);
    assert_int_equal(s->ht_handles[5].number, 0);
}

/* What it sent in its last life bears those numbers. */
static void its_own_last_number_counts_too(void **state)
{
    struct fixture *f = *state;

    state_of(f, 1)->begun = 9;
    state_of(f, 0)->begun = 8;
    ep_team_leave(f->team, 1);
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_int_equal(state_of(f, 0)->from[1], 10);
}

static void who_is_absent_stays_so_for_who_joins(void **state)
{
    struct fixture *f = *state;

    ep_team_leave(f->team, 1);
    ep_team_leave(f->team, 3);
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_int_equal(state_of(f, 1)->from[3], EP_DEVICE_NEVER);
    assert_int_equal(state_of(f, 1)->from[1], 1);
}

/* Rank 0 runs op after op: it has begun `step` more whenever somebody looks, for `steps` looks. */
struct runner {
    struct fixture *f;
    uint64_t step;
    unsigned steps;
};

static void run_on(const void *gpu, void *user)
{
    struct runner *runner = user;

    if (gpu != &cuda_state((struct cuda_team *)runner->f->team, 0)->begun || runner->steps == 0)
        return;
    runner->steps--;
    state_of(runner->f, 0)->begun += runner->step;
}

static void a_number_that_was_begun_meanwhile_is_raised(void **state)
{
    struct fixture *f = *state;
    struct runner runner = { .f = f, .step = 1, .steps = 2 };

    ep_team_leave(f->team, 1);
    state_of(f, 0)->begun = 10;
    cuda_fixture.on_read = run_on;
    cuda_fixture.user = &runner;
    /* Seen 11, so 12; then 12 has begun: the next one, as that of the other mode. */
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_int_equal(state_of(f, 0)->begun, 12);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->from[1], 13);
        assert_int_equal(state_of(f, r)->ht_from[1], 1);
    }
    assert_int_equal(state_of(f, 1)->begun, 12);
}

static void run_ht_on(const void *gpu, void *user)
{
    struct runner *runner = user;

    if (gpu != &cuda_state((struct cuda_team *)runner->f->team, 0)->ht_begun || runner->steps == 0)
        return;
    runner->steps--;
    state_of(runner->f, 0)->ht_begun += runner->step;
}

static void an_ht_number_that_was_begun_meanwhile_is_raised(void **state)
{
    struct fixture *f = *state;
    struct runner runner = { .f = f, .step = 1, .steps = 2 };

    ep_team_leave(f->team, 1);
    state_of(f, 0)->begun = 5;
    state_of(f, 0)->ht_begun = 10;
    cuda_fixture.on_read = run_ht_on;
    cuda_fixture.user = &runner;
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_int_equal(state_of(f, 0)->ht_begun, 12);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->ht_from[1], 13);
        assert_int_equal(state_of(f, r)->from[1], 6);
    }
    assert_int_equal(state_of(f, 1)->ht_begun, 12);
}

static void a_rank_that_never_rests_is_caught_up_with(void **state)
{
    struct fixture *f = *state;
    struct runner runner = { .f = f, .step = 100, .steps = UINT32_MAX };

    ep_team_leave(f->team, 1);
    cuda_fixture.on_read = run_on;
    cuda_fixture.user = &runner;
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK);
    assert_true(state_of(f, 0)->begun < state_of(f, 0)->from[1]);
    assert_int_equal(state_of(f, 0)->ht_from[1], 1);
    assert_true(UINT32_MAX - runner.steps <= 16 + 4); /* looks */
}

static void a_state_that_was_overwritten_is_named(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    ep_team_leave(f->team, 1);
    state_of(f, 2)->begun = UINT64_MAX - 1;
    assert_int_equal(ep_team_join(f->team, 1, &error), EP_INTERNAL);
    assert_non_null(strstr(error.text, "state of rank 2 says"));
    assert_int_equal(state_of(f, 0)->from[1], EP_DEVICE_NEVER);
}

static void who_cannot_join_stays_absent(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    ep_team_leave(f->team, 0);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    assert_int_equal(ep_team_join(f->team, 0, &error), EP_DEVICE_LOST);
    assert_non_null(strstr(error.text, "device 1 has fallen off the bus"));
    assert_int_equal(state_of(f, 0)->from[0], EP_DEVICE_NEVER);
    assert_int_equal(state_of(f, 2)->from[0], EP_DEVICE_NEVER);
}

/* ---- reset -------------------------------------------------------------------------------- */

static void a_reset_forgets_rows_and_numbers(void **state)
{
    struct fixture *f = *state;
    const struct ep_layout_map *m = &f->map;

    for (uint32_t r = 0; r < RANKS; r++) {
        state_of(f, r)->begun = state_of(f, r)->ht_begun = 30 + r;
        memset(window_of(f, r) + m->ll, 0xee, m->bank_bytes * 2);
        memset(window_of(f, r) + m->ht, 0xee, m->ht_combine_rows - m->ht);
    }
    leave_all(f);
    assert_int_equal(ep_team_reset(f->team, NULL), EP_OK);
    every_rank_is_expected_at_first(state);
    windows_say_whose_they_are(state);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->begun, 0);
        assert_int_equal(state_of(f, r)->released[1], 0);
        for (uint64_t i = 0; i < m->bank_bytes * 2; i += 16)
            assert_int_equal(window_of(f, r)[m->ll + i], 0);
        assert_int_equal(state_of(f, r)->ht_begun, 0);
        for (uint64_t i = m->ht; i < m->ht_combine_rows; i += 8)
            assert_int_equal(window_of(f, r)[i], 0);
    }
}

static void a_reset_that_fails_leaves_all_absent(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    leave_all(f);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    assert_int_equal(ep_team_reset(f->team, &error), EP_DEVICE_LOST);
    assert_string_equal(error.text, "window of rank 1: device 1 has fallen off the bus");
    assert_int_equal(state_of(f, 0)->from[0], EP_DEVICE_NEVER);
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    assert_int_equal(ep_team_join(f->team, 0, NULL), EP_OK);
}

/* ---- an attached rank --------------------------------------------------------------------- */

static void on_timeout(const struct ep_engine_timeout *timeout, void *user)
{
    struct fixture *f = user;

    f->timeout = *timeout;
    f->timeouts++;
}

static void on_failed(const struct ep_error *why, void *user)
{
    struct fixture *f = user;

    f->failure = *why;
    f->failures++;
}

static void on_stopped(void *user)
{
    ((struct fixture *)user)->stopped = true;
}

static struct ep_executor_options options_of(struct fixture *f, uint32_t rank, bool direct)
{
    return (struct ep_executor_options){ .rank = rank, .direct = direct, .max_sms = direct ? 0 : 3,
                                         .max_ht_sms = direct ? 0 : 2,
                                         .counters = &f->counters, .on_timeout = on_timeout,
                                         .on_failed = on_failed, .user = f };
}

static void start_as(struct fixture *f, uint32_t rank, bool direct)
{
    const struct ep_executor_options options = options_of(f, rank, direct);

    f->stopped = false;
    assert_int_equal(ep_executor_start(f->team, &options, &f->executor, NULL), EP_OK);
}

static void start(struct fixture *f, uint32_t rank)
{
    start_as(f, rank, true);
}

static void stop(struct fixture *f)
{
    f->stopped = false;
    ep_executor_stop(f->executor, on_stopped, f);
    assert_false(f->stopped); /* later, from the loop */
    while (!f->stopped)
        uv_run(&f->loop, UV_RUN_ONCE);
}

/* As somebody who asks: what was done until now is counted when it returns. */
static void refresh(struct fixture *f)
{
    const uint64_t now = ep_clock_ns();

    while (!ep_executor_refresh(f->executor, now))
        uv_run(&f->loop, UV_RUN_NOWAIT); /* not until the next look is due: tests write what that reads */
}

static void counters_of_ht_are_ht_s(void **state)
{
    struct fixture *f = *state;
    struct ep_device_counters *c = state_of(f, 1)->ht_counters;

    start(f, 1);
    c[EP_DEVICE_DISPATCH] = (struct ep_device_counters){ .count = 5, .tokens = 500, .dropped = 2 };
    c[EP_DEVICE_COMBINE] = (struct ep_device_counters){ .count = 4, .wire_bytes = 64 };
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_HT_DISPATCH].count, 5);
    assert_int_equal(f->counters.op[EP_CLASS_HT_DISPATCH].tokens, 500);
    assert_int_equal(f->counters.op[EP_CLASS_HT_COMBINE].wire_bytes, 64);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 0);
    assert_int_equal(f->counters.dropped_routes, 2);
    stop(f);
}

static int32_t *routing_of(struct fixture *f, bool ht, uint32_t handle)
{
    uint8_t *state = (uint8_t *)state_of(f, 1);
    struct ep_device_tables t;

    ep_device_state_tables(&f->map, &f->placement, &t);
    return (int32_t *)(void *)(state + (ht ? t.ht.routing + handle * t.ht.handle_stride
                                           : t.routing + handle * t.handle_stride));
}

/* Of contiguous experts, two on each rank. */
static int32_t route_to(uint32_t expert)
{
    return (int32_t)(expert / 2 << 16 | expert % 2);
}

static void assert_rows(const struct fixture *f, const uint64_t rows[8])
{
    for (uint32_t e = 0; e < 8; e++)
        assert_int_equal(ep_team_expert_rows(f->team, 1, e), rows[e]);
}

static void loads_are_those_of_the_newest_batch(void **state)
{
    struct fixture *f = *state;
    struct ep_device_state *s = state_of(f, 1);

    start(f, 1);
    refresh(f);
    assert_rows(f, (const uint64_t[8]){ 0 });
    s->handles[0] = (struct ep_device_handle){ .number = 3, .tokens = 1, .top_k = 2 };
    s->handles[5] = (struct ep_device_handle){ .number = 7, .tokens = 2, .top_k = 2 };
    routing_of(f, false, 0)[0] = route_to(6);
    memcpy(routing_of(f, false, 5),
           (const int32_t[]){ route_to(5), -1, route_to(0), route_to(0) | EP_DEVICE_ROUTE_AGAIN }, 4 * sizeof(int32_t));
    s->counters[EP_DEVICE_DISPATCH].count = 10; /* it stands for all of them */
    refresh(f);
    refresh(f);
    assert_rows(f, (const uint64_t[8]){ [0] = 10, [5] = 10 });
    s->ht_handles[1] = (struct ep_device_ht_handle){ .number = 1, .tokens = 1, .top_k = 2 };
    memcpy(routing_of(f, true, 1), (const int32_t[]){ route_to(5), route_to(7) }, 2 * sizeof(int32_t));
    s->ht_counters[EP_DEVICE_DISPATCH].count = 1;
    s->counters[EP_DEVICE_DISPATCH].count = 12;
    stop(f); /* with a last look */
    assert_rows(f, (const uint64_t[8]){ [0] = 12, [5] = 13, [7] = 1 });
}

/* A worker that runs its own ops can write all of it. */
static void loads_that_cannot_be_are_left_out(void **state)
{
    struct fixture *f = *state;
    struct ep_device_state *s = state_of(f, 1);

    start(f, 1);
    s->handles[0] = (struct ep_device_handle){ .number = 1, .tokens = UINT32_MAX, .top_k = UINT32_MAX };
    s->counters[EP_DEVICE_DISPATCH].count = 1;
    refresh(f);
    s->handles[0] = (struct ep_device_handle){ .number = 2, .tokens = 2, .top_k = 2 };
    memcpy(routing_of(f, false, 0), (const int32_t[]){ INT32_MIN, 0x3fff0000, 0x0000ffff, route_to(1) }, 4 * sizeof(int32_t));
    s->counters[EP_DEVICE_DISPATCH].count = 2;
    refresh(f);
    s->counters[EP_DEVICE_DISPATCH].count = 1; /* it went back */
    refresh(f);
    assert_rows(f, (const uint64_t[8]){ [1] = 1 });
    stop(f);
}

static void counters_of_kernels_are_added_up(void **state)
{
    struct fixture *f = *state;
    struct ep_device_counters *c = state_of(f, 1)->counters;
    const struct ep_op_counters *dispatch = &f->counters.op[EP_CLASS_LL_DISPATCH];

    start(f, 1);
    c[EP_DEVICE_DISPATCH] = (struct ep_device_counters){
        .count = 5, .errors = 1, .timeouts = 1, .tokens = 40, .wire_bytes = 4096, .busy_ns = 1000, .wait_ns = 300,
        .max_wait_ns = 200, .dropped = 7,
    };
    c[EP_DEVICE_COMBINE].count = 3;
    c[EP_DEVICE_COMBINE].dropped = 2;
    refresh(f);
    refresh(f);
    assert_int_equal(dispatch->count, 5);
    assert_int_equal(dispatch->errors, 1);
    assert_int_equal(dispatch->timeouts, 1);
    assert_int_equal(dispatch->tokens, 40);
    assert_int_equal(dispatch->wire_bytes, 4096);
    assert_int_equal(dispatch->busy_ns, 1000);
    assert_int_equal(dispatch->wait_ns, 300);
    assert_int_equal(dispatch->max_wait_ns, 200);
    assert_int_equal(f->counters.dropped_routes, 9);
    assert_int_equal(f->counters.op[EP_CLASS_LL_COMBINE].count, 3);
    c[EP_DEVICE_DISPATCH].count = 6;
    stop(f); /* what came since the last look counts too */
    assert_int_equal(dispatch->count, 6);

    ep_team_leave(f->team, 1);
    assert_int_equal(ep_team_join(f->team, 1, NULL), EP_OK); /* the state begins at 0 again, the sums do not */
    start(f, 1);
    c[EP_DEVICE_DISPATCH].count = 2;
    stop(f);
    assert_int_equal(dispatch->count, 8);
}

static void a_late_rank_is_told_of_once(void **state)
{
    struct fixture *f = *state;
    struct ep_device_report *report = report_of(f, 1);

    start(f, 1);
    report->failures = 3;
    refresh(f);
    assert_int_equal(f->timeouts, 0); /* counted, and not written yet */
    report->failure_op = EP_DEVICE_COMBINE;
    report->failure = (struct ep_device_record){ .status = EP_TIMEOUT, .late_rank = 2,
                                                 .wait_phase = EP_WAIT_ARRIVAL, .number = 17, .sequence = 33, .wait_ns = 5000000 };
    refresh(f);
    assert_int_equal(report->failures, 3); /* the worker's to take */
    assert_int_equal(f->timeouts, 1);
    assert_int_equal(f->timeout.late_rank, 2);
    assert_int_equal(f->timeout.number, 17);
    assert_int_equal(f->timeout.waited_us, 5000);
    assert_int_equal(f->timeout.op_class, EP_CLASS_LL_COMBINE);
    refresh(f);
    assert_int_equal(f->timeouts, 1);
    report->failures = 0; /* it has */
    refresh(f);
    assert_int_equal(f->timeouts, 1);
    report->failure.sequence = 40;
    refresh(f); /* too late to see the number, not the record */
    assert_int_equal(f->timeouts, 2);
    stop(f);
}

static uint32_t seen(const uint32_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_SEQ_CST);
}

static void wait_for(struct fixture *f, const uint32_t *counter, uint32_t value)
{
    while (seen(counter) != value)
        if (!uv_run(&f->loop, UV_RUN_NOWAIT))
            usleep(100);
}

/* ---- a GPU that does not answer --------------------------------------------------------------- */

/* Looks at rank 1 stand before it as long as it is shut. */
struct gate {
    const struct fixture *f;
    uint32_t shut, looks, inside; /* atomic */
};

static void pass(const void *gpu, void *user)
{
    struct gate *gate = user;

    if (gpu != cuda_state((struct cuda_team *)gate->f->team, 1)->counters)
        return;
    __atomic_fetch_add(&gate->looks, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&gate->inside, 1, __ATOMIC_SEQ_CST);
    while (seen(&gate->shut))
        usleep(100);
    __atomic_fetch_sub(&gate->inside, 1, __ATOMIC_SEQ_CST);
}

static void shut(struct gate *gate)
{
    __atomic_store_n(&gate->shut, 1, __ATOMIC_SEQ_CST);
    cuda_fixture.on_read = pass;
    cuda_fixture.user = gate;
}

static void open_gate(struct gate *gate)
{
    __atomic_store_n(&gate->shut, 0, __ATOMIC_SEQ_CST);
}

static void a_gpu_that_does_not_answer_costs_its_rank_the_figures_alone(void **state)
{
    struct fixture *f = *state;
    struct gate gate = { .f = f };
    struct ep_executor *deaf;

    shut(&gate);
    start(f, 1);
    deaf = f->executor;
    state_of(f, 1)->counters[EP_DEVICE_DISPATCH].count = 3;
    assert_false(ep_executor_refresh(deaf, ep_clock_ns()));
    wait_for(f, &gate.inside, 1);
    start(f, 0);
    state_of(f, 0)->counters[EP_DEVICE_COMBINE].count = 5;
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_COMBINE].count, 5);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 0);
    stop(f);
    assert_false(ep_executor_refresh(deaf, ep_clock_ns()));
    assert_int_equal(seen(&gate.looks), 1); /* no other one is begun meanwhile */
    state_of(f, 1)->counters[EP_DEVICE_DISPATCH].count = 4;
    open_gate(&gate);
    f->executor = deaf;
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 4);
    assert_false(ep_team_stuck(f->team, -1));
    stop(f);
}

static void a_look_that_does_not_come_back_is_given_up(void **state)
{
    struct fixture *f = *state;
    struct gate gate = { .f = f };

    shut(&gate);
    start(f, 1);
    state_of(f, 1)->counters[EP_DEVICE_DISPATCH].count = 3;
    stop(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 0);
    assert_true(ep_team_stuck(f->team, -1)); /* it may still read what is there */
    assert_false(ep_team_stuck(f->team, 1));
    start(f, 1);
    assert_false(ep_executor_refresh(f->executor, ep_clock_ns()));
    assert_int_equal(seen(&gate.looks), 1); /* the next worker's watch waits for it */
    state_of(f, 1)->counters[EP_DEVICE_DISPATCH].count = 8;
    open_gate(&gate);
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 8);
    assert_false(ep_team_stuck(f->team, -1));
    stop(f);
}

static void a_look_that_was_given_up_may_come_back_to_nobody(void **state)
{
    struct fixture *f = *state;
    struct gate gate = { .f = f };

    shut(&gate);
    start_as(f, 1, false);
    stop(f);
    assert_true(ep_team_stuck(f->team, -1));
    open_gate(&gate);
    while (ep_team_stuck(f->team, -1))
        usleep(100);
}

static void a_look_that_fails_counts_nothing_and_is_made_up_for(void **state)
{
    struct fixture *f = *state;

    start(f, 1);
    state_of(f, 1)->counters[EP_DEVICE_DISPATCH].count = 3;
    cuda_fixture_fail("read", 1); /* counters could be read */
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 0);
    cuda_fixture_fail(NULL, 0);
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 3);
    stop(f);
}

static void the_next_worker_reads_nothing_of_the_last_one(void **state)
{
    struct fixture *f = *state;
    const struct ep_layout_map *m = &f->map;
    struct ep_device_tables tables;
    uint8_t *w = window_of(f, 2), *s = (uint8_t *)state_of(f, 2);

    ep_device_state_tables(m, &f->placement, &tables);
    start(f, 2);
    memset(w, 0x55, sizeof(struct ep_control));
    memset(w + m->ll, 0x66, m->bank_bytes);
    memset(w + m->arena, 0x77, m->limits.arena_bytes);
    memset(s + tables.routing, 0x88, tables.bytes - tables.routing);
    state_of(f, 2)->begun = 5;
    ep_team_leave(f->team, 2);
    stop(f);
    assert_true(ep_team_clean(f->team, 2));
    windows_say_whose_they_are(state);
    assert_int_equal(w[sizeof(struct ep_control) - 1], 0);
    assert_int_equal(w[m->arena] | w[m->arena + m->limits.arena_bytes - 1], 0);
    assert_int_equal(s[tables.routing] | s[tables.bytes - 1], 0);
    assert_int_equal(w[m->ll], 0x66);              /* a peer's op may be writing there */
    assert_int_equal(state_of(f, 2)->begun, 5);    /* for the one who joins */
}

static void who_gets_uncleared_memory_is_refused(void **state)
{
    struct fixture *f = *state;
    const struct ep_executor_options options = options_of(f, 1, true);
    struct ep_executor *executor;
    struct ep_error error = EP_ERROR_INIT;

    start(f, 1);
    window_of(f, 1)[f->map.arena] = 1;
    stop(f);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    assert_true(ep_team_clean(f->team, 1));
    assert_int_equal(ep_executor_start(f->team, &options, &executor, &error), EP_DEVICE_LOST);
    assert_non_null(strstr(error.text, "memory of rank 1 cannot be cleared"));
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    start(f, 1);
    assert_int_equal(window_of(f, 1)[f->map.arena], 0);
    stop(f);
}

/* ---- executor server ------------------------------------------------------------------------ */

static void every_gpu_of_the_team_writes_every_window(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    cuda_fixture_fail("memory_share", 0); /* rank 2 is on GPU 0, where ranks 1 and 3 are not */
    assert_int_equal(ep_team_set_window(f->team, 2, f->window[2], &error), EP_INTERNAL);
    assert_string_equal(error.text, "window of rank 2: memory_share failed because the test says so");
    cuda_fixture_fail("memory_share", 1); /* one other GPU: once is enough */
    assert_int_equal(ep_team_set_window(f->team, 2, f->window[2], &error), EP_OK);
}

static void kernels_of_a_served_rank_get_what_a_workers_have(void **state)
{
    struct fixture *f = *state;

    start_as(f, 1, false);
    assert_int_equal(cuda_fixture_serves(), 1);
    assert_int_equal(cuda_fixture.served.device, 1);
    assert_int_equal(cuda_fixture.served.rank, 1);
    assert_int_equal(cuda_fixture.served.max_sms, 3);
    assert_int_equal(cuda_fixture.served.max_ht_sms, 2);
    assert_ptr_equal(cuda_fixture.served.map, &f->map);
    assert_ptr_equal(cuda_fixture.served.placement, &f->placement);
    assert_ptr_equal(cuda_fixture_host(cuda_fixture.served.state), state_of(f, 1));
    stop(f);
    assert_int_equal(cuda_fixture_serves(), 0);
}

static void two_batches_are_kept_ready(void **state)
{
    const uint32_t batch = EP_CUDA_SERVE_OPS / 2;
    struct fixture *f = *state;

    start_as(f, 0, false);
    wait_for(f, &cuda_fixture.posted, 2 * batch);
    for (uint32_t n = 1; n < 4; n++) {
        __atomic_store_n(&cuda_fixture.passed, n * batch - 1, __ATOMIC_SEQ_CST);
        usleep(2000);
        assert_int_equal(seen(&cuda_fixture.posted), (n + 1) * batch);
        __atomic_store_n(&cuda_fixture.passed, n * batch, __ATOMIC_SEQ_CST);
        wait_for(f, &cuda_fixture.posted, (n + 2) * batch);
    }
    stop(f);
    assert_int_equal(f->failures, 0);
}

static void what_it_counts_is_added_up_to_the_end(void **state)
{
    struct fixture *f = *state;
    struct ep_device_counters *c = state_of(f, 1)->counters;

    start_as(f, 1, false);
    c[EP_DEVICE_DISPATCH].count = 5;
    refresh(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_DISPATCH].count, 5);
    report_of(f, 1)->failures = 1;
    report_of(f, 1)->failure = (struct ep_device_record){ .status = EP_TIMEOUT, .late_rank = 3, .sequence = 9 };
    c[EP_DEVICE_COMBINE].count = 4; /* while it stops */
    stop(f);
    assert_int_equal(f->counters.op[EP_CLASS_LL_COMBINE].count, 4);
    assert_int_equal(f->timeout.late_rank, 3);
}

static void the_next_worker_finds_the_mailbox_empty(void **state)
{
    struct fixture *f = *state;
    struct ep_mailbox *mailbox = &((struct ep_control *)(void *)window_of(f, 2))->gpu.mailbox;

    start_as(f, 2, false);
    mailbox->bell = mailbox->closed = mailbox->spins = 1;
    ep_team_leave(f->team, 2);
    stop(f);
    assert_true(ep_team_clean(f->team, 2));
    assert_int_equal(mailbox->bell | mailbox->closed | mailbox->spins, 0);
    assert_int_equal(ep_team_join(f->team, 2, NULL), EP_OK);
    start_as(f, 2, false);
    stop(f);
}

static void ranks_stop_at_once(void **state)
{
    struct fixture *f = *state;
    struct ep_executor *executor[RANKS];

    for (uint32_t r = 0; r < RANKS; r++) {
        start_as(f, r, r % 2);
        executor[r] = f->executor;
    }
    assert_int_equal(cuda_fixture_serves(), RANKS / 2);
    for (uint32_t r = 0; r < RANKS; r++)
        ep_executor_stop(executor[r], on_stopped, f);
    assert_false(f->stopped);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_true(f->stopped);
    assert_int_equal(cuda_fixture_serves(), 0);
}

static void a_start_that_fails_leaves_nothing(void **state)
{
    struct fixture *f = *state;
    const struct ep_executor_options options = options_of(f, 1, false);
    struct ep_executor *executor;
    struct ep_error error = EP_ERROR_INIT;

    cuda_fixture_fail("serve_open", 0);
    assert_int_equal(ep_executor_start(f->team, &options, &executor, &error), EP_INTERNAL);
    assert_string_equal(error.text, "the kernels of rank 1: serve_open failed because the test says so");
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(cuda_fixture_serves(), 0);
    start_as(f, 1, false);
    stop(f);
}

/* Its worker must hear that nobody answers it any more. */
static void a_gpu_that_fails_is_told_of_once(void **state)
{
    static const struct { const char *name; uint32_t after; } calls[] = {
        { "serve_post", 0 }, { "serve_post", 1 }, { "serve_wait", 0 },
    };
    struct fixture *f = *state;

    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        cuda_fixture_fail(calls[i].name, calls[i].after);
        start_as(f, 1, false);
        while (f->failures == i)
            uv_run(&f->loop, UV_RUN_ONCE);
        assert_int_equal(f->failure.status, EP_INTERNAL);
        assert_non_null(strstr(f->failure.text, calls[i].name));
        cuda_fixture_fail(NULL, 0);
        stop(f);
        assert_int_equal(f->failures, i + 1);
        assert_int_equal(cuda_fixture_serves(), 0);
        assert_false(ep_team_stuck(f->team, -1));
    }
}

static void an_end_that_fails_is_tried_again(void **state)
{
    struct fixture *f = *state;

    start_as(f, 1, false);
    wait_for(f, &cuda_fixture.posted, EP_CUDA_SERVE_OPS);
    cuda_fixture_fail("serve_end", 0);
    stop(f);
    assert_int_equal(cuda_fixture.ended, 1);
    assert_int_equal(cuda_fixture_serves(), 0);
    assert_false(ep_team_stuck(f->team, 1));
}

static void set_stuck(uint32_t stuck)
{
    __atomic_store_n(&cuda_fixture.stuck, stuck, __ATOMIC_SEQ_CST);
}

static void a_slow_end_is_waited_for(void **state)
{
    struct fixture *f = *state;

    start_as(f, 1, false);
    set_stuck(1);
    ep_executor_stop(f->executor, on_stopped, f);
    wait_for(f, &cuda_fixture.ended, 3);
    assert_false(f->stopped);
    set_stuck(0);
    while (!f->stopped)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_false(ep_team_stuck(f->team, 1));
}

/* After the group's bound for waits nothing that is right can still run. */
static void what_does_not_end_keeps_its_memory(void **state)
{
    struct fixture *f = *state;
    const struct ep_executor_options options = options_of(f, 1, false);
    struct ep_executor *executor;
    struct ep_error error = EP_ERROR_INIT;

    ep_team_set_timeout(f->team, 0);
    start_as(f, 1, false);
    set_stuck(1);
    stop(f);
    assert_true(ep_team_stuck(f->team, 1));
    assert_true(ep_team_stuck(f->team, -1));
    assert_false(ep_team_stuck(f->team, 0));
    assert_int_equal(ep_executor_start(f->team, &options, &executor, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "has not ended"));
    set_stuck(0);
    start_as(f, 0, false); /* the others go on */
    stop(f);
}

/* ---- memory of the worker's own ------------------------------------------------------------- */

enum { OWN_BYTES = 1 << 16 };

/* A worker's, and what became of its requests. */
struct own {
    struct ep_cuda_memory *memory;
    unsigned done;
    struct ep_error error; /* of the last */
};

static struct own make_own(void)
{
    struct own own = { .memory = NULL };

    assert_int_equal(cuda_fixture_api()->memory_create(1, OWN_BYTES, &own.memory, NULL), EP_OK);
    return own;
}

static void free_own(struct own *own)
{
    cuda_fixture_api()->memory_destroy(own->memory);
}

static void on_done(const struct ep_error *error, void *user)
{
    struct own *own = user;

    own->error = error ? *error : (struct ep_error)EP_ERROR_INIT;
    own->done++;
}

static int descriptor_of(const struct own *own)
{
    int fd;

    assert_int_equal(cuda_fixture_api()->memory_export(own->memory, &fd, NULL), EP_OK);
    return fd;
}

static void ask(struct fixture *f, struct own *own, uint32_t number, uint64_t offset, uint64_t bytes)
{
    const struct ep_executor_region region = { .number = number, .fd = descriptor_of(own), .offset = offset,
                                               .bytes = bytes };

    ep_executor_register(f->executor, &region, on_done, own);
}

static ep_status finish(struct fixture *f, struct own *own)
{
    while (!own->done)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(own->done, 1);
    own->done = 0;
    return own->error.status;
}

static ep_status add(struct fixture *f, struct own *own, uint32_t number, uint64_t offset, uint64_t bytes)
{
    ask(f, own, number, offset, bytes);
    return finish(f, own);
}

static ep_status drop(struct fixture *f, struct own *own, uint32_t number)
{
    ep_executor_unregister(f->executor, number, on_done, own);
    return finish(f, own);
}

/* The executor, and what it gives back in its own time. */
static void stop_all(struct fixture *f)
{
    stop(f);
    uv_run(&f->loop, UV_RUN_DEFAULT);
}

static uint32_t open_descriptors(void)
{
    uint32_t n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void a_region_is_mapped_for_the_ranks_ops(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own();
    const struct ep_region *region = &cuda_fixture.regions.region[7];

    start_as(f, 1, false);
    assert_int_equal(add(f, &own, 7, 4096, 1000), EP_OK);
    ((uint8_t *)cuda_fixture_host(cuda_fixture_api()->memory_at(own.memory)))[4096] = 42;
    assert_int_equal(region->bytes, 1000);
    assert_int_equal(*(uint8_t *)cuda_fixture_host(region->start), 42);
    free_own(&own); /* what is mapped stays */
    assert_int_equal(*(uint8_t *)cuda_fixture_host(region->start), 42);
    assert_int_equal(drop(f, &own, 7), EP_OK);
    assert_int_equal(region->bytes, 0);
    assert_null(cuda_fixture_host(region->start));
    stop_all(f);
}

static void what_makes_no_region_is_refused(void **state)
{
    static const struct { uint32_t number; uint64_t offset, bytes; ep_status status; const char *text; } bad[] = {
        { EP_MAX_REGIONS, 0, 16, EP_INVALID_ARGUMENT, "region is 64: must be below 64" },
        { UINT32_MAX, 0, 16, EP_INVALID_ARGUMENT, "region is 4294967295" },
        { 0, 8, 16, EP_INVALID_ARGUMENT, "offset is 8: must be a multiple of 16" },
        { 0, 0, 0, EP_INVALID_ARGUMENT, "no memory is like that" },
        { 0, 16, UINT64_MAX - 15, EP_INVALID_ARGUMENT, "no memory is like that" },
        { 0, UINT64_MAX - 15, 16, EP_INVALID_ARGUMENT, "no memory is like that" },
        { 0, 0, EP_REGION_BYTES, EP_RESOURCE_EXHAUSTED, "--max-region-bytes" },
        { 0, 16, OWN_BYTES, EP_INVALID_ARGUMENT, "is no GPU memory of" },
        { 3, 0, 16, EP_ALREADY_EXISTS, "rank 1 has a region 3 already" },
    };
    struct fixture *f = *state;
    const struct ep_executor_region without = { .fd = -1, .bytes = 16 };
    struct own own = make_own();
    uint32_t before;

    start_as(f, 1, false);
    assert_int_equal(add(f, &own, 3, 0, 16), EP_OK);
    before = open_descriptors();
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(add(f, &own, bad[i].number, bad[i].offset, bad[i].bytes), bad[i].status);
        assert_non_null(strstr(own.error.text, bad[i].text));
    }
    ep_executor_register(f->executor, &without, on_done, &own);
    assert_int_equal(finish(f, &own), EP_INVALID_ARGUMENT);
    assert_int_equal(drop(f, &own, 0), EP_NOT_FOUND);
    assert_int_equal(drop(f, &own, UINT32_MAX), EP_NOT_FOUND);
    assert_int_equal(open_descriptors(), before);
    for (uint32_t i = 0; i < EP_MAX_REGIONS; i++)
        assert_int_equal(cuda_fixture.regions.region[i].bytes, i == 3 ? 16 : 0);
    stop_all(f);
    free_own(&own);
}

/* Any of them: the backend says what it is not. */
static void descriptors_of_other_things_are_refused(void **state)
{
    struct fixture *f = *state;
    struct own own = { .memory = NULL };
    int fds[2];
    uint32_t before = 0;

    start_as(f, 1, false);
    for (int i = 0; i < 4; i++) {
        struct ep_executor_region region = { .offset = 0, .bytes = 4096 };

        assert_int_equal(pipe(fds), 0);
        region.fd = i == 0 ? fds[0] : i == 1 ? fds[1] : open(i == 2 ? "/dev/null" : "/proc/self/maps", O_RDONLY);
        ep_executor_register(f->executor, &region, on_done, &own);
        assert_int_equal(finish(f, &own), EP_INVALID_ARGUMENT);
        for (int j = 0; j < 2; j++)
            if (fds[j] != region.fd)
                close(fds[j]);
        assert_true(before == 0 || open_descriptors() == before);
        before = open_descriptors();
    }
    stop_all(f);
}

static void a_rank_has_so_many_bytes_mapped_at_most(void **state)
{
    const uint32_t most = REGION_BYTES / OWN_BYTES;
    struct fixture *f = *state;
    struct own own = make_own();

    start_as(f, 1, false);
    for (uint32_t i = 0; i < most; i++)
        assert_int_equal(add(f, &own, i, OWN_BYTES - 16, 16), EP_OK); /* mapped from the beginning */
    assert_int_equal(add(f, &own, most, 0, 16), EP_RESOURCE_EXHAUSTED);
    assert_string_equal(own.error.text,
                        "the region ends 16 bytes into its allocation, and 1.0 MiB (1048576 bytes) of rank 1 "
                        "are mapped: the server maps 1.0 MiB (1048576 bytes) for one rank; register less, or start "
                        "ep-server with more --max-region-bytes");
    assert_int_equal(drop(f, &own, 2), EP_OK);
    assert_int_equal(add(f, &own, 2, 0, OWN_BYTES), EP_OK);
    stop_all(f);
    start_as(f, 1, false); /* the next worker has nothing of it */
    assert_int_equal(add(f, &own, 0, 0, OWN_BYTES), EP_OK);
    stop_all(f);
    free_own(&own);
}

static void set_looking(uint32_t looking)
{
    __atomic_store_n(&cuda_fixture.looking, looking, __ATOMIC_SEQ_CST);
}

/* Its worker ought to have waited for it. */
static void memory_that_an_op_uses_stays_until_it_is_over(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own(), other = { .memory = own.memory };
    const struct ep_region *region = &cuda_fixture.regions.region[0];

    start_as(f, 1, false);
    assert_int_equal(add(f, &own, 0, 0, 16), EP_OK);
    set_looking(1);
    ep_executor_unregister(f->executor, 0, on_done, &own);
    assert_int_equal(region->bytes, 0); /* no further op finds it */
    for (int i = 0; i < 5; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(own.done, 0);
    assert_non_null(cuda_fixture_host(region->start));
    assert_int_equal(add(f, &other, 1, 0, 16), EP_UNAVAILABLE);
    assert_int_equal(drop(f, &other, 0), EP_UNAVAILABLE);
    assert_non_null(strstr(other.error.text, "not answered yet"));
    set_looking(0);
    assert_int_equal(finish(f, &own), EP_OK);
    assert_null(cuda_fixture_host(region->start));
    stop_all(f);
    free_own(&own);
}

static void who_leaves_is_not_waited_for(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own();

    start_as(f, 1, false);
    assert_int_equal(add(f, &own, 0, 0, 16), EP_OK);
    assert_int_equal(add(f, &own, 63, 16, 16), EP_OK);
    set_looking(1);
    ep_executor_unregister(f->executor, 0, on_done, &own);
    stop_all(f);
    assert_int_equal(finish(f, &own), EP_CANCELLED);
    start_as(f, 1, false);
    ask(f, &own, 0, 0, 16); /* is being mapped when it leaves */
    stop_all(f);
    assert_int_equal(own.done, 1);
    free_own(&own); /* teardown finds that nothing else is left */
}

static void a_rank_that_is_stuck_keeps_its_regions(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own();

    ep_team_set_timeout(f->team, 0);
    start_as(f, 1, false);
    assert_int_equal(add(f, &own, 0, 0, 16), EP_OK);
    free_own(&own);
    set_stuck(1);
    stop_all(f);
    assert_true(ep_team_stuck(f->team, 1));
    assert_non_null(cuda_fixture_host(cuda_fixture.regions.region[0].start));
    cuda_fixture_free(cuda_fixture.regions.region[0].start);
}

static void a_region_that_fails_leaves_nothing(void **state)
{
    static const char *const calls[] = { "memory_adopt", "serve_region", "serve_forget", "serve_forgotten" };
    struct fixture *f = *state;
    struct own own = make_own();

    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        start_as(f, 1, false);
        cuda_fixture_fail(calls[i], 0);
        assert_int_equal(add(f, &own, 0, 0, 16), i < 2 ? EP_INTERNAL : EP_OK);
        if (i >= 2)
            assert_int_equal(drop(f, &own, 0), EP_INTERNAL);
        assert_non_null(strstr(own.error.text, calls[i]));
        cuda_fixture_fail(NULL, 0);
        stop_all(f);
    }
    free_own(&own);
}

static void regions_come_and_go(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own();
    uint32_t descriptors = 0, memories = 0;

    start_as(f, 1, false);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(add(f, &own, i % EP_MAX_REGIONS, 0, OWN_BYTES), EP_OK);
        assert_int_equal(drop(f, &own, i % EP_MAX_REGIONS), EP_OK);
        if (i == 0) {
            descriptors = open_descriptors();
            memories = cuda_fixture.memories;
        }
    }
    assert_int_equal(open_descriptors(), descriptors);
    assert_int_equal(cuda_fixture.memories, memories);
    stop_all(f);
    free_own(&own);
}

static void who_runs_its_own_ops_has_none_mapped(void **state)
{
    struct fixture *f = *state;
    struct own own = make_own();
    const uint32_t before = open_descriptors();

    start_as(f, 1, true);
    assert_int_equal(add(f, &own, 0, 0, 16), EP_UNIMPLEMENTED);
    assert_int_equal(drop(f, &own, 0), EP_UNIMPLEMENTED);
    assert_int_equal(open_descriptors(), before);
    stop(f);
    free_own(&own);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void cut_off(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->peers = 0;
}

static void gpus_that_do_not_reach_each_other_make_no_team(void **state)
{
    struct fixture *f = *state;
    const uint32_t devices[RANKS] = { 0, 1, 0, 1 };
    struct ep_team_options options = { .loop = &f->loop, .map = &f->map, .placement = &f->placement,
                                       .devices = devices, .epoch = EPOCH, .timeout_ms = 1000 };
    const struct ep_node_options node = { .name = "n2", .backend = EP_NODE_CUDA, .cuda = cuda_fixture_api() };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_team *team;

    cuda_fixture.on_info = cut_off;
    assert_int_equal(ep_node_open(&node, &options.node, NULL), EP_OK);
    assert_int_equal(ep_team_create(&options, &team, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "rank 0 is on GPU-fixture-0 and rank 1 on GPU-fixture-1"));
    ep_node_close(options.node);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(windows_say_whose_they_are),
        TEST(every_rank_is_expected_at_first),
        cmocka_unit_test_setup_teardown(lines_of_gpus_that_nvlink_joins_come_as_a_whole, set_up_linked, teardown),
        cmocka_unit_test_setup_teardown(others_may_not, set_up_half_linked, teardown),
        TEST(the_timeout_is_told_to_all),
        TEST(leaving_is_one_word_in_every_state),
        TEST(to_who_leaves_all_are_absent_until_it_joins),
        TEST(a_broken_gpu_does_not_keep_it_from_the_others),
        TEST(all_leave_at_once),
        TEST(who_joins_takes_part_after_what_anybody_has_begun),
        TEST(and_after_every_ht_dispatch_that_has_begun),
        TEST(its_own_last_number_counts_too),
        TEST(who_is_absent_stays_so_for_who_joins),
        TEST(a_number_that_was_begun_meanwhile_is_raised),
        TEST(an_ht_number_that_was_begun_meanwhile_is_raised),
        TEST(a_rank_that_never_rests_is_caught_up_with),
        TEST(a_state_that_was_overwritten_is_named),
        TEST(who_cannot_join_stays_absent),
        TEST(a_reset_forgets_rows_and_numbers),
        TEST(a_reset_that_fails_leaves_all_absent),
        TEST(counters_of_ht_are_ht_s),
        TEST(counters_of_kernels_are_added_up),
        TEST(loads_are_those_of_the_newest_batch),
        TEST(loads_that_cannot_be_are_left_out),
        TEST(a_late_rank_is_told_of_once),
        TEST(a_gpu_that_does_not_answer_costs_its_rank_the_figures_alone),
        TEST(a_look_that_does_not_come_back_is_given_up),
        TEST(a_look_that_was_given_up_may_come_back_to_nobody),
        TEST(a_look_that_fails_counts_nothing_and_is_made_up_for),
        TEST(the_next_worker_reads_nothing_of_the_last_one),
        TEST(who_gets_uncleared_memory_is_refused),
        TEST(every_gpu_of_the_team_writes_every_window),
        TEST(kernels_of_a_served_rank_get_what_a_workers_have),
        TEST(two_batches_are_kept_ready),
        TEST(what_it_counts_is_added_up_to_the_end),
        TEST(the_next_worker_finds_the_mailbox_empty),
        TEST(ranks_stop_at_once),
        TEST(a_start_that_fails_leaves_nothing),
        TEST(a_gpu_that_fails_is_told_of_once),
        TEST(an_end_that_fails_is_tried_again),
        TEST(a_slow_end_is_waited_for),
        TEST(what_does_not_end_keeps_its_memory),
        TEST(a_region_is_mapped_for_the_ranks_ops),
        TEST(what_makes_no_region_is_refused),
        TEST(descriptors_of_other_things_are_refused),
        TEST(a_rank_has_so_many_bytes_mapped_at_most),
        TEST(memory_that_an_op_uses_stays_until_it_is_over),
        TEST(who_leaves_is_not_waited_for),
        TEST(a_rank_that_is_stuck_keeps_its_regions),
        TEST(a_region_that_fails_leaves_nothing),
        TEST(regions_come_and_go),
        TEST(who_runs_its_own_ops_has_none_mapped),
        TEST(gpus_that_do_not_reach_each_other_make_no_team),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
