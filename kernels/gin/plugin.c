/*
 * libnccl-net-ep.so: GPU-initiated networking (GIN) for NCCL on machines that have no RDMA NIC.
 *
 * NCCL ships GIN over verbs only.  Its kernels put data into windows of other ranks and raise signals there; where
 * there is no NIC that does so, NCCL's own thread hands each put to a plugin.  This one carries it to another process
 * of the same host with the GPU's copy engine, and to other hosts over TCP, or RDMA NICs when asked to.
 *
 * Environment, read when a communicator is made; a value that makes no sense is refused with a sentence:
 *
 *   EP_GIN_TRANSPORT    auto (default), host, tcp,  auto: host between processes of one host that can map each
 *                       verbs                       other's memory, tcp otherwise
 *   EP_GIN_INTERFACE    as NCCL_SOCKET_IFNAME,      "eth,ib": names that begin so; "=eth0": that name; "^docker": any
 *                       which it replaces           other.  Default: the first that is up and neither loopback nor a
 *                                                   container's, IPv4 before IPv6; else loopback
 *   NCCL_SOCKET_FAMILY  AF_INET, AF_INET6           default: either
 *   EP_GIN_CONNECTIONS  1..16, default 8            TCP connections to each peer; with less than 16 CPUs, or more than 8
 *                                                   ranks, default 4
 *   EP_GIN_PIECE_KIB    16..4096, default 512       KiB that a put is cut into over TCP; less where EP_GIN_STAGING_MIB
 *                                                   does not hold two of each connection
 *   EP_GIN_STAGING_MIB  1..4096, default 64         MiB of pinned memory each way, for TCP to all peers of a
 *                                                   communicator
 *   EP_GIN_TIMEOUT_S    1..3600, default 20         s until a rank that does not do its part of connect or regMrSym
 *                                                   is named, and the call fails
 *   EP_GIN_SILENCE_S    1..3600, default 20         s after which a TCP peer that acknowledges nothing is taken for
 *                                                   dead
 *   EP_GIN_MOVERS       0..32, default 16           threads that carry long payloads over TCP; with less than 16 CPUs
 *                                                   default 0
 *   EP_GIN_SPIN_US      0..1000000, default 1000    us that the receive thread looks before it sleeps;
 *                                                   with less than 16 CPUs default 50
 *   EP_CUDA_MODULE      path                        libep_cuda.so, if it is not beside this file or in ../lib
 *
 * What is here: tables for the versions of NCCL's interface, which differ in what they call a context.
 */
#include <stdlib.h>
#include <string.h>

#include "transport.h"

#define EXPORT __attribute__((visibility("default")))

#define SPEED_MBPS     400000 /* of no wire: what NCCL's topology search is to take us for */
#define LATENCY_US     5.0f
#define GUID           0x45504749u /* "EPGI": one device per node */
#define MAX_COMMS      65536
#define DEVICE_VERSION 100 /* NCCL_GIN_PROXY_VERSION */

_Static_assert(EP_GIN_DEPTH % NCCL_MAX_REQUESTS == 0, "depth is told as a multiple");

/* A communicator's contexts, as v13 and v14 know them. */
struct contexts {
    struct ep_gin_comm *comm;
    uint32_t first, n;
};

/* ---- devices ---------------------------------------------------------------------------------------- */

/* NCCL passes on what init() gives, and forgets to for some communicators: there is nothing in it. */
static nccl_result init(void **context, uint64_t comm_id, nccl_logger log)
{
    static char nothing;
    struct ep_gin_settings settings;
    struct ep_error error = EP_ERROR_INIT;

    (void)comm_id;
    ep_gin_report_to(log);
    if (ep_gin_settings_read(&settings, &error) != EP_OK)
        return ep_gin_failed("init", &error);
    if (context)
        *context = &nothing;
    return NCCL_SUCCESS;
}

static nccl_result finalize(void *context)
{
    (void)context;
    return NCCL_SUCCESS;
}

static nccl_result devices(int *count)
{
    *count = 1;
    return NCCL_SUCCESS;
}

static char device_name[] = "ep-gin"; /* NCCL's type is not const */

/* What only NICs have a use for. */
static int dmabuf_support(void)
{
    struct ep_gin_settings settings;

    if (ep_gin_settings_read(&settings, NULL) != EP_OK || settings.transport != EP_GIN_VERBS)
        return 0;
    return ep_gin_verbs.usable(NULL, NULL) == EP_OK ? NCCL_MEMORY_DMABUF : 0;
}

