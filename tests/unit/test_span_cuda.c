/* Teams of GPUs of several nodes: what they write into states, and how ranks join.  Two nodes in this process, over a
 * double of NCCL. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_fixture.h"
#include "ep_log.h"
#include "ep_team.h"
#include "nccl_double.h"
#include "team_cuda.h"

enum { RANKS = 3, NODES = 2, BUILT_WITH = 22809, WIRE = 0x77697265, HOLD_MS = 20, LONG_MS = 60000 };

static const uint32_t node_of[RANKS] = { 0, 1, 1 }, device_of[RANKS] = { 0, 0, 1 };

struct fixture {
    uv_loop_t loop;
    struct ep_node *node;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_team_net *net[NODES];
    struct ep_team_card card[NODES];
    struct ep_team *team[NODES];
    struct ep_node_window *window[RANKS];
    uint32_t lost;
};

/* ---- a cuda backend that NCCL can be used with ------------------------------------------------ */

static struct ep_cuda_api api;
static uint32_t built_with = BUILT_WITH, in_group = RANKS;

static uint32_t nccl_version(void)
{
    return built_with;
}

static unsigned bound; /* bit d: a thread was, to device d */

static ep_status nccl_bind(uint32_t device, struct ep_error *error)
{
    (void)error;
    __atomic_fetch_or(&bound, 1u << device, __ATOMIC_RELAXED);
    return EP_OK;
}

static int nccl_device_open(void *create, void *comm, uint32_t signals, uint64_t *wire)
{
    assert_non_null(create);
    assert_non_null(comm);
    assert_int_equal(signals, 15 * in_group);
    wire[0] = WIRE;
    return 0;
}

static int nccl_device_close(void *destroy, void *comm, const uint64_t *wire)
{
    assert_non_null(destroy);
    assert_non_null(comm);
    assert_int_equal(wire[0], WIRE);
    return 0;
}

/* ---- two nodes ---------------------------------------------------------------------------------- */

struct connecting {
    struct fixture *f;
    uint32_t own;
    ep_status status;
    struct ep_error error;
};

static void *connect_one(void *arg)
{
    struct connecting *c = arg;

    c->status = ep_team_net_connect(c->f->net[c->own], c->f->card, NODES, c->own, 20000, &c->error);
    return NULL;
}

static void listen_at(struct fixture *f, uint32_t own)
{
    struct ep_team_net_rank here[RANKS];
    struct ep_node_window *windows[RANKS];
    struct ep_team_net_options options = { .first = own == 0, .group = "moe", .ranks = RANKS, .here = here };

    for (uint32_t r = 0; r < RANKS; r++)
        if (node_of[r] == own) {
            windows[options.n] = f->window[r];
            here[options.n++] = (struct ep_team_net_rank){ r, device_of[r] };
        }
    assert_int_equal(ep_team_net_listen(f->node, &options, &f->net[own], &f->card[own], NULL), EP_OK);
    ep_team_net_expect(f->net[own], windows);
}

/* All have listened. */
static void connect_both(struct fixture *f)
{
    struct connecting c[NODES];
    pthread_t thread;

    for (uint32_t n = 0; n < NODES; n++)
        c[n] = (struct connecting){ .f = f, .own = n };
    assert_int_equal(pthread_create(&thread, NULL, connect_one, &c[1]), 0);
    connect_one(&c[0]);
    pthread_join(thread, NULL);
    for (uint32_t n = 0; n < NODES; n++)
        if (c[n].status)
            fail_msg("node %u: %s", n, c[n].error.text);
}

static void listen_and_connect(struct fixture *f)
{
    for (uint32_t n = 0; n < NODES; n++)
        listen_at(f, n);
    connect_both(f);
}

static void on_lost(uint32_t node, const char *why, void *user)
{
    (void)node;
    assert_non_null(why);
    ((struct fixture *)user)->lost++;
}

