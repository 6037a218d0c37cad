/* device_on_cpu.h: what kernels/cuda/ptx.cuh has, on CPUs. */
#ifndef DEVICE_ON_CPU_H
#define DEVICE_ON_CPU_H

#include <ctime>

#include "cuda_launch.h"
#include "ll_quantise.cuh"
#include "wire.h"

/* Who asks for it has a pointer to it. */
struct launched_shared {
    operator uint32_t *() const { return fiber_shared; }
};
#define EP_LAUNCHED_SHARED(align, name) const launched_shared name

namespace ep {

/* ---- memory order: the strongest there is, but for 16 bytes (fibers.h).  Whoever looks lets others go on. --------- */

template <class T> inline T look(const T *p)
{
    fibers_look();
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
inline uint32_t load_u32(const uint32_t *p) { return look(p); }
inline uint64_t load_u64(const uint64_t *p) { return look(p); }
inline uint32_t acquire_u32(const uint32_t *p) { return look(p); }
inline uint64_t acquire_u64(const uint64_t *p) { return look(p); }
inline uint32_t acquire_count(const uint32_t *p) { return look(p); }
inline void store_u32(uint32_t *p, uint32_t v)
{
    fibers_wrote();
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
inline void store_u64(uint64_t *p, uint64_t v)
{
    fibers_wrote();
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}

/* 16 bytes at once.  Others may see them later than what comes after, until there is a fence. */
inline void store_vec(void *p, Vec v) { fibers_store(p, &v); }
inline Vec load_vec(const void *p)
{
    Vec v;

    fibers_look();
    fibers_load(&v, p);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return v;
}
inline Vec acquire_vec(const void *p) { return load_vec(p); }
inline void fence_gpu() { fibers_fence(); }
inline void fence_sys() { fibers_fence(); }
inline void fence_total() { fibers_fence(); }

inline Vec load_row(const void *p)
{
    Vec v;

    fibers_load(&v, p);
    return v;
}
inline void store_row(void *p, Vec v) { fibers_store(p, &v); }

/* Of the block's shared memory. */
inline uint32_t peek(const uint32_t *p) { return look(p); }

/* ---- counting, the clock, streams -------------------------------------------------------------------- */

inline uint32_t count_acquire(uint32_t *p)
{
    const uint32_t before = atomicAdd(p, 1);

    fibers_arrived();
    return before;
}
inline uint32_t count_acq_rel(uint32_t *p)
{
    fibers_fence();
    return atomicAdd(p, 1);
}
inline void count_release(uint32_t *p) { (void)count_acq_rel(p); }
inline void count_release(uint64_t *p)
{
    fibers_fence();
    (void)atomicAdd(p, 1);
}

inline uint64_t now_ns()
{
    timespec t;

    fibers_look();
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

inline void await_stream() { fibers_await_stream(); }
inline void let_next_come() { fibers_let_next_come(); }

/* ---- bulk copies: there when they return.  A barrier counts them. -------------------------------------- */

inline void fence_stage() {}
inline void fence_acquired() {}
inline void fence_barriers() {}
inline void barrier_init(uint64_t *barrier) { *barrier = 0; }
inline bool barrier_passed(uint64_t *barrier, uint32_t parity) { return (look(barrier) & 1) != parity; }
inline void bulk_load(uint8_t *stage, const uint8_t *from, uint32_t bytes, uint64_t *barrier)
{
    memcpy(stage, from, bytes);
    __atomic_fetch_add(barrier, 1, __ATOMIC_SEQ_CST);
}
inline void bulk_store(uint8_t *to, const uint8_t *stage, uint32_t bytes) { memcpy(to, stage, bytes); }
inline void bulk_commit() {}
template <uint32_t n> inline void bulk_read() {}
inline void bulk_stored() { fence_sys(); }

/* ---- ranks on other nodes: gin.cuh ------------------------------------------------------------------------ */

inline void gin_raise(const struct ep_device_net *net, uint32_t rank, uint32_t signal, uint64_t by)
{
    wire_raise(net, rank, signal, by);
}
inline void gin_put_raise(const struct ep_device_net *net, uint32_t rank, uint64_t to, uint64_t from, uint64_t bytes,
                          uint32_t signal, uint64_t by)
{
    wire_put(net, rank, to, from, bytes);
    wire_raise(net, rank, signal, by);
}
inline uint64_t gin_signal(const struct ep_device_net *net, uint32_t signal) { return look(wire_signal(net, signal)); }

} // namespace ep

#endif