static nccl_result properties_v11(int device, struct nccl_properties_v11 *properties)
{
    if (device != 0)
        return NCCL_INVALID_ARGUMENT;
    *properties = (struct nccl_properties_v11){
        .name = device_name,
        .guid = GUID,
        .ptrSupport = NCCL_MEMORY_HOST | NCCL_MEMORY_CUDA | dmabuf_support(),
        .speed = SPEED_MBPS,
        .port = 1,
        .latency = LATENCY_US,
        .maxComms = MAX_COMMS,
        .maxRecvs = (int)(EP_GIN_DEPTH / NCCL_MAX_REQUESTS),
        .netDeviceType = NCCL_DEVICE_GIN_PROXY,
        .netDeviceVersion = DEVICE_VERSION,
        .vProps = { .ndevs = 1 },
        .maxP2pBytes = NCCL_MAX_BYTES,
        .maxCollBytes = NCCL_MAX_BYTES,
        .maxMultiRequestSize = 1,
    };
    return NCCL_SUCCESS;
}

static nccl_result properties_v12(int device, struct nccl_properties_v12 *properties)
{
    struct nccl_properties_v11 old;
    nccl_result result = properties_v11(device, &old);

    if (result != NCCL_SUCCESS)
        return result;
    *properties = (struct nccl_properties_v12){
        .name = old.name,
        .guid = old.guid,
        .ptrSupport = old.ptrSupport,
        .speed = old.speed,
        .port = old.port,
        .latency = old.latency,
        .maxComms = old.maxComms,
        .maxRecvs = old.maxRecvs,
        .netDeviceType = old.netDeviceType,
        .netDeviceVersion = old.netDeviceVersion,
        .vProps = { .ndevs = 1 },
        .maxP2pBytes = old.maxP2pBytes,
        .maxCollBytes = old.maxCollBytes,
        .maxMultiRequestSize = old.maxMultiRequestSize,
        .railId = -1,
        .planeId = -1,
    };
    return NCCL_SUCCESS;
}

/* ---- communicators ------------------------------------------------------------------------------------ */

static nccl_result listen_on(void *context, int device, void *handle, void **listener)
{
    struct ep_gin_settings settings;
    struct ep_gin_listener *made = NULL;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = ep_gin_settings_read(&settings, &error);

    (void)context;
    if (device != 0)
        return NCCL_INVALID_ARGUMENT;
    if (status == EP_OK)
        status = ep_gin_listen(&settings, handle, &made, &error);
    if (status != EP_OK)
        return ep_gin_failed("listen", &error);
    *listener = made;
    return NCCL_SUCCESS;
}

static nccl_result close_listener(void *listener)
{
    ep_gin_listener_close(listener);
    return NCCL_SUCCESS;
}

static nccl_result connect_all(void *context, void *handles[], int ranks, int rank, void *listener, void **comm)
{
    struct ep_gin_settings settings;
    struct ep_gin_comm *made = NULL;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = ep_gin_settings_read(&settings, &error);

    (void)context;
    if (status == EP_OK)
        status = ep_gin_comm_open(&settings, (const struct ep_gin_handle *const *)handles, (uint32_t)ranks,
                                  (uint32_t)rank, listener, &made, &error);
    if (status != EP_OK)
        return ep_gin_failed("connect", &error);
    *comm = made;
    return NCCL_SUCCESS;
}

static nccl_result close_comm(void *comm)
{
    ep_gin_comm_close(comm);
    return NCCL_SUCCESS;
}

static nccl_result failed_of(const struct ep_gin_comm *comm, bool *failed)
{
    *failed = __atomic_load_n(&comm->failed, __ATOMIC_RELAXED) != 0;
    return NCCL_SUCCESS;
}

static nccl_result take_contexts(struct ep_gin_comm *comm, int n, uint32_t *first)
{
    struct ep_error error = EP_ERROR_INIT;

    if (ep_gin_contexts_take(comm, n > 0 ? (uint32_t)n : 0, first, &error) != EP_OK)
        return ep_gin_failed("createContext", &error);
    return NCCL_SUCCESS;
}

/* ---- regions --------------------------------------------------------------------------------------------- */

static nccl_result add_region(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd, uint64_t flags,
                              void **region)
{
    struct ep_gin_region *made = NULL;
    struct ep_error error = EP_ERROR_INIT;

    if (ep_gin_region_add(comm, data, bytes, type, flags, fd, offset, &made, &error) != EP_OK)
        return ep_gin_failed("regMrSym", &error);
    *region = made;
    return NCCL_SUCCESS;
}

