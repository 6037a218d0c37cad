/* --kill: a worker dies in the middle of a case; the others finish, a new one takes its rank. */
#include <math.h>
#include <time.h>

#include "ep_clock.h"
#include "sweep.h"

enum { EDGE_WAIT_MS = 60000 };

static ep_status wait_for_the_edge(struct crew *crew, uint32_t victim, struct ep_error *error)
{
    uint64_t deadline = ep_clock_ns() + EDGE_WAIT_MS * EP_NS_PER_MS;

    while (!__atomic_load_n(&crew_result(crew, victim)->at_the_edge, __ATOMIC_ACQUIRE)) {
        if (crew_cancelled)
            return ep_error_set(error, EP_CANCELLED, "interrupted");
        if (ep_clock_ns() > deadline)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED,
                                "--kill: rank %u did not reach the middle of its case", victim);
        nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    }
    return EP_OK;
}

static void count_ops(const struct crew *crew, uint64_t survivors, struct kill_result *kill)
{
    for (uint32_t r = 0; r < crew->ranks; r++) {
        const struct bench_rank_result *result = crew_result(crew, r);

        if (!(survivors >> r & 1))
            continue;
        kill->survivors++;
        kill->ops_finished += result->ops_finished;
        kill->ops_failed += result->ops_failed;
        kill->longest_op_us = fmax(kill->longest_op_us, result->longest_op_us);
    }
}

static ep_status die(struct crew *crew, uint32_t case_index, uint64_t survivors, struct kill_result *kill,
                     struct ep_error *error)
{
    uint64_t victim = 1ull << kill->rank;
    ep_status status = crew_send(crew, survivors, BENCH_TIME, case_index, BENCH_FLAG_MASKED, error);

    if (status == EP_OK)
        status = crew_send(crew, victim, BENCH_TIME, case_index, BENCH_FLAG_VICTIM, error);
    if (status == EP_OK)
        status = wait_for_the_edge(crew, kill->rank, error);
    crew_kill(crew, kill->rank);
    if (status == EP_OK)
        status = crew_collect(crew, survivors, error);
    count_ops(crew, survivors, kill);
    return status;
}

static ep_status replace(struct crew *crew, uint32_t case_index, struct kill_result *kill,
                         struct ep_error *error)
{
    uint64_t victim = 1ull << kill->rank;
    const struct bench_rank_result *result = crew_result(crew, kill->rank);
    ep_status status = crew_start(crew, kill->rank, error);

    if (status == EP_OK)
        status = crew_do(crew, victim, BENCH_ATTACH, case_index, BENCH_FLAG_RETRY, error);
    kill->claim_wait_us = result->claim_wait_us;
    kill->context_us = result->context_us;
    kill->join_us = result->join_us;
    kill->attach_us = result->open_us + result->join_us;
    return status == EP_OK ? crew_do(crew, victim, BENCH_PREPARE, case_index, 0, error) : status;
}

ep_status kill_run(struct crew *crew, const struct bench_config *config, uint32_t case_index,
                   struct kill_result *kill, struct ep_error *error)
{
    uint32_t rank = (uint32_t)config->kill_rank;
    uint64_t survivors = crew_all(crew) & ~(1ull << rank);
    struct case_result masked = { .verified = true };
    ep_status status;

    *kill = (struct kill_result){ .rank = rank, .case_index = case_index };
    status = die(crew, case_index, survivors, kill, error);
    kill->ops_expected = 2ull * (config->warmup + config->iters) * kill->survivors;
    if (status == EP_OK && config->verify) {
        status = crew_do(crew, survivors, BENCH_VERIFY, case_index, BENCH_FLAG_MASKED, error);
        summarise_verdicts(crew, survivors, &masked);
    }
    kill->masked_verified = status == EP_OK && config->verify && masked.verified;
    if (status == EP_OK && !masked.verified)
        status = ep_error_set(error, EP_VERIFY_FAILED, "without rank %u: %s", rank, masked.first);
    if (status == EP_OK)
        status = replace(crew, case_index, kill, error);
    kill->done = status == EP_OK;
    return status;
}
