/*
 * ht_entry.cuh: executor server: an HT op that is expected (forecast.h), by a kernel that was told by value what to do.  It is
 * executor direct's own, which has no mailbox to look at.
 *
 * All blocks of an HT op wait for each other, so all of them execute it or none does.  Whether it is the op that the worker
 * rings for block 0 alone sees, as the worker can write to its mailbox at any time, and tells the others by a verdict at the
 * desk.  If it is another one, all leave everything as it was, the doorbell too, to the entry behind.  An entry of either
 * kind ends in the same way.
 */
#ifndef EP_HT_ENTRY_CUH
#define EP_HT_ENTRY_CUH

#include "ht_device.cuh"
#include "ll_serve.cuh"

namespace ep {
namespace ht {

/* All threads of block 0. */
__device__ inline void decide(const ep_ht_expected &e)
{
    const uint32_t found = look_once(e.serve, e.at);

    if (found & kThere)
        answer_bell(e.serve, found & kSpins, gridDim.x);
    if (threadIdx.x == 0)
        tell_found(&e.serve.desk->ht.verdict, e.serve.number, found);
}

/* All threads.  Block 0 always comes.  This and end_entry() are functions of their own: inlined they made executor direct's
 * dispatch of 16 tokens take 51.5 us instead of 49.1 on H200, for code that it does not run. */
static __device__ __noinline__ uint32_t verdict_on(const ep_ht_expected &e)
{
    if (blockIdx.x == 0)
        decide(e);
    return await_found(&e.serve.desk->ht.verdict, e.serve.number);
}

/* All threads, when the op is over, which was at that place of the mailbox. */
static __device__ __noinline__ void end_entry(const ep_ll_serve &s, const struct ep_op &op, uint32_t place, bool spins)
{
    __syncthreads();
    if (threadIdx.x >= 32 || !pass(s, spins, true))
        return;
    tell_stream(s, !spins);

    const uint64_t ended = __shfl_sync(kAll, load_u64(&s.desk->log.ended), 0); /* before a lane adds to it */

    log_op(s, op, op.kind, place, ended);
}

/* All threads: run(), if it is for this kernel. */
template <class Run> __device__ __forceinline__ void run_expected(const ep_ht_expected &e, Run run)
{
    const bool serves = e.serve.mailbox != nullptr;
    const uint32_t verdict = serves ? verdict_on(e) : kThere;

    if (!(verdict & kThere))
        return;
    run();
    if (serves)
        end_entry(e.serve, e.at.op, e.at.place, verdict & kSpins);
}

} // namespace ht
} // namespace ep

#endif
