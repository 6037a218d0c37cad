/*
 * Ranks of other nodes.
 *
 * What such a rank does here, the net's thread does for it (its stand-in): it pushes into windows through the gate that
 * ranks of this node use, under the remote rank's own entry in the team, which nobody else touches.  So ranks of this
 * node see it as they see each other, and nobody writes late: whoever takes a window away (leave, close) says so and
 * then waits until no rank is announced, and a stand-in is announced like any other.  It never waits with a window
 * open, nor at all, so that wait is as short as for ranks here.
 *
 * Frames of a node come in the order in which they left it, so what a rank says of itself lies behind what it sent
 * before.  A node that is lost is worked off to its last frame; then its ranks leave, and no stand-in writes for them
 * any more, because that is this thread.
 */
#include "host_private.h"

#include <string.h>

/* ---- what comes: the net's thread ---------------------------------------------------------------- */

static void raise_to(uint64_t *word, uint64_t value)
{
    if (__atomic_load_n(word, __ATOMIC_RELAXED) < value) /* one writer: this thread, or admit while there is none */
        __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static void take_state(struct ep_host_team *team, const struct ep_host_frame *head, const uint8_t *payload)
{
    struct ep_host_rank *r = &team->ranks[head->rank];
    struct ep_host_state state;

    memcpy(&state, payload, sizeof state);
    pthread_mutex_lock(&team->mutex); /* admit writes these too */
    for (uint32_t b = 0; b < EP_MAX_LL_BANKS; b++)
        raise_to(&r->released[b], state.released[b]);
    raise_to(&r->ll_sent, state.ll_sent);
    raise_to(&r->ht_closed, state.ht_closed);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
}

bool ep_host_remote_frame(struct ep_host_team *team, uint32_t node, const void *frame, uint32_t bytes)
{
    const uint8_t *payload = (const uint8_t *)frame + sizeof(struct ep_host_frame);
    struct ep_host_frame head;

    if (!ep_host_frame_judge(&team->shape, node, frame, bytes, &head))
        return false;
    switch (head.size.kind) {
    case EP_FRAME_STATE: take_state(team, &head, payload); return true;
    case EP_FRAME_LL_ROWS: return ep_host_ll_take_rows(team, &head, payload);
    case EP_FRAME_LL_PARTIALS: return ep_host_ll_take_partials(team, &head, payload);
    case EP_FRAME_HT_ASK: return ep_host_ht_take_ask(team, &head, payload);
    case EP_FRAME_HT_GRANT: ep_host_ht_take_grants(team, &head, payload); return true;
    case EP_FRAME_HT_ROWS: return ep_host_ht_take_rows(team, &head, payload);
    default: return ep_host_ht_take_partials(team, &head, payload);
    }
}

static bool on_frame(void *user, uint32_t node, const void *frame, uint32_t bytes)
{
    return ep_host_remote_frame(user, node, frame, bytes);
}

static void on_room(void *user)
{
    struct ep_host_team *team = user;

    ep_host_tell_owed(team);
    ep_host_wake_all(team);
}

static void on_lost(void *user, uint32_t node, const char *why)
{
    struct ep_host_team *team = user;

    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        if (team->node[r] == node)
            ep_host_team_leave(team, r);
    if (team->on_lost)
        team->on_lost(node, why, team->user);
}

void ep_host_team_cut(struct ep_host_team *team, uint32_t node)
{
    if (team->net && node != team->shape.own)
        ep_host_net_cut(team->net, node);
}

ep_status ep_host_remote_start(struct ep_host_team *team, const struct ep_host_span *span, struct ep_error *error)
{
    const struct ep_host_net_events events = { .frame = on_frame, .room = on_room, .lost = on_lost, .user = team };
    ep_status status;

    team->on_lost = span->on_lost;
    team->user = span->user;
    team->net = span->net;
    status = ep_host_net_start(span->net, &events, error);
    if (status != EP_OK)
        team->net = NULL; /* still the caller's */
    return status;
}
