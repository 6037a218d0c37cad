#include "run.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"
#include "group.h"
#include "soak_plan.h"      /* SOAK_LANES */
#include "worker_private.h" /* buffer_sizes */

/* ---- how large a group must be ----------------------------------------------------------------- */

enum { ARENA_SLACK = 1 << 20 };

/* Most rows that any rank receives in this case. */
static ep_status most_rows(const struct bench_config *config, const struct bench_case *of,
                           const struct routing *routing, uint32_t max_tokens, uint64_t *rows,
                           struct ep_error *error)
{
    struct inputs inputs;
    ep_status status = inputs_open(config, of, routing, &inputs, error);

    if (status != EP_OK)
        return status;
    *rows = 0;
    for (uint32_t r = 0; status == EP_OK && r < config->ranks; r++) {
        struct ep_ref_dispatch plan;

        if (!ep_ref_dispatch(&inputs.routing, r, of->layout, config->alignment, max_tokens, &plan)) {
            status = ep_error_set(error, EP_NO_MEMORY, "no memory for the expected rows");
            break;
        }
        *rows = plan.positions > *rows ? plan.positions : *rows;
        ep_ref_dispatch_free(&plan);
    }
    inputs_close(&inputs);
    return status;
}

/* A longer batch of the same kind needs at least as much. */
static bool outdone(const struct bench_config *config, uint32_t index)
{
    const struct bench_case *of = &config->cases[index];

    for (uint32_t i = 0; i < config->n_cases; i++) {
        const struct bench_case *other = &config->cases[i];
        bool same = other->mode == of->mode && other->layout == of->layout && other->dtype == of->dtype &&
                    other->scales == of->scales && other->pass == of->pass;

        if (same && (other->tokens > of->tokens || (other->tokens == of->tokens && i < index)))
            return true;
    }
    return false;
}

/* Lanes take memory of other sizes again and again, so some of it lies between blocks. */
static void settle_soak_arena(const struct bench_config *config, uint32_t local_experts, struct group_needs *needs)
{
    for (uint32_t i = 0; i < config->n_cases; i++) {
        const struct bench_case *of = &config->cases[i];
        const uint64_t arrivals = (uint64_t)config->ranks * of->tokens;
        uint64_t rows = arrivals, bytes;
        struct buffer_sizes sizes;

        if (of->layout == EP_LAYOUT_PACKED)
            rows = arrivals * (config->top_k < local_experts ? config->top_k : local_experts) +
                   (uint64_t)local_experts * (config->alignment - 1);
        buffer_sizes(config, of, of->tokens, local_experts, needs->ll_max_tokens, rows, &sizes);
        bytes = 2 * SOAK_LANES * buffer_total(&sizes) + ARENA_SLACK;
        if (bytes > needs->arena_bytes)
            needs->arena_bytes = bytes;
    }
}

static ep_status settle_arena(const struct bench_config *config, const struct routing *routing,
                              struct group_needs *needs, struct ep_error *error)
{
    struct ep_ref_routing placement = { .ranks = config->ranks, .experts = config->experts };
    uint32_t local_experts = ep_ref_local_experts(&placement, 0); /* rank 0 holds the most */

    if (config->soak_s || config->soak_ops) {
        settle_soak_arena(config, local_experts, needs);
        return EP_OK;
    }
    for (uint32_t i = 0; i < config->n_cases; i++) {
        const struct bench_case *of = &config->cases[i];
        struct buffer_sizes sizes;
        uint64_t rows;
        ep_status status;

        if (outdone(config, i))
            continue;
        status =
            most_rows(config, of, routing, of->mode == EP_MODE_LL ? needs->ll_max_tokens : 0, &rows, error);
        if (status != EP_OK)
            return status;
        buffer_sizes(config, of, of->tokens, local_experts, needs->ll_max_tokens, rows, &sizes);
        if (buffer_total(&sizes) + ARENA_SLACK > needs->arena_bytes)
            needs->arena_bytes = buffer_total(&sizes) + ARENA_SLACK;
    }
    return EP_OK;
}

/* ---- what was not given ------------------------------------------------------------------------- */

static void fill_defaults(struct bench_config *config)
{
    if (config->ranks == 0)
        config->ranks = 2;
    if (config->experts == 0)
        config->experts = 64;
    if (config->hidden == 0)
        config->hidden = 2048;
    if (config->top_k == 0)
        config->top_k = config->experts < 8 ? config->experts : 8;
}

