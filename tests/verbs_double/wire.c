/* What a NIC does: packets out, packets in. */
#include "verbs_double.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { LATE_ONE_IN = 64, LATE_NS = 200000, BACKLOG = 256 };

/* A connection of a peer that sends. */
struct vd_inbound {
    struct vd_inbound *next;
    int fd;
    struct vd_packet packet;
    uint32_t packet_bytes; /* of the header that are there */
    bool judged;           /* the packet's header is whole, and what to do with it is known: */
    enum ibv_wc_status status;
    uint32_t taken; /* of its data */
    bool waits;     /* for the queue pair, or for a receive */
    bool answers;   /* the packet is over, its answer has not gone */
};

static void unix_address(const union ibv_gid *gid, struct sockaddr_un *address, socklen_t *bytes)
{
    int n = 0;

    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "verbs-double-%016llx%016llx",
                 (unsigned long long)gid->global.subnet_prefix, (unsigned long long)gid->global.interface_id);
    *bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

void vd_wire_wake(struct vd_context *context)
{
    const uint64_t one = 1;

    pthread_cond_broadcast(&context->work);
    if (write(context->wake, &one, sizeof one) != sizeof one && errno != EAGAIN)
        vd_die("the receiving thread cannot be woken");
}

/* ---- the sending thread, under the lock but where it says so ------------------------------------ */

static uint64_t random_of(struct vd_context *context)
{
    context->random ^= context->random << 13;
    context->random ^= context->random >> 7;
    context->random ^= context->random << 17;
    return context->random;
}

/* Of the requests that may go next: the oldest, or any. */
static struct vd_send *pick_send(struct vd_context *context, struct vd_qp *qp)
{
    struct vd_send *picked = NULL;
    uint32_t n = 0;

    for (uint32_t i = 0; i < qp->cap.max_send_wr; i++) {
        struct vd_send *send = &qp->send[i];

        if (send->state != VD_QUEUED)
            continue;
        if (context->reorder ? random_of(context) % ++n == 0 : !picked || send->number < picked->number)
            picked = send;
    }
    return picked;
}

/* Its next packet, into qp->out. */
static void cut_packet(struct vd_qp *qp, struct vd_send *send)
{
    struct vd_outgoing *out = &qp->out;
    uint32_t bytes = send->bytes - send->at < VD_PACKET_BYTES ? send->bytes - send->at : VD_PACKET_BYTES;
    uint32_t skip = send->at;

    out->packet = (struct vd_packet){ .qp = qp->peer, .from = qp->ibv.qp_num, .slot = (uint32_t)(send - qp->send),
                                      .rkey = send->rkey, .bytes = bytes, .total = send->bytes, .imm = send->imm,
                                      .last = send->at + bytes == send->bytes,
                                      .with_imm = send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM,
                                      .remote = send->remote + send->at };
    out->piece[0] = (struct iovec){ &out->packet, sizeof out->packet };
    out->first = 0;
    out->n = 1;
    send->at += bytes;
    if (send->n_sge == 0 && bytes > 0) { /* inline, which is one packet */
        memcpy(out->inlined, send->inlined, bytes);
        out->piece[out->n++] = (struct iovec){ out->inlined, bytes };
    }
    for (int i = 0; i < send->n_sge && bytes > 0; i++) {
        const uint32_t length = send->sge[i].length, from = skip < length ? skip : length;
        const uint32_t n = length - from < bytes ? length - from : bytes;

        skip -= from;
        bytes -= n;
        if (n > 0)
            out->piece[out->n++] = (struct iovec){ (void *)(uintptr_t)(send->sge[i].addr + from), n };
    }
    if (out->packet.last)
        send->state = VD_SENT;
}

/* A queue pair that has something to send and may, in turn or by chance. */
static struct vd_qp *pick_qp(struct vd_context *context)
{
    struct vd_qp *picked = NULL;
    uint32_t n = 0;

    for (struct vd_qp *qp = context->qps; qp; qp = qp->next) {
        bool any = qp->out.n > 0;

        if (qp->ibv.state != IBV_QPS_RTS || qp->full)
            continue;
        for (uint32_t i = 0; !any && i < qp->cap.max_send_wr; i++)
            any = qp->send[i].state == VD_QUEUED;
        if (any && random_of(context) % ++n == 0)
            picked = qp;
    }
    return picked;
}

