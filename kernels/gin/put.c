/*
 * Puts, from iput to done.
 *
 * NCCL's thread polls.  A put waits in the queue of its peer and context; the queues of a peer take turns, put by
 * put, so that a context waits for one put of another at most.  What begins to move gets a number, and the link has it
 * from there on.  iput begins what there is room for; ginProgress, which comes after a round of iputs, does for all of
 * them at once what costs a system call or a word of the GPU's.
 */
#include "transport.h"

/* NCCL tests each put that is under way between two calls of ginProgress, and there can be thousands; but where it
 * waits for one, it does nothing but test. */
#define TESTS_PER_PROGRESS 64u

/* ---- checks ------------------------------------------------------------------------------------- */

static bool region_has(const struct ep_gin_region *region, uint64_t offset, uint64_t bytes)
{
    return region && __atomic_load_n(&region->key, __ATOMIC_RELAXED) != 0 &&
           ep_gin_inside(offset, bytes, region->bytes);
}

static bool data_good(const struct ep_gin_put_args *a)
{
    return a->bytes == 0 || (a->bytes <= NCCL_MAX_BYTES && region_has(a->source, a->source_offset, a->bytes) &&
                             region_has(a->target, a->target_offset, a->bytes));
}

static bool signal_good(const struct ep_gin_put_args *a)
{
    return !a->signal ||
           (region_has(a->signal, a->signal_offset, sizeof(uint64_t)) && a->signal_offset % sizeof(uint64_t) == 0 &&
            (a->signal_op == NCCL_SIGNAL_INC || a->signal_op == NCCL_SIGNAL_ADD));
}

static bool args_good(const struct ep_gin_comm *comm, const struct ep_gin_put_args *a)
{
    return a->rank < comm->ranks && a->context < comm->contexts && comm->taken[a->context] && data_good(a) &&
           signal_good(a);
}

/* A peer that was gone when a region was registered has none. */
static bool peer_has(const struct ep_gin_put_args *a)
{
    return (a->bytes == 0 || a->target->remote[a->rank].key != 0) &&
           (!a->signal || a->signal->remote[a->rank].key != 0);
}

/* ---- from queue to link --------------------------------------------------------------------------- */

static void use(struct ep_gin_put *put)
{
    __atomic_fetch_add(&put->source->uses, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&put->target->uses, 1, __ATOMIC_RELAXED);
}

static void unuse(struct ep_gin_put *put)
{
    if (!put->source)
        return;
    __atomic_fetch_sub(&put->source->uses, 1, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&put->target->uses, 1, __ATOMIC_RELAXED);
}

static void give(struct ep_gin_comm *comm, struct ep_gin_put *put)
{
    put->in_use = false;
    ep_gin_pool_give(&comm->pool, put);
}

static void finish(struct ep_gin_put *put)
{
    struct ep_gin_comm *comm = put->peer->comm;

    unuse(put);
    put->peer->active--;
    __atomic_fetch_sub(&comm->active, 1, __ATOMIC_RELAXED);
    if (put->orphan)
        give(comm, put);
    else
        __atomic_store_n(&put->done, true, __ATOMIC_RELEASE); /* partner: done */
}

static void note_moved(struct ep_gin_put *put, uint64_t bytes)
{
    if (!put->source)
        return;
    __atomic_fetch_add(&put->source->moved, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&put->target->moved, bytes, __ATOMIC_RELAXED);
}

void ep_gin_put_sent(struct ep_gin_put *put, uint64_t bytes)
{
    note_moved(put, bytes);
    put->sent += bytes;
    if (put->sent == put->bytes)
        finish(put);
}

static bool main_carries(const struct ep_gin_link *main, const struct ep_gin_put *put)
{
    if (put->bytes == 0 || !main->transport->region_reach)
        return true;
    return put->reached && (!main->transport->reads || main->transport->reads(main->link, put->source));
}

static struct ep_gin_link *link_of(struct ep_gin_put *put)
{
    return main_carries(&put->peer->main, put) ? &put->peer->main : &put->peer->spare;
}

static void number(struct ep_gin_put *put, struct ep_gin_queue *queue)
{
    uint64_t back;

    put->number = ++put->peer->numbers;
    back = queue->last != 0 ? put->number - queue->last : 0;
    put->back = back < EP_GIN_WINDOW ? (uint32_t)back : 0;
    queue->last = put->number;
}

