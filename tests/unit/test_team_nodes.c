/* Teams of servers on several nodes: what server/node makes of host teams.  Two nodes in this process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

#include "ep_log.h"
#include "ep_team.h"

enum { RANKS = 3, NODES = 2 };

static const uint32_t node_of[RANKS] = { 0, 1, 1 };

struct fixture {
    uv_loop_t loop;
    struct ep_node *node;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_team_net *net[NODES];
    struct ep_team_card card[NODES];
    struct ep_team *team[NODES];
    struct ep_node_window *window[RANKS];
    uint32_t lost, lost_node;
};

struct connecting {
    struct fixture *f;
    uint32_t own;
    ep_status status;
};

static void *connect_one(void *arg)
{
    struct connecting *c = arg;

    c->status = ep_team_net_connect(c->f->net[c->own], c->f->card, NODES, c->own, 20000, NULL);
    return NULL;
}

static const struct ep_team_net_options anyone = { .group = "moe" };

static void connect_both(struct fixture *f)
{
    struct connecting c[NODES];
    pthread_t thread;

    for (uint32_t n = 0; n < NODES; n++) {
        c[n] = (struct connecting){ .f = f, .own = n };
        assert_int_equal(ep_team_net_listen(f->node, &anyone, &f->net[n], &f->card[n], NULL), EP_OK);
    }
    assert_int_equal(pthread_create(&thread, NULL, connect_one, &c[1]), 0);
    connect_one(&c[0]);
    pthread_join(thread, NULL);
    assert_int_equal(c[0].status, EP_OK);
    assert_int_equal(c[1].status, EP_OK);
}

static void on_lost(uint32_t node, const char *why, void *user)
{
    struct fixture *f = user;

    assert_non_null(why);
    f->lost++;
    f->lost_node = node;
}

static void make_team(struct fixture *f, uint32_t own)
{
    const struct ep_team_span span = {
        .nodes = NODES, .own = own, .node = node_of, .net = f->net[own], .on_lost = on_lost, .user = f
    };
    const struct ep_team_options options = { .node = f->node, .loop = &f->loop, .map = &f->map,
                                             .placement = &f->placement, .epoch = 1, .timeout_ms = 1000,
                                             .span = &span };

    assert_int_equal(ep_team_create(&options, &f->team[own], NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        if (node_of[r] == own)
            assert_int_equal(ep_team_set_window(f->team[own], r, f->window[r], NULL), EP_OK);
}

static int setup(void **state)
{
    const struct ep_node_options options = { .name = "n1", .host_devices = RANKS };
    const struct ep_limits limits = { .ranks = RANKS, .experts = 6, .local_experts = 2, .top_k = 2, .hidden = 64,
                                      .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 8,
                                      .ll_banks = 2, .arena_bytes = 1 << 20 };
    struct fixture *f = calloc(1, sizeof *f);

    setenv("EP_GIN_INTERFACE", "=lo", 0);
    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_int_equal(uv_loop_init(&f->loop), 0);
    assert_int_equal(ep_node_open(&options, &f->node, NULL), EP_OK);
    assert_int_equal(ep_layout_compute(&limits, &f->map, NULL), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, 6, &f->placement, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(ep_node_window_create(f->node, r, "w", f->map.total_bytes, &f->window[r], NULL), EP_OK);
    connect_both(f);
    make_team(f, 0);
    make_team(f, 1);
    *state = f;
    return 0;
}

static void *destroy_one(void *team)
{
    ep_team_destroy(team);
    return NULL;
}

/* On another thread than the loop's, as epochs do. */
static void destroy(struct fixture *f, uint32_t n)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, destroy_one, f->team[n]), 0);
    pthread_join(thread, NULL);
    f->team[n] = NULL;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    for (uint32_t n = 0; n < NODES; n++)
        if (f->team[n])
            destroy(f, n);
    assert_int_equal(uv_run(&f->loop, UV_RUN_DEFAULT), 0); /* nothing of a team is left in the loop */
    assert_int_equal(uv_loop_close(&f->loop), 0);
    for (uint32_t r = 0; r < RANKS; r++)
        ep_node_window_destroy(f->window[r]);
    ep_placement_free(&f->placement);
    ep_node_close(f->node);
    free(f);
    return 0;
}

