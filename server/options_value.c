/* Values of options: text to value and back.  No I/O but the lookup of user and group names. */
#include "options_private.h"

#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <jansson.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct unit {
    const char *name;
    uint64_t factor;
};

/* Largest first, so that formatting takes the largest that divides. */
static const struct unit byte_units[] = {
    { "TiB", 1ull << 40 }, { "GiB", 1ull << 30 }, { "MiB", 1ull << 20 }, { "KiB", 1ull << 10 },
    { "TB", 1000000000000ull }, { "GB", 1000000000ull }, { "MB", 1000000ull }, { "kB", 1000ull },
    { "B", 1 }, { NULL, 0 }
};
static const struct unit time_units[] = {
    { "h", 3600000 }, { "m", 60000 }, { "s", 1000 }, { "ms", 1 }, { NULL, 0 }
};

__attribute__((format(printf, 1, 2)))
static char *sentence(const char *format, ...)
{
    char *text = NULL;
    va_list args;

    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    va_end(args);
    return text;
}

/* ---- numbers ------------------------------------------------------------------ */

/* Digits only: no sign, no blanks, no base prefix.  *end is set behind them. */
static bool parse_digits(const char *text, int base, uint64_t *value, const char **end)
{
    char *stop;

    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    *value = strtoull(text, &stop, base);
    *end = stop;
    return errno == 0;
}

static bool parse_uint(const char *text, int base, uint64_t *value)
{
    const char *end;

    return parse_digits(text, base, value, &end) && *end == '\0';
}

static const struct unit *find_unit(const struct unit *units, const char *name)
{
    for (; units->name; units++)
        if (strcmp(units->name, name) == 0)
            return units;
    return NULL;
}

/* "512MiB": bare is the factor of a number without a unit, 0 when it needs one (but for 0). */
static bool parse_units(const char *text, const struct unit *units, uint64_t bare, uint64_t *value)
{
    const struct unit *unit;
    const char *end;
    uint64_t factor = bare;

    if (!parse_digits(text, 10, value, &end))
        return false;
    while (*end == ' ')
        end++;
    if (*end != '\0') {
        unit = find_unit(units, end);
        if (!unit)
            return false;
        factor = unit->factor;
    }
    if (factor == 0)
        return *value == 0;
    return !__builtin_mul_overflow(*value, factor, value);
}

static char *format_units(const struct unit *units, uint64_t value)
{
    const struct unit *unit = units;

    while (unit[1].name && (value == 0 || value % unit->factor != 0))
        unit++;
    if (value == 0 || unit->factor == 1)
        return sentence("%" PRIu64 "%s", value, units == time_units ? "ms" : "");
    return sentence("%" PRIu64 "%s", value / unit->factor, unit->name);
}

static bool parse_bool(const char *text, bool *value)
{
    static const char *const yes[] = { "true", "yes", "on", "1" };
    static const char *const no[] = { "false", "no", "off", "0" };

    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++) {
        if (strcasecmp(text, yes[i]) != 0 && strcasecmp(text, no[i]) != 0)
            continue;
        *value = strcasecmp(text, yes[i]) == 0;
        return true;
    }
    return false;
}

static bool parse_word(const char *const *words, const char *text, int *value)
{
    for (int i = 0; words[i]; i++) {
        if (strcmp(words[i], text) != 0)
            continue;
        *value = i;
        return true;
    }
    return false;
}

/* ---- text --------------------------------------------------------------------- */

/* What --print-config could not write so that it reads back: control characters, bad UTF-8. */
static bool is_printable(const char *text)
{
    json_t *string = json_string(text);

    json_decref(string);
    if (!string)
        return false;
    for (const unsigned char *p = (const unsigned char *)text; *p; p++)
        if (*p < 0x20 || *p == 0x7f || (*p == 0xc2 && p[1] < 0xa0))
            return false;
    return true;
}

/* HOST:PORT, the host in brackets when it has colons. */
static bool is_address(const char *text)
{
    const char *colon = strrchr(text, ':');
    uint64_t port;

    if (!colon || colon == text || !parse_uint(colon + 1, 10, &port) || port > 65535)
        return false;
    if (*text == '[')
        return colon[-1] == ']' && colon - text > 2;
    return memchr(text, ':', (size_t)(colon - text)) == NULL;
}

static bool parse_string(const struct ep_option *option, const char *text, char **field, char **why)
{
    char *copy;

    if (!is_printable(text)) {
        *why = sentence("it must be UTF-8 without control characters");
        return false;
    }
    if (option->type == EP_TYPE_ADDRESS && *text && !is_address(text))
        return false;
    copy = strdup(text);
    if (!copy)
        return false;
    free(*field);
    *field = copy;
    return true;
}

