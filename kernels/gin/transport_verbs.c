/*
 * Puts over RDMA NICs, with verbs.
 *
 * Between two ranks there are two reliable connections (queue pairs) each way: one carries writes from here to there,
 * the other what the peer says about writes from there to here, so that a thread has one for itself. A put is written
 * where it belongs, and its message into one of the peer's slots. NICs that spray packets over many paths place writes
 * in any order, and so both carry immediate data, which is told only after all data of its own write: when a slot has
 * been told of twice, its piece has landed, and order.c decides about signals. Each slot is given back by a write of
 * no bytes; a sender has no more pieces under way than there are slots, so that receives are always posted before
 * they are needed.
 *
 * GPU memory is reached where NCCL gives a DMA-BUF of it. What the NIC cannot reach takes TCP.
 *
 * libibverbs is looked up at run time: without it this transport is not usable, and nothing else changes.
 */
#include "transport.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

/* Macros that go around a function's symbol. */
#undef ibv_query_port
#undef ibv_reg_mr

enum {
    SLOTS = 256,       /* pieces to one peer that are under way */
    SENDS = 2 * SLOTS, /* of a queue pair: data and message of each */
    RECEIVES = 2 * SLOTS,
    COMPLETIONS = 32, /* taken at a time */
    TURN = 64,        /* of one peer, then the others */
    PORT = 1
};
#define MOST_BYTES (1u << 30) /* of one write: NICs take 2^31 */

/* Retries of the NIC's before a peer is given up: 7 times about 1 s; a receive that is not posted is waited for. */
enum { ACK_TIMEOUT = 18, RETRIES = 7, RECEIVER_NOT_READY_RETRIES = 7, RECEIVER_NOT_READY_TIMER = 12, HOPS = 64 };

/* Of a slot: what has been written there, or is due; and in immediate data, with the slot below. */
enum { DATA = 1u << 16, MESSAGE = 1u << 17, RETURN = 1u << 18, QUEUED = 1u << 19, SLOT_MASK = DATA - 1 };

/* ---- the library ------------------------------------------------------------------------------------- */

#define FUNCTIONS(X)                                                                                                   \
    X(get_device_list)                                                                                                 \
    X(free_device_list) X(open_device) X(close_device) X(query_port) X(query_gid) X(alloc_pd) X(dealloc_pd) X(reg_mr)  \
        X(reg_dmabuf_mr) X(dereg_mr) X(create_comp_channel) X(destroy_comp_channel) X(create_cq) X(destroy_cq)         \
            X(get_cq_event) X(ack_cq_events) X(create_qp) X(modify_qp) X(destroy_qp) X(wc_status_str)

static struct {
#define X(name) __typeof__(ibv_##name) *name;
    FUNCTIONS(X)
#undef X
} verbs;

static pthread_once_t looked = PTHREAD_ONCE_INIT;
static struct ep_error why_not; /* EP_OK: the library is there */

static ep_status find_functions(void *library, struct ep_error *error)
{
#define X(name) { "ibv_" #name, &verbs.name },
    const struct {
        const char *name;
        void *function;
    } wanted[] = { FUNCTIONS(X) };
#undef X

    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *symbol = dlsym(library, wanted[i].name);

        if (!symbol)
            return ep_error_set(error, EP_UNAVAILABLE, "libibverbs.so.1 has no %s", wanted[i].name);
        memcpy(wanted[i].function, &symbol, sizeof symbol); /* ISO C has no such cast, POSIX promises that it works */
    }
    return EP_OK;
}

/* Through the old entry: the library fills as much of the struct as that knows. */
static bool port_is_up(struct ibv_context *context, struct ibv_port_attr *port)
{
    memset(port, 0, sizeof *port);
    return verbs.query_port(context, PORT, (struct _compat_ibv_port_attr *)port) == 0 && port->state == IBV_PORT_ACTIVE;
}

/* The first NIC whose port is up. */
static ep_status open_nic(struct ibv_context **out, struct ibv_port_attr *port, struct ep_error *error)
{
    struct ibv_device **list;
    struct ibv_context *context = NULL;
    int n = 0;

    list = verbs.get_device_list(&n);
    for (int i = 0; list && i < n && !context; i++) {
        context = verbs.open_device(list[i]);
        if (context && !port_is_up(context, port)) {
            verbs.close_device(context);
            context = NULL;
        }
    }
    if (list)
        verbs.free_device_list(list);
    if (!context)
        return ep_error_set(error, EP_UNAVAILABLE, "none of %d RDMA NICs has a port that is up", n);
    *out = context;
    return EP_OK;
}

