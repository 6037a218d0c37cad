/* To other nodes: what ranks of this one say of themselves, and places for frames.  See remote.c. */
#include "host_private.h"

static uint64_t *owed_to(const struct ep_host_team *team, uint32_t node)
{
    return team->owed + (uint64_t)node * EP_MASK_WORDS;
}

static bool is_other(const struct ep_host_team *team, uint32_t node) { return node != team->shape.own; }

/* ---- state -------------------------------------------------------------------------------- */

/* False: there is no room now. */
static bool send_state(struct ep_host_team *team, uint32_t node, uint32_t rank)
{
    const struct ep_host_rank *r = &team->ranks[rank];
    struct ep_host_frame *frame;
    struct ep_host_state *state;

    frame = ep_host_net_begin(team->net, node, sizeof *frame + sizeof *state);
    if (!frame)
        return ep_host_net_is_lost(team->net, node);
    *frame = (struct ep_host_frame){ .rank = rank };
    state = (struct ep_host_state *)(void *)(frame + 1);
    for (uint32_t b = 0; b < EP_MAX_LL_BANKS; b++)
        state->released[b] = __atomic_load_n(&r->released[b], __ATOMIC_SEQ_CST);
    state->ll_sent = __atomic_load_n(&r->ll_sent, __ATOMIC_SEQ_CST);
    state->ht_closed = __atomic_load_n(&r->ht_closed, __ATOMIC_SEQ_CST);
    ep_host_net_commit(team->net, node, EP_FRAME_STATE);
    ep_host_net_flush(team->net, node);
    return true;
}

/* False: some of it found no room. */
static bool try_owed(struct ep_host_team *team, uint32_t node)
{
    uint64_t *owed = owed_to(team, node);
    bool all = true;

    for (uint32_t w = 0; w < EP_MASK_WORDS; w++) {
        uint64_t ranks = __atomic_exchange_n(&owed[w], 0, __ATOMIC_SEQ_CST);

        for (uint64_t left = ranks; left; left &= left - 1)
            if (!send_state(team, node, w * 64 + (uint32_t)__builtin_ctzll(left))) {
                __atomic_fetch_or(&owed[w], left & -left, __ATOMIC_SEQ_CST);
                all = false;
            }
    }
    return all;
}

/* Either room that comes is seen here, or on_room sees what is owed (owed first, then room; seq_cst). */
static void tell_owed(struct ep_host_team *team, uint32_t node)
{
    while (!try_owed(team, node) &&
           ep_host_net_has_room(team->net, node, sizeof(struct ep_host_frame) + sizeof(struct ep_host_state)))
        ;
}

void ep_host_tell_owed(struct ep_host_team *team)
{
    for (uint32_t n = 0; n < team->shape.nodes; n++)
        if (is_other(team, n))
            tell_owed(team, n);
}

void ep_host_tell_state(struct ep_host_team *team, uint32_t rank)
{
    for (uint32_t n = 0; n < team->shape.nodes; n++)
        if (is_other(team, n)) {
            __atomic_fetch_or(&owed_to(team, n)[rank / 64], 1ull << rank % 64, __ATOMIC_SEQ_CST);
            tell_owed(team, n);
        }
}

/* ---- sending --------------------------------------------------------------------------------- */

struct placing {
    const struct ep_host_team *team;
    uint32_t node, bytes;
};

static bool has_room(void *context)
{
    const struct placing *p = context;

    return ep_host_net_has_room(p->team->net, p->node, p->bytes);
}

ep_status ep_host_place(struct ep_host_call *call, uint32_t peer, uint32_t bytes, struct ep_host_frame **frame)
{
    struct placing p = { .team = call->team, .node = call->team->shape.node[peer], .bytes = bytes };

    for (;;) {
        *frame = ep_host_net_begin(call->team->net, p.node, bytes);
        if (*frame || ep_host_net_is_lost(call->team->net, p.node))
            return EP_OK;
        ep_host_flush(call->team); /* what keeps the place may be our own */
        switch (ep_host_wait_for(call, peer, has_room, &p)) {
        case EP_HOST_REACHED: break;
        case EP_HOST_LATE: return ep_host_late(call, peer, EP_WAIT_CREDIT);
        case EP_HOST_DETACHED: return ep_host_detached(call);
        }
    }
}

void ep_host_flush(struct ep_host_team *team)
{
    for (uint32_t n = 0; n < team->shape.nodes; n++)
        if (is_other(team, n))
            ep_host_net_flush(team->net, n);
}