static ep_status check_ranks(const struct bench_config *config, struct ep_error *error)
{
    if (config->zero_rank >= (int32_t)config->ranks)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--zero-rank %d: there are %u ranks",
                            config->zero_rank, config->ranks);
    if (config->kill_rank >= (int32_t)config->ranks)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--kill %d@%d: there are %u ranks", config->kill_rank,
                            config->kill_case, config->ranks);
    if (config->soak_kill_s && config->ranks < 2)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--soak-kill: nobody is left of 1 rank");
    if (config->kill_rank >= 0 && config->ranks < 2)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--kill: nobody is left of 1 rank");
    if (config->kill_case >= (int32_t)config->n_cases)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--kill %d@%d: there are %u cases", config->kill_rank,
                            config->kill_case, config->n_cases);
    return EP_OK;
}

static ep_status open_routing(const struct bench_config *config, struct routing **routing,
                              struct ep_error *error)
{
    struct routing_shape shape = { config->ranks, config->experts, config->top_k, config->seed,
                                   config->drop };

    if (routing_open(&config->routing, &shape, routing, error) != EP_OK)
        return ep_error_prefix(error, "--routing");
    return EP_OK;
}

static ep_status record(const struct bench_config *config, const struct routing *routing,
                        struct ep_error *error)
{
    uint32_t tokens = 1;

    for (uint32_t i = 0; i < config->n_cases; i++)
        tokens = config->cases[i].tokens > tokens ? config->cases[i].tokens : tokens;
    return routing_record(routing, tokens, config->record, error);
}

/* ---- the run -------------------------------------------------------------------------------------- */

static ep_status settle_backend(struct group_link *link, struct bench_config *config, struct ep_error *error)
{
    enum bench_backend has;

    if (group_node_backend(link, &has, error) != EP_OK)
        return error->status;
    if (config->backend != BENCH_BACKEND_AUTO && config->backend != has)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "--backend %s: this ep-server runs ranks on %s",
                            bench_backends[config->backend], bench_backends[has]);
    config->backend = has;
    return EP_OK;
}

/* What the backend does not have is left out, with a word about it. */
static void fit_backend(struct bench_config *config)
{
    if (config->backend == BENCH_BACKEND_CUDA)
        return;
    if (config->graph > 0)
        fprintf(stderr, "ep-bench: --graph: left out, the host backend has no graphs\n");
    config->graph = 0;
    if (config->ht_sms_given)
        fprintf(stderr, "ep-bench: --ht-sms: of no effect, ops of the host backend fill no multiprocessors\n");
}

static ep_status settle(struct group_link *link, struct bench_config *config, bool own,
                        struct group_needs *needs, struct ep_error *error)
{
    struct routing *routing = NULL;
    ep_status status = own ? settle_backend(link, config, error) : group_adopt(link, config, error);

    fit_backend(config);
    group_needs_of(config, needs);
    fill_defaults(config);
    if (status == EP_OK)
        status = check_ranks(config, error);
    if (status == EP_OK)
        status = open_routing(config, &routing, error);
    if (status == EP_OK && own)
        status = settle_arena(config, routing, needs, error);
    if (status == EP_OK && config->record[0])
        status = record(config, routing, error);
    routing_close(routing);
    return status;
}

static ep_status run_in_group(struct group_link *link, struct sweep *sweep, struct ep_error *error)
{
    struct bench_config *config = &sweep->config;
    bool own = config->group[0] == '\0';
    struct group_needs needs;
    ep_status status;

    if (own)
        snprintf(config->group, sizeof config->group, "bench-%d-%llx", (int)getpid(),
                 (unsigned long long)(ep_clock_wall_us() & 0xffffffffffull));
    status = settle(link, config, own, &needs, error);
    if (status == EP_OK && own)
        status = group_create(link, config, &needs, error);
    if (status != EP_OK)
        return status;
    status = group_find_servers(link, config, error);
    if (status == EP_OK)
        status = config->soak_s || config->soak_ops ? soak_run(sweep, link, error) : sweep_run(sweep, error);
    if (own) {
        struct ep_error left = EP_ERROR_INIT;

        if (group_delete(link, config->group, &left) != EP_OK)
            fprintf(stderr, "ep-bench: group %s is left behind: %s\n", config->group, left.text);
    }
    return status;
}

ep_status run_sweep(struct sweep *sweep, struct ep_error *error)
{
    struct group_link *link;
    ep_status status = group_link_open(sweep->config.server[0], &link, error);

    if (status != EP_OK)
        return status;
    status = run_in_group(link, sweep, error);
    group_link_close(link);
    return status;
}
