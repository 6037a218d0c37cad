/*
 * Members of an epoch that have lost each other, while the store has lost none of them: do they find each other again?
 * Before they do, an epoch that is formed anew comes to nothing, and keeps operators waiting.
 *
 * The leader asks those who say that they have lost somebody, and each of them asks whom it has lost, on a connection of its
 * own: one that was there before sends again later and later what was lost on the way.  The leader's own question takes the
 * way that the change takes then, so where that still hangs, nothing is begun.
 *
 * A member of an older version does not know the question.  Then the epoch is formed anew as it was before there was
 * one: once a server that is gone would be known to be.
 */
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define MEMBER_MS 1500u /* longer than a member waits for the others */
#define OTHER_MS  500u
#define AT_ONCE   16u /* connections that a member opens: a large group may have lost half of itself */

/* ---- a member ------------------------------------------------------------------------------ */

struct round {
    struct ep_groups *groups;
    char *group;
    uint64_t epoch;
    uint32_t next;    /* node of the epoch that has not been looked at */
    uint32_t waiting; /* questions under way, and the function that asks them */
    struct ep_error failure; /* the first */
    ep_cluster_done_fn done;
    void *user;
};

struct question {
    struct round *round;
    uint64_t boot; /* of the server that was lost */
};

static void end_question(struct round *round)
{
    static const Ep__V1__ReachReply reply = EP__V1__REACH_REPLY__INIT;

    if (--round->waiting)
        return;
    round->done(&round->failure, round->failure.status ? NULL : &reply.base, round->user);
    free(round->group);
    free(round);
}

/* One that was started again is not the one that was lost: the store will say so, and it has no part of the epoch. */
static ep_status judge(const struct question *question, const Ep__V1__PingReply *pong, struct ep_error *error)
{
    if (pong->boot_us == question->boot)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "node %.80s was started again", pong->node);
}

static void ask_on(struct round *round);

static void on_pong(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct question *question = user;
    struct round *round = question->round;
    struct ep_groups *groups = round->groups;

    groups->calls--;
    if (error->status && !round->failure.status)
        ep_error_set(&round->failure, EP_UNAVAILABLE, "%s", error->text);
    else if (!round->failure.status)
        (void)judge(question, (const Ep__V1__PingReply *)reply, &round->failure);
    free(question);
    ask_on(round);
    end_question(round);
    group_later(groups);
}

static void ask_node(struct round *round, const char *name)
{
    const struct ep_cluster_node *node = ep_cluster_find(round->groups->cluster, name);
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    struct question *question = group_allocate(1, sizeof *question);

    *question = (struct question){ .round = round, .boot = node ? node->boot : 0 };
    request.node = (char *)(uintptr_t)name;
    round->waiting++;
    round->groups->calls++;
    ep_cluster_call_anew(round->groups->cluster, name, &ep__v1__node__descriptor, "Ping", &request.base, OTHER_MS, on_pong,
                         question);
}

static bool has_lost(const struct epoch *epoch, uint32_t node)
{
    const struct ranks there = epoch_ranks_of(epoch, node);

    return there.n && epoch->ranks[there.number[0]].away;
}

/* The epoch that is asked about, where it is the one that runs here. */
static const struct epoch *find_epoch(struct round *round)
{
    const struct group *group = group_find(round->groups, round->group);

    if (group && group->epoch && group->epoch->number == round->epoch)
        return group->epoch;
    ep_error_set(&round->failure, EP_NOT_FOUND, "epoch %llu of group \"%.64s\" does not run on node %s",
                 (unsigned long long)round->epoch, round->group, nodes_self(round->groups));
    return NULL;
}

/* Asks the next ones; nobody any more, once one was not found. */
static void ask_on(struct round *round)
{
    const struct epoch *epoch = round->failure.status ? NULL : find_epoch(round);

    for (; epoch && round->next < epoch->plan.n_nodes && round->waiting <= AT_ONCE; round->next++)
        if (round->next != epoch->own && has_lost(epoch, round->next))
            ask_node(round, epoch->plan.name[round->next]);
}

