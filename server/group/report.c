/*
 * What every node lets the others know of its ranks: one record of each group, written when something has changed, and
 * a moment after the last one at the earliest.  So every server can tell the whole state of a group.
 *
 * That a rank has left or joined is told faster (join.c), and may come before the record or after it: the time of a
 * rank's last change, which its own node gives and which only grows, says what is news.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define AGAIN_MS 1000u /* after a report that the store did not take */
/* Ranks come and go together: what is known so soon after a report is told in one, which all servers of the group read. */
#define GATHER_MS 20u

/* Mostly a report is in one piece of memory: there are as many as nodes, on every node. */
#define REPORT_BYTES 640u
#define REPORT_TIMES 4u

/* ---- writing ------------------------------------------------------------------------------- */

void report_changed(struct group *group)
{
    group->report_due = true;
    group_later(group->groups);
}

static void mark(struct group *group)
{
    group->report_due = true;
}

void report_all(struct ep_groups *groups)
{
    group_each(groups, mark);
    group_later(groups);
}

/* Nobody reads it where there is nobody else. */
static bool is_read(const struct ep_groups *groups)
{
    return ep_cluster_count(groups->cluster) > 1;
}

static bool has_part(const struct group *group)
{
    return group->visible && group->epoch && (epoch_is_member(group->epoch) || group->older);
}

static void on_written(const struct ep_error *error, uint64_t revision, void *user)
{
    struct group *group = user;

    group->report_under_way = false;
    if (!error->status) {
        group->reported = group->reported ? revision : 0;
        return;
    }
    if (!has_part(group))
        return; /* there is another one, of a group with the same name, or it has gone with its session */
    group->report_due = true;
    group->report_after = group_now(group->groups) + AGAIN_MS;
}

static void write_part(struct group *group, struct ep_session *session)
{
    struct arena arena = { 0 };

    group->reported = EP_STORE_ANY; /* whatever becomes of it */
    group->report_after = group_now(group->groups) + GATHER_MS;
    share_note(group);
    records_report(group, status_report(&arena, group), EP_STORE_ANY, session, on_written, group);
    arena_clear(&arena);
}

/* Only this group's own: another one of the name may have one by now. */
static void take_back(struct group *group)
{
    const uint64_t written = group->reported;

    group->reported = 0;
    records_report(group, NULL, written, NULL, on_written, group);
}

/* Looks again when it is time. */
static bool is_too_soon(const struct group *group)
{
    const uint64_t now = group_now(group->groups);

    if (now >= group->report_after)
        return false;
    group_after(group->groups, group->report_after - now);
    return true;
}

void report_write(struct group *group)
{
    struct ep_groups *groups = group->groups;
    struct ep_session *session = ep_cluster_session(groups->cluster);

    if (!group->report_due || group->report_under_way || !session || groups->closing)
        return;
    if (has_part(group) ? !is_read(groups) || is_too_soon(group) : !group->reported)
        return;
    group->report_due = false;
    group->report_under_way = true;
    if (has_part(group))
        write_part(group, session);
    else
        take_back(group);
}

/* ---- ranks of other nodes --------------------------------------------------------------------- */

static void leave_team(struct rank *rank)
{
    struct epoch *epoch = rank->epoch;

    if (!epoch->team)
        return;
    if (rank->hold)
        ep_team_unhold(epoch->team, rank->hold);
    rank->hold = 0;
    ep_team_leave(epoch->team, rank->number);
}

static void tell(struct rank *rank, bool was_here, bool is_here)
{
    struct epoch *epoch = rank->epoch;

    if (is_here && !was_here)
        epoch_tell(epoch, NULL, true, EP_GROUP_RANK_JOINED, rank->number, epoch->number,
                   rank->worker.name ? rank->worker.name : "");
    else if (!is_here && was_here)
        epoch_tell(epoch, NULL, true, EP_GROUP_RANK_LOST, rank->number, epoch->number, rank_reason(rank));
}

/* A team has left the ranks of a node that was lost, for the rest of the epoch. */
static bool is_news(const struct rank *rank, uint64_t change)
{
    return rank->away ? !rank->epoch->team && change >= rank->since_us : change > rank->since_us;
}

bool report_rank(struct rank *rank, ep_rank_state state, uint64_t change, const char *reason)
{
    const bool was_here = rank->state == EP_RANK_STATE(ATTACHED), is_here = state == EP_RANK_STATE(ATTACHED);

    if (rank->here || !is_news(rank, change))
        return false;
    rank->away = false;
    if (rank_is_lost(state))
        leave_team(rank);
    rank_put_state(rank, state);
    rank->since_us = change;
    rank_set_reason(rank, reason);
    if (!rank->epoch->detached)
        tell(rank, was_here, is_here);
    return true;
}

