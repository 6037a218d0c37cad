/* Everything on /metrics. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_metrics.h"

/* Seconds are Prometheus's unit of time. */
#define US 1e-6
#define NS 1e-9

static void sample(FILE *out, const char *name, double value)
{
    ep_metrics_sample(out, name, NULL, 0, value);
}

/* ---- the node -------------------------------------------------------------------------- */

static void render_node(struct ep_api *api, FILE *out)
{
    Ep__V1__NodeInfo info;

    ep_node_info(api->options.node, &info);
    struct ep_metrics_label build[] = { { "version", info.version->version },
                                        { "commit", info.version->commit },
                                        { "node", info.name } };

    ep_metrics_family(out, "ep_build_info", "gauge", "Version of the server; always 1.");
    ep_metrics_sample(out, "ep_build_info", build, 3, 1);
    ep_metrics_family(out, "ep_node_cordoned", "gauge", "1 when the node takes no new attachments.");
    sample(out, "ep_node_cordoned", info.state != EP__V1__NODE_STATE__NODE_STATE_READY);
    ep_metrics_family(out, "ep_node_memory_budget_bytes", "gauge", "Memory that windows may use.");
    sample(out, "ep_node_memory_budget_bytes", (double)info.memory_budget_bytes);
    ep_metrics_family(out, "ep_node_memory_used_bytes", "gauge", "Memory that windows use.");
    sample(out, "ep_node_memory_used_bytes", (double)info.memory_used_bytes);
    ep_metrics_family(out, "ep_node_attachments", "gauge", "Ranks that are attached.");
    sample(out, "ep_node_attachments", ep_groups_attachments(api->options.groups));
    ep_metrics_family(out, "ep_store_healthy", "gauge", "0 when the store refuses changes.");
    sample(out, "ep_store_healthy", ep_store_health(api->options.store, NULL) == EP_OK);
    ep_node_info_clear(&info);
}

static void render_cluster(struct ep_api *api, FILE *out)
{
    const struct ep_cluster *cluster = api->options.cluster;
    size_t alive = 0;

    for (size_t i = 0; i < ep_cluster_count(cluster); i++)
        alive += ep_cluster_at(cluster, i)->alive;
    ep_metrics_family(out, "ep_cluster_nodes", "gauge", "Nodes whose server is there, as far as this one knows.");
    sample(out, "ep_cluster_nodes", (double)alive);
    ep_metrics_family(out, "ep_cluster_registered", "gauge", "0 while the others do not know of this server.");
    sample(out, "ep_cluster_registered", ep_cluster_session(cluster) != NULL);
    ep_metrics_family(out, "ep_cluster_leads", "gauge", "1 on the server that decides on changes.");
    sample(out, "ep_cluster_leads", ep_cluster_leads(cluster));
}

static void render_attach(struct ep_api *api, FILE *out)
{
    const struct ep_attach_counters *c = ep_attach_counters(api->options.attach);

    ep_metrics_family(out, "ep_attach_total", "counter", "Ranks that workers took.");
    sample(out, "ep_attach_total", (double)c->attaches);
    ep_metrics_family(out, "ep_attach_refused_total", "counter", "Claims that were refused.");
    sample(out, "ep_attach_refused_total", (double)c->refused);
    ep_metrics_family(out, "ep_attach_bad_frames_total", "counter", "Frames that made no sense.");
    sample(out, "ep_attach_bad_frames_total", (double)c->bad_frames);
    ep_metrics_family(out, "ep_attach_silent_total", "counter", "Connections dropped for saying nothing.");
    sample(out, "ep_attach_silent_total", (double)c->silent);
    ep_metrics_family(out, "ep_rpc_requests_total", "counter", "Requests of Admin, Attach and Node.");
    sample(out, "ep_rpc_requests_total", (double)api->requests);
}

/* ---- groups ------------------------------------------------------------------------------ */

/* "PHASE_READY" -> "ready" is what a person selects by. */
static const char *short_name(const ProtobufCEnumDescriptor *type, int value, size_t prefix, char *text,
                              size_t size)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    const char *name = v && strlen(v->name) > prefix ? v->name + prefix : "unknown";
    size_t i;

    for (i = 0; name[i] && i + 1 < size; i++)
        text[i] = name[i] >= 'A' && name[i] <= 'Z' ? (char)(name[i] - 'A' + 'a') : name[i];
    text[i] = '\0';
    return text;
}

static void render_phases(struct ep_api *api, FILE *out)
{
    struct ep_groups *groups = api->options.groups;
    char phase[32];

    ep_metrics_family(out, "ep_group_phase", "gauge", "1 for the phase that the group is in.");
    for (size_t i = 0; i < ep_groups_count(groups); i++) {
        const Ep__V1__Group *g = ep_groups_at(groups, i);
        struct ep_metrics_label labels[] = {
            { "group", g->name },
            { "phase", short_name(&ep__v1__phase__descriptor, (int)g->status->phase, strlen("PHASE_"), phase,
                                  sizeof phase) },
        };

        ep_metrics_sample(out, "ep_group_phase", labels, 2, 1);
    }
}

