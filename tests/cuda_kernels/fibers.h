/*
 * fibers.h: blocks of threads as a GPU runs them.
 *
 * A block is a thread of the process, and its own threads take turns on it: each runs until it waits for others or
 * looks at memory that another may write, and who comes next is left to chance, so that what may happen in any order
 * does.  Threads are in warps of 32.
 */
#ifndef CUDA_KERNELS_FIBERS_H
#define CUDA_KERNELS_FIBERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fiber_index {
    uint32_t x;
};

/* Who is running, for the threads of a block. */
extern __thread struct fiber_index fiber_thread, fiber_block;

/* Runs `body` in all threads of all blocks at once, until each is over.  A block's threads find their shared memory in
 * `shared`, 128-byte aligned and full of rubbish. */
void fibers_run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                void (*body)(const void *args, uint32_t *shared), const void *args);

/* ---- for the threads ---------------------------------------------------------------------- */

/* Somebody looks at memory, and may do so until another has written it. */
void fibers_look(void);
/* Until all threads of the block, or of the warp, are there, but those that are over. */
void fibers_meet_block(void);
void fibers_meet_warp(void);
/* The same.  Returns what each lane has given. */
const uint64_t *fibers_exchange(uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
