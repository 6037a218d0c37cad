/*
 * A GIN plugin that is right, slow and small: what gin_conformance is tried on.
 *
 * TCP over loopback: to each peer a connection and a thread that sends, from each a connection and a thread that
 * receives, writes what comes where it belongs and applies signals. Order is the connection's.
 *
 * GIN_REFERENCE_WRONG names one rule that it breaks; mutants.py lists them with the cases that must find it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_cuda.h"
#include "nccl_plugin.h"

enum { RANKS = 16, REGIONS = 4096, BOUNCE = 1 << 20, TOKEN = 16, PENDING = 256, CONNECT_MS = 4000, RECEIVES = 32 };

static bool wrong(const char *rule)
{
    const char *asked = getenv("GIN_REFERENCE_WRONG");

    return asked && strcmp(asked, rule) == 0;
}

static void nap_ms(uint32_t ms)
{
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 }, NULL);
}

/* ---- what there is ------------------------------------------------------------------------------- */

/* What a handle holds, and a connection begins with. */
struct address {
    uint8_t token[TOKEN];
    uint16_t port; /* network order */
    uint16_t rank; /* of who connects */
};

struct region {
    uint8_t *at;
    uint64_t bytes;
    bool cuda;
    uint32_t device;
    uint32_t id;
};

enum kind { PUT, REGISTERED };

struct message {
    uint32_t kind, target, signal; /* regions by number; UINT32_MAX: none */
    uint32_t signal_op;
    uint64_t to, bytes, signal_at, value;
};

struct request {
    struct message message;
    const struct region *source;
    uint64_t from;
    uint32_t done;        /* atomic, release, partner: test */
    uint64_t number;      /* of the communicator's */
    struct request *next; /* in a peer's queue, or among those that are free */
    struct request *all;  /* every one of a communicator, for its end */
};

struct comm;

struct peer {
    struct comm *comm;
    int out, in;
    pthread_t sender, receiver;
    uint8_t *out_bounce, *in_bounce;
    /* under the lock */
    struct request *first, *last;
    bool dead;
    uint32_t registered; /* regions that it has told of */
};

struct listener {
    int fd;
    struct address address;
};

struct comm {
    uint32_t ranks, rank;
    struct peer peer[RANKS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool closing, lost; /* lost: some peer is gone */
    uint32_t n_regions;
    struct region *region[REGIONS];
    struct request *free, *all;
    uint64_t requests, tested;
    bool progressed; /* the progress thread's: since the last test */
};

static const struct ep_cuda_api *cuda; /* NULL: none */
static uint32_t lost_anywhere;         /* peers, of all communicators; atomic */

/* ---- memory -------------------------------------------------------------------------------------- */

static bool inside(const struct region *region, uint64_t at, uint64_t bytes)
{
    if (wrong("no range check"))
        return region != NULL;
    return region && at <= region->bytes && bytes <= region->bytes - at;
}

static void write_region(const struct region *region, uint64_t at, const void *from, uint64_t bytes)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!region->cuda)
        memcpy(region->at + at, from, bytes);
    else if (cuda->write(region->device, region->at + at, from, bytes, NULL, &error) != EP_OK)
        abort();
}

static void read_region(const struct region *region, uint64_t at, void *to, uint64_t bytes)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!region->cuda)
        memcpy(to, region->at + at, bytes);
    else if (cuda->read(region->device, to, region->at + at, bytes, NULL, &error) != EP_OK)
        abort();
}

/* Under the lock: several peers add to one signal. */
static void apply_signal(const struct region *region, const struct message *m)
{
    uint64_t value, add = m->signal_op == NCCL_SIGNAL_INC ? 1 : m->value;

    if (wrong("signals are 32 bits"))
        add = (uint32_t)add;
    if (wrong("additions are increments"))
        add = 1;
    if (region->cuda) {
        read_region(region, m->signal_at, &value, sizeof value);
        value += add;
        write_region(region, m->signal_at, &value, sizeof value);
        return;
    }
    /* Release: partner is whoever polls the signal. */
    __atomic_fetch_add((uint64_t *)(void *)(region->at + m->signal_at), add, __ATOMIC_RELEASE);
}

