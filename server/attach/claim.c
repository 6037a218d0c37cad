#include "attach_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "ep_clock.h"
#include "ep_cuda.h"
#include "ep_log.h"
#include "ep_utf8.h"

#define WORKER_NAME_MAX 63
/* Without a pidfd: how often to look whether the process is still there. */
#define LOOK_AGAIN_MS 20
/* A dying process closes its sockets a moment before it is gone: so long the end of a connection
 * waits to be the end of a process. */
#define DYING_MS 10

static void on_group_turn(const struct ep_group_turn *turn, void *user);

static struct ep_worker worker_of(const struct claim *claim)
{
    return (struct ep_worker){ .pid = claim->pid,
                               .uid = claim->uid,
                               .name = claim->worker,
                               .executor = claim->executor,
                               .ht_sms = claim->ht_sms,
                               .on_turn = claim->follow ? on_group_turn : NULL,
                               .after = claim->after };
}

/* ---- end ------------------------------------------------------------------------ */

static void on_handle_closed(uv_handle_t *handle)
{
    struct claim *claim = handle->data;
    struct ep_attach *attach = claim->attach;

    if (--claim->handles == 0) {
        free(claim->worker);
        free(claim->reason);
        free(claim);
    }
    attach_handle_closed(attach);
}

/* The membership has been released or was never there. */
static void free_claim(struct claim *claim)
{
    struct claim **link = &claim->attach->claims;

    while (*link != claim)
        link = &(*link)->next;
    *link = claim->next;
    if (claim->connection)
        connection_close(claim->connection);
    uv_close((uv_handle_t *)&claim->timer, on_handle_closed);
    if (claim->gone_open)
        uv_close((uv_handle_t *)&claim->gone, on_handle_closed);
    process_close(&claim->process); /* after uv_close has taken it out of the poll set */
}

static void release(struct claim *claim, const char *why, bool writer_alive)
{
    EP_INFO("attach", "rank released", EP_S("worker", claim->worker), EP_I("pid", claim->pid),
            EP_S("why", why), EP_B("writer_alive", writer_alive));
    ep_membership_release(claim->membership, why, writer_alive);
}

/* RESERVED, JOINING: whoever waits for a welcome is refused. */
static void end_unattached(struct claim *claim, ep_status status, const char *why)
{
    struct connection *joining = claim->joining;
    struct ep_error error = EP_ERROR_INIT;

    ep_error_set(&error, status, "%s", why);
    release(claim, why, false);
    free_claim(claim);
    if (joining)
        connection_joined(joining, &error);
}

/* ---- LEAVING: absent, and its process may still write the window -------------------- */

static void writer_gone(struct claim *claim)
{
    ep_membership_writer_gone(claim->membership);
    free_claim(claim);
}

/* kill -9, a crash, an exit without ep_leave(): a new worker may claim the rank right away. */
static void died(struct claim *claim)
{
    char reason[64];

    snprintf(reason, sizeof reason, "its worker died (pid %d)", (int)claim->pid);
    release(claim, reason, false);
    free_claim(claim);
}

static void died_unattached(struct claim *claim)
{
    char reason[64];

    snprintf(reason, sizeof reason, "its worker died before it attached (pid %d)", (int)claim->pid);
    end_unattached(claim, EP_ABORTED, reason);
}

static void on_process_event(uv_poll_t *poll, int status, int events)
{
    struct claim *claim = poll->data;

    (void)status;
    (void)events;
    if (!process_gone(&claim->process))
        return;
    switch (claim->state) {
    case CLAIM_RESERVED:
    case CLAIM_JOINING:
        died_unattached(claim);
        break;
    case CLAIM_ATTACHED:
        died(claim);
        break;
    case CLAIM_LEAVING:
        writer_gone(claim);
        break;
    }
}

static void on_look_again(uv_timer_t *timer)
{
    struct claim *claim = timer->data;

    if (process_gone(&claim->process))
        writer_gone(claim);
}