static nccl_result remove_region(void *comm, void *region)
{
    if (region)
        ep_gin_region_remove(comm, region);
    return NCCL_SUCCESS;
}

/* The handle that device code has is the one that comes back. */
static nccl_result add_dmabuf_v11(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **region, void **gin_region)
{
    nccl_result result = add_region(comm, data, bytes, type, offset, fd, flags, region);

    if (result == NCCL_SUCCESS)
        *gin_region = *region;
    return result;
}

static nccl_result add_v11(void *comm, void *data, size_t bytes, int type, uint64_t flags, void **region,
                           void **gin_region)
{
    return add_dmabuf_v11(comm, data, bytes, type, 0, -1, flags, region, gin_region);
}

static nccl_result add_v14(void *comm, void *data, size_t bytes, int type, uint64_t flags, void **region)
{
    return add_region(comm, data, bytes, type, 0, -1, flags, region);
}

static nccl_result add_dmabuf_v14(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **region)
{
    return add_region(comm, data, bytes, type, offset, fd, flags, region);
}

/* ---- puts -------------------------------------------------------------------------------------------------- */

static nccl_result test(void *comm, void *request, int *done)
{
    *done = ep_gin_put_test(comm, request);
    return NCCL_SUCCESS;
}

static nccl_result put_signal_v11(void *comm, uint64_t source_offset, void *source, size_t bytes,
                                  uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                                  void *signal, uint64_t signal_value, uint32_t signal_op, void **request)
{
    *request = ep_gin_put(comm, &(struct ep_gin_put_args){ .rank = rank,
                                                           .source = source,
                                                           .target = target,
                                                           .source_offset = source_offset,
                                                           .target_offset = target_offset,
                                                           .bytes = bytes,
                                                           .signal = signal,
                                                           .signal_offset = signal_offset,
                                                           .signal_value = signal_value,
                                                           .signal_op = signal_op });
    return NCCL_SUCCESS;
}

static nccl_result put_v11(void *comm, uint64_t source_offset, void *source, size_t bytes, uint64_t target_offset,
                           void *target, uint32_t rank, void **request)
{
    return put_signal_v11(comm, source_offset, source, bytes, target_offset, target, rank, 0, NULL, 0, 0, request);
}

/* One that is out of range is out of the communicator's too, which says so. */
static uint32_t context_of(const struct contexts *contexts, int context)
{
    return context >= 0 && (uint32_t)context < contexts->n ? contexts->first + (uint32_t)context : EP_GIN_MAX_CONTEXTS;
}

static nccl_result put_signal_v13(void *gin, int context, uint64_t source_offset, void *source, size_t bytes,
                                  uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                                  void *signal, uint64_t signal_value, uint32_t signal_op, void **request)
{
    const struct contexts *contexts = gin;

    *request = ep_gin_put(contexts->comm, &(struct ep_gin_put_args){ .rank = rank,
                                                                     .context = context_of(contexts, context),
                                                                     .source = source,
                                                                     .target = target,
                                                                     .source_offset = source_offset,
                                                                     .target_offset = target_offset,
                                                                     .bytes = bytes,
                                                                     .signal = signal,
                                                                     .signal_offset = signal_offset,
                                                                     .signal_value = signal_value,
                                                                     .signal_op = signal_op });
    return NCCL_SUCCESS;
}

static nccl_result put_v13(void *gin, int context, uint64_t source_offset, void *source, size_t bytes,
                           uint64_t target_offset, void *target, uint32_t rank, void **request)
{
    return put_signal_v13(gin, context, source_offset, source, bytes, target_offset, target, rank, 0, NULL, 0, 0,
                          request);
}

/* All signals are strong: behind all puts before them. */
static nccl_result put_signal_v14(void *rma, int context, uint64_t source_offset, void *source, size_t bytes,
                                  uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                                  void *signal, uint64_t signal_value, uint32_t signal_op, bool strong, void **request)
{
    (void)strong;
    return put_signal_v13(rma, context, source_offset, source, bytes, target_offset, target, rank, signal_offset,
                          signal, signal_value, signal_op, request);
}

/* Makes gets visible, of which there are none: no request, which is done. */
static nccl_result flush(void *gin, int context, void *region, uint32_t rank, void **request)
{
    (void)gin, (void)context, (void)region, (void)rank;
    *request = NULL;
    return NCCL_SUCCESS;
}

/* ---- contexts ------------------------------------------------------------------------------------------------ */

