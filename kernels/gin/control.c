/*
 * Frames on the control connections: what is collective.
 *
 * Each rank says its part to all peers and then hears theirs, so nobody waits for one who waits for him.  The control
 * thread alone reads here; the receive thread only sees when the other end is closed.
 */
#include "transport.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

_Static_assert(sizeof((struct ep_gin_frame *)NULL)->card == EP_GIN_CARD_BYTES, "a card travels in a frame");

/* Room for the descriptors of one card. */
union descriptors {
    char bytes[CMSG_SPACE(sizeof(int) * EP_GIN_CARD_FDS)];
    struct cmsghdr align;
};

/* ---- one frame ---------------------------------------------------------------------------------- */

/* False: not within the time. */
static bool wait_for(int fd, short events, uint64_t deadline)
{
    struct pollfd p = { .fd = fd, .events = events };
    const uint64_t now = ep_clock_ns();

    if (now >= deadline)
        return false;
    return poll(&p, 1, (int)((deadline - now) / EP_NS_PER_MS) + 1) >= 0 || errno == EINTR;
}

static void attach(struct msghdr *header, union descriptors *room, const struct ep_gin_card *card)
{
    struct cmsghdr *c;

    if (card->fds == 0)
        return;
    memset(room, 0, sizeof *room);
    header->msg_control = room->bytes;
    header->msg_controllen = CMSG_SPACE(sizeof(int) * card->fds);
    c = CMSG_FIRSTHDR(header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * card->fds);
    memcpy(CMSG_DATA(c), card->fd, sizeof(int) * card->fds);
}

/* What is not expected is closed. */
static void detach(struct msghdr *header, struct ep_gin_card *card)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        uint32_t n = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (uint32_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (card->fds < EP_GIN_CARD_FDS)
                card->fd[card->fds++] = fd;
            else
                close(fd);
        }
    }
}

static ssize_t send_part(int fd, const uint8_t *at, size_t bytes, const struct ep_gin_card *card)
{
    struct iovec part = { .iov_base = (void *)(uintptr_t)at, .iov_len = bytes };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };
    union descriptors room;

    attach(&header, &room, card);
    return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static ssize_t receive_part(int fd, uint8_t *at, size_t bytes, struct ep_gin_card *card)
{
    struct iovec part = { .iov_base = at, .iov_len = bytes };
    union descriptors room;
    struct msghdr header = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room.bytes, .msg_controllen = sizeof room.bytes
    };
    ssize_t n = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n > 0)
        detach(&header, card);
    return n;
}

