/*
 * A team over several nodes on GPUs: what it has beside that of one node.
 *
 * Ranks of other nodes are numbers in the states of those that are here, and what is pushed for them goes to memory
 * beside each window and through NCCL (kernels/device_net.h).  The communicator, and a net of hosts that says
 * when a node is gone, come with the span and go with the team.
 *
 * A hold is a word in every state that kernels look at before they begin a dispatch: they wait there as long as
 * somebody holds.  Each hold has a timer on the loop's thread that ends it; the team may go before, on another thread.
 */
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "team_cuda.h"

struct hold {
    struct hold *next;
    uv_timer_t timer;
    struct cuda_team *team; /* under lock; NULL: it is over */
    uint64_t id;
};

struct cuda_span {
    struct ep_team_net *net;
    struct ep_host_watch *watch;
    struct lost_nodes *lost;
    struct hold *holds; /* under lock */
    uint64_t last_id;
    uint32_t node[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of holds: between timers and a team that goes */

static struct cuda_team *cuda(struct ep_team *team)
{
    return (struct cuda_team *)team;
}

/* ---- holds ------------------------------------------------------------------------- */

uint64_t cuda_span_held(const struct cuda_team *team)
{
    uint64_t n = 0;

    for (const struct hold *hold = team->span ? team->span->holds : NULL; hold; hold = hold->next)
        n++;
    return n;
}

static ep_status tell_held(struct cuda_team *team, struct ep_error *error)
{
    const uint64_t held = cuda_span_held(team);
    struct ep_error why = EP_ERROR_INIT;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < team->n; i++)
        if (cuda_is_here(team, i) && cuda_write(team, i, &cuda_state(team, i)->held, &held, sizeof held, &why) && !status)
            status = ep_error_set(error, why.status, "state of rank %u: %.340s", i, why.text);
    return status;
}

/* Under the lock. */
static void end_hold(struct hold *hold)
{
    struct cuda_team *team = hold->team;
    struct hold **at = &team->span->holds;
    struct ep_error error = EP_ERROR_INIT;

    while (*at != hold)
        at = &(*at)->next;
    *at = hold->next;
    hold->team = NULL;
    if (tell_held(team, &error))
        EP_ERROR("node", "a rank cannot be told that nobody holds it", EP_U("epoch", team->epoch),
                 EP_S("error", error.text));
}

static void on_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void on_time(uv_timer_t *timer)
{
    struct hold *hold = timer->data;

    pthread_mutex_lock(&lock);
    if (hold->team)
        end_hold(hold);
    pthread_mutex_unlock(&lock);
    uv_close((uv_handle_t *)timer, on_closed);
}

static void drop_hold(struct hold *hold)
{
    pthread_mutex_lock(&lock);
    end_hold(hold);
    pthread_mutex_unlock(&lock);
    uv_timer_stop(&hold->timer);
    uv_close((uv_handle_t *)&hold->timer, on_closed);
}

static struct hold *find_hold(const struct cuda_team *team, uint64_t id)
{
    struct hold *hold = team->span->holds;

    while (hold && hold->id != id)
        hold = hold->next;
    return hold;
}

static ep_status begin_hold(struct cuda_team *team, uint32_t hold_ms, struct hold **out, struct ep_error *error)
{
    struct hold *hold = calloc(1, sizeof *hold);
    ep_status status;

    if (!hold)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a hold");
    uv_timer_init(team->loop, &hold->timer); /* cannot fail */
    hold->timer.data = hold;
    uv_timer_start(&hold->timer, on_time, hold_ms, 0);
    pthread_mutex_lock(&lock);
    hold->team = team;
    hold->id = ++team->span->last_id;
    hold->next = team->span->holds;
    team->span->holds = hold;
    status = tell_held(team, error);
    pthread_mutex_unlock(&lock);
    if (status)
        drop_hold(hold);
    else
        *out = hold;
    return status;
}

/* Dekker, with begin_held() of the kernels: held is written, then begun is read. */
ep_status cuda_span_hold(struct ep_team *base, uint32_t hold_ms, uint64_t *id, struct ep_team_numbers *begun,
                         struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    struct hold *hold = NULL;
    ep_status status;

    if (!team->span)
        return ep_error_set(error, EP_UNIMPLEMENTED, "ranks of one node join without a hold");
    status = begin_hold(team, hold_ms, &hold, error);
    if (status)
        return status;
    status = cuda_read_begun(team, begun, error);
    if (status)
        drop_hold(hold);
    else
        *id = hold->id;
    return status;
}

/* What the others have of the rank comes before its own state, which has kernels of its begin. */
static ep_status take_in(struct cuda_team *team, uint32_t rank, const struct ep_team_numbers *from,
                         struct ep_error *error)
{
    ep_status status;