/* v11: the communicator is the context. */
static nccl_result connect_v11(void *context, void *handles[], int ranks, int rank, void *listener, void **comm)
{
    uint32_t first;
    nccl_result result = connect_all(context, handles, ranks, rank, listener, comm);

    if (result != NCCL_SUCCESS)
        return result;
    result = take_contexts(*comm, 1, &first);
    if (result != NCCL_SUCCESS)
        ep_gin_comm_close(*comm);
    return result;
}

/* Of a proxy NCCL makes the context itself. */
static nccl_result create_v11(void *comm, int signals, int counters, void **gin, struct nccl_device_handle **device)
{
    (void)comm, (void)signals, (void)counters, (void)gin, (void)device;
    ep_gin_warn("createContext: this is a proxy, which has no context of its own on the device");
    return NCCL_INVALID_USAGE;
}

static nccl_result destroy_v11(void *gin)
{
    (void)gin;
    return NCCL_SUCCESS;
}

static nccl_result progress_v11(void *comm)
{
    ep_gin_progress(comm);
    return NCCL_SUCCESS;
}

static nccl_result failed_v11(void *comm, bool *failed)
{
    return failed_of(comm, failed);
}

static nccl_result create(struct ep_gin_comm *comm, int n, void **out)
{
    struct contexts *contexts = calloc(1, sizeof *contexts);
    nccl_result result;

    if (!contexts)
        return NCCL_SYSTEM_ERROR;
    contexts->comm = comm;
    contexts->n = (uint32_t)n;
    result = take_contexts(comm, n, &contexts->first);
    if (result == NCCL_SUCCESS)
        *out = contexts;
    else
        free(contexts);
    return result;
}

static nccl_result create_v13(void *comm, struct nccl_gin_config_v13 *config, void **gin,
                              struct nccl_device_handle **device)
{
    *device = NULL; /* NCCL has its own */
    return create(comm, config->nContexts, gin);
}

static nccl_result create_v14(void *comm, struct nccl_rma_config_v14 *config, void **rma)
{
    return create(comm, config->nContexts, rma);
}

static nccl_result destroy_v13(void *gin)
{
    struct contexts *contexts = gin;

    if (contexts)
        ep_gin_contexts_give(contexts->comm, contexts->first, contexts->n);
    free(contexts);
    return NCCL_SUCCESS;
}

static nccl_result progress_v13(void *gin)
{
    ep_gin_progress(((struct contexts *)gin)->comm);
    return NCCL_SUCCESS;
}

static nccl_result failed_v13(void *gin, bool *failed)
{
    return failed_of(((struct contexts *)gin)->comm, failed);
}

/* ---- the net that comes with it ---------------------------------------------------------------------------------- */

/* Until 2.29 NCCL looks for GIN beside a net only, and uses the net for its own collectives between nodes. */
static nccl_result not_offered(const char *call)
{
    ep_gin_warn("%s: collectives of NCCL's between nodes are not offered, only puts from kernels (GIN); use another "
                "communicator, without NCCL_NET_PLUGIN, for those",
                call);
    return NCCL_INVALID_USAGE;
}

static nccl_result net_init(void **context, uint64_t comm_id, struct nccl_net_config_v11 *config, nccl_logger log,
                            nccl_profiler profiler)
{
    (void)config, (void)profiler;
    return init(context, comm_id, log);
}

static nccl_result net_properties(int device, struct nccl_properties_v11 *properties)
{
    nccl_result result = properties_v11(device, properties);

    if (result != NCCL_SUCCESS)
        return result;
    properties->ptrSupport = NCCL_MEMORY_HOST;
    properties->maxRecvs = 1;
    properties->netDeviceType = NCCL_DEVICE_HOST;
    properties->netDeviceVersion = 0;
    return NCCL_SUCCESS;
}

static nccl_result net_listen(void *context, int device, void *handle, void **listener)
{
    (void)context, (void)device, (void)handle, (void)listener;
    return not_offered("listen");
}

static nccl_result net_connect(void *context, int device, void *handle, void **send,
                               struct nccl_device_handle **offload)
{
    (void)context, (void)device, (void)handle, (void)send, (void)offload;
    return not_offered("connect");
}

static nccl_result net_accept(void *listener, void **receive, struct nccl_device_handle **offload)
{
    (void)listener, (void)receive, (void)offload;
    return not_offered("accept");
}

static nccl_result net_add(void *comm, void *data, size_t bytes, int type, void **region)
{
    (void)comm, (void)data, (void)bytes, (void)type, (void)region;
    return not_offered("regMr");
}