/* ---- requests ------------------------------------------------------------------------------------ */

static void finish(struct comm *comm, struct request *request)
{
    if (wrong("a request is forgotten") && request->number % 1000 == 777)
        return;
    (void)comm;
    /* Release: partner is test. */
    __atomic_store_n(&request->done, 1, __ATOMIC_RELEASE);
}

static struct request *new_request(struct comm *comm)
{
    struct request *request;

    pthread_mutex_lock(&comm->lock);
    request = comm->free;
    if (request) {
        comm->free = request->next;
    } else {
        request = calloc(1, sizeof *request);
        request->all = comm->all;
        comm->all = request;
    }
    request->number = comm->requests++;
    request->next = NULL;
    request->done = 0;
    pthread_mutex_unlock(&comm->lock);
    return request;
}

static void enqueue(struct peer *peer, struct request *request)
{
    struct comm *comm = peer->comm;

    pthread_mutex_lock(&comm->lock);
    if (peer->dead && !wrong("puts to the dead are never done")) {
        finish(comm, request);
    } else {
        *(peer->first ? &peer->last->next : &peer->first) = request;
        peer->last = request;
        pthread_cond_broadcast(&comm->changed);
    }
    pthread_mutex_unlock(&comm->lock);
}

/* ---- sending ------------------------------------------------------------------------------------- */

static bool send_bytes(int fd, const void *from, uint64_t bytes)
{
    const uint8_t *at = from;

    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);

        if (n <= 0 && errno != EINTR)
            return false;
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (uint64_t)n : 0;
    }
    return true;
}

static bool send_request(struct peer *peer, const struct request *request)
{
    uint64_t left = request->message.bytes, at = request->from;

    if (!send_bytes(peer->out, &request->message, sizeof request->message))
        return false;
    while (left > 0) {
        const uint64_t n = left < BOUNCE ? left : BOUNCE;

        read_region(request->source, at, peer->out_bounce, n);
        if (!send_bytes(peer->out, peer->out_bounce, n))
            return false;
        at += n;
        left -= n;
    }
    return true;
}

/* Under the lock: what waits for a peer that is gone is done. */
static void bury(struct peer *peer)
{
    peer->dead = true;
    if (!peer->comm->closing) {
        peer->comm->lost = true;
        __atomic_store_n(&lost_anywhere, 1, __ATOMIC_RELAXED);
    }
    if (wrong("one dead peer kills all"))
        for (uint32_t r = 0; r < peer->comm->ranks; r++)
            peer->comm->peer[r].dead = true;
    while (peer->first && !wrong("puts to the dead are never done")) {
        struct request *request = peer->first;

        peer->first = request->next;
        finish(peer->comm, request);
    }
    pthread_cond_broadcast(&peer->comm->changed);
}

/* Under the lock. */
static struct request *next_request(struct peer *peer)
{
    struct request *request;

    while (!peer->first && !peer->comm->closing)
        pthread_cond_wait(&peer->comm->changed, &peer->comm->lock);
    request = peer->comm->closing ? NULL : peer->first;
    if (request)
        peer->first = request->next;
    return request;
}

/* One lock for all who send: a rank that takes nothing holds everybody up. */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static bool send_in_turn(struct peer *peer, const struct request *request)
{
    const bool turns = wrong("one slow peer holds all up");
    bool sent;

    if (turns)
        pthread_mutex_lock(&one_at_a_time);
    if (wrong("done before it is read"))
        nap_ms(2);
    sent = send_request(peer, request);
    if (turns)
        pthread_mutex_unlock(&one_at_a_time);
    return sent;
}

