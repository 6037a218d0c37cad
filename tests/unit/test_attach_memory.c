/* The side socket on a node with GPUs: the frames and descriptors that a worker gets, and those that it sends. */
#include "group_fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "attach_private.h"
#include "cuda_fixture.h"

#define RANKS 32u /* the most there can be */

struct service {
    struct fixture *f;
    struct ep_attach *attach;
    char path[80];
};

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

static int setup(void **state)
{
    struct service *s = calloc(1, sizeof *s);
    struct ep_attach_options options = { .socket = s->path };
    Ep__V1__GroupSpec spec = small_spec();

    cuda_fixture_reset();
    fixture_setup_gpus((void **)&s->f, cuda_fixture_api());
    snprintf(s->path, sizeof s->path, "%s/side", s->f->directory);
    assert_int_equal(ep_attach_open(&s->f->loop, s->f->groups, s->f->node, &options, &s->attach, NULL), EP_OK);
    spec.ranks = RANKS;
    create(s->f, "moe", &spec);
    *state = s;
    return 0;
}

static int teardown(void **state)
{
    struct service *s = *state;
    bool closed = false;

    ep_attach_close(s->attach, set_flag, &closed);
    RUN_UNTIL(s->f, closed);
    fixture_teardown((void **)&s->f);
    assert_int_equal(cuda_fixture.memories, 0);
    free(s);
    return 0;
}

/* ---- a worker ---------------------------------------------------------------------------- */

static Ep__V1__ClaimReply claim_as(struct service *s, uint32_t rank, Ep__V1__Executor executor)
{
    Ep__V1__ClaimRequest request = EP__V1__CLAIM_REQUEST__INIT;
    Ep__V1__ClaimReply reply = EP__V1__CLAIM_REPLY__INIT;
    struct ep_error error = EP_ERROR_INIT;
    char group[] = "moe";

    request.group = group;
    request._rank_case = EP__V1__CLAIM_REQUEST___RANK_RANK;
    request.rank = rank;
    request.window_version = EP_WINDOW_VERSION;
    request.attach_version = EP_ATTACH_VERSION;
    request.executor = executor;
    assert_int_equal(ep_attach_claim(s->attach, &request, getpid(), geteuid(), &reply, &error), EP_OK);
    return reply;
}

static Ep__V1__ClaimReply claim_of(struct service *s, uint32_t rank)
{
    return claim_as(s, rank, EP__V1__EXECUTOR__EXECUTOR_DIRECT);
}

static int connect_to(struct service *s)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    uint32_t before = s->attach->n_connections;

    snprintf(address.sun_path, sizeof address.sun_path, "%s", s->path);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    RUN_UNTIL(s->f, s->attach->n_connections > before);
    return fd;
}

static void say(int fd, enum ep_attach_type type, const Ep__V1__ClaimReply *claim)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, type);
    if (claim)
        memcpy(frame.ticket, claim->ticket.data, sizeof frame.ticket);
    assert_int_equal(ep_attach_send(fd, &frame, -1, NULL), EP_OK);
}

/* The next frame, waited for while the loop runs. */
static struct ep_attach_frame hear(struct service *s, int fd, int *descriptor)
{
    struct ep_attach_frame frame;
    ep_status status;

    while ((status = ep_attach_receive(fd, &frame, descriptor, NULL)) == EP_UNAVAILABLE)
        uv_run(&s->f->loop, UV_RUN_ONCE);
    assert_int_equal(status, EP_OK);
    return frame;
}

/* The least that the kernel allows: a few frames fill it. */
static void shrink(const struct service *s)
{
    int bytes = 1;

    assert_int_equal(setsockopt(s->attach->newest->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), 0);
}

static void leave(struct service *s, int fd)
{
    uint32_t before = s->attach->n_connections;

    say(fd, EP_ATTACH_BYE, NULL);
    RUN_UNTIL(s->f, s->attach->n_connections < before);
    close(fd);
}

