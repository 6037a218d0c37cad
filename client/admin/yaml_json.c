#include "yaml_json.h"

#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <yaml.h>

/* An alias is expanded where it stands, so small files could become large values. */
enum { MAX_DEPTH = 32, MAX_VALUES = 1000000 };

/* ---- reading ------------------------------------------------------------------- */

struct reader {
    yaml_document_t document;
    const char *name;
    unsigned values;
    struct ep_error *error;
};

static bool is_one_of(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strcasecmp(text, *words) == 0)
            return true;
    return false;
}

static bool parse_integer(const char *text, json_int_t *out)
{
    const char *digits = text + (*text == '-' || *text == '+');
    char *end;

    if (!isdigit((unsigned char)*digits))
        return false;
    errno = 0;
    *out = strtoll(text, &end, strncmp(digits, "0x", 2) == 0 ? 16 : 10);
    return errno == 0 && *end == '\0';
}

static bool parse_real(const char *text, double *out)
{
    char *end;

    if (strspn(text, "0123456789+-.eE") != strlen(text) || !strpbrk(text, "0123456789"))
        return false;
    *out = strtod(text, &end);
    return *end == '\0';
}

/* The core schema's reading of a plain scalar. */
static json_t *plain_scalar(const char *text)
{
    static const char *const nulls[] = { "", "~", "null", NULL };
    json_int_t integer;
    double real;

    if (is_one_of(text, nulls))
        return json_null();
    if (strcasecmp(text, "true") == 0)
        return json_true();
    if (strcasecmp(text, "false") == 0)
        return json_false();
    if (parse_integer(text, &integer))
        return json_integer(integer);
    if (parse_real(text, &real))
        return json_real(real);
    return json_string(text);
}

static ep_status wrong(struct reader *reader, const yaml_node_t *node, const char *what)
{
    return ep_error_set(reader->error, EP_INVALID_ARGUMENT, "%s:%zu:%zu: %s", reader->name,
                        node->start_mark.line + 1, node->start_mark.column + 1, what);
}

static ep_status read_node(struct reader *reader, int index, int depth, json_t **out);

static ep_status read_sequence(struct reader *reader, const yaml_node_t *node, int depth, json_t *array)
{
    ep_status status = EP_OK;
    json_t *item;

    for (yaml_node_item_t *i = node->data.sequence.items.start; i < node->data.sequence.items.top; i++) {
        status = read_node(reader, *i, depth + 1, &item);
        if (status != EP_OK)
            break;
        json_array_append_new(array, item);
    }
    return status;
}

static ep_status read_mapping(struct reader *reader, const yaml_node_t *node, int depth, json_t *object)
{
    ep_status status;
    json_t *value;

    for (yaml_node_pair_t *i = node->data.mapping.pairs.start; i < node->data.mapping.pairs.top; i++) {
        const yaml_node_t *key = yaml_document_get_node(&reader->document, i->key);
        const char *name = key->type == YAML_SCALAR_NODE ? (const char *)key->data.scalar.value : NULL;

        if (!name)
            return wrong(reader, key, "a key must be a scalar");
        if (json_object_get(object, name))
            return wrong(reader, key, "this key is there twice");
        status = read_node(reader, i->value, depth + 1, &value);
        if (status != EP_OK)
            return status;
        if (json_object_set_new(object, name, value) != 0)
            return wrong(reader, key, "this key is no UTF-8");
    }
    return EP_OK;
}

static ep_status read_node(struct reader *reader, int index, int depth, json_t **out)
{
    const yaml_node_t *node = yaml_document_get_node(&reader->document, index);
    const char *scalar = (const char *)node->data.scalar.value;
    ep_status status = EP_OK;
    json_t *value = NULL;

    if (depth > MAX_DEPTH || ++reader->values > MAX_VALUES)
        return wrong(reader, node, "too deep or too large");
    if (node->type == YAML_SEQUENCE_NODE) {
        value = json_array();
        status = read_sequence(reader, node, depth, value);
    } else if (node->type == YAML_MAPPING_NODE) {
        value = json_object();
        status = read_mapping(reader, node, depth, value);
    } else {
        value =
            node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE ? plain_scalar(scalar) : json_string(scalar);
    }
    if (!value && status == EP_OK)
        return wrong(reader, node, "this is no UTF-8");
    if (status != EP_OK)
        json_decref(value);
    else
        *out = value;
    return status;
}

static ep_status parser_error(const yaml_parser_t *parser, const char *name, struct ep_error *error)
{
    if (parser->error == YAML_READER_ERROR)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: byte %zu: %s", name, parser->problem_offset,
                            parser->problem);
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s:%zu:%zu: %s", name, parser->problem_mark.line + 1,
                        parser->problem_mark.column + 1, parser->problem ? parser->problem : "not YAML");
}

/* The one document of the parser; a second one is an error. */
static ep_status read_document(yaml_parser_t *parser, struct reader *reader, json_t **out)
{
    const yaml_node_t *root;
    yaml_document_t next;
    ep_status status;

    if (!yaml_parser_load(parser, &reader->document))
        return parser_error(parser, reader->name, reader->error);
    root = yaml_document_get_root_node(&reader->document);
    status = root ? read_node(reader, 1, 0, out)
                  : ep_error_set(reader->error, EP_INVALID_ARGUMENT, "%s: is empty", reader->name);
    yaml_document_delete(&reader->document);
    if (status != EP_OK)
        return status;
    if (!yaml_parser_load(parser, &next)) {
        status = parser_error(parser, reader->name, reader->error);
    } else {
        if (yaml_document_get_root_node(&next))
            status =
                ep_error_set(reader->error, EP_INVALID_ARGUMENT, "%s: must be one document", reader->name);
        yaml_document_delete(&next);
    }
    if (status != EP_OK)
        json_decref(*out);
    return status;
}

