/* Communicators and what epochs have of them: see nccl.h. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "crew.h"
#include "ep_log.h"
#include "ep_thread.h"
#include "nccl_private.h"

#define LEAVE_MS 10000u
/* Nets that a communicator has in its life.  Signals are never set back, so each has its own, of those that NCCL has for a
 * communicator, and 2 MiB of GPU memory beside them. */
#define MOST_NETS 32u
#define ALL_SIGNALS 65536u /* NCCL_GIN_SIGNAL_POOL_SIZE */
_Static_assert((EP_NET_SIGNALS * EP_MAX_LL_BANKS + EP_NET_HT_SIGNALS) * EP_DEVICE_MAX_RANKS <= ALL_SIGNALS,
               "there are signals for a net");

static uint32_t most_nets(uint32_t ranks)
{
    const uint32_t have_signals = ALL_SIGNALS / ep_net_all_signals(ranks);

    return have_signals < MOST_NETS ? have_signals : MOST_NETS;
}

/* ---- communicators ---------------------------------------------------------------------------------- */

/* A rank's end. */
struct endpoint {
    struct hand hand;
    struct world *world;
    uint32_t rank, device;
    pthread_mutex_t lock; /* NCCL's calls; what follows */
    void *comm;
    uint32_t wires;
    uint64_t wire[MOST_NETS][EP_NET_WIRE_WORDS]; /* what nets had: closed with the communicator */
};

struct world {
    struct crew crew;
    const struct ep_cuda_api *api;
    char *group;
    uint8_t id[NCCL_ID_BYTES], tag[NCCL_TAG_BYTES];
    uint32_t ranks, n;

    struct world *next; /* under `worlds_lock`: with users, or parked */
    uint32_t users;     /* under it: nets that hold it */
    uint32_t nets;      /* under it: that were formed with it */
    bool distrusted;    /* under it */
    struct endpoint at[];
};

static pthread_mutex_t worlds_lock = PTHREAD_MUTEX_INITIALIZER; /* never held for long */
static struct world *worlds, *parked;
static uint32_t serving;                                    /* under it */
static pthread_mutex_t leaving = PTHREAD_MUTEX_INITIALIZER; /* held while one is left; taken before the other */

static void free_world(struct world *world)
{
    for (uint32_t i = 0; i < world->n; i++)
        pthread_mutex_destroy(&world->at[i].lock);
    crew_fini(&world->crew);
    free(world->group);
    free(world);
}

static void end_world(struct crew *crew)
{
    free_world((struct world *)crew);
}

static struct world *make_world(const struct ep_cuda_api *api, const char *group, const struct nccl_card *card,
                                uint32_t ranks, const struct nccl_rank *here, uint32_t n)
{
    struct world *world = calloc(1, sizeof *world + n * sizeof *world->at);

    if (!world)
        return NULL;
    world->group = strdup(group);
    if (!world->group) {
        free(world);
        return NULL;
    }
    crew_init(&world->crew, end_world);
    world->api = api;
    world->ranks = ranks;
    world->n = n;
    memcpy(world->id, card->id, sizeof world->id);
    memcpy(world->tag, card->tag, sizeof world->tag);
    for (uint32_t i = 0; i < n; i++) {
        world->at[i].world = world;
        world->at[i].rank = here[i].rank;
        world->at[i].device = here[i].device;
        pthread_mutex_init(&world->at[i].lock, NULL);
    }
    world->users = 1;
    pthread_mutex_lock(&worlds_lock);
    world->next = worlds;
    worlds = world;
    pthread_mutex_unlock(&worlds_lock);
    return world;
}

static bool has_ranks(const struct world *world, uint32_t ranks, const struct nccl_rank *here, uint32_t n)
{
    bool same = world->ranks == ranks && world->n == n;

    for (uint32_t i = 0; same && i < n; i++)
        same = world->at[i].rank == here[i].rank && world->at[i].device == here[i].device;
    return same;
}

/* One to go on with, held; NULL: none.  The newest is the first. */
static struct world *hold_world(const char *group, uint32_t ranks, const struct nccl_rank *here, uint32_t n)
{
    struct world *world;

    pthread_mutex_lock(&worlds_lock);
    for (world = worlds; world; world = world->next)
        if (!strcmp(world->group, group) && has_ranks(world, ranks, here, n))
            break;
    if (world && (world->distrusted || world->nets == 0 || world->nets >= most_nets(ranks)))
        world = NULL;
    if (world)
        world->users++;
    pthread_mutex_unlock(&worlds_lock);
    return world;
}

static void keep_world(struct world *world)
{
    pthread_mutex_lock(&worlds_lock);
    world->users++;
    pthread_mutex_unlock(&worlds_lock);
}

