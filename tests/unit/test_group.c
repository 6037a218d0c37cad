/* Groups as operators change them: create, update, delete, restart; and what the store does to that. */
#include "group_fixture.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ep_node.h"
#include "sqlite_db.h"

#define STATE(name) EP__V1__RANK_STATE__RANK_STATE_##name
#define PHASE(name) EP__V1__PHASE__PHASE_##name
#define EVENT(name) EP__V1__GROUP_EVENT__TYPE__TYPE_##name

static void expect(struct answer answer, ep_status status, const char *text)
{
    assert_int_equal(answer.error.status, status);
    if (!strstr(answer.error.text, text))
        fail_msg("\"%s\" does not say \"%s\"", answer.error.text, text);
    answer_clear(&answer);
}

/* ---- create -------------------------------------------------------------------------- */

static void a_created_group_is_ready_and_described(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    const Ep__V1__Group *g;

    create(f, "moe", &spec);
    g = get(f, "moe");
    assert_string_equal(g->name, "moe");
    assert_true(g->revision > 0);
    assert_int_equal(g->spec->ll_banks, 2);
    assert_int_equal(g->spec->placement->n_homes, 0); /* contiguous: nothing to list */
    assert_int_equal(g->status->phase, PHASE(READY));
    assert_int_equal(g->status->epoch, 1);
    assert_int_equal(g->status->n_ranks, 4);
    assert_int_equal(g->status->ranks[3]->state, STATE(EXPECTED));
    assert_string_equal(g->status->ranks[3]->device, "host3");
    assert_string_equal(g->status->ranks[3]->node, "n1");
    assert_int_equal(g->status->ranks[3]->local_experts, 2);
    assert_true(g->status->settled->window_bytes > 0);
    assert_int_equal(ep_node_memory_left(f->node), f->budget - 4 * g->status->settled->window_bytes);
    assert_true(g->status->settled->n_notes > 0);
    assert_int_equal(ep_groups_count(f->groups), 1);
}

static void groups_are_listed_by_name(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();

    create(f, "b", &spec);
    create(f, "c", &spec);
    create(f, "a", &spec);
    assert_string_equal(ep_groups_at(f->groups, 0)->name, "a");
    assert_string_equal(ep_groups_at(f->groups, 2)->name, "c");
    assert_null(ep_groups_at(f->groups, 3));
}

static void bad_creations_are_refused(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();

    expect(create_refused(f, "Moe", &spec), EP_INVALID_ARGUMENT, "name is \"Moe\"");
    create(f, "moe", &spec);
    expect(create_refused(f, "moe", &spec), EP_ALREADY_EXISTS, "group moe is there already");
    spec.ranks = 5;
    expect(create_refused(f, "five", &spec), EP_FAILED_PRECONDITION, "ranks is 5: node n1 has 4 devices");
    spec = small_spec();
    spec.arena_bytes = f->budget;
    expect(create_refused(f, "big", &spec), EP_RESOURCE_EXHAUSTED, "left");
    assert_int_equal(ep_groups_count(f->groups), 1);
}

static void a_dry_run_settles_and_changes_nothing(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer = { 0 };

    ep_groups_create(f->groups, "moe", &spec, true, NULL, on_answer, &answer);
    RUN_UNTIL(f, answer.done);
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->spec->timeout_ms, 10000);
    assert_true(answer.group->status->settled->window_bytes > 0);
    assert_int_equal(answer.group->status->n_ranks, 4);
    assert_int_equal(ep_groups_count(f->groups), 0);
    assert_int_equal(ep_node_memory_left(f->node), f->budget);
    answer_clear(&answer);
}

