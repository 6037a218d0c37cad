#include "arena.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES 8192u

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    max_align_t memory[];
};

static struct arena_block *add_block(struct arena *arena, size_t bytes)
{
    const size_t room = arena->room ? arena->room : BLOCK_BYTES, size = bytes > room ? bytes : room;
    struct arena_block *block = calloc(1, sizeof *block + size);

    if (!block)
        abort(); /* a few kilobytes of bookkeeping: nothing sensible can go on without them */
    block->size = size;
    block->next = arena->blocks;
    arena->blocks = block;
    return block;
}

void *arena_alloc(struct arena *arena, size_t bytes)
{
    struct arena_block *block = arena->blocks;
    void *memory;

    bytes = (bytes + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!block || block->size - block->used < bytes)
        block = add_block(arena, bytes);
    memory = (uint8_t *)block->memory + block->used;
    block->used += bytes;
    return memory;
}

char *arena_strdup(struct arena *arena, const char *text)
{
    size_t n = strlen(text) + 1;

    return memcpy(arena_alloc(arena, n), text, n);
}

static void *alloc_for_unpack(void *arena, size_t bytes)
{
    return arena_alloc(arena, bytes ? bytes : 1);
}

static void free_nothing(void *arena, void *memory)
{
    (void)arena;
    (void)memory;
}

void *arena_unpack(struct arena *arena, const ProtobufCMessageDescriptor *type, size_t size, const void *bytes)
{
    ProtobufCAllocator allocator = { alloc_for_unpack, free_nothing, arena };

    return protobuf_c_message_unpack(type, &allocator, size, bytes);
}

void arena_clear(struct arena *arena)
{
    while (arena->blocks) {
        struct arena_block *block = arena->blocks;

        arena->blocks = block->next;
        free(block);
    }
}

void arena_reset(struct arena *arena)
{
    struct arena_block *block = arena->blocks;

    if (!block || block->next) {
        arena_clear(arena);
        return;
    }
    memset(block->memory, 0, block->used);
    block->used = 0;
}
