/* cuda.h: CUDA's driver, as far as host code of kernels/cuda uses it that runs on CPUs too: streams.c. */
#ifndef CUDA_H
#define CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_NOT_READY = 600 } CUresult;

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraph_st *CUgraphExec;

/* ---- contexts: there is one ---- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuCtxPushCurrent(CUcontext context);
CUresult cuCtxPopCurrent(CUcontext *context);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuGetErrorName(CUresult result, const char **name);
CUresult cuGetErrorString(CUresult result, const char **text);

/* ---- streams and events ---- */

enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DEFAULT = 0, CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_WAIT_DEFAULT = 0 };

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority);
CUresult cuStreamDestroy(CUstream stream);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned int flags);
CUresult cuEventDestroy(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);

/* ---- words, which streams write and wait for ---- */

typedef enum {
    CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
    CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
    CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
    CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5
} CUstreamBatchMemOpType;
enum { CU_STREAM_WAIT_VALUE_AND = 2, CU_STREAM_WRITE_VALUE_DEFAULT = 0 };

struct cuda_mem_op {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    union {
        uint32_t value;
        uint64_t value64;
    };
    unsigned int flags;
};
typedef union {
    CUstreamBatchMemOpType operation;
    struct cuda_mem_op waitValue, writeValue;
} CUstreamBatchMemOpParams;

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags);
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags);
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags);
CUresult cuStreamBatchMemOp(CUstream stream, unsigned int n, CUstreamBatchMemOpParams *ops, unsigned int flags);

/* ---- copies ---- */

enum { CU_MEMHOSTREGISTER_PORTABLE = 1, CU_MEMHOSTREGISTER_DEVICEMAP = 2 };

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);
CUresult cuMemHostRegister(void *at, size_t bytes, unsigned int flags);
CUresult cuMemHostUnregister(void *at);
CUresult cuMemHostGetDevicePointer(CUdeviceptr *seen, void *at, unsigned int flags);

/* ---- graphs: of one stream ---- */

typedef enum { CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED } CUstreamCaptureMode;
typedef enum { CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_ACTIVE } CUstreamCaptureStatus;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode);
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode);
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuGraphExecDestroy(CUgraphExec exec);

#ifdef __cplusplus
}
#endif
#endif
