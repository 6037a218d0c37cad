/* Attach: claims of local workers.  Served on unix sockets only. */
#include <inttypes.h>
#include <stdlib.h>

#include "api_private.h"
#include "ep_log.h"

/*
 * A rank whose last worker has just gone is free in a moment.  Its claim waits for that here, so that
 * a restarted worker need not ask again.
 */
#define CLAIM_WAIT_MS   2000
#define CLAIM_LOOK_MS   2  /* between two looks */
#define CLAIM_MARGIN_MS 50 /* of the caller's deadline, for the answer */

struct api_claim {
    struct api_claim *next;
    struct ep_api *api;
    struct ep_rpc_call *call;
    Ep__V1__ClaimRequest *request;
    struct ep_rpc_peer peer;
    uv_timer_t timer;
    uint64_t until; /* loop time, ms */
};

/* Who may not attach is told in the log, as who may not change anything. */
static void audit(const struct ep_rpc_call *call, const Ep__V1__ClaimRequest *request, const struct ep_error *error)
{
    if (error->status == EP_PERMISSION_DENIED || error->status == EP_UNAUTHENTICATED)
        EP_AUDIT("claim refused", EP_S("action", "attach.claim"), EP_S("target", request->group),
                 EP_S("by", ep_rpc_call_identity(call)), EP_S("status", ep_status_name(error->status)),
                 EP_S("reason", error->text));
}

/* False: not yet, and it may still wait. */
static bool try_claim(struct ep_api *api, struct ep_rpc_call *call, const Ep__V1__ClaimRequest *request,
                      const struct ep_rpc_peer *peer, bool may_wait)
{
    Ep__V1__ClaimReply reply = EP__V1__CLAIM_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = ep_attach_claim(api->options.attach, request, peer->pid, peer->uid, &reply, &error);

    if (status == EP_UNAVAILABLE && may_wait)
        return false;
    audit(call, request, &error);
    if (!api_failed(call, &error))
        ep_rpc_reply(call, &reply.base);
    return true;
}

static int32_t asked_rank(const Ep__V1__ClaimRequest *request)
{
    return request->_rank_case == EP__V1__CLAIM_REQUEST___RANK_RANK ? (int32_t)request->rank : -1;
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct api_claim *waiting = handle->data;

    ep__v1__claim_request__free_unpacked(waiting->request, NULL);
    free(waiting);
}

/* Out of the list; its memory goes when the timer is closed. */
static void forget(struct api_claim *waiting)
{
    struct api_claim **at = &waiting->api->claims;

    while (*at != waiting)
        at = &(*at)->next;
    *at = waiting->next;
    waiting->api->n_claims--;
    uv_close((uv_handle_t *)&waiting->timer, on_timer_closed);
}

static void look(struct api_claim *waiting, bool may_wait)
{
    ep_rpc_call_set_user(waiting->call, NULL); /* once answered, the call may close at any time */
    if (try_claim(waiting->api, waiting->call, waiting->request, &waiting->peer, may_wait))
        forget(waiting);
    else
        ep_rpc_call_set_user(waiting->call, waiting);
}

static void on_look(uv_timer_t *timer)
{
    struct api_claim *waiting = timer->data;
    struct ep_api *api = waiting->api;
    bool over = uv_now(api->options.loop) >= waiting->until;

    if (over ||
        ep_groups_rank_free(api->options.groups, waiting->request->group, asked_rank(waiting->request)))
        look(waiting, !over);
}

static uint64_t wait_ms(const struct ep_rpc_call *call)
{
    int64_t left = ep_rpc_call_remaining_ms(call);

    if (left > CLAIM_WAIT_MS)
        return CLAIM_WAIT_MS;
    return left > CLAIM_MARGIN_MS ? (uint64_t)(left - CLAIM_MARGIN_MS) : 0;
}

