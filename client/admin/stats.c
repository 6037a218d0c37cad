/* The stats command: counters as they are. */
#include "admin.h"

#include <inttypes.h>
#include <stdlib.h>

#include "loads.h"
#include "output.h"

bool ep_stats_used(const Ep__V1__OpStats *op)
{
    return op->count || op->errors || op->timeouts;
}

static void add_op(struct ep_table *table, const Ep__V1__RankStats *rank, const Ep__V1__OpStats *op)
{
    ep_table_add(table, (const char *[]){ rank->group, ep_text_u64(rank->epoch).s, ep_text_u64(rank->rank).s,
                                          ep_text_enum(&ep__v1__rank_state__descriptor, (int)rank->state),
                                          op->op, ep_text_u64(op->count).s, ep_text_u64(op->errors).s,
                                          ep_text_u64(op->timeouts).s, ep_text_u64(op->tokens).s,
                                          ep_text_size(op->wire_bytes).s, ep_text_micros(op->busy_us).s,
                                          ep_text_micros(op->wait_us).s, ep_text_micros(op->max_wait_us).s,
                                          ep_text_u64(rank->dropped_routes).s });
}

/* Kinds of op that a rank never made have no row; a rank without any has one. */
static void print_ops(const Ep__V1__Stats *stats)
{
    static const struct ep_column columns[] = {
        { "GROUP", 0 },
        { "EPOCH", EP_COLUMN_RIGHT },
        { "RANK", EP_COLUMN_RIGHT },
        { "STATE", EP_COLUMN_STATE },
        { "OP", 0 },
        { "COUNT", EP_COLUMN_RIGHT },
        { "ERRORS", EP_COLUMN_RIGHT },
        { "TIMEOUTS", EP_COLUMN_RIGHT },
        { "TOKENS", EP_COLUMN_RIGHT },
        { "WIRE", EP_COLUMN_RIGHT },
        { "BUSY", EP_COLUMN_RIGHT },
        { "WAITING", EP_COLUMN_RIGHT },
        { "MAX WAIT", EP_COLUMN_RIGHT },
        { "DROPPED", EP_COLUMN_RIGHT },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < stats->n_ranks; i++) {
        static const Ep__V1__OpStats none = EP__V1__OP_STATS__INIT;
        const Ep__V1__RankStats *rank = stats->ranks[i];
        size_t shown = 0;

        for (size_t j = 0; j < rank->n_ops; j++) {
            if (ep_stats_used(rank->ops[j])) {
                add_op(table, rank, rank->ops[j]);
                shown++;
            }
        }
        if (shown == 0)
            add_op(table, rank, &none);
    }
    if (stats->n_ranks)
        putchar('\n');
    ep_table_print(table, stdout);
}

static void print_peers(const Ep__V1__Stats *stats)
{
    static const struct ep_column columns[] = {
        { "GROUP", 0 },
        { "RANK", EP_COLUMN_RIGHT },
        { "WAITED FOR", EP_COLUMN_RIGHT },
        { "TOTAL", EP_COLUMN_RIGHT },
        { "MAX", EP_COLUMN_RIGHT },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < stats->n_ranks; i++) {
        const Ep__V1__RankStats *rank = stats->ranks[i];

        for (size_t j = 0; j < rank->n_peers; j++)
            ep_table_add(table, (const char *[]){ rank->group, ep_text_u64(rank->rank).s,
                                                  ep_text_u64(rank->peers[j]->rank).s,
                                                  ep_text_micros(rank->peers[j]->wait_us).s,
                                                  ep_text_micros(rank->peers[j]->max_wait_us).s });
    }
    if (ep_table_rows(table) > 0)
        putchar('\n');
    ep_table_print(table, stdout);
}

static void print_stats(const Ep__V1__Stats *stats, bool with_peers)
{
    uint64_t bad = 0;

    for (size_t i = 0; i < stats->n_ranks; i++)
        bad += stats->ranks[i]->bad_descriptors;
    ep_output_pair(stdout, "node", "%s", stats->node);
    ep_output_pair(stdout, "time", "%s", ep_text_time(stats->time_us).s);
    ep_output_pair(stdout, "attaches", "%" PRIu64 ", %" PRIu64 " refused", stats->attaches,
                   stats->attach_refused);
    ep_output_pair(stdout, "requests", "%" PRIu64, stats->rpc_requests);
    if (bad)
        ep_output_pair(stdout, "bad ops", "%" PRIu64 " descriptors refused", bad);
    print_ops(stats);
    if (with_peers)
        print_peers(stats);
}

static void print_experts(const struct ep_admin *admin, const Ep__V1__Stats *stats)
{
    static const struct ep_column columns[] = {
        { "EXPERT", EP_COLUMN_RIGHT }, { "ROWS", EP_COLUMN_RIGHT }, { "OF THE MEAN", EP_COLUMN_RIGHT },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);
    struct ep_text part;
    uint64_t *rows, sum = 0;
    size_t n;

    rows = ep_loads_sum(stats, &n);
    for (size_t e = 0; e < n; e++)
        sum += rows[e];
    for (size_t e = 0; e < n; e++) {
        snprintf(part.s, sizeof part.s, "%.2f", sum ? (double)rows[e] * (double)n / (double)sum : 0.0);
        ep_table_add(table, (const char *[]){ ep_text_u64(e).s, ep_text_u64(rows[e]).s, part.s });
    }
    if (!n)
        ep_admin_note(admin, "no node tells of a rank of that group");
    for (size_t i = 0; i < stats->n_missing; i++)
        ep_admin_note(admin, "without the rows of node %s", stats->missing[i]);
    ep_table_print(table, stdout);
    free(rows);
}

int ep_stats_show(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    Ep__V1__GetStatsRequest request = EP__V1__GET_STATS_REQUEST__INIT;
    struct ep_error error;
    ProtobufCMessage *reply;
    int code = 0;

    if (invocation->argument)
        request.group = (char *)(uintptr_t)invocation->argument;
    request.experts = ep_invocation_given(invocation, "experts");
    if (ep_admin_call(admin, "GetStats", &request.base, 0, &reply, &error) != EP_OK)
        return ep_admin_fail(admin, &error);
    if (*((Ep__V1__Stats *)reply)->behind)
        ep_admin_note(admin, "figures may be old: %s", ((Ep__V1__Stats *)reply)->behind);
    if (admin->format == EP_FORMAT_TABLE && request.experts)
        print_experts(admin, (Ep__V1__Stats *)reply);
    else if (admin->format == EP_FORMAT_TABLE)
        print_stats((Ep__V1__Stats *)reply, ep_invocation_given(invocation, "peers"));
    else
        code = ep_output_message(admin, reply);
    ep_admin_free(reply);
    return code;
}
