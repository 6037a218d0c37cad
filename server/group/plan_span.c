/* What a group on GPUs of several nodes wants of them beside room: kernels reach other nodes through NCCL. */
#include <string.h>

#include "plan.h"

static const struct ep_plan_node *find(const struct ep_plan_node *nodes, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(nodes[i].has.node, name))
            return &nodes[i];
    return NULL;
}

/* All of one version: what they tell each other differs between versions. */
static ep_status check_nccl(const struct ep_plan_node *nodes, size_t n, const struct ep_plan *plan, struct ep_error *error)
{
    const struct ep_plan_node *first = find(nodes, n, plan->name[0]);

    for (uint32_t i = 0; i < plan->n_nodes; i++) {
        const struct ep_plan_node *node = find(nodes, n, plan->name[i]);

        if (node && !node->nccl_version)
            return ep_error_set(error, EP_FAILED_PRECONDITION,
                                "ranks would be on %u nodes, and node %.80s has no NCCL that leads to the others: %.240s",
                                plan->n_nodes, node->has.node, node->nccl ? node->nccl : "it says nothing of it");
        if (node && first && node->nccl_version != first->nccl_version)
            return ep_error_set(error, EP_FAILED_PRECONDITION,
                                "node %.80s has NCCL %.120s, and node %.80s %.120s: all nodes of a group need the same",
                                first->has.node, first->nccl, node->has.node, node->nccl);
    }
    return EP_OK;
}

/* Its network knows one rank of a GPU. */
static ep_status check_gpus(const struct ep_plan *plan, struct ep_error *error)
{
    for (uint32_t a = 0; a < plan->n_ranks; a++)
        for (uint32_t b = 0; b < a; b++)
            if (plan->node[a] == plan->node[b] && !strcmp(plan->device[a], plan->device[b]))
                return ep_error_set(error, EP_FAILED_PRECONDITION,
                                    "ranks %u and %u would be on %.80s of node %s: a group on GPUs of several nodes has "
                                    "one rank per GPU at most; ask for fewer ranks", b, a, plan->device[a],
                                    plan->name[plan->node[a]]);
    return EP_OK;
}

ep_status ep_plan_check_span(const struct ep_settled *settled, const struct ep_plan_node *nodes, size_t n,
                             const struct ep_plan *plan, struct ep_error *error)
{
    ep_status status;

    if (plan->n_nodes < 2 || settled->spec->backend != EP__V1__BACKEND__BACKEND_CUDA)
        return EP_OK;
    status = check_nccl(nodes, n, plan, error);
    return status ? status : check_gpus(plan, error);
}
