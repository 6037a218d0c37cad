/* Communicators: from the handles of all ranks to links, and back. */
#include "transport.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Streams: one that receives, one that sends over TCP, one for what is large to peers of this host, one to each of them and
 * to oneself; a cache line of words each. */
#define PAGE               4096u
#define WORDS_BYTES(ranks) ((64u * ((ranks) + 3u) + PAGE - 1) / PAGE * PAGE)

/* ---- making one ------------------------------------------------------------------------------------- */

/* Without a GPU, or with a thread that has none, host memory can still be put. */
static void open_cuda(struct ep_gin_comm *comm)
{
    const struct ep_cuda_api *cuda = NULL;

    if (ep_cuda_open(&cuda, &comm->no_cuda) == EP_OK && cuda->device_current(&comm->device, &comm->no_cuda) == EP_OK)
        comm->cuda = cuda;
    else
        ep_gin_info("rank %u: host memory only: %s", comm->rank, comm->no_cuda.text);
}

/* A receiver has memory for two pieces of each connection of each peer, and all of that fits into what it is given. */
static void fit_pieces(struct ep_gin_comm *comm)
{
    const uint64_t each = comm->settings.staging_bytes / comm->ranks / comm->settings.connections / 2;
    const uint64_t pages = each / PAGE < 4 ? 4 : each / PAGE;

    if (comm->settings.piece_bytes > pages * PAGE)
        comm->settings.piece_bytes = (uint32_t)(pages * PAGE);
}

static struct ep_gin_comm *create(const struct ep_gin_settings *settings, uint32_t ranks, uint32_t rank)
{
    struct ep_gin_comm *comm = calloc(1, sizeof *comm);

    if (!comm)
        return NULL;
    comm->settings = *settings;
    if (comm->settings.connections == 0)
        comm->settings.connections = ep_gin_usual_connections(ranks);
    comm->ranks = ranks;
    comm->rank = rank;
    comm->epoll = comm->wake = -1;
    comm->refused.done = true;
    pthread_mutex_init(&comm->sending, NULL);
    pthread_mutex_init(&comm->receiving, NULL);
    comm->peers = calloc(ranks, sizeof *comm->peers);
    comm->regions = calloc(EP_GIN_MAX_REGIONS, sizeof *comm->regions);
    for (uint32_t r = 0; comm->peers && r < ranks; r++) {
        comm->peers[r].comm = comm;
        comm->peers[r].rank = r;
        comm->peers[r].control = -1;
        memset(comm->peers[r].data, 0xff, sizeof comm->peers[r].data); /* -1 each */
        ep_gin_order_init(&comm->peers[r].order, 1);
    }
    fit_pieces(comm);
    return comm;
}

static ep_status open_words(struct ep_gin_comm *comm, struct ep_error *error)
{
    void *words = NULL;
    ep_status status = EP_OK;

    if (comm->cuda)
        status = ep_gin_pages_open(comm, WORDS_BYTES(comm->ranks), &words, error);
    comm->words = words;
    return status;
}

/* ---- links --------------------------------------------------------------------------------------------- */

static uint32_t peers_by(const struct ep_gin_comm *comm, uint32_t transport)
{
    uint32_t n = 0;

    for (uint32_t r = 0; r < comm->ranks; r++)
        n += r != comm->rank && comm->peers[r].chosen == transport;
    return n;
}

/* TCP may carry something to each peer; a NIC that nobody uses is left alone, and may be broken. */
static ep_status start_transports(struct ep_gin_comm *comm, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t t = 0; t < EP_GIN_TRANSPORTS && status == EP_OK; t++)
        if (ep_gin_transports[t]->start && (t == EP_GIN_TCP || peers_by(comm, t) > 0))
            status = ep_gin_transports[t]->start(comm, &comm->shared[t], error);
    return status;
}

static ep_status open_main(struct ep_gin_peer *peer, void *user, struct ep_gin_frame *frame, struct ep_gin_card *card,
                           struct ep_error *error)
{
    (void)user;
    peer->main.transport = ep_gin_transports[peer->chosen];
    frame->has_card = 1;
    return peer->main.transport->link_open(peer->comm, peer, &peer->main.link, card, error);
}

/* What a main link of another kind cannot do goes over TCP, which needs no card. */
static ep_status open_spare(struct ep_gin_peer *peer, struct ep_error *error)
{
    ep_status status;

    peer->spare.transport = &ep_gin_tcp;
    status = peer->spare.transport->link_open(peer->comm, peer, &peer->spare.link, NULL, error);
    return status == EP_OK ? peer->spare.transport->link_connect(peer->spare.link, NULL, error) : status;
}

static ep_status connect_main(struct ep_gin_peer *peer, void *user, const struct ep_gin_frame *frame,
                              const struct ep_gin_card *card, struct ep_error *error)
{
    ep_status status = peer->main.transport->link_connect(peer->main.link, card, error);

    (void)user, (void)frame;
    if (status == EP_OK && peer->main.transport != &ep_gin_tcp)
        status = open_spare(peer, error);
    return status;
}

