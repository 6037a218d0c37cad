/* ep_clock: monotonic time in nanoseconds, for durations and deadlines. */
#ifndef EP_CLOCK_H
#define EP_CLOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define EP_NS_PER_US 1000ull
#define EP_NS_PER_MS 1000000ull
#define EP_NS_PER_S  1000000000ull

static inline uint64_t ep_clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * EP_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* As ep_clock_ns(), which stands still while the machine is suspended; this does not: for what ends elsewhere. */
static inline uint64_t ep_clock_boot_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * EP_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* A time of ep_clock_ns(), or a duration, as the system's calls have it. */
static inline struct timespec ep_clock_timespec(uint64_t ns)
{
    return (struct timespec){ .tv_sec = (time_t)(ns / EP_NS_PER_S), .tv_nsec = (long)(ns % EP_NS_PER_S) };
}

/* A condition whose timed waits end at times of that clock, which nobody sets. */
static inline void ep_clock_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Wall time in microseconds since 1970, for records that people and other hosts read. */
static inline uint64_t ep_clock_wall_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

#endif
