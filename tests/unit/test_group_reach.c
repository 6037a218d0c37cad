/*
 * Members that have lost each other while the store has all of them: the leader forms their epoch anew when they find each
 * other again, and begins nothing before.
 */
#include "span_fixture.h"

#include <string.h>

#include "group_private.h"

#define HIDDEN  64u
#define RANKS   6u
#define ROUNDS  3u  /* of asking in vain */
#define TICK_MS 50u

/* ---- what the leader does -------------------------------------------------------------------- */

static struct {
    uint32_t asked, answered, pings; /* messages */
    uint32_t begun;                  /* epochs that somebody set out to form */
    uint64_t begun_ms;               /* loop time of the first of them */
    uint32_t ticks, answered_tick, begun_tick;
} seen;

ep_status __real_negotiate(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                           struct ep_settled *settled, struct ep_plan *plan, struct ep_error *error);
ep_status __wrap_negotiate(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                           struct ep_settled *settled, struct ep_plan *plan, struct ep_error *error);

ep_status __wrap_negotiate(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                           struct ep_settled *settled, struct ep_plan *plan, struct ep_error *error)
{
    if (!seen.begun++) {
        seen.begun_ms = uv_now(group->groups->loop);
        seen.begun_tick = seen.ticks;
    }
    return __real_negotiate(group, asked, stay, settled, plan, error);
}

static void on_step(struct world *world, const char *kind, void *user)
{
    (void)world, (void)user;
    seen.asked += !strcmp(kind, "Reach");
    seen.pings += !strcmp(kind, "Ping");
    if (!strcmp(kind, "Reach-reply")) {
        seen.answered++;
        seen.answered_tick = seen.ticks;
    }
}

static void look_from_now_on(struct fixture *f)
{
    memset(&seen, 0, sizeof seen);
    world_on_step(f->world, on_step, NULL);
}

/* ---- groups ------------------------------------------------------------------------------------ */

