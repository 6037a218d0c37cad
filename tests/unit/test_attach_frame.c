/* Frames of the side socket: what parses, what does not, and descriptors on the way. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "attach_frame.h"

static struct ep_attach_frame valid(enum ep_attach_type type)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, type);
    frame.status = type == EP_ATTACH_REFUSED ? EP_NOT_FOUND : EP_OK;
    frame.event = type == EP_ATTACH_EVENT ? EP_ATTACH_DRAINING : 0;
    frame.value = type == EP_ATTACH_WELCOME || type == EP_ATTACH_MEMORY || type == EP_ATTACH_REGISTER ? 4096 : 0;
    frame.count = type == EP_ATTACH_MEMORY ? EP_ATTACH_MEMORY_WINDOW : 0;
    frame.offset = type == EP_ATTACH_REGISTER ? 512 : 0;
    frame.region = type == EP_ATTACH_REGISTER || type == EP_ATTACH_UNREGISTER ? 63 : 0;
    frame.epoch = type == EP_ATTACH_ASK || type == EP_ATTACH_PROMISE || type == EP_ATTACH_TURN ? 2 : 0;
    strcpy(frame.text, "text");
    return frame;
}

static void expect(const struct ep_attach_frame *frame, ep_status status, const char *field)
{
    struct ep_attach_frame parsed;
    struct ep_error error = EP_ERROR_INIT;

    memset(&parsed, 0xa5, sizeof parsed);
    assert_int_equal(ep_attach_frame_parse(frame, sizeof *frame, &parsed, &error), status);
    if (status == EP_OK) {
        assert_memory_equal(&parsed, frame, sizeof parsed);
    } else {
        assert_non_null(strstr(error.text, field));
        for (size_t i = 0; i < sizeof parsed; i++)
            assert_int_equal(((uint8_t *)&parsed)[i], 0xa5); /* untouched */
    }
}

static void every_type_parses(void **state)
{
    (void)state;
    for (int type = EP_ATTACH_HELLO; type <= EP_ATTACH_TURN; type++) {
        struct ep_attach_frame frame = valid((enum ep_attach_type)type);

        expect(&frame, EP_OK, "");
    }
}

static void every_length_but_the_right_one_is_refused(void **state)
{
    uint8_t bytes[sizeof(struct ep_attach_frame) + 64] = { 0 };
    const struct ep_attach_frame frame = valid(EP_ATTACH_HELLO);
    struct ep_attach_frame parsed;

    (void)state;
    memcpy(bytes, &frame, sizeof frame);
    for (size_t n = 0; n <= sizeof bytes; n++) {
        struct ep_error error = EP_ERROR_INIT;
        ep_status status = ep_attach_frame_parse(bytes, n, &parsed, &error);

        assert_int_equal(status, n == sizeof frame ? EP_OK : EP_PROTOCOL);
        if (status != EP_OK)
            assert_non_null(strstr(error.text, "bytes"));
    }
}

static void every_other_type_is_refused(void **state)
{
    (void)state;
    for (unsigned type = 0; type <= UINT16_MAX; type++) {
        struct ep_attach_frame frame = valid(EP_ATTACH_HELLO);

        frame.type = (uint16_t)type;
        if (type < EP_ATTACH_HELLO || type > EP_ATTACH_TURN)
            expect(&frame, EP_PROTOCOL, "type");
    }
}

static void bad_fields_are_named(void **state)
{
    struct ep_attach_frame frame = valid(EP_ATTACH_HELLO);

    (void)state;
    frame.magic ^= 1u << 7;
    expect(&frame, EP_PROTOCOL, "magic");
    frame = valid(EP_ATTACH_HELLO);
    frame.version = EP_ATTACH_VERSION + 1;
    expect(&frame, EP_PROTOCOL, "version");
    frame = valid(EP_ATTACH_HELLO);
    frame.count = 1;
    expect(&frame, EP_PROTOCOL, "count");
    frame = valid(EP_ATTACH_HELLO);
    frame.offset = 1;
    expect(&frame, EP_PROTOCOL, "offset");
    frame = valid(EP_ATTACH_HELLO);
    frame.region = 1;
    expect(&frame, EP_PROTOCOL, "region");
    frame = valid(EP_ATTACH_HELLO);
    frame.reserved = 1;
    expect(&frame, EP_PROTOCOL, "reserved");
    frame = valid(EP_ATTACH_HELLO);
    memset(frame.text, 'x', sizeof frame.text);
    expect(&frame, EP_PROTOCOL, "text");
    frame.text[sizeof frame.text - 1] = '\0';
    expect(&frame, EP_OK, "");
}

