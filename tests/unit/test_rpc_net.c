/* Sockets: who may connect, what strangers can do, TLS. */
#include "rpc_fixture.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <grpc/grpc.h>

#include "ep_descriptors.h"

static struct fixture f;

static int prepare(void **state)
{
    (void)state;
    fixture_init(&f);
    return 0;
}

static int up(void **state)
{
    prepare(state);
    f.tcp = true;
    fixture_start(&f);
    return 0;
}

static int down(void **state)
{
    (void)state;
    fixture_stop(&f);
    return 0;
}

/* ---- raw sockets --------------------------------------------------------------------- */

static int connect_unix(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static int connect_tcp(int port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* The other side hung up: end of file, or a reset. */
static bool hung_up(int fd)
{
    char byte[256];
    ssize_t n = recv(fd, byte, sizeof byte, MSG_DONTWAIT);

    return n == 0 || (n < 0 && errno != EAGAIN);
}

static void say(int fd, const char *bytes, size_t n)
{
    assert_int_equal(send(fd, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* ---- unix sockets -------------------------------------------------------------------- */

static void peer_credentials_reach_the_handler(void **state)
{
    struct ep_error error;
    char answer[128], expected[32];

    (void)state;
    assert_ok(ping(f.channel, "peer", 5000, answer, &error), &error);
    assert_int_equal(atoi(answer), getpid());
    snprintf(expected, sizeof expected, "uid:%u", (unsigned)getuid());
    assert_ok(ping(f.channel, "identity", 5000, answer, &error), &error);
    assert_string_equal(answer, expected);
}

static void plaintext_tcp_is_anonymous(void **state)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ep_rpc_channel_open(f.client, f.tcp_target, NULL, 0, &channel, &error), &error);
    assert_ok(ping(channel, "identity", 5000, answer, &error), &error);
    assert_string_equal(answer, "anonymous");
    assert_ok(ping(channel, "peer", 5000, answer, &error), &error);
    assert_string_equal(answer, "-1");
    ep_rpc_channel_close(channel);
}

static atomic_bool loop_blocked, client_gone;

static void sleep_until_the_client_is_gone(struct fixture *fx)
{
    (void)fx;
    atomic_store(&loop_blocked, true);
    EVENTUALLY(atomic_load(&client_gone));
}

static void block_loop(void *arg)
{
    fixture_run(arg, sleep_until_the_client_is_gone);
}

/*
 * Its descriptor may be another connection's by the time the server looks: such a call must not
 * reach a handler, where it could pass for that other client's.
 */
static void call_of_a_closed_connection_is_not_served(void **state)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;
    uv_thread_t thread;
    char answer[128];

    (void)state;
    atomic_store(&loop_blocked, false);
    atomic_store(&client_gone, false);
    assert_ok(ep_rpc_channel_open(f.client, f.unix_target, NULL, 0, &channel, &error), &error);
    assert_ok(ping(channel, "connect", 5000, NULL, &error), &error);
    uv_thread_create(&thread, block_loop, &f);
    EVENTUALLY(atomic_load(&loop_blocked));
    assert_int_equal(ping(channel, "x", 100, NULL, &error), EP_DEADLINE_EXCEEDED);
    ep_rpc_channel_close(channel);
    usleep(100000); /* gRPC sees the end; were it later, the test would still pass */
    atomic_store(&client_gone, true);
    uv_thread_join(&thread);
    assert_ok(ping(f.channel, "peer", 5000, answer, &error), &error);
    assert_int_equal(atoi(answer), getpid());
    assert_int_equal(atomic_load(&f.requests), 2);
}

static bool refuse_all(const struct ep_rpc_peer *peer, void *user)
{
    (void)user;
    return peer->pid != getpid();
}

static void peer_may_be_turned_away(void **state)
{
    struct ep_error error;

    (void)state;
    f.accept_peer = refuse_all;
    fixture_start(&f);
    assert_int_equal(ping(f.channel, "x", 2000, NULL, &error), EP_UNAVAILABLE);
    assert_int_equal(atomic_load(&f.requests), 0);
}

static void socket_file_has_its_mode(void **state)
{
    struct stat st;

    (void)state;
    assert_int_equal(stat(f.path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
}

static void socket_file_goes_with_the_server(void **state)
{
    (void)state;
    fixture_drain(&f, 1000);
    EVENTUALLY(atomic_load(&f.drained) == 1);
    assert_int_not_equal(access(f.path, F_OK), 0);
}

static void live_path_is_refused(void **state)
{
    struct fixture second;
    struct ep_error error;

    (void)state;
    fixture_init(&second);
    snprintf(second.path, sizeof second.path, "%s", f.path);
    assert_false(fixture_try(&second));
    assert_int_equal(second.start_status, EP_ALREADY_EXISTS);
    assert_text(second.start_error.text, f.path);
    assert_text(second.start_error.text, "in use");
    fixture_stop(&second);
    assert_ok(ping(f.channel, "still here", 5000, NULL, &error), &error);
}

static void dead_path_is_replaced(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct ep_error error;

    (void)state;
    snprintf(address.sun_path, sizeof address.sun_path, "%s", f.path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd); /* as after a SIGKILL: the file is there, nobody listens */
    fixture_start(&f);
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
}

static void path_that_is_no_socket_is_left_alone(void **state)
{
    FILE *file = fopen(f.path, "w");

    (void)state;
    assert_non_null(file);
    fclose(file);
    assert_false(fixture_try(&f));
    assert_int_equal(f.start_status, EP_ALREADY_EXISTS);
    assert_text(f.start_error.text, "not a socket");
    assert_int_equal(access(f.path, F_OK), 0);
}

static void path_taken_over_is_not_unlinked(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    (void)state;
    unlink(f.path);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", f.path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    fixture_drain(&f, 1000);
    EVENTUALLY(atomic_load(&f.drained) == 1);
    assert_int_equal(access(f.path, F_OK), 0);
    close(fd);
}

/* ---- strangers ----------------------------------------------------------------------- */

static void garbage_is_hung_up_on(int fd)
{
    assert_true(fd >= 0);
    say(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27);
    EVENTUALLY(hung_up(fd));
    close(fd);
}

static void garbage_does_not_disturb_others(void **state)
{
    struct ep_error error;

    (void)state;
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    garbage_is_hung_up_on(connect_unix(f.path));
    garbage_is_hung_up_on(connect_tcp(f.port));
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
}

/* The preface, an empty SETTINGS frame, then `more`. */
static int speak_http2(int fd, const char *more, size_t n)
{
    static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";

    assert_true(fd >= 0);
    say(fd, hello, sizeof hello);
    say(fd, more, n);
    return fd;
}

static void garbage_after_the_preface_does_not_disturb_others(void **state)
{
    struct ep_error error;
    int fds[2];

    (void)state;
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    fds[0] = speak_http2(connect_unix(f.path), "\xff\xff\xff\xff\xff\xff\xff\xff\xff garbage", 17);
    fds[1] = speak_http2(connect_tcp(f.port), "\xff\xff\xff\xff\xff\xff\xff\xff\xff garbage", 17);
    for (int i = 0; i < 2; i++) {
        EVENTUALLY(hung_up(fds[i]));
        close(fds[i]);
    }
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
}

static void truncated_frame_does_not_disturb_others(void **state)
{
    struct ep_error error;
    int fds[2];

    (void)state;
    /* HEADERS of 64 bytes on stream 1, of which 3 come. */
    fds[0] = speak_http2(connect_unix(f.path), "\0\0\100\1\4\0\0\0\1abc", 12);
    fds[1] = speak_http2(connect_tcp(f.port), "\0\0\100\1\4\0\0\0\1abc", 12);
    for (int i = 0; i < 50; i++)
        assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    close(fds[0]);
    close(fds[1]);
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
}

static void silent_connection_is_dropped(void **state)
{
    int fds[3];

    (void)state;
    f.options.handshake_timeout_ms = 200;
    f.tcp = true;
    fixture_start(&f);
    fds[0] = connect_unix(f.path);
    fds[1] = connect_tcp(f.port);
    fds[2] = connect_unix(f.path);
    say(fds[2], "PRI * HT", 8); /* begins to speak and stops */
    for (int i = 0; i < 3; i++) {
        assert_true(fds[i] >= 0);
        EVENTUALLY(hung_up(fds[i]));
        close(fds[i]);
    }
}

static void preface_in_pieces_is_understood(void **state)
{
    static const char hello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";
    int fd = connect_unix(f.path);
    char answer[9];

    (void)state;
    for (size_t i = 0; i < sizeof hello; i++) {
        say(fd, hello + i, 1);
        usleep(2000);
    }
    assert_int_equal(recv(fd, answer, sizeof answer, MSG_WAITALL), 9); /* the server's SETTINGS */
    assert_int_equal(answer[3], 4);
    close(fd);
}

static void silent_crowd_keeps_nobody_out(void **state)
{
    enum { N = 2000 };
    static int fds[N];
    struct ep_error error;
    struct rlimit files = { 0 };

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = files.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    ep_descriptors_reserve(4 * N); /* as ep-server does */
    f.options.max_connections = 256;
    fixture_start(&f);
    for (int i = 0; i < N; i++)
        EVENTUALLY((fds[i] = connect_unix(f.path)) >= 0);
    for (int i = 0; i < 5; i++) {
        struct ep_rpc_channel *channel;

        assert_ok(ep_rpc_channel_open(f.client, f.unix_target, NULL, 0, &channel, &error), &error);
        assert_ok(ping(channel, "x", 10000, NULL, &error), &error);
        ep_rpc_channel_close(channel);
    }
    for (int i = 0; i < N; i++)
        close(fds[i]);
    assert_ok(ping(f.channel, "x", 10000, NULL, &error), &error);
}

static void two_have_a_place(const char *target, const struct ep_rpc_tls *tls)
{
    struct ep_rpc_channel *channels[3];
    struct ep_error error;

    for (int i = 0; i < 3; i++)
        assert_ok(ep_rpc_channel_open(f.client, target, tls, 0, &channels[i], &error), &error);
    assert_ok(ping(channels[0], "x", 5000, NULL, &error), &error);
    assert_ok(ping(channels[1], "x", 5000, NULL, &error), &error);
    assert_int_equal(ping(channels[2], "x", 5000, NULL, &error), EP_UNAVAILABLE);
    ep_rpc_channel_close(channels[0]);
    EVENTUALLY(ping(channels[2], "x", 5000, NULL, &error) == EP_OK);
    ep_rpc_channel_close(channels[1]);
    ep_rpc_channel_close(channels[2]);
}

static void max_connections_refuses_and_recovers(void **state)
{
    (void)state;
    f.options.max_connections = 2;
    fixture_start(&f);
    two_have_a_place(f.unix_target, NULL);
}

static double cpu_seconds(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec)
           + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* Every descriptor of the process is taken while 8 clients connect.  Returns the CPU time of 0.5 s. */
static double starve(int (*make)(void), void (*join)(int fd))
{
    enum { N = 300, EXTRA = 8 };
    struct rlimit old, low;
    int taken[N], fds[EXTRA], n = 0;
    double cpu;

    for (int i = 0; i < EXTRA; i++) /* made beforehand, connected when nothing is left */
        fds[i] = make();
    getrlimit(RLIMIT_NOFILE, &old);
    low = old;
    low.rlim_cur = 200;
    setrlimit(RLIMIT_NOFILE, &low);
    while (n < N && (taken[n] = dup(0)) >= 0)
        n++;
    for (int i = 0; i < EXTRA; i++)
        join(fds[i]);
    cpu = cpu_seconds();
    usleep(500000); /* measured over a time, not waited for */
    cpu = cpu_seconds() - cpu;
    while (n > 0)
        close(taken[--n]);
    setrlimit(RLIMIT_NOFILE, &old);
    for (int i = 0; i < EXTRA; i++)
        close(fds[i]);
    return cpu;
}

static int make_unix(void)
{
    return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
}

static void join_unix(int fd)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    snprintf(address.sun_path, sizeof address.sun_path, "%s", f.path);
    (void)connect(fd, (struct sockaddr *)&address, sizeof address);
}

static int make_tcp(void)
{
    return socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
}

static void join_tcp(int fd)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)f.port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

    (void)connect(fd, (struct sockaddr *)&address, sizeof address);
}

static void reaches(const char *target, const struct ep_rpc_tls *tls)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;

    assert_ok(ep_rpc_channel_open(f.client, target, tls, 0, &channel, &error), &error);
    EVENTUALLY(ping(channel, "x", 5000, NULL, &error) == EP_OK);
    ep_rpc_channel_close(channel);
}

