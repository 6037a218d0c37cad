/* arena: memory of one message: allocated in pieces, freed at once. */
#ifndef EP_GROUP_ARENA_H
#define EP_GROUP_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

struct arena {
    struct arena_block *blocks;
    size_t room; /* of the next block; 0: for many messages */
};

/* Zeroed, aligned for any type.  The process ends when there is no memory for it. */
void *arena_alloc(struct arena *arena, size_t bytes);
char *arena_strdup(struct arena *arena, const char *text);
/* A message whose memory is all the arena's; NULL: it cannot be read. */
void *arena_unpack(struct arena *arena, const ProtobufCMessageDescriptor *type, size_t size, const void *bytes);
void arena_clear(struct arena *arena);
/* Empty as well, but for memory that the next message may have. */
void arena_reset(struct arena *arena);

#endif
