/*
 * The leader's side of a turn: the workers of an older epoch go over to the newest one, all at the same boundary between
 * their steps.  Nothing of it begins while a change of the group is under way, nor a change where the records are written.
 *
 *   PROVE        once in a term, and where it is not known what became of a commit: the records are written as they are.
 *                From then on nothing that was decided before can come to be there unseen
 *   WITHDRAW     whoever may have promised is told that it is not bound
 *   LOOK         how far are the workers?  All nodes answer; one with workers that are not ready says what they wait for
 *   LOOK_AGAIN   a moment later: how fast are they?
 *   ASK          all promise to wait at a position that none will have reached by then; who is too far from most of the
 *                others, or has gone on without them, is left out, and hears of the decision that it missed it
 *   DECIDE       the record says so: that is the decision, whatever becomes of this server
 *   SETTLE       all nodes have heard of it; bounded
 *
 *   NONE -> PROVE -> WITHDRAW -> NONE -> LOOK -> LOOK_AGAIN -> ASK -> DECIDE -> SETTLE -> NONE
 *   ASK, when one refuses or does not answer -> WITHDRAW;  DECIDE, when the store does not say yes -> PROVE
 *
 * Each failure makes the next attempt later, and its position further away.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define CALL_MS    1500u /* longer than workers are given to answer */
#define BETWEEN_MS 20u   /* two looks */
#define AGAIN_MS   100u  /* after what has to succeed in the end */
#define PAUSE_MS   100u  /* after the first failure */
#define LONGEST_MS 5000u
#define SETTLE_MS  3000u

static const char *step_name(enum turn_step step)
{
    static const char *const names[] = {
        [TURN_NONE] = "none", [TURN_PROVE] = "prove", [TURN_WITHDRAW] = "withdraw", [TURN_LOOK] = "look",
        [TURN_LOOK_AGAIN] = "look again", [TURN_ASK] = "ask", [TURN_DECIDE] = "decide", [TURN_SETTLE] = "settle",
    };

    return names[step];
}

static void enter(struct group *group, enum turn_step step)
{
    struct turn *turn = &group->turn;
    const uint64_t now = group_now(group->groups);

    EP_DEBUG("group", "turn", EP_S("group", group->name), EP_U("from", turn->from), EP_U("to", turn->to),
             EP_S("step", step_name(turn->step)), EP_S("next", step_name(step)), EP_U("at", turn->at),
             EP_U("ms", now - turn->since), EP_S("error", turn->failure.text));
    turn->step = step;
}

bool turn_writes(const struct group *group)
{
    const enum turn_step step = group->turn.step;

    return step == TURN_PROVE || step == TURN_DECIDE || step == TURN_SETTLE;
}

static uint64_t term_of(const struct group *group)
{
    return ep_cluster_guard(group->groups->cluster).expected;
}

/* ---- is there one to be made? --------------------------------------------------------------------------- */

/* What the nodes say of their parts. */
struct parts {
    uint64_t from; /* 0: nobody is in an older epoch */
    bool several;  /* such epochs */
    bool follow;   /* all who are */
    bool some;     /* some do */
    char waits[REASON_MAX];
};

static void add_part(struct parts *parts, const Ep__V1__TurnPart *part)
{
    if (!part->from)
        return;
    parts->several |= parts->from && parts->from != part->from;
    parts->from = parts->from ? parts->from : part->from;
    parts->follow &= part->follow;
    parts->some |= part->some_follow;
    if (!*parts->waits)
        snprintf(parts->waits, sizeof parts->waits, "%s", part->waits_for);
}

static void add_expected(struct parts *parts, const struct epoch *epoch)
{
    const struct rank *rank = epoch->ranks;

    if (!epoch->in_state[EP_RANK_STATE(EXPECTED)] || *parts->waits)
        return;
    while (rank->state != EP_RANK_STATE(EXPECTED))
        rank++;
    snprintf(parts->waits, sizeof parts->waits, "epoch %" PRIu64 " waits for rank %u on node %s to attach", epoch->number,
             rank->number, epoch->plan.name[rank->node]);
}

