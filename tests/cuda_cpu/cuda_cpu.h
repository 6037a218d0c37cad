/*
 * A cuda backend without GPUs that is right: a module like libep_cuda.so, whose "GPU" memory is memfds and
 * whose ops run on threads of the process.  Server, library and tools work with it as they do with GPUs
 * (EP_CUDA_MODULE=.../libep_cuda_cpu.so), and whoever follows an address of GPU memory dies of SIGSEGV.
 *
 *     ll.c       computes what the LL kernels compute, by a protocol of its own in the same windows.  It says nothing about
 *                kernels/cuda, and is fast enough for programs; tests/cuda_kernels has the kernels themselves
 *     module.c   the table: cuda_fixture's memory; streams, events and graphs as queues of ops and copies;
 *                both halves of a mailbox
 *     record.c   what is told of ops
 */
#ifndef CUDA_CPU_H
#define CUDA_CPU_H

#include "cuda_fixture.h"

enum { NAP_US = 20 }; /* of who waits for what others write: the processor is theirs meanwhile */

/* A row that came: where the dispatch laid it out, with which weights. */
struct cpu_arrival {
    uint32_t token, n;
    uint64_t position[EP_MAX_TOP_K]; /* by expert; rank-major: one */
    float weight[EP_MAX_TOP_K];
};

struct cpu_handle {
    int32_t *home, *local; /* [T_ll * K]; -1: nowhere */
    float *weight;
    uint32_t tokens, top_k;
    uint64_t members;      /* of the dispatch */
    uint32_t *arrived;     /* [R] rows */
    struct cpu_arrival *arrival; /* [R][T_ll] */
};

/* One rank, as its thread sees it: all pointers are the host's. */
struct cpu_rank {
    uint32_t rank, ranks;
    struct ep_layout_map map;
    struct ep_placement placement;
    uint8_t *window[EP_DEVICE_MAX_RANKS];
    struct ep_device_state *state;
    uint64_t sequence;
    struct cpu_handle handle[EP_MAX_HANDLES];
    struct ep_op half[EP_MAX_HANDLES]; /* the send-only op that a complete finishes */
};

/* After a failure too it is to be ended. */
ep_status cpu_rank_init(struct cpu_rank *rank, const struct ep_placement *placement, struct ep_error *error);
void cpu_rank_fini(struct cpu_rank *rank);

/* Runs an op to its end and writes its record. */
void cpu_execute(struct cpu_rank *rank, const struct ep_op *op);
/* Does not run it, and writes that. */
void cpu_refuse(struct cpu_rank *rank, const struct ep_op *op, ep_status why);

/* What somebody reads meanwhile, word by word, as it reads it from a GPU. */
void cpu_store_words(void *to, const void *from, uint64_t bytes);
void cpu_note_failure(struct ep_device_report *report, const struct ep_device_record *record, uint64_t part);

#endif