static void check_memory(int fd, uint64_t bytes, uint64_t magic)
{
    uint64_t *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    assert_ptr_not_equal(at, MAP_FAILED);
    assert_int_equal(*at, magic);
    munmap(at, bytes);
    close(fd);
}

static void check_window(int fd, uint64_t bytes, uint32_t rank)
{
    struct ep_control *at = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    assert_ptr_not_equal(at, MAP_FAILED);
    assert_int_equal(at->head.rank, rank);
    munmap(at, bytes);
    check_memory(fd, bytes, EP_WINDOW_MAGIC);
}

/* ---- tests -------------------------------------------------------------------------------- */

static void the_answer_to_a_claim_names_executor_and_gpu(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply reply = claim_of(s, 3);

    assert_int_equal(reply.backend, EP__V1__BACKEND__BACKEND_CUDA);
    assert_int_equal(reply.executor, EP__V1__EXECUTOR__EXECUTOR_DIRECT);
    assert_int_equal(reply.device_uuid.len, EP_CUDA_UUID_BYTES);
    assert_memory_equal(reply.device_uuid.data, cuda_fixture_uuid(1), EP_CUDA_UUID_BYTES);
    assert_true(reply.state_bytes > 0);
    assert_false(reply.mps);
}

static void expect_all(struct service *s, int fd, const Ep__V1__ClaimReply *claim, uint32_t own)
{
    int descriptor;
    struct ep_attach_frame frame = hear(s, fd, &descriptor);

    assert_int_equal(frame.type, EP_ATTACH_WELCOME);
    assert_int_equal(frame.rank, own);
    assert_int_equal(frame.count, 1 + (RANKS - 1));
    assert_int_equal(frame.value, claim->window_bytes);
    check_window(descriptor, frame.value, own);

    frame = hear(s, fd, &descriptor);
    assert_int_equal(frame.type, EP_ATTACH_MEMORY);
    assert_int_equal(frame.count, EP_ATTACH_MEMORY_STATE);
    assert_int_equal(frame.value, claim->state_bytes);
    check_memory(descriptor, frame.value, EP_DEVICE_STATE_MAGIC);

    for (uint32_t peer = 0; peer < RANKS; peer++) {
        if (peer == own)
            continue;
        frame = hear(s, fd, &descriptor);
        assert_int_equal(frame.type, EP_ATTACH_MEMORY);
        assert_int_equal(frame.count, EP_ATTACH_MEMORY_WINDOW);
        assert_int_equal(frame.rank, peer);
        assert_int_equal(frame.epoch, 1);
        assert_int_equal(frame.value, claim->window_bytes);
        check_window(descriptor, frame.value, peer);
    }
}

static void all_memory_follows_the_welcome(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 5);
    int fd = connect_to(s);

    say(fd, EP_ATTACH_HELLO, &claim);
    expect_all(s, fd, &claim, 5);
    leave(s, fd);
}

