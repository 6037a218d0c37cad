/* The net's thread: what comes, what is told back, who is gone.  See net.h. */
#include "net_private.h"

#include <string.h>

#include "ep_thread.h"

/* A frame takes a quarter of a ring, so that place for the next one is there while one is worked off. */
#define FRAME_PART  4u
/* Of a ring that has been worked off and not been told yet. */
#define RETURN_PART 8u
#define ACTIVE_NS   (50 * EP_NS_PER_US)  /* between two looks at sockets that had no room */
#define IDLE_NS     (100 * EP_NS_PER_MS) /* to see what nobody wakes for: a peer whose loss a sender saw */

uint32_t ep_host_net_most(const struct ep_host_net *net) { return net->ring_bytes / FRAME_PART; }

bool ep_host_net_is_lost(const struct ep_host_net *net, uint32_t node)
{
    return ep_gin_peer_is_lost(&net->comm->peers[node]);
}

static void lose(struct ep_host_net *net, uint32_t node, const char *why)
{
    net->node[node].in.lost = true;
    ep_gin_comm_drop(net->comm, node, why);
    net->events.lost(net->events.user, node, why);
}

/* Tells the node what was worked off, when that is worth a put.  Where the last one is still on its way it is left for
 * the next look, which comes soon. */
static void tell_room(struct ep_host_net *net, uint32_t node)
{
    struct incoming *in = &net->node[node].in;

    if (in->read - in->returned < net->ring_bytes / RETURN_PART ||
        (in->telling && !ep_gin_put_test(net->comm, in->telling)))
        return;
    in->telling = ep_gin_put(net->comm, &(struct ep_gin_put_args){ .rank = node,
                                                                   .context = net->context,
                                                                   .signal = net->region,
                                                                   .signal_offset = words_at(net->own) +
                                                                                    offsetof(struct words, room),
                                                                   .signal_op = NCCL_SIGNAL_ADD,
                                                                   .signal_value = in->read - in->returned });
    in->returned = in->read;
}

/* Lies the frame in what has come, and in one piece? */
static bool frame_is_whole(const struct ep_host_net *net, const struct incoming *in, uint64_t came,
                           const struct ep_host_frame_size *size)
{
    uint64_t left = net->ring_bytes - in->read % net->ring_bytes;

    if (size->bytes < sizeof *size || size->bytes > net->ring_bytes)
        return false;
    if (size->kind == 0)
        return size->bytes == left && left <= came - in->read;
    return padded(size->bytes) <= ep_host_net_most(net) && padded(size->bytes) <= left &&
           padded(size->bytes) <= came - in->read;
}

static bool work_off_one(struct ep_host_net *net, uint32_t node, uint64_t came)
{
    struct incoming *in = &net->node[node].in;
    const uint8_t *at = net->memory + ring_at(net, node) + in->read % net->ring_bytes;
    struct ep_host_frame_size size;

    memcpy(&size, at, sizeof size);
    if (!frame_is_whole(net, in, came, &size))
        return false;
    if (size.kind != 0 && !net->events.frame(net->events.user, node, at, size.bytes))
        return false;
    in->read += size.kind ? padded(size.bytes) : size.bytes;
    return true;
}

/* True: there was something. */
static bool work_off(struct ep_host_net *net, uint32_t node)
{
    struct incoming *in = &net->node[node].in;
    /* acquire: the bytes that it counts; partner: the receive thread of GIN */
    uint64_t came = __atomic_load_n(&words_of(net, node)->came, __ATOMIC_ACQUIRE);
    bool some = came != in->read;

    if (came - in->read > net->ring_bytes) {
        lose(net, node, "it sends more than there is place for");
        return true;
    }
    while (in->read != came) {
        if (!work_off_one(net, node, came)) {
            lose(net, node, "it sends what no node sends");
            return true;
        }
        tell_room(net, node);
    }
    tell_room(net, node);
    return some;
}

/* All that came of a lost node is worked off first. */
static bool attend(struct ep_host_net *net, uint32_t node)
{
    bool gone = ep_gin_peer_is_drained(&net->comm->peers[node]), some;

    if (net->node[node].in.lost)
        return false;
    some = __atomic_load_n(&net->works, __ATOMIC_ACQUIRE) && work_off(net, node); /* partner: ep_host_net_work */
    if (!gone || net->node[node].in.lost)
        return some;
    lose(net, node, "its connection is closed");
    return true;
}

/* Somebody may wait for place that has come. */
static bool room_grew(struct ep_host_net *net, uint64_t *known)
{
    uint64_t sum = 0;
    bool grew;

    for (uint32_t n = 0; n < net->nodes; n++)
        sum += room_of(net, n);
    grew = sum != *known;
    *known = sum;
    /* partner: fits.  Its puts are looked at again by whoever waits. */
    return __atomic_exchange_n(&net->crowded, 0, __ATOMIC_SEQ_CST) != 0 || grew;
}

static bool look(struct ep_host_net *net, uint64_t *room)
{
    bool some = false;

    for (uint32_t n = 0; n < net->nodes; n++)
        if (n != net->own)
            some |= attend(net, n);
    ep_gin_progress(net->comm);
    if (room_grew(net, room))
        net->events.room(net->events.user);
    return some;
}

void *ep_host_net_run(void *arg)
{
    struct ep_host_net *net = arg;
    uint64_t room = 0;

    (void)ep_thread_runs_ops();
    while (__atomic_load_n(&net->stop, __ATOMIC_ACQUIRE) == 0) {
        uint32_t seen = __atomic_load_n(&net->woken, __ATOMIC_ACQUIRE); /* partner: wake */

        if (!look(net, &room))
            ep_futex_wait(&net->woken, seen,
                          __atomic_load_n(&net->comm->active, __ATOMIC_RELAXED) != 0 ? ACTIVE_NS : IDLE_NS);
    }
    return NULL;
}
