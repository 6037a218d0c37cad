/* From an op to a kernel and what it is told: the half of kernels/cuda/rank.c that launches. */
#include <stdlib.h>

#include "cuda_cpu.h"
#include "rank_base.h"
#include "wire.h"

/* Blocks that run at once, and multiprocessors: few, and not as many of the one as of the other.  Who asks for one for HT
 * has a block on it. */
enum { SMS = 2, LL_BLOCKS = 3, HT_DISPATCH_BLOCKS = 3, HT_COMBINE_BLOCKS = 2 };

struct cpu_kernels {
    struct ep_ll_rank ll;
    struct ep_ht_rank ht;
    uint32_t shared_bytes, ht_shared_bytes;
    struct wire *wire; /* NULL: all ranks are on one node */
};

int ep_net_ll_dispatch(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream);
int ep_net_ll_combine(const struct ep_ll_args *args, uint32_t shared_bytes, void *stream);
int ep_net_ll_release(const struct ep_ll_args *args, void *stream);
int ep_net_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream);
int ep_net_ht_combine(const struct ep_ht_args *args, void *stream);

ep_status cpu_rank_init(struct cpu_rank *rank, const struct ep_placement *placement, struct ep_error *error)
{
    struct cpu_kernels *k = calloc(1, sizeof *k);
    void *windows[EP_DEVICE_MAX_RANKS];
    const struct ep_cuda_rank_options options = { .rank = rank->rank,
                                                  .map = &rank->map,
                                                  .placement = placement,
                                                  .windows = windows,
                                                  .state = rank->state,
                                                  .net = wire_is_there(rank->ranks) };

    rank->kernels = k;
    if (!k)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    if (ep_cuda_rank_check(&options, error) != EP_OK)
        return error->status;
    for (uint32_t i = 0; i < rank->ranks; i++)
        windows[i] = rank->window[i];
    ep_cuda_rank_base(&options, &k->ll);
    ep_cuda_rank_ht_base(&options, &k->ll.base, &k->ht);
    k->ll.sms = SMS;
    k->ht.sms = rank->max_ht_sms && rank->max_ht_sms < SMS ? rank->max_ht_sms : SMS;
    k->ll.dispatch_blocks = k->ll.combine_blocks = LL_BLOCKS;
    k->ht.dispatch_blocks = k->ht.sms < SMS ? k->ht.sms : HT_DISPATCH_BLOCKS;
    k->ht.combine_blocks = k->ht.sms < SMS ? k->ht.sms : HT_COMBINE_BLOCKS;
    k->shared_bytes = (uint32_t)ep_device_shared_bytes(&rank->map.limits);
    k->ht_shared_bytes = (uint32_t)ep_device_ht_shared_bytes(&rank->map.limits);
    return options.net ? wire_open(rank->window, rank->rank, &rank->map, &k->wire, error) : EP_OK;
}

void cpu_rank_fini(struct cpu_rank *rank)
{
    if (rank->kernels)
        wire_close(rank->kernels->wire);
    free(rank->kernels);
}

/* Nobody else writes where the net is into the state. */
static void run_net(struct cpu_kernels *k, const struct ep_op *op, const struct ep_ll_args *args)
{
    k->ll.base.state->net = (uint64_t)(uintptr_t)wire_net(k->wire);
    switch (op->kind) {
    case EP_OP_DISPATCH: (void)ep_net_ll_dispatch(args, k->shared_bytes, NULL); break;
    case EP_OP_COMBINE:  (void)ep_net_ll_combine(args, k->shared_bytes, NULL); break;
    default:             (void)ep_net_ll_release(args, NULL);
    }
}

static void run_ll(struct cpu_kernels *k, const struct ep_op *op, bool completes)
{
    struct ep_ll_args args = k->ll.base;

    ep_ll_fill(&k->ll, NULL, op, completes, &args);
    if (k->wire) {
        run_net(k, op, &args);
        return;
    }
    switch (op->kind) {
    case EP_OP_DISPATCH: (void)ep_ll_dispatch(&args, k->shared_bytes, NULL); break;
    case EP_OP_COMBINE:  (void)ep_ll_combine(&args, k->shared_bytes, NULL); break;
    default:             (void)ep_ll_release(&args, NULL);
    }
}

static void run_ht_net(struct cpu_kernels *k, const struct ep_op *op, const struct ep_ht_args *args)
{
    k->ht.base.state->net = (uint64_t)(uintptr_t)wire_net(k->wire);
    if (op->kind == EP_OP_DISPATCH)
        (void)ep_net_ht_dispatch(args, k->ht_shared_bytes, NULL);
    else if (op->kind == EP_OP_COMBINE)
        (void)ep_net_ht_combine(args, NULL);
}

static void run_ht(struct cpu_kernels *k, const struct ep_op *op)
{
    struct ep_ht_args args = k->ht.base;

    ep_ht_fill(&k->ht, NULL, op, &args);
    if (k->wire) {
        run_ht_net(k, op, &args);
        return;
    }
    switch (op->kind) {
    case EP_OP_DISPATCH: (void)ep_ht_dispatch(&args, k->ht_shared_bytes, NULL); break;
    case EP_OP_COMBINE:  (void)ep_ht_combine(&args, NULL); break;
    default:             break; /* released: nothing of a handle is a peer's */
    }
}

bool cpu_has_mode(uint32_t mode)
{
    return mode == EP_MODE_LL || mode == EP_MODE_HT;
}

void cpu_execute(struct cpu_rank *rank, const struct ep_op *op)
{
    const bool completes = op->kind == EP_OP_COMPLETE;

    if (completes)
        op = &rank->half[op->handle];
    else if (op->flags & EP_OP_SEND_ONLY)
        rank->half[op->handle] = *op;
    if (op->mode == EP_MODE_HT)
        run_ht(rank->kernels, op);
    else
        run_ll(rank->kernels, op, completes);
}
