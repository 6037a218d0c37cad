/* Both directions walk the descriptor; what a field holds is decided in one switch each. */
#include "ep_json.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64

typedef ProtobufCFieldDescriptor field_t;
typedef ProtobufCMessageDescriptor type_t;

/* ---- what both directions know about fields ------------------------------------------ */

static size_t element_size(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_INT64: case PROTOBUF_C_TYPE_SINT64: case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64: case PROTOBUF_C_TYPE_FIXED64: case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING: case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    default:
        return 4;
    }
}

static bool in_oneof(const field_t *f)
{
    return (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0;
}

/* proto2's "optional"; has_x stands where a oneof has its case. */
static bool has_presence(const field_t *f)
{
    return f->label == PROTOBUF_C_LABEL_OPTIONAL && !in_oneof(f) && f->quantifier_offset != 0;
}

/* "max_tokens" -> "MaxTokens", as protoc names the entries of a map. */
static bool is_camel_of(const char *camel, size_t n, const char *snake)
{
    bool upper = true;
    size_t i = 0;

    for (; *snake; snake++) {
        char c = *snake;

        if (c == '_') {
            upper = true;
            continue;
        }
        if (upper && c >= 'a' && c <= 'z')
            c = (char)(c - 'a' + 'A');
        upper = false;
        if (i == n || camel[i++] != c)
            return false;
    }
    return i == n;
}

/* protobuf-c drops the map_entry option; protoc's name for the entry is as telling. */
static bool is_map(const type_t *type, const field_t *f)
{
    static const char tail[] = "Entry";
    const type_t *entry = f->descriptor;
    size_t n = strlen(type->name), length;
    const char *local;

    if (f->label != PROTOBUF_C_LABEL_REPEATED || f->type != PROTOBUF_C_TYPE_MESSAGE
        || entry->n_fields != 2 || strcmp(entry->fields[0].name, "key") != 0
        || strcmp(entry->fields[1].name, "value") != 0)
        return false;
    if (strncmp(entry->name, type->name, n) != 0 || entry->name[n] != '.')
        return false;
    local = entry->name + n + 1;
    length = strlen(local);
    return length > sizeof tail - 1 && strcmp(local + length - (sizeof tail - 1), tail) == 0
           && is_camel_of(local, length - (sizeof tail - 1), f->name);
}

/* ---- to JSON ------------------------------------------------------------------------- */

static const char base64_digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static json_t *bytes_to_json(const ProtobufCBinaryData *bytes)
{
    size_t length = (bytes->len + 2) / 3 * 4, o = 0;
    char *text = malloc(length + 1);
    json_t *json;

    if (!text)
        return NULL;
    for (size_t i = 0; i < bytes->len; i += 3) {
        size_t left = bytes->len - i;
        uint32_t v = (uint32_t)bytes->data[i] << 16;

        if (left > 1)
            v |= (uint32_t)bytes->data[i + 1] << 8;
        if (left > 2)
            v |= bytes->data[i + 2];
        text[o++] = base64_digits[v >> 18];
        text[o++] = base64_digits[(v >> 12) & 63];
        text[o++] = left > 1 ? base64_digits[(v >> 6) & 63] : '=';
        text[o++] = left > 2 ? base64_digits[v & 63] : '=';
    }
    json = json_stringn(text, length);
    free(text);
    return json;
}

/* protobuf-c does not check UTF-8 and JSON must have it: what is no ASCII gives way. */
static json_t *broken_string_to_json(const char *text)
{
    static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */
    char *fixed = malloc(strlen(text) * (sizeof replacement - 1) + 1), *p = fixed;
    json_t *json;

    if (!fixed)
        return NULL;
    for (; *text; text++) {
        if ((unsigned char)*text < 0x80) {
            *p++ = *text;
        } else {
            memcpy(p, replacement, sizeof replacement - 1);
            p += sizeof replacement - 1;
        }
    }
    *p = '\0';
    json = json_string(fixed);
    free(fixed);
    return json;
}

static json_t *string_to_json(const char *text)
{
    json_t *json = json_string(text ? text : "");

    return json ? json : broken_string_to_json(text ? text : "");
}

static json_t *real_to_json(double d)
{
    if (isnan(d))
        return json_string("NaN");
    if (isinf(d))
        return json_string(d > 0 ? "Infinity" : "-Infinity");
    return json_real(d);
}

/* The shortest decimal that is this float, so that 0.1f reads 0.1. */
static double widen(float f)
{
    char text[32];
    double d;

    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        d = strtod(text, NULL);
        if ((float)d >= f && (float)d <= f)
            return d;
    }
    return (double)f;
}

