/*
 * nccl_plugin.h: what NCCL asks of a network plugin, as far as ours offers it.
 *
 * An interface of NVIDIA's, declared here so that nothing of NCCL is needed to build or to test.  Facts are from
 * NCCL's src/include/plugin and src/include/nccl_device/net_device.h at v2.28.9-1 and v2.30.7-1; a table's members
 * keep NCCL's names, since that is how anyone finds them there.
 *
 *   symbol               looked up by
 *   ncclNetPlugin_v11    2.28 and later, in NCCL_NET_PLUGIN; must be there for the next one to be looked for
 *   ncclGinPlugin_v11    2.28.7 to 2.30.4, in the same file
 *   ncclRmaPlugin_v14    2.30.7, in NCCL_RMA_PLUGIN: NCCL's own GIN proxy runs over it
 *   ncclRmaPlugin_v13    2.30.3 and 2.30.4, for NCCL's host-side puts; 2.30.7 when there is no v14
 *
 * `context` arguments: what init() gave, a communicator or one of its contexts; each member's comment says.
 */
#ifndef NCCL_PLUGIN_H
#define NCCL_PLUGIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- results and logs ---------------------------------------------------------------- */

/* ncclResult_t */
typedef enum nccl_result {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7
} nccl_result;

/* ncclDebugLogLevel, ncclDebugLogSubSys: those that are used */
typedef enum nccl_log_level { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 } nccl_log_level;
enum { NCCL_LOG_INIT = 0x1, NCCL_LOG_NET = 0x10 };

/* ncclDebugLogger_t */
typedef void (*nccl_logger)(nccl_log_level level, unsigned long subsystems, const char *file, int line,
                            const char *format, ...);
