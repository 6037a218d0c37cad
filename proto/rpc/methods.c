/* What a server serves: its services, and the handlers of their methods.  The loop's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc_private.h"

ep_status rpc_server_add_service_name(struct ep_rpc_server *server, const char *name,
                                      struct ep_error *error)
{
    struct rpc_service *service;

    for (service = server->services; service; service = service->next)
        if (strcmp(service->name, name) == 0)
            return ep_error_set(error, EP_ALREADY_EXISTS, "service %s is served already", name);
    service = calloc(1, sizeof *service);
    if (!service || !(service->name = strdup(name))) {
        free(service);
        return ep_error_set(error, EP_NO_MEMORY, "service %s: out of memory", name);
    }
    service->next = server->services;
    server->services = service;
    return EP_OK;
}

static struct rpc_method *new_method(const char *service, const char *name)
{
    struct rpc_method *m = calloc(1, sizeof *m);

    if (m && asprintf(&m->path, "/%s/%s", service, name) < 0) {
        free(m);
        return NULL;
    }
    return m;
}

static void free_method(struct rpc_method *m)
{
    free(m->path);
    free(m);
}

ep_status rpc_server_add_method(struct ep_rpc_server *server, const char *service,
                                const char *name, const ProtobufCMessageDescriptor *input,
                                const ProtobufCMessageDescriptor *output,
                                const struct ep_rpc_handler *handler, void *user,
                                struct ep_error *error)
{
    struct rpc_method *m = new_method(service, name);
    ep_status status;

    if (!m)
        return ep_error_set(error, EP_NO_MEMORY, "%s/%s: out of memory", service, name);
    status = rpc_schema_kind(server->rpc->schema, service, name, &m->kind, error);
    if (status == EP_OK && m->kind == RPC_CLIENT_STREAM)
        status = ep_error_set(error, EP_UNIMPLEMENTED, "%s: client streaming is not served", m->path);
    if (status != EP_OK)
        goto free_method;
    m->input = input;
    m->output = output;
    m->handler = *handler;
    m->user = user;
    m->registration = grpc_server_register_method(
        server->server, m->path, NULL,
        m->kind == RPC_BIDI ? GRPC_SRM_PAYLOAD_NONE : GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    if (!m->registration) {
        status = ep_error_set(error, EP_ALREADY_EXISTS, "%s is served already", m->path);
        goto free_method;
    }
    m->next = server->methods;
    server->methods = m;
    return EP_OK;

free_method:
    free_method(m);
    return status;
}

static const struct ep_rpc_handler *find_handler(const struct ep_rpc_handler *handlers, size_t n,
                                                 const char *method)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(handlers[i].method, method) == 0)
            return &handlers[i];
    return NULL;
}

static ep_status check_handlers(const ProtobufCServiceDescriptor *service,
                                const struct ep_rpc_handler *handlers, size_t n,
                                struct ep_error *error)
{
    for (size_t i = 0; i < n; i++) {
        if (!protobuf_c_service_descriptor_get_method_by_name(service, handlers[i].method))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s has no method %s", service->name,
                                handlers[i].method);
        if (!handlers[i].on_request)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s/%s: the handler has no on_request",
                                service->name, handlers[i].method);
        if (find_handler(handlers, i, handlers[i].method))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s/%s has two handlers", service->name,
                                handlers[i].method);
    }
    for (unsigned i = 0; i < service->n_methods; i++)
        if (!find_handler(handlers, n, service->methods[i].name))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s/%s has no handler", service->name,
                                service->methods[i].name);
    return EP_OK;
}

ep_status ep_rpc_server_add_service(struct ep_rpc_server *server,
                                    const ProtobufCServiceDescriptor *service,
                                    const struct ep_rpc_handler *handlers, size_t n, void *user,
                                    struct ep_error *error)
{
    ep_status status;

    if (server->state != RPC_SERVER_NEW)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "service %s: the server has been started", service->name);
    status = check_handlers(service, handlers, n, error);
    if (status == EP_OK)
        status = rpc_server_add_service_name(server, service->name, error);
    for (unsigned i = 0; status == EP_OK && i < service->n_methods; i++) {
        const ProtobufCMethodDescriptor *m = &service->methods[i];

        status = rpc_server_add_method(server, service->name, m->name, m->input, m->output,
                                       find_handler(handlers, n, m->name), user, error);
    }
    return status;
}

void rpc_server_free_methods(struct ep_rpc_server *server)
{
    while (server->methods) {
        struct rpc_method *m = server->methods;

        server->methods = m->next;
        free_method(m);
    }
    while (server->services) {
        struct rpc_service *s = server->services;

        server->services = s->next;
        free(s->name);
        free(s);
    }
}
