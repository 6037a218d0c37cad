/*
 * ep_node: what this node is and has: name, devices, memory budget.  Owned by the loop's thread.
 */
#ifndef EP_NODE_H
#define EP_NODE_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"
#include "ep/v1/admin.pb-c.h"

struct ep_node;

struct ep_node_options {
    const char *name;        /* NULL: host name */
    uint32_t host_devices;   /* ranks of the host backend that this node offers */
    uint64_t memory_budget;  /* bytes for windows; 0: half of the memory that is free at start */
    const char *socket, *admin_address;
};

ep_status ep_node_open(const struct ep_node_options *options, struct ep_node **out, struct ep_error *error);
void ep_node_close(struct ep_node *node);

const char *ep_node_name(const struct ep_node *node);
uint32_t ep_node_devices(const struct ep_node *node);
const char *ep_node_device_name(const struct ep_node *node, uint32_t device);

/* Cordon: no new attachments.  The state survives a restart (the caller stores it). */
void ep_node_cordon(struct ep_node *node, bool cordoned, const char *reason);
bool ep_node_cordoned(const struct ep_node *node, const char **reason);
void ep_node_set_stopping(struct ep_node *node);
/* Where operators reach it, once the port is known. */
void ep_node_set_admin_address(struct ep_node *node, const char *address);

/* Memory of windows.  Refusal says what was asked, what is left and who has the rest. */
ep_status ep_node_reserve(struct ep_node *node, uint32_t device, uint64_t bytes, struct ep_error *error);
void ep_node_release(struct ep_node *node, uint32_t device, uint64_t bytes);
uint64_t ep_node_memory_left(const struct ep_node *node);

/*
 * One rank's window on the host backend: a sealed-size memfd, mapped here.  *fd may be handed to a
 * worker; closing it is the caller's.
 */
ep_status ep_node_window_create(struct ep_node *node, uint32_t device, const char *name, uint64_t bytes,
                                int *fd, void **base, struct ep_error *error);
/* Any thread, and better not the loop's: giving memory back takes about half a second per GiB. */
void ep_node_window_destroy(struct ep_node *node, uint32_t device, int fd, void *base, uint64_t bytes);

/* Fills the fields that the node knows; free with ep_node_info_clear. */
void ep_node_info(const struct ep_node *node, Ep__V1__NodeInfo *info);
void ep_node_info_clear(Ep__V1__NodeInfo *info);

#endif
