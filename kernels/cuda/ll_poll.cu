/*
 * Executor server: a warp that looks for the doorbell, in place of the server's stream, for an op that is expected
 * (forecast.h).  It is there before the op ahead is over, sees the bell sooner, and has the op's kernel come while it
 * compares the op.  That kernel (ll_expect.cu) waits for what is found here, not for the end of the warp, so all of its
 * blocks execute the op that is expected or none does, whatever the worker does to its mailbox meanwhile.
 *
 * For as long as it looks it has a place on a multiprocessor, and a kernel that wants a whole one for each of its blocks has
 * one less.  So an operator has to ask for it; it has no memory to share and takes the largest split of a multiprocessor's
 * memory, so that a kernel is kept off only if it wants all of that, or all registers; and it does not look for ever.  Who
 * rings for nothing comes to an entry that finds out what to do, which is the stream's to wait for.
 */
#include "launch.cuh"
#include "ll_serve.cuh"

namespace ep {
namespace {

constexpr uint32_t kLooks = 64; /* some 40 us, from one look at the clock to the next */

/* Each thread for itself, at the same time. */
__device__ inline bool await_bell(const ep_ll_serve &s)
{
    const uint64_t until = now_ns() + s.poll_ns;

    do {
#pragma unroll 1
        for (uint32_t i = 0; i < kLooks; i++)
            if (load_u32(&s.mailbox->bell) & EP_BELL_RUNG)
                return true;
    } while (now_ns() < until);
    return false;
}

__global__ void __launch_bounds__(32) poll(const __grid_constant__ ep_ll_expected e)
{
    uint32_t found = kLeaves;

    await_stream(); /* the bell of the op ahead may not be answered yet */
    const bool rung = __any_sync(kAll, await_bell(e.serve));

    let_next_come();
    if (rung) {
        fence_gpu(); /* acquire, partner: the release of who rings; and release, partner: await_found() */
        found = look(e.serve, e.at);
    }
    if (threadIdx.x == 0)
        tell_found(&e.serve.desk->found, e.serve.number, found);
}

} // namespace
} // namespace ep

extern "C" int ep_ll_poll_prepare(void)
{
    const cudaError_t error = cudaFuncSetAttribute((const void *)ep::poll, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared);
    cudaFuncAttributes attributes;

    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, ep::poll) : error;
}

extern "C" int ep_ll_poll(const struct ep_ll_expected *expected, void *stream)
{
    return ep::launch(ep::poll, 1, 32, 0, true, stream, *expected);
}
