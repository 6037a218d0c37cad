#include "sweep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one case ----------------------------------------------------------------------------- */

static ep_status verify_case(struct crew *crew, const struct sweep *sweep, uint32_t index,
                             struct ep_error *error)
{
    if (!sweep->config.verify)
        return EP_OK;
    progress(index, sweep->config.n_cases, &sweep->config.cases[index], "verifying");
    return crew_do(crew, crew_all(crew), BENCH_VERIFY, index, 0, error);
}

static ep_status kill_case(struct crew *crew, struct sweep *sweep, uint32_t index, struct ep_error *error)
{
    ep_status status;

    if (sweep->config.kill_case != (int32_t)index || sweep->kill.done)
        return EP_OK;
    progress(index, sweep->config.n_cases, &sweep->config.cases[index], "killing a worker");
    status = kill_run(crew, &sweep->config, index, &sweep->kill, error);
    return status == EP_OK ? verify_case(crew, sweep, index, error) : status;
}

static ep_status run_steps(struct crew *crew, struct sweep *sweep, uint32_t index, struct ep_error *error)
{
    uint32_t n = sweep->config.n_cases;
    uint64_t all = crew_all(crew);
    ep_status status;

    progress(index, n, &sweep->config.cases[index], "preparing");
    status = crew_do(crew, all, BENCH_PREPARE, index, 0, error);
    if (status == EP_OK)
        status = verify_case(crew, sweep, index, error);
    if (status == EP_OK)
        status = kill_case(crew, sweep, index, error);
    progress(index, n, &sweep->config.cases[index], "timing");
    if (status == EP_OK)
        status = crew_do(crew, all, BENCH_TIME, index, 0, error);
    if (status == EP_OK && sweep->config.graph > 0)
        status = crew_do(crew, all, BENCH_TIME_GRAPH, index, 0, error);
    return status;
}

static uint32_t most_sms(const struct crew *crew, const struct bench_case *of)
{
    uint32_t most = 0;

    for (uint32_t r = 0; of->mode == EP_MODE_HT && r < crew->ranks; r++)
        most = crew_result(crew, r)->ht_sms > most ? crew_result(crew, r)->ht_sms : most;
    return most;
}

static void run_case(struct crew *crew, struct sweep *sweep, uint32_t index)
{
    struct case_result *result = &sweep->results[index];

    *result = (struct case_result){ .of = sweep->config.cases[index], .error = EP_ERROR_INIT };
    result->sms = most_sms(crew, &result->of);
    if (run_steps(crew, sweep, index, &result->error) == EP_OK)
        summarise(crew, result);
    summarise_verdicts(crew, crew_all(crew), result);
    if (result->error.status == EP_OK)
        crew_do(crew, crew_all(crew), BENCH_END, index, 0, &result->error);
    result->verified = result->verified && result->error.status == EP_OK;
}

/* ---- all of them --------------------------------------------------------------------------- */

ep_status sweep_attach(struct crew *crew, struct sweep *sweep, struct ep_error *error)
{
    ep_status status = crew_start_all(crew, error);

    if (status == EP_OK)
        status = crew_do(crew, crew_all(crew), BENCH_ATTACH, 0, BENCH_FLAG_RETRY, error);
    for (uint32_t r = 0; status == EP_OK && r < crew->ranks; r++) {
        const struct bench_rank_result *result = crew_result(crew, r);

        sweep->executor = r == 0 || sweep->executor == result->executor ? result->executor : BENCH_EXECUTOR_MIXED;
        sweep->context_us = fmax(sweep->context_us, result->context_us);
        sweep->join_us = fmax(sweep->join_us, result->join_us);
        sweep->attach_us = fmax(sweep->attach_us, result->open_us + result->join_us);
    }
    return status;
}

static ep_status attach_for(struct crew *crew, struct sweep *sweep, uint32_t index, struct ep_error *error)
{
    crew->shared->config.ht_sms = sweep->config.cases[index].ht_sms;
    return sweep_attach(crew, sweep, error);
}

/* Ops of ranks that failed at different places no longer belong together; and what HT ops fill is said in joining. */
static bool begins_anew(const struct sweep *sweep, uint32_t index)
{
    const struct bench_case *of = sweep->config.cases;

    return index > 0 && (sweep->results[index - 1].error.status != EP_OK || of[index].ht_sms != of[index - 1].ht_sms);
}

static ep_status begin_anew(struct crew *crew, struct sweep *sweep, uint32_t index, struct ep_error *error)
{
    crew_stop_all(crew);
    return attach_for(crew, sweep, index, error);
}

static bool failed(const struct sweep *sweep, const struct case_result *result)
{
    return result->error.status != EP_OK || (sweep->config.verify && !result->verified);
}

static ep_status run_cases(struct crew *crew, struct sweep *sweep, struct ep_error *error)
{
    ep_status status = attach_for(crew, sweep, 0, error);

    for (uint32_t i = 0; status == EP_OK && i < sweep->config.n_cases; i++) {
        struct case_result *result = &sweep->results[i];

        if (begins_anew(sweep, i) && begin_anew(crew, sweep, i, error) != EP_OK)
            return error->status;
        run_case(crew, sweep, i);
        sweep->n_results = i + 1;
        if (result->error.status == EP_CANCELLED && crew_cancelled)
            return ep_error_set(error, EP_CANCELLED, "interrupted");
        if (failed(sweep, result) && !sweep->config.keep_going)
            break;
    }
    return status;
}

ep_status sweep_run(struct sweep *sweep, struct ep_error *error)
{
    struct crew *crew = malloc(sizeof *crew);
    ep_status status;

    sweep->results = calloc(sweep->config.n_cases, sizeof *sweep->results);
    if (!crew || !sweep->results) {
        free(crew);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u cases", sweep->config.n_cases);
    }
    status = crew_open(&sweep->config, crew, error);
    if (status == EP_OK)
        status = run_cases(crew, sweep, error);
    crew_close(crew);
    progress_end();
    free(crew);
    return status;
}

void sweep_free(struct sweep *sweep)
{
    free(sweep->results);
    sweep->results = NULL;
}

ep_status sweep_verdict(const struct sweep *sweep)
{
    ep_status verdict = EP_OK;

    if (sweep->soak.run)
        return sweep->soak.error.status;
    for (uint32_t i = 0; i < sweep->n_results; i++) {
        const struct case_result *result = &sweep->results[i];

        if (result->error.status != EP_OK)
            return result->error.status;
        if (sweep->config.verify && !result->verified)
            verdict = EP_VERIFY_FAILED;
    }
    if (verdict == EP_OK && sweep->n_results < sweep->config.n_cases)
        verdict = EP_INTERNAL;
    if (verdict == EP_OK && sweep->config.kill_case >= 0 && !sweep->kill.done)
        verdict = EP_INTERNAL;
    return verdict;
}
