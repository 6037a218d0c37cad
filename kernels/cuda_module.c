/* Finds and loads the cuda backend. */
#include "ep_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE "libep_cuda.so"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct ep_cuda_api *loaded;
static struct ep_error failure;

/* The folder of the object that this code is part of, with its last '/'. */
static bool own_folder(char *folder, size_t size)
{
    Dl_info info;
    const char *slash;

    if (!dladdr((void *)&once, &info) || !info.dli_fname || !(slash = strrchr(info.dli_fname, '/')))
        return false;
    return snprintf(folder, size, "%.*s", (int)(slash - info.dli_fname + 1), info.dli_fname) < (int)size;
}

/* Why the one that is there cannot be loaded is what the user has to know; else where it was looked for. */
static bool says_more(const char *folder, const char *path)
{
    return failure.status == EP_OK || (*folder && access(path, F_OK) == 0);
}

static void *try_load(const char *folder, const char *name)
{
    char path[1024];
    void *module;

    if (snprintf(path, sizeof path, "%s%s", folder, name) >= (int)sizeof path)
        return NULL;
    module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!module) {
        const char *why = dlerror();

        if (says_more(folder, path))
            ep_error_set(&failure, EP_NOT_FOUND, "no cuda backend: %.360s", why ? why : path);
    }
    return module;
}

static void *find_module(void)
{
    const char *given = getenv("EP_CUDA_MODULE");
    char folder[768];
    void *module = NULL;

    if (given && *given)
        return try_load("", given);
    if (own_folder(folder, sizeof folder)) {
        module = try_load(folder, MODULE);
        if (!module)
            module = try_load(folder, "../lib/" MODULE);
    }
    return module ? module : try_load("", MODULE);
}

static void load(void)
{
    const struct ep_cuda_api *(*module_api)(void) = NULL;
    void *module = find_module(), *symbol;

    if (!module)
        return;
    symbol = dlsym(module, "ep_cuda_api");
    memcpy(&module_api, &symbol, sizeof module_api); /* ISO C has no such cast, POSIX promises that it works */
    if (!module_api || module_api()->version != EP_CUDA_API_VERSION) {
        ep_error_set(&failure, EP_NOT_FOUND, "no cuda backend: " MODULE " is of another release");
        dlclose(module);
        return;
    }
    loaded = module_api(); /* for the life of the process */
}

void ep_cuda_ask_for_queues(void)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

ep_status ep_cuda_open(const struct ep_cuda_api **api, struct ep_error *error)
{
    uint32_t devices = 0;
    ep_status status;

    pthread_once(&once, load);
    if (!loaded)
        return ep_error_set(error, EP_NOT_FOUND, "%s", failure.text);
    status = loaded->device_count(&devices, error);
    if (status != EP_OK)
        return status;
    if (devices == 0)
        return ep_error_set(error, EP_NOT_FOUND, "no cuda backend: this process sees no GPU");
    *api = loaded;
    return EP_OK;
}
