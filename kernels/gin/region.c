/* Memory that puts come from and go to. */
#include "transport.h"

#include <stdlib.h>
#include <string.h>

/* A key is the slot and how often it was used: what is meant for a region that is gone finds nothing. */
#define SLOT_BITS 10u
_Static_assert(EP_GIN_MAX_REGIONS == 1u << SLOT_BITS, "a key has the number of a slot in it");

/* ---- slots ---------------------------------------------------------------------------------------- */

static struct ep_gin_region *free_slot(struct ep_gin_comm *comm)
{
    for (uint32_t i = 0; i < EP_GIN_MAX_REGIONS; i++)
        if (!comm->regions[i].remote && __atomic_load_n(&comm->regions[i].uses, __ATOMIC_RELAXED) == 0) {
            comm->regions[i].slot = i;
            return &comm->regions[i];
        }
    return NULL;
}

/* Never 0, which is no key. */
static uint32_t next_key(struct ep_gin_region *region)
{
    region->generation = (region->generation + 1) & (UINT32_MAX >> SLOT_BITS);
    if (region->generation == 0)
        region->generation = 1;
    return region->generation << SLOT_BITS | region->slot;
}

struct ep_gin_region *ep_gin_region_of(struct ep_gin_comm *comm, uint32_t key)
{
    struct ep_gin_region *region = &comm->regions[key % EP_GIN_MAX_REGIONS];

    /* Acquire: partner is publish. */
    return key != 0 && __atomic_load_n(&region->key, __ATOMIC_ACQUIRE) == key ? region : NULL;
}

static void publish(struct ep_gin_region *region)
{
    __atomic_store_n(&region->key, next_key(region), __ATOMIC_RELEASE); /* partner: ep_gin_region_of */
}

/* ---- making one ------------------------------------------------------------------------------------- */

/* What the words stand at now: NCCL has zeroed them, and nothing says that it must. */
static ep_status read_shadow(struct ep_gin_comm *comm, struct ep_gin_region *region, struct ep_error *error)
{
    const uint64_t bytes = region->bytes / sizeof(uint64_t) * sizeof(uint64_t);

    region->shadow = calloc(region->bytes / sizeof(uint64_t) + 1, sizeof(uint64_t));
    if (!region->shadow)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the signals of %llu bytes", (unsigned long long)bytes);
    return comm->cuda->read(comm->device, region->shadow, region->at, bytes, comm->receiver.stream, error);
}

static ep_status check(const struct ep_gin_comm *comm, const void *at, uint64_t bytes, int type, struct ep_error *error)
{
    if (type != NCCL_MEMORY_HOST && type != NCCL_MEMORY_CUDA)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "type of a region is %d: must be host or CUDA memory", type);
    if (!at || bytes == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "a region of %llu bytes at %p: must have some",
                            (unsigned long long)bytes, at);
    if (type == NCCL_MEMORY_CUDA && !comm->cuda)
        return ep_error_set(error, EP_UNAVAILABLE, "a region of GPU memory: %s", comm->no_cuda.text);
    return EP_OK;
}

static void release(struct ep_gin_region *region)
{
    free(region->shadow);
    free(region->remote);
    region->shadow = NULL;
    region->remote = NULL;
}

/* Host memory needs no shadow: its signals are raised where they are. */
static ep_status make(struct ep_gin_comm *comm, struct ep_gin_region *region, uint64_t flags, struct ep_error *error)
{
    ep_status status = EP_OK;

    region->remote = calloc(comm->ranks, sizeof *region->remote);
    if (!region->remote)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a region of %u ranks", comm->ranks);
    if (region->type == NCCL_MEMORY_CUDA && (flags & NCCL_REGION_ORDERED))
        status = read_shadow(comm, region, error);
    if (status != EP_OK)
        release(region);
    return status;
}

/* ---- telling the others -------------------------------------------------------------------------------- */

static ep_status offer(struct ep_gin_peer *peer, void *user, struct ep_gin_frame *frame, struct ep_gin_card *card,
                       struct ep_error *error)
{
    const struct ep_gin_region *region = user;
    const struct ep_gin_transport *transport = peer->main.transport;
    ep_status status = EP_UNIMPLEMENTED;

    frame->key = region->key;
    frame->type = (uint32_t)region->type;
    frame->bytes = region->bytes;
    if (transport->region_offer)
        status = transport->region_offer(peer->main.link, region, card, error);
    frame->has_card = status == EP_OK;
    return status == EP_UNIMPLEMENTED ? EP_OK : status;
}

