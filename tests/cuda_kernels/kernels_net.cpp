/* The kernels once more, for groups whose ranks are on several nodes: all names are others. */
#define EP_LL_NET 1
#define ep ep_net
#define ep_ll_dispatch ep_net_ll_dispatch
#define ep_ll_combine ep_net_ll_combine
#define ep_ll_release ep_net_ll_release
#define ep_ht_dispatch ep_net_ht_dispatch
#define ep_ht_combine ep_net_ht_combine
#include "kernels.cpp"
