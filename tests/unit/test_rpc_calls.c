/* Calls: unary, streams, their ends, and the drain of a server. */
#include "rpc_fixture.h"

#include <signal.h>
#include <sys/wait.h>

#include "ep_message.h"
#include "grpc/health/v1/health.pb-c.h"

static struct fixture f;

static int up(void **state)
{
    (void)state;
    fixture_init(&f);
    f.options.max_message_bytes = 64 << 10;
    fixture_start(&f);
    return 0;
}

static int down(void **state)
{
    (void)state;
    fixture_stop(&f);
    return 0;
}

/* ---- no memory ----------------------------------------------------------------------- */

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);

static _Thread_local int no_calloc, no_malloc; /* so many of this thread's */

static bool fails(int *left)
{
    if (*left == 0)
        return false;
    --*left;
    return true;
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails(&no_calloc) ? NULL : __real_calloc(n, size);
}

void *__wrap_malloc(size_t size)
{
    return fails(&no_malloc) ? NULL : __real_malloc(size);
}

static void lose_a_call(struct fixture *fx)
{
    (void)fx;
    no_calloc = 1;
}

static void lose_a_request(struct fixture *fx)
{
    (void)fx;
    no_malloc = 1;
}

/* ---- unary --------------------------------------------------------------------------- */

static void unary_answers(void **state)
{
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ping(f.channel, "hello", 5000, answer, &error), &error);
    assert_string_equal(answer, "hello");
    EVENTUALLY(atomic_load(&f.closed) == 1);
}

static void unary_error_keeps_status_and_words(void **state)
{
    struct ep_error error;

    (void)state;
    assert_int_equal(ping(f.channel, "fail", 5000, NULL, &error), EP_TIMEOUT);
    assert_int_equal(error.status, EP_TIMEOUT);
    assert_string_equal(error.text, "rank 3 was late by \"5\" ms \xc3\xa4");
}

static void unary_deadline_names_target_and_bound(void **state)
{
    struct ep_error error;

    (void)state;
    assert_int_equal(ping(f.channel, "hold", 100, NULL, &error), EP_DEADLINE_EXCEEDED);
    assert_text(error.text, f.unix_target);
    assert_text(error.text, "100 ms");
    /* The server is told, unless the deadline was over before its handler ran. */
    EVENTUALLY(atomic_load(&f.closed) == atomic_load(&f.requests));
}

static void a_method_outlives_a_call_without_memory(void **state)
{
    struct ep_error error;

    (void)state;
    assert_ok(ping(f.channel, "hello", 5000, NULL, &error), &error);
    fixture_run(&f, lose_a_call);
    assert_int_equal(ping(f.channel, "hello", 5000, NULL, &error), EP_NO_MEMORY);
    assert_text(error.text, "no memory for one call more");
    assert_ok(ping(f.channel, "hello", 5000, NULL, &error), &error);
    assert_ok(ping(f.channel, "hello", 5000, NULL, &error), &error);
}

static void a_message_without_memory_is_not_called_invalid(void **state)
{
    struct ep_error error;

    (void)state;
    assert_ok(ping(f.channel, "hello", 5000, NULL, &error), &error);
    fixture_run(&f, lose_a_request);
    assert_int_equal(ping(f.channel, "hello", 5000, NULL, &error), EP_NO_MEMORY);
    assert_text(error.text, "no memory for the request");
    no_malloc = 1;
    assert_int_equal(ping(f.channel, "hello", 5000, NULL, &error), EP_NO_MEMORY);
    assert_text(error.text, "no memory for the answer");
    assert_ok(ping(f.channel, "hello", 5000, NULL, &error), &error);
}

