/* The embedded descriptor set: method kinds for the runtime, files and symbols for reflection. */
#include <string.h>

#include "rpc_private.h"

/* The build makes ep.fds.pb from proto/; gcc 12 and clang 14 have no #embed. */
extern const uint8_t ep_fds_start[], ep_fds_end[];
__asm__(".pushsection .rodata\n"
        ".global ep_fds_start\n"
        ".global ep_fds_end\n"
        "ep_fds_start:\n"
        ".incbin \"" EP_FDS_PATH "\"\n"
        "ep_fds_end:\n"
        ".popsection\n");

typedef Google__Protobuf__FileDescriptorSet file_set;
typedef Google__Protobuf__FileDescriptorProto file_proto;
typedef Google__Protobuf__ServiceDescriptorProto service_proto;
typedef Google__Protobuf__MethodDescriptorProto method_proto;
typedef Google__Protobuf__DescriptorProto message_proto;

ep_status rpc_schema_load(file_set **out, struct ep_error *error)
{
    *out = google__protobuf__file_descriptor_set__unpack(
        NULL, (size_t)(ep_fds_end - ep_fds_start), ep_fds_start);
    if (!*out)
        return ep_error_set(error, EP_NO_MEMORY, "cannot unpack the embedded schema");
    return EP_OK;
}

/* What is left of `name` after "prefix.", NULL when it does not begin so.  "" takes all. */
static const char *after(const char *name, const char *prefix)
{
    size_t n = prefix ? strlen(prefix) : 0;

    if (n == 0)
        return name;
    if (strncmp(name, prefix, n) != 0 || name[n] != '.')
        return NULL;
    return name + n + 1;
}

static const service_proto *find_service(const file_proto *file, const char *name)
{
    const char *local = after(name, file->package);

    for (size_t i = 0; local && i < file->n_service; i++)
        if (strcmp(file->service[i]->name, local) == 0)
            return file->service[i];
    return NULL;
}

static enum rpc_kind kind_of(const method_proto *m)
{
    bool client = m->has_client_streaming && m->client_streaming;
    bool server = m->has_server_streaming && m->server_streaming;

    return client ? (server ? RPC_BIDI : RPC_CLIENT_STREAM) : (server ? RPC_SERVER_STREAM : RPC_UNARY);
}

ep_status rpc_schema_kind(const file_set *schema, const char *service, const char *method,
                          enum rpc_kind *kind, struct ep_error *error)
{
    for (size_t i = 0; i < schema->n_file; i++) {
        const service_proto *s = find_service(schema->file[i], service);

        for (size_t k = 0; s && k < s->n_method; k++)
            if (strcmp(s->method[k]->name, method) == 0) {
                *kind = kind_of(s->method[k]);
                return EP_OK;
            }
    }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s/%s is not in the embedded schema", service,
                        method);
}

const file_proto *rpc_schema_file(const file_set *schema, const char *name)
{
    for (size_t i = 0; i < schema->n_file; i++)
        if (strcmp(schema->file[i]->name, name) == 0)
            return schema->file[i];
    return NULL;
}

/* Does `symbol` (relative to where the thing stands) name it, or something inside it? */
static bool names(const char *symbol, const char *thing)
{
    return strcmp(symbol, thing) == 0 || after(symbol, thing) != NULL;
}

static bool message_holds(const message_proto *message, const char *symbol)
{
    const char *inner = after(symbol, message->name);

    if (strcmp(symbol, message->name) == 0)
        return true;
    if (!inner)
        return false;
    for (size_t i = 0; i < message->n_field; i++)
        if (strcmp(inner, message->field[i]->name) == 0)
            return true;
    for (size_t i = 0; i < message->n_enum_type; i++)
        if (names(inner, message->enum_type[i]->name))
            return true;
    for (size_t i = 0; i < message->n_nested_type; i++)
        if (message_holds(message->nested_type[i], inner))
            return true;
    return false;
}

static bool service_holds(const service_proto *service, const char *symbol)
{
    const char *inner = after(symbol, service->name);

    if (strcmp(symbol, service->name) == 0)
        return true;
    for (size_t i = 0; inner && i < service->n_method; i++)
        if (strcmp(inner, service->method[i]->name) == 0)
            return true;
    return false;
}

const file_proto *rpc_schema_symbol(const file_set *schema, const char *symbol)
{
    for (size_t i = 0; i < schema->n_file; i++) {
        const file_proto *file = schema->file[i];
        const char *local = after(symbol, file->package);

        for (size_t k = 0; local && k < file->n_service; k++)
            if (service_holds(file->service[k], local))
                return file;
        for (size_t k = 0; local && k < file->n_message_type; k++)
            if (message_holds(file->message_type[k], local))
                return file;
        for (size_t k = 0; local && k < file->n_enum_type; k++)
            if (names(local, file->enum_type[k]->name))
                return file;
    }
    return NULL;
}
