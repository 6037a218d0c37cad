#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_clock.h"

/* An op ends at its group's timeout at the latest; this is for kernels that break that promise. */
#define STUCK_TIMEOUTS 3u
#define POLL_US        20u
#define DUMP_S         30u /* a GPU that answers no more must not hold up the end */
#define POST_OPS       32u /* at a time; twice as many wait */

/* ---- open and close ------------------------------------------------------------------ */

static ep_status share(struct world *world, struct ep_cuda_memory *memory, uint32_t owner,
                       struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t d = 0; status == EP_OK && d < world->gpus; d++)
        if (d != owner)
            status = world->api->memory_share(memory, d, error);
    return status;
}

/* As a server has it: all GPUs are joined by NVLink. */
static ep_status ask_lines(struct world *world, bool pcie, struct ep_error *error)
{
    const uint64_t all = world->gpus < 64 ? (1ull << world->gpus) - 1 : UINT64_MAX;
    struct ep_cuda_device info;

    world->whole_lines = !pcie;
    for (uint32_t d = 0; d < world->gpus; d++) {
        if (world->api->device_info(d, &info, error) != EP_OK)
            return error->status;
        world->whole_lines &= (info.linked & all) == all;
    }
    return EP_OK;
}

static ep_status write_state(struct world_rank *rank, uint32_t timeout_ms, struct ep_error *error)
{
    const struct world *world = rank->world;
    uint64_t bytes = ep_device_state_image_bytes(&world->map, &world->placement);
    void *image = calloc(1, bytes);
    ep_status status;

    if (!image)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for the image of a state");
    ep_device_state_image(&world->map, &world->placement, rank->rank, 1, timeout_ms, image);
    ((struct ep_device_state *)image)->whole_lines = world->whole_lines;
    status = world->api->write(rank->device, rank->state, image, bytes, rank->stream, error);
    free(image);
    return status;
}

static ep_status open_memory(struct world_rank *rank, uint32_t timeout_ms, struct ep_error *error)
{
    struct world *world = rank->world;
    const struct ep_cuda_api *api = world->api;
    ep_status status = api->stream_create(rank->device, &rank->stream, error);

    if (status == EP_OK)
        status = api->memory_create(rank->device, world->map.total_bytes, &rank->window_memory, error);
    if (status == EP_OK)
        status = share(world, rank->window_memory, rank->device, error);
    if (status == EP_OK)
        status = api->memory_create(rank->device, ep_device_state_bytes(&world->map, &world->placement),
                                    &rank->state_memory, error);
    if (status != EP_OK)
        return status;
    rank->window = api->memory_at(rank->window_memory);
    rank->state = api->memory_at(rank->state_memory);
    return write_state(rank, timeout_ms, error);
}

/* Keeps ops posted until the serve is ended. */
static void *serve_rank(void *arg)
{
    struct world_rank *rank = arg;
    const struct ep_cuda_api *api = rank->world->api;
    struct ep_error error = EP_ERROR_INIT;

    while (api->serve_post(rank->serve, POST_OPS, &error) == EP_OK && api->serve_wait(rank->serve, &error) == EP_OK)
        ;
    if (error.status != EP_CANCELLED)
        fprintf(stderr, "rank %u is served no more: %s\n", rank->rank, error.text);
    return NULL;
}

static ep_status open_serve(struct world_rank *rank, const struct ep_cuda_rank_options *options,
                            struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    struct ep_cuda_serve *serve;
    ep_status status = api->serve_open(options, &serve, error);

    if (status != EP_OK)
        return status;
    rank->serve = serve;
    if (pthread_create(&rank->server, NULL, serve_rank, rank) == 0)
        return EP_OK;
    fprintf(stderr, "no thread to serve rank %u\n", rank->rank);
    _exit(1);
}

/* After this no kernel of ours runs, or the program ends. */
static void close_serve(struct world_rank *rank)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!rank->serve) /* or not even opened */
        return;
    const struct ep_cuda_api *api = rank->world->api;

    if (api->serve_end(rank->serve, (uint32_t)(rank->world->stuck_ns / EP_NS_PER_MS), &error) != EP_OK) {
        fflush(stdout);
        fprintf(stderr, "rank %u: %s\n", rank->rank, error.text);
        _exit(1);
    }
    pthread_join(rank->server, NULL);
    api->serve_close(rank->serve);
    api->ring_close(rank->ringer);
    rank->serve = NULL;
    rank->ringer = NULL;
}

