#include "spec.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_json.h"
#include "ep_secret.h"
#include "yaml_json.h"

enum { MAX_FILE_BYTES = 16 << 20 };

/* ---- files ----------------------------------------------------------------------- */

static ep_status read_all(int fd, const char *file, char **out, size_t *size, struct ep_error *error)
{
    size_t room = 64 << 10, used = 0;
    char *text = malloc(room + 1);
    ssize_t n = 0;

    while (text && used <= MAX_FILE_BYTES && (n = read(fd, text + used, room - used)) > 0) {
        used += (size_t)n;
        if (used == room) {
            char *grown = realloc(text, 2 * room + 1);

            if (!grown)
                free(text);
            text = grown;
            room *= 2;
        }
    }
    if (!text)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    if (n < 0 || used > MAX_FILE_BYTES) {
        free(text);
        return n < 0 ? ep_error_errno(error, EP_INVALID_ARGUMENT, "%s: cannot read", file)
                     : ep_error_set(error, EP_INVALID_ARGUMENT, "%s: has more than 16 MiB", file);
    }
    text[used] = '\0';
    *out = text;
    *size = used;
    return EP_OK;
}

ep_status ep_spec_read_file(const char *file, char **out, size_t *size, struct ep_error *error)
{
    if (strcmp(file, "-") == 0)
        return read_all(STDIN_FILENO, "standard input", out, size, error);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "%s: cannot open", file);
    ep_status status = read_all(fd, file, out, size, error);
    close(fd);
    return status;
}

/* ---- forms that the schema does not have ------------------------------------------- */

static ep_status enum_value(const ProtobufCEnumDescriptor *type, const char *field, json_t *value,
                            json_t **out, struct ep_error *error)
{
    char known[256];
    int number;

    if (!json_is_string(value)) {
        *out = json_incref(value); /* a number is the schema's business */
        return EP_OK;
    }
    if (!ep_text_parse_enum(type, json_string_value(value), &number)) {
        ep_text_enum_values(type, ", ", known, sizeof known);
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is '%s': must be one of %s", field,
                            json_string_value(value), known);
    }
    *out = json_string(protobuf_c_enum_descriptor_get_value(type, number)->name);
    return EP_OK;
}

static ep_status fix_enums(json_t *object, const ProtobufCFieldDescriptor *field, struct ep_error *error)
{
    json_t *value = json_object_get(object, field->name), *fixed = NULL, *item;
    ep_status status = EP_OK;
    char known[256];
    size_t i;

    if (field->label == PROTOBUF_C_LABEL_REPEATED && !json_is_array(value)) {
        ep_text_enum_values(field->descriptor, ", ", known, sizeof known);
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: must be a list, as in [%s]", field->name, known);
    }
    if (!json_is_array(value)) {
        status = enum_value(field->descriptor, field->name, value, &fixed, error);
    } else {
        fixed = json_array();
        json_array_foreach(value, i, item)
        {
            json_t *one = NULL;

            status = enum_value(field->descriptor, field->name, item, &one, error);
            if (status != EP_OK)
                break;
            json_array_append_new(fixed, one);
        }
    }
    if (status == EP_OK)
        json_object_set(object, field->name, fixed);
    json_decref(fixed);
    return status;
}

static ep_status fix_bytes(json_t *object, const char *field, struct ep_error *error)
{
    const char *text = json_string_value(json_object_get(object, field));
    uint64_t bytes;

    if (!text)
        return EP_OK;
    if (!ep_text_parse_size(text, &bytes))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is '%s': must be a size, as in 64MiB", field,
                            text);
    json_object_set_new(object, field, json_string(ep_text_u64(bytes).s));
    return EP_OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n >= m && strcmp(text + n - m, end) == 0;
}

/* The names of proto3's JSON, topK for top_k, become the schema's. */
static void rename_camel(json_t *object, const char *field)
{
    char camel[64];
    size_t n = 0;

    for (const char *c = field; *c && n + 1 < sizeof camel; c++) {
        if (*c == '_' && c[1])
            camel[n++] = (char)toupper((unsigned char)*++c);
        else
            camel[n++] = *c;
    }
    camel[n] = '\0';
    if (strcmp(camel, field) != 0 && json_object_get(object, camel) && !json_object_get(object, field)) {
        json_object_set(object, field, json_object_get(object, camel));
        json_object_del(object, camel);
    }
}

