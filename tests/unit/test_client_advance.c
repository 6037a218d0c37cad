/*
 * A rank that follows its group: what ep_advance() does with what a server says.  The server is played by the test, over
 * the rank's connection; claims are answered here too (join_group is wrapped), with ranks that have no ops.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "client_private.h"

#define PATIENCE_MS 10000

enum { EPOCH = 4, NEXT = 5, LATER = 6, HAS_NEXT = 1000, HT_SMS = 24 };

/* ---- a rank without ops ------------------------------------------------------------- */

static bool drain(struct ep_rank *rank, uint64_t deadline_ns)
{
    (void)rank;
    (void)deadline_ns;
    return true;
}

static void nothing(struct ep_rank *rank)
{
    (void)rank;
}

static const struct executor idle = { .backend = EP_BACKEND_HOST, .cut = nothing, .drain = drain, .detach = nothing };

struct fixture {
    struct ep_client *client;
    struct ep_rank *rank;
    int server; /* the other end of the rank's connection */
    uint32_t asks;

    /* how claims are answered; under lock */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_status answer;
    uint64_t epoch;
    bool hold; /* they wait */
    uint32_t begun, answered;
    uint64_t after; /* of the last one */
    ep_join_options options;
    int successor;  /* the server's end of its connection; -1: there is none */
};

static struct fixture *fixture;

static struct ep_rank *make_rank(struct ep_client *client, const struct joining *how, uint64_t epoch, int *server)
{
    struct ep_rank *rank = rank_new(client);
    struct ep_error error = EP_ERROR_INIT;
    int pair[2];

    assert_non_null(rank);
    rank->executor = &idle;
    rank->epoch = epoch;
    rank->ahead = how->after != 0;
    rank->shape.timeout_ms = PATIENCE_MS;
    turn_begin(rank, 0);
    assert_int_equal(events_init(rank, &error), EP_OK);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    rank->socket = pair[0];
    *server = pair[1];
    if (how->options.follow)
        assert_int_equal(follow_begin(rank, how, &error), EP_OK);
    assert_int_equal(monitor_add(rank, &error), EP_OK);
    return rank;
}

ep_status __wrap_join_group(struct ep_client *client, const struct joining *how, struct ep_rank **rank,
                            struct ep_error *error);

ep_status __wrap_join_group(struct ep_client *client, const struct joining *how, struct ep_rank **rank,
                            struct ep_error *error)
{
    struct fixture *f = fixture;
    ep_status status;

    pthread_mutex_lock(&f->lock);
    f->begun++;
    f->after = how->after;
    f->options = how->options;
    pthread_cond_broadcast(&f->changed);
    while (f->hold)
        pthread_cond_wait(&f->changed, &f->lock);
    status = f->answer;
    if (status == EP_OK) {
        if (f->successor >= 0)
            close(f->successor);
        *rank = make_rank(client, how, f->epoch, &f->successor);
    } else {
        ep_error_set(error, status, "rank 0 is on node b, this is node a");
    }
    f->answered++;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return status;
}

static void await(struct fixture *f, const uint32_t *count, uint32_t n)
{
    pthread_mutex_lock(&f->lock);
    while (*count < n)
        pthread_cond_wait(&f->changed, &f->lock);
    pthread_mutex_unlock(&f->lock);
}

static void set_hold(struct fixture *f, bool hold)
{
    pthread_mutex_lock(&f->lock);
    f->hold = hold;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void set_answer(struct fixture *f, ep_status answer, uint64_t epoch)
{
    pthread_mutex_lock(&f->lock);
    f->answer = answer;
    f->epoch = epoch;
    pthread_mutex_unlock(&f->lock);
}

static int make_one(void **state, bool follow)
{
    struct fixture *f = fixture = calloc(1, sizeof *f);
    struct ep_error error = EP_ERROR_INIT;
    const struct joining how = { .options = { .size = sizeof how.options,
                                              .group = "moe",
                                              .executor = EP_EXECUTOR_SERVER,
                                              .ht_sms = HT_SMS,
                                              .follow = follow } };

    f->client = calloc(1, sizeof *f->client);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->changed, NULL);
    f->epoch = NEXT;
    f->successor = -1;
    following_init(f->client);
    assert_int_equal(monitor_start(f->client, &error), EP_OK);
    f->rank = make_rank(f->client, &how, EPOCH, &f->server);
    *state = f;
    return 0;
}

static int make(void **state)
{
    return make_one(state, true);
}

static int make_without(void **state)
{
    return make_one(state, false);
}

