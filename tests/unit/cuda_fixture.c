#include "cuda_fixture.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ep_clock.h"

enum { MEMORIES = 256, PAGE = 4096, GRAPH_OPS = 256, WAITERS = 64 };

struct ep_cuda_memory {
    int fd;
    uint32_t device;
    uint64_t bytes;
    uint8_t *gpu;  /* reserved, not accessible unless addresses are to be followed */
    uint8_t *host; /* the same bytes */
};

struct ep_cuda_rank {
    uint32_t rank;
    struct ep_layout_map map;
    struct ep_device_state *state;   /* host's view, as is: */
    struct ep_device_report *report; /* of its window */
    uint64_t sequence;
    uint32_t half[EP_MAX_HANDLES]; /* kind of the send-only op that a complete finishes */
};

struct ep_cuda_serve {
    uint32_t posted, before; /* ops; those posted before the last post */
    bool ended;
};

struct ep_cuda_ringer {
    uint32_t device;
    void *window;
};

/* A stream with an op that waits for the test. */
struct waiter {
    void *stream;
    struct ep_mailbox *mailbox; /* NULL: none */
};

struct graph_op {
    struct ep_cuda_rank *rank; /* NULL: rung for, in this window */
    void *window;
    struct ep_op op;
};

struct ep_cuda_graph {
    uint32_t n;
    struct graph_op op[GRAPH_OPS];
};

struct cuda_fixture cuda_fixture;

/* Several threads use it, as they do the real one. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ep_cuda_memory *memories[MEMORIES];
static const uint8_t uuids[CUDA_FIXTURE_DEVICES][EP_CUDA_UUID_BYTES] = { "device of tests", "another device." };
static struct waiter waiters[WAITERS];
static void *capturing; /* the stream */
static struct ep_cuda_graph *captured;

static const char *failing; /* as cuda_fixture_fail() says, under the lock */
static uint32_t works;      /* calls of it that still do */

static void (*lost_fn)(const struct ep_error *why, void *user); /* under the lock */
static void *lost_user;

/* ---- failing ----------------------------------------------------------------------------------- */

static void on_lost(void (*fn)(const struct ep_error *why, void *user), void *user)
{
    pthread_mutex_lock(&lock);
    lost_fn = fn;
    lost_user = user;
    pthread_mutex_unlock(&lock);
}

static ep_status lose(uint32_t device, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;
    void (*const fn)(const struct ep_error *, void *) = lost_fn;
    void *const user = lost_user;

    ep_error_set(&why, EP_DEVICE_LOST, "device %u has fallen off the bus", device);
    lost_fn = NULL;
    pthread_mutex_unlock(&lock);
    if (fn)
        fn(&why, user);
    pthread_mutex_lock(&lock);
    if (error)
        *error = why;
    return EP_DEVICE_LOST;
}

static ep_status enter(const char *name, uint32_t device, struct ep_error *error)
{
    ep_status status = EP_OK;

    pthread_mutex_lock(&lock);
    if (device >= CUDA_FIXTURE_DEVICES)
        status = ep_error_set(error, EP_NOT_FOUND, "device %u: there are %d", device, CUDA_FIXTURE_DEVICES);
    else if (failing && strcmp(failing, name) == 0 && works-- == 0)
        status = ep_error_set(error, EP_INTERNAL, "%s failed because the test says so", name);
    else if (__atomic_load_n(&cuda_fixture.lost, __ATOMIC_RELAXED) >> device & 1)
        status = lose(device, error);
    if (status != EP_OK)
        pthread_mutex_unlock(&lock);
    return status;
}

static ep_status leave(void)
{
    pthread_mutex_unlock(&lock);
    return EP_OK;
}

void cuda_fixture_fail(const char *name, uint32_t after)
{
    pthread_mutex_lock(&lock);
    failing = name;
    works = after;
    pthread_mutex_unlock(&lock);
}

uint32_t cuda_fixture_serves(void)
{
    uint32_t n;

    pthread_mutex_lock(&lock);
    n = cuda_fixture.serves;
    pthread_mutex_unlock(&lock);
    return n;
}

/* ---- devices ----------------------------------------------------------------------------------- */

const uint8_t *cuda_fixture_uuid(uint32_t device)
{
    return uuids[device];
}

static ep_status device_count(uint32_t *count, struct ep_error *error)
{
    if (enter("device_count", 0, error) != EP_OK)
        return EP_INTERNAL;
    *count = CUDA_FIXTURE_DEVICES;
    return leave();
}