static ep_status parse_yaml(const char *text, size_t size, const char *name, json_t **out,
                            struct ep_error *error)
{
    struct reader reader = { .name = name, .error = error };
    yaml_parser_t parser;
    json_t *value = NULL;

    if (!yaml_parser_initialize(&parser))
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size);
    ep_status status = read_document(&parser, &reader, &value);
    yaml_parser_delete(&parser);
    if (status == EP_OK)
        *out = value;
    return status;
}

static bool named_json(const char *name)
{
    size_t length = strlen(name);

    return length > 5 && strcasecmp(name + length - 5, ".json") == 0;
}

ep_status ep_yaml_parse(const char *text, size_t size, const char *name, json_t **out, struct ep_error *error)
{
    size_t blank = strspn(text, " \t\r\n");
    json_error_t where;

    /* YAML may begin with a bracket too, so what JSON cannot read gets a second chance. */
    if (text[blank] == '{' || text[blank] == '[' || named_json(name)) {
        json_t *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);

        if (json) {
            *out = json;
            return EP_OK;
        }
        if (named_json(name))
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s:%d:%d: %s", name, where.line, where.column,
                                where.text);
    }
    return parse_yaml(text, size, name, out, error);
}

/* ---- writing ------------------------------------------------------------------- */

/*
 * Whether a reader, also one of YAML 1.1, takes the plain text for a string: it begins with a letter or
 * a slash and is none of the words that mean something.  libyaml quotes what cannot stand plain.
 */
static bool reads_as_string(const char *text)
{
    static const char *const words[] = { "y", "n", "yes", "no", "on", "off", "true", "false", "null", NULL };

    return (isalpha((unsigned char)*text) || *text == '/' || *text == '_') && !is_one_of(text, words);
}

static bool emit(yaml_emitter_t *emitter, int made, yaml_event_t *event)
{
    return made && yaml_emitter_emit(emitter, event);
}

static bool write_scalar(yaml_emitter_t *emitter, const char *text, bool is_string)
{
    bool plain = !is_string || reads_as_string(text);
    yaml_event_t event;

    return emit(emitter,
                yaml_scalar_event_initialize(
                    &event, NULL, NULL, (const unsigned char *)text, (int)strlen(text), plain, is_string,
                    plain ? YAML_PLAIN_SCALAR_STYLE : YAML_DOUBLE_QUOTED_SCALAR_STYLE),
                &event);
}

static bool write_value(yaml_emitter_t *emitter, const json_t *json);

static bool write_array(yaml_emitter_t *emitter, const json_t *json)
{
    bool flat = json_array_size(json) == 0 || !(json_is_object(json_array_get(json, 0)));
    yaml_event_t event;

    if (!emit(emitter,
              yaml_sequence_start_event_initialize(
                  &event, NULL, NULL, 1, flat ? YAML_FLOW_SEQUENCE_STYLE : YAML_BLOCK_SEQUENCE_STYLE),
              &event))
        return false;
    for (size_t i = 0; i < json_array_size(json); i++)
        if (!write_value(emitter, json_array_get(json, i)))
            return false;
    return emit(emitter, yaml_sequence_end_event_initialize(&event), &event);
}

static bool write_object(yaml_emitter_t *emitter, const json_t *json)
{
    yaml_event_t event;
    const char *key;
    json_t *value;

    if (!emit(emitter, yaml_mapping_start_event_initialize(&event, NULL, NULL, 1, YAML_BLOCK_MAPPING_STYLE),
              &event))
        return false;
    json_object_foreach((json_t *)(uintptr_t)json, key, value) if (!write_scalar(emitter, key, true) ||
                                                                   !write_value(emitter, value)) return false;
    return emit(emitter, yaml_mapping_end_event_initialize(&event), &event);
}

static bool write_value(yaml_emitter_t *emitter, const json_t *json)
{
    char number[40];

    switch (json_typeof(json)) {
    case JSON_OBJECT: return write_object(emitter, json);
    case JSON_ARRAY: return write_array(emitter, json);
    case JSON_STRING: return write_scalar(emitter, json_string_value(json), true);
    case JSON_INTEGER:
        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(json));
        return write_scalar(emitter, number, false);
    case JSON_REAL:
        snprintf(number, sizeof number, "%.15g", json_real_value(json));
        return write_scalar(emitter, number, false);
    case JSON_TRUE: return write_scalar(emitter, "true", false);
    case JSON_FALSE: return write_scalar(emitter, "false", false);
    case JSON_NULL: break;
    }
    return write_scalar(emitter, "null", false);
}

bool ep_yaml_write(const json_t *json, bool marked, FILE *out)
{
    yaml_emitter_t emitter;
    yaml_event_t event;

    if (!yaml_emitter_initialize(&emitter))
        return false;
    yaml_emitter_set_output_file(&emitter, out);
    yaml_emitter_set_unicode(&emitter, 1);
    yaml_emitter_set_width(&emitter, -1);
    bool good =
        emit(&emitter, yaml_stream_start_event_initialize(&event, YAML_UTF8_ENCODING), &event) &&
        emit(&emitter, yaml_document_start_event_initialize(&event, NULL, NULL, NULL, !marked), &event) &&
        write_value(&emitter, json) &&
        emit(&emitter, yaml_document_end_event_initialize(&event, 1), &event) &&
        emit(&emitter, yaml_stream_end_event_initialize(&event), &event) && yaml_emitter_flush(&emitter);
    yaml_emitter_delete(&emitter);
    return good;
}
