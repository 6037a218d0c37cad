/* Executor server for ranks of several nodes: the kernel of ll_serve.cu, compiled with what ll_net.cuh has. */
#define EP_LL_NET 1
#define ep_ll_serve_prepare ep_ll_net_prepare
#define ep_ll_serve_one ep_ll_net_one
#include "ll_serve.cu"
