/* The services that every server may have: health and reflection. */
#include "rpc_fixture.h"

#include "google/protobuf/descriptor.pb-c.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "grpc/reflection/v1alpha/reflection.pb-c.h"

#define STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name

#define MAX_WATCHES 4

static struct fixture f;

static int up(void **state)
{
    (void)state;
    fixture_init(&f);
    f.health = true;
    f.options.reflection = true;
    f.options.max_watches = MAX_WATCHES;
    fixture_start(&f);
    return 0;
}

static int down(void **state)
{
    (void)state;
    fixture_stop(&f);
    return 0;
}

/* ---- operators ----------------------------------------------------------------------- */

static atomic_int operators_asked, other_peers;

static bool is_operator(const struct ep_rpc_peer *peer, void *user)
{
    atomic_fetch_add(&operators_asked, 1);
    if (!peer || peer->pid != getpid() || peer->uid != getuid())
        atomic_fetch_add(&other_peers, 1);
    return atomic_load((atomic_bool *)user);
}

static void who_is_no_operator_may_only_look(void **state)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct ep_rpc_server_options *options = &f.options;
    static atomic_bool operates; /* asked for until the server has ended */
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    fixture_stop(&f);
    fixture_init(&f);
    f.health = true;
    options->is_operator = is_operator;
    options->operators = "those that the test likes";
    options->user = &operates;
    fixture_start(&f);
    assert_ok(ep_rpc_unary(f.channel, &grpc__health__v1__health__descriptor, "Check", NULL, 0, &request.base,
                           5000, &reply, &error),
              &error);
    protobuf_c_message_free_unpacked(reply, NULL);
    assert_int_equal(atomic_load(&operators_asked), 0);
    assert_int_equal(ping(f.channel, "x", 5000, NULL, &error), EP_PERMISSION_DENIED);
    assert_text(error.text, "/ep.v1.Node/Ping is for operators, and \"uid:");
    assert_text(error.text, "may only look: operators are those that the test likes");
    assert_int_equal(atomic_load(&f.requests), 0);
    atomic_store(&operates, true);
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    assert_int_equal(atomic_load(&operators_asked), 2);
    assert_int_equal(atomic_load(&other_peers), 0);
}

/* ---- health -------------------------------------------------------------------------- */

static ep_status check(const char *service, int *serving, struct ep_error *error)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    ProtobufCMessage *reply;
    ep_status status;

    request.service = (char *)(uintptr_t)service;
    status = ep_rpc_unary(f.channel, &grpc__health__v1__health__descriptor, "Check", NULL, 0,
                          &request.base, 5000, &reply, error);
    if (status == EP_OK) {
        *serving = (int)((Grpc__Health__V1__HealthCheckResponse *)reply)->status;
        protobuf_c_message_free_unpacked(reply, NULL);
    }
    return status;
}

static void serve_all(struct fixture *fx)
{
    ep_rpc_server_set_health(fx->server, "", true);
    ep_rpc_server_set_health(fx->server, "ep.v1.Admin", true);
}

static void stop_admin(struct fixture *fx)
{
    ep_rpc_server_set_health(fx->server, "ep.v1.Admin", false);
}

static void check_follows_the_state(void **state)
{
    struct ep_error error;
    int serving;

    (void)state;
    assert_ok(check("", &serving, &error), &error);
    assert_int_equal(serving, STATUS(NOT_SERVING));
    fixture_run(&f, serve_all);
    assert_ok(check("", &serving, &error), &error);
    assert_int_equal(serving, STATUS(SERVING));
    assert_ok(check("ep.v1.Admin", &serving, &error), &error);
    assert_int_equal(serving, STATUS(SERVING));
}

static void check_of_an_unknown_service_is_not_found(void **state)
{
    struct ep_error error;
    int serving;

    (void)state;
    assert_int_equal(check("no.Such", &serving, &error), EP_NOT_FOUND);
    assert_text(error.text, "no.Such");
}

static struct ep_rpc_stream *watch(const char *service)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct ep_rpc_stream *stream;
    struct ep_error error;

    request.service = (char *)(uintptr_t)service;
    assert_ok(ep_rpc_stream_open(f.channel, &grpc__health__v1__health__descriptor, "Watch", NULL, 0,
                                 &request.base, -1, &stream, &error),
              &error);
    return stream;
}

