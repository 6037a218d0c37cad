/*
 * crew: the ranks of a case, a process each, and the parent that watches them.
 *
 * Every case has processes of its own: a plugin that crashes, hangs or leaks costs one case. The parent starts no
 * thread and loads nothing; it forks, watches and judges, and its children die with it. A rank waits for a state until
 * the case's deadline, by itself; what hangs inside a call of the plugin is killed a little later, and the parent says
 * which call that was.
 */
#ifndef CREW_H
#define CREW_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"

#define CREW_NOBODY UINT32_MAX
enum { CREW_MAX_RANKS = 16, CREW_HANDLE = 128, CREW_REPORT = 4096 };

/* A rank has two threads of ours: one plays the GPU, one is NCCL's progress thread. */
enum crew_thread { CREW_MAIN, CREW_PROGRESS, CREW_THREADS };

/* One rank, seen by all: in shared memory. */
struct crew_member {
    struct ep_error error;
    char said[256]; /* the plugin's last warning */
    uint8_t handle[CREW_HANDLE];
    const char *doing[CREW_THREADS]; /* a literal: parent and ranks are one program; atomic */
    uint32_t peer[CREW_THREADS];     /* CREW_NOBODY: it is about nobody; atomic */
    uint32_t over;                   /* `error` is written; atomic, release, partner: judge */
    uint32_t arrived;                /* barriers; atomic, release, partner: crew_barrier */
    uint32_t leaving;                /* it will die, as the case wants it to; atomic */
    uint32_t words[4];               /* for cases; atomic */
};

struct crew_shared {
    uint32_t failed; /* somebody has: nobody waits any more; atomic */
    uint32_t resume; /* the parent is to wake ranks that have stopped themselves; atomic */
    struct crew_member member[CREW_MAX_RANKS];
};

struct crew {
    uint32_t ranks;
    uint32_t rank; /* in a rank's process: its own */
    uint64_t begin_ns, deadline_ns;
    struct crew_shared *shared;
};

/* Runs in each rank's process. EP_UNIMPLEMENTED: the case cannot be run here, the text says why. */
typedef ep_status crew_fn(struct crew *crew, const void *arg, struct ep_error *error);

/*
 * Forks the ranks, lets each run fn, and judges: EP_OK, EP_UNIMPLEMENTED when a rank says so, EP_VERIFY_FAILED; a line
 * in `report` for each rank that had something to say. Nothing of the crew is left when this returns.
 */
ep_status crew_run(uint32_t ranks, uint32_t seconds, crew_fn *fn, const void *arg, char report[CREW_REPORT]);

/* ---- in a rank's process ------------------------------------------------------------------------- */

/* Between two looks at what is waited for: lets others run. False when time is up, or another rank failed. */
bool crew_go_on(const struct crew *crew, uint32_t *turn);
/* The error of a wait that crew_go_on has ended. */
__attribute__((format(printf, 3, 4))) ep_status crew_late(const struct crew *crew, struct ep_error *error,
                                                          const char *format, ...);

/* All ranks that are not about to die have come here. */
ep_status crew_barrier(struct crew *crew, struct ep_error *error);

/* For the parent's sentence about a rank that hangs: `what` is a literal; NULL: nothing that could. */
void crew_doing(const struct crew *crew, enum crew_thread thread, const char *what, uint32_t peer);

struct crew_member *crew_me(const struct crew *crew);
/* This process dies now, as the case wants it to. */
_Noreturn void crew_die(const struct crew *crew);
/* This process stops until some rank calls crew_resume(). */
void crew_stop(const struct crew *crew);
void crew_resume(const struct crew *crew);

#endif
