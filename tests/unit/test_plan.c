/* Which rank is on which node and device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "device_state.h"
#include "ep_team.h"
#include "plan.h"

#define NODES(name) EP__V1__NODE_STRATEGY__NODE_STRATEGY_##name
#define GIB         (1ull << 30)

static const char *const devices[] = { "host0", "host1", "host2", "host3" };

static struct ep_plan_node node(const char *name, uint32_t n, uint64_t memory)
{
    return (struct ep_plan_node){ .has = { .node = name, .backend = EP__V1__BACKEND__BACKEND_HOST, .devices = n,
                                           .memory_left = memory },
                                  .device = devices };
}

static Ep__V1__GroupSpec spec_of(uint32_t ranks, Ep__V1__Placement *placement)
{
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;

    spec.ranks = ranks;
    spec.experts = 16;
    spec.hidden = 64;
    spec.top_k = 2;
    spec.ll_max_tokens = 8;
    spec.ht_max_tokens = 16;
    spec.placement = placement;
    return spec;
}

/* As the leader does it; text: node and device of each rank, or why not.  before: where they are. */
static ep_status plan_again(const Ep__V1__GroupSpec *spec, const struct ep_plan_node *nodes, size_t n,
                            const struct ep_plan *before, char *text, size_t size)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_spec_bounds bounds;
    struct ep_settled settled;
    struct ep_plan made;
    size_t used = 0;

    *text = '\0';
    if (!ep_plan_bounds(spec, nodes, n, false, &bounds, &error) && !ep_spec_settle(spec, &bounds, &settled, &error)) {
        if (!ep_plan_make(spec, &settled, nodes, n, before, &made, &error)) {
            for (uint32_t r = 0; r < made.n_ranks; r++)
                used += (size_t)snprintf(text + used, size - used, "%s%s/%s", r ? " " : "", made.name[made.node[r]],
                                         made.device[r]);
            assert_int_equal(ep_plan_check(spec, &settled, nodes, n, &made, false, NULL), EP_OK);
            ep_plan_clear(&made);
        }
        ep_settled_clear(&settled);
    }
    if (error.status)
        snprintf(text, size, "%s", error.text);
    return error.status;
}

static ep_status plan(const Ep__V1__GroupSpec *spec, const struct ep_plan_node *nodes, size_t n, char *text, size_t size)
{
    return plan_again(spec, nodes, n, NULL, text, size);
}

/* GPUs, each of which has room for every rank. */
static struct ep_plan_node linked(const char *name, uint32_t n, uint32_t nccl_version, const char *nccl)
{
    static const uint64_t left[] = { GIB, GIB, GIB, GIB };
    struct ep_plan_node made = node(name, n, n * GIB);

    made.has.backend = EP__V1__BACKEND__BACKEND_CUDA;
    made.has.device_left = left;
    made.nccl_version = nccl_version;
    made.nccl = nccl;
    return made;
}

static void expect_span(uint32_t ranks, const struct ep_plan_node *nodes, size_t n, const char *wanted)
{
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = spec_of(ranks, &placement);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_spec_bounds bounds;
    struct ep_settled settled;
    struct ep_plan made;

    spec.backend = EP__V1__BACKEND__BACKEND_CUDA;
    placement.nodes = NODES(SPREAD);
    assert_int_equal(ep_plan_bounds(&spec, nodes, n, false, &bounds, &error), EP_OK);
    assert_int_equal(ep_spec_settle(&spec, &bounds, &settled, &error), EP_OK);
    assert_int_equal(ep_plan_make(&spec, &settled, nodes, n, NULL, &made, &error), EP_OK);
    assert_int_equal(ep_plan_check_span(&settled, nodes, n, &made, &error), *wanted ? EP_FAILED_PRECONDITION : EP_OK);
    if (!strstr(error.text, wanted))
        fail_msg("\"%s\" is not \"%s\"", error.text, wanted);
    ep_plan_clear(&made);
    ep_settled_clear(&settled);
}