static void a_group_is_not_seen_before_it_is_stored(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer first = { 0 }, second = { 0 };
    struct worker w;

    ep_groups_create(f->groups, "moe", &spec, false, NULL, on_answer, &first);
    assert_false(first.done);
    assert_null(get(f, "moe"));
    assert_int_equal(claim(f, &w, "moe", 0, NULL), EP_NOT_FOUND);
    ep_groups_create(f->groups, "moe", &spec, false, NULL, on_answer, &second);
    assert_true(second.done);
    expect(second, EP_FAILED_PRECONDITION, "a change of this group is under way (creation)");
    RUN_UNTIL(f, first.done);
    assert_non_null(get(f, "moe"));
    answer_clear(&first);
}

/* ---- update --------------------------------------------------------------------------- */

static void timeout_and_labels_change_in_the_running_epoch(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    struct worker w[4];
    uint64_t revision;

    create(f, "moe", &spec);
    for (int i = 0; i < 4; i++)
        join(f, &w[i], "moe", i);
    spec.timeout_ms = 30;
    revision = get(f, "moe")->revision;
    answer = update(f, "moe", revision, &spec, "timeout_ms");
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->status->epoch, 1);
    assert_true(answer.group->revision > revision);
    assert_int_equal(answer.group->spec->timeout_ms, 30);
    answer_clear(&answer);
    assert_int_equal(w[0].epochs, 0);
    ring_dispatch(&w[0]);
    assert_int_equal(result_of(&w[0]).status, EP_TIMEOUT); /* not after ten seconds */
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
}

static void other_fields_make_a_new_epoch_beside_the_old(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker old[4], fresh[4], waiting;
    struct answer answer;
    uint64_t left;

    create(f, "moe", &spec);
    for (int i = 0; i < 3; i++)
        join(f, &old[i], "moe", i);
    assert_int_equal(claim(f, &waiting, "moe", 3, NULL), EP_OK);
    spec.ll_max_tokens = 32;
    answer = update(f, "moe", 0, &spec, "ll_max_tokens");
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->status->epoch, 2);
    assert_int_equal(answer.group->status->phase, PHASE(READY));
    assert_int_equal(answer.group->status->n_draining_epochs, 1);
    assert_int_equal(answer.group->status->draining_epochs[0], 1);
    answer_clear(&answer);
    assert_int_equal(old[0].epochs, 1);
    assert_int_equal(old[0].epoch_told, 2);
    left = ep_node_memory_left(f->node);

    /* Who claimed rank 3 of epoch 1 gets it, and hears that there is a newer one. */
    attach(&waiting);
    assert_int_equal(waiting.info.epoch, 1);
    RUN_UNTIL(f, waiting.epochs == 2);
    for (int i = 0; i < 3; i++)
        ring_dispatch(&old[i]);
    ring_dispatch(&waiting);
    assert_int_equal(result_of(&old[0]).absent, 0);

    for (int i = 0; i < 4; i++)
        join(f, &fresh[i], "moe", i);
    assert_int_equal(fresh[0].info.epoch, 2);
    for (int i = 0; i < 4; i++)
        ring_dispatch(&fresh[i]);
    for (int i = 0; i < 4; i++)
        assert_int_equal(result_of(&fresh[i]).absent, 0);

    for (int i = 0; i < 3; i++)
        release(&old[i], false);
    assert_int_equal(fresh[0].lost, 0); /* not its epoch */
    assert_int_equal(get(f, "moe")->status->n_draining_epochs, 1);
    release(&waiting, false);
    RUN_UNTIL(f, get(f, "moe")->status->n_draining_epochs == 0);
    RUN_UNTIL(f, ep_node_memory_left(f->node) > left);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    for (int i = 0; i < 4; i++)
        release(&fresh[i], false);
}

static void an_unused_epoch_is_retired_at_once(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    create(f, "moe", &spec);
    spec.hidden = 128;
    answer = update(f, "moe", 0, &spec, "hidden");
    answer_clear(&answer);
    RUN_UNTIL(f, get(f, "moe")->status->n_draining_epochs == 0);
    RUN_UNTIL(f,
              ep_node_memory_left(f->node) == f->budget - 4 * get(f, "moe")->status->settled->window_bytes);
}