/* Everything that is left goes with the client. */
static int destroy(void **state)
{
    struct fixture *f = *state;

    ep_client_close(f->client);
    close(f->server);
    if (f->successor >= 0)
        close(f->successor);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->lock);
    free(f);
    return 0;
}

/* ---- the server's part -------------------------------------------------------------- */

static void say_epoch(int server, uint64_t epoch)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = EP_ATTACH_EPOCH;
    frame.epoch = epoch;
    assert_int_equal(ep_attach_send(server, &frame, -1, NULL), EP_OK);
}

static void hear(int server, struct ep_attach_frame *frame)
{
    struct ep_error error = EP_ERROR_INIT;
    ep_status status;
    int fd;

    while ((status = ep_attach_receive(server, frame, &fd, &error)) == EP_UNAVAILABLE)
        usleep(200);
    assert_int_equal(status, EP_OK);
}

static struct ep_attach_frame ask(struct fixture *f, uint64_t epoch, uint64_t at)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_ASK);
    frame.epoch = epoch;
    frame.value = at;
    frame.count = ++f->asks;
    assert_int_equal(ep_attach_send(f->server, &frame, -1, NULL), EP_OK);
    hear(f->server, &frame);
    assert_int_equal(frame.type, EP_ATTACH_PROMISE);
    assert_int_equal(frame.count, f->asks);
    assert_int_equal(frame.epoch, epoch);
    return frame;
}

static void decide(struct fixture *f, uint64_t epoch, uint64_t at)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_TURN);
    frame.epoch = epoch;
    frame.value = at;
    assert_int_equal(ep_attach_send(f->server, &frame, -1, NULL), EP_OK);
    (void)ask(f, epoch, EP_ATTACH_NO_TURN); /* it has been heard */
}

/* What the group's leader does: again and again, until the rank can. */
static void ask_until_promised(struct fixture *f, uint64_t epoch, uint64_t at)
{
    while (ask(f, epoch, at).status != EP_OK)
        usleep(1000);
}

/* ---- the program's part -------------------------------------------------------------- */

static void pass(struct fixture *f)
{
    ep_rank *next = f->rank;

    assert_int_equal(ep_advance(f->rank, &next), EP_OK);
    assert_null(next);
}

static void dispatch(struct fixture *f)
{
    turn_count(f->rank, 1);
}

/* The rank goes on with its successor, and leaves. */
static void go_over(struct fixture *f, uint64_t epoch)
{
    ep_rank *next = NULL;

    assert_int_equal(ep_advance(f->rank, &next), EP_OK);
    assert_non_null(next);
    assert_int_equal(next->epoch, epoch);
    ep_leave(f->rank);
    close(f->server);
    f->rank = next;
    f->server = f->successor;
    f->successor = -1;
}

static void *advance(void *user)
{
    struct fixture *f = user;
    ep_rank *next = NULL;

    if (ep_advance(f->rank, &next) != EP_OK)
        return (void *)(intptr_t)last_error()->status;
    return (void *)(intptr_t)(next ? HAS_NEXT : EP_OK);
}

/* In a thread of its own; it is known to sleep there. */
static pthread_t advance_and_wait(struct fixture *f)
{
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, advance, f), 0);
    while (__atomic_load_n(&f->rank->waiting, __ATOMIC_SEQ_CST) != &f->rank->turn.news)
        usleep(200);
    return thread;
}

static int result_of(pthread_t thread)
{
    void *result;

    assert_int_equal(pthread_join(thread, &result), 0);
    return (int)(intptr_t)result;
}

/* Promised at position 1, where the rank stands. */
static void stand_at_the_promise(struct fixture *f)
{
    pass(f);
    dispatch(f);
    say_epoch(f->server, NEXT);
    ask_until_promised(f, NEXT, 1);
}

/* ---- tests ---------------------------------------------------------------------------- */

static void test_a_rank_that_does_not_follow_is_refused(void **state)
{
    struct fixture *f = *state;
    ep_rank *next;

    assert_int_equal(ep_advance(f->rank, &next), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(ep_error_message(), "ep_join_options.follow"));
    assert_int_equal(ep_advance(f->rank, NULL), EP_INVALID_ARGUMENT);
    assert_int_equal(ep_advance(NULL, &next), EP_INVALID_ARGUMENT);
    say_epoch(f->server, NEXT); /* and attaches to nothing */
    assert_int_equal(ask(f, NEXT, 7).status, EP_ABORTED);
    assert_int_equal(f->begun, 0);
}

