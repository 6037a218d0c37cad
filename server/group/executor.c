/*
 * Who runs the ops of a rank: the server, or its worker.
 *
 * Blocks of one rank's kernels wait for those of others.  So all that the server runs on one GPU must have
 * its multiprocessors at once, and a rank takes its share of them for as long as it may run something.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "group_private.h"

#define EXECUTOR(name) EP__V1__EXECUTOR__EXECUTOR_##name
#define DIRECT(name)   EP__V1__DIRECT__DIRECT_##name

#define HOLDERS_NAMED 3

/* ---- who -------------------------------------------------------------------------- */

/* May this worker run its own ops?  It maps the windows of its peers then. */
static ep_status check_direct(const struct group *group, const struct ep_worker *worker, struct ep_error *error)
{
    switch (group->epoch->settled.spec->direct) {
    case DIRECT(ANY): return EP_OK;
    case DIRECT(NONE):
        return ep_error_set(error, EP_PERMISSION_DENIED,
                            "executor is direct: direct of group %s is none; ask for server or auto, or set it to "
                            "same_uid or any", group->name);
    default:
        if (worker->uid == geteuid())
            return EP_OK;
        return ep_error_set(error, EP_PERMISSION_DENIED,
                            "executor is direct: direct of group %s is same_uid, and uid %u is not the server's, which "
                            "is %u; ask for server or auto, run the worker as that user, or set direct to any",
                            group->name, (unsigned)worker->uid, (unsigned)geteuid());
    }
}

ep_status executor_settle(const struct group *group, const struct ep_worker *worker, Ep__V1__Executor *out,
                          struct ep_error *error)
{
    const bool cuda = ep_node_backend(group->groups->node) == EP__V1__BACKEND__BACKEND_CUDA;
    const Ep__V1__Executor asked = worker->executor;
    ep_status status = EP_OK;

    if (asked != EXECUTOR(AUTO) && asked != EXECUTOR(SERVER) && asked != EXECUTOR(DIRECT))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "executor is %d: must be 0 (auto), 1 (server) or 2 (direct)", (int)asked);
    if (!cuda && asked == EXECUTOR(DIRECT))
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "executor is direct: group %s is on the host backend, where the server runs the ops; "
                            "ask for server or auto", group->name);
    if (cuda && epoch_spans(group->epoch) && asked == EXECUTOR(DIRECT))
        return ep_error_set(error, EP_UNIMPLEMENTED,
                            "executor is direct: group %s is on several nodes, and only the server's kernels reach GPUs "
                            "of other nodes; ask for server or auto", group->name);
    if (asked == EXECUTOR(DIRECT))
        status = check_direct(group, worker, error);
    if (status)
        return status;
    /* That GPUs of one node reach each other's memory suffices for AUTO to be direct, over NVLink or PCIe; whose do
     * not has no group on them (check_reach() in server/node/team_cuda.c). */
    *out = asked != EXECUTOR(AUTO)                               ? asked
           : cuda && !epoch_spans(group->epoch) && check_direct(group, worker, NULL) == EP_OK ? EXECUTOR(DIRECT)
                                                                 : EXECUTOR(SERVER);
    return EP_OK;
}

/* ---- on what part of the GPU -------------------------------------------------------- */

static uint32_t sharers(const struct rank *rank)
{
    const struct epoch *epoch = rank->epoch;
    uint32_t n = 0;

    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        n += epoch->ranks[i].here && epoch->ranks[i].own->device == rank->own->device;
    return n;
}

/* An equal part for each rank of the group on that GPU, so that all of them fit. */
static uint32_t share_of(const struct rank *rank)
{
    const struct ep_node *node = rank->epoch->group->groups->node;
    uint32_t share = ep_node_sms(node, rank->own->device) / sharers(rank);

    if (share > ep_node_sms_per_rank(node))
        share = ep_node_sms_per_rank(node);
    return share ? share : 1;
}

uint32_t executor_direct_sms(const struct rank *rank)
{
    const uint32_t share = share_of(rank);

    return share < ep_node_sms(rank->epoch->group->groups->node, rank->own->device) ? share : 0;
}

/* What is held of a GPU. */
struct held {
    uint32_t sms;
    uint32_t leaving; /* of them, by ranks that have no worker any more */
    uint32_t groups;
    char text[256]; /* "group moe 66 (2 ranks), ..." */
};

/* What its worker has in a later epoch, on the same GPU, is not had twice: there it is counted. */
static bool gives_to_successor(const struct rank *rank)
{
    const struct epoch *newest = rank->epoch->group->epoch;
    const struct rank *next = newest && newest != rank->epoch && rank->number < newest->n_ranks
                                  ? &newest->ranks[rank->number]
                                  : NULL;

    return next && next->here && next->own->device == rank->own->device && next->own->sms && next->own->member &&
           next->own->member->after == rank->epoch->number;
}

