/*
 * A GIN plugin that is right, slow and small: what gin_conformance is tried on.
 *
 * TCP over loopback: to each peer a connection and a thread that sends, from each a connection and a thread that
 * receives, writes what comes where it belongs and applies signals. Order is the connection's.
 *
 * GIN_REFERENCE_WRONG names one rule that it breaks; mutants.py lists them with the cases that must find it.
 */
#include "reference.h"

#include <stdlib.h>
#include <string.h>

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
