/*
 * --soak: the coordinator's part.
 *
 * Workers take the steps of the plan by themselves; a leash in shared memory says how far they may go, always some
 * chapters beyond the slowest.  Nothing else passes between ranks but the ops.
 *
 * A worker that is killed is missed at once, and the others go on without it for a while.  Then the leash is not
 * prolonged until all have come to its end: there a new worker joins, and everybody takes the next chapter.
 *
 * With --follow workers come for ranks that are new, and wait in the next epoch until the others go over to it; those
 * that have no place there any more answer that they are gone.
 */
#include <math.h>
#include <stdlib.h>

#include "bench_hash.h"
#include "ep_clock.h"
#include "soak_plan.h"
#include "sweep.h"

enum {
    CHAPTERS_AHEAD = 2,
    TICK_MS = 5,
    STALL_MS = 30000, /* without any progress, on top of what ops may wait for each other */
    ABSENT_MS = 1000  /* at most, of a killed worker; then a new one comes */
};

enum crew_state {
    WHOLE,
    BEREFT,   /* one was killed */
    GATHERING /* and all others are waited for, to let a new one in */
};

struct soaking {
    struct crew *crew;
    const struct bench_config *config;
    struct soak_result *result;
    struct bench_leash *leash;
    struct follower follower;
    uint64_t alive;    /* workers that take steps, by their numbers */
    uint64_t joining;  /* and those that are new, and attach */
    enum crew_state state;
    uint32_t victim;
    uint64_t start_ns, kill_ns, gather_ns; /* of the next kill, and when a new worker is to come */
    uint64_t progress, progress_ns;        /* last seen, and when it grew */
};

/* ---- the leash ------------------------------------------------------------------------------ */

static uint64_t slowest(const struct soaking *s)
{
    uint64_t slowest = UINT64_MAX;

    for (uint32_t r = 0; r < s->crew->ranks; r++) {
        uint64_t next = __atomic_load_n(&crew_result(s->crew, r)->soak_next, __ATOMIC_ACQUIRE);

        if (s->alive >> r & 1 && next < slowest)
            slowest = next;
    }
    return slowest;
}

static void prolong(struct soaking *s)
{
    const uint64_t from = slowest(s);
    uint64_t granted = from + CHAPTERS_AHEAD * SOAK_CHAPTER;

    if (from == BENCH_NOT_BEGUN)
        return;
    if (s->config->soak_ops && granted > s->config->soak_ops)
        granted = s->config->soak_ops;
    if (granted > s->leash->granted)
        __atomic_store_n(&s->leash->granted, granted, __ATOMIC_RELEASE); /* partner: workers, between chapters */
}

static void close_leash(struct soaking *s)
{
    __atomic_store_n(&s->leash->closed, 1, __ATOMIC_RELEASE); /* after its end; partner: workers, between chapters */
}

static bool over(const struct soaking *s)
{
    const uint64_t now = ep_clock_ns();

    if (s->config->soak_ops && s->leash->granted == s->config->soak_ops)
        return true;
    return s->config->soak_s && now - s->start_ns > s->config->soak_s * EP_NS_PER_S;
}

/* ---- results ------------------------------------------------------------------------------------ */

static void add_counts(uint64_t (*to)[EP_LAYOUT_FLAT + 1], const uint64_t (*from)[EP_LAYOUT_FLAT + 1])
{
    for (uint32_t mode = 0; mode <= EP_MODE_HT; mode++)
        for (uint32_t layout = 0; layout <= EP_LAYOUT_FLAT; layout++)
            to[mode][layout] += from[mode][layout];
}