static void test_a_look_tells_where_the_rank_is(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame told = ask(f, NEXT, EP_ATTACH_NO_TURN);

    assert_int_equal(told.status, EP_OK);
    assert_int_equal(told.value, 1); /* it begins at 0 */
    assert_int_equal(told.offset, 0);
    pass(f);
    dispatch(f);
    dispatch(f);
    told = ask(f, NEXT, EP_ATTACH_NO_TURN);
    assert_int_equal(told.value, 1);
    assert_int_equal(told.offset, 2);
    pass(f);
    pass(f); /* without an op in between: the same boundary */
    assert_int_equal(ask(f, NEXT, EP_ATTACH_NO_TURN).value, 3);
}

static void test_the_rank_goes_over_at_the_first_boundary_at_or_beyond_the_position(void **state)
{
    struct fixture *f = *state;

    pass(f);
    say_epoch(f->server, NEXT);
    ask_until_promised(f, NEXT, 3);
    assert_int_equal(f->after, EPOCH);
    decide(f, NEXT, 3);
    dispatch(f);
    dispatch(f);
    pass(f); /* at 2 */
    dispatch(f);
    dispatch(f);
    go_over(f, NEXT); /* at 4 */
    pass(f);
}

static void test_what_graphs_hold_counts_when_they_are_launched(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(ep_graph_begins(NULL, 1), EP_INVALID_ARGUMENT);
    pass(f);
    assert_int_equal(ep_graph_begins(f->rank, 3), EP_OK);
    dispatch(f);
    assert_int_equal(ask(f, NEXT, EP_ATTACH_NO_TURN).offset, 4);
    say_epoch(f->server, NEXT);
    ask_until_promised(f, NEXT, 6);
    decide(f, NEXT, 6);
    pass(f);
    assert_int_equal(ep_graph_begins(f->rank, 3), EP_OK);
    go_over(f, NEXT); /* at 7 */
    assert_int_equal(ep_graph_begins(f->rank, 1), EP_OK);
}

static void test_a_boundary_that_was_passed_is_not_promised(void **state)
{
    struct fixture *f = *state;

    say_epoch(f->server, NEXT);
    pass(f);
    dispatch(f);
    dispatch(f);
    pass(f); /* at 2: passed is 3 */
    ask_until_promised(f, NEXT, 3);
    assert_int_equal(ask(f, NEXT, 2).status, EP_ABORTED);
    dispatch(f);
    pass(f); /* what was promised before has gone with that */
}

static void test_nothing_is_promised_for_a_program_without_boundaries(void **state)
{
    struct fixture *f = *state;

    say_epoch(f->server, NEXT);
    await(f, &f->answered, 1);
    usleep(20000);
    assert_int_equal(ask(f, NEXT, 100).status, EP_ABORTED);
    pass(f);
    ask_until_promised(f, NEXT, 100);
}

static void test_nothing_is_promised_before_the_rank_is_attached(void **state)
{
    struct fixture *f = *state;

    pass(f);
    set_hold(f, true);
    say_epoch(f->server, NEXT);
    await(f, &f->begun, 1);
    assert_int_equal(ask(f, NEXT, 5).status, EP_ABORTED);
    set_hold(f, false);
    ask_until_promised(f, NEXT, 5);
    assert_int_equal(ask(f, LATER, 5).status, EP_ABORTED); /* it is not attached to that one */
}

static void test_a_promise_holds_the_rank_until_it_is_decided(void **state)
{
    struct fixture *f = *state;
    pthread_t waits;

    stand_at_the_promise(f);
    waits = advance_and_wait(f);
    decide(f, NEXT, 1);
    assert_int_equal(result_of(waits), HAS_NEXT);
}

static void test_a_promise_that_is_withdrawn_lets_the_rank_go_on(void **state)
{
    struct fixture *f = *state;
    pthread_t waits;

    stand_at_the_promise(f);
    waits = advance_and_wait(f);
    assert_int_equal(ask(f, NEXT, EP_ATTACH_NO_TURN).status, EP_OK);
    assert_int_equal(result_of(waits), EP_OK);
    assert_int_equal(ask(f, NEXT, 1).status, EP_ABORTED);
}

static void test_a_wait_ends_in_time_and_may_be_repeated(void **state)
{
    struct fixture *f = *state;
    ep_dispatch_args args = { .size = sizeof args };
    ep_rank *next = NULL;
    ep_handle *handle;

    f->rank->shape.timeout_ms = 20;
    stand_at_the_promise(f);
    assert_int_equal(ep_handle_create(f->rank, &handle), EP_OK);
    assert_int_equal(ep_advance(f->rank, &next), EP_TIMEOUT);
    assert_int_equal(ep_dispatch(handle, &args, NULL), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(ep_error_message(), "has not passed its boundary"));
    assert_int_equal(ask(f, NEXT, 1).status, EP_OK); /* not passed */
    decide(f, NEXT, 1);
    go_over(f, NEXT);
}