static void fields_must_fit_the_type(void **state)
{
    struct ep_attach_frame frame = valid(EP_ATTACH_WELCOME);

    (void)state;
    frame.value = 0;
    expect(&frame, EP_PROTOCOL, "value");
    frame = valid(EP_ATTACH_REFUSED);
    frame.status = EP_OK;
    expect(&frame, EP_PROTOCOL, "status");
    frame.status = 9999;
    expect(&frame, EP_PROTOCOL, "status");
    frame = valid(EP_ATTACH_EVENT);
    for (uint32_t event = 0; event < 100; event++) {
        bool known = event >= EP_ATTACH_RANK_LOST && event <= EP_ATTACH_EVENTS_LOST;

        frame.event = event;
        expect(&frame, known ? EP_OK : EP_PROTOCOL, "event");
    }
    frame = valid(EP_ATTACH_MEMORY);
    frame.count = 0;
    expect(&frame, EP_PROTOCOL, "count");
    frame.count = EP_ATTACH_MEMORY_WINDOW + 1;
    expect(&frame, EP_PROTOCOL, "count");
    frame = valid(EP_ATTACH_MEMORY);
    frame.value = 0;
    expect(&frame, EP_PROTOCOL, "value");
}

static void requests_and_their_answers_are_numbered(void **state)
{
    struct ep_attach_frame frame = valid(EP_ATTACH_REGISTER);

    (void)state;
    frame.count = UINT32_MAX;
    frame.region = UINT32_MAX; /* whether there is such a one is not for the frame to say */
    expect(&frame, EP_OK, "");
    frame.value = 0;
    expect(&frame, EP_PROTOCOL, "value");
    frame = valid(EP_ATTACH_UNREGISTER);
    frame.count = 7;
    expect(&frame, EP_OK, "");
    frame.offset = 16;
    expect(&frame, EP_PROTOCOL, "offset");
    frame = valid(EP_ATTACH_ANSWER);
    frame.count = 7;
    frame.status = EP_NOT_FOUND;
    expect(&frame, EP_OK, "");
    frame.status = 9999;
    expect(&frame, EP_PROTOCOL, "status");
}

static void frames_of_a_turn_say_which_epoch_and_where(void **state)
{
    struct ep_attach_frame frame = valid(EP_ATTACH_ASK);

    (void)state;
    frame.count = 7;
    frame.value = EP_ATTACH_NO_TURN;
    expect(&frame, EP_OK, "");
    frame.epoch = 0;
    expect(&frame, EP_PROTOCOL, "epoch");
    frame = valid(EP_ATTACH_ASK);
    frame.offset = 1;
    expect(&frame, EP_PROTOCOL, "offset");
    frame = valid(EP_ATTACH_PROMISE);
    frame.count = 7;
    frame.value = 11;
    frame.offset = 12;
    expect(&frame, EP_OK, "");
    frame.status = EP_ABORTED;
    expect(&frame, EP_OK, "");
    frame.status = EP_TIMEOUT;
    expect(&frame, EP_PROTOCOL, "status");
    frame = valid(EP_ATTACH_PROMISE);
    frame.epoch = 0;
    expect(&frame, EP_PROTOCOL, "epoch");
    frame = valid(EP_ATTACH_PROMISE);
    frame.offset = 12;
    frame.value = 13; /* the boundary there is passed */
    expect(&frame, EP_OK, "");
    frame.value = 14;
    expect(&frame, EP_PROTOCOL, "frame offset is 12, its value 14");
    frame.offset = EP_ATTACH_FURTHEST;
    expect(&frame, EP_OK, "");
    frame.offset = EP_ATTACH_FURTHEST + 1;
    expect(&frame, EP_PROTOCOL, "offset is 72057594037927937");
    frame.offset = frame.value = UINT64_MAX;
    expect(&frame, EP_PROTOCOL, "offset");
    frame = valid(EP_ATTACH_TURN);
    frame.value = 12;
    expect(&frame, EP_OK, "");
    frame.count = 1;
    expect(&frame, EP_PROTOCOL, "count");
    frame = valid(EP_ATTACH_TURN);
    frame.value = EP_ATTACH_NO_TURN;
    expect(&frame, EP_PROTOCOL, "value");
    frame.epoch = 0;
    expect(&frame, EP_PROTOCOL, "epoch");
    frame = valid(EP_ATTACH_WELCOME);
    frame.offset = 12; /* the position at which it begins */
    frame.ht = 12;
    expect(&frame, EP_OK, "");
    frame.ht = 13;
    expect(&frame, EP_PROTOCOL, "ht is 13");
    frame = valid(EP_ATTACH_EVENT);
    frame.ht = 1;
    expect(&frame, EP_PROTOCOL, "ht is 1");
}