static void look(void)
{
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL); /* for the life of the process */

    if (library)
        (void)find_functions(library, &why_not); /* which says what is missing */
    else
        ep_error_set(&why_not, EP_UNAVAILABLE, "no libibverbs.so.1");
}

/* A port may go up or down as long as the process lives. */
static ep_status verbs_usable(struct ep_gin_comm *comm, struct ep_error *error)
{
    struct ibv_port_attr port;
    struct ibv_context *context;
    ep_status status;

    (void)comm;
    pthread_once(&looked, look);
    if (why_not.status != EP_OK)
        return ep_error_set(error, why_not.status, "%s", why_not.text);
    status = open_nic(&context, &port, error);
    if (status == EP_OK)
        verbs.close_device(context);
    return status;
}

/* ---- what a communicator's links share ------------------------------------------------------------------ */

struct registered {
    uint32_t key; /* of the region; 0: none */
    struct ibv_mr *mr;
};

struct nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_port_attr port;
    union ibv_gid gid;
    uint8_t gid_index;
    struct registered region[EP_GIN_MAX_REGIONS]; /* by slot; control, and while a region lives progress too */
};

static bool maps_ipv4(const union ibv_gid *gid)
{
    static const uint8_t prefix[12] = { [10] = 0xff, [11] = 0xff };

    return memcmp(gid->raw, prefix, sizeof prefix) == 0;
}

/* On Ethernet the last that is an IPv4 address, of RoCE v2; else the first. */
static ep_status choose_gid(struct nic *nic, struct ep_error *error)
{
    union ibv_gid gid;

    for (int i = 0; nic->port.link_layer == IBV_LINK_LAYER_ETHERNET && i < nic->port.gid_tbl_len; i++)
        if (verbs.query_gid(nic->context, PORT, i, &gid) == 0 && maps_ipv4(&gid))
            nic->gid_index = (uint8_t)i;
    if (verbs.query_gid(nic->context, PORT, nic->gid_index, &nic->gid) != 0)
        return ep_error_errno(error, EP_IO, "address %u of the RDMA NIC", nic->gid_index);
    return EP_OK;
}

static void verbs_stop(void *shared)
{
    struct nic *nic = shared;

    for (uint32_t i = 0; i < EP_GIN_MAX_REGIONS; i++)
        if (nic->region[i].mr)
            verbs.dereg_mr(nic->region[i].mr);
    if (nic->pd)
        verbs.dealloc_pd(nic->pd);
    verbs.close_device(nic->context);
    free(nic);
}

static ep_status verbs_start(struct ep_gin_comm *comm, void **shared, struct ep_error *error)
{
    struct nic *nic = calloc(1, sizeof *nic);
    ep_status status;

    (void)comm;
    if (!nic)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for an RDMA NIC");
    status = open_nic(&nic->context, &nic->port, error);
    if (status != EP_OK) {
        free(nic);
        return status;
    }
    *shared = nic; /* stop takes down what there is of it */
    nic->pd = verbs.alloc_pd(nic->context);
    if (!nic->pd)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a protection domain of the RDMA NIC");
    return choose_gid(nic, error);
}

/* ---- links ------------------------------------------------------------------------------------------------ */

/* A queue pair with a completion queue of its own. */
struct pair {
    struct ibv_comp_channel *channel; /* NULL: nobody sleeps on it */
    struct ibv_cq *cq;
    struct ibv_qp *qp;
};

/* A piece on its way out. */
struct outgoing {
    struct ep_gin_put *put; /* NULL: its source may be written again */
    uint32_t bytes;
    uint32_t due;  /* DATA, MESSAGE: to be completed; RETURN: the peer has the slot.  0: free */
    uint32_t next; /* free; SLOTS: none */
};

struct verbs_card {
    union ibv_gid gid;
    uint32_t lid, mtu;
    uint32_t out, in; /* numbers of the queue pairs */
    uint32_t rkey;
    uint64_t slots; /* address */
};
_Static_assert(sizeof(struct verbs_card) <= EP_GIN_CARD_BYTES, "a card holds it");