static ep_status device_info(uint32_t device, struct ep_cuda_device *info, struct ep_error *error)
{
    ep_status status = enter("device_info", device, error);

    if (status != EP_OK)
        return status;
    *info = (struct ep_cuda_device){ .name = "Fixture", .memory_bytes = 1ull << 34, .memory_free = 1ull << 34,
                                     .sms = 8, .major = 9, .peers = (1u << CUDA_FIXTURE_DEVICES) - 1,
                                     .linked = 1u << device, /* a line that CPUs store does not come as a whole */
                                     .shareable = true, .driver = 13000 };
    memcpy(info->uuid, uuids[device], EP_CUDA_UUID_BYTES);
    snprintf(info->uuid_text, sizeof info->uuid_text, "GPU-fixture-%u", device);
    snprintf(info->pci, sizeof info->pci, "0000:%02x:00.0", device);
    if (cuda_fixture.on_info)
        cuda_fixture.on_info(device, info);
    return leave();
}

static ep_status device_find(const uint8_t uuid[EP_CUDA_UUID_BYTES], uint32_t *device, struct ep_error *error)
{
    if (enter("device_find", 0, error) != EP_OK)
        return EP_INTERNAL;
    leave();
    for (uint32_t d = 0; d < CUDA_FIXTURE_DEVICES; d++)
        if (memcmp(uuid, uuids[d], EP_CUDA_UUID_BYTES) == 0) {
            *device = d;
            return EP_OK;
        }
    return ep_error_set(error, EP_NOT_FOUND, "this process sees no GPU of that UUID");
}

static ep_status device_current(uint32_t *device, struct ep_error *error)
{
    if (enter("device_current", 0, error) != EP_OK)
        return EP_INTERNAL;
    *device = 0;
    return leave();
}

/* ---- memory ------------------------------------------------------------------------------------ */

static void close_memory(struct ep_cuda_memory *m)
{
    if (m->host && m->host != MAP_FAILED && m->host != m->gpu)
        munmap(m->host, m->bytes);
    if (m->gpu && m->gpu != MAP_FAILED)
        munmap(m->gpu, m->bytes + PAGE);
    if (m->fd >= 0)
        close(m->fd);
    free(m);
}

static bool keep(struct ep_cuda_memory *m)
{
    for (uint32_t i = 0; i < MEMORIES; i++)
        if (!memories[i]) {
            memories[i] = m;
            __atomic_add_fetch(&cuda_fixture.memories, 1, __ATOMIC_RELAXED);
            return true;
        }
    return false;
}

/* Takes fd. */
static ep_status open_memory(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                             struct ep_error *error)
{
    struct ep_cuda_memory *m = calloc(1, sizeof *m);

    if (!m)
        abort();
    m->fd = fd;
    m->device = device;
    m->bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    /* No other one follows at once. */
    m->gpu = mmap(NULL, m->bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->gpu != MAP_FAILED)
        m->host = mmap(cuda_fixture.followed ? m->gpu : NULL, m->bytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | (cuda_fixture.followed ? MAP_FIXED : 0), fd, 0);
    if (fd < 0 || m->host == MAP_FAILED || m->gpu == MAP_FAILED || !keep(m)) {
        close_memory(m);
        return ep_error_set(error, EP_NO_MEMORY, "no memory of %llu bytes", (unsigned long long)bytes);
    }
    *out = m;
    return EP_OK;
}

/* Who waits for ever for a driver that the waiting itself keeps asleep finds that out. */
static void wait_awake(void)
{
    if (__atomic_load_n(&cuda_fixture.asleep, __ATOMIC_RELAXED))
        __atomic_add_fetch(&cuda_fixture.slept, 1, __ATOMIC_RELAXED);
    for (uint32_t ms = 0; __atomic_load_n(&cuda_fixture.asleep, __ATOMIC_RELAXED) && ms < CUDA_FIXTURE_ASLEEP_MS; ms++)
        usleep(1000);
}

static ep_status memory_create(uint32_t device, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error)
{
    ep_status status;
    int fd;

    wait_awake();
    status = enter("memory_create", device, error);
    if (status != EP_OK)
        return status;
    fd = memfd_create("cuda-fixture", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)((bytes + PAGE - 1) / PAGE * PAGE)) != 0) {
        close(fd);
        fd = -1;
    }
    status = open_memory(device, fd, bytes, out, error);
    leave();
    return status;
}

static ep_status memory_export(const struct ep_cuda_memory *memory, int *out, struct ep_error *error)
{
    int fd;

    if (enter("memory_export", memory->device, error) != EP_OK)
        return EP_INTERNAL;
    leave();
    fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return ep_error_errno(error, EP_RESOURCE_EXHAUSTED, "a descriptor of GPU memory");
    *out = fd;
    return EP_OK;
}

