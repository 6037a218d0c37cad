#include "attach_frame.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Room for descriptors in one message.  The kernel closes what does not fit. */
#define MAX_FDS 8

void ep_attach_frame_init(struct ep_attach_frame *frame, enum ep_attach_type type)
{
    memset(frame, 0, sizeof *frame);
    frame->magic = EP_ATTACH_MAGIC;
    frame->version = EP_ATTACH_VERSION;
    frame->type = (uint16_t)type;
}

static bool is_known(uint32_t status)
{
    return strcmp(ep_status_name((ep_status)status), "?") != 0;
}

static bool is_request(const struct ep_attach_frame *frame)
{
    return frame->type == EP_ATTACH_REGISTER || frame->type == EP_ATTACH_UNREGISTER;
}

static ep_status check_event(const struct ep_attach_frame *frame, struct ep_error *error)
{
    if (frame->event < EP_ATTACH_RANK_LOST || frame->event > EP_ATTACH_EVENTS_LOST)
        return ep_error_set(error, EP_PROTOCOL, "frame event is %u: must be %d to %d", frame->event,
                            EP_ATTACH_RANK_LOST, EP_ATTACH_EVENTS_LOST);
    return EP_OK;
}

static ep_status check_memory(const struct ep_attach_frame *frame, struct ep_error *error)
{
    if (frame->count < EP_ATTACH_MEMORY_STATE || frame->count > EP_ATTACH_MEMORY_WINDOW)
        return ep_error_set(error, EP_PROTOCOL, "frame count is %u: of MEMORY it must be %d to %d", frame->count,
                            EP_ATTACH_MEMORY_STATE, EP_ATTACH_MEMORY_WINDOW);
    if (frame->value == 0)
        return ep_error_set(error, EP_PROTOCOL, "frame value is 0: MEMORY must carry its bytes");
    return EP_OK;
}

/* Of the turn: which epoch it is about, and where. */
static ep_status check_turn(const struct ep_attach_frame *frame, struct ep_error *error)
{
    if (frame->epoch == 0)
        return ep_error_set(error, EP_PROTOCOL, "frame epoch is 0: frames of type %u must say which to go over to",
                            frame->type);
    if (frame->type == EP_ATTACH_TURN && frame->value == EP_ATTACH_NO_TURN)
        return ep_error_set(error, EP_PROTOCOL, "frame value is none: TURN must say at which position");
    if (frame->type == EP_ATTACH_PROMISE && frame->status != EP_OK && frame->status != EP_ABORTED)
        return ep_error_set(error, EP_PROTOCOL, "frame status is %u: of PROMISE it must be %d or %d", frame->status,
                            EP_OK, EP_ABORTED);
    if (frame->type == EP_ATTACH_PROMISE && (frame->offset > EP_ATTACH_FURTHEST || frame->value > frame->offset + 1))
        return ep_error_set(error, EP_PROTOCOL, "frame offset is %llu, its value %llu: a position is at most %llu, and what "
                            "was passed is at most 1 more than it", (unsigned long long)frame->offset,
                            (unsigned long long)frame->value, (unsigned long long)EP_ATTACH_FURTHEST);
    return EP_OK;
}

/* What the type asks of the other fields. */
static ep_status check_type(const struct ep_attach_frame *frame, struct ep_error *error)
{
    switch (frame->type) {
    case EP_ATTACH_HELLO:
    case EP_ATTACH_BYE:
    case EP_ATTACH_UNREGISTER:
        return EP_OK;
    case EP_ATTACH_WELCOME:
        if (frame->value == 0)
            return ep_error_set(error, EP_PROTOCOL, "frame value is 0: WELCOME must carry the window's bytes");
        return EP_OK;
    case EP_ATTACH_REFUSED:
        if (frame->status == EP_OK || !is_known(frame->status))
            return ep_error_set(error, EP_PROTOCOL, "frame status is %u: REFUSED must carry an error",
                                frame->status);
        return EP_OK;
    case EP_ATTACH_EVENT:
        return check_event(frame, error);
    case EP_ATTACH_MEMORY:
        return check_memory(frame, error);
    case EP_ATTACH_REGISTER:
        if (frame->value == 0)
            return ep_error_set(error, EP_PROTOCOL, "frame value is 0: REGISTER must carry the region's bytes");
        return EP_OK;
    case EP_ATTACH_ANSWER:
        if (!is_known(frame->status))
            return ep_error_set(error, EP_PROTOCOL, "frame status is %u: ANSWER must carry one that there is",
                                frame->status);
        return EP_OK;
    case EP_ATTACH_ASK:
    case EP_ATTACH_PROMISE:
    case EP_ATTACH_TURN:
        return check_turn(frame, error);
    default:
        return ep_error_set(error, EP_PROTOCOL, "frame type is %u: must be %d to %d", frame->type,
                            EP_ATTACH_HELLO, EP_ATTACH_TURN);
    }
}

