#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "ep_clock.h"

/* ---- reading ------------------------------------------------------------------- */

bool ep_text_parse_u64(const char *text, uint64_t max, uint64_t *out)
{
    char *end;

    if (!isdigit((unsigned char)text[0]))
        return false; /* strtoull would take blanks and a sign */
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || value > max)
        return false;
    *out = value;
    return true;
}

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    { "", 1 },
    { "B", 1 },
    { "K", 1ull << 10 },
    { "KiB", 1ull << 10 },
    { "KB", 1000ull },
    { "M", 1ull << 20 },
    { "MiB", 1ull << 20 },
    { "MB", 1000000ull },
    { "G", 1ull << 30 },
    { "GiB", 1ull << 30 },
    { "GB", 1000000000ull },
    { "T", 1ull << 40 },
    { "TiB", 1ull << 40 },
    { "TB", 1000000000000ull },
};

static const struct unit duration_units[] = {
    { "", 1000 }, { "ms", 1 }, { "s", 1000 }, { "m", 60000 }, { "min", 60000 }, { "h", 3600000 },
};

/* A non-negative decimal number and a unit: "1.5GiB". */
static bool parse_with_unit(const char *text, const struct unit *units, size_t n, double *out)
{
    char *end;

    if (!isdigit((unsigned char)text[0]) || (text[0] == '0' && (text[1] | 0x20) == 'x'))
        return false;
    errno = 0;
    double value = strtod(text, &end);
    if (errno)
        return false;
    end += strspn(end, " ");
    for (size_t i = 0; i < n; i++) {
        if (strcasecmp(end, units[i].name) == 0) {
            *out = value * (double)units[i].factor;
            return true;
        }
    }
    return false;
}

bool ep_text_parse_size(const char *text, uint64_t *out)
{
    double bytes;

    if (ep_text_parse_u64(text, UINT64_MAX, out))
        return true; /* exact above 2^53 too */
    if (!parse_with_unit(text, size_units, sizeof size_units / sizeof *size_units, &bytes) || bytes >= 0x1p63)
        return false;
    *out = (uint64_t)bytes;
    return true;
}

bool ep_text_parse_duration(const char *text, int64_t *out_ms)
{
    double ms;

    if (!parse_with_unit(text, duration_units, sizeof duration_units / sizeof *duration_units, &ms) ||
        ms > (double)INT32_MAX)
        return false;
    *out_ms = (int64_t)ms + (ms > (double)(int64_t)ms); /* a little is not 0, which is no bound at all */
    return true;
}

/* ---- writing ------------------------------------------------------------------- */

struct ep_text ep_text_u64(uint64_t value)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%" PRIu64, value);
    return text;
}

struct ep_text ep_text_size(uint64_t bytes)
{
    static const char *const names[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    struct ep_text text;
    double value = (double)bytes;
    int unit = 0;

    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    snprintf(text.s, sizeof text.s, "%.*f %s", unit == 0 || value == (double)(uint64_t)value ? 0 : 1, value,
             names[unit]);
    return text;
}

struct ep_text ep_text_count(double value)
{
    static const char *const names[] = { "", "k", "M", "G", "T", "P", "E" };
    struct ep_text text;
    int unit = 0;

    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    snprintf(text.s, sizeof text.s, "%.*f%s",
             value < 10 && value != (double)(int)value ? 2
             : value < 100 && unit                     ? 1
                                                       : 0,
             value, names[unit]);
    return text;
}

struct ep_text ep_text_micros(uint64_t us)
{
    struct ep_text text;

    if (us < 1000)
        snprintf(text.s, sizeof text.s, "%" PRIu64 " us", us);
    else if (us < 1000000)
        snprintf(text.s, sizeof text.s, "%.1f ms", (double)us / 1e3);
    else
        snprintf(text.s, sizeof text.s, "%.1f s", (double)us / 1e6);
    return text;
}

struct ep_text ep_text_age(uint64_t since_us)
{
    uint64_t now = ep_clock_wall_us();
    uint64_t s = since_us && now > since_us ? (now - since_us) / 1000000 : 0;
    struct ep_text text = { "-" };

