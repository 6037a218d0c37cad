#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ep_clock.h"

#define SECRET_BYTES_MAX 4096

/* ---- directories ---------------------------------------------------------------- */

static ep_status make_one(const char *path, mode_t mode, struct ep_error *error)
{
    struct stat info;

    if (mkdir(path, mode) == 0)
        return EP_OK;
    if (errno != EEXIST)
        return ep_error_errno(error, EP_IO, "cannot make the directory %s", path);
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return EP_OK;
    return ep_error_set(error, EP_IO, "%s is there and is not a directory", path);
}

ep_status ep_files_make_directory(const char *path, mode_t mode, struct ep_error *error)
{
    char *copy = strdup(path);
    ep_status status = EP_OK;

    if (!copy)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    for (char *slash = strchr(copy + 1, '/'); slash && slash[1] && status == EP_OK;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        status = make_one(copy, 0755, error);
        *slash = '/';
    }
    if (status == EP_OK)
        status = make_one(copy, mode, error);
    free(copy);
    return status;
}

ep_status ep_files_make_parent(const char *path, mode_t mode, struct ep_error *error)
{
    const char *slash = strrchr(path, '/');
    char *parent;
    ep_status status;

    if (!slash || slash == path)
        return EP_OK;
    parent = strndup(path, (size_t)(slash - path));
    if (!parent)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = ep_files_make_directory(parent, mode, error);
    free(parent);
    return status;
}

/* ---- locks ------------------------------------------------------------------------ */

/* 0: it does not say, or not yet. */
static long holder_of(int fd)
{
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);

    return n > 0 ? strtol(text, NULL, 10) : 0;
}

/* The holder before us removes the file when it ends: what we have locked may be nobody's file by now. */
static bool is_at(int fd, const char *path)
{
    struct stat ours, there;

    return fstat(fd, &ours) == 0 && stat(path, &there) == 0 && ours.st_dev == there.st_dev &&
           ours.st_ino == there.st_ino;
}

static ep_status lock_held(int fd, const char *what, struct ep_error *error)
{
    long pid = holder_of(fd);
    char who[48] = "";

    if (pid > 0)
        snprintf(who, sizeof who, " (pid %ld)", pid);
    return ep_error_set(error, EP_FAILED_PRECONDITION, "%s is in use by another ep-server%s", what, who);
}

/*
 * A server that was killed holds its locks until the kernel has taken it apart, which takes a moment when it
 * has GPUs: so long whoever follows it at once is patient.
 */
#define LOCK_PATIENCE_NS (3 * EP_NS_PER_S)
#define LOCK_AGAIN_NS (20 * EP_NS_PER_MS)

static int lock_patiently(int fd)
{
    const uint64_t end = ep_clock_ns() + LOCK_PATIENCE_NS;
    int result;

    while ((result = flock(fd, LOCK_EX | LOCK_NB)) != 0 && errno == EWOULDBLOCK && ep_clock_ns() < end)
        nanosleep(&(struct timespec){ .tv_nsec = LOCK_AGAIN_NS }, NULL);
    return result;
}

static ep_status lock_open(const char *path, const char *what, int *fd, struct ep_error *error)
{
    ep_status status;

    for (;;) {
        *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
        if (*fd < 0)
            return ep_error_errno(error, EP_IO, "cannot open %s", path);
        if (lock_patiently(*fd) != 0) {
            status = errno == EWOULDBLOCK ? lock_held(*fd, what, error)
                                          : ep_error_errno(error, EP_IO, "cannot lock %s", path);
            close(*fd);
            return status;
        }
        if (is_at(*fd, path))
            return EP_OK;
        close(*fd);
    }
}

ep_status ep_lock_file_take(struct ep_lock_file *lock, const char *path, const char *what,
                            struct ep_error *error)
{
    ep_status status;
    int fd;

    lock->path = strdup(path);
    if (!lock->path)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = lock_open(path, what, &fd, error);
    if (status == EP_OK && (ftruncate(fd, 0) != 0 || dprintf(fd, "%ld\n", (long)getpid()) < 0)) {
        status = ep_error_errno(error, EP_IO, "cannot write %s", path);
        close(fd);
    }
    if (status != EP_OK) {
        free(lock->path);
        lock->path = NULL;
        return status;
    }
    lock->fd = fd;
    return EP_OK;
}

void ep_lock_file_release(struct ep_lock_file *lock)
{
    if (!lock->path)
        return;
    unlink(lock->path); /* while it is locked: nobody else has it */
    close(lock->fd);
    free(lock->path);
    lock->path = NULL;
}

/* ---- files ------------------------------------------------------------------------- */

static ep_status write_file(const char *path, const char *text, struct ep_error *error)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    size_t size = strlen(text);
    bool ok;

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "cannot write %s", path);
    errno = ENOSPC; /* of a short write */
    ok = write(fd, text, size) == (ssize_t)size;
    if (!ok)
        ep_error_errno(error, EP_IO, "cannot write %s", path);
    close(fd);
    return ok ? EP_OK : EP_IO;
}

/* What takes its place would be a file where others have a device, /dev/null say, or a link. */
static ep_status check_replaceable(const char *path, struct ep_error *error)
{
    struct stat there;

    if (lstat(path, &there) != 0 || S_ISREG(there.st_mode))
        return EP_OK;
    return ep_error_set(error, EP_IO, "%s exists and is not a regular file", path);
}

ep_status ep_files_write_atomically(const char *path, const char *text, struct ep_error *error)
{
    char *temporary = NULL;
    ep_status status = check_replaceable(path, error);

    if (status != EP_OK)
        return status;
    if (asprintf(&temporary, "%s.%ld", path, (long)getpid()) < 0)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = write_file(temporary, text, error);
    if (status == EP_OK && rename(temporary, path) != 0)
        status = ep_error_errno(error, EP_IO, "cannot write %s", path);
    if (status != EP_OK)
        unlink(temporary);
    free(temporary);
    return status;
}

ep_status ep_files_read_secret(const char *path, char **secret, struct ep_error *error)
{
    char text[SECRET_BYTES_MAX + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n;

    if (fd < 0)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);
    n = read(fd, text, sizeof text);
    if (n < 0)
        ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);
    close(fd);
    if (n < 0)
        return EP_INVALID_ARGUMENT;
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r'))
        n--;
    if (n == 0 || n > SECRET_BYTES_MAX || memchr(text, '\0', (size_t)n))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s must hold 1 to %d bytes of text", path,
                            SECRET_BYTES_MAX);
    *secret = strndup(text, (size_t)n);
    return *secret ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "out of memory");
}