/* Every single flipped bit: parses to what was sent, or is refused. */
static void no_flipped_bit_confuses(void **state)
{
    (void)state;
    for (size_t bit = 0; bit < sizeof(struct ep_attach_frame) * 8; bit++) {
        struct ep_attach_frame frame = valid(EP_ATTACH_EVENT), parsed;
        ep_status status;

        ((uint8_t *)&frame)[bit / 8] ^= (uint8_t)(1u << bit % 8);
        status = ep_attach_frame_parse(&frame, sizeof frame, &parsed, NULL);
        assert_true(status == EP_OK || status == EP_PROTOCOL);
        if (status == EP_OK)
            assert_memory_equal(&parsed, &frame, sizeof frame);
        if (bit < 64) /* magic, version: never */
            assert_true(status == EP_PROTOCOL || bit >= 48);
    }
}

/* ---- on a socket ------------------------------------------------------------------------- */

static void make_pair(int pair[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
}

static int count_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* What attach_frame.c would not send: any bytes with any descriptors. */
static void send_raw(int socket, const void *bytes, size_t n, const int *fds, size_t n_fds)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * 32)];
        struct cmsghdr align;
    } control;
    struct iovec part = { .iov_base = (void *)bytes, .iov_len = n };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

    memset(&control, 0, sizeof control);
    if (n_fds) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * n_fds);
    }
    assert_int_equal(sendmsg(socket, &message, MSG_NOSIGNAL), (ssize_t)n);
}

static void a_frame_travels(void **state)
{
    const struct ep_attach_frame sent = valid(EP_ATTACH_EVENT);
    struct ep_attach_frame got;
    int pair[2], fd = 77;

    (void)state;
    make_pair(pair);
    assert_int_equal(ep_attach_send(pair[0], &sent, -1, NULL), EP_OK);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_OK);
    assert_memory_equal(&got, &sent, sizeof got);
    assert_int_equal(fd, -1);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_UNAVAILABLE);
    close(pair[0]);
    close(pair[1]);
}

static void a_descriptor_travels_and_is_close_on_exec(void **state)
{
    const struct ep_attach_frame sent = valid(EP_ATTACH_WELCOME);
    struct ep_attach_frame got;
    int pair[2], pipe_fds[2], fd = -1;
    char c = 0;

    (void)state;
    make_pair(pair);
    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(ep_attach_send(pair[0], &sent, pipe_fds[1], NULL), EP_OK);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_OK);
    assert_true(fd >= 0);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(write(fd, "x", 1), 1);
    assert_int_equal(read(pipe_fds[0], &c, 1), 1);
    assert_int_equal(c, 'x');
    close(fd);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    close(pair[0]);
    close(pair[1]);
}

/* The frame is as good as any: it is this side that cannot have what came with it. */
static void a_descriptor_that_finds_no_room_is_told_from_none(void **state)
{
    const struct ep_attach_frame sent = valid(EP_ATTACH_WELCOME);
    struct ep_attach_frame got;
    struct rlimit before, full;
    int pair[2], fd = -1, next;

    (void)state;
    make_pair(pair);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    next = dup(pair[0]);
    assert_true(next >= 0 && close(next) == 0);
    full = (struct rlimit){ (rlim_t)next, before.rlim_max };
    assert_int_equal(ep_attach_send(pair[0], &sent, pair[0], NULL), EP_OK);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &full), 0);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_OK);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(fd, EP_ATTACH_FD_LOST);
    assert_int_equal(got.type, EP_ATTACH_WELCOME);
    close(pair[0]);
    close(pair[1]);
}

static void surplus_descriptors_are_closed(void **state)
{
    const struct ep_attach_frame sent = valid(EP_ATTACH_WELCOME);
    struct ep_attach_frame got;
    int pair[2], fds[32], fd;

    (void)state;
    make_pair(pair);
    for (int i = 0; i < 32; i++)
        fds[i] = pair[0];
    for (size_t n = 0; n <= 32; n++) {
        int before = count_fds();

        send_raw(pair[0], &sent, sizeof sent, fds, n);
        assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_OK);
        assert_int_equal(fd >= 0, n > 0);
        if (fd >= 0)
            close(fd);
        assert_int_equal(count_fds(), before);
    }
    close(pair[0]);
    close(pair[1]);
}

