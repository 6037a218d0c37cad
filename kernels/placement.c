/* Which rank holds which expert. */
#include <stdlib.h>
#include <string.h>

#include "ep_kernels.h"

static ep_status allocate(uint32_t ranks, uint32_t experts, uint32_t homes, struct ep_placement *p,
                          struct ep_error *error)
{
    *p = (struct ep_placement){ .ranks = ranks, .experts = experts };
    p->first = calloc((size_t)experts + 1, sizeof *p->first);
    p->rank = calloc(homes, sizeof *p->rank);
    p->local = calloc(homes, sizeof *p->local);
    p->local_experts = calloc(ranks, sizeof *p->local_experts);
    if (p->first && p->rank && p->local && p->local_experts)
        return EP_OK;
    ep_placement_free(p);
    return ep_error_set(error, EP_NO_MEMORY, "placement of %u experts: out of memory", experts);
}

static ep_status check_sizes(uint32_t ranks, uint32_t experts, struct ep_error *error)
{
    if (ranks < 1 || ranks > EP_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "ranks is %u: must be 1 to %u", ranks,
                            EP_MAX_RANKS);
    if (experts < 1)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "experts is 0: must be at least 1");
    return EP_OK;
}

/* Gives home i of the list its local number and keeps the largest count. */
static void settle_home(struct ep_placement *p, uint32_t i, uint32_t rank)
{
    p->rank[i] = rank;
    p->local[i] = p->local_experts[rank]++;
    if (p->local_experts[rank] > p->max_local)
        p->max_local = p->local_experts[rank];
}

ep_status ep_placement_contiguous(uint32_t ranks, uint32_t experts, struct ep_placement *out,
                                  struct ep_error *error)
{
    struct ep_placement p;
    ep_status status = check_sizes(ranks, experts, error);

    if (status == EP_OK)
        status = allocate(ranks, experts, experts, &p, error);
    if (status != EP_OK)
        return status;
    for (uint32_t rank = 0, e = 0; rank < ranks; rank++) {
        uint32_t end = e + experts / ranks + (rank < experts % ranks);

        for (; e < end; e++) {
            p.first[e] = e;
            settle_home(&p, e, rank);
        }
    }
    p.first[experts] = experts;
    *out = p;
    return EP_OK;
}

static ep_status check_homes(uint32_t ranks, uint32_t experts, const struct ep_expert_home *homes,
                             uint32_t n, struct ep_error *error)
{
    for (uint32_t i = 0; i < n; i++) {
        if (homes[i].expert >= experts)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement.homes[%u].expert is %u: must be below experts, which is %u",
                                i, homes[i].expert, experts);
        if (homes[i].rank >= ranks)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement.homes[%u].rank is %u: must be below ranks, which is %u",
                                i, homes[i].rank, ranks);
    }
    return EP_OK;
}

/* first[e + 1] counts the homes of e, then becomes the prefix sum. */
static ep_status index_homes(struct ep_placement *p, const struct ep_expert_home *homes, uint32_t n,
                             struct ep_error *error)
{
    for (uint32_t i = 0; i < n; i++)
        p->first[homes[i].expert + 1]++;
    for (uint32_t e = 0; e < p->experts; e++) {
        if (p->first[e + 1] == 0)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement.homes: expert %u has no home; every expert needs one", e);
        p->first[e + 1] += p->first[e];
    }
    return EP_OK;
}

static ep_status fill_homes(struct ep_placement *p, const struct ep_expert_home *homes, uint32_t n,
                            uint32_t *filled, struct ep_error *error)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t e = homes[i].expert, begin = p->first[e];

        for (uint32_t k = begin; k < begin + filled[e]; k++)
            if (p->rank[k] == homes[i].rank)
                return ep_error_set(error, EP_INVALID_ARGUMENT,
                                    "placement.homes[%u]: expert %u is on rank %u already", i, e,
                                    homes[i].rank);
        settle_home(p, begin + filled[e]++, homes[i].rank);
    }
    return EP_OK;
}

ep_status ep_placement_explicit(uint32_t ranks, uint32_t experts, const struct ep_expert_home *homes,
                                uint32_t n, struct ep_placement *out, struct ep_error *error)
{
    struct ep_placement p;
    uint32_t *filled;
    ep_status status = check_sizes(ranks, experts, error);

    if (status == EP_OK)
        status = check_homes(ranks, experts, homes, n, error);
    if (status == EP_OK && n < experts)
        status = ep_error_set(error, EP_INVALID_ARGUMENT,
                              "placement.homes has %u entries: every one of %u experts needs one", n,
                              experts);
    if (status == EP_OK)
        status = allocate(ranks, experts, n, &p, error);
    if (status != EP_OK)
        return status;
    filled = calloc(experts, sizeof *filled);
    if (!filled)
        status = ep_error_set(error, EP_NO_MEMORY, "placement of %u experts: out of memory", experts);
    if (status == EP_OK)
        status = index_homes(&p, homes, n, error);
    if (status == EP_OK)
        status = fill_homes(&p, homes, n, filled, error);
    free(filled);
    if (status == EP_OK)
        *out = p;
    else
        ep_placement_free(&p);
    return status;
}

void ep_placement_free(struct ep_placement *p)
{
    free(p->first);
    free(p->rank);
    free(p->local);
    free(p->local_experts);
    *p = (struct ep_placement){ 0 };
}
