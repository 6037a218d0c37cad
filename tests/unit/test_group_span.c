/*
 * Groups over several nodes: three servers of one world in this process.
 *
 * The walk: a change is made again and again, and each time a server ends at another step of it, the leader's commit
 * included, as does every other server at every step.  Whatever happens, the servers that are left agree on the group as
 * it was or as it was to be, what was acknowledged is there, and when the server is back, so is the whole group.
 */
#include "span_fixture.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_message.h"

#define OLD      64u /* hidden, before a change and after it */
#define NEW      128u
#define TOLD     1024u

/* ---- changes ------------------------------------------------------------------------------- */

enum kind { CREATE, UPDATE, DELETE, KINDS };

static void begin(struct fixture *f, enum kind kind, struct answer *answer)
{
    struct ep_groups *groups = f->servers[span_leader(f)].groups;
    const Ep__V1__GroupSpec spec = span_spec(NEW, 6);
    char hidden[] = "hidden", *fields[] = { hidden };

    if (kind == CREATE)
        ep_groups_create(groups, "moe", &spec, false, NULL, span_on_answer, answer);
    else if (kind == UPDATE)
        ep_groups_update(groups, "moe", 0, &spec, fields, 1, false, NULL, span_on_answer, answer);
    else
        ep_groups_delete(groups, "moe", false, NULL, span_on_answer, answer);
}

static void create(struct fixture *f, uint32_t hidden)
{
    const Ep__V1__GroupSpec spec = span_spec(hidden, 6);
    struct answer answer = { 0 };

    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
}

/* ---- what servers see ------------------------------------------------------------------------- */

static bool is_there(const struct fixture *f, uint32_t i)
{
    return f->servers[i].groups && !(f->crashed && i == f->victim);
}

/* 0: no group. */
static uint32_t hidden_at(const struct fixture *f, uint32_t i)
{
    const Ep__V1__Group *group = ep_groups_get(f->servers[i].groups, "moe", NULL);

    return group ? group->spec->hidden : 0;
}

static bool looks(const struct fixture *f, uint32_t i, uint32_t hidden, Ep__V1__Phase phase, uint64_t epoch)
{
    const Ep__V1__Group *group = ep_groups_get(f->servers[i].groups, "moe", NULL);

    if (!hidden)
        return !group;
    return group && group->spec->hidden == hidden && group->status->phase == phase && !group->status->n_draining_epochs &&
           (!epoch || group->status->epoch == epoch);
}

static bool all_look(const struct fixture *f, uint32_t hidden, Ep__V1__Phase phase)
{
    const Ep__V1__Group *group = NULL;
    uint64_t epoch;
    bool same = true;

    for (uint32_t i = 0; i < SERVERS && !group; i++)
        group = is_there(f, i) ? ep_groups_get(f->servers[i].groups, "moe", NULL) : NULL;
    epoch = group ? group->status->epoch : 0;
    for (uint32_t i = 0; i < SERVERS; i++)
        same &= !is_there(f, i) || looks(f, i, hidden, phase, epoch);
    return same;
}

static uint64_t used_at(const struct fixture *f, uint32_t i)
{
    return BUDGET - ep_node_memory_left(f->servers[i].node);
}

static bool all_use(const struct fixture *f, const uint64_t *bytes)
{
    bool same = true;

    for (uint32_t i = 0; i < SERVERS; i++)
        same &= !is_there(f, i) || used_at(f, i) == (bytes ? bytes[i] : 0);
    return same;
}

static bool all_agree(const struct fixture *f, uint32_t *hidden)
{
    bool first = true, same = true;

    for (uint32_t i = 0; i < SERVERS; i++) {
        if (!is_there(f, i))
            continue;
        same &= first || hidden_at(f, i) == *hidden;
        *hidden = first ? hidden_at(f, i) : *hidden;
        first = false;
    }
    return same;
}

/* ---- without a crash --------------------------------------------------------------------------- */

static void a_group_is_formed_on_all_nodes(void **state)
{
    struct fixture *f = *state;

    create(f, OLD);
    for (uint32_t i = 0; i < SERVERS; i++) {
        const Ep__V1__Group *group = ep_groups_get(f->servers[i].groups, "moe", NULL);

        assert_non_null(group); /* as soon as it is answered */
        assert_int_equal(group->status->phase, PHASE(READY));
        for (uint32_t r = 0; r < 6; r++) {
            assert_string_equal(group->status->ranks[r]->node, span_names[r / 2]);
            assert_int_equal(group->status->ranks[r]->state, STATE(EXPECTED));
        }
        assert_true(used_at(f, i) > 0);
    }
}