static ep_status take_memory(const char *name, uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                             struct ep_error *error)
{
    ep_status status = enter(name, device, error);
    struct stat stat;

    if (status != EP_OK)
        return status;
    if (fstat(fd, &stat) != 0 || (uint64_t)stat.st_size < bytes)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "descriptor %d is no GPU memory of %llu bytes", fd,
                              (unsigned long long)bytes);
    else
        status = open_memory(device, fcntl(fd, F_DUPFD_CLOEXEC, 0), bytes, out, error);
    leave();
    return status;
}

static ep_status memory_import(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                               struct ep_error *error)
{
    return take_memory("memory_import", device, fd, bytes, out, error);
}

static ep_status memory_adopt(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out,
                              struct ep_error *error)
{
    return take_memory("memory_adopt", device, fd, bytes, out, error);
}

static ep_status memory_share(struct ep_cuda_memory *memory, uint32_t device, struct ep_error *error)
{
    ep_status status = enter("memory_share", device, error);

    (void)memory;
    return status == EP_OK ? leave() : status;
}

static void memory_destroy(struct ep_cuda_memory *memory)
{
    if (!memory)
        return;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < MEMORIES; i++)
        if (memories[i] == memory)
            memories[i] = NULL;
    for (uint32_t i = 0; i < WAITERS; i++)
        if ((uint8_t *)waiters[i].mailbox >= memory->host
            && (uint8_t *)waiters[i].mailbox < memory->host + memory->bytes)
            waiters[i].mailbox = NULL;
    __atomic_sub_fetch(&cuda_fixture.memories, 1, __ATOMIC_RELAXED);
    close_memory(memory);
    pthread_mutex_unlock(&lock);
}

static void *memory_at(const struct ep_cuda_memory *memory)
{
    return memory->gpu;
}

/* Under the lock: [gpu, gpu + bytes) lies in one allocation. */
static void *translate(const void *gpu, uint64_t bytes)
{
    const uintptr_t at = (uintptr_t)gpu;

    for (uint32_t i = 0; i < MEMORIES; i++) {
        const struct ep_cuda_memory *m = memories[i];

        if (m && at >= (uintptr_t)m->gpu && at - (uintptr_t)m->gpu < m->bytes
            && bytes <= m->bytes - (at - (uintptr_t)m->gpu))
            return m->host + (at - (uintptr_t)m->gpu);
    }
    return NULL;
}

/* Under the lock. */
static const struct ep_cuda_memory *memory_of(const void *gpu)
{
    for (uint32_t i = 0; i < MEMORIES; i++)
        if (memories[i] && (uintptr_t)gpu - (uintptr_t)memories[i]->gpu < memories[i]->bytes)
            return memories[i];
    return NULL;
}

static ep_status memory_range(uint32_t device, const void *at, void **start, uint64_t *bytes, struct ep_error *error)
{
    ep_status status = enter("memory_range", device, error);
    const struct ep_cuda_memory *m;

    if (status != EP_OK)
        return status;
    m = memory_of(at);
    if (!m)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "%p is not GPU memory", at);
    else if (m->device != device)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "%p is memory of device %u: must be of device %u", at,
                              m->device, device);
    leave();
    if (status != EP_OK)
        return status;

    const uint64_t piece = cuda_fixture.piece ? cuda_fixture.piece : m->bytes;

    *start = m->gpu + (uint64_t)((const uint8_t *)at - m->gpu) / piece * piece;
    *bytes = piece;
    return EP_OK;
}

static ep_status memory_export_at(uint32_t device, const void *at, int *out, uint64_t *offset, uint64_t *bytes,
                                  struct ep_error *error)
{
    const struct ep_cuda_memory *m;
    uint64_t size;
    void *start;
    ep_status status = enter("memory_export_at", device, error);

    if (status != EP_OK)
        return status;
    m = memory_of(at);
    leave();
    status = memory_range(device, at, &start, &size, error);
    if (status != EP_OK)
        return status;
    if (cuda_fixture.legacy)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%p cannot be mapped by another process", at);
    *offset = (uint64_t)((const uint8_t *)at - m->gpu);
    *bytes = (uint64_t)((uint8_t *)start - m->gpu) + size;
    return memory_export(m, out, error);
}

