/*
 * Create and update.  Each: judge what is asked, settle and plan it, and have it agreed on (agree.c).  Only the
 * leader does that.  One change of a group at a time; what fails leaves the group as it was.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

/* ---- answers ------------------------------------------------------------------------------ */

static void fail(ep_group_done_fn done, void *user, const struct ep_error *error)
{
    done(error, NULL, user);
}

static void succeed(ep_group_done_fn done, void *user, const Ep__V1__Group *group)
{
    static const struct ep_error none = EP_ERROR_INIT;

    done(&none, group, user);
}

const char *change_text(const struct change *change)
{
    static const char *const texts[] = {
        [CHANGE_CREATION] = "creation", [CHANGE_UPDATE] = "update",     [CHANGE_LIVE] = "update",
        [CHANGE_DELETION] = "deletion", [CHANGE_RENEWAL] = "renewal",
    };

    return texts[change->kind];
}

/* ---- the life of a change ------------------------------------------------------------------- */

struct change *change_new(struct group *group, enum change_kind kind, const Ep__V1__Asker *asker, ep_group_done_fn done,
                          void *user)
{
    struct change *change = group_allocate(1, sizeof *change);

    *change = (struct change){
        .kind = kind,
        .group = group,
        .spec_revision = group->revision,
        .status_revision = group->status_revision,
        .failure = EP_ERROR_INIT,
        .done = done,
        .user = user,
    };
    change->entry = history_begin(group, change_text(change), asker);
    group->change = change;
    return change;
}

static void change_free(struct change *change)
{
    if (change->asked)
        ep__v1__group_spec__free_unpacked(change->asked, NULL);
    if (change->status)
        ep__v1__group_status__free_unpacked(change->status, NULL);
    ep_plan_clear(&change->plan);
    ep__v1__group_change__free_unpacked(change->entry, NULL);
    free(change->members);
    free(change);
}

/* The epoch before goes on; where none is served, the group has failed. */
static void keep(struct group *group, const struct ep_error *error)
{
    const bool served = group->epoch && epoch_served(group->epoch);

    if (group->phase != EP_PHASE(RECONFIGURING) && group->phase != EP_PHASE(FORMING))
        return;
    if (served && group->phase == EP_PHASE(RECONFIGURING))
        group_phase(group, EP_PHASE_KEPT, NULL);
    else
        group_phase(group, EP_PHASE_FORM_FAILED, error->text);
    group_assess(group);
    status_changed(group);
}

/* What became of a renewal that failed is heal.c's to say. */
static void note_renewal(struct group *group, bool failed)
{
    group->heal_failures = failed ? group->heal_failures + 1 : 0;
}

void change_finish(struct change *change, const struct ep_error *error)
{
    struct group *group = change->group;

    group->change = NULL;
    history_end(group, change->entry, error->status ? "failed" : "made", error);
    if (change->kind == CHANGE_RENEWAL)
        note_renewal(group, error->status != EP_OK);
    if (error->status && change->kind == CHANGE_CREATION && !group->visible)
        group->dead = !group->prepared; /* by whoever leads now: it is that one's */
    else if (error->status)
        keep(group, error);
    if (change->done && error->status)
        fail(change->done, change->user, error);
    else if (change->done)
        succeed(change->done, change->user, status_message(group));
    group_later(group->groups);
    change_free(change);
}

/* ---- what all have ---------------------------------------------------------------------------- */

ep_status change_check_lead(const struct ep_groups *groups, struct ep_error *error)
{
    const char *leader = ep_cluster_leader(groups->cluster);
    struct ep_error store = EP_ERROR_INIT;

    if (ep_cluster_leads(groups->cluster))
        return EP_OK;
    if (ep_store_health(groups->store, &store) != EP_OK)
        return ep_error_set(error, store.status, "%s", store.text);
    if (leader && strcmp(leader, nodes_self(groups)) != 0)
        return ep_error_set(error, EP_UNAVAILABLE, "node %s leads, not %s: try again", leader, nodes_self(groups));
    return ep_error_set(error, EP_UNAVAILABLE, "no server leads at present, so nothing can be changed: try again");
}