static void defaults_are_settled_anew(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    uint64_t arena;
    struct answer answer;

    create(f, "moe", &spec);
    arena = get(f, "moe")->spec->arena_bytes;
    spec.hidden = 256;
    answer = update(f, "moe", 0, &spec, "hidden");
    assert_true(answer.group->spec->arena_bytes > arena);
    answer_clear(&answer);
}

static void the_same_again_is_no_change(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    uint64_t revision;

    create(f, "moe", &spec);
    revision = get(f, "moe")->revision;
    answer = update(f, "moe", revision, &spec, "hidden");
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->revision, revision);
    assert_int_equal(answer.group->status->epoch, 1);
    answer_clear(&answer);
}

static void what_cannot_be_formed_leaves_the_epoch_as_it_is(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    spec.arena_bytes = f->budget;
    expect(update(f, "moe", 0, &spec, "arena_bytes"), EP_RESOURCE_EXHAUSTED, "left");
    spec.hidden = 3;
    expect(update(f, "moe", 0, &spec, "hidden"), EP_INVALID_ARGUMENT, "hidden is 3");
    expect(update(f, "moe", 77, &spec, "hidden"), EP_FAILED_PRECONDITION,
           "revision is 77: group moe is at revision");
    expect(update(f, "moe", 0, &spec, "name"), EP_INVALID_ARGUMENT, "fields has \"name\"");
    placement.redundant = 3; /* homes beyond those that there are, and nothing to say whose */
    spec.placement = &placement;
    expect(update(f, "moe", 0, &spec, "placement"), EP_INVALID_ARGUMENT, "placement.redundant is given");
    expect(update(f, "mo", 0, &spec, "hidden"), EP_NOT_FOUND, "group \"mo\" is not there");
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_int_equal(get(f, "moe")->status->epoch, 1);
    assert_int_equal(w.epochs, 0);
    release(&w, false);
}

static void one_change_at_a_time(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer first = { 0 }, second = { 0 }, third = { 0 };
    char name[] = "hidden", *fields[] = { name };

    create(f, "moe", &spec);
    spec.hidden = 128;
    ep_groups_update(f->groups, "moe", 0, &spec, fields, 1, false, NULL, on_answer, &first);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(RECONFIGURING));
    spec.hidden = 256;
    ep_groups_update(f->groups, "moe", 0, &spec, fields, 1, false, NULL, on_answer, &second);
    ep_groups_delete(f->groups, "moe", true, NULL, on_answer, &third);
    assert_true(second.done && third.done);
    expect(second, EP_FAILED_PRECONDITION, "a change of this group is under way (update)");
    expect(third, EP_FAILED_PRECONDITION, "a change of this group is under way (update)");
    RUN_UNTIL(f, first.done);
    assert_int_equal(first.error.status, EP_OK);
    assert_int_equal(get(f, "moe")->spec->hidden, 128);
    answer_clear(&first);
}

static void a_dry_update_tells_the_epoch_it_would_make(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer = { 0 };
    char hidden[] = "hidden", timeout[] = "timeout_ms", *fields[] = { hidden };
    uint64_t revision;

    create(f, "moe", &spec);
    revision = get(f, "moe")->revision;
    spec.hidden = 128;
    spec.timeout_ms = 5;
    ep_groups_update(f->groups, "moe", 0, &spec, fields, 1, true, NULL, on_answer, &answer);
    assert_int_equal(answer.group->status->epoch, 2);
    assert_int_equal(answer.group->spec->hidden, 128);
    answer_clear(&answer);
    fields[0] = timeout;
    ep_groups_update(f->groups, "moe", 0, &spec, fields, 1, true, NULL, on_answer, &answer);
    assert_int_equal(answer.group->status->epoch, 1);
    assert_int_equal(answer.group->spec->timeout_ms, 5);
    answer_clear(&answer);
    fields[0] = hidden;
    spec.hidden = 5;
    ep_groups_update(f->groups, "moe", 0, &spec, fields, 1, true, NULL, on_answer, &answer);
    expect(answer, EP_INVALID_ARGUMENT, "hidden is 5");
    assert_int_equal(get(f, "moe")->spec->hidden, 64);
    assert_int_equal(get(f, "moe")->revision, revision);
}

