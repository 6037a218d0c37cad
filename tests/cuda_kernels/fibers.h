/*
 * fibers.h: blocks of threads as a GPU runs them.
 *
 * A block is a thread of the process, and its own threads take turns on it: each runs until it waits for others or
 * looks at memory that another may write, and who comes next is left to chance, so that what may happen in any order
 * does.  Threads are in warps of 32.  Stores of 16 bytes may be seen by others later than what the block stores after them.
 *
 * What a grid waits for before it begins, and in which order others come, is its stream's (streams.c).
 */
#ifndef CUDA_KERNELS_FIBERS_H
#define CUDA_KERNELS_FIBERS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fiber_index {
    uint32_t x;
};

/* The blocks of a kernel. */
struct fibers_grid {
    uint32_t blocks, threads, shared_bytes;
    void (*body)(const void *args);
    const void *args;
    const struct fibers_grid *ahead; /* in its stream, and perhaps not over; NULL: none.  There as long as this one runs */
    uint32_t letting; /* blocks that are over, or let the next grid of the stream come; atomic */
    uint32_t over;    /* all of them are; atomic */
};

/* Who is running, for the threads of a block; and how many blocks there are. */
extern __thread struct fiber_index fiber_thread, fiber_block, fiber_blocks;
/* The shared memory that the grid was launched with, 128-byte aligned and full of rubbish at first. */
extern __thread uint32_t *fiber_shared;

/* Runs `body` in all threads of all blocks at once, until each is over. */
void fibers_run(struct fibers_grid *grid);

/* ---- for the threads ---------------------------------------------------------------------- */

/* Somebody looks at memory, and may do so until another has written it. */
void fibers_look(void);
/* And somebody has written it: the block does something.  Or has counted: others may be further than this block from now on. */
void fibers_wrote(void);
void fibers_counted(void);
/* And has counted itself among the blocks that wait for nothing more: the last one may go on while it still writes. */
void fibers_arrived(void);
/* 16 bytes at a multiple of 16, as a whole: for others some time before the block's next fence, or its end, and later than what
 * it stores meanwhile; for the block at once. */
void fibers_store(void *to, const void *from);
void fibers_load(void *to, const void *from);
void fibers_fence(void);
/* Until all threads of the block, or of the warp, are there, but those that are over. */
void fibers_meet_block(void);
void fibers_meet_warp(void);
/* The same.  Returns what each lane has given; whether any thread of the block has given true. */
const uint64_t *fibers_exchange(uint64_t value);
bool fibers_any_of_block(bool value);
/* Until the grid ahead is over; and: the next one may come, as far as this block goes. */
void fibers_await_stream(void);
void fibers_let_next_come(void);

#ifdef __cplusplus
}
#endif
#endif
