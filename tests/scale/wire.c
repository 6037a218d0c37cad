/* Calls between the servers of the simulation: the same messages, packed and unpacked, in the order of the calls. */
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "sim.h"

struct method {
    const char *name;
    const ProtobufCMessageDescriptor *request, *reply;
    void (*serve)(const struct sim_node *node, const ProtobufCMessage *request, ep_cluster_done_fn done, void *user);
};

#define SERVE(name, Request)                                                                                          \
    static void serve_##name(const struct sim_node *node, const ProtobufCMessage *request, ep_cluster_done_fn done,    \
                             void *user)                                                                               \
    {                                                                                                                  \
        ep_groups_##name(node->groups, (const Ep__V1__##Request *)request, done, user);                                \
    }
SERVE(prepare, PrepareRequest)
SERVE(connect, ConnectRequest)
SERVE(abort, AbortRequest)
SERVE(close_claims, CloseRequest)
SERVE(hold, HoldRequest)
SERVE(admit, AdmitRequest)
SERVE(left, LeaveRequest)
SERVE(turn, TurnRequest)
SERVE(reach, ReachRequest)

static void serve_ping(const struct sim_node *node, const ProtobufCMessage *request, ep_cluster_done_fn done, void *user)
{
    static const struct ep_error none = EP_ERROR_INIT;
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;

    (void)request;
    reply.boot_us = ep_node_boot(node->node);
    done(&none, &reply.base, user);
}

static const struct method methods[] = {
    { "Ping", &ep__v1__ping_request__descriptor, &ep__v1__ping_reply__descriptor, serve_ping },
    { "Prepare", &ep__v1__prepare_request__descriptor, &ep__v1__prepare_reply__descriptor, serve_prepare },
    { "Connect", &ep__v1__connect_request__descriptor, &ep__v1__connect_reply__descriptor, serve_connect },
    { "Abort", &ep__v1__abort_request__descriptor, &ep__v1__abort_reply__descriptor, serve_abort },
    { "Close", &ep__v1__close_request__descriptor, &ep__v1__close_reply__descriptor, serve_close_claims },
    { "Hold", &ep__v1__hold_request__descriptor, &ep__v1__hold_reply__descriptor, serve_hold },
    { "Admit", &ep__v1__admit_request__descriptor, &ep__v1__admit_reply__descriptor, serve_admit },
    { "Leave", &ep__v1__leave_request__descriptor, &ep__v1__leave_reply__descriptor, serve_left },
    { "Turn", &ep__v1__turn_request__descriptor, &ep__v1__turn_reply__descriptor, serve_turn },
    { "Reach", &ep__v1__reach_request__descriptor, &ep__v1__reach_reply__descriptor, serve_reach },
};

struct packet {
    const struct method *method;
    uint32_t from, to;
    uint8_t *bytes; /* NULL: an error */
    size_t size;
    struct ep_error error;
    bool alone; /* over a connection of its own */
    ep_cluster_done_fn done;
    void *user;
};

static const struct method *find(const char *name)
{
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (!strcmp(methods[i].name, name))
            return &methods[i];
    sim_fail("the simulation does not carry %s", name);
}

static void pack(struct packet *packet, const ProtobufCMessage *message)
{
    packet->size = protobuf_c_message_get_packed_size(message);
    packet->bytes = sim_allocate(packet->size, 1);
    protobuf_c_message_pack(message, packet->bytes);
    tally_call(packet->size);
}

/* The message is gone with the next one. */
static const ProtobufCMessage *unpack(struct packet *packet, const ProtobufCMessageDescriptor *type)
{
    static struct arena memory = { .room = 1u << 20 };
    const ProtobufCMessage *message;

    arena_reset(&memory);
    message = packet->bytes ? arena_unpack(&memory, type, packet->size, packet->bytes) : NULL;
    if (packet->bytes && !message)
        sim_fail("%s: a message cannot be read", packet->method->name);
    free(packet->bytes);
    packet->bytes = NULL;
    return message;
}

static void answer(void *user)
{
    struct packet *packet = user;

    if (packet->alone)
        tally_closed(&sim.node[packet->from]);
    packet->done(&packet->error, unpack(packet, packet->method->reply), packet->user);
    free(packet);
}

static void on_served(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct packet *packet = user;

    packet->error = *error;
    if (reply)
        pack(packet, reply);
    sim_later(answer, packet);
}

static void deliver(void *user)
{
    struct packet *packet = user;
    const ProtobufCMessage *request = unpack(packet, packet->method->request);
    struct ep_error error = EP_ERROR_INIT;

    if (sim.node[packet->from].away || sim.node[packet->to].away) {
        ep_error_set(&error, EP_UNAVAILABLE, "node %s is lost", sim.node[packet->to].name);
        on_served(&error, NULL, packet);
    } else {
        packet->method->serve(&sim.node[packet->to], request, on_served, packet);
    }
}

static void refuse(struct packet *packet, const char *node)
{
    ep_error_set(&packet->error, EP_UNAVAILABLE, "node %s is not there at present", node);
    sim_later(answer, packet);
}

static void carry(struct ep_cluster *cluster, const char *node, const char *method, const ProtobufCMessage *request,
                  bool alone, ep_cluster_done_fn done, void *user)
{
    const struct ep_cluster_node *known = ep_cluster_find(cluster, node);
    struct packet *packet = sim_allocate(1, sizeof *packet);

    *packet = (struct packet){
        .method = find(method), .error = EP_ERROR_INIT, .alone = alone, .done = done, .user = user
    };
    packet->from = sim_find(ep_cluster_self(cluster))->index;
    if (alone)
        tally_opened(&sim.node[packet->from]);
    if (!known || !known->alive || sim.node[packet->from].away) {
        refuse(packet, node);
        return;
    }
    packet->to = sim_find(node)->index;
    pack(packet, request);
    sim_later(deliver, packet);
}

typedef void call_fn(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                     const char *method, const ProtobufCMessage *request, uint32_t timeout_ms, ep_cluster_done_fn done,
                     void *user);
call_fn __wrap_ep_cluster_call, __wrap_ep_cluster_call_anew;

void __wrap_ep_cluster_call(struct ep_cluster *cluster, const char *node, const ProtobufCServiceDescriptor *service,
                            const char *method, const ProtobufCMessage *request, uint32_t timeout_ms,
                            ep_cluster_done_fn done, void *user)
{
    (void)service, (void)timeout_ms;
    carry(cluster, node, method, request, false, done, user);
}

void __wrap_ep_cluster_call_anew(struct ep_cluster *cluster, const char *node,
                                 const ProtobufCServiceDescriptor *service, const char *method,
                                 const ProtobufCMessage *request, uint32_t timeout_ms, ep_cluster_done_fn done, void *user)
{
    (void)service, (void)timeout_ms;
    carry(cluster, node, method, request, true, done, user);
}
