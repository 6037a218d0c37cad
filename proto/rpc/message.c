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

/* protobuf-c does not tell a message that is wrong from one that there was no memory for. */
static void *allocate(void *failed, size_t size)
{
    void *memory = malloc(size);

    if (!memory)
        *(bool *)failed = true;
    return memory;
}

static void release(void *failed, void *memory)
{
    (void)failed;
    free(memory);
}

ep_status rpc_unpack(const ProtobufCMessageDescriptor *type, grpc_byte_buffer *bytes, ProtobufCMessage **out)
{
    bool failed = false;
    ProtobufCAllocator allocator = { .alloc = allocate, .free = release, .allocator_data = &failed };
    grpc_byte_buffer_reader reader;
    ProtobufCMessage *message;

    if (!bytes || !grpc_byte_buffer_reader_init(&reader, bytes))
        return EP_PROTOCOL;

    grpc_slice all = grpc_byte_buffer_reader_readall(&reader);

    message = protobuf_c_message_unpack(type, &allocator, GRPC_SLICE_LENGTH(all), GRPC_SLICE_START_PTR(all));
    grpc_slice_unref(all);
    grpc_byte_buffer_reader_destroy(&reader);
    if (!message)
        return failed ? EP_NO_MEMORY : EP_PROTOCOL;
    *out = message;
    return EP_OK;
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