static void out_of_descriptors_neither_spins_nor_kills(void **state)
{
    struct ep_error error;
    double cpu;

    (void)state;
    assert_ok(ping(f.channel, "x", 5000, NULL, &error), &error);
    cpu = starve(make_unix, join_unix);
    assert_ok(ping(f.channel, "who is in stays in", 5000, NULL, &error), &error);
    reaches(f.unix_target, NULL);
    assert_true(cpu < 0.25);
    cpu = starve(make_tcp, join_tcp);
    reaches(f.tcp_target, NULL);
    assert_true(cpu < 0.25);
}

/* ---- TCP ----------------------------------------------------------------------------- */

static ep_status listen_error;
static struct ep_error listen_words;

static void listen_on_the_same_port(struct fixture *fx)
{
    struct ep_rpc_server *server;
    char address[32];
    int port;

    snprintf(address, sizeof address, "127.0.0.1:%d", fx->port);
    if (ep_rpc_server_create(fx->rpc, NULL, &server, NULL) != EP_OK)
        return;
    listen_error = ep_rpc_server_listen_tcp(server, address, fx->tls, &port, &listen_words);
    ep_rpc_server_destroy(server);
}

static void port_in_use_is_refused(void **state)
{
    (void)state;
    fixture_run(&f, listen_on_the_same_port);
    assert_int_equal(listen_error, EP_ALREADY_EXISTS);
    assert_text(listen_words.text, f.tcp_target);
    assert_text(listen_words.text, "in use");
}

