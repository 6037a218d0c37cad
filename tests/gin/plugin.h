/*
 * plugin: a GIN plugin of any make, behind one face for all tables that NCCL knows.
 *
 *     gin-v11   NCCL 2.28.7 to 2.30.4: a communicator is one context
 *     rma-v13   NCCL 2.30: a communicator has contexts
 *     rma-v14   NCCL 2.30.7: and a signal alone has no regions
 *
 * What differs between tables is in plugin.c; what is the same in all of them are the plugin's own functions.
 */
#ifndef PLUGIN_H
#define PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_error.h"
#include "nccl_plugin.h"

/* An operation as NCCL's proxy gives it on. */
struct plugin_put {
    void *source, *target, *signal; /* regions */
    uint64_t from, to, signal_at;   /* offsets in them */
    uint64_t bytes, value;
    uint32_t rank;
    uint32_t signal_op; /* NCCL_SIGNAL_*; 0: no signal */
};

struct plugin {
    const char *table; /* "gin-v11" */
    bool has_contexts;
    void *library;
    const struct nccl_gin_v11 *v11; /* one of the three */
    const struct nccl_rma_v13 *v13;
    const struct nccl_rma_v14 *v14;

    const char *name;
    nccl_result (*init)(void **context, uint64_t comm_id, nccl_logger log);
    nccl_result (*devices)(int *count);
    nccl_result (*listen)(void *context, int device, void *handle, void **listener);
    nccl_result (*connect)(void *context, void *handles[], int ranks, int rank, void *listener, void **comm);
    nccl_result (*deregister)(void *comm, void *region);
    nccl_result (*close)(void *comm);
    nccl_result (*close_listen)(void *listener);
    nccl_result (*test)(void *comm, void *request, int *done);
    nccl_result (*progress)(void *gin); /* NULL: there is none */
    nccl_result (*query)(void *gin, bool *failed);
    nccl_result (*finalize)(void *context);
};

/* table NULL: the first one of the list above that the plugin has. EP_UNIMPLEMENTED: it has none, or not that one. */
ep_status plugin_open(const char *path, const char *table, struct plugin *plugin, struct ep_error *error);
void plugin_close(struct plugin *plugin);

/* Does NCCL load it for this table? v11 is looked for in a file that has a network, too. */
ep_status plugin_check_exports(const struct plugin *plugin, struct ep_error *error);

nccl_result plugin_properties(const struct plugin *plugin, int device, struct nccl_properties_v12 *properties);
/* v11: the communicator itself. */
nccl_result plugin_create_context(const struct plugin *plugin, void *comm, uint32_t contexts, void **gin);
nccl_result plugin_destroy_context(const struct plugin *plugin, void *gin);
nccl_result plugin_register(const struct plugin *plugin, void *comm, void *data, uint64_t bytes, int type,
                            uint64_t flags, void **region, void **gin_region);
nccl_result plugin_put(const struct plugin *plugin, void *gin, uint32_t context, const struct plugin_put *put,
                       void **request);

#endif
