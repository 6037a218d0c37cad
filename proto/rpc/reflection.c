/* Server reflection, v1 and v1alpha: what grpcurl asks before its first call. */
#include <stdlib.h>

#include "grpc/reflection/v1/reflection.pb-c.h"
#include "rpc_private.h"

typedef Grpc__Reflection__V1__ServerReflectionRequest request_message;
typedef Grpc__Reflection__V1__ServerReflectionResponse response_message;
#define ASKED(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name
#define ANSWER(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name

static void answer_error(struct ep_rpc_call *call, response_message *response, ep_status status,
                         const char *text)
{
    Grpc__Reflection__V1__ErrorResponse e = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;

    e.error_code = ep_status_to_grpc(status);
    e.error_message = (char *)(uintptr_t)text;
    response->message_response_case = ANSWER(ERROR_RESPONSE);
    response->error_response = &e;
    ep_rpc_write(call, &response->base);
}

static void answer_file(struct ep_rpc_call *call, response_message *response,
                        const Google__Protobuf__FileDescriptorProto *file)
{
    Grpc__Reflection__V1__FileDescriptorResponse f =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    ProtobufCBinaryData packed = { 0, NULL };

    if (!file) {
        answer_error(call, response, EP_NOT_FOUND, "not found");
        return;
    }
    packed.len = protobuf_c_message_get_packed_size(&file->base);
    packed.data = malloc(packed.len + 1);
    if (!packed.data) {
        answer_error(call, response, EP_NO_MEMORY, "out of memory");
        return;
    }
    protobuf_c_message_pack(&file->base, packed.data);
    f.n_file_descriptor_proto = 1;
    f.file_descriptor_proto = &packed;
    response->message_response_case = ANSWER(FILE_DESCRIPTOR_RESPONSE);
    response->file_descriptor_response = &f;
    ep_rpc_write(call, &response->base);
    free(packed.data);
}

static void answer_services(struct ep_rpc_call *call, response_message *response,
                            const struct ep_rpc_server *server)
{
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    Grpc__Reflection__V1__ServiceResponse *all = NULL, **pointers = NULL;
    size_t n = 0, i = 0;

    for (const struct rpc_service *s = server->services; s; s = s->next)
        n++;
    all = calloc(n, sizeof *all);
    pointers = calloc(n, sizeof *pointers);
    if (!all || !pointers) {
        answer_error(call, response, EP_NO_MEMORY, "out of memory");
        goto free_all;
    }
    for (const struct rpc_service *s = server->services; s; s = s->next, i++) {
        grpc__reflection__v1__service_response__init(&all[i]);
        all[i].name = s->name;
        pointers[i] = &all[i];
    }
    list.n_service = n;
    list.service = pointers;
    response->message_response_case = ANSWER(LIST_SERVICES_RESPONSE);
    response->list_services_response = &list;
    ep_rpc_write(call, &response->base);

free_all:
    free(pointers);
    free(all);
}

static void on_request(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const request_message *request = (const request_message *)message;
    const struct ep_rpc_server *server = user;
    const Google__Protobuf__FileDescriptorSet *schema = server->rpc->schema;
    response_message response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;

    response.valid_host = request->host;
    response.original_request = (request_message *)(uintptr_t)request;
    switch (request->message_request_case) {
    case ASKED(LIST_SERVICES):
        answer_services(call, &response, server);
        break;
    case ASKED(FILE_BY_FILENAME):
        answer_file(call, &response, rpc_schema_file(schema, request->file_by_filename));
        break;
    case ASKED(FILE_CONTAINING_SYMBOL):
        answer_file(call, &response, rpc_schema_symbol(schema, request->file_containing_symbol));
        break;
    case ASKED(FILE_CONTAINING_EXTENSION):
    case ASKED(ALL_EXTENSION_NUMBERS_OF_TYPE): /* proto3: there are none */
        answer_error(call, &response, EP_NOT_FOUND, "not found");
        break;
    default:
        answer_error(call, &response, EP_INVALID_ARGUMENT, "the request asks for nothing");
        break;
    }
}

/* One handler, with the messages of v1, under both names: on the wire they are the same. */
ep_status rpc_reflection_add(struct ep_rpc_server *server, struct ep_error *error)
{
    static const char *const services[] = { "grpc.reflection.v1.ServerReflection",
                                            "grpc.reflection.v1alpha.ServerReflection" };
    static const struct ep_rpc_handler handler = { .method = "ServerReflectionInfo", .for_viewers = true,
                                                   .on_request = on_request };
    ep_status status = EP_OK;

    for (size_t i = 0; status == EP_OK && i < sizeof services / sizeof *services; i++) {
        status = rpc_server_add_service_name(server, services[i], error);
        if (status == EP_OK)
            status = rpc_server_add_method(
                server, services[i], handler.method,
                &grpc__reflection__v1__server_reflection_request__descriptor,
                &grpc__reflection__v1__server_reflection_response__descriptor, &handler, server,
                error);
    }
    return status;
}
