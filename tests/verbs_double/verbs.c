/* The calls of libibverbs that there are. */
#include "verbs_double.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

#define EXPORT __attribute__((visibility("default")))

void vd_die(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fputs("verbs double: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

static struct vd_context *context_of(struct ibv_context *context)
{
    return (struct vd_context *)context;
}

static void lock(struct vd_context *context)
{
    pthread_mutex_lock(&context->lock);
}

static void unlock(struct vd_context *context)
{
    pthread_mutex_unlock(&context->lock);
}

/* ---- completions: under the lock ------------------------------------------------------ */

static void tell_channel(struct vd_cq *cq)
{
    const uint64_t one = 1;

    if (!cq->armed || !cq->ibv.channel)
        return;
    cq->armed = false;
    if (write(cq->ibv.channel->fd, &one, sizeof one) != sizeof one)
        vd_die("a completion channel takes no more events: acknowledge them");
}

void vd_complete(struct vd_cq *cq, const struct ibv_wc *wc)
{
    if (cq->n == (uint32_t)cq->ibv.cqe)
        vd_die("a completion queue of %d overflows", cq->ibv.cqe);
    cq->wc[(cq->head + cq->n++) % (uint32_t)cq->ibv.cqe] = *wc;
    tell_channel(cq);
}

static int poll_cq(struct ibv_cq *ibv, int most, struct ibv_wc *wc)
{
    struct vd_cq *cq = (struct vd_cq *)ibv;
    int n = 0;

    lock(context_of(ibv->context));
    for (; n < most && cq->n > 0; n++, cq->n--)
        wc[n] = cq->wc[cq->head++ % (uint32_t)ibv->cqe];
    unlock(context_of(ibv->context));
    return n;
}

static int req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
    (void)solicited_only;
    lock(context_of(ibv->context));
    ((struct vd_cq *)ibv)->armed = true;
    unlock(context_of(ibv->context));
    return 0;
}

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct vd_channel *channel = calloc(1, sizeof *channel);

    if (!channel)
        return NULL;
    channel->ibv.context = context;
    channel->ibv.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    if (channel->ibv.fd < 0) {
        free(channel);
        return NULL;
    }
    return &channel->ibv;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct vd_channel *channel = (struct vd_channel *)ibv;

    if (channel->cq)
        return EBUSY;
    close(ibv->fd);
    free(channel);
    return 0;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
    struct vd_channel *channel = (struct vd_channel *)ibv;
    uint64_t one;

    if (read(ibv->fd, &one, sizeof one) != sizeof one)
        return -1;
    *cq = &channel->cq->ibv;
    *cq_context = channel->cq->ibv.cq_context;
    return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
    lock(context_of(cq->context));
    cq->comp_events_completed += n;
    unlock(context_of(cq->context));
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                    struct ibv_comp_channel *channel, int comp_vector)
{
    struct vd_cq *cq;

    if (cqe < 1 || cqe > VD_MAX_CQE || comp_vector >= context->num_comp_vectors) {
        errno = EINVAL;
        return NULL;
    }
    cq = calloc(1, sizeof *cq);
    if (!cq || !(cq->wc = calloc((size_t)cqe, sizeof *cq->wc))) {
        free(cq);
        return NULL;
    }
    cq->ibv.context = context;
    cq->ibv.channel = channel;
    cq->ibv.cq_context = cq_context;
    cq->ibv.cqe = cqe;
    if (channel)
        ((struct vd_channel *)channel)->cq = cq;
    return &cq->ibv;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct vd_cq *cq = (struct vd_cq *)ibv;
    const struct vd_context *context = context_of(ibv->context);

    for (const struct vd_qp *qp = context->qps; qp; qp = qp->next)
        if (qp->ibv.send_cq == ibv || qp->ibv.recv_cq == ibv)
            return EBUSY;
    if (ibv->channel)
        ((struct vd_channel *)ibv->channel)->cq = NULL;
    free(cq->wc);
    free(cq);
    return 0;
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_SUCCESS: return "success";
    case IBV_WC_LOC_PROT_ERR: return "local protection error";
    case IBV_WC_WR_FLUSH_ERR: return "flushed";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error";
    case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    default: return "error";
    }
}

