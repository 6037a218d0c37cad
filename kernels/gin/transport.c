/* Which transports there are, and which one carries puts between two ranks. */
#include "transport.h"

const struct ep_gin_transport *const ep_gin_transports[EP_GIN_TRANSPORTS] = {
    [EP_GIN_TCP] = &ep_gin_tcp,
    [EP_GIN_HOST] = &ep_gin_host,
    [EP_GIN_VERBS] = &ep_gin_verbs,
};

#ifndef EP_GIN_WITH_VERBS
static ep_status without_verbs(struct ep_gin_comm *comm, struct ep_error *error)
{
    (void)comm;
    return ep_error_set(error, EP_UNAVAILABLE, "built without infiniband/verbs.h");
}

const struct ep_gin_transport ep_gin_verbs = { .name = "verbs", .usable = without_verbs };
#endif

const char *ep_gin_transport_name(uint32_t transport)
{
    return transport < EP_GIN_TRANSPORTS ? ep_gin_transports[transport]->name : "auto";
}

void ep_gin_transports_look(struct ep_gin_comm *comm)
{
    comm->usable = 0;
    for (uint32_t t = 0; t < EP_GIN_TRANSPORTS; t++)
        if (ep_gin_transports[t]->usable(comm, NULL) == EP_OK)
            comm->usable |= 1u << t;
}

/* What needs descriptors needs a connection that carries them. */
uint32_t ep_gin_transports_usable(const struct ep_gin_comm *comm, bool local)
{
    uint32_t bits = comm->usable;

    for (uint32_t t = 0; t < EP_GIN_TRANSPORTS; t++)
        if (ep_gin_transports[t]->same_host && !local)
            bits &= ~(1u << t);
    return bits;
}

static bool can(const struct ep_gin_hello *hello, enum ep_gin_transport_id t)
{
    return hello->able >> t & 1;
}

/* From the best to the one that is always there.  Verbs have run on no NIC yet: who wants them names them. */
static enum ep_gin_transport_id best(const struct ep_gin_hello *a, const struct ep_gin_hello *b)
{
    if (can(a, EP_GIN_HOST) && can(b, EP_GIN_HOST) && ep_gin_same_host(&a->host, &b->host))
        return EP_GIN_HOST;
    return EP_GIN_TCP;
}

static const char *why_not(const struct ep_gin_hello *mine, const struct ep_gin_hello *theirs,
                           enum ep_gin_transport_id t)
{
    if (!can(mine, t))
        return "this rank cannot";
    if (!can(theirs, t))
        return "the other cannot";
    if (ep_gin_transports[t]->same_host && !ep_gin_same_host(&mine->host, &theirs->host))
        return "they are not on one host";
    return NULL;
}

ep_status ep_gin_transport_choose(const struct ep_gin_hello *mine, const struct ep_gin_hello *theirs,
                                  enum ep_gin_transport_id *chosen, struct ep_error *error)
{
    const uint32_t named = mine->wanted != EP_GIN_AUTO ? mine->wanted : theirs->wanted;
    const char *reason;

    if (named >= EP_GIN_AUTO) {
        *chosen = best(mine, theirs);
        return EP_OK;
    }
    if (theirs->wanted != EP_GIN_AUTO && theirs->wanted != named)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "EP_GIN_TRANSPORT is %s here and another at rank %u: must be "
                            "the same",
                            ep_gin_transport_name(named), theirs->rank);
    reason = why_not(mine, theirs, (enum ep_gin_transport_id)named);
    if (reason)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "EP_GIN_TRANSPORT is %s, for ranks %u and %u: %s",
                            ep_gin_transport_name(named), mine->rank, theirs->rank, reason);
    *chosen = (enum ep_gin_transport_id)named;
    return EP_OK;
}