static void only_the_leader_makes_changes(void **state)
{
    struct fixture *f = *state;
    const Ep__V1__GroupSpec spec = span_spec(OLD, 6);
    struct answer answer = { 0 };

    ep_groups_create(f->servers[(span_leader(f) + 1) % SERVERS].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    assert_true(answer.done);
    assert_int_equal(answer.error.status, EP_UNAVAILABLE);
    assert_non_null(strstr(answer.error.text, "leads, not"));
}

/* ---- before a change ----------------------------------------------------------------------------- */

struct marks {
    bool done;
    size_t n;
};

static void on_marks(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    (void)error, (void)records;
    *(struct marks *)user = (struct marks){ .done = true, .n = n };
}

struct told {
    bool done;
    struct ep_error error;
};

static void on_time(const struct ep_error *error, void *user)
{
    *(struct told *)user = (struct told){ .done = true, .error = *error };
}

static void before_change(struct ep_groups *groups, uint32_t within_ms, struct told *told)
{
    *told = (struct told){ 0 };
    ep_groups_before_change(groups, "moe", within_ms, on_time, told);
}

/* The record of the mark is in the store, and the table has not come to it. */
static bool is_marked(struct fixture *f)
{
    struct marks marks = { 0 };

    ep_store_list(f->store, "groups/.mark", on_marks, &marks);
    WAIT(f, marks.done);
    return marks.n > 0;
}

static void a_change_waits_until_the_leader_knows_what_the_store_has(void **state)
{
    struct fixture *f = *state;
    struct server *leader = &f->servers[span_leader(f)];
    struct told told;

    world_hold_table(leader->cluster, true);
    before_change(leader->groups, 40000, &told);
    WAIT(f, is_marked(f));
    assert_false(told.done);
    world_hold_table(leader->cluster, false);
    WAIT(f, told.done);
    assert_string_equal(told.error.text, "");
}

static void a_leader_that_stays_behind_refuses_changes(void **state)
{
    struct fixture *f = *state;
    struct server *leader = &f->servers[span_leader(f)];
    struct told told;

    world_hold_table(leader->cluster, true);
    before_change(leader->groups, 500, &told);
    WAIT(f, told.done);
    world_hold_table(leader->cluster, false);
    assert_int_equal(told.error.status, EP_UNAVAILABLE);
    assert_non_null(strstr(told.error.text, "does not tell node"));
    assert_non_null(strstr(told.error.text, "try again"));
}

/* Asks as soon as it hears that the leader has gone, which another is not yet. */
struct gap {
    struct ep_groups *groups;
    struct ep_cluster *cluster;
    bool asked;
    struct told told;
};

static void on_gap(enum ep_cluster_event event, const struct ep_cluster_node *node, void *user)
{
    struct gap *gap = user;

    (void)node;
    if (event != EP_CLUSTER_LEADER || gap->asked || ep_cluster_leader(gap->cluster))
        return;
    gap->asked = true;
    before_change(gap->groups, 40000, &gap->told);
}

static void a_change_waits_until_somebody_leads(void **state)
{
    struct fixture *f = *state;
    const uint32_t leader = span_leader(f), other = (leader + 1) % SERVERS;
    struct gap gap = { .groups = f->servers[other].groups, .cluster = f->servers[other].cluster };
    struct ep_cluster_watch *watch = ep_cluster_watch(gap.cluster, on_gap, &gap);

    span_stop(f, leader);
    WAIT(f, gap.told.done);
    ep_cluster_unwatch(watch);
    assert_string_equal(gap.told.error.text, "");
    assert_non_null(ep_cluster_leader(gap.cluster));
}

/* ---- before a read ------------------------------------------------------------------------------- */

static void before_read(struct ep_groups *groups, uint32_t within_ms, struct told *told)
{
    *told = (struct told){ 0 };
    ep_groups_before_read(groups, within_ms, on_time, told);
}

static void a_read_waits_until_the_server_knows_what_was_acknowledged(void **state)
{
    struct fixture *f = *state;
    struct server *other = &f->servers[(span_leader(f) + 1) % SERVERS];
    struct told first, second;

    create(f, OLD);
    world_hold_table(other->cluster, true);
    before_read(other->groups, 40000, &first);
    before_read(other->groups, 500, &second);
    WAIT(f, second.done);
    assert_int_equal(second.error.status, EP_UNAVAILABLE);
    assert_non_null(strstr(second.error.text, "does not tell node"));
    assert_false(first.done);
    before_read(other->groups, 40000, &second);
    world_hold_table(other->cluster, false);
    WAIT(f, first.done && second.done);
    assert_string_equal(first.error.text, "");
    assert_string_equal(second.error.text, "");
}

static void on_mark(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    (void)error;
    assert_int_equal(n, 1);
    *(uint64_t *)user = records[0].revision;
}

static uint64_t marked_at(struct fixture *f)
{
    uint64_t revision = 0;

    ep_store_list(f->store, "groups/.mark", on_mark, &revision);
    WAIT(f, revision);
    return revision;
}

/* Else a read would not wait for it. */
static void each_change_is_written_with_the_mark(void **state)
{
    struct fixture *f = *state;
    struct answer answer = { 0 };
    uint64_t created;

    create(f, OLD);
    created = marked_at(f);
    assert_true(created >= ep_groups_get(f->servers[0].groups, "moe", NULL)->revision);
    begin(f, UPDATE, &answer);
    WAIT(f, answer.done);
    assert_true(marked_at(f) >= ep_groups_get(f->servers[0].groups, "moe", NULL)->revision);
    created = marked_at(f);
    answer = (struct answer){ 0 };
    begin(f, DELETE, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    assert_true(marked_at(f) > created);
}

/* ---- a store that was set back ------------------------------------------------------------------------ */

static void on_report_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    (void)records;
    assert_string_equal(error->text, "");
    *(int *)user = (int)n;
}

static bool is_reported(struct fixture *f, const char *key)
{
    int n = -1;

    ep_store_list(f->store, key, on_report_listed, &n);
    WAIT(f, n >= 0);
    return n > 0;
}

/* Which its session has outlived. */
static void what_a_node_reported_is_told_again_where_the_store_has_lost_it(void **state)
{
    struct fixture *f = *state;
    const uint32_t other = (span_leader(f) + 1) % SERVERS;
    char key[64];
    struct ep_store_write gone = { .key = key, .expected = EP_STORE_ANY };

    create(f, OLD);
    snprintf(key, sizeof key, "groups/moe/members/%s", span_names[other]);
    WAIT(f, is_reported(f, key));
    span_hold_view(f, other, true);
    ep_store_commit(f->store, &gone, 1, NULL, NULL);
    assert_false(is_reported(f, key));
    span_hold_view(f, other, false);
    WAIT(f, is_reported(f, key));
}

/* ---- refusals ------------------------------------------------------------------------------------- */

static void a_member_that_cannot_take_part_refuses_for_all(void **state)
{
    struct fixture *f = *state;
    const uint32_t leader = span_leader(f), other = (leader + 1) % SERVERS;
    Ep__V1__GroupSpec spec = span_spec(OLD, 6);
    struct answer answer = { 0 };

    /* More than the leader knows of is in use there. */
    assert_int_equal(ep_node_reserve(f->servers[other].node, 0, BUDGET, NULL), EP_OK);
    spec.placement = NULL;
    ep_groups_create(f->servers[leader].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    ep_node_release(f->servers[other].node, 0, BUDGET);
    assert_int_equal(answer.error.status, EP_RESOURCE_EXHAUSTED);
    WAIT(f, all_use(f, NULL));
    assert_true(all_look(f, 0, PHASE(READY)));
}

/* ---- the walk ------------------------------------------------------------------------------------ */

static void on_step_to_lose(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    if (f->steps++ == f->crash_at && strcmp(kind, "commit") != 0) {
        f->lost = true;
        world_lose(world);
    }
}

static void on_step(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    (void)world, (void)kind;
    if (f->steps++ != f->crash_at)
        return;
    f->crashed = true;
    world_crash(f->servers[f->victim].cluster);
}

/* What each kind of change leaves in use of memory, by server; learnt without a crash. */
struct usage {
    uint64_t old[SERVERS], new[SERVERS];
};

static void learn(const struct fixture *f, uint64_t *bytes)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        bytes[i] = used_at(f, i);
}

/* The servers that are left agree, and have nothing of what was not decided. */
static void check_left(struct fixture *f, enum kind kind, const struct answer *answer, uint32_t *hidden)
{
    const uint32_t before = kind == CREATE ? 0 : OLD, after = kind == DELETE ? 0 : NEW;

    WAIT(f, span_leader(f) < SERVERS);
    WAIT(f, all_agree(f, hidden));
    if (*hidden != before && *hidden != after)
        fail_msg("victim %u, step %u: hidden is %u", f->victim, f->crash_at, *hidden);
    if (answer->done && !answer->error.status && *hidden != after)
        fail_msg("victim %u, step %u: what was acknowledged is not there", f->victim, f->crash_at);
}

static void check_whole(struct fixture *f, uint32_t *hidden, const struct usage *usage)
{
    /* All of it at once: what was sent before the crash may still be decided. */
    WAIT(f, span_all_ready(f) && all_agree(f, hidden) && all_look(f, *hidden, PHASE(READY)) &&
                all_use(f, !*hidden ? NULL : *hidden == OLD ? usage->old : usage->new));
}

/* False: the change takes fewer steps. */
static bool crash_once(struct fixture *f, enum kind kind, uint32_t victim, uint32_t at, const struct usage *usage)
{
    struct answer answer = { 0 };
    uint32_t hidden = 0;
    bool crashed;

    if (kind != CREATE)
        create(f, OLD);
    f->steps = 0;
    f->victim = victim;
    f->crash_at = at;
    world_on_step(f->world, on_step, f);
    begin(f, kind, &answer);
    WAIT(f, answer.done || f->crashed);
    f->crash_at = NO_STEP;
    crashed = f->crashed;
    if (crashed) {
        span_stop(f, victim);
        check_left(f, kind, &answer, &hidden);
        f->crashed = false;
        span_start(f, victim);
    }
    check_whole(f, &hidden, usage);
    world_on_step(f->world, NULL, NULL);
    return crashed;
}

/* Whoever leads now may be in the middle of forming it anew, or lead no more. */
static void clear(struct fixture *f)
{
    struct answer answer;

    do {
        answer = (struct answer){ 0 };
        uv_run(&f->loop, UV_RUN_ONCE);
        WAIT(f, span_leader(f) < SERVERS);
        begin(f, DELETE, &answer);
        WAIT(f, answer.done);
    } while (answer.error.status == EP_FAILED_PRECONDITION || answer.error.status == EP_UNAVAILABLE);
    WAIT(f, all_look(f, 0, PHASE(READY)) && all_use(f, NULL));
}

/* ---- offers that are out of date ------------------------------------------------------------------- */

static void on_step_to_offer(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    (void)world;
    f->steps += !strcmp(kind, "Prepare");
    if (!strcmp(kind, "Prepare-reply"))
        world_hold_offer(f->servers[f->victim].cluster, false);
}

/* Four ranks need two nodes of three, and one that is not the leader's has less than it has offered. */
static uint32_t create_beside(struct fixture *f, uint32_t full)
{
    const Ep__V1__GroupSpec spec = span_spec(OLD, 4);
    struct server *other = &f->servers[full];
    struct answer answer = { 0 };
    const Ep__V1__Group *group;

    f->victim = full;
    f->steps = 0;
    world_hold_offer(other->cluster, true);
    assert_int_equal(ep_node_reserve(other->node, 0, BUDGET, NULL), EP_OK);
    world_on_step(f->world, on_step_to_offer, f);
    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    world_on_step(f->world, NULL, NULL);
    world_hold_offer(other->cluster, false);
    ep_node_release(other->node, 0, BUDGET);
    assert_string_equal(answer.error.text, "");
    group = ep_groups_get(f->servers[span_leader(f)].groups, "moe", NULL);
    for (uint32_t r = 0; r < 4; r++)
        assert_string_not_equal(group->status->ranks[r]->node, span_names[full]);
    clear(f);
    return f->steps;
}

static void a_plan_by_an_offer_that_is_out_of_date_is_made_again(void **state)
{
    struct fixture *f = *state;
    const uint32_t leader = span_leader(f), first = (leader + 1) % SERVERS, second = (leader + 2) % SERVERS;
    const uint32_t steps = create_beside(f, first) + create_beside(f, second);

    assert_true(steps > 2); /* one of the two was in the first plan */
}

static void count_prepare(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    (void)world;
    f->steps += !strcmp(kind, "Prepare");
}

/* A node has room for one of these groups, and no report tells of them before they are formed. */
static void changes_at_once_do_not_plan_on_the_same_memory(void **state)
{
    struct fixture *f = *state;
    struct ep_groups *leader = f->servers[span_leader(f)].groups;
    Ep__V1__GroupSpec spec = span_spec(OLD, 1);
    struct answer answers[SERVERS] = { 0 };
    bool taken[SERVERS] = { false };

    spec.arena_bytes = BUDGET / 10 * 6;
    f->steps = 0;
    world_on_step(f->world, count_prepare, f);
    for (uint32_t i = 0; i < SERVERS; i++)
        ep_groups_create(leader, span_names[i], &spec, false, NULL, span_on_answer, &answers[i]);
    for (uint32_t i = 0; i < SERVERS; i++)
        WAIT(f, answers[i].done);
    world_on_step(f->world, NULL, NULL);
    assert_int_equal(f->steps, SERVERS - 1); /* the leader's own part, and no plan was made again */
    for (uint32_t i = 0; i < SERVERS; i++) {
        const char *node = ep_groups_get(leader, span_names[i], NULL)->status->ranks[0]->node;

        assert_string_equal(answers[i].error.text, "");
        for (uint32_t n = 0; n < SERVERS; n++)
            if (!strcmp(node, span_names[n])) {
                assert_false(taken[n]);
                taken[n] = true;
            }
    }
    for (uint32_t i = 0; i < SERVERS; i++) {
        struct answer gone = { 0 };

        ep_groups_delete(leader, span_names[i], false, NULL, span_on_answer, &gone);
        WAIT(f, gone.done);
        assert_string_equal(gone.error.text, "");
    }
    for (uint32_t i = 0; i < SERVERS; i++)
        WAIT(f, used_at(f, i) == 0);
}

static Ep__V1__NodeInfo told_of(struct fixture *f, uint32_t by, uint32_t node)
{
    Ep__V1__NodeInfo info;

    ep_node_info(f->servers[node].node, &info);
    ep_groups_untell(f->servers[node].groups, &info);
    ep_groups_describe_other(f->servers[by].groups, span_names[node], &info);
    return info;
}

/* Server `by` knows of the memory that node `node` has in use. */
static bool knows_memory(struct fixture *f, uint32_t by, uint32_t node)
{
    Ep__V1__NodeInfo info = told_of(f, by, node);
    const bool known = info.memory_used_bytes == used_at(f, node) &&
                       info.devices[0]->used_bytes + info.devices[1]->used_bytes == used_at(f, node);

    ep_node_info_clear(&info);
    return known;
}

static bool all_know_memory(struct fixture *f)
{
    for (uint32_t by = 0; by < SERVERS; by++)
        for (uint32_t node = 0; node < SERVERS; node++)
            if (by != node && !knows_memory(f, by, node))
                return false;
    return true;
}

static void all_servers_know_what_groups_take_of_each_node(void **state)
{
    struct fixture *f = *state;
    struct answer answer = { 0 };

    create(f, OLD);
    assert_true(used_at(f, 0) > 0);
    WAIT(f, all_know_memory(f));
    begin(f, UPDATE, &answer); /* the old epoch's is given back, later than its report may be written */
    WAIT(f, answer.done && all_look(f, NEW, PHASE(READY)));
    WAIT(f, all_know_memory(f));
    clear(f);
    WAIT(f, all_know_memory(f));
    assert_int_equal(used_at(f, 0), 0);
}

static struct usage learn_usage(struct fixture *f)
{
    struct answer answer = { 0 };
    struct usage usage;

    create(f, OLD);
    learn(f, usage.old);
    begin(f, UPDATE, &answer);
    WAIT(f, answer.done && all_look(f, NEW, PHASE(READY)));
    WAIT(f, used_at(f, 0) != usage.old[0]);
    clear(f);
    create(f, NEW);
    learn(f, usage.new);
    clear(f);
    return usage;
}

static void walk(struct fixture *f, enum kind kind)
{
    const struct usage usage = learn_usage(f);

    for (uint32_t victim = 0; victim < SERVERS; victim++) {
        uint32_t at = 0;

        for (bool crashed = true; crashed; at++) {
            crashed = crash_once(f, kind, victim, at, &usage);
            clear(f);
        }
        assert_true(at > 1); /* it had steps */
    }
}

typedef void (*step_fn)(struct world *world, const char *kind, void *user);

/* at_step() does something at step `at`, and nobody ends.  False: the change takes fewer steps. */
static bool disturb_once(struct fixture *f, enum kind kind, step_fn at_step, uint32_t at, const struct usage *usage,
                         struct answer *answer)
{
    uint32_t hidden = 0;

    *answer = (struct answer){ 0 };
    if (kind != CREATE)
        create(f, OLD);
    f->steps = 0;
    f->crash_at = at;
    f->lost = false;
    world_on_step(f->world, at_step, f);
    begin(f, kind, answer);
    WAIT(f, answer->done);
    world_on_step(f->world, NULL, NULL);
    check_left(f, kind, answer, &hidden);
    check_whole(f, &hidden, usage);
    return f->steps > at;
}

static void disturb(struct fixture *f, step_fn at_step, void (*check)(const struct answer *answer, uint32_t at))
{
    const struct usage usage = learn_usage(f);

    for (int kind = 0; kind < KINDS; kind++) {
        bool more = true;

        for (uint32_t at = 0; more; at++) {
            struct answer answer;

            more = disturb_once(f, (enum kind)kind, at_step, at, &usage, &answer);
            check(&answer, at);
            clear(f);
        }
    }
}

static void any_answer(const struct answer *answer, uint32_t at)
{
    (void)answer, (void)at;
}

static void on_progress(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user)
{
    char *told = user;
    const char *at = strstr(group->status->reason, "formed: ");

    (void)type;
    if (!at)
        return;
    at += strlen("formed: ");
    /* Members connect on threads, so who is done first is not known. */
    snprintf(told + strlen(told), TOLD - strlen(told), "%.*s|",
             (int)(strncmp(at, "CONNECT", 7) ? strlen(at) : strcspn(at, ":")), at);
}

static void who_a_step_waits_for_is_told(void **state)
{
    struct fixture *f = *state;
    struct answer answer = { 0 };
    char told[TOLD] = "", expected[TOLD];
    const char *first, *last;
    struct ep_group_watch *watch;
    uint32_t leader;

    create(f, OLD);
    leader = span_leader(f); /* its own answer comes first */
    first = span_names[leader == 0], last = span_names[leader == 2 ? 1 : 2];
    watch = ep_groups_watch(f->servers[leader].groups, on_progress, told);
    assert_non_null(watch);
    begin(f, UPDATE, &answer);
    WAIT(f, answer.done);
    ep_groups_unwatch(watch);
    snprintf(expected, sizeof expected,
             "PREPARE waits for 3 of 3 nodes: a, b, c|PREPARE waits for 2 of 3 nodes: %s, %s|"
             "PREPARE waits for 1 of 3 nodes: %s|CONNECT waits for 3 of 3 nodes|CONNECT waits for 2 of 3 nodes|"
             "CONNECT waits for 1 of 3 nodes|COMMIT is in the store's hands|", first, last, last);
    assert_string_equal(told, expected);
}

static void whichever_message_of_a_change_is_lost(void **state)
{
    disturb(*state, on_step_to_lose, any_answer);
}

static void not_needed(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)error, (void)revision, (void)user;
}

