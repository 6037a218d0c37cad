/* The libibverbs double: what a transport may count on is there, and what it may not is not. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "verbs_double.h"

enum { DEPTH = 64, BYTES = 1 << 20, WAIT_MS = 10000 };

/* Two NICs, one queue pair each, connected. */
struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *memory;
    union ibv_gid gid;
};
struct fixture {
    struct side a, b;
    uint32_t wrong_local, wrong_remote; /* keys are off by this */
};

static void make_side(struct side *s)
{
    int n = 0;
    struct ibv_device **list = ibv_get_device_list(&n);
    struct ibv_port_attr port;

    assert_int_equal(n, 1);
    s->context = ibv_open_device(list[0]);
    assert_non_null(s->context);
    ibv_free_device_list(list);
    assert_int_equal(ibv_query_port(s->context, 1, &port), 0);
    assert_int_equal(port.state, IBV_PORT_ACTIVE);
    assert_int_equal(ibv_query_gid(s->context, 1, 0, &s->gid), 0);
    s->pd = ibv_alloc_pd(s->context);
    s->channel = ibv_create_comp_channel(s->context);
    s->cq = ibv_create_cq(s->context, 4 * DEPTH, NULL, s->channel, 0);
    assert_non_null(s->cq);
    s->memory = calloc(1, BYTES);
    s->mr = ibv_reg_mr(s->pd, s->memory, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    assert_non_null(s->mr);

    struct ibv_qp_init_attr attr = { .send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
                                     .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2,
                                              .max_recv_sge = 1, .max_inline_data = 64 } };

    s->qp = ibv_create_qp(s->pd, &attr);
    assert_non_null(s->qp);

    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

    assert_int_equal(ibv_modify_qp(s->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
                     0);
}

static void ready_to_receive(struct side *s, const struct side *peer)
{
    struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = peer->qp->qp_num,
                               .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid } } };

    assert_int_equal(ibv_modify_qp(s->qp, &rtr,
                                   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                       | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
}

static void ready_to_send(struct side *s)
{
    struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS };

    assert_int_equal(ibv_modify_qp(s->qp, &rts,
                                   IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT
                                       | IBV_QP_RNR_RETRY | IBV_QP_TIMEOUT), 0);
}

static int make(void **state, const char *how)
{
    struct fixture *f = calloc(1, sizeof *f);

    setenv("EP_VERBS_DOUBLE", how, 1);
    make_side(&f->a);
    make_side(&f->b);
    ready_to_receive(&f->a, &f->b);
    ready_to_receive(&f->b, &f->a);
    ready_to_send(&f->a);
    ready_to_send(&f->b);
    *state = f;
    return 0;
}

static int set_up_ordered(void **state)
{
    return make(state, "ordered");
}

static int set_up_reorder(void **state)
{
    return make(state, "reorder:7");
}

static void unmake_side(struct side *s)
{
    if (!s->context)
        return;
    assert_int_equal(ibv_destroy_qp(s->qp), 0);
    assert_int_equal(ibv_dereg_mr(s->mr), 0);
    assert_int_equal(ibv_destroy_cq(s->cq), 0);
    assert_int_equal(ibv_destroy_comp_channel(s->channel), 0);
    assert_int_equal(ibv_dealloc_pd(s->pd), 0);
    assert_int_equal(ibv_close_device(s->context), 0);
    free(s->memory);
    s->context = NULL;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    unmake_side(&f->a);
    unmake_side(&f->b);
    free(f);
    return 0;
}

/* ---- what the tests do -------------------------------------------------------------------- */

/* [from, from + bytes) of a's memory to the same place in b's. */
static void post(struct fixture *f, uint64_t id, uint32_t from, uint32_t bytes, enum ibv_wr_opcode opcode, uint32_t imm)
{
    struct ibv_sge sge = { (uintptr_t)f->a.memory + from, bytes, f->a.mr->lkey + f->wrong_local };
    struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .imm_data = imm,
                              .wr.rdma = { (uintptr_t)f->b.memory + from, f->b.mr->rkey + f->wrong_remote } },
                       *bad;

    assert_int_equal(ibv_post_send(f->a.qp, &wr, &bad), 0);
}