static ep_status open_self(struct ep_gin_comm *comm, struct ep_error *error)
{
    struct ep_gin_peer *peer = &comm->peers[comm->rank];
    struct ep_gin_card card = { .fds = 0 };

    peer->main.transport = &ep_gin_self;
    return peer->main.transport->link_open(comm, peer, &peer->main.link, &card, error);
}

static ep_status check_all_there(const struct ep_gin_comm *comm, struct ep_error *error)
{
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (ep_gin_peer_is_lost(&comm->peers[r]))
            return ep_error_set(error, EP_IO, "rank %u left while the ranks connected", r);
    return EP_OK;
}

static ep_status open_links(struct ep_gin_comm *comm, struct ep_error *error)
{
    ep_status status = start_transports(comm, error);

    if (status == EP_OK)
        status = open_self(comm, error);
    if (status == EP_OK)
        status = ep_gin_exchange(comm, EP_GIN_FRAME_LINK, 0, open_main, connect_main, NULL, error);
    return status == EP_OK ? check_all_there(comm, error) : status;
}

static void close_link(struct ep_gin_link *link)
{
    if (link->link)
        link->transport->link_close(link->link);
    link->link = NULL;
}

#define LINGER_NS EP_NS_PER_S

static void close_links(struct ep_gin_comm *comm)
{
    comm->linger_until = ep_clock_ns() + LINGER_NS;
    for (uint32_t r = 0; comm->peers && r < comm->ranks; r++) {
        struct ep_gin_peer *peer = &comm->peers[r];

        close_link(&peer->main);
        close_link(&peer->spare);
        for (uint32_t i = 0; i < EP_GIN_MAX_CONNECTIONS; i++)
            if (peer->data[i] >= 0)
                close(peer->data[i]);
        if (peer->control >= 0)
            close(peer->control);
    }
    for (uint32_t t = 0; t < EP_GIN_TRANSPORTS; t++)
        if (comm->shared[t])
            ep_gin_transports[t]->stop(comm->shared[t]);
}

/* ---- open and close --------------------------------------------------------------------------------------- */

static void tell(const struct ep_gin_comm *comm, uint64_t start)
{
    ep_gin_info("rank %u of %u is connected after %llu ms", comm->rank, comm->ranks,
                (unsigned long long)((ep_clock_ns() - start) / EP_NS_PER_MS));
    for (uint32_t t = 0; t < EP_GIN_TRANSPORTS; t++)
        if (peers_by(comm, t) > 0)
            ep_gin_info("rank %u: %u peers by %s", comm->rank, peers_by(comm, t), ep_gin_transport_name(t));
}

/* Whoever asks for one by name is told why it cannot be had. */
static ep_status check_named(struct ep_gin_comm *comm, struct ep_error *error)
{
    const enum ep_gin_transport_id named = comm->settings.transport;
    ep_status status = EP_OK;

    if (named != EP_GIN_AUTO)
        status = ep_gin_transports[named]->usable(comm, error);
    if (status != EP_OK)
        ep_error_prefix(error, "EP_GIN_TRANSPORT is %s", ep_gin_transport_name(named));
    return status;
}

static ep_status open_comm(struct ep_gin_comm *comm, const struct ep_gin_handle *const handles[],
                           struct ep_gin_listener *listener, struct ep_error *error)
{
    const uint64_t start = ep_clock_ns();
    ep_status status = ep_gin_host_id_read(&comm->host, error);

    open_cuda(comm);
    ep_gin_transports_look(comm);
    if (status == EP_OK)
        status = check_named(comm, error);
    if (status == EP_OK)
        status = open_words(comm, error);
    if (status == EP_OK)
        status = ep_gin_stream_open(comm, &comm->receiver, NULL, error);
    if (status == EP_OK)
        status = ep_gin_receive_open(comm, error);
    if (status == EP_OK)
        status = ep_gin_meet(comm, handles, listener, error);
    if (status == EP_OK)
        status = open_links(comm, error);
    if (status == EP_OK)
        status = ep_gin_receive_start(comm, error);
    if (status == EP_OK)
        tell(comm, start);
    return status;
}

ep_status ep_gin_comm_open(const struct ep_gin_settings *settings, const struct ep_gin_handle *const handles[],
                           uint32_t ranks, uint32_t rank, struct ep_gin_listener *listener, struct ep_gin_comm **out,
                           struct ep_error *error)
{
    struct ep_gin_comm *comm;
    ep_status status = EP_OK;

    if (ranks == 0 || ranks > EP_GIN_MAX_RANKS || rank >= ranks)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "rank %u of %u: there may be %u", rank, ranks,
                            EP_GIN_MAX_RANKS);
    comm = create(settings, ranks, rank);
    if (!comm || !comm->peers || !comm->regions)
        status = ep_error_set(error, EP_NO_MEMORY, "no memory for a communicator of %u ranks", ranks);
    if (status == EP_OK)
        status = open_comm(comm, handles, listener, error);
    if (status == EP_OK)
        *out = comm;
    else
        ep_gin_comm_close(comm);
    return status;
}