static void make_team(struct fixture *f, uint32_t own)
{
    const struct ep_team_span span = {
        .nodes = NODES, .own = own, .node = node_of, .net = f->net[own], .on_lost = on_lost, .user = f
    };
    const struct ep_team_options options = { .node = f->node, .loop = &f->loop, .map = &f->map,
                                             .placement = &f->placement, .devices = device_of, .epoch = 1,
                                             .timeout_ms = 1000, .span = &span };

    assert_int_equal(ep_team_create(&options, &f->team[own], NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++)
        if (node_of[r] == own)
            assert_int_equal(ep_team_set_window(f->team[own], r, f->window[r], NULL), EP_OK);
}

static int setup(void **state)
{
    const struct ep_node_options options = { .name = "n1", .backend = EP_NODE_CUDA, .cuda = &api };
    const struct ep_limits limits = { .ranks = RANKS, .experts = 6, .local_experts = 2, .top_k = 2, .hidden = 64,
                                      .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 8,
                                      .ll_banks = 2, .arena_bytes = 1 << 20 };
    struct fixture *f = calloc(1, sizeof *f);

    setenv("EP_GIN_INTERFACE", "=lo", 0);
    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    cuda_fixture_reset();
    api = *cuda_fixture_api();
    api.nccl_version = nccl_version;
    api.nccl_bind = nccl_bind;
    api.nccl_device_open = nccl_device_open;
    api.nccl_device_close = nccl_device_close;
    built_with = BUILT_WITH;
    in_group = RANKS;
    assert_int_equal(uv_loop_init(&f->loop), 0);
    assert_int_equal(ep_node_open(&options, &f->node, NULL), EP_OK);
    assert_int_equal(ep_layout_compute(&limits, &f->map, NULL), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, 6, &f->placement, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(ep_node_window_create(f->node, device_of[r], "w", f->map.total_bytes, &f->window[r], NULL), EP_OK);
        assert_int_equal(ep_node_window_extend(f->window[r],
                                               ep_team_beside(EP__V1__BACKEND__BACKEND_CUDA, &f->map, node_of).window, NULL),
                         EP_OK);
    }
    listen_and_connect(f);
    make_team(f, 0);
    make_team(f, 1);
    *state = f;
    return 0;
}

static void *destroy_one(void *team)
{
    if (team)
        ep_team_destroy(team);
    return NULL;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    pthread_t thread;

    for (uint32_t n = 0; n < NODES; n++) {
        assert_int_equal(pthread_create(&thread, NULL, destroy_one, f->team[n]), 0);
        pthread_join(thread, NULL);
    }
    for (uint32_t r = 0; r < RANKS; r++)
        ep_node_window_destroy(f->window[r]);
    ep_placement_free(&f->placement);
    ep_node_close(f->node);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(cuda_fixture.memories, 0);
    free(f);
    return 0;
}

static struct cuda_team *team_of(const struct fixture *f, uint32_t rank)
{
    return (struct cuda_team *)f->team[node_of[rank]];
}

static struct ep_device_state *state_of(const struct fixture *f, uint32_t rank)
{
    return cuda_fixture_host(cuda_state(team_of(f, rank), rank));
}

/* ---- states ----------------------------------------------------------------------------------- */

static void states_know_who_is_far_and_what_leads_there(void **state)
{
    struct fixture *f = *state;

    for (uint32_t r = 0; r < RANKS; r++) {
        const struct ep_device_state *s = state_of(f, r);
        const struct ep_device_net *net = cuda_fixture_host((void *)(uintptr_t)s->net);

        assert_int_equal(net->far[0], r == 0 ? 6 : 1);
        assert_int_equal(net->beside, (uintptr_t)ep_node_window_beside(f->window[r]));
        for (uint32_t i = 0; i < RANKS; i++) {
            const bool far = net->far[0] >> i & 1;

            assert_int_equal(net->at[i], far ? 0 : (uintptr_t)ep_node_window_beside(f->window[i]));
            assert_int_equal(net->windows[i], far ? 0 : (uintptr_t)ep_node_window_base(f->window[i]));
        }
        assert_int_equal(net->wire[0], WIRE);
        assert_int_equal(net->told[0][0][0], 0);
        for (uint32_t i = 0; i < RANKS; i++)
            assert_int_equal(s->from[i], 1);
    }
}

static void beside_a_window_is_room_for_what_goes_elsewhere(void **state)
{
    static const uint32_t here[RANKS];
    struct fixture *f = *state;
    const uint64_t boxes = 2ull * f->map.limits.ll_banks * RANKS; /* to each rank, and from each */
    const uint64_t least = boxes * f->map.limits.ll_max_tokens * (f->map.row_bytes + f->map.header_bytes);
    const struct ep_team_beside beside = ep_team_beside(EP__V1__BACKEND__BACKEND_CUDA, &f->map, node_of);

    assert_in_range(beside.window, least, least + (2u << 20));
    assert_true(beside.rank >= beside.window + sizeof(struct ep_device_net)); /* what its kernels know is charged, too */
    assert_int_equal(beside.node, 0);
    assert_int_equal(ep_team_beside(EP__V1__BACKEND__BACKEND_CUDA, &f->map, here).rank, 0);
}

static void who_leaves_is_absent_on_all_nodes_that_are_told(void **state)
{
    struct fixture *f = *state;

    ep_team_leave(f->team[0], 2);
    assert_int_equal(state_of(f, 0)->from[2], EP_DEVICE_NEVER);
    assert_int_equal(state_of(f, 2)->from[2], 1);
    assert_int_equal(state_of(f, 2)->from[0], 1);
    ep_team_leave(f->team[1], 2);
    assert_int_equal(state_of(f, 1)->from[2], EP_DEVICE_NEVER);
    assert_int_equal(state_of(f, 2)->from[0], EP_DEVICE_NEVER); /* its own op ends */
}

/* ---- joining -------------------------------------------------------------------------------------- */

static void ranks_join_at_agreed_numbers_only(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_team_join(f->team[0], 0, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "held and admitted"));
    assert_int_equal(ep_team_reset(f->team[0], &error), EP_FAILED_PRECONDITION);
}

