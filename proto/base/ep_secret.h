/* ep_secret: secrets come from files, never from a command line, which everybody can see. */
#ifndef EP_SECRET_H
#define EP_SECRET_H

#include <stddef.h>

#include "ep_error.h"

/* Of a group's attach token, in bytes. */
#define EP_ATTACH_TOKEN_MAX 256u

/*
 * The first line of a file, 1 to size - 1 bytes of text, without its end.  EP_INVALID_ARGUMENT: it cannot be read, or
 * has no such line; the message names the file and shows nothing of it, and `out` is then wiped.
 */
ep_status ep_secret_read(const char *path, char *out, size_t size, struct ep_error *error);

#endif