struct verbs_link {
    struct ep_gin_comm *comm;
    struct ep_gin_peer *peer;
    struct nic *nic;
    struct verbs_card theirs;
    struct ibv_mr *mr;                        /* of both arrays of messages */
    struct ep_gin_message messages[2][SLOTS]; /* going out; coming in, which the peer writes */

    /* progress */
    struct pair out;
    struct outgoing going[SLOTS];
    uint32_t free;
    bool ended; /* the queue pair is in its error state */

    /* receive */
    struct pair in;
    uint32_t told[SLOTS]; /* DATA, MESSAGE: have landed; QUEUED: it is among the ready ones; bytes of the data: */
    uint32_t bytes[SLOTS];
    uint32_t ready[SLOTS], n_ready; /* slots of pieces that have landed and are not accepted yet */
    uint32_t owed[SLOTS], n_owed;   /* slots that are to be given back */
    uint32_t giving;                /* that are on their way back */
    bool idle;                      /* the last look found nothing, and nothing waits */
    bool broken;                    /* the peer has written nonsense: nothing more of it is taken */
    bool mute;                      /* nobody is there to take a slot back */
};

enum { OUT, IN };

static ep_status open_pair(struct verbs_link *link, bool sleeps, struct pair *pair, struct ep_error *error)
{
    struct ibv_context *context = link->nic->context;
    struct ibv_qp_init_attr wanted = {
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
        .cap = { .max_send_wr = SENDS, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 }
    };

    if (sleeps) {
        pair->channel = verbs.create_comp_channel(context);
        if (!pair->channel || fcntl(pair->channel->fd, F_SETFL, O_NONBLOCK) != 0)
            return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a completion channel of the RDMA NIC");
    }
    pair->cq = verbs.create_cq(context, SENDS + RECEIVES, NULL, pair->channel, 0);
    if (!pair->cq)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a completion queue of %d", SENDS + RECEIVES);
    wanted.send_cq = wanted.recv_cq = pair->cq;
    pair->qp = verbs.create_qp(link->nic->pd, &wanted);
    return pair->qp ? EP_OK : ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a queue pair of the RDMA NIC");
}

static void close_pair(struct pair *pair)
{
    if (pair->qp)
        verbs.destroy_qp(pair->qp);
    if (pair->cq)
        verbs.destroy_cq(pair->cq);
    if (pair->channel)
        verbs.destroy_comp_channel(pair->channel);
}

static void verbs_link_close(void *opened)
{
    struct verbs_link *link = opened;

    close_pair(&link->out);
    close_pair(&link->in);
    if (link->mr)
        verbs.dereg_mr(link->mr);
    free(link);
}

static ep_status post_receive(struct pair *pair, struct ep_error *error)
{
    struct ibv_recv_wr wr = { .wr_id = 0 }, *bad;
    const int failed = ibv_post_recv(pair->qp, &wr, &bad);

    return failed ? ep_error_set(error, EP_IO, "a receive of the RDMA NIC: %s", strerror(failed)) : EP_OK;
}

static ep_status initialise(struct pair *pair, struct ep_error *error)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT,
                                .port_num = PORT,
                                .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
    const int failed =
        verbs.modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    ep_status status = EP_OK;

    if (failed)
        return ep_error_set(error, EP_IO, "a queue pair of the RDMA NIC: %s", strerror(failed));
    for (uint32_t i = 0; i < RECEIVES && status == EP_OK; i++)
        status = post_receive(pair, error);
    return status;
}

static ep_status open_messages(struct verbs_link *link, struct ep_error *error)
{
    link->mr = verbs.reg_mr(link->nic->pd, link->messages, sizeof link->messages,
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!link->mr)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "memory of %zu bytes for the RDMA NIC",
                              sizeof link->messages);
    for (uint32_t i = 0; i < SLOTS; i++)
        link->going[i].next = i + 1;
    return EP_OK;
}

