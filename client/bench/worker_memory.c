/*
 * A case's memory at one rank: what ops use, and what this process reads and writes itself.  On the host
 * backend that is the same memory.  On a GPU there are copies, and they move between the ops here, never
 * while something is timed.  What ops use is in the arena, or with --memory=own GPU memory that this process makes
 * for itself, as an application has tensors, and registers.
 */
#include <stdlib.h>
#include <string.h>

#include "worker_private.h"

enum { FILL_BYTES = 8 << 20, POISON = 0xa5, SCALE_ALIGN = 16 };

/* One of the buffers, and where the two pointers to it are kept. */
struct slot {
    const char *name;
    size_t bytes;
    void *there, *own;
    bool peers; /* write it, in an HT dispatch: then it is in the window */
};

static void list(struct worker *worker, struct slot slots[WORKER_BUFFERS])
{
    const struct buffer_sizes *s = &worker->sizes;
    struct buffers *b = &worker->buffers, *o = &worker->own;
    const bool ht = worker->of.mode == EP_MODE_HT;
    const struct slot all[WORKER_BUFFERS] = {
        { "tokens", s->x, &b->x, &o->x, false },
        { "scales", s->x_scales, &b->x_scales, &o->x_scales, false },
        { "topk_idx", s->topk, &b->topk, &o->topk, false },
        { "topk_weights", s->weights, &b->weights, &o->weights, false },
        { "out", s->out, &b->out, &o->out, ht },
        { "out_scales", s->out_scales, &b->out_scales, &o->out_scales, ht },
        { "counts", s->counts, &b->counts, &o->counts, false },
        { "offsets", s->offsets, &b->offsets, &o->offsets, false },
        { "out_topk", s->out_topk, &b->out_topk, &o->out_topk, false },
        { "out_weights", s->out_weights, &b->out_weights, &o->out_weights, false },
        { "sources", s->sources, &b->sources, &o->sources, false },
        { "rows", s->rows, &b->rows, &o->rows, false },
        { "result", s->result, &b->result, &o->result, false },
        { "bias", s->bias, &b->bias, &o->bias, false },
        { "row_grads", s->row_grads, &b->row_grads, &o->row_grads, false },
        { "topk_grads", s->topk_grads, &b->topk_grads, &o->topk_grads, false },
    };

    memcpy(slots, all, sizeof all);
}

/* The pointers have types of their own. */
static void *get(const void *at)
{
    void *memory;

    memcpy(&memory, at, sizeof memory);
    return memory;
}

static void set(void *at, void *memory)
{
    memcpy(at, &memory, sizeof memory);
}

/* ---- life -------------------------------------------------------------------------- */

static ep_status take(struct worker *worker, const struct slot *slot, struct ep_error *error)
{
    void *there = ep_alloc(worker->ep, slot->bytes);

    set(slot->there, there);
    if (there)
        return EP_OK;
    return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "%zu bytes for %s: %s", slot->bytes, slot->name,
                        ep_error_message());
}

static ep_status make(struct worker *worker, const struct slot *slot, struct ep_cuda_memory **memory,
                      struct ep_error *error)
{
    ep_status status = worker->cuda->memory_create(worker->device, slot->bytes, memory, error);

    if (status != EP_OK)
        return ep_error_prefix(error, "%s", slot->name);
    set(slot->there, worker->cuda->memory_at(*memory));
    status = ep_register(worker->ep, get(slot->there), slot->bytes);
    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_register");
}

static ep_status open_slot(struct worker *worker, const struct slot *slot, struct ep_cuda_memory **memory,
                           struct ep_error *error)
{
    void *own;
    ep_status status;

    if (slot->bytes == 0)
        return EP_OK;
    status = worker->config->own_memory && !slot->peers ? make(worker, slot, memory, error) : take(worker, slot, error);
    if (status != EP_OK)
        return status;
    own = worker->gpu ? malloc(slot->bytes) : get(slot->there);
    set(slot->own, own);
    return own ? EP_OK
               : ep_error_set(error, EP_NO_MEMORY, "no memory for a copy of %s, %zu bytes", slot->name,
                              slot->bytes);
}

static ep_status open_kept(struct worker *worker, struct ep_error *error)
{
    const struct buffer_sizes *s = &worker->sizes;

    if (worker->of.pass != BENCH_BACKWARD)
        return EP_OK;
    worker->kept = (struct kept){ malloc(s->out + 1), malloc(s->out_scales + 1) };
    return worker->kept.rows && worker->kept.scales
               ? EP_OK
               : ep_error_set(error, EP_NO_MEMORY, "no memory to keep %zu bytes until the backward pass", s->out);
}

