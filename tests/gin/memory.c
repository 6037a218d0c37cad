/* Memory of a rank: the host's, between pages that are not there, or a GPU's. */
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "player.h"

/* ---- the thread's GPU -------------------------------------------------------------------------------- */

struct driver {
    int (*get)(int *device, int ordinal);
    int (*retain)(void **context, int device);
    int (*set)(void *context);
};

static bool find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);

    memcpy(function, &symbol, sizeof symbol); /* ISO C has no such cast, POSIX promises that it works */
    return symbol != NULL;
}

/* The driver itself: what the module does leaves a thread's context as it was. For the life of the process. */
ep_status memory_make_current(struct player *player, struct ep_error *error)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
    struct driver driver;
    int device = 0;

    if (!library || !find(library, "cuDeviceGet", &driver.get) ||
        !find(library, "cuDevicePrimaryCtxRetain", &driver.retain) || !find(library, "cuCtxSetCurrent", &driver.set))
        return ep_error_set(error, EP_UNIMPLEMENTED, "no libcuda.so.1 that makes a device current");
    if (driver.get(&device, (int)player->device) != 0 || driver.retain(&context, device) != 0 ||
        driver.set(context) != 0)
        return ep_error_set(error, EP_INTERNAL, "device %u cannot be made current", player->device);
    return EP_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------ */

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t whole_pages(uint64_t bytes)
{
    return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

static ep_status open_host(uint64_t bytes, struct memory *memory, struct ep_error *error)
{
    const uint64_t page = page_bytes(), pages = whole_pages(bytes);
    uint8_t *at = mmap(NULL, pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (at == MAP_FAILED)
        return ep_error_errno(error, EP_NO_MEMORY, "no %llu bytes of host memory", (unsigned long long)bytes);
    if (mprotect(at + page, pages, PROT_READ | PROT_WRITE) != 0) {
        munmap(at, pages + 2 * page);
        return ep_error_errno(error, EP_NO_MEMORY, "no %llu bytes of host memory", (unsigned long long)bytes);
    }
    memory->at = at + page + (pages - bytes) / 16 * 16; /* its end is at the page that is not there */
    return EP_OK;
}

static ep_status open_gpu(struct player *player, uint64_t bytes, struct memory *memory, struct ep_error *error)
{
    ep_status status = player->cuda->memory_create(player->device, bytes, &memory->cuda, error);

    if (status == EP_OK)
        memory->at = player->cuda->memory_at(memory->cuda);
    return status;
}

ep_status memory_open(struct player *player, uint64_t bytes, bool cuda, struct memory *memory, struct ep_error *error)
{
    *memory = (struct memory){ .bytes = bytes };
    return cuda ? open_gpu(player, bytes, memory, error) : open_host(bytes, memory, error);
}

void memory_close(struct player *player, struct memory *memory)
{
    const uint64_t page = page_bytes(), pages = whole_pages(memory->bytes);

    if (memory->cuda)
        player->cuda->memory_destroy(memory->cuda);
    else if (memory->at)
        munmap((void *)(((uintptr_t)memory->at & ~(page - 1)) - page), pages + 2 * page);
    *memory = (struct memory){ 0 };
}

ep_status memory_write(struct player *player, struct memory *to, uint64_t offset, const void *from, uint64_t bytes,
                       struct ep_error *error)
{
    if (to->cuda && bytes)
        return player->cuda->write(player->device, to->at + offset, from, bytes, player->stream, error);
    if (bytes)
        memcpy(to->at + offset, from, bytes);
    return EP_OK;
}

ep_status memory_read(struct player *player, const struct memory *from, uint64_t offset, void *to, uint64_t bytes,
                      struct ep_error *error)
{
    if (from->cuda && bytes)
        return player->cuda->read(player->device, to, from->at + offset, bytes, player->stream, error);
    if (bytes)
        memcpy(to, from->at + offset, bytes);
    return EP_OK;
}