static void gpus_of_several_nodes_need_one_nccl(void **state)
{
    struct ep_plan_node nodes[] = { linked("a", 2, 22809, "2.28.9, GIN by x"), linked("b", 2, 22809, "2.28.9, GIN by x") };

    (void)state;
    expect_span(4, nodes, 2, "");
    expect_span(5, nodes, 2, "would be on host0 of node a: a group on GPUs of several nodes has one rank per GPU");
    nodes[1] = linked("b", 2, 0, "not to be used: it cannot be loaded");
    expect_span(4, nodes, 2, "ranks would be on 2 nodes, and node b has no NCCL that leads to the others: not to be used: it");
    expect_span(2, nodes, 1, ""); /* alone it needs none */
    nodes[1] = linked("b", 2, 23007, "2.30.7, GIN by x");
    expect_span(4, nodes, 2, "node a has NCCL 2.28.9, GIN by x, and node b 2.30.7, GIN by x: all nodes of a group need the same");
}

static void expect(uint32_t ranks, Ep__V1__NodeStrategy strategy, const struct ep_plan_node *nodes, size_t n,
                   ep_status status, const char *wanted)
{
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    const Ep__V1__GroupSpec spec = spec_of(ranks, &placement);
    char text[512];

    placement.nodes = strategy;
    assert_int_equal(plan(&spec, nodes, n, text, sizeof text), status);
    if (!strstr(text, wanted))
        fail_msg("\"%s\" is not \"%s\"", text, wanted);
}

static void packed_ranks_take_as_few_nodes_as_have_room(void **state)
{
    const struct ep_plan_node nodes[] = { node("a", 2, GIB), node("b", 4, GIB), node("c", 4, 2 * GIB) };

    (void)state;
    expect(2, NODES(UNSPECIFIED), nodes, 3, EP_OK, "c/host0 c/host1"); /* the most memory */
    expect(4, NODES(PACK), nodes, 3, EP_OK, "c/host0 c/host1 c/host2 c/host3");
    expect(5, NODES(PACK), nodes, 3, EP_OK, "b/host0 b/host1 b/host2 b/host3 c/host0");
    expect(10, NODES(PACK), nodes, 3, EP_OK,
           "a/host0 a/host1 b/host0 b/host1 b/host2 b/host3 c/host0 c/host1 c/host2 c/host3");
    expect(11, NODES(PACK), nodes, 3, EP_FAILED_PRECONDITION, "the 3 nodes that take workers have 10 devices");
}

static void spread_ranks_take_all_nodes_evenly(void **state)
{
    const struct ep_plan_node nodes[] = { node("a", 1, GIB), node("b", 4, GIB), node("c", 4, GIB) };

    (void)state;
    expect(3, NODES(SPREAD), nodes, 3, EP_OK, "a/host0 b/host0 c/host0");
    expect(6, NODES(SPREAD), nodes, 3, EP_OK, "a/host0 b/host0 b/host1 b/host2 c/host0 c/host1");
    expect(2, NODES(SPREAD), nodes, 3, EP_OK, "a/host0 b/host0");
}

static void drained_nodes_get_no_ranks(void **state)
{
    struct ep_plan_node nodes[] = { node("a", 4, GIB), node("b", 4, GIB) };

    (void)state;
    nodes[0].cordoned = true;
    expect(2, NODES(SPREAD), nodes, 2, EP_OK, "b/host0 b/host1");
    expect(5, NODES(SPREAD), nodes, 2, EP_FAILED_PRECONDITION, "ranks is 5: node b has 4 devices");
    nodes[1].cordoned = true;
    expect(2, NODES(PACK), nodes, 2, EP_UNAVAILABLE, "all are drained");
}

static void memory_decides_and_the_refusal_says_what_would_fit(void **state)
{
    struct ep_plan_node nodes[] = { node("a", 4, 128 << 20), node("b", 4, GIB) };

    (void)state;
    expect(2, NODES(SPREAD), nodes, 2, EP_OK, "a/host0 b/host0");
    nodes[0].has.memory_left = 1000;
    expect(2, NODES(SPREAD), nodes, 2, EP_OK, "b/host0 b/host1");
    nodes[1].has.memory_left = 4 << 20;
    expect(4, NODES(PACK), nodes, 2, EP_RESOURCE_EXHAUSTED, "would fit");
}

static struct ep_plan_node gpus(const char *name, uint64_t *left)
{
    struct ep_plan_node gpus = node(name, 2, left[0] + left[1]);