/* Else what the store has would be taken for damaged. */
static void a_stored_message_without_memory_ends_the_process(void **state)
{
    static const uint8_t node[] = { 1 << 3 | 2, 1, 'a' }, damaged[] = { 1 << 3 | 2, 9, 'a' };
    ProtobufCMessage *message;
    int status;
    pid_t pid;

    (void)state;
    message = ep_message_unpack(&ep__v1__ping_request__descriptor, sizeof node, node);
    assert_non_null(message);
    protobuf_c_message_free_unpacked(message, NULL);
    assert_null(ep_message_unpack(&ep__v1__ping_request__descriptor, sizeof damaged, damaged));
    pid = fork();
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        no_malloc = 1;
        _exit(ep_message_unpack(&ep__v1__ping_request__descriptor, sizeof node, node) != NULL);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void a_stream_outlives_a_call_without_memory(void **state)
{
    struct ep_rpc_stream *held, *stream;
    ProtobufCMessage *message;
    struct ep_error error;

    (void)state;
    assert_ok(open_stats(f.channel, "quiet", -1, &held, &error), &error);
    EVENTUALLY(atomic_load(&f.requests) == 1);
    fixture_run(&f, lose_a_call);
    assert_ok(open_stats(f.channel, "1", 5000, &stream, &error), &error);
    assert_int_equal(ep_rpc_stream_read(stream, 5000, &message, &error), EP_NO_MEMORY);
    ep_rpc_stream_close(stream);
    assert_ok(open_stats(f.channel, "1", 5000, &stream, &error), &error);
    assert_ok(ep_rpc_stream_read(stream, 5000, &message, &error), &error);
    assert_non_null(message);
    protobuf_c_message_free_unpacked(message, NULL);
    ep_rpc_stream_close(stream);
    ep_rpc_stream_close(held);
}

static void unary_without_server_names_the_path(void **state)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;

    (void)state;
    assert_ok(ep_rpc_channel_open(f.client, "unix:/nonexistent/x.sock", NULL, 0, &channel, &error),
              &error);
    assert_int_equal(ping(channel, "x", 2000, NULL, &error), EP_UNAVAILABLE);
    assert_text(error.text, "unix:/nonexistent/x.sock");
    ep_rpc_channel_close(channel);
}

static void metadata_reaches_the_handler(void **state)
{
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ping(f.channel, "meta:x-test", 5000, answer, &error), &error);
    assert_string_equal(answer, "some value");
    assert_ok(ping(f.channel, "meta:x-other", 5000, answer, &error), &error);
    assert_string_equal(answer, "(absent)");
}

static void illegal_metadata_is_refused_by_name(void **state)
{
    static const struct ep_rpc_metadata metadata[] = { { "ok", "1" }, { "Not Legal", "2" } };
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_int_equal(ep_rpc_unary(f.channel, &ep__v1__node__descriptor, "Ping", metadata, 2,
                                  &request.base, 1000, &reply, &error),
                     EP_INVALID_ARGUMENT);
    assert_text(error.text, "Not Legal");
    assert_null(reply);
}

static void remaining_time_reaches_the_handler(void **state)
{
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ping(f.channel, "left", 60000, answer, &error), &error);
    assert_in_range((unsigned long)atoll(answer), 30000, 61000); /* gRPC rounds up */
    assert_ok(ping(f.channel, "left", -1, answer, &error), &error);
    assert_true(atoll(answer) == INT64_MAX);
}

static ep_status put(size_t size, struct ep_error *error)
{
    char *text = calloc(1, size + 1);
    ep_status status;

    memset(text, 'x', size);
    status = ping(f.channel, text, 10000, NULL, error);
    free(text);
    return status;
}

static void request_above_the_servers_limit_names_it(void **state)
{
    struct ep_error error;

    (void)state;
    assert_ok(put(60 << 10, &error), &error);
    assert_int_equal(put(100 << 10, &error), EP_RESOURCE_EXHAUSTED);
    assert_text(error.text, "65536");
    assert_ok(put(60 << 10, &error), &error); /* the connection goes on */
}

static void request_above_the_clients_limit_names_it(void **state)
{
    struct ep_error error;

    (void)state;
    assert_int_equal(put(5 << 20, &error), EP_RESOURCE_EXHAUSTED);
    assert_text(error.text, "4194304");
}

static void answer_above_the_servers_limit_names_it(void **state)
{
    struct ep_error error;

    (void)state;
    assert_ok(ping(f.channel, "get:60000", 10000, NULL, &error), &error);
    assert_int_equal(ping(f.channel, "get:100000", 10000, NULL, &error), EP_RESOURCE_EXHAUSTED);
    assert_text(error.text, "65536");
}

