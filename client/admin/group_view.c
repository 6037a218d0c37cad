#include "group.h"

#include <inttypes.h>

#include "output.h"

/* ---- parts -------------------------------------------------------------------------- */

const Ep__V1__GroupStatus *ep_group_status(const Ep__V1__Group *group)
{
    static const Ep__V1__GroupStatus none = EP__V1__GROUP_STATUS__INIT;

    return group->status ? group->status : &none;
}

const Ep__V1__GroupSpec *ep_group_spec(const Ep__V1__Group *group)
{
    static const Ep__V1__GroupSpec none = EP__V1__GROUP_SPEC__INIT;

    return group->spec ? group->spec : &none;
}

const char *ep_group_phase(const Ep__V1__Group *group)
{
    return ep_text_enum(&ep__v1__phase__descriptor, (int)ep_group_status(group)->phase);
}

struct ep_text ep_group_ranks(const Ep__V1__Group *group)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);
    struct ep_text text;
    unsigned attached = 0;

    for (size_t i = 0; i < status->n_ranks; i++)
        attached += status->ranks[i]->state == EP__V1__RANK_STATE__RANK_STATE_ATTACHED;
    snprintf(text.s, sizeof text.s, "%u/%u", attached, ep_group_spec(group)->ranks);
    return text;
}

/* "LL,HT" of repeated enum values (which protobuf-c keeps as int-sized enums). */
static struct ep_text enum_list(const ProtobufCEnumDescriptor *type, const int *values, size_t n)
{
    struct ep_text text = { "" };

    for (size_t i = 0; i < n; i++) {
        size_t used = strlen(text.s);

        snprintf(text.s + used, sizeof text.s - used, "%s%s", i ? "," : "", ep_text_enum(type, values[i]));
    }
    return text;
}

static struct ep_text modes(const Ep__V1__GroupSpec *spec)
{
    return enum_list(&ep__v1__mode__descriptor, (const int *)spec->modes, spec->n_modes);
}

static struct ep_text window(const Ep__V1__GroupStatus *status)
{
    struct ep_text none = { "-" };

    return status->settled && status->settled->window_bytes ? ep_text_size(status->settled->window_bytes)
                                                            : none;
}

/* ---- list --------------------------------------------------------------------------- */

void ep_group_view_list(Ep__V1__Group *const *groups, size_t n, FILE *out)
{
    static const struct ep_column columns[] = {
        { "NAME", 0 },
        { "PHASE", EP_COLUMN_STATE },
        { "EPOCH", EP_COLUMN_RIGHT },
        { "RANKS", EP_COLUMN_RIGHT },
        { "MODES", 0 },
        { "EXPERTS", EP_COLUMN_RIGHT },
        { "HIDDEN", EP_COLUMN_RIGHT },
        { "TOP-K", EP_COLUMN_RIGHT },
        { "WINDOW", EP_COLUMN_RIGHT },
        { "AGE", EP_COLUMN_RIGHT },
        { "REASON", EP_COLUMN_LONG },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < n; i++) {
        const Ep__V1__GroupStatus *status = ep_group_status(groups[i]);
        const Ep__V1__GroupSpec *spec = ep_group_spec(groups[i]);

        ep_table_add(
            table, (const char *[]){ groups[i]->name, ep_group_phase(groups[i]), ep_text_u64(status->epoch).s,
                                     ep_group_ranks(groups[i]).s, modes(spec).s, ep_text_u64(spec->experts).s,
                                     ep_text_u64(spec->hidden).s, ep_text_u64(spec->top_k).s,
                                     window(status).s, ep_text_age(status->created_us).s, status->reason });
    }
    ep_table_print(table, out);
}

/* ---- one group ------------------------------------------------------------------------ */

static void print_labels(const Ep__V1__GroupSpec *spec, FILE *out)
{
    char text[512] = "";

    for (size_t i = 0; i < spec->n_labels; i++) {
        size_t used = strlen(text);

        snprintf(text + used, sizeof text - used, "%s%s=%s", i ? ", " : "", spec->labels[i]->key,
                 spec->labels[i]->value);
    }
    if (spec->n_labels)
        ep_output_pair(out, "labels", "%s", text);
}

