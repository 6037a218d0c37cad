#include "nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "ep_thread.h"

#define LIBRARY "libnccl.so.2"
#define LEAST_VERSION 22809 /* 2.28.9 */
#define WIN_COLL_SYMMETRIC 1
#define LEAVE_MS 10000u

/* As nccl.h has them, which is not there on every machine that this is built on. */
typedef struct { char internal[NCCL_ID_BYTES]; } unique_id;
enum { SUCCESS = 0, IN_PROGRESS = 7 };

static struct {
    int (*version)(int *);
    int (*unique_id)(unique_id *);
    int (*init)(void **, int, unique_id, int);
    int (*abort)(void *);
    int (*window)(void *, void *, size_t, void **, int);
    int (*no_window)(void *, void *);
    const char *(*error)(void *);
    const char *(*name)(int);
    void *device_create, *device_destroy;
} nccl;

/* ---- the library --------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct ep_error missing = EP_ERROR_INIT;
static int version;

static void look_up(void *library)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        { "ncclGetVersion", &nccl.version },
        { "ncclGetUniqueId", &nccl.unique_id },
        { "ncclCommInitRank", &nccl.init },
        { "ncclCommAbort", &nccl.abort },
        { "ncclGetLastError", &nccl.error },
        { "ncclGetErrorString", &nccl.name },
        { "ncclCommWindowRegister", &nccl.window },
        { "ncclCommWindowDeregister", &nccl.no_window },
        { "ncclDevCommCreate", &nccl.device_create },
        { "ncclDevCommDestroy", &nccl.device_destroy },
    };

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(library, functions[i].name);

        if (!symbol && !missing.status)
            (void)ep_error_set(&missing, EP_UNAVAILABLE, "%s has no %s: NCCL 2.28.9 or later is wanted", LIBRARY,
                               functions[i].name);
        memcpy(functions[i].at, &symbol, sizeof symbol);
    }
}

static void load(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW);

    if (!library) {
        (void)ep_error_set(&missing, EP_UNAVAILABLE, "NCCL cannot be loaded: %s", dlerror());
        return;
    }
    look_up(library);
    if (nccl.version && nccl.version(&version) == SUCCESS && version < LEAST_VERSION)
        (void)ep_error_set(&missing, EP_UNAVAILABLE, "%s is version %d: 2.28.9 (%d) or later is wanted", LIBRARY,
                           version, LEAST_VERSION);
}

ep_status nccl_check(const struct ep_cuda_api *api, struct ep_error *error)
{
    const uint32_t built = api->nccl_version ? api->nccl_version() : 0;

    if (!built)
        return ep_error_set(error, EP_UNIMPLEMENTED, "a group over several nodes: the cuda backend was built without "
                            "NCCL's headers, so it has no kernels that reach GPUs of other nodes");
    pthread_once(&once, load);
    if (missing.status)
        return ep_error_set(error, missing.status, "a group over several nodes: %s", missing.text);
    if ((int)built != version)
        return ep_error_set(error, EP_UNAVAILABLE, "a group over several nodes: %s is version %d, the kernels were built "
                            "for %u, and what they share with it differs between versions", LIBRARY, version, built);
    return EP_OK;
}

static ep_status say(int result, const char *what, void *comm, struct ep_error *error)
{
    if (result == SUCCESS)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "%s: %s: %.200s", what, nccl.name(result), nccl.error(comm));
}

ep_status nccl_id(uint8_t id[NCCL_ID_BYTES], struct ep_error *error)
{
    unique_id made;
    ep_status status = say(nccl.unique_id(&made), "ncclGetUniqueId", NULL, error);

    if (!status)
        memcpy(id, &made, sizeof made);
    return status;
}

/* ---- a world ----------------------------------------------------------------------------------- */

struct member {
    struct nccl_world *world;
    struct nccl_rank rank;
    pthread_t thread;
    void *comm;
    bool has_device;
    struct ep_error error;
};