static void listen_without_descriptors(struct fixture *fx)
{
    struct ep_rpc_server *server;
    struct rlimit before, none;
    char path[sizeof fx->path + 2];

    snprintf(path, sizeof path, "%s.2", fx->path);
    if (ep_rpc_server_create(fx->rpc, NULL, &server, NULL) != EP_OK || getrlimit(RLIMIT_NOFILE, &before) != 0)
        return;
    none = (struct rlimit){ .rlim_cur = 0, .rlim_max = before.rlim_max };
    if (setrlimit(RLIMIT_NOFILE, &none) == 0)
        listen_error = ep_rpc_server_listen_unix(server, path, 0600, NULL, NULL, &listen_words);
    (void)setrlimit(RLIMIT_NOFILE, &before);
    ep_rpc_server_destroy(server);
}

static void path_without_descriptors_is_not_forbidden(void **state)
{
    (void)state;
    fixture_run(&f, listen_without_descriptors);
    assert_int_equal(listen_error, EP_IO);
    assert_text(listen_words.text, "Too many open files");
}

static void listen_on_nonsense(struct fixture *fx)
{
    struct ep_rpc_server *server;
    int port;

    if (ep_rpc_server_create(fx->rpc, NULL, &server, NULL) != EP_OK)
        return;
    listen_error = ep_rpc_server_listen_tcp(server, "nonsense", NULL, &port, &listen_words);
    ep_rpc_server_destroy(server);
}

