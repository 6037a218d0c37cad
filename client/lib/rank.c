/* What holds for a rank whoever runs its ops: its beginning and end, waiting for it. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client_private.h"

/* ep_leave: what a running op may take beyond the group's bound, and again when nothing waits any more. */
#define LEAVE_SLACK_MS 1000u

/* ---- memory ---------------------------------------------------------------------- */

struct ep_rank *rank_new(struct ep_client *client)
{
    struct ep_rank *rank = calloc(1, sizeof *rank);

    if (!rank)
        return NULL;
    rank->client = client;
    rank->socket = -1;
    rank->event_fd = -1;
    pthread_mutex_init(&rank->turn.lock, NULL);
    return rank;
}

void rank_free(struct ep_rank *rank)
{
    if (rank->executor)
        rank->executor->detach(rank);
    if (rank->event_fd >= 0)
        events_fini(rank);
    if (rank->socket >= 0)
        close(rank->socket);
    arena_fini(&rank->arena);
    ep_placement_free(&rank->shape.placement);
    free(rank->local_to_expert);
    free(rank->homes);
    pthread_mutex_destroy(&rank->turn.lock);
    free(rank);
}

/* ---- windows --------------------------------------------------------------------- */

ep_status rank_check_window(const struct ep_rank *rank, uint32_t whose, const struct ep_window_head *head,
                            struct ep_error *error)
{
    if (head->magic != EP_WINDOW_MAGIC || head->version != EP_WINDOW_VERSION)
        return ep_error_set(error, EP_PROTOCOL,
                            "the window of rank %u has version %u: this libepclient knows %u, they must be of "
                            "matching releases",
                            whose, head->magic == EP_WINDOW_MAGIC ? head->version : 0, EP_WINDOW_VERSION);
    if (head->rank != whose || head->epoch != rank->epoch
        || memcmp(&head->limits, &rank->shape.map.limits, sizeof head->limits) != 0)
        return ep_error_set(error, EP_PROTOCOL, "the window of rank %u is that of another rank, epoch or group",
                            whose);
    return EP_OK;
}

/* ---- leave ----------------------------------------------------------------------- */

/* The window is unmapped: its memory may be used again at once.  Whoever has missed the boundary owes its peers ops. */
static void say_bye(const struct ep_rank *rank)
{
    const bool done = rank->turn.over && !rank->turn.missed;
    struct ep_attach_frame bye;

    ep_attach_frame_init(&bye, EP_ATTACH_BYE);
    bye.epoch = done ? rank->turn.epoch : 0;
    (void)ep_attach_send(rank->socket, &bye, -1, NULL);
}

/* Waits for what runs; what does not end by itself is cut off from its peers and waited for again. */
static bool come_to_rest(struct ep_rank *rank)
{
    const uint64_t bound = (uint64_t)rank->shape.timeout_ms + LEAVE_SLACK_MS;
    const bool over = rank->executor->drain(rank, ep_clock_ns() + bound * EP_NS_PER_MS);

    monitor_remove(rank);
    if (over)
        return true;
    rank->executor->cut(rank);
    return rank->executor->drain(rank, ep_clock_ns() + LEAVE_SLACK_MS * EP_NS_PER_MS);
}

void rank_finish(struct ep_rank *rank)
{
    rank->executor->detach(rank);
    say_bye(rank);
    handles_free(rank);
    rank_free(rank);
}

void ep_leave(ep_rank *rank)
{
    if (!rank)
        return;
    follow_end(rank);
    if (come_to_rest(rank)) {
        if (!follow_finishes(rank))
            rank_finish(rank);
        return;
    }
    rank->executor = NULL; /* what still runs keeps its memory until the process ends */
    handles_free(rank);
    rank_free(rank);
}

/* ---- the calls ------------------------------------------------------------------- */

ep_status ep_sync(ep_rank *rank, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!rank)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
    if (rank->executor->wait(rank, NULL, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (tell_first_failure(rank, error) != EP_OK)
        return error->status;
    return rank_lost(rank, error);
}

ep_status ep_handle_wait(ep_handle *handle, int32_t timeout_ms)
{
    struct ep_error *error = last_error();

    if (!handle)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "handle is NULL");

    struct ep_rank *rank = handle->rank;

    if (rank->executor->wait(rank, handle, deadline_after(timeout_ms), true, error) != EP_OK)
        return error->status;
    if (tell_failure(&handle->failure, error) != EP_OK)
        return error->status;
    return rank_lost(rank, error);
}

ep_status ep_rank_describe(const ep_rank *rank, ep_rank_info *info)
{
    ep_rank_info full = { .size = sizeof full };

    if (!rank)
        return ep_error_set(last_error(), EP_INVALID_ARGUMENT, "rank is NULL");
    full.rank = rank->rank;
    full.local_experts = rank->shape.placement.local_experts[rank->rank];
    full.local_to_expert = rank->local_to_expert;
    full.n_homes = rank->n_homes;
    full.homes = rank->homes;
    full.backend = rank->executor->backend;
    full.executor = rank->executor->kind;
    full.ll_begun = rank->ll_begun;
    full.ht_begun = rank->ht_begun;
    full.ht_sms = rank->ht_sms_at_most;
    if (rank->device)
        memcpy(full.device_uuid, rank->device->uuid, sizeof full.device_uuid);
    shape_info(&rank->shape, rank->epoch, &full.group);
    return give_struct("ep_rank_info", info, &full, sizeof full);
}