/* ---- delete --------------------------------------------------------------------------- */

static void a_deleted_group_is_gone_with_its_memory(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    release(&w, false); /* its engine still stops while the group is deleted */
    expect(delete (f, "moe", false), EP_OK, "");
    assert_null(get(f, "moe"));
    assert_int_equal(ep_node_memory_left(f->node), f->budget);
    create(f, "moe", &spec);
}

static void workers_hinder_a_deletion_without_force(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;
    char text[64];

    create(f, "moe", &spec);
    join(f, &w, "moe", 2);
    snprintf(text, sizeof text, "group moe has 1 workers: rank 2 (pid %d)", (int)getpid());
    expect(delete (f, "moe", false), EP_FAILED_PRECONDITION, text);
    expect(delete (f, "mo", false), EP_NOT_FOUND, "not there");
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    release(&w, false);
}

static void force_detaches_and_the_group_drains(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker attached[2], claimed, more;
    struct ep_error error = EP_ERROR_INIT;

    create(f, "moe", &spec);
    join(f, &attached[0], "moe", 0);
    join(f, &attached[1], "moe", 1);
    assert_int_equal(claim(f, &claimed, "moe", 2, NULL), EP_OK);
    ring_dispatch(&attached[0]);
    expect(delete (f, "moe", true), EP_OK, "");
    assert_int_equal(attached[0].detached, 1);
    assert_int_equal(claimed.detached, 1);
    assert_int_equal(result_of(&attached[0]).status, EP_DETACHED); /* nobody is waited for */
    ring_dispatch(&attached[0]);
    assert_int_equal(result_of(&attached[0]).status, EP_DETACHED); /* nor later */
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DRAINING));
    assert_int_equal(claim(f, &more, "moe", 3, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "is being deleted"));
    ep_membership_attach(claimed.membership, &(struct ep_worker){ .name = "x" }, on_attached);
    assert_int_equal(claimed.attached.status, EP_DETACHED);
    expect(create_refused(f, "moe", &spec), EP_FAILED_PRECONDITION, "is being deleted");
    expect(delete (f, "moe", true), EP_FAILED_PRECONDITION, "is being deleted");

    release(&attached[0], false);
    release(&claimed, false);
    release(&attached[1], true);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DRAINING));
    assert_true(ep_node_memory_left(f->node) < f->budget);
    writer_gone(&attached[1]);
    RUN_UNTIL(f, !get(f, "moe"));
    assert_int_equal(ep_node_memory_left(f->node), f->budget);
    fixture_restart(f);
    assert_int_equal(ep_groups_count(f->groups), 0);
}

/* ---- restart ---------------------------------------------------------------------------- */

static void groups_come_back_under_a_higher_epoch(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    uint64_t created, revision;

    create(f, "moe", &spec);
    create(f, "other", &spec);
    spec.hidden = 128;
    answer = update(f, "moe", 0, &spec, "hidden");
    answer_clear(&answer);
    revision = get(f, "moe")->revision;
    created = get(f, "moe")->status->created_us;
    fixture_restart(f);
    assert_int_equal(ep_groups_count(f->groups), 2);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_int_equal(get(f, "moe")->status->epoch, 3);
    assert_int_equal(get(f, "moe")->spec->hidden, 128);
    assert_int_equal(get(f, "moe")->revision, revision); /* of the spec: as before */
    assert_int_equal(get(f, "moe")->status->created_us, created);
    assert_int_equal(get(f, "other")->status->epoch, 2);
    fixture_restart(f);
    assert_int_equal(get(f, "moe")->status->epoch, 4);
    answer = update(f, "moe", revision, &spec, "ranks"); /* revisions still match */
    assert_int_equal(answer.error.status, EP_OK);
    answer_clear(&answer);
    spec.hidden = 64;
    answer = update(f, "moe", 0, &spec, "hidden");
    assert_int_equal(answer.group->status->epoch, 5);
    answer_clear(&answer);
}