static void answer_above_the_clients_limit_names_it(void **state)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;

    (void)state;
    assert_ok(ep_rpc_channel_open(f.client, f.unix_target, NULL, 1000, &channel, &error), &error);
    assert_int_equal(ping(channel, "get:5000", 10000, NULL, &error), EP_RESOURCE_EXHAUSTED);
    assert_text(error.text, "1000");
    ep_rpc_channel_close(channel);
}

/* A message of another type under the right name: its bytes are no valid request. */
static void garbage_request_is_an_invalid_argument(void **state)
{
    static ProtobufCMethodDescriptor method;
    ProtobufCServiceDescriptor lying = ep__v1__node__descriptor;
    Ep__V1__DrainNodeRequest request = EP__V1__DRAIN_NODE_REQUEST__INIT;
    static const unsigned index[] = { 0 };
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    method = (ProtobufCMethodDescriptor){ "Ping", &ep__v1__drain_node_request__descriptor,
                                          &ep__v1__ping_reply__descriptor };
    lying.methods = &method;
    lying.n_methods = 1;
    lying.method_indices_by_name = index;
    /* PingRequest.time_us is a number where this has text. */
    request.reason = (char *)(uintptr_t) "text";
    (void)ep_rpc_unary(f.channel, &lying, "Ping", NULL, 0, &request.base, 5000, &reply, &error);
    assert_text(error.text, "ep.v1.PingRequest");
    assert_int_equal(error.status, EP_INVALID_ARGUMENT);
}

static void text_that_is_no_utf8_is_refused_by_name(void **state)
{
    struct ep_error error;

    (void)state;
    assert_int_equal(ping(f.channel, "caf\xc3", 5000, NULL, &error), EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, "node is no UTF-8: the text of messages must be");
    assert_int_equal(atomic_load(&f.requests), 0);
}

static void text_of_answers_is_utf8(void **state)
{
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ping(f.channel, "cut", 5000, answer, &error), &error);
    assert_string_equal(answer, "caf?");
}

static void unknown_method_is_answered_at_once(void **state)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    uint64_t began = ep_clock_ns();
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_int_equal(ep_rpc_unary(f.channel, &grpc__health__v1__health__descriptor, "Check", NULL, 0,
                                  &request.base, 60000, &reply, &error),
                     EP_UNIMPLEMENTED);
    assert_true(ep_clock_ns() - began < 10 * EP_NS_PER_S);
}

static void wrong_request_type_is_refused(void **state)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_int_equal(ep_rpc_unary(f.channel, &ep__v1__node__descriptor, "Ping", NULL, 0,
                                  &request.base, 1000, &reply, &error),
                     EP_INVALID_ARGUMENT);
    assert_text(error.text, "ep.v1.PingRequest");
    assert_int_equal(ep_rpc_unary(f.channel, &ep__v1__node__descriptor, "Pong", NULL, 0,
                                  &request.base, 1000, &reply, &error),
                     EP_INVALID_ARGUMENT);
    assert_text(error.text, "Pong");
}

static void ping_many(void *arg)
{
    struct ep_error error;

    (void)arg;
    for (int i = 0; i < 200; i++)
        if (ping(f.channel, "many", 20000, NULL, &error) != EP_OK)
            abort();
}

static void many_threads_share_a_channel(void **state)
{
    uv_thread_t threads[8];

    (void)state;
    for (int i = 0; i < 8; i++)
        uv_thread_create(&threads[i], ping_many, NULL);
    for (int i = 0; i < 8; i++)
        uv_thread_join(&threads[i]);
    assert_int_equal(atomic_load(&f.requests), 1600);
}

static void call_loop_from_loop(struct fixture *fx)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;

    assert_ok(ep_rpc_channel_open(fx->rpc, fx->unix_target, NULL, 0, &channel, &error), &error);
    ep_rpc_channel_close(channel);
}

static void a_loops_runtime_opens_channels_too(void **state)
{
    (void)state;
    fixture_run(&f, call_loop_from_loop);
}

/* ---- calls of the loop's own --------------------------------------------------------- */

struct answer {
    atomic_int told;
    struct ep_error error;
    char text[128];
    bool on_loop, closes;
};

static struct {
    struct ep_rpc_channel *channel;
    struct answer answers[3];
    const char *texts[3];
    uint32_t timeout_ms;
    size_t n;
} asking; /* the loop's, while it runs a task */