void ep_gin_put_message(const struct ep_gin_put *put, uint64_t at, uint32_t bytes, struct ep_gin_message *m)
{
    *m = (struct ep_gin_message){
        .magic = EP_GIN_MAGIC,
        .signal_op = (uint16_t)put->signal.op,
        .number = put->number,
        .back = put->back,
        .bytes = bytes,
        .total = put->bytes,
        .region = put->region,
        .signal_region = put->signal.region,
        .offset = put->offset + at,
        .signal_offset = put->signal.offset,
        .signal_value = put->signal.value,
    };
}

static struct ep_gin_put *pop_in_turn(struct ep_gin_peer *peer)
{
    struct ep_gin_put *put = NULL;

    for (uint32_t i = 0; i < peer->comm->contexts && !put; i++) {
        put = ep_gin_queue_pop(&peer->queues[peer->turn]);
        peer->turn = (peer->turn + 1) % peer->comm->contexts;
    }
    return put;
}

/* The put that is partly on its way, or the next in turn; NULL: none waits. */
static struct ep_gin_put *next_put(struct ep_gin_peer *peer)
{
    if (!peer->starting && peer->waiting > 0) {
        peer->starting = pop_in_turn(peer);
        peer->waiting--;
    }
    return peer->starting;
}

static void start_puts(struct ep_gin_peer *peer)
{
    struct ep_gin_put *put;

    while ((put = next_put(peer)) != NULL) {
        struct ep_gin_link *link = link_of(put);

        if (put->number == 0)
            number(put, &peer->queues[put->context]);
        if (!link->transport->put_start(link->link, put))
            break;
        peer->starting = NULL;
    }
}

/* Of one that is partly on its way, the link tells the rest. */
static void drop_puts(struct ep_gin_peer *peer)
{
    struct ep_gin_put *put;

    while ((put = next_put(peer)) != NULL) {
        peer->starting = NULL;
        put->bytes = put->taken;
        if (put->sent == put->bytes)
            finish(put);
        ep_gin_count(peer->comm, &peer->comm->counts.lost_puts, "a put that was not sent before one end was gone");
    }
}

static void progress_peer(struct ep_gin_peer *peer)
{
    if (ep_gin_peer_is_served(peer))
        start_puts(peer);
    else
        drop_puts(peer);
    peer->main.transport->progress(peer->main.link);
    if (peer->spare.link)
        peer->spare.transport->progress(peer->spare.link);
}

/* Under the lock.  Each rank begins with the next one, so that ranks which do the same do not all send to one at a time. */
static void progress(struct ep_gin_comm *comm)
{
    comm->gathers -= comm->gathers > 0;
    for (uint32_t i = 1; i <= comm->ranks; i++) {
        struct ep_gin_peer *peer = &comm->peers[(comm->rank + i) % comm->ranks];

        if (peer->active > 0)
            progress_peer(peer);
    }
}

void ep_gin_progress(struct ep_gin_comm *comm)
{
    if (__atomic_load_n(&comm->active, __ATOMIC_RELAXED) == 0)
        return;
    pthread_mutex_lock(&comm->sending);
    progress(comm);
    pthread_mutex_unlock(&comm->sending);
}

/* ---- requests --------------------------------------------------------------------------------------- */

static void fill(struct ep_gin_put *put, struct ep_gin_peer *peer, const struct ep_gin_put_args *a)
{
    put->in_use = true;
    put->peer = peer;
    put->context = a->context;
    if (a->bytes > 0) {
        put->source = a->source;
        put->target = a->target;
        put->from = a->source->at + a->source_offset;
        put->reached = a->target->remote[a->rank].reached;
        put->region = a->target->remote[a->rank].key;
        put->bytes = a->bytes;
        put->offset = a->target_offset;
        use(put);
    }
    if (a->signal)
        put->signal = (struct ep_gin_signal){ .region = a->signal->remote[a->rank].key,
                                              .op = a->signal_op,
                                              .offset = a->signal_offset,
                                              .value = a->signal_value };
}

static struct ep_gin_put *enter(struct ep_gin_comm *comm, const struct ep_gin_put_args *a)
{
    struct ep_gin_peer *peer = &comm->peers[a->rank];
    struct ep_gin_put *put = ep_gin_pool_take(&comm->pool);