static void print_draining(const Ep__V1__GroupStatus *status, FILE *out)
{
    char text[256] = "";

    for (size_t i = 0; i < status->n_draining_epochs; i++) {
        size_t used = strlen(text);

        snprintf(text + used, sizeof text - used, "%s%" PRIu64, i ? ", " : "", status->draining_epochs[i]);
    }
    if (status->n_draining_epochs)
        ep_output_pair(out, "old epochs", "%s (workers still attached)", text);
}

/* An expert may have several homes; what is more than one each is redundant. */
static void print_placement(const Ep__V1__GroupSpec *spec, FILE *out)
{
    const Ep__V1__Placement *placement = spec->placement;
    bool explicit_map =
        placement && placement->strategy == EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_EXPLICIT;

    if (!explicit_map)
        ep_output_pair(out, "placement", "contiguous");
    else if (placement->n_homes > spec->experts)
        ep_output_pair(out, "placement", "explicit, %zu homes, %zu of them redundant", placement->n_homes,
                       placement->n_homes - spec->experts);
    else
        ep_output_pair(out, "placement", "explicit, %zu homes", placement->n_homes);
}

static uint32_t ranks_on(const Ep__V1__GroupStatus *status, const char *node)
{
    uint32_t n = 0;

    for (size_t i = 0; i < status->n_ranks; i++)
        n += !strcmp(status->ranks[i]->node, node);
    return n;
}

static bool is_named_before(const Ep__V1__GroupStatus *status, size_t rank)
{
    for (size_t i = 0; i < rank; i++)
        if (!strcmp(status->ranks[i]->node, status->ranks[rank]->node))
            return true;
    return false;
}

/* "a (2 ranks), b (1 rank)" */
static void print_nodes(const Ep__V1__GroupStatus *status, FILE *out)
{
    char text[1024] = "";
    size_t used = 0;

    for (size_t i = 0; i < status->n_ranks && used < sizeof text; i++) {
        const char *node = status->ranks[i]->node;
        const uint32_t n = ranks_on(status, node);

        if (!is_named_before(status, i))
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s (%u rank%s)", used ? ", " : "", node, n,
                                     n == 1 ? "" : "s");
    }
    if (used)
        ep_output_pair(out, "nodes", "%s", text);
}

/* Nothing where the backend has no such workers and nobody asked. */
static void print_direct(const Ep__V1__GroupSpec *spec, FILE *out)
{
    static const char *const texts[] = {
        [EP__V1__DIRECT__DIRECT_SAME_UID] = "same-uid: workers of the server's user run their own ops",
        [EP__V1__DIRECT__DIRECT_ANY] = "any: every worker runs its own ops",
        [EP__V1__DIRECT__DIRECT_NONE] = "none: no worker runs its own ops",
    };
    const unsigned direct = (unsigned)spec->direct;

    if (direct < sizeof texts / sizeof *texts && texts[direct])
        ep_output_pair(out, "direct", "%s", texts[direct]);
}

static void print_summary(const Ep__V1__Group *group, FILE *out)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);
    const Ep__V1__GroupSpec *spec = ep_group_spec(group);

    ep_output_pair(out, "name", "%s", group->name);
    ep_output_pair(out, "phase", "%s%s%s", ep_group_phase(group), *status->reason ? ": " : "",
                   status->reason);
    ep_output_pair(out, "epoch", "%" PRIu64 ", revision %" PRIu64, status->epoch, group->revision);
    print_draining(status, out);
    ep_output_pair(out, "ranks", "%s attached", ep_group_ranks(group).s);
    ep_output_pair(out, "experts", "%u, top-k %u", spec->experts, spec->top_k);
    ep_output_pair(out, "hidden", "%u, as %s", spec->hidden,
                   enum_list(&ep__v1__dtype__descriptor, (const int *)spec->dtypes, spec->n_dtypes).s);
    ep_output_pair(out, "modes", "%s; LL %u tokens, %u banks; HT %u tokens", modes(spec).s,
                   spec->ll_max_tokens, spec->ll_banks, spec->ht_max_tokens);
    ep_output_pair(out, "timeout", "%u ms", spec->timeout_ms);
    print_placement(spec, out);
    print_nodes(status, out);
    if (spec->backend)
        ep_output_pair(out, "backend", "%s", ep_text_enum(&ep__v1__backend__descriptor, (int)spec->backend));
    print_direct(spec, out);
    if (spec->attach_token)
        ep_output_pair(out, "attach token", "set");
    print_labels(spec, out);
    ep_output_pair(out, "created", "%s (%s ago)", ep_text_time(status->created_us).s,
                   ep_text_age(status->created_us).s);
    if (status->updated_us && status->updated_us != status->created_us)
        ep_output_pair(out, "updated", "%s (%s ago)", ep_text_time(status->updated_us).s,
                       ep_text_age(status->updated_us).s);
}

