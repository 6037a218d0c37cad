/*
 * --soak: the coordinator's part.
 *
 * Workers take the steps of the plan by themselves; a leash in shared memory says how far they may go, always some
 * chapters beyond the slowest.  Nothing else passes between ranks but the ops.
 *
 * A worker that is killed is missed at once, and the others go on without it for a while.  Then the leash is not
 * prolonged until all have come to its end: there a new worker joins, and everybody takes the next chapter.
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
    uint64_t alive;    /* ranks */
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
    uint64_t granted = slowest(s) + CHAPTERS_AHEAD * SOAK_CHAPTER;

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
    if (of->soak.longest_ns > totals->longest_ns)
        totals->longest_ns = of->soak.longest_ns;
    s->result->wrong += of->verdict.mismatches;
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

static void kill_one(struct soaking *s)
{
    s->victim = bench_below(bench_hash(s->config->seed, STREAM_SOAK_KILL, s->result->kills, 1, 0), s->crew->ranks);
    crew_kill(s->crew, s->victim);
    s->alive &= ~(1ull << s->victim);
    count(s, s->victim);
    s->result->kills++;
    s->gather_ns = ep_clock_ns() + random_ns(s, 2, ABSENT_MS * EP_NS_PER_MS);
    s->state = BEREFT;
}

/* All others stand at the end of the leash, and none of their ops is under way. */
static ep_status let_in(struct soaking *s, struct ep_error *error)
{
    const uint64_t mask = 1ull << s->victim;
    struct bench_rank_result *result = crew_result(s->crew, s->victim);
    ep_status status = crew_start(s->crew, s->victim, error);

    if (status == EP_OK)
        status = crew_do(s->crew, mask, BENCH_ATTACH, 0, BENCH_FLAG_RETRY, error);
    s->result->longest_claim_us = fmax(s->result->longest_claim_us, result->claim_wait_us);
    result->soak_next = s->leash->granted;
    if (status == EP_OK)
        status = crew_send(s->crew, mask, BENCH_SOAK, 0, 0, error);
    s->alive |= mask;
    s->state = WHOLE;
    plan_kill(s);
    return status;
}

static ep_status tend(struct soaking *s, struct ep_error *error)
{
    const uint64_t now = ep_clock_ns();

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

/* ---- the whole ----------------------------------------------------------------------------------------- */

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

/* Until its time is over, or a worker has something to say: that is a failure. */
static ep_status keep_going(struct soaking *s, struct ep_error *error)
{
    ep_status status = EP_OK;

    while (status == EP_OK && !over(s) && !crew_answered(s->crew, s->alive, TICK_MS)) {
        if (crew_cancelled)
            return ep_error_set(error, EP_CANCELLED, "interrupted");
        status = tend(s, error);
        if (status == EP_OK)
            status = check_progress(s, error);
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
    status = crew_send(s->crew, s->alive, BENCH_SOAK, 0, 0, error);
    if (status == EP_OK)
        status = keep_going(s, error);
    close_leash(s);
    if (status == EP_OK)
        status = crew_collect(s->crew, s->alive, error);
    s->result->seconds = (double)(ep_clock_ns() - s->start_ns) / 1e9;
    s->result->steps = slowest(s);
    for (uint32_t r = 0; r < s->crew->ranks; r++)
        if (s->alive >> r & 1)
            count(s, r);
    return status;
}

static ep_status soak_with(struct crew *crew, struct sweep *sweep, struct ep_error *error)
{
    struct soaking s = { .crew = crew,
                         .config = &sweep->config,
                         .result = &sweep->soak,
                         .leash = &crew->shared->leash,
                         .alive = crew_all(crew) };
    ep_status status = sweep_attach(crew, sweep, error);

    if (status != EP_OK)
        return status;
    sweep->soak = (struct soak_result){ .run = true, .error = EP_ERROR_INIT };
    status = soak(&s, &sweep->soak.error);
    for (uint32_t r = 0; status != EP_OK && r < crew->ranks; r++)
        crew_kill(crew, r); /* their ops no longer belong together */
    if (status == EP_CANCELLED)
        return ep_error_set(error, status, "%s", sweep->soak.error.text);
    return EP_OK;
}

ep_status soak_run(struct sweep *sweep, struct ep_error *error)
{
    struct crew *crew = malloc(sizeof *crew);
    ep_status status;

    if (!crew)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a soak");
    status = crew_open(&sweep->config, crew, error);
    if (status == EP_OK)
        status = soak_with(crew, sweep, error);
    crew_close(crew);
    progress_end();
    free(crew);
    return status;
}
