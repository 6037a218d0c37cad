/*
 * A rank on a GPU without one: what it takes from the server, what it gives to the kernels (executor direct) or
 * hands over (executor server), and what it makes of their records.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "client_private.h"
#include "cuda_fixture.h"

enum { RANKS = 3, ME = 1, EXPERTS = 6, LOCAL = 2, HIDDEN = 256, K = 2, TOKENS = 4, BANKS = 2, EPOCH = 7, HT_SMS = 24 };
enum { TIMEOUT_MS = 300, PATIENCE_MS = 60000 /* on a busy machine */ };

/* The server's side of a rank's requests, on a thread of its own. */
struct clerk {
    int socket;
    bool busy;      /* the thread is there */
    bool mute;      /* says nothing; atomic, as all that follows */
    bool late;      /* and what it says first is the answer to another request */
    ep_status says; /* of what it is asked next; then EP_OK */
    ep_status keeps; /* of each UNREGISTER */
    uint32_t registered, unregistered;
    struct ep_attach_frame last; /* written before these are counted */
    uint8_t first; /* byte of the region that was registered last */
    pthread_t thread;
};

/* The server's side of a rank, and the rank. */
struct fixture {
    const struct ep_cuda_api *api;
    struct ep_layout_map map;
    struct ep_placement placement;
    struct ep_cuda_memory *window[RANKS], *state;
    uint64_t state_bytes;
    int server, client_socket;
    struct clerk clerk;
    struct ep_client client;
    bool monitored;
    ep_rank *rank; /* NULL before the join and after leaving */
};

/* The executor that make_joined() takes, of tests that hold for both. */
static bool served;
/* The server's side of it. */
static bool server_mps;

static void ok(ep_status status)
{
    if (status != EP_OK)
        fail_msg("%s: %s", ep_status_name(status), ep_error_message());
}

static void refused(ep_status status, ep_status expected, const char *text)
{
    assert_int_equal(status, expected);
    if (!strstr(ep_error_message(), text))
        fail_msg("\"%s\" does not say \"%s\"", ep_error_message(), text);
}

/* ---- the server's side ---------------------------------------------------------------------------- */

static struct ep_control *control_of(struct fixture *f, uint32_t rank)
{
    return cuda_fixture_host(f->api->memory_at(f->window[rank]));
}

static struct ep_mailbox *mailbox_of(struct fixture *f)
{
    return &control_of(f, ME)->gpu.mailbox;
}

static struct ep_device_state *state_of(struct fixture *f)
{
    return cuda_fixture_host(f->api->memory_at(f->state));
}

static struct ep_device_report *report_of(struct fixture *f)
{
    return &control_of(f, ME)->gpu.report;
}

static void make_memory(struct fixture *f)
{
    struct ep_error error = EP_ERROR_INIT;

    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(f->api->memory_create(0, f->map.total_bytes, &f->window[r], &error), EP_OK);
        control_of(f, r)->head.magic = EP_WINDOW_MAGIC;
        control_of(f, r)->head.version = EP_WINDOW_VERSION;
        control_of(f, r)->head.rank = r;
        control_of(f, r)->head.epoch = EPOCH;
        control_of(f, r)->head.limits = f->map.limits;
    }
    f->state_bytes = ep_device_state_bytes(&f->map, &f->placement);
    assert_int_equal(f->api->memory_create(0, f->state_bytes, &f->state, &error), EP_OK);
    ep_device_state_image(&f->map, &f->placement, ME, EPOCH, 5000, state_of(f));
}

static struct fixture *make(void)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct ep_error error = EP_ERROR_INIT;
    const struct ep_limits limits = {
        .ranks = RANKS, .experts = EXPERTS, .local_experts = LOCAL, .top_k = K, .hidden = HIDDEN,
        .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16 | 1u << EP_FP8_E4M3, .ll_max_tokens = TOKENS,
        .ll_banks = BANKS, .arena_bytes = 1 << 18,
    };
    int pair[2];

    cuda_fixture_reset();
    f->api = cuda_fixture_api();
    assert_int_equal(ep_layout_compute(&limits, &f->map, &error), EP_OK);
    assert_int_equal(ep_placement_contiguous(RANKS, EXPERTS, &f->placement, &error), EP_OK);
    make_memory(f);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    f->client_socket = pair[0];
    f->server = pair[1];
    return f;
}

static void send_memory(struct fixture *f, enum ep_attach_memory what, uint32_t rank, uint64_t bytes,
                        const struct ep_cuda_memory *memory)
{
    struct ep_attach_frame frame;
    int fd = -1;

    ep_attach_frame_init(&frame, EP_ATTACH_MEMORY);
    frame.count = what;
    frame.rank = rank;
    frame.value = bytes;
    if (memory)
        assert_int_equal(f->api->memory_export(memory, &fd, NULL), EP_OK);
    assert_int_equal(ep_attach_send(f->server, &frame, fd, NULL), EP_OK);
    if (fd >= 0)
        close(fd);
}

static void send_window(struct fixture *f, uint32_t rank)
{
    send_memory(f, EP_ATTACH_MEMORY_WINDOW, rank, f->map.total_bytes, f->window[rank]);
}

static void send_state(struct fixture *f)
{
    send_memory(f, EP_ATTACH_MEMORY_STATE, ME, f->state_bytes, f->state);
}

static void send_all(struct fixture *f)
{
    send_state(f);
    send_window(f, 0);
    send_window(f, 2);
}

/* ---- the rank --------------------------------------------------------------------------------------- */

/* As ep_join() has it when it comes to the memory. */
static ep_rank *make_rank(struct fixture *f)
{
    const struct timeval bound = { .tv_usec = TIMEOUT_MS * 1000 };
    struct ep_rank *rank = calloc(1, sizeof *rank);

    rank->client = &f->client;
    rank->rank = ME;
    rank->epoch = EPOCH;
    rank->ht_sms = HT_SMS;
    rank->shape.map = f->map;
    rank->shape.timeout_ms = 100;
    assert_int_equal(ep_placement_contiguous(RANKS, EXPERTS, &rank->shape.placement, last_error()), EP_OK);
    assert_int_equal(arena_init(&rank->arena, f->map.limits.arena_bytes, last_error()), EP_OK);
    assert_int_equal(events_init(rank, last_error()), EP_OK);
    rank->socket = f->client_socket;
    setsockopt(rank->socket, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound);
    return rank;
}

/* What ep_join() does when it has failed. */
static void drop_rank(struct fixture *f, ep_rank *rank)
{
    if (rank->executor)
        rank->executor->detach(rank);
    events_fini(rank);
    arena_fini(&rank->arena);
    ep_placement_free(&rank->shape.placement);
    free(rank);
    (void)f;
}

/* The frames after WELCOME have been sent. */
static ep_status attach_as(struct fixture *f, const struct executor *executor, uint32_t device, uint32_t count,
                           uint64_t window_bytes)
{
    Ep__V1__ClaimReply reply = EP__V1__CLAIM_REPLY__INIT;
    struct ep_attach_frame welcome;
    ep_rank *rank = make_rank(f);
    uint8_t uuid[EP_CUDA_UUID_BYTES] = { 0 };
    ep_status status;
    int fd;

    reply.mps = server_mps;
    if (device < CUDA_FIXTURE_DEVICES)
        memcpy(uuid, cuda_fixture_uuid(device), sizeof uuid);
    reply.device_uuid = (ProtobufCBinaryData){ .len = sizeof uuid, .data = uuid };
    ep_attach_frame_init(&welcome, EP_ATTACH_WELCOME);
    welcome.count = count;
    welcome.value = window_bytes;
    assert_int_equal(f->api->memory_export(f->window[ME], &fd, NULL), EP_OK);
    rank->executor = executor;
    status = device_prepare(rank, f->api, &reply, last_error());
    if (status == EP_OK)
        status = executor == &direct_executor ? direct_attach(rank, &reply, &welcome, fd, last_error())
                                              : mailbox_attach(rank, &reply, &welcome, fd, last_error());
    close(fd);
    if (status == EP_OK)
        f->rank = rank;
    else
        drop_rank(f, rank);
    return status;
}

static ep_status attach(struct fixture *f, uint32_t device, uint32_t count, uint64_t window_bytes)
{
    return attach_as(f, &direct_executor, device, count, window_bytes);
}

static ep_status attach_served(struct fixture *f, uint32_t device, uint32_t count)
{
    return attach_as(f, &mailbox_executor, device, count, f->map.total_bytes);
}

static void destroy(struct fixture *f)
{
    if (f->rank) {
        ep_leave(f->rank);
        f->client_socket = -1; /* closed with the rank */
    }
    if (f->monitored)
        monitor_stop(&f->client);
    if (f->clerk.busy)
        pthread_join(f->clerk.thread, NULL); /* the rank has closed its connection */
    for (uint32_t r = 0; r < RANKS; r++)
        f->api->memory_destroy(f->window[r]);
    f->api->memory_destroy(f->state);
    if (f->client_socket >= 0)
        close(f->client_socket);
    if (f->server >= 0)
        close(f->server);
    ep_placement_free(&f->placement);
    free(f);
    cuda_fixture_reset(); /* nothing may be left */
}

