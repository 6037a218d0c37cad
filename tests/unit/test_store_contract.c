/* What every store does: each case runs on sqlite and, where it is installed, on etcd. */
#include "store_fixture.h"

#include <unistd.h>

static int setup_etcd(void **state)
{
    struct fixture *f;

    fixture_setup(state);
    f = *state;
    f->on_etcd = true;
    f->answer_within_ms = 30000; /* no case waits until it is over */
    return 0;
}

/* ---- records ----------------------------------------------------------------------- */

static void revisions_grow_and_prefixes_select(void **state)
{
    struct fixture *f = fixture_begin(state);
    uint64_t first = put(f, "groups/a", "one", EP_STORE_ABSENT).revision;
    uint64_t second = put(f, "groups/b", "two", EP_STORE_ANY).revision;
    uint64_t third = put(f, "node/cordon", "", EP_STORE_ABSENT).revision;

    assert_true(0 < first && first < second && second < third);
    assert_string_equal(list(f, "groups/").text, "groups/a=one groups/b=two ");
    assert_string_equal(list(f, "").text, "groups/a=one groups/b=two node/cordon= ");
    assert_int_equal(list(f, "groups/").newest, second);
    assert_int_equal(list(f, "none/").n, 0);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_string_equal(list(f, "groups/").text, "groups/a=one groups/b=two ");
    assert_true(put(f, "x", "y", EP_STORE_ANY).revision > third);
}

static void a_write_needs_the_revision_it_expects(void **state)
{
    struct fixture *f = fixture_begin(state);
    char text[128];
    struct written w;
    uint64_t at = put(f, "a", "1", EP_STORE_ABSENT).revision;

    w = put(f, "a", "2", EP_STORE_ABSENT);
    assert_int_equal(w.error.status, EP_FAILED_PRECONDITION);
    snprintf(text, sizeof text, "a is in the store already, at revision %" PRIu64, at);
    assert_string_equal(w.error.text, text);
    w = put(f, "a", "2", 7777);
    snprintf(text, sizeof text, "a is at revision %" PRIu64 ", revision 7777 was expected", at);
    assert_string_equal(w.error.text, text);
    w = put(f, "b", "2", 7777);
    assert_string_equal(w.error.text, "b is not in the store, revision 7777 was expected");
    assert_int_equal(put(f, "a", "2", at).error.status, EP_OK);
    assert_int_equal(ep_store_health(f->store, NULL), EP_OK); /* none of that is the store's fault */
    assert_string_equal(list(f, "").text, "a=2 ");
}

static void a_commit_is_all_or_nothing(void **state)
{
    struct fixture *f = fixture_begin(state);
    const struct ep_store_write writes[] = {
        { .key = "a", .value = "new", .size = 3, .expected = EP_STORE_ANY },
        { .key = "b", .value = NULL, .size = 0, .expected = EP_STORE_ANY },
        { .key = "c", .value = "new", .size = 3, .expected = EP_STORE_ABSENT },
    };
    uint64_t before;

    put(f, "b", "old", EP_STORE_ANY);
    before = put(f, "c", "old", EP_STORE_ANY).revision;
    assert_int_equal(commit(f, writes, 3).error.status, EP_FAILED_PRECONDITION);
    assert_string_equal(list(f, "").text, "b=old c=old ");
    assert_true(commit(f, writes, 2).revision > before);
    assert_string_equal(list(f, "").text, "a=new c=old ");
    assert_int_equal(commit(f, NULL, 0).error.status, EP_OK);
}

static void a_check_writes_nothing_and_holds_the_others_up(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct ep_store_write writes[] = {
        { .key = "guard", .check_only = true },
        { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY },
    };

    writes[0].expected = put(f, "guard", "me", EP_STORE_ABSENT).revision;
    assert_int_equal(commit(f, writes, 2).error.status, EP_OK);
    assert_int_equal(put(f, "guard", "you", EP_STORE_ANY).error.status, EP_OK);
    writes[1].value = "2";
    assert_int_equal(commit(f, writes, 2).error.status, EP_FAILED_PRECONDITION);
    assert_string_equal(list(f, "").text, "a=1 guard=you ");
}

static void too_many_writes_are_refused(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct ep_store_write writes[EP_STORE_MAX_WRITES + 1];
    char keys[EP_STORE_MAX_WRITES + 1][8];
    struct written w;

    for (size_t i = 0; i <= EP_STORE_MAX_WRITES; i++) {
        snprintf(keys[i], sizeof keys[i], "k%zu", i);
        writes[i] =
            (struct ep_store_write){ .key = keys[i], .value = "v", .size = 1, .expected = EP_STORE_ABSENT };
    }
    w = commit(f, writes, EP_STORE_MAX_WRITES + 1);
    assert_int_equal(w.error.status, EP_INVALID_ARGUMENT);
    assert_text(w.error.text, "101 writes");
    assert_int_equal(commit(f, writes, EP_STORE_MAX_WRITES).error.status, EP_OK);
    assert_int_equal(list(f, "").n, EP_STORE_MAX_WRITES);
}

