/*
 * The turn as a node sees it: workers of an older epoch that go over to the newest one, together.
 *
 * The leader asks for all that are here (Turn): how far they are; or to promise that they wait at a position for its
 * decision.  Each is asked on its own connection, and the answer is that of all.  From its promise until it is
 * withdrawn, nobody attaches to the older epoch: whoever did would not be bound by it.  The decision comes with the
 * group's record.  From then on a rank that leaves because it has gone over is done, and not lost.
 *
 * Who claims a rank of the newest epoch anew, and could only wait there for ranks that are still in the older one, is
 * welcomed when these come, or a bounded time later.
 *
 * A rank that dies before its successor has attached leaves that one absent, so that nobody waits for it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define ANSWER_MS  500u
#define WELCOME_MS 3000u /* less than a worker waits for it */

/* ---- who follows ----------------------------------------------------------------------------- */

static bool is_left(const struct epoch *epoch)
{
    return !epoch->members;
}

/* The list begins with the newest of them. */
struct epoch *follow_epoch(const struct group *group)
{
    struct epoch *oldest = NULL;

    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (!is_left(epoch) && !epoch->turn_to)
            oldest = epoch;
    return oldest;
}

static bool follows(const struct rank *rank)
{
    return rank->own->member && rank->own->member->attached && rank->own->member->on_turn;
}

/* Only ranks that are here have members: of many nodes these are few. */
static struct rank *rank_here(const struct epoch *epoch, uint32_t i)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    return i < here.n ? &epoch->ranks[here.number[i]] : NULL;
}

static bool all_follow(const struct epoch *epoch)
{
    const struct rank *rank;

    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++)
        if (rank->own->member && rank->own->member->attached && !follows(rank))
            return false;
    return true;
}

static bool some_follow(const struct epoch *epoch)
{
    const struct rank *rank;

    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++)
        if (follows(rank))
            return true;
    return false;
}

struct rank *follow_before(const struct rank *rank)
{
    struct epoch *from = follow_epoch(rank->epoch->group);
    struct rank *before = from && rank->number < from->n_ranks ? &from->ranks[rank->number] : NULL;

    return before && follows(before) ? before : NULL;
}

bool follow_closes(const struct epoch *epoch)
{
    return epoch->promised || epoch->turn_to;
}

bool follow_pending(const struct group *group)
{
    const struct epoch *from = follow_epoch(group);

    if (group->turned.to == group->epoch_number)
        return false;
    return (from && all_follow(from)) || report_follows(group);
}

/* Where the rank goes on; NULL: not on this node. */
static struct rank *place_of(const struct rank *rank)
{
    struct epoch *epoch = rank->epoch->group->epoch;
    struct rank *place = epoch && rank->number < epoch->n_ranks ? &epoch->ranks[rank->number] : NULL;

    return place && place->here ? place : NULL;
}

/* ---- what it waits for -------------------------------------------------------------------------- */

static bool waits_for_others(const struct epoch *from, char waits[static REASON_MAX])
{
    const uint64_t to = from->group->epoch_number;

    for (const struct epoch *epoch = from->group->older; epoch; epoch = epoch->next)
        if (epoch != from && !epoch->turn_to && !is_left(epoch)) {
            snprintf(waits, REASON_MAX, "epoch %" PRIu64 " waits for workers on node %s to leave epoch %" PRIu64
                     ", which was replaced", to, nodes_self(from->group->groups), epoch->number);
            return true;
        }
    if (from->members == from->attached)
        return false;
    snprintf(waits, REASON_MAX, "epoch %" PRIu64 " waits for a worker on node %s that is attaching to epoch %" PRIu64, to,
             nodes_self(from->group->groups), from->number);
    return true;
}

static bool waits_for_rank(const struct rank *rank, char waits[static REASON_MAX])
{
    const struct rank *place = place_of(rank);

    if (!rank->own->member || !rank->own->member->attached || !place ||
        (place->own->member && place->own->member->attached))
        return false;
    snprintf(waits, REASON_MAX, "epoch %" PRIu64 " waits for rank %u on node %s to attach", place->epoch->number,
             rank->number, nodes_self(rank->epoch->group->groups));
    return true;
}