/* ncclProfilerCallback_t */
typedef nccl_result (*nccl_profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

/* ---- constants ------------------------------------------------------------------------- */

#define NCCL_HANDLE_BYTES 128 /* of what listen() gives and connect() gets: NCCL_NET_HANDLE_MAXSIZE */
#define NCCL_MAX_REQUESTS 32  /* of one peer and context, times maxRecvs: NCCL_NET_MAX_REQUESTS */
#define NCCL_MAX_BYTES (1ull << 40) /* of one transfer: NCCL_MAX_NET_SIZE_BYTES */

/* `type` of a registration, bits of ptrSupport: NCCL_PTR_* */
enum { NCCL_MEMORY_HOST = 0x1, NCCL_MEMORY_CUDA = 0x2, NCCL_MEMORY_DMABUF = 0x4 };

/* `flags` of a registration: NCCL_NET_MR_FLAG_*.  Strongly ordered: signals live there. */
enum { NCCL_REGION_ORDERED = 1 << 0, NCCL_REGION_NEVER_RESET = 1 << 1 };

/* `signal_op`: NCCL_NET_SIGNAL_OP_* */
enum { NCCL_SIGNAL_INC = 0x1, NCCL_SIGNAL_ADD = 0x2 };

/* ncclNetDeviceType: who runs the network's half of an operation */
typedef enum nccl_device_type { NCCL_DEVICE_HOST = 0, NCCL_DEVICE_GIN_PROXY = 2 } nccl_device_type;

/* ---- structures ------------------------------------------------------------------------ */

#define NCCL_DEVICES_V11 4 /* NCCL_NET_MAX_DEVS_PER_NIC, until 2.29 */
#define NCCL_DEVICES_V12 8

/* ncclNetVDeviceProps_v11_t */
struct nccl_virtual_device_v11 {
    int ndevs;
    int devs[NCCL_DEVICES_V11];
};

/* ncclNetVDeviceProps_v12_t */
struct nccl_virtual_device_v12 {
    int ndevs;
    int devs[NCCL_DEVICES_V12];
};

/* ncclNetProperties_v11_t */
struct nccl_properties_v11 {
    char *name;
    char *pciPath;  /* in /sys; NULL: of no PCI device */
    uint64_t guid;
    int ptrSupport; /* NCCL_MEMORY_* */
    int regIsGlobal;
    int forceFlush;
    int speed;      /* Mbit/s */
    int port;
    float latency;  /* us */
    int maxComms;
    int maxRecvs;   /* times NCCL_MAX_REQUESTS: puts that may be under way to one peer in one context */
    nccl_device_type netDeviceType;
    int netDeviceVersion;
    struct nccl_virtual_device_v11 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
};

/* ncclNetProperties_v12_t */
struct nccl_properties_v12 {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed;
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    nccl_device_type netDeviceType;
    int netDeviceVersion;
    struct nccl_virtual_device_v12 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId;  /* -1: none */
    int16_t planeId; /* -1: none */
};

/* ncclNetCommConfig_v11_t */
struct nccl_net_config_v11 {
    int trafficClass; /* -1: as the plugin likes */
};

/* ncclNetDeviceHandle_v11_t */
struct nccl_device_handle {
    nccl_device_type netDeviceType;
    int netDeviceVersion;
    void *handle;
    size_t size;
    int needsProxyProgress;
};

/* ncclNetCommAttr_v11_t, ncclNetAttr_v11_t: hints */
struct nccl_comm_attributes_v11 {
    int32_t maxConcurrentPeers, minConcurrentPeers, maxFlowsPerPeer, minFlowsPerPeer;
};

struct nccl_attributes_v11 {
    struct nccl_comm_attributes_v11 sendCommAttr, recvCommAttr;
    uint32_t op, algo, proto;
};

/* ncclGinConfig_v13_t */
struct nccl_gin_config_v13 {
    int nSignals;
    int nCounters;
    int nContexts;
    int queueDepth;
    int trafficClass;
};

/* ncclRmaConfig_v14_t */
struct nccl_rma_config_v14 {
    int nContexts;
    int trafficClass;
    int rankStride;
};

/* ---- tables ---------------------------------------------------------------------------- */

/* ncclNet_v11_t: two-sided transfers for NCCL's host collectives. */
struct nccl_net_v11 {
    const char *name;
    nccl_result (*init)(void **context, uint64_t comm_id, struct nccl_net_config_v11 *config, nccl_logger log,
                        nccl_profiler profiler);
    nccl_result (*devices)(int *count);
    nccl_result (*getProperties)(int device, struct nccl_properties_v11 *properties);
    nccl_result (*listen)(void *context, int device, void *handle, void **listener);
    nccl_result (*connect)(void *context, int device, void *handle, void **send,
                           struct nccl_device_handle **send_device);
    nccl_result (*accept)(void *listener, void **receive, struct nccl_device_handle **receive_device);
    nccl_result (*regMr)(void *comm, void *data, size_t bytes, int type, void **region);
    nccl_result (*regMrDmaBuf)(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                               void **region);
    nccl_result (*deregMr)(void *comm, void *region);
    nccl_result (*isend)(void *send, void *data, size_t bytes, int tag, void *region, void *profile,
                         void **request);
    nccl_result (*irecv)(void *receive, int n, void **data, size_t *bytes, int *tags, void **regions,
                         void **profiles, void **request);
    nccl_result (*iflush)(void *receive, int n, void **data, int *bytes, void **regions, void **request);
    nccl_result (*test)(void *request, int *done, int *bytes);
    nccl_result (*closeSend)(void *send);
    nccl_result (*closeRecv)(void *receive);
    nccl_result (*closeListen)(void *listener);
    nccl_result (*getDeviceMr)(void *comm, void *region, void **device_region);
    nccl_result (*irecvConsumed)(void *receive, int n, void *request);
    nccl_result (*makeVDevice)(int *device, struct nccl_virtual_device_v11 *properties);
    nccl_result (*finalize)(void *context);
    nccl_result (*setNetAttr)(void *context, struct nccl_attributes_v11 *attributes);
};

/* ncclGin_v11_t: one-sided puts with signals.  One context per communicator. */
struct nccl_gin_v11 {
    const char *name;
    nccl_result (*init)(void **context, uint64_t comm_id, nccl_logger log);
    nccl_result (*devices)(int *count);
    nccl_result (*getProperties)(int device, struct nccl_properties_v11 *properties);
    nccl_result (*listen)(void *context, int device, void *handle, void **listener);
    /* Collective: returns when all ranks are connected.  `context` is NULL for all but a process's first. */
    nccl_result (*connect)(void *context, void *handles[], int ranks, int rank, void *listener, void **comm);
    nccl_result (*createContext)(void *comm, int signals, int counters, void **gin,
                                 struct nccl_device_handle **device);
    /* Collective, in the same order on all ranks.  gin_region goes to device code and comes back in iput. */
    nccl_result (*regMrSym)(void *comm, void *data, size_t bytes, int type, uint64_t flags, void **region,
                            void **gin_region);
    nccl_result (*regMrSymDmaBuf)(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **region, void **gin_region);
    nccl_result (*deregMrSym)(void *comm, void *region);
    nccl_result (*destroyContext)(void *gin);
    nccl_result (*closeColl)(void *comm);
    nccl_result (*closeListen)(void *listener);
    /* NCCL's progress thread.  An error ends GIN for good, and there is no "try again": always a request. */
    nccl_result (*iput)(void *comm, uint64_t source_offset, void *source, size_t bytes,
                        uint64_t target_offset, void *target, uint32_t rank, void **request);
    nccl_result (*iputSignal)(void *comm, uint64_t source_offset, void *source, size_t bytes,
                              uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                              void *signal, uint64_t signal_value, uint32_t signal_op, void **request);
    nccl_result (*test)(void *comm, void *request, int *done);
    nccl_result (*ginProgress)(void *comm);
    nccl_result (*queryLastError)(void *gin, bool *failed);
    nccl_result (*finalize)(void *context);
};

/* ncclGin_v13_t, which is ncclRma_v13_t: `gin` is what createContext gave, with nContexts contexts. */
struct nccl_rma_v13 {
    const char *name;
    nccl_result (*init)(void **context, uint64_t comm_id, nccl_logger log);
    nccl_result (*devices)(int *count);
    nccl_result (*getProperties)(int device, struct nccl_properties_v12 *properties);
    nccl_result (*listen)(void *context, int device, void *handle, void **listener);
    nccl_result (*connect)(void *context, void *handles[], int ranks, int rank, void *listener, void **comm);
    nccl_result (*createContext)(void *comm, struct nccl_gin_config_v13 *config, void **gin,
                                 struct nccl_device_handle **device);
    nccl_result (*regMrSym)(void *comm, void *data, size_t bytes, int type, uint64_t flags, void **region,
                            void **gin_region);
    nccl_result (*regMrSymDmaBuf)(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **region, void **gin_region);
    nccl_result (*deregMrSym)(void *comm, void *region);
    nccl_result (*destroyContext)(void *gin);
    nccl_result (*closeColl)(void *comm);
    nccl_result (*closeListen)(void *listener);
    nccl_result (*iput)(void *gin, int context, uint64_t source_offset, void *source, size_t bytes,
                        uint64_t target_offset, void *target, uint32_t rank, void **request);
    nccl_result (*iputSignal)(void *gin, int context, uint64_t source_offset, void *source, size_t bytes,
                              uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                              void *signal, uint64_t signal_value, uint32_t signal_op, void **request);
    /* NULL: there is none, NCCL says so to who asks for one. */
    nccl_result (*iget)(void *gin, int context, uint64_t remote_offset, void *remote, size_t bytes,
                        uint64_t local_offset, void *local, uint32_t rank, void **request);
    nccl_result (*iflush)(void *gin, int context, void *region, uint32_t rank, void **request);
    nccl_result (*test)(void *comm, void *request, int *done);
    nccl_result (*ginProgress)(void *gin);
    nccl_result (*queryLastError)(void *gin, bool *failed);
    nccl_result (*finalize)(void *context);
};

/* ncclRma_v14_t */
struct nccl_rma_v14 {
    const char *name;
    nccl_result (*init)(void **context, uint64_t comm_id, nccl_logger log);
    nccl_result (*devices)(int *count);
    nccl_result (*getProperties)(int device, struct nccl_properties_v12 *properties);
    nccl_result (*listen)(void *context, int device, void *handle, void **listener);
    nccl_result (*connect)(void *context, void *handles[], int ranks, int rank, void *listener, void **comm);
    nccl_result (*createContext)(void *comm, struct nccl_rma_config_v14 *config, void **rma);
    nccl_result (*regMrSym)(void *comm, void *data, size_t bytes, int type, uint64_t flags, void **region);
    nccl_result (*regMrSymDmaBuf)(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd,
                                  uint64_t flags, void **region);
    nccl_result (*deregMrSym)(void *comm, void *region);
    nccl_result (*destroyContext)(void *rma);
    nccl_result (*closeColl)(void *comm);
    nccl_result (*closeListen)(void *listener);
    nccl_result (*iput)(void *rma, int context, uint64_t source_offset, void *source, size_t bytes,
                        uint64_t target_offset, void *target, uint32_t rank, void **request);
    /* source and target are NULL for a signal alone, which may be anywhere in any region. */
    nccl_result (*iputSignal)(void *rma, int context, uint64_t source_offset, void *source, size_t bytes,
                              uint64_t target_offset, void *target, uint32_t rank, uint64_t signal_offset,
                              void *signal, uint64_t signal_value, uint32_t signal_op, bool strong,
                              void **request);
    nccl_result (*iget)(void *rma, int context, uint64_t remote_offset, void *remote, size_t bytes,
                        uint64_t local_offset, void *local, uint32_t rank, void **request);
    nccl_result (*iflush)(void *rma, int context, void *region, uint32_t rank, void **request);
    /* NCCL spins on it without asking for progress in between. */
    nccl_result (*test)(void *comm, void *request, int *done);
    nccl_result (*rmaProgress)(void *rma);
    nccl_result (*queryLastError)(void *rma, bool *failed);
    nccl_result (*finalize)(void *context);
};

/* ---- layout, as NCCL's compiler sees it on a 64-bit machine ------------------------------ */

_Static_assert(sizeof(nccl_result) == 4 && sizeof(nccl_device_type) == 4 && sizeof(nccl_log_level) == 4,
               "enumerations travel as int");
_Static_assert(offsetof(struct nccl_properties_v11, ptrSupport) == 24, "nccl_properties_v11.ptrSupport");
_Static_assert(offsetof(struct nccl_properties_v11, latency) == 44, "nccl_properties_v11.latency");
_Static_assert(offsetof(struct nccl_properties_v11, netDeviceType) == 56, "nccl_properties_v11.netDeviceType");
_Static_assert(offsetof(struct nccl_properties_v11, maxP2pBytes) == 88, "nccl_properties_v11.maxP2pBytes");
_Static_assert(sizeof(struct nccl_properties_v11) == 112, "nccl_properties_v11");
_Static_assert(offsetof(struct nccl_properties_v12, maxP2pBytes) == 104, "nccl_properties_v12.maxP2pBytes");
_Static_assert(offsetof(struct nccl_properties_v12, railId) == 124, "nccl_properties_v12.railId");
_Static_assert(sizeof(struct nccl_properties_v12) == 128, "nccl_properties_v12");
_Static_assert(sizeof(struct nccl_device_handle) == 32, "nccl_device_handle");
_Static_assert(sizeof(struct nccl_attributes_v11) == 44, "nccl_attributes_v11");
_Static_assert(sizeof(struct nccl_gin_config_v13) == 20, "nccl_gin_config_v13");
_Static_assert(sizeof(struct nccl_rma_config_v14) == 12, "nccl_rma_config_v14");
_Static_assert(sizeof(struct nccl_net_v11) == 22 * sizeof(void *), "nccl_net_v11");
_Static_assert(offsetof(struct nccl_gin_v11, iput) == 13 * sizeof(void *), "nccl_gin_v11.iput");
_Static_assert(sizeof(struct nccl_gin_v11) == 19 * sizeof(void *), "nccl_gin_v11");
_Static_assert(offsetof(struct nccl_rma_v13, iput) == 13 * sizeof(void *), "nccl_rma_v13.iput");
_Static_assert(sizeof(struct nccl_rma_v13) == 21 * sizeof(void *), "nccl_rma_v13");
_Static_assert(offsetof(struct nccl_rma_v14, iput) == 13 * sizeof(void *), "nccl_rma_v14.iput");
_Static_assert(sizeof(struct nccl_rma_v14) == 21 * sizeof(void *), "nccl_rma_v14");

#endif