static bool again(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* EP_IO: the other end is closed. */
static ep_status send_frame(const struct ep_gin_peer *peer, const struct ep_gin_frame *frame, struct ep_gin_card *card,
                            uint64_t deadline)
{
    size_t sent = 0;

    while (sent < sizeof *frame) {
        ssize_t n = send_part(peer->control, (const uint8_t *)frame + sent, sizeof *frame - sent, card);

        if (n < 0 && !again())
            return EP_IO;
        if (n < 0 && !wait_for(peer->control, POLLOUT, deadline))
            return EP_DEADLINE_EXCEEDED;
        if (n > 0) {
            sent += (size_t)n;
            card->fds = 0; /* they went with the first bytes */
        }
    }
    return EP_OK;
}

static ep_status receive_frame(const struct ep_gin_peer *peer, struct ep_gin_frame *frame, struct ep_gin_card *card,
                               uint64_t deadline)
{
    size_t got = 0;

    while (got < sizeof *frame) {
        ssize_t n = receive_part(peer->control, (uint8_t *)frame + got, sizeof *frame - got, card);

        if (n == 0 || (n < 0 && !again()))
            return EP_IO;
        if (n < 0 && !wait_for(peer->control, POLLIN, deadline))
            return EP_DEADLINE_EXCEEDED;
        if (n > 0)
            got += (size_t)n;
    }
    return EP_OK;
}

/* ---- all peers ------------------------------------------------------------------------------------ */

static void close_descriptors(struct ep_gin_card *card, uint32_t fds)
{
    for (uint32_t i = 0; i < fds; i++)
        close(card->fd[i]);
}

static bool is_there(const struct ep_gin_peer *peer)
{
    return peer->control >= 0 && !ep_gin_peer_is_lost(peer);
}

static ep_status late(const struct ep_gin_peer *peer, struct ep_error *error)
{
    return ep_error_set(error, EP_DEADLINE_EXCEEDED, "rank %u did not do its part within %llu ms", peer->rank,
                        (unsigned long long)(peer->comm->settings.timeout_ns / EP_NS_PER_MS));
}

static ep_status say(struct ep_gin_peer *peer, enum ep_gin_frame_kind kind, uint64_t order, ep_gin_make make,
                     void *user, uint64_t deadline, struct ep_error *error)
{
    struct ep_gin_frame frame = { .magic = EP_GIN_MAGIC, .kind = (uint16_t)kind, .order = order };
    struct ep_gin_card card = { .fds = 0 };
    ep_status status = make(peer, user, &frame, &card, error);
    uint32_t fds;

    if (status != EP_OK)
        return status;
    fds = card.fds;
    memcpy(frame.card, card.bytes, sizeof frame.card);
    status = send_frame(peer, &frame, &card, deadline);
    close_descriptors(&card, fds);
    if (status == EP_IO)
        ep_gin_peer_lost(peer, "its control connection is closed");
    return status == EP_DEADLINE_EXCEEDED ? late(peer, error) : EP_OK;
}

static ep_status check(const struct ep_gin_peer *peer, const struct ep_gin_frame *frame, enum ep_gin_frame_kind kind,
                       uint64_t order, struct ep_error *error)
{
    if (frame->magic != EP_GIN_MAGIC)
        return ep_error_set(error, EP_PROTOCOL, "rank %u says what no rank says", peer->rank);
    if (frame->kind != kind || frame->order != order)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "rank %u does step %u.%llu, this one %u.%llu: regMrSym must be "
                            "called in the same order on all ranks",
                            peer->rank, frame->kind, (unsigned long long)frame->order, kind, (unsigned long long)order);
    return EP_OK;
}

static bool is_bye(const struct ep_gin_frame *frame)
{
    return frame->magic == EP_GIN_MAGIC && frame->kind == EP_GIN_FRAME_BYE;
}

static ep_status hear(struct ep_gin_peer *peer, enum ep_gin_frame_kind kind, uint64_t order, ep_gin_take take,
                      void *user, uint64_t deadline, struct ep_error *error)
{
    struct ep_gin_frame frame;
    struct ep_gin_card card = { .fds = 0 };
    ep_status status = receive_frame(peer, &frame, &card, deadline);

    if (status == EP_DEADLINE_EXCEEDED) {
        status = late(peer, error);
    } else if (status != EP_OK || is_bye(&frame)) {
        ep_gin_peer_lost(peer, "its control connection is closed");
        status = EP_OK;
    } else {
        memcpy(card.bytes, frame.card, sizeof frame.card);
        status = check(peer, &frame, kind, order, error);
        if (status == EP_OK)
            status = take(peer, user, &frame, &card, error);
    }
    close_descriptors(&card, card.fds);
    return status;
}

/* Everyone is heard, whatever one of them says: what is left now would be heard as the answer to what comes next. */
ep_status ep_gin_exchange(struct ep_gin_comm *comm, enum ep_gin_frame_kind kind, uint64_t order, ep_gin_make make,
                          ep_gin_take take, void *user, struct ep_error *error)
{
    const uint64_t deadline = ep_clock_ns() + comm->settings.timeout_ns;
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < comm->ranks && status == EP_OK; r++)
        if (is_there(&comm->peers[r]))
            status = say(&comm->peers[r], kind, order, make, user, deadline, error);
    if (status != EP_OK)
        return status;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        ep_status heard = EP_OK;

        if (is_there(&comm->peers[r]))
            heard = hear(&comm->peers[r], kind, order, take, user, deadline, status == EP_OK ? error : NULL);
        if (status == EP_OK)
            status = heard;
    }
    return status;
}

/* So that the other end can tell a rank that has closed from one that has died. */
void ep_gin_say_bye(struct ep_gin_comm *comm)
{
    const struct ep_gin_frame bye = { .magic = EP_GIN_MAGIC, .kind = EP_GIN_FRAME_BYE };

    for (uint32_t r = 0; r < comm->ranks; r++)
        if (comm->peers[r].control >= 0) /* also to one that is taken for gone here, and may not be */
            (void)send(comm->peers[r].control, &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT);
}