/* True: not ready for a turn, and why. */
static bool waits_for(const struct epoch *from, char waits[static REASON_MAX])
{
    const struct group *group = from->group;
    const struct rank *rank;

    if (!epoch_served(group->epoch)) {
        snprintf(waits, REASON_MAX, "epoch %" PRIu64 " is not formed on node %s yet", group->epoch_number,
                 nodes_self(group->groups));
        return true;
    }
    if (waits_for_others(from, waits))
        return true;
    for (uint32_t i = 0; (rank = rank_here(from, i)); i++)
        if (waits_for_rank(rank, waits))
            return true;
    return false;
}

void follow_part(const struct group *group, char waits[static REASON_MAX], Ep__V1__TurnPart *part)
{
    const struct epoch *from = follow_epoch(group);

    ep__v1__turn_part__init(part);
    waits[0] = '\0';
    part->decided = group->turned.to == group->epoch_number;
    if (!from || !group->epoch)
        return;
    part->from = from->number;
    part->follow = all_follow(from);
    part->some_follow = some_follow(from);
    (void)waits_for(from, waits);
    part->waits_for = waits;
}

/* ---- asks --------------------------------------------------------------------------------------------- */

static void tell(struct rank *rank, const struct ep_group_turn *turn)
{
    struct ep_membership *member = rank->own->member;

    if (member && member->attached && member->on_turn)
        member->on_turn(turn, member->user);
}

static void forget_asked(const struct epoch *epoch)
{
    const struct rank *rank;

    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++)
        if (rank->own->member)
            rank->own->member->asked = 0;
}

static void fill_ranks(struct arena *arena, const struct epoch *from, Ep__V1__TurnReply *reply)
{
    const struct rank *rank;

    reply->ranks = arena_alloc(arena, from->members * sizeof *reply->ranks + 1);
    for (uint32_t i = 0; (rank = rank_here(from, i)); i++) {
        Ep__V1__TurnRank *told;

        if (!follows(rank) || !rank->own->member->far)
            continue;
        told = reply->ranks[reply->n_ranks++] = arena_alloc(arena, sizeof *told);
        ep__v1__turn_rank__init(told);
        told->rank = rank->number;
        told->position = rank->own->member->far;
    }
}

static void fill_lost(struct arena *arena, const struct epoch *from, Ep__V1__TurnReply *reply)
{
    reply->lost = arena_alloc(arena, from->n_ranks * sizeof *reply->lost);
    for (uint32_t i = 0; i < from->n_ranks; i++)
        if (from->ranks[i].away)
            reply->lost[reply->n_lost++] = i;
}

static uint64_t furthest_of(const Ep__V1__TurnReply *reply)
{
    uint64_t furthest = 0;

    for (size_t i = 0; i < reply->n_ranks; i++)
        furthest = reply->ranks[i]->position > furthest ? reply->ranks[i]->position : furthest;
    return furthest;
}

/* NULL: all have answered. */
static void finish(struct group *group, const struct ep_error *error)
{
    static const struct ep_error none = EP_ERROR_INIT;
    struct ask *ask = &group->ask;
    const ep_cluster_done_fn done = ask->done;
    Ep__V1__TurnReply reply = EP__V1__TURN_REPLY__INIT;
    struct arena arena = { 0 };

    if (!done)
        return;
    ask->done = NULL;
    forget_asked(ask->from);
    fill_ranks(&arena, ask->from, &reply);
    fill_lost(&arena, ask->from, &reply);
    reply.promised = ask->given;
    EP_DEBUG("group", "workers were asked for a turn", EP_S("group", group->name), EP_U("from", ask->from->number),
             EP_U("ranks", reply.n_ranks), EP_U("furthest", furthest_of(&reply)), EP_B("promised", reply.promised),
             EP_S("error", error ? error->text : ""));
    done(error ? error : &none, error ? NULL : &reply.base, ask->user);
    arena_clear(&arena);
}

static void fail(struct group *group, ep_status status, const char *why)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)ep_error_set(&error, status, "%s", why);
    finish(group, &error);
}

static void answered(struct ep_membership *member)
{
    struct group *group = member->rank->epoch->group;

    member->asked = 0;
    if (--group->ask.waiting == 0)
        finish(group, NULL);
}