static enum world_waits waits_of(const struct world_rank *rank)
{
    static const enum world_waits turns[] = { WORLD_STREAMS, WORLD_KERNEL, WORLD_POLLED };
    static uint32_t worlds;
    const uint32_t turn = rank->rank == 0 ? worlds++ : worlds + rank->rank - 1;

    return rank->world->waits == WORLD_BY_TURNS ? turns[turn % 3] : rank->world->waits;
}

/* Ranks of one GPU share its multiprocessors, so that the kernels of all of them fit at once. */
static ep_status open_ops(struct world_rank *rank, struct ep_error *error)
{
    const struct world *world = rank->world;
    uint32_t sharing = (world->ranks + world->gpus - 1) / world->gpus;
    void *windows[WORLD_MAX_RANKS];
    struct ep_cuda_device device;
    enum world_waits waits;
    struct ep_cuda_rank_options options = { .device = rank->device,
                                            .rank = rank->rank,
                                            .map = &world->map,
                                            .placement = &world->placement,
                                            .windows = windows,
                                            .state = rank->state };
    ep_status status = world->api->device_info(rank->device, &device, error);

    if (status != EP_OK)
        return status;
    for (uint32_t r = 0; r < world->ranks; r++)
        windows[r] = world->rank[r].window;
    options.max_sms = world->max_sms;
    if (sharing > 1 && (world->max_sms == 0 || world->max_sms > device.sms / sharing))
        options.max_sms = device.sms / sharing;
    if (!world->served)
        return world->api->rank_open(&options, &rank->ops, error);
    waits = waits_of(rank);
    options.polls = waits == WORLD_POLLED;
    status = world->api->ring_open(rank->device, rank->window, waits != WORLD_STREAMS, &rank->ringer, error);
    return status == EP_OK ? open_serve(rank, &options, error) : status;
}

ep_status world_open(const struct ep_cuda_api *api, const struct world_options *options, struct world **out,
                     struct ep_error *error)
{
    struct world *world = calloc(1, sizeof *world);
    ep_status status;

    if (!world) {
        struct ep_placement placement = options->placement;

        ep_placement_free(&placement);
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a world");
    }
    world->api = api;
    world->ranks = options->limits.ranks;
    world->gpus = options->gpus;
    world->served = options->served;
    world->waits = options->waits;
    world->max_sms = options->max_sms;
    world->stuck_ns = STUCK_TIMEOUTS * options->timeout_ms * EP_NS_PER_MS;
    world->placement = options->placement;
    status = ask_lines(world, options->pcie, error);
    if (status == EP_OK)
        status = ep_layout_compute(&options->limits, &world->map, error);
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++) {
        world->rank[r] = (struct world_rank){ .world = world, .rank = r, .device = r % world->gpus };
        world->from[r] = world->ht_from[r] = 1;
        status = open_memory(&world->rank[r], options->timeout_ms, error);
    }
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        status = open_ops(&world->rank[r], error);
    if (status == EP_OK)
        *out = world;
    else
        world_close(world);
    return status;
}

/* Nobody's memory goes while another rank's kernel may still write to it: streams first. */
void world_close(struct world *world)
{
    const struct ep_cuda_api *api;

    if (!world)
        return;
    api = world->api;
    for (uint32_t r = 0; r < world->ranks; r++)
        if (world->rank[r].stream)
            (void)world_wait(&world->rank[r], NULL);
    for (uint32_t r = 0; r < world->ranks; r++)
        close_serve(&world->rank[r]);
    for (uint32_t r = 0; r < world->ranks; r++) {
        struct world_rank *rank = &world->rank[r];

        api->rank_close(rank->ops);
        if (rank->stream)
            api->stream_destroy(rank->device, rank->stream);
        api->memory_destroy(rank->state_memory);
        api->memory_destroy(rank->window_memory);
    }
    ep_placement_free(&world->placement);
    free(world);
}

/* ---- threads ------------------------------------------------------------------------- */

