/*
 * High throughput: exact rows, and a gate that a late writer cannot pass.
 *
 * An op has a tag (ep_ht_tag): the number of the dispatch, and how many combines followed it.  Ranks that make the same
 * calls count alike.
 *
 *   dispatch   ask     each participant is told how many rows come to it and to each of its experts
 *              grant   each rank, when all have asked or will not, tells those that asked where their rows go there
 *              push    rows and headers, then the flag {tag, count}
 *   combine    ask     ranks that have rows of this one are told that the memory for partials is free
 *              push    partials, to those that have asked; then the flag
 *   close      nothing more is taken for this tag; whoever still writes is waited for
 *   lay out    (or sum)
 *
 * Who receives decides alone where rows go, as on GPUs (cuda/ht_device.cuh): nobody has to agree on who takes part.
 * A rank that joins begins with a dispatch; combines of earlier ones do not know it.
 *
 * Why notes are not overwritten too early.  An ask of s at d is written again by the next op of s.  In a dispatch s
 * goes on after all that it asked have answered, or when they are gone; a combine's ask is awaited by those only that
 * have rows of s, which s waits for.  Else s has given this op up, and d finds a later tag, or finds s closed: s is
 * out.
 * A grant is written again after the next ask.  A flag is: the next push waits for an ask or grant of the next op.
 *
 * Waits.  For an ask: whoever is waited for begins its op with it.  For a grant: it follows the asks.  For rows: they
 * follow grants.  Each ends when the peer is absent, has closed the tag, has gone on to a later one, or time is over.
 *
 * Over several nodes asks, grants and rows travel in frames (ht_remote.c), and a token once per node; what a node's
 * ranks have of a token is summed up there before it travels back (ht_node.c).  A rank that does not end an op well
 * tells the other nodes that it has closed it.
 *
 * A combine's partials lie at the source in the order of its lists: those of rank d behind those of ranks below d that
 * are on its node, and behind all of them the sums of other nodes, by node.
 */
#include "ht.h"

#include <string.h>

/* ---- asks --------------------------------------------------------------------------------- */

static uint64_t closed(const struct ep_host_team *team, uint32_t r)
{
    return __atomic_load_n(&team->ranks[r].ht_closed, __ATOMIC_SEQ_CST);
}

bool ht_left_out(const struct ep_host_team *team, uint32_t r, uint64_t tag)
{
    return ep_host_is_absent(team, r) ||
           __atomic_load_n(&team->ranks[r].joined_ht, __ATOMIC_SEQ_CST) > tag >> EP_HT_TAG_SHIFT;
}

bool ht_is_over(const struct ep_host_team *team, uint32_t r, uint64_t tag)
{
    return ht_left_out(team, r, tag) || closed(team, r) >= tag;
}

void ht_put_ask(struct ep_host_team *team, uint32_t d, uint32_t s, const struct ep_host_ask *ask)
{
    struct ep_host_rank *at = &team->ranks[d];
    struct ep_host_ask *slot = &at->asks[s];

    pthread_mutex_lock(&at->notes);
    slot->traits = ask->traits;
    slot->base = ask->base;
    if (ask->counts)
        memcpy(slot->counts, ask->counts, (1ull + team->map.limits.local_experts) * sizeof *slot->counts);
    __atomic_store_n(&slot->tag, ask->tag, __ATOMIC_SEQ_CST); /* partner: ht_ask_state */
    pthread_mutex_unlock(&at->notes);
    ep_host_wake(team, d);
}

/* Whoever has closed the op without this rank's answer has given it up. */
enum ht_state ht_ask_state(const struct ht *h, uint32_t s)
{
    bool over = ht_is_over(h->call->team, s, h->tag); /* first: an ask comes before */
    uint64_t tag = __atomic_load_n(&h->call->me->asks[s].tag, __ATOMIC_SEQ_CST);

    if (over || tag > h->tag)
        return HT_GONE;
    return tag == h->tag ? HT_THERE : HT_WAIT;
}

bool ht_fit(const struct ep_host_traits *a, const struct ep_host_traits *b)
{
    return a->dtype == b->dtype && a->scale_format == b->scale_format && a->routing == b->routing;
}

struct asked {
    const struct ht *h;
    uint32_t s;
    enum ht_state state;
};

static bool ask_settled(void *context)
{
    struct asked *a = context;

    a->state = ht_ask_state(a->h, a->s);
    return a->state != HT_WAIT;
}

ep_status ht_await_ask(struct ht *h, uint32_t s, enum ht_state *state)
{
    struct asked a = { .h = h, .s = s };

    switch (ep_host_wait_for(h->call, s, ask_settled, &a)) {
    case EP_HOST_REACHED: break;
    case EP_HOST_LATE: return ep_host_late(h->call, s, EP_WAIT_READY);
    case EP_HOST_DETACHED: return ep_host_detached(h->call);
    }
    *state = a.state;
    return EP_OK;
}

/* ---- gate and flags ------------------------------------------------------------------------ */

/* In a window: [R], EP_HT_FLAGS_BYTES apart. */
struct flag {
    uint64_t tag, count; /* the tag atomic, and written last */
};

static struct flag *flag_at(const struct ep_host_team *team, uint8_t *window, uint32_t from)
{
    return (struct flag *)(void *)(window + team->map.ht_flags + (uint64_t)from * EP_HT_FLAGS_BYTES);
}

bool ht_may_push(const struct ep_host_team *team, uint32_t d, uint64_t tag)
{
    return !ht_is_over(team, d, tag); /* partner: ht_close, leave */
}

