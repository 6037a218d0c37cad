/*
 * A soak at one rank: the steps of the plan, several under way, and all that they bring checked.
 *
 * A lane is the rank's worker with a case, a handle and memory of its own, one step after the other.
 *
 * With --follow there is a boundary before each step.  Where the rank goes over to another epoch, what is under way is
 * finished in the old one, and the next chapter is the first in the new one, of the plan for what that holds.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep_clock.h"
#include "soak_plan.h"
#include "worker_private.h"

enum { OP_SLACK_MS = 5000, LEASH_NS = 200000 };

enum lane_state { LANE_FREE, LANE_DISPATCHED, LANE_COMBINED };

struct lane {
    struct worker worker;
    struct soak_step step;
    enum lane_state state;
    uint64_t known;      /* who was there as far as this rank knew when the dispatch began */
    uint64_t ll_number;  /* of its LL dispatch */
    const void *rows;    /* for the combine */
};

struct soak {
    struct worker *worker;
    uint64_t present;    /* as the chapter's last dispatch said; 0: not known yet, somebody may have joined */
    uint64_t ll_count;   /* LL dispatches in this epoch */
    uint64_t result_ns;  /* of the last op that was over; 0: none */
    bool turning;        /* no op is over since the rank has gone over */
    struct lane lane[SOAK_LANES];
};

/* ---- lanes --------------------------------------------------------------------------- */

static ep_status open_inputs(struct lane *lane, struct ep_error *error)
{
    struct worker *worker = &lane->worker;
    const struct bench_config *config = worker->config;
    const uint64_t routes = soak_seed(config, lane->step.routes);
    uint32_t tokens[BENCH_MAX_RANKS];
    ep_layout layout[BENCH_MAX_RANKS];
    const struct inputs_variety variety = { soak_seed(config, lane->step.number), tokens, layout, routes };

    for (uint32_t r = 0; r < config->ranks; r++) {
        struct bench_case of;

        soak_case_of(config, &lane->step, r, &of);
        tokens[r] = of.tokens;
        layout[r] = of.layout;
    }
    routing_reseed(worker->routing, routes, soak_drop(config, lane->step.routes));
    return inputs_open_varied(config, &worker->of, worker->routing, &variety, &worker->inputs, error);
}

static ep_status open_lane(struct soak *soak, const struct soak_step *step, struct ep_error *error)
{
    struct lane *lane = &soak->lane[step->lane];
    struct worker *worker = &lane->worker;

    lane->step = *step;
    soak_case_of(worker->config, step, worker->rank, &worker->of);
    worker->tokens = worker->of.tokens;
    if (open_inputs(lane, error) != EP_OK)
        return error->status;
    worker->prepared = true;
    if (worker_open_memory(worker, error) != EP_OK || worker_begin_pass(worker, BENCH_FORWARD, error) != EP_OK)
        return error->status;
    worker->op_flags = (step->cached ? EP_OP_CACHED : 0) | (step->halves ? EP_OP_SEND_ONLY : 0);
    return memory_poison(worker, error);
}

static void close_lane(struct lane *lane)
{
    if (lane->worker.prepared) {
        memory_close(&lane->worker);
        inputs_close(&lane->worker.inputs);
    }
    lane->worker.prepared = false;
    lane->state = LANE_FREE;
}

/* ---- what became of an op -------------------------------------------------------------- */

static ep_status check_time(struct lane *lane, const ep_op_info *info, struct ep_error *error)
{
    const uint64_t limit_ms = (uint64_t)lane->worker.config->timeout_ms + OP_SLACK_MS;
    struct bench_soak *totals = &lane->worker.result->soak;

    totals->waited_ns += info->wait_ns;
    if (info->service_ns > totals->longest_ns)
        totals->longest_ns = info->service_ns;
    if (info->service_ns <= limit_ms * EP_NS_PER_MS)
        return EP_OK;
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "it took %llu ms, must be %llu ms at most",
                        (unsigned long long)(info->service_ns / EP_NS_PER_MS), (unsigned long long)limit_ms);
}

