/*
 * Executor server: a warp that looks for the doorbell, in place of the server's stream, for an op that is expected
 * (forecast.h).  It comes while the op ahead ends, sees the bell sooner, and when it hears that there will be an op, has the op's
 * kernel come and compares the op, before it is rung for.  That kernel (ll_expect.cu) waits for what is found here, not for the
 * end of the warp, so all of its blocks execute the op that is expected or none does, whatever the worker does to its mailbox
 * meanwhile.
 *
 * For as long as it looks it has a place on a multiprocessor, and a kernel that wants a whole one for each of its blocks has
 * one less.  So an operator has to ask for it; it has no memory to share and takes the largest split of a multiprocessor's
 * memory, so that a kernel is kept off only if it wants all of that, or all registers; and it does not look for ever.  Who
 * rings for nothing comes to an entry that finds out what to do, which is the stream's to wait for.
 *
 * An op is announced before its time only if what is ahead of it in the worker's stream lets its next kernel come early, as our
 * own does.  Until it is rung for, or given up, its blocks are on the GPU beside that, as those of executor direct are.
 */
#include "launch.cuh"
#include "ll_serve.cuh"

namespace ep {
namespace {

constexpr uint32_t kLooks = 64; /* some 40 us, from one look at the clock to the next */

/* A round trip to memory. */
struct Signs {
    uint32_t bell;
    bool over; /* the entry ahead */
};

__device__ inline Signs look_for_signs(const ep_ll_serve &s)
{
    const uint32_t bell = load_u32(&s.mailbox->bell);
    const uint64_t over = load_u64(&s.desk->over);

    return { __shfl_sync(kAll, bell, 0), __shfl_sync(kAll, over, 0) >= s.number - 1 };
}

/* There is an op, or will be one: its kernel comes. */
__device__ inline uint32_t hear_of_op(const ep_ll_expected &e)
{
    let_next_come();
    fence_gpu(); /* acquire; partner: the worker's kernel */
    return look(e.serve, e.at);
}

/*
 * While the op ahead ends only an announcement counts, and it is for the next one: of the op ahead neither bell nor announcement
 * was left when its blocks let this warp come.
 */
__device__ inline uint32_t await_op(const ep_ll_expected &e)
{
    const uint64_t until = now_ns() + e.serve.poll_ns;
    bool heard = false, over = !e.serve.ahead_polls;
    uint32_t found = 0, looks = 0;

    if (over)
        await_stream();
    do {
        const Signs signs = look_for_signs(e.serve);

        over = over || signs.over;
        if (signs.bell == EP_BELL_CLOSING)
            return kLeaves;
        if (heard && over && signs.bell & EP_BELL_RUNG)
            return found;
        if (!heard && (signs.bell & EP_BELL_COMING || (over && signs.bell & EP_BELL_RUNG))) {
            heard = true;
            found = hear_of_op(e);
        }
    } while (++looks % kLooks != 0 || now_ns() < until);
    return kLeaves;
}

__global__ void __launch_bounds__(32) poll(const __grid_constant__ ep_ll_expected e)
{
    const uint32_t found = await_op(e);

    let_next_come();
    if (found & kLeaves)
        await_stream(); /* the entry ahead is over, too, for whoever comes */
    fence_gpu(); /* acquire, partner: the release of who rings; and release, partner: await_found() */
    if (threadIdx.x == 0) {
        tell_found(&e.serve.desk->found, e.serve.number, found);
        if (found & kLeaves)
            store_u64(&e.serve.desk->over, e.serve.number);
    }
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