static ep_status check_names(const json_t *object, const ProtobufCMessageDescriptor *type,
                             struct ep_error *error)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, key, value) if (
        !protobuf_c_message_descriptor_get_field_by_name(
            type, key)) return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: there is no such field", key);
    return EP_OK;
}

/* Short enum names and sizes with a unit, in the object's own fields. */
static ep_status fix_fields(json_t *object, const ProtobufCMessageDescriptor *type, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (unsigned i = 0; status == EP_OK && i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];

        rename_camel(object, field->name);
        if (!json_object_get(object, field->name))
            continue;
        if (json_is_null(json_object_get(object, field->name)))
            json_object_del(object, field->name); /* "arena_bytes:" without a value: not named */
        else if (field->type == PROTOBUF_C_TYPE_ENUM)
            status = fix_enums(object, field, error);
        else if (ends_with(field->name, "_bytes"))
            status = fix_bytes(object, field->name, error);
    }
    return status == EP_OK ? check_names(object, type, error) : status;
}

/* ---- placement ------------------------------------------------------------------- */

static json_t *home(json_t *expert, size_t rank)
{
    json_t *one = json_object();

    json_object_set(one, "expert", expert);
    json_object_set_new(one, "rank", json_integer((json_int_t)rank));
    return one;
}

/* [[experts of rank 0], [experts of rank 1], ...] or [{expert, rank}, ...] */
static ep_status homes_of_array(const json_t *array, json_t **out, struct ep_error *error)
{
    json_t *homes = json_array(), *item, *expert;
    size_t i, j;

    json_array_foreach(array, i, item)
    {
        if (json_is_object(item)) {
            json_array_append(homes, item);
        } else if (json_is_array(item)) {
            json_array_foreach(item, j, expert)
            {
                json_array_append_new(homes, home(expert, i));
            }
        } else {
            json_decref(homes);
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "placement[%zu]: must be {expert, rank} or the list of a rank's experts", i);
        }
    }
    *out = json_object();
    json_object_set_new(*out, "homes", homes);
    return EP_OK;
}

static bool is_placement_word(const char *text)
{
    return !strcmp(text, "contiguous") || !strcmp(text, "by-load") || !strcmp(text, "pack") || !strcmp(text, "spread");
}

/* A word says either which experts ranks hold or which nodes they are on. */
static json_t *placement_of_word(const char *word)
{
    json_t *object = json_object();
    const bool nodes = !strcmp(word, "pack") || !strcmp(word, "spread");

    json_object_set_new(object, nodes ? "nodes" : "strategy", json_string(word));
    return object;
}

/* Homes that are listed are meant. */
static void imply_explicit(json_t *placement)
{
    if (json_array_size(json_object_get(placement, "homes")) > 0 && !json_object_get(placement, "strategy"))
        json_object_set_new(placement, "strategy", json_string("PLACEMENT_STRATEGY_EXPLICIT"));
    if (json_array_size(json_object_get(placement, "ranks")) > 0 && !json_object_get(placement, "nodes"))
        json_object_set_new(placement, "nodes", json_string("NODE_STRATEGY_EXPLICIT"));
}

ep_status ep_spec_placement(const json_t *json, json_t **out, struct ep_error *error)
{
    const char *text = json_string_value(json);
    json_t *object = NULL;
    ep_status status = EP_OK;

    if (text) {
        object = placement_of_word(text);
    } else if (json_is_array(json)) {
        status = homes_of_array(json, &object, error);
    } else if (json_is_object(json)) {
        object = json_deep_copy(json);
    } else {
        status =
            ep_error_set(error, EP_INVALID_ARGUMENT,
                         "placement: must be 'contiguous', 'by-load', 'pack', 'spread', a list or an object");
    }
    if (status != EP_OK)
        return status;
    status = fix_fields(object, &ep__v1__placement__descriptor, error);
    if (status != EP_OK) {
        json_decref(object);
        return ep_error_prefix(error, "placement");
    }
    imply_explicit(object);
    *out = object;
    return EP_OK;
}

/* ---- a file -------------------------------------------------------------------------- */