void cuda_fixture_free(const void *gpu)
{
    struct ep_cuda_memory *found = NULL;

    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < MEMORIES; i++)
        if (memories[i] == memory_of(gpu))
            found = memories[i];
    pthread_mutex_unlock(&lock);
    memory_destroy(found);
}

void *cuda_fixture_host(const void *gpu)
{
    void *host;

    pthread_mutex_lock(&lock);
    host = translate(gpu, 1);
    pthread_mutex_unlock(&lock);
    return host;
}

/* The GPU's side of a copy, under the lock; a wrong address is an error of the code under test. */
static void *must_translate(const void *gpu, uint64_t bytes)
{
    void *host = translate(gpu, bytes);

    if (!host) {
        fprintf(stderr, "cuda_fixture: %p + %llu is no GPU memory\n", gpu, (unsigned long long)bytes);
        abort();
    }
    return host;
}

/* As enter(); counted. */
static ep_status enter_copy(const char *name, uint32_t device, struct ep_error *error)
{
    ep_status status = enter(name, device, error);

    if (status == EP_OK)
        cuda_fixture.copies++;
    return status;
}

static ep_status copy_in(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                         struct ep_error *error)
{
    ep_status status = enter_copy("write", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    memcpy(must_translate(to, bytes), from, bytes);
    return leave();
}

static ep_status copy_out(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                          struct ep_error *error)
{
    ep_status status;

    (void)stream;
    if (cuda_fixture.on_read)
        cuda_fixture.on_read(from, cuda_fixture.user);
    status = enter_copy("read", device, error);
    if (status != EP_OK)
        return status;
    memcpy(to, must_translate(from, bytes), bytes);
    return leave();
}

static ep_status fill(uint32_t device, void *to, uint8_t value, uint64_t bytes, void *stream,
                      struct ep_error *error)
{
    ep_status status = enter_copy("fill", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    memset(must_translate(to, bytes), value, bytes);
    return leave();
}

/* Under the lock: the bytes behind an address, whoever's it is. */
static void *anywhere(const void *at, uint64_t bytes)
{
    return memory_of(at) ? must_translate(at, bytes) : (void *)(uintptr_t)at;
}

static ep_status copy(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream, struct ep_error *error)
{
    ep_status status = enter_copy("copy", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    memmove(anywhere(to, bytes), anywhere(from, bytes), bytes);
    return leave();
}

static ep_status store(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error)
{
    ep_status status = enter_copy("store", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    /* Partner: whoever waits for the value. */
    __atomic_store_n((uint64_t *)anywhere(to, sizeof value), value, __ATOMIC_RELEASE);
    return leave();
}

struct ep_cuda_marker {
    uint32_t device;
};

static ep_status marker_open(uint32_t device, struct ep_cuda_marker **out, struct ep_error *error)
{
    ep_status status = enter("marker_open", device, error);

    if (status != EP_OK)
        return status;
    *out = malloc(sizeof **out);
    if (!*out)
        abort();
    (*out)->device = device;
    cuda_fixture.streams++;
    return leave();
}

static ep_status marker_store(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream,
                              struct ep_error *error)
{
    return store(marker->device, to, value, stream, error);
}

static void marker_close(struct ep_cuda_marker *marker)
{
    pthread_mutex_lock(&lock);
    cuda_fixture.streams -= marker != NULL;
    free(marker);
    pthread_mutex_unlock(&lock);
}

static ep_status host_pin(uint32_t device, void *at, uint64_t bytes, struct ep_error *error)
{
    ep_status status = enter("host_pin", device, error);

    (void)at, (void)bytes;
    if (status != EP_OK)
        return status;
    cuda_fixture.pinned++;
    return leave();
}

static void host_unpin(uint32_t device, void *at)
{
    (void)device;
    pthread_mutex_lock(&lock);
    cuda_fixture.pinned -= at != NULL;
    pthread_mutex_unlock(&lock);
}

/* ---- ops --------------------------------------------------------------------------------------- */

static uint64_t last_sequence(const struct ep_device_report *report)
{
    uint64_t last = 0;

    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++)
        for (uint32_t p = 0; p < EP_DEVICE_PARTS; p++)
            last = report->records[h][p].sequence > last ? report->records[h][p].sequence : last;
    return last;
}

static ep_status rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                           struct ep_error *error)
{
    ep_status status = enter("rank_open", options->device, error);
    struct ep_cuda_rank *rank;

    if (status != EP_OK)
        return status;
    rank = calloc(1, sizeof *rank);
    if (!rank)
        abort();
    for (uint32_t r = 0; r < options->map->limits.ranks; r++) {
        struct ep_control *control = must_translate(options->windows[r], options->map->total_bytes);

        if (r == options->rank)
            rank->report = &control->gpu.report;
    }
    rank->rank = options->rank;
    rank->map = *options->map;
    rank->state = must_translate(options->state, sizeof *rank->state);
    rank->sequence = last_sequence(rank->report);
    cuda_fixture.ranks++;
    cuda_fixture.max_ht_sms = options->max_ht_sms;
    *out = rank;
    return leave();
}

static void rank_close(struct ep_cuda_rank *rank)
{
    if (!rank)
        return;
    pthread_mutex_lock(&lock);
    cuda_fixture.ranks--;
    free(rank);
    pthread_mutex_unlock(&lock);
}

/* What the kernels leave behind. */
static void execute(struct ep_cuda_rank *rank, const struct ep_op *op)
{
    struct ep_device_state *state = rank->state;
    struct ep_device_handle *handle = &state->handles[op->handle];
    const uint32_t kind = op->kind == EP_OP_COMPLETE ? rank->half[op->handle] : op->kind;
    const uint32_t part = kind == EP_OP_DISPATCH ? EP_DEVICE_DISPATCH : EP_DEVICE_COMBINE;
    struct ep_device_record *record = &rank->report->records[op->handle][part];

    if (op->kind == EP_OP_DISPATCH)
        *handle = (struct ep_device_handle){ .number = ++state->number, .generation = op->generation,
                                             .tokens = op->tokens, .top_k = op->top_k, .layout = op->layout,
                                             .wire_dtype = op->wire_dtype, .routed = 1 };
    if (op->kind == EP_OP_COMBINE)
        handle->combined = handle->number;
    if (op->flags & EP_OP_SEND_ONLY)
        rank->half[op->handle] = op->kind;
    *record = cuda_fixture.outcome;
    record->generation = op->generation;
    record->number = handle->number;
    record->sequence = ++rank->sequence;
    record->layout = handle->layout;
    record->wire_dtype = handle->wire_dtype;
    record->timeout_ns = state->timeout_ns;
    if (!record->arrived[0])
        record->arrived[0] = (1ull << rank->map.limits.ranks) - 1;
    if (record->status != EP_OK && rank->report->failures++ == 0) {
        rank->report->failure = *record;
        rank->report->failure_op = part;
    }
    state->counters[part].count++;
}

/* Under the lock: the stream is one that is captured. */
static bool capture(const void *stream, const struct graph_op *op)
{
    if (!stream || stream != capturing)
        return false;
    if (captured->n == GRAPH_OPS)
        abort();
    captured->op[captured->n++] = *op;
    return true;
}

static void note(const struct ep_op *op, void *stream)
{
    if (cuda_fixture.ops < CUDA_FIXTURE_OPS) {
        cuda_fixture.op[cuda_fixture.ops] = *op;
        cuda_fixture.stream[cuda_fixture.ops] = stream;
    }
    cuda_fixture.ops++;
}

static ep_status rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream,
                          struct ep_error *error)
{
    ep_status status = enter("rank_run", 0, error);

    if (status != EP_OK)
        return status;
    if (capture(stream, &(struct graph_op){ .rank = rank, .op = *op }))
        return leave();
    note(op, stream);
    execute(rank, op);
    return leave();
}

/* ---- executor server ---------------------------------------------------------------------------- */

/* What the window tells of a rank that somebody else serves. */
static void answer(struct ep_control *control, const struct ep_op *op)
{
    struct ep_device_report *report = &control->gpu.report;
    struct ep_device_record *records = report->records[op->handle];
    const bool combined = records[EP_DEVICE_COMBINE].sequence > records[EP_DEVICE_DISPATCH].sequence;
    const uint32_t part = op->kind == EP_OP_COMBINE || (op->kind == EP_OP_COMPLETE && combined)
                              ? EP_DEVICE_COMBINE : EP_DEVICE_DISPATCH;
    const uint64_t dispatched = records[EP_DEVICE_DISPATCH].number, sequence = last_sequence(report) + 1;
    uint64_t number = 0;

    if (op->kind == EP_OP_RELEASE)
        return;
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++)
        number = report->records[h][EP_DEVICE_DISPATCH].number > number
                     ? report->records[h][EP_DEVICE_DISPATCH].number : number;
    records[part] = cuda_fixture.outcome;
    records[part].generation = op->generation;
    records[part].sequence = sequence;
    records[part].number = op->kind == EP_OP_DISPATCH ? number + 1 : dispatched;
    records[part].layout = op->layout;
    records[part].wire_dtype = op->wire_dtype;
    if (!records[part].arrived[0])
        records[part].arrived[0] = (1ull << control->head.limits.ranks) - 1;
    if (records[part].status != EP_OK && report->failures++ == 0) {
        report->failure = records[part];
        report->failure_op = part;
    }
}

