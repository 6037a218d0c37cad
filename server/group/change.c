/*
 * Create, update, delete.  Each: decide, form what has to be formed, store it, and only then let it
 * be seen.  One change of a group at a time; what fails leaves the group as it was.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

struct change {
    Ep__V1__GroupSpec *asked;
    struct epoch *epoch;       /* formed for it; NULL: a live change */
    struct ep_settled settled; /* of a live change */
    uint64_t updated_us;
    ep_group_done_fn done;
    void *user;
};

static void fail(ep_group_done_fn done, void *user, const struct ep_error *error)
{
    done(error, NULL, user);
}

static void succeed(ep_group_done_fn done, void *user, const Ep__V1__Group *group)
{
    static const struct ep_error none = EP_ERROR_INIT;

    done(&none, group, user);
}

static struct change *change_new(Ep__V1__GroupSpec *asked, ep_group_done_fn done, void *user)
{
    struct change *change = group_allocate(1, sizeof *change);

    *change = (struct change){ .asked = asked, .updated_us = ep_clock_wall_us(), .done = done, .user = user };
    return change;
}

static void change_free(struct change *change)
{
    if (change->asked)
        ep__v1__group_spec__free_unpacked(change->asked, NULL);
    if (change->epoch)
        epoch_free(change->epoch);
    ep_settled_clear(&change->settled);
    free(change);
}

static ep_status check_quiet(const struct group *group, struct ep_error *error)
{
    if (group->change)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "group %s: a change of this group is under way (%s): try again", group->name,
                            group->change);
    if (group->phase == EP_PHASE(DRAINING))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s is being deleted: %s", group->name,
                            group->reason);
    return EP_OK;
}

/* What the spec settles to, within what is left. */
static ep_status settle(const struct ep_groups *groups, const Ep__V1__GroupSpec *asked,
                        struct ep_settled *settled, struct ep_error *error)
{
    struct ep_spec_bounds bounds = group_bounds(groups);

    return ep_spec_settle(asked, &bounds, settled, error);
}

static ep_status fit(const struct ep_groups *groups, const Ep__V1__GroupSpec *asked,
                     const struct ep_settled *settled, struct ep_error *error)
{
    struct ep_spec_bounds bounds = group_bounds(groups);

    return ep_spec_fit(asked, settled, &bounds, error);
}

static void preview(struct ep_groups *groups, const char *name, uint64_t revision,
                    const struct ep_settled *settled, uint64_t epoch, ep_group_done_fn done, void *user)
{
    struct arena arena = { 0 };

    succeed(done, user, status_preview(&arena, name, revision, groups, settled, epoch));
    arena_clear(&arena);
}

/* ---- create ---------------------------------------------------------------------- */

static void on_created(const struct ep_error *error, struct group *group, void *user)
{
    struct change *change = user;

    group->change = NULL;
    if (error->status) {
        group->dead = true;
        fail(change->done, change->user, error);
        change_free(change);
        return;
    }
    group->visible = true;
    group->asked = change->asked;
    group->epoch = change->epoch;
    group->epoch_number = change->epoch->number;
    change->asked = NULL;
    change->epoch = NULL;
    group_phase(group, EP_PHASE_FORMED, NULL);
    succeed(change->done, change->user, status_message(group));
    status_changed(group);
    change_free(change);
}

static ep_status check_new(struct ep_groups *groups, const char *name, struct ep_error *error)
{
    struct group *group = group_find(groups, name);
    struct ep_error why = EP_ERROR_INIT;

    if (ep_group_name_check(name, error))
        return EP_INVALID_ARGUMENT;
    if (!group) {
        (void)group_get(groups, name, &why); /* not there is what we want; not ready is not */
        return why.status == EP_UNAVAILABLE ? ep_error_set(error, why.status, "%s", why.text) : EP_OK;
    }
    if (group->visible && !group->change && group->phase != EP_PHASE(DRAINING))
        return ep_error_set(error, EP_ALREADY_EXISTS, "group %s is there already, at revision %llu", name,
                            (unsigned long long)group->revision);
    return check_quiet(group, error);
}

static ep_status form_new(struct ep_groups *groups, const char *name, const Ep__V1__GroupSpec *spec,
                          struct ep_settled *settled, ep_group_done_fn done, void *user,
                          struct ep_error *error)
{
    struct group *group = group_new(groups, name);
    struct change *change;
    struct epoch *epoch;

    group_phase(group, EP_PHASE_FORM, NULL);
    if (epoch_form(group, 1, settled, &epoch, error) != EP_OK) {
        group_phase(group, EP_PHASE_FORM_FAILED, error->text);
        group->dead = true;
        group_later(groups);
        return error->status;
    }
    change = change_new(ep_message_copy(&spec->base), done, user);
    change->epoch = epoch;
    group->change = "creation";
    group->created_us = group->updated_us = change->updated_us;
    records_save(group, change->asked, epoch->number, change->updated_us, on_created, change);
    return EP_OK;
}