static void on_bytes(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    *(bool *)user =
        error->status == EP_OK && n == 1 && records[0].size == 3 && !memcmp(records[0].value, "\0\xff\n", 3);
}

static void values_are_any_bytes(void **state)
{
    struct fixture *f = fixture_begin(state);
    bool same = false;
    const struct ep_store_write write = {
        .key = "a", .value = "\0\xff\n", .size = 3, .expected = EP_STORE_ANY
    };

    commit(f, &write, 1);
    ep_store_list(f->store, "a", on_bytes, &same);
    fixture_close(f); /* finishes it */
    assert_true(same);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(put(f, "100%_", "1", EP_STORE_ANY).error.status, EP_OK);
    assert_int_equal(list(f, "%").n, 0); /* a prefix, not a pattern */
    assert_int_equal(list(f, "100%").n, 1);
}

struct order {
    int next, wrong;
};
struct step {
    struct order *order;
    int number;
};

static void in_order(struct step *step)
{
    step->order->wrong += step->order->next++ != step->number;
}

static void step_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    (void)error;
    (void)records;
    (void)n;
    in_order(user);
}

static void step_written(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)error;
    (void)revision;
    in_order(user);
}

static void callbacks_come_in_the_order_of_the_calls(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct order order = { 0 };
    struct step steps[100];
    const struct ep_store_write write = { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY };

    for (int i = 0; i < 100; i++) {
        steps[i] = (struct step){ &order, i };
        if (i % 3)
            ep_store_commit(f->store, &write, 1, step_written, &steps[i]);
        else
            ep_store_list(f->store, "", step_listed, &steps[i]);
    }
    fixture_close(f); /* finishes what was asked */
    assert_int_equal(order.next, 100);
    assert_int_equal(order.wrong, 0);
}

/* ---- watches ----------------------------------------------------------------------- */

