/* Calls that wait until this server's view is what they need. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "group_private.h"

/*
 * Before a change: this server leads, or another does that can be asked; a record that it wrote then, the mark, has
 * come back by both watches, so all that was in the store before has too; and the leader is not at work on the group of
 * its own accord.
 *
 * Before a read: both watches have come to the marks that the store had then, with which all changes are written.  A watch
 * may be seconds late without knowing it: after a cut its connection first has to send again what was lost.
 *
 * Before stats: the ranks that are here have counted all that was done by then.
 */
struct wait {
    struct wait *next;
    struct ep_groups *groups;
    char name[64];
    uint64_t until; /* loop time, ms */
    enum {
        BEFORE_CHANGE,
        BEFORE_READ,
        BEFORE_STATS, /* the name is empty: of all groups */
        TO_SEE /* the group as the next two say */
    } kind;
    uint64_t revision, epoch;
    uint64_t since_ns; /* BEFORE_STATS: when it was asked for */
    bool asking; /* the mark is on its way to the store, or what was read of them on its way here */
    bool known;  /* these are */
    struct records_marks marks;
    struct ep_error error;
    ep_groups_wait_fn done;
    void *user;
};

static bool is_late(const struct wait *wait)
{
    return wait->groups->closing || wait->error.status || group_now(wait->groups) >= wait->until;
}

/* ---- the marks ----------------------------------------------------------------------------------- */

/* Of a commit that was asked for, so it is there until it is answered. */
static void on_marked(const struct ep_error *error, uint64_t revision, void *user)
{
    struct wait *wait = user;

    wait->asking = false;
    wait->known = !error->status;
    wait->marks = (struct records_marks){ .groups = revision, .nodes = revision };
    wait->error = *error;
}

static bool has_come(const struct wait *wait)
{
    return wait->known && wait->groups->view >= wait->marks.groups &&
           ep_cluster_knows(wait->groups->cluster, wait->marks.nodes);
}

/* Whoever waits may be gone by now. */
static void on_marks(const struct ep_error *error, const struct records_marks *marks, void *user)
{
    struct ep_groups *groups = user;

    groups->reading_marks = false;
    for (struct wait *wait = groups->waits; wait; wait = wait->next)
        if (wait->kind == BEFORE_READ && wait->asking) {
            wait->asking = false;
            wait->known = !error->status;
            wait->marks = *marks;
            wait->error = *error;
        }
}

/* One at a time, for all who ask by then: changes wait behind it. */
static void read_marks(struct ep_groups *groups)
{
    if (groups->reading_marks)
        return;
    groups->reading_marks = true;
    for (struct wait *wait = groups->waits; wait; wait = wait->next)
        wait->asking |= wait->kind == BEFORE_READ && !wait->known;
    records_read_marks(groups, on_marks, groups);
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
    if (!wait->known) {
        wait->asking = true;
        records_mark(wait->groups, on_marked, wait);
        return false;
    }
    return has_come(wait) && !is_renewed(wait->groups, wait->name);
}

static bool may_change(struct wait *wait)
{
    struct ep_groups *groups = wait->groups;

    if (wait->asking)
        return false;
    if (is_late(wait))
        return true;
    if (ep_cluster_leads(groups->cluster))
        return is_up_to_date(wait);
    return is_led(groups) || is_in_vain(groups);
}

/* ---- before a read, after a change ------------------------------------------------------------------ */

static bool may_read(struct wait *wait)
{
    if (!wait->known && !wait->asking && !is_late(wait))
        read_marks(wait->groups);
    return is_late(wait) || has_come(wait);
}

static bool sees(const struct wait *wait)
{
    const struct group *group = group_find(wait->groups, wait->name);
    const bool there = group && group->visible && !group->gone;

    return wait->revision ? there && group->revision >= wait->revision && group->epoch_number >= wait->epoch : !there;
}

static bool is_fresh(const struct wait *wait, struct ep_error *error)
{
    return status_fresh(wait->groups, *wait->name ? wait->name : NULL, wait->since_ns, error);
}

/* ---- all waits --------------------------------------------------------------------------------------- */

static bool is_over(struct wait *wait)
{
    switch (wait->kind) {
    case BEFORE_CHANGE: return may_change(wait);
    case BEFORE_READ: return may_read(wait);
    case BEFORE_STATS: return is_fresh(wait, NULL) || is_late(wait);
    case TO_SEE: break;
    }
    return is_late(wait) || sees(wait);
}

/* What else is amiss a change is refused for. */
static void judge(struct wait *wait)
{
    const struct ep_groups *groups = wait->groups;

    if (wait->kind == BEFORE_STATS) {
        (void)is_fresh(wait, &wait->error);
        return;
    }
    if (groups->closing || wait->error.status || (wait->kind == TO_SEE ? sees(wait) : has_come(wait)))
        return;
    if (wait->kind != BEFORE_CHANGE)
        ep_error_set(&wait->error, EP_UNAVAILABLE, "the store does not tell node %s what is new in it",
                     nodes_self(groups));
    else if (ep_cluster_leads(groups->cluster))
        ep_error_set(&wait->error, EP_UNAVAILABLE, "the store does not tell node %s, which leads, what is new in it, "
                     "so nothing can be changed: try again", nodes_self(groups));
}

void wait_look(struct ep_groups *groups)
{
    for (struct wait **at = &groups->waits; *at;) {
        struct wait *wait = *at;

        if (!is_over(wait)) {
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
          &(const struct wait){
              .kind = TO_SEE, .revision = revision, .epoch = epoch, .done = done, .user = user });
}

void ep_groups_before_change(struct ep_groups *groups, const char *name, uint32_t within_ms, ep_groups_wait_fn done,
                             void *user)
{
    begin(groups, name, within_ms, &(const struct wait){ .kind = BEFORE_CHANGE, .done = done, .user = user });
}

void ep_groups_before_read(struct ep_groups *groups, uint32_t within_ms, ep_groups_wait_fn done, void *user)
{
    begin(groups, "", within_ms, &(const struct wait){ .kind = BEFORE_READ, .done = done, .user = user });
}

void ep_groups_before_stats(struct ep_groups *groups, const char *name, uint32_t within_ms, ep_groups_wait_fn done,
                            void *user)
{
    begin(groups, name ? name : "", within_ms,
          &(const struct wait){ .kind = BEFORE_STATS, .since_ns = ep_clock_ns(), .done = done, .user = user });
}
