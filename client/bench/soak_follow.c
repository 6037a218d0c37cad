/*
 * --follow: the coordinator's part.  It looks at the group all the time: workers learn from it which node each rank of an
 * epoch is on, and ranks that are new get a worker, which waits until the others come over.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "sweep.h"

enum { LOOK_MS = 10 };

/* ---- looking ---------------------------------------------------------------------- */

static struct bench_epoch *newest(const struct follower *f)
{
    struct bench_shared *shared = f->crew->shared;

    return shared->n_epochs ? &shared->epoch[shared->n_epochs - 1] : NULL;
}

/* A node has the number of the first rank that is there. */
static void number_nodes(const struct group_view *view, uint32_t *node_of)
{
    for (uint32_t r = 0; r < view->ranks; r++) {
        node_of[r] = 0;
        while (strcmp(view->node[node_of[r]], view->node[r]) != 0)
            node_of[r]++;
    }
}

static ep_status publish(struct follower *f, struct ep_error *error)
{
    struct bench_shared *shared = f->crew->shared;
    struct bench_epoch *next = &shared->epoch[shared->n_epochs];

    if (f->view.ranks == 0 || (newest(f) && newest(f)->epoch >= f->view.epoch))
        return EP_OK;
    if (shared->n_epochs == BENCH_MAX_EPOCHS)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "--follow: the group has had %d epochs, more are not possible",
                            BENCH_MAX_EPOCHS);
    next->epoch = f->view.epoch;
    next->ranks = f->view.ranks;
    number_nodes(&f->view, next->node_of);
    __atomic_store_n(&shared->n_epochs, shared->n_epochs + 1, __ATOMIC_RELEASE); /* partner: workers' find_epoch */
    return EP_OK;
}

ep_status follower_look(struct follower *f, struct ep_error *error)
{
    const uint64_t now = ep_clock_ns();

    if (!f->link || now - f->look_ns < LOOK_MS * EP_NS_PER_MS)
        return EP_OK;
    f->look_ns = now;
    if (group_look(f->link, f->crew->shared->config.group, &f->view, error) != EP_OK)
        return ep_error_prefix(error, "--follow");
    return publish(f, error);
}

ep_status follower_open(struct follower *f, struct group_link *link, struct crew *crew, struct ep_error *error)
{
    const struct bench_config *config = &crew->shared->config;

    *f = (struct follower){ .crew = crew };
    if (!config->follow)
        return EP_OK;
    f->link = link;
    f->servers = config->servers ? config->servers : 1;
    for (uint32_t i = 0; i < f->servers; i++)
        if (group_node_name(config->server[i], f->node[i], sizeof f->node[i], error) != EP_OK)
            return error->status;
    for (uint32_t r = 0; r < config->ranks; r++)
        f->server_of[r] = config->server_of[r];
    return follower_look(f, error);
}

/* ---- new ranks --------------------------------------------------------------------- */

static bool has_worker(const struct follower *f, uint64_t taken, uint32_t rank)
{
    for (uint32_t w = 0; w < f->crew->ranks; w++)
        if (taken >> w & 1 && f->crew->shared->rank_of[w] == rank &&
            strcmp(f->node[f->server_of[w]], f->view.node[rank]) == 0)
            return true;
    return false;
}

static ep_status find_server(const struct follower *f, uint32_t rank, uint32_t *server, struct ep_error *error)
{
    for (*server = 0; *server < f->servers; (*server)++)
        if (strcmp(f->node[*server], f->view.node[rank]) == 0)
            return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "--server: rank %u of group %s is on node %s, and no server of that node was given", rank,
                        f->crew->shared->config.group, f->view.node[rank]);
}

static ep_status start(struct follower *f, uint32_t worker, uint32_t rank, struct ep_error *error)
{
    uint32_t server;
    ep_status status = find_server(f, rank, &server, error);

    if (status != EP_OK)
        return status;
    f->server_of[worker] = server;
    f->crew->shared->rank_of[worker] = rank;
    f->crew->shared->config.server_of[rank] = (uint8_t)server;
    status = crew_start(f->crew, worker, error);
    return status == EP_OK ? crew_send(f->crew, 1ull << worker, BENCH_ATTACH, 0, BENCH_FLAG_RETRY, error) : status;
}

/* A number that no worker has: that of the rank if it is free. */
static uint32_t free_number(const struct follower *f, uint32_t rank)
{
    uint32_t worker = rank;

    for (uint32_t tried = 0; f->crew->member[worker].pid != 0; tried++) {
        if (tried == BENCH_MAX_RANKS)
            return BENCH_MAX_RANKS;
        worker = (worker + 1) % BENCH_MAX_RANKS;
    }
    return worker;
}

ep_status follower_add(struct follower *f, uint64_t taken, uint32_t *worker, struct ep_error *error)
{
    *worker = BENCH_MAX_RANKS;
    for (uint32_t r = 0; f->link && r < f->view.ranks; r++) {
        if (!f->view.expected[r] || has_worker(f, taken, r))
            continue;
        *worker = free_number(f, r);
        if (*worker == BENCH_MAX_RANKS)
            return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "--follow: %d workers are there, more are not possible",
                                BENCH_MAX_RANKS);
        return start(f, *worker, r, error);
    }
    return EP_OK;
}

/* ---- turns --------------------------------------------------------------------------- */

void follower_sum(const struct follower *f, struct soak_result *result)
{
    const struct bench_shared *shared = f->crew->shared;
    double pauses[BENCH_MAX_EPOCHS];
    uint32_t n = 0;

    for (uint32_t i = 0; i < shared->n_epochs; i++) {
        const struct bench_epoch *epoch = &shared->epoch[i];

        if (epoch->begins <= 1)
            continue; /* the first one, or nobody has gone over to it */
        pauses[n] = (double)epoch->pause_ns / 1e3;
        result->turn[n] = (struct soak_turn){ epoch->epoch, epoch->begins - 1, pauses[n] };
        n++;
    }
    result->turns = n;
    result->pause_p50_us = percentile(pauses, n, 0.5);
    result->pause_p99_us = percentile(pauses, n, 0.99);
    result->pause_max_us = percentile(pauses, n, 1.0);
    result->step_us = result->totals.gaps ? (double)result->totals.gap_ns / 1e3 / (double)result->totals.gaps : 0;
}