static void descriptors_with_garbage_are_closed(void **state)
{
    struct ep_attach_frame got;
    const char garbage[] = "this is no frame";
    uint8_t large[sizeof got + 1] = { 0 };
    int pair[2], fds[3], fd, before;

    (void)state;
    make_pair(pair);
    fds[0] = fds[1] = fds[2] = pair[0];
    before = count_fds();
    send_raw(pair[0], garbage, sizeof garbage, fds, 3);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_PROTOCOL);
    assert_int_equal(fd, -1);
    send_raw(pair[0], large, sizeof large, fds, 1);
    assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_PROTOCOL);
    assert_int_equal(fd, -1);
    assert_int_equal(count_fds(), before);
    close(pair[0]);
    close(pair[1]);
}

static void every_truncated_length_is_refused(void **state)
{
    const struct ep_attach_frame sent = valid(EP_ATTACH_HELLO);
    struct ep_attach_frame got;
    int pair[2], fd;

    (void)state;
    make_pair(pair);
    for (size_t n = 1; n < sizeof sent; n++) {
        send_raw(pair[0], &sent, n, NULL, 0);
        assert_int_equal(ep_attach_receive(pair[1], &got, &fd, NULL), EP_PROTOCOL);
    }
    close(pair[0]);
    close(pair[1]);
}

static void a_closed_socket_is_a_lost_server_and_no_signal(void **state)
{
    const struct ep_attach_frame frame = valid(EP_ATTACH_BYE);
    struct ep_attach_frame got;
    int pair[2], fd;

    (void)state;
    make_pair(pair);
    close(pair[1]);
    assert_int_equal(ep_attach_send(pair[0], &frame, -1, NULL), EP_SERVER_LOST);
    assert_int_equal(ep_attach_receive(pair[0], &got, &fd, NULL), EP_SERVER_LOST);
    close(pair[0]);
}

/* The server answers REFUSED and closes with something of ours unread: the answer still arrives. */
static void a_refusal_survives_the_reset(void **state)
{
    const struct ep_attach_frame refused = valid(EP_ATTACH_REFUSED), hello = valid(EP_ATTACH_HELLO);
    struct ep_attach_frame got;
    int pair[2], fd;

    (void)state;
    make_pair(pair);
    assert_int_equal(ep_attach_send(pair[0], &hello, -1, NULL), EP_OK);
    assert_int_equal(ep_attach_send(pair[1], &refused, -1, NULL), EP_OK);
    close(pair[1]);
    assert_int_equal(ep_attach_receive(pair[0], &got, &fd, NULL), EP_OK);
    assert_int_equal(got.type, EP_ATTACH_REFUSED);
    assert_int_equal(ep_attach_receive(pair[0], &got, &fd, NULL), EP_SERVER_LOST);
    close(pair[0]);
}

static void a_full_socket_would_block(void **state)
{
    const struct ep_attach_frame frame = valid(EP_ATTACH_EVENT);
    struct ep_error error = EP_ERROR_INIT;
    int pair[2], sent = 0;

    (void)state;
    make_pair(pair);
    while (ep_attach_send(pair[0], &frame, -1, &error) == EP_OK)
        assert_true(++sent < 1000000);
    assert_int_equal(error.status, EP_UNAVAILABLE);
    assert_true(sent > 0);
    close(pair[0]);
    close(pair[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_parses),
        cmocka_unit_test(every_length_but_the_right_one_is_refused),
        cmocka_unit_test(every_other_type_is_refused),
        cmocka_unit_test(bad_fields_are_named),
        cmocka_unit_test(fields_must_fit_the_type),
        cmocka_unit_test(requests_and_their_answers_are_numbered),
        cmocka_unit_test(frames_of_a_turn_say_which_epoch_and_where),
        cmocka_unit_test(no_flipped_bit_confuses),
        cmocka_unit_test(a_frame_travels),
        cmocka_unit_test(a_descriptor_travels_and_is_close_on_exec),
        cmocka_unit_test(a_descriptor_that_finds_no_room_is_told_from_none),
        cmocka_unit_test(surplus_descriptors_are_closed),
        cmocka_unit_test(descriptors_with_garbage_are_closed),
        cmocka_unit_test(every_truncated_length_is_refused),
        cmocka_unit_test(a_closed_socket_is_a_lost_server_and_no_signal),
        cmocka_unit_test(a_refusal_survives_the_reset),
        cmocka_unit_test(a_full_socket_would_block),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