/* At the first answer. */
static void on_step_to_hold(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    if (!strcmp(kind, "Prepare-reply") && f->steps++ == 0)
        world_hold(world, true);
}

/* What a leader of an earlier term has acknowledged, and the watch tells late. */
static void write_spec(struct fixture *f, const Ep__V1__GroupSpec *spec)
{
    Ep__V1__Group group = EP__V1__GROUP__INIT;
    struct ep_store_write write = { .key = "groups/moe/spec", .expected = EP_STORE_ANY };
    char name[] = "moe";
    void *packed;

    group.name = name;
    group.spec = (Ep__V1__GroupSpec *)(uintptr_t)spec; /* only packed */
    packed = ep_message_pack(&group.base, &write.size);
    write.value = packed;
    ep_store_commit(f->store, &write, 1, not_needed, NULL);
    free(packed);
}

static uint64_t revision_at(const struct fixture *f, uint32_t i)
{
    return ep_groups_get(f->servers[i].groups, "moe", NULL)->revision;
}

static void a_change_does_not_undo_what_the_watch_tells_while_it_is_under_way(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec between = span_spec(OLD, 6);
    struct answer answer = { 0 };
    uint64_t judged;
    uint32_t leader;

    create(f, OLD);
    leader = span_leader(f);
    judged = revision_at(f, leader);
    f->steps = 0;
    world_on_step(f->world, on_step_to_hold, f);
    begin(f, UPDATE, &answer);
    WAIT(f, f->steps);
    between.timeout_ms = 12345;
    write_spec(f, &between);
    WAIT(f, revision_at(f, leader) > judged);
    judged = revision_at(f, leader);
    world_on_step(f->world, NULL, NULL);
    world_hold(f->world, false);
    WAIT(f, answer.done);
    assert_int_equal(answer.error.status, EP_FAILED_PRECONDITION);
    assert_int_equal(revision_at(f, leader), judged);
    WAIT(f, all_look(f, OLD, PHASE(READY)));
}