/* Fields that most types leave at 0. */
static ep_status check_unused(const struct ep_attach_frame *frame, struct ep_error *error)
{
    const bool counts = is_request(frame) || frame->type == EP_ATTACH_ANSWER || frame->type == EP_ATTACH_WELCOME
                        || frame->type == EP_ATTACH_MEMORY || frame->type == EP_ATTACH_ASK
                        || frame->type == EP_ATTACH_PROMISE;
    const bool has_offset = frame->type == EP_ATTACH_REGISTER || frame->type == EP_ATTACH_WELCOME
                            || frame->type == EP_ATTACH_PROMISE;

    if (frame->count != 0 && !counts)
        return ep_error_set(error, EP_PROTOCOL, "frame count is %u: must be 0 in frames of type %u", frame->count,
                            frame->type);
    if (frame->offset != 0 && !has_offset)
        return ep_error_set(error, EP_PROTOCOL, "frame offset is %llu: must be 0 in frames of type %u",
                            (unsigned long long)frame->offset, frame->type);
    if (frame->ht > (frame->type == EP_ATTACH_WELCOME ? frame->offset : 0))
        return ep_error_set(error, EP_PROTOCOL, "frame ht is %llu: must be 0, or in WELCOME at most its offset, %llu",
                            (unsigned long long)frame->ht, (unsigned long long)frame->offset);
    if (frame->region != 0 && !is_request(frame))
        return ep_error_set(error, EP_PROTOCOL, "frame region is %u: must be 0 in frames of type %u", frame->region,
                            frame->type);
    if (frame->reserved != 0)
        return ep_error_set(error, EP_PROTOCOL, "frame reserved is %u: must be 0", frame->reserved);
    return EP_OK;
}

static ep_status check(const struct ep_attach_frame *frame, struct ep_error *error)
{
    if (frame->magic != EP_ATTACH_MAGIC)
        return ep_error_set(error, EP_PROTOCOL, "frame magic is 0x%08x: must be 0x%08x", frame->magic,
                            EP_ATTACH_MAGIC);
    if (frame->version != EP_ATTACH_VERSION)
        return ep_error_set(error, EP_PROTOCOL, "frame version is %u: this side speaks %u",
                            frame->version, EP_ATTACH_VERSION);
    if (!memchr(frame->text, '\0', sizeof frame->text))
        return ep_error_set(error, EP_PROTOCOL, "frame text is not terminated");

    ep_status status = check_unused(frame, error);

    return status == EP_OK ? check_type(frame, error) : status;
}

ep_status ep_attach_frame_parse(const void *bytes, size_t n, struct ep_attach_frame *frame,
                                struct ep_error *error)
{
    struct ep_attach_frame copy;

    if (n != sizeof copy)
        return ep_error_set(error, EP_PROTOCOL, "frame has %zu bytes: must have %zu", n, sizeof copy);
    memcpy(&copy, bytes, sizeof copy);

    ep_status status = check(&copy, error);

    if (status == EP_OK)
        *frame = copy;
    return status;
}

/* What errno of send or receive means to the caller. */
static ep_status socket_error(struct ep_error *error, const char *what)
{
    switch (errno) {
    case EAGAIN:
        return ep_error_set(error, EP_UNAVAILABLE, "%s: would block", what);
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return ep_error_errno(error, EP_SERVER_LOST, "%s", what);
    default:
        return ep_error_errno(error, EP_IO, "%s", what);
    }
}

union fd_control {
    char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct cmsghdr align;
};

ep_status ep_attach_send(int socket, const struct ep_attach_frame *frame, int fd, struct ep_error *error)
{
    union fd_control control = { .bytes = { 0 } };
    struct ep_attach_frame copy = *frame; /* iov_base is not const */
    struct iovec part = { .iov_base = &copy, .iov_len = sizeof copy };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
    ssize_t sent;

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof fd);

        struct cmsghdr *header = CMSG_FIRSTHDR(&message);

        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    /* A message goes whole or not at all. */
    return sent < 0 ? socket_error(error, "send on the side socket") : EP_OK;
}

/* The first descriptor of the message, the others closed; -1 when there is none, EP_ATTACH_FD_LOST when there was. */
static int take_fd(struct msghdr *message)
{
    int first = -1;

    for (struct cmsghdr *h = CMSG_FIRSTHDR(message); h; h = CMSG_NXTHDR(message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; at + sizeof(int) <= h->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;

            memcpy(&fd, CMSG_DATA(h) + at, sizeof fd);
            if (first < 0)
                first = fd;
            else
                close(fd);
        }
    }
    return first < 0 && message->msg_flags & MSG_CTRUNC ? EP_ATTACH_FD_LOST : first;
}

/*
 * One message.  When the other side closed with something of ours unread, the socket reports
 * ECONNRESET once, ahead of what it sent before (a REFUSED, say): so look again.
 */
static ssize_t receive_message(int socket, struct msghdr *message)
{
    const size_t control_bytes = message->msg_controllen;
    bool was_reset = false;

    for (;;) {
        message->msg_controllen = control_bytes;

        ssize_t n = recvmsg(socket, message, MSG_CMSG_CLOEXEC);

        if (n >= 0)
            return n;
        if (errno == ECONNRESET && !was_reset)
            was_reset = true;
        else if (errno != EINTR)
            return n;
    }
}

ep_status ep_attach_receive(int socket, struct ep_attach_frame *frame, int *fd, struct ep_error *error)
{
    union fd_control control;
    struct ep_attach_frame bytes;
    struct iovec part = { .iov_base = &bytes, .iov_len = sizeof bytes };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                              .msg_controllen = sizeof control.bytes };
    ssize_t n = receive_message(socket, &message);
    ep_status status;

    *fd = -1;
    if (n < 0)
        return socket_error(error, "receive on the side socket");

    int first = take_fd(&message);

    if (n == 0)
        status = ep_error_set(error, EP_SERVER_LOST, "the other side closed the side socket");
    else if (message.msg_flags & MSG_TRUNC)
        status = ep_error_set(error, EP_PROTOCOL, "frame has more than %zu bytes", sizeof bytes);
    else
        status = ep_attach_frame_parse(&bytes, (size_t)n, frame, error);
    if (status == EP_OK)
        *fd = first;
    else if (first >= 0)
        close(first);
    return status;
}