/* Rows that arrive in the window have a place of their own here, packed like `rows`. */
static ep_status open_view(struct worker *worker, struct ep_error *error)
{
    const uint64_t slots = (uint64_t)worker->config->ranks * worker->info.group.ll_max_tokens;
    ep_dtype wire = bench_dtypes[worker->of.dtype].wire;
    struct view *view = &worker->view;

    view->row = (uint64_t)worker->inputs.hidden * ep_ref_bytes(wire);
    view->scale_row = (worker->inputs.scales * sizeof(float) + SCALE_ALIGN - 1) / SCALE_ALIGN * SCALE_ALIGN;
    if (!worker->gpu || worker->of.layout != EP_LAYOUT_RANK_MAJOR)
        return EP_OK;
    view->rows = malloc(slots * view->row);
    view->scales = wire == EP_FP8_E4M3 ? malloc(slots * view->scale_row) : NULL;
    if (!view->rows || (wire == EP_FP8_E4M3 && !view->scales))
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a copy of the window's rows");
    return EP_OK;
}

ep_status memory_open(struct worker *worker, struct ep_error *error)
{
    struct slot slots[WORKER_BUFFERS];
    ep_status status = open_view(worker, error);

    if (status == EP_OK)
        status = open_kept(worker, error);
    list(worker, slots);
    for (int i = 0; status == EP_OK && i < WORKER_BUFFERS; i++)
        status = open_slot(worker, &slots[i], &worker->memory[i], error);
    return status;
}

void memory_close(struct worker *worker)
{
    struct slot slots[WORKER_BUFFERS];

    list(worker, slots);
    for (int i = 0; i < WORKER_BUFFERS; i++) {
        if (worker->gpu)
            free(get(slots[i].own));
        if (worker->memory[i]) {
            ep_unregister(worker->ep, get(slots[i].there)); /* fails when registering did */
            worker->cuda->memory_destroy(worker->memory[i]);
            worker->memory[i] = NULL;
        } else if (get(slots[i].there)) {
            ep_free(worker->ep, get(slots[i].there));
        }
    }
    free(worker->view.rows);
    free(worker->view.scales);
    free(worker->kept.rows);
    free(worker->kept.scales);
    worker->buffers = worker->own = (struct buffers){ 0 };
    worker->view = (struct view){ 0 };
    worker->kept = (struct kept){ 0 };
}

/* ---- copies ------------------------------------------------------------------------ */

ep_status memory_push(struct worker *worker, void *there, const void *own, size_t bytes,
                      struct ep_error *error)
{
    ep_status status = there == own ? EP_OK : ep_write(worker->ep, there, own, bytes, worker->stream);

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_write");
}

ep_status memory_pull(struct worker *worker, void *own, const void *there, size_t bytes,
                      struct ep_error *error)
{
    ep_status status = there == own ? EP_OK : ep_read(worker->ep, own, there, bytes, worker->stream);

    return status == EP_OK ? EP_OK : worker_failure(error, status, "ep_read");
}

ep_status memory_fill(struct worker *worker, void *there, int value, size_t bytes, struct ep_error *error)
{
    size_t chunk = bytes < FILL_BYTES ? bytes : FILL_BYTES;
    ep_status status = EP_OK;
    void *filled;

    if (!there || bytes == 0)
        return EP_OK;
    if (!worker->gpu) {
        memset(there, value, bytes);
        return EP_OK;
    }
    filled = malloc(chunk);
    if (!filled)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to fill a buffer from");
    memset(filled, value, chunk);
    for (size_t at = 0; status == EP_OK && at < bytes; at += chunk)
        status =
            memory_push(worker, (char *)there + at, filled, bytes - at < chunk ? bytes - at : chunk, error);
    free(filled);
    return status;
}

