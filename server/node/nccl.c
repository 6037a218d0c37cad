/* NCCL's library: it is found, and its calls become values with a sentence. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "nccl_private.h"

#define LIBRARY "libnccl.so.2"
#define LEAST_VERSION 22809 /* 2.28.9 */

/* As NCCL's header has them, which is not there on every machine that this is built on. */
#define WIN_COLL_SYMMETRIC 1
typedef struct { char internal[NCCL_ID_BYTES]; } unique_id;
enum { SUCCESS = 0 };

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

static ep_status check(const struct ep_cuda_api *api, struct ep_error *error)
{
    const uint32_t built = api->nccl_version ? api->nccl_version() : 0;

    if (!built)
        return ep_error_set(error, EP_UNIMPLEMENTED, "the cuda backend was built without NCCL's headers, so it has no "
                            "kernels that reach GPUs of other nodes");
    pthread_once(&once, load);
    if (missing.status)
        return ep_error_set(error, missing.status, "%s", missing.text);
    if ((int)built != version)
        return ep_error_set(error, EP_UNAVAILABLE, "%s is version %d, the kernels were built for %u, and what they share "
                            "with it differs between versions", LIBRARY, version, built);
    return EP_OK;
}

ep_status nccl_check(const struct ep_cuda_api *api, struct ep_error *error)
{
    return check(api, error) ? ep_error_prefix(error, "a group over several nodes") : EP_OK;
}

uint32_t nccl_describe(const struct ep_cuda_api *api, char **text)
{
    const char *plugin = getenv("NCCL_NET_PLUGIN");
    struct ep_error why = EP_ERROR_INIT;
    int size;

    if (check(api, &why))
        size = asprintf(text, "not to be used: %s", why.text);
    else
        size = asprintf(text, "%d.%d.%d, GIN by %s", version / 10000, version / 100 % 100, version % 100,
                        plugin && *plugin && strcmp(plugin, "none") ? plugin : "NCCL itself, over RDMA");
    if (size < 0)
        *text = NULL;
    return why.status ? 0 : (uint32_t)version;
}

static ep_status say(int result, const char *what, void *comm, struct ep_error *error)
{
    if (result == SUCCESS)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "%s: %s: %.200s", what, nccl.name(result), nccl.error(comm));
}

/* ---- its calls ------------------------------------------------------------------------------- */

ep_status nccl_invite(struct nccl_card *card, struct ep_error *error)
{
    unique_id made;
    ep_status status = say(nccl.unique_id(&made), "ncclGetUniqueId", NULL, error);

    if (status)
        return status;
    if (getrandom(card->tag, sizeof card->tag, 0) != (ssize_t)sizeof card->tag)
        return ep_error_errno(error, EP_IO, "getrandom, to name a communicator");
    memcpy(card->id, &made, sizeof card->id);
    return EP_OK;
}

ep_status nccl_comm_init(const uint8_t id[NCCL_ID_BYTES], uint32_t ranks, uint32_t rank, void **comm,
                         struct ep_error *error)
{
    unique_id of;

    memcpy(&of, id, sizeof of);
    return say(nccl.init(comm, (int)ranks, of, (int)rank), "ncclCommInitRank", NULL, error);
}

ep_status nccl_comm_abort(void *comm, struct ep_error *error)
{
    return say(nccl.abort(comm), "ncclCommAbort", NULL, error);
}

ep_status nccl_window_open(void *comm, struct nccl_memory *memory, struct ep_error *error)
{
    void *window = NULL;
    ep_status status = say(nccl.window(comm, memory->at, memory->bytes, &window, WIN_COLL_SYMMETRIC),
                           "ncclCommWindowRegister", comm, error);

    if (!status && !window)
        return ep_error_set(error, EP_UNAVAILABLE, "ncclCommWindowRegister gives no window: NCCL has no symmetric memory "
                            "here (NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)");
    memory->window = (uint64_t)(uintptr_t)window;
    return status;
}

ep_status nccl_window_close(void *comm, const struct nccl_memory *memory, struct ep_error *error)
{
    return say(nccl.no_window(comm, (void *)(uintptr_t)memory->window), "ncclCommWindowDeregister", comm, error);
}

ep_status nccl_device_open(const struct ep_cuda_api *api, void *comm, uint32_t ranks, uint64_t *wire, struct ep_error *error)
{
    return say(api->nccl_device_open(nccl.device_create, comm, ep_net_all_signals(ranks), wire),
               "ncclDevCommCreate, for a network of GPUs (GIN)", comm, error);
}

ep_status nccl_device_close(const struct ep_cuda_api *api, void *comm, const uint64_t *wire, struct ep_error *error)
{
    return say(api->nccl_device_close(nccl.device_destroy, comm, wire), "ncclDevCommDestroy", comm, error);
}
