/*
 * Sockets that we accept on ourselves: unix sockets and plaintext TCP.
 *
 *     accepted --says the HTTP/2 preface--> held (gRPC's from here on) --> closed
 *        |--garbage, EOF, handshake_timeout_ms, or pushed out by a newer one--> closed
 *
 * gRPC's own listener gives no peer credentials, takes over a live unix path, and stops for good
 * at the first EMFILE.  Here, who has not spoken yet costs a descriptor and a hundred bytes and
 * never keeps anyone else out: when all places are taken, the oldest silent connection goes.
 * All of it on the loop's thread.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <grpc/grpc_posix.h>

#include "rpc_accept.h"
#include "rpc_private.h"

#define ACCEPT_BATCH     64  /* per turn of the loop, so that those accepted get to speak */
#define PARTIAL_CHECK_MS 20  /* a preface that came in pieces is looked at again */
#define PAUSE_MS         100 /* after accept failed and nothing could be given up for it */
#define SWEEP_MS         20  /* between two counts of the connections that gRPC holds */
#define LOG_PERIOD_MS    1000

/* RFC 9113, 3.4: a client speaks first, this and then a SETTINGS frame. */
static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
#define PREFACE_BYTES      (sizeof preface - 1)
#define FRAME_HEADER_BYTES 9
#define FRAME_TYPE_AT      3
#define FRAME_SETTINGS     4

/* A connection that has not spoken. */
struct silent {
    uv_poll_t poll;
    struct silent *prev, *next;
    struct rpc_gate *gate;
    int fd;
    bool partial;
    uint64_t deadline_ms;
};

struct rpc_gate {
    struct ep_rpc_server *server;
    grpc_server_credentials *insecure;
    uv_timer_t *timer;
    size_t limit;                   /* silent and held together */
    struct silent *oldest, *newest; /* in order of their deadlines */
    size_t n_silent;
    struct rpc_held held;
    uint64_t swept_ms;
    bool paused;
    uint64_t refused, logged_ms;
};

static void on_gate_timer(uv_timer_t *timer);

/* ---- the timer: next thing that is due ----------------------------------------------- */

static void schedule(struct rpc_gate *gate)
{
    uint64_t now = rpc_now_ms(), delay = UINT64_MAX;

    if (gate->oldest)
        delay = gate->oldest->deadline_ms > now ? gate->oldest->deadline_ms - now : 1;
    for (const struct silent *s = gate->oldest; s && delay > PARTIAL_CHECK_MS; s = s->next)
        if (s->partial)
            delay = PARTIAL_CHECK_MS;
    if (gate->paused && delay > PAUSE_MS)
        delay = PAUSE_MS;
    if (delay == UINT64_MAX)
        uv_timer_stop(gate->timer);
    else
        uv_timer_start(gate->timer, on_gate_timer, delay, 0);
}

/* ---- connections that gRPC holds ----------------------------------------------------- */

static void sweep_held(struct rpc_gate *gate)
{
    uint64_t now = rpc_now_ms();

    if (now - gate->swept_ms < SWEEP_MS)
        return;
    gate->swept_ms = now;
    rpc_held_sweep(&gate->held);
}

static void hand_over(struct rpc_gate *gate, int fd)
{
    if (!rpc_held_add(&gate->held, fd)) {
        close(fd);
        return;
    }
    grpc_server_add_channel_from_fd(gate->server->server, fd, gate->insecure);
}

/* ---- connections that have not spoken ------------------------------------------------ */

static void free_silent(uv_handle_t *handle)
{
    free(RPC_CONTAINER_OF(handle, struct silent, poll));
}

/* Takes it off the list; returns the descriptor, which is the caller's now. */
static int detach(struct silent *s)
{
    struct rpc_gate *gate = s->gate;
    int fd = s->fd;

    *(s->prev ? &s->prev->next : &gate->oldest) = s->next;
    *(s->next ? &s->next->prev : &gate->newest) = s->prev;
    gate->n_silent--;
    uv_close((uv_handle_t *)&s->poll, free_silent); /* out of the loop's epoll set at once */
    return fd;
}

static void drop(struct silent *s)
{
    close(detach(s));
}

enum word { WORD_NONE, WORD_PARTIAL, WORD_HTTP2, WORD_WRONG };

/* What has the client said?  Looks without taking: gRPC reads it again. */
static enum word listen_to(int fd)
{
    char said[PREFACE_BYTES + FRAME_HEADER_BYTES];
    ssize_t n = recv(fd, said, sizeof said, MSG_PEEK | MSG_DONTWAIT);

    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? WORD_NONE : WORD_WRONG;
    if (n == 0 || memcmp(said, preface, (size_t)n < PREFACE_BYTES ? (size_t)n : PREFACE_BYTES) != 0)
        return WORD_WRONG;
    if ((size_t)n < sizeof said)
        return WORD_PARTIAL;
    return said[PREFACE_BYTES + FRAME_TYPE_AT] == FRAME_SETTINGS ? WORD_HTTP2 : WORD_WRONG;
}

