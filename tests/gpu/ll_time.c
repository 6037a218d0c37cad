#include "ll_time.h"

#include <stdlib.h>

#include "pass_private.h"
#include "roofline.h"

enum {
    TIMEOUT_MS = 20000,
    CHAIN = 20,  /* pairs in a graph */
    WARM = 5,    /* samples that do not count: ranks do not begin at the very same time */
    BATCH = 125, /* ops between two waits of the host */
    BATCHES = 4,
    LAYERS = 61, /* pairs between two that differ: as many as DeepSeek-V3 has layers */
    STEPS = 30,  /* of that many pairs */
    PUSHES = 20, /* in a row, of a sample */
    PUSH_SAMPLES = 30
};

/* Samples of every rank; the slowest rank's of each number count. */
struct samples {
    uint32_t n;
    float *us[WORLD_MAX_RANKS];
};

struct timing {
    struct world *world;
    const struct shape *shape;
    struct pass *pass[WORLD_MAX_RANKS];
    uint32_t launches;
    struct samples dispatch, combine, pair, changing, push;
    double kernel_us[WORLD_MAX_RANKS][EP_DEVICE_PARTS];
    uint64_t push_bytes[WORLD_MAX_RANKS];
};

/* ---- samples ------------------------------------------------------------------------- */

static bool samples_init(struct samples *s, uint32_t ranks, uint32_t n)
{
    bool ok = true;

    s->n = n;
    for (uint32_t r = 0; r < ranks; r++)
        ok = (s->us[r] = calloc(n, sizeof *s->us[r])) && ok;
    return ok;
}

static void samples_fini(struct samples *s)
{
    for (uint32_t r = 0; r < WORLD_MAX_RANKS; r++)
        free(s->us[r]);
}

static int compare(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static double slowest_median(const struct samples *s, uint32_t ranks)
{
    float *worst = s->us[0];

    for (uint32_t i = 0; i < s->n; i++)
        for (uint32_t r = 1; r < ranks; r++)
            worst[i] = s->us[r][i] > worst[i] ? s->us[r][i] : worst[i];
    qsort(worst, s->n, sizeof *worst, compare);
    return (double)worst[s->n / 2];
}

/* ---- events -------------------------------------------------------------------------- */

/* n + 1 marks of a stream, and so n times between neighbours. */
struct marks {
    struct world_rank *rank;
    uint32_t n;
    void **event;
};

static ep_status marks_open(struct world_rank *rank, uint32_t n, struct marks *marks, struct ep_error *error)
{
    ep_status status = EP_OK;

    *marks = (struct marks){ .rank = rank, .n = n, .event = calloc(n + 1ull, sizeof *marks->event) };
    if (!marks->event)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for events");
    for (uint32_t i = 0; status == EP_OK && i <= n; i++)
        status = rank->world->api->event_create(rank->device, &marks->event[i], error);
    return status;
}

static void marks_close(struct marks *marks)
{
    for (uint32_t i = 0; marks->event && i <= marks->n; i++)
        if (marks->event[i])
            marks->rank->world->api->event_destroy(marks->rank->device, marks->event[i]);
    free(marks->event);
}

static ep_status mark(struct marks *marks, uint32_t i, struct ep_error *error)
{
    return marks->rank->world->api->event_record(marks->rank->device, marks->event[i], marks->rank->stream,
                                                 error);
}

static ep_status between(struct marks *marks, uint32_t i, float *us, struct ep_error *error)
{
    return marks->rank->world->api->event_elapsed(marks->rank->device, marks->event[i], marks->event[i + 1],
                                                  us, error);
}

/* ---- ops one by one ------------------------------------------------------------------ */

/* Marks 2 i and 2 i + 1 stand before the ops of pair i. */
static ep_status enqueue_batch(struct pass *pass, struct marks *marks, struct ep_error *error)
{
    const struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, true);
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < marks->n / 2; i++) {
        status = mark(marks, 2 * i, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &dispatch, error);
        if (status == EP_OK)
            status = mark(marks, 2 * i + 1, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &combine, error);
    }
    return status == EP_OK ? mark(marks, marks->n, error) : status;
}

static ep_status time_batch(struct timing *t, struct pass *pass, struct marks *marks, uint32_t batch,
                            struct ep_error *error)
{
    const uint32_t r = pass->rank->rank, first = batch * BATCH;
    ep_status status = enqueue_batch(pass, marks, error);

    if (status == EP_OK)
        status = world_wait(pass->rank, error);
    for (uint32_t i = 0; status == EP_OK && i < BATCH; i++) {
        status = between(marks, 2 * (WARM + i), &t->dispatch.us[r][first + i], error);
        if (status == EP_OK)
            status = between(marks, 2 * (WARM + i) + 1, &t->combine.us[r][first + i], error);
    }
    return status;
}

