#include "ep_log.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ep_utf8.h"

static _Atomic int current_level = EP_LOG_INFO;
static _Atomic int current_format = EP_LOG_LOGFMT;

void ep_log_configure(enum ep_log_level level, enum ep_log_format format)
{
    atomic_store_explicit(&current_level, (int)level, memory_order_relaxed);
    atomic_store_explicit(&current_format, (int)format, memory_order_relaxed);
}

enum ep_log_level ep_log_level(void)
{
    return (enum ep_log_level)atomic_load_explicit(&current_level, memory_order_relaxed);
}

/* ---- a line that grows: on the stack first, on the heap when it is long -------------- */

struct line {
    char *data;
    size_t length, capacity;
    char first[1024];
};

static void line_init(struct line *line)
{
    line->data = line->first;
    line->length = 0;
    line->capacity = sizeof line->first;
}

static void line_fini(struct line *line)
{
    if (line->data != line->first)
        free(line->data);
}

/* Without memory the line is cut; there is nobody to tell. */
static bool reserve(struct line *line, size_t n)
{
    if (line->capacity - line->length >= n)
        return true;

    size_t capacity = (line->length + n) * 2;
    char *data = malloc(capacity);

    if (!data)
        return false;
    memcpy(data, line->data, line->length);
    line_fini(line);
    line->data = data;
    line->capacity = capacity;
    return true;
}

static void put(struct line *line, const char *bytes, size_t n)
{
    if (!reserve(line, n + 1)) /* + 1: room for the newline is always kept */
        return;
    memcpy(line->data + line->length, bytes, n);
    line->length += n;
}

static void put_text(struct line *line, const char *text)
{
    put(line, text, strlen(text));
}

__attribute__((format(printf, 2, 3)))
static void put_format(struct line *line, const char *format, ...)
{
    char text[64];
    va_list args;

    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n > 0)
        put(line, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

/* ---- escaping ------------------------------------------------------------------------ */

/* U+0080..U+009F steer terminals as the C0 controls do. */
static bool is_c1(const unsigned char *p, size_t length)
{
    return length == 2 && p[0] == 0xc2 && p[1] < 0xa0;
}

static void put_escape(struct line *line, unsigned c)
{
    switch (c) {
    case '"':  put_text(line, "\\\""); break;
    case '\\': put_text(line, "\\\\"); break;
    case '\n': put_text(line, "\\n"); break;
    case '\r': put_text(line, "\\r"); break;
    case '\t': put_text(line, "\\t"); break;
    default:   put_format(line, "\\u%04x", c); break;
    }
}

/* A JSON string; quoted values of logfmt are written the same way. */
static void put_quoted(struct line *line, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;

    put_text(line, "\"");
    while (*p) {
        size_t n = ep_utf8_length((const char *)p);

        if (n == 0)
            put_text(line, "\xef\xbf\xbd"); /* U+FFFD for each byte that is no UTF-8 */
        else if (is_c1(p, n))
            put_escape(line, p[1]);
        else if (n > 1)
            put(line, (const char *)p, n);
        else if (*p < 0x20 || *p == 0x7f || *p == '"' || *p == '\\')
            put_escape(line, *p);
        else
            put(line, (const char *)p, 1);
        p += n ? n : 1;
    }
    put_text(line, "\"");
}

/* What logfmt readers take without quotes: printable ASCII but space, '=', '"' and '\'. */
static bool is_bare(const char *text)
{
    if (!*text)
        return false;
    for (const unsigned char *p = (const unsigned char *)text; *p; p++)
        if (*p <= ' ' || *p >= 0x7f || *p == '=' || *p == '"' || *p == '\\')
            return false;
    return true;
}

static void put_key(struct line *line, enum ep_log_format format, const char *key)
{
    if (format == EP_LOG_JSON) {
        put_text(line, ",");
        put_quoted(line, key);
        put_text(line, ":");
        return;
    }
    put_text(line, " ");
    for (const char *p = *key ? key : "_"; *p; p++) {
        char one[2] = { *p, '\0' };

        put(line, is_bare(one) ? one : "_", 1);
    }
    put_text(line, "=");
}

static void put_string(struct line *line, enum ep_log_format format, const char *text)
{
    if (!text)
        put_text(line, "null");
    else if (format == EP_LOG_LOGFMT && is_bare(text))
        put_text(line, text);
    else
        put_quoted(line, text);
}

static void put_double(struct line *line, enum ep_log_format format, double d)
{
    char text[40];

    if (!isfinite(d)) { /* JSON has no word for them */
        put_text(line, format == EP_LOG_JSON ? "null" : isnan(d) ? "NaN" : d > 0 ? "Inf" : "-Inf");
        return;
    }
    snprintf(text, sizeof text, "%.9g", d);
    for (char *p = text; *p; p++)
        if (*p == ',') /* the locale's decimal point */
            *p = '.';
    put_text(line, text);
}

static void put_value(struct line *line, enum ep_log_format format, const struct ep_log_field *f)
{
    switch (f->type) {
    case EP_LOG_STRING: put_string(line, format, f->value.s); break;
    case EP_LOG_INT:    put_format(line, "%lld", (long long)f->value.i); break;
    case EP_LOG_UINT:   put_format(line, "%llu", (unsigned long long)f->value.u); break;
    case EP_LOG_DOUBLE: put_double(line, format, f->value.d); break;
    case EP_LOG_BOOL:   put_text(line, f->value.b ? "true" : "false"); break;
    }
}

/* ---- the line ------------------------------------------------------------------------ */

static const char *level_name(enum ep_log_level level)
{
    static const char *const names[] = { "debug", "info", "warn", "error" };

    return (unsigned)level < sizeof names / sizeof *names ? names[level] : "error";
}

static void put_head(struct line *line, enum ep_log_format format, enum ep_log_level level)
{
    struct timespec now;
    struct tm tm;
    char date[32];

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &tm);
    put_text(line, format == EP_LOG_JSON ? "{\"ts\":\"" : "ts=");
    put_format(line, "%s.%06ldZ", date, now.tv_nsec / 1000);
    put_text(line, format == EP_LOG_JSON ? "\"" : "");
    put_key(line, format, "level");
    put_string(line, format, level_name(level));
}

