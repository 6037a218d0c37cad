/* Unary calls of the loop's own: started there, ended there, nobody waits.  A channel lives until the last of its. */
#include <assert.h>
#include <stdlib.h>

#include "rpc_private.h"

/* The loop's thread owns it; gRPC holds its tag meanwhile. */
struct rpc_asked {
    struct rpc_tag tag;
    struct rpc_asked *next; /* of the channel's */
    struct ep_rpc_channel *channel;
    struct rpc_client_call call;
    grpc_byte_buffer *received;
    struct ep_error error; /* why it was not started */
    ep_rpc_done_fn done;
    void *user;
};

static void unlink_asked(struct rpc_asked *asked)
{
    struct rpc_asked **at = &asked->channel->asked;

    while (*at != asked)
        at = &(*at)->next;
    *at = asked->next;
}

static ProtobufCMessage *take_reply(struct rpc_asked *asked)
{
    ProtobufCMessage *reply = NULL;

    if (asked->error.status != EP_OK)
        return NULL;
    if (atomic_load(&asked->call.cancelled))
        ep_error_set(&asked->error, EP_CANCELLED, "%s: %s is asked no more", asked->call.path,
                     asked->channel->target);
    else
        (void)rpc_client_take_reply(&asked->call, asked->received, &reply, &asked->error);
    return reply;
}

/* After done, which may have closed the channel. */
static void free_asked(struct rpc_asked *asked)
{
    struct ep_rpc_channel *channel = asked->channel;

    unlink_asked(asked);
    if (asked->received)
        grpc_byte_buffer_destroy(asked->received);
    if (asked->call.channel)
        rpc_client_call_fini(&asked->call);
    free(asked);
    if (channel->closed && !channel->asked)
        rpc_channel_free(channel);
}

static void on_ended(struct rpc_tag *tag, bool ok)
{
    struct rpc_asked *asked = RPC_CONTAINER_OF(tag, struct rpc_asked, tag);
    struct ep_rpc *rpc = asked->channel->rpc;
    ProtobufCMessage *reply = take_reply(asked);

    (void)ok; /* the status tells */
    asked->done(&asked->error, reply, asked->user);
    if (reply)
        protobuf_c_message_free_unpacked(reply, NULL);
    free_asked(asked);
    rpc_let_loop(rpc);
}

static ep_status start(struct rpc_asked *asked, const ProtobufCServiceDescriptor *service, const char *method,
                       const struct ep_rpc_metadata *metadata, size_t n_metadata, const ProtobufCMessage *request,
                       uint32_t timeout_ms)
{
    ep_status status = rpc_client_call_init(&asked->call, asked->channel, service, method, metadata, n_metadata,
                                            timeout_ms, asked->channel->rpc->cq, &asked->error);

    if (status != EP_OK) {
        asked->call.channel = NULL; /* nothing of it is left */
        return status;
    }
    rpc_tag_arm(&asked->tag);
    return rpc_client_start_unary(&asked->call, request, &asked->received, &asked->tag, &asked->error);
}

void ep_rpc_ask(struct ep_rpc_channel *channel, const ProtobufCServiceDescriptor *service, const char *method,
                const struct ep_rpc_metadata *metadata, size_t n_metadata, const ProtobufCMessage *request,
                uint32_t timeout_ms, ep_rpc_done_fn done, void *user)
{
    struct rpc_asked *asked = calloc(1, sizeof *asked);

    assert(channel->rpc->loop && !channel->closed);
    if (!asked)
        abort(); /* there is nobody who could be told */
    asked->tag.fn = on_ended;
    asked->channel = channel;
    asked->done = done;
    asked->user = user;
    asked->next = channel->asked;
    channel->asked = asked;
    rpc_hold_loop(channel->rpc);
    if (start(asked, service, method, metadata, n_metadata, request, timeout_ms) != EP_OK)
        rpc_tag_post(channel->rpc, &asked->tag, false);
}

static void cancel_asked(struct ep_rpc_channel *channel)
{
    for (struct rpc_asked *asked = channel->asked; asked; asked = asked->next) {
        if (asked->error.status != EP_OK)
            continue; /* it was not started */
        atomic_store(&asked->call.cancelled, true);
        (void)grpc_call_cancel(asked->call.call, NULL);
    }
}

void ep_rpc_channel_close(struct ep_rpc_channel *channel)
{
    if (!channel)
        return;
    channel->closed = true;
    if (channel->asked)
        cancel_asked(channel); /* the last of them frees it */
    else
        rpc_channel_free(channel);
}