void ep_membership_promise(struct ep_membership *member, uint32_t number, bool given, uint64_t passed, uint64_t position)
{
    struct ask *ask;

    if (!member->rank || !number || member->asked != number)
        return; /* to an ask that is over */
    ask = &member->rank->epoch->group->ask;
    ask->given &= given;
    member->far = passed > position ? passed : position;
    answered(member);
}

static void ask_rank(struct rank *rank, uint64_t to, uint64_t at)
{
    struct ep_groups *groups = rank->epoch->group->groups;
    struct ep_group_turn turn = { .to = to, .at = at };

    if (!++groups->asks)
        groups->asks++; /* 0 is none */
    turn.number = rank->own->member->asked = groups->asks;
    tell(rank, &turn);
}

/* What was promised is withdrawn: those who wait go on. */
static void withdraw(struct epoch *epoch)
{
    const struct ep_group_turn turn = { .to = epoch->group->epoch_number, .at = EP_GROUP_NO_TURN };
    struct rank *rank;

    if (!epoch->promised)
        return;
    epoch->promised = 0;
    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++)
        tell(rank, &turn);
}

static void withdraw_all(struct group *group)
{
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (!epoch->turn_to)
            withdraw(epoch);
}

static bool is_left_out(const Ep__V1__TurnRequest *request, uint32_t rank)
{
    for (size_t i = 0; i < request->n_left_out; i++)
        if (request->left_out[i] == rank)
            return true;
    return false;
}

/* How many are asked. */
static uint32_t choose_asked(const struct epoch *from, const Ep__V1__TurnRequest *request)
{
    const struct rank *rank;
    uint32_t n = 0;

    for (uint32_t i = 0; (rank = rank_here(from, i)); i++) {
        if (!follows(rank))
            continue;
        rank->own->member->far = 0;
        rank->own->member->left_out = is_left_out(request, rank->number);
        n += !rank->own->member->left_out;
    }
    return n;
}

static void ask_all(struct epoch *from, const Ep__V1__TurnRequest *request, ep_cluster_done_fn done, void *user)
{
    struct ask *ask = &from->group->ask;
    struct rank *rank;

    ask->done = done;
    ask->user = user;
    ask->from = from;
    ask->at = request->at;
    ask->waiting = 1 + choose_asked(from, request); /* this function */
    ask->until = group_now(from->group->groups) + ANSWER_MS;
    ask->given = request->at != EP_GROUP_NO_TURN;
    from->promised = ask->given ? request->to : 0;
    for (uint32_t i = 0; (rank = rank_here(from, i)); i++) /* answers may come before this is over */
        if (follows(rank) && !rank->own->member->left_out)
            ask_rank(rank, request->to, request->at);
    if (--ask->waiting == 0)
        finish(from->group, NULL);
}

/* ---- Turn ---------------------------------------------------------------------------------------------- */

/* What is heard twice or late takes nothing back. */
static ep_status check_order(struct group *group, const Ep__V1__TurnRequest *request, struct ep_error *error)
{
    struct ask *ask = &group->ask;

    if (request->fence == ask->fence && request->number <= ask->number)
        return ep_error_set(error, EP_ABORTED, "number is %" PRIu64 ": %" PRIu64 " was heard already", request->number,
                            ask->number);
    ask->fence = request->fence;
    ask->number = request->number;
    return EP_OK;
}

static ep_status check_ready(const struct group *group, const struct epoch *from, const Ep__V1__TurnRequest *request,
                             struct ep_error *error)
{
    char waits[REASON_MAX];

    if (!group->epoch || group->epoch_number != request->to || group->turned.to == request->to)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "to is %" PRIu64 ": node %s is at epoch %" PRIu64, request->to,
                            nodes_self(group->groups), group->epoch_number);
    if (!from)
        return EP_OK;
    if (from->number != request->from)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "from is %" PRIu64 ": node %s has workers in epoch %" PRIu64,
                            request->from, nodes_self(group->groups), from->number);
    if (waits_for(from, waits))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%s", waits);
    if (!all_follow(from))
        return ep_error_set(error, EP_FAILED_PRECONDITION, "workers on node %s do not follow", nodes_self(group->groups));
    return EP_OK;
}

