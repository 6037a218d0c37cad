/* Between protobuf-c messages and gRPC's byte buffers and slices. */
#include <stdlib.h>
#include <string.h>

#include <grpc/byte_buffer_reader.h>

#include "rpc_private.h"

grpc_byte_buffer *rpc_pack(const ProtobufCMessage *message)
{
    size_t n = protobuf_c_message_get_packed_size(message);
    grpc_slice slice = grpc_slice_malloc(n); /* up to 23 bytes live inside `slice` itself */

    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));

    grpc_byte_buffer *bytes = grpc_raw_byte_buffer_create(&slice, 1); /* takes its own reference */

    grpc_slice_unref(slice);
    return bytes;
}

ProtobufCMessage *rpc_unpack(const ProtobufCMessageDescriptor *type, grpc_byte_buffer *bytes)
{
    grpc_byte_buffer_reader reader;

    if (!bytes || !grpc_byte_buffer_reader_init(&reader, bytes))
        return NULL;

    grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, GRPC_SLICE_LENGTH(all),
                                                          GRPC_SLICE_START_PTR(all));

    grpc_slice_unref(all);
    grpc_byte_buffer_reader_destroy(&reader);
    return message;
}

char *rpc_slice_text(grpc_slice slice)
{
    size_t n = GRPC_SLICE_LENGTH(slice);
    char *text = malloc(n + 1);

    if (!text)
        return NULL;
    memcpy(text, GRPC_SLICE_START_PTR(slice), n);
    text[n] = '\0';
    return text;
}

char *rpc_metadata_text(const grpc_metadata_array *metadata, const char *key)
{
    for (size_t i = 0; i < metadata->count; i++)
        if (grpc_slice_str_cmp(metadata->metadata[i].key, key) == 0)
            return rpc_slice_text(metadata->metadata[i].value);
    return NULL;
}