    team->from[rank] = from->ll;
    team->ht_from[rank] = from->ht;
    status = cuda_tell_from(team, rank, error);
    if (!status && cuda_is_here(team, rank))
        status = cuda_write_state(team, rank, error);
    return status;
}

ep_status cuda_span_admit(struct ep_team *base, uint64_t id, uint32_t rank, const struct ep_team_numbers *from,
                          struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    struct hold *hold = team->span ? find_hold(team, id) : NULL;
    ep_status status;

    if (!hold)
        return ep_error_set(error, EP_ABORTED, "rank %u joins too late: its hold has ended", rank);
    status = take_in(team, rank, from, error);
    if (status)
        base->ops->leave(base, rank);
    drop_hold(hold);
    return status;
}

void cuda_span_unhold(struct ep_team *base, uint64_t id)
{
    struct cuda_team *team = cuda(base);
    struct hold *hold = team->span ? find_hold(team, id) : NULL;

    if (hold)
        drop_hold(hold);
}

/* ---- the way there ------------------------------------------------------------------- */

void cuda_span_cut(struct ep_team *base, uint32_t node)
{
    struct cuda_team *team = cuda(base);

    if (team->span)
        ep_host_watch_cut(team->span->watch, node);
}

ep_status cuda_span_make_net(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    const struct nccl_rank *nccl = nccl_rank(team->span->net->gpus, rank);
    struct cuda_rank *r = &team->ranks[rank];
    struct ep_device_net *net;
    ep_status status;

    if (!nccl)
        return ep_error_set(error, EP_INTERNAL, "rank %u was not connected", rank);
    net = malloc(sizeof *net);
    if (!net)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for what rank %u knows of other nodes", rank);
    status = ep_net_describe(team->map, team->span->node, rank, net, error);
    if (status) {
        free(net);
        return status;
    }
    net->beside = nccl->memory.window;
    memcpy(net->wire, nccl->wire, sizeof net->wire);
    status = team->api->memory_create(r->ordinal, net->tables.bytes, &r->net, error);
    if (!status)
        status = cuda_write(team, rank, team->api->memory_at(r->net), net, sizeof *net, error);
    free(net);
    return status;
}

static struct ep_device_net *net_of(const struct cuda_team *team, uint32_t rank)
{
    return team->api->memory_at(team->ranks[rank].net);
}

static ep_status tell_window(struct cuda_team *team, uint32_t to, uint32_t of, struct ep_error *error)
{
    const uint64_t window = (uint64_t)(uintptr_t)team->ranks[of].window;
    const uint64_t at = (uint64_t)(uintptr_t)team->ranks[of].beside;
    struct ep_device_net *net = net_of(team, to);
    ep_status status = cuda_write(team, to, &net->at[of], &at, sizeof at, error);

    return status ? status : cuda_write(team, to, &net->windows[of], &window, sizeof window, error);
}

/* To all of this node. */
ep_status cuda_span_tell_window(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; !status && team->span && i < team->n; i++)
        if (cuda_is_here(team, i))
            status = tell_window(team, i, rank, error);
    return status;
}

void cuda_span_distrust(struct ep_team *base)
{
    struct cuda_team *team = cuda(base);

    if (team->span)
        nccl_distrust(team->span->net->gpus);
}

/* Losses are told from the watch's thread on.  The net of hosts is the watch's when this has gone well. */
ep_status cuda_span_open(struct cuda_team *team, const struct ep_team_span *options, struct ep_error *error)
{
    struct cuda_span *span = calloc(1, sizeof *span + team->n * sizeof *span->node);
    ep_status status;

    if (!span)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team of %u nodes", options->nodes);
    status = lost_nodes_open(team->loop, options, &span->lost, error);
    if (status) {
        free(span);
        return status;
    }
    status = ep_host_watch_start(options->net->host, lost_nodes_tell, span->lost, &span->watch, error);
    if (status) {
        lost_nodes_close(span->lost);
        free(span);
        return status;
    }
    span->net = options->net;
    memcpy(span->node, options->node, team->n * sizeof *span->node);
    team->span = span;
    return EP_OK;
}

static void close_watch(struct cuda_span *span)
{
    ep_host_watch_end(span->watch);
    span->net->host = NULL;
    lost_nodes_close(span->lost);
}

/* No hold was begun yet. */
void cuda_span_give_back(struct cuda_team *team)
{
    if (!team->span)
        return;
    close_watch(team->span);
    free(team->span);
    team->span = NULL;
}

void cuda_span_close(struct cuda_team *team)
{
    struct cuda_span *span = team->span;

    if (!span)
        return;
    pthread_mutex_lock(&lock);
    for (struct hold *hold = span->holds; hold; hold = hold->next)
        hold->team = NULL; /* its timer ends it */
    pthread_mutex_unlock(&lock);
    close_watch(span);
    ep_team_net_close(span->net);
    free(span);
    team->span = NULL;
}