static void post_receive(struct side *s, uint64_t id)
{
    struct ibv_recv_wr wr = { .wr_id = id }, *bad;

    assert_int_equal(ibv_post_recv(s->qp, &wr, &bad), 0);
}

static struct ibv_wc next(struct side *s)
{
    struct ibv_wc wc;

    for (int ms = 0; ms < WAIT_MS; ms++) {
        if (ibv_poll_cq(s->cq, 1, &wc) == 1)
            return wc;
        usleep(1000);
    }
    fail_msg("no completion after %d ms", WAIT_MS);
    return wc;
}

static void nothing_comes(struct side *s)
{
    struct ibv_wc wc;

    usleep(20000);
    assert_int_equal(ibv_poll_cq(s->cq, 1, &wc), 0);
}

static void fill(struct side *s, uint32_t seed)
{
    for (uint32_t i = 0; i < BYTES; i++)
        s->memory[i] = (uint8_t)(i * 31 + seed + (i >> 8));
}

/* ---- the tests ------------------------------------------------------------------------------ */

static void a_write_lands(void **state)
{
    struct fixture *f = *state;
    struct ibv_wc wc;

    fill(&f->a, 1);
    post(f, 5, 100, 300001, IBV_WR_RDMA_WRITE, 0);
    wc = next(&f->a);
    assert_int_equal(wc.status, IBV_WC_SUCCESS);
    assert_int_equal(wc.wr_id, 5);
    assert_memory_equal(f->a.memory + 100, f->b.memory + 100, 300001);
    assert_int_equal(f->b.memory[99], 0);
    assert_int_equal(f->b.memory[300101], 0);
    nothing_comes(&f->b);
}