static void address_without_port_is_refused(void **state)
{
    (void)state;
    fixture_run(&f, listen_on_nonsense);
    assert_int_equal(listen_error, EP_INVALID_ARGUMENT);
    assert_text(listen_words.text, "HOST:PORT");
}

/* ---- TLS ----------------------------------------------------------------------------- */

static char ca[96], server_cert[96], server_key[96], client_cert[96], client_key[96];
static struct ep_rpc_tls server_tls, client_tls;

static void sh(const char *format, ...)
{
    char command[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    assert_int_equal(system(command), 0);
}

/* A pair of dir/NAME.pem and .key, signed by the test's CA. */
static void issue(const char *name, const char *common_name)
{
    sh("cd %s && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj '/CN=%s' "
       "-keyout %s.key -out %s.csr 2>/dev/null && "
       "printf 'subjectAltName=DNS:ep-server,DNS:localhost,IP:127.0.0.1' > ext && "
       "openssl x509 -req -in %s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
       "-extfile ext -out %s.pem.new 2>/dev/null && mv %s.pem.new %s.pem",
       f.dir, common_name, name, name, name, name, name, name);
}

static int prepare_tls(void **state)
{
    prepare(state);
    sh("cd %s && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
       "-subj '/CN=test CA' -keyout ca.key -out ca.pem 2>/dev/null", f.dir);
    issue("server", "ep-server");
    issue("client", "operator");
    snprintf(ca, sizeof ca, "%s/ca.pem", f.dir);
    snprintf(server_cert, sizeof server_cert, "%s/server.pem", f.dir);
    snprintf(server_key, sizeof server_key, "%s/server.key", f.dir);
    snprintf(client_cert, sizeof client_cert, "%s/client.pem", f.dir);
    snprintf(client_key, sizeof client_key, "%s/client.key", f.dir);
    server_tls = (struct ep_rpc_tls){ .ca = ca, .cert = server_cert, .key = server_key };
    client_tls = (struct ep_rpc_tls){ .ca = ca, .cert = client_cert, .key = client_key };
    f.tcp = true;
    f.tls = &server_tls;
    return 0;
}

static int up_tls(void **state)
{
    prepare_tls(state);
    fixture_start(&f);
    return 0;
}

static ep_status ping_over(const struct ep_rpc_tls *tls, char *answer, struct ep_error *error)
{
    struct ep_rpc_channel *channel;
    ep_status status = ep_rpc_channel_open(f.client, f.tcp_target, tls, 0, &channel, error);

    if (status != EP_OK)
        return status;
    status = ping(channel, "identity", 10000, answer, error);
    ep_rpc_channel_close(channel);
    return status;
}

static void mutual_tls_gives_the_common_name(void **state)
{
    struct ep_error error;
    char answer[128];

    (void)state;
    assert_ok(ping_over(&client_tls, answer, &error), &error);
    assert_string_equal(answer, "operator");
}

static void client_without_certificate_is_refused(void **state)
{
    const struct ep_rpc_tls bare = { .ca = ca };
    struct ep_error error;

    (void)state;
    assert_int_equal(ping_over(&bare, NULL, &error), EP_UNAVAILABLE);
    assert_text(error.text, "certificate");
    assert_int_equal(atomic_load(&f.requests), 0);
}

static void plaintext_to_tls_gives_a_hint(void **state)
{
    struct ep_error error;

    (void)state;
    assert_int_equal(ping_over(NULL, NULL, &error), EP_UNAVAILABLE);
    assert_text(error.text, f.tcp_target);
    assert_text(error.text, "TLS");
}

static void tls_to_plaintext_gives_a_hint(void **state)
{
    struct fixture plain;
    struct ep_rpc_channel *channel;
    struct ep_error error;

    (void)state;
    fixture_init(&plain);
    plain.tcp = true;
    fixture_start(&plain);
    assert_ok(ep_rpc_channel_open(f.client, plain.tcp_target, &client_tls, 0, &channel, &error),
              &error);
    assert_int_equal(ping(channel, "x", 10000, NULL, &error), EP_UNAVAILABLE);
    assert_text(error.text, "plaintext");
    ep_rpc_channel_close(channel);
    fixture_stop(&plain);
}

static void wrong_name_is_refused(void **state)
{
    struct ep_rpc_tls wrong = client_tls;
    struct ep_error error;

    (void)state;
    wrong.name = "somebody-else";
    assert_int_equal(ping_over(&wrong, NULL, &error), EP_UNAVAILABLE);
    wrong.name = "ep-server";
    assert_ok(ping_over(&wrong, NULL, &error), &error);
}

static void missing_file_is_named(void **state)
{
    struct ep_rpc_tls wrong = client_tls;
    struct ep_error error;

    (void)state;
    wrong.ca = "/nonexistent/ca.pem";
    assert_int_equal(ping_over(&wrong, NULL, &error), EP_NOT_FOUND);
    assert_text(error.text, "/nonexistent/ca.pem");
    wrong.ca = "/etc/hostname";
    assert_int_equal(ping_over(&wrong, NULL, &error), EP_INVALID_ARGUMENT);
    assert_text(error.text, "not a PEM");
}

static void tls_port_in_use_is_refused(void **state)
{
    (void)state;
    fixture_run(&f, listen_on_the_same_port);
    assert_int_equal(listen_error, EP_ALREADY_EXISTS);
    assert_text(listen_words.text, "in use");
}

/* The server's new certificate serves the next handshake; who is connected stays connected. */
static void server_certificate_rotates(void **state)
{
    struct ep_rpc_tls renamed = client_tls;
    struct ep_rpc_channel *channel;
    struct ep_error error;

    (void)state;
    assert_ok(ep_rpc_channel_open(f.client, f.tcp_target, &client_tls, 0, &channel, &error), &error);
    assert_ok(ping(channel, "x", 10000, NULL, &error), &error);
    sh("cd %s && mv ca.pem oldca.pem && openssl req -x509 -newkey ec -pkeyopt "
       "ec_paramgen_curve:P-256 -nodes -days 2 -subj '/CN=second CA' -keyout ca.key -out ca.pem "
       "2>/dev/null && cat ca.pem oldca.pem > both.pem", f.dir);
    issue("server", "rotated");
    renamed.ca = ca; /* the new CA only */
    sh("cp %s/both.pem %s/ca.pem", f.dir, f.dir); /* old clients are still let in */
    assert_ok(ping_over(&renamed, NULL, &error), &error);
    assert_ok(ping(channel, "x", 10000, NULL, &error), &error);
    ep_rpc_channel_close(channel);
}

/* A new connection of an open channel uses what the client's files hold then. */
static void client_certificate_rotates(void **state)
{
    struct ep_rpc_channel *channel;
    struct fixture second;
    struct ep_error error;
    char answer[128];

    (void)state;
    fixture_init(&second);
    second.tcp = true;
    second.tls = &server_tls;
    fixture_start(&second);
    assert_ok(ep_rpc_channel_open(f.client, second.tcp_target, &client_tls, 0, &channel, &error),
              &error);
    issue("client", "second-operator"); /* before the first connection: the channel is lazy */
    assert_ok(ping(channel, "identity", 10000, answer, &error), &error);
    assert_string_equal(answer, "second-operator");
    ep_rpc_channel_close(channel);
    fixture_stop(&second);
}

static void out_of_descriptors_does_not_kill_tls(void **state)
{
    (void)state;
    reaches(f.tcp_target, &client_tls);
    (void)starve(make_tcp, join_tcp);
    reaches(f.tcp_target, &client_tls);
}

static void max_connections_refuses_with_tls_too(void **state)
{
    (void)state;
    f.options.max_connections = 2;
    fixture_start(&f);
    two_have_a_place(f.tcp_target, &client_tls);
}

static void unix_target_takes_no_tls(void **state)
{
    struct ep_rpc_channel *channel;
    struct ep_error error;

    (void)state;
    assert_int_equal(ep_rpc_channel_open(f.client, f.unix_target, &client_tls, 0, &channel, &error),
                     EP_INVALID_ARGUMENT);
}

/* ---- the beginning of gRPC ----------------------------------------------------------- */

static unsigned threads_left = UINT_MAX;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
    if (threads_left == 0)
        return EAGAIN;
    threads_left--;
    return __real_pthread_create(thread, attributes, run, arg);
}