/* NULL: answered. */
static struct epoch *hear(struct group *group, const Ep__V1__TurnRequest *request, struct ep_error *error)
{
    struct epoch *from = follow_epoch(group);

    if (check_order(group, request, error))
        return NULL;
    fail(group, EP_ABORTED, "the leader has asked anew");
    withdraw_all(group);
    if (!request->from || check_ready(group, from, request, error))
        return NULL;
    return from;
}

static void serve_turn(struct ep_groups *groups, const ProtobufCMessage *message, ep_cluster_done_fn done,
                       void *user)
{
    const Ep__V1__TurnRequest *request = (const Ep__V1__TurnRequest *)message;
    struct group *group = group_find(groups, request->group);
    Ep__V1__TurnReply reply = EP__V1__TURN_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct epoch *from = NULL;

    reply.promised = true; /* where there is nobody */
    if (!part_heed(groups, request->fence, &error) && group && group->visible)
        from = hear(group, request, &error);
    if (from)
        ask_all(from, request, done, user);
    else
        done(&error, error.status ? NULL : &reply.base, user);
}

void ep_groups_turn(struct ep_groups *groups, const Ep__V1__TurnRequest *request, ep_cluster_done_fn done,
                    void *user)
{
    term_serve(groups, request->fence, &request->base, serve_turn, done, user);
}

/* ---- decided ------------------------------------------------------------------------------------------------ */

static void leave_out(struct rank *rank, uint64_t to, uint64_t at)
{
    const struct ep_group_turn told = { .decided = true, .to = to, .at = EP_GROUP_MISSED };

    EP_WARN("group", "a worker is too far from the others to go over with them", EP_S("group", rank->epoch->group->name),
            EP_U("rank", rank->number), EP_I("pid", rank_worker(rank)->pid), EP_U("from", rank->epoch->number),
            EP_U("to", to), EP_U("at", at));
    tell(rank, &told);
}

static void go_over(struct epoch *from, uint64_t to, uint64_t at)
{
    const struct ep_group_turn told = { .decided = true, .to = to, .at = at };
    struct rank *rank;

    from->turn_to = to;
    from->promised = 0;
    EP_INFO("group", "workers go over", EP_S("group", from->group->name), EP_U("from", from->number), EP_U("to", to),
            EP_U("at", at), EP_U("here", from->attached));
    for (uint32_t i = 0; (rank = rank_here(from, i)); i++)
        if (at != EP_GROUP_MISSED && rank->own->member && rank->own->member->left_out)
            leave_out(rank, to, at);
        else
            tell(rank, &told);
}

/* What was not promised here was decided without this server: it was away, and the others have lost its workers. */
static uint64_t boundary_of(const struct epoch *epoch, const Ep__V1__Turn *turn)
{
    const bool kept = epoch->number == turn->from && epoch->promised == turn->to && epoch->group->ask.at == turn->at;

    return kept ? turn->at : EP_GROUP_MISSED;
}

static void decide(struct epoch *epoch, const Ep__V1__Turn *turn)
{
    if (epoch->number < turn->to && !epoch->turn_to)
        go_over(epoch, turn->to, boundary_of(epoch, turn));
}

/*
 * A server that was away may hear of the turn together with the epoch that this leads to, or of the last of several alone.
 * Nobody asks its workers for any of them any more, so this is for all that are in epochs before.
 */
void follow_decided(struct group *group, const Ep__V1__Turn *turn)
{
    if (group->turned.from == turn->from && group->turned.to == turn->to)
        return;
    ep__v1__turn__init(&group->turned);
    group->turned.from = turn->from;
    group->turned.to = turn->to;
    group->turned.at = turn->at;
    fail(group, EP_ABORTED, "it is decided");
    if (group->epoch)
        decide(group->epoch, turn);
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        decide(epoch, turn);
    report_changed(group);
}

/* Whoever was about to go over to the one before. */
static void tell_epoch(struct epoch *epoch)
{
    const struct rank *rank;

    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++) {
        struct ep_membership *member = follows(rank) ? rank->own->member : NULL;

        if (member)
            member->on_event(EP_GROUP_EPOCH, 0, epoch->group->epoch_number, "a newer epoch is there", member->user);
    }
}