static void look_at_parts(const struct group *group, struct parts *out)
{
    Ep__V1__TurnPart own;
    char waits[REASON_MAX];

    *out = (struct parts){ .follow = true };
    follow_part(group, waits, &own);
    add_part(out, &own);
    for (size_t i = 0; i < group->n_reports; i++) {
        const struct report *report = &group->reports[i];

        if (report->alive && report->from && report->epoch >= group->epoch_number)
            add_part(out, report->status->turn_part);
    }
    if (out->from)
        add_expected(out, group->epoch);
}

/* Have all nodes heard of the newest epoch? */
static bool is_known(const struct group *group)
{
    for (size_t i = 0; i < group->n_reports; i++)
        if (report_tells(&group->reports[i]) && group->reports[i].epoch < group->epoch_number)
            return false;
    return report_settled(group, group->epoch_number);
}

static bool is_wanted(const struct group *group, const struct parts *parts)
{
    return parts->from && parts->follow && group->turned.to != group->epoch_number;
}

static bool is_alive(const struct group *group)
{
    return group->visible && !group->gone && !group->dead && group->epoch && group->phase != EP_PHASE(DRAINING);
}

/* ---- failures ----------------------------------------------------------------------------------------------- */

static uint64_t pause_ms(const struct turn *turn)
{
    const uint64_t ms = (uint64_t)PAUSE_MS << (turn->failures < 8 ? turn->failures : 8);

    return ms < LONGEST_MS ? ms : LONGEST_MS;
}

/* What was promised is withdrawn first. */
static void fail(struct group *group)
{
    struct turn *turn = &group->turn;
    const uint64_t now = group_now(group->groups);

    EP_INFO("group", "no turn yet", EP_S("group", group->name), EP_U("from", turn->from), EP_U("to", turn->to),
            EP_S("step", step_name(turn->step)), EP_U("at", turn->at), EP_U("failures", turn->failures + 1),
            EP_U("ms", now - turn->since), EP_S("why", turn->failure.text));
    turn->until = now + (turn->open ? 0 : pause_ms(turn));
    turn->failures++;
    enter(group, turn->open ? TURN_WITHDRAW : TURN_NONE);
    group_later(group->groups);
}

/* The server that began does not lead any more, or leads anew: whoever leads withdraws. */
static bool is_stale(const struct group *group)
{
    return !ep_cluster_leads(group->groups->cluster) || term_of(group) != group->turn.fence;
}

static void drop(struct group *group)
{
    struct turn *turn = &group->turn;

    if (turn->step != TURN_NONE)
        enter(group, TURN_NONE);
    turn->open = false;
    turn->proven = 0;
    turn->failures = 0;
}

/* ---- asking all nodes -------------------------------------------------------------------------------------- */

static void all_answered(struct group *group);

static void end_answer(struct group *group)
{
    if (--group->turn.waiting == 0)
        all_answered(group);
}

static void *grow(void *of, size_t n, size_t size)
{
    void *grown = realloc(of, n * size);

    if (!grown)
        abort();
    return grown;
}

static void add_fars(struct turn *turn, const Ep__V1__TurnReply *reply)
{
    if (!reply->n_ranks)
        return; /* nobody is there who would have lost anybody */
    turn->fars = grow(turn->fars, turn->n_fars + reply->n_ranks, sizeof *turn->fars);
    for (size_t i = 0; i < reply->n_ranks; i++)
        turn->fars[turn->n_fars++] = (struct how_far){ .rank = reply->ranks[i]->rank, .node = turn->n_nodes,
                                                       .position = reply->ranks[i]->position };
    turn->lost = grow(turn->lost, turn->n_lost + reply->n_lost + 1, sizeof *turn->lost);
    for (size_t i = 0; i < reply->n_lost; i++)
        turn->lost[turn->n_lost++] = (struct lost_rank){ turn->n_nodes, reply->lost[i] };
    turn->n_nodes++;
}