/* -1: the stream has ended well. */
static int next_state(struct ep_rpc_stream *stream)
{
    ProtobufCMessage *reply;
    struct ep_error error;
    int serving;

    assert_ok(ep_rpc_stream_read(stream, 20000, &reply, &error), &error);
    if (!reply)
        return -1;
    serving = (int)((Grpc__Health__V1__HealthCheckResponse *)reply)->status;
    protobuf_c_message_free_unpacked(reply, NULL);
    return serving;
}

static void watch_tells_every_change(void **state)
{
    struct ep_rpc_stream *stream = watch("ep.v1.Admin");

    (void)state;
    assert_int_equal(next_state(stream), STATUS(SERVICE_UNKNOWN));
    fixture_run(&f, serve_all);
    assert_int_equal(next_state(stream), STATUS(SERVING));
    fixture_run(&f, serve_all); /* no change: nothing is sent */
    fixture_run(&f, stop_admin);
    assert_int_equal(next_state(stream), STATUS(NOT_SERVING));
    ep_rpc_stream_close(stream);
}

static void flap(struct fixture *fx)
{
    for (int i = 0; i < 1000; i++)
        ep_rpc_server_set_health(fx->server, "", i % 2 == 0);
    ep_rpc_server_set_health(fx->server, "", true);
}

/* Whether a watch begins, which ends at once. */
static ep_status try_watch(struct ep_error *error)
{
    struct ep_rpc_stream *stream = watch("");
    ProtobufCMessage *reply;
    ep_status status = ep_rpc_stream_read(stream, 20000, &reply, error);

    if (status == EP_OK)
        protobuf_c_message_free_unpacked(reply, NULL);
    ep_rpc_stream_close(stream);
    return status;
}

static void max_watches_refuses_and_recovers(void **state)
{
    struct ep_rpc_stream *streams[MAX_WATCHES];
    struct ep_error error;
    bool again = false;
    int serving;

    (void)state;
    for (int i = 0; i < MAX_WATCHES; i++) {
        streams[i] = watch("");
        assert_int_equal(next_state(streams[i]), STATUS(NOT_SERVING));
    }
    assert_int_equal(try_watch(&error), EP_RESOURCE_EXHAUSTED);
    assert_text(error.text, "there are 4 watches at this socket");
    assert_ok(check("", &serving, &error), &error); /* other calls are none */
    ep_rpc_stream_close(streams[0]);
    EVENTUALLY(again || (again = try_watch(&error) == EP_OK));
    for (int i = 1; i < MAX_WATCHES; i++)
        ep_rpc_stream_close(streams[i]);
}

static void watch_coalesces_and_ends_with_the_truth(void **state)
{
    struct ep_rpc_stream *stream = watch("");
    int serving = STATUS(NOT_SERVING), messages = 0;

    (void)state;
    assert_int_equal(next_state(stream), STATUS(NOT_SERVING));
    fixture_run(&f, flap);
    fixture_drain(&f, 10000);
    for (int s; (s = next_state(stream)) != -1; messages++)
        serving = s;
    assert_int_equal(serving, STATUS(NOT_SERVING)); /* draining */
    assert_true(messages < 10);
    ep_rpc_stream_close(stream);
}

static void drain_ends_the_watches(void **state)
{
    struct ep_rpc_stream *stream = watch("");

    (void)state;
    assert_int_equal(next_state(stream), STATUS(NOT_SERVING));
    fixture_run(&f, serve_all);
    assert_int_equal(next_state(stream), STATUS(SERVING));
    fixture_drain(&f, 60000);
    assert_int_equal(next_state(stream), STATUS(NOT_SERVING));
    assert_int_equal(next_state(stream), -1);
    EVENTUALLY(atomic_load(&f.drained) == 1); /* long before the grace is over */
    ep_rpc_stream_close(stream);
}

static void watch_left_by_its_client_is_forgotten(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct ep_rpc_stream *stream = watch("");

        (void)next_state(stream);
        ep_rpc_stream_close(stream);
        fixture_run(&f, flap);
    }
}

/* ---- reflection ---------------------------------------------------------------------- */

typedef Grpc__Reflection__V1__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_response;
#define ASK(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name
#define ANSWER(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name