/* ---- devices ---------------------------------------------------------------------------- */

static struct ibv_device the_device = {
    .node_type = IBV_NODE_CA,
    .transport_type = IBV_TRANSPORT_IB,
    .name = "double0",
    .dev_name = "uverbs0",
};

EXPORT struct ibv_device **ibv_get_device_list(int *n)
{
    struct ibv_device **list = calloc(2, sizeof *list);

    if (list)
        list[0] = &the_device;
    if (n)
        *n = list ? 1 : 0;
    return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

static int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
static int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

static void read_environment(struct vd_context *context)
{
    const char *how = getenv("EP_VERBS_DOUBLE"), *seed = how ? strchr(how, ':') : NULL;

    context->reorder = !how || strncmp(how, "ordered", 7) != 0;
    context->random = (seed ? strtoull(seed + 1, NULL, 0) : 1) * 0x9e3779b97f4a7c15ull + 1;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct vd_context *context = calloc(1, sizeof *context);

    if (!context)
        return NULL;
    context->ibv.device = device;
    context->ibv.ops.poll_cq = poll_cq;
    context->ibv.ops.req_notify_cq = req_notify_cq;
    context->ibv.ops.post_send = post_send;
    context->ibv.ops.post_recv = post_recv;
    context->ibv.cmd_fd = context->ibv.async_fd = -1;
    context->ibv.num_comp_vectors = 1;
    pthread_mutex_init(&context->lock, NULL);
    pthread_cond_init(&context->work, NULL);
    read_environment(context);
    if (getrandom(context->gid.raw, sizeof context->gid.raw, 0) == sizeof context->gid.raw && vd_wire_open(context))
        return &context->ibv;
    free(context);
    return NULL;
}

EXPORT int ibv_close_device(struct ibv_context *ibv)
{
    struct vd_context *context = context_of(ibv);

    if (context->qps || context->mrs)
        return EBUSY;
    vd_wire_close(context);
    pthread_cond_destroy(&context->work);
    pthread_mutex_destroy(&context->lock);
    free(context);
    return 0;
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    *attr = (struct ibv_device_attr){ .max_mr_size = UINT64_MAX, .max_qp = 4096, .max_qp_wr = VD_MAX_WR,
                                      .max_sge = VD_MAX_SGE, .max_cq = 4096, .max_cqe = VD_MAX_CQE, .max_mr = 65536,
                                      .max_pd = 4096, .phys_port_cnt = 1 };
    return 0;
}

/* The old entry, which the header's wrapper falls back to: its caller has cleared all of today's struct. */
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *old)
{
    struct ibv_port_attr *attr = (struct ibv_port_attr *)old;

    (void)context;
    if (port != 1)
        return EINVAL;
    attr->state = IBV_PORT_ACTIVE;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = 1;
    attr->max_msg_sz = 1u << 31;
    attr->active_speed = 64;
    attr->active_width = 2;
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    if (port != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    *gid = context_of(context)->gid;
    return 0;
}

/* ---- memory ------------------------------------------------------------------------------- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof *pd);

    if (pd)
        pd->context = context;
    return pd;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

static struct ibv_mr *make_mr(struct ibv_pd *pd, void *address, size_t bytes, int access)
{
    struct vd_context *context = context_of(pd->context);
    struct vd_mr *mr = calloc(1, sizeof *mr);

    if (!mr)
        return NULL;
    mr->ibv = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = address, .length = bytes };
    mr->access = access | IBV_ACCESS_LOCAL_WRITE; /* anybody may read its own memory */
    lock(context);
    mr->ibv.lkey = mr->ibv.rkey = ++context->keys * 0x101u;
    mr->next = context->mrs;
    context->mrs = mr;
    unlock(context);
    return &mr->ibv;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t bytes, int access)
{
    return make_mr(pd, address, bytes, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t bytes, uint64_t iova,
                                       unsigned int access)
{
    if (iova == (uintptr_t)address)
        return make_mr(pd, address, bytes, (int)access);
    errno = EOPNOTSUPP;
    return NULL;
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                                        int access)
{
    (void)pd, (void)offset, (void)bytes, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP; /* there is no GPU whose memory it could be */
    return NULL;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *ibv)
{
    struct vd_context *context = context_of(ibv->context);
    struct vd_mr **at = &context->mrs;

    lock(context);
    while (*at && &(*at)->ibv != ibv)
        at = &(*at)->next;
    if (!*at)
        vd_die("a memory region that is none is deregistered");
    *at = (*at)->next;
    unlock(context);
    free(ibv);
    return 0;
}

struct vd_mr *vd_find_mr(const struct vd_context *context, uint32_t key, uint64_t address, uint64_t bytes, int access)
{
    for (struct vd_mr *mr = context->mrs; mr; mr = mr->next) {
        const uint64_t into = address - (uintptr_t)mr->ibv.addr; /* below it: a very large number */

        if (mr->ibv.lkey == key)
            return (mr->access & access) == access && into <= mr->ibv.length && bytes <= mr->ibv.length - into ? mr
                                                                                                               : NULL;
    }
    return NULL;
}

/* ---- queue pairs ---------------------------------------------------------------------------- */

struct vd_qp *vd_find_qp(const struct vd_context *context, uint32_t number)
{
    struct vd_qp *qp = context->qps;

    while (qp && qp->ibv.qp_num != number)
        qp = qp->next;
    return qp;
}

static void free_qp(struct vd_qp *qp)
{
    free(qp->send);
    free(qp->recv);
    free(qp);
}

static bool fits(const struct ibv_qp_init_attr *attr)
{
    return attr->qp_type == IBV_QPT_RC && !attr->srq && attr->send_cq && attr->recv_cq
           && attr->cap.max_send_wr >= 1 && attr->cap.max_send_wr <= VD_MAX_WR && attr->cap.max_recv_wr <= VD_MAX_WR
           && attr->cap.max_send_sge <= VD_MAX_SGE && attr->cap.max_recv_sge <= VD_MAX_SGE
           && attr->cap.max_inline_data <= VD_MAX_INLINE;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct vd_context *context = context_of(pd->context);
    struct vd_qp *qp;

    if (!fits(attr)) {
        errno = EINVAL;
        return NULL;
    }
    qp = calloc(1, sizeof *qp);
    if (!qp)
        return NULL;
    qp->send = calloc(attr->cap.max_send_wr, sizeof *qp->send);
    qp->recv = calloc(attr->cap.max_recv_wr + 1, sizeof *qp->recv);
    if (!qp->send || !qp->recv) {
        free_qp(qp);
        return NULL;
    }
    qp->ibv = (struct ibv_qp){ .context = pd->context, .qp_context = attr->qp_context, .pd = pd,
                               .send_cq = attr->send_cq, .recv_cq = attr->recv_cq, .state = IBV_QPS_RESET,
                               .qp_type = attr->qp_type };
    qp->cap = attr->cap;
    qp->all_signaled = attr->sq_sig_all;
    qp->fd = -1;
    lock(context);
    qp->ibv.qp_num = ++context->numbers;
    qp->next = context->qps;
    context->qps = qp;
    unlock(context);
    return &qp->ibv;
}

/* What each step must give, as ibv_modify_qp(3) lists it for reliable connections. */
static int required(enum ibv_qp_state from, enum ibv_qp_state to)
{
    if (to == IBV_QPS_ERR)
        return IBV_QP_STATE;
    if (from == IBV_QPS_RESET && to == IBV_QPS_INIT)
        return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    if (from == IBV_QPS_INIT && to == IBV_QPS_RTR)
        return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC
               | IBV_QP_MIN_RNR_TIMER;
    if (from == IBV_QPS_RTR && to == IBV_QPS_RTS)
        return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY
               | IBV_QP_TIMEOUT;
    return -1;
}

static bool may_modify(const struct vd_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    const int needed = required(qp->ibv.state, attr->qp_state);

    return needed >= 0 && (mask & needed) == needed;
}

static void modify(struct vd_qp *qp, const struct ibv_qp_attr *attr)
{
    if (attr->qp_state == IBV_QPS_RTR) {
        qp->peer = attr->dest_qp_num;
        qp->peer_gid = attr->ah_attr.grh.dgid;
    }
    qp->ibv.state = attr->qp_state;
    if (qp->ibv.state == IBV_QPS_ERR)
        vd_qp_fail(qp);
}

/* The state is read under the lock too: the wire's thread fails a queue pair by itself. */
EXPORT int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
    struct vd_context *context = context_of(ibv->context);
    struct vd_qp *qp = (struct vd_qp *)ibv;
    bool may;

    lock(context);
    may = may_modify(qp, attr, mask);
    if (may) {
        modify(qp, attr);
        vd_wire_wake(context);
    }
    unlock(context);
    return may ? 0 : EINVAL;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct vd_context *context = context_of(ibv->context);
    struct vd_qp **at = &context->qps, *qp = (struct vd_qp *)ibv;

    lock(context);
    while (qp->busy || context->looking)
        pthread_cond_wait(&context->work, &context->lock);
    while (*at != qp)
        at = &(*at)->next;
    *at = qp->next;
    if (qp->fd >= 0)
        close(qp->fd);
    vd_wire_wake(context); /* what the peer has sent it goes nowhere */
    unlock(context);
    free_qp(qp);
    return 0;
}

