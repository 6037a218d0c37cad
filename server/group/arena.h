/* arena: memory of one message: allocated in pieces, freed at once. */
#ifndef EP_GROUP_ARENA_H
#define EP_GROUP_ARENA_H

#include <stddef.h>

struct arena {
    struct arena_block *blocks;
};

/* Zeroed, aligned for any type.  The process ends when there is no memory for it. */
void *arena_alloc(struct arena *arena, size_t bytes);
char *arena_strdup(struct arena *arena, const char *text);
void arena_clear(struct arena *arena);

#endif
