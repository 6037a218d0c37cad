#include <stdlib.h>
#include <string.h>

#include "client_private.h"

/* ---- the table ------------------------------------------------------------------- */

ep_status arena_init(struct arena *arena, uint64_t bytes, struct ep_error *error)
{
    *arena = (struct arena){ .bytes = bytes / ARENA_ALIGN * ARENA_ALIGN, .room = 16 };
    arena->block = calloc(arena->room, sizeof *arena->block);
    if (!arena->block)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the arena's table");
    arena->block[0] = (struct arena_block){ .bytes = arena->bytes };
    arena->n = 1;
    return EP_OK;
}

void arena_fini(struct arena *arena)
{
    free(arena->block);
    arena->block = NULL;
}

/* Room for one block more. */
static bool reserve(struct arena *arena)
{
    if (arena->n < arena->room)
        return true;

    struct arena_block *grown = realloc(arena->block, 2ul * arena->room * sizeof *grown);

    if (!grown)
        return false;
    arena->block = grown;
    arena->room *= 2;
    return true;
}

static void insert(struct arena *arena, uint32_t at, struct arena_block block)
{
    memmove(&arena->block[at + 1], &arena->block[at], (arena->n - at) * sizeof block);
    arena->block[at] = block;
    arena->n++;
}

static void drop(struct arena *arena, uint32_t at)
{
    memmove(&arena->block[at], &arena->block[at + 1], (arena->n - at - 1) * sizeof arena->block[0]);
    arena->n--;
}

static uint64_t largest_free(const struct arena *arena)
{
    uint64_t largest = 0;

    for (uint32_t i = 0; i < arena->n; i++)
        if (!arena->block[i].used && arena->block[i].bytes > largest)
            largest = arena->block[i].bytes;
    return largest;
}

ep_status arena_take(struct arena *arena, uint64_t bytes, uint64_t *offset, struct ep_error *error)
{
    /* Every allocation has an address of its own, an empty one too. */
    const uint64_t need = bytes ? (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN : ARENA_ALIGN;
    uint32_t at = 0;

    while (at < arena->n && (arena->block[at].used || arena->block[at].bytes < need))
        at++;
    if (at == arena->n || need < bytes)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "the arena has no block of %llu bytes: the largest free one has %llu of %llu "
                            "(arena_bytes of the group)",
                            (unsigned long long)bytes, (unsigned long long)largest_free(arena),
                            (unsigned long long)arena->bytes);
    if (!reserve(arena))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the arena's table");

    struct arena_block *block = &arena->block[at];

    *offset = block->offset;
    if (block->bytes > need) {
        struct arena_block rest = { .offset = block->offset + need, .bytes = block->bytes - need };

        block->bytes = need;
        block->used = true;
        insert(arena, at + 1, rest);
    } else {
        block->used = true;
    }
    return EP_OK;
}

/* The block that `offset` is in; the blocks cover the arena. */
static uint32_t find(const struct arena *arena, uint64_t offset)
{
    uint32_t low = 0, high = arena->n;

    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;

        if (arena->block[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

bool arena_give(struct arena *arena, uint64_t offset)
{
    uint32_t at = find(arena, offset);

    if (!arena->block[at].used || arena->block[at].offset != offset)
        return false;
    arena->block[at].used = false;
    if (at + 1 < arena->n && !arena->block[at + 1].used) {
        arena->block[at].bytes += arena->block[at + 1].bytes;
        drop(arena, at + 1);
    }
    if (at > 0 && !arena->block[at - 1].used) {
        arena->block[at - 1].bytes += arena->block[at].bytes;
        drop(arena, at);
    }
    return true;
}

uint64_t arena_reach(const struct arena *arena, uint64_t offset)
{
    if (offset >= arena->bytes)
        return 0;

    const struct arena_block *block = &arena->block[find(arena, offset)];

    return block->used ? block->offset + block->bytes - offset : 0;
}

/* ---- the calls ------------------------------------------------------------------- */

void *ep_alloc(ep_rank *rank, size_t bytes)
{
    struct ep_error *error = last_error();
    uint64_t offset;

    if (!rank) {
        ep_error_set(error, EP_INVALID_ARGUMENT, "rank is NULL");
        return NULL;
    }
    if (arena_take(&rank->arena, bytes, &offset, error) != EP_OK)
        return NULL;
    return rank->window + rank->shape.map.arena + offset;
}

void ep_free(ep_rank *rank, void *memory)
{
    if (!rank || !memory)
        return;

    const uintptr_t start = (uintptr_t)rank->window + rank->shape.map.arena;

    /* A pointer that is not ours changes nothing; the sentence is there for who looks. */
    if ((uintptr_t)memory < start || (uintptr_t)memory - start >= rank->arena.bytes
        || !arena_give(&rank->arena, (uintptr_t)memory - start))
        ep_error_set(last_error(), EP_INVALID_ARGUMENT, "memory does not come from ep_alloc() of this rank");
}