static void a_served_worker_is_welcomed_with_its_window_only(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_as(s, 5, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    int fd = connect_to(s), descriptor;
    struct ep_attach_frame frame;

    assert_int_equal(claim.executor, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    assert_int_equal(claim.device_uuid.len, EP_CUDA_UUID_BYTES);
    assert_int_equal(claim.state_bytes, 0);
    say(fd, EP_ATTACH_HELLO, &claim);
    frame = hear(s, fd, &descriptor);
    assert_int_equal(frame.type, EP_ATTACH_WELCOME);
    assert_int_equal(frame.count, 0);
    check_window(descriptor, frame.value, 5);
    leave(s, fd);
}

/* Its process lives, so its window waits; peers and what ran its ops do not. */
static void a_served_worker_that_goes_is_absent_at_once(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_as(s, 7, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    int fd = connect_to(s), descriptor;

    say(fd, EP_ATTACH_HELLO, &claim);
    (void)hear(s, fd, &descriptor);
    close(descriptor);
    close(fd);
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    assert_int_equal(rank_state(s->f, "moe", 7), EP__V1__RANK_STATE__RANK_STATE_QUARANTINED);
    RUN_UNTIL(s->f, cuda_fixture_serves() == 0);
    assert_int_equal(s->attach->claims->state, CLAIM_LEAVING);
}

static void a_rank_that_cannot_be_served_says_why(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_as(s, 3, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    int fd = connect_to(s), descriptor;
    struct ep_attach_frame frame;

    cuda_fixture_fail("serve_open", 0);
    say(fd, EP_ATTACH_HELLO, &claim);
    frame = hear(s, fd, &descriptor);
    cuda_fixture_fail(NULL, 0);
    assert_int_equal(frame.type, EP_ATTACH_REFUSED);
    assert_non_null(strstr(frame.text, "the kernels of rank 3: serve_open failed"));
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    assert_int_equal(ep_groups_sms(s->f->groups, 1), 0);
    close(fd);
}

/* A worker that reads slowly holds up nobody, loses nothing, and hears of its peers afterwards. */
static void what_the_socket_has_no_room_for_follows(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 0), other;
    int fd = connect_to(s), second, descriptor;
    struct ep_attach_frame frame;

    shrink(s);
    say(fd, EP_ATTACH_HELLO, &claim);
    RUN_UNTIL(s->f, rank_state(s->f, "moe", 0) == EP__V1__RANK_STATE__RANK_STATE_ATTACHED);
    assert_true(s->attach->newest->memory < s->attach->newest->memories);

    other = claim_of(s, 1);
    second = connect_to(s);
    say(second, EP_ATTACH_HELLO, &other);
    RUN_UNTIL(s->f, rank_state(s->f, "moe", 1) == EP__V1__RANK_STATE__RANK_STATE_ATTACHED);

    expect_all(s, fd, &claim, 0);
    frame = hear(s, fd, &descriptor);
    assert_int_equal(frame.type, EP_ATTACH_EVENT);
    assert_int_equal(frame.event, EP_ATTACH_RANK_JOINED);
    assert_int_equal(frame.rank, 1);
    assert_int_equal(descriptor, -1);
    leave(s, second);
    leave(s, fd);
}

static uint32_t open_descriptors(void)
{
    uint32_t n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void no_descriptor_stays_with_the_server(void **state)
{
    struct service *s = *state;
    int fd = connect_to(s);
    uint32_t before = open_descriptors();
    Ep__V1__ClaimReply claim = claim_of(s, 0);

    shrink(s);
    say(fd, EP_ATTACH_HELLO, &claim);
    RUN_UNTIL(s->f, rank_state(s->f, "moe", 0) == EP__V1__RANK_STATE__RANK_STATE_ATTACHED);
    assert_int_equal(open_descriptors(), before + 1); /* the pidfd of the worker */
    expect_all(s, fd, &claim, 0);
    assert_int_equal(open_descriptors(), before + 1);
    leave(s, fd);
}

static void a_worker_that_goes_in_the_middle_is_absent_at_once(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 7);
    int fd = connect_to(s), descriptor;

    shrink(s);
    say(fd, EP_ATTACH_HELLO, &claim);
    (void)hear(s, fd, &descriptor);
    close(descriptor);
    close(fd);
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    /* Its process lives: peers go on, and the memory waits for it. */
    assert_int_equal(rank_state(s->f, "moe", 7), EP__V1__RANK_STATE__RANK_STATE_QUARANTINED);
    assert_int_equal(s->attach->claims->state, CLAIM_LEAVING);
}

/* Nothing waits for the end of the worker's process. */
static void expect_left(struct service *s, uint32_t rank)
{
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    assert_null(s->attach->claims);
    assert_int_not_equal(rank_state(s->f, "moe", rank), EP__V1__RANK_STATE__RANK_STATE_QUARANTINED);
}

/* What it was given was of no use to it. */
static void a_worker_that_says_bye_in_the_middle_has_left(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 7);
    int fd = connect_to(s), descriptor;
    struct ep_attach_frame frame;

    shrink(s);
    say(fd, EP_ATTACH_HELLO, &claim);
    (void)hear(s, fd, &descriptor);
    do
        close(descriptor);
    while (ep_attach_receive(fd, &frame, &descriptor, NULL) == EP_OK);
    assert_true(s->attach->newest->memory < s->attach->newest->memories);
    say(fd, EP_ATTACH_BYE, NULL);
    close(fd);
    expect_left(s, 7);
}

/* Or it has waited long enough: the server finds all that it said at once. */
static void a_worker_that_does_not_wait_for_its_welcome_has_left(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 7);
    int fd = connect_to(s);

    say(fd, EP_ATTACH_HELLO, &claim);
    say(fd, EP_ATTACH_BYE, NULL);
    close(fd);
    expect_left(s, 7);
}

void __real_ep_membership_attach(struct ep_membership *member, const struct ep_worker *worker,
                                 ep_membership_attached_fn done);
void __wrap_ep_membership_attach(struct ep_membership *member, const struct ep_worker *worker,
                                 ep_membership_attached_fn done);

static bool hold_back; /* nobody is taken in */

void __wrap_ep_membership_attach(struct ep_membership *member, const struct ep_worker *worker,
                                 ep_membership_attached_fn done)
{
    if (!hold_back)
        __real_ep_membership_attach(member, worker, done);
}

static void a_worker_may_say_bye_while_it_is_taken_in(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 7);
    int fd = connect_to(s);
    struct ep_attach_frame bye;

    hold_back = true;
    say(fd, EP_ATTACH_HELLO, &claim);
    RUN_UNTIL(s->f, s->attach->claims->state == CLAIM_JOINING);
    hold_back = false;
    ep_attach_frame_init(&bye, EP_ATTACH_BYE);
    bye.epoch = 9; /* to which it cannot have gone over */
    assert_int_equal(ep_attach_send(fd, &bye, -1, NULL), EP_OK);
    expect_left(s, 7);
    assert_int_equal(s->attach->counters.bad_frames, 0);
    close(fd);
}