static void add_epoch(const struct epoch *epoch, uint32_t device, struct held *held, uint32_t *sms, uint32_t *ranks)
{
    const struct ranks here = epoch ? epoch_ranks_of(epoch, epoch->own) : (struct ranks){ 0 };

    for (uint32_t i = 0; i < here.n; i++) {
        const struct rank *rank = &epoch->ranks[here.number[i]];

        if (rank->own->device != device || !rank->own->sms || gives_to_successor(rank))
            continue;
        *sms += rank->own->sms;
        *ranks += 1;
        if (!rank->own->member && !ep_team_stuck(epoch->team, (int32_t)rank->number))
            held->leaving += rank->own->sms;
    }
}

static void add_group(const struct group *group, uint32_t device, struct held *held)
{
    const size_t used = strlen(held->text);
    uint32_t sms = 0, ranks = 0;

    add_epoch(group->epoch, device, held, &sms, &ranks);
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        add_epoch(epoch, device, held, &sms, &ranks);
    held->sms += sms;
    if (!sms)
        return;
    if (held->groups++ < HOLDERS_NAMED)
        snprintf(held->text + used, sizeof held->text - used, "%sgroup %.48s %u (%u rank%s)", used ? ", " : "",
                 group->name, sms, ranks, ranks == 1 ? "" : "s");
}

static struct held held_of(const struct ep_groups *groups, uint32_t device)
{
    struct held held = { 0 };

    for (size_t i = 0; i < groups->n; i++)
        add_group(groups->list[i], device, &held);
    return held;
}

static ep_status refuse(const struct rank *rank, uint32_t share, const struct held *held, struct ep_error *error)
{
    const struct ep_node *node = rank->epoch->group->groups->node;
    const uint32_t total = ep_node_sms(node, rank->own->device);
    const char *gpu = ep_node_device_name(node, rank->own->device);

    if (held->sms - held->leaving + share <= total)
        return ep_error_set(error, EP_UNAVAILABLE,
                            "rank %u of group %s: the multiprocessors of %s are being released: try again",
                            rank->number, rank->epoch->group->name, gpu);
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                        "executor server needs %u of the %u multiprocessors of %s for rank %u of group %s, and %u are "
                        "free; held by: %s%s; use executor direct, or start ep-server with --sms-per-rank",
                        share, total, gpu, rank->number, rank->epoch->group->name,
                        total > held->sms ? total - held->sms : 0, *held->text ? held->text : "nobody",
                        held->groups > HOLDERS_NAMED ? " and others" : "");
}

static bool takes_share(const struct rank *rank, Ep__V1__Executor executor)
{
    return executor == EXECUTOR(SERVER) && ep_node_sms(rank->epoch->group->groups->node, rank->own->device) > 0;
}

/*
 * All workers of the epoch before go over together, those too that have no place in the next one.  Until then successors
 * run nothing; and who has come so far that it runs something there has been sent all that the old epoch owes it, so
 * that whatever still runs there waits for nobody.
 */
static void discount_epoch(const struct epoch *before, uint32_t device, struct held *held)
{
    struct held its = { 0 };
    uint32_t sms = 0, ranks = 0;

    add_epoch(before, device, &its, &sms, &ranks);
    held->sms -= sms;
    held->leaving -= its.leaving;
}

ep_status executor_fits(const struct rank *rank, const struct rank *before, Ep__V1__Executor executor,
                        struct ep_error *error)
{
    const struct ep_groups *groups = rank->epoch->group->groups;
    struct held held;

    if (!takes_share(rank, executor))
        return EP_OK;
    held = held_of(groups, rank->own->device);
    if (before)
        discount_epoch(before->epoch, rank->own->device, &held);
    return held.sms + share_of(rank) <= ep_node_sms(groups->node, rank->own->device)
               ? EP_OK
               : refuse(rank, share_of(rank), &held, error);
}

void executor_take(struct rank *rank, Ep__V1__Executor executor)
{
    rank->own->sms = takes_share(rank, executor) ? share_of(rank) : 0;
}

uint32_t executor_ht_sms(const struct rank *rank, Ep__V1__Executor executor, uint32_t asked)
{
    const uint32_t part = executor == EXECUTOR(SERVER) ? rank->own->sms : executor_direct_sms(rank);
    const uint32_t most = part ? part : ep_node_sms(rank->epoch->group->groups->node, rank->own->device);

    return asked && asked < most ? asked : most;
}

uint32_t executor_sms(const struct group *group, uint32_t device)
{
    struct held held = { 0 };

    add_group(group, device, &held);
    return held.sms;
}

uint32_t ep_groups_sms(const struct ep_groups *groups, uint32_t device)
{
    return held_of(groups, device).sms;
}
