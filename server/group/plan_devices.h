/*
 * plan_devices: which devices of a node the ranks of a group get.  Decides; does no I/O.
 *
 * On GPUs they are those that reach each other's memory, that the group is on already, that have room, and that other
 * groups have the least memory of: in this order.  Where there are not as many that reach each other, and where there are more
 * ranks than devices, ranks take the devices in turn.
 */
#ifndef EP_GROUP_PLAN_DEVICES_H
#define EP_GROUP_PLAN_DEVICES_H

#include "plan.h"

uint32_t ep_plan_device_at(const struct ep_plan_node *node, const char *device); /* has.devices: it has no such device */
/* Bits of the node's devices that the first ranks of the plan are on; NULL: none. */
uint64_t ep_plan_held(const struct ep_plan_node *node, const struct ep_plan *plan, uint32_t ranks);
/* device: [ranks], growing where each rank has one of its own.  rank_bytes: memory of a rank; 0: room is not minded. */
void ep_plan_devices(const struct ep_plan_node *node, uint32_t ranks, uint64_t rank_bytes, uint64_t held, uint32_t *device);
/* Whoever was on one of these devices before stays there: first is the number of the first of these ranks. */
void ep_plan_stay(const struct ep_plan_node *node, const struct ep_plan *before, uint32_t first, uint32_t ranks,
                  uint32_t *device);

#endif
