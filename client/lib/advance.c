/*
 * A rank that follows its group over to the next epoch.
 *
 * Attaching there is the work of a thread: claims and greetings block.  So is giving back the memory of a rank that has
 * gone over and left, as its program goes on.  Each rank that follows has a *successor*, which says how far that is.  The
 * successor outlives its rank while the thread is at work for it, and goes then.
 *
 * When to go over is agreed on by the rank's thread (ep_advance) and the monitor (ASK, TURN) under turn.lock: the rank
 * passes a boundary, or it waits there because the monitor has promised that it would.
 *
 * A newer epoch makes what was promised for the one before void: nobody decides for that any more.  Once it is decided,
 * the rank cares about no other epoch; its successor does.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client_private.h"
#include "ep_futex.h"
#include "ep_thread.h"

#define LOOK_NS (10 * EP_NS_PER_MS) /* between two looks at whether the rank is lost */

/* A claim that fails is made again, until the rank or the epoch is gone. */
#define PAUSE_MIN_NS (20 * EP_NS_PER_MS)
#define PAUSE_MAX_NS (1000 * EP_NS_PER_MS)

/* Under following.lock, but what it was made with. */
struct successor {
    struct successor *link;
    char *group; /* of how.options */
    struct joining how;

    bool left; /* the rank has: it is to go */
    bool held; /* nothing is begun: the rank is not handed over yet, or has gone over */
    bool busy; /* the thread is at it */
    uint64_t wanted; /* newest epoch that was heard of */
    uint64_t settled; /* up to this epoch there is nothing to do: `next` is of it, or there is no place in it */
    struct ep_rank *next;
    struct ep_error no_place; /* status EP_OK: there is one */
    uint64_t again_ns, pause_ns; /* after a claim that failed */
};

/* ---- the thread ------------------------------------------------------------------ */