static void take_worker(struct rank *rank, const Ep__V1__RankStatus *told)
{
    const struct ep_worker worker = { .pid = (pid_t)told->pid, .uid = (uid_t)told->uid, .name = told->worker };

    worker_set(&rank->worker, &worker);
    rank->follows = told->follows;
    rank->counted.ops = told->ops;
    rank->counted.timeouts = told->timeouts;
    rank->counted.dropped_routes = told->dropped_routes;
}

/* What is told of a rank is true of `more` ranks behind it. */
static void apply_told(struct epoch *epoch, uint32_t node, const Ep__V1__RankStatus *told)
{
    for (uint64_t r = told->rank; r < epoch->n_ranks && r <= (uint64_t)told->rank + told->more; r++) {
        if (epoch->ranks[r].node != node)
            continue;
        take_worker(&epoch->ranks[r], told);
        (void)report_rank(&epoch->ranks[r], told->state, told->since_us, told->reason);
    }
}

static void apply(struct epoch *epoch, const struct report *report)
{
    const uint32_t node = ep_plan_find(&epoch->plan, report->node);

    if (report->status->epoch != epoch->number)
        return;
    for (size_t i = 0; i < report->status->n_ranks; i++)
        apply_told(epoch, node, report->status->ranks[i]);
}

void report_apply(struct group *group)
{
    struct epoch *epoch = group->epoch;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        if (!epoch->ranks[i].here)
            epoch->ranks[i].since_us = 0; /* whatever its node says is news */
    for (size_t i = 0; i < group->n_reports; i++)
        apply(epoch, &group->reports[i]);
    for (uint32_t i = 0; i < epoch->plan.n_nodes; i++)
        if (i != epoch->own && !nodes_alive(group->groups, epoch->plan.name[i]))
            report_torn(epoch, i, "it is not there");
}

/* ---- reading -------------------------------------------------------------------------------------- */

