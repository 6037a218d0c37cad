#include "streams.h"

#include <pthread.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"

enum {
    NAP_US = 20,        /* of a stream that waits for a word: the processor is others' meanwhile */
    LATE_US = 200,      /* that a kernel which may come early comes late, at most */
};

/* Bytes, or of a value when `from` is NULL. */
struct move {
    void *to;
    const void *from;
    size_t bytes;
    uint8_t value;
};

/* As it was when it was asked for. */
struct mark {
    CUevent event;
    uint64_t record;
};

struct step {
    struct step *next;
    void (*perform)(const struct step *step); /* NULL: a kernel */
    size_t bytes;                             /* of all of it */
    union {
        unsigned int words; /* in `more` */
        struct move move;
        struct mark mark;
        struct {
            struct fibers_grid grid;
            bool early;
            pthread_t thread;
        } kernel;
    };
    alignas(16) uint8_t more[]; /* words, or a kernel's arguments */
};

struct steps {
    struct step *first, *last;
};

/* All but `chance` under the lock. */
struct CUstream_st {
    struct steps waiting, running; /* running: kernels, in their order, some of which may be over */
    pthread_t thread;
    bool has_thread, busy, destroyed;
    struct CUgraph_st *capture;
    uint32_t chance; /* its thread's */
};

/* Under the lock. */
struct CUevent_st {
    uint64_t records, reached; /* times */
    uint64_t ns;
    uint32_t users;            /* marks that are to come, and who has made it */
};

struct CUgraph_st {
    struct steps steps;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* ---- steps ------------------------------------------------------------------------------------------ */

static void *allocated(void *memory)
{
    if (!memory)
        abort(); /* a test's machine that has no memory for a step runs no test */
    return memory;
}

static struct step *new_step(void (*perform)(const struct step *), size_t more)
{
    struct step *step = allocated(aligned_alloc(16, (sizeof *step + more + 15) / 16 * 16));

    memset(step, 0, sizeof *step);
    step->perform = perform;
    step->bytes = sizeof *step + more;
    return step;
}

static struct step *copy_of(const struct step *step)
{
    struct step *copy = memcpy(new_step(step->perform, step->bytes - sizeof *step), step, step->bytes);

    copy->next = NULL;
    return copy;
}

static void append(struct steps *steps, struct step *step)
{
    if (steps->last)
        steps->last->next = step;
    else
        steps->first = step;
    steps->last = step;
}

static struct step *take(struct steps *steps)
{
    struct step *step = steps->first;