static void a_rank_is_held_and_admitted_everywhere(void **state)
{
    struct fixture *f = *state;
    struct ep_team_numbers begun, from = { 0, 1 };
    uint64_t hold[NODES];

    for (uint32_t n = 0; n < NODES; n++)
        ep_team_leave(f->team[n], 2);
    state_of(f, 0)->begun = 41;
    state_of(f, 1)->begun = 42;
    for (uint32_t n = 0; n < NODES; n++) {
        assert_int_equal(ep_team_hold(f->team[n], LONG_MS, &hold[n], &begun, NULL), EP_OK);
        assert_int_equal(begun.ll, 41 + n);
        from.ll = begun.ll + 1;
    }
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(state_of(f, r)->held, 1);
    for (uint32_t n = NODES; n-- > 0;)
        assert_int_equal(ep_team_admit(f->team[n], hold[n], 2, &from, NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(state_of(f, r)->from[2], 43);
        assert_int_equal(state_of(f, r)->held, 0);
    }
    assert_int_equal(state_of(f, 2)->number, 42);
    assert_int_equal(state_of(f, 2)->begun, 42);
    assert_true(state_of(f, 2)->net != 0);
    assert_int_equal(ep_team_first(f->team[0], 2).ll, 43);
    assert_int_equal(ep_team_admit(f->team[0], hold[0], 2, &from, NULL), EP_ABORTED);
}

static void several_may_hold_at_a_time(void **state)
{
    struct fixture *f = *state;
    struct ep_team_numbers begun;
    uint64_t first, second;

    assert_int_equal(ep_team_hold(f->team[1], LONG_MS, &first, &begun, NULL), EP_OK);
    assert_int_equal(ep_team_hold(f->team[1], LONG_MS, &second, &begun, NULL), EP_OK);
    ep_team_unhold(f->team[1], first);
    assert_true(state_of(f, 1)->held != 0);
    ep_team_unhold(f->team[1], second);
    ep_team_unhold(f->team[1], second);
    assert_int_equal(state_of(f, 1)->held, 0);
}

static void a_hold_ends_by_itself(void **state)
{
    struct fixture *f = *state;
    struct ep_team_numbers begun;
    uint64_t hold;

    assert_int_equal(ep_team_hold(f->team[0], HOLD_MS, &hold, &begun, NULL), EP_OK);
    while (state_of(f, 0)->held)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(ep_team_admit(f->team[0], hold, 2, &begun, NULL), EP_ABORTED);
    assert_int_equal(ep_team_hold(f->team[0], HOLD_MS, &hold, &begun, NULL), EP_OK); /* one that its team does not outlive */
}

/* ---- nodes ------------------------------------------------------------------------------------------ */

static void a_node_that_is_cut_is_lost_to_both(void **state)
{
    struct fixture *f = *state;

    ep_team_cut(f->team[0], 1);
    while (f->lost < 2)
        uv_run(&f->loop, UV_RUN_ONCE);
}

/* ---- communicators -------------------------------------------------------------------------------- */

static int value(const int *counter)
{
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

static void destroy_team(struct fixture *f, uint32_t own)
{
    ep_team_destroy(f->team[own]);
    f->team[own] = NULL;
}

/* NCCL would wait for streams that wait for workers. */
static void communicators_stay_as_long_as_a_rank_is_served(void **state)
{
    struct fixture *f = *state;
    const int before = value(&nccl_double_left), windows = value(&nccl_double_windows);

    nccl_serve_begins();
    nccl_serve_begins();
    destroy_team(f, 1);
    assert_int_equal(value(&nccl_double_left), before);
    assert_int_equal(value(&nccl_double_windows), windows - 2); /* its ranks' memory is their own again */
    nccl_serve_ends();
    assert_int_equal(value(&nccl_double_left), before);
    nccl_serve_ends();
    assert_int_equal(value(&nccl_double_left), before + 2);
    destroy_team(f, 0);
    assert_int_equal(value(&nccl_double_left), before + 3);
}

/* The next epoch's nets, beside the first ones; how many communicators they made. */
static int made_for_the_next(struct fixture *f)
{
    const int before = value(&nccl_double_made);

    listen_and_connect(f);
    return value(&nccl_double_made) - before;
}

static void close_nets(struct fixture *f)
{
    for (uint32_t n = 0; n < NODES; n++)
        ep_team_net_close(f->net[n]);
}

static void the_next_epoch_goes_on_with_the_communicator(void **state)
{
    struct fixture *f = *state;
    const int left = value(&nccl_double_left), windows = value(&nccl_double_windows);

    assert_int_equal(made_for_the_next(f), 0);
    assert_int_equal(value(&nccl_double_windows), 2 * windows);
    destroy_team(f, 0); /* the first epoch's */
    destroy_team(f, 1);
    assert_int_equal(value(&nccl_double_windows), windows);
    assert_int_equal(value(&nccl_double_left), left);
    close_nets(f);
    assert_int_equal(value(&nccl_double_windows), 0);
    assert_int_equal(value(&nccl_double_left), left + RANKS);
}

/* A server that has started anew has no communicator, nor one where the old epoch is gone already. */
static void unless_a_node_has_none(void **state)
{
    struct fixture *f = *state;

    destroy_team(f, 1);
    assert_int_equal(made_for_the_next(f), RANKS);
    close_nets(f);
}

static void or_does_not_trust_it(void **state)
{
    struct fixture *f = *state;

    ep_team_distrust(f->team[1]);
    assert_int_equal(made_for_the_next(f), RANKS);
    close_nets(f);
}

/* Between the card and the connection the old epoch may be given back. */
static void one_that_was_offered_is_there_still(void **state)
{
    struct fixture *f = *state;
    const int before = value(&nccl_double_made);

    for (uint32_t n = 0; n < NODES; n++)
        listen_at(f, n);
    destroy_team(f, 0);
    destroy_team(f, 1);
    connect_both(f);
    assert_int_equal(value(&nccl_double_made), before);
    close_nets(f);
}

static void signals_run_out_and_another_is_made(void **state)
{
    struct fixture *f = *state;
    struct ep_team_net *old[NODES];
    int made = 0;

    for (int i = 1; i < 33; i++) { /* the team's is the first */
        memcpy(old, f->net, sizeof old);
        assert_int_equal(made, 0);
        made = made_for_the_next(f);
        for (uint32_t n = 0; n < NODES && i > 1; n++)
            ep_team_net_close(old[n]);
    }
    assert_int_equal(made, RANKS);
    close_nets(f);
}

/* The net of the one rank that is here of a large group. */
static struct nccl_net *net_of_many(void)
{
    static char memory;
    const struct nccl_rank here = { .rank = 1000, .memory = { .at = &memory, .bytes = 1 } };
    struct nccl_net *net;
    struct nccl_card card;

    assert_int_equal(nccl_open(&api, "large", in_group, &here, 1, &net, &card, NULL), EP_OK);
    assert_int_equal(nccl_invite(&card, NULL), EP_OK);
    assert_int_equal(nccl_form(&net, nccl_goes_on(net, &card) ? NULL : &card, &here, 20000, NULL), EP_OK);
    return net;
}

static void those_of_a_large_group_run_out_sooner(void **state)
{
    const int before = value(&nccl_double_made);
    struct nccl_net *net, *old = NULL;

    (void)state;
    in_group = 1024;
    for (int i = 0; i < 9; i++) {
        net = net_of_many();
        assert_int_equal(value(&nccl_double_made) - before, 1 + i / 4); /* 15 signals a rank, of 65536 */
        nccl_close(old);
        old = net;
    }
    nccl_close(old);
}

static void without_the_right_nccl_it_is_refused(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    const struct ep_team_net_options options = { .group = "moe" };
    struct ep_team_net *net;
    struct ep_team_card card;

    built_with = 0;
    assert_int_equal(ep_team_net_listen(f->node, &options, &net, &card, &error), EP_UNIMPLEMENTED);
    assert_non_null(strstr(error.text, "built without NCCL's headers"));
    built_with = 23007;
    assert_int_equal(ep_team_net_listen(f->node, &options, &net, &card, &error), EP_UNAVAILABLE);
    assert_non_null(strstr(error.text, "version 22809, the kernels were built for 23007"));
}

static void a_node_says(const struct ep_node_options *options, uint32_t nccl_version, const char *nccl)
{
    struct ep_node *node;
    Ep__V1__NodeInfo info;

    assert_int_equal(ep_node_open(options, &node, NULL), EP_OK);
    ep_node_info(node, &info);
    assert_int_equal(info.nccl_version, nccl_version);
    if (!strstr(info.nccl, nccl))
        fail_msg("\"%s\" does not say \"%s\"", info.nccl, nccl);
    ep_node_info_clear(&info);
    ep_node_close(node);
}

static void says(uint32_t nccl_version, const char *nccl)
{
    const struct ep_node_options options = { .name = "n1", .backend = EP_NODE_CUDA, .cuda = &api };

    a_node_says(&options, nccl_version, nccl);
}

static void the_inventory_says_what_leads_to_other_nodes(void **state)
{
    (void)state;
    unsetenv("NCCL_NET_PLUGIN");
    says(22809, "2.28.9, GIN by NCCL itself");
    setenv("NCCL_NET_PLUGIN", "/opt/libnccl-net-ep.so", 1);
    says(22809, "2.28.9, GIN by /opt/libnccl-net-ep.so");
    unsetenv("NCCL_NET_PLUGIN");
    built_with = 0;
    says(0, "not to be used: the cuda backend was built without NCCL's headers");
}

/* Later it would wait for streams that wait for workers. */
static void nccl_starts_on_all_gpus_of_a_node_in_a_cluster(void **state)
{
    struct ep_node_options options = { .name = "n1", .backend = EP_NODE_CUDA, .cuda = &api };
    const int made = value(&nccl_double_made), left = value(&nccl_double_left);

    (void)state;
    a_node_says(&options, 22809, "2.28.9");
    assert_int_equal(value(&nccl_double_made), made); /* it is alone */
    options.several = true;
    options.gpus = "1";
    bound = 0;
    a_node_says(&options, 22809, "2.28.9");
    assert_int_equal(bound, 1u << 1);
    assert_int_equal(value(&nccl_double_made), made + 1);
    options.gpus = NULL;
    a_node_says(&options, 22809, "2.28.9");
    assert_int_equal(value(&nccl_double_made), made + 1 + CUDA_FIXTURE_DEVICES);
    assert_int_equal(value(&nccl_double_left), left + 1 + CUDA_FIXTURE_DEVICES);
}

static void where_it_does_not_start_the_node_is_on_its_own(void **state)
{
    const struct ep_node_options options = { .name = "n1", .backend = EP_NODE_CUDA, .cuda = &api, .several = true };

    (void)state;
    nccl_double_refuses = 1;
    a_node_says(&options, 0, "not to be used: it does not start: device 0: ncclCommInitRank: refused: the double says no more");
    nccl_double_refuses = 0;
}

static void a_start_that_takes_too_long_is_abandoned(void **state)
{
    static const uint32_t devices[] = { 0, 1 };
    const int left = value(&nccl_double_left);
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    assert_int_equal(nccl_check(&api, NULL), EP_OK);
    __atomic_store_n(&nccl_double_blocks, 1, __ATOMIC_RELAXED);
    assert_int_equal(nccl_start(&api, devices, 2, 20, &error), EP_DEADLINE_EXCEEDED);
    assert_string_equal(error.text, "it made no communicator within 20 ms");
    __atomic_store_n(&nccl_double_blocks, 0, __ATOMIC_RELAXED);
    while (value(&nccl_double_left) < left + 2)
        usleep(1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(nccl_starts_on_all_gpus_of_a_node_in_a_cluster, setup, teardown),
        cmocka_unit_test_setup_teardown(where_it_does_not_start_the_node_is_on_its_own, setup, teardown),
        cmocka_unit_test_setup_teardown(a_start_that_takes_too_long_is_abandoned, setup, teardown),
        cmocka_unit_test_setup_teardown(the_inventory_says_what_leads_to_other_nodes, setup, teardown),
        cmocka_unit_test_setup_teardown(states_know_who_is_far_and_what_leads_there, setup, teardown),
        cmocka_unit_test_setup_teardown(beside_a_window_is_room_for_what_goes_elsewhere, setup, teardown),
        cmocka_unit_test_setup_teardown(who_leaves_is_absent_on_all_nodes_that_are_told, setup, teardown),
        cmocka_unit_test_setup_teardown(ranks_join_at_agreed_numbers_only, setup, teardown),
        cmocka_unit_test_setup_teardown(a_rank_is_held_and_admitted_everywhere, setup, teardown),
        cmocka_unit_test_setup_teardown(several_may_hold_at_a_time, setup, teardown),
        cmocka_unit_test_setup_teardown(a_hold_ends_by_itself, setup, teardown),
        cmocka_unit_test_setup_teardown(a_node_that_is_cut_is_lost_to_both, setup, teardown),
        cmocka_unit_test_setup_teardown(communicators_stay_as_long_as_a_rank_is_served, setup, teardown),
        cmocka_unit_test_setup_teardown(the_next_epoch_goes_on_with_the_communicator, setup, teardown),
        cmocka_unit_test_setup_teardown(unless_a_node_has_none, setup, teardown),
        cmocka_unit_test_setup_teardown(or_does_not_trust_it, setup, teardown),
        cmocka_unit_test_setup_teardown(one_that_was_offered_is_there_still, setup, teardown),
        cmocka_unit_test_setup_teardown(signals_run_out_and_another_is_made, setup, teardown),
        cmocka_unit_test_setup_teardown(those_of_a_large_group_run_out_sooner, setup, teardown),
        cmocka_unit_test_setup_teardown(without_the_right_nccl_it_is_refused, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
