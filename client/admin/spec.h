/*
 * ep_spec: what an operator asks of a group, from a file and from flags, as one JSON object with
 * the field names of ep.v1.GroupSpec.  Only what was named is in it.
 */
#ifndef EP_SPEC_H
#define EP_SPEC_H

#include <stddef.h>

#include <jansson.h>

#include "command.h"
#include "ep_error.h"
#include "ep/v1/common.pb-c.h"

/*
 * The file, then the flags over it, without --label.  name gets the group's name when the file has one,
 * else "".  Messages begin with the file or the flag and the path of the field.
 */
ep_status ep_spec_read(const struct ep_invocation *invocation, char *name, size_t name_size, json_t **out,
                       struct ep_error *error);

/*
 * The text of a file as a spec: the spec itself, or a whole Group with its name.  For ep_spec_read and
 * tests; text ends with a NUL at text[size].
 */
ep_status ep_spec_parse(const char *text, size_t size, const char *file, char *name, size_t name_size,
                        json_t **out, struct ep_error *error);

/* Any of the forms of a placement (see the help of "group create") as the message's.  Keeps `json`. */
ep_status ep_spec_placement(const json_t *json, json_t **out, struct ep_error *error);

/* All of a file, "-" being standard input; *out is for free(). */
ep_status ep_spec_read_file(const char *file, char **out, size_t *size, struct ep_error *error);

/* Applies every --label to the object of labels; false when there was none. */
bool ep_spec_labels(const struct ep_invocation *invocation, json_t *labels);

ep_status ep_spec_message(const json_t *spec, Ep__V1__GroupSpec **out, struct ep_error *error);

#endif