/* Under the lock.  The words are used as real ones are: partner is the test. */
static void ring_bell(void *window, const struct ep_op *op, void *stream)
{
    struct ep_control *control = must_translate(window, sizeof *control);
    struct ep_mailbox *mailbox = &control->gpu.mailbox;
    uint32_t i = 0;

    mailbox->op[0] = *op;
    if (__atomic_load_n(&mailbox->closed, __ATOMIC_ACQUIRE))
        return;
    if (!__atomic_load_n(&cuda_fixture.unserved, __ATOMIC_RELAXED)) {
        answer(control, op);
        return;
    }
    while (i < WAITERS && waiters[i].mailbox)
        i++;
    if (i == WAITERS)
        abort();
    waiters[i] = (struct waiter){ stream, mailbox };
    __atomic_store_n(&mailbox->bell, ep_bell_of(0), __ATOMIC_RELEASE);
}

/* As a stream looks at it. */
static bool answered(const struct ep_mailbox *mailbox)
{
    return __atomic_load_n(&mailbox->bell, __ATOMIC_ACQUIRE) == EP_BELL_DONE
           || __atomic_load_n(&mailbox->closed, __ATOMIC_ACQUIRE);
}

/* Under the lock: the stream goes on where it is answered; has it come to its end? */
static bool passes(const void *stream)
{
    bool all = true;

    for (uint32_t i = 0; i < WAITERS; i++) {
        if (!waiters[i].mailbox || waiters[i].stream != stream)
            continue;
        if (answered(waiters[i].mailbox))
            waiters[i].mailbox = NULL;
        else
            all = false;
    }
    return all;
}