static void distrust(struct world *world)
{
    pthread_mutex_lock(&worlds_lock);
    world->distrusted = true;
    pthread_mutex_unlock(&worlds_lock);
}

/* ---- leaving them ------------------------------------------------------------------------------------ */

/* All of it is local. */
static void leave(struct hand *hand)
{
    struct endpoint *at = (struct endpoint *)hand;
    const struct ep_cuda_api *api = at->world->api;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = api->nccl_bind(at->device, &error), aborted = EP_OK;

    for (uint32_t i = 0; !status && i < at->wires; i++)
        status = nccl_device_close(api, at->comm, at->wire[i], &error);
    if (at->comm)
        aborted = nccl_comm_abort(at->comm, status ? NULL : &error);
    if (status || aborted)
        EP_WARN("node", "a communicator is not left in order", EP_U("rank", at->rank), EP_S("error", error.text));
}

static void leave_world(struct world *world)
{
    crew_expect(&world->crew, world->n);
    for (uint32_t i = 0; i < world->n; i++)
        if (!crew_set_to_work(&world->crew, &world->at[i].hand, leave))
            EP_ERROR("node", "no thread to leave a communicator: what it had is lost", EP_U("rank", world->at[i].rank));
    if (crew_await(&world->crew, LEAVE_MS))
        free_world(world);
    else
        EP_ERROR("node", "NCCL does not come back from leaving a communicator: what it had is lost");
}

/* One to leave now; NULL: none, or somebody serves. */
static struct world *take_parked(void)
{
    struct world *world = NULL;

    pthread_mutex_lock(&worlds_lock);
    if (serving == 0 && parked) {
        world = parked;
        parked = world->next;
    }
    pthread_mutex_unlock(&worlds_lock);
    return world;
}

/* One by one: who begins to serve waits for one at most. */
static void leave_parked(void)
{
    struct world *world;

    do {
        pthread_mutex_lock(&leaving);
        world = take_parked();
        if (world)
            leave_world(world);
        pthread_mutex_unlock(&leaving);
    } while (world);
}

/* As the last of its users it is parked, and left if nobody serves. */
static void drop_world(struct world *world)
{
    struct world **at = &worlds;
    bool last;

    if (!world)
        return;
    pthread_mutex_lock(&worlds_lock);
    last = --world->users == 0;
    if (last) {
        while (*at != world)
            at = &(*at)->next;
        *at = world->next;
        world->next = parked;
        parked = world;
    }
    pthread_mutex_unlock(&worlds_lock);
    if (last)
        leave_parked();
}

void nccl_serve_begins(void)
{
    pthread_mutex_lock(&worlds_lock);
    serving++;
    pthread_mutex_unlock(&worlds_lock);
    /* Whoever was leaving one looked before: it is waited for. */
    pthread_mutex_lock(&leaving);
    pthread_mutex_unlock(&leaving);
}

void nccl_serve_ends(void)
{
    pthread_mutex_lock(&worlds_lock);
    serving--;
    pthread_mutex_unlock(&worlds_lock);
    leave_parked();
}

/* ---- nets ------------------------------------------------------------------------------------------------ */

struct member {
    struct hand hand;
    struct nccl_net *net;
    struct endpoint *at;
    struct nccl_rank rank;
    struct ep_error error;
};

struct nccl_net {
    struct crew crew;
    const struct ep_cuda_api *api;
    char *group;
    struct world *world; /* held; before it is formed: to go on with */
    bool formed;
    uint32_t ranks, n;
    struct member member[];
};

static void free_net(struct nccl_net *net)
{
    drop_world(net->world);
    crew_fini(&net->crew);
    free(net->group);
    free(net);
}

static void end_net(struct crew *crew)
{
    free_net((struct nccl_net *)crew);
}

ep_status nccl_open(const struct ep_cuda_api *api, const char *group, uint32_t ranks, const struct nccl_rank *here, uint32_t n,
                    struct nccl_net **out, struct nccl_card *card, struct ep_error *error)
{
    struct nccl_net *net = calloc(1, sizeof *net + n * sizeof *net->member);
    char *name = strdup(group);

    if (!net || !name) {
        free(net);
        free(name);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a network of GPUs");
    }
    crew_init(&net->crew, end_net);
    net->api = api;
    net->group = name;
    net->ranks = ranks;
    net->n = n;
    net->world = hold_world(group, ranks, here, n);
    memset(card, 0, sizeof *card);
    if (net->world)
        memcpy(card->goes_on, net->world->tag, sizeof card->goes_on);
    *out = net;
    return EP_OK;
}

bool nccl_goes_on(const struct nccl_net *net, const struct nccl_card *card)
{
    return net->world && !memcmp(card->goes_on, net->world->tag, sizeof card->goes_on);
}