struct job {
    pthread_t thread;
    struct world_rank *rank;
    world_fn fn;
    void *arg;
    uint32_t *failures; /* of all jobs so far */
    uint32_t failure;   /* which of them this job's is, from 1; 0: it has not failed */
    struct ep_error error;
};

static void *do_job(void *arg)
{
    struct job *job = arg;

    if (job->fn(job->rank, job->arg, &job->error) != EP_OK) {
        job->failure = __atomic_add_fetch(job->failures, 1, __ATOMIC_RELAXED);
        (void)world_leave(job->rank->world, job->rank->rank, NULL); /* peers need not wait for its next op */
    }
    return NULL;
}

ep_status world_each(struct world *world, uint64_t mask, world_fn fn, void *arg, struct ep_error *error)
{
    struct job *jobs = calloc(world->ranks, sizeof *jobs);
    uint32_t failures = 0;
    ep_status status = EP_OK;

    if (!jobs)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for threads");
    for (uint32_t r = 0; r < world->ranks; r++) {
        jobs[r] = (struct job){ .rank = &world->rank[r], .fn = fn, .arg = arg, .failures = &failures };
        if (mask >> r & 1 && pthread_create(&jobs[r].thread, NULL, do_job, &jobs[r]) != 0) {
            fprintf(stderr, "no thread for rank %u\n", r); /* its peers would wait for it */
            _exit(1);
        }
    }
    for (uint32_t r = 0; r < world->ranks; r++) {
        if (!(mask >> r & 1))
            continue;
        pthread_join(jobs[r].thread, NULL);
        if (jobs[r].failure == 1)
            status = ep_error_set(error, jobs[r].error.status, "rank %u: %.320s", r, jobs[r].error.text);
    }
    free(jobs);
    return status;
}

/* ---- waiting ------------------------------------------------------------------------- */

static struct ep_device_report *report_of(const struct world_rank *rank)
{
    return &((struct ep_control *)(void *)rank->window)->gpu.report;
}

