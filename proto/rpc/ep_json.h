/*
 * ep_json: protobuf-c messages as JSON (jansson) and back, from their descriptors.
 *
 * The proto3 JSON mapping, with the names as they stand in the .proto (snake_case).  64-bit
 * integers are JSON integers as far as int64 reaches, strings beyond; enums go by name, bytes in
 * base64, map<> as an object.  Fields with their default value are there, a oneof that is not set
 * is absent, a sub-message that is not set is null.
 */
#ifndef EP_JSON_H
#define EP_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

#include "ep_error.h"

/* NULL: no memory.  The caller owns the reference. */
json_t *ep_json_from_message(const ProtobufCMessage *message);

/*
 * An object of the message's fields, all of them optional, by their .proto or lowerCamelCase
 * names.  The error names the field: "spec.hidden: expected an unsigned integer, found "abc"".
 * protobuf_c_message_free_unpacked(*out, NULL) frees the result.
 */
ep_status ep_json_to_message(const json_t *json, const ProtobufCMessageDescriptor *type,
                             ProtobufCMessage **out, struct ep_error *error);

#endif