/* Who leads loses the lead, perhaps to win it again, and goes on with what it does. */
static void on_step_to_depose(struct world *world, const char *kind, void *user)
{
    const struct ep_store_write write = { .key = "leader", .expected = EP_STORE_ANY };
    struct fixture *f = user;

    (void)world, (void)kind;
    if (f->steps++ == f->crash_at)
        ep_store_commit(f->store, &write, 1, not_needed, NULL);
}

static void made_or_to_be_tried_again(const struct answer *answer, uint32_t at)
{
    if (answer->error.status && !strstr(answer->error.text, "try again"))
        fail_msg("step %u: \"%s\" does not say that it may be tried again", at, answer->error.text);
}

static void whenever_the_lead_is_lost_the_change_is_made_or_may_be_tried_again(void **state)
{
    disturb(*state, on_step_to_depose, made_or_to_be_tried_again);
}

/* At the first answer. */
static void on_step_to_depose_and_hold(struct world *world, const char *kind, void *user)
{
    struct fixture *f = user;

    if (strcmp(kind, "Prepare-reply") != 0 || f->steps)
        return;
    on_step_to_depose(world, kind, user);
    world_hold(world, true);
}

/* Who has won the lead since that term; SERVERS: nobody yet.  Between two terms there may be no moment to see. */
static uint32_t leader_since(const struct fixture *f, uint64_t term)
{
    const uint32_t i = span_leader(f);

    return i < SERVERS && ep_cluster_term(f->servers[i].cluster) > term ? i : SERVERS;
}

