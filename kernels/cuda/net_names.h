/*
 * net_names.h: for the .cu file that is included behind it: it is compiled once more, for ranks of several nodes, with what
 * ll_net.cuh and ht_net.cuh have, and its names are others.
 */
#ifndef EP_NET_NAMES_H
#define EP_NET_NAMES_H

#define EP_LL_NET 1
#define ep        ep_net
#define ep_ll_serve_prepare  ep_ll_net_prepare
#define ep_ll_serve_one      ep_ll_net_one
#define ep_ll_expect_prepare ep_ll_net_expect_prepare
#define ep_ll_expect         ep_ll_net_expect
#define ep_ht_prepare        ep_ht_net_ops_prepare
#define ep_ht_serve_prepare  ep_ht_net_prepare
#define ep_ht_serve_one      ep_ht_net_one
#define ep_ht_expect         ep_ht_net_expect

#endif
