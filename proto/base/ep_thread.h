/* ep_thread: what a thread is for, as the system's scheduler sees it. */
#ifndef EP_THREAD_H
#define EP_THREAD_H

#include <sys/resource.h>

#define EP_BACKGROUND_NICE 10

/*
 * Nobody waits for what the calling thread does: where there are too few cores, others come first.  For good: only who
 * may raise priorities could take it back.  (On Linux a nice value is a thread's own, see pthreads(7).)
 */
static inline void ep_thread_goes_behind(void)
{
    (void)setpriority(PRIO_PROCESS, 0, EP_BACKGROUND_NICE);
}

#endif
