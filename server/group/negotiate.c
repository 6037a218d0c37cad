/*
 * From what is asked to what the nodes have: who of them can be a member, where the ranks go, which sizes and modes.
 *
 * What a node offers is in its registration: memory of each device, modes, dtypes, release; what is taken of the memory
 * is known of the groups (share.c).  That may be a moment old, so the last word is the member's, when it is asked to
 * prepare its part (part.c).
 */
#include <stdio.h>
#include <string.h>

#include "group_private.h"

static const struct ep_plan *present_plan(const struct group *group)
{
    return group->epoch ? &group->epoch->plan : NULL;
}

/* Where they are, on other nodes if one of these is drained, and rather there than nowhere. */
static ep_status place(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                       const struct node_table *table, const struct ep_settled *settled, struct ep_plan *plan,
                       struct ep_error *error)
{
    const struct ep_plan *present = stay ? present_plan(group) : NULL;
    ep_status status = EP_FAILED_PRECONDITION;

    if (!present || ep_plan_check(asked, settled, table->nodes, table->n, present, false, NULL))
        status = ep_plan_make(asked, settled, table->nodes, table->n, present_plan(group), plan, error);
    else
        status = EP_OK, ep_plan_copy(present, plan);
    if (!status || !present || ep_plan_check(asked, settled, table->nodes, table->n, present, true, NULL))
        return status;
    ep_plan_copy(present, plan);
    return EP_OK;
}

/* Homes by load are balanced over nodes too, and where the ranks are is known now.  Their number stays, so sizes do. */
static ep_status settle_homes(const Ep__V1__GroupSpec *asked, struct ep_spec_bounds *bounds, const struct ep_plan *plan,
                              struct ep_settled *settled, struct ep_error *error)
{
    struct ep_settled placed;
    ep_status status;

    if (!asked->placement || plan->n_nodes < 2 ||
        asked->placement->strategy != EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_BY_LOAD)
        return EP_OK;
    bounds->rank_node = plan->node;
    bounds->placed = plan->n_ranks;
    status = ep_spec_settle(asked, bounds, &placed, error);
    if (status)
        return status;
    ep_settled_clear(settled);
    *settled = placed;
    return EP_OK;
}

/* *lowered: sizes that would do instead, if memory is what is missing. */
static ep_status settle_and_place(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                                  const struct node_table *table, struct ep_settled *settled, struct ep_plan *plan,
                                  struct ep_plan_lowered *lowered, struct ep_error *error)
{
    struct ep_spec_bounds bounds;
    ep_status status = ep_plan_bounds(asked, table->nodes, table->n, group->epoch != NULL, &bounds, error);

    *lowered = (struct ep_plan_lowered){ 0 };
    if (status || (status = ep_spec_settle(asked, &bounds, settled, error)))
        return status;
    status = place(group, asked, stay, table, settled, plan, error);
    if (status == EP_RESOURCE_EXHAUSTED)
        (void)ep_plan_lower(asked, settled, table->nodes, table->n, present_plan(group), lowered);
    if (!status && ((status = settle_homes(asked, &bounds, plan, settled, error)) ||
                    (status = ep_plan_check_span(settled, table->nodes, table->n, plan, error))))
        ep_plan_clear(plan);
    if (status)
        ep_settled_clear(settled);
    return status;
}

static void note_lowered(struct ep_settled *settled, const char *field, uint32_t asked, uint32_t value,
                         uint32_t fallback, const char *why)
{
    if (!asked && value && value != fallback)
        ep_settled_note(settled, "%s: 0 asked, %u settled: %s, too little for the default of %u", field, value, why,
                        fallback);
}

/* With what memory there is for sizes that nobody asked for. */
static ep_status plan_lowered(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay,
                              const struct node_table *table, const struct ep_plan_lowered *lowered,
                              struct ep_settled *settled, struct ep_plan *plan, struct ep_error *error)
{
    Ep__V1__GroupSpec less = *asked; /* only read */
    struct ep_plan_lowered none;
    ep_status status;

    if (lowered->ll_max_tokens != EP_DEFAULT_LL_MAX_TOKENS)
        less.ll_max_tokens = lowered->ll_max_tokens;
    if (lowered->ht_max_tokens != EP_DEFAULT_HT_MAX_TOKENS)
        less.ht_max_tokens = lowered->ht_max_tokens;
    status = settle_and_place(group, &less, stay, table, settled, plan, &none, error);
    if (status)
        return status;
    note_lowered(settled, "ll_max_tokens", asked->ll_max_tokens, lowered->ll_max_tokens, EP_DEFAULT_LL_MAX_TOKENS,
                 lowered->why);
    note_lowered(settled, "ht_max_tokens", asked->ht_max_tokens, lowered->ht_max_tokens, EP_DEFAULT_HT_MAX_TOKENS,
                 lowered->why);
    return EP_OK;
}

/* The epoch that runs keeps its memory until its workers have left. */
static void say_beside(const struct group *group, struct ep_error *error)
{
    const struct epoch *present = group->epoch;
    size_t used;

    if (!error || error->status != EP_RESOURCE_EXHAUSTED || !present)
        return;
    used = strlen(error->text);
    snprintf(error->text + used, sizeof error->text - used, " beside epoch %llu, which keeps %llu bytes of each rank",
             (unsigned long long)present->number, (unsigned long long)present->settled.rank_bytes);
}

ep_status negotiate(const struct group *group, const Ep__V1__GroupSpec *asked, bool stay, struct ep_settled *settled,
                    struct ep_plan *plan, struct ep_error *error)
{
    struct node_table table = nodes_table(group->groups, group);
    struct ep_plan_lowered lowered;
    ep_status status = settle_and_place(group, asked, stay, &table, settled, plan, &lowered, error);

    if (status && (lowered.ll_max_tokens || lowered.ht_max_tokens))
        status = plan_lowered(group, asked, stay, &table, &lowered, settled, plan, error);
    if (status)
        say_beside(group, error);
    nodes_clear(&table);
    return status;
}