static void a_lost_node_is_told_once_on_the_loop(void **state)
{
    struct fixture *f = *state;

    destroy(f, 1);
    while (f->lost == 0)
        uv_run(&f->loop, UV_RUN_ONCE);
    uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(f->lost, 1);
    assert_int_equal(f->lost_node, 1);
}

static void a_path_that_is_cut_is_lost_to_both(void **state)
{
    struct fixture *f = *state;

    ep_team_cut(f->team[1], 0);
    while (f->lost < NODES)
        uv_run(&f->loop, UV_RUN_ONCE);
    ep_team_cut(f->team[0], 1); /* there is nothing to it any more */
    uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(f->lost, NODES);
}

static void ranks_join_held_and_admitted(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_team_numbers begun;
    uint64_t hold[NODES];

    for (uint32_t n = 0; n < NODES; n++)
        ep_team_leave(f->team[n], 2); /* of this node and of the other one */
    assert_int_equal(ep_team_join(f->team[1], 2, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "held"));
    assert_int_equal(ep_team_reset(f->team[0], &error), EP_FAILED_PRECONDITION);
    for (uint32_t n = 0; n < NODES; n++) {
        assert_int_equal(ep_team_hold(f->team[n], 20000, &hold[n], &begun, &error), EP_OK);
        assert_int_equal(begun.ll, 0);
        assert_int_equal(begun.ht, 0);
    }
    assert_int_equal(ep_team_admit(f->team[1], hold[1], 2, &(struct ep_team_numbers){ 5, 7 }, &error), EP_OK);
    ep_team_unhold(f->team[0], hold[0]);
    assert_int_equal(ep_team_admit(f->team[0], hold[0], 2, &(struct ep_team_numbers){ 5, 7 }, &error), EP_ABORTED);
}

static void a_span_that_does_not_fit_its_network_is_refused(void **state)
{
    struct fixture *f = *state;
    const uint32_t beyond[RANKS] = { 0, 1, 2 }, here[RANKS] = { 0 };
    struct ep_team_net *net;
    struct ep_team_card card;
    struct ep_team *team;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_team_net_listen(f->node, &anyone, &net, &card, NULL), EP_OK);
    assert_int_equal(ep_team_net_connect(net, f->card, 1, 0, 100, &error), EP_INVALID_ARGUMENT);
    ep_team_net_close(net);
    ep_team_net_close(NULL);
    assert_int_equal(ep_team_beside(EP__V1__BACKEND__BACKEND_HOST, &f->map, here).node, 0);
    assert_true(ep_team_beside(EP__V1__BACKEND__BACKEND_HOST, &f->map, node_of).node > 0);
    assert_int_equal(ep_team_beside(EP__V1__BACKEND__BACKEND_HOST, &f->map, node_of).rank, 0);

    const struct ep_team_span span = { .nodes = NODES, .own = 0, .node = beyond, .net = f->net[0] };
    const struct ep_team_options options = { .node = f->node, .loop = &f->loop, .map = &f->map,
                                             .placement = &f->placement, .timeout_ms = 1000, .span = &span };

    assert_int_equal(ep_team_create(&options, &team, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "rank 2 is on node 2"));
}

static void rows_that_do_not_fit_a_frame_are_refused(void **state)
{
    struct fixture *f = *state;
    struct ep_limits limits = f->map.limits;
    struct ep_layout_map map;
    struct ep_team *team;
    struct ep_error error = EP_ERROR_INIT;

    limits.hidden = 1u << 19;
    assert_int_equal(ep_layout_compute(&limits, &map, NULL), EP_OK);

    const struct ep_team_span span = { .nodes = NODES, .own = 0, .node = node_of, .net = f->net[0] };
    const struct ep_team_options options = { .node = f->node, .loop = &f->loop, .map = &map,
                                             .placement = &f->placement, .timeout_ms = 1000, .span = &span };

    assert_int_equal(ep_team_create(&options, &team, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "hidden 524288"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_lost_node_is_told_once_on_the_loop, setup, teardown),
        cmocka_unit_test_setup_teardown(a_path_that_is_cut_is_lost_to_both, setup, teardown),
        cmocka_unit_test_setup_teardown(ranks_join_held_and_admitted, setup, teardown),
        cmocka_unit_test_setup_teardown(rows_that_do_not_fit_a_frame_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(a_span_that_does_not_fit_its_network_is_refused, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