ep_status change_check_quiet(const struct group *group, struct ep_error *error)
{
    if (group->phase == EP_PHASE(DRAINING))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is being deleted: %s", group->name,
                            group->reason);
    if (group->change)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "group %s: a change of this group is under way (%s): try again", group->name,
                            change_text(group->change));
    if (turn_writes(group))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s: its workers are going over to epoch %llu: try again",
                            group->name, (unsigned long long)group->epoch_number);
    return EP_OK;
}

/* ---- the change of an epoch -------------------------------------------------------------------- */

/* Workers that follow will come over to it: nobody waits there for ranks that are absent now. */
static void mark_absent(const struct group *group, Ep__V1__GroupStatus *record)
{
    const struct epoch *epoch = group->epoch;
    uint32_t attached = 0, follow = 0;

    for (uint32_t i = 0; epoch && i < epoch->n_ranks; i++) {
        const bool is_attached = epoch->ranks[i].state == EP_RANK_STATE(ATTACHED);

        attached += is_attached;
        follow += is_attached && epoch->ranks[i].follows;
    }
    for (uint32_t i = 0; attached && attached == follow && i < epoch->n_ranks; i++)
        if (rank_is_lost(epoch->ranks[i].state))
            status_begin_absent(record, i);
}

static void note_bytes(struct change *change, const struct ep_settled *settled)
{
    const struct ep_team_beside beside = epoch_beside(settled, &change->plan);

    change->rank_bytes = settled->rank_bytes + beside.rank;
    change->node_bytes = beside.node;
}

/* No epoch has had a higher number, as far as is known here: of a store that was set back, nodes may have workers in a later
 * one than is agreed on. */
static uint64_t last_number(const struct group *group)
{
    const uint64_t own = group->epoch_number > group->tried ? group->epoch_number : group->tried;
    const uint64_t reported = report_highest(group);

    return own > reported ? own : reported;
}

/* Both are taken over. */
static void take_plan(struct change *change, struct ep_settled *settled, struct ep_plan *plan)
{
    struct group *group = change->group;
    const uint64_t last = last_number(group);

    change->plan = *plan;
    note_bytes(change, settled);
    change->entry->epoch_after = last + 1;
    history_nodes(change->entry, group->epoch ? &group->epoch->plan : NULL, plan);
    change->status = status_record(settled, plan, last + 1, group->created_us,
                                   change->kind == CHANGE_UPDATE ? ep_clock_wall_us() : group->updated_us);
    mark_absent(group, change->status);
    status_keep_turn(group, change->status);
    *plan = (struct ep_plan){ 0 };
    ep_settled_clear(settled);
}

struct change *change_new_epoch(struct group *group, enum change_kind kind, Ep__V1__GroupSpec *asked,
                                struct ep_settled *settled, struct ep_plan *plan, const Ep__V1__Asker *asker,
                                ep_group_done_fn done, void *user)
{
    struct change *change = change_new(group, kind, asker, done, user);

    if (kind == CHANGE_CREATION)
        group->created_us = group->updated_us = ep_clock_wall_us();
    change->asked = asked;
    if (asked)
        history_fields(change->entry, group->asked, asked);
    take_plan(change, settled, plan);
    return change;
}

/* name: of a group that is not there yet, `group` being nobody then. */
static void preview(const struct group *group, const char *name, const Ep__V1__GroupSpec *asked,
                    const struct ep_settled *settled, const struct ep_plan *plan, bool new_epoch, ep_group_done_fn done,
                    void *user)
{
    struct arena arena = { 0 };
    Ep__V1__Group *message = status_preview(&arena, name, group->revision, settled, plan,
                                            group->epoch_number + (new_epoch ? 1 : 0));

    message->plan = preview_plan(&arena, group, asked, settled, plan, new_epoch);
    succeed(done, user, message);
    arena_clear(&arena);
}