static int connect_to(const union ibv_gid *gid)
{
    struct sockaddr_un address;
    socklen_t bytes;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    unix_address(gid, &address, &bytes);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void advance(struct vd_outgoing *out, size_t sent)
{
    while (out->n > 0 && sent >= out->piece[out->first].iov_len) {
        sent -= out->piece[out->first++].iov_len;
        out->n--;
    }
    if (out->n > 0) {
        out->piece[out->first].iov_base = (uint8_t *)out->piece[out->first].iov_base + sent;
        out->piece[out->first].iov_len -= sent;
    }
}

/* Without the lock, while qp->busy.  0, or why nothing was sent. */
static int push(struct vd_qp *qp, int fd, bool late)
{
    struct msghdr message = { .msg_iov = &qp->out.piece[qp->out.first], .msg_iovlen = (size_t)qp->out.n };
    ssize_t sent;

    if (late)
        nanosleep(&(struct timespec){ .tv_nsec = LATE_NS }, NULL);
    sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0)
        return errno;
    advance(&qp->out, (size_t)sent);
    return 0;
}

/* The peer is gone: as when nobody acknowledges, only sooner.  A queue pair that waits for nothing does not notice. */
static void lose_peer(struct vd_qp *qp)
{
    struct vd_send *first = vd_first_send(qp);

    if (qp->fd >= 0)
        close(qp->fd);
    qp->fd = -1;
    qp->full = false;
    qp->answer_bytes = 0;
    if (first)
        vd_send_over(qp, first, IBV_WC_RETRY_EXC_ERR); /* and flushes the others */
}

static void push_unlocked(struct vd_context *context, struct vd_qp *qp)
{
    const bool late = context->reorder && random_of(context) % LATE_ONE_IN == 0;
    const int fd = qp->fd;
    int why;

    qp->busy = true;
    pthread_mutex_unlock(&context->lock);
    why = push(qp, fd, late);
    pthread_mutex_lock(&context->lock);
    qp->busy = false;
    pthread_cond_broadcast(&context->work);
    qp->full = why == EAGAIN;
    if (why && why != EAGAIN && why != EINTR && qp->fd == fd)
        lose_peer(qp);
    if (qp->full)
        vd_wire_wake(context); /* the receiving thread says when it is not */
}

static void send_some(struct vd_context *context, struct vd_qp *qp)
{
    if (qp->out.n == 0)
        cut_packet(qp, pick_send(context, qp));
    if (qp->fd < 0) {
        qp->fd = connect_to(&qp->peer_gid);
        vd_wire_wake(context); /* the receiving thread listens to it */
    }
    if (qp->fd < 0)
        lose_peer(qp);
    else
        push_unlocked(context, qp);
}

static void *send_loop(void *arg)
{
    struct vd_context *context = arg;

    pthread_mutex_lock(&context->lock);
    while (!context->closing) {
        struct vd_qp *qp = pick_qp(context);

        if (qp)
            send_some(context, qp);
        else
            pthread_cond_wait(&context->work, &context->lock);
    }
    pthread_mutex_unlock(&context->lock);
    return NULL;
}

/* ---- the receiving thread, under the lock but while it sleeps --------------------------------------- */

/* A refusal may come before all packets have gone, and once for each of them. */
static void take_answer(struct vd_qp *qp)
{
    struct vd_send *send = qp->answer.slot < qp->cap.max_send_wr ? &qp->send[qp->answer.slot] : NULL;

    if (send && (send->state == VD_SENT || (send->state == VD_QUEUED && qp->answer.status != IBV_WC_SUCCESS)))
        vd_send_over(qp, send, (enum ibv_wc_status)qp->answer.status);
}

static void read_answers(struct vd_context *context, struct vd_qp *qp)
{
    for (;;) {
        ssize_t n = recv(qp->fd, (uint8_t *)&qp->answer + qp->answer_bytes, sizeof qp->answer - qp->answer_bytes,
                         MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            lose_peer(qp);
            return;
        }
        qp->answer_bytes += (uint32_t)n;
        if (qp->answer_bytes < sizeof qp->answer)
            continue;
        qp->answer_bytes = 0;
        while (qp->busy) /* an answer may be here before the sending thread is back from what it answers */
            pthread_cond_wait(&context->work, &context->lock);
        take_answer(qp);
    }
}

