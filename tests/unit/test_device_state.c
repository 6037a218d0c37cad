/* What groups the kernels can do, to the last token and expert; and how ranks of several nodes reach each other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "device_net.h"
#include "ep_kernels.h"

static struct ep_limits good(void)
{
    return (struct ep_limits){ .ranks = 8, .experts = 256, .local_experts = 32, .top_k = 8, .hidden = 7168,
                               .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 128,
                               .ll_banks = 2 };
}

static void refused(const struct ep_limits *limits, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_device_check(limits, &error), EP_INVALID_ARGUMENT);
    if (!strstr(error.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, error.text);
}

static void usual_groups_are_good(void **state)
{
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.ll_max_tokens = 1024;
    l.top_k = 16;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l = good();
    l.ranks = EP_DEVICE_MAX_RANKS;
    l.local_experts = 8;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
}

static void a_group_has_as_many_ranks_as_a_set(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.ranks = EP_DEVICE_MAX_RANKS + 1;
    refused(&l, "ranks is 1025: the cuda backend has at most 1024 in a group");
}

static void modes_are_one_or_both(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT;
    l.ht_max_tokens = 8192;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.modes = 1u << EP_MODE_HT;
    l.ll_max_tokens = l.ll_banks = 0;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
}

/* All of a block's warps count when the experts are few, one when they are as many as can be. */
static void ht_counts_in_shared_memory(void **state)
{
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_device_ht_shared_bytes(&l), 0);
    l.modes = 1u << EP_MODE_HT;
    assert_int_equal(ep_device_ht_counting_warps(&l), EP_DEVICE_HT_WARPS);
    assert_int_equal(ep_device_ht_shared_bytes(&l),
                     EP_DEVICE_HT_WARPS * 4 * (ep_ht_columns(8, 32) + 32 * EP_MAX_TOP_K));
    l.ranks = 1;
    l.experts = l.local_experts = 8191;
    assert_int_equal(ep_device_ht_counting_warps(&l), 1);
    assert_true(ep_device_ht_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    for (l.ranks = 1; l.ranks <= EP_DEVICE_MAX_RANKS; l.ranks += l.ranks < 32 ? 1 : 31) { /* the most that is let pass */
        l.local_experts = l.experts = 2 * EP_DEVICE_MAX_SHARED_BYTES / sizeof(uint32_t) / l.ranks;
        while (ep_device_check(&l, NULL) != EP_OK)
            l.local_experts--;
        assert_true(l.local_experts > 0);
        assert_true(ep_device_ht_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    }
}

/* What the tables of HT take lies behind those of LL, which stay where they are. */
static void without_ht_its_tables_take_nothing(void **state)
{
    struct ep_placement placement;
    struct ep_layout_map map;
    struct ep_device_tables ll, both;
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_placement_contiguous(8, 256, &placement, NULL), EP_OK);
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    ep_device_state_tables(&map, &placement, &ll);
    assert_int_equal(ll.ht.handle_stride, 0);
    assert_int_equal(ll.bytes, ll.ht.before);
    l.modes |= 1u << EP_MODE_HT;
    l.ht_max_tokens = 1000;
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    ep_device_state_tables(&map, &placement, &both);
    assert_int_equal(both.weights, ll.weights);
    assert_true(both.ht.totals >= both.ht.before + 4ull * EP_HT_LISTS * ep_ht_columns(8, 32));
    assert_true(both.ht.place_weights >= both.ht.places + 4ull * 8 * 1000 * 8);
    assert_int_equal(both.bytes, both.ht.first + EP_MAX_HANDLES * both.ht.handle_stride);
    ep_placement_free(&placement);
}

