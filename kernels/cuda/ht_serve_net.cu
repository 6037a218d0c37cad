/* Executor server for ranks of several nodes: the kernel of ht_serve.cu, compiled with what ht_net.cuh has. */
#define EP_LL_NET 1
#define ep_ht_serve_prepare ep_ht_net_prepare
#define ep_ht_serve_one ep_ht_net_one
#include "ht_serve.cu"
