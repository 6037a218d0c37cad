/*
 * The turn: workers of three servers that follow their group from epoch to epoch.  They are played: each passes a
 * boundary and begins an op in turn, at most two ops ahead of the slowest, and does what libepclient does when it is
 * asked, told, or hears of an epoch.
 *
 * Whatever happens, all that go over from one epoch to another do so at the same boundary, nobody waits for a decision
 * for ever, and in the end all are in the newest epoch, and nothing of the older ones is left.
 */
#include "span_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "window.h"

#define OLD   64u /* hidden */
#define NEW   128u
#define NEWER 256u
#define RANKS 6u
#define AHEAD 2u
#define TURNS 64u
#define NEVER UINT64_MAX
#define ALONE 1000u /* ops; ranks that wait for each other may be so far apart */

struct worker {
    struct play *play;
    uint32_t rank, server;
    struct ep_membership *at, *next; /* where it is; its successor */
    uint64_t epoch, next_epoch;      /* of these */
    bool attached, next_attached;
    bool hears_epoch, no_place;      /* a newer epoch is there; it has no place in it */
    bool detached;                   /* its group, or its server, is gone */
    uint64_t position, passed;
    uint64_t promised_to, promised_at; /* to 0: nothing */
    uint64_t turn_to, turn_at;         /* told */
    uint64_t lies; /* it says that it is so much further */
    bool follow, silent, far, slow, gone;
    bool missed; /* it was told when it had passed the boundary */
    bool idle;
    unsigned asked;
};

struct turned {
    uint64_t from, to, at; /* the boundary */
};

struct play {
    struct fixture *f;
    struct worker workers[RANKS];
    uint32_t n;
    struct turned turned[TURNS];
    size_t n_turned;
    unsigned random;
    uint32_t lost;  /* a server that the others have lost; SERVERS: none */
    uint64_t apart; /* up to this epoch they do not wait for its workers, nor these for theirs */
};

static uint32_t draw(struct play *p, uint32_t under)
{
    p->random = p->random * 1103515245u + 12345u;
    return (p->random >> 16) % under;
}

/* ---- what a worker hears ------------------------------------------------------------------------ */

static bool is_lost(const struct worker *w)
{
    return w->server == w->play->lost && w->epoch <= w->play->apart;
}

static void on_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    struct worker *w = user;

    (void)rank, (void)epoch, (void)text;
    w->hears_epoch |= event == EP_GROUP_EPOCH;
    w->detached |= event == EP_GROUP_DETACHED;
}

/* Of the successor; later it is where the worker is. */
static void on_next_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text, void *user)
{
    const struct worker *w = user;

    if (event != EP_GROUP_DETACHED || !w->next)
        on_event(event, rank, epoch, text, user);
}

static bool promise(struct worker *w, const struct ep_group_turn *turn)
{
    if (turn->at == EP_GROUP_NO_TURN || w->far || w->passed > turn->at) {
        w->promised_to = 0;
        return turn->at == EP_GROUP_NO_TURN;
    }
    w->promised_to = turn->to;
    w->promised_at = turn->at;
    return true;
}

static void on_turn(const struct ep_group_turn *turn, void *user)
{
    struct worker *w = user;
    bool given;

    if (turn->decided) {
        w->missed = w->passed > turn->at;
        assert_true(!w->missed || w->epoch <= w->play->apart || w->lies);
        w->turn_to = turn->to;
        w->turn_at = turn->at;
        return;
    }
    given = promise(w, turn);
    w->asked += turn->at != EP_GROUP_NO_TURN;
    if (!w->silent && turn->number)
        ep_membership_promise(w->at, turn->number, given, w->passed + w->lies, w->position + w->lies);
    if (turn->at != EP_GROUP_NO_TURN)
        w->far = false;
}

static void on_attached(const struct ep_error *error, void *user)
{
    struct worker *w = user;
    struct ep_membership_info info;

    if (error->status) {
        ep_membership_release(w->at, "it could not attach", false);
        w->at = NULL;
        return;
    }
    ep_membership_info(w->at, &info);
    w->attached = true;
    w->position = info.position;
    w->passed = info.position + 1;
}

static void on_next_attached(const struct ep_error *error, void *user)
{
    struct worker *w = user;

    if (!error->status) {
        w->next_attached = true;
        return;
    }
    ep_membership_release(w->next, "it could not attach", false);
    w->next = NULL;
    w->hears_epoch = true; /* again */
}

/* ---- what a worker does ---------------------------------------------------------------------------- */

static struct ep_worker identity(const struct worker *w)
{
    return (struct ep_worker){ .pid = getpid() + (pid_t)w->rank, .uid = geteuid(), .name = "tester",
                               .on_turn = w->follow ? on_turn : NULL };
}

static struct ep_groups *groups_of(const struct worker *w)
{
    return w->play->f->servers[w->server].groups;
}

