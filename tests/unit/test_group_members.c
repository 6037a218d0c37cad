/* Ranks of a group: claim, attach, release, and what peers and operators see of it. */
#include "group_fixture.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STATE(name) EP__V1__RANK_STATE__RANK_STATE_##name
#define PHASE(name) EP__V1__PHASE__PHASE_##name

static void attached_ranks_run_an_op_together(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[4];
    struct ep_op_result result;

    create(f, "moe", &spec);
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    for (int i = 0; i < 4; i++)
        ring_dispatch(&w[i]);
    for (int i = 0; i < 4; i++) {
        result = result_of(&w[i]);
        assert_string_equal(result.text, "");
        assert_int_equal(result.status, EP_OK);
        assert_int_equal(result.absent, 0);
    }
    assert_int_equal(get(f, "moe")->status->ranks[2]->ops, 1);
    assert_int_equal(ep_groups_attachments(f->groups), 4);
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
}

static void a_claim_tells_what_the_group_settled_on(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;
    struct ep_membership_info info;

    create(f, "moe", &spec);
    assert_int_equal(claim(f, &w, "moe", -1, NULL), EP_OK);
    ep_membership_info(w.membership, &info);
    assert_string_equal(info.group, "moe");
    assert_int_equal(info.rank, 0);
    assert_int_equal(info.epoch, 1);
    assert_int_equal(info.executor, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    assert_int_equal(info.memories, 1);
    assert_int_equal(info.state_bytes, 0);
    assert_null(info.device_uuid);
    assert_int_equal(info.window_bytes, get(f, "moe")->status->settled->window_bytes);
    assert_int_equal(info.spec->placement->n_homes, 0); /* contiguous */
    assert_int_equal(info.spec->timeout_ms, 10000);
    release(&w, false);
}

static void on_the_host_the_server_runs_the_ops(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker w;

    create(f, "moe", &spec);
    f->identity.executor = EP__V1__EXECUTOR__EXECUTOR_DIRECT;
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_UNIMPLEMENTED);
    assert_string_equal(error.text, "executor is direct: group moe is on the host backend, where the server runs "
                                    "the ops; ask for server or auto");
    f->identity.executor = (Ep__V1__Executor)3;
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, "executor is 3: must be 0 (auto), 1 (server) or 2 (direct)");
    f->identity.executor = EP__V1__EXECUTOR__EXECUTOR_SERVER;
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_OK);
    release(&w, false);
}

static void a_held_rank_is_refused_with_its_holder(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b;
    char pid[32];

    create(f, "moe", &spec);
    join(f, &a, "moe", 2);
    assert_int_equal(claim(f, &b, "moe", 2, &error), EP_ALREADY_EXISTS);
    snprintf(pid, sizeof pid, "pid %d", (int)getpid());
    assert_non_null(strstr(error.text, pid));
    assert_non_null(strstr(error.text, "tester"));
    assert_non_null(strstr(error.text, "uid"));
    assert_int_equal(claim(f, &b, "moe", 4, &error), EP_INVALID_ARGUMENT);
    assert_int_equal(claim(f, &b, "other", 0, &error), EP_NOT_FOUND);
    release(&a, false);
}

static void any_rank_is_the_lowest_free_one(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker w[4], more;

    create(f, "moe", &spec);
    assert_int_equal(claim(f, &w[0], "moe", 1, NULL), EP_OK);
    for (int i = 1; i < 4; i++)
        assert_int_equal(claim(f, &w[i], "moe", -1, NULL), EP_OK);
    ep_membership_info(w[1].membership, &w[1].info);
    ep_membership_info(w[2].membership, &w[2].info);
    assert_int_equal(w[1].info.rank, 0);
    assert_int_equal(w[2].info.rank, 2);
    assert_int_equal(claim(f, &more, "moe", -1, &error), EP_ALREADY_EXISTS);
    assert_string_equal(error.text, "all 4 ranks of group moe are held");
    assert_false(ep_groups_rank_free(f->groups, "moe", 0));
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
    assert_true(ep_groups_rank_free(f->groups, "moe", 0));
}

static void peers_go_on_when_a_rank_is_released(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_op_result result;
    struct worker w[4];

    create(f, "moe", &spec);
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    for (int i = 0; i < 3; i++)
        ring_dispatch(&w[i]);
    assert_false(is_done(&w[0])); /* rank 3 is waited for */
    release(&w[3], false);
    for (int i = 0; i < 3; i++) {
        result = result_of(&w[i]);
        assert_int_equal(result.status, EP_OK);
        assert_int_equal(result.absent, 1);
        assert_int_equal(w[i].lost, 1);
        assert_int_equal(w[i].lost_rank, 3);
        assert_string_equal(w[i].text, "its worker died");
    }
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DEGRADED));
    assert_non_null(strstr(get(f, "moe")->status->reason, "rank 3 (pid "));
    assert_non_null(strstr(get(f, "moe")->status->reason, "its worker died"));
    assert_int_equal(rank_state(f, "moe", 3), STATE(ABSENT));
    for (int i = 0; i < 3; i++)
        release(&w[i], false);
}