/* Whether the peer can be reached or not is between it and this rank: the others do not know. */
static void reach(struct ep_gin_peer *peer, const struct ep_gin_region *region, const struct ep_gin_card *card)
{
    const struct ep_gin_link *main = &peer->main;
    struct ep_error error = EP_ERROR_INIT;

    if (main->transport->region_reach(main->link, region, card, &region->remote[peer->rank].reached, &error) != EP_OK)
        ep_gin_info("rank %u: puts of %llu bytes' region to rank %u take TCP: %s", peer->comm->rank,
                    (unsigned long long)region->bytes, peer->rank, error.text);
}

static ep_status learn(struct ep_gin_peer *peer, void *user, const struct ep_gin_frame *frame,
                       const struct ep_gin_card *card, struct ep_error *error)
{
    struct ep_gin_region *region = user;

    if (frame->bytes != region->bytes)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "region %llu has %llu bytes here and %llu at rank %u: must be the "
                            "same on all ranks",
                            (unsigned long long)peer->comm->registrations, (unsigned long long)region->bytes,
                            (unsigned long long)frame->bytes, peer->rank);
    region->remote[peer->rank].key = frame->key;
    if (frame->has_card && peer->main.transport->region_reach)
        reach(peer, region, card);
    return EP_OK;
}

/* The rank itself is one of its peers. */
static void learn_own(struct ep_gin_comm *comm, struct ep_gin_region *region)
{
    region->remote[comm->rank].key = region->key;
    reach(&comm->peers[comm->rank], region, NULL);
}

/* ---- the interface --------------------------------------------------------------------------------------- */

ep_status ep_gin_region_add(struct ep_gin_comm *comm, void *at, uint64_t bytes, int type, uint64_t flags, int dmabuf,
                            uint64_t dmabuf_offset, struct ep_gin_region **out, struct ep_error *error)
{
    struct ep_gin_region *region = free_slot(comm);
    ep_status status = check(comm, at, bytes, type, error);

    if (status == EP_OK && !region)
        status =
            ep_error_set(error, EP_RESOURCE_EXHAUSTED, "regions: a communicator has at most %u", EP_GIN_MAX_REGIONS);
    if (status != EP_OK)
        return status;
    region->at = at;
    region->bytes = bytes;
    region->type = type;
    region->dmabuf = dmabuf;
    region->dmabuf_offset = dmabuf_offset;
    status = make(comm, region, flags, error);
    if (status != EP_OK)
        return status;
    publish(region);
    learn_own(comm, region);
    status = ep_gin_exchange(comm, EP_GIN_FRAME_REGION, comm->registrations++, offer, learn, region, error);
    region->dmabuf = -1;
    if (status == EP_OK)
        *out = region;
    else
        ep_gin_region_remove(comm, region);
    return status;
}

/* Peers that were not reached too: what they were offered is taken back, also where the registration has failed. */
static void leave(struct ep_gin_comm *comm, struct ep_gin_region *region)
{
    for (uint32_t r = 0; r < comm->ranks; r++) {
        const struct ep_gin_link *main = &comm->peers[r].main;

        if (main->transport->region_leave)
            main->transport->region_leave(main->link, region, region->remote[r].reached);
    }
}

void ep_gin_region_remove(struct ep_gin_comm *comm, struct ep_gin_region *region)
{
    (void)ep_gin_settle(comm, &region->uses, &region->moved); /* what is left is cut */
    ep_gin_region_drop(comm, region);
}

/* No put finds it any more, and none that has found it is left but where the GPU still reads. */
static void take_back(struct ep_gin_comm *comm, struct ep_gin_region *region)
{
    ep_gin_lock(comm);
    __atomic_store_n(&region->key, 0, __ATOMIC_RELEASE); /* partner: ep_gin_region_of */
    if (__atomic_load_n(&region->uses, __ATOMIC_RELAXED) != 0)
        ep_gin_puts_cut(comm, region);
    ep_gin_unlock(comm);
    if (!ep_gin_settle(comm, &region->uses, NULL))
        ep_gin_warn("rank %u: a region is given back while the GPU still reads from it", comm->rank);
}

/* What has come in is brought to its end.  What puts still use stays reached: a GPU may work again. */
void ep_gin_region_drop(struct ep_gin_comm *comm, struct ep_gin_region *region)
{
    take_back(comm, region);
    ep_gin_lock(comm);
    if (!ep_gin_stream_wait(&comm->receiver, comm->settings.timeout_ns))
        ep_gin_warn("rank %u: a region is given back while the GPU still writes to it", comm->rank);
    if (__atomic_load_n(&region->uses, __ATOMIC_RELAXED) == 0)
        leave(comm, region);
    release(region);
    ep_gin_unlock(comm);
}
