/* What every thread of a communicator may do: count, say that a peer is gone, keep the others out. */
#include "transport.h"

void ep_gin_count(struct ep_gin_comm *comm, uint64_t *count, const char *what)
{
    if (__atomic_fetch_add(count, 1, __ATOMIC_RELAXED) == 0)
        ep_gin_warn("rank %u: %s; more of it is counted and not told", comm->rank, what);
}

void ep_gin_peer_lost(struct ep_gin_peer *peer, const char *why)
{
    /* Partner: ep_gin_peer_is_lost. */
    if (__atomic_exchange_n(&peer->lost, 1, __ATOMIC_ACQ_REL) == 0)
        ep_gin_info("rank %u: rank %u is gone, puts to it are done: %s", peer->comm->rank, peer->rank, why);
}

void ep_gin_lock(struct ep_gin_comm *comm)
{
    __atomic_fetch_add(&comm->wanted, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&comm->sending);
    pthread_mutex_lock(&comm->receiving);
    __atomic_fetch_sub(&comm->wanted, 1, __ATOMIC_RELAXED);
}

void ep_gin_unlock(struct ep_gin_comm *comm)
{
    pthread_mutex_unlock(&comm->receiving);
    pthread_mutex_unlock(&comm->sending);
}