static struct ep_rpc_stream *open_reflection(const ProtobufCServiceDescriptor *service)
{
    struct ep_rpc_stream *stream;
    struct ep_error error;

    assert_ok(ep_rpc_stream_open(f.channel, service, "ServerReflectionInfo", NULL, 0, NULL, 20000,
                                 &stream, &error),
              &error);
    return stream;
}

static reflection_response *ask(struct ep_rpc_stream *stream, int what, const char *text)
{
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    ProtobufCMessage *reply;
    struct ep_error error;

    request.host = (char *)(uintptr_t) "here";
    request.message_request_case =
        (Grpc__Reflection__V1__ServerReflectionRequest__MessageRequestCase)what;
    request.list_services = (char *)(uintptr_t)text; /* a union: all of these are strings */
    assert_ok(ep_rpc_stream_send(stream, &request.base, &error), &error);
    assert_ok(ep_rpc_stream_read(stream, 20000, &reply, &error), &error);
    assert_non_null(reply);
    return (reflection_response *)reply;
}

static void drop(reflection_response *response)
{
    protobuf_c_message_free_unpacked(&response->base, NULL);
}

static bool lists(const reflection_response *r, const char *service)
{
    for (size_t i = 0; i < r->list_services_response->n_service; i++)
        if (strcmp(r->list_services_response->service[i]->name, service) == 0)
            return true;
    return false;
}

static void end_well(struct ep_rpc_stream *stream)
{
    ProtobufCMessage *reply;
    struct ep_error error;

    ep_rpc_stream_half_close(stream);
    assert_ok(ep_rpc_stream_read(stream, 20000, &reply, &error), &error);
    assert_null(reply);
    ep_rpc_stream_close(stream);
}

static void reflection_lists_what_is_served(void **state)
{
    struct ep_rpc_stream *stream =
        open_reflection(&grpc__reflection__v1__server_reflection__descriptor);
    reflection_response *r = ask(stream, ASK(LIST_SERVICES), "*");

    (void)state;
    assert_int_equal(r->message_response_case, ANSWER(LIST_SERVICES_RESPONSE));
    assert_string_equal(r->valid_host, "here");
    assert_true(lists(r, "ep.v1.Admin"));
    assert_true(lists(r, "ep.v1.Node"));
    assert_true(lists(r, "grpc.health.v1.Health"));
    assert_true(lists(r, "grpc.reflection.v1alpha.ServerReflection"));
    assert_false(lists(r, "ep.v1.Attach")); /* in the schema, not on this server */
    drop(r);
    end_well(stream);
}

/* As grpcurl does before a call: the file of a symbol, then the files that it imports. */
static void reflection_gives_the_file_of_a_symbol(void **state)
{
    static const char *const symbols[] = { "ep.v1.Admin", "ep.v1.Admin.GetGroup", "ep.v1.GroupEvent",
                                           "ep.v1.GroupEvent.Type", "ep.v1.NodeState" };
    struct ep_rpc_stream *stream =
        open_reflection(&grpc__reflection__v1__server_reflection__descriptor);

    (void)state;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        reflection_response *r = ask(stream, ASK(FILE_CONTAINING_SYMBOL), symbols[i]);
        Google__Protobuf__FileDescriptorProto *file;

        assert_int_equal(r->message_response_case, ANSWER(FILE_DESCRIPTOR_RESPONSE));
        assert_int_equal(r->file_descriptor_response->n_file_descriptor_proto, 1);
        file = google__protobuf__file_descriptor_proto__unpack(
            NULL, r->file_descriptor_response->file_descriptor_proto[0].len,
            r->file_descriptor_response->file_descriptor_proto[0].data);
        assert_non_null(file);
        assert_string_equal(file->name, "ep/v1/admin.proto");
        assert_string_equal(file->dependency[0], "ep/v1/common.proto");
        google__protobuf__file_descriptor_proto__free_unpacked(file, NULL);
        drop(r);
    }

    reflection_response *r = ask(stream, ASK(FILE_BY_FILENAME), "ep/v1/common.proto");

    assert_int_equal(r->message_response_case, ANSWER(FILE_DESCRIPTOR_RESPONSE));
    drop(r);
    end_well(stream);
}

