/*
 * ep_thread: what a thread is for, as the system's scheduler sees it.  Where there are too few cores, those come first
 * that ops wait for, then those that run a cluster, then those that nobody waits for.
 *
 * On Linux a nice value is a thread's own (pthreads(7)), and new threads have that of the one that makes them.  Who may
 * not raise priorities cannot take back what he has lowered.
 */
#ifndef EP_THREAD_H
#define EP_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/resource.h>

#define EP_OPS_NICE        (-5)
#define EP_CONTROL_NICE    5
#define EP_BACKGROUND_NICE 10

/* Of the pool that libuv has for what takes long: main() asks for so many. */
#define EP_POOL_THREADS 16

/* A thread that gets no signals: these are for the program's own ones.  The name has at most 15 bytes.  0, or what went
 * wrong, as pthread_create(3) says it. */
int ep_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/* Most that ep_threads_try() starts. */
#define EP_THREADS_TRY_MOST 64

/*
 * Whether so many can be started beside those that there are, for libraries that do not say when they cannot: they are,
 * together and with the address space that malloc takes for each, and have ended when this returns.  0, or what went wrong
 * when `started` had been, as pthread_create(3) says it.
 */
int ep_threads_try(int wanted, int *started);

/* Ops wait for what the calling thread does.  False, and nothing done: this process may not (root, CAP_SYS_NICE or
 * RLIMIT_NICE). */
static inline bool ep_thread_runs_ops(void)
{
    return setpriority(PRIO_PROCESS, 0, EP_OPS_NICE) == 0;
}

/* What it does is about the cluster, and no op waits for it. */
static inline void ep_thread_controls(void)
{
    (void)setpriority(PRIO_PROCESS, 0, EP_CONTROL_NICE);
}

/* Nobody waits for what the calling thread does. */
static inline void ep_thread_goes_behind(void)
{
    (void)setpriority(PRIO_PROCESS, 0, EP_BACKGROUND_NICE);
}

#endif
