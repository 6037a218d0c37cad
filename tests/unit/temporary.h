/* A fresh directory below $TMPDIR: tests/run.py looks there for what a test has left behind. */
#ifndef TEMPORARY_H
#define TEMPORARY_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* False when there is none, or its path is longer than `size`. */
static inline bool temporary_directory(char *path, size_t size)
{
    const char *base = getenv("TMPDIR");
    int length = snprintf(path, size, "%s/ep-XXXXXX", base && *base ? base : "/tmp");

    return length > 0 && (size_t)length < size && mkdtemp(path);
}

#endif