static void immediate_data_waits_for_a_receive(void **state)
{
    struct fixture *f = *state;
    struct ibv_wc wc;

    fill(&f->a, 2);
    post(f, 6, 0, 70000, IBV_WR_RDMA_WRITE_WITH_IMM, 0xabcd);
    nothing_comes(&f->a);
    post_receive(&f->b, 77);
    wc = next(&f->b);
    assert_int_equal(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    assert_int_equal(wc.wr_id, 77);
    assert_int_equal(wc.imm_data, 0xabcd);
    assert_int_equal(wc.byte_len, 70000);
    assert_memory_equal(f->a.memory, f->b.memory, 70000);
    assert_int_equal(next(&f->a).wr_id, 6);
}

/* How many of `n` writes are told of before one that was posted earlier. */
static uint32_t count_early(struct fixture *f, uint32_t n)
{
    uint32_t most = 0, early = 0;

    for (uint32_t i = 0; i < n; i++)
        post_receive(&f->b, i);
    for (uint32_t i = 0; i < n; i++)
        post(f, i, i * 512, 512, IBV_WR_RDMA_WRITE_WITH_IMM, i);
    for (uint32_t i = 0; i < n; i++) {
        const struct ibv_wc wc = next(&f->b);

        assert_memory_equal(f->a.memory + wc.imm_data * 512, f->b.memory + wc.imm_data * 512, 512);
        early += wc.imm_data < most;
        most = wc.imm_data > most ? wc.imm_data : most;
    }
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(next(&f->a).status, IBV_WC_SUCCESS);
    return early;
}

static void ordered_keeps_the_order(void **state)
{
    fill(&((struct fixture *)*state)->a, 3);
    assert_int_equal(count_early(*state, DEPTH), 0);
}

static void reorder_does_not(void **state)
{
    fill(&((struct fixture *)*state)->a, 4);
    assert_true(count_early(*state, DEPTH) > DEPTH / 8);
}

static void who_has_no_right_to_memory_is_refused(void **state)
{
    struct fixture *f = *state;
    uint8_t before = f->b.memory[BYTES - 1];

    fill(&f->a, 5);
    f->wrong_remote = 7; /* of no memory */
    post(f, 1, BYTES - 200000, 200000, IBV_WR_RDMA_WRITE, 0);
    post(f, 2, 0, 8, IBV_WR_RDMA_WRITE, 0);

    const enum ibv_wc_status first = next(&f->a).status, second = next(&f->a).status;

    assert_true(first == IBV_WC_REM_ACCESS_ERR && second == IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(f->b.memory[BYTES - 1], before);
}

static void nor_may_it_read_memory_that_is_not_registered(void **state)
{
    struct fixture *f = *state;

    f->wrong_local = 7;
    post(f, 1, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(next(&f->a).status, IBV_WC_LOC_PROT_ERR);
    f->wrong_local = 0;
    post(f, 2, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(next(&f->a).status, IBV_WC_WR_FLUSH_ERR);
}

static void a_peer_that_is_gone_answers_nothing(void **state)
{
    struct fixture *f = *state;

    post(f, 1, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(next(&f->a).status, IBV_WC_SUCCESS);
    uint8_t *gone = f->b.memory;
    const struct ibv_mr mr = *f->b.mr;

    unmake_side(&f->b);
    f->b.memory = gone;
    f->b.mr = (struct ibv_mr *)&mr;
    nothing_comes(&f->a); /* who sends nothing does not notice */
    post(f, 2, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(next(&f->a).status, IBV_WC_RETRY_EXC_ERR);
}

static void a_channel_tells_of_the_next_completion(void **state)
{
    struct fixture *f = *state;
    struct pollfd polled = { .fd = f->a.channel->fd, .events = POLLIN };
    struct ibv_cq *cq;
    void *of;

    post(f, 1, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(next(&f->a).wr_id, 1);
    assert_int_equal(poll(&polled, 1, 20), 0); /* nobody has asked */
    assert_int_equal(ibv_req_notify_cq(f->a.cq, 0), 0);
    post(f, 2, 0, 8, IBV_WR_RDMA_WRITE, 0);
    assert_int_equal(poll(&polled, 1, WAIT_MS), 1);
    assert_int_equal(ibv_get_cq_event(f->a.channel, &cq, &of), 0);
    assert_ptr_equal(cq, f->a.cq);
    ibv_ack_cq_events(cq, 1);
    assert_int_equal(next(&f->a).wr_id, 2);
}

static void what_was_posted_is_flushed_in_the_error_state(void **state)
{
    struct fixture *f = *state;
    struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };

    post_receive(&f->a, 9);
    post(f, 1, 0, 8, IBV_WR_RDMA_WRITE_WITH_IMM, 0); /* waits: nobody has posted a receive there */
    assert_int_equal(ibv_modify_qp(f->a.qp, &err, IBV_QP_STATE), 0);
    assert_int_equal(next(&f->a).status, IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(next(&f->a).status, IBV_WC_WR_FLUSH_ERR);
}

static void more_than_the_queue_holds_ends_the_process(void **state)
{
    pid_t child = fork();
    int status;

    (void)state;
    if (child == 0) {
        struct fixture *f;

        (void)!freopen("/dev/null", "w", stderr);
        make((void **)&f, "ordered");
        for (uint32_t i = 0; i <= DEPTH; i++) /* nobody takes them: there is no receive */
            post(f, i, 0, 8, IBV_WR_RDMA_WRITE_WITH_IMM, 0);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up_ordered, tear_down)
#define BOTH(name) TEST(name), cmocka_unit_test_setup_teardown(name, set_up_reorder, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        BOTH(a_write_lands),
        BOTH(immediate_data_waits_for_a_receive),
        TEST(ordered_keeps_the_order),
        cmocka_unit_test_setup_teardown(reorder_does_not, set_up_reorder, tear_down),
        TEST(who_has_no_right_to_memory_is_refused),
        BOTH(nor_may_it_read_memory_that_is_not_registered),
        BOTH(a_peer_that_is_gone_answers_nothing),
        BOTH(a_channel_tells_of_the_next_completion),
        BOTH(what_was_posted_is_flushed_in_the_error_state),
        cmocka_unit_test(more_than_the_queue_holds_ends_the_process),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