static uint64_t earliest(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* One that has something to do now; else NULL, and when that may be. */
static struct successor *find_work(const struct following *f, uint64_t *when_ns)
{
    const uint64_t now = ep_clock_ns();

    *when_ns = NO_DEADLINE;
    for (struct successor *s = f->successors; s; s = s->link) {
        if (s->held || s->wanted <= s->settled)
            continue;
        if (s->again_ns <= now)
            return s;
        *when_ns = earliest(*when_ns, s->again_ns);
    }
    return NULL;
}

static struct ep_rank *take_left(struct following *f)
{
    struct ep_rank *rank = f->left;

    if (rank)
        f->left = rank->next;
    return rank;
}

static void unlink_successor(struct following *f, struct successor *s)
{
    struct successor **link = &f->successors;

    while (*link != s)
        link = &(*link)->link;
    *link = s->link;
}

/* It is in no list any more. */
static void free_successor(struct successor *s)
{
    ep_leave(s->next);
    free(s->group);
    free(s);
}

static void claim_failed(struct successor *s, uint64_t wanted, const struct ep_error *error)
{
    if (error->status == EP_NOT_FOUND) { /* no such rank on this node: asking again would not change that */
        s->no_place = *error;
        s->settled = wanted;
        return;
    }
    s->pause_ns = s->pause_ns ? earliest(2 * s->pause_ns, PAUSE_MAX_NS) : PAUSE_MIN_NS;
    s->again_ns = ep_clock_ns() + s->pause_ns;
}

static void attached(struct successor *s, struct ep_rank *next)
{
    s->next = next;
    s->settled = next->epoch;
    s->pause_ns = 0;
}

/* Under the lock, which it gives up meanwhile: leaves the epoch that is not the next one any more, attaches to that. */
static void work_on(struct ep_client *client, struct successor *s)
{
    struct ep_rank *old = s->next, *next = NULL;
    const uint64_t wanted = s->wanted;
    struct ep_error error = EP_ERROR_INIT;

    s->busy = true;
    s->next = NULL;
    s->no_place.status = EP_OK;
    pthread_mutex_unlock(&client->following.lock);
    ep_leave(old);
    (void)join_group(client, &s->how, &next, &error);
    pthread_mutex_lock(&client->following.lock);
    s->busy = false;
    if (next)
        attached(s, next);
    else
        claim_failed(s, wanted, &error);
}

static void wait_for_work(struct following *f, uint64_t when_ns)
{
    const struct timespec when = ep_clock_timespec(when_ns);

    if (when_ns == NO_DEADLINE)
        pthread_cond_wait(&f->work, &f->lock);
    else
        pthread_cond_timedwait(&f->work, &f->lock, &when);
}

/* Under the lock, which it gives up meanwhile. */
static void attach_successor(struct ep_client *client, struct successor *s)
{
    struct following *f = &client->following;

    work_on(client, s);
    if (!s->left)
        return;
    unlink_successor(f, s);
    pthread_mutex_unlock(&f->lock);
    free_successor(s);
    pthread_mutex_lock(&f->lock);
}

static void finish_rank(struct following *f, struct ep_rank *rank)
{
    pthread_mutex_unlock(&f->lock);
    rank_finish(rank);
    pthread_mutex_lock(&f->lock);
}

static void *run(void *arg)
{
    struct ep_client *client = arg;
    struct following *f = &client->following;

    ep_thread_goes_behind(); /* ops of the epoch that runs come first */
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        uint64_t when_ns;
        struct successor *s = find_work(f, &when_ns);
        struct ep_rank *left = s ? NULL : take_left(f);

        if (s)
            attach_successor(client, s);
        else if (left)
            finish_rank(f, left);
        else
            wait_for_work(f, when_ns);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* Without memory for a thread it is tried again at the next epoch. */
static void start_thread(struct ep_client *client)
{
    struct following *f = &client->following;

    if (!f->started && !f->stop)
        f->started = ep_thread_start(&f->thread, "ep-follow", run, client) == 0;
}

void following_init(struct ep_client *client)
{
    pthread_mutex_init(&client->following.lock, NULL);
    ep_clock_condition(&client->following.work);
}

void following_stop(struct ep_client *client)
{
    struct following *f = &client->following;
    bool started;

    pthread_mutex_lock(&f->lock);
    f->stop = true;
    started = f->started;
    pthread_cond_signal(&f->work);
    pthread_mutex_unlock(&f->lock);
    if (started)
        pthread_join(f->thread, NULL);
    for (struct ep_rank *rank; (rank = take_left(f));)
        rank_finish(rank);
}

void following_fini(struct ep_client *client)
{
    pthread_cond_destroy(&client->following.work);
    pthread_mutex_destroy(&client->following.lock);
}

/* ---- successors -------------------------------------------------------------------- */

ep_status follow_begin(struct ep_rank *rank, const struct joining *how, struct ep_error *error)
{
    struct following *f = &rank->client->following;
    struct successor *s = calloc(1, sizeof *s);
    char *group = strdup(how->options.group);

    if (!s || !group) {
        free(group);
        free(s);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank that follows");
    }
    s->group = group;
    s->how = *how;
    s->how.options.group = group;
    s->how.options.token = ""; /* the server lets in who holds a rank of the group */
    s->how.options.rank = (int32_t)rank->rank;
    s->how.after = rank->epoch;
    memcpy(s->how.after_ticket, rank->ticket, sizeof rank->ticket);
    s->settled = rank->epoch;
    s->held = rank->ahead;
    rank->successor = s;
    pthread_mutex_lock(&f->lock);
    s->link = f->successors;
    f->successors = s;
    pthread_mutex_unlock(&f->lock);
    return EP_OK;
}

void follow_end(struct ep_rank *rank)
{
    struct following *f = &rank->client->following;
    struct successor *s = rank->successor;
    bool ours;

    if (!s)
        return;
    pthread_mutex_lock(&f->lock);
    rank->successor = NULL;
    s->left = true;
    ours = !s->busy;
    if (ours)
        unlink_successor(f, s);
    pthread_mutex_unlock(&f->lock);
    if (ours)
        free_successor(s);
}

bool follow_finishes(struct ep_rank *rank)
{
    struct following *f = &rank->client->following;
    bool taken;

    if (!rank->turn.over)
        return false;
    pthread_mutex_lock(&f->lock);
    taken = f->started && !f->stop;
    if (taken) {
        rank->next = f->left;
        f->left = rank;
        pthread_cond_signal(&f->work);
    }
    pthread_mutex_unlock(&f->lock);
    return taken;
}

/* ---- what the server says: the monitor's thread ---------------------------------------- */

/* The rank's thread may be asleep in ep_advance(). */
static void tell(struct turn *t)
{
    __atomic_store_n(&t->news, 1, __ATOMIC_SEQ_CST);
    ep_futex_wake_all(&t->news);
}

/* False: the next epoch of this rank is decided, and not to change. */
static bool release_promise(struct turn *t)
{
    bool open;

    pthread_mutex_lock(&t->lock);
    open = t->at == EP_ATTACH_NO_TURN;
    t->promised = EP_ATTACH_NO_TURN;
    pthread_mutex_unlock(&t->lock);
    tell(t);
    return open;
}

void follow_epoch(struct ep_rank *rank, uint64_t epoch)
{
    struct following *f = &rank->client->following;

    pthread_mutex_lock(&f->lock);

    struct successor *s = rank->successor; /* NULL also when ep_leave() has come first */

    if (s && epoch > s->wanted && epoch > rank->epoch && release_promise(&rank->turn)) {
        s->wanted = epoch;
        s->again_ns = s->pause_ns = 0;
        start_thread(rank->client);
        pthread_cond_signal(&f->work);
    }
    pthread_mutex_unlock(&f->lock);
}

/* Can it go over to that epoch, or does it know that it has no place there? */
static bool is_settled(const struct ep_rank *rank, uint64_t epoch)
{
    struct following *f = &rank->client->following;
    bool settled;

    pthread_mutex_lock(&f->lock);

    const struct successor *s = rank->successor;

    settled = s && !s->busy && s->settled == epoch && s->wanted <= epoch;
    pthread_mutex_unlock(&f->lock);
    return settled;
}

/* A program that has not come to a boundary yet may never do so: nothing is promised for it. */
static bool promise(struct turn *t, uint64_t at, bool settled, uint64_t *passed)
{
    bool can;

    pthread_mutex_lock(&t->lock);
    can = at == EP_ATTACH_NO_TURN || (settled && t->advances && t->passed <= at);
    t->promised = can ? at : EP_ATTACH_NO_TURN;
    *passed = t->passed;
    pthread_mutex_unlock(&t->lock);
    tell(t);
    return can;
}

void turn_asked(struct ep_rank *rank, const struct ep_attach_frame *ask)
{
    struct ep_attach_frame answer;

    ep_attach_frame_init(&answer, EP_ATTACH_PROMISE);
    answer.epoch = ask->epoch;
    answer.count = ask->count;
    answer.status =
        promise(&rank->turn, ask->value, is_settled(rank, ask->epoch), &answer.value) ? EP_OK : EP_ABORTED;
    answer.offset = __atomic_load_n(&rank->turn.position, __ATOMIC_RELAXED);
    /* One that does not go out counts as none, and the server withdraws. */
    (void)ep_attach_send(rank->socket, &answer, -1, NULL);
}

void turn_decided(struct ep_rank *rank, const struct ep_attach_frame *turn)
{
    struct turn *t = &rank->turn;

    pthread_mutex_lock(&t->lock);
    if (t->at == EP_ATTACH_NO_TURN) {
        t->epoch = turn->epoch;
        t->at = turn->value;
        t->missed = t->passed > turn->value;
    }
    t->promised = EP_ATTACH_NO_TURN;
    pthread_mutex_unlock(&t->lock);
    tell(t);
}

/* ---- the rank's thread ------------------------------------------------------------------ */

void turn_begin(struct ep_rank *rank, uint64_t position)
{
    struct turn *t = &rank->turn;

    t->promised = t->at = EP_ATTACH_NO_TURN;
    t->position = position;
    t->passed = position + 1;
}

ep_status turn_check(const struct ep_rank *rank, struct ep_error *error)
{
    const struct turn *turn = &rank->turn;

    if (turn->stands)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "the last ep_advance() of this rank has not passed its boundary: call it again, others may go "
                            "over to another epoch there");
    if (turn->over)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "this rank has gone over to epoch %llu: dispatch on the one that ep_advance() gave; here only what "
                            "began before is finished", (unsigned long long)turn->epoch);
    return EP_OK;
}