/* Who has won clears the field, and is heard after the change was given up: its own part is the old leader's to drop. */
static void a_creation_that_is_given_up_when_another_has_won_leaves_nothing(void **state)
{
    struct fixture *f = *state;
    uint32_t old, won;

    do {
        struct answer answer = { 0 };
        uint64_t term;

        f->steps = f->crash_at = 0;
        WAIT(f, span_leader(f) < SERVERS);
        old = span_leader(f);
        term = ep_cluster_term(f->servers[old].cluster);
        world_on_step(f->world, on_step_to_depose_and_hold, f);
        begin(f, CREATE, &answer);
        WAIT(f, leader_since(f, term) < SERVERS);
        won = leader_since(f, term);
        assert_true(used_at(f, old) > 0);
        world_on_step(f->world, NULL, NULL);
        world_hold(f->world, false);
        WAIT(f, answer.done);
        made_or_to_be_tried_again(&answer, 0);
        assert_int_not_equal(answer.error.status, EP_OK);
        WAIT(f, all_look(f, 0, PHASE(READY)) && all_use(f, NULL));
    } while (won == old);
    create(f, OLD);
    clear(f);
}

static void whoever_ends_at_whatever_step_of_a_creation(void **state)
{
    walk(*state, CREATE);
}

static void whoever_ends_at_whatever_step_of_an_update(void **state)
{
    walk(*state, UPDATE);
}

