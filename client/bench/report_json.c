#include <jansson.h>
#include <math.h>

#include "report.h"

/* JSON has no infinity, which a wild result can be off by. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *case_object(const struct bench_config *config, const struct case_result *r)
{
    json_t *object = json_pack("{s:s, s:s, s:s, s:I, s:b, s:I}", "mode", bench_mode_name(r->of.mode),
                               "layout", bench_layout_name(r->of.layout), "dtype",
                               bench_dtypes[r->of.dtype].name, "tokens", (json_int_t)r->of.tokens, "verified",
                               config->verify && r->verified, "mismatches", (json_int_t)r->mismatches);
    const struct {
        const char *name;
        double value;
    } numbers[] = {
        { "p50_us", r->pair.p50 },
        { "p90_us", r->pair.p90 },
        { "p99_us", r->pair.p99 },
        { "pair_us", r->pair_us },
        { "dispatch_p50_us", r->dispatch.p50 },
        { "dispatch_p90_us", r->dispatch.p90 },
        { "dispatch_p99_us", r->dispatch.p99 },
        { "combine_p50_us", r->combine.p50 },
        { "combine_p90_us", r->combine.p90 },
        { "combine_p99_us", r->combine.p99 },
        { "service_us", r->service_us },
        { "wire_gbps", r->wire_gbps },
        { "logical_gbps", r->logical_gbps },
        { "max_error", r->max_error },
        { "max_bound_ratio", r->max_bound_ratio },
    };

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        json_object_set_new(object, numbers[i].name, real(numbers[i].value));
    json_object_set_new(object, "scales",
                        bench_scaled(&r->of) ? json_string(bench_scales_name(r->of.scales)) : json_null());
    json_object_set_new(object, "pass", json_string(bench_pass_name(r->of.pass)));
    json_object_set_new(object, "sms", r->sms > 0 ? json_integer((json_int_t)r->sms) : json_null());
    json_object_set_new(object, "graph_pair_us", r->graph_us > 0 ? json_real(r->graph_us) : json_null());
    json_object_set_new(object, "buffer_bytes", json_integer((json_int_t)r->buffer_bytes));
    json_object_set_new(object, "hash", json_sprintf("%016llx", (unsigned long long)r->hash));
    if (r->mismatches)
        json_object_set_new(object, "first_mismatch", json_string(r->first));
    if (r->error.status != EP_OK) {
        json_object_set_new(object, "status", json_string(ep_status_name(r->error.status)));
        json_object_set_new(object, "error", json_string(r->error.text));
    }
    return object;
}

static json_t *config_object(const struct bench_config *config)
{
    json_t *object = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:b, s:I}", "group",
                               config->group, "ranks", (json_int_t)config->ranks, "experts",
                               (json_int_t)config->experts, "hidden", (json_int_t)config->hidden, "top_k",
                               (json_int_t)config->top_k, "alignment", (json_int_t)config->alignment,
                               "routing", config->routing_text, "iters", (json_int_t)config->iters, "warmup",
                               (json_int_t)config->warmup, "seed", (json_int_t)config->seed, "verify",
                               config->verify, "timeout_ms", (json_int_t)config->timeout_ms);

    json_object_set_new(object, "memory", json_string(config->own_memory ? "own" : "arena"));
    json_object_set_new(object, "drop", json_real(config->drop));
    json_object_set_new(object, "bias", json_boolean(config->bias));
    json_object_set_new(object, "graph", json_integer((json_int_t)config->graph));
    json_object_set_new(object, "spawn", json_boolean(config->spawn));
    json_object_set_new(object, "zero_rank",
                        config->zero_rank >= 0 ? json_integer(config->zero_rank) : json_null());
    return object;
}

static json_t *kill_object(const struct kill_result *kill)
{
    return json_pack("{s:I, s:I, s:b, s:I, s:I, s:I, s:I, s:f, s:b, s:f, s:f, s:f, s:f}", "rank",
                     (json_int_t)kill->rank, "case", (json_int_t)kill->case_index, "done", kill->done,
                     "survivors", (json_int_t)kill->survivors, "ops_expected", (json_int_t)kill->ops_expected,
                     "ops_finished", (json_int_t)kill->ops_finished, "ops_failed",
                     (json_int_t)kill->ops_failed, "longest_op_us", kill->longest_op_us, "masked_verified",
                     kill->masked_verified, "claim_wait_us", kill->claim_wait_us, "attach_us",
                     kill->attach_us, "join_us", kill->join_us, "context_us", kill->context_us);
}

static json_t *layouts_array(const struct bench_soak *totals)
{
    json_t *list = json_array();

    for (ep_mode mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++)
        for (ep_layout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++)
            if (totals->dispatches[mode][layout])
                json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I}", "mode", bench_mode_name(mode), "layout",
                                                      bench_layout_name(layout), "dispatches",
                                                      (json_int_t)totals->dispatches[mode][layout], "combines",
                                                      (json_int_t)totals->combines[mode][layout]));
    return list;
}

static json_t *turns_object(const struct soak_result *soak)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < soak->turns; i++)
        json_array_append_new(list, json_pack("{s:I, s:I, s:f}", "epoch", (json_int_t)soak->turn[i].epoch, "step",
                                              (json_int_t)soak->turn[i].step, "pause_us", soak->turn[i].pause_us));
    return json_pack("{s:I, s:o, s:f, s:f, s:f, s:f, s:I, s:I}", "count", (json_int_t)soak->turns, "each", list,
                     "pause_p50_us", soak->pause_p50_us, "pause_p99_us", soak->pause_p99_us, "pause_max_us",
                     soak->pause_max_us, "step_us", soak->step_us, "workers_added", (json_int_t)soak->added,
                     "workers_removed", (json_int_t)soak->removed);
}

static json_t *soak_object(const struct soak_result *soak)
{
    const struct bench_soak *totals = &soak->totals;
    json_t *object = json_pack("{s:f, s:I, s:I, s:f, s:o, s:I, s:I, s:f, s:f, s:I, s:f, s:I}", "seconds",
                               soak->seconds, "steps", (json_int_t)soak->steps, "ops", (json_int_t)soak_ops(totals),
                               "ops_per_second", soak_ops_per_second(soak), "layouts", layouts_array(totals), "dropped",
                               (json_int_t)totals->dropped, "masked_dispatches", (json_int_t)totals->masked, "waited_s",
                               (double)totals->waited_ns / 1e9, "longest_op_us", (double)totals->longest_ns / 1e3,
                               "kills", (json_int_t)soak->kills, "longest_claim_us", soak->longest_claim_us, "wrong",
                               (json_int_t)soak->wrong);

    if (soak->error.status != EP_OK) {
        json_object_set_new(object, "status", json_string(ep_status_name(soak->error.status)));
        json_object_set_new(object, "error", json_string(soak->error.text));
    }
    return object;
}

static json_t *figures_object(const struct figures *figures)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < figures->n; i++) {
        const struct figure *figure = &figures->figure[i];
        json_t *object = json_pack("{s:s, s:f, s:s, s:s}", "name", figure->name, "value", figure->value,
                                   "unit", figure->unit, "meaning", figure->meaning);

        if (figure->bound > 0) {
            json_object_set_new(object, figure->at_least ? "at_least" : "less_than",
                                json_real(figure->bound));
            json_object_set_new(object, "holds", json_boolean(figure_holds(figure)));
        }
        json_array_append_new(list, object);
    }
    return list;
}

ep_status report_json(const struct sweep *sweep, const struct figures *figures, struct ep_error *error)
{
    json_t *cases = json_array(), *root;
    char nodes[BENCH_NODES_TEXT];
    int failed;

    bench_nodes_text(&sweep->config, nodes);
    for (uint32_t i = 0; i < sweep->n_results; i++)
        json_array_append_new(cases, case_object(&sweep->config, &sweep->results[i]));
    root = json_pack("{s:b, s:o, s:f, s:f, s:f, s:o}", "ok", sweep_verdict(sweep) == EP_OK, "config",
                     config_object(&sweep->config), "attach_us", sweep->attach_us, "join_us", sweep->join_us,
                     "context_us", sweep->context_us,
                     "cases", cases);
    if (root) {
        json_object_set_new(root, "backend", json_string(bench_backends[sweep->config.backend]));
        json_object_set_new(root, "nodes", json_string(nodes));
        json_object_set_new(root, "executor", json_string(bench_executor_name(sweep->executor)));
    }
    if (root && sweep->config.kill_rank >= 0)
        json_object_set_new(root, "kill", kill_object(&sweep->kill));
    if (root && sweep->soak.run)
        json_object_set_new(root, "soak", soak_object(&sweep->soak));
    if (root && sweep->soak.run && sweep->config.follow)
        json_object_set_new(root, "turns", turns_object(&sweep->soak));
    if (root && figures)
        json_object_set_new(root, "reference", figures_object(figures));
    failed = !root || (json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0
                       && !ferror(stdout)); /* at which main() looks at exit */
    json_decref(root);
    putchar('\n');
    return failed ? ep_error_set(error, EP_NO_MEMORY, "no memory for the JSON result") : EP_OK;
}