/* It would go on without those that it cannot make, and wait for them for ever. */
static void too_few_threads_are_said_before_grpc_begins(void **state)
{
    struct ep_error error;
    struct ep_rpc *rpc;

    (void)state;
    threads_left = 3;
    assert_int_equal(ep_rpc_open(NULL, &rpc, &error), EP_RESOURCE_EXHAUSTED);
    threads_left = UINT_MAX;
    assert_text(error.text, "cannot open the RPC runtime: 3 of the ");
    assert_text(error.text, "pids.max");
    assert_false(grpc_is_initialized());
    assert_ok(ep_rpc_open(NULL, &rpc, &error), &error);
    ep_rpc_close(rpc);
}

/* It would end this process. */
static void too_few_descriptors_are_said_before_grpc_begins(void **state)
{
    const int next = dup(STDIN_FILENO);
    struct rlimit before, few;
    struct ep_error error;
    struct ep_rpc *rpc;

    (void)state;
    assert_true(next >= 0 && close(next) == 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (int n = 0; n < 3; n++) {
        few = (struct rlimit){ (rlim_t)(next + n), before.rlim_max };
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        assert_int_equal(ep_rpc_open(NULL, &rpc, &error), EP_RESOURCE_EXHAUSTED);
        assert_text(error.text, "descriptors that it needs");
        assert_text(error.text, "Too many open files");
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_false(grpc_is_initialized());
    assert_ok(ep_rpc_open(NULL, &rpc, &error), &error);
    ep_rpc_close(rpc);
}

/* ---- the end of gRPC ----------------------------------------------------------------- */

static atomic_bool let_go;

/* What gRPC does when the last user of a connection is a thread of its own. */
static void late_channel(void *unused)
{
    (void)unused;
    usleep(100000); /* how late it is */
    atomic_store(&let_go, true);
    grpc_shutdown();
}

static void close_waits_for_channels_that_grpc_still_has(void **state)
{
    struct ep_error error;
    struct ep_rpc *rpc;
    uv_thread_t thread;

    (void)state;
    atomic_store(&let_go, false);
    assert_ok(ep_rpc_open(NULL, &rpc, &error), &error);
    grpc_init(); /* the channel's */
    uv_thread_create(&thread, late_channel, NULL);
    ep_rpc_close(rpc);
    assert_true(atomic_load(&let_go));
    assert_false(grpc_is_initialized());
    uv_thread_join(&thread);
}

/* As a server's that is stopped. */
static int listen_in_silence(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 8), 0);
    return fd;
}

