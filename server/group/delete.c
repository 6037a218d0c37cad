/*
 * Delete.  Without force, only a group that has no workers: what this server knows of other nodes is a moment old, so they
 * are asked, and from their answers on no rank is claimed there (Close) until the deletion is decided.  The answer
 * counts, as a rank's claim does: what is attached had to be claimed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group_private.h"

#define DECIDED_MS 30000u /* longer than a leader takes from Close to the answer of its commit */

/* ---- who has claimed a rank ----------------------------------------------------------------------- */

struct workers {
    uint32_t members, quarantined;
    char text[160];
};

static void count_epoch(const struct epoch *epoch, bool elsewhere, struct workers *workers)
{
    for (uint32_t i = 0; epoch && i < epoch->n_ranks; i++) {
        const struct rank *rank = &epoch->ranks[i];
        const bool attached = elsewhere && !rank->here && rank->state == EP_RANK_STATE(ATTACHED);
        const size_t used = strlen(workers->text);

        workers->quarantined += rank->here ? rank->own->quarantined != NULL : rank->state == EP_RANK_STATE(QUARANTINED);
        if (!rank->own->member && !attached)
            continue;
        workers->members++;
        if (used + 48 < sizeof workers->text)
            snprintf(workers->text + used, sizeof workers->text - used, "%srank %u (pid %d)", used ? ", " : "", i,
                     (int)(rank->here ? rank->own->claimant.pid : rank_worker(rank)->pid));
    }
}

/* elsewhere: also those on other nodes, as these have told. */
static struct workers count_workers(const struct group *group, bool elsewhere)
{
    struct workers workers = { 0 };

    count_epoch(group->epoch, elsewhere, &workers);
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        count_epoch(epoch, elsewhere, &workers);
    return workers;
}

static ep_status refuse_used(const struct group *group, uint32_t workers, const char *who, struct ep_error *error)
{
    return ep_error_set(error, EP_FAILED_PRECONDITION, "group %s has %u workers: %s; let them leave, or delete with force",
                        group->name, workers, who);
}

/* ---- the member's side ------------------------------------------------------------------------------ */

bool close_holds(const struct group *group)
{
    return group_now(group->groups) < group->closed.until;
}

void close_lift(struct group *group, uint64_t deletion)
{
    if (group->closed.deletion == deletion)
        group->closed = (struct closed){ 0 };
}

static void serve_close(struct ep_groups *groups, const ProtobufCMessage *message, ep_cluster_done_fn done, void *user)
{
    const Ep__V1__CloseRequest *request = (const Ep__V1__CloseRequest *)message;
    Ep__V1__CloseReply reply = EP__V1__CLOSE_REPLY__INIT;
    struct group *group = group_find(groups, request->group);
    struct ep_error error = EP_ERROR_INIT;
    struct workers workers = { 0 };

    if (!part_heed(groups, request->fence, &error) && !group)
        (void)ep_error_set(&error, EP_UNAVAILABLE, "group %.64s is not known here yet", request->group);
    if (!error.status) {
        group->closed = (struct closed){ request->fence, request->deletion, group_now(groups) + DECIDED_MS };
        workers = count_workers(group, false);
    }
    reply.workers = workers.members;
    reply.who = workers.text;
    done(&error, error.status ? NULL : &reply.base, user);
}

void ep_groups_close_claims(struct ep_groups *groups, const Ep__V1__CloseRequest *request, ep_cluster_done_fn done,
                            void *user)
{
    term_serve(groups, request->fence, &request->base, serve_close, done, user);
}

/* ---- the leader's side ------------------------------------------------------------------------------- */

/* A server of a release that does not know the question has told its workers, and nothing newer is to be had of it. */
void close_judge(const struct group *group, const struct ep_error *asked, const Ep__V1__CloseReply *reply,
                 struct ep_error *error)
{
    if (asked->status == EP_UNIMPLEMENTED)
        return;
    if (asked->status)
        (void)ep_error_set(error, asked->status, "it has not said that it has no workers: %.300s; try again, or delete "
                           "with force", asked->text);
    else if (reply->workers)
        (void)refuse_used(group, reply->workers, reply->who, error);
}

static bool is_asked(const struct ep_plan *asked, const char *node)
{
    for (uint32_t i = 0; i < asked->n_nodes; i++)
        if (!strcmp(asked->name[i], node))
            return true;
    return false;
}

static void ask(struct ep_plan *asked, const struct ep_groups *groups, const char *node)
{
    if (strcmp(node, nodes_self(groups)) != 0 && nodes_alive(groups, node) && !is_asked(asked, node))
        asked->name[asked->n_nodes++] = arena_strdup(&asked->texts, node);
}

/* Workers are where an epoch is: the newest, or one that a node tells of.  Here, a change that is under way keeps them out. */
static void plan_asked(struct change *change)
{
    const struct group *group = change->group;
    const uint32_t members = group->epoch ? group->epoch->plan.n_nodes : 0;

    change->plan.name = group_allocate(members + group->n_reports, sizeof *change->plan.name);
    for (uint32_t i = 0; i < members; i++)
        ask(&change->plan, group->groups, group->epoch->plan.name[i]);
    for (size_t i = 0; i < group->n_reports; i++)
        ask(&change->plan, group->groups, group->reports[i].node);
}

static ep_status check_delete(const struct group *group, bool force, struct workers *workers, struct ep_error *error)
{
    ep_status status = change_check_quiet(group, error);

    *workers = count_workers(group, true);
    if (!status && workers->members && !force)
        status = refuse_used(group, workers->members, workers->text, error);
    return status ? status : change_check_lead(group->groups, error);
}

void ep_groups_delete(struct ep_groups *groups, const char *name, bool force, const Ep__V1__Asker *asker,
                      ep_group_done_fn done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;
    struct group *group = group_get(groups, name, &error);
    struct workers workers;
    struct change *change;

    if (!group || check_delete(group, force, &workers, &error)) {
        if (group)
            history_refused(group, "deletion", asker, NULL, &error);
        done(&error, NULL, user);
        return;
    }
    change = change_new(group, CHANGE_DELETION, asker, done, user);
    change->workers = workers.members + workers.quarantined > 0;
    if (!force)
        plan_asked(change);
    agree_begin(change);
}

/* Its records are gone, by whoever's doing. */
void group_remove(struct group *group)
{
    const struct workers workers = count_workers(group, true);
    char reason[96];

    snprintf(reason, sizeof reason, "deleted; %u workers have to let go of their windows",
             workers.members + workers.quarantined);
    group_phase(group, EP_PHASE_REMOVE, reason);
    part_drop(group, "the group was deleted");
    if (group->epoch)
        epoch_detach(group->epoch, "the group was deleted");
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        epoch_detach(epoch, "the group was deleted");
    status_changed(group);
    group_later(group->groups);
}