static void a_group_that_no_longer_fits_has_failed_and_can_be_mended(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct answer answer;
    struct worker w;

    create(f, "moe", &spec);
    fixture_close(f);
    f->devices = 2;
    fixture_open(f);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(FAILED));
    assert_non_null(strstr(get(f, "moe")->status->reason, "ranks is 4: node n1 has 2 devices"));
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "ranks is 4"));
    expect(update(f, "moe", 0, &spec, "ranks"), EP_FAILED_PRECONDITION, "ranks is 4");
    assert_int_equal(get(f, "moe")->status->phase, PHASE(FAILED));
    spec.ranks = 2;
    answer = update(f, "moe", 0, &spec, "ranks");
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->status->phase, PHASE(READY));
    assert_int_equal(answer.group->status->epoch, 2);
    answer_clear(&answer);
    join(f, &w, "moe", 0);
    release(&w, false);
}

static void a_node_may_get_another_name(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;

    create(f, "moe", &spec);
    fixture_close(f);
    f->name = "renamed";
    fixture_open(f);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_string_equal(get(f, "moe")->status->ranks[0]->node, "renamed");
    join(f, &w, "moe", 0);
    release(&w, false);
}

static void a_failed_group_can_be_deleted(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();

    create(f, "moe", &spec);
    fixture_close(f);
    f->devices = 2;
    fixture_open(f);
    expect(delete (f, "moe", false), EP_OK, "");
    fixture_restart(f);
    assert_int_equal(ep_groups_count(f->groups), 0);
}

static void a_record_that_cannot_be_read_is_a_failed_group(void **state)
{
    struct fixture *f = *state;
    struct ep_sqlite_db *db;
    const struct ep_store_write writes[] = {
        { .key = "groups/moe/spec", .value = "\xff\xff\xff", .size = 3, .expected = EP_STORE_ANY },
        { .key = "groups/moe/status", .value = "\xff\xff", .size = 2, .expected = EP_STORE_ANY },
        { .key = "groups/NO/spec", .value = "x", .size = 1, .expected = EP_STORE_ANY },
        { .key = "groups/lost/status", .value = "", .size = 0, .expected = EP_STORE_ANY },
        { .key = "groups/odd", .value = "x", .size = 1, .expected = EP_STORE_ANY },
    };
    struct ep_record_list changes;
    uint64_t revision;

    fixture_close(f);
    assert_int_equal(ep_sqlite_db_open(f->path, &db, NULL), EP_OK);
    assert_int_equal(ep_sqlite_db_commit(db, writes, 5, &changes, &revision, NULL), EP_OK);
    ep_record_list_clear(&changes);
    ep_sqlite_db_close(db);
    fixture_open(f);
    assert_int_equal(ep_groups_count(f->groups), 1);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(FAILED));
    assert_non_null(strstr(get(f, "moe")->status->reason, "cannot be read"));
    expect(delete (f, "moe", false), EP_OK, "");
}

/* One after the other, each with a commit of its own. */
static void many_groups_come_back(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    char name[16];

    spec.arena_bytes = 4096;
    for (int i = 0; i < 150; i++) {
        snprintf(name, sizeof name, "g%d", i);
        create(f, name, &spec);
    }
    fixture_restart(f);
    assert_int_equal(ep_groups_count(f->groups), 150);
    for (int i = 0; i < 150; i++) {
        snprintf(name, sizeof name, "g%d", i);
        assert_int_equal(get(f, name)->status->phase, PHASE(READY));
        assert_int_equal(get(f, name)->status->epoch, 2);
    }
}