    steps->first = step->next;
    if (!steps->first)
        steps->last = NULL;
    step->next = NULL;
    return step;
}

static bool is_over(const struct step *kernel)
{
    return __atomic_load_n(&kernel->kernel.grid.over, __ATOMIC_SEQ_CST);
}

/* Under the lock. */
static bool all_over(CUstream s)
{
    for (const struct step *step = s->running.first; step; step = step->next)
        if (!is_over(step))
            return false;
    return true;
}

/* ---- a stream's thread -------------------------------------------------------------------------------- */

static uint32_t by_chance(CUstream s)
{
    s->chance = s->chance * 1664525u + 1013904223u;
    return s->chance >> 8;
}

static void nap(void)
{
    usleep(NAP_US);
}

static void *run_kernel(void *arg)
{
    struct step *step = arg;

    fibers_run(&step->kernel.grid);
    (void)pthread_mutex_lock(&lock);
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
    return NULL;
}

/* Nobody looks at the first one any more: the one behind it is over too, or there is none. */
static void end_first(CUstream s)
{
    struct step *step;

    (void)pthread_mutex_lock(&lock);
    step = take(&s->running);
    (void)pthread_mutex_unlock(&lock);
    (void)pthread_join(step->kernel.thread, NULL);
    free(step);
}

static void end_all(CUstream s)
{
    (void)pthread_mutex_lock(&lock);
    while (!all_over(s))
        (void)pthread_cond_wait(&changed, &lock);
    (void)pthread_mutex_unlock(&lock);
    while (s->running.first)
        end_first(s);
}

static void end_some(CUstream s)
{
    while (s->running.first && s->running.first->next && is_over(s->running.first) && is_over(s->running.first->next))
        end_first(s);
}

/* Until the kernel may come; or all are over, which is as well. */
static void let_come(CUstream s)
{
    const struct fibers_grid *ahead = &s->running.last->kernel.grid;
    const uint32_t choice = by_chance(s);

    if (choice % 4 == 0) {
        end_all(s);
        return;
    }
    while (__atomic_load_n(&ahead->letting, __ATOMIC_SEQ_CST) < ahead->blocks)
        nap();
    if (choice % 4 == 1)
        usleep(by_chance(s) % LATE_US);
}

static void start(CUstream s, struct step *step)
{
    if (!step->kernel.early)
        end_all(s);
    else if (s->running.last)
        let_come(s);
    end_some(s);
    step->kernel.grid.args = step->more;
    step->kernel.grid.ahead = s->running.last ? &s->running.last->kernel.grid : NULL;
    if (pthread_create(&step->kernel.thread, NULL, run_kernel, step))
        abort();
    (void)pthread_mutex_lock(&lock);
    append(&s->running, step);
    (void)pthread_mutex_unlock(&lock);
}

static void do_step(CUstream s, struct step *step)
{
    if (!step->perform) {
        start(s, step);
        return;
    }
    end_all(s);
    step->perform(step);
    free(step);
}

static void *run_stream(void *arg)
{
    CUstream s = arg;

    (void)pthread_mutex_lock(&lock);
    while (s->waiting.first || !s->destroyed) {
        if (!s->waiting.first) {
            (void)pthread_cond_wait(&changed, &lock);
            continue;
        }

        struct step *step = take(&s->waiting);

        s->busy = true;
        (void)pthread_mutex_unlock(&lock);
        do_step(s, step);
        (void)pthread_mutex_lock(&lock);
        s->busy = false;
        (void)pthread_cond_broadcast(&changed);
    }
    (void)pthread_mutex_unlock(&lock);
    end_all(s);
    free(s);
    return NULL;
}

/* Under the lock. */
static bool is_idle(CUstream s)
{
    return !s->waiting.first && !s->busy && all_over(s);
}

/* Under the lock. */
static void start_thread(CUstream s)
{
    static uint32_t streams;

    s->chance = ++streams * 0x9e3779b9u;
    s->has_thread = true;
    if (pthread_create(&s->thread, NULL, run_stream, s) || pthread_detach(s->thread))
        abort();
}

/* Under the lock. */
static void enqueue(CUstream s, struct step *step)
{
    if (!s->has_thread)
        start_thread(s);
    append(&s->waiting, step);
    (void)pthread_cond_broadcast(&changed);
}

static void put(CUstream s, struct step *step)
{
    (void)pthread_mutex_lock(&lock);
    if (s->capture)
        append(&s->capture->steps, step);
    else
        enqueue(s, step);
    (void)pthread_mutex_unlock(&lock);
}

void stream_launch(CUstream s, const struct fibers_grid *grid, size_t args_bytes, bool early)
{
    struct step *step = new_step(NULL, args_bytes);

    step->kernel.grid = *grid;
    step->kernel.early = early;
    memcpy(step->more, grid->args, args_bytes);
    put(s, step);
}

/* ---- streams ------------------------------------------------------------------------------------------- */

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    (void)flags, (void)priority;
    *stream = allocated(calloc(1, sizeof **stream));
    return CUDA_SUCCESS;
}