/* False: the kernel tells nobody when it ends. */
static bool watch_pidfd(struct claim *claim)
{
    if (claim->gone_open)
        return true;
    if (claim->process.pidfd < 0
        || uv_poll_init(claim->attach->loop, &claim->gone, claim->process.pidfd) != 0)
        return false;
    claim->gone_open = true;
    claim->gone.data = claim;
    claim->handles++;
    attach_handle_opened(claim->attach);
    uv_poll_start(&claim->gone, UV_READABLE, on_process_event);
    return true;
}

/* ATTACHED -> LEAVING */
static void leave(struct claim *claim, const char *why)
{
    uv_timer_stop(&claim->timer);
    claim->state = CLAIM_LEAVING;
    claim->process.watch_ns = ep_clock_ns();
    release(claim, why, true);
    if (!watch_pidfd(claim))
        uv_timer_start(&claim->timer, on_look_again, LOOK_AGAIN_MS, LOOK_AGAIN_MS);
}

void claim_bye(struct claim *claim, uint64_t turned_to)
{
    claim->connection = NULL;
    if (claim->state == CLAIM_LEAVING) {
        writer_gone(claim);
        return;
    }
    if (turned_to && claim->state == CLAIM_ATTACHED)
        ep_membership_turned(claim->membership, turned_to);
    claim->joining = NULL;
    release(claim, "its worker left", false);
    free_claim(claim);
}

static void on_still_there(uv_timer_t *timer)
{
    struct claim *claim = timer->data;

    leave(claim, claim->reason ? claim->reason : "its worker's connection closed");
}

void claim_disconnected(struct claim *claim, const char *why)
{
    char reason[192];

    claim->connection = NULL;
    if (claim->state == CLAIM_JOINING) {
        claim->joining = NULL;
        end_unattached(claim, EP_ABORTED, why);
        return;
    }
    if (claim->state == CLAIM_LEAVING)
        return; /* its process is being watched */
    if (process_gone(&claim->process)) {
        died(claim);
        return;
    }
    snprintf(reason, sizeof reason, "%s (pid %d)", process_dying(&claim->process) ? "its worker died" : why,
             (int)claim->pid);
    /* A process takes long to give up a GPU, and meanwhile its peers' kernels would wait for it. */
    if (claim->on_gpu || !watch_pidfd(claim)) {
        leave(claim, reason);
        return;
    }
    free(claim->reason);
    claim->reason = strdup(reason);
    if (!claim->detached) /* that timer is running and leads to the same end */
        uv_timer_start(&claim->timer, on_still_there, DYING_MS, 0);
}

void claim_abandon(struct claim *claim, const char *why)
{
    if (claim->state == CLAIM_LEAVING)
        ep_membership_writer_gone(claim->membership);
    else
        release(claim, why, false);
    free_claim(claim);
}

/* ---- what the group says ------------------------------------------------------------ */

/* Put off to the next turn of the loop: the group was in the middle of something. */
static void on_detached(uv_timer_t *timer)
{
    struct claim *claim = timer->data;

    if (claim->state == CLAIM_ATTACHED) {
        leave(claim, claim->reason ? claim->reason : "detached");
        return;
    }
    end_unattached(claim, EP_DETACHED, claim->reason ? claim->reason : "detached");
}

static void detach(struct claim *claim, const char *why)
{
    if (claim->detached || claim->state == CLAIM_LEAVING)
        return;
    claim->detached = true;
    free(claim->reason);
    claim->reason = strdup(why ? why : "detached");
    uv_timer_start(&claim->timer, on_detached, 0, 0);
}