static ep_status check_verdict(const struct lane *lane, struct ep_error *error)
{
    const struct bench_verdict *verdict = &lane->worker.result->verdict;

    if (verdict->mismatches == 0)
        return EP_OK;
    return ep_error_set(error, EP_VERIFY_FAILED, "%llu mismatches; %s", (unsigned long long)verdict->mismatches,
                        verdict->first);
}

static struct verifier verifier_of(struct lane *lane)
{
    struct bench_rank_result *result = lane->worker.result;

    return (struct verifier){ &lane->worker.inputs, lane->worker.rank, &result->verdict, &result->progress, false };
}

static void count_dispatch(struct lane *lane, const ep_op_info *info)
{
    struct bench_soak *totals = &lane->worker.result->soak;

    totals->dispatches[lane->worker.of.mode][lane->worker.of.layout]++;
    totals->dropped += info->dropped;
    totals->masked += info->absent > 0;
}

/* An op is over: the program has its result. */
static void note_result(struct soak *soak)
{
    struct bench_soak *totals = &soak->worker->result->soak;
    const uint64_t now = ep_clock_ns(), gap = now - soak->result_ns;

    if (soak->turning) {
        follow_paused(soak->worker, gap);
    } else if (soak->result_ns) {
        totals->gaps++;
        totals->gap_ns += gap;
    }
    soak->turning = false;
    soak->result_ns = now;
}

/* ---- one op -------------------------------------------------------------------------------- */

static ep_status dispatch(struct soak *soak, const struct soak_step *step, struct ep_error *error)
{
    struct lane *lane = &soak->lane[step->lane];
    ep_status status = open_lane(soak, step, error);

    lane->known = soak->present;
    if (lane->worker.of.mode == EP_MODE_LL)
        lane->ll_number = soak->ll_count++;
    lane->state = LANE_DISPATCHED;
    return status == EP_OK ? worker_send_dispatch(&lane->worker, error) : status;
}

static void dawdle(const struct lane *lane)
{
    const uint32_t us = soak_nap_us(lane->worker.config, lane->step.number, lane->worker.rank);

    if (us > 0)
        nanosleep(&(struct timespec){ .tv_nsec = us * 1000l }, NULL);
}

/* One worker is killed at a time: when it was missed before the dispatch began, no other goes meanwhile. */
static bool may_be_changing(const struct lane *lane, const ep_op_info *info)
{
    return lane->worker.config->soak_kill_s > 0 && (info->absent == 0 || info->arrived[0] != lane->known);
}

static ep_status look_at_dispatch(struct soak *soak, struct lane *lane, const ep_op_info *info,
                                  struct ep_error *error)
{
    struct verifier verifier = verifier_of(lane);
    struct ep_ref_dispatch plan;
    uint64_t hash = 0;
    ep_status status;

    dawdle(lane);
    verifier.changing = may_be_changing(lane, info);
    soak->present = info->arrived[0];
    count_dispatch(lane, info);
    if (worker_expect(&lane->worker, &verifier, info, &plan, error) != EP_OK)
        return error->status;
    status = worker_receive(&lane->worker, &verifier, &plan, info, lane->step.in_place, &lane->rows, &hash, error);
    ep_ref_dispatch_free(&plan);
    return status == EP_OK ? check_verdict(lane, error) : status;
}

static ep_status receive(struct soak *soak, struct lane *lane, struct ep_error *error)
{
    ep_op_info info = { .size = sizeof info };
    ep_status status = worker_complete(&lane->worker, error);

    if (status == EP_OK)
        status = worker_wait(&lane->worker, "dispatch", error);
    if (status == EP_OK && (status = ep_dispatch_info(lane->worker.handle, &info)) != EP_OK)
        status = worker_failure(error, status, "ep_dispatch_info");
    if (status == EP_OK)
        status = check_time(lane, &info, error);
    note_result(soak);
    return status == EP_OK ? look_at_dispatch(soak, lane, &info, error) : status;
}