/* What it holds is done first, by its thread. */
CUresult cuStreamDestroy(CUstream s)
{
    (void)pthread_mutex_lock(&lock);
    s->destroyed = true;
    (void)pthread_cond_broadcast(&changed);
    if (!s->has_thread)
        free(s);
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream s)
{
    bool idle;

    (void)pthread_mutex_lock(&lock);
    idle = is_idle(s);
    (void)pthread_mutex_unlock(&lock);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream s)
{
    (void)pthread_mutex_lock(&lock);
    while (!is_idle(s))
        (void)pthread_cond_wait(&changed, &lock);
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* ---- events ---------------------------------------------------------------------------------------------- */

/* Under the lock. */
static void forget(CUevent event)
{
    if (--event->users == 0)
        free(event);
}

static void reach(const struct step *step)
{
    CUevent event = step->mark.event;

    (void)pthread_mutex_lock(&lock);
    event->reached = step->mark.record;
    event->ns = ep_clock_ns();
    forget(event);
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
}

/* Under the lock. */
static void await_mark(const struct mark *mark)
{
    while (mark->event->reached < mark->record)
        (void)pthread_cond_wait(&changed, &lock);
}

static void await_event(const struct step *step)
{
    (void)pthread_mutex_lock(&lock);
    await_mark(&step->mark);
    forget(step->mark.event);
    (void)pthread_mutex_unlock(&lock);
}

/* A step for the event as it is from here on.  Not captured. */
static CUresult put_mark(CUstream s, CUevent event, uint32_t records, void (*perform)(const struct step *))
{
    struct step *step = new_step(perform, 0);

    (void)pthread_mutex_lock(&lock);
    event->users++;
    event->records += records;
    step->mark = (struct mark){ event, event->records };
    enqueue(s, step);
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = allocated(calloc(1, sizeof **event));
    (*event)->users = 1;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
    (void)pthread_mutex_lock(&lock);
    forget(event);
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream s)
{
    return put_mark(s, event, 1, reach);
}

CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned int flags)
{
    (void)flags;
    return put_mark(s, event, 0, await_event);
}