static ep_status ring_open(uint32_t device, void *window, bool spins, struct ep_cuda_ringer **out,
                           struct ep_error *error)
{
    ep_status status = enter("ring_open", device, error);

    if (status != EP_OK)
        return status;
    *out = malloc(sizeof **out);
    if (!*out)
        abort();
    **out = (struct ep_cuda_ringer){ .device = device, .window = window };
    cuda_fixture.ringers++;
    cuda_fixture.spins = spins;
    return leave();
}

static ep_status ring(struct ep_cuda_ringer *ringer, const struct ep_op *op, void *stream, struct ep_error *error)
{
    ep_status status = enter("ring", ringer->device, error);

    if (status != EP_OK)
        return status;
    if (capture(stream, &(struct graph_op){ .window = ringer->window, .op = *op }))
        return leave();
    note(op, stream);
    cuda_fixture.rung++;
    ring_bell(ringer->window, op, stream);
    return leave();
}

static void ring_close(struct ep_cuda_ringer *ringer)
{
    pthread_mutex_lock(&lock);
    cuda_fixture.ringers -= ringer != NULL;
    free(ringer);
    pthread_mutex_unlock(&lock);
}

static ep_status serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                            struct ep_error *error)
{
    ep_status status = enter("serve_open", options->device, error);

    if (status != EP_OK)
        return status;
    for (uint32_t r = 0; r < options->map->limits.ranks; r++)
        must_translate(options->windows[r], options->map->total_bytes);
    must_translate(options->state, sizeof *options->state);
    *out = calloc(1, sizeof **out);
    cuda_fixture.served = *options;
    cuda_fixture.serves++;
    return leave();
}

static ep_status ended(struct ep_error *error)
{
    return ep_error_set(error, EP_CANCELLED, "no op is served any more");
}

static ep_status serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    ep_status status = enter("serve_post", 0, error);
    const uint32_t passed = __atomic_load_n(&cuda_fixture.passed, __ATOMIC_SEQ_CST);

    if (status != EP_OK)
        return status;
    if (!serve->ended && serve->posted + ops > passed + EP_CUDA_SERVE_OPS) {
        fprintf(stderr, "cuda_fixture: %u ops posted, %u over\n", serve->posted + ops, passed);
        abort();
    }
    if (!serve->ended) {
        serve->before = serve->posted;
        serve->posted += ops;
        __atomic_fetch_add(&cuda_fixture.posted, ops, __ATOMIC_SEQ_CST);
    } else {
        status = ended(error);
    }
    leave();
    return status;
}

