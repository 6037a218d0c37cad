/* net_private.h: what the files of a net share: net.c opens and closes it, net_send.c writes frames, net_receive.c
 * works them off.  See net.h. */
#ifndef EP_HOST_NET_PRIVATE_H
#define EP_HOST_NET_PRIVATE_H

#include <pthread.h>

#include "ep_futex.h"
#include "gin.h"
#include "net.h"

#define PUTS 1024u /* of one node that have not been tested */

/* One line each, raised by the other node. */
struct words {
    uint64_t came, room;
    uint8_t pad[EP_HOST_FRAME_ALIGN - 16];
};

struct outgoing {
    pthread_mutex_t lock; /* around all of it */
    uint64_t written, put; /* bytes ever */
    uint32_t begun;        /* bytes of the frame that is being written */
    struct ep_gin_put *puts[PUTS];
    uint32_t head, tail; /* puts ever */
};

/* The net's thread. */
struct incoming {
    uint64_t read, returned;
    struct ep_gin_put *telling; /* NULL: none */
    bool lost; /* nothing more is taken from it */
};

struct node {
    struct outgoing out;
    struct incoming in;
};

struct ep_host_net {
    struct ep_gin_settings settings;
    struct ep_gin_listener *listener;
    struct ep_gin_comm *comm;
    uint32_t nodes, own, context, ring_bytes;
    struct node *node; /* [nodes] */
    /* One mapping: words [nodes], rings that come in [nodes], images of those at the others [nodes]. */
    uint8_t *memory;
    uint64_t memory_bytes;
    struct ep_gin_region *region;
    struct ep_host_net_events events;
    pthread_t thread;
    bool running;
    uint32_t works; /* atomic: frames are worked off */
    uint32_t stop;  /* atomic */
    uint32_t woken; /* atomic, futex */
    uint32_t crowded; /* atomic: somebody waits for puts to end */
};

/* ---- places ----------------------------------------------------------------------------- */

static inline uint64_t words_at(uint32_t node) { return (uint64_t)node * sizeof(struct words); }

static inline struct words *words_of(struct ep_host_net *net, uint32_t node)
{
    return (struct words *)(void *)(net->memory + words_at(node));
}

static inline uint64_t rings_at(uint32_t nodes)
{
    return ((uint64_t)nodes * sizeof(struct words) + 4095) / 4096 * 4096;
}

/* The ring that `node` writes. */
static inline uint64_t ring_at(const struct ep_host_net *net, uint32_t node)
{
    return rings_at(net->nodes) + (uint64_t)node * net->ring_bytes;
}

static inline uint64_t image_at(const struct ep_host_net *net, uint32_t node)
{
    return ring_at(net, net->nodes) + (uint64_t)node * net->ring_bytes;
}

static inline uint32_t padded(uint32_t bytes)
{
    return (bytes + EP_HOST_FRAME_ALIGN - 1) / EP_HOST_FRAME_ALIGN * EP_HOST_FRAME_ALIGN;
}

/* ---- words between threads and nodes ---------------------------------------------------- */

static inline uint64_t room_of(struct ep_host_net *net, uint32_t node)
{
    /* acquire: the other has read what was there; partner: the receive thread of GIN */
    return __atomic_load_n(&words_of(net, node)->room, __ATOMIC_ACQUIRE);
}

static inline void wake(struct ep_host_net *net)
{
    __atomic_fetch_add(&net->woken, 1, __ATOMIC_RELEASE); /* partner: ep_host_net_run */
    ep_futex_wake_all(&net->woken);
}

/* The net's thread: net_receive.c. */
void *ep_host_net_run(void *net);

#endif