static void a_watch_begins_with_the_whole_and_goes_on_with_changes(void **state)
{
    struct fixture *f = fixture_begin(state);
    const struct ep_store_write two[] = {
        { .key = "w/b", .value = "2", .size = 1, .expected = EP_STORE_ANY },
        { .key = "w/c", .value = "", .size = 0, .expected = EP_STORE_ANY },
        { .key = "x/c", .value = "3", .size = 1, .expected = EP_STORE_ANY },
    };
    struct seen seen = { 0 };
    struct ep_watch *watch;

    put(f, "w/a", "1", EP_STORE_ANY);
    put(f, "v/a", "1", EP_STORE_ANY);
    watch = ep_watch_open(f->store, "w/", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    commit(f, two, 3);
    put(f, "w/a", NULL, EP_STORE_ANY);
    put(f, "w/nothing", NULL, EP_STORE_ANY);
    put(f, "x/y", "9", EP_STORE_ANY);
    put(f, "w/z", "end", EP_STORE_ANY);
    RUN_UNTIL(f, seen.changes == 4);
    assert_string_equal(seen.text, "[w/a=1 ]w/b=2 w/c= | -w/a | w/z=end | ");
    assert_false(seen.disorder);
    ep_watch_close(watch);
    put(f, "w/z", "unseen", EP_STORE_ANY);
    assert_int_equal(seen.changes, 4);
}

static void a_watch_of_an_empty_store_says_so_once(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct seen seen = { 0 };
    struct ep_watch *watch = ep_watch_open(f->store, "w/", EP_STORE_BEGIN, on_changes, &seen);

    RUN_UNTIL(f, seen.calls == 1);
    put(f, "w/a", "1", EP_STORE_ANY);
    RUN_UNTIL(f, seen.calls == 2);
    assert_string_equal(seen.text, "[]w/a=1 | ");
    ep_watch_close(watch);
}

static void a_watch_goes_on_after_a_revision(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct seen seen = { 0 }, later = { 0 };
    struct ep_watch *watch = ep_watch_open(f->store, "w/", EP_STORE_BEGIN, on_changes, &seen);

    RUN_UNTIL(f, seen.calls == 1);
    put(f, "w/a", "1", EP_STORE_ANY);
    RUN_UNTIL(f, seen.changes == 1);
    ep_watch_close(watch);
    put(f, "w/a", "2", EP_STORE_ANY);
    put(f, "w/a", NULL, EP_STORE_ANY);
    watch = ep_watch_open(f->store, "w/", seen.newest, on_changes, &later);
    put(f, "w/b", "3", EP_STORE_ANY);
    RUN_UNTIL(f, later.changes == 3);
    assert_int_equal(later.wholes, 0);
    assert_false(later.disorder);
    ep_watch_close(watch);
}

static void a_watch_may_be_closed_before_it_has_begun(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct seen seen = { 0 };

    for (int i = 0; i < 5; i++)
        ep_watch_close(ep_watch_open(f->store, "", EP_STORE_BEGIN, on_changes, &seen));
    fixture_close(f);
    assert_int_equal(seen.calls, 0);
}

/* ---- sessions ---------------------------------------------------------------------- */

static struct ep_session *begin_session(struct fixture *f, struct told *told, uint64_t ttl_ms)
{
    struct ep_session *session = ep_session_open(f->store, ttl_ms, on_session, told);

    RUN_UNTIL(f, told->begun || told->failed);
    assert_string_equal(told->error.text, "");
    assert_true(ep_session_alive(session));
    return session;
}

static void a_sessions_records_go_with_it(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct told told = { 0 };
    struct seen seen = { 0 };
    struct ep_session *session = begin_session(f, &told, 20000);
    const struct ep_store_write writes[] = {
        { .key = "node/a", .value = "up", .size = 2, .expected = EP_STORE_ABSENT, .session = session },
        { .key = "other", .value = "stays", .size = 5, .expected = EP_STORE_ABSENT },
    };
    struct ep_watch *watch;

    assert_int_equal(commit(f, writes, 2).error.status, EP_OK);
    assert_int_equal(commit(f, writes, 1).error.status, EP_FAILED_PRECONDITION);
    watch = ep_watch_open(f->store, "", EP_STORE_BEGIN, on_changes, &seen);
    RUN_UNTIL(f, seen.calls == 1);
    ep_session_close(session);
    RUN_UNTIL(f, seen.changes == 1);
    assert_string_equal(seen.text, "[node/a=up other=stays ]-node/a | ");
    assert_string_equal(list(f, "").text, "other=stays ");
    ep_watch_close(watch);
}

/* What is written again for another session, or none, does not go with the first. */
static void a_record_goes_with_the_session_that_wrote_it_last(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct told one = { 0 }, two = { 0 };
    struct ep_session *first = begin_session(f, &one, 20000), *second = begin_session(f, &two, 20000);
    struct ep_store_write writes[] = {
        { .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY, .session = first },
        { .key = "b", .value = "1", .size = 1, .expected = EP_STORE_ANY, .session = first },
    };

    commit(f, writes, 2);
    writes[0].session = second;
    writes[1].session = NULL;
    assert_int_equal(commit(f, writes, 2).error.status, EP_OK);
    ep_session_close(first);
    assert_string_equal(list(f, "").text, "a=1 b=1 ");
    ep_session_close(second);
    assert_string_equal(list(f, "").text, "b=1 ");
}

static void a_session_ends_with_its_store(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct told told = { 0 };
    struct ep_session *session = begin_session(f, &told, 20000);
    const struct ep_store_write write = {
        .key = "a", .value = "1", .size = 1, .expected = EP_STORE_ANY, .session = session
    };

    commit(f, &write, 1);
    ep_session_close(session);
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(list(f, "").n, 0);
    assert_int_equal(told.begun, 1);
    assert_int_equal(told.failed, 0);
}

/* ---- elections --------------------------------------------------------------------- */

struct candidate {
    struct ep_session *session;
    struct ep_election *election;
    struct told told;
    unsigned calls;
    bool leading;
    char leader[32];
};

static void on_election(struct ep_election *election, bool leading, void *user)
{
    struct candidate *c = user;
    const char *leader = ep_election_leader(election);

    c->calls++;
    c->leading = leading;
    snprintf(c->leader, sizeof c->leader, "%s", leader ? leader : "");
}

static void run_for(struct fixture *f, struct candidate *c, const char *name)
{
    c->session = begin_session(f, &c->told, 20000);
    c->election = ep_election_open(f->store, c->session, "cluster/leader", name, on_election, c);
}

static struct written guarded(struct fixture *f, const struct candidate *c, const char *value)
{
    const struct ep_store_write writes[] = {
        ep_election_guard(c->election),
        { .key = "plan", .value = value, .size = strlen(value), .expected = EP_STORE_ANY },
    };

    return commit(f, writes, 2);
}

static void one_leads_and_the_other_takes_over(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct candidate a = { 0 }, b = { 0 };

    run_for(f, &a, "node-a");
    RUN_UNTIL(f, a.leading);
    assert_true(ep_election_leads(a.election));
    run_for(f, &b, "node-b");
    RUN_UNTIL(f, b.calls > 0);
    assert_false(ep_election_leads(b.election));
    assert_string_equal(b.leader, "node-a");
    assert_int_equal(guarded(f, &a, "a's").error.status, EP_OK);
    assert_int_equal(guarded(f, &b, "b's").error.status, EP_FAILED_PRECONDITION);
    ep_election_close(a.election);
    RUN_UNTIL(f, b.leading);
    assert_string_equal(b.leader, "node-b");
    assert_int_equal(guarded(f, &b, "b's").error.status, EP_OK);
    assert_string_equal(list(f, "plan").text, "plan=b's ");
    ep_election_close(b.election);
    ep_session_close(a.session);
    ep_session_close(b.session);
}

/* Whoever deletes the record takes the lead away, and the next term is another. */
static void a_lead_that_is_taken_away_is_told_and_run_for_again(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct candidate a = { 0 };
    struct ep_store_write old;

    run_for(f, &a, "node-a");
    RUN_UNTIL(f, a.leading);
    old = ep_election_guard(a.election);
    put(f, "cluster/leader", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, a.leading && ep_election_guard(a.election).expected > old.expected);
    assert_true(a.calls >= 2);
    ep_election_close(a.election);
    ep_session_close(a.session);
}

static void expect_led_by_another_of_its_name(struct fixture *f, const struct candidate *c)
{
    assert_string_equal(c->leader, "node-a");
    assert_false(ep_election_leads(c->election));
    assert_int_equal(guarded(f, c, "a's").error.status, EP_FAILED_PRECONDITION);
}

/* What a server of old has left, or one that should have another name: before this one has run, and after. */
static void a_lead_of_the_same_name_is_another_s(void **state)
{
    struct fixture *f = fixture_begin(state);
    struct candidate a = { 0 };

    put(f, "cluster/leader", "node-a", EP_STORE_ANY);
    run_for(f, &a, "node-a");
    RUN_UNTIL(f, a.calls > 0);
    expect_led_by_another_of_its_name(f, &a);
    put(f, "cluster/leader", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, a.leading);
    put(f, "cluster/leader", "node-a", EP_STORE_ANY);
    RUN_UNTIL(f, !a.leading);
    expect_led_by_another_of_its_name(f, &a);
    put(f, "cluster/leader", NULL, EP_STORE_ANY);
    RUN_UNTIL(f, a.leading);
    assert_int_equal(guarded(f, &a, "a's").error.status, EP_OK);
    ep_election_close(a.election);
    ep_session_close(a.session);
}

static void an_election_may_be_closed_at_once(void **state)
{
    struct fixture *f = fixture_begin(state);

    for (int i = 0; i < 5; i++) {
        struct candidate a = { 0 };

        run_for(f, &a, "node-a");
        fixture_run_ms(f, (uint64_t)i);
        ep_election_close(a.election);
        ep_session_close(a.session);
    }
    fixture_close(f);
    assert_int_equal(fixture_open(f, NULL), EP_OK);
    assert_int_equal(list(f, "").n, 0);
}

#define ON_SQLITE(name) FIXTURE_TEST(#name "_on_sqlite", name, fixture_setup)
#define ON_ETCD(name)   FIXTURE_TEST(#name "_on_etcd", name, setup_etcd)
#define CASES(ON)                                                                                            \
    ON(revisions_grow_and_prefixes_select), ON(a_write_needs_the_revision_it_expects),                       \
        ON(a_commit_is_all_or_nothing), ON(a_check_writes_nothing_and_holds_the_others_up),                  \
        ON(too_many_writes_are_refused), ON(values_are_any_bytes),                                           \
        ON(callbacks_come_in_the_order_of_the_calls),                                                        \
        ON(a_watch_begins_with_the_whole_and_goes_on_with_changes),                                          \
        ON(a_watch_of_an_empty_store_says_so_once), ON(a_watch_goes_on_after_a_revision),                    \
        ON(a_watch_may_be_closed_before_it_has_begun), ON(a_sessions_records_go_with_it),                    \
        ON(a_record_goes_with_the_session_that_wrote_it_last), ON(a_session_ends_with_its_store),            \
        ON(one_leads_and_the_other_takes_over), ON(a_lead_that_is_taken_away_is_told_and_run_for_again),     \
        ON(a_lead_of_the_same_name_is_another_s), ON(an_election_may_be_closed_at_once)

int main(void)
{
    const struct CMUnitTest tests[] = { CASES(ON_SQLITE), CASES(ON_ETCD) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