static void print_ranks(const Ep__V1__GroupStatus *status, FILE *out)
{
    static const struct ep_column columns[] = {
        { "RANK", EP_COLUMN_RIGHT },
        { "STATE", EP_COLUMN_STATE },
        { "WORKER", 0 },
        { "PID", EP_COLUMN_RIGHT },
        { "NODE", 0 },
        { "DEVICE", 0 },
        { "EXPERTS", EP_COLUMN_RIGHT },
        { "SINCE", EP_COLUMN_RIGHT },
        { "OPS", EP_COLUMN_RIGHT },
        { "TIMEOUTS", EP_COLUMN_RIGHT },
        { "DROPPED", EP_COLUMN_RIGHT },
        { "REASON", EP_COLUMN_LONG },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < status->n_ranks; i++) {
        const Ep__V1__RankStatus *rank = status->ranks[i];

        ep_table_add(table,
                     (const char *[]){ ep_text_u64(rank->rank).s,
                                       ep_text_enum(&ep__v1__rank_state__descriptor, (int)rank->state),
                                       rank->worker, rank->pid > 0 ? ep_text_u64((uint64_t)rank->pid).s : "",
                                       rank->node, rank->device, ep_text_u64(rank->local_experts).s,
                                       ep_text_age(rank->since_us).s, ep_text_u64(rank->ops).s,
                                       ep_text_u64(rank->timeouts).s, ep_text_u64(rank->dropped_routes).s,
                                       rank->reason });
    }
    if (status->n_ranks)
        fputc('\n', out);
    ep_table_print(table, out);
}

void ep_group_view_settled(const Ep__V1__Settled *settled, FILE *out)
{
    char clean[EP_ERROR_TEXT_MAX];

    if (!settled)
        return;
    fputs("\nSettled, per rank\n", out);
    ep_output_pair(out, "  window", "%s", ep_text_size(settled->window_bytes).s);
    ep_output_pair(out, "  LL", "%s, %u banks", ep_text_size(settled->ll_bytes).s, settled->ll_banks);
    ep_output_pair(out, "  HT", "%s", ep_text_size(settled->ht_bytes).s);
    ep_output_pair(out, "  arena", "%s", ep_text_size(settled->arena_bytes).s);
    ep_output_pair(out, "  experts", "%u at most", settled->max_local_experts);
    for (size_t i = 0; i < settled->n_notes; i++) {
        ep_text_clean(settled->notes[i], clean, sizeof clean);
        fprintf(out, "  note: %s\n", clean);
    }
}

static void print_timeouts(const Ep__V1__GroupStatus *status, FILE *out)
{
    static const struct ep_column columns[] = {
        { "TIME", 0 },
        { "EPOCH", EP_COLUMN_RIGHT },
        { "SEQ", EP_COLUMN_RIGHT },
        { "OP", 0 },
        { "PHASE", 0 },
        { "WAITED", EP_COLUMN_RIGHT },
        { "RANK", EP_COLUMN_RIGHT },
        { "LATE RANK", EP_COLUMN_RIGHT },
    };
    struct ep_table *table;

    if (status->n_timeouts == 0)
        return;
    fputs("\nLate ranks\n", out);
    table = ep_table_create(columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < status->n_timeouts; i++) {
        const Ep__V1__TimeoutRecord *record = status->timeouts[i];

        ep_table_add(table,
                     (const char *[]){ ep_text_time(record->time_us).s, ep_text_u64(record->epoch).s,
                                       ep_text_u64(record->seq).s, record->op, record->phase,
                                       ep_text_micros(record->waited_us).s, ep_text_u64(record->rank).s,
                                       ep_text_u64(record->late_rank).s });
    }
    ep_table_print(table, out);
}

void ep_group_view_one(const Ep__V1__Group *group, FILE *out)
{
    const Ep__V1__GroupStatus *status = ep_group_status(group);

    print_summary(group, out);
    print_ranks(status, out);
    ep_group_view_settled(status->settled, out);
    print_timeouts(status, out);
}