    gpus.has.backend = EP__V1__BACKEND__BACKEND_CUDA;
    gpus.has.device_left = left;
    return gpus;
}

/* Of four ranks with one GPU each. */
static uint64_t bytes_over_two_nodes(const struct ep_plan_node *nodes)
{
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    const Ep__V1__GroupSpec spec = spec_of(4, &placement);
    struct ep_spec_bounds bounds;
    struct ep_settled settled;
    static const uint32_t where[] = { 0, 0, 1, 1 };
    uint64_t bytes;

    assert_int_equal(ep_plan_bounds(&spec, nodes, 2, false, &bounds, NULL), EP_OK);
    assert_int_equal(ep_spec_settle(&spec, &bounds, &settled, NULL), EP_OK);
    bytes = settled.rank_bytes + ep_team_beside(EP__V1__BACKEND__BACKEND_CUDA, &settled.map, where).rank;
    assert_true(bytes > settled.rank_bytes);
    ep_settled_clear(&settled);
    return bytes;
}

static void each_gpu_has_what_its_rank_puts_to_other_nodes(void **state)
{
    uint64_t a[2] = { GIB, GIB }, b[2] = { GIB, GIB };
    const struct ep_plan_node nodes[] = { gpus("a", a), gpus("b", b) };
    const uint64_t bytes = bytes_over_two_nodes(nodes);

    (void)state;
    a[0] = a[1] = b[0] = b[1] = bytes;
    expect(4, NODES(SPREAD), nodes, 2, EP_OK, "a/host0 a/host1 b/host0 b/host1");
    b[1]--;
    expect(4, NODES(SPREAD), nodes, 2, EP_RESOURCE_EXHAUSTED, "host1 of node b");
}

/* With so many GPUs, and no end of memory. */
static struct ep_plan_node gpus_of(const char *name, uint32_t n)
{
    static const char *names[2 * EP_DEVICE_NODE_RANKS];
    static uint64_t left[2 * EP_DEVICE_NODE_RANKS];
    struct ep_plan_node gpus = node(name, n, n * GIB);

    for (uint32_t i = 0; i < 2 * EP_DEVICE_NODE_RANKS; i++) {
        names[i] = "gpu";
        left[i] = GIB;
    }
    gpus.device = names;
    gpus.has.backend = EP__V1__BACKEND__BACKEND_CUDA;
    gpus.has.device_left = left;
    return gpus;
}

/* Ranks are on a first, then on b, and so on: "32 8". */
static void expect_numbers(const Ep__V1__GroupSpec *spec, const struct ep_plan_node *nodes, size_t n, ep_status status,
                           const char *wanted)
{
    char text[2048], numbers[128];
    size_t used = 0;

    assert_int_equal(plan(spec, nodes, n, text, sizeof text), status);
    for (size_t i = 0; !status && i < n; i++) {
        const char before[] = { *nodes[i].has.node, '/', '\0' };
        int ranks = 0;

        for (const char *at = text; (at = strstr(at, before)); at++)
            ranks++;
        used += (size_t)snprintf(numbers + used, sizeof numbers - used, "%s%d", i ? " " : "", ranks);
    }
    if (!strstr(status ? text : numbers, wanted))
        fail_msg("\"%s\" is not \"%s\"", status ? text : numbers, wanted);
}

static void expect_on_gpus(uint32_t ranks, Ep__V1__NodeStrategy strategy, const struct ep_plan_node *nodes, size_t n,
                           ep_status status, const char *wanted)
{
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = spec_of(ranks, &placement);

    spec.experts = ranks;
    placement.nodes = strategy;
    expect_numbers(&spec, nodes, n, status, wanted);
}

