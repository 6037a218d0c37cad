/*
 * ptx.cuh: what has to be said in PTX: memory order beyond what CUDA's own functions have, the clock, the engine for
 * bulk copies, and the order of kernels in a stream.
 *
 * tests/cuda_kernels has all of it for CPUs, with what it needs of CUDA's own functions, and runs the rest of the device
 * code there.
 */
#ifndef EP_PTX_CUH
#define EP_PTX_CUH

#include "ll_quantise.cuh"

#ifdef __CUDACC__ /* else whoever compiles this has them already */

/* Words of a block's shared memory, as many as its kernel is launched with; `align` in bytes. */
#define EP_LAUNCHED_SHARED(align, name) extern __shared__ __align__(align) uint32_t name[]

namespace ep {

/* ---- memory order ---------------------------------------------------------------- */

__device__ inline uint32_t load_u32(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline uint64_t load_u64(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline void store_u32(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory");
}
__device__ inline void store_u64(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(p), "l"(v) : "memory");
}
/* 16 bytes at once: b128 accesses are single-copy atomic (PTX ISA 8.3). */
__device__ inline void store_vec(void *p, Vec v)
{
    asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }"
                 : : "l"(p), "l"((uint64_t)v.w[1] << 32 | v.w[0]), "l"((uint64_t)v.w[3] << 32 | v.w[2])
                 : "memory");
}
__device__ inline Vec load_vec(const void *p)
{
    uint64_t lo, hi;
    asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
    return Vec{ { (uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32) } };
}
/* The same; what its writer had fenced before is there for whoever sees it. */
__device__ inline Vec acquire_vec(const void *p)
{
    uint64_t lo, hi;
    asm volatile("{ .reg .b128 v; ld.acquire.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
    return Vec{ { (uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32) } };
}
__device__ inline uint32_t acquire_u32(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline uint64_t acquire_u64(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); } /* __threadfence() is fence.sc */
__device__ inline void fence_sys() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }
__device__ inline void fence_total() { asm volatile("fence.sc.sys;" : : : "memory"); } /* for Dekker, too */

/* Rows: past the L1 cache, which peers do not keep coherent. */
__device__ inline Vec load_row(const void *p)
{
    Vec v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");
    return v;
}
__device__ inline void store_row(void *p, Vec v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 : : "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

/* Of the block's shared memory, that another warp changes. */
__device__ inline uint32_t peek(const uint32_t *p) { return *(const volatile uint32_t *)p; }

/* ---- counting, of the blocks of one op ------------------------------------------------- */

/* Adds 1; returns what was there. */
__device__ inline uint32_t count_acquire(uint32_t *p)
{
    uint32_t before;
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
__device__ inline uint32_t count_acq_rel(uint32_t *p)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
__device__ inline void count_release(uint32_t *p)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(p) : "memory");
}
__device__ inline void count_release(uint64_t *p)
{
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(p) : "memory");
}
__device__ inline uint32_t acquire_count(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* ---- the clock --------------------------------------------------------------------------- */

__device__ inline uint64_t now_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* ---- between two kernels of a stream ------------------------------------------------------ */

/*
 * A kernel that is launched `early` comes to its multiprocessors while the kernel before it in the stream ends, which
 * saves the way there.  Nothing is read or written before await_stream(): until then the kernel before may run, after
 * it all of that one's writes are there.  Our own lets the next one come when no block of it has to wait for a peer any
 * more, so that what waits in the stream never takes the place of a block that a peer waits for.  Blocks that leave
 * without a word let it come, too.  For any other kernel both do nothing.
 */
__device__ inline void await_stream() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
__device__ inline void let_next_come() { asm volatile("griddepcontrol.launch_dependents;" : : : "memory"); }

/* ---- bulk copies: ht_bulk.cuh says how they are used --------------------------------------- */

__device__ inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* For the engine: of what was read from shared memory, and of what was acquired in global memory.  The latter waits for
 * stores to it. */
__device__ inline void fence_stage() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
__device__ inline void fence_acquired() { asm volatile("fence.proxy.async.global;" : : : "memory"); }

/* A barrier in shared memory that bytes arrive at. */
__device__ inline void barrier_init(uint64_t *barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
__device__ inline bool barrier_passed(uint64_t *barrier, uint32_t parity)
{
    uint32_t there;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(there) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return there;
}

/* One thread: to shared memory; the barrier is passed when all has come. */
__device__ inline void bulk_load(uint8_t *stage, const uint8_t *from, uint32_t bytes, uint64_t *barrier)
{
    const uint32_t full = shared_address(barrier);

    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(full), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 : : "r"(shared_address(stage)), "l"(from), "r"(bytes), "r"(full) : "memory");
}
/* From shared memory, in the thread's open group. */
__device__ inline void bulk_store(uint8_t *to, const uint8_t *stage, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 : : "l"(to), "r"(shared_address(stage)), "r"(bytes) : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
/* The thread's groups, all but the last n: their shared memory is read; and of all: what they store is there. */
template <uint32_t n> __device__ inline void bulk_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(n) : "memory");
}
__device__ inline void bulk_stored() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }

} // namespace ep
#endif

#endif