static bool claim(struct worker *w)
{
    const struct ep_worker who = identity(w);
    struct ep_membership_info info;

    if (ep_groups_claim(groups_of(w), "moe", (int32_t)w->rank, &who, on_event, w, &w->at, NULL))
        return false;
    ep_membership_info(w->at, &info);
    w->epoch = info.epoch;
    ep_membership_attach(w->at, &who, on_attached);
    return true;
}

static void leave_next(struct worker *w)
{
    if (w->next)
        ep_membership_release(w->next, "its worker goes elsewhere", false);
    w->next = NULL;
    w->next_attached = false;
}

static void claim_next(struct worker *w)
{
    struct ep_worker who = identity(w);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_membership_info info;

    leave_next(w);
    who.after = w->epoch;
    switch (ep_groups_claim(groups_of(w), "moe", (int32_t)w->rank, &who, on_next_event, w, &w->next, &error)) {
    case EP_OK:
        w->hears_epoch = w->no_place = false;
        ep_membership_info(w->next, &info);
        w->next_epoch = info.epoch;
        ep_membership_attach(w->next, &who, on_next_attached);
        return;
    case EP_NOT_FOUND: w->hears_epoch = false; w->no_place = true; return;
    case EP_UNAVAILABLE: case EP_ALREADY_EXISTS: return; /* again */
    default: fail_msg("rank %u of epoch %llu: %s", w->rank, (unsigned long long)w->epoch, error.text);
    }
}

/* The boundary is the same for all. */
static void note_turn(struct worker *w)
{
    struct play *p = w->play;

    for (size_t i = 0; i < p->n_turned; i++)
        if (p->turned[i].from == w->epoch && p->turned[i].to == w->turn_to) {
            assert_int_equal(p->turned[i].at, w->position);
            return;
        }
    assert_true(p->n_turned < TURNS);
    p->turned[p->n_turned++] = (struct turned){ w->epoch, w->turn_to, w->position };
}

static void go_over(struct worker *w)
{
    struct ep_membership_info info;

    if (w->missed) {
        leave_next(w);
    } else {
        note_turn(w);
        ep_membership_turned(w->at, w->turn_to);
    }
    ep_membership_release(w->at, "its worker left", false);
    w->at = w->next;
    w->next = NULL;
    w->gone = !w->at;
    w->epoch = w->next_epoch;
    w->attached = w->next_attached;
    w->next_attached = w->no_place = false;
    w->promised_to = w->turn_to = 0;
    if (w->gone)
        return;
    ep_membership_info(w->at, &info);
    assert_true(w->attached);
    w->position = info.position;
    w->passed = info.position + 1;
}

/* An op ends when all who take part have begun it. */
static bool may_begin(const struct worker *w)
{
    for (uint32_t i = 0; i < w->play->n; i++) {
        const struct worker *peer = &w->play->workers[i];

        if (peer->at && peer->attached && peer->epoch == w->epoch && is_lost(peer) == is_lost(w) &&
            peer->position + AHEAD <= w->position)
            return false;
    }
    return true;
}

static void step(struct worker *w)
{
    if (w->turn_to && w->position >= w->turn_at) {
        go_over(w);
    } else if (w->promised_to && w->position >= w->promised_at) {
        return; /* waits */
    } else if (may_begin(w)) {
        w->passed = w->position + 1;
        w->position++;
    }
}

static void die(struct worker *w)
{
    leave_next(w);
    if (w->at)
        ep_membership_release(w->at, "its worker died", false);
    *w = (struct worker){ .play = w->play, .rank = w->rank, .server = w->server, .follow = w->follow, .gone = true };
}

static void act(struct worker *w)
{
    if (w->detached)
        die(w);
    if (!w->at || !w->attached)
        return;
    if (w->hears_epoch && !w->turn_to && w->follow && !w->slow)
        claim_next(w);
    if (!w->idle && draw(w->play, 4) == 0)
        step(w);
}

static void go(struct play *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        act(&p->workers[i]);
    uv_run(&p->f->loop, UV_RUN_NOWAIT);
}