static void memory_that_cannot_be_exported_ends_the_attachment(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 0);
    int fd = connect_to(s), descriptor;
    struct ep_attach_frame frame;

    cuda_fixture_fail("memory_export", 2);
    say(fd, EP_ATTACH_HELLO, &claim);
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    for (int i = 0; i < 2; i++) {
        frame = hear(s, fd, &descriptor);
        assert_int_equal(frame.type, i == 0 ? EP_ATTACH_WELCOME : EP_ATTACH_MEMORY);
        close(descriptor);
    }
    assert_int_equal(ep_attach_receive(fd, &frame, &descriptor, NULL), EP_SERVER_LOST);
    assert_int_equal(rank_state(s->f, "moe", 0), EP__V1__RANK_STATE__RANK_STATE_QUARANTINED);
    close(fd);
}

static void a_window_that_cannot_be_exported_is_refused_with_the_reason(void **state)
{
    struct service *s = *state;
    Ep__V1__ClaimReply claim = claim_of(s, 0);
    int fd = connect_to(s), descriptor;
    struct ep_attach_frame frame;

    cuda_fixture_fail("memory_export", 0);
    say(fd, EP_ATTACH_HELLO, &claim);
    frame = hear(s, fd, &descriptor);
    cuda_fixture_fail(NULL, 0);
    assert_int_equal(frame.type, EP_ATTACH_REFUSED);
    assert_non_null(strstr(frame.text, "memory_export failed"));
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    close(fd);
}

/* ---- memory of the worker's own ------------------------------------------------------------ */

enum { OWN_BYTES = 1 << 16 };

/* An attached worker whose ops the server runs, with GPU memory of its own. */
struct owner {
    struct service *s;
    int fd; /* of its connection */
    struct ep_cuda_memory *memory;
    int descriptor; /* of that */
};

