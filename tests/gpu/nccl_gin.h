/*
 * nccl_gin.h: what nccl_gin.c asks of the GPU: puts and signals through NCCL's device API, and NCCL's device
 * communicator, which only C++ can name.
 *
 * A rank's window holds, for each rank, an area that puts to it come from and one that its puts go to.  Signals count
 * up for as long as the communicator lives and are never set back, so a kernel is told how far they are.
 *
 * All launchers return NULL or what went wrong.  What a kernel has found is in its report, once the stream is there.
 */
#ifndef NCCL_GIN_H
#define NCCL_GIN_H

#include <stdbool.h>
#include <stdint.h>

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GIN_MAX_RANKS = 32, GIN_MAX_TIMES = 256 };

#define GIN_AREA (2ull << 20)

/* One after the other in an area, the largest last. */
#define GIN_SIZES 4, 36, 256, 1000, 4096, 14336, 65540, 1 << 20

struct gin_report {
    uint64_t wrong;           /* words that are not what they should be */
    uint64_t got, want;       /* the first of them */
    uint32_t source, word;
    uint32_t late, late_rank; /* 1: a signal of that rank did not come in time */
    uint64_t rounds;          /* that were found good */
    uint64_t ns[GIN_MAX_TIMES];
};

struct gin_device { /* struct ncclDevComm, of whatever size */
    uint64_t words[64];
};

struct gin_rank {
    struct gin_device device;
    ncclWindow_t window;
    uint8_t *base;
    uint32_t rank, ranks;
    uint64_t limit_ns;         /* of every wait */
    struct gin_report *report; /* pinned */
    void *stream;
};

static inline uint64_t gin_window_bytes(uint32_t ranks)
{
    return 2 * ranks * GIN_AREA;
}

/* The calling thread's device, which NCCL asks for too. */
const char *gin_use_device(uint32_t device);

/* create, destroy: NCCL's own ncclDevCommCreate and ncclDevCommDestroy.  lsa: ranks that loads and stores reach. */
const char *gin_device_open(void *create, ncclComm_t comm, uint32_t ranks, struct gin_device *out, uint32_t *lsa);
const char *gin_device_close(void *destroy, ncclComm_t comm, const struct gin_device *device);

/* Every size to every rank, this one too, `rounds` times; `before` rounds were run before. */
const char *gin_exchange(const struct gin_rank *rank, uint64_t before, uint32_t rounds);

/* 16 bytes and a signal to `peer` and back, `rounds` times; ns[]: there and back. */
const char *gin_ping_pong(const struct gin_rank *rank, uint32_t peer, bool first, uint64_t before, uint32_t rounds);

/* `puts` of `bytes` to each rank of a mask, until all have come; from each rank of the other as many come.  ns[]: each
 * of `rounds` times. */
const char *gin_pour(const struct gin_rank *rank, uint32_t to, uint32_t from, uint32_t puts, uint32_t bytes,
                     uint64_t before, uint32_t rounds);

#ifdef __cplusplus
}
#endif
#endif