static void on_answer(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct answer *answer = user;
    uv_thread_t self = uv_thread_self();

    answer->error = *error;
    if (reply)
        snprintf(answer->text, sizeof answer->text, "%s", ((const Ep__V1__PingReply *)reply)->node);
    answer->on_loop = uv_thread_equal(&self, &f.thread);
    if (answer->closes)
        ep_rpc_channel_close(asking.channel);
    atomic_fetch_add(&answer->told, 1);
}

static void ask_all(struct fixture *fx)
{
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    struct ep_error error;

    if (!asking.channel)
        assert_ok(ep_rpc_channel_open(fx->rpc, fx->unix_target, NULL, 0, &asking.channel, &error), &error);
    for (size_t i = 0; i < asking.n; i++) {
        request.node = (char *)(uintptr_t)asking.texts[i];
        ep_rpc_ask(asking.channel, &ep__v1__node__descriptor, "Ping", NULL, 0, &request.base, asking.timeout_ms,
                   on_answer, &asking.answers[i]);
        assert_int_equal(atomic_load(&asking.answers[i].told), 0);
    }
}

static void close_asking(struct fixture *fx)
{
    (void)fx;
    ep_rpc_channel_close(asking.channel);
}

static void ask(uint32_t timeout_ms, size_t n, const char *const texts[])
{
    memset(&asking, 0, sizeof asking);
    asking.timeout_ms = timeout_ms;
    asking.n = n;
    if (n)
        memcpy(asking.texts, texts, n * sizeof *texts);
}

static void a_loop_asks_without_waiting(void **state)
{
    (void)state;
    ask(20000, 3, (const char *const[]){ "one", "fail", "three" });
    fixture_run(&f, ask_all);
    for (size_t i = 0; i < 3; i++)
        EVENTUALLY(atomic_load(&asking.answers[i].told) == 1);
    assert_string_equal(asking.answers[0].text, "one");
    assert_int_equal(asking.answers[0].error.status, EP_OK);
    assert_true(asking.answers[0].on_loop);
    assert_int_equal(asking.answers[1].error.status, EP_TIMEOUT);
    assert_text(asking.answers[1].error.text, "rank 3 was late");
    assert_string_equal(asking.answers[2].text, "three");
    fixture_run(&f, close_asking);
}

static void what_a_loop_asks_ends_in_time(void **state)
{
    (void)state;
    ask(100, 1, (const char *const[]){ "hold" });
    fixture_run(&f, ask_all);
    EVENTUALLY(atomic_load(&asking.answers[0].told) == 1);
    assert_int_equal(asking.answers[0].error.status, EP_DEADLINE_EXCEEDED);
    assert_text(asking.answers[0].error.text, "100 ms");
    fixture_run(&f, close_asking);
}

static void closing_ends_what_a_loop_has_asked(void **state)
{
    (void)state;
    ask(20000, 2, (const char *const[]){ "hold", "hold" });
    fixture_run(&f, ask_all);
    EVENTUALLY(atomic_load(&f.held) == 2);
    fixture_run(&f, close_asking);
    for (size_t i = 0; i < 2; i++) {
        EVENTUALLY(atomic_load(&asking.answers[i].told) == 1);
        assert_int_equal(asking.answers[i].error.status, EP_CANCELLED);
    }
}

static void a_channel_may_be_closed_by_an_answer(void **state)
{
    (void)state;
    ask(20000, 2, (const char *const[]){ "one", "hold" });
    asking.answers[0].closes = true;
    fixture_run(&f, ask_all);
    for (size_t i = 0; i < 2; i++)
        EVENTUALLY(atomic_load(&asking.answers[i].told) == 1);
    assert_int_equal(asking.answers[0].error.status, EP_OK);
    assert_int_equal(asking.answers[1].error.status, EP_CANCELLED);
}

static void ask_wrongly(struct fixture *fx)
{
    Ep__V1__PingReply wrong = EP__V1__PING_REPLY__INIT;
    struct ep_error error;

    assert_ok(ep_rpc_channel_open(fx->rpc, fx->unix_target, NULL, 0, &asking.channel, &error), &error);
    ep_rpc_ask(asking.channel, &ep__v1__node__descriptor, "Ping", NULL, 0, &wrong.base, 1000, on_answer,
               &asking.answers[0]);
    ep_rpc_ask(asking.channel, &ep__v1__node__descriptor, "Pong", NULL, 0, &wrong.base, 1000, on_answer,
               &asking.answers[1]);
    assert_int_equal(atomic_load(&asking.answers[0].told), 0);
    ep_rpc_channel_close(asking.channel);
}