void ep_groups_create(struct ep_groups *groups, const char *name, const Ep__V1__GroupSpec *spec, bool dry_run,
                      ep_group_done_fn done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled = { 0 };
    ep_status status = check_new(groups, name, &error);

    if (!status && !(status = settle(groups, spec, &settled, &error)))
        status = fit(groups, spec, &settled, &error);
    if (!status && dry_run)
        preview(groups, name, 0, &settled, 1, done, user);
    else if (!status)
        status = form_new(groups, name, spec, &settled, done, user, &error);
    ep_settled_clear(&settled); /* what is left of it */
    if (status)
        fail(done, user, &error);
}

/* ---- update: live ------------------------------------------------------------------ */

static void swap_settled(struct epoch *epoch, struct ep_settled *fresh)
{
    struct ep_settled old = epoch->settled;

    /* Sizes and placement are the same; the team points into them, so they stay. */
    epoch->settled.spec = fresh->spec;
    epoch->settled.notes = fresh->notes;
    epoch->settled.n_notes = fresh->n_notes;
    fresh->spec = old.spec;
    fresh->notes = old.notes;
    fresh->n_notes = old.n_notes;
}

static void set_timeout(struct group *group, uint32_t timeout_ms)
{
    ep_team_set_timeout(group->epoch->team, timeout_ms);
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        ep_team_set_timeout(epoch->team, timeout_ms);
}

static void take_asked(struct group *group, struct change *change)
{
    Ep__V1__GroupSpec *old = group->asked;

    group->asked = change->asked;
    change->asked = old;
    group->updated_us = change->updated_us;
}

static void on_live_stored(const struct ep_error *error, struct group *group, void *user)
{
    struct change *change = user;

    group->change = NULL;
    if (error->status) {
        fail(change->done, change->user, error);
        change_free(change);
        return;
    }
    take_asked(group, change);
    swap_settled(group->epoch, &change->settled);
    set_timeout(group, group->epoch->settled.spec->timeout_ms);
    succeed(change->done, change->user, status_message(group));
    status_changed(group);
    change_free(change);
}

static void update_live(struct group *group, struct change *change, struct ep_settled *settled)
{
    change->settled = *settled;
    *settled = (struct ep_settled){ 0 };
    group->change = "update";
    records_save(group, change->asked, group->epoch_number, change->updated_us, on_live_stored, change);
}

/* ---- update: a new epoch ------------------------------------------------------------ */

/* The epoch before goes on; where there is none, the group has failed. */
static void keep(struct group *group, const struct ep_error *error)
{
    if (!group->epoch) {
        group_phase(group, EP_PHASE_FORM_FAILED, error->text);
        status_changed(group);
        return;
    }
    group_phase(group, EP_PHASE_KEPT, NULL);
    group_assess(group);
    status_changed(group);
}

static void on_epoch_stored(const struct ep_error *error, struct group *group, void *user)
{
    struct change *change = user;
    struct epoch *old = group->epoch;

    group->change = NULL;
    if (error->status) {
        keep(group, error);
        fail(change->done, change->user, error);
        change_free(change);
        return;
    }
    take_asked(group, change);
    if (old) {
        old->next = group->older;
        group->older = old;
    }
    group->epoch = change->epoch;
    group->epoch_number = change->epoch->number;
    change->epoch = NULL;
    group_phase(group, EP_PHASE_FORMED, NULL);
    succeed(change->done, change->user, status_message(group));
    if (old)
        epoch_tell(old, NULL, false, EP_GROUP_EPOCH, 0, group->epoch_number, "a newer epoch is there");
    status_changed(group);
    group_later(group->groups);
    change_free(change);
}

static ep_status update_epoch(struct group *group, struct change *change, struct ep_settled *settled,
                              struct ep_error *error)
{
    char text[64];

    if (fit(group->groups, change->asked, settled, error))
        return error->status;
    snprintf(text, sizeof text, "epoch %llu is being formed", (unsigned long long)group->epoch_number + 1);
    group_phase(group, EP_PHASE_CHANGE, text);
    group->change = "update";
    status_changed(group);
    if (epoch_form(group, group->epoch_number + 1, settled, &change->epoch, error) != EP_OK) {
        group->change = NULL;
        keep(group, error);
        return error->status;
    }
    records_save(group, change->asked, change->epoch->number, change->updated_us, on_epoch_stored, change);
    return EP_OK;
}

/* ---- update ---------------------------------------------------------------------- */

static ep_status check_revision(const struct group *group, uint64_t revision, struct ep_error *error)
{
    if (!revision || revision == group->revision)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "revision is %llu: group %s is at revision %llu, somebody changed it meanwhile",
                        (unsigned long long)revision, group->name, (unsigned long long)group->revision);
}