static void on_gpus_a_node_has_32_ranks_of_a_group_at_most(void **state)
{
    const struct ep_plan_node large[] = { gpus_of("a", 40), gpus_of("b", 40) };
    const struct ep_plan_node usual[] = { gpus_of("a", 8), gpus_of("b", 8), gpus_of("c", 8), gpus_of("d", 8),
                                          gpus_of("e", 8) };

    (void)state;
    expect_on_gpus(32, NODES(PACK), large, 2, EP_OK, "32 0");
    expect_on_gpus(33, NODES(PACK), large, 1, EP_FAILED_PRECONDITION,
                   "ranks is 33: the nodes that take workers have room for 32: on a node there are at most 32 of a group");
    expect_on_gpus(40, NODES(PACK), large, 2, EP_OK, "32 8");
    expect_on_gpus(40, NODES(SPREAD), large, 2, EP_OK, "20 20");
    expect_on_gpus(65, NODES(SPREAD), large, 2, EP_FAILED_PRECONDITION, "ranks is 65: the nodes that take workers have room "
                   "for 64");
    expect_on_gpus(32, NODES(PACK), usual, 5, EP_OK, "32 0 0 0 0"); /* of one node, and then GPUs are shared */
    expect_on_gpus(40, NODES(PACK), usual, 5, EP_OK, "8 8 8 8 8");
    expect_on_gpus(41, NODES(PACK), usual, 5, EP_FAILED_PRECONDITION, "ranks is 41: the nodes that take workers have room "
                   "for 40");
}

/* Two pairs: a group of one of them is none that its node would refuse to form. */
static void ranks_of_a_node_are_on_gpus_that_reach_each_other(void **state)
{
    static const uint64_t pairs[] = { 0xc, 0xc, 0x3, 0x3 };
    static char a[] = "a", host0[] = "host0", host2[] = "host2", host3[] = "host3";
    struct ep_plan_node nodes[] = { linked("a", 4, 22809, "2.28.9, GIN by x"), linked("b", 4, 22809, "2.28.9, GIN by x") };
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__RankPlacement home[2], *list[] = { &home[0], &home[1] };
    Ep__V1__GroupSpec spec = spec_of(2, &placement);
    char text[512];

    (void)state;
    nodes[0].apart = pairs;
    expect_on_gpus(2, NODES(PACK), nodes, 1, EP_OK, "2");
    expect_on_gpus(3, NODES(PACK), nodes, 1, EP_FAILED_PRECONDITION,
                   "rank 0 would be on host0 and rank 2 on host2 of node a, which do not reach each other's memory");
    expect_on_gpus(4, NODES(SPREAD), nodes, 2, EP_OK, "2 2");
    for (uint32_t i = 0; i < 2; i++) {
        ep__v1__rank_placement__init(&home[i]);
        home[i].rank = i;
        home[i].node = a;
    }
    placement.nodes = NODES(EXPLICIT);
    placement.ranks = list;
    placement.n_ranks = 2;
    home[0].device = host2;
    home[1].device = host3;
    assert_int_equal(plan(&spec, nodes, 1, text, sizeof text), EP_OK);
    home[1].device = host0;
    assert_int_equal(plan(&spec, nodes, 1, text, sizeof text), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(text, "rank 0 would be on host2 and rank 1 on host0 of node a"));
}

static void expect_gpus(uint32_t ranks, const struct ep_plan_node *node, const struct ep_plan *before, const char *wanted)
{
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    const Ep__V1__GroupSpec spec = spec_of(ranks, &placement);
    char text[512];

    (void)plan_again(&spec, node, 1, before, text, sizeof text);
    assert_string_equal(text, wanted);
}

static void ranks_get_the_gpus_that_groups_have_least_of(void **state)
{
    const uint64_t none[] = { 0, 0, 0, 0 }, used[] = { 5, 0, 0, 9 }, left[] = { GIB, GIB, 1000, GIB };
    struct ep_plan_node node = linked("a", 4, 22809, "2.28.9, GIN by x");

    (void)state;
    node.device_used = none;
    expect_gpus(2, &node, NULL, "a/host0 a/host1");
    node.device_used = used;
    expect_gpus(1, &node, NULL, "a/host1");
    expect_gpus(2, &node, NULL, "a/host1 a/host2");
    expect_gpus(3, &node, NULL, "a/host0 a/host1 a/host2");
    expect_gpus(4, &node, NULL, "a/host0 a/host1 a/host2 a/host3");
    expect_gpus(6, &node, NULL, "a/host0 a/host1 a/host2 a/host3 a/host0 a/host1");
    node.has.device_left = left; /* one has no room */
    expect_gpus(2, &node, NULL, "a/host0 a/host1");
    expect_gpus(3, &node, NULL, "a/host0 a/host1 a/host3");
}