static void render_group_gauge(struct ep_api *api, FILE *out, const char *name, const char *help,
                               double (*value)(const Ep__V1__Group *group))
{
    struct ep_groups *groups = api->options.groups;

    ep_metrics_family(out, name, "gauge", help);
    for (size_t i = 0; i < ep_groups_count(groups); i++) {
        const Ep__V1__Group *g = ep_groups_at(groups, i);
        struct ep_metrics_label label = { "group", g->name };

        ep_metrics_sample(out, name, &label, 1, value(g));
    }
}

static double epoch_of(const Ep__V1__Group *g)
{
    return (double)g->status->epoch;
}

static double window_of(const Ep__V1__Group *g)
{
    return g->status->settled ? (double)g->status->settled->window_bytes : 0;
}

static void render_rank_states(struct ep_api *api, FILE *out)
{
    struct ep_groups *groups = api->options.groups;

    ep_metrics_family(out, "ep_group_ranks", "gauge", "Ranks by state.");
    for (size_t i = 0; i < ep_groups_count(groups); i++) {
        const Ep__V1__Group *g = ep_groups_at(groups, i);

        for (int state = EP__V1__RANK_STATE__RANK_STATE_EXPECTED;
             state <= EP__V1__RANK_STATE__RANK_STATE_QUARANTINED; state++) {
            char text[32];
            struct ep_metrics_label labels[] = {
                { "group", g->name },
                { "state", short_name(&ep__v1__rank_state__descriptor, state, strlen("RANK_STATE_"), text,
                                      sizeof text) },
            };
            double n = 0;

            for (size_t r = 0; r < g->status->n_ranks; r++)
                n += (int)g->status->ranks[r]->state == state;
            ep_metrics_sample(out, "ep_group_ranks", labels, 2, n);
        }
    }
}

/* ---- ranks and ops ------------------------------------------------------------------------- */

/* A copy of every rank's counters, so that all families show one moment, which with GPUs is a second old at most, if these
 * answer.  They are sums over the epochs since the server started: a counter must not go back when an epoch ends. */
struct rank_sample {
    const char *group;
    char rank[16];
    struct ep_rank_counters counters;
};

struct rank_samples {
    struct rank_sample *list;
    size_t n;
};

static void collect_group(struct ep_api *api, const char *group, struct rank_samples *samples)
{
    struct ep_rank_counters counters;

    for (uint32_t r = 0; r < ep_groups_rank_end(api->options.groups, group); r++) {
        struct rank_sample *list;

        if (!ep_groups_rank_counters(api->options.groups, group, r, &counters))
            continue; /* it is on another node */
        list = realloc(samples->list, (samples->n + 1) * sizeof *list);
        if (!list)
            return; /* the scrape shows what it has */
        samples->list = list;
        list[samples->n] = (struct rank_sample){ .group = group, .counters = counters };
        snprintf(list[samples->n++].rank, sizeof list->rank, "%" PRIu32, r);
    }
}

static void collect(struct ep_api *api, struct rank_samples *samples)
{
    struct ep_groups *groups = api->options.groups;

    *samples = (struct rank_samples){ NULL, 0 };
    for (size_t i = 0; i < ep_groups_count(groups); i++)
        collect_group(api, ep_groups_at(groups, i)->name, samples);
}

struct op_metric {
    const char *name, *type, *help;
    size_t offset; /* of a uint64_t in struct ep_op_counters */
    double unit;
};

#define OP_METRIC(name, type, field, unit, help)                                                             \
    {                                                                                                        \
        name, type, help, offsetof(struct ep_op_counters, field), unit                                       \
    }

static const struct op_metric op_metrics[] = {
    OP_METRIC("ep_op_total", "counter", count, 1, "Ops executed."),
    OP_METRIC("ep_op_errors_total", "counter", errors, 1, "Ops that ended with an error."),
    OP_METRIC("ep_op_timeouts_total", "counter", timeouts, 1, "Ops that a late rank ended."),
    OP_METRIC("ep_op_tokens_total", "counter", tokens, 1, "Tokens of this rank's ops."),
    OP_METRIC("ep_op_wire_bytes_total", "counter", wire_bytes, 1, "Bytes sent to other ranks."),
    OP_METRIC("ep_op_busy_seconds_total", "counter", busy_ns, NS, "Time in ops, waits included."),
    OP_METRIC("ep_op_wait_seconds_total", "counter", wait_ns, NS, "Time waiting for peers."),
    OP_METRIC("ep_op_wait_seconds_max", "gauge", max_wait_ns, NS, "Longest wait for peers."),
};