static void introduce(const struct verbs_link *link, struct ep_gin_card *mine)
{
    const struct verbs_card card = { .gid = link->nic->gid,
                                     .lid = link->nic->port.lid,
                                     .mtu = (uint32_t)link->nic->port.active_mtu,
                                     .out = link->out.qp->qp_num,
                                     .in = link->in.qp->qp_num,
                                     .rkey = link->mr->rkey,
                                     .slots = (uintptr_t)link->messages[IN] };

    memcpy(mine->bytes, &card, sizeof card);
    mine->fds = 0;
}

static ep_status verbs_link_open(struct ep_gin_comm *comm, struct ep_gin_peer *peer, void **out,
                                 struct ep_gin_card *mine, struct ep_error *error)
{
    struct verbs_link *link = calloc(1, sizeof *link);
    ep_status status;

    if (!link)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a link to rank %u", peer->rank);
    *out = link;
    link->comm = comm;
    link->peer = peer;
    link->nic = comm->shared[EP_GIN_VERBS];
    status = open_messages(link, error);
    if (status == EP_OK)
        status = open_pair(link, false, &link->out, error);
    if (status == EP_OK)
        status = open_pair(link, true, &link->in, error);
    if (status == EP_OK)
        status = initialise(&link->out, error);
    if (status == EP_OK)
        status = initialise(&link->in, error);
    if (status == EP_OK)
        introduce(link, mine);
    return status;
}

static struct ibv_qp_attr to_peer(const struct verbs_link *link, uint32_t number)
{
    const struct verbs_card *theirs = &link->theirs;
    const uint32_t mtu = (uint32_t)link->nic->port.active_mtu;

    return (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)(theirs->mtu < mtu ? theirs->mtu : mtu),
        .dest_qp_num = number,
        .min_rnr_timer = RECEIVER_NOT_READY_TIMER,
        .ah_attr = { .is_global = 1,
                     .dlid = (uint16_t)theirs->lid,
                     .port_num = PORT,
                     .grh = { .dgid = theirs->gid, .sgid_index = link->nic->gid_index, .hop_limit = HOPS } }
    };
}

static ep_status connect_pair(const struct verbs_link *link, struct pair *pair, uint32_t number, struct ep_error *error)
{
    struct ibv_qp_attr receive = to_peer(link, number);
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS, .timeout = ACK_TIMEOUT, .retry_cnt = RETRIES, .rnr_retry = RECEIVER_NOT_READY_RETRIES
    };
    int failed = verbs.modify_qp(pair->qp, &receive,
                                 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);

    if (!failed)
        failed = verbs.modify_qp(pair->qp, &send,
                                 IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT |
                                     IBV_QP_RNR_RETRY | IBV_QP_TIMEOUT);
    if (failed)
        return ep_error_set(error, EP_IO, "the RDMA NIC does not connect to rank %u: %s", link->peer->rank,
                            strerror(failed));
    return EP_OK;
}

static ep_status verbs_link_connect(void *opened, const struct ep_gin_card *theirs, struct ep_error *error)
{
    struct verbs_link *link = opened;
    ep_status status;

    memcpy(&link->theirs, theirs->bytes, sizeof link->theirs);
    status = connect_pair(link, &link->out, link->theirs.in, error);
    if (status == EP_OK)
        status = connect_pair(link, &link->in, link->theirs.out, error);
    if (status == EP_OK)
        status = ep_gin_watch(link->comm, link->peer, link, 0, link->in.channel->fd, error);
    return status;
}

/* ---- regions ---------------------------------------------------------------------------------------------- */

struct region_card {
    uint64_t at;
    uint32_t rkey;
};
_Static_assert(sizeof(struct region_card) <= EP_GIN_CARD_BYTES, "a card holds it");

static struct ibv_mr *register_with(const struct nic *nic, const struct ep_gin_region *region)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

    if (region->type == NCCL_MEMORY_HOST)
        return verbs.reg_mr(nic->pd, region->at, region->bytes, access);
    if (region->dmabuf < 0)
        return NULL;
    return verbs.reg_dmabuf_mr(nic->pd, region->dmabuf_offset, region->bytes, (uintptr_t)region->at, region->dmabuf,
                               access);
}

/* Once for all peers; the NIC forgets what was in the slot before. */
static struct registered *know(struct nic *nic, const struct ep_gin_region *region)
{
    struct registered *known = &nic->region[region->slot];

    if (known->key == region->key)
        return known;
    if (known->mr)
        verbs.dereg_mr(known->mr);
    known->mr = register_with(nic, region);
    known->key = region->key;
    return known;
}