static void reflection_says_what_it_does_not_have(void **state)
{
    static const char *const names[] = { "ep.v1", "ep.v1.Nothing", "ep.v1.Admin.Nothing", "", "." };
    struct ep_rpc_stream *stream =
        open_reflection(&grpc__reflection__v1__server_reflection__descriptor);

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        reflection_response *r = ask(stream, ASK(FILE_CONTAINING_SYMBOL), names[i]);

        assert_int_equal(r->message_response_case, ANSWER(ERROR_RESPONSE));
        assert_int_equal(r->error_response->error_code, 5);
        drop(r);
    }
    end_well(stream);
}

static void reflection_v1alpha_is_the_same_on_the_wire(void **state)
{
    Grpc__Reflection__V1alpha__ServerReflectionRequest request =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
    struct ep_rpc_stream *stream =
        open_reflection(&grpc__reflection__v1alpha__server_reflection__descriptor);
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    request.message_request_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES;
    request.list_services = (char *)(uintptr_t) "";
    assert_ok(ep_rpc_stream_send(stream, &request.base, &error), &error);
    assert_ok(ep_rpc_stream_read(stream, 20000, &reply, &error), &error);
    assert_int_equal(
        ((Grpc__Reflection__V1alpha__ServerReflectionResponse *)reply)->message_response_case,
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE);
    protobuf_c_message_free_unpacked(reply, NULL);
    end_well(stream);
}

static void sending_after_the_end_says_so(void **state)
{
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    struct ep_rpc_stream *stream =
        open_reflection(&grpc__reflection__v1__server_reflection__descriptor);
    struct ep_error error;

    (void)state;
    ep_rpc_stream_half_close(stream);
    assert_int_equal(ep_rpc_stream_send(stream, &request.base, &error), EP_FAILED_PRECONDITION);
    ep_rpc_stream_close(stream);

    stream = open_reflection(&grpc__reflection__v1__server_reflection__descriptor);
    ep_rpc_stream_cancel(stream);
    EVENTUALLY(ep_rpc_stream_send(stream, &request.base, &error) == EP_UNAVAILABLE);
    ep_rpc_stream_close(stream);
}

/* ---- registration -------------------------------------------------------------------- */

static struct ep_error words;
static ep_status result;

static void noop(struct ep_rpc_call *call, const ProtobufCMessage *request, void *user)
{
    (void)call;
    (void)request;
    (void)user;
}

static void add_with(struct fixture *fx, const struct ep_rpc_handler *handlers, size_t n)
{
    struct ep_rpc_server *server;

    result = ep_rpc_server_create(fx->rpc, NULL, &server, &words);
    if (result != EP_OK)
        return;
    result = ep_rpc_server_add_service(server, &grpc__health__v1__health__descriptor, handlers, n,
                                       NULL, &words);
    ep_rpc_server_destroy(server);
}

static void add_too_few(struct fixture *fx)
{
    static const struct ep_rpc_handler handlers[] = { { .method = "Check", .on_request = noop } };

    add_with(fx, handlers, 1);
}

static void add_unknown(struct fixture *fx)
{
    static const struct ep_rpc_handler handlers[] = { { .method = "Check", .on_request = noop },
                                                      { .method = "Look", .on_request = noop } };

    add_with(fx, handlers, 2);
}

static void handlers_must_match_the_service(void **state)
{
    (void)state;
    fixture_run(&f, add_too_few);
    assert_int_equal(result, EP_INVALID_ARGUMENT);
    assert_text(words.text, "grpc.health.v1.Health/Watch");
    fixture_run(&f, add_unknown);
    assert_int_equal(result, EP_INVALID_ARGUMENT);
    assert_text(words.text, "Look");
}

#define T(name) cmocka_unit_test_setup_teardown(name, up, down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(who_is_no_operator_may_only_look),
        T(check_follows_the_state),
        T(check_of_an_unknown_service_is_not_found),
        T(watch_tells_every_change),
        T(max_watches_refuses_and_recovers),
        T(watch_coalesces_and_ends_with_the_truth),
        T(drain_ends_the_watches),
        T(watch_left_by_its_client_is_forgotten),
        T(reflection_lists_what_is_served),
        T(reflection_gives_the_file_of_a_symbol),
        T(reflection_says_what_it_does_not_have),
        T(reflection_v1alpha_is_the_same_on_the_wire),
        T(sending_after_the_end_says_so),
        T(handlers_must_match_the_service),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
