/* Frames on their way out.  See net.h. */
#include "net_private.h"

/* Puts that are over are given back, in order. */
static void reap(struct ep_host_net *net, struct outgoing *out)
{
    while (out->head != out->tail && ep_gin_put_test(net->comm, out->puts[out->head % PUTS]))
        out->head++;
}

/* What is skipped so that the frame lies in one piece. */
static uint32_t skip_for(const struct ep_host_net *net, const struct outgoing *out, uint32_t bytes)
{
    uint32_t left = net->ring_bytes - (uint32_t)(out->written % net->ring_bytes);

    return left < bytes ? left : 0;
}

/* Under the lock. */
static bool fits(struct ep_host_net *net, uint32_t node, uint32_t bytes)
{
    struct outgoing *out = &net->node[node].out;

    reap(net, out);
    if (out->tail - out->head + 2 > PUTS) { /* a flush makes two at most */
        __atomic_store_n(&net->crowded, 1, __ATOMIC_SEQ_CST); /* partner: room_grew */
        return false;
    }
    return out->written + skip_for(net, out, bytes) + bytes - room_of(net, node) <= net->ring_bytes;
}

bool ep_host_net_has_room(struct ep_host_net *net, uint32_t node, uint32_t bytes)
{
    bool room;

    if (ep_host_net_is_lost(net, node))
        return true;
    pthread_mutex_lock(&net->node[node].out.lock);
    room = fits(net, node, padded(bytes));
    pthread_mutex_unlock(&net->node[node].out.lock);
    return room;
}

static struct ep_host_frame_size *image_place(struct ep_host_net *net, uint32_t node)
{
    uint64_t at = net->node[node].out.written % net->ring_bytes;

    return (struct ep_host_frame_size *)(void *)(net->memory + image_at(net, node) + at);
}

void *ep_host_net_begin(struct ep_host_net *net, uint32_t node, uint32_t bytes)
{
    struct outgoing *out = &net->node[node].out;
    uint32_t skip;

    if (ep_host_net_is_lost(net, node))
        return NULL;
    pthread_mutex_lock(&out->lock);
    if (!fits(net, node, padded(bytes))) {
        pthread_mutex_unlock(&out->lock);
        return NULL;
    }
    skip = skip_for(net, out, padded(bytes));
    if (skip > 0)
        *image_place(net, node) = (struct ep_host_frame_size){ .bytes = skip };
    out->written += skip;
    out->begun = bytes;
    return image_place(net, node);
}

void ep_host_net_commit(struct ep_host_net *net, uint32_t node, uint32_t kind)
{
    struct outgoing *out = &net->node[node].out;

    *image_place(net, node) = (struct ep_host_frame_size){ .bytes = out->begun, .kind = kind };
    out->written += padded(out->begun);
    pthread_mutex_unlock(&out->lock);
}

void ep_host_net_cancel(struct ep_host_net *net, uint32_t node)
{
    pthread_mutex_unlock(&net->node[node].out.lock);
}

/* What lies in one piece, with the signal that says so. */
static void put_piece(struct ep_host_net *net, uint32_t node, uint64_t bytes)
{
    struct outgoing *out = &net->node[node].out;
    uint64_t at = out->put % net->ring_bytes;

    out->puts[out->tail++ % PUTS] =
        ep_gin_put(net->comm, &(struct ep_gin_put_args){ .rank = node,
                                                         .context = net->context,
                                                         .source = net->region,
                                                         .target = net->region,
                                                         .source_offset = image_at(net, node) + at,
                                                         .target_offset = ring_at(net, net->own) + at,
                                                         .bytes = bytes,
                                                         .signal = net->region,
                                                         .signal_offset = words_at(net->own) +
                                                                          offsetof(struct words, came),
                                                         .signal_op = NCCL_SIGNAL_ADD,
                                                         .signal_value = bytes });
    out->put += bytes;
}

void ep_host_net_flush(struct ep_host_net *net, uint32_t node)
{
    struct outgoing *out = &net->node[node].out;
    uint64_t left;

    pthread_mutex_lock(&out->lock);
    while ((left = out->written - out->put) > 0) {
        uint64_t piece = net->ring_bytes - out->put % net->ring_bytes;

        put_piece(net, node, left < piece ? left : piece);
    }
    pthread_mutex_unlock(&out->lock);
    ep_gin_progress(net->comm);
    if (__atomic_load_n(&net->comm->active, __ATOMIC_RELAXED) != 0)
        wake(net); /* it moves the rest */
}