void follow_anew(struct group *group)
{
    fail(group, EP_ABORTED, "a newer epoch is there");
    withdraw_all(group);
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (epoch != group->older && !epoch->turn_to) /* that one was told when it was replaced */
            tell_epoch(epoch);
}

/* ---- who leaves --------------------------------------------------------------------------------------------- */

/* Somebody else of the epoch is still there, and goes over without this rank. */
static bool goes_on(const struct epoch *from)
{
    for (uint32_t i = 0; i < from->n_ranks; i++) {
        const struct rank *rank = &from->ranks[i];

        if (rank->here ? rank->own->member && rank->own->member->attached : !rank->away && !rank_is_lost(rank->state))
            return true;
    }
    return false;
}

/* An epoch of one node that nobody has been in expects its ranks; from now on not this one. */
static void forsake(struct rank *place)
{
    place->epoch->used = true; /* when all have left, all are expected again */
    rank_set_state(place, EP_RANK_FORSAKEN);
    if (place->epoch->team)
        ep_team_leave(place->epoch->team, place->number);
    rank_set_reason(place, "its worker left the epoch before, and did not come over");
}

static void lose_successor(struct rank *rank)
{
    struct rank *place = place_of(rank);

    if (rank->epoch == rank->epoch->group->epoch || rank->epoch->turn_to || rank->epoch->detached || !rank->follows || !place ||
        place->state != EP_RANK_STATE(EXPECTED) || !goes_on(rank->epoch))
        return;
    if (place->own->member)
        place->forsaken = true;
    else
        forsake(place);
}

void follow_unclaimed(struct rank *rank)
{
    if (rank->forsaken && rank->state == EP_RANK_STATE(EXPECTED))
        forsake(rank);
    rank->forsaken = false;
}

void follow_left(struct ep_membership *member)
{
    struct rank *rank = member->rank;

    if (member->asked)
        answered(member);
    if (member->attached)
        lose_successor(rank);
    else
        follow_unclaimed(rank);
    if (rank->epoch->group->older)
        report_changed(rank->epoch->group);
}

/* ---- time ------------------------------------------------------------------------------------------------------ */

bool follow_delays(struct ep_membership *member)
{
    struct group *group = member->rank->epoch->group;

    if (member->after || member->rank->epoch != group->epoch || !follow_pending(group))
        return false;
    member->welcome_by = group_now(group->groups) + WELCOME_MS;
    return true;
}

static void welcome(struct ep_membership *member)
{
    static const struct ep_error none = EP_ERROR_INIT;
    const struct epoch *epoch = member->rank->epoch;

    member->welcome_by = 0;
    member->tell_epoch = epoch != epoch->group->epoch; /* it has missed that */
    member->on_attached(&none, member->user);
}

static bool is_welcome(const struct epoch *epoch, const struct ep_membership *member)
{
    return epoch != epoch->group->epoch || group_now(epoch->group->groups) >= member->welcome_by ||
           !follow_pending(epoch->group);
}

static void welcome_all(struct epoch *epoch)
{
    const struct rank *rank;

    for (uint32_t i = 0; (rank = rank_here(epoch, i)); i++)
        if (rank->own->member && rank->own->member->welcome_by && is_welcome(epoch, rank->own->member))
            welcome(rank->own->member);
}

static void end_ask(struct group *group)
{
    const struct ask *ask = &group->ask;
    const struct rank *rank;
    char text[REASON_MAX];

    if (!ask->done || group_now(group->groups) < ask->until)
        return;
    for (uint32_t i = 0; (rank = rank_here(ask->from, i)); i++) {
        if (!rank->own->member || !rank->own->member->asked)
            continue;
        snprintf(text, sizeof text, "rank %u on node %s (pid %d) does not say when it can go over", rank->number,
                 nodes_self(group->groups), (int)rank_worker(rank)->pid);
        fail(group, EP_DEADLINE_EXCEEDED, text);
        return;
    }
}

void follow_sweep(struct group *group)
{
    end_ask(group);
    if (group->epoch)
        welcome_all(group->epoch);
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        welcome_all(epoch);
}

void follow_close(struct group *group, const char *why)
{
    fail(group, EP_UNAVAILABLE, why);
}