/* Only there: what this process looks at later is copied first. */
ep_status memory_poison(struct worker *worker, struct ep_error *error)
{
    const struct buffer_sizes *s = &worker->sizes;
    const struct buffers *b = &worker->buffers;
    const struct {
        void *there;
        size_t bytes;
    } outputs[] = {
        { b->out, s->out },           { b->out_scales, s->out_scales },
        { b->counts, s->counts },     { b->offsets, s->offsets },
        { b->out_topk, s->out_topk }, { b->out_weights, s->out_weights },
        { b->sources, s->sources },   { b->rows, s->rows },
        { b->result, s->result },     { b->row_grads, s->row_grads },
        { b->topk_grads, s->topk_grads },
    };
    ep_status status = EP_OK;

    for (size_t i = 0; status == EP_OK && i < sizeof outputs / sizeof *outputs; i++)
        status = memory_fill(worker, outputs[i].there, POISON, outputs[i].bytes, error);
    return status;
}

/* Of `bytes` for all tokens, those from token `first` on come first. */
static ep_status push_from(struct worker *worker, void *there, const void *own, size_t bytes, uint32_t first,
                           struct ep_error *error)
{
    const size_t before = worker->tokens ? bytes / worker->tokens * first : 0;
    ep_status status = memory_push(worker, there, (const char *)own + before, bytes - before, error);

    return status == EP_OK && before ? memory_push(worker, (char *)there + bytes - before, own, before, error)
                                     : status;
}

ep_status memory_push_inputs(struct worker *worker, uint32_t first, struct ep_error *error)
{
    const struct buffer_sizes *s = &worker->sizes;
    const struct buffers *b = &worker->buffers, *o = &worker->own;
    ep_status status = push_from(worker, b->x, o->x, s->x, first, error);

    if (status == EP_OK && o->x_scales)
        status = push_from(worker, b->x_scales, o->x_scales, s->x_scales, first, error);
    if (status == EP_OK)
        status = push_from(worker, b->topk, o->topk, s->topk, first, error);
    if (status == EP_OK)
        status = push_from(worker, b->weights, o->weights, s->weights, first, error);
    return status == EP_OK ? push_from(worker, b->bias, o->bias, s->bias, first, error) : status;
}

ep_status memory_pull_result(struct worker *worker, struct ep_error *error)
{
    const struct buffers *b = &worker->buffers, *o = &worker->own;
    ep_status status = memory_pull(worker, o->result, b->result, worker->sizes.result, error);

    return status == EP_OK ? memory_pull(worker, o->topk_grads, b->topk_grads, worker->sizes.topk_grads, error)
                           : status;
}

/* All of it, as it is small. */
ep_status memory_receive_tables(struct worker *worker, struct ep_error *error)
{
    const struct buffer_sizes *s = &worker->sizes;
    const struct buffers *b = &worker->buffers, *o = &worker->own;
    ep_status status = memory_pull(worker, o->counts, b->counts, s->counts, error);

    if (status == EP_OK)
        status = memory_pull(worker, o->offsets, b->offsets, s->offsets, error);
    if (status == EP_OK)
        status = memory_pull(worker, o->out_topk, b->out_topk, s->out_topk, error);
    if (status == EP_OK)
        status = memory_pull(worker, o->out_weights, b->out_weights, s->out_weights, error);
    return status == EP_OK ? memory_pull(worker, o->sources, b->sources, s->sources, error) : status;
}

/* ---- rows -------------------------------------------------------------------------- */

/* Rows by position: packed, or rank r's at r * stride. */
struct rows {
    char *base;
    uint64_t stride, row; /* stride 0: packed */
};

static char *row_at(const struct worker *worker, const struct rows *rows, uint64_t position)
{
    const uint64_t most = worker->info.group.ll_max_tokens;

    if (rows->stride == 0)
        return rows->base + position * rows->row;
    return rows->base + position / most * rows->stride + position % most * rows->row;
}

/* How many rows of the plan, from the i-th, lie one after the other wherever they are. */
static uint64_t run_length(const struct worker *worker, const struct ep_ref_dispatch *plan, uint64_t i)
{
    const bool by_rank = worker->of.layout == EP_LAYOUT_RANK_MAJOR;
    uint64_t n = 1;

    while (i + n < plan->n_rows && plan->rows[i + n].position == plan->rows[i].position + n &&
           !(by_rank && plan->rows[i + n].position % worker->info.group.ll_max_tokens == 0))
        n++;
    return n;
}

static ep_status copy_rows(struct worker *worker, const struct ep_ref_dispatch *plan,
                           const struct rows *there, const struct rows *own, bool push,
                           struct ep_error *error)
{
    ep_status status = EP_OK;
    uint64_t n;

