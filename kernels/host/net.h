/*
 * net.h: ordered frames from node to node.
 *
 * GIN (kernels/gin) carries them, where a rank is a node: whatever transport it has, it is the one that the GPUs'
 * kernels use.  Each node has a ring for each other one in memory that the other can put to, and an image of each of
 * the other's.  A frame is written into the image and put to the same place, with a signal that counts its bytes; what
 * was worked off comes back as a signal too.
 *
 *   out.written  >= out.put  >= what the other has worked off (`room`)   a frame has its place for itself until then
 *   in.came      >= in.read  >= in.returned
 *
 * Threads.  Any thread writes frames, one at a time per node (a mutex).  One thread of the net works off what comes,
 * in the order of each node, and moves what sockets had no room for.  It never waits for a frame's place, so two nodes
 * cannot wait for each other: whoever waits for place is an op, within its time, and what the other does to make place
 * needs none.
 *
 * A node that is gone, or says what no node says, is lost: once, for good, and told on the net's thread.
 */
#ifndef EP_HOST_NET_H
#define EP_HOST_NET_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_kernels.h"

struct ep_host_net;

/* What every frame begins with.  Frames are multiples of EP_HOST_FRAME_ALIGN bytes. */
struct ep_host_frame_size {
    uint32_t bytes; /* with what follows, without padding to the next frame */
    uint32_t kind;  /* 0: nothing until the ring's end */
};
#define EP_HOST_FRAME_ALIGN 64u

struct ep_host_net_events {
    /* On the net's thread.  *frame stays as it is during the call.  False: no node says that. */
    bool (*frame)(void *user, uint32_t node, const void *frame, uint32_t bytes);
    /* On the net's thread: there may be place again for frames. */
    void (*room)(void *user);
    /* On the net's thread, once per node, after the last frame of it. */
    void (*lost)(void *user, uint32_t node, const char *why);
    void *user;
};

/* Losses are told from now on; frames wait for ep_host_net_work. */
ep_status ep_host_net_start(struct ep_host_net *net, const struct ep_host_net_events *events, struct ep_error *error);
/* Frames are worked off from now on. */
void ep_host_net_work(struct ep_host_net *net);
uint32_t ep_host_net_nodes(const struct ep_host_net *net);
uint32_t ep_host_net_own(const struct ep_host_net *net);
/* A frame has at most so many bytes. */
uint32_t ep_host_net_most(const struct ep_host_net *net);

bool ep_host_net_is_lost(const struct ep_host_net *net, uint32_t node);
/* It is lost from here on, and so is this node to it.  Any thread. */
void ep_host_net_cut(struct ep_host_net *net, uint32_t node);
/* Is there place for a frame of so many bytes, or no path to the node? */
bool ep_host_net_has_room(struct ep_host_net *net, uint32_t node, uint32_t bytes);
/* The place of a frame, which is the caller's until it commits it; nobody else can write to that node meanwhile.
 * NULL: no room now, or the node is lost. */
void *ep_host_net_begin(struct ep_host_net *net, uint32_t node, uint32_t bytes);
/* Fills in the size.  It leaves with the next flush. */
void ep_host_net_commit(struct ep_host_net *net, uint32_t node, uint32_t kind);
/* Gives the place back instead. */
void ep_host_net_cancel(struct ep_host_net *net, uint32_t node);
void ep_host_net_flush(struct ep_host_net *net, uint32_t node);

#endif