static void drop_regions(struct ep_gin_comm *comm)
{
    for (uint32_t i = 0; comm->regions && i < EP_GIN_MAX_REGIONS; i++)
        if (comm->regions[i].remote)
            ep_gin_region_drop(comm, &comm->regions[i]);
}

static void tell_counts(const struct ep_gin_comm *comm)
{
    const struct ep_gin_counts *c = &comm->counts;

    if (c->bad_puts + c->lost_puts + c->late_pieces + c->bad_messages + c->crowded == 0)
        return;
    ep_gin_info(
        "rank %u: %llu bad puts, %llu to ranks that were gone, %llu pieces too late, %llu bad messages, %llu puts "
        "too many",
        comm->rank, (unsigned long long)c->bad_puts, (unsigned long long)c->lost_puts,
        (unsigned long long)c->late_pieces, (unsigned long long)c->bad_messages, (unsigned long long)c->crowded);
}

/* Also one that was not opened as a whole. */
void ep_gin_comm_close(struct ep_gin_comm *comm)
{
    if (!comm)
        return;
    if (comm->running) {
        (void)ep_gin_settle(comm, &comm->active, NULL); /* the rest is dropped with the regions */
        ep_gin_say_bye(comm);
    }
    ep_gin_receive_stop(comm);
    drop_regions(comm);
    ep_gin_stream_close(&comm->receiver);
    close_links(comm);
    ep_gin_pages_close(comm, comm->words, WORDS_BYTES(comm->ranks));
    ep_gin_receive_close(comm);
    tell_counts(comm);
    ep_gin_pool_close(&comm->pool);
    pthread_mutex_destroy(&comm->receiving);
    pthread_mutex_destroy(&comm->sending);
    free(comm->regions);
    free(comm->peers);
    free(comm);
}

void ep_gin_comm_hear(struct ep_gin_comm *comm, void (*heard)(void *user), void *user)
{
    ep_gin_lock(comm);
    comm->heard = heard;
    comm->heard_user = user;
    ep_gin_unlock(comm);
}

/* The descriptor stays: the receive thread has it, and closes it with the others. */
void ep_gin_comm_drop(struct ep_gin_comm *comm, uint32_t rank, const char *why)
{
    ep_gin_peer_lost(&comm->peers[rank], why);
    __atomic_store_n(&comm->peers[rank].drained, 1, __ATOMIC_RELEASE); /* partner: ep_gin_peer_is_drained */
    if (comm->peers[rank].control >= 0)
        (void)shutdown(comm->peers[rank].control, SHUT_RDWR);
}

/* NCCL has at most so many puts under way, so that one can always be had. */
static uint32_t puts_of(const struct ep_gin_comm *comm)
{
    return comm->ranks * EP_GIN_DEPTH > EP_GIN_PUTS ? comm->ranks * EP_GIN_DEPTH : EP_GIN_PUTS;
}

/* EP_GIN_MAX_CONTEXTS: there are not so many side by side. */
static uint32_t find_contexts(const struct ep_gin_comm *comm, uint32_t n)
{
    uint32_t run = 0;

    for (uint32_t i = 0; i < EP_GIN_MAX_CONTEXTS; i++) {
        run = comm->taken[i] ? 0 : run + 1;
        if (run == n)
            return i + 1 - n;
    }
    return EP_GIN_MAX_CONTEXTS;
}

/* Under the lock.  A context that comes back leaves its puts to the next one. */
static ep_status take_contexts(struct ep_gin_comm *comm, uint32_t first, uint32_t n, struct ep_error *error)
{
    ep_status status = EP_OK;

    while (comm->pool.n < first + n && status == EP_OK)
        status = ep_gin_pool_grow(&comm->pool, puts_of(comm), error);
    if (status != EP_OK)
        return status;
    for (uint32_t i = 0; i < n; i++)
        comm->taken[first + i] = true;
    if (comm->contexts < first + n)
        comm->contexts = first + n;
    return EP_OK;
}

ep_status ep_gin_contexts_take(struct ep_gin_comm *comm, uint32_t n, uint32_t *first, struct ep_error *error)
{
    ep_status status;
    uint32_t at;

    if (n == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "contexts is 0: must be at least 1");
    ep_gin_lock(comm);
    at = find_contexts(comm, n);
    if (at == EP_GIN_MAX_CONTEXTS)
        status = ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%u contexts more: a communicator has at most %u", n,
                              EP_GIN_MAX_CONTEXTS);
    else
        status = take_contexts(comm, at, n, error);
    ep_gin_unlock(comm);
    if (status == EP_OK)
        *first = at;
    return status;
}

/* What is under way goes on to where it goes. */
void ep_gin_contexts_give(struct ep_gin_comm *comm, uint32_t first, uint32_t n)
{
    ep_gin_lock(comm);
    ep_gin_puts_forget(comm, first, n);
    for (uint32_t i = 0; i < n; i++)
        comm->taken[first + i] = false;
    ep_gin_unlock(comm);
}