/* Whoever kept its mapping is no danger to the next worker, and has left it nothing. */
static void a_new_worker_gets_fresh_memory(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w, next;
    uint8_t *old;

    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    old = map_window(&w);
    old[w.map.arena] = 'a';
    release(&w, false);
    claim_when_free(f, &next, "moe", 0);
    attach(&next);
    assert_int_equal(next.window[next.map.arena], 0);
    memset(old, 0xff, next.window_bytes);
    assert_int_equal(next.window[next.map.arena], 0);
    assert_int_equal(((struct ep_control *)(void *)next.window)->head.magic, EP_WINDOW_MAGIC);
    munmap(old, next.window_bytes);
    release(&next, false);
}

static void a_new_worker_takes_the_lost_rank(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[4];

    create(f, "moe", &spec);
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    release(&w[1], false);
    join(f, &w[1], "moe", 1);
    assert_int_equal(w[0].joined, 4); /* 1, 2, 3 and 1 again */
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_string_equal(get(f, "moe")->status->reason, "");
    for (int i = 0; i < 4; i++)
        ring_dispatch(&w[i]);
    for (int i = 0; i < 4; i++)
        assert_int_equal(result_of(&w[i]).absent, 0);
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
}

static void a_quarantined_rank_is_free_when_its_writer_is_gone(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b, c;

    create(f, "moe", &spec);
    join(f, &a, "moe", 0);
    join(f, &b, "moe", 1);
    release(&b, true);
    assert_int_equal(rank_state(f, "moe", 1), STATE(QUARANTINED));
    assert_int_equal(claim(f, &c, "moe", 1, &error), EP_UNAVAILABLE);
    assert_non_null(strstr(error.text, "quarantined: pid "));
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DEGRADED));
    writer_gone(&b);
    assert_int_equal(rank_state(f, "moe", 1), STATE(ABSENT));
    join(f, &c, "moe", 1);
    release(&a, false);
    release(&c, false);
}

static void all_are_expected_again_when_the_last_has_left(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[4];

    create(f, "moe", &spec);
    join(f, &w[0], "moe", 0);
    join(f, &w[1], "moe", 1);
    release(&w[0], false);
    release(&w[1], true);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DEGRADED));
    writer_gone(&w[1]);
    RUN_UNTIL(f, get(f, "moe")->status->phase == PHASE(READY));
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(rank_state(f, "moe", i), STATE(EXPECTED));

    /* The first of the next workers waits for the others: nobody is absent. */
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    ring_dispatch(&w[0]);
    for (int i = 1; i < 4; i++)
        ring_dispatch(&w[i]);
    for (int i = 0; i < 4; i++)
        assert_int_equal(result_of(&w[i]).absent, 0);
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
}

static void a_restart_of_all_workers_starts_together(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[4];

    create(f, "moe", &spec);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 4; i++)
            join(f, &w[i], "moe", i); /* right after the last round's releases */
        for (int i = 0; i < 4; i++)
            ring_dispatch(&w[i]);
        for (int i = 0; i < 4; i++)
            assert_int_equal(result_of(&w[i]).absent, 0);
        for (int i = 0; i < 4; i++)
            release(&w[i], false);
    }
}

static void an_unattached_claim_changes_nothing(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker a, b;

    create(f, "moe", &spec);
    join(f, &a, "moe", 0);
    assert_int_equal(claim(f, &b, "moe", 1, NULL), EP_OK);
    assert_int_equal(rank_state(f, "moe", 1), STATE(EXPECTED));
    release(&b, false);
    assert_int_equal(rank_state(f, "moe", 1), STATE(EXPECTED));
    assert_int_equal(a.lost, 0);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    release(&a, false);
}

static void a_late_rank_is_recorded_by_name(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    const Ep__V1__TimeoutRecord *record;
    struct worker w[4];

    spec.timeout_ms = 1000; /* a thread may be late for a while: that is not what is looked for */
    create(f, "moe", &spec);
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    for (int i = 0; i < 3; i++)
        ring_dispatch(&w[i]);
    for (int i = 0; i < 3; i++)
        assert_int_equal(result_of(&w[i]).status, EP_TIMEOUT);
    RUN_UNTIL(f, get(f, "moe")->status->n_timeouts == 3);
    record = get(f, "moe")->status->timeouts[0];
    assert_int_equal(record->late_rank, 3);
    assert_int_equal(record->epoch, 1);
    assert_string_equal(record->op, "ll_dispatch");
    assert_string_equal(record->phase, "arrival");
    assert_true(record->waited_us >= 500000);
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
}