struct nccl_world {
    struct nccl_world *next; /* parked */
    const struct ep_cuda_api *api;
    uint32_t ranks, n;
    unique_id id;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t busy;  /* under lock: members whose threads are not through */
    bool abandoned; /* under lock: nobody waits for them, the last one frees the world */
    struct member member[];
};

static void free_world(struct nccl_world *world)
{
    pthread_cond_destroy(&world->changed);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

static bool is_abandoned(struct nccl_world *world)
{
    bool abandoned;

    pthread_mutex_lock(&world->lock);
    abandoned = world->abandoned;
    pthread_mutex_unlock(&world->lock);
    return abandoned;
}

static void through(struct nccl_world *world)
{
    bool last;

    pthread_mutex_lock(&world->lock);
    last = --world->busy == 0 && world->abandoned;
    pthread_cond_broadcast(&world->changed);
    pthread_mutex_unlock(&world->lock);
    if (last)
        free_world(world);
}

static ep_status register_memory(struct member *member, struct nccl_memory *memory)
{
    void *window = NULL;
    ep_status status;

    if (is_abandoned(member->world)) /* and its memory may be gone */
        return ep_error_set(&member->error, EP_DEADLINE_EXCEEDED, "it took too long");
    status = say(nccl.window(member->comm, memory->at, memory->bytes, &window, WIN_COLL_SYMMETRIC),
                 "ncclCommWindowRegister", member->comm, &member->error);
    if (!status && !window)
        return ep_error_set(&member->error, EP_UNAVAILABLE, "ncclCommWindowRegister gives no window: NCCL has no "
                            "symmetric memory here (NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)");
    memory->window = (uint64_t)(uintptr_t)window;
    return status;
}

static void *form(void *arg)
{
    struct member *member = arg;
    struct nccl_world *world = member->world;
    struct ep_error *error = &member->error;
    ep_status status;

    (void)ep_thread_runs_ops(); /* as the threads that NCCL makes here */
    status = world->api->nccl_bind(member->rank.device, error);
    if (!status)
        status = say(nccl.init(&member->comm, (int)world->ranks, world->id, (int)member->rank.rank), "ncclCommInitRank",
                     NULL, error);
    for (uint32_t i = 0; !status && i < NCCL_MEMORIES; i++)
        status = register_memory(member, &member->rank.memory[i]);
    if (!status)
        status = say(world->api->nccl_device_open(nccl.device_create, member->comm, member->rank.wire),
                     "ncclDevCommCreate, for a network of GPUs (GIN)", member->comm, error);
    member->has_device = !status;
    through(world);
    return NULL;
}

/* All of it is local. */
static void *leave(void *arg)
{
    struct member *member = arg;
    struct nccl_world *world = member->world;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status = world->api->nccl_bind(member->rank.device, &error);

    if (!status && member->has_device)
        status = say(world->api->nccl_device_close(nccl.device_destroy, member->comm, member->rank.wire),
                     "ncclDevCommDestroy", member->comm, &error);
    for (uint32_t i = 0; !status && i < NCCL_MEMORIES; i++)
        if (member->rank.memory[i].window)
            status = say(nccl.no_window(member->comm, (void *)(uintptr_t)member->rank.memory[i].window),
                         "ncclCommWindowDeregister", member->comm, &error);
    if (member->comm) {
        const int result = nccl.abort(member->comm);

        if (!status)
            status = say(result, "ncclCommAbort", NULL, &error);
    }
    if (status)
        EP_WARN("node", "a communicator is not left in order", EP_U("rank", member->rank.rank),
                EP_S("error", error.text));
    through(world);
    return NULL;
}

static struct timespec after_ms(uint32_t ms)
{
    const uint64_t ns = ep_clock_ns() + ms * EP_NS_PER_MS;

    return (struct timespec){ .tv_sec = (time_t)(ns / EP_NS_PER_S), .tv_nsec = (long)(ns % EP_NS_PER_S) };
}

/* Of all members; false when they were abandoned. */
static bool run_all(struct nccl_world *world, void *(*run)(void *), uint32_t timeout_ms)
{
    const struct timespec until = after_ms(timeout_ms);
    bool done;

    world->busy = world->n;
    for (uint32_t i = 0; i < world->n; i++) {
        if (pthread_create(&world->member[i].thread, NULL, run, &world->member[i]) == 0) {
            pthread_detach(world->member[i].thread);
            continue;
        }
        (void)ep_error_set(&world->member[i].error, EP_RESOURCE_EXHAUSTED, "no thread for NCCL");
        through(world);
    }
    pthread_mutex_lock(&world->lock);
    while (world->busy && pthread_cond_timedwait(&world->changed, &world->lock, &until) == 0)
        ;
    done = world->busy == 0;
    world->abandoned = !done;
    pthread_mutex_unlock(&world->lock);
    return done;
}

static struct nccl_world *make_world(const struct ep_cuda_api *api, const uint8_t *id, uint32_t ranks,
                                     const struct nccl_rank *here, uint32_t n)
{
    struct nccl_world *world = calloc(1, sizeof *world + n * sizeof *world->member);
    pthread_condattr_t attributes;

    if (!world)
        return NULL;
    world->api = api;
    world->ranks = ranks;
    world->n = n;
    memcpy(&world->id, id, sizeof world->id);
    for (uint32_t i = 0; i < n; i++)
        world->member[i] = (struct member){ .world = world, .rank = here[i], .error = EP_ERROR_INIT };
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&world->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&world->lock, NULL);
    return world;
}