/* group, rank, then what the family adds; returns how many there are. */
static size_t rank_labels(const struct rank_sample *sample, struct ep_metrics_label *labels)
{
    labels[0] = (struct ep_metrics_label){ "group", sample->group };
    labels[1] = (struct ep_metrics_label){ "rank", sample->rank };
    return 2;
}

static void render_op_metric(FILE *out, const struct rank_samples *samples, const struct op_metric *m)
{
    struct ep_metrics_label labels[3];

    ep_metrics_family(out, m->name, m->type, m->help);
    for (size_t s = 0; s < samples->n; s++)
        for (int op = 0; op < EP_OP_CLASSES; op++) {
            size_t n = rank_labels(&samples->list[s], labels);
            uint64_t value;

            memcpy(&value, (const char *)&samples->list[s].counters.op[op] + m->offset, sizeof value);
            labels[n++] = (struct ep_metrics_label){ "op", ep_op_class_name((enum ep_op_class)op) };
            ep_metrics_sample(out, m->name, labels, n, (double)value * m->unit);
        }
}

/* Kernels add up times and sort them into no buckets: there is no histogram of their ops. */
static bool has_histogram(const struct ep_op_counters *op)
{
    uint64_t sorted = 0;

    for (size_t i = 0; i < sizeof op->buckets / sizeof *op->buckets; i++)
        sorted += op->buckets[i];
    return sorted > 0 || op->count == 0;
}

static void render_histogram(FILE *out, const struct rank_sample *sample, enum ep_op_class class)
{
    const struct ep_op_counters *op = &sample->counters.op[class];
    const size_t buckets = sizeof op->buckets / sizeof *op->buckets;
    struct ep_metrics_label labels[4];
    size_t n = rank_labels(sample, labels);
    double seen = 0;

    labels[n++] = (struct ep_metrics_label){ "op", ep_op_class_name(class) };
    for (size_t i = 0; i < buckets; i++) {
        char bound[32];

        seen += (double)op->buckets[i];
        snprintf(bound, sizeof bound, "%g", (double)(1ull << i) * US);
        labels[n] = (struct ep_metrics_label){ "le", i + 1 == buckets ? "+Inf" : bound };
        ep_metrics_sample(out, "ep_op_seconds_bucket", labels, n + 1, seen);
    }
    ep_metrics_sample(out, "ep_op_seconds_sum", labels, n, (double)op->busy_ns * NS);
    ep_metrics_sample(out, "ep_op_seconds_count", labels, n, seen);
}

static void render_histograms(FILE *out, const struct rank_samples *samples)
{
    ep_metrics_family(out, "ep_op_seconds", "histogram", "Time of an op at the executor.");
    for (size_t s = 0; s < samples->n; s++)
        for (int op = 0; op < EP_OP_CLASSES; op++)
            if (has_histogram(&samples->list[s].counters.op[op]))
                render_histogram(out, &samples->list[s], (enum ep_op_class)op);
}

static void render_rank_counter(FILE *out, const struct rank_samples *samples, const char *name,
                                size_t offset, const char *help)
{
    struct ep_metrics_label labels[2];

    ep_metrics_family(out, name, "counter", help);
    for (size_t s = 0; s < samples->n; s++) {
        size_t n = rank_labels(&samples->list[s], labels);
        uint64_t value;

        memcpy(&value, (const char *)&samples->list[s].counters + offset, sizeof value);
        ep_metrics_sample(out, name, labels, n, (double)value);
    }
}

static void render_ranks(struct ep_api *api, FILE *out)
{
    struct rank_samples samples;

    collect(api, &samples);
    for (size_t i = 0; i < sizeof op_metrics / sizeof *op_metrics; i++)
        render_op_metric(out, &samples, &op_metrics[i]);
    render_histograms(out, &samples);
    render_rank_counter(out, &samples, "ep_rank_dropped_routes_total",
                        offsetof(struct ep_rank_counters, dropped_routes),
                        "Routes dropped: expert number out of range, or its rank absent.");
    render_rank_counter(out, &samples, "ep_rank_bad_descriptors_total",
                        offsetof(struct ep_rank_counters, bad_descriptors),
                        "Ops refused because their descriptor made no sense.");
    free(samples.list);
}

void ep_api_render_metrics(struct ep_api *api, FILE *out)
{
    render_node(api, out);
    render_cluster(api, out);
    render_attach(api, out);
    render_phases(api, out);
    render_rank_states(api, out);
    render_group_gauge(api, out, "ep_group_epoch", "The group's newest epoch.", epoch_of);
    render_group_gauge(api, out, "ep_group_window_bytes", "Bytes of one rank's window.", window_of);
    render_ranks(api, out);
}
