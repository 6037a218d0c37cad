/*
 * Rows from one place in the windows to another.
 *
 * What a row is copied to was last touched a few ops ago: it has left the cache, and a store waits
 * for its line.  memcpy leaves that to the hardware's prefetchers, which have to find their pace again
 * in each row and stop at each page.
 */
#include "host_private.h"

#include <string.h>

#define STEP 64u /* bytes: one line */
/* How far ahead lines are asked for.  Behind a row's end lies the next one, most often; an address
 * that is not mapped costs nothing. */
#define AHEAD 2048u

void ep_host_copy_row(void *to, const void *from, size_t bytes)
{
    const uint8_t *source = from;
    uint8_t *target = to;
    size_t at = 0;

    for (; at + STEP <= bytes; at += STEP) {
        __builtin_prefetch((const void *)((uintptr_t)source + at + AHEAD));
        __builtin_prefetch((const void *)((uintptr_t)target + at + AHEAD), 1);
        memcpy(target + at, source + at, STEP);
    }
    memcpy(target + at, source + at, bytes - at);
}