static json_t *uint64_to_json(uint64_t v)
{
    char text[24];

    if (v <= INT64_MAX)
        return json_integer((json_int_t)v);
    snprintf(text, sizeof text, "%" PRIu64, v);
    return json_string(text);
}

static json_t *enum_to_json(const ProtobufCEnumDescriptor *type, int v)
{
    const ProtobufCEnumValue *value = protobuf_c_enum_descriptor_get_value(type, v);

    return value ? json_string(value->name) : json_integer(v);
}

static json_t *value_to_json(const field_t *f, const void *p)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32: case PROTOBUF_C_TYPE_SINT32: case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)p);
    case PROTOBUF_C_TYPE_UINT32: case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)p);
    case PROTOBUF_C_TYPE_INT64: case PROTOBUF_C_TYPE_SINT64: case PROTOBUF_C_TYPE_SFIXED64:
        return json_integer(*(const int64_t *)p);
    case PROTOBUF_C_TYPE_UINT64: case PROTOBUF_C_TYPE_FIXED64:
        return uint64_to_json(*(const uint64_t *)p);
    case PROTOBUF_C_TYPE_FLOAT:
        return real_to_json(widen(*(const float *)p));
    case PROTOBUF_C_TYPE_DOUBLE:
        return real_to_json(*(const double *)p);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)p);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_to_json(f->descriptor, *(const int *)p);
    case PROTOBUF_C_TYPE_STRING:
        return string_to_json(*(char *const *)p);
    case PROTOBUF_C_TYPE_BYTES:
        return bytes_to_json(p);
    case PROTOBUF_C_TYPE_MESSAGE:
        return *(ProtobufCMessage *const *)p ? ep_json_from_message(*(ProtobufCMessage *const *)p)
                                             : json_null();
    }
    return json_null();
}

static json_t *array_to_json(const field_t *f, const char *elements, size_t n)
{
    json_t *array = json_array();

    for (size_t i = 0; array && i < n; i++)
        if (json_array_append_new(array, value_to_json(f, elements + i * element_size(f->type))) != 0) {
            json_decref(array);
            return NULL;
        }
    return array;
}

/* Keys that are no strings become their decimal or true/false. */
static json_t *map_key(const field_t *f, const void *p)
{
    json_t *key = value_to_json(f, p);
    char text[24];

    if (json_is_integer(key)) {
        snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, json_integer_value(key));
    } else if (json_is_boolean(key)) {
        snprintf(text, sizeof text, "%s", json_is_true(key) ? "true" : "false");
    } else {
        return key;
    }
    json_decref(key);
    return json_string(text);
}

