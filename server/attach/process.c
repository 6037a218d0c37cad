#include "attach_private.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ep_clock.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3 */
#endif

/*
 * A process that we cannot see (another pid namespace, no pidfd) is taken for gone this long after
 * its socket closed: the kernel drops a dying process's memory before it closes its sockets.
 */
#define UNSEEN_GRACE_NS (2 * EP_NS_PER_S)

/* PF_EXITING of the kernel's flags: set before anything that the process has open is closed. */
#define FLAG_EXITING 0x4u

/* What /proc/PID/stat says (proc(5), fields 3, 9 and 22). */
struct stat_line {
    char state;
    unsigned long flags;
    uint64_t start; /* 0: unknown */
};

/* The name in field 2 may hold blanks and parentheses.  False: there is no such process. */
static bool read_stat(pid_t pid, struct stat_line *out)
{
    char path[64], text[1024];
    FILE *file;

    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    file = fopen(path, "re");
    if (!file)
        return false;

    size_t n = fread(text, 1, sizeof text - 1, file);

    fclose(file);
    text[n] = '\0';

    char *field = strrchr(text, ')');

    if (!field || !field[1])
        return false;
    *out = (struct stat_line){ .state = field[2] };
    for (int i = 2; field && i < 22; i++) {
        field = strchr(field + 1, ' ');
        if (field && i + 1 == 9)
            out->flags = strtoul(field + 1, NULL, 10);
    }
    out->start = field ? strtoull(field + 1, NULL, 10) : 0;
    return true;
}

static int open_pidfd(pid_t pid, int socket)
{
    int fd = -1;
    socklen_t size = sizeof fd;

    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0)
        return fd;
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

void process_open(struct process *process, pid_t pid, int socket)
{
    struct stat_line line = { 0 };

    *process = (struct process){ .pid = pid, .pidfd = open_pidfd(pid, socket) };
    if (process->pidfd < 0 && pid > 0 && read_stat(pid, &line))
        process->start = line.start;
}

void process_close(struct process *process)
{
    if (process->pidfd >= 0)
        close(process->pidfd);
    process->pidfd = -1;
}

bool process_gone(const struct process *process)
{
    struct stat_line line;

    if (process->pidfd >= 0) {
        struct pollfd p = { .fd = process->pidfd, .events = POLLIN };

        return poll(&p, 1, 0) == 1;
    }
    if (process->pid <= 0)
        return ep_clock_ns() - process->watch_ns > UNSEEN_GRACE_NS;
    if (!read_stat(process->pid, &line))
        return kill(process->pid, 0) < 0 && errno == ESRCH;
    return line.state == 'Z' || line.state == 'X' || (process->start && line.start != process->start);
}

bool process_dying(const struct process *process)
{
    struct stat_line line;

    return process->pid > 0 && read_stat(process->pid, &line) && line.flags & FLAG_EXITING;
}
