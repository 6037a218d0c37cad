/*
 * ep_message: protobuf messages of any type as bytes, copied and compared.
 *
 * What is returned is the caller's.  Where there is no memory for it, the process ends.
 */
#ifndef EP_MESSAGE_H
#define EP_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>

#include <protobuf-c/protobuf-c.h>

void *ep_message_pack(const ProtobufCMessage *message, size_t *size); /* for free() */
void *ep_message_copy(const ProtobufCMessage *message); /* deep; for protobuf_c_message_free_unpacked() */
/* NULL: the bytes are no such message.  For protobuf_c_message_free_unpacked(). */
void *ep_message_unpack(const ProtobufCMessageDescriptor *type, size_t size, const void *bytes);
/* In every field.  NULL is as an empty one. */
bool ep_message_same(const ProtobufCMessage *a, const ProtobufCMessage *b);

#endif