static ep_status serve_wait(struct ep_cuda_serve *serve, struct ep_error *error)
{
    for (;;) {
        ep_status status = enter("serve_wait", 0, error);
        bool gone;

        if (status != EP_OK)
            return status;
        gone = serve->ended;
        leave();
        if (gone)
            return ended(error);
        if (serve->before <= __atomic_load_n(&cuda_fixture.passed, __ATOMIC_SEQ_CST))
            return EP_OK;
        usleep(100);
    }
}

static ep_status serve_region(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                              struct ep_error *error)
{
    ep_status status = enter("serve_region", 0, error);

    (void)serve;
    if (status != EP_OK)
        return status;
    must_translate(region->start, region->bytes);
    cuda_fixture.regions.n = EP_MAX_REGIONS;
    cuda_fixture.regions.region[number] = *region;
    return leave();
}

static ep_status serve_forget(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error)
{
    ep_status status = enter("serve_forget", 0, error);

    (void)serve;
    if (status != EP_OK)
        return status;
    cuda_fixture.regions.region[number].bytes = 0;
    *entry = 0;
    return leave();
}

static ep_status serve_forgotten(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error)
{
    ep_status status = enter("serve_forgotten", 0, error);

    (void)serve, (void)entry;
    if (status != EP_OK)
        return status;
    leave();
    return __atomic_load_n(&cuda_fixture.looking, __ATOMIC_SEQ_CST)
               ? ep_error_set(error, EP_UNAVAILABLE, "an op that uses it still runs") : EP_OK;
}

static ep_status serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error)
{
    ep_status status = enter("serve_end", 0, error);

    if (status != EP_OK)
        return status;
    serve->ended = true;
    __atomic_fetch_add(&cuda_fixture.ended, 1, __ATOMIC_SEQ_CST);
    leave();
    return __atomic_load_n(&cuda_fixture.stuck, __ATOMIC_SEQ_CST)
               ? ep_error_set(error, EP_DEADLINE_EXCEEDED, "an op still runs after %u ms", timeout_ms)
               : EP_OK;
}

static void serve_close(struct ep_cuda_serve *serve)
{
    if (!serve)
        return;
    pthread_mutex_lock(&lock);
    if (!serve->ended) {
        fprintf(stderr, "cuda_fixture: a serve is closed that was not ended\n");
        abort();
    }
    cuda_fixture.serves--;
    free(serve);
    pthread_mutex_unlock(&lock);
}

/* ---- streams and graphs ------------------------------------------------------------------------- */

/* A process's first stream waits for the GPU's context: so long, where the driver is asleep. */
static void make_context(void)
{
    const char *ms = getenv("EP_CUDA_CONTEXT_MS");

    if (ms)
        usleep((useconds_t)atoi(ms) * 1000);
}

static ep_status stream_create(uint32_t device, void **stream, struct ep_error *error)
{
    static pthread_once_t context = PTHREAD_ONCE_INIT;
    ep_status status;

    pthread_once(&context, make_context);
    status = enter("stream_create", device, error);

    if (status != EP_OK)
        return status;
    *stream = malloc(1);
    cuda_fixture.streams++;
    return leave();
}

static void stream_destroy(uint32_t device, void *stream)
{
    (void)device;
    pthread_mutex_lock(&lock);
    cuda_fixture.streams -= stream != NULL;
    free(stream);
    pthread_mutex_unlock(&lock);
}

static ep_status stream_query(uint32_t device, void *stream, struct ep_error *error)
{
    ep_status status = enter("stream_query", device, error);
    bool over;

    if (status != EP_OK)
        return status;
    over = passes(stream);
    leave();
    return !over || __atomic_load_n(&cuda_fixture.busy, __ATOMIC_SEQ_CST)
               ? ep_error_set(error, EP_UNAVAILABLE, "work is under way")
               : EP_OK;
}

static ep_status stream_sync(uint32_t device, void *stream, struct ep_error *error)
{
    while (stream_query(device, stream, error) == EP_UNAVAILABLE)
        usleep(100);
    return EP_OK;
}

static ep_status stream_captured(uint32_t device, void *stream, bool *is, struct ep_error *error)
{
    ep_status status = enter("stream_captured", device, error);

    if (status != EP_OK)
        return status;
    *is = captured && capturing == stream;
    return leave();
}

static void thread_relax(void)
{
}

static ep_status graph_begin(uint32_t device, void *stream, struct ep_error *error)
{
    ep_status status = enter("graph_begin", device, error);

    if (status != EP_OK)
        return status;
    captured = calloc(1, sizeof *captured);
    capturing = stream;
    cuda_fixture.graphs++;
    return leave();
}