static ep_status read_counters(const struct timing *t, struct world_rank *rank,
                               struct ep_device_counters counters[EP_DEVICE_PARTS], struct ep_error *error)
{
    const bool ht = t->shape->ht;
    const struct ep_device_counters *from = ht ? rank->state->ht_counters : rank->state->counters;

    return rank->world->api->read(rank->device, counters, from, EP_DEVICE_PARTS * sizeof *from, NULL, error);
}

static ep_status time_alone(struct world_rank *rank, void *arg, struct ep_error *error)
{
    struct timing *t = arg;
    struct ep_device_counters before[EP_DEVICE_PARTS], after[EP_DEVICE_PARTS];
    struct marks marks = { 0 };
    ep_status status = marks_open(rank, 2 * (WARM + BATCH), &marks, error);

    if (status == EP_OK)
        status = read_counters(t, rank, before, error);
    for (uint32_t b = 0; status == EP_OK && b < BATCHES; b++)
        status = time_batch(t, t->pass[rank->rank], &marks, b, error);
    if (status == EP_OK)
        status = read_counters(t, rank, after, error);
    for (uint32_t p = 0; status == EP_OK && p < EP_DEVICE_PARTS; p++)
        t->kernel_us[rank->rank][p] =
            (double)(after[p].busy_ns - before[p].busy_ns) / (double)(after[p].count - before[p].count) / 1e3;
    marks_close(&marks);
    return status;
}

/* ---- pairs in a graph ---------------------------------------------------------------- */

static ep_status enqueue_chain(struct pass *pass, struct ep_error *error)
{
    const struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, true);
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < CHAIN; i++) {
        status = world_run(pass->rank, &dispatch, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &combine, error);
    }
    return status;
}

static ep_status capture_chain(struct pass *pass, struct ep_cuda_graph **graph, struct ep_error *error)
{
    const struct ep_cuda_api *api = pass->rank->world->api;
    ep_status status = api->graph_begin(pass->rank->device, pass->rank->stream, error);

    if (status == EP_OK)
        status = enqueue_chain(pass, error);
    return status == EP_OK ? api->graph_end(pass->rank->device, pass->rank->stream, graph, error) : status;
}

static ep_status launch_chains(struct timing *t, struct world_rank *rank, struct ep_cuda_graph *graph,
                               struct marks *marks, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < marks->n; i++) {
        status = mark(marks, i, error);
        if (status == EP_OK)
            status = rank->world->api->graph_launch(graph, rank->stream, error);
    }
    if (status == EP_OK)
        status = mark(marks, marks->n, error);
    if (status == EP_OK)
        status = world_wait(rank, error);
    for (uint32_t i = 0; status == EP_OK && i < t->launches; i++) {
        status = between(marks, WARM + i, &t->pair.us[rank->rank][i], error);
        t->pair.us[rank->rank][i] /= CHAIN;
    }
    return status;
}

static ep_status time_graph(struct world_rank *rank, void *arg, struct ep_error *error)
{
    struct timing *t = arg;
    struct ep_cuda_graph *graph = NULL;
    struct marks marks = { 0 };
    ep_status status = marks_open(rank, WARM + t->launches, &marks, error);

    if (status == EP_OK)
        status = capture_chain(t->pass[rank->rank], &graph, error);
    if (status == EP_OK)
        status = launch_chains(t, rank, graph, &marks, error);
    rank->world->api->graph_destroy(graph);
    marks_close(&marks);
    return status;
}

/* ---- pairs that change ---------------------------------------------------------------- */

/* As in decoding, where each step has another batch. */
static ep_status enqueue_step(struct pass *pass, uint32_t tokens, struct ep_error *error)
{
    struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, true);
    ep_status status = EP_OK;

    dispatch.tokens = combine.tokens = tokens;
    for (uint32_t i = 0; status == EP_OK && i < LAYERS; i++) {
        status = world_run(pass->rank, &dispatch, error);
        if (status == EP_OK)
            status = world_run(pass->rank, &combine, error);
    }
    return status;
}

static ep_status enqueue_steps(struct pass *pass, struct marks *marks, struct ep_error *error)
{
    ep_status status = mark(marks, 0, error);

    for (uint32_t i = 0; status == EP_OK && i < marks->n; i++) {
        status = enqueue_step(pass, pass->tokens - (pass->tokens ? i % 2 : 0), error);
        if (status == EP_OK)
            status = mark(marks, i + 1, error);
    }
    return status == EP_OK ? world_wait(pass->rank, error) : status;
}

