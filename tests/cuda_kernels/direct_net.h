/*
 * direct_net.h: executor direct has no ranks on other nodes on GPUs.  Here it has: these files of kernels/cuda are compiled
 * once more, behind this one, with what is for ranks of several nodes, and their names are others.
 */
#ifndef CUDA_KERNELS_DIRECT_NET_H
#define CUDA_KERNELS_DIRECT_NET_H

#include "net_names.h"

/* rank.c */
#define ep_cuda_rank_open    ep_cuda_net_rank_open
#define ep_cuda_rank_close   ep_cuda_net_rank_close
#define ep_cuda_rank_run     ep_cuda_net_rank_run
#define ep_cuda_rank_share   ep_cuda_net_rank_share
#define ep_cuda_rank_runs    ep_cuda_net_rank_runs
#define ep_cuda_share_blocks ep_cuda_net_share_blocks
#define ep_cuda_rank_ht_sms  ep_cuda_net_rank_ht_sms
#define ep_cuda_check_reach  ep_cuda_net_check_reach
/* ll_dispatch.cu, ll_combine.cu; ht_direct_net.cpp */
#define ep_ll_prepare    ep_ll_net_ops_prepare
#define ep_ll_dispatch   ep_ll_net_dispatch
#define ep_ll_combine    ep_ll_net_combine
#define ep_ll_release    ep_ll_net_release
#define ep_ll_error_text ep_ll_net_error_text
#define ep_ht_dispatch   ep_ht_net_dispatch
#define ep_ht_combine    ep_ht_net_combine

#endif
