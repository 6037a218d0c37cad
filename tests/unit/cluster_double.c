#include "cluster_double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SERVERS 8
#define TTL_MS  20000 /* longer than a busy machine stands still */

struct ep_cluster_watch {
    struct ep_cluster_watch *next;
    struct ep_cluster *cluster;
    ep_cluster_fn fn;
    void *user;
};

struct ep_cluster {
    struct world *world;
    struct ep_node *node;
    struct ep_groups *groups;
    struct ep_session *session;
    struct ep_election *election;
    struct ep_cluster_watch *watches;
    Ep__V1__NodeInfo info;
    struct ep_cluster_node entry;
    bool alive, crashed, held, offer_held, term_held, rebooted;
    const struct ep_cluster *parted; /* from that one */
    const char *unlearned;           /* a method */
};

struct message {
    struct message *next;
    struct ep_cluster *from, *to;
    const char *method; /* NULL: an answer */
    char kind[48];
    ProtobufCMessage *body; /* NULL: an error */
    struct ep_error error;
    ep_cluster_done_fn done;
    void *user;
};

struct world {
    uv_loop_t *loop;
    struct ep_store *store;
    struct ep_cluster *servers[SERVERS]; /* by name */
    size_t n;
    struct message *first, **last;
    struct message *kept, **kept_last;
    const char *kept_kind;
    uv_idle_t pump;
    world_step_fn on_step;
    void *user;
    bool lose, held;
};

static struct world *the_world; /* commits are seen by it */

static void *allocate(size_t size)
{
    void *memory = calloc(1, size);

    if (!memory)
        abort();
    return memory;
}

/* ---- messages ------------------------------------------------------------------------ */

static ProtobufCMessage *copy(const ProtobufCMessage *message)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = allocate(size + 1);
    ProtobufCMessage *made;

    protobuf_c_message_pack(message, bytes);
    made = protobuf_c_message_unpack(message->descriptor, NULL, size, bytes);
    free(bytes);
    return made;
}

static void step(struct world *world, const char *kind)
{
    if (world->on_step)
        world->on_step(world, kind, world->user);
}

static void on_pump(uv_idle_t *pump);

static void post(struct world *world, struct message *message)
{
    if (world->kept_kind && !strcmp(message->kind, world->kept_kind)) {
        *world->kept_last = message;
        world->kept_last = &message->next;
        return;
    }
    *world->last = message;
    world->last = &message->next;
    if (!world->held)
        uv_idle_start(&world->pump, on_pump);
}

void world_hold(struct world *world, bool held)
{
    world->held = held;
    if (held)
        uv_idle_stop(&world->pump);
    else
        uv_idle_start(&world->pump, on_pump);
}

void world_keep(struct world *world, const char *kind)
{
    world->kept_kind = kind;
}

size_t world_kept(const struct world *world)
{
    size_t n = 0;

    for (const struct message *message = world->kept; message; message = message->next)
        n++;
    return n;
}

void world_hand_over(struct world *world)
{
    struct message *message = world->kept, *next;

    world->kept = NULL;
    world->kept_last = &world->kept;
    world->kept_kind = NULL;
    for (; message; message = next) {
        next = message->next;
        message->next = NULL;
        post(world, message);
    }
}

/* The request, on its way back as its own answer. */
static void on_served(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct message *message = user;

    message->error = *error;
    message->body = reply ? copy(reply) : NULL;
    snprintf(message->kind, sizeof message->kind, "%s-reply", message->method);
    message->method = NULL;
    post(the_world, message);
}

static void refuse(struct message *message, ep_status status, const char *why)
{
    struct ep_error error = EP_ERROR_INIT;

    ep_error_set(&error, status, "%s", why);
    on_served(&error, NULL, message);
}

static void pong(struct message *message)
{
    static const struct ep_error none = EP_ERROR_INIT;
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;

    reply.node = (char *)(uintptr_t)message->to->entry.name;
    reply.boot_us = message->to->entry.boot + message->to->rebooted;
    on_served(&none, &reply.base, message);
}

