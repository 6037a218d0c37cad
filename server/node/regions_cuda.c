/*
 * Memory of a worker's own, mapped into the server for the ops that it runs for that worker.
 *
 * The worker is not trusted, and a fault of one of our kernels takes down the ranks of all workers.  So nothing that
 * the worker does may make an address vanish while a kernel can follow it:
 *   - What is mapped is VMM memory, by a descriptor.  The mapping has a reference of its own to the allocation: the
 *     worker may unmap, free or die.  The backend refuses what is no GPU memory, and more bytes than there are.
 *   - Ops find a region in a list that only the server writes, and are held against what it says there (ep_cuda.h:
 *     serve_region).  An op that names another region, or a part beyond the region's end, is refused.
 *   - Memory is unmapped after it was struck off that list and no op runs any more that can have found it there, or
 *     when the executor has ended.  A worker that lets go of memory which its running op uses waits for that op,
 *     which the group's timeout bounds; it keeps nobody else waiting.
 *   - What cannot be told to the GPU, or asked of it, is left mapped until the executor ends.
 *   - If something does not end even then, nothing is unmapped, ever: the rank is stuck (serve_cuda.c).
 *
 * One request at a time: its worker waits for the answer, and who does not is refused.  So a worker keeps one thread
 * of the pool busy at most.  Mapping costs no memory, but holds that of a worker which is gone until we have let go
 * of it: it counts against a bound, from the beginning of its allocation, where mappings have to begin.
 *
 * Each is one mapping of one allocation: with several in a row there would be several descriptors to a request, and
 * requests that are half done.  A worker registers each allocation by itself.
 */
#include <stdlib.h>
#include <unistd.h>

#include "node_private.h"
#include "team_cuda.h"

#define AGAIN_MS 5u /* between two looks at whether an op still runs */

struct mapping {
    struct ep_cuda_memory *memory; /* NULL: there is no region of this number */
    uint64_t bytes;
};

/* The loop's thread's, and while `work` is queued `asked`, `memory` and `error` are the pool's. */
struct cuda_regions {
    const struct ep_cuda_api *api;
    struct ep_cuda_serve *serve;
    uv_loop_t *loop;
    uint32_t device, rank;
    uint64_t most, used; /* bytes that are mapped */
    struct mapping mapping[EP_MAX_REGIONS];

    /* the request; on_done NULL: there is none */
    ep_region_done_fn on_done;
    void *user;
    struct ep_executor_region asked;
    uint64_t entry; /* of unregister: see serve_forget */
    struct ep_cuda_memory *memory;
    struct ep_error error;
    uv_work_t work;
    uv_timer_t again;
    bool working; /* `work` is queued */

    void (*on_idle)(void *user);
    void *idle_user;
};

/* ---- requests ---------------------------------------------------------------------- */

static void begin(struct cuda_regions *regions, ep_region_done_fn on_done, void *user)
{
    regions->on_done = on_done;
    regions->user = user;
    regions->error = (struct ep_error)EP_ERROR_INIT;
}

static void finish(struct cuda_regions *regions)
{
    const struct ep_error error = regions->error;
    ep_region_done_fn on_done = regions->on_done;

    regions->on_done = NULL;
    if (on_done)
        on_done(error.status ? &error : NULL, regions->user);
    if (regions->on_idle)
        regions->on_idle(regions->idle_user);
}

static void queue(struct cuda_regions *regions, uv_work_cb work, uv_after_work_cb after)
{
    regions->working = true;
    uv_queue_work(regions->loop, &regions->work, work, after);
}

static ep_status check_idle(const struct cuda_regions *regions, struct ep_error *error)
{
    return regions->on_done
               ? ep_error_set(error, EP_UNAVAILABLE, "rank %u has a request that is not answered yet: a running op may "
                              "use the memory; ask again", regions->rank)
               : EP_OK;
}

/* ---- register ---------------------------------------------------------------------- */

static ep_status check_place(const struct ep_executor_region *asked, struct ep_error *error)
{
    if (asked->fd < 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "the region came without a descriptor of its memory");
    if (asked->number >= EP_MAX_REGIONS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "region is %u: must be below %u", asked->number,
                            EP_MAX_REGIONS);
    if (asked->offset % 16 != 0) /* kernels rely on it */
        return ep_error_set(error, EP_INVALID_ARGUMENT, "offset is %llu: must be a multiple of 16",
                            (unsigned long long)asked->offset);
    if (asked->bytes == 0 || asked->bytes > EP_REGION_BYTES || asked->offset > EP_REGION_BYTES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "a region of %llu bytes at %llu: no memory is like that",
                            (unsigned long long)asked->bytes, (unsigned long long)asked->offset);
    return EP_OK;
}

static ep_status check_room(const struct cuda_regions *regions, const struct ep_executor_region *asked,
                            struct ep_error *error)
{
    const uint64_t bytes = asked->offset + asked->bytes;

    if (regions->mapping[asked->number].memory)
        return ep_error_set(error, EP_ALREADY_EXISTS, "rank %u has a region %u already", regions->rank, asked->number);
    if (bytes > regions->most - regions->used)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "the region ends %s into its allocation, and %s of rank %u are mapped: the server maps %s "
                            "for one rank; register less, or start ep-server with more --max-region-bytes",
                            ep_bytes_text(bytes).text, ep_bytes_text(regions->used).text, regions->rank,
                            ep_bytes_text(regions->most).text);
    return EP_OK;
}

/* A thread of the pool. */
static void import(uv_work_t *work)
{
    struct cuda_regions *regions = work->data;
    const struct ep_executor_region *asked = &regions->asked;

    (void)regions->api->memory_adopt(regions->device, asked->fd, asked->offset + asked->bytes, &regions->memory,
                                     &regions->error);
    close(asked->fd);
}