static struct owner attach_owner(struct service *s, Ep__V1__Executor executor)
{
    Ep__V1__ClaimReply claim = claim_as(s, 5, executor);
    struct owner o = { .s = s, .fd = connect_to(s) };
    struct ep_attach_frame welcome;
    int descriptor;

    say(o.fd, EP_ATTACH_HELLO, &claim);
    welcome = hear(s, o.fd, &descriptor);
    assert_int_equal(welcome.type, EP_ATTACH_WELCOME);
    close(descriptor);
    for (uint32_t i = 0; i < welcome.count; i++) {
        (void)hear(s, o.fd, &descriptor);
        close(descriptor);
    }
    assert_int_equal(cuda_fixture_api()->memory_create(1, OWN_BYTES, &o.memory, NULL), EP_OK);
    assert_int_equal(cuda_fixture_api()->memory_export(o.memory, &o.descriptor, NULL), EP_OK);
    return o;
}

static void free_owner(struct owner *o)
{
    close(o->descriptor);
    cuda_fixture_api()->memory_destroy(o->memory);
}

static struct ep_attach_frame request_of(enum ep_attach_type type, uint32_t count, uint32_t region)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, type);
    frame.count = count;
    frame.region = region;
    frame.value = type == EP_ATTACH_REGISTER ? OWN_BYTES / 2 : 0;
    frame.offset = type == EP_ATTACH_REGISTER ? 4096 : 0;
    return frame;
}

static void ask(const struct owner *o, enum ep_attach_type type, uint32_t count, uint32_t region)
{
    const struct ep_attach_frame frame = request_of(type, count, region);

    assert_int_equal(ep_attach_send(o->fd, &frame, type == EP_ATTACH_REGISTER ? o->descriptor : -1, NULL), EP_OK);
}

static void expect_answer(const struct owner *o, uint32_t count, ep_status status, const char *text)
{
    int descriptor;
    const struct ep_attach_frame frame = hear(o->s, o->fd, &descriptor);

    assert_int_equal(frame.type, EP_ATTACH_ANSWER);
    assert_int_equal(frame.count, count);
    assert_int_equal(frame.status, status);
    assert_non_null(strstr(frame.text, text));
    assert_int_equal(descriptor, -1);
}

static void set_looking(uint32_t looking)
{
    __atomic_store_n(&cuda_fixture.looking, looking, __ATOMIC_SEQ_CST);
}

static void a_request_is_answered_when_it_is_done(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    const struct ep_region *region = &cuda_fixture.regions.region[9];
    uint32_t before = open_descriptors();

    ask(&o, EP_ATTACH_REGISTER, 17, 9);
    expect_answer(&o, 17, EP_OK, "");
    assert_int_equal(region->bytes, OWN_BYTES / 2);
    ((uint8_t *)cuda_fixture_host(cuda_fixture_api()->memory_at(o.memory)))[4096] = 42;
    assert_int_equal(*(uint8_t *)cuda_fixture_host(region->start), 42);
    ask(&o, EP_ATTACH_UNREGISTER, 18, 9);
    expect_answer(&o, 18, EP_OK, "");
    assert_int_equal(region->bytes, 0);
    assert_int_equal(open_descriptors(), before);
    leave(o.s, o.fd);
    free_owner(&o);
}

