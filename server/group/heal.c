/*
 * What the leader does of its own accord: it forms a group's epoch anew
 *
 *   - where a member that is there has no part of it: its server was started again, or it lost what it had prepared,
 *   - where members have lost each other, once all are there again: where the store has lost none of them, once they say
 *     that they find each other (reach.c),
 *   - where the workers of several nodes have all left: then every rank is expected again.
 *
 * The ranks stay where they are, if that is possible.  It waits for nodes that are not there: the others go on without
 * their ranks, and an operator may place them elsewhere.
 */
#include <stdio.h>

#include "ep_log.h"
#include "group_private.h"

#define FIRST_MS 500u
#define LAST_MS  60000u

/* This server is the only one that there can be: where its node had another name, that one never comes back. */
static bool is_alone(const struct ep_groups *groups)
{
    return !ep_store_shared(groups->store) && ep_cluster_count(groups->cluster) == 1;
}

/* All members of what is agreed on. */
static bool all_there(const struct group *group)
{
    if (is_alone(group->groups))
        return true;
    for (uint32_t i = 0; group->epoch && i < group->epoch->plan.n_nodes; i++)
        if (!nodes_alive(group->groups, group->epoch->plan.name[i]))
            return false;
    return true;
}

bool heal_due(const struct group *group)
{
    if (!group->visible || group->dead || group->gone || !group->asked->ranks)
        return false;
    return (report_not_whole(group) || epoch_left_by_all(group->epoch) ||
            (is_alone(group->groups) && !epoch_is_member(group->epoch))) &&
           all_there(group);
}

bool heal_failed(const struct group *group)
{
    return group->heal_failures || group->reach.failed;
}

/* Each failure makes the next attempt later. */
static uint64_t pause_ms(const struct group *group)
{
    const uint32_t n = group->heal_failures < 8 ? group->heal_failures : 8;
    const uint64_t ms = (uint64_t)FIRST_MS << n;

    return ms < LAST_MS ? ms : LAST_MS;
}

static void fail(struct group *group, const struct ep_error *error)
{
    if (!group->heal_failures)
        EP_ERROR("group", "a stored group cannot be formed", EP_S("group", group->name), EP_S("error", error->text));
    group->heal_failures++;
    if (group->phase == EP_PHASE(FORMING)) {
        group_phase(group, EP_PHASE_FORM_FAILED, error->text);
        status_changed(group);
    }
}

static void begin(struct group *group, struct ep_settled *settled, struct ep_plan *plan)
{
    agree_begin(change_new_epoch(group, CHANGE_RENEWAL, NULL, settled, plan, NULL, NULL, NULL));
}

/* Members that find each other again are not kept waiting: the pause was for them. */
static bool may_begin(const struct group *group, bool found)
{
    return !group->change && !turn_writes(group) && (found || group_now(group->groups) >= group->heal_after) &&
           !change_check_lead(group->groups, NULL) && heal_due(group);
}

void heal_look(struct group *group)
{
    const bool found = reach_take(group);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled = { 0 };
    struct ep_plan plan = { 0 };

    if (!may_begin(group, found))
        return;
    group->heal_after = group_now(group->groups) + pause_ms(group);
    if (reach_needed(group) && !found) {
        reach_ask(group);
        return;
    }
    reach_forget(group);
    if (negotiate(group, group->asked, true, &settled, &plan, &error))
        fail(group, &error);
    else
        begin(group, &settled, &plan);
}

/* The others that see it say so meanwhile, and are asked too.  Its server may be gone: then it is not found. */
void heal_later(struct group *group)
{
    group->heal_after = group_now(group->groups) + FIRST_MS;
    reach_lost(group);
}

/* What failed until now says nothing about the next attempt, nor how long the pause after it has to be. */
static void forget_pause(struct group *group)
{
    group->heal_after = 0;
    group->heal_failures = 0;
    reach_forget(group);
}

void heal_at_once(struct ep_groups *groups)
{
    group_each(groups, forget_pause);
    group_later(groups);
}