static void a_call_that_cannot_begin_is_told_from_the_loop(void **state)
{
    (void)state;
    ask(0, 0, NULL);
    fixture_run(&f, ask_wrongly);
    for (size_t i = 0; i < 2; i++) {
        EVENTUALLY(atomic_load(&asking.answers[i].told) == 1);
        assert_int_equal(asking.answers[i].error.status, EP_INVALID_ARGUMENT);
    }
    assert_text(asking.answers[0].error.text, "ep.v1.PingRequest");
    assert_text(asking.answers[1].error.text, "Pong");
}

/* ---- streams ------------------------------------------------------------------------- */

static uint64_t read_number(struct ep_rpc_stream *stream)
{
    ProtobufCMessage *reply;
    struct ep_error error;
    uint64_t number;

    assert_ok(ep_rpc_stream_read(stream, 20000, &reply, &error), &error);
    assert_non_null(reply);
    number = ((Ep__V1__Stats *)reply)->time_us;
    protobuf_c_message_free_unpacked(reply, NULL);
    return number;
}

static void stream_delivers_in_order_and_ends(void **state)
{
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_ok(open_stats(f.channel, "500", -1, &stream, &error), &error);
    for (uint64_t i = 0; i < 500; i++)
        assert_int_equal(read_number(stream), i);
    assert_false(ep_rpc_stream_ended(stream));
    assert_ok(ep_rpc_stream_read(stream, -1, &reply, &error), &error);
    assert_null(reply);
    assert_true(ep_rpc_stream_ended(stream));
    assert_ok(ep_rpc_stream_read(stream, -1, &reply, &error), &error); /* and stays so */
    assert_null(reply);
    ep_rpc_stream_close(stream);
    EVENTUALLY(atomic_load(&f.closed) == 1);
}

static bool writes_rest(int *last)
{
    int now = atomic_load(&f.writes);
    bool rest = now == *last;

    *last = now;
    usleep(20000);
    return rest && now > 0;
}

static void slow_reader_holds_the_writer_back(void **state)
{
    struct ep_rpc_stream *stream;
    struct ep_error error;
    int last = -1, before;

    (void)state;
    assert_ok(open_stats(f.channel, "endless", -1, &stream, &error), &error);
    EVENTUALLY(writes_rest(&last));
    before = last;
    assert_true(before < 2000); /* 2 MB: bounded by the window */
    assert_true(atomic_load(&f.refused_writes) > 0);
    for (uint64_t i = 0; i < (uint64_t)before + 100; i++)
        assert_int_equal(read_number(stream), i);
    EVENTUALLY(atomic_load(&f.writes) > before);
    ep_rpc_stream_close(stream);
    EVENTUALLY(atomic_load(&f.closed) == 1);
}

static void read_bound_leaves_the_stream_usable(void **state)
{
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_ok(open_stats(f.channel, "quiet", -1, &stream, &error), &error);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ep_rpc_stream_read(stream, 20, &reply, &error), EP_DEADLINE_EXCEEDED);
        assert_null(reply);
        assert_text(error.text, "20 ms");
        assert_false(ep_rpc_stream_ended(stream));
    }
    ep_rpc_stream_cancel(stream);
    assert_int_equal(ep_rpc_stream_read(stream, -1, &reply, &error), EP_CANCELLED);
    assert_true(ep_rpc_stream_ended(stream));
    ep_rpc_stream_close(stream);
}

static void stream_ends_at_its_deadline(void **state)
{
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;
    ep_status status;

    (void)state;
    assert_ok(open_stats(f.channel, "endless", 300, &stream, &error), &error);
    while ((status = ep_rpc_stream_read(stream, -1, &reply, &error)) == EP_OK)
        protobuf_c_message_free_unpacked(reply, NULL);
    assert_int_equal(status, EP_DEADLINE_EXCEEDED);
    assert_true(ep_rpc_stream_ended(stream));
    ep_rpc_stream_close(stream);
    EVENTUALLY(atomic_load(&f.closed) == atomic_load(&f.requests));
}

