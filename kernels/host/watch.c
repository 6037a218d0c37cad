/* A network that carries nothing but the news that a node is gone. */
#include <stdlib.h>

#include "net.h"

struct ep_host_watch {
    struct ep_host_net *net;
    void (*on_lost)(uint32_t node, const char *why, void *user);
    void *user;
};

/* Nobody says anything. */
static bool no_frame(void *user, uint32_t node, const void *frame, uint32_t bytes)
{
    (void)user, (void)node, (void)frame, (void)bytes;
    return false;
}

static void no_room(void *user)
{
    (void)user;
}

static void lost(void *user, uint32_t node, const char *why)
{
    struct ep_host_watch *watch = user;

    watch->on_lost(node, why, watch->user);
}

ep_status ep_host_watch_start(struct ep_host_net *net, void (*on_lost)(uint32_t node, const char *why, void *user),
                              void *user, struct ep_host_watch **out, struct ep_error *error)
{
    struct ep_host_watch *watch = calloc(1, sizeof *watch);
    const struct ep_host_net_events events = { .frame = no_frame, .room = no_room, .lost = lost, .user = watch };
    ep_status status;

    if (!watch)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to watch nodes");
    watch->on_lost = on_lost;
    watch->user = user;
    status = ep_host_net_start(net, &events, error);
    if (status != EP_OK) {
        free(watch);
        return status;
    }
    ep_host_net_work(net);
    watch->net = net;
    *out = watch;
    return EP_OK;
}

void ep_host_watch_cut(struct ep_host_watch *watch, uint32_t node)
{
    ep_host_net_cut(watch->net, node);
}

void ep_host_watch_end(struct ep_host_watch *watch)
{
    ep_host_net_close(watch->net);
    free(watch);
}