static void join(struct fixture *f)
{
    if (!served)
        send_all(f);
    ok(served ? attach_served(f, 0, 0) : attach(f, 0, RANKS, f->map.total_bytes));
    ok(monitor_start(&f->client, last_error()));
    f->monitored = true;
    ok(monitor_add(f->rank, last_error()));
}

static struct fixture *make_joined(void)
{
    struct fixture *f = make();

    join(f);
    return f;
}

/* ---- requests ----------------------------------------------------------------------------------------- */

static void reply(struct clerk *clerk, uint32_t number, ep_status status)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_ANSWER);
    frame.count = number;
    frame.status = status;
    snprintf(frame.text, sizeof frame.text, "the server says %s", ep_status_name(status));
    assert_int_equal(ep_attach_send(clerk->socket, &frame, -1, NULL), EP_OK);
}

/* What the server would map, seen through the descriptor. */
static void look_at_memory(struct clerk *clerk, const struct ep_attach_frame *frame, int fd)
{
    const uint64_t bytes = frame->offset + frame->value;
    uint8_t *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    assert_ptr_not_equal(memory, MAP_FAILED);
    clerk->first = memory[frame->offset];
    munmap(memory, bytes);
    close(fd);
}

static void serve_request(struct clerk *clerk, const struct ep_attach_frame *frame, int fd)
{
    const bool registers = frame->type == EP_ATTACH_REGISTER;

    if (registers)
        look_at_memory(clerk, frame, fd);
    clerk->last = *frame;
    __atomic_fetch_add(registers ? &clerk->registered : &clerk->unregistered, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&clerk->mute, __ATOMIC_SEQ_CST))
        return;
    if (__atomic_exchange_n(&clerk->late, false, __ATOMIC_SEQ_CST))
        reply(clerk, frame->count - 1, EP_INTERNAL);

    const ep_status kept = registers ? EP_OK : __atomic_load_n(&clerk->keeps, __ATOMIC_SEQ_CST);

    reply(clerk, frame->count, kept ? kept : __atomic_exchange_n(&clerk->says, EP_OK, __ATOMIC_SEQ_CST));
}

static void *work(void *arg)
{
    struct clerk *clerk = arg;
    struct ep_attach_frame frame;
    int fd;

    while (ep_attach_receive(clerk->socket, &frame, &fd, NULL) == EP_OK)
        if (frame.type == EP_ATTACH_REGISTER || frame.type == EP_ATTACH_UNREGISTER)
            serve_request(clerk, &frame, fd);
    return NULL;
}

/* A rank whose requests are answered: under executor direct it has none. */
static struct fixture *make_answered(void)
{
    struct fixture *f = make_joined();

    f->client.timeout_ms = PATIENCE_MS;
    f->clerk.socket = f->server;
    f->clerk.busy = true;
    assert_int_equal(pthread_create(&f->clerk.thread, NULL, work, &f->clerk), 0);
    return f;
}

/* ---- joining ------------------------------------------------------------------------------------------ */

static void a_rank_takes_its_state_and_its_peers_windows(void **state)
{
    struct fixture *f = make_joined();
    ep_rank_info info = { .size = sizeof info };

    (void)state;
    assert_int_equal(cuda_fixture.memories, (RANKS + 1) * 2); /* the server's and ours */
    assert_int_equal(cuda_fixture.ranks, 1);
    ok(ep_rank_describe(f->rank, &info));
    assert_int_equal(info.backend, EP_BACKEND_CUDA);
    assert_int_equal(info.executor, EP_EXECUTOR_DIRECT);
    assert_memory_equal(info.device_uuid, cuda_fixture_uuid(0), sizeof info.device_uuid);
    destroy(f);
}

static void memory_may_come_in_any_order(void **state)
{
    struct fixture *f = make();

    (void)state;
    send_window(f, 2);
    send_window(f, 0);
    send_state(f);
    ok(attach(f, 1, RANKS, f->map.total_bytes));
    monitor_start(&f->client, last_error());
    f->monitored = true;
    destroy(f);
}

/* Whatever goes wrong, nothing stays behind: destroy() checks. */
static void memory_that_does_not_come_is_missed(void **state)
{
    struct fixture *f = make();

    (void)state;
    send_state(f);
    send_window(f, 0);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_DEADLINE_EXCEEDED, "MEMORY frame 3 of 3");
    destroy(f);

    f = make();
    send_state(f);
    close(f->server);
    f->server = -1;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_SERVER_LOST, "MEMORY frame 2 of 3");
    destroy(f);

    f = make();
    refused(attach(f, 0, RANKS - 1, f->map.total_bytes), EP_PROTOCOL, "sends 2 memories beside the window: must be 3");
    destroy(f);
}

static void memory_that_makes_no_sense_is_refused(void **state)
{
    struct fixture *f = make();
    struct ep_attach_frame event;

    (void)state;
    send_window(f, 0);
    send_window(f, 0);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "window of rank 0 twice");
    destroy(f);

    f = make();
    send_window(f, ME);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "window of rank 1 twice");
    destroy(f);

    f = make();
    send_state(f);
    send_state(f);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "state twice");
    destroy(f);

    f = make();
    send_memory(f, EP_ATTACH_MEMORY_WINDOW, RANKS, f->map.total_bytes, f->window[0]);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "window of rank 3: there are 3 ranks");
    destroy(f);

    f = make();
    send_memory(f, EP_ATTACH_MEMORY_STATE, ME, f->state_bytes, NULL);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "without a descriptor");
    destroy(f);

    f = make();
    ep_attach_frame_init(&event, EP_ATTACH_EVENT);
    event.event = EP_ATTACH_DRAINING;
    assert_int_equal(ep_attach_send(f->server, &event, -1, NULL), EP_OK);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "frame type 4 where memory must come");
    destroy(f);
}

static void sizes_are_those_that_both_sides_compute(void **state)
{
    struct fixture *f = make();

    (void)state;
    refused(attach(f, 0, RANKS, f->map.total_bytes - 4096), EP_PROTOCOL, "the window of rank 1 has");
    destroy(f);

    f = make();
    send_memory(f, EP_ATTACH_MEMORY_STATE, ME, f->state_bytes + 256, f->state);
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the state of rank 1 has");
    destroy(f);

    f = make();
    send_memory(f, EP_ATTACH_MEMORY_WINDOW, 0, f->map.total_bytes, f->state); /* a smaller one */
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_INVALID_ARGUMENT, "the window of rank 0: descriptor");
    destroy(f);
}

static void windows_and_state_of_others_are_refused(void **state)
{
    struct fixture *f = make();

    (void)state;
    send_all(f);
    control_of(f, 2)->head.version = EP_WINDOW_VERSION + 1;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the window of rank 2 has version");
    destroy(f);

    f = make();
    send_all(f);
    control_of(f, 0)->head.epoch++;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the window of rank 0 is that of another");
    destroy(f);

    f = make();
    send_all(f);
    control_of(f, ME)->head.rank = 0;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the window of rank 1 is that of another");
    destroy(f);

    f = make();
    send_all(f);
    state_of(f)->magic = 0;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the rank's state has version 0");
    destroy(f);

    f = make();
    send_all(f);
    state_of(f)->rank = 2;
    refused(attach(f, 0, RANKS, f->map.total_bytes), EP_PROTOCOL, "the rank's state is that of rank 2");
    destroy(f);
}

static void a_gpu_that_is_not_there(void **state)
{
    struct fixture *f = make();

    (void)state;
    refused(attach(f, CUDA_FIXTURE_DEVICES, RANKS, f->map.total_bytes), EP_NOT_FOUND,
            "rank 1 lives on a GPU that this process cannot use");
    destroy(f);
}

/* Each call of the module at which the join can fail. */
static void ht_fills_as_many_multiprocessors_as_the_program_allows(void **state)
{
    struct fixture *f = make_joined();

    (void)state;
    assert_int_equal(cuda_fixture.max_ht_sms, HT_SMS);
    destroy(f);
}