/* What this worker has done; it does no more. */
static void count(struct soaking *s, uint32_t rank)
{
    const struct bench_rank_result *of = crew_result(s->crew, rank);
    struct bench_soak *totals = &s->result->totals;

    add_counts(totals->dispatches, of->soak.dispatches);
    add_counts(totals->combines, of->soak.combines);
    totals->dropped += of->soak.dropped;
    totals->masked += of->soak.masked;
    totals->waited_ns += of->soak.waited_ns;
    totals->gaps += of->soak.gaps;
    totals->gap_ns += of->soak.gap_ns;
    if (of->soak.longest_ns > totals->longest_ns)
        totals->longest_ns = of->soak.longest_ns;
    s->result->wrong += of->verdict.mismatches;
}

/* ---- progress ----------------------------------------------------------------------------------- */

static ep_status check_progress(struct soaking *s, struct ep_error *error)
{
    const uint64_t limit_ms = s->config->timeout_ms + STALL_MS, now = ep_clock_ns();
    const uint64_t progress = crew_progress(s->crew);

    if (progress != s->progress)
        s->progress_ns = now;
    s->progress = progress;
    if (now - s->progress_ns <= limit_ms * EP_NS_PER_MS)
        return EP_OK;
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "no progress for %llu ms: the slowest rank stands before op %llu",
                        (unsigned long long)limit_ms, (unsigned long long)slowest(s));
}

/* ---- kills ----------------------------------------------------------------------------------------- */

static uint64_t random_ns(const struct soaking *s, uint32_t what, uint64_t most_ns)
{
    uint64_t hash = bench_hash(s->config->seed, STREAM_SOAK_KILL, s->result->kills, what, 0);

    return (uint64_t)(bench_unit(hash) * (double)most_ns);
}

static void plan_kill(struct soaking *s)
{
    const uint64_t every_ns = s->config->soak_kill_s * EP_NS_PER_S;

    s->kill_ns = ep_clock_ns() + every_ns / 2 + random_ns(s, 0, every_ns);
}

/* The nth worker of those that are there. */
static uint32_t nth_alive(const struct soaking *s, uint32_t n)
{
    uint64_t alive = s->alive;

    while (n-- > 0)
        alive &= alive - 1;
    return (uint32_t)__builtin_ctzll(alive);
}

static void kill_one(struct soaking *s)
{
    const uint64_t hash = bench_hash(s->config->seed, STREAM_SOAK_KILL, s->result->kills, 1, 0);

    s->victim = nth_alive(s, bench_below(hash, (uint32_t)__builtin_popcountll(s->alive)));
    crew_kill(s->crew, s->victim);
    s->alive &= ~(1ull << s->victim);
    count(s, s->victim);
    s->result->kills++;
    s->gather_ns = ep_clock_ns() + random_ns(s, 2, ABSENT_MS * EP_NS_PER_MS);
    s->state = BEREFT;
}

/* In which the others are; those that wait in a newer one have not begun. */
static uint64_t running_epoch(const struct soaking *s)
{
    uint64_t oldest = UINT64_MAX;

    for (uint32_t w = 0; w < s->crew->ranks; w++) {
        const uint64_t epoch = __atomic_load_n(&crew_result(s->crew, w)->epoch, __ATOMIC_ACQUIRE);

        if (s->alive >> w & 1 && epoch < oldest)
            oldest = epoch;
    }
    return oldest;
}

/* Where a worker begins that has just attached: with the others in their epoch, or when they come over to its. */
static uint64_t first_step(const struct soaking *s, const struct bench_rank_result *result)
{
    return result->epoch == running_epoch(s) ? s->leash->granted : BENCH_NOT_BEGUN;
}

/* Of a group that has become smaller meanwhile. */
static bool has_no_place(const struct soaking *s)
{
    return s->follower.link && s->crew->shared->rank_of[s->victim] >= s->follower.view.ranks;
}

/* The epoch that it attaches to may be one that came meanwhile: it waits until it hears of that from here. */
static ep_status attach_again(struct soaking *s, uint64_t mask, struct ep_error *error)
{
    ep_status status = crew_send(s->crew, mask, BENCH_ATTACH, 0, BENCH_FLAG_RETRY, error);

    while (status == EP_OK && !crew_answered(s->crew, mask, TICK_MS)) {
        status = follower_look(&s->follower, error);
        if (status == EP_OK)
            status = check_progress(s, error);
    }
    return status == EP_OK ? crew_collect(s->crew, mask, error) : status;
}