static void changes_before_the_groups_are_loaded_are_refused(void **state)
{
    const struct ep_node_options options = { .name = "n1", .host_devices = 4, .memory_budget = 1ull << 30 };
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer = { 0 };
    struct worker w;

    create(f, "moe", &spec);
    fixture_close(f);
    assert_int_equal(ep_node_open(&options, &f->node, NULL), EP_OK);
    assert_int_equal(ep_store_open_sqlite(&f->loop, f->path, &f->store, NULL), EP_OK);
    f->world = world_open(&f->loop, f->store);
    f->cluster = world_add(f->world, f->node);
    assert_int_equal(ep_groups_open(&f->loop, f->node, f->store, f->cluster, NULL, NULL, &f->groups, NULL), EP_OK);
    world_serve(f->cluster, f->groups);
    ep_groups_create(f->groups, "new", &spec, false, NULL, on_answer, &answer);
    expect(answer, EP_UNAVAILABLE, "the server is starting");
    assert_int_equal(claim(f, &w, "moe", 0, NULL), EP_UNAVAILABLE);
    claim_when_free(f, &w, "moe", 0);
    release(&w, false);
}

/* ---- a store that refuses ------------------------------------------------------------------ */

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void a_change_that_is_not_stored_did_not_happen(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    struct worker w;

    signal(SIGXFSZ, SIG_IGN);
    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    spec.timeout_ms = 77;
    limit_files(1024);
    answer = update(f, "moe", 0, &spec, "timeout_ms");
    expect(answer, EP_RESOURCE_EXHAUSTED, "cannot write");
    expect(delete (f, "moe", true), EP_RESOURCE_EXHAUSTED, "cannot write");
    limit_files(RLIM_INFINITY);
    assert_int_equal(get(f, "moe")->spec->timeout_ms, 10000);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_int_equal(w.detached, 0);
    assert_int_equal(ep_store_health(f->store, NULL), EP_RESOURCE_EXHAUSTED);
    answer = update(f, "moe", get(f, "moe")->revision, &spec, "timeout_ms");
    assert_int_equal(answer.error.status, EP_OK);
    answer_clear(&answer);
    assert_int_equal(ep_store_health(f->store, NULL), EP_OK);
    release(&w, false);
}

/* Somebody else writes the record first, so that the commit of the change finds another revision. */
static void overtake(struct fixture *f, const char *key)
{
    const struct ep_store_write write = { .key = key, .value = "", .expected = EP_STORE_ANY };

    ep_store_commit(f->store, &write, 1, NULL, NULL);
}

static void a_new_epoch_that_is_not_stored_did_not_happen(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;
    uint64_t left;

    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    left = ep_node_memory_left(f->node);
    spec.hidden = 128;
    overtake(f, "groups/moe/spec");
    expect(update(f, "moe", 0, &spec, "hidden"), EP_FAILED_PRECONDITION, "groups/moe/spec is at revision ");
    assert_int_equal(get(f, "moe")->status->epoch, 1);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    assert_int_equal(get(f, "moe")->spec->hidden, 64);
    assert_int_equal(w.epochs, 0);
    RUN_UNTIL(f, ep_node_memory_left(f->node) == left);
    release(&w, false);
}

static void a_group_that_is_not_stored_was_never_there(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();

    overtake(f, "groups/moe/spec");
    expect(create_refused(f, "moe", &spec), EP_FAILED_PRECONDITION,
           "groups/moe/spec is in the store already");
    RUN_UNTIL(f, ep_node_memory_left(f->node) == f->budget);
    RUN_UNTIL(f, get(f, "moe")); /* what is there now is the other one's, and cannot be read */
    assert_int_equal(get(f, "moe")->status->phase, PHASE(FAILED));
}