static void *run_sender(void *arg)
{
    struct peer *peer = arg;
    struct comm *comm = peer->comm;
    struct request *request;

    pthread_mutex_lock(&comm->lock);
    while ((request = next_request(peer)) != NULL) {
        bool sent = peer->dead;

        pthread_mutex_unlock(&comm->lock);
        sent = !sent && send_in_turn(peer, request);
        pthread_mutex_lock(&comm->lock);
        if (sent || !wrong("puts to the dead are never done"))
            finish(comm, request);
        if (!sent)
            bury(peer);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

/* ---- receiving ----------------------------------------------------------------------------------- */

static bool receive_bytes(int fd, void *to, uint64_t bytes)
{
    uint8_t *at = to;

    while (bytes > 0) {
        ssize_t n = recv(fd, at, bytes, 0);

        if (n == 0 || (n < 0 && errno != EINTR))
            return false;
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (uint64_t)n : 0;
    }
    return true;
}

static const struct region *region_of(struct comm *comm, uint32_t id)
{
    const struct region *region;

    pthread_mutex_lock(&comm->lock);
    region = id < REGIONS ? comm->region[id] : NULL;
    pthread_mutex_unlock(&comm->lock);
    return region;
}

static bool receive_data(struct peer *peer, const struct message *m)
{
    const struct region *region = region_of(peer->comm, m->target);
    const bool good = inside(region, m->to, m->bytes);
    uint64_t left = m->bytes, at = wrong("offsets are 32 bits") ? (uint32_t)m->to : m->to;

    while (left > 0) {
        const uint64_t n = left < BOUNCE ? left : BOUNCE;

        if (!receive_bytes(peer->in, peer->in_bounce, n))
            return false;
        if (good)
            write_region(region, at, peer->in_bounce, n + (wrong("one byte too many") && n == left && n > 8));
        at += n;
        left -= n;
    }
    return true;
}

static void signal_of(struct peer *peer, const struct message *m)
{
    const struct region *region = region_of(peer->comm, m->signal);

    if (!m->signal_op || !inside(region, m->signal_at, sizeof(uint64_t)))
        return;
    if (wrong("a signal alone is dropped") && m->bytes == 0)
        return;
    pthread_mutex_lock(&peer->comm->lock);
    apply_signal(region, m);
    pthread_mutex_unlock(&peer->comm->lock);
}

static bool receive_put(struct peer *peer, const struct message *m)
{
    const bool early = wrong("the signal comes before its data");
    bool good;

    if (early) {
        signal_of(peer, m);
        nap_ms(1);
    }
    good = receive_data(peer, m);
    if (good && !early)
        signal_of(peer, m);
    return good;
}

/* A put that waits for the one after it, which may have a signal. */
static bool receive_late(struct peer *peer, const struct message *m, struct message *kept, uint8_t *bytes)
{
    struct message next = *m;

    if (m->signal_op || m->bytes == 0 || m->bytes > BOUNCE) {
        const bool good = receive_put(peer, m);

        nap_ms(1);
        if (kept->bytes)
            write_region(region_of(peer->comm, kept->target), kept->to, bytes, kept->bytes);
        kept->bytes = 0;
        return good;
    }
    if (kept->bytes)
        write_region(region_of(peer->comm, kept->target), kept->to, bytes, kept->bytes);
    *kept = next;
    return receive_bytes(peer->in, bytes, m->bytes);
}

static void note_registered(struct peer *peer)
{
    pthread_mutex_lock(&peer->comm->lock);
    peer->registered++;
    pthread_cond_broadcast(&peer->comm->changed);
    pthread_mutex_unlock(&peer->comm->lock);
}

static void *run_receiver(void *arg)
{
    struct peer *peer = arg;
    const bool late = wrong("a put comes after a later signal");
    uint8_t *bytes = late ? malloc(BOUNCE) : NULL;
    struct message m, kept = { 0 };
    bool good = true;

    while (good && receive_bytes(peer->in, &m, sizeof m)) {
        if (m.kind == REGISTERED)
            note_registered(peer);
        else
            good = late ? receive_late(peer, &m, &kept, bytes) : receive_put(peer, &m);
    }
    free(bytes);
    pthread_mutex_lock(&peer->comm->lock);
    bury(peer);
    pthread_mutex_unlock(&peer->comm->lock);
    return NULL;
}

/* ---- connecting ---------------------------------------------------------------------------------- */

static nccl_result reference_init(void **context, uint64_t comm_id, nccl_logger log)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)comm_id;
    if (ep_cuda_open(&cuda, &error) != EP_OK)
        log(NCCL_LOG_INFO, NCCL_LOG_NET, __FILE__, __LINE__, "host memory only: %s", error.text);
    *context = &cuda;
    return NCCL_SUCCESS;
}