static nccl_result net_remove(void *comm, void *region)
{
    (void)comm, (void)region;
    return not_offered("deregMr");
}

static nccl_result net_send(void *send, void *data, size_t bytes, int tag, void *region, void *profile, void **request)
{
    (void)send, (void)data, (void)bytes, (void)tag, (void)region, (void)profile, (void)request;
    return not_offered("isend");
}

static nccl_result net_receive(void *receive, int n, void **data, size_t *bytes, int *tags, void **regions,
                               void **profiles, void **request)
{
    (void)receive, (void)n, (void)data, (void)bytes, (void)tags, (void)regions, (void)profiles, (void)request;
    return not_offered("irecv");
}

static nccl_result net_flush(void *receive, int n, void **data, int *bytes, void **regions, void **request)
{
    (void)receive, (void)n, (void)data, (void)bytes, (void)regions, (void)request;
    return not_offered("iflush");
}

static nccl_result net_test(void *request, int *done, int *bytes)
{
    (void)request, (void)done, (void)bytes;
    return not_offered("test");
}

static nccl_result net_close(void *comm)
{
    (void)comm;
    return NCCL_SUCCESS;
}

static nccl_result net_attributes(void *context, struct nccl_attributes_v11 *attributes)
{
    (void)context, (void)attributes;
    return NCCL_SUCCESS;
}

/* ---- the tables ------------------------------------------------------------------------------------ */

extern EXPORT const struct nccl_net_v11 ncclNetPlugin_v11;
extern EXPORT const struct nccl_gin_v11 ncclGinPlugin_v11;
extern EXPORT const struct nccl_rma_v13 ncclRmaPlugin_v13;
extern EXPORT const struct nccl_rma_v14 ncclRmaPlugin_v14;

const struct nccl_net_v11 ncclNetPlugin_v11 = {
    .name = EP_GIN_NAME,
    .init = net_init,
    .devices = devices,
    .getProperties = net_properties,
    .listen = net_listen,
    .connect = net_connect,
    .accept = net_accept,
    .regMr = net_add,
    .deregMr = net_remove,
    .isend = net_send,
    .irecv = net_receive,
    .iflush = net_flush,
    .test = net_test,
    .closeSend = net_close,
    .closeRecv = net_close,
    .closeListen = net_close,
    .finalize = finalize,
    .setNetAttr = net_attributes,
};

const struct nccl_gin_v11 ncclGinPlugin_v11 = {
    .name = EP_GIN_NAME,
    .init = init,
    .devices = devices,
    .getProperties = properties_v11,
    .listen = listen_on,
    .connect = connect_v11,
    .createContext = create_v11,
    .regMrSym = add_v11,
    .regMrSymDmaBuf = add_dmabuf_v11,
    .deregMrSym = remove_region,
    .destroyContext = destroy_v11,
    .closeColl = close_comm,
    .closeListen = close_listener,
    .iput = put_v11,
    .iputSignal = put_signal_v11,
    .test = test,
    .ginProgress = progress_v11,
    .queryLastError = failed_v11,
    .finalize = finalize,
};

const struct nccl_rma_v13 ncclRmaPlugin_v13 = {
    .name = EP_GIN_NAME,
    .init = init,
    .devices = devices,
    .getProperties = properties_v12,
    .listen = listen_on,
    .connect = connect_all,
    .createContext = create_v13,
    .regMrSym = add_v11,
    .regMrSymDmaBuf = add_dmabuf_v11,
    .deregMrSym = remove_region,
    .destroyContext = destroy_v13,
    .closeColl = close_comm,
    .closeListen = close_listener,
    .iput = put_v13,
    .iputSignal = put_signal_v13,
    .iflush = flush,
    .test = test,
    .ginProgress = progress_v13,
    .queryLastError = failed_v13,
    .finalize = finalize,
};

const struct nccl_rma_v14 ncclRmaPlugin_v14 = {
    .name = EP_GIN_NAME,
    .init = init,
    .devices = devices,
    .getProperties = properties_v12,
    .listen = listen_on,
    .connect = connect_all,
    .createContext = create_v14,
    .regMrSym = add_v14,
    .regMrSymDmaBuf = add_dmabuf_v14,
    .deregMrSym = remove_region,
    .destroyContext = destroy_v13,
    .closeColl = close_comm,
    .closeListen = close_listener,
    .iput = put_v13,
    .iputSignal = put_signal_v14,
    .iflush = flush,
    .test = test,
    .rmaProgress = progress_v13,
    .queryLastError = failed_v13,
    .finalize = finalize,
};