/* ---- create ---------------------------------------------------------------------------------- */

static ep_status check_new(struct ep_groups *groups, const char *name, struct ep_error *error)
{
    struct group *group = group_find(groups, name);
    struct ep_error why = EP_ERROR_INIT;

    if (ep_group_name_check(name, error))
        return EP_INVALID_ARGUMENT;
    (void)group_get(groups, name, &why); /* not there is what we want; not ready is not */
    if (why.status == EP_UNAVAILABLE)
        return ep_error_set(error, why.status, "%s", why.text);
    if (group && change_check_quiet(group, error))
        return error->status;
    if (group && group->visible)
        return ep_error_set(error, EP_ALREADY_EXISTS, "group %s is there already, at revision %llu", name,
                            (unsigned long long)group->revision);
    return change_check_lead(groups, error);
}

static void create(struct group *group, const Ep__V1__GroupSpec *spec, struct ep_settled *settled,
                   struct ep_plan *plan, const Ep__V1__Asker *asker, ep_group_done_fn done, void *user)
{
    if (group->phase != EP_PHASE(FORMING)) /* what another leader began here, perhaps */
        group_phase(group, EP_PHASE_FORM, NULL);
    agree_begin(change_new_epoch(group, CHANGE_CREATION, ep_message_copy(&spec->base), settled, plan, asker, done,
                                 user));
}

void ep_groups_create(struct ep_groups *groups, const char *name, const Ep__V1__GroupSpec *spec, bool dry_run,
                      const Ep__V1__Asker *asker, ep_group_done_fn done, void *user)
{
    struct group nobody = { .groups = groups }, *group;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled = { 0 };
    struct ep_plan plan = { 0 };

    if (check_new(groups, name, &error) || token_given(spec, NULL, &error) ||
        negotiate(&nobody, spec, false, &settled, &plan, &error)) {
        group = group_find(groups, name);
        if (group && !dry_run)
            history_refused(group, "creation", asker, NULL, &error);
        fail(done, user, &error);
    } else if (dry_run) {
        preview(&nobody, name, spec, &settled, &plan, true, done, user);
    } else {
        group = group_find(groups, name); /* a part of one that was never agreed on may be there */
        group = group ? group : group_new(groups, name);
        create(group, spec, &settled, &plan, asker, done, user);
    }
    ep_settled_clear(&settled); /* what is left of it */
    ep_plan_clear(&plan);
}

/* ---- update ---------------------------------------------------------------------------------- */

static ep_status check_revision(const struct group *group, uint64_t revision, struct ep_error *error)
{
    if (!revision || revision == group->revision)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "revision is %llu: group %s is at revision %llu, somebody changed it meanwhile",
                        (unsigned long long)revision, group->name, (unsigned long long)group->revision);
}

/* What an update would make of the group. */
struct outlook {
    Ep__V1__GroupSpec *asked;
    bool place; /* the update names the placement, so ranks leave nodes that are lost or drained */
    struct ep_settled settled;
    struct ep_plan plan;
    bool same_epoch;
};

static void outlook_clear(struct outlook *outlook)
{
    if (outlook->asked)
        ep__v1__group_spec__free_unpacked(outlook->asked, NULL);
    ep_settled_clear(&outlook->settled);
    ep_plan_clear(&outlook->plan);
}

/* Which experts they hold is another question. */
static Ep__V1__Placement nodes_alone(const Ep__V1__GroupSpec *spec)
{
    Ep__V1__Placement nodes = EP__V1__PLACEMENT__INIT;

    if (spec->placement) {
        nodes.nodes = spec->placement->nodes;
        nodes.ranks = spec->placement->ranks;
        nodes.n_ranks = spec->placement->n_ranks;
    }
    return nodes;
}

static bool same_nodes(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b)
{
    const Ep__V1__Placement x = nodes_alone(a), y = nodes_alone(b);

    return ep_message_same(&x.base, &y.base);
}