static void on_answer(const struct ep_error *error, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__TurnReply *reply = (const Ep__V1__TurnReply *)message;
    struct group *group = user;
    struct turn *turn = &group->turn;

    if (error->status && !turn->failure.status)
        turn->failure = *error;
    if (!error->status) {
        turn->promised &= reply->promised;
        if (turn->step != TURN_ASK)
            add_fars(turn, reply);
    }
    end_answer(group);
}

static void on_called(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct ep_groups *groups = ((struct group *)user)->groups;

    groups->calls--;
    on_answer(error, reply, user);
    group_later(groups);
}

static void call(struct group *group, const char *node, const Ep__V1__TurnRequest *request)
{
    struct ep_groups *groups = group->groups;

    group->turn.waiting++;
    if (!strcmp(node, nodes_self(groups))) {
        ep_groups_turn(groups, request, on_answer, group);
        return;
    }
    groups->calls++;
    ep_cluster_call(groups->cluster, node, &ep__v1__node__descriptor, "Turn", &request->base, CALL_MS, on_called, group);
}

static size_t list_left_out(const struct turn *turn, uint32_t *left_out)
{
    size_t n = 0;

    for (uint32_t i = 0; i < turn->n_fars; i++)
        if (i < turn->together || i >= turn->together + turn->n_together)
            left_out[n++] = turn->fars[i].rank;
    return n;
}

/* Not only those that are known to have workers: who says nothing may not have been heard. */
static void ask_all(struct group *group, enum turn_step step, uint64_t at)
{
    const struct ep_cluster *cluster = group->groups->cluster;
    struct turn *turn = &group->turn;
    Ep__V1__TurnRequest request = EP__V1__TURN_REQUEST__INIT;

    enter(group, step);
    turn->failure = (struct ep_error)EP_ERROR_INIT;
    turn->promised = true;
    request.left_out = group_allocate(turn->n_fars + 1, sizeof *request.left_out);
    if (step == TURN_ASK)
        request.n_left_out = list_left_out(turn, request.left_out);
    else
        turn->n_fars = turn->n_lost = turn->n_nodes = 0;
    request.group = group->name;
    request.from = step == TURN_WITHDRAW ? 0 : turn->from;
    request.to = turn->to;
    request.fence = turn->fence;
    request.number = ++turn->number;
    request.at = at;
    turn->waiting = 1; /* this function */
    for (size_t i = 0; i < ep_cluster_count(cluster); i++)
        if (ep_cluster_at(cluster, i)->alive)
            call(group, ep_cluster_at(cluster, i)->name, &request);
    free(request.left_out);
    end_answer(group);
}

/* ---- records ------------------------------------------------------------------------------------------------- */

static void on_proven(const struct ep_error *error, uint64_t revision, void *user)
{
    struct group *group = user;
    struct turn *turn = &group->turn;

    (void)revision;
    turn->waiting--;
    turn->failure = *error;
    turn->until = group_now(group->groups) + (error->status ? AGAIN_MS : 0);
    if (is_stale(group)) {
        drop(group);
        return;
    }
    if (error->status)
        return; /* again, of what is seen then */
    turn->proven = turn->fence;
    turn->open = true;
    enter(group, TURN_WITHDRAW);
}

static void write_records(struct group *group, enum turn_step step, records_done_fn done)
{
    Ep__V1__GroupStatus *record = status_record_now(group);
    Ep__V1__Turn decided = EP__V1__TURN__INIT, *kept = record->turn;

    if (step == TURN_DECIDE) {
        decided.from = group->turn.from;
        decided.to = group->turn.to;
        decided.at = group->turn.at;
        record->turn = &decided;
    }
    enter(group, step);
    group->turn.waiting = 1;
    records_renew(group, record, done, group);
    record->turn = kept;
    ep__v1__group_status__free_unpacked(record, NULL);
}