/* A list that cannot be written may have got it all the same, so the mapping stays. */
static void list(struct cuda_regions *regions)
{
    const struct ep_executor_region *asked = &regions->asked;
    const struct ep_region region = { (uint8_t *)regions->api->memory_at(regions->memory) + asked->offset,
                                      asked->bytes };

    regions->mapping[asked->number] = (struct mapping){ regions->memory, asked->offset + asked->bytes };
    regions->used += asked->offset + asked->bytes;
    (void)regions->api->serve_region(regions->serve, asked->number, &region, &regions->error);
}

static void on_imported(uv_work_t *work, int cancelled)
{
    struct cuda_regions *regions = work->data;

    (void)cancelled; /* it never is */
    regions->working = false;
    if (!regions->error.status)
        list(regions);
    finish(regions);
}

void cuda_regions_register(struct cuda_regions *regions, const struct ep_executor_region *asked,
                           ep_region_done_fn on_done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    if (check_idle(regions, &error) || check_place(asked, &error) || check_room(regions, asked, &error)) {
        if (asked->fd >= 0)
            close(asked->fd);
        on_done(&error, user);
        return;
    }
    begin(regions, on_done, user);
    regions->asked = *asked;
    queue(regions, import, on_imported);
}

/* ---- unregister -------------------------------------------------------------------- */

/* A thread of the pool: who is the last to have memory gives it back, which takes its time. */
static void unmap(uv_work_t *work)
{
    struct cuda_regions *regions = work->data;

    regions->api->memory_destroy(regions->memory);
}

static void on_unmapped(uv_work_t *work, int cancelled)
{
    struct cuda_regions *regions = work->data;
    struct mapping *mapping = &regions->mapping[regions->asked.number];

    (void)cancelled; /* it never is */
    regions->working = false;
    regions->used -= mapping->bytes;
    *mapping = (struct mapping){ NULL };
    finish(regions);
}

static void on_again(uv_timer_t *timer);

static void unmap_when_unused(struct cuda_regions *regions)
{
    const ep_status status = regions->api->serve_forgotten(regions->serve, regions->entry, &regions->error);

    if (status == EP_UNAVAILABLE) {
        regions->error = (struct ep_error)EP_ERROR_INIT;
        uv_timer_start(&regions->again, on_again, AGAIN_MS, 0);
    } else if (status) {
        finish(regions);
    } else {
        regions->memory = regions->mapping[regions->asked.number].memory;
        queue(regions, unmap, on_unmapped);
    }
}

static void on_again(uv_timer_t *timer)
{
    unmap_when_unused(timer->data);
}

static ep_status forget(struct cuda_regions *regions, uint32_t number, struct ep_error *error)
{
    if (check_idle(regions, error))
        return error->status;
    if (number >= EP_MAX_REGIONS || !regions->mapping[number].memory)
        return ep_error_set(error, EP_NOT_FOUND, "rank %u has no region %u", regions->rank, number);
    return regions->api->serve_forget(regions->serve, number, &regions->entry, error);
}

void cuda_regions_unregister(struct cuda_regions *regions, uint32_t number, ep_region_done_fn on_done, void *user)
{
    struct ep_error error = EP_ERROR_INIT;

    if (forget(regions, number, &error)) {
        on_done(&error, user);
        return;
    }
    begin(regions, on_done, user);
    regions->asked.number = number;
    unmap_when_unused(regions);
}

/* ---- life -------------------------------------------------------------------------- */

struct cuda_regions *cuda_regions_open(const struct cuda_team *team, uint32_t rank, struct ep_cuda_serve *serve)
{
    struct cuda_regions *regions = calloc(1, sizeof *regions);

    if (!regions)
        return NULL;
    regions->api = team->api;
    regions->serve = serve;
    regions->loop = team->loop;
    regions->device = team->ranks[rank].ordinal;
    regions->rank = rank;
    regions->most = team->region_bytes;
    regions->work.data = regions->again.data = regions;
    uv_timer_init(team->loop, &regions->again); /* cannot fail */
    return regions;
}

void cuda_regions_stop(struct cuda_regions *regions, void (*on_idle)(void *user), void *user)
{
    regions->on_idle = on_idle;
    regions->idle_user = user;
    if (regions->working)
        return;
    uv_timer_stop(&regions->again);
    (void)ep_error_set(&regions->error, EP_CANCELLED, "the worker of rank %u leaves", regions->rank);
    finish(regions);
}

static void on_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static struct mapping *first_mapping(struct cuda_regions *regions)
{
    for (uint32_t i = 0; i < EP_MAX_REGIONS; i++)
        if (regions->mapping[i].memory)
            return &regions->mapping[i];
    return NULL;
}

static void on_given_back(uv_work_t *work, int cancelled);

/* One at a time, so that others of the pool get their turn. */
static void give_back(struct cuda_regions *regions)
{
    struct mapping *mapping = first_mapping(regions);

    if (!mapping) {
        uv_close((uv_handle_t *)&regions->again, on_closed);
        return;
    }
    regions->memory = mapping->memory;
    *mapping = (struct mapping){ NULL };
    queue(regions, unmap, on_given_back);
}

static void on_given_back(uv_work_t *work, int cancelled)
{
    (void)cancelled; /* it never is */
    give_back(work->data);
}

void cuda_regions_close(struct cuda_regions *regions, bool unused)
{
    if (unused)
        give_back(regions);
    else
        uv_close((uv_handle_t *)&regions->again, on_closed);
}