static ep_status graph_end(uint32_t device, void *stream, struct ep_cuda_graph **out, struct ep_error *error)
{
    ep_status status = enter("graph_end", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    *out = captured;
    capturing = NULL;
    captured = NULL;
    return leave();
}

static ep_status graph_launch(struct ep_cuda_graph *graph, void *stream, struct ep_error *error)
{
    ep_status status = enter("graph_launch", 0, error);

    if (status != EP_OK)
        return status;
    for (uint32_t i = 0; i < graph->n; i++) {
        if (graph->op[i].rank)
            execute(graph->op[i].rank, &graph->op[i].op);
        else
            ring_bell(graph->op[i].window, &graph->op[i].op, stream);
    }
    return leave();
}

static void graph_destroy(struct ep_cuda_graph *graph)
{
    pthread_mutex_lock(&lock);
    cuda_fixture.graphs -= graph != NULL;
    free(graph);
    pthread_mutex_unlock(&lock);
}

static ep_status event_create(uint32_t device, void **event, struct ep_error *error)
{
    ep_status status = enter("event_create", device, error);

    if (status != EP_OK)
        return status;
    *event = calloc(1, sizeof(uint64_t));
    cuda_fixture.events++;
    return leave();
}

static void event_destroy(uint32_t device, void *event)
{
    (void)device;
    pthread_mutex_lock(&lock);
    cuda_fixture.events -= event != NULL;
    free(event);
    pthread_mutex_unlock(&lock);
}

static ep_status event_record(uint32_t device, void *event, void *stream, struct ep_error *error)
{
    ep_status status = enter("event_record", device, error);

    (void)stream;
    if (status != EP_OK)
        return status;
    *(uint64_t *)event = ep_clock_ns();
    return leave();
}

static ep_status event_elapsed(uint32_t device, void *from, void *to, float *us, struct ep_error *error)
{
    ep_status status = enter("event_elapsed", device, error);

    if (status != EP_OK)
        return status;
    *us = (float)(*(uint64_t *)to - *(uint64_t *)from) / 1000.0f;
    return leave();
}

/* ---- the table --------------------------------------------------------------------------------- */

static const struct ep_cuda_api api = {
    .version = EP_CUDA_API_VERSION,
    .on_lost = on_lost,
    .device_count = device_count,
    .device_info = device_info,
    .device_find = device_find,
    .device_current = device_current,
    .memory_create = memory_create,
    .memory_export = memory_export,
    .memory_import = memory_import,
    .memory_adopt = memory_adopt,
    .memory_share = memory_share,
    .memory_destroy = memory_destroy,
    .memory_at = memory_at,
    .memory_range = memory_range,
    .memory_export_at = memory_export_at,
    .write = copy_in,
    .read = copy_out,
    .fill = fill,
    .copy = copy,
    .store = store,
    .marker_open = marker_open,
    .marker_store = marker_store,
    .marker_close = marker_close,
    .host_pin = host_pin,
    .host_unpin = host_unpin,
    .rank_open = rank_open,
    .rank_close = rank_close,
    .rank_run = rank_run,
    .ring_open = ring_open,
    .ring = ring,
    .ring_close = ring_close,
    .serve_open = serve_open,
    .serve_post = serve_post,
    .serve_wait = serve_wait,
    .serve_region = serve_region,
    .serve_forget = serve_forget,
    .serve_forgotten = serve_forgotten,
    .serve_end = serve_end,
    .serve_close = serve_close,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_query = stream_query,
    .stream_sync = stream_sync,
    .stream_captured = stream_captured,
    .thread_relax = thread_relax,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_elapsed = event_elapsed,
};

const struct ep_cuda_api *cuda_fixture_api(void)
{
    return &api;
}

void cuda_fixture_reset(void)
{
    if (cuda_fixture.memories || cuda_fixture.streams || cuda_fixture.ranks || cuda_fixture.ringers
        || cuda_fixture.serves || cuda_fixture.graphs || cuda_fixture.events) {
        fprintf(stderr, "cuda_fixture: alive: %u memories, %u streams, %u ranks, %u ringers, %u serves, %u graphs, "
                "%u events\n",
                cuda_fixture.memories, cuda_fixture.streams, cuda_fixture.ranks, cuda_fixture.ringers,
                cuda_fixture.serves, cuda_fixture.graphs, cuda_fixture.events);
        abort();
    }
    cuda_fixture = (struct cuda_fixture){ 0 };
    cuda_fixture_fail(NULL, 0);
    memset(waiters, 0, sizeof waiters);
}
