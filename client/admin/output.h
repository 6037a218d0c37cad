/*
 * ep_output: what goes to standard output: documents (JSON, YAML) and tables.
 *
 * A closed standard output is no error: whoever reads has seen enough.  It is noticed by
 * ep_output_finish() and ep_output_over().
 */
#ifndef EP_OUTPUT_H
#define EP_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <jansson.h>

#include "admin.h"

/* One document in the format asked for, which is not the table.  Takes the reference. */
int ep_output_document(const struct ep_admin *admin, json_t *json);
/* One of several: a line of JSON, or YAML after "---".  Flushed at once. */
int ep_output_item(const struct ep_admin *admin, json_t *json);
/* The same from a message. */
int ep_output_message(const struct ep_admin *admin, const ProtobufCMessage *message);
int ep_output_message_item(const struct ep_admin *admin, const ProtobufCMessage *message);

/* Flushes; the exit code to end with, which is `code` unless the output could not be written. */
int ep_output_finish(const struct ep_admin *admin, int code);
/* Nobody reads standard output any more, or it could not be written: what goes on writing ends. */
bool ep_output_over(void);
/* Standard output is a terminal that takes colours. */
bool ep_output_coloured(void);

/* ---- tables ---------------------------------------------------------------------- */

enum {
    EP_COLUMN_LEFT = 0,
    EP_COLUMN_RIGHT = 1,
    EP_COLUMN_STATE = 2, /* a phase or state: coloured */
    EP_COLUMN_LONG = 4   /* gives way when the terminal is narrow */
};

struct ep_column {
    const char *name;
    int flags;
};

struct ep_table;

struct ep_table *ep_table_create(const struct ep_column *columns, size_t n);
/* cells: one text per column, copied; an empty one is shown as "-". */
void ep_table_add(struct ep_table *table, const char *const *cells);
size_t ep_table_rows(const struct ep_table *table);
/* Both free the table. */
void ep_table_print(struct ep_table *table, FILE *out);
char *ep_table_text(struct ep_table *table, size_t width); /* for free(); NULL without memory */

/* A "key: value" line of a summary, keys aligned. */
__attribute__((format(printf, 3, 4))) void ep_output_pair(FILE *out, const char *key, const char *format,
                                                          ...);

#endif