static void a_join_that_fails_anywhere_leaves_nothing(void **state)
{
    static const struct { const char *name; uint32_t calls; } calls[] = {
        { "device_find", 1 }, { "memory_import", RANKS + 1 }, { "stream_create", 3 }, { "read", RANKS + 1 },
        { "write", 1 }, { "rank_open", 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (uint32_t n = 0; n < calls[i].calls; n++) {
            struct fixture *f = make();

            send_all(f);
            cuda_fixture_fail(calls[i].name, n);
            refused(attach(f, 0, RANKS, f->map.total_bytes), EP_INTERNAL, "because the test says so");
            cuda_fixture_fail(NULL, 0);
            destroy(f);
        }
}

/* ---- ops ------------------------------------------------------------------------------------------------ */

struct lane {
    ep_handle *handle;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
};

static void *take(struct fixture *f, size_t bytes)
{
    void *memory = ep_alloc(f->rank, bytes);

    assert_non_null(memory);
    return memory;
}

static struct lane make_lane(struct fixture *f, ep_layout layout)
{
    const bool rank_major = layout == EP_LAYOUT_RANK_MAJOR;
    struct lane l;
    void *out = rank_major ? NULL : take(f, (size_t)LOCAL * RANKS * TOKENS * HIDDEN * 2);

    ok(ep_handle_create(f->rank, &l.handle));
    l.dispatch = (ep_dispatch_args){
        .size = sizeof l.dispatch, .mode = EP_MODE_LL, .layout = layout, .input_dtype = EP_BF16,
        .num_tokens = TOKENS, .tokens = take(f, TOKENS * HIDDEN * 2), .topk_idx = take(f, TOKENS * K * 4),
        .topk_weights = take(f, TOKENS * K * 4), .out = out,
        .counts = take(f, (LOCAL > RANKS ? LOCAL : RANKS) * 4),
    };
    l.combine = (ep_combine_args){ .size = sizeof l.combine, .dtype = EP_BF16, .rows = out,
                                   .out = take(f, TOKENS * HIDDEN * 2) };
    return l;
}

static void ops_go_to_the_stream_they_are_given(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    int one, two;

    (void)state;
    ok(ep_dispatch(l.handle, &l.dispatch, &one));
    ok(ep_combine(l.handle, &l.combine, &two));
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ok(ep_sync(f->rank, 1000));
    assert_int_equal(cuda_fixture.ops, 3);
    assert_int_equal(cuda_fixture.op[0].kind, EP_OP_DISPATCH);
    assert_ptr_equal((uint8_t *)f->rank->window + cuda_fixture.op[0].x.offset, l.dispatch.tokens);
    assert_ptr_equal(cuda_fixture.stream[0], &one);
    assert_int_equal(cuda_fixture.op[1].kind, EP_OP_COMBINE);
    assert_ptr_equal(cuda_fixture.stream[1], &two);
    assert_non_null(cuda_fixture.stream[2]); /* the rank's own, not the module's, which other ranks may share */
    ep_handle_destroy(l.handle);
    assert_int_equal(cuda_fixture.ops, 3);
    destroy(f);
}

static void many_streams_are_refused_until_a_sync(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    char streams[DEVICE_STREAMS + 1];

    (void)state;
    for (uint32_t i = 0; i < DEVICE_STREAMS; i++)
        ok(ep_dispatch(l.handle, &l.dispatch, &streams[i]));
    refused(ep_dispatch(l.handle, &l.dispatch, &streams[DEVICE_STREAMS]), EP_RESOURCE_EXHAUSTED, "16 streams");
    ok(ep_dispatch(l.handle, &l.dispatch, &streams[3]));
    ok(ep_sync(f->rank, 1000));
    ok(ep_dispatch(l.handle, &l.dispatch, &streams[DEVICE_STREAMS]));
    destroy(f);
}

static void a_record_becomes_what_the_op_did(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    ep_op_info info = { .size = sizeof info };

    (void)state;
    cuda_fixture.outcome = (struct ep_device_record){ .rows = 11, .dropped = 3, .wire_bytes = 1000,
                                                      .logical_bytes = 2000, .start_ns = 500, .end_ns = 900,
                                                      .wait_ns = 100, .arrived = { 5 } };
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    refused(ep_dispatch_info(l.handle, &info), EP_FAILED_PRECONDITION, "no dispatch");
    ok(ep_handle_wait(l.handle, 1000));
    ok(ep_dispatch_info(l.handle, &info));
    assert_int_equal(info.status, EP_OK);
    assert_int_equal(info.number, 1);
    assert_int_equal(info.rows, 11);
    assert_int_equal(info.dropped, 3);
    assert_int_equal(info.wire_bytes, 1000);
    assert_int_equal(info.logical_bytes, 2000);
    assert_int_equal(info.service_ns, 400);
    assert_int_equal(info.wait_ns, 100);
    assert_int_equal(info.arrived[0], 5);
    assert_int_equal(info.absent, 1);
    assert_true(info.total_ns > 0);
    assert_null(info.view);
    refused(ep_combine_info(l.handle, &info), EP_FAILED_PRECONDITION, "no combine");
    ok(ep_combine(l.handle, &l.combine, NULL));
    ok(ep_sync(f->rank, 1000));
    ok(ep_combine_info(l.handle, &info));
    assert_int_equal(info.number, 1);
    destroy(f);
}

static void rank_major_rows_are_in_the_bank_of_their_number(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_RANK_MAJOR);
    const uint8_t *base = f->rank->window + f->map.ll;
    ep_op_info info = { .size = sizeof info };
    uint8_t row[HIDDEN];

    (void)state;
    for (uint64_t n = 1; n <= 3; n++) {
        const uint8_t *bank = base + n % BANKS * f->map.bank_bytes;
        const bool fp8 = n == 3;

        l.dispatch.wire_dtype = fp8 ? EP_FP8_E4M3 : (ep_dtype)0;
        ok(ep_dispatch(l.handle, &l.dispatch, NULL));
        ok(ep_handle_wait(l.handle, 1000));
        ok(ep_dispatch_info(l.handle, &info));
        assert_ptr_equal(info.view, bank + f->map.bank.rows);
        assert_int_equal(info.view_stride, TOKENS * f->map.row_bytes);
        assert_ptr_equal(info.scales_view, fp8 ? bank + f->map.bank.scales : NULL);
        if (fp8)
            assert_int_equal(info.scales_view_stride, TOKENS * f->map.scales_bytes);
        ok(ep_read(f->rank, row, (const uint8_t *)info.view + 2 * info.view_stride, sizeof row, NULL));
    }
    destroy(f);
}

static void send_only_ops_have_a_result_when_they_are_complete(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    ep_op_info info = { .size = sizeof info };

    (void)state;
    l.dispatch.flags = EP_OP_SEND_ONLY;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ok(ep_handle_wait(l.handle, 1000));
    refused(ep_dispatch_info(l.handle, &info), EP_FAILED_PRECONDITION, "no dispatch");
    ok(ep_complete(l.handle, NULL));
    assert_int_equal(cuda_fixture.op[1].kind, EP_OP_COMPLETE);
    cuda_fixture.outcome.rows = 5;
    l.combine.flags = EP_OP_SEND_ONLY;
    ok(ep_combine(l.handle, &l.combine, NULL));
    ok(ep_complete(l.handle, NULL));
    ok(ep_sync(f->rank, 1000));
    ok(ep_dispatch_info(l.handle, &info));
    assert_int_equal(info.rows, 0);
    ok(ep_combine_info(l.handle, &info));
    assert_int_equal(info.rows, 5);
    destroy(f);
}

/* ---- copies ----------------------------------------------------------------------------------------------- */

static void copies_reach_the_ranks_memory(void **state)
{
    struct fixture *f = make_joined();
    uint8_t *block = take(f, 1000), there[1000], back[1000];

    (void)state;
    for (size_t i = 0; i < sizeof there; i++)
        there[i] = (uint8_t)(i * 7);
    ok(ep_write(f->rank, block, there, sizeof there, NULL));
    assert_memory_equal(cuda_fixture_host(block), there, sizeof there);
    ok(ep_read(f->rank, back, block + 100, 900, NULL));
    assert_memory_equal(back, there + 100, 900);
    ok(ep_write(f->rank, NULL, NULL, 0, NULL));
    destroy(f);
}

static void copies_stay_in_their_block(void **state)
{
    struct fixture *f = make_joined();
    uint8_t *block = take(f, 1000), own[2000];

    (void)state;
    refused(ep_write(NULL, block, own, 1, NULL), EP_INVALID_ARGUMENT, "rank is NULL");
    refused(ep_write(f->rank, NULL, own, 1, NULL), EP_INVALID_ARGUMENT, "to is NULL");
    refused(ep_write(f->rank, block, NULL, 1, NULL), EP_INVALID_ARGUMENT, "from is NULL");
    refused(ep_read(f->rank, NULL, block, 1, NULL), EP_INVALID_ARGUMENT, "to is NULL");
    refused(ep_read(f->rank, own, NULL, 1, NULL), EP_INVALID_ARGUMENT, "from is NULL");
    refused(ep_write(f->rank, block, own, 1025, NULL), EP_INVALID_ARGUMENT, "to has 1024 bytes");
    refused(ep_read(f->rank, own, block + 1000, 25, NULL), EP_INVALID_ARGUMENT, "from has 24 bytes");
    refused(ep_write(f->rank, own, own, 1, NULL), EP_INVALID_ARGUMENT, "to does not point into memory");
    refused(ep_write(f->rank, block + 1024, own, 1, NULL), EP_INVALID_ARGUMENT, "to does not point into");
    refused(ep_write(f->rank, f->rank->window, own, 1, NULL), EP_INVALID_ARGUMENT, "to does not point into");
    refused(ep_read(f->rank, own, f->rank->window + f->map.total_bytes, 1, NULL), EP_INVALID_ARGUMENT,
            "from does not point into");
    destroy(f);
}

static void copies_stay_in_their_view(void **state)
{
    struct fixture *f = make_joined();
    uint8_t *bank = f->rank->window + f->map.ll + f->map.bank_bytes, own[64];
    const uint64_t rows = (uint64_t)RANKS * TOKENS * f->map.row_bytes;
    const uint64_t scales = (uint64_t)RANKS * TOKENS * f->map.scales_bytes;

    (void)state;
    ok(ep_write(f->rank, bank + f->map.bank.rows, own, 64, NULL));
    ok(ep_read(f->rank, own, bank + f->map.bank.rows + rows - 64, 64, NULL));
    ok(ep_read(f->rank, own, bank + f->map.bank.scales + scales - 8, 8, NULL));
    refused(ep_write(f->rank, bank + f->map.bank.rows + rows - 32, own, 64, NULL), EP_INVALID_ARGUMENT,
            "to has 32 bytes");
    refused(ep_write(f->rank, bank + f->map.bank.headers, own, 64, NULL), EP_INVALID_ARGUMENT, "does not point");
    refused(ep_write(f->rank, bank, own, 8, NULL), EP_INVALID_ARGUMENT, "does not point");
    destroy(f);
}

/* ---- memory of the process's own -------------------------------------------------------------------------- */

enum { OWN_BYTES = 1 << 16 };

/* GPU memory that is no window. */
static uint8_t *make_own(struct fixture *f, uint32_t device, struct ep_cuda_memory **memory)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(f->api->memory_create(device, OWN_BYTES, memory, &error), EP_OK);
    return f->api->memory_at(*memory);
}

