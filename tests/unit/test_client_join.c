/*
 * Opening a client and joining a group, where that goes wrong.  The server is played by the test: claims are answered
 * here (call_server is wrapped), and a thread is at the other end of the side socket.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "client_private.h"
#include "temporary.h"

enum { PATIENCE_MS = 40000, EPOCH = 3 }; /* with what should be there at once */

/* What the server does with HELLO. */
enum answer { SAYS_NOTHING, WINDOW_TOO_SHORT, WINDOW_OF_ANOTHER, REFUSES };

struct fixture {
    char directory[64], socket[80];
    int listener;
    struct ep_client *client;
    struct ep_layout_map map;

    enum answer answer;
    pthread_t server;
    struct ep_attach_frame last; /* the worker's, before it closed its end; type 0: there was none after HELLO */
};

static struct fixture *fixture;

static void refused(ep_status status, ep_status expected, const char *text)
{
    if (!strstr(ep_error_message(), text))
        fail_msg("\"%s\" does not say \"%s\"", ep_error_message(), text);
    assert_int_equal(status, expected);
}

/* ---- addresses ---------------------------------------------------------------------- */

/* Of a socket that is not there, with a path of so many bytes. */
static ep_status open_path(size_t bytes)
{
    const ep_client_options options = { .size = sizeof options, .timeout_ms = PATIENCE_MS };
    char address[1024] = "unix:/tmp/";
    ep_client *client = NULL;
    ep_status status;

    memset(address + strlen(address), 'a', bytes - strlen("/tmp/"));
    status = ep_client_open(address, &options, &client);
    assert_null(client);
    return status;
}

static void a_path_that_no_socket_has_is_refused(void **state)
{
    static const size_t too_many[] = { 108, 109, 500, 510, 1000 };

    (void)state;
    refused(open_path(107), EP_UNAVAILABLE, "");
    for (size_t i = 0; i < sizeof too_many / sizeof *too_many; i++) {
        char text[64];

        snprintf(text, sizeof text, "address has a path of %zu bytes", too_many[i]);
        refused(open_path(too_many[i]), EP_INVALID_ARGUMENT, text);
    }
    refused(ep_client_open("unix:", NULL, &(ep_client *){ NULL }), EP_INVALID_ARGUMENT, "must be unix:PATH");
}

static void a_size_that_no_struct_has_is_refused(void **state)
{
    static const size_t wrong[] = { 0, 7, offsetof(ep_client_options, name) + 1, sizeof(ep_client_options) + 4,
                                    SIZE_MAX / 8 * 8, SIZE_MAX };
    ep_client_options options = { .name = "worker" };

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        options.size = wrong[i];
        refused(ep_client_open("unix:/tmp/none", &options, &(ep_client *){ NULL }), EP_INVALID_ARGUMENT,
                "set it to sizeof(ep_client_options)");
    }
}

/* Elsewhere that is a wait without a bound; here it would have been one of 5 s. */
static void a_bound_below_zero_is_refused(void **state)
{
    const ep_client_options options = { .size = sizeof options, .timeout_ms = -1 };

    (void)state;
    refused(ep_client_open("unix:/tmp/none", &options, &(ep_client *){ NULL }), EP_INVALID_ARGUMENT,
            "ep_client_options.timeout_ms is -1: must be at least 1, or 0 for 5000");
}

/* ---- the server's part -------------------------------------------------------------- */

static void listen_at(struct fixture *f)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    assert_true(temporary_directory(f->directory, sizeof f->directory));
    snprintf(f->socket, sizeof f->socket, "%s/side", f->directory);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", f->socket);
    f->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(f->listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(f->listener, 1), 0);
}

static void welcome(const struct fixture *f, int socket)
{
    const uint64_t bytes = f->answer == WINDOW_TOO_SHORT ? 4096 : f->map.total_bytes;
    int fd = memfd_create("window", MFD_CLOEXEC);
    struct ep_attach_frame frame;

    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    ep_attach_frame_init(&frame, EP_ATTACH_WELCOME);
    frame.epoch = EPOCH;
    frame.value = f->map.total_bytes;
    assert_int_equal(ep_attach_send(socket, &frame, fd, NULL), EP_OK);
    close(fd);
}

static void refuse(int socket)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_REFUSED);
    frame.status = EP_RESOURCE_EXHAUSTED;
    snprintf(frame.text, sizeof frame.text, "the GPU is full");
    assert_int_equal(ep_attach_send(socket, &frame, -1, NULL), EP_OK);
}

static void *serve(void *arg)
{
    struct fixture *f = arg;
    struct ep_attach_frame frame;
    int socket = accept(f->listener, NULL, NULL), fd;

    assert_int_equal(ep_attach_receive(socket, &frame, &fd, NULL), EP_OK);
    assert_int_equal(frame.type, EP_ATTACH_HELLO);
    if (f->answer == REFUSES)
        refuse(socket);
    else if (f->answer != SAYS_NOTHING)
        welcome(f, socket);
    while (ep_attach_receive(socket, &frame, &fd, NULL) == EP_OK)
        f->last = frame;
    close(socket);
    return NULL;
}

ep_status __wrap_call_server(struct ep_client *client, const char *method, const ProtobufCMessage *request,
                             ProtobufCMessage **reply, struct ep_error *error);