/* What becomes of a packet.  False: its queue pair is not connected yet. */
static bool judge(struct vd_context *context, struct vd_inbound *in)
{
    const struct vd_packet *packet = &in->packet;
    const struct vd_qp *qp = vd_find_qp(context, packet->qp);

    if (qp && (qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_INIT))
        return false;
    in->judged = true;
    in->taken = 0;
    if (!qp || qp->ibv.state == IBV_QPS_ERR || qp->peer != packet->from)
        in->status = IBV_WC_RETRY_EXC_ERR;
    else if (packet->total > 0
             && !vd_find_mr(context, packet->rkey, packet->remote, packet->bytes, IBV_ACCESS_REMOTE_WRITE))
        in->status = IBV_WC_REM_ACCESS_ERR;
    else
        in->status = IBV_WC_SUCCESS;
    return true;
}

/* The memory may be deregistered between two pieces of a packet. */
static void *place_of(struct vd_context *context, struct vd_inbound *in, uint8_t *nowhere)
{
    const struct vd_packet *packet = &in->packet;

    if (in->status == IBV_WC_SUCCESS
        && !vd_find_mr(context, packet->rkey, packet->remote, packet->bytes, IBV_ACCESS_REMOTE_WRITE))
        in->status = IBV_WC_REM_ACCESS_ERR;
    return in->status == IBV_WC_SUCCESS ? (uint8_t *)(uintptr_t)packet->remote + in->taken : nowhere;
}

/* The last packet of a write is there.  False: a receive must be posted first. */
static bool tell(struct vd_context *context, struct vd_inbound *in)
{
    const struct vd_packet *packet = &in->packet;
    struct vd_qp *qp = vd_find_qp(context, packet->qp);
    struct ibv_wc wc;

    if (in->status != IBV_WC_SUCCESS || !packet->with_imm)
        return true;
    if (!qp || qp->ibv.state == IBV_QPS_ERR) {
        in->status = IBV_WC_RETRY_EXC_ERR;
        return true;
    }
    if (qp->recv_n == 0)
        return false;
    wc = (struct ibv_wc){ .wr_id = qp->recv[qp->recv_head], .status = IBV_WC_SUCCESS,
                          .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .byte_len = packet->total, .imm_data = packet->imm,
                          .qp_num = packet->qp, .wc_flags = IBV_WC_WITH_IMM };
    qp->recv_head = (qp->recv_head + 1) % (qp->cap.max_recv_wr + 1);
    qp->recv_n--;
    vd_complete((struct vd_cq *)qp->ibv.recv_cq, &wc);
    return true;
}