static void close_ends_what_connects_to_a_server_that_says_nothing(void **state)
{
    char folder[] = "/tmp/ep-rpc-XXXXXX", path[64], target[80];
    struct ep_rpc_channel *channel;
    struct ep_error error;
    struct ep_rpc *rpc;
    int fd;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(target, sizeof target, "unix:%s", path);
    fd = listen_in_silence(path);
    assert_ok(ep_rpc_open(NULL, &rpc, &error), &error);
    ep_rpc_connect_within(rpc, 200);
    assert_ok(ep_rpc_channel_open(rpc, target, NULL, 0, &channel, &error), &error);
    assert_int_equal(ping(channel, "x", 200, NULL, &error), EP_DEADLINE_EXCEEDED);
    ep_rpc_channel_close(channel);
    ep_rpc_close(rpc);
    assert_false(grpc_is_initialized());
    close(fd);
    unlink(path);
    rmdir(folder);
}

static void close_waits_for_nobody_who_had_grpc_before(void **state)
{
    struct ep_error error;
    struct ep_rpc *rpc;
    uint64_t start;

    (void)state;
    grpc_init();
    assert_ok(ep_rpc_open(NULL, &rpc, &error), &error);
    start = ep_clock_ns();
    ep_rpc_close(rpc);
    assert_true(ep_clock_ns() - start < 2 * EP_NS_PER_S); /* the bound of the wait */
    assert_true(grpc_is_initialized());
    grpc_shutdown_blocking();
}