static void whoever_ends_at_whatever_step_of_a_deletion(void **state)
{
    walk(*state, DELETE);
}

/* ---- workers ------------------------------------------------------------------------------------- */

struct worker {
    struct ep_membership *membership;
    struct ep_error error;
    bool answered;
    unsigned lost, joined, epochs, detached;
};

static void on_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    struct worker *worker = user;

    (void)rank, (void)epoch, (void)text;
    worker->lost += event == EP_GROUP_RANK_LOST;
    worker->joined += event == EP_GROUP_RANK_JOINED;
    worker->epochs += event == EP_GROUP_EPOCH;
    worker->detached += event == EP_GROUP_DETACHED;
}

static void on_attached(const struct ep_error *error, void *user)
{
    struct worker *worker = user;

    worker->answered = true;
    worker->error = *error;
}

static struct ep_worker identity(void)
{
    return (struct ep_worker){ .pid = getpid(), .uid = geteuid(), .name = "tester" };
}

/* False: not yet. */
static bool claim(struct fixture *f, struct worker *worker, uint32_t rank)
{
    const struct ep_worker who = identity();

    *worker = (struct worker){ 0 };
    return ep_groups_claim(f->servers[rank / 2].groups, "moe", (int32_t)rank, &who, on_event, worker,
                           &worker->membership, NULL) == EP_OK;
}

static void ask_to_attach(struct fixture *f, struct worker *worker, uint32_t rank)
{
    const struct ep_worker who = identity();

    WAIT(f, claim(f, worker, rank));
    ep_membership_attach(worker->membership, &who, on_attached);
}