static void test_a_wait_ends_with_an_interrupt(void **state)
{
    struct fixture *f = *state;
    pthread_t waits;

    stand_at_the_promise(f);
    waits = advance_and_wait(f);
    ep_rank_interrupt(f->rank);
    assert_int_equal(result_of(waits), EP_CANCELLED);
}

static void test_a_wait_ends_with_the_server(void **state)
{
    struct fixture *f = *state;
    pthread_t waits;

    stand_at_the_promise(f);
    waits = advance_and_wait(f);
    close(f->server);
    f->server = -1;
    assert_int_equal(result_of(waits), EP_SERVER_LOST);
}

static void test_a_newer_epoch_makes_a_promise_void(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame bye;
    pthread_t waits;
    int first;

    stand_at_the_promise(f);
    waits = advance_and_wait(f);
    first = dup(f->successor);
    set_answer(f, EP_OK, LATER);
    say_epoch(f->server, LATER);
    assert_int_equal(result_of(waits), EP_OK);
    hear(first, &bye); /* it leaves the epoch that is none of its business any more */
    assert_int_equal(bye.type, EP_ATTACH_BYE);
    assert_int_equal(bye.epoch, 0);
    close(first);
    ask_until_promised(f, LATER, 2);
    decide(f, LATER, 2);
    dispatch(f);
    go_over(f, LATER);
}

static void test_what_is_decided_stays_so(void **state)
{
    struct fixture *f = *state;

    stand_at_the_promise(f);
    decide(f, NEXT, 1);
    say_epoch(f->server, LATER);
    assert_int_equal(ask(f, LATER, 9).status, EP_ABORTED);
    go_over(f, NEXT);
    assert_int_equal(f->answered, 1);
}

static void test_a_successor_looks_further_when_it_has_been_handed_over(void **state)
{
    struct fixture *f = *state;

    stand_at_the_promise(f);
    decide(f, NEXT, 1);
    set_answer(f, EP_OK, LATER);
    say_epoch(f->successor, LATER);
    usleep(20000);
    assert_int_equal(f->begun, 1);
    set_hold(f, true); /* its own claim waits until the test has it */
    go_over(f, NEXT);
    set_hold(f, false);
    await(f, &f->answered, 2);
    assert_int_equal(f->after, NEXT);
}

static void test_a_successor_is_claimed_with_what_was_asked_for(void **state)
{
    struct fixture *f = *state;

    stand_at_the_promise(f);
    await(f, &f->answered, 1);
    assert_string_equal(f->options.group, "moe");
    assert_int_equal(f->options.executor, EP_EXECUTOR_SERVER);
    assert_int_equal(f->options.ht_sms, HT_SMS);
    assert_true(f->options.follow);
}

static void test_a_claim_that_fails_is_made_again(void **state)
{
    struct fixture *f = *state;

    set_answer(f, EP_UNAVAILABLE, NEXT);
    pass(f);
    say_epoch(f->server, NEXT);
    await(f, &f->answered, 3);
    assert_int_equal(ask(f, NEXT, 5).status, EP_ABORTED);
    set_answer(f, EP_OK, NEXT);
    ask_until_promised(f, NEXT, 5);
}

static void test_a_rank_without_a_place_is_told_at_the_boundary(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame bye;
    ep_rank *next = NULL;

    set_answer(f, EP_NOT_FOUND, NEXT);
    stand_at_the_promise(f);
    decide(f, NEXT, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ep_advance(f->rank, &next), EP_DETACHED);
        assert_non_null(strstr(ep_error_message(), "rank 0 is on node b"));
        assert_null(next);
    }
    assert_int_equal(__atomic_load_n(&f->rank->lost, __ATOMIC_SEQ_CST), EP_OK);
    assert_int_equal(f->answered, 1);
    ep_leave(f->rank);
    f->rank = NULL;
    hear(f->server, &bye);
    assert_int_equal(bye.type, EP_ATTACH_BYE);
    assert_int_equal(bye.epoch, NEXT); /* it is done: nobody masks it */
}

static void test_a_turn_that_was_missed_is_told(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame bye;
    ep_rank *next = NULL;

    pass(f);
    say_epoch(f->server, NEXT);
    ask_until_promised(f, NEXT, 9);
    decide(f, NEXT, 0); /* its server was away */
    assert_int_equal(ep_advance(f->rank, &next), EP_DETACHED);
    assert_non_null(strstr(ep_error_message(), "join again"));
    ep_leave(f->rank);
    f->rank = NULL;
    hear(f->server, &bye);
    assert_int_equal(bye.type, EP_ATTACH_BYE);
    assert_int_equal(bye.epoch, 0); /* it is not done: its peers are not to wait for what it has not begun */
}