#define T(name) cmocka_unit_test_setup_teardown(name, up, down)
#define P(name) cmocka_unit_test_setup_teardown(name, prepare, down)
#define S(name) cmocka_unit_test_setup_teardown(name, up_tls, down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(peer_credentials_reach_the_handler),
        T(plaintext_tcp_is_anonymous),
        T(call_of_a_closed_connection_is_not_served),
        P(peer_may_be_turned_away),
        T(socket_file_has_its_mode),
        T(socket_file_goes_with_the_server),
        T(live_path_is_refused),
        P(dead_path_is_replaced),
        P(path_that_is_no_socket_is_left_alone),
        T(path_taken_over_is_not_unlinked),
        T(garbage_does_not_disturb_others),
        T(garbage_after_the_preface_does_not_disturb_others),
        T(truncated_frame_does_not_disturb_others),
        P(silent_connection_is_dropped),
        T(preface_in_pieces_is_understood),
        P(silent_crowd_keeps_nobody_out),
        P(max_connections_refuses_and_recovers),
        T(out_of_descriptors_neither_spins_nor_kills),
        T(path_without_descriptors_is_not_forbidden),
        T(port_in_use_is_refused),
        T(address_without_port_is_refused),
        S(mutual_tls_gives_the_common_name),
        S(client_without_certificate_is_refused),
        S(plaintext_to_tls_gives_a_hint),
        S(tls_to_plaintext_gives_a_hint),
        S(wrong_name_is_refused),
        S(missing_file_is_named),
        S(tls_port_in_use_is_refused),
        S(server_certificate_rotates),
        S(client_certificate_rotates),
        S(out_of_descriptors_does_not_kill_tls),
        cmocka_unit_test_setup_teardown(max_connections_refuses_with_tls_too, prepare_tls, down),
        S(unix_target_takes_no_tls),
        cmocka_unit_test(too_few_threads_are_said_before_grpc_begins),
        cmocka_unit_test(too_few_descriptors_are_said_before_grpc_begins),
        cmocka_unit_test(close_waits_for_channels_that_grpc_still_has),
        cmocka_unit_test(close_ends_what_connects_to_a_server_that_says_nothing),
        cmocka_unit_test(close_waits_for_nobody_who_had_grpc_before),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