static void requests_that_make_no_sense_are_answered_too(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    struct ep_attach_frame frame = request_of(EP_ATTACH_REGISTER, 1, 0);

    assert_int_equal(ep_attach_send(o.fd, &frame, -1, NULL), EP_OK);
    expect_answer(&o, 1, EP_INVALID_ARGUMENT, "without a descriptor");
    assert_int_equal(ep_attach_send(o.fd, &frame, o.fd, NULL), EP_OK);
    expect_answer(&o, 1, EP_INVALID_ARGUMENT, "is no GPU memory");
    frame.offset = UINT64_MAX;
    assert_int_equal(ep_attach_send(o.fd, &frame, o.descriptor, NULL), EP_OK);
    expect_answer(&o, 1, EP_INVALID_ARGUMENT, "offset is");
    ask(&o, EP_ATTACH_REGISTER, 2, UINT32_MAX);
    expect_answer(&o, 2, EP_INVALID_ARGUMENT, "must be below 64");
    ask(&o, EP_ATTACH_UNREGISTER, 3, 0);
    expect_answer(&o, 3, EP_NOT_FOUND, "no region 0");
    ask(&o, EP_ATTACH_REGISTER, 4, 0);
    expect_answer(&o, 4, EP_OK, "");
    ask(&o, EP_ATTACH_REGISTER, 5, 0);
    expect_answer(&o, 5, EP_ALREADY_EXISTS, "region 0 already");
    leave(o.s, o.fd);
    free_owner(&o);
}

/* Who does not wait for an answer: nothing is done for it, and nothing of it stays. */
static void a_flood_of_requests_is_refused(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    const uint32_t memories = cuda_fixture.memories;
    uint32_t before;

    ask(&o, EP_ATTACH_REGISTER, 1, 0);
    expect_answer(&o, 1, EP_OK, "");
    before = open_descriptors();
    set_looking(1);
    ask(&o, EP_ATTACH_UNREGISTER, 2, 0);
    for (uint32_t i = 0; i < 1000; i++) {
        ask(&o, i % 2 ? EP_ATTACH_REGISTER : EP_ATTACH_UNREGISTER, 3 + i, i % 3);
        expect_answer(&o, 3 + i, EP_UNAVAILABLE, "not answered yet");
    }
    set_looking(0);
    expect_answer(&o, 2, EP_OK, "");
    assert_int_equal(open_descriptors(), before - 1); /* the region is gone */
    assert_int_equal(cuda_fixture.memories, memories);
    leave(o.s, o.fd);
    free_owner(&o);
}

/* It fills what the server keeps for it, and no more. */
static void a_flood_that_nobody_reads_the_answers_of(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    const struct ep_attach_frame frame = request_of(EP_ATTACH_REGISTER, 1, EP_MAX_REGIONS);
    uint32_t before = open_descriptors();

    shrink(o.s);
    for (uint32_t i = 0; i < 1000; i++) {
        while (ep_attach_send(o.fd, &frame, o.descriptor, NULL) != EP_OK)
            uv_run(&o.s->f->loop, UV_RUN_ONCE);
        uv_run(&o.s->f->loop, UV_RUN_NOWAIT);
    }
    assert_true(o.s->attach->newest->queued < EVENT_QUEUE);
    assert_int_equal(o.s->attach->newest->lost, 0); /* no event */
    assert_int_equal(open_descriptors(), before);
    leave(o.s, o.fd);
    free_owner(&o);
}

static void who_goes_in_a_request_leaves_nothing(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);

    ask(&o, EP_ATTACH_REGISTER, 1, 0);
    expect_answer(&o, 1, EP_OK, "");
    set_looking(1);
    ask(&o, EP_ATTACH_UNREGISTER, 2, 0);
    RUN_UNTIL(o.s->f, o.s->attach->newest->asking);
    close(o.fd);
    RUN_UNTIL(o.s->f, o.s->attach->n_connections == 0);
    RUN_UNTIL(o.s->f, cuda_fixture_serves() == 0);
    free_owner(&o); /* teardown finds that nothing else is left */
}

static void what_is_registered_goes_with_its_worker(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);

    for (uint32_t i = 0; i < EP_MAX_REGIONS; i++) {
        ask(&o, EP_ATTACH_REGISTER, i, i);
        expect_answer(&o, i, EP_OK, "");
    }
    ask(&o, EP_ATTACH_REGISTER, 99, EP_MAX_REGIONS);
    expect_answer(&o, 99, EP_INVALID_ARGUMENT, "region is 64");
    close(o.fd);
    RUN_UNTIL(o.s->f, cuda_fixture_serves() == 0);
    free_owner(&o);
}