static ep_status verbs_region_offer(void *opened, const struct ep_gin_region *region, struct ep_gin_card *card,
                                    struct ep_error *error)
{
    const struct verbs_link *link = opened;
    const struct registered *known = know(link->nic, region);
    struct region_card offered = { .at = (uintptr_t)region->at };

    if (!known->mr)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the RDMA NIC does not reach the region");
    offered.rkey = known->mr->rkey;
    memcpy(card->bytes, &offered, sizeof offered);
    card->fds = 0;
    return EP_OK;
}

static ep_status verbs_region_reach(void *opened, const struct ep_gin_region *region, const struct ep_gin_card *card,
                                    void **remote, struct ep_error *error)
{
    struct region_card *reached = malloc(sizeof *reached);

    (void)opened, (void)region;
    if (!reached)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a peer's region");
    memcpy(reached, card->bytes, sizeof *reached);
    *remote = reached;
    return EP_OK;
}

static void verbs_region_leave(void *opened, const struct ep_gin_region *region, void *remote)
{
    struct verbs_link *link = opened;
    struct registered *known = &link->nic->region[region->slot];

    if (known->mr) /* for all peers: the region is gone */
        verbs.dereg_mr(known->mr);
    *known = (struct registered){ 0 };
    free(remote);
}

static bool verbs_reads(void *opened, const struct ep_gin_region *source)
{
    const struct verbs_link *link = opened;
    const struct registered *known = &link->nic->region[source->slot];

    return known->mr && known->key == source->key;
}

/* ---- sending ------------------------------------------------------------------------------------------------- */

/* What the peer is told of when it has landed; as all that is said, in the byte order of both. */
static bool post_write(struct pair *pair, const struct ibv_sge *from, uint64_t to, uint32_t rkey, uint32_t tell)
{
    struct ibv_sge piece = *from;
    struct ibv_send_wr wr = { .wr_id = tell,
                              .sg_list = &piece,
                              .num_sge = piece.length > 0,
                              .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                              .imm_data = tell,
                              .wr.rdma = { .remote_addr = to, .rkey = rkey } };
    struct ibv_send_wr *bad;

    return ibv_post_send(pair->qp, &wr, &bad) == 0;
}

/* Something that was due has come. */
static void settle(struct verbs_link *link, uint32_t slot, uint32_t what)
{
    struct outgoing *piece = &link->going[slot];

    piece->due &= ~what;
    if (piece->due != 0)
        return;
    piece->next = link->free;
    link->free = slot;
}

/* Its source has been read, or never will be. */
static void source_free(struct outgoing *piece)
{
    if (piece->put)
        ep_gin_put_sent(piece->put, piece->bytes);
    piece->put = NULL;
}

static bool post_data(struct verbs_link *link, uint32_t slot, uint64_t at)
{
    const struct outgoing *piece = &link->going[slot];
    const struct ep_gin_put *put = piece->put;
    const struct region_card *to = put->reached;
    const struct ibv_sge from = { .addr = (uintptr_t)(put->from + at),
                                  .length = piece->bytes,
                                  .lkey = link->nic->region[put->source->slot].mr->lkey };

    return post_write(&link->out, &from, to->at + put->offset + at, to->rkey, DATA | slot);
}

static bool post_message(struct verbs_link *link, uint32_t slot)
{
    const struct ibv_sge from = { .addr = (uintptr_t)&link->messages[OUT][slot],
                                  .length = sizeof(struct ep_gin_message),
                                  .lkey = link->mr->lkey };

    return post_write(&link->out, &from, link->theirs.slots + slot * sizeof(struct ep_gin_message), link->theirs.rkey,
                      MESSAGE | slot);
}

/* A source that nobody reads is free at once; one that is read when the write of it is over. */
static void post_piece(struct verbs_link *link, uint32_t slot, uint64_t at)
{
    struct outgoing *piece = &link->going[slot];
    const bool reads = piece->bytes > 0 && post_data(link, slot, at);

    if ((piece->bytes == 0 || reads) && post_message(link, slot))
        return;
    if (!reads)
        source_free(piece);
    ep_gin_peer_lost(link->peer, "the RDMA NIC takes no more writes");
}

