/* Counters: of the ranks here, and of a group's on all nodes, where every member is asked for those of its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep/v1/node.pb-c.h"

#define ASK_MS 3000u

struct gather {
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it has ended, and with it the API may have gone */
    bool experts, everywhere;
    Ep__V1__Stats stats;      /* what has come so far */
    char *behind;             /* why figures may be old; NULL: none are */
    uint32_t waiting;
    char group[];
};

struct asked {
    struct gather *gather;
    char node[]; /* by name */
};

/* ---- what comes ------------------------------------------------------------------------------- */

static void *grown(void *list, size_t n, size_t size)
{
    void *more = realloc(list, (n + 1) * size);

    if (!more)
        abort(); /* as in arena.c */
    return more;
}

static void add_missing(Ep__V1__Stats *stats, const char *node, const char *why)
{
    char *text;

    if (asprintf(&text, "%s: %s", node, why) < 0)
        abort();
    stats->missing = grown(stats->missing, stats->n_missing, sizeof *stats->missing);
    stats->missing[stats->n_missing++] = text;
}

static void add_rank(Ep__V1__Stats *stats, const Ep__V1__RankStats *rank)
{
    stats->ranks = grown(stats->ranks, stats->n_ranks, sizeof *stats->ranks);
    stats->ranks[stats->n_ranks++] = ep_message_copy(&rank->base);
}

/* What is said first will do. */
static void add_behind(struct gather *gather, const char *node, const char *why)
{
    if (*why && !gather->behind && asprintf(&gather->behind, "node %s: %s", node, why) < 0)
        abort();
}

static void finish(struct gather *gather)
{
    Ep__V1__Stats *stats = &gather->stats;

    if (gather->behind)
        stats->behind = gather->behind;
    if (gather->call) {
        ep_rpc_call_set_user(gather->call, NULL);
        ep_rpc_reply(gather->call, &stats->base);
    }
    for (size_t i = 0; i < stats->n_missing; i++)
        free(stats->missing[i]);
    free(stats->missing);
    ep_groups_stats_clear(stats);
    free(gather->behind);
    free(gather);
}

static void on_stats(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    const Ep__V1__Stats *theirs = (const Ep__V1__Stats *)reply;
    struct asked *asked = user;
    struct gather *gather = asked->gather;

    if (error->status)
        add_missing(&gather->stats, asked->node, error->text);
    for (size_t i = 0; !error->status && i < theirs->n_ranks; i++)
        add_rank(&gather->stats, theirs->ranks[i]);
    if (!error->status)
        add_behind(gather, asked->node, theirs->behind);
    free(asked);
    if (!--gather->waiting)
        finish(gather);
}

/* ---- who is asked --------------------------------------------------------------------------------- */

static void ask(struct gather *gather, const char *node)
{
    Ep__V1__GetStatsRequest request = EP__V1__GET_STATS_REQUEST__INIT;
    const size_t n = strlen(node) + 1;
    struct asked *asked = grown(NULL, sizeof *asked + n, 1);

    asked->gather = gather;
    memcpy(asked->node, node, n);
    request.group = gather->group;
    request.experts = gather->experts;
    gather->waiting++;
    ep_cluster_call(gather->api->options.cluster, node, &ep__v1__node__descriptor, "GetStats", &request.base, ASK_MS,
                    on_stats, asked);
}

/* Ranks of a node follow each other, but where an operator has placed them otherwise. */
static bool is_new(const Ep__V1__GroupStatus *status, size_t rank)
{
    for (size_t i = rank; i-- > 0;)
        if (!strcmp(status->ranks[i]->node, status->ranks[rank]->node))
            return false;
    return true;
}

static void ask_others(struct gather *gather)
{
    const struct ep_api_options *api = &gather->api->options;
    const Ep__V1__Group *group = ep_groups_get(api->groups, gather->group, NULL);

    for (size_t i = 0; group && i < group->status->n_ranks; i++)
        if (strcmp(group->status->ranks[i]->node, ep_node_name(api->node)) != 0 && is_new(group->status, i))
            ask(gather, group->status->ranks[i]->node);
}

/* Its own ranks have counted, or do not answer. */
static void on_own(const struct ep_error *error, void *user)
{
    struct gather *gather = user;

    if (!gather->call) {
        free(gather);
        return;
    }
    api_stats_fill(gather->api, gather->group, gather->experts, &gather->stats);
    add_behind(gather, gather->stats.node, error->text);
    if (gather->everywhere)
        ask_others(gather);
    if (!--gather->waiting)
        finish(gather);
}

void api_gather_stats(struct ep_api *api, struct ep_rpc_call *call, const struct api_gather *what)
{
    const size_t n = strlen(what->group) + 1;
    struct gather *gather = grown(NULL, sizeof *gather + n, 1);

    *gather = (struct gather){ .api = api, .call = call, .experts = what->experts, .everywhere = what->everywhere,
                               .waiting = 1 };
    memcpy(gather->group, what->group, n);
    ep_rpc_call_set_user(call, gather);
    ep_groups_before_stats(api->options.groups, gather->group, api_read_ms(call), on_own, gather);
}

void api_gather_closed(struct ep_rpc_call *call, void *user)
{
    struct gather *gather = ep_rpc_call_user(call);

    (void)user;
    if (gather)
        gather->call = NULL;
}