static void look(struct silent *s)
{
    enum word word = listen_to(s->fd);

    switch (word) {
    case WORD_HTTP2: {
        struct rpc_gate *gate = s->gate;

        hand_over(gate, detach(s));
        break;
    }
    case WORD_WRONG:
        drop(s);
        break;
    case WORD_PARTIAL: /* would stay readable: the timer looks again instead */
        s->partial = true;
        uv_poll_stop(&s->poll);
        schedule(s->gate);
        break;
    case WORD_NONE:
        break;
    }
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    struct silent *s = RPC_CONTAINER_OF(poll, struct silent, poll);

    (void)events;
    if (status < 0)
        drop(s);
    else
        look(s);
}

static void wait_for_word(struct rpc_gate *gate, int fd)
{
    struct silent *s = calloc(1, sizeof *s);

    if (!s || uv_poll_init(gate->server->rpc->loop, &s->poll, fd) != 0) {
        free(s);
        close(fd);
        return;
    }
    s->gate = gate;
    s->fd = fd;
    s->deadline_ms = rpc_now_ms() + gate->server->options.handshake_timeout_ms;
    s->prev = gate->newest;
    *(s->prev ? &s->prev->next : &gate->oldest) = s;
    gate->newest = s;
    gate->n_silent++;
    if (uv_poll_start(&s->poll, UV_READABLE, on_readable) != 0) {
        drop(s);
        return;
    }
    if (gate->n_silent == 1)
        schedule(gate);
}

static void say_refused(struct rpc_gate *gate, const char *why)
{
    uint64_t now = rpc_now_ms();

    gate->refused++;
    if (gate->logged_ms && now - gate->logged_ms < LOG_PERIOD_MS)
        return;
    EP_WARN("rpc", "connection refused", EP_S("reason", why), EP_U("refused", gate->refused),
            EP_U("silent", gate->n_silent), EP_U("open", gate->held.n));
    gate->logged_ms = now;
    gate->refused = 0;
}

static bool make_room(struct rpc_gate *gate)
{
    if (gate->n_silent + gate->held.n >= gate->limit)
        sweep_held(gate);
    if (gate->n_silent + gate->held.n < gate->limit)
        return true;
    if (!gate->oldest)
        return false;
    drop(gate->oldest);
    return true;
}

static void admit(struct rpc_gate *gate, int fd)
{
    enum word word = listen_to(fd); /* most clients have spoken by now */

    if (word == WORD_WRONG) {
        close(fd);
    } else if (!make_room(gate)) {
        say_refused(gate, "max_connections");
        close(fd);
    } else if (word == WORD_HTTP2) {
        hand_over(gate, fd);
    } else {
        wait_for_word(gate, fd);
    }
}

/* ---- accept -------------------------------------------------------------------------- */

static bool peer_allowed(const struct rpc_listener *l, int fd)
{
    struct ucred cred;
    socklen_t size = sizeof cred;
    struct ep_rpc_peer peer;

    if (!l->accept_peer)
        return true;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0)
        return false;
    peer = (struct ep_rpc_peer){ .pid = cred.pid, .uid = cred.uid, .gid = cred.gid };
    return l->accept_peer(&peer, l->user);
}

static void greet(struct rpc_listener *l, int fd)
{
    int one = 1;

    if (l->path && !peer_allowed(l, fd)) {
        say_refused(l->gate, "peer not allowed");
        close(fd);
        return;
    }
    if (!l->path)
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    admit(l->gate, fd);
}

static void pause_all(struct rpc_gate *gate)
{
    for (struct rpc_listener *l = gate->server->listeners; l; l = l->next)
        if (l->polling)
            uv_poll_stop(&l->poll);
    gate->paused = true;
    schedule(gate);
}

/*
 * Out of descriptors (or memory): give up the oldest silent connection; else hang up on the
 * newcomer; else rest a while.  The socket stays readable meanwhile, so doing nothing would spin.
 * True: try to accept again.
 */
static bool relieve(struct rpc_listener *l)
{
    struct rpc_gate *gate = l->gate;

    if (gate->oldest) {
        drop(gate->oldest);
        return true;
    }
    say_refused(gate, "out of file descriptors");
    if (rpc_accept_and_drop(l->fd))
        return true;
    pause_all(gate);
    return false;
}

/* True: there may be more. */
static bool accept_one(struct rpc_listener *l)
{
    int fd = rpc_accept(l->fd);

    if (fd >= 0) {
        greet(l, fd);
        return true;
    }
    switch (errno) {
    case EAGAIN:
        return false;
    case EMFILE: case ENFILE: case ENOBUFS: case ENOMEM:
        return relieve(l);
    default: /* the connection's own end, see accept(2) */
        return true;
    }
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct rpc_listener *l = RPC_CONTAINER_OF(poll, struct rpc_listener, poll);

    (void)events;
    if (status < 0) {
        EP_ERROR("rpc", "listener failed", EP_S("error", uv_strerror(status)));
        pause_all(l->gate);
        return;
    }
    for (int i = 0; i < ACCEPT_BATCH && accept_one(l); i++)
        ;
}

