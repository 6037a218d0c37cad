/* node_private: what the files of this folder share. */
#ifndef EP_NODE_PRIVATE_H
#define EP_NODE_PRIVATE_H

#include <pthread.h>

#include "ep_node.h"

struct device {
    char name[16];
    uint64_t used; /* reserved bytes */
};

/* One window, so that a refusal can say who has the memory. */
struct window {
    struct window *next;
    void *base;
    uint64_t bytes;
    char *owner; /* its name up to the first '/': the group's */
};

struct ep_node {
    char *name, *socket, *admin_address, *kernel;
    uint32_t cpus;
    uint64_t started_us, budget, used;
    uint32_t n_devices;
    struct device *devices;
    pthread_mutex_t windows_mutex;
    struct window *windows;
    bool cordoned, stopping;
    char *reason;
};

/* "1.5 GiB (1610612736 bytes)" */
struct ep_bytes_text {
    char text[64];
};
struct ep_bytes_text ep_bytes_text(uint64_t bytes);

/* "moe 4.0 GiB, decode 1.0 GiB": the largest owners, into text. */
void ep_node_describe_owners(struct ep_node *node, char *text, size_t size);

#endif