static ep_status time_changing(struct world_rank *rank, void *arg, struct ep_error *error)
{
    struct timing *t = arg;
    struct marks marks = { 0 };
    ep_status status = marks_open(rank, WARM + STEPS, &marks, error);

    if (status == EP_OK)
        status = enqueue_steps(t->pass[rank->rank], &marks, error);
    for (uint32_t i = 0; status == EP_OK && i < STEPS; i++) {
        status = between(&marks, WARM + i, &t->changing.us[rank->rank][i], error);
        t->changing.us[rank->rank][i] /= LAYERS;
    }
    marks_close(&marks);
    return status;
}

/* ---- the same bytes with plain stores ------------------------------------------------ */

/* Does this token have a choice at that rank? */
static bool goes_to(const struct pass *pass, uint32_t token, uint32_t rank)
{
    const struct ep_ref_rank *own = &pass->inputs.rank[pass->rank->rank];
    const uint32_t k = pass->shape->top_k;
    uint32_t home, local;

    for (uint32_t j = 0; j < k; j++)
        if (ep_ref_home(&pass->inputs.routing, pass->rank->rank, token, own->topk[token * k + j], &home,
                        &local) &&
            home == rank)
            return true;
    return false;
}

/* Where this rank's rows may lie at another: in our region of its first bank, or of what its ops put out. */
static uint8_t *push_target(const struct pass *pass, uint32_t d, uint32_t token, uint64_t row_bytes)
{
    const struct ep_layout_map *map = &pass->rank->world->map;
    const uint64_t first = (uint64_t)pass->rank->rank * shape_most_tokens(&map->limits, pass->shape);
    uint8_t *window = pass->rank->world->rank[d].window;

    if (pass->shape->ht)
        return window + pass->at.out.offset + (first + token) * row_bytes;
    return window + map->ll + map->bank.rows + first * map->row_bytes + token * row_bytes;
}

/* Each token to each other rank that it goes to, the next rank first. */
static uint32_t list_rows(const struct pass *pass, uint64_t row_bytes, struct roofline_row *rows)
{
    const struct world *world = pass->rank->world;
    uint32_t n = 0;

    for (uint32_t t = 0; t < pass->tokens; t++) {
        for (uint32_t i = 1; i < world->ranks; i++) {
            const uint32_t d = (pass->rank->rank + i) % world->ranks;

            if (goes_to(pass, t, d))
                rows[n++] = (struct roofline_row){
                    .from = pass->rank->window + pass->at.x.offset + t * row_bytes,
                    .to = push_target(pass, d, t, row_bytes),
                };
        }
    }
    return n;
}

static ep_status push_samples(struct timing *t, struct world_rank *rank, struct marks *marks, uint32_t n,
                              uint64_t list, uint32_t row_bytes, struct ep_error *error)
{
    struct ep_cuda_device device;
    ep_status status = rank->world->api->device_info(rank->device, &device, error);

    for (uint32_t i = 0; status == EP_OK && i < marks->n; i++) {
        status = mark(marks, i, error);
        for (uint32_t p = 0; status == EP_OK && p < PUSHES; p++) {
            const char *failure = roofline_push(rank->device, (const void *)(rank->window + list), n,
                                                row_bytes, 2 * device.sms, rank->stream);

            if (failure)
                status =
                    ep_error_set(error, EP_INTERNAL, "pushing rows on device %u: %s", rank->device, failure);
        }
    }
    if (status == EP_OK)
        status = mark(marks, marks->n, error);
    if (status == EP_OK)
        status = world_wait(rank, error);
    for (uint32_t i = 0; status == EP_OK && i < t->push.n; i++) {
        status = between(marks, WARM + i, &t->push.us[rank->rank][i], error);
        t->push.us[rank->rank][i] /= PUSHES;
    }
    return status;
}

/* The list of rows lies where results would: no op runs any more.  A row is as long as what travels. */
static ep_status time_push(struct world_rank *rank, void *arg, struct ep_error *error)
{
    struct timing *t = arg;
    const struct pass *pass = t->pass[rank->rank];
    const uint32_t row_bytes = pass->shape->hidden * ep_ref_bytes(bench_dtypes[pass->shape->dtype].wire);
    struct roofline_row *rows = calloc((size_t)pass->tokens * rank->world->ranks + 1, sizeof *rows);
    struct marks marks = { 0 };
    uint32_t n;
    ep_status status = rows ? EP_OK : ep_error_set(error, EP_NO_MEMORY, "no memory for a list of rows");

    if (status == EP_OK) {
        n = list_rows(pass, row_bytes, rows);
        t->push_bytes[rank->rank] = (uint64_t)n * row_bytes;
        status = world_put(rank, pass->at.result.offset, rows, n * sizeof *rows, error);
    }
    if (status == EP_OK)
        status = marks_open(rank, WARM + t->push.n, &marks, error);
    if (status == EP_OK)
        status = push_samples(t, rank, &marks, n, pass->at.result.offset, row_bytes, error);
    marks_close(&marks);
    free(rows);
    return status;
}