ep_status nccl_form(const struct ep_cuda_api *api, const uint8_t id[NCCL_ID_BYTES], uint32_t ranks,
                    const struct nccl_rank *here, uint32_t n, uint32_t timeout_ms, struct nccl_world **out,
                    struct ep_error *error)
{
    struct nccl_world *world = make_world(api, id, ranks, here, n);
    ep_status status;

    if (!world)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a communicator");
    if (!run_all(world, form, timeout_ms))
        return ep_error_set(error, EP_DEADLINE_EXCEEDED, "NCCL did not connect %u ranks within %u ms", ranks,
                            timeout_ms);
    for (uint32_t i = 0; i < n; i++) {
        const struct member *member = &world->member[i];

        if (!member->error.status)
            continue;
        status = ep_error_set(error, member->error.status, "rank %u: %.340s", member->rank.rank, member->error.text);
        nccl_leave(world);
        return status;
    }
    *out = world;
    return EP_OK;
}

const struct nccl_rank *nccl_rank(const struct nccl_world *world, uint32_t rank)
{
    for (uint32_t i = 0; i < world->n; i++)
        if (world->member[i].rank.rank == rank)
            return &world->member[i].rank;
    return NULL;
}

static pthread_mutex_t parking = PTHREAD_MUTEX_INITIALIZER; /* held while a world is left */
static struct nccl_world *parked;
static uint32_t serving;

static void leave_now(struct nccl_world *world)
{
    if (run_all(world, leave, LEAVE_MS))
        free_world(world);
    else
        EP_ERROR("node", "NCCL does not come back from leaving a communicator: what it had is lost");
}

static void leave_parked(void)
{
    while (parked) {
        struct nccl_world *world = parked;

        parked = world->next;
        leave_now(world);
    }
}

void nccl_leave(struct nccl_world *world)
{
    if (!world)
        return;
    pthread_mutex_lock(&parking);
    world->next = parked;
    parked = world;
    if (serving == 0)
        leave_parked();
    pthread_mutex_unlock(&parking);
}

void nccl_serve_begins(void)
{
    pthread_mutex_lock(&parking);
    serving++;
    pthread_mutex_unlock(&parking);
}

void nccl_serve_ends(void)
{
    pthread_mutex_lock(&parking);
    if (--serving == 0)
        leave_parked();
    pthread_mutex_unlock(&parking);
}