static void compose(struct line *line, enum ep_log_level level, const char *module, const char *message,
                    const struct ep_log_field *fields, size_t n)
{
    enum ep_log_format format =
        (enum ep_log_format)atomic_load_explicit(&current_format, memory_order_relaxed);

    line_init(line);
    put_head(line, format, level);
    put_key(line, format, "mod");
    put_string(line, format, module);
    put_key(line, format, "msg");
    put_string(line, format, message);
    for (size_t i = 0; i < n; i++) {
        put_key(line, format, fields[i].key ? fields[i].key : "_");
        put_value(line, format, &fields[i]);
    }
    if (format == EP_LOG_JSON)
        put_text(line, "}");
    line->data[line->length++] = '\n';
}

/* ---- writing ------------------------------------------------------------------------- */

/*
 * Who logs may be what keeps a server in its cluster: a reader that stands still must not stop it.  What finds no room
 * for so long is lost and counted, and what comes after it does not wait until there is room again.
 */
#define PATIENCE_MS 500

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static uint64_t lost; /* lines since the last one that was written; mutex */
static bool cut;      /* the last line has no end; mutex */

static bool has_room(int wait_ms)
{
    struct pollfd out = { .fd = STDERR_FILENO, .events = POLLOUT };
    int n;

    while ((n = poll(&out, 1, wait_ms)) < 0 && errno == EINTR)
        ;
    return n != 0; /* what is wrong with it, write(2) tells */
}

/* One write(2) for the line, if it is not longer than what a pipe with room takes without blocking. */
static bool write_all(const struct line *line, int wait_ms)
{
    size_t done = 0;

    while (done < line->length && has_room(wait_ms)) {
        size_t n = line->length - done;
        ssize_t k = write(STDERR_FILENO, line->data + done, n < PIPE_BUF ? n : PIPE_BUF);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            break;
        done += (size_t)k;
    }
    if (done > 0)
        cut = done < line->length;
    return done == line->length;
}

static void tell_lost(void)
{
    const struct ep_log_field lines = EP_U("lines", lost);
    const struct line end = { .data = (char[]){ "\n" }, .length = 1 };
    struct line line;

    if (cut && !write_all(&end, 0))
        return;
    compose(&line, EP_LOG_WARN, "log", "lines were lost: they could not be written", &lines, 1);
    if (write_all(&line, 0))
        lost = 0;
    line_fini(&line);
}

static void write_line(enum ep_log_level level, const char *module, const char *message,
                       const struct ep_log_field *fields, size_t n)
{
    int saved = errno; /* a log line between a call and its check must not change what it finds */
    struct line line;

    compose(&line, level, module, message, fields, n);
    pthread_mutex_lock(&writing);
    if (lost > 0)
        tell_lost();
    if (lost > 0 || !write_all(&line, PATIENCE_MS))
        lost++;
    pthread_mutex_unlock(&writing);
    line_fini(&line);
    errno = saved;
}

void ep_log_write(enum ep_log_level level, const char *module, const char *message,
                  const struct ep_log_field *fields, size_t n)
{
    if (level >= ep_log_level() && level < EP_LOG_OFF)
        write_line(level, module, message, fields, n);
}

void ep_log_audit(const char *message, const struct ep_log_field *fields, size_t n)
{
    write_line(EP_LOG_INFO, "audit", message, fields, n);
}