/* What an update of the placement does not name stays: which nodes, or which experts. */
static void keep_unnamed(Ep__V1__GroupSpec *to, const Ep__V1__GroupSpec *from)
{
    Ep__V1__Placement *placement = to->placement, *old, swapped;

    if (!placement || !from->placement || (placement->strategy && placement->nodes))
        return;
    old = ep_message_copy(&from->placement->base);
    swapped = *placement;
    if (!placement->strategy && !placement->n_homes && !placement->n_loads && !placement->redundant) {
        placement->strategy = old->strategy;
        placement->homes = old->homes, placement->n_homes = old->n_homes;
        placement->loads = old->loads, placement->n_loads = old->n_loads;
        placement->redundant = old->redundant;
        old->homes = swapped.homes, old->n_homes = swapped.n_homes;
        old->loads = swapped.loads, old->n_loads = swapped.n_loads;
    }
    if (!placement->nodes && !placement->n_ranks) {
        placement->nodes = old->nodes;
        placement->ranks = old->ranks, placement->n_ranks = old->n_ranks;
        old->ranks = swapped.ranks, old->n_ranks = swapped.n_ranks;
    }
    ep__v1__placement__free_unpacked(old, NULL);
}

static bool same_plan(const struct ep_plan *a, const struct ep_plan *b)
{
    bool same = a->n_ranks == b->n_ranks;

    for (uint32_t r = 0; same && r < a->n_ranks; r++)
        same = !strcmp(a->name[a->node[r]], b->name[b->node[r]]) && !strcmp(a->device[r], b->device[r]);
    return same;
}

static bool takes_workers(const struct ep_groups *groups, const struct ep_plan *plan)
{
    for (uint32_t i = 0; i < plan->n_nodes; i++) {
        const struct ep_cluster_node *node = ep_cluster_find(groups->cluster, plan->name[i]);

        if (!node || !node->alive || node->cordoned)
            return false;
    }
    return true;
}

/* Sizes that nobody has asked for stay as they were settled. */
static Ep__V1__GroupSpec with_sizes(const struct group *group, const Ep__V1__GroupSpec *asked)
{
    const Ep__V1__GroupSpec *present = group->epoch->settled.spec;
    Ep__V1__GroupSpec spec = *asked; /* only read */

    if (!spec.ll_max_tokens && !group->asked->ll_max_tokens)
        spec.ll_max_tokens = present->ll_max_tokens;
    if (!spec.ht_max_tokens && !group->asked->ht_max_tokens)
        spec.ht_max_tokens = present->ht_max_tokens;
    return spec;
}

/* The epoch that runs is settled as this would be: then it needs no room beside itself. */
static ep_status look_at_same(const struct group *group, struct outlook *out, struct ep_error *error)
{
    const struct epoch *present = group->epoch;
    const struct ep_spec_bounds bounds = {
        .node = nodes_self(group->groups),
        .backend = present->settled.spec->backend,
        .devices = present->n_ranks > out->asked->ranks ? present->n_ranks : out->asked->ranks,
        .granule = ep_node_granule(group->groups->node),
        .rank_node = present->plan.n_nodes > 1 ? present->plan.node : NULL,
        .placed = present->plan.n_ranks,
    };
    const Ep__V1__GroupSpec asked = with_sizes(group, out->asked);
    ep_status status = ep_spec_settle(&asked, &bounds, &out->settled, error);

    if (status)
        return status;
    out->same_epoch = ep_spec_same_epoch(out->settled.spec, present->settled.spec) && epoch_served(present) &&
                      (!out->place || takes_workers(group->groups, &present->plan));
    if (!out->same_epoch) {
        ep_settled_clear(&out->settled);
        return EP_OK;
    }
    ep_settled_set_notes(&out->settled, present->settled.notes, present->settled.n_notes);
    ep_plan_copy(&present->plan, &out->plan);
    return EP_OK;
}