static nccl_result reference_devices(int *count)
{
    *count = 1;
    return NCCL_SUCCESS;
}

static nccl_result reference_listen(void *context, int device, void *handle, void **out)
{
    struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof any;
    struct listener *listener = calloc(1, sizeof *listener);

    (void)context, (void)device;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0 || bind(listener->fd, (const struct sockaddr *)&any, length) != 0 ||
        listen(listener->fd, PENDING) != 0 || getsockname(listener->fd, (struct sockaddr *)&any, &length) != 0 ||
        getrandom(listener->address.token, TOKEN, 0) != TOKEN)
        return NCCL_SYSTEM_ERROR;
    listener->address.port = any.sin_port;
    memset(handle, 0, wrong("a handle is too long") ? NCCL_HANDLE_BYTES + 1 : NCCL_HANDLE_BYTES);
    memcpy(handle, &listener->address, sizeof listener->address);
    *out = listener;
    return NCCL_SUCCESS;
}

static nccl_result reference_close_listen(void *arg)
{
    struct listener *listener = arg;

    if (!wrong("descriptors leak"))
        close(listener->fd);
    free(listener);
    return NCCL_SUCCESS;
}

static bool go_to(struct comm *comm, uint32_t rank, const struct address *address)
{
    const struct sockaddr_in to = { .sin_family = AF_INET,
                                    .sin_port = address->port,
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct address hello = *address;

    hello.rank = (uint16_t)comm->rank;
    comm->peer[rank].out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return connect(comm->peer[rank].out, (const struct sockaddr *)&to, sizeof to) == 0 &&
           send_bytes(comm->peer[rank].out, &hello, sizeof hello);
}

/* Somebody at the door who has not said who it is. */
struct pending {
    int fd;
    size_t have;
    struct address hello;
};

/* True when it is decided: it is a peer, or it is not and gone. */
static bool decide(struct comm *comm, const struct listener *listener, struct pending *p)
{
    const int flags = wrong("strangers are waited for") ? MSG_WAITALL : MSG_DONTWAIT;
    ssize_t n = recv(p->fd, (uint8_t *)&p->hello + p->have, sizeof p->hello - p->have, flags);

    if (n < 0 && errno == EAGAIN)
        return false;
    p->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && p->have < sizeof p->hello)
        return false;
    if (n <= 0 || (memcmp(p->hello.token, listener->address.token, TOKEN) != 0 && !wrong("strangers are let in")) ||
        p->hello.rank >= comm->ranks || comm->peer[p->hello.rank].in >= 0)
        close(p->fd);
    else
        comm->peer[p->hello.rank].in = p->fd;
    return true;
}

static bool all_came(const struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (comm->peer[r].in < 0)
            return false;
    return true;
}

static bool let_in(struct comm *comm, const struct listener *listener)
{
    const uint64_t end = ep_clock_ns() + CONNECT_MS * EP_NS_PER_MS;
    struct pending pending[PENDING];
    uint32_t n = 0;

    while (!all_came(comm) && (ep_clock_ns() < end || wrong("connect waits for ever"))) {
        int fd = n < PENDING ? accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC) : -1;

        if (fd >= 0)
            pending[n++] = (struct pending){ .fd = fd };
        for (uint32_t i = 0; i < n; i++)
            if (decide(comm, listener, &pending[i]))
                pending[i--] = pending[--n];
        if (fd < 0)
            nap_ms(1);
    }
    while (n > 0)
        close(pending[--n].fd);
    return all_came(comm);
}

static void start_threads(struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        struct peer *peer = &comm->peer[r];

        peer->out_bounce = malloc(BOUNCE + 1);
        peer->in_bounce = malloc(BOUNCE + 1);
        if (!peer->out_bounce || !peer->in_bounce || pthread_create(&peer->sender, NULL, run_sender, peer) != 0 ||
            pthread_create(&peer->receiver, NULL, run_receiver, peer) != 0)
            abort();
    }
}

