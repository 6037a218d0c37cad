/* How ranks find each other where something comes between. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "gin.h"

enum { FULL = 4, FDS = 64 };

/* ---- a port that answers nobody ------------------------------------------------------------------ */

/* It listens and accepts none: when it has what it holds, whoever comes is not heard, as on a network that loses packets. */
struct deaf {
    int listener, held[FULL];
    struct sockaddr_in address;
};

/* Of a socket that listens, Linux tells here how many wait to be accepted, and how many may. */
static bool is_full(int listener)
{
    struct tcp_info info;
    socklen_t length = sizeof info;

    assert_int_equal(getsockopt(listener, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
    return info.tcpi_unacked > info.tcpi_sacked;
}

static void fill(struct deaf *deaf)
{
    for (int i = 0; i < FULL; i++) {
        deaf->held[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)connect(deaf->held[i], (struct sockaddr *)&deaf->address, sizeof deaf->address); /* it is under way */
    }
    while (!is_full(deaf->listener))
        usleep(1000); /* what the kernel has begun, it brings to its end */
}

static void open_deaf(struct deaf *deaf)
{
    socklen_t length = sizeof deaf->address;

    deaf->address = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    deaf->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(deaf->listener, (struct sockaddr *)&deaf->address, length), 0);
    assert_int_equal(listen(deaf->listener, 0), 0);
    assert_int_equal(getsockname(deaf->listener, (struct sockaddr *)&deaf->address, &length), 0);
    fill(deaf);
}

static void close_deaf(struct deaf *deaf)
{
    for (int i = 0; i < FULL; i++)
        close(deaf->held[i]);
    close(deaf->listener);
}

static struct ep_gin_handle handle_of(const struct deaf *deaf)
{
    struct ep_gin_handle handle = { .magic = EP_GIN_MAGIC, .protocol = EP_GIN_PROTOCOL, .family = 4,
                                    .port = deaf->address.sin_port };

    memcpy(handle.address, &deaf->address.sin_addr, sizeof deaf->address.sin_addr);
    return handle; /* of another host */
}

/* ---- signals ------------------------------------------------------------------------------------- */

static void on_alarm(int number)
{
    (void)number;
}

/* Several within a dial. */
static void ring_often(bool rings)
{
    const struct itimerval every = { { 0, rings ? 70000 : 0 }, { 0, rings ? 70000 : 0 } };
    const struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };

    assert_int_equal(sigaction(SIGALRM, &action, NULL), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &every, NULL), 0);
}

static void a_signal_while_a_rank_dials_is_no_answer(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_gin_settings settings;
    struct ep_gin_listener *listener;
    struct ep_gin_handle deaf_handle, own;
    const struct ep_gin_handle *handles[] = { &deaf_handle, &own };
    struct ep_gin_comm *comm;
    struct deaf deaf;

    (void)state;
    open_deaf(&deaf);
    deaf_handle = handle_of(&deaf);
    assert_int_equal(ep_gin_settings_read(&settings, NULL), EP_OK);
    settings.timeout_ns = EP_NS_PER_S / 2;
    assert_int_equal(ep_gin_listen(&settings, &own, &listener, NULL), EP_OK);
    ring_often(true);
    assert_int_equal(ep_gin_comm_open(&settings, handles, 2, 1, listener, &comm, &error), EP_DEADLINE_EXCEEDED);
    ring_often(false);
    assert_string_equal(error.text, "rank 0 did not connect in time");
    ep_gin_listener_close(listener);
    close_deaf(&deaf);
}

/* ---- a rank that is reached later ------------------------------------------------------------------ */

struct late {
    const struct ep_gin_settings *settings;
    const struct ep_gin_handle *const *handles;
    struct ep_gin_listener *listener;
    struct ep_gin_comm *comm;
    ep_status status;
};

/* Longer than rank 1 waits before it dials anew. */
static void *meet_late(void *arg)
{
    struct late *late = arg;

    usleep(1500000);
    late->status = ep_gin_comm_open(late->settings, late->handles, 2, 0, late->listener, &late->comm, NULL);
    return NULL;
}

/* The listener's own socket, which takes nobody more until its rank accepts. */
static void make_deaf(const struct ep_gin_handle *handle, struct deaf *deaf)
{
    socklen_t length = sizeof deaf->address;

    deaf->listener = -1;
    for (int fd = 3; fd < FDS && deaf->listener < 0; fd++)
        if (getsockname(fd, (struct sockaddr *)&deaf->address, &length) == 0 && deaf->address.sin_family == AF_INET &&
            deaf->address.sin_port == handle->port)
            deaf->listener = fd;
        else
            length = sizeof deaf->address;
    assert_true(deaf->listener >= 0);
    assert_int_equal(listen(deaf->listener, 0), 0);
    fill(deaf);
}

