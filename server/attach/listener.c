#include "attach_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ep_log.h"

/* Accepts per turn of the loop, so that a flood does not starve the rest. */
#define ACCEPT_BATCH 32
/* Without descriptors the listener rests: it would be readable all the time. */
#define PAUSE_MS 100

static ep_status make_address(const char *path, struct sockaddr_un *address, struct ep_error *error)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (strlen(path) >= sizeof address->sun_path)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "socket path %s has %zu bytes: at most %zu fit",
                            path, strlen(path), sizeof address->sun_path - 1);
    memcpy(address->sun_path, path, strlen(path) + 1);
    return EP_OK;
}

/* What is at `path`: a dead socket is removed, anything else is an error. */
static ep_status clear_path(const struct sockaddr_un *address, struct ep_error *error)
{
    const char *path = address->sun_path;
    struct stat st;

    if (lstat(path, &st) < 0)
        return errno == ENOENT ? EP_OK : ep_error_errno(error, EP_IO, "socket %s", path);
    if (!S_ISSOCK(st.st_mode))
        return ep_error_set(error, EP_ALREADY_EXISTS, "socket %s: there is a file that is no socket", path);

    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (probe < 0)
        return ep_error_errno(error, EP_IO, "socket");

    int rc = connect(probe, (const struct sockaddr *)address, sizeof *address);
    int why = rc < 0 ? errno : 0;

    close(probe);
    if (why != ECONNREFUSED)
        return ep_error_set(error, EP_ALREADY_EXISTS,
                            "socket %s: another server is listening there", path);
    if (unlink(path) < 0 && errno != ENOENT)
        return ep_error_errno(error, EP_IO, "remove the dead socket %s", path);
    EP_INFO("attach", "dead socket replaced", EP_S("path", path));
    return EP_OK;
}

/* The mode is set before listen(), so nobody connects under another one. */
static ep_status bind_path(int fd, const struct sockaddr_un *address, mode_t mode, struct stat *st,
                           struct ep_error *error)
{
    const char *path = address->sun_path;

    if (bind(fd, (const struct sockaddr *)address, sizeof *address) < 0)
        return ep_error_errno(error, EP_IO, "bind %s", path);
    if (chmod(path, mode) < 0 || lstat(path, st) < 0 || listen(fd, SOMAXCONN) < 0) {
        ep_error_errno(error, EP_IO, "socket %s", path);
        unlink(path);
        return EP_IO;
    }
    return EP_OK;
}

static void on_acceptable(uv_poll_t *poll, int status, int events);

static void on_pause_over(uv_timer_t *timer)
{
    struct ep_attach *attach = timer->data;

    uv_poll_start(&attach->listener.poll, UV_READABLE, on_acceptable);
}

/* accept() has failed for want of descriptors or memory. */
static void out_of_descriptors(struct ep_attach *attach, int why)
{
    if (connection_drop_silent(attach))
        return; /* the descriptor is free at once */
    EP_WARN("attach", "cannot accept, pausing", EP_S("why", strerror(why)), EP_U("ms", PAUSE_MS));
    uv_poll_stop(&attach->listener.poll);
    uv_timer_start(&attach->listener.pause, on_pause_over, PAUSE_MS, 0);
}

/* False: no more for now. */
static bool accept_one(struct ep_attach *attach)
{
    int fd = accept4(attach->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd >= 0) {
        connection_accept(attach, fd);
        return true;
    }
    switch (errno) {
    case EAGAIN:
        return false;
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
        out_of_descriptors(attach, errno);
        return false;
    default: /* the peer was gone before we came to it */
        return true;
    }
}

static void on_acceptable(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    for (int i = 0; i < ACCEPT_BATCH && accept_one(poll->data); i++)
        ;
}

ep_status listener_open(struct ep_attach *attach, const char *path, struct ep_error *error)
{
    struct listener *listener = &attach->listener;
    struct sockaddr_un address;
    struct stat st;

    if (make_address(path, &address, error) != EP_OK || clear_path(&address, error) != EP_OK)
        return error->status;
    listener->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0)
        return ep_error_errno(error, EP_IO, "socket");
    if (bind_path(listener->fd, &address, attach->mode, &st, error) != EP_OK)
        goto close_fd;
    listener->path = strdup(path);
    listener->dev = st.st_dev;
    listener->ino = st.st_ino;
    if (!listener->path) {
        ep_error_set(error, EP_NO_MEMORY, "no memory for the side socket");
        goto remove_path;
    }

    int rc = uv_poll_init(attach->loop, &listener->poll, listener->fd);

    if (rc < 0) {
        ep_error_set(error, EP_IO, "poll %s: %s", path, uv_strerror(rc));
        goto free_path;
    }
    uv_timer_init(attach->loop, &listener->pause);
    attach_handle_opened(attach);
    attach_handle_opened(attach);
    listener->poll.data = listener->pause.data = attach;
    uv_poll_start(&listener->poll, UV_READABLE, on_acceptable);
    return EP_OK;

free_path:
    free(listener->path);
    listener->path = NULL;
remove_path:
    unlink(path);
close_fd:
    close(listener->fd);
    listener->fd = -1;
    return error->status;
}

static void on_handle_closed(uv_handle_t *handle)
{
    attach_handle_closed(handle->data);
}

void listener_close(struct ep_attach *attach)
{
    struct listener *listener = &attach->listener;
    struct stat st;

    if (lstat(listener->path, &st) == 0 && st.st_dev == listener->dev && st.st_ino == listener->ino)
        unlink(listener->path);
    uv_close((uv_handle_t *)&listener->poll, on_handle_closed);
    uv_close((uv_handle_t *)&listener->pause, on_handle_closed);
    close(listener->fd);
    listener->fd = -1;
    free(listener->path);
    listener->path = NULL;
}
