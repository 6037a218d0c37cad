/* Requests, and the threads that send and receive. */
#include "reference.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

const struct ep_cuda_api *cuda;
uint32_t lost_anywhere;

bool wrong(const char *rule)
{
    const char *asked = getenv("GIN_REFERENCE_WRONG");

    return asked && strcmp(asked, rule) == 0;
}

void nap_ms(uint32_t ms)
{
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 }, NULL);
}

/* ---- memory -------------------------------------------------------------------------------------- */

bool inside(const struct region *region, uint64_t at, uint64_t bytes)
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

void finish(struct comm *comm, struct request *request)
{
    if (wrong("a request is forgotten") && request->number % 1000 == 777)
        return;
    (void)comm;
    /* Release: partner is test. */
    __atomic_store_n(&request->done, 1, __ATOMIC_RELEASE);
}

struct request *new_request(struct comm *comm)
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

void enqueue(struct peer *peer, struct request *request)
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

bool send_bytes(int fd, const void *from, uint64_t bytes)
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

void *run_sender(void *arg)
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

void *run_receiver(void *arg)
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
