/*
 * ep_log: one line per event, logfmt or JSON, on standard error.
 *
 *     EP_INFO("attach", "rank claimed", EP_S("group", name), EP_I("rank", rank));
 *
 * Lower-case message, no values in it: values are fields.  An error is logged
 * once, where its cause is known.  Thread-safe; a line of up to PIPE_BUF bytes is
 * one write(2).
 * A line that finds no room for half a second, as nobody reads, is lost, and the
 * next one that does is preceded by how many were.  Not for the data path.
 */
#ifndef EP_LOG_H
#define EP_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum ep_log_level { EP_LOG_DEBUG, EP_LOG_INFO, EP_LOG_WARN, EP_LOG_ERROR, EP_LOG_OFF };
enum ep_log_format { EP_LOG_LOGFMT, EP_LOG_JSON };

struct ep_log_field {
    const char *key;
    enum { EP_LOG_STRING, EP_LOG_INT, EP_LOG_UINT, EP_LOG_DOUBLE, EP_LOG_BOOL } type;
    union { const char *s; int64_t i; uint64_t u; double d; bool b; } value;
};

#define EP_S(k, v) ((struct ep_log_field){ .key = (k), .type = EP_LOG_STRING, .value.s = (v) })
#define EP_I(k, v) ((struct ep_log_field){ .key = (k), .type = EP_LOG_INT,    .value.i = (int64_t)(v) })
#define EP_U(k, v) ((struct ep_log_field){ .key = (k), .type = EP_LOG_UINT,   .value.u = (uint64_t)(v) })
#define EP_D(k, v) ((struct ep_log_field){ .key = (k), .type = EP_LOG_DOUBLE, .value.d = (v) })
#define EP_B(k, v) ((struct ep_log_field){ .key = (k), .type = EP_LOG_BOOL,   .value.b = (v) })

void ep_log_configure(enum ep_log_level level, enum ep_log_format format);
enum ep_log_level ep_log_level(void);

/* fields: n of them.  Strings are escaped as the format wants. */
void ep_log_write(enum ep_log_level level, const char *module, const char *message,
                  const struct ep_log_field *fields, size_t n);

#define EP_LOG(level, module, message, ...)                                            \
    do {                                                                               \
        if ((level) >= ep_log_level()) {                                               \
            const struct ep_log_field ep_fields_[] = { { .key = NULL }, ##__VA_ARGS__ }; \
            ep_log_write((level), (module), (message), ep_fields_ + 1,                 \
                         sizeof ep_fields_ / sizeof *ep_fields_ - 1);                  \
        }                                                                              \
    } while (0)

#define EP_DEBUG(module, message, ...) EP_LOG(EP_LOG_DEBUG, module, message, ##__VA_ARGS__)
#define EP_INFO(module, message, ...)  EP_LOG(EP_LOG_INFO,  module, message, ##__VA_ARGS__)
#define EP_WARN(module, message, ...)  EP_LOG(EP_LOG_WARN,  module, message, ##__VA_ARGS__)
#define EP_ERROR(module, message, ...) EP_LOG(EP_LOG_ERROR, module, message, ##__VA_ARGS__)

/* Who changed what, and who was not let: written whatever the level, also with EP_LOG_OFF. */
void ep_log_audit(const char *message, const struct ep_log_field *fields, size_t n);

#define EP_AUDIT(message, ...)                                                                               \
    do {                                                                                                     \
        const struct ep_log_field ep_fields_[] = { { .key = NULL }, ##__VA_ARGS__ };                         \
        ep_log_audit((message), ep_fields_ + 1, sizeof ep_fields_ / sizeof *ep_fields_ - 1);                 \
    } while (0)

#endif
