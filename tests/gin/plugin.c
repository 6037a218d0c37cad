#include "plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* What has the same name and type in every table. */
#define TAKE(plugin, from)                                                                                             \
    ((plugin)->name = (from)->name, (plugin)->init = (from)->init, (plugin)->devices = (from)->devices,                \
     (plugin)->listen = (from)->listen, (plugin)->connect = (from)->connect,                                           \
     (plugin)->deregister = (from)->deregMrSym, (plugin)->close = (from)->closeColl,                                   \
     (plugin)->close_listen = (from)->closeListen, (plugin)->test = (from)->test,                                      \
     (plugin)->query = (from)->queryLastError, (plugin)->finalize = (from)->finalize)

static bool take_v11(struct plugin *plugin)
{
    plugin->v11 = dlsym(plugin->library, "ncclGinPlugin_v11");
    if (!plugin->v11)
        return false;
    TAKE(plugin, plugin->v11);
    plugin->progress = plugin->v11->ginProgress;
    return true;
}

static bool take_v13(struct plugin *plugin)
{
    plugin->v13 = dlsym(plugin->library, "ncclRmaPlugin_v13");
    if (!plugin->v13) /* NCCL takes either: they are one type */
        plugin->v13 = dlsym(plugin->library, "ncclGinPlugin_v13");
    if (!plugin->v13)
        return false;
    TAKE(plugin, plugin->v13);
    plugin->progress = plugin->v13->ginProgress;
    plugin->has_contexts = true;
    return true;
}

static bool take_v14(struct plugin *plugin)
{
    plugin->v14 = dlsym(plugin->library, "ncclRmaPlugin_v14");
    if (!plugin->v14)
        return false;
    TAKE(plugin, plugin->v14);
    plugin->progress = plugin->v14->rmaProgress;
    plugin->has_contexts = true;
    return true;
}

static const struct {
    const char *name;
    bool (*take)(struct plugin *plugin);
} tables[] = { { "gin-v11", take_v11 }, { "rma-v13", take_v13 }, { "rma-v14", take_v14 } };

ep_status plugin_open(const char *path, const char *table, struct plugin *plugin, struct ep_error *error)
{
    *plugin = (struct plugin){ .library = dlopen(path, RTLD_NOW | RTLD_LOCAL) };
    if (!plugin->library)
        return ep_error_set(error, EP_NOT_FOUND, "cannot load the plugin: %.300s", dlerror());
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if ((!table || strcmp(table, tables[i].name) == 0) && tables[i].take(plugin)) {
            plugin->table = tables[i].name;
            return EP_OK;
        }
    plugin_close(plugin);
    return ep_error_set(error, EP_UNIMPLEMENTED, "the plugin exports no table %s",
                        table ? table : "that is known here");
}

void plugin_close(struct plugin *plugin)
{
    dlclose(plugin->library);
    plugin->library = NULL;
}

/* NCCL 2.28 looks for networks of these versions. */
static bool has_network(const struct plugin *plugin)
{
    char symbol[32];

    for (int version = 6; version <= 11; version++) {
        snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
        if (dlsym(plugin->library, symbol))
            return true;
    }
    return false;
}

ep_status plugin_check_exports(const struct plugin *plugin, struct ep_error *error)
{
    if (plugin->v11 && !has_network(plugin))
        return ep_error_set(error, EP_VERIFY_FAILED,
                            "exports no ncclNetPlugin_v6 to _v11: NCCL looks for ncclGinPlugin_v11 only beside one");
    if (!plugin->name || !*plugin->name)
        return ep_error_set(error, EP_VERIFY_FAILED, "the table %s has no name", plugin->table);
    return EP_OK;
}

static void widen(const struct nccl_properties_v11 *old, struct nccl_properties_v12 *properties)
{
    *properties = (struct nccl_properties_v12){ .name = old->name,
                                                .ptrSupport = old->ptrSupport,
                                                .maxComms = old->maxComms,
                                                .maxRecvs = old->maxRecvs,
                                                .netDeviceType = old->netDeviceType };
}

nccl_result plugin_properties(const struct plugin *plugin, int device, struct nccl_properties_v12 *properties)
{
    struct nccl_properties_v11 old = { 0 };
    nccl_result result;

    *properties = (struct nccl_properties_v12){ 0 };
    if (plugin->v14)
        return plugin->v14->getProperties(device, properties);
    if (plugin->v13)
        return plugin->v13->getProperties(device, properties);
    result = plugin->v11->getProperties(device, &old);
    widen(&old, properties);
    return result;
}

nccl_result plugin_create_context(const struct plugin *plugin, void *comm, uint32_t contexts, void **gin)
{
    struct nccl_rma_config_v14 config = { .nContexts = (int)contexts, .trafficClass = -1, .rankStride = 1 };
    struct nccl_gin_config_v13 config_v13 = { .nContexts = (int)contexts, .trafficClass = -1 };
    struct nccl_device_handle *device;

    if (plugin->v14)
        return plugin->v14->createContext(comm, &config, gin);
    if (plugin->v13)
        return plugin->v13->createContext(comm, &config_v13, gin, &device);
    *gin = comm;
    return NCCL_SUCCESS;
}

nccl_result plugin_destroy_context(const struct plugin *plugin, void *gin)
{
    if (plugin->v14)
        return plugin->v14->destroyContext(gin);
    return plugin->v13 ? plugin->v13->destroyContext(gin) : NCCL_SUCCESS;
}

nccl_result plugin_register(const struct plugin *plugin, void *comm, void *data, uint64_t bytes, int type,
                            uint64_t flags, void **region, void **gin_region)
{
    nccl_result result;

    if (plugin->v11)
        return plugin->v11->regMrSym(comm, data, bytes, type, flags, region, gin_region);
    if (plugin->v13)
        result = plugin->v13->regMrSym(comm, data, bytes, type, flags, region, gin_region);
    else
        result = plugin->v14->regMrSym(comm, data, bytes, type, flags, region);
    *gin_region = *region; /* NCCL 2.30 takes the same for both */
    return result;
}

static nccl_result put_alone(const struct plugin *plugin, void *gin, int context, const struct plugin_put *p,
                             void **request)
{
    if (plugin->v14)
        return plugin->v14->iput(gin, context, p->from, p->source, p->bytes, p->to, p->target, p->rank, request);
    if (plugin->v13)
        return plugin->v13->iput(gin, context, p->from, p->source, p->bytes, p->to, p->target, p->rank, request);
    return plugin->v11->iput(gin, p->from, p->source, p->bytes, p->to, p->target, p->rank, request);
}

nccl_result plugin_put(const struct plugin *plugin, void *gin, uint32_t context, const struct plugin_put *p,
                       void **request)
{
    if (!p->signal_op)
        return put_alone(plugin, gin, (int)context, p, request);
    if (plugin->v14)
        return plugin->v14->iputSignal(gin, (int)context, p->from, p->source, p->bytes, p->to, p->target, p->rank,
                                       p->signal_at, p->signal, p->value, p->signal_op, true, request);
    if (plugin->v13)
        return plugin->v13->iputSignal(gin, (int)context, p->from, p->source, p->bytes, p->to, p->target, p->rank,
                                       p->signal_at, p->signal, p->value, p->signal_op, request);
    return plugin->v11->iputSignal(gin, p->from, p->source, p->bytes, p->to, p->target, p->rank, p->signal_at,
                                   p->signal, p->value, p->signal_op, request);
}