static json_t *map_to_json(const field_t *f, ProtobufCMessage *const *entries, size_t n)
{
    const field_t *fields = ((const type_t *)f->descriptor)->fields;
    json_t *object = json_object();

    for (size_t i = 0; object && i < n; i++) {
        const char *entry = (const char *)entries[i];
        json_t *key = map_key(&fields[0], entry + fields[0].offset);
        int result = key ? json_object_set_new(object, json_string_value(key),
                                               value_to_json(&fields[1], entry + fields[1].offset))
                         : -1;

        json_decref(key);
        if (result != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

static json_t *field_to_json(const ProtobufCMessage *message, const field_t *f)
{
    const char *base = (const char *)message, *p = base + f->offset;

    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        size_t n = *(const size_t *)(const void *)(base + f->quantifier_offset);
        const void *elements = *(void *const *)(const void *)p;

        return is_map(message->descriptor, f) ? map_to_json(f, elements, n)
                                              : array_to_json(f, elements, n);
    }
    if (has_presence(f) && f->type != PROTOBUF_C_TYPE_STRING && f->type != PROTOBUF_C_TYPE_MESSAGE
        && !*(const protobuf_c_boolean *)(const void *)(base + f->quantifier_offset))
        return json_null();
    return value_to_json(f, p);
}

json_t *ep_json_from_message(const ProtobufCMessage *message)
{
    const type_t *type = message->descriptor;
    json_t *object = json_object();

    for (unsigned i = 0; object && i < type->n_fields; i++) {
        const field_t *f = &type->fields[i];
        const char *base = (const char *)message;

        if (in_oneof(f) && *(const uint32_t *)(const void *)(base + f->quantifier_offset) != f->id)
            continue;
        if (json_object_set_new(object, f->name, field_to_json(message, f)) != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* ---- from JSON: where we are and what is wrong --------------------------------------- */

struct place {
    const struct place *up;
    const char *name;  /* NULL: an element */
    size_t index;
    unsigned depth;
    struct ep_error *error;
};

static size_t write_place(const struct place *at, char *text, size_t size)
{
    size_t n;
    int k;

    if (!at->up) {
        *text = '\0';
        return 0;
    }
    n = write_place(at->up, text, size);
    if (at->name)
        k = snprintf(text + n, size - n, "%s%s", n ? "." : "", at->name);
    else
        k = snprintf(text + n, size - n, "[%zu]", at->index);
    return k < 0 || (size_t)k >= size - n ? size - 1 : n + (size_t)k;
}

static ep_status complain(const struct place *at, const char *what)
{
    char path[160];

    if (write_place(at, path, sizeof path) == 0)
        return ep_error_set(at->error, EP_INVALID_ARGUMENT, "%s", what);
    return ep_error_set(at->error, EP_INVALID_ARGUMENT, "%s: %s", path, what);
}

static ep_status no_memory(const struct place *at)
{
    return ep_error_set(at->error, EP_NO_MEMORY, "out of memory");
}

static ep_status expected(const struct place *at, const char *what, const json_t *found)
{
    char text[200];
    char *dump;

    if (json_is_object(found) || json_is_array(found)) {
        snprintf(text, sizeof text, "expected %s, found %s", what,
                 json_is_object(found) ? "an object" : "an array");
        return complain(at, text);
    }
    dump = json_dumps(found, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
    if (dump && strlen(dump) > 60)
        snprintf(text, sizeof text, "expected %s, found %.56s...", what, dump);
    else
        snprintf(text, sizeof text, "expected %s, found %s", what, dump ? dump : "something else");
    free(dump);
    return complain(at, text);
}

/* ---- from JSON: scalars -------------------------------------------------------------- */

/* Integers come as such, as reals without a fraction, or as strings (proto3 JSON has all three). */
static bool read_signed(const json_t *json, int64_t *out)
{
    if (json_is_integer(json)) {
        *out = json_integer_value(json);
        return true;
    }
    if (json_is_real(json)) {
        double d = json_real_value(json);

        *out = (int64_t)(fabs(d) <= 0x1p53 ? d : 0);
        return fabs(d) <= 0x1p53 && !(floor(d) < d);
    }
    if (json_is_string(json)) {
        const char *text = json_string_value(json);
        char *end;

        errno = 0;
        *out = strtoll(text, &end, 10);
        return errno == 0 && end != text && *end == '\0' && (*text == '-' || (*text >= '0' && *text <= '9'));
    }
    return false;
}

static bool read_unsigned(const json_t *json, uint64_t *out)
{
    int64_t v;

    if (json_is_string(json)) {
        const char *text = json_string_value(json);
        char *end;

        errno = 0;
        *out = strtoull(text, &end, 10);
        return errno == 0 && *text >= '0' && *text <= '9' && *end == '\0';
    }
    if (!read_signed(json, &v) || v < 0)
        return false;
    *out = (uint64_t)v;
    return true;
}

static ep_status set_signed(const struct place *at, const json_t *json, void *p, bool wide)
{
    int64_t v;

    if (!read_signed(json, &v))
        return expected(at, "an integer", json);
    if (!wide && (v < INT32_MIN || v > INT32_MAX))
        return expected(at, "an integer of 32 bits", json);
    if (wide)
        *(int64_t *)p = v;
    else
        *(int32_t *)p = (int32_t)v;
    return EP_OK;
}

static ep_status set_unsigned(const struct place *at, const json_t *json, void *p, bool wide)
{
    uint64_t v;

    if (!read_unsigned(json, &v))
        return expected(at, "an unsigned integer", json);
    if (!wide && v > UINT32_MAX)
        return expected(at, "an unsigned integer of 32 bits", json);
    if (wide)
        *(uint64_t *)p = v;
    else
        *(uint32_t *)p = (uint32_t)v;
    return EP_OK;
}

static bool read_real(const json_t *json, double *out)
{
    static const struct { const char *name; double value; } words[] = {
        { "NaN", NAN }, { "Infinity", INFINITY }, { "-Infinity", -INFINITY },
    };

    if (json_is_number(json)) {
        *out = json_number_value(json);
        return true;
    }
    for (size_t i = 0; json_is_string(json) && i < sizeof words / sizeof *words; i++)
        if (strcmp(json_string_value(json), words[i].name) == 0) {
            *out = words[i].value;
            return true;
        }
    return false;
}

static ep_status set_real(const struct place *at, const json_t *json, const field_t *f, void *p)
{
    double d;

    if (!read_real(json, &d))
        return expected(at, "a number", json);
    if (f->type == PROTOBUF_C_TYPE_DOUBLE)
        *(double *)p = d;
    else
        *(float *)p = (float)d;
    return EP_OK;
}

static ep_status set_bool(const struct place *at, const json_t *json, void *p)
{
    if (!json_is_boolean(json))
        return expected(at, "true or false", json);
    *(protobuf_c_boolean *)p = json_is_true(json);
    return EP_OK;
}

static ep_status unknown_enum(const struct place *at, const json_t *json,
                              const ProtobufCEnumDescriptor *type)
{
    char text[240] = "one of ";
    size_t n = strlen(text);

    for (unsigned i = 0; i < type->n_values && n < sizeof text - 1; i++) {
        int k = snprintf(text + n, sizeof text - n, "%s%s", i ? ", " : "", type->values[i].name);

        n += k > 0 ? (size_t)k : 0;
    }
    return expected(at, text, json);
}

static ep_status set_enum(const struct place *at, const json_t *json, const field_t *f, void *p)
{
    const ProtobufCEnumDescriptor *type = f->descriptor;
    const ProtobufCEnumValue *value = NULL;

    if (json_is_string(json))
        value = protobuf_c_enum_descriptor_get_value_by_name(type, json_string_value(json));
    else if (json_is_integer(json) && json_integer_value(json) >= INT32_MIN
             && json_integer_value(json) <= INT32_MAX)
        value = protobuf_c_enum_descriptor_get_value(type, (int)json_integer_value(json));
    if (!value)
        return unknown_enum(at, json, type);
    *(int *)p = value->value;
    return EP_OK;
}

static ep_status set_string(const struct place *at, const json_t *json, void *p)
{
    char *copy;

    if (!json_is_string(json))
        return expected(at, "a string", json);
    if (strlen(json_string_value(json)) != json_string_length(json))
        return complain(at, "a string cannot hold the character U+0000");
    copy = strdup(json_string_value(json));
    if (!copy)
        return no_memory(at);
    *(char **)p = copy;
    return EP_OK;
}

static int base64_value(char c)
{
    const char *p;

    if (c == '-' || c == '_') /* the URL alphabet */
        return c == '-' ? 62 : 63;
    p = c ? strchr(base64_digits, c) : NULL;
    return p ? (int)(p - base64_digits) : -1;
}

static bool decode_base64(const char *text, size_t n, uint8_t *out, size_t *length)
{
    uint32_t bits = 0;
    unsigned count = 0;

    *length = 0;
    while (n > 0 && text[n - 1] == '=')
        n--;
    if (n % 4 == 1)
        return false;
    for (size_t i = 0; i < n; i++) {
        int v = base64_value(text[i]);

        if (v < 0)
            return false;
        bits = (bits << 6 | (uint32_t)v) & 0xffffffu;
        count += 6;
        if (count >= 8) {
            count -= 8;
            out[(*length)++] = (uint8_t)(bits >> count);
        }
    }
    return true;
}

static ep_status set_bytes(const struct place *at, const json_t *json, void *p)
{
    ProtobufCBinaryData *bytes = p;
    uint8_t *data;
    size_t length;

    if (!json_is_string(json))
        return expected(at, "bytes in base64", json);
    data = malloc(json_string_length(json) / 4 * 3 + 3);
    if (!data)
        return no_memory(at);
    if (!decode_base64(json_string_value(json), json_string_length(json), data, &length)) {
        free(data);
        return expected(at, "bytes in base64", json);
    }
    bytes->data = data;
    bytes->len = length;
    return EP_OK;
}

/* ---- from JSON: messages ------------------------------------------------------------- */

static ep_status read_message(const struct place *at, const json_t *json, const type_t *type,
                              ProtobufCMessage **out);

static ep_status set_value(const struct place *at, const json_t *json, const field_t *f, void *p)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32: case PROTOBUF_C_TYPE_SINT32: case PROTOBUF_C_TYPE_SFIXED32:
        return set_signed(at, json, p, false);
    case PROTOBUF_C_TYPE_INT64: case PROTOBUF_C_TYPE_SINT64: case PROTOBUF_C_TYPE_SFIXED64:
        return set_signed(at, json, p, true);
    case PROTOBUF_C_TYPE_UINT32: case PROTOBUF_C_TYPE_FIXED32:
        return set_unsigned(at, json, p, false);
    case PROTOBUF_C_TYPE_UINT64: case PROTOBUF_C_TYPE_FIXED64:
        return set_unsigned(at, json, p, true);
    case PROTOBUF_C_TYPE_FLOAT: case PROTOBUF_C_TYPE_DOUBLE:
        return set_real(at, json, f, p);
    case PROTOBUF_C_TYPE_BOOL:
        return set_bool(at, json, p);
    case PROTOBUF_C_TYPE_ENUM:
        return set_enum(at, json, f, p);
    case PROTOBUF_C_TYPE_STRING:
        return set_string(at, json, p);
    case PROTOBUF_C_TYPE_BYTES:
        return set_bytes(at, json, p);
    case PROTOBUF_C_TYPE_MESSAGE:
        return read_message(at, json, f->descriptor, p);
    }
    return complain(at, "a field of unknown type");
}

/* Room for n elements; the count grows as they become whole, so that a half can be freed. */
static ep_status make_room(const struct place *at, const field_t *f, ProtobufCMessage *message,
                           size_t n, char **elements, size_t **count)
{
    char *base = (char *)message;

    *count = (size_t *)(void *)(base + f->quantifier_offset);
    *elements = NULL;
    if (n == 0)
        return EP_OK;
    *elements = calloc(n, element_size(f->type));
    if (!*elements)
        return no_memory(at);
    *(char **)(void *)(base + f->offset) = *elements;
    return EP_OK;
}

static ep_status set_array(const struct place *at, const json_t *json, const field_t *f,
                           ProtobufCMessage *message)
{
    char *elements;
    size_t *count;
    ep_status status;

    if (!json_is_array(json))
        return expected(at, "an array", json);
    status = make_room(at, f, message, json_array_size(json), &elements, &count);
    for (size_t i = 0; status == EP_OK && i < json_array_size(json); i++) {
        struct place here = { at, NULL, i, at->depth, at->error };

        status = set_value(&here, json_array_get(json, i), f, elements + i * element_size(f->type));
        if (status == EP_OK)
            ++*count;
    }
    return status;
}

static ep_status set_map_key(const struct place *at, const char *key, const field_t *f, void *p)
{
    json_t *json = json_string(key);
    ep_status status;

    if (f->type == PROTOBUF_C_TYPE_BOOL && (strcmp(key, "true") == 0 || strcmp(key, "false") == 0)) {
        json_decref(json);
        json = json_boolean(*key == 't');
    }
    if (!json)
        return no_memory(at);
    status = set_value(at, json, f, p);
    json_decref(json);
    return status;
}

static ep_status new_message(const struct place *at, const type_t *type, ProtobufCMessage **out)
{
    *out = calloc(1, type->sizeof_message);
    if (!*out)
        return no_memory(at);
    protobuf_c_message_init(type, *out);
    return EP_OK;
}

static ep_status set_map(const struct place *at, const json_t *json, const field_t *f,
                         ProtobufCMessage *message)
{
    const type_t *type = f->descriptor;
    const char *key;
    json_t *value;
    char *elements;
    size_t *count;
    ep_status status;

    if (!json_is_object(json))
        return expected(at, "an object", json);
    status = make_room(at, f, message, json_object_size(json), &elements, &count);
    json_object_foreach((json_t *)(uintptr_t)json, key, value) {
        struct place here = { at, key, 0, at->depth, at->error };
        ProtobufCMessage *entry;

        if (status == EP_OK)
            status = new_message(&here, type, &entry);
        if (status != EP_OK)
            break;
        ((ProtobufCMessage **)(void *)elements)[(*count)++] = entry;
        status = set_map_key(&here, key, &type->fields[0], (char *)entry + type->fields[0].offset);
        if (status == EP_OK)
            status = set_value(&here, value, &type->fields[1],
                               (char *)entry + type->fields[1].offset);
    }
    return status;
}

static const char *name_of_id(const type_t *type, uint32_t id)
{
    const field_t *f = protobuf_c_message_descriptor_get_field(type, id);

    return f ? f->name : "?";
}

static ep_status set_oneof(const struct place *at, const json_t *json, const field_t *f,
                           ProtobufCMessage *message)
{
    uint32_t *which = (uint32_t *)(void *)((char *)message + f->quantifier_offset);
    ep_status status;

    if (*which != 0) {
        char text[160];

        snprintf(text, sizeof text, "cannot be given together with %s",
                 name_of_id(message->descriptor, *which));
        return complain(at, text);
    }
    status = set_value(at, json, f, (char *)message + f->offset);
    if (status == EP_OK)
        *which = f->id;
    return status;
}

static ep_status set_field(const struct place *at, const json_t *json, const field_t *f,
                           ProtobufCMessage *message)
{
    ep_status status;

    if (json_is_null(json)) /* the default, as if it were not there */
        return EP_OK;
    if (f->label == PROTOBUF_C_LABEL_REPEATED)
        return is_map(message->descriptor, f) ? set_map(at, json, f, message)
                                              : set_array(at, json, f, message);
    if (in_oneof(f))
        return set_oneof(at, json, f, message);
    status = set_value(at, json, f, (char *)message + f->offset);
    if (status == EP_OK && has_presence(f) && f->type != PROTOBUF_C_TYPE_STRING
        && f->type != PROTOBUF_C_TYPE_MESSAGE)
        *(protobuf_c_boolean *)(void *)((char *)message + f->quantifier_offset) = 1;
    return status;
}

static ep_status unknown_field(const struct place *at, const type_t *type)
{
    char text[280];
    size_t n = (size_t)snprintf(text, sizeof text, "no such field; allowed: ");

    if (type->n_fields == 0)
        return complain(at, "no such field; none is allowed here");
    for (unsigned i = 0; i < type->n_fields && n < sizeof text - 1; i++) {
        int k = snprintf(text + n, sizeof text - n, "%s%s", i ? ", " : "", type->fields[i].name);

        n += k > 0 ? (size_t)k : 0;
    }
    return complain(at, text);
}

/* "maxTokens" finds max_tokens: proto3 JSON readers take both. */
static bool is_lower_camel_of(const char *camel, const char *snake)
{
    for (; *snake; snake++) {
        char c = *snake;

        if (c == '_' && snake[1] >= 'a' && snake[1] <= 'z')
            c = (char)(*++snake - 'a' + 'A');
        if (*camel++ != c)
            return false;
    }
    return *camel == '\0';
}

static const field_t *find_field(const type_t *type, const char *name)
{
    const field_t *f = protobuf_c_message_descriptor_get_field_by_name(type, name);

    for (unsigned i = 0; !f && i < type->n_fields; i++)
        if (is_lower_camel_of(name, type->fields[i].name))
            f = &type->fields[i];
    return f;
}

static ep_status fill_message(const struct place *at, const json_t *json, const type_t *type,
                              ProtobufCMessage *message)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)json, key, value) {
        struct place here = { at, key, 0, at->depth, at->error };
        const field_t *f = find_field(type, key);
        ep_status status;

        if (!f)
            return unknown_field(&here, type);
        if (strcmp(f->name, key) != 0 && json_object_get(json, f->name))
            return complain(&here, "the field is given twice");
        status = set_field(&here, value, f, message);
        if (status != EP_OK)
            return status;
    }
    return EP_OK;
}

static ep_status read_message(const struct place *at, const json_t *json, const type_t *type,
                              ProtobufCMessage **out)
{
    struct place inside = *at;
    ProtobufCMessage *message;
    ep_status status;

    if (!json_is_object(json))
        return expected(at, "an object", json);
    if (++inside.depth > MAX_DEPTH)
        return complain(at, "nested too deeply");
    status = new_message(at, type, &message);
    if (status != EP_OK)
        return status;
    status = fill_message(&inside, json, type, message);
    if (status != EP_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
        return status;
    }
    *out = message;
    return EP_OK;
}

ep_status ep_json_to_message(const json_t *json, const ProtobufCMessageDescriptor *type,
                             ProtobufCMessage **out, struct ep_error *error)
{
    struct place root = { NULL, NULL, 0, 0, error };

    return read_message(&root, json, type, out);
}
