/*
 * ep_error: a status with the sentence that explains it.
 *
 * The sentence names the field, what was wrong and what would be right:
 * "hidden is 100: must be a multiple of 16 bytes".  It is written once, where
 * the cause is known, and travels unchanged to whoever has to read it.
 */
#ifndef EP_ERROR_H
#define EP_ERROR_H

#include "ep_status.h"

#define EP_ERROR_TEXT_MAX 384

struct ep_error {
    ep_status status;
    char text[EP_ERROR_TEXT_MAX];
};

#define EP_ERROR_INIT { EP_OK, "" }

/*
 * Fill *error (NULL is allowed) and return status, so that a check reads
 *     return ep_error_set(error, EP_INVALID_ARGUMENT, "top_k is %u: ...", k);
 * The text is cut, never overrun.
 */
__attribute__((format(printf, 3, 4)))
ep_status ep_error_set(struct ep_error *error, ep_status status, const char *format, ...);

/* The same from errno: appends ": <strerror>". */
__attribute__((format(printf, 3, 4)))
ep_status ep_error_errno(struct ep_error *error, ep_status status, const char *format, ...);

/* Put "prefix: " before the text that is there; returns the status. */
__attribute__((format(printf, 2, 3)))
ep_status ep_error_prefix(struct ep_error *error, const char *format, ...);

#endif