static void of_those_that_reach_each_other(void **state)
{
    static const uint64_t pairs[] = { 0xc, 0xc, 0x3, 0x3 };
    const uint64_t used[] = { 0, 3, 1, 1 };
    struct ep_plan_node node = linked("a", 4, 22809, "2.28.9, GIN by x");

    (void)state;
    node.apart = pairs;
    node.device_used = used;
    expect_gpus(1, &node, NULL, "a/host0");
    expect_gpus(2, &node, NULL, "a/host2 a/host3");
}

static struct ep_plan on_gpus(uint32_t ranks, char **device)
{
    static char a[] = "a";
    Ep__V1__RankRun run = EP__V1__RANK_RUN__INIT, *runs[] = { &run };
    struct ep_plan plan;

    run.node = a;
    run.devices = device;
    run.n_devices = ranks;
    assert_int_equal(ep_plan_read(runs, 1, &plan, NULL), EP_OK);
    return plan;
}

/* Workers that go over to a new epoch have their memory where they are. */
static void and_ranks_of_a_group_stay_on_theirs(void **state)
{
    static char host1[] = "host1", host3[] = "host3";
    char *now[] = { host3, host1 }, *both[] = { host3, host3 };
    const uint64_t used[] = { 0, 7, 0, 7 }, left[] = { GIB, 1000, GIB, GIB };
    struct ep_plan_node nodes[] = { linked("a", 4, 22809, "2.28.9, GIN by x"), linked("b", 4, 22809, "2.28.9, GIN by x") };
    struct ep_plan before = on_gpus(2, now);
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    const Ep__V1__GroupSpec spec = spec_of(2, &placement);
    char text[512];

    (void)state;
    nodes[0].device_used = nodes[1].device_used = used;
    expect_gpus(1, &nodes[0], &before, "a/host3");
    expect_gpus(2, &nodes[0], &before, "a/host3 a/host1");
    expect_gpus(3, &nodes[0], &before, "a/host3 a/host1 a/host0");
    expect_gpus(4, &nodes[0], &before, "a/host3 a/host1 a/host2 a/host0");
    expect_gpus(2, &nodes[1], &before, "b/host0 b/host2");
    ep_plan_clear(&before);
    before = on_gpus(2, both);
    expect_gpus(2, &nodes[0], &before, "a/host3 a/host0");
    ep_plan_clear(&before);
    before = on_gpus(2, now);
    nodes[0].has.device_left = left; /* it is refused, rather than that a rank goes elsewhere */
    assert_int_equal(plan_again(&spec, nodes, 1, &before, text, sizeof text), EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(text, "host1"));
    ep_plan_clear(&before);
}

static void so_it_has_where_ranks_are_placed_one_by_one(void **state)
{
    enum { RANKS = EP_DEVICE_NODE_RANKS + 1 };
    static char a[] = "a", b[] = "b";
    const struct ep_plan_node nodes[] = { gpus_of("a", 40), gpus_of("b", 40) };
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = spec_of(RANKS, &placement);
    Ep__V1__RankPlacement home[RANKS], *list[RANKS];

    (void)state;
    for (uint32_t i = 0; i < RANKS; i++) {
        ep__v1__rank_placement__init(&home[i]);
        home[i].rank = i;
        home[i].node = a;
        list[i] = &home[i];
    }
    spec.experts = RANKS;
    placement.nodes = NODES(EXPLICIT);
    placement.ranks = list;
    placement.n_ranks = RANKS;
    expect_numbers(&spec, nodes, 2, EP_INVALID_ARGUMENT, "placement.ranks has 33 ranks on node a: the cuda backend has at "
                   "most 32 of a group on one");
    home[7].node = b;
    expect_numbers(&spec, nodes, 2, EP_OK, "32 1");
}

