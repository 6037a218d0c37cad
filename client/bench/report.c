#include "report.h"

#include <stdio.h>

const char report_definitions[] =
    "Times are us of the slowest rank in each iteration; percentiles are over iterations.\n"
    "  dispatch, combine  host: from the call to the end of the op, one op at a time.  cuda: from the end of "
    "the op before to\n"
    "                     its own, by marks in the stream, while ops follow each other\n"
    "  pair               both, one after the other\n"
    "  period             of a pair when pairs follow each other without waiting; the first 16 are not "
    "counted\n"
    "  graph              of a pair in a CUDA graph of --graph pairs: at each rank the median of the "
    "launches\n"
    "  service            what the client saw of a pair minus the executor's own time (p50); cuda: of pairs "
    "that are waited for\n"
    "  backward           of the pass: the dispatch of gradients with the routing of a forward one, and the combine "
    "of what\n"
    "                     experts made of them, with the gradients of the weights\n"
    "  sms                cuda: multiprocessors that an HT op fills at most, at the rank that has the most\n"
    "  nodes              on which the ranks are: 2x4, 2 nodes with 4 each; 5+3, as many on each\n"
    "  wire GB/s          bytes that a rank sends to other ranks in a pair, each (token, rank) once, per "
    "period\n"
    "  logical GB/s       T x k rows out and T x k rows back per period (how most READMEs count)\n"
    "  buffer             memory of a rank's window without the caller's arena\n"
    "  bound              largest error of a combined element, as a share of the derived bound\n";

/* ---- failures, for people, on stderr ---------------------------------------- */

static void print_failures(const struct sweep *sweep)
{
    if (sweep->soak.error.status != EP_OK)
        fprintf(stderr, "ep-bench: soak: %s\n", sweep->soak.error.text);
    for (uint32_t i = 0; i < sweep->n_results; i++) {
        const struct case_result *r = &sweep->results[i];
        char name[80];

        bench_case_text(&r->of, name, sizeof name);
        if (r->error.status != EP_OK)
            fprintf(stderr, "ep-bench: case %u (%s): %s\n", i, name, r->error.text);
        if (r->mismatches)
            fprintf(stderr, "ep-bench: case %u (%s): %llu mismatches; %s\n", i, name,
                    (unsigned long long)r->mismatches, r->first);
    }
}

/* ---- CSV ----------------------------------------------------------------------------------- */

static void csv_line(const struct sweep *sweep, const struct case_result *r)
{
    const char *verified = !sweep->config.verify ? "unchecked" : r->verified ? "yes" : "no";
    char nodes[BENCH_NODES_TEXT], sms[16] = "";

    bench_nodes_text(&sweep->config, nodes);
    if (r->sms > 0)
        snprintf(sms, sizeof sms, "%u", r->sms);
    printf("%s,%s,%s,%s,%u,%s,%llu,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.4f,%.4f,%llu,%.9g,%."
           "6f,%.3f,%s,%s,%s,%s,%s,%s\n",
           bench_mode_name(r->of.mode), bench_layout_name(r->of.layout), bench_dtypes[r->of.dtype].name,
           bench_scaled(&r->of) ? bench_scales_name(r->of.scales) : "", r->of.tokens, verified,
           (unsigned long long)r->mismatches, r->dispatch.p50, r->dispatch.p90, r->dispatch.p99, r->combine.p50,
           r->combine.p90, r->combine.p99, r->pair.p50, r->pair.p90, r->pair.p99, r->pair_us, r->service_us, r->wire_gbps,
           r->logical_gbps, (unsigned long long)r->buffer_bytes, r->max_error, r->max_bound_ratio, r->graph_us,
           bench_backends[sweep->config.backend], bench_executor_name(sweep->executor),
           bench_pass_name(r->of.pass), sweep->config.bias ? "yes" : "no", sms, nodes);
}

/* What is of the soak as a whole stands in each line. */
static void csv_soak_line(const struct soak_result *soak, ep_mode mode, ep_layout layout)
{
    const struct bench_soak *totals = &soak->totals;

    printf("%s,%s,%llu,%llu,%.3f,%.3f,%llu,%llu,%.3f,%.3f,%u,%llu\n", bench_mode_name(mode), bench_layout_name(layout),
           (unsigned long long)totals->dispatches[mode][layout], (unsigned long long)totals->combines[mode][layout],
           soak->seconds, soak_ops_per_second(soak), (unsigned long long)totals->dropped,
           (unsigned long long)totals->masked, (double)totals->waited_ns / 1e9, (double)totals->longest_ns / 1e3,
           soak->kills, (unsigned long long)soak->wrong);
}

static ep_status report_soak_csv(const struct soak_result *soak)
{
    puts("mode,layout,dispatches,combines,seconds,ops_per_second,dropped,masked_dispatches,waited_s,longest_op_us,"
         "kills,wrong");
    for (ep_mode mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++)
        for (ep_layout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++)
            if (soak->totals.dispatches[mode][layout])
                csv_soak_line(soak, mode, layout);
    return EP_OK;
}

static ep_status report_csv(const struct sweep *sweep)
{
    if (sweep->soak.run)
        return report_soak_csv(&sweep->soak);
    puts("mode,layout,dtype,scales,tokens,verified,mismatches,dispatch_p50_us,dispatch_p90_us,dispatch_p99_us,"
         "combine_p50_us,combine_p90_us,combine_p99_us,p50_us,p90_us,p99_us,pair_us,service_us,wire_gbps,"
         "logical_gbps,buffer_bytes,max_error,max_bound_ratio,graph_pair_us,backend,executor,pass,bias,sms,"
         "nodes");
    for (uint32_t i = 0; i < sweep->n_results; i++)
        csv_line(sweep, &sweep->results[i]);
    return EP_OK;
}

ep_status report(const struct sweep *sweep, const struct figures *figures, struct ep_error *error)
{
    ep_status status = EP_OK;

    print_failures(sweep);
    switch (sweep->config.output) {
    case BENCH_TABLE: status = report_table(sweep, figures, error); break;
    case BENCH_JSON: status = report_json(sweep, figures, error); break;
    case BENCH_CSV: status = report_csv(sweep); break;
    }
    return status;
}
