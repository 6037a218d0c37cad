/* The YAML file: a mapping of options, at the top level or below their section's name. */
#include "options_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <yaml.h>

#define FILE_BYTES_MAX (1024 * 1024)

struct reader {
    struct ep_options *options;
    const char *path;
    yaml_document_t document;
    int seen[EP_OPTIONS_MAX]; /* line that set the option; 0: none */
    struct ep_error *error;
};

__attribute__((format(printf, 3, 4)))
static ep_status fail_at(const struct reader *r, size_t line, const char *format, ...)
{
    char text[EP_ERROR_TEXT_MAX];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return ep_error_set(r->error, EP_INVALID_ARGUMENT, "%s:%zu: %s", r->path, line, text);
}

static int line_of(const yaml_node_t *node)
{
    return (int)node->start_mark.line + 1;
}

static const char *text_of(const yaml_node_t *node)
{
    return (const char *)node->data.scalar.value;
}

static bool has_nul(const yaml_node_t *node)
{
    return strlen(text_of(node)) != node->data.scalar.length;
}

/* A value that was left out: "name:", "name: ~", "name: null". */
static bool is_null(const yaml_node_t *node)
{
    static const char *const nulls[] = { "", "~", "null", "Null", "NULL" };

    if (node->type != YAML_SCALAR_NODE || node->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
        return false;
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
        if (strcmp(text_of(node), nulls[i]) == 0)
            return true;
    return false;
}

/* ---- values --------------------------------------------------------------------- */

static ep_status set_scalar(struct reader *r, const struct ep_option *option, const yaml_node_t *value,
                            bool append)
{
    struct ep_option_source source = { { EP_ORIGIN_FILE, line_of(value) }, r->path };

    if (value->type != YAML_SCALAR_NODE)
        return ep_option_mismatch(option, value->type == YAML_MAPPING_NODE ? "a mapping" : "a list", &source,
                                  r->error);
    if (is_null(value))
        return ep_option_mismatch(option, "without a value", &source, r->error);
    if (has_nul(value))
        return ep_option_mismatch(option, "text with a NUL", &source, r->error);
    return ep_option_set(r->options, option, text_of(value), append, &source, r->error);
}

static ep_status set_list(struct reader *r, const struct ep_option *option, const yaml_node_t *value)
{
    struct ep_option_source source = { { EP_ORIGIN_FILE, line_of(value) }, r->path };
    ep_status status = ep_option_set(r->options, option, "", false, &source, r->error);

    for (yaml_node_item_t *item = value->data.sequence.items.start;
         status == EP_OK && item < value->data.sequence.items.top; item++)
        status = set_scalar(r, option, yaml_document_get_node(&r->document, *item), true);
    return status;
}

static ep_status set_value(struct reader *r, const struct ep_option *option, const yaml_node_t *value)
{
    bool list = option->type == EP_TYPE_UIDS || option->type == EP_TYPE_GIDS;

    if (list && value->type == YAML_SEQUENCE_NODE)
        return set_list(r, option, value);
    return set_scalar(r, option, value, false);
}

/* ---- keys ----------------------------------------------------------------------- */

static bool is_section(const char *name)
{
    for (size_t i = 0; i < ep_options_count; i++)
        if (strcmp(ep_options_table[i].section, name) == 0)
            return true;
    return false;
}

static ep_status unknown_key(const struct reader *r, const yaml_node_t *key)
{
    const char *name = text_of(key);
    const char *closest = ep_option_closest(name, strlen(name));

    return fail_at(r, (size_t)line_of(key), "there is no option %.100s%s%s%s", name,
                   closest ? "; did you mean " : "", closest ? closest : "", closest ? "?" : "");
}

static ep_status read_option(struct reader *r, const char *section, const yaml_node_t *key,
                             const yaml_node_t *value)
{
    const char *name = text_of(key);
    const struct ep_option *option = ep_option_find(name, strlen(name));
    int *seen;

    if (!option)
        return unknown_key(r, key);
    if (option->flags & EP_OPTION_NO_FILE)
        return fail_at(r, (size_t)line_of(key), "%s cannot be set in a file: use a flag or the environment",
                       name);
    if (section && strcmp(section, option->section) != 0)
        return fail_at(r, (size_t)line_of(key), "%s is not in section %s: it belongs in section %s or at the "
                       "top level", name, section, option->section);
    seen = &r->seen[option - ep_options_table];
    if (*seen)
        return fail_at(r, (size_t)line_of(key), "%s is given twice, first in line %d", name, *seen);
    *seen = line_of(key);
    return set_value(r, option, value);
}

static ep_status read_mapping(struct reader *r, const char *section, const yaml_node_t *mapping);

static ep_status read_section(struct reader *r, const yaml_node_t *key, const yaml_node_t *value)
{
    if (is_null(value)) /* every line of it is a comment */
        return EP_OK;
    if (value->type != YAML_MAPPING_NODE)
        return fail_at(r, (size_t)line_of(value), "section %s must be a mapping of options", text_of(key));
    return read_mapping(r, text_of(key), value);
}

/* libyaml lets a key stand twice in one mapping. */
static ep_status check_twice(struct reader *r, const yaml_node_t *mapping, const yaml_node_pair_t *pair)
{
    const yaml_node_t *key = yaml_document_get_node(&r->document, pair->key);

    for (const yaml_node_pair_t *p = mapping->data.mapping.pairs.start; p < pair; p++) {
        const yaml_node_t *other = yaml_document_get_node(&r->document, p->key);

        if (strcmp(text_of(other), text_of(key)) == 0)
            return fail_at(r, (size_t)line_of(key), "%.100s is given twice, first in line %d", text_of(key),
                           line_of(other));
    }
    return EP_OK;
}

static ep_status read_pair(struct reader *r, const char *section, const yaml_node_t *mapping,
                           const yaml_node_pair_t *pair)
{
    const yaml_node_t *key = yaml_document_get_node(&r->document, pair->key);
    const yaml_node_t *value = yaml_document_get_node(&r->document, pair->value);
    ep_status status;

    if (key->type != YAML_SCALAR_NODE || has_nul(key))
        return fail_at(r, (size_t)line_of(key), "a key must be the name of an option or section");
    status = check_twice(r, mapping, pair);
    if (status != EP_OK)
        return status;
    if (!section && is_section(text_of(key)))
        return read_section(r, key, value);
    return read_option(r, section, key, value);
}

static ep_status read_mapping(struct reader *r, const char *section, const yaml_node_t *mapping)
{
    ep_status status = EP_OK;

    for (const yaml_node_pair_t *pair = mapping->data.mapping.pairs.start;
         status == EP_OK && pair < mapping->data.mapping.pairs.top; pair++)
        status = read_pair(r, section, mapping, pair);
    return status;
}

/* ---- the file ------------------------------------------------------------------- */

static ep_status not_yaml(const struct reader *r, const yaml_parser_t *parser)
{
    const char *context = parser->context ? parser->context : "";

    if (parser->error == YAML_READER_ERROR)
        return ep_error_set(r->error, EP_INVALID_ARGUMENT, "%s: not valid YAML: %s at byte %zu", r->path,
                            parser->problem, parser->problem_offset);
    if (parser->error == YAML_MEMORY_ERROR)
        return ep_error_set(r->error, EP_NO_MEMORY, "%s: out of memory", r->path);
    return fail_at(r, parser->problem_mark.line + 1, "not valid YAML: %s%s%s",
                   parser->problem ? parser->problem : "?", *context ? " " : "", context);
}

static ep_status read_document(struct reader *r)
{
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);

    if (!root || is_null(root)) /* nothing but comments */
        return EP_OK;
    if (root->type != YAML_MAPPING_NODE)
        return fail_at(r, (size_t)line_of(root), "must be a mapping of options, such as \"host-ranks: 4\"");
    return read_mapping(r, NULL, root);
}

