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
/* All members see for themselves that the store has lost a node: that they have is told with something else, or so late that it
 * is in nobody's way while the group is formed anew. */
#define SEEN_MS 2500u

/* Mostly a report is in one piece of memory: there are as many as nodes, on every node. */
#define REPORT_BYTES 640u
#define REPORT_TIMES 4u

/* ---- writing ------------------------------------------------------------------------------- */

void report_changed(struct group *group)
{
    group->report_due = true;
    group_later(group->groups);
}

/* Of something that all other nodes see as well. */
static void changed_for_all(struct group *group)
{
    if (!group->report_by)
        group->report_by = group_now(group->groups) + SEEN_MS;
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
    group->report_by = 0;
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

/* Looks again when it is. */
static bool is_due(const struct group *group)
{
    const uint64_t now = group_now(group->groups);

    if (group->report_due || (group->report_by && now >= group->report_by))
        return true;
    if (group->report_by)
        group_after(group->groups, group->report_by - now);
    return false;
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

    if (group->report_under_way || !session || groups->closing || !is_due(group))
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
                   worker_name(rank_worker(rank)));
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

static bool tells_of_no_worker(const Ep__V1__RankStatus *told)
{
    return !told->pid && !*told->worker && !told->ops && !told->timeouts && !told->dropped_routes;
}

static void take_worker(struct rank *rank, const Ep__V1__RankStatus *told)
{
    const struct ep_worker from = { .pid = (pid_t)told->pid, .uid = (uid_t)told->uid, .name = told->worker };
    struct worker *worker;

    rank->follows = told->follows;
    if (tells_of_no_worker(told)) { /* as all ranks of an epoch that has just begun */
        rank_forget_worker(rank);
        return;
    }
    worker = rank_set_worker(rank, &from);
    worker->counted.ops = told->ops;
    worker->counted.timeouts = told->timeouts;
    worker->counted.dropped_routes = told->dropped_routes;
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

/* Of the epoch that runs.  Members who have lost each other do not find each other again in it. */
static void apply(struct epoch *epoch, uint32_t node, const struct report *report)
{
    if (*report->status->reason && !*epoch->torn_there) {
        snprintf(epoch->torn_there, sizeof epoch->torn_there, "node %.80s: %.160s", epoch->plan.name[node],
                 report->status->reason);
        heal_later(epoch->group);
    }
    for (size_t i = 0; i < report->status->n_ranks; i++)
        apply_told(epoch, node, report->status->ranks[i]);
}

/* The next report of that node; both lists are in the order of names. */
static const struct report *walk_to(const struct group *group, const char *node, size_t *at)
{
    int order = -1;

    while (*at < group->n_reports && (order = strcmp(group->reports[*at].node, node)) < 0)
        ++*at;
    return order == 0 ? &group->reports[*at] : NULL;
}

/* NULL: it has told nothing. */
static bool is_there(const struct group *group, const char *node, const struct report *report)
{
    return report ? report->alive : nodes_alive(group->groups, node);
}

static void apply_of(struct epoch *epoch, uint32_t node, size_t *at)
{
    const struct group *group = epoch->group;
    const struct report *report = walk_to(group, epoch->plan.name[node], at);

    if (report && report->epoch == epoch->number)
        apply(epoch, node, report);
    if (node != epoch->own && !is_there(group, epoch->plan.name[node], report)) {
        epoch->store_lost = true;
        report_torn(epoch, node, "it is not there");
    }
}

void report_apply(struct group *group)
{
    struct epoch *epoch = group->epoch;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        if (!epoch->ranks[i].here)
            epoch->ranks[i].since_us = 0; /* whatever its node says is news */
    for (size_t at = 0, i = 0; i < epoch->plan.n_nodes; i++)
        apply_of(epoch, epoch->plan.by_name[i], &at);
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

/* False: it is of no use. */
static bool read_record(struct report *report, const struct ep_record *record)
{
    Ep__V1__GroupStatus *status;
    const Ep__V1__TurnPart *part;

    arena_reset(&report->memory);
    report->memory.room = REPORT_BYTES + REPORT_TIMES * record->size;
    status = arena_unpack(&report->memory, &ep__v1__group_status__descriptor, record->size, record->value);
    if (!status)
        return false;
    part = status->turn_part;
    report->status = status;
    report->epoch = status->epoch;
    report->from = part ? part->from : 0;
    report->follow = part && part->from && part->follow;
    report->whole = status->phase == EP_PHASE(READY);
    return true;
}

static void drop(struct group *group, struct report *report)
{
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

    if (!reports)
        abort();
    group->reports = reports;
    report = reports + at;
    memmove(report + 1, report, (group->n_reports++ - at) * sizeof *report);
    *report = (struct report){ .node = group_copy(node), .alive = nodes_alive(group->groups, node) };
    return report;
}

/*
 * The node may not have heard yet that its group was deleted, or wait for workers of that one; another has the name now.
 * What it has of the node it has all the same (share.c).
 */
static void look_whose(const struct group *group, struct report *report)
{
    const uint64_t created_us = report->status->created_us;

    report->other = created_us && created_us != group->created_us; /* 0: of a version that does not say */
    if (!report->other)
        return;
    report->epoch = report->from = 0;
    report->follow = report->whole = false;
}

/* Mostly there is one of the node already.  NULL: there is none now. */
static const struct report *keep(struct group *group, const char *node, const struct ep_record *record)
{
    struct report *report = find(group, node);

    if (!report && record->value)
        report = add(group, node);
    if (record->value && read_record(report, record)) {
        look_whose(group, report);
        return report;
    }
    if (record->value)
        EP_WARN("group", "a node's report is of no use", EP_S("key", record->key));
    if (report)
        drop(group, report);
    return NULL;
}

/* Who is no member has no ranks. */
static void apply_report(struct epoch *epoch, const char *node, const struct report *report)
{
    const uint32_t i = ep_plan_find(&epoch->plan, node);

    if (report->epoch == epoch->number && i < epoch->plan.n_nodes)
        apply(epoch, i, report);
}

void report_read(struct group *group, const char *node, const struct ep_record *record)
{
    const struct report *report;

    if (!strcmp(node, nodes_self(group->groups)))
        return;
    report = keep(group, node, record);
    if (!report || !group->epoch)
        return;
    apply_report(group->epoch, node, report);
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
    if (nodes_alive(epoch->group->groups, epoch->plan.name[node]))
        report_changed(epoch->group); /* nobody else may know */
    else
        changed_for_all(epoch->group);
    status_changed(epoch->group);
}

static void lose(struct epoch *epoch, const char *node)
{
    const uint32_t i = ep_plan_find(&epoch->plan, node);

    if (i == epoch->plan.n_nodes || i == epoch->own)
        return;
    epoch->store_lost = true;
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
        if (report_tells(&group->reports[i]))
            return false;
    return true;
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
        if (is_there(group, plan->name[node], report))
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
    if (report->other)
        return false;
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

uint64_t report_highest(const struct group *group)
{
    uint64_t highest = 0;

    for (size_t i = 0; i < group->n_reports; i++) {
        const struct report *report = &group->reports[i];

        if (!report_tells(report))
            continue;
        highest = report->epoch > highest ? report->epoch : highest;
        for (size_t k = 0; k < report->status->n_draining_epochs; k++)
            if (report->status->draining_epochs[k] > highest)
                highest = report->status->draining_epochs[k];
    }
    return highest;
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