#define PLAY(p, condition)                                                                                            \
    do {                                                                                                              \
        const uint64_t end = ep_clock_ns() + WAIT_NS;                                                                 \
        while (!(condition)) {                                                                                        \
            if (ep_clock_ns() > end)                                                                                  \
                in_vain(p, #condition);                                                                               \
            go(p);                                                                                                    \
        }                                                                                                             \
    } while (0)

static void in_vain(const struct play *p, const char *what)
{
    for (uint32_t i = 0; i < p->n; i++) {
        const struct worker *w = &p->workers[i];

        print_message("rank %u: epoch %llu, next %llu%s, position %llu, passed %llu, promised %llu at %llu, turn %llu at "
                      "%llu%s%s\n", w->rank, (unsigned long long)w->epoch, (unsigned long long)(w->next ? w->next_epoch : 0),
                      w->next_attached ? "" : " (not attached)", (unsigned long long)w->position,
                      (unsigned long long)w->passed, (unsigned long long)w->promised_to,
                      (unsigned long long)w->promised_at, (unsigned long long)w->turn_to, (unsigned long long)w->turn_at,
                      w->hears_epoch ? ", hears of an epoch" : "", w->at ? "" : ", gone");
    }
    span_in_vain(p->f, what);
}

/* ---- operators ------------------------------------------------------------------------------------------- */

static void ask_update(struct play *p, uint32_t hidden, uint32_t ranks, struct answer *answer)
{
    const Ep__V1__GroupSpec spec = span_spec(hidden, ranks);
    char field_hidden[] = "hidden", field_ranks[] = "ranks", *fields[] = { field_hidden, field_ranks };

    *answer = (struct answer){ 0 };
    ep_groups_update(p->f->servers[span_leader(p->f)].groups, "moe", 0, &spec, fields, 2, false, NULL, span_on_answer, answer);
}

/* Each change that is refused is written into the group's history. */
static void pause_before_trying_again(struct play *p)
{
    const uint64_t until = ep_clock_ns() + 10 * EP_NS_PER_MS;

    PLAY(p, ep_clock_ns() >= until);
}

static void update(struct play *p, uint32_t hidden, uint32_t ranks)
{
    struct answer answer;

    do {
        pause_before_trying_again(p); /* a turn is being decided: the API waits for that */
        PLAY(p, span_leader(p->f) < SERVERS);
        ask_update(p, hidden, ranks, &answer);
        PLAY(p, answer.done);
    } while (answer.error.status == EP_FAILED_PRECONDITION && strstr(answer.error.text, "try again"));
    assert_string_equal(answer.error.text, "");
}

/* All ranks attached, in the first epoch. */
static void open_play(struct play *p, struct fixture *f, uint32_t ranks)
{
    const Ep__V1__GroupSpec spec = span_spec(OLD, ranks);
    struct answer answer = { 0 };

    *p = (struct play){ .f = f, .n = RANKS, .random = 1, .lost = SERVERS };
    for (uint32_t r = 0; r < RANKS; r++)
        p->workers[r] = (struct worker){ .play = p, .rank = r, .server = r / 2, .follow = true };
    ep_groups_create(f->servers[span_leader(f)].groups, "moe", &spec, false, NULL, span_on_answer, &answer);
    WAIT(f, answer.done);
    assert_string_equal(answer.error.text, "");
    for (uint32_t r = 0; r < ranks; r++) {
        WAIT(f, claim(&p->workers[r]));
        WAIT(f, p->workers[r].attached);
    }
}

static void close_play(struct play *p)
{
    for (uint32_t r = 0; r < p->n; r++)
        die(&p->workers[r]);
}

static const Ep__V1__Group *seen_by(const struct play *p, uint32_t server)
{
    const struct fixture *f = p->f;

    return f->servers[server].groups && !(f->crashed && server == f->victim)
               ? ep_groups_get(f->servers[server].groups, "moe", NULL)
               : NULL;
}

static const char *reason(const struct play *p)
{
    const uint32_t leader = span_leader(p->f);
    const Ep__V1__Group *group = leader < SERVERS ? seen_by(p, leader) : NULL;

    return group ? group->status->reason : "";
}

static bool all_show(const struct play *p, Ep__V1__Phase phase)
{
    for (uint32_t i = 0; i < SERVERS; i++) {
        const Ep__V1__Group *group = seen_by(p, i);

        if (p->f->servers[i].groups && (!group || group->status->phase != phase))
            return false;
    }
    return true;
}

/* All workers that there are, are in the newest epoch, which looks so; nothing of an older one is left. */
static bool all_over(const struct play *p, uint32_t hidden)
{
    uint64_t epoch = 0;

    for (uint32_t i = 0; i < SERVERS; i++) {
        const Ep__V1__Group *group = seen_by(p, i);

        if (!p->f->servers[i].groups)
            continue;
        if (!group || group->spec->hidden != hidden || group->status->n_draining_epochs ||
            group->status->phase == PHASE(RECONFIGURING) || (epoch && group->status->epoch != epoch))
            return false;
        epoch = group->status->epoch;
    }
    for (uint32_t r = 0; r < p->n; r++) {
        const struct worker *w = &p->workers[r];

        if (w->at && (w->epoch != epoch || !w->attached || w->promised_to))
            return false;
    }
    return epoch > 0;
}

/* ---- cases --------------------------------------------------------------------------------------------------- */

static void all_go_over_at_one_boundary(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    for (uint32_t i = 0; i < 200; i++)
        go(&p);
    update(&p, NEW, RANKS);
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    assert_true(all_show(&p, PHASE(READY)));
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(p.workers[r].epoch, 2);
    update(&p, OLD, RANKS); /* and back */
    PLAY(&p, all_over(&p, OLD));
    assert_int_equal(p.n_turned, 2);
    close_play(&p);
}

static void a_server_that_is_alone_turns_its_workers(void **state)
{
    struct fixture *f = *state;
    struct play p;

    span_stop(f, 1);
    span_stop(f, 2);
    WAIT(f, span_leader(f) == 0);
    open_play(&p, f, 2);
    update(&p, NEW, 2);
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

static void an_idle_group_turns_with_its_next_op(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    update(&p, NEW, RANKS);
    PLAY(&p, all_over(&p, NEW));
    assert_true(p.turned[0].at >= 1);
    close_play(&p);
}

static void a_rank_that_is_further_refuses_and_is_asked_again(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[3].far = true;
    update(&p, NEW, RANKS);
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

static void who_does_not_answer_is_named_and_holds_nobody_up(void **state)
{
    struct play p;
    uint64_t position;

    open_play(&p, *state, RANKS);
    p.workers[2].silent = true;
    update(&p, NEW, RANKS);
    PLAY(&p, strstr(reason(&p), "rank 2 on node b (pid "));
    position = p.workers[0].position;
    PLAY(&p, p.workers[0].position > position + 100); /* the epoch goes on */
    assert_int_equal(p.n_turned, 0);
    assert_int_equal(seen_by(&p, 0)->status->phase, PHASE(RECONFIGURING));
    p.workers[2].silent = false;
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

/* Nobody goes over at a position that no rank will ever come to: the others go without that rank, and it is told so. */
static void expect_left_out(struct play *p, uint32_t ranks, uint32_t rank, uint64_t lie)
{
    p->workers[rank].lies = lie;
    update(p, NEW, ranks);
    PLAY(p, all_over(p, NEW));
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(p->workers[r].gone, r == rank);
    assert_int_equal(p->n_turned, ranks > 1);
    assert_true(ranks == 1 || p->turned[0].at < 1u << 24);
    p->workers[rank].lies = 0;
    PLAY(p, claim(&p->workers[rank]));
    PLAY(p, all_over(p, NEW) && all_show(p, PHASE(READY)));
}

static void a_rank_that_says_to_be_where_nobody_else_is_near_is_left_out(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    expect_left_out(&p, RANKS, 3, 1ull << 62);
    close_play(&p);
}

static void so_it_is_where_it_could_come_there(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    expect_left_out(&p, RANKS, 3, 1ull << 20);
    close_play(&p);
}

static void so_it_is_where_there_is_no_other(void **state)
{
    struct play p;

    open_play(&p, *state, 1);
    expect_left_out(&p, 1, 0, UINT64_MAX / 2);
    close_play(&p);
}

static void the_reason_says_who_has_not_attached(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[3].slow = true;
    update(&p, NEW, RANKS);
    PLAY(&p, all_show(&p, PHASE(RECONFIGURING)));
    for (uint32_t i = 0; i < SERVERS; i++)
        PLAY(&p, strstr(seen_by(&p, i)->status->reason, "epoch 2 waits for rank 3 on node b to attach"));
    p.workers[3].slow = false;
    PLAY(&p, all_over(&p, NEW));
    assert_true(all_show(&p, PHASE(READY)));
    close_play(&p);
}

static void where_one_does_not_follow_nobody_goes_over(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    die(&p.workers[5]);
    p.workers[5].follow = false;
    PLAY(&p, claim(&p.workers[5]));
    PLAY(&p, p.workers[5].attached);
    update(&p, NEW, RANKS);
    PLAY(&p, p.workers[0].next_attached && p.workers[4].next_attached);
    for (uint32_t i = 0; i < 2000; i++)
        go(&p);
    assert_int_equal(p.n_turned, 0);
    PLAY(&p, all_show(&p, PHASE(READY)));
    die(&p.workers[5]);
    p.workers[5].follow = true;
    PLAY(&p, claim(&p.workers[5]));
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

static void who_has_no_place_goes_at_the_same_boundary(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    update(&p, NEW, 4);
    PLAY(&p, all_over(&p, NEW) && p.workers[4].gone && p.workers[5].gone);
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

static void new_ranks_are_waited_for(void **state)
{
    struct play p;

    open_play(&p, *state, 4);
    update(&p, NEW, RANKS);
    PLAY(&p, strstr(reason(&p), "epoch 2 waits for rank 4 on node c to attach"));
    PLAY(&p, claim(&p.workers[4]));
    PLAY(&p, strstr(reason(&p), "epoch 2 waits for rank 5 on node c to attach"));
    PLAY(&p, claim(&p.workers[5]));
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    close_play(&p);
}

static void a_place_is_kept_for_who_follows(void **state)
{
    const struct ep_worker other = { .pid = 1, .uid = geteuid(), .name = "other" };
    struct ep_worker who = other;
    struct ep_membership *membership;
    struct ep_error error = EP_ERROR_INIT;
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[0].slow = true;
    update(&p, NEW, RANKS);
    assert_int_equal(ep_groups_claim(groups_of(&p.workers[0]), "moe", 0, &other, on_event, NULL, &membership, &error),
                     EP_ALREADY_EXISTS);
    assert_non_null(strstr(error.text, "goes over to it from epoch 1"));
    who.after = 1;
    assert_int_equal(ep_groups_claim(groups_of(&p.workers[0]), "moe", 0, &who, on_event, NULL, &membership, &error),
                     EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "pid 1 does not hold rank 0"));
    p.workers[0].slow = false;
    PLAY(&p, all_over(&p, NEW));
    close_play(&p);
}

static void who_is_absent_is_not_waited_for(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    die(&p.workers[1]);
    PLAY(&p, all_show(&p, PHASE(DEGRADED)));
    update(&p, NEW, RANKS);
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    PLAY(&p, all_show(&p, PHASE(DEGRADED)));
    PLAY(&p, claim(&p.workers[1]));
    PLAY(&p, all_show(&p, PHASE(READY)));
    close_play(&p);
}

static void who_dies_before_it_attached_is_not_waited_for(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[1].slow = p.workers[4].slow = p.workers[5].slow = true;
    update(&p, NEW, RANKS);
    PLAY(&p, p.workers[0].next_attached && p.workers[2].next_attached);
    die(&p.workers[1]);
    die(&p.workers[4]); /* nobody of its node is left */
    die(&p.workers[5]);
    PLAY(&p, all_over(&p, NEW));
    assert_int_equal(p.n_turned, 1);
    for (uint32_t r = 0; r < RANKS; r++)
        PLAY(&p, p.workers[r].at || claim(&p.workers[r]));
    PLAY(&p, all_show(&p, PHASE(READY)));
    close_play(&p);
}

static void a_second_update_before_the_turn(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[5].slow = true;
    update(&p, NEW, RANKS);
    PLAY(&p, p.workers[0].next_attached);
    update(&p, NEWER, RANKS);
    p.workers[5].slow = false;
    PLAY(&p, all_over(&p, NEWER));
    assert_int_equal(p.n_turned, 1);
    assert_int_equal(p.turned[0].to, 3);
    close_play(&p);
}

/* ---- a server that misses what comes after ------------------------------------------------------------------------ */

/* The others take it for gone, and it is told of no records. */
static void lose_touch(struct play *p, uint32_t server)
{
    p->lost = server;
    p->apart = ep_groups_get(p->f->servers[server].groups, "moe", NULL)->status->epoch;
    span_hold_view(p->f, server, true);
    world_lose_session(p->f->servers[server].cluster);
}

/* It is told all that is there by then. */
static void come_back(struct play *p)
{
    world_regain_session(p->f->servers[p->lost].cluster);
    span_hold_view(p->f, p->lost, false);
}

static bool all_but_lost_show(const struct play *p, Ep__V1__Phase phase)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        if (i != p->lost && seen_by(p, i)->status->phase != phase)
            return false;
    return true;
}

static bool all_in_one_epoch(const struct play *p, uint64_t epoch)
{
    for (uint32_t i = 0; i < SERVERS; i++)
        if (seen_by(p, i)->status->epoch != epoch)
            return false;
    return true;
}

static bool are_in(const struct play *p, uint64_t epoch, uint32_t ranks)
{
    for (uint32_t r = 0; r < ranks; r++)
        if (!p->workers[r].at || p->workers[r].epoch != epoch)
            return false;
    return true;
}

static void set_idle(struct play *p, bool idle)
{
    for (uint32_t r = 0; r < p->n; r++)
        p->workers[r].idle = idle;
}

/* `ranks` of the group's, the last two of them on the server that is lost: the others go on without it, so many ops,
 * and then all are in touch again. */
static void go_on_alone(struct play *p, struct fixture *f, uint32_t ranks, uint64_t ops)
{
    open_play(p, f, ranks);
    set_idle(p, true);
    lose_touch(p, (ranks - 1) / 2);
    PLAY(p, all_but_lost_show(p, PHASE(DEGRADED)));
    for (uint32_t r = 0; r < ranks; r++)
        p->workers[r].position += is_lost(&p->workers[r]) ? 0 : ops;
    come_back(p);
    PLAY(p, all_in_one_epoch(p, 2) && p->workers[0].turn_to == 2);
    set_idle(p, false);
}

static void who_went_on_alone_for_long_is_left_out(void **state)
{
    struct play p;

    go_on_alone(&p, *state, RANKS, ALONE);
    PLAY(&p, all_over(&p, OLD));
    assert_int_equal(p.n_turned, 1);
    assert_true(p.turned[0].at >= ALONE);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(p.workers[r].gone, r >= 4);
    PLAY(&p, claim(&p.workers[4]));
    PLAY(&p, claim(&p.workers[5]));
    PLAY(&p, all_show(&p, PHASE(READY)));
    close_play(&p);
}

static void of_as_many_those_who_went_less_far_go_over(void **state)
{
    struct play p;

    go_on_alone(&p, *state, 4, ALONE);
    PLAY(&p, all_over(&p, OLD));
    assert_int_equal(p.n_turned, 1);
    assert_true(p.turned[0].at < ALONE);
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(p.workers[r].gone, r < 2);
    close_play(&p);
}

/* They have so few steps to do alone that the others can wait for them. */
static void who_went_on_alone_for_a_moment_goes_over_with_the_others(void **state)
{
    struct play p;

    go_on_alone(&p, *state, RANKS, AHEAD);
    PLAY(&p, all_over(&p, OLD) && all_show(&p, PHASE(READY)));
    assert_int_equal(p.n_turned, 1);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(p.workers[r].epoch, 2);
    close_play(&p);
}

/* They do not go on alone to where the others were. */
static void who_missed_a_turn_is_told_so(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    p.workers[4].idle = p.workers[5].idle = true;
    lose_touch(&p, 2);
    update(&p, NEW, 4);
    PLAY(&p, are_in(&p, 2, 4));
    come_back(&p);
    PLAY(&p, p.workers[4].turn_to && p.workers[5].turn_to);
    assert_int_equal(p.workers[4].turn_at, EP_GROUP_MISSED);
    p.workers[4].idle = p.workers[5].idle = false;
    PLAY(&p, all_over(&p, NEW) && p.workers[4].gone && p.workers[5].gone);
    close_play(&p);
}

/* The record has the last one alone. */
static void who_missed_two_turns_is_told_so(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    lose_touch(&p, 2);
    update(&p, NEW, 4);
    PLAY(&p, are_in(&p, 2, 4));
    update(&p, NEWER, 4);
    PLAY(&p, are_in(&p, 3, 4));
    come_back(&p);
    PLAY(&p, all_over(&p, NEWER) && p.workers[4].gone && p.workers[5].gone);
    close_play(&p);
}

/* When its workers have promised, and wait, and it is about to be decided. */
static void on_step_to_lose_touch(struct world *world, const char *kind, void *user)
{
    struct play *p = user;

    if (strcmp(kind, "commit") != 0 || !p->workers[4].promised_to || !p->workers[5].promised_to)
        return;
    world_on_step(world, NULL, NULL);
    lose_touch(p, 2);
}

static void who_has_promised_and_missed_the_decision_does_not_wait(void **state)
{
    struct play p;

    open_play(&p, *state, RANKS);
    assert_int_not_equal(span_leader(p.f), 2);
    world_on_step(p.f->world, on_step_to_lose_touch, &p);
    update(&p, NEW, RANKS);
    PLAY(&p, p.lost == 2 && are_in(&p, 2, 4));
    update(&p, NEWER, 4);
    PLAY(&p, are_in(&p, 3, 4));
    assert_int_equal(p.workers[4].epoch, 1);
    come_back(&p);
    PLAY(&p, all_over(&p, NEWER) && p.workers[4].gone && p.workers[5].gone);
    close_play(&p);
}

/* ---- a store that was set back ------------------------------------------------------------------------------------ */

/* What the store has of the group at some time. */
struct kept {
    bool done;
    Ep__V1__GroupStatus *status;
    size_t spec_bytes;
    uint8_t spec[512];
};

static void on_kept(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct kept *kept = user;

    assert_int_equal(error->status, EP_OK);
    for (size_t i = 0; i < n; i++) {
        if (!strcmp(records[i].key, "groups/moe/status"))
            kept->status = ep__v1__group_status__unpack(NULL, records[i].size, records[i].value);
        if (strcmp(records[i].key, "groups/moe/spec") != 0)
            continue;
        assert_true(records[i].size <= sizeof kept->spec);
        kept->spec_bytes = records[i].size;
        memcpy(kept->spec, records[i].value, records[i].size);
    }
    kept->done = true;
}

static struct kept keep(struct fixture *f)
{
    struct kept kept = { 0 };

    ep_store_list(f->store, "groups/moe/", on_kept, &kept);
    WAIT(f, kept.done);
    assert_non_null(kept.status);
    return kept;
}

static void on_set_back(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)revision;
    assert_int_equal(error->status, EP_OK);
    *(bool *)user = true;
}

static void set_back(struct fixture *f, const struct kept *to)
{
    uint8_t status[1024];
    const size_t bytes = ep__v1__group_status__get_packed_size(to->status);
    const struct ep_store_write writes[] = {
        { .key = "groups/moe/spec", .value = to->spec, .size = to->spec_bytes, .expected = EP_STORE_ANY },
        { .key = "groups/moe/status", .value = status, .size = bytes, .expected = EP_STORE_ANY },
    };
    bool done = false;

    assert_true(bytes <= sizeof status);
    ep__v1__group_status__pack(to->status, status);
    ep_store_commit(f->store, writes, 2, on_set_back, &done);
    WAIT(f, done);
}

static uint64_t epoch_at(const struct play *p, uint32_t server)
{
    const Ep__V1__Group *group = seen_by(p, server);

    return group ? group->status->epoch : 0;
}

static void lose_server(struct play *p, uint32_t victim);

/* Ranks 4 and 5 are in epoch 2, and the store has epoch 1, which is all that the servers that are started then know of. */
static struct kept set_back_under_workers(struct play *p, struct fixture *f)
{
    struct kept first;

    open_play(p, f, RANKS);
    first = keep(f);
    update(p, NEW, RANKS);
    PLAY(p, all_over(p, NEW));
    p->workers[4].slow = p->workers[5].slow = true;
    lose_server(p, 0);
    lose_server(p, 1);
    set_back(f, &first);
    PLAY(p, epoch_at(p, 2) == 1);
    world_lose_session(f->servers[2].cluster);
    span_start(f, 0);
    span_start(f, 1);
    PLAY(p, f->servers[0].ready && f->servers[1].ready && span_leader(f) < 2);
    return first;
}

static void after_the_store_was_set_back_workers_go_over_to_an_epoch_above_theirs(void **state)
{
    struct fixture *f = *state;
    struct play p;
    struct kept first = set_back_under_workers(&p, f);

    ep__v1__group_status__free_unpacked(first.status, NULL);
    world_regain_session(f->servers[2].cluster);
    PLAY(&p, epoch_at(&p, 2) > 1);
    assert_int_equal(epoch_at(&p, 2), 3);
    p.workers[4].slow = p.workers[5].slow = false;
    for (uint32_t r = 0; r < 4; r++)
        PLAY(&p, claim(&p.workers[r]));
    PLAY(&p, all_over(&p, OLD) && all_show(&p, PHASE(READY)));
    assert_int_equal(p.workers[5].epoch, 3);
    close_play(&p);
}

static void on_prepared(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    (void)reply;
    *(struct answer *)user = (struct answer){ .done = true, .error = *error };
}

/* As of a leader that knows nothing of what was there before the store was set back. */
static struct answer prepare(struct play *p, const struct kept *kept, uint64_t number)
{
    Ep__V1__PrepareRequest request = EP__V1__PREPARE_REQUEST__INIT;
    Ep__V1__Version release = EP__V1__VERSION__INIT;
    char group[] = "moe", leader[] = "a";
    struct answer answer = { 0 };

    release.version = (char *)(uintptr_t)ep_node_version();
    release.window_version = EP_WINDOW_VERSION;
    request.group = group;
    request.leader = leader;
    request.release = &release;
    request.status = kept->status;
    request.fence = ep_cluster_term(p->f->servers[span_leader(p->f)].cluster);
    request.agreed = 1;
    kept->status->epoch = number;
    kept->status->term = request.fence;
    ep_groups_prepare(p->f->servers[2].groups, &request, on_prepared, &answer);
    PLAY(p, answer.done);
    return answer;
}

static void an_epoch_is_prepared_above_all_that_a_node_has(void **state)
{
    struct play p;
    struct kept first = set_back_under_workers(&p, *state);
    struct answer answer = prepare(&p, &first, 2);

    assert_int_equal(answer.error.status, EP_FAILED_PRECONDITION);
    assert_string_equal(answer.error.text, "status.epoch is 2: node c has epoch 2 of group moe, and the next one must be above "
                        "it");
    assert_int_equal(prepare(&p, &first, 0).error.status, EP_FAILED_PRECONDITION);
    assert_int_equal(prepare(&p, &first, 3).error.status, EP_OK);
    ep__v1__group_status__free_unpacked(first.status, NULL);
    world_regain_session(p.f->servers[2].cluster);
    close_play(&p);
}

/* ---- walks ------------------------------------------------------------------------------------------------------- */

struct walk {
    struct play *play;
    uint32_t steps, at;
    bool reached;
};

static bool is_of_a_turn(const char *kind)
{
    return !strcmp(kind, "Turn") || !strcmp(kind, "Turn-reply") || !strcmp(kind, "commit");
}

static void on_step_to_lose(struct world *world, const char *kind, void *user)
{
    struct walk *walk = user;

    if (!is_of_a_turn(kind) || walk->steps++ != walk->at)
        return;
    walk->reached = true;
    world_lose(world);
}

static void on_step_to_reach(struct world *world, const char *kind, void *user)
{
    struct walk *walk = user;

    (void)world;
    if (is_of_a_turn(kind) && walk->steps++ == walk->at)
        walk->reached = true;
}

static void on_step_to_crash(struct world *world, const char *kind, void *user)
{
    struct walk *walk = user;
    struct fixture *f = walk->play->f;

    (void)world;
    if (!is_of_a_turn(kind) || walk->steps++ != walk->at)
        return;
    walk->reached = f->crashed = true;
    world_crash(f->servers[f->victim].cluster);
}

/* What was agreed on is there, and who is left goes over. */
static void begin_turn(struct walk *walk, struct play *p, uint32_t at, world_step_fn on_step)
{
    *walk = (struct walk){ .play = p, .at = at };
    open_play(p, p->f, RANKS);
    update(p, NEW, RANKS);
    world_on_step(p->f->world, on_step, walk);
}

static void delete_group(struct play *p)
{
    struct fixture *f = p->f;
    struct answer answer;

    close_play(p);
    do {
        answer = (struct answer){ 0 };
        uv_run(&f->loop, UV_RUN_ONCE);
        WAIT(f, span_leader(f) < SERVERS);
        ep_groups_delete(f->servers[span_leader(f)].groups, "moe", true, NULL, span_on_answer, &answer);
        WAIT(f, answer.done);
    } while (answer.error.status == EP_FAILED_PRECONDITION);
    for (uint32_t i = 0; i < SERVERS; i++)
        WAIT(f, !seen_by(p, i) && ep_node_memory_left(f->servers[i].node) == BUDGET);
}

static void whichever_message_of_a_turn_is_lost(void **state)
{
    struct play p = { .f = *state };
    struct walk walk = { .reached = true };

    for (uint32_t at = 0; walk.reached; at++) {
        begin_turn(&walk, &p, at, on_step_to_lose);
        PLAY(&p, all_over(&p, NEW));
        assert_int_equal(p.n_turned, 1);
        world_on_step(p.f->world, NULL, NULL);
        delete_group(&p);
    }
    assert_true(walk.at > 10);
}

static void whoever_dies_at_whatever_step_of_a_turn(void **state)
{
    struct play p = { .f = *state };
    struct walk walk = { .reached = true };

    for (uint32_t at = 0; walk.reached; at++) {
        begin_turn(&walk, &p, at, on_step_to_reach);
        PLAY(&p, walk.reached || all_over(&p, NEW));
        die(&p.workers[at % RANKS]);
        PLAY(&p, all_over(&p, NEW));
        assert_int_equal(p.n_turned, 1);
        world_on_step(p.f->world, NULL, NULL);
        delete_group(&p);
    }
    assert_true(walk.at > 10);
}

/* Its workers are gone with it. */
static void lose_server(struct play *p, uint32_t victim)
{
    span_stop(p->f, victim);
    for (uint32_t r = 0; r < p->n; r++)
        if (p->workers[r].server == victim)
            die(&p->workers[r]);
}

/* Those who are left go over; when the server is back, and so are its workers, all are together. */
static void recover(struct play *p, const struct walk *walk)
{
    struct fixture *f = p->f;

    if (walk->reached) {
        lose_server(p, f->victim);
        f->crashed = false;
        PLAY(p, all_over(p, NEW));
        span_start(f, f->victim);
        PLAY(p, span_all_ready(f));
    }
    for (uint32_t r = 0; r < RANKS; r++)
        PLAY(p, p->workers[r].at || claim(&p->workers[r]));
    PLAY(p, all_over(p, NEW) && all_show(p, PHASE(READY)));
}

/* The server that leads, or one of the others: after 3 s a lost member is mended, so these at some steps only. */
static void crash_at(struct fixture *f, uint32_t from_leader, uint32_t stride)
{
    struct play p = { .f = f };
    struct walk walk = { .reached = true };

    for (uint32_t at = from_leader; walk.reached; at += stride) {
        f->victim = (span_leader(f) + from_leader) % SERVERS;
        begin_turn(&walk, &p, at, on_step_to_crash);
        PLAY(&p, walk.reached || all_over(&p, NEW));
        recover(&p, &walk);
        world_on_step(f->world, NULL, NULL);
        delete_group(&p);
    }
    assert_true(walk.at > 10);
}

static void whoever_leads_ends_at_whatever_step_of_a_turn(void **state)
{
    crash_at(*state, 0, 1);
}

static void another_server_ends_at_a_step_of_a_turn(void **state)
{
    crash_at(*state, 1, 4);
    crash_at(*state, 2, 5);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, span_setup, span_teardown)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(all_go_over_at_one_boundary),
        TEST(a_server_that_is_alone_turns_its_workers),
        TEST(an_idle_group_turns_with_its_next_op),
        TEST(a_rank_that_is_further_refuses_and_is_asked_again),
        TEST(who_does_not_answer_is_named_and_holds_nobody_up),
        TEST(a_rank_that_says_to_be_where_nobody_else_is_near_is_left_out),
        TEST(so_it_is_where_it_could_come_there),
        TEST(so_it_is_where_there_is_no_other),
        TEST(the_reason_says_who_has_not_attached),
        TEST(where_one_does_not_follow_nobody_goes_over),
        TEST(who_has_no_place_goes_at_the_same_boundary),
        TEST(new_ranks_are_waited_for),
        TEST(a_place_is_kept_for_who_follows),
        TEST(who_is_absent_is_not_waited_for),
        TEST(who_dies_before_it_attached_is_not_waited_for),
        TEST(a_second_update_before_the_turn),
        TEST(who_went_on_alone_for_long_is_left_out),
        TEST(who_went_on_alone_for_a_moment_goes_over_with_the_others),
        TEST(of_as_many_those_who_went_less_far_go_over),
        TEST(who_missed_a_turn_is_told_so),
        TEST(who_missed_two_turns_is_told_so),
        TEST(who_has_promised_and_missed_the_decision_does_not_wait),
        TEST(after_the_store_was_set_back_workers_go_over_to_an_epoch_above_theirs),
        TEST(an_epoch_is_prepared_above_all_that_a_node_has),
        TEST(whichever_message_of_a_turn_is_lost),
        TEST(whoever_dies_at_whatever_step_of_a_turn),
        TEST(whoever_leads_ends_at_whatever_step_of_a_turn),
        TEST(another_server_ends_at_a_step_of_a_turn),
    };

    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