static void create(struct fixture *f)
{
    const Ep__V1__GroupSpec spec = span_spec(HIDDEN, RANKS);
    struct answer answer = { 0 };

    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

static void update(struct fixture *f)
{
    const Ep__V1__GroupSpec spec = span_spec(2 * HIDDEN, RANKS);
    struct answer answer = { 0 };
    char hidden[] = "hidden", *fields[] = { hidden };

    ep_groups_update(f->servers[span_leader(f)].groups, "moe", 0, &spec, fields, 1, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

static bool nobody_has_it(const struct fixture *f)
{
    bool gone = true;

    for (uint32_t i = 0; i < SERVERS; i++)
        gone &= !ep_groups_get(f->servers[i].groups, "moe", NULL);
    return gone;
}

/* What the leader does of its own accord may not be over when all servers have seen what came of it. */
static void delete (struct fixture *f)
{
    struct answer answer;

    do {
        answer = (struct answer){ 0 };
        uv_run(&f->loop, UV_RUN_ONCE);
        ep_groups_delete(f->servers[span_leader(f)].groups, "moe", true, NULL, span_on_answer, &answer);
        WAIT(f, answer.done);
    } while (answer.error.status == EP_FAILED_PRECONDITION);
    assert_string_equal(answer.error.text, "");
    WAIT(f, nobody_has_it(f));
}

static bool all_are(const struct fixture *f, Ep__V1__Phase phase, uint64_t epoch)
{
    bool same = true;

    for (uint32_t i = 0; i < SERVERS; i++) {
        const Ep__V1__Group *group = ep_groups_get(f->servers[i].groups, "moe", NULL);

        same &= group && group->status->phase == phase && group->status->epoch == epoch;
    }
    return same;
}

/* ---- two that lose each other ------------------------------------------------------------------ */

struct pair {
    uint32_t one, other;
};

static struct pair others(const struct fixture *f)
{
    const uint32_t leader = span_leader(f);

    return (struct pair){ leader == 0, leader == 2 ? 1 : 2 };
}

static void part(struct fixture *f, struct pair pair, bool parted)
{
    world_part(f->servers[pair.one].cluster, f->servers[pair.other].cluster, parted);
}

static void lose(struct fixture *f, struct pair pair)
{
    look_from_now_on(f);
    span_tear(f, pair.one, pair.other);
}

static void ask_in_vain(struct fixture *f)
{
    const uint32_t before = seen.asked;

    WAIT(f, seen.begun || all_are(f, PHASE(DEGRADED), 1));
    WAIT(f, seen.begun || seen.asked >= before + 2 * ROUNDS);
    assert_int_equal(seen.begun, 0);
}

static void those_that_do_not_find_each_other_are_asked_again_and_nothing_is_begun(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);

    create(f);
    part(f, pair, true);
    lose(f, pair);
    ask_in_vain(f);
    part(f, pair, false);
    WAIT(f, all_are(f, PHASE(READY), 2));
    assert_int_equal(seen.begun, 1);
}

static void a_leader_that_has_lost_a_member_asks_itself_too(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = { span_leader(f), (span_leader(f) + 1) % SERVERS };

    create(f);
    part(f, pair, true);
    lose(f, pair);
    WAIT(f, seen.begun || all_are(f, PHASE(DEGRADED), 1));
    WAIT(f, seen.begun || (seen.asked >= ROUNDS && seen.pings >= ROUNDS));
    assert_int_equal(seen.begun, 0);
    part(f, pair, false);
    WAIT(f, all_are(f, PHASE(READY), 2));
}

/* A tick for each time that the loop has come round: a machine that stands still is no tick. */
static void on_tick(uv_timer_t *timer)
{
    (void)timer;
    seen.ticks++;
}

static void those_that_find_each_other_are_in_a_new_epoch_at_once(void **state)
{
    struct fixture *f = *state;
    uv_timer_t timer;

    create(f);
    uv_timer_init(&f->loop, &timer);
    uv_timer_start(&timer, on_tick, TICK_MS, TICK_MS);
    lose(f, others(f));
    WAIT(f, all_are(f, PHASE(READY), 2));
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(seen.asked, 2); /* each of them once, */
    assert_int_equal(seen.pings, 2); /* and they each other */
    assert_int_equal(seen.begun, 1);
    assert_true(seen.begun_tick - seen.answered_tick < 4);
}

static void where_the_store_has_lost_a_member_nobody_is_asked(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);
    uint32_t asked;

    create(f);
    part(f, pair, true);
    lose(f, pair);
    ask_in_vain(f);
    world_crash(f->servers[pair.other].cluster);
    span_stop(f, pair.other);
    span_start(f, pair.other);
    asked = seen.asked;
    WAIT(f, span_all_ready(f) && all_are(f, PHASE(READY), 2));
    assert_int_equal(seen.asked, asked);
}

/* The store does not know yet that one of them is another server by now, which has no part of the epoch. */
static void a_server_that_was_started_again_is_not_the_one_that_was_lost(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);

    create(f);
    world_reboot(f->servers[pair.other].cluster, true);
    lose(f, pair);
    ask_in_vain(f);
    assert_true(seen.pings > 0);
    world_reboot(f->servers[pair.other].cluster, false);
    WAIT(f, all_are(f, PHASE(READY), 2));
}

/* ---- answers that come late -------------------------------------------------------------------- */

static void an_answer_about_an_epoch_that_is_over_counts_for_nothing(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);

    create(f);
    world_keep(f->world, "Reach-reply");
    lose(f, pair);
    WAIT(f, world_kept(f->world) == 2);
    update(f);
    WAIT(f, all_are(f, PHASE(READY), 2));
    part(f, pair, true);
    lose(f, pair);
    WAIT(f, all_are(f, PHASE(DEGRADED), 2));
    world_hand_over(f->world); /* in that other epoch they had found each other */
    WAIT(f, seen.begun || seen.asked >= 2 * ROUNDS);
    assert_int_equal(seen.begun, 0);
    part(f, pair, false);
    WAIT(f, all_are(f, PHASE(READY), 3));
}