static void nodes_of_another_release_or_without_a_mode_are_no_members(void **state)
{
    struct ep_plan_node nodes[] = { node("a", 4, GIB), node("b", 4, GIB) };
    Ep__V1__Mode ht = EP__V1__MODE__MODE_HT;
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = spec_of(2, &placement);
    struct ep_spec_bounds bounds;
    struct ep_settled settled;
    char text[512];

    (void)state;
    placement.nodes = NODES(SPREAD);
    nodes[1].release = "is of release 9, not 1 as the leader";
    expect(2, NODES(SPREAD), nodes, 2, EP_OK, "a/host0 a/host1");
    expect(8, NODES(SPREAD), nodes, 2, EP_FAILED_PRECONDITION, "(node b is of release 9, not 1 as the leader)");
    expect(2, NODES(SPREAD), nodes + 1, 1, EP_FAILED_PRECONDITION, "is of release 9");
    nodes[1].release = NULL;
    nodes[1].modes = 1u << EP_MODE_LL;
    spec.n_modes = 1;
    spec.modes = &ht;
    assert_int_equal(plan(&spec, nodes, 2, text, sizeof text), EP_OK);
    assert_string_equal(text, "a/host0 a/host1");
    assert_int_equal(plan(&spec, nodes + 1, 1, text, sizeof text), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(text, "node b lacks a mode that is asked for"));
    spec.n_modes = 0; /* what all have is settled, and who lacks the rest is named */
    assert_int_equal(ep_plan_bounds(&spec, nodes, 2, false, &bounds, NULL), EP_OK);
    assert_int_equal(ep_spec_settle(&spec, &bounds, &settled, NULL), EP_OK);
    assert_int_equal(settled.spec->n_modes, 1);
    assert_string_equal(settled.notes[0], "modes: none asked, ll settled: node b has no other");
    ep_settled_clear(&settled);
}

static void groups_are_of_one_backend(void **state)
{
    struct ep_plan_node nodes[] = { node("a", 4, GIB), node("b", 2, GIB) };
    const uint64_t left[] = { GIB, GIB };
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__GroupSpec spec = spec_of(3, &placement);
    char text[512];

    (void)state;
    nodes[1].has.backend = EP__V1__BACKEND__BACKEND_CUDA;
    nodes[1].has.device_left = left;
    spec.hidden = 1024;
    spec.backend = EP__V1__BACKEND__BACKEND_HOST;
    assert_int_equal(plan(&spec, nodes, 2, text, sizeof text), EP_OK);
    assert_string_equal(text, "a/host0 a/host1 a/host2");
    spec.backend = EP__V1__BACKEND__BACKEND_UNSPECIFIED; /* where GPUs are, they are meant; ranks may share them */
    assert_int_equal(plan(&spec, nodes, 2, text, sizeof text), EP_OK);
    assert_string_equal(text, "b/host0 b/host1 b/host0");
}

/* ---- explicit ----------------------------------------------------------------------------- */

struct homes {
    Ep__V1__RankPlacement home[4], *list[4];
    Ep__V1__Placement placement;
};

static void homes_init(struct homes *homes, size_t n)
{
    ep__v1__placement__init(&homes->placement);
    homes->placement.nodes = NODES(EXPLICIT);
    homes->placement.ranks = homes->list;
    homes->placement.n_ranks = n;
    for (size_t i = 0; i < n; i++) {
        ep__v1__rank_placement__init(&homes->home[i]);
        homes->home[i].rank = (uint32_t)i;
        homes->list[i] = &homes->home[i];
    }
}

static void expect_homes(struct homes *homes, ep_status status, const char *wanted)
{
    const struct ep_plan_node nodes[] = { node("a", 2, GIB), node("b", 4, GIB) };
    const Ep__V1__GroupSpec spec = spec_of(3, &homes->placement);
    char text[512];

    assert_int_equal(plan(&spec, nodes, 2, text, sizeof text), status);
    if (!strstr(text, wanted))
        fail_msg("\"%s\" is not \"%s\"", text, wanted);
}

