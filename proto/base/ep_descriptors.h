/*
 * ep_descriptors: room for descriptors, before it is needed.
 *
 * A process's table of descriptors grows with the first one that has no place in it, and where the process has threads
 * Linux waits for an RCU grace period meanwhile (expand_fdtable(), fs/file.c): milliseconds, and on a machine whose cores
 * are all busy seconds (4 s *seen*), in which whoever called accept() or dup() stands still.
 */
#ifndef EP_DESCRIPTORS_H
#define EP_DESCRIPTORS_H

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

/* Descriptors below n have room from now on, as far as the process may have them.  Costs nothing before there are threads. */
static inline void ep_descriptors_reserve(unsigned n)
{
    struct rlimit limit;
    int any = eventfd(0, EFD_CLOEXEC), last;

    if (any < 0)
        return;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < n)
        n = (unsigned)limit.rlim_cur;
    last = fcntl(any, F_DUPFD_CLOEXEC, (int)n - 1); /* fails where it is taken: then there is room */
    if (last >= 0)
        close(last);
    close(any);
}

#endif