    for (uint64_t i = 0; status == EP_OK && i < plan->n_rows; i += n) {
        const uint64_t position = plan->rows[i].position;

        n = run_length(worker, plan, i);

        char *at = row_at(worker, there, position), *mine = row_at(worker, own, position);

        status = push ? memory_push(worker, at, mine, n * there->row, error)
                      : memory_pull(worker, mine, at, n * there->row, error);
        worker_get_on(worker);
    }
    return status;
}

/* Where what arrived is for this process to look at. */
static void describe(const struct worker *worker, const ep_op_info *info, struct received *received)
{
    const uint64_t most = worker->info.group.ll_max_tokens;
    const bool in_window = worker->of.layout == EP_LAYOUT_RANK_MAJOR;
    const struct view *view = &worker->view;
    ep_dtype wire = bench_dtypes[worker->of.dtype].wire;
    const bool fp8 = wire == EP_FP8_E4M3;

    *received = (struct received){
        .layout = worker->of.layout,
        .dtype = wire,
        .hidden = worker->inputs.hidden,
        .scales = worker->inputs.scales,
        .top_k = worker->config->top_k,
        .max_tokens = (uint32_t)most,
        .row_bytes = view->row,
        .base = worker->own.out,
        .scale_base = fp8 ? worker->own.out_scales : NULL,
        .scale_format = worker->of.scales,
        .scale_row = worker->inputs.scale_bytes,
        .counts = worker->own.counts,
        .offsets = worker->own.offsets,
        .topk = worker->own.out_topk,
        .weights = worker->own.out_weights,
    };
    if (!in_window)
        return;
    received->base = worker->gpu ? view->rows : info->view;
    received->stride = worker->gpu ? most * view->row : info->view_stride;
    received->scale_row = worker->gpu ? view->scale_row : info->scales_row_stride;
    received->scale_stride = worker->gpu ? most * view->scale_row : info->scales_view_stride;
    if (fp8)
        received->scale_base = worker->gpu ? view->scales : info->scales_view;
}

/* The rows are the window's or the library's: this process may write them. */
static char *writable(const void *memory)
{
    return (char *)(uintptr_t)memory;
}

ep_status memory_receive(struct worker *worker, const struct ep_ref_dispatch *plan, const ep_op_info *info,
                         struct received *received, struct ep_error *error)
{
    const bool in_window = worker->of.layout == EP_LAYOUT_RANK_MAJOR;
    const struct buffers *b = &worker->buffers;
    ep_status status;

    describe(worker, info, received);
    if (!worker->gpu || (in_window && !info->view))
        return EP_OK;

    const struct rows there = { in_window ? writable(info->view) : b->out, info->view_stride,
                                received->row_bytes };
    const struct rows own = { writable(received->base), received->stride, received->row_bytes };
    const struct rows there_scales = { in_window ? writable(info->scales_view) : b->out_scales,
                                       info->scales_view_stride, received->scale_row };
    const struct rows own_scales = { writable(received->scale_base), received->scale_stride,
                                     received->scale_row };

    status = copy_rows(worker, plan, &there, &own, false, error);
    if (status == EP_OK && received->scale_base)
        status = copy_rows(worker, plan, &there_scales, &own_scales, false, error);
    return status;
}

void memory_keep(struct worker *worker, const struct received *received)
{
    if (worker->sizes.out > 0) /* else there is no memory */
        memcpy(worker->kept.rows, received->base, worker->sizes.out);
    if (worker->sizes.out_scales > 0)
        memcpy(worker->kept.scales, received->scale_base, worker->sizes.out_scales);
}

struct received memory_kept(const struct worker *worker, const struct received *received)
{
    struct received kept = *received;

    kept.base = worker->kept.rows;
    kept.scale_base = received->scale_base ? worker->kept.scales : NULL;
    return kept;
}

ep_status memory_send_rows(struct worker *worker, const struct ep_ref_dispatch *plan, const ep_op_info *info,
                           const char *from, uint64_t stride, struct ep_error *error)
{
    const uint64_t row =
        (uint64_t)worker->inputs.hidden * ep_ref_bytes(bench_dtypes[worker->of.dtype].combine);
    const struct buffers *b = &worker->buffers;
    const struct rows own = { writable(from), stride, row };
    const struct rows there = { stride    ? writable(info->view)
                                : b->rows ? b->rows
                                          : b->out,
                                stride ? info->view_stride : 0, row };

    return worker->gpu ? copy_rows(worker, plan, &there, &own, true, error) : EP_OK;
}
