/* Deleting a group of several nodes without force, while workers come. */
#include "span_fixture.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MEMBERS (SERVERS - 1) /* beside the leader */

static void make(struct fixture *f)
{
    const Ep__V1__GroupSpec spec = span_spec(64, 6);
    struct answer answer = { 0 };

    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    for (uint32_t i = 0; i < SERVERS; i++)
        WAIT(f, ep_groups_get(f->servers[i].groups, "moe", NULL)
                    && ep_groups_get(f->servers[i].groups, "moe", NULL)->status->phase == PHASE(READY));
}

static void begin(struct fixture *f, struct answer *answer)
{
    *answer = (struct answer){ 0 };
    ep_groups_delete(f->servers[span_leader(f)].groups, "moe", false, NULL, span_on_answer, answer);
}

/* A server that does not lead. */
static uint32_t member(const struct fixture *f)
{
    return (span_leader(f) + 1) % SERVERS;
}

static void on_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    (void)event, (void)rank, (void)epoch, (void)text, (void)user;
}

static ep_status claim(struct fixture *f, uint32_t server, struct ep_membership **out, struct ep_error *error)
{
    const struct ep_worker who = { .pid = getpid(), .uid = geteuid(), .name = "tester" };

    return ep_groups_claim(f->servers[server].groups, "moe", -1, &who, on_event, NULL, out, error);
}

static bool can_claim(struct fixture *f, uint32_t server)
{
    struct ep_membership *membership;

    if (claim(f, server, &membership, NULL) != EP_OK)
        return false;
    ep_membership_release(membership, "its worker left", false);
    return true;
}

static void refuses(struct fixture *f, uint32_t server)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_membership *membership;

    assert_int_equal(claim(f, server, &membership, &error), EP_UNAVAILABLE);
    assert_string_equal(error.text, "group moe is being deleted");
}

static bool all_gone(const struct fixture *f)
{
    bool gone = true;

    for (uint32_t i = 0; i < SERVERS; i++)
        gone &= !f->servers[i].groups || !ep_groups_get(f->servers[i].groups, "moe", NULL);
    return gone;
}

