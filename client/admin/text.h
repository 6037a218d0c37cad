/*
 * ep_text: values as operators write and read them: sizes, times, names of enum values.
 */
#ifndef EP_TEXT_H
#define EP_TEXT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <protobuf-c/protobuf-c.h>

/* A short text by value: printf("%s", ep_text_size(bytes).s). */
struct ep_text {
    char s[64];
};

/* What is read must be the whole of `text`; false leaves *out alone. */
bool ep_text_parse_u64(const char *text, uint64_t max, uint64_t *out);
bool ep_text_parse_size(const char *text, uint64_t *out); /* "64MiB", "64M" (both 2^20), "64MB" (10^6) */
bool ep_text_parse_duration(const char *text, int64_t *out_ms); /* "5s", "500ms", "2m", "1h", "5" (seconds) */

struct ep_text ep_text_u64(uint64_t value);
struct ep_text ep_text_size(uint64_t bytes);    /* "56.0 MiB" */
struct ep_text ep_text_count(double value);     /* "12.3k" */
struct ep_text ep_text_micros(uint64_t us);     /* "12 us", "3.4 ms", "2.1 s" */
struct ep_text ep_text_age(uint64_t since_us);  /* of a wall time, seen from now: "3m12s" */
struct ep_text ep_text_time(uint64_t wall_us);  /* "2025-01-31 12:00:01", local time */
struct ep_text ep_text_clock(uint64_t wall_us); /* "12:00:01.123" */

/*
 * Enum values without the prefix that the schema gives them: PHASE_READY is "READY" in tables
 * and "ready" on the command line, where the full name is understood as well, and "-" for "_".
 */
const char *ep_text_enum(const ProtobufCEnumDescriptor *type, int value); /* "?" when unknown */
bool ep_text_parse_enum(const ProtobufCEnumDescriptor *type, const char *text, int *value);
/* "ll, ht": every value but the first, lower-case, for help and error messages. */
void ep_text_enum_values(const ProtobufCEnumDescriptor *type, const char *separator, char *out, size_t size);

/* Copies text with control characters as "?": what a server says must not move the cursor. */
void ep_text_clean(const char *text, char *out, size_t size);

#endif