/* ---- all of it ----------------------------------------------------------------------- */

static ep_status open_pass(struct world_rank *rank, void *arg, struct ep_error *error)
{
    struct timing *t = arg;

    return pass_open(rank, t->shape, 0, 0, 1, &t->pass[rank->rank], error);
}

static ep_status verify_once(struct world_rank *rank, void *arg, struct ep_error *error)
{
    const struct timing *t = arg;

    return pass_run(t->pass[rank->rank], 0, false, error);
}

/* A timed dispatch's rows need not mean anything, but they must be numbers: sums of them are as fast. */
static ep_status clear(struct world_rank *rank, void *arg, struct ep_error *error)
{
    const struct timing *t = arg;
    const struct pass_buffers *b = &t->pass[rank->rank]->at;
    ep_status status = world_fill(rank, b->out.offset, 0, b->out.bytes, error);

    return status == EP_OK ? world_fill(rank, b->rows.offset, 0, b->rows.bytes, error) : status;
}

static bool has_push(const struct timing *t)
{
    return t->world->ranks > 1 && !t->world->served;
}

static ep_status run_phases(struct timing *t, bool verify, struct ep_error *error)
{
    const uint64_t all = world_all(t->world);
    ep_status status = world_each(t->world, all, open_pass, t, error);

    if (status == EP_OK && verify)
        status = world_each(t->world, all, verify_once, t, error);
    if (status == EP_OK)
        status = world_each(t->world, all, clear, t, error);
    if (status == EP_OK)
        status = world_each(t->world, all, time_alone, t, error);
    if (status == EP_OK)
        status = world_each(t->world, all, time_graph, t, error);
    if (status == EP_OK)
        status = world_each(t->world, all, time_changing, t, error);
    if (status == EP_OK && has_push(t))
        status = world_each(t->world, all, time_push, t, error);
    return status;
}

static void summarise(struct timing *t, struct ll_times *times)
{
    const uint32_t ranks = t->world->ranks;
    uint64_t most = 0;

    *times = (struct ll_times){ .dispatch = slowest_median(&t->dispatch, ranks),
                                .combine = slowest_median(&t->combine, ranks),
                                .pair = slowest_median(&t->pair, ranks),
                                .changing = slowest_median(&t->changing, ranks),
                                .push = has_push(t) ? slowest_median(&t->push, ranks) : 0,
                                .pairs = t->launches * CHAIN };
    for (uint32_t r = 0; r < ranks; r++) {
        const double *kernel = t->kernel_us[r];

        if (kernel[EP_DEVICE_DISPATCH] > times->dispatch_kernel)
            times->dispatch_kernel = kernel[EP_DEVICE_DISPATCH];
        if (kernel[EP_DEVICE_COMBINE] > times->combine_kernel)
            times->combine_kernel = kernel[EP_DEVICE_COMBINE];
        most = t->push_bytes[r] > most ? t->push_bytes[r] : most;
    }
    if (times->push > 0)
        times->push_gbps = (double)most / times->push / 1e3;
}

ep_status ll_time(const struct ep_cuda_api *api, const struct shape *shape, const struct ll_time_options *o,
                  struct ll_times *times, struct ep_error *error)
{
    struct timing t = { .shape = shape, .launches = (o->pairs + CHAIN - 1) / CHAIN };
    const uint32_t ranks = o->ranks;
    struct world_options options;
    ep_status status = shape_options(shape, ranks, o->gpus, 1, TIMEOUT_MS, &options, error);

    options.served = o->served;
    options.waits = o->polls ? WORLD_POLLED : WORLD_KERNEL; /* one process: nobody switches contexts */
    if (status == EP_OK)
        status = world_open(api, &options, &t.world, error);
    if (status != EP_OK)
        return status;
    if (samples_init(&t.dispatch, ranks, BATCH * BATCHES) &&
        samples_init(&t.combine, ranks, BATCH * BATCHES) && samples_init(&t.pair, ranks, t.launches) &&
        samples_init(&t.changing, ranks, STEPS) && samples_init(&t.push, ranks, PUSH_SAMPLES))
        status = run_phases(&t, o->verify, error);
    else
        status = ep_error_set(error, EP_NO_MEMORY, "no memory for samples");
    if (status == EP_OK)
        summarise(&t, times);
    for (uint32_t r = 0; r < ranks; r++)
        pass_close(t.pass[r]);
    samples_fini(&t.dispatch);
    samples_fini(&t.combine);
    samples_fini(&t.pair);
    samples_fini(&t.changing);
    samples_fini(&t.push);
    world_close(t.world);
    return status;
}