/* ---- watches -------------------------------------------------------------------------------- */

struct seen {
    struct ep_group_watch *watch;
    unsigned changed, deleted;
    Ep__V1__Phase last;
    char phases[256]; /* in order, repeats left out */
    bool leave;
};

static void on_seen(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user)
{
    struct seen *seen = user;
    size_t used = strlen(seen->phases);

    if (type == EVENT(DELETED))
        seen->deleted++;
    else
        seen->changed++;
    if (group->status->phase != seen->last)
        snprintf(seen->phases + used, sizeof seen->phases - used, "%d ", (int)group->status->phase);
    seen->last = group->status->phase;
    if (seen->leave) {
        ep_groups_unwatch(seen->watch);
        seen->leave = false;
    }
}

static void watches_see_every_phase(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    struct seen seen = { 0 };
    struct worker w[2];
    char expected[64];

    seen.watch = ep_groups_watch(f->groups, on_seen, &seen);
    create(f, "moe", &spec);
    join(f, &w[0], "moe", 0);
    join(f, &w[1], "moe", 1);
    release(&w[0], false);
    spec.hidden = 128;
    answer = update(f, "moe", 0, &spec, "hidden");
    answer_clear(&answer);
    release(&w[1], false);
    expect(delete (f, "moe", false), EP_OK, "");
    assert_int_equal(seen.deleted, 1);
    snprintf(expected, sizeof expected, "%d %d %d %d %d %d ", PHASE(READY), PHASE(DEGRADED),
             PHASE(RECONFIGURING), PHASE(READY), PHASE(DRAINING), PHASE(DELETED));
    assert_string_equal(seen.phases, expected);
    ep_groups_unwatch(seen.watch);
}

static void a_watch_may_end_in_its_own_callback(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct seen a = { .leave = true }, b = { 0 };

    a.watch = ep_groups_watch(f->groups, on_seen, &a);
    b.watch = ep_groups_watch(f->groups, on_seen, &b);
    create(f, "x", &spec);
    create(f, "y", &spec);
    assert_int_equal(a.changed, 1);
    assert_int_equal(b.changed, 2);
    ep_groups_unwatch(b.watch);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_created_group_is_ready_and_described),
        TEST(groups_are_listed_by_name),
        TEST(bad_creations_are_refused),
        TEST(a_dry_run_settles_and_changes_nothing),
        TEST(a_group_is_not_seen_before_it_is_stored),
        TEST(timeout_and_labels_change_in_the_running_epoch),
        TEST(other_fields_make_a_new_epoch_beside_the_old),
        TEST(an_unused_epoch_is_retired_at_once),
        TEST(defaults_are_settled_anew),
        TEST(the_same_again_is_no_change),
        TEST(what_cannot_be_formed_leaves_the_epoch_as_it_is),
        TEST(one_change_at_a_time),
        TEST(a_dry_update_tells_the_epoch_it_would_make),
        TEST(a_deleted_group_is_gone_with_its_memory),
        TEST(workers_hinder_a_deletion_without_force),
        TEST(force_detaches_and_the_group_drains),
        TEST(groups_come_back_under_a_higher_epoch),
        TEST(a_group_that_no_longer_fits_has_failed_and_can_be_mended),
        TEST(a_node_may_get_another_name),
        TEST(a_failed_group_can_be_deleted),
        TEST(a_record_that_cannot_be_read_is_a_failed_group),
        TEST(many_groups_come_back),
        TEST(changes_before_the_groups_are_loaded_are_refused),
        TEST(a_change_that_is_not_stored_did_not_happen),
        TEST(a_new_epoch_that_is_not_stored_did_not_happen),
        TEST(a_group_that_is_not_stored_was_never_there),
        TEST(watches_see_every_phase),
        TEST(a_watch_may_end_in_its_own_callback),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