static bool knows(const struct ep_cluster *cluster, const char *method)
{
    return !cluster->unlearned || strcmp(cluster->unlearned, method) != 0;
}

static void serve(struct message *message)
{
    struct ep_groups *groups = message->to->groups;
    ProtobufCMessage *body = message->body;

    message->body = NULL;
    if (!knows(message->to, message->method))
        refuse(message, EP_UNIMPLEMENTED, "this server has no such method");
    else if (!strcmp(message->method, "Prepare"))
        ep_groups_prepare(groups, (Ep__V1__PrepareRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Connect"))
        ep_groups_connect(groups, (Ep__V1__ConnectRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Abort"))
        ep_groups_abort(groups, (Ep__V1__AbortRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Close"))
        ep_groups_close_claims(groups, (Ep__V1__CloseRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Hold"))
        ep_groups_hold(groups, (Ep__V1__HoldRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Admit"))
        ep_groups_admit(groups, (Ep__V1__AdmitRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Leave"))
        ep_groups_left(groups, (Ep__V1__LeaveRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Turn"))
        ep_groups_turn(groups, (Ep__V1__TurnRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Reach"))
        ep_groups_reach(groups, (Ep__V1__ReachRequest *)body, on_served, message);
    else if (!strcmp(message->method, "Ping"))
        pong(message);
    else
        abort();
    protobuf_c_message_free_unpacked(body, NULL);
}

static void lose(struct message *message)
{
    if (message->body)
        protobuf_c_message_free_unpacked(message->body, NULL);
    message->body = NULL;
    ep_error_set(&message->error, EP_DEADLINE_EXCEEDED, "nobody has answered");
    message->done(&message->error, NULL, message->user);
    free(message);
}

void world_lose(struct world *world)
{
    world->lose = true;
}

static bool is_there(const struct ep_cluster *cluster)
{
    return cluster && cluster->groups && !cluster->crashed;
}

static bool are_parted(const struct message *message)
{
    return message->to && message->from && message->to->parted == message->from;
}

static void answer(struct message *message)
{
    if (!is_there(message->from) || are_parted(message) || (!message->body && !message->error.status))
        ep_error_set(&message->error, EP_UNAVAILABLE, "the call has ended");
    message->done(&message->error, message->error.status ? NULL : message->body, message->user);
    if (message->body)
        protobuf_c_message_free_unpacked(message->body, NULL);
    free(message);
}

static void on_pump(uv_idle_t *pump)
{
    struct world *world = pump->data;
    struct message *message = world->first;

    if (!message) {
        uv_idle_stop(pump);
        return;
    }
    world->lose = false;
    step(world, message->kind);
    world->first = message->next;
    message->next = NULL;
    if (!world->first)
        world->last = &world->first;
    if (world->lose)
        lose(message);
    else if (!message->method)
        answer(message);
    else if (is_there(message->to) && is_there(message->from) && !are_parted(message))
        serve(message);
    else if (message->body) {
        protobuf_c_message_free_unpacked(message->body, NULL);
        message->body = NULL;
        refuse(message, EP_UNAVAILABLE, "the server is not there");
    }
}

void ep_cluster_call(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                     const char *method, const ProtobufCMessage *request, uint32_t timeout_ms, ep_cluster_done_fn done,
                     void *user)
{
    struct message *message = allocate(sizeof *message);

    (void)service, (void)timeout_ms;
    message->from = cluster;
    message->method = method;
    message->done = done;
    message->user = user;
    message->body = copy(request);
    snprintf(message->kind, sizeof message->kind, "%s", method);
    for (size_t i = 0; i < cluster->world->n; i++)
        if (!strcmp(cluster->world->servers[i]->entry.name, node))
            message->to = cluster->world->servers[i];
    post(cluster->world, message);
}

void ep_cluster_call_anew(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                          const char *method, const ProtobufCMessage *request, uint32_t timeout_ms,
                          ep_cluster_done_fn done, void *user)
{
    ep_cluster_call(cluster, node, service, method, request, timeout_ms, done, user);
}

/* ---- commits of leaders ---------------------------------------------------------------- */

void __real_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                            ep_store_write_fn done, void *user);
void __wrap_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                            ep_store_write_fn done, void *user);

struct commit {
    struct ep_cluster *of;
    bool lost; /* its answer */
    ep_store_write_fn done;
    void *user;
};

static struct commit *last_commit; /* NULL: it is answered */

/* Who has crashed meanwhile hears nothing of it. */
static void on_committed(const struct ep_error *error, uint64_t revision, void *user)
{
    struct commit commit = *(struct commit *)user;
    struct ep_error lost = EP_ERROR_INIT;

    if (last_commit == user)
        last_commit = NULL;
    free(user);
    if (commit.of->crashed || commit.lost)
        error = (ep_error_set(&lost, EP_UNAVAILABLE, "the answer was lost"), &lost);
    commit.done(error, revision, commit.user);
}

void __wrap_ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                            ep_store_write_fn done, void *user)
{
    struct commit *commit;
    struct ep_cluster *leader = NULL;

    for (size_t i = 0; the_world && i < the_world->n; i++)
        if (ep_cluster_leads(the_world->servers[i]))
            leader = the_world->servers[i];
    if (!leader || !writes[n - 1].check_only) {
        __real_ep_store_commit(store, writes, n, done, user);
        return;
    }
    commit = allocate(sizeof *commit);
    *commit = (struct commit){ .of = leader, .done = done, .user = user };
    last_commit = commit;
    __real_ep_store_commit(store, writes, n, on_committed, commit);
    the_world->lose = false;
    step(the_world, "commit");
    if (last_commit)
        last_commit->lost = the_world->lose;
}

/* ---- events ------------------------------------------------------------------------------ */

static void tell(struct ep_cluster *to, enum ep_cluster_event event, const struct ep_cluster_node *node)
{
    for (struct ep_cluster_watch *watch = to->watches; watch; watch = watch->next)
        watch->fn(event, node, watch->user);
}

static void tell_all(struct world *world, enum ep_cluster_event event, const struct ep_cluster_node *node)
{
    for (size_t i = 0; i < world->n; i++)
        if (!world->servers[i]->crashed)
            tell(world->servers[i], event, node);
}

struct ep_cluster_watch *ep_cluster_watch(struct ep_cluster *cluster, ep_cluster_fn fn, void *user)
{
    struct ep_cluster_watch *watch = allocate(sizeof *watch);

    *watch = (struct ep_cluster_watch){ .next = cluster->watches, .cluster = cluster, .fn = fn, .user = user };
    cluster->watches = watch;
    return watch;
}

void ep_cluster_unwatch(struct ep_cluster_watch *watch)
{
    struct ep_cluster_watch **at = &watch->cluster->watches;

    while (*at != watch)
        at = &(*at)->next;
    *at = watch->next;
    free(watch);
}

/* ---- nodes --------------------------------------------------------------------------------- */

static const struct ep_cluster_node *look(struct ep_cluster *cluster)
{
    if (cluster->node && !cluster->offer_held) {
        if (cluster->info.name)
            ep_node_info_clear(&cluster->info);
        ep_node_info(cluster->node, &cluster->info);
        if (cluster->groups && cluster->alive)
            ep_groups_untell(cluster->groups, &cluster->info);
        cluster->entry.cordoned = ep_node_cordoned(cluster->node, NULL);
    }
    cluster->entry.alive = cluster->alive;
    return &cluster->entry;
}

const Ep__V1__NodeInfo *ep_cluster_info(const struct ep_cluster *cluster, const struct ep_cluster_node *node)
{
    for (size_t i = 0; i < cluster->world->n; i++)
        if (&cluster->world->servers[i]->entry == node)
            return &cluster->world->servers[i]->info;
    return NULL;
}

void world_hold_offer(struct ep_cluster *cluster, bool held)
{
    (void)look(cluster);
    cluster->offer_held = held;
}

size_t ep_cluster_count(const struct ep_cluster *cluster)
{
    return cluster->world->n;
}

const struct ep_cluster_node *ep_cluster_at(const struct ep_cluster *cluster, size_t index)
{
    return look(cluster->world->servers[index]);
}

const struct ep_cluster_node *ep_cluster_find(const struct ep_cluster *cluster, const char *name)
{
    for (size_t i = 0; i < cluster->world->n; i++)
        if (!strcmp(cluster->world->servers[i]->entry.name, name))
            return look(cluster->world->servers[i]);
    return NULL;
}

struct ep_store_write ep_cluster_mark(void)
{
    return (struct ep_store_write){ .key = "nodes/.mark", .value = "", .expected = EP_STORE_ANY };
}

bool ep_cluster_knows(const struct ep_cluster *cluster, uint64_t revision)
{
    (void)revision;
    return !cluster->held;
}

void world_hold_table(struct ep_cluster *cluster, bool held)
{
    cluster->held = held;
    if (!held)
        tell(cluster, EP_CLUSTER_MARK, NULL);
}

const char *ep_cluster_self(const struct ep_cluster *cluster)
{
    return cluster->entry.name;
}

void ep_cluster_refresh(struct ep_cluster *cluster)
{
    (void)cluster;
}

uint64_t ep_cluster_lost_ms(const struct ep_cluster *cluster)
{
    (void)cluster;
    return 3000;
}

/* ---- lead and session ------------------------------------------------------------------------ */

bool ep_cluster_leads(const struct ep_cluster *cluster)
{
    return cluster->election && ep_election_leads(cluster->election);
}

const char *ep_cluster_leader(const struct ep_cluster *cluster)
{
    return cluster->election ? ep_election_leader(cluster->election) : NULL;
}

uint64_t ep_cluster_term(const struct ep_cluster *cluster)
{
    return cluster->election && !cluster->term_held ? ep_election_term(cluster->election) : 0;
}

void world_hold_term(struct ep_cluster *cluster, bool held)
{
    cluster->term_held = held;
}

struct term_asked {
    ep_cluster_term_fn done;
    void *user;
};

static void on_term(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct term_asked asked = *(struct term_asked *)user;

    free(user);
    asked.done(error, n ? records[0].revision : 0, asked.user);
}

void ep_cluster_ask_term(struct ep_cluster *cluster, ep_cluster_term_fn done, void *user)
{
    struct term_asked *asked = allocate(sizeof *asked);

    *asked = (struct term_asked){ done, user };
    ep_store_list(cluster->world->store, "leader", on_term, asked);
}

struct ep_store_write ep_cluster_guard(const struct ep_cluster *cluster)
{
    const struct ep_store_write nobody = { .key = "leader", .expected = INT64_MAX, .check_only = true };

    return cluster->election ? ep_election_guard(cluster->election) : nobody;
}

struct ep_session *ep_cluster_session(const struct ep_cluster *cluster)
{
    return cluster->alive ? cluster->session : NULL;
}

static void on_election(struct ep_election *election, bool leading, void *user)
{
    (void)election, (void)leading;
    tell(user, EP_CLUSTER_LEADER, NULL);
}

static void on_session(const struct ep_error *error, void *user)
{
    struct ep_cluster *cluster = user;

    if (error->status)
        return;
    cluster->alive = true;
    cluster->election =
        ep_election_open(cluster->world->store, cluster->session, "leader", cluster->entry.name, on_election, cluster);
    tell(cluster, EP_CLUSTER_SESSION, NULL);
    tell_all(cluster->world, EP_CLUSTER_NODE_UP, look(cluster));
}

/* ---- the world ----------------------------------------------------------------------------------- */

struct world *world_open(uv_loop_t *loop, struct ep_store *store)
{
    struct world *world = allocate(sizeof *world);

    world->loop = loop;
    world->store = store;
    world->last = &world->first;
    world->kept_last = &world->kept;
    uv_idle_init(loop, &world->pump);
    world->pump.data = world;
    the_world = world;
    return world;
}

static void on_pump_closed(uv_handle_t *handle)
{
    free(handle->data);
}

void world_close(struct world *world)
{
    the_world = NULL;
    uv_close((uv_handle_t *)&world->pump, on_pump_closed);
}

static void insert(struct world *world, struct ep_cluster *cluster)
{
    size_t at = 0;

    while (at < world->n && strcmp(world->servers[at]->entry.name, cluster->entry.name) < 0)
        at++;
    memmove(world->servers + at + 1, world->servers + at, (world->n - at) * sizeof *world->servers);
    world->servers[at] = cluster;
    world->n++;
}

struct ep_cluster *world_add(struct world *world, struct ep_node *node)
{
    struct ep_cluster *cluster = allocate(sizeof *cluster);

    cluster->world = world;
    cluster->node = node;
    cluster->entry.name = ep_node_name(node);
    cluster->session = ep_session_open(world->store, TTL_MS, on_session, cluster);
    insert(world, cluster);
    return cluster;
}

void world_serve(struct ep_cluster *cluster, struct ep_groups *groups)
{
    cluster->groups = groups;
}

static void end_session(struct ep_cluster *cluster)
{
    const bool was = cluster->alive;

    cluster->alive = false;
    if (cluster->election)
        ep_election_close(cluster->election);
    cluster->election = NULL;
    if (cluster->session)
        ep_session_close(cluster->session);
    cluster->session = NULL;
    if (was)
        tell_all(cluster->world, EP_CLUSTER_NODE_DOWN, look(cluster));
}

void world_crash(struct ep_cluster *cluster)
{
    cluster->crashed = true;
    end_session(cluster);
}

void world_lose_session(struct ep_cluster *cluster)
{
    end_session(cluster);
    tell(cluster, EP_CLUSTER_SESSION, NULL);
    tell(cluster, EP_CLUSTER_LEADER, NULL);
}

void world_regain_session(struct ep_cluster *cluster)
{
    cluster->session = ep_session_open(cluster->world->store, TTL_MS, on_session, cluster);
}

void world_part(struct ep_cluster *one, struct ep_cluster *other, bool parted)
{
    one->parted = parted ? other : NULL;
    other->parted = parted ? one : NULL;
}

void world_unlearn(struct ep_cluster *cluster, const char *method)
{
    cluster->unlearned = method;
}

void world_reboot(struct ep_cluster *cluster, bool rebooted)
{
    cluster->rebooted = rebooted;
}

static void forget(struct message *messages, const struct ep_cluster *cluster)
{
    for (struct message *m = messages; m; m = m->next) {
        m->to = m->to == cluster ? NULL : m->to;
        m->from = m->from == cluster ? NULL : m->from;
    }
}

void world_remove(struct ep_cluster *cluster)
{
    struct world *world = cluster->world;
    size_t at = 0;

    end_session(cluster);
    while (world->servers[at] != cluster)
        at++;
    memmove(world->servers + at, world->servers + at + 1, (world->n - at - 1) * sizeof *world->servers);
    world->n--;
    forget(world->first, cluster);
    forget(world->kept, cluster);
    for (size_t i = 0; i < world->n; i++)
        if (world->servers[i]->parted == cluster)
            world->servers[i]->parted = NULL;
    if (cluster->info.name)
        ep_node_info_clear(&cluster->info);
    free(cluster);
}

void world_on_step(struct world *world, world_step_fn fn, void *user)
{
    world->on_step = fn;
    world->user = user;
}