    if (!since_us)
        return text;
    if (s < 60)
        snprintf(text.s, sizeof text.s, "%" PRIu64 "s", s);
    else if (s < 3600)
        snprintf(text.s, sizeof text.s, "%" PRIu64 "m%02" PRIu64 "s", s / 60, s % 60);
    else if (s < 86400)
        snprintf(text.s, sizeof text.s, "%" PRIu64 "h%02" PRIu64 "m", s / 3600, s / 60 % 60);
    else
        snprintf(text.s, sizeof text.s, "%" PRIu64 "d%02" PRIu64 "h", s / 86400, s / 3600 % 24);
    return text;
}

static struct ep_text format_time(uint64_t wall_us, const char *format)
{
    struct ep_text text = { "-" };
    time_t seconds = (time_t)(wall_us / 1000000);
    struct tm parts;

    if (wall_us && localtime_r(&seconds, &parts))
        strftime(text.s, sizeof text.s, format, &parts);
    return text;
}

struct ep_text ep_text_time(uint64_t wall_us)
{
    return format_time(wall_us, "%Y-%m-%d %H:%M:%S");
}

struct ep_text ep_text_clock(uint64_t wall_us)
{
    struct ep_text text = format_time(wall_us, "%H:%M:%S");
    size_t length = strlen(text.s);

    if (wall_us)
        snprintf(text.s + length, sizeof text.s - length, ".%03u", (unsigned)(wall_us / 1000 % 1000));
    return text;
}

/* ---- enums --------------------------------------------------------------------- */

/* Length of "PHASE_" in PHASE_UNSPECIFIED, the first value of every enum of the schema. */
static size_t prefix_length(const ProtobufCEnumDescriptor *type)
{
    const char *tail = strstr(type->values[0].name, "UNSPECIFIED");

    return tail ? (size_t)(tail - type->values[0].name) : 0;
}

const char *ep_text_enum(const ProtobufCEnumDescriptor *type, int value)
{
    const ProtobufCEnumValue *found = protobuf_c_enum_descriptor_get_value(type, value);

    return found ? found->name + prefix_length(type) : "?";
}

/* Letter by letter, '-' for '_' as flags have it. */
static bool same_name(const char *text, const char *name)
{
    while (*text && (tolower((unsigned char)*text) == tolower((unsigned char)*name) ||
                     (*text == '-' && *name == '_'))) {
        text++;
        name++;
    }
    return *text == *name;
}

bool ep_text_parse_enum(const ProtobufCEnumDescriptor *type, const char *text, int *value)
{
    size_t prefix = prefix_length(type);

    for (unsigned i = 0; i < type->n_values; i++) {
        const ProtobufCEnumValue *candidate = &type->values[i];

        if (same_name(text, candidate->name) || same_name(text, candidate->name + prefix)) {
            *value = candidate->value;
            return true;
        }
    }
    return false;
}

void ep_text_enum_values(const ProtobufCEnumDescriptor *type, const char *separator, char *out, size_t size)
{
    size_t used = 0;

    out[0] = '\0';
    for (unsigned i = 1; i < type->n_values && used < size; i++) {
        const char *name = ep_text_enum(type, type->values[i].value);
        int n = snprintf(out + used, size - used, "%s%s", i > 1 ? separator : "", name);

        used += n > 0 ? (size_t)n : 0;
    }
    for (char *c = out; *c; c++)
        *c = (char)tolower((unsigned char)*c);
}

void ep_text_clean(const char *text, char *out, size_t size)
{
    size_t i = 0;

    for (; text[i] && i + 1 < size; i++)
        out[i] = iscntrl((unsigned char)text[i]) ? '?' : text[i];
    out[i] = '\0';
}
