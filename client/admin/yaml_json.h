/*
 * ep_yaml: YAML as jansson values and back, through libyaml.
 */
#ifndef EP_YAML_JSON_H
#define EP_YAML_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <jansson.h>

#include "ep_error.h"

/*
 * One document of YAML or JSON.  Plain scalars become null, booleans, numbers or strings as in YAML's
 * core schema ("yes" and "on" are strings).  `name` is the file's, for messages with line and column.
 */
ep_status ep_yaml_parse(const char *text, size_t size, const char *name, json_t **out,
                        struct ep_error *error);

/* marked: begins with "---", for one of several documents.  false: out could not be written. */
bool ep_yaml_write(const json_t *json, bool marked, FILE *out);

#endif