/* *asked is taken over, also on failure. */
static ep_status update(struct group *group, Ep__V1__GroupSpec *asked, struct ep_settled *settled,
                        bool dry_run, ep_group_done_fn done, void *user, struct ep_error *error)
{
    const Ep__V1__GroupSpec *present = group->epoch ? group->epoch->settled.spec : NULL;
    bool same_epoch = present && ep_spec_same_epoch(settled->spec, present);
    struct change *change = change_new(asked, done, user);
    ep_status status = EP_OK;

    if (dry_run && (same_epoch || !(status = fit(group->groups, asked, settled, error)))) {
        preview(group->groups, group->name, group->revision, settled,
                group->epoch_number + (same_epoch ? 0 : 1), done, user);
    } else if (!dry_run && same_epoch && ep_spec_same(asked, group->asked)) {
        succeed(done, user, status_message(group));
    } else if (!dry_run && same_epoch) {
        update_live(group, change, settled);
        return EP_OK;
    } else if (!dry_run && !(status = update_epoch(group, change, settled, error))) {
        return EP_OK;
    }
    change_free(change);
    return status;
}

void ep_groups_update(struct ep_groups *groups, const char *name, uint64_t revision,
                      const Ep__V1__GroupSpec *spec, char *const *fields, size_t n_fields, bool dry_run,
                      ep_group_done_fn done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled = { 0 };
    Ep__V1__GroupSpec *asked = NULL;
    struct group *group = group_get(groups, name, &error);

    if (group && !check_quiet(group, &error) && !check_revision(group, revision, &error) &&
        !ep_spec_take(group->asked, spec, fields, n_fields, &asked, &error)) {
        if (settle(groups, asked, &settled, &error))
            ep__v1__group_spec__free_unpacked(asked, NULL);
        else
            (void)update(group, asked, &settled, dry_run, done, user, &error);
    }
    ep_settled_clear(&settled);
    if (error.status)
        fail(done, user, &error);
}

/* ---- delete ---------------------------------------------------------------------- */

static void count_workers(const struct group *group, uint32_t *members, uint32_t *quarantined)
{
    *members = group->epoch ? group->epoch->members : 0;
    *quarantined = group->epoch ? group->epoch->quarantined : 0;
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next) {
        *members += epoch->members;
        *quarantined += epoch->quarantined;
    }
}

static void list_ranks(const struct epoch *epoch, char *text, size_t size)
{
    size_t used = strlen(text);

    for (uint32_t i = 0; i < epoch->n_ranks && used + 48 < size; i++)
        if (epoch->ranks[i].member)
            used += (size_t)snprintf(text + used, size - used, "%srank %u (pid %d)", used ? ", " : "", i,
                                     (int)epoch->ranks[i].claimant.pid);
}

static ep_status check_unused(const struct group *group, bool force, struct ep_error *error)
{
    uint32_t members, quarantined;
    char ranks[160] = "";

    count_workers(group, &members, &quarantined);
    if (force || !members)
        return EP_OK;
    if (group->epoch)
        list_ranks(group->epoch, ranks, sizeof ranks);
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        list_ranks(epoch, ranks, sizeof ranks);
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "group %s has %u workers: %s; let them leave, or delete with force", group->name,
                        members, ranks);
}

/*
 * With nobody there the answer waits for the engines to stop, so that the name and the memory are
 * free when it comes.  Workers that have to be told may take their time: then it comes now.
 */
static void on_deletion_stored(const struct ep_error *error, struct group *group, void *user)
{
    struct change *change = user;
    uint32_t members, quarantined;
    char reason[96];

    group->change = NULL;
    if (error->status) {
        fail(change->done, change->user, error);
        change_free(change);
        return;
    }
    count_workers(group, &members, &quarantined);
    snprintf(reason, sizeof reason, "deleted; %u workers have to let go of their windows",
             members + quarantined);
    group_phase(group, EP_PHASE_REMOVE, reason);
    if (members + quarantined) {
        succeed(change->done, change->user, status_message(group));
        change_free(change);
    } else {
        group->waiting = change;
    }
    if (group->epoch)
        epoch_detach(group->epoch, "the group was deleted");
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        epoch_detach(epoch, "the group was deleted");
    status_changed(group);
    group_later(group->groups);
}

void change_gone(struct group *group)
{
    struct change *change = group->waiting;

    group->waiting = NULL;
    if (!change)
        return;
    succeed(change->done, change->user, status_message(group));
    change_free(change);
}

void ep_groups_delete(struct ep_groups *groups, const char *name, bool force, ep_group_done_fn done,
                      void *user)
{
    struct ep_error error = EP_ERROR_INIT;
    struct group *group = group_get(groups, name, &error);

    if (!group || check_quiet(group, &error) || check_unused(group, force, &error)) {
        fail(done, user, &error);
        return;
    }
    group->change = "deletion";
    records_delete(group, on_deletion_stored, change_new(NULL, done, user));
}
