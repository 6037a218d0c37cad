/* How a plan looks: what a dry run answers. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "output.h"

/* ---- lists of numbers ------------------------------------------------------------------- */

/* "0-3, 7": for free(). */
static char *ranges(const uint32_t *numbers, size_t n)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    for (size_t i = 0, end; out && i < n; i = end) {
        for (end = i + 1; end < n && numbers[end] == numbers[end - 1] + 1; end++)
            ;
        fprintf(out, "%s%u", i ? ", " : "", numbers[i]);
        if (end - i > 1)
            fprintf(out, "-%u", numbers[end - 1]);
    }
    if (out)
        fclose(out);
    return text;
}

static bool has_loads(const Ep__V1__Plan *plan)
{
    for (size_t i = 0; i < plan->n_ranks; i++)
        if (plan->ranks[i]->load || plan->ranks[i]->was_load)
            return true;
    return false;
}

static bool is_moved(const Ep__V1__RankPlan *rank)
{
    return strcmp(rank->node, rank->was_node) != 0 || strcmp(rank->device, rank->was_device) != 0;
}

/* ---- tables ------------------------------------------------------------------------------- */

static void print_ranks(const Ep__V1__Plan *plan, FILE *out)
{
    static const struct ep_column columns[] = {
        { "RANK", EP_COLUMN_RIGHT },      { "NODE", 0 }, { "DEVICE", 0 }, { "WAS ON", 0 }, { "LOAD", EP_COLUMN_RIGHT },
        { "WAS LOAD", EP_COLUMN_RIGHT }, { "EXPERTS", EP_COLUMN_LONG },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);
    const bool loads = has_loads(plan);

    for (size_t i = 0; i < plan->n_ranks; i++) {
        const Ep__V1__RankPlan *rank = plan->ranks[i];
        char *experts = ranges(rank->experts, rank->n_experts), was[192] = "";

        if (*rank->was_node && is_moved(rank))
            snprintf(was, sizeof was, "%s %s", rank->was_node, rank->was_device);
        ep_table_add(table, (const char *[]){ ep_text_u64(rank->rank).s, rank->node, rank->device,
                                              *rank->was_node ? was : "new", loads ? ep_text_u64(rank->load).s : "",
                                              loads ? ep_text_u64(rank->was_load).s : "", experts ? experts : "?" });
        free(experts);
    }
    fputc('\n', out);
    ep_table_print(table, out);
}

static void print_devices(const Ep__V1__Plan *plan, FILE *out)
{
    static const struct ep_column columns[] = {
        { "NODE", 0 }, { "DEVICE", 0 }, { "BEFORE", EP_COLUMN_RIGHT }, { "BESIDE", EP_COLUMN_RIGHT },
        { "AFTER", EP_COLUMN_RIGHT }, { "OF", EP_COLUMN_RIGHT },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < plan->n_devices; i++) {
        const Ep__V1__DevicePlan *device = plan->devices[i];

        ep_table_add(table, (const char *[]){ device->node, *device->device ? device->device : "all",
                                              ep_text_size(device->before).s, ep_text_size(device->beside).s,
                                              ep_text_size(device->after).s, ep_text_size(device->total).s });
    }
    fputs("\nMemory, with the old epoch beside the new one in between\n", out);
    ep_table_print(table, out);
}

/* ---- what moves ------------------------------------------------------------------------------ */

static void print_moves(const Ep__V1__Plan *plan, FILE *out)
{
    char *experts = ranges(plan->moved_experts, plan->n_moved_experts);
    size_t moved = 0, was = 0;

    for (size_t i = 0; i < plan->n_ranks; i++) {
        was += *plan->ranks[i]->was_node != '\0';
        moved += *plan->ranks[i]->was_node && is_moved(plan->ranks[i]);
    }
    if (was) {
        ep_output_pair(out, "moves", "%zu ranks to another device, the homes of %zu experts", moved,
                       plan->n_moved_experts);
        if (plan->n_moved_experts)
            ep_output_pair(out, "experts", "%s", experts ? experts : "?");
    }
    free(experts);
}

/* max / mean; 0 where there is none. */
static double peak(const Ep__V1__Plan *plan, bool was)
{
    double most = 0, sum = 0;
    size_t n = 0;

    for (size_t i = 0; i < plan->n_ranks; i++) {
        const double load = (double)(was ? plan->ranks[i]->was_load : plan->ranks[i]->load);

        n += !was || *plan->ranks[i]->was_node;
        sum += load;
        most = load > most ? load : most;
    }
    return sum > 0 ? most * (double)n / sum : 0;
}

static void print_balance(const Ep__V1__Plan *plan, FILE *out)
{
    if (!has_loads(plan))
        return;
    if (peak(plan, true) > 0)
        ep_output_pair(out, "balance", "fullest rank %.2f of the mean load, now %.2f", peak(plan, false),
                       peak(plan, true));
    else
        ep_output_pair(out, "balance", "fullest rank %.2f of the mean load", peak(plan, false));
}

/* ---- all of it ---------------------------------------------------------------------------------- */

void ep_group_view_plan(const Ep__V1__Group *group, FILE *out)
{
    static const Ep__V1__Plan none = EP__V1__PLAN__INIT; /* of a server that makes none */
    const Ep__V1__Plan *plan = group->plan ? group->plan : &none;
    const Ep__V1__GroupStatus *status = ep_group_status(group);

    ep_output_pair(out, "name", "%s", group->name);
    ep_output_pair(out, "epoch", "%" PRIu64 "%s", status->epoch,
                   plan->new_epoch ? ", a new one" : ", which stays: nothing has to be formed");
    print_moves(plan, out);
    print_balance(plan, out);
    print_ranks(plan, out);
    print_devices(plan, out);
    ep_group_view_settled(status->settled, out);
}