/* The endpoint is locked. */
static ep_status join(struct member *member)
{
    struct endpoint *at = member->at;
    struct world *world = at->world;
    struct ep_error *error = &member->error;
    ep_status status = EP_OK;

    if (!at->comm)
        status = nccl_comm_init(world->id, world->ranks, at->rank, &at->comm, error);
    if (!status && crew_is_abandoned(&member->net->crew)) /* and its memory may be gone */
        status = ep_error_set(error, EP_DEADLINE_EXCEEDED, "it took too long");
    if (!status)
        status = nccl_window_open(at->comm, &member->rank.memory, error);
    if (!status)
        status = nccl_device_open(world->api, at->comm, world->ranks, member->rank.wire, error);
    if (!status)
        memcpy(at->wire[at->wires++], member->rank.wire, sizeof member->rank.wire);
    return status;
}

static void form(struct hand *hand)
{
    struct member *member = (struct member *)hand;

    (void)ep_thread_runs_ops(); /* as the threads that NCCL makes here */
    if (member->net->api->nccl_bind(member->rank.device, &member->error))
        return;
    pthread_mutex_lock(&member->at->lock);
    (void)join(member);
    pthread_mutex_unlock(&member->at->lock);
}

/* Memory that the communicator has of the rank. */
static void give_back(struct hand *hand)
{
    struct member *member = (struct member *)hand;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = member->net->api->nccl_bind(member->rank.device, &error);

    pthread_mutex_lock(&member->at->lock);
    if (!status && member->rank.memory.window)
        status = nccl_window_close(member->at->comm, &member->rank.memory, &error);
    pthread_mutex_unlock(&member->at->lock);
    if (status)
        EP_WARN("node", "a communicator keeps memory of a rank", EP_U("rank", member->rank.rank),
                EP_S("error", error.text));
}

/* False: they were abandoned, and the net is lost. */
static bool run_members(struct nccl_net *net, void (*work)(struct hand *hand), uint32_t timeout_ms)
{
    crew_expect(&net->crew, net->n);
    for (uint32_t i = 0; i < net->n; i++)
        if (!crew_set_to_work(&net->crew, &net->member[i].hand, work))
            (void)ep_error_set(&net->member[i].error, EP_RESOURCE_EXHAUSTED, "no thread for NCCL");
    return crew_await(&net->crew, timeout_ms);
}

/* What it could go on with is of no use when there is another one. */
static ep_status choose_world(struct nccl_net *net, const struct nccl_card *first, const struct nccl_rank *here,
                              struct ep_error *error)
{
    if (first) {
        drop_world(net->world);
        net->world = make_world(net->api, net->group, first, net->ranks, here, net->n);
        if (!net->world)
            return ep_error_set(error, EP_NO_MEMORY, "no memory for a communicator");
    }
    pthread_mutex_lock(&worlds_lock);
    net->world->nets++;
    pthread_mutex_unlock(&worlds_lock);
    for (uint32_t i = 0; i < net->n; i++)
        net->member[i] = (struct member){ .net = net, .at = &net->world->at[i], .rank = here[i], .error = EP_ERROR_INIT };
    return EP_OK;
}

static ep_status first_error(const struct nccl_net *net, struct ep_error *error)
{
    for (uint32_t i = 0; i < net->n; i++) {
        const struct member *member = &net->member[i];

        if (member->error.status)
            return ep_error_set(error, member->error.status, "rank %u: %.340s", member->rank.rank, member->error.text);
    }
    return EP_OK;
}

ep_status nccl_form(struct nccl_net **net, const struct nccl_card *first, const struct nccl_rank *here, uint32_t timeout_ms,
                    struct ep_error *error)
{
    struct world *world;
    ep_status status = choose_world(*net, first, here, error);

    if (status)
        return status;
    world = (*net)->world;
    keep_world(world); /* the net may be gone, and its part of it */
    (*net)->formed = true;
    if (run_members(*net, form, timeout_ms)) {
        status = first_error(*net, error);
    } else {
        status = ep_error_set(error, EP_DEADLINE_EXCEEDED, "NCCL did not connect %u ranks within %u ms", world->ranks,
                              timeout_ms);
        *net = NULL;
    }
    if (status)
        distrust(world);
    drop_world(world);
    return status;
}

const struct nccl_rank *nccl_rank(const struct nccl_net *net, uint32_t rank)
{
    for (uint32_t i = 0; i < net->n; i++)
        if (net->member[i].rank.rank == rank)
            return &net->member[i].rank;
    return NULL;
}

void nccl_distrust(struct nccl_net *net)
{
    if (net && net->world)
        distrust(net->world);
}

void nccl_close(struct nccl_net *net)
{
    if (!net)
        return;
    if (!net->formed || run_members(net, give_back, LEAVE_MS))
        free_net(net);
    else
        EP_ERROR("node", "NCCL does not give back memory: it is lost, and so is what has to do with it");
}