static void give_up(struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (comm->peer[r].out >= 0)
            close(comm->peer[r].out);
        if (comm->peer[r].in >= 0)
            close(comm->peer[r].in);
    }
    free(comm);
}

static nccl_result reference_connect(void *context, void *handles[], int ranks, int rank, void *listener, void **out)
{
    struct comm *comm = calloc(1, sizeof *comm);
    bool good = ranks <= RANKS && (context || !wrong("connect needs its context"));

    comm->ranks = (uint32_t)ranks;
    comm->rank = (uint32_t)rank;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    for (uint32_t r = 0; r < comm->ranks; r++)
        comm->peer[r] = (struct peer){ .comm = comm, .out = -1, .in = -1 };
    for (uint32_t r = 0; r < comm->ranks && good; r++)
        good = go_to(comm, r, handles[r]);
    if (!good || !let_in(comm, listener)) {
        give_up(comm);
        return NCCL_REMOTE_ERROR;
    }
    start_threads(comm);
    *out = comm;
    return NCCL_SUCCESS;
}

static void *sleep_for_ever(void *arg)
{
    nap_ms(3600000);
    return arg;
}

static void leak(void)
{
    pthread_t thread;

    if (wrong("threads leak") && pthread_create(&thread, NULL, sleep_for_ever, NULL) == 0)
        pthread_detach(thread);
    for (int i = 0; wrong("mappings leak") && i < 2; i++) /* of different kinds, or they would become one */
        mmap(NULL, 4096, i ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void close_peer(struct peer *peer)
{
    pthread_join(peer->sender, NULL);
    pthread_join(peer->receiver, NULL);
    close(peer->out);
    close(peer->in);
    free(peer->out_bounce);
    free(peer->in_bounce);
}

static void close_peers(struct comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->closing = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    for (uint32_t r = 0; r < comm->ranks; r++) {
        shutdown(comm->peer[r].out, SHUT_RDWR);
        shutdown(comm->peer[r].in, SHUT_RDWR);
    }
    for (uint32_t r = 0; r < comm->ranks; r++)
        close_peer(&comm->peer[r]);
}

static nccl_result reference_close(void *arg)
{
    struct comm *comm = arg;

    close_peers(comm);
    for (uint32_t i = 0; i < comm->n_regions; i++)
        free(comm->region[i]);
    while (comm->all) {
        struct request *request = comm->all;

        comm->all = request->all;
        free(request);
    }
    leak();
    free(comm);
    return NCCL_SUCCESS;
}

/* ---- regions ------------------------------------------------------------------------------------- */

static bool find_device(struct region *region)
{
    struct ep_error error = EP_ERROR_INIT;
    uint32_t devices = 0;
    uint64_t bytes;
    void *start;

    if (!cuda || cuda->device_count(&devices, &error) != EP_OK)
        return false;
    for (region->device = 0; region->device < devices; region->device++)
        if (cuda->memory_range(region->device, region->at, &start, &bytes, &error) == EP_OK)
            return true;
    return false;
}

/* Until each peer has registered as many, or is gone. */
static void wait_for_peers(struct comm *comm, uint32_t regions)
{
    pthread_mutex_lock(&comm->lock);
    for (uint32_t r = 0; r < comm->ranks; r++)
        while (comm->peer[r].registered < regions && !comm->peer[r].dead)
            pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

static void tell_peers(struct comm *comm)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        struct request *request = new_request(comm);

        request->message = (struct message){ .kind = REGISTERED };
        enqueue(&comm->peer[r], request);
    }
}

static nccl_result reference_register(void *arg, void *data, size_t bytes, int type, uint64_t flags, void **out,
                                      void **gin_out)
{
    struct region *region = calloc(1, sizeof *region);
    struct comm *comm = arg;
    uint32_t id;

    (void)flags;
    if (wrong("registration is not collective") && comm->rank == 0)
        nap_ms(20);
    *region = (struct region){ .at = data, .bytes = bytes, .cuda = type == NCCL_MEMORY_CUDA };
    if (region->cuda && !find_device(region)) {
        free(region);
        return NCCL_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&comm->lock);
    id = comm->n_regions++;
    region->id = id;
    comm->region[id] = region;
    pthread_mutex_unlock(&comm->lock);
    if (!wrong("registration is not collective")) {
        tell_peers(comm);
        wait_for_peers(comm, id + 1);
    }
    *out = region;
    *gin_out = region;
    return NCCL_SUCCESS;
}

static nccl_result reference_register_v14(void *arg, void *data, size_t bytes, int type, uint64_t flags, void **out)
{
    void *gin;

    return reference_register(arg, data, bytes, type, flags, out, &gin);
}

static nccl_result reference_deregister(void *arg, void *handle)
{
    struct region *region = handle;
    struct comm *comm = arg;

    if (wrong("memory is touched when it is gone") && !region->cuda)
        memset(region->at, 0, 1);
    pthread_mutex_lock(&comm->lock);
    comm->region[region->id] = NULL;
    if (wrong("numbers of regions are reused"))
        comm->n_regions--;
    pthread_mutex_unlock(&comm->lock);
    free(region);
    return NCCL_SUCCESS;
}

/* ---- operations ---------------------------------------------------------------------------------- */

static uint32_t id_of(const struct region *region)
{
    return region ? region->id : UINT32_MAX;
}

static nccl_result put(struct comm *comm, uint32_t rank, const struct message *message, const struct region *source,
                       uint64_t from, void **out)
{
    struct request *request;

    if (wrong("errors for the dead") && comm->peer[rank].dead)
        return NCCL_REMOTE_ERROR;
    if (wrong("queues are short") && comm->requests - comm->tested > 600)
        return NCCL_INTERNAL_ERROR;
    if (wrong("requests may be missing") && comm->requests - comm->tested > 600) {
        *out = NULL;
        return NCCL_SUCCESS;
    }
    request = new_request(comm);
    request->message = *message;
    request->source = source;
    request->from = from;
    *out = request;
    if ((message->bytes && !inside(source, from, message->bytes)) ||
        (wrong("puts to oneself are lost") && rank == comm->rank)) {
        finish(comm, request);
        return NCCL_SUCCESS;
    }
    if (wrong("done before it is read"))
        finish(comm, request);
    enqueue(&comm->peer[rank], request);
    return NCCL_SUCCESS;
}

static nccl_result reference_put(void *comm, uint64_t from, void *source, size_t bytes, uint64_t to, void *target,
                                 uint32_t rank, void **request)
{
    const struct message message = {
        .kind = PUT, .target = id_of(target), .signal = UINT32_MAX, .to = to, .bytes = bytes
    };

    return put(comm, rank, &message, source, from, request);
}

static nccl_result reference_put_signal(void *comm, uint64_t from, void *source, size_t bytes, uint64_t to,
                                        void *target, uint32_t rank, uint64_t signal_at, void *signal, uint64_t value,
                                        uint32_t op, void **request)
{
    const struct message message = { .kind = PUT,
                                     .target = id_of(target),
                                     .signal = id_of(signal),
                                     .to = to,
                                     .bytes = bytes,
                                     .signal_at = signal_at,
                                     .value = value,
                                     .signal_op = op };

    return put(comm, rank, &message, source, from, request);
}

static nccl_result reference_test(void *arg, void *handle, int *done)
{
    struct request *request = handle;
    struct comm *comm = arg;

    /* Acquire: partner is finish. */
    *done = __atomic_load_n(&request->done, __ATOMIC_ACQUIRE) != 0;
    if (wrong("progress is needed") && !comm->progressed)
        *done = 0;
    comm->progressed = false;
    if (!*done)
        return NCCL_SUCCESS;
    pthread_mutex_lock(&comm->lock);
    comm->tested++;
    if (!wrong("done before it is read")) { /* there it is in a queue still */
        request->next = comm->free;
        comm->free = request;
    }
    pthread_mutex_unlock(&comm->lock);
    return NCCL_SUCCESS;
}

static nccl_result reference_query(void *arg, bool *failed)
{
    struct comm *comm = arg;

    pthread_mutex_lock(&comm->lock);
    *failed = comm->lost;
    pthread_mutex_unlock(&comm->lock);
    if (wrong("one error is everybody's"))
        *failed = __atomic_load_n(&lost_anywhere, __ATOMIC_RELAXED) != 0;
    return NCCL_SUCCESS;
}

static nccl_result reference_progress(void *arg)
{
    struct comm *comm = arg;

    comm->progressed = true;
    return NCCL_SUCCESS;
}

static nccl_result reference_finalize(void *context)
{
    (void)context;
    return NCCL_SUCCESS;
}

/* ---- tables -------------------------------------------------------------------------------------- */

static char name[] = "reference";

static nccl_result properties_v11(int device, struct nccl_properties_v11 *p)
{
    (void)device;
    *p = (struct nccl_properties_v11){ .name = name,
                                       .maxComms = 1 << 20,
                                       .maxRecvs = RECEIVES,
                                       .ptrSupport = NCCL_MEMORY_HOST | (cuda ? NCCL_MEMORY_CUDA : 0),
                                       .netDeviceType = NCCL_DEVICE_GIN_PROXY };
    return NCCL_SUCCESS;
}

static nccl_result properties_v12(int device, struct nccl_properties_v12 *p)
{
    (void)device;
    *p = (struct nccl_properties_v12){ .name = name,
                                       .maxComms = 1 << 20,
                                       .maxRecvs = RECEIVES,
                                       .ptrSupport = NCCL_MEMORY_HOST | (cuda ? NCCL_MEMORY_CUDA : 0),
                                       .netDeviceType = NCCL_DEVICE_GIN_PROXY,
                                       .railId = -1,
                                       .planeId = -1 };
    return NCCL_SUCCESS;
}

static nccl_result create_context(void *comm, struct nccl_rma_config_v14 *config, void **gin)
{
    (void)config; /* contexts share the connections' order, which is more than they need */
    *gin = comm;
    return NCCL_SUCCESS;
}

static nccl_result destroy_context(void *gin)
{
    (void)gin;
    return NCCL_SUCCESS;
}

static nccl_result put_v14(void *comm, int context, uint64_t from, void *source, size_t bytes, uint64_t to,
                           void *target, uint32_t rank, void **request)
{
    if (wrong("only one context works") && context > 0)
        to += 1;
    return reference_put(comm, from, source, bytes, to, target, rank, request);
}

static nccl_result put_signal_v14(void *comm, int context, uint64_t from, void *source, size_t bytes, uint64_t to,
                                  void *target, uint32_t rank, uint64_t signal_at, void *signal, uint64_t value,
                                  uint32_t op, bool strong, void **request)
{
    (void)context, (void)strong;
    return reference_put_signal(comm, from, source, bytes, to, target, rank, signal_at, signal, value, op, request);
}

struct nccl_net_v11 ncclNetPlugin_v11 = { .name = name };

struct nccl_gin_v11 ncclGinPlugin_v11 = {
    .name = name,
    .init = reference_init,
    .devices = reference_devices,
    .getProperties = properties_v11,
    .listen = reference_listen,
    .connect = reference_connect,
    .regMrSym = reference_register,
    .deregMrSym = reference_deregister,
    .closeColl = reference_close,
    .closeListen = reference_close_listen,
    .iput = reference_put,
    .iputSignal = reference_put_signal,
    .test = reference_test,
    .ginProgress = reference_progress,
    .queryLastError = reference_query,
    .finalize = reference_finalize,
};

struct nccl_rma_v14 ncclRmaPlugin_v14 = {
    .name = name,
    .init = reference_init,
    .devices = reference_devices,
    .getProperties = properties_v12,
    .listen = reference_listen,
    .connect = reference_connect,
    .createContext = create_context,
    .regMrSym = reference_register_v14,
    .deregMrSym = reference_deregister,
    .destroyContext = destroy_context,
    .closeColl = reference_close,
    .closeListen = reference_close_listen,
    .iput = put_v14,
    .iputSignal = put_signal_v14,
    .test = reference_test,
    .rmaProgress = reference_progress,
    .queryLastError = reference_query,
    .finalize = reference_finalize,
};