/* All others stand at the end of the leash, and none of their ops is under way. */
static ep_status let_in(struct soaking *s, struct ep_error *error)
{
    if (has_no_place(s)) {
        s->state = WHOLE;
        plan_kill(s);
        return EP_OK;
    }

    const uint64_t mask = 1ull << s->victim;
    struct bench_rank_result *result = crew_result(s->crew, s->victim);
    ep_status status = crew_start(s->crew, s->victim, error);

    if (status == EP_OK)
        status = attach_again(s, mask, error);
    s->result->longest_claim_us = fmax(s->result->longest_claim_us, result->claim_wait_us);
    result->soak_next = first_step(s, result);
    if (status == EP_OK)
        status = crew_send(s->crew, mask, BENCH_SOAK, 0, 0, error);
    s->alive |= mask;
    s->state = WHOLE;
    plan_kill(s);
    return status;
}

/* ---- a group that changes --------------------------------------------------------------------------- */

static ep_status add_worker(struct soaking *s, struct ep_error *error)
{
    /* The rank of a killed worker is let in again elsewhere. */
    const uint64_t victim = s->state == WHOLE ? 0 : 1ull << s->victim;
    uint32_t worker;

    if (follower_add(&s->follower, s->alive | s->joining | victim, &worker, error) != EP_OK ||
        worker == BENCH_MAX_RANKS)
        return error->status;
    s->joining |= 1ull << worker;
    return EP_OK;
}

/* Those that have attached wait for the others, in the epoch that these go over to. */
static ep_status let_begin(struct soaking *s, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t w = 0; status == EP_OK && w < s->crew->ranks; w++) {
        const uint64_t mask = 1ull << w;

        if (!(s->joining & mask) || !crew_answered(s->crew, mask, 0))
            continue;
        status = crew_collect(s->crew, mask, error);
        crew_result(s->crew, w)->soak_next = BENCH_NOT_BEGUN;
        s->joining &= ~mask;
        s->alive |= mask;
        s->result->added++;
        if (status == EP_OK)
            status = crew_send(s->crew, mask, BENCH_SOAK, 0, 0, error);
    }
    return status;
}