static ep_status fix_spec(json_t *spec, struct ep_error *error)
{
    json_t *placement = NULL;
    ep_status status = fix_fields(spec, &ep__v1__group_spec__descriptor, error);

    if (status != EP_OK || !json_object_get(spec, "placement"))
        return status;
    status = ep_spec_placement(json_object_get(spec, "placement"), &placement, error);
    if (status == EP_OK)
        json_object_set_new(spec, "placement", placement);
    return status;
}

/* A Group message has its spec in "spec"; the rest of it but the name is the server's. */
static ep_status unwrap(json_t *document, char *name, size_t name_size, json_t **out, struct ep_error *error)
{
    json_t *spec = json_object_get(document, "spec");
    const json_t *given = json_object_get(document, "name");
    ep_status status;

    name[0] = '\0';
    if (!json_is_object(document))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "must be an object with the fields of a group's spec");
    if (json_is_null(given)) /* "name:" without a value: not named */
        given = NULL;
    if (!spec && !given) {
        *out = json_incref(document);
        return EP_OK;
    }
    status = check_names(document, &ep__v1__group__descriptor, error);
    if (status != EP_OK)
        return status;
    if (!json_is_object(spec))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "spec: must be an object");
    if (given && !json_is_string(given))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "name: must be a string, in quotes if it would be something else");
    if (given)
        snprintf(name, name_size, "%s", json_string_value(given));
    *out = json_incref(spec);
    return EP_OK;
}

ep_status ep_spec_parse(const char *text, size_t size, const char *file, char *name, size_t name_size,
                        json_t **out, struct ep_error *error)
{
    json_t *document = NULL, *spec = NULL;
    ep_status status = ep_yaml_parse(text, size, file, &document, error);

    if (status != EP_OK)
        return status;
    status = unwrap(document, name, name_size, &spec, error);
    json_decref(document);
    if (status == EP_OK)
        status = fix_spec(spec, error);
    if (status == EP_OK) { /* what the schema has to say about it, while we know the file */
        Ep__V1__GroupSpec *message = NULL;

        status = ep_spec_message(spec, &message, error);
        if (status == EP_OK)
            protobuf_c_message_free_unpacked(&message->base, NULL);
    }
    if (status != EP_OK) {
        json_decref(spec);
        return ep_error_prefix(error, "%s", file);
    }
    *out = spec;
    return EP_OK;
}

static ep_status spec_of_file(const char *file, char *name, size_t name_size, json_t **out,
                              struct ep_error *error)
{
    char *text;
    size_t size;
    ep_status status = ep_spec_read_file(file, &text, &size, error);

    if (status != EP_OK)
        return status;
    status = ep_spec_parse(text, size, strcmp(file, "-") == 0 ? "standard input" : file, name, name_size, out,
                           error);
    free(text);
    return status;
}

/* ---- flags ----------------------------------------------------------------------------- */

static json_t *enums_of_flag(const struct ep_flag *flag, const char *text)
{
    json_t *array = json_array();
    char one[64];
    int value;

    for (const char *p = text;; p++) {
        size_t length = strcspn(p, ",");

        snprintf(one, sizeof one, "%.*s", (int)length, p);
        if (ep_text_parse_enum(flag->type, one, &value))
            json_array_append_new(array,
                                  json_string(protobuf_c_enum_descriptor_get_value(flag->type, value)->name));
        p += length;
        if (!*p)
            return array;
    }
}

static ep_status placement_of_flag(const char *text, json_t **out, struct ep_error *error)
{
    json_t *document = NULL;
    char *file_text;
    size_t size;
    ep_status status;

    if (is_placement_word(text)) {
        document = json_string(text);
    } else if (strcmp(text, "-") != 0 && access(text, F_OK) != 0 && errno == ENOENT) {
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--placement is '%s': must be pack, spread, contiguous, by-load or "
                            "the name of a file, and there is no such file", text);
    } else {
        status = ep_spec_read_file(text, &file_text, &size, error);
        if (status == EP_OK) {
            status = ep_yaml_parse(file_text, size, text, &document, error);
            free(file_text);
        }
        if (status != EP_OK)
            return ep_error_prefix(error, "--placement");
    }
    status = ep_spec_placement(document, out, error);
    json_decref(document);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "%s", text);
}