/* ---- users and groups ------------------------------------------------------------ */

static bool lookup_user(const char *name, uint32_t *id)
{
    struct passwd entry, *found = NULL;
    char buffer[16384];

    if (getpwnam_r(name, &entry, buffer, sizeof buffer, &found) != 0 || !found)
        return false;
    *id = found->pw_uid;
    return true;
}

static bool lookup_group(const char *name, uint32_t *id)
{
    struct group entry, *found = NULL;
    char buffer[16384];

    if (getgrnam_r(name, &entry, buffer, sizeof buffer, &found) != 0 || !found)
        return false;
    *id = found->gr_gid;
    return true;
}

static bool parse_id(const struct ep_option *option, const char *text, uint32_t *id, char **why)
{
    bool user = option->type == EP_TYPE_UIDS;
    uint64_t number;

    if (isdigit((unsigned char)*text)) {
        if (!parse_uint(text, 10, &number) || number >= UINT32_MAX)
            return false;
        *id = (uint32_t)number;
        return true;
    }
    if (user ? lookup_user(text, id) : lookup_group(text, id))
        return true;
    if (*text)
        *why = sentence("there is no %s \"%s\" here", user ? "user" : "group", text);
    return false;
}

static bool add_id(struct ep_id_list *list, uint32_t id)
{
    uint32_t *ids = realloc(list->ids, (list->n + 1) * sizeof *ids);

    if (!ids)
        return false;
    list->ids = ids;
    list->ids[list->n++] = id;
    return true;
}

static char *trim(char *text)
{
    char *end;

    while (*text == ' ')
        text++;
    for (end = text + strlen(text); end > text && end[-1] == ' '; end--)
        end[-1] = '\0';
    return text;
}

/* "1000, moe": the list is untouched unless all of it is right. */
static bool parse_ids(const struct ep_option *option, const char *text, bool append,
                      struct ep_id_list *field, char **why)
{
    struct ep_id_list list = { 0 };
    char *copy = strdup(text), *rest = copy, *item;
    bool ok = copy != NULL;
    uint32_t id;

    for (size_t i = 0; ok && append && i < field->n; i++)
        ok = add_id(&list, field->ids[i]);
    while (ok && *text && (item = strsep(&rest, ",")))
        ok = parse_id(option, trim(item), &id, why) && add_id(&list, id);
    free(copy);
    if (!ok) {
        free(list.ids);
        return false;
    }
    free(field->ids);
    *field = list;
    return true;
}

static char *format_ids(const struct ep_id_list *list)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);

    if (!out)
        return NULL;
    fputc('[', out);
    for (size_t i = 0; i < list->n; i++)
        fprintf(out, "%s%" PRIu32, i ? ", " : "", list->ids[i]);
    fputc(']', out);
    fclose(out);
    return text;
}

/* ---- any type ----------------------------------------------------------------- */

static bool parse_number(const struct ep_option *option, const char *text, uint64_t *field)
{
    uint64_t n;
    bool parsed;

    if (option->type == EP_TYPE_BYTES)
        parsed = parse_units(text, byte_units, 1, &n);
    else if (option->type == EP_TYPE_DURATION)
        parsed = parse_units(text, time_units, 0, &n);
    else
        parsed = parse_uint(text, 10, &n);
    if (!parsed || n < option->min || n > option->max)
        return false;
    *field = n;
    return true;
}

static bool parse_mode(const char *text, mode_t *field)
{
    uint64_t n;

    if (!parse_uint(text, 8, &n) || n == 0 || n > 0777)
        return false;
    *field = (mode_t)n;
    return true;
}

bool ep_option_parse(const struct ep_option *option, const char *text, bool append, void *field, char **why)
{
    *why = NULL;
    switch (option->type) {
    case EP_TYPE_STRING:
    case EP_TYPE_PATH:
    case EP_TYPE_ADDRESS:
        return parse_string(option, text, field, why);
    case EP_TYPE_UINT:
    case EP_TYPE_BYTES:
    case EP_TYPE_DURATION:
        return parse_number(option, text, field);
    case EP_TYPE_BOOL:
        return parse_bool(text, field);
    case EP_TYPE_ENUM:
        return parse_word(option->words, text, field);
    case EP_TYPE_MODE:
        return parse_mode(text, field);
    case EP_TYPE_UIDS:
    case EP_TYPE_GIDS:
        return parse_ids(option, text, append, field, why);
    }
    return false;
}

