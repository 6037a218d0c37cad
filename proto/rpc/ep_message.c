#include "ep_message.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void *ep_message_pack(const ProtobufCMessage *message, size_t *size)
{
    uint8_t *bytes;

    *size = protobuf_c_message_get_packed_size(message);
    bytes = malloc(*size ? *size : 1);
    if (!bytes)
        abort();
    protobuf_c_message_pack(message, bytes);
    return bytes;
}

/* protobuf-c says of bytes that there is no memory for what it says of those that are no message. */
static void *allocate(void *unused, size_t size)
{
    void *memory = malloc(size ? size : 1);

    (void)unused;
    if (!memory)
        abort();
    return memory;
}

static void release(void *unused, void *memory)
{
    (void)unused;
    free(memory);
}

void *ep_message_unpack(const ProtobufCMessageDescriptor *type, size_t size, const void *bytes)
{
    ProtobufCAllocator allocator = { .alloc = allocate, .free = release };

    return protobuf_c_message_unpack(type, &allocator, size, bytes);
}

void *ep_message_copy(const ProtobufCMessage *message)
{
    size_t size;
    uint8_t *bytes = ep_message_pack(message, &size);
    ProtobufCMessage *copy = ep_message_unpack(message->descriptor, size, bytes);

    free(bytes);
    if (!copy)
        abort();
    return copy;
}

bool ep_message_same(const ProtobufCMessage *a, const ProtobufCMessage *b)
{
    size_t na = 0, nb = 0;
    void *pa = a ? ep_message_pack(a, &na) : NULL, *pb = b ? ep_message_pack(b, &nb) : NULL;
    const bool same = na == nb && (!na || !memcmp(pa, pb, na));

    free(pa);
    free(pb);
    return same;
}