/* As it comes from the wire. */
static ProtobufCMessage *unpacked(const ProtobufCMessage *message)
{
    uint8_t bytes[1024];

    assert_true(protobuf_c_message_get_packed_size(message) <= sizeof bytes);
    return protobuf_c_message_unpack(message->descriptor, NULL, protobuf_c_message_pack(message, bytes), bytes);
}

ep_status __wrap_call_server(struct ep_client *client, const char *method, const ProtobufCMessage *request,
                             ProtobufCMessage **reply, struct ep_error *error)
{
    Ep__V1__ClaimReply claim = EP__V1__CLAIM_REPLY__INIT;
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;
    uint8_t ticket[EP_ATTACH_TICKET_BYTES] = { 7 };
    Ep__V1__Mode modes[] = { (Ep__V1__Mode)EP_MODE_LL };
    Ep__V1__Dtype dtypes[] = { (Ep__V1__Dtype)EP_BF16 };

    (void)client, (void)request, (void)error;
    assert_string_equal(method, "Claim");
    spec.ranks = fixture->map.limits.ranks;
    spec.experts = fixture->map.limits.experts;
    spec.top_k = fixture->map.limits.top_k;
    spec.hidden = fixture->map.limits.hidden;
    spec.arena_bytes = fixture->map.limits.arena_bytes;
    spec.modes = modes;
    spec.dtypes = dtypes;
    spec.n_modes = spec.n_dtypes = 1;
    spec.ll_max_tokens = fixture->map.limits.ll_max_tokens;
    spec.ll_banks = fixture->map.limits.ll_banks;
    claim.ticket = (ProtobufCBinaryData){ .len = sizeof ticket, .data = ticket };
    claim.ticket_ms = 5000;
    claim.socket = fixture->socket;
    claim.epoch = EPOCH;
    claim.spec = &spec;
    claim.window_bytes = fixture->map.total_bytes;
    claim.backend = EP__V1__BACKEND__BACKEND_HOST;
    claim.executor = EP__V1__EXECUTOR__EXECUTOR_SERVER;
    *reply = unpacked(&claim.base);
    assert_non_null(*reply);
    return EP_OK;
}

/* ---- the client --------------------------------------------------------------------- */

static int make(void **state)
{
    struct fixture *f = fixture = calloc(1, sizeof *f);
    const struct ep_limits limits = { .ranks = 2, .experts = 4, .local_experts = 2, .top_k = 2, .hidden = 64,
                                      .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 4,
                                      .ll_banks = 2, .arena_bytes = 1 << 16 };
    struct ep_error error = EP_ERROR_INIT;

    listen_at(f);
    assert_int_equal(ep_layout_compute(&limits, &f->map, &error), EP_OK);
    f->client = calloc(1, sizeof *f->client);
    f->client->timeout_ms = PATIENCE_MS;
    f->client->path = strdup(f->socket);
    following_init(f->client);
    assert_int_equal(monitor_start(f->client, &error), EP_OK);
    *state = f;
    return 0;
}

static int destroy(void **state)
{
    struct fixture *f = *state;

    ep_client_close(f->client);
    close(f->listener);
    unlink(f->socket);
    rmdir(f->directory);
    free(f);
    return 0;
}

/* A join that fails when HELLO has gone out. */
static void join(struct fixture *f, enum answer answer, ep_status expected, const char *text)
{
    const ep_join_options options = { .size = sizeof options, .group = "moe" };
    ep_rank *rank = NULL;

    f->answer = answer;
    assert_int_equal(pthread_create(&f->server, NULL, serve, f), 0);
    refused(ep_join(f->client, &options, &rank), expected, text);
    assert_null(rank);
    pthread_join(f->server, NULL); /* the connection is closed */
}

/* Else the server would keep the rank from everybody until this process ends: it may have mapped the window. */
static void a_join_that_fails_says_bye(void **state)
{
    struct fixture *f = *state;

    join(f, WINDOW_TOO_SHORT, EP_PROTOCOL, "the window has 4096 bytes");
    assert_int_equal(f->last.type, EP_ATTACH_BYE);
}

static void a_join_that_fails_with_its_window_mapped_says_bye(void **state)
{
    struct fixture *f = *state;

    join(f, WINDOW_OF_ANOTHER, EP_PROTOCOL, "the window of rank 0 has version 0");
    assert_int_equal(f->last.type, EP_ATTACH_BYE);
    assert_int_equal(f->last.epoch, 0);
}

static void a_join_that_is_not_answered_says_bye(void **state)
{
    struct fixture *f = *state;

    f->client->timeout_ms = 50;
    join(f, SAYS_NOTHING, EP_DEADLINE_EXCEEDED, "does not answer on its side socket");
    assert_int_equal(f->last.type, EP_ATTACH_BYE);
}

static void a_join_that_is_refused_tells_why(void **state)
{
    join(*state, REFUSES, EP_RESOURCE_EXHAUSTED, "the GPU is full");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_path_that_no_socket_has_is_refused),
        cmocka_unit_test(a_size_that_no_struct_has_is_refused),
        cmocka_unit_test(a_bound_below_zero_is_refused),
        cmocka_unit_test_setup_teardown(a_join_that_fails_says_bye, make, destroy),
        cmocka_unit_test_setup_teardown(a_join_that_fails_with_its_window_mapped_says_bye, make, destroy),
        cmocka_unit_test_setup_teardown(a_join_that_is_not_answered_says_bye, make, destroy),
        cmocka_unit_test_setup_teardown(a_join_that_is_refused_tells_why, make, destroy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