static void expects_range(const struct ep_option *option, const char *noun, const struct unit *units,
                          const char *example, char *text, size_t size)
{
    char *min = units ? format_units(units, option->min) : sentence("%" PRIu64, option->min);
    char *max = units ? format_units(units, option->max) : sentence("%" PRIu64, option->max);

    snprintf(text, size, "%s from %s to %s%s", noun, min ? min : "?", max ? max : "?", example);
    free(min);
    free(max);
}

static void expects_words(const struct ep_option *option, char *text, size_t size)
{
    int used = snprintf(text, size, "one of");

    for (int i = 0; option->words[i] && used >= 0 && (size_t)used < size; i++)
        used += snprintf(text + used, size - (size_t)used, "%s %s", i ? "," : "", option->words[i]);
}

void ep_option_expects(const struct ep_option *option, char *text, size_t size)
{
    switch (option->type) {
    case EP_TYPE_STRING:
        snprintf(text, size, "text");
        break;
    case EP_TYPE_PATH:
        snprintf(text, size, "a path");
        break;
    case EP_TYPE_ADDRESS:
        snprintf(text, size, "HOST:PORT, such as 127.0.0.1:7300 or [::]:7300");
        break;
    case EP_TYPE_UINT:
        expects_range(option, "an integer", NULL, "", text, size);
        break;
    case EP_TYPE_BYTES:
        expects_range(option, "a size", byte_units, ", such as 512MiB", text, size);
        break;
    case EP_TYPE_DURATION:
        expects_range(option, "a time", time_units, ", such as 250ms or 10s", text, size);
        break;
    case EP_TYPE_BOOL:
        snprintf(text, size, "true or false");
        break;
    case EP_TYPE_ENUM:
        expects_words(option, text, size);
        break;
    case EP_TYPE_MODE:
        snprintf(text, size, "an octal file mode, such as 0660");
        break;
    case EP_TYPE_UIDS:
        snprintf(text, size, "a list of user names or numbers");
        break;
    case EP_TYPE_GIDS:
        snprintf(text, size, "a list of group names or numbers");
        break;
    }
}

/* A JSON string is a YAML one. */
static char *format_string(const char *text)
{
    json_t *string = json_string(text ? text : "");
    char *quoted = json_dumps(string, JSON_ENCODE_ANY);

    json_decref(string);
    return quoted;
}

char *ep_option_format(const struct ep_option *option, const void *field)
{
    switch (option->type) {
    case EP_TYPE_STRING:
    case EP_TYPE_PATH:
    case EP_TYPE_ADDRESS:
        return format_string(*(char *const *)field);
    case EP_TYPE_UINT:
        return sentence("%" PRIu64, *(const uint64_t *)field);
    case EP_TYPE_BYTES:
        return format_units(byte_units, *(const uint64_t *)field);
    case EP_TYPE_DURATION:
        return format_units(time_units, *(const uint64_t *)field);
    case EP_TYPE_BOOL:
        return strdup(*(const bool *)field ? "true" : "false");
    case EP_TYPE_ENUM:
        return format_string(option->words[*(const int *)field]);
    case EP_TYPE_MODE:
        return sentence("0%03o", *(const mode_t *)field);
    case EP_TYPE_UIDS:
    case EP_TYPE_GIDS:
        return format_ids(field);
    }
    return NULL;
}

static size_t field_size(const struct ep_option *option)
{
    switch (option->type) {
    case EP_TYPE_STRING:
    case EP_TYPE_PATH:
    case EP_TYPE_ADDRESS:
        return sizeof(char *);
    case EP_TYPE_UINT:
    case EP_TYPE_BYTES:
    case EP_TYPE_DURATION:
        return sizeof(uint64_t);
    case EP_TYPE_BOOL:
        return sizeof(bool);
    case EP_TYPE_ENUM:
        return sizeof(int);
    case EP_TYPE_MODE:
        return sizeof(mode_t);
    case EP_TYPE_UIDS:
    case EP_TYPE_GIDS:
        return sizeof(struct ep_id_list);
    }
    return 0;
}

void ep_option_clear(const struct ep_option *option, void *field)
{
    if (option->type == EP_TYPE_STRING || option->type == EP_TYPE_PATH || option->type == EP_TYPE_ADDRESS)
        free(*(char **)field);
    if (option->type == EP_TYPE_UIDS || option->type == EP_TYPE_GIDS)
        free(((struct ep_id_list *)field)->ids);
    memset(field, 0, field_size(option));
}

void ep_option_move(const struct ep_option *option, void *to, void *from)
{
    ep_option_clear(option, to);
    memcpy(to, from, field_size(option));
    memset(from, 0, field_size(option));
}