static void a_cordoned_node_takes_no_claims(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b;

    create(f, "moe", &spec);
    join(f, &a, "moe", 0);
    ep_node_cordon(f->node, true, "new disk");
    assert_int_equal(claim(f, &b, "moe", 1, &error), EP_FAILED_PRECONDITION);
    assert_string_equal(error.text, "node n1 is drained: new disk");
    ep_groups_announce_drain(f->groups, "new disk");
    assert_int_equal(a.draining, 1);
    assert_string_equal(a.text, "new disk");
    ep_node_cordon(f->node, false, NULL);
    assert_int_equal(claim(f, &b, "moe", 1, &error), EP_OK);
    release(&a, false);
    release(&b, false);
}

static void closing_with_workers_leaves_their_memberships_safe(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[3];

    create(f, "moe", &spec);
    join(f, &w[0], "moe", 0);
    join(f, &w[1], "moe", 1);
    assert_int_equal(claim(f, &w[2], "moe", 2, NULL), EP_OK);
    release(&w[1], true);
    fixture_close(f);
    assert_int_equal(w[0].detached, 1);
    assert_int_equal(w[2].detached, 1);
    release(&w[0], true); /* the attachments hear of it later than the groups */
    writer_gone(&w[0]);
    writer_gone(&w[1]);
    release(&w[2], false);
    fixture_open(f);
}

static void counters_outlive_epochs(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_rank_counters counters;
    struct answer answer;
    struct worker w;

    spec.ranks = 1;
    create(f, "moe", &spec);
    for (int epoch = 0; epoch < 2; epoch++) {
        join(f, &w, "moe", 0);
        ring_dispatch(&w);
        assert_int_equal(result_of(&w).status, EP_OK);
        release(&w, false);
        spec.hidden *= 2;
        answer = update(f, "moe", 0, &spec, "hidden");
        assert_int_equal(answer.error.status, EP_OK);
        answer_clear(&answer);
        RUN_UNTIL(f, get(f, "moe")->status->n_draining_epochs == 0);
    }
    assert_true(ep_groups_rank_counters(f->groups, "moe", 0, &counters));
    assert_int_equal(counters.op[EP_CLASS_LL_DISPATCH].count, 2);
    assert_false(ep_groups_rank_counters(f->groups, "moe", 1, &counters));
    assert_int_equal(get(f, "moe")->status->ranks[0]->ops, 0); /* of this epoch */
}

static void stats_have_every_rank_and_op(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    Ep__V1__Stats stats;
    struct worker w;

    spec.ranks = 1;
    create(f, "a", &spec);
    create(f, "b", &spec);
    join(f, &w, "b", 0);
    ring_dispatch(&w);
    (void)result_of(&w);
    ep_groups_stats(f->groups, NULL, false, &stats);
    assert_int_equal(stats.n_ranks, 2);
    ep_groups_stats_clear(&stats);
    ep_groups_stats(f->groups, "b", false, &stats);
    assert_int_equal(stats.n_ranks, 1);
    assert_string_equal(stats.ranks[0]->group, "b");
    assert_int_equal(stats.ranks[0]->n_ops, EP_OP_CLASSES);
    assert_string_equal(stats.ranks[0]->ops[0]->op, "ll_dispatch");
    assert_int_equal(stats.ranks[0]->ops[0]->count, 1);
    assert_int_equal(stats.ranks[0]->ops[0]->n_busy_buckets, 16);
    ep_groups_stats_clear(&stats);
    release(&w, false);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(attached_ranks_run_an_op_together),
        TEST(a_claim_tells_what_the_group_settled_on),
        TEST(on_the_host_the_server_runs_the_ops),
        TEST(a_held_rank_is_refused_with_its_holder),
        TEST(any_rank_is_the_lowest_free_one),
        TEST(peers_go_on_when_a_rank_is_released),
        TEST(a_new_worker_gets_fresh_memory),
        TEST(a_new_worker_takes_the_lost_rank),
        TEST(a_quarantined_rank_is_free_when_its_writer_is_gone),
        TEST(all_are_expected_again_when_the_last_has_left),
        TEST(a_restart_of_all_workers_starts_together),
        TEST(an_unattached_claim_changes_nothing),
        TEST(a_late_rank_is_recorded_by_name),
        TEST(a_cordoned_node_takes_no_claims),
        TEST(closing_with_workers_leaves_their_memberships_safe),
        TEST(counters_outlive_epochs),
        TEST(stats_have_every_rank_and_op),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