static void cancel_soon(void *arg)
{
    EVENTUALLY(atomic_load(&f.writes) > 10);
    ep_rpc_stream_cancel(arg);
}

static void cancel_from_another_thread_ends_a_read(void **state)
{
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;
    uv_thread_t thread;
    ep_status status;

    (void)state;
    assert_ok(open_stats(f.channel, "endless", -1, &stream, &error), &error);
    uv_thread_create(&thread, cancel_soon, stream);
    while ((status = ep_rpc_stream_read(stream, -1, &reply, &error)) == EP_OK)
        protobuf_c_message_free_unpacked(reply, NULL);
    uv_thread_join(&thread);
    assert_int_equal(status, EP_CANCELLED);
    ep_rpc_stream_close(stream);
    EVENTUALLY(atomic_load(&f.closed) == 1);
}

static void stream_closed_unread_is_closed_on_the_server(void **state)
{
    struct ep_rpc_stream *stream;
    struct ep_error error;

    (void)state;
    assert_ok(open_stats(f.channel, "endless", -1, &stream, &error), &error);
    EVENTUALLY(atomic_load(&f.writes) > 0);
    ep_rpc_stream_close(stream); /* a read was never asked for, a write is half way */
    EVENTUALLY(atomic_load(&f.closed) == 1);
}

static void stream_of_a_unary_method_is_refused(void **state)
{
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    struct ep_rpc_stream *stream;
    struct ep_error error;

    (void)state;
    assert_int_equal(ep_rpc_stream_open(f.channel, &ep__v1__node__descriptor, "Ping", NULL, 0,
                                        &request.base, 1000, &stream, &error),
                     EP_INVALID_ARGUMENT);
}

static void failing_stream_tells_at_the_first_read(void **state)
{
    Ep__V1__WatchGroupsRequest request = EP__V1__WATCH_GROUPS_REQUEST__INIT;
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;

    (void)state;
    assert_ok(ep_rpc_stream_open(f.channel, &ep__v1__admin__descriptor, "WatchGroups", NULL, 0,
                                 &request.base, 5000, &stream, &error),
              &error);
    assert_int_equal(ep_rpc_stream_read(stream, -1, &reply, &error), EP_UNIMPLEMENTED);
    assert_string_equal(error.text, "not in this test");
    ep_rpc_stream_close(stream);
}

/* ---- drain --------------------------------------------------------------------------- */

static void ping_hold(void *arg)
{
    *(ep_status *)arg = ping(f.channel, "hold", 20000, NULL, NULL);
}

static void answer_held(struct fixture *fx)
{
    Ep__V1__PingReply reply = EP__V1__PING_REPLY__INIT;

    ep_rpc_reply(fx->held_call, &reply.base);
}

static void drain_lets_a_running_call_finish(void **state)
{
    ep_status status = EP_INTERNAL;
    struct ep_error error;
    uv_thread_t thread;

    (void)state;
    uv_thread_create(&thread, ping_hold, &status);
    EVENTUALLY(atomic_load(&f.held) == 1);
    fixture_drain(&f, 60000);
    EVENTUALLY(access(f.path, F_OK) != 0); /* nobody new comes in */
    assert_int_equal(ping(f.channel, "new", 500, NULL, &error), EP_UNAVAILABLE);
    assert_int_equal(atomic_load(&f.drained), 0);
    fixture_run(&f, answer_held);
    uv_thread_join(&thread);
    assert_int_equal(status, EP_OK);
    EVENTUALLY(atomic_load(&f.drained) == 1);
}

static void drain_cancels_the_rest_after_the_grace(void **state)
{
    ep_status status = EP_OK;
    uv_thread_t thread;

    (void)state;
    uv_thread_create(&thread, ping_hold, &status);
    EVENTUALLY(atomic_load(&f.held) == 1);
    fixture_drain(&f, 50);
    EVENTUALLY(atomic_load(&f.drained) == 1);
    assert_int_equal(atomic_load(&f.closed), 1);
    uv_thread_join(&thread);
    assert_int_not_equal(status, EP_OK);
}