/* The next piece of the put.  False: no slot is free. */
static bool start_piece(struct verbs_link *link, struct ep_gin_put *put)
{
    const uint64_t left = put->bytes - put->taken, at = put->taken;
    const uint32_t slot = link->free, bytes = left < MOST_BYTES ? (uint32_t)left : MOST_BYTES;

    if (slot == SLOTS)
        return false;
    link->free = link->going[slot].next;
    link->going[slot] =
        (struct outgoing){ .put = put, .bytes = bytes, .due = (bytes > 0 ? DATA : 0) | MESSAGE | RETURN };
    ep_gin_put_message(put, at, bytes, &link->messages[OUT][slot]);
    put->taken += bytes;
    post_piece(link, slot, at);
    return true;
}

static bool verbs_put_start(void *opened, struct ep_gin_put *put)
{
    struct verbs_link *link = opened;

    do {
        if (!start_piece(link, put))
            return false;
    } while (put->taken < put->bytes);
    return true;
}

/* A write that failed has left its source as well. */
static void went(struct verbs_link *link, const struct ibv_wc *wc)
{
    const uint32_t slot = (uint32_t)wc->wr_id & SLOT_MASK, what = (uint32_t)wc->wr_id & ~(uint32_t)SLOT_MASK;
    struct outgoing *piece = &link->going[slot];

    if (wc->status != IBV_WC_SUCCESS)
        ep_gin_peer_lost(link->peer, verbs.wc_status_str(wc->status));
    if (what == DATA || piece->bytes == 0)
        source_free(piece);
    settle(link, slot, what);
}

static void came_back(struct verbs_link *link, const struct ibv_wc *wc)
{
    const uint32_t slot = wc->imm_data & ~(uint32_t)RETURN;

    if (wc->status != IBV_WC_SUCCESS)
        ep_gin_peer_lost(link->peer, verbs.wc_status_str(wc->status));
    else if (slot >= SLOTS || !(link->going[slot].due & RETURN) || post_receive(&link->out, NULL) != EP_OK)
        ep_gin_peer_lost(link->peer, "a slot comes back that it does not have");
    else
        settle(link, slot, RETURN);
}

/* Receives have no number, what is sent has. */
static void handle_sent(struct verbs_link *link, const struct ibv_wc *wc)
{
    if (wc->wr_id != 0)
        went(link, wc);
    else
        came_back(link, wc);
}

/* What is under way to a peer that is gone is flushed, and its sources are the program's again. */
static void end_writes(struct verbs_link *link)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

    link->ended = true;
    (void)verbs.modify_qp(link->out.qp, &attr, IBV_QP_STATE); /* it may be there already */
}

static void verbs_progress(void *opened)
{
    struct verbs_link *link = opened;
    struct ibv_wc wc[COMPLETIONS];
    int n;

    if (ep_gin_peer_is_lost(link->peer) && !link->ended)
        end_writes(link);
    while ((n = ibv_poll_cq(link->out.cq, COMPLETIONS, wc)) > 0)
        for (int i = 0; i < n; i++)
            handle_sent(link, &wc[i]);
}

/* ---- receiving ------------------------------------------------------------------------------------------------ */

static void refuse(struct verbs_link *link, const char *why)
{
    link->broken = true;
    ep_gin_peer_lost(link->peer, why);
}

/* The message is there, and its data if it has any. */
static bool whole(const struct verbs_link *link, uint32_t slot)
{
    return (link->told[slot] & MESSAGE) && (link->messages[IN][slot].bytes == 0 || (link->told[slot] & DATA));
}

static void queue_ready(struct verbs_link *link, uint32_t slot)
{
    link->told[slot] |= QUEUED;
    link->ready[link->n_ready++] = slot;
}

static void note(struct verbs_link *link, const struct ibv_wc *wc)
{
    const uint32_t slot = wc->imm_data & SLOT_MASK, what = wc->imm_data & ~(uint32_t)SLOT_MASK;

    if (slot >= SLOTS || (what != DATA && what != MESSAGE) || (link->told[slot] & (what | QUEUED))) {
        refuse(link, "it writes what no rank writes");
        return;
    }
    link->told[slot] |= what;
    if (what == DATA)
        link->bytes[slot] = wc->byte_len;
    if (whole(link, slot))
        queue_ready(link, slot);
}