void turn_count(struct ep_rank *rank, uint32_t dispatches)
{
    /* One writer; the monitor may be a moment behind. */
    __atomic_store_n(&rank->turn.position, rank->turn.position + dispatches, __ATOMIC_RELAXED);
}

ep_status ep_graph_begins(ep_rank *rank, uint32_t dispatches)
{
    struct ep_error *error = last_error();

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (turn_check(rank, error) != EP_OK)
        return error->status;
    turn_count(rank, dispatches);
    return EP_OK;
}

enum boundary { BOUNDARY_PASSED, BOUNDARY_PROMISED, BOUNDARY_TURN };

static enum boundary look(struct turn *t)
{
    enum boundary boundary;

    pthread_mutex_lock(&t->lock);
    if (t->at != EP_ATTACH_NO_TURN && t->position >= t->at) {
        boundary = BOUNDARY_TURN;
    } else if (t->promised != EP_ATTACH_NO_TURN && t->position >= t->promised) {
        boundary = BOUNDARY_PROMISED;
        __atomic_store_n(&t->news, 0, __ATOMIC_SEQ_CST); /* partner: tell(), after a change under the lock */
    } else {
        boundary = BOUNDARY_PASSED;
        t->passed = t->position + 1;
        t->advances = true;
    }
    pthread_mutex_unlock(&t->lock);
    return boundary;
}