static void poll_listeners(struct rpc_gate *gate)
{
    for (struct rpc_listener *l = gate->server->listeners; l; l = l->next)
        l->polling = uv_poll_start(&l->poll, UV_READABLE, on_connection) == 0;
}

static void on_gate_timer(uv_timer_t *timer)
{
    struct rpc_gate *gate = timer->data;
    uint64_t now = rpc_now_ms();
    struct silent *next;

    while (gate->oldest && gate->oldest->deadline_ms <= now)
        drop(gate->oldest);
    for (struct silent *s = gate->oldest; s; s = next) {
        next = s->next;
        if (s->partial)
            look(s);
    }
    if (gate->paused) {
        gate->paused = false;
        poll_listeners(gate);
    }
    schedule(gate);
}

/* ---- the gate's life ----------------------------------------------------------------- */

/* Half of the descriptors at most: the rest of the process wants to open files too. */
static size_t settle_limit(uint32_t asked)
{
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur / 2 >= asked)
        return asked;
    EP_WARN("rpc", "fewer connections than asked for: the limit of open files is low",
            EP_U("asked", asked), EP_U("connections", files.rlim_cur / 2),
            EP_U("open_files", files.rlim_cur));
    return files.rlim_cur / 2 > 0 ? files.rlim_cur / 2 : 1;
}

ep_status rpc_gate_create(struct ep_rpc_server *server, struct ep_error *error)
{
    struct rpc_gate *gate = calloc(1, sizeof *gate);

    if (!gate)
        goto no_memory;
    gate->limit = settle_limit(server->options.max_connections);
    gate->timer = calloc(1, sizeof *gate->timer);
    if (!gate->timer || !rpc_held_open(&gate->held, gate->limit))
        goto free_gate;
    gate->server = server;
    uv_timer_init(server->rpc->loop, gate->timer); /* cannot fail */
    gate->timer->data = gate;
    gate->insecure = grpc_insecure_server_credentials_create();
    rpc_accept_reserve();
    server->gate = gate;
    return EP_OK;

free_gate:
    free(gate->timer);
    free(gate);
no_memory:
    return ep_error_set(error, EP_NO_MEMORY, "cannot create a server: out of memory");
}

size_t rpc_gate_limit(const struct ep_rpc_server *server)
{
    return server->gate->limit;
}

static void free_handle(uv_handle_t *handle)
{
    free(handle);
}

void rpc_gate_free(struct ep_rpc_server *server)
{
    struct rpc_gate *gate = server->gate;

    if (!gate)
        return;
    uv_close((uv_handle_t *)gate->timer, free_handle);
    grpc_server_credentials_release(gate->insecure);
    rpc_held_close(&gate->held);
    free(gate);
    server->gate = NULL;
}

ep_status rpc_listeners_start(struct ep_rpc_server *server, struct ep_error *error)
{
    poll_listeners(server->gate);
    for (const struct rpc_listener *l = server->listeners; l; l = l->next)
        if (!l->polling)
            return ep_error_set(error, EP_INTERNAL, "cannot poll the listening socket");
    return EP_OK;
}

static void free_listener(uv_handle_t *handle)
{
    struct rpc_listener *l = RPC_CONTAINER_OF(handle, struct rpc_listener, poll);

    free(l->path);
    free(l);
}

/* The file goes only while it is ours: another server may have replaced it since. */
static void unlink_own(const struct rpc_listener *l)
{
    struct stat st;

    if (l->path && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->path);
}

void rpc_listeners_close(struct ep_rpc_server *server)
{
    while (server->listeners) {
        struct rpc_listener *l = server->listeners;

        server->listeners = l->next;
        unlink_own(l);
        uv_close((uv_handle_t *)&l->poll, free_listener);
        close(l->fd);
    }
    if (!server->gate)
        return;
    while (server->gate->oldest)
        drop(server->gate->oldest);
    server->gate->paused = false;
    schedule(server->gate);
}

ep_status rpc_listener_add(struct ep_rpc_server *server, int fd, char *path,
                           struct rpc_listener **out, struct ep_error *error)
{
    struct rpc_listener *l = calloc(1, sizeof *l);
    int result = l ? uv_poll_init(server->rpc->loop, &l->poll, fd) : UV_ENOMEM;

    if (result != 0) {
        free(l);
        close(fd);
        return ep_error_set(error, EP_INTERNAL, "cannot listen: %s", uv_strerror(result));
    }
    l->gate = server->gate;
    l->fd = fd;
    l->path = path;
    l->next = server->listeners;
    server->listeners = l;
    *out = l;
    return EP_OK;
}

int rpc_peer_fd(const char *peer)
{
    char *end;
    long fd;

    if (!peer || strncmp(peer, "fd:", 3) != 0)
        return -1;
    errno = 0;
    fd = strtol(peer + 3, &end, 10);
    return errno == 0 && end != peer + 3 && *end == '\0' && fd >= 0 && fd <= INT32_MAX ? (int)fd : -1;
}
