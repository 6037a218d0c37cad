/*
 * roofline: rows pushed to peers with plain stores and nothing else: no headers, no flags, no waiting.  What
 * is moved in this time cannot be moved faster by an op that does all of that.
 */
#ifndef ROOFLINE_H
#define ROOFLINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct roofline_row { /* GPU addresses, 16-byte aligned */
    const void *from;
    void *to;
};

/* Enqueues one push of n rows of `bytes` each; `rows` is GPU memory.  NULL, or what went wrong. */
const char *roofline_push(uint32_t device, const struct roofline_row *rows, uint32_t n, uint32_t bytes,
                          uint32_t blocks, void *stream);

#ifdef __cplusplus
}
#endif
#endif
