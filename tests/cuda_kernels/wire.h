/*
 * wire.h: the network between ranks that are on other nodes, as kernels see it (kernels/cuda/gin.cuh), for tests.
 *
 * Which ranks are on which nodes: nodes.h.  It is as bad a network as the rules
 * allow: a put takes from nothing to some ms, reads its source when it is put or not before it lands, and may land after
 * a later one.  Choices of HT's records that are none arrive as ones that lead to nowhere: nothing that comes over a
 * network is to be believed.  A signal comes after all puts that its sender put to the same rank before, and may come before
 * an earlier signal.  EP_CUDA_WIRE_LATE_MS=N: each of them takes up to so many ms, and often.
 */
#ifndef CUDA_KERNELS_WIRE_H
#define CUDA_KERNELS_WIRE_H

#include <stdint.h>

#include "device_net.h"

#ifdef __cplusplus
extern "C" {
#endif

struct wire;

/* The end of a rank, whose peers have these windows. */
ep_status wire_open(uint8_t *const *windows, uint32_t rank, const struct ep_layout_map *map, struct wire **out,
                    struct ep_error *error);
/* Nothing is under way from it or to it any more. */
void wire_close(struct wire *wire);
/* What its kernels know of it. */
struct ep_device_net *wire_net(const struct wire *wire);

/* ---- for the threads of a kernel ------------------------------------------------------------- */

void wire_put(const struct ep_device_net *net, uint32_t rank, uint64_t to, uint64_t from, uint64_t bytes);
void wire_raise(const struct ep_device_net *net, uint32_t rank, uint32_t signal, uint64_t by);
const uint64_t *wire_signal(const struct ep_device_net *net, uint32_t signal);

#ifdef __cplusplus
}
#endif
#endif