static ep_status token_of_flag(const char *file, json_t **out, struct ep_error *error)
{
    char token[EP_ATTACH_TOKEN_MAX + 1];
    ep_status status = ep_secret_read(!strcmp(file, "-") ? "/dev/stdin" : file, token, sizeof token, error);

    if (status != EP_OK)
        return ep_error_prefix(error, "--attach-token-file");
    *out = json_pack("{s:s}", "token", token);
    explicit_bzero(token, sizeof token);
    return *out ? EP_OK
                : ep_error_set(error, EP_INVALID_ARGUMENT, "--attach-token-file: the first line of %s is no UTF-8", file);
}

static ep_status file_of_flag(const struct ep_flag_value *value, json_t **out, struct ep_error *error)
{
    if (strcmp(value->flag->field, "attach_token") == 0)
        return token_of_flag(value->text, out, error);
    return placement_of_flag(value->text, out, error);
}

static ep_status set_from_flag(json_t *spec, const struct ep_flag_value *value, struct ep_error *error)
{
    json_t *json = NULL;
    uint64_t number = 0;
    int choice = 0;

    switch (value->flag->kind) {
    case EP_FLAG_U32:
        (void)ep_text_parse_u64(value->text, UINT32_MAX, &number);
        json = json_integer((json_int_t)number);
        break;
    case EP_FLAG_SIZE:
        (void)ep_text_parse_size(value->text, &number);
        json = json_string(ep_text_u64(number).s);
        break;
    case EP_FLAG_ENUMS: json = enums_of_flag(value->flag, value->text); break;
    case EP_FLAG_ENUM:
    case EP_FLAG_CHOICE:
        (void)ep_text_parse_enum(value->flag->type, value->text, &choice);
        json = json_string(protobuf_c_enum_descriptor_get_value(value->flag->type, choice)->name);
        break;
    case EP_FLAG_FILE: {
        ep_status status = file_of_flag(value, &json, error);

        if (status != EP_OK)
            return status;
        break;
    }
    case EP_FLAG_BOOL: json = json_object(); break; /* named, and nothing of it: it is taken away */
    default: return EP_OK; /* labels come later */
    }
    json_object_set_new(spec, value->flag->field, json);
    return EP_OK;
}

ep_status ep_spec_read(const struct ep_invocation *invocation, char *name, size_t name_size, json_t **out,
                       struct ep_error *error)
{
    const char *file = ep_invocation_text(invocation, "file");
    json_t *spec = NULL;
    ep_status status = EP_OK;

    name[0] = '\0';
    if (ep_invocation_given(invocation, "attach-token-file") && ep_invocation_given(invocation, "no-attach-token"))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--no-attach-token: with --attach-token-file there is one; give "
                            "one of the two");
    if (file)
        status = spec_of_file(file, name, name_size, &spec, error);
    else
        spec = json_object();
    for (size_t i = 0; status == EP_OK && i < invocation->n_values; i++)
        if (invocation->values[i].flag->field)
            status = set_from_flag(spec, &invocation->values[i], error);
    if (status == EP_OK)
        *out = spec;
    else
        json_decref(spec);
    return status;
}

bool ep_spec_labels(const struct ep_invocation *invocation, json_t *labels)
{
    bool any = false;
    char key[256];

    for (size_t i = 0; i < invocation->n_values; i++) {
        const struct ep_flag_value *value = &invocation->values[i];
        const char *equals = strchr(value->text, '=');

        if (value->flag->kind != EP_FLAG_LABEL)
            continue;
        any = true;
        snprintf(key, sizeof key, "%.*s",
                 (int)(equals ? (size_t)(equals - value->text) : strlen(value->text) - 1), value->text);
        if (equals)
            json_object_set_new(labels, key, json_string(equals + 1));
        else
            json_object_del(labels, key);
    }
    return any;
}

ep_status ep_spec_message(const json_t *spec, Ep__V1__GroupSpec **out, struct ep_error *error)
{
    ProtobufCMessage *message = NULL;
    ep_status status = ep_json_to_message(spec, &ep__v1__group_spec__descriptor, &message, error);

    if (status == EP_OK)
        *out = (Ep__V1__GroupSpec *)message;
    return status;
}