/* The node's place, or where it would be. */
static size_t place_of(const struct group *group, const char *node)
{
    size_t low = 0, high = group->n_reports;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;

        if (strcmp(group->reports[middle].node, node) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* NULL: there is none. */
static struct report *find(const struct group *group, const char *node)
{
    const size_t at = place_of(group, node);

    return at < group->n_reports && !strcmp(group->reports[at].node, node) ? &group->reports[at] : NULL;
}

const struct report *report_of(const struct group *group, const char *node)
{
    return find(group, node);
}

static void clear(struct report *report)
{
    arena_clear(&report->memory);
    free(report->node);
}

static void set(struct report *report, Ep__V1__GroupStatus *status, struct arena memory)
{
    const Ep__V1__TurnPart *part = status->turn_part;

    report->status = status;
    report->memory = memory;
    report->epoch = status->epoch;
    report->from = part ? part->from : 0;
    report->follow = part && part->from && part->follow;
    report->whole = status->phase == EP_PHASE(READY);
}

static void drop(struct group *group, const char *node)
{
    struct report *report = find(group, node);

    if (!report)
        return;
    clear(report);
    memmove(report, report + 1, (size_t)(group->reports + --group->n_reports - report) * sizeof *report);
}

void report_forget(struct group *group)
{
    for (size_t i = 0; i < group->n_reports; i++)
        clear(&group->reports[i]);
    free(group->reports);
    group->reports = NULL;
    group->n_reports = 0;
}

static struct report *add(struct group *group, const char *node)
{
    const size_t at = place_of(group, node);
    struct report *reports = realloc(group->reports, (group->n_reports + 1) * sizeof *reports), *report;
    char *name = strdup(node);

    if (!reports || !name)
        abort();
    group->reports = reports;
    report = reports + at;
    memmove(report + 1, report, (group->n_reports++ - at) * sizeof *report);
    *report = (struct report){ .node = name, .alive = nodes_alive(group->groups, node) };
    return report;
}

/* Mostly there is one of the node already. */
static struct report *keep(struct group *group, const char *node, Ep__V1__GroupStatus *status, struct arena memory)
{
    struct report *report = find(group, node);

    if (!report)
        report = add(group, node);
    arena_clear(&report->memory);
    set(report, status, memory);
    return report;
}

void report_read(struct group *group, const char *node, const struct ep_record *record)
{
    struct arena memory = { .room = REPORT_BYTES + REPORT_TIMES * record->size };
    Ep__V1__GroupStatus *status = NULL;
    struct report *report;

    if (!strcmp(node, nodes_self(group->groups)))
        return;
    if (record->value && !(status = arena_unpack(&memory, &ep__v1__group_status__descriptor, record->size, record->value)))
        EP_WARN("group", "a node's report is of no use", EP_S("key", record->key));
    if (!status) {
        arena_clear(&memory);
        drop(group, node);
        return;
    }
    report = keep(group, node, status, memory);
    if (!group->epoch)
        return;
    apply(group->epoch, report);
    group_assess(group);
    status_changed(group);
}

void report_alive(struct ep_groups *groups, const char *node, bool alive)
{
    for (size_t i = 0; i < groups->n; i++) {
        struct report *report = find(groups->list[i], node);

        if (report)
            report->alive = alive;
    }
}

/* ---- nodes that are lost ------------------------------------------------------------------------------ */

static void take_away(struct rank *rank, const char *reason)
{
    const bool was_here = rank->state == EP_RANK_STATE(ATTACHED);

    leave_team(rank);
    rank->away = true;
    rank_put_state(rank, EP_RANK_STATE(ABSENT));
    rank_set_reason(rank, reason);
    if (!rank->epoch->detached)
        tell(rank, was_here, false);
}

/* Members of an old epoch go one by one: that is as it should be. */
static void tear(struct epoch *epoch, uint32_t node, const char *reason)
{
    snprintf(epoch->torn, sizeof epoch->torn, "%s", reason);
    if (epoch != epoch->group->epoch)
        return;
    ep_team_distrust(epoch->team);
    heal_later(epoch->group);
    EP_WARN("group", "a node of an epoch is lost", EP_S("group", epoch->group->name), EP_U("epoch", epoch->number),
            EP_S("node", epoch->plan.name[node]), EP_S("why", reason));
}

/*
 * Its ranks are lost to the epoch, also if the node comes back: then there will be another epoch.  Where only the store has
 * lost it, it learns so from its connections.
 */
void report_torn(struct epoch *epoch, uint32_t node, const char *why)
{
    const struct ranks there = epoch_ranks_of(epoch, node);
    char reason[REASON_MAX];

    if (epoch->dropped)
        return; /* nobody is in it, and another thread gives back its team */
    snprintf(reason, sizeof reason, "node %.80s is lost: %.120s", epoch->plan.name[node], why);
    if (!*epoch->torn && epoch->team)
        tear(epoch, node, reason);
    for (uint32_t i = 0; i < there.n; i++)
        if (!epoch->ranks[there.number[i]].away)
            take_away(&epoch->ranks[there.number[i]], reason);
    if (epoch->team)
        ep_team_cut(epoch->team, node);
    if (epoch != epoch->group->epoch)
        return; /* nobody is told of older ones */
    group_assess(epoch->group);
    report_changed(epoch->group);
    status_changed(epoch->group);
}

static void lose(struct epoch *epoch, const char *node)
{
    const uint32_t i = ep_plan_find(&epoch->plan, node);

    if (i < epoch->plan.n_nodes && i != epoch->own)
        report_torn(epoch, i, "its server is gone, or the store has not heard of it");
}

void report_lost(struct ep_groups *groups, const char *node)
{
    for (size_t i = 0; i < groups->n; i++) {
        if (groups->list[i]->dead)
            continue;
        if (groups->list[i]->epoch)
            lose(groups->list[i]->epoch, node);
        for (struct epoch *epoch = groups->list[i]->older; epoch; epoch = epoch->next)
            lose(epoch, node);
    }
}

/* ---- what the leader wants to know --------------------------------------------------------------------- */

static bool nobody_has_a_part(const struct group *group)
{
    for (size_t i = 0; i < group->n_reports; i++)
        if (group->reports[i].alive)
            return false;
    return true;
}

/* The next report of that node; both lists are in the order of names. */
static const struct report *walk_to(const struct group *group, const char *node, size_t *at)
{
    int order = -1;

    while (*at < group->n_reports && (order = strcmp(group->reports[*at].node, node)) < 0)
        ++*at;
    return order == 0 ? &group->reports[*at] : NULL;
}

bool report_settled(const struct group *group, uint64_t epoch)
{
    const struct ep_plan *plan = group->epoch ? &group->epoch->plan : NULL;
    size_t at = 0;

    if (!epoch)
        return nobody_has_a_part(group);
    for (uint32_t i = 0; plan && i < plan->n_nodes; i++) {
        const uint32_t node = plan->by_name[i];
        const struct report *report = walk_to(group, plan->name[node], &at);

        if (node == group->epoch->own || (report && report->epoch >= epoch))
            continue;
        if (report ? report->alive : nodes_alive(group->groups, plan->name[node]))
            return false;
    }
    return true;
}

bool report_follows(const struct group *group)
{
    for (size_t i = 0; i < group->n_reports; i++)
        if (group->reports[i].follow && group->reports[i].alive)
            return true;
    return false;
}

static bool drains(const struct report *report, uint64_t epoch)
{
    for (size_t i = 0; i < report->status->n_draining_epochs; i++)
        if (report->status->draining_epochs[i] == epoch)
            return true;
    return report->epoch == epoch; /* it has not heard of a newer one */
}

bool report_drains(const struct group *group, uint64_t epoch)
{
    for (size_t i = 0; i < group->n_reports; i++)
        if (group->reports[i].alive && drains(&group->reports[i], epoch))
            return true;
    return false;
}

bool report_not_whole(const struct group *group)
{
    if (!group->epoch || !epoch_whole(group->epoch))
        return true;
    for (size_t i = 0; i < group->n_reports; i++)
        if (group->reports[i].epoch == group->epoch->number && !group->reports[i].whole)
            return true;
    return false;
}