static void who_runs_its_own_ops_is_told_so(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_DIRECT);
    uint32_t before = open_descriptors();

    ask(&o, EP_ATTACH_REGISTER, 1, 0);
    expect_answer(&o, 1, EP_UNIMPLEMENTED, "that is for ops that it runs on GPUs");
    ask(&o, EP_ATTACH_UNREGISTER, 2, 0);
    expect_answer(&o, 2, EP_UNIMPLEMENTED, "that is for ops");
    assert_int_equal(open_descriptors(), before);
    leave(o.s, o.fd);
    free_owner(&o);
}

/* The group is gone, and the worker has not let go of its window yet. */
static void a_detached_rank_has_nothing_mapped(void **state)
{
    struct owner o = attach_owner(*state, EP__V1__EXECUTOR__EXECUTOR_SERVER);
    uint32_t before = open_descriptors();
    struct ep_attach_frame event;
    struct answer answer;
    int descriptor;

    answer = delete(o.s->f, "moe", true);
    answer_clear(&answer);
    event = hear(o.s, o.fd, &descriptor);
    assert_int_equal(event.event, EP_ATTACH_DETACHED);
    RUN_UNTIL(o.s->f, cuda_fixture_serves() == 0);
    ask(&o, EP_ATTACH_REGISTER, 1, 0);
    expect_answer(&o, 1, EP_DETACHED, "not attached any more");
    ask(&o, EP_ATTACH_UNREGISTER, 2, 0);
    expect_answer(&o, 2, EP_DETACHED, "not attached any more");
    assert_true(open_descriptors() <= before);
    leave(o.s, o.fd);
    free_owner(&o);
}

static void a_request_before_hello_is_a_bad_frame(void **state)
{
    struct service *s = *state;
    const struct ep_attach_frame frame = request_of(EP_ATTACH_REGISTER, 1, 0);
    int fd = connect_to(s), descriptor;
    uint32_t before = open_descriptors();

    assert_int_equal(ep_attach_send(fd, &frame, fd, NULL), EP_OK);
    assert_int_equal(hear(s, fd, &descriptor).type, EP_ATTACH_REFUSED);
    RUN_UNTIL(s->f, s->attach->n_connections == 0);
    assert_int_equal(s->attach->counters.bad_frames, 1);
    assert_int_equal(open_descriptors(), before - 1); /* the server's end */
    close(fd);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_answer_to_a_claim_names_executor_and_gpu),
        TEST(all_memory_follows_the_welcome),
        TEST(a_served_worker_is_welcomed_with_its_window_only),
        TEST(a_served_worker_that_goes_is_absent_at_once),
        TEST(a_rank_that_cannot_be_served_says_why),
        TEST(what_the_socket_has_no_room_for_follows),
        TEST(no_descriptor_stays_with_the_server),
        TEST(a_worker_that_goes_in_the_middle_is_absent_at_once),
        TEST(a_worker_that_says_bye_in_the_middle_has_left),
        TEST(a_worker_that_does_not_wait_for_its_welcome_has_left),
        TEST(a_worker_may_say_bye_while_it_is_taken_in),
        TEST(memory_that_cannot_be_exported_ends_the_attachment),
        TEST(a_window_that_cannot_be_exported_is_refused_with_the_reason),
        TEST(a_request_is_answered_when_it_is_done),
        TEST(requests_that_make_no_sense_are_answered_too),
        TEST(a_flood_of_requests_is_refused),
        TEST(a_flood_that_nobody_reads_the_answers_of),
        TEST(who_goes_in_a_request_leaves_nothing),
        TEST(what_is_registered_goes_with_its_worker),
        TEST(who_runs_its_own_ops_is_told_so),
        TEST(a_detached_rank_has_nothing_mapped),
        TEST(a_request_before_hello_is_a_bad_frame),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