/* What had landed before the connection ended counts. */
static void ended(struct verbs_link *link, const struct ibv_wc *wc)
{
    link->mute = true;
    ep_gin_peer_lost(link->peer, verbs.wc_status_str(wc->status));
}

static void arrived(struct verbs_link *link, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_SUCCESS)
        ended(link, wc);
    else if (wc->wr_id != 0)
        link->giving--;
    else if (post_receive(&link->in, NULL) != EP_OK)
        refuse(link, "the RDMA NIC takes no more receives");
    else
        note(link, wc);
}

/* The peer may write the message again at any time: what counts is what is read here, once.  True: the slot is free
 * again.  False: it is too far ahead, or the link is of no use. */
static bool accept_piece(struct verbs_link *link, uint32_t slot)
{
    const struct ep_gin_message message = link->messages[IN][slot];
    const struct ep_gin_region *region;
    void *to;

    switch (ep_gin_judge(link->peer, &message, &region, &to)) {
    case EP_GIN_LATER: return false;
    case EP_GIN_REFUSE: break;
    case EP_GIN_TAKE:
    case EP_GIN_DROP:
        if (message.flags == 0 && message.bytes == link->bytes[slot] && ep_gin_landed(link->peer, &message))
            return true;
    }
    ep_gin_count(link->comm, &link->comm->counts.bad_messages, "a message that no rank sends");
    refuse(link, "its message is none");
    return false;
}

static void accept_ready(struct verbs_link *link)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < link->n_ready; i++) {
        const uint32_t slot = link->ready[i];

        if (link->broken || !accept_piece(link, slot)) {
            link->ready[kept++] = slot;
            continue;
        }
        link->told[slot] = link->bytes[slot] = 0;
        link->owed[link->n_owed++] = slot;
    }
    link->n_ready = kept;
}

/* No more than the queue holds; the others when some of these are over. */
static void give_back(struct verbs_link *link)
{
    const struct ibv_sge nothing = { .length = 0 };

    while (link->n_owed > 0 && link->giving < SENDS && !link->mute) {
        const uint32_t slot = link->owed[--link->n_owed];

        link->mute = !post_write(&link->in, &nothing, link->theirs.slots, link->theirs.rkey, RETURN | slot);
        link->giving++;
    }
}

static bool verbs_poll(void *opened)
{
    struct verbs_link *link = opened;
    struct ibv_wc wc[COMPLETIONS];
    int n, taken = 0;

    while (taken < TURN && !link->broken && (n = ibv_poll_cq(link->in.cq, COMPLETIONS, wc)) > 0) {
        for (int i = 0; i < n; i++)
            arrived(link, &wc[i]);
        taken += n;
    }
    accept_ready(link);
    give_back(link);
    link->idle = taken == 0 && link->n_ready == 0;
    return taken > 0;
}

static bool verbs_ready(void *opened, uint32_t index)
{
    struct verbs_link *link = opened;
    struct ibv_cq *cq;
    void *user;

    (void)index;
    if (verbs.get_cq_event(link->in.channel, &cq, &user) == 0)
        verbs.ack_cq_events(cq, 1);
    return verbs_poll(link);
}

/* What it wrote before it went has landed. */
static bool verbs_drained(void *opened)
{
    const struct verbs_link *link = opened;

    return link->idle || link->broken;
}

static void verbs_sleep(void *opened, bool asleep)
{
    struct verbs_link *link = opened;

    if (asleep && ibv_req_notify_cq(link->in.cq, 0) != 0)
        refuse(link, "the RDMA NIC does not wake this process");
}

const struct ep_gin_transport ep_gin_verbs = {
    .name = "verbs",
    .usable = verbs_usable,
    .start = verbs_start,
    .stop = verbs_stop,
    .link_open = verbs_link_open,
    .link_connect = verbs_link_connect,
    .link_close = verbs_link_close,
    .region_offer = verbs_region_offer,
    .region_reach = verbs_region_reach,
    .region_leave = verbs_region_leave,
    .reads = verbs_reads,
    .put_start = verbs_put_start,
    .progress = verbs_progress,
    .poll = verbs_poll,
    .ready = verbs_ready,
    .sleep = verbs_sleep,
    .drained = verbs_drained,
};