/* The address that the kernels get. */
static void *address_of(const struct fixture *f, struct ep_span span)
{
    return span.offset < EP_REGION_BYTES ? f->rank->window + span.offset : ep_region_at(&f->rank->regions, span.offset);
}

static void ops_use_registered_memory_as_it_is(void **state)
{
    struct fixture *f = make_answered();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_memory *memory[2];
    uint8_t *in = make_own(f, 0, &memory[0]), *out = make_own(f, 0, &memory[1]);

    (void)state;
    ok(ep_register(f->rank, in, OWN_BYTES));
    ok(ep_register(f->rank, out, OWN_BYTES));
    l.dispatch.tokens = in;
    l.dispatch.topk_idx = in + OWN_BYTES - TOKENS * K * 4; /* its last byte is the memory's */
    l.dispatch.out = out + 4096;
    l.combine.rows = out + 4096;
    l.combine.out = out;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ok(ep_combine(l.handle, &l.combine, NULL));
    ok(ep_sync(f->rank, 1000));
    assert_ptr_equal(address_of(f, cuda_fixture.op[0].x), in);
    assert_int_equal(cuda_fixture.op[0].x.bytes, TOKENS * HIDDEN * 2);
    assert_ptr_equal(address_of(f, cuda_fixture.op[0].topk_idx), l.dispatch.topk_idx);
    assert_ptr_equal(address_of(f, cuda_fixture.op[0].topk_weights), l.dispatch.topk_weights);
    assert_ptr_equal(address_of(f, cuda_fixture.op[0].out), out + 4096);
    assert_ptr_equal(address_of(f, cuda_fixture.op[1].x), out + 4096);
    assert_ptr_equal(address_of(f, cuda_fixture.op[1].out), out);
    ok(ep_unregister(f->rank, in)); /* the other keeps its place */
    l.dispatch.tokens = l.dispatch.topk_idx = out;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    assert_int_equal(cuda_fixture.op[2].x.offset, ep_region_offset(1));
    f->api->memory_destroy(memory[0]);
    f->api->memory_destroy(memory[1]); /* leaving forgets what is registered */
    destroy(f);
}

static void spans_stay_in_their_registered_memory(void **state)
{
    struct fixture *f = make_answered();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);
    const size_t tokens = TOKENS * HIDDEN * 2, bytes = OWN_BYTES / 2;

    (void)state;
    l.dispatch.tokens = own;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT,
            "tokens does not point into memory of ep_alloc() or ep_register() of this rank");
    ok(ep_register(f->rank, own + 1024, bytes));
    l.dispatch.tokens = own + 1024 - 16;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "tokens does not point into");
    l.dispatch.tokens = own + 1024;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    l.dispatch.tokens = own + 1024 + bytes - tokens;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    l.dispatch.tokens = own + 1024 + bytes - tokens + 16;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT,
            "tokens points into registered memory of 32768 bytes and has 2032 to its end: this op needs 2048");
    l.dispatch.tokens = own + 1024 + bytes;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "tokens does not point into");
    l.dispatch.tokens = own + 1024 + 8;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "must be a multiple of 16");
    ok(ep_unregister(f->rank, own + 1024));
    l.dispatch.tokens = own + 1024;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "tokens does not point into");
    f->api->memory_destroy(memory);
    destroy(f);
}

static void what_cannot_be_registered_is_refused(void **state)
{
    struct fixture *f = make_joined();
    struct ep_cuda_memory *memory, *foreign;
    uint8_t *own = make_own(f, 0, &memory), *other = make_own(f, 1, &foreign), *block = take(f, 1000);
    uint8_t *peer = f->rank->device->api->memory_at(f->rank->device->window[2]);
    uint8_t host[64] __attribute__((aligned(16)));

    (void)state;
    refused(ep_register(NULL, own, 16), EP_INVALID_ARGUMENT, "rank is NULL");
    refused(ep_register(f->rank, NULL, 16), EP_INVALID_ARGUMENT, "memory is NULL");
    refused(ep_register(f->rank, own, 0), EP_INVALID_ARGUMENT, "bytes is 0");
    refused(ep_register(f->rank, own + 8, 16), EP_INVALID_ARGUMENT, "must be a multiple of 16");
    refused(ep_register(f->rank, own, SIZE_MAX), EP_INVALID_ARGUMENT, "no memory has so many");
    refused(ep_register(f->rank, own, EP_REGION_BYTES + 1), EP_INVALID_ARGUMENT, "no memory has so many");
    refused(ep_register(f->rank, host, sizeof host), EP_INVALID_ARGUMENT, "is not GPU memory");
    refused(ep_register(f->rank, other, 16), EP_INVALID_ARGUMENT, "is memory of device 1: must be of device 0");
    refused(ep_register(f->rank, own + 1024, OWN_BYTES), EP_INVALID_ARGUMENT,
            "memory has 64512 bytes, bytes is 65536: ");
    refused(ep_register(f->rank, block, 16), EP_INVALID_ARGUMENT, "overlaps the window of rank 1");
    refused(ep_register(f->rank, f->rank->window, 16), EP_INVALID_ARGUMENT, "overlaps the window of rank 1");
    refused(ep_register(f->rank, f->rank->window - 16, 32), EP_INVALID_ARGUMENT, "overlaps the window of rank 1");
    refused(ep_register(f->rank, peer, 16), EP_INVALID_ARGUMENT, "overlaps the window of rank 2");
    cuda_fixture_fail("memory_range", 0);
    refused(ep_register(f->rank, own, 16), EP_INTERNAL, "because the test says so");
    cuda_fixture_fail(NULL, 0);
    assert_int_equal(f->rank->regions.n, 0);
    f->api->memory_destroy(memory);
    f->api->memory_destroy(foreign);
    destroy(f);
}

static void registered_memories_do_not_overlap(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    ok(ep_register(f->rank, own + 1024, 1024));
    refused(ep_register(f->rank, own + 1024, 1024), EP_ALREADY_EXISTS, "overlaps the 1024 bytes registered at 0x");
    refused(ep_register(f->rank, own, OWN_BYTES), EP_ALREADY_EXISTS, "overlaps");
    refused(ep_register(f->rank, own, 1025), EP_ALREADY_EXISTS, "overlaps");
    refused(ep_register(f->rank, own + 2032, 16), EP_ALREADY_EXISTS, "overlaps");
    ok(ep_register(f->rank, own, 1024));
    ok(ep_register(f->rank, own + 2048, 1));
    refused(ep_unregister(f->rank, own + 1040), EP_NOT_FOUND, "no registered memory of this rank begins there");
    refused(ep_unregister(f->rank, NULL), EP_INVALID_ARGUMENT, "memory is NULL");
    refused(ep_unregister(NULL, own), EP_INVALID_ARGUMENT, "rank is NULL");
    ok(ep_unregister(f->rank, own + 1024));
    refused(ep_unregister(f->rank, own + 1024), EP_NOT_FOUND, "begins there");
    ok(ep_register(f->rank, own + 1024, 1024));
    f->api->memory_destroy(memory);
    destroy(f);
}