/* EP_OK: look again. */
static ep_status wait_decision(struct ep_rank *rank, uint64_t deadline_ns, struct ep_error *error)
{
    if (rank_lost(rank, error) != EP_OK)
        return error->status;
    if (take_interrupt(rank) == EP_CANCELLED)
        return ep_error_set(error, EP_CANCELLED, "the wait was interrupted");
    if (ep_clock_ns() >= deadline_ns)
        return ep_error_set(error, EP_TIMEOUT,
                            "whether the group goes over to its next epoch here is not known after %u ms: call "
                            "ep_advance() again", rank->shape.timeout_ms);
    wait_asleep(rank, &rank->turn.news, LOOK_NS, deadline_ns, true);
    return EP_OK;
}

/* Takes the successor out of the library's hands; from here on it has one of its own, and this rank needs none. */
static struct ep_rank *take_next(struct ep_rank *rank)
{
    struct following *f = &rank->client->following;
    struct successor *s = rank->successor;
    struct turn *t = &rank->turn;
    struct ep_rank *next;

    pthread_mutex_lock(&f->lock);
    s->held = true;
    next = !t->missed && s->next && s->next->epoch == t->epoch ? s->next : NULL;
    t->no_place = s->no_place;
    if (next) {
        s->next = NULL;
        next->ahead = false;
        next->successor->held = false;
        pthread_cond_signal(&f->work); /* there may be a newer epoch already */
    }
    pthread_mutex_unlock(&f->lock);
    return next;
}

static ep_status tell_no_place(const struct ep_rank *rank, struct ep_error *error)
{
    const struct turn *t = &rank->turn;

    return ep_error_set(error, EP_DETACHED, "the group has gone over to epoch %llu, where this rank has no place here: %s",
                        (unsigned long long)t->epoch, t->no_place.text);
}

static ep_status go_over(struct ep_rank *rank, ep_rank **out, struct ep_error *error)
{
    struct turn *t = &rank->turn;
    struct ep_rank *next = take_next(rank);

    t->over = true;
    if (next) {
        *out = next;
        return EP_OK;
    }
    if (t->at == EP_ATTACH_MISSED)
        ep_error_set(&t->no_place, EP_DETACHED, "the others went without it, as its server was away or it was too far from them: "
                     "join again");
    else if (t->missed)
        ep_error_set(&t->no_place, EP_DETACHED, "it heard of that when it had passed the boundary: join again");
    else if (t->no_place.status == EP_OK)
        ep_error_set(&t->no_place, EP_DETACHED, "it is not attached there any more");
    return tell_no_place(rank, error);
}

static ep_status gone_over_before(const struct ep_rank *rank, struct ep_error *error)
{
    if (rank->turn.no_place.status != EP_OK)
        return tell_no_place(rank, error);
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "this rank has gone over to epoch %llu before: go on with the one that ep_advance() gave",
                        (unsigned long long)rank->turn.epoch);
}

static ep_status check(const struct ep_rank *rank, ep_rank *const *next, struct ep_error *error)
{
    if (!rank || !next)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is NULL", rank ? "next" : "rank");
    if (!rank->successor)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "this rank does not follow its group: join with ep_join_options.follow");
    return rank->turn.over ? gone_over_before(rank, error) : rank_lost(rank, error);
}

ep_status ep_advance(ep_rank *rank, ep_rank **next)
{
    struct ep_error *error = last_error();
    enum boundary boundary;
    uint64_t deadline = 0;

    if (check(rank, next, error) != EP_OK)
        return error->status;
    while ((boundary = look(&rank->turn)) == BOUNDARY_PROMISED) {
        rank->turn.stands = true;
        if (deadline == 0)
            deadline = ep_clock_ns() + rank->shape.timeout_ms * EP_NS_PER_MS;
        if (wait_decision(rank, deadline, error) != EP_OK)
            return error->status;
    }
    rank->turn.stands = false;
    if (boundary == BOUNDARY_TURN)
        return go_over(rank, next, error);
    *next = NULL;
    return EP_OK;
}