static ep_status check_end(struct reader *r, yaml_parser_t *parser)
{
    yaml_document_t second;
    const yaml_node_t *root;
    ep_status status = EP_OK;

    if (!yaml_parser_load(parser, &second))
        return not_yaml(r, parser);
    root = yaml_document_get_root_node(&second);
    if (root)
        status = fail_at(r, (size_t)line_of(root), "a second document begins here: only one is read");
    yaml_document_delete(&second);
    return status;
}

static ep_status parse(struct reader *r, FILE *file)
{
    yaml_parser_t parser;
    ep_status status;

    if (!yaml_parser_initialize(&parser))
        return ep_error_set(r->error, EP_NO_MEMORY, "%s: out of memory", r->path);
    yaml_parser_set_input_file(&parser, file);
    if (yaml_parser_load(&parser, &r->document)) {
        status = read_document(r);
        if (status == EP_OK && yaml_document_get_root_node(&r->document))
            status = check_end(r, &parser);
        yaml_document_delete(&r->document);
    } else {
        status = not_yaml(r, &parser);
    }
    yaml_parser_delete(&parser);
    return status;
}

/* Only a regular file: reading anything else could block, now or at the next SIGHUP. */
static ep_status open_file(const char *path, FILE **file, struct ep_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;

    if (fd < 0 || fstat(fd, &info) != 0) {
        ep_status status = ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);

        if (fd >= 0)
            close(fd);
        return status;
    }
    *file = NULL;
    if (!S_ISREG(info.st_mode))
        ep_error_set(error, EP_INVALID_ARGUMENT, "cannot read %s: it is %s, not a file", path,
                     S_ISDIR(info.st_mode) ? "a directory" : "a device or pipe");
    else if (info.st_size > FILE_BYTES_MAX)
        ep_error_set(error, EP_INVALID_ARGUMENT, "cannot read %s: it has more than %d bytes", path,
                     FILE_BYTES_MAX);
    else if (!(*file = fdopen(fd, "r")))
        ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);
    if (*file)
        return EP_OK;
    close(fd);
    return EP_INVALID_ARGUMENT;
}

ep_status ep_options_read_file(struct ep_options *options, const char *path, struct ep_error *error)
{
    struct reader r = { .options = options, .path = path, .error = error };
    FILE *file = NULL;
    ep_status status = open_file(path, &file, error);

    if (status != EP_OK)
        return status;
    status = parse(&r, file);
    fclose(file);
    return status;
}