/* 1: it has gone, 0: the peer must read first, -1: the connection is over. */
static int answer(const struct vd_inbound *in)
{
    const struct vd_answer answer = { in->packet.slot, (uint32_t)in->status };

    if (send(in->fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof answer)
        return 1;
    return errno == EAGAIN || errno == EINTR ? 0 : -1;
}

/* As receive_step. */
static int finish_packet(struct vd_inbound *in)
{
    int gone;

    in->answers = in->packet.last || in->status != IBV_WC_SUCCESS;
    gone = in->answers ? answer(in) : 1;
    if (gone <= 0)
        return gone;
    in->answers = in->judged = false;
    in->packet_bytes = 0;
    return 1;
}

/* Up to the next thing that is not there.  1: go on, 0: later, -1: the connection is over. */
static int receive_step(struct vd_context *context, struct vd_inbound *in)
{
    uint8_t nowhere[4096];
    const bool header = in->packet_bytes < sizeof in->packet;
    uint8_t *to = (uint8_t *)&in->packet + in->packet_bytes;
    size_t want = sizeof in->packet - in->packet_bytes;
    ssize_t n;

    if (!header) {
        if (!in->judged && !judge(context, in)) {
            in->waits = true;
            return 0;
        }
        to = place_of(context, in, nowhere);
        want = in->packet.bytes - in->taken;
        if (to == nowhere && want > sizeof nowhere)
            want = sizeof nowhere;
    }
    if (want > 0) {
        n = recv(in->fd, to, want, MSG_DONTWAIT);
        if (n <= 0)
            return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
        *(header ? &in->packet_bytes : &in->taken) += (uint32_t)n;
        return 1;
    }
    if (!in->answers && in->packet.last && !tell(context, in)) {
        in->waits = true;
        return 0;
    }
    return finish_packet(in);
}

static bool receive(struct vd_context *context, struct vd_inbound *in)
{
    int step;

    in->waits = false;
    do
        step = receive_step(context, in);
    while (step > 0);
    return step == 0;
}

static void add_inbound(struct vd_context *context)
{
    int fd = accept4(context->listener, NULL, NULL, SOCK_CLOEXEC);
    struct vd_inbound *in = fd >= 0 ? calloc(1, sizeof *in) : NULL;

    if (!in)
        vd_die("a connection cannot be taken: %s", strerror(errno));
    in->fd = fd;
    in->next = context->inbound;
    context->inbound = in;
}

static void drop_inbound(struct vd_inbound **at)
{
    struct vd_inbound *in = *at;

    *at = in->next;
    close(in->fd);
    free(in);
}

enum { LISTENER, WAKE, OTHERS, MAX_POLLED = 4096 };

static nfds_t list_polled(const struct vd_context *context, struct pollfd *polled)
{
    nfds_t n = OTHERS;

    polled[LISTENER] = (struct pollfd){ .fd = context->listener, .events = POLLIN };
    polled[WAKE] = (struct pollfd){ .fd = context->wake, .events = POLLIN };
    for (const struct vd_inbound *in = context->inbound; in && n < MAX_POLLED; in = in->next)
        if (!in->waits)
            polled[n++] = (struct pollfd){ .fd = in->fd, .events = in->answers ? POLLOUT : POLLIN };
    for (const struct vd_qp *qp = context->qps; qp && n < MAX_POLLED; qp = qp->next)
        if (qp->fd >= 0 && qp->ibv.state == IBV_QPS_RTS)
            polled[n++] = (struct pollfd){ .fd = qp->fd, .events = (short)(POLLIN | (qp->full ? POLLOUT : 0)) };
    return n;
}

/* Everything is looked at: which of the descriptors woke us does not matter, there are few. */
static void look(struct vd_context *context)
{
    context->looking = true;
    for (struct vd_qp *qp = context->qps; qp; qp = qp->next)
        if (qp->fd >= 0 && qp->ibv.state == IBV_QPS_RTS) {
            qp->full = false;
            read_answers(context, qp);
        }
    for (struct vd_inbound **at = &context->inbound; *at;)
        if (receive(context, *at))
            at = &(*at)->next;
        else
            drop_inbound(at);
    context->looking = false;
    pthread_cond_broadcast(&context->work);
}

static void *receive_loop(void *arg)
{
    static const struct timespec at_most = { .tv_sec = 1 };
    struct vd_context *context = arg;
    struct pollfd *polled = calloc(MAX_POLLED, sizeof *polled);
    uint64_t count;

    if (!polled)
        vd_die("no memory");
    pthread_mutex_lock(&context->lock);
    while (!context->closing) {
        const nfds_t n = list_polled(context, polled);

        pthread_mutex_unlock(&context->lock);
        (void)ppoll(polled, n, &at_most, NULL);
        pthread_mutex_lock(&context->lock);
        if (polled[WAKE].revents && read(context->wake, &count, sizeof count) < 0 && errno != EAGAIN)
            vd_die("the receiving thread cannot be woken");
        if (polled[LISTENER].revents)
            add_inbound(context);
        look(context);
    }
    pthread_mutex_unlock(&context->lock);
    free(polled);
    return NULL;
}

/* ---- life --------------------------------------------------------------------------------------------- */

static int listen_at(const union ibv_gid *gid)
{
    struct sockaddr_un address;
    socklen_t bytes;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    unix_address(gid, &address, &bytes);
    if (fd >= 0 && (bind(fd, (const struct sockaddr *)&address, bytes) != 0 || listen(fd, BACKLOG) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool vd_wire_open(struct vd_context *context)
{
    context->listener = listen_at(&context->gid);
    context->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (context->listener >= 0 && context->wake >= 0
        && pthread_create(&context->sender, NULL, send_loop, context) == 0) {
        if (pthread_create(&context->receiver, NULL, receive_loop, context) == 0)
            return true;
        vd_die("no second thread");
    }
    if (context->listener >= 0)
        close(context->listener);
    if (context->wake >= 0)
        close(context->wake);
    return false;
}

void vd_wire_close(struct vd_context *context)
{
    pthread_mutex_lock(&context->lock);
    context->closing = true;
    vd_wire_wake(context);
    pthread_mutex_unlock(&context->lock);
    pthread_join(context->sender, NULL);
    pthread_join(context->receiver, NULL);
    while (context->inbound)
        drop_inbound(&context->inbound);
    close(context->listener);
    close(context->wake);
}