static void on_group_event(enum ep_group_event event, uint32_t rank, uint64_t epoch, const char *text,
                           void *user)
{
    static const enum ep_attach_event wire[] = {
        [EP_GROUP_RANK_LOST] = EP_ATTACH_RANK_LOST, [EP_GROUP_RANK_JOINED] = EP_ATTACH_RANK_JOINED,
        [EP_GROUP_EPOCH] = EP_ATTACH_EPOCH,         [EP_GROUP_DRAINING] = EP_ATTACH_DRAINING,
        [EP_GROUP_DETACHED] = EP_ATTACH_DETACHED,
    };
    struct claim *claim = user;
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = wire[event];
    frame.rank = rank;
    frame.epoch = epoch;
    snprintf(frame.text, sizeof frame.text, "%.*s", (int)sizeof frame.text - 1, text ? text : "");
    if (claim->connection) {
        connection_event(claim->connection, &frame);
    } else if (event == EP_GROUP_DRAINING) {
        claim->draining = frame;
        claim->is_draining = true;
    }
    if (event == EP_GROUP_DETACHED)
        detach(claim, text);
}

void claim_welcomed(struct claim *claim, struct connection *connection)
{
    claim->connection = connection;
    if (claim->is_draining)
        connection_event(connection, &claim->draining);
    claim->is_draining = false;
}

static void on_group_turn(const struct ep_group_turn *turn, void *user)
{
    struct claim *claim = user;
    struct ep_attach_frame frame;

    if (!claim->connection)
        return; /* it has gone, which is about to be noticed */
    ep_attach_frame_init(&frame, turn->decided ? EP_ATTACH_TURN : EP_ATTACH_ASK);
    frame.epoch = turn->to;
    frame.value = turn->at;
    frame.count = turn->number;
    connection_tell(claim->connection, &frame);
}

/* ---- RESERVED -> ATTACHED ------------------------------------------------------------ */

/* In constant time, so that a ticket cannot be guessed byte by byte. */
static bool same_secret(const uint8_t *a, const uint8_t *b, size_t n)
{
    unsigned difference = 0;

    for (size_t i = 0; i < n; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}

struct claim *claim_find(struct ep_attach *attach, const uint8_t *ticket, pid_t pid, uid_t uid,
                         struct ep_error *error)
{
    struct claim *found = NULL;

    for (struct claim *c = attach->claims; c; c = c->next)
        if (same_secret(c->ticket, ticket, sizeof c->ticket))
            found = c;
    if (!found || found->detached) {
        ep_error_set(error, EP_UNAUTHENTICATED, "the ticket is unknown, used or expired: claim the rank again");
        return NULL;
    }
    if (found->state != CLAIM_RESERVED) {
        ep_error_set(error, EP_UNAUTHENTICATED, "the ticket has been used: a ticket is good for one connection");
        return NULL;
    }
    if (found->uid != uid || found->pid != pid) {
        ep_error_set(error, EP_PERMISSION_DENIED, "the ticket belongs to pid %d of uid %u, not to pid %d of uid %u",
                     (int)found->pid, found->uid, (int)pid, uid);
        return NULL;
    }
    return found;
}

static void on_attached(const struct ep_error *error, void *user)
{
    struct claim *claim = user;
    struct connection *connection = claim->joining;
    struct ep_membership_info info;

    if (error->status) {
        end_unattached(claim, error->status, error->text);
        return;
    }
    claim->joining = NULL;
    claim->state = CLAIM_ATTACHED;
    (void)watch_pidfd(claim); /* its connection does not close when another process has inherited it */
    ep_membership_info(claim->membership, &info);
    claim->on_gpu = info.device_uuid != NULL;
    EP_INFO("attach", "rank attached", EP_S("group", info.group), EP_U("rank", info.rank), EP_U("epoch", info.epoch),
            EP_S("worker", claim->worker), EP_I("pid", claim->pid));
    connection_joined(connection, error);
}

void claim_attach(struct claim *claim, struct connection *connection)
{
    struct ep_worker worker = worker_of(claim);

    if (claim->process.pidfd < 0)
        process_open(&claim->process, claim->pid, connection->fd);
    uv_timer_stop(&claim->timer);
    claim->state = CLAIM_JOINING;
    claim->joining = connection;
    ep_membership_attach(claim->membership, &worker, on_attached);
}

/* ---- RESERVED ------------------------------------------------------------------------ */

static void on_expired(uv_timer_t *timer)
{
    struct claim *claim = timer->data;

    release(claim, "its worker claimed it and did not attach in time", false);
    free_claim(claim);
}

static ep_status check_versions(const Ep__V1__ClaimRequest *request, struct ep_error *error)
{
    if (request->attach_version != EP_ATTACH_VERSION)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "attach_version is %u: this server speaks %u, so libepclient and ep-server "
                            "must be of matching releases",
                            request->attach_version, EP_ATTACH_VERSION);
    if (request->window_version != EP_WINDOW_VERSION)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "window_version is %u: this server uses %u, so libepclient and ep-server "
                            "must be of matching releases",
                            request->window_version, EP_WINDOW_VERSION);
    return EP_OK;
}