/* ---- requests: under the lock ------------------------------------------------------------------ */

void vd_send_over(struct vd_qp *qp, struct vd_send *send, enum ibv_wc_status status)
{
    const struct ibv_wc wc = { .wr_id = send->wr_id, .status = status, .qp_num = qp->ibv.qp_num,
                               .opcode = IBV_WC_RDMA_WRITE, .byte_len = send->bytes };

    send->state = VD_FREE;
    if (send->signaled || status != IBV_WC_SUCCESS)
        vd_complete((struct vd_cq *)qp->ibv.send_cq, &wc);
    if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR)
        vd_qp_fail(qp);
}

struct vd_send *vd_first_send(struct vd_qp *qp)
{
    struct vd_send *first = NULL;

    for (uint32_t i = 0; i < qp->cap.max_send_wr; i++)
        if (qp->send[i].state != VD_FREE && (!first || qp->send[i].number < first->number))
            first = &qp->send[i];
    return first;
}

void vd_qp_fail(struct vd_qp *qp)
{
    struct vd_context *context = context_of(qp->ibv.context);
    struct vd_send *send;

    qp->ibv.state = IBV_QPS_ERR;
    while (qp->busy) /* it reads memory that is the program's again when its request is flushed */
        pthread_cond_wait(&context->work, &context->lock);
    qp->out.n = 0;
    while ((send = vd_first_send(qp)) != NULL)
        vd_send_over(qp, send, IBV_WC_WR_FLUSH_ERR);
    for (; qp->recv_n > 0; qp->recv_n--) {
        const struct ibv_wc wc = { .wr_id = qp->recv[qp->recv_head++ % (qp->cap.max_recv_wr + 1)],
                                   .status = IBV_WC_WR_FLUSH_ERR, .qp_num = qp->ibv.qp_num, .opcode = IBV_WC_RECV };

        vd_complete((struct vd_cq *)qp->ibv.recv_cq, &wc);
    }
}