static ep_status receive_and_combine(struct soak *soak, struct lane *lane, struct ep_error *error)
{
    ep_status status = receive(soak, lane, error);

    if (status != EP_OK)
        return status;
    if (lane->step.skipped) {
        close_lane(lane);
        return EP_OK;
    }
    lane->state = LANE_COMBINED;
    return worker_send_combine(&lane->worker, lane->rows, error);
}

static ep_status look_at_combine(struct lane *lane, const ep_op_info *info, struct ep_error *error)
{
    struct verifier verifier = verifier_of(lane);
    struct worker *worker = &lane->worker;
    ep_status status = memory_pull_result(worker, error);

    worker->result->soak.combines[worker->of.mode][worker->of.layout]++;
    if (status == EP_OK)
        status = verify_combine(&verifier, worker->own.result, info->arrived, error);
    return status == EP_OK ? check_verdict(lane, error) : status;
}

static ep_status finish(struct soak *soak, struct lane *lane, struct ep_error *error)
{
    ep_op_info info = { .size = sizeof info };
    ep_status status = worker_complete(&lane->worker, error);

    if (status == EP_OK)
        status = worker_wait(&lane->worker, "combine", error);
    if (status == EP_OK && (status = ep_combine_info(lane->worker.handle, &info)) != EP_OK)
        status = worker_failure(error, status, "ep_combine_info");
    if (status == EP_OK)
        status = check_time(lane, &info, error);
    note_result(soak);
    if (status == EP_OK)
        status = look_at_combine(lane, &info, error);
    if (status == EP_OK)
        close_lane(lane);
    return status;
}

/* ---- steps ----------------------------------------------------------------------------- */

/* Everything of this lane that is due when step `now` has been dispatched. */
static ep_status advance_lane(struct soak *soak, struct lane *lane, uint64_t now, struct ep_error *error)
{
    const uint64_t number = lane->step.number;
    ep_status status = EP_OK;
    char text[256];

    if (lane->state == LANE_DISPATCHED && now >= number + lane->step.combine_after)
        status = receive_and_combine(soak, lane, error);
    if (status == EP_OK && lane->state == LANE_COMBINED && now >= number + lane->step.result_after)
        status = finish(soak, lane, error);
    if (status == EP_OK)
        return EP_OK;
    soak_step_text(lane->worker.config, &lane->step, lane->worker.rank, text, sizeof text);
    return ep_error_prefix(error, "%s, %s", text, lane->state == LANE_COMBINED ? "combine" : "dispatch");
}

static struct lane *oldest_but(struct soak *soak, uint64_t first)
{
    struct lane *oldest = NULL;

    for (uint32_t i = 0; i < SOAK_LANES; i++) {
        struct lane *lane = &soak->lane[i];

        if (lane->state != LANE_FREE && lane->step.number >= first &&
            (!oldest || lane->step.number < oldest->step.number))
            oldest = lane;
    }
    return oldest;
}

/* Oldest first: ops of HT follow each other in one order at all ranks. */
static ep_status advance(struct soak *soak, uint64_t now, struct ep_error *error)
{
    ep_status status = EP_OK;
    struct lane *lane = oldest_but(soak, 0);

    while (status == EP_OK && lane) {
        const uint64_t number = lane->step.number;

        status = advance_lane(soak, lane, now, error);
        lane = oldest_but(soak, number + 1);
    }
    return status;
}