static void attach(struct fixture *f, struct worker *worker, uint32_t rank)
{
    ask_to_attach(f, worker, rank);
    WAIT(f, worker->answered);
    assert_string_equal(worker->error.text, "");
}

static void leave(struct worker *worker)
{
    ep_membership_release(worker->membership, "its worker left", false);
    worker->membership = NULL;
}

static bool state_everywhere(const struct fixture *f, uint32_t rank, Ep__V1__RankState wanted)
{
    bool same = true;

    for (uint32_t i = 0; i < SERVERS; i++) {
        const Ep__V1__Group *group = is_there(f, i) ? ep_groups_get(f->servers[i].groups, "moe", NULL) : NULL;

        same &= !is_there(f, i) || (group && group->status->ranks[rank]->state == wanted);
    }
    return same;
}

static void attach_all(struct fixture *f, struct worker *workers)
{
    for (uint32_t r = 0; r < 6; r++)
        attach(f, &workers[r], r);
    for (uint32_t r = 0; r < 6; r++)
        WAIT(f, state_everywhere(f, r, STATE(ATTACHED)));
}

static void release_all(struct worker *workers)
{
    for (uint32_t r = 0; r < 6; r++)
        if (workers[r].membership)
            leave(&workers[r]);
}

static void a_rank_is_claimed_on_its_node_only(void **state)
{
    struct fixture *f = *state;
    const struct ep_worker who = identity();
    struct ep_error error = EP_ERROR_INIT;
    struct ep_membership_info info;
    struct worker w = { 0 };

    create(f, OLD);
    assert_int_equal(ep_groups_claim(f->servers[0].groups, "moe", 2, &who, on_event, &w, &w.membership, &error),
                     EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "rank 2 of group moe is on node b, this is node a"));
    assert_int_equal(ep_groups_claim(f->servers[1].groups, "moe", -1, &who, on_event, &w, &w.membership, &error), EP_OK);
    ep_membership_info(w.membership, &info);
    assert_int_equal(info.rank, 2);
    leave(&w);
}

static void a_rank_that_left_is_taken_in_again_by_all(void **state)
{
    struct fixture *f = *state;
    struct worker w[6];

    create(f, OLD);
    attach_all(f, w);
    leave(&w[0]);
    WAIT(f, state_everywhere(f, 0, STATE(ABSENT)));
    WAIT(f, w[1].lost == 1 && w[2].lost == 1 && w[5].lost == 1);
    for (uint32_t i = 0; i < SERVERS; i++)
        assert_int_equal(ep_groups_get(f->servers[i].groups, "moe", NULL)->status->phase, PHASE(DEGRADED));
    w[2].joined = w[5].joined = 0;
    attach(f, &w[0], 0);
    WAIT(f, state_everywhere(f, 0, STATE(ATTACHED)));
    WAIT(f, w[2].joined == 1 && w[5].joined == 1);
    WAIT(f, all_look(f, OLD, PHASE(READY)));
    release_all(w);
}

static void when_all_have_left_all_are_expected_in_a_further_epoch(void **state)
{
    struct fixture *f = *state;
    struct worker w[6];

    create(f, OLD);
    attach_all(f, w);
    release_all(w);
    for (uint32_t r = 0; r < 6; r++)
        WAIT(f, state_everywhere(f, r, STATE(EXPECTED)));
    for (uint32_t i = 0; i < SERVERS; i++)
        assert_int_equal(ep_groups_get(f->servers[i].groups, "moe", NULL)->status->epoch, 2);
}

static void whichever_message_of_a_join_is_lost(void **state)
{
    struct fixture *f = *state;
    struct worker w[6];
    bool more = true;

    create(f, OLD);
    attach_all(f, w);
    for (uint32_t at = 0; more; at++) {
        leave(&w[0]);
        WAIT(f, state_everywhere(f, 0, STATE(ABSENT)));
        f->steps = 0;
        f->crash_at = at;
        world_on_step(f->world, on_step_to_lose, f);
        attach(f, &w[0], 0);
        world_on_step(f->world, NULL, NULL);
        WAIT(f, state_everywhere(f, 0, STATE(ATTACHED)));
        more = f->steps > at;
    }
    release_all(w);
}

/* Who joins, one of those who take it in, or the leader, at each step; at the end all are together again. */
static bool crash_in_join(struct fixture *f, uint32_t victim, uint32_t at)
{
    struct worker w[6];

    create(f, OLD);
    attach_all(f, w);
    leave(&w[0]);
    WAIT(f, state_everywhere(f, 0, STATE(ABSENT)));
    f->steps = 0;
    f->victim = victim;
    f->crash_at = at;
    ask_to_attach(f, &w[0], 0);
    world_on_step(f->world, on_step, f);
    WAIT(f, w[0].answered || f->crashed);
    world_on_step(f->world, NULL, NULL);
    if (!f->crashed) {
        release_all(w);
        return false;
    }
    span_stop(f, victim);
    WAIT(f, w[0].answered || victim == 0);
    if (victim != 0)
        assert_string_equal(w[0].error.text, ""); /* without those who are not there */
    for (uint32_t r = 0; r < 6; r++)
        if (r / 2 == victim)
            ep_membership_release(w[r].membership, "gone with its server", false), w[r].membership = NULL;
    f->crashed = false;
    span_start(f, victim);
    WAIT(f, span_all_ready(f));
    release_all(w);
    WAIT(f, all_look(f, OLD, PHASE(READY)));
    return true;
}