static ep_status check_token(const struct ep_attach *attach, const char *token, struct ep_error *error)
{
    if (!attach->token)
        return EP_OK;
    if (token[0] == '\0')
        return ep_error_set(error, EP_UNAUTHENTICATED, "token is empty: this server asks workers for one (--attach-token-file), "
                            "beside that of a group; give it by ep_client_options.token, or a file that "
                            "EP_CLIENT_TOKEN_FILE names");
    if (strlen(token) != strlen(attach->token)
        || !same_secret((const uint8_t *)token, (const uint8_t *)attach->token, strlen(token)))
        return ep_error_set(error, EP_UNAUTHENTICATED, "token is not the one that this server asks for "
                            "(--attach-token-file); give that by ep_client_options.token, or a file that "
                            "EP_CLIENT_TOKEN_FILE names");
    return EP_OK;
}

static ep_status check_request(const struct ep_attach *attach, const Ep__V1__ClaimRequest *request,
                               struct ep_error *error)
{
    const char *why = NULL;

    if (attach->closing)
        return ep_error_set(error, EP_UNAVAILABLE, "the server is stopping");
    if (check_token(attach, request->token, error) != EP_OK
        || check_versions(request, error) != EP_OK)
        return error->status;
    if (request->after && request->_rank_case != EP__V1__CLAIM_REQUEST___RANK_RANK)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "after is %llu: the rank must be given, the one that is held there",
                            (unsigned long long)request->after);
    if (request->_rank_case == EP__V1__CLAIM_REQUEST___RANK_RANK && request->rank >= EP_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank is %u: must be under %d", request->rank,
                            EP_MAX_RANKS);
    if (!request->after && ep_node_cordoned(attach->node, &why)) /* who is here already may follow its group */
        return ep_error_set(error, EP_FAILED_PRECONDITION, "node %s is drained: %s",
                            ep_node_name(attach->node), why && *why ? why : "no new workers");
    return EP_OK;
}

/* Does the ticket belong to the rank that the claim says is held? */
static bool shows_held(const struct ep_attach *attach, const Ep__V1__ClaimRequest *request, uid_t uid)
{
    struct ep_membership_info info;

    if (!request->after || request->after_ticket.len != EP_ATTACH_TICKET_BYTES)
        return false;
    for (const struct claim *c = attach->claims; c; c = c->next) {
        if (c->state != CLAIM_ATTACHED || c->uid != uid || !same_secret(c->ticket, request->after_ticket.data, sizeof c->ticket))
            continue;
        ep_membership_info(c->membership, &info);
        return info.epoch == request->after && info.rank == request->rank && !strcmp(info.group, request->group);
    }
    return false;
}