static void there_is_a_bound_to_registered_memories(void **state)
{
    struct fixture *f = make_answered();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory), *last = own + (EP_MAX_REGISTERED - 1) * 256;

    (void)state;
    for (uint32_t i = 0; i < EP_MAX_REGISTERED; i++)
        ok(ep_register(f->rank, own + i * 256, 256));
    refused(ep_register(f->rank, own + 32768, 256), EP_RESOURCE_EXHAUSTED, "has 64 registered memories");
    l.dispatch.topk_idx = last;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    assert_ptr_equal(address_of(f, cuda_fixture.op[0].topk_idx), last);
    ok(ep_unregister(f->rank, own + 256));
    ok(ep_register(f->rank, own + 32768, 256));
    refused(ep_register(f->rank, own + 33024, 256), EP_RESOURCE_EXHAUSTED, "has 64 registered memories");
    for (uint32_t i = 0; i < EP_MAX_REGISTERED; i++)
        if (i != 1)
            ok(ep_unregister(f->rank, own + i * 256));
    assert_int_equal(f->rank->regions.n, 2);
    ok(ep_unregister(f->rank, own + 32768));
    assert_int_equal(f->rank->regions.n, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void memory_may_be_mapped_in_pieces(void **state)
{
    struct fixture *f = make_joined();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    cuda_fixture.piece = 4096;
    ok(ep_register(f->rank, own + 16, OWN_BYTES - 16));
    ok(ep_unregister(f->rank, own + 16));
    refused(ep_register(f->rank, own + 16, OWN_BYTES), EP_INVALID_ARGUMENT, "memory has 65520 bytes, bytes is 65536");
    cuda_fixture_fail("memory_range", OWN_BYTES / 4096 - 1);
    refused(ep_register(f->rank, own, OWN_BYTES), EP_INTERNAL, "memory has 61440 bytes");
    cuda_fixture_fail(NULL, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void copies_reach_registered_memory(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory), there[1000], back[1000];

    (void)state;
    for (size_t i = 0; i < sizeof there; i++)
        there[i] = (uint8_t)(i * 7);
    refused(ep_write(f->rank, own, there, 1, NULL), EP_INVALID_ARGUMENT,
            "to does not point into memory of ep_alloc() or ep_register() or a view");
    ok(ep_register(f->rank, own, 2000));
    ok(ep_write(f->rank, own + 1000, there, 1000, NULL));
    assert_memory_equal((uint8_t *)cuda_fixture_host(own) + 1000, there, 1000);
    ok(ep_read(f->rank, back, own + 1100, 900, NULL));
    assert_memory_equal(back, there + 100, 900);
    refused(ep_write(f->rank, own + 1001, there, 1000, NULL), EP_INVALID_ARGUMENT, "to has 999 bytes");
    refused(ep_read(f->rank, back, own + 2000, 1, NULL), EP_INVALID_ARGUMENT, "from does not point into");
    ok(ep_unregister(f->rank, own));
    refused(ep_read(f->rank, back, own, 1, NULL), EP_INVALID_ARGUMENT, "from does not point into");
    f->api->memory_destroy(memory);
    destroy(f);
}

static void expect_requests(struct fixture *f, uint32_t registered, uint32_t unregistered)
{
    assert_int_equal(__atomic_load_n(&f->clerk.registered, __ATOMIC_SEQ_CST), registered);
    assert_int_equal(__atomic_load_n(&f->clerk.unregistered, __ATOMIC_SEQ_CST), unregistered);
}

static void the_server_is_handed_what_is_registered(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    ((uint8_t *)cuda_fixture_host(own))[4096] = 42;
    ok(ep_register(f->rank, own, 4096));
    ok(ep_register(f->rank, own + 4096, 1024));
    expect_requests(f, 2, 0);
    assert_int_equal(f->clerk.last.region, 1);
    assert_int_equal(f->clerk.last.offset, 4096);
    assert_int_equal(f->clerk.last.value, 1024);
    assert_int_equal(f->clerk.first, 42);
    ok(ep_unregister(f->rank, own));
    expect_requests(f, 2, 1);
    assert_int_equal(f->clerk.last.region, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void what_the_server_refuses_is_not_registered(void **state)
{
    struct fixture *f = make_answered();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    __atomic_store_n(&f->clerk.says, EP_RESOURCE_EXHAUSTED, __ATOMIC_SEQ_CST);
    refused(ep_register(f->rank, own, OWN_BYTES), EP_RESOURCE_EXHAUSTED, "the server says RESOURCE_EXHAUSTED");
    l.dispatch.tokens = own;
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "tokens does not point into");
    ok(ep_register(f->rank, own, OWN_BYTES)); /* of the same number */
    assert_int_equal(f->clerk.last.region, 0);
    __atomic_store_n(&f->clerk.keeps, EP_INTERNAL, __ATOMIC_SEQ_CST);
    refused(ep_unregister(f->rank, own), EP_INTERNAL, "the server may still have the memory mapped: the server says");
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_INVALID_ARGUMENT, "tokens does not point into");
    ok(ep_register(f->rank, own, OWN_BYTES)); /* of another one: the server may have that still */
    assert_int_equal(f->clerk.last.region, 1);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void memory_that_cannot_be_handed_on_is_refused(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    cuda_fixture.legacy = true;
    refused(ep_register(f->rank, own, 1024), EP_INVALID_ARGUMENT, "memory: 0x");
    refused(ep_register(f->rank, own, 1024), EP_INVALID_ARGUMENT, "cannot be mapped by another process");
    cuda_fixture.legacy = false;
    cuda_fixture.piece = 4096;
    refused(ep_register(f->rank, own + 1024, 4096), EP_INVALID_ARGUMENT,
            "memory has 3072 bytes in the allocation that it begins in, bytes is 4096: under executor server register "
            "the parts");
    ok(ep_register(f->rank, own + 4096 + 1024, 3072));
    expect_requests(f, 1, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void set_mute(struct fixture *f, bool mute)
{
    f->client.timeout_ms = mute ? 0 : PATIENCE_MS; /* the group's alone */
    __atomic_store_n(&f->clerk.mute, mute, __ATOMIC_SEQ_CST);
}

/* Bounded, and nothing of ours has the number that the server may come to give it, until it has let go of that. */
static void a_server_that_does_not_answer_is_not_waited_for(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    set_mute(f, true);
    refused(ep_register(f->rank, own, 1024), EP_DEADLINE_EXCEEDED, "the server has not answered in time");
    set_mute(f, false);
    __atomic_store_n(&f->clerk.late, true, __ATOMIC_SEQ_CST);
    ok(ep_register(f->rank, own, 1024)); /* the late answer is of the other request */
    expect_requests(f, 2, 1);
    assert_int_equal(f->clerk.last.region, 0);
    set_mute(f, true);
    refused(ep_unregister(f->rank, own), EP_DEADLINE_EXCEEDED, "may still have the memory mapped");
    refused(ep_unregister(f->rank, own), EP_NOT_FOUND, "begins there");
    set_mute(f, false);
    ok(ep_register(f->rank, own, 1024));
    expect_requests(f, 3, 3);
    assert_int_equal(f->clerk.last.region, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

/* It is still at what was not waited for any more. */
static void a_server_that_is_busy_is_asked_again(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    __atomic_store_n(&f->clerk.says, EP_UNAVAILABLE, __ATOMIC_SEQ_CST);
    ok(ep_register(f->rank, own, 1024));
    expect_requests(f, 2, 0);
    __atomic_store_n(&f->clerk.says, EP_UNAVAILABLE, __ATOMIC_SEQ_CST);
    ok(ep_unregister(f->rank, own));
    expect_requests(f, 2, 2);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void a_server_that_stays_busy_is_not_waited_for(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    ok(ep_register(f->rank, own, 1024));
    f->client.timeout_ms = 0; /* the group's alone */
    __atomic_store_n(&f->clerk.keeps, EP_UNAVAILABLE, __ATOMIC_SEQ_CST);
    refused(ep_unregister(f->rank, own), EP_DEADLINE_EXCEEDED, "may still have the memory mapped");
    f->client.timeout_ms = PATIENCE_MS;
    __atomic_store_n(&f->clerk.keeps, EP_NOT_FOUND, __ATOMIC_SEQ_CST); /* it has come to that */
    ok(ep_register(f->rank, own, 1024));
    assert_int_equal(f->clerk.last.region, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

/* Of what is asked for before it, too. */
static void what_the_server_may_still_have_is_asked_for_again(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    for (uint32_t i = 0; i < EP_MAX_REGISTERED; i++)
        ok(ep_register(f->rank, own + i * 256, 256));
    __atomic_store_n(&f->clerk.keeps, EP_INTERNAL, __ATOMIC_SEQ_CST);
    refused(ep_unregister(f->rank, own), EP_INTERNAL, "may still have the memory mapped");
    refused(ep_unregister(f->rank, own + 256), EP_INTERNAL, "may still have the memory mapped");
    refused(ep_register(f->rank, own, 256), EP_RESOURCE_EXHAUSTED, "with those that the server has not let go of");
    expect_requests(f, EP_MAX_REGISTERED, 1 + 2 + 2);
    __atomic_store_n(&f->clerk.keeps, EP_OK, __ATOMIC_SEQ_CST);
    ok(ep_unregister(f->rank, own + 512));
    expect_requests(f, EP_MAX_REGISTERED, 5 + 3);
    ok(ep_register(f->rank, own, 256));
    expect_requests(f, EP_MAX_REGISTERED + 1, 5 + 3);
    assert_int_equal(f->clerk.last.region, 0);
    f->api->memory_destroy(memory);
    destroy(f);
}

static void a_lost_server_ends_a_request(void **state)
{
    struct fixture *f = make_answered();
    struct ep_cuda_memory *memory;
    uint8_t *own = make_own(f, 0, &memory);

    (void)state;
    ok(ep_register(f->rank, own, 1024));
    shutdown(f->server, SHUT_RDWR);
    refused(ep_register(f->rank, own + 1024, 1024), EP_SERVER_LOST, "");
    ok(ep_unregister(f->rank, own)); /* what it had mapped is gone with it */
    f->api->memory_destroy(memory);
    destroy(f);
}

/* ---- failures ------------------------------------------------------------------------------------------------ */

static void a_failure_is_told_once(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    ep_op_info info = { .size = sizeof info };

    (void)state;
    cuda_fixture.outcome = (struct ep_device_record){ .status = EP_TIMEOUT, .late_rank = 2, .arrived = { 3 },
                                                      .wait_phase = EP_WAIT_ARRIVAL,
                                                      .timeout_ns = 5 * EP_NS_PER_S };
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    refused(ep_handle_wait(l.handle, 1000), EP_TIMEOUT,
            "rank 2 was late: LL 1 waited 5000 ms for its rows");
    ok(ep_handle_wait(l.handle, 0));
    ok(ep_sync(f->rank, 0));
    ok(ep_dispatch_info(l.handle, &info));
    assert_int_equal(info.status, EP_TIMEOUT);
    assert_int_equal(info.late_rank, 2);
    ok(ep_combine(l.handle, &l.combine, NULL));
    refused(ep_sync(f->rank, 1000), EP_TIMEOUT, "rank 2 was late");
    ok(ep_sync(f->rank, 0));
    cuda_fixture.outcome = (struct ep_device_record){ .status = EP_STALE_HANDLE };
    ok(ep_combine(l.handle, &l.combine, NULL));
    refused(ep_sync(f->rank, 1000), EP_STALE_HANDLE, "no routing to combine");
    cuda_fixture.outcome = (struct ep_device_record){ .status = EP_OVERFLOW, .rows_needed = 99 };
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    refused(ep_sync(f->rank, 1000), EP_OVERFLOW, "99");
    ok(ep_handle_wait(l.handle, 1000));
    assert_int_equal(report_of(f)->failures, 0);
    destroy(f);
}

/* The report's first failure is read after its records, and an op of another stream may have ended in between. */
static void a_failure_that_is_seen_before_its_record_is_told_once(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    cuda_fixture.outcome = (struct ep_device_record){ .status = EP_TIMEOUT };
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    refused(ep_sync(f->rank, 1000), EP_TIMEOUT, "late");
    l.handle->device.seen[EP_DEVICE_DISPATCH] = 0;
    ok(ep_handle_wait(l.handle, 1000));
    l.handle->device.seen[EP_DEVICE_DISPATCH] = 0;
    ok(ep_sync(f->rank, 1000));
    destroy(f);
}

static void a_failure_of_another_handle_waits_for_its_own(void **state)
{
    struct fixture *f = make_joined();
    struct lane l[2] = { make_lane(f, EP_LAYOUT_EXPERT_MAJOR), make_lane(f, EP_LAYOUT_EXPERT_MAJOR) };

    (void)state;
    for (int times = 0; times < 2; times++) {
        cuda_fixture.outcome = (struct ep_device_record){ .status = EP_TIMEOUT };
        ok(ep_dispatch(l[0].handle, &l[0].dispatch, NULL));
        ok(ep_dispatch(l[1].handle, &l[1].dispatch, NULL));
        refused(ep_handle_wait(l[1].handle, 1000), EP_TIMEOUT, "late"); /* finds that of both */
        if (times == 0)
            refused(ep_handle_wait(l[0].handle, 1000), EP_TIMEOUT, "late");
        else
            refused(ep_sync(f->rank, 1000), EP_TIMEOUT, "late");
        ok(ep_handle_wait(l[0].handle, 1000));
        ok(ep_sync(f->rank, 1000));
    }
    destroy(f);
}

/* A graph's later ops overwrite the record of the one that failed. */
static void failures_between_looks_are_not_missed(void **state)
{
    struct fixture *f = make_joined();
    struct lane l[2] = { make_lane(f, EP_LAYOUT_EXPERT_MAJOR), make_lane(f, EP_LAYOUT_EXPERT_MAJOR) };
    ep_op_info info = { .size = sizeof info };
    struct ep_cuda_graph *graph;
    int stream;

    (void)state;
    assert_int_equal(f->api->graph_begin(0, &stream, NULL), EP_OK);
    for (int i = 0; i < 2; i++) {
        ok(ep_dispatch(l[i].handle, &l[i].dispatch, &stream));
        ok(ep_combine(l[i].handle, &l[i].combine, &stream));
    }
    assert_int_equal(f->api->graph_end(0, &stream, &graph, NULL), EP_OK);
    ok(ep_sync(f->rank, 1000)); /* captured, not run */
    refused(ep_dispatch_info(l[0].handle, &info), EP_FAILED_PRECONDITION, "no dispatch");
    cuda_fixture.outcome = (struct ep_device_record){ .status = EP_TIMEOUT, .late_rank = 0 };
    assert_int_equal(f->api->graph_launch(graph, &stream, NULL), EP_OK);
    cuda_fixture.outcome = (struct ep_device_record){ .rows = 4, .start_ns = 1000, .end_ns = 4000 };
    assert_int_equal(f->api->graph_launch(graph, &stream, NULL), EP_OK);
    refused(ep_sync(f->rank, 1000), EP_TIMEOUT, "rank 0 was late: LL 1 ");
    ok(ep_sync(f->rank, 1000));
    ok(ep_dispatch_info(l[1].handle, &info));
    assert_int_equal(info.status, EP_OK);
    assert_int_equal(info.number, 4);
    assert_int_equal(f->api->graph_launch(graph, &stream, NULL), EP_OK);
    ok(ep_handle_wait(l[1].handle, 1000));
    ok(ep_dispatch_info(l[1].handle, &info));
    assert_int_equal(info.number, 6);
    assert_int_equal(info.total_ns, 3000); /* no call of its own */
    f->api->graph_destroy(graph);
    destroy(f);
}

/* Of a rank that follows its group: successors are looked at by the library's thread, which has none here. */
static void only_what_is_put_on_a_stream_to_run_counts(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_graph *graph;
    int stream, successor;

    (void)state;
    f->rank->successor = (struct successor *)(void *)&successor;
    ok(ep_dispatch(l.handle, &l.dispatch, &stream));
    assert_int_equal(f->rank->turn.position, 1);
    assert_int_equal(f->api->graph_begin(0, &stream, NULL), EP_OK);
    ok(ep_dispatch(l.handle, &l.dispatch, &stream));
    ok(ep_combine(l.handle, &l.combine, &stream));
    assert_int_equal(f->api->graph_end(0, &stream, &graph, NULL), EP_OK);
    assert_int_equal(f->rank->turn.position, 1);
    ok(ep_graph_begins(f->rank, 1));
    assert_int_equal(f->api->graph_launch(graph, &stream, NULL), EP_OK);
    assert_int_equal(f->rank->turn.position, 2);
    cuda_fixture_fail("stream_captured", 0);
    refused(ep_dispatch(l.handle, &l.dispatch, &stream), EP_INTERNAL, "stream_captured");
    cuda_fixture_fail(NULL, 0);
    assert_int_equal(f->rank->turn.position, 2);
    f->rank->successor = NULL;
    f->api->graph_destroy(graph);
    destroy(f);
}

static void a_new_handle_does_not_see_its_predecessors_ops(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    ep_op_info info = { .size = sizeof info };
    ep_handle *next;

    (void)state;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ep_handle_destroy(l.handle); /* before anybody has looked */
    ok(ep_handle_create(f->rank, &next));
    ok(ep_sync(f->rank, 1000));
    refused(ep_dispatch_info(next, &info), EP_FAILED_PRECONDITION, "no dispatch");
    destroy(f);
}

/* The window is the rank's, and its last worker may have left something in it. */
static void a_new_worker_does_not_see_its_predecessors_ops(void **state)
{
    struct fixture *f = make();
    ep_op_info info = { .size = sizeof info };
    struct lane l;

    (void)state;
    report_of(f)->failures = 4;
    report_of(f)->failure = (struct ep_device_record){ .status = EP_TIMEOUT, .generation = 1, .sequence = 40 };
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++)
        for (uint32_t p = 0; p < EP_DEVICE_PARTS; p++)
            report_of(f)->records[h][p] = (struct ep_device_record){ .generation = h + 1, .sequence = 40 + h,
                                                                     .status = EP_TIMEOUT };
    join(f);
    l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    assert_int_equal(l.handle->generation, 1);
    ok(ep_sync(f->rank, 1000));
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ok(ep_sync(f->rank, 1000));
    ok(ep_dispatch_info(l.handle, &info));
    assert_int_equal(info.status, EP_OK);
    destroy(f);
}

/* ---- waiting --------------------------------------------------------------------------------------------------- */

static void set_busy(uint32_t busy)
{
    __atomic_store_n(&cuda_fixture.busy, busy, __ATOMIC_SEQ_CST);
}

static void *end_of_work(void *unused)
{
    (void)unused;
    usleep(20000);
    set_busy(0);
    return NULL;
}

static void a_wait_ends_with_the_work_or_at_its_deadline(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    pthread_t thread;

    (void)state;
    set_busy(1);
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    refused(ep_sync(f->rank, 0), EP_DEADLINE_EXCEEDED, "still running");
    refused(ep_handle_wait(l.handle, 5), EP_DEADLINE_EXCEEDED, "still running");
    pthread_create(&thread, NULL, end_of_work, NULL);
    ok(ep_sync(f->rank, 20000));
    pthread_join(thread, NULL);
    destroy(f);
}

struct interrupter {
    ep_rank *rank;
    bool in_sleep;
};

static void *interrupt(void *arg)
{
    struct interrupter *i = arg;

    while (i->in_sleep && !__atomic_load_n(&i->rank->waiting, __ATOMIC_SEQ_CST))
        ;
    ep_rank_interrupt(i->rank);
    return NULL;
}

static void a_wait_can_be_interrupted(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    set_busy(1);
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    for (int times = 0; times < 50; times++) {
        struct interrupter i = { f->rank, times % 2 == 0 };
        pthread_t thread;

        pthread_create(&thread, NULL, interrupt, &i);
        refused(ep_sync(f->rank, 20000), EP_CANCELLED, "interrupted");
        pthread_join(thread, NULL);
    }
    ep_rank_interrupt(f->rank); /* before the wait: it counts too */
    refused(ep_handle_wait(l.handle, 20000), EP_CANCELLED, "interrupted");
    set_busy(0);
    ok(ep_sync(f->rank, 1000));
    destroy(f);
}

static void a_broken_stream_is_an_error_of_the_wait(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    cuda_fixture_fail("stream_query", 0);
    refused(ep_sync(f->rank, 1000), EP_INTERNAL, "stream_query");
    cuda_fixture_fail("read", 0);
    refused(ep_sync(f->rank, 1000), EP_INTERNAL, "what became of the rank's ops");
    cuda_fixture_fail(NULL, 0);
    ok(ep_sync(f->rank, 1000));
    destroy(f);
}

/* ---- the end ------------------------------------------------------------------------------------------------------ */

/* Peers are taken out of the running op, so that it ends; the rank itself takes part. */
static void check_cut(struct fixture *f)
{
    for (uint32_t r = 0; r < RANKS; r++)
        assert_true((state_of(f)->from[r] == EP_DEVICE_NEVER) == (r != ME));
}

static void a_lost_server_ends_waits_and_ops(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    ep_event event = { .size = sizeof event };
    uint8_t own[16];

    (void)state;
    set_busy(1);
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    close(f->server);
    f->server = -1;
    refused(ep_sync(f->rank, 20000), EP_SERVER_LOST, "server");
    refused(ep_handle_wait(l.handle, 20000), EP_SERVER_LOST, "server");
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_SERVER_LOST, "server");
    refused(ep_read(f->rank, own, l.dispatch.tokens, sizeof own, NULL), EP_SERVER_LOST, "server");
    ok(ep_event_next(f->rank, 20000, &event));
    assert_int_equal(event.type, EP_EVENT_SERVER_LOST);
    for (int i = 0; i < 2000 && state_of(f)->from[0] != EP_DEVICE_NEVER; i++)
        usleep(1000);
    check_cut(f);
    assert_int_equal(f->rank->device->n_used, 1);
    set_busy(0);
    refused(ep_sync(f->rank, 20000), EP_SERVER_LOST, "server"); /* for good */
    assert_int_equal(f->rank->device->n_used, 0); /* its streams may be destroyed now */
    destroy(f);
}

static void a_detached_rank_says_why(void **state)
{
    struct fixture *f = make_joined();
    struct ep_attach_frame frame;
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    set_busy(1);
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = EP_ATTACH_DETACHED;
    snprintf(frame.text, sizeof frame.text, "the group was deleted");
    assert_int_equal(ep_attach_send(f->server, &frame, -1, NULL), EP_OK);
    refused(ep_sync(f->rank, 20000), EP_DETACHED, "the group was deleted");
    set_busy(0);
    destroy(f);
}

static void leaving_says_bye_when_the_memory_is_given_back(void **state)
{
    struct fixture *f = make_joined();
    struct ep_attach_frame frame;
    int fd;

    (void)state;
    ep_leave(f->rank);
    f->rank = NULL;
    f->client_socket = -1;
    assert_int_equal(cuda_fixture.memories, RANKS + 1); /* the server's */
    assert_int_equal(ep_attach_receive(f->server, &frame, &fd, NULL), EP_OK);
    assert_int_equal(frame.type, EP_ATTACH_BYE);
    destroy(f);
}

static void *end_when_cut(void *arg)
{
    struct fixture *f = arg;

    while (__atomic_load_n(&state_of(f)->from[0], __ATOMIC_SEQ_CST) != EP_DEVICE_NEVER)
        usleep(1000);
    set_busy(0);
    return NULL;
}

static void leaving_cuts_off_what_does_not_end(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_attach_frame frame;
    pthread_t thread;
    int fd;

    (void)state;
    set_busy(1);
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    pthread_create(&thread, NULL, end_when_cut, f);
    ep_leave(f->rank);
    f->rank = NULL;
    f->client_socket = -1;
    pthread_join(thread, NULL);
    check_cut(f);
    assert_int_equal(cuda_fixture.memories, RANKS + 1);
    assert_int_equal(ep_attach_receive(f->server, &frame, &fd, NULL), EP_OK);
    assert_int_equal(frame.type, EP_ATTACH_BYE);
    destroy(f);
}

/* ---- executor server -------------------------------------------------------------------------------------------- */

static void a_served_rank_takes_its_window_only(void **state)
{
    struct fixture *f = make_joined();
    ep_rank_info info = { .size = sizeof info };

    (void)state;
    assert_int_equal(cuda_fixture.memories, RANKS + 1 + 1); /* the server's and ours */
    assert_int_equal(cuda_fixture.ranks, 0);
    ok(ep_rank_describe(f->rank, &info));
    assert_int_equal(info.backend, EP_BACKEND_CUDA);
    assert_int_equal(info.executor, EP_EXECUTOR_SERVER);
    assert_memory_equal(info.device_uuid, cuda_fixture_uuid(0), sizeof info.device_uuid);
    destroy(f);
}

static void a_window_that_is_not_its_own_is_refused(void **state)
{
    struct fixture *f = make();

    (void)state;
    refused(attach_served(f, 0, 1), EP_PROTOCOL, "sends 1 memories beside the window: under executor server there are");
    destroy(f);

    f = make();
    control_of(f, ME)->head.version++;
    refused(attach_served(f, 0, 0), EP_PROTOCOL, "the window of rank 1 has version");
    destroy(f);

    f = make();
    control_of(f, ME)->head.limits.top_k++;
    refused(attach_served(f, 0, 0), EP_PROTOCOL, "the window of rank 1 is that of another rank, epoch or group");
    destroy(f);

    f = make();
    refused(attach_as(f, &mailbox_executor, 0, 0, f->map.total_bytes + 4096), EP_PROTOCOL, "the window of rank 1 has");
    destroy(f);

    f = make();
    refused(attach_served(f, CUDA_FIXTURE_DEVICES, 0), EP_NOT_FOUND, "rank 1 lives on a GPU that this process cannot");
    destroy(f);
}

static void a_served_join_that_fails_anywhere_leaves_nothing(void **state)
{
    static const struct { const char *name; uint32_t calls; } calls[] = {
        { "device_find", 1 }, { "memory_import", 1 }, { "stream_create", 3 }, { "read", 2 }, { "write", 1 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (uint32_t n = 0; n < calls[i].calls; n++) {
            struct fixture *f = make();

            cuda_fixture_fail(calls[i].name, n);
            refused(attach_served(f, 0, 0), EP_INTERNAL, "because the test says so");
            cuda_fixture_fail(NULL, 0);
            destroy(f);
        }
}

static void with_mps(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->mps = true;
}

/* A kernel that waits for another process's is given the GPU for a time slice, unless both go through MPS. */
static void a_kernel_waits_where_both_have_mps(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct fixture *f = make();

        cuda_fixture.on_info = i & 1 ? with_mps : NULL;
        server_mps = i & 2;
        join(f);

        struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

        ok(ep_dispatch(l.handle, &l.dispatch, NULL));
        assert_int_equal(cuda_fixture.spins, i == 3);
        ok(ep_sync(f->rank, 1000));
        destroy(f);
    }
    server_mps = false;
}

static void ops_are_rung_for_in_the_order_of_their_stream(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    int stream;

    (void)state;
    ok(ep_dispatch(l.handle, &l.dispatch, &stream));
    assert_int_equal(cuda_fixture.rung, 1);
    assert_ptr_equal(cuda_fixture.stream[0], &stream);
    assert_int_equal(mailbox_of(f)->op[0].kind, EP_OP_DISPATCH);
    assert_ptr_equal((uint8_t *)f->rank->window + mailbox_of(f)->op[0].x.offset, l.dispatch.tokens);
    cuda_fixture_fail("ring", 0);
    refused(ep_combine(l.handle, &l.combine, &stream), EP_INTERNAL, "ring failed");
    cuda_fixture_fail(NULL, 0);
    ok(ep_combine(l.handle, &l.combine, &stream));
    ep_handle_destroy(l.handle); /* a release is not rung for: no stream stands in order */
    ok(ep_sync(f->rank, 1000));
    assert_int_equal(cuda_fixture.rung, 2);
    destroy(f);
}

static void a_wait_is_for_the_server(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    cuda_fixture.unserved = 1;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    assert_int_equal(mailbox_of(f)->bell, ep_bell_of(0));
    refused(ep_sync(f->rank, 5), EP_DEADLINE_EXCEEDED, "still running");
    __atomic_store_n(&mailbox_of(f)->bell, EP_BELL_DONE, __ATOMIC_SEQ_CST);
    ok(ep_sync(f->rank, 1000));
    destroy(f);
}

static void wait_closed(struct fixture *f)
{
    for (int i = 0; i < 2000 && !__atomic_load_n(&mailbox_of(f)->closed, __ATOMIC_SEQ_CST); i++)
        usleep(1000);
    assert_int_equal(mailbox_of(f)->closed, 1);
}

/* A program that waited for the server to come back would keep MPS from taking it on. */
static void a_lost_gpu_is_told_and_not_the_server_that_went_for_it(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    cuda_fixture.unserved = 1;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    close(f->server);
    f->server = -1;
    refused(ep_sync(f->rank, 20000), EP_SERVER_LOST, "server");
    wait_closed(f);
    __atomic_store_n(&cuda_fixture.lost, 1, __ATOMIC_RELAXED);
    refused(ep_dispatch(l.handle, &l.dispatch, NULL), EP_DEVICE_LOST, "fallen off the bus");
    refused(ep_sync(f->rank, 20000), EP_DEVICE_LOST, "fallen off the bus");
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    destroy(f);
}

/* Streams go on, of what was handed over and of what comes later, in graphs too. */
static void a_lost_server_lets_streams_go_on(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_cuda_graph *graph;
    int stream, captured;

    (void)state;
    assert_int_equal(f->api->graph_begin(0, &captured, NULL), EP_OK);
    ok(ep_dispatch(l.handle, &l.dispatch, &captured));
    ok(ep_combine(l.handle, &l.combine, &captured));
    assert_int_equal(f->api->graph_end(0, &captured, &graph, NULL), EP_OK);
    cuda_fixture.unserved = 1;
    ok(ep_dispatch(l.handle, &l.dispatch, &stream));
    assert_int_equal(f->api->stream_query(0, &stream, NULL), EP_UNAVAILABLE);
    close(f->server);
    f->server = -1;
    refused(ep_sync(f->rank, 20000), EP_SERVER_LOST, "server");
    wait_closed(f);
    for (int i = 0; i < 2000 && f->api->stream_query(0, &stream, NULL) != EP_OK; i++)
        usleep(1000);
    assert_int_equal(f->api->stream_query(0, &stream, NULL), EP_OK);
    refused(ep_dispatch(l.handle, &l.dispatch, &stream), EP_SERVER_LOST, "server");
    assert_int_equal(f->api->graph_launch(graph, &captured, NULL), EP_OK);
    assert_int_equal(f->api->stream_query(0, &captured, NULL), EP_OK);
    refused(ep_sync(f->rank, 20000), EP_SERVER_LOST, "server");
    f->api->graph_destroy(graph);
    destroy(f);
}

static void a_taken_rank_says_why_and_goes_on(void **state)
{
    struct fixture *f = make_joined();
    struct ep_attach_frame frame;
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);

    (void)state;
    cuda_fixture.unserved = 1;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = EP_ATTACH_DETACHED;
    snprintf(frame.text, sizeof frame.text, "the server cannot run its ops any more");
    assert_int_equal(ep_attach_send(f->server, &frame, -1, NULL), EP_OK);
    refused(ep_handle_wait(l.handle, 20000), EP_DETACHED, "the server cannot run its ops any more");
    wait_closed(f);
    destroy(f); /* what was handed over is over: it leaves without waiting for its bound */
}

static void leaving_does_not_wait_for_a_server_that_hangs(void **state)
{
    struct fixture *f = make_joined();
    struct lane l = make_lane(f, EP_LAYOUT_EXPERT_MAJOR);
    struct ep_attach_frame frame;
    int fd;

    (void)state;
    cuda_fixture.unserved = 1;
    ok(ep_dispatch(l.handle, &l.dispatch, NULL));
    ep_leave(f->rank);
    f->rank = NULL;
    f->client_socket = -1;
    assert_int_equal(mailbox_of(f)->closed, 1);
    assert_int_equal(cuda_fixture.memories, RANKS + 1);
    assert_int_equal(ep_attach_receive(f->server, &frame, &fd, NULL), EP_OK);
    assert_int_equal(frame.type, EP_ATTACH_BYE);
    destroy(f);
}

static int as_direct(void **state)
{
    (void)state;
    served = false;
    return 0;
}

static int as_served(void **state)
{
    (void)state;
    served = true;
    return 0;
}

#define DIRECT(name) cmocka_unit_test_setup(name, as_direct)
#define SERVED(name) cmocka_unit_test_setup(name, as_served)
#define BOTH(name)   DIRECT(name), SERVED(name)

int main(void)
{
    const struct CMUnitTest tests[] = {
        DIRECT(a_rank_takes_its_state_and_its_peers_windows),
        DIRECT(memory_may_come_in_any_order),
        DIRECT(memory_that_does_not_come_is_missed),
        DIRECT(memory_that_makes_no_sense_is_refused),
        DIRECT(sizes_are_those_that_both_sides_compute),
        DIRECT(windows_and_state_of_others_are_refused),
        DIRECT(a_gpu_that_is_not_there),
        DIRECT(ht_fills_as_many_multiprocessors_as_the_program_allows),
        DIRECT(a_join_that_fails_anywhere_leaves_nothing),
        BOTH(ops_go_to_the_stream_they_are_given),
        BOTH(many_streams_are_refused_until_a_sync),
        BOTH(a_record_becomes_what_the_op_did),
        BOTH(rank_major_rows_are_in_the_bank_of_their_number),
        BOTH(send_only_ops_have_a_result_when_they_are_complete),
        BOTH(copies_reach_the_ranks_memory),
        BOTH(copies_stay_in_their_block),
        BOTH(copies_stay_in_their_view),
        BOTH(ops_use_registered_memory_as_it_is),
        BOTH(spans_stay_in_their_registered_memory),
        DIRECT(what_cannot_be_registered_is_refused),
        BOTH(registered_memories_do_not_overlap),
        BOTH(there_is_a_bound_to_registered_memories),
        DIRECT(memory_may_be_mapped_in_pieces),
        BOTH(copies_reach_registered_memory),
        SERVED(the_server_is_handed_what_is_registered),
        SERVED(what_the_server_refuses_is_not_registered),
        SERVED(memory_that_cannot_be_handed_on_is_refused),
        SERVED(a_server_that_does_not_answer_is_not_waited_for),
        SERVED(a_server_that_is_busy_is_asked_again),
        SERVED(a_server_that_stays_busy_is_not_waited_for),
        SERVED(what_the_server_may_still_have_is_asked_for_again),
        SERVED(a_lost_server_ends_a_request),
        BOTH(a_failure_is_told_once),
        BOTH(a_failure_that_is_seen_before_its_record_is_told_once),
        BOTH(a_failure_of_another_handle_waits_for_its_own),
        BOTH(failures_between_looks_are_not_missed),
        BOTH(only_what_is_put_on_a_stream_to_run_counts),
        BOTH(a_new_handle_does_not_see_its_predecessors_ops),
        BOTH(a_new_worker_does_not_see_its_predecessors_ops),
        BOTH(a_wait_ends_with_the_work_or_at_its_deadline),
        BOTH(a_wait_can_be_interrupted),
        BOTH(a_broken_stream_is_an_error_of_the_wait),
        DIRECT(a_lost_server_ends_waits_and_ops),
        BOTH(a_detached_rank_says_why),
        BOTH(leaving_says_bye_when_the_memory_is_given_back),
        DIRECT(leaving_cuts_off_what_does_not_end),
        SERVED(a_served_rank_takes_its_window_only),
        SERVED(a_window_that_is_not_its_own_is_refused),
        SERVED(a_served_join_that_fails_anywhere_leaves_nothing),
        SERVED(ops_are_rung_for_in_the_order_of_their_stream),
        SERVED(a_kernel_waits_where_both_have_mps),
        SERVED(a_wait_is_for_the_server),
        SERVED(a_lost_server_lets_streams_go_on),
        SERVED(a_lost_gpu_is_told_and_not_the_server_that_went_for_it),
        SERVED(a_taken_rank_says_why_and_goes_on),
        SERVED(leaving_does_not_wait_for_a_server_that_hangs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