static void whoever_ends_at_whatever_step_of_a_join(void **state)
{
    struct fixture *f = *state;

    for (uint32_t victim = 0; victim < SERVERS; victim++) {
        bool crashed = true;

        for (uint32_t at = 0; crashed; at++) {
            crashed = crash_in_join(f, victim, at);
            clear(f);
        }
    }
}

/* ---- terms ----------------------------------------------------------------------------------------- */

static void on_called(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct answer *answer = user;

    (void)reply;
    answer->done = true;
    answer->error = *error;
}

static void refuse_forged(struct fixture *f, uint32_t server, uint64_t fence)
{
    struct ep_groups *groups = f->servers[server].groups;
    Ep__V1__AbortRequest abort = EP__V1__ABORT_REQUEST__INIT;
    Ep__V1__TurnRequest turn = EP__V1__TURN_REQUEST__INIT;
    struct answer answers[2] = { 0 };
    char name[] = "moe";

    abort.fence = turn.fence = fence;
    turn.group = name;
    ep_groups_abort(groups, &abort, on_called, &answers[0]);
    ep_groups_turn(groups, &turn, on_called, &answers[1]);
    for (size_t i = 0; i < 2; i++) {
        WAIT(f, answers[i].done);
        assert_int_equal(answers[i].error.status, EP_FAILED_PRECONDITION);
        assert_non_null(strstr(answers[i].error.text, "no leader has that term"));
    }
}

static void a_term_that_no_leader_has_is_refused_and_forgotten(void **state)
{
    static const uint64_t forged[] = { UINT64_MAX, INT64_MAX, 1u << 30 };
    struct fixture *f = *state;
    struct answer answer = { 0 };

    create(f, OLD);
    WAIT(f, all_look(f, OLD, PHASE(READY)));
    for (uint32_t i = 0; i < SERVERS; i++)
        for (size_t k = 0; k < sizeof forged / sizeof *forged; k++)
            refuse_forged(f, i, forged[k]);
    begin(f, UPDATE, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    WAIT(f, all_look(f, NEW, PHASE(READY)));
}

/* Nobody's watch tells of the second leader. */
static void a_leader_is_heeded_before_the_watch_tells_of_it(void **state)
{
    const Ep__V1__GroupSpec spec = span_spec(OLD, 4);
    struct fixture *f = *state;
    const uint32_t first = span_leader(f);
    struct answer answer = { 0 };

    for (uint32_t i = 0; i < SERVERS; i++)
        world_hold_term(f->servers[i].cluster, true);
    world_crash(f->servers[first].cluster);
    span_stop(f, first);
    WAIT(f, span_leader(f) != SERVERS && span_leader(f) != first);
    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    refuse_forged(f, span_leader(f), UINT64_MAX);
    for (uint32_t i = 0; i < SERVERS; i++)
        if (i != first)
            world_hold_term(f->servers[i].cluster, false);
    span_start(f, first);
    WAIT(f, span_all_ready(f));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, span_setup, span_teardown)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(a_group_is_formed_on_all_nodes),
        TEST(only_the_leader_makes_changes),
        TEST(a_change_waits_until_the_leader_knows_what_the_store_has),
        TEST(a_leader_that_stays_behind_refuses_changes),
        TEST(a_change_waits_until_somebody_leads),
        TEST(a_read_waits_until_the_server_knows_what_was_acknowledged),
        TEST(each_change_is_written_with_the_mark),
        TEST(what_a_node_reported_is_told_again_where_the_store_has_lost_it),
        TEST(a_member_that_cannot_take_part_refuses_for_all),
        TEST(a_plan_by_an_offer_that_is_out_of_date_is_made_again),
        TEST(changes_at_once_do_not_plan_on_the_same_memory),
        TEST(all_servers_know_what_groups_take_of_each_node),
        TEST(whoever_ends_at_whatever_step_of_a_creation),
        TEST(whoever_ends_at_whatever_step_of_an_update),
        TEST(whoever_ends_at_whatever_step_of_a_deletion),
        TEST(who_a_step_waits_for_is_told),
        TEST(whichever_message_of_a_change_is_lost),
        TEST(a_change_does_not_undo_what_the_watch_tells_while_it_is_under_way),
        TEST(whenever_the_lead_is_lost_the_change_is_made_or_may_be_tried_again),
        TEST(a_creation_that_is_given_up_when_another_has_won_leaves_nothing),
        TEST(a_term_that_no_leader_has_is_refused_and_forgotten),
        TEST(a_leader_is_heeded_before_the_watch_tells_of_it),
        TEST(a_rank_is_claimed_on_its_node_only),
        TEST(a_rank_that_left_is_taken_in_again_by_all),
        TEST(when_all_have_left_all_are_expected_in_a_further_epoch),
        TEST(whichever_message_of_a_join_is_lost),
        TEST(whoever_ends_at_whatever_step_of_a_join),
    };

    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