static struct claim *make_claim(struct ep_attach *attach, const Ep__V1__ClaimRequest *request, pid_t pid,
                                uid_t uid, struct ep_error *error)
{
    struct claim *claim = calloc(1, sizeof *claim);

    if (!claim) {
        ep_error_set(error, EP_NO_MEMORY, "no memory for a claim");
        return NULL;
    }
    claim->attach = attach;
    claim->pid = pid;
    claim->uid = uid;
    claim->executor = request->executor;
    claim->ht_sms = request->ht_sms;
    claim->follow = request->follow;
    claim->after = request->after;
    claim->process.pidfd = -1;
    claim->worker = strndup(request->worker, ep_utf8_fit(request->worker, WORKER_NAME_MAX));
    if (!claim->worker) {
        ep_error_set(error, EP_NO_MEMORY, "no memory for a claim");
    } else if (getrandom(claim->ticket, sizeof claim->ticket, 0) != (ssize_t)sizeof claim->ticket) {
        ep_error_errno(error, EP_IO, "random bytes for a ticket");
    } else {
        return claim;
    }
    free(claim->worker);
    free(claim);
    return NULL;
}

static void start_claim(struct claim *claim)
{
    struct ep_attach *attach = claim->attach;

    uv_timer_init(attach->loop, &claim->timer);
    claim->timer.data = claim;
    claim->handles = 1;
    attach_handle_opened(attach);
    uv_timer_start(&claim->timer, on_expired, attach->ticket_ms, 0);
    process_open(&claim->process, claim->pid, -1);
    (void)watch_pidfd(claim); /* a GPU's context takes long, and who waits for the rank is not to wait for the ticket too */
    claim->next = attach->claims;
    attach->claims = claim;
}

static ep_status claim_rank(struct ep_attach *attach, const Ep__V1__ClaimRequest *request, pid_t pid,
                            uid_t uid, struct claim **out, struct ep_error *error)
{
    bool given = request->_rank_case == EP__V1__CLAIM_REQUEST___RANK_RANK;
    struct claim *claim;
    struct ep_worker worker;

    if (check_request(attach, request, error) != EP_OK)
        return error->status;
    claim = make_claim(attach, request, pid, uid, error);
    if (!claim)
        return error->status;
    worker = worker_of(claim);
    worker.token = request->group_token;
    worker.holds = shows_held(attach, request, uid);
    start_claim(claim); /* first: the group may have something to say before it returns */
    if (ep_groups_claim(attach->groups, request->group, given ? (int32_t)request->rank : -1, &worker,
                        on_group_event, claim, &claim->membership, error) != EP_OK) {
        free_claim(claim);
        return error->status;
    }
    *out = claim;
    return EP_OK;
}

ep_status ep_attach_claim(struct ep_attach *attach, const Ep__V1__ClaimRequest *request, pid_t pid,
                          uid_t uid, Ep__V1__ClaimReply *reply, struct ep_error *error)
{
    struct ep_membership_info info;
    struct claim *claim = NULL;

    if (claim_rank(attach, request, pid, uid, &claim, error) != EP_OK) {
        attach->counters.refused++;
        return error->status;
    }
    ep_membership_info(claim->membership, &info);
    ep__v1__claim_reply__init(reply);
    reply->ticket = (ProtobufCBinaryData){ .data = claim->ticket, .len = sizeof claim->ticket };
    reply->ticket_ms = attach->ticket_ms;
    reply->socket = attach->listener.path;
    reply->rank = info.rank;
    reply->epoch = info.epoch;
    reply->spec = (Ep__V1__GroupSpec *)info.spec; /* only packed */
    reply->window_bytes = info.window_bytes;
    reply->backend = info.spec->backend;
    reply->executor = info.executor;
    reply->state_bytes = info.state_bytes;
    reply->sms = info.sms;
    reply->ht_sms = info.ht_sms;
    reply->mps = info.mps;
    if (info.device_uuid)
        reply->device_uuid = (ProtobufCBinaryData){ .data = (uint8_t *)(uintptr_t)info.device_uuid,
                                                    .len = EP_CUDA_UUID_BYTES };
    return EP_OK;
}