static void failed(const struct answer *answer, ep_status status, const char *text)
{
    assert_int_equal(answer->error.status, status);
    if (!strstr(answer->error.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, answer->error.text);
}

/* The leader has not heard of it when it is asked for the deletion. */
static void a_worker_that_came_before_the_question_keeps_its_group(void **state)
{
    struct fixture *f = *state;
    struct ep_membership *membership;
    struct answer answer;

    make(f);
    world_hold(f->world, true);
    begin(f, &answer);
    assert_int_equal(claim(f, member(f), &membership, NULL), EP_OK);
    world_hold(f->world, false);
    WAIT(f, answer.done);
    failed(&answer, EP_FAILED_PRECONDITION, "group moe has 1 workers: rank ");
    for (uint32_t i = 0; i < SERVERS; i++)
        WAIT(f, can_claim(f, i));
    ep_membership_release(membership, "its worker left", false);
    begin(f, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    WAIT(f, all_gone(f));
}

static void whoever_comes_after_the_question_is_refused(void **state)
{
    struct fixture *f = *state;
    struct answer answer;

    make(f);
    world_keep(f->world, "Close-reply");
    begin(f, &answer);
    WAIT(f, world_kept(f->world) == MEMBERS);
    for (uint32_t i = 0; i < SERVERS; i++)
        refuses(f, i);
    world_hand_over(f->world);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    WAIT(f, all_gone(f));
}

static void lose_answers(struct world *world, const char *kind, void *user)
{
    if (!strcmp(kind, user))
        world_lose(world);
}

/* Whether its question was lost or the answer to that. */
static void who_does_not_answer_keeps_the_group(void **state)
{
    char *const lost[] = { "Close", "Close-reply" };
    struct fixture *f = *state;
    struct answer answer;

    make(f);
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
        world_on_step(f->world, lose_answers, lost[i]);
        begin(f, &answer);
        WAIT(f, answer.done);
        failed(&answer, EP_DEADLINE_EXCEEDED, "nobody has answered");
        world_on_step(f->world, NULL, NULL);
        for (uint32_t k = 0; k < SERVERS; k++)
            WAIT(f, can_claim(f, k));
    }
}

static void what_a_leader_has_closed_the_next_one_opens(void **state)
{
    struct fixture *f = *state;
    const uint32_t first = span_leader(f), other = member(f);
    struct answer answer;

    make(f);
    world_keep(f->world, "Close-reply");
    begin(f, &answer);
    WAIT(f, world_kept(f->world) == MEMBERS);
    refuses(f, other);
    world_crash(f->servers[first].cluster);
    world_hand_over(f->world);
    span_stop(f, first);
    WAIT(f, can_claim(f, other));
    failed(&answer, EP_UNAVAILABLE, "");
    span_start(f, first);
    WAIT(f, span_all_ready(f));
}

static void on_aborted(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    (void)reply;
    assert_string_equal(error->text, "");
    *(bool *)user = true;
}

/* One that was given up before, and of which the news come late. */
static void an_abort_of_another_deletion_opens_nothing(void **state)
{
    struct fixture *f = *state;
    const uint32_t other = member(f);
    Ep__V1__AbortRequest abort = EP__V1__ABORT_REQUEST__INIT;
    char name[] = "moe";
    struct answer answer;
    bool aborted = false;

    make(f);
    world_keep(f->world, "Close-reply");
    begin(f, &answer);
    WAIT(f, world_kept(f->world) == MEMBERS);
    abort.group = name;
    abort.fence = ep_cluster_guard(f->servers[span_leader(f)].cluster).expected;
    abort.deletion = 1;
    ep_groups_abort(f->servers[other].groups, &abort, on_aborted, &aborted);
    WAIT(f, aborted);
    refuses(f, other);
    world_hand_over(f->world);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

static void a_server_that_does_not_know_the_question_is_not_waited_for(void **state)
{
    struct fixture *f = *state;
    struct answer answer;

    make(f);
    world_unlearn(f->servers[member(f)].cluster, "Close");
    begin(f, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    WAIT(f, all_gone(f));
}

/* ---- another group of the name ------------------------------------------------------------------------ */

static void on_detached(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    (void)rank, (void)epoch, (void)text;
    *(bool *)user |= event == EP_GROUP_DETACHED;
}

static void on_attached(const struct ep_error *error, void *user)
{
    (void)user;
    assert_string_equal(error->text, "");
}

static struct ep_membership *attach(struct fixture *f, uint32_t server, bool *detached)
{
    const struct ep_worker who = { .pid = getpid(), .uid = geteuid(), .name = "tester" };
    struct ep_membership *membership;

    assert_int_equal(ep_groups_claim(f->servers[server].groups, "moe", -1, &who, on_detached, detached, &membership, NULL),
                     EP_OK);
    ep_membership_attach(membership, &who, on_attached);
    return membership;
}

static void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    assert_string_equal(error->text, "");
    *(uint64_t *)user = n ? records[0].revision : UINT64_MAX;
}

static uint64_t reported_at(struct fixture *f, uint32_t server)
{
    uint64_t revision = 0;
    char key[64];

    snprintf(key, sizeof key, "groups/moe/members/%s", span_names[server]);
    ep_store_list(f->store, key, on_listed, &revision);
    WAIT(f, revision);
    return revision;
}

/* The leader has seen all that was there before. */
static void change_live(struct fixture *f)
{
    Ep__V1__GroupSpec spec = span_spec(64, 4);
    char field[] = "timeout_ms", *fields[] = { field };
    struct answer answer = { 0 };

    spec.timeout_ms = 7000;
    ep_groups_update(f->servers[span_leader(f)].groups, "moe", 0, &spec, fields, 1, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

static void make_another(struct fixture *f)
{
    const Ep__V1__GroupSpec spec = span_spec(64, 4);
    struct answer answer = { 0 };

    ep_groups_delete(f->servers[span_leader(f)].groups, "moe", true, NULL, span_on_answer, &answer);
    WAIT(f, answer.done && !ep_groups_get(f->servers[span_leader(f)].groups, "moe", NULL));
    assert_string_equal(answer.error.text, "");
    answer = (struct answer){ 0 };
    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

/* The server goes on with its own until it is told, and what it reports of that says nothing about the other one. */
static void who_missed_that_there_is_another_group_of_the_name(void **state)
{
    struct fixture *f = *state;
    const uint32_t leader = span_leader(f), away = SERVERS - 1;
    struct ep_membership *first, *second;
    bool told = false;
    uint64_t before;

    assert_int_not_equal(leader, away);
    make(f);
    first = attach(f, away, &told);
    second = attach(f, away, &told);
    span_hold_view(f, away, true);
    span_tear(f, away, leader);
    make_another(f);
    before = reported_at(f, away);
    ep_membership_release(first, "its worker left", false);
    WAIT(f, reported_at(f, away) != before);
    change_live(f);
    assert_string_equal(ep_groups_get(f->servers[leader].groups, "moe", NULL)->status->reason, "");
    assert_int_equal(ep_groups_get(f->servers[leader].groups, "moe", NULL)->status->phase, PHASE(READY));
    assert_false(told);
    span_hold_view(f, away, false);
    assert_true(told);
    assert_int_equal(ep_groups_get(f->servers[away].groups, "moe", NULL)->spec->ranks, 4);
    ep_membership_release(second, "its group is gone", false);
    WAIT(f, ep_node_memory_left(f->servers[away].node) == BUDGET);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, span_setup, span_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_worker_that_came_before_the_question_keeps_its_group),
        TEST(whoever_comes_after_the_question_is_refused),
        TEST(who_does_not_answer_keeps_the_group),
        TEST(what_a_leader_has_closed_the_next_one_opens),
        TEST(an_abort_of_another_deletion_opens_nothing),
        TEST(a_server_that_does_not_know_the_question_is_not_waited_for),
        TEST(who_missed_that_there_is_another_group_of_the_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
