#include "gin.h"

#include <string.h>
#include <sys/mman.h>

/* ---- pages ------------------------------------------------------------------------------------ */

ep_status ep_gin_pages_open(struct ep_gin_comm *comm, uint64_t bytes, void **out, struct ep_error *error)
{
    ep_status status = EP_OK;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (at == MAP_FAILED)
        return ep_error_errno(error, EP_NO_MEMORY, "%llu bytes of staging memory", (unsigned long long)bytes);
    if (comm->cuda)
        status = comm->cuda->host_pin(comm->device, at, bytes, error);
    if (status != EP_OK) {
        munmap(at, bytes);
        return status;
    }
    *out = at;
    return EP_OK;
}

void ep_gin_pages_close(struct ep_gin_comm *comm, void *at, uint64_t bytes)
{
    if (!at || comm->stuck)
        return;
    if (comm->cuda)
        comm->cuda->host_unpin(comm->device, at);
    munmap(at, bytes);
}

/* ---- pieces ------------------------------------------------------------------------------------- */

enum { ALIGNMENT = 64 };

/* Where in the memory the next one would begin; the rest before the end is skipped when it is too short. */
static uint64_t start_of(const struct ep_gin_staging *s, uint64_t bytes)
{
    const uint64_t left = s->bytes - s->taken % s->bytes;

    return left < bytes ? s->taken + left : s->taken;
}

bool ep_gin_staging_take(struct ep_gin_staging *s, uint32_t bytes, uint32_t *piece, void **at)
{
    const uint64_t size = ((uint64_t)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const uint64_t start = start_of(s, size);

    if (s->head - s->tail == EP_GIN_PIECES || start + size - s->freed > s->bytes)
        return false;
    *piece = s->head++ % EP_GIN_PIECES;
    *at = s->at + start % s->bytes;
    s->taken = start + size;
    s->piece[*piece].end = s->taken;
    s->piece[*piece].given_back = false;
    return true;
}

void ep_gin_staging_give(struct ep_gin_staging *s, uint32_t piece, uint64_t mark)
{
    s->piece[piece].mark = mark;
    s->piece[piece].given_back = true;
}

void ep_gin_staging_reclaim(struct ep_gin_staging *s, const struct ep_gin_stream *stream)
{
    while (s->tail != s->head) {
        const uint32_t oldest = s->tail % EP_GIN_PIECES;

        if (!s->piece[oldest].given_back || !ep_gin_stream_reached(stream, s->piece[oldest].mark))
            break;
        s->freed = s->piece[oldest].end;
        s->tail++;
    }
}