static void who_is_reached_by_a_later_dial_is_no_failure(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_gin_listener *listener[2];
    struct ep_gin_handle handle[2];
    const struct ep_gin_handle *handles[] = { &handle[0], &handle[1] };
    struct ep_gin_settings settings;
    struct ep_gin_comm *comm;
    struct late late = { .settings = &settings, .handles = handles };
    struct deaf deaf;
    pthread_t thread;

    (void)state;
    assert_int_equal(setenv("EP_GIN_INTERFACE", "=lo", 1), 0);
    assert_int_equal(setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1), 0);
    assert_int_equal(ep_gin_settings_read(&settings, NULL), EP_OK);
    for (int r = 0; r < 2; r++)
        assert_int_equal(ep_gin_listen(&settings, &handle[r], &listener[r], NULL), EP_OK);
    memset(&handle[0].host, 0, sizeof handle[0].host); /* another one: it is dialled over TCP */
    make_deaf(&handle[0], &deaf);
    late.listener = listener[0];
    assert_int_equal(pthread_create(&thread, NULL, meet_late, &late), 0);
    assert_int_equal(ep_gin_comm_open(&settings, handles, 2, 1, listener[1], &comm, &error), EP_OK);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(late.status, EP_OK);
    assert_int_equal(error.status, EP_OK);
    ep_gin_comm_close(comm);
    ep_gin_comm_close(late.comm);
    for (int r = 0; r < 2; r++)
        ep_gin_listener_close(listener[r]);
    for (int i = 0; i < FULL; i++)
        close(deaf.held[i]);
}

/* ---- a rank that dies ---------------------------------------------------------------------------- */

enum { RANKS = 3 };

static int connected_before;

static int connected(void)
{
    struct sockaddr_storage peer;
    int n = 0;

    for (int fd = 3; fd < FDS; fd++) {
        socklen_t length = sizeof peer;

        n += getpeername(fd, (struct sockaddr *)&peer, &length) == 0;
    }
    return n;
}

/* A second connection is made when the first one's greeting has been answered. */
static void die_when_known(int number)
{
    (void)number;
    if (connected() >= connected_before + 2)
        raise(SIGKILL);
}

/* In a process of its own: it is connected to rank 0, and waits for rank 2. */
static void meet_and_die(const struct ep_gin_settings *settings, const struct ep_gin_handle *const handles[],
                         struct ep_gin_listener *listener)
{
    const struct itimerval every = { { 0, 20000 }, { 0, 20000 } };
    const struct sigaction action = { .sa_handler = die_when_known, .sa_flags = SA_RESTART };
    struct ep_gin_comm *comm;

    connected_before = connected();
    (void)sigaction(SIGALRM, &action, NULL);
    (void)setitimer(ITIMER_REAL, &every, NULL);
    (void)ep_gin_comm_open(settings, handles, RANKS, 1, listener, &comm, NULL);
    _exit(1);
}

/* Rank 2 never comes, and is not waited for until the time is over. */
static void who_dies_before_all_are_connected_is_missed(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_gin_listener *listener[RANKS];
    struct ep_gin_handle handle[RANKS];
    const struct ep_gin_handle *handles[] = { &handle[0], &handle[1], &handle[2] };
    struct ep_gin_settings settings;
    struct ep_gin_comm *comm;
    int status;
    pid_t pid;

    (void)state;
    assert_int_equal(ep_gin_settings_read(&settings, NULL), EP_OK);
    settings.timeout_ns = 60 * EP_NS_PER_S;
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(ep_gin_listen(&settings, &handle[r], &listener[r], NULL), EP_OK);
    pid = fork();
    if (pid == 0)
        meet_and_die(&settings, handles, listener[1]);
    assert_true(pid > 0);
    assert_int_equal(ep_gin_comm_open(&settings, handles, RANKS, 0, listener[0], &comm, &error), EP_UNAVAILABLE);
    assert_string_equal(error.text, "rank 1 has gone before all ranks were connected");
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    for (int r = 0; r < RANKS; r++)
        ep_gin_listener_close(listener[r]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_signal_while_a_rank_dials_is_no_answer),
        cmocka_unit_test(who_is_reached_by_a_later_dial_is_no_failure),
        cmocka_unit_test(who_dies_before_all_are_connected_is_missed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
