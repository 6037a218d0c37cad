/*
 * A libibverbs.so.1 without a NIC: reliable connections between processes of one machine, over unix sockets, as
 * unkind as a network may be.  Programs that look libibverbs up at run time take it with LD_LIBRARY_PATH.
 *
 *     verbs.c   the calls: devices, memory regions, completion queues, queue pairs
 *     wire.c    what a NIC does: a thread of each context sends, another receives
 *
 * There is RDMA WRITE, with and without immediate data, from memory of the host.  A write is cut into packets, read
 * from memory when they are sent.  EP_VERBS_DOUBLE=ordered[:SEED] keeps the order of one queue pair, as the
 * InfiniBand specification has it (volume 1, 9.7).  EP_VERBS_DOUBLE=reorder[:SEED], the default, does not, as NICs that
 * spray packets over many paths: writes land and complete in any order, interleaved, some of them late; a completion
 * with immediate data still comes after all data of its own write.
 *
 * What real hardware punishes late is said at once here, on stderr, and ends the process: more requests than the
 * queue pair was made for, a completion queue that overflows, calls in a state that does not allow them.
 */
#ifndef VERBS_DOUBLE_H
#define VERBS_DOUBLE_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

enum { VD_MAX_SGE = 4, VD_MAX_INLINE = 256, VD_MAX_WR = 16384, VD_MAX_CQE = 1 << 20, VD_PACKET_BYTES = 65536 };

struct vd_mr {
    struct ibv_mr ibv; /* first */
    int access;
    struct vd_mr *next;
};

struct vd_cq {
    struct ibv_cq ibv; /* first */
    struct ibv_wc *wc; /* ring of ibv.cqe */
    uint32_t head, n;
    bool armed; /* the next completion is told to the channel */
};

struct vd_channel {
    struct ibv_comp_channel ibv; /* first; fd: an eventfd that counts events */
    struct vd_cq *cq;            /* one at most */
};

enum vd_send_state { VD_FREE, VD_QUEUED, VD_SENT };

struct vd_send {
    enum vd_send_state state;
    uint64_t number; /* order of posting */
    uint64_t wr_id, remote;
    uint32_t rkey, imm, bytes, at; /* at: what has been sent */
    enum ibv_wr_opcode opcode;
    bool signaled;
    int n_sge;
    struct ibv_sge sge[VD_MAX_SGE];
    uint8_t inlined[VD_MAX_INLINE];
};

/* A packet, and on its connection what its receiver answers when a write is over. */
struct vd_packet {
    uint32_t qp, from; /* the receiver's queue pair, the sender's */
    uint32_t slot;     /* the sender's, for the answer */
    uint32_t rkey, bytes, total, imm;
    uint32_t last, with_imm; /* 0 or 1 */
    uint32_t zero;
    uint64_t remote;
};
struct vd_answer {
    uint32_t slot, status; /* enum ibv_wc_status */
};

/* The packet that is on its way. */
struct vd_outgoing {
    struct vd_packet packet;
    uint8_t inlined[VD_MAX_INLINE];
    struct iovec piece[1 + VD_MAX_SGE]; /* what is left of it */
    int first, n;
};

struct vd_qp {
    struct ibv_qp ibv; /* first */
    struct vd_qp *next;
    struct ibv_qp_cap cap;
    bool all_signaled;
    uint32_t peer; /* number of the peer's queue pair */
    union ibv_gid peer_gid;
    struct vd_send *send; /* cap.max_send_wr */
    uint64_t posted;
    uint64_t *recv; /* ring of cap.max_recv_wr: wr_id */
    uint32_t recv_head, recv_n;
    int fd;    /* to the peer; -1: not connected yet */
    bool full; /* nothing more goes into it for now */
    bool busy; /* the sending thread is at it, without the lock */
    struct vd_outgoing out;
    struct vd_answer answer; /* that is coming in */
    uint32_t answer_bytes;
};

struct vd_inbound; /* a connection of a peer that sends; wire.c */

struct vd_context {
    struct ibv_context ibv; /* first */
    union ibv_gid gid;
    pthread_mutex_t lock; /* of all below, and of what belongs to the context */
    pthread_cond_t work;  /* for the sending thread, and who waits for it */
    pthread_t sender, receiver;
    bool closing;
    bool looking; /* the receiving thread goes through the queue pairs, and may wait for one of them */
    int listener, wake; /* wake: eventfd for the receiving thread */
    struct vd_mr *mrs;
    struct vd_qp *qps;
    struct vd_inbound *inbound;
    uint32_t keys, numbers;
    bool reorder;
    uint64_t random;
};

/* Ends the process: the program does what hardware does not allow. */
__attribute__((noreturn, format(printf, 1, 2))) void vd_die(const char *format, ...);

/* ---- wire.c ---- */
bool vd_wire_open(struct vd_context *context);
void vd_wire_close(struct vd_context *context);
void vd_wire_wake(struct vd_context *context); /* something changed that either thread waits for */

/* ---- verbs.c, under the lock ---- */
struct vd_mr *vd_find_mr(const struct vd_context *context, uint32_t key, uint64_t address, uint64_t bytes, int access);
struct vd_qp *vd_find_qp(const struct vd_context *context, uint32_t number);
void vd_complete(struct vd_cq *cq, const struct ibv_wc *wc);
/* The request is over.  A failure puts the queue pair into its error state, where the others are flushed. */
void vd_send_over(struct vd_qp *qp, struct vd_send *send, enum ibv_wc_status status);
void vd_qp_fail(struct vd_qp *qp);
struct vd_send *vd_first_send(struct vd_qp *qp); /* the oldest that is not over, or NULL */

#endif
