/*
 * ep_futex: sleep on a 32-bit word until another thread or process wakes it.
 *
 * Words live in memory shared between processes, so no FUTEX_PRIVATE, and are read
 * and written with the __atomic built-ins: the same headers serve device code.
 * See futex(2).  Every wait is bounded.
 */
#ifndef EP_FUTEX_H
#define EP_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

/*
 * Sleep while *word == expected, for at most timeout_ns.  Returns at a wake-up,
 * a changed word, a signal or the timeout; the caller looks at its condition again.
 */
static inline void ep_futex_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    const struct timespec t = ep_clock_timespec(timeout_ns);

    (void)syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, NULL, 0);
}

/* Between two looks at a word: the processor may slow down, its other thread may run. */
static inline void ep_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void ep_futex_wake_all(uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#endif
