/* ep_utf8: is text UTF-8, and what to do where it is not: JSON and the text of protobuf messages must be. */
#ifndef EP_UTF8_H
#define EP_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of the valid sequence that `text` begins with, 0 if there is none; of an end 1. */
size_t ep_utf8_length(const char *text);

bool ep_utf8_is_valid(const char *text);

/* As many bytes of the text, `most` at most, as do not end in the middle of a sequence. */
size_t ep_utf8_fit(const char *text, size_t most);

/* Each byte that is part of no sequence becomes a '?'. */
void ep_utf8_mend(char *text);

#endif
