/*
 * gin.cuh: NCCL's Device API, for kernels: all of it that they use.
 *
 * Of NCCL 2.28.9 and later: puts and signals only; signals are added to and never set back.  What ncclDevComm is
 * depends on NCCL's version, so kernels run with the one whose headers they were built with; EP_GIN_VERSION tells the
 * server which.  tests/cuda_kernels has the same for CPUs.
 */
#ifndef EP_GIN_CUH
#define EP_GIN_CUH

#include "device_net.h"

#ifdef __CUDACC__
#include <nccl_device.h>

namespace ep {

static_assert(sizeof(ncclDevComm) <= sizeof(ep_device_net::wire), "ep_device_net::wire is too small for this NCCL");

__device__ inline const ncclDevComm &gin_comm(const struct ep_device_net *net)
{
    return *(const ncclDevComm *)net->wire;
}

/* What the threads before a fence for the system have written goes from offset `from` of our memory beside the window to
 * `to` of the rank's; and then adds to a signal of the rank's: with one post, of which each costs a thread 3 to 6 us. */
__device__ inline void gin_put_raise(const struct ep_device_net *net, uint32_t rank, uint64_t to, uint64_t from,
                                     uint64_t bytes, uint32_t signal, uint64_t by)
{
    constexpr auto fenced = cuda::thread_scope_system; /* by the caller: NCCL does not do it again */
    const ncclDevComm &comm = gin_comm(net);
    const ncclWindow_t beside = (ncclWindow_t)net->beside;
    const ncclGin gin{ comm, 0 };

    gin.put(ncclTeamWorld(comm), (int)rank, beside, to, beside, from, bytes, ncclGin_SignalAdd{ signal, by },
            ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, fenced, fenced);
}

/* Adds to a signal of the rank's, after all puts to it so far. */
__device__ inline void gin_raise(const struct ep_device_net *net, uint32_t rank, uint32_t signal, uint64_t by)
{
    const ncclDevComm &comm = gin_comm(net);
    const ncclGin gin{ comm, 0 };

    gin.signal(ncclTeamWorld(comm), (int)rank, ncclGin_SignalAdd{ signal, by });
}

/* A signal of our own: whoever sees it raised sees what was put before. */
__device__ inline uint64_t gin_signal(const struct ep_device_net *net, uint32_t signal)
{
    const ncclGin gin{ gin_comm(net), 0 };

    return gin.readSignal(signal);
}

} // namespace ep
#endif

#endif
