/* Lists of puts. */
#include "gin.h"

#include <string.h>
#include <sys/mman.h>

void ep_gin_queue_push(struct ep_gin_queue *queue, struct ep_gin_put *put)
{
    put->next = NULL;
    if (queue->tail)
        queue->tail->next = put;
    else
        queue->head = put;
    queue->tail = put;
}

struct ep_gin_put *ep_gin_queue_pop(struct ep_gin_queue *queue)
{
    struct ep_gin_put *put = queue->head;

    if (!put)
        return NULL;
    queue->head = put->next;
    if (!queue->head)
        queue->tail = NULL;
    put->next = NULL;
    return put;
}

ep_status ep_gin_pool_grow(struct ep_gin_pool *pool, uint32_t n, struct ep_error *error)
{
    struct ep_gin_put *slab;

    if (pool->n == EP_GIN_MAX_CONTEXTS)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "contexts: a communicator has at most %u",
                            EP_GIN_MAX_CONTEXTS);
    /* Not calloc(), which fills what it has had before with zeros: all of the pages would be there at once. */
    slab = mmap(NULL, n * sizeof *slab, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slab == MAP_FAILED)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for %u puts", n);
    for (; pool->used < pool->size; pool->used++)
        ep_gin_pool_give(pool, &pool->slabs[pool->n - 1][pool->used]);
    pool->slabs[pool->n++] = slab;
    pool->size = n;
    pool->used = 0;
    return EP_OK;
}

void ep_gin_pool_close(struct ep_gin_pool *pool)
{
    for (uint32_t i = 0; i < pool->n; i++)
        (void)munmap(pool->slabs[i], pool->size * sizeof *pool->slabs[i]);
    memset(pool, 0, sizeof *pool);
}

struct ep_gin_put *ep_gin_pool_at(struct ep_gin_pool *pool, uint32_t i)
{
    const uint32_t slab = pool->n > 0 ? i / pool->size : 0;

    if (pool->n == 0 || slab >= pool->n || (slab == pool->n - 1 && i % pool->size >= pool->used))
        return NULL;
    return &pool->slabs[slab][i % pool->size];
}

struct ep_gin_put *ep_gin_pool_take(struct ep_gin_pool *pool)
{
    struct ep_gin_put *put = pool->free;

    if (put)
        pool->free = put->next;
    else if (pool->used < pool->size)
        put = &pool->slabs[pool->n - 1][pool->used++];
    else
        return NULL;
    memset(put, 0, sizeof *put);
    return put;
}

void ep_gin_pool_give(struct ep_gin_pool *pool, struct ep_gin_put *put)
{
    put->next = pool->free;
    pool->free = put;
}
