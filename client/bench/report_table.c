#include <libsmartcols/libsmartcols.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "report.h"

/* ---- cells ----------------------------------------------------------------------------------- */

struct column {
    const char *name;
    bool text; /* else a number: to the right */
};

static struct libscols_table *new_table(const struct column *columns, size_t n)
{
    struct libscols_table *table = scols_new_table();

    for (size_t i = 0; table && i < n; i++)
        if (!scols_table_new_column(table, columns[i].name, 0, columns[i].text ? 0 : SCOLS_FL_RIGHT)) {
            scols_unref_table(table);
            return NULL;
        }
    return table;
}

__attribute__((format(printf, 3, 4))) static void put(struct libscols_line *line, size_t *column,
                                                      const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    scols_line_set_data(line, (*column)++, text);
}

static void put_quantiles(struct libscols_line *line, size_t *column, const struct bench_quantiles *q,
                          bool measured)
{
    if (measured)
        put(line, column, "%.1f/%.1f/%.1f", q->p50, q->p90, q->p99);
    else
        put(line, column, "-");
}

/* ---- cases ------------------------------------------------------------------------------------ */

static const struct column case_columns[] = {
    { "MODE", true },
    { "LAYOUT", true },
    { "DTYPE", true },
    { "PASS", true },
    { "T", false },
    { "SMS", false },
    { "VERIFIED", true },
    { "DISPATCH p50/p90/p99", false },
    { "COMBINE p50/p90/p99", false },
    { "PAIR p50/p90/p99", false },
    { "PERIOD", false },
    { "GRAPH", false },
    { "SERVICE", false },
    { "WIRE GB/s", false },
    { "LOGICAL GB/s", false },
    { "BUFFER MiB", false },
    { "BOUND", false },
};

static const char *verdict_word(const struct sweep *sweep, const struct case_result *r)
{
    if (r->error.status != EP_OK)
        return ep_status_name(r->error.status);
    return !sweep->config.verify ? "-" : r->verified ? "yes" : "NO";
}

static void case_line(struct libscols_table *table, const struct sweep *sweep, const struct case_result *r)
{
    struct libscols_line *line = scols_table_new_line(table, NULL);
    size_t column = 0;

    if (!line)
        return;
    put(line, &column, "%s", bench_mode_name(r->of.mode));
    put(line, &column, "%s", bench_layout_name(r->of.layout));
    put(line, &column, "%s", bench_case_dtype(&r->of));
    put(line, &column, "%s", bench_pass_name(r->of.pass));
    put(line, &column, "%u", r->of.tokens);
    if (r->sms > 0)
        put(line, &column, "%u", r->sms);
    else
        put(line, &column, "-");
    put(line, &column, "%s", verdict_word(sweep, r));
    put_quantiles(line, &column, &r->dispatch, r->measured);
    put_quantiles(line, &column, &r->combine, r->measured);
    put_quantiles(line, &column, &r->pair, r->measured);
    put(line, &column, "%.1f", r->pair_us);
    if (r->graph_us > 0)
        put(line, &column, "%.1f", r->graph_us);
    else
        put(line, &column, "-");
    put(line, &column, "%.1f", r->service_us);
    put(line, &column, "%.3f", r->wire_gbps);
    put(line, &column, "%.3f", r->logical_gbps);
    put(line, &column, "%.1f", (double)r->buffer_bytes / (1 << 20));
    put(line, &column, "%.2f", r->max_bound_ratio);
}

/* ---- a soak -------------------------------------------------------------------------------------- */

static const struct column soak_columns[] = {
    { "MODE", true }, { "LAYOUT", true }, { "DISPATCHES", false }, { "COMBINES", false }
};

static void soak_line(struct libscols_table *table, const struct bench_soak *totals, ep_mode mode, ep_layout layout)
{
    struct libscols_line *line = scols_table_new_line(table, NULL);
    size_t column = 0;

    if (!line)
        return;
    put(line, &column, "%s", bench_mode_name(mode));
    put(line, &column, "%s", bench_layout_name(layout));
    put(line, &column, "%llu", (unsigned long long)totals->dispatches[mode][layout]);
    put(line, &column, "%llu", (unsigned long long)totals->combines[mode][layout]);
}

static ep_status print_soak_table(const struct bench_soak *totals, struct ep_error *error)
{
    struct libscols_table *table = new_table(soak_columns, sizeof soak_columns / sizeof *soak_columns);

    if (!table)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a table");
    for (ep_mode mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++)
        for (ep_layout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++)
            if (totals->dispatches[mode][layout])
                soak_line(table, totals, mode, layout);
    scols_print_table(table);
    scols_unref_table(table);
    return EP_OK;
}