static void test_a_rank_that_has_gone_over_begins_nothing(void **state)
{
    struct fixture *f = *state;
    ep_dispatch_args args = { .size = sizeof args, .mode = EP_MODE_LL };
    ep_handle *handle;
    ep_rank *next = NULL, *again = NULL;

    stand_at_the_promise(f);
    assert_int_equal(ep_handle_create(f->rank, &handle), EP_OK);
    decide(f, NEXT, 1);
    assert_int_equal(ep_advance(f->rank, &next), EP_OK);
    assert_int_equal(ep_dispatch(handle, &args, NULL), EP_FAILED_PRECONDITION);
    assert_non_null(strstr(ep_error_message(), "has gone over to epoch 5"));
    assert_int_equal(ep_graph_begins(f->rank, 1), EP_FAILED_PRECONDITION);
    args.flags = EP_OP_CACHED;
    assert_int_equal(ep_dispatch(handle, &args, NULL), EP_INVALID_ARGUMENT); /* of a mode that there is not */
    assert_int_equal(ep_advance(f->rank, &again), EP_FAILED_PRECONDITION);
    assert_null(again);
    ep_leave(next);
}

static void test_leaving_drops_the_successor(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame bye;

    stand_at_the_promise(f);
    ep_leave(f->rank);
    f->rank = NULL;
    hear(f->successor, &bye);
    assert_int_equal(bye.type, EP_ATTACH_BYE);
    hear(f->server, &bye);
    assert_int_equal(bye.type, EP_ATTACH_BYE);
    assert_int_equal(bye.epoch, 0);
}

static void test_leaving_does_not_wait_for_a_claim(void **state)
{
    struct fixture *f = *state;
    struct ep_attach_frame bye;

    set_hold(f, true);
    say_epoch(f->server, NEXT);
    await(f, &f->begun, 1);
    ep_leave(f->rank);
    f->rank = NULL;
    set_hold(f, false);
    await(f, &f->answered, 1);
    hear(f->successor, &bye); /* nobody wants it any more */
    assert_int_equal(bye.type, EP_ATTACH_BYE);
}

static void *let_go(void *user)
{
    usleep(20000);
    set_hold(user, false);
    return NULL;
}

static void test_a_client_closes_while_a_claim_is_under_way(void **state)
{
    struct fixture *f = *state;
    pthread_t thread;

    set_hold(f, true);
    say_epoch(f->server, NEXT);
    await(f, &f->begun, 1);
    assert_int_equal(pthread_create(&thread, NULL, let_go, f), 0);
    ep_client_close(f->client);
    pthread_join(thread, NULL);
    f->client = NULL;
}

int main(void)
{
#define WITH(test) cmocka_unit_test_setup_teardown(test, make, destroy)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_rank_that_does_not_follow_is_refused, make_without, destroy),
        WITH(test_a_look_tells_where_the_rank_is),
        WITH(test_the_rank_goes_over_at_the_first_boundary_at_or_beyond_the_position),
        WITH(test_what_graphs_hold_counts_when_they_are_launched),
        WITH(test_a_boundary_that_was_passed_is_not_promised),
        WITH(test_nothing_is_promised_for_a_program_without_boundaries),
        WITH(test_nothing_is_promised_before_the_rank_is_attached),
        WITH(test_a_promise_holds_the_rank_until_it_is_decided),
        WITH(test_a_promise_that_is_withdrawn_lets_the_rank_go_on),
        WITH(test_a_wait_ends_in_time_and_may_be_repeated),
        WITH(test_a_wait_ends_with_an_interrupt),
        WITH(test_a_wait_ends_with_the_server),
        WITH(test_a_newer_epoch_makes_a_promise_void),
        WITH(test_what_is_decided_stays_so),
        WITH(test_a_successor_looks_further_when_it_has_been_handed_over),
        WITH(test_a_successor_is_claimed_with_what_was_asked_for),
        WITH(test_a_claim_that_fails_is_made_again),
        WITH(test_a_rank_without_a_place_is_told_at_the_boundary),
        WITH(test_a_turn_that_was_missed_is_told),
        WITH(test_a_rank_that_has_gone_over_begins_nothing),
        WITH(test_leaving_drops_the_successor),
        WITH(test_leaving_does_not_wait_for_a_claim),
        WITH(test_a_client_closes_while_a_claim_is_under_way),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