static void drain_ends_a_stream_in_the_middle(void **state)
{
    struct ep_rpc_stream *stream;
    ProtobufCMessage *reply;
    struct ep_error error;
    ep_status status;

    (void)state;
    assert_ok(open_stats(f.channel, "endless", -1, &stream, &error), &error);
    assert_int_equal(read_number(stream), 0);
    fixture_drain(&f, 20);
    EVENTUALLY(atomic_load(&f.drained) == 1);
    while ((status = ep_rpc_stream_read(stream, -1, &reply, &error)) == EP_OK && reply)
        protobuf_c_message_free_unpacked(reply, NULL);
    assert_int_not_equal(status, EP_OK);
    ep_rpc_stream_close(stream);
}

static void destroy_now(struct fixture *fx)
{
    ep_rpc_server_destroy(fx->server);
    fx->server = NULL;
}

static void destroy_without_drain_ends_calls(void **state)
{
    struct ep_rpc_stream *stream;
    ep_status status = EP_OK;
    ProtobufCMessage *reply;
    struct ep_error error;
    uv_thread_t thread;

    (void)state;
    assert_ok(open_stats(f.channel, "quiet", -1, &stream, &error), &error);
    uv_thread_create(&thread, ping_hold, &status);
    EVENTUALLY(atomic_load(&f.held) == 1 && atomic_load(&f.requests) == 2);
    fixture_run(&f, destroy_now);
    assert_int_equal(atomic_load(&f.closed), 2);
    uv_thread_join(&thread);
    assert_int_not_equal(status, EP_OK);
    assert_int_not_equal(ep_rpc_stream_read(stream, -1, &reply, &error), EP_OK);
    ep_rpc_stream_close(stream);
}

/* ---- reconnect ----------------------------------------------------------------------- */

static void channel_finds_a_restarted_server(void **state)
{
    struct ep_error error;
    struct fixture second;

    (void)state;
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    fixture_run(&f, destroy_now);
    assert_int_equal(ping(f.channel, "x", 5000, NULL, &error), EP_UNAVAILABLE);

    fixture_init(&second);
    strcpy(second.path, f.path);
    fixture_start(&second);
    EVENTUALLY(ping(f.channel, "x", 5000, NULL, &error) == EP_OK);
    fixture_stop(&second);
}

#define T(name) cmocka_unit_test_setup_teardown(name, up, down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(unary_answers),
        T(unary_error_keeps_status_and_words),
        T(a_method_outlives_a_call_without_memory),
        T(a_message_without_memory_is_not_called_invalid),
        T(a_stored_message_without_memory_ends_the_process),
        T(a_stream_outlives_a_call_without_memory),
        T(a_loop_asks_without_waiting),
        T(what_a_loop_asks_ends_in_time),
        T(closing_ends_what_a_loop_has_asked),
        T(a_channel_may_be_closed_by_an_answer),
        T(a_call_that_cannot_begin_is_told_from_the_loop),
        T(unary_deadline_names_target_and_bound),
        T(unary_without_server_names_the_path),
        T(metadata_reaches_the_handler),
        T(illegal_metadata_is_refused_by_name),
        T(remaining_time_reaches_the_handler),
        T(request_above_the_servers_limit_names_it),
        T(request_above_the_clients_limit_names_it),
        T(answer_above_the_servers_limit_names_it),
        T(answer_above_the_clients_limit_names_it),
        T(garbage_request_is_an_invalid_argument),
        T(text_that_is_no_utf8_is_refused_by_name),
        T(text_of_answers_is_utf8),
        T(unknown_method_is_answered_at_once),
        T(wrong_request_type_is_refused),
        T(many_threads_share_a_channel),
        T(a_loops_runtime_opens_channels_too),
        T(stream_delivers_in_order_and_ends),
        T(slow_reader_holds_the_writer_back),
        T(read_bound_leaves_the_stream_usable),
        T(stream_ends_at_its_deadline),
        T(cancel_from_another_thread_ends_a_read),
        T(stream_closed_unread_is_closed_on_the_server),
        T(stream_of_a_unary_method_is_refused),
        T(failing_stream_tells_at_the_first_read),
        T(drain_lets_a_running_call_finish),
        T(drain_cancels_the_rest_after_the_grace),
        T(drain_ends_a_stream_in_the_middle),
        T(destroy_without_drain_ends_calls),
        T(channel_finds_a_restarted_server),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