CUresult cuEventSynchronize(CUevent event)
{
    (void)pthread_mutex_lock(&lock);
    await_mark(&(struct mark){ event, event->records });
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
    (void)pthread_mutex_lock(&lock);
    *ms = (float)(to->ns - from->ns) / 1e6f;
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* ---- words --------------------------------------------------------------------------------------------------- */

static void *at(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

static bool has_come(const struct cuda_mem_op *op)
{
    if (op->flags != CU_STREAM_WAIT_VALUE_AND)
        abort(); /* nobody asks for it */
    return op->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32
               ? __atomic_load_n((const uint32_t *)at(op->address), __ATOMIC_SEQ_CST) & op->value
               : __atomic_load_n((const uint64_t *)at(op->address), __ATOMIC_SEQ_CST) & op->value64;
}

static void perform_word(const struct cuda_mem_op *op)
{
    switch (op->operation) {
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        __atomic_store_n((uint32_t *)at(op->address), op->value, __ATOMIC_SEQ_CST);
        break;
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        __atomic_store_n((uint64_t *)at(op->address), op->value64, __ATOMIC_SEQ_CST);
        break;
    default:
        while (!has_come(op))
            nap();
    }
}

static void perform_words(const struct step *step)
{
    const CUstreamBatchMemOpParams *op = (const void *)step->more;

    for (unsigned int i = 0; i < step->words; i++)
        perform_word(&op[i].writeValue);
}

CUresult cuStreamBatchMemOp(CUstream s, unsigned int n, CUstreamBatchMemOpParams *ops, unsigned int flags)
{
    struct step *step = new_step(perform_words, n * sizeof *ops);

    (void)flags;
    step->words = n;
    memcpy(step->more, ops, n * sizeof *ops);
    put(s, step);
    return CUDA_SUCCESS;
}

static CUresult put_word(CUstream s, struct cuda_mem_op op)
{
    return cuStreamBatchMemOp(s, 1, &(CUstreamBatchMemOpParams){ .writeValue = op }, 0);
}

CUresult cuStreamWaitValue32(CUstream s, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    return put_word(s, (struct cuda_mem_op){ CU_STREAM_MEM_OP_WAIT_VALUE_32, address, { .value = value }, flags });
}

CUresult cuStreamWriteValue32(CUstream s, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    return put_word(s, (struct cuda_mem_op){ CU_STREAM_MEM_OP_WRITE_VALUE_32, address, { .value = value }, flags });
}

CUresult cuStreamWriteValue64(CUstream s, CUdeviceptr address, uint64_t value, unsigned int flags)
{
    return put_word(s, (struct cuda_mem_op){ CU_STREAM_MEM_OP_WRITE_VALUE_64, address, { .value64 = value }, flags });
}

/* ---- copies ------------------------------------------------------------------------------------------------- */

/* Words at once, as far as both ends have them: who looks meanwhile sees old ones or new ones. */
static void copy_words(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t done = 0;

    if (((uintptr_t)to | (uintptr_t)from) % sizeof(uint64_t) == 0)
        for (; done + sizeof(uint64_t) <= bytes; done += sizeof(uint64_t))
            __atomic_store_n((uint64_t *)(void *)(to + done),
                             __atomic_load_n((const uint64_t *)(const void *)(from + done), __ATOMIC_ACQUIRE),
                             __ATOMIC_RELEASE);
    if (((uintptr_t)to | (uintptr_t)from) % sizeof(uint32_t) == 0)
        for (; done + sizeof(uint32_t) <= bytes; done += sizeof(uint32_t))
            __atomic_store_n((uint32_t *)(void *)(to + done),
                             __atomic_load_n((const uint32_t *)(const void *)(from + done), __ATOMIC_ACQUIRE),
                             __ATOMIC_RELEASE);
    memmove(to + done, from + done, bytes - done);
}

static void perform_move(const struct step *step)
{
    const struct move *m = &step->move;

    if (m->from)
        copy_words(m->to, m->from, m->bytes);
    else
        memset(m->to, m->value, m->bytes);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static CUresult put_move(CUstream s, struct move move)
{
    struct step *step = new_step(perform_move, 0);

    step->move = move;
    put(s, step);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream s)
{
    return put_move(s, (struct move){ .to = at(to), .from = from, .bytes = bytes });
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream s)
{
    return put_move(s, (struct move){ .to = to, .from = at(from), .bytes = bytes });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)
{
    return put_move(s, (struct move){ .to = at(to), .from = at(from), .bytes = bytes });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s)
{
    return put_move(s, (struct move){ .to = at(to), .bytes = bytes, .value = value });
}

CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned int flags)
{
    (void)memory, (void)bytes, (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *memory)
{
    (void)memory;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *seen, void *memory, unsigned int flags)
{
    (void)flags;
    *seen = (CUdeviceptr)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

/* ---- graphs -------------------------------------------------------------------------------------------------- */

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream s, CUstreamCaptureMode mode)
{
    (void)mode;
    (void)pthread_mutex_lock(&lock);
    s->capture = allocated(calloc(1, sizeof *s->capture));
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status)
{
    (void)pthread_mutex_lock(&lock);
    *status = s->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream s, CUgraph *graph)
{
    (void)pthread_mutex_lock(&lock);
    *graph = s->capture;
    s->capture = NULL;
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* The graph is what is launched; it is destroyed at once, and what it was made into later. */
CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    *exec = allocated(calloc(1, sizeof **exec));
    (*exec)->steps = graph->steps;
    graph->steps = (struct steps){ NULL, NULL };
    return CUDA_SUCCESS;
}

/* Its first step begins when all before it is over. */
CUresult cuGraphLaunch(CUgraphExec exec, CUstream s)
{
    (void)pthread_mutex_lock(&lock);
    for (const struct step *step = exec->steps.first; step; step = step->next) {
        struct step *copy = copy_of(step);

        if (!copy->perform && step == exec->steps.first)
            copy->kernel.early = false;
        enqueue(s, copy);
    }
    (void)pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
    while (graph->steps.first)
        free(take(&graph->steps));
    free(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    return cuGraphDestroy(exec);
}

/* ---- contexts ----------------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    (void)device;
    *context = NULL;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    (void)device;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    (void)context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    *context = NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}