/* The number that the refusal names is good, and the next one is not. */
static void tokens_are_bounded_by_shared_memory(void **state)
{
    struct ep_limits l = good();
    struct ep_error error = EP_ERROR_INIT;
    const uint32_t most = (EP_DEVICE_MAX_SHARED_BYTES / 4 - 2 * l.local_experts - 1) / l.top_k;
    char text[64];

    (void)state;
    l.ll_max_tokens = 65536;
    snprintf(text, sizeof text, "ll_max_tokens is 65536: with top_k 8 must be at most %u", most);
    refused(&l, text);
    l.ll_max_tokens = most;
    assert_int_equal(ep_device_check(&l, &error), EP_OK);
    assert_true(ep_device_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    l.ll_max_tokens = most + 1;
    refused(&l, "ll_max_tokens is");
}

/* Fewer tokens would not help, so they are not what is named. */
static void experts_are_bounded_too(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.experts = l.local_experts = 8191;
    l.ranks = 1;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.experts = l.local_experts = 8192;
    refused(&l, "experts is 8192, up to 8192 on a rank, with 1 ranks");
    l.experts = 65536; /* all of them on one of many ranks */
    l.local_experts = 65536;
    l.ranks = 32;
    refused(&l, "experts is 65536");
}

/* ---- several nodes ------------------------------------------------------------------- */

enum { RANKS = 7 };
static const uint32_t on[RANKS] = { 0, 2, 0, 1, 0, 1, 0 }; /* 4, 2 and 1 of a node */

static struct ep_layout_map map_over_nodes(void)
{
    struct ep_limits l = good();
    struct ep_layout_map map;

    l.ranks = RANKS;
    l.experts = l.local_experts * RANKS;
    l.modes |= 1u << EP_MODE_HT;
    l.ht_max_tokens = 1000;
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    return map;
}

static bool is_far(const struct ep_device_net *net, uint32_t rank)
{
    return net->far[rank / 32] >> rank % 32 & 1;
}

static void ranks_agree_on_gates_and_boxes(void **state)
{
    const struct ep_layout_map map = map_over_nodes();
    static struct ep_device_net net[RANKS];
    uint32_t users[RANKS][16] = { 0 };

    (void)state;
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(ep_net_describe(&map, on, r, &net[r], NULL), EP_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(on[net[0].next[r]], on[r]);
        for (uint32_t far = 0; far < RANKS; far++) {
            const uint32_t gate = net[r].gate[far];

            assert_int_equal(is_far(&net[r], far), on[far] != on[r]);
            if (on[far] == on[r])
                continue;
            assert_int_equal(on[gate], on[far]);
            assert_int_equal(net[far].gate_here[r], gate); /* whoever is asked there says the same */
            assert_int_equal(net[far].in[r], net[r].there[gate]);
            assert_true(net[far].in[r] < net[far].map.gated);
            assert_true(net[r].out[far] < net[r].map.outs);
            assert_int_equal(net[r].out[far], net[far].back[r]); /* its node's box here */
            if (far == gate)
                assert_int_equal(users[gate][net[r].there[gate]]++, 0); /* nobody else's */
        }
    }
}

/* What a rank has in [ways][n] boxes is nobody else's, whoever acts as which gate. */
static void use_box(uint32_t *users, uint32_t way, uint32_t n, uint32_t which)
{
    assert_true(which < n);
    assert_int_equal(users[way * n + which]++, 0);
}

static void who_may_act_as_a_gate_has_boxes_of_its_own(void **state)
{
    const struct ep_layout_map map = map_over_nodes();
    static struct ep_device_net net[RANKS];
    uint32_t in[RANKS][64] = { 0 }, out[RANKS][64] = { 0 };

    (void)state;
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(ep_net_describe(&map, on, r, &net[r], NULL), EP_OK);
    assert_true(net[0].map.ins <= 64);
    for (uint32_t s = 0; s < RANKS; s++)
        for (uint32_t i = 0; i < net[s].map.outs; i++) {
            const uint32_t gate = net[s].gates[i];
            uint32_t acts = gate, way = 0;

            do { /* till the node is gone round, which may be before all ways are */
                use_box(in[acts], way, net[acts].map.gated, net[acts].in[s]);
                use_box(out[s], way, net[s].map.outs, net[s].out[acts]);
                assert_int_equal(net[acts].gate_here[s], gate); /* it knows for whom it acts */
                acts = net[s].next[acts];
            } while (++way < EP_NET_WAYS && acts != gate);
            assert_true(way <= net[s].map.ways);
        }
}

/* Two in a row may be absent, where a node has as many. */
static void as_many_act_as_a_node_has_ranks(void **state)
{
    const struct ep_layout_map map = map_over_nodes();

    (void)state;
    assert_int_equal(EP_NET_WAYS, 3);
    for (uint32_t most = 1; most < 6; most++) {
        const struct ep_net_shape shape = { .nodes = 3, .most = most, .least = 1 };
        struct ep_net_map m;

        ep_net_lay_out(&map, &shape, &m);
        assert_int_equal(m.ways, most < 3 ? most : 3);
        assert_int_equal(m.gated, 2 * most);
        assert_int_equal(m.ins, m.ways * m.gated);
    }
}

/* 1024 ranks on 128 nodes of 5 to 11. */
static void lie_of_many(uint32_t *node)
{
    uint32_t r = 0;

    for (uint32_t n = 0; r < EP_DEVICE_MAX_RANKS; n++)
        for (uint32_t i = 0; i < 5 + n % 7 && r < EP_DEVICE_MAX_RANKS; i++)
            node[r++] = n;
}

/* How many nodes behind the rank's own that of r is; it is itself the last one. */
static uint32_t distance(const uint32_t *node, uint32_t nodes, uint32_t rank, uint32_t r)
{
    return (node[r] + nodes - node[rank] - 1) % nodes + 1;
}

static void check_order(const struct ep_device_net *net, const uint32_t *node, uint32_t rank)
{
    const uint32_t nodes = net->map.outs + 1;

    for (uint32_t i = 0; i < net->map.outs; i++)
        assert_int_equal(distance(node, nodes, rank, net->gates[i]), i + 1);
    assert_int_equal(distance(node, nodes, rank, net->order[0]), 1);
    for (uint32_t i = 1; i < net->ranks; i++) {
        const uint32_t before = net->order[i - 1], r = net->order[i];
        const uint32_t of_before = distance(node, nodes, rank, before), its = distance(node, nodes, rank, r);

        assert_true(its > of_before || (its == of_before && r > before)); /* each of them once */
    }
}

static void check_many(const struct ep_device_net *net, const uint32_t *node, uint32_t rank)
{
    static uint32_t users[EP_DEVICE_MAX_RANKS];
    uint32_t far = 0;

    memset(users, 0, sizeof users);
    for (uint32_t i = 0; i < net->nears; i++)
        assert_int_equal(net->place[net->near[i]], i);
    for (uint32_t r = 0; r < EP_DEVICE_MAX_RANKS; r++) {
        far += is_far(net, r);
        assert_int_equal(is_far(net, r), node[r] != node[rank]);
        assert_int_equal(node[net->next[r]], node[r]);
        if (!is_far(net, r))
            continue;
        assert_int_equal(node[net->gate[r]], node[r]);
        assert_int_equal(net->gates[net->out[r]], net->gate[r]);
        assert_int_equal(node[net->gate_here[r]], node[rank]);
        assert_true(net->in[r] < net->map.gated);
        if (net->gate_here[r] == rank)
            assert_int_equal(users[net->in[r]]++, 0); /* nobody else's */
    }
    assert_int_equal(far, EP_DEVICE_MAX_RANKS - net->nears);
    check_order(net, node, rank);
}

static void there_can_be_many_nodes(void **state)
{
    static struct ep_device_net net;
    static uint32_t node[EP_DEVICE_MAX_RANKS];
    struct ep_layout_map map = map_over_nodes();

    (void)state;
    map.limits.ranks = EP_DEVICE_MAX_RANKS;
    lie_of_many(node);
    for (uint32_t rank = 0; rank < EP_DEVICE_MAX_RANKS; rank += 93) {
        assert_int_equal(ep_net_describe(&map, node, rank, &net, NULL), EP_OK);
        check_many(&net, node, rank);
    }
}

static void a_node_has_a_lane_for_each_rank(void **state)
{
    static struct ep_device_net net;
    struct ep_layout_map map = map_over_nodes();
    struct ep_error error = EP_ERROR_INIT;
    uint32_t node[EP_DEVICE_NODE_RANKS + 2] = { 0 };

    (void)state;
    map.limits.ranks = EP_DEVICE_NODE_RANKS + 2;
    node[1] = 1;
    assert_int_equal(ep_net_describe(&map, node, 0, &net, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "ranks is 34, up to 33 on a node: on GPUs must be at most 1024 and 32"));
    node[2] = 1;
    assert_int_equal(ep_net_describe(&map, node, 0, &net, &error), EP_OK);
    assert_int_equal(net.nears, EP_DEVICE_NODE_RANKS);
}

static void boxes_lie_one_behind_the_other(void **state)
{
    const struct ep_layout_map map = map_over_nodes();
    const struct ep_net_shape shape = ep_net_shape_of(on, RANKS);
    struct ep_net_map m;

    (void)state;
    assert_int_equal(shape.nodes, 3);
    assert_int_equal(shape.most, 4);
    assert_int_equal(shape.least, 1);
    ep_net_lay_out(&map, &shape, &m);
    assert_int_equal(m.outs, 2);
    assert_int_equal(m.gated, 8); /* of four ranks on each of two other nodes, at most */
    assert_int_equal(m.ins, 24);  /* and of those for whose gate it stands in, the one before it or the one before that */
    assert_true(m.asks >= m.ll_in + (uint64_t)map.limits.ll_banks * RANKS * m.ll_box_bytes);
    assert_true(m.out >= m.asks_out + RANKS * map.ht_note_stride);
    assert_int_equal(m.in, m.out + 3 * m.outs * m.box_bytes); /* for each gate, and for who stands in for it */
    assert_int_equal(m.partials, m.in + m.ins * m.box_bytes);
    assert_true(m.box_bytes >= 1000 * ep_net_record_bytes(8, map.row_bytes, map.scales_bytes));
    assert_true(m.box_bytes >= 1000 * (ep_net_sum_head(8) + map.combine_row_bytes));
    assert_true(m.tags >= m.partials + (uint64_t)m.gated * m.places * 1000 * map.combine_row_bytes);
    assert_true(m.bytes >= m.grads + (uint64_t)m.gated * m.places * 1000 * 8 * sizeof(float));
    assert_int_equal(ep_net_beside_bytes(&map, &shape), m.bytes);
    /* a box is put in pieces that steps can count */
    assert_true((1000 + ep_net_piece(1000, 16) - 1) / ep_net_piece(1000, 16) <= EP_NET_PIECES);
    assert_true(((1u << 20) + ep_net_piece(1u << 20, 1u << 16) - 1) / ep_net_piece(1u << 20, 1u << 16) <= EP_NET_PIECES);
}

static void a_box_of_ll_holds_all_that_a_rank_sends(void **state)
{
    const struct ep_layout_map map = map_over_nodes();
    const struct ep_net_shape shape = ep_net_shape_of(on, RANKS);
    const uint64_t tokens = map.limits.ll_max_tokens, boxes = (uint64_t)map.limits.ll_banks * RANKS;
    struct ep_net_map m;

    (void)state;
    ep_net_lay_out(&map, &shape, &m);
    assert_true(tokens > 0);
    assert_true(m.ll_head_bytes >= sizeof(struct ep_net_head) + map.header_bytes + map.scales_bytes);
    assert_true(m.ll_middle >= tokens * m.ll_head_bytes);
    assert_true(m.ll_rows >= map.counts_bytes);
    assert_true(m.ll_box_bytes >= m.ll_middle + m.ll_rows + tokens * map.row_bytes);
    assert_true(map.row_bytes >= map.combine_row_bytes);
    assert_int_equal((m.ll_out | m.ll_in | m.ll_box_bytes | m.ll_middle | m.ll_rows) % 128, 0);
    assert_int_equal(m.ll_head_bytes % 16, 0);
    assert_true(m.ll_in >= m.ll_out + boxes * m.ll_box_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usual_groups_are_good),
        cmocka_unit_test(a_group_has_as_many_ranks_as_a_set),
        cmocka_unit_test(modes_are_one_or_both),
        cmocka_unit_test(ht_counts_in_shared_memory),
        cmocka_unit_test(without_ht_its_tables_take_nothing),
        cmocka_unit_test(tokens_are_bounded_by_shared_memory),
        cmocka_unit_test(experts_are_bounded_too),
        cmocka_unit_test(ranks_agree_on_gates_and_boxes),
        cmocka_unit_test(who_may_act_as_a_gate_has_boxes_of_its_own),
        cmocka_unit_test(as_many_act_as_a_node_has_ranks),
        cmocka_unit_test(there_can_be_many_nodes),
        cmocka_unit_test(a_node_has_a_lane_for_each_rank),
        cmocka_unit_test(boxes_lie_one_behind_the_other),
        cmocka_unit_test(a_box_of_ll_holds_all_that_a_rank_sends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