void ep_groups_reach(struct ep_groups *groups, const Ep__V1__ReachRequest *request, ep_cluster_done_fn done, void *user)
{
    struct round *round = group_allocate(1, sizeof *round);

    *round = (struct round){
        .groups = groups, .group = group_copy(request->group), .epoch = request->epoch, .waiting = 1,
        .failure = EP_ERROR_INIT, .done = done, .user = user
    };
    ask_on(round);
    end_question(round);
}

/* ---- the leader ---------------------------------------------------------------------------- */

static void tell(const struct group *group)
{
    const struct reach *reach = &group->reach;

    if (!reach->failed)
        EP_INFO("group", "members do not find each other yet", EP_S("group", group->name), EP_U("epoch", reach->asked),
                EP_S("error", reach->failure.text));
}

static void end_answer(struct group *group)
{
    struct reach *reach = &group->reach;

    if (--reach->waiting)
        return;
    if (reach->failure.status)
        tell(group);
    reach->failed = reach->failure.status != EP_OK;
    reach->found = !reach->failed;
    group_later(group->groups);
}

/* What a member of an older version says counts for nothing then. */
static bool hinders(const struct group *group, const struct ep_error *error)
{
    if (error->status == EP_UNIMPLEMENTED)
        return group_now(group->groups) < group->reach.blind_after;
    return error->status != EP_OK;
}

static void on_answer(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct group *group = user;

    (void)reply;
    if (hinders(group, error) && !group->reach.failure.status)
        group->reach.failure = *error;
    end_answer(group);
}

static void on_called(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    ((struct group *)user)->groups->calls--;
    on_answer(error, reply, user);
}

static bool says_lost(const struct group *group, uint32_t node)
{
    const struct report *report = report_of(group, group->epoch->plan.name[node]);

    return report && report->epoch == group->epoch->number && *report->status->reason;
}

static void ask_member(struct group *group, uint32_t node, const Ep__V1__ReachRequest *request)
{
    struct ep_groups *groups = group->groups;

    group->reach.waiting++;
    groups->calls++;
    ep_cluster_call(groups->cluster, group->epoch->plan.name[node], &ep__v1__node__descriptor, "Reach", &request->base,
                    MEMBER_MS, on_called, group);
}

static void ask_self(struct group *group, const Ep__V1__ReachRequest *request)
{
    group->reach.waiting++;
    ep_groups_reach(group->groups, request, on_answer, group);
}

static void ask_all(struct group *group)
{
    const struct epoch *epoch = group->epoch;
    Ep__V1__ReachRequest request = EP__V1__REACH_REQUEST__INIT;

    request.group = group->name;
    request.epoch = epoch->number;
    for (uint32_t i = 0; i < epoch->plan.n_nodes; i++)
        if (i != epoch->own && says_lost(group, i))
            ask_member(group, i, &request);
    if (*epoch->torn)
        ask_self(group, &request);
}

bool reach_needed(const struct group *group)
{
    const struct epoch *epoch = group->epoch;

    return epoch && !epoch->store_lost && (*epoch->torn || *epoch->torn_there);
}

bool reach_take(struct group *group)
{
    const bool found = group->reach.found && group->epoch && group->epoch->number == group->reach.asked;

    group->reach.found = false;
    return found;
}

void reach_ask(struct group *group)
{
    struct reach *reach = &group->reach;

    if (reach->waiting)
        return;
    reach->waiting = 1; /* this function */
    reach->asked = group->epoch->number;
    reach->failure = (struct ep_error)EP_ERROR_INIT;
    ask_all(group);
    end_answer(group);
}

void reach_lost(struct group *group)
{
    group->reach.blind_after = group_now(group->groups) + ep_cluster_lost_ms(group->groups->cluster);
}

void reach_forget(struct group *group)
{
    group->reach.blind_after = 0;
    group->reach.failed = false;
}