/* Another LL dispatch takes the bank of the one ll_banks before it. */
static ep_status free_bank(struct soak *soak, struct ep_error *error)
{
    const uint32_t banks = soak->worker->info.group.ll_banks;
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < SOAK_LANES; i++) {
        struct lane *lane = &soak->lane[i];

        if (lane->state != LANE_FREE && lane->worker.of.mode == EP_MODE_LL &&
            soak->ll_count - lane->ll_number >= banks)
            status = advance_lane(soak, lane, UINT64_MAX, error);
    }
    return status;
}

static ep_status take_step(struct soak *soak, uint64_t number, struct ep_error *error)
{
    const struct bench_config *config = soak->worker->config;
    struct soak_step step;
    struct bench_case of;
    char text[256];
    ep_status status;

    soak_step_of(config, number, &step);
    soak_case_of(config, &step, soak->worker->rank, &of);
    status = of.mode == EP_MODE_LL ? free_bank(soak, error) : EP_OK;
    if (status != EP_OK)
        return status;
    if (dispatch(soak, &step, error) != EP_OK) {
        soak_step_text(config, &step, soak->worker->rank, text, sizeof text);
        return ep_error_prefix(error, "%s, dispatch", text);
    }
    worker_get_on(soak->worker);
    return advance(soak, number, error);
}

/* ---- all lanes --------------------------------------------------------------------------- */

static ep_status open_lanes(struct soak *soak, struct ep_error *error)
{
    for (uint32_t i = 0; i < SOAK_LANES; i++) {
        struct worker *worker = &soak->lane[i].worker;
        ep_status status;

        *worker = *soak->worker;
        status = ep_handle_create(worker->ep, &worker->handle);
        if (status != EP_OK)
            return worker_failure(error, status, "ep_handle_create");
    }
    return EP_OK;
}

static void close_lanes(struct soak *soak)
{
    ep_sync(soak->worker->ep, (int32_t)soak->worker->config->timeout_ms); /* after a failure ops may be under way */
    for (uint32_t i = 0; i < SOAK_LANES; i++) {
        close_lane(&soak->lane[i]);
        ep_handle_destroy(soak->lane[i].worker.handle);
        soak->lane[i].worker.handle = NULL;
    }
}

/* ---- boundaries ------------------------------------------------------------------------- */

enum boundary { BOUNDARY_PASSED, BOUNDARY_TURN, BOUNDARY_GONE };

/* The rank is another one from here on: the epoch's first step is `step`. */
static ep_status begin_epoch(struct soak *soak, ep_rank *next, uint64_t step, struct ep_error *error)
{
    struct worker *worker = soak->worker;

    close_lanes(soak);
    ep_leave(worker->ep);
    worker->ep = next;
    soak->ll_count = 0;
    soak->turning = soak->result_ns != 0;
    if (worker_describe(worker, error) != EP_OK || follow_settle(worker, error) != EP_OK ||
        follow_begins(worker, step, error) != EP_OK)
        return error->status;
    return open_lanes(soak, error);
}

/* Before a step of the chapter that ends with `end`.  What is under way at a turn is finished in the old epoch. */
static ep_status pass_boundary(struct soak *soak, uint64_t end, enum boundary *boundary, struct ep_error *error)
{
    struct worker *worker = soak->worker;
    ep_rank *next = NULL;
    ep_status status = worker->config->follow ? ep_advance(worker->ep, &next) : EP_OK;

    *boundary = next ? BOUNDARY_TURN : status == EP_DETACHED ? BOUNDARY_GONE : BOUNDARY_PASSED;
    if (*boundary == BOUNDARY_PASSED)
        return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_advance");
    status = advance(soak, UINT64_MAX, error);
    return status == EP_OK && next ? begin_epoch(soak, next, end, error) : status;
}

/* ---- chapters --------------------------------------------------------------------------- */

/* The last step that may be taken now, and one more; `next` when there will be none.  The leash is closed after its
 * end was set (partner: the coordinator's stores), so it is looked at in the other order. */