static void on_decided(const struct ep_error *error, uint64_t revision, void *user)
{
    struct group *group = user;
    struct turn *turn = &group->turn;

    (void)revision;
    turn->waiting--;
    if (is_stale(group)) {
        drop(group);
        return;
    }
    if (error->status) { /* it may be there nevertheless, or come to be */
        turn->failure = *error;
        turn->proven = 0;
        fail(group);
        enter(group, TURN_PROVE);
        return;
    }
    turn->until = group_now(group->groups) + SETTLE_MS;
    enter(group, TURN_SETTLE);
}

/* ---- steps -------------------------------------------------------------------------------------------------------- */

static uint64_t lesser(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t furthest_of(const struct turn *turn)
{
    return turn->n_together ? turn->fars[turn->together + turn->n_together - 1].position : 0;
}

/* Nobody is to come to it before the decision is there: as far ahead as they go between two looks, twice. */
static uint64_t choose(const struct turn *turn)
{
    const uint64_t now = furthest_of(turn);
    const uint64_t growth = lesser(now > turn->first ? now - turn->first : 0, TURN_APART);
    const uint32_t more = turn->failures < 8 ? turn->failures : 8;

    return now + lesser((2 * growth) << more, 2 * TURN_APART) + (more ? 1u << more : 0);
}

static bool may_go_on(struct group *group)
{
    struct turn *turn = &group->turn;

    if (group->change || group->epoch_number != turn->to)
        (void)ep_error_set(&turn->failure, EP_ABORTED, "a change of the group is under way");
    return turn->failure.status == EP_OK;
}

static void all_withdrawn(struct group *group)
{
    struct turn *turn = &group->turn;

    turn->until = group_now(group->groups) + (turn->failure.status ? AGAIN_MS : turn->failures ? pause_ms(turn) : 0);
    if (turn->failure.status)
        return; /* again, until all have heard it or are gone */
    turn->open = false;
    enter(group, TURN_NONE);
}

static void all_looked(struct group *group)
{
    struct turn *turn = &group->turn;

    if (!may_go_on(group)) {
        fail(group);
        return;
    }
    together_find(turn);
    if (turn->step == TURN_LOOK) {
        turn->first = furthest_of(turn);
        turn->until = group_now(group->groups) + BETWEEN_MS;
        enter(group, TURN_LOOK_AGAIN);
        group_after(group->groups, BETWEEN_MS);
        return;
    }
    turn->at = choose(turn);
    turn->open = true;
    ask_all(group, TURN_ASK, turn->at);
}

static void all_asked(struct group *group)
{
    struct turn *turn = &group->turn;

    if (!turn->promised && !turn->failure.status)
        (void)ep_error_set(&turn->failure, EP_ABORTED, "a worker was further than position %" PRIu64 " already", turn->at);
    if (may_go_on(group))
        write_records(group, TURN_DECIDE, on_decided);
    else
        fail(group);
}

static void all_answered(struct group *group)
{
    if (is_stale(group) || !is_alive(group))
        drop(group);
    else if (group->turn.step == TURN_WITHDRAW)
        all_withdrawn(group);
    else if (group->turn.step == TURN_ASK)
        all_asked(group);
    else
        all_looked(group);
}

/* ---- looking after it ---------------------------------------------------------------------------------------------- */

static void begin(struct group *group, const struct parts *parts)
{
    struct turn *turn = &group->turn;

    if (turn->to != group->epoch_number)
        turn->failures = 0;
    turn->from = parts->from;
    turn->to = group->epoch_number;
    turn->fence = term_of(group);
    turn->since = group_now(group->groups);
    turn->failure = (struct ep_error)EP_ERROR_INIT;
    if (turn->proven != turn->fence)
        write_records(group, TURN_PROVE, on_proven);
    else if (parts->follow && !parts->several && !*parts->waits && is_known(group))
        ask_all(group, TURN_LOOK, EP_GROUP_NO_TURN);
}

static bool all_know(const struct group *group)
{
    bool know = group->turned.to == group->turn.to;

    for (size_t i = 0; know && i < group->n_reports; i++) {
        const Ep__V1__TurnPart *part = group->reports[i].status->turn_part;

        know = !report_tells(&group->reports[i]) || (part && part->decided);
    }
    return know;
}

static void settle(struct group *group)
{
    struct turn *turn = &group->turn;
    const uint64_t now = group_now(group->groups);

    if (!all_know(group) && now < turn->until)
        return;
    EP_INFO("group", "turn", EP_S("group", group->name), EP_U("from", turn->from), EP_U("to", turn->to),
            EP_U("at", turn->at), EP_U("failures", turn->failures), EP_U("ms", now - turn->since));
    turn->open = false;
    turn->failures = 0;
    turn->until = 0; /* the next turn need not wait for what this one did not */
    enter(group, TURN_NONE);
    group_later(group->groups);
}

static void lead(struct group *group, const struct parts *parts)
{
    struct turn *turn = &group->turn;
    const uint64_t now = group_now(group->groups);

    if (turn->step == TURN_SETTLE) {
        settle(group);
        return;
    }
    if (now < turn->until) {
        group_after(group->groups, turn->until - now);
        return;
    }
    switch (turn->step) {
    case TURN_NONE:
        if (!group->change && parts->some && group->turned.to != group->epoch_number)
            begin(group, parts); /* whether all follow or not: promises to the leader before may be open */
        break;
    case TURN_PROVE:
        if (group->turned.to == group->epoch_number)
            drop(group);
        else
            write_records(group, TURN_PROVE, on_proven);
        break;
    case TURN_WITHDRAW: ask_all(group, TURN_WITHDRAW, EP_GROUP_NO_TURN); break;
    case TURN_LOOK_AGAIN: ask_all(group, TURN_LOOK_AGAIN, EP_GROUP_NO_TURN); break;
    default: break; /* an answer is missing */
    }
}

/* ---- what people read ------------------------------------------------------------------------------------------------ */

static void describe(const struct group *group, const struct parts *parts, char text[static REASON_MAX])
{
    const struct turn *turn = &group->turn;

    if (parts->several)
        snprintf(text, REASON_MAX, "epoch %" PRIu64 " waits for workers to leave epochs that it has replaced",
                 group->epoch_number);
    else if (*parts->waits)
        snprintf(text, REASON_MAX, "%s", parts->waits);
    else if (turn->failures && turn->failure.status)
        snprintf(text, REASON_MAX, "epoch %" PRIu64 " is not gone over to yet: %.180s", group->epoch_number,
                 turn->failure.text);
    else
        snprintf(text, REASON_MAX, "workers of epoch %" PRIu64 " are about to go over to epoch %" PRIu64, parts->from,
                 group->epoch_number);
}

static void show_waiting(struct group *group, const struct parts *parts)
{
    char text[REASON_MAX];

    describe(group, parts, text);
    if (group->turning && !strcmp(group->reason, text))
        return;
    group->turning = true;
    group_phase(group, EP_PHASE_CHANGE, text);
    status_changed(group);
}

static void show(struct group *group, const struct parts *parts)
{
    const bool running = group->phase == EP_PHASE(READY) || group->phase == EP_PHASE(DEGRADED);

    if (group->change && group->change->kind != CHANGE_LIVE)
        group->turning = false; /* the phase is the change's */
    else if (is_wanted(group, parts) && (running || group->turning))
        show_waiting(group, parts);
    else if (group->turning) {
        group->turning = false;
        if (group->phase != EP_PHASE(RECONFIGURING))
            return;
        group_phase(group, EP_PHASE_KEPT, NULL);
        group_assess(group);
        status_changed(group);
    }
}

void turn_look(struct group *group)
{
    struct parts parts;

    if (group->turn.waiting)
        return;
    if (!is_alive(group)) {
        drop(group);
        return;
    }
    look_at_parts(group, &parts);
    show(group, &parts);
    if (!ep_cluster_leads(group->groups->cluster))
        drop(group);
    else if (group->turn.step != TURN_NONE && is_stale(group))
        drop(group);
    else
        lead(group, &parts);
}
