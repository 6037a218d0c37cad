/* A net is opened, told of, closed.  See net.h. */
#include "net_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ep_thread.h"

/* Memory for rings, each way, of all other nodes together; each has between the least and the most, a power of two. */
#define RINGS_BYTES (64u << 20)
#define RING_LEAST  (1u << 20)
#define RING_MOST   (4u << 20)

/* ---- what a net is ---------------------------------------------------------------------- */

static uint32_t ring_bytes_for(uint32_t nodes)
{
    uint32_t bytes = RING_MOST;

    while (bytes > RING_LEAST && (uint64_t)bytes * (nodes - 1) > RINGS_BYTES)
        bytes /= 2;
    return bytes;
}

static uint64_t memory_for(uint32_t nodes)
{
    return rings_at(nodes) + 2ull * nodes * ring_bytes_for(nodes);
}

uint64_t ep_host_net_bytes(uint32_t nodes)
{
    return nodes > 1 ? memory_for(nodes) : 0;
}

uint32_t ep_host_net_nodes(const struct ep_host_net *net) { return net->nodes; }
uint32_t ep_host_net_own(const struct ep_host_net *net) { return net->own; }

/* The receive thread sees the connection end, and wakes this net's thread, which tells of the loss. */
void ep_host_net_cut(struct ep_host_net *net, uint32_t node)
{
    ep_gin_comm_drop(net->comm, node, "this node has left it");
}

/* ---- opening and closing ---------------------------------------------------------------------------- */

ep_status ep_host_net_listen(uint32_t silence_ms, struct ep_host_net **out, struct ep_host_card *card,
                             struct ep_error *error)
{
    struct ep_host_net *net = calloc(1, sizeof *net);
    struct ep_gin_handle handle;
    ep_status status;

    _Static_assert(sizeof handle <= sizeof card->bytes, "a card holds what GIN has to be told");
    if (!net)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team's network");
    status = ep_gin_settings_read(&net->settings, error);
    if (net->settings.silence_ms > silence_ms)
        net->settings.silence_ms = silence_ms;
    if (status == EP_OK)
        status = ep_gin_listen(&net->settings, &handle, &net->listener, error);
    if (status != EP_OK) {
        free(net);
        return status;
    }
    memset(card, 0, sizeof *card);
    memcpy(card->bytes, &handle, sizeof handle);
    *out = net;
    return EP_OK;
}

static ep_status make_nodes(struct ep_host_net *net, struct ep_error *error)
{
    net->node = calloc(net->nodes, sizeof *net->node);
    if (!net->node)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u nodes", net->nodes);
    for (uint32_t n = 0; n < net->nodes; n++)
        pthread_mutex_init(&net->node[n].out.lock, NULL);
    net->ring_bytes = ring_bytes_for(net->nodes);
    net->memory_bytes = memory_for(net->nodes);
    net->memory = mmap(NULL, net->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (net->memory == MAP_FAILED) {
        net->memory = NULL;
        return ep_error_errno(error, EP_NO_MEMORY, "rings of %llu bytes", (unsigned long long)net->memory_bytes);
    }
    return EP_OK;
}

static ep_status open_comm(struct ep_host_net *net, const struct ep_host_card *cards, struct ep_error *error)
{
    const struct ep_gin_handle **handles = calloc(net->nodes, sizeof *handles);
    ep_status status;

    if (!handles)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u nodes", net->nodes);
    for (uint32_t n = 0; n < net->nodes; n++)
        handles[n] = (const void *)cards[n].bytes;
    status = ep_gin_comm_open(&net->settings, handles, net->nodes, net->own, net->listener, &net->comm, error);
    free(handles);
    return status;
}

ep_status ep_host_net_connect(struct ep_host_net *net, const struct ep_host_card *cards, uint32_t nodes, uint32_t own,
                              uint32_t timeout_ms, struct ep_error *error)
{
    ep_status status;

    if (nodes < 2 || own >= nodes || net->comm)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "node %u of %u: must be one of two or more, once", own, nodes);
    net->nodes = nodes;
    net->own = own;
    net->settings.timeout_ns = timeout_ms * EP_NS_PER_MS;
    status = make_nodes(net, error);
    if (status == EP_OK)
        status = open_comm(net, cards, error);
    if (status == EP_OK)
        status = ep_gin_contexts_take(net->comm, 1, &net->context, error);
    if (status == EP_OK)
        status = ep_gin_region_add(net->comm, net->memory, net->memory_bytes, NCCL_MEMORY_HOST, 0, -1, 0, &net->region,
                                   error);
    ep_gin_listener_close(net->listener);
    net->listener = NULL;
    if (status != EP_OK)
        ep_error_prefix(error, "connecting %u nodes, where a rank is a node", nodes);
    return status;
}

static void heard(void *user)
{
    wake(user);
}

ep_status ep_host_net_start(struct ep_host_net *net, const struct ep_host_net_events *events, struct ep_error *error)
{
    int failure;

    net->events = *events;
    failure = ep_thread_start(&net->thread, "ep-net", ep_host_net_run, net);
    if (failure != 0)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "thread of a team's network: %s", strerror(failure));
    net->running = true;
    ep_gin_comm_hear(net->comm, heard, net);
    return EP_OK;
}

void ep_host_net_work(struct ep_host_net *net)
{
    __atomic_store_n(&net->works, 1, __ATOMIC_RELEASE); /* partner: attend */
    wake(net);
}

static void stop(struct ep_host_net *net)
{
    ep_gin_comm_hear(net->comm, NULL, NULL);
    __atomic_store_n(&net->stop, 1, __ATOMIC_RELEASE); /* partner: ep_host_net_run */
    wake(net);
    pthread_join(net->thread, NULL);
}

/* GIN first: it may still move what is in the rings. */
void ep_host_net_close(struct ep_host_net *net)
{
    if (!net)
        return;
    if (net->running)
        stop(net);
    if (net->listener)
        ep_gin_listener_close(net->listener);
    ep_gin_comm_close(net->comm);
    if (net->memory)
        munmap(net->memory, net->memory_bytes);
    for (uint32_t n = 0; net->node && n < net->nodes; n++)
        pthread_mutex_destroy(&net->node[n].out.lock);
    free(net->node);
    free(net);
}