uint8_t *ht_enter(struct ep_host_team *team, uint32_t from, uint32_t d, uint64_t tag)
{
    uint8_t *window = NULL;

    ep_host_gate_enter(&team->ranks[from], d);
    if (ht_may_push(team, d, tag))
        window = __atomic_load_n(&team->ranks[d].window, __ATOMIC_ACQUIRE);
    if (!window)
        ep_host_gate_leave(&team->ranks[from]);
    return window;
}

void ht_announce(struct ep_host_team *team, uint32_t from, uint32_t d, uint8_t *window, uint64_t tag, uint32_t count)
{
    struct flag *flag = flag_at(team, window, from);

    __atomic_store_n(&flag->count, count, __ATOMIC_RELAXED);
    /* release: what was pushed lies before; partner: peer_settled */
    __atomic_store_n(&flag->tag, tag, __ATOMIC_SEQ_CST);
    ep_host_wake(team, d);
}

struct awaited {
    const struct ht *h;
    uint32_t peer;
    uint64_t count;
    bool there;
};

static bool peer_settled(void *context)
{
    struct awaited *a = context;
    const struct ht *h = a->h;
    struct flag *flag = flag_at(h->call->team, h->call->me->window, a->peer);
    /* first: a peer writes its flag before it closes the op, or asks for the next one */
    bool over = ht_is_over(h->call->team, a->peer, h->tag) ||
                __atomic_load_n(&h->call->me->asks[a->peer].tag, __ATOMIC_SEQ_CST) > h->tag;

    /* acquire: what the peer pushed */
    a->there = __atomic_load_n(&flag->tag, __ATOMIC_SEQ_CST) == h->tag;
    a->count = __atomic_load_n(&flag->count, __ATOMIC_RELAXED);
    return a->there || over;
}

static ep_status await_flag(struct ht *h, uint32_t r, uint32_t expect)
{
    struct awaited a = { .h = h, .peer = r };

    switch (ep_host_wait_for(h->call, r, peer_settled, &a)) {
    case EP_HOST_REACHED: break;
    case EP_HOST_LATE: return ep_host_late(h->call, r, EP_WAIT_ARRIVAL);
    case EP_HOST_DETACHED: return ep_host_detached(h->call);
    }
    if (a.there && a.count == expect)
        ep_mask_set(h->arrived, r);
    return EP_OK;
}

ep_status ht_await_flags(struct ht *h, const uint64_t *from, const uint32_t *expect)
{
    for (uint32_t r = 0; r < ht_ranks(h); r++) {
        ep_status status;

        if (!ep_mask_test(from, r))
            continue;
        if (expect[r] == 0) {
            if (!ht_left_out(h->call->team, r, h->tag))
                ep_mask_set(h->arrived, r);
            continue;
        }
        status = await_flag(h, r, expect[r]);
        if (status != EP_OK)
            return status;
    }
    return EP_OK;
}

/* ---- gradients ------------------------------------------------------------------------------- */

void ht_write_grads(const struct ep_host_team *team, uint32_t rank, const struct ep_host_handle *handle,
                    const struct ep_op *op, uint32_t i, float *grads)
{
    const struct ep_host_arrived *arrived = handle->arrived + (uint64_t)i * team->map.limits.top_k;
    const float *given = op->row_grads.bytes
                             ? (const float *)(const void *)(team->ranks[rank].window + op->row_grads.offset)
                             : NULL;
    bool packed = op->layout == EP_LAYOUT_PACKED;

    for (uint32_t j = 0; j < team->map.limits.top_k; j++) {
        uint64_t at = packed ? arrived[j].row : (uint64_t)i * handle->top_k + j;
        bool here = given && j < handle->top_k && arrived[j].local >= 0;

        grads[j] = here ? given[at] : 0.0f;
    }
}

/* ---- the course of an op ---------------------------------------------------------------------- */

ep_status ht_rounds(struct ht *h, void (*round)(void *user, bool *done, uint32_t *blocked, ep_status *status),
                    bool (*may_go_on)(void *user), void *user, enum ep_wait_phase phase)
{
    for (;;) {
        ep_status status = EP_OK;
        uint32_t blocked = h->call->rank;
        bool done = true;

        round(user, &done, &blocked, &status);
        ep_host_flush(h->call->team);
        if (status != EP_OK || done)
            return status;
        switch (ep_host_wait_for(h->call, blocked, may_go_on, user)) {
        case EP_HOST_REACHED: break;
        case EP_HOST_LATE: return ep_host_late(h->call, blocked, phase);
        case EP_HOST_DETACHED: return ep_host_detached(h->call);
        }
    }
}

/* Other nodes are told when somebody may still wait for this rank. */
void ht_close(struct ht *h, ep_status status)
{
    struct ep_host_team *team = h->call->team;
    bool clean = status == EP_OK && memcmp(h->arrived, h->expected, sizeof h->arrived) == 0;

    __atomic_store_n(&h->call->me->ht_closed, h->tag, __ATOMIC_SEQ_CST); /* partner: ht_may_push */
    if (!clean) {
        ep_host_gate_drain(team, h->call->rank);
        ep_host_tell_state(team, h->call->rank);
    }
    ep_host_wake_all(team);
}

ep_status ht_finish(struct ht *h)
{
    ep_host_set_arrived(h->call, h->arrived);
    if (h->mismatched == ht_ranks(h))
        return EP_OK;
    return ep_host_fail(h->call, EP_FAILED_PRECONDITION,
                        "rank %u runs another op, dtype, scale format or dispatch as HT %llu: ranks must make "
                        "the same calls",
                        h->mismatched, (unsigned long long)h->number);
}
