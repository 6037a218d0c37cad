/* What ht_dispatch.cu and ht_combine.cu have of one node only. */
#include "launch.cuh"

extern "C" int ep_ht_dispatch(const struct ep_ht_args *args, uint32_t shared_bytes, void *stream)
{
    return ep::ht::launch_dispatch({ *args, {}, {} }, shared_bytes, stream);
}

extern "C" int ep_ht_combine(const struct ep_ht_args *args, void *stream)
{
    return ep::ht::launch_combine({ *args, {}, {} }, stream);
}