/* The words of a set that a world's ranks have. */
static unsigned long long mask_of(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

static void print_state(const struct world_rank *rank)
{
    static struct ep_device_state s;
    static struct ep_device_report report;
    struct ep_error error = EP_ERROR_INIT;

    if (rank->world->api->read(rank->device, &s, rank->state, sizeof s, NULL, &error) != EP_OK
        || rank->world->api->read(rank->device, &report, report_of(rank), sizeof report, NULL, &error) != EP_OK) {
        fprintf(stderr, "  rank %u: %s\n", rank->rank, error.text);
        return;
    }
    fprintf(stderr,
            "  rank %u: number %llu begun %llu sequence %llu pushed %u done %u gone %#llx late %#llx phase %u",
            rank->rank, (unsigned long long)s.number, (unsigned long long)s.begun,
            (unsigned long long)s.scratch.sequence, s.scratch.pushed, s.scratch.done,
            mask_of(s.scratch.ranks[0].gone, s.scratch.ranks[1].gone),
            mask_of(s.scratch.ranks[0].late, s.scratch.ranks[1].late), s.scratch.late_phase);
    fprintf(stderr, " failures %llu released", (unsigned long long)report.failures);
    for (uint32_t b = 0; b < rank->world->map.limits.ll_banks; b++)
        fprintf(stderr, " %llu", (unsigned long long)s.released[b]);
    fprintf(stderr, " HT number %llu begun %llu run %#llx status %d barrier %u pushed %u gone %#llx late %#llx phase %u",
            (unsigned long long)s.ht_number, (unsigned long long)s.ht_begun, (unsigned long long)s.ht_run.tag,
            s.ht_run.status, s.ht_run.barrier, s.ht_run.pushed, mask_of(s.ht_run.gone[0], s.ht_run.gone[1]),
            mask_of(s.ht_run.late[0], s.ht_run.late[1]), s.ht_run.first_late >> 16);
    fprintf(stderr, " from");
    for (uint32_t r = 0; r < rank->world->ranks; r++)
        fprintf(stderr, s.from[r] == EP_DEVICE_NEVER ? " never" : " %llu", (unsigned long long)s.from[r]);
    fprintf(stderr, "\n");
}

/* Kernels that hang would hang the driver's clean-up too, so there is none. */
__attribute__((noreturn)) static void give_up(const struct world_rank *rank)
{
    alarm(DUMP_S);
    fflush(stdout);
    fprintf(stderr, "rank %u: its stream did not come to an end\n", rank->rank);
    for (uint32_t r = 0; r < rank->world->ranks; r++)
        print_state(&rank->world->rank[r]);
    fflush(stderr);
    _exit(1);
}

ep_status world_wait(struct world_rank *rank, struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    uint64_t end = ep_clock_ns() + rank->world->stuck_ns;
    ep_status status;

    while ((status = api->stream_query(rank->device, rank->stream, error)) == EP_UNAVAILABLE) {
        if (ep_clock_ns() > end)
            give_up(rank);
        usleep(POLL_US);
    }
    return status;
}

/* ---- ops ----------------------------------------------------------------------------- */

ep_status world_ring(struct world_rank *rank, const struct ep_op *op, struct ep_error *error)
{
    return rank->world->api->ring(rank->ringer, op, rank->stream, error);
}

ep_status world_run(struct world_rank *rank, const struct ep_op *op, struct ep_error *error)
{
    const struct ep_cuda_api *api = rank->world->api;
    ep_status status = ep_op_check(&rank->world->map, op, error);

    if (status != EP_OK)
        return status;
    return rank->serve ? world_ring(rank, op, error) : api->rank_run(rank->ops, op, rank->stream, error);
}

static ep_status read_state(struct world_rank *rank, const void *from, void *to, uint64_t bytes,
                            struct ep_error *error)
{
    return rank->world->api->read(rank->device, to, from, bytes, NULL, error);
}

static ep_status write_word(struct world_rank *rank, uint64_t *word, uint64_t value, struct ep_error *error)
{
    return rank->world->api->write(rank->device, word, &value, sizeof value, NULL, error);
}

ep_status world_record(struct world_rank *rank, uint32_t handle, uint32_t part,
                       struct ep_device_record *record, struct ep_error *error)
{
    return read_state(rank, &report_of(rank)->records[handle][part], record, sizeof *record, error);
}

/* ---- memory -------------------------------------------------------------------------- */

ep_status world_put(struct world_rank *rank, uint64_t offset, const void *from, uint64_t bytes,
                    struct ep_error *error)
{
    if (bytes == 0)
        return EP_OK;
    return rank->world->api->write(rank->device, rank->window + offset, from, bytes, rank->stream, error);
}

ep_status world_get(struct world_rank *rank, uint64_t offset, void *to, uint64_t bytes,
                    struct ep_error *error)
{
    if (bytes == 0)
        return EP_OK;
    return rank->world->api->read(rank->device, to, rank->window + offset, bytes, rank->stream, error);
}

ep_status world_fill(struct world_rank *rank, uint64_t offset, uint8_t value, uint64_t bytes,
                     struct ep_error *error)
{
    if (bytes == 0)
        return EP_OK;
    return rank->world->api->fill(rank->device, rank->window + offset, value, bytes, rank->stream, error);
}

/* ---- membership ---------------------------------------------------------------------- */

ep_status world_set_timeout(struct world *world, uint32_t timeout_ms, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        status =
            write_word(&world->rank[r], &world->rank[r].state->timeout_ns, timeout_ms * 1000000ull, error);
    return status;
}

/* Everybody learns from which numbers on `rank` takes part: that of HT counts when it is not absent. */
static ep_status set_from(struct world *world, uint32_t rank, uint64_t number, struct ep_error *error)
{
    ep_status status = EP_OK;

    world->from[rank] = number;
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        status = write_word(&world->rank[r], &world->rank[r].state->ht_from[rank], world->ht_from[rank], error);
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        status = write_word(&world->rank[r], &world->rank[r].state->from[rank], number, error);
    return status;
}

/* As libepclient does when its rank is lost: an op that still runs ends. */
static ep_status cut(struct world_rank *rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < rank->world->ranks; r++)
        status = write_word(rank, &rank->state->from[r], EP_DEVICE_NEVER, error);
    return status;
}

ep_status world_leave(struct world *world, uint32_t rank, struct ep_error *error)
{
    ep_status status = set_from(world, rank, EP_DEVICE_NEVER, error);

    return status == EP_OK ? cut(&world->rank[rank], error) : status;
}