    if (!put) {
        ep_gin_count(comm, &comm->counts.crowded, "more puts than were asked for, which is not done");
        return &comm->refused;
    }
    fill(put, peer, a);
    ep_gin_queue_push(&peer->queues[a->context], put);
    peer->waiting++;
    peer->active++;
    __atomic_fetch_add(&comm->active, 1, __ATOMIC_RELAXED);
    if (ep_gin_peer_is_served(peer))
        start_puts(peer);
    return put;
}

struct ep_gin_put *ep_gin_put(struct ep_gin_comm *comm, const struct ep_gin_put_args *args)
{
    struct ep_gin_put *put = &comm->refused;

    __atomic_fetch_add(&comm->asked, 1, __ATOMIC_RELEASE); /* partner: ep_gin_judge */
    pthread_mutex_lock(&comm->sending);
    if (!args_good(comm, args))
        ep_gin_count(comm, &comm->counts.bad_puts, "a put out of a region, or to no rank, which is not done");
    else if (ep_gin_peer_is_lost(&comm->peers[args->rank]) || !peer_has(args))
        ep_gin_count(comm, &comm->counts.lost_puts, "a put to a rank that is gone");
    else
        put = enter(comm, args);
    pthread_mutex_unlock(&comm->sending);
    return put;
}

static bool done(const struct ep_gin_put *put)
{
    return __atomic_load_n(&put->done, __ATOMIC_ACQUIRE); /* partner: finish */
}

bool ep_gin_put_test(struct ep_gin_comm *comm, struct ep_gin_put *put)
{
    if (put == &comm->refused)
        return true;
    if (!done(put) && __atomic_add_fetch(&comm->tests, 1, __ATOMIC_RELAXED) % TESTS_PER_PROGRESS == 0)
        ep_gin_progress(comm);
    if (!done(put))
        return false;
    pthread_mutex_lock(&comm->sending);
    give(comm, put);
    pthread_mutex_unlock(&comm->sending);
    return true;
}

/* ---- the end ------------------------------------------------------------------------------------------- */

/* What is in sight of its end comes to it within that. */
#define SETTLE_NS (2 * EP_NS_PER_S)

static uint64_t load(const uint64_t *moved)
{
    return moved ? __atomic_load_n(moved, __ATOMIC_RELAXED) : 0;
}

bool ep_gin_settle(struct ep_gin_comm *comm, const uint32_t *count, const uint64_t *moved)
{
    uint64_t known = load(moved), end = ep_clock_ns() + SETTLE_NS;

    while (__atomic_load_n(count, __ATOMIC_RELAXED) != 0) {
        ep_gin_progress(comm);
        if (load(moved) != known) {
            known = load(moved);
            end = ep_clock_ns() + SETTLE_NS;
        } else if (ep_clock_ns() > end) {
            return false;
        }
    }
    return true;
}

static bool uses_region(const struct ep_gin_put *put, const struct ep_gin_region *region)
{
    return put->in_use && !done(put) && (put->source == region || put->target == region);
}

void ep_gin_puts_cut(struct ep_gin_comm *comm, const struct ep_gin_region *region)
{
    struct ep_gin_put *put;

    for (uint32_t i = 0; (put = ep_gin_pool_at(&comm->pool, i)) != NULL; i++) {
        if (!uses_region(put, region) || ep_gin_peer_is_lost(put->peer))
            continue;
        ep_gin_warn("rank %u: rank %u has not taken all puts of a region that goes, and is given up", comm->rank,
                    put->peer->rank);
        ep_gin_comm_drop(comm, put->peer->rank, "it has not taken all puts of a region that goes");
    }
}

static void forget(struct ep_gin_comm *comm, struct ep_gin_put *put)
{
    if (done(put))
        give(comm, put);
    else
        put->orphan = true;
}

void ep_gin_puts_forget(struct ep_gin_comm *comm, uint32_t first, uint32_t n)
{
    struct ep_gin_put *put;

    for (uint32_t i = 0; (put = ep_gin_pool_at(&comm->pool, i)) != NULL; i++)
        if (put->in_use && !put->orphan && put->context - first < n)
            forget(comm, put);
}