/* At the last answer. */
static void on_step_to_change(struct world *world, const char *kind, void *user)
{
    static struct answer ignored;
    struct fixture *f = user;
    Ep__V1__GroupSpec spec = span_spec(HIDDEN, RANKS);
    Ep__V1__GroupSpec__LabelsEntry label = EP__V1__GROUP_SPEC__LABELS_ENTRY__INIT, *labels[] = { &label };
    char key[] = "n", value[] = "1", field[] = "labels", *fields[] = { field };

    on_step(world, kind, NULL);
    if (strcmp(kind, "Reach-reply") != 0 || seen.answered != 2)
        return;
    part(f, others(f), true);
    label.key = key;
    label.value = value;
    spec.labels = labels;
    spec.n_labels = 1;
    ignored = (struct answer){ 0 };
    ep_groups_update(f->servers[span_leader(f)].groups, "moe", 0, &spec, fields, 1, false, NULL, span_on_answer, &ignored);
}

static bool is_labelled(const struct fixture *f)
{
    return ep_groups_get(f->servers[span_leader(f)].groups, "moe", NULL)->spec->n_labels == 1;
}

static void an_answer_from_before_a_change_counts_for_nothing_after_it(void **state)
{
    struct fixture *f = *state;

    create(f);
    lose(f, others(f));
    world_on_step(f->world, on_step_to_change, f);
    WAIT(f, is_labelled(f));
    ask_in_vain(f);
    part(f, others(f), false);
    WAIT(f, all_are(f, PHASE(READY), 2));
}

static void on_deposed(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)error, (void)revision, (void)user;
}

/* Who leads from now on; perhaps the same one. */
static uint32_t depose(struct fixture *f)
{
    const struct ep_store_write write = { .key = "leader", .expected = EP_STORE_ANY };
    const uint64_t term = ep_cluster_term(f->servers[span_leader(f)].cluster);
    uint32_t won;

    ep_store_commit(f->store, &write, 1, on_deposed, NULL);
    WAIT(f, (won = span_leader(f)) < SERVERS && ep_cluster_term(f->servers[won].cluster) > term);
    return won;
}

/* Neither by the old leader nor, as they say something else by now, by the new one. */
static void an_answer_to_who_leads_no_more_counts_for_nothing(void **state)
{
    struct fixture *f = *state;
    uint32_t old, won, before;

    do {
        const struct pair pair = others(f);

        old = span_leader(f);
        create(f);
        world_keep(f->world, "Reach-reply");
        lose(f, pair);
        WAIT(f, world_kept(f->world) == 2);
        world_keep(f->world, NULL);
        part(f, pair, true);
        won = depose(f);
        before = seen.asked;
        world_hand_over(f->world);
        WAIT(f, seen.begun || seen.asked >= before + 2 * ROUNDS);
        assert_true(won == old || !seen.begun);
        part(f, pair, false);
        WAIT(f, all_are(f, PHASE(READY), 2));
        delete (f);
    } while (won == old);
}

static void the_group_is_deleted_while_its_members_are_asked(void **state)
{
    static const char *const missing[] = { "Reach-reply", "Ping-reply" };
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        create(f);
        world_keep(f->world, missing[i]);
        lose(f, others(f));
        WAIT(f, world_kept(f->world) == 2);
        delete (f);
        world_hand_over(f->world);
        WAIT(f, seen.answered == 2);
        assert_int_equal(seen.begun, 0);
    }
    create(f);
    WAIT(f, all_are(f, PHASE(READY), 1));
}

/* ---- members of an older version ----------------------------------------------------------------- */