static ep_status look_ahead(const struct group *group, struct outlook *out, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;

    if (group->epoch)
        (void)look_at_same(group, out, &why); /* what is wrong with it the next one says better */
    if (out->same_epoch)
        return EP_OK;
    return negotiate(group, out->asked, same_nodes(out->asked, group->asked), &out->settled, &out->plan, error);
}

bool change_plan_again(struct change *change)
{
    const struct group *group = change->group;
    const bool stay = change->kind == CHANGE_UPDATE && same_nodes(change->asked, group->asked);
    struct ep_settled settled = { 0 };
    struct ep_plan plan = { 0 };

    if (change_check_lead(group->groups, NULL) || negotiate(group, change->asked, stay, &settled, &plan, NULL))
        return false;
    ep_plan_clear(&change->plan);
    ep__v1__group_status__free_unpacked(change->status, NULL);
    change->failure = (struct ep_error)EP_ERROR_INIT;
    take_plan(change, &settled, &plan);
    return true;
}

static void update_live(struct group *group, struct outlook *to, const Ep__V1__Asker *asker, ep_group_done_fn done,
                        void *user)
{
    struct change *change = change_new(group, CHANGE_LIVE, asker, done, user);

    change->asked = to->asked;
    history_fields(change->entry, group->asked, to->asked);
    change->status = status_record(&to->settled, &to->plan, group->epoch_number, group->created_us,
                                   ep_clock_wall_us());
    status_keep(group, change->status);
    to->asked = NULL;
    agree_begin(change);
}

static void update_epoch(struct group *group, struct outlook *to, const Ep__V1__Asker *asker, ep_group_done_fn done,
                         void *user)
{
    struct change *change =
        change_new_epoch(group, CHANGE_UPDATE, to->asked, &to->settled, &to->plan, asker, done, user);

    to->asked = NULL;
    agree_begin(change);
}

static bool names(char *const *fields, size_t n, const char *field)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(fields[i], field))
            return true;
    return false;
}

static void update(struct group *group, struct outlook *to, bool dry_run, const Ep__V1__Asker *asker,
                   ep_group_done_fn done, void *user)
{
    if (dry_run)
        preview(group, group->name, to->asked, &to->settled, &to->plan, !to->same_epoch, done, user);
    else if (to->same_epoch && ep_spec_same(to->asked, group->asked) && same_plan(&to->plan, &group->epoch->plan))
        succeed(done, user, status_message(group));
    else if (to->same_epoch)
        update_live(group, to, asker, done, user);
    else
        update_epoch(group, to, asker, done, user);
}

static ep_status take_fields(const struct group *group, const Ep__V1__GroupSpec *spec, char *const *fields,
                             size_t n_fields, bool dry_run, struct outlook *to, struct ep_error *error)
{
    ep_status status = EP_OK;

    if (!n_fields && dry_run)
        to->asked = ep_message_copy(&group->asked->base);
    else
        status = ep_spec_take(group->asked, spec, fields, n_fields, &to->asked, error);
    if (!status && to->place)
        keep_unnamed(to->asked, group->asked);
    return status ? status : token_keep(to->asked, group->asked, error);
}

void ep_groups_update(struct ep_groups *groups, const char *name, uint64_t revision,
                      const Ep__V1__GroupSpec *spec, char *const *fields, size_t n_fields, bool dry_run,
                      const Ep__V1__Asker *asker, ep_group_done_fn done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;
    struct outlook to = { .place = names(fields, n_fields, "placement") };
    struct group *group = group_get(groups, name, &error);

    if (group && !change_check_quiet(group, &error) && !check_revision(group, revision, &error) &&
        !take_fields(group, spec, fields, n_fields, dry_run, &to, &error) &&
        !change_check_lead(groups, &error) && !look_ahead(group, &to, &error)) {
        update(group, &to, dry_run, asker, done, user);
    } else {
        if (group && !dry_run)
            history_refused(group, "update", asker, to.asked, &error);
        fail(done, user, &error);
    }
    outlook_clear(&to);
}