/* False: no memory to wait with. */
static bool wait_for_rank(struct ep_api *api, struct ep_rpc_call *call, const Ep__V1__ClaimRequest *request,
                          const struct ep_rpc_peer *peer)
{
    struct api_claim *waiting = calloc(1, sizeof *waiting);

    if (!waiting)
        return false;
    waiting->request = ep_message_copy(&request->base);
    waiting->api = api;
    waiting->call = call;
    waiting->peer = *peer;
    waiting->until = uv_now(api->options.loop) + wait_ms(call);
    waiting->next = api->claims;
    api->claims = waiting;
    api->n_claims++;
    uv_timer_init(api->options.loop, &waiting->timer); /* cannot fail */
    waiting->timer.data = waiting;
    uv_timer_start(&waiting->timer, on_look, CLAIM_LOOK_MS, CLAIM_LOOK_MS);
    ep_rpc_call_set_user(call, waiting);
    return true;
}

static bool has_place(const struct ep_api *api, struct ep_error *error)
{
    if (api->n_claims < api->options.max_claims)
        return true;
    ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                 "%" PRIu32 " claims wait for a rank here, as many as max-watches allows: try again", api->n_claims);
    return false;
}

static void claim(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__ClaimRequest *request = (const Ep__V1__ClaimRequest *)message;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_api *api = user;
    struct ep_rpc_peer peer;

    api->requests++;
    if (!ep_rpc_call_peer(call, &peer)) {
        ep_error_set(&error, EP_PERMISSION_DENIED, "ranks are claimed on the node's unix socket only");
        ep_rpc_fail(call, &error);
        return;
    }
    if (try_claim(api, call, request, &peer, !api->ending))
        return;
    if (!has_place(api, &error))
        ep_rpc_fail(call, &error);
    else if (!wait_for_rank(api, call, request, &peer))
        (void)try_claim(api, call, request, &peer, false);
}

static void claim_closed(struct ep_rpc_call *call, void *user)
{
    struct api_claim *waiting = ep_rpc_call_user(call);

    (void)user;
    if (waiting)
        forget(waiting);
}

void api_claims_end(struct ep_api *api)
{
    while (api->claims)
        look(api->claims, false);
}

static size_t free_ranks(struct ep_groups *groups, const char *group, size_t n_ranks, uint32_t *ranks)
{
    size_t n = 0;

    for (uint32_t i = 0; i < n_ranks; i++)
        if (ep_groups_rank_free(groups, group, (int32_t)i))
            ranks[n++] = i;
    return n;
}

static void describe(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__DescribeRequest *request = (const Ep__V1__DescribeRequest *)message;
    Ep__V1__DescribeReply reply = EP__V1__DESCRIBE_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_api *api = user;
    const Ep__V1__Group *group = ep_groups_get(api->options.groups, request->group, &error);

    api->requests++;
    if (!group || !group->status) {
        ep_rpc_fail(call, &error);
        return;
    }
    reply.free_ranks = calloc(group->status->n_ranks + 1, sizeof *reply.free_ranks);
    if (!reply.free_ranks) {
        ep_error_set(&error, EP_NO_MEMORY, "out of memory");
        ep_rpc_fail(call, &error);
        return;
    }
    reply.n_free_ranks =
        free_ranks(api->options.groups, group->name, group->status->n_ranks, reply.free_ranks);
    reply.spec = group->spec;
    reply.epoch = group->status->epoch;
    reply.backend = group->spec->backend;
    if (group->status->settled)
        reply.window_bytes = group->status->settled->window_bytes;
    ep_rpc_reply(call, &reply.base);
    free(reply.free_ranks);
}

/* Workers need not be operators: a rank is claimed by whoever was let in, and shows the group's token. */
const struct ep_rpc_handler api_attach_handlers[] = {
    { .method = "Claim", .for_viewers = true, .on_request = claim, .on_closed = claim_closed },
    { .method = "Describe", .for_viewers = true, .on_request = describe },
};
const size_t api_attach_handlers_count = sizeof api_attach_handlers / sizeof *api_attach_handlers;
