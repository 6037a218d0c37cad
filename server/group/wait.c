/* Calls that wait until this server's view is what they need. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group_private.h"

/*
 * Before a change: this server leads, or another does that can be asked; a record that it wrote then, the mark, has
 * come back by both watches, so all that was in the store before has too; and the leader is not at work on the group of
 * its own accord.
 */
struct wait {
    struct wait *next;
    struct ep_groups *groups;
    char name[64];
    uint64_t until; /* loop time, ms */
    bool change;    /* before one; else the group is to be seen as the next two say */
    uint64_t revision, epoch;
    bool marking;  /* the mark is on its way to the store */
    uint64_t mark; /* its revision; 0: not written */
    struct ep_error error;
    ep_groups_wait_fn done;
    void *user;
};

static bool is_late(const struct wait *wait)
{
    return wait->groups->closing || wait->error.status || group_now(wait->groups) >= wait->until;
}

/* ---- the mark ----------------------------------------------------------------------------------- */

/* Of a commit that was asked for, so it is there until it is answered. */
static void on_marked(const struct ep_error *error, uint64_t revision, void *user)
{
    struct wait *wait = user;

    wait->marking = false;
    wait->mark = revision;
    wait->error = *error;
}

static bool knows_mark(const struct wait *wait)
{
    return wait->groups->view >= wait->mark && ep_cluster_knows(wait->groups->cluster, wait->mark);
}

/* ---- before a change ------------------------------------------------------------------------------ */

/* While the store is away nobody comes to lead. */
static bool is_in_vain(const struct ep_groups *groups)
{
    return ep_store_health(groups->store, NULL) != EP_OK;
}

static bool is_led(struct ep_groups *groups)
{
    const char *leader = ep_cluster_leader(groups->cluster);

    return ep_cluster_leads(groups->cluster) || (leader && strcmp(leader, nodes_self(groups)) != 0);
}

/* The leader forms its epoch anew of its own accord, or has its workers go over to the newest. */
static bool is_renewed(struct ep_groups *groups, const char *name)
{
    const struct group *group = group_find(groups, name);

    return group && ((group->change && group->change->kind == CHANGE_RENEWAL) || turn_writes(group));
}

/* Of the leader. */
static bool is_up_to_date(struct wait *wait)
{
    if (!wait->mark) {
        wait->marking = true;
        records_mark(wait->groups, on_marked, wait);
        return false;
    }
    return knows_mark(wait) && !is_renewed(wait->groups, wait->name);
}

static bool may_change(struct wait *wait)
{
    struct ep_groups *groups = wait->groups;

    if (wait->marking)
        return false;
    if (is_late(wait))
        return true;
    if (ep_cluster_leads(groups->cluster))
        return is_up_to_date(wait);
    return is_led(groups) || is_in_vain(groups);
}

/* What else is amiss the change is refused for. */
static void judge(struct wait *wait)
{
    const struct ep_groups *groups = wait->groups;
    const bool is_behind = !wait->mark || !knows_mark(wait);

    if (wait->change && is_behind && ep_cluster_leads(groups->cluster) && !groups->closing && !wait->error.status)
        ep_error_set(&wait->error, EP_UNAVAILABLE, "the store does not tell node %s, which leads, what is new in it, "
                     "so nothing can be changed: try again", nodes_self(groups));
}

/* ---- all waits --------------------------------------------------------------------------------------- */

static bool sees(const struct wait *wait)
{
    const struct group *group = group_find(wait->groups, wait->name);
    const bool there = group && group->visible && !group->gone;

    if (is_late(wait))
        return true;
    return wait->revision ? there && group->revision >= wait->revision && group->epoch_number >= wait->epoch : !there;
}

void wait_look(struct ep_groups *groups)
{
    for (struct wait **at = &groups->waits; *at;) {
        struct wait *wait = *at;

        if (!(wait->change ? may_change(wait) : sees(wait))) {
            at = &wait->next;
            continue;
        }
        *at = wait->next;
        judge(wait);
        wait->done(&wait->error, wait->user);
        free(wait);
        at = &groups->waits; /* it may have asked for more */
    }
}

/* Who asked first is served first. */
static void begin(struct ep_groups *groups, const char *name, uint32_t within_ms, const struct wait *what)
{
    struct wait *wait = group_allocate(1, sizeof *wait), **last = &groups->waits;

    *wait = *what;
    wait->groups = groups;
    wait->until = group_now(groups) + within_ms;
    snprintf(wait->name, sizeof wait->name, "%s", name);
    while (*last)
        last = &(*last)->next;
    *last = wait;
    group_later(groups);
}

void ep_groups_see(struct ep_groups *groups, const char *name, uint64_t revision, uint64_t epoch, uint32_t within_ms,
                   ep_groups_wait_fn done, void *user)
{
    begin(groups, name, within_ms,
          &(const struct wait){ .revision = revision, .epoch = epoch, .done = done, .user = user });
}

void ep_groups_before_change(struct ep_groups *groups, const char *name, uint32_t within_ms, ep_groups_wait_fn done,
                             void *user)
{
    begin(groups, name, within_ms, &(const struct wait){ .change = true, .done = done, .user = user });
}