static uint64_t wait_for_leash(const struct worker *worker, uint64_t next)
{
    const struct bench_leash *leash = &worker->shared->leash;

    for (;;) {
        const bool closed = __atomic_load_n(&leash->closed, __ATOMIC_ACQUIRE);
        const uint64_t granted = __atomic_load_n(&leash->granted, __ATOMIC_ACQUIRE);

        if (granted > next || closed)
            return granted;
        nanosleep(&(struct timespec){ .tv_nsec = LEASH_NS }, NULL);
    }
}

/* Or a part of it, where the rank goes over. */
static ep_status run_chapter(struct soak *soak, uint64_t first, uint64_t end, enum boundary *boundary,
                             struct ep_error *error)
{
    ep_status status = EP_OK;

    soak->present = 0;
    *boundary = BOUNDARY_PASSED;
    for (uint64_t number = first; number < end; number++) {
        status = pass_boundary(soak, end, boundary, error);
        if (status != EP_OK || *boundary != BOUNDARY_PASSED)
            return status;
        status = take_step(soak, number, error);
        if (status != EP_OK)
            return status;
    }
    return advance(soak, UINT64_MAX, error);
}

static ep_status run_chapters(struct soak *soak, struct ep_error *error)
{
    uint64_t *next = &soak->worker->result->soak_next, granted;
    enum boundary boundary = BOUNDARY_PASSED;
    ep_status status = EP_OK;

    while (status == EP_OK && boundary != BOUNDARY_GONE &&
           (granted = wait_for_leash(soak->worker, *next)) > *next) {
        const uint64_t chapter = *next - *next % SOAK_CHAPTER + SOAK_CHAPTER;
        const uint64_t end = granted < chapter ? granted : chapter;

        status = run_chapter(soak, *next, end, &boundary, error);
        if (status == EP_OK)
            __atomic_store_n(next, end, __ATOMIC_RELEASE); /* partner: the coordinator's leash */
    }
    if (status == EP_OK && boundary == BOUNDARY_GONE)
        __atomic_store_n(&soak->worker->result->gone, 1, __ATOMIC_RELEASE); /* partner: the coordinator */
    return status;
}

/* ---- the whole ---------------------------------------------------------------------------- */

/* A rank that is new waits in its epoch until the others come.  *gone: nothing is to be done here. */
static ep_status find_begin(struct worker *worker, bool *gone, struct ep_error *error)
{
    uint64_t *next = &worker->result->soak_next, begin;

    *gone = false;
    if (!worker->shared->config.follow)
        return EP_OK;
    if (follow_settle(worker, error) != EP_OK)
        return error->status;
    if (*next == 0)
        return follow_begins(worker, 0, error);
    while (*next == BENCH_NOT_BEGUN && !*gone)
        switch (follow_await_begin(worker, &begin)) {
        case FOLLOW_HERE: __atomic_store_n(next, begin, __ATOMIC_RELEASE); break;
        case FOLLOW_GONE: *gone = true; break;
        case FOLLOW_SUPERSEDED:
            ep_leave(worker->ep);
            worker->ep = NULL;
            if (worker_join(worker, true, error) != EP_OK || worker_describe(worker, error) != EP_OK ||
                follow_settle(worker, error) != EP_OK)
                return error->status;
        }
    return EP_OK;
}

ep_status worker_soak(struct worker *worker, struct ep_error *error)
{
    struct soak *soak = calloc(1, sizeof *soak);
    bool gone = false;
    ep_status status;

    if (!soak)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a soak");
    soak->worker = worker;
    memset(&worker->result->soak, 0, sizeof worker->result->soak);
    memset(&worker->result->verdict, 0, sizeof worker->result->verdict);
    worker_end(worker);
    status = find_begin(worker, &gone, error);
    if (status == EP_OK && !gone)
        status = open_lanes(soak, error);
    if (status == EP_OK && !gone)
        status = run_chapters(soak, error);
    close_lanes(soak);
    free(soak);
    return status;
}
