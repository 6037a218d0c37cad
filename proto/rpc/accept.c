/*
 * accept4(2) for the whole process, so that running out of descriptors ends no listener, and that gRPC's have a limit
 * (door.c).
 *
 * gRPC accepts TLS connections itself, and its listener stops for good when accept4 fails with
 * anything but EAGAIN and EINTR: one crowd of strangers on the port, and it is deaf until the
 * process is started again.  gRPC has no way to ask for another behaviour or to listen again, but
 * it calls accept4 through the dynamic linker, which prefers the program's definition to libc's.
 * Ours does what libuv does on its own listeners: a descriptor kept in reserve is given up to
 * accept the newcomer and hang up on it.
 *
 * <sys/socket.h> is left out: its prototype has a transparent union of the library's own.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rpc_accept.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int spare = -1; /* guarded by lock */

static int plain_accept(int fd, void *address, unsigned *length, int flags)
{
    return (int)syscall(SYS_accept4, fd, address, length, flags);
}

int rpc_accept(int fd)
{
    return plain_accept(fd, NULL, NULL, O_NONBLOCK | O_CLOEXEC); /* SOCK_ flags have these values */
}

static int open_spare(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void rpc_accept_reserve(void)
{
    pthread_mutex_lock(&lock);
    if (spare < 0)
        spare = open_spare();
    pthread_mutex_unlock(&lock);
}

bool rpc_accept_and_drop(int fd)
{
    int dropped = -1;

    pthread_mutex_lock(&lock);
    if (spare >= 0) {
        close(spare);
        dropped = plain_accept(fd, NULL, NULL, O_CLOEXEC);
        if (dropped >= 0)
            close(dropped);
    }
    spare = open_spare(); /* another thread may have been faster: then it is tried again next time */
    pthread_mutex_unlock(&lock);
    return dropped >= 0;
}

static bool is_shortage(int reason)
{
    return reason == EMFILE || reason == ENFILE || reason == ENOBUFS || reason == ENOMEM;
}

/*
 * EINTR: "try again", after one was dropped, for want of descriptors or of places.  EAGAIN: "wait for the next", when
 * not even that.
 */
__attribute__((visibility("default")))
int accept4(int fd, void *address, unsigned *length, int flags);

int accept4(int fd, void *address, unsigned *length, int flags)
{
    int accepted = plain_accept(fd, address, length, flags);

    if (accepted < 0 && is_shortage(errno))
        errno = rpc_accept_and_drop(fd) ? EINTR : EAGAIN;
    if (accepted >= 0 && !rpc_door_admits(accepted)) {
        close(accepted);
        accepted = -1;
        errno = EINTR;
    }
    return accepted;
}