/* When all have gone, nobody else could say where the epoch begins in which others wait. */
static void say_where_it_begins(struct soaking *s, uint64_t step)
{
    struct bench_shared *shared = s->crew->shared;
    struct bench_epoch *newest = &shared->epoch[shared->n_epochs - 1];
    uint64_t unsaid = 0;

    if (slowest(s) == BENCH_NOT_BEGUN)
        __atomic_compare_exchange_n(&newest->begins, &unsaid, step + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Workers that have answered that they are gone.  What else they answer is for keep_going(). */
static ep_status dismiss_gone(struct soaking *s, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t w = 0; status == EP_OK && w < s->crew->ranks; w++) {
        const struct bench_rank_result *result = crew_result(s->crew, w);
        const uint64_t mask = 1ull << w;

        if (!(s->alive & mask) || !__atomic_load_n(&result->gone, __ATOMIC_ACQUIRE))
            continue;
        status = crew_collect(s->crew, mask, error);
        count(s, w);
        s->alive &= ~mask;
        s->result->removed++;
        say_where_it_begins(s, result->soak_next);
        crew_stop(s->crew, mask);
    }
    return status;
}

static ep_status follow(struct soaking *s, struct ep_error *error)
{
    if (!s->follower.link)
        return EP_OK;
    if (dismiss_gone(s, error) != EP_OK || let_begin(s, error) != EP_OK ||
        follower_look(&s->follower, error) != EP_OK)
        return error->status;
    return add_worker(s, error);
}

/* ---- the whole ----------------------------------------------------------------------------------------- */

static ep_status tend(struct soaking *s, struct ep_error *error)
{
    const uint64_t now = ep_clock_ns();

    if (follow(s, error) != EP_OK)
        return error->status;
    if (s->state == WHOLE && s->config->soak_kill_s && now > s->kill_ns)
        kill_one(s);
    else if (s->state == BEREFT && now > s->gather_ns)
        s->state = GATHERING;
    else if (s->state == GATHERING && slowest(s) == s->leash->granted)
        return let_in(s, error);
    if (s->state != GATHERING)
        prolong(s);
    return EP_OK;
}

/* Workers that are not gone. */
static uint64_t working(const struct soaking *s)
{
    uint64_t working = s->alive;

    for (uint32_t w = 0; w < s->crew->ranks; w++)
        if (__atomic_load_n(&crew_result(s->crew, w)->gone, __ATOMIC_ACQUIRE))
            working &= ~(1ull << w);
    return working;
}

/* A worker that answers before the end has failed, unless it says that it is gone, which it does first. */
static bool has_failed(const struct soaking *s)
{
    return crew_answered(s->crew, working(s), TICK_MS) && crew_answered(s->crew, working(s), 0);
}

/* Until its time is over, or somebody ends it, or a worker has something to say: that is a failure. */
static ep_status keep_going(struct soaking *s, struct ep_error *error)
{
    ep_status status = EP_OK;

    while (status == EP_OK && !crew_cancelled && !over(s) && !has_failed(s)) {
        status = tend(s, error);
        if (status == EP_OK)
            status = check_progress(s, error);
        if (s->alive)
            progress_soak(slowest(s), s->result->kills);
    }
    return status;
}

static ep_status soak(struct soaking *s, struct ep_error *error)
{
    ep_status status;

    s->start_ns = s->progress_ns = ep_clock_ns();
    plan_kill(s);
    prolong(s);
    s->crew->finishes = true;
    status = crew_send(s->crew, s->alive, BENCH_SOAK, 0, 0, error);
    if (status == EP_OK)
        status = keep_going(s, error);
    crew_cancelled = 0; /* that is done; a second signal ends the process */
    close_leash(s);
    if (status == EP_OK)
        status = crew_collect(s->crew, s->alive, error);
    s->result->seconds = (double)(ep_clock_ns() - s->start_ns) / 1e9;
    s->result->steps = slowest(s);
    for (uint32_t r = 0; r < s->crew->ranks; r++)
        if (s->alive >> r & 1)
            count(s, r);
    follower_sum(&s->follower, s->result);
    return status;
}

static ep_status soak_with(struct crew *crew, struct sweep *sweep, struct group_link *link, struct ep_error *error)
{
    struct soaking s = { .crew = crew,
                         .config = &sweep->config,
                         .result = &sweep->soak,
                         .leash = &crew->shared->leash,
                         .alive = crew_all(crew) };
    ep_status status = follower_open(&s.follower, link, crew, error);

    if (status == EP_OK)
        status = sweep_attach(crew, sweep, error);
    if (status != EP_OK)
        return status;
    sweep->soak = (struct soak_result){ .run = true, .error = EP_ERROR_INIT };
    status = soak(&s, &sweep->soak.error);
    for (uint32_t r = 0; status != EP_OK && r < crew->ranks; r++)
        crew_kill(crew, r); /* their ops no longer belong together */
    return EP_OK;
}

ep_status soak_run(struct sweep *sweep, struct group_link *link, struct ep_error *error)
{
    struct crew *crew = malloc(sizeof *crew);
    ep_status status;

    if (!crew)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a soak");
    status = crew_open(&sweep->config, crew, error);
    if (status == EP_OK)
        status = soak_with(crew, sweep, link, error);
    crew_close(crew);
    progress_end();
    free(crew);
    return status;
}
