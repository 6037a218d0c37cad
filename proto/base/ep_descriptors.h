/*
 * ep_descriptors: the first three, room for more before it is needed, and whether there are enough.
 *
 * A process's table of descriptors grows with the first one that has no place in it, and where the process has threads
 * Linux waits for an RCU grace period meanwhile (expand_fdtable(), fs/file.c): milliseconds, and on a machine whose cores
 * are all busy seconds (4 s *seen*), in which whoever called accept() or dup() stands still.
 */
#ifndef EP_DESCRIPTORS_H
#define EP_DESCRIPTORS_H

#include <errno.h>
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

/* Most that ep_descriptors_try() opens. */
#define EP_DESCRIPTORS_TRY_MOST 64

/* How many of so many can be opened, for libraries that end the process when they cannot; none is open when this returns.
 * Where it is fewer than wanted, errno says why. */
static inline int ep_descriptors_try(int wanted)
{
    int opened[EP_DESCRIPTORS_TRY_MOST], n = 0, why;

    while (n < wanted && n < EP_DESCRIPTORS_TRY_MOST && (opened[n] = eventfd(0, EFD_CLOEXEC)) >= 0)
        n++;
    why = errno;
    for (int i = 0; i < n; i++)
        close(opened[i]);
    errno = why;
    return n;
}

/*
 * Whoever starts a program with `2>&-` would have its log written to the socket or file that gets the number 2.  What is
 * put there can be neither read from nor written to, as if it were still closed.  gRPC opens an eventfd before main(), so
 * a program has this called before the libraries that it is linked to are initialised: EP_DESCRIPTORS_STANDARD; in main's file.
 */
static inline void ep_descriptors_standard(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY); /* the lowest free number: fd */
}

#define EP_DESCRIPTORS_STANDARD \
    __attribute__((section(".preinit_array"), used)) static void (*open_standard)(void) = ep_descriptors_standard

#endif