static void one_that_does_not_know_the_question_is_in_the_new_epoch_when_it_always_was(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);
    uint64_t lost_ms;

    create(f);
    world_unlearn(f->servers[pair.one].cluster, "Reach");
    lost_ms = uv_now(&f->loop);
    lose(f, pair);
    WAIT(f, all_are(f, PHASE(READY), 2));
    assert_int_equal(seen.begun, 1);
    assert_true(seen.begun_ms - lost_ms >= ep_cluster_lost_ms(f->servers[pair.one].cluster));
}

static void one_that_does_not_know_the_question_does_not_answer_it_for_others(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = others(f);
    uint64_t later_ms;

    create(f);
    world_unlearn(f->servers[pair.one].cluster, "Reach");
    part(f, pair, true);
    lose(f, pair);
    later_ms = uv_now(&f->loop) + ep_cluster_lost_ms(f->servers[pair.one].cluster);
    ask_in_vain(f);
    WAIT(f, uv_now(&f->loop) > later_ms);
    ask_in_vain(f);
    part(f, pair, false);
    WAIT(f, all_are(f, PHASE(READY), 2));
}

/* ---- a member -------------------------------------------------------------------------------------- */

static void on_called(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    assert_true(!reply == (error->status != EP_OK));
    span_on_answer(error, NULL, user);
}

static struct ep_error asked(struct fixture *f, char *group, uint64_t epoch)
{
    Ep__V1__ReachRequest request = EP__V1__REACH_REQUEST__INIT;
    struct answer answer = { 0 };

    request.group = group;
    request.epoch = epoch;
    ep_groups_reach(f->servers[0].groups, &request, on_called, &answer);
    WAIT(f, answer.done);
    return answer.error;
}

static void a_member_answers_for_the_epoch_that_it_runs_alone(void **state)
{
    struct fixture *f = *state;
    char moe[] = "moe", other[] = "other";
    struct ep_error error;

    create(f);
    assert_int_equal(asked(f, moe, 1).status, EP_OK); /* it has lost nobody */
    error = asked(f, moe, 2);
    assert_int_equal(error.status, EP_NOT_FOUND);
    assert_string_equal(error.text, "epoch 2 of group \"moe\" does not run on node a");
    assert_int_equal(asked(f, other, 1).status, EP_NOT_FOUND);
}

static void a_member_names_whom_it_does_not_find(void **state)
{
    struct fixture *f = *state;
    const struct pair pair = { 0, 1 };
    char moe[] = "moe";
    struct ep_error error;

    create(f);
    lose(f, pair);
    world_reboot(f->servers[1].cluster, true);
    error = asked(f, moe, 1);
    assert_int_equal(error.status, EP_UNAVAILABLE);
    assert_string_equal(error.text, "node b was started again");
    part(f, pair, true);
    error = asked(f, moe, 1);
    assert_int_equal(error.status, EP_UNAVAILABLE);
    part(f, pair, false);
    world_reboot(f->servers[1].cluster, false);
    assert_int_equal(asked(f, moe, 1).status, EP_OK);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, span_setup, span_teardown)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(those_that_do_not_find_each_other_are_asked_again_and_nothing_is_begun),
        TEST(a_leader_that_has_lost_a_member_asks_itself_too),
        TEST(those_that_find_each_other_are_in_a_new_epoch_at_once),
        TEST(where_the_store_has_lost_a_member_nobody_is_asked),
        TEST(a_server_that_was_started_again_is_not_the_one_that_was_lost),
        TEST(an_answer_about_an_epoch_that_is_over_counts_for_nothing),
        TEST(an_answer_from_before_a_change_counts_for_nothing_after_it),
        TEST(an_answer_to_who_leads_no_more_counts_for_nothing),
        TEST(the_group_is_deleted_while_its_members_are_asked),
        TEST(one_that_does_not_know_the_question_is_in_the_new_epoch_when_it_always_was),
        TEST(one_that_does_not_know_the_question_does_not_answer_it_for_others),
        TEST(a_member_answers_for_the_epoch_that_it_runs_alone),
        TEST(a_member_names_whom_it_does_not_find),
    };

    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