static void print_turns(const struct soak_result *soak)
{
    printf("follow: %u turns, %u workers added, %u removed; results paused %.2f ms (p50), %.2f ms (p99), %.2f ms at most, "
           "beside %.2f ms from one to the next otherwise\n",
           soak->turns, soak->added, soak->removed, soak->pause_p50_us / 1e3, soak->pause_p99_us / 1e3,
           soak->pause_max_us / 1e3, soak->step_us / 1e3);
    for (uint32_t i = 0; i < soak->turns; i++)
        printf("follow: epoch %llu from op %llu on, after %.2f ms\n", (unsigned long long)soak->turn[i].epoch,
               (unsigned long long)soak->turn[i].step, soak->turn[i].pause_us / 1e3);
}

static ep_status print_soak(const struct soak_result *soak, bool follow, struct ep_error *error)
{
    const struct bench_soak *totals = &soak->totals;

    if (print_soak_table(totals, error) != EP_OK)
        return error->status;
    printf("\nsoak: %llu ops of all ranks in %.1f s (%.0f/s), waited %.1f s for each other, the longest took %.1f ms\n"
           "soak: %u kills; %llu dispatches without a rank, %llu choices reached nobody\n"
           "soak: %llu wrong\n",
           (unsigned long long)soak_ops(totals), soak->seconds, soak_ops_per_second(soak),
           (double)totals->waited_ns / 1e9, (double)totals->longest_ns / 1e6, soak->kills,
           (unsigned long long)totals->masked, (unsigned long long)totals->dropped, (unsigned long long)soak->wrong);
    if (follow)
        print_turns(soak);
    return EP_OK;
}

static void print_kill(const struct kill_result *kill)
{
    printf(
        "\nkill: rank %u in case %u; %u survivors finished %llu of %llu ops, %llu failed, longest %.1f ms, "
        "results without it %s\n",
        kill->rank, kill->case_index, kill->survivors, (unsigned long long)kill->ops_finished,
        (unsigned long long)kill->ops_expected, (unsigned long long)kill->ops_failed,
        kill->longest_op_us / 1e3, kill->masked_verified ? "verified" : "not verified");
    if (kill->done)
        printf("kill: a new worker attached in %.2f ms (joining alone %.2f ms) after waiting %.2f ms for the "
               "rank\n",
               kill->attach_us / 1e3, kill->join_us / 1e3, kill->claim_wait_us / 1e3);
    if (kill->done && kill->context_us > 0)
        printf("kill: before that it made its GPU's context, in %.1f ms\n", kill->context_us / 1e3);
}

/* ---- figures ------------------------------------------------------------------------------------ */

static const struct column figure_columns[] = {
    { "REFERENCE", true }, { "VALUE", false }, { "UNIT", true },
    { "BOUND", true },     { "HOLDS", true },  { "MEANING", true }
};

static void figure_line(struct libscols_table *table, const struct figure *figure)
{
    struct libscols_line *line = scols_table_new_line(table, NULL);
    size_t column = 0;

    if (!line)
        return;
    put(line, &column, "%s", figure->name);
    put(line, &column, "%.2f", figure->value);
    put(line, &column, "%s", figure->unit);
    if (figure->bound > 0) {
        put(line, &column, "%s %.4g", figure->at_least ? ">=" : "<", figure->bound);
        put(line, &column, "%s", figure_holds(figure) ? "yes" : "NO");
    } else {
        column += 2;
    }
    put(line, &column, "%s", figure->meaning);
}

static ep_status print_figures(const struct figures *figures, struct ep_error *error)
{
    struct libscols_table *table = new_table(figure_columns, sizeof figure_columns / sizeof *figure_columns);

    if (!table)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a table");
    for (uint32_t i = 0; i < figures->n; i++)
        figure_line(table, &figures->figure[i]);
    putchar('\n');
    scols_print_table(table);
    scols_unref_table(table);
    return EP_OK;
}

static void print_setting(const struct sweep *sweep)
{
    const struct bench_config *config = &sweep->config;
    char nodes[BENCH_NODES_TEXT];

    bench_nodes_text(config, nodes);
    printf("group %s on %s, nodes %s, executor %s%s: %u ranks, %u experts, hidden %u, top-k %u, routing %s%s, seed %llu, "
           "%u iterations\n\n",
           config->group, bench_backends[config->backend], nodes, bench_executor_name(sweep->executor),
           config->own_memory ? ", memory own" : "", config->ranks, config->experts, config->hidden,
           config->top_k, config->routing_text, config->bias ? ", with bias" : "",
           (unsigned long long)config->seed, config->iters);
}

ep_status report_table(const struct sweep *sweep, const struct figures *figures, struct ep_error *error)
{
    struct libscols_table *table;

    print_setting(sweep);
    if (sweep->soak.run)
        return print_soak(&sweep->soak, sweep->config.follow, error);
    table = new_table(case_columns, sizeof case_columns / sizeof *case_columns);
    if (!table)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a table");
    for (uint32_t i = 0; i < sweep->n_results; i++)
        case_line(table, sweep, &sweep->results[i]);
    scols_print_table(table);
    scols_unref_table(table);
    if (sweep->config.kill_rank >= 0)
        print_kill(&sweep->kill);
    printf("\n%s", report_definitions);
    return figures ? print_figures(figures, error) : EP_OK;
}