static struct vd_send *free_send(struct vd_qp *qp)
{
    for (uint32_t i = 0; i < qp->cap.max_send_wr; i++) {
        struct vd_send *send = &qp->send[(qp->posted + i) % qp->cap.max_send_wr];

        if (send->state == VD_FREE)
            return send;
    }
    vd_die("more than the %u requests that the queue pair was made for", qp->cap.max_send_wr);
}

static void copy_inline(struct vd_qp *qp, struct vd_send *send)
{
    uint32_t at = 0;

    if (send->bytes > qp->cap.max_inline_data)
        vd_die("%u bytes inline: the queue pair was made for %u", send->bytes, qp->cap.max_inline_data);
    for (int i = 0; i < send->n_sge; at += send->sge[i++].length)
        memcpy(send->inlined + at, (const void *)(uintptr_t)send->sge[i].addr, send->sge[i].length);
    send->n_sge = 0;
}

static bool may_read(const struct vd_context *context, const struct vd_send *send)
{
    for (int i = 0; i < send->n_sge; i++)
        if (!vd_find_mr(context, send->sge[i].lkey, send->sge[i].addr, send->sge[i].length, 0))
            return false;
    return true;
}

static void queue_send(struct vd_context *context, struct vd_qp *qp, const struct ibv_send_wr *wr)
{
    struct vd_send *send = free_send(qp);

    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
        vd_die("%d pieces of memory: the queue pair was made for %u", wr->num_sge, qp->cap.max_send_sge);
    if (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM)
        vd_die("opcode %d: there is RDMA WRITE only", wr->opcode);
    *send = (struct vd_send){ .state = VD_QUEUED, .number = qp->posted++, .wr_id = wr->wr_id,
                              .remote = wr->wr.rdma.remote_addr, .rkey = wr->wr.rdma.rkey, .imm = wr->imm_data,
                              .opcode = wr->opcode, .n_sge = wr->num_sge,
                              .signaled = qp->all_signaled || (wr->send_flags & IBV_SEND_SIGNALED) != 0 };
    for (int i = 0; i < wr->num_sge; i++) {
        send->sge[i] = wr->sg_list[i];
        send->bytes += wr->sg_list[i].length;
    }
    if (wr->send_flags & IBV_SEND_INLINE)
        copy_inline(qp, send);
    if (qp->ibv.state == IBV_QPS_ERR)
        vd_send_over(qp, send, IBV_WC_WR_FLUSH_ERR);
    else if (!may_read(context, send))
        vd_send_over(qp, send, IBV_WC_LOC_PROT_ERR);
}

static int post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct vd_context *context = context_of(ibv->context);

    lock(context);
    if (ibv->state != IBV_QPS_RTS && ibv->state != IBV_QPS_ERR) {
        unlock(context);
        *bad = wr;
        return EINVAL;
    }
    for (; wr; wr = wr->next)
        queue_send(context, (struct vd_qp *)ibv, wr);
    pthread_cond_broadcast(&context->work);
    unlock(context);
    return 0;
}

static int post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct vd_context *context = context_of(ibv->context);
    struct vd_qp *qp = (struct vd_qp *)ibv;

    (void)bad;
    lock(context);
    if (ibv->state == IBV_QPS_RESET)
        vd_die("a receive is posted to a queue pair that is reset");
    for (; wr; wr = wr->next) {
        if (qp->recv_n == qp->cap.max_recv_wr)
            vd_die("more than the %u receives that the queue pair was made for", qp->cap.max_recv_wr);
        qp->recv[(qp->recv_head + qp->recv_n++) % (qp->cap.max_recv_wr + 1)] = wr->wr_id;
    }
    if (ibv->state == IBV_QPS_ERR)
        vd_qp_fail(qp);
    vd_wire_wake(context);
    unlock(context);
    return 0;
}