static void explicit_homes_are_taken_at_their_word(void **state)
{
    static char a[] = "a", b[] = "b", c[] = "c", host3[] = "host3", none[] = "none";
    struct homes homes;

    (void)state;
    homes_init(&homes, 3);
    homes.home[0].node = b;
    homes.home[0].device = host3;
    homes.home[1].node = a;
    homes.home[2].node = b;
    expect_homes(&homes, EP_OK, "b/host3 a/host0 b/host1");
    homes.home[1].node = c;
    expect_homes(&homes, EP_UNAVAILABLE, "rank 1 is on node c, which is not there");
    homes.home[1].node = a;
    homes.home[0].device = none;
    expect_homes(&homes, EP_FAILED_PRECONDITION, "rank 0 is on none of node b, which has no such device");
    homes.home[0].device = host3;
    homes.home[2].rank = 1;
    expect_homes(&homes, EP_INVALID_ARGUMENT, "placement.ranks has rank 1 twice");
    homes.placement.n_ranks = 2;
    expect_homes(&homes, EP_INVALID_ARGUMENT, "placement.ranks lacks rank 2");
    homes.placement.nodes = NODES(PACK);
    expect_homes(&homes, EP_INVALID_ARGUMENT, "they need placement.nodes explicit");
}

static ep_status read_runs(Ep__V1__RankRun *const *runs, size_t n, struct ep_plan *out, struct ep_error *error)
{
    *error = (struct ep_error)EP_ERROR_INIT;
    return ep_plan_read(runs, n, out, error);
}

/* A node may have ranks here and there; what comes back is what was stored. */
static void a_plan_is_stored_in_runs_of_ranks_of_a_node(void **state)
{
    char *own[] = { "host0", "host1", "host2" }, *one[] = { "host1" };
    Ep__V1__RankRun a = EP__V1__RANK_RUN__INIT, b = EP__V1__RANK_RUN__INIT, again = EP__V1__RANK_RUN__INIT;
    Ep__V1__RankRun *runs[] = { &a, &b, &again }, **stored;
    struct arena arena = { 0 };
    struct ep_error error;
    struct ep_plan plan;
    size_t n;

    (void)state;
    a.node = again.node = "a";
    b.node = "b";
    a.devices = own, a.n_devices = 3;
    b.devices = one, b.n_devices = 1;
    again.devices = one, again.n_devices = 1;
    assert_int_equal(read_runs(runs, 3, &plan, &error), EP_OK);
    assert_int_equal(plan.n_ranks, 5);
    assert_int_equal(plan.n_nodes, 2);
    assert_string_equal(plan.name[plan.node[4]], "a");
    assert_string_equal(plan.device[2], "host2");
    stored = ep_plan_runs(&plan, &arena, &n);
    assert_int_equal(n, 3);
    assert_int_equal(stored[0]->n_devices, 3);
    assert_string_equal(stored[0]->devices[1], "host1");
    assert_string_equal(stored[1]->node, "b");
    assert_string_equal(stored[2]->node, "a");
    arena_clear(&arena);
    ep_plan_clear(&plan);
    own[1] = "";
    assert_int_equal(read_runs(runs, 3, &plan, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "runs[0] must have a node, and a device for each rank"));
    b.n_devices = 0;
    assert_int_equal(read_runs(runs + 1, 2, &plan, &error), EP_INVALID_ARGUMENT);
    assert_int_equal(read_runs(runs, 0, &plan, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "runs has 0 ranks"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpus_of_several_nodes_need_one_nccl),
        cmocka_unit_test(packed_ranks_take_as_few_nodes_as_have_room),
        cmocka_unit_test(spread_ranks_take_all_nodes_evenly),
        cmocka_unit_test(drained_nodes_get_no_ranks),
        cmocka_unit_test(memory_decides_and_the_refusal_says_what_would_fit),
        cmocka_unit_test(each_gpu_has_what_its_rank_puts_to_other_nodes),
        cmocka_unit_test(on_gpus_a_node_has_32_ranks_of_a_group_at_most),
        cmocka_unit_test(ranks_of_a_node_are_on_gpus_that_reach_each_other),
        cmocka_unit_test(ranks_get_the_gpus_that_groups_have_least_of),
        cmocka_unit_test(of_those_that_reach_each_other),
        cmocka_unit_test(and_ranks_of_a_group_stay_on_theirs),
        cmocka_unit_test(so_it_has_where_ranks_are_placed_one_by_one),
        cmocka_unit_test(nodes_of_another_release_or_without_a_mode_are_no_members),
        cmocka_unit_test(groups_are_of_one_backend),
        cmocka_unit_test(explicit_homes_are_taken_at_their_word),
        cmocka_unit_test(a_plan_is_stored_in_runs_of_ranks_of_a_node),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
