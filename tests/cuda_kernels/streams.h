/*
 * streams.h: streams as a GPU has them: cuda.h, and kernels in them.
 *
 * A stream is a thread that does its steps in order.  Kernels run beside it (fibers.h), and one that is launched early
 * (programmatic dependent launch) may come when all blocks of the kernel ahead let it, or at any time later: which is left
 * to chance.  It waits for the end of the kernel ahead if it asks for that, and for nothing before that one.  All other steps
 * begin when all before them are over.
 *
 * There is no bound on how many kernels run at once.
 */
#ifndef CUDA_KERNELS_STREAMS_H
#define CUDA_KERNELS_STREAMS_H

#include <cuda.h>

#include "fibers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* grid: all but its arguments is looked at now; they are bytes, and kept. */
void stream_launch(CUstream stream, const struct fibers_grid *grid, size_t args_bytes, bool early);

#ifdef __cplusplus
}
#endif
#endif
