/*
 * A cuda backend without GPUs, for tests of what is around it: memory is memfds, streams run nothing,
 * an op writes the record that the test has asked for, whether it is launched or rung for.  Who serves a rank
 * here runs nothing: a test that looks at the server's half plays the worker, and says with `passed` how many
 * ops are over.
 *
 * Addresses of "GPU" memory cannot be followed, unless `followed` says so: whoever does so dies of SIGSEGV.
 * cuda_fixture_host() is where a test looks at the bytes.
 */
#ifndef CUDA_FIXTURE_H
#define CUDA_FIXTURE_H

#include "ep_cuda.h"

enum { CUDA_FIXTURE_DEVICES = 2, CUDA_FIXTURE_OPS = 64, CUDA_FIXTURE_ASLEEP_MS = 5000 };

struct cuda_fixture {
    /* what it is to do */
    uint32_t busy;       /* streams say that work is under way; atomic */
    struct ep_device_record outcome; /* of the next ops; number, generation, sequence are filled in */
    uint32_t unserved;   /* ops that are rung for wait for the test, which plays the server: a stream is busy
                            until its mailbox is answered.  0: they are over at once; atomic */
    uint32_t passed;     /* ops that are over at each serve, for its wait; atomic */
    uint32_t stuck;      /* serve_end says that something still runs; atomic */
    uint32_t looking;    /* serve_forgotten says that an op still runs; atomic */
    uint64_t piece;      /* memory_range tells so much of a memory at a time; 0: all of it */
    bool followed;       /* addresses of memory that is made from here on are the host's too */
    bool legacy;         /* memory is like cudaMalloc()'s: nothing exports it by an address */
    uint32_t lost;       /* bit d: whatever is asked of device d fails with EP_DEVICE_LOST; atomic */
    uint32_t asleep;     /* memory_create waits until it is 0, or for CUDA_FIXTURE_ASLEEP_MS; atomic */
    void (*on_info)(uint32_t device, struct ep_cuda_device *info); /* what else a device is */
    void (*on_read)(const void *gpu, void *user); /* before a copy to the host: a kernel may run on now */
    void *user;

    /* what it has seen */
    uint32_t memories, streams, ranks, ringers, serves, graphs, events, pinned; /* alive */
    uint32_t slept;              /* calls of memory_create that had to wait; atomic, as memories is */
    uint32_t copies;             /* write, read, fill, copy, store */
    uint32_t ops;                /* executed */
    struct ep_op op[CUDA_FIXTURE_OPS];  /* the first of them */
    void *stream[CUDA_FIXTURE_OPS];     /* that each was given to */
    uint32_t max_ht_sms;         /* of the last rank_open */
    uint32_t rung;               /* of the ops, those that came through ring */
    bool spins;                  /* as the last ring_open asked for */
    struct ep_cuda_rank_options served; /* the last serve_open; its pointers are the caller's */
    uint32_t posted, ended;      /* ops, of all serves; calls of serve_end */
    struct ep_regions regions;   /* of the last serve that was told of one */
};

extern struct cuda_fixture cuda_fixture;

const struct ep_cuda_api *cuda_fixture_api(void);
/* Everything as at the start; nothing may be alive. */
void cuda_fixture_reset(void);

/*
 * Once `after` calls of the function `name` of ep_cuda_api have worked, the next fails with EP_INTERNAL; NULL: none.
 * This and cuda_fixture_serves(), which tells `serves`, while other threads call the backend.
 */
void cuda_fixture_fail(const char *name, uint32_t after);
uint32_t cuda_fixture_serves(void);

/* The bytes behind an address of GPU memory, NULL when it is none. */
void *cuda_fixture_host(const void *gpu);
/* Gives back memory that somebody keeps for ever. */
void cuda_fixture_free(const void *gpu);
/* EP_CUDA_UUID_BYTES of a device. */
const uint8_t *cuda_fixture_uuid(uint32_t device);

#endif