/* The rank's own counts go on where its peers' are; its handles belong to nobody. */
static ep_status start_at(struct world_rank *rank, uint64_t number, struct ep_error *error)
{
    static const struct ep_device_handle none[EP_MAX_HANDLES];
    static const struct ep_device_ht_handle ht_none[EP_MAX_HANDLES];
    struct ep_device_state *state = rank->state;
    const uint64_t ht = rank->world->ht_from[rank->rank] - 1;
    ep_status status = rank->world->api->write(rank->device, state->handles, none, sizeof none, NULL, error);

    if (status == EP_OK)
        status = rank->world->api->write(rank->device, state->ht_handles, ht_none, sizeof ht_none, NULL, error);
    for (uint32_t r = 0; status == EP_OK && r < rank->world->ranks; r++) {
        status = write_word(rank, &state->ht_from[r], rank->world->ht_from[r], error);
        if (status == EP_OK)
            status = write_word(rank, &state->from[r], rank->world->from[r], error);
    }
    if (status == EP_OK)
        status = write_word(rank, &state->number, number - 1, error);
    if (status == EP_OK)
        status = write_word(rank, &state->begun, number - 1, error);
    if (status == EP_OK)
        status = write_word(rank, &state->ht_number, ht, error);
    if (status == EP_OK)
        status = write_word(rank, &state->ht_combines, 0, error);
    return status == EP_OK ? write_word(rank, &state->ht_begun, ht, error) : status;
}

ep_status world_begun(struct world_rank *rank, bool ht, uint64_t *number, struct ep_error *error)
{
    return read_state(rank, ht ? &rank->state->ht_begun : &rank->state->begun, number, sizeof *number, error);
}

/* What a rank began in an earlier life counts too: peers may have got some of it. */
static ep_status read_next(struct world *world, bool ht, uint64_t *number, struct ep_error *error)
{
    uint64_t begun = 0;
    ep_status status = EP_OK;

    *number = 0;
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++) {
        status = world_begun(&world->rank[r], ht, &begun, error);
        if (begun >= *number)
            *number = begun + 1;
    }
    return status;
}

ep_status world_next(struct world *world, struct world_numbers *next, struct ep_error *error)
{
    ep_status status = read_next(world, false, &next->ll, error);

    return status == EP_OK ? read_next(world, true, &next->ht, error) : status;
}

ep_status world_join_at(struct world *world, uint32_t rank, const struct world_numbers *from, struct ep_error *error)
{
    ep_status status;

    world->ht_from[rank] = from->ht;
    status = start_at(&world->rank[rank], from->ll, error);
    return status == EP_OK ? set_from(world, rank, from->ll, error) : status;
}

ep_status world_join(struct world *world, uint32_t rank, struct ep_error *error)
{
    struct world_numbers next;
    ep_status status = world_next(world, &next, error);

    return status == EP_OK ? world_join_at(world, rank, &next, error) : status;
}

ep_status world_hold(struct world *world, bool held, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        status = write_word(&world->rank[r], &world->rank[r].state->held, held, error);
    return status;
}

/* Rows of old numbers would pass for new ones.  A mailbox may have been rung for what no stream waits for: only when
 * nobody serves it does nothing run. */
ep_status world_reset(struct world *world, uint32_t timeout_ms, struct ep_error *error)
{
    const struct ep_layout_map *map = &world->map;
    ep_status status = EP_OK;

    for (uint32_t r = 0; r < world->ranks; r++)
        close_serve(&world->rank[r]);
    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++) {
        world->from[r] = world->ht_from[r] = 1;
        status = world_fill(&world->rank[r], map->ll, 0, map->limits.ll_banks * map->bank_bytes, error);
        if (status == EP_OK && map->ht_bytes)
            status = world_fill(&world->rank[r], map->ht, 0, map->ht_combine_rows - map->ht, error);
        if (status == EP_OK)
            status = world_fill(&world->rank[r], offsetof(struct ep_control, wake), 0,
                                sizeof(struct ep_control) - offsetof(struct ep_control, wake), error);
        if (status == EP_OK)
            status = write_state(&world->rank[r], timeout_ms, error);
    }
    for (uint32_t r = 0; status == EP_OK && world->served && r < world->ranks; r++)
        status = open_ops(&world->rank[r], error);
    return status;
}
