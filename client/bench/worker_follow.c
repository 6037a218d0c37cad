/*
 * --follow: a worker's configuration is that of the epoch that its rank is in.
 *
 * All ranks make it from the same: what was asked for, and what the library says of the epoch.  Only which rank is on
 * which node comes from the coordinator, which is also told at which step the ops of an epoch begin.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep_clock.h"
#include "worker_private.h"

enum { KNOWN_MS = 10000, LOOK_NS = 1000000 };

/* ---- cases ------------------------------------------------------------------------ */

static bool carries(const ep_group_info *group, ep_dtype dtype)
{
    return (group->dtypes & 1u << dtype) != 0;
}

static bool fits(const struct bench_case *of, const ep_group_info *group)
{
    const struct bench_dtype_info *dtype = &bench_dtypes[of->dtype];
    const uint32_t most = of->mode == EP_MODE_LL ? group->ll_max_tokens : group->ht_max_tokens;

    return most > 0 && of->tokens <= most && carries(group, dtype->input) && carries(group, dtype->wire) &&
           carries(group, dtype->combine);
}

static ep_status fit_cases(struct bench_config *config, const ep_group_info *group, struct ep_error *error)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < config->n_cases; i++)
        if (fits(&config->cases[i], group))
            config->cases[kept++] = config->cases[i];
    config->n_cases = kept;
    if (kept > 0)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION, "--follow: epoch %llu of group %s takes none of the cases",
                        (unsigned long long)group->epoch, config->group);
}

/* ---- placement --------------------------------------------------------------------- */

/* Homes in an order that gives every expert's, and every rank's local numbers, as they are. */
static void order_homes(const ep_rank_info *info, struct bench_config *config)
{
    uint32_t next_local[BENCH_MAX_RANKS] = { 0 };
    bool taken[BENCH_MAX_HOMES] = { false };

    config->n_homes = 0;
    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < info->n_homes; i++) {
            const ep_home *home = &info->homes[i];
            const bool waits = i > 0 && info->homes[i - 1].expert == home->expert && !taken[i - 1];

            if (taken[i] || waits || home->local != next_local[home->rank])
                continue;
            taken[i] = more = true;
            next_local[home->rank]++;
            config->homes[config->n_homes++] = (struct ep_ref_home){ home->expert, home->rank };
        }
    }
}

static ep_status fit_placement(struct bench_config *config, const ep_rank_info *info, struct ep_error *error)
{
    if (info->group.ranks > BENCH_MAX_RANKS || info->n_homes > BENCH_MAX_HOMES)
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "--follow: epoch %llu has %u ranks and %u homes of experts, at most %d and %d are possible",
                            (unsigned long long)info->group.epoch, info->group.ranks, info->n_homes, BENCH_MAX_RANKS,
                            BENCH_MAX_HOMES);
    order_homes(info, config);
    return EP_OK;
}

/* ---- what the coordinator knows of an epoch ------------------------------------------- */

static struct bench_epoch *find_epoch(struct bench_shared *shared, uint64_t epoch)
{
    const uint32_t n = __atomic_load_n(&shared->n_epochs, __ATOMIC_ACQUIRE); /* partner: the coordinator's store */

    for (uint32_t i = n; i-- > 0;)
        if (shared->epoch[i].epoch == epoch)
            return &shared->epoch[i];
    return NULL;
}

static ep_status await_epoch(struct worker *worker, uint64_t epoch, struct ep_error *error)
{
    const uint64_t end = ep_clock_ns() + KNOWN_MS * EP_NS_PER_MS;

    while (!(worker->epoch = find_epoch(worker->shared, epoch))) {
        if (ep_clock_ns() > end)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "--follow: the coordinator has not seen epoch %llu",
                                (unsigned long long)epoch);
        nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
    }
    return EP_OK;
}

/* ---- the rank in its epoch ---------------------------------------------------------------- */

ep_status follow_settle(struct worker *worker, struct ep_error *error)
{
    const ep_group_info *group = &worker->info.group;
    struct bench_config *config = worker->fitted ? worker->fitted : malloc(sizeof *config);

    if (!config)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a configuration");
    *config = worker->shared->config;
    worker->fitted = config;
    worker->config = config;
    config->ranks = group->ranks;
    config->experts = group->experts;
    config->hidden = group->hidden;
    config->top_k = group->top_k;
    config->timeout_ms = group->timeout_ms;
    if (fit_cases(config, group, error) != EP_OK || fit_placement(config, &worker->info, error) != EP_OK ||
        await_epoch(worker, group->epoch, error) != EP_OK)
        return error->status;
    memcpy(config->node_of, worker->epoch->node_of, sizeof config->node_of);
    return worker_open_routing(worker, error);
}

/* ---- where an epoch's steps begin ----------------------------------------------------------- */

ep_status follow_begins(struct worker *worker, uint64_t step, struct ep_error *error)
{
    uint64_t said = 0;

    if (__atomic_compare_exchange_n(&worker->epoch->begins, &said, step + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
        said == step + 1)
        return EP_OK;
    return ep_error_set(error, EP_INTERNAL, "epoch %llu begins with op %llu at this rank, and with op %llu at another",
                        (unsigned long long)worker->epoch->epoch, (unsigned long long)step,
                        (unsigned long long)said - 1);
}

void follow_paused(struct worker *worker, uint64_t ns)
{
    uint64_t most = __atomic_load_n(&worker->epoch->pause_ns, __ATOMIC_RELAXED);

    while (ns > most && !__atomic_compare_exchange_n(&worker->epoch->pause_ns, &most, ns, false, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED))
        ;
}

/* A newer one than that which this rank waits in. */
static bool is_superseded(struct worker *worker)
{
    ep_event event = { .size = sizeof event };

    while (ep_event_next(worker->ep, 0, &event) == EP_OK)
        if (event.type == EP_EVENT_EPOCH)
            return true;
    return false;
}

enum follow_place follow_await_begin(struct worker *worker, uint64_t *step)
{
    const struct bench_leash *leash = &worker->shared->leash;
    uint64_t begins;

    while ((begins = __atomic_load_n(&worker->epoch->begins, __ATOMIC_SEQ_CST)) == 0) {
        if (__atomic_load_n(&leash->closed, __ATOMIC_ACQUIRE))
            return FOLLOW_GONE;
        if (is_superseded(worker))
            return FOLLOW_SUPERSEDED;
        nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
    }
    *step = begins - 1;
    return FOLLOW_HERE;
}
