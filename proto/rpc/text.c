/*
 * The text of messages.  proto3 wants it to be UTF-8: protobuf-c does not look, but clients in other languages refuse a
 * whole message for one byte that is not.
 */
#include <string.h>

#include "ep_message.h"
#include "ep_utf8.h"
#include "rpc_private.h"

typedef ProtobufCFieldDescriptor field_t;

static bool has_text(const field_t *f)
{
    return f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_MESSAGE;
}

/* The pointers to a field's strings or messages, and how many there are. */
static void **values(const ProtobufCMessage *message, const field_t *f, size_t *n)
{
    char *base = (char *)(uintptr_t)message;
    const void *quantifier = base + f->quantifier_offset;
    const bool in_oneof = (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0;

    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        *n = *(const size_t *)quantifier;
        return *(void ***)(void *)(base + f->offset);
    }
    *n = in_oneof && *(const uint32_t *)quantifier != f->id ? 0 : 1;
    return (void **)(void *)(base + f->offset);
}

static bool find_wrong(const ProtobufCMessage *message, char *path, size_t size)
{
    const size_t used = strlen(path);

    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const field_t *f = &message->descriptor->fields[i];
        size_t n = 0;
        void **value = has_text(f) ? values(message, f, &n) : NULL;

        snprintf(path + used, size - used, "%s%s", used ? "." : "", f->name);
        for (size_t v = 0; v < n; v++)
            if (value[v] && (f->type == PROTOBUF_C_TYPE_STRING ? !ep_utf8_is_valid(value[v])
                                                               : find_wrong(value[v], path, size)))
                return true;
        path[used] = '\0';
    }
    return false;
}

bool rpc_text_is_wrong(const ProtobufCMessage *message, char *path, size_t size)
{
    *path = '\0';
    return find_wrong(message, path, size);
}

/* Of a message that was unpacked; empty strings are not in memory of their own. */
static void mend(ProtobufCMessage *message)
{
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const field_t *f = &message->descriptor->fields[i];
        size_t n = 0;
        void **value = has_text(f) ? values(message, f, &n) : NULL;

        for (size_t v = 0; v < n; v++)
            if (value[v] && f->type == PROTOBUF_C_TYPE_MESSAGE)
                mend(value[v]);
            else if (value[v] && *(char *)value[v])
                ep_utf8_mend(value[v]);
    }
}

ProtobufCMessage *rpc_text_mended(const ProtobufCMessage *message)
{
    char path[RPC_TEXT_PATH];
    ProtobufCMessage *copy;

    if (!rpc_text_is_wrong(message, path, sizeof path))
        return NULL;
    copy = ep_message_copy(message);
    mend(copy);
    return copy;
}
