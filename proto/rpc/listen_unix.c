/* Unix sockets: who owns the path, and what happens to a path that is there already. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "rpc_private.h"

#define DIRECTORY_LOCK_MS 2000

/* What the system says of a path: only some of it is that we may not. */
static ep_status status_of(int cause)
{
    switch (cause) {
    case ENOENT:
    case ENOTDIR: return EP_NOT_FOUND;
    case EACCES:
    case EPERM:
    case EROFS: return EP_PERMISSION_DENIED;
    case EADDRINUSE: return EP_ALREADY_EXISTS;
    default: return EP_IO;
    }
}

/*
 * Two servers that start at once must not both find the path dead and both replace it, so what
 * follows is done under a lock of the directory: flock(2) needs no file to leave behind.
 */
static ep_status lock_directory(const char *path, int *out, struct ep_error *error)
{
    uint64_t give_up = rpc_now_ms() + DIRECTORY_LOCK_MS;
    const char *slash = strrchr(path, '/');
    char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    ep_status status = EP_OK;
    int fd;

    if (!directory)
        return ep_error_set(error, EP_NO_MEMORY, "cannot listen on %s: out of memory", path);
    fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        status = ep_error_errno(error, status_of(errno), "cannot listen on %s: cannot open %s", path, directory);
    free(directory);
    while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (rpc_now_ms() > give_up) {
            status = ep_error_errno(error, EP_UNAVAILABLE,
                                    "cannot listen on %s: cannot lock its directory", path);
            close(fd);
            return status;
        }
        uv_sleep(5);
    }
    *out = fd;
    return status;
}

static struct sockaddr_un unix_address(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    memcpy(address.sun_path, path, strlen(path) + 1); /* checked by the caller */
    return address;
}

/* EP_OK: nothing is there any more. */
static ep_status clear_stale(const char *path, struct ep_error *error)
{
    struct sockaddr_un address = unix_address(path);
    struct stat st;
    int fd, result, reason;

    if (lstat(path, &st) != 0)
        return errno == ENOENT ? EP_OK
                               : ep_error_errno(error, status_of(errno), "cannot look at %s", path);
    if (!S_ISSOCK(st.st_mode))
        return ep_error_set(error, EP_ALREADY_EXISTS, "%s exists and is not a socket", path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return ep_error_errno(error, EP_IO, "cannot probe %s", path);
    result = connect(fd, (struct sockaddr *)&address, sizeof address);
    reason = errno;
    close(fd);
    errno = reason;
    if (result == 0 || reason == EAGAIN) /* EAGAIN: it lives and its backlog is full */
        return ep_error_set(error, EP_ALREADY_EXISTS,
                            "%s is in use: another server listens there", path);
    if (reason != ECONNREFUSED)
        return ep_error_errno(error, status_of(reason), "%s exists and cannot be probed", path);
    if (unlink(path) != 0)
        return ep_error_errno(error, status_of(errno), "cannot replace the dead socket %s", path);
    return EP_OK;
}

static ep_status bind_unix(int fd, const char *path, mode_t mode, struct stat *st,
                           struct ep_error *error)
{
    struct sockaddr_un address = unix_address(path);

    /* Closed to all until its mode is set: the file takes the socket's mode, less the umask. */
    if (fchmod(fd, 0) != 0)
        return ep_error_errno(error, EP_IO, "cannot listen on %s", path);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0)
        return ep_error_errno(error, status_of(errno), "cannot listen on %s", path);
    if (listen(fd, RPC_BACKLOG) != 0 || chmod(path, mode) != 0 || lstat(path, st) != 0) {
        ep_error_errno(error, EP_IO, "cannot listen on %s", path);
        unlink(path);
        return EP_IO;
    }
    return EP_OK;
}

static ep_status open_unix(const char *path, mode_t mode, int *out, struct stat *st,
                           struct ep_error *error)
{
    int lock = -1, fd = -1;
    ep_status status = lock_directory(path, &lock, error);

    if (status != EP_OK)
        return status;
    status = clear_stale(path, error);
    if (status != EP_OK)
        goto unlock;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        status = ep_error_errno(error, EP_IO, "cannot listen on %s", path);
    else
        status = bind_unix(fd, path, mode, st, error);
    if (status != EP_OK && fd >= 0)
        close(fd);
    else
        *out = fd;

unlock:
    close(lock);
    return status;
}

ep_status ep_rpc_server_listen_unix(struct ep_rpc_server *server, const char *path, mode_t mode,
                                    bool (*accept_peer)(const struct ep_rpc_peer *peer, void *user),
                                    void *user, struct ep_error *error)
{
    struct rpc_listener *listener;
    struct stat st;
    ep_status status;
    char *copy;
    int fd;

    if (server->state != RPC_SERVER_NEW)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "cannot listen on %s: the server has been started", path);
    if (!*path || strlen(path) >= sizeof ((struct sockaddr_un *)0)->sun_path)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "socket path \"%s\": must have 1 to %zu bytes", path,
                            sizeof ((struct sockaddr_un *)0)->sun_path - 1);
    copy = strdup(path);
    if (!copy)
        return ep_error_set(error, EP_NO_MEMORY, "cannot listen on %s: out of memory", path);
    status = open_unix(path, mode, &fd, &st, error);
    if (status != EP_OK)
        goto free_copy;
    status = rpc_listener_add(server, fd, copy, &listener, error);
    if (status != EP_OK) {
        unlink(path);
        goto free_copy;
    }
    listener->dev = st.st_dev;
    listener->ino = st.st_ino;
    listener->accept_peer = accept_peer;
    listener->user = user;
    return EP_OK;

free_copy:
    free(copy);
    return status;
}
